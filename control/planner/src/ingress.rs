//! Addresses of Gateways: the ingress network and the number in it that each Gateway has. A Gateway
//! keeps its address as long as it may; one without an address changes nothing for the others.
//! Start at [`assign`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use canal_model::fleet::{Demand, Demands, Fleet};
use canal_model::ids::{ServiceId, TenantName};
use canal_model::plan::{IngressNetwork, Plan};
use canal_model::share::Share;
use ipnet::IpNet;

use crate::address::{addresses, capacity, full_capacity, place_of};
use crate::{GatewayNumbers, UsedGatewayNumbers};

/// The numbers that AZs may have.
/// AZ a has the a-th eighth of each range (docs/design/0003-cloud-tier.md).
const AZ_NUMBERS: RangeInclusive<u8> = 1..=7;

/// The networks and numbers of Gateways.
#[derive(Debug, Default)]
pub(crate) struct IngressPlacement {
    pub(crate) networks: BTreeMap<ServiceId, IngressNetwork>,
    pub(crate) numbers: GatewayNumbers,
    /// Reasons why Gateways have no address.
    pub(crate) refused: BTreeMap<ServiceId, String>,
}

/// Assigns addresses to Gateways: those that the parent plan gave come first, then the lowest that
/// are free. `used` has the numbers in use, by the tenant that has the range.
pub(crate) fn assign<'a>(
    fleet: &Fleet,
    demands: &'a Demands,
    parent: &Plan,
    used: &mut UsedGatewayNumbers<'a>,
) -> IngressPlacement {
    let mut pool = IngressPool {
        fleet,
        demands,
        used_numbers: used,
        lowest: BTreeMap::new(),
        address_counts: BTreeMap::new(),
        owners: BTreeMap::new(),
        placement: IngressPlacement::default(),
    };
    let mut previous: BTreeMap<ServiceId, (u32, &IngressNetwork)> = BTreeMap::new();
    let gateways = || {
        let requested = demands.ingress.requested.iter();
        requested.filter_map(|(id, addresses)| Some((*id, demands.services.get(id)?, addresses)))
    };
    for (id, demand, requested) in gateways() {
        let before = parent.services.get(&id);
        // The ID may have been another Gateway's.
        let before = before.filter(|it| it.key == demand.key && it.number > 0);
        let Some((number, network)) = before.and_then(|it| Some((it.number, it.network.as_ref()?)))
        else {
            continue;
        };
        previous.insert(id, (number, network));
        let is_assigned = |address: &IpAddr| network.addresses.contains(address);
        // A Gateway that requests another address gives these up.
        if requested.iter().all(is_assigned) {
            let addresses = network.addresses.iter();
            pool.owners.extend(addresses.map(|address| (*address, id)));
        }
    }
    for (id, demand, requested) in gateways() {
        if let Some((number, network)) = previous.get(&id) {
            pool.keep(id, demand, requested, (*number, network));
        }
    }
    // A Gateway without a request can have any address, so it is not given one that another
    // requests.
    let with_request = gateways().filter(|(.., requested)| !requested.is_empty());
    let without_request = gateways().filter(|(.., requested)| requested.is_empty());
    for (id, demand, requested) in with_request.chain(without_request) {
        if pool.placement.numbers.contains_key(&id) {
            continue;
        }
        if let Err(why) = pool.find(id, demand, requested) {
            pool.placement.refused.insert(id, why);
        }
    }
    pool.placement
}

/// The addresses of all ingress networks while they are assigned.
struct IngressPool<'a, 'b> {
    fleet: &'b Fleet,
    demands: &'a Demands,
    used_numbers: &'b mut UsedGatewayNumbers<'a>,
    /// A number below which none is free, by network.
    lowest: BTreeMap<&'a TenantName, u32>,
    /// Number of Gateways with an address, by tenant.
    address_counts: BTreeMap<&'a TenantName, u64>,
    /// The Gateway that has each address in the parent plan. No other Gateway gets it in the
    /// next plan.
    owners: BTreeMap<IpAddr, ServiceId>,
    placement: IngressPlacement,
}

