//! Tests `bpf/inbound.bpf.c`, its fallback and the reset of older connections against real sockets:
//! which connections are captured, passed, or refused.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use crate::lab;
use crate::lab::{CaseProcess, LabNetns, LabPins, close, pause, print_line};
use canal_offload::inbound::{InboundPrograms, ListenerFamily, PodInbound};
use canal_offload::nft;
use canal_offload::sockets::{self, ConnectionFilter};
use socket2::{Domain, SockRef, Socket, Type};

/// The proxy's socket mark (`canal_wire::hbone::PROXY_MARK`).
const MARK: u32 = 0x539;
/// Cgroup that contains none of these tests' sockets.
const NO_CGROUP: &str = "/none";
const V4: &str = "10.77.0.2";
const V6: &str = "[fd77::2]";

/// Entry of the child process. In an ordinary run there is no case.
#[test]
fn the_client() {
    if let Some(c) = lab::case() {
        assert_eq!(c[0], "proxy");
        proxy_until_killed(&c[1]);
    }
}

/// Pod and the namespace at the other end of its interface.
struct InboundPod {
    ns: LabNetns,
    outside: LabNetns,
}

impl InboundPod {
    fn new() -> Self {
        let (ns, outside) = (LabNetns::new(), LabNetns::bare());
        ns.ip(&format!(
            "link set nowhere netns {} name out0",
            outside.name()
        ));
        outside.ip("link set out0 up");
        for (of, device, to) in [
            (&ns, "pod0", ["10.77.0.9", "fd77::9"]),
            (&outside, "out0", ["10.77.0.2", "fd77::2"]),
        ] {
            of.ip(&format!("route add {}/32 dev {device}", to[0]));
            of.ip(&format!("-6 route add {}/128 dev {device}", to[1]));
        }
        outside.ip("addr add 10.77.0.9/32 dev out0");
        outside.ip("addr add fd77::9/128 dev out0 nodad");
        Self { ns, outside }
    }

    fn dial(&self, to: &str) -> std::io::Result<TcpStream> {
        let to: SocketAddr = to.parse().unwrap();
        self.outside.within(|| {
            TcpStream::connect_timeout(&to, canal_timing::deadline(Duration::from_secs(5)))
        })
    }

    /// Creates a listener as a worker of the proxy has it: on any address, in a reuse-port group,
    /// with the proxy's mark.
    fn proxy(&self, family: ListenerFamily) -> TcpListener {
        proxy_listener(&self.ns, family)
    }

    /// Attaches the pod's program with the proxy's listeners.
    fn attach_pod(&self, inbound: &InboundPrograms) -> (PodInbound, TcpListener, TcpListener) {
        let mut pod = inbound.prepare("a/b/pod", &self.ns.path()).unwrap();
        let (v4, v6) = (
            self.proxy(ListenerFamily::V4),
            self.proxy(ListenerFamily::V6),
        );
        pod.listen(ListenerFamily::V4, &v4).unwrap();
        pod.listen(ListenerFamily::V6, &v6).unwrap();
        pod.attach().unwrap();
        (pod, v4, v6)
    }
}

fn proxy_listener(ns: &LabNetns, family: ListenerFamily) -> TcpListener {
    let at: SocketAddr = if family == ListenerFamily::V4 {
        "0.0.0.0:15006"
    } else {
        "[::]:15006"
    }
    .parse()
    .unwrap();
    ns.within(|| {
        let s = Socket::new(Domain::for_address(at), Type::STREAM, None).unwrap();
        s.set_reuse_port(true).unwrap();
        s.set_mark(MARK).unwrap();
        if at.is_ipv6() {
            s.set_only_v6(true).unwrap();
        }
        s.bind(&at.into()).unwrap();
        s.listen(128).unwrap();
        s.into()
    })
}

fn count(i: &InboundPrograms, name: &str) -> u64 {
    i.counters()
        .unwrap()
        .into_iter()
        .find(|(n, _)| n == name)
        .unwrap_or_else(|| panic!("no counter {name}"))
        .1
}

