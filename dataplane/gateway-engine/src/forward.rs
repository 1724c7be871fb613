//! Phase *forward*: sends a request to the selected endpoint and the response to the client, in any
//! pairing of HTTP versions.
//!
//! It does not decide about retries: `pipeline` does. Start with [`HttpRequest`], then [`exchange`]
//! (both directions at once) and [`heads`] (translation). What depends on the client's HTTP version
//! is in [`http1`] and [`http2`].

mod attempt_limits;
mod exchange;
mod faults;
pub(crate) mod http1;
pub(crate) mod http2;
mod listener_filters;
mod mirrors;

use std::borrow::Cow;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use canal_gateway_config::{
    AnsweredRequest, DestinationPolicy, GeneratedCookie, MatchedFilters, REWRITTEN_DOT_SEGMENT,
    RequestMutations, RouteReply, hash_of_request, jwt,
};
use canal_gateway_http::endpoint_version::decide_version;
use canal_gateway_http::head::{ClientProtocol, FullRequest, RequestInfo, ValidatedHttp2Request};
use canal_gateway_http::heads;
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_io::body::Http1Io;
use canal_h1::RequestKind;
use canal_hbone::CloseReport;
use canal_model::authorization::Authorizer;
use canal_model::load_balancing::HashKey;
use canal_model::program::UpstreamPool;
use canal_model::route_filters::{HeaderModifier, UrlScheme};
use canal_router::{RoutableRequest, routing_path};
use h2::client::SendRequest;
use http::HeaderMap;

use crate::authorize::buffered_body::{self, BufferedBody};
use crate::authorize::reauthorize::OngoingAuthorization;
use crate::authorize::{
    self, AuthorizationState, DestinationPolicies, ExtAuthzGrant, ext_authz, route_authorizer,
};
use crate::balance::{self, TriedEndpoints};
use crate::endpoints::{self, SelectedEndpoint};
use crate::finish::{LogFields, RequestRecord};
use crate::forward::attempt_limits::AttemptLimits;
use crate::forward::exchange::{
    DownstreamSide, Exchange, ExchangeOutcome, Http1UpstreamSide, ReplayedBody, SuspendedExchange,
    UpstreamSide,
};
use crate::forward::listener_filters::PassedListener;
use crate::pipeline::{Attempt, ClientTraffic, FailedAttempt, PolicyRetry, ReplayConditions};
use crate::route::{self, RoutedRequest};
use crate::session::ClientSession;
use crate::upstream::{self, TunnelMetadata};
use crate::worker::Worker;

/// A connection to an endpoint, in the HTTP version that the endpoint uses.
pub(crate) enum UpstreamTransport {
    Http1(Box<Http1UpstreamSide>),
    Http2(endpoints::StreamPermit, SendRequest<Bytes>),
}

/// Returns the gateway's value of `x-forwarded-proto`; `None` if the client's own value is used.
fn own_proto(worker: &Worker, session: &ClientSession) -> Option<&'static str> {
    (!worker.shared.config.forwarded.keeps_proto).then(|| session.scheme())
}

/// True if the request's connection must belong to its client alone: the service requires it, or
/// the request may upgrade the connection.
fn is_single(pool: UpstreamPool, info: &RequestInfo) -> bool {
    pool == UpstreamPool::PerClient || info.kind == RequestKind::Upgrade
}

/// True if the request may go on an idle connection, which the endpoint may close at that moment. A
/// request that could not be repeated then gets a new connection if it is the client's first:
/// without a mesh it would not meet a close either. A later one could. A request that may upgrade
/// its connection gets a new one too, which requests no close report (see [`RequestState::open`]).
fn may_take_idle(info: &RequestInfo, is_answered: bool) -> bool {
    info.kind != RequestKind::Upgrade && (is_answered || info.is_repeatable())
}

