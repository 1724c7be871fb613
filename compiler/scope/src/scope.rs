//! Decides which subscriber receives which resources. Pure: the controller calls these functions
//! after authentication.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::identity::COMPONENTS;
use canal_model::ids::{BackendName, ReplicaName, ServiceId, TenantName};
use canal_model::principal::Principal;
use canal_model::program::Resource;

use crate::claims::TenantClaims;

/// The part of the cloud tier's placement that scope depends on. It is empty without a fleet.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TierPlacement {
    /// Backend of each registered replica.
    pub replicas: BTreeMap<ReplicaName, BackendName>,
    /// Scope of each backend. A backend is in one AZ.
    pub backends: BTreeMap<BackendName, BackendScope>,
}

/// The tenants and services that a backend's replicas must receive.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BackendScope {
    /// Tenants with a service that this backend serves, or with sessions that are still here.
    pub tenants: BTreeSet<TenantName>,
    /// Ids of the services that this backend serves or has sessions of.
    pub services: BTreeSet<ServiceId>,
}

impl TierPlacement {
    /// Returns the scope of a replica; `None` if it is not registered, or if its backend serves
    /// nothing.
    pub fn of(&self, replica: &ReplicaName) -> Option<&BackendScope> {
        self.backends.get(self.replicas.get(replica)?)
    }
}

/// Returns whether `principal` receives any resource of the tenant that makes these claims.
///
/// Call this once per tenant, and [`visible`] once per resource. A gateway serves the tenants that
/// name it in GatewayReplica objects, and those that have a service on its backend.
pub fn admits(claims: &TenantClaims, principal: &Principal, placement: &TierPlacement) -> bool {
    match principal {
        Principal::Node { tenant, .. } => *tenant == claims.tenant,
        Principal::Gateway { name, .. } => {
            claims.gateways.iter().any(|g| g.replica == *name)
                || placement
                    .of(name)
                    .is_some_and(|scope| scope.tenants.contains(&claims.tenant))
        }
        // An edge serves all tenants of the fleet.
        Principal::Edge { .. } => true,
        Principal::KeyServer { tenant, .. } => tenant
            .as_ref()
            .is_none_or(|tenant| *tenant == claims.tenant),
        Principal::Operator { .. } => false,
    }
}

/// Returns whether `principal` can ever hold a resource of `owner`, whatever is in force now;
/// `None` is the provider. A node or key server of a tenant holds nothing of other tenants.
pub fn may_hold_of(owner: Option<&TenantName>, principal: &Principal) -> bool {
    match principal {
        Principal::Node { tenant, .. }
        | Principal::KeyServer {
            tenant: Some(tenant),
            ..
        } => owner.is_none_or(|owner| owner == tenant),
        Principal::Gateway { .. }
        | Principal::Edge { .. }
        | Principal::KeyServer { tenant: None, .. } => true,
        Principal::Operator { .. } => false,
    }
}

/// Returns whether `principal` receives resources that belong to no tenant: the tier's replicas,
/// and the trust bundle of Canal's components.
pub fn admits_provider(principal: &Principal) -> bool {
    !matches!(principal, Principal::Operator { .. })
}

/// Returns whether the resource is the trust bundle of Canal's own components. All components with
/// such a certificate need it, because they present the certificates to each other.
fn is_of_components(resource: &Resource) -> bool {
    matches!(resource, Resource::Bundle(bundle) if bundle.trust_domain.as_str() == COMPONENTS)
}

