//! nginx as a peer: one worker without a master.

use canal_bench_peers::origin::{ADDRESS as ORIGIN, PORT as ORIGIN_PORT};
use canal_bench_peers::process::{PROXY_CORE, PinnedProcess};

use super::{PeerFolders, loopback, write};
use crate::case::ProxyCase;
use crate::tls_origin;

/// A port that no other proxy of this bench has.
const PORT: u16 = 18_083;

pub(super) fn start(folders: &PeerFolders, case: ProxyCase) -> anyhow::Result<PinnedProcess> {
    let d = folders.dir.display();
    let [chain, key, authority] =
        ["peer.crt", "peer.key", "ca.pem"].map(|name| folders.certificates.file(name));
    // All proxies use TLS 1.3 with one suite, so that encryption costs each the same.
    let tls = format!(
        "ssl_certificate {chain}; ssl_certificate_key {key}; ssl_client_certificate {authority}; ssl_verify_client on; ssl_protocols TLSv1.3; \
         ssl_conf_command Ciphersuites TLS_AES_256_GCM_SHA384; proxy_ssl_certificate {chain}; proxy_ssl_certificate_key {key}; \
         proxy_ssl_trusted_certificate {authority}; proxy_ssl_verify on; proxy_ssl_name origin; proxy_ssl_protocols TLSv1.3; \
         proxy_ssl_conf_command Ciphersuites TLS_AES_256_GCM_SHA384;"
    );
    let (listen, tls, origin, scheme, version) = match case {
        ProxyCase::Mtls => ("ssl", tls, tls_origin::ADDRESS.to_string(), "https", "2"),
        // nginx has no other case with TLS.
        _ => (
            "",
            String::new(),
            format!("{ORIGIN}:{ORIGIN_PORT}"),
            "http",
            "1.1",
        ),
    };
    // 4096 connections, 256 idle ones to the origin and endless keep-alive: no proxy may be slowed
    // by reconnects. Nobody measured smaller numbers.
    let conf = format!(
        "daemon off; master_process off; worker_processes 1; error_log {d}/nginx.err; pid {d}/nginx.pid;\n\
         events {{ worker_connections 4096; }}\n\
         http {{ access_log off; keepalive_requests 100000000; client_body_temp_path {d}/nb; proxy_temp_path {d}/np; fastcgi_temp_path {d}/nf;\n\
         uwsgi_temp_path {d}/nu; scgi_temp_path {d}/ns; http2 on;\n\
         upstream o {{ server {origin}; keepalive 256; keepalive_requests 100000000; }}\n\
         server {{ listen 127.0.0.1:{PORT} {listen} backlog=1024; {tls}\n\
         location / {{ proxy_http_version {version}; proxy_set_header Connection \"\"; proxy_pass {scheme}://o; }} }} }}\n"
    );
    // The configuration names temporary folders, because the built-in ones belong to the system.
    let conf = write(&folders.dir, "nginx.conf", &conf)?;
    let early = folders
        .dir
        .join("nginx.early")
        .to_string_lossy()
        .into_owned();
    let mut argv = folders.newest("nginx")?;
    // nginx opens this log before it reads the configuration, which names the other one.
    argv.extend(["-e", &early, "-c", &conf].map(str::to_owned));
    let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
    PinnedProcess::start(
        &argv,
        PROXY_CORE,
        loopback(PORT),
        &folders.dir.join("nginx.log"),
    )
}
