//! Tests `bpf/edge.bpf.c` over single frames: every path, every refusal, checksums, and the bucket
//! function in comparison with Rust's.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::frames;
use crate::frames::{
    ACK, FIN, HEAD, OuterHeaders, SYN, echo, icmp, ip, port_of, read, tcp, udp, udp_bare,
    unreachable, with_ip4,
};
use canal_abi::tier::{
    Address, AddressKey, BUCKETS, CHAIN, NodeKey, Prefix, PrefixKey, Replica, Return, TIER_VNI,
    Table, Tunnels, address_be,
};
use canal_model::ids::ServiceId;
use canal_offload::edge::{EdgeProgram, EdgeProgramSettings, TestFrameOptions};
use canal_wire::tier::flow_hash;

mod forwarded;
mod refused;

use forwarded::{answered_by_pods, forward_cases, sent_to_nodes, without_replica_up};
use refused::{by_their_addresses, by_their_form};

const EDGE: &str = "250.1.0.1";
const REPLICA: &str = "250.1.0.2";
const NODE: &str = "172.20.0.10";
const TENANT: u32 = 0x70;
const SERVICE: u32 = 0x01_0203;
/// Services without a table, with a table of another tenant, without a replica that is up, with one
/// replica per bucket, and with a replica that the edge does not know.
const WITHOUT_TABLE: u32 = 8;
const CROSSED: u32 = 9;
const DEAD: u32 = 10;
const SPREAD: u32 = 11;
const UNKNOWN: u32 = 14;
/// Any MTU will do that differs from a device's 1,500; the tests compute their sizes from it.
const MTU: u32 = 1400;
const SETTINGS: EdgeProgramSettings = EdgeProgramSettings {
    address: Ipv4Addr::new(250, 1, 0, 1),
    tunnels: 20,
    aggregate: true,
    tunnel_port: 40_000,
    mtu: MTU,
};

fn v4(s: &str) -> Ipv4Addr {
    s.parse().unwrap()
}

fn a(s: &str) -> IpAddr {
    s.parse().unwrap()
}

fn table(vni: u32, chain: [u16; CHAIN]) -> Table {
    Table {
        vni,
        version: 1,
        chain: [chain; BUCKETS],
    }
}

