//! Configuration of the gateway: the immutable view with which one request is served, and the
//! mutations of a request that its rules can require. The view has tenants, services, workloads,
//! endpoint sets, routes, and policies with their token rules.
//!
//! A snapshot only offers lookups. [`SnapshotBuilder`] creates the next one from the last one and a
//! change; [`TenantBuilds`] decides which change is next, so that no tenant waits for another's
//! tables; [`SnapshotPublisher`] passes snapshots to the workers. Nothing here opens a connection
//! or reads a clock. Start with [`Snapshot`].

#![forbid(unsafe_code)]

pub mod backend_filters;
mod build;
mod endpoint_ids;
mod endpoint_sets;
mod filter_chain;
mod hash_table;
pub mod jwt;
mod listeners;
mod load_balancing;
mod mutations;
mod policies;
mod route_answers;
mod route_cors;
mod route_filters;
pub mod route_mirrors;
mod route_reply;
mod routes;
mod shards;
mod tenant_builds;
mod tenant_workloads;
mod termination;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod throttle;
mod turns;
mod workload_labels;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use canal_identity::{ClientIdentity, ServerIdentity};
use canal_model::identity::Identity;
use canal_model::ids::{
    Generation, Namespace, ServiceId, ServiceKey, TenantName, TrustDomain, Vni,
};
use canal_model::program::{
    AppProtocol, Labels, PolicyPaths, Resource, TunnelProtocol, UpstreamPool,
};
use canal_model::share::Shares;
use canal_model::trust::KeyPolicy;
use hashbrown::HashMap;

pub use build::{ServiceCertificateFn, SnapshotBuilder};
use endpoint_ids::EndpointIds;
pub use endpoint_sets::EndpointSetId;
use endpoint_sets::EndpointSets;
pub use filter_chain::FilterChain;
pub use hash_table::hash_of;
pub use load_balancing::{GeneratedCookie, HashBalancer, LoadBalancing, hash_of_request};
pub use mutations::{RequestMutations, is_spelling_of};
pub use policies::{DestinationPolicy, TenantPolicies};
pub use route_answers::AnsweredRequest;
pub use route_cors::CorsOutcome;
pub use route_filters::{MatchedFilters, REWRITTEN_DOT_SEGMENT, edit_response};
pub use route_mirrors::SelectedMirror;
pub use route_reply::RouteReply;
pub use routes::{ConsumerPort, MatchedRule, RouteOutcome, RouteTarget, ServiceRoutes};
use shards::ShardedMap;
pub use tenant_builds::{BuildStep, FinishedStep, IMMEDIATE_BYTES_MAX, TenantBuilds};
pub use termination::{ListenerClients, ListenerTermination, PortTermination, TerminationView};
pub use throttle::{RequestThrottle, admit_all};
pub use workload_labels::{UNKNOWN, WorkloadLabels};

/// The complete configuration of one generation.
#[derive(Debug, Default, Clone)]
pub struct Snapshot {
    pub generation: Generation,
    /// Number of the snapshot in this process, from 1; 0 is the empty snapshot.
    pub sequence: u64,
    tenants: HashMap<TenantName, Arc<TenantView>>,
    /// Tenant of each trust domain.
    trust_domains: HashMap<TrustDomain, TenantName>,
    /// Gateway addresses of this replica, with the tenant of each.
    gateways: HashMap<IpAddr, TenantName>,
    /// Every service by its ID, which is its address inside the tier. The key includes the tenant.
    inside: ShardedMap<ServiceId, ServiceKey>,
    sets: EndpointSets,
}

impl Snapshot {
    /// Returns a tenant by name.
    pub fn tenant(&self, name: &str) -> Option<&Arc<TenantView>> {
        self.tenants.get(name)
    }

    /// Returns the tenant that owns a trust domain.
    pub fn tenant_of(&self, domain: &TrustDomain) -> Option<&Arc<TenantView>> {
        self.trust_domains
            .get(domain)
            .and_then(|name| self.tenants.get(name))
    }

    /// Replaces a tenant's view and updates the mapping of its trust domain.
    fn put(&mut self, view: TenantView) {
        let (name, domain) = (view.name.clone(), view.trust_domain.clone());
        let before = self
            .tenants
            .insert(name.clone(), Arc::new(view))
            .and_then(|view| view.trust_domain.clone());
        // The domain may belong to another tenant by now.
        if let Some(before) = before.filter(|before| self.trust_domains.get(before) == Some(&name))
        {
            self.trust_domains.remove(&before);
        }
        if let Some(domain) = domain {
            self.trust_domains.insert(domain, name);
        }
    }

