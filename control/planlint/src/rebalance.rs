//! Checks moves for balance: single backends, few services at one time, no service that is still
//! migrating, and loads closer together than before. It does not check whether a move was
//! necessary.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::fleet::{Placement, ReplicaState};
use canal_model::ids::{AzName, BackendName, ServiceId};
use canal_model::plan::{Plan, PlannedService};

use crate::{Finding, PlanTransition};

/// Divisor for the number of services that may move at one time: one in this many, but at least
/// one.
/// The planner's number (docs/design/0003-cloud-tier.md), written again, because a check must not
/// depend on what it checks.
const WAVE: usize = 100;

/// Returns true if the only change is the exchange of one backend, and the service still has the
/// backends that it needs at home. A home may only move together with its backend.
pub(crate) fn is_exchange(
    step: &PlanTransition,
    id: ServiceId,
    from: &Placement,
    to: &Placement,
) -> bool {
    let of = |placement: &Placement| -> BTreeSet<(AzName, BackendName)> {
        placement
            .backends
            .iter()
            .flat_map(|(az, names)| names.iter().map(|name| (az.clone(), name.clone())))
            .collect()
    };
    let (old, new) = (of(from), of(to));
    let (left, reached): (Vec<_>, Vec<_>) = (
        old.difference(&new).collect(),
        new.difference(&old).collect(),
    );
    let ([left], [reached]) = (&left[..], &reached[..]) else {
        return false;
    };
    let home_az = step
        .demands
        .services
        .get(&id)
        .and_then(|demand| demand.home.as_ref());
    let is_bound =
        home_az.is_some_and(|home_az| step.fleet.backends.values().any(|az| az == home_az));
    let home_stays = from.home == to.home && (left.0 == from.home) == (reached.0 == from.home);
    home_stays
        || !is_bound
            && left.0 == from.home
            && reached.0 == to.home
            && from.at_home() == to.at_home()
}

/// Checks the services that moved by one backend without another reason.
pub(crate) fn check(step: &PlanTransition, moved: &[ServiceId], findings: &mut Vec<Finding>) {
    let most = (step.after.services.len() / WAVE).max(1);
    if moved.len() > most {
        findings.push(Finding::Wave {
            moved: moved.len(),
            most,
        });
    }
    for service in moved
        .iter()
        .map(|id| &step.after.services[id])
        .filter(|service| was_moving(service, step.after))
    {
        findings.push(Finding::Restless {
            service: service.key.clone(),
        });
    }
    let others = step
        .after
        .services
        .iter()
        .filter(|(id, _)| !moved.contains(id));
    // Loads are only comparable if the services that moved for balance are the only change.
    let is_alone = others.into_iter().all(|(id, service)| {
        step.before
            .services
            .get(id)
            .is_some_and(|b| b.placement == service.placement)
    });
    if !moved.is_empty() && is_alone && apart(step, step.after) >= apart(step, step.before) {
        findings.push(Finding::Apart { moved: moved.len() });
    }
}

/// Returns true if a table still has owners from an earlier change. A table that closes with this
/// plan retains its owners in any case.
fn was_moving(service: &PlannedService, plan: &Plan) -> bool {
    let is_old = |number: u32| number > 0 && number < plan.number;
    let mut tables = service.tables.values();
    tables.any(|table| {
        is_old(table.closing)
            || table.closing == 0
                && table
                    .chains
                    .iter()
                    .flatten()
                    .any(|member| is_old(member.owner_until_version))
    })
}

/// Returns the spread of loads: first over AZs, then over backends. Only backends that take
/// sessions count.
fn apart(step: &PlanTransition, plan: &Plan) -> (u128, u128) {
    let live = step
        .fleet
        .replicas
        .values()
        .filter(|r| r.up && r.state == ReplicaState::Active);
    let live: BTreeMap<&BackendName, &AzName> = live
        .filter(|r| step.fleet.backends.get(&r.backend) == Some(&r.az))
        .map(|r| (&r.backend, &r.az))
        .collect();
    let mut loads: BTreeMap<&BackendName, u128> = live.keys().map(|name| (*name, 0)).collect();
    for (id, service) in &plan.services {
        let Some(demand) = step.demands.services.get(id) else {
            continue;
        };
        for backend in service.placement.iter().flat_map(Placement::all) {
            if let Some(load) = loads.get_mut(backend) {
                *load += u128::from(demand.weight.max(1));
            }
        }
    }
    let mut azs: BTreeMap<&AzName, (u128, u128)> = BTreeMap::new();
    for (name, load) in &loads {
        let (sum, count) = azs.entry(live[name]).or_default();
        (*sum, *count) = (*sum + load, *count + 1);
    }
    // The sums are scaled by the product of all counts, so that no division rounds.
    let all: u128 = azs.values().map(|(_, count)| count).product();
    (
        azs.values()
            .map(|(sum, count)| sum * sum * (all / count))
            .sum(),
        loads.values().map(|load| load * load).sum(),
    )
}
