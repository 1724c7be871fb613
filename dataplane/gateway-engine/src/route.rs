//! Phase *route*: admits a request (or a connection) within the limits, then determines the
//! endpoint set that may serve it.
//!
//! All lookups use one snapshot and stay inside one tenant. It sends nothing and selects no
//! endpoint. Start with [`request`], or [`connection`] for bytes that are not requests.

use std::rc::Rc;
use std::sync::Arc;

use canal_gateway_config::{
    ConsumerPort, EndpointSetId, FilterChain, MatchedFilters, MatchedRule, PortTermination,
    PortView, RequestMutations, RouteOutcome, ServiceRoutes, Snapshot, TenantTls, WorkloadView,
};
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_http::routing_views::{AtPath, ChangedRequest, OpaqueConnection};
use canal_gateway_limits::tenant_usage::RequestPermit;
use canal_model::client_attributes::ClientAttribute;
use canal_model::ingress::is_gateway_service;
use canal_model::listener_filters::ListenerFilter;
use canal_model::program::{AppProtocol, TunnelProtocol};
use canal_model::route_filters::HeaderModifier;
use canal_router::{RoutableRequest, routing_path};

use crate::destination::{Destination, ResolvedDestination};
use crate::endpoints::{EndpointSetState, RequestTarget};
use crate::finish::{LogFields, RequestRecord};
use crate::session::ClientSession;
use crate::worker::Worker;

/// An admitted and routed request. Until dropped it counts against the requests in flight of its
/// tenant and of the worker.
pub(crate) struct RoutedRequest {
    pub(crate) view: Rc<EndpointSetState>,
    pub(crate) resolved: Rc<ResolvedDestination>,
    /// The gateway's identity in the tenant, if an endpoint is reached by a tunnel.
    pub(crate) tls: Option<TenantTls>,
    /// Version of the tenant's policies; not newer than the policies that authorize the request.
    pub(crate) version: u64,
    /// Filters of the rule and of the endpoints.
    pub(crate) filters: FilterChain,
    /// The rule, if it has filters, timeouts or retries, or if the gateway answers its requests.
    pub(crate) matched: Option<Box<MatchedFilters>>,
    /// Filters of the listener that the request must pass first. No rule was looked up for it yet.
    pub(crate) listener_filters: Option<Arc<[ListenerFilter]>>,
    admission: Option<RequestPermit>,
}

/// Filters that a request has passed, and how they changed it.
type PassedFilters<'a> = (&'a Arc<[ListenerFilter]>, &'a RequestMutations);

/// The endpoint set of a request, the filters that its rule asks for, and the rule if one of them
/// reads it. An answered request has the dialled port's set.
type RoutePlacement = (
    Rc<EndpointSetState>,
    FilterChain,
    Option<Box<MatchedFilters>>,
);

/// A placement, and the filters of the listener that the request must pass before it has one.
type PlacedRequest = (RoutePlacement, Option<Arc<[ListenerFilter]>>);

impl RoutedRequest {
    fn new(
        session: &ClientSession,
        snapshot: &Snapshot,
        (view, of_rule, matched): RoutePlacement,
        resolved: Rc<ResolvedDestination>,
        admission: Option<RequestPermit>,
    ) -> Self {
        // Only new tunnels need the identity. Cloning it later would be cheaper, but would require
        // holding the snapshot.
        let tunnelled = view
            .set
            .endpoints
            .iter()
            .any(|e| e.workload.tunnel == TunnelProtocol::Hbone);
        let tls = if tunnelled {
            snapshot
                .tenant(session.account.tenant.as_str())
                .and_then(|t| t.tls.clone())
        } else {
            None
        };
        let filters = view.set.filters.with(of_rule);
        Self {
            view,
            resolved,
            tls,
            version: session.account.policy_version.get(),
            filters,
            matched,
            listener_filters: None,
            admission,
        }
    }

