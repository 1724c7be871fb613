//! Moves one message body from one connection to another, for every pairing of HTTP versions.
//!
//! Pieces are passed on without a copy. The source is read no faster than the sink accepts. The
//! end, the trailers and a reset of the source are passed on as such. Heads are not handled here:
//! `forward` does that.
//!
//! Start with [`BodyPump::poll`].

use std::fmt;
use std::io::ErrorKind;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use canal_h1::{
    BodyPart, BodyReader, CHUNK_END, ChunkStart, LAST_CHUNK, MessageLimits, MessageRefusal,
    write_last_chunk,
};
use canal_hbone::{FlowAccount, StalledBytes};
use canal_net::copy::stall::{StallTimer, StallWatch};
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::sync::oneshot;

use crate::buffer::{Inbox, Outbox};
use crate::io::Io;

/// Number of pieces that one body may move before other connections run. The copies of `canal_net`
/// move as many in one turn. Of an HTTP/1.1 connection that are 32 blocks (`BLOCK`), 512 KiB.
const PIECES_PER_TURN: usize = 32;

/// An HTTP/1.1 connection to a client or to an endpoint, with its buffers.
#[derive(Debug)]
pub struct Http1Io {
    pub io: Io,
    pub inbox: Inbox,
    pub outbox: Outbox,
}

impl Http1Io {
    pub fn new(io: Io, inbox: Inbox) -> Self {
        Self {
            io,
            inbox,
            outbox: Outbox::default(),
        }
    }
}

/// Side from which a body is read. With `verbatim`, HTTP/1.1 bytes are passed on with their
/// framing.
pub enum BodySource<'a> {
    Http1 {
        io: &'a mut Io,
        inbox: &'a mut Inbox,
        reader: &'a mut BodyReader,
        verbatim: bool,
    },
    Http2 {
        recv: &'a mut RecvStream,
        account: &'a Rc<FlowAccount>,
    },
}

/// Side to which a body is written. With `chunks`, the body is written in chunked framing.
pub enum BodySink<'a> {
    Http1 {
        io: &'a mut Io,
        outbox: &'a mut Outbox,
        chunks: bool,
    },
    Http2(&'a mut SendStream<Bytes>),
}

/// Reason why one side of a body failed.
#[derive(Debug)]
pub enum BodyErrorCause {
    /// The message violates RFC 9112.
    Refused(MessageRefusal),
    /// The connection ended or failed.
    Closed,
    /// The peer reset the HTTP/2 stream with this reason.
    Reset(Reason),
}

/// Side of a body that failed.
#[derive(Debug)]
pub enum BodyError {
    Source(BodyErrorCause),
    Sink(BodyErrorCause),
}

/// Maps a stream reset to its reason; any other error means that the connection is lost.
fn cause_of(e: &h2::Error) -> BodyErrorCause {
    match e.reason() {
        Some(reason) if e.is_reset() => BodyErrorCause::Reset(reason),
        _ => BodyErrorCause::Closed,
    }
}

enum BodyPiece {
    /// Payload, or framed bytes for a verbatim body. `last` is set if it is certain that nothing
    /// follows.
    Data {
        bytes: Bytes,
        payload: u64,
        last: bool,
    },
    End(Option<HeaderMap>),
}

/// A body in transit. It must live until [`BodyPump::poll`] is ready.
#[derive(Debug, Default)]
pub struct BodyPump {
    /// Bytes that were read before the source was polled first.
    first: Bytes,
    /// Bytes that wait for the window of an HTTP/2 sink.
    piece: Bytes,
    /// Window to release to an HTTP/2 source.
    window_to_release: usize,
    /// Bytes taken off an HTTP/2 source while the sink accepted none.
    stalled: Option<Box<StalledBytes>>,
    /// Failure of the source that was found while the sink accepted nothing. It follows the bytes
    /// that came before.
    failure: Option<BodyErrorCause>,
    /// Set once the source has ended, with the trailers if there are any.
    source_end: Option<Option<HeaderMap>>,
    /// True once the end of the body was written to the sink.
    closed: bool,
    pub is_complete: bool,
    /// Payload bytes moved so far.
    pub payload_bytes: u64,
    /// True if the last poll waited for the source, false if it waited for the sink.
    pub waiting_for_source: bool,
    /// gRPC status from the trailers.
    pub grpc_status: Option<u8>,
    /// False until the first piece was read. The head may still be in the outbox then, and is
    /// flushed together with that piece.
    begun: bool,
    /// The body so far, while it can be sent again from its beginning.
    replay: Option<Box<ReplayBuffer>>,
}

