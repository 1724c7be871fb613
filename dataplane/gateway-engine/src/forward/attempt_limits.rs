//! The timeouts and retries that a rule asks for, as one request uses them: its deadlines, the
//! retries that are left, and what a retry holds of shared limits.
//!
//! What a policy means is in `canal_gateway_http::retry_policy`; the loop over the attempts is in
//! `pipeline`. A request whose rule asks for nothing has none of this. Start with
//! [`AttemptLimits`].

use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use canal_gateway_http::head::RequestInfo;
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_http::retry_policy::{self, AttemptOutcome};
use canal_gateway_io::body::BodyPump;
use canal_gateway_io::clock::TimeoutKind;
use canal_gateway_limits::body_budget::BodyPermit;
use canal_gateway_limits::retry_budget::{RetryBudget, RetryPermit};
use canal_h1::Framing;
use canal_model::program::RouteRule;
use canal_model::route_attempts::{RetryPolicy, RouteTimeouts, TimeoutSpan};
use tokio::time::{Instant, Sleep};

use crate::authorize::buffered_body::BufferedBody;
use crate::pipeline::PolicyRetry;
use crate::route::RoutedRequest;
use crate::session::ClientSession;
use crate::worker::Worker;

/// Most bytes of a request's body that are kept for retries. A request with a longer body is not
/// sent again once they have passed. HBONE streams keep as much of what was not delivered
/// (`REPLAY_BYTES_MAX`). With both copies, 2,048 such requests fit into the 256 MiB of a process
/// (`GatewayLimits::body_bytes`).
pub(crate) const RETRY_BODY_BYTES_MAX: usize = 64 << 10;
/// Copies of each kept byte: the kept one, and the one that a retry sends.
pub(crate) const COPIES: u64 = 2;

/// Timeouts and retries of one request.
pub(crate) struct AttemptLimits {
    rule: Arc<RouteRule>,
    deadlines: AttemptDeadlines,
    budget: Rc<RetryBudget>,
    /// True if the request has no body.
    is_bodyless: bool,
    /// Number of retries so far.
    retries: u32,
    /// The retry that was granted and whose attempt has not begun: the time before it.
    granted: Option<Duration>,
    /// The present retry's part of the budget.
    permit: Option<RetryPermit>,
    /// The kept body's part of the worker's limit.
    body: Option<BodyPermit>,
    /// Beginning of the body that authorizers saw: those of another endpoint may need it.
    pub(crate) buffered: Option<BufferedBody>,
}

impl AttemptLimits {
    /// Returns the limits of a request whose rule asks for them.
    pub(crate) fn of(routed: &RoutedRequest, is_bodyless: bool) -> Option<Box<Self>> {
        if !routed.filters.limits_attempts() {
            return None;
        }
        let rule = routed.matched.as_ref()?.rule();
        let timeouts = rule.attempts.as_deref()?.timeouts;
        Some(Box::new(Self {
            rule: rule.clone(),
            deadlines: AttemptDeadlines::begin(timeouts),
            budget: routed.view.budget.clone(),
            is_bodyless,
            retries: 0,
            granted: None,
            permit: None,
            body: None,
            buffered: None,
        }))
    }

    fn policy(&self) -> Option<&RetryPolicy> {
        self.rule.attempts.as_deref()?.retries.as_ref()
    }

    /// True if a retry is possible, so that the body should be kept.
    pub(crate) fn wants_body(&self, request: &RequestInfo) -> bool {
        // A body that will not fit is not copied in vain.
        let is_short = match request.framing {
            Framing::Length(length) => length <= RETRY_BODY_BYTES_MAX as u64,
            _ => true,
        };
        is_short
            && self
                .policy()
                .is_some_and(|policy| policy.max > self.retries)
    }

    /// Counts the kept body against the tenant's share of buffered bodies. Without room for it the
    /// body is not kept.
    pub(crate) fn cover_body(
        &mut self,
        worker: &Worker,
        session: &ClientSession,
        body: &mut BodyPump,
    ) {
        let bytes = match body.replay_bytes() {
            Some(bytes) if bytes > 0 => bytes as u64 * COPIES,
            _ => return,
        };
        let covered = match &mut self.body {
            Some(permit) => permit.cover(bytes),
            None => {
                let account = &session.account;
                let permit = worker
                    .bodies
                    .take(account.number, account.body_bytes_max(), bytes);
                permit.map(|permit| self.body = Some(permit))
            }
        };
        if let Err(error) = covered {
            worker.counts.retry_refused(error.name());
            body.forget_replay();
            self.body = None;
        }
    }

    /// Releases what the request holds of shared limits, once it cannot be sent again.
    pub(crate) fn release(&mut self) {
        self.body = None;
        self.buffered = None;
        self.permit = None;
    }

    /// Decides whether the request is sent again after this outcome, and counts the retry or why
    /// there is none. `is_kept`: the body, as far as it was read, can be sent again.
    pub(crate) fn grant_retry(
        &mut self,
        worker: &Worker,
        outcome: AttemptOutcome<'_>,
        is_kept: bool,
    ) -> bool {
        let Some(policy) = self.policy() else {
            return false;
        };
        if policy.max == 0 || !retry_policy::wants_retry(policy, outcome) {
            return false;
        }
        let refused = |reason| {
            worker.counts.retry_refused(reason);
            false
        };
        if self.retries >= policy.max {
            return refused("attempts");
        }
        if !self.is_bodyless && !is_kept {
            return refused("retry_body_bytes");
        }
        let wait = retry_policy::backoff(&policy.backoff, self.retries + 1, worker.random());
        // The request's own retry has ended, so it does not count against the next one.
        self.permit = None;
        let Some(permit) = self.budget.take(worker.shared.config.workers) else {
            return refused("retry_budget");
        };
        self.permit = Some(permit);
        self.retries += 1;
        self.granted = Some(wait);
        worker.counts.retried(match outcome {
            AttemptOutcome::Response { .. } => ProxyError::RetriedResponse(0).name(),
            AttemptOutcome::Failed(error) => error.name(),
        });
        true
    }

