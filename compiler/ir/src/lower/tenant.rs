//! Lowers the IR to all resources of the tenant, for all subscribers. [`crate::scope`] decides
//! which subscriber receives which resource.

use canal_model::program::{Resource, RouteRule};
use canal_model::route_table::RouteTable;

use crate::ir::Ir;
use crate::ir_ingress::GatewayIr;

/// Returns all resources of the tenant: parents first, sorted by name within a kind. The controller
/// filters them by scope.
pub fn tenant(ir: Ir) -> Vec<Resource> {
    let direct = crate::direct::endpoints(&ir);
    let mut resources = vec![Resource::Tenant(ir.tenant)];
    resources.extend(
        ir.gateway_replicas
            .into_iter()
            .map(Resource::GatewayReplica),
    );
    let mut services = Vec::with_capacity(ir.services.len());
    let (mut ingress, mut certificates) = (Vec::new(), Vec::new());
    let mut routes = Vec::<RouteRule>::new();
    for service in ir.services.into_values() {
        services.push(Resource::Service(service.service));
        let tables = std::iter::once(service.routes).chain(service.consumers.into_values());
        let rules = tables.flat_map(RouteTable::into_rules);
        routes.extend(rules.map(std::sync::Arc::unwrap_or_clone));
    }
    for (gateway, own, table) in ir.ingress.into_iter().filter_map(GatewayIr::into_program) {
        ingress.push(Resource::Ingress(gateway));
        certificates.extend(own.into_iter().map(Resource::ListenerCertificate));
        let rules = table.into_rules().into_iter();
        routes.extend(rules.map(std::sync::Arc::unwrap_or_clone));
    }
    routes.sort_by(|a, b| a.key.cmp(&b.key));
    resources.extend(services);
    resources.extend(ingress);
    resources.extend(certificates);
    resources.extend(ir.workloads.into_iter().map(Resource::Workload));
    resources.extend(routes.into_iter().map(Resource::Route));
    resources.extend(ir.nodes.into_iter().map(Resource::Node));
    resources.extend(ir.throttles.into_iter().map(Resource::Throttle));
    resources.extend(direct.into_iter().map(Resource::DirectEndpoint));
    resources.extend(ir.security.into_resources());
    resources
}

/// Returns whether a resource comes before all routes in the order of [`tenant`].
pub fn precedes_routes(resource: &Resource) -> bool {
    matches!(
        resource,
        Resource::Tenant(_)
            | Resource::GatewayReplica(_)
            | Resource::Service(_)
            | Resource::Ingress(_)
            | Resource::ListenerCertificate(_)
            | Resource::Workload(_)
    )
}
