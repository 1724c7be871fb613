//! A client's TLS connection as a byte stream. Written data is flushed even if nothing more is
//! written. Handshakes are done elsewhere.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use crate::buffer::{Inbox, Outbox};

/// TLS stream of a client, after the handshake.
#[derive(Debug)]
pub struct TlsIo {
    stream: TlsStream<TcpStream>,
    /// True if the TLS session may contain records that the socket did not accept.
    has_unsent_records: bool,
}

impl TlsIo {
    pub fn new(stream: TlsStream<TcpStream>) -> Self {
        Self {
            stream,
            has_unsent_records: false,
        }
    }

    /// Flushes pending records as far as the socket accepts them. The task that waits to read is
    /// woken for the rest.
    fn let_out(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.has_unsent_records {
            self.has_unsent_records = Pin::new(&mut self.stream).poll_flush(cx)?.is_pending();
        }
        Ok(())
    }

    pub(super) fn poll_fill(
        &mut self,
        cx: &mut Context<'_>,
        inbox: &mut Inbox,
    ) -> Poll<io::Result<usize>> {
        self.let_out(cx)?;
        let block = inbox.read_block();
        let read = pin!(self.stream.read_buf(block)).poll(cx);
        if !matches!(read, Poll::Ready(Ok(1..))) {
            inbox.release();
        }
        read
    }

    pub(super) fn poll_drain(
        &mut self,
        cx: &mut Context<'_>,
        outbox: &mut Outbox,
    ) -> Poll<io::Result<()>> {
        while !outbox.is_empty() {
            let n = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, &outbox.vectors()))?;
            self.has_unsent_records = true;
            if n == 0 {
                return Poll::Ready(Err(ErrorKind::WriteZero.into()));
            }
            outbox.advance(n);
        }
        if self.has_unsent_records {
            ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
            self.has_unsent_records = false;
        }
        Poll::Ready(Ok(()))
    }

    pub(super) fn poll_chunk(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
        limit: usize,
    ) -> Poll<io::Result<Option<Bytes>>> {
        self.let_out(cx)?;
        if buffer.capacity() == 0 {
            buffer.reserve(limit);
        }
        match pin!(self.stream.read_buf(buffer)).poll(cx) {
            Poll::Ready(Ok(0)) => Poll::Ready(Ok(None)),
            Poll::Ready(Ok(_)) => Poll::Ready(Ok(Some(buffer.split().freeze()))),
            Poll::Ready(Err(e)) => Poll::Ready(Err(e)),
            Poll::Pending => {
                *buffer = BytesMut::new();
                Poll::Pending
            }
        }
    }

    pub(super) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        data: &mut Bytes,
    ) -> Poll<io::Result<usize>> {
        let n = ready!(Pin::new(&mut self.stream).poll_write(cx, data))?;
        data.advance(n);
        self.has_unsent_records = true;
        self.let_out(cx)?;
        Poll::Ready(Ok(n))
    }

    pub(super) fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    pub(super) fn is_reset(&self) -> bool {
        canal_net::copy::Leg::is_reset(self.stream.get_ref().0)
    }

    pub(super) fn abort(&mut self) {
        canal_net::sys::reset_on_close(self.stream.get_ref().0);
    }
}

impl AsyncRead for TlsIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.let_out(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for TlsIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.has_unsent_records = true;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.has_unsent_records = false;
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
