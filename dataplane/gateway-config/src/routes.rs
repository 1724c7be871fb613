//! A service's router, with the endpoint set and the filters of each backend of its rules. It
//! decides per request; names and filters are resolved once, when it is built. Compiling needs only
//! the rules and is the expensive part; resolving needs the builder and is cheap.
//!
//! Start with [`ServiceRoutes::decide`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use canal_model::ids::{Namespace, ServiceKey};
use canal_model::listener_filters::ListenerFilter;
use canal_model::program::{
    BackendTarget, HttpMatch, IngressGateway, Labels, PathMatch, RouteAction, RouteKey, RouteRule,
};
use canal_model::route_table::{RouteTable, by_consumer};
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
    /// One router, or those of a Gateway's hosts. Those of `consumers` are behind them.
    routers: Box<[Router]>,
    /// Namespaces with routes for their own clients, sorted by name. Each has a router, in this order.
    consumers: Box<[Namespace]>,
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
        let (of_all, of_consumers) = by_consumer(table.rules().iter().cloned());
        let (listeners, mut built) = match gateway {
            // Nearly every service has no other rules; its table is ready.
            None if of_consumers.is_empty() => (None, vec![build_or_refuse(&table)]),
            None => (None, vec![build_or_refuse(&RouteTable::new(of_all))]),
            Some(gateway) => {
                let (listeners, tables) = ListenerIndex::new(gateway, &of_all);
                (
                    Some(listeners),
                    tables.iter().map(build_or_refuse).collect(),
                )
            }
        };
        let (consumers, of_consumers): (Vec<_>, Vec<_>) = of_consumers.into_iter().unzip();
        let of_consumers = of_consumers.into_iter().map(RouteTable::new);
        built.extend(of_consumers.map(|table| build_or_refuse(&table)));
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
            consumers: consumers.into(),
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
    /// Ports to which rules for all clients apply.
    any_port: bool,
    ports: SmallVec<[u16; 4]>,
}

/// How the clients of one namespace are routed at a port, in place of all other clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerPort {
    pub namespace: Namespace,
    /// True if the routes match more of the path than `/`.
    pub routed_by_path: bool,
    /// True if the routes depend on attributes of the client.
    pub routed_by_client: bool,
    /// Index of the router.
    router: usize,
}

