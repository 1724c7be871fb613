//! Packets that an application can send besides TCP: datagrams, raw IP, and its own frames. The
//! sender runs in the child, the receiver in the test.

use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::{pause, print_line};

/// Text by which receivers recognize the packets.
pub const TEXT: &[u8] = b"canal-lab-packet";
/// Size of the payload that a `reset` has. Any number will do that fits into a packet: a reset of
/// the kernel has no payload.
pub const RESET_PAYLOAD_BYTES: usize = 1000;
/// IANA's protocol numbers.
const UDP: u8 = 17;
const TCP: u8 = 6;
const SCTP: u8 = 132;

/// Returns the IP protocol with which a kind of packet arrives.
pub fn protocol(kind: &str, to: SocketAddr) -> i32 {
    match kind {
        "udp" | "frame" => i32::from(UDP),
        "sctp" => i32::from(SCTP),
        "tcp" | "reset" | "bare reset" => i32::from(TCP),
        "echo" if to.is_ipv4() => libc::IPPROTO_ICMP,
        "echo" => libc::IPPROTO_ICMPV6,
        other => panic!("no kind {other}"),
    }
}

/// Builds a transport header with the text after it. Checksums are left out, because raw receivers
/// do not verify them.
fn payload(kind: &str, to: SocketAddr) -> Vec<u8> {
    let mut p = Vec::new();
    // Each kind of TCP segment has a source port of its own: conntrack must not take one for a
    // later segment of another one's connection.
    let from: u16 = match kind {
        "reset" => 4712,
        "bare reset" => 4713,
        _ => 4711,
    };
    let ports = |p: &mut Vec<u8>| {
        p.extend(from.to_be_bytes());
        p.extend(to.port().to_be_bytes());
    };
    match kind {
        // Type, code, no checksum yet, any identifier, and the first sequence number.
        "echo" => p.extend([if to.is_ipv4() { 8 } else { 128 }, 0, 0, 0, 0, 7, 0, 1]),
        "frame" => {
            ports(&mut p);
            // The rest of UDP's header: the length with its own 8 bytes, and no checksum.
            p.extend((8 + TEXT.len() as u16).to_be_bytes());
            p.extend([0, 0]);
        }
        "sctp" => {
            ports(&mut p);
            // The rest of SCTP's header: no verification tag and no checksum.
            p.extend([0; 8]);
        }
        "tcp" => {
            ports(&mut p);
            // The flags are ACK and PSH; the header has 20 bytes.
            p.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 0xff, 0xff, 0, 0, 0, 0]);
        }
        "reset" => {
            ports(&mut p);
            // The flag is RST; the header has 20 bytes, and the text follows.
            p.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x04, 0, 0, 0, 0, 0, 0]);
        }
        "bare reset" => {
            ports(&mut p);
            // The same with a header of 36 bytes: the text stands for options.
            p.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x90, 0x04, 0, 0, 0, 0, 0, 0]);
        }
        // The kernel writes the header of `udp`, so only the text is left.
        _ => {}
    }
    p.extend(TEXT);
    if kind == "reset" {
        p.resize(20 + RESET_PAYLOAD_BYTES, b'x');
    }
    if kind == "echo" && to.is_ipv4() {
        // The kernel fills in the checksum for raw sockets of ICMPv6, but not of ICMP.
        let sum = !checksum(&p);
        p[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    p
}

fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes
        .chunks(2)
        .map(|c| u32::from(c[0]) << 8 | c.get(1).map_or(0, |b| u32::from(*b)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Builds a complete IP packet.
pub fn ip(from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut p = Vec::new();
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            p.extend([0x45, 0]);
            p.extend((20 + payload.len() as u16).to_be_bytes());
            p.extend([0, 1, 0, 0, 64, protocol, 0, 0]);
            p.extend(from.octets());
            p.extend(to.octets());
            let sum = !checksum(&p);
            p[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            p.extend([0x60, 0, 0, 0]);
            p.extend((payload.len() as u16).to_be_bytes());
            p.extend([protocol, 64]);
            p.extend(from.octets());
            p.extend(to.octets());
        }
        _ => panic!("two families"),
    }
    p.extend(payload);
    p
}

/// Returns the address of a packet socket: an interface, and the destination on the link.
fn link_address(interface: u32, to: [u8; 6], ethertype: u16) -> SockAddr {
    let mut sll_addr = [0; 8];
    sll_addr[..6].copy_from_slice(&to);
    let link = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: ethertype.to_be(),
        sll_ifindex: interface.cast_signed(),
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 6,
        sll_addr,
    };
    // SAFETY: the storage is as large as any address and aligned for each; the length says how much
    // of it was written.
    let (_, address) = unsafe {
        SockAddr::try_init(|storage, length| {
            storage.cast::<libc::sockaddr_ll>().write(link);
            *length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            Ok(())
        })
    }
    .unwrap();
    address
}

fn hardware_address(text: &str) -> [u8; 6] {
    let bytes: Vec<u8> = text
        .split(':')
        .map(|b| u8::from_str_radix(b, 16).unwrap())
        .collect();
    bytes.try_into().unwrap()
}

/// Opens a socket, waits, sends one packet, and reports the result. Arguments: `KIND TO FROM
/// HARDWARE_ADDRESS`.
pub fn send(args: &[String]) {
    let (kind, to) = (args[0].as_str(), args[1].parse::<SocketAddr>().unwrap());
    let from: IpAddr = args[2].parse().unwrap();
    let family = Domain::for_address(to);
    let opened = match kind {
        "udp" => Socket::new(family, Type::DGRAM, None),
        // With ETH_P_ALL the socket would also receive; with 0 it only sends.
        "frame" => Socket::new(
            Domain::from(libc::AF_PACKET),
            Type::RAW,
            Some(Protocol::from(0)),
        ),
        _ => Socket::new(family, Type::RAW, Some(Protocol::from(protocol(kind, to)))),
    };
    let socket = opened.unwrap();
    print_line("open");
    pause();
    let payload = payload(kind, to);
    let sent = if kind == "frame" {
        let udp = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::DGRAM,
            None,
        )
        .unwrap();
        let interface = rustix::net::netdevice::name_to_index(&udp, "pod0").unwrap();
        let ethertype = if to.is_ipv4() { 0x0800 } else { 0x86dd };
        let hardware = hardware_address(&args[3]);
        let mut frame = hardware.to_vec();
        // Any locally administered address will do as the frame's source.
        frame.extend([2, 0, 0, 0, 0, 1]);
        frame.extend(u16::to_be_bytes(ethertype));
        frame.extend(ip(from, to.ip(), UDP, &payload));
        socket.send_to(&frame, &link_address(interface, hardware, ethertype))
    } else {
        // A raw IPv6 socket interprets the port as a protocol.
        let to = if kind == "udp" {
            to
        } else {
            SocketAddr::new(to.ip(), 0)
        };
        socket.send_to(&payload, &to.into())
    };
    print_line(match sent {
        Ok(_) => "sent".to_string(),
        Err(e) => format!("error {}", e.raw_os_error().unwrap_or_default()),
    });
}

