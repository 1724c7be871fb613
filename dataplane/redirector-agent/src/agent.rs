//! [`RedirectorAgent`]: receives states and orders, has the maps written, scans for owned sessions, and makes reports.
//!
//! It connects the other modules, which make the decisions.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use canal_model::ids::{AzName, BackendName, ServiceId};
use canal_model::program::{Resource, ResourceKind};
use canal_runtime::drain::{DrainObserver, DrainWatcher};
use canal_runtime::metrics::Registry;
use canal_southbound_client::controller_client::ControllerEndpoint;
use canal_southbound_client::controller_client::report_loop::{ReportHandler, ReportLoop};
use canal_southbound_client::{ResourceState, Update, UpdateSource};
use canal_wire::fleet::fleet_client::FleetClient;
use canal_wire::fleet::{self, ReplicaReportRequest, ReplicaReportResponse, ReportMark};
use serde_json::json;
use tokio::sync::watch;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use crate::counts::RedirectorCounters;
use crate::desired_maps::{
    ContentRules, ControllerOrders, RedirectorMapContent, decide_behind, decide_content,
    decide_soft_drain, table,
};
use crate::heads::{HeadChange, HeadMoves, decide_changes};
use crate::map_reconciler::{RedirectorMaps, RedirectorReconciler};
use crate::receive::Receive;
use crate::report;
use crate::session_scan::{OwnedSessions, SessionScanError, SessionScanner};
use crate::session_search::SessionSearches;

/// Resource kinds from which the maps' content is derived.
const KINDS: [ResourceKind; 4] = [
    ResourceKind::Tenant,
    ResourceKind::Table,
    ResourceKind::Replica,
    ResourceKind::Throttle,
];
/// Interval of retrying failed map writes, checking the programs, and reading the counters. So a
/// write that failed once, or a program that something else removed, is repaired within a second.
const AUDIT_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of a session scan. An incomplete scan proves nothing, so it is discarded. Nobody
/// measured how many sessions need as long.
const SCAN_TIMEOUT: Duration = Duration::from_secs(5);
/// Rest after a scan as a multiple of its duration: scans use a fiftieth of a core, at most.
const SCAN_REST_FACTOR: u32 = 49;
/// Scan interval while nothing changes. The controller waits for two scans after all have confirmed
/// a table, which the replica cannot know. Two scans are then within half a second; their cost is
/// bounded by the factor above.
const SCAN_IDLE_INTERVAL: Duration = Duration::from_millis(200);

/// Configuration of the agent of this replica.
#[derive(Debug, Clone)]
pub struct ReplicaConfig {
    pub az: AzName,
    pub backend: BackendName,
    pub underlay: Ipv4Addr,
    pub version: String,
    /// Controllers that receive the reports; `None`: no report is sent.
    pub controller: Option<ControllerEndpoint>,
    /// File that stores the orders. A process that starts while no controller responds then knows
    /// its number and its edge.
    pub orders: PathBuf,
    /// Scanner that finds the sessions of this replica.
    pub sockets: SessionScanner,
}

/// Returns the gateway's sessions: open now, and accepted since it started.
pub type SessionCountFn = Box<dyn Fn() -> (u64, u64) + Send + Sync>;

/// Notifies the gateway of buckets whose head moved, so that their connections move to the new
/// replica.
pub type RebalanceFn = Box<dyn Fn(ServiceId, HeadChange) + Send + Sync>;

/// A running agent. Clones share it.
#[derive(Clone)]
pub struct RedirectorAgent {
    inner: Arc<Inner>,
}

struct Inner {
    config: ReplicaConfig,
    counts: RedirectorCounters,
    sessions: SessionCountFn,
    agent_state: Mutex<AgentState>,
    scan: Mutex<SessionScan>,
    searches: SessionSearches,
    news: watch::Sender<u64>,
    soft_drain: watch::Sender<bool>,
    rebalance: OnceLock<RebalanceFn>,
}

struct AgentState {
    reconciler: RedirectorReconciler,
    resources: Vec<Arc<Resource>>,
    orders: Option<ControllerOrders>,
    /// Mark of the newest response.
    mark: Option<ReportMark>,
    desired: RedirectorMapContent,
    moves: HeadMoves,
    /// Generation of the newest state.
    newest_generation: u64,
    /// Generation of the newest state that is completely in the maps.
    generation: u64,
    /// Number of elements that could not be written.
    failed: usize,
    draining: bool,
    leaving: bool,
    /// Start of the drain, by order or by this process.
    drains_since: Option<Instant>,
    /// True if a state came from the controller, and not only from disk.
    live: bool,
    /// True if the replica is in a chain behind another head, so that it may own sessions that the
    /// controller must know.
    is_behind: bool,
    /// Receive distribution, with the edge for which it was computed.
    receive: Option<(Ipv4Addr, Receive)>,
}

