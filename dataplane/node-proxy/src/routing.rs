//! Routing decisions of the node, without IO: the route of a captured connection, and the admission
//! of tunnels and of plaintext connections.
//!
//! Each decision is a small value. The paths execute it: [`crate::outbound`], [`crate::inbound`],
//! [`crate::inbound_plaintext`].

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use canal_hbone::ConnectAuthority;
use canal_model::identity::Identity;
use canal_model::program::{OutboundTrafficPolicy, Service};
use canal_wire::hbone::ILLEGAL_PORTS;
use canal_wire::tier::DNS_PORT;

use crate::authorization::{AuthorizationQuery, AuthorizationRefusal, ConnectionSource, PodPolicy};
use crate::direct::DirectPeers;
use crate::pod::LocalPod;
use crate::refusal::NodeRefusal;
use crate::snapshot::{GatewayAddressTarget, NodeSnapshot, NodeTenantView};

/// Route of a captured connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutboundRoute {
    /// The connection goes through a gateway with this `:authority`; the service is for the
    /// records.
    Mesh {
        authority: SocketAddr,
        service: Option<Arc<Service>>,
    },
    /// The connection goes to the node of one of these pods without a gateway. If none of them
    /// opens a tunnel, it goes to `authority` like `Mesh`.
    Direct {
        peers: Arc<DirectPeers>,
        authority: SocketAddr,
        service: Option<Arc<Service>>,
    },
    /// The pod dialed itself: plain TCP, which never leaves the namespace.
    Own(SocketAddr),
    /// Plain TCP out of the mesh, as the tenant permits, or to a resolver: the tier's own, or one
    /// that the tenant names.
    Passthrough(SocketAddr),
}

/// Decides the route of a connection of `pod` to `destination`.
///
/// The order matters: reserved destinations are refused before known ones are routed, and only the
/// rest falls under the tenant's policy for the outside.
///
/// # Errors
/// Returns the reason for the refusal.
pub fn decide_outbound(
    view: &NodeSnapshot,
    pod: &LocalPod,
    destination: SocketAddr,
) -> Result<OutboundRoute, NodeRefusal> {
    // An IPv6 socket that dials IPv4 has a mapped address, and tables have IPv4 addresses.
    let to = SocketAddr::new(destination.ip().to_canonical(), destination.port());
    let reserved = ILLEGAL_PORTS.contains(&to.port());
    // Before the tenant is needed: a pod reaches itself even while its tenant is unknown or closed.
    if pod.ips.contains(&to.ip()) {
        return if reserved {
            Err(NodeRefusal::ReservedPort)
        } else {
            Ok(OutboundRoute::Own(to))
        };
    }
    let tenant = view.tenant(&pod.tenant).ok_or(NodeRefusal::TenantUnknown)?;
    if tenant.rules.closed {
        return Err(NodeRefusal::TenantClosed);
    }
    if let Some(service) = tenant.service(to.ip()) {
        return to_service(tenant, service, to);
    }
    match tenant.gateway_address_target(to.ip()) {
        // Clients that resolve names by the tier's DNS dial a service's gateway address. It
        // identifies the service like a virtual address.
        Some(GatewayAddressTarget::Service(service)) => return to_service(tenant, service, to),
        Some(GatewayAddressTarget::Tier) if to.port() == DNS_PORT => {
            return Ok(OutboundRoute::Passthrough(to));
        }
        // Other ports of the tier's addresses are refused below.
        Some(GatewayAddressTarget::Tier) | None => {}
    }
    // The services' addresses within these ranges were routed above; no pod dials any other.
    if tenant.is_gateway(to.ip()) {
        return Err(NodeRefusal::GatewayAddress);
    }
    if tenant.is_pod(to.ip()) {
        return if reserved {
            Err(NodeRefusal::ReservedPort)
        } else {
            Ok(through(tenant.direct_address(to), to, None))
        };
    }
    // As for UDP queries, which are not captured: the tenant names the resolvers of its pods.
    if to.port() == DNS_PORT && tenant.tenant.resolvers.contains(&to.ip()) {
        return Ok(OutboundRoute::Passthrough(to));
    }
    match tenant.tenant.outbound_traffic_policy {
        OutboundTrafficPolicy::Deny => Err(NodeRefusal::OutsideMesh),
        OutboundTrafficPolicy::Passthrough => Ok(OutboundRoute::Passthrough(to)),
    }
}

