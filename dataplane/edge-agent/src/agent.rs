//! The process: the tasks it starts, their order, and its end. The decisions are in
//! [`crate::desired_maps`], [`crate::health`] and [`decide_repair`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use canal_interfaces::Interfaces;
use canal_model::program::ResourceKind;
use canal_offload::OffloadError;
use canal_runtime::admin::{self, AdminAddresses, AdminListenError, AdminRoutes};
use canal_runtime::drain::{self, DrainObserver, DrainTrigger, DrainWatcher};
use canal_runtime::logging::LogLevelHandle;
use canal_runtime::metrics::{MetricFamily, Registry};
use canal_southbound_client::controller_client::report_loop::{ReportHandler, ReportLoop};
use canal_southbound_client::{
    RefusedResource, ResourceState, Subscriber, SubscriberConfig, SubscriptionStatus, Update,
};
use canal_telemetry::observe::{self, ObserveSources};
use canal_wire::fleet::fleet_client::FleetClient;
use canal_wire::fleet::{EdgeReportRequest, EdgeReportResponse, ReplicaProbe, SessionQuery};
use tokio::sync::{oneshot, watch};
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use crate::config::{
    EdgeConfig, PROBE_INTERVAL, PROBE_TIMEOUT, PROGRAM_CHECK_INTERVAL, READINESS_PORT,
};
use crate::counts::EdgeCounters;
use crate::desired_maps::Tunnels;
use crate::dump::EdgeDump;
use crate::kernel::KernelMaps;
use crate::map_reconciler::{MapReconciler, ProbeTarget};
use crate::path::decide_path;
use crate::probe::{ProbeConfig, ProbeListener, ProbeOutcome, Prober};
use crate::report;

/// Resource kinds to which an edge subscribes.
pub const KINDS: [ResourceKind; 5] = [
    ResourceKind::Tenant,
    ResourceKind::Node,
    ResourceKind::Replica,
    ResourceKind::Address,
    ResourceKind::Table,
];
/// Maximum duration of a drain. No task of the agent takes longer than a report. A report ends
/// after `REPORT_TIMEOUT`, 1 s, so the limit only bounds an agent that is stuck. Packets do not
/// wait for it: the program forwards without the agent.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(5);
/// Time that tasks may take beyond the drain's deadline. Without it, a task that reacts to the
/// forced drain a moment late would be cut off and logged as left behind. Nobody measured it.
const GRACE: Duration = Duration::from_secs(2);
/// Ratio of rest to duration for reading all maps: large maps are read less often, so that reading
/// takes a small share of the time. With 20 it is less than a twentieth of one core.
const CHECK_REST_FACTOR: u32 = 20;

/// The reason that the edge could not start or had to end.
#[derive(Debug, thiserror::Error)]
pub enum EdgeError {
    /// The kernel rejected the program, the maps or the device.
    #[error("{0}")]
    Kernel(#[from] OffloadError),
    /// The maps of an earlier process cannot be read.
    #[error(
        "the maps under {dir} cannot be read: {why}; fix: remove them with `canal-edge --detach`, which also stops all forwarding"
    )]
    Maps {
        dir: std::path::PathBuf,
        why: String,
    },
    /// The process cannot listen on an admin, metrics or readiness address.
    #[error("{0}")]
    Listen(#[from] AdminListenError),
    /// A directory, a thread or a signal handler could not be created.
    #[error("{what}: {source}")]
    Start {
        what: &'static str,
        source: std::io::Error,
    },
    /// A task of the agent panicked. The process ends, because an agent that has silently lost a
    /// task would be a gray failure.
    #[error(
        "{0} of the agent panicked; the process ends so that its supervisor restarts it; packets are forwarded meanwhile"
    )]
    Lost(&'static str),
}

fn start<T>(what: &'static str, r: std::io::Result<T>) -> Result<T, EdgeError> {
    r.map_err(|source| EdgeError::Start { what, source })
}

/// State that all tasks share.
#[derive(Clone)]
struct AgentShared {
    reconciler: Arc<Mutex<MapReconciler<KernelMaps>>>,
    counts: EdgeCounters,
    /// Count of new findings. A change triggers a report.
    news: Arc<watch::Sender<u64>>,
    targets: Arc<watch::Sender<BTreeMap<ProbeTarget, bool>>>,
}

