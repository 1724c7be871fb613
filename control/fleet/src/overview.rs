//! The fleet as operators see it: replicas, edges, placement of services, unmet constraints, and
//! how far a failure would reach. It changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_catalog::Catalog;
use canal_controller_metrics::{self as metrics, GaugeValues};
use canal_model::fleet::{Demands, Fleet, ReplicaState, ShardingRules};
use canal_model::ids::{AzName, BackendName, ReplicaNumber, ServiceId, TenantName};
use canal_model::plan::{Plan, PlannedService, PlannedTable};
use canal_planner::address::addresses;
use canal_wire::api;
use tokio::time::Instant;

use crate::handle::FleetHandle;
use crate::membership::{Membership, ReplicaRecord, is_moving};
use crate::publication;

/// Maximum number of simultaneous failures in the blast radius.
/// A service has at most 8 backends (`BACKENDS_PER_SERVICE_MAX`), so that with 8 failures any
/// service can be lost.
const FAILURES_MAX: u32 = 8;

/// Snapshot of the fleet at one moment.
pub struct FleetOverview {
    plan: Arc<Plan>,
    demands: Demands,
    fleet: Fleet,
    edges_alive: BTreeSet<AzName>,
    replicas: Vec<api::ReplicaStatus>,
    edges: Vec<api::EdgeStatus>,
    waiting: usize,
}

impl FleetOverview {
    /// Takes a snapshot of the fleet.
    pub fn of(fleet: &FleetHandle, catalog: &Catalog) -> Self {
        let now = Instant::now();
        let plan = fleet.plan();
        let totals = BucketTotals::of(&plan);
        let membership = fleet.membership();
        let edge = |e: &crate::edges::EdgeMember| api::EdgeStatus {
            name: e.row.name.to_string(),
            az: e.row.az.to_string(),
            underlay: e.row.underlay.to_string(),
            tunnel_end: e.row.tunnel_end().to_string(),
            reporting: e.alive,
            generation: e.generation.0,
            version: e.version.clone(),
        };
        Self {
            demands: publication::demands(catalog, ShardingRules::default(), &plan),
            fleet: membership.fleet(now),
            edges_alive: membership
                .edges()
                .values()
                .filter(|e| e.alive)
                .map(|e| e.row.az.clone())
                .collect(),
            replicas: membership
                .members()
                .values()
                .map(|m| replica(m, &totals, now))
                .collect(),
            edges: membership.edges().values().map(edge).collect(),
            waiting: fleet.counts().waiting,
            plan,
        }
    }

    /// Returns the status of one replica.
    pub fn replica(&self, name: &str) -> Option<api::ReplicaStatus> {
        self.replicas.iter().find(|r| r.name == name).cloned()
    }

    /// Returns the overview. Services and unmet constraints are those of tenants that `may_see`
    /// lets through. Only the provider gets replicas, edges, the blast radius and violations of the
    /// plan.
    pub fn fleet_response(
        &self,
        is_provider: bool,
        may_see: impl Fn(&TenantName) -> bool,
    ) -> api::FleetResponse {
        let seen = |s: &&PlannedService| may_see(&s.key.tenant);
        let services = self
            .plan
            .services
            .iter()
            .filter(|(_, s)| seen(s))
            .map(|(id, s)| self.placed_service(*id, s))
            .collect();
        let own = |note: &&canal_model::plan::UnmetConstraint| {
            is_provider || may_see(&note_service(note).tenant)
        };
        let notes = self
            .plan
            .notes
            .iter()
            .filter(own)
            .map(|n| {
                if is_provider {
                    n.to_string()
                } else {
                    // A tenant must not learn the names of services that share its backends.
                    without_other_tenants(n)
                }
            })
            .collect();
        let provider = |items: Vec<String>| if is_provider { items } else { Vec::new() };
        api::FleetResponse {
            edges: if is_provider {
                self.edges.clone()
            } else {
                Vec::new()
            },
            replicas: if is_provider {
                self.replicas.clone()
            } else {
                Vec::new()
            },
            services,
            blast: if is_provider {
                blast(&self.plan)
            } else {
                Vec::new()
            },
            plan: self.plan.number,
            unmet_constraints: notes,
            findings: provider(
                canal_planlint::check(&self.fleet, &self.demands, &self.plan)
                    .iter()
                    .map(ToString::to_string)
                    .collect(),
            ),
            tables_waiting: u32::try_from(self.waiting).unwrap_or(u32::MAX),
        }
    }

