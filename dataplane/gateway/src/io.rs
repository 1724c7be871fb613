//! A byte stream to a client or an endpoint: TCP or an HBONE tunnel. Reads into an [`Inbox`], writes from an [`Outbox`]; no protocol.

mod tls;

use std::cell::Cell;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use canal_kit::copy::Leg;
use canal_kit::hbone::HboneStream;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

pub(crate) use tls::Tls;

use crate::buffer::{BLOCK, Inbox, Outbox};

/// One stream of bytes, both ways.
#[derive(Debug)]
pub(crate) enum Io {
    Tcp(TcpStream),
    Tunnel(Box<HboneStream>),
    /// A client's.
    Tls(Box<Tls>),
}

impl Io {
    /// Reads what is there into `inbox`; 0 is the end. Holds no block while it waits.
    pub(crate) fn poll_fill(&mut self, cx: &mut Context<'_>, inbox: &mut Inbox) -> Poll<io::Result<usize>> {
        match self {
            Io::Tcp(stream) => {
                // The readiness is known without a system call; the read that follows is the only one.
                ready!(stream.poll_read_ready(cx))?;
                let block = inbox.room();
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

    /// Writes all of `outbox`.
    pub(crate) fn poll_flush(&mut self, cx: &mut Context<'_>, outbox: &mut Outbox) -> Poll<io::Result<()>> {
        match self {
            Io::Tcp(stream) => {
                while !outbox.is_empty() {
                    let mut stream = Pin::new(&mut *stream);
                    let n = match outbox.single() {
                        Some(span) => ready!(stream.as_mut().poll_write(cx, span))?,
                        None => ready!(stream.as_mut().poll_write_vectored(cx, &outbox.vectors()))?,
                    };
                    if n == 0 {
                        return Poll::Ready(Err(ErrorKind::WriteZero.into()));
                    }
                    outbox.advance(n);
                }
            }
            Io::Tls(tls) => return tls.poll_drain(cx, outbox),
            Io::Tunnel(stream) => {
                // What is small goes out as one frame, copied once; large pieces go as they are.
                while !outbox.is_empty() && outbox.len() <= FRAME_COPIED_BYTES_MAX {
                    let n = ready!(Pin::new(&mut **stream).poll_write_vectored(cx, &outbox.vectors()))?;
                    outbox.advance(n);
                }
                while let Some(mut piece) = outbox.pop() {
                    while !piece.is_empty() {
                        match stream.poll_send(cx, &mut piece) {
                            Poll::Ready(Ok(_)) => {}
                            Poll::Ready(Err(e)) => return Poll::Ready(Err(e)),
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

    /// Says that no more will be sent.
    pub(crate) fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Io::Tcp(stream) => Leg::poll_finish(stream, cx),
            Io::Tunnel(stream) => Leg::poll_finish(&mut **stream, cx),
            Io::Tls(tls) => tls.poll_finish(cx),
        }
    }

    /// [`Io::poll_finish`] where nobody waits for it, right before the stream goes: dropped alone, a tunnel would be reset.
    pub(crate) fn end(&mut self) {
        if !matches!(self, Io::Tcp(_)) {
            // What cannot be said now is not said.
            let _ = self.poll_finish(&mut Context::from_waker(std::task::Waker::noop()));
        }
    }

    /// True if the peer is known to have closed, or to have sent bytes nobody asked for: the connection cannot carry a request.
    /// Costs no system call while the connection is idle.
    pub(crate) fn is_stale(&mut self) -> bool {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        match self {
            Io::Tcp(stream) => match stream.poll_read_ready(&mut cx) {
                Poll::Pending => false,
                Poll::Ready(Err(_)) => true,
                // A readiness may be left over from an exactly filled read: ask the socket.
                Poll::Ready(Ok(())) => {
                    let mut byte = [0u8; 1];
                    !matches!(stream.try_read(&mut byte), Err(e) if e.kind() == ErrorKind::WouldBlock)
                }
            },
            Io::Tunnel(stream) => match stream.poll_chunk(&mut cx) {
                Poll::Ready(_) => true,
                Poll::Pending => stream.poll_reset(&mut cx).is_ready(),
            },
            // Never kept: endpoints are not reached by TLS.
            Io::Tls(_) => true,
        }
    }

    /// Resolves if the stream breaks while it is neither read nor written; pending where that cannot be known.
    pub(crate) fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        match self {
            Io::Tcp(stream) => Leg::poll_broken(stream, cx),
            Io::Tunnel(stream) => stream.poll_reset(cx),
            // Told only by reading.
            Io::Tls(_) => Poll::Pending,
        }
    }

    /// Makes the end a reset, not an orderly close.
    pub(crate) fn abort(&mut self) {
        match self {
            Io::Tcp(stream) => canal_kit::sys::reset_on_close(stream),
            Io::Tunnel(stream) => stream.reset(h2::Reason::CANCEL),
            Io::Tls(tls) => tls.abort(),
        }
    }
}

/// Written into a tunnel by copy, as one frame, up to this many bytes.
const FRAME_COPIED_BYTES_MAX: usize = 4 << 10;

impl Leg for Io {
    fn poll_chunk(&mut self, cx: &mut Context<'_>, buffer: &mut BytesMut, limit: usize) -> Poll<io::Result<Option<Bytes>>> {
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
    fn abort(&mut self) {
        Io::abort(self);
    }
}

/// An [`Io`] whose first bytes were read already, for the `h2` crate.
#[derive(Debug)]
pub(crate) struct Rewound {
    first: Bytes,
    io: Io,
    /// Bytes read so far.
    pub(crate) read: Rc<Cell<u64>>,
}

impl Rewound {
    pub(crate) fn new(first: Bytes, io: Io) -> Self {
        Self { first, io, read: Rc::default() }
    }
}

impl AsyncRead for Rewound {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
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
        self.read.set(self.read.get() + (buf.filled().len() - before) as u64);
        read
    }
}

impl AsyncWrite for Rewound {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.io {
            Io::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Io::Tunnel(stream) => Pin::new(&mut **stream).poll_write(cx, buf),
            Io::Tls(tls) => Pin::new(&mut **tls).poll_write(cx, buf),
        }
    }
    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
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

/// Bytes read and thrown away at most before a refused connection is closed; see [`linger`].
const LINGER_BYTES_MAX: usize = 64 * BLOCK;

/// Closes so that the peer sees the last answer: closing with unread bytes would be a reset, which may overtake it (RFC 9112 §9.6).
/// Ends at the peer's close or after [`LINGER_BYTES_MAX`]; the caller bounds the time.
pub(crate) async fn linger(io: &mut Io, inbox: &mut Inbox) {
    if std::future::poll_fn(|cx| io.poll_finish(cx)).await.is_err() {
        return;
    }
    let mut left = LINGER_BYTES_MAX;
    loop {
        inbox.advance(inbox.len());
        match std::future::poll_fn(|cx| io.poll_fill(cx, inbox)).await {
            Ok(n) if n > 0 && n <= left => left -= n,
            _ => return,
        }
    }
}