/// A copy of a body's pieces, up to a limit. It is a copy because a small piece would keep the large
/// block that it is in.
#[derive(Debug)]
struct ReplayBuffer {
    bytes: Vec<u8>,
    bytes_max: usize,
    trailers: Option<HeaderMap>,
    /// True if the copy is for sending the body again.
    is_replayable: bool,
    /// True if the bytes are those of a chunked body.
    is_chunked: bool,
    /// Where copies of the complete body go.
    copies: Vec<BodyCopy>,
}

/// Reason why a body is not copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyCopyError {
    /// The body has more bytes than the copy may have.
    TooLong,
    /// The chunks of the body cannot be read.
    Malformed,
    /// The limit with this name has no room for the copy.
    NoRoom(&'static str),
}

/// Receives a copy of a body once it is complete, as payload without chunks.
pub type BodyCopySender = oneshot::Sender<Result<Bytes, BodyCopyError>>;

/// Reserves room for the first bytes of a body, or returns the name of the limit without room.
pub type BodyCopyReserve = Box<dyn FnMut(usize) -> Result<(), &'static str>>;

/// A copy of a body that is made while the body arrives.
pub struct BodyCopy {
    pub sender: BodyCopySender,
    /// Called with the length of the body so far.
    pub reserve: BodyCopyReserve,
}

impl fmt::Debug for BodyCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BodyCopy").finish_non_exhaustive()
    }
}

impl BodyPump {
    /// Starts a body. With `done` there is nothing to move.
    pub fn new(done: bool) -> Self {
        Self {
            is_complete: done,
            ..Self::default()
        }
    }

    /// Continues a body of which `first` was already read from an HTTP/2 source.
    pub fn after(first: Bytes) -> Self {
        Self {
            window_to_release: first.len(),
            payload_bytes: first.len() as u64,
            first,
            ..Self::default()
        }
    }

    /// Keeps a copy of the body from now on, so that it can be sent again, until it has more than
    /// `bytes_max`. Call it before the first poll.
    pub fn keep_for_replay(&mut self, bytes_max: usize) {
        if let Some(replay) = self.begin_copy(bytes_max) {
            replay.is_replayable = true;
        }
    }

    /// Sends copies of the whole body, unless it has more than `bytes_max`. `is_chunked`: the pump
    /// moves chunks as they are. Call it before the first poll.
    pub fn copy_to(&mut self, copies: Vec<BodyCopy>, is_chunked: bool, bytes_max: usize) {
        match self.begin_copy(bytes_max) {
            Some(replay) => (replay.copies, replay.is_chunked) = (copies, is_chunked),
            None => refuse_copies(copies),
        }
        self.reserve_copies();
    }

    /// Reserves room for the copies of the body so far. A copy without room is not made.
    fn reserve_copies(&mut self) {
        let Some(replay) = self.replay.as_mut().filter(|it| !it.copies.is_empty()) else {
            return;
        };
        let (length, copies) = (replay.bytes.len(), std::mem::take(&mut replay.copies));
        let reserved = copies.into_iter().filter_map(|mut copy| {
            let Err(limit) = (copy.reserve)(length) else {
                return Some(copy);
            };
            // A copy whose receiver has gone is not sent.
            let _ = copy.sender.send(Err(BodyCopyError::NoRoom(limit)));
            None
        });
        replay.copies = reserved.collect();
        self.forget_unused_copy();
    }