impl AgentShared {
    fn reconciler(&self) -> MutexGuard<'_, MapReconciler<KernelMaps>> {
        // The reconciler's state is consistent between its calls, so a panic elsewhere does not
        // harm it.
        self.reconciler
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn show_replicas(&self, targets: &BTreeMap<ProbeTarget, bool>) {
        let up = targets.values().filter(|up| **up).count();
        self.counts.replicas(up, targets.len() - up);
    }

    /// Handles a new state: updates the prober's targets, and attaches the program if it waited for
    /// a first state.
    fn on_state(&self) {
        let mut reconciler = self.reconciler();
        let targets = reconciler.targets().clone();
        if reconciler.status().has_state && !reconciler.tables().is_live() {
            // The maps are filled now, so replacing an earlier process's program loses no
            // information.
            match reconciler.tables().attach() {
                Ok(()) => self.counts.attached(true),
                Err(error) => {
                    tracing::error!(%error, "edge: could not attach the program to the device; retrying")
                }
            }
        }
        drop(reconciler);
        self.show_replicas(&targets);
        self.targets.send_if_modified(|now| {
            let same = now.keys().eq(targets.keys());
            *now = targets;
            !same
        });
        self.news.send_modify(|n| *n += 1);
    }
}

impl ProbeListener for AgentShared {
    fn on_probe(&self, target: &ProbeTarget, outcome: ProbeOutcome, changed: Option<bool>) {
        self.counts.probe(outcome.name());
        let Some(up) = changed else { return };
        let mut reconciler = self.reconciler();
        if !reconciler.record_probe_result(target, up) {
            return;
        }
        let targets = reconciler.targets().clone();
        drop(reconciler);
        self.counts.change(up);
        self.show_replicas(&targets);
        // A probe task that is restarted later begins with this state.
        self.targets.send_if_modified(|now| {
            *now = targets;
            false
        });
        tracing::warn!(replica = %target.name, address = %target.address, up, last = outcome.name(), "edge: probes changed the state of a replica");
        self.news.send_modify(|n| *n += 1);
    }
}

/// Makes reports from the reconciler's state and applies the orders of the controller.
struct EdgeReporter {
    shared: AgentShared,
    config: EdgeConfig,
    southbound: watch::Receiver<SubscriptionStatus>,
    /// Version of this controller's tunnels that the edge has; 0 for none.
    tunnels_version: AtomicU64,
    /// Sessions whose path operators request.
    queries: Mutex<Vec<SessionQuery>>,
}

impl EdgeReporter {
    /// Returns the report to send now, or `None` if this edge forwards nothing; it then sends no
    /// report at all.
    fn state(&self) -> Option<EdgeReportRequest> {
        let mut reconciler = self.shared.reconciler();
        let forwards = reconciler.status().has_state && reconciler.tables().is_attached();
        let seen = reconciler
            .targets()
            .iter()
            .map(|(t, up)| ReplicaProbe {
                replica: t.name.to_string(),
                up: *up,
            })
            .collect();
        let queries = self.queries.lock().unwrap_or_else(PoisonError::into_inner);
        let paths = queries
            .iter()
            .filter_map(|query| decide_path(reconciler.content(), &self.config.device, query))
            .collect();
        drop((reconciler, queries));
        forwards.then(|| EdgeReportRequest {
            az: self.config.az.to_string(),
            underlay: self.config.underlay.to_string(),
            anycast: self.config.device.address.to_string(),
            tunnels_version: self.tunnels_version.load(Ordering::Relaxed),
            paths,
            generation: self.southbound.borrow().generation,
            seen,
            version: env!("CARGO_PKG_VERSION").into(),
        })
    }
}

impl ReportHandler for EdgeReporter {
    type Report = EdgeReportRequest;
    type Answer = EdgeReportResponse;

    fn begin(&self) {
        self.tunnels_version.store(0, Ordering::Relaxed);
    }

    async fn report(&self) -> Option<EdgeReportRequest> {
        self.state()
    }

    async fn send(
        fleet: &mut FleetClient<Channel>,
        report: Request<EdgeReportRequest>,
    ) -> Result<Response<EdgeReportResponse>, Status> {
        fleet.edge_report(report).await
    }

