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

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use canal_model::ids::{AzName, ReplicaNumber, ServiceKey, Vni};
    use canal_model::program::{BucketTable, GatewayAddress, Node, Replica, Service, Throttle};

    use super::*;

    const AZS: [&str; 2] = ["az1", "az2"];

    /// What tenant number `n` has in the tier: its service, with an address and a table in each AZ, a node and a throttle.
    fn tenant(name: &str, n: u32) -> Vec<Resource> {
        let (key, id): (ServiceKey, _) = (format!("{name}/shop/a").parse().unwrap(), ServiceId::new(n).unwrap());
        let (vni, tenant) = (Vni::new(n).unwrap(), TenantName::new(name).unwrap());
        let hostname = "a.shop.svc.cluster.local".into();
        let mut all = vec![
            Resource::Service(Service { key: key.clone(), id, hostname, vips: vec![], ports: vec![] }),
            Resource::Node(Node {
                tenant: tenant.clone(),
                name: "n1".parse().unwrap(),
                az: "az1".parse().unwrap(),
                underlay: Ipv4Addr::new(10, 201, 0, 2),
                mac: [0; 6],
                pod_cidrs: vec![],
            }),
            Resource::Throttle(Throttle {
                tenant,
                vni,
                service: None,
                id: None,
                sessions: Default::default(),
                packets: Default::default(),
            }),
        ];
        for az in AZS.map(|az| AzName::new(az).unwrap()) {
            let (service, chains) = (key.clone(), vec![]);
            all.push(Resource::Address(GatewayAddress { service: service.clone(), id, az: az.clone(), addresses: vec![], open: true }));
            all.push(Resource::Table(BucketTable { service, id, az, vni, version: 1, chains }));
        }
        all
    }

    fn replica(name: &str, number: u32, backend: &str, az: &str) -> Resource {
        Resource::Replica(Replica {
            name: name.parse().unwrap(),
            number: ReplicaNumber::new(number).unwrap(),
            backend: backend.parse().unwrap(),
            az: az.parse().unwrap(),
            underlay: Ipv4Addr::new(250, 1, 0, 3),
            up: true,
        })
    }

    /// b1 in az1 holds alpha, b2 in az2 alpha and beta, b3 nobody.
    fn whereabouts() -> Whereabouts {
        let held = |tenants: &[(&str, u32)]| Held {
            tenants: tenants.iter().map(|(t, _)| TenantName::new(t).unwrap()).collect(),
            services: tenants.iter().map(|(_, n)| ServiceId::new(*n).unwrap()).collect(),
        };
        let pair = |replica: &str, backend: &str| (replica.parse().unwrap(), backend.parse().unwrap());
        Whereabouts {
            replicas: [pair("r1", "b1"), pair("r2", "b2"), pair("r3", "b3")].into(),
            backends: [("b1", held(&[("alpha", 1)])), ("b2", held(&[("alpha", 1), ("beta", 2)]))]
                .map(|(b, h)| (b.parse().unwrap(), h))
                .into(),
        }
    }

    #[test]
    fn nobody_sees_of_the_tier_what_is_not_its_own() {
        let gateway = |name: &str, az: &str| Principal::Gateway { name: name.parse().unwrap(), az: az.parse().unwrap() };
        let edge = |az: &str| Principal::Edge { name: "e".parse().unwrap(), az: az.parse().unwrap() };
        let node =
            |tenant: &str| Principal::Node { name: "n1".parse().unwrap(), tenant: tenant.parse().unwrap(), az: "az1".parse().unwrap() };
        let alpha = "Service alpha/shop/a, Address alpha/shop/a@az1, Address alpha/shop/a@az2";
        let beta = "Service beta/shop/a, Address beta/shop/a@az1, Address beta/shop/a@az2";
        let cases: [(&str, Principal, String); 9] = [
            ("a replica of b1", gateway("r1", "az1"), format!("{alpha}, Table alpha/shop/a@az1, Throttle alpha, Replica r1, Replica r2")),
            (
                "a replica of b2",
                gateway("r2", "az2"),
                format!(
                    "{alpha}, Table alpha/shop/a@az2, Throttle alpha, {beta}, Table beta/shop/a@az2, Throttle beta, Replica r1, Replica r2"
                ),
            ),
            ("a replica of a backend that holds nothing", gateway("r3", "az1"), "Replica r1, Replica r2".into()),
            ("a replica that is not registered", gateway("r9", "az1"), "Replica r1, Replica r2".into()),
            (
                "an edge: its AZ of all tenants, no services",
                edge("az1"),
                "Node alpha/n1, Address alpha/shop/a@az1, Table alpha/shop/a@az1, Node beta/n1, Address beta/shop/a@az1, \
                 Table beta/shop/a@az1, Replica r1, Replica r2"
                    .into(),
            ),
            ("an edge of an AZ that nobody lives in", edge("az7"), "Node alpha/n1, Node beta/n1, Replica r1, Replica r2".into()),
            ("a node: its tenant's addresses", node("alpha"), alpha.into()),
            ("a node of the other tenant at the same addresses", node("beta"), beta.into()),
            ("an operator", Principal::Operator { name: "root".parse().unwrap(), tenant: None }, String::new()),
        ];
        let whereabouts = whereabouts();
        for (what, principal, want) in cases {
            let mut seen = Vec::new();
            for (name, n) in [("alpha", 1), ("beta", 2)] {
                let claims = Claims { tenant: TenantName::new(name).unwrap(), isolation: None, gateways: vec![] };
                if admits(&claims, &principal, &whereabouts) {
                    seen.extend(tenant(name, n).into_iter().filter(|r| visible(r, &principal, &whereabouts)));
                }
            }
            if admits_tier(&principal) {
                seen.extend([replica("r1", 1, "b1", "az1"), replica("r2", 2, "b2", "az2")]);
            }
            seen.sort_by_key(|r| (r.tenant().is_none(), r.tenant().cloned(), r.kind()));
            let got: Vec<String> = seen.iter().map(|r| format!("{:?} {}", r.kind(), r.name())).collect();
            assert_eq!(got.join(", "), want, "{what}");
        }
    }
}
