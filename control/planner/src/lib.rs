//! The planner: which backends a service lives on, its gateway number, its bucket tables. Pure: the fleet, the demands, what was
//! reported and the last plan give the next one. It carries nothing out, and does not know how anybody is told.
//!
//! Canal §4.2 (shuffle sharding), appendix C (fig. 26); `docs/design/0003-cloud-tier.md`.

#![forbid(unsafe_code)]

pub mod address;
mod mix;
pub mod placement;
pub mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::fleet::{Demands, Fleet, FleetReplica, Ownership, Placement, ReplicaState};
use canal_model::ids::{AzName, BackendName, ServiceId, TenantName};
use canal_model::plan::{Plan, PlannedService, PlannedTable};

/// The next plan. If nothing is different from `parent`, it is `parent`, with the same number.
///
/// The same arguments give the same plan. Services keep their backends, home and gateway number; tables change as little as their
/// rules allow ([`placement`], [`table`]). Whatever could not be satisfied is in [`Plan::notes`].
pub fn plan(fleet: &Fleet, demands: &Demands, ownership: &Ownership, parent: Option<&Plan>) -> Plan {
    let none = Plan::default();
    let parent = parent.unwrap_or(&none);
    let number = parent.number.saturating_add(1);
    let mut notes = Vec::new();
    let kept = parent.services.iter().filter_map(|(id, service)| service.placement.as_ref().map(|placement| (*id, placement)));
    let placements = placement::place(fleet, demands, &kept.collect(), &mut notes);
    let numbers = address::numbers(demands, parent);
    let sites = sites(fleet);
    let mut services = BTreeMap::new();
    for (id, demand) in &demands.services {
        let placement = placements.get(id).cloned();
        let held = parent.services.get(id).map(|service| &service.tables);
        let mut tables = BTreeMap::new();
        for az in azs(placement.as_ref(), held) {
            let site = sites.get(az).map_or(&[][..], Vec::as_slice);
            let asked = table::Asked {
                service: *id,
                az,
                replicas: site,
                backends: placement.as_ref().and_then(|placement| placement.backends.get(az)),
                ownership,
                standby: demands.rules.standby,
                number,
            };
            let next = table::next(held.and_then(|tables| tables.get(az)), &asked);
            notes.extend(table::notes(&next, &asked, &demand.key));
            if let Some(table) = next.table {
                tables.insert(az.clone(), table);
            }
        }
        let service =
            PlannedService { key: demand.key.clone(), vni: demand.vni, number: numbers.get(id).copied().unwrap_or(0), placement, tables };
        address::check(&service, fleet, demands, &mut notes);
        services.insert(*id, service);
    }
    notes.sort();
    if parent.number > 0 && parent.services == services && parent.notes == notes {
        return parent.clone();
    }
    Plan { number, parent: parent.number, services, notes }
}

/// May a session with the service begin in this AZ: is an active replica of it up there?
pub fn is_open(fleet: &Fleet, service: &PlannedService, az: &AzName) -> bool {
    let Some(placement) = &service.placement else { return false };
    fleet.replicas.values().any(|r| r.up && r.state == ReplicaState::Active && r.az == *az && placement.has(az, &r.backend))
}

/// The replicas of each AZ, by number.
fn sites(fleet: &Fleet) -> BTreeMap<AzName, Vec<&FleetReplica>> {
    let mut sites: BTreeMap<AzName, Vec<&FleetReplica>> = BTreeMap::new();
    for replica in fleet.replicas.values() {
        sites.entry(replica.az.clone()).or_default().push(replica);
    }
    sites
}

/// AZs that the service lives in, or may have sessions in.
fn azs<'a>(placement: Option<&'a Placement>, held: Option<&'a BTreeMap<AzName, Arc<PlannedTable>>>) -> BTreeSet<&'a AzName> {
    let lives = placement.into_iter().flat_map(|placement| placement.backends.keys());
    lives.chain(held.into_iter().flat_map(BTreeMap::keys)).collect()
}

/// Words of signatures that are long otherwise.
type Kept<'a> = BTreeMap<ServiceId, &'a Placement>;
type Backends = BTreeSet<BackendName>;
type Numbers = BTreeMap<ServiceId, u32>;
type Taken<'a> = BTreeMap<&'a TenantName, BTreeSet<u32>>;