    fn requested_interval_ms(answer: &EdgeReportResponse) -> u32 {
        answer.next_ms
    }

    fn apply(&self, answer: EdgeReportResponse) -> Result<(), String> {
        let orders = report::read_orders(answer, self.tunnels_version.load(Ordering::Relaxed))?;
        let mut reconciler = self.shared.reconciler();
        reconciler.set_hosts(orders.hosts);
        if let Some((version, tunnels)) = orders.tunnels {
            // A number of tunnels that the operator configured takes precedence.
            reconciler.set_tunnels(if self.config.has_own_tunnels {
                Tunnels::new()
            } else {
                tunnels
            });
            self.tunnels_version.store(version, Ordering::Relaxed);
        }
        drop(reconciler);
        *self.queries.lock().unwrap_or_else(PoisonError::into_inner) = orders.queries;
        Ok(())
    }

    fn news(&self) -> watch::Receiver<u64> {
        self.shared.news.subscribe()
    }
}

/// Runs the agent until SIGTERM, SIGINT or `/quitquitquit`. Program and maps stay in the kernel.
/// Returns `false` if the drain had to abort something.
///
/// # Errors
/// Returns an [`EdgeError`] if the agent cannot start, or if one of its tasks ends early.
pub async fn run(config: EdgeConfig, level: LogLevelHandle) -> Result<bool, EdgeError> {
    let signals = start("catching signals", drain::TerminationSignals::catch())?;
    // 0 leaves the hard limit as it is; the soft limit is raised to it.
    canal_runtime::raise_file_limit(0);
    start(
        "creating the data directory (--data-dir)",
        std::fs::create_dir_all(&config.data_dir),
    )?;
    let (process, process_drain) = drain::tree();
    let process = Arc::new(process);
    let (trigger, traffic) = process_drain.branch();
    let registry = Registry::new();
    let shared = begin(&config, &registry)?;
    let subscriber = subscribe(&config, &shared, &registry, process_drain.clone());
    let dump = Arc::new(EdgeDump {
        config: config.clone(),
        reconciler: shared.reconciler.clone(),
        southbound: subscriber.watch(),
        traffic: traffic.watcher(),
    });
    // The agent serves no connections, so the drain of this branch waits for nothing.
    drop(traffic);
    serve_operators(
        &config,
        dump.clone(),
        &registry,
        level,
        &process,
        &process_drain,
    )?;
    let sources = ObserveSources {
        dump: Box::new(move |_| dump.json()),
        tap: None, // An edge serves no requests, so it has neither a tap nor an access log.
        logs: None,
        registry: registry.clone(),
    };
    tokio::spawn(observe::serve(
        subscriber.connections(),
        sources,
        process_drain.watcher(),
    ));
    let (prober, mut lost) = spawn_prober(shared.clone(), process_drain.watcher())?;
    let reporter = EdgeReporter {
        shared: shared.clone(),
        config: config.clone(),
        southbound: subscriber.watch(),
        tunnels_version: AtomicU64::new(0),
        queries: Mutex::default(),
    };
    let reports = ReportLoop {
        controller: config.controller.clone(),
        timing: report::TIMING,
        outcomes: shared.counts.reports(),
    };
    let reports = tokio::spawn(reports.run(Arc::new(reporter), process_drain.watcher()));
    let guard = tokio::spawn(guard(shared.clone(), process_drain.watcher()));
    let interfaces = Interfaces {
        bindings: config.interface_bindings.clone(),
        pin_dir: config.device.pin_dir.clone(),
    };
    let interfaces = tokio::spawn(canal_interfaces::run(
        interfaces,
        registry.clone(),
        process_drain.watcher(),
    ));
    // None of these tasks ends before the process does, unless it panics.
    let clean = tokio::select! {
        ended = drain::on_signals(signals, trigger, DRAIN_LIMIT, GRACE) => ended,
        // The program forwards without the agent, which its supervisor starts again.
        _ = reports => return Err(EdgeError::Lost("the reporter")),
        _ = guard => return Err(EdgeError::Lost("the guard")),
        _ = interfaces => return Err(EdgeError::Lost("the interface guard's agent")),
        _ = &mut lost => return Err(EdgeError::Lost("the prober")),
    };
    tracing::info!(
        clean,
        "edge: the agent ends; the program stays attached to the device and forwards with the current maps"
    );
    // The subscriber writes its state file before the drain ends its task.
    subscriber.stop().await;
    // This ends the prober. Its thread is joined where waiting blocks no task; a panic is ignored.
    process.force();
    let _ = tokio::task::spawn_blocking(move || prober.join()).await;
    Ok(clean)
}

