//! Builds the planner's input from the catalog, and the published state of the cloud tier from its
//! plan. Pure. Start at [`demands`] and [`build_publication`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_catalog::{Catalog, TenantCatalog, TenantPlacement};
use canal_compiler::scope::TierPlacement;
use canal_model::fleet::{Demand, Demands, Fleet, ReplicaState, ShardingRules};
use canal_model::ids::{
    AzName, BackendName, ReplicaNumber, ServiceId, ServiceKey, TenantName, Vni,
};
use canal_model::ingress::is_gateway_service;
use canal_model::plan::{Plan, PlannedService};
use canal_model::program::{BucketTable, GatewayAddress, Replica, Resource, ResourceKind};
use canal_model::share::ShareKind;
use canal_model::tier::is_tier_service;
use canal_planner::address::addresses;

use crate::membership::Membership;
use crate::tier::TierState;

/// Weight of a Gateway. Its requests go to endpoints of other services, whose number says little
/// about them.
/// So it counts like a service with one workload.
const GATEWAY_WEIGHT: u32 = 1;

/// Bucket tables as they are published to data planes.
pub(crate) type PublishedTables = BTreeMap<(ServiceId, AzName), TableMembers>;

/// A bucket table and the replicas in it.
#[derive(Debug, Clone)]
pub(crate) struct TableMembers {
    pub(crate) table: Arc<BucketTable>,
    members: Arc<BTreeSet<ReplicaNumber>>,
}

/// Addresses and tables that are published to each tenant.
pub(crate) type TenantPlacements = BTreeMap<TenantName, TenantPlacement>;

/// Returns the demands of all tenants on the cloud tier. `plan` is the plan in force.
pub(crate) fn demands(catalog: &Catalog, rules: ShardingRules, plan: &Plan) -> Demands {
    let mut demands = Demands {
        rules,
        ..Demands::default()
    };
    for (name, view) in &catalog.tenants {
        let tenant = view
            .of(ResourceKind::Tenant)
            .find_map(|e| match e.resource.as_ref() {
                Resource::Tenant(t) if !t.gateway_cidrs.is_empty() => Some(t),
                _ => None,
            });
        // A tenant without `gatewayCidrs` is not on the cloud tier.
        let Some(tenant) = tenant else { continue };
        demands
            .ranges
            .insert(name.clone(), tenant.gateway_cidrs.clone());
        if view.ingress.is_network {
            demands.ingress.networks.insert(name.clone(), tenant.vni);
        }
        let share = tenant.shares.get(ShareKind::IngressAddresses);
        demands.ingress.max.insert(name.clone(), share);
        add_gateways(view, tenant.vni, &mut demands);
        let weights = weights(view);
        for entry in view.of(ResourceKind::Service) {
            let Resource::Service(service) = entry.resource.as_ref() else {
                continue;
            };
            // A service without workloads has no weight, but is placed too.
            let weight = weights.get(&service.key).copied().unwrap_or(0);
            let home = view.homes.get(&service.key).cloned();
            demands.services.insert(
                service.id,
                Demand {
                    key: service.key.clone(),
                    vni: tenant.vni,
                    weight,
                    home,
                },
            );
        }
    }
    // A tenant whose sources were not read yet keeps the services that the plan has.
    add_planned_services(catalog, plan, &mut demands);
    demands
}

/// Adds the planned services of tenants whose sources are not completely known. They keep their
/// placement and their addresses until the sources are complete.
fn add_planned_services(catalog: &Catalog, plan: &Plan, demands: &mut Demands) {
    for (id, service) in &plan.services {
        let view = catalog.tenants.get(&service.key.tenant);
        if view.is_none_or(|view| view.complete) || demands.services.contains_key(id) {
            continue;
        }
        if is_gateway_service(&service.key) {
            demands.ingress.requested.insert(*id, Vec::new());
        }
        let demand = Demand {
            key: service.key.clone(),
            vni: service.vni,
            // The number of its workloads is unknown.
            weight: 0,
            home: None,
        };
        demands.services.insert(*id, demand);
    }
}

/// Adds the demands of a tenant's Gateways.
fn add_gateways(view: &TenantCatalog, vni: Vni, demands: &mut Demands) {
    for entry in view.of(ResourceKind::Ingress) {
        let Resource::Ingress(gateway) = entry.resource.as_ref() else {
            continue;
        };
        let requested = view.ingress.addresses.get(&gateway.key);
        let requested = requested.cloned().unwrap_or_default();
        demands.ingress.requested.insert(gateway.id, requested);
        let demand = Demand {
            key: gateway.key.clone(),
            vni,
            weight: GATEWAY_WEIGHT,
            home: None,
        };
        demands.services.insert(gateway.id, demand);
    }
}

