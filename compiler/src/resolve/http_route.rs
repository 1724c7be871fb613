//! Resolves HTTPRoutes and GRPCRoutes on Services and on listeners of Gateways (Gateway API). The
//! routes of another namespace than their Service apply only to clients of that namespace, and
//! replace those of the Service's namespace there (GEP-1294). `grpc_route` resolves what only
//! GRPCRoutes have.

use std::collections::{BTreeMap, BTreeSet};

use canal_attachment::is_listener_parent;
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ServiceKey};
use canal_model::policy::gateway_api::{
    BackendRef, GrpcRule, HttpRouteMatch, HttpRule, ParentRef, PathCondition, PathConditionType,
    RelayRule, RouteBackendRef, ValueCondition, ValueConditionType,
};
use canal_model::policy::{Document, ObjectKind};
use canal_model::program::{
    AppProtocol, Backend, HostMatch, HttpMatch, PathMatch, RouteAction, RouteKey, RouteRule,
    Service, ServicePort, TextMatch, ValueMatch,
};

use super::destination::{DestinationIndex, RouteOrigin};
use super::ingress::Ingress;
use super::pattern_costs::PatternCosts;
use super::relay_route;
use super::route_effects::RouteEffects;
use super::route_fields::{
    FieldIssue, GatewayRegexBudget, RegexBudget, RuleContext, STATUS_BROKEN, STATUS_BROKEN_GRPC,
    conditions, header_name, parent_service, path, text,
};
use super::route_parts::{RouteParts, RuleList, yield_to_grpc};
use super::tenant_objects::Sourced;
use super::{backend_filters, grpc_route, route_answers};
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::{
    HOSTS_PER_ROUTE_MAX, MATCHES_PER_RULE_MAX, REGEXES_PER_SERVICE_BYTES_MAX, RULES_PER_ROUTE_MAX,
};
use crate::names;
use crate::precedence::{self, MatchSpecificity};
use crate::resource_budget::ResourceBudget;

/// The Service, and optionally port, that a route is attached to.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Parent {
    pub(super) service: ServiceKey,
    pub(super) port: Option<u16>,
    /// Namespace of the only clients to which the route applies there.
    pub(super) consumer: Option<Namespace>,
}

impl Parent {
    /// Returns the parent's route table that has the route.
    pub(super) fn table(&self) -> TableKey {
        (self.service.clone(), self.consumer.clone())
    }
}

/// A route table: that of a Service or Gateway for all clients, or for the clients of a namespace.
pub(super) type TableKey = (ServiceKey, Option<Namespace>);

/// The parents of a route, each with the reason why the route's rules refuse there: a field of the
/// reference may restrict what it means.
pub(super) type Parents = BTreeMap<Parent, Option<String>>;

/// Bytes of memory that the regular expressions of each route table may still use. Routes for the
/// clients of one namespace leave those for all clients their room.
type RegexBytesLeft = BTreeMap<TableKey, usize>;

/// The parts of a rule that do not depend on its parents.
pub(super) struct ResolvedRule {
    pub(super) matches: Vec<HttpMatch>,
    pub(super) action: RouteAction,
    pub(super) effects: RouteEffects,
}

