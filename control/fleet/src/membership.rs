//! Membership and liveness of the fleet: registered replicas, edges, their last reports, and the
//! effects of missing reports. Pure: time is an argument, and rows to persist are returned. The
//! planner decides the bucket tables.
//!
//! While an edge reports, what it sees of its replicas decides whether they are up. Start at
//! [`Membership::record_replica_report`] and [`Membership::observe`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use canal_compiler::scope::TierPlacement;
use canal_model::fleet::{Fleet, FleetReplica, OwnerReport, Ownership, ReplicaState};
use canal_model::ids::{
    AzName, BackendName, EdgeName, Generation, ReplicaName, ReplicaNumber, TenantName,
};
use canal_model::plan::{Plan, PlannedTable};
use canal_southbound::DeliveryProgress;
use canal_store::{StoredEdge, StoredFleet, StoredReplica};
use canal_wire::fleet::ReportMark;
use tokio::time::Instant;

use crate::edges::{EdgeMember, Edges};
use crate::report::{EDGES_MAX, EdgeReport, ReplicaReport, ReportError, az_number};

/// Maximum number of publications whose plan is remembered. A data plane that is further behind
/// counts as having no table.
/// An entry takes 16 bytes, so that all of them take 1 MiB.
const PUBLICATIONS_MAX: usize = 65_536;

/// Timeouts for edges and replicas that do not report.
#[derive(Debug, Clone, Copy)]
pub struct SilenceTimeouts {
    /// An edge that is silent for this long is not alive; an AZ is closed with the last of its
    /// edges.
    pub edge_silent: Duration,
    /// A replica that no edge probes is down when it is silent for this long.
    pub replica_silent: Duration,
    /// A replica is gone when it is silent for this long while edges of its AZ report and none sees
    /// it up. An edge is forgotten after the same time if another edge of its AZ is alive.
    pub gone: Duration,
    /// After a start the last plan stays in force for this long, regardless of members that have
    /// not reported yet.
    pub grace: Duration,
    /// A replica that does not acknowledge a tenant's resources within this time after their
    /// publication gets no new sessions.
    pub lag: Duration,
}

impl Default for SilenceTimeouts {
    fn default() -> Self {
        Self {
            // Seven of its reports are missing by then (one in 200 ms, `REPORT_MOVING_MS`), so that
            // a few that are late close no AZ.
            edge_silent: Duration::from_millis(1500),
            // Three of its reports are missing by then (one a second, `REPORT_MS`).
            replica_silent: Duration::from_secs(3),
            // Its sessions count as ended then, which cannot be undone, so it is far longer. Nobody
            // measured this value; the operator sets it by `--replica-gone-after`.
            gone: Duration::from_secs(30),
            // Longer than the silence of a replica that counts, so that each can report twice
            // before.
            grace: Duration::from_secs(5),
            // Changes spread within a second, so only a replica that hangs or is overloaded needs
            // longer. Nobody measured this value.
            lag: Duration::from_secs(5),
        }
    }
}

/// A registered replica and its last report.
#[derive(Debug, Clone)]
pub(crate) struct ReplicaRecord {
    pub(crate) row: StoredReplica,
    /// True if the replica reported that it leaves, or was not seen for long. Its number is free
    /// once no table contains it.
    pub(crate) gone: bool,
    pub(crate) up: bool,
    pub(crate) sessions: u64,
    pub(crate) accepted: u64,
    pub(crate) owned: usize,
    pub(crate) version: String,
    pub(crate) generation: Generation,
    /// Number of cores that receive the replica's packets; 0 if it did not report it.
    pub(crate) cores: u32,
    tunnel_ports: Arc<[u8]>,
    last_report: Option<Instant>,
    /// Every resource up to this generation has been acknowledged.
    acked_through: Generation,
    /// Tenants of which the replica has less than that, because it refuses one of their resources.
    behind: BTreeMap<TenantName, Generation>,
    /// First generation whose resources name this replica; `None` if none does yet.
    published_at: Option<Generation>,
    wants_drain: bool,
    /// Generation since which no table contains the replica.
    left_tables_at: Option<Generation>,
}

