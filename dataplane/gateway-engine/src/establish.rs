//! Phase *establish*: determines a connection's tenant, its destination and its protocol.
//!
//! TLS and HBONE terminate here. The result is a [`ClientSession`] and a stream of bytes. It does
//! not parse requests: `decode` does. Start with [`hbone`] for the mesh, [`plain`] and
//! [`accept_tier_plaintext`] for plaintext.

mod passthrough;
mod proxied;
mod sniff;
mod terminate;

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use canal_gateway_config::{PortTermination, Snapshot, TenantView, WorkloadLabels};
use canal_gateway_io::buffer::Inbox;
use canal_gateway_io::clock::TimeoutKind;
use canal_gateway_io::io::Io;
use canal_gateway_io::scheduler::Scheduler;
use canal_hbone::{ConnectResult, IncomingConnect, ServerConfig};
use canal_model::identity::VerifiedPeer;
use canal_model::ids::ServiceKey;
use canal_model::ingress::is_gateway_service;
use canal_model::program::AppProtocol;
use canal_net::sys;
use canal_runtime::drain::DrainPhase;
use canal_tls::TlsError;
use canal_wire::hbone::{
    BAGGAGE, Baggage, FORWARDED, ILLEGAL_PORTS, STATUS_BAD, STATUS_UNAVAILABLE, forwarded_for,
};
use canal_wire::tier;
use http::HeaderMap;
use tokio::net::TcpStream;

use crate::config::PlainListener;
use crate::destination::{Destination, DestinationError, DialScope, ResolvedDestination};
use crate::permit::ConnectionPermit;
use crate::rebalance::ConnectionDrain;
use crate::relay;
use crate::session::{ClientInfo, ClientPrincipal, ClientSession, SessionAdmission};
use crate::soft_drain::NO_DEADLINE;
use crate::worker::Worker;
use proxied::proxied_client;
use terminate::ClientTransport;

/// Port at which the tier's own services serve DNS.
const DNS_PORT: u16 = 53;

/// Reason why a CONNECT gets no session. The names are counter labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EstablishRefusal {
    IllegalPort,
    UnknownDestination,
    /// The destination is not the service whose address accepted the connection.
    WrongService,
    UnknownPort,
    TenantConnections,
    TenantGone,
    /// A security resource of the tenant is rejected or missing.
    TenantClosed,
}

impl From<DestinationError> for EstablishRefusal {
    fn from(why: DestinationError) -> Self {
        match why {
            DestinationError::WrongService => EstablishRefusal::WrongService,
            DestinationError::UnknownPort => EstablishRefusal::UnknownPort,
        }
    }
}

impl EstablishRefusal {
    fn name(self) -> &'static str {
        match self {
            EstablishRefusal::IllegalPort => "illegal_port",
            EstablishRefusal::UnknownDestination => "unknown_destination",
            EstablishRefusal::WrongService => "wrong_service",
            EstablishRefusal::UnknownPort => "unknown_port",
            EstablishRefusal::TenantConnections => "tenant_connections",
            EstablishRefusal::TenantGone => "tenant_gone",
            EstablishRefusal::TenantClosed => "tenant_closed",
        }
    }
    /// Status of the response to CONNECT, with ztunnel's meanings.
    fn status(self) -> u16 {
        match self {
            EstablishRefusal::IllegalPort | EstablishRefusal::WrongService => STATUS_BAD,
            EstablishRefusal::UnknownDestination | EstablishRefusal::UnknownPort => {
                STATUS_UNAVAILABLE
            }
            EstablishRefusal::TenantConnections
            | EstablishRefusal::TenantGone
            | EstablishRefusal::TenantClosed => STATUS_UNAVAILABLE,
        }
    }
}

