//! Checks plans against the rules of `docs/design/0003-cloud-tier.md`. It shares no code with the
//! planner and fixes nothing.
//!
//! Start at [`check`] for one plan, and at [`step()`] for the transition between two plans.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use canal_model::fleet::{
    Demands, Fleet, FleetReplica, Ownership, Placement, ReplicaState, ShardingRules,
};
use canal_model::ids::{AzName, BackendName, ReplicaNumber, ServiceId, ServiceKey};
use canal_model::ingress::is_gateway_service;
use canal_model::plan::{Plan, PlannedService, PlannedTable, UnmetConstraint};
use canal_model::program::{BUCKETS, CHAIN_LENGTH_MAX};

mod rebalance;
mod step;

pub use step::step;

/// A rule that a plan breaks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finding {
    /// A service with a demand is not in the plan.
    Missing { service: ServiceKey },
    /// The plan contains a service without a demand.
    Undemanded { service: ServiceKey },
    /// The service has no placement although there are backends.
    Unplaced { service: ServiceKey },
    /// A backend in the placement does not exist, or is not in this AZ.
    UnknownBackend {
        service: ServiceKey,
        backend: BackendName,
    },
    /// The home AZ has fewer backends than required although it has more to give, or no note
    /// explains it.
    FewAtHome {
        service: ServiceKey,
        assigned: usize,
    },
    /// The other AZs have fewer backends than required although they have more to give, or no note
    /// explains it.
    FewAway {
        service: ServiceKey,
        assigned: usize,
    },
    /// All backends of the service are another service's too, and no note explains it.
    Shared {
        service: ServiceKey,
        with: ServiceKey,
    },
    /// The home is not the AZ that the tenant requests, although that AZ has backends.
    Home { service: ServiceKey, az: AzName },
    /// Two services of a tenant have the same gateway number, or one has none.
    Number { service: ServiceKey, number: u32 },
    /// An AZ in which the service lives has no table.
    NoTable { service: ServiceKey, az: AzName },
    /// The number of chains is not the number of buckets, or a chain is too long.
    Shape { service: ServiceKey, az: AzName },
    /// A chain is empty although a replica is up.
    Empty {
        service: ServiceKey,
        az: AzName,
        bucket: usize,
    },
    /// A replica is in one chain twice.
    Twice {
        service: ServiceKey,
        az: AzName,
        bucket: usize,
        replica: ReplicaNumber,
    },
    /// A head is not active, up and of the service's backends, although other replicas are, and the
    /// bucket is not blocked.
    Head {
        service: ServiceKey,
        az: AzName,
        bucket: usize,
        replica: ReplicaNumber,
    },
    /// A member is not in the fleet, or is in another AZ.
    UnknownReplica {
        service: ServiceKey,
        az: AzName,
        replica: ReplicaNumber,
    },
    /// Some backends or replicas head two or more buckets more than others, and no bucket is
    /// blocked.
    Uneven { service: ServiceKey, az: AzName },
    /// Live replicas are missing behind a head although the chain has space for them.
    Standby {
        service: ServiceKey,
        az: AzName,
        bucket: usize,
    },
    /// The table's version is 0 or above the plan's number.
    Version { service: ServiceKey, az: AzName },
    /// Between two plans: a chain lost a member that may own sessions.
    OwnerDropped {
        service: ServiceKey,
        az: AzName,
        bucket: usize,
        replica: ReplicaNumber,
    },
    /// Between two plans: chains changed without an increase of the version, or the version
    /// increased without a change.
    StaleVersion { service: ServiceKey, az: AzName },
    /// Between two plans: more heads moved than the change of the fleet explains.
    Moved {
        service: ServiceKey,
        az: AzName,
        moved: usize,
        bound: usize,
    },
    /// Between two plans: members that stay changed their order, other than by becoming the head.
    Reordered {
        service: ServiceKey,
        az: AzName,
        bucket: usize,
    },
    /// Between two plans: a service left a backend that still exists, and no rule required that.
    Left {
        service: ServiceKey,
        backend: BackendName,
    },
    /// Between two plans: more services moved for balance than may at one time.
    Wave { moved: usize, most: usize },
    /// Between two plans: a service moved for balance while one of its tables still has owners from
    /// an earlier change.
    Restless { service: ServiceKey },
    /// Between two plans: services moved for balance, but the loads did not come closer together.
    Apart { moved: usize },
    /// Between two plans: a gateway number or a home changed.
    Unstable { service: ServiceKey },
    /// Between two plans: a Gateway has an address that another Gateway had, which did not give it
    /// up.
    AddressTaken {
        service: ServiceKey,
        address: IpAddr,
    },
    /// The plan does not name its parent, or its number did not increase.
    Parent { number: u32, parent: u32 },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The debug format is enough: operators see findings only if the planner has a bug.
        fmt::Debug::fmt(self, f)
    }
}

