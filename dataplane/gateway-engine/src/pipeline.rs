//! The phases of a request, in order and once, for HTTP/1.1, HTTP/2 and bytes that are not
//! requests.
//!
//! It reads and writes nothing itself: each kind of [`ClientTraffic`] does that. It contains the
//! only retry loop of the engine; whether and how to retry is a function of its arguments. Start
//! with [`serve`].

use canal_gateway_http::proxy_error::{ProxyError, RetrySafety};

use crate::authorize::{AuthorizationState, DestinationPolicies};
use crate::balance::TriedEndpoints;
use crate::endpoints::SelectedEndpoint;
use crate::route::RoutedRequest;
use crate::session::ClientSession;
use crate::worker::Worker;

/// Most attempts for one request: the first and two retries. As in Istio, whose default is two
/// retries.
pub(crate) const ATTEMPTS_MAX: usize = 3;

/// One unit of a client's traffic that passes through the phases: an HTTP request (`forward`), or a
/// connection whose bytes are not requests (`relay`). Each method is the phase of the same name, as
/// far as it depends on the protocol.
pub(crate) trait ClientTraffic {
    /// Result of a successful attempt.
    type Done;
    /// Instruction for the client's connection after the request.
    type End;

    fn worker(&self) -> &Worker;
    fn session(&self) -> &ClientSession;

    /// Takes from the request's head what later phases need.
    ///
    /// # Errors
    /// The request is one that the gateway does not serve.
    fn decode(&mut self) -> Result<(), ProxyError>;

    /// Admits the request within the limits, and determines the endpoint set that may serve it.
    ///
    /// # Errors
    /// A limit is reached, or no usable route or service exists.
    fn route(&mut self) -> Result<RoutedRequest, ProxyError>;

    /// Passes the filters of a Gateway's listener, then routes the request. Not called for a listener
    /// without filters.
    ///
    /// # Errors
    /// A filter refuses the request, or no usable route or service exists.
    async fn pass_listener(&mut self, _routed: &mut RoutedRequest) -> Result<(), ProxyError> {
        // Only requests have such filters.
        Err(ProxyError::NoRoute)
    }

    /// Runs the filters of the request that precede the selection of an endpoint, in the order of
    /// the chain. Not called for a request without such filters.
    ///
    /// # Errors
    /// A filter refuses the request.
    async fn filter(&mut self, routed: &RoutedRequest) -> Result<(), ProxyError>;

    /// Selects an endpoint.
    ///
    /// # Errors
    /// The set contains no endpoint.
    fn balance(
        &mut self,
        routed: &RoutedRequest,
        tried: &TriedEndpoints,
    ) -> Result<SelectedEndpoint, ProxyError>;

    /// Authorizes the request at the selected endpoint. Not called where no policy applies to this
    /// client. `earlier` is the result at the endpoint of the attempt before.
    ///
    /// # Errors
    /// A policy denies the request.
    async fn authorize(
        &mut self,
        routed: &RoutedRequest,
        policies: &DestinationPolicies<'_>,
        selected: &SelectedEndpoint,
        earlier: Option<Box<AuthorizationState>>,
    ) -> Result<Option<Box<AuthorizationState>>, ProxyError>;

    /// Sends the request to the endpoint and the response to the client.
    ///
    /// # Errors
    /// The attempt failed before the client received anything of a response.
    async fn forward(
        &mut self,
        routed: &RoutedRequest,
        selected: SelectedEndpoint,
        attempt: Attempt<'_>,
    ) -> Result<Self::Done, FailedAttempt>;

    /// Decides whether the policy of the rule sends the request again after this failure.
    fn decide_retry(&mut self, _failed: &FailedAttempt) -> PolicyRetry {
        PolicyRetry::Unasked
    }

    /// Waits for the time before a retry that the policy of the rule granted.
    ///
    /// # Errors
    /// The client left, or the rule's time for the request has passed.
    async fn back_off(&mut self) -> Result<(), ProxyError> {
        Ok(())
    }

    /// Ends the request: sends a local reply if it failed, reports it, and decides what happens to
    /// the client's connection. `routed` is `None` if the request failed before it was routed.
    async fn finish(
        &mut self,
        routed: Option<&RoutedRequest>,
        ended: Result<Self::Done, ProxyError>,
    ) -> Self::End;

