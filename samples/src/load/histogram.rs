//! A latency histogram of fixed size: 128 steps per power of two, so a quantile is at most 0.8 % too high. Microseconds.

use std::time::Duration;

/// Steps per power of two, as a power of two.
const STEP_BITS: u32 = 7;
const STEPS: usize = 1 << STEP_BITS;
/// Values from 0 to 2^36 µs (19 hours); larger ones count as the largest.
const POWERS: usize = 36 - STEP_BITS as usize + 1;

/// Counts of durations.
#[derive(Debug, Clone)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    sum_us: u64,
    max_us: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; STEPS * POWERS], total: 0, sum_us: 0, max_us: 0 }
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

/// The largest value of a slot.
fn ceiling(slot: usize) -> u64 {
    let (power, step) = (slot / STEPS, (slot % STEPS) as u64);
    if power == 0 { step } else { ((step + 1) << power) - 1 }
}

impl Histogram {
    /// Counts one duration.
    pub fn record(&mut self, duration: Duration) {
        let us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.counts[slot(us)] += 1;
        self.total += 1;
        self.sum_us = self.sum_us.saturating_add(us);
        self.max_us = self.max_us.max(us);
    }

    /// Adds another one's counts.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
        self.max_us = self.max_us.max(other.max_us);
    }

    /// The value that `q` (0 to 1) of all durations do not exceed, in µs; 0 when there are none.
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

    /// The largest, in µs.
    pub fn max(&self) -> u64 {
        self.max_us
    }

    /// The mean, in µs; 0 when there are none.
    pub fn mean(&self) -> u64 {
        self.sum_us.checked_div(self.total).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_near_the_truth_and_never_below() {
        let mut histogram = Histogram::default();
        for us in 1..=100_000_u64 {
            histogram.record(Duration::from_micros(us));
        }
        for q in [0.01, 0.5, 0.9, 0.99, 0.999, 1.0] {
            let truth = q * 100_000.0;
            let got = histogram.quantile(q) as f64;
            assert!(got >= truth && got <= truth * 1.01, "{q}: {got} for {truth}");
        }
        assert_eq!((histogram.max(), histogram.mean()), (100_000, 50_000));
    }

    #[test]
    fn every_value_has_a_slot_that_holds_it() {
        for us in (0..40).flat_map(|p| [(1_u64 << p) - 1, 1 << p, (1 << p) + 1]) {
            let slot = slot(us);
            assert!(slot < STEPS * POWERS, "{us}");
            if us < 1 << 36 {
                assert!(ceiling(slot) >= us && (slot == 0 || ceiling(slot - 1) < us), "{us} in {slot}");
            }
        }
        assert_eq!(Histogram::default().quantile(0.99), 0);
    }
}
