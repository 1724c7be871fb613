//! The state with its owner: boots from disk, keeps status and metrics, and knows when the disk is due. Responses are taken in `intake`.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use canal_model::ids::StoreId;
use canal_model::program::Kind;
use tokio::sync::watch;
use tokio::time::Instant;

use super::closure::ClosedTenants;
use super::intake::tell_whole;
use super::snapshot::{self, SnapshotError};
use super::state::State;
use super::{Apply, Origin, Status, SubscriberConfig, Update, counts::Counts, kind_name};
use crate::drain::Drain;

/// A snapshot may take at most this share of the time: a large state under churn is written less often.
const WRITE_SHARE: u32 = 10;

/// A batch that is not sealed after so long is written as it is.
const SEAL_TIMEOUT: Duration = Duration::from_secs(5);

/// What follows from the store that a controller names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoreMatch {
    /// It is the one whose state this stream is about.
    Same,
    /// The stream must be begun anew, with another state.
    Restart,
}

/// The owner of the state.
pub(super) struct Holder {
    pub(super) kinds: Vec<Kind>,
    path: PathBuf,
    pub(super) state: Arc<Mutex<State>>,
    /// The state of another store as far as it came, if a controller shows one. What is held is served until this is whole.
    pub(super) incoming: Option<State>,
    /// How many addresses a controller may have.
    addresses: usize,
    /// Attempts in a row in which no controller showed the store of what is held.
    attempts_without_store: usize,
    /// The present stream's controller showed the store of what is held.
    is_own_store: bool,
    pub(super) apply: Apply,
    pub(super) status: watch::Sender<Status>,
    pub(super) counts: Counts,
    /// Closed tenants as they were logged last.
    shown: Arc<ClosedTenants>,
    /// The stream must be begun anew: what is held is no longer what the controller believes.
    pub(super) resync: bool,
    /// Kinds answered by a controller in this run.
    answered: HashSet<Kind>,
    /// The present stream has brought something good.
    heard: bool,
    /// The state on disk is behind.
    pub(super) dirty: bool,
    next_write: Instant,
    /// Some tenant has no manifest of what is held of it.
    unsealed_since: Option<Instant>,
    write_pause: Duration,
    /// Held until the newest state is on disk after draining began.
    drain: Option<Drain>,
}

/// All of a state as one change.
pub(super) fn whole(kinds: &[Kind], state: &State) -> Update {
    Update {
        origin: Origin::Controller,
        generation: state.generation(),
        upserts: kinds.iter().flat_map(|k| state.of(*k).cloned()).collect(),
        removals: Vec::new(),
    }
}

