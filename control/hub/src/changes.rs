//! The way of a change to the writer: on its tenant's account, in its tenant's turn, prepared on a thread of its own. What it comes to is
//! `prepare`'s; what comes into force, and when, is `writer`'s. A dry run takes the same way and never reaches the writer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use canal_model::diagnostic::Diagnostic;
use canal_model::ids::{Generation, TenantName};
use canal_runtime::{ShareHolder, ShareRefusal, TenantPermit};
use canal_store::StoreError;
use canal_wire::api;
use tokio::sync::{mpsc, oneshot, watch};

use crate::apply::{Plan, Wish};
use crate::files::{Found, Reading};
use crate::metrics;
use crate::prepare::{Basis, Prepared, PreparedWish, Preparer, SourceChange};
use crate::shares::TenantLimits;
use crate::turns::{Turn, TurnQueue};
use crate::writer::{Commit, Committed};

/// A change that was prepared so often against what did not hold any more is given up. With one change of a tenant at a time that does not
/// happen; without a bound it could go on for ever.
const ATTEMPTS_MAX: usize = 8;
/// States of one tenant's files that may wait; of more, the oldest go. Two at least, so that what a folder said last stays beside the word
/// that it is gone.
const FILES_WAITING_MAX: usize = 8;

/// An operator's wish.
pub(crate) struct WishRequest {
    pub(crate) tenant: TenantName,
    pub(crate) wish: Wish,
    pub(crate) is_provider: bool,
    pub(crate) dry_run: bool,
    /// On whose account it waits.
    pub(crate) holder: ShareHolder,
}

/// What came of a wish.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) accepted: bool,
    pub(crate) generation: Generation,
    pub(crate) changes: Vec<api::Change>,
    pub(crate) diagnostics: Vec<Diagnostic>,
}

/// Why nothing came of a wish.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WishError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{holder} has too many changes under way ({limit}: {}); fix: wait for their responses, then send the next", .reason.reason())]
    Busy { holder: ShareHolder, limit: &'static str, reason: ShareRefusal },
    #[error("the tenant's configuration changed while this change was worked on; fix: send it again")]
    Moved,
    #[error("the controller is stopping; fix: send it again")]
    Stopping,
}

/// All changes that wait or are worked on.
pub(crate) struct Changes {
    preparer: Arc<Preparer>,
    limits: Arc<TenantLimits>,
    basis: watch::Receiver<Arc<Basis>>,
    commits: mpsc::Sender<Commit>,
    turns: Arc<TurnQueue>,
    /// Apart, so that no change waits for a dry run, be it of its own tenant.
    dry_runs: Arc<TurnQueue>,
    /// Files that were read and wait for their tenant's turn.
    files: Mutex<BTreeMap<TenantName, VecDeque<Found>>>,
    /// Tenants that wait to be tried again.
    again: Mutex<BTreeSet<TenantName>>,
}