/// Returns the rules of all routes, which are the oldest first, and the services that have any.
pub(crate) fn resolve(
    declared: &[Sourced<'_, RouteParts<'_>>],
    to: &DestinationIndex<'_>,
    ingress: &mut Ingress,
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) -> (Vec<RouteRule>, BTreeSet<ServiceKey>) {
    let mut rules = Vec::new();
    let mut taken = BTreeSet::new();
    let mut left = RegexBytesLeft::new();
    let mut costs = PatternCosts::default();
    let mut of_services: Vec<Parents> = Vec::with_capacity(declared.len());
    of_services.extend(declared.iter().map(|route| parents(route, to, report)));
    yield_to_grpc(declared, &mut of_services, to, report);
    for (route, mut parents) in declared.iter().zip(of_services) {
        let (gateways, mut closed) = ingress.attach(route, budget, report);
        // What is wrong with the rules of a route that applies nowhere is reported only if closed
        // listeners are the reason.
        if !(parents.is_empty() && gateways.is_empty()) {
            closed.clear();
        }
        let mut regexes = regex_budget(&parents, gateways.keys().chain(&closed), &left);
        regexes.costs = std::mem::take(&mut costs);
        let before = regexes.bytes_left;
        parents.extend(gateways.into_iter().map(|(service, fault)| {
            let parent = Parent {
                service,
                port: None,
                consumer: None,
            };
            (parent, fault)
        }));
        // Services with a broken route too: a VirtualService must not replace its refusal. It still
        // routes the clients that have no routes of their own.
        let of_all = parents.keys().filter(|parent| parent.consumer.is_none());
        taken.extend(of_all.map(|parent| parent.service.clone()));
        if parents.is_empty() && closed.is_empty() {
            costs = regexes.costs;
            continue;
        }
        attach(route, &parents, to, &mut regexes, report, &mut |rule| {
            let is_within = budget.add_rule(&rule);
            rules.push(rule);
            is_within
        });
        costs = regexes.costs;
        // The tenant's result is discarded, so the remaining routes are not compiled.
        if budget.is_exceeded() {
            break;
        }
        // The route uses as much of each parent's budget, and leaves the rest of it to other routes.
        let used = before - regexes.bytes_left;
        let tables: BTreeSet<TableKey> = parents.keys().map(Parent::table).collect();
        // Gateways are among them. What is left of theirs is replaced below.
        for table in tables {
            let rest = left.entry(table).or_insert(REGEXES_PER_SERVICE_BYTES_MAX);
            *rest = rest.saturating_sub(used);
        }
        let of_gateways = regexes.gateways.into_iter();
        left.extend(of_gateways.map(|budget| ((budget.gateway, None), budget.bytes_left)));
    }
    costs.record(budget);
    (rules, taken)
}

/// Returns the budget of the Service among the parents that has the least left, with those of the
/// Gateways.
fn regex_budget<'a>(
    services: &Parents,
    gateways: impl Iterator<Item = &'a ServiceKey>,
    left: &RegexBytesLeft,
) -> RegexBudget {
    let left_of = |table: &TableKey| {
        let known = left.get(table).copied();
        known.unwrap_or(REGEXES_PER_SERVICE_BYTES_MAX)
    };
    let tables = services.keys().map(Parent::table);
    let scarcest = tables.min_by_key(left_of);
    RegexBudget {
        // Without a Service, there are no copies that it would limit.
        bytes_left: scarcest.as_ref().map_or(0, left_of),
        copies: services.len(),
        service: scarcest.map_or_else(String::new, |(it, _)| {
            format!("{}/{}", it.namespace, it.name)
        }),
        gateways: gateways
            .map(|gateway| GatewayRegexBudget {
                gateway: gateway.clone(),
                bytes_left: left_of(&(gateway.clone(), None)),
                is_exceeded: false,
            })
            .collect(),
        costs: PatternCosts::default(),
    }
}

/// Reports the Gateways on which the regular expressions of a rule do not fit. Returns the reason
/// why the rule refuses on each.
fn without_room(
    document: &Document,
    field: &str,
    exceeded: Vec<ServiceKey>,
    report: &mut DiagnosticCollector,
) -> BTreeMap<ServiceKey, String> {
    let reasons = exceeded.into_iter().map(|gateway| {
        let problem = format!(
            "with this rule the regular expressions of {}/{} need more than {REGEXES_PER_SERVICE_BYTES_MAX} bytes; it refuses there",
            gateway.namespace, gateway.name
        );
        let fix = "use prefixes, or fewer and shorter expressions, or a further Gateway";
        report.error(Code::RegexMemoryExceeded, document, format!("{field}.matches"), problem.clone(), fix);
        (gateway, format!("{field}.matches: {problem}"))
    });
    reasons.collect()
}

