//! Moves bytes both ways between two legs until both are done: half-close and resets are passed on, bytes counted, buffers grow with use.
//! It opens and chooses nothing.

use std::cell::Cell;
use std::io;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use crate::metrics::Counter;

/// Buffer size at first, after [`GROW_AT`].0 bytes, after [`GROW_AT`].1 bytes (ztunnel's steps).
pub const BUFFER: [usize; 3] = [1 << 10, 16 << 10, 256 << 10];
/// Bytes moved in one direction before the buffer grows.
pub const GROW_AT: [u64; 2] = [128 << 10, 10 << 20];

/// One side of a copy: `tokio::net::TcpStream`, [`crate::hbone::HboneStream`], or either with a [`Prefixed`] start.
pub trait Leg {
    /// The next bytes, at most `limit` where the leg has to allocate; `None` at the end. Holds no buffer while pending.
    fn poll_chunk(&mut self, cx: &mut Context<'_>, buffer: &mut BytesMut, limit: usize) -> Poll<io::Result<Option<Bytes>>>;
    /// Takes bytes from the front of `data`; ready when at least one was taken.
    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>>;
    /// Says that no more will be sent (FIN, END_STREAM).
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    /// Makes the end a reset (RST, RST_STREAM).
    fn abort(&mut self);
}

/// A leg whose first bytes were read already.
#[derive(Debug)]
pub struct Prefixed<L> {
    pub prefix: Bytes,
    pub leg: L,
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
}

/// Copies both ways. Cancelling (dropping) it leaves both legs as they are.
pub async fn both<A: Leg, B: Leg>(a: &mut A, b: &mut B, meter: &Meter, idle: Option<Duration>) -> End {
    let _ = (a, b, &meter.counters, idle);
    unreachable!("body lands in the next commit")
}
