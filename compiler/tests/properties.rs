//! What holds for every policy: the lowered form means what the oracle says, order of reading does not matter, and nothing panics.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use canal_compiler::generate::{Case, cases};
use canal_compiler::limits::WEIGHT_MAX;
use canal_compiler::oracle::{Request, Verdict, decide, holds, reads_path};
use canal_compiler::oracle_authorization::normal_path;
use canal_compiler::{Input, build_ir, compile, service_keys};
use canal_model::ids::{ServiceId, TenantName};
use canal_model::program::{AppProtocol, BackendTarget, HttpMatch, Resource, RouteAction, RouteRule, Service};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

/// The verdict found from the resources alone: of all matches that hold, the smallest precedence.
fn decide_by_resources(resources: &[Resource], request: &Request) -> Verdict {
    let service = resources.iter().find_map(|resource| match resource {
        Resource::Service(service) if service.key == request.service => Some(service),
        _ => None,
    });
    let Some(port) = service.and_then(|service: &Service| service.ports.iter().find(|port| port.port == request.port)) else {
        return Verdict::NoService;
    };
    let own: Vec<&RouteRule> = routes(resources)
        .filter(|rule| rule.parent == request.service && rule.parent_port.is_none_or(|port| port == request.port))
        .collect();
    if own.is_empty() || port.protocol == AppProtocol::Tcp {
        return Verdict::Service { service: request.service.clone(), port: request.port };
    }
    let matches = own.iter().flat_map(|rule| rule.matches.iter().map(move |http| (*rule, http)));
    let mut request = request.clone();
    if matches.clone().any(|(_, http)| reads_path(&http.path)) {
        let query = request.target.find('?').map(|at| request.target.split_off(at)).unwrap_or_default();
        let Some(normal) = normal_path(&request.target) else { return Verdict::AmbiguousPath };
        request.target = normal + &query;
    }
    let holding = matches.filter(|(rule, http)| holds(&rule.hosts, http, &request));
    let winner = holding.min_by(|(a, x): &(&RouteRule, &HttpMatch), (b, y)| (&x.precedence, &a.key).cmp(&(&y.precedence, &b.key)));
    match winner.map(|(rule, _)| (rule.key.clone(), rule.action.clone())) {
        None => Verdict::NoRule,
        Some((rule, RouteAction::Split(backends))) => Verdict::Split { rule, backends },
        Some((rule, RouteAction::Refuse { status, reason })) => Verdict::Refuse { rule, status, reason },
    }
}

fn routes(resources: &[Resource]) -> impl Iterator<Item = &RouteRule> {
    resources.iter().filter_map(|resource| match resource {
        Resource::Route(rule) => Some(rule),
        _ => None,
    })
}

/// Whatever a data plane may take for granted.
fn check_sound(resources: &[Resource]) {
    let mut names = BTreeSet::new();
    let mut ports = BTreeMap::new();
    let mut kinds = Vec::new();
    for resource in resources {
        assert!(names.insert((resource.kind(), resource.name())), "{} twice", resource.name());
        kinds.push(resource.kind());
        let read = canal_wire::southbound::decode(resource.kind(), &resource.name(), &canal_wire::southbound::encode(resource));
        assert_eq!(read.as_ref(), Ok(resource), "every data plane reads what was compiled");
        if let Resource::Service(service) = resource {
            ports.insert(service.key.clone(), service.ports.iter().map(|port| port.port).collect::<BTreeSet<u16>>());
        }
    }
    assert!(kinds.is_sorted(), "parents come first");
    for rule in routes(resources) {
        assert!(!rule.matches.is_empty(), "{}", rule.key);
        let own = &ports[&rule.parent];
        assert!(rule.parent_port.is_none_or(|port| own.contains(&port)), "{}", rule.key);
        let RouteAction::Split(backends) = &rule.action else { continue };
        assert!(backends.iter().any(|backend| backend.weight > 0), "{}", rule.key);
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
    fn resources_mean_what_the_oracle_says(case in cases()) {
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
        let mut shuffled: Case = case.clone();
        // A shuffle that proptest can repeat: sorted by a hash of the place and the seed.
        shuffled.documents.sort_by_key(|document| u64::from(document.origin.line).wrapping_add(1).wrapping_mul(seed | 1).rotate_left(23));
        prop_assert_eq!(compile(&shuffled.input()), expected);
    }
}

/// The generator is worth nothing if its requests miss its rules.
#[test]
fn generated_requests_meet_all_verdicts() {
    let mut runner = TestRunner::deterministic();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for _ in 0..200 {
        let case = cases().new_tree(&mut runner).unwrap().current();
        let ir = build_ir(&case.input()).0.unwrap();
        for request in &case.requests {
            let verdict = match decide(&ir, request) {
                Verdict::NoService => "no service",
                Verdict::Service { .. } => "service",
                Verdict::Split { .. } => "split",
                Verdict::Refuse { .. } => "refuse",
                Verdict::NoRule => "no rule",
                // The generator writes paths in their normal form; the named cases of `tests/differential` have others.
                Verdict::AmbiguousPath => "ambiguous path",
            };
            *counts.entry(verdict).or_default() += 1;
        }
    }
    let total: usize = counts.values().sum();
    assert!(counts.len() == 5 && counts.values().all(|count| count * 20 > total), "{counts:?} of {total}");
}

/// Golden policies, a few lines of which are lost, doubled, swapped or bent.
fn mutated() -> impl Strategy<Value = String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/compiler");
    let mut texts: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    texts.sort();
    let change = (any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..6u8, any::<char>());
    (prop::sample::select(texts), prop::collection::vec(change, 1..6)).prop_map(|(text, changes)| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        for (at, other, what, letter) in changes {
            let (at, other) = (at.index(lines.len()), other.index(lines.len()));
            match what {
                0 if lines.len() > 1 => drop(lines.remove(at)),
                1 => lines.insert(other, lines[at].clone()),
                2 => lines.swap(at, other),
                3 => lines[at].insert_str(0, "  "),
                4 => lines[at].push(letter),
                _ => lines[at] = lines[at].replacen([':', '[', '{'], &letter.to_string(), 1),
            }
        }
        lines.join("\n")
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bent_policies_never_panic_and_stay_sound(text in mutated()) {
        let parsed = canal_sources::parse("bent.yaml", &text);
        let documents: Vec<_> = parsed.documents.into_iter().map(Arc::new).collect();
        for document in &documents {
            // The text of a document alone says the same as the document in its file.
            let again = canal_sources::parse("again.yaml", &document.text);
            prop_assert_eq!(&again.documents[0].object, &document.object);
            prop_assert_eq!(&again.documents[0].faults, &document.faults);
        }
        let tenant = TenantName::new("alpha").unwrap();
        let ids = service_keys(&tenant, &documents).into_iter().zip(1..).map(|(key, id)| (key, ServiceId::new(id).unwrap())).collect();
        check_sound(&compile(&Input { tenant: &tenant, documents: &documents, service_ids: &ids, jwks: &Default::default() }).resources);
    }
}
