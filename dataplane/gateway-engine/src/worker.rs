//! State of one worker thread: its snapshot reference, clock, blocks, endpoint states, tunnels,
//! counters, and tenant usage.
//!
//! Nothing here is shared with another thread, except [`EngineShared`], and nothing runs by itself.
//! Start with [`Worker`].

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use canal_gateway_config::jwt;
use canal_gateway_config::{Snapshot, SnapshotPublisher};
use canal_gateway_io::buffer::Blocks;
use canal_gateway_io::clock::Clock;
use canal_gateway_io::scheduler::Scheduler;
use canal_gateway_io::watchdog::Watchdog;
use canal_gateway_limits::body_budget::BodyBudget;
use canal_gateway_limits::shares::SharedLimits;
use canal_gateway_limits::tenant_usage::{TenantUsage, TenantUsageTable, WorkerLimits};
use canal_gateway_limits::worker_counters::WorkerCounters;
use canal_hbone::{BufferBudget, ConnectionHost, HboneCounters, HbonePool, PoolConfig};
use canal_model::identity::Identity;
use canal_model::ids::TenantName;
use canal_runtime::ShareHolder;
use canal_runtime::drain::{DrainPhase, DrainWatcher};
use canal_runtime::metrics::Registry;
use canal_telemetry::access_log::{AccessLog, WorkerLog};
use canal_telemetry::tap::TapBroker;
use futures::future::{BoxFuture, LocalBoxFuture};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::config::GatewayConfig;
use crate::endpoints::Upstreams;
use crate::rebalance::{Moves, Rebalance};
use crate::request_metrics::{RequestMetricFamilies, RequestSeries};
use crate::soft_drain::SoftDrain;
use crate::source_workload::SourceTable;

/// Callback that takes over a tenant's TCP connection which the engine does not serve. It is called
/// on the workers' threads. The future resolves when the connection has ended, and dropping it ends
/// the connection.
pub type Handover =
    Arc<dyn Fn(std::net::TcpStream, &TenantName) -> BoxFuture<'static, ()> + Send + Sync>;

/// A snapshot as a worker passes it around. References are counted per worker, because all cores
/// would contend for one shared count.
pub(crate) type SnapshotRef = Rc<Arc<Snapshot>>;

/// State that all workers of an engine share; it is immutable or thread-safe.
pub(crate) struct EngineShared {
    pub(crate) config: GatewayConfig,
    pub(crate) publisher: SnapshotPublisher,
    pub(crate) registry: Registry,
    pub(crate) families: RequestMetricFamilies,
    /// Taken out when the workers have ended, so that the log can be finished.
    pub(crate) log: Mutex<Option<AccessLog>>,
    pub(crate) tap: TapBroker,
    pub(crate) limits: Arc<SharedLimits>,
    pub(crate) watchdog: Arc<Watchdog>,
    pub(crate) dns: Option<Handover>,
    /// Number of connections accepted by all workers.
    pub(crate) accepted: AtomicU64,
    /// Time from which throttles count.
    pub(crate) begun: std::time::Instant,
    /// True while a soft drain is wanted.
    pub(crate) soft_drain: watch::Sender<bool>,
    /// Moved buckets whose connections begin a soft drain.
    pub(crate) moves: watch::Sender<Moves>,
}

impl EngineShared {
    pub(crate) fn new(
        config: GatewayConfig,
        registry: Registry,
        log: Option<AccessLog>,
        dns: Option<Handover>,
    ) -> Self {
        Self {
            publisher: SnapshotPublisher::default(),
            families: RequestMetricFamilies::new(&registry),
            tap: TapBroker::new(&registry),
            limits: Arc::new(SharedLimits::new(&config.limits, &registry)),
            watchdog: Arc::new(Watchdog::new(&registry)),
            log: Mutex::new(log),
            dns,
            accepted: AtomicU64::new(0),
            begun: std::time::Instant::now(),
            soft_drain: watch::Sender::new(false),
            moves: watch::Sender::default(),
            registry,
            config,
        }
    }
}

