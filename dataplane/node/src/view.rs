//! What the node knows of the mesh: one immutable view per southbound change, made from the kit's state. One connection, one view.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use canal_kit::southbound::State;
use canal_model::ids::{Generation, NodeName, ServiceKey, TenantName};
use canal_model::program::{EndpointPort, Gateway, Kind, Resource, Service, Tenant};

/// The kinds a node subscribes to; the controller narrows each to the node's tenant, and workloads to the node's own.
pub const KINDS: [Kind; 4] = [Kind::Tenant, Kind::Gateway, Kind::Service, Kind::Workload];

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
    pub gateways: Vec<Arc<Gateway>>,
    services: HashMap<IpAddr, Arc<Service>>,
    hosts: HashMap<String, Arc<Service>>,
    /// What this node's pods serve, by pod uid.
    endpoints: HashMap<String, Vec<EndpointPort>>,
}

impl View {
    /// Makes the view of `node` from the resources held. Never fails: what names an unknown tenant is left out, and of two services that
    /// claim one address the smaller key keeps it, so that all nodes agree.
    pub fn new(state: &State, node: &NodeName) -> Self {
        let all: Vec<&Resource> = KINDS.into_iter().flat_map(|k| state.of(k)).map(|r| &**r).collect();
        Self::from_resources(state.generation(), all.iter().copied(), node)
    }

    /// As [`View::new`], from resources in any order.
    pub fn from_resources<'a>(generation: Generation, all: impl Iterator<Item = &'a Resource> + Clone, node: &NodeName) -> Self {
        let mut tenants = HashMap::new();
        for r in all.clone() {
            if let Resource::Tenant(t) = r {
                tenants.insert(t.name.clone(), TenantView::empty(t.clone()));
            }
        }
        for r in all {
            let Some(t) = r.tenant().and_then(|name| tenants.get_mut(name)) else { continue };
            match r {
                Resource::Gateway(g) => t.gateways.push(Arc::new(g.clone())),
                Resource::Service(s) => t.add_service(Arc::new(s.clone())),
                Resource::Workload(w) if w.node == *node => {
                    t.endpoints.insert(w.uid(), w.endpoints.clone());
                }
                Resource::Workload(_) | Resource::Tenant(_) | _ => {}
            }
        }
        for t in tenants.values_mut() {
            t.gateways.sort_by(|a, b| a.replica.cmp(&b.replica));
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
        Self { tenant: Arc::new(tenant), gateways: Vec::new(), services: HashMap::new(), hosts: HashMap::new(), endpoints: HashMap::new() }
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

    /// Whether the address is in the tenant's pod ranges.
    pub fn is_pod(&self, ip: IpAddr) -> bool {
        self.tenant.pod_cidrs.iter().any(|c| c.contains(&ip))
    }

    /// Whether the address is a gateway's.
    pub fn is_gateway(&self, ip: IpAddr) -> bool {
        self.gateways.iter().any(|g| g.addresses.contains(&ip))
    }

    /// How many service addresses are known.
    pub fn service_count(&self) -> usize {
        self.hosts.len()
    }
}
