//! Validation of single responses: which are accepted, which are refused for which reason, and that
//! a refused response changes nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use canal_model::program::ResourceKind;
use canal_wire::discovery::DeltaDiscoveryResponse;
use proptest::prelude::*;

use super::fixture::{response, service, tenant};
use crate::state::examine;
use crate::state_owner::deliver_whole;
use crate::{ApplyFn, RefusedResource, ResourceState, UpdateSource};

fn initial_state() -> ResourceState {
    let mut state = ResourceState::default();
    for r in [
        response(
            5,
            ResourceKind::Tenant,
            &[tenant("alpha", 1), tenant("beta", 2)],
            &[],
        ),
        response(5, ResourceKind::Service, &[service("a", 1)], &[]),
    ] {
        let (change, _) =
            examine(&state, &[ResourceKind::Tenant, ResourceKind::Service], &r).unwrap();
        state.apply(&change);
    }
    state
}

fn names(state: &ResourceState) -> Vec<String> {
    let mut all: Vec<_> = ResourceKind::ALL
        .iter()
        .flat_map(|k| state.resources_of(*k))
        .map(|(n, h)| format!("{n}={}", h.version))
        .collect();
    all.sort();
    all
}

/// A case's name, a response, the reason of its refusal, and a part of the reason's text.
type ResponseCase = (
    &'static str,
    DeltaDiscoveryResponse,
    &'static str,
    &'static str,
);

/// Returns cases for a state of generation 5.
fn response_cases() -> Vec<ResponseCase> {
    let edit = |change: fn(&mut DeltaDiscoveryResponse)| {
        let mut r = response(
            6,
            ResourceKind::Tenant,
            &[tenant("alpha", 9), tenant("gamma", 3)],
            &["beta"],
        );
        change(&mut r);
        r
    };
    vec![
        (
            "older generation",
            edit(|r| r.system_version_info = "4".into()),
            "stale_generation",
            "remove this data plane's state file",
        ),
        (
            "no generation",
            edit(|r| r.system_version_info.clear()),
            "bad_generation",
            "decimal",
        ),
        (
            "word",
            edit(|r| r.system_version_info = "latest".into()),
            "bad_generation",
            "\"latest\"",
        ),
        (
            "unknown type",
            edit(|r| r.type_url = "type.googleapis.com/x.Y".into()),
            "unknown_type",
            "x.Y",
        ),
        (
            "other kind",
            response(6, ResourceKind::Route, &[], &[]),
            "not_subscribed",
            "Route",
        ),
        (
            "no body",
            edit(|r| r.resources[1].resource = None),
            "bad_envelope",
            "gamma",
        ),
        (
            "truncated",
            edit(|r| r.resources[1].resource.as_mut().unwrap().value.truncate(3)),
            "bad_resource",
            "gamma",
        ),
        (
            "empty",
            // No bytes are a valid message of protobuf, whose fields are all empty.
            edit(|r| r.resources[1].resource.as_mut().unwrap().value.clear()),
            "bad_resource",
            "gamma",
        ),
        (
            "renamed",
            edit(|r| r.resources[1].name = "delta".into()),
            "bad_resource",
            "delta",
        ),
        (
            "twice",
            edit(|r| r.resources[1] = r.resources[0].clone()),
            "bad_envelope",
            "named twice",
        ),
        (
            "put and removed",
            edit(|r| r.removed_resources.push("gamma".into())),
            "bad_envelope",
            "named twice",
        ),
        (
            "another type inside",
            edit(|r| r.resources[1].resource.as_mut().unwrap().type_url = "x/x.Y".into()),
            "bad_envelope",
            "another type",
        ),
    ]
}

#[test]
fn bad_response_is_refused_whole_and_bad_resource_by_name() {
    let cases = response_cases();
    let state = initial_state();
    for (at, (name, response, reason, text)) in cases.into_iter().enumerate() {
        let examined = examine(
            &state,
            &[ResourceKind::Tenant, ResourceKind::Service],
            &response,
        );
        if at < 5 {
            let refusal = examined.unwrap_err();
            assert_eq!(refusal.reason(), reason, "{name}");
            assert!(refusal.to_string().contains(text), "{name}: {refusal}");
            continue;
        }
        let (change, refused) = examined.unwrap();
        assert_eq!((refused.len(), refused[0].label), (1, reason), "{name}");
        assert!(refused[0].why.contains(text), "{name}: {}", refused[0].why);
        // The rest is accepted: the good resources of alpha, and the removal of beta.
        let taken: Vec<String> = change.names().collect();
        assert!(
            !taken.contains(&refused[0].name) && taken.contains(&"beta".to_string()),
            "{name}: {taken:?}"
        );
    }
}

#[test]
fn good_responses_change_only_the_resources_they_name() {
    // The number is the generation in which the resource came; the state has generation 5.
    let before = ["alpha/shop/a=v5", "alpha=v5", "beta=v5"];
    assert_eq!(names(&initial_state()), before);
    let cases = [
        (
            "replaced",
            response(6, ResourceKind::Tenant, &[tenant("alpha", 9)], &[]),
            &["alpha/shop/a=v5", "alpha=v6", "beta=v5"][..],
        ),
        (
            "removed and added",
            response(6, ResourceKind::Tenant, &[tenant("c", 3)], &["beta"]),
            &["alpha/shop/a=v5", "alpha=v5", "c=v6"],
        ),
        (
            "same generation again",
            response(5, ResourceKind::Tenant, &[tenant("alpha", 1)], &[]),
            &before,
        ),
        (
            "nothing is not an empty set",
            response(7, ResourceKind::Tenant, &[], &[]),
            &before,
        ),
        (
            "a missing resource is not reported as lost",
            response(7, ResourceKind::Tenant, &[], &["nobody"]),
            &before,
        ),
        (
            "all are removed by name",
            response(7, ResourceKind::Tenant, &[], &["alpha", "beta"]),
            &["alpha/shop/a=v5"],
        ),
    ];
    for (name, response, after) in cases {
        let mut state = initial_state();
        let (change, refused) = examine(
            &state,
            &[ResourceKind::Tenant, ResourceKind::Service],
            &response,
        )
        .unwrap();
        assert!(refused.is_empty(), "{refused:?}");
        let undo = state.apply(&change);
        assert_eq!(names(&state), after, "{name}");
        state.undo(undo);
        assert_eq!(names(&state), before, "{name}, undone");
        assert_eq!(state.generation().0, 5, "{name}, undone");
    }
}

