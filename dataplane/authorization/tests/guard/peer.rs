//! Tests which objects apply to a destination, and which PeerAuthentication decides if there are
//! several.

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_authorization::{PolicyDestination, applies, authentications, peer_mode};
use canal_model::authorization::{Authentication, PeerAuthentication, PeerMode, PolicyTarget};
use canal_model::program::Labels;

use crate::language::key;

fn labels(text: &str) -> Labels {
    text.split_whitespace()
        .map(|pair| {
            pair.split_once('=')
                .map(|(k, v)| (k.into(), v.into()))
                .unwrap()
        })
        .collect()
}

/// Parses a target: `tenant`, `ns:x`, `labels:a=b`, `labels:x:a=b`, or `service:alpha/default/web`.
fn target(text: &str) -> PolicyTarget {
    let parts: Vec<&str> = text.split(':').collect();
    match parts.as_slice() {
        ["tenant"] => PolicyTarget::Tenant,
        ["ns", namespace] => PolicyTarget::Namespace(namespace.parse().unwrap()),
        ["labels", wanted] => PolicyTarget::Workloads {
            namespace: None,
            labels: labels(wanted),
        },
        ["labels", namespace, wanted] => PolicyTarget::Workloads {
            namespace: Some(namespace.parse().unwrap()),
            labels: labels(wanted),
        },
        ["service", service] => PolicyTarget::Service(service.parse().unwrap()),
        _ => panic!("{text}"),
    }
}

#[test]
fn targets_choose_their_destinations() {
    let (namespace, own) = ("shop".parse().unwrap(), labels("app=web version=v1"));
    let (service, other) = (
        "alpha/shop/web".parse().unwrap(),
        "alpha/shop/db".parse().unwrap(),
    );
    let serving = PolicyDestination::workload(&namespace, &own).serving(Some(&service));
    for (text, workload, service) in [
        ("tenant", true, false),
        ("ns:shop", true, false),
        ("ns:other", false, false),
        ("labels:app=web", true, false),
        ("labels:shop:app=web version=v1", true, false),
        ("labels:other:app=web", false, false),
        ("labels:shop:app=db", false, false),
        ("labels:shop:tier=x", false, false),
        ("service:alpha/shop/web", true, true),
        ("service:alpha/shop/db", false, false),
    ] {
        assert_eq!(applies(&target(text), &serving), workload, "{text}");
        assert_eq!(
            applies(
                &target(text),
                &PolicyDestination::service(serving.service.unwrap())
            ),
            service,
            "{text}"
        );
    }
    assert!(applies(
        &target("service:alpha/shop/db"),
        &PolicyDestination::service(&other)
    ));
    assert!(!applies(
        &target("service:alpha/shop/web"),
        &PolicyDestination::workload(&namespace, &own)
    ));
}

/// A case's name, the PeerAuthentications, a port, and the mode that applies at it.
///
/// As in Istio, a scope that sets no mode takes that of the next wider scope, and the default is
/// PERMISSIVE.
/// The numbers after the targets in the cases are times of creation, which decide only among policies of one
/// scope.
type ModeCase = (&'static str, Vec<PeerAuthentication>, u16, PeerMode);

fn mode_cases() -> Vec<ModeCase> {
    use PeerMode::{Disable, Permissive, Strict};
    let one =
        |name: &str, at: &str, created: u64, mode: Option<PeerMode>, ports: &[(u16, PeerMode)]| {
            PeerAuthentication {
                key: key(name),
                target: target(at),
                mode,
                ports: ports.iter().copied().collect::<BTreeMap<_, _>>(),
                created,
            }
        };
    let tenant = || one("t", "tenant", 1, Some(Strict), &[]);
    let namespace = |mode| one("n", "ns:shop", 2, mode, &[]);
    let workload =
        |mode, ports: &[(u16, PeerMode)]| one("w", "labels:shop:app=web", 3, mode, ports);
    vec![
        ("nothing said", vec![], 80, Permissive),
        ("the tenant's", vec![tenant()], 80, Strict),
        (
            "the namespace's before the tenant's",
            vec![tenant(), namespace(Some(Permissive))],
            80,
            Permissive,
        ),
        (
            "a namespace without a PeerAuthentication",
            vec![tenant(), namespace(None)],
            80,
            Strict,
        ),
        (
            "the workload's before the namespace's",
            vec![namespace(Some(Strict)), workload(Some(Disable), &[])],
            80,
            Disable,
        ),
        (
            "a port's own",
            vec![workload(Some(Strict), &[(80, Permissive)])],
            80,
            Permissive,
        ),
        (
            "another port",
            vec![workload(Some(Strict), &[(80, Permissive)])],
            81,
            Strict,
        ),
        (
            "only a port's",
            vec![tenant(), workload(None, &[(80, Permissive)])],
            81,
            Strict,
        ),
        (
            "another workload's",
            vec![one("o", "labels:shop:app=db", 1, Some(Strict), &[])],
            80,
            Permissive,
        ),
        (
            "the oldest",
            vec![
                one("b", "ns:shop", 9, Some(Permissive), &[]),
                one("a", "ns:shop", 4, Some(Strict), &[]),
            ],
            80,
            Strict,
        ),
        (
            "of one age by name",
            vec![
                one("b", "ns:shop", 4, Some(Permissive), &[]),
                one("a", "ns:shop", 4, Some(Strict), &[]),
            ],
            80,
            Strict,
        ),
        (
            "a younger one's ports do not count",
            vec![
                workload(None, &[]),
                one("y", "labels:shop:app=web", 9, None, &[(80, Strict)]),
            ],
            80,
            Permissive,
        ),
    ]
}

#[test]
fn the_narrowest_and_of_those_the_oldest_peer_authentication_decides() {
    let (shop, own) = ("shop".parse().unwrap(), labels("app=web"));
    for (name, all, port, want) in mode_cases() {
        assert_eq!(
            peer_mode(&all, &PolicyDestination::workload(&shop, &own), port),
            want,
            "{name}"
        );
    }
}

#[test]
fn all_request_authentications_of_a_destination_count() {
    let one = |name: &str, at: &str| {
        Arc::new(Authentication {
            key: key(name),
            target: target(at),
            rules: vec![],
            broken: None,
        })
    };
    let all = [
        one("a", "tenant"),
        one("b", "ns:other"),
        one("c", "labels:shop:app=web"),
    ];
    let (shop, own) = ("shop".parse().unwrap(), labels("app=web"));
    let chosen = authentications(&all, &PolicyDestination::workload(&shop, &own));
    assert_eq!(
        chosen
            .iter()
            .map(|a| a.key.name.as_str())
            .collect::<Vec<_>>(),
        ["a", "c"]
    );
}
