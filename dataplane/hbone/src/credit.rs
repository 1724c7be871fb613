//! Credit to send that a peer gives to the streams of a connection. A peer that couples its windows
//! (ztunnel, Envoy) gives none to new streams while a stream of theirs is not read. The pool then
//! prefers another connection for a new stream. This module reads nothing and decides no window of
//! this side. Start with [`SendCredit`].

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use canal_runtime::metrics::{Gauge, GaugeGuard};
use tokio::time::Instant;

/// Time that a stream waits for its first credit, although its own window is untouched, until its
/// connection is passed by. A peer that reads gives it within a round trip. Nodes give up an
/// attempt after 600 ms, so a second connection can still serve the stream.
const FIRST_CREDIT_TIME: Duration = Duration::from_millis(200);
/// Longest time for which a connection is passed by after the last stream that waited has given up.
/// The peer may have given credit since. As long as a connection may be doubtful (`DOUBT_LASTS`).
const PASSED_BY_MAX: Duration = Duration::from_secs(30);
/// Time that a stream waits for its first credit until its connection is counted as one without.
/// Waits that end sooner are no stall that an operator should see.
const COUNTED_AFTER: Duration = Duration::from_secs(1);
/// Interval at which waits are looked at to count their connection. A quarter of `COUNTED_AFTER`,
/// so the count is late by that at most.
const COUNT_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum number of connections to one peer that new streams avoid because they have no credit.
/// Once there are that many, new streams are placed on them too. A quarter of the connections that
/// one worker has to a service (`SPREAD_CONNECTIONS_MAX`). Without a limit, each stream of a peer
/// that never reads would open one more.
pub const WITHHELD_CONNECTIONS_MAX: usize = 4;

/// State of one connection's peer: it gives new streams credit to send, or not.
#[derive(Debug, Default)]
pub struct SendCredit {
    /// Number and beginning of each wait, the oldest first.
    waits: RefCell<VecDeque<(u64, Instant)>>,
    /// Number of the last wait.
    last: Cell<u64>,
    /// Time until which the connection is passed by although no stream waits.
    passed_by_until: Cell<Option<Instant>>,
    /// Number of such connections of the worker.
    connections: Option<Gauge>,
    /// A task counts the connection while streams wait.
    is_counted: Cell<bool>,
}

impl SendCredit {
    /// Creates the state of a new connection, which is counted in `connections` while it has no
    /// credit.
    pub(crate) fn counted(connections: Gauge) -> Rc<Self> {
        Rc::new(Self {
            connections: Some(connections),
            ..Self::default()
        })
    }

    /// Begins the wait of a stream that has sent nothing and may send nothing. The runtime must
    /// spawn local tasks.
    pub fn begin_wait(self: &Rc<Self>) -> CreditWait {
        let number = self.last.get() + 1;
        self.last.set(number);
        self.waits.borrow_mut().push_back((number, Instant::now()));
        if let Some(connections) = &self.connections
            && !self.is_counted.replace(true)
        {
            tokio::task::spawn_local(self.clone().count(connections.clone()));
        }
        CreditWait {
            credit: self.clone(),
            number,
        }
    }

    /// Returns whether new streams should use other connections: a stream has waited for too long,
    /// or did until it gave up.
    #[inline]
    pub fn is_withheld(&self) -> bool {
        let oldest = self.waits.borrow().front().map(|(_, since)| *since);
        if oldest.is_none() && self.passed_by_until.get().is_none() {
            return false;
        }
        let now = Instant::now();
        oldest.is_some_and(|since| now >= since + FIRST_CREDIT_TIME)
            || self.passed_by_until.get().is_some_and(|until| now < until)
    }

    /// Notes that the peer gave a stream its first credit, so the connection is no longer passed by
    /// for a stream that gave up.
    pub(crate) fn note_granted(&self) {
        self.passed_by_until.set(None);
    }

    /// Counts the connection while a stream has waited for long. Ends when no stream waits.
    async fn count(self: Rc<Self>, connections: Gauge) {
        let mut counted: Option<GaugeGuard> = None;
        loop {
            let oldest = self.waits.borrow().front().map(|(_, since)| *since);
            match oldest {
                None => break,
                Some(since) if since.elapsed() >= COUNTED_AFTER => {
                    counted.get_or_insert_with(|| connections.hold());
                }
                // Another stream has waited for less, since the peer gave credit.
                Some(_) => counted = None,
            }
            tokio::time::sleep(COUNT_INTERVAL).await;
        }
        self.is_counted.set(false);
    }
}

/// The wait of one stream for its first credit. It must be dropped when the stream ends.
#[derive(Debug)]
pub struct CreditWait {
    credit: Rc<SendCredit>,
    number: u64,
}

impl CreditWait {
    /// Ends the wait because the peer gave credit.
    pub fn granted(self) {
        self.end();
        self.credit.note_granted();
    }

    /// Removes the wait, and returns when it began.
    fn end(&self) -> Option<Instant> {
        let mut waits = self.credit.waits.borrow_mut();
        let at = waits
            .iter()
            .position(|(number, _)| *number == self.number)?;
        waits.remove(at).map(|(_, since)| since)
    }
}

impl Drop for CreditWait {
    fn drop(&mut self) {
        let now = Instant::now();
        if self
            .end()
            .is_some_and(|since| now >= since + FIRST_CREDIT_TIME)
        {
            self.credit.passed_by_until.set(Some(now + PASSED_BY_MAX));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap()
            .block_on(test);
    }

    #[test]
    fn a_connection_is_passed_by_from_200_ms_without_first_credit_on_until_credit_comes() {
        run(async {
            let credit = Rc::<SendCredit>::default();
            let (first, second) = (credit.begin_wait(), credit.begin_wait());
            assert!(!credit.is_withheld());
            tokio::time::advance(FIRST_CREDIT_TIME).await;
            assert!(credit.is_withheld());
            first.granted();
            assert!(credit.is_withheld(), "the other one waits");
            second.granted();
            assert!(!credit.is_withheld());
        });
    }

    #[test]
    fn a_stream_that_gave_up_leaves_its_finding_for_a_while() {
        run(async {
            let credit = Rc::<SendCredit>::default();
            drop(credit.begin_wait());
            assert!(!credit.is_withheld(), "it did not wait for long");
            let (wait, next) = (credit.begin_wait(), Duration::from_secs(1));
            tokio::time::advance(next).await;
            drop(wait);
            tokio::time::advance(PASSED_BY_MAX - next).await;
            assert!(credit.is_withheld());
            tokio::time::advance(next).await;
            assert!(!credit.is_withheld(), "the next stream tries again");
            let wait = credit.begin_wait();
            tokio::time::advance(FIRST_CREDIT_TIME).await;
            drop(wait);
            assert!(credit.is_withheld());
            credit.note_granted();
            assert!(
                !credit.is_withheld(),
                "another stream of it was given credit"
            );
        });
    }
}
