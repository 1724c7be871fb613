//! Tests `bpf/redirector.bpf.c` over single frames, in a namespace with real sockets in every
//! state. Covers which replica gets a packet, where the others are sent, every refusal, and exact
//! limits.

use std::collections::HashMap;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use crate::frames;
use crate::frames::{
    ACK, FIN, OuterHeaders, SYN, echo, icmp, ip, read, tcp, tcp_answer, udp, unreachable, with_ip4,
};
use crate::lab::{LabNetns, LabPins, TIME_WAIT, TcpSocket, until};
use canal_abi::tier::{
    BUCKETS, CHAIN, REPLICAS_MAX, Replica, STAMP_LAST, STAMP_MIXED, STAMP_SKIPPED, STAMP_VERSION,
    THROTTLE_SERVICE, THROTTLE_TENANT, THROTTLES_MAX, TIER_VNI, Table, ThrottleKey, address_be,
};
use canal_offload::redirector::{
    self, RedirectorOptions, RedirectorPrograms, ThrottleLimit, ThrottleLimits,
};
use canal_offload::socket_steering::{ServiceListener, SocketSteering};
use socket2::{Domain, Protocol, Socket, Type};

mod direct_frames;
mod limits;
mod segments;

use direct_frames::direct_frames;
use segments::{check_segments, segments, segments_without, spreading};

const EDGE: &str = "250.1.0.1";
const SELF: &str = "250.1.0.2";
const SELF6: &str = "[fdca:a1:0:250::fa01:2]";
const TENANT: u32 = 0x70;
/// A flag of TCP (RFC 9293 §3.1).
const RST: u8 = 4;
/// TC_ACT_OK, TC_ACT_SHOT and TC_ACT_REDIRECT.
const PASSED: u32 = 0;
const DROPPED: u32 = 2;
const SENT: u32 = 7;

/// Chains by service ID. This replica is 1; replica 9 is down, 10 is unknown, all others are up.
const CHAINS: [(u32, &[u16]); 8] = [
    (1, &[1, 2, 3]),
    (2, &[2, 1, 3]),
    (3, &[2, 3]),
    (4, &[1]),
    (5, &[9, 10, 1, 2]),
    (6, &[2, 9, 1, 3]),
    (7, &[9, 10]),
    (8, &[2, 3, 4, 5, 6, 7, 8, 1]),
];

struct RedirectorFixture {
    netns: LabNetns,
    redirector: RedirectorPrograms,
    steering: SocketSteering,
    _dns: UdpSocket,
    plain: Option<TcpListener>,
}

fn scene() -> RedirectorFixture {
    let netns = LabNetns::new();
    netns.ip(&format!("addr add {SELF}/32 dev pod0"));
    let redirector = RedirectorPrograms::attach(&RedirectorOptions {
        netns: Some(netns.path()),
        device: "pod0".into(),
        pin_dir: None,
        address: SELF.parse().unwrap(),
        number: 1,
        edge: EDGE.parse().unwrap(),
        mtu: 1400, // The cases of fragments compute their sizes from it.
        tunnel_port: 40_000,
        // With 0 each flow has its own source port, so that no frame depends on a choice of
        // tunnels.
        tunnels: 0,
    })
    .unwrap();
    // Host 0 is an edge.
    redirector
        .hosts()
        .put(&address_be(EDGE.parse().unwrap()), &0)
        .unwrap();
    for n in 1..=9u8 {
        // The edge has 250.1.0.1, so the address of replica n ends with n + 1. Replica 9 is down.
        let at = Ipv4Addr::new(250, 1, 0, 1 + n);
        redirector.hosts().put(&address_be(at), &n.into()).unwrap();
        redirector
            .replicas()
            .put(&n.into(), &Replica::new(at, n != 9))
            .unwrap();
    }
    for (service, chain) in CHAINS {
        put_table(&redirector, service, chain);
    }
    let steering = SocketSteering::attach(Some(&netns.path()), None).unwrap();
    // Any ports would do: the listeners are found by steering and not by their ports.
    let dns = netns.within(|| UdpSocket::bind("[::]:20053").unwrap());
    let plain = netns.listen("[::]:20000");
    steering.set(ServiceListener::Dns, &dns).unwrap();
    steering.set(ServiceListener::Plain, &plain).unwrap();
    RedirectorFixture {
        netns,
        redirector,
        steering,
        _dns: dns,
        plain: Some(plain),
    }
}

