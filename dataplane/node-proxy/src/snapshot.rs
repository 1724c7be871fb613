//! [`NodeSnapshot`]: immutable view of the mesh on this node, built from the southbound state at every change.
//!
//! A connection is routed with one snapshot.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use canal_hbone::ConnectAuthority;
use canal_model::authorization::{Authorization, PeerAuthentication};
use canal_model::ids::{Generation, NodeName, ServiceKey, TenantName, TrustDomain};
use canal_model::program::{
    DirectEndpoint, DirectPort, EndpointPort, GatewayAddress, Resource, ResourceKind, Service,
    Tenant,
};
use canal_model::tier::{is_tier_service, reserved};
use canal_model::trust::TrustBundle;
use canal_southbound_client::ResourceState;
use ipnet::IpNet;

use crate::direct::{DirectPeer, DirectPeers};
use crate::gateways::GatewayEndpoint;

/// Resource kinds that a node subscribes to. The controller limits each to the node's tenant, and
/// workloads to the node's own.
pub const KINDS: [ResourceKind; 10] = [
    ResourceKind::Tenant,
    ResourceKind::GatewayReplica,
    ResourceKind::Service,
    ResourceKind::Workload,
    ResourceKind::Address,
    ResourceKind::DirectEndpoint,
    ResourceKind::Bundle,
    ResourceKind::Authorization,
    ResourceKind::PeerAuthentication,
    ResourceKind::Manifest,
];

/// The mesh at one generation, as this node sees it.
#[derive(Debug, Default)]
pub struct NodeSnapshot {
    pub generation: Generation,
    tenants: HashMap<TenantName, NodeTenantView>,
}

/// Part of a snapshot that belongs to one tenant.
#[derive(Debug)]
pub struct NodeTenantView {
    pub tenant: Arc<Tenant>,
    /// Gateway replicas with addresses of their own, sorted by name.
    pub replicas: Vec<Arc<GatewayEndpoint>>,
    /// Gateway addresses of services, sorted by AZ. A service that has some is reached only by
    /// them.
    addresses: HashMap<ServiceKey, Vec<Arc<GatewayEndpoint>>>,
    /// Gateway addresses of the tier's own service, through which pods are reached.
    tier: Vec<Arc<GatewayEndpoint>>,
    /// The service that owns each gateway address.
    owners: HashMap<IpAddr, ServiceKey>,
    services: HashMap<IpAddr, Arc<Service>>,
    by_key: HashMap<ServiceKey, Arc<Service>>,
    hosts: HashMap<String, Arc<Service>>,
    /// Ports that this node's pods serve, by pod uid.
    endpoints: HashMap<String, Vec<EndpointPort>>,
    /// The pods' own UDP ports that UDPRoutes name, by pod uid.
    udp_ports: HashMap<String, BTreeSet<u16>>,
    /// Ready pods behind the direct ports of services.
    direct_ports: HashMap<ServiceKey, HashMap<u16, Arc<DirectPeers>>>,
    /// Ready pods by those of their own ports that are dialed without a gateway.
    direct_addresses: HashMap<SocketAddr, Arc<DirectPeers>>,
    /// Addresses of the HBONE listeners of direct pods.
    direct_ips: HashSet<IpAddr>,
    /// Authorization rules, shared with the previous snapshot unless they changed.
    pub rules: Arc<TenantAuthorization>,
    /// Trust bundles sorted by trust domain, the tenant's own among them.
    pub bundles: Vec<TrustBundle>,
}

/// Rules that decide on connections to a tenant's pods. Lists are sorted by key.
#[derive(Debug, PartialEq, Eq)]
pub struct TenantAuthorization {
    pub trust_domain: TrustDomain,
    /// True if a security resource of the tenant is refused or missing. Its pods' connections are
    /// then refused in both directions.
    pub closed: bool,
    /// Trust domains of other tenants for which the tenant has bundles.
    pub federated: BTreeSet<TrustDomain>,
    pub authorizations: Vec<Arc<Authorization>>,
    pub peer_authentications: Vec<Arc<PeerAuthentication>>,
}

