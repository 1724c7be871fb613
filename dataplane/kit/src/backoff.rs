//! How long to wait before trying again: exponential, capped, with jitter. It holds no clock.

use std::time::Duration;

use rand::Rng;

/// Doubles from `first` to `max`; each wait is drawn from the upper half of the current step, so that clients spread out.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    step: Duration,
}

impl Backoff {
    /// Starts at `first`, never above `max`.
    pub fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, step: first }
    }

    /// The next wait, drawn with `rng`.
    pub fn next_with(&mut self, rng: &mut impl Rng) -> Duration {
        let step = self.step.min(self.max);
        self.step = (step * 2).min(self.max);
        step.mul_f64(rng.random_range(0.5..=1.0))
    }

    /// The next wait, drawn with the thread's generator.
    pub fn next_wait(&mut self) -> Duration {
        self.next_with(&mut rand::rng())
    }

    /// Back to the first step, after a success.
    pub fn reset(&mut self) {
        self.step = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn waits_double_stay_in_the_upper_half_and_stop_at_the_cap() {
        let mut b = Backoff::new(Duration::from_millis(10), Duration::from_millis(100));
        let mut rng = rand::rngs::StdRng::seed_from_u64(7);
        for step in [10, 20, 40, 80, 100, 100] {
            let w = b.next_with(&mut rng);
            assert!(w <= Duration::from_millis(step) && w >= Duration::from_millis(step / 2), "{step}: {w:?}");
        }
        b.reset();
        assert!(b.next_with(&mut rng) <= Duration::from_millis(10));
    }
}
