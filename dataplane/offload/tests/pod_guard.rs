//! Tests `bpf/pod.bpf.c` against real sockets: which packets leave a pod, enter it, and are
//! counted. The second namespace plays the node: the guard is attached there, and packets that
//! arrive there have left the pod.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::time::Duration;

use crate::lab;
use crate::lab::packets::{Receiver, TEXT, ip, protocol};
use crate::lab::{CaseProcess, Cgroup, LabNetns, LabPins};
use canal_offload::pod_guard::{
    OutsidePackets, PodGuard, PodGuards, UDP_PORTS_MAX, UdpExcess, UdpFromTier, verdict_name,
};
use canal_offload::sockets;
use socket2::{Domain, Protocol, Socket, Type};

/// Time that the tests wait for a packet that is stopped. Every such wait takes all of it, so it is
/// short.
pub(crate) const NEVER: Duration = Duration::from_millis(300);
pub(crate) const EPERM: &str = "error 1";
pub(crate) const KINDS: [(&str, &str); 5] = [
    ("udp", "udp"),
    ("echo", "icmp"),
    ("sctp", "sctp"),
    ("tcp", "tcp"),
    ("frame", "packet_socket"),
];

/// Entry of the child process. In an ordinary run there is no case.
#[test]
fn the_client() {
    if let Some(c) = lab::case() {
        lab::client::run(&c);
    }
}

/// Returns the time within which a packet that passes arrives.
pub(crate) fn arrives_within() -> Duration {
    canal_timing::deadline(Duration::from_secs(2))
}

pub(crate) struct Lab {
    pub(crate) pod: LabNetns,
    pub(crate) node: LabNetns,
    pub(crate) cgroup: Cgroup,
    hardware: String,
}

impl Lab {
    pub(crate) fn new() -> Self {
        let (pod, node) = (LabNetns::new(), LabNetns::bare());
        let hardware = "02:77:00:00:00:09".to_string();
        pod.ip(&format!("link set nowhere netns {} name out0", node.name()));
        node.ip(&format!("link set out0 address {hardware}"));
        node.ip("link set out0 up");
        for (of, device, to) in [
            (&pod, "pod0", ["10.77.0.9", "fd77::9"]),
            (&node, "out0", ["10.77.0.2", "fd77::2"]),
        ] {
            of.ip(&format!("route add {}/32 dev {device}", to[0]));
            of.ip(&format!("-6 route add {}/128 dev {device}", to[1]));
        }
        pod.ip("route add 10.77.0.8/32 dev pod0");
        node.ip("addr add 10.77.0.9/32 dev out0");
        node.ip("addr add 10.77.0.8/32 dev out0");
        node.ip("addr add fd77::9/128 dev out0 nodad");
        node.ip("addr add fd77::10/128 dev out0 nodad");
        pod.ip("-6 route add fd77::10/128 dev pod0");
        Self {
            pod,
            node,
            cgroup: Cgroup::new(),
            hardware,
        }
    }

    fn guard(&self, pins: Option<&Path>) -> PodGuard {
        self.node.within(|| {
            PodGuards::load(pins)
                .unwrap()
                .attach("a/b/pod", &self.cgroup.dir, &self.pod.path())
                .unwrap()
        })
    }

    /// Starts name servers on the node, and one on a port that is not DNS.
    pub(crate) fn answer_questions(&self) {
        for at in [
            "10.77.0.9:53",
            "[fd77::9]:53",
            "10.77.0.8:53",
            "10.77.0.9:5353",
        ] {
            let server = self.node.within(|| UdpSocket::bind(at).unwrap());
            server
                .set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(20))))
                .unwrap();
            std::thread::spawn(move || {
                while let Ok((n, from)) = server.recv_from(&mut [0; 64]) {
                    let _ = server.send_to(&TEXT[..n.min(TEXT.len())], from);
                }
            });
        }
    }

    pub(crate) fn sender(&self, kind: &str, to: SocketAddr) -> CaseProcess {
        let from = if to.is_ipv4() { "10.77.0.2" } else { "fd77::2" };
        let mut client = CaseProcess::start(
            &self.pod,
            Some(&self.cgroup),
            "send",
            &[kind, &to.to_string(), from, &self.hardware],
        );
        assert_eq!(client.line(), "open");
        client
    }

    pub(crate) fn receiver(&self, to: SocketAddr, protocol: i32) -> Receiver {
        self.node.within(|| Receiver::open(to, protocol))
    }
}