impl TenantAuthorization {
    fn empty(trust_domain: TrustDomain) -> Self {
        Self {
            trust_domain,
            closed: false,
            federated: BTreeSet::new(),
            authorizations: Vec::new(),
            peer_authentications: Vec::new(),
        }
    }
}

/// Host name of a cluster's DNS service, which every distribution of Kubernetes uses.
const CLUSTER_DNS: &str = "kube-dns.kube-system.svc.cluster.local";

/// Destination behind a gateway address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GatewayAddressTarget<'a> {
    Service(&'a Arc<Service>),
    /// The tier's own service: tunnels to pods, and DNS.
    Tier,
}

impl NodeSnapshot {
    /// Builds the snapshot of `node` from the southbound state. This never fails: resources of
    /// unknown tenants are left out. Of two services that claim one address, the one with the
    /// smaller key gets it, so that all nodes agree.
    pub fn new(state: &ResourceState, node: &NodeName) -> Self {
        let all: Vec<&Resource> = KINDS
            .into_iter()
            .flat_map(|k| state.of(k))
            .map(|r| &**r)
            .collect();
        let mut view = Self::from_resources(state.generation(), all.iter().copied(), node);
        state.closed().keys().for_each(|tenant| view.close(tenant));
        view
    }

    /// Closes the tenant, so that nothing of it is served.
    pub(crate) fn close(&mut self, tenant: &TenantName) {
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            let mut rules = TenantAuthorization {
                closed: true,
                ..TenantAuthorization::empty(tenant.rules.trust_domain.clone())
            };
            rules.federated.clone_from(&tenant.rules.federated);
            rules
                .authorizations
                .clone_from(&tenant.rules.authorizations);
            rules
                .peer_authentications
                .clone_from(&tenant.rules.peer_authentications);
            tenant.rules = Arc::new(rules);
        }
    }

    /// Builds a snapshot like [`NodeSnapshot::new`], and shares unchanged rules with the previous
    /// one because compiling them again is expensive.
    pub fn after(before: &NodeSnapshot, state: &ResourceState, node: &NodeName) -> Self {
        let mut view = Self::new(state, node);
        for (name, tenant) in &mut view.tenants {
            if let Some(old) = before
                .tenants
                .get(name)
                .filter(|old| old.rules == tenant.rules)
            {
                tenant.rules = old.rules.clone();
            }
        }
        view
    }

    /// Builds a snapshot like [`NodeSnapshot::new`] from resources in any order, with no tenant
    /// closed.
    pub fn from_resources<'a>(
        generation: Generation,
        all: impl Iterator<Item = &'a Resource> + Clone,
        node: &NodeName,
    ) -> Self {
        let mut tenants = HashMap::new();
        let mut rules: HashMap<TenantName, TenantAuthorization> = HashMap::new();
        // Tenants come first, because every other resource belongs to one.
        for r in all.clone() {
            if let Resource::Tenant(t) = r {
                rules.insert(
                    t.name.clone(),
                    TenantAuthorization::empty(t.trust_domain.clone()),
                );
                tenants.insert(t.name.clone(), NodeTenantView::empty(t.clone()));
            }
        }
        let mut direct: HashMap<TenantName, Vec<&DirectEndpoint>> = HashMap::new();
        for r in all {
            let Some((t, rules)) = r
                .tenant()
                .and_then(|name| Some((tenants.get_mut(name)?, rules.get_mut(name)?)))
            else {
                // Without its Tenant object a resource cannot be served.
                continue;
            };
            match r {
                Resource::GatewayReplica(g) => {
                    t.replicas.push(Arc::new(GatewayEndpoint::replica(g)))
                }
                // An address on an ingress network is for clients outside the tenant, not for its
                // pods.
                Resource::Address(a) if a.network.is_none() => t.add_address(a),
                Resource::Service(s) => t.add_service(Arc::new(s.clone())),
                Resource::DirectEndpoint(d) => direct.entry(d.tenant.clone()).or_default().push(d),
                Resource::Authorization(a) => rules.authorizations.push(Arc::new(a.clone())),
                Resource::PeerAuthentication(p) => {
                    rules.peer_authentications.push(Arc::new(p.clone()))
                }
                Resource::Bundle(b) => {
                    rules
                        .federated
                        .extend(b.federated.then(|| b.trust_domain.clone()));
                    t.bundles.push(b.clone());
                }
                Resource::Workload(w) if w.node == *node => {
                    t.endpoints.insert(w.uid(), w.endpoints.clone());
                    t.udp_ports.insert(w.uid(), w.udp_ports.clone());
                }
                // Workloads of other nodes, tenants, and kinds that nodes do not subscribe to.
                _ => {}
            }
        }
        // Sorted, because resources arrive in any order, and gateways are tried in the order of
        // this list.
        for t in tenants.values_mut() {
            t.replicas.sort_by(|a, b| a.label.cmp(&b.label));
            t.tier.sort_by(|a, b| a.az.cmp(&b.az));
            t.bundles
                .sort_by(|a, b| a.trust_domain.cmp(&b.trust_domain));
            t.addresses
                .values_mut()
                .for_each(|of| of.sort_by(|a, b| a.az.cmp(&b.az)));
        }
        for (name, endpoints) in direct {
            // Each name is that of a tenant: the others were left out above.
            if let Some(t) = tenants.get_mut(&name) {
                t.set_direct(&endpoints);
            }
        }
        for (name, mut rules) in rules {
            // Sorted, so that equal rules compare as equal in whatever order they arrived.
            rules.authorizations.sort_by(|a, b| a.key.cmp(&b.key));
            rules.peer_authentications.sort_by(|a, b| a.key.cmp(&b.key));
            if let Some(t) = tenants.get_mut(&name) {
                t.rules = Arc::new(rules);
            }
        }
        Self {
            generation,
            tenants,
        }
    }

    /// Returns the tenant's part of the snapshot.
    pub fn tenant(&self, name: &TenantName) -> Option<&NodeTenantView> {
        self.tenants.get(name)
    }

    /// Iterates over all tenants, in no order.
    pub fn tenants(&self) -> impl Iterator<Item = &NodeTenantView> {
        self.tenants.values()
    }
}

