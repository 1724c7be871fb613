//! From the catalog to what the planner is asked, and from its plan to what data planes are told. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_compiler::scope::Whereabouts;
use canal_model::fleet::{Demand, Demands, Fleet, Rules};
use canal_model::ids::{AzName, BackendName, ReplicaNumber, ServiceId, ServiceKey};
use canal_model::plan::{Plan, PlannedService};
use canal_model::program::{BucketTable, GatewayAddress, Kind, Replica, Resource};
use canal_model::tier::is_tier_service;
use canal_planner::address::addresses;

use super::roster::Roster;
use crate::catalog::{Catalog, TenantView};
use crate::writer::Tier;

/// Bucket tables as data planes are told of them.
pub(crate) type Tables = BTreeMap<(ServiceId, AzName), BucketTable>;

/// What all tenants on the tier demand.
pub(crate) fn demands(catalog: &Catalog, rules: Rules) -> Demands {
    let mut demands = Demands { rules, ..Demands::default() };
    for (name, view) in &catalog.tenants {
        let tenant = view.of(Kind::Tenant).find_map(|e| match &e.resource {
            Resource::Tenant(t) if !t.gateway_cidrs.is_empty() => Some(t),
            _ => None,
        });
        let Some(tenant) = tenant else { continue };
        demands.ranges.insert(name.clone(), tenant.gateway_cidrs.clone());
        let weights = weights(view);
        for entry in view.of(Kind::Service) {
            let Resource::Service(service) = &entry.resource else { continue };
            let weight = weights.get(&service.key).copied().unwrap_or(0);
            let home = view.homes.get(&service.key).cloned();
            demands.services.insert(service.id, Demand { key: service.key.clone(), vni: tenant.vni, weight, home });
        }
    }
    demands
}

/// What a service is expected to weigh: its workloads. What it weighs in fact changes all the time, and must not move it.
fn weights(view: &TenantView) -> BTreeMap<ServiceKey, u32> {
    let mut weights = BTreeMap::new();
    for entry in view.of(Kind::Workload) {
        let Resource::Workload(workload) = &entry.resource else { continue };
        let services: BTreeSet<&ServiceKey> = workload.endpoints.iter().map(|e| &e.service).collect();
        for service in services {
            *weights.entry(service.clone()).or_insert(0) += 1;
        }
    }
    weights
}

/// The plan to start from. A tenant's service of the tier itself has gateway number 1, whenever the tenant's others came.
pub(crate) fn seeded(parent: &Plan, demands: &Demands) -> Plan {
    let mut plan = parent.clone();
    for (id, demand) in demands.services.iter().filter(|(_, d)| is_tier_service(&d.key)) {
        let first = || PlannedService { key: demand.key.clone(), vni: demand.vni, number: 1, placement: None, tables: BTreeMap::new() };
        plan.services.entry(*id).or_insert_with(first);
    }
    plan
}

/// All tables of a plan.
pub(crate) fn tables(plan: &Plan) -> Tables {
    let pairs = plan.services.iter().flat_map(|(id, service)| service.tables.keys().map(move |az| (*id, az.clone())));
    pairs.filter_map(|(id, az)| Some(((id, az.clone()), plan.table(id, &az)?))).collect()
}

/// What is to be told now.
#[derive(Debug)]
pub(crate) struct Telling {
    pub(crate) tier: Tier,
    pub(crate) tables: Tables,
    /// The newest plan all of whose tables are in it.
    pub(crate) plan: u32,
    /// Tables that wait until a replica knows the tenant.
    pub(crate) waiting: usize,
    /// (service, AZ) pairs that take no new sessions.
    pub(crate) closed: usize,
}

