//! Path of a captured connection: accept (in [`crate::accept`]) → origin → decide → dial → copy →
//! close.
//!
//! [`crate::routing`] and [`crate::gateways`] make the decisions; this module executes them.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use canal_hbone::{ConnectAuthority, HboneError, HboneStream, OpenTunnel, TunnelTarget};
use canal_model::identity::gateway_identity;
use canal_model::ids::Generation;
use canal_net::copy::{self, CopyEnd, Leg, Meter};
use canal_net::sys::{self, ConnectOptions};
use canal_runtime::drain::DrainWatcher;
use canal_wire::hbone::{BAGGAGE, FORWARDED, PROXY_MARK, TRACEPARENT, forwarded};
use futures::FutureExt;
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::io::Interest;
use tokio::net::TcpStream;

use crate::direct::{
    DIRECT_ATTEMPTS_MAX, DirectFailure, DirectPeers, decide_direct_failure, decide_peer,
};
use crate::gateways::{
    ATTEMPTS_MAX, FailureAttribution, GatewayCandidate, GatewayEndpoint, GatewayStreamGuard,
    attribute_failure, decide_order, steering,
};
use crate::open_connections::OpenConnectionHandle;
use crate::pod::LocalPod;
use crate::pod_context::{IDENTITY_TIMEOUT, PodContext, PodIdentity};
use crate::refusal::NodeRefusal;
use crate::routing::{OutboundRoute, decide_outbound};
use crate::snapshot::NodeSnapshot;
use crate::telemetry::{CUT, ConnectionFailure, EndpointLabels, FlowRecord, RESET, Reporter};
use crate::worker::WorkerLocal;

/// Upstream side of a captured connection.
enum OutboundStream {
    Tunnel(HboneStream, GatewayStreamGuard),
    /// A tunnel to the node of the destination pod, without a gateway.
    Direct(HboneStream, GatewayStreamGuard),
    Plain(TcpStream),
}

/// Reason why there is no upstream connection, with the log's text.
#[derive(Debug)]
struct OutboundError {
    fault: ConnectionFailure,
    why: String,
}

fn no_upstream<T>(refusal: NodeRefusal, why: impl ToString) -> Result<T, OutboundError> {
    Err(OutboundError {
        fault: refusal.into(),
        why: why.to_string(),
    })
}

/// Refuses a captured connection, and records the refusal with its source and destination.
fn refuse(
    local: &WorkerLocal,
    context: &PodContext,
    reason: NodeRefusal,
    (source, destination): (SocketAddr, Option<SocketAddr>),
    client: TcpStream,
) {
    local.records.refused(
        Reporter::Source,
        reason,
        source,
        destination,
        &context.labels.load(),
        "",
    );
    sys::reset_on_close(&client);
}

/// Carries one captured connection from its accept to its end.
pub(crate) async fn carry(
    local: Rc<WorkerLocal>,
    context: Arc<PodContext>,
    mut client: TcpStream,
    peer: SocketAddr,
    drain: DrainWatcher,
) {
    let started = Instant::now();
    let refuse = |reason, destination, client| {
        refuse(&local, &context, reason, (peer, destination), client);
    };
    let Some(origin) = context.origin(&client, peer) else {
        return refuse(NodeRefusal::OriginUnknown, None, client);
    };
    let Some(_permit) = context.outbound.take() else {
        return refuse(NodeRefusal::ConnectionLimit, Some(origin), client);
    };
    let decided = tokio::select! {
        // A decision that is ready counts, even if the client has closed meanwhile: its log names
        // the destination.
        biased;
        decided = decide(&local, &context, origin) => decided,
        // `decide` waits only for the first snapshot, so a connection that ends meanwhile has an
        // unknown tenant.
        () = wait_for_reset(&client) => Err(NodeRefusal::TenantUnknown),
        () = drain.forced() => Err(NodeRefusal::TenantUnknown),
    };
    let (view, pod, route) = match decided {
        Ok(decided) => decided,
        Err(reason) => return refuse(reason, Some(origin), client),
    };
    // Loaded after the decision: if the connection waited for the tenant, only now the labels
    // contain the identity.
    let labels = context.labels.load_full();
    let mut flow = flow(
        &route,
        &labels,
        &view,
        &pod,
        source_address(&pod, origin, peer),
        origin,
        started,
    );
    let meter = local.records.count_opened(&flow);
    let dialled = tokio::select! {
        dialled = dial(&local, &context, &view, &pod, &route, &flow) => dialled,
        () = wait_for_reset(&client) => return local.records.closed(&flow, &meter, Some((&RESET, "the application closed the connection"))),
        () = drain.forced() => return local.records.closed(&flow, &meter, Some((&CUT, ""))),
    };
    match dialled {
        Ok(OutboundStream::Tunnel(mut tunnel, _hold)) => {
            finish(
                &local,
                &flow,
                &mut client,
                &mut tunnel,
                &meter,
                &drain,
                None,
            )
            .await
        }
        Ok(OutboundStream::Direct(mut tunnel, _hold)) => {
            // Only the dial decides between the direct path and a gateway.
            flow.is_direct = true;
            finish(
                &local,
                &flow,
                &mut client,
                &mut tunnel,
                &meter,
                &drain,
                None,
            )
            .await;
        }
        Ok(OutboundStream::Plain(mut plain)) => {
            finish(&local, &flow, &mut client, &mut plain, &meter, &drain, None).await
        }
        Err(OutboundError { fault, why }) => {
            sys::reset_on_close(&client);
            local.records.closed(&flow, &meter, Some((&fault, &why)));
        }
    }
}

