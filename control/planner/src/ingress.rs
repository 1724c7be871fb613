//! Addresses of Gateways: the ingress network and the number in it that each Gateway has. A Gateway
//! keeps its address as long as it may; one without an address changes nothing for the others.
//! Start at [`assign`].

use std::collections::BTreeMap;
use std::net::IpAddr;

use canal_model::fleet::{Demand, Demands, Fleet};
use canal_model::ids::{ServiceId, TenantName};
use canal_model::plan::{IngressNetwork, Plan};
use ipnet::IpNet;

use crate::address::{capacity, place_of};
use crate::{GatewayNumbers, UsedGatewayNumbers};

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
        placement: IngressPlacement::default(),
    };
    let gateways = || {
        let requested = demands.ingress.requested.iter();
        requested.filter_map(|(id, addresses)| Some((*id, demands.services.get(id)?, addresses)))
    };
    for (id, demand, requested) in gateways() {
        let before = parent.services.get(&id);
        let kept = before.and_then(|before| {
            let network = before.network.as_ref()?;
            let (tenant, vni) = demands.ingress.networks.get_key_value(&network.tenant)?;
            // The ID may have been another Gateway's, and the network may have another VNI now.
            let is_same = *vni == network.vni && before.key == demand.key;
            is_same.then_some((tenant, before.number))
        });
        let Some((tenant, number)) = kept else {
            continue;
        };
        // A Gateway that requests another address now loses this one, and gets that in the second
        // pass.
        let is_requested = |address: &IpAddr| pool.number_at(tenant, *address) == Some(number);
        if requested.iter().all(is_requested) && pool.take(id, demand, tenant, number).is_ok() {
            pool.placement.refused.remove(&id);
        }
    }
    for (id, demand, requested) in gateways() {
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
    placement: IngressPlacement,
}

impl<'a> IngressPool<'a, '_> {
    fn ranges(&self, network: &TenantName) -> &'a [IpNet] {
        self.demands.ranges.get(network).map_or(&[], Vec::as_slice)
    }

    /// Returns the number to which an address belongs, in the part of any AZ.
    fn number_at(&self, network: &TenantName, address: IpAddr) -> Option<u32> {
        let mut azs = self.fleet.azs.values();
        azs.find_map(|az| place_of(self.ranges(network), *az, address))
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
                let used = self.used_numbers.entry(network).or_default();
                // Nothing is released while addresses are assigned.
                let lowest = self.lowest.entry(network).or_insert(1);
                while used.contains(lowest) {
                    *lowest += 1;
                }
                let number = *lowest;
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

    /// Gives a Gateway a number.
    fn take(
        &mut self,
        id: ServiceId,
        demand: &'a Demand,
        network: &'a TenantName,
        number: u32,
    ) -> Result<(), String> {
        let tenant = &demand.key.tenant;
        let max = self.demands.ingress.max.get(tenant).copied().unwrap_or(0);
        let address_counts = self.address_counts.entry(tenant).or_default();
        if *address_counts >= max {
            return Err(format!(
                "the tenant's share is {max} addresses; fix: remove Gateways, or raise spec.shares.ingressAddresses of the Tenant"
            ));
        }
        let is_in_range =
            (1..=capacity(self.demands.ranges.get(network).map_or(&[], Vec::as_slice)))
                .contains(&number);
        if !is_in_range || !self.used_numbers.entry(network).or_default().insert(number) {
            return Err("another Gateway has the address; fix: request another one".to_owned());
        }
        *address_counts += 1;
        let network = IngressNetwork {
            tenant: network.clone(),
            vni: self.demands.ingress.networks[network],
        };
        self.placement.networks.insert(id, network);
        self.placement.numbers.insert(id, number);
        Ok(())
    }
}