/// Creates an edge with two tenants whose addresses overlap.
fn world(settings: &EdgeProgramSettings) -> EdgeProgram {
    let e = EdgeProgram::load(settings, None).unwrap();
    for (n, at, up) in [
        (1, REPLICA, true),
        (2, "250.1.0.3", true),
        (3, "250.1.0.4", false),
    ] {
        e.replicas().put(&n, &Replica::new(v4(at), up)).unwrap();
        e.hosts().put(&address_be(v4(at)), &n).unwrap();
    }
    // Host 0 is an edge: it belongs to the tier, but is no replica.
    e.hosts().put(&address_be(v4("250.2.0.1")), &0).unwrap();
    // 0x71 is the VNI of the other tenant, and 12 its service.
    for (vni, service, v4a, v6a) in [
        (TENANT, SERVICE, "10.9.0.1", "fd09::1"),
        (0x71, 12, "10.9.0.1", "fd09::1"),
        (TENANT, WITHOUT_TABLE, "10.9.0.8", "fd09::8"),
        (TENANT, CROSSED, "10.9.0.9", "fd09::9"),
        (TENANT, DEAD, "10.9.0.10", "fd09::10"),
        (TENANT, SPREAD, "10.9.0.11", "fd09::11"),
        (TENANT, UNKNOWN, "10.9.0.14", "fd09::14"),
    ] {
        for at in [v4a, v6a] {
            e.addresses()
                .put(&AddressKey::new(vni, a(at)), &Address { service })
                .unwrap();
        }
        e.returns()
            .put(
                &service,
                &Return::new(vni, Some(v4(v4a)), Some(v6a.parse().unwrap())),
            )
            .unwrap();
    }
    // A service without an IPv6 address.
    e.returns()
        .put(&13, &Return::new(TENANT, Some(v4("10.9.0.13")), None))
        .unwrap();
    // The first of the chain, replica 3, is down, so sessions go to the next.
    e.tables()
        .put(&SERVICE, &table(TENANT, [3, 1, 2, 0, 0, 0, 0, 0]))
        .unwrap();
    e.tables()
        .put(&12, &table(0x71, [2, 1, 0, 0, 0, 0, 0, 0]))
        .unwrap();
    e.tables()
        // The table of the other tenant.
        .put(&CROSSED, &table(0x71, [1, 0, 0, 0, 0, 0, 0, 0]))
        .unwrap();
    e.tables()
        // A chain ends at the first 0, so the replica behind it, which is up, does not belong to
        // it.
        .put(&DEAD, &table(TENANT, [3, 0, 1, 0, 0, 0, 0, 0]))
        .unwrap();
    e.tables()
        // The replica map has no 7.
        .put(&UNKNOWN, &table(TENANT, [7, 0, 1, 0, 0, 0, 0, 0]))
        .unwrap();
    let mut spread = table(TENANT, [0; CHAIN]);
    for b in 0..BUCKETS as u16 {
        // Numbers from 100 on are those of no other replica here.
        spread.chain[usize::from(b)][0] = 100 + b;
        e.replicas()
            .put(
                &(100 + u32::from(b)),
                &Replica::new(Ipv4Addr::new(250, 1, 1, b as u8), true),
            )
            .unwrap();
    }
    e.tables().put(&SPREAD, &spread).unwrap();
    // `mac` is the last byte of a node's MAC.
    for (vni, node, mac, pods4, pods6) in [
        (TENANT, NODE, 0xa0, "10.1.1.0", "fd01:1::"),
        (TENANT, "172.20.0.11", 0xb0, "10.1.2.0", "fd01:2::"),
        (0x71, "172.20.0.20", 0xc0, "10.1.1.0", "fd01:1::"),
    ] {
        e.nodes().put(&NodeKey::new(vni, v4(node)), &1).unwrap();
        for (pods, length) in [(pods4, 24), (pods6, 64)] {
            e.prefixes()
                .put(
                    &PrefixKey::new(vni, a(pods), length),
                    &Prefix::new(v4(node), [2, 2, 2, 2, 2, mac]),
                )
                .unwrap();
        }
    }
    e
}

fn from_node(inner: &[u8]) -> Vec<u8> {
    OuterHeaders::new(NODE, EDGE, TENANT).frame(inner)
}

fn from_replica(inner: &[u8]) -> Vec<u8> {
    OuterHeaders::new(REPLICA, EDGE, TIER_VNI).frame(inner)
}

fn dial(inner: &[u8]) -> Vec<u8> {
    OuterHeaders::new(REPLICA, EDGE, TENANT).frame(inner)
}

fn counts(e: &EdgeProgram) -> HashMap<&'static str, u64> {
    e.counts().unwrap().into_iter().collect()
}

/// Runs the frame and returns which counters changed.
fn run(e: &EdgeProgram, frame: &[u8]) -> (u32, Vec<u8>, Vec<&'static str>) {
    let summed = e
        .test_run_as(
            frame,
            &TestFrameOptions {
                is_summed: true,
                ..TestFrameOptions::default()
            },
        )
        .unwrap();
    let before = counts(e);
    let t = e.test_run(frame).unwrap();
    assert_eq!(t, summed);
    let moved = counts(e)
        .into_iter()
        .filter(|(n, c)| *c != before[n])
        .map(|(n, _)| n)
        .collect();
    (t.verdict, t.frame, moved)
}

/// TC_ACT_OK, TC_ACT_SHOT and TC_ACT_REDIRECT.
const PASSED: u32 = 0;
const DROPPED: u32 = 2;
const SENT: u32 = 7;
const TO_REPLICA: &str =
    "250.1.0.1 > 250.1.0.2 vni 0xca0a1 hop 1 stamp 0x400001 02ca0a010002 > 02ca0a010001: ";
const TO_DOWN: &str =
    "250.1.0.1 > 250.1.0.4 vni 0xca0a1 hop 0 stamp 0x1 02ca0a010002 > 02ca0a010001: ";