impl ConsumerPort {
    /// Returns the entry of a namespace; `None` if its clients are routed as all others.
    pub fn find<'a>(all: &'a [Self], namespace: &str) -> Option<&'a Self> {
        let at = all.binary_search_by(|it| it.namespace.as_str().cmp(namespace));
        at.ok().map(|at| &all[at])
    }
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
                _ if rule.consumer.is_some() => {}
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

    /// Returns how the clients of each namespace with routes of its own for a port are routed there,
    /// sorted by namespace.
    pub(super) fn consumers(&self, port: u16) -> Box<[ConsumerPort]> {
        let first = self.first_of_consumers();
        let routers = (first..).zip(&self.compiled.routers[first..]);
        let own = routers.zip(&self.compiled.consumers);
        let own = own.filter_map(|((at, router), namespace)| {
            let mut rules = router.rules().iter();
            let concerns = rules.any(|rule| rule.parent_port.is_none_or(|own| own == port));
            concerns.then(|| ConsumerPort {
                namespace: namespace.clone(),
                routed_by_path: router.reads_path(port),
                routed_by_client: router.reads_client(port),
                router: at,
            })
        });
        own.collect()
    }

    /// Returns the index of the first router for clients of one namespace.
    fn first_of_consumers(&self) -> usize {
        self.compiled.routers.len() - self.compiled.consumers.len()
    }

    /// True if a rule for all clients applies to this port; otherwise their requests go to the port's own
    /// endpoints.
    pub fn concern(&self, port: u16) -> bool {
        let listeners = self.compiled.listeners.as_ref();
        listeners.is_some_and(|it| it.has_port(port))
            || self.any_port
            || self.ports.binary_search(&port).is_ok()
    }

    /// True if a rule for all clients of this port matches more of the path than `/`.
    pub fn reads_path(&self, port: u16) -> bool {
        let mut routers = self.compiled.routers[..self.first_of_consumers()].iter();
        routers.any(|router| router.reads_path(port))
    }

    /// True if a rule for all clients of this port depends on an attribute of the client.
    pub fn reads_client(&self, port: u16) -> bool {
        let mut routers = self.compiled.routers[..self.first_of_consumers()].iter();
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

    /// Routes a request to this port, and returns the rule that matched. The client has no routes of
    /// its own. `random` selects among weighted backends.
    pub fn decide<R: RoutableRequest>(
        &self,
        port: u16,
        request: &R,
        random: u64,
    ) -> (RouteOutcome, Option<MatchedRule<'_>>) {
        self.decide_for(None, port, request, random)
    }

    /// Routes a request as [`ServiceRoutes::decide`] does, or by the routes of the client's namespace.
    #[inline]
    pub fn decide_for<R: RoutableRequest>(
        &self,
        consumer: Option<&ConsumerPort>,
        port: u16,
        request: &R,
        random: u64,
    ) -> (RouteOutcome, Option<MatchedRule<'_>>) {
        let find = |at: usize| Some((at, self.compiled.routers[at].find(port, request)?));
        let found = match (&self.compiled.listeners, consumer) {
            (_, Some(consumer)) => find(consumer.router),
            (None, None) => find(0),
            (Some(listeners), None) => listeners.find(port, request.host(), find),
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

    fn rule(consumer: Option<&str>) -> RouteRule {
        let http = HttpMatch {
            precedence: crate::testing::first_precedence(),
            path: PathMatch::Exact("/x".into()),
            method: None,
            headers: vec![],
            query: vec![],
        };
        RouteRule {
            key: RouteKey {
                tenant: "t".parse().unwrap(),
                kind: "HTTPRoute".into(),
                namespace: consumer.unwrap_or("ns").parse().unwrap(),
                name: "r".parse().unwrap(),
                rule: "0".into(),
            },
            parent: key("s"),
            parent_port: Some(80),
            consumer: consumer.map(|namespace| namespace.parse().unwrap()),
            hosts: vec![],
            matches: vec![http],
            action: RouteAction::Split(vec![]),
            filters: None,
            attempts: None,
            faults: None,
            cors: None,
            mirrors: Vec::new(),
        }
    }

    #[test]
    fn a_service_whose_compilation_panics_refuses_every_request() {
        let table = RouteTable::new(vec![Arc::new(rule(None))]);
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

    /// Routes for the clients of one namespace cannot close the Service for all others.
    #[test]
    fn a_table_whose_compilation_panics_refuses_only_its_own_clients() {
        let rules = [None, Some("front"), Some("back")].map(|it| Arc::new(rule(it)));
        let table = RouteTable::new(rules.into());
        let is_broken = |table: &RouteTable| {
            let consumer = table.rules()[0].consumer.as_ref();
            consumer.is_some_and(|it| it.as_str() == "front")
        };
        let compiled = CompiledRoutes::compile_with(key("s"), table, None, |table| {
            assert!(!is_broken(table), "a fault");
            Router::build(table, &RouterLimits::DEFAULT)
        });
        let routes =
            ServiceRoutes::resolve(Arc::new(compiled), FilterChain::default(), &mut NoTargets);
        let consumers = routes.consumers(80);
        let decided = |client: &str, port| {
            let consumer = ConsumerPort::find(&consumers, client);
            routes.decide_for(consumer, port, &REQUEST, 0).0
        };
        // The rules match another path than the request's.
        assert_eq!(decided("back", 80), RouteOutcome::Nowhere);
        assert_eq!(decided("other", 80), RouteOutcome::Nowhere);
        assert!(matches!(
            decided("front", 80),
            RouteOutcome::Refuse {
                status: UNCOMPILED_STATUS,
                ..
            }
        ));
        // The rule of this namespace is for one port; a broken table has lost that.
        assert_eq!(routes.consumers(81).len(), 1);
        assert!(!routes.concern(81) && routes.concern(80));
    }
}