/// Routes to a service's own ports, whatever their numbers: the illegal ports are those of pods.
fn to_service(
    tenant: &NodeTenantView,
    service: &Arc<Service>,
    to: SocketAddr,
) -> Result<OutboundRoute, NodeRefusal> {
    match service.ports.iter().any(|p| p.port == to.port()) {
        true => Ok(through(
            tenant.direct_port(&service.key, to.port()),
            to,
            Some(service.clone()),
        )),
        false => Err(NodeRefusal::UnknownPort),
    }
}

/// Selects the direct route where ready pods serve the port.
fn through(
    peers: Option<&Arc<DirectPeers>>,
    authority: SocketAddr,
    service: Option<Arc<Service>>,
) -> OutboundRoute {
    match peers {
        Some(peers) => OutboundRoute::Direct {
            peers: peers.clone(),
            authority,
            service,
        },
        None => OutboundRoute::Mesh { authority, service },
    }
}

/// An admitted connection: the application to connect to, and the query to repeat when policies
/// change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdmittedConnection {
    pub target: SocketAddr,
    pub service: Option<Arc<Service>>,
    /// Client address that the application sees. `None`: it sees the hop that dialed, because the
    /// connection has many clients or one of another tenant. Port 0: unknown.
    pub client: Option<SocketAddr>,
    pub query: AuthorizationQuery,
}

/// The peer that requests a tunnel, and the source that it states.
#[derive(Debug, Clone, Copy)]
pub struct TunnelClient<'a> {
    /// Identity that the peer's certificate proves.
    pub peer: &'a Identity,
    /// Remote address of the peer's connection.
    pub address: IpAddr,
    /// Source that the peer states: its identity, and its address.
    pub forwarded: (Option<&'a str>, Option<SocketAddr>),
}

/// Decides on a CONNECT to `authority` that arrived at the pod's address `dialled`, in ztunnel's
/// order: destination, port, authorization.
///
/// The method and the form of the authority were checked when the request was decoded. The peer's
/// trust domain was checked in the handshake and is checked here again.
///
/// # Errors
/// Returns the reason for the refusal.
pub fn decide_inbound(
    view: &NodeSnapshot,
    pod: &LocalPod,
    policy: &PodPolicy,
    dialled: IpAddr,
    authority: &ConnectAuthority,
    caller: &TunnelClient<'_>,
) -> Result<AdmittedConnection, AuthorizationRefusal> {
    let refuse = |refusal| AuthorizationRefusal {
        refusal,
        policy: None,
        why: String::new(),
    };
    let tenant = view
        .tenant(&pod.tenant)
        .ok_or_else(|| refuse(NodeRefusal::TenantUnknown))?;
    // A dual-stack listener reports an IPv4 destination as a mapped address.
    let dialled = dialled.to_canonical();
    let (target, service) = match authority {
        // A tunnel leads only to the address that was dialled, and never on to another host.
        ConnectAuthority::Address(a) if a.ip().to_canonical() != dialled => {
            return Err(refuse(NodeRefusal::DestinationMismatch));
        }
        ConnectAuthority::Address(a) => (SocketAddr::new(dialled, a.port()), None),
        ConnectAuthority::Name(host, port) => resolve(tenant, pod, dialled, host, *port)
            .ok_or_else(|| refuse(NodeRefusal::UnknownHost))?,
    };
    if ILLEGAL_PORTS.contains(&target.port()) {
        return Err(refuse(NodeRefusal::ReservedPort));
    }
    let (stated_identity, stated_address) = caller.forwarded;
    let source = policy
        .source(caller.peer, stated_identity)
        .ok_or_else(|| refuse(NodeRefusal::BadSource))?;
    let (address, client) = match &source {
        // Another tenant's addresses may overlap with this one's. Policies know the identity; the
        // application must not confuse the two.
        ConnectionSource::Forwarded(named) if policy.is_foreign(named) => {
            (stated_address.map(|a| a.ip()), None)
        }
        ConnectionSource::Forwarded(_) => (stated_address.map(|a| a.ip()), stated_address),
        // The gateway is no client: policies and the application must not see its address as one.
        ConnectionSource::Gateway => (None, None),
        ConnectionSource::Proven(_) | ConnectionSource::Plain | ConnectionSource::Node => {
            (Some(caller.address), Some(proven_client(caller)))
        }
    };
    let query = AuthorizationQuery {
        source,
        address,
        destination: target,
        service: service.as_ref().map(|s| s.key.clone()),
    };
    policy.decide(&query).map(|()| AdmittedConnection {
        target,
        service,
        client,
        query,
    })
}

