//! One tunnel as a duplex byte stream. Consumed bytes return flow-control credit, half-close is
//! END_STREAM, and a reset is RST_STREAM. Start with [`HboneStream`].

mod departure;
mod leg;
mod replay;

use std::fmt;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use h2::{Reason, RecvStream, SendStream};
use http::HeaderMap;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

pub use self::replay::REPLAY_BYTES_MAX;

use self::departure::Departures;
use self::replay::Replay;
use super::close_report::CloseReport;
use super::credit::CreditWait;
use super::flow::{FlowAccount, StalledBytes};
use super::pool::StreamLease;

/// A tunnel. It implements `AsyncRead` and `AsyncWrite` for codecs; [`HboneStream::poll_chunk`] and
/// [`HboneStream::poll_send`] move bytes without copying.
///
/// Reading ends with EOF on END_STREAM, and with `ConnectionReset` on RST_STREAM or a lost
/// connection. RST_STREAM(NO_ERROR), which follows a complete response (RFC 9113 §8.1), is an EOF.
/// `poll_shutdown` sends END_STREAM. Dropping the tunnel before both directions have ended resets
/// the stream (CANCEL).
pub struct HboneStream {
    send: SendStream<Bytes>,
    recv: RecvStream,
    /// Bytes that the caller put back. Their flow-control credit was returned before.
    unread: Bytes,
    /// Bytes that were received and not read yet. They still count against the peer's window.
    undelivered: Bytes,
    /// Bytes handed out as a chunk. Their credit is returned when the next chunk is requested.
    owed: usize,
    account: Rc<FlowAccount>,
    /// Bytes taken off HTTP/2 while the caller accepted none, see [`HboneStream::poll_stalled`].
    stalled: Option<Box<StalledBytes>>,
    /// Failure found while the caller accepted nothing. It is returned after the bytes that came
    /// before.
    failure: Option<io::Error>,
    read_ended: bool,
    write_ended: bool,
    /// Wait for the first credit to send, if there was none.
    first_credit: Option<CreditWait>,
    /// Bytes passed to HTTP/2 so far.
    sent: u64,
    /// Bytes sent since [`HboneStream::keep_sent`] or the last byte read.
    replay: Option<Box<Replay>>,
    /// Tracks whether the sent bytes have left.
    departures: Departures,
    /// Close report of the peer, if it was requested and sent.
    report: Option<CloseReport>,
    // This is the last field, so the pool learns of the stream's end after h2.
    _taken: Option<StreamLease>,
}

impl fmt::Debug for HboneStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HboneStream({})", self.send.stream_id().as_u32())
    }
}

/// Converts an h2 error. RST_STREAM, GOAWAY and a lost connection are all a reset to the reader or
/// writer of a tunnel.
fn reset_error(e: &h2::Error) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, format!("tunnel: {e}"))
}

/// The error of a stream that the budget has ended.
fn over_budget() -> io::Error {
    io::Error::new(
        io::ErrorKind::QuotaExceeded,
        "tunnel: its reader is stalled, and its tenant has more stalled bytes than its share",
    )
}

fn reset_by_peer(reason: Reason) -> io::Error {
    io::Error::new(
        io::ErrorKind::ConnectionReset,
        format!("tunnel: reset by the peer: {reason}"),
    )
}

/// Returns whether this is RST_STREAM(NO_ERROR): the response is complete, and no more bytes are
/// wanted (RFC 9113 §8.1).
fn is_no_error(e: &h2::Error) -> bool {
    e.is_reset() && e.reason() == Some(Reason::NO_ERROR)
}

impl HboneStream {
    pub(super) fn new(
        send: SendStream<Bytes>,
        recv: RecvStream,
        account: Rc<FlowAccount>,
        taken: Option<StreamLease>,
    ) -> Self {
        let (unread, undelivered) = (Bytes::new(), Bytes::new());
        Self {
            send,
            recv,
            unread,
            undelivered,
            owed: 0,
            account,
            stalled: None,
            failure: None,
            read_ended: false,
            write_ended: false,
            first_credit: None,
            sent: 0,
            replay: None,
            departures: Departures::default(),
            report: None,
            _taken: taken,
        }
    }

