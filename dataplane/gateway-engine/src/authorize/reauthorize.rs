//! Reauthorizes open work when policies change: streams, upgraded connections, and relays.
//!
//! Denied work is ended and counted. External authorizers are not called a second time. Start with
//! [`OngoingAuthorization`].

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use canal_authorization::PolicyDestination;
use canal_gateway_config::jwt;
use canal_gateway_config::{DestinationPolicy, RequestMutations};
use canal_gateway_http::head::{FullRequest, ValidatedHttp2Request};
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_http::routing_views::ChangedRequest;
use canal_model::program::AppProtocol;

use super::{
    AuthorizationInterrupt, AuthorizationState, DestinationPolicies, ExtAuthzGrant, connection,
};
use crate::destination::ResolvedDestination;
use crate::endpoints::SelectedEndpoint;
use crate::session::ClientSession;
use crate::worker::Worker;

/// Interval at which a worker checks for newer policies when no request does. A check compares one
/// number while nothing changed. Denied work ends at most as much later.
const REAUTHORIZE_INTERVAL: Duration = Duration::from_millis(100);

/// Notifies open work of changed policies and drops the state of deleted tenants. Runs for as long
/// as the worker lives.
pub(crate) async fn watch(worker: Weak<Worker>) {
    let mut seen = 0;
    loop {
        tokio::time::sleep(REAUTHORIZE_INTERVAL).await;
        let Some(worker) = worker.upgrade() else {
            return;
        };
        let newest = worker.shared.publisher.sequence();
        if newest != seen {
            seen = newest;
            notify_changed(&worker);
        }
        worker
            .accounts
            .forget_gone(&worker.snapshot(), |number| worker.tokens.forget(number));
    }
}

fn notify_changed(worker: &Worker) {
    worker
        .accounts
        .update(&worker.snapshot(), &worker.limits, |account| {
            worker.clock.wake(account.number);
            account.changed.notify_waiters();
        });
}

/// Admitted work that is still open, with the data to authorize it again.
pub(crate) struct OngoingAuthorization<'a> {
    session: &'a Rc<ClientSession>,
    chosen: &'a SelectedEndpoint,
    /// Version of the policies that authorized it last.
    version: Cell<u64>,
    /// Copy of an HTTP/1.1 request's head, where the body overwrites the head in the inbox.
    pub(crate) head_copy: Option<&'a [u8]>,
    checked: Option<&'a ValidatedHttp2Request>,
    /// Changes that filters of the listener made, which are not asked again.
    changes: Option<&'a RequestMutations>,
    /// Set while signatures must be verified before the next authorization.
    verifying: RefCell<Option<Rc<Verifying>>>,
}

/// Signature verifications of one open request.
#[derive(Debug, Default)]
struct Verifying {
    work: jwt::VerificationBudget,
    /// True when a verification has finished and the request must be authorized again.
    is_due: Cell<bool>,
}

/// Policies of the newest snapshot.
struct CurrentPolicies {
    endpoint: Option<Arc<DestinationPolicy>>,
    resolved: Option<Rc<ResolvedDestination>>,
}

impl<'a> OngoingAuthorization<'a> {
    /// Wraps work that was authorized by the policies of `version`.
    pub(crate) fn new(
        session: &'a Rc<ClientSession>,
        chosen: &'a SelectedEndpoint,
        version: u64,
        head: Option<&'a [u8]>,
        checked: Option<&'a ValidatedHttp2Request>,
    ) -> Self {
        Self {
            session,
            chosen,
            version: Cell::new(version),
            head_copy: head,
            checked,
            changes: None,
            verifying: RefCell::new(None),
        }
    }

    /// Authorizes the request with changes of the listener's filters.
    pub(crate) fn with_changes(self, changes: Option<&'a RequestMutations>) -> Self {
        Self { changes, ..self }
    }

    /// Wraps work whose owner watches for policy changes itself and requests each reauthorization.
    pub(crate) fn without_request(
        session: &'a Rc<ClientSession>,
        chosen: &'a SelectedEndpoint,
    ) -> Self {
        Self::new(session, chosen, 0, None, None)
    }

    /// Returns the number that identifies the client's tenant in this process.
    pub(crate) fn tenant(&self) -> u32 {
        self.session.account.number
    }

