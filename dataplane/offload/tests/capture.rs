//! Tests `bpf/capture.bpf.c` against real sockets: which connections are captured, what the proxy
//! learns, and what the application sees.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use crate::lab;
use crate::lab::{CaseProcess, Cgroup, LabNetns, pause, print_line};
use canal_offload::capture::{
    CaptureOptions, CapturePrograms, CgroupState, cgroup_state, release_all,
};
use canal_offload::netns_cookie;

const V4: &str = "127.0.0.1:15001";
const V6: &str = "[::1]:15001";

/// Entry of the child process, which runs its case. In an ordinary run there is no case.
#[test]
fn the_client() {
    match lab::case() {
        Some(c) if c[0] == "proxy" => proxy_until_killed(&c[1]),
        Some(c) => lab::client::run(&c),
        None => {}
    }
}

fn load() -> CapturePrograms {
    CapturePrograms::load(&CaptureOptions::default()).unwrap()
}

fn count(c: &CapturePrograms, name: &str) -> u64 {
    c.counters()
        .unwrap()
        .into_iter()
        .find(|(n, _)| n == name)
        .unwrap_or_else(|| panic!("no counter {name}"))
        .1
}

/// Accepts one connection as the proxy does and answers with its original destination.
fn answer(l: &TcpListener, c: &CapturePrograms) -> Option<SocketAddr> {
    let (mut s, peer) = l.accept().unwrap();
    let origin = c
        .origins()
        .take(netns_cookie(l).unwrap(), peer, s.local_addr().unwrap().ip());
    let mut hi = [0; 2];
    s.read_exact(&mut hi).unwrap();
    s.write_all(origin.map_or("none".into(), |o| o.to_string()).as_bytes())
        .unwrap();
    origin
}

/// Address where the proxy listens for a pod that has an entry.
const ANY: &str = "[::]:15001";

/// Writes the entry of the pod in `ns`, for tenant 1.
fn put_pod(ns: &LabNetns, c: &CapturePrograms) -> u64 {
    c.tables()
        .put_pod(
            &ns.path(),
            &["10.77.0.2".parse().unwrap(), "fd77::2".parse().unwrap()],
            1,
        )
        .unwrap()
}

