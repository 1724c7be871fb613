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
use crate::prepare::{Basis, Prepared, PreparedWish, Preparer, SourceChange};
use crate::shares::TenantLimits;
use crate::turns::{Turn, TurnQueue};
use crate::writer::{Commit, Committed};

/// A change that was prepared so often against what did not hold any more is given up. With one change of a tenant at a time that does not
/// happen; without a bound it could go on for ever.
const ATTEMPTS_MAX: usize = 8;
/// States of one tenant's files that may wait; of more, the oldest go.
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
            if waiting.len() >= FILES_WAITING_MAX {
                waiting.pop_front();
            }
            waiting.push_back(found);
            if waiting.len() > 1 {
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
        tracing::error!(tenant = %name, from = change.from(), "a change of the sources was given up; fix: report it, and touch the files");
    }
}

fn outcome(plan: Plan, generation: Generation) -> Outcome {
    let accepted = !plan.is_refused();
    Outcome { accepted, generation, changes: plan.changes, diagnostics: plan.diagnostics }
}