impl NodeTenantView {
    fn empty(tenant: Tenant) -> Self {
        Self {
            rules: Arc::new(TenantAuthorization::empty(tenant.trust_domain.clone())),
            tenant: Arc::new(tenant),
            replicas: Vec::new(),
            addresses: HashMap::new(),
            tier: Vec::new(),
            owners: HashMap::new(),
            services: HashMap::new(),
            by_key: HashMap::new(),
            hosts: HashMap::new(),
            endpoints: HashMap::new(),
            udp_ports: HashMap::new(),
            direct_ports: HashMap::new(),
            direct_addresses: HashMap::new(),
            direct_ips: HashSet::new(),
            bundles: Vec::new(),
        }
    }

    fn add_address(&mut self, a: &GatewayAddress) {
        for ip in &a.addresses {
            let smaller = |old: &mut ServiceKey| {
                if a.service < *old {
                    *old = a.service.clone();
                }
            };
            self.owners
                .entry(ip.to_canonical())
                .and_modify(smaller)
                .or_insert_with(|| a.service.clone());
        }
        let entrance = Arc::new(GatewayEndpoint::address(a));
        match is_tier_service(&a.service) {
            true => self.tier.push(entrance),
            false => self
                .addresses
                .entry(a.service.clone())
                .or_default()
                .push(entrance),
        }
    }

    fn add_service(&mut self, s: Arc<Service>) {
        let first = |old: &mut Arc<Service>| {
            if s.key < old.key {
                *old = s.clone();
            }
        };
        for vip in &s.vips {
            self.services
                .entry(vip.to_canonical())
                .and_modify(first)
                .or_insert_with(|| s.clone());
        }
        self.by_key.insert(s.key.clone(), s.clone());
        self.hosts
            .entry(s.hostname.to_ascii_lowercase())
            .and_modify(first)
            .or_insert_with(|| s.clone());
    }