/// Loads program and maps and creates the shared state, before any connection to the controller.
fn begin(config: &EdgeConfig, registry: &Registry) -> Result<AgentShared, EdgeError> {
    // Istio's dashboards read the version of a component from this name.
    let build = MetricFamily::new(
        "istio_build",
        "Version of the running process.",
        &["component", "tag"],
    );
    registry
        .gauges(build)
        .shared(&["canal-edge", env!("CARGO_PKG_VERSION")])
        .set(1);
    let counts = EdgeCounters::new(registry);
    let mut kernel = KernelMaps::load(&config.device)?;
    counts.verified("canal_edge", kernel.verified_instructions()?);
    // Not an error: the edge forwards as long as this process runs.
    if !kernel.is_durable() {
        tracing::warn!(pins = %config.device.pin_dir.display(), "edge: the maps end with this process's mount namespace, so a restarted agent begins with empty maps");
    }
    if kernel.is_adopted() {
        // The maps have the content of an earlier agent, so the program can forward with them at
        // once.
        kernel.attach()?;
        counts.attached(true);
    }
    let capacity = kernel.capacity();
    let reconciler = MapReconciler::adopt(
        kernel,
        config.az.clone(),
        config.device.address,
        capacity,
        counts.clone(),
    );
    let reconciler = reconciler.map_err(|why| EdgeError::Maps {
        dir: config.device.pin_dir.clone(),
        why,
    })?;
    Ok(AgentShared {
        reconciler: Arc::new(Mutex::new(reconciler)),
        counts,
        news: Arc::new(watch::channel(0).0),
        targets: Arc::new(watch::channel(BTreeMap::new()).0),
    })
}

fn subscribe(
    config: &EdgeConfig,
    shared: &AgentShared,
    registry: &Registry,
    drain: DrainWatcher,
) -> Subscriber {
    let settings = SubscriberConfig {
        controller: config.controller.clone(),
        node: format!("edge~{}", config.edge),
        version: env!("CARGO_PKG_VERSION").into(),
        kinds: KINDS.to_vec(),
        snapshot: config.data_dir.join("snapshot"),
    };
    let shared = shared.clone();
    let apply = move |_: &Update, state: &ResourceState| {
        let resources = KINDS.iter().flat_map(|k| state.of(*k).cloned()).collect();
        // Entries that do not fit stay in the state and take effect when there is space. The
        // controller gets their names in the NACK.
        let omitted = shared.reconciler().set_input(resources);
        shared.on_state();
        Ok(omitted
            .iter()
            .map(|(kind, name, why)| RefusedResource::for_want_of_room(*kind, name, why))
            .collect())
    };
    Subscriber::start(settings, registry, drain, Box::new(apply))
}

/// Starts the prober on its own thread, so that a large update does not make replicas appear late.
/// The receiver resolves when the thread ends.
fn spawn_prober(
    shared: AgentShared,
    end: DrainObserver,
) -> Result<(std::thread::JoinHandle<()>, oneshot::Receiver<()>), EdgeError> {
    let runtime = start(
        "creating the prober's runtime",
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build(),
    )?;
    let rhythm = ProbeConfig {
        port: READINESS_PORT,
        pause: PROBE_INTERVAL,
        timeout: PROBE_TIMEOUT,
    };
    let mut targets = shared.targets.subscribe();
    let (alive, lost) = oneshot::channel::<()>();
    let probing = async move {
        let mut prober = Prober::new(rhythm, shared);
        loop {
            let now = targets.borrow_and_update().clone();
            prober.follow(&now);
            tokio::select! {
                // Not when a drain begins: the program forwards on, and needs to know which
                // replicas are up.
                () = end.forced() => return,
                // `follow` restarts a probe task that panicked.
                () = tokio::time::sleep(PROGRAM_CHECK_INTERVAL) => {}
                news = targets.changed() => if news.is_err() {
                    return;
                },
            }
        }
    };
    let run = move || {
        // Dropped at the end of the thread, also by a panic, so that `lost` resolves.
        let _alive = alive;
        runtime.block_on(probing);
    };
    let thread = std::thread::Builder::new()
        .name("edge-prober".into())
        .spawn(run);
    Ok((start("starting the prober's thread", thread)?, lost))
}

