//! Waiting for what a test needs to hold. Nothing here knows what that is.

use std::time::{Duration, Instant};

/// Waits until something holds, and says how long that took; a panic names what did not come to hold.
pub fn until(within: Duration, what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < within, "not within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
    started.elapsed()
}