/// Case, address, options of the dial, and the expected getpeername, getsockname address, origin
/// and verdict.
type CapturePathCase = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    &'static str,
);
const WAYS: [CapturePathCase; 15] = [
    (
        "v4",
        "10.96.0.1:80",
        "",
        "10.96.0.1:80",
        "10.77.0.2",
        "10.96.0.1:80",
        "taken_v4",
    ),
    (
        "v6",
        "[fd00::1]:80",
        "",
        "[fd00::1]:80",
        "fd77::2",
        "[fd00::1]:80",
        "taken_v6",
    ),
    (
        "v4-mapped",
        "[::ffff:10.96.0.1]:443",
        "",
        "[::ffff:10.96.0.1]:443",
        "::ffff:10.77.0.2",
        "10.96.0.1:443",
        "taken_mapped",
    ),
    (
        "not blocking",
        "10.96.0.1:81",
        "nonblocking",
        "10.96.0.1:81",
        "10.77.0.2",
        "10.96.0.1:81",
        "taken_v4",
    ),
    (
        "bound to the pod's address",
        "10.96.0.1:82",
        "bind=10.77.0.2:0",
        "10.96.0.1:82",
        "10.77.0.2",
        "10.96.0.1:82",
        "taken_v4",
    ),
    (
        "bound to the pod's IPv6 address",
        "[fd00::1]:82",
        "bind=[fd77::2]:0",
        "[fd00::1]:82",
        "fd77::2",
        "[fd00::1]:82",
        "taken_v6",
    ),
    (
        "bound to loopback, which stays as chosen",
        "10.96.0.1:88",
        "bind=127.0.0.1:0",
        "10.96.0.1:88",
        "127.0.0.1",
        "10.96.0.1:88",
        "taken_v4",
    ),
    (
        "bound to the pod's interface",
        "10.96.0.1:83",
        "device=pod0",
        "10.96.0.1:83",
        "10.77.0.2",
        "10.96.0.1:83",
        "taken_v4",
    ),
    (
        "with the proxy's own mark: it buys nothing",
        "10.96.0.1:84",
        "mark",
        "10.96.0.1:84",
        "10.77.0.2",
        "10.96.0.1:84",
        "taken_v4",
    ),
    (
        "MSG_FASTOPEN",
        "10.96.0.1:85",
        "fastopen",
        "10.96.0.1:85",
        "10.77.0.2",
        "10.96.0.1:85",
        "taken_v4",
    ),
    (
        "TCP_FASTOPEN_CONNECT",
        "10.96.0.1:86",
        "fastopen_connect",
        "10.96.0.1:86",
        "10.77.0.2",
        "10.96.0.1:86",
        "taken_v4",
    ),
    (
        "the proxy's port of another host: no exception by port",
        "10.96.0.1:15001",
        "",
        "10.96.0.1:15001",
        "10.77.0.2",
        "10.96.0.1:15001",
        "taken_v4",
    ),
    (
        "the pod's own address",
        "10.77.0.2:80",
        "",
        "10.77.0.2:80",
        "10.77.0.2",
        "10.77.0.2:80",
        "taken_v4",
    ),
    (
        "MPTCP, whose names another socket returns",
        "10.96.0.1:87",
        "mptcp",
        "10.96.0.1:87",
        "10.77.0.2",
        "10.96.0.1:87",
        "taken_v4",
    ),
    (
        "MPTCP over IPv6",
        "[fd00::1]:87",
        "mptcp",
        "[fd00::1]:87",
        "fd77::2",
        "[fd00::1]:87",
        "taken_v6",
    ),
];

#[test]
fn every_outbound_connection_is_captured_transparently() {
    let (ns, cg, c) = (LabNetns::new(), Cgroup::new(), load());
    put_pod(&ns, &c);
    let _pod = c.attach("a/b/pod", &cg.dir).unwrap();
    let l = ns.listen(ANY);
    for (case, to, how, peer, local, origin, verdict) in WAYS {
        let before = (count(&c, verdict), count(&c, "published"));
        let mut app = CaseProcess::start(&ns, Some(&cg), "dial", &[to, how]);
        assert_eq!(answer(&l, &c), Some(origin.parse().unwrap()), "{case}");
        assert_eq!(
            app.line(),
            format!("peer={peer} local={local} reply={origin}"),
            "{case}"
        );
        assert_eq!(
            (count(&c, verdict), count(&c, "published")),
            (before.0 + 1, before.1 + 1),
            "{case}"
        );
    }
    assert_eq!(c.origins().waiting(), 0);
}

#[test]
fn pod_without_an_entry_is_taken_to_loopback() {
    let (ns, cg, c) = (LabNetns::new(), Cgroup::new(), load());
    let _pod = c.attach("a/b/pod", &cg.dir).unwrap();
    let (v4, v6) = (ns.listen(V4), ns.listen(V6));
    for (to, local, l) in [
        ("10.96.0.1:80", "127.0.0.1", &v4),
        ("[fd00::1]:80", "::1", &v6),
    ] {
        let mut app = CaseProcess::start(&ns, Some(&cg), "dial", &[to]);
        assert_eq!(answer(l, &c), Some(to.parse().unwrap()));
        assert_eq!(app.line(), format!("peer={to} local={local} reply={to}"));
    }
}

