//! Record layer of a TLS 1.3 connection after a remote handshake: application data is encrypted and
//! decrypted here with the secrets of that handshake. This module performs no handshake and has no
//! certificate and no private key. Start with [`RecordStream`].
//!
//! Phases of a connection: data flows in both directions, and keys are renewed when the peer
//! requests it or when they reach their limit. close_notify ends a direction. An end without
//! close_notify is an error, because data may have been cut off.

mod codec;
mod kernel;
mod schedule;

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use codec::{DecryptedRecord, HEADER, Opener, RECORD_MAX, RecordPrefix, Sealer};

pub use codec::{EndpointRole, RecordError};
#[cfg(feature = "testing")]
pub(super) use kernel::kernel_rekeys;
pub(super) use kernel::{KernelStream, KtlsHandover, hand_over};
pub use schedule::traffic;

/// Encrypted bytes that may wait for the transport. Above it, nothing more is accepted from the
/// writer. Four full records. Nobody measured which value is best.
const OUT_MAX: usize = 64 << 10;
/// Size of the receive buffer at first, and while a connection is idle. One page: idle connections
/// are many.
const IN_SMALL: usize = 4 << 10;
/// Size of the receive buffer of a busy connection: two full records.
const IN_LARGE: usize = 2 * RECORD_MAX;

/// Secrets that the record layer takes from a finished handshake.
pub struct TrafficSecrets<'a> {
    /// TLS cipher suite number (RFC 8446 §B.4).
    pub suite: u16,
    /// Side of TLS that this end has.
    pub side: EndpointRole,
    /// CLIENT_TRAFFIC_SECRET_0 in the form that [`traffic`] returns.
    pub client: &'a [u8],
    /// SERVER_TRAFFIC_SECRET_0 in the form that [`traffic`] returns.
    pub server: &'a [u8],
}

/// A connection whose records this process encrypts and decrypts.
pub struct RecordStream<IO> {
    io: IO,
    sealer: Sealer,
    opener: Opener,
    input: ReceiveBuffer,
    /// Encrypted bytes; those from `written` on are not written yet.
    out: Vec<u8>,
    written: usize,
    /// The peer requested a key update that has not been sent yet.
    owes_update: bool,
    said_close: bool,
    receive_state: ReceiveState,
}

/// State of the peer's direction.
#[derive(Debug, Clone, Copy)]
enum ReceiveState {
    Open,
    Closed,
    Broken(RecordError),
}

/// Received bytes: plaintext of a decrypted record, then encrypted records.
#[derive(Default)]
struct ReceiveBuffer {
    buffer: Vec<u8>,
    /// Range of the plaintext for the application.
    plain: std::ops::Range<usize>,
    /// Range of the encrypted bytes.
    sealed: std::ops::Range<usize>,
}

impl<IO> std::fmt::Debug for RecordStream<IO> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "RecordStream {{ receive_state: {:?}, said_close: {} }}",
            self.receive_state, self.said_close
        )
    }
}

fn broken(error: RecordError) -> io::Error {
    let kind = if error == RecordError::Truncated {
        io::ErrorKind::UnexpectedEof
    } else {
        io::ErrorKind::InvalidData
    };
    io::Error::new(kind, error)
}

impl ReceiveBuffer {
    /// Makes space behind the encrypted bytes, for `whole` bytes from their start on.
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
            self.buffer.resize(
                if whole <= IN_SMALL {
                    IN_SMALL
                } else {
                    IN_LARGE
                },
                0,
            );
        }
    }

    /// Frees a large buffer, so that an idle connection has none.
    fn rest(&mut self) {
        if self.sealed.is_empty() && self.buffer.len() > IN_SMALL {
            *self = Self::default();
        }
    }
}

impl<IO> RecordStream<IO> {
    /// Continues where the handshake ended. `early` are bytes that were read after the handshake's
    /// last record.
    ///
    /// # Errors
    /// [`RecordError::Keys`] for a suite that the mesh does not use, or for secrets that do not fit
    /// the suite.
    pub fn new(io: IO, secrets: &TrafficSecrets<'_>, early: &[u8]) -> Result<Self, RecordError> {
        let (sealer, opener) =
            codec::pair(secrets.suite, secrets.side, secrets.client, secrets.server)?;
        let mut input = ReceiveBuffer::default();
        if !early.is_empty() {
            input.buffer.resize(early.len().max(IN_SMALL), 0);
            input.buffer[..early.len()].copy_from_slice(early);
            input.sealed = 0..early.len();
        }
        let (out, heard) = (Vec::new(), ReceiveState::Open);
        Ok(Self {
            io,
            sealer,
            opener,
            input,
            out,
            written: 0,
            owes_update: false,
            said_close: false,
            receive_state: heard,
        })
    }

    /// Returns the transport below TLS.
    pub fn get_ref(&self) -> &IO {
        &self.io
    }

