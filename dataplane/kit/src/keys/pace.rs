//! When a channel writes what is queued: at once while little is under way, else together with what comes until half of that was answered. Pure;
//! it holds no frames and no time.
//!
//! Under load each write, and each of the key server's answers to it, costs the node a packet and often a wake-up. Waiting for answers that
//! are due anyway makes both fewer without a timer in anybody's way: who is alone never waits.

/// With fewer answers outstanding nothing is held back.
const FEW: usize = 4;
/// Queued bytes that are written whatever is outstanding: a full TLS record, behind which there is nothing to gain.
const FULL: usize = 16 << 10;

/// A request's frame that has no answer yet, by the number of the write that takes it. `None`: it is the requester's turn.
pub(super) type Asked = Option<u64>;

/// How much is outstanding.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Writes so far.
    writes: u64,
    /// The first of them whose answers are waited for.
    since: u64,
    queued: usize,
    owed: usize,
    /// Answers outstanding after the last write.
    mark: usize,
}

impl Pace {
    /// A frame of a request was queued.
    pub(super) fn queue(&mut self, asked: &mut Asked) {
        self.settle(asked);
        *asked = Some(self.writes);
        self.queued += 1;
    }

    /// A request was answered, or is over.
    pub(super) fn settle(&mut self, asked: &mut Asked) {
        match asked.take() {
            Some(write) if write >= self.writes => self.queued -= 1,
            Some(write) if write >= self.since => self.owed -= 1,
            _ => {}
        }
    }

    /// Whether so many queued bytes are to be written now.
    pub(super) fn due(&self, bytes: usize) -> bool {
        bytes > 0 && (self.owed < FEW || 2 * self.owed <= self.mark || bytes >= FULL)
    }

    /// All that was queued was written.
    pub(super) fn wrote(&mut self) {
        self.writes += 1;
        self.owed += std::mem::take(&mut self.queued);
        self.mark = self.owed;
    }

    /// What is outstanding is not waited for any more: some of it was less than a message, and has no answer.
    pub(super) fn give_up(&mut self) {
        self.since = self.writes;
        (self.owed, self.mark) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests that were written, `n` of them in one write.
    fn written(pace: &mut Pace, n: usize) -> Vec<Asked> {
        let mut asked = vec![None; n];
        asked.iter_mut().for_each(|a| pace.queue(a));
        pace.wrote();
        asked
    }

    #[test]
    fn who_is_alone_never_waits_and_many_wait_for_half() {
        let mut pace = Pace::default();
        assert!(!pace.due(0) && pace.due(1), "nothing is outstanding");
        let mut first = written(&mut pace, FEW - 1);
        assert!(pace.due(1), "little is");
        let mut more = written(&mut pace, 5);
        assert!(!pace.due(1) && !pace.due(FULL - 1) && pace.due(FULL), "eight are");
        first.iter_mut().for_each(|a| pace.settle(a));
        assert!(!pace.due(1), "three of eight were answered");
        pace.settle(&mut more[0]);
        assert!(pace.due(1), "half were");
    }

    #[test]
    fn what_is_answered_dropped_or_given_up_is_counted_once() {
        let mut pace = Pace::default();
        let mut asked = written(&mut pace, 8);
        // More of the peer's bytes, before the answer.
        pace.queue(&mut asked[0]);
        assert_eq!((pace.queued, pace.owed), (1, 7));
        pace.settle(&mut asked[0]);
        pace.settle(&mut asked[0]);
        assert_eq!((pace.queued, pace.owed), (0, 7), "dropped before it was written");
        pace.give_up();
        assert!(pace.due(1));
        let mut later = written(&mut pace, 6);
        asked.iter_mut().for_each(|a| pace.settle(a));
        assert_eq!(pace.owed, 6, "answers to what was given up change nothing");
        later.iter_mut().for_each(|a| pace.settle(a));
        assert_eq!((pace.queued, pace.owed), (0, 0));
    }
}