    /// Forgets copies whose receiver has gone.
    fn forget_gone_copies(&mut self, cx: &mut Context<'_>) {
        if let Some(replay) = &mut self.replay
            && !replay.copies.is_empty()
        {
            let is_wanted = |copy: &mut BodyCopy| copy.sender.poll_closed(cx).is_pending();
            replay.copies.retain_mut(is_wanted);
            self.forget_unused_copy();
        }
    }

    /// Drops the copy of the body if nothing needs it any longer.
    fn forget_unused_copy(&mut self) {
        let is_unused =
            |replay: &mut Box<ReplayBuffer>| replay.copies.is_empty() && !replay.is_replayable;
        drop(self.replay.take_if(is_unused));
    }

    /// Returns the copy of the body; `None` if the body is too long already.
    fn begin_copy(&mut self, bytes_max: usize) -> Option<&mut ReplayBuffer> {
        if self.replay.is_none() {
            self.replay = Some(Box::new(ReplayBuffer {
                bytes: Vec::new(),
                bytes_max,
                trailers: None,
                is_replayable: false,
                is_chunked: false,
                copies: Vec::new(),
            }));
            let first = self.first.clone();
            self.record(&first);
        }
        self.replay.as_deref_mut()
    }

    /// Sends the copies if the body is complete.
    fn finish_copies(&mut self) {
        let is_done = self.source_end.is_some();
        let Some(replay) = self.replay.as_mut().filter(|_| is_done) else {
            return;
        };
        for copy in replay.copies.drain(..) {
            // A copy whose receiver has gone is not sent.
            let _ = copy.sender.send(if replay.is_chunked {
                payload_of(&replay.bytes).ok_or(BodyCopyError::Malformed)
            } else {
                Ok(Bytes::copy_from_slice(&replay.bytes))
            });
        }
        self.forget_unused_copy();
    }

    /// Returns the bytes of the copy; `None` if there is no complete copy of the body so far.
    pub fn replay_bytes(&self) -> Option<usize> {
        let replay = self.replay.as_ref().filter(|replay| replay.is_replayable);
        replay.map(|replay| replay.bytes.len())
    }

    /// Drops the copy: the body will not be sent again.
    pub fn forget_replay(&mut self) {
        match &mut self.replay {
            Some(replay) if !replay.copies.is_empty() => replay.is_replayable = false,
            _ => self.replay = None,
        }
    }

    /// True once the end of the body was read from its source.
    pub fn is_source_done(&self) -> bool {
        self.is_complete || self.source_end.is_some()
    }

    /// Begins the body again, for another sink of the same protocol. Returns false if there is no
    /// copy of it.
    pub fn rewind(&mut self) -> bool {
        let Some(replay) = self.replay.as_ref().filter(|replay| replay.is_replayable) else {
            return false;
        };
        self.first = Bytes::copy_from_slice(&replay.bytes);
        if let Some(end) = &mut self.source_end {
            end.clone_from(&replay.trailers);
        }
        self.piece = Bytes::new();
        (self.closed, self.is_complete, self.begun) = (false, false, false);
        true
    }

    fn record(&mut self, bytes: &[u8]) {
        let Some(replay) = &mut self.replay else {
            return;
        };
        if replay.bytes.len() + bytes.len() > replay.bytes_max {
            refuse_copies(std::mem::take(&mut replay.copies));
            self.replay = None;
        } else {
            replay.bytes.extend_from_slice(bytes);
            self.reserve_copies();
        }
    }

