//! Detects stuck workers. Each worker sends heartbeats from its own loop; a task outside the
//! workers counts its checks without a new heartbeat.
//!
//! It ends nothing; readiness and metrics report the result. Start with [`Watchdog::register`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use canal_runtime::metrics::{MetricFamily, Registry, SharedCounter, SharedGauge};

use crate::clock::TICK;

/// Interval at which the watchdog checks the heartbeats. It is the interval of the heartbeats
/// (`TICK`): more frequent checks would see the same ones again.
const WATCHDOG_INTERVAL: Duration = Duration::from_millis(100);
/// Number of consecutive checks without a heartbeat after which a worker is stuck. Checks are
/// counted instead of time, because a pause of the entire machine delays the watchdog too and
/// proves nothing. The two assertions below bound it from both sides.
const MISSED_LOOKS_MAX: u32 = 8;
// A worker that is late by some ticks is not stuck.
const _: () =
    assert!(MISSED_LOOKS_MAX as u128 * WATCHDOG_INTERVAL.as_millis() >= 4 * TICK.as_millis());
// The edge makes two probes, 0.2 s apart and of 0.2 s each at most. Together with them, new
// sessions stop within 2 s.
const _: () =
    assert!((MISSED_LOOKS_MAX as u128 + 2) * WATCHDOG_INTERVAL.as_millis() + 600 <= 2_000);

/// Heartbeat of a worker; only that worker writes it.
#[derive(Debug, Default)]
pub struct Heartbeat {
    beats: AtomicU64,
    is_ended: AtomicBool,
}

impl Heartbeat {
    /// Records one more iteration of the worker's loop.
    #[inline]
    pub fn beat(&self) {
        self.beats.fetch_add(1, Relaxed);
    }

    /// Records an orderly end of the worker: no more heartbeats are expected.
    pub fn end(&self) {
        self.is_ended.store(true, Relaxed);
    }
}

/// State of one worker in the watchdog.
#[derive(Debug, Default)]
struct WatchedWorker {
    heartbeat: Arc<Heartbeat>,
    beats_seen: u64,
    missed: u32,
    stuck_since: Option<Instant>,
}

/// State change that a check found.
#[derive(Debug, PartialEq, Eq)]
enum WorkerChange {
    BecameStuck,
    Recovered,
}

impl WatchedWorker {
    fn check_heartbeat(&mut self, now: Instant) -> Option<WorkerChange> {
        let beats = self.heartbeat.beats.load(Relaxed);
        let is_alive = beats != self.beats_seen || self.heartbeat.is_ended.load(Relaxed);
        self.beats_seen = beats;
        self.missed = if is_alive {
            0
        } else {
            self.missed.saturating_add(1)
        };
        match self.stuck_since {
            None if self.missed >= MISSED_LOOKS_MAX => {
                self.stuck_since = Some(now);
                Some(WorkerChange::BecameStuck)
            }
            Some(_) if is_alive => {
                self.stuck_since = None;
                Some(WorkerChange::Recovered)
            }
            _ => None,
        }
    }
}

/// Heartbeats of all workers of an engine.
pub struct Watchdog {
    workers: Mutex<BTreeMap<usize, WatchedWorker>>,
    stuck: SharedGauge,
    stalls: SharedCounter,
}

impl Watchdog {
    /// Creates a watchdog without workers.
    pub fn new(registry: &Registry) -> Self {
        let stuck = MetricFamily::new(
            "canal_gateway_workers_stuck",
            "Workers that have sent no heartbeat for about a second.",
            &[],
        );
        let stalls = MetricFamily::new(
            "canal_gateway_worker_stalls_total",
            "Times that a worker was found to send no heartbeat.",
            &[],
        );
        Self {
            workers: Mutex::default(),
            stuck: registry.gauges(stuck).shared(&[]),
            stalls: registry.counters(stalls).shared(&[]),
        }
    }

