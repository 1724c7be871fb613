//! How each proxy is configured and started: one worker, one route, access log off, features as they come. No measuring here.

use std::path::Path;

use crate::load::Case;
use crate::process::{LOAD_CORE, PROXY_CORE, Process};

/// The origin's address, on the namespace's loopback device: a tenant's pod cannot have 127.0.0.1.
pub(crate) const ORIGIN: &str = "10.99.0.1";
const ORIGIN_PORT: u16 = 18_090;

/// A proxy that can be compared.
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    h2c: bool,
    pub(crate) start: fn(root: &Path, dir: &Path) -> anyhow::Result<Process>,
}

impl Peer {
    pub(crate) fn speaks(&self, case: Case) -> bool {
        case != Case::H2c || self.h2c
    }
}

static PEERS: [Peer; 5] = [
    Peer { name: "canal", h2c: true, start: canal },
    Peer { name: "canal-100k", h2c: false, start: canal_100k },
    Peer { name: "haproxy", h2c: true, start: haproxy },
    // Debian's nginx 1.22 cannot take h2c and HTTP/1.1 on one port.
    Peer { name: "nginx", h2c: false, start: nginx },
    Peer { name: "envoy", h2c: true, start: envoy },
];

pub(crate) fn all() -> impl Iterator<Item = &'static Peer> {
    PEERS.iter()
}

fn write(dir: &Path, name: &str, text: &str) -> anyhow::Result<String> {
    let path = dir.join(name);
    std::fs::write(&path, text)?;
    Ok(path.to_string_lossy().into_owned())
}

/// nginx that answers 23 bytes to everything.
pub(crate) fn start_origin(dir: &Path) -> anyhow::Result<Process> {
    let d = dir.display();
    let conf = format!(
        "daemon off; master_process off; worker_processes 1; error_log {d}/origin.err; pid {d}/origin.pid;\n\
         events {{ worker_connections 4096; }}\n\
         http {{ access_log off; keepalive_requests 100000000; client_body_temp_path {d}/ob; proxy_temp_path {d}/op; fastcgi_temp_path {d}/of;\n\
         uwsgi_temp_path {d}/ou; scgi_temp_path {d}/os;\n\
         server {{ listen {ORIGIN_PORT} backlog=1024; location / {{ return 200 \"0123456789012345678901\\n\"; }} }} }}\n"
    );
    let conf = write(dir, "origin.conf", &conf)?;
    Process::start(&["nginx", "-c", &conf], LOAD_CORE, ORIGIN_PORT, &dir.join("origin.log"))
}

fn nginx(_: &Path, dir: &Path) -> anyhow::Result<Process> {
    let d = dir.display();
    let conf = format!(
        "daemon off; master_process off; worker_processes 1; error_log {d}/nginx.err; pid {d}/nginx.pid;\n\
         events {{ worker_connections 4096; }}\n\
         http {{ access_log off; keepalive_requests 100000000; client_body_temp_path {d}/nb; proxy_temp_path {d}/np; fastcgi_temp_path {d}/nf;\n\
         uwsgi_temp_path {d}/nu; scgi_temp_path {d}/ns;\n\
         upstream o {{ server {ORIGIN}:{ORIGIN_PORT}; keepalive 256; keepalive_requests 100000000; }}\n\
         server {{ listen 127.0.0.1:18083 backlog=1024; location / {{ proxy_http_version 1.1; proxy_set_header Connection \"\"; proxy_pass http://o; }} }} }}\n"
    );
    let conf = write(dir, "nginx.conf", &conf)?;
    Process::start(&["nginx", "-c", &conf], PROXY_CORE, 18_083, &dir.join("nginx.log"))
}

fn haproxy(_: &Path, dir: &Path) -> anyhow::Result<Process> {
    // A clear-text `bind` takes HTTP/1.1 and, by its preface, HTTP/2.
    let conf = format!(
        "global\n  nbthread 1\n  maxconn 8000\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n  http-reuse always\n\
         frontend f\n  bind 127.0.0.1:18082\n  option forwardfor\n  default_backend b\nbackend b\n  server s {ORIGIN}:{ORIGIN_PORT}\n"
    );
    let conf = write(dir, "haproxy.cfg", &conf)?;
    Process::start(&["haproxy", "-db", "-f", &conf], PROXY_CORE, 18_082, &dir.join("haproxy.log"))
}

