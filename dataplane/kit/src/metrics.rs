//! Counters, gauges and histograms, sharded per worker: an increment is a plain store to the worker's own cache lines. Label sets are
//! interned to handles once; too many fold into `other`. Names and meanings are the callers'; the text form is Prometheus'.

use std::rc::Rc;
use std::sync::Arc;

/// All families of a process. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Registry {
    _inner: Arc<()>,
}

/// Default bound on a family's label sets; further ones are counted under `other`.
pub const SERIES_MAX: usize = 10_000;

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

/// A counter family.
#[derive(Debug, Clone)]
pub struct Counters {
    _inner: Arc<()>,
}
/// A gauge family.
#[derive(Debug, Clone)]
pub struct Gauges {
    _inner: Arc<()>,
}
/// A histogram family.
#[derive(Debug, Clone)]
pub struct Histograms {
    _inner: Arc<()>,
}

/// One worker's share of all families: where handles are made. `!Send`.
#[derive(Debug, Clone)]
pub struct Shard {
    _inner: Rc<()>,
}

/// A worker's own counter of one series. `!Send`: only its worker writes it.
#[derive(Debug, Clone)]
pub struct Counter {
    _inner: Rc<()>,
}
/// A worker's own part of a gauge; the exposed value is the sum of all parts.
#[derive(Debug, Clone)]
pub struct Gauge {
    _inner: Rc<()>,
}
/// A worker's own part of a histogram.
#[derive(Debug, Clone)]
pub struct Histogram {
    _inner: Rc<()>,
}
/// A counter any thread may add to; for control tasks, not for the request path.
#[derive(Debug, Clone)]
pub struct SharedCounter {
    _inner: Arc<()>,
}
/// A gauge any thread may set.
#[derive(Debug, Clone)]
pub struct SharedGauge {
    _inner: Arc<()>,
}

impl Registry {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }
    /// Registers (or finds: same name, same labels) a counter family. The name should end in `_total`.
    pub fn counters(&self, family: Family) -> Counters {
        let _ = family;
        unreachable!("body lands in the next commit")
    }
    /// Registers (or finds) a gauge family.
    pub fn gauges(&self, family: Family) -> Gauges {
        let _ = family;
        unreachable!("body lands in the next commit")
    }
    /// Registers (or finds) a histogram family. `bounds` are in recorded units, ascending; exposed as `bound × scale` (record µs,
    /// expose ms: `scale` = 0.001).
    pub fn histograms(&self, family: Family, bounds: &'static [u64], scale: f64) -> Histograms {
        let _ = (family, bounds, scale);
        unreachable!("body lands in the next commit")
    }
    /// A gauge without labels whose value is asked for at each scrape.
    pub fn probe(&self, name: &'static str, help: &'static str, value: impl Fn() -> f64 + Send + Sync + 'static) {
        let _ = (name, help, value);
        unreachable!("body lands in the next commit")
    }
    /// A share for the calling worker. One per worker thread, made once.
    pub fn shard(&self) -> Shard {
        unreachable!("body lands in the next commit")
    }
    /// The Prometheus text format, version 0.0.4, families by name.
    pub fn render(&self) -> String {
        unreachable!("body lands in the next commit")
    }
}

impl Shard {
    /// The worker's handle for a label set (values in the family's label order). A hash look-up; keep the handle where it is hot.
    pub fn counter(&self, family: &Counters, labels: &[&str]) -> Counter {
        let _ = (family, labels);
        unreachable!("body lands in the next commit")
    }
    /// See [`Shard::counter`].
    pub fn gauge(&self, family: &Gauges, labels: &[&str]) -> Gauge {
        let _ = (family, labels);
        unreachable!("body lands in the next commit")
    }
    /// See [`Shard::counter`].
    pub fn histogram(&self, family: &Histograms, labels: &[&str]) -> Histogram {
        let _ = (family, labels);
        unreachable!("body lands in the next commit")
    }
}

impl Counters {
    /// A handle for any thread.
    pub fn shared(&self, labels: &[&str]) -> SharedCounter {
        let _ = labels;
        unreachable!("body lands in the next commit")
    }
}
impl Gauges {
    /// A handle for any thread.
    pub fn shared(&self, labels: &[&str]) -> SharedGauge {
        let _ = labels;
        unreachable!("body lands in the next commit")
    }
}

impl Counter {
    /// Adds one.
    pub fn inc(&self) {
        self.add(1);
    }
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        let _ = n;
        unreachable!("body lands in the next commit")
    }
}
impl Gauge {
    /// Adds `n`, which may be negative.
    pub fn add(&self, n: i64) {
        let _ = n;
        unreachable!("body lands in the next commit")
    }
    /// Adds one until the guard is dropped.
    pub fn hold(&self) -> Hold {
        self.add(1);
        Hold(self.clone())
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
    pub fn observe(&self, value: u64) {
        let _ = value;
        unreachable!("body lands in the next commit")
    }
}
impl SharedCounter {
    /// Adds one.
    pub fn inc(&self) {
        self.add(1);
    }
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        let _ = n;
        unreachable!("body lands in the next commit")
    }
}
impl SharedGauge {
    /// Replaces the value.
    pub fn set(&self, value: i64) {
        let _ = value;
        unreachable!("body lands in the next commit")
    }
    /// Adds `n`, which may be negative.
    pub fn add(&self, n: i64) {
        let _ = n;
        unreachable!("body lands in the next commit")
    }
}
