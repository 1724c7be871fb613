//! Warns of conditions that no hop on a connection's way can see: there the policy denies, since nobody can tell whether it matches. Also of
//! server names where no TLS ends, which no connection has.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::authorization::{Action, All, Attribute, Authorization, Match, PolicyTarget, Rule};
use canal_model::ids::{Namespace, ServiceKey};
use canal_model::program::{AppProtocol, Labels, Service, Workload};
use canal_model::trust::Termination;

use crate::text_security;

/// Places that are named in one finding.
const SHOWN_MAX: usize = 3;

/// What there is to be reached: pods of one namespace with the same labels and services are one group, of which one is named.
pub(in crate::resolve) struct Ground<'a> {
    groups: Vec<Group<'a>>,
}

struct Group<'a> {
    workload: &'a Workload,
    ways: Vec<Way<'a>>,
}

/// A way to a pod.
struct Way<'a> {
    /// `None`: by the pod's own address.
    service: Option<&'a ServiceKey>,
    place: String,
    /// The pod's, if it is known.
    port: Option<u16>,
    sees: Sees,
}

/// What the last hop on a way can see.
struct Sees {
    http: bool,
    server_name: bool,
}

impl<'a> Ground<'a> {
    pub(in crate::resolve) fn new(
        services: &BTreeMap<ServiceKey, Service>,
        workloads: &'a [Workload],
        terminations: &[Termination],
    ) -> Self {
        let mut told = BTreeSet::new();
        let mut groups = Vec::new();
        for workload in workloads {
            let endpoints: Vec<_> = workload.endpoints.iter().map(|e| (&e.service, e.port, e.target_port)).collect();
            if told.insert((&workload.namespace, &workload.labels, endpoints)) {
                groups.push(Group { workload, ways: ways(services, workload, terminations) });
            }
        }
        Self { groups }
    }
}

fn ways<'a>(services: &BTreeMap<ServiceKey, Service>, workload: &'a Workload, terminations: &[Termination]) -> Vec<Way<'a>> {
    if workload.endpoints.is_empty() {
        let place = format!("the pod {}/{}, which is behind no Service", workload.namespace, workload.name);
        return vec![Way { service: None, place, port: None, sees: Sees { http: false, server_name: false } }];
    }
    let way = workload.endpoints.iter().filter_map(|endpoint| {
        let port = services.get(&endpoint.service)?.ports.iter().find(|port| port.port == endpoint.port)?;
        let server_name = terminations.iter().any(|t| t.service == endpoint.service && t.port == endpoint.port);
        let place = format!("{}/{}:{}", endpoint.service.namespace, endpoint.service.name, endpoint.port);
        let http = port.protocol != AppProtocol::Tcp;
        let place = if http { place } else { format!("{place}, which is opaque TCP") };
        Some(Way { service: Some(&endpoint.service), place, port: Some(endpoint.target_port), sees: Sees { http, server_name } })
    });
    way.collect()
}

/// A condition of rule number `rule` that is not seen at `places`.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::resolve) struct Blind {
    rule: usize,
    attribute: Attribute,
    places: String,
}

impl Blind {
    /// The field, the problem and the mend.
    pub(in crate::resolve) fn told(&self) -> (String, String, &'static str) {
        let Self { rule, attribute, places } = self;
        let field = format!("spec.rules[{rule}]");
        let attribute = text_security::attribute(attribute);
        if self.attribute == Attribute::ServerName {
            let problem =
                format!("{attribute} has no value on the way to {places}, since no TLS ends there: the rule matches nothing there");
            return (field, problem, "write a Termination for the port, or leave the condition out");
        }
        let problem = format!(
            "nobody sees {attribute} on the way to {places}: whether the rule matches cannot be told, and what the rest of it fits is denied"
        );
        let mend =
            "ask only for what a connection shows (source, destination.port), name the port's protocol, or limit the rule to other ports";
        (field, problem, mend)
    }
}

