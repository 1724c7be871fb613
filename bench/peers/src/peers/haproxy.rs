//! HAProxy as a peer: one thread, and for each case the minimal configuration that does what the
//! gateway does there.

use std::fmt::Write as _;

use canal_bench_peers::origin::{ADDRESS as ORIGIN, PORT as ORIGIN_PORT};
use canal_bench_peers::process::{PROXY_CORE, PinnedProcess};

use super::{PeerFolders, loopback, write};
use crate::case::{ProxyCase, SERVICES};
use crate::tls_origin;

/// A port that no other proxy of this bench has.
const PORT: u16 = 18_082;

pub(super) fn start(folders: &PeerFolders, case: ProxyCase) -> anyhow::Result<PinnedProcess> {
    // A clear-text `bind` accepts HTTP/1.1 and, by its preface, HTTP/2. All idle connections stay
    // open, however many there are.
    // All proxies use TLS 1.3 with one suite, so that encryption costs each the same. Nobody
    // measured smaller limits.
    let mut conf = String::from(
        "global\n  nbthread 1\n  maxconn 4000\n  ulimit-n 19000\n  tune.pool-high-fd-ratio 95\n  tune.pool-low-fd-ratio 90\n  ssl-default-bind-options \
         ssl-min-ver TLSv1.3\n  ssl-default-bind-ciphersuites TLS_AES_256_GCM_SHA384\n  ssl-default-server-options ssl-min-ver TLSv1.3\n  \
         ssl-default-server-ciphersuites TLS_AES_256_GCM_SHA384\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n  \
         timeout server 60s\n  http-reuse always\n  default-server pool-purge-delay 600s\n",
    );
    // The case of policies measures proxies with an access log.
    if case == ProxyCase::Policies {
        conf.push_str("  log stdout format raw local0\n  option httplog\n");
    }
    // Writing to a String cannot fail, here and below.
    let _ = write!(
        conf,
        "frontend f\n  option forwardfor\n  bind 127.0.0.1:{PORT}"
    );
    let [ours, authority] = ["peer.pem", "ca.pem"].map(|name| folders.certificates.file(name));
    if case.is_tls() {
        let _ = write!(
            conf,
            " ssl crt {ours} ca-file {authority} verify required alpn h2"
        );
    }
    if case.is_large() {
        // Backends have the names of the hosts, because the lookup is by name.
        conf.push_str("\n  use_backend %[req.hdr(host),lower]\n");
        for n in 0..SERVICES {
            let _ = write!(conf, "backend s{n}\n  server s {ORIGIN}:{ORIGIN_PORT}\n");
        }
    } else if case == ProxyCase::Mtls {
        // Of the proxies' cases only this one has mTLS on both sides.
        let server = format!(
            "server s {} ssl crt {ours} ca-file {authority} verify required alpn h2",
            tls_origin::ADDRESS
        );
        let _ = write!(conf, "\n  default_backend b\nbackend b\n  {server}\n");
    } else {
        let _ = write!(
            conf,
            "\n  default_backend b\nbackend b\n  server s {ORIGIN}:{ORIGIN_PORT}\n"
        );
    }
    let conf = write(&folders.dir, "haproxy.cfg", &conf)?;
    let mut argv = folders.newest("haproxy")?;
    argv.extend(["-db", "-f", &conf].map(str::to_owned));
    let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
    PinnedProcess::start(
        &argv,
        PROXY_CORE,
        loopback(PORT),
        &folders.dir.join("haproxy.log"),
    )
}
