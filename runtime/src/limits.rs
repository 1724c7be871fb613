//! Named limits: a caller takes a permit up to a maximum, and every refusal is counted. The caller
//! decides what to do after a refusal.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::TenantLimit;
use crate::share::TenantLimitUsage;

use crate::metrics::{MetricFamily, Registry, SharedCounter, SharedGauge};

/// Exports the use of a limit that tenants share, at every scrape. The series are
/// `canal_share_capacity{limit}`, and per holder `canal_share_used`, `canal_share_max`,
/// `canal_share_refused_total` and `canal_share_revoked_total` `{limit,tenant}`. At most
/// [`crate::metrics::SHARE_HOLDERS_MAX`] holders are listed, the largest by use and by refusals.
/// The rest are summed under `tenant="other"`. Several limits of one kind are exported as one: use
/// and maximum come from the limit nearest to its maximum, and refusals are summed.
pub fn show_shares(registry: &Registry, limit: &TenantLimit) {
    registry.show_limit(limit.clone());
}

/// Does what [`show_shares`] does for limits that are created and removed at run time: each scrape
/// and report calls `usage`.
pub fn show_shares_of(
    registry: &Registry,
    usage: impl Fn() -> Vec<TenantLimitUsage> + Send + Sync + 'static,
) {
    registry.show_limits(usage);
}

#[derive(Debug)]
struct Inner {
    name: &'static str,
    max: u64,
    used: AtomicU64,
    gauge: SharedGauge,
    refused: SharedCounter,
}

/// A process-wide limit. Clones share the same counter.
#[derive(Debug, Clone)]
pub struct Limit {
    inner: Arc<Inner>,
}

/// One unit of a limit, returned when it is dropped.
#[derive(Debug)]
pub struct Permit {
    limit: Limit,
}

impl Limit {
    /// Creates a limit and exports `canal_limit_max{limit}`, `canal_limit_used{limit}` and
    /// `canal_limit_refused_total{limit}`.
    pub fn new(registry: &Registry, name: &'static str, max: u64) -> Self {
        let labels = &["limit"];
        let gauge = |family, help| {
            registry
                .gauges(MetricFamily::new(family, help, labels))
                .shared(&[name])
        };
        gauge("canal_limit_max", "Maximum of a named limit.")
            .set(i64::try_from(max).unwrap_or(i64::MAX));
        let shown = gauge("canal_limit_used", "Amount of a named limit in use.");
        let refused = registry
            .counters(MetricFamily::new(
                "canal_limit_refused_total",
                "Refusals because a named limit was reached.",
                labels,
            ))
            .shared(&[name]);
        Self {
            inner: Arc::new(Inner {
                name,
                max,
                used: AtomicU64::new(0),
                gauge: shown,
                refused,
            }),
        }
    }

    /// Takes one unit, or counts a refusal and returns `None`.
    pub fn take(&self) -> Option<Permit> {
        let i = &self.inner;
        let taken = i
            .used
            .try_update(Relaxed, Relaxed, |n| (n < i.max).then_some(n + 1));
        if taken.is_err() {
            i.refused.inc();
            return None;
        }
        i.gauge.add(1);
        Some(Permit {
            limit: self.clone(),
        })
    }

    /// Returns the name, which is the label value of `limit`.
    pub fn name(&self) -> &'static str {
        self.inner.name
    }

    /// Returns the number of units in use.
    pub fn used(&self) -> u64 {
        self.inner.used.load(Relaxed)
    }

    /// Returns the maximum number of units.
    pub fn max(&self) -> u64 {
        self.inner.max
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.limit.inner.used.fetch_sub(1, Relaxed);
        self.limit.inner.gauge.add(-1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_reached_counted_and_given_back() {
        let r = Registry::new();
        let limit = Limit::new(&r, "connections", 2);
        let (a, b) = (limit.take(), limit.take());
        assert!(a.is_some() && b.is_some() && limit.take().is_none());
        drop(a);
        assert_eq!(limit.used(), 1);
        let text = r.render();
        for line in [
            "canal_limit_max{limit=\"connections\"} 2",
            "canal_limit_used{limit=\"connections\"} 1",
            "canal_limit_refused_total{limit=\"connections\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
    }
}