const TO_NODE: &str = "250.1.0.1 > 172.20.0.10 vni 0x70 hop 0 02ca0a010002 > 0202020202a0: ";
const TO_DIALLER: &str = "250.1.0.1 > 250.1.0.2 vni 0x70 hop 0 02ca0a010002 > 02ca0a010001: ";
const ANSWER: &str = "250.1.0.1 > 172.20.0.10 vni 0x70 hop 0 02ca0a010002 > 020101010101: ";

const POD: &str = "10.1.1.2:4711";
const POD6: &str = "[fd01:1::2]:4711";
const SVC: &str = "10.9.0.1:80";
const SVC6: &str = "[fd09::1]:80";
const IN: &str = "240.1.2.3:80";
const IN6: &str = "[fdca:a1:0:240::1:203]:80";
const R6: &str = "[fdca:a1:0:250::fa01:2]:5000";

#[test]
fn frames_are_rewritten_in_place_and_sent_back_to_the_router() {
    let e = world(&SETTINGS);
    for (case, frame, outside, inside, counter) in [
        forward_cases(),
        without_replica_up(),
        answered_by_pods(),
        sent_to_nodes(),
    ]
    .concat()
    {
        let (verdict, out, moved) = run(&e, &frame);
        assert_eq!((verdict, &moved[..]), (SENT, &[counter][..]), "{case}");
        assert_eq!(out.len(), frame.len(), "{case}");
        assert_eq!(read(&out), format!("{outside}{inside}"), "{case}");
        let ports = if outside.contains("> 172.") {
            55_555..55_556
        } else {
            40_000..40_020
        };
        assert!(
            ports.contains(&port_of(&out)),
            "{case}: port {}",
            port_of(&out)
        );
    }
}

#[test]
fn every_refusal_has_a_counter() {
    let e = world(&SETTINGS);
    for (case, frame, counter) in [by_their_addresses(), by_their_form()].concat() {
        let (verdict, _, moved) = run(&e, &frame);
        assert_eq!((verdict, &moved[..]), (DROPPED, &[counter][..]), "{case}");
    }
}

#[test]
fn foreign_packets_reach_the_hosts_stack_unchanged() {
    let e = world(&SETTINGS);
    let mut outer = frames::HOST.to_vec();
    outer.extend(frames::ROUTER);
    let ether = |kind: [u8; 2], p: &[u8]| [&outer[..], &kind, p].concat();
    for (case, frame) in [
        (
            "TCP",
            ether([8, 0], &tcp("172.20.0.10:1", "250.1.0.1:15021", SYN, b"")),
        ),
        (
            "another UDP port",
            ether([8, 0], &udp("172.20.0.10:1", "250.1.0.1:53", b"hi")),
        ),
        ("ARP", ether([8, 6], &[0; 28])),
        ("IPv6", ether([0x86, 0xdd], &tcp(POD6, SVC6, SYN, b""))),
        (
            "another host's",
            OuterHeaders::new(NODE, "250.1.0.99", TENANT).frame(&tcp(POD, SVC, SYN, b"")),
        ),
    ] {
        let (verdict, out, moved) = run(&e, &frame);
        assert_eq!(
            (verdict, out, &moved[..]),
            (PASSED, frame, &["passed"][..]),
            "{case}"
        );
    }
}

