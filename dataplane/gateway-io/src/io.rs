//! A byte stream to a client or an endpoint: TCP, an HBONE tunnel, or a client's TLS. It reads into
//! an [`Inbox`] and writes from an [`Outbox`].
//!
//! It knows no protocol above the byte stream. Start with [`Io::poll_fill`] and [`Io::poll_flush`].

mod tls;

use std::cell::Cell;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use canal_hbone::HboneStream;
use canal_net::copy::Leg;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;

pub use tls::TlsIo;

use crate::buffer::{Inbox, Outbox};

/// A bidirectional byte stream to a client or an endpoint.
#[derive(Debug)]
pub enum Io {
    Tcp(TcpStream),
    Tunnel(Box<HboneStream>),
    /// The TLS connection of a client.
    Tls(Box<TlsIo>),
}

impl Io {
    /// Reads available bytes into `inbox` and returns their number; 0 means the end. Occupies no
    /// block while it waits.
    pub fn poll_fill(
        &mut self,
        cx: &mut Context<'_>,
        inbox: &mut Inbox,
    ) -> Poll<io::Result<usize>> {
        match self {
            Io::Tcp(stream) => {
                // Readiness is known without a system call, so the read is the only one.
                ready!(stream.poll_read_ready(cx))?;
                let block = inbox.read_block();
                let read = pin!(stream.read_buf(block)).poll(cx);
                if !matches!(read, Poll::Ready(Ok(1..))) {
                    inbox.release();
                }
                read
            }
            Io::Tunnel(stream) => loop {
                match ready!(stream.poll_chunk(cx))? {
                    Some(chunk) if chunk.is_empty() => {}
                    Some(chunk) => {
                        let n = chunk.len();
                        inbox.adopt(chunk);
                        return Poll::Ready(Ok(n));
                    }
                    None => return Poll::Ready(Ok(0)),
                }
            },
            Io::Tls(tls) => tls.poll_fill(cx, inbox),
        }
    }

    /// Writes all of `outbox`. On an error, and while pending, the unsent rest stays in it.
    pub fn poll_flush(
        &mut self,
        cx: &mut Context<'_>,
        outbox: &mut Outbox,
    ) -> Poll<io::Result<()>> {
        match self {
            Io::Tcp(stream) => {
                while !outbox.is_empty() {
                    let mut stream = Pin::new(&mut *stream);
                    let n = match outbox.single() {
                        // A single span needs no list of vectors.
                        Some(span) => ready!(stream.as_mut().poll_write(cx, span))?,
                        None => ready!(stream.as_mut().poll_write_vectored(cx, &outbox.vectors()))?,
                    };
                    // A write of nothing would be repeated for ever.
                    if n == 0 {
                        return Poll::Ready(Err(ErrorKind::WriteZero.into()));
                    }
                    outbox.advance(n);
                }
            }
            Io::Tls(tls) => return tls.poll_drain(cx, outbox),
            Io::Tunnel(stream) => {
                // Small data is copied once and sent as one frame; large pieces are sent without a
                // copy.
                // A tunnel accepts at least a byte or fails, so this loop ends.
                while !outbox.is_empty() && outbox.len() <= FRAME_COPIED_BYTES_MAX {
                    let n =
                        ready!(Pin::new(&mut **stream).poll_write_vectored(cx, &outbox.vectors()))?;
                    outbox.advance(n);
                }
                while let Some(mut piece) = outbox.pop() {
                    while !piece.is_empty() {
                        match stream.poll_send(cx, &mut piece) {
                            Poll::Ready(Ok(_)) => {}
                            Poll::Ready(Err(e)) => {
                                // The unsent rest may be sent on another connection.
                                outbox.put_back(piece);
                                return Poll::Ready(Err(e));
                            }
                            Poll::Pending => {
                                outbox.put_back(piece);
                                return Poll::Pending;
                            }
                        }
                    }
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Signals that no more will be sent.
    pub fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Io::Tcp(stream) => Leg::poll_finish(stream, cx),
            Io::Tunnel(stream) => Leg::poll_finish(&mut **stream, cx),
            Io::Tls(tls) => tls.poll_finish(cx),
        }
    }

    /// Signals the end right before the stream is dropped, without waiting. Without it, dropping a
    /// tunnel would reset it.
    pub fn end(&mut self) {
        if !matches!(self, Io::Tcp(_)) {
            // If the end cannot be sent immediately, it is not sent.
            let _ = self.poll_finish(&mut Context::from_waker(std::task::Waker::noop()));
        }
    }

    /// True if the connection cannot carry a request: the peer has closed it or has sent
    /// unrequested bytes. Costs no system call while the connection is idle.
    pub fn is_stale(&mut self) -> bool {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        match self {
            Io::Tcp(stream) => match stream.poll_read_ready(&mut cx) {
                Poll::Pending => false,
                Poll::Ready(Err(_)) => true,
                // Readiness may be left over from a read that exactly filled the buffer, so the
                // socket is read.
                Poll::Ready(Ok(())) => {
                    let mut byte = [0u8; 1];
                    !matches!(stream.try_read(&mut byte), Err(e) if e.kind() == ErrorKind::WouldBlock)
                }
            },
            Io::Tunnel(stream) => match stream.poll_chunk(&mut cx) {
                Poll::Ready(_) => true,
                Poll::Pending => stream.poll_reset(&mut cx).is_ready(),
            },
            // Such a connection is never pooled, because endpoints are not reached by TLS.
            Io::Tls(_) => true,
        }
    }

    /// Resolves if the stream fails while it is neither read nor written; stays pending where that
    /// cannot be detected.
    pub fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        match self {
            Io::Tcp(stream) => Leg::poll_broken(stream, cx),
            Io::Tunnel(stream) => stream.poll_reset(cx),
            // A failure of TLS is detected only by reading.
            Io::Tls(_) => Poll::Pending,
        }
    }

    /// Polls a stream that is not read because its bytes are accepted nowhere; see
    /// [`Leg::poll_stalled`].
    pub fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        match self {
            Io::Tcp(stream) => Leg::poll_stalled(stream, cx),
            Io::Tunnel(stream) => stream.poll_stalled(cx),
            Io::Tls(_) => Poll::Pending,
        }
    }

