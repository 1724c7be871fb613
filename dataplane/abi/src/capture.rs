//! Rust view of `bpf/abi/capture.h`: keys and values of the capture maps, their limits, and the
//! names of the verdicts. Loads no BPF program. Start with [`CapturedPod`] and [`OriginKey`].

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
    include!(concat!(env!("OUT_DIR"), "/capture.rs"));
}

pub use generated::{
    canal_capture_verdict as Verdict, canal_captured_pod as CapturedPod,
    canal_captured_tenant as CapturedTenant, canal_connect_refusals as ConnectRefusals,
    canal_destination as Destination, canal_destination_key as DestinationKey,
    canal_origin as Origin, canal_origin_key as OriginKey, canal_origin_pod as OriginPod,
    canal_range_key as RangeKey, canal_refused_destination as RefusedDestination,
    canal_socket as CapturedSocket,
};

/// Version of the ABI: raised with every change of layout, and part of the pin path.
pub const ABI: u32 = generated::CANAL_CAPTURE_ABI;
/// Port on loopback, in the pod's network namespace, to which captured connections are redirected.
pub const OUTBOUND_PORT: u16 = generated::CANAL_OUTBOUND_PORT as u16;
/// Captured connections that the proxy has not accepted yet, per node.
pub const ORIGINS_MAX: u32 = generated::CANAL_ORIGINS_MAX;

/// Captured connections of one pod that the proxy has not accepted yet; the pod's further
/// connections are refused.
pub const ORIGINS_POD_MAX: u32 = generated::CANAL_ORIGINS_POD_MAX;

/// Pods (network namespaces) per node whose waiting connections are counted.
pub const ORIGIN_PODS_MAX: u32 = generated::CANAL_ORIGIN_PODS_MAX;

/// Tenants per node whose destinations the connect hook knows.
pub const CAPTURED_TENANTS_MAX: u32 = generated::CANAL_CAPTURED_TENANTS_MAX;
/// Address ranges that the connect hook knows, over all tenants of the node.
pub const RANGES_MAX: u32 = generated::CANAL_RANGES_MAX;
/// Single addresses that the connect hook knows, over all tenants of the node.
pub const DESTINATIONS_MAX: u32 = generated::CANAL_DESTINATIONS_MAX;
/// Ports of one [`Destination`]. The proxy decides for an address with more ports.
pub const DESTINATION_PORTS_MAX: usize = generated::CANAL_DESTINATION_PORTS_MAX as usize;

/// Ports that the proxy uses in a pod. Connections to them at a pod's address are refused.
pub const RESERVED_PORTS: [u16; 3] = [
    OUTBOUND_PORT,
    generated::CANAL_RESERVED_PLAINTEXT_PORT as u16,
    generated::CANAL_RESERVED_HBONE_PORT as u16,
];

/// Flag of [`CapturedPod`]: IPv6 addresses of the proxy other than `::1` are local in the
/// namespace.
pub const SPREADS_V6: u32 = generated::CANAL_CAPTURED_POD_SPREADS_V6;
/// Flag of [`CapturedPod`]: the pod has more addresses than fit into the entry, so the connect hook
/// leaves its destinations to the proxy.
pub const HAS_MORE: u32 = generated::CANAL_CAPTURED_POD_HAS_MORE;

/// Verdicts of the connect hook for destinations that the proxy refuses, in the order of
/// [`ConnectRefusals`].
pub const CONNECT_REFUSALS: [Verdict; generated::CANAL_CONNECT_REFUSALS as usize] = [
    Verdict::CANAL_CAPTURE_REFUSED_UNKNOWN_PORT,
    Verdict::CANAL_CAPTURE_REFUSED_OUTSIDE_MESH,
    Verdict::CANAL_CAPTURE_REFUSED_RESERVED_PORT,
    Verdict::CANAL_CAPTURE_REFUSED_GATEWAY_ADDRESS,
    Verdict::CANAL_CAPTURE_REFUSED_TENANT_CLOSED,
];

