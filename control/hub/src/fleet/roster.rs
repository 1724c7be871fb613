//! Who is in the fleet and how each is: registered replicas, edges, their last reports, and what follows from silence. Pure: the time
//! is an argument, what is to be written to disk is returned. What the tables are to be is the planner's.
//!
//! An edge's word on its replicas is the truth for as long as the edge is heard. Start reading at [`Roster::hear_replica`] and
//! [`Roster::observe`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::Ipv4Addr;
use std::time::Duration;

use canal_compiler::scope::Whereabouts;
use canal_model::fleet::{Fleet, FleetReplica, OwnerReport, Ownership, ReplicaState};
use canal_model::ids::{AzName, BackendName, EdgeName, Generation, ReplicaName, ReplicaNumber, TenantName};
use canal_model::plan::{Plan, PlannedTable};
use canal_store::{StoredEdge, StoredFleet, StoredReplica};
use tokio::time::Instant;

use super::report::{EdgeReport, Refusal, ReplicaReport, az_number};

/// Publications whose plan is remembered. A data plane further behind counts as having no table.
const PUBLICATIONS_MAX: usize = 65_536;

/// How long silence is borne.
#[derive(Debug, Clone, Copy)]
pub struct FleetTimes {
    /// An AZ whose edge is silent for so long is closed.
    pub edge_silent: Duration,
    /// A replica that no edge speaks of is down when it is silent for so long.
    pub replica_silent: Duration,
    /// A replica that is silent for so long, and down by its edge, is gone.
    pub gone: Duration,
    /// After a start the last plan stands for so long, whoever was not heard yet.
    pub grace: Duration,
    /// A replica that has not what it was told of a tenant within this time takes no new sessions.
    pub lag: Duration,
}

impl Default for FleetTimes {
    fn default() -> Self {
        Self {
            edge_silent: Duration::from_millis(1500),
            replica_silent: Duration::from_secs(3),
            gone: Duration::from_secs(30),
            grace: Duration::from_secs(5),
            lag: Duration::from_secs(5),
        }
    }
}

/// What the southbound side knows of a data plane.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Known {
    /// It acknowledged all of this generation that concerns it.
    pub(crate) whole: Generation,
    /// The newest generation of which it was sent anything.
    pub(crate) content: Generation,
    /// Tenants of which it refuses a resource, with the generation up to which it has all of theirs. [`Known::whole`] is of the others.
    pub(crate) behind: BTreeMap<TenantName, Generation>,
}

impl Known {
    /// The generation by all of which a data plane serves that reports `reported`. It may have acknowledged what it does not serve by
    /// yet; and it hears nothing of generations that do not concern it, so that what it reports is no newer than what it was sent.
    fn served(&self, reported: Generation) -> Generation {
        match reported {
            Generation(0) => reported,
            _ if reported >= self.content => self.whole,
            _ => reported.min(self.whole),
        }
    }
}

/// A registered replica.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub(crate) row: StoredReplica,
    /// It said so, or nobody has seen it for long. Its number is free once no table has it.
    pub(crate) gone: bool,
    pub(crate) up: bool,
    pub(crate) sessions: u64,
    pub(crate) accepted: u64,
    pub(crate) owned: usize,
    pub(crate) version: String,
    pub(crate) generation: Generation,
    heard: Option<Instant>,
    /// It has all that was said up to here.
    whole: Generation,
    /// Tenants of which it has less than that, because it refuses a resource of theirs.
    behind: BTreeMap<TenantName, Generation>,
    /// The first generation that says that it exists; `None`: none does yet.
    told: Option<Generation>,
    wants_drain: bool,
    /// The generation since which no table has it.
    vacated: Option<Generation>,
}

/// An AZ's edge.
#[derive(Debug, Clone)]
pub(crate) struct Edge {
    pub(crate) row: StoredEdge,
    pub(crate) generation: Generation,
    pub(crate) version: String,
    pub(crate) alive: bool,
    heard: Option<Instant>,
    seen: BTreeMap<ReplicaName, bool>,
    /// It has all that was said up to here.
    whole: Generation,
}

impl Edge {
    fn new(row: StoredEdge, alive: bool) -> Self {
        let (seen, version) = (BTreeMap::new(), String::new());
        Self { row, generation: Generation(0), version, alive, heard: None, seen, whole: Generation(0) }
    }
}

/// What [`Roster::observe`] found.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    /// The planner must look again.
    pub(crate) changed: bool,
    /// Replicas whose rows are to be kept.
    pub(crate) rows: Vec<ReplicaName>,
    /// AZs whose edge fell silent just now.
    pub(crate) closed: Vec<AzName>,
    /// Replicas that are gone since just now.
    pub(crate) gone: Vec<ReplicaName>,
}

