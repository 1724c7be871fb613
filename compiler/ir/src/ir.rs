//! The compiler's intermediate representation of a tenant. It contains the route rules of each
//! service in match order. Golden files contain its text form ([`Ir`] implements `Display`).
//! Targets are in `lower`, and `oracle` defines the meaning.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use canal_model::authorization::{Authentication, Authorization, Authorizer, PeerAuthentication};
use canal_model::ids::{AzName, Namespace, ServiceKey, TenantName, TrustDomain};
use canal_model::program::{GatewayReplica, Node, Resource, Service, Tenant, Throttle, Workload};
use canal_model::route_table::RouteTable;
use canal_model::trust::{Entitlement, KeyServer, Termination};

use crate::claims::{GatewayClaim, Isolation, TenantClaims};
use crate::direct::DirectSettings;
use crate::ir_ingress::GatewayIr;
use crate::preferences::{OffloadIr, PriorityIr};
use crate::text;

/// The intermediate representation of one tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ir {
    pub tenant: Tenant,
    /// Gateway replicas of the tenant, sorted by name.
    pub gateway_replicas: Vec<GatewayReplica>,
    pub services: BTreeMap<ServiceKey, ServiceIr>,
    /// Gateways for clients outside the mesh, sorted by namespace and name.
    pub ingress: Vec<GatewayIr>,
    /// Workloads sorted by namespace and name.
    pub workloads: Vec<Workload>,
    /// Nodes sorted by name. This field and the next two are only filled on the cloud tier.
    pub nodes: Vec<Node>,
    /// Throttles: the tenant's own first, then sorted by service.
    pub throttles: Vec<Throttle>,
    /// Home AZs that services request.
    pub homes: BTreeMap<ServiceKey, AzName>,
    /// Settings of the direct path.
    pub direct: DirectSettings,
    pub security: Security,
    /// OffloadPreferences of the tenant, the oldest first.
    pub offload_preferences: Vec<OffloadIr>,
    /// TrafficPriorities, the oldest first: the order in which they decide.
    pub traffic_priorities: Vec<PriorityIr>,
}

/// Policies, trust and keys of a tenant; each list is sorted by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Security {
    pub key_servers: Vec<KeyServer>,
    pub authorizers: Vec<Authorizer>,
    pub authorizations: Vec<Authorization>,
    pub authentications: Vec<Authentication>,
    pub peer_authentications: Vec<PeerAuthentication>,
    pub terminations: Vec<Termination>,
    /// Entitlements of nodes; the controller makes those of gateways.
    pub entitlements: Vec<Entitlement>,
    pub federations: BTreeSet<(TenantName, TrustDomain)>,
    /// URIs of the JWT key sets that the policies need.
    pub jwks: BTreeSet<String>,
}

impl Security {
    /// Converts the lists to resources, in the order of kinds.
    pub fn into_resources(self) -> impl Iterator<Item = Resource> {
        let policies = self.authorizations.into_iter().map(Resource::Authorization);
        let first = self
            .key_servers
            .into_iter()
            .map(Resource::KeyServer)
            .chain(self.authorizers.into_iter().map(Resource::Authorizer));
        first
            .chain(policies)
            .chain(
                self.authentications
                    .into_iter()
                    .map(Resource::Authentication),
            )
            .chain(
                self.peer_authentications
                    .into_iter()
                    .map(Resource::PeerAuthentication),
            )
            .chain(self.terminations.into_iter().map(Resource::Termination))
            .chain(self.entitlements.into_iter().map(Resource::Entitlement))
    }
}

/// A service with its route rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceIr {
    pub service: Service,
    /// Route rules of all ports in match order. On each port the first match that holds decides. If
    /// none holds, the response is 404. If no rule applies to the port, all requests go to the
    /// service itself.
    pub routes: RouteTable,
    /// Route rules for the clients of one namespace. On each port for which a namespace has any, they
    /// replace `routes` for its clients.
    pub consumers: BTreeMap<Namespace, RouteTable>,
}

