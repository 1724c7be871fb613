//! Gateway numbers and the gateway addresses derived from them. The module has no state: plans
//! contain numbers, tenants contain ranges.
//!
//! Each range in a tenant's `gatewayCidrs` is cut into eighths; the AZ with number *a* (1 to 7) has
//! the *a*-th. A service's gateway number counts the usable addresses of that part from 1. Several
//! ranges of one family follow each other. The part's first address, and in IPv4 its last, stay
//! unused, so that no gateway address is a network or broadcast address.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use canal_model::fleet::{Demand, Demands, Fleet};
use canal_model::ids::{ServiceId, TenantName};
use canal_model::plan::{Plan, PlannedService, UnmetConstraint};
use ipnet::IpNet;

use crate::{GatewayNumbers, UsedGatewayNumbers};

/// The reason that a service has no gateway address (of one family).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The tenant has no ranges.
    #[error("the tenant has no gatewayCidrs; fix: give it a range, e.g. a /20")]
    NoRange,
    /// The AZ's number is not 1 to 7.
    #[error("AZ number {0} is out of range; fix: use 1 to 7")]
    Az(u8),
    /// The AZ's part of the ranges has too few addresses.
    #[error(
        "the tenant's {family} gatewayCidrs have {capacity} addresses for each AZ, and the service's number is {number}; fix: add a range"
    )]
    RangeFull {
        family: &'static str,
        capacity: u64,
        number: u32,
    },
}

/// A service's gateway addresses in one AZ: at most one per family.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GatewayAddressPair {
    /// The gateway addresses, IPv4 first.
    pub assigned: Vec<IpAddr>,
    /// Families that have ranges, all of them full.
    pub full: Vec<AddressError>,
}

/// Returns the gateway addresses of the service with gateway number `number` (from 1) in the AZ
/// with number `az`.
///
/// # Errors
/// Returns [`AddressError::NoRange`] or [`AddressError::Az`]. A full family is reported in
/// [`GatewayAddressPair::full`] instead, because the other family still works.
pub fn addresses(
    ranges: &[IpNet],
    az: u8,
    number: u32,
) -> Result<GatewayAddressPair, AddressError> {
    if !(1..=7).contains(&az) {
        return Err(AddressError::Az(az));
    }
    if ranges.is_empty() {
        return Err(AddressError::NoRange);
    }
    let mut result = GatewayAddressPair::default();
    for (family, is_v4) in [("IPv4", true), ("IPv6", false)] {
        let parts: Vec<AzAddressRange> = ranges
            .iter()
            .filter(|range| range.addr().is_ipv4() == is_v4)
            .map(|range| part(range, az))
            .collect();
        // The ranges of one family form one sequence; `before` counts the addresses of the ranges
        // already passed.
        let mut before = 0;
        let found = parts.iter().find_map(|part| {
            let place = u64::from(number)
                .checked_sub(before)
                .filter(|place| (1..=part.capacity).contains(place));
            before += part.capacity;
            place.map(|place| part.at(place))
        });
        match found {
            Some(address) => result.assigned.push(address),
            None if parts.is_empty() => {}
            None => result.full.push(AddressError::RangeFull {
                family,
                capacity: before,
                number,
            }),
        }
    }
    Ok(result)
}

/// An AZ's eighth of one range.
struct AzAddressRange {
    first: u128,
    capacity: u64,
    is_v4: bool,
}

impl AzAddressRange {
    fn at(&self, place: u64) -> IpAddr {
        let bits = self.first + u128::from(place);
        // The range is IPv4, so all its addresses are below 2^32.
        if self.is_v4 {
            Ipv4Addr::from_bits(bits as u32).into()
        } else {
            Ipv6Addr::from_bits(bits).into()
        }
    }
}

fn part(range: &IpNet, az: u8) -> AzAddressRange {
    let (network, width, is_v4) = match range {
        IpNet::V4(net) => (
            u128::from(net.network().to_bits()),
            32 - u32::from(net.prefix_len()),
            true,
        ),
        IpNet::V6(net) => (
            net.network().to_bits(),
            128 - u32::from(net.prefix_len()),
            false,
        ),
    };
    // A part counts at most 2^29 addresses, more than there can be services, so wider ranges need
    // no larger gateway numbers.
    let Some(size) = width.checked_sub(3) else {
        return AzAddressRange {
            first: 0,
            capacity: 0,
            is_v4,
        };
    };
    let unusable = if is_v4 { 2 } else { 1 };
    let capacity = (1_u64 << size.min(29)).saturating_sub(unusable);
    AzAddressRange {
        first: network + (u128::from(az) << size),
        capacity,
        is_v4,
    }
}

/// Returns how many numbers ranges have addresses for, in one family at least.
pub(crate) fn capacity(ranges: &[IpNet]) -> u32 {
    let of_family = |is_v4: bool| -> u64 {
        let ranges = ranges.iter();
        let ranges = ranges.filter(|range| range.addr().is_ipv4() == is_v4);
        ranges.map(|range| part(range, 1).capacity).sum()
    };
    u32::try_from(of_family(true).max(of_family(false))).unwrap_or(u32::MAX)
}

/// Returns how many numbers have an address in every family of the ranges.
pub(crate) fn full_capacity(ranges: &[IpNet]) -> u64 {
    let of_family = |is_v4: bool| -> Option<u64> {
        let ranges = ranges.iter();
        let ranges = ranges.filter(|range| range.addr().is_ipv4() == is_v4);
        let capacities = ranges.map(|range| part(range, 1).capacity);
        capacities.reduce(u64::saturating_add)
    };
    let families = [of_family(true), of_family(false)];
    families.into_iter().flatten().min().unwrap_or(0)
}