    /// Returns the tenant that owns a gateway address of this replica.
    pub fn tenant_at(&self, local: IpAddr) -> Option<&Arc<TenantView>> {
        self.gateways
            .get(&local)
            .and_then(|name| self.tenants.get(name))
    }

    /// Returns the tenant and the service of an address inside the tier. The service need not have
    /// ports: the tier's own service has none that a tenant defined.
    pub fn service_inside(&self, id: ServiceId) -> Option<(&Arc<TenantView>, &ServiceKey)> {
        let key = self.inside.get(&id)?;
        Some((self.tenants.get(&key.tenant)?, key))
    }

    /// Returns the endpoint set with this ID; `None` if the snapshot has none, for example because
    /// the ID is of an earlier snapshot and its set was freed.
    #[inline]
    pub fn set(&self, slot: EndpointSetId) -> Option<&Arc<EndpointSet>> {
        self.sets.get(slot)
    }

    pub fn tenants(&self) -> impl Iterator<Item = &Arc<TenantView>> {
        self.tenants.values()
    }

    pub fn gateways(&self) -> impl Iterator<Item = (&IpAddr, &TenantName)> {
        self.gateways.iter()
    }
}

/// View of one tenant. It contains no reference to another tenant.
#[derive(Debug, Clone)]
pub struct TenantView {
    pub name: TenantName,
    /// Dense number for per-worker tables; never reused while the process lives.
    pub number: u32,
    pub trust_domain: Option<TrustDomain>,
    /// Location of the tenant's private keys. Set exactly when the trust domain is.
    pub keys: Option<KeyPolicy>,
    /// Set exactly when the trust domain is set.
    pub vni: Option<Vni>,
    /// Shares that the provider set for the tenant.
    pub shares: Arc<Shares>,
    /// Throttle of all requests of the tenant.
    pub throttle: Option<Arc<RequestThrottle>>,
    /// The gateway's own identity in the tenant's trust domain; `None` where no certificates are
    /// issued.
    pub tls: Option<TenantTls>,
    services: ShardedMap<ServiceKey, Arc<ServiceView>>,
    vips: ShardedMap<IpAddr, Arc<ServiceView>>,
    hosts: ShardedMap<String, Arc<ServiceView>>,
    /// Gateway addresses of the tenant in every AZ.
    gateways: ShardedMap<IpAddr, ServiceKey>,
    workloads: ShardedMap<IpAddr, Arc<WorkloadView>>,
    /// Trust domains of other tenants whose members may connect.
    pub federated: Arc<BTreeSet<TrustDomain>>,
    pub policies: Arc<TenantPolicies>,
    /// Changes whenever open work must be authorized again.
    pub policy_version: u64,
    /// True if nothing of the tenant is served, because a security resource of it is rejected or
    /// missing.
    pub closed: bool,
}

#[derive(Debug, Clone)]
pub struct TenantTls {
    pub server: ServerIdentity,
    pub client: ClientIdentity,
}

impl TenantView {
    /// True if the tenant was deleted, or does not exist yet.
    pub fn is_gone(&self) -> bool {
        self.trust_domain.is_none()
    }

    pub fn service_at(&self, vip: IpAddr) -> Option<&Arc<ServiceView>> {
        self.vips.get(&vip)
    }
    /// Returns the service that owns a gateway address of this tenant.
    pub fn gateway_of(&self, address: IpAddr) -> Option<&ServiceKey> {
        self.gateways.get(&address)
    }
    pub fn service_named(&self, host: &str) -> Option<&Arc<ServiceView>> {
        self.hosts.get(host)
    }
    pub fn service(&self, key: &ServiceKey) -> Option<&Arc<ServiceView>> {
        self.services.get(key)
    }
    pub fn workload_at(&self, address: IpAddr) -> Option<&Arc<WorkloadView>> {
        self.workloads.get(&address)
    }
    pub fn services(&self) -> impl Iterator<Item = &Arc<ServiceView>> {
        self.services.values()
    }
    pub fn counts(&self) -> (usize, usize) {
        (self.services.len(), self.workloads.len())
    }
}

/// Names of a service for metrics and logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceNames {
    pub key: ServiceKey,
    pub hostname: String,
}

/// A service with its ports and routes.
#[derive(Debug)]
pub struct ServiceView {
    pub names: Arc<ServiceNames>,
    pub vips: Vec<IpAddr>,
    pub ports: Box<[PortView]>,
    pub routes: Option<Arc<ServiceRoutes>>,
    /// Determines which requests share connections to the endpoints.
    pub pool: UpstreamPool,
    /// The paths that policies compare.
    pub policy_paths: PolicyPaths,
    /// Policies of the service itself, for requests that are routed to another service.
    pub guard: Option<Arc<DestinationPolicy>>,
    /// Throttle of the service's requests, wherever they are routed.
    pub throttle: Option<Arc<RequestThrottle>>,
    /// Number of proxies before the Gateway for which the service stands; 0 for other services.
    pub trusted_proxies: u8,
}

