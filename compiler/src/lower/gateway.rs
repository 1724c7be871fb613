//! The gateway runs everything: it finds the service, the rule and the endpoint.

use canal_model::program::{Resource, RouteRule};

use crate::ir::{Ir, ServiceIr};

/// All resources of the tenant, parents first, sorted by name within a kind.
pub fn gateway(ir: &Ir) -> Vec<Resource> {
    let mut resources = vec![Resource::Tenant(ir.tenant.clone())];
    resources.extend(ir.gateways.iter().cloned().map(Resource::Gateway));
    resources.extend(ir.services.values().map(|service| Resource::Service(service.service.clone())));
    resources.extend(ir.workloads.iter().cloned().map(Resource::Workload));
    let mut routes: Vec<RouteRule> = ir.services.values().flat_map(routes).collect();
    routes.sort_by(|a, b| a.key.cmp(&b.key));
    resources.extend(routes.into_iter().map(Resource::Route));
    resources
}

fn routes(service: &ServiceIr) -> impl Iterator<Item = RouteRule> {
    service.rules.iter().map(|rule| RouteRule {
        key: rule.key.clone(),
        parent: service.service.key.clone(),
        parent_port: rule.port,
        hosts: rule.hosts.clone(),
        matches: rule.matches.clone(),
        action: rule.action.clone(),
    })
}