impl<'a> IngressPool<'a, '_> {
    fn ranges(&self, network: &TenantName) -> &'a [IpNet] {
        self.demands.ranges.get(network).map_or(&[], Vec::as_slice)
    }

    /// Returns the number of Gateways of a tenant that may have an address.
    fn max(&self, tenant: &TenantName) -> u64 {
        match self.demands.ingress.max.get(tenant) {
            Some(Share::Amount(amount)) => *amount,
            Some(percent) => {
                let networks = self.demands.ingress.networks.keys();
                percent.of(networks.map(|it| full_capacity(self.ranges(it))).sum())
            }
            None => 0,
        }
    }

    /// Returns the number to which an address belongs, in the part of any AZ.
    fn number_at(&self, network: &TenantName, address: IpAddr) -> Option<u32> {
        let mut azs = self.fleet.azs.values();
        azs.find_map(|az| place_of(self.ranges(network), *az, address))
    }

    /// Returns the addresses of a number in the parts of all AZs.
    fn addresses_of(&self, network: &TenantName, number: u32) -> BTreeSet<IpAddr> {
        let ranges = self.ranges(network);
        let pairs = AZ_NUMBERS.filter_map(|az| addresses(ranges, az, number).ok());
        pairs.flat_map(|pair| pair.assigned).collect()
    }

    /// Returns the number that has a Gateway's addresses now. If the two families have different
    /// numbers, it is that of IPv4.
    fn present_number(&self, number: u32, before: &IngressNetwork) -> Option<u32> {
        // A plan of an older version has no addresses.
        if before.addresses.is_empty() {
            return Some(number);
        }
        let ranges = self.ranges(&before.tenant);
        let of_family = |is_v4: bool| {
            let addresses = before.addresses.iter();
            let mut addresses = addresses.filter(|address| address.is_ipv4() == is_v4);
            let first = addresses.next()?;
            let number = AZ_NUMBERS
                .into_iter()
                .find_map(|az| place_of(ranges, az, *first))?;
            let present = self.addresses_of(&before.tenant, number);
            let are_same = addresses.all(|address| present.contains(address));
            are_same.then_some(number)
        };
        of_family(true).or_else(|| of_family(false))
    }

    /// Returns whether a number has an address that another Gateway has in the parent plan.
    fn is_owned(&self, id: ServiceId, network: &TenantName, number: u32) -> bool {
        let addresses = self.addresses_of(network, number);
        let mut owners = addresses.iter().filter_map(|it| self.owners.get(it));
        owners.any(|owner| *owner != id)
    }

    /// Returns whether a number is in use, or was another Gateway's until now.
    fn is_taken(&self, id: ServiceId, network: &TenantName, number: u32) -> bool {
        let used = self.used_numbers.get(network);
        used.is_some_and(|used| used.contains(&number)) || self.is_owned(id, network, number)
    }

    /// Gives a Gateway the addresses that it has in the parent plan, if they still exist. While
    /// their network is absent, they are reserved.
    fn keep(
        &mut self,
        id: ServiceId,
        demand: &'a Demand,
        requested: &[IpAddr],
        (number, before): (u32, &IngressNetwork),
    ) {
        let networks = &self.demands.ingress.networks;
        let Some((network, _)) = networks.get_key_value(&before.tenant) else {
            let is_assigned = |address: &IpAddr| before.addresses.contains(address);
            if requested.iter().all(is_assigned) {
                self.reserve(id, demand, number, before);
            }
            return;
        };
        let Some(number) = self.present_number(number, before) else {
            return;
        };
        // A Gateway that requests another address loses this one, and gets that in the second pass.
        let is_requested = |address: &IpAddr| self.number_at(network, *address) == Some(number);
        if !requested.iter().all(is_requested) || self.claim(id, demand, network, number).is_err() {
            return;
        }
        // A family without ranges may get them back.
        if let Some(claimed) = self.placement.networks.get_mut(&id) {
            for is_v4 in [true, false] {
                if !claimed.addresses.iter().any(|it| it.is_ipv4() == is_v4) {
                    let absent = before.addresses.iter().filter(|it| it.is_ipv4() == is_v4);
                    claimed.addresses.extend(absent);
                }
            }
        }
    }

    /// Reserves the number of a Gateway whose network is absent.
    fn reserve(&mut self, id: ServiceId, demand: &'a Demand, number: u32, before: &IngressNetwork) {
        // The tenant may still be there, without being an ingress network.
        if let Some((tenant, _)) = self.demands.ranges.get_key_value(&before.tenant)
            && !self.used_numbers.entry(tenant).or_default().insert(number)
        {
            return;
        }
        *self.address_counts.entry(&demand.key.tenant).or_default() += 1;
        self.placement.networks.insert(id, before.clone());
        self.placement.numbers.insert(id, number);
        let why = format!(
            "the ingress network {} is absent, and the address is reserved; fix: restore its Tenant with ingressNetwork: true, or create the Gateway again",
            before.tenant
        );
        self.placement.refused.insert(id, why);
    }

    /// Gives a Gateway the address that it requests, or the lowest that is free.
    fn find(
        &mut self,
        id: ServiceId,
        demand: &'a Demand,
        requested: &[IpAddr],
    ) -> Result<(), String> {
        let networks = &self.demands.ingress.networks;
        let Some(first) = requested.first() else {
            for network in networks.keys() {
                let max = capacity(self.ranges(network));
                // The search goes on at the last result, since nothing is released while addresses
                // are assigned. Numbers begin at 1.
                let mut number = self.lowest.get(network).copied().unwrap_or(1);
                while number <= max && self.is_taken(id, network, number) {
                    number += 1;
                }
                self.lowest.insert(network, number);
                if number <= max {
                    return self.take(id, demand, network, number);
                }
            }
            return Err(if networks.is_empty() {
                "the provider has no ingress network; fix: add a Tenant with ingressNetwork: true"
                    .to_owned()
            } else {
                "all addresses of the ingress networks are taken; fix: add a range to gatewayCidrs of one of them"
                    .to_owned()
            });
        };
        let found = networks
            .keys()
            .find_map(|network| Some((network, self.number_at(network, *first)?)));
        let Some((network, number)) = found else {
            return Err(format!(
                "no ingress network has the address {first}; fix: request one of an AZ's part of the pool, or none"
            ));
        };
        // A Gateway has one number, which determines its address in each AZ.
        let other = requested
            .iter()
            .find(|address| self.number_at(network, **address) != Some(number));
        if let Some(other) = other {
            return Err(format!(
                "{first} and {other} do not belong together; fix: request one address"
            ));
        }
        self.take(id, demand, network, number)
    }

    /// Gives a Gateway a number, if its tenant's share allows one more.
    fn take(
        &mut self,
        id: ServiceId,
        demand: &'a Demand,
        network: &'a TenantName,
        number: u32,
    ) -> Result<(), String> {
        let tenant = &demand.key.tenant;
        let max = self.max(tenant);
        if self.address_counts.get(tenant).copied().unwrap_or(0) >= max {
            return Err(format!(
                "the tenant's share is {max} addresses; fix: remove Gateways, or raise spec.shares.ingressAddresses of the Tenant"
            ));
        }
        self.claim(id, demand, network, number)
    }

    /// Gives a Gateway a number, whatever its tenant's share is.
    fn claim(
        &mut self,
        id: ServiceId,
        demand: &'a Demand,
        network: &'a TenantName,
        number: u32,
    ) -> Result<(), String> {
        let is_in_range = (1..=capacity(self.ranges(network))).contains(&number);
        if !is_in_range || self.is_taken(id, network, number) {
            return Err("another Gateway has the address; fix: request another one".to_owned());
        }
        self.used_numbers.entry(network).or_default().insert(number);
        *self.address_counts.entry(&demand.key.tenant).or_default() += 1;
        let network = IngressNetwork {
            tenant: network.clone(),
            vni: self.demands.ingress.networks[network],
            addresses: self.addresses_of(network, number),
        };
        self.placement.networks.insert(id, network);
        self.placement.numbers.insert(id, number);
        Ok(())
    }
}
