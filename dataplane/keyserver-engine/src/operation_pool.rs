//! Operation pool: threads that perform key operations, with one queue for ECDSA and one for RSA.
//!
//! An operation starts at once when a worker of its queue is free. Operations that arrive while all
//! workers are busy are taken in batches. Short operations of a batch are answered a few at a time,
//! because each separate response costs the requester a packet and a wake-up. No operation waits
//! for a timer. The caller defines the operations.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use canal_model::ids::TenantName;
use canal_runtime::metrics::{MetricFamily, Registry};

use crate::fair_queue::FairQueue;
use crate::key::{self, OperationQueue, SigningBatch};
use crate::limits::{ECDSA_BATCH_MAX, RSA_BATCH_MAX};

/// One operation. Its result must be sent in [`PoolTask::answer`], which is called once the
/// operation counts as done.
pub trait PoolTask: Send + 'static {
    /// Result to send once the operation is done.
    type Answer;
    /// Performs the operation on a worker thread.
    fn work(&mut self) -> Self::Answer;
    /// Sends the result of the operation.
    fn answer(self, answer: Self::Answer);
}

struct QueuedTask<W> {
    work: W,
    since: Instant,
    gathered: bool,
}

struct PoolState<W> {
    queue: FairQueue<QueuedTask<W>>,
    is_stopped: bool,
}

struct PoolShared<W> {
    state: Mutex<PoolState<W>>,
    ready: Condvar,
    /// Operations that workers have taken and not finished.
    in_progress: AtomicUsize,
    workers: usize,
    batch_max: usize,
    kind: OperationQueue,
}

/// Configuration of the worker threads.
#[derive(Debug, Clone, Copy)]
pub struct OperationPoolConfig {
    /// Threads of each queue, at least one.
    pub workers: usize,
    /// Time for which RSA keys stay open after a batch; see [`SigningBatch`].
    pub linger: Duration,
}

/// Both queues with their threads. Dropping the pool ends the threads after the operations that are
/// queued.
pub struct OperationPool<W: PoolTask> {
    queues: [Arc<PoolShared<W>>; 2],
    threads: Vec<JoinHandle<()>>,
    waited: [canal_runtime::metrics::SharedCounter; 2],
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns how many results are sent together. Four ECDSA operations take a third of a millisecond;
/// one RSA operation takes longer.
fn answers_max(queue: OperationQueue) -> usize {
    if queue == OperationQueue::Rsa { 1 } else { 4 }
}

// Up to the largest batch (`ECDSA_BATCH_MAX`).
const SIZES: &[u64] = &[1, 2, 3, 4, 6, 8, 12, 16, 24, 32];
/// Buckets of the histogram of waits, in microseconds: up to a second, which is as long as a
/// requester waits for its last server.
const WAITS: &[u64] = &[
    0, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000,
];

impl<W: PoolTask> OperationPool<W> {
    /// Starts the threads of both queues.
    ///
    /// Metrics, all with the label `algorithm`: `canal_key_batch_size`,
    /// `canal_key_batch_wait_seconds` (0 for operations that started at once),
    /// `canal_key_operations_queued_total`.
    ///
    /// # Errors
    /// A thread could not be created.
    pub fn start(config: OperationPoolConfig, registry: &Registry) -> std::io::Result<Self> {
        // A queue without a worker would never answer.
        let workers = config.workers.max(1);
        let labels = &["algorithm"];
        let waited = registry.counters(MetricFamily::new(
            "canal_key_operations_queued_total",
            "Operations that waited because all workers of their queue were busy.",
            labels,
        ));
        let queues = OperationQueue::ALL.map(|queue| {
            Arc::new(PoolShared {
                state: Mutex::new(PoolState {
                    queue: FairQueue::default(),
                    is_stopped: false,
                }),
                ready: Condvar::new(),
                in_progress: AtomicUsize::new(0),
                workers,
                batch_max: if queue == OperationQueue::Rsa {
                    RSA_BATCH_MAX
                } else {
                    ECDSA_BATCH_MAX
                },
                kind: queue,
            })
        });
        let mut threads = Vec::new();
        for shared in &queues {
            for n in 0..workers {
                let (shared, registry) = (shared.clone(), registry.clone());
                let name = format!("keys-{}-{n}", shared.kind.name());
                threads.push(
                    std::thread::Builder::new()
                        .name(name)
                        .spawn(move || live(&shared, config.linger, &registry))?,
                );
            }
        }
        let waited = OperationQueue::ALL.map(|queue| waited.shared(&[queue.name()]));
        Ok(Self {
            queues,
            threads,
            waited,
        })
    }

