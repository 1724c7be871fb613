//! How long a gateway tries to serve the requests of a rule, and how often it sends them. It
//! validates and applies nothing.
//!
//! Gateway API: `timeouts` (GEP-1742), `retry` (GEP-1731). Istio: `timeout`, `retries`.

use std::time::Duration;

/// Most retries of one request.
/// Nobody measured this value; under load the retry budget ends them earlier.
pub const RETRIES_MAX: u32 = 32;

/// Timeouts and retries of the requests that a rule sends to endpoints.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AttemptPolicy {
    pub timeouts: RouteTimeouts,
    /// `None`: the gateway sends a request again only where no application has received it.
    pub retries: Option<RetryPolicy>,
}

impl AttemptPolicy {
    /// Returns whether the rule asks for nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Times after which a gateway gives up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RouteTimeouts {
    /// Time for the request with all its attempts.
    pub request: Option<Duration>,
    /// Time for each single attempt.
    pub attempt: Option<Duration>,
    pub span: TimeoutSpan,
}

impl RouteTimeouts {
    /// Returns whether no time is limited.
    pub fn is_empty(&self) -> bool {
        self.request.is_none() && self.attempt.is_none()
    }
}

/// The part of a request and its response in which the timeouts run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum TimeoutSpan {
    /// From the head of the request to the end of the response. GEP-1742 wants to cover the whole
    /// transaction, and an attempt until the full response was received.
    #[default]
    Whole,
    /// From the end of the request, as in Envoy, which Istio configures: a slow upload does not
    /// count. The timeout of an attempt ends with the head of the response.
    AfterRequest,
}

/// The outcomes after which a request is sent again, how often, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Most retries, up to [`RETRIES_MAX`]; 0 disables them.
    pub max: u32,
    pub on: RetryConditions,
    /// Statuses of responses after which the request is sent again, sorted.
    pub statuses: Vec<u16>,
    pub backoff: RetryBackoff,
}

/// A set of [`RetryCondition`]s: a bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RetryConditions(u16);

impl RetryConditions {
    /// Returns the set with `condition` in it.
    #[must_use]
    pub fn with(self, condition: RetryCondition) -> Self {
        Self(self.0 | 1 << condition as u16)
    }

    /// Returns whether `condition` is in the set.
    pub fn has(self, condition: RetryCondition) -> bool {
        self.0 & 1 << condition as u16 != 0
    }

    /// Returns whether one of `conditions` is in the set.
    pub fn has_one_of(self, conditions: &[RetryCondition]) -> bool {
        conditions.iter().any(|condition| self.has(*condition))
    }

    /// Returns the conditions in the order of [`RetryCondition::ALL`].
    pub fn iter(self) -> impl Iterator<Item = RetryCondition> {
        let all = RetryCondition::ALL.into_iter();
        all.filter(move |condition| self.has(*condition))
    }
}

impl FromIterator<RetryCondition> for RetryConditions {
    fn from_iter<I: IntoIterator<Item = RetryCondition>>(conditions: I) -> Self {
        let conditions = conditions.into_iter();
        conditions.fold(Self::default(), Self::with)
    }
}

/// An outcome of an attempt after which the request is sent again. Names and meanings are those of
/// Envoy's `x-envoy-retry-on` and `x-envoy-retry-grpc-on`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RetryCondition {
    /// A response with status 500 to 599, or no response.
    ServerError,
    /// A response with status 502, 503 or 504, or no response.
    GatewayError,
    /// No response: the connection ended, the stream was reset, or a time ran out.
    Reset,
    /// No response, and nothing of the request was sent.
    ResetBeforeRequest,
    /// No connection to the endpoint could be established.
    ConnectFailure,
    /// A response with status 409.
    Retriable4xx,
    /// The endpoint refused the stream: it did not process the request.
    RefusedStream,
    /// A response without a body whose gRPC status is 1.
    Cancelled,
    /// A response without a body whose gRPC status is 4.
    DeadlineExceeded,
    /// A response without a body whose gRPC status is 8.
    ResourceExhausted,
    /// A response without a body whose gRPC status is 13.
    Internal,
    /// A response without a body whose gRPC status is 14.
    Unavailable,
}

impl RetryCondition {
    /// All conditions, in the order of their numbers on the wire.
    pub const ALL: [RetryCondition; 12] = [
        RetryCondition::ServerError,
        RetryCondition::GatewayError,
        RetryCondition::Reset,
        RetryCondition::ResetBeforeRequest,
        RetryCondition::ConnectFailure,
        RetryCondition::Retriable4xx,
        RetryCondition::RefusedStream,
        RetryCondition::Cancelled,
        RetryCondition::DeadlineExceeded,
        RetryCondition::ResourceExhausted,
        RetryCondition::Internal,
        RetryCondition::Unavailable,
    ];

    /// Returns Envoy's name of the condition.
    pub fn name(self) -> &'static str {
        match self {
            RetryCondition::ServerError => "5xx",
            RetryCondition::GatewayError => "gateway-error",
            RetryCondition::Reset => "reset",
            RetryCondition::ResetBeforeRequest => "reset-before-request",
            RetryCondition::ConnectFailure => "connect-failure",
            RetryCondition::Retriable4xx => "retriable-4xx",
            RetryCondition::RefusedStream => "refused-stream",
            RetryCondition::Cancelled => "cancelled",
            RetryCondition::DeadlineExceeded => "deadline-exceeded",
            RetryCondition::ResourceExhausted => "resource-exhausted",
            RetryCondition::Internal => "internal",
            RetryCondition::Unavailable => "unavailable",
        }
    }

    /// Returns the condition with this name.
    pub fn of(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|condition| condition.name() == name)
    }

    /// Returns the gRPC status that the condition is about, if it is about one.
    pub fn grpc_status(self) -> Option<u8> {
        match self {
            RetryCondition::Cancelled => Some(1),
            RetryCondition::DeadlineExceeded => Some(4),
            RetryCondition::ResourceExhausted => Some(8),
            RetryCondition::Internal => Some(13),
            RetryCondition::Unavailable => Some(14),
            _ => None,
        }
    }
}

/// Times before retries. They grow exponentially from `base`, and are random, so that the retries
/// of many requests do not arrive together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryBackoff {
    pub base: Duration,
    /// Longest time before a retry.
    pub max: Duration,
    pub jitter: BackoffJitter,
}

/// Factor between the first and the longest time before a retry (as Envoy's default).
pub const BACKOFF_GROWTH_MAX: u32 = 10;

impl RetryBackoff {
    /// Returns times that begin with `base` and grow to [`BACKOFF_GROWTH_MAX`] times of it.
    pub fn from_base(base: Duration, jitter: BackoffJitter) -> Self {
        Self {
            base,
            max: base.saturating_mul(BACKOFF_GROWTH_MAX),
            jitter,
        }
    }
}

/// The random part of the time before a retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackoffJitter {
    /// Between zero and the time that has grown (Envoy).
    Full,
    /// Between `base` and the time that has grown: GEP-1731 makes `backoff` a minimum.
    AboveBase,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_condition_has_its_bit_and_its_name() {
        for condition in RetryCondition::ALL {
            assert_eq!(RetryCondition::of(condition.name()), Some(condition));
            let set = RetryConditions::default().with(condition);
            assert_eq!(set.iter().collect::<Vec<_>>(), [condition]);
        }
        let all: RetryConditions = RetryCondition::ALL.into_iter().collect();
        assert_eq!(all.iter().count(), RetryCondition::ALL.len());
    }
}
