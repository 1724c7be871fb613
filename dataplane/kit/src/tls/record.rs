//! A TLS 1.3 connection whose handshake somebody else did: application data is sealed and opened here with the secrets that came of it. No
//! handshake, no certificate, no private key.
//!
//! Phases of a connection: data both ways; keys are renewed when a peer asks or their time is over; close_notify ends a direction, and an end
//! without it is an error, as the rest may have been cut off.

mod codec;
mod kernel;
mod schedule;

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use codec::{Front, HEADER, Opened, Opener, RECORD_MAX, Sealer};

pub use codec::{RecordError, Side};
pub(super) use kernel::{HandOver, KernelStream, hand_over};
pub use schedule::traffic;

/// Sealed bytes that may wait for the transport; above it nothing more is taken from the writer.
const OUT_MAX: usize = 64 << 10;
/// Room for what comes in, at first and while a connection rests.
const IN_SMALL: usize = 4 << 10;
/// Room for what comes in on a busy connection: two full records.
const IN_LARGE: usize = 2 * RECORD_MAX;

/// What a handshake left.
pub struct Secrets<'a> {
    /// TLS' number of the suite (RFC 8446 §B.4).
    pub suite: u16,
    /// The side that this end is.
    pub side: Side,
    /// CLIENT_TRAFFIC_SECRET_0, as [`traffic`] makes it.
    pub client: &'a [u8],
    /// SERVER_TRAFFIC_SECRET_0, likewise.
    pub server: &'a [u8],
}

/// The connection.
pub struct RecordStream<IO> {
    io: IO,
    sealer: Sealer,
    opener: Opener,
    input: Input,
    /// Sealed and not yet written, from `written` on.
    out: Vec<u8>,
    written: usize,
    /// The peer asked for new keys, and was not answered yet.
    owes_update: bool,
    said_close: bool,
    heard: Heard,
}

/// What the peer's direction has come to.
#[derive(Debug, Clone, Copy)]
enum Heard {
    Open,
    Closed,
    Broken(RecordError),
}

/// What came in: plaintext of an opened record, then sealed records.
#[derive(Default)]
struct Input {
    buffer: Vec<u8>,
    /// Plaintext for the application.
    plain: std::ops::Range<usize>,
    /// Sealed bytes.
    sealed: std::ops::Range<usize>,
}

impl<IO> std::fmt::Debug for RecordStream<IO> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RecordStream {{ heard: {:?}, said_close: {} }}", self.heard, self.said_close)
    }
}

fn broken(error: RecordError) -> io::Error {
    let kind = if error == RecordError::Truncated { io::ErrorKind::UnexpectedEof } else { io::ErrorKind::InvalidData };
    io::Error::new(kind, error)
}

impl Input {
    /// Room behind the sealed bytes for `whole` bytes from their start on.
    fn reserve(&mut self, whole: usize) {
        if self.sealed.is_empty() {
            self.sealed = 0..0;
        }
        if self.sealed.start + whole <= self.buffer.len() {
            return;
        }
        self.buffer.copy_within(self.sealed.clone(), 0);
        self.sealed = 0..self.sealed.len();
        if self.buffer.len() < whole {
            self.buffer.resize(if whole <= IN_SMALL { IN_SMALL } else { IN_LARGE }, 0);
        }
    }

    /// A connection that rests keeps no large buffer.
    fn rest(&mut self) {
        if self.sealed.is_empty() && self.buffer.len() > IN_SMALL {
            *self = Self::default();
        }
    }
}

impl<IO> RecordStream<IO> {
    /// Goes on where the handshake ended. `early` are bytes that were read behind the handshake's last record.
    ///
    /// # Errors
    /// [`RecordError::Keys`] for a suite that is not of the mesh, or secrets that are not of the suite.
    pub fn new(io: IO, secrets: &Secrets<'_>, early: &[u8]) -> Result<Self, RecordError> {
        let (sealer, opener) = codec::pair(secrets.suite, secrets.side, secrets.client, secrets.server)?;
        let mut input = Input::default();
        if !early.is_empty() {
            input.buffer.resize(early.len().max(IN_SMALL), 0);
            input.buffer[..early.len()].copy_from_slice(early);
            input.sealed = 0..early.len();
        }
        let (out, heard) = (Vec::new(), Heard::Open);
        Ok(Self { io, sealer, opener, input, out, written: 0, owes_update: false, said_close: false, heard })
    }

    /// The transport below.
    pub fn get_ref(&self) -> &IO {
        &self.io
    }

    /// Opens records at the front until one has data; `true`: more bytes are needed. Acts on what they say.
    fn open_front(&mut self) -> Result<Next, RecordError> {
        loop {
            let sealed = self.input.sealed.clone();
            let whole = match codec::front(&self.input.buffer[sealed.clone()])? {
                Front::Partial(whole) => return Ok(Next::Read(whole)),
                Front::Whole(whole) => whole,
            };
            let record = &mut self.input.buffer[sealed.start..sealed.start + whole];
            self.input.sealed.start += whole;
            match self.opener.open(record)? {
                Opened::Data(0) => {}
                Opened::Data(length) => {
                    let from = sealed.start + HEADER;
                    self.input.plain = from..from + length;
                    return Ok(Next::Data);
                }
                Opened::Control { update } => self.owes_update |= update,
                Opened::Closed => return Ok(Next::Closed),
            }
        }
    }

