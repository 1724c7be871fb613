//! Resources that data planes receive: small, immutable, and named after the user objects they come
//! from. Children name their parents. The wire format is in `wire`. Start at [`Resource`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::IpNet;

use crate::authorization::{Authentication, Authorization, Authorizer, PeerAuthentication};
use crate::certificate::ServingCertificate;
use crate::client_validation::ClientValidation;
use crate::identity::SYSTEM_NAMESPACE;
use crate::ids::{
    AzName, BackendName, Namespace, NodeName, ObjectName, ReplicaName, ReplicaNumber, SecretKey,
    ServiceAccount, ServiceId, ServiceKey, TenantName, TrustDomain, Vni,
};
use crate::listener_filters::ListenerFilter;
use crate::load_balancing::{LoadBalancer, PortLoadBalancer};
use crate::request_fraction::RequestFraction;
use crate::route_attempts::AttemptPolicy;
use crate::route_cors::CorsPolicy;
use crate::route_faults::FaultPolicy;
use crate::route_filters::{RouteAnswer, RouteFilters};
use crate::share::Shares;
use crate::trust::{Entitlement, KeyPolicy, KeyServer, Termination, TrustBundle};

/// Labels of a workload, sorted by name.
pub type Labels = BTreeMap<String, String>;

/// The table of kinds. A row has the kind and the type of its resources, the label, the class, the
/// owner, and the name on the wire. The label is the name of the message in `program.proto` and
/// ends the type URL. `docs/how-to/add-a-southbound-kind.md` lists the other steps for a new kind.
macro_rules! resource_kinds {
    ($($(#[$doc:meta])* $kind:ident($body:ty) = $label:literal, $class:ident, $owner:expr, $name:expr;)*) => {
        /// One southbound resource. Its [`Resource::name`] is unique among resources of its kind.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub enum Resource {
            $($(#[$doc])* $kind($body),)*
        }

        /// The kinds of southbound resources, in the order in which a receiver should apply them
        /// (parents first).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum ResourceKind {
            $($(#[$doc])* $kind,)*
        }

        impl ResourceKind {
            /// All kinds in order: each after those that it refers to.
            pub const ALL: [ResourceKind; [$(ResourceKind::$kind),*].len()] = [$(ResourceKind::$kind),*];

            /// Returns the kind's name in labels, logs and dumps: the name of its message in
            /// `program.proto`.
            pub fn label(self) -> &'static str {
                match self {
                    $(ResourceKind::$kind => $label,)*
                }
            }

            /// Returns the type URL of the kind in the southbound API.
            pub fn type_url(self) -> &'static str {
                match self {
                    $(ResourceKind::$kind => concat!("type.googleapis.com/canal.program.v1.", $label),)*
                }
            }

            /// Returns whether the kind carries security policy. A data plane that lacks one
            /// resource of such a kind serves nothing of its tenant.
            pub fn is_security(self) -> bool {
                match self {
                    $(ResourceKind::$kind => ResourceClass::$class.is_security(),)*
                }
            }

            /// Returns whether resources of the kind belong to no tenant.
            pub fn is_of_provider(self) -> bool {
                match self {
                    $(ResourceKind::$kind => {
                        const OWNER: OwnerColumn<$body> = $owner;
                        matches!(OWNER, OwnerColumn::Provider)
                    })*
                }
            }
        }

        impl Resource {
            /// Returns the kind of the resource.
            pub fn kind(&self) -> ResourceKind {
                match self {
                    $(Resource::$kind(_) => ResourceKind::$kind,)*
                }
            }

            /// Returns the name on the wire, unique per kind. It begins with the tenant, unless the
            /// kind is the provider's.
            pub fn name(&self) -> String {
                match self {
                    $(Resource::$kind(body) => {
                        let name: fn(&$body) -> String = $name;
                        name(body)
                    })*
                }
            }

            /// Returns the tenant that the resource belongs to: the unit of subscription scope.
            /// `None` for the provider's resources, such as replicas.
            pub fn tenant(&self) -> Option<&TenantName> {
                match self {
                    $(Resource::$kind(body) => OwnerColumn::<$body>::tenant(&$owner, body),)*
                }
            }
        }
    };
}

/// The role of a kind's resources in a data plane.
#[derive(Clone, Copy)]
enum ResourceClass {
    /// The resources carry security policy.
    Security,
    /// The resources carry routing and topology.
    Traffic,
}

impl ResourceClass {
    const fn is_security(self) -> bool {
        matches!(self, Self::Security)
    }
}

/// The owner of a kind's resources, as a row of the table states it.
enum OwnerColumn<B> {
    /// The resources belong to no tenant.
    Provider,
    /// The function returns the tenant of a resource.
    Tenant(for<'a> fn(&'a B) -> &'a TenantName),
}

impl<B> OwnerColumn<B> {
    fn tenant<'a>(&self, body: &'a B) -> Option<&'a TenantName> {
        match self {
            OwnerColumn::Provider => None,
            OwnerColumn::Tenant(tenant) => Some(tenant(body)),
        }
    }
}

