//! Owner of the state: it boots from disk, maintains status and metrics, and decides when to write
//! the state file. It does not apply responses; `intake` does.

mod intake;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use canal_model::ids::StoreId;
use canal_model::program::ResourceKind;
use canal_runtime::drain::DrainWatcher;
use tokio::sync::watch;
use tokio::time::Instant;

use super::counts::{EXHAUSTED, SubscriptionCounters};
use super::state::{ClosedTenants, ResourceState};
use super::state_file::{self, StateFileError};
use super::{ApplyFn, SubscriberConfig, SubscriptionStatus, Update, UpdateSource};

pub(super) use intake::{NackReply, deliver_whole};

/// A write may use at most one part in this many of the time, so a large state that changes often
/// is written less often.
const WRITE_SHARE: u32 = 10;

/// A batch whose manifests are still missing after this time is written as it is. Manifests follow
/// their batch on the same stream at once, so after that they are lost with it. Nobody measured the
/// value.
const SEAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Number of consecutive streams that the controller ends for a full limit, before a stream lists
/// nothing as held.
/// At a first one, other data planes may fill the limit, and listing nothing costs a whole state.
const EXHAUSTED_STREAMS_MAX: usize = 2;

/// Result of the comparison with the store that a controller announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoreMatch {
    /// The store is the one whose state this stream carries.
    Same,
    /// The stream must be restarted, with another state.
    Restart,
}

/// Owner of the state and its status.
pub(super) struct StateOwner {
    pub(super) kinds: Vec<ResourceKind>,
    path: PathBuf,
    pub(super) state: Arc<Mutex<ResourceState>>,
    /// Partial state that will replace the present one, which is served until this one is complete:
    /// the state of another store that a controller announces, or of the same store after the
    /// controller refused what this data plane listed as held.
    pub(super) incoming: Option<ResourceState>,
    /// Number of addresses of the controller.
    addresses: usize,
    /// Consecutive attempts in which no controller announced the store of the present state.
    attempts_without_store: usize,
    /// Consecutive streams that the controller ended, without a good response, because a limit is
    /// full.
    exhausted_streams: usize,
    /// The controller of the present stream announced the store of the present state.
    is_own_store: bool,
    pub(super) apply: ApplyFn,
    pub(super) status: watch::Sender<SubscriptionStatus>,
    pub(super) counts: SubscriptionCounters,
    /// Closed tenants as they were logged last.
    logged: Arc<ClosedTenants>,
    /// The stream must be restarted, because the state differs from what the controller assumes.
    pub(super) resync: bool,
    /// Kinds that a controller has answered in this run.
    answered: HashSet<ResourceKind>,
    /// The present stream has brought a good response.
    stream_was_useful: bool,
    /// The state file is older than the state.
    pub(super) dirty: bool,
    next_write: Instant,
    /// Time since which a tenant lacks a manifest of its present resources.
    unsealed_since: Option<Instant>,
    write_pause: Duration,
    /// Keeps a drain from finishing until the newest state is on disk.
    drain: Option<DrainWatcher>,
}

/// Returns a complete state as one update.
pub(super) fn full_update(kinds: &[ResourceKind], state: &ResourceState) -> Update {
    Update {
        origin: UpdateSource::Controller,
        generation: state.generation(),
        upserts: kinds.iter().flat_map(|k| state.of(*k).cloned()).collect(),
        removals: Vec::new(),
    }
}

