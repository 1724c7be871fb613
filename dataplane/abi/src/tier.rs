//! Rust view of `bpf/abi/tier.h`: keys and values of the cloud tier's maps, settings, limits, and
//! the names of the counters. Loads no BPF program. Start with [`Table`], [`Replica`] and
//! [`Session`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

#[allow(
    non_camel_case_types,
    non_upper_case_globals,
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    reason = "generated from the header"
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/tier.rs"));
}

pub use generated::{
    canal_address as Address, canal_address_key as AddressKey, canal_bucket as TokenBucket,
    canal_edge_count as EdgeCount, canal_edge_settings as EdgeSettings, canal_node_key as NodeKey,
    canal_prefix as Prefix, canal_prefix_key as PrefixKey,
    canal_redirector_count as RedirectorCount, canal_redirector_settings as RedirectorSettings,
    canal_replica as Replica, canal_replica_state as ReplicaState, canal_return as Return,
    canal_session as Session, canal_session_key as SessionKey,
    canal_sessions_count as SessionsCount, canal_steering_count as DoorsCount,
    canal_table as Table, canal_throttle as Throttle, canal_throttle_key as ThrottleKey,
    canal_tunnel_count as TunnelCount, canal_tunnels as Tunnels,
};

/// Version of the ABI: raised with every change of layout, and part of the pin path.
pub const ABI: u32 = generated::CANAL_TIER_ABI;
/// UDP port of VXLAN (RFC 7348).
pub const VXLAN_PORT: u16 = generated::CANAL_VXLAN_PORT as u16;
/// VNI of the tunnels between edges and replicas. No tenant may have it.
pub const TIER_VNI: u32 = generated::CANAL_TIER_VNI;
/// Network of the services inside the tier, `240.0.0.0/8` in host order. A service's address is
/// this plus its ID.
pub const SERVICE_NET4: u32 = generated::CANAL_SERVICE_NET4;
/// Network of the tier's hosts, `250.0.0.0/8` in host order. Replicas dial endpoints from these
/// addresses.
pub const TIER_NET4: u32 = generated::CANAL_TIER_NET4;
/// High 64 bits of the services' IPv6 addresses.
pub const SERVICE_NET6: u64 = generated::CANAL_SERVICE_NET6.cast_unsigned();
/// High 64 bits of the IPv6 addresses of the tier's hosts.
pub const TIER_NET6: u64 = generated::CANAL_TIER_NET6.cast_unsigned();
/// HBONE port of every service address.
pub const HBONE_PORT: u16 = generated::CANAL_HBONE_PORT as u16;
/// DNS port of every service address.
pub const DNS_PORT: u16 = generated::CANAL_DNS_PORT as u16;
/// Number of buckets in a service's bucket table (Canal appendix C, fig. 26).
pub const BUCKETS: usize = generated::CANAL_BUCKETS as usize;
/// Number of replicas in a bucket's chain at most.
pub const CHAIN: usize = generated::CANAL_CHAIN as usize;
/// Services that have a bucket table.
pub const SERVICES_MAX: u32 = generated::CANAL_SERVICES_MAX;
/// Size of the replica array: replica numbers are below this.
pub const REPLICAS_MAX: u32 = generated::CANAL_REPLICAS_MAX;
/// Gateway addresses of an AZ.
pub const ADDRESSES_MAX: u32 = generated::CANAL_ADDRESSES_MAX;
/// Pod prefixes, and nodes, of an AZ.
pub const PREFIXES_MAX: u32 = generated::CANAL_PREFIXES_MAX;
/// Services and tenants that have early limits.
pub const THROTTLES_MAX: u32 = generated::CANAL_THROTTLES_MAX;
/// Source ports from an edge to one replica.
pub const TUNNELS_MAX: usize = generated::CANAL_TUNNELS_MAX as usize;
/// Scope of a [`ThrottleKey`] whose `id` is a service ID.
pub const THROTTLE_SERVICE: u32 = generated::CANAL_THROTTLE_SERVICE;
/// Bits of a stamp that carry the version of the bucket table.
pub const STAMP_VERSION: u32 = generated::CANAL_STAMP_VERSION;
/// Bit of a stamp: bucket tables of two versions took part in forwarding the packet.
pub const STAMP_MIXED: u32 = generated::CANAL_STAMP_MIXED_VERSIONS;
/// Bit of a stamp: a member of the chain was skipped because it was not up.
pub const STAMP_SKIPPED: u32 = generated::CANAL_STAMP_SKIPPED;
/// Bit of a stamp: the packet follows the chain a second and last time.
pub const STAMP_LAST: u32 = generated::CANAL_STAMP_LAST;
/// Scope of a [`ThrottleKey`] whose `id` is a tenant's VNI.
pub const THROTTLE_TENANT: u32 = generated::CANAL_THROTTLE_TENANT;
/// Index of the HBONE listener in the map `canal_service_listeners`.
pub const LISTENER_HBONE4: u32 = generated::CANAL_LISTENER_HBONE4;
/// Index of the listener for all other TCP ports in the map `canal_service_listeners`.
pub const LISTENER_PLAIN4: u32 = generated::CANAL_LISTENER_PLAIN4;
/// Index of the DNS listener in the map `canal_service_listeners`.
pub const LISTENER_DNS4: u32 = generated::CANAL_LISTENER_DNS4;
/// Capacity of the map `canal_service_listeners`.
pub const LISTENERS_MAX: u32 = generated::CANAL_LISTENERS;
/// Capacity of each session table, in sessions.
pub const SESSIONS_MAX: u32 = generated::CANAL_SESSIONS_MAX;
/// MAC address of every replica's tunnel device.
pub const REPLICA_MAC: [u8; 6] = [0x02, 0xca, 0x0a, 0x01, 0x00, 0x01];
/// MAC address of every edge, as its tenants' overlays see it.
pub const EDGE_MAC: [u8; 6] = [0x02, 0xca, 0x0a, 0x01, 0x00, 0x02];