/// Returns the client of a tunnel from another node, which dials from its pod's namespace: the
/// connection's own address is the client's. Of the stated source only the port is used, because
/// trusting it does no harm.
fn proven_client(caller: &TunnelClient<'_>) -> SocketAddr {
    let address = caller.address.to_canonical();
    let port = caller
        .forwarded
        .1
        .filter(|forwarded| forwarded.ip().to_canonical() == address)
        .map_or(0, |forwarded| forwarded.port());
    SocketAddr::new(address, port)
}

/// Decides on a connection without mTLS from `peer` to `destination`, an address of the pod.
/// `from_node` returns whether a process of this node made it; it is called only where policies
/// refuse.
///
/// # Errors
/// Returns the reason for the refusal.
pub fn decide_plain(
    policy: &PodPolicy,
    destination: SocketAddr,
    peer: SocketAddr,
    from_node: impl FnOnce(SocketAddr, SocketAddr) -> bool,
) -> Result<AdmittedConnection, AuthorizationRefusal> {
    // A dual-stack listener reports IPv4 addresses as mapped ones.
    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
    let target = SocketAddr::new(destination.ip().to_canonical(), destination.port());
    if ILLEGAL_PORTS.contains(&target.port()) {
        return Err(AuthorizationRefusal {
            refusal: NodeRefusal::ReservedPort,
            policy: None,
            why: String::new(),
        });
    }
    let query = AuthorizationQuery {
        source: ConnectionSource::Plain,
        address: Some(peer.ip()),
        destination: target,
        service: None,
    };
    // Without the port: the client's own connection occupies it towards the same target.
    let client = Some(SocketAddr::new(peer.ip(), 0));
    match policy.decide(&query) {
        Ok(()) => Ok(AdmittedConnection {
            target,
            service: None,
            client,
            query,
        }),
        Err(_) if from_node(peer, target) => {
            let query = AuthorizationQuery {
                source: ConnectionSource::Node,
                ..query
            };
            Ok(AdmittedConnection {
                target,
                service: None,
                client,
                query,
            })
        }
        Err(no) => Err(no),
    }
}

type ResolvedAddress = (SocketAddr, Option<Arc<Service>>);

fn resolve(
    tenant: &NodeTenantView,
    pod: &LocalPod,
    dialled: IpAddr,
    host: &str,
    port: u16,
) -> Option<ResolvedAddress> {
    let service = tenant.service_by_host(host)?;
    let target = tenant.target_port(&pod.uid, &service.key, port)?;
    Some((SocketAddr::new(dialled, target), Some(service.clone())))
}

#[cfg(test)]
pub(crate) mod tests;