    /// Returns whether the peer has reset the connection; see [`Leg::is_reset`].
    pub fn is_reset(&self) -> bool {
        match self {
            Io::Tcp(stream) => Leg::is_reset(stream),
            Io::Tunnel(stream) => Leg::is_reset(&**stream),
            Io::Tls(tls) => tls.is_reset(),
        }
    }

    /// Returns the number of bytes sent through a tunnel so far.
    pub fn sent(&self) -> u64 {
        match self {
            Io::Tunnel(stream) => stream.sent(),
            Io::Tcp(_) | Io::Tls(_) => 0,
        }
    }

    /// Retains what a tunnel sends from now on for [`Io::take_sent`], until something is read.
    pub fn keep_sent(&mut self) {
        if let Io::Tunnel(stream) = self {
            stream.keep_sent();
        }
    }

    /// Returns the bytes sent since [`Io::keep_sent`], if all of them were retained.
    pub fn take_sent(&mut self) -> Option<Vec<Bytes>> {
        match self {
            Io::Tunnel(stream) => stream.take_sent(),
            Io::Tcp(_) | Io::Tls(_) => None,
        }
    }

    /// True if the endpoint's node reported that nothing beyond the first `sent` bytes reached the
    /// application.
    pub fn is_undelivered_beyond(&self, sent: u64) -> bool {
        match self {
            Io::Tunnel(stream) => stream
                .close_report()
                .is_some_and(|report| report.delivered <= sent),
            Io::Tcp(_) | Io::Tls(_) => false,
        }
    }

    /// Ready when all sent bytes have left, or never will; see [`Leg::poll_departed`].
    pub fn poll_departed(&mut self) -> Poll<()> {
        match self {
            Io::Tcp(stream) => Leg::poll_departed(stream),
            Io::Tunnel(stream) => stream.poll_departed(),
            // TLS records are already written to TCP.
            Io::Tls(_) => Poll::Ready(()),
        }
    }

    /// Makes the stream end with a reset instead of an orderly close.
    pub fn abort(&mut self) {
        match self {
            Io::Tcp(stream) => canal_net::sys::reset_on_close(stream),
            Io::Tunnel(stream) => stream.reset(h2::Reason::CANCEL),
            Io::Tls(tls) => tls.abort(),
        }
    }
}

/// Most bytes that are copied into one frame of a tunnel. A larger piece is its own frame, without
/// a copy. Nobody measured where the two cost the same.
const FRAME_COPIED_BYTES_MAX: usize = 4 << 10;

