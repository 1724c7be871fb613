//! Drain of the process: running → draining (with a deadline) → forced. Tasks watch the phase. The
//! first signal starts a drain and the second forces it. What a drain does (GOAWAY, `Connection:
//! close`, no new accepts) is up to the watchers.

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// Phase of the process or of a branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainPhase {
    /// New work is accepted as usual.
    Running,
    /// No new work is accepted. Open work may finish until the deadline.
    Draining { deadline: Instant },
    /// Everything must be closed now.
    Forced,
}

/// Starts a drain. Dropping it without a call forces, so that a lost owner cannot leave tasks
/// behind.
#[derive(Debug)]
pub struct DrainTrigger {
    phase: watch::Sender<DrainPhase>,
    // This channel closes when the last `DrainWatcher` is dropped.
    open: mpsc::Receiver<()>,
}

/// A watcher of the phase that delays the end of the drain until it is dropped. Everything that
/// must end before the process does owns one; it is cheap to clone.
#[derive(Debug, Clone)]
pub struct DrainWatcher {
    phase: watch::Receiver<DrainPhase>,
    _open: mpsc::Sender<()>,
}

/// A watcher of the phase that does not delay the end of the drain. It is for servers that
/// operators use until the end.
#[derive(Debug, Clone)]
pub struct DrainObserver {
    phase: watch::Receiver<DrainPhase>,
}

/// Creates a trigger and its first watcher, in phase `Running`.
pub fn tree() -> (DrainTrigger, DrainWatcher) {
    let (tx, rx) = watch::channel(DrainPhase::Running);
    let (open, closed) = mpsc::channel(1);
    (
        DrainTrigger {
            phase: tx,
            open: closed,
        },
        DrainWatcher {
            phase: rx,
            _open: open,
        },
    )
}

impl DrainTrigger {
    /// Begins a drain; work that is still open after `limit` is forced. A second call forces at
    /// once.
    pub fn drain(&self, limit: Duration) {
        self.phase.send_if_modified(|p| {
            *p = match *p {
                DrainPhase::Running => DrainPhase::Draining {
                    deadline: Instant::now() + limit,
                },
                DrainPhase::Draining { .. } => DrainPhase::Forced,
                DrainPhase::Forced => return false,
            };
            true
        });
    }

    /// Forces: everything is closed now.
    pub fn force(&self) {
        self.phase.send_replace(DrainPhase::Forced);
    }

    /// Waits until every [`DrainWatcher`] is dropped. It forces at the deadline and gives up
    /// `grace` later. Returns `false` if tasks remain; the caller should log that and exit anyway.
    pub async fn finished(&mut self, grace: Duration) -> bool {
        let mut phase = self.phase.subscribe();
        loop {
            let now = *phase.borrow_and_update();
            tokio::select! {
                biased;
                // The last watcher is gone; `biased` reports that even when the deadline has passed
                // too.
                _ = self.open.recv() => return true,
                () = until_deadline(now, grace) => match now {
                    DrainPhase::Draining { .. } => self.force(),
                    _ => return false,
                },
                _ = phase.changed() => {}
            }
        }
    }
}

async fn until_deadline(phase: DrainPhase, grace: Duration) {
    match phase {
        DrainPhase::Running => std::future::pending().await,
        DrainPhase::Draining { deadline } => tokio::time::sleep_until(deadline).await,
        DrainPhase::Forced => tokio::time::sleep(grace).await,
    }
}

impl Drop for DrainTrigger {
    fn drop(&mut self) {
        self.phase.send_replace(DrainPhase::Forced);
    }
}

impl DrainWatcher {
    /// Returns the current phase of the drain.
    pub fn phase(&self) -> DrainPhase {
        *self.phase.borrow()
    }

    /// Resolves when the drain begins or is forced; at once if that has happened already.
    pub async fn draining(&self) {
        self.watcher().draining().await;
    }

    /// Resolves when everything must close now: the drain was forced, or its deadline has passed.
    pub async fn forced(&self) {
        self.watcher().forced().await;
    }

