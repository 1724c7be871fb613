//! Builds the IR: puts checked rules into the route table of their service. `precedence` defines
//! the order of the table.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::ServiceKey;
use canal_model::ingress::{ListenerFault, ListenerFaultReason, host_order};
use canal_model::program::{HostMatch, RouteObject, RouteRule, VirtualHost};
use canal_model::route_table::{RouteTable, by_consumer};

use crate::diagnostic_collector::DiagnosticCollector;
use crate::ir::{Ir, ServiceIr};
use crate::ir_ingress::{GatewayIr, ListenerIr};
use crate::limits::HOST_MATCHES_PER_TENANT_MAX;
use crate::resolve::{Ingress, ResolvedTenant};
use crate::resource_budget::ResourceBudget;
use crate::route_weight::RouteWeights;

/// What a route adds to each table of a gateway that has it.
#[derive(Default)]
struct RouteSize {
    matches: usize,
    bytes: u64,
}

/// Builds the IR; `None` if the tenant has no valid Tenant object and must not be published.
pub(crate) fn build(
    checked: ResolvedTenant,
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) -> Option<Ir> {
    let tenant = checked.tenant?;
    let mut rules: BTreeMap<ServiceKey, Vec<Arc<RouteRule>>> = BTreeMap::new();
    for rule in checked.rules {
        rules
            .entry(rule.parent.clone())
            .or_default()
            .push(Arc::new(rule));
    }
    let mut ingress = ingress(checked.ingress, &mut rules);
    close_beyond_limit(&mut ingress, budget, report);
    let services = checked.services.into_iter().map(|(key, service)| {
        let (routes, consumers) = by_consumer(rules.remove(&key).unwrap_or_default());
        let consumers = consumers.into_iter();
        let own = ServiceIr {
            service,
            routes: RouteTable::new(routes),
            consumers: consumers
                .map(|(namespace, rules)| (namespace, RouteTable::new(rules)))
                .collect(),
        };
        (key, own)
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
        offload_preferences: checked.offload_preferences,
        traffic_priorities: checked.traffic_priorities,
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
            // A listener without routes has no hosts.
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
                closed_routes: ingress.listeners.closed_routes(&gateway.service, at),
            }
        });
        GatewayIr {
            listeners: listeners.collect(),
            // A Gateway without routes has no rules.
            routes: RouteTable::new(rules.remove(&gateway.service).unwrap_or_default()),
            service: gateway.service.clone(),
            addresses: gateway.addresses.clone(),
            trusted_proxies: gateway.trusted_proxies,
            proxied_ports: gateway.proxied_ports(),
            certificates: gateway.certificates.clone(),
            client_validations: gateway.client_validations(),
            id: ingress.ids.get(&gateway.service).copied(),
        }
    });
    gateways.collect()
}

/// Closes the listeners with whose hosts the tenant has more matches than its limit, or larger route
/// tables than its share. Gateways compile the routes of a host together, and routes that several
/// hosts have in common only once: a route is in a table for each distinct set of routes.
fn close_beyond_limit(
    gateways: &mut [GatewayIr],
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) {
    let mut left = HOST_MATCHES_PER_TENANT_MAX;
    // The limit that the first closed listener exceeds, which closes the later ones too.
    let mut exceeded: Option<String> = None;
    for gateway in gateways {
        let mut weights: BTreeMap<RouteObject, RouteSize> = BTreeMap::new();
        for rule in gateway.routes.rules() {
            let size = weights.entry(rule.key.route()).or_default();
            size.matches += rule.matches.len();
            size.bytes += RouteWeights::default().add(rule);
        }
        let mut counted: BTreeSet<BTreeSet<RouteObject>> = BTreeSet::new();
        let mut charged: BTreeSet<RouteObject> = BTreeSet::new();
        for listener in &mut gateway.listeners {
            let mut cost = RouteSize::default();
            for host in &listener.virtual_hosts {
                // Gateways compile equal sets of routes once.
                if !counted.insert(host.routes.clone()) {
                    continue;
                }
                for route in &host.routes {
                    // A route without a rule on this Gateway adds nothing to its tables.
                    let Some(size) = weights.get(route) else {
                        continue;
                    };
                    cost.matches = cost.matches.saturating_add(size.matches);
                    // The first table of a route was charged with its rules.
                    if !charged.insert(route.clone()) {
                        cost.bytes = cost.bytes.saturating_add(size.bytes);
                    }
                }
            }
            let rest = left.checked_sub(cost.matches);
            if let Some(rest) = rest.filter(|_| budget.take_route_table(cost.bytes)) {
                left = rest;
                continue;
            }
            let problem = exceeded.get_or_insert_with(|| match rest {
                None => format!(
                    "with its hosts the tenant's listeners have more than {HOST_MATCHES_PER_TENANT_MAX} matches of routes"
                ),
                Some(_) => {
                    "with its hosts the tenant's route tables exceed its share (routeTableBytes)"
                        .to_owned()
                }
            });
            // Every later listener with matches is closed too, so the open ones are the first in
            // order, whatever their sizes.
            left = 0;
            listener.virtual_hosts.clear();
            report.general(
                Code::LimitExceeded,
                format!(
                    "listener {} of {} is closed: {problem}",
                    listener.listener.name, gateway.service
                ),
                "use fewer hosts, or the same routes on all of them",
            );
            let reason = ListenerFaultReason::Invalid;
            let problem = problem.clone();
            let fault = Arc::new(ListenerFault { reason, problem });
            listener.listener.closed.get_or_insert(fault);
        }
    }
}
