//! The attacker: sends packets that no honest host would send, and prints them. It reads its
//! command and opens raw sockets. The test checks whether a packet arrived.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Error, Result};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::packet::{self, InnerProtocol, VXLAN_PORT};

/// `IPPROTO_RAW`: the sender writes the IP header too (raw(7)).
const HEADER_IS_MINE: i32 = 255;
/// Maximum number of packets in one run. It only refuses a mistyped number; a million packets take
/// some seconds.
const COUNT_MAX: u32 = 1_000_000;

pub(crate) const USAGE: &str = "spoof from=ADDRESS:PORT to=ADDRESS:PORT [kind=syn|ack|synack|rst|udp|icmp] [count=N] [payload=TEXT] \
    [vni=N via=ADDRESS [outer=ADDRESS] [port=N] [hop=N] [mac=MAC] [torn=true]]";

/// One command to send packets.
struct SpoofCommand {
    from: SocketAddr,
    to: SocketAddr,
    name: String,
    kind: InnerProtocol,
    payload: Vec<u8>,
    count: u32,
    tunnel: Option<VxlanHeader>,
}

/// The VXLAN encapsulation of a packet.
struct VxlanHeader {
    vni: u32,
    hop: u8,
    mac: [u8; 6],
    /// Underlay address of the far tunnel end.
    via: Ipv4Addr,
    /// Underlay source address; `None` uses the host's own.
    outer: Option<Ipv4Addr>,
    port: u16,
    torn: bool,
}

impl fmt::Display for SpoofCommand {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{} {} {} > {}",
            self.count, self.name, self.from, self.to
        )?;
        let Some(tunnel) = &self.tunnel else {
            return Ok(());
        };
        let outer = tunnel
            .outer
            .map_or_else(|| "the own address".to_owned(), |outer| outer.to_string());
        write!(
            out,
            " in vni {} hop {} from {outer} by {}",
            tunnel.vni, tunnel.hop, tunnel.via
        )?;
        if tunnel.torn {
            write!(out, " torn")
        } else {
            Ok(())
        }
    }
}

/// Sends the packets, then prints `sent …`. It fails if the command is not readable, or if this
/// host's own kernel refuses to send a packet.
pub(crate) fn spoof(words: &[&str]) -> Result<()> {
    let order = read(words)?;
    for _ in 0..order.count {
        send(&order)?;
    }
    println!("sent {order}");
    Ok(())
}

fn bad(what: impl fmt::Display) -> Error {
    Error::other(format!("{what}; usage: {USAGE}"))
}

fn read(words: &[&str]) -> Result<SpoofCommand> {
    let mut fields = BTreeMap::new();
    for word in words {
        let (name, value) = word
            .split_once('=')
            .ok_or_else(|| bad(format!("{word:?} is not NAME=VALUE")))?;
        fields.insert(name, value);
    }
    // What is not taken by the end is an unknown word.
    let mut take = |name: &str| fields.remove(name);
    let from: SocketAddr = parsed("from", take("from"))?.ok_or_else(|| bad("no from"))?;
    let to: SocketAddr = parsed("to", take("to"))?.ok_or_else(|| bad("no to"))?;
    if from.is_ipv4() != to.is_ipv4() {
        return Err(bad("from and to are of two families"));
    }
    // Only addresses have no default.
    let name = take("kind").unwrap_or("syn").to_owned();
    let kind = InnerProtocol::named(&name).ok_or_else(|| bad(format!("kind={name}")))?;
    let payload = take("payload").unwrap_or_default().as_bytes().to_vec();
    let count = parsed("count", take("count"))?.unwrap_or(1);
    if count > COUNT_MAX {
        return Err(bad(format!("count={count} is more than {COUNT_MAX}")));
    }
    let vni: Option<u32> = parsed("vni", take("vni"))?;
    let tunnel = match vni {
        Some(vni) if vni >> 24 == 0 => Some(VxlanHeader {
            vni,
            hop: parsed("hop", take("hop"))?.unwrap_or(0),
            // By default the inner frame has the edges' MAC address, as that of a node has.
            mac: take("mac").map_or(Ok([0x02, 0xca, 0x0a, 0x01, 0, 0x02]), mac)?,
            via: parsed("via", take("via"))?.ok_or_else(|| bad("no via"))?,
            outer: parsed("outer", take("outer"))?,
            port: parsed("port", take("port"))?.unwrap_or(0),
            torn: parsed("torn", take("torn"))?.unwrap_or(false),
        }),
        Some(vni) => return Err(bad(format!("vni={vni} has more than 24 bits"))),
        None => None,
    };
    // Only a raw socket can send fragments, and it needs the outer source address.
    if tunnel
        .as_ref()
        .is_some_and(|tunnel| tunnel.torn && tunnel.outer.is_none())
    {
        return Err(bad("torn needs outer"));
    }
    match fields.keys().next() {
        Some(unknown) => Err(bad(format!("{unknown:?} is unknown here"))),
        None => Ok(SpoofCommand {
            from,
            to,
            name,
            kind,
            payload,
            count,
            tunnel,
        }),
    }
}

