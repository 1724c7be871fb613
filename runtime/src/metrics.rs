//! Counters, gauges and histograms, sharded per worker: an increment is a plain store to the
//! worker's own cache lines. A label set is interned to a handle once. In a family with the label
//! `tenant`, each tenant has a share of the series. Label sets beyond the share are counted under
//! `other` of that tenant. The callers define names and meanings. The output is the Prometheus text
//! format, rendered in pieces ([`Exposition`]). Start with [`Registry`], then
//! [`MetricsShard::counter`].

mod cells;
mod exposition;
mod legacy_names;
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

use crate::TenantLimit;
use crate::share::TenantLimitUsage;
use canal_model::ids::TenantName;
use canal_model::share::Shares;
use tokio::time::Instant;

use cells::{Arena, CellRange};
use series::FamilyCore;
use shard::SeriesCache;

pub use exposition::Exposition;
pub use legacy_names::{show_legacy_names, with_legacy_names};
pub use scrape::{SCRAPE_TIMEOUT, SCRAPES_MAX, Scrape};

/// Default maximum of label sets in a family. In a family with the label `tenant`, tenants share it
/// (`metricSeries` of a Tenant's shares). Label sets beyond a share are counted under `other` of
/// the tenant. In other families, label sets beyond the maximum are counted under `other`.
/// It bounds the memory of the process and the text of a scrape. Nobody measured another value.
pub const SERIES_MAX: usize = 10_000;
/// A tenant's series without a change for this long ends at the next scrape, and starts at 0 when
/// it is used again.
/// Twelve times the 5 minutes that Prometheus looks back, so that most pauses of a tenant's traffic
/// do not reset its series. Nobody measured this value.
pub const SERIES_IDLE_TIMEOUT: Duration = Duration::from_secs(3600);
/// Interval at which owners of cached handles must look them up again; otherwise their series never
/// end. See [`MetricsShard::generation`].
/// A twelfth of [`SERIES_IDLE_TIMEOUT`]: cached handles delay the end of a series by that much at
/// most, and looking up again costs nothing that matters.
const GENERATION_INTERVAL: Duration = Duration::from_secs(300);
/// Maximum number of bounds of a histogram. With its sum and its overflow bucket it must fit into
/// one page of cells.
pub const BOUNDS_MAX: usize = 64;
pub use shares::SHARE_HOLDERS_MAX;
const _: () = assert!(BOUNDS_MAX + 2 <= cells::PAGE_SLOTS);

/// Definition of a metric family, given once at start-up.
#[derive(Debug, Clone, Copy)]
pub struct MetricFamily {
    /// Prometheus name of the family.
    pub name: &'static str,
    pub help: &'static str,
    pub labels: &'static [&'static str],
    /// Maximum number of label sets, see [`SERIES_MAX`].
    pub series_max: usize,
}

