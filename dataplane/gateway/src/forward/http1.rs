//! A request of an HTTP/1.1 client, from its head to the end of its answer: the phases in order, then what becomes of the connection.

use std::rc::Rc;

use canal_h1::{Asked, RequestHead};

use super::exchange::{Back, Exchange, Front, Outcome, http2_fault};
use super::heads::{self, Additions};
use super::{Attempts, Up, additions, client_cert, own_proto};
use crate::answer::{self, Manner};
use crate::body::Wire;
use crate::client::Client;
use crate::endpoints::Chosen;
use crate::fault::Fault;
use crate::finish::{Record, Texts};
use crate::head::{Ask, Head};
use crate::judge::JudgingError;
use crate::judge::body::{self, Beginning};
use crate::judge::open::Open;
use crate::place::{self, Placed};
use crate::session::Session;
use crate::upstream;
use crate::worker::Worker;

/// What becomes of the connection after a request.
pub(crate) enum Next {
    /// The next request.
    Keep,
    /// Close it in an orderly way.
    Close,
    /// Cut it: the client must not take what it has for the whole.
    Cut,
    /// It is no longer HTTP.
    Relay(Box<Relay>),
}

/// A connection that was upgraded.
pub(crate) struct Relay {
    pub(crate) up: Wire,
    pub(crate) record: Record,
    /// The request that asked for it.
    pub(crate) head: Option<Box<[u8]>>,
    pub(crate) chosen: Chosen,
    /// Of the policies that it was judged by.
    pub(crate) version: u64,
}

/// Judges a request once more while it is open. `kept`: its head, where the client's inbox has it no more.
pub(crate) fn judge_again(worker: &Worker, open: &Open<'_>, ask: &Ask, client: &Client) -> Result<(), JudgingError> {
    let head = match open.kept {
        Some(kept) => kept,
        None if !ask.has_body() => client.wire.inbox.bytes(),
        // Policies came to the tenant while its body is under way: what it asked for is known no more.
        None => return open.judge_unseen(worker),
    };
    let view = client.head.view(head);
    open.judge(worker, (&Head::of(view, own_proto(worker, open.session())), view.authority()))
}

/// The same for a connection that was upgraded.
pub(crate) fn judge_upgraded(
    worker: &Worker,
    session: &Rc<Session>,
    parsed: &RequestHead,
    relay: (Option<&[u8]>, &Chosen),
) -> Result<(), JudgingError> {
    let open = Open::unseen(session, relay.1);
    let Some(head) = relay.0 else { return open.judge_unseen(worker) };
    let view = parsed.view(head);
    open.judge(worker, (&Head::of(view, own_proto(worker, session)), view.authority()))
}

/// Serves the request whose head is the first `len` bytes of the client's inbox.
pub(crate) async fn serve(worker: &Rc<Worker>, session: &Rc<Session>, client: &mut Client, len: usize) -> Next {
    let view = client.head.view(client.wire.inbox.bytes());
    let ask = Ask::of_http1(&view);
    let mut record = Record::begin(worker, session, ask.spoken);
    record.grpc = ask.grpc;
    let proto = own_proto(worker, session);
    let head = Head::of(view, proto);
    if Record::wants_texts(worker) {
        record.texts = Some(Texts::of(worker, session, &head, view.authority()));
    }
    let placed = if view.method() == b"CONNECT" { Err(Fault::Method) } else { place::request(worker, session, &head, &mut record) };
    let placed = match placed {
        Ok(placed) => placed,
        Err(fault) => return refuse(worker, client, &ask, len, &mut record, fault).await,
    };
    let request_id = heads::request_id(worker.random(), worker.random());
    if let Some(texts) = &mut record.texts
        && texts.request_id.is_empty()
    {
        texts.request_id = String::from_utf8_lossy(&request_id).into_owned();
    }
    let hostname = placed.view.set.service.as_ref().map_or("", |names| names.hostname.as_str());
    let beginning = match beginning(worker, session, client, (&placed, &ask), len, &mut record).await {
        Ok(beginning) => beginning,
        Err(fault) => return refuse(worker, client, &ask, len, &mut record, fault).await,
    };
    let mut attempts = Attempts::new(worker, session, &placed, beginning);
    let client_cert = client_cert(worker, session);
    // A body overwrites the head; whoever judges again needs it.
    let own_head: Option<Box<[u8]>> = (ask.has_body() && session.is_policed()).then(|| client.wire.inbox.bytes()[..len].into());
    loop {
        let view = client.head.view(client.wire.inbox.bytes());
        let (chosen, up) = match attempts.next(&ask, &mut record, (&Head::of(view, proto), view.authority())).await {
            Ok(next) => next,
            Err(fault) => return refuse(worker, client, &ask, len, &mut record, fault).await,
        };
        let add = Additions { changes: attempts.changes(), ..additions(worker, session, request_id, hostname, client_cert.as_deref()) };
        let back = match send(client, &ask, up, &add, &mut record) {
            Ok(back) => back,
            Err(fault) if attempts.again(&fault, &ask, &chosen, true) => continue,
            Err(fault) => return refuse(worker, client, &ask, len, &mut record, fault).await,
        };
        if ask.has_body() {
            client.wire.inbox.advance(len);
            // A request whose body is under way is not sent again: nobody is shown its beginning any more.
            attempts.forget_body();
        }
        let sent = matches!(back, Back::Http2(_)) && !ask.has_body();
        let open = Open::new(session, &chosen, placed.version, own_head.as_deref(), None);
        let mut exchange = Exchange::new(worker, &ask, &mut record, Front::Http1(client), back, sent, open);
        let outcome = exchange.run().await;
        let kept = exchange.kept;
        if let Outcome::Failed { fault, answered: false } = &outcome
            && attempts.again(fault, &ask, &chosen, !ask.has_body())
        {
            continue;
        }
        if outcome == Outcome::Upgraded {
            let up = exchange.into_upgraded();
            let head = own_head.or_else(|| take_head(client, &ask, len));
            return up.map_or(Next::Cut, |up| Next::Relay(Box::new(Relay { up, record, head, chosen, version: placed.version })));
        }
        if let Some(wire) = exchange.into_reusable(&outcome) {
            upstream::keep(worker, &chosen, wire);
        }
        return settle(worker, client, &ask, len, &mut record, outcome, kept).await;
    }
}

