//! Parting: clients are asked to take their sessions elsewhere while the worker serves on, and may be welcome again later. HTTP/2 (HBONE
//! too) is told by GOAWAY, HTTP/1.1 by `Connection: close` on the next answer; idle connections close soon. It ends no stream and no
//! relay: those stay for as long as both sides like. Who asks, and when, is the process's business.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use canal_kit::drain::{Drain, Trigger};
use tokio::sync::watch;

/// While clients are asked to leave, those that came since are asked so often: each has a moment to be served, so that one which finds no
/// other door does not spin.
const TURN: Duration = Duration::from_secs(1);
/// A connection that was asked to leave has no deadline; a drain of the process gives it one.
const NO_DEADLINE: Duration = Duration::from_secs(365 * 24 * 3600);

/// One worker's view of it.
pub(crate) struct Parting {
    worker: Drain,
    /// The branch of connections that nobody has asked yet.
    newest: RefCell<(Trigger, Drain)>,
    /// Whether that branch has a connection.
    used: Cell<bool>,
    asked: Cell<bool>,
}

impl Parting {
    pub(crate) fn new(worker: &Drain) -> Self {
        Self { worker: worker.clone(), newest: RefCell::new(worker.branch()), used: Cell::new(false), asked: Cell::new(false) }
    }

    /// For a connection that begins now: its drain begins when it is asked to leave, or with the worker's.
    pub(crate) fn drain(&self) -> Drain {
        self.used.set(true);
        self.newest.borrow().1.clone()
    }

    /// True while answers should say that the connection closes.
    #[inline]
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.get()
    }

    /// Whether clients are asked to leave from now on; if so, asks all connections that nobody has asked yet.
    pub(crate) fn set(&self, asked: bool) {
        self.asked.set(asked);
        if !asked || !self.used.replace(false) {
            return;
        }
        let (mut trigger, drain) = self.newest.replace(self.worker.branch());
        drop(drain);
        trigger.drain(NO_DEADLINE);
        // A trigger that is dropped forces: it stays until the branch's last connection has gone.
        tokio::task::spawn_local(async move { trigger.finished(Duration::ZERO).await });
    }
}

/// Has `turn` done with what `wanted` says, at each change and again while it is wanted, until `turn` says that the worker is gone.
pub(crate) async fn run(mut wanted: watch::Receiver<bool>, turn: impl Fn(bool) -> bool) {
    loop {
        let ask = *wanted.borrow_and_update();
        if !turn(ask) {
            return;
        }
        let changed =
            async { if ask { tokio::time::timeout(TURN, wanted.changed()).await.unwrap_or(Ok(())) } else { wanted.changed().await } };
        if changed.await.is_err() {
            return;
        }
    }
}
