//! Frames that reach a replica without a tunnel, and what becomes of each.

use super::*;

/// A case's name, the frame, the verdict, and the counter that must count it.
pub(super) type DirectFrame = (&'static str, Vec<u8>, u32, &'static str);

fn ether(kind: [u8; 2], p: &[u8]) -> Vec<u8> {
    [&frames::HOST[..], &frames::ROUTER[..], &kind, p].concat()
}

fn v4(p: &[u8]) -> Vec<u8> {
    ether([8, 0], p)
}

fn v6(p: &[u8]) -> Vec<u8> {
    ether([0x86, 0xdd], p)
}

/// UDP headers with VXLAN's port as the destination, and with another one.
const VXLAN: [u8; 8] = [0xd9, 3, 0x12, 0xb5, 0, 8, 0, 0];
const OTHER: [u8; 8] = [0xd9, 3, 0x12, 0xb6, 0, 8, 0, 0];

/// Returns frames to the host and to services.
fn to_hosts_and_services() -> Vec<DirectFrame> {
    vec![
        (
            "TCP to the host",
            v4(&tcp("172.20.0.1:1", "250.1.0.2:15021", SYN, b"")),
            PASSED,
            "passed",
        ),
        (
            "UDP to the host",
            v4(&udp("172.20.0.1:1", "250.1.0.2:53", b"hi")),
            PASSED,
            "passed",
        ),
        ("ARP", ether([8, 6], &[0; 28]), PASSED, "passed"),
        (
            "a service without a tunnel",
            v4(&tcp("172.20.0.1:1", "240.0.0.1:80", SYN, b"")),
            DROPPED,
            "drop_unknown_source",
        ),
        (
            "a service by UDP without a tunnel",
            v4(&udp("172.20.0.1:1", "240.0.0.1:53", b"")),
            DROPPED,
            "drop_unknown_source",
        ),
        (
            "a service v6",
            v6(&tcp("[fd01::1]:1", "[fdca:a1:0:240::1]:80", SYN, b"")),
            DROPPED,
            "drop_unknown_source",
        ),
        (
            "the replica's inner address",
            v6(&tcp("[fd01::1]:1", "[fdca:a1:0:250::fa01:2]:80", SYN, b"")),
            DROPPED,
            "drop_unknown_source",
        ),
        (
            "IPv6",
            v6(&tcp("[fe80::1]:1", "[fe80::2]:80", SYN, b"")),
            PASSED,
            "passed",
        ),
    ]
}

/// Returns frames of IPv6, with extension headers and without.
fn over_ipv6() -> Vec<DirectFrame> {
    let a = |text: &str| text.parse::<IpAddr>().unwrap();
    let (from, here) = (a("fe80::1"), a("fe80::2"));
    let behind =
        |first: u8, header: &[u8], p: &[u8]| v6(&ip(from, here, first, &[header, p].concat()));
    // Next headers: 0 is hop-by-hop options, 17 UDP, 43 routing, 44 fragment, 58 ICMPv6, and 60
    // destination options.
    // The header has 8 bytes: the next header, a length of 0, and PadN over the rest. A routing
    // header of these bytes has type 1 and 4 segments left.
    let options = [17, 0, 1, 4, 0, 0, 0, 0];
    // The program parses four extension headers at most.
    let many: Vec<u8> = (0..5)
        .flat_map(|i| [if i == 4 { 17 } else { 60 }, 0, 1, 4, 0, 0, 0, 0])
        .chain(VXLAN)
        .collect();
    vec![
        (
            "VXLAN over IPv6",
            v6(&ip(from, here, 17, &VXLAN)),
            DROPPED,
            "drop_unknown_source",
        ),
        (
            "other UDP over IPv6",
            v6(&ip(from, here, 17, &OTHER)),
            PASSED,
            "passed",
        ),
        (
            "VXLAN behind hop-by-hop options",
            behind(0, &options, &VXLAN),
            DROPPED,
            "drop_unknown_source",
        ),
        (
            "VXLAN behind destination options",
            behind(60, &options, &VXLAN),
            DROPPED,
            "drop_unknown_source",
        ),
        (
            "VXLAN behind a routing header",
            behind(43, &options, &VXLAN),
            DROPPED,
            "drop_unknown_source",
        ),
        (
            "other UDP behind options",
            behind(0, &options, &OTHER),
            PASSED,
            "passed",
        ),
        // The UDP header of a fragment, with the port, may be in another fragment.
        (
            "a fragment of UDP over IPv6",
            behind(44, &[17, 0, 0, 1, 0, 0, 0, 7], &VXLAN),
            DROPPED,
            "drop_fragment",
        ),
        (
            "a fragment of TCP over IPv6",
            behind(44, &[6, 0, 0, 1, 0, 0, 0, 7], &[0; 24]),
            PASSED,
            "passed",
        ),
        (
            "a multicast listener report",
            // Option 5 is a router alert; 143 is the report (RFC 3810).
            behind(0, &[58, 0, 5, 2, 0, 0, 1, 0], &[143, 0, 0, 0, 0, 0, 0, 0]),
            PASSED,
            "passed",
        ),
        (
            "more extensions than anybody sends",
            behind(60, &many, &[]),
            DROPPED,
            "drop_malformed",
        ),
        (
            // The program needs the ports, but only 2 of the header's 8 bytes are there.
            "UDP cut short over IPv6",
            v6(&ip(from, here, 17, &[0xd9, 3])),
            DROPPED,
            "drop_malformed",
        ),
    ]
}

/// Returns frames that reach the replica without a tunnel.
pub(super) fn direct_frames() -> Vec<DirectFrame> {
    [to_hosts_and_services(), over_ipv6()].concat()
}