resource_kinds! {
    Tenant(Tenant) = "Tenant", Security, OwnerColumn::Tenant(|t| &t.name), |t| t.name.to_string();
    /// The label is `Gateway`, because it is in type URLs, in state files and in metrics, which data
    /// planes of other versions read too.
    GatewayReplica(GatewayReplica) = "Gateway", Traffic, OwnerColumn::Tenant(|g| &g.tenant), |g| format!("{}/{}", g.tenant, g.replica);
    Service(Service) = "Service", Traffic, OwnerColumn::Tenant(|s| &s.key.tenant), |s| s.key.to_string();
    /// A Gateway for clients outside the mesh, which is not a replica.
    Ingress(IngressGateway) = "IngressGateway", Traffic, OwnerColumn::Tenant(|g| &g.key.tenant), |g| g.key.to_string();
    ListenerCertificate(ListenerCertificate) = "ListenerCertificate", Traffic, OwnerColumn::Tenant(|c| &c.gateway.tenant), ListenerCertificate::name;
    Workload(Workload) = "Workload", Traffic, OwnerColumn::Tenant(|w| &w.tenant), Workload::uid;
    Route(RouteRule) = "Route", Traffic, OwnerColumn::Tenant(|r| &r.key.tenant), |r| r.key.to_string();
    /// This resource and those up to `Throttle` belong to the cloud tier.
    Node(Node) = "Node", Traffic, OwnerColumn::Tenant(|n| &n.tenant), |n| format!("{}/{}", n.tenant, n.name);
    Replica(Replica) = "Replica", Traffic, OwnerColumn::Provider, |r| r.name.to_string();
    Address(GatewayAddress) = "GatewayAddress", Traffic, OwnerColumn::Tenant(|a| &a.service.tenant), |a| format!("{}@{}", a.service, a.az);
    Table(BucketTable) = "BucketTable", Traffic, OwnerColumn::Tenant(|t| &t.service.tenant), |t| format!("{}@{}", t.service, t.az);
    Throttle(Throttle) = "Throttle", Traffic, OwnerColumn::Tenant(|t| &t.tenant), Throttle::name;
    /// This resource belongs to the direct path.
    DirectEndpoint(DirectEndpoint) = "DirectEndpoint", Traffic, OwnerColumn::Tenant(|d| &d.tenant), DirectEndpoint::uid;
    /// This resource and those up to `Entitlement` belong to zero trust.
    Bundle(TrustBundle) = "Bundle", Security, OwnerColumn::Tenant(|b| &b.tenant), |b| format!("{}/{}", b.tenant, b.trust_domain);
    KeyServer(KeyServer) = "KeyServer", Traffic, OwnerColumn::Tenant(|k| &k.tenant), |k| format!("{}/{}", k.tenant, k.name);
    Authorizer(Authorizer) = "Authorizer", Security, OwnerColumn::Tenant(|a| &a.key.tenant), |a| a.key.to_string();
    Authorization(Authorization) = "Authorization", Security, OwnerColumn::Tenant(|a| &a.key.tenant), |a| a.key.to_string();
    Authentication(Authentication) = "Authentication", Security, OwnerColumn::Tenant(|a| &a.key.tenant), |a| a.key.to_string();
    PeerAuthentication(PeerAuthentication) = "PeerAuthentication", Security, OwnerColumn::Tenant(|p| &p.key.tenant), |p| p.key.to_string();
    Termination(Termination) = "Termination", Security, OwnerColumn::Tenant(|t| &t.service.tenant), |t| format!("{}:{}", t.service, t.port);
    Entitlement(Entitlement) = "Entitlement", Security, OwnerColumn::Tenant(|e| &e.tenant), |e| format!("{}/{}", e.tenant, e.requester);
    /// The controller makes a manifest for one subscriber stream; the compiler makes none. It is
    /// the last kind, here and in every subscription: a manifest seals everything that was sent
    /// before it.
    Manifest(Manifest) = "Manifest", Traffic, OwnerColumn::Tenant(|m| &m.tenant), |m| m.tenant.to_string();
}