/// Decides with the present snapshot. If there is none yet and the route depends on it, waits for
/// the first one.
async fn decide(
    local: &WorkerLocal,
    context: &PodContext,
    origin: SocketAddr,
) -> Result<(Arc<NodeSnapshot>, Arc<LocalPod>, OutboundRoute), NodeRefusal> {
    let by_now = || {
        let (view, pod) = (local.shared.view.load_full(), context.pod.load_full());
        decide_outbound(&view, &pod, origin).map(|route| (view, pod, route))
    };
    let has_begun = local.shared.view.load().generation != Generation::default();
    match by_now() {
        Err(NodeRefusal::TenantUnknown) if !has_begun => {
            // A pod has an identity once its tenant is known.
            context.identity().await;
            by_now()
        }
        decided => decided,
    }
}

/// Copies until both sides have ended, and records the end. All paths use it: `a` is the downstream
/// side; `open` ends the connection when policies no longer allow it.
pub(crate) async fn finish<A: Leg, B: Leg>(
    local: &WorkerLocal,
    flow: &FlowRecord,
    a: &mut A,
    b: &mut B,
    meter: &Meter,
    drain: &DrainWatcher,
    open: Option<&mut OpenConnectionHandle>,
) {
    let over = async {
        match open {
            Some(open) => open.over().await,
            None => std::future::pending().await,
        }
    };
    let end = tokio::select! {
        end = copy::both(a, b, meter, None) => Ok(end),
        no = over => Err(local.records.cut(&no)),
        () = drain.forced() => Err((CUT, String::new())),
    };
    match end {
        Ok(CopyEnd::Complete) => local.records.closed(flow, meter, None),
        Ok(CopyEnd::Broken { side, error }) => {
            local
                .records
                .closed(flow, meter, Some((&RESET, &format!("{side:?}: {error}"))))
        }
        Ok(CopyEnd::Idle(limit)) => {
            local
                .records
                .closed(flow, meter, Some((&CUT, &format!("idle for {limit:?}"))))
        }
        Err((fault, why)) => {
            a.abort();
            b.abort();
            local.records.closed(flow, meter, Some((&fault, &why)));
        }
    }
}

/// Resolves when the client resets the connection. A half-close does not count: the client may
/// still read. Neither does a reset after bytes that are still unread: the bytes are forwarded, and
/// then the reset.
pub(crate) async fn wait_for_reset(client: &TcpStream) {
    loop {
        match client.ready(Interest::ERROR).await {
            Ok(ready) if ready.is_error() => {
                if matches!(client.peek(&mut [0]).now_or_never(), Some(Ok(1..))) {
                    return std::future::pending().await;
                }
                return;
            }
            Ok(_) => tokio::task::yield_now().await,
            Err(_) => return,
        }
    }
}

/// Returns the source address that others know: the pod's own, not the loopback address that
/// capture introduced.
fn source_address(pod: &LocalPod, origin: SocketAddr, peer: SocketAddr) -> SocketAddr {
    let family = origin.ip().to_canonical().is_ipv4();
    let own = pod
        .ips
        .iter()
        .find(|ip| ip.is_ipv4() == family)
        .or(pod.ips.first());
    SocketAddr::new(own.copied().unwrap_or(peer.ip()), peer.port())
}

