//! The shutdown signal tree: running → draining (with a deadline) → forced. Tasks watch it; the first signal drains, the second forces.
//! What draining means (GOAWAY, `Connection: close`, no new accepts) is the watchers' business.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// Where the process stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Serving.
    Running,
    /// No new work; what is open may finish until the deadline.
    Draining { deadline: Instant },
    /// Close everything now.
    Forced,
}

/// Starts a drain. Dropping it without a call forces, so that a lost owner cannot leave tasks behind.
#[derive(Debug)]
pub struct Trigger {
    phase: watch::Sender<Phase>,
    // Closed when the last `Drain` is gone.
    open: mpsc::Receiver<()>,
}

/// Held by everything that must end before the process may; cheap to clone.
#[derive(Debug, Clone)]
pub struct Drain {
    phase: watch::Receiver<Phase>,
    _open: mpsc::Sender<()>,
}

/// Sees the phases without being waited for: for what serves operators to the end.
#[derive(Debug, Clone)]
pub struct Watcher {
    phase: watch::Receiver<Phase>,
}

/// A new tree.
pub fn tree() -> (Trigger, Drain) {
    let (tx, rx) = watch::channel(Phase::Running);
    let (open, closed) = mpsc::channel(1);
    (Trigger { phase: tx, open: closed }, Drain { phase: rx, _open: open })
}

impl Trigger {
    /// Begins draining; whatever is open after `limit` is forced. A second call forces at once.
    pub fn drain(&self, limit: Duration) {
        self.phase.send_if_modified(|p| {
            *p = match *p {
                Phase::Running => Phase::Draining { deadline: Instant::now() + limit },
                Phase::Draining { .. } => Phase::Forced,
                Phase::Forced => return false,
            };
            true
        });
    }

    /// Closes everything now.
    pub fn force(&self) {
        self.phase.send_replace(Phase::Forced);
    }

    /// Waits until every [`Drain`] is dropped. Forces at the deadline, and gives up `grace` after that: `false` says that
    /// tasks were left, which the caller should log and then exit anyway.
    pub async fn finished(&mut self, grace: Duration) -> bool {
        let mut phase = self.phase.subscribe();
        loop {
            let now = *phase.borrow_and_update();
            tokio::select! {
                biased;
                _ = self.open.recv() => return true,
                () = until_deadline(now, grace) => match now {
                    Phase::Draining { .. } => self.force(),
                    _ => return false,
                },
                _ = phase.changed() => {}
            }
        }
    }
}

async fn until_deadline(phase: Phase, grace: Duration) {
    match phase {
        Phase::Running => std::future::pending().await,
        Phase::Draining { deadline } => tokio::time::sleep_until(deadline).await,
        Phase::Forced => tokio::time::sleep(grace).await,
    }
}

impl Drop for Trigger {
    fn drop(&mut self) {
        self.phase.send_replace(Phase::Forced);
    }
}

impl Drain {
    /// Where the process stands now.
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Resolves when draining (or forcing) begins; at once if it has.
    pub async fn draining(&self) {
        self.watcher().draining().await;
    }

    /// Resolves when everything must close now: forced, or past the deadline.
    pub async fn forced(&self) {
        self.watcher().forced().await;
    }

    /// The same view, without holding up the end.
    pub fn watcher(&self) -> Watcher {
        Watcher { phase: self.phase.clone() }
    }

    /// A branch: it drains and forces with this one, or earlier by its own trigger (one pod's listener, one tenant).
    /// This tree is not finished before the branch is.
    pub fn branch(&self) -> (Trigger, Drain) {
        let (tx, rx) = watch::channel(self.phase());
        let (open, closed) = mpsc::channel(1);
        let (sender, mut parent) = (tx.clone(), self.phase.clone());
        let held = self._open.clone();
        tokio::spawn(async move {
            let _held = held;
            loop {
                let now = *parent.borrow_and_update();
                sender.send_if_modified(|p| stricter(p, now));
                tokio::select! {
                    changed = parent.changed() => if changed.is_err() {
                        sender.send_replace(Phase::Forced);
                        return;
                    },
                    () = sender.closed() => return,
                }
            }
        });
        (Trigger { phase: tx, open: closed }, Drain { phase: rx, _open: open })
    }
}