/// Serves a connection of a plain listener that belongs to one service.
pub(crate) async fn plain(
    worker: &Rc<Worker>,
    stream: TcpStream,
    client: SocketAddr,
    plain: &PlainListener,
    permit: &Rc<ConnectionPermit>,
) {
    let snapshot = worker.snapshot();
    let Some(tenant) = snapshot.tenant(plain.service.tenant.as_str()).cloned() else {
        return worker.counts.refused_connection("no_tenant");
    };
    drop(snapshot);
    let destination = Destination::Service(plain.service.clone(), plain.port);
    establish_plaintext(worker, stream, client, (&tenant, destination), permit).await;
}

/// Serves a connection of the tier's plain listener. The local address identifies the service, the
/// local port its port.
pub(crate) async fn accept_tier_plaintext(
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
        (Ok(TierDestination::Service(tenant, key)), _) => {
            let (tenant, destination) = (
                tenant.clone(),
                Destination::Service(key.clone(), local.port()),
            );
            drop(snapshot);
            establish_plaintext(worker, stream, client, (&tenant, destination), permit).await;
        }
        // The process serves DNS over TCP, outside the engine. The connection keeps its permits
        // here until its end.
        (Ok(TierDestination::Names(tenant)), Some(dns)) => match stream.into_std() {
            Ok(stream) => {
                let served = dns(stream, &tenant.name);
                drop(snapshot);
                permit.hand_over();
                served.await;
            }
            Err(_) => worker.counts.refused_connection("gone"),
        },
        (Ok(TierDestination::Names(_)), None) => refuse("unknown_port"),
        (Err(why), _) => refuse(why),
    }
}

/// Destination of a plaintext connection inside the tier.
enum TierDestination<'a> {
    Service(&'a Arc<TenantView>, &'a ServiceKey),
    /// The tenant's DNS service.
    Names(&'a Arc<TenantView>),
}

/// Returns the tenant of an address inside the tier, without checking that the service has ports.
pub(crate) fn decide_tenant_inside(
    snapshot: &Snapshot,
    local: IpAddr,
) -> Result<&Arc<TenantView>, &'static str> {
    let id = tier::service_of(local).ok_or("no_service_address")?;
    snapshot
        .service_inside(id)
        .map(|(tenant, _)| tenant)
        .ok_or("unknown_service")
}

fn decide_inside(
    snapshot: &Snapshot,
    local: SocketAddr,
) -> Result<TierDestination<'_>, &'static str> {
    let id = tier::service_of(local.ip()).ok_or("no_service_address")?;
    let (tenant, key) = snapshot.service_inside(id).ok_or("unknown_service")?;
    if local.port() == DNS_PORT && DialScope::inside(key) == DialScope::Pods {
        return Ok(TierDestination::Names(tenant));
    }
    let port = tenant.service(key).and_then(|s| s.port(local.port()));
    port.map(|_| TierDestination::Service(tenant, key))
        .ok_or("unknown_port")
}

/// Returns the labels of a client that proved no identity. The name from the registry is shown, an
/// identity is not. A client of a Gateway is on another network than the tenant's pods, which may
/// have its address.
fn labels_without_identity(
    tenant: &TenantView,
    client: IpAddr,
    destination: &Destination,
) -> WorkloadLabels {
    if matches!(destination, Destination::Service(key, _) if is_gateway_service(key)) {
        return WorkloadLabels::unknown();
    }
    let labels = party_at(tenant, client, None).unwrap_or_else(WorkloadLabels::unknown);
    WorkloadLabels {
        principal: String::new(),
        ..labels
    }
}

/// Returns how TLS terminates at a destination, its protocol, and whether connections begin with a
/// header of the PROXY protocol. Only a port of a service has such settings; without a termination, the
/// protocol is not used here.
fn port_settings(
    tenant: &TenantView,
    destination: &Destination,
) -> (Option<Arc<PortTermination>>, AppProtocol, bool) {
    let port = match destination {
        Destination::Service(key, port) => tenant.service(key).and_then(|it| it.port(*port)),
        _ => None,
    };
    port.map_or((None, AppProtocol::Http1, false), |port| {
        (port.termination.clone(), port.protocol, port.is_proxied)
    })
}

