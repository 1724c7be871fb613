//! Phase *greet*: whose connection is this, where does it want to go, what does it speak? TLS and HBONE end here; from here on there is a
//! [`Session`] and a stream of bytes.

mod sniff;
mod terminate;

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use canal_kit::hbone::{self, Asked, Incoming, ServerConfig};
use canal_kit::sys;
use canal_kit::tls::TlsError;
use canal_model::identity::Peer;
use canal_model::ids::ServiceKey;
use canal_model::program::AppProtocol;
use canal_wire::hbone::{BAGGAGE, Baggage, FORWARDED, ILLEGAL_PORTS, STATUS_BAD, STATUS_DENIED, STATUS_UNAVAILABLE, forwarded_for};
use canal_wire::tier;
use http::HeaderMap;
use tokio::net::TcpStream;

use crate::buffer::Inbox;
use crate::clock::Late;
use crate::config::Plain;
use crate::destination::{Destination, Misplaced, Resolved, Scope};
use crate::fault::Fault;
use crate::finish::Relayed;
use crate::io::Io;
use crate::permit::ConnectionPermit;
use crate::relay;
use crate::scheduler::Scheduler;
use crate::session::{Caller, ConnectionSeat, Session, Who};
use crate::snapshot::{Party, Snapshot, TenantView};
use crate::worker::Worker;
use terminate::Entered;

/// Where the tier's own services answer names.
const DNS_PORT: u16 = 53;

/// Why there is no session. The names are counter labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unwelcome {
    IllegalPort,
    UnknownDestination,
    /// Not of the service whose address the connection came in on.
    WrongService,
    UnknownPort,
    TenantConnections,
    TenantGone,
}

impl From<Misplaced> for Unwelcome {
    fn from(why: Misplaced) -> Self {
        match why {
            Misplaced::WrongService => Unwelcome::WrongService,
            Misplaced::UnknownPort => Unwelcome::UnknownPort,
        }
    }
}

impl Unwelcome {
    fn name(self) -> &'static str {
        match self {
            Unwelcome::IllegalPort => "illegal_port",
            Unwelcome::UnknownDestination => "unknown_destination",
            Unwelcome::WrongService => "wrong_service",
            Unwelcome::UnknownPort => "unknown_port",
            Unwelcome::TenantConnections => "tenant_connections",
            Unwelcome::TenantGone => "tenant_gone",
        }
    }
    /// The answer to CONNECT, with ztunnel's meanings.
    fn status(self) -> u16 {
        match self {
            Unwelcome::IllegalPort | Unwelcome::WrongService => STATUS_BAD,
            Unwelcome::UnknownDestination | Unwelcome::UnknownPort | Unwelcome::TenantConnections | Unwelcome::TenantGone => {
                STATUS_UNAVAILABLE
            }
        }
    }
}

/// Serves a connection of a plain listener that is one service's.
pub(crate) async fn plain(worker: &Rc<Worker>, stream: TcpStream, client: SocketAddr, plain: &Plain, permit: &Rc<ConnectionPermit>) {
    let snapshot = worker.snapshot();
    let Some(tenant) = snapshot.tenant(plain.service.tenant.as_str()).cloned() else {
        return worker.counts.refused_connection("no_tenant");
    };
    drop(snapshot);
    let destination = Destination::Service(plain.service.clone(), plain.port);
    begin_plain(worker, stream, client, (&tenant, destination), permit).await;
}

/// Serves a connection of the tier's plain listener: which service it is for is told by its local address, which port by its local port.
pub(crate) async fn inside(
    worker: &Rc<Worker>,
    stream: TcpStream,
    (client, local): (SocketAddr, SocketAddr),
    permit: &Rc<ConnectionPermit>,
) {
    let snapshot = worker.snapshot();
    let found = decide_inside(&snapshot, local);
    let refuse = |why: &str| {
        worker.counts.refused_connection(why);
        sys::reset_on_close(&stream);
    };
    match (found, &worker.shared.dns) {
        (Ok(Inside::Service(tenant, key)), _) => {
            let (tenant, destination) = (tenant.clone(), Destination::Service(key.clone(), local.port()));
            drop(snapshot);
            begin_plain(worker, stream, client, (&tenant, destination), permit).await;
        }
        (Ok(Inside::Names), Some(dns)) => match stream.into_std() {
            Ok(stream) => dns(stream),
            Err(_) => worker.counts.refused_connection("gone"),
        },
        (Ok(Inside::Names), None) => refuse("unknown_port"),
        (Err(why), _) => refuse(why),
    }
}