fn parents(
    route: &Sourced<'_, RouteParts<'_>>,
    to: &DestinationIndex<'_>,
    report: &mut DiagnosticCollector,
) -> Parents {
    let refs = route.object.parent_refs;
    if refs.is_empty() && route.fault("spec.parentRefs").is_none() {
        report.warning(
            Code::RouteWithoutParent,
            route.document,
            "spec.parentRefs",
            "the route is attached to nothing",
            "name a Gateway, or a Service with group: \"\" and kind: Service",
        );
    }
    let mut parents = Parents::new();
    let of_services = refs
        .iter()
        .enumerate()
        .filter(|(_, parent)| !is_listener_parent(parent));
    for (at, parent_ref) in of_services {
        if route.object.rules.is_of_connections() {
            let kind = route.object.rules.kind();
            report.error(
                Code::UnsupportedParent,
                route.document,
                format!("spec.parentRefs[{at}]"),
                format!("{kind}s attach to listeners of Gateways only in this version"),
                "name a Gateway, or use the Service without a route",
            );
            continue;
        }
        match parent(route, parent_ref, to) {
            Ok((parent, opaque)) => {
                if let Some(port) = opaque {
                    let problem =
                        format!("port {port} is opaque TCP, to which HTTP rules do not apply");
                    report.warning(
                        Code::OpaqueParentPort,
                        route.document,
                        format!("spec.parentRefs[{at}]"),
                        problem,
                        "set the Service's appProtocol to http if it speaks HTTP",
                    );
                }
                let field = format!("spec.parentRefs[{at}]");
                let fault = route.fault(&field).map(|fault| format!("{field}: {fault}"));
                // A parent that is named twice is broken if either entry is.
                let known = parents.entry(parent).or_default();
                *known = known.take().or(fault);
            }
            Err(complaint) => {
                let field = format!("spec.parentRefs[{at}].{}", complaint.field);
                report.error(
                    complaint.code,
                    route.document,
                    field,
                    complaint.problem,
                    complaint.fix,
                );
            }
        }
    }
    parents
}

/// Resolves a parent. Also returns one of its ports to which no rule can apply, if there is one.
fn parent(
    route: &Sourced<'_, RouteParts<'_>>,
    written: &ParentRef,
    to: &DestinationIndex<'_>,
) -> Result<(Parent, Option<u16>), FieldIssue> {
    let key = parent_service(to.tenant, &route.object.metadata.namespace, written)?;
    let Some(service) = to.services.get(&key) else {
        return Err(FieldIssue::new(
            "name",
            format!("there is no Service {}/{}", key.namespace, key.name),
            "create it or correct the name",
        )
        .with_code(Code::UnresolvedParent));
    };
    let port = named_port(service, written)?.or(written.port.map(std::num::NonZeroU16::get));
    let mut ports = service
        .ports
        .iter()
        .filter(|p| port.is_none_or(|port| p.port == port))
        .peekable();
    if ports.peek().is_none() && port.is_some() {
        let known: Vec<String> = service.ports.iter().map(|p| p.port.to_string()).collect();
        let problem = format!(
            "Service {}/{} has no TCP port {}",
            key.namespace,
            key.name,
            port.unwrap_or_default()
        );
        return Err(
            FieldIssue::new("port", problem, format!("use {} or none", known.join(", ")))
                .with_code(Code::ParentPortNotFound),
        );
    }
    let opaque = ports
        .find(|p| p.protocol == AppProtocol::Tcp)
        .map(|p| p.port);
    let own = &route.object.metadata.namespace;
    let parent = Parent {
        consumer: (key.namespace != *own).then(|| own.clone()),
        service: key,
        port,
    };
    Ok((parent, opaque))
}

