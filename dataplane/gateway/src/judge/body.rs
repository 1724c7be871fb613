//! The beginning of a request's body, read before the request is judged because an external authorizer wants to see it. It is shown and
//! forwarded; nothing is taken away.

use std::future::poll_fn;

use bytes::{Bytes, BytesMut};
use canal_h1::{BodyPart, BodyReader};

use crate::client::{Client, Stream};
use crate::clock::Late;
use crate::fault::Fault;
use crate::head::Ask;
use crate::place::Placed;
use crate::session::Session;
use crate::worker::Worker;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Beginning {
    pub(crate) bytes: Bytes,
    /// There is nothing more.
    pub(crate) whole: bool,
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
pub(crate) async fn of_http1(worker: &Worker, client: &mut Client, ask: &Ask, len: usize, wanted: usize) -> Result<Beginning, Fault> {
    let Client { wire, timer, head, .. } = client;
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
            BodyPart::End => return Ok(cut(shown, wanted, true)),
            BodyPart::NeedInput => {
                timer.arm(Late::Client, worker.shared.config.times.client);
                match timer.within(poll_fn(|cx| wire.io.poll_fill(cx, &mut wire.inbox))).await {
                    Ok(Ok(1..)) => timer.disarm(),
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
            return Ok(cut(shown, wanted, reader.is_done()));
        }
    }
}

/// Of an HTTP/2 request: what was read is kept in front of the stream's body.
pub(crate) async fn of_http2(worker: &Worker, stream: &mut Stream, wanted: usize) -> Result<Beginning, Fault> {
    let mut read = BytesMut::new();
    while read.len() < wanted {
        stream.timer.arm(Late::Client, worker.shared.config.times.client);
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
    Ok(cut(BytesMut::from(&stream.first[..]), wanted, whole))
}

fn cut(mut shown: BytesMut, wanted: usize, done: bool) -> Beginning {
    let whole = done && shown.len() <= wanted;
    shown.truncate(wanted);
    Beginning { bytes: shown.freeze(), whole }
}
