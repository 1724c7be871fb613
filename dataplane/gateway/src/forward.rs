//! Phase *forward*: sends a request to the chosen endpoint and its answer back, in any pairing of HTTP versions; tries again where that is safe.
//! Start with [`http1`] or [`http2`] (what the client speaks), then [`exchange`] (both directions at once), then [`heads`] (translation).

mod exchange;
mod heads;
pub(crate) mod http1;
pub(crate) mod http2;

use std::rc::Rc;

use bytes::Bytes;
use canal_model::authorization::Authorizer;
use canal_model::program::AppProtocol;
use h2::client::SendRequest;
use http::HeaderMap;

use crate::changes::Changes;
use crate::endpoints::{self, Chosen};
use crate::fault::{Fault, Retry};
use crate::finish::Record;
use crate::head::{Ask, Spoken, Whole};
use crate::judge::body::Beginning;
use crate::judge::{self, Consent, Guards, Trial, ask};
use crate::pick::{self, Tried};
use crate::place::Placed;
use crate::session::Session;
use crate::token;
use crate::upstream::{self, Introduction, Lease};
use crate::worker::Worker;

/// Tries of one request, with as many picks: the first and two more.
const TRIES_MAX: usize = 3;

/// A way to an endpoint, in the HTTP version that it speaks.
#[expect(
    clippy::large_enum_variant,
    reason = "it lives on the stack for one step of a request; a box would cost an allocation per request"
)]
pub(crate) enum Up {
    Http1(Lease),
    Http2(endpoints::Place, SendRequest<Bytes>),
}

/// What `x-forwarded-proto` says, whatever the client said; `None`: what the client says counts.
fn own_proto(worker: &Worker, session: &Session) -> Option<&'static str> {
    (!worker.shared.config.forwarded.keeps_proto).then(|| session.scheme())
}

/// The value of `x-forwarded-client-cert`, if applications are told of it and the client proved who it is.
fn client_cert(worker: &Worker, session: &Session) -> Option<String> {
    let is_told = worker.shared.config.forwarded.client_cert && session.who.principal.is_some();
    is_told.then(|| format!("URI={}", session.who.spiffe_id()))
}

/// What the gateway says of a client in each request, whichever endpoint it goes to.
fn additions<'a>(
    worker: &Worker,
    session: &'a Session,
    request_id: [u8; 36],
    hostname: &'a str,
    client_cert: Option<&'a str>,
) -> heads::Additions<'a> {
    heads::Additions {
        client_ip: &session.client_ip,
        request_id,
        hostname,
        scheme: session.scheme(),
        keeps_proto: worker.shared.config.forwarded.keeps_proto,
        client_cert,
        changes: None,
    }
}

/// What the endpoint is spoken to in.
fn decide_version(protocol: AppProtocol, client: Spoken) -> Spoken {
    match (protocol, client) {
        (AppProtocol::Http2 | AppProtocol::Grpc, _) | (AppProtocol::Detect | AppProtocol::Tcp, Spoken::Http2) => Spoken::Http2,
        _ => Spoken::Http11,
    }
}

/// The endpoints tried for one request.
pub(crate) struct Attempts<'a> {
    worker: &'a Rc<Worker>,
    session: &'a Rc<Session>,
    placed: &'a Placed,
    /// Endpoints that a byte of the request never reached.
    tried: Tried,
    tries: usize,
    /// Set where a policy has a say.
    trial: Option<Box<Trial>>,
    /// Read already, for authorizers.
    body: Option<Beginning>,
    work: token::VerificationBudget,
}

impl<'a> Attempts<'a> {
    pub(crate) fn new(worker: &'a Rc<Worker>, session: &'a Rc<Session>, placed: &'a Placed, body: Option<Beginning>) -> Self {
        Self { worker, session, placed, tried: Tried::new(), tries: 0, trial: None, body, work: token::VerificationBudget::default() }
    }

    /// What routing and judging change of the request.
    pub(crate) fn changes(&self) -> Option<&Changes> {
        let judged = self.trial.as_ref().map(|trial| &trial.changes);
        judged.or(self.placed.normal.as_deref()).filter(|changes| !changes.is_empty())
    }

    /// Gives back what was read for authorizers.
    pub(crate) fn forget_body(&mut self) {
        self.body = None;
    }

    /// *pick*, *judge*, and a connection to what was picked: kept, shared or new. `authority` is the request's host with its port.
    pub(crate) async fn next<R: Whole>(&mut self, ask: &Ask, record: &mut Record, request: (&R, &[u8])) -> Result<(Chosen, Up), Fault> {
        loop {
            let (worker, view) = (self.worker, &self.placed.view);
            let chosen = pick::endpoint(view, &self.tried, worker.clock.now(), || worker.random())?;
            self.tries += 1;
            record.target = Some((view.clone(), Some(chosen.at)));
            let guards = Guards::of(&chosen, &self.placed.resolved);
            if !guards.is_empty() || self.session.who.foreign {
                self.judge(&guards, &chosen, record, request).await?;
            } else {
                self.trial = None;
            }
            match self.connect(&chosen, ask).await {
                Ok(up) => return Ok((chosen, up)),
                Err(fault) => {
                    if !self.again(&fault, ask, &chosen, true) {
                        return Err(fault);
                    }
                }
            }
        }
    }