/// State of one worker, which only its own thread uses.
pub(crate) struct Worker {
    pub(crate) shared: Arc<EngineShared>,
    snapshot: RefCell<SnapshotRef>,
    sequence: Cell<u64>,
    pub(crate) blocks: Blocks,
    pub(crate) clock: Clock,
    pub(crate) counts: Rc<WorkerCounters>,
    pub(crate) series: RequestSeries,
    pub(crate) upstreams: Upstreams,
    pub(crate) tunnels: HbonePool,
    pub(crate) hbone: HboneCounters,
    pub(crate) log: Option<WorkerLog>,
    pub(crate) sources: SourceTable,
    pub(crate) limits: WorkerLimits,
    pub(crate) accounts: TenantUsageTable,
    pub(crate) scheduler: Scheduler,
    /// Validated tokens and signature verifications.
    pub(crate) tokens: jwt::TokenCache,
    /// Budget of body bytes that are buffered for authorizers.
    pub(crate) bodies: Rc<BodyBudget>,
    random: Cell<u64>,
    h1_limits: canal_h1::MessageLimits,
    /// Scratch memory for heads that are written at once.
    pub(crate) scratch: RefCell<canal_h1::OutHead>,
    pub(crate) drain: DrainWatcher,
    pub(crate) soft_drain: SoftDrain,
    pub(crate) rebalance: Rc<Rebalance>,
    draining: Cell<bool>,
    open: Cell<usize>,
    closed: Notify,
}

/// Counts a connection as open until dropped; the worker does not end before.
pub(crate) struct OpenConnectionGuard(Rc<Worker>);

impl Drop for OpenConnectionGuard {
    fn drop(&mut self) {
        self.0.open.set(self.0.open.get() - 1);
        if self.0.open.get() == 0 {
            self.0.closed.notify_waiters();
        }
    }
}

fn pool_config(config: &GatewayConfig) -> PoolConfig {
    let sources = config
        .tier
        .as_ref()
        .map(|tier| tier.sources)
        .unwrap_or_default();
    PoolConfig {
        sources,
        ..PoolConfig::default()
    }
}

/// Runs tunnel connections to endpoints in the scheduler turns, and at the expense of the share, of
/// the tenant whose identity opened them.
struct TenantsHost(Weak<Worker>);

impl TenantsHost {
    fn account(&self, source: &Identity) -> Option<(Rc<Worker>, Rc<TenantUsage>)> {
        let worker = self.0.upgrade()?;
        let snapshot = worker.snapshot();
        let tenant = snapshot.tenant_of(&source.trust_domain)?;
        let account = worker.accounts.of(tenant, &worker.limits);
        Some((worker, account))
    }
}

impl ConnectionHost for TenantsHost {
    fn spawn(&self, source: &Identity, mut driver: LocalBoxFuture<'static, ()>) {
        let queue = self
            .account(source)
            .map(|(_, account)| account.queue.clone());
        tokio::task::spawn_local(
            async move { Scheduler::run_for(queue, Pin::new(&mut driver)).await },
        );
    }
    fn buffer_budget(&self, source: &Identity) -> Option<BufferBudget> {
        self.account(source)
            .map(|(worker, account)| worker.buffer_budget(&account.tenant))
    }
}

impl Worker {
    /// Returns the budget of the bytes that a tenant's connections hold for their readers.
    pub(crate) fn buffer_budget(&self, tenant: &TenantName) -> BufferBudget {
        BufferBudget {
            limit: self.shared.limits.buffer_bytes.clone(),
            holder: ShareHolder::Tenant(tenant.clone()),
        }
    }

    /// Returns the usage of a tenant, if the tenant exists.
    pub(crate) fn account(&self, tenant: &str) -> Option<Rc<TenantUsage>> {
        self.snapshot()
            .tenant(tenant)
            .map(|tenant| self.accounts.of(tenant, &self.limits))
    }