fn parsed<T: std::str::FromStr>(name: &str, value: Option<&str>) -> Result<Option<T>> {
    value
        .map(|value| value.parse().map_err(|_| bad(format!("{name}={value}"))))
        .transpose()
}

fn mac(text: &str) -> Result<[u8; 6]> {
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|part| u8::from_str_radix(part, 16).ok())
        .collect();
    bytes
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or_else(|| bad(format!("mac={text}")))
}

fn send(order: &SpoofCommand) -> Result<()> {
    let inner = packet::ip(order.from, order.to, order.kind, &order.payload);
    let Some(tunnel) = &order.tunnel else {
        return send_raw(&inner, order.to.ip());
    };
    let frame = packet::vxlan(tunnel.vni, tunnel.hop, tunnel.mac, &inner);
    let Some(outer) = tunnel.outer else {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, tunnel.port))?;
        return socket.send_to(&frame, (tunnel.via, VXLAN_PORT)).map(drop);
    };
    let ends = [(outer, tunnel.port), (tunnel.via, VXLAN_PORT)]
        .map(|(ip, port)| SocketAddr::from((ip, port)));
    let datagram = packet::ip(ends[0], ends[1], InnerProtocol::Udp, &frame);
    if !tunnel.torn {
        return send_raw(&datagram, tunnel.via.into());
    }
    packet::torn(outer, tunnel.via, &datagram)
        .iter()
        .try_for_each(|fragment| send_raw(fragment, tunnel.via.into()))
}

/// Sends an IP packet unchanged along the host's routes.
fn send_raw(packet: &[u8], to: IpAddr) -> Result<()> {
    let (domain, to): (Domain, SockAddr) = match to {
        IpAddr::V4(to) => (Domain::IPV4, SocketAddrV4::new(to, 0).into()),
        IpAddr::V6(to) => (Domain::IPV6, SocketAddrV6::new(to, 0, 0, 0).into()),
    };
    let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(HEADER_IS_MINE)))?;
    socket.send_to(packet, &to).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_round_trip_or_are_refused() {
        // A good command is shown as it will be sent, a bad one by its reason.
        let base = "from=10.1.1.2:1 to=10.1.200.1:80";
        for (order, expected) in [
            (base.to_owned(), "1 syn 10.1.1.2:1 > 10.1.200.1:80"),
            (
                format!("{base} kind=udp count=3 payload=x"),
                "3 udp 10.1.1.2:1 > 10.1.200.1:80",
            ),
            (
                "from=[fd00::1]:1 to=[fd00::2]:2 kind=icmp".into(),
                "1 icmp [fd00::1]:1 > [fd00::2]:2",
            ),
            (
                format!("{base} vni=101 via=250.1.0.2"),
                "in vni 101 hop 0 from the own address by 250.1.0.2",
            ),
            (
                format!("{base} vni=1 via=250.1.0.2 outer=10.201.0.9 hop=3 torn=true"),
                "in vni 1 hop 3 from 10.201.0.9 by 250.1.0.2 torn",
            ),
            ("from=10.1.1.2:1".into(), "no to"),
            ("to=10.1.1.2:1".into(), "no from"),
            ("from=10.1.1.2:1 to=[fd00::2]:2".into(), "of two families"),
            (format!("{base} kind=fin"), "kind=fin"),
            (
                format!("{base} count=1000001"),
                "count=1000001 is more than 1000000",
            ),
            (
                format!("{base} vni=16777216 via=250.1.0.2"),
                "vni=16777216 has more than 24 bits",
            ),
            (format!("{base} vni=1"), "no via"),
            (
                format!("{base} vni=1 via=250.1.0.2 torn=true"),
                "torn needs outer",
            ),
            (format!("{base} vni=1 via=250.1.0.2 mac=02:00"), "mac=02:00"),
            (format!("{base} hop=1"), "\"hop\" is unknown here"),
            (format!("{base} loud"), "\"loud\" is not NAME=VALUE"),
        ] {
            let words: Vec<&str> = order.split(' ').collect();
            let reply =
                read(&words).map_or_else(|error| error.to_string(), |order| order.to_string());
            assert!(reply.contains(expected), "{order}: {reply}");
        }
    }
}
