//! Frames that the edge refuses, with the counters that must count them.

use super::*;

/// Case, frame, counter that must count it.
pub(super) type Refused = (&'static str, Vec<u8>, &'static str);

/// Returns frames of hosts that may not send them.
fn by_their_source() -> Vec<Refused> {
    let node = |from: &str, vni: u32, inner: &[u8]| OuterHeaders::new(from, EDGE, vni).frame(inner);
    let syn = tcp(POD, SVC, SYN, b"");
    let answer = tcp(IN, POD, ACK, b"");
    vec![
        (
            "another tenant's VNI",
            node(NODE, 0x71, &syn),
            "drop_unknown_source",
        ),
        (
            "nobody's VNI",
            node(NODE, 0x99, &syn),
            "drop_unknown_source",
        ),
        (
            "an unknown host",
            node("172.20.0.99", TENANT, &syn),
            "drop_unknown_source",
        ),
        (
            "the tier's VNI from a node",
            node(NODE, TIER_VNI, &answer),
            "drop_unknown_source",
        ),
        (
            "the tier's VNI from an edge",
            node("250.2.0.1", TIER_VNI, &answer),
            "drop_unknown_source",
        ),
        (
            "a tenant's VNI from another edge",
            node("250.2.0.1", TENANT, &syn),
            "drop_unknown_source",
        ),
    ]
}

/// Returns frames whose inner source is not that of the host.
fn forged() -> Vec<Refused> {
    // An error quotes at least 28 bytes: an IPv4 header and the 8 bytes behind it.
    vec![
        (
            "another node's pod",
            from_node(&tcp("10.1.2.2:4711", SVC, SYN, b"")),
            "drop_forged",
        ),
        (
            "an unknown pod",
            from_node(&tcp("10.1.3.2:4711", SVC, SYN, b"")),
            "drop_forged",
        ),
        (
            "a pod that claims to be a replica",
            from_node(&tcp("250.1.0.2:5000", SVC, SYN, b"")),
            "drop_forged",
        ),
        (
            "another node's pod v6",
            from_node(&tcp("[fd01:2::2]:1", SVC6, SYN, b"")),
            "drop_forged",
        ),
        (
            "an error about another node's pod",
            from_node(&unreachable(
                "10.1.1.2",
                "10.9.0.1",
                &tcp(SVC, "10.1.2.2:1", ACK, b""),
                28,
            )),
            "drop_forged",
        ),
        (
            "a dial from another replica's address",
            dial(&tcp("250.1.0.3:5000", "10.1.1.2:80", SYN, b"")),
            "drop_forged",
        ),
        (
            "a dial from a service",
            dial(&tcp(IN, "10.1.1.2:80", SYN, b"")),
            "drop_forged",
        ),
        (
            "an answer of no service",
            from_replica(&tcp("250.1.0.2:80", POD, ACK, b"")),
            "drop_forged",
        ),
        (
            "service 0",
            from_replica(&tcp("240.0.0.0:80", POD, ACK, b"")),
            "drop_forged",
        ),
        (
            "an error about no service",
            from_replica(&unreachable(
                "240.1.2.3",
                "10.1.1.2",
                &tcp(POD, "10.9.0.1:80", ACK, b""),
                28,
            )),
            "drop_forged",
        ),
    ]
}

/// Returns frames that lead to no service, replica or node.
fn by_their_destination() -> Vec<Refused> {
    vec![
        (
            "no gateway address",
            from_node(&tcp(POD, "10.9.0.77:80", SYN, b"")),
            "drop_address",
        ),
        (
            "an inside address",
            from_node(&tcp(POD, IN, SYN, b"")),
            "drop_address",
        ),
        (
            "a pod's answer to no replica",
            from_node(&tcp(POD, "250.1.0.77:5000", SYN, b"")),
            "drop_address",
        ),
        (
            "a pod's packet to an edge of the tier",
            from_node(&tcp(POD, "250.2.0.1:5000", SYN, b"")),
            "drop_address",
        ),
        (
            "no table",
            from_node(&tcp(POD, "10.9.0.8:80", SYN, b"")),
            "drop_service",
        ),
        (
            "another tenant's table",
            from_node(&tcp(POD, "10.9.0.9:80", SYN, b"")),
            "drop_service",
        ),
        (
            "an answer of an unknown service",
            from_replica(&tcp("240.0.0.77:80", POD, ACK, b"")),
            "drop_service",
        ),
        (
            "an answer v6 of a service without",
            from_replica(&tcp("[fdca:a1:0:240::d]:80", POD6, ACK, b"")),
            "drop_service",
        ),
        (
            "data, no replica is up",
            from_node(&tcp(POD, "10.9.0.10:80", ACK, b"data")),
            "drop_replica",
        ),
        (
            "no replica of the chain is known",
            from_node(&tcp(POD, "10.9.0.14:80", SYN, b"")),
            "drop_replica",
        ),
        (
            "no node has the client",
            from_replica(&tcp(IN, "10.1.3.2:4711", ACK, b"")),
            "drop_node",
        ),
        (
            "no node has the endpoint",
            dial(&tcp("250.1.0.2:5000", "10.1.3.2:80", SYN, b"")),
            "drop_node",
        ),
    ]
}

pub(super) fn by_their_addresses() -> Vec<Refused> {
    [by_their_source(), forged(), by_their_destination()].concat()
}