/// Returns a UDPRoute: the tier is at 10.77.0.9 and in fd77::8/125, and the pod receives its
/// datagrams at port 99.
pub(crate) fn udp_route() -> UdpFromTier {
    let tier = ["10.77.0.9/32", "fd77::8/125"];
    UdpFromTier {
        ports: [99].into(),
        tier: tier.iter().map(|range| range.parse().unwrap()).collect(),
    }
}

/// Tests whether a datagram from the node's address `from` reaches `to` in the pod and whether the
/// reply comes back within `wait`.
pub(crate) fn exchanged(lab: &Lab, from: &str, to: &str, wait: Duration) -> &'static str {
    let to: SocketAddr = to.parse().unwrap();
    let any = if to.is_ipv4() { "0.0.0.0" } else { "[::]" };
    let mut pod = CaseProcess::start(
        &lab.pod,
        Some(&lab.cgroup),
        "answer",
        &[&format!("{any}:{}", to.port())],
    );
    assert_eq!(pod.line(), "open");
    let socket = lab.node.within(|| UdpSocket::bind(from).unwrap());
    socket.set_read_timeout(Some(wait)).unwrap();
    socket.send_to(TEXT, to).unwrap();
    match socket.recv(&mut [0; 64]) {
        Ok(_) => "answered",
        Err(_) => "silence",
    }
}

/// A case's name, the sender, the receiver, and what becomes of the datagram.
type RouteCase = (&'static str, &'static str, &'static str, &'static str);

/// Datagrams to the pod while the route leads to port 99.
const ROUTE_CASES: [RouteCase; 8] = [
    (
        "the tier to the port",
        "10.77.0.9:0",
        "10.77.0.2:99",
        "answered",
    ),
    (
        "a port that no route names",
        "10.77.0.9:0",
        "10.77.0.2:98",
        "silence",
    ),
    ("not of the tier", "10.77.0.8:0", "10.77.0.2:99", "silence"),
    (
        "not of the tier, but from the port",
        "10.77.0.8:99",
        "10.77.0.2:98",
        "silence",
    ),
    (
        "the tier's port is not what is named",
        "10.77.0.9:99",
        "10.77.0.2:98",
        "silence",
    ),
    (
        "IPv6, the tier's range to the port",
        "[fd77::9]:0",
        "[fd77::2]:99",
        "answered",
    ),
    (
        "IPv6, a port that no route names",
        "[fd77::9]:0",
        "[fd77::2]:98",
        "silence",
    ),
    (
        "IPv6, not of the tier",
        "[fd77::10]:0",
        "[fd77::2]:99",
        "silence",
    ),
];

/// Datagrams of the pod while the route leads to port 99.
const SEND_CASES: [RouteCase; 6] = [
    (
        "from the port to the tier",
        "10.77.0.2:99",
        "10.77.0.9:7",
        "sent",
    ),
    ("from another port", "10.77.0.2:98", "10.77.0.9:7", EPERM),
    ("to the same port", "10.77.0.2:98", "10.77.0.9:99", EPERM),
    (
        "from the port to others",
        "10.77.0.2:99",
        "10.77.0.8:7",
        EPERM,
    ),
    (
        "IPv6, from the port to the tier",
        "[fd77::2]:99",
        "[fd77::9]:7",
        "sent",
    ),
    (
        "IPv6, from the port to others",
        "[fd77::2]:99",
        "[fd77::10]:7",
        EPERM,
    ),
];