/// The frames end in the middle. Their outer lengths are correct in some cases and too long in
/// others.
#[test]
fn a_frame_cut_at_any_byte_is_malformed() {
    let e = world(&SETTINGS);
    let about = tcp(SVC, POD, ACK, b"");
    let about6 = tcp(SVC6, POD6, ACK, b"");
    // Each inner packet, with the least length at which all its headers are complete.
    for (inner, least) in [
        (tcp(POD, SVC, SYN, b""), 52),
        (tcp(POD6, SVC6, SYN, b""), 72),
        (udp(POD, SVC, b""), 28),
        (udp(POD6, SVC6, b""), 48),
        (echo("10.1.1.2", "10.9.0.1", false), 28),
        (unreachable("10.1.1.2", "10.9.0.1", &about, 28), 56),
        (unreachable("fd01:1::2", "fd09::1", &about6, 48), 96),
    ] {
        let whole = from_node(&inner);
        // The kernel does not create packets shorter than an Ethernet and an IP header.
        for cut in 34..whole.len() {
            let (verdict, _, moved) = run(&e, &whole[..cut]);
            assert_eq!(
                (verdict, &moved[..]),
                (DROPPED, &["drop_malformed"][..]),
                "cut at {cut}"
            );
        }
        for cut in 1..inner.len() {
            let (verdict, _, moved) = run(&e, &from_node(&inner[..cut]));
            assert_eq!(
                (verdict, &moved[..]),
                (DROPPED, &["drop_malformed"][..]),
                "inside cut at {cut}"
            );
        }
        for cut in 1..least {
            let mut short = inner[..cut].to_vec();
            // The inner length is that of the cut packet, so that only the missing headers are
            // wrong.
            if inner[0] >> 4 == 4 && cut >= 4 {
                short[2..4].copy_from_slice(&(cut as u16).to_be_bytes());
            // The field has the length behind the header of 40 bytes.
            } else if inner[0] >> 4 == 6 && cut >= 40 {
                short[4..6].copy_from_slice(&(cut as u16 - 40).to_be_bytes());
            }
            let (verdict, _, moved) = run(&e, &from_node(&short));
            assert_eq!(
                (verdict, &moved[..]),
                (DROPPED, &["drop_malformed"][..]),
                "an inner packet of {cut} bytes"
            );
        }
    }
}

struct FrameRandom(u64);

impl FrameRandom {
    fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as u32
    }
}

/// Some bytes of each frame are wrong. Each frame must be counted once, and a frame that is sent
/// must keep its length.
#[test]
fn spoiled_frames_leave_by_one_exit_each() {
    let e = world(&SETTINGS);
    let frames: Vec<Vec<u8>> = [
        forward_cases(),
        without_replica_up(),
        answered_by_pods(),
        sent_to_nodes(),
    ]
    .concat()
    .into_iter()
    .map(|c| c.1)
    .collect();
    let total = || e.counts().unwrap().iter().map(|c| c.1).sum::<u64>();
    let mut random = FrameRandom(7);
    for n in 0..8000 {
        let mut frame = frames[n % frames.len()].clone();
        for _ in 0..1 + random.next() % 3 {
            // The Ethernet header stays as it is, because the kernel's test run itself reads it.
            let at = 14 + random.next() as usize % (frame.len() - 14).min(110);
            frame[at] = random.next() as u8;
        }
        let before = total();
        let t = e.test_run(&frame).unwrap();
        assert_eq!(total(), before + 1, "{frame:02x?}");
        assert!(
            [PASSED, DROPPED, SENT].contains(&t.verdict) && t.frame.len() == frame.len(),
            "{frame:02x?}"
        );
    }
}

#[test]
fn buckets_and_tunnels_are_those_of_the_controller() {
    let e = world(&SETTINGS);
    let own = world(&EdgeProgramSettings {
        aggregate: false,
        ..SETTINGS
    });
    let id = ServiceId::new(SPREAD).unwrap();
    // Any seed would do; a fixed one makes a failure repeatable.
    let mut random = FrameRandom(0x1234_5678_9abc_def0);
    // Many clients for each of the 128 buckets.
    for i in 0..2000u32 {
        let (port, service_port) = (random.next() as u16, random.next() as u16);
        let (client, to) = if i % 2 == 0 {
            (
                format!("10.1.1.{}:{port}", random.next() % 256),
                format!("10.9.0.11:{service_port}"),
            )
        } else {
            (
                format!(
                    "[fd01:1::{:x}:{:x}]:{port}",
                    random.next() & 0xffff,
                    random.next() & 0xffff
                ),
                format!("[fd09::11]:{service_port}"),
            )
        };
        let client: SocketAddr = client.parse().unwrap();
        let hash = flow_hash(client, service_port, id);
        let frame = from_node(&udp(&client.to_string(), &to, b"x"));
        let out = e.test_run(&frame).unwrap().frame;
        assert_eq!(
            // The outer destination. In `world`, replica 250.1.1.b is the head of bucket b and of
            // no other.
            out[30..34],
            [250, 1, 1, (hash as usize % BUCKETS) as u8],
            "{client} > {to}"
        );
        assert_eq!(
            port_of(&out),
            // With aggregation there are 20 tunnels, whose source ports begin at 40,000
            // (`SETTINGS`).
            40_000 + (hash >> 16) as u16 % 20,
            "{client} > {to}"
        );
        let out = own.test_run(&frame).unwrap().frame;
        assert_eq!(
            port_of(&out),
            // Without aggregation, the outer source port is the hash, in the range from 49152 on.
            0xc000 | (hash >> 16) as u16,
            "{client} > {to}"
        );
    }
}