pub(super) fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // A panic in the caller's code is caught before it can leave the lock in the middle of a change.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Holder {
    pub(super) fn new(config: &SubscriberConfig, apply: Apply, counts: Counts, write_pause: Duration, drain: Drain) -> Self {
        Self {
            kinds: config.kinds.clone(),
            path: config.snapshot.clone(),
            state: Arc::default(),
            incoming: None,
            addresses: config.controller.addresses.len(),
            attempts_without_store: 0,
            is_own_store: false,
            apply,
            status: watch::channel(Status::default()).0,
            counts,
            shown: Arc::default(),
            resync: false,
            answered: HashSet::new(),
            heard: false,
            dirty: false,
            next_write: Instant::now(),
            unsealed_since: None,
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

    /// The state that the next stream is to complete: that of another store, where one is being taken up.
    pub(super) fn with_wanted_state<T>(&self, see: impl FnOnce(&State) -> T) -> T {
        match &self.incoming {
            Some(incoming) => see(incoming),
            None => self.with_state(see),
        }
    }

    /// Compares the store that a controller names with that of what is held. Another one is taken up only if no other address of the
    /// controller led to the known one.
    pub(super) fn meet_store(&mut self, store: StoreId) -> StoreMatch {
        let held = self.with_state(|state| state.store);
        if held.is_none_or(|held| held == store) {
            self.is_own_store = true;
            self.attempts_without_store = 0;
            if held.is_none() {
                lock(&self.state).store = Some(store);
                self.dirty = true;
            }
            self.show_store(store, false);
            // The stream was begun with what is held of the other store.
            return if self.incoming.take().is_some() { StoreMatch::Restart } else { StoreMatch::Same };
        }
        self.show_store(store, true);
        if self.incoming.as_ref().is_some_and(|incoming| incoming.store == Some(store)) {
            return StoreMatch::Same;
        }
        let is_last = self.attempts_without_store + 1 >= self.addresses;
        tracing::error!(
            %store, held = held.map(tracing::field::display), taken_up = is_last,
            "the controller shows another store than the one that this data plane knows; what is held is served until the other's state is whole"
        );
        if is_last {
            self.answered.clear();
            self.incoming = Some(State { store: Some(store), ..State::default() });
        }
        StoreMatch::Restart
    }

    fn show_store(&self, store: StoreId, is_other: bool) {
        self.counts.other_store(is_other);
        self.status.send_modify(|s| {
            s.store = self.with_state(|state| state.store).map(|held| held.to_string()).unwrap_or_default();
            s.other_store = if is_other { store.to_string() } else { String::new() };
        });
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
        let mut state = snapshot::read(&self.path, &self.kinds)?;
        let watches = self.kinds.contains(&Kind::Manifest);
        if watches {
            state.review_all(&self.kinds);
        }
        tell_whole(&mut self.apply, &State::default(), &mut state, Origin::Snapshot, &self.kinds, watches)
            .map_err(SnapshotError::Refused)?;
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
        let was_own = std::mem::take(&mut self.is_own_store);
        self.attempts_without_store = if was_own { 0 } else { self.attempts_without_store.saturating_add(1) };
        self.status.send_modify(|s| {
            s.connected = false;
            s.error = why.into();
            s.reconnects += 1;
        });
        std::mem::take(&mut self.heard)
    }

    /// Whether every kind was answered once, if a response of `kind` is counted too.
    pub(super) fn is_answered_with(&self, kind: Kind) -> bool {
        self.kinds.iter().all(|k| *k == kind || self.answered.contains(k))
    }

    /// A kind is answered even if its every resource was refused: who has none that is good must not wait for one.
    pub(super) fn accepted(&mut self, kind: Kind, is_whole: bool) {
        if is_whole {
            self.counts.update(kind_name(kind));
            self.status.send_modify(|s| {
                s.nack.remove(kind_name(kind));
            });
        }
        self.answered.insert(kind);
        self.heard = true;
        if self.incoming.is_none() && self.kinds.iter().all(|k| self.answered.contains(k)) && !self.status.borrow().live {
            self.status.send_modify(|s| (s.ready, s.live) = (true, true));
            // The first full state is on disk before anyone relies on it.
            self.dirty = true;
            self.write();
        }
        self.show();
    }

    /// Status and gauges follow the state.
    fn show(&mut self) {
        let (generation, resources, closed, store) = self.with_state(|s| {
            let count = |k: &Kind| (kind_name(*k).to_string(), s.count(*k));
            let store = s.store.map(|store| store.to_string()).unwrap_or_default();
            (s.generation().0, self.kinds.iter().map(count).collect(), s.closed().clone(), store)
        });
        if !store.is_empty() && self.status.borrow().other_store == store {
            self.counts.other_store(false);
            self.status.send_modify(|s| s.other_store.clear());
        }
        self.counts.generation(generation);
        self.counts.closed(closed.len());
        for (tenant, closure) in closed.iter().filter(|(tenant, closure)| self.shown.get(*tenant) != Some(*closure)) {
            tracing::error!(%tenant, cause = closure.cause.name(), detail = closure.detail, "tenant is closed: nothing of it is served");
        }
        for tenant in self.shown.keys().filter(|tenant| !closed.contains_key(*tenant)) {
            tracing::info!(%tenant, "tenant is open again");
        }
        self.shown = closed.clone();
        self.status.send_modify(|s| {
            (s.generation, s.resources, s.store) = (generation, resources, store);
            if s.closed != *closed {
                s.closed = (*closed).clone();
            }
        });
    }

    /// Waits for `event`, and keeps the disk up meanwhile.
    pub(super) async fn meanwhile<T>(&mut self, event: impl Future<Output = T>) -> T {
        let mut event = std::pin::pin!(event);
        loop {
            tokio::select! {
                biased;
                t = &mut event => return t,
                () = due(self.write_due()) => self.write(),
                () = draining(self.drain.as_ref()) => {
                    self.write();
                    self.drain = None;
                }
            }
        }
    }

    /// When the state is to be written. Half of a batch is not fit to boot from: its tenants would be closed. It is waited for, but not
    /// for ever, since a controller may be unable to seal one tenant.
    fn write_due(&mut self) -> Option<Instant> {
        let is_sealed = self.with_state(|s| s.unsealed.is_empty());
        self.unsealed_since = if is_sealed { None } else { self.unsealed_since.or_else(|| Some(Instant::now())) };
        let wait = self.unsealed_since.map(|since| since + SEAL_TIMEOUT);
        self.dirty.then_some(self.next_write.max(wait.unwrap_or(self.next_write)))
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
