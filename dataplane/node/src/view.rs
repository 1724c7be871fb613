//! What the node knows of the mesh: one immutable view per southbound change, made from the kit's state. One connection, one view.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use canal_kit::southbound::State;
use canal_model::authorization::{Authorization, PeerAuthentication};
use canal_model::ids::{Generation, NodeName, ServiceKey, TenantName, TrustDomain};
use canal_model::program::{EndpointPort, GatewayAddress, Kind, Resource, Service, Tenant};
use canal_model::tier::{is_tier_service, reserved};
use canal_model::trust::Bundle;
use ipnet::IpNet;

use crate::gateways::Entrance;

/// The kinds a node subscribes to; the controller narrows each to the node's tenant, and workloads to the node's own.
pub const KINDS: [Kind; 9] = [
    Kind::Tenant,
    Kind::Gateway,
    Kind::Service,
    Kind::Workload,
    Kind::Address,
    Kind::Bundle,
    Kind::Authorization,
    Kind::PeerAuthentication,
    Kind::Manifest,
];

/// Everything, at one generation.
#[derive(Debug, Default)]
pub struct View {
    pub generation: Generation,
    tenants: HashMap<TenantName, TenantView>,
}

/// One tenant's part.
#[derive(Debug)]
pub struct TenantView {
    pub tenant: Arc<Tenant>,
    /// Gateway replicas with addresses of their own, by name.
    pub replicas: Vec<Arc<Entrance>>,
    /// Gateway addresses of services, by AZ. A service that has some is reached by them alone.
    addresses: HashMap<ServiceKey, Vec<Arc<Entrance>>>,
    /// Of the tier's own service, through which pods are reached.
    tier: Vec<Arc<Entrance>>,
    /// Whose gateway address it is.
    owners: HashMap<IpAddr, ServiceKey>,
    services: HashMap<IpAddr, Arc<Service>>,
    by_key: HashMap<ServiceKey, Arc<Service>>,
    hosts: HashMap<String, Arc<Service>>,
    /// What this node's pods serve, by pod uid.
    endpoints: HashMap<String, Vec<EndpointPort>>,
    /// Their own UDP ports that UDPRoutes name, by pod uid.
    udp_ports: HashMap<String, BTreeSet<u16>>,
    /// Who may do what. The same as in the view before, unless it changed.
    pub rules: Arc<Rules>,
    /// Whom to trust, sorted by trust domain; its own among them.
    pub bundles: Vec<Bundle>,
}

/// What decides who may connect to a tenant's pods. Sorted.
#[derive(Debug, PartialEq, Eq)]
pub struct Rules {
    pub trust_domain: TrustDomain,
    /// A security resource of the tenant is refused or missing: its pods' connections are refused, in both directions.
    pub closed: bool,
    /// Trust domains of other tenants, of which it has bundles.
    pub federated: BTreeSet<TrustDomain>,
    pub authorizations: Vec<Arc<Authorization>>,
    pub peer_authentications: Vec<Arc<PeerAuthentication>>,
}

impl Rules {
    fn empty(trust_domain: TrustDomain) -> Self {
        Self { trust_domain, closed: false, federated: BTreeSet::new(), authorizations: Vec::new(), peer_authentications: Vec::new() }
    }
}

/// The DNS service of a cluster, as every distribution of Kubernetes names it.
const CLUSTER_DNS: &str = "kube-dns.kube-system.svc.cluster.local";

/// What a gateway address leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behind<'a> {
    Service(&'a Arc<Service>),
    /// The tier's own service: tunnels to pods, and DNS.
    Tier,
}

impl View {
    /// Makes the view of `node` from the resources held. Never fails: what names an unknown tenant is left out, and of two services that
    /// claim one address the smaller key keeps it, so that all nodes agree.
    pub fn new(state: &State, node: &NodeName) -> Self {
        let all: Vec<&Resource> = KINDS.into_iter().flat_map(|k| state.of(k)).map(|r| &**r).collect();
        let mut view = Self::from_resources(state.generation(), all.iter().copied(), node);
        state.closed().keys().for_each(|tenant| view.close(tenant));
        view
    }

