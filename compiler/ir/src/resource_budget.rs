//! Counts the size of a tenant's resources while they are compiled, so that the compiler stops as
//! soon as they exceed their limit. The controller computes the limit from the tenant's shares.
//! Start at [`ResourceBudget`].

use std::collections::{BTreeSet, HashMap};

use canal_model::authorization::{AttributeMatch, Authentication, Authorization};
use canal_model::certificate::{CaCertificates, ServingCertificate};
use canal_model::ids::ServiceKey;
use canal_model::listener_filters::ListenerFilter;
use canal_model::program::{
    Backend, BackendTarget, EndpointPort, HostMatch, Labels, RouteAction, RouteRule, Workload,
};

use crate::route_weight::{self, RouteWeights};

/// Bytes of one host of a route on a listener, without its text.
/// Nobody measured it alone; it is twice that of a match in the tables of a host
/// (`HOST_ENTRY_BYTES`).
const ATTACHED_HOST_BYTES: u64 = 256;

/// Bytes of an endpoint set of a gateway and of its views in the workers, without its endpoints.
/// Nobody measured it alone. It has to be too high rather than too low, because the sum protects
/// the gateway's memory.
const SET_BYTES: u64 = 4096;
/// Bytes of an endpoint in one endpoint set of a gateway.
/// Chosen like [`SET_BYTES`].
const SET_ENDPOINT_BYTES: u64 = 128;

/// Size of one tenant's resources, or the limit on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CompiledSize {
    /// Bytes of the resources as data planes receive them.
    pub bytes: u64,
    /// Number of resources that were compiled.
    pub resources: u64,
    /// Bytes of the route tables that a gateway builds of the resources.
    pub route_table_bytes: u64,
}

impl CompiledSize {
    /// The size that nothing exceeds.
    pub const UNLIMITED: Self = Self {
        bytes: u64::MAX,
        resources: u64::MAX,
        route_table_bytes: u64::MAX,
    };

    /// Returns whether one of the amounts is larger than that of `budget`.
    pub fn exceeds(&self, budget: &Self) -> bool {
        self.bytes > budget.bytes
            || self.resources > budget.resources
            || self.route_table_bytes > budget.route_table_bytes
    }
}

/// Limit on the size of the resources, and a lower bound of the size of those that exist so far.
pub struct ResourceBudget {
    budget: CompiledSize,
    used: CompiledSize,
    weights: RouteWeights,
    /// Comparisons that merging delegates cost.
    comparisons: usize,
    has_refused: bool,
}

impl ResourceBudget {
    pub fn new(budget: CompiledSize) -> Self {
        Self {
            budget,
            used: CompiledSize::default(),
            weights: RouteWeights::default(),
            comparisons: 0,
            has_refused: false,
        }
    }

    /// Returns the limit that the resources must not exceed.
    pub fn limit(&self) -> CompiledSize {
        self.budget
    }

    /// Returns whether something was left out because it did not fit. More or fewer other resources
    /// would then change what is left out.
    pub fn has_refused(&self) -> bool {
        self.has_refused
    }

    /// Returns what the counted resources take. The bytes are a lower bound; only the encoded
    /// resources have the exact number.
    pub fn used(&self) -> CompiledSize {
        self.used
    }

    /// Records the comparisons that merging delegates cost, and whether there were too few for one.
    pub fn record_comparisons(&mut self, count: usize, are_exhausted: bool) {
        self.comparisons += count;
        self.has_refused |= are_exhausted;
    }

    /// Returns the comparisons that merging delegates cost.
    pub fn comparisons(&self) -> usize {
        self.comparisons
    }

    /// Returns whether compiling must stop, because the resources exceed the budget already.
    pub fn is_exceeded(&self) -> bool {
        self.used.exceeds(&self.budget)
    }

    /// Counts a route rule. Returns false if compiling must stop.
    pub fn add_rule(&mut self, rule: &RouteRule) -> bool {
        let consumer = rule.consumer.as_ref().map_or(0, |it| it.as_str().len());
        let texts = rule.key.rule.len()
            + rule.parent.name.as_str().len()
            + rule.key.name.as_str().len()
            + consumer;
        self.used.route_table_bytes += self.weights.add(rule);
        self.add_resource(texts)
    }

    /// Counts the endpoint sets of subsets that rules name: a gateway has one for each port of a
    /// service and each subset, with all endpoints of the subset. It reads all workloads of the
    /// service for each of them, so all count.
    pub fn add_subsets(&mut self, rules: &[RouteRule], workloads: &[Workload]) {
        let subsets = subsets_of(rules);
        if subsets.is_empty() {
            return;
        }
        let mut endpoints: HashMap<(&ServiceKey, u16), u64> = HashMap::new();
        for endpoint in workloads.iter().flat_map(|workload| &workload.endpoints) {
            *endpoints
                .entry((&endpoint.service, endpoint.port))
                .or_default() += 1;
        }
        for (service, port, _) in subsets {
            let count = endpoints.get(&(service, *port)).copied();
            let endpoints = SET_ENDPOINT_BYTES * count.unwrap_or_default();
            self.used.route_table_bytes += SET_BYTES + endpoints;
        }
    }

