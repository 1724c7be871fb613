//! Resolves VirtualServices for the mesh (Istio). Only the oldest one routes a service, and none
//! does if an HTTPRoute or a GRPCRoute routes it.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ServiceKey};
use canal_model::policy::istio::{
    Destination, HttpMatchRequest, StringMatch, VirtualService, VirtualServiceRoute,
};
use canal_model::program::{
    Backend, HostMatch, HttpMatch, PathMatch, RouteAction, RouteKey, RouteRule, Service, TextMatch,
};
use canal_model::route_filters::RouteAnswer;

use super::destination::DestinationIndex;
use super::route_effects::RouteEffects;
use super::route_fields::{
    FieldIssue, RegexBudget, RuleContext, STATUS_BROKEN, conditions, header_name, path, text,
};
use super::tenant_objects::Sourced;
use super::{route_answers, route_mirrors};
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::{
    HOSTS_PER_ROUTE_MAX, MATCHES_PER_RULE_MAX, REGEXES_PER_SERVICE_BYTES_MAX, RULES_PER_ROUTE_MAX,
};
use crate::names;
use crate::precedence;
use crate::resource_budget::ResourceBudget;

/// The name that stands for all clients in the mesh among an object's gateways.
const MESH: &str = "mesh";

pub(crate) fn resolve(
    declared: &[Sourced<'_, VirtualService>],
    to: &DestinationIndex<'_>,
    taken: &BTreeSet<ServiceKey>,
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) -> Vec<RouteRule> {
    let mut claimed_by: BTreeMap<ServiceKey, String> = BTreeMap::new();
    let mut rules = Vec::new();
    let mut add = |rule| {
        let is_within = budget.add_rule(&rule);
        // The caller drops all rules once the budget is exceeded, so one too many does no harm.
        rules.push(rule);
        is_within
    };
    for virtual_service in declared {
        if !is_for_mesh(virtual_service, report) {
            continue;
        }
        for (field, key) in services(virtual_service, to, report) {
            if taken.contains(&key) {
                let problem = format!(
                    "an HTTPRoute or GRPCRoute routes {}/{} already, so this object does not",
                    key.namespace, key.name
                );
                report.error(
                    Code::RouteConflict,
                    virtual_service.document,
                    field,
                    problem,
                    "write everything in one of the two",
                );
            } else if let Some(older) = claimed_by.get(&key) {
                let problem = format!(
                    "{older} routes {}/{} already, so this object does not",
                    key.namespace, key.name
                );
                report.error(
                    Code::RouteConflict,
                    virtual_service.document,
                    field,
                    problem,
                    "write everything in one VirtualService",
                );
            } else if let Some(service) = to.services.get(&key) {
                let mut has_rules = false;
                let is_within = attach(virtual_service, service, to, report, &mut |rule| {
                    has_rules = true;
                    add(rule)
                });
                // The resources exceed their limit, so the rest is not compiled.
                if !is_within {
                    return rules;
                }
                // An object without rules for HTTP in the mesh leaves the Service to another one.
                if has_rules {
                    claimed_by.insert(key, virtual_service.document.object.key().to_string());
                }
            }
        }
    }
    rules
}

fn is_for_mesh(sourced: &Sourced<'_, VirtualService>, report: &mut DiagnosticCollector) -> bool {
    let gateways = &sourced.object.spec.gateways;
    if let Some((at, other)) = gateways
        .iter()
        .enumerate()
        .find(|(_, gateway)| *gateway != MESH)
    {
        let problem =
            format!("gateway {other:?} is not supported in this version; `mesh` is the only one");
        report.error(
            Code::UnsupportedGateway,
            sourced.document,
            format!("spec.gateways[{at}]"),
            problem,
            "write mesh or remove the field",
        );
    }
    gateways.is_empty() || gateways.iter().any(|gateway| gateway == MESH)
}

/// Returns the services that the hosts name, each once.
fn services(
    sourced: &Sourced<'_, VirtualService>,
    to: &DestinationIndex<'_>,
    report: &mut DiagnosticCollector,
) -> Vec<(String, ServiceKey)> {
    let (hosts, own) = (
        &sourced.object.spec.hosts,
        &sourced.object.metadata.namespace,
    );
    if hosts.is_empty() && sourced.fault("spec.hosts").is_none() {
        report.error(
            Code::MissingField,
            sourced.document,
            "spec.hosts",
            "the object names no host",
            "write a Service's name",
        );
    }
    if hosts.len() > HOSTS_PER_ROUTE_MAX {
        let problem = format!(
            "the object has {} hosts, more than {HOSTS_PER_ROUTE_MAX}; the rest is left out",
            hosts.len()
        );
        report.refuse_excess(sourced.document, "spec.hosts", problem, "split the object");
    }
    let mut found: Vec<(String, ServiceKey)> = Vec::new();
    for (at, host) in hosts.iter().take(HOSTS_PER_ROUTE_MAX).enumerate() {
        let field = format!("spec.hosts[{at}]");
        let Some(key) =
            names::service(to.tenant, own, host).filter(|key| to.services.contains_key(key))
        else {
            let problem = format!("{host:?} is not a service of this tenant");
            report.error(Code::UnresolvedHost,
                sourced.document,
                field,
                problem,
                "write a Service's name, or name.namespace; other hosts are not supported in this version",
            );
            continue;
        };
        if key.namespace != *own {
            let problem = format!(
                "a route for clients of only one namespace (here {own}) is not supported in this version"
            );
            report.error(
                Code::OtherNamespace,
                sourced.document,
                field,
                problem,
                format!(
                    "move the object to the Service's namespace {}; it then applies to all clients",
                    key.namespace
                ),
            );
        } else if !found.iter().any(|(_, known)| *known == key) {
            found.push((field, key));
        }
    }
    found
}

/// Rules for connections that are no HTTP. A fault in them leaves the rules of `http` as they are.
const OTHER_PROTOCOLS: [&str; 2] = ["spec.tcp", "spec.tls"];

/// Returns the fault of the object that belongs to no rule and so breaks all of them.
fn fault_outside_rules(sourced: &Sourced<'_, VirtualService>) -> Option<String> {
    let mut faults = sourced.document.faults.iter();
    let outside = faults.find(|f| {
        f.field.starts_with("spec")
            && !f.field.starts_with("spec.http[")
            && !OTHER_PROTOCOLS
                .iter()
                .any(|field| is_within(&f.field, field))
    });
    outside.map(|fault| format!("{}: {}", fault.field, fault.problem))
}

/// Returns true for the field `outer` itself, and for what is inside it.
fn is_within(field: &str, outer: &str) -> bool {
    field
        .strip_prefix(outer)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// Returns whether the object has rules only for connections that are no HTTP. HTTP requests then
/// go to the service that was dialled, as in Istio.
fn has_no_http(sourced: &Sourced<'_, VirtualService>) -> bool {
    let is_written = |field: &str| {
        let mut faults = sourced.document.faults.iter();
        faults.any(|fault| is_within(&fault.field, field))
    };
    sourced.object.spec.http.is_empty()
        && sourced.fault("spec.http").is_none()
        && OTHER_PROTOCOLS.into_iter().any(is_written)
}

/// Attaches the rules of the object to one service. Returns false as soon as `add` does.
fn attach(
    sourced: &Sourced<'_, VirtualService>,
    service: &Service,
    to: &DestinationIndex<'_>,
    report: &mut DiagnosticCollector,
    add: &mut dyn FnMut(RouteRule) -> bool,
) -> bool {
    let spec = &sourced.object.spec;
    let mut broken = fault_outside_rules(sourced);
    if has_no_http(sourced) && broken.is_none() {
        return true;
    }
    if spec.http.len() > RULES_PER_ROUTE_MAX {
        let problem = format!(
            "the object has {} rules, more than {RULES_PER_ROUTE_MAX}",
            spec.http.len()
        );
        broken.get_or_insert_with(|| problem.clone());
        report.refuse_excess(sourced.document, "spec.http", problem, "use fewer rules");
    }
    let ports: Vec<u16> = service.ports.iter().map(|port| port.port).collect();
    let mut regexes = RegexBudget {
        bytes_left: REGEXES_PER_SERVICE_BYTES_MAX,
        copies: ports.len().max(1),
        service: format!("{}/{}", service.key.namespace, service.key.name),
        gateways: Vec::new(),
    };
    // A broken object refuses all requests, even if none of its rules could be read.
    let implied = [VirtualServiceRoute::default()];
    let written = if spec.http.is_empty() {
        &implied
    } else {
        spec.http.as_slice()
    };
    for (at, rule) in written.iter().take(RULES_PER_ROUTE_MAX).enumerate() {
        let field = format!("spec.http[{at}]");
        let mut faults = sourced.document.faults.iter();
        let fault = faults.find(|f| f.field.starts_with(&field));
        let broken = broken
            .clone()
            .or_else(|| fault.map(|f| format!("{}: {}", f.field, f.problem)));
        let mut reading = RuleContext {
            document: sourced.document,
            field,
            report,
            broken,
            refusal_status: STATUS_BROKEN,
            regexes: &mut regexes,
        };
        let mut effects = RouteEffects::of_virtual_service(rule, &mut reading);
        let answer = route_answers::of_virtual_service(rule, &mut reading);
        let groups = groups(at, rule, service, &mut reading);
        let namespace = &sourced.object.metadata.namespace;
        let fans_out = fans_out(namespace, rule, to);
        for (number, (group, matches)) in groups.iter().enumerate() {
            let part = part_of(number, groups.len());
            for port in rule_ports(group.port, fans_out, &ports) {
                // A rule for all ports has no destination that follows the dialled port.
                let dialled = port.or(ports.first().copied()).unwrap_or_default();
                let action = action(sourced, (rule, &answer), dialled, to, &mut reading);
                let resolve = |mirror: &Destination| to.of_destination(namespace, mirror, dialled);
                let mirrors = route_mirrors::of_virtual_service(rule, &resolve, &mut reading);
                effects.set_mirrors(mirrors);
                let action = effects.guard(action, &mut reading);
                let suffix = port.map(|port| format!(":{port}")).unwrap_or_default();
                let rule = format!("{}{suffix}.{at}{part}", service.key.name);
                let mut rule = RouteRule {
                    key: key(sourced, service, rule),
                    parent: service.key.clone(),
                    parent_port: port,
                    hosts: group.hosts.clone(),
                    matches: matches.clone(),
                    action,
                    filters: None,
                    attempts: None,
                    faults: None,
                    cors: None,
                    mirrors: Vec::new(),
                };
                effects.apply(&mut rule);
                if !add(rule) {
                    return false;
                }
            }
        }
    }
    true
}

/// Returns whether each port needs a rule of its own: a destination or mirror without a port has the
/// dialled one.
fn fans_out(
    namespace: &Namespace,
    written: &VirtualServiceRoute,
    to: &DestinationIndex<'_>,
) -> bool {
    let routes = written.route.iter().map(|route| &route.destination);
    let mut destinations = routes.chain(route_mirrors::destinations(written));
    destinations.any(|destination| to.follows_dialled_port(namespace, destination))
}

/// Returns the end of the names of a rule's parts, if it has several.
fn part_of(number: usize, parts: usize) -> String {
    if parts > 1 {
        format!(".{number}")
    } else {
        String::new()
    }
}

/// Returns the ports that a rule is attached to, one by one; `None` stands for all.
fn rule_ports(matched: Option<u16>, fans_out: bool, ports: &[u16]) -> Vec<Option<u16>> {
    match matched {
        Some(port) => vec![Some(port)],
        None if fans_out => ports.iter().copied().map(Some).collect(),
        None => vec![None],
    }
}

fn key(sourced: &Sourced<'_, VirtualService>, service: &Service, rule: String) -> RouteKey {
    let metadata = &sourced.object.metadata;
    RouteKey {
        tenant: service.key.tenant.clone(),
        kind: "VirtualService".to_owned(),
        namespace: metadata.namespace.clone(),
        name: metadata.name.clone(),
        rule,
    }
}

fn action(
    sourced: &Sourced<'_, VirtualService>,
    (written, answer): (&VirtualServiceRoute, &Option<RouteAnswer>),
    dialled: u16,
    to: &DestinationIndex<'_>,
    rule: &mut RuleContext<'_>,
) -> RouteAction {
    if let Some(answer) = answer {
        return rule.answer(answer.clone());
    }
    let is_alone = written.route.len() == 1;
    let mut backends: Vec<Backend> = Vec::with_capacity(written.route.len());
    for (at, share) in written.route.iter().enumerate() {
        let weight = share.weight.unwrap_or(if is_alone { 100 } else { 0 });
        let target = to.of_destination(
            &sourced.object.metadata.namespace,
            &share.destination,
            dialled,
        );
        backends.push(rule.backend(&format!("route[{at}]"), weight, target));
    }
    rule.action("route", backends)
}

/// The properties of a route rule that apply to all its matches.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct RouteGroup {
    port: Option<u16>,
    hosts: Vec<HostMatch>,
}

/// Groups the rule's matches by the port and host that they require, because a route rule has these
/// only once.
fn groups(
    place: usize,
    written: &VirtualServiceRoute,
    service: &Service,
    rule: &mut RuleContext<'_>,
) -> Vec<(RouteGroup, Vec<HttpMatch>)> {
    // A rule without `match` matches every request.
    let implied = [HttpMatchRequest::default()];
    let mut conditions: &[HttpMatchRequest] = if written.matches.is_empty() {
        &implied
    } else {
        &written.matches
    };
    if conditions.len() > MATCHES_PER_RULE_MAX {
        let problem = format!(
            "the rule has {} matches, more than {MATCHES_PER_RULE_MAX}",
            conditions.len()
        );
        rule.broken(
            "match",
            FieldIssue::new("", problem, "split the rule").with_code(Code::LimitExceeded),
        );
        // The broken rule refuses every request, whatever its matches were.
        conditions = &implied;
    }
    let mut groups: BTreeMap<RouteGroup, Vec<HttpMatch>> = BTreeMap::new();
    for (at, condition) in conditions.iter().enumerate() {
        let field = format!("match[{at}]");
        if !condition.gateways.is_empty() && !condition.gateways.iter().any(|g| g == MESH) {
            let problem =
                "the match holds at gateways only, which are not supported in this version";
            rule.warning(
                &field,
                FieldIssue::new("gateways", problem, "write mesh too, or remove the match")
                    .with_code(Code::MatchNeverApplies),
            );
            continue;
        }
        let port = condition.port.map(std::num::NonZeroU16::get);
        if let Some(port) = port.filter(|port| !service.ports.iter().any(|p| p.port == *port)) {
            let problem = format!(
                "Service {}/{} has no TCP port {port}, so this never matches",
                service.key.namespace, service.key.name
            );
            rule.warning(
                &field,
                FieldIssue::new("port", problem, "correct the port or remove the match")
                    .with_code(Code::MatchNeverApplies),
            );
            continue;
        }
        let hosts = authority(&field, condition, rule);
        let http = http_match(&field, place, at, condition, rule);
        groups
            .entry(RouteGroup { port, hosts })
            .or_default()
            .push(http);
    }
    groups.into_iter().collect()
}

fn authority(
    field: &str,
    condition: &HttpMatchRequest,
    rule: &mut RuleContext<'_>,
) -> Vec<HostMatch> {
    let Some(written) = &condition.authority else {
        return Vec::new();
    };
    let host = match written {
        StringMatch {
            exact: Some(host),
            prefix: None,
            regex: None,
        } => names::host_match(&host.to_ascii_lowercase()).map_err(|problem| {
            FieldIssue::new(
                "exact",
                problem,
                "write a host name; ports are matched by port",
            )
            .with_code(Code::InvalidHostname)
        }),
        _ => Err(FieldIssue::new(
            "",
            "hosts are compared as a whole in this version",
            "write authority.exact",
        )
        .with_code(Code::UnsupportedField)),
    };
    match host {
        Ok(host @ HostMatch::Exact(_)) => vec![host],
        // Istio compares `exact` literally, so a `*` there would match no host.
        Ok(HostMatch::Suffix(_)) => {
            rule.broken(
                &format!("{field}.authority"),
                FieldIssue::new(
                    "exact",
                    "a wildcard is not an exact host",
                    "write the whole name",
                )
                .with_code(Code::UnsupportedField),
            );
            Vec::new()
        }
        Err(issue) => {
            rule.broken(&format!("{field}.authority"), issue);
            Vec::new()
        }
    }
}

fn http_match(
    field: &str,
    place: usize,
    at: usize,
    written: &HttpMatchRequest,
    rule: &mut RuleContext<'_>,
) -> HttpMatch {
    // A rule with a broken path refuses every request that it might have matched.
    let everything = PathMatch::StringPrefix("/".to_owned());
    let uri = match &written.uri {
        None => everything,
        Some(condition) => uri(condition, written.ignore_uri_case, rule).unwrap_or_else(|issue| {
            rule.broken(&format!("{field}.uri"), issue);
            everything
        }),
    };
    rule.warn_of_form(&format!("{field}.uri"), &uri);
    let method = written
        .method
        .as_ref()
        .and_then(|condition| match condition {
            StringMatch {
                exact: Some(method),
                prefix: None,
                regex: None,
                // A method is a token, as a header's name is (RFC 9110 §9.1).
            } if header_name(method).is_ok() => Some(method.clone()),
            _ => {
                let issue = FieldIssue::new(
                    "",
                    "methods are compared as a whole in this version",
                    "write method.exact, as in exact: GET",
                )
                .with_code(Code::UnsupportedField);
                rule.broken(&format!("{field}.method"), issue);
                None
            }
        });
    let headers = written
        .headers
        .iter()
        .map(|(name, condition)| (format!(".{name}"), header_name(name), value(condition)));
    let headers = conditions(rule, &format!("{field}.headers"), headers);
    let query = written
        .query_params
        .iter()
        .map(|(name, condition)| (format!(".{name}"), text(name), value(condition)));
    let query = conditions(rule, &format!("{field}.queryParams"), query);
    HttpMatch {
        precedence: precedence::istio(rule.document, [place, at]),
        path: uri,
        method,
        headers,
        query,
    }
}

fn uri(
    written: &StringMatch,
    ignores_case: bool,
    rule: &mut RuleContext<'_>,
) -> Result<PathMatch, FieldIssue> {
    let mut of_text = |text: &str, suffix: &str, as_written: fn(String) -> PathMatch| {
        let text = path(text)?;
        if !ignores_case {
            return Ok(as_written(text));
        }
        let pattern = format!("(?i){}{suffix}", escaped(&text));
        rule.regex(&pattern).map(PathMatch::Regex)
    };
    match written {
        StringMatch {
            exact: Some(exact),
            prefix: None,
            regex: None,
        } => of_text(exact, "", PathMatch::Exact),
        StringMatch {
            exact: None,
            prefix: Some(prefix),
            regex: None,
        } => of_text(prefix, ".*", PathMatch::StringPrefix),
        StringMatch {
            exact: None,
            prefix: None,
            regex: Some(pattern),
        } => rule.regex(pattern).map(PathMatch::Regex),
        _ => Err(FieldIssue::new(
            "",
            "exactly one of exact, prefix and regex is required",
            "write one of them",
        )),
    }
}

/// Returns a regular expression that only the text itself matches.
fn escaped(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for c in text.chars() {
        if r"\.+*?()|[]{}^$".contains(c) {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}

fn value(written: &StringMatch) -> Result<TextMatch, FieldIssue> {
    match written {
        StringMatch {
            exact: Some(exact),
            prefix: None,
            regex: None,
        } => text(exact).map(TextMatch::Exact),
        StringMatch {
            exact: None,
            prefix: Some(prefix),
            regex: None,
        } => text(prefix).map(TextMatch::Prefix),
        StringMatch {
            exact: None,
            prefix: None,
            regex: Some(pattern),
        } => Ok(TextMatch::Regex(pattern.clone())),
        StringMatch {
            exact: None,
            prefix: None,
            regex: None,
        } => Ok(TextMatch::Present),
        _ => Err(FieldIssue::new(
            "",
            "only one of exact, prefix and regex may be set",
            "write one of them",
        )),
    }
}
