//! A tier that runs on plans: replicas and an edge that get plans late, sessions that are opened and closed, SYNs that are sent again, reports
//! that arrive late. Nothing of it is fast, and it decides nothing that the planner decides. The redirector's rules are in [`rules`];
//! `tests/histories` runs what [`history`] records through the real program.
#![allow(dead_code, reason = "each test program uses its part")]

pub(crate) mod events;
pub(crate) mod history;
pub(crate) mod rules;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use canal_model::fleet::{Buckets, Demand, Demands, Fleet, FleetReplica, OwnedBuckets, OwnerReport, Ownership, ReplicaState};
use canal_model::ids::{AzName, ReplicaNumber, ServiceId, Vni};
use canal_model::plan::{Note, Plan, PlannedTable};
use canal_planner::plan;

use rules::{Packet, Stamp, Verdict, judge};

pub(crate) type Session = (ServiceId, AzName, usize, ReplicaNumber);

#[derive(Default)]
pub(crate) struct Tier {
    pub(crate) replicas: BTreeMap<ReplicaNumber, FleetReplica>,
    pub(crate) demands: Demands,
    pub(crate) ownership: Ownership,
    pub(crate) plans: Vec<Plan>,
    /// Which plan each has.
    pub(crate) has: BTreeMap<ReplicaNumber, usize>,
    pub(crate) edges: BTreeMap<AzName, usize>,
    pub(crate) sessions: Vec<Session>,
    reports: VecDeque<(ReplicaNumber, OwnerReport)>,
    next: u32,
}

pub(crate) fn az(name: &str) -> AzName {
    AzName::new(name).unwrap()
}
pub(crate) fn number(n: u32) -> ReplicaNumber {
    ReplicaNumber::new(n).unwrap()
}
pub(crate) fn id(n: u32) -> ServiceId {
    ServiceId::new(n).unwrap()
}
pub(crate) fn demand(n: u32) -> Demand {
    let key = format!("t{}/shop/s{n}", n % 3).parse().unwrap();
    Demand { key, vni: Vni::new(100 + n % 3).unwrap(), weight: 1 + n % 4, home: None }
}
pub(crate) fn replica(n: u32, backend: &str, state: ReplicaState) -> FleetReplica {
    // A backend's first letter is its AZ.
    FleetReplica {
        name: format!("r{n}").parse().unwrap(),
        number: number(n),
        backend: backend.parse().unwrap(),
        az: az(&backend[..1]),
        underlay: [250, 1, (n >> 8) as u8, n as u8].into(),
        state,
        up: true,
    }
}
pub(crate) fn azs() -> BTreeMap<AzName, u8> {
    [(az("a"), 1), (az("b"), 2), (az("c"), 3)].into()
}

impl Tier {
    pub(crate) fn new(backends: &[(&str, usize)], services: u32) -> Tier {
        let mut tier = Tier::default();
        for name in ["a", "b", "c"] {
            tier.edges.insert(az(name), 0);
            // As a controller that knows its edges and has heard none.
            tier.ownership.hear_edge(az(name), 0);
        }
        for tenant in 0..3 {
            let ranges = ["10.9.0.0/16".parse().unwrap(), "fd00:9::/64".parse().unwrap()];
            tier.demands.ranges.insert(format!("t{tenant}").parse().unwrap(), ranges.into());
        }
        for n in 1..=services {
            tier.demands.services.insert(id(n), demand(n));
        }
        for (backend, replicas) in backends {
            for _ in 0..*replicas {
                tier.join(backend, ReplicaState::Active);
            }
        }
        tier
    }

    pub(crate) fn join(&mut self, backend: &str, state: ReplicaState) {
        self.next += 1;
        self.replicas.insert(number(self.next), replica(self.next, backend, state));
        self.has.insert(number(self.next), self.plans.len().saturating_sub(1));
    }

    pub(crate) fn fleet(&self) -> Fleet {
        Fleet::of(azs(), self.replicas.values().cloned())
    }

    pub(crate) fn newest(&self) -> &Plan {
        self.plans.last().unwrap()
    }

    /// Makes the next plan; checks it, and the step to it, with the linter.
    pub(crate) fn plan(&mut self) {
        let fleet = self.fleet();
        let next = plan(&fleet, &self.demands, &self.ownership, self.plans.last());
        let again = plan(&fleet, &self.demands, &self.ownership, self.plans.last());
        assert!(next == again, "the same arguments, another plan: {}", difference(&next, &again));
        let again = plan(&fleet, &self.demands, &self.ownership, Some(&next));
        // Where the fleet is too small, one more plan may find one more combination.
        let is_crowded = next.notes.iter().any(|note| matches!(note, Note::Shared { .. }));
        let may_go_on = is_crowded || self.plans.last().is_some_and(|before| has_landed_at_once(before, &next));
        assert!(may_go_on || told(&next) == told(&again), "a plan from itself tells something else: {}", difference(&next, &again));
        assert_eq!(canal_planlint::check(&fleet, &self.demands, &next), []);
        if let Some(before) = self.plans.last() {
            let step = canal_planlint::Step { fleet: &fleet, demands: &self.demands, ownership: &self.ownership, before, after: &next };
            let placed = |plan: &Plan| plan.services.values().map(|service| service.placement.clone()).collect::<Vec<_>>();
            assert_eq!(canal_planlint::step(&step), [], "{:?}, then {:?}", placed(before), placed(step.after));
        }
        self.plans.push(next);
    }