crate::plain::plain_types! {
    Replica = canal_replica { address_be, state },
    AddressKey = canal_address_key { vni, address },
    Address = canal_address { service },
    Return = canal_return { vni, address4, address6 },
    PrefixKey = canal_prefix_key { prefixlen, vni_be, address },
    Prefix = canal_prefix { node_be, mac, zero },
    NodeKey = canal_node_key { vni, address_be },
    ThrottleKey = canal_throttle_key { scope, id },
    TokenBucket = canal_bucket { rate, burst, tokens, at_ns, refused },
    Throttle = canal_throttle { lock, part, sessions, packets },
    EdgeSettings = canal_edge_settings { address_be, tunnels, aggregate, tunnel_port, mtu },
    RedirectorSettings = canal_redirector_settings { address_be, number, edge_be, mtu },
    SessionKey = canal_session_key { source, destination, source_port_be, destination_port_be, protocol, zero, vni },
    Session = canal_session { first_ns, last_ns, packets },
    Table = canal_table { vni, version, chain },
    Tunnels = canal_tunnels { count, ports },
}

/// Defines, for one enum of counters, the list in the order of its map and the function that gives
/// each counter's name in metrics. The names are the header's, without prefix and in lower case.
macro_rules! counts {
    ($(#[$doc:meta])* $list:ident, $name:ident: $count:ident[$len:ident] { $($variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        pub const $list: [$count; $count::$len as usize] = [$($count::$variant),+];

        /// Returns the counter's name as metrics show it.
        pub fn $name(c: $count) -> &'static str {
            match c {
                $($count::$variant => $text,)+
                $count::$len => "counts",
            }
        }
    };
}

