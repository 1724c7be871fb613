//! Frames of the tier for tests: built from text, and formatted as one line of text with every
//! checksum verified.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

pub const HEAD: usize = 64;
pub const ROUTER: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub const HOST: [u8; 6] = [2, 0, 0, 0, 0, 2];
pub const POD_MAC: [u8; 6] = [2, 1, 1, 1, 1, 1];

/// Flags of TCP (RFC 9293 §3.1).
pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const ACK: u8 = 16;

/// Returns the ones' complement sum of 16-bit words (RFC 1071), folded.
pub fn sum(parts: &[&[u8]]) -> u16 {
    let mut total = 0u64;
    for part in parts {
        for pair in part.chunks(2) {
            total += u64::from(u16::from_be_bytes([
                pair[0],
                pair.get(1).copied().unwrap_or(0),
            ]));
        }
    }
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    total as u16
}

fn put_sum(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

fn octets(a: IpAddr) -> Vec<u8> {
    match a {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn pseudo(from: IpAddr, to: IpAddr, protocol: u8, length: usize) -> Vec<u8> {
    let mut p = octets(from);
    p.extend(octets(to));
    p.extend((length as u32).to_be_bytes());
    p.extend([0, 0, 0, protocol]);
    p
}

/// Builds an IP packet around a payload whose checksum is already correct.
pub fn ip(from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut p;
    if from.is_ipv4() {
        p = vec![0x45, 0, 0, 0, 0x12, 0x34, 0x40, 0, 63, protocol, 0, 0];
        p[2..4].copy_from_slice(&(20 + payload.len() as u16).to_be_bytes());
        p.extend(octets(from));
        p.extend(octets(to));
        let s = !sum(&[&p]);
        put_sum(&mut p, 10, s);
    } else {
        p = vec![0x60, 0, 0, 0, 0, 0, protocol, 63];
        p[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
        p.extend(octets(from));
        p.extend(octets(to));
    }
    p.extend(payload);
    p
}

/// Changes the fragment bits of an IPv4 packet, or the options of its header, and corrects the
/// header checksum.
pub fn with_ip4(mut p: Vec<u8>, fragment: u16, options: &[u8]) -> Vec<u8> {
    p[6..8].copy_from_slice(&fragment.to_be_bytes());
    p.splice(20..20, options.iter().copied());
    p[0] = 0x45 + (options.len() / 4) as u8;
    let length = p.len() as u16;
    p[2..4].copy_from_slice(&length.to_be_bytes());
    let head = 20 + options.len();
    put_sum(&mut p, 10, 0);
    let s = !sum(&[&p[..head]]);
    put_sum(&mut p, 10, s);
    p
}

fn ends(from: &str, to: &str) -> (SocketAddr, SocketAddr) {
    (
        from.parse().unwrap_or_else(|e| panic!("{from}: {e}")),
        to.parse().unwrap_or_else(|e| panic!("{to}: {e}")),
    )
}

fn transport(from: &str, to: &str, protocol: u8, at: usize, rest: &[u8]) -> Vec<u8> {
    let (from, to) = ends(from, to);
    let mut p = from.port().to_be_bytes().to_vec();
    p.extend(to.port().to_be_bytes());
    p.extend(rest);
    let s = !sum(&[&pseudo(from.ip(), to.ip(), protocol, p.len()), &p]);
    put_sum(
        &mut p,
        at,
        if protocol == 17 && s == 0 { 0xffff } else { s },
    );
    ip(from.ip(), to.ip(), protocol, &p)
}

/// Builds a TCP packet with 12 bytes of options.
pub fn tcp(from: &str, to: &str, flags: u8, data: &[u8]) -> Vec<u8> {
    tcp_answer(from, to, flags, 8, data)
}

/// Builds a TCP packet that acknowledges the bytes before `acknowledged`.
pub fn tcp_answer(from: &str, to: &str, flags: u8, acknowledged: u32, data: &[u8]) -> Vec<u8> {
    let mut rest = vec![0, 0, 0, 9];
    rest.extend(acknowledged.to_be_bytes());
    rest.extend([0x80, flags, 0x10, 0, 0, 0, 0, 0]);
    rest.extend([1, 1, 8, 10, 0, 0, 0, 5, 0, 0, 0, 6]);
    rest.extend(data);
    transport(from, to, 6, 16, &rest)
}

pub fn udp(from: &str, to: &str, data: &[u8]) -> Vec<u8> {
    let mut rest = (8 + data.len() as u16).to_be_bytes().to_vec();
    rest.extend([0, 0]);
    rest.extend(data);
    transport(from, to, 17, 6, &rest)
}

/// Builds a UDP packet over IPv4 without a checksum.
pub fn udp_bare(from: &str, to: &str, data: &[u8]) -> Vec<u8> {
    let mut p = udp(from, to, data);
    put_sum(&mut p, 26, 0);
    p
}

/// Builds an ICMP or ICMPv6 packet from `kind`, `code`, the four bytes after the checksum, and the
/// data.
pub fn icmp(from: &str, to: &str, kind: u8, code: u8, rest: [u8; 4], data: &[u8]) -> Vec<u8> {
    let (from, to): (IpAddr, IpAddr) = (from.parse().unwrap(), to.parse().unwrap());
    let mut p = vec![kind, code, 0, 0];
    p.extend(rest);
    p.extend(data);
    let (protocol, over) = if from.is_ipv4() {
        (1, vec![])
    } else {
        (58, pseudo(from, to, 58, p.len()))
    };
    let s = !sum(&[&over, &p]);
    put_sum(&mut p, 2, s);
    ip(from, to, protocol, &p)
}

pub fn echo(from: &str, to: &str, is_reply: bool) -> Vec<u8> {
    let kind = if from.contains(':') {
        128 + u8::from(is_reply)
    } else if is_reply {
        0
    } else {
        8
    };
    icmp(from, to, kind, 0, [0x12, 0x34, 0, 1], b"ping ping")
}

/// Builds a port unreachable error about `packet`, of which it quotes the first `shown` bytes.
pub fn unreachable(from: &str, to: &str, packet: &[u8], shown: usize) -> Vec<u8> {
    let (kind, code) = if from.contains(':') { (1, 4) } else { (3, 3) };
    icmp(
        from,
        to,
        kind,
        code,
        [0; 4],
        &packet[..shown.min(packet.len())],
    )
}

/// Outer headers of a frame.
#[derive(Debug, Clone)]
pub struct OuterHeaders {
    pub from: Ipv4Addr,
    pub to: Ipv4Addr,
    pub port: u16,
    pub vni: u32,
    pub hop: u8,
    pub stamp: u32,
    /// True if the outer UDP header has a checksum.
    pub summed: bool,
}

impl OuterHeaders {
    pub fn new(from: &str, to: &str, vni: u32) -> Self {
        Self {
            from: from.parse().unwrap(),
            to: to.parse().unwrap(),
            port: 55_555,
            vni,
            hop: 0,
            stamp: 0,
            summed: false,
        }
    }

    pub fn frame(&self, inner: &[u8]) -> Vec<u8> {
        let mut data = (8 << 24 | self.stamp).to_be_bytes().to_vec();
        data.extend((self.vni << 8 | u32::from(self.hop)).to_be_bytes());
        data.extend([0xee; 6]);
        data.extend(POD_MAC);
        data.extend(if inner[0] >> 4 == 6 {
            [0x86, 0xdd]
        } else {
            [8, 0]
        });
        data.extend(inner);
        let ends = (
            format!("{}:{}", self.from, self.port),
            format!("{}:4789", self.to),
        );
        let outer = if self.summed {
            udp(&ends.0, &ends.1, &data)
        } else {
            udp_bare(&ends.0, &ends.1, &data)
        };
        let mut f = HOST.to_vec();
        f.extend(ROUTER);
        f.extend([8, 0]);
        f.extend(outer);
        f
    }
}

/// Returns the first fragment of a frame, as a router makes it whose link carries outer datagrams
/// of `link` bytes.
pub fn torn(frame: &[u8], link: usize) -> Vec<u8> {
    let length = 20 + (link - 20) / 8 * 8;
    let mut f = frame[..14 + length].to_vec();
    f[16..18].copy_from_slice(&(length as u16).to_be_bytes());
    f[20] |= 0x20;
    put_sum(&mut f, 24, 0);
    let s = !sum(&[&f[14..34]]);
    put_sum(&mut f, 24, s);
    f
}

struct Inner {
    text: String,
    length: usize,
}

/// Formats an IP packet and, if `whole`, checks it. Protocols: 6 TCP, 17 UDP, 1 ICMP, 58 ICMPv6.
fn read_ip(p: &[u8], whole: bool) -> Inner {
    let (from, to, protocol, head, length): (IpAddr, IpAddr, u8, usize, usize);
    if p[0] >> 4 == 4 {
        let a = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&p[at..at + 4]).unwrap());
        head = usize::from(p[0] & 15) * 4;
        (from, to, protocol, length) = (
            a(12),
            a(16),
            p[9],
            usize::from(u16::from_be_bytes([p[2], p[3]])),
        );
        assert_eq!(
            sum(&[&p[..head]]),
            0xffff,
            "the IPv4 header's checksum, {from} > {to}"
        );
    } else {
        let a = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&p[at..at + 16]).unwrap());
        head = 40;
        (from, to, protocol, length) = (
            a(8),
            a(24),
            p[6],
            40 + usize::from(u16::from_be_bytes([p[4], p[5]])),
        );
    }
    // A packet that an ICMP error quotes is cut, but states its whole length.
    let body = &p[head..length.min(p.len())];
    let over = pseudo(from, to, protocol, length - head);
    let port = |at: usize| u16::from_be_bytes([body[at], body[at + 1]]);
    let verify = |over: &[u8], what: &str| {
        if whole {
            assert_eq!(
                sum(&[over, body]),
                0xffff,
                "{what}'s checksum, {from} > {to}"
            );
        }
    };
    let end = |a: IpAddr, port: u16| SocketAddr::new(a, port);
    let text = match protocol {
        6 => {
            verify(&over, "TCP");
            format!("tcp {} > {}", end(from, port(0)), end(to, port(2)))
        }
        17 => {
            // In UDP a checksum field of 0 means that there is none (RFC 768).
            let bare = port(6) == 0;
            if !bare {
                verify(&over, "UDP");
            }
            format!(
                "{} {} > {}",
                if bare { "udp without checksum" } else { "udp" },
                end(from, port(0)),
                end(to, port(2))
            )
        }
        1 | 58 => {
            // Only ICMPv6's checksum covers the pseudo header.
            verify(if protocol == 58 { &over } else { &[] }, "ICMP");
            read_icmp(body, protocol, &format!("{from} > {to}"))
        }
        other => format!("protocol {other} {from} > {to}"),
    };
    Inner { text, length }
}