/// Returns the client of a connection from `peer`: the one in its header, if it has to begin with one
/// of the PROXY protocol. `None` if the connection is refused.
async fn client_of(
    worker: &Worker,
    stream: &mut TcpStream,
    peer: SocketAddr,
    is_proxied: bool,
) -> Option<SocketAddr> {
    if !is_proxied {
        return Some(peer);
    }
    let read = Box::pin(proxied_client(worker, stream, peer)).await;
    read.inspect_err(|why| {
        sys::reset_on_close(stream);
        worker.counts.refused_connection(why);
    })
    .ok()
}

async fn establish_plaintext(
    worker: &Rc<Worker>,
    mut stream: TcpStream,
    client: SocketAddr,
    (tenant, destination): (&Arc<TenantView>, Destination),
    permit: &Rc<ConnectionPermit>,
) {
    let (termination, protocol, is_proxied) = port_settings(tenant, &destination);
    // A listener for both families reports IPv4 clients as mapped IPv6 addresses.
    let client = SocketAddr::new(client.ip().to_canonical(), client.port());
    // On such a port the connection comes from a load balancer, whose header names the client.
    let balancer = is_proxied.then_some(client.ip());
    let Some(client) = client_of(worker, &mut stream, client, is_proxied).await else {
        return;
    };
    let entered = match &termination {
        None => ClientTransport::plain(stream),
        // Boxed, so that the future of connections without TLS, which are most, stays small.
        Some(view) => {
            match Box::pin(terminate::terminate(worker, stream, view, protocol, permit)).await {
                Ok(entered) => entered,
                Err(why) => return worker.counts.refused_connection(why),
            }
        }
    };
    let ClientTransport {
        io,
        tls,
        server_name,
        peer,
        certificate,
        clients,
        inbox,
    } = entered;
    let (peer, trust_watch) = peer.unzip();
    let caller = match &peer {
        None => ClientInfo {
            party: labels_without_identity(tenant, client.ip(), &destination),
            address: client,
            balancer,
            secured: false,
            tls,
            principal: ClientPrincipal {
                certificate,
                validated: RefCell::new((clients, true)),
                ..ClientPrincipal::default().named(server_name)
            },
        },
        // The verifier has compared trust domains; its result is checked again here.
        Some(peer) if !is_trusted_peer(tenant, peer) => {
            return worker.counts.refused_connection("foreign_tenant");
        }
        Some(peer) => {
            let unknown = || WorkloadLabels::of_identity(&peer.identity, &Baggage::default());
            let party = party_at(tenant, client.ip(), Some(peer)).unwrap_or_else(unknown);
            let principal =
                ClientPrincipal::with_verified_peer(&peer.identity, tenant.trust_domain.as_ref())
                    .named(server_name);
            ClientInfo {
                party,
                address: client,
                balancer,
                secured: true,
                tls,
                principal,
            }
        }
    };
    let session = Rc::new(ClientSession::begin(
        worker,
        tenant,
        destination,
        caller,
        SessionAdmission::Accepted(permit.clone()),
    ));
    let served = serve_plain(worker, &session, io, inbox);
    // A client whose certificate loses trust while the connection is open is disconnected.
    match trust_watch {
        None => served.await,
        Some(mut trust_watch) => {
            let trust_loss = tokio::select! {
                () = Box::pin(served) => None,
                why = trust_watch.wait_for_loss() => Some(why),
            };
            trust_loss.inspect(|why| worker.counts.refused_connection(why.name()));
        }
    }
}

/// Serves a connection, of which `inbox` has what was already read.
async fn serve_plain(
    worker: &Rc<Worker>,
    session: &Rc<ClientSession>,
    io: Io,
    inbox: Option<Inbox>,
) {
    let protocol = session
        .resolve(worker)
        .map_or(AppProtocol::Http1, |(_, resolved)| resolved.protocol());
    let inbox = inbox.unwrap_or_else(|| Inbox::new(&worker.blocks));
    match protocol {
        AppProtocol::Tcp => Box::pin(relay::tcp(worker, session, io, inbox)).await,
        protocol => sniff::serve_sniffed(worker, session, io, inbox, protocol).await,
    }
}

