//! Checks a plan against the rules of `docs/design/0003-cloud-tier.md`, without asking how the planner got it: it shares no code with the
//! planner. It mends nothing.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use canal_model::fleet::{Demands, Fleet, FleetReplica, Ownership, Placement, ReplicaState, Rules};
use canal_model::ids::{AzName, BackendName, ReplicaNumber, ServiceId, ServiceKey};
use canal_model::plan::{Note, Plan, PlannedService, PlannedTable};
use canal_model::program::{BUCKETS, CHAIN};

mod balance;
mod step;

pub use step::step;

/// A broken rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finding {
    /// A demanded service is not in the plan.
    Missing { service: ServiceKey },
    /// A planned service that nobody demands.
    Undemanded { service: ServiceKey },
    /// It should have a placement, because there are backends.
    Unplaced { service: ServiceKey },
    /// A backend that does not exist, or is not in this AZ.
    UnknownBackend { service: ServiceKey, backend: BackendName },
    /// Fewer backends at home than asked for although the AZ has more; or it has fewer, and nobody said so.
    FewAtHome { service: ServiceKey, given: usize },
    /// The same elsewhere.
    FewAway { service: ServiceKey, given: usize },
    /// All backends of one service are another's too, and nobody said so.
    Shared { service: ServiceKey, with: ServiceKey },
    /// Not where its tenant asked for, although there are backends.
    Home { service: ServiceKey, az: AzName },
    /// Two services of a tenant have one gateway number, or one has none.
    Number { service: ServiceKey, number: u32 },
    /// An AZ that the service lives in has no table.
    NoTable { service: ServiceKey, az: AzName },
    /// Not as many chains as there are buckets, or one too long.
    Shape { service: ServiceKey, az: AzName },
    /// An empty chain although a replica is up.
    Empty { service: ServiceKey, az: AzName, bucket: usize },
    /// A replica twice in one chain.
    Twice { service: ServiceKey, az: AzName, bucket: usize, replica: ReplicaNumber },
    /// A head that is not active, up and of the service's backends, although others are, and the bucket is not held.
    Head { service: ServiceKey, az: AzName, bucket: usize, replica: ReplicaNumber },
    /// A member that is not in the fleet, or in another AZ.
    Stranger { service: ServiceKey, az: AzName, replica: ReplicaNumber },
    /// Backends or replicas are heads of more buckets than others by two or more, and no bucket is held.
    Uneven { service: ServiceKey, az: AzName },
    /// Live replicas are not behind a head although there is room.
    Standby { service: ServiceKey, az: AzName, bucket: usize },
    /// A version above the plan's number.
    Version { service: ServiceKey, az: AzName },
    /// Between two plans: a member left a chain although it may own sessions.
    OwnerDropped { service: ServiceKey, az: AzName, bucket: usize, replica: ReplicaNumber },
    /// Between two plans: chains changed and the version did not rise, or the other way around.
    StaleVersion { service: ServiceKey, az: AzName },
    /// Between two plans: more heads moved than the fleet's change explains.
    Moved { service: ServiceKey, az: AzName, moved: usize, bound: usize },
    /// Between two plans: members that stay changed their order, other than by becoming the head.
    Reordered { service: ServiceKey, az: AzName, bucket: usize },
    /// Between two plans: a backend was left although it exists and no rule asked for that.
    Left { service: ServiceKey, backend: BackendName },
    /// Between two plans: more services moved for balance's sake than may at once.
    Wave { moved: usize, most: usize },
    /// Between two plans: a service moved for balance's sake while a table of it keeps sessions of an earlier change.
    Restless { service: ServiceKey },
    /// Between two plans: services moved for balance's sake, and loads are no nearer to each other.
    Apart { moved: usize },
    /// Between two plans: a gateway number or home changed.
    Unstable { service: ServiceKey },
    /// The plan does not name its parent, or its number did not rise.
    Parent { number: u32, parent: u32 },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The names and fields say it; operators see these only if the planner has a bug.
        fmt::Debug::fmt(self, f)
    }
}

/// Checks one plan by itself. Empty: all rules hold, or the plan's notes say which do not.
pub fn check(fleet: &Fleet, demands: &Demands, plan: &Plan) -> Vec<Finding> {
    let mut findings = Vec::new();
    let sites = Site::all(fleet);
    let notes = Noted::of(plan);
    for (id, demand) in &demands.services {
        let Some(service) = plan.services.get(id) else {
            findings.push(Finding::Missing { service: demand.key.clone() });
            continue;
        };
        check_placement(fleet, demands, *id, service, &notes, &mut findings);
        check_tables(&sites, demands, plan.number, service, &notes, &mut findings);
    }
    for (_, service) in plan.services.iter().filter(|(id, _)| !demands.services.contains_key(id)) {
        findings.push(Finding::Undemanded { service: service.key.clone() });
    }
    check_numbers(plan, &mut findings);
    check_unique(plan, &notes, &mut findings);
    findings.sort();
    findings
}

