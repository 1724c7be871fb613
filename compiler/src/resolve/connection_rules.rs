//! Resolves the rules of VirtualServices (Istio) for connections, `tls` and `tcp`, at Gateways. A
//! rule is on the listeners that its matches name, as a route of its own. In the mesh such rules are
//! not supported.

use std::collections::BTreeSet;

use canal_attachment::{Attachment, BindingProblem, BoundRules, MESH, hostname};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName};
use canal_model::policy::istio::{ConnectionMatch, ConnectionRule, VirtualService};
use canal_model::program::{
    Backend, HostMatch, HttpMatch, PathMatch, RouteAction, RouteKey, RouteRule,
};

use super::delegate::is_within;
use super::destination::DestinationIndex;
use super::ingress::Ingress;
use super::pattern_costs::PatternCosts;
use super::route_fields::{FieldIssue, RegexBudget, RuleContext, STATUS_BROKEN};
use super::route_point::RoutePoint;
use super::tenant_objects::Sourced;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::{HOSTS_PER_ROUTE_MAX, MATCHES_PER_RULE_MAX, RULES_PER_ROUTE_MAX};
use crate::names;
use crate::precedence::{self, CatchAllOrder};
use crate::resource_budget::ResourceBudget;

/// A Gateway that an object names.
pub(super) struct NamedGateway<'a> {
    pub(super) key: &'a (Namespace, ObjectName),
    /// Position among the object's Gateways.
    pub(super) at: usize,
    /// Hosts of the object, as Gateways compare them.
    pub(super) hosts: &'a [Option<HostMatch>],
}

/// The `tls` rules of an object, or its `tcp` rules.
#[derive(Clone, Copy)]
struct ConnectionRules<'a> {
    name: &'static str,
    bound: BoundRules,
    rules: &'a [ConnectionRule],
}

fn lists(virtual_service: &VirtualService) -> [ConnectionRules<'_>; 2] {
    let spec = &virtual_service.spec;
    let list = |name, bound, rules| ConnectionRules { name, bound, rules };
    [
        list("tls", BoundRules::Tls, spec.tls.as_slice()),
        list("tcp", BoundRules::Tcp, spec.tcp.as_slice()),
    ]
}

/// Reports the rules of an object that would apply in the mesh, where they have no effect.
pub(super) fn report_in_mesh(
    sourced: &Sourced<'_, VirtualService>,
    report: &mut DiagnosticCollector,
) {
    for list in lists(sourced.object) {
        let is_meant = |rule: &ConnectionRule| {
            let mut matches = rule.matches.iter();
            let is_for_mesh = |it: &ConnectionMatch| {
                it.gateways.is_empty() || it.gateways.iter().any(|name| name == MESH)
            };
            rule.matches.is_empty() || matches.any(is_for_mesh)
        };
        if list.rules.iter().any(is_meant) {
            let problem = "routing connections in the mesh is not supported in this version; the rules of `http` apply";
            let fix =
                "name Gateways only; in the mesh, connections go to the service that was dialled";
            let field = format!("spec.{}", list.name);
            report.error(
                Code::UnsupportedField,
                sourced.document,
                field,
                problem,
                fix,
            );
        }
    }
}

/// Returns whether an object has rules for connections.
pub(super) fn has_rules(virtual_service: &VirtualService) -> bool {
    lists(virtual_service).iter().any(|it| !it.rules.is_empty())
}

