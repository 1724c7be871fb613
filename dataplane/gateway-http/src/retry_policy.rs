//! What a rule's retry policy means: after which outcomes of an attempt a request is sent again, and
//! how long the gateway waits before. It knows no limits: budgets and replayed bodies are the
//! engine's.
//!
//! The conditions are those of Envoy's router filter. Start with [`wants_retry`].

use std::time::Duration;

use canal_model::route_attempts::{BackoffJitter, RetryBackoff, RetryCondition, RetryPolicy};

use crate::proxy_error::ProxyError;

/// Outcome of an attempt of which the client has seen nothing.
#[derive(Debug, Clone, Copy)]
pub enum AttemptOutcome<'a> {
    /// The head of a response arrived. `grpc_status` is the one in the head: the response has no
    /// body then.
    Response {
        status: u16,
        grpc_status: Option<u8>,
    },
    /// No response arrived.
    Failed(&'a ProxyError),
}

/// Returns whether the policy wants the request to be sent again after this outcome.
pub fn wants_retry(policy: &RetryPolicy, outcome: AttemptOutcome<'_>) -> bool {
    match outcome {
        AttemptOutcome::Response {
            status,
            grpc_status,
        } => wants_retry_of_response(policy, status, grpc_status),
        AttemptOutcome::Failed(error) => policy.on.has_one_of(conditions_of(error)),
    }
}

fn wants_retry_of_response(policy: &RetryPolicy, status: u16, grpc_status: Option<u8>) -> bool {
    let by_status = match status {
        502..=504 => &[RetryCondition::ServerError, RetryCondition::GatewayError][..],
        500..=599 => &[RetryCondition::ServerError],
        409 => &[RetryCondition::Retriable4xx],
        _ => &[],
    };
    let mut conditions = policy.on.iter();
    policy.on.has_one_of(by_status)
        || policy.statuses.binary_search(&status).is_ok()
        || grpc_status.is_some_and(|status| {
            conditions.any(|condition| condition.grpc_status() == Some(status))
        })
}

/// Returns the conditions that hold after a failure. Envoy counts a missing response as a 5xx and as
/// a gateway error, because the client would get one.
fn conditions_of(error: &ProxyError) -> &'static [RetryCondition] {
    use RetryCondition as C;
    match error {
        ProxyError::Connect { .. } => &[
            C::ServerError,
            C::GatewayError,
            C::Reset,
            C::ResetBeforeRequest,
            C::ConnectFailure,
        ],
        ProxyError::UpstreamRefused => {
            &[C::ServerError, C::GatewayError, C::Reset, C::RefusedStream]
        }
        ProxyError::UpstreamClosed { .. }
        | ProxyError::UpstreamUndelivered
        | ProxyError::UpstreamReset
        | ProxyError::UpstreamProtocol(_)
        | ProxyError::UpstreamTimeout
        | ProxyError::AttemptTimeout => &[C::ServerError, C::GatewayError, C::Reset],
        _ => &[],
    }
}

