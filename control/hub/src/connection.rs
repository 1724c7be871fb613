//! One TLS connection as tonic takes it: counted while it lives, and holding its place among [`crate::CONNECTIONS_MAX`].

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use crate::metrics::{self, Metrics};

/// A connection after its handshake.
pub(crate) struct Connection {
    stream: TlsStream<TcpStream>,
    _place: OwnedSemaphorePermit,
    metrics: Arc<Metrics>,
}

impl Connection {
    pub(crate) fn new(stream: TlsStream<TcpStream>, place: OwnedSemaphorePermit, metrics: Arc<Metrics>) -> Self {
        metrics.add(metrics::CONNECTIONS, &[], 1.0);
        Self { stream, _place: place, metrics }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.metrics.add(metrics::CONNECTIONS, &[], -1.0);
    }
}

impl Connected for Connection {
    type ConnectInfo = ();
    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