    /// Returns the changes that are made of the response's headers, if any: those of the request's
    /// `own`, else those of the rule's filters.
    pub(crate) fn response_headers<'h>(
        &'h self,
        own: Option<&'h HeaderModifier>,
    ) -> Option<&'h HeaderModifier> {
        let of_rule = || self.matched.as_deref()?.response_headers();
        own.or_else(of_rule)
    }

    /// Returns the changes that the rule makes of the headers of a response that the gateway makes
    /// because of an error, if any.
    pub(crate) fn error_headers(&self) -> Option<&HeaderModifier> {
        self.matched.as_deref()?.error_headers()
    }
}

/// Admits and routes a request. Sets the record's target, also when the request is refused.
///
/// # Errors
/// A limit is reached, or no usable route or service exists.
pub(crate) fn request<R: RoutableRequest>(
    worker: &Worker,
    session: &ClientSession,
    request: &R,
    record: &mut RequestRecord,
) -> Result<RoutedRequest, ProxyError> {
    let (snapshot, resolved) = session.resolve(worker)?;
    // Admission comes before routing, so that a flood costs no route lookups.
    let placed = session
        .throttle(worker)
        .and_then(|()| admit(worker, session, &resolved))
        .and_then(|admission| {
            let texts = record.texts.as_mut();
            let newest = (&**snapshot, &resolved);
            let placed = place_request(worker, session, newest, request, None, texts)?;
            Ok((placed, admission))
        });
    match placed {
        Ok(((placed, filters), admission)) => {
            record.target = Some((placed.0.clone(), None));
            let admission = Some(admission);
            let mut routed = RoutedRequest::new(session, &snapshot, placed, resolved, admission);
            routed.listener_filters = filters;
            Ok(routed)
        }
        Err(fault) => {
            record.target = resolved
                .direct_endpoint(&worker.upstreams, &snapshot)
                .map(|view| (view, None));
            Err(fault)
        }
    }
}

/// Routes a request that has passed the filters of its listener, by the newest snapshot. If the
/// listener has other filters by now, these are next.
///
/// # Errors
/// No usable route or service exists any more.
pub(crate) fn after_filters<R: RoutableRequest>(
    worker: &Worker,
    session: &ClientSession,
    request: &R,
    passed: PassedFilters<'_>,
    (routed, record): (&mut RoutedRequest, &mut RequestRecord),
) -> Result<(), ProxyError> {
    let (snapshot, resolved) = session.resolve(worker)?;
    let newest = (&**snapshot, &resolved);
    let texts = record.texts.as_mut();
    let (placed, filters) = place_request(worker, session, newest, request, Some(passed), texts)?;
    record.target = Some((placed.0.clone(), None));
    let admission = routed.admission.take();
    *routed = RoutedRequest::new(session, &snapshot, placed, resolved, admission);
    routed.listener_filters = filters;
    Ok(())
}

/// Places a request at an endpoint set; or finds the filters of its listener that it has not
/// passed, in which case it is placed nowhere yet.
fn place_request<R: RoutableRequest>(
    worker: &Worker,
    session: &ClientSession,
    (snapshot, resolved): (&Snapshot, &Rc<ResolvedDestination>),
    request: &R,
    passed: Option<PassedFilters<'_>>,
    texts: Option<&mut Box<LogFields>>,
) -> Result<PlacedRequest, ProxyError> {
    if is_of_earlier_listener(session, resolved)
        || session.tls && is_misdirected(session, resolved, request)
    {
        return Err(ProxyError::Misdirected);
    }
    let filters = listener_filters(resolved, request);
    // Where the filters are gone by now, the request is still what they made of it.
    if let Some((own, changes)) = passed
        && filters.is_none_or(|(filters, _)| own == filters)
    {
        let changed = ChangedRequest { request, changes };
        let (view, chain, matched) =
            decide(worker, (session, snapshot), resolved, &changed, texts)?;
        let chain = chain.with(FilterChain::of_listener());
        return Ok(((view, chain, matched), None));
    }
    let Some((filters, slot)) = filters else {
        let placed = decide(worker, (session, snapshot), resolved, request, texts)?;
        return Ok((placed, None));
    };
    // Browsers send preflights without credentials, so no authorizer is asked about one that the
    // gateway answers itself.
    if request.method() == b"OPTIONS"
        && !filters.contains(&ListenerFilter::Refuse)
        && let Ok(placed) = decide(worker, (session, snapshot), resolved, request, None)
        && placed.1.answers_preflight()
    {
        let placed = decide(worker, (session, snapshot), resolved, request, texts)?;
        return Ok((placed, None));
    }
    let view = worker.upstreams.view(snapshot, slot);
    let view = view.ok_or(ProxyError::NoService)?;
    Ok(((view, FilterChain::default(), None), Some(filters.clone())))
}