impl ServiceIr {
    /// Returns the rules for clients of a namespace at a port; `None` is a client without one.
    pub fn routes_for(&self, client: Option<&Namespace>, port: u16) -> &RouteTable {
        let own = client.and_then(|namespace| self.consumers.get(namespace));
        own.filter(|table| table.concerns(port))
            .unwrap_or(&self.routes)
    }

    /// Iterates over all tables: that for all clients, and those of namespaces.
    pub fn tables(&self) -> impl Iterator<Item = &RouteTable> {
        std::iter::once(&self.routes).chain(self.consumers.values())
    }
}

impl Ir {
    /// Returns what the tenant claims of what all tenants share.
    pub fn claims(&self) -> TenantClaims {
        let gateways = self.gateway_replicas.iter().map(|gateway| GatewayClaim {
            replica: gateway.replica.clone(),
            addresses: gateway.addresses.clone(),
        });
        TenantClaims {
            tenant: self.tenant.name.clone(),
            isolation: Some(Isolation {
                vni: self.tenant.vni,
                trust_domain: self.tenant.trust_domain.clone(),
                pod_cidrs: self.tenant.pod_cidrs.clone(),
                gateway_cidrs: self.tenant.gateway_cidrs.clone(),
            }),
            gateways: gateways.collect(),
        }
    }
}

/// Writes the rules of a table that apply to a port.
fn write_table(f: &mut fmt::Formatter<'_>, table: &RouteTable, port: u16) -> fmt::Result {
    let mut end = "the service";
    for (number, (rule, http)) in (1..).zip(table.on_port(port)) {
        // The gateway does not fall back to the service of a port that has rules.
        end = "404";
        let hosts = text::hosts(&rule.hosts);
        writeln!(f, "    {number} {hosts}{}", text::match_of_rule(rule, http))?;
    }
    writeln!(f, "    else => {end}")
}

impl fmt::Display for Ir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", text::tenant(&self.tenant))?;
        for replica in &self.gateway_replicas {
            writeln!(f, "{}", text::gateway_replica(replica))?;
        }
        for service in self.services.values() {
            writeln!(f, "\n{}", text::service(&service.service))?;
            for line in text::load_balancers(&service.service) {
                writeln!(f, "{line}")?;
            }
            for port in &service.service.ports {
                writeln!(f, "  {}", text::port(port))?;
                write_table(f, &service.routes, port.port)?;
                for (consumer, table) in &service.consumers {
                    if table.concerns(port.port) {
                        writeln!(f, "    for clients of {consumer}")?;
                        write_table(f, table, port.port)?;
                    }
                }
            }
        }
        for gateway in &self.ingress {
            write!(f, "\n{gateway}")?;
        }
        writeln!(f)?;
        for workload in &self.workloads {
            writeln!(f, "{}", text::workload(workload))?;
        }
        for node in &self.nodes {
            writeln!(f, "{}", text::node(node))?;
        }
        for throttle in &self.throttles {
            writeln!(f, "{}", text::throttle(throttle))?;
        }
        for (service, az) in &self.homes {
            writeln!(f, "home {service} az {az}")?;
        }
        for (service, port, path) in crate::direct::paths(self) {
            writeln!(f, "path {service}:{port} {path}")?;
        }
        for resource in self.security.clone().into_resources() {
            writeln!(f, "{}", text::resource(&resource))?;
        }
        for (tenant, trust_domain) in &self.security.federations {
            writeln!(f, "federation {tenant} {trust_domain}")?;
        }
        for uri in &self.security.jwks {
            writeln!(f, "key set {uri}")?;
        }
        for preference in &self.offload_preferences {
            writeln!(f, "{preference}")?;
        }
        for priority in &self.traffic_priorities {
            writeln!(f, "{priority}")?;
        }
        Ok(())
    }
}
