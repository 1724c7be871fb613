//! N threads, each one core, one `LocalRuntime`; nothing on them is shared. Control work (southbound, certificates, admin) runs on the
//! caller's own multi-thread runtime.
//!
//! A `LocalRuntime` rather than a `LocalSet` on a runtime: tasks wake each other in one queue, where a set is one task of the runtime's and
//! each wake from a socket or timer goes through two schedulers and asks the kernel for events in between.
//!
//! Panics: a panic in a task ends that task (one connection), is counted by [`panics`] and logged; a panic in a worker's root future ends
//! the process with [`EXIT_PANIC`], because a worker that silently stopped accepting would be a grey failure.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread::JoinHandle;

use tokio::runtime::{Builder, LocalOptions, LocalRuntime};
use tokio::sync::mpsc;

use crate::drain::Drain;
use crate::sys;

/// Exit status after a worker's root panicked.
pub const EXIT_PANIC: i32 = 70;

/// How many workers, and where.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Threads; 0 is one per core.
    pub count: usize,
    /// Thread names are `<name>-<index>`.
    pub name: &'static str,
    /// Pin thread k to the k-th core this process may use.
    pub pin: bool,
}

/// What a worker knows of itself.
#[derive(Debug, Clone)]
pub struct Worker {
    /// 0 to count - 1.
    pub index: usize,
    pub count: usize,
    /// The core it is pinned to.
    pub core: Option<usize>,
    pub drain: Drain,
}

type Job = Box<dyn FnOnce() + Send>;

struct Inner {
    jobs: Vec<mpsc::UnboundedSender<Job>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The running workers. Cheap to clone.
#[derive(Clone)]
pub struct Workers {
    inner: Arc<Inner>,
}

impl Workers {
    /// Starts the threads. `root` is called on each of them and its future run there, inside the `LocalRuntime`; it should end when its
    /// drain says so. Tasks it spawned end with it. Errors if a thread or its runtime cannot be made; those already started then end.
    pub fn start<F, R>(config: WorkerConfig, drain: Drain, root: F) -> std::io::Result<Self>
    where
        F: Fn(Worker) -> R + Clone + Send + 'static,
        R: Future<Output = ()> + 'static,
    {
        count_panics();
        let cores = sys::cores();
        let count = if config.count == 0 { cores.len().max(1) } else { config.count };
        let (mut jobs, mut threads) = (Vec::new(), Vec::new());
        for index in 0..count {
            let core = if config.pin { cores.get(index % cores.len().max(1)).copied() } else { None };
            let worker = Worker { index, count, core, drain: drain.clone() };
            let (tx, rx) = mpsc::unbounded_channel();
            let root = root.clone();
            // Such a runtime never leaves the thread that made it.
            let (made, is_made) = std::sync::mpsc::sync_channel(1);
            let run = move || match Builder::new_current_thread().enable_all().build_local(LocalOptions::default()) {
                Ok(runtime) => {
                    let _ = made.send(Ok(()));
                    live(&runtime, worker, rx, root);
                }
                Err(e) => {
                    let _ = made.send(Err(e));
                }
            };
            threads.push(std::thread::Builder::new().name(format!("{}-{index}", config.name)).spawn(run)?);
            is_made.recv().unwrap_or_else(|e| Err(std::io::Error::other(e)))?;
            jobs.push(tx);
        }
        Ok(Self { inner: Arc::new(Inner { jobs, threads: Mutex::new(threads) }) })
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.inner.jobs.len()
    }

    /// Runs a task on worker `k` (modulo their number): `make` is called there. `false` if that worker has ended.
    pub fn spawn<F, R>(&self, k: usize, make: F) -> bool
    where
        F: FnOnce() -> R + Send + 'static,
        R: Future<Output = ()> + 'static,
    {
        let job: Job = Box::new(move || {
            tokio::task::spawn_local(make());
        });
        self.inner.jobs[k % self.inner.jobs.len()].send(job).is_ok()
    }

    /// Waits, blocking, until all threads have ended.
    pub fn join(&self) {
        let threads = std::mem::take(&mut *self.inner.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for t in threads {
            // A thread's panic has ended the process already.
            let _ = t.join();
        }
    }
}

fn live<F, R>(runtime: &LocalRuntime, worker: Worker, mut jobs: mpsc::UnboundedReceiver<Job>, root: F)
where
    F: Fn(Worker) -> R,
    R: Future<Output = ()> + 'static,
{
    let name = worker.index;
    if let Some(core) = worker.core
        && let Err(error) = sys::pin_thread(core)
    {
        tracing::warn!(worker = name, core, %error, "worker runs unpinned");
    }
    if let Err(error) = sys::settle() {
        tracing::warn!(worker = name, %error, "worker looks for its network namespace again and again");
    }
    let ended = catch_unwind(AssertUnwindSafe(|| {
        runtime.block_on(async move {
            let root = root(worker);
            let mut root = std::pin::pin!(root);
            loop {
                tokio::select! {
                    () = &mut root => return,
                    Some(job) = jobs.recv() => job(),
                }
            }
        });
    }));
    if ended.is_err() {
        tracing::error!(worker = name, "a worker's root panicked; the process ends so that its supervisor starts a whole one");
        std::process::exit(EXIT_PANIC);
    }
}

static PANICS: AtomicU64 = AtomicU64::new(0);

/// Tasks that panicked since the process started.
pub fn panics() -> u64 {
    PANICS.load(Relaxed)
}

fn count_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Relaxed);
            before(info);
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drain;
    use std::cell::Cell;
    use std::time::Duration;

    fn start(count: usize) -> (drain::Trigger, Workers) {
        let (trigger, drain) = drain::tree();
        let config = WorkerConfig { count, name: "test-worker", pin: true };
        let workers = Workers::start(config, drain, |w| async move { w.drain.draining().await }).unwrap();
        (trigger, workers)
    }

    #[test]
    fn tasks_run_on_the_worker_they_are_sent_to_and_may_be_local() {
        let (trigger, workers) = start(3);
        for k in 0..6 {
            let (tx, rx) = std::sync::mpsc::channel();
            assert!(workers.spawn(k, move || {
                let local = std::rc::Rc::new(Cell::new(1));
                async move {
                    tokio::task::yield_now().await;
                    local.set(local.get() + 1);
                    tx.send((std::thread::current().name().map(str::to_string), local.get())).unwrap();
                }
            }));
            let got = rx.recv_timeout(Duration::from_secs(5)).unwrap();
            assert_eq!(got, (Some(format!("test-worker-{}", k % 3)), 2));
        }
        trigger.drain(Duration::from_secs(1));
        workers.join();
        assert!(!workers.spawn(0, || async {}));
    }

    #[test]
    fn a_panicking_task_is_counted_and_its_worker_lives() {
        let (trigger, workers) = start(1);
        let before = panics();
        workers.spawn(0, || async { panic!("on purpose") });
        let (tx, rx) = std::sync::mpsc::channel();
        workers.spawn(0, move || async move { tx.send(()).unwrap() });
        rx.recv_timeout(Duration::from_secs(5)).unwrap();
        assert!(panics() > before);
        trigger.force();
        workers.join();
    }
}