fn flow(
    route: &OutboundRoute,
    labels: &Arc<EndpointLabels>,
    view: &NodeSnapshot,
    pod: &LocalPod,
    source: SocketAddr,
    origin: SocketAddr,
    started: Instant,
) -> FlowRecord {
    let (service, mesh) = match route {
        OutboundRoute::Mesh { service, .. } | OutboundRoute::Direct { service, .. } => {
            (service.clone(), true)
        }
        OutboundRoute::Own(_) | OutboundRoute::Passthrough(_) => (None, false),
    };
    let destination = match (route, view.tenant(&pod.tenant)) {
        // The pod is its own destination.
        (OutboundRoute::Own(_), _) => labels.clone(),
        (OutboundRoute::Direct { peers, .. }, _) => {
            // The pod is selected later, so only labels that all candidates share are known.
            let common = &peers.common;
            Arc::new(EndpointLabels {
                workload: common.workload.clone(),
                namespace: common.namespace.clone(),
                principal: common.principal.clone(),
                zone: common.zone.clone(),
                ..EndpointLabels::default()
            })
        }
        (OutboundRoute::Mesh { .. }, Some(t)) => {
            // The peer of this hop is the gateway; the gateway reports the endpoint itself.
            let principal = gateway_identity(t.tenant.trust_domain.clone()).to_string();
            Arc::new(EndpointLabels {
                principal,
                ..EndpointLabels::default()
            })
        }
        // A destination outside the mesh has no workload labels. A route of the mesh whose tenant is
        // gone fails at the dial.
        _ => Arc::default(),
    };
    FlowRecord {
        reporter: Reporter::Source,
        source: labels.clone(),
        destination,
        service,
        mutual_tls: mesh,
        source_address: source,
        destination_address: origin,
        // Only CONNECT has an authority.
        authority: if mesh {
            origin.to_string()
        } else {
            String::new()
        },
        is_direct: false,
        started,
    }
}

async fn dial(
    local: &WorkerLocal,
    context: &PodContext,
    view: &NodeSnapshot,
    pod: &LocalPod,
    route: &OutboundRoute,
    flow: &FlowRecord,
) -> Result<OutboundStream, OutboundError> {
    match route {
        OutboundRoute::Own(to) | OutboundRoute::Passthrough(to) => {
            let options = ConnectOptions {
                mark: Some(PROXY_MARK),
                // Only a probe detects that a peer on this kernel has closed with bytes unread.
                local: matches!(route, OutboundRoute::Own(_)),
                ..ConnectOptions::default()
            };
            match sys::connect(Some(&context.netns), *to, &options).await {
                Ok(plain) => Ok(OutboundStream::Plain(plain)),
                Err(e) => no_upstream(NodeRefusal::ConnectFailed, e),
            }
        }
        OutboundRoute::Mesh { authority, service }
        | OutboundRoute::Direct {
            authority, service, ..
        } => {
            // The decision found the tenant in this snapshot; without it the connection fails
            // closed.
            let Some(tenant) = view.tenant(&pod.tenant) else {
                return no_upstream(NodeRefusal::TenantUnknown, "");
            };
            let Some(identity) = identity(context).await else {
                return no_upstream(NodeRefusal::NoIdentity, "no certificate in time");
            };
            if let OutboundRoute::Direct { peers, .. } = route {
                match dial_direct(local, context, peers, pod, &identity, flow).await {
                    Some(tunnel) => return Ok(tunnel),
                    // No pod answered 200, so no byte was delivered, and a gateway can carry the
                    // whole connection.
                    None => local.records.direct_fallback(),
                }
            }
            let entrances = tenant.entrances(service.as_ref().map(|s| &s.key));
            dial_tunnel(
                local,
                context,
                entrances,
                pod,
                &identity,
                &ConnectAuthority::Address(*authority),
                headers(flow),
            )
            .await
        }
    }
}

/// Returns the pod's identity, and waits for its certificate if the key is on this node; `None`:
/// not in time.
async fn identity(context: &PodContext) -> Option<Arc<PodIdentity>> {
    let found = context.identity().await?;
    if let Some(credential) = &found.credential {
        tokio::time::timeout(IDENTITY_TIMEOUT, credential.first())
            .await
            .ok()??;
    }
    Some(found)
}