fn put_table(redirector: &RedirectorPrograms, service: u32, chain: &[u16]) {
    let mut whole = [0; CHAIN];
    whole[..chain.len()].copy_from_slice(chain);
    redirector
        .tables()
        .put(
            &service,
            &Table {
                vni: TENANT,
                version: 1,
                chain: [whole; BUCKETS],
            },
        )
        .unwrap();
}

fn connect(netns: &LabNetns, from: &str, to: &str, mark: u32) -> TcpStream {
    let (from, to): (SocketAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
    netns.within(|| {
        let s = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
        s.set_mark(mark).unwrap();
        s.bind(&from.into()).unwrap();
        s.connect_timeout(&to.into(), canal_timing::deadline(Duration::from_secs(3)))
            .unwrap();
        s.into()
    })
}

/// Injects an IP packet on loopback as if its source had sent it.
fn inject(netns: &LabNetns, packet: &[u8], to: IpAddr) {
    netns.within(|| {
        let s = Socket::new(
            Domain::for_address(SocketAddr::new(to, 0)),
            Type::RAW,
            Some(Protocol::from(255)),
        )
        .unwrap();
        s.send_to(packet, &SocketAddr::new(to, 0).into()).unwrap();
    });
}

fn counts(r: &RedirectorPrograms) -> HashMap<&'static str, u64> {
    r.counts().unwrap().into_iter().collect()
}

struct Ran {
    verdict: u32,
    mark: u32,
    frame: Vec<u8>,
    moved: Vec<&'static str>,
}

impl RedirectorFixture {
    fn run(&self, frame: &[u8]) -> Ran {
        let before = counts(&self.redirector);
        let t = self
            .netns
            .within(|| self.redirector.test_run(frame).unwrap());
        let moved = counts(&self.redirector)
            .into_iter()
            .filter(|(n, c)| *c != before[n])
            .map(|(n, _)| n)
            .collect();
        Ran {
            verdict: t.verdict,
            mark: t.mark,
            frame: t.frame,
            moved,
        }
    }

    /// Checks that the frame is delivered to the host's stack, unchanged except that hop and stamp
    /// are cleared.
    fn keeps(&self, case: &str, frame: &[u8], counter: &str) {
        let ran = self.run(frame);
        let mut untouched = frame.to_vec();
        untouched[43..46].fill(0);
        untouched[49] = 0;
        assert_eq!(
            (ran.verdict, &ran.moved[..]),
            (PASSED, &[counter][..]),
            "{case}"
        );
        assert!(ran.frame == untouched, "{case}: it is changed");
    }

    fn drops(&self, case: &str, frame: &[u8], counter: &str) {
        let ran = self.run(frame);
        assert_eq!(
            (ran.verdict, &ran.moved[..]),
            (DROPPED, &[counter][..]),
            "{case}"
        );
    }

    /// Checks that the frame is sent on; `to` is the replica's number and the expected hop.
    fn sends(&self, case: &str, frame: &[u8], to: (u8, u8), inside: &str, counter: &str) {
        self.sends_stamped(case, frame, (to.0, to.1, 1), inside, counter);
    }

    /// Checks that the frame is sent on; `to` is the replica's number, the expected hop and the
    /// expected stamp.
    fn sends_stamped(
        &self,
        case: &str,
        frame: &[u8],
        to: (u8, u8, u32),
        inside: &str,
        counter: &str,
    ) {
        let ran = self.run(frame);
        assert_eq!(
            (ran.verdict, &ran.moved[..]),
            (SENT, &[counter][..]),
            "{case}"
        );
        let at = Ipv4Addr::new(250, 1, 0, 1 + to.0);
        let outside = format!(
            "{SELF} > {at} vni 0xca0a1 hop {} stamp {:#x} 02ca0a010002 > 02ca0a010001",
            to.1, to.2
        );
        assert_eq!(read(&ran.frame), format!("{outside}: {inside}"), "{case}");
    }
}

fn from_edge(hop: u8, inner: &[u8]) -> Vec<u8> {
    OuterHeaders {
        hop,
        stamp: 1,
        ..OuterHeaders::new(EDGE, SELF, TIER_VNI)
    }
    .frame(inner)
}

fn service4(id: u32) -> String {
    format!("240.0.0.{id}")
}

fn service6(id: u32) -> String {
    format!("fdca:a1:0:240::{id:x}")
}