/// True if a verified peer may connect at all: it belongs to the tenant or to one that the tenant
/// federates with. A federated peer may do only what a policy allows it by name (`authorize`).
fn is_trusted_peer(tenant: &TenantView, peer: &VerifiedPeer) -> bool {
    let own = Some(&peer.identity.trust_domain) == tenant.trust_domain.as_ref();
    peer.tenant == tenant.name && (own || tenant.federated.contains(&peer.identity.trust_domain))
}

/// Returns the tenant of an HBONE connection and what may be dialled through it. Only the local
/// address matters.
pub(crate) fn decide_scope(
    snapshot: &Snapshot,
    local: IpAddr,
) -> Result<(&Arc<TenantView>, DialScope), &'static str> {
    match tier::service_of(local) {
        Some(id) => {
            let (tenant, key) = snapshot.service_inside(id).ok_or("unknown_service")?;
            // Clients of a Gateway are outside the mesh, and have no tunnels.
            if is_gateway_service(key) {
                return Err("hbone_from_outside");
            }
            Ok((tenant, DialScope::inside(key)))
        }
        None => Ok((
            snapshot
                .tenant_at(local.to_canonical())
                .ok_or("no_gateway_address")?,
            DialScope::Tenant,
        )),
    }
}

/// Serves an HBONE connection: TLS as the tenant of the local address, then tunnels.
pub(crate) async fn hbone(
    worker: &Rc<Worker>,
    stream: TcpStream,
    (client, local): (SocketAddr, IpAddr),
    permit: &Rc<ConnectionPermit>,
) {
    let snapshot = worker.snapshot();
    let (tenant, scope) = match decide_scope(&snapshot, local) {
        Ok((tenant, scope)) => (tenant.clone(), Rc::new(scope)),
        Err(why) => return worker.counts.refused_connection(why),
    };
    // The connection may last for hours; a snapshot that is in use keeps replaced tables in memory.
    drop(snapshot);
    let Some(tls) = &tenant.tls else {
        return worker.counts.refused_connection("no_certificates");
    };
    // Before the permit, so that silent clients do not use up the tenant's handshakes.
    if let Err(late) = first_byte(worker, &stream).await {
        worker.counts.late(late);
        return worker.counts.refused_connection("tls_timeout");
    }
    let handshake = match permit.begin_handshake() {
        Ok(handshake) => handshake,
        Err(why) => return worker.counts.refused_connection(why),
    };
    let accepted = match handshake
        .run(tls.server.accept_noting_hello(stream, || handshake.keep()))
        .await
    {
        Ok(accepted) => accepted,
        Err(why) => return worker.counts.refused_connection(why),
    };
    let (stream, peer) = match accepted {
        Ok(accepted) => accepted,
        Err(e) => return refuse_handshake(worker, &tenant, &e),
    };
    // Checked again after the verifier, whose error would admit one tenant's client to another.
    if !is_trusted_peer(&tenant, &peer) {
        return worker.counts.refused_connection("foreign_tenant");
    }
    // The permit bounds handshakes in progress; the next one may begin now.
    drop(handshake);
    permit.end_handshake(true);
    let config = hbone_config(worker, &tenant);
    let tunnels = Rc::new(TunnelCount {
        open: Cell::new(0),
        permit: permit.clone(),
    });
    let queue = worker.accounts.of(&tenant, &worker.limits).queue.clone();
    let (trigger, drain) = worker.soft_drain.drain().branch();
    let phases = drain.watcher();
    let connect = |accepted: ConnectResult| {
        // The request was refused and counted by `canal_hbone` already.
        let Ok(incoming) = accepted else { return };
        let worker = worker.clone();
        let (name, scope) = (tenant.name.clone(), scope.clone());
        let counted = TunnelGuard::begin(&tunnels);
        let (queue, carrier) = (queue.clone(), permit.drain.clone());
        // The state of a tunnel takes several KiB, which tokio would copy ten times.
        tokio::task::spawn_local(Box::pin(async move {
            let _open = worker.count_connection();
            let _counted = counted;
            Scheduler::run(
                &queue,
                pin!(tunnel(
                    &worker,
                    name.as_str(),
                    &scope,
                    (incoming, client),
                    &carrier
                )),
            )
            .await;
        }));
    };
    // `canal_hbone` counts the reasons for the end.
    let served = canal_hbone::serve(stream, peer, &config, &worker.hbone, drain, connect);
    let mut served = pin!(served);
    tokio::select! {
        _ = &mut served => return,
        () = permit.drain.draining() => {}
    }
    // A soft drain of all clients has already drained this connection, and a second `drain` would
    // force it.
    if phases.phase() == DrainPhase::Running {
        trigger.drain(NO_DEADLINE);
    }
    let _ = served.await;
}