impl MetricFamily {
    /// Defines a family with [`SERIES_MAX`] label sets.
    pub const fn new(
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
    ) -> Self {
        Self {
            name,
            help,
            labels,
            series_max: SERIES_MAX,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum MetricShape {
    Counter,
    /// A counter of nanoseconds that is exposed in seconds.
    Seconds,
    Gauge,
    Histogram {
        bounds: &'static [u64],
        scale: f64,
    },
}

impl MetricShape {
    fn slots(self) -> usize {
        match self {
            MetricShape::Counter | MetricShape::Seconds | MetricShape::Gauge => 1,
            // The slots are one per bound, one above all bounds, and one for the sum.
            MetricShape::Histogram { bounds, .. } => bounds.len() + 2,
        }
    }
}

struct CounterProbe {
    name: &'static str,
    help: &'static str,
    value: Box<dyn Fn() -> f64 + Send + Sync>,
}

/// Returns the use of limits at a scrape.
type ShareSource = Box<dyn Fn() -> Vec<TenantLimitUsage> + Send + Sync>;

#[derive(Default)]
struct Inner {
    families: Mutex<Vec<Arc<FamilyCore>>>,
    probes: Mutex<Vec<CounterProbe>>,
    shared: Mutex<Arena>,
    limits: Mutex<Vec<ShareSource>>,
    scrapes: scrape::Scrapes,
    /// Shares that the provider configured for tenants.
    tenant_shares: Mutex<BTreeMap<TenantName, Shares>>,
    generation: Arc<AtomicU64>,
    generation_since: Mutex<Option<Instant>>,
}

/// All metric families of a process. It is cheap to clone.
#[derive(Clone, Default)]
pub struct Registry {
    inner: Arc<Inner>,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Registry")
    }
}

/// A family of counters with the same labels.
#[derive(Debug, Clone)]
pub struct CounterFamily {
    core: Arc<FamilyCore>,
    registry: Registry,
}
/// A family of gauges with the same labels.
#[derive(Debug, Clone)]
pub struct GaugeFamily {
    core: Arc<FamilyCore>,
    registry: Registry,
}
/// A family of histograms with the same labels and bounds.
#[derive(Debug, Clone)]
pub struct HistogramFamily {
    core: Arc<FamilyCore>,
    bounds: &'static [u64],
}

/// One worker's part of all families, which creates the worker's handles. It is `!Send`.
#[derive(Clone)]
pub struct MetricsShard {
    cache: Rc<SeriesCache>,
}

impl fmt::Debug for MetricsShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shard")
    }
}

/// Ties a handle to the thread whose cells it writes: with a single writer, an increment needs no
/// locked instruction.
type OneThread = std::marker::PhantomData<Rc<()>>;

/// A worker's own counter of one series. It is `!Send`, because only its worker writes it.
#[derive(Debug, Clone)]
pub struct Counter {
    slots: CellRange,
    _thread: OneThread,
}
/// A worker's own part of a gauge; the exposed value is the sum of all parts.
#[derive(Debug, Clone)]
pub struct Gauge {
    slots: CellRange,
    _thread: OneThread,
}
/// A worker's own part of a histogram; the exposed value is the sum of all parts.
#[derive(Debug, Clone)]
pub struct Histogram {
    slots: CellRange,
    bounds: &'static [u64],
    _thread: OneThread,
}
/// A counter to which any thread may add. It is for control tasks, not for the request path.
#[derive(Debug, Clone)]
pub struct SharedCounter {
    slots: CellRange,
}
/// A gauge that any thread may set.
#[derive(Debug, Clone)]
pub struct SharedGauge {
    slots: CellRange,
}

impl Registry {
    /// Creates a registry without any family.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a counter family, or returns the existing one of the same name, shape and labels.
    /// The name should end in `_total`.
    ///
    /// # Panics
    /// It panics if a family of another shape or other labels has the name. This is a programming
    /// error that shows at start-up.
    pub fn counters(&self, family: MetricFamily) -> CounterFamily {
        CounterFamily {
            core: self.core(family, MetricShape::Counter),
            registry: self.clone(),
        }
    }

    /// Registers (or finds) a counter family of durations: callers add nanoseconds, and seconds are
    /// exposed. The name should end in `_seconds_total`. It panics like [`Registry::counters`].
    pub fn seconds(&self, family: MetricFamily) -> CounterFamily {
        CounterFamily {
            core: self.core(family, MetricShape::Seconds),
            registry: self.clone(),
        }
    }

    /// Registers (or finds) a gauge family. It panics like [`Registry::counters`].
    pub fn gauges(&self, family: MetricFamily) -> GaugeFamily {
        GaugeFamily {
            core: self.core(family, MetricShape::Gauge),
            registry: self.clone(),
        }
    }

    /// Registers (or finds) a histogram family. `bounds` (at most [`BOUNDS_MAX`]) are in recorded
    /// units, ascending and inclusive. They are exposed as `bound × scale`: to record µs and expose
    /// ms, `scale` is 0.001. It panics like [`Registry::counters`], or on bad bounds.
    pub fn histograms(
        &self,
        family: MetricFamily,
        bounds: &'static [u64],
        scale: f64,
    ) -> HistogramFamily {
        assert!(
            bounds.len() <= BOUNDS_MAX && bounds.is_sorted(),
            "metric {}: bad bounds",
            family.name
        );
        HistogramFamily {
            core: self.core(family, MetricShape::Histogram { bounds, scale }),
            bounds,
        }
    }

