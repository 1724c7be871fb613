//! Which subscriber is told what. Pure: the hub asks, this answers; authentication happened before.

use canal_model::principal::Principal;
use canal_model::program::Resource;

use crate::claims::Claims;

/// Whether `principal` is told anything at all of the tenant that makes these claims.
///
/// Ask this once per tenant, [`visible`] once per resource.
pub fn admits(claims: &Claims, principal: &Principal) -> bool {
    match principal {
        Principal::Node { tenant, .. } => *tenant == claims.tenant,
        Principal::Gateway { name, .. } => claims.gateways.iter().any(|g| g.replica == *name),
        // An edge serves all tenants of the fleet.
        Principal::Edge { .. } => true,
        Principal::Operator { .. } => false,
    }
}

/// Whether `principal`, whom [`admits`] let into the resource's tenant, is told of `resource`.
///
/// A node gets its tenant, the tenant's gateways and services, and the workloads on itself, whose identities it asks for
/// and whose labels it reports; no routes and no other workloads: layer 7 is not its work, and a stolen node shall know little.
/// A gateway gets everything of the tenants it serves. An operator subscribes to nothing.
pub fn visible(resource: &Resource, principal: &Principal) -> bool {
    match principal {
        Principal::Gateway { az, .. } => match resource {
            Resource::Table(table) => table.az == *az,
            Resource::Node(_) => false,
            _ => true,
        },
        Principal::Edge { az, .. } => match resource {
            Resource::Tenant(_) | Resource::Node(_) | Resource::Replica(_) => true,
            Resource::Address(address) => address.az == *az,
            Resource::Table(table) => table.az == *az,
            Resource::Gateway(_) | Resource::Service(_) | Resource::Workload(_) | Resource::Route(_) | Resource::Throttle(_) => false,
        },
        Principal::Operator { .. } => false,
        Principal::Node { name, tenant, .. } => {
            resource.tenant() == Some(tenant)
                && match resource {
                    Resource::Tenant(_) | Resource::Gateway(_) | Resource::Service(_) => true,
                    Resource::Workload(workload) => workload.node == *name,
                    Resource::Address(_) => true,
                    Resource::Route(_) | Resource::Node(_) | Resource::Replica(_) | Resource::Table(_) | Resource::Throttle(_) => false,
                }
        }
    }
}