    /// Moves as much as possible. Ready when the sink has accepted the entire body, or when a side
    /// failed.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        source: &mut BodySource<'_>,
        sink: &mut BodySink<'_>,
        limits: &MessageLimits,
    ) -> Poll<Result<(), BodyError>> {
        if self.is_complete {
            return Poll::Ready(Ok(()));
        }
        self.forget_gone_copies(cx);
        for _ in 0..PIECES_PER_TURN {
            self.waiting_for_source = false;
            if !self.first.is_empty() {
                let first = std::mem::take(&mut self.first);
                self.put(first, sink);
                self.begun = true;
            }
            // Before the first piece, the head may still be in the outbox and leaves together with
            // it.
            if self.begun {
                ready!(self.poll_drain(cx, sink)).map_err(BodyError::Sink)?;
                self.give_back(source);
            }
            self.begun = true;
            if self.source_end.is_some() {
                // Only once: writing the end may have to wait for the sink, and then this code runs
                // again.
                if !self.closed {
                    self.end(sink).map_err(BodyError::Sink)?;
                }
                ready!(self.poll_drain(cx, sink)).map_err(BodyError::Sink)?;
                self.is_complete = true;
                return Poll::Ready(Ok(()));
            }
            self.waiting_for_source = true;
            // The fast path copies no bytes that could be kept for a replay.
            if self.replay.is_none()
                && self.copy(source, sink, limits).map_err(BodyError::Source)?
            {
                continue;
            }
            match self.poll_piece(cx, source, limits) {
                // Nothing to read: flush, and detect a sink that fails in the meantime.
                Poll::Pending => {
                    ready!(self.poll_drain(cx, sink)).map_err(BodyError::Sink)?;
                    return sink
                        .poll_broken(cx)
                        .map(|cause| Err(BodyError::Sink(cause)));
                }
                Poll::Ready(Err(cause)) => return Poll::Ready(Err(BodyError::Source(cause))),
                Poll::Ready(Ok(BodyPiece::End(trailers))) => {
                    self.grpc_status = trailers
                        .as_ref()
                        .and_then(|map| map.get("grpc-status"))
                        .and_then(|v| v.to_str().ok()?.parse().ok());
                    if let Some(replay) = &mut self.replay {
                        replay.trailers.clone_from(&trailers);
                    }
                    self.source_end = Some(trailers);
                    self.finish_copies();
                }
                Poll::Ready(Ok(BodyPiece::Data {
                    bytes,
                    payload,
                    last,
                })) => {
                    self.payload_bytes += payload;
                    // The client gets new HTTP/2 window only after the sink has accepted these
                    // bytes.
                    if matches!(source, BodySource::Http2 { .. }) {
                        self.window_to_release += bytes.len();
                    }
                    if last {
                        self.source_end = Some(None);
                    }
                    self.record(&bytes);
                    self.finish_copies();
                    self.put(bytes, sink);
                }
            }
        }
        // The turn is used up; other connections run before this body continues.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Returns the next piece: bytes that were taken off HTTP/2 while the sink stalled come first,
    /// then a failure that was found then.
    fn poll_piece(
        &mut self,
        cx: &mut Context<'_>,
        source: &mut BodySource<'_>,
        limits: &MessageLimits,
    ) -> Poll<Result<BodyPiece, BodyErrorCause>> {
        if let (BodySource::Http2 { recv, .. }, Some(stalled)) = (&source, &mut self.stalled)
            && !stalled.is_empty()
        {
            let bytes = stalled.take();
            let (payload, last) = (
                bytes.len() as u64,
                self.failure.is_none() && recv.is_end_stream(),
            );
            return Poll::Ready(Ok(BodyPiece::Data {
                bytes,
                payload,
                last,
            }));
        }
        match self.failure.take() {
            Some(failure) => Poll::Ready(Err(failure)),
            None => source.poll_piece(cx, limits),
        }
    }

    /// Polls a source that is not read because the sink has accepted nothing for a while. It takes
    /// the source's bytes off a connection that is shared with other streams, and charges them.
    /// Ready when the tenant exceeds its share and this body must be reset.
    pub fn poll_stalled(&mut self, cx: &mut Context<'_>, source: &mut BodySource<'_>) -> Poll<()> {
        let (recv, account) = match source {
            BodySource::Http1 { io, .. } => {
                return match io.poll_stalled(cx) {
                    Poll::Ready(e) if e.kind() == ErrorKind::QuotaExceeded => Poll::Ready(()),
                    // Another failure is found when the connection is read again.
                    _ => Poll::Pending,
                };
            }
            BodySource::Http2 { recv, account } => (recv, account),
        };
        let handed = self.window_to_release;
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::new(StalledBytes::begin(account, handed)));
        while self.failure.is_none() {
            match recv.poll_data(cx) {
                Poll::Ready(Some(Ok(data))) => stalled.push(&data),
                Poll::Ready(Some(Err(e))) => self.failure = Some(cause_of(&e)),
                // The end and the trailers are read later.
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        stalled.poll_revoked(cx)
    }

    /// Returns a number that changes whenever the sink accepts bytes.
    pub fn accepted(&self, sink: &BodySink<'_>) -> u64 {
        let waiting = match sink {
            BodySink::Http1 { outbox, .. } => outbox.len(),
            BodySink::Http2(_) => self.piece.len(),
        };
        self.payload_bytes.wrapping_sub(waiting as u64)
    }

    /// Fast path: moves available bytes unchanged from one HTTP/1.1 connection to another. `false`
    /// means that the general path must be used.
    fn copy(
        &mut self,
        source: &mut BodySource<'_>,
        sink: &mut BodySink<'_>,
        limits: &MessageLimits,
    ) -> Result<bool, BodyErrorCause> {
        let (
            BodySource::Http1 {
                inbox,
                reader,
                verbatim: true,
                ..
            },
            BodySink::Http1 {
                outbox,
                chunks: false,
                ..
            },
        ) = (source, sink)
        else {
            return Ok(false);
        };
        if inbox.is_empty() || reader.is_done() {
            return Ok(false);
        }
        let skim = reader
            .skim(inbox.bytes(), limits)
            .map_err(BodyErrorCause::Refused)?;
        if skim.consumed == 0 {
            return Ok(false);
        }
        outbox.push_from(inbox, skim.consumed);
        self.payload_bytes += skim.payload_bytes;
        if reader.is_done() {
            self.source_end = Some(None);
        }
        Ok(true)
    }

    fn put(&mut self, bytes: Bytes, sink: &mut BodySink<'_>) {
        match sink {
            BodySink::Http2(_) => self.piece = bytes,
            BodySink::Http1 {
                outbox,
                chunks: false,
                ..
            } => outbox.push(bytes),
            BodySink::Http1 {
                outbox,
                chunks: true,
                ..
            } => {
                // An empty piece gets no chunk, because an empty chunk would end the body.
                if let Some(start) = ChunkStart::new(bytes.len()) {
                    outbox.head().extend_from_slice(start.as_bytes());
                    outbox.push(bytes);
                    outbox.push_static(CHUNK_END);
                }
            }
        }
    }

    /// Ready once the sink has accepted everything that was written to it.
    fn poll_drain(
        &mut self,
        cx: &mut Context<'_>,
        sink: &mut BodySink<'_>,
    ) -> Poll<Result<(), BodyErrorCause>> {
        match sink {
            BodySink::Http1 { io, outbox, .. } => io
                .poll_flush(cx, outbox)
                .map_err(|_| BodyErrorCause::Closed),
            BodySink::Http2(send) => {
                while !self.piece.is_empty() {
                    // `reserve_capacity` takes the total that is wanted, not an increment.
                    send.reserve_capacity(self.piece.len());
                    let n = match send.capacity() {
                        0 => match ready!(send.poll_capacity(cx)) {
                            Some(Ok(n)) => n,
                            Some(Err(e)) => return Poll::Ready(Err(cause_of(&e))),
                            None => return Poll::Ready(Err(reset_of(send, cx))),
                        },
                        n => n,
                    };
                    let part = self.piece.split_to(n.min(self.piece.len()));
                    let last = self.piece.is_empty() && matches!(self.source_end, Some(None));
                    send.send_data(part, last).map_err(|e| cause_of(&e))?;
                    self.closed |= last;
                }
                Poll::Ready(Ok(()))
            }
        }
    }

    /// Releases the source's window by the bytes that the sink has accepted.
    fn give_back(&mut self, source: &mut BodySource<'_>) {
        let owed = std::mem::take(&mut self.window_to_release);
        if let (BodySource::Http2 { recv, .. }, 1..) = (source, owed) {
            // The release fails only on a stream that is gone, whose window is not needed.
            let _ = recv.flow_control().release_capacity(owed);
        }
        // The sink has accepted everything that was handed to it.
        if self
            .stalled
            .as_ref()
            .is_some_and(|stalled| stalled.is_empty())
        {
            self.stalled = None;
        }
    }

    /// Writes the end of the body in the sink's protocol.
    fn end(&mut self, sink: &mut BodySink<'_>) -> Result<(), BodyErrorCause> {
        let trailers = self.source_end.as_mut().and_then(Option::take);
        match sink {
            BodySink::Http1 { chunks: false, .. } => {}
            BodySink::Http1 {
                outbox,
                chunks: true,
                ..
            } => match trailers {
                None => outbox.push_static(LAST_CHUNK),
                Some(map) => {
                    let pairs = map
                        .iter()
                        .map(|(n, v)| (n.as_str().as_bytes(), v.as_bytes()));
                    write_last_chunk(pairs, outbox.head()).map_err(BodyErrorCause::Refused)?;
                }
            },
            // END_STREAM went out with the last piece.
            BodySink::Http2(_) if self.closed => {}
            BodySink::Http2(send) => match trailers {
                None => send
                    .send_data(Bytes::new(), true)
                    .map_err(|e| cause_of(&e))?,
                Some(map) => send.send_trailers(map).map_err(|e| cause_of(&e))?,
            },
        }
        self.closed = true;
        Ok(())
    }
}

/// Returns the payload of a chunked body, which the codec has accepted.
fn payload_of(chunks: &[u8]) -> Option<Bytes> {
    let (mut payload, mut rest) = (Vec::new(), chunks);
    while !rest.is_empty() {
        let end = rest.windows(2).position(|pair| pair == b"\r\n")?;
        let line = std::str::from_utf8(&rest[..end]).ok()?;
        let size = line.split(';').next()?.trim();
        let size = usize::from_str_radix(size, 16).ok()?;
        if size == 0 {
            break;
        }
        let chunk = &rest[end + 2..];
        payload.extend_from_slice(chunk.get(..size)?);
        rest = chunk.get(size + 2..)?;
    }
    Some(payload.into())
}

fn refuse_copies(copies: Vec<BodyCopy>) {
    for copy in copies {
        // A copy whose receiver has gone is not sent.
        let _ = copy.sender.send(Err(BodyCopyError::TooLong));
    }
}

/// Looks after a body whose sink accepts nothing.
#[derive(Debug, Default)]
pub struct BodyStall {
    timer: StallTimer,
    watch: StallWatch,
}

impl BodyStall {
    /// Must be called after each poll of the body that was pending. Ready when the tenant holds
    /// more than it may and this body must end.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        body: &mut BodyPump,
        source: &mut BodySource<'_>,
        sink: &BodySink<'_>,
    ) -> Poll<()> {
        let is_blocked = !body.waiting_for_source;
        if self.timer.poll(cx, is_blocked) {
            self.watch.tick(is_blocked, body.accepted(sink));
        }
        if is_blocked && self.watch.is_stalled() {
            body.poll_stalled(cx, source)
        } else {
            Poll::Pending
        }
    }
}

