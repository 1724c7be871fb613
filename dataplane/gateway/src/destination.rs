//! What a client dialled: whether it may dial that through its connection, and what it is in one snapshot. Look-ups inside one tenant; no rules
//! are read and no endpoint is chosen.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use canal_guard::Place;
use canal_kit::hbone::Authority;
use canal_model::ids::ServiceKey;
use canal_model::program::AppProtocol;
use canal_wire::tier::TIER_SERVICE;

use crate::endpoints::{SetView, Upstreams};
use crate::snapshot::{Endpoint, EndpointSet, Guard, RequestThrottle, ServiceView, Snapshot, TenantView, WorkloadView};

/// What a client dialled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Destination {
    /// A service's virtual address, or a pod's own.
    Address(SocketAddr),
    /// A service's hostname, lower case, and port.
    Name(String, u16),
    /// Named by the configuration of a plain listener, or by the address that a connection came in on.
    Service(ServiceKey, u16),
    /// A pod's own address, and nothing else.
    Pod(SocketAddr),
}

/// What may be dialled through a connection, by the address that it came in on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Scope {
    /// A gateway replica's address in the tenant: all services and pods of the tenant.
    Tenant,
    /// One service's address inside the tier: that service and its endpoints.
    Service(ServiceKey),
    /// The address of the tier's own service: pods by their addresses.
    Pods,
}

/// Why a CONNECT leads nowhere through the connection that it came on. The names are counter labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Misplaced {
    /// Another service's, or nobody's: the edge sends each service's connections to its own address.
    WrongService,
    UnknownPort,
}

impl Scope {
    /// Of a service's address inside the tier.
    pub(crate) fn inside(service: &ServiceKey) -> Self {
        if (service.namespace.as_str(), service.name.as_str()) == TIER_SERVICE { Self::Pods } else { Self::Service(service.clone()) }
    }

    /// What a CONNECT to `authority` dials.
    pub(crate) fn decide(&self, tenant: &TenantView, authority: &Authority) -> Result<Destination, Misplaced> {
        match (self, authority) {
            (Scope::Tenant, Authority::Address(address)) => Ok(Destination::Address(*address)),
            (Scope::Tenant, Authority::Name(host, port)) => Ok(Destination::Name(host.clone(), *port)),
            (Scope::Pods, Authority::Address(address)) if tenant.workload_at(address.ip()).is_some() => Ok(Destination::Pod(*address)),
            (Scope::Pods, _) => Err(Misplaced::WrongService),
            (Scope::Service(key), _) => decide_service(tenant, key, authority),
        }
    }
}

fn decide_service(tenant: &TenantView, key: &ServiceKey, authority: &Authority) -> Result<Destination, Misplaced> {
    let named = match authority {
        Authority::Name(host, _) => tenant.service_named(host).map(|s| &s.names.key),
        Authority::Address(a) => tenant.service_at(a.ip()).map(|s| &s.names.key).or_else(|| tenant.gateway_of(a.ip())),
    };
    let known = |port| tenant.service(key).is_some_and(|s| s.port(port).is_some());
    match (named, authority) {
        (Some(named), _) if named != key => Err(Misplaced::WrongService),
        (Some(_), _) if known(authority.port()) => Ok(Destination::Service(key.clone(), authority.port())),
        (Some(_), _) => Err(Misplaced::UnknownPort),
        (None, Authority::Address(a)) if serves(tenant, *a, key) => Ok(Destination::Pod(*a)),
        (None, _) => Err(Misplaced::WrongService),
    }
}

/// Whether a pod serves the service at that address.
fn serves(tenant: &TenantView, at: SocketAddr, key: &ServiceKey) -> bool {
    tenant.workload_at(at.ip()).is_some_and(|w| w.serves.iter().any(|(service, _, target)| service == key && *target == at.port()))
}

/// A destination as one snapshot knows it.
#[derive(Debug)]
pub(crate) enum Resolved {
    Service { service: Arc<ServiceView>, port: usize },
    Pod { tenant: String, view: Rc<SetView> },
}

impl Resolved {
    /// Finds a destination inside `tenant`.
    pub(crate) fn find(upstreams: &Upstreams, tenant: &TenantView, destination: &Destination) -> Option<Self> {
        let service = |service: &Arc<ServiceView>, port: u16| {
            let port = service.ports.iter().position(|p| p.port == port)?;
            Some(Self::Service { service: service.clone(), port })
        };
        match destination {
            Destination::Service(key, port) => service(tenant.service(key)?, *port),
            Destination::Name(host, port) => service(tenant.service_named(host)?, *port),
            Destination::Address(address) => match tenant.service_at(address.ip()) {
                Some(found) => service(found, address.port()),
                None => Some(Self::pod(upstreams, tenant, tenant.workload_at(address.ip())?, *address)),
            },
            Destination::Pod(address) => Some(Self::pod(upstreams, tenant, tenant.workload_at(address.ip())?, *address)),
        }
    }

    /// A pod by its own address: no routes, one endpoint.
    fn pod(upstreams: &Upstreams, tenant: &TenantView, workload: &Arc<WorkloadView>, address: SocketAddr) -> Self {
        let served = workload.serves.iter().find(|(_, _, target)| *target == address.port());
        let port = served.and_then(|(service, port, _)| tenant.service(service)?.port(*port));
        let id = upstreams.direct_id();
        let guard = tenant.policies.guard(&Place::workload(&workload.namespace, &workload.labels));
        let set = EndpointSet {
            id,
            service: None,
            port: address.port(),
            protocol: port.map_or(AppProtocol::Detect, |p| p.protocol),
            known: true,
            endpoints: [Endpoint { id, workload: workload.clone(), address, guard }].into(),
        };
        Self::Pod { tenant: tenant.name.to_string(), view: upstreams.direct(set, tenant.number) }
    }

    /// Whose it is.
    pub(crate) fn tenant(&self) -> &str {
        match self {
            Self::Service { service, .. } => service.names.key.tenant.as_str(),
            Self::Pod { tenant, .. } => tenant,
        }
    }

    /// What limits requests to it.
    pub(crate) fn throttle(&self) -> Option<Arc<RequestThrottle>> {
        match self {
            Self::Service { service, .. } => service.throttle.clone(),
            Self::Pod { .. } => None,
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

    /// The dialled service's own guard, where a route led to endpoints of another one: their guards do not know of it.
    #[inline]
    pub(crate) fn guard_beside(&self, view: &SetView) -> Option<&Guard> {
        let Self::Service { service, .. } = self else { return None };
        let guard = service.guard.as_deref()?;
        let elsewhere = view.set.service.as_ref().is_none_or(|names| names.key != service.names.key);
        elsewhere.then_some(guard)
    }

    /// The destination's own endpoints, without routes: for TCP, and to name the service in metrics of requests that went nowhere.
    pub(crate) fn own(&self, upstreams: &Upstreams, snapshot: &Snapshot) -> Option<Rc<SetView>> {
        match self {
            Self::Service { service, port } => upstreams.view(snapshot, service.ports[*port].slot),
            Self::Pod { view, .. } => Some(view.clone()),
        }
    }
}