/// Prefix length of the proxy's IPv6 range, in bits.
pub const PROXY_V6_BITS: u8 = 96;

/// Returns the first address of the proxy's IPv6 range.
pub const fn proxy_v6() -> Ipv6Addr {
    let [a, b, c] = [
        generated::CANAL_PROXY_V6_0,
        generated::CANAL_PROXY_V6_1,
        generated::CANAL_PROXY_V6_2,
    ];
    Ipv6Addr::from_bits((a as u128) << 96 | (b as u128) << 64 | (c as u128) << 32)
}

// All IPv4 addresses of the proxy are loopback addresses.
const _: () = assert!(
    generated::CANAL_PROXY_V4 >> 24 == 127
        && generated::CANAL_PROXY_V4 & generated::CANAL_PROXY_V4_MASK == 0
);

/// Returns true if the address never leaves its network namespace: a loopback address, or one of
/// the proxy's, where captured connections arrive.
pub fn is_inside(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(v4) => v4.is_loopback(),
        IpAddr::V6(v6) => v6.is_loopback() || v6.to_bits() >> 32 == proxy_v6().to_bits() >> 32,
    }
}

crate::plain::plain_types! {
    OriginKey = canal_origin_key { netns_cookie, source_ip, source_port_be, zero, proxy_suffix_be },
    Origin = canal_origin { destination_ip, destination_port_be, zero, published_ns },
    OriginPod = canal_origin_pod { published, withdrawn },
    CapturedSocket = canal_socket { key, origin, local_ip },
    CapturedPod = canal_captured_pod { ip4, ip6, tenant, flags },
    CapturedTenant = canal_captured_tenant { all, outside },
    DestinationKey = canal_destination_key { tenant, ip },
    Destination = canal_destination { refused, ports, port_be },
    RangeKey = canal_range_key { prefixlen, tenant, ip },
    RefusedDestination = canal_refused_destination { ip, port_be, zero },
    ConnectRefusals = canal_connect_refusals { count, last },
}

/// Every verdict, in the order of the counter map.
pub const VERDICTS: [Verdict; Verdict::CANAL_CAPTURE_VERDICTS as usize] = [
    Verdict::CANAL_CAPTURE_LEFT_NOT_TCP,
    Verdict::CANAL_CAPTURE_LEFT_LOOPBACK,
    Verdict::CANAL_CAPTURE_LEFT_FAMILY,
    Verdict::CANAL_CAPTURE_TAKEN_V4,
    Verdict::CANAL_CAPTURE_TAKEN_V6,
    Verdict::CANAL_CAPTURE_TAKEN_MAPPED,
    Verdict::CANAL_CAPTURE_REFUSED_STORAGE,
    Verdict::CANAL_CAPTURE_REFUSED_DEVICE,
    Verdict::CANAL_CAPTURE_PUBLISHED,
    Verdict::CANAL_CAPTURE_PUBLISH_FULL,
    Verdict::CANAL_CAPTURE_WITHDRAWN,
    Verdict::CANAL_CAPTURE_PEER_RESTORED,
    Verdict::CANAL_CAPTURE_REFUSED_SHARE,
    Verdict::CANAL_CAPTURE_LOCAL_RESTORED,
    Verdict::CANAL_CAPTURE_REFUSED_UNKNOWN_PORT,
    Verdict::CANAL_CAPTURE_REFUSED_OUTSIDE_MESH,
    Verdict::CANAL_CAPTURE_REFUSED_RESERVED_PORT,
    Verdict::CANAL_CAPTURE_REFUSED_GATEWAY_ADDRESS,
    Verdict::CANAL_CAPTURE_REFUSED_TENANT_CLOSED,
];

/// Returns the verdict's name as metrics and logs show it: the header's name without prefix, in
/// lower case.
pub fn verdict_name(v: Verdict) -> String {
    format!("{v:?}")
        .trim_start_matches("CANAL_CAPTURE_")
        .to_ascii_lowercase()
}

