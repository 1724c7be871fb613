//! Legs of a copy: TCP connections, and any leg with bytes that were read earlier.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncWrite, Interest};
use tokio::net::TcpStream;

use super::{BUFFER, Leg};
use crate::sys;

/// A leg whose first bytes were read earlier.
#[derive(Debug)]
pub struct Prefixed<L> {
    pub prefix: Bytes,
    pub leg: L,
}

impl<L: Leg> Leg for Prefixed<L> {
    fn poll_chunk(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
        limit: usize,
    ) -> Poll<io::Result<Option<Bytes>>> {
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
    fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.leg.poll_stalled(cx)
    }
    fn is_reset(&self) -> bool {
        self.leg.is_reset()
    }
    fn poll_departed(&mut self) -> Poll<()> {
        self.leg.poll_departed()
    }
    fn abort(&mut self) {
        self.leg.abort();
    }
}

impl Leg for TcpStream {
    fn poll_chunk(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
        limit: usize,
    ) -> Poll<io::Result<Option<Bytes>>> {
        loop {
            // Memory is allocated only when there is something to read, because most connections
            // are idle.
            if self.poll_read_ready(cx)?.is_pending() {
                *buffer = BytesMut::new();
                return Poll::Pending;
            }
            if buffer.capacity() < BUFFER[0] {
                buffer.reserve(limit);
            }
            let mut got = None;
            let read = self.try_io(Interest::READABLE, || {
                let (n, has_more) = sys::receive(self, buffer)?;
                got = Some(n);
                // `WouldBlock` makes tokio wait for the next readiness event. That saves the read
                // that would find the socket empty.
                if has_more {
                    Ok(())
                } else {
                    Err(io::ErrorKind::WouldBlock.into())
                }
            });
            match (got, read) {
                (Some(0), _) => return Poll::Ready(Ok(None)),
                (Some(_), _) => return Poll::Ready(Ok(Some(buffer.split().freeze()))),
                (None, Err(e)) if e.kind() != io::ErrorKind::WouldBlock => {
                    return Poll::Ready(Err(e));
                }
                // The next iteration registers for the next readiness event.
                (None, _) => {}
            }
        }
    }
    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        let n = ready!(Pin::new(self).poll_write(cx, data))?;
        data.advance(n);
        Poll::Ready(Ok(n))
    }
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match ready!(Pin::new(self).poll_shutdown(cx)) {
            // The peer has reset the connection already; a read reports that if it matters.
            Err(e) if e.kind() == io::ErrorKind::NotConnected => Poll::Ready(Ok(())),
            r => Poll::Ready(r),
        }
    }
    fn poll_broken(&mut self, _: &mut Context<'_>) -> Poll<io::Error> {
        // After the peer's FIN the kernel reports the socket as readable for ever. A reset shows at
        // the next write.
        Poll::Pending
    }
    fn poll_stalled(&mut self, _: &mut Context<'_>) -> Poll<io::Error> {
        // The kernel keeps what arrives.
        Poll::Pending
    }
    fn is_reset(&self) -> bool {
        sys::tcp_is_closed(self).unwrap_or(false)
    }
    fn poll_departed(&mut self) -> Poll<()> {
        // If the kernel cannot report the state, there is nothing to wait for.
        if sys::tcp_is_delivered(self).unwrap_or(true) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
    fn abort(&mut self) {
        sys::reset_on_close(self);
    }
}
