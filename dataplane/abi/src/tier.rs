//! `bpf/abi/tier.h`: keys and values of the cloud tier's maps, settings, limits, and the names of the counters.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

#[allow(non_camel_case_types, non_upper_case_globals, missing_docs, unreachable_pub, clippy::all, reason = "generated from the header")]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/tier.rs"));
}

pub use generated::{
    canal_address as Address, canal_address_key as AddressKey, canal_bucket as TokenBucket, canal_edge_count as EdgeCount,
    canal_edge_settings as EdgeSettings, canal_node_key as NodeKey, canal_prefix as Prefix, canal_prefix_key as PrefixKey,
    canal_redirector_count as RedirectorCount, canal_redirector_settings as RedirectorSettings, canal_replica as Replica,
    canal_replica_state as ReplicaState, canal_return as Return, canal_session as Session, canal_session_key as SessionKey,
    canal_table as Table, canal_throttle as Throttle, canal_throttle_key as ThrottleKey,
};

/// Raised with any change of layout; part of the pin path.
pub const ABI: u32 = generated::CANAL_TIER_ABI;
/// VXLAN's UDP port.
pub const VXLAN_PORT: u16 = generated::CANAL_VXLAN_PORT as u16;
/// VNI between edges and replicas.
pub const TIER_VNI: u32 = generated::CANAL_TIER_VNI;
/// Where services are inside the tier.
pub const SERVICE_NET4: u32 = generated::CANAL_SERVICE_NET4;
/// From where the tier's hosts dial endpoints.
pub const TIER_NET4: u32 = generated::CANAL_TIER_NET4;
/// High 64 bits of the services' IPv6 addresses.
pub const SERVICE_NET6: u64 = generated::CANAL_SERVICE_NET6.cast_unsigned();
/// High 64 bits of the IPv6 addresses of the tier's hosts.
pub const TIER_NET6: u64 = generated::CANAL_TIER_NET6.cast_unsigned();
/// HBONE's port of a service address.
pub const HBONE_PORT: u16 = generated::CANAL_HBONE_PORT as u16;
/// DNS's port of a service address.
pub const DNS_PORT: u16 = generated::CANAL_DNS_PORT as u16;
/// Buckets of a service.
pub const BUCKETS: usize = generated::CANAL_BUCKETS as usize;
/// Replicas in a bucket's chain.
pub const CHAIN: usize = generated::CANAL_CHAIN as usize;
/// Services with a bucket table.
pub const SERVICES_MAX: u32 = generated::CANAL_SERVICES_MAX;
/// Highest replica number, plus one.
pub const REPLICAS_MAX: u32 = generated::CANAL_REPLICAS_MAX;
/// Gateway addresses of an AZ.
pub const ADDRESSES_MAX: u32 = generated::CANAL_ADDRESSES_MAX;
/// Pod prefixes, and nodes, of an AZ.
pub const PREFIXES_MAX: u32 = generated::CANAL_PREFIXES_MAX;
/// Services and tenants with early limits.
pub const THROTTLES_MAX: u32 = generated::CANAL_THROTTLES_MAX;
/// Scope of [`ThrottleKey`]: a service's limits.
pub const THROTTLE_SERVICE: u32 = generated::CANAL_THROTTLE_SERVICE;
/// Scope of [`ThrottleKey`]: a tenant's limits.
pub const THROTTLE_TENANT: u32 = generated::CANAL_THROTTLE_TENANT;
/// Index in `canal_doors`.
pub const DOOR_HBONE4: u32 = generated::CANAL_DOOR_HBONE4;
/// Index in `canal_doors`.
pub const DOOR_PLAIN4: u32 = generated::CANAL_DOOR_PLAIN4;
/// Index in `canal_doors`.
pub const DOOR_DNS4: u32 = generated::CANAL_DOOR_DNS4;
/// Size of `canal_doors`.
pub const DOORS: u32 = generated::CANAL_DOORS;
/// Sessions per session table.
pub const SESSIONS_MAX: u32 = generated::CANAL_SESSIONS_MAX;
/// MAC of every replica's tunnel device.
pub const REPLICA_MAC: [u8; 6] = [0x02, 0xca, 0x0a, 0x01, 0x00, 0x01];
/// MAC of every edge as its tenants' overlays see it.
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
    Throttle = canal_throttle { lock, zero, sessions, packets },
    EdgeSettings = canal_edge_settings { address_be, tunnels, aggregate, tunnel_port, mtu },
    RedirectorSettings = canal_redirector_settings { address_be, number, edge_be, mtu },
    SessionKey = canal_session_key { source, destination, source_port_be, destination_port_be, protocol, zero, vni },
    Session = canal_session { first_ns, last_ns, packets },
    Table = canal_table { vni, version, chain },
}