    /// Serves nothing of the tenant.
    pub(crate) fn close(&mut self, tenant: &TenantName) {
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            let mut rules = Rules { closed: true, ..Rules::empty(tenant.rules.trust_domain.clone()) };
            rules.federated.clone_from(&tenant.rules.federated);
            rules.authorizations.clone_from(&tenant.rules.authorizations);
            rules.peer_authentications.clone_from(&tenant.rules.peer_authentications);
            tenant.rules = Arc::new(rules);
        }
    }

    /// [`View::new`], keeping of the view before what has not changed and is dear to look at again.
    pub fn after(before: &View, state: &State, node: &NodeName) -> Self {
        let mut view = Self::new(state, node);
        for (name, tenant) in &mut view.tenants {
            if let Some(old) = before.tenants.get(name).filter(|old| old.rules == tenant.rules) {
                tenant.rules = old.rules.clone();
            }
        }
        view
    }

    /// As [`View::new`], from resources in any order.
    pub fn from_resources<'a>(generation: Generation, all: impl Iterator<Item = &'a Resource> + Clone, node: &NodeName) -> Self {
        let mut tenants = HashMap::new();
        let mut rules: HashMap<TenantName, Rules> = HashMap::new();
        for r in all.clone() {
            if let Resource::Tenant(t) = r {
                rules.insert(t.name.clone(), Rules::empty(t.trust_domain.clone()));
                tenants.insert(t.name.clone(), TenantView::empty(t.clone()));
            }
        }
        for r in all {
            let Some((t, rules)) = r.tenant().and_then(|name| Some((tenants.get_mut(name)?, rules.get_mut(name)?))) else { continue };
            match r {
                Resource::Gateway(g) => t.replicas.push(Arc::new(Entrance::replica(g))),
                Resource::Address(a) => t.add_address(a),
                Resource::Service(s) => t.add_service(Arc::new(s.clone())),
                Resource::Authorization(a) => rules.authorizations.push(Arc::new(a.clone())),
                Resource::PeerAuthentication(p) => rules.peer_authentications.push(Arc::new(p.clone())),
                Resource::Bundle(b) => {
                    rules.federated.extend(b.federated.then(|| b.trust_domain.clone()));
                    t.bundles.push(b.clone());
                }
                Resource::Workload(w) if w.node == *node => {
                    t.endpoints.insert(w.uid(), w.endpoints.clone());
                    t.udp_ports.insert(w.uid(), w.udp_ports.clone());
                }
                // Another node's workload, the tenant itself, and what nodes are not told of.
                _ => {}
            }
        }
        for t in tenants.values_mut() {
            t.replicas.sort_by(|a, b| a.label.cmp(&b.label));
            t.tier.sort_by(|a, b| a.az.cmp(&b.az));
            t.bundles.sort_by(|a, b| a.trust_domain.cmp(&b.trust_domain));
            t.addresses.values_mut().for_each(|of| of.sort_by(|a, b| a.az.cmp(&b.az)));
        }
        for (name, mut rules) in rules {
            rules.authorizations.sort_by(|a, b| a.key.cmp(&b.key));
            rules.peer_authentications.sort_by(|a, b| a.key.cmp(&b.key));
            if let Some(t) = tenants.get_mut(&name) {
                t.rules = Arc::new(rules);
            }
        }
        Self { generation, tenants }
    }

    /// A tenant's part.
    pub fn tenant(&self, name: &TenantName) -> Option<&TenantView> {
        self.tenants.get(name)
    }

    /// All tenants.
    pub fn tenants(&self) -> impl Iterator<Item = &TenantView> {
        self.tenants.values()
    }
}

impl TenantView {
    fn empty(tenant: Tenant) -> Self {
        Self {
            rules: Arc::new(Rules::empty(tenant.trust_domain.clone())),
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
            self.owners.entry(ip.to_canonical()).and_modify(smaller).or_insert_with(|| a.service.clone());
        }
        let entrance = Arc::new(Entrance::address(a));
        match is_tier_service(&a.service) {
            true => self.tier.push(entrance),
            false => self.addresses.entry(a.service.clone()).or_default().push(entrance),
        }
    }

    fn add_service(&mut self, s: Arc<Service>) {
        let first = |old: &mut Arc<Service>| {
            if s.key < old.key {
                *old = s.clone();
            }
        };
        for vip in &s.vips {
            self.services.entry(vip.to_canonical()).and_modify(first).or_insert_with(|| s.clone());
        }
        self.by_key.insert(s.key.clone(), s.clone());
        self.hosts.entry(s.hostname.to_ascii_lowercase()).and_modify(first).or_insert_with(|| s.clone());
    }

