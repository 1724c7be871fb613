//! The engine as its process sees it: started with a configuration, fed with changes, asked how it stands, drained.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use canal_kit::drain::Drain;
use canal_kit::keys::Keyring;
use canal_kit::log::AccessLog;
use canal_kit::metrics::{Family, Registry, SharedGauge};
use canal_kit::sys::SysError;
use canal_kit::worker::{WorkerConfig, Workers};
use canal_model::ids::{Generation, TenantName};
use canal_model::program::{Kind, Resource};

use crate::accept::{self, Doors};
use crate::config::EngineConfig;
use crate::series::Families;
use crate::shares::SharedLimits;
use crate::snapshot::build::{Builder, WantService};
use crate::snapshot::{EndpointSet, PortView, Publisher, ServiceView, Snapshot, TenantView};
use crate::tap::Hub;
use crate::watchdog::{self, Watchdog};
use crate::worker::{Handover, Shared};

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// An address cannot be listened on.
    #[error("{0}")]
    Listen(#[from] SysError),
    /// A thread or its runtime could not be made.
    #[error("starting workers: {0}")]
    Workers(std::io::Error),
}

/// What an engine needs besides its configuration.
pub struct Surroundings {
    pub registry: Registry,
    pub drain: Drain,
    /// Gives certificates; `None` where HBONE is not spoken.
    pub keyring: Option<Keyring>,
    /// Gives certificates with services' names, for TLS that ends here; `None` where none ends.
    pub certificates: Option<WantService>,
    pub log: Option<AccessLog>,
    /// Takes connections to port 53 of the tier's own services; `None`: they are reset.
    pub dns: Option<Handover>,
}

/// A running engine.
pub struct Engine {
    shared: Arc<Shared>,
    builder: Mutex<Builder>,
    workers: Workers,
    gauges: Gauges,
    doors: Mutex<Doors>,
}

struct Gauges {
    generation: SharedGauge,
    services: SharedGauge,
    workloads: SharedGauge,
    faults: SharedGauge,
}

impl Gauges {
    fn new(registry: &Registry) -> Self {
        let gauge = |name, help| registry.gauges(Family::new(name, help, &[])).shared(&[]);
        Self {
            generation: gauge("canal_gateway_generation", "The generation that new requests are served by."),
            services: gauge("canal_gateway_services", "Services known."),
            workloads: gauge("canal_gateway_workload_addresses", "Workload addresses known."),
            faults: gauge("canal_gateway_route_faults", "Broken matches in routes; each fails closed."),
        }
    }
}

impl Engine {
    /// Opens all listeners, then starts the workers. Must be called inside a tokio runtime. Until the first [`Engine::apply`] every
    /// request is answered 503.
    pub fn start(config: EngineConfig, around: Surroundings) -> Result<Self, EngineError> {
        Self::start_with(config, around, &[], Generation::default())
    }

    /// The same with a state that all requests are served by, from the first on.
    pub fn start_with(
        mut config: EngineConfig,
        around: Surroundings,
        state: &[Arc<Resource>],
        generation: Generation,
    ) -> Result<Self, EngineError> {
        let mut builder = Builder::new(&config.replica, around.keyring.clone(), around.certificates.clone());
        let first = (!state.is_empty()).then(|| builder.apply(state, &[], generation));
        let held = accept::bind(&mut config)?;
        let Surroundings { registry, drain, keyring: _, certificates: _, log, dns } = around;
        let shared = Arc::new(Shared {
            publisher: Publisher::default(),
            families: Families::new(&registry),
            tap: Hub::new(&registry),
            limits: SharedLimits::new(&config.limits, &registry),
            watchdog: Arc::new(Watchdog::new(&registry)),
            log: Mutex::new(log),
            dns,
            accepted: AtomicU64::new(0),
            begun: std::time::Instant::now(),
            parting: tokio::sync::watch::Sender::new(false),
            registry: registry.clone(),
            config,
        });
        if let Some(first) = first {
            shared.limits.set_shares(&first, &shared.registry);
            shared.publisher.publish(first);
        }
        let threads = WorkerConfig { count: shared.config.workers, name: "gateway", pin: shared.config.pin };
        let (opened, all) = std::sync::mpsc::channel();
        let given = shared.clone();
        let workers = Workers::start(threads, drain, move |thread| accept::run(given.clone(), thread, opened.clone()))
            .map_err(EngineError::Workers)?;
        // The addresses are held until every worker listens.
        let mut doors = Doors::default();
        for _ in 0..workers.count() {
            if let Ok(opened) = all.recv() {
                doors = Doors { hbone: doors.hbone.or(opened.hbone), plain: doors.plain.or(opened.plain) };
            }
        }
        drop(held);
        tokio::spawn(watchdog::run(Arc::downgrade(&shared.watchdog)));
        Ok(Self { shared, builder: Mutex::new(builder), workers, gauges: Gauges::new(&registry), doors: Mutex::new(doors) })
    }

