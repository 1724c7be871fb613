//! Names, merging, conflicts: from documents that know nothing of each other to a tenant in which every reference is either
//! good or refused. Which rule wins is `precedence`; what becomes of it is `build`.

mod addresses;
mod corpus;
mod destination;
mod gateway;
mod http_route;
mod node;
mod policy;
mod route_parts;
mod service;
mod subset;
mod tenant;
mod termination;
mod throttle;
mod tier;
mod trust;
mod udp_route;
mod virtual_service;
mod workload;

use std::collections::{BTreeMap, BTreeSet};

use canal_model::ids::{AzName, ServiceKey};
use canal_model::program::{Gateway, Node, RouteRule, Service, Tenant, Throttle, Workload};

use crate::Input;
use crate::ir::Security;
use crate::report::Report;
use addresses::Addresses;
use corpus::Corpus;
use destination::Destinations;

/// A tenant whose references all hold. Nothing in it needs to be looked up again.
pub(crate) struct Checked {
    /// `None`: there is no valid Tenant object, so nothing may be sent out.
    pub(crate) tenant: Option<Tenant>,
    pub(crate) gateways: Vec<Gateway>,
    pub(crate) services: BTreeMap<ServiceKey, Service>,
    pub(crate) workloads: Vec<Workload>,
    /// Of the cloud tier, as are the two that follow.
    pub(crate) nodes: Vec<Node>,
    pub(crate) throttles: Vec<Throttle>,
    pub(crate) homes: BTreeMap<ServiceKey, AzName>,
    /// In no order; all parents are in `services`.
    pub(crate) rules: Vec<RouteRule>,
    pub(crate) security: Security,
}

/// Never fails; see the crate's root.
pub(crate) fn resolve(input: &Input<'_>, report: &mut Report) -> Checked {
    let corpus = Corpus::gather(input, report);
    let tenant = tenant::resolve(input.tenant, &corpus.tenants, report);
    let mut addresses = Addresses::default();
    let gateways = gateway::resolve(input.tenant, &corpus.gateways, &mut addresses, report);
    let mut services = service::resolve(input, &corpus.services, &mut addresses, report);
    let homes = tier::resolve(input, tenant.as_ref(), &corpus, &mut services, report);
    let named = udp_route::resolve(input.tenant, &corpus, &services, report);
    let workloads = workload::resolve(input.tenant, tenant.as_ref(), &corpus, &services, &named, &mut addresses, report);
    let subsets = subset::resolve(input.tenant, &corpus.destination_rules, &services, report);
    let destinations = Destinations { tenant: input.tenant, services: &services, subsets: &subsets, grants: &corpus.grants };
    let (mut rules, taken) = http_route::resolve(&corpus.http_routes, &destinations, report);
    rules.extend(virtual_service::resolve(&corpus.virtual_services, &destinations, &taken, report));
    let nodes = node::resolve(tenant.as_ref(), &corpus.nodes, report);
    let throttles =
        throttle::resolve(tenant.as_ref(), throttle::default_of(&corpus.tenants, input.tenant), &corpus.throttles, &services, report);
    let security = tenant.as_ref().map(|tenant| security(input, tenant, &corpus, &services, &workloads, report)).unwrap_or_default();
    Checked { tenant, gateways, services, workloads, nodes, throttles, homes, rules, security }
}

/// Policies, trust and keys.
fn security(
    input: &Input<'_>,
    tenant: &Tenant,
    corpus: &Corpus<'_>,
    services: &BTreeMap<ServiceKey, Service>,
    workloads: &[Workload],
    report: &mut Report,
) -> Security {
    let key_servers = trust::key_servers(input.tenant, &corpus.key_servers, report);
    let terminations = termination::resolve(input.tenant, &corpus.terminations, services, &key_servers, report);
    let authorizers = policy::authorizer::resolve(input.tenant, &corpus.external_authorizers, services, report);
    let known = policy::authorization::Known { tenant, services, authorizers: &authorizers };
    let ground = policy::Ground::new(services, workloads, &terminations);
    let authorizations = policy::authorization::resolve(&known, &corpus.authorization_policies, &ground, report);
    let mut sets = policy::authentication::KeySets { fetched: input.jwks, wanted: BTreeSet::new() };
    let authentications = policy::authentication::resolve(input.tenant, &corpus.request_authentications, services, &mut sets, report);
    Security {
        peer_authentications: policy::peer::resolve(input.tenant, &corpus.peer_authentications, report),
        federations: trust::federations(tenant, &corpus.federations, report),
        entitlements: trust::entitlements(tenant, workloads, report),
        authorizers: authorizers.into_values().collect(),
        jwks: sets.wanted,
        key_servers,
        authorizations,
        authentications,
        terminations,
    }
}