/// A replica's own source ports are used, separately for each replica; a replica that has named
/// none gets those of the settings.
#[test]
fn tunnels_have_the_ports_that_the_replica_named() {
    let e = world(&SETTINGS);
    let id = ServiceId::new(SPREAD).unwrap();
    let ports = |n: usize| [41_001u16, 41_007, 52_000 + n as u16];
    for bucket in (0..BUCKETS).step_by(2) {
        e.tunnels()
            .put(
                &address_be(Ipv4Addr::new(250, 1, 1, bucket as u8)),
                &Tunnels::new(&ports(bucket)).unwrap(),
            )
            .unwrap();
    }
    for port in 1000..1400u16 {
        let client = format!("10.1.1.2:{port}");
        let hash = flow_hash(client.parse().unwrap(), 80, id);
        let out = e
            .test_run(&from_node(&udp(&client, "10.9.0.11:80", b"x")))
            .unwrap()
            .frame;
        let (bucket, upper) = (hash as usize % BUCKETS, (hash >> 16) as usize);
        let want = if bucket % 2 == 0 {
            ports(bucket)[upper % 3]
        } else {
            40_000 + (upper % 20) as u16
        };
        assert_eq!(port_of(&out), want, "{client}, bucket {bucket}");
    }
    let full = Tunnels::new(&(0..700).map(|n| 40_000 + n).collect::<Vec<u16>>()).unwrap();
    assert_eq!((full.used().len(), Tunnels::new(&[])), (640, None));
}

#[test]
fn an_error_goes_where_its_session_is() {
    let e = world(&SETTINGS);
    for port in 1000..1100u16 {
        let client = format!("10.1.1.2:{port}");
        let there = e
            .test_run(&from_node(&tcp(&client, "10.9.0.11:80", ACK, b"")))
            .unwrap()
            .frame;
        let error = unreachable(
            "10.1.1.2",
            "10.9.0.11",
            &tcp("10.9.0.11:80", &client, ACK, b""),
            28,
        );
        let error = e.test_run(&from_node(&error)).unwrap().frame;
        assert_eq!(
            (&error[30..34], port_of(&error)),
            (&there[30..34], port_of(&there)),
            "{client}"
        );
    }
}

