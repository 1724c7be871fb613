//! The path of a change to the catalog writer. A change counts against its holder's share, waits
//! for its tenant's turn, and is prepared on its own thread. `prepare` computes the result of a
//! change. The catalog writer decides what takes effect, and when. A dry run takes the same path
//! and never reaches the writer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use canal_access::TenantLimits;
use canal_catalog::PolicyOrigin;
use canal_model::diagnostic::Diagnostic;
use canal_model::ids::{Generation, TenantName};
use canal_runtime::{ShareHolder, ShareRefusal, TenantPermit};
use canal_store::StoreError;
use canal_wire::api;
use tokio::sync::{mpsc, oneshot, watch};

use crate::answer::within_answer;
use crate::plan_apply::{ApplyPlan, WriteRequest};
use crate::prepare::{Basis, Commit, Committed, Prepared, PreparedWrite, Preparer, SourceChange};
use crate::source::{SourceState, SourceUpdate};
use crate::turns::{Turn, TurnQueue};

/// Maximum number of times that a change is prepared against a basis that turns out to be outdated.
/// With one change of a tenant at a time that does not happen; without a limit it could repeat
/// forever.
/// Nobody measured this value.
const ATTEMPTS_MAX: usize = 8;
/// Maximum number of states of one tenant in one source that wait; beyond it the oldest are
/// dropped. It must be at least two, so that the last content of a folder stays beside its removal.
/// Each state holds the tenant's files, so 8 of 64 MiB (`TENANT_BYTES_MAX`) are half a gigabyte at
/// most.
const STATES_WAITING_MAX: usize = 8;

/// A write request of an operator.
pub struct QueuedWrite {
    pub tenant: TenantName,
    pub request: WriteRequest,
    pub is_provider: bool,
    pub dry_run: bool,
    /// Holder whose share the waiting request counts against.
    pub holder: ShareHolder,
}

/// The result of a write request.
#[derive(Debug)]
pub struct ApplyOutcome {
    pub accepted: bool,
    pub generation: Generation,
    pub changes: Vec<api::Change>,
    /// Number of further changes that do not fit into the response.
    pub changes_left_out: u64,
    pub diagnostics: Vec<Diagnostic>,
}

/// Reason why a write request was not processed.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{holder} has too many changes in progress ({limit}: {}); fix: wait for their responses, then send the next", .reason.reason())]
    Busy {
        holder: ShareHolder,
        limit: &'static str,
        reason: ShareRefusal,
    },
    #[error(
        "the tenant's configuration changed while this change was being compiled; fix: send it again"
    )]
    Moved,
    #[error("the controller is stopping; fix: send it again")]
    Stopping,
}

/// All changes that wait or are being prepared.
pub struct PendingChanges {
    preparer: Arc<Preparer>,
    limits: Arc<TenantLimits>,
    basis: watch::Receiver<Arc<Basis>>,
    commits: mpsc::Sender<Commit>,
    turns: Arc<TurnQueue>,
    /// Queue of dry runs. It is separate, so that no change waits for a dry run, not even one of
    /// its own tenant.
    dry_runs: Arc<TurnQueue>,
    /// States of sources that were read and wait for their tenant's turn.
    states: Mutex<BTreeMap<(TenantName, PolicyOrigin), VecDeque<SourceState>>>,
    /// Tenants whose retry waits for its turn.
    again: Mutex<BTreeSet<TenantName>>,
}

impl PendingChanges {
    /// Creates the queues. At most `workers` changes, and as many dry runs, are prepared at the
    /// same time.
    pub fn new(
        preparer: Arc<Preparer>,
        basis: watch::Receiver<Arc<Basis>>,
        commits: mpsc::Sender<Commit>,
        workers: usize,
    ) -> Arc<Self> {
        Arc::new(Self {
            limits: preparer.limits.clone(),
            preparer,
            basis,
            commits,
            turns: TurnQueue::new(workers),
            dry_runs: TurnQueue::new(workers),
            states: Mutex::default(),
            again: Mutex::default(),
        })
    }

    /// Processes an operator's write request. If the caller stops waiting before the request's
    /// turn, the request leaves the queue; after that it is carried out.
    ///
    /// # Errors
    /// The holder's share is full, the store refused, the tenant's sources changed again and again,
    /// or the controller is stopping.
    pub async fn write(self: &Arc<Self>, write: QueuedWrite) -> Result<ApplyOutcome, WriteError> {
        let permits = self.permits(&write.holder, write.request.bytes())?;
        let queue = if write.dry_run {
            &self.dry_runs
        } else {
            &self.turns
        };
        let turn = queue.turn(&write.tenant, false).await;
        let changes = self.clone();
        // A separate task, because its thread cannot be stopped: the turn must not end before the
        // thread is done.
        let done = tokio::spawn(async move { changes.work(write, (turn, permits)).await });
        done.await.map_err(|_| WriteError::Stopping)?
    }

