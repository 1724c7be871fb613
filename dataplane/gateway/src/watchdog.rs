//! Detects workers that no longer turn: each worker sends heartbeats from its own loop, and one task beside the workers counts its looks
//! without a new one. It ends nothing: readiness and metrics report what it finds. Start at [`Watchdog::register`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use canal_kit::metrics::{Family, Registry, SharedCounter, SharedGauge};

use crate::clock::TICK;

/// How often the watchdog looks at the heartbeats.
const WATCHDOG_INTERVAL: Duration = Duration::from_millis(100);
/// A worker is stuck after so many looks in a row without a heartbeat. Looks are counted and not time: a machine that stood still held up
/// the watchdog as well, and proves nothing.
const MISSED_LOOKS_MAX: u32 = 8;
// A worker that is late by some ticks is not stuck.
const _: () = assert!(MISSED_LOOKS_MAX as u128 * WATCHDOG_INTERVAL.as_millis() >= 4 * TICK.as_millis());
// With the edge's two probes, 0.2 s apart and 0.2 s each at most, new sessions stop within 2 s.
const _: () = assert!((MISSED_LOOKS_MAX as u128 + 2) * WATCHDOG_INTERVAL.as_millis() + 600 <= 2_000);

/// A worker's sign of life; only that worker writes it.
#[derive(Debug, Default)]
pub(crate) struct Heartbeat {
    beats: AtomicU64,
    is_ended: AtomicBool,
}

impl Heartbeat {
    /// The worker's loop has come round once more.
    #[inline]
    pub(crate) fn beat(&self) {
        self.beats.fetch_add(1, Relaxed);
    }

    /// The worker ended in good order: no more heartbeats are expected.
    pub(crate) fn end(&self) {
        self.is_ended.store(true, Relaxed);
    }
}

/// One worker as the watchdog knows it.
#[derive(Debug, Default)]
struct WatchedWorker {
    heartbeat: Arc<Heartbeat>,
    beats_seen: u64,
    missed: u32,
    stuck_since: Option<Instant>,
}

/// A change that one look found.
#[derive(Debug, PartialEq, Eq)]
enum WorkerChange {
    BecameStuck,
    Recovered,
}

impl WatchedWorker {
    fn look(&mut self, now: Instant) -> Option<WorkerChange> {
        let beats = self.heartbeat.beats.load(Relaxed);
        let is_alive = beats != self.beats_seen || self.heartbeat.is_ended.load(Relaxed);
        self.beats_seen = beats;
        self.missed = if is_alive { 0 } else { self.missed.saturating_add(1) };
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

/// The heartbeats of all workers of an engine.
pub(crate) struct Watchdog {
    workers: Mutex<BTreeMap<usize, WatchedWorker>>,
    stuck: SharedGauge,
    stalls: SharedCounter,
}

impl Watchdog {
    /// Knows no worker yet.
    pub(crate) fn new(registry: &Registry) -> Self {
        let stuck = Family::new("canal_gateway_workers_stuck", "Workers that have sent no heartbeat for about a second.", &[]);
        let stalls = Family::new("canal_gateway_worker_stalls_total", "Times that a worker was found to send no heartbeat.", &[]);
        Self { workers: Mutex::default(), stuck: registry.gauges(stuck).shared(&[]), stalls: registry.counters(stalls).shared(&[]) }
    }

    /// Expects heartbeats of the worker with this index from now on.
    pub(crate) fn register(&self, worker: usize) -> Arc<Heartbeat> {
        self.workers().entry(worker).or_default().heartbeat.clone()
    }

    /// The indices of the workers that are stuck.
    pub(crate) fn stuck_workers(&self) -> Vec<usize> {
        self.workers().iter().filter(|(_, worker)| worker.stuck_since.is_some()).map(|(index, _)| *index).collect()
    }

    fn workers(&self) -> MutexGuard<'_, BTreeMap<usize, WatchedWorker>> {
        // Nothing panics while it is held.
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self, now: Instant) {
        let mut workers = self.workers();
        for (index, worker) in workers.iter_mut() {
            let since = worker.stuck_since;
            match worker.look(now) {
                Some(WorkerChange::BecameStuck) => {
                    self.stalls.inc();
                    tracing::error!(
                        worker = index,
                        "gateway: a worker is stuck; readiness says worker_stuck and new sessions go to other replicas; fix: restart the \
                         process if it stays so, after looking where the thread hangs (gdb, /proc/PID/task/*/stack)"
                    );
                }
                Some(WorkerChange::Recovered) => {
                    let stuck_for = since.map(|since| now.duration_since(since)).unwrap_or_default();
                    tracing::warn!(worker = index, ?stuck_for, "gateway: a stuck worker turns again; new sessions may come");
                }
                None => {}
            }
        }
        let stuck = workers.values().filter(|worker| worker.stuck_since.is_some()).count();
        self.stuck.set(i64::try_from(stuck).unwrap_or(i64::MAX));
    }
}

/// Looks at the heartbeats for as long as the engine lives; to run on another thread than a worker's.
pub(crate) async fn run(watchdog: Weak<Watchdog>) {
    let mut ticks = tokio::time::interval(WATCHDOG_INTERVAL);
    // Looks that were missed are not made up for: several at once would count one silence more than once.
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(watchdog) = watchdog.upgrade() else { return };
        watchdog.look(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a worker does before each look (`b` beats, `-` nothing, `e` ends), and what the watchdog holds after it (`S` stuck).
    #[test]
    fn worker_is_stuck_after_eight_silent_looks_until_its_next_heartbeat() {
        for (name, does, want) in [
            ("beats", "bbbbbbbbbbbb", "            "),
            ("seven silent looks are none", "b-------b-------b", "                 "),
            ("eight are", "b--------", "        S"),
            ("it turns again", "b----------b-", "        SSS  "),
            ("and stops again", "b--------b--------", "        S        S"),
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
                    worker.look(Instant::now());
                    if worker.stuck_since.is_some() { 'S' } else { ' ' }
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
            watchdog.look(Instant::now());
        }
        assert_eq!(watchdog.stuck_workers(), [1]);
        let text = registry.render();
        assert!(text.contains("canal_gateway_workers_stuck 1") && text.contains("canal_gateway_worker_stalls_total 1"), "{text}");
    }
}
