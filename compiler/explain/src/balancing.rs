//! Text about how a gateway selects among the endpoints of a route's targets. It decides nothing.

use canal_compiler::ir::Ir;
use canal_compiler::text;
use canal_model::load_balancing::LoadBalancer;
use canal_model::program::BackendTarget;

/// Returns the load balancers of the targets that differ from the default, as an addition to the
/// text of the route; empty without any.
pub(crate) fn text(ir: &Ir, targets: &[BackendTarget]) -> String {
    let lines = targets.iter().filter_map(|target| {
        let BackendTarget::Service {
            service,
            port,
            subset,
        } = target
        else {
            return None;
        };
        let load_balancer = ir
            .services
            .get(service)?
            .service
            .load_balancer(*port, subset);
        let (namespace, name) = (&service.namespace, &service.name);
        (load_balancer != LoadBalancer::default()).then(|| {
            format!(
                "; {namespace}/{name}:{port}{} is balanced by {}",
                text::subset_suffix(subset),
                text::load_balancer(&load_balancer)
            )
        })
    });
    lines.collect()
}
