//! What can be copied to and from: TCP, tunnels, and either with bytes that were read before.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::net::TcpStream;

use super::{BUFFER, Leg};
use crate::hbone::HboneStream;
use crate::sys;

/// A leg whose first bytes were read already.
#[derive(Debug)]
pub struct Prefixed<L> {
    pub prefix: Bytes,
    pub leg: L,
}

impl<L: Leg> Leg for Prefixed<L> {
    fn poll_chunk(&mut self, cx: &mut Context<'_>, buffer: &mut BytesMut, limit: usize) -> Poll<io::Result<Option<Bytes>>> {
        if self.prefix.is_empty() {
            self.leg.poll_chunk(cx, buffer, limit)
        } else {
            Poll::Ready(Ok(Some(std::mem::take(&mut self.prefix))))
        }
    }
    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        self.leg.poll_send(cx, data)
    }
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.leg.poll_finish(cx)
    }
    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.leg.poll_broken(cx)
    }
    fn abort(&mut self) {
        self.leg.abort();
    }
}

impl Leg for HboneStream {
    fn poll_chunk(&mut self, cx: &mut Context<'_>, _: &mut BytesMut, _: usize) -> Poll<io::Result<Option<Bytes>>> {
        HboneStream::poll_chunk(self, cx)
    }
    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        HboneStream::poll_send(self, cx, data)
    }
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self).poll_shutdown(cx)
    }
    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.poll_reset(cx)
    }
    fn abort(&mut self) {
        self.reset(h2::Reason::CANCEL);
    }
}

impl Leg for TcpStream {
    fn poll_chunk(&mut self, cx: &mut Context<'_>, buffer: &mut BytesMut, limit: usize) -> Poll<io::Result<Option<Bytes>>> {
        // Memory only once there is something to read: idle connections are the most numerous.
        if self.poll_read_ready(cx)?.is_pending() {
            *buffer = BytesMut::new();
            return Poll::Pending;
        }
        if buffer.capacity() < BUFFER[0] {
            buffer.reserve(limit);
        }
        // A fresh future each time is right: it holds no state. `poll_read` in place of `try_read`, because tokio learns from a short
        // read that the socket is empty and saves the read that would say so.
        let n = match pin!(self.read_buf(buffer)).poll(cx) {
            Poll::Ready(n) => n?,
            Poll::Pending => {
                *buffer = BytesMut::new();
                return Poll::Pending;
            }
        };
        Poll::Ready(Ok(if n == 0 { None } else { Some(buffer.split().freeze()) }))
    }
    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        let n = ready!(Pin::new(self).poll_write(cx, data))?;
        data.advance(n);
        Poll::Ready(Ok(n))
    }
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match ready!(Pin::new(self).poll_shutdown(cx)) {
            // The peer has reset it already; reading will say so if it matters.
            Err(e) if e.kind() == io::ErrorKind::NotConnected => Poll::Ready(Ok(())),
            r => Poll::Ready(r),
        }
    }
    fn poll_broken(&mut self, _: &mut Context<'_>) -> Poll<io::Error> {
        // After the peer's FIN the kernel reports the socket readable for ever; a reset shows at the next write.
        Poll::Pending
    }
    fn abort(&mut self) {
        sys::reset_on_close(self);
    }
}
