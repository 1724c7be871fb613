//! A service's router, with the endpoint set and the filters of each backend of its rules. It
//! decides per request; names and filters are resolved once, when it is built. Compiling needs only
//! the rules and is the expensive part; resolving needs the builder and is cheap.
//!
//! Start with [`ServiceRoutes::decide`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use canal_model::ids::ServiceKey;
use canal_model::listener_filters::ListenerFilter;
use canal_model::program::{
    BackendTarget, HttpMatch, IngressGateway, Labels, PathMatch, RouteAction, RouteKey, RouteRule,
};
use canal_model::route_table::RouteTable;
use canal_router::{
    BackendChoice, BrokenMatch, PathSubstitution, RoutableRequest, RouteDecision, Router,
    RouterLimits, TextPatterns, pick,
};
use hashbrown::HashMap;
use smallvec::SmallVec;

use super::backend_filters::{self, BackendFilters};
use super::listeners::ListenerIndex;
use super::route_mirrors::{self, SelectedMirror};
use super::{EndpointSetId, FilterChain, MatchedFilters, route_cors};

/// Status for a backend that belongs to another tenant, which the author of the rule cannot have
/// intended. Gateway API prescribes 500 for a backend reference that is not valid.
const FOREIGN_STATUS: u16 = 500;

/// Assigns IDs to endpoint sets.
pub(super) trait TargetResolver {
    fn slot(&mut self, service: &ServiceKey, port: u16, subset: &Labels) -> EndpointSetId;
}

/// Status for a service whose routes could not be compiled because of a fault in this program. The
/// client made no mistake, and a retry would not help, so it is neither a 4xx nor 503.
const UNCOMPILED_STATUS: u16 = 500;

/// Compiled routes of one service. They refer to no endpoint set yet.
#[derive(Debug)]
pub(super) struct CompiledRoutes {
    pub(super) service: ServiceKey,
    /// Rules that were compiled, sorted by key.
    rules: Box<[Arc<RouteRule>]>,
    /// One router, or those of a Gateway's hosts.
    routers: Box<[Router]>,
    /// Listeners, if the service stands for a Gateway.
    listeners: Option<ListenerIndex>,
    /// Number of broken matches.
    faults: usize,
    /// Regular expressions of the rules' origins.
    origins: HashMap<RouteKey, TextPatterns>,
    /// Regular expressions of the rules that rewrite paths.
    substitutions: HashMap<RouteKey, Arc<PathSubstitution>>,
}

impl CompiledRoutes {
    /// Compiles the rules of a service, or of the Gateway for which it stands. A broken match is
    /// logged and fails closed.
    pub(super) fn compile(
        service: ServiceKey,
        table: RouteTable,
        gateway: Option<Arc<IngressGateway>>,
    ) -> Self {
        Self::compile_with(service, table, gateway, |table| {
            Router::build(table, &RouterLimits::DEFAULT)
        })
    }

    /// Compiles with `build`. If that panics, every request to the service is refused: the build of
    /// one service must not end the thread that builds all of them.
    fn compile_with(
        service: ServiceKey,
        table: RouteTable,
        gateway: Option<Arc<IngressGateway>>,
        build: impl Fn(&RouteTable) -> (Router, Vec<BrokenMatch>),
    ) -> Self {
        let build_or_refuse = |table: &RouteTable| {
            catch_unwind(AssertUnwindSafe(|| build(table))).unwrap_or_else(|_| {
                tracing::error!(%service, "gateway: compiling the routes of a service panicked, so all its requests are refused until its routes change");
                Router::build(&RouteTable::new(refuse_all(table.rules())), &RouterLimits::DEFAULT)
            })
        };
        let (listeners, built) = match gateway {
            None => (None, vec![build_or_refuse(&table)]),
            Some(gateway) => {
                let (listeners, tables) = ListenerIndex::new(gateway, table.rules());
                (
                    Some(listeners),
                    tables.iter().map(build_or_refuse).collect(),
                )
            }
        };
        let (routers, faults): (Vec<Router>, Vec<Vec<BrokenMatch>>) = built.into_iter().unzip();
        for fault in faults.iter().flatten() {
            tracing::warn!(%service, %fault, "gateway: a route is broken, so its requests get an error response");
        }
        let rules = table.rules().iter();
        let origins = rules.filter_map(|rule| Some((rule.key.clone(), compile_origins(rule)?)));
        let origins = origins.collect();
        let rules = table.rules().iter();
        let substitutions = rules.filter_map(|rule| {
            let filters = rule.filters.as_deref()?;
            let written = filters.rewrite.path_regex.as_ref()?;
            // Without it, requests are refused.
            let compiled = PathSubstitution::compile(written, &RouterLimits::DEFAULT)?;
            Some((rule.key.clone(), Arc::new(compiled)))
        });
        let substitutions = substitutions.collect();
        Self {
            service,
            rules: table.into_rules(),
            routers: routers.into(),
            listeners,
            faults: faults.iter().map(Vec::len).sum(),
            origins,
            substitutions,
        }
    }