/// Results of the last two scans.
#[derive(Default)]
struct SessionScan {
    owned: OwnedSessions,
    /// Result of the scan before. The kernel's list may skip a socket that is moved in it during a
    /// scan.
    before: OwnedSessions,
    /// Marks that the replica had when the two scans began: that of the scan before comes first.
    marks: [Option<ReportMark>; 2],
    generation: u64,
    versions: std::collections::HashMap<u32, u32>,
    /// Start and duration of the last scan.
    last: Option<(Instant, Duration)>,
    error: String,
}

/// State on which the need for a scan depends.
#[derive(Default)]
struct ScanPurpose {
    needed: bool,
    draining: bool,
    generation: u64,
    versions: std::collections::HashMap<u32, u32>,
    mark: Option<ReportMark>,
}

/// Decision whether to scan now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScanDecision {
    /// The controller does not need the sessions.
    NotNeeded,
    Pause,
    Scan,
}

/// Decides whether to scan. A change of tables or of results makes a scan due at once, but never
/// before the rest of the last one is over.
fn decide_turn(purpose: &ScanPurpose, scan: &SessionScan, now: Instant) -> ScanDecision {
    let buckets = |owned: &OwnedSessions| {
        owned
            .iter()
            .map(|(id, of)| (*id, of.buckets))
            .collect::<Vec<_>>()
    };
    let moves = || {
        purpose.draining
            || (purpose.generation, &purpose.versions) != (scan.generation, &scan.versions)
            || buckets(&scan.owned) != buckets(&scan.before)
    };
    match scan
        .last
        .map(|(begun, took)| (now.saturating_duration_since(begun), took))
    {
        _ if !purpose.needed => ScanDecision::NotNeeded,
        Some((since, took)) if since < took * (SCAN_REST_FACTOR + 1) => ScanDecision::Pause,
        Some((since, _)) if since < SCAN_IDLE_INTERVAL && !moves() => ScanDecision::Pause,
        _ => ScanDecision::Scan,
    }
}

impl RedirectorAgent {
    /// Adopts the maps and starts to report. Nothing is written to the maps before the first
    /// [`RedirectorAgent::apply`].
    ///
    /// # Errors
    /// The entries of an earlier process cannot be read from the maps.
    pub fn start(
        config: ReplicaConfig,
        kernel: Box<dyn RedirectorMaps>,
        sessions: SessionCountFn,
        registry: &Registry,
        drain: &DrainWatcher,
    ) -> Result<Self, String> {
        let counts = RedirectorCounters::new(registry);
        let orders = read_orders(&config.orders);
        let state = AgentState {
            reconciler: RedirectorReconciler::adopt(kernel, counts.clone())?,
            resources: Vec::new(),
            orders,
            mark: None,
            desired: RedirectorMapContent::default(),
            moves: HeadMoves::default(),
            newest_generation: 0,
            generation: 0,
            failed: 0,
            draining: false,
            leaving: false,
            drains_since: None,
            live: false,
            is_behind: false,
            receive: None,
        };
        let inner = Arc::new(Inner {
            counts,
            sessions,
            agent_state: Mutex::new(state),
            scan: Mutex::default(),
            searches: SessionSearches::default(),
            news: watch::channel(0).0,
            soft_drain: watch::channel(false).0,
            rebalance: OnceLock::new(),
            config,
        });
        let agent = Self { inner };
        // Without a controller nobody reads reports or queries sessions.
        if let Some(reports) = agent.inner.report_loop() {
            tokio::spawn(reports.run(agent.inner.clone(), drain.watcher()));
            tokio::spawn(search_sessions(agent.inner.clone(), drain.watcher()));
        }
        // Sessions need correct maps until the drain ends, so its begin does not stop the audit.
        let (audited, end) = (agent.clone(), drain.watcher());
        tokio::spawn(async move {
            tokio::select! {
                () = audited.audit() => {}
                () = end.forced() => {}
            }
        });
        Ok(agent)
    }

