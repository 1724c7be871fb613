//! The node's two questions, answered without IO: where does a captured connection go, and may a tunnel come in? Each answer is a
//! small value that the roads ([`crate::outbound`], [`crate::inbound`]) carry out.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use canal_kit::hbone::Authority;
use canal_model::identity::Peer;
use canal_model::program::{OutsideMesh, Service};
use canal_wire::hbone::ILLEGAL_PORTS;
use canal_wire::tier::DNS_PORT;

use crate::authorization::{Authorization, Question};
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

/// A tunnel that may come in: the application to connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    pub target: SocketAddr,
    pub service: Option<Arc<Service>>,
}

/// Decides for a CONNECT to `authority` that arrived at `dialled` in the pod, in ztunnel's order: destination, port, authorization.
/// (Method and authority's form were checked when it was read; the peer's trust domain in the handshake.)
pub fn decide_inbound(
    view: &View,
    pod: &Pod,
    dialled: IpAddr,
    authority: &Authority,
    peer: &Peer,
    authorization: &Authorization,
) -> Result<Admission, Refusal> {
    let tenant = view.tenant(&pod.tenant).ok_or(Refusal::TenantUnknown)?;
    let dialled = dialled.to_canonical();
    let admission = match authority {
        Authority::Address(a) if a.ip().to_canonical() != dialled => return Err(Refusal::DestinationMismatch),
        Authority::Address(a) => Admission { target: SocketAddr::new(dialled, a.port()), service: None },
        Authority::Name(host, port) => resolve(tenant, pod, dialled, host, *port).ok_or(Refusal::UnknownHost)?,
    };
    if ILLEGAL_PORTS.contains(&admission.target.port()) {
        return Err(Refusal::ReservedPort);
    }
    let question = Question { trust_domain: &tenant.tenant.trust_domain, source: &peer.identity, destination: admission.target };
    match authorization.allows(&question) {
        true => Ok(admission),
        false => Err(Refusal::Denied),
    }
}

fn resolve(tenant: &TenantView, pod: &Pod, dialled: IpAddr, host: &str, port: u16) -> Option<Admission> {
    let service = tenant.service_by_host(host)?;
    let target = tenant.target_port(&pod.uid, &service.key, port)?;
    Some(Admission { target: SocketAddr::new(dialled, target), service: Some(service.clone()) })
}

#[cfg(test)]
mod tests;
