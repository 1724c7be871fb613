//! Threads that do the operations, one queue for ECDSA and one for RSA. An operation starts at once when a worker of its queue is free; what comes
//! while all are busy is gathered and taken together; short operations of one batch are answered a few at a time, because each answer that goes alone
//! costs its requester a packet and a wake-up. There are no timers in it. What an operation does is the caller's.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use canal_kit::metrics::{Family, Registry};
use canal_model::ids::TenantName;

use crate::fair::Fair;
use crate::key::{self, Batch, Lane};
use crate::limits::{ECDSA_BATCH_MAX, RSA_BATCH_MAX};

/// One operation. Its answer must be given in the second function, which is called once it counts as done.
pub trait Work: Send + 'static {
    /// What is to be said once the work is done.
    type Answer;
    /// Does it.
    fn work(&mut self) -> Self::Answer;
    /// Says it.
    fn answer(self, answer: Self::Answer);
}

struct Waiting<W> {
    work: W,
    since: Instant,
    gathered: bool,
}

struct State<W> {
    queue: Fair<Waiting<W>>,
    ended: bool,
}

struct Shared<W> {
    state: Mutex<State<W>>,
    ready: Condvar,
    /// Operations that workers have taken and not done.
    under_way: AtomicUsize,
    workers: usize,
    batch_max: usize,
    lane: Lane,
}

/// How the threads work.
#[derive(Debug, Clone, Copy)]
pub struct LaneConfig {
    /// Threads of each queue, at least one.
    pub workers: usize,
    /// See [`Batch`].
    pub linger: Duration,
}

/// Both queues. Dropping it ends the threads after what they have taken.
pub struct Lanes<W: Work> {
    lanes: [Arc<Shared<W>>; 2],
    threads: Vec<JoinHandle<()>>,
    waited: [canal_kit::metrics::SharedCounter; 2],
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers that are given together. Four ECDSA operations take a third of a millisecond; one of RSA takes longer.
fn answers_max(lane: Lane) -> usize {
    if lane == Lane::Rsa { 1 } else { 4 }
}

const SIZES: &[u64] = &[1, 2, 3, 4, 6, 8, 12, 16, 24, 32];
/// Microseconds.
const WAITS: &[u64] = &[0, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000];

impl<W: Work> Lanes<W> {
    /// Starts the threads.
    ///
    /// Metrics, all with the label `algorithm`: `canal_key_batch_size`, `canal_key_batch_wait_seconds` (0 for what started at once),
    /// `canal_key_batch_waited_total`.
    pub fn start(config: LaneConfig, registry: &Registry) -> std::io::Result<Self> {
        let workers = config.workers.max(1);
        let labels = &["algorithm"];
        let waited = registry.counters(Family::new(
            "canal_key_batch_waited_total",
            "Operations that waited because all workers of their queue were busy.",
            labels,
        ));
        let lanes = Lane::ALL.map(|lane| {
            Arc::new(Shared {
                state: Mutex::new(State { queue: Fair::default(), ended: false }),
                ready: Condvar::new(),
                under_way: AtomicUsize::new(0),
                workers,
                batch_max: if lane == Lane::Rsa { RSA_BATCH_MAX } else { ECDSA_BATCH_MAX },
                lane,
            })
        });
        let mut threads = Vec::new();
        for shared in &lanes {
            for n in 0..workers {
                let (shared, registry) = (shared.clone(), registry.clone());
                let name = format!("keys-{}-{n}", shared.lane.name());
                threads.push(std::thread::Builder::new().name(name).spawn(move || live(&shared, config.linger, &registry))?);
            }
        }
        let waited = Lane::ALL.map(|lane| waited.shared(&[lane.name()]));
        Ok(Self { lanes, threads, waited })
    }

    /// Queues an operation.
    pub fn push(&self, lane: Lane, tenant: &TenantName, work: W) {
        let at = lane as usize;
        let shared = &self.lanes[at];
        let mut state = lock(&shared.state);
        let gathered = state.queue.len() + shared.under_way.load(Relaxed) >= shared.workers;
        state.queue.push(tenant, Waiting { work, since: Instant::now(), gathered });
        drop(state);
        if gathered {
            self.waited[at].inc();
        }
        shared.ready.notify_one();
    }

    /// Operations of a queue that wait or are under way.
    pub fn depth(&self, lane: Lane) -> usize {
        let shared = &self.lanes[lane as usize];
        lock(&shared.state).queue.len() + shared.under_way.load(Relaxed)
    }
}

impl<W: Work> Drop for Lanes<W> {
    fn drop(&mut self) {
        for shared in &self.lanes {
            lock(&shared.state).ended = true;
            shared.ready.notify_all();
        }
        let own = std::thread::current().id();
        for thread in self.threads.drain(..).filter(|t| t.thread().id() != own) {
            // A thread that panicked has ended the process.
            let _ = thread.join();
        }
    }
}

fn live<W: Work>(shared: &Shared<W>, linger: Duration, registry: &Registry) {
    let shard = registry.shard();
    let labels = &["algorithm"];
    let sizes = Family::new("canal_key_batch_size", "Operations that a worker took at once.", labels);
    let waits = Family::new("canal_key_batch_wait_seconds", "How long operations waited because workers were busy.", labels);
    let sizes = shard.histogram(&registry.histograms(sizes, SIZES, 1.0), &[shared.lane.name()]);
    let waits = shard.histogram(&registry.histograms(waits, WAITS, 0.000_001), &[shared.lane.name()]);
    while let Some(batch) = next(shared, linger) {
        sizes.observe(batch.len() as u64);
        let _open = Batch::begin(linger);
        let mut answers = Vec::with_capacity(answers_max(shared.lane));
        for mut waiting in batch {
            let micros = if waiting.gathered { waiting.since.elapsed().as_micros() } else { 0 };
            waits.observe(u64::try_from(micros).unwrap_or(u64::MAX));
            let answer = waiting.work.work();
            answers.push((waiting.work, answer));
            if answers.len() == answers_max(shared.lane) {
                give(shared, &mut answers);
            }
            if shared.lane == Lane::Rsa {
                // Where both queues share a core, an ECDSA operation waits for one RSA operation at most.
                std::thread::yield_now();
            }
        }
        give(shared, &mut answers);
    }
}

fn give<W: Work>(shared: &Shared<W>, answers: &mut Vec<(W, W::Answer)>) {
    // Before the answers: who asks again at once on hearing one finds the worker free.
    shared.under_way.fetch_sub(answers.len(), Relaxed);
    for (work, answer) in answers.drain(..) {
        work.answer(answer);
    }
}

/// The next batch: a fair part of what waits, so that other workers have theirs. `None`: ended.
fn next<W>(shared: &Shared<W>, linger: Duration) -> Option<Vec<Waiting<W>>> {
    let mut open = key::wipe_idle();
    let mut state = lock(&shared.state);
    loop {
        if !state.queue.is_empty() {
            let part = state.queue.len().div_ceil(shared.workers).min(shared.batch_max);
            let batch = state.queue.take(part);
            shared.under_way.fetch_add(batch.len(), Relaxed);
            return Some(batch);
        }
        if state.ended {
            return None;
        }
        if open {
            // Only until the keys that linger are wiped; nobody waits for this.
            state = shared.ready.wait_timeout(state, linger).unwrap_or_else(PoisonError::into_inner).0;
            drop(state);
            open = key::wipe_idle();
            state = lock(&shared.state);
        } else {
            state = shared.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests;