/// Where a policy's rules depend on what nobody sees. Such connections are denied.
pub(in crate::resolve) fn blind(policy: &Authorization, ground: &Ground<'_>) -> Vec<Blind> {
    // Authorizers are asked about opaque connections too.
    if policy.broken.is_some() || policy.dry_run || matches!(policy.action, Action::Audit | Action::Custom(_)) {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (number, rule) in policy.rules.iter().enumerate().filter(|(_, rule)| asks(rule, |attribute| !attribute.is_l4())) {
        let mut places: BTreeMap<&Attribute, BTreeSet<&str>> = BTreeMap::new();
        let by_name = asks(rule, |attribute| *attribute == Attribute::ServerName);
        // Where HTTP is seen, only server names may not be.
        for group in ground.groups.iter().filter(|group| by_name || group.ways.iter().any(|way| !way.sees.http)) {
            let is_selected = is_for(&policy.target, &group.workload.namespace, &group.workload.labels);
            for way in &group.ways {
                let counts = is_selected || matches!((&policy.target, way.service), (PolicyTarget::Service(own), Some(to)) if own == to);
                if counts && let Some(attribute) = unseen(rule, way) {
                    places.entry(attribute).or_default().insert(&way.place);
                }
            }
        }
        found.extend(places.into_iter().map(|(attribute, places)| Blind {
            rule: number,
            attribute: attribute.clone(),
            places: listed(&places),
        }));
    }
    found
}

fn asks(rule: &Rule, for_it: fn(&Attribute) -> bool) -> bool {
    rule.from.iter().chain(&rule.to).chain([&rule.when]).flatten().any(|clause| for_it(&clause.attribute))
}

/// Whether a policy is for workloads with these labels.
fn is_for(target: &PolicyTarget, own: &Namespace, labels: &Labels) -> bool {
    match target {
        PolicyTarget::Tenant => true,
        PolicyTarget::Namespace(namespace) => own == namespace,
        PolicyTarget::Workloads { namespace, labels: wanted } => {
            namespace.as_ref().is_none_or(|namespace| own == namespace)
                && wanted.iter().all(|(name, value)| labels.get(name) == Some(value))
        }
        PolicyTarget::Service(_) => false,
    }
}

fn listed(places: &BTreeSet<&str>) -> String {
    let shown: Vec<&str> = places.iter().take(SHOWN_MAX).copied().collect();
    match places.len().saturating_sub(SHOWN_MAX) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// An attribute without which nobody can tell whether the rule matches, whatever the rest is; or the server name that is not there.
fn unseen<'a>(rule: &'a Rule, way: &Way<'_>) -> Option<&'a Attribute> {
    let when = possible(&rule.when, way)?;
    let from = alternatives(&rule.from, way)?;
    let to = alternatives(&rule.to, way)?;
    [from, to, when].into_iter().flatten().min_by_key(|attribute| **attribute != Attribute::ServerName)
}

/// `None`: none of them can hold. `Some(None)`: one can, by what is seen alone.
fn alternatives<'a>(alternatives: &'a [All], way: &Way<'_>) -> Option<Option<&'a Attribute>> {
    if alternatives.is_empty() {
        return Some(None);
    }
    let possible: Vec<Option<&Attribute>> = alternatives.iter().filter_map(|all| possible(all, way)).collect();
    if possible.contains(&None) { Some(None) } else { possible.first().copied() }
}

/// `None`: the clauses cannot all hold at this port. Else an attribute of theirs that is not seen.
fn possible<'a>(all: &'a All, way: &Way<'_>) -> Option<Option<&'a Attribute>> {
    let mut unseen = None;
    for clause in all {
        match (&clause.attribute, way.port) {
            (Attribute::DestinationPort, Some(port)) => {
                let (wanted, unwanted) = (clause.any.contains(&Match::Port(port)), clause.none.contains(&Match::Port(port)));
                if unwanted || !(wanted || clause.any.is_empty()) {
                    return None;
                }
            }
            (Attribute::ServerName, _) if !way.sees.server_name && !clause.any.is_empty() => unseen = Some(&clause.attribute),
            // A gateway sees both on every connection.
            (Attribute::ServerName | Attribute::RemoteAddress, _) => {}
            (attribute, _) if !attribute.is_l4() && !way.sees.http => unseen = unseen.or(Some(attribute)),
            _ => {}
        }
    }
    Some(unseen)
}