/// Returns the mutations that apply to the request as it is forwarded, if there are any: those of
/// its authorization, and those of its rule's filters. Only the filters need the request's head.
fn decide_mutations<'a, R: FullRequest>(
    authorization: Option<&'a AuthorizationState>,
    routed: &RoutedRequest,
    head: impl FnOnce() -> R,
) -> Result<Option<Cow<'a, RequestMutations>>, ProxyError> {
    let authorized = authorization
        .map(|state| &state.changes)
        .filter(|changes| !changes.is_empty());
    let matched = routed.matched.as_deref();
    let Some(matched) = matched.filter(|_| routed.filters.changes_heads()) else {
        return Ok(authorized.map(Cow::Borrowed));
    };
    let request = head();
    // The rule was chosen by the normal form of the path, so its prefix is one of that form.
    let normal = routing_path(request.path());
    let path = normal.map_or_else(|| String::from_utf8_lossy(request.path()), Cow::Owned);
    let changes = matched.request(authorized, &path);
    changes
        .map(|changes| Some(Cow::Owned(changes)))
        .map_err(ProxyError::UnsafePath)
}

/// Returns the hash of the part of a request that the key names; `None` if there is none. If the
/// request lacks a cookie that the gateway generates, the response gets it.
#[inline(never)]
fn hash_of<R: RoutableRequest>(
    key: &HashKey,
    session: &ClientSession,
    routed: &RoutedRequest,
    request: &R,
    response_headers: &mut Option<Box<HeaderModifier>>,
) -> Option<u64> {
    let hash = hash_of_request(key, &session.client_ip, request);
    let HashKey::Cookie(cookie) = key else {
        return hash;
    };
    hash.or_else(|| {
        let hostname = routed.resolved.hostname().unwrap_or_default();
        let connection = format!("{}{hostname}", session.client);
        let GeneratedCookie { hash, set_cookie } = GeneratedCookie::new(cookie, &connection)?;
        let of_rule = routed.response_headers(None).cloned();
        let mut changes = Box::new(of_rule.unwrap_or_default());
        changes.add.push(("set-cookie".to_owned(), set_cookie));
        *response_headers = Some(changes);
        Some(hash)
    })
}

/// The client's side of a request, in one HTTP version.
pub(crate) trait HttpDownstream {
    /// The request's head as it will be forwarded.
    type Head<'h>: FullRequest
    where
        Self: 'h;
    /// Instruction for the client's connection after the request.
    type End;

