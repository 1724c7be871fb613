//! TCP segments as the clients of a history write and read them: built into IP packets, and read
//! from those that a kernel sends. There are no options and no state; the tests decide the content.

#![forbid(unsafe_code)]

use std::net::{IpAddr, SocketAddr};

/// A flag of RFC 9293, 3.1.
pub const FIN: u8 = 1;
/// A flag of RFC 9293, 3.1.
pub const SYN: u8 = 2;
/// A flag of RFC 9293, 3.1.
pub const RST: u8 = 4;
/// A flag of RFC 9293, 3.1.
pub const ACK: u8 = 16;

/// IANA's protocol number.
const TCP: u8 = 6;

/// One TCP segment of a history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistorySegment {
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub number: u32,
    pub acknowledges: u32,
    pub flags: u8,
    pub data: Vec<u8>,
}

impl HistorySegment {
    /// Returns the segment in an IP packet with complete checksums, or `None` if its ends are of
    /// two families.
    pub fn packet(&self) -> Option<Vec<u8>> {
        let mut tcp = [self.from.port().to_be_bytes(), self.to.port().to_be_bytes()].concat();
        tcp.extend(self.number.to_be_bytes());
        tcp.extend(self.acknowledges.to_be_bytes());
        // A header of five words; a window of 16 KiB.
        tcp.extend([0x50, self.flags, 0x40, 0, 0, 0, 0, 0]);
        tcp.extend(&self.data);
        let length = tcp.len() as u16;
        let (mut packet, ends) = match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let mut header = [
                    [0x45, 0],
                    (20 + length).to_be_bytes(),
                    [0, 1],
                    [0x40, 0],
                    [64, TCP],
                    [0, 0],
                ]
                .concat();
                header.extend([from.octets(), to.octets()].concat());
                let check = checksum(&[&header]);
                header[10..12].copy_from_slice(&check);
                (header, [from.octets(), to.octets()].concat())
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let mut header = [[0x60, 0], [0, 0], length.to_be_bytes(), [TCP, 64]].concat();
                header.extend([from.octets(), to.octets()].concat());
                (header, [from.octets(), to.octets()].concat())
            }
            _ => return None,
        };
        let check = checksum(&[&ends, &[0, TCP], &length.to_be_bytes(), &tcp]);
        tcp[16..18].copy_from_slice(&check);
        packet.extend(tcp);
        Some(packet)
    }

    /// Parses a packet that a kernel sent. Returns `None` if it is not TCP or not complete. Its
    /// checksums may be left to a device, and are not verified.
    pub fn read(packet: &[u8]) -> Option<Self> {
        let (from, to, protocol, at): (IpAddr, IpAddr, u8, usize) = if packet.first()? >> 4 == 4 {
            let address = |at: usize| {
                Some(IpAddr::from(
                    <[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?,
                ))
            };
            (
                address(12)?,
                address(16)?,
                *packet.get(9)?,
                usize::from(packet[0] & 15) * 4,
            )
        } else {
            let address = |at: usize| {
                Some(IpAddr::from(
                    <[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?,
                ))
            };
            (address(8)?, address(24)?, *packet.get(6)?, 40)
        };
        let tcp = packet
            .get(at..)
            .filter(|tcp| protocol == TCP && tcp.len() >= 20)?;
        let port = |at: usize| u16::from_be_bytes([tcp[at], tcp[at + 1]]);
        let word = |at: usize| u32::from_be_bytes([tcp[at], tcp[at + 1], tcp[at + 2], tcp[at + 3]]);
        Some(Self {
            from: SocketAddr::new(from, port(0)),
            to: SocketAddr::new(to, port(2)),
            number: word(4),
            acknowledges: word(8),
            flags: tcp[13] & 0x3f,
            data: tcp.get(usize::from(tcp[12] >> 4) * 4..)?.to_vec(),
        })
    }
}

/// Returns the complement of the ones' complement sum (RFC 1071). All parts but the last have an
/// even length.
fn checksum(parts: &[&[u8]]) -> [u8; 2] {
    let words = parts
        .iter()
        .flat_map(|part| part.chunks(2))
        .map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_read_as_it_was_written() {
        for (from, to) in [
            ("10.1.1.2:4711", "240.0.0.1:80"),
            ("[fd01::2]:4711", "[fdca:a1:0:240::1]:80"),
        ] {
            let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
            let segment = HistorySegment {
                from,
                to,
                number: 7,
                acknowledges: 9,
                flags: ACK,
                data: b"data!".to_vec(),
            };
            let packet = segment.packet().unwrap();
            assert_eq!(HistorySegment::read(&packet), Some(segment));
            assert_eq!(
                HistorySegment::read(&packet[..50.min(packet.len() - 25)]),
                None,
                "cut short"
            );
        }
        let apart = HistorySegment {
            from: "10.1.1.2:1".parse().unwrap(),
            to: "[fd01::2]:1".parse().unwrap(),
            number: 0,
            acknowledges: 0,
            flags: 0,
            data: Vec::new(),
        };
        assert_eq!(apart.packet(), None);
    }
}
