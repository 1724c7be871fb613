//! The gateway runs everything: it finds the service, the rule and the endpoint.

use canal_model::program::{Resource, RouteRule};

use crate::ir::Ir;

/// All resources of the tenant, for the hub to share out by scope: parents first, sorted by name within a kind.
pub fn gateway(ir: Ir) -> Vec<Resource> {
    let mut resources = vec![Resource::Tenant(ir.tenant)];
    resources.extend(ir.gateways.into_iter().map(Resource::Gateway));
    let mut services = Vec::with_capacity(ir.services.len());
    let mut routes: Vec<RouteRule> = Vec::new();
    for service in ir.services.into_values() {
        let parent = service.service.key.clone();
        services.push(Resource::Service(service.service));
        routes.extend(service.rules.into_iter().map(|rule| RouteRule {
            key: rule.key,
            parent: parent.clone(),
            parent_port: rule.port,
            hosts: rule.hosts,
            matches: rule.matches,
            action: rule.action,
        }));
    }
    routes.sort_by(|a, b| a.key.cmp(&b.key));
    resources.extend(services);
    resources.extend(ir.workloads.into_iter().map(Resource::Workload));
    resources.extend(routes.into_iter().map(Resource::Route));
    resources.extend(ir.nodes.into_iter().map(Resource::Node));
    resources.extend(ir.throttles.into_iter().map(Resource::Throttle));
    resources.extend(ir.security.into_resources());
    resources
}