/// What a plain connection inside the tier is for.
enum Inside<'a> {
    Service(&'a Arc<TenantView>, &'a ServiceKey),
    /// The tenant's name service.
    Names,
}

/// Whose an address inside the tier is; what there is behind it is not looked at.
pub(crate) fn decide_tenant_inside(snapshot: &Snapshot, local: IpAddr) -> Result<&Arc<TenantView>, &'static str> {
    let id = tier::service_of(local).ok_or("no_service_address")?;
    snapshot.service_inside(id).map(|(tenant, _)| tenant).ok_or("unknown_service")
}

fn decide_inside(snapshot: &Snapshot, local: SocketAddr) -> Result<Inside<'_>, &'static str> {
    let id = tier::service_of(local.ip()).ok_or("no_service_address")?;
    let (tenant, key) = snapshot.service_inside(id).ok_or("unknown_service")?;
    if local.port() == DNS_PORT && Scope::inside(key) == Scope::Pods {
        return Ok(Inside::Names);
    }
    let port = tenant.service(key).and_then(|s| s.port(local.port()));
    port.map(|_| Inside::Service(tenant, key)).ok_or("unknown_port")
}

async fn begin_plain(
    worker: &Rc<Worker>,
    stream: TcpStream,
    client: SocketAddr,
    (tenant, destination): (&Arc<TenantView>, Destination),
    permit: &Rc<ConnectionPermit>,
) {
    let (termination, protocol) = match &destination {
        Destination::Service(key, port) => {
            let port = tenant.service(key).and_then(|service| service.port(*port));
            port.map_or((None, AppProtocol::Http1), |port| (port.termination.clone(), port.protocol))
        }
        _ => (None, AppProtocol::Http1),
    };
    let entered = match &termination {
        None => Entered::plain(stream),
        // On the heap: few connections have it.
        Some(view) => match Box::pin(terminate::enter(worker, stream, view, protocol, permit)).await {
            Ok(entered) => entered,
            Err(why) => return worker.counts.refused_connection(why),
        },
    };
    let Entered { io, tls, server_name, peer } = entered;
    let (peer, standing) = peer.unzip();
    let client = SocketAddr::new(client.ip().to_canonical(), client.port());
    let caller = match &peer {
        None => {
            let party = party_at(tenant, client.ip(), None).unwrap_or_else(Party::unknown);
            // Nothing was proved here: a name from the registry is shown, an identity is not.
            let party = Party { principal: String::new(), ..party };
            Caller { party, address: client, secured: false, tls, who: Who::default().named(server_name) }
        }
        // The verifier has compared trust domains; this compares what came of it.
        Some(peer) if !is_welcome(tenant, peer) => return worker.counts.refused_connection("foreign_tenant"),
        Some(peer) => {
            let unknown = || Party::of_identity(&peer.identity, &Baggage::default());
            let party = party_at(tenant, client.ip(), Some(peer)).unwrap_or_else(unknown);
            let who = Who::proved(&peer.identity, tenant.trust_domain.as_ref()).named(server_name);
            Caller { party, address: client, secured: true, tls, who }
        }
    };
    let session = Rc::new(Session::begin(worker, tenant, destination, caller, ConnectionSeat::Accepted(permit.clone())));
    let served = serve_plain(worker, &session, io);
    match standing {
        None => served.await,
        Some(mut standing) => {
            let fallen = tokio::select! {
                () = Box::pin(served) => None,
                why = standing.fallen() => Some(why),
            };
            fallen.inspect(|why| worker.counts.refused_connection(why.name()));
        }
    }
}

async fn serve_plain(worker: &Rc<Worker>, session: &Rc<Session>, io: Io) {
    let protocol = session.resolve(worker).map_or(AppProtocol::Http1, |(_, resolved)| resolved.protocol());
    let inbox = Inbox::new(&worker.blocks);
    match protocol {
        AppProtocol::Tcp => Box::pin(relay::tcp(worker, session, io, inbox)).await,
        protocol => sniff::speak(worker, session, io, inbox, protocol).await,
    }
}

/// Whether a verified peer may connect at all: a member of the tenant, or of one that it federates with. What foreigners may do is what a
/// policy allows them by name (`judge`).
fn is_welcome(tenant: &TenantView, peer: &Peer) -> bool {
    let own = Some(&peer.identity.trust_domain) == tenant.trust_domain.as_ref();
    peer.tenant == tenant.name && (own || tenant.federated.contains(&peer.identity.trust_domain))
}