    /// Returns the most attempts for this traffic.
    fn attempts_max(&self, _routed: &RoutedRequest) -> usize {
        ATTEMPTS_MAX
    }
}

/// The circumstances of one attempt of a request.
#[derive(Clone, Copy)]
pub(crate) struct Attempt<'a> {
    /// Result of the authorization, if a policy applies.
    pub(crate) authorization: Option<&'a AuthorizationState>,
    /// True after an idle connection turned out to be dead: others may be dead too, so a new one is
    /// opened.
    pub(crate) opens_connection: bool,
}

/// An attempt that failed, and what determines whether another one is safe.
#[derive(Debug)]
pub(crate) struct FailedAttempt {
    pub(crate) error: ProxyError,
    /// Position of the endpoint in its set.
    pub(crate) endpoint: usize,
    pub(crate) replay: ReplayConditions,
    /// The endpoint, if the traffic can send the same bytes to it again: they did not reach the
    /// application, and all of them are available.
    pub(crate) resumable: Option<SelectedEndpoint>,
}

/// Properties of a request that failed, on which a retry depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReplayConditions {
    /// True if no byte of a body was passed on.
    pub(crate) is_untouched: bool,
    /// True if the method is idempotent (RFC 9110 §9.2.2) and the request has no body.
    pub(crate) is_repeatable: bool,
}

/// Decision of the rule's retry policy after a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PolicyRetry {
    /// The rule has no policy: only what surely reached no application is sent again.
    Unasked,
    /// The policy does not send the request again.
    Refused,
    /// The policy sends the request again, after a time.
    Granted,
}

/// Way in which the next attempt differs from the failed one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Retry {
    /// The next attempt prefers endpoints that were not tried.
    Elsewhere,
    /// The next attempt uses no idle connection.
    NewConnection,
    /// The next attempt sends the same bytes to the same endpoint on a new connection.
    Resume,
}

/// Decides how to retry a request after an error of this kind; `None` means that a retry is not
/// safe.
fn decide_retry(
    safety: RetrySafety,
    replay: ReplayConditions,
    is_resumable: bool,
) -> Option<Retry> {
    match safety {
        RetrySafety::Undelivered if is_resumable => Some(Retry::Resume),
        RetrySafety::Unsent if replay.is_untouched => Some(Retry::Elsewhere),
        RetrySafety::Undelivered if replay.is_untouched => Some(Retry::NewConnection),
        RetrySafety::Reused if replay.is_untouched && replay.is_repeatable => {
            Some(Retry::NewConnection)
        }
        _ => None,
    }
}

/// Attempts of one request.
struct Attempts {
    /// Most attempts without those that the rule's policy grants.
    max: usize,
    count: usize,
    /// Endpoints that no byte of the request reached.
    tried: TriedEndpoints,
    opens_connection: bool,
    /// Endpoint at which the next attempt goes on.
    resumed: Option<SelectedEndpoint>,
}

impl Attempts {
    fn new(max: usize) -> Self {
        Self {
            max,
            count: 1,
            tried: TriedEndpoints::new(),
            opens_connection: false,
            resumed: None,
        }
    }

    /// Prepares and counts the next attempt. Returns whether the rule's policy granted it.
    ///
    /// # Errors
    /// There is no further attempt; the error is that of the failed one.
    fn retry<T: ClientTraffic>(
        &mut self,
        traffic: &mut T,
        failed: FailedAttempt,
    ) -> Result<bool, ProxyError> {
        let safety = failed.error.retry();
        let retry = decide_retry(safety, failed.replay, failed.resumable.is_some())
            .filter(|_| self.count < self.max);
        // A connection that the application had closed is the gateway's own affair. Whether other
        // failures are retried is the policy's, if there is one.
        let policy = match retry {
            Some(Retry::NewConnection | Retry::Resume) => PolicyRetry::Unasked,
            Some(Retry::Elsewhere) | None => traffic.decide_retry(&failed),
        };
        match (policy, retry) {
            (PolicyRetry::Granted, _) => {
                self.tried.push(failed.endpoint);
                return Ok(true);
            }
            (PolicyRetry::Refused, _) | (_, None) => return Err(failed.error),
            (_, Some(Retry::Elsewhere)) => self.tried.push(failed.endpoint),
            (_, Some(Retry::NewConnection)) => self.opens_connection = true,
            (_, Some(Retry::Resume)) => self.resumed = failed.resumable,
        }
        self.count += 1;
        traffic.worker().counts.retried(failed.error.name());
        Ok(false)
    }
}