/// What the plan says of itself.
struct Noted<'a> {
    few_home: BTreeSet<&'a ServiceKey>,
    few_away: BTreeSet<&'a ServiceKey>,
    shared: BTreeSet<&'a ServiceKey>,
    held: BTreeMap<(&'a ServiceKey, &'a AzName), &'a [u8]>,
}

impl<'a> Noted<'a> {
    fn of(plan: &'a Plan) -> Self {
        let mut noted = Noted { few_home: BTreeSet::new(), few_away: BTreeSet::new(), shared: BTreeSet::new(), held: BTreeMap::new() };
        for note in &plan.notes {
            match note {
                Note::FewAtHome { service, .. } => _ = noted.few_home.insert(service),
                Note::FewAway { service, .. } => _ = noted.few_away.insert(service),
                Note::Shared { service, .. } => _ = noted.shared.insert(service),
                Note::Held { service, az, buckets, .. } => _ = noted.held.insert((service, az), buckets),
                Note::HomeUnknown { .. } | Note::NoBackend { .. } | Note::NoReplica { .. } | Note::NoAddress { .. } => {}
            }
        }
        noted
    }
    fn is_held(&self, service: &ServiceKey, az: &AzName, bucket: usize) -> bool {
        self.held.get(&(service, az)).is_some_and(|buckets| buckets.iter().any(|held| usize::from(*held) == bucket))
    }
}

/// An AZ's replicas.
struct Site<'a> {
    replicas: BTreeMap<ReplicaNumber, &'a FleetReplica>,
}

impl<'a> Site<'a> {
    fn all(fleet: &'a Fleet) -> BTreeMap<&'a AzName, Site<'a>> {
        let mut sites: BTreeMap<&AzName, Site> = BTreeMap::new();
        for replica in fleet.replicas.values() {
            sites.entry(&replica.az).or_insert_with(|| Site { replicas: BTreeMap::new() }).replicas.insert(replica.number, replica);
        }
        sites
    }
    /// Replicas that may be heads: active and up; if none is, draining and up.
    fn heads(&self, az: &AzName, placement: &Placement) -> BTreeMap<ReplicaNumber, &'a FleetReplica> {
        let of_state = |state: ReplicaState| -> BTreeMap<ReplicaNumber, &'a FleetReplica> {
            let found = self.replicas.values().filter(|r| r.up && r.state == state && placement.has(az, &r.backend));
            found.map(|r| (r.number, *r)).collect()
        };
        let active = of_state(ReplicaState::Active);
        if active.is_empty() { of_state(ReplicaState::Draining) } else { active }
    }
}

fn check_placement(fleet: &Fleet, demands: &Demands, id: ServiceId, service: &PlannedService, noted: &Noted, findings: &mut Vec<Finding>) {
    let key = || service.key.clone();
    let Some(placement) = &service.placement else {
        if !fleet.backends.is_empty() {
            findings.push(Finding::Unplaced { service: key() });
        }
        return;
    };
    for (az, backends) in &placement.backends {
        for backend in backends.iter().filter(|backend| fleet.backends.get(*backend) != Some(az)) {
            findings.push(Finding::UnknownBackend { service: key(), backend: backend.clone() });
        }
    }
    let there = fleet.backends.values().filter(|az| **az == placement.home).count();
    let (home, away) = wanted(&demands.rules);
    for (wanted, has, given, noted, at_home) in [
        (home, there, placement.at_home(), noted.few_home.contains(&service.key), true),
        (away, fleet.backends.len() - there, placement.away(), noted.few_away.contains(&service.key), false),
    ] {
        if given < wanted.min(has) || given < wanted && !noted {
            findings.push(if at_home { Finding::FewAtHome { service: key(), given } } else { Finding::FewAway { service: key(), given } });
        }
    }
    let asked = demands.services.get(&id).and_then(|demand| demand.home.as_ref());
    if let Some(az) = asked.filter(|az| **az != placement.home && fleet.backends.values().any(|other| other == *az)) {
        findings.push(Finding::Home { service: key(), az: az.clone() });
    }
}

fn wanted(rules: &Rules) -> (usize, usize) {
    let home = rules.home.clamp(1, Rules::MOST);
    (home, rules.away.min(Rules::MOST - home))
}

/// No service's backends are all among another's, unless a note says so. A service that was noted does not accuse others.
fn check_unique(plan: &Plan, noted: &Noted, findings: &mut Vec<Finding>) {
    let mut on: BTreeMap<&BackendName, BTreeSet<ServiceId>> = BTreeMap::new();
    for (id, service) in &plan.services {
        for backend in service.placement.iter().flat_map(Placement::all) {
            on.entry(backend).or_default().insert(*id);
        }
    }
    for (id, service) in &plan.services {
        let mut backends = service.placement.iter().flat_map(Placement::all);
        let Some(first) = backends.next() else { continue };
        let mut everywhere = on[first].clone();
        for backend in backends {
            everywhere.retain(|other| on[backend].contains(other));
        }
        for other in everywhere.into_iter().filter(|other| other != id) {
            let other = &plan.services[&other].key;
            if !noted.shared.contains(&service.key) && !noted.shared.contains(other) {
                findings.push(Finding::Shared { service: service.key.clone(), with: other.clone() });
            }
        }
    }
}

