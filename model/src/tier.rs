//! What the cloud tier keeps for itself, for those who check what tenants write: its VNI, its service, its address ranges, and each
//! AZ's part of a tenant's gateway addresses. What is on the wire is in `wire`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::ids::{Namespace, ObjectName, ServiceKey, TenantName};

/// VNI between edges and replicas; no tenant may have it.
pub const TIER_VNI: u32 = 0xCA0A1;
/// Namespace and name of the service that every tenant has of the tier itself: CONNECTs to pod addresses, and DNS.
pub const TIER_SERVICE: (&str, &str) = ("canal-system", "gateway");
/// The least bits of a gateway address inside an AZ's part: room for the gateway numbers 1 (the tier's own service) to 3.
pub const PART_BITS_MIN: u8 = 2;
/// A range's AZ parts are eighths.
const AZ_BITS: u8 = 3;

/// Address ranges of the tier itself; no tenant may use them.
pub fn reserved() -> [IpNet; 2] {
    let v4 = Ipv4Net::new_assert(Ipv4Addr::new(240, 0, 0, 0), 4);
    let v6 = Ipv6Net::new_assert(Ipv6Addr::from_bits(0xFDCA_00A1_u128 << 96), 48);
    [v4.into(), v6.into()]
}

/// Whether two ranges have an address in common. Ranges of two families never have.
pub fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(&b.network()) || b.contains(&a.network())
}

/// The tenant's service of the tier itself.
pub fn tier_service(tenant: &TenantName) -> ServiceKey {
    match (Namespace::new(TIER_SERVICE.0), ObjectName::new(TIER_SERVICE.1)) {
        (Ok(namespace), Ok(name)) => ServiceKey { tenant: tenant.clone(), namespace, name },
        _ => unreachable!("the constants are valid names; the test below holds them to it"),
    }
}

/// Whether this is a tenant's service of the tier itself.
pub fn is_tier_service(service: &ServiceKey) -> bool {
    (service.namespace.as_str(), service.name.as_str()) == TIER_SERVICE
}

/// The part of a gateway range that AZ number `az` (1 to 7) has: the `az`-th eighth, counted from 0. `None`: there is no such AZ, or the
/// range has less than eight addresses.
pub fn az_part(range: &IpNet, az: u8) -> Option<IpNet> {
    if !(1..8).contains(&az) {
        return None;
    }
    match range {
        IpNet::V4(v4) => {
            let length = v4.prefix_len().checked_add(AZ_BITS).filter(|bits| *bits <= 32)?;
            let start = v4.network().to_bits() | u32::from(az).checked_shl(u32::from(32 - length))?;
            Some(Ipv4Net::new(Ipv4Addr::from_bits(start), length).ok()?.into())
        }
        IpNet::V6(v6) => {
            let length = v6.prefix_len().checked_add(AZ_BITS).filter(|bits| *bits <= 128)?;
            let start = v6.network().to_bits() | u128::from(az).checked_shl(u32::from(128 - length))?;
            Some(Ipv6Net::new(Ipv6Addr::from_bits(start), length).ok()?.into())
        }
    }
}

/// The gateway address of the service with gateway number `number` (from 1) in AZ number `az`. `None`: the AZ's part has no such address.
pub fn gateway_address(range: &IpNet, az: u8, number: u32) -> Option<IpAddr> {
    let part = az_part(range, az)?;
    let bits = part.max_prefix_len() - part.prefix_len();
    if number == 0 || u64::from(number) >= 1u64.checked_shl(bits.into()).unwrap_or(u64::MAX) {
        return None;
    }
    Some(match part.network() {
        IpAddr::V4(v4) => Ipv4Addr::from_bits(v4.to_bits() | number).into(),
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() | u128::from(number)).into(),
    })
}

/// How many services a gateway range has room for in each AZ, the tier's own included.
pub fn room(range: &IpNet) -> u64 {
    let bits = u32::from(range.max_prefix_len() - range.prefix_len()).saturating_sub(AZ_BITS.into());
    1u64.checked_shl(bits).map_or(u64::MAX, |addresses| addresses - 1)
}

/// Whether a gateway range is large enough: each AZ's part has [`PART_BITS_MIN`] bits.
pub fn has_room(range: &IpNet) -> bool {
    range.max_prefix_len() - range.prefix_len() >= AZ_BITS + PART_BITS_MIN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tiers_service_has_a_valid_name() {
        let key = tier_service(&TenantName::new("alpha").unwrap());
        assert_eq!(key.to_string(), "alpha/canal-system/gateway");
        assert!(is_tier_service(&key) && !is_tier_service(&"alpha/canal-system/dns".parse().unwrap()));
    }

    #[test]
    fn an_az_has_its_eighth_and_a_service_its_number_in_it() {
        for (range, az, number, part, address) in [
            ("10.1.192.0/18", 1, 1, "10.1.200.0/21", "10.1.200.1"),
            ("10.1.192.0/18", 7, 2047, "10.1.248.0/21", "10.1.255.255"),
            ("10.1.192.0/18", 7, 2048, "10.1.248.0/21", ""),
            ("10.1.192.0/18", 0, 1, "", ""),
            ("10.1.192.0/18", 8, 1, "", ""),
            ("10.1.192.0/18", 1, 0, "10.1.200.0/21", ""),
            ("10.1.255.224/27", 2, 3, "10.1.255.232/30", "10.1.255.235"),
            ("10.1.255.224/27", 2, 4, "10.1.255.232/30", ""),
            ("10.1.255.248/29", 3, 1, "10.1.255.251/32", ""),
            ("10.1.255.252/30", 1, 1, "", ""),
            ("fd00:101:0:c::/64", 2, 7, "fd00:101:0:c:4000::/67", "fd00:101:0:c:4000::7"),
            ("fd00::/8", 7, u32::MAX, "fde0::/11", "fde0::ffff:ffff"),
            ("::/0", 1, 1, "2000::/3", "2000::1"),
            ("0.0.0.0/0", 4, 1, "128.0.0.0/3", "128.0.0.1"),
        ] {
            let range: IpNet = range.parse().unwrap();
            let shown = az_part(&range, az).map(|net| net.to_string()).unwrap_or_default();
            assert_eq!(shown, part, "{range} {az}");
            let shown = gateway_address(&range, az, number).map(|ip| ip.to_string()).unwrap_or_default();
            assert_eq!(shown, address, "{range} {az} {number}");
        }
        for (range, services, enough) in [
            ("10.1.192.0/18", 2047, true),
            ("10.0.0.0/27", 3, true),
            ("10.0.0.0/28", 1, false),
            ("fd00::/123", 3, true),
            ("fd00::/8", u64::MAX, true),
        ] {
            let range: IpNet = range.parse().unwrap();
            assert_eq!((room(&range), has_room(&range)), (services, enough), "{range}");
        }
    }
}
