//! Resolves names, merges objects and settles conflicts: from independent documents to a tenant in
//! which every reference is either valid or refused. `precedence` decides which rule wins, and
//! `build` makes the IR. Start at [`resolve`].

mod addresses;
mod backend_filters;
mod connection_rules;
mod delegate;
mod destination;
mod direct;
mod gateway_replica;
mod grpc_route;
mod http_route;
mod ingress;
mod listener_filters;
mod load_balancer;
mod manual_endpoints;
mod node;
mod offload_preference;
mod pattern_costs;
mod relay_route;
mod route_answers;
mod route_attempts;
mod route_authorizers;
mod route_cors;
mod route_effects;
mod route_faults;
mod route_fields;
mod route_filters;
mod route_mirrors;
mod route_parts;
mod route_point;
mod service;
mod subset;
mod tenant;
mod tenant_objects;
mod termination;
mod throttle;
mod tier;
mod traffic_priority;
mod trust;
mod udp_route;
mod virtual_service;
mod workload;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::ids::{AzName, ServiceKey, TenantName};
use canal_model::policy::{Document, ObjectKind};
use canal_model::program::{GatewayReplica, Node, RouteRule, Service, Tenant, Throttle, Workload};
use canal_security_policies as policy;

use crate::CompileInput;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::direct::DirectSettings;
use crate::ir::Security;
use crate::precedence::seniority;
use crate::resource_budget::ResourceBudget;
use addresses::AddressOwners;
use canal_ir::preferences::{OffloadIr, PriorityIr};
use destination::DestinationIndex;
pub(crate) use ingress::Ingress;
use offload_preference::PreferenceReferences;
pub(crate) use route_fields::parent_service;
use route_parts::TenantRoutes;
use subset::Subsets;
use tenant_objects::TenantObjects;

/// A tenant of which all references are valid, so that later stages need no lookup that can fail.
pub(crate) struct ResolvedTenant {
    /// The tenant; `None` without a valid Tenant object: then nothing may be published.
    pub(crate) tenant: Option<Tenant>,
    pub(crate) gateway_replicas: Vec<GatewayReplica>,
    pub(crate) services: BTreeMap<ServiceKey, Service>,
    pub(crate) workloads: Vec<Workload>,
    /// Nodes of the tenant. This field and the next two are only filled on the cloud tier.
    pub(crate) nodes: Vec<Node>,
    pub(crate) throttles: Vec<Throttle>,
    pub(crate) homes: BTreeMap<ServiceKey, AzName>,
    pub(crate) direct: DirectSettings,
    /// Route rules in no particular order. All parents are in `services`, or stand for a Gateway.
    pub(crate) rules: Vec<RouteRule>,
    /// Listeners of Gateways; the rules of the routes on them are in `rules` too.
    pub(crate) ingress: Ingress,
    pub(crate) security: Security,
    pub(crate) offload_preferences: Vec<OffloadIr>,
    pub(crate) traffic_priorities: Vec<PriorityIr>,
}