impl Changes {
    /// `workers`: so many changes are prepared at once, and as many dry runs.
    pub(crate) fn new(
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
            files: Mutex::default(),
            again: Mutex::default(),
        })
    }

    /// Works on an operator's wish. Whoever stops waiting before its turn gives its place back; after that it is carried out.
    pub(crate) async fn wish(self: &Arc<Self>, request: WishRequest) -> Result<Outcome, WishError> {
        let permits = self.permits(&request.holder, request.wish.bytes())?;
        let queue = if request.dry_run { &self.dry_runs } else { &self.turns };
        let turn = queue.turn(&request.tenant, false).await;
        let changes = self.clone();
        // A task of its own, since its thread cannot be stopped: the turn must not be over before the thread is done.
        let done = tokio::spawn(async move { changes.work(request, (turn, permits)).await });
        done.await.map_err(|_| WishError::Stopping)?
    }

    fn permits(&self, holder: &ShareHolder, bytes: u64) -> Result<[TenantPermit; 2], WishError> {
        let take = |limit: &canal_runtime::TenantLimit, amount| {
            let busy = |reason| WishError::Busy { holder: holder.clone(), limit: limit.kind().label(), reason };
            limit.take(holder, amount).map_err(busy)
        };
        Ok([take(&self.limits.queued_changes, 1)?, take(&self.limits.queued_change_bytes, bytes)?])
    }

    async fn work(&self, request: WishRequest, _held: (Turn, [TenantPermit; 2])) -> Result<Outcome, WishError> {
        let WishRequest { tenant, wish, is_provider, dry_run, .. } = request;
        for _ in 0..ATTEMPTS_MAX {
            let (preparer, basis) = (self.preparer.clone(), self.basis.borrow().clone());
            let (name, attempt) = (tenant.clone(), wish.clone());
            let work = move || {
                let prepared = preparer.wish(&basis, &name, attempt, is_provider, dry_run);
                prepared.map(|prepared| (prepared, basis.catalog.generation))
            };
            let (PreparedWish { mut plan, commit }, seen) = tokio::task::spawn_blocking(work).await.map_err(|_| WishError::Stopping)??;
            let Some(commit) = commit else { return Ok(outcome(plan, seen)) };
            match self.commit(commit).await? {
                Committed::Done(generation) => return Ok(outcome(plan, generation)),
                Committed::Refused(reasons) => {
                    plan.diagnostics.extend(reasons);
                    return Ok(outcome(plan, seen));
                }
                Committed::Moved => {}
            }
        }
        Err(WishError::Moved)
    }

    async fn commit(&self, prepared: Prepared) -> Result<Committed, WishError> {
        let (reply, answer) = oneshot::channel();
        self.commits.send(Commit { prepared, reply }).await.map_err(|_| WishError::Stopping)?;
        Ok(answer.await.map_err(|_| WishError::Stopping)??)
    }

    /// Takes over what changed in the files, each tenant in its own turn.
    pub(crate) fn take_reading(self: &Arc<Self>, reading: Reading) {
        for (name, found) in reading.tenants {
            let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
            let waiting = files.entry(name.clone()).or_default();
            let is_first = waiting.is_empty();
            if put(waiting, found) {
                self.preparer.metrics.count(metrics::REFUSED, &[("reason", "files_waiting")]);
                tracing::warn!(tenant = %name, "the files changed faster than they can be taken over: a state between was skipped");
            }
            if !is_first {
                continue;
            }
            drop(files);
            let changes = self.clone();
            tokio::spawn(async move {
                // One turn for all that came meanwhile, in order: an empty folder that is taken away means something else than a full one.
                let _turn = changes.turns.turn(&name, false).await;
                let waiting = changes.files.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
                for found in waiting.unwrap_or_default() {
                    changes.take(&name, SourceChange::Files(found)).await;
                }
                changes.try_again(Some(&name));
            });
        }
    }

    /// Takes over a key set, or why there is none. It passes the tenant's other changes.
    pub(crate) async fn take_key_set(self: &Arc<Self>, name: &TenantName, uri: String, set: Option<String>, fault: Option<String>) {
        let (changes, name) = (self.clone(), name.clone());
        let turn = self.turns.turn(&name, true).await;
        tokio::spawn(async move {
            changes.take(&name, SourceChange::KeySet { uri, set, fault }).await;
            drop(turn);
        });
    }

    /// Tries again what is not in force: what the store refused, and what clashed with others. `except` was tried just now.
    pub(crate) fn try_again(self: &Arc<Self>, except: Option<&TenantName>) {
        let unsettled = self.basis.borrow().unsettled.clone();
        for name in unsettled.into_iter().filter(|name| Some(name) != except) {
            if !self.again.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone()) {
                continue;
            }
            let changes = self.clone();
            tokio::spawn(async move {
                let _turn = changes.turns.turn(&name, false).await;
                changes.again.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
                changes.take(&name, SourceChange::Again).await;
            });
        }
    }

    /// Works on a change of a tenant's sources; the caller has the tenant's turn.
    async fn take(&self, name: &TenantName, change: SourceChange) {
        let change = Arc::new(change);
        for _ in 0..ATTEMPTS_MAX {
            let (preparer, basis) = (self.preparer.clone(), self.basis.borrow().clone());
            let (tenant, attempt) = (name.clone(), change.clone());
            let prepared = tokio::task::spawn_blocking(move || preparer.sources(&basis, &tenant, &attempt)).await;
            let Ok(Some(prepared)) = prepared else { return };
            match self.commit(prepared).await {
                Ok(Committed::Moved) => {}
                Ok(_) | Err(WishError::Stopping) => return,
                Err(e) => {
                    tracing::error!(tenant = %name, error = %e, "a change of the sources is not in force yet; it is tried again");
                    return;
                }
            }
        }
        self.preparer.metrics.count(metrics::REFUSED, &[("reason", "change_attempts")]);
        tracing::error!(tenant = %name, from = change.from(), "a change of the sources was given up; fix: report it, and touch the files");
    }
}