impl ServiceView {
    pub fn port(&self, port: u16) -> Option<&PortView> {
        self.ports.iter().find(|p| p.port == port)
    }
}

/// One port of a service.
#[derive(Debug)]
pub struct PortView {
    pub port: u16,
    pub protocol: AppProtocol,
    /// The port's own endpoint set, which is used if there are no routes.
    pub slot: EndpointSetId,
    /// True if the port has routes for all clients; a request that matches none gets 404.
    pub routed: bool,
    /// True if routes match more of the path than `/`; then the path is normalized before routing.
    pub routed_by_path: bool,
    /// True if routes depend on attributes of the client; then the engine looks them up.
    pub routed_by_client: bool,
    /// Namespaces whose clients have routes of their own in place of these, sorted by name. Nearly
    /// every port has none.
    pub consumers: Box<[ConsumerPort]>,
    /// Termination of TLS from clients without a node proxy, if configured.
    pub termination: Option<Arc<PortTermination>>,
    /// True if connections begin with a header of the PROXY protocol.
    pub is_proxied: bool,
}

/// One workload, for example a pod.
#[derive(Debug)]
pub struct WorkloadView {
    pub uid: String,
    pub namespace: Namespace,
    pub party: Arc<WorkloadLabels>,
    pub addresses: Vec<IpAddr>,
    pub labels: Labels,
    pub az: String,
    pub ready: bool,
    pub tunnel: TunnelProtocol,
    /// VNI of the tenant's network; inside the tier, it is the socket mark of connections to the
    /// workload.
    pub vni: Option<Vni>,
    /// Identities of which the workload's node must prove one.
    pub identity: Arc<[Identity]>,
    /// Service, port and target port of each endpoint.
    pub serves: Vec<(ServiceKey, u16, u16)>,
    /// IDs of the workload as an endpoint.
    ids: EndpointIds,
    /// Original resource, from which the view is rebuilt when the tenant changes.
    source: Arc<Resource>,
}

/// Ready endpoints of one service port, restricted to a subset.
#[derive(Debug)]
pub struct EndpointSet {
    /// Unique ID; a changed set gets a new one.
    pub id: u64,
    /// `None` for a pod that was dialled by its own address.
    pub service: Option<Arc<ServiceNames>>,
    pub port: u16,
    pub protocol: AppProtocol,
    /// Determines which requests share connections to the endpoints.
    pub pool: UpstreamPool,
    /// The paths that the endpoints' policies compare.
    pub policy_paths: PolicyPaths,
    /// True if the service and its port exist.
    pub exists: bool,
    /// Filters that the endpoints' policies require.
    pub filters: FilterChain,
    pub load_balancing: LoadBalancing,
    pub endpoints: Box<[Endpoint]>,
}

/// One address that serves a service.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// Stays the same for the same workload at the same address and port in the same network, for
    /// as long as the workload serves there.
    pub id: u64,
    pub workload: Arc<WorkloadView>,
    /// The workload's first address, with the target port.
    pub address: SocketAddr,
    /// The workload's first address of the other IP family, if it has one.
    pub other_family: Option<SocketAddr>,
    /// Policies of the endpoint; `None` if there are none.
    pub guard: Option<Arc<DestinationPolicy>>,
}

impl Endpoint {
    /// Returns the address to dial for a client with this address. It is of the client's IP family
    /// if the workload has such an address. Without a mesh, a client that dials a Service address
    /// gets the same.
    pub fn address_towards(&self, client: IpAddr) -> SocketAddr {
        match self.other_family {
            Some(other) if self.address.is_ipv4() != client.to_canonical().is_ipv4() => other,
            _ => self.address,
        }
    }
}

/// Holder of the newest snapshot. Workers cache the pointer and compare one number per request.
#[derive(Debug, Default)]
pub struct SnapshotPublisher {
    sequence: AtomicU64,
    newest: ArcSwap<Snapshot>,
}

impl SnapshotPublisher {
    pub fn publish(&self, snapshot: Arc<Snapshot>) {
        let sequence = snapshot.sequence;
        self.newest.store(snapshot);
        self.sequence.store(sequence, Ordering::Release);
    }
    /// Returns the number of the newest snapshot.
    #[inline]
    pub fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Acquire)
    }
    pub fn newest(&self) -> Arc<Snapshot> {
        self.newest.load_full()
    }
}