impl Watcher {
    /// As [`Drain::phase`].
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// As [`Drain::draining`].
    pub async fn draining(&self) {
        // An error means the trigger is gone, which has forced.
        let _ = self.phase.clone().wait_for(|p| *p != Phase::Running).await;
    }

    /// As [`Drain::forced`].
    pub async fn forced(&self) {
        let mut phase = self.phase.clone();
        loop {
            let now = *phase.borrow_and_update();
            match now {
                Phase::Forced => return,
                Phase::Running => {
                    if phase.changed().await.is_err() {
                        return;
                    }
                }
                Phase::Draining { deadline } => tokio::select! {
                    () = tokio::time::sleep_until(deadline) => return,
                    changed = phase.changed() => if changed.is_err() { return },
                },
            }
        }
    }
}

/// Moves `own` towards `parent`, never back; true if it moved.
fn stricter(own: &mut Phase, parent: Phase) -> bool {
    let next = match (*own, parent) {
        (Phase::Forced, _) | (_, Phase::Running) => *own,
        (_, Phase::Forced) => Phase::Forced,
        (Phase::Running, d) => d,
        (Phase::Draining { deadline: a }, Phase::Draining { deadline: b }) => Phase::Draining { deadline: a.min(b) },
    };
    let moved = next != *own;
    *own = next;
    moved
}

/// Waits for SIGTERM or SIGINT, drains with `limit`, waits for the end as [`Trigger::finished`]; a second signal forces.
/// Errors if the signals cannot be caught.
pub async fn on_signals(trigger: Trigger, limit: Duration, grace: Duration) -> std::io::Result<bool> {
    on_signals_after(trigger, Notice { order: std::future::pending(), give: || {}, wait: Duration::ZERO }, limit, grace).await
}

/// What comes before a drain, for what others must be told of first.
#[derive(Debug)]
pub struct Notice<O, G> {
    /// Begins the drain as a signal does.
    pub order: O,
    /// Called once.
    pub give: G,
    /// How long after that the drain begins; a second signal cuts it short.
    pub wait: Duration,
}

/// [`on_signals`] that gives notice and serves on for a while before it drains. One that somebody else begins is without notice.
pub async fn on_signals_after<O, G>(mut trigger: Trigger, notice: Notice<O, G>, limit: Duration, grace: Duration) -> std::io::Result<bool>
where
    O: Future<Output = ()>,
    G: FnOnce(),
{
    use tokio::signal::unix::{SignalKind, signal};
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut phase = trigger.phase.subscribe();
    let begun = tokio::select! {
        _ = term.recv() => true,
        _ = int.recv() => true,
        () = notice.order => true,
        // Begun by someone else, e.g. `/quitquitquit`.
        _ = phase.wait_for(|p| *p != Phase::Running) => false,
    };
    if begun {
        (notice.give)();
        tokio::select! {
            () = tokio::time::sleep(notice.wait) => {}
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        // A second call would force.
        if *phase.borrow() == Phase::Running {
            trigger.drain(limit);
        }
    }
    let again = trigger.phase.clone();
    tokio::select! {
        done = trigger.finished(grace) => Ok(done),
        () = async {
            tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
            again.send_replace(Phase::Forced);
            tokio::time::sleep(grace).await;
        } => Ok(false),
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
        assert_eq!(drain.phase(), Phase::Forced);
        assert_eq!(start.elapsed().as_millis(), 110);
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_call_or_a_lost_trigger_forces() {
        let (trigger, drain) = tree();
        trigger.drain(ms(1000));
        trigger.drain(ms(1000));
        assert_eq!(drain.phase(), Phase::Forced);
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
        assert_eq!(drain.phase(), Phase::Running);
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
        let (told, heard) = std::sync::mpsc::channel();
        let notice = Notice { order: tokio::time::sleep(ms(50)), give: move || told.send(start.elapsed()).unwrap(), wait: ms(2000) };
        let holder = tokio::spawn(async move {
            drain.draining().await;
            start.elapsed()
        });
        assert!(on_signals_after(trigger, notice, ms(1000), ms(10)).await.unwrap());
        assert_eq!(heard.try_recv().unwrap().as_millis() / 10, 5);
        assert_eq!(holder.await.unwrap().as_millis() / 10, 205);
    }
}