/// Returns the filters of the listener of a request, if it has any, and the endpoint set of the
/// Gateway's port.
#[inline]
fn listener_filters<'a, R: RoutableRequest>(
    resolved: &'a ResolvedDestination,
    request: &R,
) -> Option<(&'a Arc<[ListenerFilter]>, EndpointSetId)> {
    let ResolvedDestination::Service { service, port } = resolved else {
        return None;
    };
    let port = &service.ports[*port];
    let routes = service.routes.as_ref()?;
    let filters = routes.listener_filters(port.port, request.host())?;
    Some((filters, port.slot))
}

/// Admits bytes that are not requests. Their target is the destination's own endpoint set, or what
/// the routes of a Gateway's listener select.
///
/// # Errors
/// A limit is reached, or the service does not exist. The target is included for metrics.
pub(crate) fn connection(
    worker: &Worker,
    session: &ClientSession,
) -> Result<RoutedRequest, (ProxyError, RequestTarget)> {
    let (snapshot, resolved) = session.resolve(worker).map_err(|fault| (fault, None))?;
    let view = resolved
        .direct_endpoint(&worker.upstreams, &snapshot)
        .ok_or((ProxyError::NoService, None))?;
    let admission =
        admit(worker, session, &resolved).map_err(|fault| (fault, Some((view.clone(), None))))?;
    // The listener may have changed since it accepted the connection: a client takes up to some ten
    // seconds for its header and its handshake. Later changes are compared with this version.
    if !is_relayed(worker, session) {
        return Err((ProxyError::NoRoute, Some((view, None))));
    }
    let placed = match &*resolved {
        // A Gateway has no endpoints of its own.
        ResolvedDestination::Service { service, .. } if is_gateway_service(&service.names.key) => {
            let name = session.principal.server_name.as_deref();
            let connection = OpaqueConnection(name.unwrap_or_default());
            let (routed, _, _) = decide(worker, (session, &snapshot), &resolved, &connection, None)
                .map_err(|fault| (fault, Some((view, None))))?;
            (routed, FilterChain::default(), None)
        }
        _ => (view, FilterChain::default(), None),
    };
    Ok(RoutedRequest::new(
        session,
        &snapshot,
        placed,
        resolved,
        Some(admission),
    ))
}

/// Returns whether bytes that are not requests are still relayed for a session: a Gateway has the
/// listener and a route for them. Another service's Termination would accept the connection; other
/// destinations have none.
pub(crate) fn is_relayed(worker: &Worker, session: &ClientSession) -> bool {
    let Destination::Service(key, _) = &session.destination else {
        return true;
    };
    let is_gateway = is_gateway_service(key);
    let Ok((_, resolved)) = session.resolve(worker) else {
        return !is_gateway;
    };
    if !is_gateway {
        return !is_of_earlier_listener(session, &resolved);
    }
    let ResolvedDestination::Service { service, port } = &*resolved else {
        return false;
    };
    let name = session.principal.server_name.as_deref();
    let connection = OpaqueConnection(name.unwrap_or_default());
    let port = &service.ports[*port];
    let is_accepted = match port.termination.as_deref() {
        Some(PortTermination::Relay(listeners)) if session.tls => {
            !listeners.passes_through(name) && session.principal.is_kept_by(listeners.clients(name))
        }
        Some(PortTermination::Relay(listeners)) => listeners.passes_through(name),
        _ => !session.tls && port.protocol == AppProtocol::Tcp,
    };
    let is_accepted = is_accepted && port.is_proxied == session.balancer.is_some();
    let routes = service.routes.as_ref().filter(|_| is_accepted);
    routes.is_some_and(|routes| {
        let (outcome, _) = routes.decide(port.port, &connection, worker.random());
        outcome != RouteOutcome::Nowhere
    })
}