fn edit(mut f: Vec<u8>, at: usize, to: u8) -> Vec<u8> {
    f[at] = to;
    f
}

/// Returns fragments, and frames of protocols that the edge does not forward.
fn fragments_and_protocols() -> Vec<Refused> {
    // 0x2000 is the flag that more fragments follow; the lower bits are the fragment's offset.
    let syn = tcp(POD, SVC, SYN, b"");
    let echoed = echo("10.9.0.1", "10.1.1.2", false);
    // Next header 44 is a fragment header, and 6 in it is TCP.
    let fragment6 = ip(
        a("fd01:1::2"),
        a("fd09::1"),
        44,
        &[6, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0],
    );
    vec![
        (
            "a first fragment",
            from_node(&with_ip4(udp(POD, SVC, b"12345678"), 0x2000, &[])),
            "drop_fragment",
        ),
        (
            "a later fragment",
            from_node(&with_ip4(udp(POD, SVC, b"12345678"), 0x0004, &[])),
            "drop_fragment",
        ),
        ("a fragment v6", from_node(&fragment6), "drop_fragment"),
        // Bytes 20 and 21 are the flags and the fragment offset of the outer IPv4 header.
        (
            "an outer first fragment",
            edit(from_node(&syn), 20, 0x20),
            "drop_fragment",
        ),
        (
            "an outer later fragment",
            edit(from_node(&syn), 21, 3),
            "drop_fragment",
        ),
        (
            "an error about a fragment",
            from_node(&unreachable(
                "10.1.1.2",
                "10.9.0.1",
                &with_ip4(tcp(SVC, POD, ACK, b""), 9, &[]),
                28,
            )),
            "drop_fragment",
        ),
        // The last byte of the inner Ethernet type, which becomes ARP's.
        ("ARP", edit(from_node(&syn), 63, 6), "drop_protocol"),
        (
            "SCTP",
            from_node(&ip(a("10.1.1.2"), a("10.9.0.1"), 132, &[0; 32])),
            "drop_protocol",
        ),
        (
            "hop-by-hop options",
            from_node(&ip(a("fd01:1::2"), a("fd09::1"), 0, &[0; 32])),
            "drop_protocol",
        ),
        (
            "ICMP inside IPv6",
            from_node(&ip(a("fd01:1::2"), a("fd09::1"), 1, &[8; 32])),
            "drop_protocol",
        ),
        (
            "a redirect",
            from_node(&icmp("10.1.1.2", "10.9.0.1", 5, 1, [0; 4], &syn)),
            "drop_protocol",
        ),
        (
            "a neighbour's solicitation",
            from_node(&icmp("fd01:1::2", "fd09::1", 135, 0, [0; 4], &[0; 16])),
            "drop_protocol",
        ),
        (
            "an error about an echo",
            from_node(&unreachable("10.1.1.2", "10.9.0.1", &echoed, 28)),
            "drop_protocol",
        ),
    ]
}

/// Returns frames whose headers contradict each other.
fn malformed() -> Vec<Refused> {
    // `edit` changes one byte: the outer IPv4 header is at 14, UDP at 34, VXLAN at 42, the inner
    // packet at `HEAD`. An IPv4 header has its length in bytes 2 and 3. The TCP header's length is
    // in its byte 12, that is at `HEAD` + 32.
    // An IPv4 header begins with version and length in words of 4 bytes: 0x45 has no options. 0x08
    // is the one flag of VXLAN. A TCP header's length is in the upper half of its byte.
    let syn = tcp(POD, SVC, SYN, b"");
    vec![
        (
            "an ICMP error whose receiver is not in the packet inside",
            from_node(&unreachable(
                "10.1.1.2",
                "10.9.0.1",
                &tcp("10.9.0.2:80", POD, ACK, b""),
                28,
            )),
            "drop_malformed",
        ),
        (
            "outer options",
            edit(from_node(&syn), 14, 0x46),
            "drop_malformed",
        ),
        (
            "an outer length too long",
            edit(from_node(&syn), 16, 9),
            "drop_malformed",
        ),
        (
            "an outer UDP length of its own",
            edit(from_node(&syn), 39, 9),
            "drop_malformed",
        ),
        ("no VNI", edit(from_node(&syn), 42, 0), "drop_malformed"),
        (
            "unknown VXLAN flags",
            edit(from_node(&syn), 42, 0x88),
            "drop_malformed",
        ),
        (
            "a reserved byte",
            edit(from_node(&syn), 44, 1),
            "drop_malformed",
        ),
        (
            "not IPv4 inside",
            edit(from_node(&syn), HEAD, 0x65),
            "drop_malformed",
        ),
        (
            "a short inner header",
            edit(from_node(&syn), HEAD, 0x44),
            "drop_malformed",
        ),
        (
            "an inner length too long",
            edit(from_node(&syn), HEAD + 2, 1),
            "drop_malformed",
        ),
        (
            "an inner length too short",
            edit(from_node(&syn), HEAD + 3, 19),
            "drop_malformed",
        ),
        (
            "a TCP header too long",
            edit(from_node(&syn), HEAD + 32, 0xf0),
            "drop_malformed",
        ),
        (
            "a TCP header too short",
            edit(from_node(&syn), HEAD + 32, 0x40),
            "drop_malformed",
        ),
    ]
}

pub(super) fn by_their_form() -> Vec<Refused> {
    [fragments_and_protocols(), malformed()].concat()
}
