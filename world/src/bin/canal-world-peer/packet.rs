//! Builds packets: IPv4 and IPv6 with TCP, UDP or ICMP inside, VXLAN around them, and valid
//! checksums. Pure: sends nothing.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// VXLAN's UDP port (RFC 7348 §5).
pub(crate) const VXLAN_PORT: u16 = 4789;
/// IANA's protocol numbers.
const PROTOCOL_ICMP: u8 = 1;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;
const PROTOCOL_ICMP6: u8 = 58;
/// "More fragments" flag of the IPv4 header (RFC 791 §3.1).
const MORE_FRAGMENTS: u16 = 0x2000;

/// Content after the IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InnerProtocol {
    /// A TCP segment with these flags.
    Tcp(u8),
    Udp,
    Icmp,
}

impl InnerProtocol {
    /// Returns the protocol for the name that a user writes.
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "syn" => Some(InnerProtocol::Tcp(0x02)),
            "ack" => Some(InnerProtocol::Tcp(0x10)),
            "synack" => Some(InnerProtocol::Tcp(0x12)),
            "rst" => Some(InnerProtocol::Tcp(0x04)),
            "udp" => Some(InnerProtocol::Udp),
            "icmp" => Some(InnerProtocol::Icmp),
            _ => None,
        }
    }
}

/// Returns the Internet checksum: the one's complement sum of 16-bit words (RFC 1071).
fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum: u32 = 0;
    for part in parts {
        // Only a last part has an odd length here.
        for pair in part.chunks(2) {
            sum += u32::from(u16::from_be_bytes([
                pair[0],
                pair.get(1).copied().unwrap_or(0),
            ]));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Builds a whole IP packet. Both addresses belong to one family.
pub(crate) fn ip(from: SocketAddr, to: SocketAddr, kind: InnerProtocol, payload: &[u8]) -> Vec<u8> {
    let protocol = match (kind, from) {
        (InnerProtocol::Tcp(_), _) => PROTOCOL_TCP,
        (InnerProtocol::Udp, _) => PROTOCOL_UDP,
        (InnerProtocol::Icmp, SocketAddr::V4(_)) => PROTOCOL_ICMP,
        (InnerProtocol::Icmp, SocketAddr::V6(_)) => PROTOCOL_ICMP6,
    };
    let segment = segment(from, to, kind, protocol, payload);
    match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => ip4(from, to, protocol, 0, &segment),
        (from, to) => {
            let mut packet = vec![0x60, 0, 0, 0];
            packet.extend((segment.len() as u16).to_be_bytes());
            packet.extend([protocol, 64]);
            packet.extend(octets(from));
            packet.extend(octets(to));
            packet.extend(segment);
            packet
        }
    }
}

/// Builds an IPv4 packet. `fragment` is the header field with the flags and the offset.
fn ip4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, fragment: u16, segment: &[u8]) -> Vec<u8> {
    let mut header = vec![0x45, 0];
    header.extend((20 + segment.len() as u16).to_be_bytes());
    header.extend([0xca, 0x0a]);
    header.extend(fragment.to_be_bytes());
    header.extend([64, protocol, 0, 0]);
    header.extend(from.octets());
    header.extend(to.octets());
    let sum = checksum(&[&header]);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    header.extend(segment);
    header
}

fn segment(
    from: SocketAddr,
    to: SocketAddr,
    kind: InnerProtocol,
    protocol: u8,
    payload: &[u8],
) -> Vec<u8> {
    let mut segment = Vec::new();
    // Offset of the checksum in each header (RFC 9293 §3.1, RFC 768, RFC 792).
    let sum_at = match kind {
        InnerProtocol::Tcp(flags) => {
            segment.extend(from.port().to_be_bytes());
            segment.extend(to.port().to_be_bytes());
            // Sequence number 0xca0a0001, no acknowledgment, five words of header, the largest
            // window.
            segment.extend([
                0xca, 0x0a, 0, 1, 0, 0, 0, 0, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0,
            ]);
            16
        }
        InnerProtocol::Udp => {
            segment.extend(from.port().to_be_bytes());
            segment.extend(to.port().to_be_bytes());
            // The length counts the header of 8 bytes. The checksum is filled in below.
            segment.extend((8 + payload.len() as u16).to_be_bytes());
            segment.extend([0, 0]);
            6
        }
        InnerProtocol::Icmp => {
            segment.extend([
                // Echo requests: type 8 of ICMP, type 128 of ICMPv6.
                if protocol == PROTOCOL_ICMP { 8 } else { 128 },
                0,
                0,
                0,
                // An arbitrary identifier, and sequence number 1.
                0xca,
                0x0a,
                0,
                1,
            ]);
            2
        }
    };
    segment.extend(payload);
    let length = (segment.len() as u32).to_be_bytes();
    let pseudo = [
        octets(from.ip()),
        octets(to.ip()),
        length.to_vec(),
        vec![0, 0, 0, protocol],
    ]
    .concat();
    // The checksum of ICMPv4 covers no pseudo-header (RFC 792), that of ICMPv6 does.
    let covered: &[u8] = if protocol == PROTOCOL_ICMP {
        &[]
    } else {
        &pseudo
    };
    // Zero means "no checksum" in UDP (RFC 768).
    let sum = match checksum(&[covered, &segment]) {
        0 if kind == InnerProtocol::Udp => 0xffff,
        sum => sum,
    };
    segment[sum_at..sum_at + 2].copy_from_slice(&sum.to_be_bytes());
    segment
}