/// Returns the port that `sectionName` names. If `port` is written too, both must name the same.
fn named_port(service: &Service, written: &ParentRef) -> Result<Option<u16>, FieldIssue> {
    let Some(name) = &written.section_name else {
        return Ok(None);
    };
    let is_meant = |port: &&ServicePort| {
        port.name == *name && written.port.is_none_or(|number| number.get() == port.port)
    };
    match service.ports.iter().find(is_meant) {
        Some(port) => Ok(Some(port.port)),
        None => {
            let key = &service.key;
            let number = written.port.map(|port| format!(" with number {port}"));
            let problem = format!(
                "Service {}/{} has no port named {name:?}{}",
                key.namespace,
                key.name,
                number.unwrap_or_default()
            );
            let known: Vec<&str> = service.ports.iter().map(|p| p.name.as_str()).collect();
            let fix = format!("use one of {}, or remove the field", known.join(", "));
            Err(FieldIssue::new("sectionName", problem, fix).with_code(Code::ParentPortNotFound))
        }
    }
}

/// Attaches the rules of a route to its parents, until `add` returns false.
fn attach(
    route: &Sourced<'_, RouteParts<'_>>,
    parents: &Parents,
    to: &DestinationIndex<'_>,
    regexes: &mut RegexBudget,
    report: &mut DiagnosticCollector,
    add: &mut dyn FnMut(RouteRule) -> bool,
) {
    let (hosts, mut broken) = hosts(route, report);
    let rules = &route.object.rules;
    let refusal_status = match rules.kind() {
        // gRPC clients expect errors in their own form.
        ObjectKind::GrpcRoute => STATUS_BROKEN_GRPC,
        // Connections of TLSRoutes and TCPRoutes are reset and see no status.
        _ => STATUS_BROKEN,
    };
    if let Some(fault) = fault_outside_rules(route.document) {
        broken.get_or_insert(fault);
    }
    if rules.len() > RULES_PER_ROUTE_MAX {
        let problem = format!(
            "the route has {} rules, more than {RULES_PER_ROUTE_MAX}",
            rules.len()
        );
        broken.get_or_insert_with(|| problem.clone());
        report.refuse_excess(route.document, "spec.rules", problem, "split the route");
    }
    let consumed = consumed(route, to);
    let origin = RouteOrigin {
        kind: rules.kind(),
        namespace: &route.object.metadata.namespace,
        consumed: consumed.as_ref(),
    };
    // Gateway API: a route without rules has one rule that matches everything; without backends it
    // refuses.
    for at in 0..rules.len().clamp(1, RULES_PER_ROUTE_MAX) {
        let field = format!("spec.rules[{at}]");
        let fault = route
            .document
            .faults
            .iter()
            .find(|f| f.field.starts_with(&field));
        let broken = broken
            .clone()
            .or_else(|| fault.map(|f| format!("{}: {}", f.field, f.problem)));
        let mut reading = RuleContext {
            document: route.document,
            changes_of: None,
            field: field.clone(),
            report,
            broken,
            refusal_status,
            regexes,
        };
        let ResolvedRule {
            matches,
            action,
            effects,
        } = resolve_rule(route, origin, at, to, &mut reading);
        let without_room = without_room(route.document, &field, regexes.take_exceeded(), report);
        for (parent, fault) in parents {
            // A parent's fault, and a Gateway that is full, concern the rule at that parent only.
            let reason = fault.as_ref().or_else(|| without_room.get(&parent.service));
            let refusal = reason.cloned().map(|reason| RouteAction::Refuse {
                status: refusal_status,
                reason,
            });
            // A rule that refuses has neither filters nor retries: they are for its backends.
            let mut rule = RouteRule {
                key: key(route, parent, at),
                parent: parent.service.clone(),
                parent_port: parent.port,
                consumer: parent.consumer.clone(),
                hosts: hosts.clone(),
                matches: matches.clone(),
                action: refusal.unwrap_or_else(|| action.clone()),
                filters: None,
                attempts: None,
                faults: None,
                cors: None,
                mirrors: Vec::new(),
            };
            effects.apply(&mut rule);
            if !add(rule) {
                return;
            }
        }
    }
}

