//! A latency histogram of fixed size, in microseconds. It has 128 steps per power of two, so a
//! quantile is at most 0.8 % too high.

use std::time::Duration;

/// Base-2 logarithm of the number of steps per power of two. 128 steps make an error of less than 1
/// %.
const STEP_BITS: u32 = 7;
const STEPS: usize = 1 << STEP_BITS;
/// Number of powers of two: values range from 0 to 2^36 µs (19 hours). Larger values count as the
/// largest.
const POWERS: usize = 36 - STEP_BITS as usize + 1;

/// Counts of durations by size.
#[derive(Debug, Clone)]
pub struct LatencyHistogram {
    counts: Vec<u64>,
    total: u64,
    sum_us: u64,
    max_us: u64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self {
            counts: vec![0; STEPS * POWERS],
            total: 0,
            sum_us: 0,
            max_us: 0,
        }
    }
}

fn slot(us: u64) -> usize {
    if us < STEPS as u64 {
        return us as usize;
    }
    let power = u64::BITS - us.leading_zeros() - STEP_BITS;
    let step = (us >> power) as usize;
    (power as usize * STEPS + step).min(STEPS * POWERS - 1)
}

/// Returns the largest value of a slot.
fn ceiling(slot: usize) -> u64 {
    let (power, step) = (slot / STEPS, (slot % STEPS) as u64);
    if power == 0 {
        step
    } else {
        ((step + 1) << power) - 1
    }
}

impl LatencyHistogram {
    /// Adds one duration to the counts.
    pub fn record(&mut self, duration: Duration) {
        let us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.counts[slot(us)] += 1;
        self.total += 1;
        self.sum_us = self.sum_us.saturating_add(us);
        self.max_us = self.max_us.max(us);
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
        self.max_us = self.max_us.max(other.max_us);
    }

    /// Returns the value in µs that a share `q` (0 to 1) of all durations does not exceed; 0 if
    /// there are none.
    pub fn quantile(&self, q: f64) -> u64 {
        let rank = (q * self.total as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (slot, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return ceiling(slot).min(self.max_us);
            }
        }
        self.max_us
    }

    /// Returns the largest duration, in µs.
    pub fn max(&self) -> u64 {
        self.max_us
    }

    /// Returns the mean duration in µs; 0 if there are none.
    pub fn mean(&self) -> u64 {
        self.sum_us.checked_div(self.total).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_near_the_truth_and_never_below() {
        let mut histogram = LatencyHistogram::default();
        for us in 1..=100_000_u64 {
            histogram.record(Duration::from_micros(us));
        }
        for q in [0.01, 0.5, 0.9, 0.99, 0.999, 1.0] {
            let truth = q * 100_000.0;
            let got = histogram.quantile(q) as f64;
            assert!(
                got >= truth && got <= truth * 1.01,
                "{q}: {got} for {truth}"
            );
        }
        assert_eq!((histogram.max(), histogram.mean()), (100_000, 50_000));
    }

    #[test]
    fn every_value_has_a_slot_that_holds_it() {
        for us in (0..40).flat_map(|p| [(1_u64 << p) - 1, 1 << p, (1 << p) + 1]) {
            let slot = slot(us);
            assert!(slot < STEPS * POWERS, "{us}");
            if us < 1 << 36 {
                assert!(
                    ceiling(slot) >= us && (slot == 0 || ceiling(slot - 1) < us),
                    "{us} in {slot}"
                );
            }
        }
        assert_eq!(LatencyHistogram::default().quantile(0.99), 0);
    }
}