/// Adds a state of the files to those that wait. True: there were too many, and the oldest went. It says nothing that a later one does not:
/// files that were read replace all that was read before, and that a folder is gone is kept once, beside what it said last.
fn put(waiting: &mut VecDeque<Found>, found: Found) -> bool {
    if matches!((waiting.back(), &found), (Some(Found::Gone), Found::Gone)) {
        return false;
    }
    waiting.push_back(found);
    let is_full = waiting.len() > FILES_WAITING_MAX;
    if is_full {
        waiting.pop_front();
    }
    is_full
}

fn outcome(plan: Plan, generation: Generation) -> Outcome {
    let accepted = !plan.is_refused();
    Outcome { accepted, generation, changes: plan.changes, diagnostics: plan.diagnostics }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::Limits;
    use crate::metrics::Metrics;
    use crate::tenant::Files;

    const REASONS: [&str; 2] = ["files_waiting", "change_attempts"];

    fn read() -> Found {
        Found::Read(Arc::new(Files::new(Vec::new(), Vec::new())))
    }

    fn changes(dir: &std::path::Path) -> (Arc<Changes>, mpsc::Receiver<Commit>, watch::Sender<Arc<Basis>>) {
        let store = Arc::new(canal_store::Store::open(dir, canal_store::Limits::default()).unwrap());
        let limits = Arc::new(TenantLimits::new(&Limits::default()));
        let preparer = Arc::new(Preparer { store, metrics: Arc::new(Metrics::default()), limits });
        let (commits, ready) = mpsc::channel(1);
        let (told, basis) = watch::channel(Arc::default());
        (Changes::new(preparer, basis, commits, 2), ready, told)
    }

    fn refused(changes: &Changes) -> [bool; 2] {
        let text = changes.preparer.metrics.render(&crate::metrics::Gauges::default());
        REASONS.map(|reason| text.contains(&format!("canal_controller_refused_total{{reason=\"{reason}\"}} 1\n")))
    }

    #[test]
    fn the_last_word_of_a_folder_stays_beside_that_it_is_gone() {
        let mut waiting = VecDeque::new();
        assert!(!put(&mut waiting, read()));
        assert!((0..20).all(|_| !put(&mut waiting, Found::Gone)), "it is gone once");
        assert!(matches!(waiting.make_contiguous(), [Found::Read(_), Found::Gone]));
        let skipped = (0..FILES_WAITING_MAX).filter(|_| put(&mut waiting, read())).count();
        assert_eq!((skipped, waiting.len()), (2, FILES_WAITING_MAX));
        assert!(put(&mut waiting, Found::Gone));
        assert!(matches!(waiting.make_contiguous(), [.., Found::Read(_), Found::Gone]));
    }

    #[tokio::test]
    async fn a_skipped_state_of_files_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let (changes, _ready, _told) = changes(dir.path());
        let name: TenantName = "alpha".parse().unwrap();
        let _turn = changes.turns.turn(&name, false).await;
        for _ in 0..=FILES_WAITING_MAX {
            assert_eq!(refused(&changes), [false; 2]);
            changes.take_reading(Reading { tenants: vec![(name.clone(), read())], ..Reading::default() });
        }
        assert_eq!(refused(&changes), [true, false]);
        assert_eq!(changes.files.lock().unwrap()[&name].len(), FILES_WAITING_MAX);
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
        changes.take(&"alpha".parse().unwrap(), SourceChange::Files(read())).await;
        assert_eq!(refused(&changes), [false, true]);
        drop(changes);
        assert_eq!(busy.await.unwrap(), ATTEMPTS_MAX);
    }
}
