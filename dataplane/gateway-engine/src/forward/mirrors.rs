//! Copies of requests that a rule sends to other services. The request itself never waits for its
//! copy: the copy's connection, its response and its failures belong to a task of its own.
//!
//! A copy is authorized like the request, at its own endpoint. A policy that needs an external
//! authorizer or the verification of a token would let the request wait, so such a copy is not
//! sent. Start with [`HttpRequest::begin_copies`].

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use canal_gateway_config::{EndpointSetId, SelectedMirror, TenantTls, hash_of_request};
use canal_gateway_http::endpoint_version::decide_version;
use canal_gateway_http::interim::InterimResponses;
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_io::body::{BodyCopy, BodyCopyError, BodyCopyReserve, Http1Io};
use canal_gateway_io::buffer::{Inbox, Outbox};
use canal_gateway_io::scheduler::Scheduler;
use canal_gateway_limits::body_budget::CopyPermit;
use canal_gateway_limits::tenant_usage::{RequestPermit, TenantUsage};
use canal_h1::{
    BodyReader, CHUNK_END, ChunkStart, Framing, LAST_CHUNK, MessageLimits, RequestKind,
    ResponseHead,
};
use canal_model::load_balancing::HashKey;
use http::{HeaderMap, Request};
use tokio::sync::oneshot;

use super::attempt_limits::{COPIES, RETRY_BODY_BYTES_MAX};
use super::{HttpDownstream, HttpRequest, decide_mutations, is_single};
use crate::authorize::{
    AuthorizationInterrupt, AuthorizationState, AuthorizationStep, DestinationPolicies,
};
use crate::balance::{self, TriedEndpoints};
use crate::destination::ResolvedDestination;
use crate::endpoints::{EndpointSetState, SelectedEndpoint};
use crate::route::RoutedRequest;
use crate::upstream::{self, TunnelMetadata};
use crate::worker::Worker;

/// Longest time until the body of a copy is complete, and longest time of the copy from then on
/// (Envoy's default of a route).
const MIRROR_TIMEOUT: Duration = Duration::from_secs(15);

/// The head of a copy, in the HTTP version of its endpoint.
pub(crate) enum CopiedHead {
    Http1(Vec<u8>),
    Http2(Request<()>),
}

/// A copy of a request on its way to an endpoint.
struct RequestCopy {
    worker: Rc<Worker>,
    account: Rc<TenantUsage>,
    target: EndpointSetId,
    /// Version of the tenant's policies that authorized the copy.
    policy_version: u64,
    selected: SelectedEndpoint,
    tls: Option<TenantTls>,
    tunnel_headers: HeaderMap,
    head: CopiedHead,
    framing: Framing,
    kind: RequestKind,
    _permit: RequestPermit,
    _body_permit: Option<Rc<RefCell<CopyPermit>>>,
}

/// The body of a copy, once the request's has arrived.
type CopiedBody = oneshot::Receiver<Result<Bytes, BodyCopyError>>;

impl<D: HttpDownstream> HttpRequest<D> {
    /// Begins the copies that were drawn for the request, in its first attempt. `authorization` is
    /// that of the attempt. Returns where the body's copies go.
    #[inline]
    pub(super) fn begin_copies(
        &mut self,
        routed: &RoutedRequest,
        authorization: Option<&AuthorizationState>,
        has_begun: bool,
    ) -> Vec<BodyCopy> {
        if routed.filters.copies_requests() && !has_begun {
            self.begin_mirrors(routed, authorization)
        } else {
            Vec::new()
        }
    }

    fn begin_mirrors(
        &mut self,
        routed: &RoutedRequest,
        authorization: Option<&AuthorizationState>,
    ) -> Vec<BodyCopy> {
        let Some(matched) = routed.matched.as_deref() else {
            return Vec::new();
        };
        let mut copies = Vec::new();
        for mirror in matched.take_mirrors() {
            match self.begin_mirror(routed, authorization, mirror) {
                Ok(copy) => copies.extend(copy),
                Err(reason) => self.state.worker.counts.mirrored(reason),
            }
        }
        copies
    }