/// Checks the tenant, then admits the request within the limits of its tenant and the worker.
fn admit(
    worker: &Worker,
    session: &ClientSession,
    resolved: &ResolvedDestination,
) -> Result<RequestPermit, ProxyError> {
    // Lookups already stay inside the tenant. The check is repeated here, because an error would
    // expose one tenant's service to another.
    if resolved.tenant() != session.account.tenant.as_str() {
        return Err(ProxyError::NoService);
    }
    session.establish();
    worker.limits.request(&session.account)
}

/// True if the destination's listener or Termination would not have accepted the session's
/// connection: it is older than they are.
fn is_of_earlier_listener(session: &ClientSession, resolved: &ResolvedDestination) -> bool {
    let ResolvedDestination::Service { service, port } = resolved else {
        return false;
    };
    let port = &service.ports[*port];
    // Its client is not known, or it is one that did not have to be named.
    if port.is_proxied != session.balancer.is_some() {
        return true;
    }
    match port.termination.as_deref() {
        Some(PortTermination::Gateway(listeners)) => {
            let name = session.principal.server_name.as_deref();
            !session.tls || !session.principal.is_kept_by(listeners.clients(name))
        }
        // Requests cannot be read of connections that are relayed.
        Some(PortTermination::Passthrough | PortTermination::Relay(_)) => true,
        Some(PortTermination::Service(view)) => !session.is_kept_by(view),
        None => port.protocol == AppProtocol::Tcp && is_gateway_service(&service.names.key),
    }
}

/// True if a request on a connection with TLS must come over another connection.
#[cold]
fn is_misdirected<R: RoutableRequest>(
    session: &ClientSession,
    resolved: &ResolvedDestination,
    request: &R,
) -> bool {
    let ResolvedDestination::Service { service, port } = resolved else {
        return false;
    };
    let (port, name) = (
        service.ports[*port].port,
        session.principal.server_name.as_deref(),
    );
    let routes = service.routes.as_ref();
    routes.is_some_and(|routes| routes.is_misdirected(port, name, request.host()))
}

/// A request with what the gateway knows of its client, for the few services whose rules ask.
struct OfClient<'a, R> {
    request: &'a R,
    session: &'a ClientSession,
    /// The client's workload, if it is known.
    workload: Option<&'a WorkloadView>,
    /// The path in its normal form, if it was sent in another one.
    path: Option<&'a str>,
}

impl<R: RoutableRequest> RoutableRequest for OfClient<'_, R> {
    fn host(&self) -> &[u8] {
        self.request.host()
    }
    fn method(&self) -> &[u8] {
        self.request.method()
    }
    fn path(&self) -> &[u8] {
        self.path.map_or(self.request.path(), str::as_bytes)
    }
    fn query(&self) -> Option<&[u8]> {
        self.request.query()
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        self.request.header(name, visit);
    }
    fn client_attribute(&self, name: &str) -> Option<&[u8]> {
        let principal = &self.session.principal;
        match ClientAttribute::of_name(name)? {
            // As for `x-forwarded-proto`: what a client claims of its scheme proves nothing.
            ClientAttribute::Scheme => Some(self.session.scheme().as_bytes()),
            ClientAttribute::SourceNamespace => principal.own_namespace().map(str::as_bytes),
            ClientAttribute::SourceLabel(key) => {
                let value = self.workload?.labels.get(key)?;
                Some(value.as_bytes())
            }
        }
    }
}

/// Returns the workload that has the client's address, if the client proved the workload's identity. So
/// nobody gets the labels of another account's workload, and plaintext has no labels.
#[cold]
fn client_workload<'s>(
    session: &ClientSession,
    snapshot: &'s Snapshot,
) -> Option<&'s WorkloadView> {
    session.principal.own_namespace()?;
    let tenant = snapshot.tenant(session.account.tenant.as_str())?;
    let workload = tenant.workload_at(session.client.ip())?;
    let proved = session.principal.spiffe_id();
    let mut identities = workload.identity.iter();
    identities
        .any(|identity| identity.to_string() == proved)
        .then_some(&**workload)
}