fn check_numbers(plan: &Plan, findings: &mut Vec<Finding>) {
    let mut taken = BTreeSet::new();
    for service in plan.services.values() {
        if service.number == 0 || !taken.insert((&service.key.tenant, service.number)) {
            findings.push(Finding::Number { service: service.key.clone(), number: service.number });
        }
    }
}

fn check_tables(
    sites: &BTreeMap<&AzName, Site>,
    demands: &Demands,
    number: u32,
    service: &PlannedService,
    noted: &Noted,
    findings: &mut Vec<Finding>,
) {
    let Some(placement) = &service.placement else { return };
    for az in placement.backends.keys().filter(|az| !service.tables.contains_key(*az)) {
        findings.push(Finding::NoTable { service: service.key.clone(), az: az.clone() });
    }
    let nobody = Site { replicas: BTreeMap::new() };
    for (az, table) in &service.tables {
        let site = sites.get(az).unwrap_or(&nobody);
        let look = Look { key: &service.key, az, site, heads: site.heads(az, placement), table, noted };
        if table.chains.len() != BUCKETS || table.chains.iter().any(|chain| chain.len() > CHAIN) {
            findings.push(Finding::Shape { service: service.key.clone(), az: az.clone() });
        }
        if table.version > number || table.version == 0 {
            findings.push(Finding::Version { service: service.key.clone(), az: az.clone() });
        }
        look.members(findings);
        if placement.backends.contains_key(az) {
            look.chains(demands.rules.standby, findings);
            look.evenness(findings);
        }
    }
}

struct Look<'a> {
    key: &'a ServiceKey,
    az: &'a AzName,
    site: &'a Site<'a>,
    heads: BTreeMap<ReplicaNumber, &'a FleetReplica>,
    table: &'a PlannedTable,
    noted: &'a Noted<'a>,
}

impl Look<'_> {
    fn names(&self) -> (ServiceKey, AzName) {
        (self.key.clone(), self.az.clone())
    }

    fn members(&self, findings: &mut Vec<Finding>) {
        let mut strangers = BTreeSet::new();
        for (bucket, chain) in self.table.chains.iter().enumerate() {
            let mut seen = BTreeSet::new();
            for seat in chain {
                let (service, az) = self.names();
                if !seen.insert(seat.replica) {
                    findings.push(Finding::Twice { service, az, bucket, replica: seat.replica });
                } else if !self.site.replicas.contains_key(&seat.replica) && strangers.insert(seat.replica) {
                    findings.push(Finding::Stranger { service, az, replica: seat.replica });
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
                findings.push(Finding::Empty { service, az, bucket });
                continue;
            };
            if !self.heads.contains_key(&head.replica) {
                if !self.noted.is_held(self.key, self.az, bucket) {
                    findings.push(Finding::Head { service, az, bucket, replica: head.replica });
                }
                continue;
            }
            let live = chain.iter().skip(1).filter(|seat| self.heads.contains_key(&seat.replica)).count();
            if live < standby.min(self.heads.len() - 1) && chain.len() < CHAIN - 1 {
                findings.push(Finding::Standby { service, az, bucket });
            }
        }
    }

    /// Backends differ by one bucket at most, and so do the replicas of one backend. Chains full of owners stay out of it.
    fn evenness(&self, findings: &mut Vec<Finding>) {
        let full = self.table.chains.iter().any(|chain| chain.iter().filter(|seat| seat.is_owner()).count() + 1 >= CHAIN);
        if full || self.heads.is_empty() || self.noted.held.contains_key(&(self.key, self.az)) {
            return;
        }
        let mut by_replica: BTreeMap<ReplicaNumber, usize> = self.heads.keys().map(|number| (*number, 0)).collect();
        for head in self.table.chains.iter().filter_map(|chain| chain.first()) {
            *by_replica.entry(head.replica).or_default() += 1;
        }
        let mut by_backend: BTreeMap<&BackendName, Vec<usize>> = BTreeMap::new();
        for (number, replica) in &self.heads {
            by_backend.entry(&replica.backend).or_default().push(by_replica[number]);
        }
        let is_even = |counts: Vec<usize>| counts.iter().max().zip(counts.iter().min()).is_none_or(|(most, least)| most - least <= 1);
        let sums = by_backend.values().map(|counts| counts.iter().sum()).collect();
        if !is_even(sums) || !by_backend.into_values().all(is_even) {
            let (service, az) = self.names();
            findings.push(Finding::Uneven { service, az });
        }
    }
}

/// What [`step`] compares.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    pub fleet: &'a Fleet,
    pub demands: &'a Demands,
    pub ownership: &'a Ownership,
    pub before: &'a Plan,
    pub after: &'a Plan,
}
