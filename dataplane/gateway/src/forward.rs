//! Phase *forward*: sends a request to the chosen endpoint and its answer back, in any pairing of HTTP versions; tries again where that is safe.
//! Start with [`http1`] or [`http2`] (what the client speaks), then [`exchange`] (both directions at once), then [`heads`] (translation).

mod exchange;
mod heads;
pub(crate) mod http1;
pub(crate) mod http2;

pub(crate) use heads::persistence;

use std::rc::Rc;

use bytes::Bytes;
use canal_h1::{Asked, Framing};
use canal_model::program::AppProtocol;
use canal_router::Request;
use h2::client::SendRequest;
use http::HeaderMap;

use crate::fault::{Fault, Retry};
use crate::finish::{Record, Spoken};
use crate::greet::Session;
use crate::permit::{self, Admission};
use crate::pick::{self, Tried};
use crate::place;
use crate::snapshot::TenantTls;
use crate::upstream::{self, Chosen, Introduction, Lease, Place, SetView};
use crate::worker::Worker;

/// Sendings of one request: the first and two more.
const TRIES_MAX: usize = 3;

/// What later phases need of a request's head.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) asked: Asked,
    pub(crate) framing: Framing,
    pub(crate) spoken: Spoken,
    /// The client keeps its connection.
    pub(crate) keep_alive: bool,
    /// RFC 9110 §9.2.2.
    pub(crate) idempotent: bool,
    pub(crate) grpc: bool,
}

impl Ask {
    pub(crate) fn has_body(&self) -> bool {
        !matches!(self.framing, Framing::None | Framing::Length(0))
    }
}

pub(crate) fn is_idempotent(method: &[u8]) -> bool {
    matches!(method, b"GET" | b"HEAD" | b"OPTIONS" | b"TRACE" | b"PUT" | b"DELETE")
}

pub(crate) fn is_grpc(content_type: &[u8]) -> bool {
    content_type.starts_with(b"application/grpc") && matches!(content_type.get(16), None | Some(b'+' | b';' | b' '))
}

/// A request that is placed and permitted.
pub(crate) struct Plan {
    view: Rc<SetView>,
    tls: Option<TenantTls>,
    _admission: Admission,
}

/// *place* and *permit*. Names the service in the record, also for what goes nowhere.
pub(crate) fn plan<R: Request>(worker: &Worker, session: &Session, request: &R, record: &mut Record) -> Result<Plan, Fault> {
    if let Some(fatal) = &worker.shared.config.crash_on_path
        && request.path() == fatal.as_bytes()
    {
        tracing::error!(path = fatal, "a request with the path of --crash-on-path: the process ends");
        std::process::abort();
    }
    let (snapshot, resolved) = session.resolve(worker)?;
    let placed = permit::request(worker, session, &resolved)
        .and_then(|admission| Ok((place::decide(worker, &snapshot, &resolved, request, record.texts.as_mut())?, admission)));
    let tls = || snapshot.tenant(session.account.tenant.as_str()).and_then(|t| t.tls.clone());
    match placed {
        Ok((view, admission)) => {
            record.target = Some((view.clone(), None));
            // Only tunnels need it, and only new ones: cloned lazily would be cheaper still, but the snapshot must not be held.
            let tls =
                if view.set.endpoints.iter().any(|e| e.workload.tunnel == canal_model::program::Tunnel::Hbone) { tls() } else { None };
            Ok(Plan { view, tls, _admission: admission })
        }
        Err(fault) => {
            record.target = resolved.own(worker, &snapshot).map(|view| (view, None));
            Err(fault)
        }
    }
}

/// A way to an endpoint, in the HTTP version that it speaks.
#[expect(
    clippy::large_enum_variant,
    reason = "it lives on the stack for one step of a request; a box would cost an allocation per request"
)]
pub(crate) enum Up {
    Http1(Lease),
    Http2(Place, SendRequest<Bytes>),
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
    plan: &'a Plan,
    tried: Tried,
    sent: usize,
}

impl<'a> Attempts<'a> {
    pub(crate) fn new(worker: &'a Rc<Worker>, plan: &'a Plan) -> Self {
        Self { worker, plan, tried: Tried::new(), sent: 0 }
    }

    /// *pick*, and a connection to what was picked: kept, shared or new.
    pub(crate) async fn next(&mut self, ask: &Ask, record: &mut Record) -> Result<(Chosen, Up), Fault> {
        loop {
            let (worker, view) = (self.worker, &self.plan.view);
            let chosen = pick::endpoint(view, &self.tried, worker.clock.now(), || worker.random())?;
            self.sent += 1;
            record.target = Some((view.clone(), Some(chosen.at)));
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

    async fn connect(&self, chosen: &Chosen, ask: &Ask) -> Result<Up, Fault> {
        let (worker, plan) = (self.worker, self.plan);
        // A pooled connection carries many clients' requests: it speaks for none of them.
        let introduction = || Introduction { tls: plan.tls.as_ref(), headers: HeaderMap::new() };
        if decide_version(plan.view.set.protocol, ask.spoken) == Spoken::Http2 {
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
        if self.sent >= TRIES_MAX || !decide_again(fault.retry(), ask, untouched) {
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

    #[test]
    fn grpc_is_told_by_its_content_type() {
        for (text, want) in
            [("application/grpc", true), ("application/grpc+proto", true), ("application/grpc-web", false), ("text/plain", false)]
        {
            assert_eq!(is_grpc(text.as_bytes()), want, "{text}");
        }
    }
}
