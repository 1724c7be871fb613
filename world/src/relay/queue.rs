//! [`DelayQueue`]: the frames that travel in one direction of a link. It decides which frames are lost, when each is due, in which order
//! they leave, and how many it queues. It does no IO and has no clock. Start at
//! [`DelayQueue::offer`].

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::impairment::Impairment;

/// Maximum bytes of queued frames in one direction: 2.5 Gbit/s for 100 ms. A frame that would
/// exceed it is dropped, as in a router.
pub(crate) const LINK_QUEUE_BYTES_MAX: usize = 32 << 20;

/// The decision about one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameVerdict {
    /// The frame leaves when it is due.
    Queued,
    /// The frame is dropped at random according to the link's loss.
    Lost,
    /// The frame is dropped because the queue is full.
    Overflow,
}

/// Frames with the times at which they leave. They leave in the order of their arrival.
#[derive(Debug)]
pub(crate) struct DelayQueue {
    frames: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    bytes_max: usize,
    loss: SplitMix,
    jitter: SplitMix,
}

impl DelayQueue {
    pub(crate) fn new(seed: u64, bytes_max: usize) -> Self {
        // Two generators, so that whether the n-th frame is lost depends on the seed and n alone.
        Self {
            frames: VecDeque::new(),
            bytes: 0,
            bytes_max,
            loss: SplitMix(seed),
            jitter: SplitMix(!seed),
        }
    }

    /// Decides about a frame that arrived at this time, and queues it unless it is dropped.
    pub(crate) fn offer(
        &mut self,
        impairment: &Impairment,
        arrived: Instant,
        frame: &[u8],
    ) -> FrameVerdict {
        if self.loss.below(1_000_000) < u64::from(impairment.loss_ppm) {
            return FrameVerdict::Lost;
        }
        if self.bytes + frame.len() > self.bytes_max {
            return FrameVerdict::Overflow;
        }
        let due = arrived + self.time_on_link(impairment);
        // A frame never leaves before the frame ahead of it.
        let due = self.frames.back().map_or(due, |(last, _)| due.max(*last));
        self.bytes += frame.len();
        self.frames.push_back((due, frame.to_vec()));
        FrameVerdict::Queued
    }

    fn time_on_link(&mut self, impairment: &Impairment) -> Duration {
        let jitter = impairment.jitter.as_nanos() as u64;
        if jitter == 0 {
            return impairment.delay;
        }
        let least = impairment.delay.saturating_sub(impairment.jitter);
        least + Duration::from_nanos(self.jitter.below(2 * jitter + 1))
    }

