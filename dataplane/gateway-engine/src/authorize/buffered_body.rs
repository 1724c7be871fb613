//! Buffers the beginning of a request's body before authorization, because an external authorizer
//! wants to see it.
//!
//! The buffered bytes are sent to the authorizer and forwarded unchanged. The client is not
//! authorized yet, so the bytes have a budget and the read has a deadline.
//!
//! Start with [`bytes_to_buffer`].

use canal_gateway_config::{DestinationPolicy, MatchedFilters};
use std::future::poll_fn;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use canal_gateway_http::head::RequestInfo;
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_io::clock::TimeoutKind;
use canal_gateway_limits::body_budget::BodyPermit;
use canal_h1::{BodyPart, BodyReader, Framing};
use tokio::time::Instant;

use crate::downstream_state::{Http1Downstream, Http2Downstream};
use crate::route::RoutedRequest;
use crate::session::ClientSession;
use crate::worker::Worker;

/// Number of copies of each buffered byte: one in the connection's buffer, one for the authorizer.
const COPIES: u64 = 2;
/// Lowest rate at which a client must send, once a third of the timeout has passed. Twice the rate
/// that Apache demands of bodies by default (`RequestReadTimeout`, 500 bytes a second).
const BYTES_PER_SECOND_MIN: u32 = 1 << 10;

/// Beginning of a request's body, counted against the worker's body budget until dropped.
#[derive(Debug)]
pub(crate) struct BufferedBody {
    pub(crate) bytes: Bytes,
    /// True if `bytes` is the entire body.
    pub(crate) is_complete: bool,
    _permit: BodyPermit,
}

/// Deadline for the beginning of a body. A third of the timeout applies until the first byte; the
/// full timeout applies whatever the client sends.
struct Deadline {
    began: Instant,
    timeout: Duration,
}

impl Deadline {
    fn begin(worker: &Worker) -> Self {
        Self {
            began: Instant::now(),
            timeout: worker.shared.config.times.shown_body,
        }
    }

    /// Time left after `bytes` were read. A client that never stops sending can miss the deadline
    /// too.
    fn left(&self, worker: &Worker, bytes: usize) -> Result<Duration, ProxyError> {
        let left = decide_left(self.timeout, self.began.elapsed(), bytes);
        if left.is_zero() {
            worker.counts.late(TimeoutKind::ShownBody);
            return Err(ProxyError::RequestTimeout);
        }
        Ok(left)
    }
}

fn decide_left(timeout: Duration, elapsed: Duration, bytes: usize) -> Duration {
    let earned = Duration::from_secs(1).saturating_mul(u32::try_from(bytes).unwrap_or(u32::MAX))
        / BYTES_PER_SECOND_MIN;
    timeout
        .min((timeout / 3).saturating_add(earned))
        .saturating_sub(elapsed)
}

/// Reserves budget for the bytes that will be read of a body.
pub(crate) fn permit(
    worker: &Worker,
    session: &ClientSession,
    request: &RequestInfo,
    wanted: usize,
) -> Result<BodyPermit, ProxyError> {
    let announced = match request.framing {
        Framing::Length(n) => n.min(wanted as u64),
        _ => wanted as u64,
    };
    worker.bodies.take(
        session.account.number,
        session.account.body_bytes_max(),
        announced * COPIES,
    )
}

/// Number of body bytes that authorizers may need, whichever endpoint is selected.
pub(crate) fn bytes_to_buffer(
    worker: &Worker,
    session: &ClientSession,
    placed: &RoutedRequest,
    request: &RequestInfo,
    of_answer: Option<&DestinationPolicy>,
) -> usize {
    if !request.has_body() {
        return 0;
    }
    let matched = placed.matched.as_deref();
    let of_rule = matched.and_then(MatchedFilters::authorizer);
    let of_rule = of_rule.map_or(0, |(_, authorizer)| authorizer.body_bytes);
    // One byte more tells a body that is too large.
    let of_rule = of_rule + u32::from(of_rule > 0);
    if !session.is_policed() {
        return of_rule as usize;
    }
    let snapshot = worker.snapshot();
    // A tenant that was removed meanwhile has no authorizers.
    let Some(tenant) = snapshot.tenant(session.account.tenant.as_str()) else {
        return of_rule as usize;
    };
    let guards = placed
        .view
        .set
        .endpoints
        .iter()
        .map(|endpoint| endpoint.guard.as_deref());
    // No policy set has the ID 0.
    let (mut last, mut wanted) = (0, of_rule);
    for guard in guards
        .chain([placed.resolved.guard_beside(&placed.view), of_answer])
        .flatten()
    {
        // Endpoints of one set mostly share a policy set; consecutive duplicates are skipped.
        if guard.id != last {
            last = guard.id;
            let authorizers = guard
                .policies
                .authorizers()
                .filter_map(|key| tenant.policies.authorizer(key));
            wanted = authorizers
                .map(|authorizer| authorizer.body_bytes)
                .fold(wanted, u32::max);
        }
    }
    wanted as usize
}

