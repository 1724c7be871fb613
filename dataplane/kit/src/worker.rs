//! N threads, each one core, one `current_thread` runtime, one `LocalSet`; nothing on them is shared. Control work (southbound,
//! certificates, admin) runs on the caller's own multi-thread runtime.
//!
//! Panics: a panic in a task ends that task (one connection), is counted by [`panics`] and logged; a panic in a worker's root future ends
//! the process with [`EXIT_PANIC`], because a worker that silently stopped accepting would be a grey failure.

use std::future::Future;

use crate::drain::Drain;

/// Exit status after a worker's root panicked or ended early.
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

/// The running workers. Cheap to clone.
#[derive(Clone)]
pub struct Workers {}

impl Workers {
    /// Starts the threads. `root` is called on each of them and its future run there, inside the `LocalSet`; it ends when its drain does.
    pub fn start<F, R>(config: WorkerConfig, drain: Drain, root: F) -> std::io::Result<Self>
    where
        F: Fn(Worker) -> R + Clone + Send + 'static,
        R: Future<Output = ()> + 'static,
    {
        let _ = (config, drain, root);
        unreachable!("body lands in the next commit")
    }
    /// How many.
    pub fn count(&self) -> usize {
        unreachable!("body lands in the next commit")
    }
    /// Runs a task on worker `k` (modulo their number): `make` is called there. `false` if that worker has ended.
    pub fn spawn<F, R>(&self, k: usize, make: F) -> bool
    where
        F: FnOnce() -> R + Send + 'static,
        R: Future<Output = ()> + 'static,
    {
        let _ = (k, make);
        unreachable!("body lands in the next commit")
    }
    /// Waits, blocking, until all threads have ended.
    pub fn join(&self) {
        unreachable!("body lands in the next commit")
    }
}

/// Tasks that panicked since the process started.
pub fn panics() -> u64 {
    unreachable!("body lands in the next commit")
}