    /// Adds the endpoints of direct ports. Ports of unknown services are left out.
    fn set_direct(&mut self, endpoints: &[&DirectEndpoint]) {
        let mut of_ports: HashMap<&DirectPort, Vec<(&DirectEndpoint, Arc<DirectPeer>)>> =
            HashMap::new();
        for endpoint in endpoints {
            let peer = Arc::new(DirectPeer::new(endpoint, &self.tenant.trust_domain));
            for port in &endpoint.serves {
                of_ports
                    .entry(port)
                    .or_default()
                    .push((*endpoint, peer.clone()));
            }
            for ip in &peer.addresses {
                self.direct_ips.insert(*ip);
                for port in &endpoint.own_ports {
                    let address = SocketAddr::new(*ip, *port);
                    let at_address = Arc::new(DirectPeer {
                        addresses: vec![*ip],
                        expected: peer.expected.clone(),
                    });
                    let only = DirectPeers::new(
                        ConnectAuthority::Address(address),
                        vec![(*endpoint, at_address)],
                    );
                    self.direct_addresses.insert(address, Arc::new(only));
                }
            }
        }
        for (port, of) in of_ports {
            let Some(service) = self.by_key.get(&port.service) else {
                continue;
            };
            let authority =
                ConnectAuthority::Name(service.hostname.to_ascii_lowercase(), port.port);
            let peers = Arc::new(DirectPeers::new(authority, of));
            self.direct_ports
                .entry(port.service.clone())
                .or_default()
                .insert(port.port, peers);
        }
    }

    /// Returns the ready pods of a service's port, if the port is direct and has some.
    pub fn direct_port(&self, service: &ServiceKey, port: u16) -> Option<&Arc<DirectPeers>> {
        self.direct_ports.get(service)?.get(&port)
    }

    /// Returns the ready pod with this address, if this port of it is direct.
    pub fn direct_address(&self, address: SocketAddr) -> Option<&Arc<DirectPeers>> {
        self.direct_addresses.get(&address)
    }

    /// Iterates over the direct ports of services that have a ready pod, in no order.
    pub fn direct_ports(&self) -> impl Iterator<Item = (&ServiceKey, u16, &Arc<DirectPeers>)> {
        self.direct_ports
            .iter()
            .flat_map(|(key, ports)| ports.iter().map(move |(port, peers)| (key, *port, peers)))
    }

    /// Returns the service that has this virtual address.
    pub fn service(&self, vip: IpAddr) -> Option<&Arc<Service>> {
        self.services.get(&vip)
    }

    /// Returns the service with this host name, which must be in lower case.
    pub fn service_by_host(&self, host: &str) -> Option<&Arc<Service>> {
        self.hosts.get(host)
    }

    /// Returns the pod's own port for a service's port, if the pod serves it.
    pub fn target_port(&self, pod_uid: &str, service: &ServiceKey, port: u16) -> Option<u16> {
        self.endpoints
            .get(pod_uid)?
            .iter()
            .find(|e| e.service == *service && e.port == port)
            .map(|e| e.target_port)
    }

    /// Returns the pod's own UDP ports that accept datagrams from the tier.
    pub fn udp_ports(&self, pod_uid: &str) -> &BTreeSet<u16> {
        const NONE: &BTreeSet<u16> = &BTreeSet::new();
        self.udp_ports.get(pod_uid).unwrap_or(NONE)
    }

    /// Returns the addresses of the tier as pods see them: ranges of gateway addresses, the tier's
    /// own addresses, from which its replicas dial, and replicas with addresses of their own.
    pub fn tier_ranges(&self) -> BTreeSet<IpNet> {
        let replicas = self
            .replicas
            .iter()
            .flat_map(|r| &r.addresses)
            .map(|ip| IpNet::from(ip.to_canonical()));
        let on_tier = if self.tenant.gateway_cidrs.is_empty() {
            Vec::new()
        } else {
            reserved().to_vec()
        };
        self.tenant
            .gateway_cidrs
            .iter()
            .copied()
            .chain(on_tier)
            .chain(replicas)
            .collect()
    }

