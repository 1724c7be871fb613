//! Names and numbers that the cloud tier reserves for itself: its VNI, its service, its address
//! ranges. The compiler checks tenants' objects against them. The wire format is in `wire`. The
//! planner assigns gateway addresses to services.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::ids::{Namespace, ObjectName, ServiceKey, TenantName};

/// VNI of the traffic between edges and replicas; no tenant may have it.
/// Its digits resemble the name; any other number would do.
pub const TIER_VNI: u32 = 0xCA0A1;
/// Namespace and name of the tier's own service, which every tenant has. It receives CONNECTs to
/// pod addresses, and DNS.
pub const TIER_SERVICE: (&str, &str) = ("canal-system", "gateway");
/// Minimum number of host bits of a gateway range. Three bits divide the range among AZs into
/// eighths. Two bits per eighth suffice for the tier's own service and one more. The first address
/// of an eighth, and in IPv4 also the last, is never assigned.
const RANGE_BITS_MIN: u8 = 3 + 2;

/// Returns the address ranges of the tier itself; no tenant may use them.
pub fn reserved() -> [IpNet; 2] {
    let v4 = Ipv4Net::new_assert(Ipv4Addr::new(240, 0, 0, 0), 4);
    let v6 = Ipv6Net::new_assert(Ipv6Addr::from_bits(0xFDCA_00A1_u128 << 96), 48);
    [v4.into(), v6.into()]
}

/// Returns whether two ranges have an address in common. Ranges of different families never have.
pub fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(&b.network()) || b.contains(&a.network())
}

/// Returns the key of the tier's own service in the given tenant.
pub fn tier_service(tenant: &TenantName) -> ServiceKey {
    match (
        Namespace::new(TIER_SERVICE.0),
        ObjectName::new(TIER_SERVICE.1),
    ) {
        (Ok(namespace), Ok(name)) => ServiceKey {
            tenant: tenant.clone(),
            namespace,
            name,
        },
        _ => unreachable!("the constants are valid names; a test below verifies it"),
    }
}

/// Returns whether `service` is the tier's own service of its tenant.
pub fn is_tier_service(service: &ServiceKey) -> bool {
    (service.namespace.as_str(), service.name.as_str()) == TIER_SERVICE
}

/// Returns whether a range of gateway addresses is large enough to be divided among AZs.
pub fn has_room(range: &IpNet) -> bool {
    range.max_prefix_len() - range.prefix_len() >= RANGE_BITS_MIN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tiers_service_has_a_valid_name() {
        let key = tier_service(&TenantName::new("alpha").unwrap());
        assert_eq!(key.to_string(), "alpha/canal-system/gateway");
        assert!(
            is_tier_service(&key) && !is_tier_service(&"alpha/canal-system/dns".parse().unwrap())
        );
    }

    #[test]
    fn ranges_overlap_within_a_family() {
        for (a, b, both) in [
            ("10.0.0.0/8", "10.1.0.0/16", true),
            ("10.1.0.0/16", "10.1.0.0/16", true),
            ("10.1.0.0/16", "10.2.0.0/16", false),
            ("0.0.0.0/0", "::/0", false),
            ("fd00::/8", "fdca:a1::/48", true),
        ] {
            let (a, b): (IpNet, IpNet) = (a.parse().unwrap(), b.parse().unwrap());
            assert_eq!((overlap(&a, &b), overlap(&b, &a)), (both, both), "{a} {b}");
        }
    }

    #[test]
    fn a_gateway_range_holds_two_services_in_each_az() {
        for (range, enough) in [
            ("10.1.192.0/18", true),
            ("10.0.0.0/27", true),
            ("10.0.0.0/28", false),
            ("fd00::/123", true),
            ("fd00::/124", false),
            ("::/0", true),
        ] {
            assert_eq!(has_room(&range.parse().unwrap()), enough, "{range}");
        }
    }
}
