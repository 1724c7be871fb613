//! Defines what a rule's retry policy means: which outcomes of an attempt it sends again, and how
//! long a gateway waits. The texts are those of Envoy's router filter (`x-envoy-retry-on`,
//! `x-envoy-retry-grpc-on`). Budgets and kept bodies are a gateway's, and not part of the meaning.

use std::time::Duration;

use canal_model::route_attempts::{BackoffJitter, RetryBackoff, RetryCondition, RetryPolicy};

/// Outcome of an attempt, as far as retries depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OracleOutcome {
    /// A response. `grpc_status` is that of a response without a body.
    Response {
        status: u16,
        grpc_status: Option<u8>,
    },
    /// No connection, so nothing of the request was sent.
    NotConnected,
    /// The endpoint refused the stream.
    StreamRefused,
    /// No response: a disconnect, a reset, or a timeout of the attempt.
    NoResponse,
    /// The client left, or the time for the whole request has passed.
    Ended,
}

/// Returns whether the request is sent again, after this many retries.
pub fn is_retried(policy: &RetryPolicy, retries: u32, outcome: OracleOutcome) -> bool {
    if retries >= policy.max {
        return false;
    }
    let is_listed = matches!(outcome, OracleOutcome::Response { status, .. }
        if policy.statuses.contains(&status));
    is_listed || policy.on.iter().any(|condition| holds(condition, outcome))
}

fn holds(condition: RetryCondition, outcome: OracleOutcome) -> bool {
    use OracleOutcome as O;
    let status = match outcome {
        O::Ended => return false,
        O::Response { status, .. } => Some(status),
        O::NotConnected | O::StreamRefused | O::NoResponse => None,
    };
    let grpc = |wanted: u8| matches!(outcome, O::Response { grpc_status, .. } if grpc_status == Some(wanted));
    match condition {
        RetryCondition::ServerError => status.is_none_or(|status| status / 100 == 5),
        RetryCondition::GatewayError => {
            status.is_none_or(|status| status == 502 || status == 503 || status == 504)
        }
        RetryCondition::Reset => status.is_none(),
        RetryCondition::ResetBeforeRequest | RetryCondition::ConnectFailure => {
            outcome == O::NotConnected
        }
        RetryCondition::Retriable4xx => status == Some(409),
        RetryCondition::RefusedStream => outcome == O::StreamRefused,
        RetryCondition::Cancelled => grpc(1),
        RetryCondition::DeadlineExceeded => grpc(4),
        RetryCondition::ResourceExhausted => grpc(8),
        RetryCondition::Internal => grpc(13),
        RetryCondition::Unavailable => grpc(14),
    }
}

/// Returns the shortest and the longest time before the retry with this number, which begins with 1.
pub fn wait(times: &RetryBackoff, retry: u32) -> (Duration, Duration) {
    let mut longest = Duration::ZERO;
    // The n-th interval is (2^n - 1) times the base: each doubles the one before and adds the base.
    for _ in 0..retry {
        longest = (longest * 2 + times.base).min(times.max);
    }
    let shortest = match times.jitter {
        BackoffJitter::Full => Duration::ZERO,
        BackoffJitter::AboveBase => times.base.min(longest),
    };
    (shortest, longest)
}