    /// Applies a state by writing the differences. The state is complete, so a lost update costs
    /// nothing. Returns the resources that are omitted because they exceed their tenant's share of
    /// a map: kind, name and reason.
    pub fn apply(
        &self,
        update: &Update,
        resources: &ResourceState,
    ) -> Vec<(ResourceKind, String, String)> {
        let concerns = update.upserts.iter().any(|r| KINDS.contains(&r.kind()))
            || update.removals.iter().any(|(k, _)| KINDS.contains(k));
        let mut state = self.inner.maps_are_current();
        // The first state from the controller is always written, because only such a state may
        // remove stale entries.
        let first = state.newest_generation == 0
            || (!state.live && update.origin == UpdateSource::Controller);
        state.live |= update.origin == UpdateSource::Controller;
        state.newest_generation = update.generation.0;
        if concerns || first || update.origin == UpdateSource::Snapshot {
            state.resources = KINDS
                .iter()
                .flat_map(|k| resources.of(*k).cloned())
                .collect();
            self.inner.settle(&mut state);
        } else if state.failed == 0 {
            // Nothing of this state concerns the maps, so they contain it already.
            state.generation = state.newest_generation;
        }
        let omitted = state
            .desired
            .omitted
            .iter()
            .map(|entry| (entry.kind, entry.name.clone(), entry.why.clone()))
            .collect();
        drop(state);
        self.inner.record_state();
        omitted
    }

    /// Starts socket steering, which delivers sessions to the gateway from now on.
    ///
    /// # Errors
    /// The kernel does not accept one of the gateway's sockets.
    pub fn start_steering(&self) -> Result<(), String> {
        self.inner
            .maps_are_current()
            .reconciler
            .kernel()
            .start_steering()
    }

    /// Releases the gateway's sockets if socket steering was never started.
    pub fn stop_steering(&self) {
        self.inner
            .maps_are_current()
            .reconciler
            .kernel()
            .stop_steering();
    }

    /// Reports from now on that this replica wants no new sessions.
    pub fn drain(&self) {
        let mut state = self.inner.maps_are_current();
        state.draining = true;
        self.inner.update_soft_drain(&mut state);
        drop(state);
        self.inner.record_state();
    }

    /// Returns a receiver of whether clients should reconnect elsewhere: this replica drains, and
    /// new sessions go to others.
    pub fn soft_drain(&self) -> watch::Receiver<bool> {
        self.inner.soft_drain.subscribe()
    }

    /// Sets the function that is notified of buckets whose head moved, from the next state on. Only
    /// the first call has an effect.
    pub fn rebalance_with(&self, rebalance: RebalanceFn) {
        let _ = self.inner.rebalance.set(rebalance);
    }

    /// Sends the last report: everything is closed, or ends now.
    pub async fn leave(&self) {
        let Some(reports) = self.inner.report_loop() else {
            return;
        };
        {
            let mut state = self.inner.maps_are_current();
            (state.draining, state.leaving) = (true, true);
        }
        reports
            .send_last::<Inner>(self.inner.state(), report::LAST_TIMEOUT)
            .await;
    }

    /// Reports readiness: there are bucket tables and orders.
    ///
    /// # Errors
    /// Returns the missing condition as text for the operator.
    pub fn ready(&self) -> Result<(), String> {
        let state = self.inner.maps_are_current();
        match () {
            () if state.newest_generation == 0 => {
                Err("the redirector has no bucket tables yet".into())
            }
            () if state.orders.is_none() => {
                Err("no controller has accepted a report of this replica yet".into())
            }
            () => Ok(()),
        }
    }

    /// Returns the agent's part of `/config_dump`.
    pub fn dump(&self) -> serde_json::Value {
        let state = self.inner.maps_are_current();
        let scan = self.inner.record_scan();
        let mut tables: Vec<_> = state
            .reconciler
            .have()
            .tables
            .values()
            .filter_map(|r| table(r))
            .collect();
        tables.sort_by(|a, b| a.service.cmp(&b.service));
        let own = state.orders.as_ref().map(|o| o.number);
        let row = |t: &&canal_model::program::BucketTable| {
            let heads = t
                .chains
                .iter()
                .filter(|c| c.first().map(|n| n.get()) == own)
                .count();
            let of = scan.owned.get(&t.id).copied().unwrap_or_default();
            json!({
                "service": t.service.to_string(), "id": t.id.get(), "vni": t.vni.get(), "version": t.version,
                "heads_here": heads, "owned_buckets": of.buckets.count_ones(), "owned_sessions": of.sessions,
            })
        };
        json!({
            "generation": state.generation,
            "pending_entries": state.failed,
            "draining": state.draining,
            "orders": state.orders.as_ref().map(|o| json!({
                "number": o.number, "edge": o.edge.map(|e| e.to_string()), "drain": o.drain,
                "hosts": o.hosts.iter().map(ToString::to_string).collect::<Vec<_>>(),
            })),
            "replicas": state.reconciler.have().replicas.iter()
                .map(|(n, s)| json!({"number": n, "underlay": s.address.to_string(), "up": s.up})).collect::<Vec<_>>(),
            "tables": tables.iter().map(row).collect::<Vec<_>>(),
            "scanned_generation": scan.generation,
            "scan_error": scan.error,
        })
    }