/// Changes that one call of [`Membership::observe`] found.
#[derive(Debug, Default)]
pub(crate) struct MembershipUpdate {
    /// True if the planner must run again.
    pub(crate) changed: bool,
    /// Replicas whose rows must be persisted.
    pub(crate) rows: Vec<ReplicaName>,
    /// AZs whose last edge has just fallen silent.
    pub(crate) closed: Vec<AzName>,
    /// Replicas that have just been found gone.
    pub(crate) gone: Vec<ReplicaName>,
    /// Edges that were silent for long, in AZs where another edge is alive.
    pub(crate) gone_edges: Vec<EdgeName>,
}

/// The members of the fleet and their reports.
#[derive(Debug)]
pub(crate) struct Membership {
    times: SilenceTimeouts,
    started: Instant,
    members: BTreeMap<ReplicaName, ReplicaRecord>,
    edges: Edges,
    azs: BTreeMap<AzName, u8>,
    ownership: Ownership,
    /// Random number of this process. It is in the marks of its responses to replicas, whose
    /// numbers an earlier process may have used too.
    report_session: u64,
    /// Generation and time at which each tenant was first published to each backend.
    first_published: BTreeMap<(BackendName, TenantName), (Generation, Instant)>,
    /// Newest plan whose tables are all in a generation, for the generations at which it changed.
    plans: VecDeque<(Generation, u32)>,
    /// Number of reports when the plan in force last had a table confirmed.
    plan_reports_received: u64,
    /// Backends that have tables in motion.
    moving: BTreeSet<BackendName>,
    /// Incremented with each change of the tunnels.
    tunnels_version: u64,
}

impl Membership {
    /// Loads the fleet as it was stored. Its members count as present until the grace time is over.
    pub(crate) fn new(
        stored: StoredFleet,
        plan: &Plan,
        times: SilenceTimeouts,
        now: Instant,
    ) -> Self {
        let member = |row: StoredReplica| (row.name.clone(), ReplicaRecord::new(row, None, true));
        // The tables of an edge that has not reported yet are unknown. The planner waits for it
        // until it has been silent for too long.
        let mut ownership = Ownership::after(plan.reports_received());
        stored
            .edges
            .iter()
            .for_each(|edge| ownership.record_edge_report(edge.az.clone(), 0));
        Self {
            times,
            started: now,
            members: stored.replicas.into_iter().map(member).collect(),
            edges: Edges::new(stored.edges),
            azs: stored.azs,
            ownership,
            report_session: rand::random(),
            first_published: BTreeMap::new(),
            plans: VecDeque::new(),
            plan_reports_received: plan.reports_received(),
            moving: BTreeSet::new(),
            tunnels_version: 1,
        }
    }