#[test]
fn segments_find_their_owner_while_tables_spread() {
    let s = scene();
    // Replica 8.
    let suspect = Ipv4Addr::new(250, 1, 0, 9);
    s.redirector
        .replicas()
        .put(&8, &Replica::suspect(suspect))
        .unwrap();
    for (service, chain) in [(9, &[1u16, 8, 2][..]), (10, &[1, 9, 2]), (11, &[2, 1])] {
        put_table(&s.redirector, service, chain);
    }
    for (case, service, sender, hop, stamp, to, counter) in spreading() {
        let at = format!("{}:80", service4(service));
        let segment = tcp("10.1.1.2:4711", &at, ACK, b"some bytes");
        // Sender 1 is the edge; the address of replica n ends with n + 1.
        let sender = Ipv4Addr::new(250, 1, 0, sender + u8::from(sender != 1));
        let frame = OuterHeaders {
            hop,
            stamp,
            ..OuterHeaders::new(&sender.to_string(), SELF, TIER_VNI)
        }
        .frame(&segment);
        // Replica 0 stands for none: the segment is dropped, or left to this host's kernel.
        match (to, counter) {
            ((0, ..), "ownership_unsettled") => s.drops(case, &frame, counter),
            ((0, ..), _) => s.keeps(case, &frame, counter),
            _ => s.sends_stamped(
                case,
                &frame,
                to,
                &format!("tcp 10.1.1.2:4711 > {at}"),
                counter,
            ),
        }
    }
    // A suspect replica gets no new sessions.
    put_table(&s.redirector, 9, &[8, 2]);
    let syn = tcp("10.1.1.2:4711", "240.0.0.9:80", SYN, b"");
    let inside = "tcp 10.1.1.2:4711 > 240.0.0.9:80";
    s.sends_stamped(
        "SYN over a suspect",
        &from_edge(0, &syn),
        (2, 1, STAMP_SKIPPED | 1),
        inside,
        "forwarded_new",
    );
}

#[test]
fn segments_go_to_the_head_or_along_the_chain() {
    let mut s = scene();
    check_segments(&s, &segments());
    s.plain = None;
    // A closed socket leaves the map after a grace period of the kernel.
    until("it leaves with its socket", || {
        !s.steering.is_open(ServiceListener::Plain)
    });
    check_segments(&s, &segments_without());
}

#[test]
fn non_tcp_packets_go_to_the_head() {
    let s = scene();
    // Nothing listens on port 54.
    let shut = udp("10.1.1.2:4711", "240.0.0.1:54", b"q");
    s.keeps(
        "UDP",
        &from_edge(0, &udp("10.1.1.2:4711", "240.0.0.1:53", b"question")),
        "datagram",
    );
    s.keeps(
        "UDP v6",
        &from_edge(
            2,
            &udp("[fd01::2]:4711", "[fdca:a1:0:240::2]:53", b"question"),
        ),
        "datagram",
    );
    s.keeps(
        "echo",
        &from_edge(0, &echo("10.1.1.2", "240.0.0.1", false)),
        "icmp",
    );
    s.keeps(
        "echo v6",
        &from_edge(1, &echo("fd01::2", "fdca:a1:0:240::2", false)),
        "icmp",
    );
    let question = udp("10.1.1.2:4711", "240.0.0.2:53", b"question");
    s.sends(
        "UDP behind the head",
        &from_edge(0, &question),
        (2, 1),
        "udp 10.1.1.2:4711 > 240.0.0.2:53",
        "forwarded_new",
    );
    s.sends(
        "UDP to a missing listener",
        &from_edge(0, &shut),
        (2, 1),
        "udp 10.1.1.2:4711 > 240.0.0.1:54",
        "not_listening",
    );
    let ping = echo("10.1.1.2", "240.0.0.2", false);
    s.sends(
        "echo behind the head",
        &from_edge(0, &ping),
        (2, 1),
        "icmp 8/0 10.1.1.2 > 240.0.0.2",
        "forwarded_new",
    );
}

/// Opens a connection to a service and returns the client's address and both ends.
fn established(s: &RedirectorFixture, from: &str, to: &str) -> (SocketAddr, [TcpStream; 2]) {
    let client = connect(&s.netns, from, to, 0);
    let (server, _) = s.plain.as_ref().unwrap().accept().unwrap();
    (client.local_addr().unwrap(), [client, server])
}