    fn is_open(&self, service: &PlannedService, az: &AzName) -> bool {
        self.edges_alive.contains(az) && canal_planner::is_open(&self.fleet, service, az)
    }

    fn placed_service(&self, id: ServiceId, service: &PlannedService) -> api::PlacedService {
        let placement = service.placement.as_ref();
        let backends = placement
            .iter()
            .flat_map(|p| p.backends.iter())
            .flat_map(|(az, names)| names.iter().map(move |b| format!("{az}/{b}")));
        api::PlacedService {
            service: service.key.to_string(),
            id: id.get(),
            home_az: placement.map(|p| p.home.to_string()).unwrap_or_default(),
            backends: backends.collect(),
            open_azs: service
                .tables
                .keys()
                .filter(|az| self.is_open(service, az))
                .map(ToString::to_string)
                .collect(),
            gateway_number: service.number,
            migrating: service.tables.values().any(|t| is_moving(t)),
        }
    }

    /// Explains the placement of a service; `None` if the service is not planned.
    pub fn explain(
        &self,
        key: &canal_model::ids::ServiceKey,
        is_provider: bool,
    ) -> Option<api::ExplainResponse> {
        let (id, service) = self.plan.services.iter().find(|(_, s)| s.key == *key)?;
        let ranges = service.ranges(&self.demands);
        let table = |(az, t): (&AzName, &Arc<PlannedTable>)| {
            let given = self
                .fleet
                .azs
                .get(az)
                .and_then(|n| addresses(ranges, *n, service.number).ok())
                // A service without addresses is shown with an empty list.
                .unwrap_or_default()
                .assigned;
            api::ExplainedTable {
                az: az.to_string(),
                version: t.version,
                confirmed: t.confirmed >= t.version,
                closing: t.closing > 0,
                open: self.is_open(service, az),
                addresses: given.iter().map(ToString::to_string).collect(),
                members: if is_provider {
                    self.count_members(t)
                } else {
                    Vec::new()
                },
            }
        };
        let notes = self.plan.notes.iter().filter(|n| note_service(n) == key);
        Some(api::ExplainResponse {
            service: Some(self.placed_service(*id, service)),
            tables: service.tables.iter().map(table).collect(),
            unmet_constraints: notes
                .map(|n| {
                    if is_provider {
                        n.to_string()
                    } else {
                        without_other_tenants(n)
                    }
                })
                .collect(),
        })
    }

    /// Counts the buckets of each replica in a table: as head, as owner and as standby.
    fn count_members(&self, table: &PlannedTable) -> Vec<api::ExplainedMember> {
        let mut by_number: BTreeMap<ReplicaNumber, api::ExplainedMember> = BTreeMap::new();
        for chain in &table.chains {
            for (place, member) in chain.iter().enumerate() {
                let entry = by_number.entry(member.replica).or_default();
                match place {
                    0 => entry.heads += 1,
                    _ if member.is_owner() => entry.owners += 1,
                    _ => entry.standbys += 1,
                }
            }
        }
        let name = |n: ReplicaNumber| {
            self.fleet
                .replicas
                .get(&n)
                .map_or_else(|| format!("#{}", n.get()), |r| r.name.to_string())
        };
        by_number
            .into_iter()
            .map(|(n, member)| api::ExplainedMember {
                replica: name(n),
                ..member
            })
            .collect()
    }
}