impl ResourceKind {
    /// Iterates over the kinds that carry security policy, each after the kinds that it refers to.
    pub fn security() -> impl Iterator<Item = ResourceKind> {
        Self::ALL.into_iter().filter(|kind| kind.is_security())
    }

    /// Returns the tenant that owns the resource of this kind and name. `None` if the provider owns
    /// it: by its kind, or because its name begins with the system namespace in place of a tenant.
    /// `None` also for a name of another form, which no resource has.
    pub fn owner_of(self, name: &str) -> Option<TenantName> {
        let first = name
            .split('/')
            .next()
            .filter(|first| !self.is_of_provider() && *first != SYSTEM_NAMESPACE)?;
        TenantName::new(first).ok()
    }
}

impl Resource {
    /// Returns whether a data plane may decode this resource as `read`: the two are equal except
    /// for fields that only the controller knows.
    pub fn reads_as(&self, read: &Resource) -> bool {
        match (self, read) {
            (Resource::DirectEndpoint(own), Resource::DirectEndpoint(read)) => {
                *read
                    == DirectEndpoint {
                        audience: read.audience.clone(),
                        ..own.clone()
                    }
            }
            _ => self == read,
        }
    }
}

/// A manifest seals the set of one tenant's security resources that a data plane must have before
/// it serves the tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    pub tenant: TenantName,
    /// Number of the tenant's resources of the kinds in [`ResourceKind::security`].
    pub count: u32,
    /// SHA-256 over the kinds, names and versions of those resources, in that order.
    pub digest: [u8; 32],
}

/// A tenant as its data planes see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    pub name: TenantName,
    pub vni: Vni,
    pub trust_domain: TrustDomain,
    /// Addresses of the tenant's pods. A captured connection to one of them goes to a gateway even
    /// without a service.
    pub pod_cidrs: Vec<IpNet>,
    /// Ranges of the gateway addresses of the tenant's services. If not empty, the tenant is on the
    /// cloud tier.
    pub gateway_cidrs: Vec<IpNet>,
    /// Policy for a captured connection whose destination is neither a service nor a pod.
    pub outbound_traffic_policy: OutboundTrafficPolicy,
    /// Location and algorithm of the tenant's private keys.
    pub keys: KeyPolicy,
    /// The tenant's part of each shared limit.
    pub shares: Shares,
    /// Name servers that the tenant's pods may query directly. If empty, they are the tier's own,
    /// else the cluster's DNS service.
    pub resolvers: Vec<IpAddr>,
}

/// Policy for destinations outside the mesh. The default fails closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OutboundTrafficPolicy {
    #[default]
    Deny,
    Passthrough,
}

/// One gateway replica as one tenant reaches it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayReplica {
    pub tenant: TenantName,
    pub replica: ReplicaName,
    pub az: AzName,
    /// The replica's gateway addresses in the tenant's address space; HBONE on port 15008.
    pub addresses: Vec<IpAddr>,
    /// A draining replica takes no new connections.
    pub draining: bool,
}

