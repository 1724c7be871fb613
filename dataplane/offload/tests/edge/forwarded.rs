//! Frames that the edge rewrites and sends on, with the headers that they must have then.

use super::*;

/// Case, frame, expected outer headers, expected inner packet, counter.
pub(super) type ForwardCase = (
    &'static str,
    Vec<u8>,
    &'static str,
    &'static str,
    &'static str,
);

pub(super) fn forward_cases() -> Vec<ForwardCase> {
    // 0x4000 is DF; the options are three NOPs and the end of the list.
    let options = with_ip4(tcp(POD, SVC, SYN, b""), 0x4000, &[1, 1, 1, 0]);
    let mut summed = OuterHeaders::new(NODE, EDGE, TENANT);
    (summed.summed, summed.hop) = (true, 9);
    vec![
        (
            "SYN",
            from_node(&tcp(POD, SVC, SYN, b"")),
            TO_REPLICA,
            "tcp 10.1.1.2:4711 > 240.1.2.3:80",
            "to_replica",
        ),
        (
            "data",
            from_node(&tcp(POD, SVC, ACK, b"odd bytes")),
            TO_REPLICA,
            "tcp 10.1.1.2:4711 > 240.1.2.3:80",
            "to_replica",
        ),
        (
            "IPv4 options",
            from_node(&options),
            TO_REPLICA,
            "tcp 10.1.1.2:4711 > 240.1.2.3:80",
            "to_replica",
        ),
        (
            "an outer checksum goes, a hop is nothing to an edge",
            summed.frame(&tcp(POD, SVC, FIN, b"")),
            TO_REPLICA,
            "tcp 10.1.1.2:4711 > 240.1.2.3:80",
            "to_replica",
        ),
        (
            "v6",
            from_node(&tcp(POD6, SVC6, ACK, b"odd bytes")),
            TO_REPLICA,
            "tcp [fd01:1::2]:4711 > [fdca:a1:0:240::1:203]:80",
            "to_replica",
        ),
        (
            "UDP",
            from_node(&udp(POD, "10.9.0.1:53", b"name?")),
            TO_REPLICA,
            "udp 10.1.1.2:4711 > 240.1.2.3:53",
            "to_replica",
        ),
        (
            "UDP without a checksum",
            from_node(&udp_bare(POD, "10.9.0.1:53", b"name?")),
            TO_REPLICA,
            "udp without checksum 10.1.1.2:4711 > 240.1.2.3:53",
            "to_replica",
        ),
        (
            "UDP v6",
            from_node(&udp(POD6, "[fd09::1]:53", b"name?")),
            TO_REPLICA,
            "udp [fd01:1::2]:4711 > [fdca:a1:0:240::1:203]:53",
            "to_replica",
        ),
        (
            "echo",
            from_node(&echo("10.1.1.2", "10.9.0.1", false)),
            TO_REPLICA,
            "icmp 8/0 10.1.1.2 > 240.1.2.3",
            "to_replica",
        ),
        (
            "echo v6",
            from_node(&echo("fd01:1::2", "fd09::1", false)),
            TO_REPLICA,
            "icmp 128/0 fd01:1::2 > fdca:a1:0:240::1:203",
            "to_replica",
        ),
        (
            "the same addresses in another tenant",
            OuterHeaders::new("172.20.0.20", EDGE, 0x71).frame(&tcp(POD, SVC, SYN, b"")),
            "250.1.0.1 > 250.1.0.3 vni 0xca0a1 hop 0 stamp 0x1 02ca0a010002 > 02ca0a010001: ",
            "tcp 10.1.1.2:4711 > 240.0.0.12:80",
            "to_replica",
        ),
    ]
}

/// Returns a packet of a service whose chain has no replica that is up.
pub(super) fn without_replica_up() -> Vec<ForwardCase> {
    vec![(
        "SYN, no replica is up",
        from_node(&tcp(POD, "10.9.0.10:80", SYN, b"")),
        TO_DOWN,
        "tcp 10.1.1.2:4711 > 240.0.0.10:80",
        "to_down",
    )]
}

pub(super) fn answered_by_pods() -> Vec<ForwardCase> {
    let answer = tcp(SVC, POD, ACK, b"answer");
    let answer6 = udp(SVC6, POD6, b"answer");
    // An error of 28 bytes quotes an IPv4 header and the 8 bytes behind it, the minimum of RFC 792.
    // One of 1000 quotes the whole packet.
    let cut = udp("10.9.0.1:53", POD, &[0; 600]);
    vec![
        (
            "an error about an answer",
            from_node(&unreachable("10.1.1.2", "10.9.0.1", &answer, 28)),
            TO_REPLICA,
            "icmp 3/3 10.1.1.2 > 240.1.2.3 about tcp 240.1.2.3:80 > 10.1.1.2:4711",
            "icmp_translated",
        ),
        (
            "an error of a router on the way, of more bytes",
            // With both headers, an error of 576 bytes, the maximum that RFC 1812 recommends.
            from_node(&unreachable("10.1.254.1", "10.9.0.1", &cut, 548)),
            TO_REPLICA,
            "icmp 3/3 10.1.254.1 > 240.1.2.3 about udp 240.1.2.3:53 > 10.1.1.2:4711",
            "icmp_translated",
        ),
        (
            "an error v6",
            from_node(&unreachable("fd01:1::2", "fd09::1", &answer6, 1000)),
            TO_REPLICA,
            "icmp 1/4 fd01:1::2 > fdca:a1:0:240::1:203 about udp [fdca:a1:0:240::1:203]:80 > [fd01:1::2]:4711",
            "icmp_translated",
        ),
        (
            "a pod's answer",
            from_node(&tcp("10.1.1.2:8080", "250.1.0.2:5000", SYN | ACK, b"")),
            TO_DIALLER,
            "tcp 10.1.1.2:8080 > 250.1.0.2:5000",
            "answered",
        ),
        (
            "a pod's answer v6",
            from_node(&tcp("[fd01:1::2]:8080", R6, SYN | ACK, b"")),
            TO_DIALLER,
            "tcp [fd01:1::2]:8080 > [fdca:a1:0:250::fa01:2]:5000",
            "answered",
        ),
        (
            "an error about a dial",
            from_node(&unreachable(
                "10.1.1.1",
                "250.1.0.2",
                &tcp("250.1.0.2:5000", "10.1.1.2:8080", SYN, b""),
                28,
            )),
            TO_DIALLER,
            "icmp 3/3 10.1.1.1 > 250.1.0.2 about tcp 250.1.0.2:5000 > 10.1.1.2:8080",
            "answered",
        ),
    ]
}