counts! {
    /// Every counter of the edge, in the order of its map.
    EDGE_COUNTS, edge_count_name: EdgeCount[CANAL_EDGE_COUNTS] {
        CANAL_EDGE_TO_REPLICA = "to_replica",
        CANAL_EDGE_TO_DOWN = "to_down",
        CANAL_EDGE_TO_NODE = "to_node",
        CANAL_EDGE_DIALLED = "dialled",
        CANAL_EDGE_ANSWERED = "answered",
        CANAL_EDGE_ICMP_TRANSLATED = "icmp_translated",
        CANAL_EDGE_TOO_BIG = "too_big",
        CANAL_EDGE_DROP_UNKNOWN_SOURCE = "drop_unknown_source",
        CANAL_EDGE_DROP_FORGED = "drop_forged",
        CANAL_EDGE_DROP_ADDRESS = "drop_address",
        CANAL_EDGE_DROP_SERVICE = "drop_service",
        CANAL_EDGE_DROP_REPLICA = "drop_replica",
        CANAL_EDGE_DROP_NODE = "drop_node",
        CANAL_EDGE_DROP_FRAGMENT = "drop_fragment",
        CANAL_EDGE_DROP_MALFORMED = "drop_malformed",
        CANAL_EDGE_DROP_PROTOCOL = "drop_protocol",
        CANAL_EDGE_PASSED = "passed",
    }
}

counts! {
    /// Every counter of the redirector, in the order of its map.
    REDIRECTOR_COUNTS, redirector_count_name: RedirectorCount[CANAL_REDIRECTOR_COUNTS] {
        CANAL_REDIRECTOR_NEW = "new",
        CANAL_REDIRECTOR_OWNED = "owned",
        CANAL_REDIRECTOR_COOKIE = "cookie",
        CANAL_REDIRECTOR_FORWARDED_NEW = "forwarded_new",
        CANAL_REDIRECTOR_FORWARDED = "forwarded",
        CANAL_REDIRECTOR_UNOWNED = "unowned",
        CANAL_REDIRECTOR_OWNERSHIP_UNSETTLED = "ownership_unsettled",
        CANAL_REDIRECTOR_NOT_LISTENING = "not_listening",
        CANAL_REDIRECTOR_DATAGRAM = "datagram",
        CANAL_REDIRECTOR_ICMP = "icmp",
        CANAL_REDIRECTOR_ANSWER = "answer",
        CANAL_REDIRECTOR_TOO_BIG = "too_big",
        CANAL_REDIRECTOR_DROP_UNKNOWN_SOURCE = "drop_unknown_source",
        CANAL_REDIRECTOR_DROP_CROSSED = "drop_crossed",
        CANAL_REDIRECTOR_DROP_SERVICE = "drop_service",
        CANAL_REDIRECTOR_DROP_FRAGMENT = "drop_fragment",
        CANAL_REDIRECTOR_DROP_MALFORMED = "drop_malformed",
        CANAL_REDIRECTOR_DROP_PROTOCOL = "drop_protocol",
        CANAL_REDIRECTOR_THROTTLED_SERVICE_SESSIONS = "throttled_service_sessions",
        CANAL_REDIRECTOR_THROTTLED_SERVICE_PACKETS = "throttled_service_packets",
        CANAL_REDIRECTOR_THROTTLED_TENANT_SESSIONS = "throttled_tenant_sessions",
        CANAL_REDIRECTOR_THROTTLED_TENANT_PACKETS = "throttled_tenant_packets",
        CANAL_REDIRECTOR_PASSED = "passed",
    }
}

counts! {
    /// Every counter of a replica's tunnel device, in the order of its map.
    TUNNEL_COUNTS, tunnel_count_name: TunnelCount[CANAL_TUNNEL_COUNTS] {
        CANAL_TUNNEL_SERVICE = "service",
        CANAL_TUNNEL_DIALLED = "dialled",
        CANAL_TUNNEL_DROP_SOURCE = "drop_source",
        CANAL_TUNNEL_DROP_MARK = "drop_mark",
        CANAL_TUNNEL_DROP_PROTOCOL = "drop_protocol",
        CANAL_TUNNEL_DROP_KEY = "drop_key",
    }
}