/// A named destination of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    pub key: ServiceKey,
    pub id: ServiceId,
    /// DNS name of the service: `name.namespace.svc.cluster.local`.
    pub hostname: String,
    /// The service's virtual addresses (cluster IPs).
    pub vips: Vec<IpAddr>,
    pub ports: Vec<ServicePort>,
    pub upstream_pool: UpstreamPool,
    pub policy_paths: PolicyPaths,
    /// Load balancers that differ from the default, each port and subset once. There are at most
    /// [`crate::load_balancing::LOAD_BALANCERS_PER_SERVICE_MAX`] of them.
    pub load_balancers: Vec<PortLoadBalancer>,
}

impl Service {
    /// Returns the load balancer of a port and subset.
    pub fn load_balancer(&self, port: u16, subset: &Labels) -> LoadBalancer {
        let mut all = self.load_balancers.iter();
        let found = all.find(|it| it.port == port && it.subset == *subset);
        found.map(|it| it.load_balancer.clone()).unwrap_or_default()
    }
}

/// The paths that a gateway lets policies compare; it answers 400 to all others, because the
/// endpoint may understand them in another way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PolicyPaths {
    /// Paths without parameters (`;`), and with escapes that are UTF-8.
    #[default]
    Strict,
    /// Parameters and escapes in other encodings too. Policies compare them as they are written.
    Legacy,
}

/// The clients whose requests share a gateway's HTTP connections to a service's endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum UpstreamPool {
    /// Requests of all clients share connections; endpoints see a gateway's address.
    #[default]
    Shared,
    /// Requests of one client share connections; endpoints see the client's address.
    PerClient,
}

/// One port of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePort {
    /// The port clients dial, 1 to 65535.
    pub port: u16,
    pub name: String,
    pub protocol: AppProtocol,
}

/// Protocol of a service port, from `appProtocol`, else from the prefix of the port's name as Istio
/// interprets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AppProtocol {
    /// The protocol is not declared. Protocol sniffing of the client's first bytes distinguishes
    /// HTTP/1.1, HTTP/2 and opaque TCP.
    #[default]
    Detect,
    /// HTTP/1.1 upstream; clients may use either version.
    Http1,
    /// HTTP/2 without TLS upstream.
    Http2,
    /// HTTP/2 upstream; trailers and streaming are preserved.
    Grpc,
    /// Opaque bytes.
    Tcp,
}

/// A Gateway as gateway replicas serve it. Its rules are the routes whose parent is its service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IngressGateway {
    /// The service that stands for the Gateway.
    pub key: ServiceKey,
    pub id: ServiceId,
    /// Listeners of the ports that are served, in the order of their objects: those that relay are
    /// after the others, those of ports on which a listener terminates TLS and relays after these,
    /// those of `proxied_ports` after these, and those of ports on which a listener has filters are
    /// last.
    pub listeners: Vec<IngressListener>,
    /// Validation of clients' certificates. A listener that has none asks for none.
    pub client_validations: Vec<ClientValidation>,
    /// Number of proxies between clients and the Gateway that append to `x-forwarded-for`.
    pub trusted_proxies: u8,
    /// Ports at which connections begin with a header of the PROXY protocol, which names the client.
    /// Each has a listener.
    pub proxied_ports: BTreeSet<u16>,
}

/// One listener of a Gateway as gateway replicas serve it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IngressListener {
    /// Name among the Gateway's listeners.
    pub name: String,
    pub port: u16,
    /// Host of the requests that the listener takes; `None` means any that no other listener of the
    /// port takes.
    pub host: Option<HostMatch>,
    /// False if the listener answers all its requests with 404, or refuses all handshakes.
    pub is_open: bool,
    /// Secrets with the certificates of a listener that terminates TLS; `None` for any other. The
    /// listeners of a port are all of one protocol; of those for TLS that relay, each terminates it
    /// or passes it through.
    pub certificates: Option<Vec<SecretKey>>,
    /// The protocol of connections whose bytes are relayed without being read; `None` on a port for
    /// HTTP or HTTPS.
    pub relay: Option<RelayProtocol>,
    /// Filters of requests, in the order in which they run. A listener that relays has none.
    pub filters: Vec<ListenerFilter>,
    /// Hosts of the listener's routes as these name them, the most specific first.
    pub virtual_hosts: Vec<VirtualHost>,
}