/// Returns whether `principal`, which [`admits`] accepted for the resource's tenant, receives
/// `resource`.
///
/// - A node gets its tenant, and the tenant's gateways, gateway addresses and services. It gets the
///   workloads on itself, because it requests their identities and reports their labels. Of other
///   workloads it gets only direct endpoints (address, identity and AZ) of ready workloads that
///   policies allow one of its own workloads to reach. It gets no routes, because it does not
///   handle layer 7, and a compromised node should learn little. Of zero trust it gets trust
///   bundles and the policies that nodes evaluate.
/// - A gateway gets everything of the tenants that it serves, with exceptions. Bucket tables are
///   limited to services on its own backend in its own AZ, and certificates of listeners to
///   Gateways on its own backend. It gets no nodes, entitlements or direct
///   endpoints.
/// - A key server gets tenants, trust bundles and entitlements, and nothing else.
/// - Nodes, gateways and key servers get the trust bundle of Canal's own components, because they
///   have such certificates.
/// - An edge gets all tenants, nodes and replicas, and the gateway addresses and bucket tables of
///   its own AZ.
/// - An operator does not subscribe.
pub fn visible(resource: &Resource, principal: &Principal, placement: &TierPlacement) -> bool {
    match principal {
        Principal::Gateway { name, az } => match resource {
            Resource::Table(table) => {
                table.az == *az
                    && placement
                        .of(name)
                        .is_some_and(|scope| scope.services.contains(&table.id))
            }
            // It contains a private key.
            Resource::ListenerCertificate(certificate) => placement
                .of(name)
                .is_some_and(|scope| scope.services.contains(&certificate.id)),
            Resource::Node(_) | Resource::Entitlement(_) | Resource::DirectEndpoint(_) => false,
            // `admits` has checked that the gateway serves the resource's tenant.
            _ => true,
        },
        Principal::Edge { az, .. } => match resource {
            Resource::Tenant(_) | Resource::Node(_) | Resource::Replica(_) => true,
            Resource::Address(address) => address.az == *az,
            Resource::Table(table) => table.az == *az,
            _ => false,
        },
        Principal::KeyServer { .. } | Principal::Node { .. } if is_of_components(resource) => true,
        Principal::KeyServer { tenant, .. } => {
            tenant
                .as_ref()
                .is_none_or(|tenant| resource.tenant() == Some(tenant))
                && matches!(
                    resource,
                    Resource::Tenant(_) | Resource::Bundle(_) | Resource::Entitlement(_)
                )
        }
        Principal::Operator { .. } => false,
        Principal::Node { name, tenant, .. } => {
            resource.tenant() == Some(tenant)
                && match resource {
                    Resource::Tenant(_) | Resource::GatewayReplica(_) | Resource::Service(_) => {
                        true
                    }
                    // Addresses on networks of clients are not for the tenant's own pods.
                    Resource::Address(address) => address.network.is_none(),
                    Resource::Bundle(_)
                    | Resource::Authorization(_)
                    | Resource::PeerAuthentication(_) => true,
                    Resource::DirectEndpoint(endpoint) => endpoint.audience.has(name),
                    Resource::Workload(workload) => workload.node == *name,
                    _ => false,
                }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Arc;

    use canal_model::certificate::{PrivateKeyPem, ServingCertificate};
    use canal_model::ids::{AzName, ReplicaNumber, ServiceKey, Vni};
    use canal_model::program::{
        BucketTable, DirectEndpoint, GatewayAddress, ListenerCertificate, Node, Replica, Service,
        Throttle,
    };

    use super::*;

    const AZS: [&str; 2] = ["az1", "az2"];

    /// Returns the tier resources of tenant number `n`: one service with an address and a table in
    /// each AZ, a node, a throttle, and a direct endpoint for all nodes of the tenant. Values on
    /// which no scope depends are empty or arbitrary.
    fn tenant(name: &str, n: u32) -> Vec<Resource> {
        let (key, id): (ServiceKey, _) = (
            format!("{name}/shop/a").parse().unwrap(),
            ServiceId::new(n).unwrap(),
        );
        let (vni, tenant) = (Vni::new(n).unwrap(), TenantName::new(name).unwrap());
        let hostname = "a.shop.svc.cluster.local".into();
        let mut all = vec![
            Resource::Service(Service {
                key: key.clone(),
                id,
                hostname,
                vips: vec![],
                ports: vec![],
                upstream_pool: Default::default(),
                policy_paths: Default::default(),
                load_balancers: Vec::new(),
            }),
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
                requests: Default::default(),
            }),
        ];
        all.push(Resource::DirectEndpoint(DirectEndpoint {
            tenant: key.tenant.clone(),
            namespace: key.namespace.clone(),
            name: "a-0".parse().unwrap(),
            service_account: "a".parse().unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec!["10.1.0.1".parse().unwrap()],
            serves: vec![],
            own_ports: Default::default(),
            audience: Default::default(),
        }));
        for az in AZS.map(|az| AzName::new(az).unwrap()) {
            let (service, chains) = (key.clone(), vec![]);
            all.push(Resource::Address(GatewayAddress {
                service: service.clone(),
                id,
                az: az.clone(),
                addresses: vec![],
                network: None,
                open: true,
            }));
            all.push(Resource::Table(BucketTable {
                service,
                id,
                az,
                vni,
                version: 1,
                chains,
            }));
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

    /// Backend b1 in az1 serves alpha, b2 in az2 serves alpha and beta, and b3 serves no tenant.
    fn tier_placement() -> TierPlacement {
        let scope = |tenants: &[(&str, u32)]| BackendScope {
            tenants: tenants
                .iter()
                .map(|(t, _)| TenantName::new(t).unwrap())
                .collect(),
            services: tenants
                .iter()
                .map(|(_, n)| ServiceId::new(*n).unwrap())
                .collect(),
        };
        let pair =
            |replica: &str, backend: &str| (replica.parse().unwrap(), backend.parse().unwrap());
        TierPlacement {
            replicas: [pair("r1", "b1"), pair("r2", "b2"), pair("r3", "b3")].into(),
            backends: [
                ("b1", scope(&[("alpha", 1)])),
                ("b2", scope(&[("alpha", 1), ("beta", 2)])),
            ]
            .map(|(b, h)| (b.parse().unwrap(), h))
            .into(),
        }
    }

    #[test]
    fn certificates_of_listeners_go_to_replicas_of_their_gateway() {
        let certificate = Resource::ListenerCertificate(ListenerCertificate {
            gateway: "alpha/shop/web.gateway".parse().unwrap(),
            // `visible` compares the ID alone. In `tier_placement` only b2 has this one.
            id: ServiceId::new(2).unwrap(),
            secret: ("shop".parse().unwrap(), "cert".parse().unwrap()),
            certificate: Arc::new(ServingCertificate {
                chain: String::new(),
                key: PrivateKeyPem::new(String::new()),
                names: Vec::new(),
            }),
        });
        let placement = tier_placement();
        let az = || AzName::new("az1").unwrap();
        let gateway = |name: &str| Principal::Gateway {
            name: name.parse().unwrap(),
            az: az(),
        };
        let others = [
            Principal::Node {
                name: "n1".parse().unwrap(),
                tenant: "alpha".parse().unwrap(),
                az: az(),
            },
            Principal::Edge {
                name: "e".parse().unwrap(),
                az: az(),
            },
            Principal::KeyServer {
                name: "k".parse().unwrap(),
                az: az(),
                tenant: None,
            },
            gateway("r1"),
            gateway("r3"),
        ];
        // r1 has b1, which serves alpha too but not this service, and b3 of r3 serves none.
        assert!(visible(&certificate, &gateway("r2"), &placement));
        for other in others {
            assert!(!visible(&certificate, &other, &placement), "{other:?}");
        }
    }

    /// Returns the zero-trust resources of tenant `name`, one of each kind. Their scopes depend
    /// only on the tenant and the kind, so that all other values are arbitrary.
    fn zero_trust(name: &str) -> Vec<Resource> {
        use canal_model::authorization as a;
        use canal_model::trust as t;
        let tenant = || TenantName::new(name).unwrap();
        let key = a::PolicyKey {
            tenant: tenant(),
            namespace: "shop".parse().unwrap(),
            name: "p".parse().unwrap(),
        };
        let service: ServiceKey = format!("{name}/shop/a").parse().unwrap();
        let target = || a::PolicyTarget::Tenant;
        vec![
            Resource::Bundle(t::TrustBundle {
                tenant: tenant(),
                trust_domain: "x.example".parse().unwrap(),
                roots: vec![],
                revoked: vec![],
                blocked: vec![],
                federated: false,
            }),
            Resource::KeyServer(t::KeyServer {
                tenant: tenant(),
                name: "own".parse().unwrap(),
                addresses: vec![],
            }),
            Resource::Authorizer(a::Authorizer {
                key: key.clone(),
                service: service.clone(),
                port: 1,
                timeout: std::time::Duration::from_secs(1),
                fail_open: false,
                headers: vec![],
                body_bytes: 0,
            }),
            Resource::Authorization(a::Authorization {
                key: key.clone(),
                target: target(),
                action: a::AuthorizationAction::Deny,
                rules: vec![],
                dry_run: false,
                broken: None,
            }),
            Resource::Authentication(a::Authentication {
                key: key.clone(),
                target: target(),
                rules: vec![],
                broken: None,
            }),
            Resource::PeerAuthentication(a::PeerAuthentication {
                key,
                target: target(),
                mode: None,
                ports: Default::default(),
                created: 0,
            }),
            Resource::Termination(t::Termination {
                service,
                port: 443,
                certificate: t::TerminationCertificate::Mesh,
                clients: t::ClientCertificates::None,
                required: true,
                broken: None,
            }),
            Resource::Entitlement(t::Entitlement {
                tenant: tenant(),
                requester: t::KeyRequester::Node("n1".parse().unwrap()),
                identities: vec![],
            }),
        ]
    }

    /// Returns subscribers, and the security resources that each may see of the tenants `alpha` and
    /// `beta`.
    fn subscriber_cases() -> Vec<(&'static str, Principal, String)> {
        let az = || "az1".parse().unwrap();
        let node = |tenant: &str| Principal::Node {
            name: "n1".parse().unwrap(),
            tenant: tenant.parse().unwrap(),
            az: az(),
        };
        let keys = |tenant: Option<&str>| Principal::KeyServer {
            name: "k".parse().unwrap(),
            az: az(),
            tenant: tenant.map(|t| t.parse().unwrap()),
        };
        let gateway = "Bundle alpha, KeyServer alpha, Authorizer alpha, Authorization alpha, Authentication alpha, \
                       PeerAuthentication alpha, Termination alpha";
        vec![
            (
                "a node",
                node("alpha"),
                "Bundle alpha, Authorization alpha, PeerAuthentication alpha".to_owned(),
            ),
            (
                "a node of the other tenant",
                node("beta"),
                "Bundle beta, Authorization beta, PeerAuthentication beta".to_owned(),
            ),
            (
                "a gateway of one",
                Principal::Gateway {
                    name: "r1".parse().unwrap(),
                    az: az(),
                },
                gateway.to_owned(),
            ),
            (
                "a gateway of both",
                Principal::Gateway {
                    name: "r2".parse().unwrap(),
                    az: az(),
                },
                format!("{gateway}, {}", gateway.replace("alpha", "beta")),
            ),
            (
                "a gateway of neither",
                Principal::Gateway {
                    name: "r3".parse().unwrap(),
                    az: az(),
                },
                String::new(),
            ),
            (
                "the provider's key server",
                keys(None),
                "Bundle alpha, Entitlement alpha, Bundle beta, Entitlement beta".to_owned(),
            ),
            (
                "a tenant's key server",
                keys(Some("beta")),
                "Bundle beta, Entitlement beta".to_owned(),
            ),
            (
                "a key server of a tenant that is not there",
                keys(Some("gamma")),
                String::new(),
            ),
            (
                "an edge",
                Principal::Edge {
                    name: "e".parse().unwrap(),
                    az: az(),
                },
                String::new(),
            ),
            (
                "an operator",
                Principal::Operator {
                    name: "root".parse().unwrap(),
                    tenant: None,
                },
                String::new(),
            ),
        ]
    }

    /// Returns the resources of one tenant without gateway replicas that the principal receives.
    fn received(
        tenant: &str,
        resources: Vec<Resource>,
        principal: &Principal,
        placement: &TierPlacement,
    ) -> Vec<Resource> {
        let claims = TenantClaims {
            tenant: TenantName::new(tenant).unwrap(),
            isolation: None,
            gateways: vec![],
        };
        if !admits(&claims, principal, placement) {
            return Vec::new();
        }
        let visible = |resource: &Resource| visible(resource, principal, placement);
        resources.into_iter().filter(visible).collect()
    }

    #[test]
    fn each_subscriber_gets_the_policies_of_its_scope() {
        let cases = subscriber_cases();
        let placement = tier_placement();
        for (what, principal, want) in cases {
            let mut seen = Vec::new();
            for name in ["alpha", "beta"] {
                seen.extend(received(name, zero_trust(name), &principal, &placement));
            }
            let got: Vec<String> = seen
                .iter()
                .filter_map(|r| r.tenant().map(|t| format!("{:?} {t}", r.kind())))
                .collect();
            assert_eq!(got.join(", "), want, "{what}");
            assert_eq!(
                admits_provider(&principal),
                !matches!(principal, Principal::Operator { .. }),
                "{what}"
            );
            let (tenant, trust_domain) = canal_model::identity::components();
            let own = canal_model::trust::TrustBundle {
                tenant,
                trust_domain,
                roots: vec![],
                revoked: vec![],
                blocked: vec![],
                federated: false,
            };
            let has_certificate = !matches!(
                principal,
                Principal::Edge { .. } | Principal::Operator { .. }
            );
            assert_eq!(
                visible(&Resource::Bundle(own), &principal, &placement),
                has_certificate,
                "{what}"
            );
        }
    }

    #[test]
    fn subscribers_see_only_their_own_part_of_the_tier() {
        let gateway = |name: &str, az: &str| Principal::Gateway {
            name: name.parse().unwrap(),
            az: az.parse().unwrap(),
        };
        let edge = |az: &str| Principal::Edge {
            name: "e".parse().unwrap(),
            az: az.parse().unwrap(),
        };
        let node = |tenant: &str| Principal::Node {
            name: "n1".parse().unwrap(),
            tenant: tenant.parse().unwrap(),
            az: "az1".parse().unwrap(),
        };
        let alpha = "Service alpha/shop/a, Address alpha/shop/a@az1, Address alpha/shop/a@az2";
        let direct = |of: &str, name: &str| format!("{of}, DirectEndpoint {name}/shop/a-0");
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
            ("a replica of a backend without services", gateway("r3", "az1"), "Replica r1, Replica r2".into()),
            ("a replica that is not registered", gateway("r9", "az1"), "Replica r1, Replica r2".into()),
            (
                "an edge: its AZ of all tenants, no services",
                edge("az1"),
                "Node alpha/n1, Address alpha/shop/a@az1, Table alpha/shop/a@az1, Node beta/n1, Address beta/shop/a@az1, \
                 Table beta/shop/a@az1, Replica r1, Replica r2"
                    .into(),
            ),
            ("an edge of an AZ that is no home AZ", edge("az7"), "Node alpha/n1, Node beta/n1, Replica r1, Replica r2".into()),
            ("a node: its tenant's addresses", node("alpha"), direct(alpha, "alpha")),
            ("a node of the other tenant at the same addresses", node("beta"), direct(beta, "beta")),
            ("an operator", Principal::Operator { name: "root".parse().unwrap(), tenant: None }, String::new()),
        ];
        // Nodes of both tenants have the same address, so only the scope separates them.
        let placement = tier_placement();
        for (what, principal, want) in cases {
            let mut seen = Vec::new();
            for (name, n) in [("alpha", 1), ("beta", 2)] {
                seen.extend(received(name, tenant(name, n), &principal, &placement));
            }
            if admits_provider(&principal) {
                let replicas = [replica("r1", 1, "b1", "az1"), replica("r2", 2, "b2", "az2")];
                seen.extend(
                    replicas
                        .into_iter()
                        .filter(|r| visible(r, &principal, &placement)),
                );
            }
            // Resources of the provider come last, as in the expected texts.
            seen.sort_by_key(|r| (r.tenant().is_none(), r.tenant().cloned(), r.kind()));
            let got: Vec<String> = seen
                .iter()
                .map(|r| format!("{:?} {}", r.kind(), r.name()))
                .collect();
            assert_eq!(got.join(", "), want, "{what}");
        }
    }
}