/// Accepts the next connection, checks that bytes pass, and returns the connection's local address.
fn answer(l: &TcpListener, mut client: TcpStream) -> String {
    SockRef::from(l)
        .set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(5))))
        .unwrap();
    let (mut s, from) = l.accept().unwrap();
    assert_eq!(
        from,
        client.local_addr().unwrap(),
        "the source is the client's"
    );
    client.write_all(b"hi").unwrap();
    s.read_exact(&mut [0; 2]).unwrap();
    s.local_addr().unwrap().to_string()
}

#[test]
fn every_other_port_is_captured_with_its_original_destination() {
    let (pod, inbound) = (InboundPod::new(), InboundPrograms::load(None).unwrap());
    // The application also listens on some of these ports; it must not get the connections.
    let _apps: Vec<_> = ["0.0.0.0:80", "[::]:443", "10.77.0.2:8080"]
        .into_iter()
        .map(|at| pod.ns.listen(at))
        .collect();
    let (_pod, v4, v6) = pod.attach_pod(&inbound);
    for (case, to, listener, verdict) in [
        (
            "the application listens on all",
            format!("{V4}:80"),
            &v4,
            "taken_v4",
        ),
        (
            "it listens on the address",
            format!("{V4}:8080"),
            &v4,
            "taken_v4",
        ),
        (
            "an IPv6 socket listens for both",
            format!("{V4}:443"),
            &v4,
            "taken_v4",
        ),
        ("IPv6", format!("{V6}:443"), &v6, "taken_v6"),
        ("nobody listens", format!("{V4}:9"), &v4, "taken_v4"),
        (
            "the proxy's own outbound port",
            format!("{V4}:15001"),
            &v4,
            "taken_v4",
        ),
        (
            "the proxy's own inbound port",
            format!("{V4}:15006"),
            &v4,
            "taken_v4",
        ),
    ] {
        let before = count(&inbound, verdict);
        assert_eq!(answer(listener, pod.dial(&to).unwrap()), to, "{case}");
        assert_eq!(
            count(&inbound, verdict),
            before + 1,
            "{case}: once per connection"
        );
    }
}

#[test]
fn bytes_cost_nothing_after_the_connection_is_up() {
    let (pod, inbound) = (InboundPod::new(), InboundPrograms::load(None).unwrap());
    let (_pod, v4, _v6) = pod.attach_pod(&inbound);
    let mut client = pod.dial(&format!("{V4}:80")).unwrap();
    let (mut s, _) = v4.accept().unwrap();
    let looked = inbound.counters().unwrap();
    let sender = std::thread::spawn(move || client.write_all(&vec![7; 8 << 20]).unwrap());
    s.read_exact(&mut vec![0; 8 << 20]).unwrap();
    sender.join().unwrap();
    assert_eq!(
        inbound.counters().unwrap(),
        looked,
        "the program did not run again"
    );
}

#[test]
fn hbone_and_local_connections_are_not_captured() {
    let (pod, inbound) = (InboundPod::new(), InboundPrograms::load(None).unwrap());
    let (hbone, app) = (pod.ns.listen("0.0.0.0:15008"), pod.ns.listen("0.0.0.0:80"));
    let (_pod, ..) = pod.attach_pod(&inbound);
    assert_eq!(
        answer(&hbone, pod.dial(&format!("{V4}:15008")).unwrap()),
        format!("{V4}:15008")
    );
    assert_eq!(count(&inbound, "left_hbone"), 1);
    let app6 = pod.ns.listen("[::]:81");
    for (to, app) in [
        ("127.0.0.1:80", &app),
        ("10.77.0.2:80", &app),
        ("[fd77::2]:81", &app6),
        ("[::1]:81", &app6),
    ] {
        let client = pod.ns.within(|| TcpStream::connect(to).unwrap());
        assert_eq!(
            answer(app, client),
            to,
            "the proxy's own way to the application"
        );
    }
    assert_eq!(count(&inbound, "left_inside"), 4);
    // The hook does not handle datagrams.
    let (udp, sender) = (
        pod.ns
            .within(|| std::net::UdpSocket::bind("0.0.0.0:53").unwrap()),
        canal_timing::deadline(Duration::from_secs(5)),
    );
    udp.set_read_timeout(Some(sender)).unwrap();
    pod.outside.within(|| {
        std::net::UdpSocket::bind("10.77.0.9:0")
            .unwrap()
            .send_to(b"x", "10.77.0.2:53")
            .unwrap()
    });
    assert_eq!(udp.recv(&mut [0; 4]).unwrap(), 1);
}

