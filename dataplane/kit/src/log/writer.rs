//! The one thread that writes: blocks in, bytes out, blocks back. A failing disk loses lines and is counted; it stops nobody.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::Sink;
use crate::metrics::SharedCounter;

/// How often the file is looked for at its path.
const LOOK: Duration = Duration::from_secs(1);

/// Whole lines, and whose they are.
pub(super) struct Block {
    pub(super) bytes: Vec<u8>,
    pub(super) lines: u32,
    /// Whose queues the bytes count in until they are written, and how many each.
    parts: Vec<(Arc<AtomicUsize>, usize)>,
}

impl Block {
    /// An empty one with room for so many bytes.
    pub(super) fn with_capacity(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), lines: 0, parts: Vec::new() }
    }

    /// So many of the bytes count in `queue`.
    pub(super) fn count(&mut self, queue: &Arc<AtomicUsize>, bytes: usize) {
        match self.parts.last_mut() {
            Some((last, sum)) if Arc::ptr_eq(last, queue) => *sum += bytes,
            _ => self.parts.push((queue.clone(), bytes)),
        }
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.lines = 0;
        for (queue, bytes) in self.parts.drain(..) {
            queue.fetch_sub(bytes, Relaxed);
        }
    }
}

/// A block on its way to the writer.
pub(super) struct Full {
    pub(super) block: Block,
    /// Where the empty block goes.
    pub(super) home: mpsc::Sender<Block>,
}

pub(super) enum Target {
    Stdout,
    File { path: PathBuf, file: File, looked: Instant },
}

/// Who may read the log: the process's user writes, its group reads, others see no request.
const FILE_MODE: u32 = 0o640;

fn append(path: &PathBuf) -> io::Result<File> {
    let file = OpenOptions::new().create(true).append(true).mode(FILE_MODE).open(path)?;
    let known = file.metadata()?;
    // A file of an older version, or of whoever rotates it. Not our file, or no file: its owner decides.
    if known.is_file() && known.mode() & 0o7 != 0 {
        let _ = file.set_permissions(Permissions::from_mode(known.mode() & 0o7770));
    }
    Ok(file)
}

impl Target {
    pub(super) fn open(sink: Sink) -> io::Result<Self> {
        Ok(match sink {
            Sink::Stdout => Target::Stdout,
            Sink::File(path) => Target::File { file: append(&path)?, path, looked: Instant::now() },
        })
    }

    fn write(&mut self, block: &[u8]) -> io::Result<()> {
        match self {
            Target::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(block)?;
                out.flush()
            }
            Target::File { path, file, looked } => {
                if looked.elapsed() >= LOOK {
                    *looked = Instant::now();
                    let same = |a: &std::fs::Metadata, b: &std::fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
                    if !std::fs::metadata(&*path).is_ok_and(|there| file.metadata().is_ok_and(|here| same(&there, &here))) {
                        *file = append(path)?;
                    }
                }
                file.write_all(block)
            }
        }
    }
}

/// Writes until every sender is gone.
pub(super) fn run(mut target: Target, blocks: &mpsc::Receiver<Full>, written: &SharedCounter, failed: &SharedCounter) {
    let mut told = false;
    while let Ok(Full { mut block, home }) = blocks.recv() {
        match target.write(&block.bytes) {
            Ok(()) => written.add(block.lines.into()),
            Err(error) => {
                failed.add(block.lines.into());
                // Once: a full disk would otherwise fill whatever stderr goes to as well.
                if !std::mem::replace(&mut told, true) {
                    tracing::error!(%error, "access log lines are lost; canal_access_log_dropped_total counts them");
                }
            }
        }
        block.clear();
        // The worker may have ended.
        let _ = home.send(block);
    }
}
