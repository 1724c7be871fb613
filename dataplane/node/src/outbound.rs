//! The road of a captured connection: accept (in [`crate::accept`]) → origin → decide → dial → copy → close. Choices are made in
//! [`crate::decide`] and [`crate::gateways`]; here they are carried out.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use canal_kit::copy::{self, End, Leg, Meter};
use canal_kit::drain::Drain;
use canal_kit::hbone::{Authority, HboneError, HboneStream, Opened, Target};
use canal_kit::sys::{self, ConnectOptions};
use canal_model::identity::gateway_identity;
use canal_model::ids::Generation;
use canal_wire::hbone::{BAGGAGE, FORWARDED, PROXY_MARK, TRACEPARENT, forwarded};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::io::Interest;
use tokio::net::TcpStream;

use crate::decide::{Way, decide_outbound};
use crate::gateways::{ATTEMPT_PATIENCE, ATTEMPTS_MAX, Blame, Candidate, Entrance, StreamHold, decide_blame, decide_order};
use crate::open::Held;
use crate::pod::Pod;
use crate::refusal::Refusal;
use crate::room::{IDENTITY_PATIENCE, Room, RoomIdentity};
use crate::telemetry::{CUT, Fault, Flow, Party, RESET, Reporter};
use crate::view::View;
use crate::worker::Local;

/// The other end of a captured connection.
enum Upstream {
    Tunnel(HboneStream, StreamHold),
    Plain(TcpStream),
}

/// Why there is none, and in what words for the log.
#[derive(Debug)]
struct NoUpstream {
    fault: Fault,
    why: String,
}

fn no_upstream<T>(refusal: Refusal, why: impl ToString) -> Result<T, NoUpstream> {
    Err(NoUpstream { fault: refusal.into(), why: why.to_string() })
}

/// Carries one captured connection from its accept to its end.
pub(crate) async fn carry(local: Rc<Local>, room: Arc<Room>, mut client: TcpStream, peer: SocketAddr, drain: Drain) {
    let started = Instant::now();
    let refuse = |reason: Refusal, destination, client: TcpStream| {
        local.records.refused(Reporter::Source, reason, peer, destination, &room.party.load(), "");
        sys::reset_on_close(&client);
    };
    let Some(origin) = room.origin(&client, peer) else { return refuse(Refusal::OriginUnknown, None, client) };
    let Some(_permit) = room.outbound.take() else { return refuse(Refusal::ConnectionLimit, Some(origin), client) };
    let decided = tokio::select! {
        biased;
        decided = decide(&local, &room, origin) => decided,
        () = gone(&client) => Err(Refusal::TenantUnknown),
        () = drain.forced() => Err(Refusal::TenantUnknown),
    };
    let (view, pod, way) = match decided {
        Ok(decided) => decided,
        Err(reason) => return refuse(reason, Some(origin), client),
    };
    // Not before: whoever waited has a name only now.
    let party = room.party.load_full();
    let flow = flow(&way, &party, &view, &pod, source_address(&pod, origin, peer), origin, started);
    let meter = local.records.opened(&flow);
    let dialled = tokio::select! {
        dialled = dial(&local, &room, &view, &pod, &way, &flow) => dialled,
        () = gone(&client) => return local.records.closed(&flow, &meter, Some((&RESET, "the application gave up"))),
        () = drain.forced() => return local.records.closed(&flow, &meter, Some((&CUT, ""))),
    };
    match dialled {
        Ok(Upstream::Tunnel(mut tunnel, _hold)) => finish(&local, &flow, &mut client, &mut tunnel, &meter, &drain, None).await,
        Ok(Upstream::Plain(mut plain)) => finish(&local, &flow, &mut client, &mut plain, &meter, &drain, None).await,
        Err(NoUpstream { fault, why }) => {
            sys::reset_on_close(&client);
            local.records.closed(&flow, &meter, Some((&fault, &why)));
        }
    }
}

/// Decides by the present view; by the first one, if there is none yet and the way depends on it.
async fn decide(local: &Local, room: &Room, origin: SocketAddr) -> Result<(Arc<View>, Arc<Pod>, Way), Refusal> {
    let by_now = || {
        let (view, pod) = (local.shared.view.load_full(), room.pod.load_full());
        decide_outbound(&view, &pod, origin).map(|way| (view, pod, way))
    };
    let has_begun = local.shared.view.load().generation != Generation::default();
    match by_now() {
        Err(Refusal::TenantUnknown) if !has_begun => {
            // A pod that has an identity is one whose tenant is known.
            room.identity().await;
            by_now()
        }
        decided => decided,
    }
}