/// Builds the UDP payload of a VXLAN packet: header with `hop` in its reserved last byte, Ethernet
/// header, and the inner packet.
pub(crate) fn vxlan(vni: u32, hop: u8, mac: [u8; 6], inner: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x08, 0, 0, 0];
    frame.extend((vni << 8 | u32::from(hop)).to_be_bytes());
    frame.extend(mac);
    frame.extend([0x02, 0xca, 0x0a, 0x02, 0, 1]);
    let is_ip6 = inner.first().is_some_and(|byte| byte >> 4 == 6);
    frame.extend(if is_ip6 { [0x86, 0xdd] } else { [0x08, 0x00] });
    frame.extend(inner);
    frame
}

/// Splits a datagram after its UDP header, so that the first fragment contains the ports and the
/// second their payload.
pub(crate) fn torn(from: Ipv4Addr, to: Ipv4Addr, datagram: &[u8]) -> [Vec<u8>; 2] {
    let segment = &datagram[20..];
    let (first, second) = segment.split_at(8);
    [
        ip4(from, to, PROTOCOL_UDP, MORE_FRAGMENTS, first),
        ip4(from, to, PROTOCOL_UDP, 1, second),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    /// The test is that of a receiver: the sum over everything, including the checksum, is zero.
    #[test]
    fn forwarded_packets_have_valid_checksums() {
        let pairs = [
            ("10.1.1.2:4711", "10.1.200.1:80"),
            ("[fd00:1::1:2]:4711", "[fd00:1:0:c:2000::1]:80"),
        ];
        for (from, to) in pairs.map(|(from, to)| (address(from), address(to))) {
            for (name, protocol) in [
                ("syn", 6),
                ("ack", 6),
                ("synack", 6),
                ("rst", 6),
                ("udp", 17),
                ("icmp", 0),
            ] {
                let packet = ip(from, to, InnerProtocol::named(name).unwrap(), b"odd");
                let (header, protocol) = match (from.is_ipv4(), protocol) {
                    (true, 0) => (20, 1),
                    (false, 0) => (40, 58),
                    (is_ip4, protocol) => (if is_ip4 { 20 } else { 40 }, protocol),
                };
                if from.is_ipv4() {
                    assert_eq!(checksum(&[&packet[..20]]), 0, "{name}: header");
                }
                let segment = &packet[header..];
                let pseudo = [
                    octets(from.ip()),
                    octets(to.ip()),
                    vec![0, 0, 0, segment.len() as u8, 0, 0, 0, protocol],
                ]
                .concat();
                let covered: &[u8] = if protocol == 1 { &[] } else { &pseudo };
                assert_eq!(checksum(&[covered, segment]), 0, "{name} {from}");
            }
        }
        assert_eq!(InnerProtocol::named("fin"), None);
    }

    #[test]
    fn a_tunnel_packet_has_the_given_fields() {
        let inner = ip(
            address("250.1.0.3:1"),
            address("10.1.1.2:2"),
            InnerProtocol::Udp,
            b"",
        );
        let frame = vxlan(0xCA0A1, 3, [2, 0, 0, 0, 0, 9], &inner);
        assert_eq!(frame[..8], [0x08, 0, 0, 0, 0x0c, 0xa0, 0xa1, 3]);
        assert_eq!(
            (frame[8..14].to_vec(), frame[20..22].to_vec()),
            (vec![2, 0, 0, 0, 0, 9], vec![0x08, 0])
        );
        assert_eq!(frame[22..], inner);
        let [first, second] = torn(Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST, &inner);
        assert_eq!(
            (first.len(), &first[6..8], second.len(), &second[6..8]),
            (28, &[0x20, 0][..], 20, &[0, 1][..])
        );
    }
}