/// Checks which datagrams pass with and without the route, which `set` changes.
pub(crate) fn check_udp_route(lab: &Lab, mut set: impl FnMut(&UdpFromTier)) {
    let check = |cases: &[(&str, &str, &str, &str)]| {
        for (case, from, to, want) in cases {
            let wait = if *want == "answered" {
                arrives_within()
            } else {
                NEVER
            };
            assert_eq!(
                exchanged(lab, from, to, wait),
                *want,
                "{case}: {from} to {to}"
            );
        }
    };
    check(&[
        ("before", "10.77.0.9:0", "10.77.0.2:99", "silence"),
        ("before", "[fd77::9]:0", "[fd77::2]:99", "silence"),
    ]);
    set(&udp_route());
    check(&ROUTE_CASES);
    let sends = |from_port: &str, to: &str| {
        CaseProcess::start(&lab.pod, Some(&lab.cgroup), "datagram", &[from_port, to]).line()
    };
    for (case, from, to, want) in SEND_CASES {
        assert_eq!(sends(from, to), want, "{case}");
    }
    set(&UdpFromTier {
        ports: [98].into(),
        ..udp_route()
    });
    check(&[
        ("moved", "10.77.0.9:0", "10.77.0.2:99", "silence"),
        ("moved", "10.77.0.9:0", "10.77.0.2:98", "answered"),
    ]);
    set(&UdpFromTier::default());
    check(&[
        ("removed", "10.77.0.9:0", "10.77.0.2:98", "silence"),
        ("removed", "[fd77::9]:0", "[fd77::2]:98", "silence"),
    ]);
    assert_eq!(
        sends("10.77.0.2:98", "10.77.0.9:7"),
        EPERM,
        "removed: answers, too"
    );
}

fn count(guard: &PodGuard, name: &str) -> u64 {
    guard
        .counters()
        .unwrap()
        .into_iter()
        .find(|(v, _)| verdict_name(*v) == name)
        .unwrap_or_else(|| panic!("no counter {name}"))
        .1
}

pub(crate) fn targets() -> [SocketAddr; 2] {
    [
        "10.77.0.9:99".parse().unwrap(),
        "[fd77::9]:99".parse().unwrap(),
    ]
}

/// The packets are of every protocol in both families, from sockets opened before and after the
/// guard was attached.
#[test]
fn deny_stops_every_protocol_of_new_and_of_older_sockets() {
    let lab = Lab::new();
    for (kind, reason) in KINDS {
        for to in targets() {
            let receiver = lab.receiver(to, protocol(kind, to));
            let mut unguarded = lab.sender(kind, to);
            unguarded.go_on();
            assert_eq!(
                (
                    unguarded.line().as_str(),
                    receiver.receives(arrives_within())
                ),
                ("sent", true),
                "{kind} to {to}: the control"
            );
            let mut older = lab.sender(kind, to);
            let guard = lab.guard(None);
            let newer = lab.sender(kind, to);
            for (which, client) in [("older", &mut older), ("newer", &mut { newer })] {
                let before = count(&guard, &format!("stopped_{reason}"));
                client.go_on();
                let said = client.line();
                // A packet socket's frame is stopped at the other end of the interface, so its
                // sender gets no error.
                assert_eq!(
                    said,
                    if kind == "frame" { "sent" } else { EPERM },
                    "{kind} to {to}, {which} socket"
                );
                assert!(
                    !receiver.receives(NEVER),
                    "{kind} to {to}, {which} socket: it left the pod"
                );
                assert_eq!(
                    count(&guard, &format!("stopped_{reason}")),
                    before + 1,
                    "{kind} to {to}, {which} socket"
                );
            }
            let last = guard.last_stopped().unwrap();
            assert_eq!(
                last.reason().map(verdict_name),
                Some(format!("stopped_{reason}")),
                "{kind} to {to}"
            );
            lab.node.within(|| guard.release()).unwrap();
            let mut released = lab.sender(kind, to);
            released.go_on();
            assert_eq!(
                (
                    released.line().as_str(),
                    receiver.receives(arrives_within())
                ),
                ("sent", true),
                "{kind} to {to}: let go"
            );
        }
    }
}

#[test]
fn passthrough_counts_unencrypted_packets() {
    let lab = Lab::new();
    let guard = lab.guard(None);
    guard.set(OutsidePackets::Watch, &[]).unwrap();
    for (kind, reason) in KINDS {
        for to in targets() {
            let (receiver, counter) = (
                lab.receiver(to, protocol(kind, to)),
                format!("clear_{reason}"),
            );
            let (mut client, before) = (lab.sender(kind, to), count(&guard, &counter));
            client.go_on();
            assert_eq!(
                (client.line().as_str(), receiver.receives(arrives_within())),
                ("sent", true),
                "{kind} to {to}"
            );
            assert!(
                count(&guard, &counter) > before,
                "{kind} to {to}: {counter}"
            );
        }
    }
    assert_eq!(guard.last_stopped().unwrap().reason(), None);
    lab.node.within(|| guard.release()).unwrap();
}