/// Returns a fault outside the rules. It may widen any of them, so it breaks all.
fn fault_outside_rules(document: &Document) -> Option<String> {
    let is_outside = |field: &str| {
        field.starts_with("spec") && !field.starts_with("spec.rules[") && !is_within_parent(field)
    };
    let mut faults = document.faults.iter();
    let fault = faults.find(|fault| is_outside(&fault.field))?;
    Some(format!("{}: {}", fault.field, fault.problem))
}

/// Returns whether a fault concerns one parent and leaves it in the list. A parent without a name
/// is not in it, so that the indexes of those behind it differ from the written ones.
fn is_within_parent(field: &str) -> bool {
    field.starts_with("spec.parentRefs[") && !field.ends_with(']') && !field.ends_with("].name")
}

fn key(route: &Sourced<'_, RouteParts<'_>>, parent: &Parent, at: usize) -> RouteKey {
    let metadata = &route.object.metadata;
    let service = &parent.service;
    let name = match service.namespace == metadata.namespace {
        true => service.name.to_string(),
        false => format!("{}@{}", service.name, service.namespace),
    };
    let rule = match parent.port {
        Some(port) => format!("{name}:{port}.{at}"),
        None => format!("{name}.{at}"),
    };
    RouteKey {
        tenant: parent.service.tenant.clone(),
        kind: route.object.rules.kind().as_str().to_owned(),
        namespace: metadata.namespace.clone(),
        name: metadata.name.clone(),
        rule,
    }
}

fn hosts(
    route: &Sourced<'_, RouteParts<'_>>,
    report: &mut DiagnosticCollector,
) -> (Vec<HostMatch>, Option<String>) {
    let written = route.object.hostnames;
    let mut hosts = BTreeSet::new();
    let mut broken = None;
    let mut refuse = |code: Code, field: String, problem: String, fix: &str| {
        broken.get_or_insert_with(|| format!("{field}: {problem}"));
        report.error(code, route.document, field, problem, fix);
    };
    if written.len() > HOSTS_PER_ROUTE_MAX {
        let problem = format!(
            "the route has {} hosts, more than {HOSTS_PER_ROUTE_MAX}",
            written.len()
        );
        refuse(
            Code::LimitExceeded,
            "spec.hostnames".to_owned(),
            problem,
            "split the route",
        );
        return (Vec::new(), broken);
    }
    for (at, host) in written.iter().enumerate() {
        match names::host_match(host) {
            Ok(host) => drop(hosts.insert(host)),
            Err(problem) => refuse(
                Code::InvalidHostname,
                format!("spec.hostnames[{at}]"),
                problem,
                "write a name such as reviews.example.com or *.example.com",
            ),
        }
    }
    (hosts.into_iter().collect(), broken)
}

/// Resolves the rule of a route at an index. A route without rules has one that matches everything.
fn resolve_rule(
    route: &Sourced<'_, RouteParts<'_>>,
    origin: RouteOrigin<'_>,
    at: usize,
    to: &DestinationIndex<'_>,
    rule: &mut RuleContext<'_>,
) -> ResolvedRule {
    match route.object.rules {
        RuleList::Http(rules) => {
            let implied = HttpRule::default();
            http_rule(origin, at, rules.get(at).unwrap_or(&implied), to, rule)
        }
        RuleList::Grpc(rules) => {
            let implied = GrpcRule::default();
            let written = rules.get(at).unwrap_or(&implied);
            grpc_route::resolve_rule(origin, at, written, to, rule)
        }
        RuleList::Tls(rules) | RuleList::Tcp(rules) => {
            let implied = RelayRule::default();
            let written = rules.get(at).unwrap_or(&implied);
            relay_route::resolve_rule(origin, at, written, to, rule)
        }
    }
}

