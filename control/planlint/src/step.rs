//! Checks the way from one plan to the next: nobody with sessions is dropped, little moves, versions say the truth. It does not look at
//! what one plan shows by itself.

use std::collections::BTreeSet;

use canal_model::fleet::{Fleet, Placement, ReplicaState};
use canal_model::ids::{AzName, ReplicaNumber, ServiceId};
use canal_model::plan::{PlannedService, PlannedTable, Seat};
use canal_model::program::{BUCKETS, CHAIN};

use crate::{Finding, Noted, Step, wanted};

/// Checks what changed between two plans. Empty: all of it was allowed.
pub fn step(step: &Step) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (before, after) = (step.before, step.after);
    let is_same = after == before;
    if !is_same && (after.parent != before.number || after.number <= before.number) {
        findings.push(Finding::Parent { number: after.number, parent: after.parent });
    }
    let noted = Noted::of(before);
    for (id, service) in &after.services {
        let Some(old) = before.services.get(id) else { continue };
        check_service(step, &noted, *id, old, service, &mut findings);
        for (az, old_table) in &old.tables {
            match service.tables.get(az) {
                Some(table) => check_table(step, *id, old, service, (az, old_table, table), &mut findings),
                None => check_closed(step, *id, old, (az, old_table), &mut findings),
            }
        }
    }
    findings.sort();
    findings
}

fn check_service(step: &Step, noted: &Noted, id: ServiceId, old: &PlannedService, new: &PlannedService, findings: &mut Vec<Finding>) {
    if old.number != new.number {
        findings.push(Finding::Unstable { service: new.key.clone() });
    }
    let (Some(from), Some(to)) = (&old.placement, &new.placement) else { return };
    let asked = step.demands.services.get(&id).and_then(|demand| demand.home.as_ref());
    let home_stays = step.fleet.backends.values().any(|az| *az == from.home);
    if from.home != to.home && home_stays && asked != Some(&to.home) {
        findings.push(Finding::Unstable { service: new.key.clone() });
    }
    // One backend may be exchanged for uniqueness, if this service or another lost or lacked something.
    let (home, away) = wanted(&step.demands.rules);
    let is_whole = |placement: &Placement| placement.at_home() == home && placement.away() == away;
    let stays = |az: &AzName, backend| step.fleet.backends.get(backend) == Some(az);
    let is_touched = from.backends.iter().any(|(az, backends)| backends.iter().any(|backend| !stays(az, backend)));
    let may_exchange = is_touched || !is_whole(from) || noted.shared.contains(&old.key) || from.home != to.home;
    let mut left: Vec<_> = from.all().filter(|backend| step.fleet.backends.contains_key(*backend) && !to.all().any(|other| other == *backend)).collect();
    if may_exchange && from.home == to.home && is_whole(to) && left.len() <= 1 || from.home != to.home {
        left.clear();
    }
    findings.extend(left.into_iter().map(|backend| Finding::Left { service: new.key.clone(), backend: backend.clone() }));
}

fn names(chain: &[Seat]) -> Vec<ReplicaNumber> {
    chain.iter().map(|seat| seat.replica).collect()
}

fn check_table(
    step: &Step,
    id: ServiceId,
    old: &PlannedService,
    new: &PlannedService,
    (az, before, after): (&AzName, &PlannedTable, &PlannedTable),
    findings: &mut Vec<Finding>,
) {
    let (service, az_name) = (|| new.key.clone(), || az.clone());
    let changed = before.chains.iter().zip(&after.chains).any(|(before, after)| names(before) != names(after));
    if changed != (after.version > before.version) || after.version < before.version || changed && after.version != step.after.number {
        findings.push(Finding::StaleVersion { service: service(), az: az_name() });
    }
    for (bucket, (before, after)) in before.chains.iter().zip(&after.chains).enumerate() {
        let full_of_owners = after.len() == CHAIN;
        for seat in before.iter().filter(|seat| !after.iter().any(|other| other.replica == seat.replica)) {
            if may_own(step, id, bucket, *seat, before) && !(full_of_owners && !step.fleet.replicas[&seat.replica].up) {
                findings.push(Finding::OwnerDropped { service: service(), az: az_name(), bucket, replica: seat.replica });
            }
        }
        let head = after.first().map(|head| head.replica);
        let stay = |chain: &[Seat], other: &[Seat]| -> Vec<ReplicaNumber> {
            names(chain).into_iter().filter(|number| Some(*number) != head && names(other).contains(number)).collect()
        };
        if stay(before, after) != stay(after, before) {
            findings.push(Finding::Reordered { service: service(), az: az_name(), bucket });
        }
    }
    let moved = before.chains.iter().zip(&after.chains).filter(|(before, after)| {
        let head = |chain: &[Seat]| chain.first().map(|seat| seat.replica);
        head(before).is_some() && head(before) != head(after)
    });
    let moved = moved.count();
    let bound = bound(step, old, new, az, before);
    if moved > bound {
        findings.push(Finding::Moved { service: service(), az: az_name(), moved, bound });
    }
}

