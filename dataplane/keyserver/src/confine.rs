//! Keeps the process's memory where it is: never swapped out, never in a core dump, never read by another process of its user. What is in that
//! memory is not known here.

use std::io;

use rustix::mm::MlockAllFlags;
use rustix::process::{DumpableBehavior, Resource, Rlimit};

/// A protection that the kernel refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    #[error("locking memory: {0}; give the process CAP_IPC_LOCK, or lift its limit of locked memory (LimitMEMLOCK=infinity, ulimit -l)")]
    Lock(io::Error),
    #[error("switching core dumps off: {0}")]
    Dump(io::Error),
}

/// Confines the process; call it before there are keys and threads.
///
/// All memory, present and future, is locked once it is touched; `PR_SET_DUMPABLE` is 0, so that neither a debugger of the same user nor
/// `/proc/PID/mem` shows it; core dumps are off, and so is every kind of memory in `coredump_filter`, where a crash handler has a limit of
/// its own.
pub fn confine() -> Result<(), ConfineError> {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(Resource::Core, none).map_err(|e| ConfineError::Dump(e.into()))?;
    // Before the process is undumpable, which takes the file away from it. Kernels without core dumps have none.
    match std::fs::write("/proc/self/coredump_filter", "0") {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(ConfineError::Dump(e)),
        _ => {}
    }
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(|e| ConfineError::Dump(e.into()))?;
    lift_lock_limit();
    let all = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    rustix::mm::mlockall(all).map_err(|e| ConfineError::Lock(e.into()))
}

/// With CAP_SYS_RESOURCE alone the limit can be lifted; otherwise the lock itself says what is missing.
fn lift_lock_limit() {
    let endless = Rlimit { current: None, maximum: None };
    let _ = rustix::process::setrlimit(Resource::Memlock, endless);
}