#[test]
fn dns_reaches_the_named_resolvers_and_no_others() {
    let lab = Lab::new();
    let guard = lab.guard(None);
    lab.answer_questions();
    let ask = |to: &str| CaseProcess::start(&lab.pod, Some(&lab.cgroup), "ask", &[to]).line();
    assert_eq!(ask("10.77.0.9:53"), EPERM, "no resolver is named yet");
    let named: [IpAddr; 2] = ["10.77.0.9".parse().unwrap(), "fd77::9".parse().unwrap()];
    assert_eq!(guard.set(OutsidePackets::Stop, &named).unwrap(), 0);
    for (case, to, answer) in [
        ("named", "10.77.0.9:53", "answer from 10.77.0.9"),
        ("named, IPv6", "[fd77::9]:53", "answer from fd77::9"),
        ("not named", "10.77.0.8:53", EPERM),
        ("another port of a named one", "10.77.0.9:5353", EPERM),
    ] {
        assert_eq!(ask(to), answer, "{case}");
    }
    assert!(count(&guard, "passed_resolver") >= 4, "question and answer");
    assert_eq!(
        guard
            .set(OutsidePackets::Stop, &["10.77.0.8".parse().unwrap()])
            .unwrap(),
        0
    );
    assert_eq!(
        (ask("10.77.0.9:53").as_str(), ask("10.77.0.8:53").as_str()),
        (EPERM, "answer from 10.77.0.8"),
        "another is named"
    );
    lab.node.within(|| guard.release()).unwrap();
}

#[test]
fn only_mesh_traffic_enters() {
    let lab = Lab::new();
    let guard = lab.guard(None);
    for (at, to) in [("0.0.0.0:99", "10.77.0.2:99"), ("[::]:99", "[fd77::2]:99")] {
        let mut client = CaseProcess::start(&lab.pod, Some(&lab.cgroup), "receive", &[at]);
        assert_eq!(client.line(), "open");
        client.go_on();
        let to: SocketAddr = to.parse().unwrap();
        let from = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        lab.node
            .within(|| UdpSocket::bind(from).unwrap().send_to(TEXT, to))
            .unwrap();
        assert_eq!(client.line(), "nothing", "{to}");
    }
    assert_eq!(count(&guard, "stopped_udp"), 2);
    lab.node.within(|| guard.release()).unwrap();
}

/// The neighbor tables are empty, so ARP and neighbor discovery must work. The proxy is not a
/// member of the pod's cgroup.
#[test]
fn tcp_and_link_protocols_pass() {
    let lab = Lab::new();
    let guard = lab.guard(None);
    for (from, to, dial) in [
        (&lab.pod, &lab.node, "10.77.0.9:80"),
        (&lab.pod, &lab.node, "[fd77::9]:80"),
        (&lab.node, &lab.pod, "10.77.0.2:81"),
        (&lab.node, &lab.pod, "[fd77::2]:81"),
    ] {
        let at: SocketAddr = dial.parse().unwrap();
        let listener = to.listen(&format!(
            "{}:{}",
            if at.is_ipv4() { "0.0.0.0" } else { "[::]" },
            at.port()
        ));
        let mut client = from
            .within(|| {
                TcpStream::connect_timeout(&at, canal_timing::deadline(Duration::from_secs(5)))
            })
            .unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.write_all(TEXT).unwrap();
        server.read_exact(&mut [0; TEXT.len()]).unwrap();
        lab::close(listener);
    }
    // These ports have no listener, so the pod's kernel answers with a reset that belongs to no
    // application.
    for dial in ["10.77.0.2:9", "[fd77::2]:9"] {
        let refused = lab
            .node
            .within(|| {
                TcpStream::connect_timeout(
                    &dial.parse().unwrap(),
                    canal_timing::deadline(Duration::from_secs(5)),
                )
            })
            .unwrap_err();
        assert_eq!(
            refused.kind(),
            std::io::ErrorKind::ConnectionRefused,
            "{dial}"
        );
    }
    // At least five segments in each of four connections; a question and an answer about
    // neighbours in each family; a reset in each family.
    for (counter, least) in [
        ("passed_tcp", 20),
        ("passed_neighbour", 4),
        ("passed_reset", 2),
    ] {
        assert!(
            count(&guard, counter) >= least,
            "{counter}: {}",
            count(&guard, counter)
        );
    }
    let stopped: Vec<_> = guard
        .counters()
        .unwrap()
        .into_iter()
        .filter(|(v, n)| canal_offload::pod_guard::is_stopped(*v) && *n > 0)
        .collect();
    assert!(stopped.is_empty(), "{stopped:?}");
    lab.node.within(|| guard.release()).unwrap();
}

