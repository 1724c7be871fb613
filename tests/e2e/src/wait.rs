//! Waits for conditions that tests pass as closures, with a deadline.

use std::time::{Duration, Instant};

use canal_timing::deadline;

/// Waits until `holds` returns true, and returns how long that took. `within` is final: callers
/// that only end a hang give `canal_timing::deadline`. A panic names the condition that did not
/// become true.
pub fn until(within: Duration, what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let started = Instant::now();
    while !holds() {
        let waited = started.elapsed();
        assert!(waited < within, "not within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
    started.elapsed()
}

/// Returns [`deadline`] in milliseconds, as the flags of test clients have it (`--timeout-ms`,
/// `--patience-ms`).
pub fn deadline_ms(quiet: Duration) -> String {
    deadline(quiet).as_millis().to_string()
}
