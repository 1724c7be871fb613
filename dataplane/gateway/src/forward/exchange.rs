//! One exchange: the request's body goes up while the answer comes down, in one task, for every pairing of versions. Heads were sent before;
//! the answer's head is translated in [`answer_head`]. Ends with an [`Outcome`]; answering for faults is the caller's business.

mod answer_head;

pub(super) use answer_head::http2_fault;

use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use canal_h1::{BodyReader, Framing, Refusal, ResponseHead};
use canal_model::program::AppProtocol;
use h2::client::ResponseFuture;
use h2::{Reason, RecvStream, SendStream};
use tokio::time::Instant;

use crate::body::{Broken, Cause, Pump, Sink, Source, Wire};
use crate::buffer::BLOCK;
use crate::client::{Client, Stream};
use crate::clock::{Late, Timer};
use crate::endpoints::Place;
use crate::fault::Fault;
use crate::finish::Record;
use crate::forward::http1;
use crate::head::Ask;
use crate::judge::JudgingError;
use crate::judge::open::Open;
use crate::upstream::Lease;
use crate::worker::Worker;

/// The client's side of an exchange.
pub(crate) enum Front<'a> {
    Http1(&'a mut Client),
    Http2(&'a mut Stream),
}

/// The endpoint's side of an exchange.
pub(crate) enum Back {
    Http1(Box<Back1>),
    Http2(Box<Back2>),
}

pub(crate) struct Back1 {
    pub(crate) wire: Wire,
    head: ResponseHead,
    reused: bool,
    /// The endpoint keeps the connection after this answer.
    keeps: bool,
    /// It has sent something.
    heard: bool,
}

pub(crate) struct Back2 {
    place: Place,
    response: ResponseFuture,
    send: SendStream<Bytes>,
    body: Option<RecvStream>,
}

impl Back {
    pub(crate) fn http1(lease: Lease) -> Self {
        let Lease { wire, reused } = lease;
        Self::Http1(Box::new(Back1 { wire, head: ResponseHead::new(), reused, keeps: false, heard: false }))
    }
    pub(crate) fn http2(place: Place, response: ResponseFuture, send: SendStream<Bytes>) -> Self {
        Self::Http2(Box::new(Back2 { place, response, send, body: None }))
    }
}

/// How an exchange ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Answered wholly. `request_done`: the request was read to its end as well.
    Done { request_done: bool },
    /// 101 was passed on.
    Upgraded,
    /// `answered`: the client has seen the answer's head.
    Failed { fault: Fault, answered: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The answer's head is awaited.
    Head,
    /// Its body is passed on.
    Body,
}

/// See the module.
pub(crate) struct Exchange<'a> {
    worker: &'a Rc<Worker>,
    ask: &'a Ask,
    record: &'a mut Record,
    front: Front<'a>,
    pub(crate) back: Back,
    up: Pump,
    up_reader: BodyReader,
    /// The endpoint takes no more of the request; its answer may be there already.
    up_cut: bool,
    down: Pump,
    down_reader: BodyReader,
    down_framing: (Framing, Framing),
    upgrade: bool,
    stage: Stage,
    /// How far the request's body was when [`Exchange::head_wait`] began.
    progress: Option<Progress>,
    /// Since when the final head is awaited. Only the request's own body begins it anew: interim responses do not.
    head_wait: Instant,
    /// The endpoint's declared protocol and the request are gRPC: silence for long is no fault.
    patient: bool,
    open: Open<'a>,
    /// What an HTTP/1.1 client was told: its connection stays.
    pub(crate) kept: bool,
}

/// How far a request's body has come: payload bytes, whether it is whole, whether it waits for the client.
type Progress = (u64, bool, bool);

