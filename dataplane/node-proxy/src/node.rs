//! The process: starts all parts in order, and ends them. It handles no traffic and makes no policy
//! decisions.

use std::sync::Arc;
use std::time::Duration;

use canal_identity::certs::{CertificateClient, CertificateConfig, CertificateSource, VALIDITY};
use canal_interfaces::Interfaces;
use canal_model::ids::Generation;
use canal_net::worker::Workers;
use canal_offload::OffloadError;
use canal_runtime::admin::{self, AdminAddresses, AdminListenError, AdminRoutes};
use canal_runtime::drain::{self, DrainTrigger, DrainWatcher};
use canal_runtime::logging::LogLevelHandle;
use canal_runtime::metrics::{MetricFamily, Registry};
use canal_southbound_client::{Subscriber, SubscriberConfig};
use canal_telemetry::access_log::{AccessLog, LogTails};
use canal_telemetry::observe::{self, ObserveSources};
use tokio::sync::watch;

use crate::capture::CaptureBackend;
use crate::config::NodeConfig;
use crate::dump::Dump;
use crate::identities::PodIdentityFactory;
use crate::pod_reconciler::{PodReconciler, PodRegistry};
use crate::snapshot::{KINDS, NodeSnapshot};
use crate::worker::{self, NodeShared};
use crate::workload_api::WorkloadApis;

/// Time that tasks may take beyond the drain's deadline. Without it, a task that ends a moment
/// after the deadline would be cut off and logged as left behind. Nobody measured it.
const GRACE: Duration = Duration::from_secs(2);