/// The errors are *packet too big* in both families, about TCP and about a datagram that no process
/// may have sent.
#[test]
fn errors_about_tcp_enter_and_errors_about_other_packets_do_not() {
    let lab = Lab::new();
    let guard = lab.guard(None);
    for to in ["10.77.0.2:0", "[fd77::2]:0"] {
        let to: SocketAddr = to.parse().unwrap();
        let from: IpAddr = if to.is_ipv4() { "10.77.0.9" } else { "fd77::9" }
            .parse()
            .unwrap();
        let family = if to.is_ipv4() {
            libc::IPPROTO_ICMP
        } else {
            libc::IPPROTO_ICMPV6
        };
        let receiver = lab.pod.within(|| Receiver::open(to, family));
        let send = |quoted: u8| {
            // Fragmentation needed and packet too big, each with an MTU of 0x500, that is 1280.
            let mut error: Vec<u8> = if to.is_ipv4() {
                vec![3, 4, 0, 0, 0, 0, 0x05, 0]
            } else {
                vec![2, 0, 0, 0, 0, 0, 0x05, 0]
            };
            error.extend(ip(to.ip(), from, quoted, TEXT));
            let socket = lab
                .node
                .within(|| {
                    Socket::new(
                        Domain::for_address(to),
                        Type::RAW,
                        Some(Protocol::from(family)),
                    )
                })
                .unwrap();
            // A sender on the node itself gets an error for the drop.
            socket.send_to(&error, &to.into()).is_ok()
        };
        let before = (count(&guard, "passed_error"), count(&guard, "stopped_icmp"));
        assert!(
            send(6) && receiver.receives(arrives_within()),
            "{to}: about TCP"
        );
        // Protocol 17 is UDP, and 6 above is TCP.
        send(17);
        assert!(!receiver.receives(NEVER), "{to}: about a datagram");
        assert_eq!(
            (count(&guard, "passed_error"), count(&guard, "stopped_icmp")),
            (before.0 + 1, before.1 + 1),
            "{to}"
        );
        // The datagram's first bytes are its ports. With this route it may have been a reply to the
        // tier.
        let port = u16::from_be_bytes([TEXT[0], TEXT[1]]);
        guard
            .set_udp(&UdpFromTier {
                ports: [port].into(),
                tier: [from.into()].into(),
            })
            .unwrap();
        assert!(
            send(17) && receiver.receives(arrives_within()),
            "{to}: about an answer to the tier"
        );
        assert_eq!(count(&guard, "passed_error"), before.0 + 2, "{to}");
        guard.set_udp(&UdpFromTier::default()).unwrap();
    }
    lab.node.within(|| guard.release()).unwrap();
}

#[test]
fn a_guard_outlives_its_process_and_keeps_its_policy() {
    let (lab, pins) = (Lab::new(), LabPins::new());
    let [to, _] = targets();
    let receiver = lab.receiver(to, protocol("udp", to));
    let sends = |arrives: bool, case: &str| {
        for kind in ["udp", "frame"] {
            let mut client = lab.sender(kind, to);
            client.go_on();
            client.line();
            assert_eq!(
                receiver.receives(if arrives { arrives_within() } else { NEVER }),
                arrives,
                "{case}, {kind}"
            );
        }
    };
    drop(lab.guard(Some(pins.path())));
    sends(false, "the process has ended");
    let guard = lab.guard(Some(pins.path()));
    guard.set(OutsidePackets::Watch, &[]).unwrap();
    drop(guard);
    sends(true, "the process ended after the watch began");
    let guard = lab.guard(Some(pins.path()));
    sends(true, "the next process finds the policy");
    assert!(
        count(&guard, "clear_udp") >= 2 && count(&guard, "stopped_udp") >= 1,
        "and the counters"
    );
    lab.node.within(|| guard.release()).unwrap();
    canal_offload::capture::release_all(pins.path()).unwrap();
}