/// Puts the rules of an object on the listeners of a Gateway. Returns false if the budget is exceeded.
pub(super) fn add(
    sourced: &Sourced<'_, VirtualService>,
    gateway: &NamedGateway<'_>,
    to: &DestinationIndex<'_>,
    ingress: &mut Ingress,
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
    rules: &mut Vec<RouteRule>,
) -> bool {
    for list in lists(sourced.object) {
        // Unlike those of a route, the rules within the limit stay, as the diagnostic says.
        if list.rules.len() > RULES_PER_ROUTE_MAX {
            let field = format!("spec.{}", list.name);
            let problem = format!(
                "the object has more than {RULES_PER_ROUTE_MAX} rules; the rest is left out"
            );
            report.refuse_excess(sourced.document, field, problem, "use fewer rules");
        }
        let written = list.rules.iter().take(RULES_PER_ROUTE_MAX).enumerate();
        for (at, rule) in written {
            let reading = RuleReader {
                sourced,
                gateway,
                list,
                field: format!("spec.{}[{at}]", list.name),
            };
            let (attachments, broken) = reading.attachments(rule, ingress, report);
            // Without an attachment the rule is on no listener, and there is none to add.
            let Some(mut rule) = reading.route_rule(at, rule, &attachments, to, ingress, report)
            else {
                continue;
            };
            if let Some(reason) = broken {
                rule.action = RouteAction::Refuse {
                    status: STATUS_BROKEN,
                    reason,
                };
            }
            let object = rule.key.route();
            for attachment in attachments {
                if !budget.add_attachment(&attachment.hosts) {
                    return false;
                }
                ingress.attachments.push((object.clone(), attachment));
            }
            if !budget.add_rule(&rule) {
                return false;
            }
            rules.push(rule);
        }
    }
    true
}

/// The reason why a rule refuses the connections that it may have been meant for.
type BrokenReason = Option<String>;

/// Reads one rule for one Gateway.
struct RuleReader<'r, 'd> {
    sourced: &'r Sourced<'d, VirtualService>,
    gateway: &'r NamedGateway<'r>,
    list: ConnectionRules<'r>,
    field: String,
}

impl RuleReader<'_, '_> {
    /// Returns the listeners on which a match of the rule holds, each with its hosts. A match that is
    /// not valid may have been meant for any host of the object, and breaks the rule there: a wider
    /// rule must not take its connections.
    fn attachments(
        &self,
        rule: &ConnectionRule,
        ingress: &mut Ingress,
        report: &mut DiagnosticCollector,
    ) -> (Vec<Attachment>, BrokenReason) {
        let mut broken = None;
        let implied = [ConnectionMatch::default()];
        let matches = match rule.matches.as_slice() {
            // As in Istio, a rule of `tcp` without a match takes every connection; one of `tls`
            // needs names.
            [] if self.list.bound == BoundRules::Tcp => implied.as_slice(),
            written => written,
        };
        let document = self.sourced.document;
        let is_counted = matches.is_empty() || matches.len() > MATCHES_PER_RULE_MAX;
        let matches = if is_counted {
            let problem = format!(
                "the rule has {} matches, and not 1 to {MATCHES_PER_RULE_MAX}",
                matches.len()
            );
            let fix = "write matches with sniHosts";
            let field = format!("{}.match", self.field);
            broken = Some(format!("{field}: {problem}"));
            report.error(Code::MissingField, document, field, problem, fix);
            implied.as_slice()
        } else {
            matches
        };
        let mut found: Vec<Attachment> = Vec::new();
        for (at, condition) in matches.iter().enumerate() {
            let field = format!("{}.match[{at}]", self.field);
            if !self.is_meant(condition, &field, &mut broken, report) {
                // The match is for other Gateways.
                continue;
            }
            let hosts = match broken {
                // The rule has no valid list of matches.
                Some(_) if is_counted => self.gateway.hosts.to_vec(),
                _ => self.hosts(condition, &field, &mut broken, report),
            };
            // All its names were left out, with an error each.
            if hosts.is_empty() && self.list.bound == BoundRules::Tls {
                continue;
            }
            let from = &self.sourced.object.metadata.namespace;
            let bound = ingress.listeners.bind(
                self.gateway.key,
                from,
                (self.list.bound, &hosts),
                self.gateway.at,
            );
            let bound = match bound {
                Ok(bound) => bound,
                Err(BindingProblem { code, problem, fix }) => {
                    // Only a warning: other matches and Gateways may take the rule.
                    report.warning(code, document, field, problem, fix);
                    continue;
                }
            };
            for attachment in bound {
                let port = ingress.port_of(self.gateway.key, &attachment);
                if condition.port.is_some_and(|it| Some(it.get()) != port) {
                    continue;
                }
                // Several matches may hold on one listener, which has the rule once.
                match found
                    .iter_mut()
                    .find(|it| it.listener == attachment.listener)
                {
                    None => found.push(attachment),
                    Some(known) => {
                        let known: &mut Vec<Option<HostMatch>> = &mut known.hosts;
                        let new = attachment.hosts.into_iter();
                        let new: Vec<_> = new.filter(|host| !known.contains(host)).collect();
                        known.extend(new);
                    }
                }
            }
        }
        (found, broken)
    }

