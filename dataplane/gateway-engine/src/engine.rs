//! The engine's interface to its process: start it, apply configuration changes, query its state,
//! drain it.
//!
//! Start with [`GatewayEngine::start`].

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use canal_gateway_config::{EndpointSet, PortView, ServiceView, Snapshot, TenantView};
use canal_gateway_config::{ServiceCertificateFn, SnapshotBuilder, TenantBuilds};
use canal_gateway_io::watchdog;
use canal_identity::ClientIdentityFactory;
use canal_model::ids::{Generation, ServiceId, TenantName};
use canal_model::program::{Resource, ResourceKind};
use canal_net::sys::SysError;
use canal_net::worker::{WorkerConfig, Workers};
use canal_runtime::drain::DrainWatcher;
use canal_runtime::metrics::Registry;
use canal_telemetry::access_log::AccessLog;
use canal_telemetry::tap::TapBroker;

use crate::accept::{self, ListenerFds};
use crate::config::GatewayConfig;
use crate::rebalance;
use crate::table_builds::TableBuilds;
use crate::worker::{EngineShared, Handover};

/// Reason why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// An address cannot be bound.
    #[error("{0}")]
    Listen(#[from] SysError),
    /// A thread or its runtime could not be created.
    #[error("starting workers: {0}; fix: raise the limit of threads (ulimit -u)")]
    Workers(std::io::Error),
}

/// Dependencies of an engine, besides its configuration.
pub struct EngineDependencies {
    pub registry: Registry,
    pub drain: DrainWatcher,
    /// Provides certificates; `None` if HBONE is not used.
    pub identities: Option<ClientIdentityFactory>,
    /// Provides certificates with services' names, for TLS that terminates at the gateway; `None`
    /// if there is none.
    pub certificates: Option<ServiceCertificateFn>,
    pub log: Option<AccessLog>,
    /// Takes over connections to port 53 of the tier's own services. If `None`, they are reset.
    pub dns: Option<Handover>,
}

/// A running engine: its workers, and the thread that builds tables.
pub struct GatewayEngine {
    shared: Arc<EngineShared>,
    builds: Arc<TableBuilds>,
    workers: Workers,
    listeners: Mutex<ListenerFds>,
}

impl Drop for GatewayEngine {
    fn drop(&mut self) {
        self.builds.end();
    }
}

impl GatewayEngine {
    /// Opens all listeners, then starts the workers. It must be called inside a tokio runtime.
    /// Every request gets 503 until the first [`GatewayEngine::apply`].
    ///
    /// # Errors
    /// An address cannot be bound, or a worker thread cannot be started.
    pub fn start(
        config: GatewayConfig,
        dependencies: EngineDependencies,
    ) -> Result<Self, GatewayError> {
        Self::start_with(config, dependencies, &[], Generation::default())
    }

    /// Starts an engine like [`GatewayEngine::start`], with an initial state that already applies
    /// to the first request.
    ///
    /// # Errors
    /// An address cannot be bound, or a worker thread cannot be started.
    pub fn start_with(
        mut config: GatewayConfig,
        dependencies: EngineDependencies,
        state: &[Arc<Resource>],
        generation: Generation,
    ) -> Result<Self, GatewayError> {
        let builder = SnapshotBuilder::new(
            &config.replica,
            dependencies.identities.clone(),
            dependencies.certificates.clone(),
        );
        let bound = accept::bind(&mut config)?;
        let EngineDependencies {
            registry,
            drain,
            identities: _,
            certificates: _,
            log,
            dns,
        } = dependencies;
        let shared = Arc::new(EngineShared::new(config, registry.clone(), log, dns));
        let builds = TableBuilds::start(shared.clone(), TenantBuilds::new(builder), &registry)
            .map_err(GatewayError::Workers)?;
        // Published before any worker runs, so that no request sees the empty snapshot.
        if !state.is_empty() {
            builds.load(state, generation);
        }
        let threads = WorkerConfig {
            count: shared.config.workers,
            name: "gateway",
            pin: shared.config.pin,
        };
        let (opened, all) = std::sync::mpsc::channel();
        let worker_shared = shared.clone();
        let workers = Workers::start(threads, drain, move |thread| {
            accept::run(worker_shared.clone(), thread, opened.clone())
        })
        .map_err(GatewayError::Workers)?;
        // The reserved addresses stay bound until every worker has opened its listeners.
        let mut listener_fds = ListenerFds::default();
        for _ in 0..workers.count() {
            // An error means that a worker thread ended without a message. Only the first worker
            // sends sockets.
            if let Ok(opened) = all.recv() {
                listener_fds = ListenerFds {
                    hbone: listener_fds.hbone.or(opened.hbone),
                    plain: listener_fds.plain.or(opened.plain),
                };
            }
        }
        drop(bound);
        tokio::spawn(watchdog::run(Arc::downgrade(&shared.watchdog)));
        Ok(Self {
            shared,
            builds,
            workers,
            listeners: Mutex::new(listener_fds),
        })
    }