/// Carries one unit of traffic through the eight phases.
///
/// *Accept* (`accept`) and *establish* (`establish`) run once per connection, before its first
/// request; their result is the session of the traffic. All other phases are here. *Finish* runs
/// whatever the result. The caller keeps the traffic, because each move of it would copy about a
/// kilobyte.
pub(crate) async fn serve<T: ClientTraffic>(traffic: &mut T) -> T::End {
    // It counts against the limits until the request is finished.
    let mut admitted = None;
    let phases = async {
        traffic.decode()?;
        let routed = admitted.insert(traffic.route()?);
        if routed.listener_filters.is_some() {
            Box::pin(traffic.pass_listener(routed)).await?;
        }
        let routed = &*routed;
        // Nearly no request has a filter. That was decided when the snapshot was built.
        if routed.filters.runs_before_balance() {
            traffic.filter(routed).await?;
        }
        let mut authorization = None;
        let mut attempts = Attempts::new(traffic.attempts_max(routed));
        loop {
            let selected = match attempts.resumed.take() {
                // The policies already allowed this endpoint.
                Some(selected) => selected,
                None => {
                    let selected = traffic.balance(routed, &attempts.tried)?;
                    authorization = match policies_to_check(traffic.session(), routed, &selected) {
                        None => None,
                        Some(policies) => {
                            traffic
                                .authorize(routed, &policies, &selected, authorization.take())
                                .await?
                        }
                    };
                    selected
                }
            };
            let attempt = Attempt {
                authorization: authorization.as_deref(),
                opens_connection: attempts.opens_connection,
            };
            match traffic.forward(routed, selected, attempt).await {
                Ok(done) => return Ok(done),
                Err(failed) => {
                    if attempts.retry(traffic, failed)? {
                        Box::pin(traffic.back_off()).await?;
                    }
                }
            }
        }
    };
    let ended = phases.await;
    traffic.finish(admitted.as_ref(), ended).await
}

/// Returns the policies by which a request is authorized at the selected endpoint; `None` if it is
/// not authorized at all.
#[inline]
fn policies_to_check<'a>(
    session: &ClientSession,
    routed: &'a RoutedRequest,
    selected: &'a SelectedEndpoint,
) -> Option<DestinationPolicies<'a>> {
    let policies = DestinationPolicies::of(selected, &routed.resolved);
    // A federated client is checked even where no policy applies. A rule and a listener may name an
    // authorizer.
    let is_checked =
        !policies.is_empty() || session.principal.foreign || routed.filters.is_authorized();
    is_checked.then_some(policies)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_safe_requests_are_sent_again() {
        let replay = |is_untouched, is_repeatable| ReplayConditions {
            is_untouched,
            is_repeatable,
        };
        let (get, post, partial) = (
            replay(true, true),
            replay(true, false),
            replay(false, false),
        );
        for (safety, replay, is_resumable, want) in [
            (RetrySafety::Unsent, get, false, Some(Retry::Elsewhere)),
            (RetrySafety::Unsent, post, false, Some(Retry::Elsewhere)),
            (RetrySafety::Unsent, partial, false, None),
            (
                RetrySafety::Undelivered,
                post,
                false,
                Some(Retry::NewConnection),
            ),
            (RetrySafety::Undelivered, partial, false, None),
            (RetrySafety::Undelivered, partial, true, Some(Retry::Resume)),
            (RetrySafety::Undelivered, get, true, Some(Retry::Resume)),
            (RetrySafety::Reused, get, false, Some(Retry::NewConnection)),
            (RetrySafety::Reused, post, false, None),
            (RetrySafety::Reused, partial, true, None),
            (RetrySafety::No, get, true, None),
        ] {
            assert_eq!(
                decide_retry(safety, replay, is_resumable),
                want,
                "{safety:?} {replay:?} {is_resumable}"
            );
        }
    }
}
