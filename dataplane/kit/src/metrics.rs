//! Counters, gauges and histograms, sharded per worker: an increment is a plain store to the worker's own cache lines. Label sets are
//! interned to handles once. In a family with the label `tenant` each tenant has a share of the series; what goes beyond it is counted under
//! `other` of that tenant. Names and meanings are the callers'; the text form is Prometheus', written piece by piece ([`Exposition`]).

mod cells;
mod exposition;
mod scrape;
mod series;
mod shard;
mod shares;
mod text;

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use canal_model::ids::TenantName;
use canal_model::share::Shares;
use canal_runtime::TenantLimit;
use canal_runtime::share::TenantLimitUsage;
use tokio::time::Instant;

use cells::{Arena, Slots};
use series::Core;
use shard::Known;

pub use exposition::Exposition;
pub use scrape::{SCRAPE_TIMEOUT, SCRAPES_MAX, Scrape};

/// Default bound on a family's label sets. In a family with the label `tenant` it is shared (`metricSeries` of a Tenant's shares), and what
/// goes beyond a share is counted under `other` of its tenant; in other families what goes beyond the bound is counted under `other`.
pub const SERIES_MAX: usize = 10_000;
/// A series of a tenant in which nothing counted for this long ends at the next scrape, and starts at 0 when it is used again.
pub const SERIES_IDLE_TIMEOUT: Duration = Duration::from_secs(3600);
/// Handles that are kept for later must be looked up again this often, or their series never end: see [`Shard::generation`].
const GENERATION_INTERVAL: Duration = Duration::from_secs(300);
/// Most bounds of a histogram; it must fit one page of cells with its sum and its overflow.
pub const BOUNDS_MAX: usize = 64;
pub use shares::SHARE_HOLDERS_MAX;
const _: () = assert!(BOUNDS_MAX + 2 <= cells::PAGE_SLOTS);

/// What a family is, told once at start-up.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// Prometheus name.
    pub name: &'static str,
    pub help: &'static str,
    pub labels: &'static [&'static str],
    /// See [`SERIES_MAX`].
    pub series_max: usize,
}

impl Family {
    /// A family with [`SERIES_MAX`].
    pub const fn new(name: &'static str, help: &'static str, labels: &'static [&'static str]) -> Self {
        Self { name, help, labels, series_max: SERIES_MAX }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Shape {
    Counter,
    /// A counter of nanoseconds that is exposed in seconds.
    Seconds,
    Gauge,
    Histogram {
        bounds: &'static [u64],
        scale: f64,
    },
}

impl Shape {
    fn slots(self) -> usize {
        match self {
            Shape::Counter | Shape::Seconds | Shape::Gauge => 1,
            // One per bound, one above all bounds, one for the sum.
            Shape::Histogram { bounds, .. } => bounds.len() + 2,
        }
    }
}

struct Probe {
    name: &'static str,
    help: &'static str,
    value: Box<dyn Fn() -> f64 + Send + Sync>,
}

/// Gives the use of limits at a scrape.
type ShareSource = Box<dyn Fn() -> Vec<TenantLimitUsage> + Send + Sync>;

#[derive(Default)]
struct Inner {
    families: Mutex<Vec<Arc<Core>>>,
    probes: Mutex<Vec<Probe>>,
    shared: Mutex<Arena>,
    limits: Mutex<Vec<ShareSource>>,
    scrapes: scrape::Scrapes,
    /// What the provider wrote for tenants.
    tenant_shares: Mutex<BTreeMap<TenantName, Shares>>,
    generation: Arc<AtomicU64>,
    generation_since: Mutex<Option<Instant>>,
}

/// All families of a process. Cheap to clone.
#[derive(Clone, Default)]
pub struct Registry {
    inner: Arc<Inner>,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Registry")
    }
}

/// A counter family.
#[derive(Debug, Clone)]
pub struct Counters {
    core: Arc<Core>,
    registry: Registry,
}
/// A gauge family.
#[derive(Debug, Clone)]
pub struct Gauges {
    core: Arc<Core>,
    registry: Registry,
}
/// A histogram family.
#[derive(Debug, Clone)]
pub struct Histograms {
    core: Arc<Core>,
    bounds: &'static [u64],
}

/// One worker's share of all families: where handles are made. `!Send`.
#[derive(Clone)]
pub struct Shard {
    known: Rc<Known>,
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shard")
    }
}

/// Keeps a handle on the thread whose cells it writes: with one writer, an increment needs no locked instruction.
type OneThread = std::marker::PhantomData<Rc<()>>;

