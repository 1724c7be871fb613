//! One TLS connection as tonic uses it. It is counted while it is open. It is closed if no valid
//! token arrives in time, or if it must give way to another one. `admission` decides whether it may
//! stay.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use canal_controller_metrics::{self as metrics, ControllerMetrics};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use crate::admission::ConnectionAdmission;

type ConnectionEndFuture = Pin<Box<dyn Future<Output = &'static str> + Send>>;

/// A connection that has completed its TLS handshake.
pub struct CountedConnection {
    stream: TlsStream<TcpStream>,
    admission: Arc<ConnectionAdmission>,
    /// Resolves with the reason to close the connection; `None` once the connection is authorized.
    end: Option<ConnectionEndFuture>,
    metrics: Arc<ControllerMetrics>,
}

impl CountedConnection {
    pub fn new(
        stream: TlsStream<TcpStream>,
        admission: Arc<ConnectionAdmission>,
        deadline: Instant,
        metrics: Arc<ControllerMetrics>,
    ) -> Self {
        metrics.add(metrics::CONNECTIONS, &[], 1.0);
        let revoked = admission.revoked();
        let end: ConnectionEndFuture = Box::pin(async move {
            tokio::select! {
                () = tokio::time::sleep_until(deadline) => "authorization_deadline",
                () = revoked => "unauthenticated_revoked",
            }
        });
        Self {
            stream,
            admission,
            end: Some(end),
            metrics,
        }
    }

    /// Returns an error once the connection must close. It runs before each read and each write,
    /// because an unauthenticated client may cause only one of the two.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let Some(end) = &mut self.end else {
            return Ok(());
        };
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

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.metrics.add(metrics::CONNECTIONS, &[], -1.0);
    }
}

impl Connected for CountedConnection {
    type ConnectInfo = Arc<ConnectionAdmission>;
    fn connect_info(&self) -> Self::ConnectInfo {
        self.admission.clone()
    }
}

impl AsyncRead for CountedConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for CountedConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
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
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