/// Reason why a stream has no more capacity.
fn reset_of(send: &mut SendStream<Bytes>, cx: &mut Context<'_>) -> BodyErrorCause {
    match send.poll_reset(cx) {
        Poll::Ready(Ok(reason)) => BodyErrorCause::Reset(reason),
        _ => BodyErrorCause::Closed,
    }
}

impl BodySource<'_> {
    fn poll_piece(
        &mut self,
        cx: &mut Context<'_>,
        limits: &MessageLimits,
    ) -> Poll<Result<BodyPiece, BodyErrorCause>> {
        match self {
            BodySource::Http1 {
                io,
                inbox,
                reader,
                verbatim,
            } => poll_http1(cx, io, inbox, reader, *verbatim, limits),
            BodySource::Http2 { recv, .. } => match ready!(recv.poll_data(cx)) {
                Some(Ok(bytes)) => {
                    let payload = bytes.len() as u64;
                    Poll::Ready(Ok(BodyPiece::Data {
                        bytes,
                        payload,
                        last: recv.is_end_stream(),
                    }))
                }
                Some(Err(e)) => Poll::Ready(Err(cause_of(&e))),
                None => match ready!(recv.poll_trailers(cx)) {
                    Ok(trailers) => Poll::Ready(Ok(BodyPiece::End(trailers))),
                    Err(e) => Poll::Ready(Err(cause_of(&e))),
                },
            },
        }
    }
}

