//! Notices when the machine stands still, as a virtual machine does whose host has other work, and runs again what was measured meanwhile. What a
//! test bounds, and why, it does not know.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;

/// Time between two looks at the clock.
const TICK: Duration = Duration::from_millis(10);
/// A look that is late by so much means that the core stood still: it has the highest priority there is among threads that share a core.
const LATE: Duration = Duration::from_millis(250);
/// Measurements at most, the first one among them.
const TRIES_MAX: u32 = 3;
/// The nice value that goes first.
const FIRST: i32 = -20;

/// Measures, and measures again if the result is an error and the machine stood still for [`LATE`] or longer meanwhile: it says nothing of the mesh
/// then. Each repetition is printed. An error on a machine that ran is an error at once.
///
/// # Errors
/// That of the last measurement.
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

/// Whether an error says nothing of the mesh, and another try is left.
fn may_repeat(stood_still: Duration, tries: u32) -> bool {
    stood_still >= LATE && tries < TRIES_MAX
}

/// Runs something, and says for how long a core stood still at most meanwhile.
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

/// The longest delay of a thread that wants a core for a moment every [`TICK`].
fn watch(core: usize, is_over: &AtomicBool) -> Duration {
    let mut cores = CpuSet::new();
    cores.set(core);
    rustix::thread::sched_setaffinity(None, &cores).expect("the core is one of those that are allowed");
    // Fails only for want of privileges, without which there are no worlds either.
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
    fn only_what_a_standstill_may_have_spoilt_is_measured_again() {
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
