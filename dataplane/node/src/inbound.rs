//! The road of a tunnel that comes in: accept (in [`crate::accept`]) → greet → permit → connect → answer → copy → close. Who may come in is
//! decided in [`crate::decide`].

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use canal_kit::drain::Drain;
use canal_kit::hbone::{self, Asked, Incoming, ServerConfig};
use canal_kit::limits::Permit;
use canal_kit::sys::{self, ConnectOptions};
use canal_kit::tls::Stream;
use canal_model::identity::{Peer, gateway_identity};
use canal_wire::hbone::{BAGGAGE, Baggage, FORWARDED, PROXY_MARK, SOURCE, forwarded_for};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::net::TcpStream;

use crate::authorization::Refused;
use crate::decide::{Admission, Caller, decide_inbound};
use crate::open::Held;
use crate::outbound::finish;
use crate::refusal::Refusal;
use crate::room::Room;
use crate::telemetry::{CUT, Flow, Party, RESET, Reporter};
use crate::worker::Local;

/// A connection's facts that its tunnels share.
#[derive(Debug, Clone, Copy)]
struct Ends {
    /// The peer's socket address.
    peer: SocketAddr,
    /// The pod's address that was dialled.
    dialled: SocketAddr,
}

/// Serves one HBONE connection from its accept to its end.
pub(crate) async fn greet(local: Rc<Local>, room: Arc<Room>, tcp: TcpStream, peer: SocketAddr, drain: Drain) {
    let refuse = |reason: Refusal, why: &str| {
        local.records.refused(Reporter::Destination, reason, peer, None, &room.party.load(), why);
    };
    // First room among those that have not authenticated, of which the oldest gives way; then among all.
    let unauthenticated = room.unauthenticated.enter();
    let Ok(dialled) = tcp.local_addr() else {
        return refuse(Refusal::HandshakeFailed, "the connection is gone already");
    };
    let greeted = tokio::select! {
        greeted = authenticate(&room, tcp) => greeted,
        () = unauthenticated.displaced() => Err((Refusal::ConnectionLimit, "unauthenticated HBONE connections: newer ones came".into())),
        () = drain.forced() => return,
    };
    let (_permit, tls, who) = match greeted {
        Ok(greeted) => greeted,
        Err((reason, why)) => return refuse(reason, &why),
    };
    drop(unauthenticated);
    let ends = Ends { peer, dialled };
    let (local_, room_, drain_) = (local.clone(), room.clone(), drain.clone());
    let on_request = move |asked: Asked| match asked {
        Ok(incoming) => local_.spawn(tunnel(local_.clone(), room_.clone(), incoming, ends, drain_.clone())),
        Err(why) => {
            let (side, reason) = (Reporter::Destination, Refusal::BadRequest);
            local_.records.refused(side, reason, peer, Some(dialled), &room_.party.load(), why);
        }
    };
    if let Err(e) = hbone::serve(tls, who, &ServerConfig::default(), &local.hbone, drain, on_request).await {
        tracing::debug!(%peer, %e, "HBONE connection ended");
    }
}

/// A connection within the pod's limit whose peer has authenticated; or why not.
async fn authenticate(room: &Room, tcp: TcpStream) -> Result<(Permit, Stream<TcpStream>, Peer), (Refusal, String)> {
    let permit = room.hbone.take().ok_or_else(|| (Refusal::ConnectionLimit, "HBONE connections".to_string()))?;
    // A node that has just started is soon told.
    let identity = room.identity().await.ok_or_else(|| (Refusal::TenantUnknown, "no identity in time".to_string()))?;
    let (tls, who) = identity.server.accept(tcp).await.map_err(|e| (Refusal::HandshakeFailed, e.to_string()))?;
    Ok((permit, tls, who))
}

