//! The node's questions, answered without IO: where does a captured connection go, may a tunnel come in, may a connection in plaintext? Each
//! answer is a small value that the roads ([`crate::outbound`], [`crate::inbound`], [`crate::plain`]) carry out.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use canal_kit::hbone::Authority;
use canal_model::identity::Identity;
use canal_model::program::{OutsideMesh, Service};
use canal_wire::hbone::ILLEGAL_PORTS;
use canal_wire::tier::DNS_PORT;

use crate::authorization::{PodPolicy, Question, Refused, Source};
use crate::pod::Pod;
use crate::refusal::Refusal;
use crate::view::{Behind, TenantView, View};

/// Where a captured connection goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// Through a gateway, as this `:authority`; the service is for the records.
    Mesh { authority: SocketAddr, service: Option<Arc<Service>> },
    /// The pod dialled itself: plain, it never leaves the namespace.
    Own(SocketAddr),
    /// In plain TCP: out of the mesh, as the tenant allows, or to the tier's own DNS.
    Passthrough(SocketAddr),
}

/// Decides for a connection of `pod` that was going to `destination`.
///
/// The order matters: what is reserved is refused before what is known is served, and only what is neither falls to the tenant's policy
/// for the outside.
pub fn decide_outbound(view: &View, pod: &Pod, destination: SocketAddr) -> Result<Way, Refusal> {
    let to = SocketAddr::new(destination.ip().to_canonical(), destination.port());
    let reserved = ILLEGAL_PORTS.contains(&to.port());
    if pod.ips.contains(&to.ip()) {
        return if reserved { Err(Refusal::ReservedPort) } else { Ok(Way::Own(to)) };
    }
    let tenant = view.tenant(&pod.tenant).ok_or(Refusal::TenantUnknown)?;
    if tenant.rules.closed {
        return Err(Refusal::TenantClosed);
    }
    if let Some(service) = tenant.service(to.ip()) {
        return to_service(service, to);
    }
    match tenant.behind(to.ip()) {
        // Whoever resolves names by the tier's DNS dials a service's gateway address. It is the service's as its virtual address is.
        Some(Behind::Service(service)) => return to_service(service, to),
        Some(Behind::Tier) if to.port() == DNS_PORT => return Ok(Way::Passthrough(to)),
        Some(Behind::Tier) | None => {}
    }
    if tenant.is_gateway(to.ip()) {
        return Err(Refusal::GatewayAddress);
    }
    if tenant.is_pod(to.ip()) {
        return if reserved { Err(Refusal::ReservedPort) } else { Ok(Way::Mesh { authority: to, service: None }) };
    }
    match tenant.tenant.outside {
        OutsideMesh::Deny => Err(Refusal::OutsideMesh),
        OutsideMesh::Passthrough => Ok(Way::Passthrough(to)),
    }
}

/// The service's own ports, whatever their number: the illegal ones are a pod's.
fn to_service(service: &Arc<Service>, to: SocketAddr) -> Result<Way, Refusal> {
    match service.ports.iter().any(|p| p.port == to.port()) {
        true => Ok(Way::Mesh { authority: to, service: Some(service.clone()) }),
        false => Err(Refusal::UnknownPort),
    }
}

/// A connection that may come in: the application to connect to, and what was asked, to be asked again when policies change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    pub target: SocketAddr,
    pub service: Option<Arc<Service>>,
    pub question: Question,
}

/// Who asks for a tunnel, and what it says.
#[derive(Debug, Clone, Copy)]
pub struct Caller<'a> {
    /// As its certificate proved.
    pub peer: &'a Identity,
    /// The other end of its connection.
    pub address: IpAddr,
    /// What it says of the source: the identity, and the address.
    pub told: (Option<&'a str>, Option<IpAddr>),
}

/// Decides for a CONNECT to `authority` that arrived at `dialled` in the pod, in ztunnel's order: destination, port, authorization.
/// (Method and authority's form were checked when it was read; the peer's trust domain in the handshake, and here again.)
pub fn decide_inbound(
    view: &View,
    pod: &Pod,
    policy: &PodPolicy,
    dialled: IpAddr,
    authority: &Authority,
    caller: &Caller<'_>,
) -> Result<Admission, Refused> {
    let refuse = |refusal| Refused { refusal, policy: None, why: String::new() };
    let tenant = view.tenant(&pod.tenant).ok_or_else(|| refuse(Refusal::TenantUnknown))?;
    let dialled = dialled.to_canonical();
    let (target, service) = match authority {
        Authority::Address(a) if a.ip().to_canonical() != dialled => return Err(refuse(Refusal::DestinationMismatch)),
        Authority::Address(a) => (SocketAddr::new(dialled, a.port()), None),
        Authority::Name(host, port) => resolve(tenant, pod, dialled, host, *port).ok_or_else(|| refuse(Refusal::UnknownHost))?,
    };
    if ILLEGAL_PORTS.contains(&target.port()) {
        return Err(refuse(Refusal::ReservedPort));
    }
    let source = policy.source(caller.peer, caller.told.0).ok_or_else(|| refuse(Refusal::BadSource))?;
    let address = match source {
        Source::Told(_) => caller.told.1,
        Source::Gateway => None,
        Source::Proven(_) | Source::Plain | Source::Node => Some(caller.address),
    };
    let question = Question { source, address, destination: target, service: service.as_ref().map(|s| s.key.clone()) };
    policy.decide(&question).map(|()| Admission { target, service, question })
}

/// Decides for a connection without mTLS from `peer` that was dialled as `destination`, an address of the pod's. `from_node`, whether a
/// process of this node made it, is asked only where policies do not let it in.
pub fn decide_plain(
    policy: &PodPolicy,
    destination: SocketAddr,
    peer: SocketAddr,
    from_node: impl FnOnce(SocketAddr, SocketAddr) -> bool,
) -> Result<Admission, Refused> {
    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
    let target = SocketAddr::new(destination.ip().to_canonical(), destination.port());
    if ILLEGAL_PORTS.contains(&target.port()) {
        return Err(Refused { refusal: Refusal::ReservedPort, policy: None, why: String::new() });
    }
    let question = Question { source: Source::Plain, address: Some(peer.ip()), destination: target, service: None };
    match policy.decide(&question) {
        Ok(()) => Ok(Admission { target, service: None, question }),
        Err(_) if from_node(peer, target) => {
            Ok(Admission { target, service: None, question: Question { source: Source::Node, ..question } })
        }
        Err(no) => Err(no),
    }
}

type Resolved = (SocketAddr, Option<Arc<Service>>);

fn resolve(tenant: &TenantView, pod: &Pod, dialled: IpAddr, host: &str, port: u16) -> Option<Resolved> {
    let service = tenant.service_by_host(host)?;
    let target = tenant.target_port(&pod.uid, &service.key, port)?;
    Some((SocketAddr::new(dialled, target), Some(service.clone())))
}

#[cfg(test)]
mod tests;