impl<'a> Exchange<'a> {
    /// The request's head lies in the endpoint's outbox or was sent. `sent`: there is no body to pass on.
    pub(crate) fn new(
        worker: &'a Rc<Worker>,
        ask: &'a Ask,
        record: &'a mut Record,
        front: Front<'a>,
        back: Back,
        sent: bool,
        open: Open<'a>,
    ) -> Self {
        let mut front = front;
        let up = match &mut front {
            Front::Http2(stream) if !sent => Pump::after(std::mem::take(&mut stream.first)),
            _ => Pump::new(sent),
        };
        let exchange = Self {
            worker,
            ask,
            record,
            front,
            back,
            up,
            up_reader: BodyReader::new(ask.framing),
            up_cut: false,
            down: Pump::new(false),
            down_reader: BodyReader::new(Framing::None),
            down_framing: (Framing::None, Framing::None),
            upgrade: false,
            stage: Stage::Head,
            progress: None,
            head_wait: worker.clock.now(),
            // A client's content type alone must not lift timeouts.
            patient: ask.grpc && open.protocol() == AppProtocol::Grpc,
            open,
            kept: false,
        };
        exchange.timer().watch(Some(exchange.open.tenant()));
        exchange
    }

    /// Runs to the end.
    pub(crate) async fn run(&mut self) -> Outcome {
        let outcome = std::future::poll_fn(|cx| self.poll(cx)).await;
        self.timer().disarm();
        self.timer().watch(None);
        self.record.bytes_in += self.up.payload_bytes;
        self.record.bytes_out += self.down.payload_bytes;
        if let Some(status) = self.down.grpc_status {
            self.record.grpc_status = Some(status);
        }
        outcome
    }

