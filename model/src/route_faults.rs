//! Faults that a rule injects into its requests: delays and aborts. It validates nothing, waits for
//! nothing and sends nothing.
//!
//! Istio: `fault`. The meaning is that of Envoy's fault filter.

use std::time::Duration;

use crate::request_fraction::RequestFraction;

/// Body of the response to an aborted request that is not gRPC, and message of the one that is, as
/// Envoy writes them.
pub const ABORT_TEXT: &str = "fault filter abort";

/// Faults of the requests that a rule matches. A request may have both; the delay comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FaultPolicy {
    pub delay: Option<FaultDelay>,
    pub abort: Option<FaultAbort>,
}

/// A delay of a part of the requests, before anything else is done with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultDelay {
    pub time: Duration,
    pub fraction: RequestFraction,
}

/// A response of the gateway in place of the endpoint's, for a part of the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultAbort {
    pub status: AbortStatus,
    pub fraction: RequestFraction,
}

/// The status of the response to an aborted request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AbortStatus {
    /// An HTTP status, from 200 to 599.
    Http(u16),
    /// A gRPC status, from 0 to 16.
    Grpc(u8),
}

impl AbortStatus {
    /// The largest status that gRPC defines.
    pub const GRPC_MAX: u8 = 16;

    /// Returns the status of a response that is not gRPC. Envoy answers 200 to such a request if
    /// the fault names a gRPC status.
    pub fn http(self) -> u16 {
        match self {
            AbortStatus::Http(status) => status,
            AbortStatus::Grpc(_) => 200,
        }
    }

    /// Returns the status of a gRPC response (grpc/doc/http-grpc-status-mapping.md for an HTTP
    /// status).
    pub fn grpc(self) -> u8 {
        match self {
            AbortStatus::Grpc(status) => status,
            AbortStatus::Http(400) => 13,
            AbortStatus::Http(401) => 16,
            AbortStatus::Http(403) => 7,
            AbortStatus::Http(404) => 12,
            AbortStatus::Http(429 | 502 | 503 | 504) => 14,
            AbortStatus::Http(_) => 2,
        }
    }
}

/// The faults that one request gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InjectedFaults {
    pub delay: Option<Duration>,
    pub abort: Option<AbortStatus>,
}

impl FaultPolicy {
    /// Returns whether the rule injects nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Decides the faults of one request by a random number. Its halves decide about the delay and
    /// the abort, so that neither depends on the other.
    pub fn decide(&self, random: u64) -> InjectedFaults {
        let (of_delay, of_abort) = ((random >> 32) as u32, random as u32);
        let delay = self.delay.filter(|it| it.fraction.contains(of_delay));
        let abort = self.abort.filter(|it| it.fraction.contains(of_abort));
        InjectedFaults {
            delay: delay.map(|it| it.time),
            abort: abort.map(|it| it.status),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_and_aborts_are_drawn_independently() {
        let half = RequestFraction::of_percent(50.0).unwrap();
        let policy = FaultPolicy {
            delay: Some(FaultDelay {
                time: Duration::from_secs(1),
                fraction: half,
            }),
            abort: Some(FaultAbort {
                status: AbortStatus::Grpc(14),
                fraction: half,
            }),
        };
        let (low, high) = (0u64, u64::from(u32::MAX));
        for (delay, abort) in [(low, low), (low, high), (high, low), (high, high)] {
            let faults = policy.decide(delay << 32 | abort);
            assert_eq!(faults.delay.is_some(), delay == low);
            assert_eq!(faults.abort.is_some(), abort == low);
        }
    }
}
