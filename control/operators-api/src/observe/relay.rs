//! The operators' side of observations: one observation from its start to its end, as a stream of
//! events. It reads no faster than the operator does. It ends after a maximum time, with the
//! operator's token, or when its permit is revoked. Start at [`begin`].

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use canal_access::{AuthenticatedClient, holder_of};
use canal_controller_metrics as metrics;
use canal_model::principal::Principal;
use canal_runtime::TenantPermit;
use canal_wire::OBSERVE_TIME_MAX;
use canal_wire::api::{ObserveEnded, ObserveEvent, ObserveRequest};
use canal_wire::observe::Subject;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

use super::target::{self, ObservationRequest};
use super::{ObservationContext, OpenSession, OperatorCount, SessionEvent, name_of, subject_name};
use crate::operator::OperatorScope;

type RelayEndFuture = Pin<Box<dyn Future<Output = Status> + Send>>;

/// One observation. Dropping it ends it at all its data planes.
pub struct ObservationStream {
    /// First event, until it has been read.
    first: Option<ObserveEvent>,
    events: mpsc::UnboundedReceiver<SessionEvent>,
    /// Sessions that have not ended, by number, each with the name of its data plane.
    sessions: BTreeMap<u64, (String, OpenSession)>,
    /// Resolves with the reason why the observation must end.
    end: Option<RelayEndFuture>,
    account: ObservationAudit,
}

/// Permits and totals of an observation. The totals are written to the audit log when it ends.
struct ObservationAudit {
    shared: Arc<ObservationContext>,
    operator: Principal,
    subject: &'static str,
    tenant: String,
    bytes: u64,
    dropped: u64,
    _permit: TenantPermit,
    _count: OperatorCount,
}

/// Begins an observation.
///
/// # Errors
/// The named object does not exist or is not visible to the operator, or the limit of open
/// observations is reached.
pub(crate) fn begin(
    shared: &Arc<ObservationContext>,
    operator: &OperatorScope,
    caller: &AuthenticatedClient,
    request: &ObserveRequest,
) -> Result<ObservationStream, Status> {
    let catalog = shared.catalog.borrow().clone();
    let wanted = target::decide(request, operator, &catalog, &shared.registry.observables())?;
    let refused = |reason: &str, text: String| {
        shared.metrics.refuse(reason);
        Status::resource_exhausted(text)
    };
    let count = shared
        .registry
        .count_operator(&caller.principal)
        .ok_or_else(|| {
            let max = super::OBSERVATIONS_PER_OPERATOR_MAX;
            refused(
                "observations_of_operator",
                format!(
                    "{} has {max} open observations; fix: end one of them",
                    caller.principal
                ),
            )
        })?;
    let holder = holder_of(&caller.principal);
    let limit = &shared.limit;
    let permit = limit.take_revocable(&holder, 1).map_err(|refusal| {
        let which = limit.kind().key();
        refused(
            "observations",
            format!(
                "{holder} may open no more observations ({which}: {}); fix: end some of them",
                refusal.reason()
            ),
        )
    })?;
    Ok(start(shared, caller, wanted, (permit, count)))
}

/// Opens the sessions of an observation, and writes to the audit log.
fn start(
    shared: &Arc<ObservationContext>,
    caller: &AuthenticatedClient,
    wanted: ObservationRequest,
    (permit, count): (TenantPermit, OperatorCount),
) -> ObservationStream {
    let subject = subject_name(wanted.subject);
    // Only the provider's operators observe without a tenant; the audit log then has an empty one.
    let tenant = wanted
        .tenant
        .map(|tenant| tenant.to_string())
        .unwrap_or_default();
    let names: Vec<String> = wanted
        .targets
        .iter()
        .map(|target| name_of(&target.principal).to_owned())
        .collect();
    // The record comes first, so that no session opens without one.
    tracing::info!(
        target: "audit", operator = %caller.principal, subject, tenant, data_planes = names.join(","), "admin API: an operator's observation began"
    );
    shared
        .metrics
        .add(metrics::OBSERVATIONS, &[("subject", subject)], 1.0);
    // The registry bounds the bytes that wait in it.
    let (sender, events) = mpsc::unbounded_channel();
    let open = |(target, name): (target::Target, &String)| {
        let session = shared
            .registry
            .open_session(&target.principal, target.begin, &sender);
        (session.id, (name.clone(), session))
    };
    let sessions = wanted.targets.into_iter().zip(&names).map(open).collect();
    let revoked = permit.revoked();
    let account = ObservationAudit {
        shared: shared.clone(),
        operator: caller.principal.clone(),
        subject,
        tenant,
        bytes: 0,
        dropped: 0,
        _permit: permit,
        _count: count,
    };
    let end = until_over(shared.clone(), caller.clone(), wanted.subject, revoked);
    // The first event names the data planes that are observed.
    let first = Some(ObserveEvent {
        listening: names,
        ..ObserveEvent::default()
    });
    ObservationStream {
        first,
        events,
        sessions,
        end: Some(Box::pin(end)),
        account,
    }
}

