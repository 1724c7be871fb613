//! Checks the transition from one plan to the next: no replica with sessions is dropped, little
//! moves, versions are correct. Rules that a single plan can break are in the crate root.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use canal_model::fleet::Placement;
use canal_model::ids::{AzName, BackendName, ReplicaNumber, ServiceId};
use canal_model::ingress::is_gateway_service;
use canal_model::plan::{ChainMember, Plan, PlannedService, PlannedTable};
use canal_model::program::{BUCKETS, CHAIN_LENGTH_MAX};

use crate::{AzReplicas, Finding, PlanExceptions, PlanTransition, rebalance, required_backends};

/// Checks the changes between two plans. The result is empty if all of them are allowed.
pub fn step(step: &PlanTransition) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (before, after) = (step.before, step.after);
    let is_same = after == before;
    if !is_same && (after.parent != before.number || after.number <= before.number) {
        findings.push(Finding::Parent {
            number: after.number,
            parent: after.parent,
        });
    }
    let crowded = crowded(before);
    let mut balanced = Vec::new();
    for (id, service) in &after.services {
        // A new service has nothing that could have moved.
        let Some(old) = before.services.get(id) else {
            continue;
        };
        if check_service(step, &crowded, *id, old, service, &mut findings) {
            balanced.push(*id);
        }
        for (az, old_table) in &old.tables {
            match service.tables.get(az) {
                Some(table) => {
                    check_table(step, *id, service, (az, old_table, table), &mut findings)
                }
                None => check_closed(step, *id, old, (az, old_table), &mut findings),
            }
        }
    }
    rebalance::check(step, &balanced, &mut findings);
    check_addresses(step, &mut findings);
    findings.sort();
    findings
}

/// Checks that no Gateway has an address that another had, which is still there and requests none.
fn check_addresses(step: &PlanTransition, findings: &mut Vec<Finding>) {
    let mut owners: BTreeMap<IpAddr, ServiceId> = BTreeMap::new();
    for (id, old) in &step.before.services {
        let requested = step.demands.ingress.requested.get(id);
        let new = step.after.services.get(id);
        if requested.is_some_and(Vec::is_empty) && new.is_some_and(|new| new.key == old.key) {
            let addresses = old.network.iter().flat_map(|it| &it.addresses);
            owners.extend(addresses.map(|address| (*address, *id)));
        }
    }
    for (id, new) in &step.after.services {
        for address in new.network.iter().flat_map(|it| &it.addresses) {
            if owners.get(address).is_some_and(|owner| owner != id) {
                findings.push(Finding::AddressTaken {
                    service: new.key.clone(),
                    address: *address,
                });
            }
        }
    }
}

/// Returns whether a Gateway may get another number: it had none, or loses it, or requests one, or
/// an edit of the ranges gave its address another one.
fn may_renumber(
    step: &PlanTransition,
    id: ServiceId,
    old: &PlannedService,
    new: &PlannedService,
) -> bool {
    let requested = step.demands.ingress.requested.get(&id);
    requested.is_some_and(|requested| !requested.is_empty())
        || is_gateway_service(&new.key)
            && (old.number == 0
                || new.network != old.network
                || new
                    .network
                    .as_ref()
                    .is_some_and(|it| !it.addresses.is_empty()))
}

/// Checks one service. Returns true if it moved for balance and for no other reason.
fn check_service(
    step: &PlanTransition,
    crowded: &BTreeSet<ServiceId>,
    id: ServiceId,
    old: &PlannedService,
    new: &PlannedService,
    findings: &mut Vec<Finding>,
) -> bool {
    if old.number != new.number && !may_renumber(step, id, old, new) {
        findings.push(Finding::Unstable {
            service: new.key.clone(),
        });
    }
    // A service that is placed for the first time moves nothing.
    let (Some(from), Some(to)) = (&old.placement, &new.placement) else {
        return false;
    };
    let home_az = step
        .demands
        .services
        .get(&id)
        .and_then(|demand| demand.home.as_ref());
    let home_stays = step.fleet.backends.values().any(|az| *az == from.home);
    let is_exchange = from != to && rebalance::is_exchange(step, id, from, to);
    // A home moves only if its AZ lost all backends, if the tenant asks for it, or in an exchange.
    if from.home != to.home && home_stays && home_az != Some(&to.home) && !is_exchange {
        findings.push(Finding::Unstable {
            service: new.key.clone(),
        });
    }
    // Backends may be exchanged for uniqueness if this service lost or lacked a backend, or shared
    // all of them: one backend, or all if one does not help.
    let (home, away) = required_backends(&step.demands.rules);
    let has_required =
        |placement: &Placement| placement.at_home() == home && placement.away() == away;
    let stays = |az: &AzName, backend| step.fleet.backends.get(backend) == Some(az);
    let lost_backend = from
        .backends
        .iter()
        .any(|(az, backends)| backends.iter().any(|backend| !stays(az, backend)));
    // A service whose home moved needs its required number of backends in the new home AZ.
    let may_exchange = lost_backend
        || !has_required(from)
        || crowded.contains(&id)
        || from.home != to.home && !is_exchange;
    // For one of these reasons any change is right, and it does not count as a move for balance.
    if may_exchange {
        return false;
    }
    if is_exchange {
        return true;
    }
    // Nothing allows this service to lose a backend.
    let left = from
        .all()
        .filter(|backend| !to.all().any(|other| other == *backend));
    findings.extend(left.map(|backend| Finding::Left {
        service: new.key.clone(),
        backend: backend.clone(),
    }));
    false
}