/// Resolves all objects of a tenant. Resolving never fails; see the head of the crate. Once the
/// budget is exceeded, nothing more is added.
pub(crate) fn resolve(
    input: &CompileInput<'_>,
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) -> ResolvedTenant {
    let corpus = TenantObjects::collect(input, report);
    let tenant = tenant::resolve(input.tenant, &corpus.tenants, report);
    // Gateways claim addresses before services, and services before pods: the order of the calls is
    // the order of precedence.
    let mut addresses = AddressOwners::default();
    let gateway_replicas = gateway_replica::resolve(
        input.tenant,
        &corpus.gateway_replicas,
        &mut addresses,
        report,
    );
    let mut services = service::resolve(input, &corpus.services, &mut addresses, report);
    let homes = tier::resolve(input, tenant.as_ref(), &corpus, &mut services, report);
    let direct = direct::resolve(input.tenant, &corpus, report);
    let named = udp_route::resolve(input.tenant, &corpus, &services, report);
    let served = workload::ServedPorts {
        services: &services,
        named: &named,
        bytes_max: budget.bytes_left(),
    };
    let mut workloads = workload::resolve(
        input.tenant,
        tenant.as_ref(),
        &corpus,
        &served,
        &mut addresses,
        report,
    );
    // `all` ends at the first workload beyond the budget, which then counts as exceeded.
    workloads
        .iter()
        .all(|workload| budget.add_workload(workload));
    let is_on_tier = tenant
        .as_ref()
        .is_some_and(|it| !it.gateway_cidrs.is_empty());
    let destinations = (&services, is_on_tier);
    let (mut rules, mut ingress) = routes(input, &corpus, destinations, budget, report);
    budget.add_subsets(&rules, &workloads);
    load_balancer::resolve(
        input.tenant,
        &corpus.destination_rules,
        &mut services,
        budget,
        report,
    );
    if budget.is_exceeded() {
        // The remaining stages multiply these lists, and their result is not used.
        (workloads, rules, ingress) = Default::default();
    }
    let nodes = node::resolve(tenant.as_ref(), &corpus.nodes, report);
    let throttles = throttle::resolve(
        tenant.as_ref(),
        throttle::default_of(&corpus.tenants, input.tenant),
        &corpus.throttles,
        &services,
        report,
    );
    let resolved = (&services, &workloads[..], &ingress);
    // Without a valid Tenant object the tenant gets no resources, so none are resolved.
    let security = tenant
        .as_ref()
        .map(|tenant| security(input, tenant, &corpus, resolved, budget, report))
        .unwrap_or_default();
    let (offload_preferences, traffic_priorities) =
        preferences(tenant.as_ref(), &corpus, resolved, report);
    ResolvedTenant {
        tenant,
        gateway_replicas,
        services,
        workloads,
        nodes,
        throttles,
        homes,
        direct,
        rules,
        ingress,
        security,
        offload_preferences,
        traffic_priorities,
    }
}

/// Resolves preferences about where and in which order traffic is handled.
fn preferences(
    tenant: Option<&Tenant>,
    corpus: &TenantObjects<'_>,
    (services, workloads, ingress): (&BTreeMap<ServiceKey, Service>, &[Workload], &Ingress),
    report: &mut DiagnosticCollector,
) -> (Vec<OffloadIr>, Vec<PriorityIr>) {
    let Some(tenant) = tenant else {
        return Default::default();
    };
    let known = PreferenceReferences {
        tenant,
        services,
        workloads,
        listeners: &ingress.listeners,
    };
    (
        offload_preference::resolve(known, &corpus.offload_preferences, report),
        traffic_priority::resolve(known, &corpus.traffic_priorities, report),
    )
}

/// Resolves listeners and the rules of routes on them and on services.
fn routes(
    input: &CompileInput<'_>,
    corpus: &TenantObjects<'_>,
    (services, is_on_tier): (&BTreeMap<ServiceKey, Service>, bool),
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) -> (Vec<RouteRule>, Ingress) {
    let subsets = subset::resolve(input.tenant, &corpus.destination_rules, services, report);
    let destinations = DestinationIndex {
        tenant: input.tenant,
        services,
        subsets: &subsets,
        grants: &corpus.grants,
    };
    let mut ingress = ingress::resolve(input, corpus, is_on_tier, budget, report);
    // Before routes are attached: they do not attach to a listener that a filter closes.
    listener_filters::resolve(corpus, &destinations, &mut ingress, budget, report);
    let rules = rules(corpus, &destinations, &mut ingress, budget, report);
    (rules, ingress)
}

/// Resolves the rules of routes, and puts the routes on the listeners.
fn rules(
    corpus: &TenantObjects<'_>,
    destinations: &DestinationIndex<'_>,
    ingress: &mut Ingress,
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) -> Vec<RouteRule> {
    let routes = TenantRoutes::collect(corpus);
    let (mut rules, taken) =
        http_route::resolve(&routes.sourced(), destinations, ingress, budget, report);
    rules.extend(ingress.add_redirects(corpus, budget));
    rules.extend(virtual_service::resolve(
        &corpus.virtual_services,
        destinations,
        ingress,
        &taken,
        budget,
        report,
    ));
    rules
}

