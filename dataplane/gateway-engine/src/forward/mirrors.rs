//! Copies of requests that a rule sends to other services. The request itself never waits for its
//! copy: the copy's connection, its response and its failures belong to a task of its own.
//!
//! A copy is authorized like the request, at its own endpoint. A policy that needs an external
//! authorizer or the verification of a token would let the request wait, so such a copy is not
//! sent. Start with [`HttpRequest::begin_copies`].

use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use canal_gateway_config::{SelectedMirror, TenantTls};
use canal_gateway_io::body::{BodyCopyError, BodyCopySender, Http1Io};
use canal_gateway_io::buffer::{Inbox, Outbox};
use canal_gateway_io::scheduler::Scheduler;
use canal_gateway_limits::body_budget::BodyPermit;
use canal_gateway_limits::tenant_usage::{RequestPermit, TenantUsage};
use canal_h1::{
    BodyReader, CHUNK_END, ChunkStart, Framing, LAST_CHUNK, MessageLimits, RequestKind,
    ResponseHead,
};
use http::{HeaderMap, Request};
use tokio::sync::oneshot;

use super::attempt_limits::{COPIES, RETRY_BODY_BYTES_MAX};
use super::{HttpDownstream, HttpRequest, decide_mutations, decide_version, is_single};
use crate::authorize::{
    AuthorizationInterrupt, AuthorizationState, AuthorizationStep, DestinationPolicies,
};
use crate::balance::{self, TriedEndpoints};
use crate::endpoints::{EndpointSetState, SelectedEndpoint};
use crate::route::RoutedRequest;
use crate::upstream::{self, TunnelMetadata};
use crate::worker::Worker;

/// Longest time of a copy, once its body is complete (Envoy's default of a route).
const MIRROR_TIMEOUT: Duration = Duration::from_secs(15);

/// The head of a copy, in the HTTP version of its endpoint.
pub(crate) enum CopiedHead {
    Http1(Vec<u8>),
    Http2(Request<()>),
}

/// A copy of a request on its way to an endpoint.
struct RequestCopy {
    worker: Rc<Worker>,
    selected: SelectedEndpoint,
    tls: Option<TenantTls>,
    tunnel_headers: HeaderMap,
    head: CopiedHead,
    framing: Framing,
    kind: RequestKind,
    _permit: RequestPermit,
    _body_permit: Option<BodyPermit>,
}

/// The body of a copy, once the request's has arrived.
type CopiedBody = oneshot::Receiver<Result<Bytes, BodyCopyError>>;

impl<D: HttpDownstream> HttpRequest<D> {
    /// Begins the copies that were drawn for the request, in its first attempt. Returns where the
    /// body's copies go.
    #[inline]
    pub(super) fn begin_copies(
        &mut self,
        routed: &RoutedRequest,
        has_begun: bool,
    ) -> Vec<BodyCopySender> {
        if routed.filters.copies_requests() && !has_begun {
            self.begin_mirrors(routed)
        } else {
            Vec::new()
        }
    }

    fn begin_mirrors(&mut self, routed: &RoutedRequest) -> Vec<BodyCopySender> {
        let Some(matched) = routed.matched.as_deref() else {
            return Vec::new();
        };
        let mut senders = Vec::new();
        for mirror in matched.take_mirrors() {
            match self.begin_mirror(routed, mirror) {
                Ok(sender) => senders.extend(sender),
                Err(reason) => self.state.worker.counts.mirrored(reason),
            }
        }
        senders
    }

