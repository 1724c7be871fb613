//! A connection after its handshake, whoever shook hands: bytes in and out, and what is known of the peer. No handshake here.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio_rustls::{client, server};

use super::record::{KernelStream, RecordStream};
use super::trust::{PeerLeaf, Standing};

/// What an mTLS connection may go over.
pub trait Transport: AsyncRead + AsyncWrite + Unpin {
    /// The socket that the kernel may be given; `None` where there is none. Always the same.
    fn tcp(&self) -> Option<&TcpStream>;
}

impl Transport for TcpStream {
    fn tcp(&self) -> Option<&TcpStream> {
        Some(self)
    }
}

/// A pipe in memory.
impl Transport for DuplexStream {
    fn tcp(&self) -> Option<&TcpStream> {
        None
    }
}

/// Whether a connection should be followed by another soon.
#[derive(Debug, Clone)]
pub struct Worn(Arc<Notify>);

impl Worn {
    pub(super) fn new() -> Self {
        Self(Arc::default())
    }

    /// It should; said as often as one likes.
    pub(super) fn set(&self) {
        self.0.notify_one();
    }

    /// Resolves when it should.
    pub async fn out(self) {
        self.0.notified().await;
    }
}

/// An mTLS connection.
#[derive(Debug)]
pub struct Stream<IO> {
    inner: Inner<IO>,
    standing: Standing,
}

#[derive(Debug)]
pub(super) enum Inner<IO> {
    Server(Box<server::TlsStream<Rewound<IO>>>),
    Client(Box<client::TlsStream<IO>>),
    /// A key server shook hands; the protocol agreed on.
    Remote(Box<RecordStream<IO>>, Vec<u8>),
    /// The same, and the kernel has its keys.
    Kernel(Box<KernelStream<IO>>, Vec<u8>),
}

impl<IO> Stream<IO> {
    pub(super) fn new(inner: Inner<IO>, standing: Standing) -> Self {
        Self { inner, standing }
    }

    /// What is kept of the peer's certificate.
    pub fn peer_leaf(&self) -> &PeerLeaf {
        self.standing.leaf()
    }

    /// The peer's certificate and the trust it stands by, to be watched while the connection is open.
    pub fn standing(&self) -> &Standing {
        &self.standing
    }

    /// Whether a key server shook hands.
    pub fn is_remote(&self) -> bool {
        matches!(self.inner, Inner::Remote(..) | Inner::Kernel(..))
    }

    /// Whether the kernel seals and opens its records.
    pub fn is_kernel(&self) -> bool {
        matches!(self.inner, Inner::Kernel(..))
    }

    /// Whether its keys' time is nearly over and they cannot be renewed: it should take no new streams then. `None`: that never happens.
    pub fn worn(&self) -> Option<Worn> {
        match &self.inner {
            Inner::Kernel(s, _) => Some(s.worn().clone()),
            _ => None,
        }
    }

    /// The protocol agreed on.
    pub fn alpn(&self) -> Option<&[u8]> {
        match &self.inner {
            Inner::Server(s) => s.get_ref().1.alpn_protocol(),
            Inner::Client(s) => s.get_ref().1.alpn_protocol(),
            Inner::Remote(_, alpn) | Inner::Kernel(_, alpn) => (!alpn.is_empty()).then_some(alpn),
        }
    }

    /// The transport below.
    pub fn get_ref(&self) -> &IO {
        match &self.inner {
            Inner::Server(s) => &s.get_ref().0.io,
            Inner::Client(s) => s.get_ref().0,
            Inner::Remote(s, _) => s.get_ref(),
            Inner::Kernel(s, _) => s.get_ref(),
        }
    }

    #[cfg(test)]
    pub(super) fn inner(&self) -> &Inner<IO> {
        &self.inner
    }
}

/// A transport some of whose bytes were read already: they are read again.
#[derive(Debug)]
pub(super) struct Rewound<IO> {
    front: Vec<u8>,
    at: usize,
    io: IO,
}

impl<IO> Rewound<IO> {
    pub(super) fn new(front: Vec<u8>, io: IO) -> Self {
        Self { front, at: 0, io }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Rewound<IO> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
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

impl<IO: AsyncWrite + Unpin> AsyncWrite for Rewound<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }
    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
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

impl<IO: Transport> AsyncRead for Stream<IO> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        each!(self, s => Pin::new(s).poll_read(cx, buf))
    }
}

impl<IO: Transport> AsyncWrite for Stream<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        each!(self, s => Pin::new(s).poll_write(cx, buf))
    }
    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
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