    /// Returns whether these rules were compiled, for these listeners.
    pub(super) fn is_of(
        &self,
        rules: &[Arc<RouteRule>],
        gateway: Option<&Arc<IngressGateway>>,
    ) -> bool {
        *self.rules == *rules && self.listeners.as_ref().map(|it| &it.gateway) == gateway
    }

    /// Returns the number of broken matches.
    pub(super) fn faults(&self) -> usize {
        self.faults
    }

    /// Returns the cost of the compilation in bytes: the memory of the result, and for each broken
    /// match that of the largest regex. Such a match may have been compiled before it was rejected.
    pub(super) fn cost_bytes(&self) -> usize {
        let origins = self.origins.values().map(TextPatterns::memory_bytes);
        let substitutions = self.substitutions.values();
        let substitutions = substitutions.map(|it| it.memory_bytes());
        self.routers.iter().map(Router::memory_bytes).sum::<usize>()
            + origins.sum::<usize>()
            + substitutions.sum::<usize>()
            + self.faults * RouterLimits::DEFAULT.regex_bytes_max
    }
}

/// Compiles the regular expressions of a rule's origins, if it has any. What is too large matches no
/// origin.
fn compile_origins(rule: &RouteRule) -> Option<TextPatterns> {
    let mut patterns = route_cors::patterns(rule.cors.as_deref()?).peekable();
    patterns.peek()?;
    Some(TextPatterns::compile(patterns, &RouterLimits::DEFAULT))
}

/// Returns the first rule, so changed that it refuses every request to the service.
fn refuse_all(rules: &[Arc<RouteRule>]) -> Vec<Arc<RouteRule>> {
    let reason = "the routes of the service could not be compiled".to_string();
    let first = rules
        .first()
        .and_then(|rule| Some((rule, rule.matches.first()?)));
    let refusing = first.map(|(rule, http)| {
        let any = HttpMatch {
            path: PathMatch::StringPrefix(String::new()),
            method: None,
            headers: vec![],
            query: vec![],
            ..http.clone()
        };
        let action = RouteAction::Refuse {
            status: UNCOMPILED_STATUS,
            reason,
        };
        Arc::new(RouteRule {
            parent_port: None,
            hosts: vec![],
            matches: vec![any],
            action,
            filters: None,
            attempts: None,
            faults: None,
            cors: None,
            mirrors: Vec::new(),
            ..(**rule).clone()
        })
    });
    refusing.into_iter().collect()
}

/// Routes of one service, resolved to endpoint sets and filters.
#[derive(Debug)]
pub struct ServiceRoutes {
    compiled: Arc<CompiledRoutes>,
    /// Targets of each rule of each router, in the order of both.
    targets: Box<[Box<[RuleTargets]>]>,
    /// Filters of the requests to each backend, of each rule whose backends have any.
    backend_filters: HashMap<RouteKey, BackendFilters>,
    /// Endpoint sets of the mirrors of each rule that has any.
    mirrors: HashMap<RouteKey, Box<[Option<EndpointSetId>]>>,
    /// Filters that the service's own policies require; those of the rules were resolved from them.
    dialled: FilterChain,
    any_port: bool,
    ports: SmallVec<[u16; 4]>,
}