/// A worker's own counter of one series. `!Send`: only its worker writes it.
#[derive(Debug, Clone)]
pub struct Counter {
    slots: Slots,
    _thread: OneThread,
}
/// A worker's own part of a gauge; the exposed value is the sum of all parts.
#[derive(Debug, Clone)]
pub struct Gauge {
    slots: Slots,
    _thread: OneThread,
}
/// A worker's own part of a histogram.
#[derive(Debug, Clone)]
pub struct Histogram {
    slots: Slots,
    bounds: &'static [u64],
    _thread: OneThread,
}
/// A counter any thread may add to; for control tasks, not for the request path.
#[derive(Debug, Clone)]
pub struct SharedCounter {
    slots: Slots,
}
/// A gauge any thread may set.
#[derive(Debug, Clone)]
pub struct SharedGauge {
    slots: Slots,
}

impl Registry {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers (or finds: same name, shape and labels) a counter family. The name should end in `_total`.
    ///
    /// # Panics
    /// If the name is taken by a family of another shape or other labels: a mistake in the program, found at start-up.
    pub fn counters(&self, family: Family) -> Counters {
        Counters { core: self.core(family, Shape::Counter), registry: self.clone() }
    }

    /// Registers (or finds) a counter family of times: nanoseconds are added, seconds are exposed. The name should end in
    /// `_seconds_total`. Panics as [`Registry::counters`].
    pub fn seconds(&self, family: Family) -> Counters {
        Counters { core: self.core(family, Shape::Seconds), registry: self.clone() }
    }

    /// Registers (or finds) a gauge family. Panics as [`Registry::counters`].
    pub fn gauges(&self, family: Family) -> Gauges {
        Gauges { core: self.core(family, Shape::Gauge), registry: self.clone() }
    }

    /// Registers (or finds) a histogram family. `bounds` (at most [`BOUNDS_MAX`]) are in recorded units, ascending, inclusive; exposed as
    /// `bound × scale` (record µs, expose ms: `scale` = 0.001). Panics as [`Registry::counters`], or on bad bounds.
    pub fn histograms(&self, family: Family, bounds: &'static [u64], scale: f64) -> Histograms {
        assert!(bounds.len() <= BOUNDS_MAX && bounds.is_sorted(), "metric {}: bad bounds", family.name);
        Histograms { core: self.core(family, Shape::Histogram { bounds, scale }), bounds }
    }

    fn core(&self, family: Family, shape: Shape) -> Arc<Core> {
        let mut families = lock(&self.inner.families);
        if let Some(c) = families.iter().find(|c| c.family.name == family.name) {
            assert!(c.shape == shape && c.family.labels == family.labels, "metric {} is registered twice and differs", family.name);
            return c.clone();
        }
        let core = Arc::new(Core::new(family, shape));
        if let Some(limit) = core.limit() {
            limit.set_shares(lock(&self.inner.tenant_shares).iter());
        }
        families.push(core.clone());
        core
    }

    /// A gauge without labels whose value is asked for at each scrape.
    pub fn probe(&self, name: &'static str, help: &'static str, value: impl Fn() -> f64 + Send + Sync + 'static) {
        lock(&self.inner.probes).push(Probe { name, help, value: Box::new(value) });
    }

    /// See [`crate::limits::show_shares`].
    pub(crate) fn show_limit(&self, limit: TenantLimit) {
        self.show_limits(move || vec![limit.usage()]);
    }

    /// See [`crate::limits::show_shares_of`].
    pub(crate) fn show_limits(&self, usage: impl Fn() -> Vec<TenantLimitUsage> + Send + Sync + 'static) {
        lock(&self.inner.limits).push(Box::new(usage));
    }

    /// What tenants hold of each limit that they share.
    pub(crate) fn share_usage(&self) -> Vec<TenantLimitUsage> {
        let own: Vec<_> = lock(&self.inner.families).iter().filter_map(|c| c.limit().cloned()).collect();
        let shown: Vec<_> = lock(&self.inner.limits).iter().flat_map(|usage| usage()).collect();
        shown.into_iter().chain(own.iter().map(TenantLimit::usage)).collect()
    }

    /// A share for the calling worker. One per worker thread, made once.
    pub fn shard(&self) -> Shard {
        Shard { known: Rc::new(Known::new(self.inner.generation.clone())) }
    }