fn waiting(s: &RedirectorFixture, from: &str, to: &str) -> SocketAddr {
    let (at, [mut client, server]) = established(s, from, to);
    drop(server);
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    drop(client);
    until("TIME_WAIT", || {
        s.netns.tcp_sockets().contains(&TcpSocket {
            state: TIME_WAIT,
            remote_port: at.port(),
        })
    });
    at
}

/// Sends a SYN to a service and returns the client's address and the sequence number of the
/// kernel's SYN-ACK.
fn answered(s: &RedirectorFixture, from: &str, to: &str) -> (SocketAddr, u32) {
    let (client, service): (SocketAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
    let heard = s.netns.within(|| {
        let all = i32::from((libc::ETH_P_ALL as u16).to_be());
        Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(all))).unwrap()
    });
    heard
        .set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(2))))
        .unwrap();
    inject(&s.netns, &tcp(from, to, SYN, b""), service.ip());
    // Ports, sequence number and flags are found in the inner packet on tier0 or in the outer
    // packet behind it.
    let ports = [service.port().to_be_bytes(), client.port().to_be_bytes()].concat();
    for _ in 0..100 {
        let mut frame = [0u8; 2048];
        let Ok(length) = (&heard).read(&mut frame) else {
            break;
        };
        let found = frame[..length]
            .windows(16)
            .find(|w| w[..4] == ports && w[13] & 0x3f == SYN | ACK);
        if let Some(tcp) = found {
            return (client, u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]));
        }
    }
    panic!("no SYN-ACK from {to} to {from}");
}

/// If a SYN was sent again after the head changed, two replicas have a request. Each accepts only
/// the reply to its own SYN-ACK. A reply to the other's goes along the chain and is not reset here.
#[test]
fn a_request_owns_only_the_answer_to_its_own_syn_ack() {
    let s = scene();
    for (from, to) in [
        ("10.77.0.9:4711", "240.0.0.2:80"),
        ("[fd77::9]:4711", "[fdca:a1:0:240::2]:80"),
    ] {
        let (_, number) = answered(&s, from, to);
        // 77 is any number but 1.
        let (own, other) = (number.wrapping_add(1), number.wrapping_add(77));
        let segment = |hop, flags, acknowledged| {
            from_edge(hop, &tcp_answer(from, to, flags, acknowledged, b""))
        };
        // From the edge, and along the chain.
        for hop in [0, 2] {
            s.keeps(
                "the answer to the own SYN-ACK",
                &segment(hop, ACK, own),
                "owned",
            );
            s.keeps(
                "with the client's FIN",
                &segment(hop, FIN | ACK, own),
                "owned",
            );
            s.keeps(
                "a reset ends any request",
                &segment(hop, RST | ACK, other),
                "owned",
            );
        }
        let next = format!("tcp {from} > {to}");
        s.sends(
            "the answer to another's, from the edge",
            &segment(0, ACK, other),
            (2, 1),
            &next,
            "forwarded",
        );
        s.sends(
            "the answer to another's, along the chain",
            &segment(2, ACK, other),
            (3, 3),
            &next,
            "forwarded",
        );
    }
}

