//! Checks the way from one plan to the next: nobody with sessions is dropped, little moves, versions say the truth. It does not look at
//! what one plan shows by itself.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::fleet::Placement;
use canal_model::ids::{AzName, BackendName, ReplicaNumber, ServiceId};
use canal_model::plan::{Plan, PlannedService, PlannedTable, Seat};
use canal_model::program::{BUCKETS, CHAIN};

use crate::{Finding, Noted, Site, Step, balance, wanted};

/// Checks what changed between two plans. Empty: all of it was allowed.
pub fn step(step: &Step) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (before, after) = (step.before, step.after);
    let is_same = after == before;
    if !is_same && (after.parent != before.number || after.number <= before.number) {
        findings.push(Finding::Parent { number: after.number, parent: after.parent });
    }
    let crowded = crowded(before);
    let mut balanced = Vec::new();
    for (id, service) in &after.services {
        let Some(old) = before.services.get(id) else { continue };
        if check_service(step, &crowded, *id, old, service, &mut findings) {
            balanced.push(*id);
        }
        for (az, old_table) in &old.tables {
            match service.tables.get(az) {
                Some(table) => check_table(step, *id, service, (az, old_table, table), &mut findings),
                None => check_closed(step, *id, old, (az, old_table), &mut findings),
            }
        }
    }
    balance::check(step, &balanced, &mut findings);
    findings.sort();
    findings
}

/// True: the service moved for balance's sake, and for nothing else.
fn check_service(
    step: &Step,
    crowded: &BTreeSet<ServiceId>,
    id: ServiceId,
    old: &PlannedService,
    new: &PlannedService,
    findings: &mut Vec<Finding>,
) -> bool {
    if old.number != new.number {
        findings.push(Finding::Unstable { service: new.key.clone() });
    }
    let (Some(from), Some(to)) = (&old.placement, &new.placement) else { return false };
    let asked = step.demands.services.get(&id).and_then(|demand| demand.home.as_ref());
    let home_stays = step.fleet.backends.values().any(|az| *az == from.home);
    let is_exchange = from != to && balance::is_exchange(step, id, from, to);
    if from.home != to.home && home_stays && asked != Some(&to.home) && !is_exchange {
        findings.push(Finding::Unstable { service: new.key.clone() });
    }
    // Backends may be exchanged for uniqueness, one or where that does not help all, if this service lost or lacked something, or shared all with another.
    let (home, away) = wanted(&step.demands.rules);
    let is_whole = |placement: &Placement| placement.at_home() == home && placement.away() == away;
    let stays = |az: &AzName, backend| step.fleet.backends.get(backend) == Some(az);
    let is_touched = from.backends.iter().any(|(az, backends)| backends.iter().any(|backend| !stays(az, backend)));
    let may_exchange = is_touched || !is_whole(from) || crowded.contains(&id) || from.home != to.home && !is_exchange;
    if may_exchange {
        return false;
    }
    if is_exchange {
        return true;
    }
    let left = from.all().filter(|backend| !to.all().any(|other| other == *backend));
    findings.extend(left.map(|backend| Finding::Left { service: new.key.clone(), backend: backend.clone() }));
    false
}

/// Services all of whose backends are another's, and those others.
fn crowded(plan: &Plan) -> BTreeSet<ServiceId> {
    let shared = Noted::of(plan).shared;
    let backends =
        |service: &PlannedService| -> BTreeSet<BackendName> { service.placement.iter().flat_map(Placement::all).cloned().collect() };
    let noted: Vec<_> = plan.services.values().filter(|service| shared.contains(&service.key)).map(backends).collect();
    let is_crowded = |service: &PlannedService| {
        let own = backends(service);
        noted.iter().any(|other| own.is_subset(other) || other.is_subset(&own))
    };
    plan.services.iter().filter(|(_, service)| is_crowded(service)).map(|(id, _)| *id).collect()
}

fn names(chain: &[Seat]) -> Vec<ReplicaNumber> {
    chain.iter().map(|seat| seat.replica).collect()
}

fn check_table(
    step: &Step,
    id: ServiceId,
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
            let is_up = step.fleet.replicas.get(&seat.replica).is_some_and(|replica| replica.up);
            // A dead owner may make place in a full chain.
            if may_own(step, id, bucket, *seat, before) && (is_up || !full_of_owners) {
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
    let bound = bound(step, new, az, before);
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

/// How many heads may move: those that may not be heads any more, and what a replica had above the least of an even part. Less is not
/// always possible; more never is needed.
fn bound(step: &Step, new: &PlannedService, az: &AzName, before: &PlannedTable) -> usize {
    let head = |chain: &Vec<Seat>| chain.first().map(|seat| seat.replica);
    let sites = Site::all(step.fleet);
    let heads = match (&new.placement, sites.get(az)) {
        (Some(placement), Some(site)) => site.heads(az, placement),
        _ => BTreeMap::new(),
    };
    if heads.is_empty() {
        // Only heads that were forgotten have a successor.
        let is_forgotten = |replica: &ReplicaNumber| !step.fleet.replicas.contains_key(replica);
        return before.chains.iter().filter_map(head).filter(is_forgotten).count();
    }
    let mut members: BTreeMap<&BackendName, usize> = BTreeMap::new();
    for replica in heads.values() {
        *members.entry(&replica.backend).or_default() += 1;
    }
    let mut counts: BTreeMap<ReplicaNumber, usize> = BTreeMap::new();
    for head in before.chains.iter().filter_map(head) {
        *counts.entry(head).or_default() += 1;
    }
    let above = |(number, count): (&ReplicaNumber, &usize)| match heads.get(number) {
        Some(replica) => count.saturating_sub(BUCKETS / members.len() / members[&replica.backend]),
        None => *count,
    };
    counts.iter().map(above).sum()
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
