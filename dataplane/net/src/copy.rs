//! Copies bytes in both directions between two legs until both are finished. It passes on
//! half-close and resets, counts bytes, and grows buffers with use. It opens no connection and
//! makes no routing decision. Start with [`both`].

mod legs;
pub mod stall;

use std::cell::Cell;
use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use canal_runtime::metrics::Counter;
use tokio::time::Instant;

pub use legs::Prefixed;

use stall::{StallTimer, StallWatch};

/// Buffer sizes: at first, after `GROW_AT[0]` bytes, and after `GROW_AT[1]` bytes, see [`GROW_AT`]
/// (ztunnel's steps).
pub const BUFFER: [usize; 3] = [1 << 10, 16 << 10, 256 << 10];
/// Bytes moved in one direction at which the buffer grows. Both are ztunnel's.
pub const GROW_AT: [u64; 2] = [128 << 10, 10 << 20];
/// Chunks that one direction may move before it yields. Otherwise legs that are always ready would
/// occupy the thread. With the largest buffer they are 8 MiB. Nobody measured this value.
const CHUNKS_PER_TURN: usize = 32;

/// Maximum delay of a reset for bytes that were passed on before it. Nobody measured this value.
/// TCP repeats a lost segment five times within it (after 0.2 s, doubling), so a peer that reads
/// gets its bytes; one that does not read costs two sockets for as long.
pub const RESET_DELAY_MAX: Duration = Duration::from_secs(10);
/// First and longest pause between two polls for departed bytes. Bytes leave within a round trip as
/// a rule, so the first is short; the longest is what a reset may be late.
const DEPARTURE_POLL_INTERVAL: [Duration; 2] =
    [Duration::from_millis(1), Duration::from_millis(50)];
/// Polls before the first pause. HTTP/2 writes as soon as other tasks have run. Nobody measured
/// this number; the first pause, 1 ms, follows if it was too small.
const DEPARTURE_YIELDS: u32 = 3;

/// One side of a copy: `tokio::net::TcpStream`, a tunnel of `canal-hbone`, or either with a
/// [`Prefixed`] start.
pub trait Leg {
    /// Returns the next bytes, at most `limit` if the leg must allocate, or `None` at the end. It
    /// owns no buffer while it is pending.
    fn poll_chunk(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
        limit: usize,
    ) -> Poll<io::Result<Option<Bytes>>>;
    /// Takes bytes from the front of `data`, which is not empty. Ready when at least one byte was
    /// taken.
    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>>;
    /// Signals that no more bytes follow (FIN, END_STREAM).
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    /// Resolves if the leg breaks while it is neither read nor written. It stays pending where the
    /// leg cannot know that.
    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<io::Error>;
    /// Polls a leg that is not read, because the other one has accepted nothing for a while. A leg
    /// that shares its connection with others takes its bytes off that connection. It resolves if
    /// the leg is broken; what was received before is still read first.
    fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<io::Error>;
    /// Returns whether the peer has reset the connection, for a leg whose [`Leg::poll_stalled`]
    /// cannot know that. It costs a system call.
    fn is_reset(&self) -> bool;
    /// Ready when the sent bytes have left, or never will, so that a reset overtakes nothing. It
    /// registers no waker; see [`depart`].
    fn poll_departed(&mut self) -> Poll<()>;
    /// Ends the leg with a reset (RST, RST_STREAM), at once. Bytes that have not left are lost.
    fn abort(&mut self);
}

/// Names a leg of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopySide {
    A,
    B,
}

/// Reason why a copy has ended.
#[derive(Debug)]
pub enum CopyEnd {
    /// Both directions reached their end.
    Complete,
    /// This leg failed or was reset. The other leg was reset in turn.
    Broken { side: CopySide, error: io::Error },
    /// No byte moved in either direction for this time. Both legs were reset.
    Idle(Duration),
}

/// Bytes moved so far. The meter is updated live, so that long connections appear in metrics before
/// they end.
#[derive(Debug, Default)]
pub struct Meter {
    a_to_b: Cell<u64>,
    b_to_a: Cell<u64>,
    counters: Option<(Counter, Counter)>,
}

