//! The planner: it decides the backends of each service, its gateway number and its bucket tables.
//!
//! It is a pure function: the fleet, the demands, the reports and the last plan determine the next
//! plan. It neither executes nor publishes plans. Start at [`plan`]. The method is Canal §4.2
//! (shuffle sharding) and appendix C (fig. 26); see `docs/design/0003-cloud-tier.md`.

#![forbid(unsafe_code)]

pub mod address;
mod ingress;
mod mix;
pub mod placement;
pub mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::fleet::{
    Demand, Demands, Fleet, FleetReplica, Ownership, Placement, ReplicaState,
};
use canal_model::ids::{AzName, BackendName, ServiceId, TenantName};
use canal_model::plan::{Plan, PlannedService, PlannedTable, UnmetConstraint};

use placement::rebalance::{MigrationState, MoveLimits};

/// Limit on services that migrate for balance at one time: one in this many services, but at least
/// one. A service counts until all data planes have confirmed its new tables.
/// Packets of a migrating service may take one more hop, so most services stay as they are. The 1 %
/// was chosen, and nobody measured another.
pub const WAVE: usize = 100;

/// Returns the next plan. If nothing differs from `parent`, the result is `parent` with the same
/// number.
///
/// The same arguments always give the same plan. Services keep their backends, home and gateway
/// number, except for a few at a time where loads differ too much from the mean. Tables change as
/// little as their rules allow ([`placement`], [`table`]). [`Plan::notes`] lists the constraints
/// that could not be met.
pub fn plan(
    fleet: &Fleet,
    demands: &Demands,
    ownership: &Ownership,
    parent: Option<&Plan>,
) -> Plan {
    let none = Plan::default();
    let parent = parent.unwrap_or(&none);
    let number = parent.number.saturating_add(1);
    let mut notes = Vec::new();
    let placed_before = parent
        .services
        .iter()
        .filter_map(|(id, service)| service.placement.as_ref().map(|placement| (*id, placement)));
    let mut shards =
        placement::ShardAssignment::settled(fleet, demands, &placed_before.collect(), &mut notes);
    let mut shared = Vec::new();
    let mut placements = shards.placements(&mut shared);
    let sites = sites(fleet);
    let mut taken = UsedGatewayNumbers::new();
    // An ingress network's own services have numbers of the same ranges, and they keep them.
    let mut numbers = address::keep_numbers(demands, parent, &mut taken);
    let ingress = ingress::assign(fleet, demands, parent, &mut taken);
    address::add_numbers(demands, &mut numbers, &mut taken);
    let inputs = TableInputs {
        fleet,
        demands,
        ownership,
        parent,
        number,
        sites,
        numbers,
        ingress,
    };
    let mut services = BTreeMap::new();
    let mut noted = BTreeMap::new();
    for (id, demand) in &demands.services {
        let (service, notes) = inputs.service(*id, demand, placements.remove(id));
        services.insert(*id, service);
        noted.insert(*id, notes);
    }
    // Rebalancing comes last: the reports applied above may have completed a migration, which frees
    // the service for the next move.
    let moved = balance(&mut shards, fleet, parent, &services);
    if !moved.is_empty() {
        shared.clear();
        shards.placements(&mut shared);
    }
    for (id, placement) in moved {
        let (service, notes) = inputs.service(id, &demands.services[&id], Some(placement));
        services.insert(id, service);
        noted.insert(id, notes);
    }
    notes.extend(shared.into_iter().chain(noted.into_values().flatten()));
    notes.sort();
    // Without a parent plan, even an empty plan is new.
    if parent.number > 0 && parent.services == services && parent.notes == notes {
        return parent.clone();
    }
    Plan {
        number,
        parent: parent.number,
        services,
        notes,
    }
}

/// The inputs from which the tables of all services are made.
struct TableInputs<'a> {
    fleet: &'a Fleet,
    demands: &'a Demands,
    ownership: &'a Ownership,
    parent: &'a Plan,
    number: u32,
    sites: BTreeMap<AzName, Vec<&'a FleetReplica>>,
    numbers: GatewayNumbers,
    ingress: ingress::IngressPlacement,
}