#[test]
fn only_sessions_of_the_kernel_are_owned() {
    let mut s = scene();
    let (from4, from6) = ("10.77.0.2:0", "[fd77::2]:0");
    let mut open = Vec::new();
    let mut owned = Vec::new();
    for (from, to) in [(from4, "240.0.0.2:80"), (from6, "[fdca:a1:0:240::2]:80")] {
        let (client, ends) = established(&s, from, to);
        open.push(ends);
        owned.push(("established", client, to));
        owned.push(("time-wait", waiting(&s, from, to), to));
    }
    let mut numbers = HashMap::new();
    for (case, from, to) in [
        ("request", "10.77.0.9:4711", "240.0.0.2:80"),
        ("request v6", "[fd77::9]:4711", "[fdca:a1:0:240::2]:80"),
    ] {
        let (at, number) = answered(&s, from, to);
        owned.push((case, at, to));
        numbers.insert(at, number.wrapping_add(1));
    }
    // A session belongs to its socket, so it has to stay owned when the listener is gone.
    for listening in [true, false] {
        for (case, from, to) in &owned {
            let case = format!("{case} from {from}, listening: {listening}");
            let from_text = from.to_string();
            // A half-open request ends with its listener.
            if listening || !case.starts_with("request") {
                // From the edge, and along the chain.
                for (hop, flags) in [(0, ACK), (2, ACK), (3, FIN | ACK), (0, RST)] {
                    // The program compares the acknowledgment only with half-open sessions; for
                    // others any number will do.
                    let acknowledged = numbers.get(from).copied().unwrap_or(8);
                    s.keeps(
                        &case,
                        &from_edge(
                            hop,
                            &tcp_answer(&from_text, to, flags, acknowledged, b"data"),
                        ),
                        "owned",
                    );
                }
                // 60 bytes contain the addresses and ports in both families.
                let about = unreachable(
                    &from.ip().to_string(),
                    &ip_of(to),
                    &tcp(to, &from_text, ACK, b"data"),
                    60,
                );
                s.keeps(&case, &from_edge(0, &about), "icmp");
            }
            let syn = from_edge(0, &tcp(&from_text, to, SYN, b""));
            s.sends(
                &case,
                &syn,
                (2, 1),
                &format!("tcp {from} > {to}"),
                "forwarded_new",
            );
            if !listening {
                let syn = from_edge(1, &tcp(&from_text, to, SYN, b""));
                s.sends(
                    &case,
                    &syn,
                    (3, 2),
                    &format!("tcp {from} > {to}"),
                    "not_listening",
                );
            }
            // A port of no session.
            let other = SocketAddr::new(from.ip(), from.port() ^ 1).to_string();
            let frame = from_edge(0, &tcp(&other, to, ACK, b""));
            s.sends(
                "another port",
                &frame,
                (2, 1),
                &format!("tcp {other} > {to}"),
                "forwarded",
            );
        }
        s.plain = None;
    }
}

fn ip_of(at: &str) -> String {
    at.parse::<SocketAddr>().unwrap().ip().to_string()
}

#[test]
fn errors_follow_the_session_that_they_are_about() {
    let s = scene();
    let error = |service: u32, hop| {
        let at = service4(service);
        from_edge(
            hop,
            &unreachable(
                "10.1.9.9",
                &at,
                &tcp(&format!("{at}:80"), "10.1.1.2:4711", ACK, b""),
                28,
            ),
        )
    };
    let about = "icmp 3/3 10.1.9.9 > 240.0.0.1 about tcp 240.0.0.1:80 > 10.1.1.2:4711";
    s.sends("nobody's here", &error(1, 0), (2, 1), about, "forwarded");
    s.keeps("the end of the chain", &error(8, 1), "icmp");
    let datagram = unreachable(
        "10.1.9.9",
        "240.0.0.4",
        &udp("240.0.0.4:53", "10.1.1.2:4711", b"a"),
        28,
    );
    s.keeps("about a datagram", &from_edge(0, &datagram), "icmp");
    let other = unreachable(
        "10.1.9.9",
        "240.0.0.1",
        &tcp("240.0.0.2:80", "10.1.1.2:4711", ACK, b""),
        28,
    );
    s.drops(
        "about another service",
        &from_edge(0, &other),
        "drop_malformed",
    );
}

#[test]
fn a_cookie_that_is_none_is_nobodys() {
    let s = scene();
    s.netns
        .within(|| std::fs::write("/proc/sys/net/ipv4/tcp_syncookies", "2").unwrap());
    // The kernel accepts cookies only shortly after it has sent some.
    answered(&s, "10.77.0.9:4711", "240.0.0.4:80");
    s.keeps(
        "no cookie",
        &from_edge(0, &tcp("10.77.0.9:4711", "240.0.0.4:80", ACK, b"")),
        "unowned",
    );
}

/// Opens a connection that the gateway dials for the tenant.
fn dialled(s: &RedirectorFixture, from: &str, to: &str) -> (SocketAddr, TcpStream) {
    let client = connect(&s.netns, from, to, TENANT);
    (client.local_addr().unwrap(), client)
}

/// Checks that packets of a tenant are refused if no connection was dialed to their source.
fn refuse_what_was_not_dialled(s: &RedirectorFixture) {
    let to_admin = tcp("10.1.1.2:4711", &format!("{SELF}:15021"), ACK, b"");
    s.drops(
        "a listener",
        &OuterHeaders::new(EDGE, SELF, TENANT).frame(&to_admin),
        "drop_crossed",
    );
    let datagram = unreachable(
        "10.77.0.2",
        SELF,
        &udp(&format!("{SELF}:1"), "10.77.0.2:9000", b""),
        28,
    );
    s.drops(
        "an error about a datagram",
        &OuterHeaders::new(EDGE, SELF, TENANT).frame(&datagram),
        "drop_protocol",
    );
    for to in ["250.1.0.3:5000", "240.0.0.1:80", "127.0.0.1:5000"] {
        s.drops(
            to,
            &OuterHeaders::new(EDGE, SELF, TENANT).frame(&tcp("10.77.0.2:9000", to, ACK, b"")),
            "drop_crossed",
        );
    }
}