    /// Decrypts records at the front until one has data, and handles their control content. It also
    /// returns when more bytes are needed, or at close_notify.
    fn open_front(&mut self) -> Result<RecordStep, RecordError> {
        loop {
            let sealed = self.input.sealed.clone();
            let whole = match codec::front(&self.input.buffer[sealed.clone()])? {
                RecordPrefix::Partial(whole) => return Ok(RecordStep::Read(whole)),
                RecordPrefix::Whole(whole) => whole,
            };
            let record = &mut self.input.buffer[sealed.start..sealed.start + whole];
            self.input.sealed.start += whole;
            match self.opener.open(record)? {
                DecryptedRecord::Data(0) => {}
                DecryptedRecord::Data(length) => {
                    let from = sealed.start + HEADER;
                    self.input.plain = from..from + length;
                    return Ok(RecordStep::Data);
                }
                DecryptedRecord::Control { update } => self.owes_update |= update,
                DecryptedRecord::Closed => return Ok(RecordStep::Closed),
            }
        }
    }

    /// Records why the peer's direction has ended, and queues an alert to the peer if one is due.
    fn fail(&mut self, error: RecordError) -> io::Error {
        self.receive_state = ReceiveState::Broken(error);
        if let (Some(description), false) = (error.alert(), self.said_close) {
            self.said_close = true;
            // If even this cannot be encrypted, nothing can be sent.
            let _ = self.sealer.fatal(description, &mut self.out);
        }
        broken(error)
    }

    /// Sends the key update that the peer requested; several requests get one update.
    fn send_owed_key_update(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.owes_update) && !self.said_close {
            self.sealer.update(&mut self.out).map_err(broken)?;
        }
        Ok(())
    }
}

enum RecordStep {
    Data,
    /// This many bytes are needed from the front on.
    Read(usize),
    Closed,
}

impl<IO: AsyncRead + AsyncWrite + Unpin> RecordStream<IO> {
    /// Writes the encrypted bytes. Ready once the transport has all of them.
    fn poll_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.out.len() {
            match ready!(Pin::new(&mut self.io).poll_write(cx, &self.out[self.written..])) {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(n) => self.written += n,
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
        self.written = 0;
        // A busy connection retains its buffer; one that grew for a large write is freed.
        if self.out.capacity() > OUT_MAX {
            self.out = Vec::new()
        } else {
            self.out.clear()
        }
        Poll::Ready(Ok(()))
    }

    /// Reads once; `Ready(false)` at the end of the transport.
    fn poll_in(&mut self, cx: &mut Context<'_>, whole: usize) -> Poll<io::Result<bool>> {
        self.input.reserve(whole);
        let ReceiveBuffer { buffer, sealed, .. } = &mut self.input;
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
        self.send_owed_key_update()?;
        let all: usize = bufs.iter().map(|buf| buf.len()).sum();
        let mut taken = 0;
        while taken < all && self.out.len() - self.written < OUT_MAX {
            taken += self
                .sealer
                .data(behind(bufs, taken), &mut self.out)
                .map_err(broken)?;
        }
        // The transport gets as much as it accepts now; the rest goes with the next write or flush.
        match self.poll_out(cx) {
            Poll::Ready(Err(e)) => Poll::Ready(Err(e)),
            _ => Poll::Ready(Ok(taken)),
        }
    }
}

/// Returns the slices without their first `skip` bytes.
fn behind<'a>(bufs: &'a [IoSlice<'_>], mut skip: usize) -> impl Iterator<Item = &'a [u8]> {
    bufs.iter().filter_map(move |buf| {
        let cut = skip.min(buf.len());
        skip -= cut;
        let rest = &buf[cut..];
        (!rest.is_empty()).then_some(rest)
    })
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncRead for RecordStream<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if !this.input.plain.is_empty() {
                let plain = &mut this.input.plain;
                let n = plain.len().min(buf.remaining());
                buf.put_slice(&this.input.buffer[plain.start..plain.start + n]);
                plain.start += n;
                return Poll::Ready(Ok(()));
            }
            match this.receive_state {
                ReceiveState::Closed => return Poll::Ready(Ok(())),
                ReceiveState::Broken(error) => return Poll::Ready(Err(broken(error))),
                ReceiveState::Open => {}
            }
            let next = this.open_front();
            // Only once earlier output has left: a peer that asks but never reads must not grow
            // `out`.
            if this.owes_update && this.out.is_empty() {
                this.send_owed_key_update()?;
                // Best effort: bytes that are not sent now go with the next write or flush.
                if let Poll::Ready(Err(e)) = this.poll_out(cx) {
                    return Poll::Ready(Err(e));
                }
            }
            match next {
                Ok(RecordStep::Data) => {}
                Ok(RecordStep::Closed) => this.receive_state = ReceiveState::Closed,
                Ok(RecordStep::Read(whole)) => {
                    if !ready!(this.poll_in(cx, whole))? {
                        // The transport ended without close_notify.
                        return Poll::Ready(Err(this.fail(RecordError::Truncated)));
                    }
                }
                Err(error) => {
                    let error = this.fail(error);
                    // The alert is sent if the transport takes it now; the error counts either way.
                    let _ = this.poll_out(cx);
                    return Poll::Ready(Err(error));
                }
            }
        }
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncWrite for RecordStream<IO> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().poll_seal(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().poll_seal(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.send_owed_key_update()?;
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
