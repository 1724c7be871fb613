//! Builds the IR: puts checked rules into the route table of their service. `precedence` defines
//! the order of the table.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::ids::ServiceKey;
use canal_model::ingress::host_order;
use canal_model::program::{HostMatch, RouteRule};
use canal_model::route_table::RouteTable;

use crate::ir::{Ir, ServiceIr};
use crate::ir_ingress::{GatewayIr, ListenerIr, VirtualHost};
use crate::resolve::{Ingress, ResolvedTenant};

/// Builds the IR; `None` if the tenant has no valid Tenant object and must not be published.
pub(crate) fn build(checked: ResolvedTenant) -> Option<Ir> {
    let tenant = checked.tenant?;
    let mut rules: BTreeMap<ServiceKey, Vec<Arc<RouteRule>>> = BTreeMap::new();
    for rule in checked.rules {
        rules
            .entry(rule.parent.clone())
            .or_default()
            .push(Arc::new(rule));
    }
    let ingress = ingress(checked.ingress, &mut rules);
    let services = checked.services.into_iter().map(|(key, service)| {
        let routes = RouteTable::new(rules.remove(&key).unwrap_or_default());
        (key, ServiceIr { service, routes })
    });
    Some(Ir {
        tenant,
        gateway_replicas: checked.gateway_replicas,
        ingress,
        services: services.collect(),
        workloads: checked.workloads,
        nodes: checked.nodes,
        throttles: checked.throttles,
        homes: checked.homes,
        direct: checked.direct,
        security: checked.security,
    })
}

/// Puts the routes of each listener under the hosts by which they are on it, the most specific host
/// first.
fn ingress(
    ingress: Ingress,
    rules: &mut BTreeMap<ServiceKey, Vec<Arc<RouteRule>>>,
) -> Vec<GatewayIr> {
    let mut hosts: BTreeMap<(ServiceKey, usize), BTreeMap<Option<HostMatch>, BTreeSet<_>>> =
        BTreeMap::new();
    for (route, attachment) in ingress.attachments {
        let listener = hosts
            .entry((attachment.gateway, attachment.listener))
            .or_default();
        for host in attachment.hosts {
            listener.entry(host).or_default().insert(route.clone());
        }
    }
    let gateways = ingress.listeners.gateways().map(|gateway| {
        let listeners = gateway.listeners.iter().enumerate().map(|(at, placed)| {
            let own = hosts.remove(&(gateway.service.clone(), at));
            let mut virtual_hosts: Vec<VirtualHost> = own
                .unwrap_or_default()
                .into_iter()
                .map(|(host, routes)| VirtualHost { host, routes })
                .collect();
            virtual_hosts
                .sort_by(|a, b| host_order(a.host.as_ref()).cmp(&host_order(b.host.as_ref())));
            ListenerIr {
                listener: placed.listener.clone(),
                virtual_hosts,
            }
        });
        GatewayIr {
            listeners: listeners.collect(),
            routes: RouteTable::new(rules.remove(&gateway.service).unwrap_or_default()),
            service: gateway.service.clone(),
            addresses: gateway.addresses.clone(),
        }
    });
    gateways.collect()
}