    pub(crate) fn deliver_all(&mut self) {
        let newest = self.plans.len() - 1;
        self.has.values_mut().for_each(|has| *has = newest);
        self.edges.values_mut().for_each(|has| *has = newest);
    }

    /// The replica looks at its sessions; its report is on the way.
    pub(crate) fn look(&mut self, replica: ReplicaNumber) {
        let Some(plan) = self.plans.get(self.has[&replica]) else { return };
        let mut owned: BTreeMap<ServiceId, OwnedBuckets> = BTreeMap::new();
        for (service, az, bucket, _) in self.sessions.iter().filter(|session| session.3 == replica) {
            let version = plan.services.get(service).and_then(|service| service.tables.get(az)).map_or(0, |table| table.version);
            let entry = owned.entry(*service).or_insert(OwnedBuckets { version, buckets: Buckets::default() });
            entry.buckets = entry.buckets.with(*bucket);
        }
        self.reports.push_back((replica, OwnerReport { plan: plan.number, owned }));
    }

    /// The controller hears the oldest report that is on the way.
    pub(crate) fn hear(&mut self) {
        if let Some((replica, report)) = self.reports.pop_front().filter(|(replica, _)| self.replicas.contains_key(replica)) {
            self.ownership.hear(replica, report);
        }
    }

    pub(crate) fn hear_edge(&mut self, az: AzName) {
        if let Some(plan) = self.plans.get(self.edges[&az]) {
            self.ownership.hear_edge(az, plan.number);
        }
    }

    /// Everybody has the newest plan and has said so, twice.
    pub(crate) fn settle(&mut self) {
        for _ in 0..4 {
            self.plan();
            self.deliver_all();
            for replica in self.replicas.keys().copied().collect::<Vec<_>>() {
                self.look(replica);
            }
            while !self.reports.is_empty() {
                self.hear();
            }
            for az in self.edges.keys().cloned().collect::<Vec<_>>() {
                self.hear_edge(az);
            }
        }
    }

    fn chain(&self, plan: usize, service: ServiceId, az: &AzName, bucket: usize) -> Option<Vec<ReplicaNumber>> {
        let table = self.plans.get(plan)?.services.get(&service)?.tables.get(az)?;
        Some(table.chains[bucket].iter().map(|seat| seat.replica).collect())
    }

    fn is_up(&self, replica: ReplicaNumber) -> bool {
        self.replicas.get(&replica).is_some_and(|replica| replica.up)
    }

    /// A SYN by the edge's table, then by the redirectors'. `None`: nobody took it.
    pub(crate) fn open(&mut self, service: ServiceId, az: &AzName, bucket: usize) -> Option<ReplicaNumber> {
        let visits = self.begin(service, az, bucket);
        let taker = visits.last().filter(|visit| visit.verdict == Verdict::Keep)?.here;
        self.sessions.push((service, az.clone(), bucket, taker));
        Some(taker)
    }

    /// The way of a SYN. Clients lose an AZ's address when its edge is told.
    pub(crate) fn begin(&self, service: ServiceId, az: &AzName, bucket: usize) -> Vec<Visit> {
        let planned = self.plans.get(self.edges[az]).and_then(|plan| plan.services.get(&service));
        let is_there = planned.and_then(|service| service.placement.as_ref()).is_some_and(|placement| placement.backends.contains_key(az));
        if is_there { self.walk((service, az, bucket), true, &|_| false) } else { Vec::new() }
    }

    /// The way of another packet of a session.
    pub(crate) fn go_on(&self, (service, az, bucket, owner): &Session) -> Vec<Visit> {
        self.walk((*service, az, *bucket), false, &|here| here == *owner)
    }

    /// What becomes of a client's acknowledgement of `answered`'s SYN-ACK, where SYNs that were sent again left requests at `requests` too. By
    /// the rule of the redirector a request owns only the answer to its own SYN-ACK; by `any_request`, which was its rule once, any answer.
    pub(crate) fn acknowledge(&self, session: &Session, requests: &[ReplicaNumber], any_request: bool) -> Fate {
        let (service, az, bucket, answered) = session;
        let owns = |here: ReplicaNumber| here == *answered || (any_request && requests.contains(&here));
        fate(&self.walk((*service, az, *bucket), false, &owns), *answered)
    }

    fn version(&self, plan: usize, service: ServiceId, az: &AzName) -> Option<u32> {
        Some(self.plans.get(plan)?.services.get(&service)?.tables.get(az)?.version)
    }

    /// A packet of a session by the edge's table, then along the redirectors' chains by their rule. What becomes of it?
    pub(crate) fn send(&self, session: &Session) -> Fate {
        fate(&self.go_on(session), session.3)
    }