/// Waits for a client's first byte, so that a silent client uses no handshake permit.
async fn first_byte(worker: &Worker, stream: &TcpStream) -> Result<(), TimeoutKind> {
    let timer = worker.clock.timer();
    timer.arm(TimeoutKind::Head, worker.shared.config.times.head);
    // Readiness alone can be spurious. TLS reads the peeked byte, an error or the end again.
    timer.within(stream.peek(&mut [0])).await.map(|_| ())
}

/// Number of open tunnels on one connection. While it is zero, the connection may have to give way
/// to another.
struct TunnelCount {
    open: Cell<usize>,
    permit: Rc<ConnectionPermit>,
}

/// Counts an open tunnel until dropped.
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

/// Returns the settings of a tenant's HBONE connections: all of them share its buffers.
fn hbone_config(worker: &Worker, tenant: &TenantView) -> ServerConfig {
    ServerConfig {
        buffer_budget: Some(worker.buffer_budget(&tenant.name)),
        ..ServerConfig::default()
    }
}

/// Counts a failed handshake by its reason, and logs it.
fn refuse_handshake(worker: &Worker, tenant: &TenantView, e: &TlsError) {
    tracing::debug!(tenant = %tenant.name, error = %e, "gateway: a TLS handshake failed, the connection is closed");
    worker.counts.refused_connection(tls_reason(e));
}

fn tls_reason(e: &TlsError) -> &'static str {
    match e {
        TlsError::NoCertificate(_) => "no_certificate",
        TlsError::Peer(_) => "tls_peer",
        TlsError::Protocol(_) => "tls_protocol",
        TlsError::Io(_) => "tls_io",
        TlsError::Timeout(_) => "tls_timeout",
        TlsError::KeyServer(_) => "tls_key_server",
        TlsError::UnrecognizedName(_) => "unrecognized_name",
        TlsError::NoListenerCertificate => "no_certificate",
    }
}

/// Serves one CONNECT of an HBONE connection.
async fn tunnel(
    worker: &Rc<Worker>,
    tenant: &str,
    scope: &DialScope,
    (incoming, client): (IncomingConnect, SocketAddr),
    drain: &Rc<ConnectionDrain>,
) {
    // The tenant's current state counts, not its state when the connection was accepted.
    let snapshot = worker.snapshot();
    let welcomed = match snapshot.tenant(tenant) {
        None => Err(EstablishRefusal::TenantGone),
        Some(tenant) if tenant.closed => Err(EstablishRefusal::TenantClosed),
        Some(tenant) => open_session(worker, tenant, scope, (&incoming, client), drain),
    };
    // A tunnel may last for hours; a snapshot that is in use keeps replaced tables in memory.
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
        // The response to the CONNECT of a relay waits until an endpoint is connected.
        AppProtocol::Tcp => Box::pin(relay::tunnel(worker, &session, incoming, inbox)).await,
        // Requests must be read before an endpoint is selected, so the tunnel is accepted at once.
        protocol => {
            // On an error the client has reset the stream, so nothing is left to serve.
            if let Ok(stream) = incoming.accept(HeaderMap::new()) {
                sniff::serve_sniffed(
                    worker,
                    &session,
                    Io::Tunnel(Box::new(stream)),
                    inbox,
                    protocol,
                )
                .await;
            }
        }
    }
}

