//! The gateway process: which parts start, in which order, and how it ends. It carries no traffic
//! and decides nothing itself. Start at [`run`].

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::Context;
use canal_gateway_engine::{
    EngineDependencies, Filter, GatewayConfig, GatewayEngine, GatewayLimits, ServiceCertificateFn,
};
use canal_identity::ClientIdentityFactory;
use canal_identity::certs::{CertificateConfig, CertificateSource, CertificateStatus, VALIDITY};
use canal_keyserver_client::{ANSWER_TIMEOUT, KeyClient, KeyClientConfig, ServerAddress};
use canal_model::identity::{COMPONENTS, component_identity};
use canal_model::ids::{AzName, Generation, ReplicaName, TenantName};
use canal_model::principal::Principal;
use canal_model::program::{Resource, ResourceKind};
use canal_runtime::admin::{self, AdminAddresses, AdminRoutes};
use canal_runtime::drain::{
    self, DrainObserver, DrainPhase, DrainTrigger, DrainWatcher, PreDrain, TerminationSignals,
};
use canal_runtime::logging::LogLevelHandle;
use canal_runtime::metrics::{MetricFamily, Registry};
use canal_southbound_client::controller_client::ControllerEndpoint;
use canal_southbound_client::{ResourceState, Subscriber, SubscriberConfig, Update, state_file};
use canal_telemetry::access_log::{AccessLog, LogSink, LogTails};
use canal_telemetry::observe::{self, ObserveSources};
use canal_tls::TrustStore;
use serde_json::json;

use crate::apply;
use crate::tier::{self, ReplicaTasks, TierConfig};

/// Time that tasks may take beyond the drain's deadline.
/// A drain on the tier takes 2 s and 30 s by default. With this time the process ends within the
/// 35 s after which a world kills it.
const GRACE: Duration = Duration::from_secs(2);

/// Source of the compiled resources.
pub(crate) enum ProgramSource {
    Controller(ControllerEndpoint),
    Snapshot(PathBuf),
}

/// Settings of the gateway process.
pub(crate) struct GatewayProcessConfig {
    pub(crate) engine: GatewayConfig,
    /// Set for a replica of the cloud tier.
    pub(crate) tier: Option<TierConfig>,
    pub(crate) az: AzName,
    pub(crate) name: ReplicaName,
    pub(crate) key_servers: Vec<ServerAddress>,
    pub(crate) feed: ProgramSource,
    pub(crate) data_dir: PathBuf,
    pub(crate) admin: SocketAddr,
    pub(crate) metrics: SocketAddr,
    pub(crate) readiness: SocketAddr,
    pub(crate) access_log: Option<LogSink>,
    pub(crate) drain_limit: Duration,
}

/// The process's state as operators see it.
struct GatewayDump {
    engine: Arc<GatewayEngine>,
    replica: String,
    registry: Registry,
    certificates: Option<CertificateSource>,
    subscriber: Option<Subscriber>,
    traffic: DrainObserver,
    replica_of_tier: Option<Arc<ReplicaTasks>>,
    was_ready: AtomicBool,
    logs: Option<LogTails>,
}

/// Runs the gateway until SIGTERM, SIGINT or `/quitquitquit`, and drains. Returns `false` if work
/// was aborted at the deadline.
pub(crate) async fn run(
    mut config: GatewayProcessConfig,
    level: LogLevelHandle,
) -> anyhow::Result<bool> {
    let signals = TerminationSignals::catch().context("catching signals")?;
    fit_to_files(&mut config.engine.limits);
    std::fs::create_dir_all(&config.data_dir)
        .with_context(|| format!("creating {}; fix: name in --data-dir a directory that this process may create and write", config.data_dir.display()))?;
    // Two drain trees: traffic drains while admin, southbound and certificates still work. The
    // latter end with the process.
    let (process, process_drain) = drain::tree();
    let process = Arc::new(process);
    let (trigger, traffic) = process_drain.branch();
    let process_state = Arc::new(begin(&config, &process_drain, traffic)?);
    serve_operators(&config, &process_state, level, &process, &process_drain)?;
    serve_observers(&process_state, &process_drain);
    if let Some(replica) = &process_state.replica_of_tier {
        let watched = process_state.clone();
        // The redirector steers no session to this replica before it is ready.
        tokio::spawn(tier::open_when_ready(
            replica.agent.clone(),
            move || watched.ready(),
            process_state.traffic.clone(),
        ));
        tokio::spawn(tier::follow_soft_drain(
            replica.agent.clone(),
            Arc::downgrade(&process_state.engine),
        ));
    }
    let clean = drained(&config, &process_state, signals, trigger).await;
    tracing::info!(clean, "gateway: drained, the process ends");
    if let Some(replica) = &process_state.replica_of_tier {
        // The last report announces to the controller that this replica ends.
        replica.agent.leave().await;
    }
    let engine = process_state.engine.clone();
    // Admin, southbound and certificates end only now: the drain and the last report need them.
    process.force();
    drop(process_drain);
    // It waits for threads, which must not block this runtime.
    // A panic in it was already printed, and the process ends in any case.
    let _ = tokio::task::spawn_blocking(move || engine.finish()).await;
    Ok(clean)
}