    /// Sets the tenants of which nothing may be served. It takes effect with the next
    /// [`GatewayEngine::apply`] or [`GatewayEngine::replace`].
    pub fn close_tenants(&self, closed: BTreeSet<TenantName>) {
        self.builds.close_tenants(closed);
    }

    /// Applies a change. Requests that begin after the return are served with it, except for
    /// tenants whose routes take long to compile: these are routed as before until a thread has
    /// compiled them ([`canal_gateway_config::TenantBuilds`]).
    pub fn apply(
        &self,
        upserts: &[Arc<Resource>],
        removals: &[(ResourceKind, String)],
        generation: Generation,
    ) {
        self.builds.apply(upserts, removals, generation);
    }

    /// Applies a full state like [`GatewayEngine::apply`]; resources that it does not contain are
    /// removed.
    pub fn replace(&self, state: &[Arc<Resource>], generation: Generation) {
        self.builds.replace(state, generation);
    }

    /// Returns the listeners of a cloud tier replica, for socket steering. Only the first call
    /// returns them.
    pub fn take_listeners(&self) -> ListenerFds {
        std::mem::take(
            &mut *self
                .listeners
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }

    /// Returns the address that accepts plaintext connections inside the tier.
    pub fn inside_address(&self) -> Option<SocketAddr> {
        self.shared.config.tier.as_ref().map(|tier| tier.plain)
    }

    /// Returns the number of client TCP connections: open now, and accepted since the start.
    pub fn sessions(&self) -> (u64, u64) {
        (
            self.shared.limits.connections.used(),
            self.shared.accepted.load(Relaxed),
        )
    }

    /// Returns the indices of workers whose loops have not run for about a second. Connections that
    /// the kernel assigns to them wait.
    pub fn stuck_workers(&self) -> Vec<usize> {
        self.shared.watchdog.stuck_workers()
    }

    /// Starts or ends a soft drain: asks clients to reconnect elsewhere (RFC 9113 §6.8, RFC 9112
    /// §9.6). The engine keeps serving and ends no stream or relay. Clients that connect during the
    /// drain get the same request after a moment. It is meant for a replica whose work others take
    /// over.
    pub fn set_soft_drain(&self, wanted: bool) {
        self.shared
            .soft_drain
            .send_if_modified(|was| std::mem::replace(was, wanted) != wanted);
    }

    /// Asks the clients of buckets in `left`, which moved to another replica, to reconnect; a
    /// limited number at a time. `returned` revokes that for clients that were not notified yet.
    /// Both have one bit per bucket. No stream or relay is ended.
    pub fn rebalance(&self, service: ServiceId, left: u128, returned: u128) {
        let now = tokio::time::Instant::now();
        self.shared.moves.send_modify(|moves| {
            *moves = rebalance::decide_moves(moves, service, left, returned, now)
        });
    }

    /// Returns the broker for `/tap`.
    pub fn tap(&self) -> TapBroker {
        self.shared.tap.clone()
    }

    /// Returns the addresses that accept HBONE.
    pub fn hbone_addresses(&self) -> Vec<SocketAddr> {
        self.shared.config.hbone.clone()
    }

    /// Returns the addresses of the plain listeners, in configuration order.
    pub fn plain_addresses(&self) -> Vec<SocketAddr> {
        self.shared
            .config
            .plain
            .iter()
            .map(|plain| plain.address)
            .collect()
    }

    /// Returns the workers, so that the process can wait for their end.
    pub fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Blocks until the workers have ended and the last line of the access log is written.
    pub fn finish(&self) {
        self.workers.join();
        if let Some(log) = self
            .shared
            .log
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            log.finish();
        }
    }