impl TableInputs<'_> {
    fn service(
        &self,
        id: ServiceId,
        demand: &Demand,
        placement: Option<Placement>,
    ) -> (PlannedService, Vec<UnmetConstraint>) {
        let mut notes = Vec::new();
        let previous_tables = self.parent.services.get(&id).map(|service| &service.tables);
        let mut tables = BTreeMap::new();
        for az in azs(placement.as_ref(), previous_tables) {
            let request = table::TableRequest {
                service: id,
                az,
                replicas: self.sites.get(az).map_or(&[][..], Vec::as_slice),
                backends: placement
                    .as_ref()
                    .and_then(|placement| placement.backends.get(az)),
                ownership: self.ownership,
                standby: self.demands.rules.standby,
                number: self.number,
            };
            let next = table::next(previous_tables.and_then(|tables| tables.get(az)), &request);
            notes.extend(table::notes(&next, &request, &demand.key));
            if let Some(table) = next.table {
                tables.insert(az.clone(), table);
            }
        }
        let number = self
            .numbers
            .get(&id)
            .or_else(|| self.ingress.numbers.get(&id));
        let service = PlannedService {
            key: demand.key.clone(),
            vni: demand.vni,
            // Numbers begin at 1, so 0 stands for a service without an address.
            number: number.copied().unwrap_or(0),
            network: self.ingress.networks.get(&id).cloned(),
            placement,
            tables,
        };
        let refused = self.ingress.refused.get(&id);
        address::check(&service, self.fleet, self.demands, refused, &mut notes);
        (service, notes)
    }
}

/// Moves services to balance loads. The next wave begins when all data planes have confirmed the
/// tables of the last one.
fn balance(
    shards: &mut placement::ShardAssignment,
    fleet: &Fleet,
    parent: &Plan,
    services: &BTreeMap<ServiceId, PlannedService>,
) -> BTreeMap<ServiceId, Placement> {
    let takes_sessions =
        |replica: &&FleetReplica| replica.up && replica.state == ReplicaState::Active;
    let live = fleet
        .replicas
        .values()
        .filter(takes_sessions)
        .filter(|r| fleet.backends.get(&r.backend) == Some(&r.az));
    let live = live.map(|replica| &replica.backend).collect();
    let migration_state = |id: ServiceId| {
        // A service without tables has no sessions, so moving it costs nothing.
        let is_new = parent
            .services
            .get(&id)
            .is_none_or(|service| service.tables.is_empty());
        match services
            .get(&id)
            .map(|service| service.tables.values().all(|table| is_still(table)))
        {
            _ if is_new => MigrationState::New,
            Some(true) => MigrationState::Still,
            // `None` cannot occur: `services` has every demand, and only demands are balanced.
            _ => MigrationState::Moving,
        }
    };
    // Each wave moves a bounded part of the services, so that a bad plan affects few.
    let most = || {
        let landing =
            |service: &&PlannedService| service.tables.values().any(|table| is_landing(table));
        let most = (services.len() / WAVE).max(1);
        most - services.values().filter(landing).take(most).count()
    };
    shards.balance(&MoveLimits {
        live: &live,
        migration_state: &migration_state,
        most: &most,
    })
}

/// Returns true if only heads may own sessions, and the service lives in this AZ.
fn is_still(table: &PlannedTable) -> bool {
    table.closing == 0
        && !table
            .chains
            .iter()
            .flatten()
            .any(canal_model::plan::ChainMember::is_owner)
}

/// Returns true if the last change left owners behind heads, or closed the table, and not every
/// data plane has confirmed it. Reports of sessions that end later are not awaited.
fn is_landing(table: &PlannedTable) -> bool {
    table.confirmed < table.version.max(table.closing) && !is_still(table)
}

/// Returns true if a session with the service may begin in this AZ, because an active replica of
/// the service is up there.
pub fn is_open(fleet: &Fleet, service: &PlannedService, az: &AzName) -> bool {
    let Some(placement) = &service.placement else {
        return false;
    };
    fleet.replicas.values().any(|r| {
        r.up && r.state == ReplicaState::Active && r.az == *az && placement.has(az, &r.backend)
    })
}

/// Groups the replicas by AZ, sorted by number.
fn sites(fleet: &Fleet) -> BTreeMap<AzName, Vec<&FleetReplica>> {
    let mut sites: BTreeMap<AzName, Vec<&FleetReplica>> = BTreeMap::new();
    for replica in fleet.replicas.values() {
        sites.entry(replica.az.clone()).or_default().push(replica);
    }
    sites
}

/// Returns the AZs in which the service lives or may have sessions.
fn azs<'a>(
    placement: Option<&'a Placement>,
    tables: Option<&'a BTreeMap<AzName, Arc<PlannedTable>>>,
) -> BTreeSet<&'a AzName> {
    let lives = placement
        .into_iter()
        .flat_map(|placement| placement.backends.keys());
    lives
        .chain(tables.into_iter().flat_map(BTreeMap::keys))
        .collect()
}

/// The last plan's placements by service.
type LivePlacements<'a> = BTreeMap<ServiceId, &'a Placement>;
type Backends = BTreeSet<BackendName>;
type GatewayNumbers = BTreeMap<ServiceId, u32>;
type UsedGatewayNumbers<'a> = BTreeMap<&'a TenantName, BTreeSet<u32>>;