    fn core(&self, family: MetricFamily, shape: MetricShape) -> Arc<FamilyCore> {
        let mut families = lock(&self.inner.families);
        if let Some(c) = families.iter().find(|c| c.family.name == family.name) {
            assert!(
                c.shape == shape && c.family.labels == family.labels,
                "metric {} is registered twice and differs",
                family.name
            );
            return c.clone();
        }
        let core = Arc::new(FamilyCore::new(family, shape));
        if let Some(limit) = core.limit() {
            limit.set_shares(lock(&self.inner.tenant_shares).iter());
        }
        families.push(core.clone());
        core
    }

    /// Registers a gauge without labels whose value is computed at each scrape.
    pub fn probe(
        &self,
        name: &'static str,
        help: &'static str,
        value: impl Fn() -> f64 + Send + Sync + 'static,
    ) {
        lock(&self.inner.probes).push(CounterProbe {
            name,
            help,
            value: Box::new(value),
        });
    }

    /// Exports the use of a shared limit, see [`crate::limits::show_shares`].
    pub(crate) fn show_limit(&self, limit: TenantLimit) {
        self.show_limits(move || vec![limit.usage()]);
    }

    /// Exports the use of several shared limits, see [`crate::limits::show_shares_of`].
    pub(crate) fn show_limits(
        &self,
        usage: impl Fn() -> Vec<TenantLimitUsage> + Send + Sync + 'static,
    ) {
        lock(&self.inner.limits).push(Box::new(usage));
    }

    /// Returns the tenants' use of each limit that they share.
    pub fn share_usage(&self) -> Vec<TenantLimitUsage> {
        let own: Vec<_> = lock(&self.inner.families)
            .iter()
            .filter_map(|c| c.limit().cloned())
            .collect();
        let shown: Vec<_> = lock(&self.inner.limits)
            .iter()
            .flat_map(|usage| usage())
            .collect();
        shown
            .into_iter()
            .chain(own.iter().map(TenantLimit::usage))
            .collect()
    }

    /// Creates the calling worker's part. Each worker thread creates it once.
    pub fn shard(&self) -> MetricsShard {
        MetricsShard {
            cache: Rc::new(SeriesCache::new(self.inner.generation.clone())),
        }
    }

    /// Sets the shares that the provider configured in `spec.shares`. Existing series of a tenant
    /// stay.
    pub fn set_shares<'a>(&self, tenants: impl IntoIterator<Item = (&'a TenantName, &'a Shares)>) {
        let shares: BTreeMap<_, _> = tenants
            .into_iter()
            .map(|(name, shares)| (name.clone(), shares.clone()))
            .collect();
        for core in lock(&self.inner.families).iter() {
            if let Some(limit) = core.limit() {
                limit.set_shares(&shares);
            }
        }
        *lock(&self.inner.tenant_shares) = shares;
    }

    /// Renders the Prometheus text format, version 0.0.4, with families sorted by name, in pieces
    /// of bounded size.
    pub fn exposition(&self) -> Exposition {
        self.exposition_at(Instant::now())
    }

    /// Renders the series of one owner, from the families whose series have owners.
    pub fn exposition_of(&self, owner: &str) -> Exposition {
        self.exposition_at(Instant::now()).of(owner)
    }

    fn exposition_at(&self, now: Instant) -> Exposition {
        // A new generation makes workers look up their cached handles again; the handles they drop
        // let idle series end.
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

    /// Renders [`Registry::exposition`] in one piece, for tests and small registries.
    pub fn render(&self) -> String {
        self.exposition().collect()
    }

    /// Writes the metrics that follow the families: overflow counters, shared limits, and probes.
    fn write_rest(&self, out: &mut String, families: &[Arc<FamilyCore>]) {
        text::folded(out, families);
        let shown: Vec<_> = lock(&self.inner.limits)
            .iter()
            .flat_map(|usage| usage())
            .collect();
        let own = families
            .iter()
            .filter_map(|c| c.limit().map(TenantLimit::usage));
        shares::write(out, &shown.into_iter().chain(own).collect::<Vec<_>>());
        for p in lock(&self.inner.probes).iter() {
            text::probe(out, p.name, p.help, (p.value)());
        }
    }

    fn shared(&self, core: &FamilyCore, labels: &[&str]) -> CellRange {
        let (slots, moved_one) = core.shared(labels, &mut lock(&self.inner.shared));
        if moved_one {
            self.inner.generation.fetch_add(1, Relaxed);
        }
        slots
    }
}