/// Raises the limit of open files to what the connections may need. If the system allows fewer, the
/// limit of connections is lowered.
fn fit_to_files(limits: &mut GatewayLimits) {
    let (wanted, files) = (
        limits.files(),
        canal_runtime::raise_file_limit(limits.files()),
    );
    let configured = std::mem::replace(limits, limits.clone().within(files)).connections;
    if limits.connections < configured {
        let taken = limits.connections;
        tracing::warn!(
            files,
            wanted,
            configured,
            taken,
            "gateway: the limit of open files is too low for --max-connections, so fewer connections are accepted; fix: raise it (ulimit -n, LimitNOFILE)"
        );
    }
}

/// Waits for the end. A replica of the tier first announces the drain to the controller and keeps
/// serving for the grace time. Until the buckets have moved, new sessions still arrive.
async fn drained(
    config: &GatewayProcessConfig,
    process_state: &GatewayDump,
    signals: TerminationSignals,
    trigger: DrainTrigger,
) -> bool {
    let (Some(tier), Some(replica)) = (&config.tier, &process_state.replica_of_tier) else {
        return drain::on_signals(signals, trigger, config.drain_limit, GRACE).await;
    };
    let agent = replica.agent.clone();
    let give = || {
        tracing::info!(grace = ?tier.grace, "gateway: draining, new sessions are accepted until the buckets have moved");
        agent.drain();
    };
    // An operator's drain order does not end the process: it can be revoked, and streams continue
    // as long as they need. Only a signal or `/quitquitquit` ends it.
    let notice = PreDrain {
        order: std::future::pending(),
        give,
        wait: tier.grace,
    };
    drain::on_signals_after(signals, trigger, notice, config.drain_limit, GRACE).await
}