impl IngressGateway {
    /// Returns the ports on which a listener terminates TLS and relays the plaintext.
    pub fn terminating_ports(&self) -> BTreeSet<u16> {
        terminating_ports(&self.listeners)
    }
}

/// Returns the ports on which one of the listeners has filters of requests.
pub fn filtering_ports(listeners: &[IngressListener]) -> BTreeSet<u16> {
    let filtering = listeners.iter().filter(|it| !it.filters.is_empty());
    filtering.map(|it| it.port).collect()
}

/// Returns the ports on which one of the listeners terminates TLS and relays the plaintext.
pub fn terminating_ports(listeners: &[IngressListener]) -> BTreeSet<u16> {
    let terminating = listeners
        .iter()
        .filter(|it| it.relay == Some(RelayProtocol::TerminatedTls));
    terminating.map(|it| it.port).collect()
}

/// Protocols of listeners whose connections are relayed without being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RelayProtocol {
    /// TLS: the server name of the ClientHello selects the listener and its routes.
    TlsPassthrough,
    /// The same of TLS that the gateway terminates: backends get the plaintext.
    TerminatedTls,
    Tcp,
}

/// A certificate of a Gateway's listeners with its key. Only replicas that serve the Gateway
/// receive it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerCertificate {
    /// The service that stands for the Gateway.
    pub gateway: ServiceKey,
    /// Id of the service that stands for the Gateway.
    pub id: ServiceId,
    /// The Secret that contains the certificate.
    pub secret: SecretKey,
    pub certificate: Arc<ServingCertificate>,
}

impl ListenerCertificate {
    /// Returns the Gateway's key with namespace and name of the Secret.
    pub fn name(&self) -> String {
        let (namespace, name) = &self.secret;
        format!("{}/{namespace}/{name}", self.gateway)
    }
}

/// A host on a listener, and the routes that apply to requests for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualHost {
    /// The host; `None` means any.
    pub host: Option<HostMatch>,
    pub routes: BTreeSet<RouteObject>,
}

/// Identifies a route object among those of its tenant.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RouteObject {
    pub namespace: Namespace,
    pub name: ObjectName,
    /// Kind of the object: `HTTPRoute` or `GRPCRoute`.
    pub kind: String,
}

/// A running program with an identity, such as a pod.
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
    pub tunnel: TunnelProtocol,
    /// The service ports that this workload serves.
    pub endpoints: Vec<EndpointPort>,
    /// The workload's own UDP ports that UDPRoutes name; datagrams from the tier are admitted to
    /// them. There are at most [`crate::limits::UDP_PORTS_PER_WORKLOAD_MAX`] of them.
    pub udp_ports: BTreeSet<u16>,
}

impl Workload {
    /// Returns `tenant/namespace/name`, unique among workloads.
    pub fn uid(&self) -> String {
        format!("{}/{}/{}", self.tenant, self.namespace, self.name)
    }
}

/// Protocol by which a gateway or node connects to a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TunnelProtocol {
    /// HBONE to port 15008 of the workload's address.
    #[default]
    Hbone,
    /// Plain TCP: the workload's node runs no proxy.
    None,
}

/// A service port that a workload serves: `service` at `port`, on the workload's own `target_port`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EndpointPort {
    pub service: ServiceKey,
    pub port: u16,
    pub target_port: u16,
}