impl Leg for Io {
    fn poll_chunk(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
        limit: usize,
    ) -> Poll<io::Result<Option<Bytes>>> {
        match self {
            Io::Tcp(stream) => Leg::poll_chunk(stream, cx, buffer, limit),
            Io::Tunnel(stream) => Leg::poll_chunk(&mut **stream, cx, buffer, limit),
            Io::Tls(tls) => tls.poll_chunk(cx, buffer, limit),
        }
    }
    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        match self {
            Io::Tcp(stream) => Leg::poll_send(stream, cx, data),
            Io::Tunnel(stream) => Leg::poll_send(&mut **stream, cx, data),
            Io::Tls(tls) => tls.poll_send(cx, data),
        }
    }
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Io::poll_finish(self, cx)
    }
    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        Io::poll_broken(self, cx)
    }
    fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        Io::poll_stalled(self, cx)
    }
    fn is_reset(&self) -> bool {
        Io::is_reset(self)
    }
    fn poll_departed(&mut self) -> Poll<()> {
        Io::poll_departed(self)
    }
    fn abort(&mut self) {
        Io::abort(self);
    }
}

/// An [`Io`] whose first bytes were already read, for the `h2` crate.
#[derive(Debug)]
pub struct PrefixedIo {
    first: Bytes,
    io: Io,
    /// Number of bytes read so far from the stream, without the prefix.
    pub read: Rc<Cell<u64>>,
}

impl PrefixedIo {
    pub fn new(first: Bytes, io: Io) -> Self {
        Self {
            first,
            io,
            read: Rc::default(),
        }
    }
}

impl AsyncRead for PrefixedIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.first.is_empty() {
            let n = self.first.len().min(buf.remaining());
            buf.put_slice(&self.first[..n]);
            self.first.advance(n);
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        let read = match &mut self.io {
            Io::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Io::Tunnel(stream) => Pin::new(&mut **stream).poll_read(cx, buf),
            Io::Tls(tls) => Pin::new(&mut **tls).poll_read(cx, buf),
        };
        self.read
            .set(self.read.get() + (buf.filled().len() - before) as u64);
        read
    }
}

impl AsyncWrite for PrefixedIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.io {
            Io::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Io::Tunnel(stream) => Pin::new(&mut **stream).poll_write(cx, buf),
            Io::Tls(tls) => Pin::new(&mut **tls).poll_write(cx, buf),
        }
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.io {
            Io::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Io::Tunnel(stream) => Pin::new(&mut **stream).poll_write_vectored(cx, bufs),
            Io::Tls(tls) => Pin::new(&mut **tls).poll_write_vectored(cx, bufs),
        }
    }
    fn is_write_vectored(&self) -> bool {
        matches!(self.io, Io::Tcp(_))
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Io::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Io::Tunnel(stream) => Pin::new(&mut **stream).poll_flush(cx),
            Io::Tls(tls) => Pin::new(&mut **tls).poll_flush(cx),
        }
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io.poll_finish(cx)
    }
}

/// Most bytes that [`linger`] reads and discards before it closes a connection whose peer still
/// sends. Nobody measured this value: it bounds what a client that never stops costs, which the
/// peer's speed and the time below bound first.
const LINGER_BYTES_MAX: usize = 64 << 20;
/// Longest time that [`linger`] takes, however much is read (nginx's `lingering_time`).
const LINGER_TIME_MAX: Duration = Duration::from_secs(30);

/// Closes the stream so that the peer receives the last response. Closing with unread bytes would
/// send a reset, which may overtake the response; many clients read no response before they have
/// sent everything (RFC 9112 §9.6). Returns at the peer's close, after [`LINGER_BYTES_MAX`], or
/// after [`LINGER_TIME_MAX`]. The caller limits the silence of the peer; `on_read` restarts that
/// timeout.
pub async fn linger(io: &mut Io, inbox: &mut Inbox, on_read: impl Fn()) {
    if std::future::poll_fn(|cx| io.poll_finish(cx)).await.is_err() {
        return;
    }
    let since = Instant::now();
    let mut left = LINGER_BYTES_MAX;
    loop {
        inbox.advance(inbox.len());
        match std::future::poll_fn(|cx| io.poll_fill(cx, inbox)).await {
            Ok(n) if n > 0 && n <= left && since.elapsed() < LINGER_TIME_MAX => {
                left -= n;
                on_read();
            }
            _ => return,
        }
    }
}
