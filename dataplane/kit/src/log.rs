//! JSON access logs: each worker formats lines into its own blocks, one thread writes them. When the writer is behind, lines are dropped
//! and counted; a worker never waits. The process's own messages are [`crate::diagnostics`].

use std::fmt::Display;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use crate::metrics::{Registry, Shard};

/// Bytes per block; a line that does not fit one is dropped and counted.
pub const BLOCK: usize = 64 << 10;
/// Blocks per worker; when all wait for the writer, lines are dropped.
pub const BLOCKS: usize = 16;
/// A line waits at most this long for its block to be handed over.
pub const FLUSH: Duration = Duration::from_millis(200);

/// Where lines go.
#[derive(Debug, Clone)]
pub enum Sink {
    Stdout,
    /// Appended to; reopened when it was renamed or removed.
    File(PathBuf),
}

/// The process's access log: owns the writer thread. Dropping the last worker's log and this ends it after the last line.
pub struct AccessLog {}

/// One worker's end. `!Send`, cheap to clone.
#[derive(Clone)]
pub struct WorkerLog {
    _inner: Rc<()>,
}

/// A line being written; [`Line::end`] (or drop) finishes it. Field names must be plain ASCII identifiers.
pub struct Line<'a> {
    _log: &'a WorkerLog,
}

impl AccessLog {
    /// Starts the writer. Counters: `canal_access_log_lines_total`, `canal_access_log_dropped_total{reason}`.
    pub fn start(sink: Sink, registry: &Registry) -> std::io::Result<Self> {
        let _ = (sink, registry);
        unreachable!("body lands in the next commit")
    }
    /// The end of the calling worker; spawns its flush task on the worker's `LocalSet`.
    pub fn worker(&self, shard: &Shard) -> WorkerLog {
        let _ = shard;
        unreachable!("body lands in the next commit")
    }
}

impl WorkerLog {
    /// Begins a line with `"time"` (RFC 3339, UTC, milliseconds).
    pub fn line(&self) -> Line<'_> {
        unreachable!("body lands in the next commit")
    }
    /// Hands over what is written so far.
    pub fn flush(&self) {
        unreachable!("body lands in the next commit")
    }
}

impl Line<'_> {
    /// A string, escaped.
    pub fn str(self, name: &str, value: &str) -> Self {
        let _ = (name, value);
        unreachable!("body lands in the next commit")
    }
    /// A string, left out when empty.
    pub fn some(self, name: &str, value: &str) -> Self {
        if value.is_empty() { self } else { self.str(name, value) }
    }
    /// Anything that displays, as a string, formatted straight into the block.
    pub fn display(self, name: &str, value: impl Display) -> Self {
        let _ = (name, value);
        unreachable!("body lands in the next commit")
    }
    /// A number.
    pub fn u64(self, name: &str, value: u64) -> Self {
        let _ = (name, value);
        unreachable!("body lands in the next commit")
    }
    /// A duration, as milliseconds with three decimals.
    pub fn millis(self, name: &str, value: Duration) -> Self {
        let _ = (name, value);
        unreachable!("body lands in the next commit")
    }
    /// A truth value.
    pub fn bool(self, name: &str, value: bool) -> Self {
        let _ = (name, value);
        unreachable!("body lands in the next commit")
    }
    /// Finishes the line.
    pub fn end(self) {}
}