/// Case, the whole frame, and the expected reply to its first fragment on a link of 1400 bytes, of
/// which 1346 are inside; `None` if there must be no reply.
fn cut() -> Vec<(&'static str, Vec<u8>, Option<String>)> {
    // With its headers, each packet exceeds the 1346 bytes that fit inside.
    let data = vec![7u8; 1348];
    let back = |to: &str, vni: u32, mac: &str, said: &str| {
        Some(format!(
            "250.1.0.1 > {to} vni {vni:#x} hop 0 02ca0a010002 > {mac}: {said}"
        ))
    };
    let sender = "020101010101";
    let foreign = |inner: &[u8]| OuterHeaders::new("172.20.0.77", EDGE, TENANT).frame(inner);
    vec![
        (
            "a pod's",
            from_node(&tcp(POD, SVC, ACK, &data)),
            back(
                NODE,
                TENANT,
                sender,
                "icmp 3/4 mtu 1346 10.9.0.1 > 10.1.1.2 about tcp 10.1.1.2:4711 > 10.9.0.1:80",
            ),
        ),
        (
            "a pod's v6",
            from_node(&tcp(POD6, SVC6, ACK, &data)),
            back(
                NODE,
                TENANT,
                sender,
                "icmp 2/0 mtu 1346 fd09::1 > fd01:1::2 about tcp [fd01:1::2]:4711 > [fd09::1]:80",
            ),
        ),
        (
            "a service's",
            from_replica(&tcp(IN, POD, ACK, &data)),
            back(
                REPLICA,
                TIER_VNI,
                sender,
                "icmp 3/4 mtu 1346 10.1.1.2 > 240.1.2.3 about tcp 240.1.2.3:80 > 10.1.1.2:4711",
            ),
        ),
        (
            "what a replica dials v6",
            dial(&tcp(R6, POD6, ACK, &data)),
            back(
                REPLICA,
                TENANT,
                sender,
                "icmp 2/0 mtu 1346 fd01:1::2 > fdca:a1:0:250::fa01:2 about tcp [fdca:a1:0:250::fa01:2]:5000 > [fd01:1::2]:4711",
            ),
        ),
        (
            // Without DF, the packet may be fragmented.
            "it may be cut inside",
            from_node(&with_ip4(udp(POD, SVC, &data), 0, &[])),
            None,
        ),
        (
            "an error is not answered",
            // The error quotes the whole packet, so it is too large itself.
            from_node(&unreachable(
                "10.1.1.2",
                "10.9.0.1",
                &udp("10.9.0.1:53", POD, &data),
                1400,
            )),
            None,
        ),
        (
            "a foreign host's",
            foreign(&tcp(POD, SVC, ACK, &data)),
            None,
        ),
        (
            "a packet of an unknown host with the tier's VNI",
            OuterHeaders::new(NODE, EDGE, TIER_VNI).frame(&tcp(IN, POD, ACK, &data)),
            None,
        ),
        (
            "for another host",
            OuterHeaders::new(NODE, "250.1.0.9", TENANT).frame(&tcp(POD, SVC, ACK, &data)),
            None,
        ),
    ]
}

#[test]
fn senders_of_fragmented_packets_get_icmp_errors() {
    let e = world(&SETTINGS);
    for (case, frame, wanted) in cut() {
        let (verdict, frame, moved) = run(&e, &frames::torn(&frame, 1400));
        match wanted {
            Some(answer) => {
                assert_eq!((verdict, &moved[..]), (SENT, &["too_big"][..]), "{case}");
                assert_eq!(read(&frame), answer, "{case}");
                assert_eq!(frame[20] & 0x3f, 0, "{case}: the answer is whole");
            }
            None => assert!(
                verdict == DROPPED && ["drop_fragment", "too_big"].contains(&moved[0]),
                "{case}: {moved:?}"
            ),
        }
    }
}

/// Case, inner packet, bytes per GSO segment, expected reply or else the counter.
type GsoCase = (
    &'static str,
    Vec<u8>,
    u16,
    Result<&'static str, &'static str>,
);

