//! The writer thread: it receives blocks, writes their bytes, and returns the blocks. A failing
//! disk loses lines, which are counted; no worker stops.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use canal_runtime::metrics::SharedCounter;

use super::{LogSink, LogTails, PendingLines};

/// Interval at which the writer checks that the open file is still the one at its path. After
/// logrotate has renamed the file, lines of at most a second are still written to the old one.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Whole lines and the tenants they belong to.
pub(super) struct Block {
    pub(super) bytes: Vec<u8>,
    pub(super) lines: u32,
    /// Owner of each run of bytes, in order: the tenant's queue, which counts the bytes until they
    /// are written.
    parts: Vec<(Option<Arc<PendingLines>>, usize)>,
}

impl Block {
    /// Creates an empty block with a capacity of `bytes`.
    pub(super) fn with_capacity(bytes: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(bytes),
            lines: 0,
            parts: Vec::new(),
        }
    }

    /// Assigns the last line's bytes to `queue`, or to no tenant.
    pub(super) fn count(&mut self, queue: Option<&Arc<PendingLines>>, bytes: usize) {
        match self.parts.last_mut() {
            Some((last, sum)) if last.as_ref().map(Arc::as_ptr) == queue.map(Arc::as_ptr) => {
                *sum += bytes
            }
            _ => self.parts.push((queue.cloned(), bytes)),
        }
    }

    /// Copies the lines to the tails, those of each tenant separately.
    fn keep(&self, tails: &LogTails) {
        let mut rest = self.bytes.as_slice();
        for (queue, bytes) in &self.parts {
            let (lines, after) = rest.split_at((*bytes).min(rest.len()));
            tails.push(queue.as_ref().map(|queue| &queue.tenant), lines);
            rest = after;
        }
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.lines = 0;
        for (queue, bytes) in self.parts.drain(..) {
            if let Some(queue) = queue {
                queue.bytes.fetch_sub(bytes, Relaxed);
            }
        }
    }
}

/// A block that is sent to the writer.
pub(super) struct FilledBlock {
    pub(super) block: Block,
    /// Returns the empty block to its worker.
    pub(super) home: mpsc::Sender<Block>,
}

pub(super) enum SinkTarget {
    Stdout,
    File {
        path: PathBuf,
        file: File,
        checked_at: Instant,
    },
}

/// Mode of the log file: the process's user writes, its group reads, and others cannot read the
/// requests.
const FILE_MODE: u32 = 0o640;

fn append(path: &PathBuf) -> io::Result<File> {
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(FILE_MODE)
        .open(path)?;
    let known = file.metadata()?;
    // An earlier version or a log rotator may have created the file readable by others. If another
    // user owns it, the call fails and the owner's mode stays.
    if known.is_file() && known.mode() & 0o7 != 0 {
        let _ = file.set_permissions(Permissions::from_mode(known.mode() & 0o7770));
    }
    Ok(file)
}

impl SinkTarget {
    pub(super) fn open(sink: LogSink) -> io::Result<Self> {
        Ok(match sink {
            LogSink::Stdout => SinkTarget::Stdout,
            LogSink::File(path) => SinkTarget::File {
                file: append(&path)?,
                path,
                checked_at: Instant::now(),
            },
        })
    }

    fn write(&mut self, block: &[u8]) -> io::Result<()> {
        match self {
            SinkTarget::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(block)?;
                out.flush()
            }
            SinkTarget::File {
                path,
                file,
                checked_at,
            } => {
                if checked_at.elapsed() >= POLL_INTERVAL {
                    *checked_at = Instant::now();
                    let same = |a: &std::fs::Metadata, b: &std::fs::Metadata| {
                        (a.dev(), a.ino()) == (b.dev(), b.ino())
                    };
                    if !std::fs::metadata(&*path)
                        .is_ok_and(|there| file.metadata().is_ok_and(|here| same(&there, &here)))
                    {
                        *file = append(path)?;
                    }
                }
                file.write_all(block)
            }
        }
    }
}

/// Writes blocks until every sender is dropped.
pub(super) fn run(
    mut target: SinkTarget,
    blocks: &mpsc::Receiver<FilledBlock>,
    tails: &LogTails,
    (written, failed): (&SharedCounter, &SharedCounter),
) {
    let mut is_reported = false;
    while let Ok(FilledBlock { mut block, home }) = blocks.recv() {
        match target.write(&block.bytes) {
            Ok(()) => written.add(block.lines.into()),
            Err(error) => {
                failed.add(block.lines.into());
                // The error is logged once, because stderr may go to the same full disk.
                if !std::mem::replace(&mut is_reported, true) {
                    tracing::error!(%error, "access log: cannot write, so lines are lost; canal_access_log_dropped_total counts them");
                }
            }
        }
        block.keep(tails);
        block.clear();
        // This fails if the worker has ended.
        let _ = home.send(block);
    }
}
