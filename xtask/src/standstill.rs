//! Watches the machine while a timed test runs: the longest stall of a core, and the time that the
//! host took away. It runs no test.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;

/// Interval between two reads of the clock.
/// A tenth of the stall that voids a try ([`STALL_MAX`]).
const TICK: Duration = Duration::from_millis(10);
/// The lowest real-time priority. The kernel prefers it to every process of a test, in any session
/// or cgroup. A nice value is not enough: it orders only the tasks of one session or cgroup
/// (sched(7), autogroups), so a test that uses both cores looked like a stalled core.
const REAL_TIME: &str = "1";
/// Longest stall of a core, and largest share of stolen time, with which a try counts. Beyond them
/// the try is void.
/// docs/testing.md states both limits. Nobody measured others.
const STALL_MAX: Duration = Duration::from_millis(100);
/// Maximum time that the host took away, in percent of the try.
/// docs/testing.md states it. Nobody measured another value.
const STEAL_PERCENT_MAX: f64 = 2.0;

/// Disturbance of the machine during a try.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Quiet {
    pub(crate) stall: Duration,
    pub(crate) steal_percent: f64,
}

impl Quiet {
    /// Returns whether the machine was too disturbed for the try to count.
    pub(crate) fn is_void(self) -> bool {
        self.stall >= STALL_MAX || self.steal_percent > STEAL_PERCENT_MAX
    }
}

/// A watch over all cores that this process may use.
pub(crate) struct Watch {
    is_over: Arc<AtomicBool>,
    cores: Vec<JoinHandle<Duration>>,
    before: (u64, u64),
}

impl Watch {
    pub(crate) fn begin() -> anyhow::Result<Self> {
        let is_over = Arc::new(AtomicBool::new(false));
        let allowed = rustix::thread::sched_getaffinity(None)?;
        let cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
        let watch = |core| {
            let is_over = Arc::clone(&is_over);
            std::thread::spawn(move || watch_core(core, &is_over))
        };
        Ok(Self {
            cores: cores.map(watch).collect(),
            is_over,
            before: processor_time(),
        })
    }

    pub(crate) fn end(self) -> anyhow::Result<Quiet> {
        self.is_over.store(true, Ordering::Relaxed);
        let mut stall = Duration::ZERO;
        for core in self.cores {
            stall = stall.max(
                core.join()
                    .map_err(|_| anyhow::anyhow!("the watch of a core panicked: run as root"))?,
            );
        }
        Ok(Quiet {
            stall,
            steal_percent: steal_percent(self.before, processor_time()),
        })
    }
}

/// Returns the longest delay of a thread that needs a core briefly every [`TICK`].
fn watch_core(core: usize, is_over: &AtomicBool) -> Duration {
    let mut cores = CpuSet::new();
    cores.set(core);
    rustix::thread::sched_setaffinity(None, &cores)
        .expect("the core is one of those that are allowed");
    take_real_time_priority().expect("root may run a thread at a real-time priority");
    let mut longest = Duration::ZERO;
    while !is_over.load(Ordering::Relaxed) {
        let looked = Instant::now();
        std::thread::sleep(TICK);
        longest = longest.max(looked.elapsed().saturating_sub(TICK));
    }
    longest
}

/// Gives this thread the priority [`REAL_TIME`] of the policy SCHED_FIFO.
fn take_real_time_priority() -> anyhow::Result<()> {
    let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
    let status = Command::new("chrt")
        .args(["--fifo", "--pid", REAL_TIME, &thread])
        .status()?;
    anyhow::ensure!(status.success(), "chrt {status}");
    Ok(())
}

/// Returns the ticks that the host took away, and all ticks.
fn processor_time() -> (u64, u64) {
    read_processor_time(&std::fs::read_to_string("/proc/stat").unwrap_or_default())
}

/// Reads the first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal. The
/// fields after it are included in user and nice.
fn read_processor_time(stat: &str) -> (u64, u64) {
    let first = stat.lines().next().unwrap_or_default();
    let ticks: Vec<u64> = first
        .split_whitespace()
        .skip(1)
        .take(8)
        .filter_map(|word| word.parse().ok())
        .collect();
    (
        ticks.get(7).copied().unwrap_or_default(),
        ticks.iter().sum(),
    )
}

fn steal_percent(before: (u64, u64), after: (u64, u64)) -> f64 {
    let all = after.1.saturating_sub(before.1);
    if all == 0 {
        0.0
    } else {
        after.0.saturating_sub(before.0) as f64 * 100.0 / all as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_try_on_a_busy_machine_is_void() {
        let ms = Duration::from_millis;
        for (stall, steal_percent, expected) in [
            (ms(99), 2.0, false),
            (ms(100), 0.0, true),
            (ms(0), 2.1, true),
        ] {
            assert_eq!(
                Quiet {
                    stall,
                    steal_percent
                }
                .is_void(),
                expected,
                "{stall:?} {steal_percent}"
            );
        }
    }

    #[test]
    fn steal_is_a_share_of_all_time() {
        let (before, after) = (
            "cpu  10 0 10 70 0 0 0 10 5 0\ncpu0 1",
            "cpu  20 0 20 140 0 0 0 20 9 0\n",
        );
        assert_eq!(
            (read_processor_time(before), read_processor_time(after)),
            ((10, 100), (20, 200))
        );
        assert!((steal_percent((10, 100), (20, 200)) - 10.0).abs() < 0.01);
        assert!(steal_percent((10, 100), (10, 100)).abs() < 0.01);
    }

    #[test]
    fn a_watch_runs_before_every_other_process() {
        let policy = std::thread::spawn(|| {
            take_real_time_priority().unwrap();
            let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            // proc_pid_stat(5): the fields 40 and 41 are rt_priority and policy; the name's bracket
            // ends field 2.
            let fields: Vec<_> = stat
                .rsplit_once(')')
                .unwrap()
                .1
                .split_whitespace()
                .map(str::to_owned)
                .collect();
            fields[37..39].to_vec()
        });
        assert_eq!(
            policy.join().unwrap(),
            [REAL_TIME, "1"],
            "SCHED_FIFO is policy 1"
        );
    }

    #[test]
    fn a_watch_ends_and_has_seen_the_cores() {
        let watch = Watch::begin().unwrap();
        std::thread::sleep(TICK * 5);
        assert!(watch.end().unwrap().stall > Duration::ZERO);
    }
}