/// State of the program and its pins, as the guard has observed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramStatus {
    pub live: bool,
    pub attached: bool,
    pub pinned: bool,
    /// A first state has arrived, so that maps can be filled.
    pub has_state: bool,
}

/// Action of the guard to repair program or maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairAction {
    /// Everything is in place, or there is no state to forward by yet.
    Nothing,
    /// Attach the program to the device.
    Attach,
    /// Load the program again, fill the maps, and attach it to the device.
    Reload,
}

/// Decides how to restore a program or maps that were removed externally.
pub fn decide_repair(program: ProgramStatus) -> RepairAction {
    match program {
        ProgramStatus {
            has_state: false,
            live: false,
            ..
        } => RepairAction::Nothing,
        // This requires a state: without one, new maps would stay empty, and the old ones, which
        // the program still uses, are better.
        ProgramStatus {
            pinned: false,
            has_state: true,
            ..
        } => RepairAction::Reload,
        ProgramStatus {
            attached: false, ..
        } => RepairAction::Attach,
        _ => RepairAction::Nothing,
    }
}

/// Returns true if the maps should be read through again, given the time since the last reading and
/// the duration of that reading.
fn is_audit_due(rested: Duration, took: Duration) -> bool {
    rested >= took * CHECK_REST_FACTOR
}

/// Checks every two seconds whether program and maps are as this agent left them, repairs them, and
/// reads the kernel's counters. Something else on the host may have flushed them. Reading all
/// elements is less frequent if it takes long or took long because the machine stood still.
async fn guard(shared: AgentShared, end: DrainObserver) {
    let (mut ended, mut took) = (Instant::now(), Duration::ZERO);
    loop {
        tokio::select! {
            () = end.forced() => return,
            () = tokio::time::sleep(PROGRAM_CHECK_INTERVAL) => {}
        }
        let (shared, started) = (shared.clone(), Instant::now());
        let audits = is_audit_due(ended.elapsed(), took);
        // Reading large maps takes thousands of system calls, so it does not run on a worker of the
        // async runtime.
        let _ = tokio::task::spawn_blocking(move || look_after(&shared, audits)).await;
        if audits {
            (ended, took) = (Instant::now(), started.elapsed());
        }
    }
}

/// Checks and repairs once. With `audits`, all elements are read and compared too. New maps are
/// filled in any case.
fn look_after(shared: &AgentShared, audits: bool) {
    let mut reconciler = shared.reconciler();
    let has_state = reconciler.status().has_state;
    let kernel = reconciler.tables();
    let program = ProgramStatus {
        live: kernel.is_live(),
        attached: kernel.is_attached(),
        pinned: kernel.is_pinned(),
        has_state,
    };
    shared.counts.attached(program.attached);
    let (fixed, what) = match decide_repair(program) {
        RepairAction::Nothing => (Ok(()), None),
        // The maps were filled when the state arrived. The first attachment after the start
        // repairs nothing, so it is not counted as a repair.
        RepairAction::Attach => (kernel.attach(), program.live.then_some("attachment")),
        RepairAction::Reload => (kernel.reload(), Some("pins")),
    };
    // Without the programs there is nothing to audit. The next check tries again.
    if let Err(error) = &fixed {
        tracing::error!(%error, ?program, "edge: could not reinstall missing programs or maps; retrying");
        return;
    }
    // New maps are filled at once, because the program drops packets of missing entries.
    let audited = if audits || what.is_some() || !program.live {
        reconciler.audit()
    } else {
        Ok(0)
    };
    match audited {
        Ok(0) => {}
        // New maps are empty. That results from the reload and is not an external change of
        // elements.
        Ok(_) if what == Some("pins") => {}
        Ok(n) => {
            shared.counts.repair("elements", n);
            tracing::error!(
                elements = n,
                "edge: BPF maps were changed externally; repaired"
            );
        }
        Err(error) => tracing::error!(
            error,
            "edge: cannot read the maps, so external changes stay unrepaired; retrying"
        ),
    }
    // Before the attachment below, which may fail: the next check would not find this repair.
    if let Some(what) = what {
        shared.counts.repair(what, 1);
        tracing::error!(
            what,
            "edge: the BPF program or maps were removed externally; reinstalled"
        );
    }
    // A reloaded program is attached only now, when its maps are filled: with empty maps it would
    // drop packets.
    let kernel = reconciler.tables();
    if !kernel.is_live()
        && has_state
        && let Err(error) = kernel.attach()
    {
        tracing::error!(%error, "edge: could not attach the program to the device; retrying");
        // Without the program no packet is counted, so the counters need no update.
        return;
    }
    shared.counts.attached(kernel.is_attached());
    match kernel.counts() {
        Ok(now) => shared.counts.packets(&now),
        Err(error) => {
            tracing::error!(%error, "edge: cannot read the program's counters; the metrics stay at their last values")
        }
    }
}