/// Number of buckets of each replica in all tables.
#[derive(Default)]
struct BucketTotals {
    heads: BTreeMap<ReplicaNumber, u32>,
    owners: BTreeMap<ReplicaNumber, u32>,
}

impl BucketTotals {
    fn of(plan: &Plan) -> Self {
        let mut out = Self::default();
        for chain in plan
            .services
            .values()
            .flat_map(|s| s.tables.values())
            .flat_map(|t| &t.chains)
        {
            for (place, member) in chain.iter().enumerate() {
                if place == 0 {
                    *out.heads.entry(member.replica).or_insert(0) += 1;
                } else if member.is_owner() {
                    *out.owners.entry(member.replica).or_insert(0) += 1;
                }
            }
        }
        out
    }
}

fn note_service(note: &canal_model::plan::UnmetConstraint) -> &canal_model::ids::ServiceKey {
    use canal_model::plan::UnmetConstraint;
    match note {
        UnmetConstraint::FewAtHome { service, .. }
        | UnmetConstraint::FewAway { service, .. }
        | UnmetConstraint::Shared { service, .. }
        | UnmetConstraint::HomeUnknown { service, .. }
        | UnmetConstraint::NoBackend { service }
        | UnmetConstraint::NoReplica { service, .. }
        | UnmetConstraint::Held { service, .. }
        | UnmetConstraint::NoAddress { service, .. } => service,
    }
}

/// Formats an unmet constraint for a tenant's operator: it names no other tenant's service.
fn without_other_tenants(note: &canal_model::plan::UnmetConstraint) -> String {
    match note {
        canal_model::plan::UnmetConstraint::Shared { service, .. } => {
            format!(
                "{service}: it shares all its backends with another service, so one failure may affect both; contact the provider"
            )
        }
        other => other.to_string(),
    }
}

/// Returns the state of a replica as one word.
pub(crate) fn state_name(member: &ReplicaRecord) -> &'static str {
    match member.row.state {
        _ if member.gone => "gone",
        ReplicaState::Joining => "joining",
        ReplicaState::Active => "active",
        ReplicaState::Draining => "draining",
    }
}

fn replica(m: &ReplicaRecord, totals: &BucketTotals, now: Instant) -> api::ReplicaStatus {
    let of = |map: &BTreeMap<ReplicaNumber, u32>| map.get(&m.row.number).copied().unwrap_or(0);
    api::ReplicaStatus {
        name: m.row.name.to_string(),
        number: m.row.number.get().into(),
        backend: m.row.backend.to_string(),
        az: m.row.az.to_string(),
        underlay: m.row.underlay.to_string(),
        state: state_name(m).into(),
        up: m.up,
        drain_requested: m.row.drain,
        sessions: m.sessions,
        accepted: m.accepted,
        generation: m.generation.0,
        cores: m.cores,
        services: u32::try_from(m.owned).unwrap_or(u32::MAX),
        heads: of(&totals.heads),
        owners: of(&totals.owners),
        // At least 1, because 0 means that the replica has not reported.
        since_last_report_ms: m.since_last_report(now).map_or(0, |d| {
            u64::try_from(d.as_millis()).unwrap_or(u64::MAX).max(1)
        }),
        version: m.version.clone(),
    }
}

/// Returns how many services are expected to lose all their backends when `failed` backends, chosen
/// evenly, fail at once. A service with `k` of `n` backends is lost with the probability that all
/// `k` are among the failed: C(n-k, f-k) / C(n, f).
fn blast(plan: &Plan) -> Vec<api::BlastRadius> {
    let sets: Vec<BTreeSet<&BackendName>> = plan
        .services
        .values()
        .filter_map(|s| s.placement.as_ref())
        .map(|p| p.all().collect())
        .collect();
    let all: BTreeSet<&BackendName> = sets.iter().flatten().copied().collect();
    let n = u32::try_from(all.len()).unwrap_or(u32::MAX);
    let lost = |k: u32, failed: u32| {
        (0..k)
            .map(|i| f64::from(failed.saturating_sub(i)) / f64::from(n - i))
            .product::<f64>()
    };
    let row = |failed: u32| {
        let expected = sets
            .iter()
            .map(|s| lost(u32::try_from(s.len()).unwrap_or(u32::MAX), failed))
            .sum();
        api::BlastRadius {
            failed,
            expected_services: expected,
        }
    };
    (1..=FAILURES_MAX.min(n)).map(row).collect()
}