counts! {
    /// Every counter of socket steering, in the order of its map.
    STEERING_COUNTS, steering_count_name: DoorsCount[CANAL_STEERING_COUNTS] {
        CANAL_STEERING_HBONE = "hbone",
        CANAL_STEERING_PLAIN = "plain",
        CANAL_STEERING_DNS = "dns",
        CANAL_STEERING_NO_LISTENER = "no_listener",
    }
}

counts! {
    /// Every counter of the session tables, in the order of its map.
    SESSIONS_COUNTS, sessions_count_name: SessionsCount[CANAL_SESSIONS_COUNTS] {
        CANAL_SESSIONS_OUTER = "outer",
        CANAL_SESSIONS_INNER = "inner",
        CANAL_SESSIONS_OUTER_FULL = "outer_full",
        CANAL_SESSIONS_INNER_FULL = "inner_full",
        CANAL_SESSIONS_OTHER = "other",
        CANAL_SESSIONS_PACKETS = "packets",
    }
}

/// Encodes an IPv4 address for a field whose name ends in `_be`.
pub fn address_be(address: Ipv4Addr) -> u32 {
    address.to_bits().to_be()
}

/// Decodes an IPv4 address from a field whose name ends in `_be`.
pub fn address_of_be(address_be: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::from_be(address_be))
}

impl AddressKey {
    /// Returns the key of a gateway address of the tenant with this VNI.
    pub fn new(vni: u32, address: IpAddr) -> Self {
        Self {
            vni,
            address: crate::capture::address_bytes(address),
        }
    }
}

impl NodeKey {
    /// Returns the key of a node of the tenant with this VNI. `address` is the node's underlay
    /// address.
    pub fn new(vni: u32, address: Ipv4Addr) -> Self {
        Self {
            vni,
            address_be: address_be(address),
        }
    }
}

impl PrefixKey {
    /// Returns the key of a range of pod addresses. `length` is the prefix length within the
    /// family; a longer one is cut to the family's longest. Host bits are cleared.
    pub fn new(vni: u32, address: IpAddr, length: u8) -> Self {
        let bits = match address {
            IpAddr::V4(_) => 96 + u32::from(length.min(32)),
            IpAddr::V6(_) => u32::from(length.min(128)),
        };
        let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
        let whole = u128::from_be_bytes(crate::capture::address_bytes(address)) & mask;
        Self {
            prefixlen: 32 + bits,
            vni_be: vni.to_be(),
            address: whole.to_be_bytes(),
        }
    }
}

impl Return {
    /// Builds the entry from which the edge restores the service's own addresses in packets back to
    /// the tenant. `None` means that the service has no address of that family.
    pub fn new(vni: u32, v4: Option<Ipv4Addr>, v6: Option<Ipv6Addr>) -> Self {
        let bytes = |a: Option<IpAddr>| a.map(crate::capture::address_bytes).unwrap_or_default();
        Self {
            vni,
            address4: bytes(v4.map(Into::into)),
            address6: bytes(v6.map(Into::into)),
        }
    }
}

impl Tunnels {
    /// Builds the entry from the first [`TUNNELS_MAX`] of these source ports. Returns `None` if
    /// there are no ports.
    pub fn new(ports: &[u16]) -> Option<Self> {
        let ports = &ports[..ports.len().min(TUNNELS_MAX)];
        let mut tunnels = Self {
            count: ports.len() as u32,
            ports: [0; TUNNELS_MAX],
        };
        tunnels.ports[..ports.len()].copy_from_slice(ports);
        (!ports.is_empty()).then_some(tunnels)
    }

    /// Returns the source ports that are set, without the unused rest of the array.
    pub fn used(&self) -> &[u16] {
        &self.ports[..(self.count as usize).min(TUNNELS_MAX)]
    }
}

impl Prefix {
    /// Builds the entry of a pod prefix from its node's underlay address and the MAC address of the
    /// node's tunnel device.
    pub fn new(node: Ipv4Addr, mac: [u8; 6]) -> Self {
        Self {
            node_be: address_be(node),
            mac,
            zero: [0; 2],
        }
    }
}