/// Returns the expected weight of each service: the number of its workloads. The real load changes
/// all the time, and would move services.
fn weights(view: &TenantCatalog) -> BTreeMap<ServiceKey, u32> {
    let mut weights = BTreeMap::new();
    for entry in view.of(ResourceKind::Workload) {
        let Resource::Workload(workload) = entry.resource.as_ref() else {
            continue;
        };
        let services: BTreeSet<&ServiceKey> =
            workload.endpoints.iter().map(|e| &e.service).collect();
        for service in services {
            *weights.entry(service.clone()).or_insert(0) += 1;
        }
    }
    weights
}

/// Returns the plan to start from. A tenant's service of the tier itself has gateway number 1, no
/// matter when the tenant's other services came.
pub(crate) fn with_initial_placement(parent: &Arc<Plan>, demands: &Demands) -> Arc<Plan> {
    let new = demands
        .services
        .iter()
        .filter(|(id, d)| is_tier_service(&d.key) && !parent.services.contains_key(id));
    let first = |demand: &Demand| {
        let (key, tables) = (demand.key.clone(), BTreeMap::new());
        PlannedService {
            key,
            vni: demand.vni,
            number: 1,
            network: None,
            placement: None,
            tables,
        }
    };
    let new: Vec<(ServiceId, PlannedService)> =
        new.map(|(id, demand)| (*id, first(demand))).collect();
    if new.is_empty() {
        return parent.clone();
    }
    let mut plan = Plan::clone(parent);
    plan.services.extend(new);
    Arc::new(plan)
}

/// Returns all tables of a plan. Those that did not change are taken from `before`: equal versions
/// mean equal tables.
pub(crate) fn tables(plan: &Plan, before: &PublishedTables) -> PublishedTables {
    let table = |id: ServiceId, az: &AzName, version| {
        let key = (id, az.clone());
        match before.get(&key).filter(|b| b.table.version == version) {
            Some(same) => Some((key, same.clone())),
            None => {
                let table = plan.table(id, az)?;
                let members = Arc::new(table.chains.iter().flatten().copied().collect());
                Some((
                    key,
                    TableMembers {
                        table: Arc::new(table),
                        members,
                    },
                ))
            }
        }
    };
    let all = plan.services.iter().flat_map(|(id, service)| {
        service
            .tables
            .iter()
            .map(move |(az, t)| (*id, az, t.version))
    });
    all.filter_map(|(id, az, version)| table(id, az, version))
        .collect()
}

/// The state of the cloud tier that is to be published now.
#[derive(Debug)]
pub(crate) struct TierPublication {
    pub(crate) tier: TierState,
    pub(crate) tables: PublishedTables,
    /// Newest plan whose tables are all in the publication.
    pub(crate) plan: u32,
    /// Tables that wait until a replica has the tenant.
    pub(crate) waiting: BTreeSet<(ServiceId, AzName)>,
    /// Number of (service, AZ) pairs that take no new sessions.
    pub(crate) closed: usize,
}

/// Decides what to publish of `plan`, when `last` was published last. A table whose new replicas do
/// not have the tenant yet stays as it was: the tenant is published to them first.
pub(crate) fn build_publication(
    plan: &Plan,
    fleet: &Fleet,
    demands: &Demands,
    membership: &Membership,
    last: (&PublishedTables, &TenantPlacements),
) -> TierPublication {
    let mut out = TierPublication {
        tier: TierState::default(),
        tables: PublishedTables::new(),
        plan: plan.number,
        waiting: BTreeSet::new(),
        closed: 0,
    };
    let planned = tables(plan, last.0);
    for (key, table_members) in &planned {
        let before = last.0.get(key);
        // An unchanged table was published when its replicas had the tenant.
        if before.is_some_and(|b| Arc::ptr_eq(&b.table, &table_members.table))
            || newcomers(before, table_members)
                .all(|n| membership.is_ready(n, &table_members.table.service.tenant))
        {
            out.tables.insert(key.clone(), table_members.clone());
            continue;
        }
        out.waiting.insert(key.clone());
        // A plan counts as published only with all its tables.
        out.plan = out.plan.min(table_members.table.version.saturating_sub(1));
        if let Some(before) = before {
            out.tables.insert(key.clone(), before.clone());
        }
    }
    out.tier.placement = Arc::new(tier_placement(plan, membership, (&planned, &out.tables)));
    let mut parts: BTreeMap<&TenantName, (Vec<GatewayAddress>, Vec<Arc<BucketTable>>)> =
        BTreeMap::new();
    let open = open_backends(fleet);
    for (id, service) in &plan.services {
        let addresses = service_addresses(
            *id,
            service,
            (fleet, &open),
            demands,
            membership,
            &out.tables,
        );
        out.closed += addresses.iter().filter(|a| !a.open).count();
        parts
            .entry(&service.key.tenant)
            .or_default()
            .0
            .extend(addresses);
    }
    // Published tables and not planned ones: those that wait are left out.
    for table_members in out.tables.values() {
        parts
            .entry(&table_members.table.service.tenant)
            .or_default()
            .1
            .push(table_members.table.clone());
    }
    for (tenant, (addresses, tables)) in parts {
        let before = last.1.get(tenant);
        let planned = TenantPlacement {
            addresses: reuse_if_equal(before.map(|b| &b.addresses), addresses),
            tables: reuse_if_equal(before.map(|b| &b.tables), tables),
        };
        out.tier.tenants.insert(tenant.clone(), planned);
    }
    out.tier.provider = replicas(membership);
    out
}

