//! Properties of every policy: the lowered resources mean what the oracle says, the order of
//! documents does not matter, and nothing panics.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use canal_compiler::direct::paths;
use canal_compiler::limits::WEIGHT_MAX;
use canal_compiler::oracle::{self, OracleRequest, RoutingVerdict, decide, holds, reads_path};
use canal_compiler::{build_ir, compile};
use canal_generated_policies::authorization::{GeneratedPolicies, policies};
use canal_generated_policies::routing::{GeneratedRouting, cases};
use canal_model::authorization::{Attribute, Authorization};
use canal_model::ids::Namespace;
use canal_model::policy::kubernetes::DIRECT_ANNOTATION;
use canal_model::policy::{Document, Object};
use canal_model::program::{
    AppProtocol, BackendTarget, HttpMatch, Resource, RouteAction, RouteRule, Service, Workload,
};
use canal_oracle::answers;
use canal_oracle::authorization::{
    OracleDecision as Judgement, OracleDestination, decide as evaluate, is_for, routing_path,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::parsed_tenant::ParsedTenant;

/// Returns the decision from the resources alone: of all matches that hold, the one with the
/// smallest precedence.
fn decide_by_resources(resources: &[Resource], sent: &OracleRequest) -> RoutingVerdict {
    let service = resources.iter().find_map(|resource| match resource {
        Resource::Service(service) if service.key == sent.service => Some(service),
        _ => None,
    });
    let Some(port) = service
        .and_then(|service: &Service| service.ports.iter().find(|port| port.port == sent.port))
    else {
        return RoutingVerdict::NoService;
    };
    let of_port = |consumer: Option<&Namespace>| -> Vec<&RouteRule> {
        let is_own = |rule: &&RouteRule| {
            rule.parent == sent.service
                && rule.parent_port.is_none_or(|port| port == sent.port)
                && rule.consumer.as_ref() == consumer
        };
        routes(resources).filter(is_own).collect()
    };
    // The rules for the clients of a namespace replace those for all.
    let own = match sent.client.namespace.as_ref().map(|own| of_port(Some(own))) {
        Some(of_client) if !of_client.is_empty() => of_client,
        _ => of_port(None),
    };
    // Without rules, and on ports that are not HTTP, all goes to the service's own endpoints.
    if own.is_empty() || port.protocol == AppProtocol::Tcp {
        return RoutingVerdict::Service {
            service: sent.service.clone(),
            port: sent.port,
        };
    }
    let matches = own
        .iter()
        .flat_map(|rule| rule.matches.iter().map(move |http| (*rule, http)));
    let mut request = sent.clone();
    // If one match depends on the path, data planes normalize it for all matches of the port.
    if matches.clone().any(|(_, http)| reads_path(&http.path)) {
        // The query is no part of what is normalized.
        let query = request
            .target
            .find('?')
            .map(|at| request.target.split_off(at))
            .unwrap_or_default();
        request.target = routing_path(&request.target) + &query;
    }
    let holding = matches.filter(|(rule, http)| holds(&rule.hosts, http, &request));
    let winner = holding.min_by(|(a, x): &(&RouteRule, &HttpMatch), (b, y)| {
        (&x.precedence, &a.key).cmp(&(&y.precedence, &b.key))
    });
    let Some((winner, http)) = winner else {
        return RoutingVerdict::NoRule;
    };
    let rule = winner.key.clone();
    match winner.action.clone() {
        RouteAction::Split(backends) => RoutingVerdict::Split {
            rule,
            backends,
            attempts: winner.attempts.clone(),
            faults: winner.faults.clone(),
            cors: winner.cors.clone(),
            mirrors: winner.mirrors.clone(),
        },
        RouteAction::Answer(answer) => RoutingVerdict::Answer {
            rule,
            // The normalized path only selects the rule. The gateway builds the answer from the path
            // as the client sent it.
            answer: answers::answer(
                &answer,
                winner.filters.as_deref(),
                &http.path,
                &oracle::sent(sent),
                (sent.client.scheme(), sent.port),
            )
            .map(Box::new),
        },
        RouteAction::Refuse { status, reason } => RoutingVerdict::Refuse {
            rule,
            status,
            reason,
        },
    }
}

fn routes(resources: &[Resource]) -> impl Iterator<Item = &RouteRule> {
    resources.iter().filter_map(|resource| match resource {
        Resource::Route(rule) => Some(rule),
        _ => None,
    })
}

/// Checks everything that a data plane may assume about resources.
fn check_sound(resources: &[Resource]) {
    let mut names = BTreeSet::new();
    let mut ports = BTreeMap::new();
    let mut kinds = Vec::new();
    for resource in resources {
        assert!(
            names.insert((resource.kind(), resource.name())),
            "{} twice",
            resource.name()
        );
        kinds.push(resource.kind());
        // Resources must survive the wire format unchanged.
        let read = canal_wire::southbound::decode(
            resource.kind(),
            &resource.name(),
            &canal_wire::southbound::encode(resource),
        );
        assert!(
            read.as_ref().is_ok_and(|read| resource.reads_as(read)),
            "data planes read {resource:?} as {read:?}"
        );
        if let Resource::Ingress(gateway) = resource {
            let listeners = gateway.listeners.iter();
            ports.insert(gateway.key.clone(), listeners.map(|it| it.port).collect());
        }
        if let Resource::Service(service) = resource {
            ports.insert(
                service.key.clone(),
                service
                    .ports
                    .iter()
                    .map(|port| port.port)
                    .collect::<BTreeSet<u16>>(),
            );
        }
    }
    assert!(
        kinds.is_sorted(),
        "resources come after those that they refer to"
    );
    for rule in routes(resources) {
        assert!(!rule.matches.is_empty(), "{}", rule.key);
        let own = &ports[&rule.parent];
        assert!(
            rule.parent_port.is_none_or(|port| own.contains(&port)),
            "{}",
            rule.key
        );
        // Only a split chooses among backends.
        let RouteAction::Split(backends) = &rule.action else {
            continue;
        };
        // Data planes could choose no backend otherwise.
        assert!(
            backends.iter().any(|backend| backend.weight > 0),
            "{}",
            rule.key
        );
        for backend in backends {
            assert!(backend.weight <= WEIGHT_MAX);
            if let BackendTarget::Service { service, port, .. } = &backend.target {
                assert!(ports[service].contains(port), "{}", rule.key);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn resources_agree_with_the_oracle(case in cases()) {
        let (ir, _) = build_ir(&case.input());
        let ir = ir.unwrap();
        let resources = compile(&case.input()).resources;
        check_sound(&resources);
        for request in &case.requests {
            prop_assert_eq!(decide(&ir, request), decide_by_resources(&resources, request), "{:?}\n{}", request, &ir);
        }
    }

    #[test]
    fn the_order_of_documents_does_not_matter(case in cases(), seed in any::<u64>()) {
        let expected = compile(&case.input());
        let mut shuffled: GeneratedRouting = case.clone();
        // A reproducible shuffle for proptest: sorts by a hash of the position and the seed.
        shuffled.documents.sort_by_key(|document| u64::from(document.origin.line).wrapping_add(1).wrapping_mul(seed | 1).rotate_left(23));
        prop_assert_eq!(compile(&shuffled.input()), expected);
    }
}

/// The generator is useful only if its requests meet its rules.
#[test]
fn generated_requests_meet_all_verdicts() {
    let mut runner = TestRunner::deterministic();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for _ in 0..200 {
        let case = cases().new_tree(&mut runner).unwrap().current();
        let ir = build_ir(&case.input()).0.unwrap();
        for request in &case.requests {
            let verdict = match decide(&ir, request) {
                RoutingVerdict::NoService => "no service",
                RoutingVerdict::Service { .. } => "service",
                RoutingVerdict::Split { .. } => "split",
                RoutingVerdict::Answer { .. } => "answer",
                RoutingVerdict::Refuse { .. } => "refuse",
                RoutingVerdict::NoRule => "no rule",
            };
            *counts.entry(verdict).or_default() += 1;
        }
    }
    let total: usize = counts.values().sum();
    assert!(
        counts.len() == 6 && counts.values().all(|count| count * 100 > total),
        "{counts:?} of {total}"
    );
}

/// Returns the texts of the golden policies.
pub(crate) fn golden_texts() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/compiler");
    let mut texts: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "yaml")
        })
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    texts.sort();
    texts
}

