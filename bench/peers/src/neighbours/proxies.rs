//! Configuration of each proxy for the same tenants: one worker, an address for each tenant, one
//! route, access log off. It measures nothing.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use canal_bench_peers::canal::{self, BenchListener, Build};
use canal_bench_peers::origin;
use canal_bench_peers::process::{PROXY_CORE, PinnedProcess};

/// The route that leads to the origin; a proxy responds 404 to all other paths.
pub(crate) const ROUTE: &str = "/api";

/// A proxy that can be measured.
pub(crate) struct Proxy {
    pub(crate) name: &'static str,
    port: u16,
    start: fn(&ProxyFolders, &[SocketAddr]) -> anyhow::Result<PinnedProcess>,
}

/// Folders of the programs and of temporary files.
pub(crate) struct ProxyFolders {
    pub(crate) envoy: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) build: Build,
}

pub(crate) static ALL: [Proxy; 3] = [
    Proxy {
        name: "canal",
        port: 18_081,
        start: canal,
    },
    Proxy {
        name: "haproxy",
        port: 18_082,
        start: haproxy,
    },
    Proxy {
        name: "envoy",
        port: 18_084,
        start: envoy,
    },
];

impl Proxy {
    /// Returns the address of each tenant.
    pub(crate) fn addresses(&self, tenants: u8) -> Vec<SocketAddr> {
        (1..=tenants)
            .map(|n| SocketAddr::from((Ipv4Addr::new(127, 0, 1, n), self.port)))
            .collect()
    }

    pub(crate) fn start(
        &self,
        folders: &ProxyFolders,
        addresses: &[SocketAddr],
    ) -> anyhow::Result<PinnedProcess> {
        (self.start)(folders, addresses)
    }
}

fn canal(folders: &ProxyFolders, addresses: &[SocketAddr]) -> anyhow::Result<PinnedProcess> {
    let snapshot = folders.dir.join("canal.snapshot");
    // Numbers start at 2, because the first tenant has another range of services.
    let tenant_listeners: Vec<_> = (2..=u8::MAX)
        .zip(addresses)
        .map(|(n, address)| {
            (
                n,
                BenchListener {
                    address: *address,
                    tenant: format!("t{n}"),
                },
            )
        })
        .collect();
    if !snapshot.exists() {
        for (number, listener) in &tenant_listeners {
            let config = folders.dir.join("tenants").join(&listener.tenant);
            std::fs::create_dir_all(&config)?;
            let text =
                canal::tenant(&listener.tenant, *number, "") + &canal::only_service(*number, ROUTE);
            std::fs::write(config.join("bench.yaml"), text)?;
        }
        folders
            .build
            .compile(&folders.dir.join("tenants"), &snapshot)?;
    }
    let tenant_listeners: Vec<_> = tenant_listeners
        .into_iter()
        .map(|(_, listener)| listener)
        .collect();
    folders
        .build
        .start(&folders.dir, &snapshot, &tenant_listeners)
}

fn haproxy(folders: &ProxyFolders, addresses: &[SocketAddr]) -> anyhow::Result<PinnedProcess> {
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
    let path = write(&folders.dir, "haproxy.cfg", &conf)?;
    PinnedProcess::start(
        &["haproxy", "-db", "-f", &path],
        PROXY_CORE,
        last(addresses)?,
        &folders.dir.join("haproxy.log"),
    )
}

fn envoy(folders: &ProxyFolders, addresses: &[SocketAddr]) -> anyhow::Result<PinnedProcess> {
    let (ip, port) = (origin::ADDRESS, origin::PORT);
    let (mut listeners, mut clusters) = (String::new(), String::new());
    // Each tenant has a listener and a cluster of its own, as separate tenants have.
    for (n, address) in addresses.iter().enumerate() {
        // Writing to a String cannot fail, here and below.
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
    let path = write(
        &folders.dir,
        "envoy.yaml",
        &format!("static_resources:\n  listeners:\n{listeners}  clusters:\n{clusters}"),
    )?;
    anyhow::ensure!(
        folders.envoy.exists(),
        "{} is missing; fix: run setup/install bench",
        folders.envoy.display()
    );
    let program = folders.envoy.to_string_lossy().into_owned();
    let argv = [
        &program,
        "--concurrency",
        "1",
        // Otherwise it shares memory with another Envoy of this machine.
        "--use-dynamic-base-id",
        "-l",
        "error",
        "-c",
        &path,
    ];
    // The last listener is the last that opens, so the start waits for it.
    PinnedProcess::start(
        &argv,
        PROXY_CORE,
        last(addresses)?,
        &folders.dir.join("envoy.log"),
    )
}

fn write(dir: &Path, name: &str, text: &str) -> anyhow::Result<String> {
    let path = dir.join(name);
    std::fs::write(&path, text)?;
    Ok(path.to_string_lossy().into_owned())
}

fn last(addresses: &[SocketAddr]) -> anyhow::Result<SocketAddr> {
    addresses
        .last()
        .copied()
        .ok_or_else(|| anyhow::anyhow!("there is no tenant"))
}
