//! The process: what is started, in which order, and how it ends. No traffic and no decisions here.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::Context;
use canal_gateway_engine::{Engine, EngineConfig, Filter, Limits, Surroundings, WantService};
use canal_kit::admin::{self, AdminAddresses, Routes};
use canal_kit::certs::{CertificateConfig, CertificateSource, CertificateStatus, VALIDITY};
use canal_kit::controller::Controller;
use canal_kit::diagnostics::Level;
use canal_kit::drain::{self, Drain, Notice, Phase, Trigger, Watcher};
use canal_kit::keys::{Keyring, Requester, RequesterConfig, ServerAddress, TRIP};
use canal_kit::log::{AccessLog, Sink};
use canal_kit::metrics::{Family, Registry};
use canal_kit::southbound::{Origin, State, Subscriber, SubscriberConfig, Update, snapshot};
use canal_kit::sys;
use canal_kit::tls::TrustStore;
use canal_model::identity::{COMPONENTS, component_identity};
use canal_model::ids::{AzName, Generation, ReplicaName};
use canal_model::principal::Principal;
use canal_model::program::{Kind, Resource};
use serde_json::json;

use crate::tier::{self, Replica, TierConfig};

/// What tasks may take beyond the drain's deadline.
const GRACE: Duration = Duration::from_secs(2);

/// Where programs come from.
pub(crate) enum Feed {
    Controller(Controller),
    Snapshot(PathBuf),
}

/// The process's settings.
pub(crate) struct Config {
    pub(crate) engine: EngineConfig,
    /// A replica of the cloud tier.
    pub(crate) tier: Option<TierConfig>,
    pub(crate) az: AzName,
    pub(crate) name: ReplicaName,
    pub(crate) key_servers: Vec<ServerAddress>,
    pub(crate) feed: Feed,
    pub(crate) data_dir: PathBuf,
    pub(crate) admin: SocketAddr,
    pub(crate) metrics: SocketAddr,
    pub(crate) readiness: SocketAddr,
    pub(crate) access_log: Option<Sink>,
    pub(crate) drain_limit: Duration,
}

/// What operators look at.
struct Board {
    engine: Arc<Engine>,
    replica: String,
    registry: Registry,
    certificates: Option<CertificateSource>,
    subscriber: Option<Subscriber>,
    traffic: Watcher,
    replica_of_tier: Option<Arc<Replica>>,
    was_ready: AtomicBool,
}

/// Runs the gateway until SIGTERM, SIGINT or `/quitquitquit`, and drains. `false`: something had to be cut off at the deadline.
pub(crate) async fn run(mut config: Config, level: Level) -> anyhow::Result<bool> {
    fit_to_files(&mut config.engine.limits);
    std::fs::create_dir_all(&config.data_dir).with_context(|| format!("making {} (--data-dir)", config.data_dir.display()))?;
    // Two trees: traffic drains while admin, southbound and certificates still work; these end with the process.
    let (process, whole) = drain::tree();
    let process = Arc::new(process);
    let (trigger, traffic) = whole.branch();
    let board = Arc::new(begin(&config, &whole, traffic)?);
    serve_operators(&config, &board, level, &process, &whole)?;
    if let Some(replica) = &board.replica_of_tier {
        let asked = board.clone();
        tokio::spawn(tier::open_when_ready(replica.agent.clone(), move || asked.ready(), board.traffic.clone()));
        tokio::spawn(tier::part_when_told(replica.agent.clone(), Arc::downgrade(&board.engine)));
    }
    let clean = drained(&config, &board, trigger).await?;
    tracing::info!(clean, "drained");
    if let Some(replica) = &board.replica_of_tier {
        replica.agent.leave().await;
    }
    let engine = board.engine.clone();
    process.force();
    drop(whole);
    let _ = tokio::task::spawn_blocking(move || engine.finish()).await;
    Ok(clean)
}

/// Opens the way for as many files as connections may need; where that is refused, fewer connections are taken.
fn fit_to_files(limits: &mut Limits) {
    let (wanted, files) = (limits.files(), sys::raise_file_limit_to(limits.files()));
    let asked = std::mem::replace(limits, limits.clone().within(files)).connections;
    if limits.connections < asked {
        let taken = limits.connections;
        tracing::warn!(
            files,
            wanted,
            asked,
            taken,
            "fewer connections are taken than --max-connections: raise the limit of open files (ulimit -n, LimitNOFILE)"
        );
    }
}