/// A ready workload to which nodes of its tenant connect without a gateway.
///
/// A workload that is not ready, or that serves no direct port, has no direct endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectEndpoint {
    pub tenant: TenantName,
    pub namespace: Namespace,
    pub name: ObjectName,
    pub service_account: ServiceAccount,
    pub az: AzName,
    /// Addresses that accept HBONE on port 15008. Never empty.
    pub addresses: Vec<IpAddr>,
    /// The direct service ports that the workload serves; at most
    /// [`crate::limits::DIRECT_PORTS_PER_WORKLOAD_MAX`].
    pub serves: Vec<DirectPort>,
    /// The workload's own ports that clients may dial by the workload's address; at most the same
    /// number.
    pub own_ports: BTreeSet<u16>,
    /// Nodes that receive the endpoint. Only the controller knows them; they are not on the wire.
    pub audience: DirectAudience,
}

/// The nodes that receive a [`DirectEndpoint`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum DirectAudience {
    /// All nodes of the tenant: no policy restricts any workload.
    #[default]
    Tenant,
    /// The nodes of those workloads that policies admit.
    Nodes(Arc<BTreeSet<NodeName>>),
}

impl DirectAudience {
    /// Returns whether `node`, which belongs to the same tenant, receives the endpoint.
    pub fn has(&self, node: &NodeName) -> bool {
        match self {
            DirectAudience::Tenant => true,
            DirectAudience::Nodes(nodes) => nodes.contains(node),
        }
    }
}

impl DirectEndpoint {
    /// Returns `tenant/namespace/name`, the name of the [`Workload`].
    pub fn uid(&self) -> String {
        format!("{}/{}/{}", self.tenant, self.namespace, self.name)
    }
}

/// A service port to which nodes connect without a gateway.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DirectPort {
    pub service: ServiceKey,
    pub port: u16,
}

/// Identifies one rule of one user's route object; written `tenant/kind/namespace/name/rule`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RouteKey {
    pub tenant: TenantName,
    /// Kind of the object: `HTTPRoute`, `GRPCRoute` or `VirtualService`.
    pub kind: String,
    pub namespace: Namespace,
    pub name: ObjectName,
    /// Identifies the parent and rule within the object, e.g. `reviews:9080.0`.
    pub rule: String,
}

impl RouteKey {
    /// Returns the object that has the rule.
    pub fn route(&self) -> RouteObject {
        RouteObject {
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            kind: self.kind.clone(),
        }
    }
}

impl std::fmt::Display for RouteKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}/{}/{}/{}/{}",
            self.tenant, self.kind, self.namespace, self.name, self.rule
        )
    }
}

/// One rule of a route object, attached to a service. It matches when one of `matches` does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteRule {
    pub key: RouteKey,
    pub parent: ServiceKey,
    /// Port of the parent to which the rule is limited; `None` means every port.
    pub parent_port: Option<u16>,
    /// Namespace of the only clients to which the rule applies: workloads of the tenant that proved
    /// an identity in it. At a port of the parent, rules for a namespace replace those for all
    /// clients. `None` means all clients.
    pub consumer: Option<Namespace>,
    /// Hosts of which the request's host must match one; an empty list accepts any host.
    pub hosts: Vec<HostMatch>,
    /// Never empty: a rule without matches in the source has one match on the prefix `/`.
    pub matches: Vec<HttpMatch>,
    pub action: RouteAction,
    /// Changes of requests and responses; `None` for nearly all rules.
    pub filters: Option<Box<RouteFilters>>,
    /// Timeouts and retries; `None` if the rule asks for nothing. It is about quality of service: a
    /// data plane that does not know it serves the requests without.
    pub attempts: Option<Box<AttemptPolicy>>,
    /// Faults that are injected into requests; `None` for nearly all rules.
    pub faults: Option<Box<FaultPolicy>>,
    /// Cross-origin resource sharing; `None` for nearly all rules.
    pub cors: Option<Box<CorsPolicy>>,
    /// Services that get copies of requests. It is about quality of service, like `attempts`.
    pub mirrors: Vec<RouteMirror>,
}

/// A service that gets copies of a part of a rule's requests. Its responses are discarded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteMirror {
    pub target: BackendTarget,
    pub fraction: RequestFraction,
    /// Position of the backend whose requests are copied; `None` means those of all backends.
    pub backend: Option<u16>,
}