/// Creates the session for a CONNECT, or returns the reason for refusing it.
fn open_session(
    worker: &Rc<Worker>,
    tenant: &Arc<TenantView>,
    scope: &DialScope,
    (incoming, client): (&IncomingConnect, SocketAddr),
    drain: &Rc<ConnectionDrain>,
) -> Result<(Rc<ClientSession>, Rc<ResolvedDestination>), EstablishRefusal> {
    if ILLEGAL_PORTS.contains(&incoming.authority.port()) {
        return Err(EstablishRefusal::IllegalPort);
    }
    let destination = scope.decide(tenant, &incoming.authority)?;
    let (caller, is_claim_false) = caller(tenant, &incoming.peer, &incoming.headers, client);
    if is_claim_false {
        worker.counts.false_sources.inc();
    }
    let session = Rc::new(
        ClientSession::of_tunnel(worker, tenant, destination, caller, drain)
            .ok_or(EstablishRefusal::TenantConnections)?,
    );
    let (_, resolved) = session
        .resolve(worker)
        .map_err(|_| EstablishRefusal::UnknownDestination)?;
    Ok((session, resolved))
}

/// Identifies the client. The address from `forwarded` counts if the connection's own address
/// agrees; the name from the registry counts if the identity there agrees. Also returns whether
/// `forwarded` named an address that is not the client's.
fn caller(
    tenant: &TenantView,
    peer: &VerifiedPeer,
    headers: &HeaderMap,
    socket: SocketAddr,
) -> (ClientInfo, bool) {
    let text = |name: &str| {
        headers
            .get(name)
            .and_then(|v| v.to_str().ok())
            .unwrap_or("")
    };
    let forwarded = forwarded_for(text(FORWARDED));
    let address = decide_address(tenant, forwarded, socket);
    let party = party_at(tenant, address.ip(), Some(peer)).unwrap_or_else(|| {
        WorkloadLabels::of_identity(&peer.identity, &Baggage::decode(text(BAGGAGE)))
    });
    let principal =
        ClientPrincipal::with_verified_peer(&peer.identity, tenant.trust_domain.as_ref());
    (
        ClientInfo {
            party,
            address,
            balancer: None,
            secured: true,
            tls: false,
            principal,
        },
        forwarded.is_some_and(|forwarded| forwarded != address),
    )
}

/// Returns the client's address. A node dials from its pod's network namespace, so its claim can be
/// compared with the connection's own address; a pod with its own certificate could claim any
/// address. The pod's address of the other family counts as equal.
fn decide_address(
    tenant: &TenantView,
    forwarded: Option<SocketAddr>,
    socket: SocketAddr,
) -> SocketAddr {
    let socket = SocketAddr::new(socket.ip().to_canonical(), socket.port());
    let is_same = |forwarded: &SocketAddr| {
        forwarded.ip() == socket.ip()
            || tenant
                .workload_at(socket.ip())
                .is_some_and(|workload| workload.addresses.contains(&forwarded.ip()))
    };
    forwarded
        .map(|forwarded| SocketAddr::new(forwarded.ip().to_canonical(), forwarded.port()))
        .filter(is_same)
        .unwrap_or(socket)
}

fn party_at(
    tenant: &TenantView,
    ip: IpAddr,
    peer: Option<&VerifiedPeer>,
) -> Option<WorkloadLabels> {
    let workload = tenant.workload_at(ip)?;
    let agrees = peer.is_none_or(|p| workload.identity.contains(&p.identity));
    agrees.then(|| (*workload.party).clone())
}