impl MetricsShard {
    /// Returns the generation of handles. It changes every few minutes, and when a series in use
    /// gave way. Owners of cached handles look them up again after a change.
    pub fn generation(&self) -> u64 {
        self.cache.generation()
    }

    /// Returns the worker's handle for a label set (values in the family's label order). This is a
    /// hash look-up; hot code should cache the handle.
    pub fn counter(&self, family: &CounterFamily, labels: &[&str]) -> Counter {
        Counter {
            slots: self.cache.slots(&family.core, labels),
            _thread: OneThread::default(),
        }
    }
    /// Returns the worker's gauge handle, like [`MetricsShard::counter`].
    pub fn gauge(&self, family: &GaugeFamily, labels: &[&str]) -> Gauge {
        Gauge {
            slots: self.cache.slots(&family.core, labels),
            _thread: OneThread::default(),
        }
    }
    /// Returns the worker's histogram handle, like [`MetricsShard::counter`].
    pub fn histogram(&self, family: &HistogramFamily, labels: &[&str]) -> Histogram {
        Histogram {
            slots: self.cache.slots(&family.core, labels),
            bounds: family.bounds,
            _thread: OneThread::default(),
        }
    }
}

impl CounterFamily {
    /// Returns a handle for any thread.
    pub fn shared(&self, labels: &[&str]) -> SharedCounter {
        SharedCounter {
            slots: self.registry.shared(&self.core, labels),
        }
    }
}
impl GaugeFamily {
    /// Returns a handle for any thread.
    pub fn shared(&self, labels: &[&str]) -> SharedGauge {
        SharedGauge {
            slots: self.registry.shared(&self.core, labels),
        }
    }
}

impl Counter {
    /// Adds one to the counter.
    #[inline]
    pub fn inc(&self) {
        self.add(1);
    }
    /// Adds `n` to the counter.
    #[inline]
    pub fn add(&self, n: u64) {
        self.slots.add_alone(0, n);
    }
    /// Returns this worker's part of the value.
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
    /// Adds one until the returned guard is dropped.
    pub fn hold(&self) -> GaugeGuard {
        self.add(1);
        GaugeGuard(self.clone())
    }
    /// Returns this worker's part of the value.
    pub fn value(&self) -> i64 {
        self.slots.get(0).cast_signed()
    }
}
/// Subtracts one from the gauge when it is dropped.
#[derive(Debug)]
pub struct GaugeGuard(Gauge);
impl Drop for GaugeGuard {
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
    /// Adds one to the counter.
    pub fn inc(&self) {
        self.add(1);
    }
    /// Adds `n` to the counter.
    pub fn add(&self, n: u64) {
        self.slots.add_shared(n);
    }
    /// Returns the part that was added through shared handles of this series.
    pub fn value(&self) -> u64 {
        self.slots.get(0)
    }
}
impl SharedGauge {
    /// Replaces the value of the gauge.
    pub fn set(&self, value: i64) {
        self.slots.set(value.cast_unsigned());
    }
    /// Adds `n`, which may be negative.
    pub fn add(&self, n: i64) {
        self.slots.add_shared(n.cast_unsigned());
    }
    /// Returns the part that was set through shared handles of this series.
    pub fn value(&self) -> i64 {
        self.slots.get(0).cast_signed()
    }
}

/// Locks the mutex and ignores poisoning: a panic under the lock leaves valid numbers.
fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
