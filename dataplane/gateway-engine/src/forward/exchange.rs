//! One exchange: sends the request's body to the endpoint while the response arrives, in one task,
//! for every pairing of HTTP versions.
//!
//! The request's head was sent before; the response's head is translated in [`answer_head`]. Local
//! replies are not made here: the caller makes them from the [`ExchangeOutcome`]. Start with
//! [`Exchange::run`].

mod answer_head;

pub(super) use answer_head::http2_fault;

use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use canal_gateway_http::head::RequestInfo;
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_http::retry_policy::AttemptOutcome;
use canal_gateway_io::body::{
    BodyCopySender, BodyError, BodyErrorCause, BodyPump, BodySink, BodySource, BodyStall, Http1Io,
};
use canal_gateway_io::buffer::Outbox;
use canal_gateway_io::clock::{TimeoutKind, Timer};
use canal_h1::{BodyReader, Framing, MessageRefusal, RequestKind, ResponseHead};
use canal_hbone::CreditWait;
use canal_model::program::AppProtocol;
use canal_model::route_filters::HeaderModifier;
use h2::client::ResponseFuture;
use h2::{Reason, RecvStream, SendStream};
use tokio::time::Instant;

use crate::authorize::AuthorizationInterrupt;
use crate::authorize::reauthorize::OngoingAuthorization;
use crate::downstream_state::{Http1Downstream, Http2Downstream};
use crate::endpoints::StreamPermit;
use crate::finish::RequestRecord;
use crate::forward::attempt_limits::{AttemptLimits, RETRY_BODY_BYTES_MAX};
use crate::forward::http1;
use crate::upstream::UpstreamLease;
use crate::worker::Worker;

