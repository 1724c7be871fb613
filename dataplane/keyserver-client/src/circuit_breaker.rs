//! Circuit breaker of a key server: while it is open, requests go to the next server at once and do
//! not queue behind a dead one. It does not send requests itself.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use canal_runtime::backoff::Backoff;
use tokio::time::Instant;

/// Consecutive failures that open the breaker. One may be chance, and each costs a handshake 250 ms
/// (`ANSWER_TIMEOUT`). Nobody measured the number.
pub const FAILURES_MAX: u32 = 3;
/// First and longest time for which the breaker is open. A server that restarts is tried again
/// soon; a dead one costs one request in ten seconds a timeout.
pub const OPEN_TIME: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));

/// Circuit breaker. It is closed while the key server answers.
#[derive(Debug)]
pub(super) struct CircuitBreaker(Mutex<BreakerState>);

#[derive(Debug)]
struct BreakerState {
    failures: u32,
    backoff: Backoff,
    open_until: Option<Instant>,
}

impl CircuitBreaker {
    pub(super) fn new() -> Self {
        Self(Mutex::new(BreakerState {
            failures: 0,
            backoff: Backoff::new(OPEN_TIME.0, OPEN_TIME.1),
            open_until: None,
        }))
    }

    /// Returns whether a request may be sent. After the open time one request may try (half-open),
    /// and the others wait for its result.
    pub(super) fn allows(&self, now: Instant) -> bool {
        let mut s = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match s.open_until {
            None => true,
            Some(until) if until > now => false,
            Some(_) => {
                // The next wait starts now, so that only this request tries.
                let wait = s.backoff.next_wait();
                s.open_until = Some(now + wait);
                true
            }
        }
    }

    /// Returns whether [`CircuitBreaker::allows`] would return true. It takes no turn.
    pub(super) fn may_allow(&self, now: Instant) -> bool {
        let s = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        s.open_until.is_none_or(|until| until <= now)
    }

    /// Records an answer, which closes the breaker.
    pub(super) fn record_success(&self) {
        let mut s = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (s.failures, s.open_until) = (0, None);
        s.backoff.reset();
    }

    /// Records a failure. Returns true if it opened the breaker.
    pub(super) fn record_failure(&self, now: Instant) -> bool {
        let mut s = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        s.failures = s.failures.saturating_add(1);
        if s.failures < FAILURES_MAX || s.open_until.is_some_and(|until| until > now) {
            return false;
        }
        let wait = s.backoff.next_wait();
        s.open_until = Some(now + wait);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn after_three_failures_one_in_a_while_tries() {
        let c = CircuitBreaker::new();
        let now = Instant::now;
        for n in 1..=FAILURES_MAX {
            assert!(c.allows(now()), "{n}");
            assert_eq!(c.record_failure(now()), n == FAILURES_MAX);
        }
        assert!(!c.allows(now()));
        assert!(!c.may_allow(now()));
        tokio::time::advance(OPEN_TIME.0).await;
        assert!(c.may_allow(now()) && c.may_allow(now()));
        assert!(c.allows(now()), "one tries");
        assert!(!c.may_allow(now()));
        assert!(!c.allows(now()), "the others wait");
        c.record_success();
        assert!(c.allows(now()) && c.allows(now()));
        assert!(!c.record_failure(now()), "failures are counted anew");
        assert!(c.allows(now()));
    }
}
