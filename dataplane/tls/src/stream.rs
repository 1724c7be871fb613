//! A connection after its handshake, local or remote: bytes in and out, and the data of the peer.
//! It performs no handshake.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::{client, server};

use super::record::{KernelStream, RecordStream};
use super::transport::{RotateHint, Transport};
use super::trust::PeerTrustWatch;
use super::verified_chain::PeerLeaf;

/// An mTLS connection with an authenticated peer.
#[derive(Debug)]
pub struct MtlsStream<IO> {
    inner: Inner<IO>,
    trust_watch: PeerTrustWatch,
}

/// The connection by the place of its keys.
#[derive(Debug)]
pub enum Inner<IO> {
    /// Connection of the accepting side, with a local handshake.
    Server(Box<server::TlsStream<PrefixedStream<IO>>>),
    /// Connection of the connecting side, with a local handshake.
    Client(Box<client::TlsStream<IO>>),
    /// Connection with a remote handshake, and the negotiated protocol.
    Remote(Box<RecordStream<IO>>, Vec<u8>),
    /// Connection with a remote handshake whose keys are in the kernel, and the negotiated
    /// protocol.
    Kernel(Box<KernelStream<IO>>, Vec<u8>),
}

impl<IO> MtlsStream<IO> {
    pub(super) fn new(inner: Inner<IO>, trust_watch: PeerTrustWatch) -> Self {
        Self { inner, trust_watch }
    }

    /// Creates the connection of the accepting side after a local handshake with a verified peer.
    pub fn of_server(
        stream: server::TlsStream<PrefixedStream<IO>>,
        peer_trust: PeerTrustWatch,
    ) -> Self {
        Self::new(Inner::Server(Box::new(stream)), peer_trust)
    }

    /// Creates the connection of the connecting side after a local handshake with a verified peer.
    pub fn of_client(stream: client::TlsStream<IO>, peer_trust: PeerTrustWatch) -> Self {
        Self::new(Inner::Client(Box::new(stream)), peer_trust)
    }

    /// Returns the data of the peer's certificate.
    pub fn peer_leaf(&self) -> &PeerLeaf {
        self.trust_watch.leaf()
    }

    /// Returns the watch of the peer's trust while the connection is open.
    pub fn peer_trust(&self) -> &PeerTrustWatch {
        &self.trust_watch
    }

    /// Returns whether a key server performed the handshake.
    pub fn is_remote(&self) -> bool {
        matches!(self.inner, Inner::Remote(..) | Inner::Kernel(..))
    }

    /// Returns whether the kernel encrypts and decrypts the records.
    pub fn is_kernel(&self) -> bool {
        matches!(self.inner, Inner::Kernel(..))
    }

    /// Returns the hint that the connection's keys are near their limit and cannot be renewed, so
    /// that it should take no new streams. `None` if that never happens.
    pub fn rotate_hint(&self) -> Option<RotateHint> {
        match &self.inner {
            Inner::Kernel(s, _) => Some(s.rotate_hint().clone()),
            _ => None,
        }
    }

    /// Returns the negotiated application protocol (ALPN).
    pub fn alpn(&self) -> Option<&[u8]> {
        match &self.inner {
            Inner::Server(s) => s.get_ref().1.alpn_protocol(),
            Inner::Client(s) => s.get_ref().1.alpn_protocol(),
            Inner::Remote(_, alpn) | Inner::Kernel(_, alpn) => (!alpn.is_empty()).then_some(alpn),
        }
    }

    /// Returns the transport below TLS.
    pub fn get_ref(&self) -> &IO {
        match &self.inner {
            Inner::Server(s) => &s.get_ref().0.io,
            Inner::Client(s) => s.get_ref().0,
            Inner::Remote(s, _) => s.get_ref(),
            Inner::Kernel(s, _) => s.get_ref(),
        }
    }

    /// Returns the connection by the place of its keys, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn inner(&self) -> &Inner<IO> {
        &self.inner
    }
}

/// A transport of which some bytes were read earlier. They are read again.
#[derive(Debug)]
pub struct PrefixedStream<IO> {
    front: Vec<u8>,
    at: usize,
    io: IO,
    has_written: bool,
}

impl<IO> PrefixedStream<IO> {
    /// Creates the stream, from which `front` is read first.
    pub fn new(front: Vec<u8>, io: IO) -> Self {
        Self {
            front,
            at: 0,
            io,
            has_written: false,
        }
    }

    /// Returns whether anything was written, or was to be written.
    pub fn has_written(&self) -> bool {
        self.has_written
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for PrefixedStream<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.at == this.front.len() {
            return Pin::new(&mut this.io).poll_read(cx, buf);
        }
        let n = buf.remaining().min(this.front.len() - this.at);
        buf.put_slice(&this.front[this.at..this.at + n]);
        this.at += n;
        if this.at == this.front.len() {
            (this.front, this.at) = (Vec::new(), 0);
        }
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for PrefixedStream<IO> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.has_written = true;
        Pin::new(&mut self.io).poll_write(cx, buf)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.has_written = true;
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

macro_rules! each {
    ($self:ident, $s:ident => $call:expr) => {
        match &mut $self.inner {
            Inner::Server($s) => $call,
            Inner::Client($s) => $call,
            Inner::Remote($s, _) => $call,
            Inner::Kernel($s, _) => $call,
        }
    };
}

impl<IO: Transport> AsyncRead for MtlsStream<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        each!(self, s => Pin::new(s).poll_read(cx, buf))
    }
}

impl<IO: Transport> AsyncWrite for MtlsStream<IO> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        each!(self, s => Pin::new(s).poll_write(cx, buf))
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        each!(self, s => Pin::new(s).poll_write_vectored(cx, bufs))
    }
    fn is_write_vectored(&self) -> bool {
        true
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, s => Pin::new(s).poll_flush(cx))
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, s => Pin::new(s).poll_shutdown(cx))
    }
}
