//! Write pacing of a channel: frames are written at once while few answers are outstanding,
//! otherwise together with later frames when half of the answers have arrived. The code is pure; it
//! stores no frames and reads no clock.
//!
//! Under load each write, and each of the key server's answers to it, costs the node a packet and
//! often a wake-up. Waiting for answers that are due anyway reduces both without a timer on the
//! request path: a request that is alone never waits.

/// Number of outstanding answers below which nothing is delayed. Two answers of fewer than four
/// would be a wait for little gain. Nobody measured the number.
const WRITE_THROUGH_BELOW: usize = 4;
/// Queued bytes that are written regardless of outstanding answers: a full TLS record, beyond which
/// batching gains nothing.
const BATCH_BYTES: usize = 16 << 10;

/// A request's frame without an answer, as the number of the write that takes it. `None` means that
/// the requester must act next.
pub(super) type OutstandingFrame = Option<u64>;

/// Counts of queued frames and outstanding answers.
#[derive(Debug, Default)]
pub(super) struct WritePacer {
    /// Number of writes so far.
    writes: u64,
    /// First write whose answers are counted.
    since: u64,
    queued: usize,
    owed: usize,
    /// Answers outstanding after the last write.
    mark: usize,
}

impl WritePacer {
    /// Records that a frame of a request was queued.
    pub(super) fn queue(&mut self, outstanding: &mut OutstandingFrame) {
        self.record_answer(outstanding);
        *outstanding = Some(self.writes);
        self.queued += 1;
    }

    /// Records that a request was answered or has ended.
    pub(super) fn record_answer(&mut self, outstanding: &mut OutstandingFrame) {
        match outstanding.take() {
            Some(write) if write >= self.writes => self.queued -= 1,
            Some(write) if write >= self.since => self.owed -= 1,
            _ => {}
        }
    }

    /// Returns whether `bytes` queued bytes should be written now.
    pub(super) fn should_write(&self, bytes: usize) -> bool {
        bytes > 0
            && (self.owed < WRITE_THROUGH_BELOW
                || 2 * self.owed <= self.mark
                || bytes >= BATCH_BYTES)
    }

    /// Records that all queued frames were written.
    pub(super) fn record_write(&mut self) {
        self.writes += 1;
        self.owed += std::mem::take(&mut self.queued);
        self.mark = self.owed;
    }

    /// Stops counting the outstanding answers: some frames were less than a message and get no
    /// answer.
    pub(super) fn record_abandoned(&mut self) {
        self.since = self.writes;
        (self.owed, self.mark) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns `n` requests that were written in one write.
    fn written(pace: &mut WritePacer, n: usize) -> Vec<OutstandingFrame> {
        let mut asked = vec![None; n];
        asked.iter_mut().for_each(|a| pace.queue(a));
        pace.record_write();
        asked
    }

    #[test]
    fn idle_channel_writes_at_once_and_loaded_channel_batches() {
        let mut pace = WritePacer::default();
        assert!(
            !pace.should_write(0) && pace.should_write(1),
            "nothing is outstanding"
        );
        let mut first = written(&mut pace, WRITE_THROUGH_BELOW - 1);
        assert!(pace.should_write(1), "little is");
        let mut more = written(&mut pace, 5);
        assert!(
            !pace.should_write(1)
                && !pace.should_write(BATCH_BYTES - 1)
                && pace.should_write(BATCH_BYTES),
            "eight are"
        );
        first.iter_mut().for_each(|a| pace.record_answer(a));
        assert!(!pace.should_write(1), "three of eight were answered");
        pace.record_answer(&mut more[0]);
        assert!(pace.should_write(1), "half were");
    }

    #[test]
    fn every_request_is_counted_once() {
        let mut pace = WritePacer::default();
        let mut asked = written(&mut pace, 8);
        // More of the peer's bytes are queued before the answer.
        pace.queue(&mut asked[0]);
        assert_eq!((pace.queued, pace.owed), (1, 7));
        pace.record_answer(&mut asked[0]);
        pace.record_answer(&mut asked[0]);
        assert_eq!(
            (pace.queued, pace.owed),
            (0, 7),
            "dropped before it was written"
        );
        pace.record_abandoned();
        assert!(pace.should_write(1));
        let mut later = written(&mut pace, 6);
        asked.iter_mut().for_each(|a| pace.record_answer(a));
        assert_eq!(pace.owed, 6, "answers to what was given up change nothing");
        later.iter_mut().for_each(|a| pace.record_answer(a));
        assert_eq!((pace.queued, pace.owed), (0, 0));
    }
}