/// The fleet.
#[derive(Debug)]
pub(crate) struct Roster {
    times: FleetTimes,
    started: Instant,
    members: BTreeMap<ReplicaName, Member>,
    edges: BTreeMap<AzName, Edge>,
    azs: BTreeMap<AzName, u8>,
    ownership: Ownership,
    /// When each backend was first told of each tenant.
    told: BTreeMap<(BackendName, TenantName), (Generation, Instant)>,
    /// The plan all of whose tables are in a generation, for the generations at which it changed.
    plans: VecDeque<(Generation, u32)>,
    /// Reports heard when the plan in force was last sure of a table.
    plan_heard: u64,
    /// Backends with tables in motion.
    moving: BTreeSet<BackendName>,
}

impl Roster {
    /// The fleet as it was kept. Whoever is in it counts as being there until the grace is over.
    pub(crate) fn new(stored: StoredFleet, plan: &Plan, times: FleetTimes, now: Instant) -> Self {
        let member = |row: StoredReplica| (row.name.clone(), Member::new(row, None, true));
        let edge = |row: StoredEdge| {
            let edge = Edge::new(row, true);
            (edge.row.az.clone(), edge)
        };
        // An edge that is there and was not heard yet has tables nobody knows of: it is waited for until it is silent for too long.
        let mut ownership = Ownership::after(plan.heard());
        stored.edges.iter().for_each(|edge| ownership.hear_edge(edge.az.clone(), 0));
        Self {
            times,
            started: now,
            members: stored.replicas.into_iter().map(member).collect(),
            edges: stored.edges.into_iter().map(edge).collect(),
            azs: stored.azs,
            ownership,
            told: BTreeMap::new(),
            plans: VecDeque::new(),
            plan_heard: plan.heard(),
            moving: BTreeSet::new(),
        }
    }