/// Returns the services that share all their backends with another one, and those others.
fn crowded(plan: &Plan) -> BTreeSet<ServiceId> {
    let shared = PlanExceptions::of(plan).shared;
    let backends = |service: &PlannedService| -> BTreeSet<BackendName> {
        service
            .placement
            .iter()
            .flat_map(Placement::all)
            .cloned()
            .collect()
    };
    let noted: Vec<_> = plan
        .services
        .values()
        .filter(|service| shared.contains(&service.key))
        .map(backends)
        .collect();
    let is_crowded = |service: &PlannedService| {
        let own = backends(service);
        noted
            .iter()
            .any(|other| own.is_subset(other) || other.is_subset(&own))
    };
    plan.services
        .iter()
        .filter(|(_, service)| is_crowded(service))
        .map(|(id, _)| *id)
        .collect()
}

fn names(chain: &[ChainMember]) -> Vec<ReplicaNumber> {
    chain.iter().map(|member| member.replica).collect()
}

fn check_table(
    step: &PlanTransition,
    id: ServiceId,
    new: &PlannedService,
    (az, before, after): (&AzName, &PlannedTable, &PlannedTable),
    findings: &mut Vec<Finding>,
) {
    let (service, az_name) = (|| new.key.clone(), || az.clone());
    let changed = before
        .chains
        .iter()
        .zip(&after.chains)
        .any(|(before, after)| names(before) != names(after));
    if changed != (after.version > before.version)
        || after.version < before.version
        // A version is the number of the plan that made it, so it never repeats.
        || changed && after.version != step.after.number
    {
        findings.push(Finding::StaleVersion {
            service: service(),
            az: az_name(),
        });
    }
    for (bucket, (before, after)) in before.chains.iter().zip(&after.chains).enumerate() {
        let is_full = after.len() == CHAIN_LENGTH_MAX;
        for member in before
            .iter()
            .filter(|member| !after.iter().any(|other| other.replica == member.replica))
        {
            let is_up = step
                .fleet
                .replicas
                .get(&member.replica)
                .is_some_and(|replica| replica.up);
            // A dead owner may come back with its sessions. It leaves only when a full chain needs
            // its place.
            if may_own(step, id, bucket, *member, before) && (is_up || !is_full) {
                findings.push(Finding::OwnerDropped {
                    service: service(),
                    az: az_name(),
                    bucket,
                    replica: member.replica,
                });
            }
        }
        let head = after.first().map(|head| head.replica);
        let stay = |chain: &[ChainMember], other: &[ChainMember]| -> Vec<ReplicaNumber> {
            names(chain)
                .into_iter()
                .filter(|number| Some(*number) != head && names(other).contains(number))
                .collect()
        };
        // A packet passes the members in order, so a new order could pass the owner.
        if stay(before, after) != stay(after, before) {
            findings.push(Finding::Reordered {
                service: service(),
                az: az_name(),
                bucket,
            });
        }
    }
    let moved = before
        .chains
        .iter()
        .zip(&after.chains)
        .filter(|(before, after)| {
            let head = |chain: &[ChainMember]| chain.first().map(|member| member.replica);
            // A bucket without a head had no sessions that could move.
            head(before).is_some() && head(before) != head(after)
        });
    let moved = moved.count();
    let bound = bound(step, new, az, before);
    if moved > bound {
        findings.push(Finding::Moved {
            service: service(),
            az: az_name(),
            moved,
            bound,
        });
    }
}

/// Returns true if the member is the head or may own sessions by the reports. An owner counts as
/// one until a report based on this table states that it owns none.
fn may_own(
    step: &PlanTransition,
    id: ServiceId,
    bucket: usize,
    member: ChainMember,
    chain: &[ChainMember],
) -> bool {
    let Some(_) = step.fleet.replicas.get(&member.replica) else {
        return false;
    };
    let report = step.ownership.report(member.replica);
    let is_head = chain
        .first()
        .is_some_and(|head| head.replica == member.replica);
    let proved = report.is_some_and(|report| {
        report.version(id) >= member.owner_until_version && !report.owns(id, bucket)
    });
    is_head || report.is_some_and(|report| report.owns(id, bucket)) || member.is_owner() && !proved
}

/// Returns the number of heads that may move: those that may not be heads any more, and what a
/// replica had above the minimum of an even share. Fewer moves are not always possible; more are
/// never necessary.
fn bound(step: &PlanTransition, new: &PlannedService, az: &AzName, before: &PlannedTable) -> usize {
    let head = |chain: &Vec<ChainMember>| chain.first().map(|member| member.replica);
    let sites = AzReplicas::all(step.fleet);
    let heads = match (&new.placement, sites.get(az)) {
        (Some(placement), Some(site)) => site.heads(az, placement),
        _ => BTreeMap::new(),
    };
    if heads.is_empty() {
        // Without candidates, only a forgotten head gets a successor.
        let is_forgotten = |replica: &ReplicaNumber| !step.fleet.replicas.contains_key(replica);
        return before
            .chains
            .iter()
            .filter_map(head)
            .filter(is_forgotten)
            .count();
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

/// Checks a table that was removed: none of its members may own sessions.
fn check_closed(
    step: &PlanTransition,
    id: ServiceId,
    old: &PlannedService,
    (az, table): (&AzName, &PlannedTable),
    findings: &mut Vec<Finding>,
) {
    for (bucket, chain) in table.chains.iter().enumerate() {
        for member in chain
            .iter()
            .filter(|member| step.fleet.replicas.contains_key(&member.replica))
        {
            let report = step.ownership.report(member.replica);
            if report.is_none_or(|report| report.owns(id, bucket)) {
                findings.push(Finding::OwnerDropped {
                    service: old.key.clone(),
                    az: az.clone(),
                    bucket,
                    replica: member.replica,
                });
            }
        }
    }
}