    fn timer(&self) -> &Timer {
        match &self.front {
            Front::Http1(client) => &client.timer,
            Front::Http2(stream) => &stream.timer,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Outcome> {
        if let Poll::Ready(late) = self.timer().poll(cx) {
            self.worker.counts.late(late);
            let unsent = late == Late::Client && self.stage == Stage::Head && !self.client_lags();
            return self.fail(if unsent { Fault::RequestTimeout } else { late_fault(late) });
        }
        if self.open.is_outdated() {
            match self.judge_again() {
                Ok(()) => {}
                Err(JudgingError::Fault(fault)) => return self.fail(fault),
                Err(JudgingError::Verify(todo)) => self.open.verify(self.worker, todo, cx.waker().clone()),
            }
        }
        if let Poll::Ready(Err(fault)) = self.poll_up(cx) {
            return self.fail(fault);
        }
        if self.stage == Stage::Head {
            match self.poll_head(cx) {
                Poll::Ready(Ok(())) => self.stage = Stage::Body,
                Poll::Ready(Err(fault)) => return self.fail(fault),
                Poll::Pending => {
                    if let Poll::Ready(fault) = self.poll_gone(cx) {
                        return self.fail(fault);
                    }
                    self.arm();
                    return Poll::Pending;
                }
            }
        }
        match self.poll_down(cx) {
            Poll::Ready(Ok(())) if self.upgrade => Poll::Ready(Outcome::Upgraded),
            Poll::Ready(Ok(())) => Poll::Ready(Outcome::Done { request_done: self.up.done && !self.up_cut }),
            Poll::Ready(Err(fault)) => self.fail(fault),
            Poll::Pending => {
                self.arm();
                Poll::Pending
            }
        }
    }

    /// Whether policies have changed, and forbid it now.
    fn judge_again(&mut self) -> Result<(), JudgingError> {
        let judged = match &self.front {
            Front::Http1(client) => http1::judge_again(self.worker, &self.open, self.ask, client),
            Front::Http2(_) => self.open.judge_checked(self.worker),
        };
        if matches!(judged, Err(JudgingError::Fault(_))) {
            self.abort_back(&Cause::Closed);
        }
        judged
    }

    fn fail(&self, fault: Fault) -> Poll<Outcome> {
        Poll::Ready(Outcome::Failed { fault, answered: self.stage == Stage::Body })
    }

    /// An HTTP/1.1 client has not taken all that was written for it.
    fn client_lags(&self) -> bool {
        matches!(&self.front, Front::Http1(client) if !client.wire.outbox.is_empty())
    }

    /// While bodies move, being polled means that something moved: every wait gets its time anew. The wait for the final head does not.
    fn arm(&mut self) {
        let times = &self.worker.shared.config.times;
        // A gRPC stream may be silent for long on either side, and is alive all the same.
        let of = |time: Duration| if self.patient { times.relay } else { time };
        let now = self.worker.clock.now();
        let (late, since, after) = match self.stage {
            Stage::Head => {
                let progress = (self.up.payload_bytes, self.up.done, self.up.starved);
                if self.progress != Some(progress) {
                    self.progress = Some(progress);
                    self.head_wait = now;
                }
                let request_waits = !self.up.done && self.up.starved;
                let client_waits = request_waits || self.client_lags();
                let (late, time) = if client_waits { (Late::Client, times.client) } else { (Late::Upstream, times.upstream) };
                (late, self.head_wait, of(time))
            }
            // Between parts of an answer there may be hours: server-sent events, watches.
            Stage::Body if self.down.starved => (Late::Upstream, now, times.relay),
            Stage::Body => (Late::Client, now, of(times.client)),
        };
        self.timer().arm_from(late, since, after);
    }

    /// Passes on the request's body.
    fn poll_up(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        if self.up.done {
            return Poll::Ready(Ok(()));
        }
        let framing = self.ask.framing;
        let verbatim = matches!((&self.front, &self.back), (Front::Http1(_), Back::Http1(_)));
        let mut source = match &mut self.front {
            Front::Http1(client) => {
                let Wire { io, inbox, .. } = &mut client.wire;
                Source::Http1 { io, inbox, reader: &mut self.up_reader, verbatim }
            }
            Front::Http2(stream) => Source::Http2(&mut stream.body),
        };
        let mut sink = match &mut self.back {
            Back::Http1(back) => {
                let Wire { io, outbox, .. } = &mut back.wire;
                Sink::Http1 { io, outbox, chunks: framing == Framing::Chunked && !verbatim }
            }
            Back::Http2(back) => Sink::Http2(&mut back.send),
        };
        let polled = self.up.poll(cx, &mut source, &mut sink, self.worker.h1_limits());
        match polled {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(())) => Poll::Ready(Ok(())),
            Poll::Ready(Err(Broken::Source(cause))) => {
                self.abort_back(&cause);
                Poll::Ready(Err(client_fault(cause)))
            }
            Poll::Ready(Err(Broken::Sink(_))) => {
                // The endpoint may have answered early and closed; its answer, or why there is none, comes from reading.
                self.up.done = true;
                self.up_cut = true;
                Poll::Ready(Ok(()))
            }
        }
    }

    /// The client is gone or sent nonsense: the endpoint must not take what it has for the whole.
    fn abort_back(&mut self, cause: &Cause) {
        match &mut self.back {
            Back::Http1(back) => back.wire.io.abort(),
            Back::Http2(back) => back.send.send_reset(match cause {
                Cause::Reset(reason) => *reason,
                _ => Reason::CANCEL,
            }),
        }
    }

    /// Whether the client has gone while it waits for the answer.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<Fault> {
        match &mut self.front {
            Front::Http1(client) => {
                let Client { wire, ended, .. } = &mut **client;
                // The next request may come early; one block of it is read. While the body is read, that tells.
                while self.up.done && !*ended && wire.inbox.len() < BLOCK {
                    match wire.io.poll_fill(cx, &mut wire.inbox) {
                        Poll::Pending => break,
                        // Half-closed: it may well wait for the answer.
                        Poll::Ready(Ok(0)) => *ended = true,
                        Poll::Ready(Ok(_)) => {}
                        Poll::Ready(Err(_)) => return Poll::Ready(Fault::ClientGone),
                    }
                }
                wire.io.poll_broken(cx).map(|_| Fault::ClientGone)
            }
            Front::Http2(stream) => stream.respond.poll_reset(cx).map(|reset| {
                if let (Back::Http2(back), Ok(reason)) = (&mut self.back, reset) {
                    back.send.send_reset(reason);
                }
                Fault::ClientGone
            }),
        }
    }

