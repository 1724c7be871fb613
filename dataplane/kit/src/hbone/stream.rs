//! One tunnel as a duplex byte stream: flow control given back as bytes are consumed, half-close as END_STREAM, reset as RST_STREAM.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use h2::{Reason, RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::pool::Taken;

/// A tunnel. `AsyncRead`/`AsyncWrite` for codecs; [`HboneStream::poll_chunk`] and [`HboneStream::poll_send`] move bytes without copying.
///
/// Reading ends with EOF on END_STREAM and with `ConnectionReset` on RST_STREAM or a lost connection. `poll_shutdown` sends END_STREAM.
/// Dropping it before both directions ended resets the stream (CANCEL).
pub struct HboneStream {
    send: SendStream<Bytes>,
    recv: RecvStream,
    /// Put back by the caller; its window was given back before.
    unread: Bytes,
    /// Received, not read yet; still counts against the peer's window.
    front: Bytes,
    /// Handed out as a chunk; given back to the peer's window when the next one is asked for.
    owed: usize,
    read_ended: bool,
    write_ended: bool,
    // Last field: the pool hears of the stream's end after h2 does.
    _taken: Option<Taken>,
}

impl fmt::Debug for HboneStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HboneStream({})", self.send.stream_id().as_u32())
    }
}

/// RST_STREAM, GOAWAY and a lost connection are all a reset to the one who reads or writes a tunnel.
fn reset_error(e: &h2::Error) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, format!("tunnel: {e}"))
}

impl HboneStream {
    pub(super) fn new(send: SendStream<Bytes>, recv: RecvStream, taken: Option<Taken>) -> Self {
        let (unread, front) = (Bytes::new(), Bytes::new());
        Self { send, recv, unread, front, owed: 0, read_ended: false, write_ended: false, _taken: taken }
    }

    /// The next bytes, without copying; `None` at the end. The window is given back at the next call, when the chunk is surely consumed,
    /// so a slow consumer stops the sender.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        self.settle();
        if !self.unread.is_empty() {
            return Poll::Ready(Ok(Some(std::mem::take(&mut self.unread))));
        }
        if !ready!(self.poll_front(cx))? {
            return Poll::Ready(Ok(None));
        }
        self.owed = self.front.len();
        Poll::Ready(Ok(Some(std::mem::take(&mut self.front))))
    }

    /// Sends from the front of `data` as far as the window allows, without copying; ready when at least one byte is taken (or `data` is
    /// empty). `data` keeps the rest.
    pub fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        if data.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let n = ready!(self.poll_window(cx, data.len()))?;
        let part = data.split_to(n);
        match self.send.send_data(part, false) {
            Ok(()) => Poll::Ready(Ok(n)),
            Err(e) => Poll::Ready(Err(self.send_error(cx, Some(e)))),
        }
    }

    /// Puts `bytes` back in front of what will be read (after sniffing a protocol).
    pub fn unread(&mut self, bytes: Bytes) {
        self.unread = if self.unread.is_empty() { bytes } else { [bytes, std::mem::take(&mut self.unread)].concat().into() };
    }

    /// Resets both directions (RST_STREAM).
    pub fn reset(&mut self, reason: Reason) {
        self.send.send_reset(reason);
        (self.read_ended, self.write_ended) = (true, true);
    }

    /// Resolves when the peer resets the stream or the connection is lost, also while nothing is read or written.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.send.poll_reset(cx).map(|r| match r {
            Ok(reason) => io::Error::new(io::ErrorKind::ConnectionReset, format!("tunnel: reset by the peer: {reason}")),
            Err(e) => reset_error(&e),
        })
    }

    /// The HTTP/2 stream number, for logs.
    pub fn id(&self) -> u32 {
        self.send.stream_id().as_u32()
    }

    /// Gives back the window of what was handed out.
    fn settle(&mut self) {
        let owed = std::mem::take(&mut self.owed);
        if owed > 0 {
            // Fails only on a stream that is gone, whose window nobody needs.
            let _ = self.recv.flow_control().release_capacity(owed);
        }
    }

    /// Fills `front`; false at the end.
    fn poll_front(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        while self.front.is_empty() {
            if self.read_ended {
                return Poll::Ready(Ok(false));
            }
            match ready!(self.recv.poll_data(cx)) {
                Some(Ok(data)) => self.front = data,
                Some(Err(e)) => {
                    self.read_ended = true;
                    return Poll::Ready(Err(reset_error(&e)));
                }
                None => self.read_ended = true,
            }
        }
        Poll::Ready(Ok(true))
    }

    /// At least one and at most `wanted` bytes may be sent now.
    fn poll_window(&mut self, cx: &mut Context<'_>, wanted: usize) -> Poll<io::Result<usize>> {
        if self.write_ended {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::BrokenPipe, "tunnel: written to after its end")));
        }
        loop {
            // The total wanted, not an addition; what is assigned beyond what is used would be missing for other streams.
            self.send.reserve_capacity(wanted);
            let n = self.send.capacity().min(wanted);
            if n > 0 {
                return Poll::Ready(Ok(n));
            }
            match ready!(self.send.poll_capacity(cx)) {
                Some(Ok(_)) => {}
                Some(Err(e)) => return Poll::Ready(Err(self.send_error(cx, Some(e)))),
                None => return Poll::Ready(Err(self.send_error(cx, None))),
            }
        }
    }

    /// Why sending failed: h2 says "inactive stream", the reason is in the reset.
    fn send_error(&mut self, cx: &mut Context<'_>, e: Option<h2::Error>) -> io::Error {
        self.write_ended = true;
        match (self.poll_reset(cx), e) {
            (Poll::Ready(reset), _) => reset,
            (Poll::Pending, Some(e)) => reset_error(&e),
            (Poll::Pending, None) => io::Error::new(io::ErrorKind::BrokenPipe, "tunnel: closed for sending"),
        }
    }
}