    /// Counts bytes of one more route table with rules that were counted before. Returns false, and
    /// counts nothing, if it does not fit.
    pub fn take_route_table(&mut self, bytes: u64) -> bool {
        let used = self.used.route_table_bytes.saturating_add(bytes);
        let fits = used <= self.budget.route_table_bytes;
        if fits {
            self.used.route_table_bytes = used;
        } else {
            self.has_refused = true;
        }
        fits
    }

    /// Counts the hosts of a route on a listener. Returns false if compiling must stop.
    pub fn add_attachment(&mut self, hosts: &[Option<HostMatch>]) -> bool {
        let bytes = hosts.iter().flatten().map(|host| match host {
            HostMatch::Exact(text) | HostMatch::Suffix(text) => text.len(),
        });
        let entries = ATTACHED_HOST_BYTES * hosts.len() as u64;
        self.used.route_table_bytes += entries + bytes.sum::<usize>() as u64;
        !self.is_exceeded()
    }

    /// Counts a workload with the ports that it serves. Returns false if compiling must stop.
    pub fn add_workload(&mut self, workload: &Workload) -> bool {
        self.add_resource(workload.endpoints.iter().map(endpoint_bytes).sum())
    }

    /// Counts an authorization with the values that it compares. Returns false if compiling must
    /// stop.
    pub fn add_authorization(&mut self, policy: &Authorization) -> bool {
        let lists = policy
            .rules
            .iter()
            .flat_map(|rule| rule.from.iter().chain(&rule.to).chain([&rule.when]));
        let values = lists
            .flatten()
            .flat_map(|clause| clause.any.iter().chain(&clause.none));
        let texts = values.map(|value| match value {
            AttributeMatch::Exact(text)
            | AttributeMatch::Prefix(text)
            | AttributeMatch::Suffix(text)
            | AttributeMatch::Template(text) => text.len(),
            AttributeMatch::Present | AttributeMatch::Network(_) | AttributeMatch::Port(_) => 0,
        });
        self.add_resource(texts.sum())
    }

    /// Counts a request authentication with its key sets, which each target has its own copy of.
    /// Returns false if compiling must stop.
    pub fn add_authentication(&mut self, policy: &Authentication) -> bool {
        self.add_resource(
            policy
                .rules
                .iter()
                .filter_map(|rule| rule.keys.as_ref())
                .map(String::len)
                .sum(),
        )
    }

    /// Counts a certificate of a Gateway's listeners. Returns false if compiling must stop.
    pub fn add_certificate(&mut self, certificate: &ServingCertificate) -> bool {
        self.add_resource(certificate.bytes())
    }

    /// Counts certificates of authorities, which are a part of a Gateway's resource.
    pub fn add_authorities(&mut self, authorities: &CaCertificates) {
        self.used.bytes += authorities.pem.len() as u64;
    }

    /// Counts a filter of a listener: it is in the Gateway's resource, and gateways keep it beside the
    /// listener's routes. Returns false if compiling must stop.
    pub fn add_listener_filter(&mut self, filter: &ListenerFilter) -> bool {
        if let ListenerFilter::Authorize(authorizer) = filter {
            let bytes = route_weight::authorizer_bytes(authorizer);
            self.used.bytes += bytes;
            self.used.route_table_bytes += bytes;
        }
        !self.is_exceeded()
    }

    /// Returns the bytes that further resources may take.
    pub fn bytes_left(&self) -> u64 {
        self.budget.bytes.saturating_sub(self.used.bytes)
    }

    fn add_resource(&mut self, bytes: usize) -> bool {
        self.used.resources += 1;
        self.used.bytes += bytes as u64;
        !self.is_exceeded()
    }
}

/// Returns the subsets that rules name, each with the port of its service.
pub fn subsets_of<'r>(
    rules: impl IntoIterator<Item = &'r RouteRule>,
) -> BTreeSet<(&'r ServiceKey, &'r u16, &'r Labels)> {
    let targets = rules.into_iter().flat_map(|rule| {
        let backends: &[Backend] = match &rule.action {
            RouteAction::Split(backends) => backends,
            RouteAction::Answer(_) | RouteAction::Refuse { .. } => &[],
        };
        let backends = backends.iter().map(|backend| &backend.target);
        backends.chain(rule.mirrors.iter().map(|mirror| &mirror.target))
    });
    let subsets = targets.filter_map(|target| match target {
        BackendTarget::Service {
            service,
            port,
            subset,
        } => (!subset.is_empty()).then_some((service, port, subset)),
        _ => None,
    });
    subsets.collect()
}

/// Returns the bytes that a served port takes at least in the encoded workload.
pub fn endpoint_bytes(endpoint: &EndpointPort) -> usize {
    endpoint.service.namespace.as_str().len() + endpoint.service.name.as_str().len()
}
