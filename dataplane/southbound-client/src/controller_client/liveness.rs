//! TCP connector that records when the peer last sent data. tonic closes a connection whose PING is
//! not answered, but its error does not name this cause. The silence before the error shows it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::codegen::Service;

/// Time of the last read from the peer. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct LastActivity {
    start: Instant,
    /// Milliseconds from `start` to the last read.
    last: Arc<AtomicU64>,
}

impl LastActivity {
    pub(super) fn new() -> Self {
        Self {
            start: Instant::now(),
            last: Arc::default(),
        }
    }
    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
    fn mark(&self) {
        self.last.store(self.now(), Relaxed);
    }
    pub(super) fn idle_time(&self) -> Duration {
        Duration::from_millis(self.now().saturating_sub(self.last.load(Relaxed)))
    }
}

/// Connects over TCP to the authority of the URI.
#[derive(Clone)]
pub(super) struct Connector(pub(super) LastActivity);

impl Service<Uri> for Connector {
    type Response = TokioIo<MonitoredStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let heard = self.0.clone();
        Box::pin(async move {
            let to = uri
                .authority()
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no host:port"))?;
            let tcp = TcpStream::connect(to.as_str()).await?;
            tcp.set_nodelay(true)?;
            heard.mark();
            Ok(TokioIo::new(MonitoredStream {
                tcp,
                last_activity: heard,
            }))
        })
    }
}

/// A TCP connection that records each read.
pub(super) struct MonitoredStream {
    tcp: TcpStream,
    last_activity: LastActivity,
}

impl AsyncRead for MonitoredStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.tcp).poll_read(cx, buf);
        if read.is_ready() {
            self.last_activity.mark();
        }
        read
    }
}

impl AsyncWrite for MonitoredStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write(cx, buf)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}
