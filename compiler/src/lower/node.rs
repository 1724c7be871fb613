//! A node proxy sends what goes to a service to a gateway, and knows its own workloads; it looks at no request. Who may
//! reach those workloads it decides as far as that can be seen without HTTP.

use canal_model::ids::NodeName;
use canal_model::program::Resource;

use crate::ir::Ir;

/// What the node `name` needs, parents first, sorted by name within a kind.
pub fn node(ir: &Ir, name: &NodeName) -> Vec<Resource> {
    let mut resources = vec![Resource::Tenant(ir.tenant.clone())];
    resources.extend(ir.gateways.iter().cloned().map(Resource::Gateway));
    resources.extend(ir.services.values().map(|service| Resource::Service(service.service.clone())));
    resources.extend(ir.workloads.iter().filter(|workload| workload.node == *name).cloned().map(Resource::Workload));
    resources.extend(ir.security.authorizations.iter().cloned().map(Resource::Authorization));
    resources.extend(ir.security.peer_authentications.iter().cloned().map(Resource::PeerAuthentication));
    resources
}
