//! How each proxy is configured and started: one worker, one route, access log off, features as they come. No measuring here.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use canal_bench_peers::canal::{self, Build, Door};
use canal_bench_peers::origin::{ADDRESS as ORIGIN, PORT as ORIGIN_PORT};
use canal_bench_peers::process::{PROXY_CORE, Process};

use crate::load::Case;

/// Where programs are found and files are made.
pub(crate) struct Place {
    pub(crate) tools: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) now: Build,
    pub(crate) before: Option<Build>,
}

/// A proxy that can be compared.
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    h2c: bool,
    pub(crate) start: fn(&Place) -> anyhow::Result<Process>,
}

impl Peer {
    pub(crate) fn speaks(&self, case: Case) -> bool {
        case != Case::H2c || self.h2c
    }

    /// A build of Canal.
    pub(crate) fn is_canal(&self) -> bool {
        self.name.starts_with("canal")
    }

    /// The build that this one is compared with.
    pub(crate) fn is_before(&self) -> bool {
        self.name == "canal-before"
    }
}

static PEERS: [Peer; 6] = [
    Peer { name: "canal", h2c: true, start: canal },
    Peer { name: "canal-before", h2c: true, start: canal_before },
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

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

fn nginx(Place { dir, .. }: &Place) -> anyhow::Result<Process> {
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
    Process::start(&["nginx", "-c", &conf], PROXY_CORE, loopback(18_083), &dir.join("nginx.log"))
}

fn haproxy(Place { dir, .. }: &Place) -> anyhow::Result<Process> {
    // A clear-text `bind` takes HTTP/1.1 and, by its preface, HTTP/2.
    let conf = format!(
        "global\n  nbthread 1\n  maxconn 8000\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n  http-reuse always\n\
         frontend f\n  bind 127.0.0.1:18082\n  option forwardfor\n  default_backend b\nbackend b\n  server s {ORIGIN}:{ORIGIN_PORT}\n"
    );
    let conf = write(dir, "haproxy.cfg", &conf)?;
    Process::start(&["haproxy", "-db", "-f", &conf], PROXY_CORE, loopback(18_082), &dir.join("haproxy.log"))
}

fn envoy(Place { tools, dir, .. }: &Place) -> anyhow::Result<Process> {
    let conf = format!(
        "static_resources:\n  listeners:\n  - address: {{socket_address: {{address: 127.0.0.1, port_value: 18084}}}}\n    filter_chains:\n    - filters:\n      - name: hcm\n        typed_config:\n          \
         \"@type\": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager\n          codec_type: AUTO\n          stat_prefix: i\n          \
         route_config: {{virtual_hosts: [{{name: v, domains: [\"*\"], routes: [{{match: {{prefix: \"/\"}}, route: {{cluster: o}}}}]}}]}}\n          \
         http_filters: [{{name: router, typed_config: {{\"@type\": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}}}]\n  \
         clusters:\n  - name: o\n    type: STATIC\n    load_assignment: {{cluster_name: o, endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: {ORIGIN}, port_value: {ORIGIN_PORT}}}}}}}}}]}}]}}\n"
    );
    let conf = write(dir, "envoy.yaml", &conf)?;
    let bin = tools.join("envoy/bin/envoy");
    anyhow::ensure!(bin.exists(), "{} is missing: run setup/install bench", bin.display());
    let bin = bin.to_string_lossy().into_owned();
    Process::start(
        &[&bin, "--concurrency", "1", "--use-dynamic-base-id", "-l", "error", "-c", &conf],
        PROXY_CORE,
        loopback(18_084),
        &dir.join("envoy.log"),
    )
}

fn canal(place: &Place) -> anyhow::Result<Process> {
    canal_with(&place.now, &place.dir, ("canal", 1, 1), 18_081)
}

fn canal_before(place: &Place) -> anyhow::Result<Process> {
    let before = place.before.as_ref().unwrap_or(&place.now);
    canal_with(before, &place.dir, ("canal-before", 1, 1), 18_089)
}

/// 10,000 services x 10 routes loaded; the requests go to one of them.
fn canal_100k(place: &Place) -> anyhow::Result<Process> {
    canal_with(&place.now, &place.dir, ("canal-100k", 10_000, 10), 18_085)
}

fn canal_with(build: &Build, dir: &Path, (name, services, routes): (&str, usize, usize), port: u16) -> anyhow::Result<Process> {
    let snapshot = dir.join(format!("{name}.snapshot"));
    if !snapshot.exists() {
        let config = dir.join(name).join("bench");
        std::fs::create_dir_all(&config)?;
        std::fs::write(config.join("tenant.yaml"), canal::tenant("bench", 1, ""))?;
        let prefixes = || (1..routes).map(|r| format!("/api/v{r}/things")).chain([String::from("/")]);
        for (n, chunk) in (0..services).collect::<Vec<_>>().chunks(500).enumerate() {
            let text: String = chunk.iter().map(|s| canal::service(*s, prefixes())).collect();
            std::fs::write(config.join(format!("services-{n}.yaml")), text)?;
        }
        build.compile(&dir.join(name), &snapshot)?;
    }
    build.start(dir, &snapshot, &[Door { address: loopback(port), tenant: "bench".into() }])
}