/// Returns the time before the retry with this number, which begins with 1. `random` is uniform.
pub fn backoff(times: &RetryBackoff, retry: u32, random: u64) -> Duration {
    // Envoy: the n-th retry waits for less than (2^n - 1) times the base.
    let factor = 1u32.checked_shl(retry).map_or(u32::MAX, |power| power - 1);
    let longest = times.base.saturating_mul(factor).min(times.max);
    let shortest = match times.jitter {
        BackoffJitter::Full => Duration::ZERO,
        BackoffJitter::AboveBase => times.base.min(longest),
    };
    let span = longest - shortest;
    // The upper half of the product is a uniform number below the span.
    let part = (span.as_nanos() * u128::from(random >> 32)) >> 32;
    shortest + Duration::from_nanos(u64::try_from(part).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use canal_model::route_attempts::RetryConditions;

    use super::*;

    fn policy(on: &[RetryCondition], statuses: &[u16]) -> RetryPolicy {
        RetryPolicy {
            max: 1,
            on: on.iter().copied().collect::<RetryConditions>(),
            statuses: statuses.to_vec(),
            backoff: RetryBackoff::from_base(Duration::from_millis(25), BackoffJitter::Full),
        }
    }

    fn response(status: u16, grpc_status: Option<u8>) -> AttemptOutcome<'static> {
        AttemptOutcome::Response {
            status,
            grpc_status,
        }
    }

    #[test]
    fn responses_are_retried_as_envoy_does() {
        use RetryCondition as C;
        for (condition, statuses) in [
            (C::ServerError, &[500, 501, 502, 503, 504, 599][..]),
            (C::GatewayError, &[502, 503, 504]),
            (C::Retriable4xx, &[409]),
            (C::Reset, &[]),
            (C::ConnectFailure, &[]),
        ] {
            for status in [200, 404, 409, 429, 500, 501, 502, 503, 504, 599] {
                let wants = wants_retry(&policy(&[condition], &[]), response(status, None));
                assert_eq!(wants, statuses.contains(&status), "{condition:?} {status}");
            }
        }
        let listed = policy(&[], &[404, 503]);
        assert!(wants_retry(&listed, response(404, None)));
        assert!(!wants_retry(&listed, response(500, None)));
        for condition in RetryCondition::ALL {
            for status in 0..17 {
                assert_eq!(
                    wants_retry(&policy(&[condition], &[]), response(200, Some(status))),
                    condition.grpc_status() == Some(status),
                    "{condition:?} gRPC {status}"
                );
            }
        }
    }

    #[test]
    fn failures_are_retried_as_envoy_does() {
        use RetryCondition as C;
        let connect = ProxyError::Connect { why: String::new() };
        let closed = ProxyError::UpstreamClosed { reused: false };
        for (error, conditions) in [
            (
                &connect,
                &[
                    C::ServerError,
                    C::GatewayError,
                    C::Reset,
                    C::ResetBeforeRequest,
                    C::ConnectFailure,
                ][..],
            ),
            (
                &ProxyError::UpstreamRefused,
                &[C::ServerError, C::GatewayError, C::Reset, C::RefusedStream],
            ),
            (&closed, &[C::ServerError, C::GatewayError, C::Reset]),
            (
                &ProxyError::AttemptTimeout,
                &[C::ServerError, C::GatewayError, C::Reset],
            ),
            (&ProxyError::RouteTimeout, &[]),
            (&ProxyError::ClientGone, &[]),
            (&ProxyError::TenantBuffers, &[]),
        ] {
            for condition in RetryCondition::ALL {
                assert_eq!(
                    wants_retry(&policy(&[condition], &[]), AttemptOutcome::Failed(error)),
                    conditions.contains(&condition),
                    "{error:?} {condition:?}"
                );
            }
        }
    }

    #[test]
    fn times_before_retries_grow_to_their_maximum() {
        let millis = Duration::from_millis;
        let full = RetryBackoff::from_base(millis(20), BackoffJitter::Full);
        let above = RetryBackoff::from_base(millis(20), BackoffJitter::AboveBase);
        for (retry, longest) in [(1, 20), (2, 60), (3, 140), (4, 200), (31, 200), (99, 200)] {
            assert_eq!(backoff(&full, retry, 0), Duration::ZERO);
            assert_eq!(backoff(&above, retry, 0), millis(20), "a minimum");
            for times in [full, above] {
                let most = backoff(&times, retry, u64::MAX);
                assert!(most <= millis(longest), "{retry}: {most:?}");
                assert!(most >= millis(longest) - millis(1), "{retry}: {most:?}");
            }
        }
        let none = RetryBackoff::from_base(Duration::ZERO, BackoffJitter::AboveBase);
        assert_eq!(backoff(&none, 5, u64::MAX), Duration::ZERO);
    }
}
