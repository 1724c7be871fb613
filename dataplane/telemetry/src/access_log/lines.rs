//! A queue of lines that is bounded in bytes. The writer never waits: lines that do not fit are
//! dropped and counted.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::sync::mpsc;

/// Bytes that may wait for a slow reader. Four seconds of what one observation carries
/// (`LINE_BYTES_PER_SECOND`).
pub const QUEUE_BYTES_MAX: usize = 1 << 20;
/// Returns the number of complete lines.
pub(crate) fn count_lines(lines: &[u8]) -> u64 {
    lines.iter().filter(|byte| **byte == b'\n').count() as u64
}

/// Cost of an item in addition to its bytes. About what the queue's own entry takes.
const ITEM_BYTES: u64 = 64;

#[derive(Debug, Default)]
struct SharedLines {
    queued: AtomicU64,
    dropped: AtomicU64,
}

/// The sender of the queue.
#[derive(Debug, Clone)]
pub struct LineSender {
    items: mpsc::UnboundedSender<Bytes>,
    shared: Arc<SharedLines>,
}

/// The receiver of the queue.
#[derive(Debug)]
pub struct Lines {
    items: mpsc::UnboundedReceiver<Bytes>,
    shared: Arc<SharedLines>,
}

/// Creates a queue of [`QUEUE_BYTES_MAX`]. Each item is one or more whole lines.
pub fn line_queue() -> (LineSender, Lines) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let shared = Arc::<SharedLines>::default();
    (
        LineSender {
            items: sender,
            shared: shared.clone(),
        },
        Lines {
            items: receiver,
            shared,
        },
    )
}

impl LineSender {
    /// Queues lines if they fit. Returns `false` if they were dropped or the reader is gone.
    pub fn send(&self, lines: Bytes) -> bool {
        let cost = lines.len() as u64 + ITEM_BYTES;
        // The cost is added before the comparison, so that concurrent senders cannot exceed the
        // limit together.
        if self.shared.queued.fetch_add(cost, Relaxed) + cost > QUEUE_BYTES_MAX as u64 {
            self.shared.queued.fetch_sub(cost, Relaxed);
            self.shared.dropped.fetch_add(count_lines(&lines), Relaxed);
            return false;
        }
        // The result is false for a full queue too; senders use `is_closed` to detect that the
        // reader is gone.
        self.items.send(lines).is_ok()
    }

    /// Resolves when the reader is gone.
    pub async fn closed(&self) {
        self.items.closed().await;
    }

    /// Returns whether the reader is gone.
    pub fn is_closed(&self) -> bool {
        self.items.is_closed()
    }
}

impl Lines {
    /// Returns the next lines; `None` once all senders are dropped.
    pub async fn recv(&mut self) -> Option<Bytes> {
        std::future::poll_fn(|cx| self.poll_recv(cx)).await
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let polled = self.items.poll_recv(cx);
        if let Poll::Ready(next) = &polled {
            self.took(next.as_ref());
        }
        polled
    }

    /// Returns the next lines if some are queued.
    pub fn try_recv(&mut self) -> Option<Bytes> {
        let next = self.items.try_recv().ok();
        self.took(next.as_ref());
        next
    }

    fn took(&self, lines: Option<&Bytes>) {
        if let Some(lines) = lines {
            self.shared
                .queued
                .fetch_sub(lines.len() as u64 + ITEM_BYTES, Relaxed);
        }
    }

    /// Returns the number of lines dropped since the last call.
    pub fn take_dropped(&self) -> u64 {
        self.shared.dropped.swap(0, Relaxed)
    }
}

impl futures::Stream for Lines {
    type Item = Bytes;
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.poll_recv(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_slow_reader_loses_lines_and_gets_their_number() {
        let (sender, mut lines) = line_queue();
        let line = Bytes::from(
            vec![b'x'; 9_999]
                .into_iter()
                .chain([b'\n'])
                .collect::<Vec<u8>>(),
        );
        let sent = (0..200).filter(|_| sender.send(line.clone())).count();
        assert!((90..=104).contains(&sent), "{sent}");
        assert_eq!(lines.take_dropped(), 200 - sent as u64);
        assert_eq!(lines.take_dropped(), 0);
        let mut read = 0;
        while lines.try_recv().is_some() {
            read += 1;
        }
        assert_eq!(read, sent);
        assert!(sender.send(line.clone()) && lines.recv().await == Some(line));
        drop(lines);
        assert!(sender.is_closed());
    }
}