    /// Returns the time at which the next frame leaves.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.frames.front().map(|(due, _)| *due)
    }

    /// Returns the frames that leave by `now`, at most `count`, in order.
    pub(crate) fn due(&self, now: Instant, count: usize) -> impl Iterator<Item = &[u8]> {
        self.frames
            .iter()
            .take(count)
            .take_while(move |(due, _)| *due <= now)
            .map(|(_, frame)| frame.as_slice())
    }

    /// Removes the first frames, which have left.
    pub(crate) fn remove(&mut self, count: usize) {
        for (_, frame) in self.frames.drain(..count.min(self.frames.len())) {
            self.bytes -= frame.len();
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): the same numbers for a seed on every machine and in every
/// version.
#[derive(Debug)]
struct SplitMix(u64);

impl SplitMix {
    /// A number below `bound`. The bias of the remainder is below one part in 10^12 for the bounds
    /// here.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn leave(queue: &mut DelayQueue, now: Instant) -> Vec<Vec<u8>> {
        let frames: Vec<Vec<u8>> = queue.due(now, usize::MAX).map(<[u8]>::to_vec).collect();
        queue.remove(frames.len());
        frames
    }

    #[test]
    fn frames_leave_when_due_and_not_before() {
        let (mut queue, start) = (DelayQueue::new(1, 1000), Instant::now());
        let link = Impairment::delay(10 * MS);
        assert_eq!(queue.offer(&link, start, b"one"), FrameVerdict::Queued);
        assert_eq!(
            queue.offer(&link, start + 4 * MS, b"two"),
            FrameVerdict::Queued
        );
        assert_eq!(queue.next_due(), Some(start + 10 * MS));
        assert!(leave(&mut queue, start + 9 * MS).is_empty());
        assert_eq!(leave(&mut queue, start + 10 * MS), [b"one"]);
        assert_eq!(leave(&mut queue, start + 14 * MS), [b"two"]);
        assert_eq!(queue.next_due(), None);
    }

    #[test]
    fn jitter_spreads_within_bounds_and_keeps_order() {
        let (mut queue, start) = (DelayQueue::new(7, 1 << 20), Instant::now());
        let link = Impairment {
            delay: 10 * MS,
            jitter: 5 * MS,
            loss_ppm: 0,
        };
        let dues: Vec<Duration> = (0..200_u32)
            .map(|number| {
                let arrived = start + number * 20 * MS;
                queue.offer(&link, arrived, &number.to_be_bytes());
                let due = queue.next_due().expect("queued") - arrived;
                queue.remove(1);
                due
            })
            .collect();
        assert!(dues.iter().all(|due| (5 * MS..=15 * MS).contains(due)));
        assert!(dues.iter().any(|due| *due < 7 * MS) && dues.iter().any(|due| *due > 13 * MS));
        for number in 0..200_u32 {
            queue.offer(&link, start, &number.to_be_bytes());
        }
        let left = leave(&mut queue, start + 20 * MS);
        assert!(
            left.iter()
                .zip(0_u32..)
                .all(|(frame, number)| *frame == number.to_be_bytes())
                && left.len() == 200
        );
    }

    #[test]
    fn a_delay_that_shrinks_overtakes_nothing() {
        let (mut queue, start) = (DelayQueue::new(1, 1000), Instant::now());
        queue.offer(&Impairment::delay(10 * MS), start, b"slow");
        queue.offer(&Impairment::default(), start, b"fast");
        assert!(leave(&mut queue, start).is_empty());
        assert_eq!(leave(&mut queue, start + 10 * MS), [b"slow", b"fast"]);
    }

    #[test]
    fn a_full_queue_drops_the_newest_and_counts_it() {
        let (mut queue, start) = (DelayQueue::new(1, 10), Instant::now());
        let link = Impairment::delay(MS);
        let verdicts =
            [&[0; 6][..], &[0; 5], &[0; 4], &[0; 1]].map(|frame| queue.offer(&link, start, frame));
        assert_eq!(
            verdicts,
            [
                FrameVerdict::Queued,
                FrameVerdict::Overflow,
                FrameVerdict::Queued,
                FrameVerdict::Overflow
            ]
        );
        queue.remove(1);
        assert_eq!(
            queue.offer(&link, start, &[0; 6]),
            FrameVerdict::Queued,
            "space is returned"
        );
    }

    #[test]
    fn losses_follow_the_seed_and_the_share() {
        let lost = |seed: u64, loss_ppm: u32| -> Vec<bool> {
            let (mut queue, start) = (DelayQueue::new(seed, usize::MAX), Instant::now());
            let link = Impairment {
                loss_ppm,
                ..Impairment::default()
            };
            (0..100_000)
                .map(|_| queue.offer(&link, start, b"") == FrameVerdict::Lost)
                .collect()
        };
        assert_eq!(lost(5, 10_000), lost(5, 10_000));
        assert_ne!(lost(5, 10_000), lost(6, 10_000));
        for (loss_ppm, expected) in [
            (0, 0.0),
            (1_000_000, 100_000.0),
            (10_000, 1_000.0),
            (250_000, 25_000.0),
        ] {
            let count = lost(5, loss_ppm).iter().filter(|lost| **lost).count() as f64;
            // Four standard deviations of the binomial distribution.
            let share = f64::from(loss_ppm) / 1e6;
            let bound = 4.0 * (100_000.0 * share * (1.0 - share)).sqrt();
            assert!(
                (count - expected).abs() <= bound,
                "{loss_ppm} ppm: {count} of 100,000"
            );
        }
    }
}