/// Checks one plan by itself. The result is empty if every rule is met or the plan's notes name the
/// exception.
pub fn check(fleet: &Fleet, demands: &Demands, plan: &Plan) -> Vec<Finding> {
    let mut findings = Vec::new();
    let sites = AzReplicas::all(fleet);
    let notes = PlanExceptions::of(plan);
    for (id, demand) in &demands.services {
        let Some(service) = plan.services.get(id) else {
            findings.push(Finding::Missing {
                service: demand.key.clone(),
            });
            continue;
        };
        check_placement(fleet, demands, *id, service, &notes, &mut findings);
        check_tables(&sites, demands, plan.number, service, &notes, &mut findings);
    }
    for (_, service) in plan
        .services
        .iter()
        .filter(|(id, _)| !demands.services.contains_key(id))
    {
        findings.push(Finding::Undemanded {
            service: service.key.clone(),
        });
    }
    check_numbers(plan, &mut findings);
    check_unique(plan, &notes, &mut findings);
    findings.sort();
    findings
}

/// The exceptions that the plan's own notes declare.
struct PlanExceptions<'a> {
    few_home: BTreeSet<&'a ServiceKey>,
    few_away: BTreeSet<&'a ServiceKey>,
    shared: BTreeSet<&'a ServiceKey>,
    heads_retained: BTreeMap<(&'a ServiceKey, &'a AzName), &'a [u8]>,
}

impl<'a> PlanExceptions<'a> {
    fn of(plan: &'a Plan) -> Self {
        let mut noted = PlanExceptions {
            few_home: BTreeSet::new(),
            few_away: BTreeSet::new(),
            shared: BTreeSet::new(),
            heads_retained: BTreeMap::new(),
        };
        for note in &plan.notes {
            match note {
                UnmetConstraint::FewAtHome { service, .. } => _ = noted.few_home.insert(service),
                UnmetConstraint::FewAway { service, .. } => _ = noted.few_away.insert(service),
                UnmetConstraint::Shared { service, .. } => _ = noted.shared.insert(service),
                UnmetConstraint::Held {
                    service,
                    az,
                    buckets,
                    ..
                } => _ = noted.heads_retained.insert((service, az), buckets),
                UnmetConstraint::HomeUnknown { .. }
                | UnmetConstraint::NoBackend { .. }
                | UnmetConstraint::NoReplica { .. }
                | UnmetConstraint::NoAddress { .. } => {}
            }
        }
        noted
    }
    fn is_held(&self, service: &ServiceKey, az: &AzName, bucket: usize) -> bool {
        self.heads_retained
            .get(&(service, az))
            .is_some_and(|buckets| buckets.iter().any(|listed| usize::from(*listed) == bucket))
    }
}

/// The replicas of one AZ.
struct AzReplicas<'a> {
    replicas: BTreeMap<ReplicaNumber, &'a FleetReplica>,
}

impl<'a> AzReplicas<'a> {
    fn all(fleet: &'a Fleet) -> BTreeMap<&'a AzName, AzReplicas<'a>> {
        let mut sites: BTreeMap<&AzName, AzReplicas> = BTreeMap::new();
        for replica in fleet.replicas.values() {
            sites
                .entry(&replica.az)
                .or_insert_with(|| AzReplicas {
                    replicas: BTreeMap::new(),
                })
                .replicas
                .insert(replica.number, replica);
        }
        sites
    }
    /// Returns the replicas that may be heads: those active and up; if there are none, those
    /// draining and up.
    fn heads(
        &self,
        az: &AzName,
        placement: &Placement,
    ) -> BTreeMap<ReplicaNumber, &'a FleetReplica> {
        let of_state = |state: ReplicaState| -> BTreeMap<ReplicaNumber, &'a FleetReplica> {
            let found = self
                .replicas
                .values()
                .filter(|r| r.up && r.state == state && placement.has(az, &r.backend));
            found.map(|r| (r.number, *r)).collect()
        };
        let active = of_state(ReplicaState::Active);
        if active.is_empty() {
            of_state(ReplicaState::Draining)
        } else {
            active
        }
    }
}

