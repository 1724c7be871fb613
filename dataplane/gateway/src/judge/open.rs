//! Judges again what is open when policies change: streams, upgraded connections, relays. What is denied then ends, and is counted. Authorizers
//! are not asked a second time.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use canal_guard::Place;
use canal_model::program::AppProtocol;

use super::{Consent, Guards, JudgingError, Trial, connection};
use crate::destination::Resolved;
use crate::endpoints::Chosen;
use crate::fault::Fault;
use crate::head::{Checked, Whole};
use crate::session::Session;
use crate::snapshot::Guard;
use crate::token;
use crate::worker::Worker;

/// How often a worker looks for newer policies when no request tells it.
const TURN: Duration = Duration::from_millis(100);

/// Tells what is open of changed policies, and lets go of tenants that are gone, for as long as the worker lives.
pub(crate) async fn watch(worker: Weak<Worker>) {
    let mut seen = 0;
    loop {
        tokio::time::sleep(TURN).await;
        let Some(worker) = worker.upgrade() else { return };
        let newest = worker.shared.publisher.sequence();
        if newest != seen {
            seen = newest;
            tell(&worker);
        }
        worker.accounts.forget_gone(&worker.snapshot(), |number| worker.tokens.forget(number));
    }
}

fn tell(worker: &Worker) {
    worker.accounts.update(&worker.snapshot(), &worker.limits, |account| {
        worker.clock.wake(account.number);
        account.changed.notify_waiters();
    });
}

/// Something that was allowed and is open.
pub(crate) struct Open<'a> {
    session: &'a Rc<Session>,
    chosen: &'a Chosen,
    /// The policies' version that it was judged by.
    version: Cell<u64>,
    /// The head of an HTTP/1.1 request whose place is needed for its body.
    pub(crate) kept: Option<&'a [u8]>,
    checked: Option<&'a Checked>,
    /// Set while signatures have to be verified before it can be judged again.
    verifying: RefCell<Option<Rc<Verifying>>>,
}

/// The verifications of one open request.
#[derive(Debug, Default)]
struct Verifying {
    work: token::VerificationBudget,
    /// One is done: it is to be judged again.
    done: Cell<bool>,
}

/// Guards as they are now.
struct Newest {
    endpoint: Option<Arc<Guard>>,
    resolved: Option<Rc<Resolved>>,
}

impl<'a> Open<'a> {
    /// Judged by the policies of that `version`.
    pub(crate) fn new(
        session: &'a Rc<Session>,
        chosen: &'a Chosen,
        version: u64,
        kept: Option<&'a [u8]>,
        checked: Option<&'a Checked>,
    ) -> Self {
        Self { session, chosen, version: Cell::new(version), kept, checked, verifying: RefCell::new(None) }
    }

    /// One whose owner watches for changes itself, and has it judged at each.
    pub(crate) fn unseen(session: &'a Rc<Session>, chosen: &'a Chosen) -> Self {
        Self::new(session, chosen, 0, None, None)
    }

    /// The tenant's number.
    pub(crate) fn tenant(&self) -> u32 {
        self.session.account.number
    }

    pub(crate) fn session(&self) -> &'a Session {
        self.session
    }

    /// The protocol that the endpoint's service declares.
    pub(crate) fn protocol(&self) -> AppProtocol {
        self.chosen.view.set.protocol
    }

    /// Policies have changed since it was judged last, or a signature was verified for that; true once per change.
    #[inline]
    pub(crate) fn is_outdated(&self) -> bool {
        let newest = self.session.account.policy_version.get();
        self.version.replace(newest) != newest || self.verifying.borrow().as_ref().is_some_and(|verifying| verifying.done.take())
    }

    /// Has a signature verified beside what is open; then [`Open::is_outdated`] and `waker` is woken.
    pub(crate) fn verify(&self, worker: &Rc<Worker>, todo: token::PendingVerification, waker: Waker) {
        let verifying = self.verifying.borrow_mut().get_or_insert_default().clone();
        let (worker, session) = (worker.clone(), self.session.clone());
        tokio::task::spawn_local(async move {
            super::verify(&worker, &session.account, &verifying.work, todo).await;
            verifying.done.set(true);
            waker.wake();
        });
    }

    fn newest(&self, worker: &Worker) -> Result<Newest, Fault> {
        let resolved = self.session.resolve(worker).ok().map(|(_, resolved)| resolved);
        let snapshot = worker.snapshot();
        let tenant = snapshot.tenant(self.session.account.tenant.as_str()).ok_or(Fault::NoService)?;
        if tenant.closed {
            return Err(Fault::TenantClosed);
        }
        if self.session.who.foreign && !self.session.who.is_federated(tenant) {
            return Err(Fault::NoService);
        }
        let endpoint = self.chosen.endpoint();
        let newer = tenant.workload_at(endpoint.address.ip()).filter(|workload| workload.uid == endpoint.workload.uid);
        let workload = newer.unwrap_or(&endpoint.workload);
        let service = self.chosen.view.set.service.as_ref().map(|names| &names.key);
        let place = Place::workload(&workload.namespace, &workload.labels).serving(service);
        Ok(Newest { endpoint: tenant.policies.guard(&place), resolved })
    }

    fn again(&self, worker: &Worker, judge: impl FnOnce(&Guards<'_>, SocketAddr) -> Result<(), JudgingError>) -> Result<(), JudgingError> {
        let judged = self.newest(worker).map_err(JudgingError::Fault).and_then(|newest| {
            let dialled = newest.resolved.as_ref().and_then(|resolved| resolved.guard_beside(&self.chosen.view));
            let guards = Guards { endpoint: newest.endpoint.as_deref(), dialled };
            if guards.is_empty() && !self.session.who.foreign {
                return Ok(());
            }
            judge(&guards, self.chosen.endpoint().address)
        });
        match &judged {
            Ok(()) => worker.counts.rejudged("allowed"),
            Err(JudgingError::Fault(_)) => worker.counts.rejudged("denied"),
            Err(JudgingError::Verify(_)) => {}
        }
        judged
    }

    /// Judges a request.
    pub(crate) fn judge<R: Whole>(&self, worker: &Worker, request: (&R, &[u8])) -> Result<(), JudgingError> {
        self.again(worker, |guards, to| {
            let mut trial = Trial { consent: Consent::Standing, ..Trial::default() };
            trial.prepare(worker, &self.session.account, guards, request.0)?;
            Ok(trial.decide(worker, self.session, guards, to, request, None).map(drop)?)
        })
    }

    /// Judges an HTTP/2 request.
    pub(crate) fn judge_checked(&self, worker: &Worker) -> Result<(), JudgingError> {
        match self.checked {
            Some(checked) => self.judge(worker, (checked, checked.authority.as_bytes())),
            None => self.judge_unseen(worker),
        }
    }

    /// Judges what shows only its connection.
    pub(crate) fn judge_unseen(&self, worker: &Worker) -> Result<(), JudgingError> {
        self.again(worker, |guards, to| Ok(connection(worker, self.session, guards, to, &Consent::Standing, None).map(drop)?))
    }
}