    /// The service whose virtual address this is.
    pub fn service(&self, vip: IpAddr) -> Option<&Arc<Service>> {
        self.services.get(&vip)
    }

    /// The service of this host name (lower case).
    pub fn service_by_host(&self, host: &str) -> Option<&Arc<Service>> {
        self.hosts.get(host)
    }

    /// The pod's own port for a service's port, if the pod serves it.
    pub fn target_port(&self, pod_uid: &str, service: &ServiceKey, port: u16) -> Option<u16> {
        self.endpoints.get(pod_uid)?.iter().find(|e| e.service == *service && e.port == port).map(|e| e.target_port)
    }

    /// The pod's own UDP ports at which datagrams from the tier pass.
    pub fn udp_ports(&self, pod_uid: &str) -> &BTreeSet<u16> {
        const NONE: &BTreeSet<u16> = &BTreeSet::new();
        self.udp_ports.get(pod_uid).unwrap_or(NONE)
    }

    /// The tier as pods see it: where services have their gateway addresses, the addresses of the tier itself, from which its replicas dial, and
    /// replicas that have addresses of their own.
    pub fn tier_ranges(&self) -> BTreeSet<IpNet> {
        let replicas = self.replicas.iter().flat_map(|r| &r.addresses).map(|ip| IpNet::from(ip.to_canonical()));
        let on_tier = if self.tenant.gateway_cidrs.is_empty() { Vec::new() } else { reserved().to_vec() };
        self.tenant.gateway_cidrs.iter().copied().chain(on_tier).chain(replicas).collect()
    }

    /// The services that the pod serves at some port.
    pub fn served(&self, pod_uid: &str) -> BTreeSet<&ServiceKey> {
        self.endpoints.get(pod_uid).into_iter().flatten().map(|e| &e.service).collect()
    }

    /// Whether the address is in the tenant's pod ranges.
    pub fn is_pod(&self, ip: IpAddr) -> bool {
        self.tenant.pod_cidrs.iter().any(|c| c.contains(&ip))
    }

    /// Whether the address is a gateway's, or kept for one.
    pub fn is_gateway(&self, ip: IpAddr) -> bool {
        self.is_entrance(ip) || self.tenant.gateway_cidrs.iter().any(|c| c.contains(&ip))
    }

    /// Whether tunnels are opened to the address.
    pub fn is_entrance(&self, ip: IpAddr) -> bool {
        self.owners.contains_key(&ip) || self.replicas.iter().any(|r| r.addresses.contains(&ip))
    }

    /// What is at a gateway address.
    pub fn behind(&self, ip: IpAddr) -> Option<Behind<'_>> {
        let key = self.owners.get(&ip)?;
        if is_tier_service(key) { Some(Behind::Tier) } else { self.by_key.get(key).map(Behind::Service) }
    }

    /// Name servers that pods may ask by datagrams, which the mesh does not carry: those that the tenant names, else the tier's own, else the
    /// cluster's DNS service. Sorted.
    pub fn resolvers(&self) -> Vec<IpAddr> {
        let tier = || self.owners.iter().filter(|(_, key)| is_tier_service(key)).map(|(ip, _)| *ip).collect::<Vec<_>>();
        let cluster = || self.hosts.get(CLUSTER_DNS).map(|service| service.vips.clone()).unwrap_or_default();
        let named = self.tenant.resolvers.clone();
        let mut found = [named, tier(), cluster()].into_iter().find(|of| !of.is_empty()).unwrap_or_default();
        found.sort();
        found
    }

    /// Where tunnels to the service, or to a pod's address (`None`), may be opened.
    pub fn entrances(&self, service: Option<&ServiceKey>) -> &[Arc<Entrance>] {
        let own = match service {
            Some(key) => self.addresses.get(key),
            None => Some(&self.tier),
        };
        own.filter(|of| !of.is_empty()).unwrap_or(&self.replicas)
    }

    /// All gateway addresses with the services they are of, in no order.
    pub fn addresses(&self) -> impl Iterator<Item = (&ServiceKey, &Arc<Entrance>)> {
        self.addresses.iter().flat_map(|(key, of)| of.iter().map(move |entrance| (key, entrance)))
    }

    /// How many service addresses are known.
    pub fn service_count(&self) -> usize {
        self.hosts.len()
    }
}