    /// True if no member is registered.
    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty() && self.edges.is_empty()
    }
    pub(crate) fn members(&self) -> &BTreeMap<ReplicaName, ReplicaRecord> {
        &self.members
    }
    pub(crate) fn edges(&self) -> &Edges {
        &self.edges
    }
    pub(crate) fn ownership(&self) -> &Ownership {
        &self.ownership
    }
    /// Returns the present position in the sequence of reports.
    pub(crate) fn mark(&self) -> ReportMark {
        ReportMark {
            session: self.report_session,
            number: self.ownership.last_report_number(),
        }
    }
    pub(crate) fn is_moving(&self, backend: &BackendName) -> bool {
        self.moving.contains(backend)
    }

    // ---- reports ----

    /// Decides whether a replica's report is accepted. Returns true if the replica is registered as
    /// it reports, and false if it must be registered first.
    ///
    /// # Errors
    /// The address or the AZ's number conflicts with another member, or the replica is registered
    /// otherwise and reported a moment ago.
    pub(crate) fn check_replica(
        &self,
        name: &ReplicaName,
        report: &ReplicaReport,
        now: Instant,
    ) -> Result<bool, ReportError> {
        self.check_address(&report.az, report.underlay, Some(name), None)?;
        let Some(member) = self.members.get(name) else {
            return Ok(false);
        };
        let row = &member.row;
        let is_same =
            row.backend == report.backend && row.az == report.az && row.underlay == report.underlay;
        match is_same {
            true => Ok(!member.gone),
            false if !member.gone && member.reported_within(now, self.times.replica_silent) => {
                Err(ReportError::RegisteredOtherwise(name.clone()))
            }
            false => Ok(false),
        }
    }

    /// Checks that an address fits the number of its AZ and is no other member's. `replica` or
    /// `edge` is the reporting member.
    fn check_address(
        &self,
        az: &AzName,
        underlay: Ipv4Addr,
        replica: Option<&ReplicaName>,
        edge: Option<&EdgeName>,
    ) -> Result<(), ReportError> {
        let given = az_number(underlay);
        // The first member of an AZ fixed its number; the addresses of all others must agree with
        // it.
        if let Some(wanted) = self.azs.get(az).filter(|n| **n != given) {
            return Err(ReportError::AzNumber {
                az: az.clone(),
                expected: *wanted,
                reported: given,
            });
        }
        if let Some((holder, _)) = self
            .azs
            .iter()
            .find(|(name, n)| **n == given && *name != az)
        {
            return Err(ReportError::AzNumberTaken {
                az: az.clone(),
                number: given,
                holder: holder.clone(),
            });
        }
        let member = self
            .members
            .values()
            // A replica that is gone gives its address up.
            .find(|m| m.row.underlay == underlay && Some(&m.row.name) != replica && !m.gone);
        let is_others = |e: &EdgeMember| Some(&e.row.name) != edge && e.row.underlay == underlay;
        // The shared tunnel end of an AZ's edges is not a member's own address.
        let is_shared =
            |e: &EdgeMember| e.row.anycast == Some(underlay) && e.row.underlay != underlay;
        let other = self.edges.values().find(|e| is_others(e) || is_shared(e));
        let holder = member
            .map(|m| format!("replica {}", m.row.name))
            .or(other.map(|e| format!("edge {}", e.row.name)));
        match holder {
            Some(holder) => Err(ReportError::UnderlayTaken { underlay, holder }),
            None => Ok(()),
        }
    }

    /// Adds a replica that the store has registered.
    pub(crate) fn register_replica(&mut self, row: StoredReplica, now: Instant) {
        self.azs.insert(row.az.clone(), az_number(row.underlay));
        // The number may have been another replica's.
        self.ownership.forget(row.number);
        self.tunnels_version += 1;
        self.members
            .insert(row.name.clone(), ReplicaRecord::new(row, Some(now), true));
    }

    /// Records the report of a registered replica. Returns true if the planner must run again.
    pub(crate) fn record_replica_report(
        &mut self,
        name: &ReplicaName,
        report: ReplicaReport,
        progress: DeliveryProgress,
        now: Instant,
    ) -> bool {
        let has = progress.served(report.generation);
        let plan = self.plan_at(has);
        // A replica that leaves without being registered changes nothing.
        let Some(member) = self.members.get_mut(name) else {
            return false;
        };
        let number = member.row.number;
        let restarted = report.generation < member.generation;
        // A smaller generation means that the process was restarted: what it acknowledged before
        // does not count.
        let acked_through = if restarted {
            has
        } else {
            member.acked_through.max(has)
        };
        let differs = acked_through != member.acked_through
            || progress.behind != member.behind
            || report.draining != member.wants_drain
            || report.leaving != member.gone;
        // A restarted process must acknowledge its tenants before it gets new sessions.
        if restarted && member.row.state == ReplicaState::Active {
            member.row.state = ReplicaState::Joining;
        }
        member.last_report = Some(now);
        member.generation = report.generation;
        member.acked_through = acked_through;
        member.behind = progress.behind;
        member.wants_drain = report.draining;
        (member.sessions, member.accepted, member.version) =
            (report.sessions, report.accepted, report.version);
        member.owned = report.owned.len();
        // An edge receives the tunnels only when it has another version of them.
        if (member.cores, &member.tunnel_ports) != (report.cores, &report.tunnel_ports) {
            (member.cores, member.tunnel_ports) = (report.cores, report.tunnel_ports);
            self.tunnels_version += 1;
        }
        if report.leaving {
            member.gone = true;
            // The replica has closed all its sessions, or its process ends now with them.
            self.ownership.forget(number);
            return true;
        }
        let scanned_after = match report.scanned_after {
            Some(mark) if mark.session == self.report_session => mark.number,
            // A mark of an earlier controller process proves nothing.
            Some(_) => 0,
            // A replica of an older version sends no marks. Without this rule its drain would never
            // end.
            None => self.ownership.last_report_number(),
        };
        let report = OwnerReport {
            plan,
            scanned_after,
            owned: report.owned,
        };
        // What an unchanged report states is news while its scans are newer than those before, and
        // began before the plan last had a table confirmed: each may prove what no earlier one did.
        let news = self.ownership.report(number).is_none_or(|old| {
            (old.plan, &old.owned) != (report.plan, &report.owned)
                || old.scanned_after < report.scanned_after.min(self.plan_reports_received)
        });
        self.ownership.record_report(number, report);
        differs || restarted || news
    }

    /// Decides whether an edge's report is accepted. `None` if the edge is known as it reports;
    /// otherwise it must be stored first, in place of the edges returned.
    ///
    /// # Errors
    /// The address or the AZ's number conflicts with another member; the tunnel end is not that of
    /// the AZ; or the AZ has too many edges.
    pub(crate) fn check_edge(
        &self,
        name: &EdgeName,
        report: &EdgeReport,
        now: Instant,
    ) -> Result<Option<Vec<EdgeName>>, ReportError> {
        self.check_address(&report.az, report.underlay, None, Some(name))?;
        self.check_tunnel_end(report)?;
        let is_reporting = |edge: &EdgeMember| {
            edge.last_report
                .is_some_and(|at| now.duration_since(at) < self.times.edge_silent)
        };
        let (others, own): (Vec<&EdgeMember>, Vec<&EdgeMember>) = self
            .edges
            .of_az(&report.az)
            .partition(|edge| edge.row.name != *name);
        let (same, differ): (Vec<&EdgeMember>, Vec<&EdgeMember>) = others
            .into_iter()
            .partition(|edge| edge.row.tunnel_end() == report.tunnel_end);
        // Edges with another tunnel end are replaced once they are silent.
        if let Some(other) = differ.iter().find(|edge| is_reporting(edge)) {
            let (holder, wanted) = (other.row.name.clone(), other.row.tunnel_end());
            return Err(ReportError::TunnelEnd {
                az: report.az.clone(),
                holder,
                expected: wanted,
                reported: report.tunnel_end,
            });
        }
        if own.iter().any(|edge| {
            edge.row.underlay == report.underlay && edge.row.tunnel_end() == report.tunnel_end
        }) {
            // The row on disk is the same, so nothing has to be stored.
            return Ok(None);
        }
        if same.len() >= EDGES_MAX {
            return Err(ReportError::Edges {
                az: report.az.clone(),
                limit: EDGES_MAX,
            });
        }
        Ok(Some(
            differ.iter().map(|edge| edge.row.name.clone()).collect(),
        ))
    }

    /// Checks that a shared tunnel end is in the AZ, and is no member's own address.
    fn check_tunnel_end(&self, report: &EdgeReport) -> Result<(), ReportError> {
        let underlay = report.tunnel_end;
        let (wanted, given) = (az_number(report.underlay), az_number(underlay));
        if wanted != given {
            return Err(ReportError::AzNumber {
                az: report.az.clone(),
                expected: wanted,
                reported: given,
            });
        }
        if underlay == report.underlay {
            return Ok(());
        }
        let member = self
            .members
            .values()
            .find(|member| member.row.underlay == underlay && !member.gone);
        let edge = self
            .edges
            .values()
            .find(|edge| edge.row.underlay == underlay);
        let holder = member
            .map(|m| format!("replica {}", m.row.name))
            .or(edge.map(|e| format!("edge {}", e.row.name)));
        holder.map_or(Ok(()), |holder| {
            Err(ReportError::UnderlayTaken { underlay, holder })
        })
    }

    /// Adds an edge that is in the store, in place of others.
    pub(crate) fn register_edge(&mut self, row: StoredEdge, replaces: &[EdgeName]) {
        self.azs.insert(row.az.clone(), az_number(row.underlay));
        replaces.iter().for_each(|name| self.edges.forget(name));
        self.edges.enter(EdgeMember::new(row, false));
    }

    /// Records the report of an edge. Returns true if the planner must run again.
    pub(crate) fn record_edge_report(
        &mut self,
        name: &EdgeName,
        report: EdgeReport,
        progress: DeliveryProgress,
        now: Instant,
    ) -> bool {
        let acked_through = progress.served(report.generation);
        let plan = self.plan_at(acked_through);
        let Some(edge) = self.edges.get_mut(name) else {
            return false;
        };
        let is_new = edge.replicas_up != report.replicas_up
            || !edge.alive
            || edge.acked_through != acked_through;
        edge.acked_through = acked_through;
        edge.plan = plan;
        edge.last_report = Some(now);
        edge.alive = true;
        edge.generation = report.generation;
        edge.version = report.version;
        edge.replicas_up = report.replicas_up;
        let before = self.ownership.edge(&report.az);
        // The AZ has only the tables that all its edges have.
        let of_all = self.edges.plan(&report.az).unwrap_or(plan);
        self.ownership.record_edge_report(report.az, of_all);
        is_new || before != Some(of_all)
    }

    /// Returns the version of all replicas' tunnels, and the source ports of tunnels to the
    /// replicas of an AZ that have named some.
    pub(crate) fn tunnels(
        &self,
        az: &AzName,
    ) -> (u64, impl Iterator<Item = (Ipv4Addr, Arc<[u8]>)>) {
        let of_az = self
            .members
            .values()
            .filter(move |member| member.row.az == *az && !member.tunnel_ports.is_empty());
        (
            self.tunnels_version,
            of_az.map(|member| (member.row.underlay, member.tunnel_ports.clone())),
        )
    }

    // ---- timeouts ----

    /// Applies the timeouts: decides which members are up, down or gone.
    pub(crate) fn observe(&mut self, now: Instant) -> MembershipUpdate {
        let mut out = MembershipUpdate::default();
        if self.is_cut_off(now) {
            self.restart_silence_timers(now);
            return out;
        }
        let in_grace = now.duration_since(self.started) < self.times.grace;
        self.observe_edges(now, in_grace, &mut out);
        for (name, member) in &mut self.members {
            // What edges see of a replica outranks its own reports.
            let word = self.edges.word(&member.row.az, name);
            let by_itself = member.last_report.map_or(in_grace && member.up, |at| {
                now.duration_since(at) < self.times.replica_silent
            });
            let up = word.unwrap_or(by_itself) && !member.gone;
            out.changed |= up != member.up;
            member.up = up;
            let silent =
                now.duration_since(member.last_report.unwrap_or(self.started)) >= self.times.gone;
            // While an edge sees the replica up, only the path of its reports is broken.
            if !member.gone
                && silent
                && self.edges.is_any_reporting(&member.row.az)
                && word != Some(true)
            {
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

    /// Decides which edges are alive. An AZ is closed with the last of its edges. Before that the
    /// others carry its packets, and the planner does not wait for the tables of the silent one.
    fn observe_edges(&mut self, now: Instant, in_grace: bool, out: &mut MembershipUpdate) {
        let mut fell_silent = BTreeSet::new();
        for edge in self.edges.values_mut() {
            let alive = edge.last_report.map_or(edge.alive && in_grace, |at| {
                now.duration_since(at) < self.times.edge_silent
            });
            if edge.alive && !alive {
                fell_silent.insert(edge.row.az.clone());
            }
            out.changed |= edge.alive != alive;
            edge.alive = alive;
        }
        for az in fell_silent {
            // The edge that fell silent may have been the one with the oldest tables.
            match self.edges.plan(&az) {
                Some(plan) => self.ownership.record_edge_report(az, plan),
                None => {
                    self.ownership.forget_edge(&az);
                    out.closed.push(az);
                }
            }
        }
        let is_gone = |edge: &&EdgeMember| {
            now.duration_since(edge.last_report.unwrap_or(self.started)) >= self.times.gone
                && self.edges.is_alive(&edge.row.az)
        };
        out.gone_edges = self
            .edges
            .values()
            .filter(is_gone)
            .map(|edge| edge.row.name.clone())
            .collect();
        out.gone_edges
            .iter()
            .for_each(|name| self.edges.forget(name));
    }

    /// Restarts the timeouts. While no member reports, all stay as they were last; the first that
    /// comes back must not make the others appear down.
    fn restart_silence_timers(&mut self, now: Instant) {
        self.members
            .values_mut()
            .for_each(|member| member.last_report = None);
        self.edges
            .values_mut()
            .for_each(|edge| edge.last_report = None);
        self.started = now;
    }

    /// True while no member at all reports. Then the controller is cut off, and the published state
    /// stays unchanged.
    pub(crate) fn is_cut_off(&self, now: Instant) -> bool {
        let recent = |at: Option<Instant>| {
            at.is_some_and(|at| now.duration_since(at) < self.times.edge_silent)
        };
        !self.members.values().any(|m| recent(m.last_report))
            && !self.edges.values().any(|e| recent(e.last_report))
    }

    /// Returns the fleet for the planner. Members that are gone are not in it; a replica that has
    /// lacked a tenant for long is joining again.
    pub(crate) fn fleet(&self, now: Instant) -> Fleet {
        let replica = |m: &ReplicaRecord| FleetReplica {
            name: m.row.name.clone(),
            number: m.row.number,
            backend: m.row.backend.clone(),
            az: m.row.az.clone(),
            underlay: m.row.underlay,
            state: if m.row.state == ReplicaState::Active && self.is_lagging(m, now) {
                ReplicaState::Joining
            } else {
                m.row.state
            },
            up: m.up,
        };
        Fleet::of(
            self.azs.clone(),
            self.members.values().filter(|m| !m.gone).map(replica),
        )
    }

    /// True if the replica has lacked a tenant's published resources for too long. A resource that
    /// it refuses is lacking for its tenant alone, which [`Membership::is_ready`] decides.
    fn is_lagging(&self, member: &ReplicaRecord, now: Instant) -> bool {
        let concerns = |backend: &BackendName, tenant: &TenantName| {
            *backend == member.row.backend && !member.behind.contains_key(tenant)
        };
        let of_backend = self
            .first_published
            .iter()
            .filter(|((backend, tenant), _)| concerns(backend, tenant));
        member.last_report.is_some()
            && of_backend.into_iter().any(|(_, (at, when))| {
                *at > member.acked_through && now.duration_since(*when) > self.times.lag
            })
    }

    /// True if the replica has everything that a tenant's sessions need. No table waits for a
    /// replica that is down or gone.
    pub(crate) fn is_ready(&self, replica: ReplicaNumber, tenant: &TenantName) -> bool {
        let Some(member) = self
            .members
            .values()
            .find(|m| m.row.number == replica && !m.gone)
        else {
            return true;
        };
        let key = (member.row.backend.clone(), tenant.clone());
        !member.up
            || self
                .first_published
                .get(&key)
                .is_some_and(|(at, _)| *at <= member.acked_generation(tenant))
    }

    // ---- publications ----

    /// Records what a generation published: replicas, tenants by backend, and the newest plan whose
    /// tables are all in it.
    pub(crate) fn published(
        &mut self,
        generation: Generation,
        plan: u32,
        placement: &TierPlacement,
        now: Instant,
    ) {
        for member in self.members.values_mut() {
            if placement.replicas.contains_key(&member.row.name) {
                member.published_at.get_or_insert(generation);
            }
        }
        let pairs = placement
            .backends
            .iter()
            .flat_map(|(b, scope)| scope.tenants.iter().map(move |t| (b.clone(), t.clone())));
        let pairs: BTreeSet<(BackendName, TenantName)> = pairs.collect();
        self.first_published.retain(|pair, _| pairs.contains(pair));
        for pair in pairs {
            self.first_published
                .entry(pair)
                .or_insert((generation, now));
        }
        self.note_plan(generation, plan);
    }

    /// Records that a generation has all tables of `plan`. If a plan changed no published table,
    /// that is the generation before it.
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

    /// Returns the newest plan of which a data plane at `generation` has all tables; 0 if there is
    /// none.
    fn plan_at(&self, generation: Generation) -> u32 {
        let after = self.plans.partition_point(|(at, _)| *at <= generation);
        after
            .checked_sub(1)
            .and_then(|i| self.plans.get(i))
            .map_or(0, |(_, plan)| *plan)
    }

    /// Records which backends have tables in motion in the plan in force: tables with owners, or of
    /// a service that left the AZ.
    pub(crate) fn note_motion(&mut self, plan: &Plan) {
        self.plan_reports_received = plan.reports_received();
        let by_number: BTreeMap<ReplicaNumber, &BackendName> = self
            .members
            .values()
            .map(|m| (m.row.number, &m.row.backend))
            .collect();
        let mut moving = BTreeSet::new();
        for table in plan
            .services
            .values()
            .flat_map(|s| s.tables.values())
            .filter(|t| is_moving(t))
        {
            let members = table.chains.iter().flatten();
            moving.extend(members.filter_map(|m| by_number.get(&m.replica).map(|b| (*b).clone())));
        }
        self.moving = moving;
    }

    // ---- operators ----

    /// Sets or takes back an order to drain. Returns false if there is no such replica.
    pub(crate) fn order_drain(&mut self, name: &ReplicaName, drain: bool) -> bool {
        let member = self.members.get_mut(name);
        member.map(|m| m.row.drain = drain).is_some()
    }

    /// Declares a replica gone. Returns `None` if there is no such replica, and false if it
    /// reported a moment ago and would be back at once.
    pub(crate) fn declare_gone(&mut self, name: &ReplicaName, now: Instant) -> Option<bool> {
        let silent = self.times.replica_silent;
        let member = self.members.get_mut(name)?;
        if member.reported_within(now, silent) && !member.gone {
            return Some(false);
        }
        member.gone = true;
        self.ownership.forget(member.row.number);
        Some(true)
    }

    /// Returns the replicas that are gone and are in no table that a member may still have: `plan`
    /// has none, all of it was published by `generation`, and all live members acknowledged that.
    pub(crate) fn forgettable(&mut self, plan: &Plan, generation: Generation) -> Vec<ReplicaName> {
        for member in self
            .members
            .values_mut()
            .filter(|m| m.gone && plan.members(m.row.number) == 0)
        {
            member.left_tables_at.get_or_insert(generation);
        }
        let members = self
            .members
            .values()
            .filter(|m| m.up && m.last_report.is_some())
            .map(|m| m.acked_through);
        let edges = self
            .edges
            .values()
            .filter(|e| e.alive && e.last_report.is_some())
            .map(|e| e.acked_through);
        let all_have = members.chain(edges).min().unwrap_or(generation);
        let free = self
            .members
            .values()
            .filter(|m| m.left_tables_at.is_some_and(|at| at <= all_have));
        free.map(|m| m.row.name.clone()).collect()
    }

    pub(crate) fn forget(&mut self, name: &ReplicaName) {
        if let Some(member) = self.members.remove(name) {
            self.ownership.forget(member.row.number);
        }
    }
}

/// True if the table keeps sessions for replicas that are not heads, or its service left the AZ.
pub(crate) fn is_moving(table: &PlannedTable) -> bool {
    table.closing > 0 || table.chains.iter().flatten().any(|s| s.is_owner())
}

impl ReplicaRecord {
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
            cores: 0,
            tunnel_ports: Arc::default(),
            last_report: heard,
            acked_through: Generation(0),
            behind: BTreeMap::new(),
            published_at: None,
            wants_drain: false,
            left_tables_at: None,
        }
    }

    /// Returns the generation up to which the replica has everything of the tenant.
    fn acked_generation(&self, tenant: &TenantName) -> Generation {
        self.behind
            .get(tenant)
            .map_or(self.acked_through, |at| self.acked_through.min(*at))
    }

    /// Returns the time since the last report; `None` if there was none since the start.
    pub(crate) fn since_last_report(&self, now: Instant) -> Option<Duration> {
        self.last_report.map(|at| now.duration_since(at))
    }

    fn reported_within(&self, now: Instant, within: Duration) -> bool {
        self.last_report
            .is_some_and(|at| now.duration_since(at) < within)
    }

    /// Returns the state that the replica changes to, if it changes.
    fn decide_state(&self) -> Option<ReplicaState> {
        let has_all = self.published_at.is_some_and(|at| self.acked_through >= at);
        let next = match self.row.state {
            _ if self.row.drain || self.wants_drain => ReplicaState::Draining,
            // After a start of the controller, nothing is known of a draining replica until it
            // reports.
            ReplicaState::Draining if self.last_report.is_none() => ReplicaState::Draining,
            ReplicaState::Joining | ReplicaState::Draining if has_all => ReplicaState::Active,
            ReplicaState::Draining => ReplicaState::Joining,
            state => state,
        };
        (next != self.row.state).then_some(next)
    }
}

#[cfg(test)]
mod tests;