/// The objects that routes on Services refer to.
pub(crate) struct RouteReferences {
    services: BTreeMap<ServiceKey, Service>,
    subsets: Subsets,
    grants: Vec<Arc<Document>>,
}

impl RouteReferences {
    /// Collects what the routes of a tenant refer to. `services` are those of its last compile, whose
    /// load balancers no route reads.
    pub(crate) fn new(input: &CompileInput<'_>, services: BTreeMap<ServiceKey, Service>) -> Self {
        let of_kind = |kind| {
            let documents = input.documents.iter();
            let own = documents.filter(|it| it.object.kind() == kind).cloned();
            let mut own: Vec<Arc<Document>> = own.collect();
            own.sort_by(|a, b| seniority(a).cmp(&seniority(b)));
            own
        };
        let rules = of_kind(ObjectKind::DestinationRule);
        let rules = TenantObjects::of(rules.iter().map(AsRef::as_ref)).destination_rules;
        // The last compile has reported what is wrong with them.
        let mut reported = DiagnosticCollector::default();
        Self {
            subsets: subset::resolve(input.tenant, &rules, &services, &mut reported),
            services,
            grants: of_kind(ObjectKind::ReferenceGrant),
        }
    }

    /// Returns the rules of routes that name no Gateway. The rules are those that the tenant's compile
    /// would have for these routes, if every other route that one of them depends on is among them.
    pub(crate) fn rules_of(
        &self,
        tenant: &TenantName,
        mut routes: Vec<&Arc<Document>>,
        budget: &mut ResourceBudget,
        report: &mut DiagnosticCollector,
    ) -> Vec<RouteRule> {
        routes.sort_by(|a, b| seniority(a).cmp(&seniority(b)));
        let destinations = DestinationIndex {
            tenant,
            services: &self.services,
            subsets: &self.subsets,
            grants: &TenantObjects::of(self.grants.iter().map(AsRef::as_ref)).grants,
        };
        rules(
            &TenantObjects::of(routes.into_iter().map(AsRef::as_ref)),
            &destinations,
            &mut Ingress::default(),
            budget,
            report,
        )
    }
}

/// Resolves policies, trust and keys.
fn security(
    input: &CompileInput<'_>,
    tenant: &Tenant,
    corpus: &TenantObjects<'_>,
    (services, workloads, ingress): (&BTreeMap<ServiceKey, Service>, &[Workload], &Ingress),
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) -> Security {
    let key_servers = trust::key_servers(input.tenant, &corpus.key_servers, report);
    let terminations = termination::resolve(
        input.tenant,
        &corpus.terminations,
        services,
        &key_servers,
        report,
    );
    let authorizers =
        policy::authorizer::resolve(input.tenant, &corpus.external_authorizers, services, report);
    let targets = policy::PolicyTargets {
        services,
        listeners: &ingress.listeners,
    };
    let known = policy::authorization::PolicyReferences {
        tenant,
        targets,
        authorizers: &authorizers,
    };
    // Policies are checked against the paths that exist, and Terminations change what is observed.
    let reachable = policy::ReachablePods::new(services, workloads, &terminations);
    let authorizations = policy::authorization::resolve(
        &known,
        &corpus.authorization_policies,
        &reachable,
        budget,
        report,
    );
    let mut sets = policy::authentication::KeySets {
        fetched: input.jwks,
        required_uris: BTreeSet::new(),
    };
    let authentications = policy::authentication::resolve(
        input.tenant,
        &corpus.request_authentications,
        targets,
        (&mut sets, budget),
        report,
    );
    Security {
        peer_authentications: policy::peer::resolve(
            input.tenant,
            &corpus.peer_authentications,
            report,
        ),
        federations: trust::federations(tenant, &corpus.federations, report),
        entitlements: trust::entitlements(tenant, workloads, report),
        authorizers: authorizers.into_values().collect(),
        jwks: sets.required_uris,
        key_servers,
        authorizations,
        authentications,
        terminations,
    }
}