/// Resolves when the observation must end, with the reason.
async fn until_over(
    shared: Arc<ObservationContext>,
    caller: AuthenticatedClient,
    subject: Subject,
    revoked: impl Future<Output = ()>,
) -> Status {
    let mut principals = shared.clients.principals();
    let token_ends =
        async { while principals.changed().await.is_ok() && shared.clients.is_current(&caller) {} };
    let longest = match subject {
        Subject::Tap | Subject::Logs => OBSERVE_TIME_MAX,
        _ => super::WHOLE_ANSWER_TIMEOUT,
    };
    tokio::select! {
        () = tokio::time::sleep(longest) => {
            Status::deadline_exceeded(format!("an observation lasts at most {} s; fix: begin another one", longest.as_secs()))
        }
        () = revoked => {
            shared.metrics.refuse("observations_revoked");
            Status::resource_exhausted("this observation was ended in favour of another one; fix: end some of them")
        }
        () = token_ends => Status::unauthenticated("the token was revoked; fix: request another one from the provider"),
        () = shared.stopping.cancelled() => Status::unavailable("the controller is stopping; fix: start the observation again"),
    }
}

impl Stream for ObservationStream {
    type Item = Result<ObserveEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        let Some(end) = &mut this.end else {
            return Poll::Ready(None);
        };
        if let Poll::Ready(status) = end.as_mut().poll(cx) {
            this.end = None;
            this.sessions.clear();
            return Poll::Ready(Some(Err(status)));
        }
        loop {
            if this.sessions.is_empty() {
                this.end = None;
                return Poll::Ready(None);
            }
            match this.events.poll_recv(cx) {
                Poll::Pending => return Poll::Pending,
                // No sender is left, so every session has sent its end before.
                Poll::Ready(None) => this.sessions.clear(),
                Poll::Ready(Some(event)) => {
                    if let Some(event) = this.read(event) {
                        return Poll::Ready(Some(Ok(event)));
                    }
                }
            }
        }
    }
}

impl ObservationStream {
    /// Returns what the operator receives of an event; `None` if its session has ended.
    fn read(&mut self, event: SessionEvent) -> Option<ObserveEvent> {
        let (source, session) = self.sessions.get_mut(&event.session)?;
        session.read(event.cost);
        self.account.bytes += event.data.len() as u64;
        self.account.dropped += event.dropped;
        let source = source.clone();
        let ended = event.end.map(|(reason, why)| ObserveEnded { reason, why });
        if ended.is_some() {
            self.sessions.remove(&event.session);
        }
        Some(ObserveEvent {
            source,
            listening: Vec::new(),
            data: event.data,
            dropped: event.dropped,
            ended,
        })
    }
}

impl Drop for ObservationAudit {
    fn drop(&mut self) {
        let Self {
            operator,
            subject,
            tenant,
            bytes,
            dropped,
            ..
        } = self;
        tracing::info!(target: "audit", %operator, subject, tenant, bytes, dropped, "admin API: an operator's observation ended");
        let metrics = &self.shared.metrics;
        let labels = [("subject", self.subject)];
        metrics.add(metrics::OBSERVATIONS, &labels, -1.0);
        #[allow(
            clippy::cast_precision_loss,
            reason = "an observation carries far less than 2^52 bytes"
        )]
        metrics.add(metrics::OBSERVED_BYTES, &labels, self.bytes as f64);
        #[allow(clippy::cast_precision_loss, reason = "fewer lines than bytes")]
        metrics.add(metrics::OBSERVED_DROPPED, &labels, self.dropped as f64);
    }
}