/// The pod's address is bound in some cases: the replies go over loopback in every case.
#[test]
fn one_source_port_leads_to_several_destinations_at_once() {
    let (ns, cg, c) = (LabNetns::new(), Cgroup::new(), load());
    put_pod(&ns, &c);
    let _pod = c.attach("a/b/pod", &cg.dir).unwrap();
    let l = ns.listen(ANY);
    // Each case has a port of its own, so that no connection of an earlier case is in its way.
    for (from, to) in [
        (
            "0.0.0.0:4711",
            ["10.96.0.1:7000", "10.96.0.1:7002", "10.96.0.2:7000"],
        ),
        (
            "10.77.0.2:4712",
            ["10.96.0.1:7000", "10.96.0.1:7002", "10.96.0.2:7000"],
        ),
        (
            "[::]:4713",
            [
                "[fd00::1]:7000",
                "[fd00::1]:7002",
                "[::ffff:10.96.0.2]:7000",
            ],
        ),
        (
            "[fd77::2]:4714",
            ["[fd00::1]:7000", "[fd00::1]:7002", "[fd00::2]:7000"],
        ),
    ] {
        let mut app = CaseProcess::start(
            &ns,
            Some(&cg),
            "from_one_port",
            &[from, to[0], to[1], to[2]],
        );
        let origins = to.map(|_| {
            answer(&l, &c)
                .map(|origin| origin.to_string())
                .unwrap_or_default()
        });
        // A mapped destination is published as IPv4.
        let wanted = to.map(|to| to.replace("[::ffff:10.96.0.2]", "10.96.0.2"));
        assert_eq!(origins, wanted, "{from}");
        assert_eq!(app.line(), wanted.join(" "), "{from}");
    }
    assert_eq!(c.origins().waiting(), 0);
}

#[test]
fn loopback_and_udp_are_left_alone() {
    let (ns, cg, c) = (LabNetns::new(), Cgroup::new(), load());
    let _pod = c.attach("a/b/pod", &cg.dir).unwrap();
    for (listen, dial, peer, counter) in [
        (
            "127.0.0.1:80",
            "127.0.0.1:80",
            "127.0.0.1:80",
            "left_loopback",
        ),
        (
            "127.1.2.3:81",
            "127.1.2.3:81",
            "127.1.2.3:81",
            "left_loopback",
        ),
        (
            "127.0.0.1:82",
            "0.0.0.0:82",
            "127.0.0.1:82",
            "left_loopback",
        ),
        ("[::1]:83", "[::1]:83", "[::1]:83", "left_loopback"),
        ("[::1]:84", "[::]:84", "[::1]:84", "left_loopback"),
        (
            "127.0.0.1:85",
            "[::ffff:127.0.0.1]:85",
            "[::ffff:127.0.0.1]:85",
            "left_loopback",
        ),
        // The proxy's own port is no exception.
        (V4, V4, V4, "left_loopback"),
    ] {
        let before = count(&c, counter);
        let l = ns.listen(listen);
        let mut app = CaseProcess::start(&ns, Some(&cg), "dial", &[dial]);
        assert_eq!(
            answer(&l, &c),
            None,
            "{dial}: no origin; the proxy would reset it"
        );
        let said = app.line();
        assert!(
            said.starts_with(&format!("peer={peer} ")) && said.ends_with("reply=none"),
            "{dial}: {said}"
        );
        assert_eq!(count(&c, counter), before + 1, "{dial}");
    }
    // An IPv4 socket dials an IPv6 address; the application must see the kernel's own refusal.
    let mut app = CaseProcess::start(&ns, Some(&cg), "wrong_family", &["[fd00::1]:80"]);
    assert_eq!(
        (app.line().as_str(), count(&c, "left_family")),
        ("Err(Some(97))", 1),
        "EAFNOSUPPORT"
    );
    let mut app = CaseProcess::start(&ns, Some(&cg), "udp", &["127.0.0.1:53"]);
    assert_eq!(
        (app.line().as_str(), count(&c, "left_not_tcp")),
        ("peer=127.0.0.1:53", 1)
    );
}