    /// Judges the request at this endpoint. What authorizers agreed to stands while the same policies ask.
    async fn judge<R: Whole>(
        &mut self,
        guards: &Guards<'_>,
        chosen: &Chosen,
        record: &mut Record,
        request: (&R, &[u8]),
    ) -> Result<(), Fault> {
        let (worker, session, to) = (self.worker, self.session, chosen.endpoint().address);
        let before = self.trial.take();
        let mut trial = Box::new(Trial::default());
        if let Some(before) = before.filter(|before| before.consent.is_of(guards)) {
            trial = before;
        } else {
            // As it was routed.
            trial.changes.path = self.placed.normal.as_ref().and_then(|changes| changes.path.clone());
            loop {
                match trial.prepare(worker, &session.account, guards, request.0) {
                    Ok(()) => break,
                    Err(judge::JudgingError::Fault(fault)) => return Err(fault),
                    Err(judge::JudgingError::Verify(todo)) => Box::pin(judge::verify(worker, &session.account, &self.work, todo)).await,
                }
            }
        }
        loop {
            let judged = record.texts.as_mut().map(|texts| &mut texts.judged);
            match trial.decide(worker, session, guards, to, request, judged)? {
                judge::Next::Pass => break,
                judge::Next::Ask(question) => {
                    let spoken = record.spoken_text();
                    let whole = ask::Shown { trial: &trial, protocol: spoken, body: self.body.as_ref() };
                    let shown = |authorizer: &Authorizer| ask::request(session, to, request, &whole, authorizer);
                    let agreed = Box::pin(ask::ask(worker, session, &question, shown)).await?;
                    agreed.apply(request.0, &mut trial.changes);
                    trial.consent = Consent::To(question);
                }
            }
        }
        trial.settle(guards);
        self.trial = Some(trial);
        Ok(())
    }

    async fn connect(&self, chosen: &Chosen, ask: &Ask) -> Result<Up, Fault> {
        let (worker, placed) = (self.worker, self.placed);
        // A pooled connection carries many clients' requests: it speaks for none of them.
        let introduction = || Introduction { tls: placed.tls.as_ref(), headers: HeaderMap::new() };
        if decide_version(placed.view.set.protocol, ask.spoken) == Spoken::Http2 {
            let (place, send) = Box::pin(upstream::place(worker, chosen, introduction())).await?;
            return Ok(Up::Http2(place, send));
        }
        if let Some(lease) = upstream::kept(worker, chosen) {
            return Ok(Up::Http1(lease));
        }
        Box::pin(upstream::fresh(worker, chosen, introduction())).await.map(Up::Http1)
    }

    /// Whether to send the request again after `fault`; remembers and counts it if so. `untouched`: no byte of a body was passed on.
    pub(crate) fn again(&mut self, fault: &Fault, ask: &Ask, chosen: &Chosen, untouched: bool) -> bool {
        if self.tries >= TRIES_MAX || !decide_again(fault.retry(), ask, untouched) {
            return false;
        }
        if fault.retry() == Retry::Unsent {
            self.tried.push(chosen.at);
        }
        self.worker.counts.retried(fault.name());
        true
    }
}

fn decide_again(retry: Retry, ask: &Ask, untouched: bool) -> bool {
    match retry {
        Retry::No => false,
        Retry::Unsent => untouched,
        Retry::Reused => untouched && ask.idempotent && !ask.has_body(),
    }
}

#[cfg(test)]
mod tests {
    use canal_h1::{Asked, Framing};

    use super::*;

    #[test]
    fn only_safe_requests_are_sent_again() {
        let ask = |idempotent, framing| Ask {
            asked: Asked::Ordinary,
            framing,
            spoken: Spoken::Http11,
            keep_alive: true,
            idempotent,
            grpc: false,
        };
        let (get, post, put) = (ask(true, Framing::None), ask(false, Framing::None), ask(true, Framing::Length(5)));
        for (retry, ask, untouched, want) in [
            (Retry::Unsent, &get, true, true),
            (Retry::Unsent, &post, true, true),
            (Retry::Unsent, &put, true, true),
            (Retry::Unsent, &put, false, false),
            (Retry::Reused, &get, true, true),
            (Retry::Reused, &post, true, false),
            (Retry::Reused, &put, true, false),
            (Retry::No, &get, true, false),
        ] {
            assert_eq!(decide_again(retry, ask, untouched), want, "{retry:?} {ask:?} {untouched}");
        }
    }
}