fn sizes() -> Vec<GsoCase> {
    // The headers are 20 + 32 bytes, or 40 + 32 for IPv6.
    // At the MTU of 1400, 1348 bytes of data fit over IPv4, 1328 over IPv6, and 1372 by UDP.
    let data = |n: usize| vec![7u8; n];
    // The error quotes the whole packet, so it is too large itself.
    let error4 = unreachable(
        "10.1.1.2",
        "10.9.0.1",
        &udp("10.9.0.1:53", POD, &data(1500)),
        1500,
    );
    // The number is the size of the GSO segments, or 0 for a single packet.
    vec![
        (
            "just fits",
            tcp(POD, SVC, ACK, &data(1348)),
            0,
            Err("to_replica"),
        ),
        (
            "just fits v6",
            tcp(POD6, SVC6, ACK, &data(1328)),
            0,
            Err("to_replica"),
        ),
        (
            "a byte too much",
            tcp(POD, SVC, ACK, &data(1349)),
            0,
            Ok("icmp 3/4 mtu 1400 10.9.0.1 > 10.1.1.2 about tcp 10.1.1.2:4711 > 10.9.0.1:80"),
        ),
        (
            "a byte too much v6",
            tcp(POD6, SVC6, ACK, &data(1329)),
            0,
            Ok("icmp 2/0 mtu 1400 fd09::1 > fd01:1::2 about tcp [fd01:1::2]:4711 > [fd09::1]:80"),
        ),
        (
            "a datagram",
            udp(POD, SVC, &data(1500)),
            0,
            Ok("icmp 3/4 mtu 1400 10.9.0.1 > 10.1.1.2 about udp 10.1.1.2:4711 > 10.9.0.1:80"),
        ),
        (
            "a jumbo",
            udp(POD6, SVC6, &data(3300)),
            0,
            Ok("icmp 2/0 mtu 1400 fd09::1 > fd01:1::2 about udp [fd01:1::2]:4711 > [fd09::1]:80"),
        ),
        (
            "a pod's answer",
            udp(POD, "250.1.0.2:80", &data(1500)),
            0,
            Ok("icmp 3/4 mtu 1400 250.1.0.2 > 10.1.1.2 about udp 10.1.1.2:4711 > 250.1.0.2:80"),
        ),
        (
            "an echo",
            icmp("10.1.1.2", "10.9.0.1", 8, 0, [0; 4], &data(1500)),
            0,
            Ok("icmp 3/4 mtu 1400 10.9.0.1 > 10.1.1.2 about icmp 8/0 10.1.1.2 > 10.9.0.1"),
        ),
        (
            "it may be cut",
            with_ip4(udp(POD, SVC, &data(1500)), 0, &[]),
            0,
            Err("to_replica"),
        ),
        ("an error is not answered", error4, 0, Err("too_big")),
        (
            "many segments that fit",
            // 3,300 bytes of data are more than two segments.
            tcp(POD, SVC, ACK, &data(3300)),
            1348,
            Err("to_replica"),
        ),
        (
            "segments that do not: TCP sends them again one by one",
            tcp(POD, SVC, ACK, &data(3300)),
            1349,
            Err("too_big"),
        ),
        (
            "datagrams' segments that fit",
            udp(POD, SVC, &data(3300)),
            1372,
            Err("to_replica"),
        ),
    ]
}

#[test]
fn oversize_packets_are_answered_from_the_dialed_address() {
    let e = world(&SETTINGS);
    for (case, inner, segment, wanted) in sizes() {
        // A device that verifies checksums leaves them to the program's side; the result must be
        // the same.
        let summed = e
            .test_run_as(
                &from_node(&inner),
                &TestFrameOptions {
                    segment,
                    is_summed: true,
                },
            )
            .unwrap();
        let before = counts(&e);
        let t = e
            .test_run_as(
                &from_node(&inner),
                &TestFrameOptions {
                    segment,
                    ..TestFrameOptions::default()
                },
            )
            .unwrap();
        assert_eq!(t, summed, "{case}");
        let moved: Vec<_> = counts(&e)
            .into_iter()
            .filter(|(n, c)| *c != before[n])
            .map(|(n, _)| n)
            .collect();
        match wanted {
            Ok(answer) => {
                assert_eq!((t.verdict, &moved[..]), (SENT, &["too_big"][..]), "{case}");
                assert_eq!(read(&t.frame), format!("{ANSWER}{answer}"), "{case}");
                let icmp = if inner[0] >> 4 == 6 {
                    HEAD + 40 + 8
                } else {
                    HEAD + 20 + 8
                };
                // The program quotes this much of the packet (`SHOWN` in too_big.h).
                assert_eq!(t.frame[icmp..], inner[..68], "{case}: what it is about");
            }
            Err("too_big") => assert_eq!(
                (t.verdict, &moved[..]),
                (DROPPED, &["too_big"][..]),
                "{case}"
            ),
            Err(counter) => assert_eq!((t.verdict, &moved[..]), (SENT, &[counter][..]), "{case}"),
        }
    }
}

#[test]
fn settings_that_make_no_sense_are_brought_to_some_that_do() {
    let e = world(&EdgeProgramSettings {
        tunnels: 0,
        tunnel_port: 65_535,
        ..SETTINGS
    });
    let out = e
        .test_run(&from_node(&tcp(POD, SVC, SYN, b"")))
        .unwrap()
        .frame;
    assert_eq!(port_of(&out), 65_535);
}