    /// Says of which tenants nothing may be served; it is in force with the next [`Engine::apply`] or [`Engine::replace`].
    pub fn close_tenants(&self, closed: BTreeSet<TenantName>) {
        self.builder.lock().unwrap_or_else(PoisonError::into_inner).close_tenants(closed);
    }

    /// Takes a change; requests that begin after it returned are served by it.
    pub fn apply(&self, upserts: &[Arc<Resource>], removals: &[(Kind, String)], generation: Generation) {
        let mut builder = self.builder.lock().unwrap_or_else(PoisonError::into_inner);
        let snapshot = builder.apply(upserts, removals, generation);
        let counts = snapshot.tenants().map(|t| t.counts()).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        let set = |gauge: &SharedGauge, n: usize| gauge.set(i64::try_from(n).unwrap_or(i64::MAX));
        self.gauges.generation.set(i64::try_from(generation.0).unwrap_or(i64::MAX));
        set(&self.gauges.services, counts.0);
        set(&self.gauges.workloads, counts.1);
        set(&self.gauges.faults, builder.route_faults());
        // Before the snapshot is: a tenant's first connections meet its own shares.
        if upserts.iter().any(|resource| resource.kind() == Kind::Tenant) || removals.iter().any(|(kind, _)| *kind == Kind::Tenant) {
            self.shared.limits.set_shares(&snapshot, &self.shared.registry);
        }
        self.shared.publisher.publish(snapshot);
    }

    /// Takes a whole state: what it does not hold is gone.
    pub fn replace(&self, state: &[Arc<Resource>], generation: Generation) {
        let gone = self.builder.lock().unwrap_or_else(PoisonError::into_inner).names_beside(state);
        self.apply(state, &gone, generation);
    }

    /// The listeners of a replica of the cloud tier, for its redirector. They are given once.
    pub fn take_doors(&self) -> Doors {
        std::mem::take(&mut *self.doors.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Where plain connections inside the tier are accepted.
    pub fn inside_address(&self) -> Option<SocketAddr> {
        self.shared.config.tier.as_ref().map(|tier| tier.plain)
    }

    /// TCP connections of clients: open now, and accepted since the start.
    pub fn sessions(&self) -> (u64, u64) {
        (self.shared.limits.connections.used(), self.shared.accepted.load(Relaxed))
    }

    /// The indices of workers whose loops have stood still for about a second: what the kernel gives them waits.
    pub fn stuck_workers(&self) -> Vec<usize> {
        self.shared.watchdog.stuck_workers()
    }

    /// Asks clients to take their sessions elsewhere (RFC 9113 §6.8, RFC 9112 §9.6), for as long as `wanted`; the engine serves on, and
    /// no stream or relay is ended. Sessions that come meanwhile are asked too, after a moment. For a replica that others take over from.
    pub fn part(&self, wanted: bool) {
        self.shared.parting.send_if_modified(|was| std::mem::replace(was, wanted) != wanted);
    }

    /// For `/tap`.
    pub fn tap(&self) -> Hub {
        self.shared.tap.clone()
    }

    /// Where HBONE is accepted.
    pub fn hbone_addresses(&self) -> Vec<SocketAddr> {
        self.shared.config.hbone.clone()
    }

    /// Where plain listeners are, in the order configured.
    pub fn plain_addresses(&self) -> Vec<SocketAddr> {
        self.shared.config.plain.iter().map(|plain| plain.address).collect()
    }

    /// The workers: to wait for their end.
    pub fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Waits, blocking, until the workers have ended, and until the access log's last line is written.
    pub fn finish(&self) {
        self.workers.join();
        if let Some(log) = self.shared.log.lock().unwrap_or_else(PoisonError::into_inner).take() {
            log.finish();
        }
    }

    /// What it serves by, for `/config_dump`.
    pub fn dump(&self) -> serde_json::Value {
        dump(&self.shared.publisher.newest())
    }
}

fn dump(snapshot: &Snapshot) -> serde_json::Value {
    let services = |tenant: &TenantView| -> serde_json::Value {
        let mut list: Vec<_> = tenant.services().collect();
        list.sort_by(|a, b| a.names.key.cmp(&b.names.key));
        let port = |p: &PortView| {
            let set = snapshot.set(p.slot);
            let endpoints = |set: &Arc<EndpointSet>| -> Vec<String> {
                set.endpoints.iter().map(|e| format!("{} {}", e.workload.uid, e.address)).collect()
            };
            serde_json::json!({
                "port": p.port,
                "protocol": format!("{:?}", p.protocol),
                "routed": p.routed,
                "tls_ends_here": p.termination.is_some(),
                "policed_endpoints": set.map_or(0, |set| set.endpoints.iter().filter(|e| e.guard.is_some()).count()),
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
    let mut tenants: Vec<_> = snapshot.tenants().collect();
    tenants.sort_by(|a, b| a.name.cmp(&b.name));
    let mut gateways: Vec<_> = snapshot.gateways().map(|(a, t)| format!("{a} {t}")).collect();
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