/// Encodes an address in the header's only form: 16 bytes, network order, IPv4 as `::ffff:a.b.c.d`
/// (RFC 4291 §2.5.5.2).
pub fn address_bytes(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

impl OriginKey {
    /// Returns the key under which the connection from `source` to the proxy's address `proxy` is
    /// published.
    pub fn new(netns_cookie: u64, source: SocketAddr, proxy: IpAddr) -> Self {
        let [.., a, b, c, d] = address_bytes(proxy);
        Self {
            netns_cookie,
            source_ip: address_bytes(source.ip()),
            source_port_be: source.port().to_be(),
            zero: [0; 2],
            proxy_suffix_be: u32::from_ne_bytes([a, b, c, d]),
        }
    }
}

impl CapturedPod {
    /// Builds the entry of a pod with these addresses. Applications see the first address of each
    /// family as the pod's own.
    pub fn new(ips: &[IpAddr], tenant: u32, spreads_v6: bool) -> Self {
        let first = |v4: bool| {
            ips.iter()
                .find(|ip| ip.is_ipv4() == v4)
                .map(|ip| address_bytes(*ip))
                .unwrap_or_default()
        };
        let has_more = [true, false]
            .into_iter()
            .any(|v4| ips.iter().filter(|ip| ip.is_ipv4() == v4).count() > 1);
        let flags = if spreads_v6 { SPREADS_V6 } else { 0 } | if has_more { HAS_MORE } else { 0 };
        Self {
            ip4: first(true),
            ip6: first(false),
            tenant,
            flags,
        }
    }
}

impl DestinationKey {
    /// Returns the key of one address of a tenant.
    pub fn new(tenant: u32, ip: IpAddr) -> Self {
        Self {
            tenant,
            ip: address_bytes(ip),
        }
    }
}

impl Destination {
    /// Builds the entry of an address where `refused` is the verdict for every port except `ports`.
    /// With more than [`DESTINATION_PORTS_MAX`] ports, the entry refuses nothing and the proxy
    /// decides for all of them.
    pub fn new(refused: Verdict, ports: &[u16]) -> Self {
        let mut port_be = [0; DESTINATION_PORTS_MAX];
        if ports.len() > DESTINATION_PORTS_MAX {
            return Self::default();
        }
        port_be
            .iter_mut()
            .zip(ports)
            .for_each(|(be, port)| *be = port.to_be());
        Self {
            refused: refused as u32,
            ports: ports.len() as u16,
            port_be,
        }
    }
}

impl RangeKey {
    /// Returns the key of a tenant's range that begins at `ip`. `bits` is the prefix length within
    /// the family: at most 32 for IPv4, 128 for IPv6.
    pub fn new(tenant: u32, ip: IpAddr, bits: u8) -> Self {
        // The trie counts the tenant's 32 bits and, for IPv4, the 96 bits in front of a mapped
        // address.
        let before = if ip.is_ipv4() { 32 + 96 } else { 32 };
        Self {
            prefixlen: before + u32::from(bits),
            tenant,
            ip: address_bytes(ip),
        }
    }
}

impl RefusedDestination {
    /// Returns the address that the application dialed.
    pub fn destination(&self) -> SocketAddr {
        SocketAddr::new(
            Ipv6Addr::from(self.ip).to_canonical(),
            u16::from_be(self.port_be),
        )
    }
}

impl Origin {
    /// Returns the address that the application dialed. A mapped address comes back as IPv4,
    /// because the packets carry IPv4.
    pub fn destination(&self) -> SocketAddr {
        SocketAddr::new(
            Ipv6Addr::from(self.destination_ip).to_canonical(),
            u16::from_be(self.destination_port_be),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{from_bytes, to_bytes};

    #[test]
    fn a_client_address_has_one_key_for_ipv4_and_ipv6_sockets() {
        let key = |cookie, source: &str, proxy: &str| {
            OriginKey::new(cookie, source.parse().unwrap(), proxy.parse().unwrap())
        };
        let v4 = key(7, "10.1.2.3:4711", "127.64.0.1");
        assert_eq!(v4, key(7, "[::ffff:10.1.2.3]:4711", "::ffff:127.64.0.1"));
        assert_ne!(
            v4,
            key(8, "10.1.2.3:4711", "127.64.0.1"),
            "another namespace"
        );
        assert_ne!(
            v4,
            key(7, "10.1.2.4:4711", "127.64.0.1"),
            "another source address with the same port"
        );
        assert_ne!(
            v4,
            key(7, "10.1.2.3:4711", "127.64.0.2"),
            "another connection of one source"
        );
        assert_eq!(
            to_bytes(&v4)[24..26],
            4711u16.to_be_bytes(),
            "network order"
        );
    }

    #[test]
    fn destinations_survive_encoding_and_decoding() {
        for (dialled, seen) in [
            ("10.96.0.1:80", "10.96.0.1:80"),
            ("[fd00::1]:80", "[fd00::1]:80"),
            ("[::ffff:10.96.0.1]:80", "10.96.0.1:80"),
        ] {
            let d: SocketAddr = dialled.parse().unwrap();
            let o = Origin {
                destination_ip: address_bytes(d.ip()),
                destination_port_be: d.port().to_be(),
                ..Origin::default()
            };
            let back: Origin = from_bytes(to_bytes(&o)).unwrap();
            assert_eq!(back.destination(), seen.parse().unwrap());
        }
        assert!(from_bytes::<Origin>(&[0; 31]).is_none());
    }

    #[test]
    fn addresses_of_the_proxy_never_leave_their_namespace() {
        for (ip, want) in [
            ("127.64.0.1", true),
            ("::ffff:127.64.0.1", true),
            ("::1", true),
            ("fd63:616e:616c:1:0:1:abcd:ef01", true),
            ("fd63:616e:616c:1::abcd", false),
            ("10.1.2.3", false),
            ("fd00::1", false),
        ] {
            assert_eq!(is_inside(ip.parse().unwrap()), want, "{ip}");
        }
    }

    #[test]
    fn captured_pod_holds_the_first_address_of_each_family() {
        let ips = |of: &[&str]| {
            of.iter()
                .map(|ip| ip.parse().unwrap())
                .collect::<Vec<IpAddr>>()
        };
        let pod = CapturedPod::new(&ips(&["10.0.0.1", "fd00::1"]), 3, true);
        assert_eq!(
            (pod.ip4, pod.ip6),
            (
                address_bytes("10.0.0.1".parse().unwrap()),
                address_bytes("fd00::1".parse().unwrap())
            )
        );
        assert_eq!((pod.tenant, pod.flags), (3, SPREADS_V6));
        assert_eq!(
            CapturedPod::new(&ips(&["10.0.0.1", "10.0.0.2"]), 3, false).flags,
            HAS_MORE
        );
    }

    #[test]
    fn destination_with_too_many_ports_refuses_none() {
        let all: Vec<u16> = (1..=DESTINATION_PORTS_MAX as u16 + 1).collect();
        let refused = Verdict::CANAL_CAPTURE_REFUSED_UNKNOWN_PORT;
        assert_eq!(Destination::new(refused, &all), Destination::default());
        let held = Destination::new(refused, &all[1..]);
        assert_eq!(
            (held.refused, usize::from(held.ports), held.port_be[0]),
            (refused as u32, DESTINATION_PORTS_MAX, 2u16.to_be())
        );
    }

    #[test]
    fn refusals_stand_in_the_order_of_their_counters() {
        for (i, v) in CONNECT_REFUSALS.into_iter().enumerate() {
            assert_eq!(
                v as usize,
                Verdict::CANAL_CAPTURE_REFUSED_UNKNOWN_PORT as usize + i,
                "{v:?}"
            );
        }
    }

    #[test]
    fn verdicts_are_complete_and_in_the_order_of_the_map() {
        for (i, v) in VERDICTS.into_iter().enumerate() {
            assert_eq!(v as usize, i, "{v:?}");
        }
        assert_eq!(verdict_name(Verdict::CANAL_CAPTURE_TAKEN_V4), "taken_v4");
    }
}