    /// Nobody ever registered.
    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty() && self.edges.is_empty()
    }
    pub(crate) fn members(&self) -> &BTreeMap<ReplicaName, Member> {
        &self.members
    }
    pub(crate) fn edges(&self) -> &BTreeMap<AzName, Edge> {
        &self.edges
    }
    pub(crate) fn ownership(&self) -> &Ownership {
        &self.ownership
    }
    pub(crate) fn is_moving(&self, backend: &BackendName) -> bool {
        self.moving.contains(backend)
    }

    // ---- reports ----

    /// Whether a replica's report may be heard. True: it is registered as it says; false: it must be registered first.
    pub(crate) fn check_replica(&self, name: &ReplicaName, report: &ReplicaReport, now: Instant) -> Result<bool, Refusal> {
        self.check_address(&report.az, report.underlay, Some(name), None)?;
        let Some(member) = self.members.get(name) else { return Ok(false) };
        let row = &member.row;
        let is_same = row.backend == report.backend && row.az == report.az && row.underlay == report.underlay;
        match is_same {
            true => Ok(!member.gone),
            false if !member.gone && member.is_heard(now, self.times.replica_silent) => Err(Refusal::RegisteredOtherwise(name.clone())),
            false => Ok(false),
        }
    }

    fn check_address(
        &self,
        az: &AzName,
        underlay: Ipv4Addr,
        replica: Option<&ReplicaName>,
        edge: Option<&EdgeName>,
    ) -> Result<(), Refusal> {
        let given = az_number(underlay);
        if let Some(wanted) = self.azs.get(az).filter(|n| **n != given) {
            return Err(Refusal::AzNumber { az: az.clone(), wanted: *wanted, given });
        }
        if let Some((holder, _)) = self.azs.iter().find(|(name, n)| **n == given && *name != az) {
            return Err(Refusal::AzNumberTaken { az: az.clone(), number: given, holder: holder.clone() });
        }
        let member = self.members.values().find(|m| m.row.underlay == underlay && Some(&m.row.name) != replica && !m.gone);
        let other = self.edges.values().find(|e| e.row.underlay == underlay && Some(&e.row.name) != edge);
        let holder = member.map(|m| format!("replica {}", m.row.name)).or(other.map(|e| format!("edge {}", e.row.name)));
        match holder {
            Some(holder) => Err(Refusal::UnderlayTaken { underlay, holder }),
            None => Ok(()),
        }
    }

    /// Takes up a replica that the store has registered.
    pub(crate) fn enter(&mut self, row: StoredReplica, now: Instant) {
        self.azs.insert(row.az.clone(), az_number(row.underlay));
        self.ownership.forget(row.number);
        self.members.insert(row.name.clone(), Member::new(row, Some(now), true));
    }

    /// Hears a registered replica. True: the planner must look again.
    pub(crate) fn hear_replica(&mut self, name: &ReplicaName, report: ReplicaReport, known: Known, now: Instant) -> bool {
        let has = known.served(report.generation);
        let plan = self.plan_at(has);
        let Some(member) = self.members.get_mut(name) else { return false };
        let number = member.row.number;
        let restarted = report.generation < member.generation;
        let whole = if restarted { has } else { member.whole.max(has) };
        let differs = whole != member.whole
            || known.behind != member.behind
            || report.draining != member.wants_drain
            || report.leaving != member.gone;
        if restarted && member.row.state == ReplicaState::Active {
            member.row.state = ReplicaState::Joining;
        }
        member.heard = Some(now);
        member.generation = report.generation;
        member.whole = whole;
        member.behind = known.behind;
        member.wants_drain = report.draining;
        (member.sessions, member.accepted, member.version) = (report.sessions, report.accepted, report.version);
        member.owned = report.owned.len();
        if report.leaving {
            member.gone = true;
            self.ownership.forget(number);
            return true;
        }
        let said = OwnerReport { plan, owned: report.owned };
        let before = self.ownership.report(number);
        // A report that says the same is news once: when it is the first since the tables were last sure.
        let news = before.is_none_or(|(heard, old)| *old != said || heard <= self.plan_heard);
        self.ownership.hear(number, said);
        differs || restarted || news
    }

    /// Whether an edge's report may be heard. True: it is known as it says; false: it must be kept first.
    pub(crate) fn check_edge(&self, name: &EdgeName, report: &EdgeReport, now: Instant) -> Result<bool, Refusal> {
        self.check_address(&report.az, report.underlay, None, Some(name))?;
        let Some(edge) = self.edges.get(&report.az) else { return Ok(false) };
        let is_heard = edge.heard.is_some_and(|at| now.duration_since(at) < self.times.edge_silent);
        match edge.row.name == *name {
            true => Ok(edge.row.underlay == report.underlay),
            false if is_heard => Err(Refusal::AzHasEdge { az: report.az.clone(), holder: format!("edge {}", edge.row.name) }),
            false => Ok(false),
        }
    }

    /// Takes up an edge that the store has kept.
    pub(crate) fn enter_edge(&mut self, row: StoredEdge) {
        self.azs.insert(row.az.clone(), az_number(row.underlay));
        self.edges.insert(row.az.clone(), Edge::new(row, false));
    }

    /// Hears an edge. True: the planner must look again.
    pub(crate) fn hear_edge(&mut self, report: EdgeReport, known: Known, now: Instant) -> bool {
        let whole = known.served(report.generation);
        let plan = self.plan_at(whole);
        let Some(edge) = self.edges.get_mut(&report.az) else { return false };
        let is_new = edge.seen != report.seen || !edge.alive || self.ownership.edge(&report.az) != Some(plan);
        let differs = is_new || edge.whole != whole;
        edge.whole = whole;
        edge.heard = Some(now);
        edge.alive = true;
        edge.generation = report.generation;
        edge.version = report.version;
        edge.seen = report.seen;
        self.ownership.hear_edge(report.az, plan);
        differs
    }

    // ---- the passing of time ----

    /// Draws the conclusions from what was heard, and what was not.
    pub(crate) fn observe(&mut self, now: Instant) -> Observed {
        let mut out = Observed::default();
        if self.is_blind(now) {
            self.hold(now);
            return out;
        }
        let in_grace = now.duration_since(self.started) < self.times.grace;
        for (az, edge) in &mut self.edges {
            let alive = edge.heard.map_or(edge.alive && in_grace, |at| now.duration_since(at) < self.times.edge_silent);
            if edge.alive && !alive {
                out.closed.push(az.clone());
                self.ownership.forget_edge(az);
            }
            out.changed |= edge.alive != alive;
            edge.alive = alive;
        }
        for (name, member) in &mut self.members {
            let edge = self.edges.get(&member.row.az).filter(|e| e.alive && e.heard.is_some());
            let word = edge.and_then(|e| e.seen.get(name)).copied();
            let by_itself = member.heard.map_or(in_grace && member.up, |at| now.duration_since(at) < self.times.replica_silent);
            let up = word.unwrap_or(by_itself) && !member.gone;
            out.changed |= up != member.up;
            member.up = up;
            let silent = now.duration_since(member.heard.unwrap_or(self.started)) >= self.times.gone;
            if !member.gone && silent && edge.is_some() && word != Some(true) {
                member.gone = true;
                self.ownership.forget(member.row.number);
                out.gone.push(name.clone());
                out.changed = true;
            }
            if let Some(state) = member.decide_state() {
                member.row.state = state;
                out.rows.push(name.clone());
                out.changed = true;
            }
        }
        out
    }

    /// While nobody is heard everybody is as they were last; who comes back first must not make the others look dead.
    fn hold(&mut self, now: Instant) {
        let members = self.members.values_mut().map(|m| &mut m.heard);
        members.chain(self.edges.values_mut().map(|e| &mut e.heard)).for_each(|at| *at = None);
        self.started = now;
    }

    /// True while nobody at all is heard: then it is the controller that is cut off, and what is in force stands.
    pub(crate) fn is_blind(&self, now: Instant) -> bool {
        let recent = |at: Option<Instant>| at.is_some_and(|at| now.duration_since(at) < self.times.edge_silent);
        !self.members.values().any(|m| recent(m.heard)) && !self.edges.values().any(|e| recent(e.heard))
    }

    /// The fleet for the planner. Who is gone is not in it; who lacks a tenant for long is joining again.
    pub(crate) fn fleet(&self, now: Instant) -> Fleet {
        let replica = |m: &Member| FleetReplica {
            name: m.row.name.clone(),
            number: m.row.number,
            backend: m.row.backend.clone(),
            az: m.row.az.clone(),
            underlay: m.row.underlay,
            state: if m.row.state == ReplicaState::Active && self.is_lagging(m, now) { ReplicaState::Joining } else { m.row.state },
            up: m.up,
        };
        Fleet::of(self.azs.clone(), self.members.values().filter(|m| !m.gone).map(replica))
    }

    /// What it refuses is lacking for the tenant alone: [`Roster::is_ready`] says so.
    fn is_lagging(&self, member: &Member, now: Instant) -> bool {
        let concerns = |backend: &BackendName, tenant: &TenantName| *backend == member.row.backend && !member.behind.contains_key(tenant);
        let of_backend = self.told.iter().filter(|((backend, tenant), _)| concerns(backend, tenant));
        member.heard.is_some()
            && of_backend.into_iter().any(|(_, (at, when))| *at > member.whole && now.duration_since(*when) > self.times.lag)
    }

    /// True where the replica has all that a tenant's sessions need. A dead one is waited for by nobody.
    pub(crate) fn is_ready(&self, replica: ReplicaNumber, tenant: &TenantName) -> bool {
        let Some(member) = self.members.values().find(|m| m.row.number == replica && !m.gone) else { return true };
        let key = (member.row.backend.clone(), tenant.clone());
        !member.up || self.told.get(&key).is_some_and(|(at, _)| *at <= member.whole_of(tenant))
    }

    // ---- what was published ----

    /// Notes what a generation told: replicas, tenants by backend, and the newest plan all of whose tables are in it.
    pub(crate) fn published(&mut self, generation: Generation, plan: u32, whereabouts: &Whereabouts, now: Instant) {
        for member in self.members.values_mut() {
            if whereabouts.replicas.contains_key(&member.row.name) {
                member.told.get_or_insert(generation);
            }
        }
        let pairs = whereabouts.backends.iter().flat_map(|(b, held)| held.tenants.iter().map(move |t| (b.clone(), t.clone())));
        let pairs: BTreeSet<(BackendName, TenantName)> = pairs.collect();
        self.told.retain(|pair, _| pairs.contains(pair));
        for pair in pairs {
            self.told.entry(pair).or_insert((generation, now));
        }
        self.note_plan(generation, plan);
    }

    /// A plan changed no table that anybody is told of: the generation before has all of its tables.
    pub(crate) fn note_plan(&mut self, generation: Generation, plan: u32) {
        if self.plans.back().is_some_and(|(_, known)| *known == plan) {
            return;
        }
        match self.plans.back_mut().filter(|(at, _)| *at == generation) {
            Some(last) => last.1 = plan,
            None => self.plans.push_back((generation, plan)),
        }
        if self.plans.len() > PUBLICATIONS_MAX {
            self.plans.pop_front();
        }
    }

    /// The newest plan all of whose tables a data plane has that is at `generation`.
    fn plan_at(&self, generation: Generation) -> u32 {
        let after = self.plans.partition_point(|(at, _)| *at <= generation);
        after.checked_sub(1).and_then(|i| self.plans.get(i)).map_or(0, |(_, plan)| *plan)
    }

    /// Takes over which tables are in motion in the plan in force: they have owners, or their service left the AZ.
    pub(crate) fn note_motion(&mut self, plan: &Plan) {
        self.plan_heard = plan.heard();
        let by_number: BTreeMap<ReplicaNumber, &BackendName> = self.members.values().map(|m| (m.row.number, &m.row.backend)).collect();
        let mut moving = BTreeSet::new();
        for table in plan.services.values().flat_map(|s| s.tables.values()).filter(|t| is_moving(t)) {
            let seats = table.chains.iter().flatten();
            moving.extend(seats.filter_map(|s| by_number.get(&s.replica).map(|b| (*b).clone())));
        }
        self.moving = moving;
    }

    // ---- operators ----

    /// Sets or takes back an order to drain. False: there is no such replica.
    pub(crate) fn order_drain(&mut self, name: &ReplicaName, drain: bool) -> bool {
        let member = self.members.get_mut(name);
        member.map(|m| m.row.drain = drain).is_some()
    }

    /// Declares a replica gone. False: it is not there, or was heard a moment ago and would be back at once.
    pub(crate) fn declare_gone(&mut self, name: &ReplicaName, now: Instant) -> Option<bool> {
        let silent = self.times.replica_silent;
        let member = self.members.get_mut(name)?;
        if member.is_heard(now, silent) && !member.gone {
            return Some(false);
        }
        member.gone = true;
        self.ownership.forget(member.row.number);
        Some(true)
    }

    /// Replicas that are gone and of which no table that anybody may still have knows: `plan` has none, all of it was told by
    /// `generation`, and all who are there acknowledged that.
    pub(crate) fn forgettable(&mut self, plan: &Plan, generation: Generation) -> Vec<ReplicaName> {
        for member in self.members.values_mut().filter(|m| m.gone && plan.seats(m.row.number) == 0) {
            member.vacated.get_or_insert(generation);
        }
        let members = self.members.values().filter(|m| m.up && m.heard.is_some()).map(|m| m.whole);
        let edges = self.edges.values().filter(|e| e.alive && e.heard.is_some()).map(|e| e.whole);
        let all_have = members.chain(edges).min().unwrap_or(generation);
        let free = self.members.values().filter(|m| m.vacated.is_some_and(|at| at <= all_have));
        free.map(|m| m.row.name.clone()).collect()
    }

    pub(crate) fn forget(&mut self, name: &ReplicaName) {
        if let Some(member) = self.members.remove(name) {
            self.ownership.forget(member.row.number);
        }
    }
}