/// Is it the head, or an owner by what was reported? Heads and owners may, until a report that had the table says that they do not.
fn may_own(step: &Step, id: ServiceId, bucket: usize, seat: Seat, chain: &[Seat]) -> bool {
    let Some(_) = step.fleet.replicas.get(&seat.replica) else { return false };
    let report = step.ownership.report(seat.replica).map(|(_, report)| report);
    let is_head = chain.first().is_some_and(|head| head.replica == seat.replica);
    let proved = report.is_some_and(|report| report.version(id) >= seat.left && !report.owns(id, bucket));
    is_head || report.is_some_and(|report| report.owns(id, bucket)) || seat.is_owner() && !proved
}

/// How many heads may move: those that may not be heads any more, and what makes place for those that newly may.
fn bound(step: &Step, old: &PlannedService, new: &PlannedService, az: &AzName, before: &PlannedTable) -> usize {
    let heads = |fleet: &Fleet, service: &PlannedService| -> BTreeSet<ReplicaNumber> {
        let Some(placement) = &service.placement else { return BTreeSet::new() };
        let of_state = |state| {
            let found = fleet.replicas.values().filter(move |r| r.up && r.state == state && r.az == *az && placement.has(az, &r.backend));
            found.map(|r| r.number).collect::<BTreeSet<_>>()
        };
        let active = of_state(ReplicaState::Active);
        if active.is_empty() { of_state(ReplicaState::Draining) } else { active }
    };
    let (was, is) = (heads(step.fleet_before, old), heads(step.fleet, new));
    if is.is_empty() {
        // Only heads that were forgotten have a successor.
        return before.chains.iter().filter(|chain| chain.first().is_some_and(|head| !step.fleet.replicas.contains_key(&head.replica))).count();
    }
    let forced = before.chains.iter().filter(|chain| chain.first().is_none_or(|head| !is.contains(&head.replica))).count();
    if was == is {
        return forced + held(step, old, az);
    }
    // Even parts by backend and replica: whoever is new gets its part, and backends that got or lost a replica give or take one bucket
    // for each replica; nobody else moves. A backend that newly has a live replica gets a backend's part.
    let backend = |fleet: &Fleet, number: &ReplicaNumber| fleet.replicas.get(number).map(|replica| replica.backend.clone());
    let backends = |fleet: &Fleet, set: &BTreeSet<ReplicaNumber>| set.iter().filter_map(|number| backend(fleet, number)).collect::<BTreeSet<_>>();
    let (old_backends, new_backends) = (backends(step.fleet_before, &was), backends(step.fleet, &is));
    let fresh: Vec<_> = is.difference(&was).collect();
    let part = BUCKETS.div_ceil(new_backends.len().max(1));
    let mut bound = forced + is.len() + new_backends.len() + held(step, old, az);
    for name in &new_backends {
        let members = is.iter().filter(|number| backend(step.fleet, number).as_ref() == Some(name)).count();
        let newcomers = fresh.iter().filter(|number| backend(step.fleet, number).as_ref() == Some(name)).count();
        bound += if old_backends.contains(name) { (part * newcomers).div_ceil(members.max(1)) } else { part };
    }
    // A backend that lost its last live replica leaves its part to the others, which they share evenly: all of that was forced.
    bound
}

/// Buckets that were held may move at last.
fn held(step: &Step, old: &PlannedService, az: &AzName) -> usize {
    let full = |table: &PlannedTable| table.chains.iter().filter(|chain| chain.len() + 1 >= CHAIN).count();
    let noted = Noted::of(step.before).held.get(&(&old.key, az)).map_or(0, |buckets| buckets.len());
    noted + old.tables.get(az).map_or(0, |table| full(table))
}

/// A table that is gone: nobody in it may own sessions.
fn check_closed(step: &Step, id: ServiceId, old: &PlannedService, (az, table): (&AzName, &PlannedTable), findings: &mut Vec<Finding>) {
    for (bucket, chain) in table.chains.iter().enumerate() {
        for seat in chain.iter().filter(|seat| step.fleet.replicas.contains_key(&seat.replica)) {
            let report = step.ownership.report(seat.replica).map(|(_, report)| report);
            if report.is_none_or(|report| report.owns(id, bucket)) {
                findings.push(Finding::OwnerDropped { service: old.key.clone(), az: az.clone(), bucket, replica: seat.replica });
            }
        }
    }
}