    /// Returns an observer of the same phase that does not delay the end of the drain.
    pub fn watcher(&self) -> DrainObserver {
        DrainObserver {
            phase: self.phase.clone(),
        }
    }

    /// Creates a branch, for example for one pod's listener or one tenant. It drains and forces
    /// with this tree, or earlier by its own trigger. This tree does not finish before the branch
    /// does.
    pub fn branch(&self) -> (DrainTrigger, DrainWatcher) {
        let (tx, rx) = watch::channel(self.phase());
        let (open, closed) = mpsc::channel(1);
        let (sender, mut parent) = (tx.clone(), self.phase.clone());
        // The task owns this clone while the branch has watchers; so the parent cannot finish
        // first.
        let parent_open = self._open.clone();
        tokio::spawn(async move {
            let _parent_open = parent_open;
            loop {
                let now = *parent.borrow_and_update();
                sender.send_if_modified(|p| advance_phase(p, now));
                tokio::select! {
                    changed = parent.changed() => if changed.is_err() {
                        // The parent's trigger is gone, which forces the parent.
                        sender.send_replace(DrainPhase::Forced);
                        return;
                    },
                    () = sender.closed() => return,
                }
            }
        });
        (
            DrainTrigger {
                phase: tx,
                open: closed,
            },
            DrainWatcher {
                phase: rx,
                _open: open,
            },
        )
    }
}

impl DrainObserver {
    /// Returns the current phase, like [`DrainWatcher::phase`].
    pub fn phase(&self) -> DrainPhase {
        *self.phase.borrow()
    }

    /// Resolves when the drain begins, like [`DrainWatcher::draining`].
    pub async fn draining(&self) {
        // An error means that the trigger is gone, and its drop forces.
        let _ = self
            .phase
            .clone()
            .wait_for(|p| *p != DrainPhase::Running)
            .await;
    }

    /// Resolves when everything must close, like [`DrainWatcher::forced`].
    pub async fn forced(&self) {
        let mut phase = self.phase.clone();
        loop {
            let now = *phase.borrow_and_update();
            match now {
                // The watched value stays `Draining` past the deadline until the trigger forces, so
                // the deadline counts too.
                DrainPhase::Forced => return,
                DrainPhase::Running => {
                    if phase.changed().await.is_err() {
                        return;
                    }
                }
                DrainPhase::Draining { deadline } => tokio::select! {
                    () = tokio::time::sleep_until(deadline) => return,
                    changed = phase.changed() => if changed.is_err() { return },
                },
            }
        }
    }
}

/// Moves `own` forward to the phase of `parent`, never back. Returns whether it moved.
fn advance_phase(own: &mut DrainPhase, parent: DrainPhase) -> bool {
    let next = match (*own, parent) {
        (DrainPhase::Forced, _) | (_, DrainPhase::Running) => *own,
        (_, DrainPhase::Forced) => DrainPhase::Forced,
        (DrainPhase::Running, d) => d,
        (DrainPhase::Draining { deadline: a }, DrainPhase::Draining { deadline: b }) => {
            DrainPhase::Draining { deadline: a.min(b) }
        }
    };
    let moved = next != *own;
    *own = next;
    moved
}

/// SIGTERM and SIGINT, caught from [`TerminationSignals::catch`] on.
#[derive(Debug)]
pub struct TerminationSignals {
    term: Signal,
    int: Signal,
}

