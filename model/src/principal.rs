//! Authenticated clients of the controller, identified by their tokens. `canal_compiler::scope`
//! decides which resources each may receive. No tokens are stored here.

use std::fmt;

use crate::ids::{AzName, EdgeName, NodeName, ObjectName, ReplicaName, TenantName};

/// An authenticated client of the controller.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Principal {
    /// A tenant's node proxy: receives its tenant's services and gateways, and the workloads that
    /// it runs.
    Node {
        name: NodeName,
        tenant: TenantName,
        az: AzName,
    },
    /// A gateway replica: receives all resources of the tenants that it serves.
    Gateway { name: ReplicaName, az: AzName },
    /// An edge: receives the tier's tables of its AZ and the addresses of tenants' nodes.
    Edge { name: EdgeName, az: AzName },
    /// A key server: receives which identities run on which requester. The provider's key server
    /// (`tenant` is `None`) receives them for all tenants whose keys are in key servers. A tenant's
    /// own key server receives only those of its tenant.
    KeyServer {
        name: ObjectName,
        az: AzName,
        tenant: Option<TenantName>,
    },
    /// A person or a pipeline that runs `canal apply`; `tenant` is `None` for the provider, which
    /// may change every tenant.
    Operator {
        name: ObjectName,
        tenant: Option<TenantName>,
    },
}

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Principal::Node { name, tenant, .. } => write!(f, "node {tenant}/{name}"),
            Principal::Gateway { name, .. } => write!(f, "gateway {name}"),
            Principal::Edge { name, .. } => write!(f, "edge {name}"),
            Principal::KeyServer {
                name,
                tenant: Some(tenant),
                ..
            } => write!(f, "keyserver {tenant}/{name}"),
            Principal::KeyServer {
                name, tenant: None, ..
            } => write!(f, "keyserver {name}"),
            Principal::Operator {
                name,
                tenant: Some(tenant),
            } => write!(f, "operator {tenant}/{name}"),
            Principal::Operator { name, tenant: None } => write!(f, "operator {name}"),
        }
    }
}