#[test]
fn responses_are_accepted_only_from_the_dialed_tenant() {
    let s = scene();
    let _endpoint = s.netns.listen("[::]:9000");
    // A tenant must not reach this listener (`refuse_what_was_not_dialled`).
    let _admin = s.netns.listen("0.0.0.0:15021");
    for (own, to) in [
        (format!("{SELF}:0"), "10.77.0.2:9000"),
        (format!("{SELF6}:0"), "[fd77::2]:9000"),
    ] {
        let (at, _open) = dialled(&s, &own, to);
        let text = at.to_string();
        let answer =
            |from: &str, vni: u32, inner: &[u8]| OuterHeaders::new(from, SELF, vni).frame(inner);
        let data = tcp(to, &text, ACK, b"answer");
        let ran = s.run(&answer(EDGE, TENANT, &data));
        assert_eq!(
            (ran.verdict, ran.mark, &ran.moved[..]),
            (PASSED, TENANT, &["answer"][..]),
            "{to}"
        );
        // 60 bytes contain the addresses and ports in both families.
        let error = unreachable(&ip_of(to), &ip_of(&text), &tcp(&text, to, ACK, b""), 60);
        s.keeps("an error", &answer(EDGE, TENANT, &error), "answer");
        // No socket has this port.
        let gone = SocketAddr::new(at.ip(), 9).to_string();
        s.keeps(
            "a packet of a session that has ended: it gets a reset",
            &answer(EDGE, TENANT, &tcp(to, &gone, ACK, b"")),
            "answer",
        );
        s.drops(
            "another tenant's VNI",
            &answer(EDGE, 0x71, &data),
            "drop_crossed",
        );
        s.drops(
            "an error by another tenant's VNI",
            &answer(EDGE, 0x71, &error),
            "drop_crossed",
        );
        s.drops(
            "a SYN",
            &answer(EDGE, TENANT, &tcp(to, &gone, SYN, b"")),
            "drop_crossed",
        );
        s.drops(
            "a SYN and ACK of nothing",
            &answer(EDGE, TENANT, &tcp(to, &gone, SYN | ACK, b"")),
            "drop_crossed",
        );
        let late = unreachable(&ip_of(to), &ip_of(&text), &tcp(&gone, to, ACK, b""), 60);
        s.drops(
            "an error about nothing",
            &answer(EDGE, TENANT, &late),
            "drop_crossed",
        );
        s.drops(
            "not from an edge",
            &answer("250.1.0.3", TENANT, &data),
            "drop_unknown_source",
        );
        s.drops(
            "from a host outside the tier",
            &answer("250.1.0.99", TENANT, &data),
            "drop_unknown_source",
        );
        s.drops(
            "a datagram",
            &answer(EDGE, TENANT, &udp(to, &text, b"")),
            "drop_protocol",
        );
        s.drops(
            "an echo",
            &answer(EDGE, TENANT, &echo(&ip_of(to), &ip_of(&text), false)),
            "drop_protocol",
        );
    }
    refuse_what_was_not_dialled(&s);
}