#[test]
fn no_proxy_means_refused_and_nothing_stays_in_the_table() {
    let (ns, cg, c) = (LabNetns::new(), Cgroup::new(), load());
    let _pod = c.attach("a/b/pod", &cg.dir).unwrap();
    for to in ["10.96.0.1:80", "[fd00::1]:80", "[::ffff:10.96.0.1]:80"] {
        let mut app = CaseProcess::start(&ns, Some(&cg), "dial", &[to]);
        assert_eq!(app.line(), "error ConnectionRefused Some(111)", "{to}");
    }
    assert_eq!((count(&c, "withdrawn"), c.origins().waiting()), (3, 0));
}

#[test]
fn uncapturable_connections_are_refused_by_name() {
    let (ns, cg, c) = (LabNetns::new(), Cgroup::new(), load());
    let _pod = c.attach("a/b/pod", &cg.dir).unwrap();
    let _l = ns.listen(V4);
    let mut app = CaseProcess::start(
        &ns,
        Some(&cg),
        "dial",
        &["10.96.0.1:80", "device=pod0", "unprivileged"],
    );
    assert_eq!(
        app.line(),
        "error ConnectionRefused Some(111)",
        "only the privileged may lift a device binding, the program included"
    );
    assert_eq!(count(&c, "refused_device"), 1);
    ns.within(|| std::fs::write("/proc/sys/net/core/optmem_max", "1").unwrap());
    let mut app = CaseProcess::start(&ns, Some(&cg), "dial", &["10.96.0.1:80"]);
    assert_eq!(
        app.line(),
        "error ConnectionRefused Some(111)",
        "no memory for the socket's storage"
    );
    assert_eq!(
        (count(&c, "refused_storage"), c.origins().waiting()),
        (1, 0)
    );
}

#[test]
fn a_redialled_socket_forgets_the_first_destination() {
    let (ns, cg, c) = (LabNetns::new(), Cgroup::new(), load());
    let _pod = c.attach("a/b/pod", &cg.dir).unwrap();
    let _l = ns.listen("127.0.0.1:99");
    let mut app = CaseProcess::start(&ns, Some(&cg), "redial", &["10.96.0.1:80", "127.0.0.1:99"]);
    assert_eq!(app.line(), "Err(ConnectionRefused)");
    app.go_on();
    assert_eq!(
        (app.line().as_str(), app.line().as_str()),
        ("Ok(())", "peer=127.0.0.1:99")
    );
}

#[test]
fn sockets_that_share_a_port_keep_their_own_destinations() {
    let (ns, cg, c) = (LabNetns::new(), Cgroup::new(), load());
    let _pod = c.attach("a/b/pod", &cg.dir).unwrap();
    let l = ns.listen(V4);
    let mut app = CaseProcess::start(
        &ns,
        Some(&cg),
        "one_port",
        &["10.96.0.1:80", "10.96.0.2:80"],
    );
    let cookie = netns_cookie(&l).unwrap();
    for _ in 0..2 {
        let (mut s, peer) = l.accept().unwrap();
        let proxy = s.local_addr().unwrap().ip();
        s.write_all(
            c.origins()
                .take(cookie, peer, proxy)
                .unwrap()
                .to_string()
                .as_bytes(),
        )
        .unwrap();
    }
    assert_eq!(app.line(), "10.96.0.1:80 10.96.0.2:80");
}

#[test]
fn a_full_table_is_counted_and_the_proxy_learns_nothing_of_the_connection() {
    let (ns, cg) = (LabNetns::new(), Cgroup::new());
    let c = CapturePrograms::load(&CaptureOptions {
        origins_max: 1,
        ..CaptureOptions::default()
    })
    .unwrap();
    let _pod = c.attach("a/b/pod", &cg.dir).unwrap();
    let l = ns.listen(V4);
    let mut first = CaseProcess::start(&ns, Some(&cg), "dial", &["10.96.0.1:80"]);
    lab::until("the first", || c.origins().waiting() == 1);
    let mut second = CaseProcess::start(&ns, Some(&cg), "dial", &["10.96.0.2:80"]);
    lab::until("the second", || count(&c, "publish_full") == 1);
    assert_eq!(answer(&l, &c), Some("10.96.0.1:80".parse().unwrap()));
    assert_eq!(answer(&l, &c), None, "fail closed");
    assert!(first.line().ends_with("reply=10.96.0.1:80") && second.line().ends_with("reply=none"));
    let mut third = CaseProcess::start(&ns, Some(&cg), "dial", &["10.96.0.3:80"]);
    assert_eq!(
        answer(&l, &c),
        Some("10.96.0.3:80".parse().unwrap()),
        "there is room again"
    );
    third.line();
}

