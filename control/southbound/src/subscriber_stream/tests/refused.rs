//! Refused resources: which resources are set aside, which tenants that affects, and the resulting
//! manifests.

use canal_model::authorization as a;

use super::*;

/// Returns a policy that denies everything.
pub(super) fn policy(tenant: &TenantName, name: &str) -> Resource {
    Resource::Authorization(a::Authorization {
        key: a::PolicyKey {
            tenant: tenant.clone(),
            namespace: "shop".parse().unwrap(),
            name: name.parse().unwrap(),
        },
        target: a::PolicyTarget::Tenant,
        action: a::AuthorizationAction::Deny,
        rules: vec![a::PolicyRule::default()],
        dry_run: false,
        broken: None,
    })
}

/// Returns a gateway of two tenants that starts without resources. Tenant alpha has one good policy
/// and 300 that the gateway refuses; tenant beta has one that denies.
fn cold_gateway(by_name: bool, splits: usize) -> (StreamWorld, TestSubscriber) {
    let mut w = StreamWorld::default();
    let mut alpha = shop(&["a"]);
    alpha.policies = (0..300)
        .map(|n| format!("p{n:03}"))
        .chain(["a0".to_string()])
        .collect();
    w.set("alpha", &alpha);
    w.set(
        "beta",
        &TenantScript {
            policies: ["deny".to_string()].into(),
            ..shop(&["b"])
        },
    );
    let mut c = TestSubscriber::with_limits(
        gateway("g1"),
        SessionLimits {
            nack_splits: splits,
            ..SessionLimits::default()
        },
    );
    c.by_name = by_name;
    c.refuses = (0..300).map(|n| format!("alpha/shop/p{n:03}")).collect();
    c.settle(&w);
    (w, c)
}

/// S1: NACKs of one tenant's policies never set another tenant's policy aside, whether they name
/// resources or not.
#[test]
fn refused_policies_of_one_tenant_leave_anothers_in_force() {
    for (by_name, splits) in [
        (true, NACK_SPLITS_MAX),
        (false, NACK_SPLITS_MAX),
        (false, 3),
        (false, 0),
    ] {
        let (_, c) = cold_gateway(by_name, splits);
        let case = format!("by name {by_name}, {splits} splits");
        assert!(
            c.resources
                .contains_key(&(ResourceKind::Authorization, "beta/shop/deny".into())),
            "{case}"
        );
        assert_eq!(
            c.sealed,
            [("alpha".to_string(), false), ("beta".to_string(), true)].into(),
            "{case}"
        );
        let p = c.session.progress();
        assert_eq!(
            p.refusals.keys().cloned().collect::<Vec<_>>(),
            [Some(tenant("alpha"))],
            "{case}"
        );
        assert!(p.acked >= p.target, "{case}: beta has all of its resources");
        if by_name {
            assert!(
                c.resources
                    .contains_key(&(ResourceKind::Authorization, "alpha/shop/a0".into())),
                "unnamed resources were accepted"
            );
            assert_eq!(p.refusals[&Some(tenant("alpha"))].count, 300);
        }
    }
}

#[test]
fn a_long_reason_of_a_refusal_is_cut() {
    use canal_wire::discovery::Status;
    use canal_wire::southbound::refused::{REASON_BYTES_MAX, TYPE_URL};
    use prost::Message;
    let reason = "é".repeat(REASON_BYTES_MAX);
    let resources = vec![canal_wire::program::refused_resources::RefusedResource {
        name: "alpha/shop/p".into(),
        reason,
    }];
    let value = canal_wire::program::RefusedResources { resources }.encode_to_vec();
    let nack = ReceivedNack::read(&Status {
        details: vec![prost_types::Any {
            type_url: TYPE_URL.into(),
            value,
        }],
        ..Status::default()
    });
    assert_eq!(nack.named_reasons(), [("alpha/shop/p", REASON_BYTES_MAX)]);
}

#[test]
fn manifest_agrees_again_once_refused_policies_are_gone() {
    let (mut w, mut c) = cold_gateway(true, 1);
    let mut alpha = shop(&["a"]);
    alpha.policies.insert("a0".into());
    w.set("alpha", &alpha);
    c.settle(&w);
    assert!(
        c.sealed["alpha"] && c.is_converged(),
        "{:?}",
        c.session.progress()
    );
    assert!(c.session.progress().refusals.is_empty());
}

/// A restarted process compares its resources with the manifests of the first batch, regardless of
/// the versions that it listed.
#[test]
fn first_batch_of_a_stream_brings_every_manifest() {
    let (w, mut c) = cold_gateway(true, 1);
    c.refuses.clear();
    c.sealed.clear();
    c.reconnect();
    c.settle(&w);
    assert_eq!(
        c.sealed,
        [("alpha".to_string(), true), ("beta".to_string(), true)].into()
    );
    assert!(c.is_converged());
}

