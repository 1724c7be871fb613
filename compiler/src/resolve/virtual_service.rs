//! Resolves VirtualServices (Istio) for the mesh and for Gateways. In the mesh, only the oldest one
//! routes a service, and none does if an HTTPRoute or a GRPCRoute routes it. On a Gateway, those of
//! one host are merged. `delegate` merges the rules of delegates, and `route_point` decides what
//! differs between the mesh and a Gateway.

use std::collections::{BTreeMap, BTreeSet};

use canal_attachment::{
    BindingProblem, BoundRules, LISTENER_PARENTS_PER_ROUTE_MAX, MESH, gateway_name,
};
use canal_model::client_attributes::{SCHEME, SOURCE_LABEL, SOURCE_NAMESPACE};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName, ServiceKey};
use canal_model::policy::istio::{
    Destination, HttpMatchRequest, StringMatch, VirtualService, VirtualServiceRoute,
};
use canal_model::program::{
    AUTHORITY, Backend, HostMatch, HttpMatch, METHOD, PathMatch, Precedence, RouteAction, RouteKey,
    RouteObject, RouteRule, TextMatch, ValueMatch,
};
use canal_model::route_filters::{RouteAnswer, UrlScheme};

use super::connection_rules::NamedGateway;
use super::delegate::{
    DelegateIndex, EffectiveRule, OTHER_PROTOCOLS, fault_outside_rules, is_delegate,
    is_exported_to, is_within,
};
use super::destination::DestinationIndex;
use super::ingress::Ingress;
use super::pattern_costs::PatternCosts;
use super::route_effects::RouteEffects;
use super::route_fields::{
    FieldIssue, RegexBudget, RuleContext, STATUS_BROKEN, conditions, header_name, path, short, text,
};
use super::route_point::{NeverMatches, RoutePoint};
use super::tenant_objects::Sourced;
use super::{backend_filters, connection_rules, route_answers, route_mirrors};
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::{
    BACKENDS_PER_RULE_MAX, HOSTS_PER_ROUTE_MAX, MATCHES_PER_RULE_MAX,
    REGEXES_PER_SERVICE_BYTES_MAX, RULES_PER_ROUTE_MAX,
};
use crate::names;
use crate::precedence;
use crate::resource_budget::ResourceBudget;

/// The objects that all VirtualServices of a tenant share.
struct VirtualServices<'a> {
    to: &'a DestinationIndex<'a>,
    delegates: DelegateIndex<'a>,
    /// Services that routes of Gateway API route.
    of_gateway_api: &'a BTreeSet<ServiceKey>,
    /// The VirtualService that routes a service in the mesh.
    claimed_by: BTreeMap<ServiceKey, String>,
    /// Bytes that regular expressions on a Gateway may still use.
    regex_bytes_left: BTreeMap<ServiceKey, usize>,
    /// Costs of the expressions that were measured before.
    costs: PatternCosts,
    rules: Vec<RouteRule>,
}

