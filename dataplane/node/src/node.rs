//! The process: what is started, in which order, and how it ends. No traffic and no decisions here.

use std::sync::Arc;
use std::time::Duration;

use canal_interfaces::Interfaces;
use canal_kit::admin::{self, AdminAddresses, Routes};
use canal_kit::certs::{CertificateConfig, CertificateSource, Issuer, VALIDITY};
use canal_kit::diagnostics::Level;
use canal_kit::drain::{self, Drain, Trigger};
use canal_kit::log::AccessLog;
use canal_kit::metrics::{Family, Registry};
use canal_kit::southbound::{Subscriber, SubscriberConfig};
use canal_kit::sys::{self, SysError};
use canal_kit::worker::Workers;
use canal_model::ids::Generation;
use canal_offload::OffloadError;
use tokio::sync::watch;

use crate::capture::Capture;
use crate::config::NodeConfig;
use crate::dump::Dump;
use crate::identities::Identities;
use crate::pods::{Board, Pods};
use crate::view::{KINDS, View};
use crate::worker::{self, Shared};
use crate::workload_api::WorkloadApis;

/// What tasks may take beyond the drain's deadline.
const GRACE: Duration = Duration::from_secs(2);

/// Why the node could not be started.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// Capture was demanded as BPF and is refused, or the pin directory cannot be used.
    #[error("{0}")]
    Capture(#[from] OffloadError),
    /// An admin, metrics or readiness address cannot be listened on.
    #[error("{0}")]
    Listen(#[from] SysError),
    /// A directory, a thread or a signal could not be had.
    #[error("{what}: {source}")]
    Start { what: &'static str, source: std::io::Error },
    /// A part of the process has ended by a fault; a supervisor starts a whole one.
    #[error("{0} has ended; the process ends with it, captured pods stay captured")]
    Lost(&'static str),
}

fn start<T>(what: &'static str, r: std::io::Result<T>) -> Result<T, NodeError> {
    r.map_err(|source| NodeError::Start { what, source })
}

/// Where a node's capture is kept: as configured, or the default.
pub fn pin_dir(config: &NodeConfig) -> std::path::PathBuf {
    config.pin_dir.clone().unwrap_or_else(|| canal_offload::default_pin_dir(config.node.as_str(), &config.data_dir))
}

/// The node before its pods: what was started, for the end to stop.
struct Parts {
    shared: Arc<Shared>,
    workers: Workers,
    subscriber: Subscriber,
    pods: tokio::task::JoinHandle<()>,
    interfaces: tokio::task::JoinHandle<()>,
}

/// Runs the node until SIGTERM, SIGINT or `/quitquitquit`, and drains. `false`: something had to be cut off at the deadline.
pub async fn run(config: NodeConfig, level: Level) -> Result<bool, NodeError> {
    sys::raise_file_limit();
    let config = Arc::new(config);
    start("making the data directory (--data-dir)", std::fs::create_dir_all(&config.data_dir))?;
    start("making the pods directory (--pods-dir)", std::fs::create_dir_all(&config.pods_dir))?;
    // Two trees: traffic drains while admin, southbound and certificates still work; these end with the process.
    let (process, whole) = drain::tree();
    let process = Arc::new(process);
    let (traffic_trigger, traffic) = whole.branch();
    let parts = begin(&config, level, &process, whole.clone(), traffic)?;
    let Parts { shared, workers, subscriber, pods, interfaces } = parts;
    // The second of them does not end before the process does.
    let clean = tokio::select! {
        ended = drain::on_signals(traffic_trigger, config.drain_limit, GRACE) => start("catching signals", ended)?,
        _ = interfaces => return Err(NodeError::Lost("the interface guard's agent")),
    };
    tracing::info!(clean, "drained; captured pods stay captured and are refused until the next start");
    subscriber.stop().await;
    process.force();
    drop(whole);
    let _ = pods.await;
    let _ = tokio::task::spawn_blocking(move || workers.join()).await;
    drop(shared);
    Ok(clean)
}

fn begin(config: &Arc<NodeConfig>, level: Level, process: &Arc<Trigger>, whole: Drain, traffic: Drain) -> Result<Parts, NodeError> {
    let registry = Registry::new();
    let interfaces = Interfaces { bindings: config.interface_bindings.clone(), pin_dir: pin_dir(config) };
    let interfaces = tokio::spawn(canal_interfaces::run(interfaces, registry.clone(), whole.watcher()));
    let build = Family::new("istio_build", "What runs here.", &["component", "tag"]);
    registry.gauges(build).shared(&["canal-node", env!("CARGO_PKG_VERSION")]).set(1);
    let capture = Capture::start(config.capture, &pin_dir(config))?;
    let log = start("starting the access log", AccessLog::start(config.access_log.clone(), &registry))?;
    let shared = Arc::new(Shared::new(config.az.clone(), registry.clone(), log, config.trusts_node));
    let (subscriber, generations) = subscribe(config, &shared, whole.clone());
    let certificates =
        CertificateConfig { controller: config.controller.clone(), folder: config.data_dir.join("certs"), validity: VALIDITY };
    let certificates = start("starting the certificate source", CertificateSource::start(certificates, &registry, whole.clone()))?;
    let workers = start("starting the workers", worker::start(config.workers, &shared, traffic.clone()))?;
    let board = Arc::new(Board::default());
    let dump = Dump {
        config: config.clone(),
        shared: shared.clone(),
        board: board.clone(),
        certificates: certificates.clone(),
        southbound: subscriber.watch(),
        fallback: capture.fallback.clone(),
    };
    serve_operators(config, Arc::new(dump), level, process, &whole)?;
    let apis = WorkloadApis::new(Issuer::new(config.controller.clone(), VALIDITY), &registry);
    let (trust, key_servers) = (shared.trust.clone(), config.key_servers.clone());
    let identities = Identities::new(config.node.clone(), config.az.clone(), key_servers, certificates, trust, registry);
    let pods = Pods::new(config.clone(), capture, shared.clone(), identities, apis, workers.clone(), board);
    let pods = tokio::spawn(pods.run(generations, traffic, whole));
    Ok(Parts { shared, workers, subscriber, pods, interfaces })
}

fn subscribe(config: &NodeConfig, shared: &Arc<Shared>, drain: Drain) -> (Subscriber, watch::Receiver<Generation>) {
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
    let apply = move |_: &canal_kit::southbound::Update, state: &canal_kit::southbound::State| {
        let refused = shared.trust.apply(state);
        let view = View::after(&shared.view.load(), state, &node);
        let generation = view.generation;
        shared.take(view);
        changed.send_replace(generation);
        Ok(refused)
    };
    (Subscriber::start(subscription, &registry, drain, Box::new(apply)), generations)
}

/// Admin on localhost and on a unix socket, metrics and readiness where the operator says; each its own port, as in Istio.
fn serve_operators(config: &NodeConfig, dump: Arc<Dump>, level: Level, process: &Arc<Trigger>, drain: &Drain) -> Result<(), NodeError> {
    let registry = dump.shared.registry.clone();
    let (for_dump, for_ready) = (dump.clone(), dump);
    let admin = Routes::new()
        .config_dump(move || for_dump.json())
        .metrics(registry.clone())
        .logging(level)
        .quit(process.clone(), config.drain_limit)
        .version(env!("CARGO_PKG_VERSION"));
    let readiness = Routes::new().ready(move || for_ready.ready());
    let addresses =
        AdminAddresses { admin: config.admin, metrics: config.metrics, readiness: config.readiness, data_dir: config.data_dir.clone() };
    Ok(admin::serve_all(&addresses, (admin, readiness), &registry, drain)?)
}