/// The guard must not affect the pod's own loopback.
#[test]
fn datagrams_inside_a_pod_pass() {
    let lab = Lab::new();
    let guard = lab.guard(None);
    for (at, to) in [
        ("127.0.0.1:99", "127.0.0.1:99"),
        ("0.0.0.0:98", "10.77.0.2:98"),
        ("[::]:97", "[fd77::2]:97"),
    ] {
        let mut receiver =
            CaseProcess::start(&lab.pod, Some(&lab.cgroup), "receive", &[at, "arrives"]);
        assert_eq!(receiver.line(), "open");
        let mut sender = lab.sender("udp", to.parse().unwrap());
        receiver.go_on();
        sender.go_on();
        assert_eq!(
            (sender.line().as_str(), receiver.line()),
            ("sent", format!("{} bytes", TEXT.len())),
            "{to}"
        );
    }
    assert!(count(&guard, "passed_loopback") >= 6);
    lab.node.within(|| guard.release()).unwrap();
}

#[test]
fn an_interface_that_leads_past_the_node_is_named() {
    let (ns, cgroup, far) = (LabNetns::new(), Cgroup::new(), LabNetns::bare());
    ns.ip(&format!("link set nowhere netns {} name far0", far.name()));
    let guard = PodGuards::load(None)
        .unwrap()
        .attach("a/b/pod", &cgroup.dir, &ns.path())
        .unwrap();
    assert_eq!(guard.exposed_interfaces(), ["pod0"]);
    guard.release().unwrap();
}

#[test]
fn connections_dialled_before_are_reset_and_accepted_ones_go_on() {
    let lab = Lab::new();
    for (far, near) in [
        ("10.77.0.9:80", "10.77.0.2:81"),
        ("[fd77::9]:80", "[fd77::2]:81"),
    ] {
        let listener = lab.node.listen(far);
        let mut dialled = CaseProcess::start(&lab.pod, Some(&lab.cgroup), "dial", &[far]);
        let (_held, from) = listener.accept().unwrap();
        let mut server = CaseProcess::start(&lab.pod, Some(&lab.cgroup), "serve", &[near]);
        assert_eq!(server.line(), "open");
        let mut into = lab.node.within(|| TcpStream::connect(near).unwrap());
        assert_eq!(server.line(), "accepted");
        let older = sockets::dialled(&lab.pod.path(), &lab.cgroup.dir).unwrap();
        assert_eq!(
            older.iter().map(|c| c.local).collect::<Vec<_>>(),
            [from],
            "{far}"
        );
        assert_eq!(sockets::reset(&lab.pod.path(), &older).unwrap(), 1, "{far}");
        assert!(
            dialled.line().starts_with("error Connection"),
            "{far}: its application hears it"
        );
        server.go_on();
        assert_eq!(
            server.line(),
            "Ok(())",
            "{near}: policies are evaluated for accepted connections"
        );
        into.read_exact(&mut [0; 2]).unwrap();
        lab::close(listener);
    }
}

/// The kernel's own reports are short; those of a raw socket could carry data to the link.
#[test]
fn listener_reports_of_a_pod_have_a_bound() {
    // Length of IPv6's header.
    const HEADER: usize = 40;
    let lab = Lab::new();
    let guard = lab.guard(None);
    let socket = lab.pod.within(|| {
        let socket = Socket::new(Domain::IPV6, Type::RAW, Some(Protocol::ICMPV6)).unwrap();
        // SAFETY: the name is a C string.
        let device = unsafe { libc::if_nametoindex(c"pod0".as_ptr()) };
        socket.set_multicast_if_v6(device).unwrap();
        socket.set_multicast_hops_v6(1).unwrap();
        socket
    });
    let to: SocketAddr = "[ff02::16]:0".parse().unwrap();
    let max = canal_abi::pod::LISTENER_BYTES_MAX as usize - HEADER;
    for (bytes, stopped) in [(max, 0), (max + 1, 1)] {
        let before = count(&guard, "stopped_frame");
        let report: Vec<u8> = std::iter::once(143)
            .chain(std::iter::repeat_n(0, bytes - 1))
            .collect();
        assert_eq!(socket.send_to(&report, &to.into()).unwrap(), bytes);
        assert_eq!(
            count(&guard, "stopped_frame") - before,
            stopped,
            "{bytes} bytes"
        );
    }
    lab.node.within(|| guard.release()).unwrap();
}