    /// Returns the next bytes without copying; `None` at the end. Their credit is returned at the
    /// next call, when the chunk is certainly consumed. So a slow consumer stops the sender.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        self.settle();
        if !self.unread.is_empty() {
            return Poll::Ready(Ok(Some(std::mem::take(&mut self.unread))));
        }
        if !ready!(self.poll_fill(cx))? {
            return Poll::Ready(Ok(None));
        }
        self.owed = self.undelivered.len();
        Poll::Ready(Ok(Some(std::mem::take(&mut self.undelivered))))
    }

    /// Sends from the front of `data` as far as the window permits, without copying. Ready when at
    /// least one byte was taken, or if `data` is empty. `data` retains the rest.
    pub fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        if data.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let n = ready!(self.poll_window(cx, data.len()))?;
        self.send_part(cx, data.slice(..n))?;
        data.advance(n);
        Poll::Ready(Ok(n))
    }

    /// Sends a part that fits the reserved window. If it fails, the bytes still belong to the
    /// caller.
    fn send_part(&mut self, cx: &mut Context<'_>, part: Bytes) -> io::Result<usize> {
        let n = part.len();
        let copy = self.replay.is_some().then(|| part.clone());
        match self.send.send_data(self.departures.track(part), false) {
            Ok(()) => {
                self.sent += n as u64;
                if let (Some(replay), Some(copy)) = (&mut self.replay, copy) {
                    replay.push(copy);
                }
                Ok(n)
            }
            Err(e) => Err(self.send_error(cx, Some(e))),
        }
    }

    /// Returns the number of bytes sent so far.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Retains the bytes sent from here on until the next byte is read, for
    /// [`HboneStream::take_sent`]. It retains at most [`REPLAY_BYTES_MAX`] bytes.
    pub fn keep_sent(&mut self) {
        self.replay = Some(Box::default());
    }

    /// Returns the bytes sent since [`HboneStream::keep_sent`]; `None` if there were too many, or
    /// if a byte was read since.
    pub fn take_sent(&mut self) -> Option<Vec<Bytes>> {
        self.replay.take().and_then(|replay| replay.into_pieces())
    }

    /// Returns the close report with which the peer ended the tunnel.
    pub fn close_report(&self) -> Option<CloseReport> {
        self.report
    }

    /// Ends the stream with `trailers` instead of a bare END_STREAM.
    ///
    /// # Errors
    /// The stream is closed.
    pub fn finish_with(&mut self, trailers: HeaderMap) -> io::Result<()> {
        self.write_ended = true;
        self.send.reserve_capacity(0);
        self.send
            .send_trailers(trailers)
            .map_err(|e| reset_error(&e))
    }

    /// Ready when all sent bytes, and a bare end, have left this process or never will. It
    /// registers no waker, so the caller must poll again.
    pub fn poll_departed(&self) -> Poll<()> {
        if self.departures.are_over() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    /// Puts `bytes` back in front of the unread bytes, after protocol sniffing.
    pub fn unread(&mut self, bytes: Bytes) {
        self.unread = if self.unread.is_empty() {
            bytes
        } else {
            [bytes, std::mem::take(&mut self.unread)].concat().into()
        };
    }

    /// Resets both directions of the stream (RST_STREAM).
    pub fn reset(&mut self, reason: Reason) {
        self.send.send_reset(reason);
        (self.read_ended, self.write_ended, self.first_credit) = (true, true, None);
    }

    /// Resolves when the peer resets the stream or the connection is lost, also while nothing is
    /// read or written.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.send.poll_reset(cx).map(|r| match r {
            Ok(reason) => reset_by_peer(reason),
            Err(e) => reset_error(&e),
        })
    }

    /// Returns the HTTP/2 stream number, for logs.
    pub fn id(&self) -> u32 {
        self.send.stream_id().as_u32()
    }

    /// Returns the flow-control credit of the bytes that were handed out.
    fn settle(&mut self) {
        let owed = std::mem::take(&mut self.owed);
        if owed > 0 {
            // This fails only on a stream that is gone, whose window is not needed.
            let _ = self.recv.flow_control().release_capacity(owed);
        }
        // The caller consumes again, so the bytes that it received no longer count as buffered.
        if self
            .stalled
            .as_ref()
            .is_some_and(|stalled| stalled.is_empty() && self.undelivered.is_empty())
        {
            self.stalled = None;
        }
    }

    /// Takes the bytes that have arrived off HTTP/2 while the caller does not read, and charges
    /// them. Resolves when the stream is broken. The tenant's budget breaks it (`QuotaExceeded`) if
    /// the tenant holds too much and this stream has stalled for the longest time. Bytes that came
    /// before a reset by the peer can still be read; then the failure is returned.
    pub fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if let Some(failure) = &self.failure {
            return Poll::Ready(io::Error::new(failure.kind(), failure.to_string()));
        }
        if self.read_ended {
            return self.poll_reset_by_error(cx);
        }
        let handed = self.owed + self.undelivered.len();
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::new(StalledBytes::begin(&self.account, handed)));
        loop {
            match self.recv.poll_data(cx) {
                Poll::Ready(Some(Ok(data))) => {
                    if !data.is_empty() {
                        self.replay = None;
                    }
                    stalled.push(&data);
                }
                Poll::Ready(Some(Err(e))) if is_no_error(&e) => {
                    self.read_ended = true;
                    break;
                }
                Poll::Ready(Some(Err(e))) => {
                    self.failure = Some(reset_error(&e));
                    return Poll::Ready(reset_error(&e));
                }
                // The end is read later.
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        if stalled.poll_revoked(cx).is_ready() {
            (self.stalled, self.undelivered) = (None, Bytes::new());
            self.reset(Reason::ENHANCE_YOUR_CALM);
            self.failure = Some(over_budget());
            return Poll::Ready(over_budget());
        }
        self.poll_reset_by_error(cx)
    }

    /// Resolves like [`HboneStream::poll_reset`], but not at RST_STREAM(NO_ERROR), which is an end.
    fn poll_reset_by_error(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        match self.send.poll_reset(cx) {
            Poll::Ready(Ok(Reason::NO_ERROR)) | Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(reason)) => Poll::Ready(reset_by_peer(reason)),
            Poll::Ready(Err(e)) => Poll::Ready(reset_error(&e)),
        }
    }

    /// Fills `undelivered`; returns false at the end.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        while self.undelivered.is_empty() {
            if let Some(stalled) = self.stalled.as_mut().filter(|stalled| !stalled.is_empty()) {
                // These bytes came before all that HTTP/2 still holds.
                self.undelivered = stalled.take();
                break;
            }
            // The failure comes after the bytes that arrived before it.
            if let Some(failure) = self.failure.take() {
                self.read_ended = true;
                return Poll::Ready(Err(failure));
            }
            if self.read_ended {
                return Poll::Ready(Ok(false));
            }
            match ready!(self.recv.poll_data(cx)) {
                Some(Ok(data)) => {
                    // A peer that responds has read the bytes it was sent. An empty frame proves
                    // nothing.
                    if !data.is_empty() {
                        self.replay = None;
                    }
                    self.undelivered = data;
                }
                Some(Err(e)) => {
                    self.read_ended = true;
                    // NO_ERROR after a whole response is how a server stops an upload (RFC 9113
                    // §8.1).
                    return Poll::Ready(if is_no_error(&e) {
                        Ok(false)
                    } else {
                        Err(reset_error(&e))
                    });
                }
                None => {
                    let trailers = ready!(self.recv.poll_trailers(cx));
                    self.read_ended = true;
                    // Only the end of the stream ends its data, so there is no error here; one would
                    // count as no report.
                    self.report = trailers
                        .ok()
                        .flatten()
                        .as_ref()
                        .and_then(CloseReport::of_trailers);
                    // The reset of the application at the far end is passed on as a reset.
                    if self.report.is_some_and(|report| report.reset) {
                        return Poll::Ready(Err(io::Error::new(
                            io::ErrorKind::ConnectionReset,
                            "tunnel: the application reset it",
                        )));
                    }
                }
            }
        }
        Poll::Ready(Ok(true))
    }

    /// Waits until bytes may be sent, and returns how many: at least one and at most `wanted`.
    fn poll_window(&mut self, cx: &mut Context<'_>, wanted: usize) -> Poll<io::Result<usize>> {
        if self.write_ended {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::BrokenPipe,
                "tunnel: written to after its end",
            )));
        }
        loop {
            // The reservation is the total and not an addition. Capacity assigned beyond it would
            // be missing for other streams.
            self.send.reserve_capacity(wanted);
            let n = self.send.capacity().min(wanted);
            if n > 0 {
                match self.first_credit.take() {
                    Some(wait) => wait.granted(),
                    None if self.sent == 0 => self.account.credit().note_granted(),
                    None => {}
                }
                return Poll::Ready(Ok(n));
            }
            let Poll::Ready(capacity) = self.send.poll_capacity(cx) else {
                // The stream's own window is untouched, so the credit that is missing is the
                // connection's.
                if self.sent == 0 && self.first_credit.is_none() {
                    self.first_credit = Some(self.account.credit().begin_wait());
                }
                return Poll::Pending;
            };
            match capacity {
                Some(Ok(_)) => {}
                Some(Err(e)) => return Poll::Ready(Err(self.send_error(cx, Some(e)))),
                None => return Poll::Ready(Err(self.send_error(cx, None))),
            }
        }
    }

    /// Returns the reason why sending failed: h2 reports only "inactive stream", and the reset has
    /// the reason.
    fn send_error(&mut self, cx: &mut Context<'_>, e: Option<h2::Error>) -> io::Error {
        (self.write_ended, self.first_credit) = (true, None);
        match (self.poll_reset(cx), e) {
            (Poll::Ready(reset), _) => reset,
            (Poll::Pending, Some(e)) => reset_error(&e),
            (Poll::Pending, None) => {
                io::Error::new(io::ErrorKind::BrokenPipe, "tunnel: closed for sending")
            }
        }
    }
}

