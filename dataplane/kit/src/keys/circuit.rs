//! A key server that does not answer is left alone for a moment: who asks goes on to the next at once, without a queue behind the dead one.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::backoff::Backoff;

/// Failures in a row before a key server is left alone.
pub const FAILURES_MAX: u32 = 3;
/// For how long, at first and at most.
pub const CIRCUIT_WAIT: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));

/// Closed while the key server answers.
#[derive(Debug)]
pub(super) struct Circuit(Mutex<State>);

#[derive(Debug)]
struct State {
    failures: u32,
    backoff: Backoff,
    open_until: Option<Instant>,
}

impl Circuit {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State { failures: 0, backoff: Backoff::new(CIRCUIT_WAIT.0, CIRCUIT_WAIT.1), open_until: None }))
    }

    /// Whether it may be asked. After the wait one may try; the others wait for what comes of it.
    pub(super) fn allows(&self, now: Instant) -> bool {
        let mut s = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match s.open_until {
            None => true,
            Some(until) if until > now => false,
            Some(_) => {
                let wait = s.backoff.next_wait();
                s.open_until = Some(now + wait);
                true
            }
        }
    }

    /// It answered.
    pub(super) fn well(&self) {
        let mut s = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (s.failures, s.open_until) = (0, None);
        s.backoff.reset();
    }

    /// It did not. True: it is left alone from now on.
    pub(super) fn failed(&self, now: Instant) -> bool {
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
        let c = Circuit::new();
        let now = Instant::now;
        for n in 1..=FAILURES_MAX {
            assert!(c.allows(now()), "{n}");
            assert_eq!(c.failed(now()), n == FAILURES_MAX);
        }
        assert!(!c.allows(now()));
        tokio::time::advance(CIRCUIT_WAIT.0).await;
        assert!(c.allows(now()), "one tries");
        assert!(!c.allows(now()), "the others wait");
        c.well();
        assert!(c.allows(now()) && c.allows(now()));
        assert!(!c.failed(now()), "failures are counted anew");
        assert!(c.allows(now()));
    }
}