#[test]
fn datagrams_from_the_tier_pass_to_the_ports_of_udp_routes_and_back() {
    let (lab, pins) = (Lab::new(), LabPins::new());
    let guard = lab.guard(Some(pins.path()));
    check_udp_route(&lab, |udp| {
        assert_eq!(guard.set_udp(udp).unwrap(), UdpExcess::default())
    });
    // Each of the three exchanges and two datagrams is counted at both hooks.
    assert_eq!(count(&guard, "passed_udp_route"), 2 * (2 * 3 + 2));
    assert_eq!(
        guard
            .last_stopped()
            .unwrap()
            .reason()
            .map(verdict_name)
            .as_deref(),
        Some("stopped_udp")
    );
    // The next process must find the port open.
    guard.set_udp(&udp_route()).unwrap();
    drop(guard);
    assert_eq!(
        exchanged(&lab, "10.77.0.9:0", "10.77.0.2:99", arrives_within()),
        "answered",
        "no process runs"
    );
    let guard = lab.guard(Some(pins.path()));
    assert_eq!(
        exchanged(&lab, "[fd77::9]:0", "[fd77::2]:99", arrives_within()),
        "answered",
        "the next one"
    );
    lab.node.within(|| guard.release()).unwrap();
    canal_offload::capture::release_all(pins.path()).unwrap();
}

/// Only the first fragment contains a port, so a fragmented datagram does not pass in either
/// direction.
#[test]
fn fragments_of_a_udp_routes_datagram_are_stopped() {
    const TOO_LONG: [u8; 4000] = [7; 4000];
    let lab = Lab::new();
    let guard = lab.guard(None);
    guard.set_udp(&udp_route()).unwrap();
    for (from, to) in [
        ("10.77.0.9:0", "10.77.0.2:99"),
        ("[fd77::9]:0", "[fd77::2]:99"),
    ] {
        let to: SocketAddr = to.parse().unwrap();
        let mut pod =
            CaseProcess::start(&lab.pod, Some(&lab.cgroup), "receive", &[&to.to_string()]);
        assert_eq!(pod.line(), "open");
        pod.go_on();
        let (passed, stopped) = (
            count(&guard, "passed_udp_route"),
            count(&guard, "stopped_udp"),
        );
        // The sender, which is on the node, gets an error for the first fragment that is stopped.
        let _ = lab
            .node
            .within(|| UdpSocket::bind(from).unwrap())
            .send_to(&TOO_LONG, to);
        assert_eq!(pod.line(), "nothing", "{to}");
        assert!(
            count(&guard, "stopped_udp") > stopped && count(&guard, "passed_udp_route") == passed,
            "{to}"
        );
    }
    lab.node.within(|| guard.release()).unwrap();
}

#[test]
fn ports_and_ranges_beyond_the_capacity_are_omitted_and_reported() {
    let lab = Lab::new();
    let guard = lab.guard(None);
    let most = canal_abi::pod::TIER_RANGES_MAX;
    let wanted = |ports: usize, ranges: usize| UdpFromTier {
        ports: (1..=ports as u16).collect(),
        tier: (0..ranges)
            .map(|n| format!("10.{}.{}.0/24", n / 256, n % 256).parse().unwrap())
            .collect(),
    };
    assert_eq!(
        guard.set_udp(&wanted(UDP_PORTS_MAX, most)).unwrap(),
        UdpExcess::default()
    );
    assert_eq!(
        guard.set_udp(&wanted(UDP_PORTS_MAX + 1, most + 2)).unwrap(),
        UdpExcess {
            ports: 1,
            ranges: 2
        }
    );
    // A full guard accepts other elements in place of the present ones.
    assert_eq!(guard.set_udp(&udp_route()).unwrap(), UdpExcess::default());
    assert_eq!(
        exchanged(&lab, "10.77.0.9:0", "10.77.0.2:99", arrives_within()),
        "answered"
    );
    lab.node.within(|| guard.release()).unwrap();
}
