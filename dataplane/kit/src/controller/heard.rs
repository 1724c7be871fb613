//! A TCP connector that remembers when the peer was last heard. tonic drops a connection whose PING is unanswered without saying that
//! this was why; the silence before it tells.

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

/// When the peer was last heard; clones share it.
#[derive(Debug, Clone)]
pub(super) struct Heard {
    start: Instant,
    /// Milliseconds since `start`.
    last: Arc<AtomicU64>,
}

impl Heard {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), last: Arc::default() }
    }
    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
    fn mark(&self) {
        self.last.store(self.now(), Relaxed);
    }
    pub(super) fn silence(&self) -> Duration {
        Duration::from_millis(self.now().saturating_sub(self.last.load(Relaxed)))
    }
}

/// TCP to the URI's authority.
#[derive(Clone)]
pub(super) struct Connector(pub(super) Heard);

impl Service<Uri> for Connector {
    type Response = TokioIo<Listened>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let heard = self.0.clone();
        Box::pin(async move {
            let to = uri.authority().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no host:port"))?;
            let tcp = TcpStream::connect(to.as_str()).await?;
            tcp.set_nodelay(true)?;
            heard.mark();
            Ok(TokioIo::new(Listened { tcp, heard }))
        })
    }
}

/// A TCP connection that marks each read.
pub(super) struct Listened {
    tcp: TcpStream,
    heard: Heard,
}

impl AsyncRead for Listened {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.tcp).poll_read(cx, buf);
        if read.is_ready() {
            self.heard.mark();
        }
        read
    }
}

impl AsyncWrite for Listened {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write(cx, buf)
    }
    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
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