/// Returns the Service of another namespace that all parents of a route name. With a second parent, a
/// backend that is the one could get the requests of the other without a ReferenceGrant.
fn consumed(route: &Sourced<'_, RouteParts<'_>>, to: &DestinationIndex<'_>) -> Option<ServiceKey> {
    let own = &route.object.metadata.namespace;
    let mut parents = route.object.parent_refs.iter();
    let first = parent_service(to.tenant, own, parents.next()?).ok()?;
    let is_same = |parent| parent_service(to.tenant, own, parent).is_ok_and(|it| it == first);
    (first.namespace != *own && parents.all(is_same)).then_some(first)
}

/// Resolves a rule of an HTTPRoute.
fn http_rule(
    origin: RouteOrigin<'_>,
    place: usize,
    written: &HttpRule,
    to: &DestinationIndex<'_>,
    rule: &mut RuleContext<'_>,
) -> ResolvedRule {
    let resolve = |backend: &BackendRef| to.of_backend_ref(origin, backend);
    let mut effects = RouteEffects::of_http_route(written, &resolve, rule);
    let matches = matches(&written.matches, rule, &|at, condition, rule| {
        http_match([place, at], condition, rule)
    });
    let answer = route_answers::of_http_route(written, rule);
    let references = written.backend_refs.iter().map(RouteBackendRef::reference);
    let mut backends = backends(origin, references, to, rule);
    let written_matches = &written.matches;
    for (at, (backend, written)) in backends.iter_mut().zip(&written.backend_refs).enumerate() {
        let field = format!("backendRefs[{at}]");
        backend_filters::add_http(backend, &written.filters, written_matches, &field, rule);
    }
    let action = match answer {
        Some(answer) => rule.answer(answer),
        None => rule.action("backendRefs", backends),
    };
    ResolvedRule {
        matches,
        action: effects.guard(action, rule),
        effects,
    }
}