/// A host to match, lower case, without port.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HostMatch {
    Exact(String),
    /// `*.example.com` is stored as `.example.com`: it matches any host with one or more labels
    /// before it.
    Suffix(String),
}

/// A set of conditions that must all hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpMatch {
    /// Among all matches of the service that hold, the smallest precedence wins; see
    /// [`crate::route_table`].
    pub precedence: Precedence,
    pub path: PathMatch,
    pub method: Option<String>,
    pub headers: Vec<ValueMatch>,
    pub query: Vec<ValueMatch>,
}

/// The total order among matches of one service, computed by the compiler. Fields are compared one
/// by one; the smaller value comes first.
///
/// The Gateway API (v1.6, HTTPRouteRule) orders by exact path, longest path, method, most headers,
/// and most query parameters. Ties are broken by the oldest object, then its name, then the index
/// of the rule. GRPCRoutes (GRPCRouteRule) order by the service, the method and the headers. Istio
/// applies a VirtualService's rules in the order written.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Precedence {
    /// 0 for rules of a mesh route; larger values for fallbacks.
    pub class: u8,
    /// Inverted specificity, most significant first: path kind, path length, method, headers,
    /// query; of gRPC requests service, method and headers. All zero for ordered rules.
    pub specificity: [u32; 5],
    /// Creation time of the object in seconds since 1970; the next field breaks ties.
    pub created: u64,
    /// Name of the object, as `kind/namespace/name`.
    pub object: String,
    /// Index of the rule in the object, then of the match in the rule.
    pub indexes: [u32; 2],
}

/// A condition on the path (without query). Paths are compared in normalized form: unreserved
/// characters decoded, slashes merged, dot segments resolved.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PathMatch {
    Exact(String),
    /// Gateway API `PathPrefix`: compares whole path elements and ignores a trailing `/`.
    ElementPrefix(String),
    /// Istio `prefix`: a plain string prefix.
    StringPrefix(String),
    /// The whole path must match (RE2 syntax).
    Regex(String),
}

/// A condition on one header or query parameter.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ValueMatch {
    /// Header names are lower case; query parameter names are as written. The headers [`METHOD`] and
    /// [`AUTHORITY`] are the request's method and its host, as in Envoy. Attributes of the client have
    /// names of [`crate::client_attributes`].
    pub name: String,
    pub value: TextMatch,
}

/// Name of the method among the headers of a match, for patterns; [`HttpMatch::method`] is for one
/// method.
pub const METHOD: &str = ":method";

/// Name of the host among the headers of a match, for patterns: in lower case, without port and
/// trailing dot.
pub const AUTHORITY: &str = ":authority";

/// A condition on a text.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum TextMatch {
    Exact(String),
    Prefix(String),
    /// The whole text must match (RE2 syntax).
    Regex(String),
    Present,
    /// The condition does not hold for the text. A header that is missing is an empty text here,
    /// except for [`TextMatch::Present`]. If a header has several lines, the condition must hold
    /// neither for one of them nor for all together, because a second line must not hide the first.
    Not(Box<TextMatch>),
}

impl TextMatch {
    /// Returns the regular expression, if the condition has one.
    pub fn regex(&self) -> Option<&String> {
        match self {
            Self::Regex(pattern) => Some(pattern),
            Self::Not(unwanted) => unwanted.regex(),
            Self::Exact(_) | Self::Prefix(_) | Self::Present => None,
        }
    }
}

/// The effect of a rule on a request that matches it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteAction {
    /// Weighted split over backends. A broken backend keeps its weight, and the requests assigned
    /// to it fail.
    Split(Vec<Backend>),
    /// The gateway answers, and no endpoint receives the request. It must be allowed by the
    /// policies of the dialled service.
    Answer(Box<RouteAnswer>),
    /// Local reply, because the rule's source is broken (fails closed). The reason is in the
    /// author's diagnostics and in the log.
    Refuse { status: u16, reason: String },
}