    async fn audit(&self) {
        loop {
            tokio::time::sleep(AUDIT_INTERVAL).await;
            let mut state = self.inner.maps_are_current();
            if state.failed > 0 {
                self.inner.settle(&mut state);
            } else {
                self.inner.update_soft_drain(&mut state);
            }
            match state.reconciler.kernel().repair() {
                Ok(true) => {
                    self.inner.counts.repaired();
                    tracing::warn!("redirector: BPF programs were removed externally; reinstalled");
                }
                Ok(false) => {}
                Err(error) => tracing::error!(
                    error,
                    "redirector: programs are missing and cannot be attached, so sessions are not redirected; retrying"
                ),
            }
            self.inner.measure_receive(&mut state, true);
            match state.reconciler.kernel().received_by_core() {
                Ok(cores) => self.inner.counts.received(&cores),
                Err(error) => tracing::warn!(
                    error,
                    "redirector: cannot read the packets per core; the metrics stay at their last values"
                ),
            }
            match state.reconciler.kernel().counts() {
                Ok(counts) => self.inner.counts.packets(&counts),
                Err(error) => tracing::warn!(
                    error,
                    "redirector: cannot read the programs' counters; the metrics stay at their last values"
                ),
            }
        }
    }
}

impl Inner {
    fn maps_are_current(&self) -> MutexGuard<'_, AgentState> {
        self.agent_state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn record_scan(&self) -> MutexGuard<'_, SessionScan> {
        self.scan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the loop that sends this replica's reports, or `None` if no controller is
    /// configured.
    fn report_loop(&self) -> Option<ReportLoop> {
        let controller = self.config.controller.clone()?;
        Some(ReportLoop {
            controller,
            timing: report::TIMING,
            outcomes: self.counts.reports(),
        })
    }

    fn record_state(&self) {
        self.news.send_modify(|n| *n += 1);
    }

    /// Determines which tunnels from the AZ's edge spread evenly over this replica's cores. With
    /// `again` it repeats that for a known edge, because the steering may have changed.
    fn measure_receive(&self, state: &mut AgentState, again: bool) {
        let Some(edge) = state.orders.as_ref().and_then(|orders| orders.edge) else {
            return;
        };
        if !again && state.receive.as_ref().is_some_and(|(of, _)| *of == edge) {
            return;
        }
        match state.reconciler.kernel().receive(edge) {
            Ok(receive) => {
                if state
                    .receive
                    .as_ref()
                    .is_none_or(|(_, before)| *before != receive)
                {
                    tracing::info!(
                        cores = receive.cores,
                        tunnels = receive.ports.len(),
                        "redirector: measured the receiving cores and the tunnels that spread over them"
                    );
                }
                state.receive = Some((edge, receive));
            }
            Err(error) => tracing::warn!(
                error,
                "redirector: cannot find tunnels that spread over the cores; edges use arbitrary ones"
            ),
        }
    }

    /// Writes the desired content. A generation counts once all of it is in the maps.
    fn settle(&self, state: &mut AgentState) {
        // Before the first state every entry of an earlier process would look stale.
        if state.newest_generation == 0 {
            return;
        }
        let rules = ContentRules {
            present: Some(&state.reconciler),
        };
        let wanted = decide_content(
            state.resources.iter(),
            &self.config.az,
            state.orders.as_ref(),
            &rules,
        );
        state.desired = wanted;
        let AgentState {
            reconciler,
            desired: wanted,
            orders,
            live,
            moves,
            ..
        } = state;
        let number = orders.as_ref().map_or(0, |o| o.number);
        // Before `reconcile`, which overwrites the tables that the moves are computed from.
        let changes = decide_changes(&reconciler.have().tables, &wanted.tables, number);
        let failed = reconciler.reconcile(wanted, *live);
        for (service, change) in moves.take(
            changes,
            &reconciler.have().tables,
            &reconciler.have().replicas,
        ) {
            tracing::debug!(
                service = service.get(),
                left = change.left.count_ones(),
                returned = change.returned.count_ones(),
                "redirector: heads moved"
            );
            // The gateway sets the function before any session is steered here.
            if let Some(rebalance) = self.rebalance.get() {
                rebalance(service, change);
            }
        }
        // Only sessions that are owned behind another head matter to the controller. Number 0 is in
        // no table: the controller has not numbered this replica yet.
        let is_behind = number != 0
            && wanted
                .tables
                .values()
                .filter_map(|r| table(r))
                .any(|t| decide_behind(t, number));
        (state.failed, state.is_behind) = (failed, is_behind);
        // A report of this generation promises that all of it is in the maps.
        if failed == 0 {
            state.generation = state.newest_generation;
        }
        self.update_soft_drain(state);
    }