/// Returns the list from before if it is the same, so that tenants without changes cost nothing.
fn reuse_if_equal<T: Eq>(before: Option<&Arc<Vec<T>>>, now: Vec<T>) -> Arc<Vec<T>> {
    before
        .filter(|before| ***before == now)
        .cloned()
        .unwrap_or_else(|| Arc::new(now))
}

/// Returns the replicas that are in a table and were not in the one before.
fn newcomers<'a>(
    before: Option<&'a TableMembers>,
    planned: &'a TableMembers,
) -> impl Iterator<Item = ReplicaNumber> + 'a {
    planned
        .members
        .iter()
        .copied()
        .filter(move |n| before.is_none_or(|before| !before.members.contains(n)))
}

/// Returns the backends on which a session may begin, for all services at once; the rule is that of
/// [`canal_planner::is_open`].
fn open_backends(fleet: &Fleet) -> BTreeSet<(&AzName, &BackendName)> {
    let open = fleet
        .replicas
        .values()
        .filter(|r| r.up && r.state == ReplicaState::Active);
    open.map(|r| (&r.az, &r.backend)).collect()
}

fn replicas(membership: &Membership) -> Vec<Resource> {
    let resource = |row: &canal_store::StoredReplica, up| {
        let (name, number, backend, az) = (
            row.name.clone(),
            row.number,
            row.backend.clone(),
            row.az.clone(),
        );
        Resource::Replica(Replica {
            name,
            number,
            backend,
            az,
            underlay: row.underlay,
            up,
        })
    };
    membership
        .members()
        .values()
        .map(|m| resource(&m.row, m.up))
        .collect()
}

/// Returns where services are placed, and where tables keep their sessions. Both the planned and
/// the published tables count.
fn tier_placement(
    plan: &Plan,
    membership: &Membership,
    tables: (&PublishedTables, &PublishedTables),
) -> TierPlacement {
    let replicas = membership
        .members()
        .values()
        .map(|m| (m.row.name.clone(), m.row.backend.clone()))
        .collect();
    let by_number: BTreeMap<ReplicaNumber, &BackendName> = membership
        .members()
        .values()
        .map(|m| (m.row.number, &m.row.backend))
        .collect();
    let mut out = TierPlacement {
        replicas,
        ..TierPlacement::default()
    };
    let mut session_backends: BTreeMap<ServiceId, BTreeSet<&BackendName>> = BTreeMap::new();
    // Planned tables count, so that a tenant arrives before its table does; published tables still
    // have sessions.
    for ((id, _), table) in tables.0.iter().chain(tables.1) {
        session_backends.entry(*id).or_default().extend(
            table
                .members
                .iter()
                .filter_map(|n| by_number.get(n).copied()),
        );
    }
    let mut served: BTreeMap<&BackendName, (BTreeSet<&TenantName>, BTreeSet<ServiceId>)> =
        BTreeMap::new();
    for (id, service) in &plan.services {
        let mut backends = session_backends.remove(id).unwrap_or_default();
        backends.extend(service.placement.iter().flat_map(|p| p.all()));
        for backend in backends {
            let served = served.entry(backend).or_default();
            served.0.insert(&service.key.tenant);
            served.1.insert(*id);
        }
    }
    for (backend, (tenants, services)) in served {
        let served = out.backends.entry(backend.clone()).or_default();
        served.tenants.extend(tenants.into_iter().cloned());
        served.services.extend(services);
    }
    out
}

