//! Which subscriber is told what. Pure: the hub asks, this answers; authentication happened before.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::ids::{BackendName, ReplicaName, ServiceId, TenantName};
use canal_model::principal::Principal;
use canal_model::program::Resource;

use crate::claims::Claims;

/// Where services live in the cloud tier, as far as scope depends on it. Empty without a fleet.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Whereabouts {
    /// The backend of each registered replica.
    pub replicas: BTreeMap<ReplicaName, BackendName>,
    /// What each backend holds. It is in one AZ.
    pub backends: BTreeMap<BackendName, Held>,
}

/// What a backend's replicas must know of.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Held {
    /// Tenants with a service that is placed here, or whose sessions are still here.
    pub tenants: BTreeSet<TenantName>,
    /// Those services.
    pub services: BTreeSet<ServiceId>,
}

impl Whereabouts {
    /// What a replica must know of; `None`: it is not registered, or its backend holds nothing.
    pub fn of(&self, replica: &ReplicaName) -> Option<&Held> {
        self.backends.get(self.replicas.get(replica)?)
    }
}

/// Whether `principal` is told anything at all of the tenant that makes these claims.
///
/// Ask this once per tenant, [`visible`] once per resource. A gateway serves the tenants that name it in Gateway objects, and those
/// that have a service on its backend.
pub fn admits(claims: &Claims, principal: &Principal, whereabouts: &Whereabouts) -> bool {
    match principal {
        Principal::Node { tenant, .. } => *tenant == claims.tenant,
        Principal::Gateway { name, .. } => {
            claims.gateways.iter().any(|g| g.replica == *name)
                || whereabouts.of(name).is_some_and(|held| held.tenants.contains(&claims.tenant))
        }
        // An edge serves all tenants of the fleet.
        Principal::Edge { .. } => true,
        Principal::Operator { .. } => false,
    }
}

/// Whether `principal` is told of what belongs to no tenant: the tier's replicas.
pub fn admits_tier(principal: &Principal) -> bool {
    matches!(principal, Principal::Gateway { .. } | Principal::Edge { .. })
}

/// Whether `principal`, whom [`admits`] let into the resource's tenant, is told of `resource`.
///
/// A node gets its tenant, the tenant's gateways, gateway addresses and services, and the workloads on itself, whose identities it asks
/// for and whose labels it reports; no routes and no other workloads: layer 7 is not its work, and a stolen node shall know little.
/// A gateway gets everything of the tenants it serves, but bucket tables only of services on its own backend in its own AZ.
/// An operator subscribes to nothing.
pub fn visible(resource: &Resource, principal: &Principal, whereabouts: &Whereabouts) -> bool {
    match principal {
        Principal::Gateway { name, az } => match resource {
            Resource::Table(table) => table.az == *az && whereabouts.of(name).is_some_and(|held| held.services.contains(&table.id)),
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
                    Resource::Tenant(_) | Resource::Gateway(_) | Resource::Service(_) | Resource::Address(_) => true,
                    Resource::Workload(workload) => workload.node == *name,
                    Resource::Route(_) | Resource::Node(_) | Resource::Replica(_) | Resource::Table(_) | Resource::Throttle(_) => false,
                }
        }
    }
}