/// What authorizers may have to be shown of the body, read and within the budget.
async fn beginning(
    worker: &Worker,
    session: &Session,
    client: &mut Client,
    (placed, ask): (&Placed, &Ask),
    len: usize,
    record: &mut Record,
) -> Result<Option<Beginning>, Fault> {
    let wanted = body::wanted(worker, session, placed, ask);
    if wanted == 0 {
        return Ok(None);
    }
    let permit = body::permit(worker, session, ask, wanted)?;
    // Reading the body sends the `100` that the client waits for.
    record.interim.continued = client.head.view(client.wire.inbox.bytes()).expects_continue();
    Box::pin(body::of_http1(worker, client, ask, (len, wanted), permit)).await.map(Some)
}

/// The head of a request without a body, which is where it was until now.
fn take_head(client: &mut Client, ask: &Ask, len: usize) -> Option<Box<[u8]>> {
    if ask.has_body() {
        return None;
    }
    let head = client.wire.inbox.bytes().get(..len).map(Into::into);
    client.wire.inbox.advance(len);
    head
}

/// Writes the request's head for what the endpoint speaks.
fn send(client: &mut Client, ask: &Ask, up: Up, add: &Additions<'_>, record: &mut Record) -> Result<Back, Fault> {
    let buf = client.wire.inbox.bytes();
    let view = client.head.view(buf);
    match up {
        Up::Http1(mut lease) => {
            heads::request_1_to_1(&mut client.out, buf, &view, add, lease.wire.outbox.head()).map_err(Fault::BadRequest)?;
            Ok(Back::http1(lease))
        }
        Up::Http2(place, mut send) => {
            let request = heads::request_1_to_2(&view, add)?;
            if view.expects_continue() && !std::mem::replace(&mut record.interim.continued, true) {
                // HTTP/2 endpoints seldom do; the client would wait for its own timeout.
                client.wire.outbox.push_static(b"HTTP/1.1 100 Continue\r\n\r\n");
            }
            let (response, stream) = send.send_request(request, !ask.has_body()).map_err(|e| http2_fault(&e))?;
            Ok(Back::http2(place, response, stream))
        }
    }
}

/// After an exchange: what becomes of the client's connection. `kept` is what the client was told.
async fn settle(worker: &Worker, client: &mut Client, ask: &Ask, len: usize, record: &mut Record, outcome: Outcome, kept: bool) -> Next {
    match outcome {
        Outcome::Done { request_done } => {
            if !ask.has_body() {
                client.wire.inbox.advance(len);
            }
            if request_done && kept { Next::Keep } else { Next::Close }
        }
        Outcome::Failed { fault, answered } if answered || fault == Fault::ClientGone => {
            record.fault(&fault);
            Next::Cut
        }
        Outcome::Failed { fault, .. } => refuse(worker, client, ask, len, record, fault).await,
        Outcome::Upgraded => Next::Cut,
    }
}

/// The gateway's own answer.
async fn refuse(worker: &Worker, client: &mut Client, ask: &Ask, len: usize, record: &mut Record, fault: Fault) -> Next {
    record.fault(&fault);
    // With a body under way, where the next request begins is known only after reading it all.
    let keep = ask.keep_alive && !ask.has_body() && !worker.keeps_no_client() && !matches!(fault, Fault::BadRequest(_));
    if !ask.has_body() {
        client.wire.inbox.advance(len);
    }
    let manner = Manner { keep, spoken: ask.spoken, head: ask.asked == Asked::Head };
    match answer::http1(worker, client, &fault, manner).await {
        Some(bytes) => {
            record.bytes_out = bytes;
            if keep { Next::Keep } else { Next::Close }
        }
        None => Next::Cut,
    }
}