/// Formats an ICMP message or, as protocol 58, an ICMPv6 message.
fn read_icmp(body: &[u8], protocol: u8, ends: &str) -> String {
    let kind = format!("icmp {}/{}", body[0], body[1]);
    // ICMPv6 errors have types below 128. Of ICMPv4, tests send echoes and errors only.
    let is_error = if protocol == 58 {
        body[0] < 128
    } else {
        ![0, 8].contains(&body[0])
    };
    if !is_error {
        return format!("{kind} {ends}");
    }
    let about = read_ip(&body[8..], false).text;
    // Only Packet Too Big and Fragmentation Needed contain an MTU.
    match (protocol, body[0], body[1]) {
        (58, 2, _) => {
            let mtu = u32::from_be_bytes(body[4..8].try_into().unwrap());
            format!("{kind} mtu {mtu} {ends} about {about}")
        }
        (1, 3, 4) => {
            let mtu = u16::from_be_bytes([body[6], body[7]]);
            format!("{kind} mtu {mtu} {ends} about {about}")
        }
        _ => format!("{kind} {ends} about {about}"),
    }
}

/// Formats a frame as one line and panics if a checksum or a length is wrong. The outer source port
/// ([`port_of`]) and a stamp of 0 are left out.
pub fn read(f: &[u8]) -> String {
    assert_eq!(
        (&f[..6], &f[6..12], &f[12..14]),
        (&ROUTER[..], &HOST[..], &[8, 0][..]),
        "back to the router"
    );
    let outer = read_ip(&f[14..], true);
    assert_eq!(14 + outer.length, f.len(), "the outer length");
    assert_eq!(
        usize::from(u16::from_be_bytes([f[38], f[39]])),
        f.len() - 34,
        "the outer UDP length"
    );
    assert_eq!(
        (f[22], &f[36..38], f[42]),
        (64, &4789u16.to_be_bytes()[..], 8),
        "TTL, port, VXLAN flags"
    );
    let a = |at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&f[at..at + 4]).unwrap());
    let vni = u32::from_be_bytes([0, f[46], f[47], f[48]]);
    let macs: Vec<String> = [&f[50..56], &f[56..62]]
        .iter()
        .map(|m| m.iter().map(|b| format!("{b:02x}")).collect())
        .collect();
    let inner = read_ip(&f[HEAD..], true);
    assert_eq!(HEAD + inner.length, f.len(), "the inner length");
    let stamp = match u32::from_be_bytes([0, f[43], f[44], f[45]]) {
        0 => String::new(),
        stamp => format!(" stamp {stamp:#x}"),
    };
    format!(
        "{} > {} vni {vni:#x} hop {}{stamp} {} > {}: {}",
        a(26),
        a(30),
        f[49],
        macs[1],
        macs[0],
        inner.text
    )
}

/// Returns the outer UDP source port.
pub fn port_of(f: &[u8]) -> u16 {
    u16::from_be_bytes([f[34], f[35]])
}
