//! Wait times between retries: exponential, capped, with jitter. The type does not read a clock.

use std::time::Duration;

use rand::Rng;

/// Doubles the step from `first` to `max`. Each wait is random in the upper half of the current
/// step, so that clients spread out.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    step: Duration,
}

impl Backoff {
    /// Creates a backoff whose first step is `first` and whose steps never exceed `max`.
    pub fn new(first: Duration, max: Duration) -> Self {
        Self {
            first,
            max,
            step: first,
        }
    }

    /// Returns the next wait, drawn with `rng`.
    pub fn next_with(&mut self, rng: &mut impl Rng) -> Duration {
        let step = self.step.min(self.max);
        self.step = (step * 2).min(self.max);
        step.mul_f64(rng.random_range(0.5..=1.0))
    }

    /// Returns the next wait, drawn with the thread's random generator.
    pub fn next_wait(&mut self) -> Duration {
        self.next_with(&mut rand::rng())
    }

    /// Returns to the first step. Callers do this after a success.
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
            assert!(
                w <= Duration::from_millis(step) && w >= Duration::from_millis(step / 2),
                "{step}: {w:?}"
            );
        }
        b.reset();
        assert!(b.next_with(&mut rng) <= Duration::from_millis(10));
    }
}
