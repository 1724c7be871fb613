//! The state with its owner: takes responses in, asks the caller, keeps status and metrics, and knows when the disk is due.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use canal_model::program::Kind;
use canal_wire::discovery::DeltaDiscoveryResponse;
use tokio::sync::watch;
use tokio::time::Instant;

use super::snapshot::{self, SnapshotError};
use super::state::{Refusal, State, examine};
use super::{Apply, Origin, Status, SubscriberConfig, Update, counts::Counts, kind_name};
use crate::drain::Drain;

/// A snapshot may take at most this share of the time: a large state under churn is written less often.
const WRITE_SHARE: u32 = 10;

/// What the caller is told of a response.
enum Tell {
    Nothing,
    Change,
    Whole,
}

/// The owner of the state.
pub(super) struct Holder {
    kinds: Vec<Kind>,
    path: PathBuf,
    state: Arc<Mutex<State>>,
    apply: Apply,
    status: watch::Sender<Status>,
    counts: Counts,
    /// Kinds answered by a controller in this run.
    answered: HashSet<Kind>,
    /// The present stream has brought something good.
    heard: bool,
    /// The state on disk is behind.
    dirty: bool,
    next_write: Instant,
    write_pause: Duration,
    /// Held until the newest state is on disk after draining began.
    drain: Option<Drain>,
}