    /// Sets what the provider wrote for tenants in `spec.shares`; series that a tenant has stay.
    pub fn set_shares<'a>(&self, tenants: impl IntoIterator<Item = (&'a TenantName, &'a Shares)>) {
        let shares: BTreeMap<_, _> = tenants.into_iter().map(|(name, shares)| (name.clone(), shares.clone())).collect();
        for core in lock(&self.inner.families).iter() {
            if let Some(limit) = core.limit() {
                limit.set_shares(&shares);
            }
        }
        *lock(&self.inner.tenant_shares) = shares;
    }

    /// The Prometheus text format, version 0.0.4, families by name, in pieces of bounded size.
    pub fn exposition(&self) -> Exposition {
        self.exposition_at(Instant::now())
    }

    fn exposition_at(&self, now: Instant) -> Exposition {
        let mut since = lock(&self.inner.generation_since);
        if since.is_none_or(|since| now >= since + GENERATION_INTERVAL) {
            *since = Some(now);
            self.inner.generation.fetch_add(1, Relaxed);
        }
        drop(since);
        let mut families = lock(&self.inner.families).clone();
        families.sort_by_key(|c| c.family.name);
        Exposition::new(self.clone(), families, now)
    }

    /// [`Registry::exposition`] in one piece, for tests and small registries.
    pub fn render(&self) -> String {
        self.exposition().collect()
    }

    /// What stands behind the families: limits, what did not fit, and probes.
    fn write_rest(&self, out: &mut String, families: &[Arc<Core>]) {
        text::folded(out, families);
        let shown: Vec<_> = lock(&self.inner.limits).iter().flat_map(|usage| usage()).collect();
        let own = families.iter().filter_map(|c| c.limit().map(TenantLimit::usage));
        shares::write(out, &shown.into_iter().chain(own).collect::<Vec<_>>());
        for p in lock(&self.inner.probes).iter() {
            text::probe(out, p.name, p.help, (p.value)());
        }
    }

    fn shared(&self, core: &Core, labels: &[&str]) -> Slots {
        let (slots, moved_one) = core.shared(labels, &mut lock(&self.inner.shared));
        if moved_one {
            self.inner.generation.fetch_add(1, Relaxed);
        }
        slots
    }
}

impl Shard {
    /// Changes every few minutes, and when a series in use gave way: whoever keeps handles for later looks them up again then.
    pub fn generation(&self) -> u64 {
        self.known.generation()
    }

    /// The worker's handle for a label set (values in the family's label order). A hash look-up; keep the handle where it is hot.
    pub fn counter(&self, family: &Counters, labels: &[&str]) -> Counter {
        Counter { slots: self.known.slots(&family.core, labels), _thread: OneThread::default() }
    }
    /// See [`Shard::counter`].
    pub fn gauge(&self, family: &Gauges, labels: &[&str]) -> Gauge {
        Gauge { slots: self.known.slots(&family.core, labels), _thread: OneThread::default() }
    }
    /// See [`Shard::counter`].
    pub fn histogram(&self, family: &Histograms, labels: &[&str]) -> Histogram {
        Histogram { slots: self.known.slots(&family.core, labels), bounds: family.bounds, _thread: OneThread::default() }
    }
}

impl Counters {
    /// A handle for any thread.
    pub fn shared(&self, labels: &[&str]) -> SharedCounter {
        SharedCounter { slots: self.registry.shared(&self.core, labels) }
    }
}
impl Gauges {
    /// A handle for any thread.
    pub fn shared(&self, labels: &[&str]) -> SharedGauge {
        SharedGauge { slots: self.registry.shared(&self.core, labels) }
    }
}

impl Counter {
    /// Adds one.
    #[inline]
    pub fn inc(&self) {
        self.add(1);
    }
    /// Adds `n`.
    #[inline]
    pub fn add(&self, n: u64) {
        self.slots.add_alone(0, n);
    }
    /// This worker's part.
    pub fn value(&self) -> u64 {
        self.slots.get(0)
    }
}
impl Gauge {
    /// Adds `n`, which may be negative.
    #[inline]
    pub fn add(&self, n: i64) {
        self.slots.add_alone(0, n.cast_unsigned());
    }
    /// Adds one until the guard is dropped.
    pub fn hold(&self) -> Hold {
        self.add(1);
        Hold(self.clone())
    }
    /// This worker's part.
    pub fn value(&self) -> i64 {
        self.slots.get(0).cast_signed()
    }
}
/// Takes one from the gauge when dropped.
#[derive(Debug)]
pub struct Hold(Gauge);
impl Drop for Hold {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}
impl Histogram {
    /// Records a value in the family's recorded unit.
    #[inline]
    pub fn observe(&self, value: u64) {
        let bucket = self.bounds.partition_point(|b| *b < value);
        self.slots.add_alone(bucket, 1);
        self.slots.add_alone(self.bounds.len() + 1, value);
    }
}
impl SharedCounter {
    /// Adds one.
    pub fn inc(&self) {
        self.add(1);
    }
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.slots.add_shared(n);
    }
    /// The part added through shared handles of this series.
    pub fn value(&self) -> u64 {
        self.slots.get(0)
    }
}
impl SharedGauge {
    /// Replaces the value.
    pub fn set(&self, value: i64) {
        self.slots.set(value.cast_unsigned());
    }
    /// Adds `n`, which may be negative.
    pub fn add(&self, n: i64) {
        self.slots.add_shared(n.cast_unsigned());
    }
    /// The part held through shared handles of this series.
    pub fn value(&self) -> i64 {
        self.slots.get(0).cast_signed()
    }
}

/// A panic while a lock was held leaves numbers that are still numbers.
fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