/// What data planes are to be told of `plan`, when they were last told `told`. A table whose new replicas do not know the tenant yet
/// stays as it was: they are told of the tenant first.
pub(crate) fn telling(plan: &Plan, fleet: &Fleet, demands: &Demands, roster: &Roster, told: &Tables) -> Telling {
    let mut out = Telling { tier: Tier::default(), tables: Tables::new(), plan: plan.number, waiting: 0, closed: 0 };
    for (key, table) in tables(plan) {
        let before = told.get(&key);
        if before.is_some_and(|b| b.version == table.version) || newcomers(before, &table).all(|n| roster.is_ready(n, &table.service.tenant)) {
            out.tables.insert(key, table);
            continue;
        }
        out.waiting += 1;
        out.plan = out.plan.min(table.version.saturating_sub(1));
        if let Some(before) = before {
            out.tables.insert(key, before.clone());
        }
    }
    out.tier.whereabouts = Arc::new(whereabouts(plan, roster, &out.tables));
    for (id, service) in &plan.services {
        for address in service_addresses(*id, service, fleet, demands, roster, &out.tables) {
            out.closed += usize::from(!address.open);
            out.tier.tenants.entry(service.key.tenant.clone()).or_default().push(Resource::Address(address));
        }
    }
    for table in out.tables.values() {
        out.tier.tenants.entry(table.service.tenant.clone()).or_default().push(Resource::Table(table.clone()));
    }
    out.tier.provider = replicas(roster);
    out
}

/// Replicas that a table has and the one before has not.
fn newcomers<'a>(before: Option<&'a BucketTable>, table: &'a BucketTable) -> impl Iterator<Item = ReplicaNumber> + 'a {
    let old: BTreeSet<ReplicaNumber> = before.into_iter().flat_map(|b| b.chains.iter().flatten()).copied().collect();
    let new: BTreeSet<ReplicaNumber> = table.chains.iter().flatten().copied().collect();
    new.into_iter().filter(move |n| !old.contains(n))
}

fn replicas(roster: &Roster) -> Vec<Resource> {
    let resource = |row: &canal_store::StoredReplica, up| {
        let (name, number, backend, az) = (row.name.clone(), row.number, row.backend.clone(), row.az.clone());
        Resource::Replica(Replica { name, number, backend, az, underlay: row.underlay, up })
    };
    roster.members().values().map(|m| resource(&m.row, m.up)).collect()
}

fn whereabouts(plan: &Plan, roster: &Roster, tables: &Tables) -> Whereabouts {
    let replicas = roster.members().values().map(|m| (m.row.name.clone(), m.row.backend.clone())).collect();
    let by_number: BTreeMap<ReplicaNumber, &BackendName> = roster.members().values().map(|m| (m.row.number, &m.row.backend)).collect();
    let mut out = Whereabouts { replicas, ..Whereabouts::default() };
    let mut hold = |backend: &BackendName, id: ServiceId, service: &ServiceKey| {
        let held = out.backends.entry(backend.clone()).or_default();
        held.tenants.insert(service.tenant.clone());
        held.services.insert(id);
    };
    for (id, service) in &plan.services {
        let placed = service.placement.iter().flat_map(|p| p.all());
        let seated = service.tables.values().flat_map(|t| t.chains.iter().flatten()).map(|s| s.replica);
        let told = service.tables.keys().filter_map(|az| tables.get(&(*id, az.clone()))).flat_map(|t| t.chains.iter().flatten()).copied();
        let seated: BTreeSet<ReplicaNumber> = seated.chain(told).collect();
        let backends: BTreeSet<&BackendName> = placed.chain(seated.iter().filter_map(|n| by_number.get(n).copied())).collect();
        backends.into_iter().for_each(|backend| hold(backend, *id, &service.key));
    }
    out
}

fn service_addresses(
    id: ServiceId,
    service: &PlannedService,
    fleet: &Fleet,
    demands: &Demands,
    roster: &Roster,
    tables: &Tables,
) -> Vec<GatewayAddress> {
    let ranges = demands.ranges.get(&service.key.tenant).map_or(&[][..], Vec::as_slice);
    let address = |az: &AzName| {
        let number = *fleet.azs.get(az)?;
        let given = addresses(ranges, number, service.number).ok()?.given;
        let edge_lives = roster.edges().get(az).is_some_and(|e| e.alive);
        let open = edge_lives && tables.contains_key(&(id, az.clone())) && canal_planner::is_open(fleet, service, az);
        (!given.is_empty()).then(|| GatewayAddress { service: service.key.clone(), id, az: az.clone(), addresses: given, open })
    };
    service.tables.keys().filter_map(address).collect()
}
