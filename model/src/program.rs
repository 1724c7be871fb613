//! What a data plane is told: small immutable resources that mirror user objects; children name their parents. No wire format here.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

use crate::authorization::{Authentication, Authorization, Authorizer, PeerAuthentication};
use crate::ids::{
    AzName, BackendName, Namespace, NodeName, ObjectName, ReplicaName, ReplicaNumber, ServiceAccount, ServiceId, ServiceKey, TenantName,
    TrustDomain, Vni,
};
use crate::share::Shares;
use crate::trust::{Bundle, Entitlement, KeyPolicy, KeyServer, Termination};

/// Labels of a workload, sorted by name.
pub type Labels = BTreeMap<String, String>;

/// One southbound resource. Its [`Resource::name`] is unique among those of its kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resource {
    Tenant(Tenant),
    Gateway(Gateway),
    Service(Service),
    Workload(Workload),
    Route(RouteRule),
    /// Of the cloud tier, as are all that follow.
    Node(Node),
    Replica(Replica),
    Address(GatewayAddress),
    Table(BucketTable),
    Throttle(Throttle),
    /// Of zero trust, as are all that follow.
    Bundle(Bundle),
    KeyServer(KeyServer),
    Authorizer(Authorizer),
    Authorization(Authorization),
    Authentication(Authentication),
    PeerAuthentication(PeerAuthentication),
    Termination(Termination),
    Entitlement(Entitlement),
    /// Made for one data plane by the controller's session with it; the compiler makes none.
    Manifest(Manifest),
}

/// The kinds of southbound resources, in the order in which a receiver should apply them (parents first).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    Tenant,
    Gateway,
    Service,
    Workload,
    Route,
    Node,
    Replica,
    Address,
    Table,
    Throttle,
    Bundle,
    KeyServer,
    Authorizer,
    Authorization,
    Authentication,
    PeerAuthentication,
    Termination,
    Entitlement,
    /// Last, here and in every subscription: it seals all that was sent before it.
    Manifest,
}

impl Kind {
    /// All kinds, parents first.
    pub const ALL: [Kind; 19] = [
        Kind::Tenant,
        Kind::Gateway,
        Kind::Service,
        Kind::Workload,
        Kind::Route,
        Kind::Node,
        Kind::Replica,
        Kind::Address,
        Kind::Table,
        Kind::Throttle,
        Kind::Bundle,
        Kind::KeyServer,
        Kind::Authorizer,
        Kind::Authorization,
        Kind::Authentication,
        Kind::PeerAuthentication,
        Kind::Termination,
        Kind::Entitlement,
        Kind::Manifest,
    ];

    /// Kinds that say who may do what. A data plane that lacks one resource of these serves nothing of its tenant.
    pub const SECURITY: [Kind; 8] = [
        Kind::Tenant,
        Kind::Bundle,
        Kind::Authorizer,
        Kind::Authorization,
        Kind::Authentication,
        Kind::PeerAuthentication,
        Kind::Termination,
        Kind::Entitlement,
    ];

    /// Whether the kind is one of [`Kind::SECURITY`].
    pub fn is_security(self) -> bool {
        Self::SECURITY.contains(&self)
    }
}