/// Every counter of the edge, in the order of its map.
pub const EDGE_COUNTS: [EdgeCount; EdgeCount::CANAL_EDGE_COUNTS as usize] = {
    use EdgeCount::*;
    [
        CANAL_EDGE_TO_REPLICA,
        CANAL_EDGE_TO_NODE,
        CANAL_EDGE_DIALLED,
        CANAL_EDGE_ANSWERED,
        CANAL_EDGE_ICMP_TRANSLATED,
        CANAL_EDGE_TOO_BIG,
        CANAL_EDGE_DROP_STRANGER,
        CANAL_EDGE_DROP_FORGED,
        CANAL_EDGE_DROP_ADDRESS,
        CANAL_EDGE_DROP_SERVICE,
        CANAL_EDGE_DROP_REPLICA,
        CANAL_EDGE_DROP_NODE,
        CANAL_EDGE_DROP_FRAGMENT,
        CANAL_EDGE_DROP_MALFORMED,
        CANAL_EDGE_DROP_PROTOCOL,
        CANAL_EDGE_PASSED,
    ]
};

/// Every counter of the redirector, in the order of its map.
pub const REDIRECTOR_COUNTS: [RedirectorCount; RedirectorCount::CANAL_REDIRECTOR_COUNTS as usize] = {
    use RedirectorCount::*;
    [
        CANAL_REDIRECTOR_NEW,
        CANAL_REDIRECTOR_OWNED,
        CANAL_REDIRECTOR_COOKIE,
        CANAL_REDIRECTOR_FORWARDED_NEW,
        CANAL_REDIRECTOR_FORWARDED,
        CANAL_REDIRECTOR_UNOWNED,
        CANAL_REDIRECTOR_NOT_LISTENING,
        CANAL_REDIRECTOR_DATAGRAM,
        CANAL_REDIRECTOR_ICMP,
        CANAL_REDIRECTOR_ANSWER,
        CANAL_REDIRECTOR_DROP_STRANGER,
        CANAL_REDIRECTOR_DROP_CROSSED,
        CANAL_REDIRECTOR_DROP_SERVICE,
        CANAL_REDIRECTOR_DROP_FRAGMENT,
        CANAL_REDIRECTOR_DROP_MALFORMED,
        CANAL_REDIRECTOR_DROP_PROTOCOL,
        CANAL_REDIRECTOR_THROTTLED_SERVICE_SESSIONS,
        CANAL_REDIRECTOR_THROTTLED_SERVICE_PACKETS,
        CANAL_REDIRECTOR_THROTTLED_TENANT_SESSIONS,
        CANAL_REDIRECTOR_THROTTLED_TENANT_PACKETS,
        CANAL_REDIRECTOR_PASSED,
    ]
};

/// The counter's name as metrics show it: the header's, without prefix, in lower case.
pub fn edge_count_name(c: EdgeCount) -> &'static str {
    name(EDGE_NAMES, c as usize)
}

/// The counter's name as metrics show it: the header's, without prefix, in lower case.
pub fn redirector_count_name(c: RedirectorCount) -> &'static str {
    name(REDIRECTOR_NAMES, c as usize)
}