    /// Returns the head and the authority in it.
    fn head(&self) -> (Self::Head<'_>, &[u8]);

    /// True if the request is CONNECT, which is not served as a request to a service.
    fn is_connect(&self) -> bool;

    /// Prepares the head of an admitted request for its attempts.
    fn prepare(&mut self, state: &mut RequestState);

    /// Buffers the beginning of the body.
    async fn buffer_body(
        &mut self,
        state: &mut RequestState,
        wanted: usize,
    ) -> Result<BufferedBody, ProxyError>;

    /// Writes the head in the HTTP version of the endpoint.
    fn send(
        &mut self,
        state: &mut RequestState,
        routed: &RoutedRequest,
        upstream: UpstreamTransport,
        changes: Option<&RequestMutations>,
    ) -> Result<UpstreamSide, ProxyError>;

    /// Writes the head of a copy of the request, in the HTTP version of its endpoint. Called while no
    /// body has been read.
    fn copy_head(
        &mut self,
        state: &RequestState,
        routed: &RoutedRequest,
        version: ClientProtocol,
        changes: &RequestMutations,
    ) -> Result<mirrors::CopiedHead, ProxyError>;

    /// True if the client sends no body, or an empty one.
    fn is_complete(&self, info: &RequestInfo) -> bool;

    /// Called once the head of a request with a body was sent to an endpoint. With `keeps_head`
    /// the head is kept for further attempts.
    fn begin_body(&mut self, session: &ClientSession, keeps_head: bool);

    /// Ready if the client has left while nothing is sent to it.
    fn poll_client_gone(&mut self, cx: &mut Context<'_>) -> Poll<()>;

    /// Returns the client's side for an exchange, and the head for a later reauthorization.
    fn exchange(&mut self) -> (DownstreamSide<'_>, OpenHead<'_>);

    /// Ends the request. A local reply gets the rule's `changes` of response headers.
    async fn finish(
        &mut self,
        state: &mut RequestState,
        changes: Option<&HeaderModifier>,
        ended: Result<ExchangeEnd, ProxyError>,
    ) -> Self::End;
}

/// The head of a request in progress, in the form in which it is available.
#[derive(Default)]
pub(crate) struct OpenHead<'h> {
    /// Copy of an HTTP/1.1 head, where the body overwrites the head in the inbox.
    copy: Option<&'h [u8]>,
    http2: Option<&'h ValidatedHttp2Request>,
}

/// Result of an exchange of which the client saw at least the response's head.
pub(crate) enum ExchangeEnd {
    /// The response is complete. `request_done` means that the request was read to its end as well,
    /// `keep_alive` that the response announced an open connection.
    Complete {
        request_done: bool,
        keep_alive: bool,
    },
    /// A 101 response was passed on.
    Upgraded(Option<Box<UpgradedUpstream>>),
    /// The response broke off.
    Broken(ProxyError),
}

/// The endpoint's side of an upgraded connection.
pub(crate) struct UpgradedUpstream {
    pub(crate) up: Http1Io,
    pub(crate) chosen: SelectedEndpoint,
    /// Version of the policies that authorized it.
    pub(crate) version: u64,
}

impl UpgradedUpstream {
    /// Boxed, so that requests that are not upgraded do not move it.
    fn new(up: Http1Io, chosen: SelectedEndpoint, version: u64) -> Box<Self> {
        Box::new(Self {
            up,
            chosen,
            version,
        })
    }
}

/// State of a request that does not depend on the client's HTTP version.
pub(crate) struct RequestState {
    worker: Rc<Worker>,
    session: Rc<ClientSession>,
    info: RequestInfo,
    record: RequestRecord,
    /// Beginning of the body, buffered for external authorizers.
    body: Option<BufferedBody>,
    verification: jwt::VerificationBudget,
    /// Value of `x-forwarded-client-cert`, if that header is configured and the client proved an
    /// identity or has a valid certificate of a listener.
    client_cert: Option<Box<str>>,
    /// Changes of the response's headers, if the gateway generated a cookie for the load balancer:
    /// the rule's, and the cookie.
    response_headers: Option<Box<HeaderModifier>>,
    /// Timeouts and retries that the rule asks for; `None` for nearly all requests.
    limits: Option<Box<AttemptLimits>>,
    /// What the filters of the listener decided, if it has any.
    passed: Option<Box<PassedListener>>,
}

impl RequestState {
    fn new(
        worker: &Rc<Worker>,
        session: &Rc<ClientSession>,
        info: RequestInfo,
        record: RequestRecord,
    ) -> Self {
        let (worker, session) = (worker.clone(), session.clone());
        Self {
            worker,
            session,
            info,
            record,
            body: None,
            verification: jwt::VerificationBudget::default(),
            client_cert: None,
            response_headers: None,
            limits: None,
            passed: None,
        }
    }

    /// Collects the fields about the client that the gateway adds to each request, whichever
    /// endpoint it goes to.
    fn additions<'s>(&'s self, request_id: [u8; 36], hostname: &'s str) -> heads::Additions<'s> {
        heads::Additions {
            client_ip: &self.session.client_ip,
            request_id,
            hostname,
            scheme: self.session.scheme(),
            keeps_proto: self.worker.shared.config.forwarded.keeps_proto,
            client_cert: self.client_cert.as_deref(),
            changes: None,
        }
    }

    /// Authorizes the request at the endpoint with this address, if there is one. Grants of external
    /// authorizers remain valid while the same policies require them.
    async fn authorize<R: FullRequest>(
        &mut self,
        routed: &RoutedRequest,
        policies: &DestinationPolicies<'_>,
        to: Option<SocketAddr>,
        earlier: Option<Box<AuthorizationState>>,
        request: (&R, &[u8]),
    ) -> Result<Box<AuthorizationState>, ProxyError> {
        let mut state = match earlier.filter(|earlier| earlier.consent.is_of(policies)) {
            Some(earlier) => earlier,
            None => {
                self.prepare_authorization(routed, policies, request.0)
                    .await?
            }
        };
        let (worker, session) = (&self.worker, &self.session);
        // An ext_authz grant may change the request, so the policies are evaluated again after it.
        loop {
            // Without policies, only the authorizer of the rule decides.
            if policies.is_empty() && !session.principal.foreign {
                break;
            }
            let decision = self
                .record
                .texts
                .as_mut()
                .map(|texts| &mut texts.authorization);
            match state.decide(worker, session, policies, to, request, decision)? {
                authorize::AuthorizationStep::Pass => break,
                authorize::AuthorizationStep::CallAuthorizer(check) => {
                    let protocol = self.record.protocol_text();
                    let context = ext_authz::CheckContext {
                        trial: &state,
                        protocol,
                        body: self.body.as_ref(),
                    };
                    let shown = |authorizer: &Authorizer| {
                        let shown = (authorizer.headers.as_slice(), authorizer.body_bytes);
                        ext_authz::request(session, to, request, &context, shown)
                    };
                    let agreed = Box::pin(ext_authz::check(worker, session, &check, shown)).await?;
                    agreed.apply(request.0, &mut state.changes);
                    state.consent = ExtAuthzGrant::To(check);
                }
            }
        }
        if state.needs_rule_check(routed) {
            Box::pin(self.check_by_rule(routed, &mut state, to, request)).await?;
        }
        state.settle(policies);
        Ok(state)
    }