/// Returns answers of services, and errors about them, that the edge sends to the client's node.
fn answers_to_nodes() -> Vec<ForwardCase> {
    let asked = tcp(POD, IN, ACK, b"question");
    // As in `answered_by_pods`, 28 bytes are the minimum; 100 and 1000 quote the whole packet.
    let asked6 = udp(POD6, IN6, b"question");
    vec![
        (
            "an answer",
            from_replica(&tcp(IN, POD, SYN | ACK, b"")),
            TO_NODE,
            "tcp 10.9.0.1:80 > 10.1.1.2:4711",
            "to_node",
        ),
        (
            "an answer v6",
            from_replica(&tcp(IN6, POD6, ACK, b"odd bytes")),
            TO_NODE,
            "tcp [fd09::1]:80 > [fd01:1::2]:4711",
            "to_node",
        ),
        (
            "a datagram",
            from_replica(&udp("240.1.2.3:53", POD, b"a name")),
            TO_NODE,
            "udp 10.9.0.1:53 > 10.1.1.2:4711",
            "to_node",
        ),
        (
            "a datagram without a checksum",
            from_replica(&udp_bare("240.1.2.3:53", POD, b"a name")),
            TO_NODE,
            "udp without checksum 10.9.0.1:53 > 10.1.1.2:4711",
            "to_node",
        ),
        (
            "an echo's reply",
            from_replica(&echo("240.1.2.3", "10.1.1.2", true)),
            TO_NODE,
            "icmp 0/0 10.9.0.1 > 10.1.1.2",
            "to_node",
        ),
        (
            "an echo's reply v6",
            from_replica(&echo("fdca:a1:0:240::1:203", "fd01:1::2", true)),
            TO_NODE,
            "icmp 129/0 fd09::1 > fd01:1::2",
            "to_node",
        ),
        (
            "an error about a question",
            from_replica(&unreachable("240.1.2.3", "10.1.1.2", &asked, 28)),
            TO_NODE,
            "icmp 3/3 10.9.0.1 > 10.1.1.2 about tcp 10.1.1.2:4711 > 10.9.0.1:80",
            "icmp_translated",
        ),
        (
            "an error of the replica's own address",
            from_replica(&unreachable("250.1.0.2", "10.1.1.2", &asked, 100)),
            TO_NODE,
            "icmp 3/3 10.9.0.1 > 10.1.1.2 about tcp 10.1.1.2:4711 > 10.9.0.1:80",
            "icmp_translated",
        ),
        (
            "an error v6",
            from_replica(&unreachable(
                "fdca:a1:0:240::1:203",
                "fd01:1::2",
                &asked6,
                1000,
            )),
            TO_NODE,
            "icmp 1/4 fd09::1 > fd01:1::2 about udp [fd01:1::2]:4711 > [fd09::1]:80",
            "icmp_translated",
        ),
        (
            "another node's pod",
            from_replica(&tcp(IN, "10.1.2.2:1", ACK, b"")),
            "250.1.0.1 > 172.20.0.11 vni 0x70 hop 0 02ca0a010002 > 0202020202b0: ",
            "tcp 10.9.0.1:80 > 10.1.2.2:1",
            "to_node",
        ),
    ]
}

/// Returns dials of a replica, and the answer of one that is down.
fn dials_to_nodes() -> Vec<ForwardCase> {
    vec![
        (
            "a dial",
            dial(&tcp("250.1.0.2:5000", "10.1.1.2:8080", SYN, b"")),
            TO_NODE,
            "tcp 250.1.0.2:5000 > 10.1.1.2:8080",
            "dialled",
        ),
        (
            "a dial v6",
            dial(&tcp(R6, "[fd01:1::2]:8080", SYN, b"")),
            TO_NODE,
            "tcp [fdca:a1:0:250::fa01:2]:5000 > [fd01:1::2]:8080",
            "dialled",
        ),
        (
            "a replica that is down may still answer",
            OuterHeaders::new("250.1.0.4", EDGE, TIER_VNI).frame(&tcp(IN, POD, ACK, b"")),
            TO_NODE,
            "tcp 10.9.0.1:80 > 10.1.1.2:4711",
            "to_node",
        ),
    ]
}

pub(super) fn sent_to_nodes() -> Vec<ForwardCase> {
    [answers_to_nodes(), dials_to_nodes()].concat()
}