fn check_placement(
    fleet: &Fleet,
    demands: &Demands,
    id: ServiceId,
    service: &PlannedService,
    noted: &PlanExceptions,
    findings: &mut Vec<Finding>,
) {
    let key = || service.key.clone();
    // Only a fleet without backends may leave a service without a placement.
    let Some(placement) = &service.placement else {
        if !fleet.backends.is_empty() {
            findings.push(Finding::Unplaced { service: key() });
        }
        return;
    };
    for (az, backends) in &placement.backends {
        for backend in backends
            .iter()
            .filter(|backend| fleet.backends.get(*backend) != Some(az))
        {
            findings.push(Finding::UnknownBackend {
                service: key(),
                backend: backend.clone(),
            });
        }
    }
    let home_backends = fleet
        .backends
        .values()
        .filter(|az| **az == placement.home)
        .count();
    let (home, away) = required_backends(&demands.rules);
    for (required, existing, assigned, noted, at_home) in [
        (
            home,
            home_backends,
            placement.at_home(),
            noted.few_home.contains(&service.key),
            true,
        ),
        (
            away,
            fleet.backends.len() - home_backends,
            placement.away(),
            noted.few_away.contains(&service.key),
            false,
        ),
    ] {
        // Missing backends are acceptable only if the AZs have no more and the plan lists an unmet
        // constraint for them.
        if assigned < required.min(existing) || assigned < required && !noted {
            findings.push(if at_home {
                Finding::FewAtHome {
                    service: key(),
                    assigned,
                }
            } else {
                Finding::FewAway {
                    service: key(),
                    assigned,
                }
            });
        }
    }
    let home_az = demands
        .services
        .get(&id)
        .and_then(|demand| demand.home.as_ref());
    // A requested AZ without backends cannot be the home; the plan notes it as an unmet constraint.
    if let Some(az) = home_az
        .filter(|az| **az != placement.home && fleet.backends.values().any(|other| other == *az))
    {
        findings.push(Finding::Home {
            service: key(),
            az: az.clone(),
        });
    }
}

fn required_backends(rules: &ShardingRules) -> (usize, usize) {
    let home = rules.home.clamp(1, ShardingRules::BACKENDS_PER_SERVICE_MAX);
    (
        home,
        rules
            .away
            .min(ShardingRules::BACKENDS_PER_SERVICE_MAX - home),
    )
}

/// Checks that no service's backends are a subset of another's, unless a note declares it. The note
/// of one service excuses both.
fn check_unique(plan: &Plan, noted: &PlanExceptions, findings: &mut Vec<Finding>) {
    let mut on: BTreeMap<&BackendName, BTreeSet<ServiceId>> = BTreeMap::new();
    for (id, service) in &plan.services {
        for backend in service.placement.iter().flat_map(Placement::all) {
            on.entry(backend).or_default().insert(*id);
        }
    }
    for (id, service) in &plan.services {
        let mut backends = service.placement.iter().flat_map(Placement::all);
        let Some(first) = backends.next() else {
            continue;
        };
        let mut everywhere = on[first].clone();
        for backend in backends {
            everywhere.retain(|other| on[backend].contains(other));
        }
        for other in everywhere.into_iter().filter(|other| other != id) {
            let other = &plan.services[&other].key;
            if !noted.shared.contains(&service.key) && !noted.shared.contains(other) {
                findings.push(Finding::Shared {
                    service: service.key.clone(),
                    with: other.clone(),
                });
            }
        }
    }
}

fn check_numbers(plan: &Plan, findings: &mut Vec<Finding>) {
    let mut taken = BTreeSet::new();
    for service in plan.services.values() {
        // A Gateway may have no address, and no number then.
        if service.number == 0 && service.network.is_none() && is_gateway_service(&service.key) {
            continue;
        }
        if service.number == 0 || !taken.insert((service.address_owner(), service.number)) {
            findings.push(Finding::Number {
                service: service.key.clone(),
                number: service.number,
            });
        }
    }
}

fn check_tables(
    sites: &BTreeMap<&AzName, AzReplicas>,
    demands: &Demands,
    number: u32,
    service: &PlannedService,
    noted: &PlanExceptions,
    findings: &mut Vec<Finding>,
) {
    // `check_placement` reports a missing placement.
    let Some(placement) = &service.placement else {
        return;
    };
    for az in placement
        .backends
        .keys()
        .filter(|az| !service.tables.contains_key(*az))
    {
        findings.push(Finding::NoTable {
            service: service.key.clone(),
            az: az.clone(),
        });
    }
    let no_replicas = AzReplicas {
        replicas: BTreeMap::new(),
    };
    for (az, table) in &service.tables {
        // A table may be in an AZ that has no replica left.
        let site = sites.get(az).unwrap_or(&no_replicas);
        let table_check = TableCheck {
            key: &service.key,
            az,
            site,
            heads: site.heads(az, placement),
            table,
            noted,
        };
        if table.chains.len() != BUCKETS
            || table
                .chains
                .iter()
                .any(|chain| chain.len() > CHAIN_LENGTH_MAX)
        {
            findings.push(Finding::Shape {
                service: service.key.clone(),
                az: az.clone(),
            });
        }
        // A version is the number of a plan: plans count from 1, and this plan is the newest.
        if table.version > number || table.version == 0 {
            findings.push(Finding::Version {
                service: service.key.clone(),
                az: az.clone(),
            });
        }
        table_check.members(findings);
        // The table of an AZ that the service left only waits for its sessions, so heads and
        // standbys do not matter.
        if placement.backends.contains_key(az) {
            table_check.chains(demands.rules.standby, findings);
            table_check.evenness(findings);
        }
    }
}