    /// Calls the authorizer that the request's rule names.
    async fn check_by_rule<R: FullRequest>(
        &self,
        routed: &RoutedRequest,
        state: &mut AuthorizationState,
        to: Option<SocketAddr>,
        request: (&R, &[u8]),
    ) -> Result<(), ProxyError> {
        let matched = routed.matched.as_deref();
        // The chain that asks for the check was resolved from the same rule. An error there must not
        // let requests through.
        let checked = matched.and_then(MatchedFilters::authorizer);
        let checked = checked.ok_or(ProxyError::ExtAuthzFailed("authorizer_unknown"))?;
        let (worker, session) = (&self.worker, &self.session);
        let context = ext_authz::CheckContext {
            trial: state,
            protocol: self.record.protocol_text(),
            body: self.body.as_ref(),
        };
        let (rule, authorizer) = checked;
        let key = &rule.key;
        let name = format!("{}/{}/{}", key.kind, key.namespace, key.name);
        let checked = (name.as_str(), authorizer);
        let agreed =
            route_authorizer::check(worker, session, checked, request, &context, to).await?;
        state.allow_by_rule(request.0, agreed);
        Ok(())
    }

    /// Validates tokens and normalizes the path, as far as the policies and the authorizer of the
    /// rule read them.
    async fn prepare_authorization<R: FullRequest>(
        &self,
        routed: &RoutedRequest,
        policies: &DestinationPolicies<'_>,
        request: &R,
    ) -> Result<Box<AuthorizationState>, ProxyError> {
        let mut state = Box::new(AuthorizationState::default());
        let passed = self.passed.as_deref();
        if let Some(passed) = passed {
            state.changes = passed.changes.clone();
        }
        let paths = routed.view.set.policy_paths;
        let (account, guards) = (&self.session.account, (policies, paths));
        loop {
            let prepared = match passed {
                None => state.prepare(&self.worker, account, guards, request),
                // Tokens are read as the filters of the listener left them.
                Some(passed) => state.prepare(&self.worker, account, guards, &passed.of(request)),
            };
            match prepared {
                Ok(()) if state.needs_rule_check(routed) => {
                    // Else the endpoint could read `/open/../admin` as another path than the
                    // authorizer, and one over HTTP could be led out of its prefix.
                    state.normalize_path(request, paths)?;
                    return Ok(state);
                }
                Ok(()) => return Ok(state),
                Err(authorize::AuthorizationInterrupt::Fault(fault)) => return Err(fault),
                Err(authorize::AuthorizationInterrupt::Verify(todo)) => {
                    Box::pin(authorize::verify(
                        &self.worker,
                        account,
                        &self.verification,
                        todo,
                    ))
                    .await;
                }
            }
        }
    }

    /// Gets a connection to the endpoint: idle, shared or new.
    async fn connect(
        &self,
        routed: &RoutedRequest,
        selected: &SelectedEndpoint,
        opens_connection: bool,
    ) -> Result<UpstreamTransport, ProxyError> {
        let version = decide_version(routed.view.set.protocol, &self.info, self.session.tls);
        if version == ClientProtocol::Http2 {
            let metadata = self.tunnel_metadata(routed, selected);
            let (place, send) =
                Box::pin(upstream::acquire_stream(&self.worker, selected, metadata)).await?;
            return Ok(UpstreamTransport::Http2(place, send));
        }
        if !opens_connection
            && may_take_idle(&self.info, self.session.is_answered())
            && let Some(lease) = upstream::take_idle(&self.worker, selected)
        {
            return Ok(UpstreamTransport::Http1(Http1UpstreamSide::of(lease)));
        }
        self.open(routed, selected)
            .await
            .map(UpstreamTransport::Http1)
    }