    /// Expects heartbeats of the worker with this index from now on.
    pub fn register(&self, worker: usize) -> Arc<Heartbeat> {
        self.workers().entry(worker).or_default().heartbeat.clone()
    }

    /// Returns the indices of the stuck workers.
    pub fn stuck_workers(&self) -> Vec<usize> {
        self.workers()
            .iter()
            .filter(|(_, worker)| worker.stuck_since.is_some())
            .map(|(index, _)| *index)
            .collect()
    }

    fn workers(&self) -> MutexGuard<'_, BTreeMap<usize, WatchedWorker>> {
        // No code panics while the mutex is locked.
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_workers(&self, now: Instant) {
        let mut workers = self.workers();
        for (index, worker) in workers.iter_mut() {
            let since = worker.stuck_since;
            match worker.check_heartbeat(now) {
                Some(WorkerChange::BecameStuck) => {
                    self.stalls.inc();
                    tracing::error!(
                        worker = index,
                        "gateway: a worker is stuck; readiness reports worker_stuck and new sessions go to other replicas; fix: restart the process if this persists, after checking where the thread hangs (gdb, /proc/PID/task/*/stack)"
                    );
                }
                Some(WorkerChange::Recovered) => {
                    let stuck_for = since
                        .map(|since| now.duration_since(since))
                        .unwrap_or_default();
                    tracing::warn!(
                        worker = index,
                        ?stuck_for,
                        "gateway: a stuck worker runs again; the replica accepts new sessions"
                    );
                }
                None => {}
            }
        }
        let stuck = workers
            .values()
            .filter(|worker| worker.stuck_since.is_some())
            .count();
        self.stuck.set(i64::try_from(stuck).unwrap_or(i64::MAX));
    }
}

/// Checks the heartbeats for as long as the engine lives. It must run on a thread that is not a
/// worker's.
pub async fn run(watchdog: Weak<Watchdog>) {
    let mut ticks = tokio::time::interval(WATCHDOG_INTERVAL);
    // Missed checks are not made up for, because several at once would count one silence more than
    // once.
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(watchdog) = watchdog.upgrade() else {
            return;
        };
        watchdog.check_workers(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of a worker before each check (`b` beats, `-` does nothing, `e` ends), and the
    /// watchdog's result after it (`S` stuck).
    #[test]
    fn worker_is_stuck_after_eight_silent_polls_until_its_next_heartbeat() {
        for (name, does, want) in [
            ("beats", "bbbbbbbbbbbb", "            "),
            (
                "seven silent looks are none",
                "b-------b-------b",
                "                 ",
            ),
            ("eight are", "b--------", "        S"),
            ("it turns again", "b----------b-", "        SSS  "),
            (
                "and stops again",
                "b--------b--------",
                "        S        S",
            ),
            ("never turned at all", "--------", "       S"),
            ("ended in good order", "be------------", "              "),
            ("ended while stuck", "b--------e--", "        S   "),
        ] {
            let mut worker = WatchedWorker::default();
            let got: String = does
                .chars()
                .map(|step| {
                    match step {
                        'b' => worker.heartbeat.beat(),
                        'e' => worker.heartbeat.end(),
                        _ => {}
                    }
                    worker.check_heartbeat(Instant::now());
                    if worker.stuck_since.is_some() {
                        'S'
                    } else {
                        ' '
                    }
                })
                .collect();
            assert_eq!(got, want, "{name}");
        }
    }

    #[test]
    fn watchdog_names_stuck_workers_and_counts_each_stall_once() {
        let registry = Registry::new();
        let watchdog = Watchdog::new(&registry);
        let (beating, _silent) = (watchdog.register(0), watchdog.register(1));
        for _ in 0..20 {
            beating.beat();
            watchdog.check_workers(Instant::now());
        }
        assert_eq!(watchdog.stuck_workers(), [1]);
        let text = registry.render();
        assert!(
            text.contains("canal_gateway_workers_stuck 1")
                && text.contains("canal_gateway_worker_stalls_total 1"),
            "{text}"
        );
    }
}