/// Buffers the body of an HTTP/1.1 request. Its head is the first `len` bytes of the inbox; the
/// body stays in the inbox behind it.
pub(crate) async fn of_http1(
    worker: &Worker,
    client: &mut Http1Downstream,
    request: &RequestInfo,
    (len, wanted): (usize, usize),
    mut permit: BodyPermit,
) -> Result<BufferedBody, ProxyError> {
    let Http1Downstream {
        wire, timer, head, ..
    } = client;
    let deadline = Deadline::begin(worker);
    if head.view(wire.inbox.bytes()).expects_continue() {
        // The client waits for `100 Continue` before it sends the body, and the authorizer waits
        // for the body.
        wire.outbox.push_static(b"HTTP/1.1 100 Continue\r\n\r\n");
        timer.arm(TimeoutKind::Client, worker.shared.config.times.client);
        match timer
            .within(poll_fn(|cx| wire.io.poll_flush(cx, &mut wire.outbox)))
            .await
        {
            Ok(Ok(())) => timer.disarm(),
            Ok(Err(_)) => return Err(ProxyError::ClientGone),
            // A client that reads nothing would not read a local reply either.
            Err(late) => {
                worker.counts.late(late);
                return Err(ProxyError::ClientGone);
            }
        }
    }
    let (mut reader, mut at) = (BodyReader::new(request.framing), len);
    let mut shown = BytesMut::new();
    loop {
        let step = reader
            .read(&wire.inbox.bytes()[at..], worker.h1_limits())
            .map_err(ProxyError::BadRequest)?;
        match step.part {
            BodyPart::Data(range) => shown.extend_from_slice(&wire.inbox.bytes()[at..][range]),
            BodyPart::End => {
                timer.disarm();
                return Ok(cut(shown, wanted, true, permit));
            }
            BodyPart::NeedInput => {
                timer.arm(TimeoutKind::ShownBody, deadline.left(worker, shown.len())?);
                match timer
                    .within(poll_fn(|cx| wire.io.poll_fill(cx, &mut wire.inbox)))
                    .await
                {
                    // Chunked framing can make the inbox much larger than the payload, so both
                    // count against the budget.
                    Ok(Ok(1..)) => permit.cover((wire.inbox.len() - len + shown.len()) as u64)?,
                    Ok(_) => return Err(ProxyError::ClientGone),
                    Err(late) => {
                        worker.counts.late(late);
                        return Err(ProxyError::RequestTimeout);
                    }
                }
            }
        }
        at += step.consumed;
        // The authorizers need no more; the rest of the body is forwarded as it comes.
        if shown.len() >= wanted {
            timer.disarm();
            return Ok(cut(shown, wanted, reader.is_done(), permit));
        }
    }
}

/// Buffers the body of an HTTP/2 request. The bytes are stored in `stream.first`, ahead of the rest
/// of the stream's body.
pub(crate) async fn of_http2(
    worker: &Worker,
    stream: &mut Http2Downstream,
    wanted: usize,
    permit: BodyPermit,
) -> Result<BufferedBody, ProxyError> {
    let deadline = Deadline::begin(worker);
    let mut read = BytesMut::new();
    while read.len() < wanted {
        stream
            .timer
            .arm(TimeoutKind::ShownBody, deadline.left(worker, read.len())?);
        match stream.timer.within(stream.body.data()).await {
            Ok(Some(Ok(piece))) => read.extend_from_slice(&piece),
            Ok(None) => break,
            Ok(Some(Err(_))) => return Err(ProxyError::ClientGone),
            Err(late) => {
                worker.counts.late(late);
                return Err(ProxyError::RequestTimeout);
            }
        }
    }
    stream.timer.disarm();
    // More may have been read than authorizers need; all of it is forwarded.
    stream.first = read.freeze();
    let is_complete = stream.body.is_end_stream();
    Ok(cut(
        BytesMut::from(&stream.first[..]),
        wanted,
        is_complete,
        permit,
    ))
}

fn cut(mut shown: BytesMut, wanted: usize, done: bool, permit: BodyPermit) -> BufferedBody {
    let is_complete = done && shown.len() <= wanted;
    shown.truncate(wanted);
    BufferedBody {
        bytes: shown.freeze(),
        is_complete,
        _permit: permit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trickling_client_has_a_third_of_the_time_and_no_client_has_more_than_all() {
        let seconds = Duration::from_secs;
        for (elapsed, bytes, left) in [
            (0, 0, 5),
            (3, 0, 2),
            (5, 0, 0),
            (5, 2 << 10, 2),
            (8, 2 << 10, 0),
            (5, 64 << 10, 10),
            (15, usize::MAX, 0),
        ] {
            assert_eq!(
                decide_left(seconds(15), seconds(elapsed), bytes),
                seconds(left),
                "{elapsed} s, {bytes} bytes"
            );
        }
    }
}
