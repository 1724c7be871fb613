//! One tunnel as a duplex byte stream: flow control given back as bytes are consumed, half-close as END_STREAM, reset as RST_STREAM.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A tunnel. `AsyncRead`/`AsyncWrite` for codecs; [`HboneStream::poll_chunk`] and [`HboneStream::poll_send`] move bytes without copying.
///
/// Reading ends with EOF on END_STREAM and with `ConnectionReset` on RST_STREAM or a lost connection. `poll_shutdown` sends END_STREAM.
/// Dropping it before both directions ended resets the stream (CANCEL).
#[derive(Debug)]
pub struct HboneStream {}

impl HboneStream {
    /// The next bytes, without copying; `None` at the end. The window is given back at the next call, when the chunk is surely consumed,
    /// so a slow consumer stops the sender.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        let _ = cx;
        unreachable!("body lands in the next commit")
    }

    /// Sends from the front of `data` as far as the window allows, without copying; ready when at least one byte is taken (or `data` is
    /// empty). `data` keeps the rest.
    pub fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        let _ = (cx, data);
        unreachable!("body lands in the next commit")
    }

    /// Puts `bytes` back in front of what will be read (after sniffing a protocol).
    pub fn unread(&mut self, bytes: Bytes) {
        let _ = bytes;
        unreachable!("body lands in the next commit")
    }

    /// Resets both directions (RST_STREAM).
    pub fn reset(&mut self, reason: h2::Reason) {
        let _ = reason;
        unreachable!("body lands in the next commit")
    }

    /// Resolves when the peer resets the stream or the connection is lost, also while nothing is read or written.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let _ = cx;
        unreachable!("body lands in the next commit")
    }
}

impl AsyncRead for HboneStream {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        unreachable!("body lands in the next commit")
    }
}

impl AsyncWrite for HboneStream {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
        unreachable!("body lands in the next commit")
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        unreachable!("body lands in the next commit")
    }
}