    /// Begins one copy.
    ///
    /// # Errors
    /// The reason for which the request is not copied.
    fn begin_mirror(
        &mut self,
        routed: &RoutedRequest,
        authorization: Option<&AuthorizationState>,
        mirror: SelectedMirror,
    ) -> Result<Option<BodyCopy>, &'static str> {
        let (worker, session) = (self.state.worker.clone(), self.state.session.clone());
        let (framing, kind) = (self.state.info.framing, self.state.info.kind);
        // An upgraded connection carries no request body that a copy could repeat.
        if kind == RequestKind::Upgrade {
            return Err("upgrade");
        }
        let account = &session.account;
        let permit = worker.limits.mirror(account)?;
        // Policies may have changed since the routing.
        let (snapshot, resolved) = session.resolve(&worker).map_err(|_| "no_service")?;
        let view = worker.upstreams.view(&snapshot, mirror.target);
        // Routes were resolved inside the tenant. The check is repeated here, as for requests.
        let view = view.filter(|view| is_of_tenant(view, account));
        let view = view.ok_or("no_service")?;
        let tenant = snapshot.tenant(account.tenant.as_str());
        // The number does not matter without a tenant: the copy is outdated then.
        let policy_version = tenant.map_or(0, |tenant| tenant.policy_version);
        let tls = tenant.and_then(|tenant| tenant.tls.clone());
        let (client, now) = (session.client.ip(), worker.clock.now());
        let random = || worker.random();
        let hash = |key: &HashKey| hash_of_request(key, &session.client_ip, &self.client.head().0);
        let tried = TriedEndpoints::new();
        let selected = balance::endpoint(&view, &tried, Some(client), now, random, hash);
        let mut selected = selected.map_err(|error| error.name())?;
        // A pool that is not shared opens a connection per client, also for the copy.
        let is_own = is_single(view.set.pool, &self.state.info);
        selected.client = is_own.then(|| session.pool_client());
        let tunnel_headers = if is_own {
            session.introduction(routed.resolved.hostname())
        } else {
            HeaderMap::new()
        };
        let authorization = self.authorize_copy(&resolved, authorization, &selected)?;
        let changes = decide_mutations(Some(&authorization), routed, || self.client.head().0);
        let changes = changes
            .map_err(|_| "unsafe_path")?
            .map_or_else(Default::default, |changes| changes.into_owned());
        let version = decide_version(view.set.protocol, &self.state.info, session.tls);
        let head = self
            .client
            .copy_head(&self.state, routed, version, &changes)
            .map_err(|_| "untranslatable_head")?;
        let (body_copy, body, body_permit) = if self.client.is_complete(&self.state.info) {
            (None, None, None)
        } else {
            // A declared length beyond the copy's buffer is refused before anything is buffered.
            if matches!(framing, Framing::Length(bytes) if bytes > RETRY_BODY_BYTES_MAX as u64) {
                return Err("mirrored_body_bytes");
            }
            let (sender, body) = oneshot::channel();
            let (reserve, permit) = begin_body_copy(&worker, account);
            (Some(BodyCopy { sender, reserve }), Some(body), Some(permit))
        };
        let copy = RequestCopy {
            worker: worker.clone(),
            account: account.clone(),
            target: mirror.target,
            policy_version,
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
        Ok(body_copy)
    }

    /// Authorizes a copy at its endpoint, by what is known at once. `authorization` is that of the
    /// request: what its endpoint does not get, the mirror does not get either.
    fn authorize_copy(
        &self,
        resolved: &ResolvedDestination,
        authorization: Option<&AuthorizationState>,
        selected: &SelectedEndpoint,
    ) -> Result<AuthorizationState, &'static str> {
        let (worker, session) = (&self.state.worker, &self.state.session);
        let mut state = AuthorizationState {
            changes: authorization.map_or_else(Default::default, |own| own.changes.clone()),
            is_of_copy: true,
            ..AuthorizationState::default()
        };
        let policies = DestinationPolicies::of(selected, resolved);
        if policies.is_empty() && !session.principal.foreign {
            return Ok(state);
        }
        let (head, authority) = self.client.head();
        let paths = selected.view.set.policy_paths;
        // The mirror's policies may read another normal form of the path.
        let path = state.changes.path.take();
        state
            .prepare(worker, &session.account, (&policies, paths), &head)
            .map_err(|interrupt| match interrupt {
                AuthorizationInterrupt::Fault(_) => "denied",
                AuthorizationInterrupt::Verify(_) => "unverified_token",
            })?;
        let to = Some(selected.address);
        match state.decide(worker, session, &policies, to, (&head, authority), None) {
            Ok(AuthorizationStep::Pass) => {
                state.changes.path = state.changes.path.or(path);
                Ok(state)
            }
            Ok(AuthorizationStep::CallAuthorizer(_)) => Err("authorizer"),
            Err(_) => Err("denied"),
        }
    }
}