#[test]
fn without_a_listener_everything_is_refused_and_counted() {
    let (pod, inbound) = (InboundPod::new(), InboundPrograms::load(None).unwrap());
    let app = pod.ns.listen("0.0.0.0:80");
    let mut taken = inbound.prepare("a/b/pod", &pod.ns.path()).unwrap();
    assert_eq!(
        answer(&app, pod.dial(&format!("{V4}:80")).unwrap()),
        format!("{V4}:80"),
        "prepared only: nothing is captured"
    );
    // The second call finds the program attached, which is no error.
    taken.attach().unwrap();
    taken.attach().unwrap();
    let dial = || pod.dial(&format!("{V4}:80")).unwrap_err().kind();
    assert_eq!(dial(), std::io::ErrorKind::ConnectionRefused);
    // The client sends its SYN again if the machine is too busy to answer within a second, so the
    // refusal may count more than once.
    assert!(count(&inbound, "refused_no_listener") >= 1);
    let l = pod.proxy(ListenerFamily::V4);
    taken.listen(ListenerFamily::V4, &l).unwrap();
    assert_eq!(
        answer(&l, pod.dial(&format!("{V4}:80")).unwrap()),
        format!("{V4}:80")
    );
    close(l);
    assert_eq!(
        dial(),
        std::io::ErrorKind::ConnectionRefused,
        "the listener has closed, and the program is still attached"
    );
    // This listener has the wrong family.
    let wrong = pod.proxy(ListenerFamily::V6);
    taken.listen(ListenerFamily::V4, &wrong).unwrap();
    assert_eq!(count(&inbound, "refused_assign"), 0);
    assert_eq!(dial(), std::io::ErrorKind::ConnectionRefused);
    assert!(count(&inbound, "refused_assign") >= 1);
    taken.release().unwrap();
    assert_eq!(
        answer(&app, pod.dial(&format!("{V4}:80")).unwrap()),
        format!("{V4}:80"),
        "let go"
    );
}

#[test]
fn connections_spread_over_all_listeners_of_a_group() {
    let (pod, inbound) = (InboundPod::new(), InboundPrograms::load(None).unwrap());
    let (_pod, v4, _v6) = pod.attach_pod(&inbound);
    let other = pod.proxy(ListenerFamily::V4);
    let clients: Vec<_> = (0..64)
        .map(|_| pod.dial(&format!("{V4}:80")).unwrap())
        .collect();
    let waiting = |l: &TcpListener| {
        l.set_nonblocking(true).unwrap();
        std::iter::from_fn(|| l.accept().ok()).count()
    };
    let (a, b) = (waiting(&v4), waiting(&other));
    assert!(a + b == clients.len() && a > 8 && b > 8, "{a} and {b}");
}

/// The child's part of the next test: a proxy that captures a pod's connections and is killed.
fn proxy_until_killed(args: &str) {
    let (pins, netns) = args.split_once(' ').unwrap();
    let inbound = InboundPrograms::load(Some(pins.as_ref())).unwrap();
    let mut pod = inbound.prepare("a/b/pod", netns.as_ref()).unwrap();
    let l = TcpListener::bind("0.0.0.0:15006").unwrap();
    pod.listen(ListenerFamily::V4, &l).unwrap();
    pod.attach().unwrap();
    print_line(pod.is_adopted());
    let _one = l.accept().unwrap();
    pause();
}