/// Resolves the mirrors of a service's rule. A mirror of another tenant gets no ID, and no copies.
fn resolve_mirrors(
    rule: &RouteRule,
    targets: &mut impl TargetResolver,
) -> Box<[Option<EndpointSetId>]> {
    let mirrors = rule.mirrors.iter().map(|mirror| match &mirror.target {
        BackendTarget::Service {
            service,
            port,
            subset,
        } if service.tenant == rule.parent.tenant => Some(targets.slot(service, *port, subset)),
        _ => None,
    });
    mirrors.collect()
}

/// Target of each backend of one rule; `None` for a backend that must not be used.
type RuleTargets = SmallVec<[Option<RouteTarget>; 2]>;

/// A backend of a rule, resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteTarget {
    pub slot: EndpointSetId,
    /// Position of the backend in its rule.
    pub(crate) backend: u16,
    /// Filters of the rule for requests to this backend. The endpoint set has those of its
    /// endpoints' policies.
    pub filters: FilterChain,
}

/// Result of routing a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteOutcome {
    /// The request goes to this backend.
    Target(RouteTarget),
    /// The gateway answers the request itself; [`MatchedRule::filters`] makes the answer.
    Answer,
    /// The gateway responds with an error.
    Refuse { status: u16, reason: String },
    /// No rule matches the request.
    Nowhere,
}

/// The rule that matched a request.
#[derive(Debug, Clone, Copy)]
pub struct MatchedRule<'a> {
    pub rule: &'a Arc<RouteRule>,
    match_index: usize,
}

impl ServiceRoutes {
    /// Iterates over the endpoint sets of all rules, once for each place that names one.
    pub(crate) fn endpoint_sets(&self) -> impl Iterator<Item = EndpointSetId> {
        let of_rules = self.targets.iter().flatten().flatten().flatten();
        let mirrors = self.mirrors.values().flatten().flatten();
        of_rules.map(|target| target.slot).chain(mirrors.copied())
    }

    /// Resolves the backends of compiled routes. `dialled` are the filters that the service's own
    /// policies require.
    pub(super) fn resolve(
        compiled: Arc<CompiledRoutes>,
        dialled: FilterChain,
        targets: &mut impl TargetResolver,
    ) -> Self {
        let (mut any_port, mut ports) = (false, SmallVec::new());
        let mut targets_of = |rule: &RouteRule| -> RuleTargets {
            match rule.parent_port {
                None => any_port = true,
                Some(port) => ports.push(port),
            }
            let backends = match &rule.action {
                RouteAction::Split(backends) => backends.as_slice(),
                RouteAction::Answer(_) | RouteAction::Refuse { .. } => &[],
            };
            let backends = backends.iter().enumerate().map(|(at, b)| match &b.target {
                // A backend of another tenant gets no ID, so requests that select it are refused.
                BackendTarget::Service {
                    service,
                    port,
                    subset,
                } if service.tenant == compiled.service.tenant => Some(RouteTarget {
                    slot: targets.slot(service, *port, subset),
                    // The compiler permits far fewer backends.
                    backend: u16::try_from(at).unwrap_or(u16::MAX),
                    filters: FilterChain::of_rule(rule, (at, b), service, dialled),
                }),
                _ => None,
            });
            backends.collect()
        };
        let routers = compiled.routers.iter();
        let resolved = routers
            .map(|router| router.rules().iter().map(|rule| targets_of(rule)).collect())
            .collect();
        // Several rules may have one port; `concern` searches the sorted list.
        ports.sort_unstable();
        ports.dedup();
        let rules = compiled.rules.iter();
        let filtered = rules.filter_map(|rule| {
            let filters = backend_filters::resolve(rule)?;
            Some((rule.key.clone(), filters))
        });
        let backend_filters = filtered.collect();
        let rules = compiled.rules.iter();
        let mirrored = rules.filter(|rule| !rule.mirrors.is_empty());
        let mirrors = mirrored
            .map(|rule| (rule.key.clone(), resolve_mirrors(rule, targets)))
            .collect();
        Self {
            compiled,
            targets: resolved,
            backend_filters,
            mirrors,
            dialled,
            any_port,
            ports,
        }
    }

