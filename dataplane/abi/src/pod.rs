//! Rust view of `bpf/abi/pod.h`: modes, limits and verdict names of the pod guard. Loads no BPF
//! program.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

#[allow(
    non_camel_case_types,
    non_upper_case_globals,
    missing_docs,
    unreachable_pub,
    clippy::all,
    reason = "generated from the header"
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/pod.rs"));
}

pub use generated::{
    canal_pod_packet as StoppedPacket, canal_pod_range as Range, canal_pod_verdict as Verdict,
};

/// Version of the ABI: raised with every change of layout or meaning, and part of the pins' names.
pub const ABI: u32 = generated::CANAL_POD_ABI;
/// Mode in which packets that the mesh does not carry are dropped (`outboundTrafficPolicy: Deny`).
pub const STOP: u32 = generated::CANAL_POD_STOP;
/// Mode in which packets that the mesh does not carry are only counted (`outboundTrafficPolicy:
/// Passthrough`).
pub const WATCH: u32 = generated::CANAL_POD_WATCH;
/// Capacity of the map `canal_pod_resolvers`.
pub const RESOLVERS_MAX: usize = generated::CANAL_POD_RESOLVERS_MAX as usize;
/// Port to which a pod may send DNS queries.
pub const DNS_PORT: u16 = generated::CANAL_POD_DNS_PORT as u16;

/// Capacity of the map `canal_pod_udp_ports`: UDP ports of one pod.
pub const UDP_PORTS_MAX: usize = generated::CANAL_POD_UDP_PORTS_MAX as usize;
/// Capacity of the map `canal_pod_tier`: address ranges of the tier.
pub const TIER_RANGES_MAX: usize = generated::CANAL_POD_TIER_MAX as usize;

/// The longest outgoing ARP packet that passes, in bytes after the Ethernet header.
pub const ARP_BYTES_MAX: u32 = generated::CANAL_POD_ARP_MAX;
/// The longest outgoing neighbor discovery packet that passes, in bytes after the Ethernet header.
pub const NEIGHBOUR_BYTES_MAX: u32 = generated::CANAL_POD_NEIGHBOUR_MAX;
/// The longest outgoing multicast listener report that passes, in bytes after the Ethernet header.
pub const LISTENER_BYTES_MAX: u32 = generated::CANAL_POD_LISTENER_MAX;

crate::plain::plain_types! {
    StoppedPacket = canal_pod_packet { remote_ip, remote_port_be, protocol, is_outgoing, verdict },
    Range = canal_pod_range { prefixlen, ip },
}

/// Every verdict, in the order of the counter map.
pub const VERDICTS: [Verdict; Verdict::CANAL_POD_VERDICTS as usize] = [
    Verdict::CANAL_POD_PASSED_LOOPBACK,
    Verdict::CANAL_POD_PASSED_TCP,
    Verdict::CANAL_POD_PASSED_RESET,
    Verdict::CANAL_POD_PASSED_RESOLVER,
    Verdict::CANAL_POD_PASSED_NEIGHBOUR,
    Verdict::CANAL_POD_PASSED_ERROR,
    Verdict::CANAL_POD_PASSED_UDP_ROUTE,
    Verdict::CANAL_POD_LEFT_WATCHED,
    Verdict::CANAL_POD_STOPPED_UDP,
    Verdict::CANAL_POD_STOPPED_ICMP,
    Verdict::CANAL_POD_STOPPED_SCTP,
    Verdict::CANAL_POD_STOPPED_TCP,
    Verdict::CANAL_POD_STOPPED_PROTOCOL,
    Verdict::CANAL_POD_STOPPED_FRAME,
    Verdict::CANAL_POD_STOPPED_PACKET_SOCKET,
    Verdict::CANAL_POD_STOPPED_MALFORMED,
    Verdict::CANAL_POD_CLEAR_UDP,
    Verdict::CANAL_POD_CLEAR_ICMP,
    Verdict::CANAL_POD_CLEAR_SCTP,
    Verdict::CANAL_POD_CLEAR_TCP,
    Verdict::CANAL_POD_CLEAR_PROTOCOL,
    Verdict::CANAL_POD_CLEAR_FRAME,
    Verdict::CANAL_POD_CLEAR_PACKET_SOCKET,
    Verdict::CANAL_POD_CLEAR_MALFORMED,
];