#[test]
fn a_killed_proxy_leaves_the_pod_refused_and_the_next_one_adopts_it() {
    let (pod, pins) = (InboundPod::new(), LabPins::new());
    let app = pod.ns.listen("0.0.0.0:80");
    let args = format!("{} {}", pins.path().display(), pod.ns.path().display());
    let mut first = CaseProcess::start(&pod.ns, None, "proxy", &[&args]);
    // The process prints whether it adopted a pin; the first one finds none.
    assert_eq!(first.line(), "false");
    let to = format!("{V4}:80");
    let _open = pod.dial(&to).unwrap();
    first.kill();
    assert_eq!(
        pod.dial(&to).unwrap_err().kind(),
        std::io::ErrorKind::ConnectionRefused,
        "not to the application"
    );

    let inbound = InboundPrograms::load(Some(pins.path())).unwrap();
    assert!(inbound.is_pinned("a/b/pod") && !inbound.is_pinned("a/b/other"));
    assert_eq!(count(&inbound, "taken_v4"), 1, "the counter continued");
    // A busy machine makes the client send its SYN again, which is refused and counted again.
    assert!(count(&inbound, "refused_no_listener") >= 1);
    let (taken, v4, _v6) = pod.attach_pod(&inbound);
    assert!(taken.is_adopted());
    assert_eq!(answer(&v4, pod.dial(&to).unwrap()), to);
    drop(taken);
    assert_eq!(answer(&v4, pod.dial(&to).unwrap()), to, "the pin keeps it");
    // The second call finds no pin, which is no error.
    inbound.forget("a/b/pod").unwrap();
    inbound.forget("a/b/pod").unwrap();
    // The kernel detaches a link without a holder only some time later.
    app.set_nonblocking(true).unwrap();
    // Two seconds in all, far more than the kernel needs on a quiet machine.
    let let_go = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        let _client = pod.dial(&to);
        app.accept().is_ok()
    });
    assert!(let_go, "to the application again");
    // A pod of the same name is created anew while the pin of the first one still exists.
    let again = InboundPod::new();
    drop(
        inbound
            .prepare("a/b/pod", &pod.ns.path())
            .map(|mut p| p.attach())
            .unwrap(),
    );
    let mut made_again = inbound.prepare("a/b/pod", &again.ns.path()).unwrap();
    made_again.attach().unwrap();
    assert!(!made_again.is_adopted(), "the pin was of another namespace");
    made_again.release().unwrap();
    drop(inbound);
    canal_offload::capture::release_all(pins.path()).unwrap();
}

#[test]
fn nftables_captures_inbound_when_bpf_is_refused() {
    let pod = InboundPod::new();
    let app = pod.ns.listen("0.0.0.0:80");
    let mut before = pod.dial(&format!("{V4}:80")).unwrap();
    let (mut accepted, _) = app.accept().unwrap();
    // The second call replaces the same rules.
    nft::take_inbound(&pod.ns.path()).unwrap();
    nft::take_inbound(&pod.ns.path()).unwrap();
    // The rules redirect new connections only.
    before.write_all(b"hi").unwrap();
    accepted.read_exact(&mut [0; 2]).unwrap();
    let (v4, v6) = (pod.proxy(ListenerFamily::V4), pod.proxy(ListenerFamily::V6));
    for (to, l) in [
        (format!("{V4}:80"), &v4),
        (format!("{V4}:9"), &v4),
        (format!("{V6}:80"), &v6),
    ] {
        let _client = pod.dial(&to).unwrap();
        let (s, _) = l.accept().unwrap();
        let origin = nft::original_destination(s.as_fd(), s.local_addr().unwrap()).unwrap();
        assert_eq!(origin.to_string(), to);
    }
    // The rules leave the port of HBONE and the loopback device alone.
    let hbone = pod.ns.listen("0.0.0.0:15008");
    assert_eq!(
        answer(&hbone, pod.dial(&format!("{V4}:15008")).unwrap()),
        format!("{V4}:15008")
    );
    let inside = pod
        .ns
        .within(|| TcpStream::connect("10.77.0.2:80").unwrap());
    assert_eq!(answer(&app, inside), "10.77.0.2:80");
    close(v4);
    close(v6);
    assert_eq!(
        pod.dial(&format!("{V4}:80")).unwrap_err().kind(),
        std::io::ErrorKind::ConnectionRefused,
        "no proxy"
    );
    // The second call finds no rules, which is no error.
    nft::leave_inbound(&pod.ns.path()).unwrap();
    nft::leave_inbound(&pod.ns.path()).unwrap();
    assert_eq!(
        answer(&app, pod.dial(&format!("{V4}:80")).unwrap()),
        format!("{V4}:80")
    );
}