    /// Every replica that a packet comes to, from the edge on, with what it does. Empty: the edge drops the packet.
    fn walk(&self, (service, az, bucket): (ServiceId, &AzName, usize), begins: bool, owns: &dyn Fn(ReplicaNumber) -> bool) -> Vec<Visit> {
        let chain = |plan: usize| Some((self.chain(plan, service, az, bucket)?, self.version(plan, service, az)?));
        let mut visits = Vec::new();
        let Some((front, version)) = chain(self.edges[az]) else { return visits };
        let Some(place) = front.iter().position(|replica| self.is_up(*replica)) else { return visits };
        let stamp = Stamp { version, mixed: false, skipped: place > 0, last: false };
        let mut here = front[place];
        let mut packet = Packet { sender: None, hop: place, stamp, begins };
        loop {
            let held = self.has.get(&here).and_then(|plan| chain(*plan));
            let held = held.as_ref().map(|(chain, version)| (&chain[..], *version));
            let verdict = judge(held, here, &packet, owns(here), &|replica| self.is_up(replica));
            visits.push(Visit { here, packet, verdict });
            let Verdict::Forward { to, hop, stamp } = verdict else { return visits };
            (packet, here) = (Packet { sender: Some(here), hop, stamp, begins }, to);
        }
    }

    pub(crate) fn reaches(&self, session: &Session) -> bool {
        self.send(session) == Fate::Found
    }

    /// Sessions whose owner is in no chain of the newest plan.
    pub(crate) fn orphans(&self) -> Vec<&Session> {
        let newest = self.plans.len() - 1;
        let is_member = |session: &&Session| {
            let chain = self.chain(newest, session.0, &session.1, session.2);
            chain.is_some_and(|chain| chain.contains(&session.3))
        };
        self.sessions.iter().filter(|session| !is_member(session)).collect()
    }

    /// Draining replicas that no chain needs any more leave.
    pub(crate) fn leave(&mut self) {
        let newest = self.newest();
        let draining =
            self.replicas.values().filter(|replica| replica.state == ReplicaState::Draining && newest.seats(replica.number) == 0);
        let gone: BTreeSet<ReplicaNumber> = draining.map(|replica| replica.number).collect();
        for replica in gone {
            assert!(self.sessions.iter().all(|session| session.3 != replica), "replica {replica:?} may leave, and owns sessions");
            self.forget(replica);
        }
    }

    pub(crate) fn forget(&mut self, replica: ReplicaNumber) {
        self.replicas.remove(&replica);
        self.has.remove(&replica);
        self.ownership.forget(replica);
        self.sessions.retain(|session| session.3 != replica);
    }
}

/// Did a service move where none of its tables had a head, so that there is nothing to wait for before the next one moves?
fn has_landed_at_once(before: &Plan, next: &Plan) -> bool {
    let is_still = |table: &PlannedTable| table.closing == 0 && !table.chains.iter().flatten().any(|seat| seat.is_owner());
    next.services.iter().any(|(id, service)| {
        let has_moved = before.services.get(id).is_some_and(|old| old.placement != service.placement);
        has_moved && service.tables.values().all(|table| is_still(table))
    })
}

/// A packet at a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Visit {
    pub(crate) here: ReplicaNumber,
    pub(crate) packet: Packet,
    pub(crate) verdict: Verdict,
}

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Its owner has it.
    Found,
    /// It is dropped, because tables of two versions had a say or one was missing: TCP sends it again.
    Again,
    /// The session is over.
    Reset,
}

/// What the way of a packet means for a session of `owner`.
pub(crate) fn fate(visits: &[Visit], owner: ReplicaNumber) -> Fate {
    match visits.last() {
        Some(Visit { here, verdict: Verdict::Keep, .. }) if *here == owner => Fate::Found,
        Some(Visit { verdict: Verdict::Keep | Verdict::Unowned, .. }) => Fate::Reset,
        _ => Fate::Again,
    }
}

/// What data planes learn of a plan.
fn told(plan: &Plan) -> Vec<canal_model::program::BucketTable> {
    let tables = |(id, service): (&ServiceId, &canal_model::plan::PlannedService)| {
        service.tables.keys().map(|az| (*id, az.clone())).collect::<Vec<_>>()
    };
    plan.services.iter().flat_map(tables).filter_map(|(id, az)| plan.table(id, &az)).collect()
}

/// The first thing that is different; whole plans are too long to read.
fn difference(one: &Plan, other: &Plan) -> String {
    for ((service, one), other) in one.services.iter().zip(other.services.values()) {
        if one.placement != other.placement {
            return format!("{service:?} is placed at {:?}, then {:?}", one.placement, other.placement);
        }
        for ((az, one), other) in one.tables.iter().zip(other.tables.values()) {
            let chains = one.chains.iter().zip(&other.chains).enumerate().find(|(_, (one, other))| one != other);
            if one != other {
                let head = |table: &PlannedTable| (table.version, table.confirmed, table.heard, table.closing);
                return format!("{service:?}@{az} {:?} {:?}: bucket {chains:?}", head(one), head(other));
            }
        }
    }
    format!("notes {:?}, then {:?}", one.notes, other.notes)
}