impl AsyncRead for HboneStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
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
        if ready!(self.poll_fill(cx))? {
            let n = self.undelivered.len().min(buf.remaining());
            buf.put_slice(&self.undelivered[..n]);
            self.undelivered.advance(n);
            self.owed = n;
            self.settle();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for HboneStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        if buf.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let n = ready!(self.poll_window(cx, buf.len()))?;
        Poll::Ready(self.send_part(cx, Bytes::copy_from_slice(&buf[..n])))
    }

    /// Sends all slices in one DATA frame: a head and its body are one allocation and one frame.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let total = bufs.iter().map(|b| b.len()).sum();
        if total == 0 {
            return Poll::Ready(Ok(0));
        }
        let n = ready!(self.poll_window(cx, total))?;
        let mut data = bytes::BytesMut::with_capacity(n);
        for b in bufs {
            let missing = n - data.len();
            data.extend_from_slice(&b[..b.len().min(missing)]);
        }
        Poll::Ready(self.send_part(cx, data.freeze()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Does nothing, because h2's connection task writes by itself.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.write_ended {
            return Poll::Ready(Ok(()));
        }
        (self.write_ended, self.first_credit) = (true, None);
        self.send.reserve_capacity(0);
        let end = self.departures.track(Bytes::new());
        match self.send.send_data(end, true) {
            Ok(()) => Poll::Ready(Ok(())),
            Err(e) => Poll::Ready(Err(self.send_error(cx, Some(e)))),
        }
    }
}
