//! Protects the process's memory: it is never swapped out, never in a core dump, and never readable
//! by another process of its user.
//!
//! It does not depend on what the memory contains.

use std::io;

use rustix::mm::MlockAllFlags;
use rustix::process::{DumpableBehavior, Resource, Rlimit};

/// A protection that the kernel refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    #[error(
        "locking memory: {0}; fix: give the process CAP_IPC_LOCK, or lift its limit of locked memory (LimitMEMLOCK=infinity, ulimit -l)"
    )]
    Lock(io::Error),
    #[error("disabling core dumps: {0}; fix: make /proc/self/coredump_filter writable")]
    Dump(io::Error),
}

/// Confines the process. Call it before there are keys and threads.
///
/// All memory, present and future, is locked once it is touched. `PR_SET_DUMPABLE` is 0, so that
/// neither a debugger of the same user nor `/proc/PID/mem` can read it. Core dumps are off, and so
/// is every kind of memory in `coredump_filter`, because a crash handler has a limit of its own.
///
/// # Errors
/// The kernel refuses to lock the memory or to switch core dumps off.
pub fn confine() -> Result<(), ConfineError> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    rustix::process::setrlimit(Resource::Core, none).map_err(|e| ConfineError::Dump(e.into()))?;
    // Before the process is undumpable, which makes the file inaccessible. Kernels without core
    // dumps do not have the file.
    match std::fs::write("/proc/self/coredump_filter", "0") {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(ConfineError::Dump(e)),
        _ => {}
    }
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|e| ConfineError::Dump(e.into()))?;
    lift_lock_limit();
    let all = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    rustix::mm::mlockall(all).map_err(|e| ConfineError::Lock(e.into()))
}

/// Lifts the limit of locked memory, for which CAP_SYS_RESOURCE suffices. Without it, locking
/// itself reports what is missing.
fn lift_lock_limit() {
    let endless = Rlimit {
        current: None,
        maximum: None,
    };
    let _ = rustix::process::setrlimit(Resource::Memlock, endless);
}