/// Tries pods of a direct port one after another until one opens the tunnel; `None`: none did, so a
/// gateway must be tried.
async fn dial_direct(
    local: &WorkerLocal,
    context: &PodContext,
    peers: &DirectPeers,
    pod: &LocalPod,
    identity: &PodIdentity,
    flow: &FlowRecord,
) -> Option<OutboundStream> {
    // No pod has this index, so the unused places exclude none.
    let mut tried = [usize::MAX; DIRECT_ATTEMPTS_MAX];
    let dialled = flow.destination_address.ip().to_canonical();
    for attempt in 0..DIRECT_ATTEMPTS_MAX {
        let now = tokio::time::Instant::now();
        let state_of = |at: usize| {
            peers
                .peers
                .get(at)
                .and_then(|peer| peer.address(pod, dialled))
                .map(|a| local.gateways.state_of(a, now))
        };
        let is_avoided = |at: usize| state_of(at).is_some_and(|(_, is_avoided)| is_avoided);
        let streams = |at: usize| state_of(at).map(|(streams, _)| streams);
        let at = decide_peer(
            peers.peers.len(),
            &tried[..attempt],
            streams,
            is_avoided,
            &mut rand::rng(),
            // No pod is left to try, so a gateway carries the connection.
        )?;
        tried[attempt] = at;
        let peer = peers.peers.get(at)?;
        // `decide_peer` skips pods that this pod cannot reach, so there is an address.
        let address = peer.address(pod, dialled)?;
        let target = TunnelTarget {
            source: identity.client.clone(),
            expected: peer.expected.clone(),
            address,
            netns: Some(context.netns.clone()),
            mark: Some(PROXY_MARK),
        };
        let limit = local.shared.attempt_timeouts.attempt;
        let failure = match local
            .pool
            .open_unless_dead(&target, &peers.authority, headers(flow), limit)
            .await
        {
            Ok(OpenTunnel { stream, .. }) => {
                return Some(OutboundStream::Direct(
                    stream,
                    local.gateways.answered(address),
                ));
            }
            Err(e) => decide_direct_failure(&e),
        };
        local.records.direct_failed(failure.name());
        match failure {
            DirectFailure::Unreachable => local.gateways.failed(address, now),
            // The pod refuses, for example during its drain; its address is not at fault.
            DirectFailure::Unavailable => {}
            // A policy may need a gateway, and a local failure would repeat at every pod.
            DirectFailure::Denied | DirectFailure::Own => return None,
        }
    }
    None
}

/// Tries gateways in the decided order until one opens the tunnel or the result is final.
async fn dial_tunnel(
    local: &WorkerLocal,
    context: &PodContext,
    entrances: &[Arc<GatewayEndpoint>],
    pod: &LocalPod,
    identity: &PodIdentity,
    authority: &ConnectAuthority,
    headers: HeaderMap,
) -> Result<OutboundStream, OutboundError> {
    let now = tokio::time::Instant::now();
    let order = decide_order(
        local.gateways.candidates(entrances, pod, now),
        &local.shared.az,
        &mut rand::rng(),
    );
    let attempts = order.len().min(ATTEMPTS_MAX);
    let mut failure = OutboundError {
        fault: NodeRefusal::NoGateway.into(),
        why: format!("{} gateways known", entrances.len()),
    };
    for (n, candidate) in order.iter().take(attempts).enumerate() {
        let target = TunnelTarget {
            source: identity.client.clone(),
            expected: Arc::new([gateway_identity(identity.trust_domain.clone())]),
            address: candidate.address,
            netns: Some(context.netns.clone()),
            mark: Some(PROXY_MARK),
        };
        // The limit of one attempt applies only while another gateway could be tried.
        let limit = (n + 1 < attempts).then_some(local.shared.attempt_timeouts.attempt);
        let answer = local
            .pool
            .open_spread(
                &target,
                steering(candidate, pod),
                authority,
                headers.clone(),
                limit,
            )
            .await;
        match settle(local, candidate, answer) {
            Ok(OpenTunnel { stream, .. }) => {
                return Ok(OutboundStream::Tunnel(
                    stream,
                    local.gateways.answered(candidate.address),
                ));
            }
            // Every other gateway would give the same result.
            Err((no, FailureAttribution::Other)) => return Err(no),
            Err((no, FailureAttribution::Gateway | FailureAttribution::Busy)) => failure = no,
        }
    }
    Err(failure)
}

