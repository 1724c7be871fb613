//! The beginning of a request's body, read before the request is judged because an external authorizer wants to see it. It is shown and
//! forwarded; nothing is taken away. Whoever sends it is not authorized yet: its bytes have a budget, and its time has an end.

use std::future::poll_fn;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use canal_h1::{BodyPart, BodyReader, Framing};
use tokio::time::Instant;

use crate::body_budget::BodyPermit;
use crate::client::{Client, Stream};
use crate::clock::Late;
use crate::fault::Fault;
use crate::head::Ask;
use crate::place::Placed;
use crate::session::Session;
use crate::worker::Worker;

/// What is read lies in the connection's buffer and in what the authorizer is shown.
const COPIES: u64 = 2;
/// The rate at which a client has to send at least, once a third of the time is over.
const BYTES_PER_SECOND_MIN: u32 = 1 << 10;

/// See the module.
#[derive(Debug)]
pub(crate) struct Beginning {
    pub(crate) bytes: Bytes,
    /// There is nothing more.
    pub(crate) whole: bool,
    _permit: BodyPermit,
}

/// The time that a client has for the beginning of its body: a third of it before the first byte, all of it whatever it sends.
struct Deadline {
    began: Instant,
    whole: Duration,
}

impl Deadline {
    fn begin(worker: &Worker) -> Self {
        Self { began: Instant::now(), whole: worker.shared.config.times.shown_body }
    }

    /// What is left after so many bytes. A client whose bytes are always there is late too.
    fn left(&self, worker: &Worker, bytes: usize) -> Result<Duration, Fault> {
        let left = decide_left(self.whole, self.began.elapsed(), bytes);
        if left.is_zero() {
            worker.counts.late(Late::ShownBody);
            return Err(Fault::RequestTimeout);
        }
        Ok(left)
    }
}

fn decide_left(whole: Duration, elapsed: Duration, bytes: usize) -> Duration {
    let earned = Duration::from_secs(1).saturating_mul(u32::try_from(bytes).unwrap_or(u32::MAX)) / BYTES_PER_SECOND_MIN;
    whole.min((whole / 3).saturating_add(earned)).saturating_sub(elapsed)
}

/// Room for what will be read of a body.
pub(crate) fn permit(worker: &Worker, session: &Session, ask: &Ask, wanted: usize) -> Result<BodyPermit, Fault> {
    let announced = match ask.framing {
        Framing::Length(n) => n.min(wanted as u64),
        _ => wanted as u64,
    };
    worker.bodies.take(session.account.number, session.account.body_bytes_max(), announced * COPIES)
}

/// Bytes of the body that authorizers may have to be shown, whichever endpoint is picked.
pub(crate) fn wanted(worker: &Worker, session: &Session, placed: &Placed, ask: &Ask) -> usize {
    if !ask.has_body() || !session.is_policed() {
        return 0;
    }
    let snapshot = worker.snapshot();
    let Some(tenant) = snapshot.tenant(session.account.tenant.as_str()) else { return 0 };
    let guards = placed.view.set.endpoints.iter().map(|endpoint| endpoint.guard.as_deref());
    let (mut last, mut wanted) = (0, 0);
    for guard in guards.chain([placed.resolved.guard_beside(&placed.view)]).flatten() {
        if guard.id != last {
            last = guard.id;
            let asked = guard.policies.authorizers().filter_map(|key| tenant.policies.authorizer(key));
            wanted = asked.map(|authorizer| authorizer.body_bytes).fold(wanted, u32::max);
        }
    }
    wanted as usize
}

/// Of an HTTP/1.1 request whose head is the first `len` bytes of the inbox, where the body stays.
pub(crate) async fn of_http1(
    worker: &Worker,
    client: &mut Client,
    ask: &Ask,
    (len, wanted): (usize, usize),
    mut permit: BodyPermit,
) -> Result<Beginning, Fault> {
    let Client { wire, timer, head, .. } = client;
    let deadline = Deadline::begin(worker);
    if head.view(wire.inbox.bytes()).expects_continue() {
        // The client waits for it; the authorizer's answer waits for the client.
        wire.outbox.push_static(b"HTTP/1.1 100 Continue\r\n\r\n");
        timer.arm(Late::Client, worker.shared.config.times.client);
        match timer.within(poll_fn(|cx| wire.io.poll_flush(cx, &mut wire.outbox))).await {
            Ok(Ok(())) => timer.disarm(),
            Ok(Err(_)) => return Err(Fault::ClientGone),
            Err(late) => {
                worker.counts.late(late);
                return Err(Fault::ClientGone);
            }
        }
    }
    let (mut reader, mut at) = (BodyReader::new(ask.framing), len);
    let mut shown = BytesMut::new();
    loop {
        let step = reader.read(&wire.inbox.bytes()[at..], worker.h1_limits()).map_err(Fault::BadRequest)?;
        match step.part {
            BodyPart::Data(range) => shown.extend_from_slice(&wire.inbox.bytes()[at..][range]),
            BodyPart::End => {
                timer.disarm();
                return Ok(cut(shown, wanted, true, permit));
            }
            BodyPart::NeedInput => {
                timer.arm(Late::ShownBody, deadline.left(worker, shown.len())?);
                match timer.within(poll_fn(|cx| wire.io.poll_fill(cx, &mut wire.inbox))).await {
                    // Chunks of one byte fill more than they say.
                    Ok(Ok(1..)) => permit.cover((wire.inbox.len() - len + shown.len()) as u64)?,
                    Ok(_) => return Err(Fault::ClientGone),
                    Err(late) => {
                        worker.counts.late(late);
                        return Err(Fault::RequestTimeout);
                    }
                }
            }
        }
        at += step.consumed;
        if shown.len() >= wanted {
            timer.disarm();
            return Ok(cut(shown, wanted, reader.is_done(), permit));
        }
    }
}

/// Of an HTTP/2 request: what was read is kept in front of the stream's body.
pub(crate) async fn of_http2(worker: &Worker, stream: &mut Stream, wanted: usize, permit: BodyPermit) -> Result<Beginning, Fault> {
    let deadline = Deadline::begin(worker);
    let mut read = BytesMut::new();
    while read.len() < wanted {
        stream.timer.arm(Late::ShownBody, deadline.left(worker, read.len())?);
        match stream.timer.within(stream.body.data()).await {
            Ok(Some(Ok(piece))) => read.extend_from_slice(&piece),
            Ok(None) => break,
            Ok(Some(Err(_))) => return Err(Fault::ClientGone),
            Err(late) => {
                worker.counts.late(late);
                return Err(Fault::RequestTimeout);
            }
        }
    }
    stream.timer.disarm();
    stream.first = read.freeze();
    let whole = stream.body.is_end_stream();
    Ok(cut(BytesMut::from(&stream.first[..]), wanted, whole, permit))
}

fn cut(mut shown: BytesMut, wanted: usize, done: bool, permit: BodyPermit) -> Beginning {
    let whole = done && shown.len() <= wanted;
    shown.truncate(wanted);
    Beginning { bytes: shown.freeze(), whole, _permit: permit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trickling_client_has_a_third_of_the_time_and_no_client_has_more_than_all() {
        let seconds = Duration::from_secs;
        for (elapsed, bytes, left) in
            [(0, 0, 5), (3, 0, 2), (5, 0, 0), (5, 2 << 10, 2), (8, 2 << 10, 0), (5, 64 << 10, 10), (15, usize::MAX, 0)]
        {
            assert_eq!(decide_left(seconds(15), seconds(elapsed), bytes), seconds(left), "{elapsed} s, {bytes} bytes");
        }
    }
}
