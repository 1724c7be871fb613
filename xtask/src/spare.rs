//! Measures the idle time of the processors, and adds capacity for more jobs while they are idle.
//! The needs of a job are only an estimate, so without this the machine would be half idle while
//! programs run that mostly wait. It starts no job.

use std::time::{Duration, Instant};

/// Interval between two measurements of idle time.
/// Long beside the 10 ms of a tick of /proc/stat, so that the share is exact, and short beside a
/// job.
pub(crate) const INTERVAL: Duration = Duration::from_secs(2);
/// Minimum share of idle time for which one more job fits.
/// On two cores it is 0.44 of a core, about what a job that mostly waits needs (`WAITS`: half a
/// core or less).
const IDLE_MIN: f64 = 0.22;
/// Parts that are added after each interval with enough idle time.
/// One job that works takes two (`WORKS`).
const STEP: usize = 2;

/// Parts of the machine beyond its capacity.
#[derive(Debug)]
pub(crate) struct SpareParts {
    max: usize,
    parts: usize,
    measured_at: Instant,
    before: ProcessorTime,
}

/// Time of all processors since the machine started, in ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct ProcessorTime {
    idle: u64,
    all: u64,
}

impl SpareParts {
    /// Starts without spare parts; there are never more than `max`.
    pub(crate) fn new(max: usize) -> Self {
        Self {
            max,
            parts: 0,
            measured_at: Instant::now(),
            before: ProcessorTime::now(),
        }
    }

    /// Measures if an interval is over, and returns the parts.
    pub(crate) fn update(&mut self) -> usize {
        if self.measured_at.elapsed() >= INTERVAL {
            let now = ProcessorTime::now();
            self.parts = decide_parts(self.parts, self.max, now.idle_since(self.before));
            (self.measured_at, self.before) = (Instant::now(), now);
        }
        self.parts
    }
}

/// Returns the parts after an interval with this share of idle time. They grow by one job at a
/// time, because a job that has just begun does not affect the measurement yet. They drop to zero
/// at once, because a busy machine must not start another job.
fn decide_parts(before: usize, max: usize, idle: f64) -> usize {
    if idle < IDLE_MIN {
        0
    } else {
        (before + STEP).min(max)
    }
}

impl ProcessorTime {
    fn now() -> Self {
        Self::read(&std::fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    /// Reads the first line of `/proc/stat` (proc_stat(5)): user, nice, system, idle, iowait and so
    /// on. Waiting for a disk is idle, too.
    fn read(stat: &str) -> Self {
        let ticks: Vec<u64> = stat
            .lines()
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .skip(1)
            .filter_map(|word| word.parse().ok())
            .collect();
        Self {
            idle: ticks.iter().skip(3).take(2).sum(),
            all: ticks.iter().take(8).sum(),
        }
    }

    fn idle_since(self, before: Self) -> f64 {
        let all = self.all.saturating_sub(before.all);
        if all == 0 {
            0.0
        } else {
            self.idle.saturating_sub(before.idle) as f64 / all as f64
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_grow_slowly_while_the_machine_is_idle_and_go_at_once() {
        let mut parts = 0;
        for (idle, expected) in [
            (0.5, 2),
            (0.9, 4),
            (1.0, 5),
            (0.3, 5),
            (0.2, 0),
            (0.0, 0),
            (0.23, 2),
        ] {
            parts = decide_parts(parts, 5, idle);
            assert_eq!(parts, expected, "{idle}");
        }
    }

    #[test]
    fn idle_time_is_read() {
        let (before, now) = (
            ProcessorTime::read("cpu  10 0 10 70 10 0 0 0 5 5\ncpu0 1"),
            ProcessorTime::read("cpu 40 0 30 110 20 0 0 0 9 9"),
        );
        assert_eq!(
            (before, now.idle_since(before)),
            (ProcessorTime { idle: 80, all: 100 }, 0.5)
        );
        assert_eq!(
            ProcessorTime::read("").idle_since(before),
            0.0,
            "a machine without load data counts as busy"
        );
    }
}
