//! Resolves the destination that a client dialled: checks that its connection permits it, and looks
//! it up in one snapshot.
//!
//! All lookups are inside one tenant. It evaluates no routes and selects no endpoint. Start with
//! [`DialScope::decide`], then [`ResolvedDestination::find`].

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use canal_authorization::PolicyDestination;
use canal_gateway_config::{
    DestinationPolicy, Endpoint, EndpointSet, FilterChain, LoadBalancing, RequestThrottle,
    ServiceView, Snapshot, TenantView, WorkloadView,
};
use canal_hbone::ConnectAuthority;
use canal_model::ids::ServiceKey;
use canal_model::program::AppProtocol;
use canal_wire::tier::TIER_SERVICE;

use crate::endpoints::{EndpointSetState, Upstreams};

/// Destination that a client dialled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Destination {
    /// A service's virtual address, or a pod's own address.
    Address(SocketAddr),
    /// A service's hostname in lower case, and a port.
    Name(String, u16),
    /// A service that the configuration of a plain listener, or the local address of a connection,
    /// identifies.
    Service(ServiceKey, u16),
    /// A pod's own address; never a service's.
    Pod(SocketAddr),
}

/// Destinations that may be dialled through a connection, by the connection's local address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DialScope {
    /// The local address is a gateway replica's in the tenant: all services and pods of the tenant.
    Tenant,
    /// The local address is one service's inside the tier: that service and its endpoints.
    Service(ServiceKey),
    /// The local address is that of the tier's own service: pods by their addresses.
    Pods,
}

/// Reason why a CONNECT is not possible through its connection. The names are counter labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DestinationError {
    /// The destination is another service's or unknown. The edge sends each service's connections
    /// to that service's own address.
    WrongService,
    UnknownPort,
}

impl DialScope {
    /// Returns the scope of a service's address inside the tier.
    pub(crate) fn inside(service: &ServiceKey) -> Self {
        if (service.namespace.as_str(), service.name.as_str()) == TIER_SERVICE {
            Self::Pods
        } else {
            Self::Service(service.clone())
        }
    }

    /// Returns the destination of a CONNECT to `authority`.
    pub(crate) fn decide(
        &self,
        tenant: &TenantView,
        authority: &ConnectAuthority,
    ) -> Result<Destination, DestinationError> {
        match (self, authority) {
            (DialScope::Tenant, ConnectAuthority::Address(address)) => {
                Ok(Destination::Address(*address))
            }
            (DialScope::Tenant, ConnectAuthority::Name(host, port)) => {
                Ok(Destination::Name(host.clone(), *port))
            }
            (DialScope::Pods, ConnectAuthority::Address(address))
                if tenant.workload_at(address.ip()).is_some() =>
            {
                Ok(Destination::Pod(*address))
            }
            (DialScope::Pods, _) => Err(DestinationError::WrongService),
            (DialScope::Service(key), _) => decide_service(tenant, key, authority),
        }
    }
}

fn decide_service(
    tenant: &TenantView,
    key: &ServiceKey,
    authority: &ConnectAuthority,
) -> Result<Destination, DestinationError> {
    let named = match authority {
        ConnectAuthority::Name(host, _) => tenant.service_named(host).map(|s| &s.names.key),
        ConnectAuthority::Address(a) => tenant
            .service_at(a.ip())
            .map(|s| &s.names.key)
            .or_else(|| tenant.gateway_of(a.ip())),
    };
    let known = |port| tenant.service(key).is_some_and(|s| s.port(port).is_some());
    match (named, authority) {
        (Some(named), _) if named != key => Err(DestinationError::WrongService),
        (Some(_), _) if known(authority.port()) => {
            Ok(Destination::Service(key.clone(), authority.port()))
        }
        (Some(_), _) => Err(DestinationError::UnknownPort),
        (None, ConnectAuthority::Address(a)) if serves(tenant, *a, key) => Ok(Destination::Pod(*a)),
        (None, _) => Err(DestinationError::WrongService),
    }
}

/// True if a pod serves the service at that address.
fn serves(tenant: &TenantView, at: SocketAddr, key: &ServiceKey) -> bool {
    tenant.workload_at(at.ip()).is_some_and(|w| {
        w.serves
            .iter()
            .any(|(service, _, target)| service == key && *target == at.port())
    })
}

/// A destination resolved in one snapshot.
#[derive(Debug)]
pub(crate) enum ResolvedDestination {
    Service {
        service: Arc<ServiceView>,
        port: usize,
    },
    Pod {
        tenant: String,
        view: Rc<EndpointSetState>,
    },
}

