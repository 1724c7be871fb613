//! Who speaks to the controller, as its token proved. What each may see is `canal_compiler::scope`; no tokens are kept here.

use std::fmt;

use crate::ids::{AzName, EdgeName, NodeName, ObjectName, ReplicaName, TenantName};

/// An authenticated client of the controller.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Principal {
    /// A tenant's node proxy: sees its tenant's services and gateways, and the workloads it runs.
    Node { name: NodeName, tenant: TenantName, az: AzName },
    /// A gateway replica: sees everything of the tenants it serves.
    Gateway { name: ReplicaName, az: AzName },
    /// An edge: sees the tier's tables of its AZ and where tenants' nodes are.
    Edge { name: EdgeName, az: AzName },
    /// A key server: told which identities run where. The provider's (`tenant` is `None`) of all tenants whose keys are in key servers, a
    /// tenant's own of its tenant alone.
    KeyServer { name: ObjectName, az: AzName, tenant: Option<TenantName> },
    /// A person or a pipeline behind `canal apply`; `tenant` is `None` for the provider, who may touch all.
    Operator { name: ObjectName, tenant: Option<TenantName> },
}

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Principal::Node { name, tenant, .. } => write!(f, "node {tenant}/{name}"),
            Principal::Gateway { name, .. } => write!(f, "gateway {name}"),
            Principal::Edge { name, .. } => write!(f, "edge {name}"),
            Principal::KeyServer { name, tenant: Some(tenant), .. } => write!(f, "keyserver {tenant}/{name}"),
            Principal::KeyServer { name, tenant: None, .. } => write!(f, "keyserver {name}"),
            Principal::Operator { name, tenant: Some(tenant) } => write!(f, "operator {tenant}/{name}"),
            Principal::Operator { name, tenant: None } => write!(f, "operator {name}"),
        }
    }
}