pub(super) fn lock(state: &Mutex<ResourceState>) -> MutexGuard<'_, ResourceState> {
    // A panic in the callback is caught before it could interrupt a change under the lock.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StateOwner {
    pub(super) fn new(
        config: &SubscriberConfig,
        apply: ApplyFn,
        counts: SubscriptionCounters,
        write_pause: Duration,
        drain: DrainWatcher,
    ) -> Self {
        Self {
            kinds: config.kinds.clone(),
            path: config.snapshot.clone(),
            state: Arc::default(),
            incoming: None,
            addresses: config.controller.addresses.len(),
            attempts_without_store: 0,
            exhausted_streams: 0,
            is_own_store: false,
            apply,
            status: watch::channel(SubscriptionStatus::default()).0,
            counts,
            logged: Arc::default(),
            resync: false,
            answered: HashSet::new(),
            stream_was_useful: false,
            dirty: false,
            next_write: Instant::now(),
            unsealed_since: None,
            write_pause,
            drain: Some(drain),
        }
    }

    pub(super) fn shared(
        &self,
    ) -> (
        Arc<Mutex<ResourceState>>,
        watch::Receiver<SubscriptionStatus>,
    ) {
        (self.state.clone(), self.status.subscribe())
    }

    pub(super) fn with_state<T>(&self, see: impl FnOnce(&ResourceState) -> T) -> T {
        see(&lock(&self.state))
    }

    /// Passes the state that the next stream has to complete: that of another store, if one is
    /// being received.
    pub(super) fn with_wanted_state<T>(&self, see: impl FnOnce(&ResourceState) -> T) -> T {
        match &self.incoming {
            Some(incoming) => see(incoming),
            None => self.with_state(see),
        }
    }

    /// Compares the announced store with that of the present state. Another store is accepted only
    /// if no other address of the controller led to the known one.
    pub(super) fn compare_store(&mut self, store: StoreId) -> StoreMatch {
        let known = self.with_state(|state| state.store);
        // Without a known store there is nothing that another one could contradict.
        if known.is_none_or(|known| known == store) {
            self.is_own_store = true;
            self.attempts_without_store = 0;
            if known.is_none() {
                lock(&self.state).store = Some(store);
                self.dirty = true;
            }
            self.show_store(store, false);
            return match &mut self.incoming {
                // The stream was started with the partial state of the other store.
                Some(incoming) if incoming.store.is_some_and(|of| of != store) => {
                    self.incoming = None;
                    StoreMatch::Restart
                }
                Some(incoming) => {
                    incoming.store = Some(store);
                    StoreMatch::Same
                }
                None => StoreMatch::Same,
            };
        }
        self.show_store(store, true);
        if self
            .incoming
            .as_ref()
            .is_some_and(|incoming| incoming.store == Some(store))
        {
            return StoreMatch::Same;
        }
        let is_last = self.attempts_without_store + 1 >= self.addresses;
        tracing::error!(
            %store, known = known.map(tracing::field::display), taken_up = is_last,
            "subscriber: the controller has another store than this data plane knows; the present state is served until the other store's state is complete"
        );
        // Another address may still lead to the known store.
        if is_last {
            self.answered.clear();
            self.incoming = Some(ResourceState {
                store: Some(store),
                ..ResourceState::default()
            });
        }
        StoreMatch::Restart
    }

    fn show_store(&self, store: StoreId, is_other: bool) {
        self.counts.other_store(is_other);
        self.status.send_modify(|s| {
            s.store = self
                .with_state(|state| state.store)
                .map(|held| held.to_string())
                .unwrap_or_default();
            s.other_store = if is_other {
                store.to_string()
            } else {
                String::new()
            };
        });
    }

    /// Boots from the state file of an earlier run, if there is a good one.
    pub(super) fn boot(&mut self) {
        if let Err(e) = self.try_boot() {
            if !matches!(e, StateFileError::Missing) {
                self.counts.snapshot_refused(e.reason());
                tracing::error!(snapshot = %self.path.display(), error = %e, "subscriber: cannot use the state file; waiting for the controller");
            }
            return;
        }
        self.status.send_modify(|s| s.ready = true);
        self.publish_status();
    }

    fn try_boot(&mut self) -> Result<(), StateFileError> {
        let mut state = state_file::read(&self.path, &self.kinds)?;
        let watches = self.kinds.contains(&ResourceKind::Manifest);
        if watches {
            // The manifests on disk decide which tenants are closed.
            state.review_all(&self.kinds);
        }
        deliver_whole(
            &mut self.apply,
            &ResourceState::default(),
            &mut state,
            UpdateSource::Snapshot,
            &self.kinds,
            watches,
        )
        .map_err(StateFileError::Refused)?;
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

    /// Records the end of a stream. Returns whether the stream had brought a good response. After
    /// [`EXHAUSTED_STREAMS_MAX`] streams that the controller ended for a full limit, the next one
    /// lists nothing as held: what this data plane lists may be what fills the limit.
    pub(super) fn disconnected(&mut self, reason: &'static str, why: &str) -> bool {
        self.counts.connected(false);
        self.counts.reconnect(reason);
        let was_own = std::mem::take(&mut self.is_own_store);
        self.attempts_without_store = if was_own {
            0
        } else {
            self.attempts_without_store.saturating_add(1)
        };
        self.status.send_modify(|s| {
            s.connected = false;
            s.error = why.into();
            s.reconnects += 1;
        });
        let was_useful = std::mem::take(&mut self.stream_was_useful);
        self.exhausted_streams = if was_useful || reason != EXHAUSTED {
            0
        } else {
            self.exhausted_streams + 1
        };
        if self.exhausted_streams >= EXHAUSTED_STREAMS_MAX {
            self.exhausted_streams = 0;
            self.begin_anew();
        }
        was_useful
    }

    /// Lets the next stream list nothing as held. The present state is served until the controller
    /// has sent a whole one, which never has an older generation.
    fn begin_anew(&mut self) {
        let (store, generation) = self.with_state(|state| (state.store, state.generation));
        tracing::warn!(
            streams = EXHAUSTED_STREAMS_MAX,
            "subscriber: the controller ended streams because a limit was reached; the next stream requests everything"
        );
        self.answered.clear();
        self.incoming = Some(ResourceState {
            store,
            generation,
            ..ResourceState::default()
        });
    }

    /// Returns whether every kind has been answered, counting a response of `kind` as well.
    pub(super) fn is_answered_with(&self, kind: ResourceKind) -> bool {
        self.kinds
            .iter()
            .all(|k| *k == kind || self.answered.contains(k))
    }

    /// Records an answered kind. A kind counts as answered even if all its resources were refused,
    /// because a subscriber without good resources must not wait for one.
    pub(super) fn accepted(&mut self, kind: ResourceKind, is_whole: bool) {
        if is_whole {
            self.counts.update(kind.label());
            self.status.send_modify(|s| {
                s.nack.remove(kind.label());
            });
        }
        self.answered.insert(kind);
        self.stream_was_useful = true;
        if self.incoming.is_none()
            && self.kinds.iter().all(|k| self.answered.contains(k))
            && !self.status.borrow().live
        {
            self.status
                .send_modify(|s| (s.ready, s.live) = (true, true));
            // The first full state must be on disk before it is relied on.
            self.dirty = true;
            self.write();
        }
        self.publish_status();
    }

    /// Updates status and gauges from the state.
    fn publish_status(&mut self) {
        let (generation, resources, closed, store) = self.with_state(|s| {
            let count = |k: &ResourceKind| (k.label().to_string(), s.count(*k));
            let store = s.store.map(|store| store.to_string()).unwrap_or_default();
            (
                s.generation().0,
                self.kinds.iter().map(count).collect(),
                s.closed().clone(),
                store,
            )
        });
        // The announced store has become the store of the state.
        if !store.is_empty() && self.status.borrow().other_store == store {
            self.counts.other_store(false);
            self.status.send_modify(|s| s.other_store.clear());
        }
        self.counts.generation(generation);
        self.counts.closed(closed.len());
        for (tenant, closure) in closed
            .iter()
            .filter(|(tenant, closure)| self.logged.get(*tenant) != Some(*closure))
        {
            tracing::error!(%tenant, cause = closure.cause.name(), detail = closure.detail, "subscriber: the tenant is closed and not served");
        }
        for tenant in self
            .logged
            .keys()
            .filter(|tenant| !closed.contains_key(*tenant))
        {
            tracing::info!(%tenant, "subscriber: the tenant is served again");
        }
        self.logged = closed.clone();
        self.status.send_modify(|s| {
            (s.generation, s.resources, s.store) = (generation, resources, store);
            if s.closed != *closed {
                s.closed = (*closed).clone();
            }
        });
    }

    /// Waits for `event`, and writes the state file when it is due in the meantime.
    pub(super) async fn persist_while<T>(&mut self, event: impl Future<Output = T>) -> T {
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

    /// Returns when to write the state. An incomplete batch is not written, because a boot from it
    /// would close its tenants. The wait is limited, since a controller may be unable to seal one
    /// tenant.
    fn write_due(&mut self) -> Option<Instant> {
        let is_sealed = self.with_state(|s| s.unsealed.is_empty());
        self.unsealed_since = if is_sealed {
            None
        } else {
            self.unsealed_since.or_else(|| Some(Instant::now()))
        };
        let wait = self.unsealed_since.map(|since| since + SEAL_TIMEOUT);
        self.dirty
            .then_some(self.next_write.max(wait.unwrap_or(self.next_write)))
    }

    /// Writes the state now, if the file is older and the state is fit to boot from.
    pub(super) fn write(&mut self) {
        if !self.dirty || !self.status.borrow().ready {
            // The state is not complete yet. The first full state will be written.
            self.dirty = false;
            return;
        }
        let (started, state) = (Instant::now(), lock(&self.state).clone());
        // The call blocks on purpose, on the control runtime: states reach the disk in the order of
        // acceptance.
        let written = state_file::write(&self.path, &state);
        self.next_write = Instant::now() + self.write_pause.max(started.elapsed() * WRITE_SHARE);
        self.counts.snapshot_written(written.is_ok());
        match written {
            Ok(()) => self.dirty = false,
            Err(error) => {
                // The write is repeated after the pause, and serving continues.
                tracing::error!(snapshot = %self.path.display(), %error, "subscriber: cannot write the state file; retrying");
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

async fn draining(drain: Option<&DrainWatcher>) {
    match drain {
        Some(d) => d.draining().await,
        None => std::future::pending().await,
    }
}