/// Whose an HBONE connection is, and what may be dialled through it: by its local address alone.
pub(crate) fn decide_scope(snapshot: &Snapshot, local: IpAddr) -> Result<(&Arc<TenantView>, Scope), &'static str> {
    match tier::service_of(local) {
        Some(id) => {
            let (tenant, key) = snapshot.service_inside(id).ok_or("unknown_service")?;
            Ok((tenant, Scope::inside(key)))
        }
        None => Ok((snapshot.tenant_at(local.to_canonical()).ok_or("no_gateway_address")?, Scope::Tenant)),
    }
}

/// Serves an HBONE connection: TLS with the tenant of the local address, then tunnels.
pub(crate) async fn hbone(worker: &Rc<Worker>, stream: TcpStream, local: IpAddr, permit: &Rc<ConnectionPermit>) {
    let snapshot = worker.snapshot();
    let (tenant, scope) = match decide_scope(&snapshot, local) {
        Ok((tenant, scope)) => (tenant.clone(), Rc::new(scope)),
        Err(why) => return worker.counts.refused_connection(why),
    };
    drop(snapshot);
    let Some(tls) = &tenant.tls else {
        return worker.counts.refused_connection("no_certificates");
    };
    if let Err(late) = first_byte(worker, &stream).await {
        worker.counts.late(late);
        return worker.counts.refused_connection("tls_timeout");
    }
    let handshake = match permit.begin_handshake() {
        Ok(handshake) => handshake,
        Err(why) => return worker.counts.refused_connection(why),
    };
    let (stream, peer) = match tls.server.accept(stream).await {
        Ok(accepted) => accepted,
        Err(e) => {
            tracing::debug!(tenant = %tenant.name, error = %e, "TLS handshake failed");
            return worker.counts.refused_connection(tls_reason(&e));
        }
    };
    // The verifier has compared trust domains; this compares what came of it, where a mistake would let one tenant in at another's door.
    if !is_welcome(&tenant, &peer) {
        return worker.counts.refused_connection("foreign_tenant");
    }
    drop(handshake);
    permit.end_handshake(true);
    let config = ServerConfig { window_budget: Some(worker.window_budget(&tenant.name)), ..ServerConfig::default() };
    let tunnels = Rc::new(TunnelCount { open: Cell::new(0), permit: permit.clone() });
    let queue = worker.accounts.of(&tenant, &worker.limits).queue.clone();
    let connect = |asked: Asked| {
        // Refused already, and counted by the kit.
        let Ok(incoming) = asked else { return };
        let worker = worker.clone();
        let (name, scope) = (tenant.name.clone(), scope.clone());
        let counted = TunnelGuard::begin(&tunnels);
        let queue = queue.clone();
        tokio::task::spawn_local(async move {
            let _open = worker.opened();
            let _counted = counted;
            Scheduler::run(&queue, pin!(tunnel(&worker, name.as_str(), &scope, incoming))).await;
        });
    };
    // The reasons for its end are the kit's counters.
    let _ = hbone::serve(stream, peer, &config, &worker.hbone, worker.parting.drain(), connect).await;
}

/// Waits for a client's first byte: one that says nothing takes no part of a handshake.
async fn first_byte(worker: &Worker, stream: &TcpStream) -> Result<(), Late> {
    let timer = worker.clock.timer();
    timer.arm(Late::Head, worker.shared.config.times.head);
    // Readiness alone may be claimed falsely. What is read here, an error or the end too, is read again by TLS.
    timer.within(stream.peek(&mut [0])).await.map(|_| ())
}

/// The tunnels of one connection that are open: while there are none, it may have to give way.
struct TunnelCount {
    open: Cell<usize>,
    permit: Rc<ConnectionPermit>,
}

/// Counts a tunnel until dropped.
struct TunnelGuard(Rc<TunnelCount>);

impl TunnelGuard {
    fn begin(count: &Rc<TunnelCount>) -> Self {
        count.open.set(count.open.get() + 1);
        count.permit.establish();
        Self(count.clone())
    }
}

impl Drop for TunnelGuard {
    fn drop(&mut self) {
        self.0.open.set(self.0.open.get() - 1);
        if self.0.open.get() == 0 {
            self.0.permit.offer();
        }
    }
}