/// Returns how a client is routed at a port, if its namespace has routes of its own there.
#[cold]
fn consumer_of<'p>(session: &ClientSession, port: &'p PortView) -> Option<&'p ConsumerPort> {
    ConsumerPort::find(&port.consumers, session.principal.own_namespace()?)
}

/// Returns what the rules of a port do with a request, and the rule that decides: a rule for the
/// client's namespace, if it has any.
fn find_rule<'r, R: RoutableRequest>(
    worker: &Worker,
    (session, snapshot): (&ClientSession, &Snapshot),
    routes: &'r ServiceRoutes,
    (port, consumer): (&PortView, Option<&ConsumerPort>),
    request: &R,
) -> (RouteOutcome, Option<MatchedRule<'r>>) {
    let (by_path, by_client) = match consumer {
        None => (port.routed_by_path, port.routed_by_client),
        Some(own) => (own.routed_by_path, own.routed_by_client),
    };
    // Two readings of one path must not lead to different routes. The endpoint gets the path as it
    // was sent.
    let normal = if by_path {
        routing_path(request.path())
    } else {
        None
    };
    let random = worker.random();
    match &normal {
        _ if by_client => {
            let path = normal.as_deref();
            let request = OfClient {
                request,
                session,
                workload: client_workload(session, snapshot),
                path,
            };
            routes.decide_for(consumer, port.port, &request, random)
        }
        None => routes.decide_for(consumer, port.port, request, random),
        Some(path) => {
            let request = AtPath { request, path };
            routes.decide_for(consumer, port.port, &request, random)
        }
    }
}

/// Returns the endpoint set for a request, and what its rule asks for.
fn decide<R: RoutableRequest>(
    worker: &Worker,
    (session, snapshot): (&ClientSession, &Snapshot),
    resolved: &ResolvedDestination,
    request: &R,
    texts: Option<&mut Box<LogFields>>,
) -> Result<RoutePlacement, ProxyError> {
    // A pod that is dialled by its own address has no routes.
    let ResolvedDestination::Service { service, port } = resolved else {
        return resolved
            .direct_endpoint(&worker.upstreams, snapshot)
            .map(|view| (view, FilterChain::default(), None))
            .ok_or(ProxyError::NoService);
    };
    let port: &PortView = &service.ports[*port];
    // The only cost for services without such routes, which are nearly all.
    let consumer = match port.consumers.is_empty() {
        true => None,
        false => consumer_of(session, port),
    };
    let is_routed = port.routed || consumer.is_some();
    let mut matched = None;
    let (slot, filters) = match &service.routes {
        Some(routes) if is_routed => {
            let (outcome, rule) = find_rule(
                worker,
                (session, snapshot),
                routes,
                (port, consumer),
                request,
            );
            if let (Some(texts), Some(rule)) = (texts, rule) {
                texts.route = rule.rule.key.to_string();
            }
            match outcome {
                RouteOutcome::Target(target) => {
                    // Most rules have no filters; their requests need no counted reference.
                    if target.filters.reads_rule() {
                        matched = rule.map(|rule| {
                            routes.filters(rule, Some(target), request, || worker.random())
                        });
                    }
                    (target.slot, target.filters)
                }
                RouteOutcome::Answer => {
                    matched =
                        rule.map(|rule| routes.filters(rule, None, request, || worker.random()));
                    let filters = rule.map_or(FilterChain::default(), |rule| {
                        FilterChain::of_authorizer(rule.rule)
                    });
                    (port.slot, FilterChain::of_answer().with(filters))
                }
                RouteOutcome::Refuse { status, reason } => {
                    return Err(ProxyError::Route { status, reason });
                }
                RouteOutcome::Nowhere => return Err(ProxyError::NoRoute),
            }
        }
        // Without rules for the port, requests go to the service's own endpoints.
        _ => (port.slot, FilterChain::default()),
    };
    let is_preflight = matched.as_ref().is_some_and(|it| it.preflight().is_some());
    let filters = if is_preflight {
        filters.with(FilterChain::of_preflight())
    } else {
        filters
    };
    worker
        .upstreams
        .view(snapshot, slot)
        .map(|view| (view, filters, matched))
        .ok_or(ProxyError::NoService)
}
