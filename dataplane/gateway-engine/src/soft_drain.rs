//! Soft drain: asks clients to reconnect elsewhere while the worker keeps serving. It can be
//! revoked.
//!
//! HTTP/2 and HBONE clients get GOAWAY; HTTP/1.1 clients get `Connection: close` on the next
//! response; idle connections are closed soon. Streams and relays in progress are not ended. The
//! process decides when a soft drain starts and stops. Start with [`SoftDrain`].

use std::cell::{Cell, RefCell};
use std::time::Duration;

use canal_runtime::drain::{DrainTrigger, DrainWatcher};
use tokio::sync::watch;

/// Interval at which newer connections are included in an active soft drain. Each is served for a
/// moment first, so that a client that finds no other replica does not reconnect in a tight loop.
const SOFT_DRAIN_INTERVAL: Duration = Duration::from_secs(1);
/// Deadline of a connection in a soft drain: effectively none. A drain of the process sets one.
pub(crate) const NO_DEADLINE: Duration = Duration::from_secs(365 * 24 * 3600);

/// State of the soft drain on one worker.
pub(crate) struct SoftDrain {
    worker: DrainWatcher,
    /// Drain branch of the connections that are not included in a soft drain yet.
    newest: RefCell<(DrainTrigger, DrainWatcher)>,
    /// True if that branch has a connection.
    used: Cell<bool>,
    /// True while the soft drain is active.
    is_active: Cell<bool>,
}

impl SoftDrain {
    pub(crate) fn new(worker: &DrainWatcher) -> Self {
        Self {
            worker: worker.clone(),
            newest: RefCell::new(worker.branch()),
            used: Cell::new(false),
            is_active: Cell::new(false),
        }
    }

    /// Returns the drain for a new connection. It begins when a soft drain includes the connection,
    /// or with the worker's drain.
    pub(crate) fn drain(&self) -> DrainWatcher {
        self.used.set(true);
        self.newest.borrow().1.clone()
    }

    /// True while responses should announce that the connection closes.
    #[inline]
    pub(crate) fn is_draining(&self) -> bool {
        self.is_active.get()
    }

    /// Starts or ends the soft drain. While it is active, each call includes all connections that
    /// are not included yet.
    pub(crate) fn set(&self, is_active: bool) {
        self.is_active.set(is_active);
        if !is_active || !self.used.replace(false) {
            return;
        }
        let (mut trigger, drain) = self.newest.replace(self.worker.branch());
        drop(drain);
        trigger.drain(NO_DEADLINE);
        // Dropping the trigger would force the drain, so it lives until the branch's last
        // connection has closed.
        tokio::task::spawn_local(async move { trigger.finished(Duration::ZERO).await });
    }
}

/// Calls `turn` with the desired state at each change, and at each interval while a drain is
/// desired. Ends when `turn` returns false because the worker is gone.
pub(crate) async fn run(mut wanted: watch::Receiver<bool>, turn: impl Fn(bool) -> bool) {
    loop {
        let is_draining = *wanted.borrow_and_update();
        if !turn(is_draining) {
            return;
        }
        let changed = async {
            if is_draining {
                tokio::time::timeout(SOFT_DRAIN_INTERVAL, wanted.changed())
                    .await
                    .unwrap_or(Ok(()))
            } else {
                wanted.changed().await
            }
        };
        if changed.await.is_err() {
            return;
        }
    }
}
