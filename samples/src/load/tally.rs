//! [`LoadTally`]: the counts of a load run, and its JSON report. Every request ends in exactly one outcome.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use super::histogram::LatencyHistogram;

/// Maximum number of failures that are reported in full. Further ones are only counted. They are
/// for a person who reads the report.
const EXAMPLES_MAX: usize = 10;
/// Maximum length of the timeline, in seconds. An hour is longer than any run of the tests; later
/// seconds are in the totals only.
const TIMELINE_SECONDS_MAX: usize = 3600;
/// Maximum number of different `x-served-by` values (and pods) that are counted by name. Further
/// ones count as `other`. More than any world of the tests has pods of one service.
const NAMES_MAX: usize = 256;

/// Result of one request of a run.
#[derive(Debug, Default)]
pub struct RequestOutcome {
    /// Kind (one word) and detail of a failure.
    pub failure: Option<(String, String)>,
    served_by: Option<String>,
    pod: Option<String>,
}

impl RequestOutcome {
    /// Returns the outcome of a request that got no answer.
    pub fn failed(kind: &str, detail: String) -> Self {
        Self {
            failure: Some((kind.to_owned(), detail)),
            ..Self::default()
        }
    }
    /// Returns the outcome of a request that was answered.
    pub fn answered(served_by: Option<String>, pod: Option<String>) -> Self {
        Self {
            failure: None,
            served_by,
            pod,
        }
    }
}

/// Counts of one second of a run.
#[derive(Debug, Clone, Default)]
struct Second {
    ok: u64,
    failed: u64,
    served_by: BTreeMap<String, u64>,
}

/// Counts of a run, or of one of its connections.
#[derive(Debug)]
pub struct LoadTally {
    started: Instant,
    ok: u64,
    failed: BTreeMap<String, u64>,
    served_by: BTreeMap<String, u64>,
    pods: BTreeMap<String, u64>,
    latency: LatencyHistogram,
    examples: Vec<(Duration, String, String)>,
    failed_first: Option<Duration>,
    failed_last: Option<Duration>,
    /// End times of successful requests in order, at most one per millisecond. They give the
    /// longest gap.
    success_ms: Vec<u32>,
    timeline: Option<Vec<Second>>,
}

fn add(counts: &mut BTreeMap<String, u64>, name: String, n: u64) {
    let name = if counts.len() < NAMES_MAX || counts.contains_key(&name) {
        name
    } else {
        "other".to_owned()
    };
    *counts.entry(name).or_default() += n;
}

fn earlier(a: Option<Duration>, b: Option<Duration>) -> Option<Duration> {
    a.into_iter().chain(b).min()
}

impl LoadTally {
    /// Returns a tally without counts.
    pub fn new(started: Instant, timeline: bool) -> Self {
        Self {
            started,
            ok: 0,
            failed: BTreeMap::new(),
            served_by: BTreeMap::new(),
            pods: BTreeMap::new(),
            latency: LatencyHistogram::default(),
            examples: Vec::new(),
            failed_first: None,
            failed_last: None,
            success_ms: Vec::new(),
            timeline: timeline.then(Vec::new),
        }
    }

    /// Counts a request that was due at `due` and ended now.
    pub fn count(&mut self, due: Instant, outcome: RequestOutcome) {
        let at = self.started.elapsed();
        let failed = outcome.failure.is_some();
        if let Some(second) = self.second(at) {
            if failed {
                second.failed += 1
            } else {
                second.ok += 1
            }
            if let Some(name) = &outcome.served_by {
                add(&mut second.served_by, name.clone(), 1);
            }
        }
        if let Some(name) = outcome.served_by {
            add(&mut self.served_by, name, 1);
        }
        if let Some(name) = outcome.pod {
            add(&mut self.pods, name, 1);
        }
        match outcome.failure {
            None => self.succeeded(at, due),
            Some((kind, detail)) => self.failed(at, kind, detail),
        }
    }

    fn second(&mut self, at: Duration) -> Option<&mut Second> {
        let timeline = self.timeline.as_mut()?;
        let index = usize::try_from(at.as_secs())
            .ok()
            .filter(|i| *i < TIMELINE_SECONDS_MAX)?;
        if timeline.len() <= index {
            timeline.resize(index + 1, Second::default());
        }
        timeline.get_mut(index)
    }

    fn succeeded(&mut self, at: Duration, due: Instant) {
        self.ok += 1;
        self.latency.record(due.elapsed());
        let ms = u32::try_from(at.as_millis()).unwrap_or(u32::MAX);
        if self.success_ms.last() != Some(&ms) {
            self.success_ms.push(ms);
        }
    }

    fn failed(&mut self, at: Duration, kind: String, detail: String) {
        self.failed_first = earlier(self.failed_first, Some(at));
        self.failed_last = self.failed_last.max(Some(at));
        if self.examples.len() < EXAMPLES_MAX {
            self.examples.push((at, kind.clone(), detail));
        }
        add(&mut self.failed, kind, 1);
    }