/// Are there sessions that the table keeps for replicas that are not heads?
pub(crate) fn is_moving(table: &PlannedTable) -> bool {
    table.closing > 0 || table.chains.iter().flatten().any(|s| s.is_owner())
}

impl Member {
    fn new(row: StoredReplica, heard: Option<Instant>, up: bool) -> Self {
        Self {
            row,
            gone: false,
            up,
            sessions: 0,
            accepted: 0,
            owned: 0,
            version: String::new(),
            generation: Generation(0),
            heard,
            whole: Generation(0),
            behind: BTreeMap::new(),
            told: None,
            wants_drain: false,
            vacated: None,
        }
    }

    /// It has everything of the tenant up to this generation.
    fn whole_of(&self, tenant: &TenantName) -> Generation {
        self.behind.get(tenant).map_or(self.whole, |at| self.whole.min(*at))
    }

    /// How long it was not heard; `None`: not once since the start.
    pub(crate) fn silence(&self, now: Instant) -> Option<Duration> {
        self.heard.map(|at| now.duration_since(at))
    }

    fn is_heard(&self, now: Instant, within: Duration) -> bool {
        self.heard.is_some_and(|at| now.duration_since(at) < within)
    }

    /// The state it goes to now, if it goes to another.
    fn decide_state(&self) -> Option<ReplicaState> {
        let has_all = self.told.is_some_and(|at| self.whole >= at);
        let next = match self.row.state {
            _ if self.row.drain || self.wants_drain => ReplicaState::Draining,
            // After a start of the controller nothing is known of a draining replica until it speaks.
            ReplicaState::Draining if self.heard.is_none() => ReplicaState::Draining,
            ReplicaState::Joining | ReplicaState::Draining if has_all => ReplicaState::Active,
            ReplicaState::Draining => ReplicaState::Joining,
            state => state,
        };
        (next != self.row.state).then_some(next)
    }
}

#[cfg(test)]
mod tests;