    /// Opens a new connection for HTTP/1.1. A connection that carries requests one after another
    /// requests a close report of how much reached the application. If it may be upgraded, its end
    /// has no relation to requests.
    async fn open(
        &self,
        routed: &RoutedRequest,
        selected: &SelectedEndpoint,
    ) -> Result<Box<Http1UpstreamSide>, ProxyError> {
        let mut metadata = self.tunnel_metadata(routed, selected);
        if self.info.kind != RequestKind::Upgrade {
            CloseReport::request_report(&mut metadata.headers);
        }
        Box::pin(upstream::open_connection(&self.worker, selected, metadata))
            .await
            .map(Http1UpstreamSide::of)
    }

    /// Builds the metadata of a new connection. A pooled connection carries requests of many
    /// clients and therefore names none of them.
    fn tunnel_metadata<'r>(
        &self,
        routed: &'r RoutedRequest,
        selected: &SelectedEndpoint,
    ) -> TunnelMetadata<'r> {
        let headers = match selected.client {
            Some(_) => self.session.introduction(routed.resolved.hostname()),
            None => HeaderMap::new(),
        };
        TunnelMetadata {
            tls: routed.tls.as_ref(),
            headers,
        }
    }
}

/// An HTTP request on its way through the phases.
pub(crate) struct HttpRequest<D> {
    client: D,
    state: RequestState,
    /// The exchange of the last attempt, if the next one goes on with it.
    suspended: Option<Box<SuspendedExchange>>,
    /// The body of the last attempt, if the next one begins with it again.
    replayed: Option<Box<ReplayedBody>>,
}

impl<D: HttpDownstream> HttpRequest<D> {
    fn new(client: D, state: RequestState) -> Self {
        Self {
            client,
            state,
            suspended: None,
            replayed: None,
        }
    }

    /// Gets a connection to the endpoint and writes the head on it, unless the bytes of a suspended
    /// exchange follow. `IS_LIMITED`: within the times of a rule. Each of the two callers has its
    /// own instance, which the compiler inlines; a shared one would be moved for each request.
    async fn begin_attempt<const IS_LIMITED: bool>(
        &mut self,
        routed: &RoutedRequest,
        selected: &SelectedEndpoint,
        attempt: Attempt<'_>,
    ) -> Result<UpstreamSide, ProxyError> {
        if self.suspended.is_some() {
            return self
                .state
                .open(routed, selected)
                .await
                .map(UpstreamSide::Http1);
        }
        let upstream = self
            .state
            .connect(routed, selected, attempt.opens_connection)
            .await?;
        let changes = decide_mutations(attempt.authorization, routed, || self.client.head().0)?;
        self.client
            .send(&mut self.state, routed, upstream, changes.as_deref())
    }

    /// Begins an attempt within the times that the rule asks for.
    async fn begin_limited_attempt(
        &mut self,
        mut limits: Box<AttemptLimits>,
        routed: &RoutedRequest,
        selected: &SelectedEndpoint,
        attempt: Attempt<'_>,
    ) -> Result<UpstreamSide, ProxyError> {
        limits.begin_attempt();
        let (worker, is_sent) = (self.state.worker.clone(), self.is_sent());
        let work = self.begin_attempt::<true>(routed, selected, attempt);
        let begun = limits.within(&worker, is_sent, work).await;
        self.state.limits = Some(limits);
        begun
    }

    /// Called before the body, if there is one, is passed on. With `has_begun`, an earlier attempt has
    /// passed on a part of it.
    #[inline]
    fn begin_body(&mut self, is_complete: bool, has_begun: bool) {
        if is_complete {
            return;
        }
        // Only a retry that the rule asks for may need the beginning again, for the authorizers of
        // another endpoint.
        let shown = self.state.body.take();
        let limits = &mut self.state.limits;
        if let (Some(limits), Some(shown)) = (&mut *limits, shown) {
            limits.buffered = Some(shown);
        }
        if !has_begun {
            let keeps_head = limits.is_some();
            self.client.begin_body(&self.state.session, keeps_head);
        }
    }

