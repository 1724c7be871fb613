//! The cloud tier in a plan: what edges are to tenants' nodes, and which part of a tenant's gateway addresses is whose AZ's.
//! Numbers are those of `bpf/abi/tier.h`, which is the law. Pure; builds nothing.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

use crate::plan::{HostKind, HostPlan, Mac, Plan, TenantPlan};

/// VNI between edges and replicas; no tenant may have it.
pub const TIER_VNI: u32 = 0xCA0A1;
/// The tier's own ranges, which no tenant may use: class E holds services' and replicas' addresses.
pub const TIER_RANGE4: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(240, 0, 0, 0), 4);
/// The same for IPv6.
pub const TIER_RANGE6: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0xfdca, 0xa1, 0, 0, 0, 0, 0, 0), 48);
/// From which replicas dial endpoints: this, with the replica's underlay address as its last 32 bits.
pub const REPLICAS6: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0xfdca, 0xa1, 0, 0x250, 0, 0, 0, 0), 96);
/// Number of the gateway address at which a tenant's DNS is, in each AZ's part.
pub const DNS_NUMBER: u32 = 1;

/// An edge as nodes' overlays see it: one more tunnel end, the same for every tenant.
#[derive(Clone, Debug)]
pub struct EdgePlan {
    /// Name of its host.
    pub host: String,
    /// Number of its AZ, from 1.
    pub az: u8,
    /// Where tunnel packets go.
    pub underlay: Ipv4Addr,
    /// MAC under which it stands in forwarding tables.
    pub mac: Mac,
    /// Next hop of routes to it; it only ever exists as a static neighbour.
    pub hop4: Ipv4Addr,
    /// The same for IPv6.
    pub hop6: Ipv6Addr,
}

impl EdgePlan {
    fn of(host: &HostPlan, az: u8) -> Self {
        let group = u16::from(az);
        Self {
            host: host.name.clone(),
            az,
            underlay: host.ip4,
            mac: Mac::of_edge(az),
            hop4: Ipv4Addr::new(169, 254, 250, az),
            hop6: Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0x250, group),
        }
    }

    /// From which replicas of its AZ dial endpoints.
    pub fn replicas4(&self) -> Ipv4Net {
        Ipv4Net::new_assert(Ipv4Addr::new(250, self.az, 0, 0), 16)
    }

    /// The same for IPv6.
    pub fn replicas6(&self) -> Ipv6Net {
        let bits = REPLICAS6.network().to_bits() | u128::from(self.replicas4().network().to_bits());
        Ipv6Net::new_assert(Ipv6Addr::from_bits(bits), 112)
    }
}

/// The edges of a plan, in its order.
pub(crate) fn edges(plan: &Plan) -> Vec<EdgePlan> {
    let hosts = plan.hosts.iter().filter(|host| host.kind == HostKind::Edge);
    hosts.map(|host| EdgePlan::of(host, plan.routers[host.az].number)).collect()
}

/// An AZ's part of a range of gateway addresses: AZ number a has the a-th eighth, counted from 0.
pub fn part4(range: Ipv4Net, az: u8) -> Ipv4Net {
    let length = range.prefix_len() + 3;
    Ipv4Net::new_assert(Ipv4Addr::from_bits(range.network().to_bits() | u32::from(az) << (32 - length)), length)
}

/// The same for IPv6.
pub fn part6(range: Ipv6Net, az: u8) -> Ipv6Net {
    let length = range.prefix_len() + 3;
    Ipv6Net::new_assert(Ipv6Addr::from_bits(range.network().to_bits() | u128::from(az) << (128 - length)), length)
}

/// Where a pod of an AZ asks for names: its own AZ's DNS, then the others'; none without gateway addresses.
pub(crate) fn name_servers(plan: &Plan, tenant: &TenantPlan, az: u8) -> Vec<Ipv4Addr> {
    let Some((range, _)) = tenant.gateway_cidrs else { return Vec::new() };
    let mut azs: Vec<u8> = plan.edges.iter().map(|edge| edge.az).collect();
    azs.sort_by_key(|other| (*other != az, *other));
    azs.iter().map(|az| Ipv4Addr::from_bits(part4(range, *az).network().to_bits() | DNS_NUMBER)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn azs_have_an_eighth_each() {
        let range: Ipv4Net = "10.1.192.0/18".parse().expect("a range");
        let parts: Vec<String> = (1..=7).map(|az| part4(range, az).to_string()).collect();
        let expected =
            ["10.1.200.0/21", "10.1.208.0/21", "10.1.216.0/21", "10.1.224.0/21", "10.1.232.0/21", "10.1.240.0/21", "10.1.248.0/21"];
        assert_eq!(parts, expected);
        assert_eq!(part6("fd00:101:0:c::/64".parse().expect("a range"), 2).to_string(), "fd00:101:0:c:4000::/67");
        assert_eq!(part6("fd00::/112".parse().expect("a range"), 7).to_string(), "fd00::e000/115");
    }

    #[test]
    fn the_numbers_are_the_law_s() {
        let law = include_str!("../../bpf/abi/tier.h");
        for line in [
            format!("#define CANAL_TIER_VNI 0x{TIER_VNI:X}"),
            format!("#define CANAL_TIER_NET6 0x{:X}ull", REPLICAS6.network().to_bits() >> 64),
            format!("#define CANAL_TIER_NET4 0x{:X}u", crate::plan::PROVIDERS.network().to_bits()),
        ] {
            assert!(law.contains(&line), "{line}");
        }
    }
}