#[test]
fn every_refusal_has_a_counter() {
    let s = scene();
    let syn = tcp("10.1.1.2:4711", "240.0.0.1:80", SYN, b"");
    let tier = |from: &str, to: &str| OuterHeaders::new(from, to, TIER_VNI).frame(&syn);
    let edit = |mut f: Vec<u8>, at: usize, to: u8| {
        f[at] = to;
        f
    };
    let a = |text: &str| text.parse::<IpAddr>().unwrap();
    let to = |at: &str| from_edge(0, &tcp("10.1.1.2:4711", at, SYN, b""));
    // The edited bytes: the outer IPv4 header begins at 14 and the VXLAN header at 42, whose VNI
    // ends with byte 48. The type of the inner Ethernet header ends with byte 63.
    // 0x46 is an IPv4 header with options, and 0x20 at byte 20 says that more fragments follow.
    for (case, frame, counter) in [
        (
            "an unknown host",
            tier("250.1.0.99", SELF),
            "drop_unknown_source",
        ),
        (
            "for another host",
            tier(EDGE, "250.1.0.3"),
            "drop_unknown_source",
        ),
        ("no table", to("240.0.0.77:80"), "drop_service"),
        ("service 0", to("240.0.0.0:80"), "drop_service"),
        (
            "the replica's own address",
            to("250.1.0.2:80"),
            "drop_service",
        ),
        ("loopback", to("127.0.0.1:80"), "drop_service"),
        (
            "a fragment",
            from_edge(
                0,
                &with_ip4(udp("10.1.1.2:1", "240.0.0.1:53", b"12345678"), 0x2000, &[]),
            ),
            "drop_fragment",
        ),
        (
            "an outer fragment",
            edit(from_edge(0, &syn), 20, 0x20),
            "drop_fragment",
        ),
        (
            "SCTP",
            from_edge(0, &ip(a("10.1.1.2"), a("240.0.0.1"), 132, &[0; 32])),
            "drop_protocol",
        ),
        (
            "a redirect",
            from_edge(0, &icmp("10.1.1.2", "240.0.0.1", 5, 1, [0; 4], &syn)),
            "drop_protocol",
        ),
        ("ARP", edit(from_edge(0, &syn), 63, 6), "drop_protocol"),
        ("no VNI", edit(from_edge(0, &syn), 42, 0), "drop_malformed"),
        (
            "unknown VXLAN flags",
            edit(from_edge(0, &syn), 42, 0x88),
            "drop_malformed",
        ),
        (
            "a stamp by a tenant's VNI",
            edit(from_edge(0, &syn), 48, 0xa2),
            "drop_malformed",
        ),
        (
            "an inner length too long",
            edit(from_edge(0, &syn), frames::HEAD + 2, 1),
            "drop_malformed",
        ),
        (
            "outer options",
            edit(from_edge(0, &syn), 14, 0x46),
            "drop_malformed",
        ),
    ] {
        s.drops(case, &frame, counter);
    }
}

/// A router fragmented a packet of an edge or of another replica. The sender of the inner packet
/// must get an error through the edge.
#[test]
fn senders_of_fragmented_packets_get_icmp_errors() {
    let s = scene();
    // An inner packet of 1400 bytes, so that the outer one exceeds the link's 1400.
    let data = vec![7u8; 1348];
    let to_service = tcp("10.1.1.2:4711", "240.0.0.1:80", ACK, &data);
    let to_service6 = tcp("[fd01:1::2]:4711", "[fdca:a1:0:240::1]:80", ACK, &data);
    let answer = tcp("10.1.2.2:8080", "250.1.0.2:4711", ACK, &data);
    let by = |from: &str, vni: u32, inner: &[u8]| {
        frames::torn(&OuterHeaders::new(from, SELF, vni).frame(inner), 1400)
    };
    let said = |vni: u32, what: &str| {
        format!("{SELF} > {EDGE} vni {vni:#x} hop 0 02ca0a010001 > 02ca0a010002: {what}")
    };
    // The first fragment carries 1376 bytes, a multiple of 8. Without UDP, VXLAN and Ethernet
    // headers 1346 remain.
    let about = "icmp 3/4 mtu 1346 240.0.0.1 > 10.1.1.2 about tcp 10.1.1.2:4711 > 240.0.0.1:80";
    for (case, frame, wanted) in [
        (
            "by an edge",
            by(EDGE, TIER_VNI, &to_service),
            said(TIER_VNI, about),
        ),
        (
            "by another replica",
            by("250.1.0.3", TIER_VNI, &to_service),
            said(TIER_VNI, about),
        ),
        (
            "IPv6",
            by(EDGE, TIER_VNI, &to_service6),
            said(
                TIER_VNI,
                "icmp 2/0 mtu 1346 fdca:a1:0:240::1 > fd01:1::2 about tcp [fd01:1::2]:4711 > [fdca:a1:0:240::1]:80",
            ),
        ),
        (
            "an endpoint's answer",
            by(EDGE, TENANT, &answer),
            said(
                TENANT,
                "icmp 3/4 mtu 1346 250.1.0.2 > 10.1.2.2 about tcp 10.1.2.2:8080 > 250.1.0.2:4711",
            ),
        ),
    ] {
        let ran = s.run(&frame);
        assert_eq!(
            (ran.verdict, &ran.moved[..]),
            (SENT, &["too_big"][..]),
            "{case}"
        );
        assert_eq!(frames::read(&ran.frame), wanted, "{case}");
    }
    for (case, frame, counter) in [
        (
            "by an unknown host",
            by("250.1.0.99", TIER_VNI, &to_service),
            "drop_unknown_source",
        ),
        (
            "a tenant's, by a replica",
            by("250.1.0.3", TENANT, &answer),
            "drop_fragment",
        ),
        (
            "for no service",
            by(EDGE, TIER_VNI, &answer),
            "drop_fragment",
        ),
        (
            "for no replica",
            by(EDGE, TENANT, &to_service),
            "drop_fragment",
        ),
        (
            "it may be cut inside",
            by(EDGE, TIER_VNI, &with_ip4(to_service.clone(), 0, &[])),
            "drop_fragment",
        ),
    ] {
        s.drops(case, &frame, counter);
    }
}