/// All of a state as one change.
fn whole(kinds: &[Kind], state: &State) -> Update {
    Update {
        origin: Origin::Controller,
        generation: state.generation(),
        upserts: kinds.iter().flat_map(|k| state.of(*k).cloned()).collect(),
        removals: Vec::new(),
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // A panic in the caller's code is caught before it can leave the lock in the middle of a change.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Holder {
    pub(super) fn new(config: &SubscriberConfig, apply: Apply, counts: Counts, write_pause: Duration, drain: Drain) -> Self {
        Self {
            kinds: config.kinds.clone(),
            path: config.snapshot.clone(),
            state: Arc::default(),
            apply,
            status: watch::channel(Status::default()).0,
            counts,
            answered: HashSet::new(),
            heard: false,
            dirty: false,
            next_write: Instant::now(),
            write_pause,
            drain: Some(drain),
        }
    }

    pub(super) fn shared(&self) -> (Arc<Mutex<State>>, watch::Receiver<Status>) {
        (self.state.clone(), self.status.subscribe())
    }

    pub(super) fn with_state<T>(&self, see: impl FnOnce(&State) -> T) -> T {
        see(&lock(&self.state))
    }

    /// Takes the snapshot of an earlier run, if there is a good one.
    pub(super) fn boot(&mut self) {
        if let Err(e) = self.try_boot() {
            if !matches!(e, SnapshotError::Missing) {
                self.counts.snapshot_refused(e.reason());
                tracing::error!(snapshot = %self.path.display(), error = %e, "the snapshot is not used; waiting for the controller");
            }
            return;
        }
        self.status.send_modify(|s| s.ready = true);
        self.show();
    }

    fn try_boot(&mut self) -> Result<(), SnapshotError> {
        let state = snapshot::read(&self.path, &self.kinds)?;
        let update = Update { origin: Origin::Snapshot, ..whole(&self.kinds, &state) };
        ask(&mut self.apply, &update, &state).map_err(SnapshotError::Refused)?;
        *lock(&self.state) = state;
        Ok(())
    }

    pub(super) fn connected(&mut self, address: &str) {
        self.counts.connected(true);
        self.status.send_modify(|s| {
            s.connected = true;
            s.controller = address.into();
            s.error.clear();
        });
    }

    /// True if the stream that ended had brought something good.
    pub(super) fn disconnected(&mut self, reason: &'static str, why: &str) -> bool {
        self.counts.connected(false);
        self.counts.reconnect(reason);
        self.status.send_modify(|s| {
            s.connected = false;
            s.error = why.into();
            s.reconnects += 1;
        });
        std::mem::take(&mut self.heard)
    }

    /// Judges a whole response; `Err` is the text of the nack.
    pub(super) fn take(&mut self, response: &DeltaDiscoveryResponse) -> Result<(), String> {
        match self.try_take(response) {
            Ok(kind) => {
                self.accepted(kind);
                Ok(())
            }
            Err(refusal) => {
                let (reason, text) = (refusal.reason(), refusal.to_string());
                let kind = canal_wire::southbound::kind_of(&response.type_url).map_or("unknown", kind_name);
                self.counts.nack(kind, reason);
                tracing::warn!(kind, reason, generation = response.system_version_info, error = text, "refused a response");
                self.status.send_modify(|s| {
                    s.nack.insert(kind.into(), text.clone());
                });
                Err(text)
            }
        }
    }

    fn try_take(&mut self, response: &DeltaDiscoveryResponse) -> Result<Kind, Refusal> {
        let mut state = lock(&self.state);
        let change = examine(&state, &self.kinds, response)?;
        let undo = state.apply(&change);
        let asked = match self.to_tell(change.kind) {
            Tell::Nothing => Ok(()),
            Tell::Change if change.is_empty() => return Ok(change.kind),
            Tell::Change => ask(&mut self.apply, &change.update, &state),
            Tell::Whole => {
                let whole = whole(&self.kinds, &state);
                ask(&mut self.apply, &whole, &state)
            }
        };
        if let Err(why) = asked {
            state.undo(undo);
            return Err(Refusal::Caller(why));
        }
        self.dirty |= !change.is_empty();
        Ok(change.kind)
    }

    /// Until every kind was answered there is only a part of a state: services without their routes, say. Nobody may serve by that.
    fn to_tell(&self, kind: Kind) -> Tell {
        let answered = |k: &Kind| *k == kind || self.answered.contains(k);
        match (self.status.borrow().ready, self.kinds.iter().all(answered)) {
            (true, _) => Tell::Change,
            (false, true) => Tell::Whole,
            (false, false) => Tell::Nothing,
        }
    }

    fn accepted(&mut self, kind: Kind) {
        self.counts.update(kind_name(kind));
        self.status.send_modify(|s| {
            s.nack.remove(kind_name(kind));
        });
        self.answered.insert(kind);
        self.heard = true;
        if self.kinds.iter().all(|k| self.answered.contains(k)) && !self.status.borrow().live {
            self.status.send_modify(|s| (s.ready, s.live) = (true, true));
            // The first full state is on disk before anyone relies on it.
            self.dirty = true;
            self.write();
        }
        self.show();
    }

    /// Status and gauges follow the state.
    fn show(&self) {
        let (generation, resources) = self.with_state(|s| {
            let count = |k: &Kind| (kind_name(*k).to_string(), s.count(*k));
            (s.generation().0, self.kinds.iter().map(count).collect())
        });
        self.counts.generation(generation);
        self.status.send_modify(|s| (s.generation, s.resources) = (generation, resources));
    }

    /// Waits for `event`, and keeps the disk up meanwhile.
    pub(super) async fn meanwhile<T>(&mut self, event: impl Future<Output = T>) -> T {
        let mut event = std::pin::pin!(event);
        loop {
            tokio::select! {
                biased;
                t = &mut event => return t,
                () = due(self.dirty.then_some(self.next_write)) => self.write(),
                () = draining(self.drain.as_ref()) => {
                    self.write();
                    self.drain = None;
                }
            }
        }
    }

    /// Writes now, if the disk is behind a state that is fit to boot from.
    pub(super) fn write(&mut self) {
        if !self.dirty || !self.status.borrow().ready {
            // Not fit yet: the first full state is written when it is there.
            self.dirty = false;
            return;
        }
        let (started, state) = (Instant::now(), lock(&self.state).clone());
        // Blocking on purpose, here on the control runtime: the order of states on disk is then the order of acceptance.
        let written = snapshot::write(&self.path, &state);
        self.next_write = Instant::now() + self.write_pause.max(started.elapsed() * WRITE_SHARE);
        self.counts.snapshot_written(written.is_ok());
        match written {
            Ok(()) => self.dirty = false,
            Err(error) => {
                // Tried again after the pause; serving goes on.
                tracing::error!(snapshot = %self.path.display(), %error, "the snapshot could not be written");
            }
        }
    }
}

async fn due(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn draining(drain: Option<&Drain>) {
    match drain {
        Some(d) => d.draining().await,
        None => std::future::pending().await,
    }
}

/// Asks the caller. A panic there is a refusal: a configuration that trips a bug must not take the data plane down.
fn ask(apply: &mut Apply, update: &Update, state: &State) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(|| apply(update, state))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string).or_else(|| panic.downcast_ref::<String>().cloned());
        Err(format!("applying it panicked: {}", text.unwrap_or_default()))
    })
}