/// Resolves the matches of a rule by `resolve`, which gets the index of each.
pub(super) fn matches<M: Default, R>(
    written: &[M],
    rule: &mut RuleContext<'_>,
    resolve: &dyn Fn(usize, &M, &mut RuleContext<'_>) -> R,
) -> Vec<R> {
    // A rule without `matches` matches every request.
    let implied = [M::default()];
    let mut conditions: &[M] = if written.is_empty() {
        &implied
    } else {
        written
    };
    if conditions.len() > MATCHES_PER_RULE_MAX {
        let problem = format!(
            "the rule has {} matches, more than {MATCHES_PER_RULE_MAX}",
            conditions.len()
        );
        rule.broken(
            "matches",
            FieldIssue::new("", problem, "split the rule").with_code(Code::LimitExceeded),
        );
        // The broken rule refuses every request rather than those of the first matches.
        conditions = &implied;
    }
    let conditions = conditions.iter().enumerate();
    conditions
        .map(|(at, condition)| resolve(at, condition, rule))
        .collect()
}

/// Resolves the backends of a rule of a route, without their filters.
pub(super) fn backends(
    origin: RouteOrigin<'_>,
    written: impl Iterator<Item = BackendRef>,
    to: &DestinationIndex<'_>,
    rule: &mut RuleContext<'_>,
) -> Vec<Backend> {
    let backends = written.enumerate().map(|(at, backend)| {
        rule.backend(
            &format!("backendRefs[{at}]"),
            backend.weight,
            to.of_backend_ref(origin, &backend),
        )
    });
    backends.collect()
}

/// Resolves the conditions of a match on headers.
pub(super) fn header_conditions(
    field: &str,
    written: &[ValueCondition],
    rule: &mut RuleContext<'_>,
) -> Vec<ValueMatch> {
    let headers = written.iter().enumerate().map(|(at, condition)| {
        (
            format!("[{at}]"),
            header_name(&condition.name),
            value(condition),
        )
    });
    conditions(rule, field, headers)
}

/// Resolves a match. A broken condition is left out, which is safe because the whole rule is then
/// refused.
pub(super) fn http_match(
    place: [usize; 2],
    written: &HttpRouteMatch,
    rule: &mut RuleContext<'_>,
) -> HttpMatch {
    let field = format!("matches[{}]", place[1]);
    let everything = PathMatch::ElementPrefix("/".to_owned());
    let path = match &written.path {
        None => everything,
        Some(condition) => path_match(&format!("{field}.path.value"), condition, rule)
            .unwrap_or_else(|complaint| {
                rule.broken(&format!("{field}.path.value"), complaint);
                everything
            }),
    };
    let headers = header_conditions(&format!("{field}.headers"), &written.headers, rule);
    let query = written
        .query_params
        .iter()
        .enumerate()
        .map(|(at, condition)| (format!("[{at}]"), text(&condition.name), value(condition)));
    let query = conditions(rule, &format!("{field}.queryParams"), query);
    let method = written.method.map(|method| method.as_str().to_owned());
    let counted = MatchSpecificity {
        path: &path,
        has_method: method.is_some(),
        headers: headers.len(),
        query: query.len(),
    };
    let precedence = precedence::gateway_api(rule.document, place, &counted);
    HttpMatch {
        precedence,
        path,
        method,
        headers,
        query,
    }
}

fn path_match(
    field: &str,
    written: &PathCondition,
    rule: &mut RuleContext<'_>,
) -> Result<PathMatch, FieldIssue> {
    let path = match written.kind {
        PathConditionType::Exact => PathMatch::Exact(path(&written.value)?),
        PathConditionType::PathPrefix => PathMatch::ElementPrefix(path(&written.value)?),
        PathConditionType::RegularExpression => {
            return rule.regex(&written.value).map(PathMatch::Regex);
        }
    };
    match check_path_of_crd(&written.value) {
        Ok(()) => rule.warn_of_form(field, &path),
        // The path is clear, so the rule need not refuse more than it.
        Err(complaint) => rule.broken(field, complaint),
    }
    Ok(path)
}

/// Checks a path as the HTTPRoute CRD does (Gateway API v1.6.1 HTTPPathMatch); [`path()`] has made
/// the other checks of the CRD.
fn check_path_of_crd(value: &str) -> Result<(), FieldIssue> {
    if value.contains("//") {
        let problem = "Gateway API allows no // in a path";
        return Err(FieldIssue::new("", problem, "write one slash").with_code(Code::InvalidPath));
    }
    let mut rest = value;
    while let Some(c) = rest.chars().next() {
        let hex = rest.as_bytes().get(1..3).unwrap_or_default();
        let is_escape = c == '%' && hex.len() == 2 && hex.iter().all(u8::is_ascii_hexdigit);
        if is_escape && hex.eq_ignore_ascii_case(b"2f") {
            let problem = "Gateway API allows no %2F in a path";
            return Err(FieldIssue::new("", problem, "use a regular expression")
                .with_code(Code::InvalidPath));
        }
        if !(is_escape || c.is_ascii_alphanumeric() || "/-._~!$&'()*+,;=:@".contains(c)) {
            let escapes: String = c
                .encode_utf8(&mut [0; 4])
                .bytes()
                .map(|byte| format!("%{byte:02X}"))
                .collect();
            let place = if c == '%' { " without two digits" } else { "" };
            return Err(FieldIssue::new(
                "",
                format!("Gateway API allows no {c:?}{place} in a path"),
                format!("write it as clients send it, as in {escapes}"),
            )
            .with_code(Code::InvalidPath));
        }
        rest = &rest[c.len_utf8()..];
    }
    Ok(())
}

fn value(condition: &ValueCondition) -> Result<TextMatch, FieldIssue> {
    match condition.kind {
        ValueConditionType::Exact => text(&condition.value).map(TextMatch::Exact),
        ValueConditionType::RegularExpression => Ok(TextMatch::Regex(condition.value.clone())),
    }
}