impl Resource {
    /// The kind.
    pub fn kind(&self) -> Kind {
        match self {
            Resource::Tenant(_) => Kind::Tenant,
            Resource::Gateway(_) => Kind::Gateway,
            Resource::Service(_) => Kind::Service,
            Resource::Workload(_) => Kind::Workload,
            Resource::Route(_) => Kind::Route,
            Resource::Node(_) => Kind::Node,
            Resource::Replica(_) => Kind::Replica,
            Resource::Address(_) => Kind::Address,
            Resource::Table(_) => Kind::Table,
            Resource::Throttle(_) => Kind::Throttle,
            Resource::Bundle(_) => Kind::Bundle,
            Resource::KeyServer(_) => Kind::KeyServer,
            Resource::Authorizer(_) => Kind::Authorizer,
            Resource::Authorization(_) => Kind::Authorization,
            Resource::Authentication(_) => Kind::Authentication,
            Resource::PeerAuthentication(_) => Kind::PeerAuthentication,
            Resource::Termination(_) => Kind::Termination,
            Resource::Entitlement(_) => Kind::Entitlement,
            Resource::Manifest(_) => Kind::Manifest,
        }
    }
    /// The name on the wire, unique per kind.
    pub fn name(&self) -> String {
        match self {
            Resource::Tenant(t) => t.name.to_string(),
            Resource::Gateway(g) => format!("{}/{}", g.tenant, g.replica),
            Resource::Service(s) => s.key.to_string(),
            Resource::Workload(w) => w.uid(),
            Resource::Route(r) => r.key.to_string(),
            Resource::Node(n) => format!("{}/{}", n.tenant, n.name),
            Resource::Replica(r) => r.name.to_string(),
            Resource::Address(a) => format!("{}@{}", a.service, a.az),
            Resource::Table(t) => format!("{}@{}", t.service, t.az),
            Resource::Throttle(t) => match &t.service {
                Some(service) => service.to_string(),
                None => t.tenant.to_string(),
            },
            Resource::Bundle(b) => format!("{}/{}", b.tenant, b.trust_domain),
            Resource::KeyServer(k) => format!("{}/{}", k.tenant, k.name),
            Resource::Authorizer(a) => a.key.to_string(),
            Resource::Authorization(a) => a.key.to_string(),
            Resource::Authentication(a) => a.key.to_string(),
            Resource::PeerAuthentication(p) => p.key.to_string(),
            Resource::Termination(t) => format!("{}:{}", t.service, t.port),
            Resource::Entitlement(e) => format!("{}/{}", e.tenant, e.requester),
            Resource::Manifest(m) => m.tenant.to_string(),
        }
    }
    /// The tenant it belongs to: the unit of subscription scope. `None`: it is the provider's, as replicas are.
    pub fn tenant(&self) -> Option<&TenantName> {
        match self {
            Resource::Tenant(t) => Some(&t.name),
            Resource::Gateway(g) => Some(&g.tenant),
            Resource::Service(s) => Some(&s.key.tenant),
            Resource::Workload(w) => Some(&w.tenant),
            Resource::Route(r) => Some(&r.key.tenant),
            Resource::Node(n) => Some(&n.tenant),
            Resource::Replica(_) => None,
            Resource::Address(a) => Some(&a.service.tenant),
            Resource::Table(t) => Some(&t.service.tenant),
            Resource::Throttle(t) => Some(&t.tenant),
            Resource::Bundle(b) => Some(&b.tenant),
            Resource::KeyServer(k) => Some(&k.tenant),
            Resource::Authorizer(a) => Some(&a.key.tenant),
            Resource::Authorization(a) => Some(&a.key.tenant),
            Resource::Authentication(a) => Some(&a.key.tenant),
            Resource::PeerAuthentication(p) => Some(&p.key.tenant),
            Resource::Termination(t) => Some(&t.service.tenant),
            Resource::Entitlement(e) => Some(&e.tenant),
            Resource::Manifest(m) => Some(&m.tenant),
        }
    }
}

/// A manifest seals what one data plane must hold of one tenant's security resources before it serves the tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    pub tenant: TenantName,
    /// The number of the tenant's resources of [`Kind::SECURITY`].
    pub count: u32,
    /// SHA-256 over their kinds, names and versions, in that order.
    pub digest: [u8; 32],
}

/// A tenant as its data planes see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    pub name: TenantName,
    pub vni: Vni,
    pub trust_domain: TrustDomain,
    /// Addresses of the tenant's pods. A captured connection to one of them goes to a gateway even without a service.
    pub pod_cidrs: Vec<IpNet>,
    /// Where the tenant's services have their gateway addresses. Not empty: it is on the cloud tier.
    pub gateway_cidrs: Vec<IpNet>,
    /// What happens to a captured connection whose destination is neither a service nor a pod.
    pub outside: OutsideMesh,
    /// Where its private keys are.
    pub keys: KeyPolicy,
    /// How much of each shared limit it may take.
    pub shares: Shares,
    /// Name servers that its pods may ask directly; empty: the tier's own, else the cluster's DNS service.
    pub resolvers: Vec<IpAddr>,
}

/// Policy for destinations outside the mesh. The default fails closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OutsideMesh {
    #[default]
    Deny,
    Passthrough,
}

/// One gateway replica as one tenant reaches it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gateway {
    pub tenant: TenantName,
    pub replica: ReplicaName,
    pub az: AzName,
    /// The replica's gateway addresses in the tenant's address space; HBONE on port 15008.
    pub addresses: Vec<IpAddr>,
    /// A draining replica takes no new connections.
    pub draining: bool,
}

