//! One TLS connection as tonic takes it: counted while it lives, and cut when it proves nothing in time or has to give way. Whether it may
//! stay is `admission`'s.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use crate::admission::Admission;
use crate::metrics::{self, Metrics};

type EndFuture = Pin<Box<dyn Future<Output = &'static str> + Send>>;

/// A connection after its handshake.
pub(crate) struct Connection {
    stream: TlsStream<TcpStream>,
    admission: Arc<Admission>,
    /// Why it ends, when it has to; `None` once it is authorized.
    end: Option<EndFuture>,
    metrics: Arc<Metrics>,
}

impl Connection {
    pub(crate) fn new(stream: TlsStream<TcpStream>, admission: Arc<Admission>, deadline: Instant, metrics: Arc<Metrics>) -> Self {
        metrics.add(metrics::CONNECTIONS, &[], 1.0);
        let revoked = admission.revoked();
        let end: EndFuture = Box::pin(async move {
            tokio::select! {
                () = tokio::time::sleep_until(deadline) => "authorization_deadline",
                () = revoked => "unauthenticated_revoked",
            }
        });
        Self { stream, admission, end: Some(end), metrics }
    }

    /// An error once it has to end. Asked before each read and write, since either may be all that an unauthenticated client lets happen.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let Some(end) = &mut self.end else { return Ok(()) };
        if self.admission.is_authorized() {
            self.end = None;
            return Ok(());
        }
        match end.as_mut().poll(cx) {
            Poll::Pending => Ok(()),
            Poll::Ready(reason) => {
                self.end = None;
                self.metrics.count(metrics::REFUSED, &[("reason", reason)]);
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, reason))
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.metrics.add(metrics::CONNECTIONS, &[], -1.0);
    }
}

impl Connected for Connection {
    type ConnectInfo = Arc<Admission>;
    fn connect_info(&self) -> Self::ConnectInfo {
        self.admission.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