    /// Adds the counts of another connection.
    pub fn merge(&mut self, other: Self) {
        self.ok += other.ok;
        self.latency.merge(&other.latency);
        for (mine, theirs) in [
            (&mut self.failed, other.failed),
            (&mut self.served_by, other.served_by),
            (&mut self.pods, other.pods),
        ] {
            theirs.into_iter().for_each(|(name, n)| add(mine, name, n));
        }
        self.examples.extend(other.examples);
        self.examples.sort();
        self.examples.truncate(EXAMPLES_MAX);
        self.failed_first = earlier(self.failed_first, other.failed_first);
        self.failed_last = self.failed_last.max(other.failed_last);
        self.success_ms.extend(other.success_ms);
        self.success_ms.sort_unstable();
        self.success_ms.dedup();
        for (index, theirs) in other.timeline.unwrap_or_default().into_iter().enumerate() {
            if let Some(mine) = self.second(Duration::from_secs(index as u64)) {
                mine.ok += theirs.ok;
                mine.failed += theirs.failed;
                theirs
                    .served_by
                    .into_iter()
                    .for_each(|(name, n)| add(&mut mine.served_by, name, n));
            }
        }
    }

    /// Returns the longest time without a success in ms, including the start and the end of the
    /// run.
    fn gap_ms_max(&self, elapsed: Duration) -> u32 {
        let end = u32::try_from(elapsed.as_millis()).unwrap_or(u32::MAX);
        let starts = std::iter::once(&0).chain(&self.success_ms);
        let ends = self.success_ms.iter().chain(std::iter::once(&end));
        starts
            .zip(ends)
            .map(|(a, b)| b.saturating_sub(*a))
            .max()
            .unwrap_or(0)
    }

    /// Returns the report. Latencies are those of successes, in milliseconds.
    pub fn report(&self, elapsed: Duration) -> Value {
        let failed: u64 = self.failed.values().sum();
        let ms = |us: u64| us as f64 / 1e3;
        let at = |at: Option<Duration>| at.map(|at| at.as_millis() as u64);
        let examples: Vec<Value> = self
            .examples
            .iter()
            .map(|(at, kind, detail)| json!({ "at_ms": at.as_millis() as u64, "kind": kind, "detail": detail }))
            .collect();
        let mut report = json!({
            "ok": failed == 0 && self.ok > 0,
            "requests": self.ok + failed, "succeeded": self.ok, "failed": failed, "failed_by_kind": self.failed,
            "elapsed_s": elapsed.as_secs_f64(), "rps": self.ok as f64 / elapsed.as_secs_f64().max(1e-9),
            "latency_ms": {
                "mean": ms(self.latency.mean()), "p50": ms(self.latency.quantile(0.5)), "p90": ms(self.latency.quantile(0.9)),
                "p99": ms(self.latency.quantile(0.99)), "p999": ms(self.latency.quantile(0.999)), "max": ms(self.latency.max()),
            },
            "served_by": self.served_by, "pods": self.pods,
            "gap_ms_max": self.gap_ms_max(elapsed),
            "failed_first_ms": at(self.failed_first), "failed_last_ms": at(self.failed_last), "examples": examples,
        });
        if let Some(timeline) = &self.timeline {
            let seconds = timeline
                .iter()
                .map(|s| json!({ "ok": s.ok, "failed": s.failed, "served_by": s.served_by }));
            report["timeline"] = seconds.collect();
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_counts_are_the_sum_and_gaps_are_seen() {
        let started = Instant::now();
        let mut a = LoadTally::new(started, true);
        a.count(
            started,
            RequestOutcome::answered(Some("reviews-v1".into()), None),
        );
        a.count(started, RequestOutcome::failed("reset", "gone".into()));
        let mut b = LoadTally::new(started, true);
        b.count(
            started,
            RequestOutcome::answered(Some("reviews-v1".into()), Some("p".into())),
        );
        a.merge(b);
        let report = a.report(Duration::from_secs(2));
        assert_eq!(report["requests"], 3);
        assert_eq!(report["failed_by_kind"], json!({ "reset": 1 }));
        assert_eq!(report["served_by"], json!({ "reviews-v1": 2 }));
        assert_eq!(report["timeline"][0]["ok"], 2);
        assert_eq!(report["ok"], false);
        assert!(report["gap_ms_max"].as_u64().unwrap() > 1900);
    }

    #[test]
    fn names_beyond_the_limit_count_as_other() {
        let mut counts = BTreeMap::new();
        for n in 0..NAMES_MAX + 10 {
            add(&mut counts, n.to_string(), 1);
        }
        assert_eq!((counts.len(), counts["other"]), (NAMES_MAX + 1, 10));
    }

    #[test]
    fn a_run_without_any_answer_is_not_ok() {
        assert_eq!(
            LoadTally::new(Instant::now(), false).report(Duration::from_secs(1))["ok"],
            false
        );
    }
}
