//! Options of mimalloc, the allocator of the daemons. They decide how soon memory that is free goes
//! back to the kernel. The crate allocates nothing; each program names its own allocator. Start at
//! [`return_memory_soon`].
//!
//! By default mimalloc looks for empty pages of a thread after 10,000 of its slower allocations. A
//! daemon's threads are nearly idle after a large tenant was deleted, so its pages stay for
//! minutes. What another thread frees counts for the thread that allocated it, and stays until that
//! thread collects: [`collect`] and [`collect_before_park`] are for threads whose memory others
//! free.

use std::cell::Cell;
use std::ffi::{c_int, c_long};
use std::time::{Duration, Instant};

/// `mi_option_generic_collect`: a thread collects its empty pages after this number of slower
/// allocations.
const GENERIC_COLLECT: c_int = 34;
/// `mi_option_purge_delay`: time in milliseconds for which a free page waits to be used again.
const PURGE_DELAY: c_int = 15;

/// An option of mimalloc.
struct AllocatorOption {
    number: c_int,
    /// Variable by which an operator sets the option.
    environment: &'static str,
    value: c_long,
}

/// Values with which a gateway and a controller are within their bounds some seconds after a tenant
/// at all its shares was deleted. The instructions of a request stay the same.
const OPTIONS: [AllocatorOption; 2] = [
    AllocatorOption {
        number: GENERIC_COLLECT,
        environment: "MIMALLOC_GENERIC_COLLECT",
        value: 500,
    },
    AllocatorOption {
        number: PURGE_DELAY,
        environment: "MIMALLOC_PURGE_DELAY",
        value: 100,
    },
];

/// Has the allocator return free memory to the kernel soon, unless the environment has other values
/// for its options. Call it once, at the start of `main`.
pub fn return_memory_soon() {
    for option in OPTIONS {
        if std::env::var_os(option.environment).is_none() {
            // SAFETY: the function stores one number in a table, and ignores options that it lacks.
            unsafe { libmimalloc_sys::mi_option_set(option.number, option.value) };
        }
    }
}

/// Least time between two collections of a thread before it parks.
/// A collection walks over the thread's pages, so that a thread which parks often must not do it
/// each time. Nobody measured this value.
const PARK_INTERVAL: Duration = Duration::from_secs(1);

thread_local! {
    /// Time of the thread's last collection before it parked.
    static COLLECTED: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Collects the empty pages of this thread, those included whose memory other threads freed.
pub fn collect() {
    // SAFETY: the function works on the allocator's own state of this thread, from any thread and
    // at any time.
    unsafe { libmimalloc_sys::mi_collect(false) };
}

/// Calls [`collect`] at most once a second of each thread; for `on_thread_park` of a runtime.
pub fn collect_before_park() {
    let is_due = COLLECTED
        .get()
        .is_none_or(|last| last.elapsed() >= PARK_INTERVAL);
    if is_due {
        COLLECTED.set(Some(Instant::now()));
        collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the value of an option.
    fn value(option: c_int) -> c_long {
        // SAFETY: the function reads one number of a table.
        unsafe { libmimalloc_sys::mi_option_get(option) }
    }

    #[test]
    fn the_numbers_of_the_options_are_those_of_this_version() {
        // mimalloc's defaults. Another version may have other numbers for the same options.
        assert_eq!(
            (value(GENERIC_COLLECT), value(PURGE_DELAY)),
            (10_000, 1_000)
        );
        return_memory_soon();
        assert_eq!((value(GENERIC_COLLECT), value(PURGE_DELAY)), (500, 100));
    }
}