impl Membership {
    /// Returns the number of replicas in each state, of replicas that are down, and of edges that
    /// are alive.
    fn count_states(&self) -> (BTreeMap<&'static str, usize>, usize, usize) {
        let mut states: BTreeMap<&'static str, usize> = ["joining", "active", "draining", "gone"]
            .into_iter()
            .map(|s| (s, 0))
            .collect();
        for member in self.members().values() {
            *states.entry(state_name(member)).or_insert(0) += 1;
        }
        let down = self.members().values().filter(|m| !m.up).count();
        (
            states,
            down,
            self.edges().values().filter(|e| e.alive).count(),
        )
    }
}

impl FleetHandle {
    /// Sets the gauges of the cloud tier.
    #[allow(
        clippy::cast_precision_loss,
        reason = "all of these are far below 2^52"
    )]
    pub fn gauges(&self, g: &mut GaugeValues) {
        let (states, down, edges) = self.membership().count_states();
        for (state, n) in states {
            g.set(metrics::FLEET_REPLICAS, &[("state", state)], n as f64);
        }
        let (plan, counts) = (self.plan(), self.counts());
        g.set(metrics::FLEET_DOWN, &[], down as f64);
        g.set(metrics::FLEET_EDGES, &[], edges as f64);
        g.set(metrics::FLEET_PLAN, &[], f64::from(plan.number));
        g.set(
            metrics::FLEET_UNMET_CONSTRAINTS,
            &[],
            plan.notes.len() as f64,
        );
        g.set(metrics::FLEET_CLOSED, &[], counts.closed as f64);
        g.set(metrics::FLEET_WAITING, &[], counts.waiting as f64);
    }
}

#[cfg(test)]
mod tests {
    use canal_model::fleet::Placement;
    use canal_model::ids::Vni;

    use super::*;

    #[test]
    fn the_blast_radius_counts_services_that_lose_all() {
        let service = |n: u32, backends: &[&str]| {
            let names = backends.iter().map(|b| b.parse().unwrap()).collect();
            let az: AzName = "az1".parse().unwrap();
            let placement = Placement {
                home: az.clone(),
                backends: [(az, names)].into(),
            };
            let key = format!("alpha/shop/s{n}").parse().unwrap();
            let planned = PlannedService {
                key,
                vni: Vni::new(1).unwrap(),
                number: n,
                network: None,
                placement: Some(placement),
                tables: BTreeMap::new(),
            };
            (ServiceId::new(n).unwrap(), planned)
        };
        let services = [
            service(1, &["a", "b"]),
            service(2, &["b", "c"]),
            service(3, &["d"]),
        ]
        .into();
        let plan = Plan {
            number: 1,
            parent: 0,
            services,
            notes: vec![],
        };
        let got: Vec<(u32, String)> = blast(&plan)
            .iter()
            .map(|b| (b.failed, format!("{:.3}", b.expected_services)))
            .collect();
        // Of 4 backends, one failure takes service 3 with probability 1/4. Two failures take each
        // pair with 1/6, and service 3 with 1/2.
        let want = [(1, "0.250"), (2, "0.833"), (3, "1.750"), (4, "3.000")]
            .map(|(f, e)| (f, e.to_string()));
        assert_eq!(got, want);
        assert!(blast(&Plan::default()).is_empty());
    }
}