/// Waits for the end. A replica of the tier tells the controller first and serves on for a while: sessions that come meanwhile find it.
async fn drained(config: &Config, board: &Board, trigger: Trigger) -> anyhow::Result<bool> {
    let (Some(tier), Some(replica)) = (&config.tier, &board.replica_of_tier) else {
        return drain::on_signals(trigger, config.drain_limit, GRACE).await.context("catching signals");
    };
    let agent = replica.agent.clone();
    let give = || {
        tracing::info!(grace = ?tier.grace, "draining: new sessions are taken until the buckets have moved");
        agent.drain();
    };
    // An operator's order to drain is no end: it may be taken back, and streams stay as long as they like. The process ends when it is told to.
    let notice = Notice { order: std::future::pending(), give, wait: tier.grace };
    drain::on_signals_after(trigger, notice, config.drain_limit, GRACE).await.context("catching signals")
}

fn begin(config: &Config, whole: &Drain, traffic: Drain) -> anyhow::Result<Board> {
    let registry = Registry::new();
    let build = Family::new("istio_build", "What runs here.", &["component", "tag"]);
    registry.gauges(build).shared(&["canal-gateway", env!("CARGO_PKG_VERSION")]).set(1);
    let log = match &config.access_log {
        Some(sink) => Some(AccessLog::start(sink.clone(), &registry).context("starting the access log (--access-log)")?),
        None => None,
    };
    let certificates = match &config.feed {
        Feed::Controller(controller) => Some(certificates(config, controller, &registry, whole)?),
        Feed::Snapshot(_) => None,
    };
    let trust = TrustStore::new(&registry);
    let keyring = certificates.as_ref().map(|source| keyring(config, source, &trust, &registry));
    // A watcher, not a hold: the drain waits for every holder.
    let watcher = traffic.watcher();
    let names = config.tier.as_ref().map(|tier| tier::names(tier, &registry, whole)).transpose()?;
    let services = certificates
        .clone()
        .map(|source| -> WantService { Arc::new(move |gateway, service, algorithm| source.want_service(gateway, service, algorithm)) });
    let around = Surroundings {
        registry: registry.clone(),
        drain: traffic,
        keyring,
        certificates: services,
        log,
        dns: names.as_ref().map(tier::handover),
    };
    let settings = config.engine.clone();
    let (engine, subscriber, replica_of_tier) = match &config.feed {
        Feed::Controller(controller) => {
            let engine = Arc::new(Engine::start(settings, around)?);
            let replica = match (&config.tier, names) {
                (Some(tier), Some(names)) => {
                    Some(Arc::new(tier::start(tier, controller, &config.data_dir, &engine, names, &registry, whole)?))
                }
                _ => None,
            };
            let subscriber = subscribe(config, controller, &engine, replica.clone(), trust, &registry, whole);
            (engine, Some(subscriber), replica)
        }
        Feed::Snapshot(file) => {
            let (state, generation) = load(file)?;
            (Arc::new(Engine::start_with(settings, around, &state, generation)?), None, None)
        }
    };
    Ok(Board {
        engine,
        replica: config.engine.replica.clone(),
        registry,
        certificates,
        subscriber,
        traffic: watcher,
        replica_of_tier,
        was_ready: AtomicBool::new(false),
    })
}

fn certificates(config: &Config, controller: &Controller, registry: &Registry, drain: &Drain) -> anyhow::Result<CertificateSource> {
    let settings = CertificateConfig { controller: controller.clone(), folder: config.data_dir.join("certs"), validity: VALIDITY };
    CertificateSource::start(settings, registry, drain.clone()).context("starting the certificate source")
}

/// Gives the gateway's proofs to its tenants: where their keys are is each tenant's policy.
fn keyring(config: &Config, certificates: &CertificateSource, trust: &TrustStore, registry: &Registry) -> Keyring {
    let me = Principal::Gateway { name: config.name.clone(), az: config.az.clone() };
    // Without key servers of the provider too: tenants may have their own.
    let requester = component_identity(&me).map(|me| {
        let settings = RequesterConfig { az: config.az.clone(), servers: config.key_servers.clone(), me, trip: TRIP };
        Requester::start(settings, certificates, trust, registry)
    });
    Keyring::new(certificates.clone(), requester, trust.clone())
}

/// A compiled snapshot, whole or not at all.
fn load(file: &Path) -> anyhow::Result<(Vec<Arc<Resource>>, Generation)> {
    let state = snapshot::read(file, &Kind::ALL).with_context(|| format!("{} (--snapshot)", file.display()))?;
    Ok((Kind::ALL.iter().flat_map(|k| state.of(*k).cloned()).collect(), state.generation()))
}