    /// Returns whether the routes were compiled from these rules, sorted by key, for these
    /// listeners.
    pub(super) fn is_of(
        &self,
        rules: &[Arc<RouteRule>],
        gateway: Option<&Arc<IngressGateway>>,
    ) -> bool {
        self.compiled.is_of(rules, gateway)
    }

    /// Returns the compiled routes, to resolve them again.
    pub(super) fn compiled(&self) -> &Arc<CompiledRoutes> {
        &self.compiled
    }

    /// Returns the filters of the service's own policies, from which those of the rules were
    /// resolved.
    pub(super) fn dialled(&self) -> FilterChain {
        self.dialled
    }

    /// True if a rule applies to this port; otherwise requests go to the port's own endpoints.
    pub fn concern(&self, port: u16) -> bool {
        let listeners = self.compiled.listeners.as_ref();
        listeners.is_some_and(|it| it.has_port(port))
            || self.any_port
            || self.ports.binary_search(&port).is_ok()
    }

    /// True if a rule for this port matches more of the path than `/`.
    pub fn reads_path(&self, port: u16) -> bool {
        let mut routers = self.compiled.routers.iter();
        routers.any(|router| router.reads_path(port))
    }

    /// True if a rule for this port depends on an attribute of the client.
    pub fn reads_client(&self, port: u16) -> bool {
        let mut routers = self.compiled.routers.iter();
        routers.any(|router| router.reads_client(port))
    }

    /// True if a request on a TLS connection belongs to another listener of the port than the
    /// connection, whose client sent this server name. The client must use another connection for
    /// the host (GEP-3567).
    pub fn is_misdirected(&self, port: u16, server_name: Option<&str>, host: &[u8]) -> bool {
        let listeners = self.compiled.listeners.as_ref();
        listeners.is_some_and(|it| it.is_misdirected(port, server_name, host))
    }

    /// Returns the filters that a request to this port passes before it is routed, if its listener has
    /// any.
    #[inline]
    pub fn listener_filters(&self, port: u16, host: &[u8]) -> Option<&Arc<[ListenerFilter]>> {
        self.compiled.listeners.as_ref()?.filters(port, host)
    }

    /// Routes a request to this port, and returns the rule that matched. `random` selects among
    /// weighted backends.
    pub fn decide<R: RoutableRequest>(
        &self,
        port: u16,
        request: &R,
        random: u64,
    ) -> (RouteOutcome, Option<MatchedRule<'_>>) {
        let find = |at: usize| Some((at, self.compiled.routers[at].find(port, request)?));
        let found = match &self.compiled.listeners {
            None => find(0),
            Some(listeners) => listeners.find(port, request.host(), find),
        };
        let Some((at, found)) = found else {
            return (RouteOutcome::Nowhere, None);
        };
        let refuse = |status: u16, reason: &str| RouteOutcome::Refuse {
            status,
            reason: reason.to_string(),
        };
        let outcome = match found.action() {
            RouteDecision::Refuse { status, reason } => refuse(status, reason),
            RouteDecision::Answer(_) => RouteOutcome::Answer,
            RouteDecision::Split(split) => match pick(split, random) {
                BackendChoice::Refuse { status, reason } => refuse(status, reason),
                BackendChoice::Backend { index: place, .. } => {
                    let known = self.targets[at]
                        .get(found.index)
                        .and_then(|targets| *targets.get(place)?);
                    known.map_or_else(
                        || refuse(FOREIGN_STATUS, "the backend is a service of another tenant"),
                        RouteOutcome::Target,
                    )
                }
            },
        };
        let matched = MatchedRule {
            rule: found.rule(),
            match_index: found.match_index,
        };
        (outcome, Some(matched))
    }