    /// Takes the permits for one waiting change and for its bytes.
    fn permits(&self, holder: &ShareHolder, bytes: u64) -> Result<[TenantPermit; 2], WriteError> {
        let take = |limit: &canal_runtime::TenantLimit, amount| {
            let busy = |reason| WriteError::Busy {
                holder: holder.clone(),
                limit: limit.kind().label(),
                reason,
            };
            limit.take(holder, amount).map_err(busy)
        };
        Ok([
            take(&self.limits.queued_changes, 1)?,
            take(&self.limits.queued_change_bytes, bytes)?,
        ])
    }

    /// Prepares and commits a write request, again if its basis became outdated.
    async fn work(
        &self,
        write: QueuedWrite,
        _held: (Turn, [TenantPermit; 2]),
    ) -> Result<ApplyOutcome, WriteError> {
        let QueuedWrite {
            tenant,
            request,
            is_provider,
            dry_run,
            ..
        } = write;
        let request = Arc::new(request);
        for _ in 0..ATTEMPTS_MAX {
            let (preparer, basis) = (self.preparer.clone(), self.basis.borrow().clone());
            let (name, attempt) = (tenant.clone(), request.clone());
            let work = move || {
                let prepared = preparer.write(&basis, &name, &attempt, is_provider, dry_run);
                prepared.map(|prepared| (prepared, basis.catalog.generation))
            };
            let (PreparedWrite { mut plan, commit }, seen) = tokio::task::spawn_blocking(work)
                .await
                .map_err(|_| WriteError::Stopping)??;
            // The request is refused, is a dry run, or changes nothing.
            let Some(commit) = commit else {
                return Ok(outcome(plan, seen));
            };
            match self.commit(commit).await? {
                Committed::Done(generation) => return Ok(outcome(plan, generation)),
                Committed::Refused(reasons) => {
                    plan.diagnostics.extend(reasons);
                    return Ok(outcome(plan, seen));
                }
                Committed::Moved => {}
            }
        }
        Err(WriteError::Moved)
    }

    async fn commit(&self, prepared: Prepared) -> Result<Committed, WriteError> {
        let (reply, answer) = oneshot::channel();
        self.commits
            .send(Commit { prepared, reply })
            .await
            .map_err(|_| WriteError::Stopping)?;
        Ok(answer.await.map_err(|_| WriteError::Stopping)??)
    }

    /// Queues the states that a source was read in; each tenant's changes are applied in its own
    /// turn.
    pub fn apply_update(self: &Arc<Self>, update: SourceUpdate) {
        for (name, state) in update.tenants {
            let key = (name.clone(), state.origin());
            let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
            let waiting = states.entry(key.clone()).or_default();
            let is_first = waiting.is_empty();
            if put(waiting, state) {
                self.preparer.metrics.refuse("files_waiting");
                tracing::warn!(tenant = %name, "sources: the files changed faster than they can be applied; an intermediate state was skipped");
            }
            // The task that already waits for the tenant's turn also applies this state.
            if !is_first {
                continue;
            }
            drop(states);
            let changes = self.clone();
            tokio::spawn(async move {
                // One turn applies all waiting states in order: removing an empty directory means
                // something else than removing a full one.
                let _turn = changes.turns.turn(&name, false).await;
                let waiting = changes
                    .states
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .remove(&key);
                for state in waiting.unwrap_or_default() {
                    changes.take(&name, SourceChange::State(state)).await;
                }
                changes.try_again(Some(&name));
            });
        }
    }

    /// Applies a key set, or the reason why there is none. It goes ahead of the tenant's other
    /// waiting changes.
    pub async fn take_key_set(
        self: &Arc<Self>,
        name: &TenantName,
        uri: String,
        set: Option<String>,
        fault: Option<String>,
    ) {
        let (changes, name) = (self.clone(), name.clone());
        let turn = self.turns.turn(&name, true).await;
        tokio::spawn(async move {
            changes
                .take(&name, SourceChange::KeySet { uri, set, fault })
                .await;
            drop(turn);
        });
    }

    /// Retries the changes that are not in force: those that the store refused, and those that
    /// conflicted with other tenants. `except` has just been tried.
    pub fn try_again(self: &Arc<Self>, except: Option<&TenantName>) {
        let unsettled = self.basis.borrow().unsettled.clone();
        for name in unsettled.into_iter().filter(|name| Some(name) != except) {
            if !self
                .again
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .insert(name.clone())
            {
                // A retry of the tenant already waits.
                continue;
            }
            let changes = self.clone();
            tokio::spawn(async move {
                let _turn = changes.turns.turn(&name, false).await;
                changes
                    .again
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .remove(&name);
                changes.take(&name, SourceChange::Again).await;
            });
        }
    }

