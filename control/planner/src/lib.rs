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

use canal_model::fleet::{Demand, Demands, Fleet, FleetReplica, Ownership, Placement, ReplicaState};
use canal_model::ids::{AzName, BackendName, ServiceId, TenantName};
use canal_model::plan::{Note, Plan, PlannedService, PlannedTable};

use placement::balance::{Leave, Standing};

/// Services that move for balance's sake and whose new tables not everybody has yet: at most one of so many, and one in any case.
pub const WAVE: usize = 100;

/// The next plan. If nothing is different from `parent`, it is `parent`, with the same number.
///
/// The same arguments give the same plan. Services keep their backends, home and gateway number, but for a few at a time where loads
/// are off the mean; tables change as little as their rules allow ([`placement`], [`table`]). Whatever could not be satisfied is in
/// [`Plan::notes`].
pub fn plan(fleet: &Fleet, demands: &Demands, ownership: &Ownership, parent: Option<&Plan>) -> Plan {
    let none = Plan::default();
    let parent = parent.unwrap_or(&none);
    let number = parent.number.saturating_add(1);
    let mut notes = Vec::new();
    let kept = parent.services.iter().filter_map(|(id, service)| service.placement.as_ref().map(|placement| (*id, placement)));
    let mut shards = placement::Shards::settled(fleet, demands, &kept.collect(), &mut notes);
    let mut shared = Vec::new();
    let mut placements = shards.placements(&mut shared);
    let (sites, numbers) = (sites(fleet), address::numbers(demands, parent));
    let desk = Desk { fleet, demands, ownership, parent, number, sites, numbers };
    let mut services = BTreeMap::new();
    let mut noted = BTreeMap::new();
    for (id, demand) in &demands.services {
        let (service, notes) = desk.service(*id, demand, placements.remove(id));
        services.insert(*id, service);
        noted.insert(*id, notes);
    }
    // Only now is it known who is still: what was heard may have ended somebody's way.
    let moved = balance(&mut shards, fleet, parent, &services);
    if !moved.is_empty() {
        shared.clear();
        shards.placements(&mut shared);
    }
    for (id, placement) in moved {
        let (service, notes) = desk.service(id, &demands.services[&id], Some(placement));
        services.insert(id, service);
        noted.insert(id, notes);
    }
    notes.extend(shared.into_iter().chain(noted.into_values().flatten()));
    notes.sort();
    if parent.number > 0 && parent.services == services && parent.notes == notes {
        return parent.clone();
    }
    Plan { number, parent: parent.number, services, notes }
}

/// What a service's tables are made from.
struct Desk<'a> {
    fleet: &'a Fleet,
    demands: &'a Demands,
    ownership: &'a Ownership,
    parent: &'a Plan,
    number: u32,
    sites: BTreeMap<AzName, Vec<&'a FleetReplica>>,
    numbers: Numbers,
}

impl Desk<'_> {
    fn service(&self, id: ServiceId, demand: &Demand, placement: Option<Placement>) -> (PlannedService, Vec<Note>) {
        let mut notes = Vec::new();
        let held = self.parent.services.get(&id).map(|service| &service.tables);
        let mut tables = BTreeMap::new();
        for az in azs(placement.as_ref(), held) {
            let asked = table::Asked {
                service: id,
                az,
                replicas: self.sites.get(az).map_or(&[][..], Vec::as_slice),
                backends: placement.as_ref().and_then(|placement| placement.backends.get(az)),
                ownership: self.ownership,
                standby: self.demands.rules.standby,
                number: self.number,
            };
            let next = table::next(held.and_then(|tables| tables.get(az)), &asked);
            notes.extend(table::notes(&next, &asked, &demand.key));
            if let Some(table) = next.table {
                tables.insert(az.clone(), table);
            }
        }
        let number = self.numbers.get(&id).copied().unwrap_or(0);
        let service = PlannedService { key: demand.key.clone(), vni: demand.vni, number, placement, tables };
        address::check(&service, self.fleet, self.demands, &mut notes);
        (service, notes)
    }
}

/// Who moves for balance's sake. The next wave begins when everybody has the tables of the last.
fn balance(
    shards: &mut placement::Shards,
    fleet: &Fleet,
    parent: &Plan,
    services: &BTreeMap<ServiceId, PlannedService>,
) -> BTreeMap<ServiceId, Placement> {
    let takes_sessions = |replica: &&FleetReplica| replica.up && replica.state == ReplicaState::Active;
    let live = fleet.replicas.values().filter(takes_sessions).filter(|r| fleet.backends.get(&r.backend) == Some(&r.az));
    let live = live.map(|replica| &replica.backend).collect();
    let standing = |id: ServiceId| {
        let is_new = parent.services.get(&id).is_none_or(|service| service.tables.is_empty());
        match services.get(&id).map(|service| service.tables.values().all(|table| is_still(table))) {
            _ if is_new => Standing::New,
            Some(true) => Standing::Still,
            _ => Standing::Moving,
        }
    };
    let most = || {
        let landing = |service: &&PlannedService| service.tables.values().any(|table| is_landing(table));
        let most = (services.len() / WAVE).max(1);
        most - services.values().filter(landing).take(most).count()
    };
    shards.balance(&Leave { live: &live, standing: &standing, most: &most })
}

/// Nobody but heads may own sessions, and the service lives here.
fn is_still(table: &PlannedTable) -> bool {
    table.closing == 0 && !table.chains.iter().flatten().any(canal_model::plan::Seat::is_owner)
}

/// It changed for somebody's sessions, and not everybody has it yet. What is said later, of sessions that end, is not waited for.
fn is_landing(table: &PlannedTable) -> bool {
    table.confirmed < table.version.max(table.closing) && !is_still(table)
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
