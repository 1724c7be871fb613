//! JSON access logs: each worker formats lines into its own blocks, one thread writes them. When the writer is behind, lines are dropped
//! and counted, first those of tenants that have their share of the queue; a worker never waits. The process's own messages are
//! [`crate::diagnostics`]. Start at [`AccessLog::start`], then [`WorkerLog::line_of`].

mod json;
mod writer;

use std::cell::{Cell, RefCell};
use std::fmt::{Display, Write};
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use canal_model::ids::TenantName;
use canal_model::share::{ShareKind, Shares};

use crate::metrics::{Counters, Family, Registry, Shard};
use json::Escaped;
use writer::{Block, Full};

/// Bytes per block.
pub const BLOCK: usize = 64 << 10;
/// Blocks per worker, made when they are needed; when all wait for the writer, lines are dropped. A tenant's share of them, a quarter, has
/// room for a tenth of a second of 20,000 lines a second.
pub const BLOCKS: usize = 64;
/// While more blocks than this wait, the current one is filled and not handed over early: it would only wait with them.
const EARLY_BLOCKS_MAX: usize = 2;
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
    home: mpsc::Sender<Block>,
    back: mpsc::Receiver<Block>,
    /// Blocks that came back.
    free: RefCell<Vec<Block>>,
    current: RefCell<Option<Block>>,
    /// Blocks made so far.
    made: Cell<usize>,
    shard: Shard,
    dropped: Counters,
}

/// What one tenant may have waiting for the writer at one worker, and what it has.
pub struct TenantLogQueue {
    tenant: TenantName,
    max: Cell<usize>,
    waiting: Arc<AtomicUsize>,
}

impl TenantLogQueue {
    /// The queue of a tenant with the shares that the provider wrote for it.
    pub fn new(tenant: &TenantName, shares: &Shares) -> Self {
        let queue = Self { tenant: tenant.clone(), max: Cell::new(0), waiting: Arc::default() };
        queue.set_shares(shares);
        queue
    }

    /// Lines of the tenant wait.
    pub fn is_waiting(&self) -> bool {
        self.waiting.load(Relaxed) > 0
    }

    /// Takes over what the provider wrote for the tenant.
    pub fn set_shares(&self, shares: &Shares) {
        let max = shares.get(ShareKind::AccessLogBytes).of((BLOCKS * BLOCK) as u64);
        self.max.set(usize::try_from(max).unwrap_or(usize::MAX));
    }
}

/// A line being written; [`Line::end`] (or drop) finishes it. Field names must be plain ASCII identifiers.
pub struct Line<'a> {
    log: &'a Inner,
    queue: Option<&'a TenantLogQueue>,
    /// `None` once there is no block: the line is lost, and was counted.
    block: Option<Block>,
    start: usize,
}

impl AccessLog {
    /// Starts the writer. Counters: `canal_access_log_lines_total`, `canal_access_log_dropped_total{reason,tenant}` with the reasons
    /// `tenant_share`, `writer_behind`, `too_long` and `write_failed`; the tenant is empty where it is not known.
    pub fn start(sink: Sink, registry: &Registry) -> std::io::Result<Self> {
        let written = registry.counters(Family::new("canal_access_log_lines_total", "Access log lines written.", &[])).shared(&[]);
        let dropped =
            registry.counters(Family::new("canal_access_log_dropped_total", "Access log lines lost, by reason.", &["reason", "tenant"]));
        let failed = dropped.shared(&["write_failed", ""]);
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
            free: RefCell::default(),
            current: RefCell::new(None),
            made: Cell::new(0),
            shard: shard.clone(),
            dropped: self.dropped.clone(),
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
            Some(log) if log.waiting() <= EARLY_BLOCKS_MAX => log.flush(),
            Some(_) => {}
            None => return,
        }
    }
}

impl WorkerLog {
    /// Begins a line of no tenant with `"time"` (RFC 3339, UTC, milliseconds).
    pub fn line(&self) -> Line<'_> {
        self.begin(None)
    }

    /// Begins a line of a tenant. It is lost while so much of the tenant's waits that its share is used up.
    pub fn line_of<'a>(&'a self, queue: &'a TenantLogQueue) -> Line<'a> {
        self.begin(Some(queue))
    }

    fn begin<'a>(&'a self, queue: Option<&'a TenantLogQueue>) -> Line<'a> {
        let inner = &*self.inner;
        let block = match queue {
            Some(queue) if queue.waiting.load(Relaxed) >= queue.max.get() => {
                inner.drop_line("tenant_share", Some(queue));
                None
            }
            _ => inner.block().or_else(|| {
                inner.drop_line("writer_behind", queue);
                None
            }),
        };
        let start = block.as_ref().map_or(0, |block| block.bytes.len());
        let mut line = Line { log: inner, queue, block, start };
        if let Some(Block { bytes, .. }) = &mut line.block {
            bytes.extend_from_slice(b"{\"time\":\"");
            json::time(bytes, SystemTime::now());
            bytes.push(b'"');
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
    fn block(&self) -> Option<Block> {
        match self.current.take() {
            Some(block) if block.bytes.len() + LINE_MAX <= BLOCK => return Some(block),
            Some(block) => self.hand_over(block),
            None => {}
        }
        let mut free = self.free.borrow_mut();
        free.extend(self.back.try_iter());
        if let Some(block) = free.pop() {
            return Some(block);
        }
        if self.made.get() == BLOCKS {
            return None;
        }
        self.made.set(self.made.get() + 1);
        Some(Block::with_capacity(BLOCK))
    }

    /// Blocks that the writer has.
    fn waiting(&self) -> usize {
        let mut free = self.free.borrow_mut();
        free.extend(self.back.try_iter());
        self.made.get() - free.len() - usize::from(self.current.borrow().is_some())
    }

    fn drop_line(&self, reason: &str, queue: Option<&TenantLogQueue>) {
        self.shard.counter(&self.dropped, &[reason, queue.map_or("", |queue| queue.tenant.as_str())]).inc();
    }

    fn flush(&self) {
        if let Some(block) = self.current.take() {
            self.hand_over(block);
        }
    }

    fn hand_over(&self, block: Block) {
        // Fails only when the writer has died, and then there is nobody to tell.
        let _ = self.full.send(Full { block, home: self.home.clone() });
    }

    /// Takes a block back after a line; a line begun while another was open leaves two.
    fn keep(&self, block: Block) {
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
        if let Some(Block { bytes: b, .. }) = &mut self.block
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
        let Some(mut block) = self.block.take() else { return };
        block.bytes.extend_from_slice(b"}\n");
        let length = block.bytes.len() - self.start;
        if length > LINE_MAX {
            block.bytes.truncate(self.start);
            self.log.drop_line("too_long", self.queue);
        } else {
            block.lines += 1;
            if let Some(queue) = self.queue {
                queue.waiting.fetch_add(length, Relaxed);
                block.count(&queue.waiting, length);
            }
        }
        self.log.keep(block);
    }
}

#[cfg(test)]
mod tests;