/// Reason why the node could not start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// BPF capture was required and the kernel refuses it, or the pin directory is unusable.
    #[error("{0}")]
    Capture(#[from] OffloadError),
    /// The admin, metrics or readiness address is not available.
    #[error("{0}")]
    Listen(#[from] AdminListenError),
    /// Creating a directory, starting a thread or catching a signal failed.
    #[error("{what}: {source}")]
    Start {
        what: &'static str,
        source: std::io::Error,
    },
    /// A part of the process ended because of a fault. The supervisor restarts the whole process.
    #[error("{0} has ended; the process ends with it, and captured pods stay captured")]
    Lost(&'static str),
}

fn start<T>(what: &'static str, r: std::io::Result<T>) -> Result<T, NodeError> {
    r.map_err(|source| NodeError::Start { what, source })
}

/// Returns the directory where capture programs are pinned: the configured one, or the default.
pub fn pin_dir(config: &NodeConfig) -> std::path::PathBuf {
    config
        .pin_dir
        .clone()
        .unwrap_or_else(|| canal_offload::default_pin_dir(config.node.as_str(), &config.data_dir))
}

/// The tasks that were started, which the end of the process stops.
struct NodeTasks {
    shared: Arc<NodeShared>,
    workers: Workers,
    subscriber: Subscriber,
    pods: tokio::task::JoinHandle<()>,
    interfaces: tokio::task::JoinHandle<()>,
}

/// Runs the node until SIGTERM, SIGINT or `/quitquitquit`, then drains it. Returns `false` if the
/// deadline cut connections off.
///
/// # Errors
/// A part could not be started, or the interface guard's agent ended before the process did.
pub async fn run(config: NodeConfig, level: LogLevelHandle) -> Result<bool, NodeError> {
    let signals = start("catching signals", drain::TerminationSignals::catch())?;
    // 0 leaves the hard limit as it is; the soft limit is raised to it.
    canal_runtime::raise_file_limit(0);
    let config = Arc::new(config);
    start(
        "creating the data directory (--data-dir)",
        std::fs::create_dir_all(&config.data_dir),
    )?;
    start(
        "creating the pods directory (--pods-dir)",
        std::fs::create_dir_all(&config.pods_dir),
    )?;
    // Two drain trees: traffic drains while admin, southbound and certificates still work. Those
    // end with the process.
    let (process, process_drain) = drain::tree();
    let process = Arc::new(process);
    let (traffic_trigger, traffic) = process_drain.branch();
    let parts = begin(&config, level, &process, process_drain.clone(), traffic)?;
    let NodeTasks {
        shared,
        workers,
        subscriber,
        pods,
        interfaces,
    } = parts;
    // The interface guard's agent must not end before the process does.
    let clean = tokio::select! {
        ended = drain::on_signals(signals, traffic_trigger, config.drain_limit, GRACE) => ended,
        // The process ends without a drain, and its supervisor starts it again.
        _ = interfaces => return Err(NodeError::Lost("the interface guard's agent")),
    };
    tracing::info!(
        clean,
        "node: drained; captured pods stay captured, and their connections are refused until the next start"
    );
    // The subscriber writes its state file before the tree is forced, which would end its task.
    subscriber.stop().await;
    // The reconciler retains what the drain needs until the process's tree is forced.
    process.force();
    drop(process_drain);
    // The reconciler needs the workers, so it ends first. If one panicked, the others still end.
    let _ = pods.await;
    let _ = tokio::task::spawn_blocking(move || workers.join()).await;
    // `shared` has the access log, whose writer serves the workers until they have ended.
    drop(shared);
    Ok(clean)
}

fn begin(
    config: &Arc<NodeConfig>,
    level: LogLevelHandle,
    process: &Arc<DrainTrigger>,
    process_drain: DrainWatcher,
    traffic: DrainWatcher,
) -> Result<NodeTasks, NodeError> {
    let registry = registry();
    let interfaces = Interfaces {
        bindings: config.interface_bindings.clone(),
        pin_dir: pin_dir(config),
    };
    // First: it needs none of the other parts, and containers without a node proxy wait for it.
    let interfaces = tokio::spawn(canal_interfaces::run(
        interfaces,
        registry.clone(),
        process_drain.watcher(),
    ));
    let capture = CaptureBackend::start(config.capture, &pin_dir(config))?;
    let log = start(
        "starting the access log",
        AccessLog::start(config.access_log.clone(), &registry),
    )?;
    let logs = log.tails();
    let shared = Arc::new(NodeShared::new(
        config.az.clone(),
        registry.clone(),
        log,
        config.trusts_node,
        config.buffer_bytes,
    ));
    let (subscriber, generations) = subscribe(config, &shared, process_drain.clone());
    let certificates = CertificateConfig {
        controller: config.controller.clone(),
        folder: config.data_dir.join("certs"),
        validity: VALIDITY,
    };
    let certificates = start(
        "starting the certificate source",
        CertificateSource::start(certificates, &registry, process_drain.clone()),
    )?;
    let workers = start(
        "starting the workers",
        worker::start(config.workers, &shared, traffic.clone()),
    )?;
    let pod_registry = Arc::new(PodRegistry::default());
    let dump = Dump {
        config: config.clone(),
        shared: shared.clone(),
        pod_registry: pod_registry.clone(),
        certificates: certificates.clone(),
        southbound: subscriber.watch(),
        fallback: capture.fallback.clone(),
    };
    let dump = Arc::new(dump);
    serve_operators(config, dump.clone(), level, process, &process_drain)?;
    serve_observers(&subscriber, dump, logs, &process_drain);
    let apis = WorkloadApis::new(
        CertificateClient::new(config.controller.clone(), VALIDITY),
        &registry,
    );
    let (trust, key_servers) = (shared.trust.clone(), config.key_servers.clone());
    let identities = PodIdentityFactory::new(
        config.node.clone(),
        config.az.clone(),
        key_servers,
        certificates,
        trust,
        registry,
    );
    // Last, because serving a pod needs every part above.
    let pods = PodReconciler::new(
        config.clone(),
        capture,
        shared.clone(),
        identities,
        apis,
        workers.clone(),
        pod_registry,
    );
    let pods = tokio::spawn(pods.run(generations, traffic, process_drain));
    Ok(NodeTasks {
        shared,
        workers,
        subscriber,
        pods,
        interfaces,
    })
}

/// Makes the registry of metrics, with the one that names the program.
fn registry() -> Registry {
    let registry = Registry::new();
    let build = MetricFamily::new(
        "istio_build",
        "Version of the running process.",
        &["component", "tag"],
    );
    registry
        .gauges(build)
        .shared(&["canal-node", env!("CARGO_PKG_VERSION")])
        .set(1);
    registry
}

fn subscribe(
    config: &NodeConfig,
    shared: &Arc<NodeShared>,
    drain: DrainWatcher,
) -> (Subscriber, watch::Receiver<Generation>) {
    let (changed, generations) = watch::channel(Generation::default());
    let (shared, node) = (shared.clone(), config.node.clone());
    let registry = shared.registry.clone();
    let subscription = SubscriberConfig {
        controller: config.controller.clone(),
        node: format!("node~{}", config.node),
        version: env!("CARGO_PKG_VERSION").into(),
        kinds: KINDS.to_vec(),
        snapshot: config.data_dir.join("snapshot"),
    };
    let apply = move |_: &canal_southbound_client::Update,
                      state: &canal_southbound_client::ResourceState| {
        let refused = canal_identity::apply_bundles(&shared.trust, state);
        let view = NodeSnapshot::after(&shared.view.load(), state, &node);
        let generation = view.generation;
        shared.take(view);
        changed.send_replace(generation);
        Ok(refused)
    };
    (
        Subscriber::start(subscription, &registry, drain, Box::new(apply)),
        generations,
    )
}

/// Answers operators' requests that arrive through the controller. Everything on a node belongs to
/// its tenant, so nothing is filtered.
fn serve_observers(
    subscriber: &Subscriber,
    dump: Arc<Dump>,
    logs: LogTails,
    process_drain: &DrainWatcher,
) {
    let registry = dump.shared.registry.clone();
    let sources = ObserveSources {
        dump: Box::new(move |_| dump.json()),
        tap: None,
        logs: Some(logs),
        registry,
    };
    tokio::spawn(observe::serve(
        subscriber.connections(),
        sources,
        process_drain.watcher(),
    ));
}

/// Serves admin, metrics and readiness on the configured addresses, and admin on a unix socket too.
/// Each has its own port, as in Istio.
fn serve_operators(
    config: &NodeConfig,
    dump: Arc<Dump>,
    level: LogLevelHandle,
    process: &Arc<DrainTrigger>,
    drain: &DrainWatcher,
) -> Result<(), NodeError> {
    let registry = dump.shared.registry.clone();
    let (for_dump, for_ready) = (dump.clone(), dump);
    let admin = AdminRoutes::new()
        .config_dump(move || for_dump.json())
        .metrics(registry.clone())
        .logging(level)
        .quit(process.clone(), config.drain_limit)
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
        &registry,
        drain,
    )?)
}
