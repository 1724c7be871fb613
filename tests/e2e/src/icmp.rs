//! Raw ICMP in a host's network namespace: sends echo requests and datagrams, and receives replies
//! and errors as they arrive, before any kernel interprets them. It does not check the results.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use canal_world::World;
use socket2::{Domain, Protocol, Socket, Type};

/// An ICMP packet that a host received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IcmpPacket {
    /// Source address of the ICMP message.
    pub from: IpAddr,
    /// The message's ICMP type and code.
    pub kind: (u8, u8),
    /// MTU of a "fragmentation needed" or "packet too big" in bytes; meaningless for other errors.
    pub mtu: u32,
    /// Packet that an error is about: source, destination (address and port) and protocol.
    pub about: Option<(SocketAddr, SocketAddr, u8)>,
}

/// Receiver of all ICMP packets of one family that arrive at a host.
pub struct Icmp {
    /// A raw socket in the type of std's UDP socket: its `recv_from` works with any socket, and
    /// initializes the bytes that it returns.
    socket: UdpSocket,
    is_v6: bool,
}

impl Icmp {
    /// Opens a raw socket and starts to receive.
    pub fn open(world: &World, host: &str, is_v6: bool) -> Self {
        let (domain, protocol) = if is_v6 {
            (Domain::IPV6, Protocol::ICMPV6)
        } else {
            (Domain::IPV4, Protocol::ICMPV4)
        };
        let socket = world.inside(host, || Socket::new(domain, Type::RAW, Some(protocol)));
        let socket = socket
            .map(|made| made.expect("root may open raw sockets"))
            .unwrap_or_else(|e| panic!("{host}: {e}"));
        Self {
            socket: socket.into(),
            is_v6,
        }
    }

    /// Sends one ICMP echo request (ping).
    pub fn echo(&self, to: IpAddr, sequence: u16) -> std::io::Result<()> {
        let mut packet = vec![if self.is_v6 { 128 } else { 8 }, 0, 0, 0, 0xca, 0x0a];
        packet.extend(sequence.to_be_bytes());
        packet.extend([0x55; 56]);
        // The kernel computes the ICMPv6 checksum itself, because only it knows the pseudo header.
        if !self.is_v6 {
            let sum = checksum(&packet);
            packet[2..4].copy_from_slice(&sum.to_be_bytes());
        }
        self.socket.send_to(&packet, (to, 0)).map(drop)
    }

    /// Returns the next packet within this time, if there is one.
    pub fn receive(&self, within: Duration) -> Option<IcmpPacket> {
        let (started, mut buffer) = (Instant::now(), [0; 2048]);
        loop {
            let left = within
                .checked_sub(started.elapsed())
                .filter(|left| !left.is_zero())?;
            self.socket
                .set_read_timeout(Some(left))
                .expect("a time that is not zero");
            match self.socket.recv_from(&mut buffer) {
                Ok((length, from)) => {
                    if let Some(received) = read(&buffer[..length], from.ip(), self.is_v6) {
                        return Some(received);
                    }
                }
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(e) => panic!("a raw socket: {e}"),
            }
        }
    }

    /// Returns the next packet within this time for which `is_it` is true.
    pub fn receive_one(
        &self,
        within: Duration,
        is_it: impl Fn(&IcmpPacket) -> bool,
    ) -> Option<IcmpPacket> {
        let started = Instant::now();
        loop {
            let received = self.receive(within.checked_sub(started.elapsed())?)?;
            if is_it(&received) {
                return Some(received);
            }
        }
    }
}

/// Computes the checksum of RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum + (sum >> 16)) as u16)
}

/// Parses a packet. IPv4's raw sockets return the IP header too (raw(7)), IPv6's do not.
fn read(bytes: &[u8], from: IpAddr, is_v6: bool) -> Option<IcmpPacket> {
    let header = if is_v6 {
        0
    } else {
        usize::from(bytes.first()? & 0xf) * 4
    };
    let icmp = bytes.get(header..)?;
    let kind = (*icmp.first()?, *icmp.get(1)?);
    let mtu = match is_v6 {
        true => u32::from_be_bytes(icmp.get(4..8)?.try_into().ok()?),
        false => u16::from_be_bytes(icmp.get(6..8)?.try_into().ok()?).into(),
    };
    let is_error = if is_v6 {
        kind.0 < 128
    } else {
        matches!(kind.0, 3 | 11 | 12)
    };
    let about = if is_error {
        embedded(icmp.get(8..)?, is_v6)
    } else {
        None
    };
    Some(IcmpPacket {
        from,
        kind,
        mtu,
        about,
    })
}

fn embedded(packet: &[u8], is_v6: bool) -> Option<(SocketAddr, SocketAddr, u8)> {
    let (ends, protocol, header): ([IpAddr; 2], u8, usize) = if is_v6 {
        let address = |at: usize| {
            Some(Ipv6Addr::from(<[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?).into())
        };
        ([address(8)?, address(24)?], *packet.get(6)?, 40)
    } else {
        let address = |at: usize| {
            Some(Ipv4Addr::from(<[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?).into())
        };
        (
            [address(12)?, address(16)?],
            *packet.get(9)?,
            usize::from(packet.first()? & 0xf) * 4,
        )
    };
    let port = |at: usize| {
        Some(u16::from_be_bytes(
            packet.get(header + at..header + at + 2)?.try_into().ok()?,
        ))
    };
    Some((
        (ends[0], port(0)?).into(),
        (ends[1], port(2)?).into(),
        protocol,
    ))
}