    /// Decides about a retry after an attempt that failed.
    pub(crate) fn decide(
        &mut self,
        worker: &Worker,
        error: &ProxyError,
        is_kept: bool,
    ) -> PolicyRetry {
        if self.policy().is_none() {
            return PolicyRetry::Unasked;
        }
        let is_granted = match error {
            // It was granted when the head arrived.
            ProxyError::RetriedResponse(_) => self.granted.is_some(),
            _ => self.grant_retry(worker, AttemptOutcome::Failed(error), is_kept),
        };
        if is_granted {
            PolicyRetry::Granted
        } else {
            PolicyRetry::Refused
        }
    }

    /// Begins the next attempt and its time.
    pub(crate) fn begin_attempt(&mut self) {
        self.granted = None;
        self.deadlines.begin_attempt();
    }

    /// Ready if a time of the rule has passed. `is_sent`: the client has sent the entire request;
    /// `is_answered`: the client has seen the head of the response.
    pub(crate) fn poll_deadline(
        &mut self,
        cx: &mut Context<'_>,
        worker: &Worker,
        is_sent: bool,
        is_answered: bool,
    ) -> Poll<ProxyError> {
        self.deadlines.poll(cx, is_sent, is_answered).map(|late| {
            worker.counts.late(late);
            match late {
                TimeoutKind::RouteAttempt => ProxyError::AttemptTimeout,
                _ => ProxyError::RouteTimeout,
            }
        })
    }

    /// Runs `work`, which precedes the exchange, within the rule's times.
    pub(crate) async fn within<T>(
        &mut self,
        worker: &Worker,
        is_sent: bool,
        work: impl Future<Output = Result<T, ProxyError>>,
    ) -> Result<T, ProxyError> {
        let mut work = pin!(work);
        std::future::poll_fn(|cx| match work.as_mut().poll(cx) {
            Poll::Pending => self.poll_deadline(cx, worker, is_sent, false).map(Err),
            done => done,
        })
        .await
    }

    /// Waits for the time of the granted retry. `poll_client_gone` is ready if the client has left.
    pub(crate) async fn back_off(
        &mut self,
        worker: &Worker,
        is_sent: bool,
        mut poll_client_gone: impl FnMut(&mut Context<'_>) -> Poll<()>,
    ) -> Result<(), ProxyError> {
        let wait = self.granted.unwrap_or_default();
        // The failed attempt's time has ended; only the request's time runs.
        self.deadlines.attempt = None;
        let gone =
            std::future::poll_fn(|cx| poll_client_gone(cx).map(|()| Err(ProxyError::ClientGone)));
        let waited = async {
            tokio::select! {
                gone = gone => gone,
                () = tokio::time::sleep(wait) => Ok(()),
            }
        };
        self.deadlines.holds_attempt = true;
        let ended = self.within(worker, is_sent, waited).await;
        self.deadlines.holds_attempt = false;
        ended
    }
}

/// The points in time at which the rule's times have passed. They begin as the rule's
/// [`TimeoutSpan`] says.
struct AttemptDeadlines {
    timeouts: RouteTimeouts,
    request: Option<Instant>,
    attempt: Option<Instant>,
    /// True between attempts, when no time of an attempt runs.
    holds_attempt: bool,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl AttemptDeadlines {
    fn begin(timeouts: RouteTimeouts) -> Self {
        let request = match timeouts.span {
            TimeoutSpan::Whole => timeouts.request.map(|time| Instant::now() + time),
            TimeoutSpan::AfterRequest => None,
        };
        Self {
            timeouts,
            request,
            attempt: None,
            holds_attempt: false,
            sleep: None,
        }
    }

    fn begin_attempt(&mut self) {
        self.attempt = match self.timeouts.span {
            TimeoutSpan::Whole => self.timeouts.attempt.map(|time| Instant::now() + time),
            TimeoutSpan::AfterRequest => None,
        };
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        is_sent: bool,
        is_answered: bool,
    ) -> Poll<TimeoutKind> {
        if self.timeouts.is_empty() {
            return Poll::Pending;
        }
        let is_envoys = self.timeouts.span == TimeoutSpan::AfterRequest;
        if is_envoys {
            if !is_sent {
                return Poll::Pending;
            }
            let begin = |time: Duration| Instant::now() + time;
            let (request, attempt) = (self.timeouts.request, self.timeouts.attempt);
            self.request = self.request.or_else(|| request.map(begin));
            self.attempt = self.attempt.or_else(|| attempt.map(begin));
        }
        let attempt = self
            .attempt
            .filter(|_| !(self.holds_attempt || is_envoys && is_answered));
        let (due, late) = match (self.request, attempt) {
            (None, None) => return Poll::Pending,
            (Some(request), Some(attempt)) if attempt < request => {
                (attempt, TimeoutKind::RouteAttempt)
            }
            (None, Some(attempt)) => (attempt, TimeoutKind::RouteAttempt),
            (Some(request), _) => (request, TimeoutKind::RouteRequest),
        };
        let sleep = self
            .sleep
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
        if sleep.deadline() != due {
            sleep.as_mut().reset(due);
        }
        sleep.as_mut().poll(cx).map(|()| late)
    }
}