    /// Returns the configuration in use, for `/config_dump`: all of it, or one tenant's.
    pub fn dump(&self, only: Option<&TenantName>) -> serde_json::Value {
        let mut dump = dump(&self.shared.publisher.newest(), only);
        let waiting = self
            .builds
            .waiting()
            .into_iter()
            .filter(|tenant| only.is_none_or(|only| only == tenant));
        dump["tenants_building"] = waiting.map(|tenant| tenant.to_string()).collect();
        dump
    }
}

fn dump(snapshot: &Snapshot, only: Option<&TenantName>) -> serde_json::Value {
    let services = |tenant: &TenantView| -> serde_json::Value {
        let mut list: Vec<_> = tenant.services().collect();
        // Sorted, because the maps iterate in random order.
        list.sort_by(|a, b| a.names.key.cmp(&b.names.key));
        let port = |p: &PortView| {
            let set = snapshot.set(p.slot);
            let endpoints = |set: &Arc<EndpointSet>| -> Vec<String> {
                set.endpoints
                    .iter()
                    .map(|e| format!("{} {}", e.workload.uid, e.address))
                    .collect()
            };
            serde_json::json!({
                "port": p.port,
                "protocol": format!("{:?}", p.protocol),
                "routed": p.routed,
                "tls_terminates": p.termination.is_some(),
                "endpoints_with_policies": set.map_or(0, |set| set.endpoints.iter().filter(|e| e.guard.is_some()).count()),
                "endpoints": set.map(endpoints).unwrap_or_default(),
            })
        };
        let service = |s: &Arc<ServiceView>| {
            serde_json::json!({
                "service": s.names.key.to_string(),
                "host": s.names.hostname,
                "vips": s.vips,
                "ports": s.ports.iter().map(port).collect::<Vec<_>>(),
                "rules": s.routes.as_ref().map_or(0, |r| r.rule_count()),
            })
        };
        list.into_iter().map(service).collect()
    };
    let mut tenants: Vec<_> = snapshot
        .tenants()
        .filter(|t| only.is_none_or(|only| *only == t.name))
        .collect();
    tenants.sort_by(|a, b| a.name.cmp(&b.name));
    let is_wanted = |tenant: &str| only.is_none_or(|only| only.as_str() == tenant);
    let mut gateways: Vec<_> = snapshot
        .gateways()
        .filter(|(_, t)| is_wanted(t.as_ref()))
        .map(|(a, t)| format!("{a} {t}"))
        .collect();
    gateways.sort();
    let tenant = |t: &Arc<TenantView>| {
        serde_json::json!({
            "tenant": t.name.as_str(),
            "trust_domain": t.trust_domain.as_ref().map(|d| d.as_str()),
            "federated": t.federated.iter().map(|d| d.as_str()).collect::<Vec<_>>(),
            "policies": t.policies.list(),
            "services": services(t),
        })
    };
    serde_json::json!({
        "generation": snapshot.generation.0,
        "gateway_addresses": gateways,
        "tenants": tenants.into_iter().map(tenant).collect::<Vec<_>>(),
    })
}
