//! Warns about policy conditions that no hop on a path can observe. On such a path the policy
//! denies, because the condition cannot be evaluated. Also warns about server-name conditions on
//! ports where no TLS terminates: they never match.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::authorization::{
    AllOf, Attribute, AttributeMatch, Authorization, AuthorizationAction, PolicyRule, PolicyTarget,
};
use canal_model::ids::{Namespace, ServiceKey};
use canal_model::program::{AppProtocol, Labels, Service, Workload};
use canal_model::trust::Termination;

use canal_ir::text_security;

/// Maximum number of places that one diagnostic names.
/// They suffice to find the cause, and a policy may apply to thousands.
const SHOWN_MAX: usize = 3;

/// All pods that clients can reach. Pods of one namespace with equal labels and services form one
/// group, of which one pod is named.
pub struct ReachablePods<'a> {
    groups: Vec<PodGroup<'a>>,
}

struct PodGroup<'a> {
    workload: &'a Workload,
    access_paths: Vec<AccessPath<'a>>,
}

/// A path by which clients reach a pod.
struct AccessPath<'a> {
    /// Service through which the pod is reached; `None` for its own address.
    service: Option<&'a ServiceKey>,
    label: String,
    /// Port of the pod, if it is known.
    port: Option<u16>,
    sees: HopVisibility,
}

/// The attributes that the last hop of a path can observe.
struct HopVisibility {
    http: bool,
    server_name: bool,
}

impl<'a> ReachablePods<'a> {
    pub fn new(
        services: &BTreeMap<ServiceKey, Service>,
        workloads: &'a [Workload],
        terminations: &[Termination],
    ) -> Self {
        let mut reported = BTreeSet::new();
        let mut groups = Vec::new();
        for workload in workloads {
            let endpoints: Vec<_> = workload
                .endpoints
                .iter()
                .map(|e| (&e.service, e.port, e.target_port))
                .collect();
            if reported.insert((&workload.namespace, &workload.labels, endpoints)) {
                groups.push(PodGroup {
                    workload,
                    access_paths: access_paths(services, workload, terminations),
                });
            }
        }
        Self { groups }
    }
}

fn access_paths<'a>(
    services: &BTreeMap<ServiceKey, Service>,
    workload: &'a Workload,
    terminations: &[Termination],
) -> Vec<AccessPath<'a>> {
    // Such a pod is dialled by its own address, where no hop parses HTTP or TLS.
    if workload.endpoints.is_empty() {
        let label = format!(
            "the pod {}/{}, which is behind no Service",
            workload.namespace, workload.name
        );
        return vec![AccessPath {
            service: None,
            label,
            port: None,
            sees: HopVisibility {
                http: false,
                server_name: false,
            },
        }];
    }
    let paths = workload.endpoints.iter().filter_map(|endpoint| {
        // Endpoints were made of these ports, so each is found.
        let port = services
            .get(&endpoint.service)?
            .ports
            .iter()
            .find(|port| port.port == endpoint.port)?;
        let server_name = terminations
            .iter()
            .any(|t| t.service == endpoint.service && t.port == endpoint.port);
        let name = format!(
            "{}/{}:{}",
            endpoint.service.namespace, endpoint.service.name, endpoint.port
        );
        // A port without a declared protocol may carry HTTP, so it counts as HTTP.
        let http = port.protocol != AppProtocol::Tcp;
        let label = if http {
            name
        } else {
            format!("{name}, which is opaque TCP")
        };
        Some(AccessPath {
            service: Some(&endpoint.service),
            label,
            port: Some(endpoint.target_port),
            sees: HopVisibility { http, server_name },
        })
    });
    paths.collect()
}

/// A condition of rule number `rule` that cannot be observed at `places`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UnobservableCondition {
    rule: usize,
    attribute: Attribute,
    places: String,
}

impl UnobservableCondition {
    /// Returns the field, the problem and the fix.
    pub(crate) fn describe(&self) -> (String, String, &'static str) {
        let Self {
            rule,
            attribute,
            places,
        } = self;
        let field = format!("spec.rules[{rule}]");
        let attribute = text_security::attribute(attribute);
        if self.attribute == Attribute::ServerName {
            let problem = format!(
                "{attribute} has no value on the way to {places}, since no TLS ends there: the rule matches nothing there"
            );
            return (
                field,
                problem,
                "write a Termination for the port, or leave the condition out",
            );
        }
        let problem = format!(
            "{attribute} is unknown to every hop on the path to {places}: the condition cannot be evaluated, and requests that match the rest of the rule are denied"
        );
        let fix = "use only attributes of a connection (source, destination.port), name the port's protocol, or limit the rule to other ports";
        (field, problem, fix)
    }
}