/// Begins to charge the tenant for the body of a copy: the reservation grows with the body, and ends
/// with the permit.
fn begin_body_copy(
    worker: &Worker,
    account: &TenantUsage,
) -> (BodyCopyReserve, Rc<RefCell<CopyPermit>>) {
    let permit = worker.bodies.begin_copy(
        account.number,
        account.body_bytes_max(),
        &account.copied_body_bytes,
    );
    let permit = Rc::new(RefCell::new(permit));
    let covered = permit.clone();
    let reserve = move |bytes| covered.borrow_mut().cover(bytes as u64 * COPIES);
    (Box::new(reserve), permit)
}

impl RequestCopy {
    /// Sends the copy once its body is complete, counts the result, and discards the response.
    async fn send(self, body: Option<CopiedBody>) {
        let worker = self.worker.clone();
        let body = match body {
            None => Ok(Bytes::new()),
            // A stream may last for hours, so its bytes are not kept until it ends.
            Some(body) => match tokio::time::timeout(MIRROR_TIMEOUT, body).await {
                Err(_) => Err("body_timeout"),
                Ok(Ok(Ok(body))) => Ok(body),
                Ok(Ok(Err(BodyCopyError::TooLong))) => Err("mirrored_body_bytes"),
                Ok(Ok(Err(BodyCopyError::NoRoom(limit)))) => Err(limit),
                // The request ended before its body did.
                _ => Err("incomplete"),
            },
        };
        let body = match body {
            Ok(body) => body,
            Err(reason) => return worker.counts.mirrored(reason),
        };
        // The body may have taken seconds.
        if !self.is_current() {
            return worker.counts.mirrored("outdated");
        }
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

    /// True if the policies that authorized the copy still apply and its service still has the
    /// endpoint.
    fn is_current(&self) -> bool {
        let snapshot = self.worker.snapshot();
        let tenant = snapshot.tenant(self.account.tenant.as_str());
        let is_permitted = tenant
            .is_some_and(|tenant| tenant.policy_version == self.policy_version && !tenant.closed);
        let view = self.worker.upstreams.view(&snapshot, self.target);
        let view = view.filter(|view| is_permitted && is_of_tenant(view, &self.account));
        let own = self.selected.endpoint();
        let own = (own.id, own.guard.as_ref().map(|guard| guard.id));
        view.is_some_and(|view| {
            let mut endpoints = view.set.endpoints.iter();
            endpoints.any(|it| (it.id, it.guard.as_ref().map(|guard| guard.id)) == own)
        })
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
                // From here on, the result is counted and a timeout changes nothing.
                *is_answered = true;
                worker.counts.mirrored("sent");
                discard_body(&mut wire, reader).await
            }
            CopiedHead::Http2(request) => {
                let stream = upstream::acquire_stream(worker, selected, metadata).await;
                let (_permit, mut send) = stream.map_err(|_| "connect_failed")?;
                let (mut response, mut stream) = send
                    .send_request(request, body.is_empty())
                    .map_err(|_| "failed")?;
                // The body is short, so h2 may hold it until the endpoint grants window.
                if !body.is_empty() {
                    stream.send_data(body, true).map_err(|_| "failed")?;
                }
                let response = upstream::final_response(&mut response).await;
                let response = response.map_err(|error| match error {
                    ProxyError::InterimResponses(_) => "interim_responses",
                    _ => "failed",
                });
                let mut body = response?.into_body();
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
    let mut interim = InterimResponses::default();
    loop {
        let bytes = wire.inbox.bytes();
        let parsed = head.parse(bytes, &MessageLimits::DEFAULT, kind);
        if let Some(length) = parsed.map_err(|_| "bad_response")? {
            let view = head.view(bytes);
            let reader = (!view.is_interim()).then(|| BodyReader::new(view.framing()));
            wire.inbox.advance(length);
            match reader {
                Some(reader) => return Ok(reader),
                None => {
                    let counted = interim.count(length, false);
                    counted.map_err(|_| "interim_responses")?;
                }
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