#[test]
fn no_packet_bypasses_the_tunnel() {
    let s = scene();
    for (case, frame, verdict, counter) in direct_frames() {
        let ran = s.run(&frame);
        assert_eq!(
            (ran.verdict, &ran.moved[..]),
            (verdict, &[counter][..]),
            "{case}"
        );
        assert!(
            verdict == DROPPED || ran.frame == frame,
            "{case}: it is changed"
        );
    }
}

#[test]
fn frames_that_end_in_the_middle_are_never_taken() {
    let s = scene();
    for packet in [
        tcp("10.1.1.2:4711", "240.0.0.1:80", SYN, b""),
        tcp("[fd01::2]:4711", "[fdca:a1:0:240::1]:80", SYN, b""),
        unreachable(
            "10.1.9.9",
            "240.0.0.1",
            &tcp("240.0.0.1:80", "10.1.1.2:4711", ACK, b""),
            28,
        ),
    ] {
        let whole = from_edge(0, &packet);
        // The kernel does not create packets shorter than an Ethernet and an IP header.
        for length in 34..whole.len() {
            let mut honest = whole[..length].to_vec();
            if length >= 42 {
                honest[16..18].copy_from_slice(&(length as u16 - 14).to_be_bytes());
                honest[38..40].copy_from_slice(&(length as u16 - 34).to_be_bytes());
            }
            for frame in [whole[..length].to_vec(), honest] {
                let ran = s.run(&frame);
                assert_eq!(
                    (ran.verdict, &ran.moved[..]),
                    (DROPPED, &["drop_malformed"][..]),
                    "{length} bytes of {}",
                    whole.len()
                );
            }
        }
    }
}

fn options(pins: Option<&LabPins>) -> RedirectorOptions {
    RedirectorOptions {
        netns: None,
        device: "lo".into(),
        pin_dir: pins.map(|p| p.path().to_path_buf()),
        address: SELF.parse().unwrap(),
        number: 1,
        edge: EDGE.parse().unwrap(),
        mtu: 1400,
        tunnel_port: 40_000,
        tunnels: 4,
    }
}

#[test]
fn a_full_map_is_reported() {
    let r = RedirectorPrograms::load(&options(None)).unwrap();
    let key = |id| ThrottleKey {
        scope: THROTTLE_SERVICE,
        id,
    };
    let limits = ThrottleLimits {
        sessions: Some(ThrottleLimit { rate: 1, burst: 1 }),
        ..ThrottleLimits::default()
    };
    (0..THROTTLES_MAX).for_each(|id| r.set_throttle(&key(id), &limits).unwrap());
    let e = r.set_throttle(&key(THROTTLES_MAX), &limits).unwrap_err();
    assert!(
        e.is_full() && e.to_string().contains("canal_throttles"),
        "{e}"
    );
    r.remove_throttle(&key(0)).unwrap();
    r.remove_throttle(&key(0)).unwrap();
    r.set_throttle(&key(THROTTLES_MAX), &limits).unwrap();
    (0..REPLICAS_MAX).for_each(|n| r.hosts().put(&n, &n).unwrap());
    assert!(r.hosts().put(&REPLICAS_MAX, &0).unwrap_err().is_full());
    assert!(
        r.replicas()
            .put(&REPLICAS_MAX, &Replica::new(Ipv4Addr::LOCALHOST, true))
            .unwrap_err()
            .is_full()
    );
    assert_eq!(
        (r.own().unwrap(), r.is_durable()),
        ((1, EDGE.parse().unwrap()), false)
    );
}