#[test]
fn unchanged_versions_are_not_delivered_again() {
    let state = initial_state();
    let r = response(
        5,
        ResourceKind::Tenant,
        &[tenant("alpha", 1), tenant("c", 3)],
        &["nobody"],
    );
    let (change, _) = examine(&state, &[ResourceKind::Tenant], &r).unwrap();
    assert_eq!(
        change
            .update
            .upserts
            .iter()
            .map(|r| r.name())
            .collect::<Vec<_>>(),
        ["c"]
    );
    assert!(change.update.removals.is_empty() && !change.is_empty());
}

/// Generates a response about tenants: generation, names put, names removed.
fn any_response() -> impl Strategy<Value = (u64, Vec<u8>, Vec<u8>)> {
    (
        0..12u64,
        prop::collection::vec(0..5u8, 0..4),
        prop::collection::vec(0..5u8, 0..3),
    )
}

proptest! {
    /// Reordered, repeated, stale, empty and contradictory pushes: the generation never falls, a
    /// refused response changes nothing, an accepted one changes exactly what it names once, and a
    /// rollback restores the earlier state.
    #[test]
    fn whatever_is_pushed_the_state_is_that_of_the_accepted_responses(pushes in prop::collection::vec(any_response(), 0..40)) {
        let name = |n: &u8| format!("t{n}");
        let (mut state, mut model) = (ResourceState::default(), BTreeMap::new());
        for (generation, put, remove) in pushes {
            let list: Vec<_> = put.iter().map(|n| tenant(&name(n), u32::from(*n) + 1)).collect();
            let gone: Vec<_> = remove.iter().map(name).collect();
            let refs: Vec<_> = gone.iter().map(String::as_str).collect();
            let before = (state.generation(), names(&state));
            let all: Vec<_> = put.iter().chain(&remove).collect();
            let once = |n: &&u8| all.iter().filter(|m| **m == *n).count() == 1;
            let good = generation >= state.generation().0;
            match examine(&state, &[ResourceKind::Tenant], &response(generation, ResourceKind::Tenant, &list, &refs)) {
                Ok((change, refused)) => {
                    prop_assert!(good);
                    prop_assert_eq!(refused.is_empty(), all.iter().all(once));
                    let undo = state.apply(&change);
                    state.undo(undo);
                    prop_assert_eq!((state.generation(), names(&state)), before);
                    state.apply(&change);
                    model.extend(put.iter().filter(once).map(|n| (name(n), format!("v{generation}"))));
                    remove.iter().filter(once).for_each(|n| { model.remove(&name(n)); });
                }
                Err(_) => {
                    prop_assert!(!good);
                    prop_assert_eq!((state.generation(), names(&state)), before);
                }
            }
            let expected: Vec<_> = model.iter().map(|(n, v)| format!("{n}={v}")).collect();
            prop_assert_eq!(names(&state), expected);
        }
    }
}

/// A few calls find the tenant that makes the callback panic in a whole state. A resource that is
/// refused by name is named once.
#[test]
fn one_bad_tenant_of_many_is_found_by_bisection() {
    // Several times more than the 14 calls that the bisection may take.
    const TENANTS: u32 = 64;
    let all: Vec<_> = (0..TENANTS)
        .map(|n| tenant(&format!("t{n:02}"), n + 1))
        .collect();
    let mut state = ResourceState::default();
    let (change, _) = examine(
        &state,
        &[ResourceKind::Tenant],
        &response(5, ResourceKind::Tenant, &all, &[]),
    )
    .unwrap();
    state.apply(&change);
    let calls = Arc::new(AtomicU64::new(0));
    let counter = calls.clone();
    let mut apply: ApplyFn = Box::new(move |update, state| {
        counter.fetch_add(1, Relaxed);
        assert!(update.upserts.iter().all(|r| r.name() != "t40"), "tripped");
        let unusable = state
            .get(ResourceKind::Tenant, "t03")
            .map(|r| RefusedResource::by_caller(r.kind(), r.name(), "cannot be used"));
        Ok(unusable.into_iter().collect())
    });
    // `t40` makes each call fail that contains it; `t03` is only refused by name.
    let refused = deliver_whole(
        &mut apply,
        &ResourceState::default(),
        &mut state,
        UpdateSource::Snapshot,
        &[ResourceKind::Tenant],
        false,
    )
    .unwrap();
    let names: Vec<_> = refused.iter().map(|r| r.name.as_str()).collect();
    assert_eq!(names, ["t03", "t40"]);
    assert_eq!(state.count(ResourceKind::Tenant), TENANTS as usize - 2);
    // The calls are the whole state, two per halving, and one that announces the closures.
    let most = u64::from(2 + 2 * TENANTS.ilog2());
    assert!(calls.load(Relaxed) <= most, "{} calls", calls.load(Relaxed));
}
