//! A simulated tier that runs on plans. Replicas and edges receive plans late, sessions open and
//! close, SYNs are repeated, reports arrive late.
//!
//! It is not optimized and makes none of the planner's decisions. The redirector's rules are in
//! [`rules`]; `tests/histories` replays the histories of [`history`] through the real program.
#![allow(dead_code, reason = "each test program uses its part")]

pub(crate) mod events;
pub(crate) mod history;
pub(crate) mod rules;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use canal_model::fleet::{
    BucketSet, Demand, Demands, Fleet, FleetReplica, OwnedBuckets, OwnerReport, Ownership,
    ReplicaState,
};
use canal_model::ids::{AzName, ReplicaNumber, ServiceId, Vni};
use canal_model::plan::{Plan, PlannedTable, UnmetConstraint};
use canal_planner::plan;

use rules::{Packet, PacketVerdict, Stamp, evaluate};

pub(crate) type SimSession = (ServiceId, AzName, usize, ReplicaNumber);

#[derive(Default)]
pub(crate) struct SimTier {
    pub(crate) replicas: BTreeMap<ReplicaNumber, FleetReplica>,
    pub(crate) demands: Demands,
    pub(crate) ownership: Ownership,
    pub(crate) plans: Vec<Plan>,
    /// The index of the plan that each replica has.
    pub(crate) has: BTreeMap<ReplicaNumber, usize>,
    pub(crate) edges: BTreeMap<AzName, usize>,
    pub(crate) sessions: Vec<SimSession>,
    /// Reports in transit. Those of one replica stay in order.
    reports: BTreeMap<ReplicaNumber, VecDeque<OwnerReport>>,
    /// The number of reports that the controller had received, by the newest response that each
    /// replica has.
    marks: BTreeMap<ReplicaNumber, u64>,
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
    Demand {
        key,
        vni: Vni::new(100 + n % 3).unwrap(),
        weight: 1 + n % 4,
        home: None,
    }
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

impl SimTier {
    pub(crate) fn new(backends: &[(&str, usize)], services: u32) -> SimTier {
        let mut tier = SimTier::default();
        for name in ["a", "b", "c"] {
            tier.edges.insert(az(name), 0);
            // The controller knows its edges but has received no report from them.
            tier.ownership.record_edge_report(az(name), 0);
        }
        for tenant in 0..3 {
            let ranges = [
                "10.9.0.0/16".parse().unwrap(),
                "fd00:9::/64".parse().unwrap(),
            ];
            tier.demands
                .ranges
                .insert(format!("t{tenant}").parse().unwrap(), ranges.into());
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
        self.replicas
            .insert(number(self.next), replica(self.next, backend, state));
        self.has
            .insert(number(self.next), self.plans.len().saturating_sub(1));
    }

    pub(crate) fn fleet(&self) -> Fleet {
        Fleet::of(azs(), self.replicas.values().cloned())
    }

    pub(crate) fn newest(&self) -> &Plan {
        self.plans.last().unwrap()
    }

    /// Makes the next plan, and checks it and the transition to it with the linter.
    pub(crate) fn plan(&mut self) {
        let fleet = self.fleet();
        let next = plan(&fleet, &self.demands, &self.ownership, self.plans.last());
        let again = plan(&fleet, &self.demands, &self.ownership, self.plans.last());
        assert!(
            next == again,
            "the same arguments, another plan: {}",
            difference(&next, &again)
        );
        let again = plan(&fleet, &self.demands, &self.ownership, Some(&next));
        // In a fleet that is too small, one more plan may find one more combination.
        let is_crowded = next
            .notes
            .iter()
            .any(|note| matches!(note, UnmetConstraint::Shared { .. }));
        let may_go_on = is_crowded
            || self
                .plans
                .last()
                .is_some_and(|before| has_landed_at_once(before, &next));
        assert!(
            may_go_on || published(&next) == published(&again),
            "a plan from itself tells something else: {}",
            difference(&next, &again)
        );
        assert_eq!(canal_planlint::check(&fleet, &self.demands, &next), []);
        // No step leads to the first plan.
        if let Some(before) = self.plans.last() {
            let step = canal_planlint::PlanTransition {
                fleet: &fleet,
                demands: &self.demands,
                ownership: &self.ownership,
                before,
                after: &next,
            };
            let placed = |plan: &Plan| {
                plan.services
                    .values()
                    .map(|service| service.placement.clone())
                    .collect::<Vec<_>>()
            };
            assert_eq!(
                canal_planlint::step(&step),
                [],
                "{:?}, then {:?}",
                placed(before),
                placed(step.after)
            );
        }
        self.plans.push(next);
    }

    pub(crate) fn deliver_all(&mut self) {
        let newest = self.plans.len() - 1;
        self.has.values_mut().for_each(|has| *has = newest);
        self.edges.values_mut().for_each(|has| *has = newest);
    }

    /// The replica scans its sessions and sends a report, which is not delivered yet.
    pub(crate) fn scan(&mut self, replica: ReplicaNumber) {
        let Some(plan) = self.plans.get(self.has[&replica]) else {
            return;
        };
        let mut owned: BTreeMap<ServiceId, OwnedBuckets> = BTreeMap::new();
        for (service, az, bucket, _) in self.sessions.iter().filter(|session| session.3 == replica)
        {
            let version = plan
                .services
                .get(service)
                .and_then(|service| service.tables.get(az))
                .map_or(0, |table| table.version);
            let entry = owned.entry(*service).or_insert(OwnedBuckets {
                version,
                buckets: BucketSet::default(),
            });
            entry.buckets = entry.buckets.with(*bucket);
        }
        let scanned_after = self.marks.get(&replica).copied().unwrap_or(0);
        self.reports
            .entry(replica)
            .or_default()
            .push_back(OwnerReport {
                plan: plan.number,
                scanned_after,
                owned,
            });
    }

    /// The controller receives the replica's oldest report in transit, and the replica the
    /// response.
    pub(crate) fn deliver_report(&mut self, replica: ReplicaNumber) {
        if let Some(report) = self.reports.get_mut(&replica).and_then(VecDeque::pop_front) {
            self.ownership.record_report(replica, report);
            self.marks
                .insert(replica, self.ownership.last_report_number());
        }
    }

    pub(crate) fn deliver_edge_report(&mut self, az: AzName) {
        if let Some(plan) = self.plans.get(self.edges[&az]) {
            self.ownership.record_edge_report(az, plan.number);
        }
    }

    /// Makes plans, delivers them to all data planes, and delivers their reports, several times.
    pub(crate) fn settle(&mut self) {
        for _ in 0..5 {
            self.plan();
            self.deliver_all();
            for replica in self.replicas.keys().copied().collect::<Vec<_>>() {
                self.scan(replica);
                while self
                    .reports
                    .get(&replica)
                    .is_some_and(|reports| !reports.is_empty())
                {
                    self.deliver_report(replica);
                }
            }
            for az in self.edges.keys().cloned().collect::<Vec<_>>() {
                self.deliver_edge_report(az);
            }
        }
    }

    fn chain(
        &self,
        plan: usize,
        service: ServiceId,
        az: &AzName,
        bucket: usize,
    ) -> Option<Vec<ReplicaNumber>> {
        let table = self
            .plans
            .get(plan)?
            .services
            .get(&service)?
            .tables
            .get(az)?;
        Some(
            table.chains[bucket]
                .iter()
                .map(|member| member.replica)
                .collect(),
        )
    }

    fn is_up(&self, replica: ReplicaNumber) -> bool {
        self.replicas
            .get(&replica)
            .is_some_and(|replica| replica.up)
    }

    /// Sends a SYN by the edge's table, then by the redirectors' tables. Returns the replica that
    /// accepts it, or `None`.
    pub(crate) fn open(
        &mut self,
        service: ServiceId,
        az: &AzName,
        bucket: usize,
    ) -> Option<ReplicaNumber> {
        let visits = self.begin(service, az, bucket);
        let taker = visits
            .last()
            .filter(|visit| visit.verdict == PacketVerdict::Keep)?
            .here;
        self.sessions.push((service, az.clone(), bucket, taker));
        Some(taker)
    }

    /// Returns the path of a SYN. Clients lose an AZ's gateway address when its edge gets the plan.
    pub(crate) fn begin(&self, service: ServiceId, az: &AzName, bucket: usize) -> Vec<PacketVisit> {
        let planned = self
            .plans
            .get(self.edges[az])
            .and_then(|plan| plan.services.get(&service));
        let is_there = planned
            .and_then(|service| service.placement.as_ref())
            .is_some_and(|placement| placement.backends.contains_key(az));
        if is_there {
            self.walk((service, az, bucket), true, &|_| false)
        } else {
            Vec::new()
        }
    }

    /// Returns the path of a packet of an existing session.
    pub(crate) fn go_on(&self, (service, az, bucket, owner): &SimSession) -> Vec<PacketVisit> {
        self.walk((*service, az, *bucket), false, &|here| here == *owner)
    }

    /// Returns the fate of a client's acknowledgment of the SYN-ACK from `answered`, if repeated
    /// SYNs left requests on `requests` too.
    ///
    /// By the redirector's rule, a request owns only the answer to its own SYN-ACK. With
    /// `any_request`, the former rule applies: it owns any answer.
    pub(crate) fn acknowledge(
        &self,
        session: &SimSession,
        requests: &[ReplicaNumber],
        any_request: bool,
    ) -> PacketFate {
        let (service, az, bucket, answered) = session;
        let owns =
            |here: ReplicaNumber| here == *answered || (any_request && requests.contains(&here));
        fate(&self.walk((*service, az, *bucket), false, &owns), *answered)
    }

    fn version(&self, plan: usize, service: ServiceId, az: &AzName) -> Option<u32> {
        Some(
            self.plans
                .get(plan)?
                .services
                .get(&service)?
                .tables
                .get(az)?
                .version,
        )
    }

    /// Returns the fate of a packet of an open session. The edge forwards it by its table, and the
    /// redirectors along their chains.
    pub(crate) fn send(&self, session: &SimSession) -> PacketFate {
        fate(&self.go_on(session), session.3)
    }

    /// Returns every replica that a packet reaches from the edge on, with its verdict. The result
    /// is empty if the edge drops the packet.
    fn walk(
        &self,
        (service, az, bucket): (ServiceId, &AzName, usize),
        begins: bool,
        owns: &dyn Fn(ReplicaNumber) -> bool,
    ) -> Vec<PacketVisit> {
        let chain = |plan: usize| {
            Some((
                self.chain(plan, service, az, bucket)?,
                self.version(plan, service, az)?,
            ))
        };
        let mut visits = Vec::new();
        // Without the service in its plan the edge drops the packet.
        let Some((front, version)) = chain(self.edges[az]) else {
            return visits;
        };
        // No member of the chain is up, so the edge has nowhere to send the packet.
        let Some(place) = front.iter().position(|replica| self.is_up(*replica)) else {
            return visits;
        };
        // An edge skips members that it sees as down.
        let stamp = Stamp {
            version,
            mixed: false,
            skipped: place > 0,
            last: false,
        };
        let mut here = front[place];
        let mut packet = Packet {
            sender: None,
            hop: place,
            stamp,
            begins,
        };
        loop {
            let held = self.has.get(&here).and_then(|plan| chain(*plan));
            let held = held.as_ref().map(|(chain, version)| (&chain[..], *version));
            let verdict = evaluate(held, here, &packet, owns(here), &|replica| {
                self.is_up(replica)
            });
            visits.push(PacketVisit {
                here,
                packet,
                verdict,
            });
            let PacketVerdict::Forward { to, hop, stamp } = verdict else {
                return visits;
            };
            (packet, here) = (
                Packet {
                    sender: Some(here),
                    hop,
                    stamp,
                    begins,
                },
                to,
            );
        }
    }

    pub(crate) fn reaches(&self, session: &SimSession) -> bool {
        self.send(session) == PacketFate::Found
    }

    /// Returns the sessions whose owner is in no chain of the newest plan.
    pub(crate) fn orphans(&self) -> Vec<&SimSession> {
        let newest = self.plans.len() - 1;
        let is_member = |session: &&SimSession| {
            let chain = self.chain(newest, session.0, &session.1, session.2);
            chain.is_some_and(|chain| chain.contains(&session.3))
        };
        self.sessions
            .iter()
            .filter(|session| !is_member(session))
            .collect()
    }

    /// Removes draining replicas that no chain contains any more.
    pub(crate) fn leave(&mut self) {
        let newest = self.newest();
        let draining = self.replicas.values().filter(|replica| {
            replica.state == ReplicaState::Draining && newest.members(replica.number) == 0
        });
        let gone: BTreeSet<ReplicaNumber> = draining.map(|replica| replica.number).collect();
        for replica in gone {
            assert!(
                self.sessions.iter().all(|session| session.3 != replica),
                "replica {replica:?} may leave, and owns sessions"
            );
            self.forget(replica);
        }
    }

    pub(crate) fn forget(&mut self, replica: ReplicaNumber) {
        self.replicas.remove(&replica);
        self.has.remove(&replica);
        self.ownership.forget(replica);
        self.reports.remove(&replica);
        self.sessions.retain(|session| session.3 != replica);
    }
}

/// Returns true if a service moved while no replica other than heads could own its sessions. The
/// next service then need not wait for it.
fn has_landed_at_once(before: &Plan, next: &Plan) -> bool {
    let is_still = |table: &PlannedTable| {
        table.closing == 0
            && !table
                .chains
                .iter()
                .flatten()
                .any(|member| member.is_owner())
    };
    next.services.iter().any(|(id, service)| {
        let has_moved = before
            .services
            .get(id)
            .is_some_and(|old| old.placement != service.placement);
        has_moved && service.tables.values().all(|table| is_still(table))
    })
}

/// One packet at one replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PacketVisit {
    pub(crate) here: ReplicaNumber,
    pub(crate) packet: Packet,
    pub(crate) verdict: PacketVerdict,
}

// A plan from itself has nothing to change, unless a later plan may move one more service.
/// The result for a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PacketFate {
    /// The owner of the session receives the packet.
    Found,
    /// The packet is dropped, because tables of two versions were used or one was missing; TCP
    /// sends it again.
    Again,
    /// The packet causes a reset of the session.
    Reset,
}