impl Replica {
    /// Builds the entry of a replica from its underlay address and whether it receives packets.
    pub fn new(address: Ipv4Addr, is_up: bool) -> Self {
        let state = if is_up {
            ReplicaState::CANAL_REPLICA_UP
        } else {
            ReplicaState::CANAL_REPLICA_DOWN
        };
        Self {
            address_be: address_be(address),
            state: state as u32,
        }
    }

    /// Builds the entry of a replica that went down a moment ago: it receives no new sessions, but
    /// packets of the sessions it has.
    pub fn suspect(address: Ipv4Addr) -> Self {
        Self {
            address_be: address_be(address),
            state: ReplicaState::CANAL_REPLICA_SUSPECT as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_in_the_order_of_the_map_and_named_as_in_the_header() {
        fn check<C: Copy + std::fmt::Debug>(
            counts: &[C],
            number: fn(C) -> usize,
            name: fn(C) -> &'static str,
            prefix: &str,
        ) {
            for (i, c) in counts.iter().enumerate() {
                let in_header = format!("{c:?}")
                    .trim_start_matches(prefix)
                    .to_ascii_lowercase();
                assert_eq!((number(*c), name(*c)), (i, in_header.as_str()), "{c:?}");
            }
        }
        check(&EDGE_COUNTS, |c| c as usize, edge_count_name, "CANAL_EDGE_");
        check(
            &REDIRECTOR_COUNTS,
            |c| c as usize,
            redirector_count_name,
            "CANAL_REDIRECTOR_",
        );
        check(
            &TUNNEL_COUNTS,
            |c| c as usize,
            tunnel_count_name,
            "CANAL_TUNNEL_",
        );
        check(
            &STEERING_COUNTS,
            |c| c as usize,
            steering_count_name,
            "CANAL_STEERING_",
        );
        check(
            &SESSIONS_COUNTS,
            |c| c as usize,
            sessions_count_name,
            "CANAL_SESSIONS_",
        );
    }

    #[test]
    fn prefixes_count_the_vni_and_hold_no_host_bits() {
        for (text, length, prefixlen, first) in [
            ("10.1.2.3", 24, 152, "::ffff:10.1.2.0"),
            ("10.1.2.3", 32, 160, "::ffff:10.1.2.3"),
            ("10.1.2.3", 0, 128, "::ffff:0.0.0.0"),
            ("10.1.2.3", 200, 160, "::ffff:10.1.2.3"),
            ("fd00::1:2", 112, 144, "fd00::1:0"),
            ("fd00::1:2", 128, 160, "fd00::1:2"),
            ("fd00::1:2", 0, 32, "::"),
        ] {
            let k = PrefixKey::new(0x0001_0203, text.parse().unwrap(), length);
            assert_eq!(
                (k.prefixlen, Ipv6Addr::from(k.address)),
                (prefixlen, first.parse().unwrap()),
                "{text}/{length}"
            );
            assert_eq!(
                crate::to_bytes(&k)[4..8],
                [0, 1, 2, 3],
                "the trie compares bytes"
            );
        }
    }

    #[test]
    fn an_address_that_a_service_does_not_have_is_zero() {
        let r = Return::new(7, None, Some("fd00::7".parse().unwrap()));
        assert_eq!(
            (r.address4, Ipv6Addr::from(r.address6)),
            ([0; 16], "fd00::7".parse().unwrap())
        );
        let r = Return::new(7, Some(Ipv4Addr::new(10, 0, 0, 7)), None);
        assert_eq!(
            (Ipv6Addr::from(r.address4), r.address6),
            ("::ffff:10.0.0.7".parse().unwrap(), [0; 16])
        );
        assert_eq!(
            address_of_be(address_be(Ipv4Addr::new(250, 1, 0, 3))),
            Ipv4Addr::new(250, 1, 0, 3)
        );
    }
}