    /// Queues an operation of a tenant.
    pub fn push(&self, queue: OperationQueue, tenant: &TenantName, work: W) {
        let at = queue as usize;
        let shared = &self.queues[at];
        let mut state = lock(&shared.state);
        let gathered = state.queue.len() + shared.in_progress.load(Relaxed) >= shared.workers;
        state.queue.push(
            tenant,
            QueuedTask {
                work,
                since: Instant::now(),
                gathered,
            },
        );
        drop(state);
        if gathered {
            self.waited[at].inc();
        }
        shared.ready.notify_one();
    }

    /// Returns how many operations of a queue wait or are in progress.
    pub fn depth(&self, queue: OperationQueue) -> usize {
        let shared = &self.queues[queue as usize];
        lock(&shared.state).queue.len() + shared.in_progress.load(Relaxed)
    }
}

impl<W: PoolTask> Drop for OperationPool<W> {
    fn drop(&mut self) {
        for shared in &self.queues {
            lock(&shared.state).is_stopped = true;
            shared.ready.notify_all();
        }
        // A worker that drops the pool must not wait for itself.
        let own = std::thread::current().id();
        for thread in self.threads.drain(..).filter(|t| t.thread().id() != own) {
            // A thread that panicked has ended the process.
            let _ = thread.join();
        }
    }
}

fn live<W: PoolTask>(shared: &PoolShared<W>, linger: Duration, registry: &Registry) {
    let shard = registry.shard();
    let labels = &["algorithm"];
    let sizes = MetricFamily::new(
        "canal_key_batch_size",
        "Operations that a worker took as one batch.",
        labels,
    );
    let waits = MetricFamily::new(
        "canal_key_batch_wait_seconds",
        "How long operations waited because workers were busy.",
        labels,
    );
    let sizes = shard.histogram(
        &registry.histograms(sizes, SIZES, 1.0),
        &[shared.kind.name()],
    );
    let waits = shard.histogram(
        &registry.histograms(waits, WAITS, 0.000_001),
        &[shared.kind.name()],
    );
    while let Some(batch) = next(shared, linger) {
        sizes.observe(batch.len() as u64);
        let _open = SigningBatch::begin(linger);
        let mut answers = Vec::with_capacity(answers_max(shared.kind));
        for mut waiting in batch {
            // An operation that started at once has waited for nothing, whatever the clock says.
            let micros = if waiting.gathered {
                waiting.since.elapsed().as_micros()
            } else {
                0
            };
            // No operation waits for more microseconds than fit.
            waits.observe(u64::try_from(micros).unwrap_or(u64::MAX));
            let answer = waiting.work.work();
            answers.push((waiting.work, answer));
            if answers.len() == answers_max(shared.kind) {
                give(shared, &mut answers);
            }
            if shared.kind == OperationQueue::Rsa {
                // Where both queues share a core, an ECDSA operation waits for one RSA operation at
                // most.
                std::thread::yield_now();
            }
        }
        give(shared, &mut answers);
    }
}

fn give<W: PoolTask>(shared: &PoolShared<W>, answers: &mut Vec<(W, W::Answer)>) {
    // Before the results are sent: a requester that sends its next request at once finds the worker
    // free.
    shared.in_progress.fetch_sub(answers.len(), Relaxed);
    for (work, answer) in answers.drain(..) {
        work.answer(answer);
    }
}

/// Returns the next batch: a fair part of the queue, so that other workers get theirs. `None`: the
/// pool has ended.
fn next<W>(shared: &PoolShared<W>, linger: Duration) -> Option<Vec<QueuedTask<W>>> {
    let mut open = key::wipe_idle();
    let mut state = lock(&shared.state);
    loop {
        if !state.queue.is_empty() {
            let part = state
                .queue
                .len()
                .div_ceil(shared.workers)
                .min(shared.batch_max);
            let batch = state.queue.take(part);
            shared.in_progress.fetch_add(batch.len(), Relaxed);
            return Some(batch);
        }
        if state.is_stopped {
            return None;
        }
        if open {
            // Only until the lingering keys are wiped; no operation waits for this.
            state = shared
                .ready
                .wait_timeout(state, linger)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            drop(state);
            open = key::wipe_idle();
            state = lock(&shared.state);
        } else {
            state = shared
                .ready
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests;