/// Converts the result of an attempt, and records a failure that is attributed to the gateway.
fn settle(
    local: &WorkerLocal,
    candidate: &GatewayCandidate,
    answer: Result<OpenTunnel, HboneError>,
) -> Result<OpenTunnel, (OutboundError, FailureAttribution)> {
    let error = match answer {
        Ok(opened) => return Ok(opened),
        Err(e) => e,
    };
    let cause = attribute_failure(&error);
    let refusal = if error.status().is_some() {
        NodeRefusal::TunnelRefused
    } else {
        NodeRefusal::GatewayFailed
    };
    let fault = ConnectionFailure {
        flag: error.flag(),
        ..refusal.into()
    };
    if cause == FailureAttribution::Gateway {
        local
            .gateways
            .failed(candidate.address, tokio::time::Instant::now());
    }
    local
        .records
        .gateway_failed(&candidate.entrance.label, cause_name(cause));
    Err((
        OutboundError {
            fault,
            why: error.to_string(),
        },
        cause,
    ))
}

fn cause_name(b: FailureAttribution) -> &'static str {
    match b {
        FailureAttribution::Gateway => "gateway",
        FailureAttribution::Busy => "busy",
        FailureAttribution::Other => "other",
    }
}

/// Returns the headers that describe the source in every CONNECT.
fn headers(flow: &FlowRecord) -> HeaderMap {
    let trace: (u128, u64) = (rand::random(), rand::random());
    let host = flow.service.as_deref().map(|s| s.hostname.as_str());
    let mut h = HeaderMap::with_capacity(3);
    for (name, value) in [
        (BAGGAGE, flow.source.baggage().encode()),
        (FORWARDED, forwarded(flow.source_address, host)),
        (
            TRACEPARENT,
            format!("00-{:032x}-{:016x}-00", trace.0, trace.1),
        ),
    ] {
        // All three headers serve records only, so a value that HTTP cannot carry is left out.
        if let Ok(value) = HeaderValue::from_str(&value) {
            h.insert(HeaderName::from_static(name), value);
        }
    }
    h
}

#[cfg(test)]
mod tests {
    use super::*;

    fn a_flow() -> FlowRecord {
        FlowRecord {
            reporter: Reporter::Source,
            source: Arc::new(EndpointLabels {
                namespace: "b".into(),
                pod: "c-0".into(),
                ..EndpointLabels::default()
            }),
            destination: Arc::default(),
            service: None,
            mutual_tls: true,
            source_address: "10.0.0.1:4711".parse().unwrap(),
            destination_address: "10.96.0.1:80".parse().unwrap(),
            authority: "10.96.0.1:80".into(),
            is_direct: false,
            started: Instant::now(),
        }
    }

    #[test]
    fn a_connect_request_names_its_source() {
        let h = headers(&a_flow());
        assert_eq!(h[BAGGAGE], "k8s.namespace.name=b,k8s.pod.name=c-0");
        assert_eq!(h[FORWARDED], "for=\"10.0.0.1:4711\"");
        let trace = h[TRACEPARENT].to_str().unwrap().to_string();
        let parts: Vec<usize> = trace.split('-').map(str::len).collect();
        assert_eq!(
            (parts, &trace[..3], &trace[53..]),
            (vec![2, 32, 16, 2], "00-", "00")
        );
        assert_ne!(
            headers(&a_flow())[TRACEPARENT],
            trace.as_str(),
            "fresh for each connection"
        );
    }

    #[test]
    fn the_source_is_the_pod_not_the_loopback_end() {
        let text = r#"{"uid":"a/b/c","namespace":"b","name":"c","serviceAccount":"c","netns":"/n","cgroup":"/c","ips":["10.0.0.1","fd00::1"]}"#;
        let pod = LocalPod::parse("f", text.as_bytes()).unwrap();
        for (origin, peer, want) in [
            ("10.96.0.1:80", "127.0.0.1:4711", "10.0.0.1:4711"),
            ("[fd96::1]:80", "[::1]:4711", "[fd00::1]:4711"),
        ] {
            assert_eq!(
                source_address(&pod, origin.parse().unwrap(), peer.parse().unwrap()),
                want.parse().unwrap()
            );
        }
    }

    #[test]
    fn a_missing_upstream_is_a_fault_of_its_own_name() {
        let Err(no) = no_upstream::<()>(NodeRefusal::NoGateway, "") else {
            unreachable!()
        };
        assert_eq!(
            no.fault,
            ConnectionFailure {
                name: "no_gateway",
                flag: "CONNECT",
                refusal: Some(NodeRefusal::NoGateway)
            }
        );
    }
}