/// Returns the conditions of a policy that no hop can observe on some path. Such connections are
/// denied.
pub(crate) fn blind(
    policy: &Authorization,
    reachable: &ReachablePods<'_>,
) -> Vec<UnobservableCondition> {
    // CUSTOM policies are skipped: authorizers are called for opaque connections too. Broken ones
    // deny anyway; dry runs and audits deny nothing.
    if policy.broken.is_some()
        || policy.dry_run
        || matches!(
            policy.action,
            AuthorizationAction::Audit | AuthorizationAction::Custom(_)
        )
    {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (number, rule) in policy
        // Every hop observes attributes of layer 4, so a rule with only those is always evaluated.
        .rules
        .iter()
        .enumerate()
        .filter(|(_, rule)| has_condition_on(rule, |attribute| !attribute.is_l4()))
    {
        let mut places: BTreeMap<&Attribute, BTreeSet<&str>> = BTreeMap::new();
        let by_name = has_condition_on(rule, |attribute| *attribute == Attribute::ServerName);
        // On paths where HTTP is observed, only server names may be unobservable.
        for group in reachable
            .groups
            .iter()
            .filter(|group| by_name || group.access_paths.iter().any(|path| !path.sees.http))
        {
            let is_selected = is_for(
                &policy.target,
                &group.workload.namespace,
                &group.workload.labels,
            );
            for path in &group.access_paths {
                // A Service's policy counts only on paths to that Service.
                let counts = is_selected
                    || matches!((&policy.target, path.service), (PolicyTarget::Service(own), Some(to)) if own == to);
                if counts && let Some(attribute) = unseen(rule, path) {
                    places.entry(attribute).or_default().insert(&path.label);
                }
            }
        }
        found.extend(
            places
                .into_iter()
                .map(|(attribute, places)| UnobservableCondition {
                    rule: number,
                    attribute: attribute.clone(),
                    places: join_names(&places),
                }),
        );
    }
    found
}

fn has_condition_on(rule: &PolicyRule, for_it: fn(&Attribute) -> bool) -> bool {
    rule.from
        .iter()
        .chain(&rule.to)
        .chain([&rule.when])
        .flatten()
        .any(|clause| for_it(&clause.attribute))
}

/// Returns whether a policy targets workloads with these labels.
fn is_for(target: &PolicyTarget, own: &Namespace, labels: &Labels) -> bool {
    match target {
        PolicyTarget::Tenant => true,
        PolicyTarget::Namespace(namespace) => own == namespace,
        PolicyTarget::Workloads {
            namespace,
            labels: wanted,
        } => {
            namespace.as_ref().is_none_or(|namespace| own == namespace)
                && wanted
                    .iter()
                    .all(|(name, value)| labels.get(name) == Some(value))
        }
        PolicyTarget::Service(_) => false,
    }
}

fn join_names(places: &BTreeSet<&str>) -> String {
    let shown: Vec<&str> = places.iter().take(SHOWN_MAX).copied().collect();
    match places.len().saturating_sub(SHOWN_MAX) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Returns an attribute without which it is unknown whether the rule matches, regardless of its
/// other conditions. It may also be a server name that no connection has.
fn unseen<'a>(rule: &'a PolicyRule, path: &AccessPath<'_>) -> Option<&'a Attribute> {
    let when = possible(&rule.when, path)?;
    let from = alternatives(&rule.from, path)?;
    let to = alternatives(&rule.to, path)?;
    [from, to, when]
        .into_iter()
        .flatten()
        .min_by_key(|attribute| **attribute != Attribute::ServerName)
}

/// Evaluates alternatives. `None` means that none of them can hold. `Some(None)` means that one can
/// hold by observable attributes alone.
fn alternatives<'a>(
    alternatives: &'a [AllOf],
    path: &AccessPath<'_>,
) -> Option<Option<&'a Attribute>> {
    if alternatives.is_empty() {
        return Some(None);
    }
    let possible: Vec<Option<&Attribute>> = alternatives
        .iter()
        .filter_map(|all| possible(all, path))
        .collect();
    if possible.contains(&None) {
        Some(None)
    } else {
        possible.first().copied()
    }
}

/// Evaluates clauses. `None` means that they cannot all hold at this port. Else returns one of
/// their attributes that cannot be observed.
fn possible<'a>(all: &'a AllOf, path: &AccessPath<'_>) -> Option<Option<&'a Attribute>> {
    let mut unseen = None;
    for clause in all {
        match (&clause.attribute, path.port) {
            (Attribute::DestinationPort, Some(port)) => {
                let (wanted, unwanted) = (
                    clause.any.contains(&AttributeMatch::Port(port)),
                    clause.none.contains(&AttributeMatch::Port(port)),
                );
                if unwanted || !(wanted || clause.any.is_empty()) {
                    return None;
                }
            }
            (Attribute::ServerName, _) if !path.sees.server_name && !clause.any.is_empty() => {
                unseen = Some(&clause.attribute)
            }
            // A gateway observes both attributes on every connection.
            (Attribute::ServerName | Attribute::RemoteAddress, _) => {}
            (attribute, _) if !attribute.is_l4() && !path.sees.http => {
                unseen = unseen.or(Some(attribute))
            }
            _ => {}
        }
    }
    Some(unseen)
}
