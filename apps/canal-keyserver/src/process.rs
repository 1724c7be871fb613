//! The key server process: which parts start, in which order, and how it ends. It serves no
//! requests and decides nothing itself. Start at [`run`].

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use canal_identity::certs::{CertificateClient, VALIDITY};
use canal_keyserver_engine::entitlements::EntitlementIndex;
use canal_keyserver_engine::{KeyServerConfig, KeyServerEngine, hardware};
use canal_model::ids::TenantName;
use canal_net::sys::{self, ListenOptions};
use canal_runtime::admin::{self, AdminAddresses, AdminRoutes};
use canal_runtime::drain::{
    self, DrainObserver, DrainPhase, DrainTrigger, DrainWatcher, TerminationSignals,
};
use canal_runtime::logging::LogLevelHandle;
use canal_runtime::metrics::Registry;
use canal_southbound_client::controller_client::ControllerEndpoint;
use canal_southbound_client::{ResourceState, Subscriber, SubscriberConfig, Update};
use canal_telemetry::observe::{self, ObserveSources};
use serde_json::json;

/// Time that tasks may take beyond the drain's deadline.
/// With the drain's default of 10 s, the process ends well within the 35 s after which a world
/// kills it.
const GRACE: Duration = Duration::from_secs(2);

/// Settings of the key server process.
pub(crate) struct KeyServerProcessConfig {
    pub(crate) name: String,
    pub(crate) engine: KeyServerConfig,
    pub(crate) controller: ControllerEndpoint,
    pub(crate) data_dir: PathBuf,
    pub(crate) listen: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) metrics: SocketAddr,
    pub(crate) readiness: SocketAddr,
    pub(crate) drain_limit: Duration,
}

/// The process's state as operators see it.
struct KeyServerDump {
    name: String,
    engine: KeyServerEngine,
    subscriber: Subscriber,
    registry: Registry,
    requests: DrainObserver,
}

/// Runs the key server until SIGTERM, SIGINT or `/quitquitquit`, and drains. Returns `false` if
/// work was aborted at the deadline.
pub(crate) async fn run(
    config: KeyServerProcessConfig,
    level: LogLevelHandle,
) -> anyhow::Result<bool> {
    let signals = TerminationSignals::catch().context("catching signals")?;
    std::fs::create_dir_all(&config.data_dir)
        .with_context(|| format!("creating {}; fix: name in --data-dir a directory that this process may create and write", config.data_dir.display()))?;
    // Two drain trees: requests drain while admin, southbound and certificates still work. The
    // latter end with the process.
    let (process, process_drain) = drain::tree();
    let process = Arc::new(process);
    let (trigger, requests) = process_drain.branch();
    let registry = Registry::new();
    let issuer = Arc::new(CertificateClient::new(config.controller.clone(), VALIDITY));
    let engine = KeyServerEngine::start(
        config.engine.clone(),
        issuer,
        &registry,
        process_drain.watcher(),
    )
    .context("starting the key server")?;
    let subscriber = subscribe(&config, &engine, &registry, &process_drain);
    // A port in use must fail the start before readiness is served.
    let listener =
        sys::listen(None, config.listen, &ListenOptions::default()).context("--listen")?;
    let process_state = Arc::new(KeyServerDump {
        name: config.name.clone(),
        engine: engine.clone(),
        subscriber,
        registry,
        requests: requests.watcher(),
    });
    serve_operators(&config, &process_state, level, &process, &process_drain)?;
    let for_dump = process_state.clone();
    let dump = Box::new(move |_: Option<&TenantName>| for_dump.dump());
    // A key server carries no requests that a tap or an access log could show.
    let sources = ObserveSources {
        dump,
        tap: None,
        logs: None,
        registry: process_state.registry.clone(),
    };
    tokio::spawn(observe::serve(
        process_state.subscriber.connections(),
        sources,
        process_drain.watcher(),
    ));
    tracing::info!(address = %config.listen, version = env!("CARGO_PKG_VERSION"), "key server: serving");
    tokio::spawn(async move { engine.serve(listener, requests).await });
    let clean = drain::on_signals(signals, trigger, config.drain_limit, GRACE).await;
    tracing::info!(clean, "key server: drained, the process ends");
    // Admin, southbound and certificates end only now, because the drain needs them.
    process.force();
    Ok(clean)
}

/// Returns the version, and the hardware features in use. `canal status` shows it.
fn version() -> String {
    let used: Vec<_> = hardware::features()
        .iter()
        .filter(|f| f.used)
        .map(|f| f.name)
        .collect();
    let version = env!("CARGO_PKG_VERSION");
    if used.is_empty() {
        version.into()
    } else {
        format!("{version}+{}", used.join("."))
    }
}

fn subscribe(
    config: &KeyServerProcessConfig,
    engine: &KeyServerEngine,
    registry: &Registry,
    drain: &DrainWatcher,
) -> Subscriber {
    let settings = SubscriberConfig {
        controller: config.controller.clone(),
        node: format!("keyserver~{}", config.name),
        version: version(),
        kinds: EntitlementIndex::KINDS.to_vec(),
        snapshot: config.data_dir.join("snapshot"),
    };
    let engine = engine.clone();
    let apply = move |_: &Update, state: &ResourceState| Ok(engine.apply(state));
    Subscriber::start(settings, registry, drain.clone(), Box::new(apply))
}

impl KeyServerDump {
    fn dump(&self) -> serde_json::Value {
        json!({
            "key_server": self.name,
            "version": env!("CARGO_PKG_VERSION"),
            "southbound": self.subscriber.status(),
            "engine": self.engine.dump(),
        })
    }

    fn ready(&self) -> Result<(), String> {
        if self.requests.phase() != DrainPhase::Running {
            return Err("draining".into());
        }
        if !self.subscriber.ready() {
            return Err(
                "no southbound state yet, neither from the controller nor from a snapshot".into(),
            );
        }
        self.engine.ready()
    }
}

/// Serves admin, metrics and readiness on the configured addresses, and admin on a unix socket too.
/// Each has its own port, as in Istio.
fn serve_operators(
    config: &KeyServerProcessConfig,
    process_state: &Arc<KeyServerDump>,
    level: LogLevelHandle,
    process: &Arc<DrainTrigger>,
    drain: &DrainWatcher,
) -> anyhow::Result<()> {
    let (for_dump, for_ready) = (process_state.clone(), process_state.clone());
    let admin = AdminRoutes::new()
        .config_dump(move || for_dump.dump())
        .metrics(process_state.registry.clone())
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
        &process_state.registry,
        drain,
    )?)
}
