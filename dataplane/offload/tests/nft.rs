//! Tests the nftables fallback against real sockets in a namespace without any BPF.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use crate::lab;
use crate::lab::{CaseProcess, Cgroup, LabNetns, close};
use canal_offload::nft::{Redirect, original_destination};

/// The proxy's socket mark (`canal_wire::hbone::PROXY_MARK`).
const MARK: u32 = 0x539;

/// Entry of the child process.
#[test]
fn the_client() {
    if let Some(c) = lab::case() {
        lab::client::run(&c);
    }
}

fn answer(l: &TcpListener) -> String {
    socket2::SockRef::from(l)
        .set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(5))))
        .unwrap();
    let (mut s, _) = l.accept().unwrap();
    let origin = original_destination(&s, s.local_addr().unwrap());
    let mut hi = [0; 2];
    s.read_exact(&mut hi).unwrap();
    let said = origin.map_or_else(|_| "none".to_string(), |o| o.to_string());
    s.write_all(said.as_bytes()).unwrap();
    said
}

#[test]
fn tcp_is_redirected_and_the_destination_is_known() {
    let ns = LabNetns::new();
    // Without a route connect() would fail before a packet reaches the hook. The veth's peer is
    // down, so nothing can leave.
    ns.ip("route add default dev pod0");
    ns.ip("-6 route add default dev pod0");
    let cgroup = Cgroup::new();
    Redirect::apply(&ns.path(), &cgroup.dir, &[MARK]).unwrap();
    // The second call replaces the same rules.
    let again = Redirect::apply(&ns.path(), &cgroup.dir, &[MARK]).unwrap();
    assert_eq!(again.netns(), ns.path());
    let (v4, v6) = (ns.listen("127.0.0.1:15001"), ns.listen("[::1]:15001"));
    // The proxies' own ports are no exception at other addresses.
    for (to, l) in [
        ("10.96.0.1:80", &v4),
        ("10.96.0.1:15001", &v4),
        ("10.96.0.1:15008", &v4),
        ("[fd00::1]:80", &v6),
        ("[::ffff:10.96.0.1]:80", &v4),
        ("10.77.0.2:80", &v4),
    ] {
        let mut app = CaseProcess::start(&ns, None, "dial", &[to]);
        let origin = to.replace("[::ffff:10.96.0.1]", "10.96.0.1");
        assert_eq!(answer(l), origin, "{to}");
        let said = app.line();
        assert!(
            said.starts_with(&format!("peer={to} ")) && said.ends_with(&format!("reply={origin}")),
            "{to}: {said}"
        );
    }

    let other = ns.listen("127.0.0.1:80");
    let mut app = CaseProcess::start(&ns, None, "dial", &["127.0.0.1:80"]);
    assert_eq!(
        answer(&other),
        "none",
        "loopback is left alone, and its own port is no origin"
    );
    app.line();
    let mut app = CaseProcess::start(&ns, None, "dial", &["127.0.0.1:15001"]);
    assert_eq!(answer(&v4), "none", "dialled by hand: the proxy resets it");
    app.line();

    // The proxy's own mark exempts a connection; here it goes to the pod's own address, which has a
    // listener.
    let own = ns.listen("10.77.0.2:81");
    let mut app = CaseProcess::start(&ns, None, "dial", &["10.77.0.2:81", "mark"]);
    assert_eq!(answer(&own), "none");
    app.line();

    // A process in the pod's cgroup sets the same mark with CAP_NET_RAW alone, which any container
    // may have.
    for (to, l) in [("10.77.0.2:81", &v4), ("[fd77::2]:81", &v6)] {
        let mut app = CaseProcess::start(&ns, Some(&cgroup), "dial", &[to, "net_raw", "mark"]);
        assert_eq!(answer(l), to, "a pod's own mark buys nothing");
        assert!(app.line().ends_with(&format!("reply={to}")), "{to}");
    }

    close(v4);
    close(v6);
    assert_eq!(
        CaseProcess::start(&ns, None, "dial", &["10.96.0.1:80"]).line(),
        "error ConnectionRefused Some(111)",
        "no proxy: refused"
    );
    // The second call finds no table, which is no error.
    Redirect::remove(&ns.path()).unwrap();
    Redirect::remove(&ns.path()).unwrap();
    let mut app = CaseProcess::start(&ns, None, "dial", &["10.77.0.2:81"]);
    assert_eq!(answer(&own), "none", "let go");
    app.line();
}

#[test]
fn refusals_name_the_namespace() {
    let e = Redirect::apply(
        "/run/netns/canal-offload-none".as_ref(),
        &Cgroup::new().dir,
        &[MARK],
    )
    .unwrap_err()
    .to_string();
    assert!(
        e.contains("/run/netns/canal-offload-none") && e.contains("namespace"),
        "{e}"
    );
}
