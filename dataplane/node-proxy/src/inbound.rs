//! Path of an inbound tunnel: accept (in [`crate::accept`]) → establish → permit → connect →
//! respond → copy → close.
//!
//! [`crate::routing`] decides on admission.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use canal_hbone::{CloseReport, ConnectResult, IncomingConnect, ServerConfig};
use canal_model::identity::{VerifiedPeer, gateway_identity};
use canal_net::sys;
use canal_runtime::drain::DrainWatcher;
use canal_runtime::limits::Permit;
use canal_tls::MtlsStream;
use canal_wire::hbone::{BAGGAGE, Baggage, FORWARDED, SOURCE, forwarded_for};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::net::TcpStream;

use crate::authorization::{AuthorizationRefusal, ConnectionSource};
use crate::delivery;
use crate::open_connections::OpenConnectionHandle;
use crate::outbound::finish;
use crate::pod_context::PodContext;
use crate::refusal::NodeRefusal;
use crate::routing::{AdmittedConnection, TunnelClient, decide_inbound};
use crate::telemetry::{CUT, EndpointLabels, FlowRecord, RESET, Reporter};
use crate::worker::WorkerLocal;

/// Addresses of an HBONE connection, which its tunnels share.
#[derive(Debug, Clone, Copy)]
struct TunnelAddresses {
    /// Remote address of the peer's socket.
    peer: SocketAddr,
    /// The pod's address that the peer dialed.
    dialled: SocketAddr,
}

/// Serves one HBONE connection from its accept to its end.
pub(crate) async fn establish(
    local: Rc<WorkerLocal>,
    context: Arc<PodContext>,
    tcp: TcpStream,
    peer: SocketAddr,
    drain: DrainWatcher,
) {
    let refuse = |reason: NodeRefusal, why: &str| {
        local.records.refused(
            Reporter::Destination,
            reason,
            peer,
            None,
            &context.labels.load(),
            why,
        );
    };
    // The connection counts first among the unauthenticated ones, where the oldest gives way, and
    // then among all.
    let unauthenticated = context.unauthenticated.enter();
    let Ok(dialled) = tcp.local_addr() else {
        return refuse(
            NodeRefusal::HandshakeFailed,
            "the connection has already ended",
        );
    };
    let established = tokio::select! {
        established = authenticate(&context, tcp) => established,
        () = unauthenticated.displaced() => Err((NodeRefusal::ConnectionLimit, "unauthenticated HBONE connections: closed in favour of newer connections".into())),
        // Nothing has been admitted yet, so no end of a connection is recorded.
        () = drain.forced() => return,
    };
    let (_permit, tls, peer_identity) = match established {
        Ok(established) => established,
        Err((reason, why)) => return refuse(reason, &why),
    };
    drop(unauthenticated);
    let ends = TunnelAddresses { peer, dialled };
    let (local_, context_, drain_) = (local.clone(), context.clone(), drain.clone());
    let on_request = move |connect: ConnectResult| match connect {
        Ok(incoming) => local_.spawn(tunnel(
            local_.clone(),
            context_.clone(),
            incoming,
            ends,
            drain_.clone(),
        )),
        Err(why) => {
            let (side, reason) = (Reporter::Destination, NodeRefusal::BadRequest);
            local_.records.refused(
                side,
                reason,
                peer,
                Some(dialled),
                &context_.labels.load(),
                why,
            );
        }
    };
    // Bytes of this pod's tunnels count for its tenant's share of the process's buffers.
    let budget = local.shared.buffer_budget(&context.pod.load().tenant);
    let config = ServerConfig {
        buffer_budget: Some(budget),
        ..ServerConfig::default()
    };
    // Peers may end a connection at any time, so this is no warning.
    if let Err(e) =
        canal_hbone::serve(tls, peer_identity, &config, &local.hbone, drain, on_request).await
    {
        tracing::debug!(%peer, %e, "node: an HBONE connection ended");
    }
}

