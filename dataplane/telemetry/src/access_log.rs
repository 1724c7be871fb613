//! JSON access logs: each worker formats lines into its own blocks, and one thread writes the
//! blocks. When the writer is behind, lines are dropped and counted, first those of tenants that
//! have used their share of the queue. A worker never waits. Log messages of the process are in
//! [`canal_runtime::logging`]. Start at [`AccessLog::start`], then [`WorkerLog::line_of`].

mod json;
mod lines;
mod tail;
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
use canal_runtime::metrics::{CounterFamily, MetricFamily, MetricsShard, Registry};
use canal_runtime::share::decide_free_needed;

use json::Escaped;
use writer::{Block, FilledBlock};

pub(crate) use lines::count_lines;
pub use lines::{LineSender, Lines, QUEUE_BYTES_MAX, line_queue};
pub use tail::{LogTails, TAIL_BYTES_MAX, TAIL_BYTES_PER_TENANT_MAX};

/// Size of a block in bytes. At least two of the longest lines, which the assertion below checks; a
/// write of that size costs the disk and the system call little for each line.
pub const BLOCK: usize = 64 << 10;
/// Blocks per worker, allocated on demand. When all of them wait for the writer, lines are dropped.
/// A tenant's share is a quarter of them, which lasts for a tenth of a second at 20,000 lines per
/// second.
pub const BLOCKS: usize = 64;
/// While more blocks than this wait for the writer, the current block is filled up first, because
/// it would only wait behind them. One is being written and one is next.
const EARLY_BLOCKS_MAX: usize = 2;
/// Maximum length of a line in bytes. A longer line is dropped and counted. A path, a host and
/// header values of ordinary length fit in. Nobody measured the longest.
pub const LINE_MAX: usize = 16 << 10;
const _: () = assert!(LINE_MAX * 2 <= BLOCK);
/// Maximum time that a line waits before its block is handed over. A person who follows the file
/// does not notice it; a worker with little traffic writes five times a second.
pub const FLUSH: Duration = Duration::from_millis(200);

/// Destination of the log lines.
#[derive(Debug, Clone)]
pub enum LogSink {
    Stdout,
    /// Lines are appended to this file. It is opened again within a second after it was renamed or
    /// removed.
    File(PathBuf),
}

/// The process's access log. It owns the writer thread, which ends once this value and all workers'
/// logs are dropped.
pub struct AccessLog {
    full: mpsc::Sender<FilledBlock>,
    dropped: CounterFamily,
    tails: LogTails,
    thread: JoinHandle<()>,
}

/// The log of one worker. It is `!Send` and cheap to clone.
#[derive(Clone)]
pub struct WorkerLog {
    inner: Rc<Inner>,
}

struct Inner {
    full: mpsc::Sender<FilledBlock>,
    home: mpsc::Sender<Block>,
    back: mpsc::Receiver<Block>,
    /// Blocks that the writer has returned.
    free: RefCell<Vec<Block>>,
    current: RefCell<Option<Block>>,
    /// Number of blocks allocated so far.
    allocated: Cell<usize>,
    shard: MetricsShard,
    dropped: CounterFamily,
}

/// The queue of one tenant at one worker: its limit and its bytes that wait for the writer.
pub struct TenantLogQueue {
    max: Cell<usize>,
    waiting: Arc<PendingLines>,
}

/// Bytes of one tenant that wait for the writer.
struct PendingLines {
    tenant: TenantName,
    bytes: AtomicUsize,
}

impl TenantLogQueue {
    /// Creates the queue of a tenant with the shares that the provider configured for it.
    pub fn new(tenant: &TenantName, shares: &Shares) -> Self {
        let waiting = Arc::new(PendingLines {
            tenant: tenant.clone(),
            bytes: AtomicUsize::new(0),
        });
        let queue = Self {
            max: Cell::new(0),
            waiting,
        };
        queue.set_shares(shares);
        queue
    }

    /// Returns whether lines of the tenant wait for the writer.
    pub fn is_waiting(&self) -> bool {
        self.waiting.bytes.load(Relaxed) > 0
    }

    /// Applies the shares that the provider configured for the tenant.
    pub fn set_shares(&self, shares: &Shares) {
        let max = shares
            .get(ShareKind::AccessLogBytes)
            .of((BLOCKS * BLOCK) as u64);
        self.max.set(usize::try_from(max).unwrap_or(usize::MAX));
    }
}

