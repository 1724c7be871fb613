//! Moves bytes both ways between two legs until both are done: half-close and resets are passed on, bytes counted, buffers grow with use.
//! It opens and chooses nothing.

mod legs;

use std::cell::Cell;
use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::time::Instant;

use crate::metrics::Counter;

pub use legs::Prefixed;

/// Buffer size at first, after [`GROW_AT`].0 bytes, after [`GROW_AT`].1 bytes (ztunnel's steps).
pub const BUFFER: [usize; 3] = [1 << 10, 16 << 10, 256 << 10];
/// Bytes moved in one direction before the buffer grows.
pub const GROW_AT: [u64; 2] = [128 << 10, 10 << 20];
/// Chunks one direction may move before others get a turn; legs that are always ready would keep the thread otherwise.
const CHUNKS_PER_TURN: usize = 32;

/// One side of a copy: `tokio::net::TcpStream`, [`crate::hbone::HboneStream`], or either with a [`Prefixed`] start.
pub trait Leg {
    /// The next bytes, at most `limit` where the leg has to allocate; `None` at the end. Holds no buffer while pending.
    fn poll_chunk(&mut self, cx: &mut Context<'_>, buffer: &mut BytesMut, limit: usize) -> Poll<io::Result<Option<Bytes>>>;
    /// Takes bytes from the front of `data` (not empty); ready when at least one was taken.
    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>>;
    /// Says that no more will be sent (FIN, END_STREAM).
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    /// Resolves if the leg breaks while it is neither read nor written; pending where that cannot be known.
    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<io::Error>;
    /// Makes the end a reset (RST, RST_STREAM).
    fn abort(&mut self);
}

/// Which leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    A,
    B,
}

/// How a copy ended.
#[derive(Debug)]
pub enum End {
    /// Both directions reached their end.
    Complete,
    /// This leg failed or was reset; the other was reset in turn.
    Broken { side: Side, error: io::Error },
    /// No byte in either direction for the limit; both were reset.
    Idle(Duration),
}

/// Bytes moved so far; live, so that long connections show up in metrics before they end.
#[derive(Debug, Default)]
pub struct Meter {
    a_to_b: Cell<u64>,
    b_to_a: Cell<u64>,
    counters: Option<(Counter, Counter)>,
}

impl Meter {
    /// Adds to these counters as well: bytes a → b, bytes b → a.
    pub fn with(a_to_b: Counter, b_to_a: Counter) -> Self {
        Self { counters: Some((a_to_b, b_to_a)), ..Self::default() }
    }
    /// Bytes from a to b.
    pub fn a_to_b(&self) -> u64 {
        self.a_to_b.get()
    }
    /// Bytes from b to a.
    pub fn b_to_a(&self) -> u64 {
        self.b_to_a.get()
    }
    fn add(&self, from: Side, n: usize) {
        let n = n as u64;
        let (cell, counter) = match from {
            Side::A => (&self.a_to_b, self.counters.as_ref().map(|c| &c.0)),
            Side::B => (&self.b_to_a, self.counters.as_ref().map(|c| &c.1)),
        };
        cell.set(cell.get() + n);
        if let Some(c) = counter {
            c.add(n);
        }
    }
    fn total(&self) -> u64 {
        self.a_to_b.get() + self.b_to_a.get()
    }
}