/// Returns the rules of all VirtualServices, and puts those that name Gateways on their listeners.
pub(crate) fn resolve(
    declared: &[Sourced<'_, VirtualService>],
    to: &DestinationIndex<'_>,
    ingress: &mut Ingress,
    taken: &BTreeSet<ServiceKey>,
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) -> Vec<RouteRule> {
    let mut all = VirtualServices {
        to,
        delegates: DelegateIndex::new(declared),
        of_gateway_api: taken,
        claimed_by: BTreeMap::new(),
        regex_bytes_left: BTreeMap::new(),
        costs: PatternCosts::default(),
        rules: Vec::new(),
    };
    for sourced in declared {
        if is_delegate(sourced) {
            let metadata = &sourced.object.metadata;
            if !all.delegates.is_named(&metadata.namespace, &metadata.name) {
                let problem = "the object names no host, and no other one delegates to it";
                let fix = "write a Service's name, or name the object in the delegate of another";
                report.warning(
                    Code::UnresolvedHost,
                    sourced.document,
                    "spec.hosts",
                    problem,
                    fix,
                );
            }
            continue;
        }
        check_host_count(sourced, report);
        // The resources exceed their limit, so the rest is not compiled.
        if !all.add_to_mesh(sourced, budget, report)
            || !all.add_to_gateways(sourced, ingress, budget, report)
        {
            break;
        }
    }
    all.delegates.record_comparisons(budget);
    all.costs.record(budget);
    all.rules
}

fn check_host_count(sourced: &Sourced<'_, VirtualService>, report: &mut DiagnosticCollector) {
    let count = sourced.object.spec.hosts.len();
    if count > HOSTS_PER_ROUTE_MAX {
        let problem = format!(
            "the object has {count} hosts, more than {HOSTS_PER_ROUTE_MAX}; the rest is left out"
        );
        report.refuse_excess(sourced.document, "spec.hosts", problem, "split the object");
    }
}

impl VirtualServices<'_> {
    /// Adds the rules of an object for the services that its hosts name. Returns false if the budget
    /// is exceeded.
    fn add_to_mesh(
        &mut self,
        sourced: &Sourced<'_, VirtualService>,
        budget: &mut ResourceBudget,
        report: &mut DiagnosticCollector,
    ) -> bool {
        let gateways = &sourced.object.spec.gateways;
        // An object without gateways applies to the mesh, as in Istio.
        if !gateways.is_empty() && !gateways.iter().any(|gateway| gateway == MESH) {
            return true;
        }
        connection_rules::report_in_mesh(sourced, report);
        for (field, key) in services(sourced, self.to, report) {
            if self.of_gateway_api.contains(&key) {
                let problem = format!(
                    "an HTTPRoute or GRPCRoute routes {}/{} already, so this object does not",
                    key.namespace, key.name
                );
                report.error(
                    Code::RouteConflict,
                    sourced.document,
                    field,
                    problem,
                    "write everything in one of the two",
                );
            } else if let Some(older) = self.claimed_by.get(&key) {
                let problem = format!(
                    "{older} routes {}/{} already, so this object does not",
                    key.namespace, key.name
                );
                report.error(
                    Code::RouteConflict,
                    sourced.document,
                    field,
                    problem,
                    "write everything in one VirtualService",
                );
            } else if let Some(service) = self.to.services.get(&key) {
                let mut point = RoutePoint::of_service(service);
                let before = self.rules.len();
                if !self.attach(sourced, &mut point, budget, report) {
                    return false;
                }
                // An object without rules for HTTP in the mesh leaves the Service to another one.
                if self.rules.len() > before {
                    let name = sourced.document.object.key().to_string();
                    self.claimed_by.insert(key, name);
                }
            }
        }
        true
    }

    /// Adds the rules of an object for the Gateways that it names. Returns false if the budget is
    /// exceeded.
    fn add_to_gateways(
        &mut self,
        sourced: &Sourced<'_, VirtualService>,
        ingress: &mut Ingress,
        budget: &mut ResourceBudget,
        report: &mut DiagnosticCollector,
    ) -> bool {
        let written = sourced.object.spec.gateways.iter().enumerate();
        let mut hosts = None;
        let mut seen: BTreeSet<(Namespace, ObjectName)> = BTreeSet::new();
        for (at, written) in written.filter(|(_, written)| *written != MESH) {
            let field = format!("spec.gateways[{at}]");
            let metadata = &sourced.object.metadata;
            let gateway = match gateway_name(&metadata.namespace, written) {
                // A Gateway that is named twice has the rules once.
                Ok(gateway) if seen.contains(&gateway) => continue,
                Ok(_) if seen.len() == LISTENER_PARENTS_PER_ROUTE_MAX => {
                    let problem = format!(
                        "the object names more than {LISTENER_PARENTS_PER_ROUTE_MAX} Gateways; this one and those behind it are left out"
                    );
                    report.refuse_excess(sourced.document, field, problem, "split the object");
                    break;
                }
                Ok(gateway) => gateway,
                Err(problem) => {
                    let fix = "write the name of a Gateway, or namespace/name";
                    report.error(Code::InvalidValue, sourced.document, field, problem, fix);
                    continue;
                }
            };
            seen.insert(gateway.clone());
            if !is_exported_to(sourced, &gateway.0) {
                let problem = format!("the object is not exported to namespace {}", gateway.0);
                let fix = "add the Gateway's namespace to exportTo, or remove the Gateway";
                report.warning(Code::RouteNotAllowed, sourced.document, field, problem, fix);
                continue;
            }
            // Another controller's Gateway may take hosts that Canal does not.
            let is_own = ingress.listeners.of_istio(&gateway.0, &gateway.1).is_some();
            let hosts: &[Option<HostMatch>] = match is_own {
                true => hosts.get_or_insert_with(|| gateway_hosts(sourced, report)),
                false => &[],
            };
            let named = NamedGateway {
                key: &gateway,
                at,
                hosts,
            };
            if !self.add_http_to_gateway(sourced, &named, ingress, budget, report)
                || !connection_rules::add(
                    sourced,
                    &named,
                    self.to,
                    ingress,
                    budget,
                    report,
                    &mut self.rules,
                )
            {
                return false;
            }
        }
        true
    }

    /// Adds the rules of an object for requests to a Gateway. Returns false if the budget is exceeded.
    fn add_http_to_gateway(
        &mut self,
        sourced: &Sourced<'_, VirtualService>,
        named: &NamedGateway<'_>,
        ingress: &mut Ingress,
        budget: &mut ResourceBudget,
        report: &mut DiagnosticCollector,
    ) -> bool {
        // An object with a fault outside its rules refuses requests, even without a rule for them.
        if has_no_http(sourced) && fault_outside_rules(sourced).is_none() {
            return true;
        }
        let metadata = &sourced.object.metadata;
        let field = format!("spec.gateways[{}]", named.at);
        let bound = ingress.listeners.bind(
            named.key,
            &metadata.namespace,
            (BoundRules::Http, named.hosts),
            named.at,
        );
        let attachments = match bound {
            Ok(attachments) => attachments,
            // The limit keeps the object off this Gateway only, so its other Gateways are tried.
            Err(found) if found.code == Code::LimitExceeded => {
                report.refuse_excess(sourced.document, field, found.problem, found.fix);
                return true;
            }
            Err(found) => {
                let BindingProblem { code, problem, fix } = found;
                report.warning(code, sourced.document, field, problem, fix);
                return true;
            }
        };
        // All servers with the object's hosts are closed or redirect.
        let Some(first) = attachments.first() else {
            return true;
        };
        let service = first.gateway.clone();
        let ports = ingress.ports_of(named.key, &attachments);
        let object = RouteObject {
            namespace: metadata.namespace.clone(),
            name: metadata.name.clone(),
            kind: sourced.document.object.kind().as_str().to_owned(),
        };
        for attachment in attachments {
            if !budget.add_attachment(&attachment.hosts) {
                return false;
            }
            ingress.attachments.push((object.clone(), attachment));
        }
        // The first object has all bytes of the Gateway; later ones have what it leaves.
        let left = self.regex_bytes_left.get(&service).copied();
        let left = left.unwrap_or(REGEXES_PER_SERVICE_BYTES_MAX);
        let mut point = RoutePoint::of_gateway(&service, named.key.clone(), ports, left);
        if !self.attach(sourced, &mut point, budget, report) {
            return false;
        }
        let left = point.regex_bytes_left;
        self.regex_bytes_left.insert(service, left);
        true
    }

    /// Attaches the rules of the object to one service or Gateway. Returns false if the budget is
    /// exceeded.
    fn attach(
        &mut self,
        sourced: &Sourced<'_, VirtualService>,
        point: &mut RoutePoint<'_>,
        budget: &mut ResourceBudget,
        report: &mut DiagnosticCollector,
    ) -> bool {
        let spec = &sourced.object.spec;
        let mut broken = fault_outside_rules(sourced);
        if has_no_http(sourced) && broken.is_none() {
            return true;
        }
        let count = self.delegates.count_rules(sourced);
        if count > RULES_PER_ROUTE_MAX {
            let problem = format!("the object has {count} rules, more than {RULES_PER_ROUTE_MAX}");
            broken.get_or_insert_with(|| problem.clone());
            report.refuse_excess(sourced.document, "spec.http", problem, "use fewer rules");
        }
        if let Some(problem) = point.audience_problem(sourced) {
            broken.get_or_insert_with(|| format!("spec.exportTo: {problem}"));
            let fix = "remove the field: routes apply to all clients of the tenant";
            report.error(
                Code::UnsupportedField,
                sourced.document,
                "spec.exportTo",
                problem,
                fix,
            );
        }
        point.split_ports(|| {
            self.delegates.any_rule(sourced, |namespace, rule| {
                let mut matches = rule.matches.iter();
                matches.any(|it| it.port.is_some()) || fans_out(namespace, rule, self.to)
            })
        });
        let mut regexes = RegexBudget {
            bytes_left: point.regex_bytes_left,
            copies: point.rule_copies(),
            service: format!("{}/{}", point.service.namespace, point.service.name),
            gateways: Vec::new(), // The point is one Service or Gateway: its bytes are above.
            costs: std::mem::take(&mut self.costs),
        };
        let implied = spec
            .http
            .is_empty()
            .then(|| EffectiveRule::implied(sourced)); // A broken object refuses all requests.
        let delegates = &self.delegates;
        let written = implied.into_iter().chain(delegates.rules_of(sourced));
        let mut is_within = true;
        for (at, rule) in written.enumerate() {
            let mut reading = RuleContext {
                document: rule.document,
                changes_of: rule.changes_of,
                field: rule.field.clone(),
                report,
                broken: broken.clone().or_else(|| rule.broken.clone()),
                refusal_status: STATUS_BROKEN,
                regexes: &mut regexes,
            };
            if let Some(problem) = &rule.problem {
                let issue = FieldIssue::new("", problem.problem.clone(), problem.fix)
                    .with_code(problem.code);
                if problem.drops_rule {
                    reading.warning(problem.field, issue);
                    continue;
                }
                reading.broken(problem.field, issue);
            }
            let rules = &mut self.rules;
            is_within = attach_rule(
                (sourced, at, &rule),
                point,
                self.to,
                &mut reading,
                &mut |it| {
                    let is_within = budget.add_rule(&it);
                    rules.push(it); // Beyond the budget the caller drops all.
                    is_within
                },
            );
            if !is_within {
                break;
            }
        }
        point.regex_bytes_left = regexes.bytes_left;
        self.costs = regexes.costs;
        is_within
    }
}

