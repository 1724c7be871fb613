//! Builds the IR: puts checked rules into the route table of their service. `precedence` defines
//! the order of the table.

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_model::ids::ServiceKey;
use canal_model::program::RouteRule;
use canal_model::route_table::RouteTable;

use crate::ir::{Ir, ServiceIr};
use crate::resolve::ResolvedTenant;

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
    let services = checked.services.into_iter().map(|(key, service)| {
        let routes = RouteTable::new(rules.remove(&key).unwrap_or_default());
        (key, ServiceIr { service, routes })
    });
    Some(Ir {
        tenant,
        gateways: checked.gateways,
        services: services.collect(),
        workloads: checked.workloads,
        nodes: checked.nodes,
        throttles: checked.throttles,
        homes: checked.homes,
        direct: checked.direct,
        security: checked.security,
    })
}