/// Returns the fate of a packet with this path for a session of `owner`.
pub(crate) fn fate(visits: &[PacketVisit], owner: ReplicaNumber) -> PacketFate {
    match visits.last() {
        Some(PacketVisit {
            here,
            verdict: PacketVerdict::Keep,
            ..
        }) if *here == owner => PacketFate::Found,
        Some(PacketVisit {
            verdict: PacketVerdict::Keep | PacketVerdict::Unowned,
            ..
        }) => PacketFate::Reset,
        _ => PacketFate::Again,
    }
}

/// Returns the tables that data planes receive from a plan.
fn published(plan: &Plan) -> Vec<canal_model::program::BucketTable> {
    let tables = |(id, service): (&ServiceId, &canal_model::plan::PlannedService)| {
        service
            .tables
            .keys()
            .map(|az| (*id, az.clone()))
            .collect::<Vec<_>>()
    };
    plan.services
        .iter()
        .flat_map(tables)
        .filter_map(|(id, az)| plan.table(id, &az))
        .collect()
}

/// Describes the first difference, because whole plans are too long to read.
fn difference(one: &Plan, other: &Plan) -> String {
    for ((service, one), other) in one.services.iter().zip(other.services.values()) {
        if one.placement != other.placement {
            return format!(
                "{service:?} is placed at {:?}, then {:?}",
                one.placement, other.placement
            );
        }
        for ((az, one), other) in one.tables.iter().zip(other.tables.values()) {
            let chains = one
                .chains
                .iter()
                .zip(&other.chains)
                .enumerate()
                .find(|(_, (one, other))| one != other);
            if one != other {
                let head = |table: &PlannedTable| {
                    (
                        table.version,
                        table.confirmed,
                        table.reports_received,
                        table.closing,
                    )
                };
                return format!(
                    "{service:?}@{az} {:?} {:?}: bucket {chains:?}",
                    head(one),
                    head(other)
                );
            }
        }
    }
    format!("notes {:?}, then {:?}", one.notes, other.notes)
}