/// A line under construction; [`LogLine::end`] (or drop) finishes it. Field names must be plain
/// ASCII identifiers.
pub struct LogLine<'a> {
    log: &'a Inner,
    queue: Option<&'a TenantLogQueue>,
    /// `None` if no block was available: the line is lost and was counted.
    block: Option<Block>,
    start: usize,
}

impl AccessLog {
    /// Starts the writer. Counters: `canal_access_log_lines_total`,
    /// `canal_access_log_dropped_total{reason,tenant}` with the reasons `tenant_share`,
    /// `writer_behind`, `too_long` and `write_failed`. `tenant` is empty if the tenant is not
    /// known.
    ///
    /// # Errors
    /// The file cannot be opened, or the thread cannot be started.
    pub fn start(sink: LogSink, registry: &Registry) -> std::io::Result<Self> {
        let written = registry
            .counters(MetricFamily::new(
                "canal_access_log_lines_total",
                "Access log lines written.",
                &[],
            ))
            .shared(&[]);
        let dropped = registry.counters(MetricFamily::new(
            "canal_access_log_dropped_total",
            "Access log lines lost, by reason.",
            &["reason", "tenant"],
        ));
        let failed = dropped.shared(&["write_failed", ""]);
        let target = writer::SinkTarget::open(sink)?;
        let (full, blocks) = mpsc::channel();
        let tails = LogTails::default();
        let for_writer = tails.clone();
        let run = move || writer::run(target, &blocks, &for_writer, (&written, &failed));
        let thread = std::thread::Builder::new()
            .name("access-log".into())
            .spawn(run)?;
        Ok(Self {
            full,
            dropped,
            tails,
            thread,
        })
    }

    /// Returns the newest lines, which operators read remotely.
    pub fn tails(&self) -> LogTails {
        self.tails.clone()
    }

    /// Creates the log of the calling worker and spawns its flush task on the worker's
    /// `LocalRuntime`.
    pub fn worker(&self, shard: &MetricsShard) -> WorkerLog {
        let (home, back) = mpsc::channel();
        let inner = Rc::new(Inner {
            full: self.full.clone(),
            home,
            back,
            free: RefCell::default(),
            current: RefCell::new(None),
            allocated: Cell::new(0),
            shard: shard.clone(),
            dropped: self.dropped.clone(),
        });
        tokio::task::spawn_local(flush_regularly(Rc::downgrade(&inner)));
        WorkerLog { inner }
    }

    /// Waits until every line is written. It must be called after the workers have ended, because
    /// it waits for their logs too.
    pub fn finish(self) {
        drop(self.full);
        // If the writer panicked, its lines are lost; the panic was reported.
        let _ = self.thread.join();
    }
}

async fn flush_regularly(log: Weak<Inner>) {
    loop {
        tokio::time::sleep(FLUSH).await;
        match log.upgrade() {
            // If the writer is behind, an early block would only wait with the others.
            Some(log) if log.waiting() <= EARLY_BLOCKS_MAX => log.flush(),
            Some(_) => {}
            None => return,
        }
    }
}

impl WorkerLog {
    /// Begins a line without a tenant, with `"time"` (RFC 3339, UTC, milliseconds).
    pub fn line(&self) -> LogLine<'_> {
        self.begin(None)
    }

    /// Begins a line of a tenant. The line is lost while the tenant's waiting bytes use up its
    /// share or the free part of the queue.
    pub fn line_of<'a>(&'a self, queue: &'a TenantLogQueue) -> LogLine<'a> {
        self.begin(Some(queue))
    }

    fn begin<'a>(&'a self, queue: Option<&'a TenantLogQueue>) -> LogLine<'a> {
        let inner = &*self.inner;
        let block = match queue {
            Some(queue) if inner.is_beyond_share(queue) => {
                inner.drop_line("tenant_share", Some(queue));
                None
            }
            _ => inner.block().or_else(|| {
                inner.drop_line("writer_behind", queue);
                None
            }),
        };
        let start = block.as_ref().map_or(0, |block| block.bytes.len());
        let mut line = LogLine {
            log: inner,
            queue,
            block,
            start,
        };
        if let Some(Block { bytes, .. }) = &mut line.block {
            bytes.extend_from_slice(b"{\"time\":\"");
            json::time(bytes, SystemTime::now());
            bytes.push(b'"');
        }
        line
    }

    /// Hands over the lines written so far.
    pub fn flush(&self) {
        self.inner.flush();
    }
}