fn name(names: &[&'static str], at: usize) -> &'static str {
    names.get(at).copied().unwrap_or("counts")
}

const EDGE_NAMES: &[&str] = &[
    "to_replica",
    "to_node",
    "dialled",
    "answered",
    "icmp_translated",
    "too_big",
    "drop_stranger",
    "drop_forged",
    "drop_address",
    "drop_service",
    "drop_replica",
    "drop_node",
    "drop_fragment",
    "drop_malformed",
    "drop_protocol",
    "passed",
];

const REDIRECTOR_NAMES: &[&str] = &[
    "new",
    "owned",
    "cookie",
    "forwarded_new",
    "forwarded",
    "unowned",
    "not_listening",
    "datagram",
    "icmp",
    "answer",
    "drop_stranger",
    "drop_crossed",
    "drop_service",
    "drop_fragment",
    "drop_malformed",
    "drop_protocol",
    "throttled_service_sessions",
    "throttled_service_packets",
    "throttled_tenant_sessions",
    "throttled_tenant_packets",
    "passed",
];

/// An IPv4 address as the `_be` fields hold it.
pub fn address_be(address: Ipv4Addr) -> u32 {
    address.to_bits().to_be()
}

/// The address that a `_be` field holds.
pub fn address_of_be(address_be: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::from_be(address_be))
}

impl AddressKey {
    /// A gateway address of the tenant with this VNI.
    pub fn new(vni: u32, address: IpAddr) -> Self {
        Self { vni, address: crate::capture::address_bytes(address) }
    }
}

impl NodeKey {
    /// A node of the tenant with this VNI, by its underlay address.
    pub fn new(vni: u32, address: Ipv4Addr) -> Self {
        Self { vni, address_be: address_be(address) }
    }
}

impl PrefixKey {
    /// A range of pod addresses; `length` as it is written behind the slash. Host bits are cleared, a length that the family does not
    /// have is cut to its longest.
    pub fn new(vni: u32, address: IpAddr, length: u8) -> Self {
        let bits = match address {
            IpAddr::V4(_) => 96 + u32::from(length.min(32)),
            IpAddr::V6(_) => u32::from(length.min(128)),
        };
        let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
        let whole = u128::from_be_bytes(crate::capture::address_bytes(address)) & mask;
        Self { prefixlen: 32 + bits, vni_be: vni.to_be(), address: whole.to_be_bytes() }
    }
}

impl Return {
    /// What the way back restores; `None`: the service has no address of that family.
    pub fn new(vni: u32, v4: Option<Ipv4Addr>, v6: Option<Ipv6Addr>) -> Self {
        let bytes = |a: Option<IpAddr>| a.map(crate::capture::address_bytes).unwrap_or_default();
        Self { vni, address4: bytes(v4.map(Into::into)), address6: bytes(v6.map(Into::into)) }
    }
}

impl Prefix {
    /// The node that has these pods: its underlay address, and the MAC of its tunnel device.
    pub fn new(node: Ipv4Addr, mac: [u8; 6]) -> Self {
        Self { node_be: address_be(node), mac, zero: [0; 2] }
    }
}

impl Replica {
    /// A replica's underlay address, and whether it takes packets.
    pub fn new(address: Ipv4Addr, is_up: bool) -> Self {
        let state = if is_up { ReplicaState::CANAL_REPLICA_UP } else { ReplicaState::CANAL_REPLICA_DOWN };
        Self { address_be: address_be(address), state: state as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_complete_in_the_order_of_the_map_and_named_as_in_the_header() {
        for (i, c) in EDGE_COUNTS.into_iter().enumerate() {
            assert_eq!(c as usize, i, "{c:?}");
            assert_eq!(edge_count_name(c), format!("{c:?}").trim_start_matches("CANAL_EDGE_").to_ascii_lowercase());
        }
        for (i, c) in REDIRECTOR_COUNTS.into_iter().enumerate() {
            assert_eq!(c as usize, i, "{c:?}");
            assert_eq!(redirector_count_name(c), format!("{c:?}").trim_start_matches("CANAL_REDIRECTOR_").to_ascii_lowercase());
        }
        assert_eq!((EDGE_NAMES.len(), REDIRECTOR_NAMES.len()), (EDGE_COUNTS.len(), REDIRECTOR_COUNTS.len()));
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
            assert_eq!((k.prefixlen, Ipv6Addr::from(k.address)), (prefixlen, first.parse().unwrap()), "{text}/{length}");
            assert_eq!(crate::to_bytes(&k)[4..8], [0, 1, 2, 3], "the trie compares bytes");
        }
    }

    #[test]
    fn an_address_that_a_service_does_not_have_is_zero() {
        let r = Return::new(7, None, Some("fd00::7".parse().unwrap()));
        assert_eq!((r.address4, Ipv6Addr::from(r.address6)), ([0; 16], "fd00::7".parse().unwrap()));
        let r = Return::new(7, Some(Ipv4Addr::new(10, 0, 0, 7)), None);
        assert_eq!((Ipv6Addr::from(r.address4), r.address6), ("::ffff:10.0.0.7".parse().unwrap(), [0; 16]));
        assert_eq!(address_of_be(address_be(Ipv4Addr::new(250, 1, 0, 3))), Ipv4Addr::new(250, 1, 0, 3));
    }
}