    fn failed(&self, error: ProxyError, endpoint: usize, is_untouched: bool) -> FailedAttempt {
        FailedAttempt {
            error,
            endpoint,
            replay: ReplayConditions {
                is_untouched,
                is_repeatable: self.state.info.is_repeatable(),
            },
            resumable: None,
        }
    }

    /// True once the client has sent the entire request.
    fn is_sent(&self) -> bool {
        self.client.is_complete(&self.state.info)
            || self
                .replayed
                .as_ref()
                .is_some_and(|body| body.is_source_done())
    }
}

impl<D: HttpDownstream> HttpRequest<D> {
    /// Buffers the beginning of the body, if an authorizer reads it. `of_answer` are the policies of
    /// a request that the gateway answers.
    async fn buffer_body(
        &mut self,
        routed: &RoutedRequest,
        of_answer: Option<&DestinationPolicy>,
    ) -> Result<(), ProxyError> {
        let wanted = buffered_body::bytes_to_buffer(
            &self.state.worker,
            &self.state.session,
            routed,
            &self.state.info,
            of_answer,
        );
        self.buffer_bytes(wanted).await
    }

    /// Buffers this many bytes of the body, unless a filter of the listener has read it: such a filter
    /// allows no request before it has seen the whole body.
    async fn buffer_bytes(&mut self, wanted: usize) -> Result<(), ProxyError> {
        if wanted > 0 && self.state.body.is_none() {
            self.state.body =
                Some(Box::pin(self.client.buffer_body(&mut self.state, wanted)).await?);
        }
        Ok(())
    }

    /// Prepares what the attempts of a routed request need.
    fn prepare(&mut self, routed: &RoutedRequest) {
        let RequestState {
            worker, session, ..
        } = &self.state;
        if worker.shared.config.forwarded.client_cert {
            self.state.client_cert = session.principal.forwarded_certificate().map(Into::into);
        }
        self.client.prepare(&mut self.state);
        if routed.filters.limits_attempts() {
            let is_bodyless = self.client.is_complete(&self.state.info);
            self.state.limits = AttemptLimits::of(routed, is_bodyless);
        }
    }

    /// Authorizes a request that the gateway answers itself.
    ///
    /// # Errors
    /// A policy denies the request.
    async fn authorize_answer(&mut self, routed: &RoutedRequest) -> Result<(), ProxyError> {
        let (worker, session) = (self.state.worker.clone(), self.state.session.clone());
        let policies = authorize::policies_of_answer(&worker, &session, &routed.view)?;
        self.buffer_body(routed, policies.as_deref()).await?;
        let policies = DestinationPolicies::of_answer(policies.as_deref(), routed);
        let (head, authority) = self.client.head();
        if !policies.is_empty() || session.principal.foreign || routed.filters.calls_authorizer() {
            self.state
                .authorize(routed, &policies, None, None, (&head, authority))
                .await?;
        }
        Ok(())
    }

    /// Returns the answer to a preflight if its policies allow it, else the error. Envoy's filter
    /// for authorization precedes that for cross-origin requests, as Istio orders them.
    async fn answer_preflight(&mut self, routed: &RoutedRequest) -> ProxyError {
        if let Err(error) = self.authorize_answer(routed).await {
            return error;
        }
        let matched = routed.matched.as_deref();
        let reply = matched.and_then(MatchedFilters::preflight).cloned();
        reply.map_or(ProxyError::NoRoute, |reply| {
            ProxyError::Answered(Box::new(reply))
        })
    }

    /// Authorizes a request that the gateway answers itself, and makes the answer.
    ///
    /// # Errors
    /// A policy denies the request, or the path of its redirect has a dot segment.
    async fn answer(&mut self, routed: &RoutedRequest) -> Result<RouteReply, ProxyError> {
        self.authorize_answer(routed).await?;
        let session = self.state.session.clone();
        let (head, authority) = self.client.head();
        let normal = routing_path(head.path());
        let normal = normal.map_or_else(|| String::from_utf8_lossy(head.path()), Cow::Owned);
        let hostname = routed.resolved.hostname().unwrap_or_default();
        let request = AnsweredRequest {
            scheme: if session.tls {
                UrlScheme::Https
            } else {
                UrlScheme::Http
            },
            // Only HTTP/1.0 clients may send none.
            authority: if authority.is_empty() {
                hostname.as_bytes()
            } else {
                authority
            },
            port: routed.view.set.port,
            path: head.path(),
            query: head.query(),
            normal_path: &normal,
        };
        let matched = routed.matched.as_ref();
        matched
            .and_then(|matched| matched.answer(&request))
            .ok_or(ProxyError::UnsafePath(REWRITTEN_DOT_SEGMENT))
    }
}