    /// Begins one copy.
    ///
    /// # Errors
    /// The reason for which the request is not copied.
    fn begin_mirror(
        &mut self,
        routed: &RoutedRequest,
        mirror: SelectedMirror,
    ) -> Result<Option<BodyCopySender>, &'static str> {
        let (worker, session) = (self.state.worker.clone(), self.state.session.clone());
        let (framing, protocol) = (self.state.info.framing, self.state.info.client_protocol);
        let kind = self.state.info.kind;
        if kind == RequestKind::Upgrade {
            return Err("upgrade");
        }
        let account = &session.account;
        let permit = worker.limits.mirror(account)?;
        let snapshot = worker.snapshot();
        let view = worker.upstreams.view(&snapshot, mirror.target);
        // Routes were resolved inside the tenant. The check is repeated here, as for requests.
        let view = view.filter(|view| is_of_tenant(view, account));
        let view = view.ok_or("no_service")?;
        let tenant = snapshot.tenant(session.account.tenant.as_str());
        let tls = tenant.and_then(|tenant| tenant.tls.clone());
        let (client, now) = (session.client.ip(), worker.clock.now());
        let random = || worker.random();
        let selected = balance::endpoint(&view, &TriedEndpoints::new(), Some(client), now, random);
        let mut selected = selected.map_err(|error| error.name())?;
        let is_own = is_single(view.set.pool, &self.state.info);
        selected.client = is_own.then(|| session.pool_client());
        let tunnel_headers = if is_own {
            session.introduction(routed.resolved.hostname())
        } else {
            HeaderMap::new()
        };
        let authorization = self.authorize_copy(routed, &selected)?;
        let changes = decide_mutations(Some(&authorization), routed, || self.client.head().0);
        let mut changes = changes
            .map_err(|_| "unsafe_path")?
            .map_or_else(Default::default, |changes| changes.into_owned());
        let shadow = match changes.host.as_deref() {
            Some(rewritten) => mirror.host(rewritten),
            None => mirror.host(&String::from_utf8_lossy(self.client.head().1)),
        };
        changes.host = shadow.or(changes.host);
        let version = decide_version(view.set.protocol, protocol);
        let head = self
            .client
            .copy_head(&self.state, routed, version, &changes)
            .map_err(|_| "untranslatable_head")?;
        let (sender, body, body_permit) = if self.client.is_complete(&self.state.info) {
            (None, None, None)
        } else {
            let bytes = match framing {
                Framing::Length(bytes) => bytes,
                _ => RETRY_BODY_BYTES_MAX as u64,
            };
            if bytes > RETRY_BODY_BYTES_MAX as u64 {
                return Err("mirrored_body_bytes");
            }
            let tenant_max = account.body_bytes_max();
            let permit = worker
                .bodies
                .take(account.number, tenant_max, bytes * COPIES);
            let permit = permit.map_err(|error| error.name())?;
            let (sender, body) = oneshot::channel();
            (Some(sender), Some(body), Some(permit))
        };
        let copy = RequestCopy {
            worker: worker.clone(),
            selected,
            tls,
            tunnel_headers,
            head,
            framing,
            kind,
            _permit: permit,
            _body_permit: body_permit,
        };
        // The tenant pays for the copy with its share of the worker's turns.
        let queue = Some(account.queue.clone());
        tokio::task::spawn_local(Box::pin(async move {
            Scheduler::run_for(queue, pin!(copy.send(body))).await;
        }));
        Ok(sender)
    }

    /// Authorizes a copy at its endpoint, by what is known at once.
    fn authorize_copy(
        &self,
        routed: &RoutedRequest,
        selected: &SelectedEndpoint,
    ) -> Result<AuthorizationState, &'static str> {
        let (worker, session) = (&self.state.worker, &self.state.session);
        let mut state = AuthorizationState::default();
        let policies = DestinationPolicies::of(selected, &routed.resolved);
        if policies.is_empty() && !session.principal.foreign {
            return Ok(state);
        }
        let (head, authority) = self.client.head();
        let paths = selected.view.set.policy_paths;
        state
            .prepare(worker, &session.account, (&policies, paths), &head)
            .map_err(|interrupt| match interrupt {
                AuthorizationInterrupt::Fault(_) => "denied",
                AuthorizationInterrupt::Verify(_) => "unverified_token",
            })?;
        let to = Some(selected.address);
        match state.decide(worker, session, &policies, to, (&head, authority), None) {
            Ok(AuthorizationStep::Pass) => Ok(state),
            Ok(AuthorizationStep::CallAuthorizer(_)) => Err("authorizer"),
            Err(_) => Err("denied"),
        }
    }
}

impl RequestCopy {
    /// Sends the copy once its body is complete, counts the result, and discards the response.
    async fn send(self, body: Option<CopiedBody>) {
        let worker = self.worker.clone();
        let body = match body {
            None => Ok(Bytes::new()),
            Some(body) => match body.await {
                Ok(Ok(body)) => Ok(body),
                Ok(Err(BodyCopyError::TooLong)) => Err("mirrored_body_bytes"),
                // The request ended before its body did.
                _ => Err("incomplete"),
            },
        };
        let body = match body {
            Ok(body) => body,
            Err(reason) => return worker.counts.mirrored(reason),
        };
        let mut is_answered = false;
        let exchange = self.exchange(body, &mut is_answered);
        let ended = tokio::time::timeout(MIRROR_TIMEOUT, exchange).await;
        // What follows the beginning of the response changes nothing.
        if !is_answered {
            let reason = match ended {
                Ok(Ok(())) => "no_response",
                Ok(Err(reason)) => reason,
                Err(_) => "timeout",
            };
            worker.counts.mirrored(reason);
        }
    }