    /// Returns the services that the pod serves at some port.
    pub fn served(&self, pod_uid: &str) -> BTreeSet<&ServiceKey> {
        self.endpoints
            .get(pod_uid)
            .into_iter()
            .flatten()
            .map(|e| &e.service)
            .collect()
    }

    /// Returns whether the address is in the tenant's pod ranges.
    pub fn is_pod(&self, ip: IpAddr) -> bool {
        self.tenant.pod_cidrs.iter().any(|c| c.contains(&ip))
    }

    /// Returns whether the address is a gateway's or reserved for one.
    pub fn is_gateway(&self, ip: IpAddr) -> bool {
        self.is_entrance(ip) || self.tenant.gateway_cidrs.iter().any(|c| c.contains(&ip))
    }

    /// Returns whether tunnels to a gateway are opened at the address.
    pub fn is_entrance(&self, ip: IpAddr) -> bool {
        self.owners.contains_key(&ip) || self.replicas.iter().any(|r| r.addresses.contains(&ip))
    }

    /// Returns whether tunnels to a direct pod are opened at the address.
    pub fn is_direct_pod(&self, ip: IpAddr) -> bool {
        self.direct_ips.contains(&ip)
    }

    /// Returns the destination behind a gateway address.
    pub fn gateway_address_target(&self, ip: IpAddr) -> Option<GatewayAddressTarget<'_>> {
        let key = self.owners.get(&ip)?;
        if is_tier_service(key) {
            Some(GatewayAddressTarget::Tier)
        } else {
            self.by_key.get(key).map(GatewayAddressTarget::Service)
        }
    }

    /// Returns the name servers that pods may query by UDP, which the mesh does not carry: those
    /// that the tenant names, else the tier's own, else the cluster's DNS service. The list is
    /// sorted.
    pub fn resolvers(&self) -> Vec<IpAddr> {
        let tier = || {
            self.owners
                .iter()
                .filter(|(_, key)| is_tier_service(key))
                .map(|(ip, _)| *ip)
                .collect::<Vec<_>>()
        };
        let cluster = || {
            self.hosts
                .get(CLUSTER_DNS)
                .map(|service| service.vips.clone())
                .unwrap_or_default()
        };
        let named = self.tenant.resolvers.clone();
        let mut found = [named, tier(), cluster()]
            .into_iter()
            .find(|of| !of.is_empty())
            .unwrap_or_default();
        found.sort();
        found
    }

    /// Returns the gateway endpoints for tunnels to the service, or to a pod's address (`None`).
    pub fn entrances(&self, service: Option<&ServiceKey>) -> &[Arc<GatewayEndpoint>] {
        let own = match service {
            Some(key) => self.addresses.get(key),
            None => Some(&self.tier),
        };
        own.filter(|of| !of.is_empty()).unwrap_or(&self.replicas)
    }

    /// Iterates over the gateway addresses of services without the tier's own, in no order.
    pub fn addresses(&self) -> impl Iterator<Item = (&ServiceKey, &Arc<GatewayEndpoint>)> {
        self.addresses
            .iter()
            .flat_map(|(key, of)| of.iter().map(move |entrance| (key, entrance)))
    }

    /// Iterates over all virtual addresses with their services, in no order.
    pub fn service_addresses(&self) -> impl Iterator<Item = (&IpAddr, &Arc<Service>)> {
        self.services.iter()
    }

    /// Iterates over all addresses at which tunnels to gateways are opened, in no order; some occur
    /// twice.
    pub fn entrance_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.owners.keys().copied().chain(
            self.replicas
                .iter()
                .flat_map(|r| r.addresses.iter().copied()),
        )
    }

    /// Returns the number of services with different host names.
    pub fn service_count(&self) -> usize {
        self.hosts.len()
    }
}