fn subscribe(
    config: &Config,
    controller: &Controller,
    engine: &Arc<Engine>,
    replica: Option<Arc<Replica>>,
    trust: TrustStore,
    registry: &Registry,
    drain: &Drain,
) -> Subscriber {
    let settings = SubscriberConfig {
        controller: controller.clone(),
        node: format!("gateway~{}", config.engine.replica),
        version: env!("CARGO_PKG_VERSION").into(),
        kinds: Kind::ALL.to_vec(),
        snapshot: config.data_dir.join("snapshot"),
    };
    let engine = engine.clone();
    let apply = move |update: &Update, state: &State| {
        // First, so that nothing is served by new resources of a tenant that is closed since now.
        engine.close_tenants(state.closed().keys().cloned().collect());
        let mut refused = trust.apply(state);
        match update.origin {
            Origin::Snapshot => {
                let all: Vec<_> = Kind::ALL.iter().flat_map(|k| state.of(*k).cloned()).collect();
                engine.replace(&all, update.generation);
            }
            _ => engine.apply(&update.upserts, &update.removals, update.generation),
        }
        // After the engine: a session that a new table leads here finds its service.
        if let Some(replica) = &replica {
            refused.extend(replica.apply(update, state));
        }
        Ok(refused)
    };
    Subscriber::start(settings, registry, drain.clone(), Box::new(apply))
}

impl Board {
    fn dump(&self) -> serde_json::Value {
        json!({
            "replica": self.replica,
            "version": env!("CARGO_PKG_VERSION"),
            "southbound": self.subscriber.as_ref().map(Subscriber::status),
            "certificates": self.certificates.as_ref().map(CertificateSource::status),
            "redirector": self.replica_of_tier.as_ref().map(|r| r.agent.dump()),
            "engine": self.engine.dump(),
        })
    }

    fn ready(&self) -> Result<(), String> {
        // First of all, draining or not: sessions that are led to a worker that stands still are lost.
        worker_stuck(&self.engine.stuck_workers(), self.engine.workers().count())?;
        let Some(replica) = &self.replica_of_tier else {
            return if self.traffic.phase() == Phase::Running { self.complete() } else { Err("draining".into()) };
        };
        // A replica of the tier is up from its first readiness to its end. While it drains it keeps its sessions, and new ones are led
        // elsewhere by the bucket tables; and a tenant whose certificate is not there yet must not take the others' replica away.
        if !self.was_ready.load(Relaxed) {
            self.complete()?;
            replica.agent.ready()?;
            self.was_ready.store(true, Relaxed);
        }
        Ok(())
    }

    /// Whether it has all that it needs.
    fn complete(&self) -> Result<(), String> {
        if self.subscriber.as_ref().is_some_and(|s| !s.ready()) {
            return Err("no southbound state yet, neither from the controller nor from a snapshot".into());
        }
        // What only some services or key servers need holds up nobody else.
        let beside = |c: &CertificateStatus| c.identity.contains(COMPONENTS) || c.identity.contains(" for ");
        let lacking = |c: &&CertificateStatus| c.not_after.is_none() && !beside(c);
        match self.certificates.as_ref().and_then(|s| s.status().iter().find(lacking).map(|c| c.identity.clone())) {
            Some(identity) => Err(format!("no certificate for {identity} yet")),
            None => Ok(()),
        }
    }
}

/// Whether all workers turn. The edge knows the first word (`dataplane/edge/src/probe.rs`).
fn worker_stuck(stuck: &[usize], workers: usize) -> Result<(), String> {
    if stuck.is_empty() {
        return Ok(());
    }
    let stuck = stuck.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    Err(format!("worker_stuck: of {workers} workers these stand still: {stuck}; fix: restart the process if it stays so"))
}

/// Admin on localhost and on a unix socket, metrics and readiness where the operator says; each its own port, as in Istio.
fn serve_operators(config: &Config, board: &Arc<Board>, level: Level, process: &Arc<Trigger>, drain: &Drain) -> anyhow::Result<()> {
    let (for_dump, for_ready, tap) = (board.clone(), board.clone(), board.engine.tap());
    let admin = Routes::new()
        .config_dump(move || for_dump.dump())
        .metrics(board.registry.clone())
        .logging(level)
        .quit(process.clone(), config.drain_limit)
        .version(env!("CARGO_PKG_VERSION"))
        .socket_route(http::Method::GET, "/tap", move |request| {
            let wanted = |name| admin::query(&request, name);
            let filter = Filter { tenant: wanted("tenant"), service: wanted("service"), path: wanted("path"), status: wanted("status") };
            std::future::ready(match tap.listen(filter) {
                Some(lines) => admin::stream("application/x-ndjson", lines),
                None => admin::text(http::StatusCode::SERVICE_UNAVAILABLE, "too many listeners; close one\n"),
            })
        });
    let readiness = Routes::new().ready(move || for_ready.ready());
    let addresses =
        AdminAddresses { admin: config.admin, metrics: config.metrics, readiness: config.readiness, data_dir: config.data_dir.clone() };
    Ok(admin::serve_all(&addresses, (admin, readiness), &board.registry, drain)?)
}