impl<D: HttpDownstream> ClientTraffic for HttpRequest<D> {
    type Done = ExchangeEnd;
    type End = D::End;

    fn worker(&self) -> &Worker {
        &self.state.worker
    }

    fn session(&self) -> &ClientSession {
        &self.state.session
    }

    fn decode(&mut self) -> Result<(), ProxyError> {
        let RequestState {
            worker,
            session,
            record,
            ..
        } = &mut self.state;
        if RequestRecord::wants_texts(worker, session) {
            let (head, authority) = self.client.head();
            record.texts = Some(LogFields::of(worker, session, &head, authority));
        }
        if self.client.is_connect() {
            Err(ProxyError::Method)
        } else {
            Ok(())
        }
    }

    fn route(&mut self) -> Result<RoutedRequest, ProxyError> {
        let RequestState {
            worker,
            session,
            record,
            ..
        } = &mut self.state;
        let routed = route::request(worker, session, &self.client.head().0, record)?;
        // Rules match the head as the client sent it, so it is prepared once the rule is known.
        if routed.listener_filters.is_none() {
            self.prepare(&routed);
        }
        Ok(routed)
    }

    async fn pass_listener(&mut self, routed: &mut RoutedRequest) -> Result<(), ProxyError> {
        self.run_listener_filters(routed).await?;
        self.prepare(routed);
        Ok(())
    }

    /// Each filter has one `if`, in the order of the chain.
    async fn filter(&mut self, routed: &RoutedRequest) -> Result<(), ProxyError> {
        if routed.filters.injects_faults() {
            Box::pin(self.inject_faults(routed)).await?;
        }
        if routed.filters.answers_preflight() {
            return Err(Box::pin(self.answer_preflight(routed)).await);
        }
        if routed.filters.answers() {
            return Err(Box::pin(self.answer(routed))
                .await
                .map_or_else(|error| error, |reply| ProxyError::Answered(Box::new(reply))));
        }
        if routed.filters.buffers_body() {
            self.buffer_body(routed, None).await?;
        }
        Ok(())
    }

    fn balance(
        &mut self,
        routed: &RoutedRequest,
        tried: &TriedEndpoints,
    ) -> Result<SelectedEndpoint, ProxyError> {
        let RequestState {
            worker,
            session,
            info,
            record,
            response_headers,
            passed,
            ..
        } = &mut self.state;
        let view = &routed.view;
        let client = &self.client;
        let mut selected = balance::endpoint(
            view,
            tried,
            Some(session.client.ip()),
            worker.clock.now(),
            || worker.random(),
            |key| match passed.as_deref() {
                None => hash_of(key, session, routed, &client.head().0, response_headers),
                Some(passed) => {
                    let (head, _) = client.head();
                    hash_of(key, session, routed, &passed.of(&head), response_headers)
                }
            },
        )?;
        selected.client = is_single(view.set.pool, info).then(|| session.pool_client());
        record.target = Some((view.clone(), Some(selected.at)));
        Ok(selected)
    }

    async fn authorize(
        &mut self,
        routed: &RoutedRequest,
        policies: &DestinationPolicies<'_>,
        selected: &SelectedEndpoint,
        earlier: Option<Box<AuthorizationState>>,
    ) -> Result<Option<Box<AuthorizationState>>, ProxyError> {
        let (head, authority) = self.client.head();
        self.state
            .authorize(
                routed,
                policies,
                Some(selected.address),
                earlier,
                (&head, authority),
            )
            .await
            .map(Some)
    }

