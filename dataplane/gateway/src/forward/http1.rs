//! A request of an HTTP/1.1 client, from its head to the end of its answer: the phases in order, then what becomes of the connection.

use std::rc::Rc;

use canal_h1::{Asked, Name, RequestView, Version};
use canal_router::Request;

use super::exchange::{Back, Exchange, Front, Outcome, http2_fault};
use super::heads::{self, Additions};
use super::{Ask, Attempts, Up, is_grpc, is_idempotent, plan};
use crate::answer::{self, Manner};
use crate::fault::Fault;
use crate::finish::{Record, Spoken, Texts};
use crate::greet::Session;
use crate::place::host_of;
use crate::read::http1::{Client, Next};
use crate::upstream;
use crate::worker::Worker;

/// The view as the router asks it.
struct Head<'a> {
    view: RequestView<'a>,
    host: &'a [u8],
}

impl Request for Head<'_> {
    fn host(&self) -> &[u8] {
        self.host
    }
    fn method(&self) -> &[u8] {
        self.view.method()
    }
    fn path(&self) -> &[u8] {
        self.view.path()
    }
    fn query(&self) -> Option<&[u8]> {
        self.view.query()
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        self.view.fields().named(name.as_bytes()).for_each(visit);
    }
}

fn ask_of(view: &RequestView<'_>) -> Ask {
    let asked = match view.method() {
        b"HEAD" => Asked::Head,
        _ if view.upgrade().is_some() => Asked::Upgrade,
        _ => Asked::Ordinary,
    };
    Ask {
        asked,
        framing: view.framing(),
        spoken: if view.version() == Version::Http10 { Spoken::Http10 } else { Spoken::Http11 },
        keep_alive: view.keep_alive(),
        idempotent: is_idempotent(view.method()),
        grpc: view.get(Name::ContentType).is_some_and(is_grpc),
    }
}

/// Serves the request whose head is the first `len` bytes of the client's inbox.
pub(crate) async fn serve(worker: &Rc<Worker>, session: &Rc<Session>, client: &mut Client, len: usize) -> Next {
    let view = client.head.view(client.wire.inbox.bytes());
    let ask = ask_of(&view);
    let mut record = Record::begin(worker, session, ask.spoken);
    record.grpc = ask.grpc;
    let head = Head { view, host: host_of(view.authority()) };
    if Record::wants_texts(worker) {
        record.texts = Some(Texts::of(&head, view.authority()));
    }
    let planned = if view.method() == b"CONNECT" { Err(Fault::Method) } else { plan(worker, session, &head, &mut record) };
    let plan = match planned {
        Ok(plan) => plan,
        Err(fault) => return refuse(worker, client, &ask, len, &mut record, fault).await,
    };
    let request_id = heads::request_id(worker.random(), worker.random());
    if let Some(texts) = &mut record.texts
        && texts.request_id.is_empty()
    {
        texts.request_id = String::from_utf8_lossy(&request_id).into_owned();
    }
    let hostname = plan.view.set.service.as_ref().map_or("", |names| names.hostname.as_str());
    let add = Additions { client_ip: &session.client_ip, request_id, hostname };
    let mut attempts = Attempts::new(worker, &plan);
    loop {
        let (chosen, up) = match attempts.next(&ask, &mut record).await {
            Ok(next) => next,
            Err(fault) => return refuse(worker, client, &ask, len, &mut record, fault).await,
        };
        let back = match send(client, &ask, up, &add) {
            Ok(back) => back,
            Err(fault) if attempts.again(&fault, &ask, &chosen, true) => continue,
            Err(fault) => return refuse(worker, client, &ask, len, &mut record, fault).await,
        };
        if ask.has_body() {
            client.wire.inbox.advance(len);
        }
        let sent = matches!(back, Back::Http2(_)) && !ask.has_body();
        let mut exchange = Exchange::new(worker, &ask, &mut record, Front::Http1(client), back, sent);
        let outcome = exchange.run().await;
        let kept = exchange.kept;
        if let Outcome::Failed { fault, answered: false } = &outcome
            && attempts.again(fault, &ask, &chosen, !ask.has_body())
        {
            continue;
        }
        if outcome == Outcome::Upgraded {
            let up = exchange.into_upgraded();
            client.wire.inbox.advance(len);
            return up.map_or(Next::Cut, |up| Next::Relay { up, record: Box::new(record) });
        }
        if let Some(wire) = exchange.into_reusable(&outcome) {
            upstream::keep(worker, &chosen, wire);
        }
        return settle(worker, client, &ask, len, &mut record, outcome, kept).await;
    }
}

/// Writes the request's head for what the endpoint speaks.
fn send(client: &mut Client, ask: &Ask, up: Up, add: &Additions<'_>) -> Result<Back, Fault> {
    let buf = client.wire.inbox.bytes();
    let view = client.head.view(buf);
    match up {
        Up::Http1(mut lease) => {
            heads::request_1_to_1(&mut client.out, buf, &view, add, lease.wire.outbox.head()).map_err(Fault::BadRequest)?;
            Ok(Back::http1(lease))
        }
        Up::Http2(place, mut send) => {
            let request = heads::request_1_to_2(&view, add)?;
            if view.expects_continue() {
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
