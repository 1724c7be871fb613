//! JSON access logs: each worker formats lines into its own blocks, one thread writes them. When the writer is behind, lines are dropped
//! and counted; a worker never waits. The process's own messages are [`crate::diagnostics`].

mod json;
mod writer;

use std::cell::{Cell, RefCell};
use std::fmt::{Display, Write};
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use crate::metrics::{Counter, Counters, Family, Registry, Shard};
use json::Escaped;
use writer::Full;

/// Bytes per block.
pub const BLOCK: usize = 64 << 10;
/// Blocks per worker; when all wait for the writer, lines are dropped.
pub const BLOCKS: usize = 16;
/// Bytes of the longest line; a longer one is dropped and counted.
pub const LINE_MAX: usize = 16 << 10;
const _: () = assert!(LINE_MAX * 2 <= BLOCK);
/// A line waits at most this long for its block to be handed over.
pub const FLUSH: Duration = Duration::from_millis(200);

/// Where lines go.
#[derive(Debug, Clone)]
pub enum Sink {
    Stdout,
    /// Appended to; opened anew within a second after it was renamed or removed.
    File(PathBuf),
}

/// The process's access log: owns the writer thread, which ends once this and all workers' ends are dropped.
pub struct AccessLog {
    full: mpsc::Sender<Full>,
    dropped: Counters,
    thread: JoinHandle<()>,
}

/// One worker's end. `!Send`, cheap to clone.
#[derive(Clone)]
pub struct WorkerLog {
    inner: Rc<Inner>,
}

struct Inner {
    full: mpsc::Sender<Full>,
    home: mpsc::Sender<Vec<u8>>,
    back: mpsc::Receiver<Vec<u8>>,
    current: RefCell<Option<Vec<u8>>>,
    lines: Cell<u32>,
    /// Blocks made so far.
    made: Cell<usize>,
    behind: Counter,
    too_long: Counter,
}

/// A line being written; [`Line::end`] (or drop) finishes it. Field names must be plain ASCII identifiers.
pub struct Line<'a> {
    log: &'a Inner,
    /// `None` once there is no block: the line is lost, and was counted.
    block: Option<Vec<u8>>,
    start: usize,
}

impl AccessLog {
    /// Starts the writer. Counters: `canal_access_log_lines_total`, `canal_access_log_dropped_total{reason}` with the reasons
    /// `writer_behind`, `too_long` and `write_failed`.
    pub fn start(sink: Sink, registry: &Registry) -> std::io::Result<Self> {
        let written = registry.counters(Family::new("canal_access_log_lines_total", "Access log lines written.", &[])).shared(&[]);
        let dropped = registry.counters(Family::new("canal_access_log_dropped_total", "Access log lines lost, by reason.", &["reason"]));
        let failed = dropped.shared(&["write_failed"]);
        let target = writer::Target::open(sink)?;
        let (full, blocks) = mpsc::channel();
        let run = move || writer::run(target, &blocks, &written, &failed);
        let thread = std::thread::Builder::new().name("access-log".into()).spawn(run)?;
        Ok(Self { full, dropped, thread })
    }

    /// The end of the calling worker; spawns its flush task on the worker's `LocalRuntime`.
    pub fn worker(&self, shard: &Shard) -> WorkerLog {
        let (home, back) = mpsc::channel();
        let inner = Rc::new(Inner {
            full: self.full.clone(),
            home,
            back,
            current: RefCell::new(None),
            lines: Cell::new(0),
            made: Cell::new(0),
            behind: shard.counter(&self.dropped, &["writer_behind"]),
            too_long: shard.counter(&self.dropped, &["too_long"]),
        });
        tokio::task::spawn_local(flush_regularly(Rc::downgrade(&inner)));
        WorkerLog { inner }
    }

    /// Waits until every line is written; call it after the workers have ended, it waits for them.
    pub fn finish(self) {
        drop(self.full);
        // A writer that panicked has lost its lines; the panic was reported.
        let _ = self.thread.join();
    }
}

async fn flush_regularly(log: Weak<Inner>) {
    loop {
        tokio::time::sleep(FLUSH).await;
        match log.upgrade() {
            Some(log) => log.flush(),
            None => return,
        }
    }
}