/// Returns the verdict's name as metrics show it: the header's name without prefix, in lower case.
pub fn verdict_name(v: Verdict) -> String {
    format!("{v:?}")
        .trim_start_matches("CANAL_POD_")
        .to_ascii_lowercase()
}

/// Returns true if packets with this verdict were dropped.
pub fn is_stopped(v: Verdict) -> bool {
    (Verdict::CANAL_POD_STOPPED_UDP as u32..=Verdict::CANAL_POD_STOPPED_MALFORMED as u32)
        .contains(&(v as u32))
}

impl Range {
    /// Returns the range of addresses that share the first `prefix` bits of `ip`. The bits are
    /// counted within the address's own family.
    pub fn new(ip: IpAddr, prefix: u8) -> Self {
        match ip {
            IpAddr::V4(v4) => Self {
                prefixlen: 96 + u32::from(prefix),
                ip: v4.to_ipv6_mapped().octets(),
            },
            IpAddr::V6(v6) => Self {
                prefixlen: u32::from(prefix),
                ip: v6.octets(),
            },
        }
    }
}

impl StoppedPacket {
    /// Returns the packet's remote end: its destination if it was outgoing, else its source. Port 0
    /// means that the protocol has no ports. A frame without IP has the address `::`.
    pub fn remote(&self) -> SocketAddr {
        SocketAddr::new(
            Ipv6Addr::from(self.remote_ip).to_canonical(),
            u16::from_be(self.remote_port_be),
        )
    }

    /// Returns the reason why the packet was dropped; `None` if no packet was dropped.
    pub fn reason(&self) -> Option<Verdict> {
        VERDICTS
            .into_iter()
            .find(|v| *v as u32 == self.verdict)
            .filter(|v| is_stopped(*v))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_complete_and_in_the_order_of_the_map() {
        for (i, v) in VERDICTS.into_iter().enumerate() {
            assert_eq!(v as usize, i, "{v:?}");
            assert_eq!(
                is_stopped(v),
                verdict_name(v).starts_with("stopped_"),
                "{v:?}"
            );
        }
        for v in VERDICTS.into_iter().filter(|v| is_stopped(*v)) {
            let clear = VERDICTS[v as usize + 8];
            assert_eq!(
                verdict_name(clear),
                verdict_name(v).replace("stopped", "clear"),
                "one order"
            );
        }
    }

    #[test]
    fn ranges_of_both_families_are_of_128_bits() {
        let (v4, v6) = (
            Range::new([10, 1, 0, 0].into(), 16),
            Range::new("fd00:1::".parse().unwrap(), 64),
        );
        assert_eq!(
            (v4.prefixlen, v4.ip),
            (112, "::ffff:10.1.0.0".parse::<Ipv6Addr>().unwrap().octets())
        );
        assert_eq!(
            (v6.prefixlen, v6.ip),
            (64, "fd00:1::".parse::<Ipv6Addr>().unwrap().octets())
        );
    }

    #[test]
    fn a_stopped_packet_names_its_remote_end_and_its_reason() {
        let none = StoppedPacket::default();
        assert_eq!(
            (none.reason(), none.remote().to_string().as_str()),
            (None, "[::]:0")
        );
        let mut udp = StoppedPacket {
            verdict: Verdict::CANAL_POD_STOPPED_UDP as u32,
            remote_port_be: 99u16.to_be(),
            ..none
        };
        udp.remote_ip = "::ffff:10.0.0.9".parse::<Ipv6Addr>().unwrap().octets();
        assert_eq!(
            (udp.reason(), udp.remote().to_string().as_str()),
            (Some(Verdict::CANAL_POD_STOPPED_UDP), "10.0.0.9:99")
        );
    }
}