impl ResolvedDestination {
    /// Resolves a destination inside `tenant`.
    pub(crate) fn find(
        upstreams: &Upstreams,
        tenant: &TenantView,
        destination: &Destination,
    ) -> Option<Self> {
        let service = |service: &Arc<ServiceView>, port: u16| {
            let port = service.ports.iter().position(|p| p.port == port)?;
            Some(Self::Service {
                service: service.clone(),
                port,
            })
        };
        match destination {
            Destination::Service(key, port) => service(tenant.service(key)?, *port),
            Destination::Name(host, port) => service(tenant.service_named(host)?, *port),
            Destination::Address(address) => match tenant.service_at(address.ip()) {
                Some(found) => service(found, address.port()),
                None => Some(Self::pod(
                    upstreams,
                    tenant,
                    tenant.workload_at(address.ip())?,
                    *address,
                )),
            },
            Destination::Pod(address) => Some(Self::pod(
                upstreams,
                tenant,
                tenant.workload_at(address.ip())?,
                *address,
            )),
        }
    }

    /// Resolves a pod by its own address: no routes, one endpoint.
    fn pod(
        upstreams: &Upstreams,
        tenant: &TenantView,
        workload: &Arc<WorkloadView>,
        address: SocketAddr,
    ) -> Self {
        let served = workload
            .serves
            .iter()
            .find(|(_, _, target)| *target == address.port());
        // What the Service declares of the port also holds for clients that dial the pod itself. Of
        // several Services the first counts, because the address does not say which is meant.
        let service = served.and_then(|(service, port, _)| Some((tenant.service(service)?, *port)));
        let port = service.and_then(|(service, port)| service.port(port));
        let id = upstreams.direct_id();
        let guard = tenant.policies.guard(&PolicyDestination::workload(
            &workload.namespace,
            &workload.labels,
        ));
        let set = EndpointSet {
            id,
            service: None,
            port: address.port(),
            protocol: port.map_or(AppProtocol::Detect, |p| p.protocol),
            pool: service.map(|(service, _)| service.pool).unwrap_or_default(),
            policy_paths: service
                .map(|(service, _)| service.policy_paths)
                .unwrap_or_default(),
            // The pod exists; no Service need be there.
            exists: true,
            filters: FilterChain::of_policies(guard.as_deref()),
            load_balancing: LoadBalancing::default(),
            endpoints: [Endpoint {
                id,
                workload: workload.clone(),
                address,
                // The client chose the address, and with it the family that can preserve its own
                // address.
                other_family: None,
                guard,
            }]
            .into(),
        };
        Self::Pod {
            tenant: tenant.name.to_string(),
            view: upstreams.direct(set, tenant.number),
        }
    }

    /// Returns the name of the destination's tenant.
    pub(crate) fn tenant(&self) -> &str {
        match self {
            Self::Service { service, .. } => service.names.key.tenant.as_str(),
            Self::Pod { tenant, .. } => tenant,
        }
    }

    /// Returns the throttle of requests to the destination, if there is one.
    pub(crate) fn throttle(&self) -> Option<Arc<RequestThrottle>> {
        match self {
            Self::Service { service, .. } => service.throttle.clone(),
            Self::Pod { .. } => None,
        }
    }

    /// Returns the protocol that the destination declares.
    pub(crate) fn protocol(&self) -> AppProtocol {
        match self {
            Self::Service { service, port } => service.ports[*port].protocol,
            Self::Pod { view, .. } => view.set.protocol,
        }
    }

    /// Returns the hostname of the service, if the destination is one.
    pub(crate) fn hostname(&self) -> Option<&str> {
        match self {
            Self::Service { service, .. } => Some(&service.names.hostname),
            Self::Pod { .. } => None,
        }
    }

    /// Returns the number of proxies before the destination, which is 0 unless it is a Gateway.
    pub(crate) fn trusted_proxies(&self) -> u8 {
        match self {
            Self::Service { service, .. } => service.trusted_proxies,
            Self::Pod { .. } => 0,
        }
    }

    /// Returns the dialled service's own policies if a route selected endpoints of another service,
    /// whose policies do not include them.
    #[inline]
    pub(crate) fn guard_beside(&self, view: &EndpointSetState) -> Option<&DestinationPolicy> {
        let Self::Service { service, .. } = self else {
            return None;
        };
        let guard = service.guard.as_deref()?;
        let elsewhere = view
            .set
            .service
            .as_ref()
            .is_none_or(|names| names.key != service.names.key);
        elsewhere.then_some(guard)
    }

    /// Returns the destination's own endpoints without routing: for TCP, and to name the service in
    /// metrics of requests that were not routed.
    pub(crate) fn direct_endpoint(
        &self,
        upstreams: &Upstreams,
        snapshot: &Snapshot,
    ) -> Option<Rc<EndpointSetState>> {
        match self {
            Self::Service { service, port } => upstreams.view(snapshot, service.ports[*port].slot),
            Self::Pod { view, .. } => Some(view.clone()),
        }
    }
}