    /// Prepares and commits a change of a tenant's sources. The caller has the tenant's turn.
    async fn take(&self, name: &TenantName, change: SourceChange) {
        let change = Arc::new(change);
        for _ in 0..ATTEMPTS_MAX {
            let (preparer, basis) = (self.preparer.clone(), self.basis.borrow().clone());
            let (tenant, attempt) = (name.clone(), change.clone());
            let prepared =
                tokio::task::spawn_blocking(move || preparer.sources(&basis, &tenant, &attempt))
                    .await;
            let Ok(Some(prepared)) = prepared else { return };
            match self.commit(prepared).await {
                Ok(Committed::Moved) => {}
                Ok(_) | Err(WriteError::Stopping) => return,
                Err(e) => {
                    tracing::error!(tenant = %name, error = %e, "sources: a change is not in force yet; retrying");
                    return;
                }
            }
        }
        self.preparer.metrics.refuse("change_attempts");
        tracing::error!(tenant = %name, from = change.from(), "sources: gave up a change, which is a bug in the controller; fix: report it, and touch the files");
    }
}

/// Adds a state of a source to the waiting ones. Returns true if there were too many and the oldest
/// was dropped. That loses nothing: each scan replaces all earlier ones, and a removed folder is
/// recorded once, beside its last content.
fn put(waiting: &mut VecDeque<SourceState>, state: SourceState) -> bool {
    if matches!(
        (waiting.back(), &state),
        (Some(SourceState::Gone { .. }), SourceState::Gone { .. })
    ) {
        return false;
    }
    waiting.push_back(state);
    let is_full = waiting.len() > STATES_WAITING_MAX;
    if is_full {
        waiting.pop_front();
    }
    is_full
}

fn outcome(plan: ApplyPlan, generation: Generation) -> ApplyOutcome {
    let accepted = !plan.is_refused();
    let (changes, changes_left_out) = plan.changes.into_parts();
    ApplyOutcome {
        accepted,
        generation,
        changes,
        changes_left_out,
        diagnostics: within_answer(plan.diagnostics),
    }
}

#[cfg(test)]
mod tests {
    use canal_access::SharedCapacities;
    use canal_controller_metrics::{ControllerMetrics, GaugeValues};
    use canal_model::share::Shares;

    use super::*;
    use crate::source::ReadContent;

    const REASONS: [&str; 2] = ["files_waiting", "change_attempts"];

    fn read() -> SourceState {
        SourceState::Read(Arc::new(ReadContent::new(
            PolicyOrigin::Files,
            Vec::new(),
            Vec::new(),
        )))
    }

    fn removed() -> SourceState {
        SourceState::Gone {
            origin: PolicyOrigin::Files,
            finding: crate::files::vanished(&"alpha".parse().unwrap()),
        }
    }

    fn capacities() -> SharedCapacities {
        SharedCapacities {
            queued_changes: 256,
            queued_change_bytes: 1 << 20,
            configuration_bytes: 1 << 20,
            compiled_bytes: 1 << 20,
            compiled_resources: 1 << 10,
            route_table_bytes: 1 << 20,
            connections: 1,
            unauthenticated: 1,
            certificates: 1,
            streams: 1,
            observations: 1,
            shares: Shares::default(),
        }
    }

    fn changes(
        dir: &std::path::Path,
    ) -> (
        Arc<PendingChanges>,
        mpsc::Receiver<Commit>,
        watch::Sender<Arc<Basis>>,
    ) {
        let store =
            Arc::new(canal_store::Store::open(dir, canal_store::StoreLimits::default()).unwrap());
        let limits = Arc::new(TenantLimits::new(&capacities()));
        let preparer = Arc::new(Preparer {
            store,
            metrics: Arc::new(ControllerMetrics::default()),
            limits,
            compilers: Default::default(),
        });
        let (commits, ready) = mpsc::channel(1);
        let (catalogs, basis) = watch::channel(Arc::default());
        (
            PendingChanges::new(preparer, basis, commits, 2),
            ready,
            catalogs,
        )
    }

    fn refused(changes: &PendingChanges) -> [bool; 2] {
        let text = changes.preparer.metrics.render(&GaugeValues::default());
        REASONS.map(|reason| {
            text.contains(&format!(
                "canal_controller_refused_total{{reason=\"{reason}\"}} 1\n"
            ))
        })
    }

