//! The process: what is started, in which order, and how it ends. No request is served and nothing is decided here.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use canal_keys::rights::Rights;
use canal_keys::{Engine, EngineConfig, hardware};
use canal_kit::admin::{self, AdminAddresses, Routes};
use canal_kit::certs::{Issuer, VALIDITY};
use canal_kit::controller::Controller;
use canal_kit::diagnostics::Level;
use canal_kit::drain::{self, Drain, Phase, Trigger, Watcher};
use canal_kit::metrics::Registry;
use canal_kit::southbound::{State, Subscriber, SubscriberConfig, Update};
use canal_kit::sys::{self, ListenOptions};
use serde_json::json;

/// What tasks may take beyond the drain's deadline.
const GRACE: Duration = Duration::from_secs(2);

/// The process's settings.
pub(crate) struct Config {
    pub(crate) name: String,
    pub(crate) engine: EngineConfig,
    pub(crate) controller: Controller,
    pub(crate) data_dir: PathBuf,
    pub(crate) listen: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) metrics: SocketAddr,
    pub(crate) readiness: SocketAddr,
    pub(crate) drain_limit: Duration,
}

/// What operators look at.
struct Board {
    name: String,
    engine: Engine,
    subscriber: Subscriber,
    registry: Registry,
    requests: Watcher,
}

/// Runs the key server until SIGTERM, SIGINT or `/quitquitquit`, and drains. `false`: something had to be cut off at the deadline.
pub(crate) async fn run(config: Config, level: Level) -> anyhow::Result<bool> {
    std::fs::create_dir_all(&config.data_dir).with_context(|| format!("making {} (--data-dir)", config.data_dir.display()))?;
    // Two trees: requests drain while admin, southbound and certificates still work; these end with the process.
    let (process, whole) = drain::tree();
    let process = Arc::new(process);
    let (trigger, requests) = whole.branch();
    let registry = Registry::new();
    let issuer = Arc::new(Issuer::new(config.controller.clone(), VALIDITY));
    let engine = Engine::start(config.engine.clone(), issuer, &registry, whole.watcher()).context("starting the key server")?;
    let subscriber = subscribe(&config, &engine, &registry, &whole);
    let listener = sys::listen(None, config.listen, &ListenOptions::default()).context("--listen")?;
    let board = Arc::new(Board { name: config.name.clone(), engine: engine.clone(), subscriber, registry, requests: requests.watcher() });
    serve_operators(&config, &board, level, &process, &whole)?;
    tracing::info!(address = %config.listen, version = env!("CARGO_PKG_VERSION"), "serving");
    tokio::spawn(async move { engine.serve(listener, requests).await });
    let clean = drain::on_signals(trigger, config.drain_limit, GRACE).await.context("catching signals")?;
    tracing::info!(clean, "drained");
    process.force();
    Ok(clean)
}

/// The build, and what of this machine's hardware it uses: `canal status` shows it.
fn version() -> String {
    let used: Vec<_> = hardware::features().iter().filter(|f| f.used).map(|f| f.name).collect();
    let version = env!("CARGO_PKG_VERSION");
    if used.is_empty() { version.into() } else { format!("{version}+{}", used.join(".")) }
}

fn subscribe(config: &Config, engine: &Engine, registry: &Registry, drain: &Drain) -> Subscriber {
    let settings = SubscriberConfig {
        controller: config.controller.clone(),
        node: format!("keyserver~{}", config.name),
        version: version(),
        kinds: Rights::KINDS.to_vec(),
        snapshot: config.data_dir.join("snapshot"),
    };
    let engine = engine.clone();
    let apply = move |_: &Update, state: &State| Ok(engine.apply(state));
    Subscriber::start(settings, registry, drain.clone(), Box::new(apply))
}

impl Board {
    fn dump(&self) -> serde_json::Value {
        json!({
            "key_server": self.name,
            "version": env!("CARGO_PKG_VERSION"),
            "southbound": self.subscriber.status(),
            "engine": self.engine.dump(),
        })
    }

    fn ready(&self) -> Result<(), String> {
        if self.requests.phase() != Phase::Running {
            return Err("draining".into());
        }
        if !self.subscriber.ready() {
            return Err("no southbound state yet, neither from the controller nor from a snapshot".into());
        }
        self.engine.ready()
    }
}

/// Admin on localhost and on a unix socket, metrics and readiness where the operator says; each its own port, as in Istio.
fn serve_operators(config: &Config, board: &Arc<Board>, level: Level, process: &Arc<Trigger>, drain: &Drain) -> anyhow::Result<()> {
    let (for_dump, for_ready) = (board.clone(), board.clone());
    let admin = Routes::new()
        .config_dump(move || for_dump.dump())
        .metrics(board.registry.clone())
        .logging(level)
        .quit(process.clone(), config.drain_limit)
        .version(env!("CARGO_PKG_VERSION"));
    let readiness = Routes::new().ready(move || for_ready.ready());
    let addresses =
        AdminAddresses { admin: config.admin, metrics: config.metrics, readiness: config.readiness, data_dir: config.data_dir.clone() };
    Ok(admin::serve_all(&addresses, (admin, readiness), &board.registry, drain)?)
}
