//! Tests `bpf/session_count.bpf.c`: the numbers of sessions outside and inside of tunnels, both
//! directions as one session, packets without a session, and full tables.

use std::collections::HashMap;
use std::time::Duration;

use crate::frames;
use crate::frames::{ACK, HOST, OuterHeaders, ROUTER, SYN, echo, ip, tcp, udp, unreachable};
use crate::lab::LabNetns;
use canal_offload::sessions::{OuterSession, SessionTable};

fn counts(s: &SessionTable) -> HashMap<&'static str, u64> {
    s.counts().unwrap().into_iter().collect()
}

fn plain(packet: &[u8]) -> Vec<u8> {
    let kind = if packet[0] >> 4 == 6 {
        [0x86, 0xdd]
    } else {
        [8, 0]
    };
    [&HOST[..], &ROUTER[..], &kind, packet].concat()
}

fn tunnel(from: &str, to: &str, port: u16, vni: u32, packet: &[u8]) -> Vec<u8> {
    OuterHeaders {
        port,
        ..OuterHeaders::new(from, to, vni)
    }
    .frame(packet)
}

const EDGE: &str = "250.1.0.1";
const REPLICA: &str = "250.1.0.2";

/// A case's name, the frame, the numbers of new sessions outside and inside, and 1 if it is counted
/// as a packet without a session.
type SessionCase = (&'static str, Vec<u8>, (u64, u64), u64);

fn syn() -> Vec<u8> {
    tcp("10.1.1.2:4711", "240.0.0.1:80", SYN, b"")
}

fn answer() -> Vec<u8> {
    tcp("240.0.0.1:80", "10.1.1.2:4711", ACK, b"")
}

/// Returns packets of one session and of its neighbours, in tunnels.
fn tunnel_cases() -> Vec<SessionCase> {
    let (syn, answer) = (syn(), answer());
    // 40,000 is the tunnel's source port; 7 and 8 are the tenants' VNIs.
    vec![
        (
            "a tunnel's first",
            tunnel(EDGE, REPLICA, 40_000, 7, &syn),
            (1, 1),
            0,
        ),
        (
            "the same again",
            tunnel(EDGE, REPLICA, 40_000, 7, &syn),
            (0, 0),
            0,
        ),
        (
            "the answer has its own tunnel, but is the same session",
            tunnel(REPLICA, EDGE, 40_000, 7, &answer),
            (1, 0),
            0,
        ),
        (
            "another tunnel of the same session",
            tunnel(EDGE, REPLICA, 40_001, 7, &syn),
            (1, 0),
            0,
        ),
        (
            "another session of the same tunnel",
            tunnel(
                EDGE,
                REPLICA,
                40_000,
                7,
                &tcp("10.1.1.2:4712", "240.0.0.1:80", SYN, b""),
            ),
            (0, 1),
            0,
        ),
        (
            "another tenant's",
            tunnel(EDGE, REPLICA, 40_000, 8, &syn),
            (0, 1),
            0,
        ),
    ]
}

/// Returns packets of other protocols, in tunnels.
fn protocol_cases() -> Vec<SessionCase> {
    let answer = answer();
    // All frames are in tunnels of `tunnel_cases`, so only the session inside can be new.
    vec![
        (
            "UDP beside TCP",
            tunnel(
                EDGE,
                REPLICA,
                40_000,
                7,
                &udp("10.1.1.2:4711", "240.0.0.1:80", b""),
            ),
            (0, 1),
            0,
        ),
        (
            "IPv6",
            tunnel(
                EDGE,
                REPLICA,
                40_000,
                7,
                &tcp("[fd01::2]:4711", "[fdca:a1:0:240::1]:80", SYN, b""),
            ),
            (0, 1),
            0,
        ),
        (
            "an echo",
            tunnel(
                EDGE,
                REPLICA,
                40_000,
                7,
                &echo("10.1.1.2", "240.0.0.1", false),
            ),
            (0, 1),
            0,
        ),
        (
            "its reply",
            tunnel(
                REPLICA,
                EDGE,
                40_000,
                7,
                &echo("240.0.0.1", "10.1.1.2", true),
            ),
            (0, 0),
            0,
        ),
        (
            "an ICMP error belongs to the session of the packet inside",
            tunnel(
                EDGE,
                REPLICA,
                40_000,
                7,
                &unreachable("10.1.9.9", "240.0.0.1", &answer, 28),
            ),
            (0, 0),
            0,
        ),
    ]
}

/// Returns packets without a tunnel, and packets without a session.
fn plain_cases() -> Vec<SessionCase> {
    let (syn, answer) = (syn(), answer());
    let fragment = frames::with_ip4(udp("10.1.1.2:1", "10.1.1.3:2", b"12345678"), 0x0004, &[]);
    vec![
        ("without a tunnel", plain(&syn), (1, 0), 0),
        ("its answer", plain(&answer), (0, 0), 0),
        (
            "IPv6 without a tunnel",
            plain(&tcp("[fd01::2]:4711", "[fd01::3]:80", SYN, b"")),
            (1, 0),
            0,
        ),
        (
            "no ports",
            plain(&ip(
                "10.1.1.2".parse().unwrap(),
                "10.1.1.3".parse().unwrap(),
                132,
                &[0; 8],
            )),
            (0, 0),
            1,
        ),
        ("a later fragment", plain(&fragment), (0, 0), 1),
        (
            "ARP",
            [&HOST[..], &ROUTER[..], &[8, 6], &[0; 28]].concat(),
            (0, 0),
            1,
        ),
    ]
}

#[test]
fn sessions_are_counted_once() {
    let netns = LabNetns::new();
    let s = SessionTable::attach(Some(&netns.path()), "pod0").unwrap();
    for (case, frame, new, other) in [tunnel_cases(), protocol_cases(), plain_cases()].concat() {
        let (before, had) = (s.sessions().unwrap(), counts(&s));
        s.test_run(&frame).unwrap();
        let (after, has) = (s.sessions().unwrap(), counts(&s));
        assert_eq!((after.0 - before.0, after.1 - before.1), new, "{case}");
        assert_eq!(
            (has["other"] - had["other"], has["packets"] - had["packets"]),
            (other, 1),
            "{case}"
        );
    }
    let all = s.sessions().unwrap();
    let listed = s.outer();
    assert_eq!(listed.len() as u64, all.0, "{listed:?}");
    // 17 is UDP, which carries VXLAN; 6 is TCP.
    for (protocol, one, other) in [
        (17, "250.1.0.1:40000", "250.1.0.2:4789"),
        (17, "250.1.0.2:40000", "250.1.0.1:4789"),
        (6, "10.1.1.2:4711", "240.0.0.1:80"),
        (6, "[fd01::2]:4711", "[fd01::3]:80"),
    ] {
        let ends = [one, other].map(|end| end.parse().unwrap());
        let is_it = |s: &&OuterSession| {
            s.protocol == protocol && (s.ends == ends || s.ends == [ends[1], ends[0]])
        };
        assert_eq!(
            listed.iter().filter(is_it).count(),
            1,
            "{one} {other}: {listed:?}"
        );
    }
    // No session of this test has been idle for an hour.
    assert_eq!(s.sweep(Duration::from_secs(3600)).unwrap(), (0, 0));
    assert_eq!(
        (s.sweep(Duration::ZERO).unwrap(), s.sessions().unwrap()),
        (all, (0, 0)),
        "all are idle"
    );
    s.test_run(&tunnel(EDGE, REPLICA, 40_000, 7, &syn()))
        .unwrap();
    assert_eq!(s.sessions().unwrap(), (1, 1), "and are counted again");
}

#[test]
fn a_full_table_is_counted_and_keeps_what_it_has() {
    let netns = LabNetns::new();
    let s = SessionTable::attach_sized(Some(&netns.path()), "pod0", 4).unwrap();
    for round in 1..=2u64 {
        for port in 1..=6u16 {
            s.test_run(&tunnel(
                EDGE,
                REPLICA,
                40_000 + port,
                7,
                &tcp(&format!("10.1.1.2:{port}"), "240.0.0.1:80", SYN, b""),
            ))
            .unwrap();
        }
        let c = counts(&s);
        assert_eq!(
            (s.sessions().unwrap(), c["outer_full"], c["inner_full"]),
            ((4, 4), 2 * round, 2 * round)
        );
    }
}

#[test]
fn both_directions_of_a_device_are_seen_and_nothing_stays_behind() {
    let netns = LabNetns::bare();
    netns.ip("link add near type veth peer name far");
    netns.ip("link set near up");
    netns.ip("link set far up");
    netns.ip("addr add 10.78.0.1/24 dev near");
    netns.ip("neigh add 10.78.0.2 lladdr 02:00:00:00:00:01 dev near nud permanent");
    let filters = || {
        let shown = netns.within(|| {
            let run = |way: &str| {
                std::process::Command::new("tc")
                    .args(["filter", "show", "dev", "near", way])
                    .output()
                    .unwrap()
                    .stdout
            };
            [run("ingress"), run("egress")].concat()
        });
        String::from_utf8_lossy(&shown)
            .matches("canal_sessions")
            .count()
    };
    let s = SessionTable::attach(Some(&netns.path()), "near").unwrap();
    assert!(filters() >= 2);
    netns.within(|| {
        std::net::UdpSocket::bind("10.78.0.1:7000")
            .unwrap()
            .send_to(b"out", "10.78.0.2:7001")
            .unwrap()
    });
    assert_eq!(s.sessions().unwrap().0, 1);
    drop(s);
    assert_eq!(filters(), 0);
    let _again = SessionTable::attach(Some(&netns.path()), "near").unwrap();
}
