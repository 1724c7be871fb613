//! Waits for the conditions of tests. It does not know what they mean.

use std::time::{Duration, Instant};

/// Waits until `holds` returns true, and returns how long that took. A panic names the condition that did not become true.
pub fn until(within: Duration, what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < within, "not within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
    started.elapsed()
}