/// Listens, and reports what arrives within two seconds after [`super::CaseProcess::go_on`].
/// Arguments: `AT [arrives]`. The second one means that a packet will arrive, so the gate waits
/// longer for it.
pub fn receive(args: &[String]) {
    let socket = UdpSocket::bind(&args[0]).unwrap();
    let wait = Duration::from_secs(2);
    let arrives = args.get(1).is_some_and(|arg| arg == "arrives");
    socket
        .set_read_timeout(Some(if arrives {
            canal_timing::deadline(wait)
        } else {
            wait
        }))
        .unwrap();
    print_line("open");
    pause();
    print_line(
        socket
            .recv(&mut [0; 64])
            .map_or("nothing".to_string(), |n| format!("{n} bytes")),
    );
}

/// Sends one datagram and reports the result. Arguments: `FROM TO`.
pub fn datagram(args: &[String]) {
    let sent = UdpSocket::bind(&args[0]).unwrap().send_to(TEXT, &args[1]);
    print_line(sent.map_or_else(
        |e| format!("error {}", e.raw_os_error().unwrap_or_default()),
        |_| "sent".to_string(),
    ));
}

/// Replies to every datagram until the process ends, and reports the result of each reply.
/// Arguments: `AT`.
pub fn answer(args: &[String]) {
    let socket = UdpSocket::bind(&args[0]).unwrap();
    print_line("open");
    while let Ok((n, from)) = socket.recv_from(&mut [0; 64]) {
        print_line(match socket.send_to(&TEXT[..n.min(TEXT.len())], from) {
            Ok(_) => "answered".to_string(),
            Err(e) => format!("error {}", e.raw_os_error().unwrap_or_default()),
        });
    }
}

/// Sends a query and reports whether a reply arrived. Arguments: `RESOLVER`.
pub fn send_query(args: &[String]) {
    let to: SocketAddr = args[0].parse().unwrap();
    let any: IpAddr = if to.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let socket = UdpSocket::bind((any, 0)).unwrap();
    socket
        .set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(2))))
        .unwrap();
    let asked = socket
        .send_to(TEXT, to)
        .and_then(|_| socket.recv_from(&mut [0; 64]));
    print_line(asked.map_or_else(
        |e| format!("error {}", e.raw_os_error().unwrap_or_default()),
        |(_, from)| format!("answer from {}", from.ip()),
    ));
}

/// Raw socket that receives all incoming packets of a protocol and family.
pub struct Receiver(Socket);

impl Receiver {
    pub fn open(to: SocketAddr, protocol: i32) -> Self {
        let socket = Socket::new(
            Domain::for_address(to),
            Type::RAW,
            Some(Protocol::from(protocol)),
        )
        .unwrap();
        socket
            .set_read_timeout(Some(Duration::from_millis(50)))
            .unwrap();
        Self(socket)
    }

    /// Returns true if a packet with the text arrives in time.
    pub fn receives(&self, within: Duration) -> bool {
        self.receive(within).is_some()
    }

    /// Returns the first packet with the text that arrives in time, over IPv4 with the IP header.
    pub fn receive(&self, within: Duration) -> Option<Vec<u8>> {
        let end = Instant::now() + within;
        while Instant::now() < end {
            let mut block = [MaybeUninit::<u8>::uninit(); 2048];
            match self.0.recv(&mut block) {
                Ok(n) => {
                    // SAFETY: the kernel has written the first `n` bytes.
                    let read =
                        unsafe { std::slice::from_raw_parts(block.as_ptr().cast::<u8>(), n) };
                    if read.windows(TEXT.len()).any(|w| w == TEXT) {
                        return Some(read.to_vec());
                    }
                }
                // A call with a timeout is not restarted after a signal, e.g. about a child of
                // another test.
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::WouldBlock
                            | io::ErrorKind::TimedOut
                            | io::ErrorKind::Interrupted
                    ) => {}
                Err(e) => panic!("receiving: {e} on {}", self.0.as_raw_fd()),
            }
        }
        None
    }
}