/// Copies both ways. Cancelling (dropping) it leaves both legs as they are.
pub async fn both<A: Leg, B: Leg>(a: &mut A, b: &mut B, meter: &Meter, idle: Option<Duration>) -> End {
    let (mut there, mut back) = (Direction::default(), Direction::default());
    let copied = std::future::poll_fn(|cx| {
        // A leg that was reset ends both at once. One that only takes no more may still have said something that is worth delivering
        // (an answer sent before closing), so the other direction goes on to its end; that end is near.
        match there.poll(cx, a, b, |n| meter.add(Side::A, n)) {
            Poll::Ready(Err(Fault::Source(error))) => return Poll::Ready(Err((Side::A, error))),
            Poll::Ready(Err(Fault::Sink(error))) => there.give_up(error),
            _ => {}
        }
        match back.poll(cx, b, a, |n| meter.add(Side::B, n)) {
            Poll::Ready(Err(Fault::Source(error))) => {
                return Poll::Ready(Err(there.broken.take().map_or((Side::B, error), |e| (Side::B, e))));
            }
            Poll::Ready(Err(Fault::Sink(error))) => back.give_up(error),
            _ => {}
        }
        match (there.done, back.done) {
            (true, true) => Poll::Ready(match (there.broken.take(), back.broken.take()) {
                (Some(error), _) => Err((Side::B, error)),
                (None, Some(error)) => Err((Side::A, error)),
                (None, None) => Ok(()),
            }),
            // Only written to from here on: a reset would go unseen until the next byte.
            (false, true) => b.poll_broken(cx).map(|e| Err((Side::B, e))),
            (true, false) => a.poll_broken(cx).map(|e| Err((Side::A, e))),
            (false, false) => Poll::Pending,
        }
    });
    let end = tokio::select! {
        biased;
        copied = copied => match copied {
            Ok(()) => return End::Complete,
            Err((side, error)) => End::Broken { side, error },
        },
        limit = silence(meter, idle) => End::Idle(limit),
    };
    a.abort();
    b.abort();
    end
}

/// Resolves when no byte has moved for `idle`.
async fn silence(meter: &Meter, idle: Option<Duration>) -> Duration {
    let Some(idle) = idle else { return std::future::pending().await };
    // Looks a few times per limit in place of a timer per chunk: the limit is met within an eighth.
    let (mut seen, mut since) = (meter.total(), Instant::now());
    loop {
        tokio::time::sleep(idle / 8).await;
        let now = meter.total();
        if now != seen {
            (seen, since) = (now, Instant::now());
        } else if since.elapsed() >= idle {
            return idle;
        }
    }
}

/// Which end of a direction failed.
enum Fault {
    Source(io::Error),
    Sink(io::Error),
}

#[derive(Default)]
struct Direction {
    chunk: Bytes,
    buffer: BytesMut,
    moved: u64,
    ended: bool,
    done: bool,
    /// Why it ended early.
    broken: Option<io::Error>,
}

impl Direction {
    /// The sink takes no more.
    fn give_up(&mut self, error: io::Error) {
        (self.chunk, self.buffer, self.done, self.broken) = (Bytes::new(), BytesMut::new(), true, Some(error));
    }

    /// Moves what can be moved now. Ready when done, or broken.
    fn poll<S: Leg, D: Leg>(
        &mut self,
        cx: &mut Context<'_>,
        source: &mut S,
        sink: &mut D,
        count: impl Fn(usize),
    ) -> Poll<Result<(), Fault>> {
        if self.done {
            return Poll::Ready(Ok(()));
        }
        for _ in 0..CHUNKS_PER_TURN {
            while !self.chunk.is_empty() {
                let n = ready!(sink.poll_send(cx, &mut self.chunk)).map_err(Fault::Sink)?;
                self.moved += n as u64;
                count(n);
            }
            // Let go of the chunk's memory: what is pending next may take long.
            self.chunk = Bytes::new();
            if self.ended {
                ready!(sink.poll_finish(cx)).map_err(Fault::Sink)?;
                self.done = true;
                return Poll::Ready(Ok(()));
            }
            let limit = buffer_size(self.moved);
            match ready!(source.poll_chunk(cx, &mut self.buffer, limit)).map_err(Fault::Source)? {
                Some(chunk) => self.chunk = chunk,
                None => self.ended = true,
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// The buffer for a direction that has moved so many bytes.
fn buffer_size(moved: u64) -> usize {
    match moved {
        n if n < GROW_AT[0] => BUFFER[0],
        n if n < GROW_AT[1] => BUFFER[1],
        _ => BUFFER[2],
    }
}

#[cfg(test)]
mod tests;
