//! Resolves HTTPRoutes on Services (Gateway API, mesh). Routes in another namespace than their
//! Service are refused; they would apply only to clients in that namespace.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::ids::ServiceKey;
use canal_model::policy::gateway_api::{
    HttpRoute, HttpRouteMatch, HttpRule, ParentRef, PathConditionType, ValueCondition,
    ValueConditionType,
};
use canal_model::program::{
    AppProtocol, HostMatch, HttpMatch, PathMatch, RouteAction, RouteKey, RouteRule, TextMatch,
};

use super::destination::DestinationIndex;
use super::route_fields::{
    FieldIssue, RegexBudget, RuleContext, conditions, header_name, parent_service, path, text,
};
use super::tenant_objects::Sourced;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::{
    HOSTS_PER_ROUTE_MAX, MATCHES_PER_RULE_MAX, REGEXES_PER_SERVICE_BYTES_MAX, RULES_PER_ROUTE_MAX,
};
use crate::names;
use crate::precedence::{self, MatchSpecificity};
use crate::resource_budget::ResourceBudget;

/// The Service, and optionally port, that a route is attached to.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Parent {
    service: ServiceKey,
    port: Option<u16>,
}

/// Bytes of memory that the regular expressions of each service may still use.
type RegexBytesLeft = BTreeMap<ServiceKey, usize>;

/// Returns the rules of all HTTPRoutes, and the services that have any.
pub(crate) fn resolve(
    declared: &[Sourced<'_, HttpRoute>],
    to: &DestinationIndex<'_>,
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) -> (Vec<RouteRule>, BTreeSet<ServiceKey>) {
    let mut rules = Vec::new();
    let mut taken = BTreeSet::new();
    let mut left = RegexBytesLeft::new();
    for route in declared {
        let parents = parents(route, to, report);
        taken.extend(parents.iter().map(|parent| parent.service.clone()));
        let Some(mut regexes) = regex_budget(&parents, &left) else {
            continue;
        };
        attach(route, &parents, to, &mut regexes, report, &mut |rule| {
            let is_within = budget.add_rule(&rule);
            rules.push(rule);
            is_within
        });
        if budget.is_exceeded() {
            break;
        }
        left.extend(
            parents
                .into_iter()
                .map(|parent| (parent.service, regexes.bytes_left)),
        );
    }
    (rules, taken)
}

/// Returns the budget of the parent service that has the least left; `None` for a route without
/// parents.
fn regex_budget(parents: &BTreeSet<Parent>, left: &RegexBytesLeft) -> Option<RegexBudget> {
    let left_of = |parent: &Parent| {
        left.get(&parent.service)
            .copied()
            .unwrap_or(REGEXES_PER_SERVICE_BYTES_MAX)
    };
    let scarcest = parents.iter().min_by_key(|parent| left_of(parent))?;
    let service = format!("{}/{}", scarcest.service.namespace, scarcest.service.name);
    Some(RegexBudget {
        bytes_left: left_of(scarcest),
        copies: parents.len(),
        service,
    })
}

fn parents(
    route: &Sourced<'_, HttpRoute>,
    to: &DestinationIndex<'_>,
    report: &mut DiagnosticCollector,
) -> BTreeSet<Parent> {
    let refs = &route.object.spec.parent_refs;
    if refs.is_empty() && route.fault("spec.parentRefs").is_none() {
        report.error(
            route.document,
            "spec.parentRefs",
            "the route is attached to no Service",
            "name a Service with group: \"\" and kind: Service",
        );
    }
    let mut parents = BTreeSet::new();
    for (at, parent_ref) in refs.iter().enumerate() {
        match parent(route, parent_ref, to) {
            Ok((parent, opaque)) => {
                if let Some(port) = opaque {
                    let problem =
                        format!("port {port} is opaque TCP, to which HTTP rules do not apply");
                    report.warning(
                        route.document,
                        format!("spec.parentRefs[{at}]"),
                        problem,
                        "set the Service's appProtocol to http if it speaks HTTP",
                    );
                }
                parents.insert(parent);
            }
            Err(complaint) => {
                let field = format!("spec.parentRefs[{at}].{}", complaint.field);
                report.error(route.document, field, complaint.problem, complaint.fix);
            }
        }
    }
    parents
}

/// Resolves a parent. Also returns one of its ports to which no rule can apply, if there is one.
fn parent(
    route: &Sourced<'_, HttpRoute>,
    written: &ParentRef,
    to: &DestinationIndex<'_>,
) -> Result<(Parent, Option<u16>), FieldIssue> {
    let key = parent_service(to.tenant, &route.object.metadata.namespace, written)?;
    let Some(service) = to.services.get(&key) else {
        return Err(FieldIssue::new(
            "name",
            format!("there is no Service {}/{}", key.namespace, key.name),
            "create it or correct the name",
        ));
    };
    let port = written.port.map(std::num::NonZeroU16::get);
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
        return Err(FieldIssue::new(
            "port",
            problem,
            format!("use {} or none", known.join(", ")),
        ));
    }
    let opaque = ports
        .find(|p| p.protocol == AppProtocol::Tcp)
        .map(|p| p.port);
    Ok((Parent { service: key, port }, opaque))
}

