//! What one worker thread owns: its copy of the snapshot pointer, clock, blocks, endpoint states, tunnels, counters, accounts. Nothing in here
//! is shared with another thread, and nothing acts by itself.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use canal_kit::drain::{Drain, Phase};
use canal_kit::hbone::{ConnectionHost, HboneCounters, Pool, PoolConfig, WindowBudget};
use canal_kit::log::{AccessLog, WorkerLog};
use canal_kit::metrics::Registry;
use canal_model::identity::Identity;
use canal_model::ids::TenantName;
use canal_runtime::ShareHolder;
use futures::future::LocalBoxFuture;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::account::{Account, Accounts, WorkerLimits};
use crate::body_budget::BodyBudget;
use crate::buffer::Blocks;
use crate::clock::Clock;
use crate::config::EngineConfig;
use crate::counts::Counts;
use crate::endpoints::Upstreams;
use crate::parting::Parting;
use crate::scheduler::Scheduler;
use crate::series::{Families, Series};
use crate::shares::SharedLimits;
use crate::snapshot::{Publisher, Snapshot};
use crate::source::Sources;
use crate::tap::Hub;
use crate::token;
use crate::watchdog::Watchdog;

/// Takes over a TCP connection that is not the engine's to serve. Called on the workers' threads.
pub type Handover = Arc<dyn Fn(std::net::TcpStream) + Send + Sync>;

/// A snapshot as a worker hands it around: counted per worker, because one shared count would be fought over by all cores.
pub(crate) type Snap = Rc<Arc<Snapshot>>;

/// What all workers of an engine share; immutable, or made for sharing.
pub(crate) struct Shared {
    pub(crate) config: EngineConfig,
    pub(crate) publisher: Publisher,
    pub(crate) registry: Registry,
    pub(crate) families: Families,
    /// Taken out when the workers have ended, to be finished.
    pub(crate) log: Mutex<Option<AccessLog>>,
    pub(crate) tap: Hub,
    pub(crate) limits: SharedLimits,
    pub(crate) watchdog: Arc<Watchdog>,
    pub(crate) dns: Option<Handover>,
    /// Connections accepted by all workers.
    pub(crate) accepted: AtomicU64,
    /// The time that throttles count from.
    pub(crate) begun: std::time::Instant,
    /// Whether clients are asked to take their sessions elsewhere.
    pub(crate) parting: watch::Sender<bool>,
}

/// One worker.
pub(crate) struct Worker {
    pub(crate) shared: Arc<Shared>,
    snapshot: RefCell<Snap>,
    sequence: Cell<u64>,
    pub(crate) blocks: Blocks,
    pub(crate) clock: Clock,
    pub(crate) counts: Rc<Counts>,
    pub(crate) series: Series,
    pub(crate) upstreams: Upstreams,
    pub(crate) tunnels: Pool,
    pub(crate) hbone: HboneCounters,
    pub(crate) log: Option<WorkerLog>,
    pub(crate) sources: Sources,
    pub(crate) limits: WorkerLimits,
    pub(crate) accounts: Accounts,
    pub(crate) scheduler: Scheduler,
    /// Tokens that were verified.
    pub(crate) tokens: token::Cache,
    /// Bytes of bodies that are held for authorizers.
    pub(crate) bodies: Rc<BodyBudget>,
    random: Cell<u64>,
    h1_limits: canal_h1::Limits,
    /// For heads written in one go.
    pub(crate) scratch: RefCell<canal_h1::OutHead>,
    pub(crate) drain: Drain,
    pub(crate) parting: Parting,
    draining: Cell<bool>,
    open: Cell<usize>,
    closed: Notify,
}

/// A connection that is open; the worker does not end before it is dropped.
pub(crate) struct Open(Rc<Worker>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.set(self.0.open.get() - 1);
        if self.0.open.get() == 0 {
            self.0.closed.notify_waiters();
        }
    }
}

fn pool_config(config: &EngineConfig) -> PoolConfig {
    let sources = config.tier.as_ref().map(|tier| tier.sources).unwrap_or_default();
    PoolConfig { sources, ..PoolConfig::default() }
}

/// Connections of tunnels to endpoints run in the turns, and are paid from the share, of the tenant whose identity they are opened with.
struct TenantsHost(Weak<Worker>);

impl TenantsHost {
    fn account(&self, source: &Identity) -> Option<(Rc<Worker>, Rc<Account>)> {
        let worker = self.0.upgrade()?;
        let snapshot = worker.snapshot();
        let tenant = snapshot.tenant_of(&source.trust_domain)?;
        let account = worker.accounts.of(tenant, &worker.limits);
        Some((worker, account))
    }
}