/// Copies until both sides are done, and writes it down. Shared by all roads: `a` is the side that asked, `held` what policies may end.
pub(crate) async fn finish<A: Leg, B: Leg>(
    local: &Local,
    flow: &Flow,
    a: &mut A,
    b: &mut B,
    meter: &Meter,
    drain: &Drain,
    held: Option<&mut Held>,
) {
    let over = async {
        match held {
            Some(held) => held.over().await,
            None => std::future::pending().await,
        }
    };
    let end = tokio::select! {
        end = copy::both(a, b, meter, None) => Ok(end),
        no = over => Err(local.records.cut(&no)),
        () = drain.forced() => Err((CUT, String::new())),
    };
    match end {
        Ok(End::Complete) => local.records.closed(flow, meter, None),
        Ok(End::Broken { side, error }) => local.records.closed(flow, meter, Some((&RESET, &format!("{side:?}: {error}")))),
        Ok(End::Idle(limit)) => local.records.closed(flow, meter, Some((&CUT, &format!("idle for {limit:?}")))),
        Err((fault, why)) => {
            a.abort();
            b.abort();
            local.records.closed(flow, meter, Some((&fault, &why)));
        }
    }
}

/// Resolves when the side that asked resets the connection. A half-close is not that: it may still read.
pub(crate) async fn gone(client: &TcpStream) {
    loop {
        match client.ready(Interest::ERROR).await {
            Ok(ready) if ready.is_error() => return,
            Ok(_) => tokio::task::yield_now().await,
            Err(_) => return,
        }
    }
}

/// The address others know the source by: the pod's own, not the loopback end that capture made.
fn source_address(pod: &Pod, origin: SocketAddr, peer: SocketAddr) -> SocketAddr {
    let family = origin.ip().to_canonical().is_ipv4();
    let own = pod.ips.iter().find(|ip| ip.is_ipv4() == family).or(pod.ips.first());
    SocketAddr::new(own.copied().unwrap_or(peer.ip()), peer.port())
}

fn flow(way: &Way, party: &Arc<Party>, view: &View, pod: &Pod, source: SocketAddr, origin: SocketAddr, started: Instant) -> Flow {
    let (service, mesh) = match way {
        Way::Mesh { service, .. } => (service.clone(), true),
        Way::Own(_) | Way::Passthrough(_) => (None, false),
    };
    let destination = match (way, view.tenant(&pod.tenant)) {
        (Way::Own(_), _) => party.clone(),
        (Way::Mesh { .. }, Some(t)) => {
            let principal = gateway_identity(t.tenant.trust_domain.clone()).to_string();
            Arc::new(Party { principal, ..Party::default() })
        }
        _ => Arc::default(),
    };
    Flow {
        reporter: Reporter::Source,
        source: party.clone(),
        destination,
        service,
        mutual_tls: mesh,
        source_address: source,
        destination_address: origin,
        authority: if mesh { origin.to_string() } else { String::new() },
        started,
    }
}

async fn dial(local: &Local, room: &Room, view: &View, pod: &Pod, way: &Way, flow: &Flow) -> Result<Upstream, NoUpstream> {
    match way {
        Way::Own(to) | Way::Passthrough(to) => {
            let options = ConnectOptions { mark: Some(PROXY_MARK), ..ConnectOptions::default() };
            match sys::connect(Some(&room.netns), *to, &options).await {
                Ok(plain) => Ok(Upstream::Plain(plain)),
                Err(e) => no_upstream(Refusal::ConnectFailed, e),
            }
        }
        Way::Mesh { authority, service } => {
            let Some(tenant) = view.tenant(&pod.tenant) else { return no_upstream(Refusal::TenantUnknown, "") };
            let Some(identity) = identity(room).await else { return no_upstream(Refusal::NoIdentity, "no certificate in time") };
            let entrances = tenant.entrances(service.as_ref().map(|s| &s.key));
            dial_tunnel(local, room, entrances, pod, &identity, &Authority::Address(*authority), headers(flow)).await
        }
    }
}

/// The pod's identity once it has a certificate, if it is to have one here.
async fn identity(room: &Room) -> Option<Arc<RoomIdentity>> {
    let found = room.identity().await?;
    if let Some(credential) = &found.credential {
        tokio::time::timeout(IDENTITY_PATIENCE, credential.first()).await.ok()??;
    }
    Some(found)
}

/// Asks gateways one after another, in the order decided, until one opens the tunnel or the answer is final.
async fn dial_tunnel(
    local: &Local,
    room: &Room,
    entrances: &[Arc<Entrance>],
    pod: &Pod,
    identity: &RoomIdentity,
    authority: &Authority,
    headers: HeaderMap,
) -> Result<Upstream, NoUpstream> {
    let now = tokio::time::Instant::now();
    let order = decide_order(local.gateways.candidates(entrances, pod, now), &local.shared.az, &mut rand::rng());
    let attempts = order.len().min(ATTEMPTS_MAX);
    let mut failure = NoUpstream { fault: Refusal::NoGateway.into(), why: format!("{} gateways known", entrances.len()) };
    for (n, candidate) in order.iter().take(attempts).enumerate() {
        let target = Target {
            source: identity.client.clone(),
            expected: Arc::new([gateway_identity(identity.trust_domain.clone())]),
            address: candidate.address,
            netns: Some(room.netns.clone()),
            mark: Some(PROXY_MARK),
        };
        let asked = local.pool.open(&target, authority, headers.clone());
        let last = n + 1 == attempts;
        let answer = if last { Ok(asked.await) } else { tokio::time::timeout(ATTEMPT_PATIENCE, asked).await };
        match settle(local, candidate, answer) {
            Ok(Opened { stream, .. }) => return Ok(Upstream::Tunnel(stream, local.gateways.answered(candidate.address))),
            Err((no, Blame::Nobody)) => return Err(no),
            Err((no, Blame::Gateway | Blame::Busy)) => failure = no,
        }
    }
    Err(failure)
}