/// One pod opens more connections than its share while the proxy accepts none. Those of its
/// neighbor still arrive, and its own do again once the proxy has taken some.
#[test]
fn a_pod_that_dials_beyond_its_share_is_refused_and_its_neighbour_is_not() {
    // Any number above the share.
    const BEYOND: u64 = 10;
    let share = u64::from(canal_abi::capture::ORIGINS_POD_MAX);
    let ((ns, cg), (other_ns, other_cg), c) = (
        (LabNetns::new(), Cgroup::new()),
        (LabNetns::new(), Cgroup::new()),
        load(),
    );
    let (_pod, _other) = (
        c.attach("a/b/pod", &cg.dir).unwrap(),
        c.attach("a/b/other", &other_cg.dir).unwrap(),
    );
    let (l, other) = (ns.listen(V4), other_ns.listen(V4));
    let mut crowd = CaseProcess::start(
        &ns,
        Some(&cg),
        "burst",
        &["10.96.0.1:80", &(share + BEYOND).to_string()],
    );
    assert_eq!(crowd.line(), format!("refused {BEYOND}"));
    assert_eq!(
        (count(&c, "refused_share"), count(&c, "publish_full")),
        (BEYOND, 0)
    );
    let mut neighbour = CaseProcess::start(&other_ns, Some(&other_cg), "dial", &["10.96.0.2:80"]);
    assert_eq!(
        answer(&other, &c),
        Some("10.96.0.2:80".parse().unwrap()),
        "the neighbour has its own share"
    );
    neighbour.line();
    let origins = c.origins().of_pod();
    // Any number below the next burst, of which exactly as many pass.
    for _ in 0..64 {
        let (s, peer) = l.accept().unwrap();
        assert!(
            origins
                .take(
                    netns_cookie(&l).unwrap(),
                    peer,
                    s.local_addr().unwrap().ip()
                )
                .is_some()
        );
    }
    let mut again = CaseProcess::start(&ns, Some(&cg), "burst", &["10.96.0.1:80", "100"]);
    assert_eq!(
        again.line(),
        format!("refused {}", 100 - 64),
        "as many pass as the proxy took"
    );
    crowd.kill();
    again.kill();
    // Entries of any age are removed if their sockets are gone.
    c.origins().sweep(Duration::ZERO);
    let mut last = CaseProcess::start(&ns, Some(&cg), "burst", &["10.96.0.1:80", "1"]);
    assert_eq!(last.line(), "refused 0", "nothing waits any more");
}

#[test]
fn a_client_that_sends_and_closes_is_not_forgotten() {
    let (ns, cg, c) = (LabNetns::new(), Cgroup::new(), load());
    let _pod = c.attach("a/b/pod", &cg.dir).unwrap();
    let l = ns.listen(V4);
    let mut app = CaseProcess::start(&ns, Some(&cg), "dial", &["10.96.0.1:80", "send_and_close"]);
    assert_eq!(app.line(), "closed");
    assert_eq!(app.line(), "(ended)", "the process has ended");
    assert_eq!(answer(&l, &c), Some("10.96.0.1:80".parse().unwrap()));
}