    /// Returns whether a match holds at the Gateway, or may have been meant to.
    fn is_meant(
        &self,
        condition: &ConnectionMatch,
        field: &str,
        broken: &mut BrokenReason,
        report: &mut DiagnosticCollector,
    ) -> bool {
        let own = &self.sourced.object.metadata.namespace;
        match RoutePoint::names_gateway(own, &condition.gateways, self.gateway.key) {
            Ok(is_meant) => is_meant,
            Err((at, problem)) => {
                let field = format!("{field}.gateways[{at}]");
                let fix = "write the name of a Gateway, or namespace/name";
                broken.get_or_insert(format!("{field}: {problem}"));
                report.error(
                    Code::InvalidValue,
                    self.sourced.document,
                    field,
                    problem,
                    fix,
                );
                true
            }
        }
    }

    /// Returns the hosts of a match: its server names, or those of the object, also if its names are
    /// not valid. A name outside the hosts of the object belongs to others' objects, and is left out.
    fn hosts(
        &self,
        condition: &ConnectionMatch,
        field: &str,
        broken: &mut BrokenReason,
        report: &mut DiagnosticCollector,
    ) -> Vec<Option<HostMatch>> {
        let document = self.sourced.document;
        let field = format!("{field}.sniHosts");
        // A TCP connection has no server name, so the hosts of the object decide.
        if self.list.bound == BoundRules::Tcp {
            if !condition.sni_hosts.is_empty() {
                let problem = "only rules of tls match server names";
                let fix = "write the rule in tls, or remove the field";
                broken.get_or_insert(format!("{field}: {problem}"));
                report.error(Code::ConflictingFields, document, field, problem, fix);
            }
            return self.gateway.hosts.to_vec();
        }
        if condition.sni_hosts.is_empty() || condition.sni_hosts.len() > HOSTS_PER_ROUTE_MAX {
            let problem = format!("a match has 1 to {HOSTS_PER_ROUTE_MAX} server names");
            let fix = "write the names, such as www.example.com";
            broken.get_or_insert(format!("{field}: {problem}"));
            report.error(Code::MissingField, document, field, problem, fix);
            return self.gateway.hosts.to_vec();
        }
        let mut is_broken = false;
        let mut hosts = BTreeSet::new();
        for (at, name) in condition.sni_hosts.iter().enumerate() {
            let host = match name.as_str() {
                "*" => Ok(None),
                // Server names are compared in lower case.
                name => names::host_match(&name.to_ascii_lowercase()).map(Some),
            };
            let field = format!("{field}[{at}]");
            match host {
                Ok(host) if self.is_own(name, host.as_ref()) => drop(hosts.insert(host)),
                Ok(_) => {
                    let problem =
                        "the name is outside spec.hosts, so the match does not hold for it";
                    let fix = "add the name to spec.hosts, or remove it";
                    report.error(Code::InvalidHostname, document, field, problem, fix);
                }
                Err(problem) => {
                    let fix = "write a name such as www.example.com or *.example.com";
                    is_broken = true;
                    broken.get_or_insert(format!("{field}: {problem}"));
                    report.error(Code::InvalidHostname, document, field, problem, fix);
                }
            }
        }
        if is_broken {
            hosts.extend(self.gateway.hosts.iter().cloned());
        }
        hosts.into_iter().collect()
    }