type Answer = Result<Result<Opened, HboneError>, tokio::time::error::Elapsed>;

/// Reads a gateway's answer, and remembers whose fault a failure is.
fn settle(local: &Local, candidate: &Candidate, answer: Answer) -> Result<Opened, (NoUpstream, Blame)> {
    let (blame, fault, why) = match answer {
        Ok(Ok(opened)) => return Ok(opened),
        Ok(Err(e)) => {
            let refusal = if e.status().is_some() { Refusal::TunnelRefused } else { Refusal::GatewayFailed };
            (decide_blame(&e), Fault { flag: e.flag(), ..refusal.into() }, e.to_string())
        }
        Err(_) => {
            let why = format!("HBONE to {}: no tunnel in {ATTEMPT_PATIENCE:?}", candidate.address);
            (Blame::Gateway, Refusal::GatewayFailed.into(), why)
        }
    };
    if blame == Blame::Gateway {
        local.gateways.failed(candidate.address, tokio::time::Instant::now());
    }
    local.records.gateway_failed(&candidate.entrance.label, blame_name(blame));
    Err((NoUpstream { fault, why }, blame))
}

fn blame_name(b: Blame) -> &'static str {
    match b {
        Blame::Gateway => "gateway",
        Blame::Busy => "busy",
        Blame::Nobody => "nobody",
    }
}

/// What every CONNECT says of its source (features.md A.3).
fn headers(flow: &Flow) -> HeaderMap {
    let trace: (u128, u64) = (rand::random(), rand::random());
    let host = flow.service.as_deref().map(|s| s.hostname.as_str());
    let mut h = HeaderMap::with_capacity(3);
    for (name, value) in [
        (BAGGAGE, flow.source.baggage().encode()),
        (FORWARDED, forwarded(flow.source_address, host)),
        (TRACEPARENT, format!("00-{:032x}-{:016x}-00", trace.0, trace.1)),
    ] {
        // A value that HTTP cannot carry is left out: all three are for the records only.
        if let Ok(value) = HeaderValue::from_str(&value) {
            h.insert(HeaderName::from_static(name), value);
        }
    }
    h
}

#[cfg(test)]
mod tests {
    use super::*;

    fn a_flow() -> Flow {
        Flow {
            reporter: Reporter::Source,
            source: Arc::new(Party { namespace: "b".into(), pod: "c-0".into(), ..Party::default() }),
            destination: Arc::default(),
            service: None,
            mutual_tls: true,
            source_address: "10.0.0.1:4711".parse().unwrap(),
            destination_address: "10.96.0.1:80".parse().unwrap(),
            authority: "10.96.0.1:80".into(),
            started: Instant::now(),
        }
    }

    #[test]
    fn a_connect_says_where_it_comes_from() {
        let h = headers(&a_flow());
        assert_eq!(h[BAGGAGE], "k8s.namespace.name=b,k8s.pod.name=c-0");
        assert_eq!(h[FORWARDED], "for=\"10.0.0.1:4711\"");
        let trace = h[TRACEPARENT].to_str().unwrap().to_string();
        let parts: Vec<usize> = trace.split('-').map(str::len).collect();
        assert_eq!((parts, &trace[..3], &trace[53..]), (vec![2, 32, 16, 2], "00-", "00"));
        assert_ne!(headers(&a_flow())[TRACEPARENT], trace.as_str(), "fresh for each connection");
    }

    #[test]
    fn the_source_is_the_pod_not_the_loopback_end() {
        let text =
            r#"{"uid":"a/b/c","namespace":"b","name":"c","serviceAccount":"c","netns":"/n","cgroup":"/c","ips":["10.0.0.1","fd00::1"]}"#;
        let pod = Pod::parse("f", text.as_bytes()).unwrap();
        for (origin, peer, want) in [("10.96.0.1:80", "127.0.0.1:4711", "10.0.0.1:4711"), ("[fd96::1]:80", "[::1]:4711", "[fd00::1]:4711")]
        {
            assert_eq!(source_address(&pod, origin.parse().unwrap(), peer.parse().unwrap()), want.parse().unwrap());
        }
    }

    #[test]
    fn a_missing_upstream_is_a_fault_of_its_own_name() {
        let Err(no) = no_upstream::<()>(Refusal::NoGateway, "") else { unreachable!() };
        assert_eq!(no.fault, Fault { name: "no_gateway", flag: "CONNECT", refusal: Some(Refusal::NoGateway) });
    }
}