struct TableCheck<'a> {
    key: &'a ServiceKey,
    az: &'a AzName,
    site: &'a AzReplicas<'a>,
    heads: BTreeMap<ReplicaNumber, &'a FleetReplica>,
    table: &'a PlannedTable,
    noted: &'a PlanExceptions<'a>,
}

impl TableCheck<'_> {
    fn names(&self) -> (ServiceKey, AzName) {
        (self.key.clone(), self.az.clone())
    }

    fn members(&self, findings: &mut Vec<Finding>) {
        let mut unknown = BTreeSet::new();
        for (bucket, chain) in self.table.chains.iter().enumerate() {
            let mut seen = BTreeSet::new();
            for member in chain {
                let (service, az) = self.names();
                if !seen.insert(member.replica) {
                    findings.push(Finding::Twice {
                        service,
                        az,
                        bucket,
                        replica: member.replica,
                    });
                } else if !self.site.replicas.contains_key(&member.replica)
                    && unknown.insert(member.replica)
                {
                    findings.push(Finding::UnknownReplica {
                        service,
                        az,
                        replica: member.replica,
                    });
                }
            }
        }
    }

    fn chains(&self, standby: usize, findings: &mut Vec<Finding>) {
        if self.heads.is_empty() {
            return;
        }
        for (bucket, chain) in self.table.chains.iter().enumerate() {
            let (service, az) = self.names();
            let Some(head) = chain.first() else {
                findings.push(Finding::Empty {
                    service,
                    az,
                    bucket,
                });
                continue;
            };
            if !self.heads.contains_key(&head.replica) {
                if !self.noted.is_held(self.key, self.az, bucket) {
                    findings.push(Finding::Head {
                        service,
                        az,
                        bucket,
                        replica: head.replica,
                    });
                }
                continue;
            }
            let live = chain
                .iter()
                .skip(1)
                .filter(|member| self.heads.contains_key(&member.replica))
                .count();
            if live < standby.min(self.heads.len() - 1) && chain.len() < CHAIN_LENGTH_MAX - 1 {
                findings.push(Finding::Standby {
                    service,
                    az,
                    bucket,
                });
            }
        }
    }

    /// Checks that the bucket counts of backends differ by at most one, and so do those of the
    /// replicas of one backend. Tables with a chain full of owners are not checked.
    fn evenness(&self, findings: &mut Vec<Finding>) {
        let full = self.table.chains.iter().any(|chain| {
            chain.iter().filter(|member| member.is_owner()).count() + 1 >= CHAIN_LENGTH_MAX
        });
        if full
            || self.heads.is_empty()
            || self.noted.heads_retained.contains_key(&(self.key, self.az))
        {
            return;
        }
        let mut by_replica: BTreeMap<ReplicaNumber, usize> =
            self.heads.keys().map(|number| (*number, 0)).collect();
        for head in self.table.chains.iter().filter_map(|chain| chain.first()) {
            *by_replica.entry(head.replica).or_default() += 1;
        }
        let mut by_backend: BTreeMap<&BackendName, Vec<usize>> = BTreeMap::new();
        for (number, replica) in &self.heads {
            by_backend
                .entry(&replica.backend)
                .or_default()
                .push(by_replica[number]);
        }
        let is_even = |counts: Vec<usize>| {
            counts
                .iter()
                .max()
                .zip(counts.iter().min())
                .is_none_or(|(most, least)| most - least <= 1)
        };
        let sums = by_backend
            .values()
            .map(|counts| counts.iter().sum())
            .collect();
        if !is_even(sums) || !by_backend.into_values().all(is_even) {
            let (service, az) = self.names();
            findings.push(Finding::Uneven { service, az });
        }
    }
}

/// The inputs of [`step()`]: two plans and the inputs of the planner for them.
#[derive(Clone, Copy)]
pub struct PlanTransition<'a> {
    pub fleet: &'a Fleet,
    pub demands: &'a Demands,
    pub ownership: &'a Ownership,
    pub before: &'a Plan,
    pub after: &'a Plan,
}