/// The manifest is the last response of a batch, also after removals.
#[test]
fn manifest_is_sent_after_everything_that_it_seals() {
    let mut w = StreamWorld::default();
    let mut script = shop(&["a", "b"]);
    script.policies.insert("old".into());
    w.set("alpha", &script);
    let mut c = TestSubscriber::new(gateway("g1"));
    c.settle(&w);
    script.policies = ["new".to_string()].into();
    script.services.insert("a".into(), 77);
    w.set("alpha", &script);
    let mut kinds = Vec::new();
    while let Some(response) = c.session.next_response(&w.catalog) {
        kinds.push(kind_of(&response.type_url).unwrap());
        c.answer(response);
    }
    assert_eq!(
        kinds,
        [
            ResourceKind::Service,
            ResourceKind::Authorization,
            ResourceKind::Authorization,
            ResourceKind::Manifest
        ]
    );
    assert_eq!(c.sealed, [("alpha".to_string(), true)].into());
    script.services.insert("a".into(), 78);
    w.set("alpha", &script);
    assert_eq!(c.settle(&w), ["Service +alpha/shop/a"]);
    assert!(
        c.session.next_response(&w.catalog).is_none(),
        "a change of no security resource needs no manifest"
    );
}

/// A refused resource of the provider holds back everything that the data plane acknowledges.
#[test]
fn refused_resource_of_the_provider_holds_up_everything() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a"]));
    fleet(&mut w, 1, &["r1"], &[("alpha", 1)], &[]);
    let mut c = TestSubscriber::new(gateway("r1"));
    c.by_name = true;
    c.refuses.insert("r1".into());
    c.settle(&w);
    let p = c.session.progress();
    assert!(
        p.acked < p.target && p.refusals.contains_key(&None),
        "{p:?}"
    );
}

#[test]
fn one_refused_resource_does_not_hold_up_the_others() {
    let mut w = StreamWorld::default();
    let names: Vec<String> = (0..9).map(|i| format!("s{i}")).collect();
    let script = shop(&names.iter().map(String::as_str).collect::<Vec<_>>());
    w.set("alpha", &script);
    let mut c = TestSubscriber::new(node("alpha", "n9"));
    c.refuses.insert("alpha/shop/s5".into());
    c.settle(&w);
    assert_eq!(
        c.resources
            .keys()
            .filter(|(k, _)| *k == ResourceKind::Service)
            .count(),
        8
    );
    let p = c.session.progress();
    let refusals = &p.refusals[&Some(tenant("alpha"))];
    assert!(
        p.nack.contains("s5 is not good") && p.acked >= p.target && refusals.acked < p.target,
        "{p:?}"
    );
    assert_eq!(
        (refusals.count, &*refusals.examples[0].0.1),
        (1, "alpha/shop/s5")
    );
    assert_eq!(c.settle(&w), [""; 0], "what was refused is not sent again");

    let mut other = script.clone();
    other.services.insert("s1".into(), 50);
    w.set("alpha", &other);
    assert_eq!(c.settle(&w), ["Service +alpha/shop/s1"], "others go on");
    assert!(!c.is_converged());

    let mut fixed = other.clone();
    fixed.services.insert("s5".into(), 51);
    w.set("alpha", &fixed);
    c.refuses.clear();
    assert_eq!(c.settle(&w), ["Service +alpha/shop/s5"]);
    assert!(c.is_converged() && c.session.progress().nack.is_empty());
}

#[test]
fn a_reverted_change_that_was_refused_is_not_sent_again() {
    let mut w = StreamWorld::default();
    let good = shop(&["a"]);
    w.set("alpha", &good);
    let mut c = TestSubscriber::new(node("alpha", "n9"));
    c.settle(&w);
    let mut bad = good.clone();
    bad.services.insert("a".into(), 9);
    w.set("alpha", &bad);
    c.refuses.insert("alpha/shop/a".into());
    assert_eq!(c.settle(&w).len(), 1);
    assert!(!c.is_converged());
    w.set("alpha", &good);
    assert_eq!(c.settle(&w), [""; 0], "it still has the valid version");
    assert!(c.is_converged());
}

#[test]
fn the_search_for_the_bad_one_has_an_end() {
    let mut w = StreamWorld::default();
    let names: Vec<String> = (0..64).map(|i| format!("s{i:02}")).collect();
    w.set(
        "alpha",
        &shop(&names.iter().map(String::as_str).collect::<Vec<_>>()),
    );
    let mut c = TestSubscriber::with_limits(
        node("alpha", "n9"),
        SessionLimits {
            nack_splits: 5,
            ..SessionLimits::default()
        },
    );
    c.refuses
        .extend(names.iter().map(|n| format!("alpha/shop/{n}")));
    c.check_parents = false;
    let sent = c
        .settle(&w)
        .iter()
        .filter(|l| l.starts_with("Service"))
        .count();
    assert_eq!(
        sent,
        1 + 2 * 5,
        "five splits, then whole responses are set aside"
    );
    assert_eq!(
        c.resources
            .keys()
            .filter(|(k, _)| *k == ResourceKind::Service)
            .count(),
        0
    );
}