// Starts what others need first. A state file never changes, so it has no subscriber.
fn begin(
    config: &GatewayProcessConfig,
    process_drain: &DrainWatcher,
    traffic: DrainWatcher,
) -> anyhow::Result<GatewayDump> {
    let registry = registry();
    let log = access_log(config, &registry)?;
    let logs = log.as_ref().map(AccessLog::tails);
    let certificates = match &config.feed {
        ProgramSource::Controller(controller) => {
            Some(certificates(config, controller, &registry, process_drain)?)
        }
        // Without a controller nothing issues certificates, so the gateway serves plaintext only.
        ProgramSource::Snapshot(_) => None,
    };
    let trust = TrustStore::new(&registry);
    let keyring = certificates
        .as_ref()
        .map(|source| keyring(config, source, &trust, &registry));
    // An observer, because the drain waits for every watcher to be dropped.
    let watcher = traffic.watcher();
    // The engine hands DNS connections to this server, so the server starts first.
    let names = config
        .tier
        .as_ref()
        .map(|tier| tier::names(tier, &registry, process_drain, watcher.clone()))
        .transpose()?;
    let dependencies = EngineDependencies {
        registry: registry.clone(),
        drain: traffic,
        identities: keyring,
        certificates: certificates.clone().map(service_certificates),
        log,
        dns: names.as_ref().map(tier::handover),
    };
    let settings = config.engine.clone();
    let (engine, subscriber, replica_of_tier) = match &config.feed {
        ProgramSource::Controller(controller) => {
            let engine = Arc::new(GatewayEngine::start(settings, dependencies)?);
            let replica = match (&config.tier, names) {
                (Some(tier), Some(names)) => Some(Arc::new(tier::start(
                    tier,
                    controller,
                    &config.data_dir,
                    &engine,
                    names,
                    &registry,
                    process_drain,
                )?)),
                // Both come from `config.tier`, so one is never present without the other.
                _ => None,
            };
            // Last, because its first update needs the engine and the replica.
            let subscriber = subscribe(
                config,
                controller,
                &engine,
                replica.clone(),
                trust,
                &registry,
                process_drain,
            );
            (engine, Some(subscriber), replica)
        }
        ProgramSource::Snapshot(file) => {
            let (state, generation) = load(file)?;
            (
                Arc::new(GatewayEngine::start_with(
                    settings,
                    dependencies,
                    &state,
                    generation,
                )?),
                None,
                None,
            )
        }
    };
    Ok(GatewayDump {
        engine,
        replica: config.engine.replica.clone(),
        registry,
        certificates,
        subscriber,
        traffic: watcher,
        replica_of_tier,
        was_ready: AtomicBool::new(false),
        logs,
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
        .shared(&["canal-gateway", env!("CARGO_PKG_VERSION")])
        .set(1);
    registry
}

/// Starts the access log, if the operator configured one.
fn access_log(
    config: &GatewayProcessConfig,
    registry: &Registry,
) -> anyhow::Result<Option<AccessLog>> {
    let log = config
        .access_log
        .as_ref()
        .map(|sink| AccessLog::start(sink.clone(), registry));
    log.transpose()
        .context("starting the access log (--access-log)")
}

/// Serves operators' requests that arrive through the controller.
fn serve_observers(process_state: &Arc<GatewayDump>, process_drain: &DrainWatcher) {
    let Some(subscriber) = &process_state.subscriber else {
        return;
    };
    let (for_dump, tap) = (process_state.clone(), process_state.engine.tap());
    let sources = ObserveSources {
        dump: Box::new(move |tenant| for_dump.dump(tenant)),
        tap: Some(Box::new(move |filter| tap.listen(filter))),
        logs: process_state.logs.clone(),
        registry: process_state.registry.clone(),
    };
    tokio::spawn(observe::serve(
        subscriber.connections(),
        sources,
        process_drain.watcher(),
    ));
}

fn certificates(
    config: &GatewayProcessConfig,
    controller: &ControllerEndpoint,
    registry: &Registry,
    drain: &DrainWatcher,
) -> anyhow::Result<CertificateSource> {
    let settings = CertificateConfig {
        controller: controller.clone(),
        folder: config.data_dir.join("certs"),
        validity: VALIDITY,
    };
    CertificateSource::start(settings, registry, drain.clone())
        .context("starting the certificate source")
}

/// Returns the function by which the engine gets certificates of services.
fn service_certificates(source: CertificateSource) -> ServiceCertificateFn {
    Arc::new(move |gateway, service, algorithm| {
        source.service_credential(gateway, service, algorithm)
    })
}

/// Creates the gateway's client identities toward its tenants. Each tenant's policy decides where
/// their keys are.
fn keyring(
    config: &GatewayProcessConfig,
    certificates: &CertificateSource,
    trust: &TrustStore,
    registry: &Registry,
) -> ClientIdentityFactory {
    let me = Principal::Gateway {
        name: config.name.clone(),
        az: config.az.clone(),
    };
    // A key client starts even without key servers of the provider, because tenants may have their
    // own.
    let requester = component_identity(&me).map(|me| {
        let settings = KeyClientConfig {
            az: config.az.clone(),
            servers: config.key_servers.clone(),
            me,
            trip: ANSWER_TIMEOUT,
        };
        KeyClient::start(
            settings.clone(),
            certificates.credential_in_memory(&settings.me),
            trust,
            registry,
        )
    });
    ClientIdentityFactory::new(certificates.clone(), requester, trust.clone())
}

/// Reads a compiled snapshot, completely or not at all.
fn load(file: &Path) -> anyhow::Result<(Vec<Arc<Resource>>, Generation)> {
    let state = state_file::read(file, &ResourceKind::ALL)
        .with_context(|| format!("{} (--snapshot)", file.display()))?;
    Ok((
        ResourceKind::ALL
            .iter()
            .flat_map(|k| state.of(*k).cloned())
            .collect(),
        state.generation(),
    ))
}

fn subscribe(
    config: &GatewayProcessConfig,
    controller: &ControllerEndpoint,
    engine: &Arc<GatewayEngine>,
    replica: Option<Arc<ReplicaTasks>>,
    trust: TrustStore,
    registry: &Registry,
    drain: &DrainWatcher,
) -> Subscriber {
    let settings = SubscriberConfig {
        controller: controller.clone(),
        node: format!("gateway~{}", config.engine.replica),
        version: env!("CARGO_PKG_VERSION").into(),
        kinds: ResourceKind::ALL.to_vec(),
        snapshot: config.data_dir.join("snapshot"),
    };
    let engine = engine.clone();
    let apply = move |update: &Update, state: &ResourceState| {
        Ok(apply::apply_update(
            &trust,
            &engine,
            replica.as_deref(),
            update,
            state,
        ))
    };
    Subscriber::start(settings, registry, drain.clone(), Box::new(apply))
}

impl GatewayDump {
    /// Returns the configuration in use: all of it, or the part of one tenant.
    fn dump(&self, tenant: Option<&TenantName>) -> serde_json::Value {
        if let Some(tenant) = tenant {
            let southbound = self.subscriber.as_ref().map(Subscriber::status);
            return json!({
                "replica": self.replica,
                "version": env!("CARGO_PKG_VERSION"),
                "closed": southbound.and_then(|status| status.closed.get(tenant).map(|cause| json!(cause))),
                "engine": self.engine.dump(Some(tenant)),
            });
        }
        json!({
            "replica": self.replica,
            "version": env!("CARGO_PKG_VERSION"),
            "southbound": self.subscriber.as_ref().map(Subscriber::status),
            "certificates": self.certificates.as_ref().map(CertificateSource::status),
            "redirector": self.replica_of_tier.as_ref().map(|r| r.agent.dump()),
            "engine": self.engine.dump(None),
        })
    }

    fn ready(&self) -> Result<(), String> {
        // Stuck workers are checked first, also during a drain: sessions that reach a stuck worker
        // are lost.
        worker_stuck(&self.engine.stuck_workers(), self.engine.workers().count())?;
        let Some(replica) = &self.replica_of_tier else {
            return if self.traffic.phase() == DrainPhase::Running {
                self.complete()
            } else {
                Err("draining".into())
            };
        };
        // A replica of the tier stays up from its first readiness to its end. While it drains it
        // keeps its sessions, and the bucket tables lead new ones to other replicas. A missing
        // certificate of one tenant must not remove the replica for the other tenants.
        if !self.was_ready.load(Relaxed) {
            self.complete()?;
            replica.agent.ready()?;
            self.was_ready.store(true, Relaxed);
        }
        Ok(())
    }

    /// Returns whether the process has everything that it needs to serve.
    fn complete(&self) -> Result<(), String> {
        if self.subscriber.as_ref().is_some_and(|s| !s.ready()) {
            return Err(
                "no southbound state yet, neither from the controller nor from a snapshot".into(),
            );
        }
        // Certificates that only some services or key servers need must not delay all others.
        let beside =
            |c: &CertificateStatus| c.identity.contains(COMPONENTS) || c.identity.contains(" for ");
        let lacking = |c: &&CertificateStatus| c.not_after.is_none() && !beside(c);
        match self
            .certificates
            .as_ref()
            .and_then(|s| s.status().iter().find(lacking).map(|c| c.identity.clone()))
        {
            Some(identity) => Err(format!("no certificate for {identity} yet")),
            None => Ok(()),
        }
    }
}

/// Returns an error if a worker is stuck. The edge recognizes its first word
/// (`dataplane/edge-agent/src/probe.rs`).
fn worker_stuck(stuck: &[usize], workers: usize) -> Result<(), String> {
    if stuck.is_empty() {
        return Ok(());
    }
    let stuck = stuck
        .iter()
        .map(usize::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    Err(format!(
        "worker_stuck: these of {workers} workers send no heartbeat: {stuck}; fix: restart the process if this persists"
    ))
}

/// Serves admin, metrics and readiness on the configured addresses, and admin on a unix socket too.
/// Each has its own port, as in Istio. Admin is on localhost by default.
fn serve_operators(
    config: &GatewayProcessConfig,
    process_state: &Arc<GatewayDump>,
    level: LogLevelHandle,
    process: &Arc<DrainTrigger>,
    drain: &DrainWatcher,
) -> anyhow::Result<()> {
    let (for_dump, for_ready, tap) = (
        process_state.clone(),
        process_state.clone(),
        process_state.engine.tap(),
    );
    let admin = AdminRoutes::new()
        .config_dump(move || for_dump.dump(None))
        .metrics(process_state.registry.clone())
        .logging(level)
        // `/quitquitquit` drains within the same limit as a signal.
        .quit(process.clone(), config.drain_limit)
        .version(env!("CARGO_PKG_VERSION"))
        // On the socket alone, because the tap shows tenants' requests.
        .socket_route(http::Method::GET, "/tap", move |request| {
            let wanted = |name| admin::query(&request, name);
            let filter = Filter {
                tenant: wanted("tenant"),
                service: wanted("service"),
                path: wanted("path"),
                status: wanted("status"),
            };
            std::future::ready(match tap.listen(filter) {
                Some(lines) => admin::stream("application/x-ndjson", lines),
                None => admin::text(
                    http::StatusCode::SERVICE_UNAVAILABLE,
                    "too many clients read the tap; fix: close one of them\n",
                ),
            })
        });
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
