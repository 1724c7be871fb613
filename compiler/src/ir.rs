//! The compiler's own form of a tenant: for each port of each service the matches in the order in which they are tried.
//! Its text ([`Ir`] displays itself) is what golden files hold. Targets are in `lower`, the meaning is in `oracle`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use canal_model::authorization::{Authentication, Authorization, Authorizer, PeerAuthentication};
use canal_model::ids::{AzName, ServiceKey, TenantName, TrustDomain};
use canal_model::program::{Gateway, HostMatch, HttpMatch, Node, Resource, RouteAction, RouteKey, Service, Tenant, Throttle, Workload};
use canal_model::trust::{Entitlement, KeyServer, Termination};

use crate::text;

/// One tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ir {
    pub tenant: Tenant,
    /// Sorted by replica.
    pub gateways: Vec<Gateway>,
    pub services: BTreeMap<ServiceKey, ServiceIr>,
    /// Sorted by namespace and name.
    pub workloads: Vec<Workload>,
    /// Sorted by name; only of the cloud tier, as are the two that follow.
    pub nodes: Vec<Node>,
    /// The tenant's own first, then sorted by service.
    pub throttles: Vec<Throttle>,
    /// Where the services that say so want to live.
    pub homes: BTreeMap<ServiceKey, AzName>,
    pub security: Security,
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
    /// Of nodes; those of gateways are the hub's.
    pub entitlements: Vec<Entitlement>,
    pub federations: BTreeSet<(TenantName, TrustDomain)>,
    /// URIs of key sets.
    pub jwks: BTreeSet<String>,
}

impl Security {
    /// In the order of kinds.
    pub fn into_resources(self) -> impl Iterator<Item = Resource> {
        let policies = self.authorizations.into_iter().map(Resource::Authorization);
        let first = self.key_servers.into_iter().map(Resource::KeyServer).chain(self.authorizers.into_iter().map(Resource::Authorizer));
        first
            .chain(policies)
            .chain(self.authentications.into_iter().map(Resource::Authentication))
            .chain(self.peer_authentications.into_iter().map(Resource::PeerAuthentication))
            .chain(self.terminations.into_iter().map(Resource::Termination))
            .chain(self.entitlements.into_iter().map(Resource::Entitlement))
    }
}

/// A service with its rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceIr {
    pub service: Service,
    /// Sorted by key.
    pub rules: Vec<RuleIr>,
    /// One for each port of the service, in its order.
    pub chains: Vec<Chain>,
}

/// One rule of a user's route object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleIr {
    pub key: RouteKey,
    /// `None`: every port.
    pub port: Option<u16>,
    /// Empty: any host.
    pub hosts: Vec<HostMatch>,
    /// Never empty.
    pub matches: Vec<HttpMatch>,
    pub action: RouteAction,
}

/// What is tried, one after the other, for a request on a port. The first match that holds decides; if none does, the answer
/// is 404. An empty chain sends everything to the service itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    pub port: u16,
    pub links: Vec<Link>,
}

/// A match of a rule, by their places in [`ServiceIr::rules`] and [`RuleIr::matches`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    pub rule: usize,
    pub place: usize,
}

impl ServiceIr {
    /// The rule and the match of a link of one of this service's chains.
    pub fn link(&self, link: Link) -> Option<(&RuleIr, &HttpMatch)> {
        let rule = self.rules.get(link.rule)?;
        Some((rule, rule.matches.get(link.place)?))
    }
}

impl fmt::Display for Ir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", text::tenant(&self.tenant))?;
        for gateway in &self.gateways {
            writeln!(f, "{}", text::gateway(gateway))?;
        }
        for service in self.services.values() {
            writeln!(f, "\n{}", text::service(&service.service))?;
            for (port, chain) in service.service.ports.iter().zip(&service.chains) {
                writeln!(f, "  {}", text::port(port))?;
                for (number, (rule, http)) in (1..).zip(chain.links.iter().filter_map(|link| service.link(*link))) {
                    let hosts = text::hosts(&rule.hosts);
                    writeln!(
                        f,
                        "    {number} {hosts}{} => {} [{}]",
                        text::http_match(http),
                        text::action(&rule.action),
                        text::origin(&rule.key)
                    )?;
                }
                let end = if chain.links.is_empty() { "the service" } else { "404" };
                writeln!(f, "    else => {end}")?;
            }
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
        for resource in self.security.clone().into_resources() {
            writeln!(f, "{}", text::resource(&resource))?;
        }
        for (tenant, trust_domain) in &self.security.federations {
            writeln!(f, "federation {tenant} {trust_domain}")?;
        }
        for uri in &self.security.jwks {
            writeln!(f, "key set {uri}")?;
        }
        Ok(())
    }
}
