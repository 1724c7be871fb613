//! Worker threads, each with its own `LocalRuntime` and optionally pinned to a core. They share
//! nothing. Control work (southbound, certificates, admin) runs on the caller's own multi-thread
//! runtime.
//!
//! A worker uses a `LocalRuntime` and not a `LocalSet` on a runtime. In a `LocalRuntime`, tasks
//! wake each other in one queue. A `LocalSet` is one task of its runtime: each wake from a socket
//! or timer passes two schedulers and polls the kernel for events in between.
//!
//! A panic in a task ends that task (one connection); it is logged and counted by [`panics`]. A
//! panic in a worker's root future ends the process with [`EXIT_PANIC`], because a worker that
//! silently stopped accepting would be a gray failure.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread::JoinHandle;

use canal_runtime::drain::DrainWatcher;
use tokio::runtime::{Builder, LocalOptions, LocalRuntime};
use tokio::sync::mpsc;

use crate::sys;

/// Exit status of the process after a worker's root future panicked. It is `EX_SOFTWARE` of
/// sysexits.h.
pub const EXIT_PANIC: i32 = 70;

/// Number, names and pinning of the workers.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Number of threads; 0 means one per core.
    pub count: usize,
    /// Prefix of the thread names, which are `<name>-<index>`.
    pub name: &'static str,
    /// If true, thread k is pinned to the k-th core that this process may use.
    pub pin: bool,
}

/// Identity of a worker, passed to its root function.
#[derive(Debug, Clone)]
pub struct WorkerHandle {
    /// Index of the worker, from 0 to `count` - 1.
    pub index: usize,
    pub count: usize,
    /// Core that the worker is pinned to, if any.
    pub core: Option<usize>,
    pub drain: DrainWatcher,
}

type WorkerTask = Box<dyn FnOnce() + Send>;

struct Inner {
    jobs: Vec<mpsc::UnboundedSender<WorkerTask>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The running workers. Clones share them and are cheap.
#[derive(Clone)]
pub struct Workers {
    inner: Arc<Inner>,
}

impl Workers {
    /// Starts the threads. Each thread calls `root` and runs its future inside its `LocalRuntime`.
    /// The future should end when its drain requires it. Tasks that it spawned end with it.
    ///
    /// # Errors
    /// A thread or its runtime cannot be created. No root future has run then, and no thread is
    /// left.
    pub fn start<F, R>(config: WorkerConfig, drain: DrainWatcher, root: F) -> std::io::Result<Self>
    where
        F: Fn(WorkerHandle) -> R + Clone + Send + 'static,
        R: Future<Output = ()> + 'static,
    {
        count_panics();
        let cores = sys::cores();
        // At least one worker runs, even if the kernel lists no core.
        let count = if config.count == 0 {
            cores.len().max(1)
        } else {
            config.count
        };
        let mut jobs = Vec::new();
        let mut threads = Vec::new();
        // A worker runs its root only after a message here: a caller that gets an error has nothing
        // by which it could end running workers.
        let mut starts = Vec::new();
        for index in 0..count {
            let core = if config.pin {
                cores.get(index % cores.len().max(1)).copied()
            } else {
                None
            };
            let worker = WorkerHandle {
                index,
                count,
                core,
                drain: drain.clone(),
            };
            let (tx, rx) = mpsc::unbounded_channel();
            let root = root.clone();
            // A `LocalRuntime` cannot leave the thread that built it, so the result of the build
            // comes back over this channel.
            let (made, is_made) = std::sync::mpsc::sync_channel(1);
            let (start, is_started) = std::sync::mpsc::sync_channel(1);
            let run = move || match Builder::new_current_thread()
                .enable_all()
                .build_local(LocalOptions::default())
            {
                Ok(runtime) => {
                    // The starting thread waits for this result, so the send does not fail.
                    let _ = made.send(Ok(()));
                    if is_started.recv() == Ok(()) {
                        live(&runtime, worker, rx, root);
                    }
                }
                Err(e) => {
                    let _ = made.send(Err(e));
                }
            };
            let spawned = std::thread::Builder::new()
                .name(format!("{}-{index}", config.name))
                .spawn(run);
            let is_ready = spawned.and_then(|thread| {
                threads.push(thread);
                is_made
                    .recv()
                    .unwrap_or_else(|e| Err(std::io::Error::other(e)))
            });
            starts.push(start);
            jobs.push(tx);
            if let Err(error) = is_ready {
                // Without a start the threads end by themselves, so that the joins below return.
                drop(starts);
                threads.into_iter().for_each(|thread| drop(thread.join()));
                return Err(error);
            }
        }
        for start in starts {
            // A worker waits for this message and for nothing else, so it is there to receive it.
            let _ = start.send(());
        }
        Ok(Self {
            inner: Arc::new(Inner {
                jobs,
                threads: Mutex::new(threads),
            }),
        })
    }

    /// Returns the number of workers.
    pub fn count(&self) -> usize {
        self.inner.jobs.len()
    }

    /// Runs a task on worker `k` (modulo their number), where `make` is called. Returns `false` if
    /// that worker has ended.
    pub fn spawn<F, R>(&self, k: usize, make: F) -> bool
    where
        F: FnOnce() -> R + Send + 'static,
        R: Future<Output = ()> + 'static,
    {
        let job: WorkerTask = Box::new(move || {
            tokio::task::spawn_local(make());
        });
        self.inner.jobs[k % self.inner.jobs.len()].send(job).is_ok()
    }

    /// Blocks until all threads have ended.
    pub fn join(&self) {
        let threads = std::mem::take(
            &mut *self
                .inner
                .threads
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        for t in threads {
            // A worker's panic has already ended the process.
            let _ = t.join();
        }
    }
}

/// Runs one worker on its thread until its root future ends; tasks from [`Workers::spawn`] run
/// beside it.
fn live<F, R>(
    runtime: &LocalRuntime,
    worker: WorkerHandle,
    mut jobs: mpsc::UnboundedReceiver<WorkerTask>,
    root: F,
) where
    F: Fn(WorkerHandle) -> R,
    R: Future<Output = ()> + 'static,
{
    let name = worker.index;
    if let Some(core) = worker.core
        && let Err(error) = sys::pin_thread(core)
    {
        tracing::warn!(worker = name, core, %error, "worker: cannot pin the thread to a core; it runs unpinned");
    }
    // `Netns::enter` must return to this namespace; a pinned handle saves opening it at each call.
    if let Err(error) = sys::pin_home_netns() {
        tracing::warn!(worker = name, %error, "worker: cannot open its network namespace; each switch opens it anew");
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
        tracing::error!(
            worker = name,
            "worker: the main task panicked; the process ends so that its supervisor restarts it"
        );
        std::process::exit(EXIT_PANIC);
    }
}

static PANICS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of tasks that panicked since the process started.
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
    use canal_runtime::drain;
    use std::cell::Cell;
    use std::time::Duration;

    fn start(count: usize) -> (drain::DrainTrigger, Workers) {
        let (trigger, drain) = drain::tree();
        let config = WorkerConfig {
            count,
            name: "test-worker",
            pin: true,
        };
        let workers =
            Workers::start(config, drain, |w| async move { w.drain.draining().await }).unwrap();
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
                    tx.send((
                        std::thread::current().name().map(str::to_string),
                        local.get(),
                    ))
                    .unwrap();
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