/// The client's side of an exchange.
pub(crate) enum DownstreamSide<'a> {
    Http1(&'a mut Http1Downstream),
    Http2(&'a mut Http2Downstream),
}

/// The endpoint's side of an exchange.
pub(crate) enum UpstreamSide {
    Http1(Box<Http1UpstreamSide>),
    Http2(Box<Http2UpstreamSide>),
}

pub(crate) struct Http1UpstreamSide {
    pub(crate) wire: Http1Io,
    head: ResponseHead,
    reused: bool,
    /// Bytes that the connection carried before this request.
    sent_before: u64,
    /// True if the endpoint keeps the connection open after this response.
    keeps: bool,
    /// True once the endpoint has sent a byte.
    has_responded: bool,
    /// True if an interim response announced a body, which may follow in place of the final
    /// response.
    has_stray_body: bool,
}

pub(crate) struct Http2UpstreamSide {
    permit: StreamPermit,
    response: ResponseFuture,
    send: SendStream<Bytes>,
    body: Option<RecvStream>,
}

impl Http1UpstreamSide {
    /// Prepares a connection for its next exchange. The box is made here, before the connection
    /// passes through the steps of an attempt, so that none of them copies it.
    pub(crate) fn of(lease: UpstreamLease) -> Box<Self> {
        let UpstreamLease { wire, reused } = lease;
        let sent_before = wire.io.sent();
        let (keeps, heard, has_stray_body) = (false, false, false);
        Box::new(Self {
            wire,
            head: ResponseHead::new(),
            reused,
            sent_before,
            keeps,
            has_responded: heard,
            has_stray_body,
        })
    }
}

impl UpstreamSide {
    pub(crate) fn http2(
        place: StreamPermit,
        response: ResponseFuture,
        send: SendStream<Bytes>,
    ) -> Self {
        Self::Http2(Box::new(Http2UpstreamSide {
            permit: place,
            response,
            send,
            body: None,
        }))
    }
}

/// Result of an exchange, from which the caller decides about retries and local replies.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ExchangeOutcome {
    /// The response is complete. `request_done` means that the request was read to its end as well.
    Done { request_done: bool },
    /// A 101 response was passed on.
    Upgraded,
    /// The exchange failed with `fault`. `answered` means that the client has seen the response's
    /// head.
    Failed { fault: ProxyError, answered: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExchangePhase {
    /// The response's head is awaited.
    Head,
    /// The response's body is passed on.
    Body,
    /// The response was passed on completely; the rest of the request's body is still being sent.
    Rest,
}

/// An exchange whose request did not reach the application. It can go on with another connection to
/// the same endpoint.
pub(crate) struct SuspendedExchange {
    /// Bytes of the request that were sent.
    sent: Vec<Bytes>,
    /// Bytes that were to be sent next.
    unsent: Outbox,
    up: BodyPump,
    up_reader: BodyReader,
}

/// A body of which a part was sent to an endpoint, and which begins again at another one.
pub(crate) struct ReplayedBody {
    up: BodyPump,
    up_reader: BodyReader,
}

impl ReplayedBody {
    /// True once the client's request was read to its end.
    pub(crate) fn is_source_done(&self) -> bool {
        self.up.is_source_done()
    }
}

impl SuspendedExchange {
    /// Returns the body, to be sent from its beginning to another endpoint.
    pub(crate) fn into_replay(self) -> Option<Box<ReplayedBody>> {
        ReplayedBody::of(self.up, self.up_reader)
    }
}

impl ReplayedBody {
    fn of(mut up: BodyPump, up_reader: BodyReader) -> Option<Box<Self>> {
        up.rewind().then(|| Box::new(Self { up, up_reader }))
    }
}

/// State of one exchange between a client and an endpoint.
pub(crate) struct Exchange<'a> {
    worker: &'a Rc<Worker>,
    ask: &'a RequestInfo,
    record: &'a mut RequestRecord,
    front: DownstreamSide<'a>,
    pub(crate) back: UpstreamSide,
    up: BodyPump,
    up_reader: BodyReader,
    /// The endpoint accepts no more of the request. Its response may have arrived already.
    up_cut: bool,
    /// The undelivered bytes are in the endpoint's outbox again.
    resent: bool,
    status: u16,
    up_stall: BodyStall,
    /// Wait of the request's body for the first credit of an HTTP/2 endpoint.
    first_credit: Option<CreditWait>,
    down: BodyPump,
    down_stall: BodyStall,
    down_reader: BodyReader,
    down_framing: (Framing, Framing),
    upgrade: bool,
    phase: ExchangePhase,
    /// Progress of the request's body when [`Exchange::head_wait`] was set.
    progress: Option<Progress>,
    /// Time since which the final head is awaited. Only progress of the request's body resets it;
    /// interim responses do not.
    head_wait: Instant,
    /// True if the endpoint's declared protocol and the request are gRPC: a long silence is normal
    /// then.
    patient: bool,
    open: OngoingAuthorization<'a>,
    /// True if the response announced to an HTTP/1.1 client that its connection stays open.
    pub(crate) keep_alive: bool,
    /// Changes that the rule's filters make of the response's head.
    response_headers: Option<&'a HeaderModifier>,
    /// Timeouts and retries that the rule asks for.
    limits: Option<&'a mut AttemptLimits>,
}

/// Progress of a request's body: payload bytes, whether it is complete, whether it waits for the
/// client.
type Progress = (u64, bool, bool);

impl<'a> Exchange<'a> {
    /// Starts an exchange. The request's head is in the endpoint's outbox or was sent. `sent` means
    /// that there is no body to pass on.
    pub(crate) fn new(
        worker: &'a Rc<Worker>,
        ask: &'a RequestInfo,
        record: &'a mut RequestRecord,
        front: DownstreamSide<'a>,
        back: UpstreamSide,
        sent: bool,
        open: OngoingAuthorization<'a>,
    ) -> Self {
        let (mut front, mut back) = (front, back);
        // A request that may be retried anyway needs no copy of the sent bytes: it is encoded
        // again.
        if let UpstreamSide::Http1(back) = &mut back
            && back.reused
            && (ask.has_body() || !ask.idempotent)
        {
            back.wire.io.keep_sent();
        }
        let up = match &mut front {
            DownstreamSide::Http2(stream) if !sent => {
                BodyPump::after(std::mem::take(&mut stream.first))
            }
            _ => BodyPump::new(sent),
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
            resent: false,
            status: 0,
            up_stall: BodyStall::default(),
            first_credit: None,
            down: BodyPump::new(false),
            down_stall: BodyStall::default(),
            down_reader: BodyReader::new(Framing::None),
            down_framing: (Framing::None, Framing::None),
            upgrade: false,
            phase: ExchangePhase::Head,
            progress: None,
            head_wait: worker.clock.now(),
            // A client's content type alone must not disable timeouts.
            patient: ask.grpc && open.protocol() == AppProtocol::Grpc,
            open,
            keep_alive: false,
            response_headers: None,
            limits: None,
        };
        exchange.timer().watch(Some(exchange.open.tenant()));
        exchange
    }

    /// Applies what the rule asks for to the response's headers, and copies the body for mirrors.
    /// Bodies that are kept for retries are kept by [`Exchange::limit_attempts`], which follows.
    pub(crate) fn apply_rule(
        &mut self,
        response_headers: Option<&'a HeaderModifier>,
        copies: Vec<BodyCopySender>,
    ) {
        self.response_headers = response_headers;
        if copies.is_empty() {
            return;
        }
        let is_verbatim = matches!(
            (&self.front, &self.back),
            (DownstreamSide::Http1(_), UpstreamSide::Http1(_))
        );
        let is_chunked = is_verbatim && self.ask.framing == Framing::Chunked;
        self.up.copy_to(copies, is_chunked, RETRY_BODY_BYTES_MAX);
    }

    /// Applies the timeouts and retries that the rule asks for. With `keeps_body`, the body is kept
    /// for a retry, as far as the limits permit.
    pub(crate) fn limit_attempts(&mut self, limits: &'a mut AttemptLimits, keeps_body: bool) {
        if keeps_body && limits.wants_body(self.ask) {
            self.up.keep_for_replay(RETRY_BODY_BYTES_MAX);
        }
        self.limits = Some(limits);
    }

    /// Begins the body of a failed attempt again.
    pub(crate) fn replay(&mut self, body: Box<ReplayedBody>) {
        let ReplayedBody { up, up_reader } = *body;
        (self.up, self.up_reader) = (up, up_reader);
    }

    /// Returns the body for another attempt, if all of it that was read is available.
    pub(crate) fn into_replay(self) -> Option<Box<ReplayedBody>> {
        ReplayedBody::of(self.up, self.up_reader)
    }

    /// Ready if a time of the rule has passed.
    fn poll_limits(&mut self, cx: &mut Context<'_>) -> Poll<ProxyError> {
        let Some(limits) = &mut self.limits else {
            return Poll::Pending;
        };
        limits.cover_body(self.worker, self.open.session(), &mut self.up);
        let is_sent = self.up.is_source_done() || self.up_cut;
        limits.poll_deadline(cx, self.worker, is_sent, self.phase == ExchangePhase::Body)
    }

    /// Returns whether the request is sent again instead of passing on a response with this head.
    fn retries_response(&mut self, status: u16, grpc_status: Option<u8>) -> bool {
        let Some(limits) = &mut self.limits else {
            return false;
        };
        let outcome = AttemptOutcome::Response {
            status,
            grpc_status,
        };
        limits.grant_retry(self.worker, outcome, self.up.replay_bytes().is_some())
    }

    /// Drops what only a retry would need, because the client sees the response now.
    fn forget_retries(&mut self) {
        if let Some(limits) = &mut self.limits {
            self.up.forget_replay();
            limits.release();
        }
    }

    /// Runs the exchange to its end.
    pub(crate) async fn run(&mut self) -> ExchangeOutcome {
        let outcome = std::future::poll_fn(|cx| self.poll(cx)).await;
        self.timer().disarm();
        self.timer().watch(None);
        // Nothing of an undelivered request counts; if it is sent again, its bytes are counted
        // then.
        if !matches!(
            outcome,
            ExchangeOutcome::Failed {
                fault: ProxyError::UpstreamUndelivered,
                ..
            }
        ) {
            // The next attempt goes on with this body, and counts only what comes then.
            self.record.bytes_in += std::mem::take(&mut self.up.payload_bytes);
            self.record.bytes_out += self.down.payload_bytes;
        }
        if let Some(status) = self.down.grpc_status {
            self.record.grpc_status = Some(status);
        }
        outcome
    }

    fn timer(&self) -> &Timer {
        match &self.front {
            DownstreamSide::Http1(client) => &client.timer,
            DownstreamSide::Http2(stream) => &stream.timer,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ExchangeOutcome> {
        if let Poll::Ready(late) = self.timer().poll(cx) {
            self.worker.counts.late(late);
            // The client has its response; only the rest of the upload is lost.
            if self.phase == ExchangePhase::Rest {
                return Poll::Ready(ExchangeOutcome::Done {
                    request_done: false,
                });
            }
            // The client stopped sending before a response began, so a 408 can still be sent.
            let unsent = late == TimeoutKind::Client
                && self.phase == ExchangePhase::Head
                && !self.client_lags();
            return self.fail(if unsent {
                ProxyError::RequestTimeout
            } else {
                late_fault(late)
            });
        }
        if self.open.is_outdated() {
            match self.reauthorize_request() {
                Ok(()) => {}
                Err(AuthorizationInterrupt::Fault(fault)) => return self.fail(fault),
                Err(AuthorizationInterrupt::Verify(todo)) => {
                    self.open.verify(self.worker, todo, cx.waker().clone())
                }
            }
        }
        match self.poll_up(cx) {
            // The response is complete, so a failure of the upload changes nothing.
            Poll::Ready(Err(_)) if self.phase == ExchangePhase::Rest => {
                return Poll::Ready(ExchangeOutcome::Done {
                    request_done: false,
                });
            }
            Poll::Ready(Err(fault)) => return self.fail(fault),
            _ => {}
        }
        if self.phase != ExchangePhase::Rest
            && let Poll::Ready(fault) = self.poll_limits(cx)
        {
            return self.fail(fault);
        }
        if self.phase == ExchangePhase::Head {
            match self.poll_head(cx) {
                Poll::Ready(Ok(())) => {
                    self.phase = ExchangePhase::Body;
                    self.forget_retries();
                }
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
        if self.phase == ExchangePhase::Body {
            match self.poll_down(cx) {
                Poll::Ready(Ok(())) if self.upgrade => {
                    return Poll::Ready(ExchangeOutcome::Upgraded);
                }
                Poll::Ready(Ok(())) => self.phase = ExchangePhase::Rest,
                Poll::Ready(Err(fault)) => return self.fail(fault),
                Poll::Pending => {
                    self.arm();
                    return Poll::Pending;
                }
            }
        }
        // A response below 400 does not end the upload: the application may continue to read.
        if self.is_up_over() || self.status >= 400 {
            return Poll::Ready(ExchangeOutcome::Done {
                request_done: self.up.is_complete,
            });
        }
        self.arm();
        Poll::Pending
    }

    /// True if nothing more of the request goes to the endpoint.
    fn is_up_over(&self) -> bool {
        self.up.is_complete || self.up_cut
    }

    /// Ends this part of an exchange whose request did not reach the application. Returns the data
    /// with which the next attempt continues the request, if all sent bytes are still available.
    pub(crate) fn suspend(self) -> Option<Box<SuspendedExchange>> {
        let UpstreamSide::Http1(mut back) = self.back else {
            return None;
        };
        let sent = back.wire.io.take_sent()?;
        Some(Box::new(SuspendedExchange {
            sent,
            unsent: std::mem::take(&mut back.wire.outbox),
            up: self.up,
            up_reader: self.up_reader,
        }))
    }

    /// Goes on with a suspended exchange on this one's connection, on which nothing was sent yet.
    pub(crate) fn resume(&mut self, suspended: Box<SuspendedExchange>) {
        let SuspendedExchange {
            sent,
            mut unsent,
            up,
            up_reader,
        } = *suspended;
        if let UpstreamSide::Http1(back) = &mut self.back {
            let outbox = &mut back.wire.outbox;
            sent.into_iter().for_each(|piece| outbox.push(piece));
            while let Some(piece) = unsent.pop() {
                outbox.push(piece);
            }
        }
        self.up = up;
        self.up_reader = up_reader;
        self.resent = true;
    }

    /// Authorizes the request again after a policy change, and aborts the endpoint's side if it is
    /// denied now.
    fn reauthorize_request(&mut self) -> Result<(), AuthorizationInterrupt> {
        let decision = match &self.front {
            DownstreamSide::Http1(client) => {
                http1::reauthorize_request(self.worker, &self.open, self.ask, client)
            }
            DownstreamSide::Http2(_) => self.open.reauthorize_http2(self.worker),
        };
        if matches!(decision, Err(AuthorizationInterrupt::Fault(_))) {
            self.abort_back(&BodyErrorCause::Closed);
        }
        decision
    }

    fn fail(&self, fault: ProxyError) -> Poll<ExchangeOutcome> {
        Poll::Ready(ExchangeOutcome::Failed {
            fault,
            answered: self.phase != ExchangePhase::Head,
        })
    }

    /// True if an HTTP/1.1 client has not accepted all bytes written for it.
    fn client_lags(&self) -> bool {
        matches!(&self.front, DownstreamSide::Http1(client) if !client.wire.outbox.is_empty())
    }

    /// Arms the timeout of the current phase. While bodies move, each poll means progress and
    /// restarts the timeout; the wait for the final head is not restarted.
    fn arm(&mut self) {
        let times = &self.worker.shared.config.times;
        // A gRPC stream may be silent for long in either direction.
        let of = |time: Duration| if self.patient { times.relay } else { time };
        let now = self.worker.clock.now();
        let (late, since, after) = match self.phase {
            ExchangePhase::Head => {
                let progress = (
                    self.up.payload_bytes,
                    self.is_up_over(),
                    self.up.waiting_for_source,
                );
                if self.progress != Some(progress) {
                    self.progress = Some(progress);
                    self.head_wait = now;
                }
                let request_waits = !self.is_up_over() && self.up.waiting_for_source;
                let client_waits = request_waits || self.client_lags();
                let (late, time) = if client_waits {
                    (TimeoutKind::Client, times.client)
                } else {
                    (TimeoutKind::Upstream, times.upstream)
                };
                (late, self.head_wait, of(time))
            }
            // Hours may pass between parts of a response, as in server-sent events and watches.
            ExchangePhase::Rest if !self.up.waiting_for_source => {
                (TimeoutKind::Upstream, now, of(times.upstream))
            }
            ExchangePhase::Body if self.down.waiting_for_source => {
                (TimeoutKind::Upstream, now, times.relay)
            }
            ExchangePhase::Body | ExchangePhase::Rest => {
                (TimeoutKind::Client, now, of(times.client))
            }
        };
        self.timer().arm_from(late, since, after);
    }

    /// Passes on the request's body.
    fn poll_up(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ProxyError>> {
        if self.resent
            && let UpstreamSide::Http1(back) = &mut self.back
        {
            let Http1Io { io, outbox, .. } = &mut back.wire;
            // A failed flush is not an error here: reading the response yields the reason.
            self.up_cut = ready!(io.poll_flush(cx, outbox)).is_err();
            self.resent = false;
        }
        if self.is_up_over() {
            return Poll::Ready(Ok(()));
        }
        let framing = self.ask.framing;
        let verbatim = matches!(
            (&self.front, &self.back),
            (DownstreamSide::Http1(_), UpstreamSide::Http1(_))
        );
        let mut source = match &mut self.front {
            DownstreamSide::Http1(client) => {
                let Http1Io { io, inbox, .. } = &mut client.wire;
                BodySource::Http1 {
                    io,
                    inbox,
                    reader: &mut self.up_reader,
                    verbatim,
                }
            }
            DownstreamSide::Http2(stream) => BodySource::Http2 {
                recv: &mut stream.body,
                account: &stream.account,
            },
        };
        let mut sink = match &mut self.back {
            UpstreamSide::Http1(back) => {
                let Http1Io { io, outbox, .. } = &mut back.wire;
                BodySink::Http1 {
                    io,
                    outbox,
                    chunks: framing == Framing::Chunked && !verbatim,
                }
            }
            UpstreamSide::Http2(back) => BodySink::Http2(&mut back.send),
        };
        let polled = self
            .up
            .poll(cx, &mut source, &mut sink, self.worker.h1_limits());
        match polled {
            Poll::Pending => {
                let stalled = self.up_stall.poll(cx, &mut self.up, &mut source, &sink);
                let is_unsent = self.up.payload_bytes > 0 && self.up.accepted(&sink) == 0;
                self.note_credit(is_unsent);
                stalled.map(|()| Err(ProxyError::TenantBuffers))
            }
            Poll::Ready(Ok(())) => {
                self.note_credit(false);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(BodyError::Source(cause))) => {
                self.first_credit = None;
                self.abort_back(&cause);
                Poll::Ready(Err(client_fault(cause)))
            }
            Poll::Ready(Err(BodyError::Sink(_))) => {
                self.first_credit = None;
                // The endpoint may have responded early and closed. Reading yields its response, or
                // the reason why there is none.
                self.up_cut = true;
                Poll::Ready(Ok(()))
            }
        }
    }

    /// Notes whether the endpoint has given the request's stream its first credit. Without it
    /// nothing of the body that has arrived was sent.
    fn note_credit(&mut self, is_unsent: bool) {
        match (&self.back, is_unsent) {
            // The stream's own window is untouched, so the credit that is missing is the
            // connection's.
            (UpstreamSide::Http2(back), true) if self.first_credit.is_none() => {
                self.first_credit = Some(back.permit.connection().account().credit().begin_wait());
            }
            (_, true) => {}
            (_, false) => self
                .first_credit
                .take()
                .into_iter()
                .for_each(CreditWait::granted),
        }
    }

    /// Aborts the endpoint's side after the client left or sent an invalid body. The endpoint must
    /// not mistake the partial body for a complete one.
    fn abort_back(&mut self, cause: &BodyErrorCause) {
        match &mut self.back {
            UpstreamSide::Http1(back) => back.wire.io.abort(),
            UpstreamSide::Http2(back) => back.send.send_reset(match cause {
                BodyErrorCause::Reset(reason) => *reason,
                _ => Reason::CANCEL,
            }),
        }
    }

    /// Ready if the client has left while it waits for the response.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<ProxyError> {
        match &mut self.front {
            DownstreamSide::Http1(client) => {
                // While the request's body is read, that detects a close.
                let reads = self.up.is_complete || self.up_cut;
                http1::poll_gone(client, cx, reads).map(|()| ProxyError::ClientGone)
            }
            DownstreamSide::Http2(stream) => stream.respond.poll_reset(cx).map(|reset| {
                if let (UpstreamSide::Http2(back), Ok(reason)) = (&mut self.back, reset) {
                    back.send.send_reset(reason);
                }
                ProxyError::ClientGone
            }),
        }
    }

    /// Passes on the response's body.
    fn poll_down(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ProxyError>> {
        if matches!(&self.back, UpstreamSide::Http2(back) if back.body.is_none()) {
            // There is nothing but the head.
            return self.poll_taken(cx);
        }
        let (from, to) = self.down_framing;
        let verbatim = from == to
            && matches!(
                (&self.front, &self.back),
                (DownstreamSide::Http1(_), UpstreamSide::Http1(_))
            );
        let mut source = match &mut self.back {
            UpstreamSide::Http1(back) => {
                let Http1Io { io, inbox, .. } = &mut back.wire;
                BodySource::Http1 {
                    io,
                    inbox,
                    reader: &mut self.down_reader,
                    verbatim,
                }
            }
            UpstreamSide::Http2(back) => match &mut back.body {
                Some(recv) => BodySource::Http2 {
                    recv,
                    account: back.permit.connection().account(),
                },
                None => return Poll::Ready(Ok(())),
            },
        };
        let mut sink = match &mut self.front {
            DownstreamSide::Http1(client) => {
                let Http1Io { io, outbox, .. } = &mut client.wire;
                BodySink::Http1 {
                    io,
                    outbox,
                    chunks: to == Framing::Chunked && !verbatim,
                }
            }
            DownstreamSide::Http2(stream) => match &mut stream.answer {
                Some(answer) => BodySink::Http2(answer),
                // The head was sent with END_STREAM.
                None => return Poll::Ready(Ok(())),
            },
        };
        match self
            .down
            .poll(cx, &mut source, &mut sink, self.worker.h1_limits())
        {
            Poll::Pending => self
                .down_stall
                .poll(cx, &mut self.down, &mut source, &sink)
                .map(|()| Err(ProxyError::TenantBuffers)),
            Poll::Ready(Ok(())) => Poll::Ready(Ok(())),
            Poll::Ready(Err(BodyError::Sink(cause))) => {
                self.abort_back(&cause);
                Poll::Ready(Err(ProxyError::ClientGone))
            }
            Poll::Ready(Err(BodyError::Source(cause))) => {
                self.abort_front(&cause);
                Poll::Ready(Err(upstream_fault(cause)))
            }
        }
    }

    /// Resets the client's HTTP/2 stream after the response broke off, so that the client does not
    /// mistake it for a complete one. The owner of an HTTP/1.1 connection cuts that connection
    /// itself.
    fn abort_front(&mut self, cause: &BodyErrorCause) {
        if let DownstreamSide::Http2(stream) = &mut self.front
            && let Some(answer) = &mut stream.answer
        {
            answer.send_reset(match cause {
                BodyErrorCause::Reset(reason) => *reason,
                _ => Reason::INTERNAL_ERROR,
            });
        }
    }

    /// Returns the endpoint's connection if it can carry another request after a complete response.
    pub(crate) fn into_reusable(self, request_done: bool) -> Option<Http1Io> {
        match self.back {
            // A connection on which an upgrade was offered has no close report, so it is not
            // reused.
            UpstreamSide::Http1(back)
                if request_done && back.keeps && self.ask.kind != RequestKind::Upgrade =>
            {
                Some(back.wire)
            }
            _ => None,
        }
    }

    /// Returns the endpoint's connection after an upgrade.
    pub(crate) fn into_upgraded(self) -> Option<Http1Io> {
        match self.back {
            UpstreamSide::Http1(back) => Some(back.wire),
            UpstreamSide::Http2(_) => None,
        }
    }
}

fn late_fault(late: TimeoutKind) -> ProxyError {
    match late {
        TimeoutKind::Upstream => ProxyError::UpstreamTimeout,
        TimeoutKind::Drain => ProxyError::Draining,
        TimeoutKind::Head
        | TimeoutKind::Idle
        | TimeoutKind::Client
        | TimeoutKind::ShownBody
        | TimeoutKind::Linger => ProxyError::ClientGone,
        TimeoutKind::RouteRequest => ProxyError::RouteTimeout,
        TimeoutKind::RouteAttempt => ProxyError::AttemptTimeout,
    }
}

fn client_fault(cause: BodyErrorCause) -> ProxyError {
    match cause {
        // The connection ended inside the body, so no client is left to read a response.
        BodyErrorCause::Refused(MessageRefusal::TruncatedBody)
        | BodyErrorCause::Closed
        | BodyErrorCause::Reset(_) => ProxyError::ClientGone,
        BodyErrorCause::Refused(refusal) => ProxyError::BadRequest(refusal),
    }
}

fn upstream_fault(cause: BodyErrorCause) -> ProxyError {
    match cause {
        BodyErrorCause::Refused(MessageRefusal::TruncatedBody) | BodyErrorCause::Closed => {
            ProxyError::UpstreamClosed { reused: false }
        }
        BodyErrorCause::Refused(refusal) => ProxyError::UpstreamProtocol(refusal.name()),
        BodyErrorCause::Reset(_) => ProxyError::UpstreamReset,
    }
}