/// Attaches one rule of an object to one service or Gateway. Returns false as soon as `add` does.
fn attach_rule(
    (sourced, at, rule): (&Sourced<'_, VirtualService>, usize, &EffectiveRule<'_>),
    point: &mut RoutePoint<'_>,
    to: &DestinationIndex<'_>,
    reading: &mut RuleContext<'_>,
    add: &mut dyn FnMut(RouteRule) -> bool,
) -> bool {
    // What all groups have in common is read once, so that its problems are reported once.
    let mut effects = RouteEffects::of_virtual_service(&rule.written, reading);
    let answer = route_answers::of_virtual_service(&rule.written, reading);
    let groups = groups((sourced, at, rule), point, reading);
    let fans_out = fans_out(rule.namespace, &rule.written, to);
    let fans_out = fans_out && point.fans_out();
    let mut is_read = false;
    for (number, (group, matches)) in groups.iter().enumerate() {
        let part = part_of(number, groups.len());
        for port in rule_ports(group.port, fans_out, &point.ports) {
            // A rule for all ports has no destination that follows the dialled port.
            // Without ports nothing can be dialled, so the 0 decides nothing.
            let dialled = port.or(point.ports.first().copied()).unwrap_or_default();
            // A broken rule refuses at every port. Its destinations are read for the first one, or
            // those of a small rule would be read for thousands.
            let action = match is_read && reading.broken.is_some() {
                true => reading.action("route", Vec::new()),
                false => {
                    let action = action(rule, &answer, dialled, to, reading);
                    let resolve =
                        |mirror: &Destination| to.of_destination(rule.namespace, mirror, dialled);
                    let mirrors =
                        route_mirrors::of_virtual_service(&rule.written, &resolve, reading);
                    effects.set_mirrors(mirrors);
                    action
                }
            };
            is_read = true;
            let action = effects.guard(action, reading);
            let suffix = port.map(|port| format!(":{port}")).unwrap_or_default();
            let metadata = &sourced.object.metadata;
            let name = point.name_in(&metadata.namespace);
            let mut rule = RouteRule {
                key: RouteKey {
                    tenant: point.service.tenant.clone(),
                    kind: sourced.document.object.kind().as_str().to_owned(),
                    namespace: metadata.namespace.clone(),
                    name: metadata.name.clone(),
                    rule: format!("{name}{suffix}.{at}{part}"),
                },
                parent: point.service.clone(),
                parent_port: port,
                consumer: None,
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
    true
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
    let mut found: Vec<(String, ServiceKey)> = Vec::new();
    // `check_host_count` reports the rest.
    for (at, host) in hosts.iter().take(HOSTS_PER_ROUTE_MAX).enumerate() {
        let field = format!("spec.hosts[{at}]");
        let Some(key) =
            names::service(to.tenant, own, host).filter(|key| to.services.contains_key(key))
        else {
            let problem = format!("{host:?} is not a service of this tenant");
            let fix = "write a Service's name, or name.namespace; other hosts are not supported in this version";
            // One of the names is `mesh`. With others, the host may be meant for those Gateways.
            if sourced.object.spec.gateways.len() > 1 {
                report.warning(Code::UnresolvedHost, sourced.document, field, problem, fix);
            } else {
                report.error(Code::UnresolvedHost, sourced.document, field, problem, fix);
            }
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

/// Returns whether the object has rules only for connections that are no HTTP. HTTP requests then
/// go to the service that was dialled, as in Istio.
fn has_no_http(sourced: &Sourced<'_, VirtualService>) -> bool {
    let is_written = |field: &str| {
        let mut faults = sourced.document.faults.iter();
        faults.any(|fault| is_within(&fault.field, field))
    };
    sourced.object.spec.http.is_empty()
        && sourced.fault("spec.http").is_none()
        && (connection_rules::has_rules(sourced.object)
            || OTHER_PROTOCOLS.into_iter().any(is_written))
}

/// Returns the hosts of an object as Gateways compare them: a short name is that of a service of the
/// object's namespace.
fn gateway_hosts(
    sourced: &Sourced<'_, VirtualService>,
    report: &mut DiagnosticCollector,
) -> Vec<Option<HostMatch>> {
    let own = &sourced.object.metadata.namespace;
    let mut hosts = BTreeSet::new();
    let written = sourced.object.spec.hosts.iter().enumerate();
    for (at, host) in written.take(HOSTS_PER_ROUTE_MAX) {
        let parsed = match host.as_str() {
            "*" => Ok(None),
            name if !name.contains('.') => {
                let name = format!("{name}.{own}.svc.{}", names::CLUSTER_DOMAIN);
                names::host_match(&name).map(Some)
            }
            name => names::host_match(name).map(Some),
        };
        match parsed {
            Ok(host) => drop(hosts.insert(host)),
            Err(problem) => {
                let fix = "write a name such as www.example.com, *.example.com or \"*\"";
                let field = format!("spec.hosts[{at}]");
                report.error(Code::InvalidHostname, sourced.document, field, problem, fix);
            }
        }
    }
    hosts.into_iter().collect()
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

fn action(
    written: &EffectiveRule<'_>,
    answer: &Option<RouteAnswer>,
    dialled: u16,
    to: &DestinationIndex<'_>,
    rule: &mut RuleContext<'_>,
) -> RouteAction {
    if let Some(answer) = answer {
        return rule.answer(answer.clone());
    }
    let route = &written.written.route;
    // The rule refuses, so nobody uses what its destinations are.
    rule.check_backend_count("route", route.len());
    if route.len() > BACKENDS_PER_RULE_MAX {
        return rule.action("route", Vec::new());
    }
    let is_alone = route.len() == 1;
    let mut backends: Vec<Backend> = Vec::with_capacity(route.len());
    for (at, share) in route.iter().enumerate() {
        let weight = share.weight.unwrap_or(if is_alone { 100 } else { 0 });
        let target = to.of_destination(written.namespace, &share.destination, dialled);
        let field = format!("route[{at}]");
        let mut backend = rule.backend(&field, weight, target);
        backend_filters::add_headers(&mut backend, share.headers.as_ref(), &field, rule);
        backends.push(backend);
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
    (sourced, place, written): (&Sourced<'_, VirtualService>, usize, &EffectiveRule<'_>),
    point: &mut RoutePoint<'_>,
    rule: &mut RuleContext<'_>,
) -> Vec<(RouteGroup, Vec<HttpMatch>)> {
    // A rule without `match` matches every request.
    let implied = [HttpMatchRequest::default()];
    let mut conditions: &[HttpMatchRequest] = if written.written.matches.is_empty() {
        &implied
    } else {
        &written.written.matches
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
        if !point.is_meant(written.namespace, &condition.gateways, &field, rule) {
            // The match is for other Gateways.
            continue;
        }
        if !point.may_have_source(&sourced.object.spec.gateways, condition, &field, rule) {
            continue;
        }
        let ports = match point.ports_of(condition, &field, rule) {
            Ok(ports) => ports,
            // Such a match has a diagnostic already.
            Err(NeverMatches) => continue,
        };
        let hosts = authority(&field, condition, rule);
        let order = precedence::istio(sourced.document, [place, at]);
        let http = http_match(&field, condition, order, rule);
        for port in ports {
            let mut http = http.clone();
            point.sort(&mut http, sourced.document, (port, &hosts));
            let hosts = hosts.clone();
            let group = groups.entry(RouteGroup { port, hosts }).or_default();
            group.push(http);
        }
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
    // Hosts are compared in lower case.
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
        // A pattern is a condition of the match, see `pattern_of`.
        _ => return Vec::new(),
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
    written: &HttpMatchRequest,
    precedence: Precedence,
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
            // `pattern_of` reads patterns, and reports a condition without any text.
            StringMatch { exact: None, .. } => None,
            _ => {
                let problem = "it is no method";
                let issue = FieldIssue::new("", problem, "write a method such as GET");
                rule.broken(&format!("{field}.method"), issue);
                None
            }
        });
    let headers = written
        .headers
        .iter()
        .map(|(name, condition)| (format!(".{name}"), header_name(name), value(condition)));
    let mut headers = conditions(rule, &format!("{field}.headers"), headers);
    headers.extend(without_headers(field, written, rule));
    headers.extend(pattern_of("method", METHOD, &written.method, field, rule));
    let authority = &written.authority;
    headers.extend(pattern_of("authority", AUTHORITY, authority, field, rule));
    headers.extend(scheme(field, &written.scheme, rule));
    headers.extend(source(field, written, rule));
    let query = written
        .query_params
        .iter()
        .map(|(name, condition)| (format!(".{name}"), text(name), value(condition)));
    let query = conditions(rule, &format!("{field}.queryParams"), query);
    HttpMatch {
        precedence,
        path: uri,
        method,
        headers,
        query,
    }
}

/// Resolves the headers that a request must not have.
fn without_headers(
    field: &str,
    written: &HttpMatchRequest,
    rule: &mut RuleContext<'_>,
) -> impl Iterator<Item = ValueMatch> {
    let unwanted = written
        .without_headers
        .iter()
        .map(|(name, condition)| (format!(".{name}"), header_name(name), value(condition)));
    let unwanted = conditions(rule, &format!("{field}.withoutHeaders"), unwanted);
    unwanted.into_iter().map(|condition| ValueMatch {
        value: TextMatch::Not(Box::new(condition.value)),
        ..condition
    })
}

/// Resolves the condition on the scheme. As in Istio, letter case counts.
fn scheme(
    field: &str,
    written: &Option<StringMatch>,
    rule: &mut RuleContext<'_>,
) -> Option<ValueMatch> {
    let written = written.as_ref()?;
    let Ok(TextMatch::Exact(exact)) = value(written) else {
        return pattern_of("scheme", SCHEME, &Some(written.clone()), field, rule);
    };
    let schemes = [UrlScheme::Http, UrlScheme::Https].map(UrlScheme::text);
    if !schemes.contains(&exact.as_str()) {
        let problem = "no request has this scheme, so this never matches";
        let issue = FieldIssue::new("scheme", problem, "write http or https");
        rule.warning(field, issue.with_code(Code::MatchNeverApplies));
    }
    Some(ValueMatch {
        name: SCHEME.to_owned(),
        value: TextMatch::Exact(exact),
    })
}

/// Resolves the conditions on the client's workload.
fn source(field: &str, written: &HttpMatchRequest, rule: &mut RuleContext<'_>) -> Vec<ValueMatch> {
    let labels = written.source_labels.iter().map(|(key, value)| {
        let name = text(key).map(|key| format!("{SOURCE_LABEL}{key}"));
        (format!(".{key}"), name, text(value).map(TextMatch::Exact))
    });
    let mut conditions = conditions(rule, &format!("{field}.sourceLabels"), labels);
    let namespace = &written.source_namespace;
    if !namespace.is_empty() {
        match Namespace::new(namespace.as_str()) {
            Ok(namespace) => conditions.push(ValueMatch {
                name: SOURCE_NAMESPACE.to_owned(),
                value: TextMatch::Exact(namespace.to_string()),
            }),
            Err(_) => {
                let problem = format!("{:?} is no namespace's name", short(namespace));
                let fix = "use 1 to 63 lower-case letters, digits and '-'";
                let issue = FieldIssue::new("", problem, fix);
                rule.broken(&format!("{field}.sourceNamespace"), issue);
            }
        }
    }
    conditions
}

/// Resolves the pattern that `method`, `authority` or `scheme` is compared with, if it is no exact text.
/// Hosts are compared in lower case and without their port.
fn pattern_of(
    what: &str,
    name: &str,
    written: &Option<StringMatch>,
    field: &str,
    rule: &mut RuleContext<'_>,
) -> Option<ValueMatch> {
    let pattern = match written.as_ref()? {
        // `authority` and `http_match` read exact texts. With another condition beside it, one is
        // broken: to leave both out would match more.
        StringMatch {
            exact: Some(_),
            prefix: None,
            regex: None,
        } => return None,
        StringMatch {
            exact: None,
            prefix: Some(prefix),
            regex: None,
        } if name == AUTHORITY => text(&prefix.to_ascii_lowercase()).map(TextMatch::Prefix),
        written => value(written),
    };
    // The colon of a group with flags is not one in front of a port.
    let port = |text: &str| text.replace("(?:", "(").replace("(?i:", "(").contains(':');
    let checked = pattern.and_then(|pattern| match pattern {
        TextMatch::Prefix(text) | TextMatch::Regex(text) if name == AUTHORITY && port(&text) => {
            let problem = "hosts are compared without their port";
            Err(FieldIssue::new(
                "",
                problem,
                "leave out the port; match.port is for it",
            ))
        }
        TextMatch::Regex(pattern) => rule.regex(&pattern).map(TextMatch::Regex),
        TextMatch::Present => {
            let problem = "exactly one of exact, prefix and regex is required";
            Err(FieldIssue::new("", problem, "write one of them"))
        }
        other => Ok(other),
    });
    match checked {
        Ok(value) => Some(ValueMatch {
            name: name.to_owned(),
            value,
        }),
        Err(issue) => {
            rule.broken(&format!("{field}.{what}"), issue);
            None
        }
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