    #[test]
    fn changes_beyond_the_share_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let (changes, _ready, _told) = changes(dir.path());
        let holder = ShareHolder::Tenant("alpha".parse().unwrap());
        let taken: Vec<_> = std::iter::from_fn(|| changes.permits(&holder, 1).ok())
            .take(256)
            .collect();
        assert!(
            (10..100).contains(&taken.len()),
            "a tenth of the whole: {}",
            taken.len()
        );
        let refused = changes
            .permits(&holder, 1)
            .expect_err("a refusal")
            .to_string();
        assert!(
            refused
                .contains("alpha has too many changes in progress (queued_changes: share); fix: "),
            "{refused}"
        );
        let other = ShareHolder::Tenant("beta".parse().unwrap());
        assert!(changes.permits(&other, 1).is_ok());
        drop(taken);
        assert!(changes.permits(&holder, 1).is_ok());
    }

    #[test]
    fn a_dry_run_needs_no_compiler_that_a_change_uses() {
        let dir = tempfile::tempdir().unwrap();
        let (changes, _ready, _told) = changes(dir.path());
        let (alpha, preparer) = ("alpha".parse().unwrap(), &changes.preparer);
        let file = api::File {
            path: "alpha.yaml".to_owned(),
            yaml: "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: alpha}\n\
                spec: {vni: 1, trustDomain: alpha.example, podCidrs: [10.1.0.0/16]}\n"
                .to_owned(),
        };
        let request = WriteRequest::Diff(vec![file]);
        let dry_run = || preparer.write(&Basis::default(), &alpha, &request, true, true);
        // A change of the tenant is being compiled meanwhile.
        let plan = preparer.compilers.with(&alpha, |_| dry_run()).unwrap().plan;
        assert!(!plan.is_refused(), "{:?}", plan.diagnostics);
    }

    #[test]
    fn the_last_content_of_a_folder_stays_when_it_vanishes() {
        let mut waiting = VecDeque::new();
        assert!(!put(&mut waiting, read()));
        assert!(
            (0..20).all(|_| !put(&mut waiting, removed())),
            "the tenant is removed once"
        );
        assert!(matches!(
            waiting.make_contiguous(),
            [SourceState::Read(_), SourceState::Gone { .. }]
        ));
        let skipped = (0..STATES_WAITING_MAX)
            .filter(|_| put(&mut waiting, read()))
            .count();
        assert_eq!((skipped, waiting.len()), (2, STATES_WAITING_MAX));
        assert!(put(&mut waiting, removed()));
        assert!(matches!(
            waiting.make_contiguous(),
            [.., SourceState::Read(_), SourceState::Gone { .. }]
        ));
    }

    #[tokio::test]
    async fn changes_of_ten_tenants_leave_the_queue_open_to_an_eleventh() {
        let dir = tempfile::tempdir().unwrap();
        let (changes, _ready, _told) = changes(dir.path());
        let holder = |n: usize| ShareHolder::Tenant(format!("t{n}").parse().unwrap());
        // A quarter for each, so that four shares are the whole.
        changes
            .limits
            .queued_changes
            .set_default_share(canal_model::share::Share::Percent(25));
        // Many small changes reach the limit of their number, large ones that of their bytes.
        // Twenty of these are a share of the bytes.
        for bytes in [1, 11_790] {
            let mut held = Vec::new();
            for n in 0..10 {
                held.extend(std::iter::from_fn(|| {
                    changes.permits(&holder(n), bytes).ok()
                }));
            }
            let refused = changes.permits(&holder(0), bytes).unwrap_err();
            assert!(matches!(refused, WriteError::Busy { .. }), "{refused}");
            changes.permits(&holder(10), 1_000).unwrap();
        }
    }

    #[tokio::test]
    async fn a_skipped_state_of_files_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let (changes, _ready, _told) = changes(dir.path());
        let name: TenantName = "alpha".parse().unwrap();
        let _turn = changes.turns.turn(&name, false).await;
        for _ in 0..=STATES_WAITING_MAX {
            assert_eq!(refused(&changes), [false; 2]);
            changes.apply_update(SourceUpdate {
                tenants: vec![(name.clone(), read())],
                ..SourceUpdate::nothing(PolicyOrigin::Files)
            });
        }
        assert_eq!(refused(&changes), [true, false]);
        assert_eq!(
            changes.states.lock().unwrap()[&(name, PolicyOrigin::Files)].len(),
            STATES_WAITING_MAX
        );
    }

    #[tokio::test]
    async fn a_change_of_the_sources_that_is_given_up_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let (changes, mut ready, _told) = changes(dir.path());
        let busy = tokio::spawn(async move {
            let mut tried = 0;
            while let Some(commit) = ready.recv().await {
                tried += 1;
                let _ = commit.reply.send(Ok(Committed::Moved));
            }
            tried
        });
        changes
            .take(&"alpha".parse().unwrap(), SourceChange::State(read()))
            .await;
        assert_eq!(refused(&changes), [false, true]);
        drop(changes);
        assert_eq!(busy.await.unwrap(), ATTEMPTS_MAX);
    }
}