/// Attaches the rules of a route to its parents, until `add` returns false.
fn attach(
    route: &Sourced<'_, HttpRoute>,
    parents: &BTreeSet<Parent>,
    to: &DestinationIndex<'_>,
    regexes: &mut RegexBudget,
    report: &mut DiagnosticCollector,
    add: &mut dyn FnMut(RouteRule) -> bool,
) {
    let (hosts, mut broken) = hosts(route, report);
    let spec = &route.object.spec;
    let faults = &route.document.faults;
    // A fault outside the rules may widen any of them, so it breaks all.
    let outside_rules = faults
        .iter()
        .find(|f| f.field.starts_with("spec") && !f.field.starts_with("spec.rules["));
    if let Some(fault) = outside_rules {
        broken.get_or_insert_with(|| format!("{}: {}", fault.field, fault.problem));
    }
    if spec.rules.len() > RULES_PER_ROUTE_MAX {
        let problem = format!(
            "the route has {} rules, more than {RULES_PER_ROUTE_MAX}",
            spec.rules.len()
        );
        broken.get_or_insert_with(|| problem.clone());
        report.error(route.document, "spec.rules", problem, "split the route");
    }
    // Gateway API: a route without rules has one rule that matches everything; without backends it
    // answers 500.
    let implied = [HttpRule::default()];
    let written = if spec.rules.is_empty() {
        &implied
    } else {
        spec.rules.as_slice()
    };
    for (at, rule) in written.iter().take(RULES_PER_ROUTE_MAX).enumerate() {
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
            field,
            report,
            broken,
            regexes,
        };
        let (matches, action) = checked(route, at, rule, to, &mut reading);
        for parent in parents {
            let is_within = add(RouteRule {
                key: key(route, parent, at),
                parent: parent.service.clone(),
                parent_port: parent.port,
                hosts: hosts.clone(),
                matches: matches.clone(),
                action: action.clone(),
            });
            if !is_within {
                return;
            }
        }
    }
}

fn key(route: &Sourced<'_, HttpRoute>, parent: &Parent, at: usize) -> RouteKey {
    let metadata = &route.object.metadata;
    let rule = match parent.port {
        Some(port) => format!("{}:{port}.{at}", parent.service.name),
        None => format!("{}.{at}", parent.service.name),
    };
    RouteKey {
        tenant: parent.service.tenant.clone(),
        kind: "HTTPRoute".to_owned(),
        namespace: metadata.namespace.clone(),
        name: metadata.name.clone(),
        rule,
    }
}

