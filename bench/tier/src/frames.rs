//! IPv4 packets for a raw socket: a datagram of a client's session, and the same inside of a
//! tunnel. No IO.

use std::net::Ipv4Addr;

use canal_abi::tier::{EDGE_MAC, REPLICA_MAC, TIER_VNI, VXLAN_PORT};

/// Port of the destination service.
/// Any port will do.
pub(crate) const PORT: u16 = 7000;

/// Returns a client's datagram to a service with `length` bytes of content.
pub(crate) fn datagram(client: (Ipv4Addr, u16), service: Ipv4Addr, length: usize) -> Vec<u8> {
    udp((client.0, client.1), (service, PORT), &vec![0; length])
}

/// Returns the datagram in a tunnel of the tier with this source port.
pub(crate) fn in_tunnel(from: (Ipv4Addr, u16), to: Ipv4Addr, inner: &[u8]) -> Vec<u8> {
    // VNI present; no hop and no stamp, because the sender is the edge.
    let mut content = vec![0x08, 0, 0, 0];
    content.extend_from_slice(&(TIER_VNI << 8).to_be_bytes());
    content.extend_from_slice(&REPLICA_MAC);
    content.extend_from_slice(&EDGE_MAC);
    content.extend_from_slice(&[0x08, 0x00]);
    content.extend_from_slice(inner);
    udp(from, (to, VXLAN_PORT), &content)
}

/// Returns a UDP packet without a checksum, as tunnels over IPv4 have none (RFC 7348 5).
fn udp(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), content: &[u8]) -> Vec<u8> {
    let length = 28 + content.len() as u16;
    let mut packet = vec![0x45, 0];
    packet.extend_from_slice(&length.to_be_bytes());
    packet.extend_from_slice(&[0, 0, 0x40, 0, 64, 17, 0, 0]);
    packet.extend_from_slice(&from.0.octets());
    packet.extend_from_slice(&to.0.octets());
    let sum = checksum(&packet);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend_from_slice(&from.1.to_be_bytes());
    packet.extend_from_slice(&to.1.to_be_bytes());
    packet.extend_from_slice(&(length - 20).to_be_bytes());
    packet.extend_from_slice(&[0, 0]);
    packet.extend_from_slice(content);
    packet
}

/// Computes the checksum of RFC 1071 over an even number of bytes.
fn checksum(header: &[u8]) -> u16 {
    let sum: u32 = header
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_describe_the_packet() {
        let (client, service) = (Ipv4Addr::new(10, 1, 1, 9), Ipv4Addr::new(240, 0, 0, 7));
        let (edge, replica) = (Ipv4Addr::new(250, 1, 0, 1), Ipv4Addr::new(250, 1, 0, 2));
        let inner = datagram((client, 40_000), service, 100);
        let outer = in_tunnel((edge, 40_001), replica, &inner);
        assert_eq!((inner.len(), outer.len()), (128, 128 + 50));
        assert_eq!(&outer[50..], inner);
        for packet in [&inner, &outer] {
            assert_eq!(
                usize::from(u16::from_be_bytes([packet[2], packet[3]])),
                packet.len()
            );
            assert_eq!(
                usize::from(u16::from_be_bytes([packet[24], packet[25]])),
                packet.len() - 20
            );
            assert_eq!(
                checksum(&packet[..20]),
                0,
                "a right header sums up to nothing"
            );
        }
        assert_eq!(&outer[28..36], [0x08, 0, 0, 0, 0x0c, 0xa0, 0xa1, 0]);
    }
}
