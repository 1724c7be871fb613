//! A request of an HTTP/2 client, from its head to the end of its answer: the phases in order.

use std::rc::Rc;

use bytes::Bytes;
use canal_h1::Asked;
use h2::RecvStream;
use h2::server::SendResponse;
use http::Request;
use http::header::CONTENT_TYPE;

use super::exchange::{Back, Exchange, Front, Outcome, http2_fault};
use super::heads;
use super::{Attempts, Up, additions, client_cert};
use crate::answer;
use crate::client::Stream;
use crate::fault::Fault;
use crate::finish::{Record, Texts};
use crate::head::{Ask, Checked, Spoken, is_grpc};
use crate::judge::body::{self, Beginning};
use crate::judge::open::Open;
use crate::place::{self, Placed};
use crate::session::Session;
use crate::upstream;
use crate::worker::Worker;

/// Checks a stream's head; gives what serves it, unless it was refused. The head is checked before there is a task, so that what the task
/// has to hold is small.
pub(crate) fn serve(
    worker: &Rc<Worker>,
    session: &Rc<Session>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) -> Option<impl Future<Output = ()> + use<>> {
    let mut record = Record::begin(worker, session, Spoken::Http2);
    let (parts, body) = request.into_parts();
    let grpc = parts.headers.get(CONTENT_TYPE).is_some_and(|v| is_grpc(v.as_bytes()));
    record.grpc = grpc;
    match heads::check_2(parts) {
        Ok(checked) => {
            let stream = Stream { body, respond, answer: None, timer: worker.clock.timer(), first: Bytes::new() };
            Some(serve_checked(worker.clone(), session.clone(), checked, stream, record))
        }
        Err(fault) => {
            refuse(&mut respond, &mut record, &fault, grpc, false);
            None
        }
    }
}

async fn serve_checked(worker: Rc<Worker>, session: Rc<Session>, mut checked: Checked, mut stream: Stream, mut record: Record) {
    let (worker, session, ended) = (&worker, &session, stream.body.is_end_stream());
    let ask = Ask::of_http2(&checked, ended);
    if Record::wants_texts(worker) {
        record.texts = Some(Texts::of(worker, session, &checked, checked.authority.as_bytes()));
    }
    let head = ask.asked == Asked::Head;
    let placed = match place::request(worker, session, &checked, &mut record) {
        Ok(placed) => placed,
        Err(fault) => return refuse(&mut stream.respond, &mut record, &fault, ask.grpc, head),
    };
    let request_id = heads::request_id(worker.random(), worker.random());
    let client_cert = client_cert(worker, session);
    heads::additions(&mut checked.headers, &additions(worker, session, request_id, "", client_cert.as_deref()));
    if let (Some(texts), Some(id)) = (&mut record.texts, checked.headers.get(heads::X_REQUEST_ID)) {
        texts.request_id = String::from_utf8_lossy(id.as_bytes()).into_owned();
    }
    let beginning = match beginning(worker, session, &mut stream, &placed, &ask).await {
        Ok(beginning) => beginning,
        Err(fault) => return refuse(&mut stream.respond, &mut record, &fault, ask.grpc, head),
    };
    let mut attempts = Attempts::new(worker, session, &placed, beginning);
    loop {
        let sent = attempts.next(&ask, &mut record, (&checked, checked.authority.as_bytes())).await.and_then(|(chosen, up)| {
            let back = match attempts.changes() {
                None => send(worker, &checked, &ask, ended, up),
                Some(changes) => send(worker, &checked.changed(changes)?, &ask, ended, up),
            };
            Ok((chosen, back?))
        });
        let (chosen, back) = match sent {
            Ok(sent) => sent,
            Err(fault) => return refuse(&mut stream.respond, &mut record, &fault, ask.grpc, head),
        };
        if !ended {
            // A request whose body is under way is not sent again: nobody is shown its beginning any more.
            attempts.forget_body();
        }
        let done = matches!(back, Back::Http2(_)) && ended;
        let open = Open::new(session, &chosen, placed.version, None, Some(&checked));
        let mut exchange = Exchange::new(worker, &ask, &mut record, Front::Http2(&mut stream), back, done, open);
        let outcome = exchange.run().await;
        if let Outcome::Failed { fault, answered: false } = &outcome
            && attempts.again(fault, &ask, &chosen, ended)
        {
            continue;
        }
        if let Some(wire) = exchange.into_reusable(&outcome) {
            upstream::keep(worker, &chosen, wire);
        }
        if let Outcome::Failed { fault, answered } = outcome {
            if answered {
                // What is dropped before its end is reset.
                record.fault(&fault);
            } else {
                refuse(&mut stream.respond, &mut record, &fault, ask.grpc, head);
            }
        }
        return;
    }
}

/// What authorizers may have to be shown of the body, read and within the budget.
async fn beginning(
    worker: &Worker,
    session: &Session,
    stream: &mut Stream,
    placed: &Placed,
    ask: &Ask,
) -> Result<Option<Beginning>, Fault> {
    let wanted = body::wanted(worker, session, placed, ask);
    if wanted == 0 {
        return Ok(None);
    }
    let permit = body::permit(worker, session, ask, wanted)?;
    Box::pin(body::of_http2(worker, stream, wanted, permit)).await.map(Some)
}

/// Writes the request's head for what the endpoint speaks.
fn send(worker: &Worker, checked: &Checked, ask: &Ask, ended: bool, up: Up) -> Result<Back, Fault> {
    match up {
        Up::Http1(mut lease) => {
            let mut out = worker.scratch.borrow_mut();
            heads::request_2_to_1(&mut out, checked, ask.framing, lease.wire.outbox.head()).map_err(Fault::BadRequest)?;
            Ok(Back::http1(lease))
        }
        Up::Http2(place, mut send) => {
            let request = heads::request_2_to_2(checked)?;
            let (response, stream) = send.send_request(request, ended).map_err(|e| http2_fault(&e))?;
            Ok(Back::http2(place, response, stream))
        }
    }
}

/// The gateway's own answer.
fn refuse(respond: &mut SendResponse<Bytes>, record: &mut Record, fault: &Fault, grpc: bool, head: bool) {
    record.fault(fault);
    if *fault == Fault::ClientGone {
        return;
    }
    if grpc {
        record.grpc_status = Some(fault.grpc_status());
    }
    record.bytes_out = answer::http2(respond, fault, grpc, head);
}