fn envoy(root: &Path, dir: &Path) -> anyhow::Result<Process> {
    let conf = format!(
        "static_resources:\n  listeners:\n  - address: {{socket_address: {{address: 127.0.0.1, port_value: 18084}}}}\n    filter_chains:\n    - filters:\n      - name: hcm\n        typed_config:\n          \
         \"@type\": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager\n          codec_type: AUTO\n          stat_prefix: i\n          \
         route_config: {{virtual_hosts: [{{name: v, domains: [\"*\"], routes: [{{match: {{prefix: \"/\"}}, route: {{cluster: o}}}}]}}]}}\n          \
         http_filters: [{{name: router, typed_config: {{\"@type\": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}}}]\n  \
         clusters:\n  - name: o\n    type: STATIC\n    load_assignment: {{cluster_name: o, endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: {ORIGIN}, port_value: {ORIGIN_PORT}}}}}}}}}]}}]}}\n"
    );
    let conf = write(dir, "envoy.yaml", &conf)?;
    let bin = root.join(".tools/envoy/bin/envoy");
    anyhow::ensure!(bin.exists(), "{} is missing: run setup/install bench", bin.display());
    let bin = bin.to_string_lossy().into_owned();
    Process::start(
        &[&bin, "--concurrency", "1", "--use-dynamic-base-id", "-l", "error", "-c", &conf],
        PROXY_CORE,
        18_084,
        &dir.join("envoy.log"),
    )
}

fn canal(root: &Path, dir: &Path) -> anyhow::Result<Process> {
    canal_with(root, dir, 1, 1, 18_081)
}

/// 10,000 services x 10 routes loaded; the requests go to one of them.
fn canal_100k(root: &Path, dir: &Path) -> anyhow::Result<Process> {
    canal_with(root, dir, 10_000, 10, 18_085)
}

fn canal_with(root: &Path, dir: &Path, services: usize, routes: usize, port: u16) -> anyhow::Result<Process> {
    let snapshot = dir.join(format!("canal-{services}.snapshot"));
    if !snapshot.exists() {
        let config = dir.join(format!("canal-{services}/bench"));
        std::fs::create_dir_all(&config)?;
        std::fs::write(config.join("tenant.yaml"), tenant())?;
        for (n, chunk) in (0..services).collect::<Vec<_>>().chunks(500).enumerate() {
            let text: String = chunk.iter().map(|s| service(*s, routes)).collect();
            std::fs::write(config.join(format!("services-{n}.yaml")), text)?;
        }
        let status = std::process::Command::new(root.join("target/release/canal"))
            .args(["compile", &config.parent().unwrap_or(dir).to_string_lossy(), "--snapshot", &snapshot.to_string_lossy()])
            .status()?;
        anyhow::ensure!(status.success(), "canal compile failed");
    }
    let bin = root.join("target/release/canal-gateway").to_string_lossy().into_owned();
    let plain = format!("127.0.0.1:{port}=bench/default/s0:80");
    let data = dir.join("canal-data").to_string_lossy().into_owned();
    let argv = [
        &bin,
        "--replica",
        "bench",
        "--az",
        "az1",
        "--workers",
        "1",
        "--data-dir",
        &data,
        "--snapshot",
        &snapshot.to_string_lossy(),
        "--plain",
        &plain,
        "--admin-addr",
        "127.0.0.1:18086",
        "--metrics-addr",
        "127.0.0.1:18087",
        "--readiness-addr",
        "127.0.0.1:18088",
        "--access-log",
        "off",
    ];
    Process::start(&argv, PROXY_CORE, port, &dir.join("canal.log"))
}

fn tenant() -> String {
    format!(
        "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {{name: bench}}\nspec: {{vni: 1, trustDomain: bench.example, podCidrs: [10.99.0.0/24], serviceCidrs: [10.64.0.0/12]}}\n---\n\
         apiVersion: v1\nkind: Pod\nmetadata: {{name: origin, namespace: default, labels: {{app: origin}}, annotations: {{canal.mesh/tunnel: none, canal.mesh/az: az1}}}}\n\
         spec: {{nodeName: n1, serviceAccountName: origin, containers: [{{name: c, ports: [{{containerPort: {ORIGIN_PORT}}}]}}]}}\n\
         status: {{podIP: {ORIGIN}, podIPs: [{{ip: {ORIGIN}}}], conditions: [{{type: Ready, status: \"True\"}}]}}\n"
    )
}

fn service(n: usize, routes: usize) -> String {
    let (hi, mid, lo) = (64 + (n >> 16), (n >> 8) & 255, n & 255);
    let mut out = format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s{n}, namespace: default}}\nspec:\n  clusterIP: 10.{hi}.{mid}.{lo}\n  selector: {{app: origin}}\n  \
         ports: [{{name: http, port: 80, targetPort: {ORIGIN_PORT}}}]\n---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: s{n}, namespace: default}}\nspec:\n  \
         parentRefs: [{{kind: Service, group: \"\", name: s{n}, port: 80}}]\n  rules:\n"
    );
    for r in 1..routes {
        out.push_str(&format!(
            "  - matches: [{{path: {{type: PathPrefix, value: /api/v{r}/things}}}}]\n    backendRefs: [{{name: s{n}, port: 80}}]\n"
        ));
    }
    out.push_str(&format!("  - matches: [{{path: {{type: PathPrefix, value: /}}}}]\n    backendRefs: [{{name: s{n}, port: 80}}]\n"));
    out
}