    /// Returns what a rule does with a request beside its action, for a target whose chain reads the
    /// rule; without a target, the gateway answers. `random` draws the copies.
    pub fn filters<R: RoutableRequest>(
        &self,
        matched: MatchedRule<'_>,
        target: Option<RouteTarget>,
        request: &R,
        random: impl FnMut() -> u64,
    ) -> Box<MatchedFilters> {
        let MatchedRule { rule, match_index } = matched;
        let mut filters = MatchedFilters::new(rule, match_index);
        if let Some(target) = target
            && let Some(of_rule) = self.backend_filters.get(&rule.key)
        {
            let of_backend = of_rule.get(usize::from(target.backend));
            filters = filters.with_backend(of_backend.cloned().flatten());
        }
        if let Some(substitution) = self.compiled.substitutions.get(&rule.key) {
            filters = filters.with_substitution(substitution.clone());
        }
        if rule.cors.is_some() {
            let patterns = self.compiled.origins.get(&rule.key);
            filters = filters.with_cors(patterns, request);
        }
        if !rule.mirrors.is_empty()
            && let Some(RouteTarget { backend, .. }) = target
            && let Some(targets) = self.mirrors.get(&rule.key)
        {
            let drawn = route_mirrors::draw(&rule.mirrors, usize::from(backend), random);
            let drawn = drawn.filter_map(|at| {
                Some(SelectedMirror {
                    target: targets.get(at).copied()??,
                })
            });
            filters = filters.with_mirrors(drawn.collect());
        }
        Box::new(filters)
    }

    pub fn rule_count(&self) -> usize {
        self.compiled.rules.len()
    }
}

#[cfg(test)]
mod tests {
    //! Tests of a service whose routes could not be compiled.

    use canal_model::program::RouteKey;

    use super::*;
    use crate::testing::{PlainRequest, key};

    const REQUEST: PlainRequest = PlainRequest {
        host: "other.example",
        method: "POST",
        path: "/anything",
    };

    struct NoTargets;

    impl TargetResolver for NoTargets {
        fn slot(&mut self, _: &ServiceKey, _: u16, _: &Labels) -> EndpointSetId {
            panic!("no backend is named")
        }
    }

    #[test]
    fn a_service_whose_compilation_panics_refuses_every_request() {
        let precedence = crate::testing::first_precedence();
        let http = HttpMatch {
            precedence,
            path: PathMatch::Exact("/x".into()),
            method: None,
            headers: vec![],
            query: vec![],
        };
        let (tenant, namespace, name) = (
            "t".parse().unwrap(),
            "ns".parse().unwrap(),
            "r".parse().unwrap(),
        );
        let rule = RouteRule {
            key: RouteKey {
                tenant,
                kind: "HTTPRoute".into(),
                namespace,
                name,
                rule: "0".into(),
            },
            parent: key("s"),
            parent_port: Some(80),
            hosts: vec![],
            matches: vec![http],
            action: RouteAction::Split(vec![]),
            filters: None,
            attempts: None,
            faults: None,
            cors: None,
            mirrors: Vec::new(),
        };
        let table = RouteTable::new(vec![Arc::new(rule)]);
        let compiled =
            CompiledRoutes::compile_with(key("s"), table.clone(), None, |_| panic!("a fault"));
        assert!(
            compiled.is_of(table.rules(), None),
            "the same rules are not compiled again"
        );
        let routes =
            ServiceRoutes::resolve(Arc::new(compiled), FilterChain::default(), &mut NoTargets);
        // The rule is of port 80, but the fault concerns the whole service.
        let RouteOutcome::Refuse { status, .. } = routes.decide(81, &REQUEST, 0).0 else {
            panic!("not refused")
        };
        assert_eq!((status, routes.concern(81)), (UNCOMPILED_STATUS, true));
    }
}