    /// Creates a worker. It must be called on the worker's own thread, inside its `LocalRuntime`: the
    /// shard of metrics belongs to the calling thread, where the access log also spawns a task.
    pub(crate) fn new(shared: Arc<EngineShared>, count: usize, drain: DrainWatcher) -> Rc<Self> {
        let shard = shared.registry.shard();
        let hbone = HboneCounters::new(&shared.registry, &shard);
        let log = shared
            .log
            .lock()
            // A panic of another worker leaves the log usable.
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(|log| log.worker(&shard));
        let counts = Rc::new(WorkerCounters::new(&shared.registry, &shard));
        let scheduler = Scheduler::new();
        let new_pool = |me: &Weak<Self>| {
            HbonePool::with_host(
                pool_config(&shared.config),
                hbone.clone(),
                Rc::new(TenantsHost(me.clone())),
            )
        };
        Rc::new_cyclic(|me| Self {
            snapshot: RefCell::new(Rc::new(shared.publisher.newest())),
            // With 0, the first call of `snapshot` loads the newest again, so both fields agree.
            sequence: Cell::new(0),
            blocks: Blocks::default(),
            clock: Clock::new(),
            accounts: TenantUsageTable::new(scheduler.clone(), counts.clone()),
            scheduler,
            counts,
            series: RequestSeries::new(&shared.families, &shard),
            upstreams: Upstreams::new(shared.config.az.clone()),
            tunnels: new_pool(me),
            hbone: hbone.clone(),
            log,
            sources: SourceTable::default(),
            limits: WorkerLimits::of(&shared.config.limits, count),
            tokens: jwt::TokenCache::default(),
            bodies: BodyBudget::new(
                shared
                    .config
                    .limits
                    .body_bytes
                    // Rounded up, so that a small budget leaves each worker a share.
                    .div_ceil(count.max(1) as u64),
            ),
            // Each worker starts elsewhere, so that workers do not choose the same endpoints in
            // step.
            random: Cell::new(rand::random::<u64>()),
            scratch: RefCell::default(),
            h1_limits: canal_h1::MessageLimits {
                head_bytes_max: shared.config.limits.head_bytes as usize,
                ..canal_h1::MessageLimits::DEFAULT
            },
            soft_drain: SoftDrain::new(&drain),
            rebalance: Rc::default(),
            drain,
            draining: Cell::new(false),
            open: Cell::new(0),
            closed: Notify::new(),
            shared: shared.clone(),
        })
    }

    /// Returns the newest snapshot. Costs one atomic comparison if there is no newer one.
    #[inline]
    pub(crate) fn snapshot(&self) -> SnapshotRef {
        let newest = self.shared.publisher.sequence();
        if self.sequence.get() != newest {
            self.sequence.set(newest);
            *self.snapshot.borrow_mut() = Rc::new(self.shared.publisher.newest());
        }
        self.snapshot.borrow().clone()
    }

    /// Returns a random number (SplitMix64), good enough to distribute load and to generate request
    /// IDs.
    #[inline]
    pub(crate) fn random(&self) -> u64 {
        let state = self.random.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random.set(state);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn h1_limits(&self) -> &canal_h1::MessageLimits {
        &self.h1_limits
    }

    /// Counts a connection as open.
    pub(crate) fn count_connection(self: &Rc<Self>) -> OpenConnectionGuard {
        self.open.set(self.open.get() + 1);
        OpenConnectionGuard(self.clone())
    }

    pub(crate) fn open(&self) -> usize {
        self.open.get()
    }

    /// True once the process shuts down.
    #[inline]
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// True while responses should announce that the connection closes.
    #[inline]
    pub(crate) fn keeps_no_client(&self) -> bool {
        self.is_draining() || self.soft_drain.is_draining()
    }

    /// Starts or ends a soft drain. Idle clients are disconnected soon; the others are notified
    /// with their next response.
    pub(crate) fn set_soft_drain(&self, is_draining: bool) {
        let times = &self.shared.config.times;
        self.clock.expire_idle(if is_draining {
            times.idle.saturating_sub(times.drain_idle)
        } else {
            Duration::ZERO
        });
        self.soft_drain.set(is_draining);
    }

    /// Begins the soft drain of the next connections of moved buckets. Returns whether more work
    /// remains.
    pub(crate) fn rebalance(&self, moves: &Moves) -> bool {
        let (clients, is_busy) = self.rebalance.turn(moves, Instant::now());
        self.counts.rebalanced.add(clients as u64);
        is_busy
    }

    /// Begins the drain: idle connections are closed soon, busy ones after their next response.
    pub(crate) fn begin_drain(&self) {
        self.draining.set(true);
        let now = Instant::now();
        let mut until = now + self.shared.config.times.drain_idle;
        if let DrainPhase::Draining { deadline } = self.drain.phase() {
            // Some time must remain for busy connections.
            until = until.min(now + deadline.saturating_duration_since(now) / 2);
        }
        self.clock.drain(until);
    }

    /// Waits until no connection is open.
    pub(crate) async fn until_closed(&self) {
        while self.open.get() > 0 {
            let mut closed = std::pin::pin!(self.closed.notified());
            closed.as_mut().enable();
            if self.open.get() > 0 {
                closed.await;
            }
        }
    }
}