fn poll_http1(
    cx: &mut Context<'_>,
    io: &mut Io,
    inbox: &mut Inbox,
    reader: &mut BodyReader,
    verbatim: bool,
    limits: &MessageLimits,
) -> Poll<Result<BodyPiece, BodyErrorCause>> {
    loop {
        if reader.is_done() {
            return Poll::Ready(Ok(BodyPiece::End(None)));
        }
        if !inbox.is_empty() {
            let piece = if verbatim {
                skim(inbox, reader, limits)
            } else {
                read(inbox, reader, limits)
            };
            if let Some(piece) = piece.map_err(BodyErrorCause::Refused)? {
                return Poll::Ready(Ok(piece));
            }
        }
        match ready!(io.poll_fill(cx, inbox)) {
            // The framing decides whether the end of the connection also ends the body.
            Ok(0) => match reader.end_of_input() {
                Ok(()) => return Poll::Ready(Ok(BodyPiece::End(None))),
                Err(refusal) => return Poll::Ready(Err(BodyErrorCause::Refused(refusal))),
            },
            Ok(_) => {}
            Err(_) => return Poll::Ready(Err(BodyErrorCause::Closed)),
        }
    }
}

/// Takes the next bytes with their framing, to be passed on unchanged.
fn skim(
    inbox: &mut Inbox,
    reader: &mut BodyReader,
    limits: &MessageLimits,
) -> Result<Option<BodyPiece>, MessageRefusal> {
    let skim = reader.skim(inbox.bytes(), limits)?;
    if skim.consumed == 0 {
        return Ok(skim.is_end.then_some(BodyPiece::End(None)));
    }
    let bytes = inbox.take(skim.consumed);
    inbox.release();
    Ok(Some(BodyPiece::Data {
        bytes,
        payload: skim.payload_bytes,
        last: skim.is_end || reader.is_done(),
    }))
}