    async fn exchange(self, body: Bytes, is_answered: &mut bool) -> Result<(), &'static str> {
        let metadata = TunnelMetadata {
            tls: self.tls.as_ref(),
            headers: self.tunnel_headers,
        };
        let (worker, selected) = (&self.worker, &self.selected);
        match self.head {
            CopiedHead::Http1(head) => {
                let io = upstream::connect(worker, selected, metadata).await;
                let io = io.map_err(|_| "connect_failed")?;
                let mut wire = Http1Io::new(io, Inbox::new(&worker.blocks));
                write_http1(&mut wire.outbox, head, self.framing, body);
                let flushed = poll_fn(|cx| wire.io.poll_flush(cx, &mut wire.outbox)).await;
                flushed.map_err(|_| "failed")?;
                let reader = begin_response(&mut wire, self.kind).await?;
                *is_answered = true;
                worker.counts.mirrored("sent");
                discard_body(&mut wire, reader).await
            }
            CopiedHead::Http2(request) => {
                let stream = upstream::acquire_stream(worker, selected, metadata).await;
                let (_permit, mut send) = stream.map_err(|_| "connect_failed")?;
                let (response, mut stream) = send
                    .send_request(request, body.is_empty())
                    .map_err(|_| "failed")?;
                let mut rest = body;
                while !rest.is_empty() {
                    stream.reserve_capacity(rest.len());
                    let capacity = poll_fn(|cx| stream.poll_capacity(cx)).await;
                    let capacity = capacity.and_then(Result::ok).ok_or("failed")?;
                    let piece = rest.split_to(capacity.min(rest.len()));
                    let is_last = rest.is_empty();
                    stream.send_data(piece, is_last).map_err(|_| "failed")?;
                }
                let mut body = response.await.map_err(|_| "failed")?.into_body();
                *is_answered = true;
                worker.counts.mirrored("sent");
                while let Some(Ok(data)) = body.data().await {
                    // An error means that the stream has ended.
                    let _ = body.flow_control().release_capacity(data.len());
                }
                Ok(())
            }
        }
    }
}

fn write_http1(out: &mut Outbox, head: Vec<u8>, framing: Framing, body: Bytes) {
    out.head().extend_from_slice(&with_close(head));
    if framing != Framing::Chunked {
        out.push(body);
        return;
    }
    if let Some(start) = ChunkStart::new(body.len()) {
        out.head().extend_from_slice(start.as_bytes());
        out.push(body);
        out.push_static(CHUNK_END);
    }
    out.push_static(LAST_CHUNK);
}

/// Reads the head of the response, and returns the reader of its body.
async fn begin_response(wire: &mut Http1Io, kind: RequestKind) -> Result<BodyReader, &'static str> {
    let mut head = ResponseHead::new();
    loop {
        let bytes = wire.inbox.bytes();
        let parsed = head.parse(bytes, &MessageLimits::DEFAULT, kind);
        if let Some(length) = parsed.map_err(|_| "bad_response")? {
            let view = head.view(bytes);
            let reader = (!view.is_interim()).then(|| BodyReader::new(view.framing()));
            wire.inbox.advance(length);
            if let Some(reader) = reader {
                return Ok(reader);
            }
        } else if fill(wire).await? == 0 {
            return Err("no_response");
        }
    }
}

/// Reads the body of a response to its end. The connection is closed then: it is not known whether
/// the endpoint sends more, which would be read as the response to another request.
async fn discard_body(wire: &mut Http1Io, mut reader: BodyReader) -> Result<(), &'static str> {
    while !reader.is_done() {
        let skim = reader.skim(wire.inbox.bytes(), &MessageLimits::DEFAULT);
        wire.inbox
            .advance(skim.map_err(|_| "bad_response")?.consumed);
        if !reader.is_done() && fill(wire).await? == 0 {
            break;
        }
    }
    Ok(())
}

/// Reads more bytes, and returns how many.
async fn fill(wire: &mut Http1Io) -> Result<usize, &'static str> {
    let read = poll_fn(|cx| wire.io.poll_fill(cx, &mut wire.inbox)).await;
    read.map_err(|_| "failed")
}

fn is_of_tenant(view: &EndpointSetState, account: &TenantUsage) -> bool {
    let service = view.set.service.as_ref();
    service.is_some_and(|names| names.key.tenant == account.tenant)
}

/// Asks the endpoint to close the connection after its response.
fn with_close(mut head: Vec<u8>) -> Vec<u8> {
    head.truncate(head.len().saturating_sub(2));
    head.extend_from_slice(b"connection: close\r\n\r\n");
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_ask_the_endpoint_to_close() {
        let head = with_close(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n".to_vec());
        assert!(head.ends_with(b"host: a\r\nconnection: close\r\n\r\n"));
    }
}