/// A mutation of a text: one line is removed, duplicated, swapped or altered.
#[derive(Debug, Clone)]
pub(crate) struct MutatedLine {
    at: prop::sample::Index,
    other: prop::sample::Index,
    what: u8,
    letter: char,
}

pub(crate) fn mutated_lines() -> impl Strategy<Value = MutatedLine> {
    let change = (
        any::<prop::sample::Index>(),
        any::<prop::sample::Index>(),
        0..6u8,
        any::<char>(),
    );
    change.prop_map(|(at, other, what, letter)| MutatedLine {
        at,
        other,
        what,
        letter,
    })
}

impl MutatedLine {
    pub(crate) fn apply(&self, text: &str) -> String {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let (at, other) = (self.at.index(lines.len()), self.other.index(lines.len()));
        match self.what {
            0 if lines.len() > 1 => drop(lines.remove(at)),
            1 => lines.insert(other, lines[at].clone()),
            2 => lines.swap(at, other),
            3 => lines[at].insert_str(0, "  "),
            4 => lines[at].push(self.letter),
            _ => lines[at] = lines[at].replacen([':', '[', '{'], &self.letter.to_string(), 1),
        }
        lines.join("\n")
    }
}

/// Generates golden policies with a few mutated lines.
fn mutated() -> impl Strategy<Value = String> {
    (
        prop::sample::select(golden_texts()),
        prop::collection::vec(mutated_lines(), 1..6),
    )
        .prop_map(|(text, changes)| {
            let apply = |text: String, change: MutatedLine| change.apply(&text);
            changes.into_iter().fold(text, apply)
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bent_policies_never_panic_and_stay_sound(text in mutated()) {
        let parsed = canal_sources::parse("bent.yaml", &text);
        let documents: Vec<_> = parsed.documents.into_iter().map(Arc::new).collect();
        for document in &documents {
            // The text of a document alone parses to the same object as the document in its file.
            let again = canal_sources::parse("again.yaml", &document.text);
            prop_assert_eq!(&again.documents[0].object, &document.object);
            prop_assert_eq!(&again.documents[0].faults, &document.faults);
        }
        check_sound(&compile(&ParsedTenant::of("alpha", documents).input()).resources);
    }
}

/// On a direct port, a node's decision with the facts it observes equals the decision with all
/// facts: it admits nothing that a gateway denies.
#[test]
fn nodes_authorize_direct_ports_as_gateways_do() {
    let seen_by_nodes = [
        Attribute::SourcePrincipal,
        Attribute::SourceNamespace,
        Attribute::SourceServiceAccount,
        Attribute::SourceAddress,
        Attribute::DestinationPort,
        Attribute::DestinationAddress,
    ];
    let mut runner = TestRunner::deterministic();
    let (mut evaluated, mut denied, mut kept) = (0, 0, 0);
    // Deterministic cases; the counts below prove that enough of them matter.
    for _ in 0..400 {
        let GeneratedPolicies { mut case, facts } =
            policies().new_tree(&mut runner).unwrap().current();
        // All services request the direct path, because the generated pods serve HTTP.
        for document in &mut case.documents {
            if let Object::Service(service) = &document.object {
                let mut service = service.clone();
                service
                    .metadata
                    .annotations
                    .insert(DIRECT_ANNOTATION.to_owned(), "true".to_owned());
                *document = Arc::new(Document {
                    object: Object::Service(service),
                    ..(**document).clone()
                });
            }
        }
        let ir = build_ir(&case.input()).0.unwrap();
        for (service, port, path) in paths(&ir) {
            let serves = |w: &&Workload| {
                w.endpoints
                    .iter()
                    .any(|e| e.service == service && e.port == port)
            };
            for workload in ir.workloads.iter().filter(serves) {
                // Policies that a node cannot evaluate keep the gateway.
                if !path.is_direct() {
                    kept += 1;
                    continue;
                }
                let place = OracleDestination {
                    workload: Some((&workload.namespace, &workload.labels)),
                    service: Some(&service),
                };
                let own: Vec<&Authorization> = ir
                    .security
                    .authorizations
                    .iter()
                    .filter(|policy| is_for(&policy.target, &place))
                    .collect();
                for all in &facts {
                    let mut at_node = all.clone();
                    // A node observes connections only: attributes of requests are unknown to it.
                    at_node.is_complete = false;
                    at_node
                        .values
                        .retain(|attribute, _| seen_by_nodes.contains(attribute));
                    // In facts that are not complete, what has no value is unknown to gateways too.
                    if all.is_complete {
                        // What a node observes and has no value is absent, not unknown.
                        let observed = seen_by_nodes.iter();
                        for attribute in observed.filter(|it| !all.unseen.contains(*it)) {
                            at_node.values.entry(attribute.clone()).or_default();
                        }
                    }
                    let verdict = evaluate(&own, &at_node, &BTreeSet::new());
                    assert_eq!(
                        verdict,
                        evaluate(&own, all, &BTreeSet::new()),
                        "{service}:{port} {all:?}"
                    );
                    evaluated += 1;
                    denied += usize::from(matches!(verdict, Judgement::Deny { .. }));
                }
            }
        }
    }
    // With fewer denials, a node that admits everything could pass. The rest shows variety.
    assert!(
        evaluated > 1000 && denied * 20 > evaluated && kept > 100,
        "{evaluated} judged, {denied} denied, {kept} kept a gateway"
    );
}