impl Meter {
    /// Creates a meter that also adds to these counters: bytes from a to b, and bytes from b to a.
    pub fn with(a_to_b: Counter, b_to_a: Counter) -> Self {
        Self {
            counters: Some((a_to_b, b_to_a)),
            ..Self::default()
        }
    }
    /// Returns the bytes moved from a to b.
    pub fn a_to_b(&self) -> u64 {
        self.a_to_b.get()
    }
    /// Returns the bytes moved from b to a.
    pub fn b_to_a(&self) -> u64 {
        self.b_to_a.get()
    }
    fn add(&self, from: CopySide, n: usize) {
        let n = n as u64;
        let (cell, counter) = match from {
            CopySide::A => (&self.a_to_b, self.counters.as_ref().map(|c| &c.0)),
            CopySide::B => (&self.b_to_a, self.counters.as_ref().map(|c| &c.1)),
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

/// Copies in both directions. Dropping the future leaves both legs as they are. `idle` is the idle
/// timeout over both directions.
pub async fn both<A: Leg, B: Leg>(
    a: &mut A,
    b: &mut B,
    meter: &Meter,
    idle: Option<Duration>,
) -> CopyEnd {
    let (mut a_to_b, mut b_to_a) = (CopyDirection::default(), CopyDirection::default());
    let mut stalls = StallTimer::default();
    let copied = std::future::poll_fn(|cx| {
        // A leg that was reset ends both directions at once. A leg that only accepts no more bytes
        // may already have sent some that are worth delivering, such as a response before a close.
        // So the other direction continues to its end, which is near.
        match a_to_b.poll(cx, a, b, |n| meter.add(CopySide::A, n)) {
            Poll::Ready(Err(CopyError::Source(error))) => {
                return Poll::Ready(Err(CopyFailure::of(CopySide::A, error)));
            }
            Poll::Ready(Err(CopyError::Sink(error))) => a_to_b.give_up(error),
            // A direction that waits or is complete is examined below.
            _ => {}
        }
        match b_to_a.poll(cx, b, a, |n| meter.add(CopySide::B, n)) {
            Poll::Ready(Err(CopyError::Source(error))) => {
                return Poll::Ready(Err(CopyFailure::of(
                    CopySide::B,
                    // If writing to this leg failed earlier, that failure was the first, so it is
                    // the cause.
                    a_to_b.broken.take().unwrap_or(error),
                )));
            }
            Poll::Ready(Err(CopyError::Sink(error))) => b_to_a.give_up(error),
            _ => {}
        }
        let is_due = stalls.poll(cx, a_to_b.is_blocked() || b_to_a.is_blocked());
        if let Poll::Ready(error) = a_to_b.poll_stalled(cx, a, b_to_a.broken.is_some(), is_due) {
            return Poll::Ready(Err(CopyFailure {
                side: CopySide::A,
                error,
                is_stalled: true,
            }));
        }
        if let Poll::Ready(error) = b_to_a.poll_stalled(cx, b, a_to_b.broken.is_some(), is_due) {
            return Poll::Ready(Err(CopyFailure {
                side: CopySide::B,
                error,
                is_stalled: true,
            }));
        }
        match (a_to_b.is_complete, b_to_a.is_complete) {
            // Where both directions broke, either error explains the end.
            (true, true) => Poll::Ready(match (a_to_b.broken.take(), b_to_a.broken.take()) {
                (Some(error), _) => Err(CopyFailure::of(CopySide::B, error)),
                (None, Some(error)) => Err(CopyFailure::of(CopySide::A, error)),
                (None, None) => Ok(()),
            }),
            // From here on one leg is only written to, so a reset of it would go unnoticed until
            // the next byte.
            (false, true) => b
                .poll_broken(cx)
                .map(|e| Err(CopyFailure::of(CopySide::B, e))),
            (true, false) => a
                .poll_broken(cx)
                .map(|e| Err(CopyFailure::of(CopySide::A, e))),
            (false, false) => Poll::Pending,
        }
    });
    let (end, is_stalled) = tokio::select! {
        biased;
        copied = copied => match copied {
            Ok(()) => return CopyEnd::Complete,
            Err(CopyFailure { side, error, is_stalled }) => (CopyEnd::Broken { side, error }, is_stalled),
        },
        limit = silence(meter, idle) => (CopyEnd::Idle(limit), false),
    };
    // A reset must not overtake bytes that were read before it. Otherwise a response sent right
    // before a close would be lost. A sink that stalls had its time already.
    if matches!(end, CopyEnd::Broken { .. }) && !is_stalled {
        depart(a, RESET_DELAY_MAX).await;
        depart(b, RESET_DELAY_MAX).await;
    }
    a.abort();
    b.abort();
    end
}

/// Waits until the bytes sent on `leg` have left, at most for `within`.
pub async fn depart(leg: &mut impl Leg, within: Duration) {
    let since = Instant::now();
    let mut yields = 0;
    let mut pause = DEPARTURE_POLL_INTERVAL[0];
    while leg.poll_departed().is_pending() && since.elapsed() < within {
        if yields < DEPARTURE_YIELDS {
            yields += 1;
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(DEPARTURE_POLL_INTERVAL[1]);
        }
    }
}

/// Resolves when no byte has moved for `idle`, and returns `idle`.
async fn silence(meter: &Meter, idle: Option<Duration>) -> Duration {
    let Some(idle) = idle else {
        return std::future::pending().await;
    };
    // The meter is read eight times per limit, instead of one timer per chunk. The error is at most
    // an eighth of the limit.
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

/// The end of a copy that failed.
struct CopyFailure {
    side: CopySide,
    error: io::Error,
    /// The sink had accepted nothing for a while.
    is_stalled: bool,
}

impl CopyFailure {
    fn of(side: CopySide, error: io::Error) -> Self {
        Self {
            side,
            error,
            is_stalled: false,
        }
    }
}

/// The end of a direction that failed.
enum CopyError {
    Source(io::Error),
    Sink(io::Error),
}

#[derive(Default)]
struct CopyDirection {
    chunk: Bytes,
    buffer: BytesMut,
    moved: u64,
    source_ended: bool,
    is_complete: bool,
    /// Reason for an early end.
    broken: Option<io::Error>,
    /// The sink did not accept the chunk at the last poll.
    is_refused: bool,
    stall: StallWatch,
    /// Reason why the source is broken, found while the sink stalls.
    source_broken: Option<io::Error>,
}

impl CopyDirection {
    /// Ends the direction because the sink accepts no more bytes.
    fn give_up(&mut self, error: io::Error) {
        (self.chunk, self.buffer, self.is_complete, self.broken) =
            (Bytes::new(), BytesMut::new(), true, Some(error));
        self.is_refused = false;
    }

    /// Returns whether the direction holds bytes that the sink does not accept.
    fn is_blocked(&self) -> bool {
        self.is_refused
    }

    /// Polls the source of a direction whose sink stalls, because nothing else polls it then. Ready
    /// with the reason if the source is broken and the sink had time to accept the earlier bytes.
    /// `is_sink_broken`: the source accepts no bytes either. `is_due`: a tick has passed.
    fn poll_stalled<S: Leg>(
        &mut self,
        cx: &mut Context<'_>,
        source: &mut S,
        is_sink_broken: bool,
        is_due: bool,
    ) -> Poll<io::Error> {
        if is_due {
            self.stall.tick(self.is_blocked(), self.moved);
        }
        if !self.is_blocked() || !self.stall.is_stalled() {
            return Poll::Pending;
        }
        if self.source_broken.is_none()
            && let Poll::Ready(error) = source.poll_stalled(cx)
        {
            self.source_broken = Some(error);
        }
        if is_due && self.source_broken.is_none() && (is_sink_broken || source.is_reset()) {
            self.source_broken = Some(io::ErrorKind::ConnectionReset.into());
        }
        match self.source_broken.take() {
            Some(error) if self.stall.is_over() => Poll::Ready(error),
            failure => {
                self.source_broken = failure;
                Poll::Pending
            }
        }
    }

    /// Moves the bytes that can move now. Ready when the direction is finished or broken.
    fn poll<S: Leg, D: Leg>(
        &mut self,
        cx: &mut Context<'_>,
        source: &mut S,
        sink: &mut D,
        count: impl Fn(usize),
    ) -> Poll<Result<(), CopyError>> {
        if self.is_complete {
            return Poll::Ready(Ok(()));
        }
        for _ in 0..CHUNKS_PER_TURN {
            while !self.chunk.is_empty() {
                let sent = sink.poll_send(cx, &mut self.chunk);
                self.is_refused = sent.is_pending();
                let n = ready!(sent).map_err(CopyError::Sink)?;
                self.moved += n as u64;
                count(n);
            }
            // Frees the memory of the chunk, because the next wait may be long.
            self.chunk = Bytes::new();
            if self.source_ended {
                ready!(sink.poll_finish(cx)).map_err(CopyError::Sink)?;
                self.is_complete = true;
                return Poll::Ready(Ok(()));
            }
            let limit = buffer_size(self.moved);
            match ready!(source.poll_chunk(cx, &mut self.buffer, limit))
                .map_err(CopyError::Source)?
            {
                Some(chunk) => self.chunk = chunk,
                None => self.source_ended = true,
            }
        }
        // Both ends are still ready: other tasks run first, then this one continues.
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// Returns the buffer size for a direction that has moved `moved` bytes.
fn buffer_size(moved: u64) -> usize {
    match moved {
        n if n < GROW_AT[0] => BUFFER[0],
        n if n < GROW_AT[1] => BUFFER[1],
        _ => BUFFER[2],
    }
}

#[cfg(test)]
mod tests;
