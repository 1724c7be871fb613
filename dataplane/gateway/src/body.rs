//! Moves one message body from a connection to another, whatever HTTP version each speaks: pieces are passed on without a copy, the source is
//! not read faster than the sink takes, and ends, trailers and resets arrive as such. Heads are `forward`'s business.

use std::task::{Context, Poll, ready};

use bytes::Bytes;
use canal_h1::{BodyPart, BodyReader, CHUNK_END, ChunkStart, LAST_CHUNK, Limits, Refusal, write_last_chunk};
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::buffer::{Inbox, Outbox};
use crate::io::Io;

/// Pieces one body may move before other connections get a turn.
const PIECES_PER_TURN: usize = 32;

/// An HTTP/1.1 connection: to a client or to an endpoint.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) io: Io,
    pub(crate) inbox: Inbox,
    pub(crate) outbox: Outbox,
}

impl Wire {
    pub(crate) fn new(io: Io, inbox: Inbox) -> Self {
        Self { io, inbox, outbox: Outbox::default() }
    }
}

/// Where a body comes from.
pub(crate) enum Source<'a> {
    Http1 { io: &'a mut Io, inbox: &'a mut Inbox, reader: &'a mut BodyReader, verbatim: bool },
    Http2(&'a mut RecvStream),
}

/// Where a body goes.
pub(crate) enum Sink<'a> {
    Http1 { io: &'a mut Io, outbox: &'a mut Outbox, chunks: bool },
    Http2(&'a mut SendStream<Bytes>),
}

/// Why a side of a body broke.
#[derive(Debug)]
pub(crate) enum Cause {
    /// It violates RFC 9112.
    Refused(Refusal),
    /// The connection ended or failed.
    Closed,
    /// The HTTP/2 stream was reset by the peer, with this reason.
    Reset(Reason),
}

/// Which side of a body broke.
#[derive(Debug)]
pub(crate) enum Broken {
    Source(Cause),
    Sink(Cause),
}

/// A reset if it is one; else the connection is lost.
fn cause_of(e: &h2::Error) -> Cause {
    match e.reason() {
        Some(reason) if e.is_reset() => Cause::Reset(reason),
        _ => Cause::Closed,
    }
}

enum Piece {
    /// Payload, or framed bytes for a verbatim body; `last` if surely nothing follows.
    Data {
        bytes: Bytes,
        payload: u64,
        last: bool,
    },
    End(Option<HeaderMap>),
}

/// A body on its way. Keep it until [`Pump::poll`] is ready.
#[derive(Debug, Default)]
pub(crate) struct Pump {
    /// Read before the source was polled.
    first: Bytes,
    /// For an HTTP/2 sink: what waits for its window.
    piece: Bytes,
    /// The window to give back to an HTTP/2 source.
    owed: usize,
    /// The source has ended; trailers if there are any.
    ended: Option<Option<HeaderMap>>,
    /// END_STREAM was sent along with the last piece.
    closed: bool,
    pub(crate) done: bool,
    /// Payload bytes moved.
    pub(crate) payload_bytes: u64,
    /// True if the last poll waited for the source, false if for the sink.
    pub(crate) starved: bool,
    /// From the trailers.
    pub(crate) grpc_status: Option<u8>,
    /// A head may wait in the outbox: it goes out together with the first piece if that is there.
    begun: bool,
}

impl Pump {
    /// Nothing is left to move if `done`.
    pub(crate) fn new(done: bool) -> Self {
        Self { done, ..Self::default() }
    }

    /// `first` was read from an HTTP/2 source already.
    pub(crate) fn after(first: Bytes) -> Self {
        Self { owed: first.len(), payload_bytes: first.len() as u64, first, ..Self::default() }
    }

    /// Moves what can be moved. Ready when all has arrived in the sink, or a side broke.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        source: &mut Source<'_>,
        sink: &mut Sink<'_>,
        limits: &Limits,
    ) -> Poll<Result<(), Broken>> {
        if self.done {
            return Poll::Ready(Ok(()));
        }
        for _ in 0..PIECES_PER_TURN {
            self.starved = false;
            if !self.first.is_empty() {
                let first = std::mem::take(&mut self.first);
                self.put(first, sink);
                self.begun = true;
            }
            if self.begun {
                ready!(self.poll_drain(cx, sink)).map_err(Broken::Sink)?;
                self.give_back(source);
            }
            self.begun = true;
            if self.ended.is_some() {
                self.end(sink).map_err(Broken::Sink)?;
                ready!(self.poll_drain(cx, sink)).map_err(Broken::Sink)?;
                self.done = true;
                return Poll::Ready(Ok(()));
            }
            self.starved = true;
            if self.copy(source, sink, limits).map_err(Broken::Source)? {
                continue;
            }
            match source.poll_piece(cx, limits) {
                Poll::Pending => {
                    ready!(self.poll_drain(cx, sink)).map_err(Broken::Sink)?;
                    return sink.poll_broken(cx).map(|cause| Err(Broken::Sink(cause)));
                }
                Poll::Ready(Err(cause)) => return Poll::Ready(Err(Broken::Source(cause))),
                Poll::Ready(Ok(Piece::End(trailers))) => {
                    self.grpc_status = trailers.as_ref().and_then(|map| map.get("grpc-status")).and_then(|v| v.to_str().ok()?.parse().ok());
                    self.ended = Some(trailers);
                }
                Poll::Ready(Ok(Piece::Data { bytes, payload, last })) => {
                    self.payload_bytes += payload;
                    if matches!(source, Source::Http2(_)) {
                        self.owed += bytes.len();
                    }
                    if last {
                        self.ended = Some(None);
                    }
                    self.put(bytes, sink);
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// The shortest way: bytes that are there, from one HTTP/1.1 connection to another as they are. `false`: go the general way.
    fn copy(&mut self, source: &mut Source<'_>, sink: &mut Sink<'_>, limits: &Limits) -> Result<bool, Cause> {
        let (Source::Http1 { inbox, reader, verbatim: true, .. }, Sink::Http1 { outbox, chunks: false, .. }) = (source, sink) else {
            return Ok(false);
        };
        if inbox.is_empty() || reader.is_done() {
            return Ok(false);
        }
        let skim = reader.skim(inbox.bytes(), limits).map_err(Cause::Refused)?;
        if skim.consumed == 0 {
            return Ok(false);
        }
        outbox.push_from(inbox, skim.consumed);
        self.payload_bytes += skim.payload_bytes;
        if reader.is_done() {
            self.ended = Some(None);
        }
        Ok(true)
    }

    fn put(&mut self, bytes: Bytes, sink: &mut Sink<'_>) {
        match sink {
            Sink::Http2(_) => self.piece = bytes,
            Sink::Http1 { outbox, chunks: false, .. } => outbox.push(bytes),
            Sink::Http1 { outbox, chunks: true, .. } => {
                // An empty piece has no chunk: it would end the body.
                if let Some(start) = ChunkStart::new(bytes.len()) {
                    outbox.head().extend_from_slice(start.as_bytes());
                    outbox.push(bytes);
                    outbox.push_static(CHUNK_END);
                }
            }
        }
    }

    /// Until the sink has taken what it was given.
    fn poll_drain(&mut self, cx: &mut Context<'_>, sink: &mut Sink<'_>) -> Poll<Result<(), Cause>> {
        match sink {
            Sink::Http1 { io, outbox, .. } => io.poll_flush(cx, outbox).map_err(|_| Cause::Closed),
            Sink::Http2(send) => {
                while !self.piece.is_empty() {
                    // The total wanted, not an addition.
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
                    let last = self.piece.is_empty() && matches!(self.ended, Some(None));
                    send.send_data(part, last).map_err(|e| cause_of(&e))?;
                    self.closed |= last;
                }
                Poll::Ready(Ok(()))
            }
        }
    }

    /// What was taken by the sink may be sent again by the source.
    fn give_back(&mut self, source: &mut Source<'_>) {
        let owed = std::mem::take(&mut self.owed);
        if let (Source::Http2(recv), 1..) = (source, owed) {
            // Fails only on a stream that is gone, whose window nobody needs.
            let _ = recv.flow_control().release_capacity(owed);
        }
    }

    /// Says in the sink's way that the body is over.
    fn end(&mut self, sink: &mut Sink<'_>) -> Result<(), Cause> {
        let trailers = self.ended.as_mut().and_then(Option::take);
        match sink {
            Sink::Http1 { chunks: false, .. } => {}
            Sink::Http1 { outbox, chunks: true, .. } => match trailers {
                None => outbox.push_static(LAST_CHUNK),
                Some(map) => {
                    let pairs = map.iter().map(|(n, v)| (n.as_str().as_bytes(), v.as_bytes()));
                    write_last_chunk(pairs, outbox.head()).map_err(Cause::Refused)?;
                }
            },
            Sink::Http2(_) if self.closed => {}
            Sink::Http2(send) => match trailers {
                None => send.send_data(Bytes::new(), true).map_err(|e| cause_of(&e))?,
                Some(map) => send.send_trailers(map).map_err(|e| cause_of(&e))?,
            },
        }
        self.closed = true;
        Ok(())
    }
}

/// Why a stream has no capacity any more.
fn reset_of(send: &mut SendStream<Bytes>, cx: &mut Context<'_>) -> Cause {
    match send.poll_reset(cx) {
        Poll::Ready(Ok(reason)) => Cause::Reset(reason),
        _ => Cause::Closed,
    }
}

impl Source<'_> {
    fn poll_piece(&mut self, cx: &mut Context<'_>, limits: &Limits) -> Poll<Result<Piece, Cause>> {
        match self {
            Source::Http1 { io, inbox, reader, verbatim } => poll_http1(cx, io, inbox, reader, *verbatim, limits),
            Source::Http2(recv) => match ready!(recv.poll_data(cx)) {
                Some(Ok(bytes)) => {
                    let payload = bytes.len() as u64;
                    Poll::Ready(Ok(Piece::Data { bytes, payload, last: recv.is_end_stream() }))
                }
                Some(Err(e)) => Poll::Ready(Err(cause_of(&e))),
                None => match ready!(recv.poll_trailers(cx)) {
                    Ok(trailers) => Poll::Ready(Ok(Piece::End(trailers))),
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
    limits: &Limits,
) -> Poll<Result<Piece, Cause>> {
    loop {
        if reader.is_done() {
            return Poll::Ready(Ok(Piece::End(None)));
        }
        if !inbox.is_empty() {
            let piece = if verbatim { skim(inbox, reader, limits) } else { read(inbox, reader, limits) };
            if let Some(piece) = piece.map_err(Cause::Refused)? {
                return Poll::Ready(Ok(piece));
            }
        }
        match ready!(io.poll_fill(cx, inbox)) {
            Ok(0) => match reader.end_of_input() {
                Ok(()) => return Poll::Ready(Ok(Piece::End(None))),
                Err(refusal) => return Poll::Ready(Err(Cause::Refused(refusal))),
            },
            Ok(_) => {}
            Err(_) => return Poll::Ready(Err(Cause::Closed)),
        }
    }
}

/// The next bytes with their framing, to be passed on as they are.
fn skim(inbox: &mut Inbox, reader: &mut BodyReader, limits: &Limits) -> Result<Option<Piece>, Refusal> {
    let skim = reader.skim(inbox.bytes(), limits)?;
    if skim.consumed == 0 {
        return Ok(skim.ended.then_some(Piece::End(None)));
    }
    let bytes = inbox.take(skim.consumed);
    inbox.release();
    Ok(Some(Piece::Data { bytes, payload: skim.payload_bytes, last: skim.ended || reader.is_done() }))
}

/// The next payload without framing, or the trailers.
fn read(inbox: &mut Inbox, reader: &mut BodyReader, limits: &Limits) -> Result<Option<Piece>, Refusal> {
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
            Piece::Data { payload: bytes.len() as u64, bytes, last: reader.is_done() }
        }
        BodyPart::End => {
            let trailers = trailers_of(reader, inbox.bytes());
            inbox.advance(step.consumed);
            Piece::End(trailers)
        }
    };
    Ok(Some(piece))
}

/// The trailer section as a map; what HTTP/2 cannot carry was refused by the reader.
fn trailers_of(reader: &BodyReader, input: &[u8]) -> Option<HeaderMap> {
    let fields = reader.trailers(input);
    if fields.is_empty() {
        return None;
    }
    let mut map = HeaderMap::with_capacity(fields.len());
    for f in fields.iter() {
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(f.name), HeaderValue::from_bytes(f.value)) {
            map.append(name, value);
        }
    }
    Some(map)
}

impl Sink<'_> {
    /// Resolves if the sink breaks while nothing is being sent.
    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<Cause> {
        match self {
            Sink::Http1 { io, .. } => io.poll_broken(cx).map(|_| Cause::Closed),
            Sink::Http2(send) => send.poll_reset(cx).map(|reset| match reset {
                Ok(reason) => Cause::Reset(reason),
                Err(e) => cause_of(&e),
            }),
        }
    }
}