    /// Passes on the answer's body.
    fn poll_down(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        let (from, to) = self.down_framing;
        let verbatim = from == to && matches!((&self.front, &self.back), (Front::Http1(_), Back::Http1(_)));
        let mut source = match &mut self.back {
            Back::Http1(back) => {
                let Wire { io, inbox, .. } = &mut back.wire;
                Source::Http1 { io, inbox, reader: &mut self.down_reader, verbatim }
            }
            Back::Http2(back) => match &mut back.body {
                Some(body) => Source::Http2(body),
                None => return Poll::Ready(Ok(())),
            },
        };
        let mut sink = match &mut self.front {
            Front::Http1(client) => {
                let Wire { io, outbox, .. } = &mut client.wire;
                Sink::Http1 { io, outbox, chunks: to == Framing::Chunked && !verbatim }
            }
            Front::Http2(stream) => match &mut stream.answer {
                Some(answer) => Sink::Http2(answer),
                // Head and END_STREAM are sent.
                None => return Poll::Ready(Ok(())),
            },
        };
        match self.down.poll(cx, &mut source, &mut sink, self.worker.h1_limits()) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(())) => Poll::Ready(Ok(())),
            Poll::Ready(Err(Broken::Sink(cause))) => {
                self.abort_back(&cause);
                Poll::Ready(Err(Fault::ClientGone))
            }
            Poll::Ready(Err(Broken::Source(cause))) => {
                self.abort_front(&cause);
                Poll::Ready(Err(upstream_fault(cause)))
            }
        }
    }

    /// The answer broke off: the client must not take what it has for the whole. HTTP/1.1 connections are cut by their owner.
    fn abort_front(&mut self, cause: &Cause) {
        if let Front::Http2(stream) = &mut self.front
            && let Some(answer) = &mut stream.answer
        {
            answer.send_reset(match cause {
                Cause::Reset(reason) => *reason,
                _ => Reason::INTERNAL_ERROR,
            });
        }
    }

    /// The endpoint's connection, if it can carry another request.
    pub(crate) fn into_reusable(self, outcome: &Outcome) -> Option<Wire> {
        match (self.back, outcome) {
            (Back::Http1(back), Outcome::Done { request_done: true }) if back.keeps => Some(back.wire),
            _ => None,
        }
    }

    /// The endpoint's connection after an upgrade.
    pub(crate) fn into_upgraded(self) -> Option<Wire> {
        match self.back {
            Back::Http1(back) => Some(back.wire),
            Back::Http2(_) => None,
        }
    }
}

fn late_fault(late: Late) -> Fault {
    match late {
        Late::Upstream => Fault::UpstreamTimeout,
        Late::Drain => Fault::Draining,
        Late::Head | Late::Idle | Late::Client | Late::ShownBody | Late::Linger => Fault::ClientGone,
    }
}

fn client_fault(cause: Cause) -> Fault {
    match cause {
        // The connection ended inside the body: nobody is left to read an answer.
        Cause::Refused(Refusal::TruncatedBody) | Cause::Closed | Cause::Reset(_) => Fault::ClientGone,
        Cause::Refused(refusal) => Fault::BadRequest(refusal),
    }
}

fn upstream_fault(cause: Cause) -> Fault {
    match cause {
        Cause::Refused(Refusal::TruncatedBody) | Cause::Closed => Fault::UpstreamClosed { reused: false },
        Cause::Refused(refusal) => Fault::UpstreamProtocol(refusal.name()),
        Cause::Reset(_) => Fault::UpstreamReset,
    }
}