impl Inner {
    /// Returns whether the waiting lines of a tenant use up its share, or what the shares of others
    /// leave it. Lines are not taken back, so some blocks stay free for tenants with few lines.
    fn is_beyond_share(&self, queue: &TenantLogQueue) -> bool {
        let waiting = queue.waiting.bytes.load(Relaxed);
        if waiting >= queue.max.get() {
            return true;
        }
        let needed = decide_free_needed((waiting + LINE_MAX) as u64, (BLOCKS * BLOCK) as u64);
        let has_less =
            |free: usize| needed > ((BLOCKS - self.allocated.get() + free) * BLOCK) as u64;
        if !has_less(self.free.borrow().len()) {
            return false;
        }
        // Blocks that the writer has returned meanwhile count too.
        let mut free = self.free.borrow_mut();
        free.extend(self.back.try_iter());
        has_less(free.len())
    }

    /// Returns a block with space for a line: the current one, one that the writer returned, or a
    /// new one.
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
        if self.allocated.get() == BLOCKS {
            return None;
        }
        self.allocated.set(self.allocated.get() + 1);
        Some(Block::with_capacity(BLOCK))
    }

    /// Returns the number of blocks that the writer has.
    fn waiting(&self) -> usize {
        let mut free = self.free.borrow_mut();
        free.extend(self.back.try_iter());
        self.allocated.get() - free.len() - usize::from(self.current.borrow().is_some())
    }

    fn drop_line(&self, reason: &str, queue: Option<&TenantLogQueue>) {
        self.shard
            .counter(
                &self.dropped,
                &[
                    reason,
                    queue.map_or("", |queue| queue.waiting.tenant.as_str()),
                ],
            )
            .inc();
    }

    fn flush(&self) {
        if let Some(block) = self.current.take() {
            self.hand_over(block);
        }
    }

    fn hand_over(&self, block: Block) {
        // This fails only if the writer has ended, and then the lines have no destination.
        let _ = self.full.send(FilledBlock {
            block,
            home: self.home.clone(),
        });
    }

    /// Stores the block after a line. A line begun while another was open leaves two blocks.
    fn keep(&self, block: Block) {
        match self.current.take() {
            // The returned block has the earlier lines, so it is written first.
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

impl LogLine<'_> {
    /// Writes `,"name":` and lets `value` append the rest, unless the line is lost or too long
    /// already.
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

    /// Adds a string with JSON escapes.
    pub fn str(self, name: &str, value: &str) -> Self {
        self.field(name, |b| {
            b.push(b'"');
            json::escape(b, value);
            b.push(b'"');
        })
    }

    /// Adds a string unless it is empty.
    pub fn some(self, name: &str, value: &str) -> Self {
        if value.is_empty() {
            self
        } else {
            self.str(name, value)
        }
    }

    /// Adds anything that implements `Display` as a string, formatted straight into the block.
    pub fn display(self, name: &str, value: impl Display) -> Self {
        self.field(name, |b| {
            b.push(b'"');
            // Writing to memory fails only if `value` reports an error; the field then ends early.
            let _ = write!(Escaped(b), "{value}");
            b.push(b'"');
        })
    }

    /// Adds an unsigned integer as a JSON number.
    pub fn u64(self, name: &str, value: u64) -> Self {
        self.field(name, |b| {
            let _ = write!(Escaped(b), "{value}");
        })
    }

    /// Adds a duration in milliseconds with three decimals.
    pub fn millis(self, name: &str, value: Duration) -> Self {
        let micros = value.as_micros();
        self.field(name, |b| {
            let _ = write!(Escaped(b), "{}.{:03}", micros / 1000, micros % 1000);
        })
    }

    /// Adds a boolean as `true` or `false`.
    pub fn bool(self, name: &str, value: bool) -> Self {
        self.field(name, |b| {
            b.extend_from_slice(if value { b"true" } else { b"false" })
        })
    }

    /// Finishes the line and stores its block.
    pub fn end(self) {}
}

impl Drop for LogLine<'_> {
    fn drop(&mut self) {
        let Some(mut block) = self.block.take() else {
            return;
        };
        block.bytes.extend_from_slice(b"}\n");
        let length = block.bytes.len() - self.start;
        // The length is known only now; the truncated block stays usable.
        if length > LINE_MAX {
            block.bytes.truncate(self.start);
            self.log.drop_line("too_long", self.queue);
        } else {
            block.lines += 1;
            if let Some(queue) = self.queue {
                queue.waiting.bytes.fetch_add(length, Relaxed);
            }
            block.count(self.queue.map(|queue| &queue.waiting), length);
        }
        self.log.keep(block);
    }
}

#[cfg(test)]
mod tests;
