//! The cloud tier in a plan: the edges as tunnel ends of tenants' overlays, and each AZ's part of a
//! tenant's gateway addresses. The numbers are those of `bpf/abi/tier.h`, which is authoritative.
//! Pure; builds nothing.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

use crate::plan::{HostKind, HostPlan, Mac, RouterPlan, TenantPlan, WorldPlan};

/// VNI between edges and replicas. No tenant may have it.
pub const TIER_VNI: u32 = 0xCA0A1;
/// IPv4 range of the tier, which no tenant may use. Class E contains the addresses of services and
/// replicas.
pub const TIER_RANGE4: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(240, 0, 0, 0), 4);
/// IPv6 range of the tier, which no tenant may use.
pub const TIER_RANGE6: Ipv6Net =
    Ipv6Net::new_assert(Ipv6Addr::new(0xfdca, 0xa1, 0, 0, 0, 0, 0, 0), 48);
/// Range of the IPv6 addresses from which replicas dial endpoints. The last 32 bits are the
/// replica's underlay address.
pub const REPLICAS6: Ipv6Net =
    Ipv6Net::new_assert(Ipv6Addr::new(0xfdca, 0xa1, 0, 0x250, 0, 0, 0, 0), 96);
/// Number of the gateway address of a tenant's DNS in each AZ's part.
pub const DNS_NUMBER: u32 = 1;

/// The edges of an AZ in the overlays of nodes: one more tunnel end, the same for every tenant.
#[derive(Clone, Debug)]
pub struct EdgePlan {
    /// Names of the edge hosts.
    pub hosts: Vec<String>,
    /// Number of the AZ, from 1.
    pub az: u8,
    /// Address to which tunnel packets are sent: the only host's, or with several hosts an address
    /// that they share.
    pub underlay: Ipv4Addr,
    /// MAC of the tunnel end in forwarding tables.
    pub mac: Mac,
    /// Next hop of routes to the edges. It exists only as a static neighbor.
    pub hop4: Ipv4Addr,
    /// IPv6 next hop of routes to the edges. It exists only as a static neighbor.
    pub hop6: Ipv6Addr,
}

impl EdgePlan {
    fn of(hosts: &[&HostPlan], az: u8) -> Self {
        let group = u16::from(az);
        Self {
            hosts: hosts.iter().map(|host| host.name.clone()).collect(),
            az,
            underlay: if let [only] = hosts {
                only.ip4
            } else {
                Ipv4Addr::new(250, az, 255, 1)
            },
            mac: Mac::of_edge(az),
            hop4: Ipv4Addr::new(169, 254, 250, az),
            hop6: Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0x250, group),
        }
    }

    /// Returns the tunnel end, if it is not the address of the only host.
    pub fn anycast(&self) -> Option<Ipv4Addr> {
        (self.hosts.len() > 1).then_some(self.underlay)
    }

    /// Returns the range of the IPv4 addresses from which replicas of the AZ dial endpoints.
    pub fn replicas4(&self) -> Ipv4Net {
        Ipv4Net::new_assert(Ipv4Addr::new(250, self.az, 0, 0), 16)
    }

    /// Returns the range of the IPv6 addresses from which replicas of the AZ dial endpoints.
    pub fn replicas6(&self) -> Ipv6Net {
        let bits = REPLICAS6.network().to_bits() | u128::from(self.replicas4().network().to_bits());
        Ipv6Net::new_assert(Ipv6Addr::from_bits(bits), 112)
    }
}

/// Returns the edges of a plan, by AZ.
pub(crate) fn edges(plan: &WorldPlan) -> Vec<EdgePlan> {
    let of_az = |(az, router): (usize, &RouterPlan)| {
        let hosts: Vec<&HostPlan> = plan
            .hosts
            .iter()
            .filter(|host| host.kind == HostKind::Edge && host.az == az)
            .collect();
        (!hosts.is_empty()).then(|| EdgePlan::of(&hosts, router.number))
    };
    plan.routers.iter().enumerate().filter_map(of_az).collect()
}

/// Returns an AZ's part of a range of gateway addresses. AZ number a has the a-th eighth, counted
/// from 0.
pub fn part4(range: Ipv4Net, az: u8) -> Ipv4Net {
    let length = range.prefix_len() + 3;
    Ipv4Net::new_assert(
        Ipv4Addr::from_bits(range.network().to_bits() | u32::from(az) << (32 - length)),
        length,
    )
}

/// Returns an AZ's part of an IPv6 range of gateway addresses. AZ number a has the a-th eighth,
/// counted from 0.
pub fn part6(range: Ipv6Net, az: u8) -> Ipv6Net {
    let length = range.prefix_len() + 3;
    Ipv6Net::new_assert(
        Ipv6Addr::from_bits(range.network().to_bits() | u128::from(az) << (128 - length)),
        length,
    )
}

/// Returns the DNS servers of a pod in an AZ: first that of its own AZ, then the others. There are
/// none without gateway addresses.
pub(crate) fn name_servers(plan: &WorldPlan, tenant: &TenantPlan, az: u8) -> Vec<Ipv4Addr> {
    let Some((range, _)) = tenant.gateway_cidrs else {
        return Vec::new();
    };
    let mut azs: Vec<u8> = plan.edges.iter().map(|edge| edge.az).collect();
    azs.sort_by_key(|other| (*other != az, *other));
    azs.iter()
        .map(|az| Ipv4Addr::from_bits(part4(range, *az).network().to_bits() | DNS_NUMBER))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn azs_have_an_eighth_each() {
        let range: Ipv4Net = "10.1.192.0/18".parse().expect("a range");
        let parts: Vec<String> = (1..=7).map(|az| part4(range, az).to_string()).collect();
        let expected = [
            "10.1.200.0/21",
            "10.1.208.0/21",
            "10.1.216.0/21",
            "10.1.224.0/21",
            "10.1.232.0/21",
            "10.1.240.0/21",
            "10.1.248.0/21",
        ];
        assert_eq!(parts, expected);
        assert_eq!(
            part6("fd00:101:0:c::/64".parse().expect("a range"), 2).to_string(),
            "fd00:101:0:c:4000::/67"
        );
        assert_eq!(
            part6("fd00::/112".parse().expect("a range"), 7).to_string(),
            "fd00::e000/115"
        );
    }

    #[test]
    fn the_numbers_are_the_law_s() {
        let law = include_str!("../../bpf/abi/tier.h");
        for line in [
            format!("#define CANAL_TIER_VNI 0x{TIER_VNI:X}"),
            format!(
                "#define CANAL_TIER_NET6 0x{:X}ull",
                REPLICAS6.network().to_bits() >> 64
            ),
            format!(
                "#define CANAL_TIER_NET4 0x{:X}u",
                crate::plan::PROVIDERS.network().to_bits()
            ),
        ] {
            assert!(law.contains(&line), "{line}");
        }
    }
}