fn hosts(
    route: &Sourced<'_, HttpRoute>,
    report: &mut DiagnosticCollector,
) -> (Vec<HostMatch>, Option<String>) {
    let written = &route.object.spec.hostnames;
    let mut hosts = BTreeSet::new();
    let mut broken = None;
    let mut refuse = |field: String, problem: String, fix: &str| {
        broken.get_or_insert_with(|| format!("{field}: {problem}"));
        report.error(route.document, field, problem, fix);
    };
    if written.len() > HOSTS_PER_ROUTE_MAX {
        let problem = format!(
            "the route has {} hosts, more than {HOSTS_PER_ROUTE_MAX}",
            written.len()
        );
        refuse("spec.hostnames".to_owned(), problem, "split the route");
        return (Vec::new(), broken);
    }
    for (at, host) in written.iter().enumerate() {
        match names::host_match(host) {
            Ok(host) => drop(hosts.insert(host)),
            Err(problem) => refuse(
                format!("spec.hostnames[{at}]"),
                problem,
                "write a name such as reviews.example.com or *.example.com",
            ),
        }
    }
    (hosts.into_iter().collect(), broken)
}

fn checked(
    route: &Sourced<'_, HttpRoute>,
    place: usize,
    written: &HttpRule,
    to: &DestinationIndex<'_>,
    rule: &mut RuleContext<'_>,
) -> (Vec<HttpMatch>, RouteAction) {
    let implied = [HttpRouteMatch::default()];
    let mut conditions: &[HttpRouteMatch] = if written.matches.is_empty() {
        &implied
    } else {
        &written.matches
    };
    if conditions.len() > MATCHES_PER_RULE_MAX {
        let problem = format!(
            "the rule has {} matches, more than {MATCHES_PER_RULE_MAX}",
            conditions.len()
        );
        rule.broken("matches", FieldIssue::new("", problem, "split the rule"));
        conditions = &implied;
    }
    let mut matches = Vec::with_capacity(conditions.len());
    for (at, condition) in conditions.iter().enumerate() {
        matches.push(http_match([place, at], condition, rule));
    }
    let namespace = &route.object.metadata.namespace;
    let mut backends = Vec::with_capacity(written.backend_refs.len());
    for (at, backend) in written.backend_refs.iter().enumerate() {
        backends.push(rule.backend(
            &format!("backendRefs[{at}]"),
            backend.weight,
            to.of_backend_ref(namespace, backend),
        ));
    }
    (matches, rule.action("backendRefs", backends))
}

/// Resolves a match. A broken condition is left out, which is safe because the whole rule is then
/// refused.
fn http_match(
    place: [usize; 2],
    written: &HttpRouteMatch,
    rule: &mut RuleContext<'_>,
) -> HttpMatch {
    let field = format!("matches[{}]", place[1]);
    let everything = PathMatch::ElementPrefix("/".to_owned());
    let path = match &written.path {
        None => everything,
        Some(condition) => {
            let checked = match condition.kind {
                PathConditionType::Exact => path(&condition.value).map(PathMatch::Exact),
                PathConditionType::PathPrefix => {
                    path(&condition.value).map(PathMatch::ElementPrefix)
                }
                PathConditionType::RegularExpression => rule
                    .regex(&condition.value)
                    .map(|()| PathMatch::Regex(condition.value.clone())),
            };
            checked.unwrap_or_else(|complaint| {
                rule.broken(&format!("{field}.path.value"), complaint);
                everything
            })
        }
    };
    rule.warn_of_form(&format!("{field}.path.value"), &path);
    let headers = written.headers.iter().enumerate().map(|(at, condition)| {
        (
            format!("[{at}]"),
            header_name(&condition.name),
            value(condition),
        )
    });
    let headers = conditions(rule, &format!("{field}.headers"), headers);
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

fn value(condition: &ValueCondition) -> Result<TextMatch, FieldIssue> {
    match condition.kind {
        ValueConditionType::Exact => text(&condition.value).map(TextMatch::Exact),
        ValueConditionType::RegularExpression => Ok(TextMatch::Regex(condition.value.clone())),
    }
}