/// Returns the gateway number to which an address belongs in the AZ with number `az`; the inverse
/// of [`addresses`].
pub(crate) fn place_of(ranges: &[IpNet], az: u8, address: IpAddr) -> Option<u32> {
    let bits = match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    };
    let mut before = 0;
    for range in ranges {
        if range.addr().is_ipv4() != address.is_ipv4() {
            continue;
        }
        let part = part(range, az);
        let place = bits
            .checked_sub(part.first)
            .and_then(|it| u64::try_from(it).ok());
        if let Some(place) = place.filter(|place| (1..=part.capacity).contains(place)) {
            return u32::try_from(before + place).ok();
        }
        before += part.capacity;
    }
    None
}

/// Iterates over all services except Gateways.
fn ordinary_services(demands: &Demands) -> impl Iterator<Item = (&ServiceId, &Demand)> {
    let services = demands.services.iter();
    services.filter(|(id, _)| !demands.ingress.requested.contains_key(id))
}

/// Returns the gateway numbers that services other than Gateways have in the parent plan.
pub(crate) fn keep_numbers<'a>(
    demands: &'a Demands,
    parent: &Plan,
    taken: &mut UsedGatewayNumbers<'a>,
) -> GatewayNumbers {
    let mut numbers = GatewayNumbers::new();
    for (id, demand) in ordinary_services(demands) {
        if let Some(before) = parent
            .services
            .get(id)
            .filter(|before| before.key.tenant == demand.key.tenant && before.number > 0)
        {
            // The planner never gives two services of a tenant the same number. If a plan from
            // elsewhere does, the second service gets a new one.
            if taken
                .entry(&demand.key.tenant)
                .or_default()
                .insert(before.number)
            {
                numbers.insert(*id, before.number);
            }
        }
    }
    numbers
}

/// Gives every service without a gateway number, except Gateways, the lowest that is free in its
/// tenant.
pub(crate) fn add_numbers<'a>(
    demands: &'a Demands,
    numbers: &mut GatewayNumbers,
    taken: &mut UsedGatewayNumbers<'a>,
) {
    let mut from: BTreeMap<&TenantName, u32> = BTreeMap::new();
    for (id, demand) in ordinary_services(demands) {
        if numbers.contains_key(id) {
            continue;
        }
        let taken = taken.entry(&demand.key.tenant).or_default();
        let lowest = from.entry(&demand.key.tenant).or_insert(1);
        while taken.contains(lowest) {
            *lowest += 1;
        }
        taken.insert(*lowest);
        numbers.insert(*id, *lowest);
    }
}

/// Adds a note for every AZ of the service and every family in which it gets no address. `refused`
/// is the reason why a Gateway has none at all.
pub(crate) fn check(
    service: &PlannedService,
    fleet: &Fleet,
    demands: &Demands,
    refused: Option<&String>,
    notes: &mut Vec<UnmetConstraint>,
) {
    let ranges = service.ranges(demands);
    for az in service.tables.keys() {
        let number = fleet.azs.get(az).copied().unwrap_or(0);
        let errors = match (refused, addresses(ranges, number, service.number)) {
            (Some(why), _) => vec![why.clone()],
            (None, Ok(addresses)) => addresses.full.iter().map(ToString::to_string).collect(),
            (None, Err(error)) => vec![error.to_string()],
        };
        for error in errors {
            let (key, tenant) = (service.key.clone(), service.key.tenant.clone());
            notes.push(UnmetConstraint::NoAddress {
                service: key,
                tenant,
                az: az.clone(),
                why: error,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(ranges: &[&str], az: u8, number: u32, expected: &str) {
        let ranges: Vec<IpNet> = ranges.iter().map(|range| range.parse().unwrap()).collect();
        let got = match addresses(&ranges, az, number) {
            Ok(addresses) => {
                let given = addresses.assigned.iter().map(ToString::to_string);
                given
                    .chain(
                        addresses
                            .full
                            .iter()
                            .map(|error| format!("{error:?}").chars().take(9).collect()),
                    )
                    .collect::<Vec<_>>()
                    .join(" ")
            }
            Err(error) => format!("{error:?}"),
        };
        assert_eq!(got, expected, "{ranges:?} az {az} number {number}");
    }

    #[test]
    fn numbers_become_addresses() {
        let both = ["10.9.0.0/20", "fd00:9::/64"];
        check(&both, 1, 1, "10.9.2.1 fd00:9::2000:0:0:1");
        check(&both, 7, 510, "10.9.15.254 fd00:9::e000:0:0:1fe");
        check(&both, 7, 511, "fd00:9::e000:0:0:1ff RangeFull");
        check(&["10.9.0.0/24"], 2, 30, "10.9.0.94");
        check(&["10.9.0.0/24", "10.8.0.0/24"], 2, 31, "10.8.0.65");
        check(&["10.9.0.0/24", "10.8.0.0/24"], 2, 61, "RangeFull");
        check(&["10.9.0.0/30"], 2, 1, "RangeFull");
        check(&["10.9.0.0/28"], 2, 1, "RangeFull");
        check(&["0.0.0.0/0"], 7, 1, "224.0.0.1");
        check(&["fd00::/8"], 1, u32::MAX, "RangeFull");
        check(&[], 2, 1, "NoRange");
        check(&both, 0, 1, "Az(0)");
        check(&both, 8, 1, "Az(8)");
    }
}