    pub(crate) fn session(&self) -> &'a ClientSession {
        self.session
    }

    /// Protocol that the endpoint's service declares.
    pub(crate) fn protocol(&self) -> AppProtocol {
        self.chosen.view.set.protocol
    }

    /// True once per change: the policies changed since the last authorization, or a signature
    /// verification for it has finished.
    #[inline]
    pub(crate) fn is_outdated(&self) -> bool {
        let newest = self.session.account.policy_version.get();
        self.version.replace(newest) != newest
            || self
                .verifying
                .borrow()
                .as_ref()
                .is_some_and(|verifying| verifying.is_due.take())
    }

    /// Verifies a signature in a separate task, then wakes `waker`;
    /// [`OngoingAuthorization::is_outdated`] is true from then on.
    pub(crate) fn verify(&self, worker: &Rc<Worker>, todo: jwt::PendingVerification, waker: Waker) {
        let verifying = self.verifying.borrow_mut().get_or_insert_default().clone();
        let (worker, session) = (worker.clone(), self.session.clone());
        tokio::task::spawn_local(async move {
            super::verify(&worker, &session.account, &verifying.work, todo).await;
            verifying.is_due.set(true);
            waker.wake();
        });
    }

    fn newest(&self, worker: &Worker) -> Result<CurrentPolicies, ProxyError> {
        let resolved = self
            .session
            .resolve(worker)
            .ok()
            .map(|(_, resolved)| resolved);
        let snapshot = worker.snapshot();
        let tenant = snapshot
            .tenant(self.session.account.tenant.as_str())
            .ok_or(ProxyError::NoService)?;
        if tenant.closed {
            return Err(ProxyError::TenantClosed);
        }
        // A federated client loses its open work when the federation ends.
        if self.session.principal.foreign && !self.session.principal.is_federated(tenant) {
            return Err(ProxyError::NoService);
        }
        // The workload's labels may have changed, so its policies are resolved again.
        let endpoint = self.chosen.endpoint();
        let newer = tenant
            .workload_at(endpoint.address.ip())
            .filter(|workload| workload.uid == endpoint.workload.uid);
        let workload = newer.unwrap_or(&endpoint.workload);
        let service = self
            .chosen
            .view
            .set
            .service
            .as_ref()
            .map(|names| &names.key);
        let place =
            PolicyDestination::workload(&workload.namespace, &workload.labels).serving(service);
        Ok(CurrentPolicies {
            endpoint: tenant.policies.guard(&place),
            resolved,
        })
    }

    fn run_with_current_policies(
        &self,
        worker: &Worker,
        authorize: impl FnOnce(
            &DestinationPolicies<'_>,
            SocketAddr,
        ) -> Result<(), AuthorizationInterrupt>,
    ) -> Result<(), AuthorizationInterrupt> {
        let decision = self
            .newest(worker)
            .map_err(AuthorizationInterrupt::Fault)
            .and_then(|newest| {
                let resolved = newest.resolved.as_ref();
                let guards = DestinationPolicies {
                    endpoint: newest.endpoint.as_deref(),
                    dialled: resolved.and_then(|it| it.guard_beside(&self.chosen.view)),
                    trusted_proxies: resolved.map_or(0, |it| it.trusted_proxies()),
                };
                if guards.is_empty() && !self.session.principal.foreign {
                    return Ok(());
                }
                authorize(&guards, self.chosen.address)
            });
        match &decision {
            Ok(()) => worker.counts.reauthorized("allowed"),
            Err(AuthorizationInterrupt::Fault(_)) => worker.counts.reauthorized("denied"),
            Err(AuthorizationInterrupt::Verify(_)) => {}
        }
        decision
    }

    /// Authorizes a request again by the current policies.
    pub(crate) fn reauthorize<R: FullRequest>(
        &self,
        worker: &Worker,
        request: (&R, &[u8]),
    ) -> Result<(), AuthorizationInterrupt> {
        self.run_with_current_policies(worker, |guards, to| {
            let mut trial = AuthorizationState {
                consent: ExtAuthzGrant::Standing,
                changes: self.changes.cloned().unwrap_or_default(),
                ..AuthorizationState::default()
            };
            let guards_and_paths = (guards, self.chosen.view.set.policy_paths);
            let account = &self.session.account;
            match self.changes {
                None => trial.prepare(worker, account, guards_and_paths, request.0),
                Some(changes) => {
                    let request = request.0;
                    let request = ChangedRequest { request, changes };
                    trial.prepare(worker, account, guards_and_paths, &request)
                }
            }?;
            Ok(trial
                .decide(worker, self.session, guards, Some(to), request, None)
                .map(drop)?)
        })
    }

    /// Authorizes an HTTP/2 request again, or only its connection if its head is not available.
    pub(crate) fn reauthorize_http2(&self, worker: &Worker) -> Result<(), AuthorizationInterrupt> {
        match self.checked {
            Some(checked) => self.reauthorize(worker, (&checked, checked.authority.as_bytes())),
            None => self.reauthorize_connection(worker),
        }
    }

    /// Authorizes again with the attributes of the connection only.
    pub(crate) fn reauthorize_connection(
        &self,
        worker: &Worker,
    ) -> Result<(), AuthorizationInterrupt> {
        self.run_with_current_policies(worker, |guards, to| {
            Ok(connection(
                worker,
                self.session,
                guards,
                to,
                &ExtAuthzGrant::Standing,
                None,
            )
            .map(drop)?)
        })
    }
}