    async fn forward(
        &mut self,
        routed: &RoutedRequest,
        selected: SelectedEndpoint,
        attempt: Attempt<'_>,
    ) -> Result<ExchangeEnd, FailedAttempt> {
        let is_complete = self.client.is_complete(&self.state.info);
        let to = &selected;
        let begun = match self.state.limits.take() {
            None => self.begin_attempt::<false>(routed, to, attempt).await,
            Some(limits) => Box::pin(self.begin_limited_attempt(limits, routed, to, attempt)).await,
        };
        let has_begun = self.suspended.is_some() || self.replayed.is_some();
        let back = match begun {
            Ok(back) => back,
            // A suspended or replayed attempt has forwarded a part of the body. The request then
            // counts as untouched only if it has no body.
            Err(error) => {
                if let Some(suspended) = self.suspended.take() {
                    self.replayed = suspended.into_replay();
                }
                return Err(self.failed(error, selected.at, !has_begun || is_complete));
            }
        };
        let (suspended, replayed) = (self.suspended.take(), self.replayed.take());
        let copies = self.begin_copies(routed, attempt.authorization, has_begun);
        self.begin_body(is_complete, has_begun);
        let RequestState {
            worker,
            session,
            info,
            record,
            limits,
            response_headers,
            passed,
            ..
        } = &mut self.state;
        // The head has ended an HTTP/2 stream, but an HTTP/1.1 head is still in the outbox.
        let sent = matches!(back, UpstreamSide::Http2(_)) && is_complete;
        let (front, head) = self.client.exchange();
        let open =
            OngoingAuthorization::new(session, &selected, routed.version, head.copy, head.http2)
                .with_changes(passed.as_deref().map(|it| &it.changes));
        let mut exchange = Exchange::new(worker, info, record, front, back, sent, open);
        exchange.apply_rule(routed.response_headers(response_headers.as_deref()), copies);
        if let Some(limits) = limits {
            exchange.limit_attempts(limits, !has_begun && !is_complete);
        }
        exchange.continue_from(suspended, replayed);
        let outcome = exchange.run().await;
        match outcome {
            ExchangeOutcome::Failed {
                fault,
                answered: false,
            } => {
                // Nothing reached the application, so the next attempt may continue with the sent
                // bytes. After any other failure it can only begin again.
                if fault == ProxyError::UpstreamUndelivered {
                    self.suspended = exchange.suspend();
                } else {
                    self.replayed = exchange.into_replay();
                }
                let mut failed = self.failed(fault, selected.at, is_complete);
                failed.resumable = self.suspended.is_some().then_some(selected);
                Err(failed)
            }
            // The client has received a part of the response, so a retry cannot replace it.
            ExchangeOutcome::Failed { fault, .. } => Ok(ExchangeEnd::Broken(fault)),
            ExchangeOutcome::Upgraded => {
                let up = exchange.into_upgraded();
                let upgraded = |up| UpgradedUpstream::new(up, selected, routed.version);
                Ok(ExchangeEnd::Upgraded(up.map(upgraded)))
            }
            ExchangeOutcome::Done { request_done } => {
                session.note_answer();
                let keep_alive = exchange.keep_alive;
                if let Some(wire) = exchange.into_reusable(request_done) {
                    upstream::return_idle(worker, &selected, wire);
                }
                Ok(ExchangeEnd::Complete {
                    request_done,
                    keep_alive,
                })
            }
        }
    }

    fn decide_retry(&mut self, failed: &FailedAttempt) -> PolicyRetry {
        let is_kept = failed.replay.is_untouched || self.replayed.is_some();
        let RequestState {
            worker,
            limits,
            body,
            ..
        } = &mut self.state;
        let Some(limits) = limits else {
            return PolicyRetry::Unasked;
        };
        let decision = limits.decide(worker, &failed.error, is_kept);
        if let Some(shown) = limits.buffered.take() {
            *body = Some(shown);
        }
        decision
    }

    async fn back_off(&mut self) -> Result<(), ProxyError> {
        let is_sent = self.is_sent();
        let RequestState { worker, limits, .. } = &mut self.state;
        let Some(limits) = limits else {
            return Ok(());
        };
        let client = &mut self.client;
        limits
            .back_off(worker, is_sent, |cx| client.poll_client_gone(cx))
            .await
    }

    async fn finish(
        &mut self,
        routed: Option<&RoutedRequest>,
        ended: Result<ExchangeEnd, ProxyError>,
    ) -> D::End {
        // A response of an endpoint was changed when its head was sent.
        let changes = match &ended {
            Ok(_) => None,
            Err(_) => routed.and_then(RoutedRequest::error_headers),
        };
        self.client.finish(&mut self.state, changes, ended).await
    }
}
