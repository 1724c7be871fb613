//! Detects that the machine stands still, as a virtual machine does when its host is busy, and repeats the measurement of that time. It
//! does not know what a test measures.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;

/// Interval between two reads of the clock.
const TICK: Duration = Duration::from_millis(10);
/// A read that is late by this much means that the core stood still: the thread has the highest priority among threads that share a core.
const LATE: Duration = Duration::from_millis(250);
/// Maximum number of measurements, the first included.
const TRIES_MAX: u32 = 3;
/// Nice value that runs first.
const FIRST: i32 = -20;

/// Measures once, and again if the result is an error and the machine stood still for [`LATE`] or longer meanwhile, because such a result
/// says nothing about the mesh. Each repetition is printed. An error without a standstill is returned at once.
///
/// # Errors
/// Returns the error of the last measurement.
pub fn measure<T>(what: &str, mut once: impl FnMut() -> Result<T, String>) -> Result<T, String> {
    let mut tries = 0;
    loop {
        let (result, stood_still) = while_watching(&mut once);
        tries += 1;
        match result {
            Err(why) if may_repeat(stood_still, tries) => {
                println!("{what}: measured again, because the machine stood still for {stood_still:?} meanwhile: {why}");
            }
            Err(why) => return Err(format!("{why} (the machine stood still for {stood_still:?} at most; try {tries})")),
            Ok(value) => return Ok(value),
        }
    }
}

/// Returns whether an error says nothing about the mesh and another attempt is left.
fn may_repeat(stood_still: Duration, tries: u32) -> bool {
    stood_still >= LATE && tries < TRIES_MAX
}

/// Runs `run` and returns the longest standstill of a core meanwhile.
fn while_watching<T>(run: impl FnOnce() -> T) -> (T, Duration) {
    let is_over = AtomicBool::new(false);
    let allowed = rustix::thread::sched_getaffinity(None).expect("a thread may ask for its cores");
    let cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
    std::thread::scope(|scope| {
        let is_over_now = &is_over;
        let watches: Vec<_> = cores.map(|core| scope.spawn(move || watch(core, is_over_now))).collect();
        let result = run();
        is_over.store(true, Ordering::Relaxed);
        let longest = watches.into_iter().map(|watch| watch.join().expect("a watch ends")).max();
        (result, longest.unwrap_or_default())
    })
}

/// Returns the longest delay of a thread that needs a core briefly every [`TICK`].
fn watch(core: usize, is_over: &AtomicBool) -> Duration {
    let mut cores = CpuSet::new();
    cores.set(core);
    rustix::thread::sched_setaffinity(None, &cores).expect("the core is one of those that are allowed");
    // This fails only without privileges, and without them there are no worlds either.
    rustix::process::setpriority_process(None, FIRST).expect("the thread may go first");
    let mut longest = Duration::ZERO;
    while !is_over.load(Ordering::Relaxed) {
        let looked = Instant::now();
        std::thread::sleep(TICK);
        longest = longest.max(looked.elapsed().saturating_sub(TICK));
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_measurements_during_a_standstill_are_repeated() {
        let ms = Duration::from_millis;
        for (stood_still, tries, wanted) in [(249, 1, false), (250, 1, true), (900, 2, true), (900, 3, false)] {
            assert_eq!(may_repeat(ms(stood_still), tries), wanted, "{stood_still} ms, try {tries}");
        }
        let (mut tries, error) = (0, Err::<(), _>("slow".to_owned()));
        let why = measure("a test", || {
            tries += 1;
            error.clone()
        });
        assert!(why.expect_err("it fails each time").starts_with("slow (the machine stood still for "));
        assert!((1..=TRIES_MAX).contains(&tries), "{tries}");
    }
}