/// Serves admin, metrics and readiness on the configured addresses, and admin on a unix socket too.
/// Each has its own port, as in Istio.
fn serve_operators(
    config: &EdgeConfig,
    dump: Arc<EdgeDump>,
    registry: &Registry,
    level: LogLevelHandle,
    process: &Arc<DrainTrigger>,
    drain: &DrainWatcher,
) -> Result<(), EdgeError> {
    let (for_dump, for_ready) = (dump.clone(), dump);
    let admin = AdminRoutes::new()
        .config_dump(move || for_dump.json())
        .metrics(registry.clone())
        .logging(level)
        .quit(process.clone(), DRAIN_LIMIT)
        .version(env!("CARGO_PKG_VERSION"));
    let readiness = AdminRoutes::new().ready(move || for_ready.ready());
    let addresses = AdminAddresses {
        admin: config.admin,
        metrics: config.metrics,
        readiness: config.readiness,
        data_dir: config.data_dir.clone(),
    };
    Ok(admin::serve_all(
        &addresses,
        (admin, readiness),
        registry,
        drain,
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_read_through_for_a_twentieth_of_the_time() {
        let ms = Duration::from_millis;
        for (rested, took, want) in [
            (2000, 0, true),
            (2000, 100, true),
            (1999, 100, false),
            (11_999, 600, false),
            (12_000, 600, true),
        ] {
            assert_eq!(
                is_audit_due(ms(rested), ms(took)),
                want,
                "{rested} ms after one of {took} ms"
            );
        }
    }

    #[test]
    fn removed_programs_are_reinstalled_if_there_is_a_desired_state() {
        let fine = ProgramStatus {
            live: true,
            attached: true,
            pinned: true,
            has_state: true,
        };
        for (name, program, want) in [
            ("all in place", fine, RepairAction::Nothing),
            (
                "filters flushed",
                ProgramStatus {
                    attached: false,
                    ..fine
                },
                RepairAction::Attach,
            ),
            (
                "filters flushed before the first state",
                ProgramStatus {
                    attached: false,
                    has_state: false,
                    ..fine
                },
                RepairAction::Attach,
            ),
            (
                "pins removed",
                ProgramStatus {
                    pinned: false,
                    ..fine
                },
                RepairAction::Reload,
            ),
            (
                "pins removed before the first state",
                ProgramStatus {
                    pinned: false,
                    has_state: false,
                    ..fine
                },
                RepairAction::Nothing,
            ),
            (
                "both",
                ProgramStatus {
                    pinned: false,
                    attached: false,
                    ..fine
                },
                RepairAction::Reload,
            ),
            (
                "waiting for the first state",
                ProgramStatus {
                    live: false,
                    attached: false,
                    pinned: true,
                    has_state: false,
                },
                RepairAction::Nothing,
            ),
            (
                "it has a state, but the device was not there",
                ProgramStatus {
                    live: false,
                    attached: false,
                    ..fine
                },
                RepairAction::Attach,
            ),
        ] {
            assert_eq!(decide_repair(program), want, "{name}");
        }
    }
}
