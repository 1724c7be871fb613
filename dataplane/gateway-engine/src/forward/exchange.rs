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
    BodyCopy, BodyError, BodyErrorCause, BodyPump, BodySink, BodySource, BodyStall, Http1Io,
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
    keeps_open: bool,
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
        Box::new(Self {
            wire,
            head: ResponseHead::new(),
            reused,
            sent_before,
            keeps_open: false,
            has_responded: false,
            has_stray_body: false,
        })
    }
}

impl UpstreamSide {
    pub(crate) fn http2(
        permit: StreamPermit,
        response: ResponseFuture,
        send: SendStream<Bytes>,
    ) -> Self {
        Self::Http2(Box::new(Http2UpstreamSide {
            permit,
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
    request_body: BodyPump,
    request_reader: BodyReader,
}

/// A body of which a part was sent to an endpoint, and which begins again at another one.
pub(crate) struct ReplayedBody {
    request_body: BodyPump,
    request_reader: BodyReader,
}

impl ReplayedBody {
    /// True once the client's request was read to its end.
    pub(crate) fn is_source_done(&self) -> bool {
        self.request_body.is_source_done()
    }
}

impl SuspendedExchange {
    /// Returns the body, to be sent from its beginning to another endpoint.
    pub(crate) fn into_replay(self) -> Option<Box<ReplayedBody>> {
        ReplayedBody::of(self.request_body, self.request_reader)
    }
}

impl ReplayedBody {
    fn of(mut request_body: BodyPump, request_reader: BodyReader) -> Option<Box<Self>> {
        request_body.rewind().then(|| {
            Box::new(Self {
                request_body,
                request_reader,
            })
        })
    }
}

/// State of one exchange between a client and an endpoint.
pub(crate) struct Exchange<'a> {
    worker: &'a Rc<Worker>,
    request: &'a RequestInfo,
    record: &'a mut RequestRecord,
    downstream: DownstreamSide<'a>,
    pub(crate) upstream: UpstreamSide,
    request_body: BodyPump,
    request_reader: BodyReader,
    /// The endpoint accepts no more of the request. Its response may have arrived already.
    upload_cut: bool,
    /// The undelivered bytes are in the endpoint's outbox again.
    resent: bool,
    status: u16,
    request_stall: BodyStall,
    /// Wait of the request's body for the first credit of an HTTP/2 endpoint.
    first_credit: Option<CreditWait>,
    response_body: BodyPump,
    response_stall: BodyStall,
    response_reader: BodyReader,
    response_framing: (Framing, Framing),
    upgrade: bool,
    phase: ExchangePhase,
    /// Progress of the request's body when [`Exchange::head_wait`] was set.
    progress: Option<Progress>,
    /// Time since which the final head is awaited. Only progress of the request's body resets it;
    /// interim responses do not.
    head_wait: Instant,
    /// True if the endpoint's declared protocol and the request are gRPC: a long silence is normal
    /// then.
    allows_silence: bool,
    authorization: OngoingAuthorization<'a>,
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
        request: &'a RequestInfo,
        record: &'a mut RequestRecord,
        downstream: DownstreamSide<'a>,
        upstream: UpstreamSide,
        sent: bool,
        authorization: OngoingAuthorization<'a>,
    ) -> Self {
        let (mut downstream, mut upstream) = (downstream, upstream);
        // A request that may be retried anyway needs no copy of the sent bytes: it is encoded
        // again.
        if let UpstreamSide::Http1(upstream) = &mut upstream
            && upstream.reused
            && (request.has_body() || !request.idempotent)
        {
            upstream.wire.io.keep_sent();
        }
        let request_body = match &mut downstream {
            DownstreamSide::Http2(stream) if !sent => {
                BodyPump::after(std::mem::take(&mut stream.first))
            }
            // The body of HTTP/1.1 is in the client's inbox, and after `sent` there is none.
            _ => BodyPump::new(sent),
        };
        let exchange = Self {
            worker,
            request,
            record,
            downstream,
            upstream,
            request_body,
            request_reader: BodyReader::new(request.framing),
            upload_cut: false,
            resent: false,
            status: 0,
            request_stall: BodyStall::default(),
            first_credit: None,
            response_body: BodyPump::new(false),
            response_stall: BodyStall::default(),
            // The response's head replaces this reader and these framings.
            response_reader: BodyReader::new(Framing::None),
            response_framing: (Framing::None, Framing::None),
            upgrade: false,
            phase: ExchangePhase::Head,
            progress: None,
            head_wait: worker.clock.now(),
            // A client's content type alone must not disable timeouts.
            allows_silence: request.grpc && authorization.protocol() == AppProtocol::Grpc,
            authorization,
            keep_alive: false,
            response_headers: None,
            limits: None,
        };
        exchange
            .timer()
            .watch(Some(exchange.authorization.tenant()));
        exchange
    }

    /// Applies what the rule asks for to the response's headers, and copies the body for mirrors.
    /// Bodies that are kept for retries are kept by [`Exchange::limit_attempts`], which follows.
    pub(crate) fn apply_rule(
        &mut self,
        response_headers: Option<&'a HeaderModifier>,
        copies: Vec<BodyCopy>,
    ) {
        self.response_headers = response_headers;
        if copies.is_empty() {
            return;
        }
        let is_verbatim = matches!(
            (&self.downstream, &self.upstream),
            (DownstreamSide::Http1(_), UpstreamSide::Http1(_))
        );
        let is_chunked = is_verbatim && self.request.framing == Framing::Chunked;
        self.request_body
            .copy_to(copies, is_chunked, RETRY_BODY_BYTES_MAX);
    }

    /// Applies the timeouts and retries that the rule asks for. With `keeps_body`, the body is kept
    /// for a retry, as far as the limits permit.
    pub(crate) fn limit_attempts(&mut self, limits: &'a mut AttemptLimits, keeps_body: bool) {
        if keeps_body && limits.wants_body(self.request) {
            self.request_body.keep_for_replay(RETRY_BODY_BYTES_MAX);
        }
        self.limits = Some(limits);
    }

    /// Continues from what the attempt before left, if it left anything.
    #[inline]
    pub(crate) fn continue_from(
        &mut self,
        suspended: Option<Box<SuspendedExchange>>,
        replayed: Option<Box<ReplayedBody>>,
    ) {
        if let Some(suspended) = suspended {
            self.resume(suspended);
        } else if let Some(replayed) = replayed {
            self.replay(replayed);
        }
    }

    /// Begins the body of a failed attempt again.
    fn replay(&mut self, body: Box<ReplayedBody>) {
        let ReplayedBody {
            request_body,
            request_reader,
        } = *body;
        (self.request_body, self.request_reader) = (request_body, request_reader);
    }

    /// Returns the body for another attempt, if all of it that was read is available.
    pub(crate) fn into_replay(self) -> Option<Box<ReplayedBody>> {
        ReplayedBody::of(self.request_body, self.request_reader)
    }

    /// Ready if a time of the rule has passed.
    fn poll_limits(&mut self, cx: &mut Context<'_>) -> Poll<ProxyError> {
        let Some(limits) = &mut self.limits else {
            return Poll::Pending;
        };
        limits.cover_body(
            self.worker,
            self.authorization.session(),
            &mut self.request_body,
        );
        let is_sent = self.request_body.is_source_done() || self.upload_cut;
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
        limits.grant_retry(
            self.worker,
            outcome,
            self.request_body.replay_bytes().is_some(),
        )
    }

    /// Drops what only a retry would need, because the client sees the response now.
    fn forget_retries(&mut self) {
        if let Some(limits) = &mut self.limits {
            self.request_body.forget_replay();
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
            self.record.bytes_in += std::mem::take(&mut self.request_body.payload_bytes);
            self.record.bytes_out += self.response_body.payload_bytes;
        }
        if let Some(status) = self.response_body.grpc_status {
            self.record.grpc_status = Some(status);
        }
        outcome
    }

    fn timer(&self) -> &Timer {
        match &self.downstream {
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
                timeout_error(late)
            });
        }
        if self.authorization.is_outdated() {
            match self.reauthorize_request() {
                Ok(()) => {}
                Err(AuthorizationInterrupt::Fault(fault)) => return self.fail(fault),
                Err(AuthorizationInterrupt::Verify(todo)) => {
                    self.authorization
                        .verify(self.worker, todo, cx.waker().clone())
                }
            }
        }
        match self.poll_request_body(cx) {
            // The response is complete, so a failure of the upload changes nothing.
            Poll::Ready(Err(_)) if self.phase == ExchangePhase::Rest => {
                return Poll::Ready(ExchangeOutcome::Done {
                    request_done: false,
                });
            }
            Poll::Ready(Err(fault)) => return self.fail(fault),
            // The response need not wait for the upload: an endpoint may respond early.
            _ => {}
        }
        // This comes before the head: while the head is awaited, `poll` returns from there; and a
        // retry that the head causes needs the kept body to be counted. In phase `Rest` the client
        // has the complete response, which no time of the rule may turn into a failure.
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
                    if let Poll::Ready(fault) = self.poll_client_gone(cx) {
                        return self.fail(fault);
                    }
                    self.arm();
                    return Poll::Pending;
                }
            }
        }
        if self.phase == ExchangePhase::Body {
            match self.poll_response_body(cx) {
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
        if self.is_upload_over() || self.status >= 400 {
            return Poll::Ready(ExchangeOutcome::Done {
                request_done: self.request_body.is_complete,
            });
        }
        self.arm();
        Poll::Pending
    }

    /// True if nothing more of the request goes to the endpoint.
    fn is_upload_over(&self) -> bool {
        self.request_body.is_complete || self.upload_cut
    }

    /// Ends this part of an exchange whose request did not reach the application. Returns the data
    /// with which the next attempt continues the request, if all sent bytes are still available.
    pub(crate) fn suspend(self) -> Option<Box<SuspendedExchange>> {
        let UpstreamSide::Http1(mut upstream) = self.upstream else {
            return None;
        };
        let sent = upstream.wire.io.take_sent()?;
        Some(Box::new(SuspendedExchange {
            sent,
            unsent: std::mem::take(&mut upstream.wire.outbox),
            request_body: self.request_body,
            request_reader: self.request_reader,
        }))
    }

    /// Goes on with a suspended exchange on this one's connection, on which nothing was sent yet.
    fn resume(&mut self, suspended: Box<SuspendedExchange>) {
        let SuspendedExchange {
            sent,
            mut unsent,
            request_body,
            request_reader,
        } = *suspended;
        if let UpstreamSide::Http1(upstream) = &mut self.upstream {
            let outbox = &mut upstream.wire.outbox;
            sent.into_iter().for_each(|piece| outbox.push(piece));
            while let Some(piece) = unsent.pop() {
                outbox.push(piece);
            }
        }
        self.request_body = request_body;
        self.request_reader = request_reader;
        self.resent = true;
    }

    /// Authorizes the request again after a policy change, and aborts the endpoint's side if it is
    /// denied now.
    fn reauthorize_request(&mut self) -> Result<(), AuthorizationInterrupt> {
        let decision = match &self.downstream {
            DownstreamSide::Http1(client) => {
                http1::reauthorize_request(self.worker, &self.authorization, self.request, client)
            }
            DownstreamSide::Http2(_) => self.authorization.reauthorize_http2(self.worker),
        };
        if matches!(decision, Err(AuthorizationInterrupt::Fault(_))) {
            self.abort_upstream(&BodyErrorCause::Closed);
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
        matches!(&self.downstream, DownstreamSide::Http1(client) if !client.wire.outbox.is_empty())
    }

    /// Arms the timeout of the current phase. While bodies move, each poll means progress and
    /// restarts the timeout; the wait for the final head is not restarted.
    fn arm(&mut self) {
        let times = &self.worker.shared.config.times;
        // A gRPC stream may be silent for long in either direction.
        let of = |time: Duration| {
            if self.allows_silence {
                times.relay
            } else {
                time
            }
        };
        let now = self.worker.clock.now();
        let (late, since, after) = match self.phase {
            ExchangePhase::Head => {
                let progress = (
                    self.request_body.payload_bytes,
                    self.is_upload_over(),
                    self.request_body.waiting_for_source,
                );
                // The wait for the head begins anew with each progress of the request.
                if self.progress != Some(progress) {
                    self.progress = Some(progress);
                    self.head_wait = now;
                }
                // The side that everything waits for is the one that is late.
                let request_waits = !self.is_upload_over() && self.request_body.waiting_for_source;
                let client_waits = request_waits || self.client_lags();
                let (late, time) = if client_waits {
                    (TimeoutKind::Client, times.client)
                } else {
                    (TimeoutKind::Upstream, times.upstream)
                };
                (late, self.head_wait, of(time))
            }
            // The response is complete; only the endpoint is slow to accept the rest of the upload.
            ExchangePhase::Rest if !self.request_body.waiting_for_source => {
                (TimeoutKind::Upstream, now, of(times.upstream))
            }
            // Hours may pass between parts of a response, as in server-sent events and watches.
            ExchangePhase::Body if self.response_body.waiting_for_source => {
                (TimeoutKind::Upstream, now, times.relay)
            }
            ExchangePhase::Body | ExchangePhase::Rest => {
                (TimeoutKind::Client, now, of(times.client))
            }
        };
        self.timer().arm_from(late, since, after);
    }

    /// Passes on the request's body.
    fn poll_request_body(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ProxyError>> {
        if self.resent
            && let UpstreamSide::Http1(upstream) = &mut self.upstream
        {
            let Http1Io { io, outbox, .. } = &mut upstream.wire;
            // A failed flush is not an error here: reading the response yields the reason.
            self.upload_cut = ready!(io.poll_flush(cx, outbox)).is_err();
            self.resent = false;
        }
        if self.is_upload_over() {
            return Poll::Ready(Ok(()));
        }
        let framing = self.request.framing;
        // Between two HTTP/1.1 sides the framing passes unchanged with the payload.
        let verbatim = matches!(
            (&self.downstream, &self.upstream),
            (DownstreamSide::Http1(_), UpstreamSide::Http1(_))
        );
        let mut source = match &mut self.downstream {
            DownstreamSide::Http1(client) => {
                let Http1Io { io, inbox, .. } = &mut client.wire;
                BodySource::Http1 {
                    io,
                    inbox,
                    reader: &mut self.request_reader,
                    verbatim,
                }
            }
            DownstreamSide::Http2(stream) => BodySource::Http2 {
                recv: &mut stream.body,
                account: &stream.account,
            },
        };
        let mut sink = match &mut self.upstream {
            UpstreamSide::Http1(upstream) => {
                let Http1Io { io, outbox, .. } = &mut upstream.wire;
                BodySink::Http1 {
                    io,
                    outbox,
                    chunks: framing == Framing::Chunked && !verbatim,
                }
            }
            UpstreamSide::Http2(upstream) => BodySink::Http2(&mut upstream.send),
        };
        let polled = self
            .request_body
            .poll(cx, &mut source, &mut sink, self.worker.h1_limits());
        match polled {
            Poll::Pending => {
                let stalled =
                    self.request_stall
                        .poll(cx, &mut self.request_body, &mut source, &sink);
                let is_unsent =
                    self.request_body.payload_bytes > 0 && self.request_body.accepted(&sink) == 0;
                self.note_credit(is_unsent);
                stalled.map(|()| Err(ProxyError::TenantBuffers))
            }
            Poll::Ready(Ok(())) => {
                self.note_credit(false);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(BodyError::Source(cause))) => {
                self.first_credit = None;
                self.abort_upstream(&cause);
                Poll::Ready(Err(client_fault(cause)))
            }
            Poll::Ready(Err(BodyError::Sink(_))) => {
                self.first_credit = None;
                // The endpoint may have responded early and closed. Reading yields its response, or
                // the reason why there is none.
                self.upload_cut = true;
                Poll::Ready(Ok(()))
            }
        }
    }

    /// Notes whether the endpoint has given the request's stream its first credit. Without it
    /// nothing of the body that has arrived was sent.
    fn note_credit(&mut self, is_unsent: bool) {
        match (&self.upstream, is_unsent) {
            // The stream's own window is untouched, so the credit that is missing is the
            // connection's.
            (UpstreamSide::Http2(upstream), true) if self.first_credit.is_none() => {
                self.first_credit =
                    Some(upstream.permit.connection().account().credit().begin_wait());
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
    fn abort_upstream(&mut self, cause: &BodyErrorCause) {
        match &mut self.upstream {
            UpstreamSide::Http1(upstream) => upstream.wire.io.abort(),
            UpstreamSide::Http2(upstream) => upstream.send.send_reset(match cause {
                BodyErrorCause::Reset(reason) => *reason,
                _ => Reason::CANCEL,
            }),
        }
    }

    /// Ready if the client has left while it waits for the response.
    fn poll_client_gone(&mut self, cx: &mut Context<'_>) -> Poll<ProxyError> {
        match &mut self.downstream {
            DownstreamSide::Http1(client) => {
                // While the request's body is read, that detects a close.
                let reads = self.request_body.is_complete || self.upload_cut;
                http1::poll_client_gone(client, cx, reads).map(|()| ProxyError::ClientGone)
            }
            DownstreamSide::Http2(stream) => stream.respond.poll_reset(cx).map(|reset| {
                if let (UpstreamSide::Http2(upstream), Ok(reason)) = (&mut self.upstream, reset) {
                    upstream.send.send_reset(reason);
                }
                ProxyError::ClientGone
            }),
        }
    }

    /// Passes on the response's body.
    fn poll_response_body(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ProxyError>> {
        if matches!(&self.upstream, UpstreamSide::Http2(upstream) if upstream.body.is_none()) {
            // There is nothing but the head.
            return self.poll_client_flush(cx);
        }
        let (from, to) = self.response_framing;
        // With equal framing on two HTTP/1.1 sides, chunk headers pass unchanged with the payload.
        let verbatim = from == to
            && matches!(
                (&self.downstream, &self.upstream),
                (DownstreamSide::Http1(_), UpstreamSide::Http1(_))
            );
        let mut source = match &mut self.upstream {
            UpstreamSide::Http1(upstream) => {
                let Http1Io { io, inbox, .. } = &mut upstream.wire;
                BodySource::Http1 {
                    io,
                    inbox,
                    reader: &mut self.response_reader,
                    verbatim,
                }
            }
            UpstreamSide::Http2(upstream) => match &mut upstream.body {
                Some(recv) => BodySource::Http2 {
                    recv,
                    account: upstream.permit.connection().account(),
                },
                // The check above has returned already.
                None => return Poll::Ready(Ok(())),
            },
        };
        let mut sink = match &mut self.downstream {
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
            .response_body
            .poll(cx, &mut source, &mut sink, self.worker.h1_limits())
        {
            Poll::Pending => self
                .response_stall
                .poll(cx, &mut self.response_body, &mut source, &sink)
                .map(|()| Err(ProxyError::TenantBuffers)),
            Poll::Ready(Ok(())) => Poll::Ready(Ok(())),
            Poll::Ready(Err(BodyError::Sink(cause))) => {
                self.abort_upstream(&cause);
                Poll::Ready(Err(ProxyError::ClientGone))
            }
            Poll::Ready(Err(BodyError::Source(cause))) => {
                self.abort_downstream(&cause);
                Poll::Ready(Err(upstream_fault(cause)))
            }
        }
    }

    /// Resets the client's HTTP/2 stream after the response broke off, so that the client does not
    /// mistake it for a complete one. The owner of an HTTP/1.1 connection cuts that connection
    /// itself.
    fn abort_downstream(&mut self, cause: &BodyErrorCause) {
        if let DownstreamSide::Http2(stream) = &mut self.downstream
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
        match self.upstream {
            // A connection on which an upgrade was offered has no close report, so it is not
            // reused.
            UpstreamSide::Http1(upstream)
                if request_done
                    && upstream.keeps_open
                    && self.request.kind != RequestKind::Upgrade =>
            {
                Some(upstream.wire)
            }
            _ => None,
        }
    }

    /// Returns the endpoint's connection after an upgrade.
    pub(crate) fn into_upgraded(self) -> Option<Http1Io> {
        match self.upstream {
            UpstreamSide::Http1(upstream) => Some(upstream.wire),
            UpstreamSide::Http2(_) => None,
        }
    }
}

fn timeout_error(late: TimeoutKind) -> ProxyError {
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