/// A tenant's named destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    pub key: ServiceKey,
    pub id: ServiceId,
    /// `name.namespace.svc.cluster.local`.
    pub hostname: String,
    /// Virtual addresses (cluster IPs).
    pub vips: Vec<IpAddr>,
    pub ports: Vec<ServicePort>,
}

/// One port of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePort {
    /// The port clients dial, 1 to 65535.
    pub port: u16,
    pub name: String,
    pub protocol: AppProtocol,
}

/// What is spoken on a service port; from `appProtocol`, else from the port's name prefix as Istio reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AppProtocol {
    /// Nothing was said: HTTP/1.1, HTTP/2 or opaque TCP is told apart by the client's first bytes.
    #[default]
    Detect,
    /// HTTP/1.1 upstream; clients may speak either version.
    Http1,
    /// HTTP/2 without TLS upstream.
    Http2,
    /// gRPC: HTTP/2 upstream, trailers and streaming kept.
    Grpc,
    /// Opaque bytes.
    Tcp,
}

/// A running program with an identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    pub tenant: TenantName,
    pub namespace: Namespace,
    pub name: ObjectName,
    pub service_account: ServiceAccount,
    pub node: NodeName,
    pub az: AzName,
    pub addresses: Vec<IpAddr>,
    pub labels: Labels,
    /// Readiness as last reported. Not-ready workloads get no new requests.
    pub ready: bool,
    pub tunnel: Tunnel,
    /// The service ports that this workload serves.
    pub endpoints: Vec<EndpointPort>,
    /// Its own UDP ports that UDPRoutes name, where datagrams from the tier pass its guard. There are at most
    /// [`crate::limits::UDP_PORTS_PER_WORKLOAD_MAX`] of them.
    pub udp_ports: BTreeSet<u16>,
}

impl Workload {
    /// `tenant/namespace/name`, unique among workloads.
    pub fn uid(&self) -> String {
        format!("{}/{}/{}", self.tenant, self.namespace, self.name)
    }
}

/// How a workload is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tunnel {
    /// HBONE to port 15008 of the workload's address.
    #[default]
    Hbone,
    /// Plain TCP: the workload's node runs no proxy.
    None,
}

/// A workload serves `service` at `port` on its own `target_port`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EndpointPort {
    pub service: ServiceKey,
    pub port: u16,
    pub target_port: u16,
}

/// Names one rule of one user's route object; written `tenant/kind/namespace/name/rule`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RouteKey {
    pub tenant: TenantName,
    /// `HTTPRoute` or `VirtualService`.
    pub kind: String,
    pub namespace: Namespace,
    pub name: ObjectName,
    /// Which of the object's parents and rules this is, e.g. `reviews:9080.0`.
    pub rule: String,
}

impl std::fmt::Display for RouteKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}/{}/{}", self.tenant, self.kind, self.namespace, self.name, self.rule)
    }
}

/// One rule of a route object, attached to a service. It matches when one of `matches` does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteRule {
    pub key: RouteKey,
    pub parent: ServiceKey,
    /// Only for this port of the parent; `None` is every port.
    pub parent_port: Option<u16>,
    /// The request's host must be one of these; empty is any host.
    pub hosts: Vec<HostMatch>,
    /// Never empty: a rule without matches in the source has one match on the prefix `/`.
    pub matches: Vec<HttpMatch>,
    pub action: RouteAction,
}

/// A host to match, lower case, without port.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HostMatch {
    Exact(String),
    /// `*.example.com` is kept as `.example.com`: any host with one label or more before it.
    Suffix(String),
}

/// All conditions must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpMatch {
    /// Among all matches of the service that hold, the smallest precedence wins.
    pub precedence: Precedence,
    pub path: PathMatch,
    pub method: Option<String>,
    pub headers: Vec<ValueMatch>,
    pub query: Vec<ValueMatch>,
}

/// The total order among matches of one service, computed by the compiler; compared field by field, smaller first.
///
/// Gateway API v1.6 HTTPRouteRule: exact path, longest path, method, most headers, most query parameters, then the
/// oldest object, then its name, then the rule's place. Istio: a VirtualService's rules in the order written.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Precedence {
    /// 0 for rules of a mesh route; larger for fallbacks.
    pub class: u8,
    /// Inverted specificity, most significant first: path kind, path length, method, headers, query. All zero for ordered rules.
    pub specificity: [u32; 5],
    /// Seconds since 1970 of the object's creation; ties go on.
    pub created: u64,
    /// `kind/namespace/name` of the object.
    pub object: String,
    /// Place of the rule in the object, then of the match in the rule.
    pub place: [u32; 2],
}