/// Authenticates the peer within the pod's limit of connections. An error is the refusal with its
/// text.
async fn authenticate(
    context: &PodContext,
    tcp: TcpStream,
) -> Result<(Permit, MtlsStream<TcpStream>, VerifiedPeer), (NodeRefusal, String)> {
    let permit = context.hbone.take().ok_or_else(|| {
        (
            NodeRefusal::ConnectionLimit,
            "HBONE connections".to_string(),
        )
    })?;
    // A node that has just started gets its first snapshot soon.
    let identity = context.identity().await.ok_or_else(|| {
        (
            NodeRefusal::TenantUnknown,
            "no identity in time".to_string(),
        )
    })?;
    let (tls, peer_identity) = identity
        .server
        .accept(tcp)
        .await
        .map_err(|e| (NodeRefusal::HandshakeFailed, e.to_string()))?;
    Ok((permit, tls, peer_identity))
}

/// Carries one tunnel from its CONNECT to its end. If the tunnel is lost, the application's
/// connection is reset: a FIN would look like the orderly end of the client's bytes.
async fn tunnel(
    local: Rc<WorkerLocal>,
    context: Arc<PodContext>,
    mut incoming: IncomingConnect,
    ends: TunnelAddresses,
    drain: DrainWatcher,
) {
    let started = Instant::now();
    let peer = incoming.peer.clone();
    let source_address = source_address(&incoming.headers, &peer, ends.peer);
    let addresses = (source_address, ends.dialled);
    let (admission, mut open) = match permit(&local, &context, &incoming, ends, &peer) {
        Ok(permitted) => permitted,
        Err(AuthorizationRefusal { refusal, why, .. }) => {
            return refuse(&local, &context, incoming, refusal, addresses, &why);
        }
    };
    // After the authorization, so that refused peers occupy none of the pod's tunnels.
    let Some(_permit) = context.inbound.take() else {
        let limit = NodeRefusal::ConnectionLimit;
        return refuse(&local, &context, incoming, limit, addresses, "tunnels");
    };
    let flow = flow(
        &incoming,
        &peer,
        &context,
        &admission,
        source_address,
        ends.dialled,
        started,
    );
    let meter = local.records.count_opened(&flow);
    let connected = tokio::select! {
        connected = delivery::dial(&context, admission.target, admission.client, ends.peer.ip()) => connected,
        () = std::future::poll_fn(|cx| incoming.poll_abandoned(cx)) => {
            return local.records.closed(&flow, &meter, Some((&RESET, "the peer closed the connection")));
        }
        no = open.over() => {
            let (fault, why) = local.records.cut(&no);
            incoming.refuse(no.refusal.status());
            return local.records.closed(&flow, &meter, Some((&fault, &why)));
        }
        () = drain.forced() => return local.records.closed(&flow, &meter, Some((&CUT, ""))),
    };
    let mut app = match connected {
        Ok(app) => app,
        Err(no) => {
            incoming.refuse(no.refusal.status());
            let fault = no.refusal.into();
            return local.records.closed(&flow, &meter, Some((&fault, &no.why)));
        }
    };
    // The client asks how many bytes the application received, to know what it may send again.
    let reports = CloseReport::is_requested(&incoming.headers);
    match incoming.accept(answer(&flow.destination)) {
        Ok(stream) if reports => {
            let (mut tunnel, mut app) = canal_hbone::exchanges::reporting(stream, app);
            finish(
                &local,
                &flow,
                &mut tunnel,
                &mut app,
                &meter,
                &drain,
                Some(&mut open),
            )
            .await;
        }
        Ok(mut stream) => {
            finish(
                &local,
                &flow,
                &mut stream,
                &mut app,
                &meter,
                &drain,
                Some(&mut open),
            )
            .await
        }
        Err(e) => {
            sys::reset_on_close(&app);
            local
                .records
                .closed(&flow, &meter, Some((&RESET, &e.to_string())));
        }
    }
}

/// Refuses a tunnel before it is connected, and records the refusal with its source and its dialled
/// address.
fn refuse(
    local: &WorkerLocal,
    context: &PodContext,
    incoming: IncomingConnect,
    reason: NodeRefusal,
    (source, dialled): (SocketAddr, SocketAddr),
    why: &str,
) {
    incoming.refuse(reason.status());
    local.records.refused(
        Reporter::Destination,
        reason,
        source,
        Some(dialled),
        &context.labels.load(),
        why,
    );
}