/// Returns the gateway addresses of a service, one entry per AZ.
fn service_addresses(
    id: ServiceId,
    service: &PlannedService,
    (fleet, open): (&Fleet, &BTreeSet<(&AzName, &BackendName)>),
    demands: &Demands,
    membership: &Membership,
    tables: &PublishedTables,
) -> Vec<GatewayAddress> {
    let ranges = service.ranges(demands);
    let address = |az: &AzName| {
        let number = *fleet.azs.get(az)?;
        let given = addresses(ranges, number, service.number).ok()?.assigned;
        let edge_lives = membership.edges().is_alive(az);
        let live = service
            .placement
            .iter()
            .filter_map(|p| p.backends.get(az))
            .flatten()
            .any(|backend| open.contains(&(az, backend)));
        // Sessions need a live edge, an active replica, and a published table.
        let open = edge_lives && live && tables.contains_key(&(id, az.clone()));
        (!given.is_empty()).then(|| GatewayAddress {
            service: service.key.clone(),
            id,
            az: az.clone(),
            addresses: given,
            network: service.network.as_ref().map(|network| network.vni),
            open,
        })
    };
    service.tables.keys().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use canal_model::fleet::Ownership;

    use super::*;

    fn demand(demands: &mut Demands, id: u32, key: &str) {
        let key: ServiceKey = key.parse().unwrap();
        let vni = Vni::new(1).unwrap();
        demands
            .ranges
            .insert(key.tenant.clone(), vec!["10.1.192.0/18".parse().unwrap()]);
        demands.services.insert(
            ServiceId::new(id).unwrap(),
            Demand {
                key,
                vni,
                weight: 1,
                home: None,
            },
        );
    }

    fn fleet() -> Fleet {
        let replica = canal_model::fleet::FleetReplica {
            name: "r1".parse().unwrap(),
            number: ReplicaNumber::new(1).unwrap(),
            backend: "b1".parse().unwrap(),
            az: "az1".parse().unwrap(),
            underlay: std::net::Ipv4Addr::new(250, 1, 0, 3),
            state: ReplicaState::Active,
            up: true,
        };
        Fleet::of([("az1".parse().unwrap(), 1)].into(), [replica])
    }

    #[test]
    fn the_tiers_service_is_number_one_and_unchanged_resources_are_reused() {
        let mut demands = Demands::default();
        demand(&mut demands, 1, "alpha/a/a");
        demand(&mut demands, 2, "alpha/canal-system/gateway");
        let first = with_initial_placement(&Arc::default(), &demands);
        let plan = Arc::new(canal_planner::plan(
            &fleet(),
            &demands,
            &Ownership::default(),
            Some(&first),
        ));
        let numbers = |plan: &Plan| plan.services.values().map(|s| s.number).collect::<Vec<_>>();
        assert_eq!(numbers(&plan), [2, 1]);
        assert!(
            Arc::ptr_eq(&with_initial_placement(&plan, &demands), &plan),
            "nothing new"
        );
        let before = tables(&plan, &PublishedTables::new());
        assert_eq!(before.len(), 2);
        demand(&mut demands, 3, "alpha/b/b");
        let next = canal_planner::plan(
            &fleet(),
            &demands,
            &Ownership::default(),
            Some(&with_initial_placement(&plan, &demands)),
        );
        assert_eq!(numbers(&next), [2, 1, 3]);
        let after = tables(&next, &before);
        assert!(
            after.len() == 3
                && before
                    .iter()
                    .all(|(key, table)| Arc::ptr_eq(&table.table, &after[key].table))
        );
        let again = canal_planner::plan(&fleet(), &demands, &Ownership::default(), Some(&next));
        assert_eq!(again, next, "the same question has the same answer");
    }

    /// Services of a tenant that is gone are not kept.
    #[test]
    fn services_of_a_tenant_with_incomplete_sources_keep_their_place_in_the_plan() {
        let mut all = Demands::default();
        demand(&mut all, 1, "alpha/shop/cart");
        demand(&mut all, 2, "alpha/shop/web.gateway");
        demand(&mut all, 3, "gone/shop/cart");
        let gateway = ServiceId::new(2).unwrap();
        all.ingress.requested.insert(gateway, Vec::new());
        let alpha: TenantName = "alpha".parse().unwrap();
        all.ingress
            .networks
            .insert(alpha.clone(), Vni::new(1).unwrap());
        let one = canal_model::share::Share::Amount(1);
        all.ingress.max.insert(alpha.clone(), one);
        let ownership = Ownership::default();
        let plan = canal_planner::plan(&fleet(), &all, &ownership, None);
        assert!(plan.services[&gateway].network.is_some());
        let claims = canal_compiler::claims::TenantClaims {
            tenant: alpha.clone(),
            isolation: None,
            gateways: Vec::new(),
        };
        let compiled = canal_catalog::CompiledTenant {
            complete: false,
            ..canal_catalog::CompiledTenant::nothing(claims)
        };
        let generation = canal_model::ids::Generation(1);
        let mut catalog = Catalog::default();
        catalog.tenants.insert(
            alpha,
            Arc::new(TenantCatalog::next(None, compiled, generation)),
        );
        let demands = demands(&catalog, ShardingRules::default(), &plan);
        let next = canal_planner::plan(&fleet(), &demands, &ownership, Some(&plan));
        let mut expected = plan.services.clone();
        expected.remove(&ServiceId::new(3).unwrap());
        assert_eq!(next.services, expected);
    }
}