/// How the path (without query) must look. Paths are compared in their normal form: unreserved characters decoded, slashes merged, dot
/// segments resolved.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PathMatch {
    Exact(String),
    /// Gateway API `PathPrefix`: whole elements, a trailing `/` is ignored.
    ElementPrefix(String),
    /// Istio `prefix`: plain string prefix.
    StringPrefix(String),
    /// The whole path must match (RE2 syntax).
    Regex(String),
}

/// A condition on one header or query parameter.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ValueMatch {
    /// Header names are lower case; query names as written.
    pub name: String,
    pub value: TextMatch,
}

/// How a text must look.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum TextMatch {
    Exact(String),
    Prefix(String),
    /// The whole text must match (RE2 syntax).
    Regex(String),
    Present,
}

/// What happens to a request that matched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteAction {
    /// Shared out by weight. A backend that is broken keeps its share and fails it.
    Split(Vec<Backend>),
    /// Fail closed: the rule's source was broken. The reason was told to its writer and is logged.
    Refuse { status: u16, reason: String },
}

/// One destination of a split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    /// Relative share, 0 to 1,000,000.
    pub weight: u32,
    pub target: BackendTarget,
}

/// Where a backend's share goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendTarget {
    /// A port of a service, narrowed to workloads that carry all `subset` labels.
    Service { service: ServiceKey, port: u16, subset: Labels },
    /// The reference was broken (unknown service, missing grant …): answer this.
    Refuse { status: u16, reason: String },
}

/// A tenant's node as the edges reach it: which pod addresses are behind which tunnel end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub tenant: TenantName,
    pub name: NodeName,
    pub az: AzName,
    /// Underlay address of its tunnel end.
    pub underlay: Ipv4Addr,
    /// MAC of its tunnel device.
    pub mac: [u8; 6],
    /// Pod addresses behind it (the node's own overlay address included).
    pub pod_cidrs: Vec<IpNet>,
}

/// A gateway replica as the tier knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replica {
    pub name: ReplicaName,
    pub number: ReplicaNumber,
    pub backend: BackendName,
    pub az: AzName,
    /// Underlay address, from 250.0.0.0/8.
    pub underlay: Ipv4Addr,
    /// False: known to be dead; skipped in every chain.
    pub up: bool,
}

/// Where a tenant's clients in (or nearest to) an AZ reach a service: a *gateway address*.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayAddress {
    pub service: ServiceKey,
    pub id: ServiceId,
    pub az: AzName,
    /// In the tenant's address space; at most one of each family.
    pub addresses: Vec<IpAddr>,
    /// False: no backend of the service is healthy in this AZ; ask another AZ first.
    pub open: bool,
}

/// Buckets of a service's table; `CANAL_BUCKETS` of `bpf/abi/tier.h`.
pub const BUCKETS: usize = 128;
/// Replicas in a chain at most; `CANAL_CHAIN` of `bpf/abi/tier.h`.
pub const CHAIN: usize = 8;

/// A bucket's replicas: the head takes new sessions, all keep those they own (Canal fig. 26). Never longer than [`CHAIN`].
pub type Chain = Vec<ReplicaNumber>;

/// A service's bucket table in one AZ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketTable {
    pub service: ServiceKey,
    pub id: ServiceId,
    pub az: AzName,
    pub vni: Vni,
    /// Raised with each change of this table.
    pub version: u32,
    /// [`BUCKETS`] of them.
    pub chains: Vec<Chain>,
}

/// Early limits of sessions and packets at the redirector, for each replica, and of requests at the gateway. A limit of 0 is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Throttle {
    pub tenant: TenantName,
    pub vni: Vni,
    /// `None`: the whole tenant.
    pub service: Option<ServiceKey>,
    /// The service's, if there is one.
    pub id: Option<ServiceId>,
    /// New sessions per second, and how many at once.
    pub sessions: Rate,
    /// Packets per second, and how many at once.
    pub packets: Rate,
    /// Requests per second, and how many at once: of all replicas together, enforced by the gateways' engines.
    pub requests: Rate,
}

/// Tokens per second, and the most that can be saved up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rate {
    pub per_second: u32,
    pub burst: u32,
}