    /// Recomputes whether clients should reconnect elsewhere.
    fn update_soft_drain(&self, state: &mut AgentState) {
        let drains = state.draining || state.orders.as_ref().is_some_and(|o| o.drain);
        state.drains_since = drains.then(|| state.drains_since.unwrap_or_else(Instant::now));
        let number = state.orders.as_ref().map_or(0, |o| o.number);
        let parts = decide_soft_drain(
            state.drains_since.map(|since| since.elapsed()),
            number,
            state
                .reconciler
                .have()
                .tables
                .values()
                .filter_map(|r| table(r)),
        );
        self.soft_drain
            .send_if_modified(|was| std::mem::replace(was, parts) != parts);
    }

    fn purpose(&self) -> ScanPurpose {
        let state = self.maps_are_current();
        let versions = state
            .reconciler
            .have()
            .tables
            .iter()
            .filter_map(|(id, r)| Some((*id, table(r)?.version)))
            .collect();
        let draining = state.draining || state.orders.as_ref().is_some_and(|o| o.drain);
        ScanPurpose {
            needed: state.is_behind || draining,
            draining,
            generation: state.generation,
            versions,
            mark: state.mark,
        }
    }

    /// Scans the kernel's sockets if a scan is due. The recorded table versions are those from
    /// before the scan.
    async fn scan_sessions(&self) {
        let purpose = self.purpose();
        let begun = Instant::now();
        {
            let mut scan = self.record_scan();
            match decide_turn(&purpose, &scan, begun) {
                ScanDecision::NotNeeded => {
                    // The report then states an empty result at the present generation.
                    *scan = SessionScan {
                        generation: purpose.generation,
                        // Of the two scans that a report joins.
                        marks: [purpose.mark; 2],
                        ..SessionScan::default()
                    };
                    return;
                }
                // Scans cost CPU in proportion to the sockets, so they do not follow each other
                // without a pause.
                ScanDecision::Pause => {
                    self.counts.count_scan("spared", Duration::ZERO);
                    return;
                }
                ScanDecision::Scan => {}
            }
        }
        // Reading from the kernel blocks, so no worker of the runtime does it.
        let sockets = self.config.sockets.clone();
        let read = tokio::task::spawn_blocking(move || sockets.scan(begun + SCAN_TIMEOUT)).await;
        let took = begun.elapsed();
        let mut scan = self.record_scan();
        scan.last = Some((begun, took));
        // A scan that panicked counts as a failed one.
        match read.unwrap_or_else(|e| Err(SessionScanError::Io(std::io::Error::other(e)))) {
            Ok(owned) => {
                self.counts.count_scan("ok", took);
                self.counts
                    .owned(owned.values().map(|o| u64::from(o.sessions)).sum());
                scan.before = std::mem::replace(&mut scan.owned, owned);
                // A report joins the last two scans, so it needs the mark from before the older
                // one.
                scan.marks = [scan.marks[1], purpose.mark];
                (scan.generation, scan.versions) = (purpose.generation, purpose.versions);
                scan.error.clear();
            }
            Err(error) => {
                // The last complete scan stays valid, with the generation at which it was made.
                self.counts.count_scan(
                    if matches!(error, SessionScanError::Late) {
                        "late"
                    } else {
                        "failed"
                    },
                    took,
                );
                scan.error = error.to_string();
                tracing::warn!(%error, "redirector: could not refresh the owned-session set; keeping the previous one");
            }
        }
    }

