//! Phase *place*: from a destination (what the client dialled) and a request's head to the endpoints that may serve it. Look-ups in one
//! snapshot, inside one tenant; nothing is sent or chosen here.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use canal_model::ids::ServiceKey;
use canal_model::program::AppProtocol;
use canal_router::Request;

use crate::fault::Fault;
use crate::finish::Texts;
use crate::snapshot::{Endpoint, EndpointSet, PortView, ServiceView, Snapshot, TenantView, Way, WorkloadView};
use crate::upstream::SetView;
use crate::worker::Worker;

/// What a client dialled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Destination {
    /// A service's virtual address, or a pod's own.
    Address(SocketAddr),
    /// A service's hostname, lower case, and port.
    Name(String, u16),
    /// Named in the configuration of a plain listener.
    Service(ServiceKey, u16),
}

/// A destination as one snapshot knows it.
#[derive(Debug)]
pub(crate) enum Resolved {
    Service { service: Arc<ServiceView>, port: usize },
    Pod { tenant: String, view: Rc<SetView> },
}

impl Resolved {
    /// Finds a destination inside `tenant`.
    pub(crate) fn find(worker: &Worker, tenant: &TenantView, destination: &Destination) -> Option<Self> {
        let service = |service: &Arc<ServiceView>, port: u16| {
            let port = service.ports.iter().position(|p| p.port == port)?;
            Some(Self::Service { service: service.clone(), port })
        };
        match destination {
            Destination::Service(key, port) => service(tenant.service(key)?, *port),
            Destination::Name(host, port) => service(tenant.service_named(host)?, *port),
            Destination::Address(address) => match tenant.service_at(address.ip()) {
                Some(found) => service(found, address.port()),
                None => Some(Self::pod(worker, tenant, tenant.workload_at(address.ip())?, *address)),
            },
        }
    }

    /// A pod by its own address: no routes, one endpoint.
    fn pod(worker: &Worker, tenant: &TenantView, workload: &Arc<WorkloadView>, address: SocketAddr) -> Self {
        let served = workload.serves.iter().find(|(_, _, target)| *target == address.port());
        let port = served.and_then(|(service, port, _)| tenant.service(service)?.port(*port));
        let id = worker.direct_id();
        let set = EndpointSet {
            id,
            service: None,
            port: address.port(),
            protocol: port.map_or(AppProtocol::Detect, |p| p.protocol),
            known: true,
            endpoints: [Endpoint { id, workload: workload.clone(), address }].into(),
        };
        Self::Pod { tenant: tenant.name.to_string(), view: worker.upstreams.direct(set, tenant.number) }
    }

    /// Whose it is.
    pub(crate) fn tenant(&self) -> &str {
        match self {
            Self::Service { service, .. } => service.names.key.tenant.as_str(),
            Self::Pod { tenant, .. } => tenant,
        }
    }

    /// What is spoken there.
    pub(crate) fn protocol(&self) -> AppProtocol {
        match self {
            Self::Service { service, port } => service.ports[*port].protocol,
            Self::Pod { view, .. } => view.set.protocol,
        }
    }

    /// The service's hostname.
    pub(crate) fn hostname(&self) -> Option<&str> {
        match self {
            Self::Service { service, .. } => Some(&service.names.hostname),
            Self::Pod { .. } => None,
        }
    }

    /// The destination's own endpoints, without routes: for TCP, and to name the service in metrics of requests that went nowhere.
    pub(crate) fn own(&self, worker: &Worker, snapshot: &Snapshot) -> Option<Rc<SetView>> {
        match self {
            Self::Service { service, port } => worker.upstreams.view(snapshot, service.ports[*port].slot, worker.az()),
            Self::Pod { view, .. } => Some(view.clone()),
        }
    }
}

/// The endpoints for one request.
pub(crate) fn decide<R: Request>(
    worker: &Worker,
    snapshot: &Snapshot,
    resolved: &Resolved,
    request: &R,
    texts: Option<&mut Box<Texts>>,
) -> Result<Rc<SetView>, Fault> {
    let Resolved::Service { service, port } = resolved else {
        return resolved.own(worker, snapshot).ok_or(Fault::NoService);
    };
    let port: &PortView = &service.ports[*port];
    let slot = match &service.routes {
        Some(routes) if port.routed => {
            let (way, rule) = routes.decide(port.port, request, worker.random());
            if let (Some(texts), Some(rule)) = (texts, rule) {
                texts.route = rule.key.to_string();
            }
            match way {
                Way::Slot(slot) => slot,
                Way::Refuse { status, reason } => return Err(Fault::Route { status, reason }),
                Way::Nowhere => return Err(Fault::NoRoute),
            }
        }
        _ => port.slot,
    };
    worker.upstreams.view(snapshot, slot, worker.az()).ok_or(Fault::NoService)
}

/// The host in an authority, without port and brackets.
pub(crate) fn host_of(authority: &[u8]) -> &[u8] {
    match canal_h1::split_authority(authority) {
        Some((host, _)) => host.strip_prefix(b"[").and_then(|h| h.strip_suffix(b"]")).unwrap_or(host),
        None => authority,
    }
}