impl ConnectionHost for TenantsHost {
    fn spawn(&self, source: &Identity, mut driver: LocalBoxFuture<'static, ()>) {
        let queue = self.account(source).map(|(_, account)| account.queue.clone());
        tokio::task::spawn_local(async move { Scheduler::run_for(queue, Pin::new(&mut driver)).await });
    }
    fn window_budget(&self, source: &Identity) -> Option<WindowBudget> {
        self.account(source).map(|(worker, account)| worker.window_budget(&account.tenant))
    }
}

impl Worker {
    /// What the windows of a tenant's connections are paid from.
    pub(crate) fn window_budget(&self, tenant: &TenantName) -> WindowBudget {
        WindowBudget { limit: self.shared.limits.buffer_bytes.clone(), holder: ShareHolder::Tenant(tenant.clone()) }
    }

    /// The account of a tenant that exists.
    pub(crate) fn account(&self, tenant: &str) -> Option<Rc<Account>> {
        self.snapshot().tenant(tenant).map(|tenant| self.accounts.of(tenant, &self.limits))
    }

    /// To be called on the worker's own thread, inside its `LocalRuntime`.
    pub(crate) fn new(shared: Arc<Shared>, count: usize, drain: Drain) -> Rc<Self> {
        let shard = shared.registry.shard();
        let hbone = HboneCounters::new(&shared.registry, &shard);
        let log = shared.log.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|log| log.worker(&shard));
        let counts = Rc::new(Counts::new(&shared.registry, &shard));
        let scheduler = Scheduler::new();
        let mine = |me: &Weak<Self>| Pool::with_host(pool_config(&shared.config), hbone.clone(), Rc::new(TenantsHost(me.clone())));
        Rc::new_cyclic(|me| Self {
            snapshot: RefCell::new(Rc::new(shared.publisher.newest())),
            sequence: Cell::new(0),
            blocks: Blocks::default(),
            clock: Clock::new(),
            accounts: Accounts::new(scheduler.clone(), counts.clone()),
            scheduler,
            counts,
            series: Series::new(&shared.families, &shard),
            upstreams: Upstreams::new(shared.config.az.clone()),
            tunnels: mine(me),
            hbone: hbone.clone(),
            log,
            sources: Sources::default(),
            limits: WorkerLimits::of(&shared.config.limits, count),
            tokens: token::Cache::default(),
            bodies: BodyBudget::new(shared.config.limits.body_bytes.div_ceil(count.max(1) as u64)),
            random: Cell::new(rand::random::<u64>() | 1),
            scratch: RefCell::default(),
            h1_limits: canal_h1::Limits { head_bytes_max: shared.config.limits.head_bytes as usize, ..canal_h1::Limits::DEFAULT },
            parting: Parting::new(&drain),
            drain,
            draining: Cell::new(false),
            open: Cell::new(0),
            closed: Notify::new(),
            shared: shared.clone(),
        })
    }

    /// The newest snapshot; one atomic comparison if there is no newer one.
    #[inline]
    pub(crate) fn snapshot(&self) -> Snap {
        let newest = self.shared.publisher.sequence();
        if self.sequence.get() != newest {
            self.sequence.set(newest);
            *self.snapshot.borrow_mut() = Rc::new(self.shared.publisher.newest());
        }
        self.snapshot.borrow().clone()
    }

    /// A random number, good enough to spread load and to name requests (SplitMix64).
    #[inline]
    pub(crate) fn random(&self) -> u64 {
        let state = self.random.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random.set(state);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn h1_limits(&self) -> &canal_h1::Limits {
        &self.h1_limits
    }

    /// Counts a connection as open.
    pub(crate) fn opened(self: &Rc<Self>) -> Open {
        self.open.set(self.open.get() + 1);
        Open(self.clone())
    }

    pub(crate) fn open(&self) -> usize {
        self.open.get()
    }

    /// The process ends.
    #[inline]
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// True while answers should say that the connection closes.
    #[inline]
    pub(crate) fn keeps_no_client(&self) -> bool {
        self.is_draining() || self.parting.is_asked()
    }

    /// Asks clients to leave, or no more: those that are idle soon, the others with their next answer.
    pub(crate) fn part(&self, ask: bool) {
        let times = &self.shared.config.times;
        self.clock.hasten(if ask { times.idle.saturating_sub(times.drain_idle) } else { Duration::ZERO });
        self.parting.set(ask);
    }

    /// Idle connections close soon, busy ones after their next answer.
    pub(crate) fn begin_drain(&self) {
        self.draining.set(true);
        let now = Instant::now();
        let mut until = now + self.shared.config.times.drain_idle;
        if let Phase::Draining { deadline } = self.drain.phase() {
            // Leave some time for what is busy.
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