    /// Notes why the peer's direction is over, and tells the peer where that is due.
    fn fail(&mut self, error: RecordError) -> io::Error {
        self.heard = Heard::Broken(error);
        if let (Some(description), false) = (error.alert(), self.said_close) {
            self.said_close = true;
            // If even this cannot be sealed there is nothing to say.
            let _ = self.sealer.fatal(description, &mut self.out);
        }
        broken(error)
    }

    /// Answers a key update that the peer asked for, once: it may ask often.
    fn pay(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.owes_update) && !self.said_close {
            self.sealer.update(&mut self.out).map_err(broken)?;
        }
        Ok(())
    }
}

enum Next {
    Data,
    /// So many bytes must be there from the front on.
    Read(usize),
    Closed,
}

impl<IO: AsyncRead + AsyncWrite + Unpin> RecordStream<IO> {
    /// Writes what is sealed; `Ready` once all of it is with the transport.
    fn poll_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.out.len() {
            match ready!(Pin::new(&mut self.io).poll_write(cx, &self.out[self.written..])) {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(n) => self.written += n,
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
        self.written = 0;
        // A busy connection keeps its buffer, one that wrote a lot at once gives it back.
        if self.out.capacity() > OUT_MAX {
            self.out = Vec::new()
        } else {
            self.out.clear()
        }
        Poll::Ready(Ok(()))
    }

    /// Reads once; `Ready(false)` at the transport's end.
    fn poll_in(&mut self, cx: &mut Context<'_>, whole: usize) -> Poll<io::Result<bool>> {
        self.input.reserve(whole);
        let Input { buffer, sealed, .. } = &mut self.input;
        let mut buf = ReadBuf::new(&mut buffer[sealed.end..]);
        match Pin::new(&mut self.io).poll_read(cx, &mut buf) {
            Poll::Ready(Ok(())) => {
                let got = buf.filled().len();
                sealed.end += got;
                Poll::Ready(Ok(got > 0))
            }
            Poll::Ready(Err(e)) => Poll::Ready(Err(e)),
            Poll::Pending => {
                self.input.rest();
                Poll::Pending
            }
        }
    }

    fn poll_seal(&mut self, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        if self.said_close {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if self.out.len() - self.written >= OUT_MAX {
            ready!(self.poll_out(cx))?;
        }
        self.pay()?;
        let all: usize = bufs.iter().map(|buf| buf.len()).sum();
        let mut taken = 0;
        while taken < all && self.out.len() - self.written < OUT_MAX {
            taken += self.sealer.data(behind(bufs, taken), &mut self.out).map_err(broken)?;
        }
        // As much as the transport takes now; the rest goes with the next write or flush.
        match self.poll_out(cx) {
            Poll::Ready(Err(e)) => Poll::Ready(Err(e)),
            _ => Poll::Ready(Ok(taken)),
        }
    }
}

/// The slices without their first `skip` bytes.
fn behind<'a>(bufs: &'a [IoSlice<'_>], mut skip: usize) -> impl Iterator<Item = &'a [u8]> {
    bufs.iter().filter_map(move |buf| {
        let cut = skip.min(buf.len());
        skip -= cut;
        let rest = &buf[cut..];
        (!rest.is_empty()).then_some(rest)
    })
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncRead for RecordStream<IO> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if !this.input.plain.is_empty() {
                let plain = &mut this.input.plain;
                let n = plain.len().min(buf.remaining());
                buf.put_slice(&this.input.buffer[plain.start..plain.start + n]);
                plain.start += n;
                return Poll::Ready(Ok(()));
            }
            match this.heard {
                Heard::Closed => return Poll::Ready(Ok(())),
                Heard::Broken(error) => return Poll::Ready(Err(broken(error))),
                Heard::Open => {}
            }
            let next = this.open_front();
            if this.owes_update && this.out.is_empty() {
                this.pay()?;
                // Best effort: what does not go now goes with the next write or flush.
                if let Poll::Ready(Err(e)) = this.poll_out(cx) {
                    return Poll::Ready(Err(e));
                }
            }
            match next {
                Ok(Next::Data) => {}
                Ok(Next::Closed) => this.heard = Heard::Closed,
                Ok(Next::Read(whole)) => {
                    if !ready!(this.poll_in(cx, whole))? {
                        return Poll::Ready(Err(this.fail(RecordError::Truncated)));
                    }
                }
                Err(error) => {
                    let error = this.fail(error);
                    let _ = this.poll_out(cx);
                    return Poll::Ready(Err(error));
                }
            }
        }
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncWrite for RecordStream<IO> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().poll_seal(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        self.get_mut().poll_seal(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.pay()?;
        ready!(this.poll_out(cx))?;
        Pin::new(&mut this.io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.said_close {
            this.said_close = true;
            this.sealer.close_notify(&mut this.out).map_err(broken)?;
        }
        ready!(this.poll_out(cx))?;
        Pin::new(&mut this.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
