//! Threads for handshakes that sign remotely, so that no worker waits for a signature. The module
//! signs nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use canal_tls::KeyServerError;

/// Number of threads that sign for a process's handshakes. They wait for key servers and take
/// little CPU. Nobody measured the number.
pub const THREADS: usize = 4;
/// Most handshakes that wait for a thread. Sixteen for each thread. Beyond it a handshake is
/// refused (`handshakes_busy`), so that none waits until its own timeout.
pub const WAITING_MAX: usize = 64;

type SigningJob = Box<dyn FnOnce() + Send>;

/// The signing threads. They end with the last clone.
#[derive(Clone)]
pub(super) struct SigningThreads {
    jobs: SyncSender<SigningJob>,
}

impl SigningThreads {
    /// Starts the threads; `waiting` jobs may wait for one.
    pub(super) fn start(threads: usize, waiting: usize) -> Self {
        let (jobs, queue) = sync_channel::<SigningJob>(waiting);
        let queue = Arc::new(Mutex::new(queue));
        for n in 0..threads {
            let queue = queue.clone();
            let named = std::thread::Builder::new().name(format!("canal-handshake-{n}"));
            if let Err(error) = named.spawn(move || work(&queue)) {
                tracing::error!(%error, "key client: could not start a handshake thread; fewer handshakes run at once");
            }
        }
        Self { jobs }
    }

    /// Runs a job on a thread, or refuses it if all are in use and the queue is full.
    pub(super) fn run(&self, job: SigningJob) -> Result<(), KeyServerError> {
        self.jobs.try_send(job).map_err(|e| match e {
            TrySendError::Full(_) | TrySendError::Disconnected(_) => KeyServerError::Busy,
        })
    }
}

fn work(queue: &Mutex<Receiver<SigningJob>>) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else { return };
        // A panic in one handshake must not end the thread; the connection of the handshake is
        // dropped.
        let _ = catch_unwind(AssertUnwindSafe(job));
    }
}
