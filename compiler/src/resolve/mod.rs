//! Names, merging, conflicts: from documents that know nothing of each other to a tenant in which every reference is either
//! good or refused. Which rule wins is `precedence`; what becomes of it is `build`.

mod addresses;
mod corpus;
mod destination;
mod gateway;
mod http_route;
mod node;
mod route_parts;
mod service;
mod subset;
mod tenant;
mod throttle;
mod tier;
mod virtual_service;
mod workload;

use std::collections::BTreeMap;

use canal_model::ids::{AzName, ServiceKey};
use canal_model::program::{Gateway, Node, RouteRule, Service, Tenant, Throttle, Workload};

use crate::Input;
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
}

/// Never fails; see the crate's root.
pub(crate) fn resolve(input: &Input<'_>, report: &mut Report) -> Checked {
    let corpus = Corpus::gather(input, report);
    let tenant = tenant::resolve(input.tenant, &corpus.tenants, report);
    let mut addresses = Addresses::default();
    let gateways = gateway::resolve(input.tenant, &corpus.gateways, &mut addresses, report);
    let mut services = service::resolve(input, &corpus.services, &mut addresses, report);
    let homes = tier::resolve(input, tenant.as_ref(), &corpus, &mut services, report);
    let workloads = workload::resolve(input.tenant, tenant.as_ref(), &corpus, &services, &mut addresses, report);
    let subsets = subset::resolve(input.tenant, &corpus.destination_rules, &services, report);
    let destinations = Destinations { tenant: input.tenant, services: &services, subsets: &subsets, grants: &corpus.grants };
    let (mut rules, taken) = http_route::resolve(&corpus.http_routes, &destinations, report);
    rules.extend(virtual_service::resolve(&corpus.virtual_services, &destinations, &taken, report));
    let nodes = node::resolve(tenant.as_ref(), &corpus.nodes, report);
    let throttles = throttle::resolve(tenant.as_ref(), &corpus.throttles, &services, report);
    Checked { tenant, gateways, services, workloads, nodes, throttles, homes, rules }
}