#[test]
fn connections_from_before_are_found_and_reset() {
    let (pod, inbound) = (InboundPod::new(), InboundPrograms::load(None).unwrap());
    let (app, hbone) = (pod.ns.listen("[::]:80"), pod.ns.listen("0.0.0.0:15008"));
    let mut v4 = pod.dial(&format!("{V4}:80")).unwrap();
    let mut v6 = pod.dial(&format!("{V6}:80")).unwrap();
    let _hbone = pod.dial(&format!("{V4}:15008")).unwrap();
    let _inside = pod
        .ns
        .within(|| TcpStream::connect("10.77.0.2:80").unwrap());
    // Two pod addresses and the one from inside.
    let mut accepted: Vec<TcpStream> = (0..3).map(|_| app.accept().unwrap().0).collect();
    let outer = pod.outside.listen("10.77.0.9:99");
    let _out = pod
        .ns
        .within(|| TcpStream::connect("10.77.0.9:99").unwrap());
    let (_taken, proxy, _v6) = pod.attach_pod(&inbound);
    let mut through = pod.dial(&format!("{V4}:80")).unwrap();
    let (mut taken, _) = proxy.accept().unwrap();

    let found = sockets::inbound(
        &pod.ns.path(),
        NO_CGROUP.as_ref(),
        &[MARK],
        ConnectionFilter::Listening,
    )
    .unwrap();
    let mut remotes: Vec<SocketAddr> = found.iter().map(|c| c.remote).collect();
    remotes.sort();
    let mut wanted = vec![v4.local_addr().unwrap(), v6.local_addr().unwrap()];
    wanted.sort();
    assert_eq!(
        remotes, wanted,
        "neither HBONE, nor from inside, nor out of the pod, nor the proxy's"
    );
    assert_eq!(
        found.iter().map(|c| c.local.port()).collect::<Vec<_>>(),
        [80, 80]
    );
    assert_eq!(
        sockets::inbound(
            &pod.ns.path(),
            NO_CGROUP.as_ref(),
            &[MARK],
            ConnectionFilter::All
        )
        .unwrap()
        .len(),
        3,
        "and what the pod opened itself"
    );

    let one: Vec<_> = found
        .into_iter()
        .filter(|c| c.remote == v4.local_addr().unwrap())
        .collect();
    assert_eq!(sockets::reset(&pod.ns.path(), &one).unwrap(), 1);
    assert_eq!(
        sockets::reset(&pod.ns.path(), &one).unwrap(),
        0,
        "it has ended"
    );
    assert_eq!(
        v4.read(&mut [0]).unwrap_err().kind(),
        std::io::ErrorKind::ConnectionReset
    );
    // The write to the connection that was reset fails.
    for s in &mut accepted {
        let _ = s.write_all(b"y");
    }
    v6.read_exact(&mut [0]).unwrap();
    through.write_all(b"x").unwrap();
    taken.read_exact(&mut [0]).unwrap();
    drop((hbone, outer));
}

#[test]
fn refusals_name_the_namespace() {
    let none = std::path::Path::new("/run/netns/canal-offload-none");
    let inbound = InboundPrograms::load(None).unwrap();
    for e in [
        inbound.prepare("a/b/c", none).unwrap_err(),
        nft::take_inbound(none).unwrap_err(),
        sockets::inbound(none, NO_CGROUP.as_ref(), &[1], ConnectionFilter::All).unwrap_err(),
    ] {
        assert!(e.to_string().contains("canal-offload-none"), "{e}");
    }
}
