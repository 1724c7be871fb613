//! A tunnel as a leg of a copy. The module copies nothing.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use canal_net::copy::Leg;
use tokio::io::AsyncWrite;

use super::HboneStream;

impl Leg for HboneStream {
    fn poll_chunk(
        &mut self,
        cx: &mut Context<'_>,
        _: &mut BytesMut,
        _: usize,
    ) -> Poll<io::Result<Option<Bytes>>> {
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
    fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        HboneStream::poll_stalled(self, cx)
    }
    fn is_reset(&self) -> bool {
        // The stream reports a reset by itself.
        false
    }
    fn poll_departed(&mut self) -> Poll<()> {
        HboneStream::poll_departed(self)
    }
    fn abort(&mut self) {
        self.reset(h2::Reason::CANCEL);
    }
}