/// One destination of a weighted split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    /// Relative weight, 0 to 1,000,000.
    pub weight: u32,
    pub target: BackendTarget,
    /// Changes of the requests to this backend, after those of the rule; `None` for nearly all. The
    /// path stays.
    pub filters: Option<Box<RouteFilters>>,
}

/// The destination of the requests that a weighted split assigns to a backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendTarget {
    /// A port of a service, narrowed to workloads that carry all `subset` labels.
    Service {
        service: ServiceKey,
        port: u16,
        subset: Labels,
    },
    /// Local reply with this status, because the reference is broken (unknown service, missing
    /// grant …).
    Refuse { status: u16, reason: String },
}

/// A tenant's node as the edges reach it: which pod addresses are behind which VXLAN tunnel
/// endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub tenant: TenantName,
    pub name: NodeName,
    pub az: AzName,
    /// Underlay address of the node's tunnel endpoint.
    pub underlay: Ipv4Addr,
    /// MAC address of the node's tunnel device.
    pub mac: [u8; 6],
    /// Pod addresses behind the node (the node's own overlay address included).
    pub pod_cidrs: Vec<IpNet>,
}

/// A gateway replica in the cloud tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replica {
    pub name: ReplicaName,
    pub number: ReplicaNumber,
    pub backend: BackendName,
    pub az: AzName,
    /// The underlay address, which is in 250.0.0.0/8.
    pub underlay: Ipv4Addr,
    /// False if the replica is known to be down; every chain then skips it.
    pub up: bool,
}

/// The *gateway address* of a service: the address at which a tenant's clients in (or nearest to)
/// an AZ reach it. That of a Gateway is on the network of its clients, outside the tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayAddress {
    pub service: ServiceKey,
    pub id: ServiceId,
    pub az: AzName,
    /// Addresses in the tenant's address space, or in that of `network`; at most one of each family.
    pub addresses: Vec<IpAddr>,
    /// VNI of the ingress network that has the addresses; `None` for the tenant's own network.
    pub network: Option<Vni>,
    /// False if no backend of the service is healthy in this AZ: clients should try another AZ
    /// first.
    pub open: bool,
}

/// Number of buckets in a service's table; `CANAL_BUCKETS` of `bpf/abi/tier.h`.
pub const BUCKETS: usize = 128;
/// Maximum number of replicas in a chain; `CANAL_CHAIN` of `bpf/abi/tier.h`.
pub const CHAIN_LENGTH_MAX: usize = 8;

/// A bucket's replicas: the head takes new sessions, and all keep the sessions they own (Canal fig.
/// 26). At most [`CHAIN_LENGTH_MAX`] long.
pub type ReplicaChain = Vec<ReplicaNumber>;

/// A service's bucket table in one AZ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketTable {
    pub service: ServiceKey,
    pub id: ServiceId,
    pub az: AzName,
    pub vni: Vni,
    /// Version of the table, incremented with each change.
    pub version: u32,
    /// Chains of the table, exactly [`BUCKETS`] of them.
    pub chains: Vec<ReplicaChain>,
}

/// Early limits. The redirector of each replica limits sessions and packets, and gateways limit
/// requests. A limit of 0 means no limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Throttle {
    pub tenant: TenantName,
    pub vni: Vni,
    /// Service that is limited; `None` limits the whole tenant.
    pub service: Option<ServiceKey>,
    /// Id of the service, if one is given.
    pub id: Option<ServiceId>,
    /// Rate and burst of new sessions.
    pub sessions: RateLimit,
    /// Rate and burst of packets.
    pub packets: RateLimit,
    /// Rate and burst of requests over all replicas together, enforced by the gateways' engines.
    pub requests: RateLimit,
}

impl Throttle {
    /// Returns the name of the service that is limited, or of the tenant.
    fn name(&self) -> String {
        self.service
            .as_ref()
            .map_or_else(|| self.tenant.to_string(), ToString::to_string)
    }
}

/// A token bucket: tokens per second, and the maximum number of saved tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RateLimit {
    pub per_second: u32,
    pub burst: u32,
}
