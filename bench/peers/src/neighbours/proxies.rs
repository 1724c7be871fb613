//! How each proxy serves the same tenants: one worker, an address for each tenant, one route, access log off. No measuring here.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use canal_bench_peers::canal::{self, Build, Door};
use canal_bench_peers::origin;
use canal_bench_peers::process::{PROXY_CORE, Process};

/// The route that leads to the origin; a proxy answers 404 to all else.
pub(crate) const ROUTE: &str = "/api";

/// A proxy that can be measured.
pub(crate) struct Proxy {
    pub(crate) name: &'static str,
    port: u16,
    start: fn(&Place, &[SocketAddr]) -> anyhow::Result<Process>,
}

/// Where programs are found and files are made.
pub(crate) struct Place {
    pub(crate) envoy: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) build: Build,
}

pub(crate) static ALL: [Proxy; 3] = [
    Proxy { name: "canal", port: 18_081, start: canal },
    Proxy { name: "haproxy", port: 18_082, start: haproxy },
    Proxy { name: "envoy", port: 18_084, start: envoy },
];

impl Proxy {
    /// Where each of so many tenants is served.
    pub(crate) fn addresses(&self, tenants: u8) -> Vec<SocketAddr> {
        (1..=tenants).map(|n| SocketAddr::from((Ipv4Addr::new(127, 0, 1, n), self.port))).collect()
    }

    pub(crate) fn start(&self, place: &Place, addresses: &[SocketAddr]) -> anyhow::Result<Process> {
        (self.start)(place, addresses)
    }
}

fn canal(place: &Place, addresses: &[SocketAddr]) -> anyhow::Result<Process> {
    let snapshot = place.dir.join("canal.snapshot");
    // Numbers from 2: the first tenant's range of services is another one.
    let doors: Vec<_> = (2..=u8::MAX).zip(addresses).map(|(n, address)| (n, Door { address: *address, tenant: format!("t{n}") })).collect();
    if !snapshot.exists() {
        for (number, door) in &doors {
            let config = place.dir.join("tenants").join(&door.tenant);
            std::fs::create_dir_all(&config)?;
            let text = canal::tenant(&door.tenant, *number, "") + &canal::only_service(*number, ROUTE);
            std::fs::write(config.join("bench.yaml"), text)?;
        }
        place.build.compile(&place.dir.join("tenants"), &snapshot)?;
    }
    let doors: Vec<_> = doors.into_iter().map(|(_, door)| door).collect();
    place.build.start(&place.dir, &snapshot, &doors)
}

fn haproxy(place: &Place, addresses: &[SocketAddr]) -> anyhow::Result<Process> {
    let (ip, port) = (origin::ADDRESS, origin::PORT);
    let mut conf = String::from(
        "global\n  nbthread 1\n  maxconn 8000\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n  http-reuse always\n",
    );
    for (n, address) in addresses.iter().enumerate() {
        let _ = write!(
            conf,
            "frontend f{n}\n  bind {address}\n  option forwardfor\n  http-request return status 404 if !{{ path_beg {ROUTE} }}\n  default_backend b{n}\n\
             backend b{n}\n  server s {ip}:{port}\n"
        );
    }
    let path = write(&place.dir, "haproxy.cfg", &conf)?;
    Process::start(&["haproxy", "-db", "-f", &path], PROXY_CORE, last(addresses)?, &place.dir.join("haproxy.log"))
}

fn envoy(place: &Place, addresses: &[SocketAddr]) -> anyhow::Result<Process> {
    let (ip, port) = (origin::ADDRESS, origin::PORT);
    let (mut listeners, mut clusters) = (String::new(), String::new());
    for (n, address) in addresses.iter().enumerate() {
        let _ = write!(
            listeners,
            "  - address: {{socket_address: {{address: {}, port_value: {}}}}}\n    filter_chains:\n    - filters:\n      - name: hcm\n        typed_config:\n          \
             \"@type\": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager\n          stat_prefix: t{n}\n          \
             route_config: {{virtual_hosts: [{{name: v, domains: [\"*\"], routes: [{{match: {{prefix: \"{ROUTE}\"}}, route: {{cluster: t{n}}}}}]}}]}}\n          \
             http_filters: [{{name: router, typed_config: {{\"@type\": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}}}]\n",
            address.ip(),
            address.port()
        );
        let _ = writeln!(
            clusters,
            "  - name: t{n}\n    type: STATIC\n    load_assignment: {{cluster_name: t{n}, endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: \
             {{address: {ip}, port_value: {port}}}}}}}}}]}}]}}"
        );
    }
    let path = write(&place.dir, "envoy.yaml", &format!("static_resources:\n  listeners:\n{listeners}  clusters:\n{clusters}"))?;
    anyhow::ensure!(place.envoy.exists(), "{} is missing: run setup/install bench", place.envoy.display());
    let program = place.envoy.to_string_lossy().into_owned();
    let argv = [&program, "--concurrency", "1", "--use-dynamic-base-id", "-l", "error", "-c", &path];
    Process::start(&argv, PROXY_CORE, last(addresses)?, &place.dir.join("envoy.log"))
}

fn write(dir: &Path, name: &str, text: &str) -> anyhow::Result<String> {
    let path = dir.join(name);
    std::fs::write(&path, text)?;
    Ok(path.to_string_lossy().into_owned())
}

fn last(addresses: &[SocketAddr]) -> anyhow::Result<SocketAddr> {
    addresses.last().copied().ok_or_else(|| anyhow::anyhow!("there is no tenant"))
}