/// Decides on a tunnel; an admitted one is registered at once, so that no policy change is missed.
fn permit(
    local: &WorkerLocal,
    context: &Arc<PodContext>,
    incoming: &IncomingConnect,
    ends: TunnelAddresses,
    peer: &VerifiedPeer,
) -> Result<(AdmittedConnection, OpenConnectionHandle), AuthorizationRefusal> {
    let (view, pod, policy) = (
        local.shared.view.load(),
        context.pod.load(),
        context.policy.load_full(),
    );
    // A value that is not text becomes empty and is refused, because it is not an identity.
    let stated_identity = incoming
        .headers
        .get(SOURCE)
        .map(|v| v.to_str().unwrap_or_default());
    // No identity depends on the stated address, so an unreadable one counts as not stated.
    let stated_address = incoming
        .headers
        .get(FORWARDED)
        .and_then(|v| v.to_str().ok())
        .and_then(forwarded_for);
    let caller = TunnelClient {
        peer: &peer.identity,
        address: ends.peer.ip(),
        forwarded: (stated_identity, stated_address),
    };
    let decided = decide_inbound(
        &view,
        &pod,
        &policy,
        ends.dialled.ip(),
        &incoming.authority,
        &caller,
    );
    local.records.record_authorization(
        &pod,
        &policy,
        decided.as_ref().ok().map(|a| &a.query),
        decided.as_ref().err(),
    );
    decided.map(|admission| {
        let open = local
            .open
            .register(context, admission.query.clone(), policy);
        (admission, open)
    })
}

/// Returns the client's address that a gateway states, or the socket's: statements of other peers
/// are ignored.
fn source_address(headers: &HeaderMap, peer: &VerifiedPeer, socket: SocketAddr) -> SocketAddr {
    let is_gateway = peer.identity == gateway_identity(peer.identity.trust_domain.clone());
    let forwarded = headers
        .get(FORWARDED)
        .and_then(|v| v.to_str().ok())
        .and_then(forwarded_for);
    forwarded.filter(|_| is_gateway).unwrap_or(socket)
}

fn flow(
    incoming: &IncomingConnect,
    peer: &VerifiedPeer,
    context: &PodContext,
    admission: &AdmittedConnection,
    source_address: SocketAddr,
    dialled: SocketAddr,
    started: Instant,
) -> FlowRecord {
    let baggage = incoming
        .headers
        .get(BAGGAGE)
        .and_then(|v| v.to_str().ok())
        .map(Baggage::decode)
        .unwrap_or_default();
    FlowRecord {
        reporter: Reporter::Destination,
        source: Arc::new(EndpointLabels::of_baggage(baggage, &peer.identity)),
        destination: context.labels.load_full(),
        service: admission.service.clone(),
        mutual_tls: true,
        source_address,
        destination_address: dialled,
        authority: incoming.authority.to_string(),
        is_direct: matches!(admission.query.source, ConnectionSource::Proven(_)),
        started,
    }
}

/// Returns the headers of the 200 response, which describe the destination.
fn answer(destination: &EndpointLabels) -> HeaderMap {
    let mut h = HeaderMap::with_capacity(1);
    if let Ok(value) = HeaderValue::from_str(&destination.baggage().encode()) {
        h.insert(HeaderName::from_static(BAGGAGE), value);
    }
    h
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_gateway_may_forward_for_another_address() {
        let peer = |id: &str| VerifiedPeer {
            tenant: "alpha".parse().unwrap(),
            identity: id.parse().unwrap(),
        };
        let socket = "10.0.0.9:1".parse().unwrap();
        let mut h = HeaderMap::new();
        h.insert(FORWARDED, "for=\"10.0.0.1:4711\"".parse().unwrap());
        for (peer_identity, headers, want) in [
            (
                "spiffe://alpha.example/ns/canal-system/sa/gateway",
                &h,
                "10.0.0.1:4711",
            ),
            ("spiffe://alpha.example/ns/b/sa/c", &h, "10.0.0.9:1"),
            (
                "spiffe://alpha.example/ns/canal-system/sa/gateway",
                &HeaderMap::new(),
                "10.0.0.9:1",
            ),
        ] {
            assert_eq!(
                source_address(headers, &peer(peer_identity), socket),
                want.parse().unwrap(),
                "{peer_identity}"
            );
        }
    }
}