impl WorkerLog {
    /// Begins a line with `"time"` (RFC 3339, UTC, milliseconds).
    pub fn line(&self) -> Line<'_> {
        let block = self.inner.block();
        if block.is_none() {
            self.inner.behind.inc();
        }
        let start = block.as_ref().map_or(0, Vec::len);
        let mut line = Line { log: &self.inner, block, start };
        if let Some(b) = &mut line.block {
            b.extend_from_slice(b"{\"time\":\"");
            json::time(b, SystemTime::now());
            b.push(b'"');
        }
        line
    }

    /// Hands over what is written so far.
    pub fn flush(&self) {
        self.inner.flush();
    }
}

impl Inner {
    /// A block with room for a line: the current one, one that came back, or a new one.
    fn block(&self) -> Option<Vec<u8>> {
        match self.current.take() {
            Some(b) if b.len() + LINE_MAX <= BLOCK => return Some(b),
            Some(b) => self.hand_over(b),
            None => {}
        }
        if let Ok(b) = self.back.try_recv() {
            return Some(b);
        }
        if self.made.get() == BLOCKS {
            return None;
        }
        self.made.set(self.made.get() + 1);
        Some(Vec::with_capacity(BLOCK))
    }

    fn flush(&self) {
        if let Some(b) = self.current.take() {
            self.hand_over(b);
        }
    }

    fn hand_over(&self, block: Vec<u8>) {
        // Fails only when the writer has died, and then there is nobody to tell.
        let _ = self.full.send(Full { block, lines: self.lines.replace(0), home: self.home.clone() });
    }

    /// Takes a block back after a line; a line begun while another was open leaves two.
    fn keep(&self, block: Vec<u8>) {
        match self.current.take() {
            // This one has the earlier lines.
            Some(younger) => {
                self.hand_over(block);
                self.current.replace(Some(younger));
            }
            None => {
                self.current.replace(Some(block));
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.flush();
    }
}

impl Line<'_> {
    /// Writes `,"name":` and lets `value` write on, unless the line is lost or too long already.
    fn field(mut self, name: &str, value: impl FnOnce(&mut Vec<u8>)) -> Self {
        if let Some(b) = &mut self.block
            && b.len() - self.start <= LINE_MAX
        {
            b.extend_from_slice(b",\"");
            b.extend_from_slice(name.as_bytes());
            b.extend_from_slice(b"\":");
            value(b);
        }
        self
    }

    /// A string, escaped.
    pub fn str(self, name: &str, value: &str) -> Self {
        self.field(name, |b| {
            b.push(b'"');
            json::escape(b, value);
            b.push(b'"');
        })
    }

    /// A string, left out when empty.
    pub fn some(self, name: &str, value: &str) -> Self {
        if value.is_empty() { self } else { self.str(name, value) }
    }

    /// Anything that displays, as a string, formatted straight into the block.
    pub fn display(self, name: &str, value: impl Display) -> Self {
        self.field(name, |b| {
            b.push(b'"');
            // Writing to memory fails only if `value` says so; then the field ends early.
            let _ = write!(Escaped(b), "{value}");
            b.push(b'"');
        })
    }

    /// A number.
    pub fn u64(self, name: &str, value: u64) -> Self {
        self.field(name, |b| {
            let _ = write!(Escaped(b), "{value}");
        })
    }

    /// A duration, as milliseconds with three decimals.
    pub fn millis(self, name: &str, value: Duration) -> Self {
        let micros = value.as_micros();
        self.field(name, |b| {
            let _ = write!(Escaped(b), "{}.{:03}", micros / 1000, micros % 1000);
        })
    }

    /// A truth value.
    pub fn bool(self, name: &str, value: bool) -> Self {
        self.field(name, |b| b.extend_from_slice(if value { b"true" } else { b"false" }))
    }

    /// Finishes the line.
    pub fn end(self) {}
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        let Some(mut b) = self.block.take() else { return };
        b.extend_from_slice(b"}\n");
        if b.len() - self.start > LINE_MAX {
            b.truncate(self.start);
            self.log.too_long.inc();
        } else {
            self.log.lines.set(self.log.lines.get() + 1);
        }
        self.log.keep(b);
    }
}

#[cfg(test)]
mod tests;