/// Takes the next payload without framing, or the trailers.
fn read(
    inbox: &mut Inbox,
    reader: &mut BodyReader,
    limits: &MessageLimits,
) -> Result<Option<BodyPiece>, MessageRefusal> {
    let step = reader.read(inbox.bytes(), limits)?;
    let piece = match step.part {
        BodyPart::NeedInput => {
            inbox.advance(step.consumed);
            return Ok(None);
        }
        BodyPart::Data(range) => {
            inbox.advance(range.start);
            let bytes = inbox.take(range.len());
            inbox.advance(step.consumed - range.end);
            BodyPiece::Data {
                payload: bytes.len() as u64,
                bytes,
                last: reader.is_done(),
            }
        }
        BodyPart::End => {
            let trailers = trailers_of(reader, inbox.bytes());
            inbox.advance(step.consumed);
            BodyPiece::End(trailers)
        }
    };
    Ok(Some(piece))
}

/// Converts the trailer section to a map. The reader has refused what HTTP/2 cannot carry.
fn trailers_of(reader: &BodyReader, input: &[u8]) -> Option<HeaderMap> {
    let fields = reader.trailers(input);
    if fields.is_empty() {
        return None;
    }
    let mut map = HeaderMap::with_capacity(fields.len());
    for f in fields.iter() {
        if let (Ok(name), Ok(value)) = (
            HeaderName::from_bytes(f.name),
            HeaderValue::from_bytes(f.value),
        ) {
            map.append(name, value);
        }
    }
    Some(map)
}

impl BodySink<'_> {
    /// Resolves if the sink fails while nothing is being sent.
    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<BodyErrorCause> {
        match self {
            BodySink::Http1 { io, .. } => io.poll_broken(cx).map(|_| BodyErrorCause::Closed),
            BodySink::Http2(send) => send.poll_reset(cx).map(|reset| match reset {
                Ok(reason) => BodyErrorCause::Reset(reason),
                Err(e) => cause_of(&e),
            }),
        }
    }
}