#[test]
fn unread_destinations_are_swept_by_age() {
    let (ns, cg, c) = (LabNetns::new(), Cgroup::new(), load());
    let _pod = c.attach("a/b/pod", &cg.dir).unwrap();
    let l = ns.listen(V4);
    let mut app = CaseProcess::start(&ns, Some(&cg), "dial", &["10.96.0.1:80", "send_and_close"]);
    assert_eq!(app.line(), "closed");
    let _ = l.accept().unwrap();
    assert_eq!(
        (
            c.origins().sweep(Duration::from_secs(60)),
            c.origins().waiting()
        ),
        (0, 1),
        "young"
    );
    assert_eq!(
        (
            c.origins().sweep(Duration::ZERO),
            c.origins().waiting(),
            c.origins().swept()
        ),
        (1, 0, 1)
    );
}

/// The child's part of the next test: a proxy that captures a pod and is killed.
fn proxy_until_killed(args: &str) {
    let (pins, cgroup) = args.split_once(' ').unwrap();
    let c = CapturePrograms::load(&CaptureOptions {
        pin_dir: Some(pins.into()),
        ..CaptureOptions::default()
    })
    .unwrap();
    let pod = c.attach("a/b/pod.with.dots", cgroup.as_ref()).unwrap();
    let l = TcpListener::bind(V4).unwrap();
    print_line(if pod.is_adopted() {
        "adopted"
    } else {
        "attached"
    });
    answer(&l, &c);
    pause();
}

#[test]
fn a_killed_proxy_leaves_its_pods_refused_and_the_next_one_adopts_them() {
    let (ns, cg, dir) = (LabNetns::new(), Cgroup::new(), tempfile::tempdir().unwrap());
    let pins = dir.path().join("bpffs");
    let args = format!("{} {}", pins.display(), cg.dir.display());
    let mut first = CaseProcess::start(&ns, None, "proxy", &[&args]);
    assert_eq!(first.line(), "attached");
    let mut old_app = CaseProcess::start(&ns, Some(&cg), "dial", &["10.96.0.1:80", "hold"]);
    assert!(old_app.line().starts_with("peer=10.96.0.1:80 "));
    first.kill();

    let mut app = CaseProcess::start(&ns, Some(&cg), "dial", &["10.96.0.2:80"]);
    assert_eq!(
        app.line(),
        "error ConnectionRefused Some(111)",
        "not out in the clear: that would be NetworkUnreachable here"
    );

    let c = CapturePrograms::load(&CaptureOptions {
        pin_dir: Some(pins.clone()),
        ..CaptureOptions::default()
    })
    .unwrap();
    assert_eq!(c.pinned_pods(), ["a/b/pod.with.dots"]);
    let pod = c.attach("a/b/pod.with.dots", &cg.dir).unwrap();
    assert!(pod.is_adopted());
    c.forget_other_versions();
    old_app.go_on();
    assert_eq!(
        old_app.line(),
        "peer=10.96.0.1:80",
        "the new programs know the old socket"
    );
    let l = ns.listen(V4);
    let mut app = CaseProcess::start(&ns, Some(&cg), "dial", &["10.96.0.3:80"]);
    assert_eq!(answer(&l, &c), Some("10.96.0.3:80".parse().unwrap()));
    app.line();
    // The three connections above, of which the second met no proxy.
    assert!(count(&c, "taken_v4") >= 3, "the counters continued");

    c.release("a/b/pod.with.dots", Some(pod)).unwrap();
    let mut app = CaseProcess::start(&ns, Some(&cg), "dial", &["10.96.0.4:80"]);
    assert_eq!(
        app.line(),
        "error NetworkUnreachable Some(101)",
        "released: it uses the network directly"
    );
    drop(c);
    // The second call finds nothing, which is no error.
    release_all(&pins).unwrap();
    assert!(!pins.exists(), "unmounted and removed");
    release_all(&pins).unwrap();
}