impl AsyncRead for HboneStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.settle();
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        if !self.unread.is_empty() {
            let n = self.unread.len().min(buf.remaining());
            buf.put_slice(&self.unread[..n]);
            self.unread.advance(n);
            return Poll::Ready(Ok(()));
        }
        if ready!(self.poll_front(cx))? {
            let n = self.front.len().min(buf.remaining());
            buf.put_slice(&self.front[..n]);
            self.front.advance(n);
            self.owed = n;
            self.settle();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for HboneStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if buf.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let n = ready!(self.poll_window(cx, buf.len()))?;
        match self.send.send_data(Bytes::copy_from_slice(&buf[..n]), false) {
            Ok(()) => Poll::Ready(Ok(n)),
            Err(e) => Poll::Ready(Err(self.send_error(cx, Some(e)))),
        }
    }

    /// One DATA frame for all slices together: a head and its body are one allocation and one frame.
    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let total = bufs.iter().map(|b| b.len()).sum();
        if total == 0 {
            return Poll::Ready(Ok(0));
        }
        let n = ready!(self.poll_window(cx, total))?;
        let mut data = bytes::BytesMut::with_capacity(n);
        for b in bufs {
            let room = n - data.len();
            data.extend_from_slice(&b[..b.len().min(room)]);
        }
        match self.send.send_data(data.freeze(), false) {
            Ok(()) => Poll::Ready(Ok(n)),
            Err(e) => Poll::Ready(Err(self.send_error(cx, Some(e)))),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// h2's connection task writes by itself; there is nothing to push from here.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.write_ended {
            return Poll::Ready(Ok(()));
        }
        self.write_ended = true;
        self.send.reserve_capacity(0);
        match self.send.send_data(Bytes::new(), true) {
            Ok(()) => Poll::Ready(Ok(())),
            Err(e) => Poll::Ready(Err(self.send_error(cx, Some(e)))),
        }
    }
}