    fn state(&self) -> ReplicaReportRequest {
        let (sessions, accepted) = (self.sessions)();
        let (draining, leaving, receive) = {
            let state = self.maps_are_current();
            let receive = state
                .receive
                .as_ref()
                .map(|(_, receive)| receive.clone())
                .unwrap_or_default();
            (state.draining, state.leaving, receive)
        };
        let scan = self.record_scan();
        ReplicaReportRequest {
            backend: self.config.backend.to_string(),
            az: self.config.az.to_string(),
            underlay: self.config.underlay.to_string(),
            generation: scan.generation,
            draining,
            terminating: leaving,
            owned: if leaving { Vec::new() } else { owned(&scan) },
            sessions,
            accepted,
            version: self.config.version.clone(),
            cores: u32::try_from(receive.cores).unwrap_or(u32::MAX),
            tunnel_ports: receive
                .ports
                .iter()
                .flat_map(|port| port.to_be_bytes())
                .collect(),
            found: self.searches.answers(),
            // The report contains the sessions of both scans. It therefore proves the absence of a
            // session only as of the begin of the older scan.
            scanned_after: scan.marks[0],
        }
    }
}

/// Returns the owned sessions for the report: those that the last scan or the one before it found.
fn owned(scan: &SessionScan) -> Vec<fleet::ServiceOwnership> {
    let mut all = scan.owned.clone();
    for (id, of) in &scan.before {
        all.entry(*id).or_default().buckets |= of.buckets;
    }
    let version = |id: u32| scan.versions.get(&id).copied().unwrap_or(0);
    all.into_iter()
        .map(|(id, of)| fleet::ServiceOwnership {
            service: id.get(),
            table_version: version(id.get()),
            buckets: of.buckets.to_le_bytes().to_vec(),
            sessions: of.sessions,
        })
        .collect()
}

impl ReportHandler for Inner {
    type Report = ReplicaReportRequest;
    type Answer = ReplicaReportResponse;

    async fn report(&self) -> Option<ReplicaReportRequest> {
        self.scan_sessions().await;
        Some(self.state())
    }

    async fn send(
        fleet: &mut FleetClient<Channel>,
        report: Request<ReplicaReportRequest>,
    ) -> Result<Response<ReplicaReportResponse>, Status> {
        fleet.replica_report(report).await
    }

    fn requested_interval_ms(answer: &ReplicaReportResponse) -> u32 {
        answer.next_ms
    }

    fn apply(&self, answer: ReplicaReportResponse) -> Result<(), String> {
        let orders = report::decide_orders(&answer)?;
        let mut state = self.maps_are_current();
        state.mark = answer.mark;
        if state.orders.as_ref() != Some(&orders) {
            if state.orders.as_ref().map(|o| (o.number, o.edge))
                != Some((orders.number, orders.edge))
            {
                keep_orders(&self.config.orders, &orders);
            }
            state.orders = Some(orders);
            self.measure_receive(&mut state, false);
            self.settle(&mut state);
        }
        drop(state);
        self.searches.set_queries(&answer.queries);
        Ok(())
    }

    fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }
}

/// Searches for the sessions that operators query, and has each result reported at once. It runs
/// beside the reports, so a slow search delays none of them.
async fn search_sessions(agent: Arc<Inner>, end: DrainObserver) {
    let found = || agent.record_state();
    tokio::select! {
        () = agent.searches.run(&agent.config.sockets, &agent.counts, found) => {}
        () = end.forced() => {}
    }
}

/// Reads the orders that an earlier process stored. A drain is not stored: a replica that was
/// restarted shall serve.
pub(crate) fn read_orders(path: &std::path::Path) -> Option<ControllerOrders> {
    let value: serde_json::Value = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    let number = u16::try_from(value["number"].as_u64()?).ok()?;
    let address = |v: &serde_json::Value| v.as_str()?.parse().ok();
    let hosts = value["hosts"]
        .as_array()?
        .iter()
        .filter_map(address)
        .collect();
    Some(ControllerOrders {
        number,
        edge: address(&value["edge"]),
        hosts,
        drain: false,
    })
}

fn keep_orders(path: &std::path::Path, orders: &ControllerOrders) {
    let hosts: Vec<String> = orders.hosts.iter().map(ToString::to_string).collect();
    let text = json!({"number": orders.number, "edge": orders.edge.map(|e| e.to_string()), "hosts": hosts}).to_string();
    let (new, write) = (path.with_extension("new"), |new: &PathBuf| {
        std::fs::write(new, text).and_then(|()| std::fs::rename(new, path))
    });
    if let Err(error) = write(&new) {
        tracing::warn!(path = %path.display(), %error, "redirector: could not store the controller's orders; a restart without a controller does not know them");
    }
}

#[cfg(test)]
mod tests;