impl TerminationSignals {
    /// Installs the handlers. A process does this before it starts anything else, so that an early
    /// signal also ends it in order.
    ///
    /// # Errors
    /// The signal handlers cannot be installed.
    pub fn catch() -> std::io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next of the two.
    async fn recv(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}

/// Waits for SIGTERM or SIGINT, drains with `limit`, and waits for the end like
/// [`DrainTrigger::finished`]. A second signal forces.
pub async fn on_signals(
    signals: TerminationSignals,
    trigger: DrainTrigger,
    limit: Duration,
    grace: Duration,
) -> bool {
    let notice = PreDrain {
        order: std::future::pending(),
        give: || {},
        wait: Duration::ZERO,
    };
    on_signals_after(signals, trigger, notice, limit, grace).await
}

/// Announcement of a drain to peers that must know of it before it begins.
#[derive(Debug)]
pub struct PreDrain<O, G> {
    /// Begins the drain when it resolves, like a signal.
    pub order: O,
    /// Announces the drain. It is called once.
    pub give: G,
    /// Time between the announcement and the drain. A second signal ends it early.
    pub wait: Duration,
}

/// Does the same as [`on_signals`], but announces the drain and keeps serving for a while before it
/// drains. A drain that another caller starts with the trigger is not announced.
pub async fn on_signals_after<O, G>(
    mut signals: TerminationSignals,
    mut trigger: DrainTrigger,
    notice: PreDrain<O, G>,
    limit: Duration,
    grace: Duration,
) -> bool
where
    O: Future<Output = ()>,
    G: FnOnce(),
{
    let mut phase = trigger.phase.subscribe();
    let begun = tokio::select! {
        () = signals.recv() => true,
        () = notice.order => true,
        // Another owner began the drain, for example `/quitquitquit`.
        _ = phase.wait_for(|p| *p != DrainPhase::Running) => false,
    };
    if begun {
        (notice.give)();
        tokio::select! {
            () = tokio::time::sleep(notice.wait) => {}
            () = signals.recv() => {}
        }
        // A drain may have begun since the announcement; a second call of `drain` would force it.
        if *phase.borrow() == DrainPhase::Running {
            trigger.drain(limit);
        }
    }
    let again = trigger.phase.clone();
    tokio::select! {
        done = trigger.finished(grace) => done,
        // A signal during the drain forces it; tasks still get `grace` to end.
        () = async {
            signals.recv().await;
            again.send_replace(DrainPhase::Forced);
            tokio::time::sleep(grace).await;
        } => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_ends_when_the_last_holder_does() {
        let (mut trigger, drain) = tree();
        let task = tokio::spawn(async move {
            drain.draining().await;
            tokio::time::sleep(ms(50)).await;
        });
        trigger.drain(ms(1000));
        assert!(trigger.finished(ms(10)).await);
        task.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_forces_and_a_stubborn_holder_is_given_up() {
        let (mut trigger, drain) = tree();
        let start = Instant::now();
        trigger.drain(ms(100));
        assert!(!trigger.finished(ms(10)).await);
        assert_eq!(drain.phase(), DrainPhase::Forced);
        let waited = start.elapsed();
        assert_eq!(waited.as_millis(), 110);
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_call_or_a_lost_trigger_forces() {
        let (trigger, drain) = tree();
        trigger.drain(ms(1000));
        trigger.drain(ms(1000));
        assert_eq!(drain.phase(), DrainPhase::Forced);
        let (trigger, drain) = tree();
        drop(trigger);
        drain.forced().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_branch_follows_its_parent_and_may_go_first() {
        let (mut trigger, drain) = tree();
        let (early, branch) = drain.branch();
        early.drain(ms(10));
        branch.draining().await;
        assert_eq!(drain.phase(), DrainPhase::Running);
        let (_own, second) = drain.branch();
        drop(drain);
        trigger.drain(ms(500));
        second.draining().await;
        branch.forced().await;
        drop((branch, second, early, _own));
        assert!(trigger.finished(ms(10)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn notice_is_given_before_a_drain_and_then_it_is_served_on() {
        let (trigger, drain) = tree();
        let start = Instant::now();
        let (sender, heard) = std::sync::mpsc::channel();
        let notice = PreDrain {
            order: tokio::time::sleep(ms(50)),
            give: move || sender.send(start.elapsed()).unwrap(),
            wait: ms(2000),
        };
        let holder = tokio::spawn(async move {
            drain.draining().await;
            start.elapsed()
        });
        assert!(
            on_signals_after(
                TerminationSignals::catch().unwrap(),
                trigger,
                notice,
                ms(1000),
                ms(10)
            )
            .await
        );
        assert_eq!(heard.try_recv().unwrap().as_millis() / 10, 5);
        assert_eq!(holder.await.unwrap().as_millis() / 10, 205);
    }
}