#[test]
fn a_recreated_pod_is_attached_again_and_old_maps_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let pins = dir.path().join("bpffs");
    let options = |origins_max| CaptureOptions {
        pin_dir: Some(pins.clone()),
        origins_max,
        ..CaptureOptions::default()
    };
    let old = Cgroup::new();
    {
        let c = CapturePrograms::load(&options(16)).unwrap();
        assert!(!c.attach("a/b/pod", &old.dir).unwrap().is_adopted());
    }
    let (ns, new) = (LabNetns::new(), Cgroup::new());
    let c = CapturePrograms::load(&options(32)).unwrap();
    let pod = c.attach("a/b/pod", &new.dir).unwrap();
    assert!(!pod.is_adopted(), "the pinned links are the old cgroup's");
    assert!(c.is_durable() && !load().is_durable());
    let l = ns.listen(V4);
    let mut app = CaseProcess::start(&ns, Some(&new), "dial", &["10.96.0.1:80"]);
    assert_eq!(answer(&l, &c), Some("10.96.0.1:80".parse().unwrap()));
    app.line();
    drop((pod, c));
    release_all(&pins).unwrap();
}

#[test]
fn pods_removed_while_no_proxy_ran_are_released_and_others_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let pins = dir.path().join("bpffs");
    let (gone, here) = (Cgroup::new(), Cgroup::new());
    let c = CapturePrograms::load(&CaptureOptions {
        pin_dir: Some(pins.clone()),
        ..CaptureOptions::default()
    })
    .unwrap();
    drop((
        c.attach("a/b/gone", &gone.dir).unwrap(),
        c.attach("a/b/here", &here.dir).unwrap(),
    ));
    assert!(
        c.forget_gone(|_| false).is_empty(),
        "both cgroups are there"
    );
    drop(gone);
    let mut let_go = Vec::new();
    lab::until("its cgroup was removed", || {
        let_go.extend(c.forget_gone(|_| false));
        !let_go.is_empty()
    });
    assert_eq!(
        (let_go, c.pinned_pods()),
        (vec!["a/b/gone".to_string()], vec!["a/b/here".to_string()])
    );
    drop(c);
    release_all(&pins).unwrap();
}

#[test]
fn without_pins_everything_goes_with_the_process() {
    let (ns, cg) = (LabNetns::new(), Cgroup::new());
    {
        let c = load();
        let _pod = c.attach("a/b/pod", &cg.dir).unwrap();
        assert_eq!(
            CaseProcess::start(&ns, Some(&cg), "dial", &["10.96.0.1:80"]).line(),
            "error ConnectionRefused Some(111)"
        );
    }
    assert_eq!(
        CaseProcess::start(&ns, Some(&cg), "dial", &["10.96.0.1:80"]).line(),
        "error NetworkUnreachable Some(101)"
    );
}

#[test]
fn cgroups_show_whether_their_pod_exists() {
    let (ns, cg) = (LabNetns::new(), Cgroup::new());
    assert_eq!(cgroup_state(&cg.dir), CgroupState::Empty);
    let _l = ns.listen("127.0.0.1:99");
    let mut app = CaseProcess::start(&ns, Some(&cg), "redial", &["127.0.0.1:98", "127.0.0.1:99"]);
    app.line();
    assert_eq!(cgroup_state(&cg.dir), CgroupState::Populated);
    app.kill();
    assert_eq!(cgroup_state(&cg.dir.join("none")), CgroupState::Gone);
}

#[test]
fn refusals_name_the_subject_and_a_fix() {
    let c = load();
    let dir = tempfile::tempdir().unwrap();
    for (cgroup, text) in [
        (dir.path().to_path_buf(), "cgroup v2 mount"),
        (dir.path().join("none"), "cannot open cgroup"),
    ] {
        let e = c.attach("a/b/pod", &cgroup).unwrap_err().to_string();
        assert!(
            e.contains(text) && e.contains(&*cgroup.to_string_lossy()),
            "{e}"
        );
    }
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let e = CapturePrograms::load(&CaptureOptions {
        pin_dir: Some(file),
        ..CaptureOptions::default()
    })
    .unwrap_err()
    .to_string();
    assert!(e.contains("--bpf-pin-dir"), "{e}");
}
