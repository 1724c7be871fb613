//! Time in tests: the deadlines and fixture times of the gate and of the timing tier, and
//! assertions on time, which only fail in the timing tier. It measures nothing and contains no
//! test. Start at [`assert_time`].
//!
//! `make test`, the gate, checks responses, counts and bytes: a test in it must give the same
//! verdict on a slow machine. `make test-timing` sets [`VARIABLE`] and also checks bounds on time,
//! rates and losses (docs/testing.md).

#![forbid(unsafe_code)]

use std::fmt::{Debug, Display};
use std::time::Duration;

/// The environment variable that selects the tier. Unset: the gate. `1`: the timing tier, where an
/// assertion on time that does not hold panics. [`REPORT`]: the timing tier as `make test-timing`
/// runs it.
pub const VARIABLE: &str = "CANAL_TIMING";
/// The value of [`VARIABLE`] with which an assertion on time prints its figure and never panics,
/// because the verdict depends on several tries.
pub const REPORT: &str = "report";
/// Beginning of a line that reports one figure. The rest is separated by tabs: kind, name, figure,
/// bound.
pub const LINE: &str = "TIMED\t";

/// The least deadline of the gate. It only ends a hang.
const GATE_DEADLINE_MIN: Duration = Duration::from_secs(60);
/// Factor by which the gate waits longer than on a quiet machine.
const GATE_DEADLINE_FACTOR: u32 = 12;
/// Factor by which silences, pings and handshakes of a fixture are longer in the gate than in the
/// timing tier.
const GATE_SLACK: u32 = 10;

/// Returns true in the timing tier.
#[must_use]
pub fn is_timed() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// Returns how long a test waits for a condition that is true after at most `quiet` on a quiet
/// machine: that time in the timing tier, and in the gate 12 times as long, but at least a minute.
#[must_use]
pub fn deadline(quiet: Duration) -> Duration {
    deadline_of(is_timed(), quiet)
}

/// Returns the factor on each time of a fixture that a stall of the machine could exceed: 1 in the
/// timing tier, 10 in the gate.
#[must_use]
pub fn slack() -> u32 {
    slack_of(is_timed())
}

fn deadline_of(is_timed: bool, quiet: Duration) -> Duration {
    if is_timed {
        quiet
    } else {
        (quiet * GATE_DEADLINE_FACTOR).max(GATE_DEADLINE_MIN)
    }
}

fn slack_of(is_timed: bool) -> u32 {
    if is_timed { 1 } else { GATE_SLACK }
}

/// Asserts in the timing tier that `holds` is true; the gate prints it only. Use the macro
/// [`timed!`], which makes the name.
///
/// # Panics
/// Panics in the timing tier if it does not hold and no runner collects figures.
#[track_caller]
pub fn assert_holds(name: &str, holds: bool) {
    report("holds", name, holds, "true", holds);
}

/// Asserts in the timing tier that `measured` is at most `bound`. `make test-timing` checks the
/// median of its tries.
///
/// # Panics
/// Panics in the timing tier if the time is longer and no runner collects figures.
#[track_caller]
pub fn assert_time(name: &str, measured: Duration, bound: Duration) {
    report(
        "seconds",
        name,
        measured.as_secs_f64(),
        bound.as_secs_f64(),
        measured <= bound,
    );
}

/// Asserts in the timing tier that at most `bound` requests, sessions or packets were lost. `make
/// test-timing` checks the sum of its tries.
///
/// # Panics
/// Panics in the timing tier if more were lost and no runner collects figures.
#[track_caller]
pub fn assert_losses(name: &str, lost: u64, bound: u64) {
    report("losses", name, lost, bound, lost <= bound);
}

#[track_caller]
fn report(kind: &str, name: &str, figure: impl Debug, bound: impl Display, holds: bool) {
    // A figure is one line and its columns are separated by tabs.
    let name = name.replace(['\t', '\n'], " ");
    // A line of its own, because libtest prints `test name ... ` without an end.
    println!("\n{LINE}{kind}\t{name}\t{figure:?}\t{bound}");
    let may_panic = std::env::var_os(VARIABLE).is_some_and(|value| value != REPORT);
    assert!(
        holds || !may_panic,
        "{name}: {figure:?}, bound {bound} {kind}"
    );
}

/// Asserts that a condition holds which depends on the speed of the machine: a rate, a ratio, a
/// percentile, or an order of two times. The timing tier checks it, the gate only prints it. The
/// first argument after the condition is the name of the figure, with `format!`'s arguments; what
/// varies from run to run does not belong in it.
#[macro_export]
macro_rules! timed {
    ($holds:expr, $($name:tt)+) => {
        $crate::assert_holds(&format!($($name)+), $holds)
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_waits_at_least_a_minute_and_its_fixtures_are_ten_times_as_patient() {
        let seconds = Duration::from_secs;
        for (is_timed, quiet, expected) in [(true, 2, 2), (false, 2, 60), (false, 20, 240)] {
            assert_eq!(
                deadline_of(is_timed, seconds(quiet)),
                seconds(expected),
                "{is_timed} {quiet}"
            );
        }
        assert_eq!((slack_of(true), slack_of(false)), (1, 10));
    }
}