fn tls_reason(e: &TlsError) -> &'static str {
    match e {
        TlsError::NoCertificate(_) => "no_certificate",
        TlsError::Peer(_) => "tls_peer",
        TlsError::Protocol(_) => "tls_protocol",
        TlsError::Io(_) => "tls_io",
        TlsError::Timeout(_) => "tls_timeout",
        TlsError::KeyServer(_) => "tls_key_server",
    }
}

/// Serves one CONNECT.
async fn tunnel(worker: &Rc<Worker>, tenant: &str, scope: &Scope, incoming: Incoming) {
    // The tenant as it is now, not as it was when the connection came up.
    let snapshot = worker.snapshot();
    let welcomed = match snapshot.tenant(tenant) {
        None => Err(Unwelcome::TenantGone),
        Some(tenant) => welcome(worker, tenant, scope, &incoming),
    };
    drop(snapshot);
    let (session, resolved) = match welcomed {
        Ok(welcomed) => welcomed,
        Err(why) => {
            worker.counts.refused_connect(why.name());
            return incoming.refuse(why.status());
        }
    };
    worker.counts.accepted.inc();
    let _open = worker.counts.connections.hold();
    let inbox = Inbox::new(&worker.blocks);
    match resolved.protocol() {
        AppProtocol::Tcp => Box::pin(tcp_tunnel(worker, &session, incoming, inbox)).await,
        protocol => {
            if let Ok(stream) = incoming.accept(HeaderMap::new()) {
                sniff::speak(worker, &session, Io::Tunnel(Box::new(stream)), inbox, protocol).await;
            }
        }
    }
}

/// TCP: the answer to CONNECT says whether the endpoint could be connected.
async fn tcp_tunnel(worker: &Rc<Worker>, session: &Rc<Session>, incoming: Incoming, inbox: Inbox) {
    let mut relayed = Relayed::begin(worker, session);
    match relay::open(worker, session, &mut relayed.judged).await {
        Ok(opened) => {
            if let Ok(stream) = incoming.accept(HeaderMap::new()) {
                relay::run(worker, session, relayed, Io::Tunnel(Box::new(stream)), inbox, opened).await;
            }
        }
        Err((fault, target)) => {
            worker.counts.refused_connect(fault.name());
            relayed.detail = fault.detail().to_string();
            relayed.end(target, fault.flag(), (0, 0));
            let forbidden = matches!(fault, Fault::Denied(_) | Fault::Rejected(_) | Fault::Unasked(_));
            incoming.refuse(if forbidden { STATUS_DENIED } else { STATUS_UNAVAILABLE });
        }
    }
}

/// Whether this CONNECT leads anywhere.
fn welcome(
    worker: &Rc<Worker>,
    tenant: &Arc<TenantView>,
    scope: &Scope,
    incoming: &Incoming,
) -> Result<(Rc<Session>, Rc<Resolved>), Unwelcome> {
    if ILLEGAL_PORTS.contains(&incoming.authority.port()) {
        return Err(Unwelcome::IllegalPort);
    }
    let destination = scope.decide(tenant, &incoming.authority)?;
    let caller = caller(tenant, &incoming.peer, &incoming.headers);
    let session = Rc::new(Session::of_tunnel(worker, tenant, destination, caller).ok_or(Unwelcome::TenantConnections)?);
    let (_, resolved) = session.resolve(worker).map_err(|_| Unwelcome::UnknownDestination)?;
    Ok((session, resolved))
}

/// Who dialled: the address from `forwarded`, which the authenticated node wrote, the name from the registry if the identity there agrees.
fn caller(tenant: &TenantView, peer: &Peer, headers: &HeaderMap) -> Caller {
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or("");
    let address = forwarded_for(text(FORWARDED)).unwrap_or_else(|| SocketAddr::from(([0, 0, 0, 0], 0)));
    let party =
        party_at(tenant, address.ip(), Some(peer)).unwrap_or_else(|| Party::of_identity(&peer.identity, &Baggage::decode(text(BAGGAGE))));
    let who = Who::proved(&peer.identity, tenant.trust_domain.as_ref());
    Caller { party, address, secured: true, tls: false, who }
}

fn party_at(tenant: &TenantView, ip: IpAddr, peer: Option<&Peer>) -> Option<Party> {
    let workload = tenant.workload_at(ip)?;
    let agrees = peer.is_none_or(|p| workload.identity.contains(&p.identity));
    agrees.then(|| (*workload.party).clone())
}