    /// Returns whether a server name is within the hosts of the object, as Istio demands.
    fn is_own(&self, written: &str, name: Option<&HostMatch>) -> bool {
        let mut hosts = self.gateway.hosts.iter();
        // A short name among the hosts stands for a Service, and Istio compares it as it is written.
        let mut written_hosts = self.sourced.object.spec.hosts.iter();
        hosts.any(|host| hostname::covers(host.as_ref(), name))
            || written_hosts.any(|host| host.eq_ignore_ascii_case(written))
    }

    /// Returns the rule as a route of its own.
    fn route_rule(
        &self,
        at: usize,
        written: &ConnectionRule,
        attachments: &[Attachment],
        to: &DestinationIndex<'_>,
        ingress: &Ingress,
        report: &mut DiagnosticCollector,
    ) -> Option<RouteRule> {
        let document = self.sourced.document;
        let metadata = &self.sourced.object.metadata;
        let service = &attachments.first()?.gateway;
        let ports = ingress.ports_of(self.gateway.key, attachments);
        let mut faults = document.faults.iter();
        let fault = faults.find(|fault| is_within(&fault.field, &self.field));
        // No rule for connections has an expression.
        let mut regexes = RegexBudget {
            bytes_left: 0,
            copies: 1,
            service: service.to_string(),
            gateways: Vec::new(),
            costs: PatternCosts::default(),
        };
        let mut reading = RuleContext {
            document,
            changes_of: None,
            field: self.field.clone(),
            report,
            broken: fault.map(|fault| format!("{}: {}", fault.field, fault.problem)),
            // A broken rule resets its connections, which see no status.
            refusal_status: STATUS_BROKEN,
            regexes: &mut regexes,
        };
        let follows = |rule: &ConnectionRule| {
            let mut destinations = rule.route.iter().map(|it| &it.destination);
            destinations.any(|it| to.follows_dialled_port(&metadata.namespace, it))
        };
        if ports.len() > 1 && follows(written) {
            let problem = "the destination has several ports and names none, and the rule is for several ports of the Gateway";
            let fix = "write destination.port.number";
            reading.broken("route", FieldIssue::new("", problem, fix));
        }
        // With several ports no destination follows the dialled one, as was checked above.
        let dialled = ports.first().copied().unwrap_or_default();
        let action = action(&metadata.namespace, written, dialled, to, &mut reading);
        // Rules of `http` of the object have another kind, so that no listener has both.
        let kind = format!("{}.{}.{at}", document.object.kind(), self.list.name);
        let mut order = precedence::istio_on_gateway(document, [0, 0], CatchAllOrder::Before);
        // Rules of one object follow each other as they are written, so the indexes above decide
        // nothing. Five digits sort as numbers do, up to `RULES_PER_ROUTE_MAX`.
        order.object = format!("{}/{}.{at:05}", order.object, self.list.name);
        Some(RouteRule {
            key: RouteKey {
                tenant: service.tenant.clone(),
                kind,
                namespace: metadata.namespace.clone(),
                name: metadata.name.clone(),
                rule: RoutePoint::name_of(service, &metadata.namespace),
            },
            parent: service.clone(),
            parent_port: None,
            consumer: None,
            hosts: Vec::new(),
            matches: vec![HttpMatch {
                precedence: order,
                // A connection has no path. Rules of connections match with `/`, which every one
                // has.
                path: PathMatch::StringPrefix("/".to_owned()),
                method: None,
                headers: Vec::new(),
                query: Vec::new(),
            }],
            action,
            filters: None,
            attempts: None,
            faults: None,
            cors: None,
            mirrors: Vec::new(),
        })
    }
}

fn action(
    namespace: &Namespace,
    written: &ConnectionRule,
    dialled: u16,
    to: &DestinationIndex<'_>,
    reading: &mut RuleContext<'_>,
) -> RouteAction {
    let is_alone = written.route.len() == 1;
    let mut backends: Vec<Backend> = Vec::with_capacity(written.route.len());
    for (at, share) in written.route.iter().enumerate() {
        let weight = share.weight.unwrap_or(if is_alone { 100 } else { 0 });
        let target = to.of_destination(namespace, &share.destination, dialled);
        backends.push(reading.backend(&format!("route[{at}]"), weight, target));
    }
    reading.action("route", backends)
}
