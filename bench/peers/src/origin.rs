//! The origin behind every proxy: nginx, which responds with 23 bytes to everything.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use crate::process::{LOAD_CORE, PinnedProcess};

/// Network of the origin on the namespace's loopback device: a tenant's pod cannot have 127.0.0.1,
/// nor another tenant's address.
pub const NETWORK: &str = "10.99.0.1/16";
/// Address of the first tenant's origin, which no other tenant has.
pub const ADDRESS: Ipv4Addr = address(1);

/// Returns the address of the origin as the pod of a tenant, by the tenant's number.
pub const fn address(tenant: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 99, tenant, 1)
}

/// A port that no proxy of this bench has.
pub const PORT: u16 = 18_090;

/// Starts the origin on the load's core.
pub fn start(dir: &Path) -> anyhow::Result<PinnedProcess> {
    let d = dir.display();
    let conf = format!(
        "daemon off; master_process off; worker_processes 1; error_log {d}/origin.err; pid {d}/origin.pid;\n\
         events {{ worker_connections 16000; }}\n\
         http {{ access_log off; keepalive_requests 100000000; keepalive_timeout 1h; client_body_temp_path {d}/ob; proxy_temp_path {d}/op; fastcgi_temp_path {d}/of;\n\
         uwsgi_temp_path {d}/ou; scgi_temp_path {d}/os;\n\
         server {{ listen {PORT} backlog=1024; location / {{ return 200 \"0123456789012345678901\\n\"; }} }} }}\n"
    );
    let path = dir.join("origin.conf");
    std::fs::write(&path, conf)?;
    let argv = ["nginx", "-c", &path.to_string_lossy()];
    PinnedProcess::start(
        &argv,
        LOAD_CORE,
        SocketAddr::from((ADDRESS, PORT)),
        &dir.join("origin.log"),
    )
}