/// Carries one tunnel from its CONNECT to its end.
async fn tunnel(local: Rc<Local>, room: Arc<Room>, mut incoming: Incoming, ends: Ends, drain: Drain) {
    let started = Instant::now();
    let peer = incoming.peer.clone();
    let source_address = source_address(&incoming.headers, &peer, ends.peer);
    let (admission, mut held) = match permit(&local, &room, &incoming, ends, &peer) {
        Ok(permitted) => permitted,
        Err(Refused { refusal, why, .. }) => {
            incoming.refuse(refusal.status());
            return local.records.refused(Reporter::Destination, refusal, source_address, Some(ends.dialled), &room.party.load(), &why);
        }
    };
    let Some(_permit) = room.inbound.take() else {
        incoming.refuse(Refusal::ConnectionLimit.status());
        let reason = Refusal::ConnectionLimit;
        return local.records.refused(Reporter::Destination, reason, source_address, Some(ends.dialled), &room.party.load(), "tunnels");
    };
    let flow = flow(&incoming, &peer, &room, &admission, source_address, ends.dialled, started);
    let meter = local.records.opened(&flow);
    let options = ConnectOptions { mark: Some(PROXY_MARK), local: true, ..ConnectOptions::default() };
    let connected = tokio::select! {
        connected = sys::connect(Some(&room.netns), admission.target, &options) => connected,
        () = std::future::poll_fn(|cx| incoming.poll_abandoned(cx)) => {
            return local.records.closed(&flow, &meter, Some((&RESET, "the peer gave up")));
        }
        no = held.over() => {
            let (fault, why) = local.records.cut(&no);
            incoming.refuse(no.refusal.status());
            return local.records.closed(&flow, &meter, Some((&fault, &why)));
        }
        () = drain.forced() => return local.records.closed(&flow, &meter, Some((&CUT, ""))),
    };
    let mut app = match connected {
        Ok(app) => app,
        Err(e) => {
            incoming.refuse(Refusal::ApplicationDown.status());
            return local.records.closed(&flow, &meter, Some((&Refusal::ApplicationDown.into(), &e.to_string())));
        }
    };
    match incoming.accept(answer(&flow.destination)) {
        Ok(mut stream) => finish(&local, &flow, &mut stream, &mut app, &meter, &drain, Some(&mut held)).await,
        Err(e) => {
            sys::reset_on_close(&app);
            local.records.closed(&flow, &meter, Some((&RESET, &e.to_string())));
        }
    }
}

/// Whether the tunnel may come in; if so, it is held from the same moment on.
fn permit(local: &Local, room: &Arc<Room>, incoming: &Incoming, ends: Ends, peer: &Peer) -> Result<(Admission, Held), Refused> {
    let (view, pod, policy) = (local.shared.view.load(), room.pod.load(), room.policy.load_full());
    // A value that is no text is no identity either.
    let told = incoming.headers.get(SOURCE).map(|v| v.to_str().unwrap_or_default());
    let from = incoming.headers.get(FORWARDED).and_then(|v| v.to_str().ok()).and_then(forwarded_for);
    let caller = Caller { peer: &peer.identity, address: ends.peer.ip(), told: (told, from.map(|a| a.ip())) };
    let decided = decide_inbound(&view, &pod, &policy, ends.dialled.ip(), &incoming.authority, &caller);
    local.records.judged(&pod, &policy, decided.as_ref().ok().map(|a| &a.question), decided.as_ref().err());
    decided.map(|admission| {
        let held = local.open.hold(room, admission.question.clone(), policy);
        (admission, held)
    })
}

/// The application's address where a gateway forwards for it; only a gateway's word is taken.
fn source_address(headers: &HeaderMap, peer: &Peer, socket: SocketAddr) -> SocketAddr {
    let is_gateway = peer.identity == gateway_identity(peer.identity.trust_domain.clone());
    let said = headers.get(FORWARDED).and_then(|v| v.to_str().ok()).and_then(forwarded_for);
    said.filter(|_| is_gateway).unwrap_or(socket)
}

fn flow(
    incoming: &Incoming,
    peer: &Peer,
    room: &Room,
    admission: &Admission,
    source_address: SocketAddr,
    dialled: SocketAddr,
    started: Instant,
) -> Flow {
    let baggage = incoming.headers.get(BAGGAGE).and_then(|v| v.to_str().ok()).map(Baggage::decode).unwrap_or_default();
    Flow {
        reporter: Reporter::Destination,
        source: Arc::new(Party::of_baggage(baggage, &peer.identity)),
        destination: room.party.load_full(),
        service: admission.service.clone(),
        mutual_tls: true,
        source_address,
        destination_address: dialled,
        authority: incoming.authority.to_string(),
        started,
    }
}

/// What the 200 says: who the destination is.
fn answer(destination: &Party) -> HeaderMap {
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
    fn only_a_gateway_may_speak_for_another_address() {
        let peer = |id: &str| Peer { tenant: "alpha".parse().unwrap(), identity: id.parse().unwrap() };
        let socket = "10.0.0.9:1".parse().unwrap();
        let mut h = HeaderMap::new();
        h.insert(FORWARDED, "for=\"10.0.0.1:4711\"".parse().unwrap());
        for (who, headers, want) in [
            ("spiffe://alpha.example/ns/canal-system/sa/gateway", &h, "10.0.0.1:4711"),
            ("spiffe://alpha.example/ns/b/sa/c", &h, "10.0.0.9:1"),
            ("spiffe://alpha.example/ns/canal-system/sa/gateway", &HeaderMap::new(), "10.0.0.9:1"),
        ] {
            assert_eq!(source_address(headers, &peer(who), socket), want.parse().unwrap(), "{who}");
        }
    }
}
