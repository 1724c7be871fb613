//! The immutable view of the configuration that one request is served by: tenants, services, workloads, endpoint sets, routes.
//! Look-ups only. [`build`] makes the next snapshot out of the last one and a change; [`Publisher`] hands it to the workers.

pub(crate) mod build;
pub(crate) mod party;
pub(crate) mod policies;
pub(crate) mod routes;
mod shards;
pub(crate) mod termination;
pub(crate) mod throttle;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use canal_kit::tls::{ClientIdentity, ServerIdentity};
use canal_model::identity::Identity;
use canal_model::ids::{Generation, Namespace, ServiceId, ServiceKey, TenantName, TrustDomain, Vni};
use canal_model::program::{AppProtocol, Labels, Resource, Tunnel};
use canal_model::share::Shares;
use canal_model::trust::KeyPolicy;
use hashbrown::HashMap;

pub(crate) use party::Party;
pub(crate) use policies::{Guard, Policies};
pub(crate) use routes::{Routes, Way};
use shards::Shards;
pub(crate) use termination::TerminationView;
pub(crate) use throttle::{RequestThrottle, admit_all};

/// Everything that is known, as of one generation.
#[derive(Debug, Default, Clone)]
pub(crate) struct Snapshot {
    pub(crate) generation: Generation,
    /// Counts snapshots of this process, from 1; 0 is the empty one.
    pub(crate) sequence: u64,
    tenants: HashMap<TenantName, Arc<TenantView>>,
    /// Whose a trust domain is.
    trust_domains: HashMap<TrustDomain, TenantName>,
    /// This replica's gateway addresses and whose they are.
    gateways: HashMap<IpAddr, TenantName>,
    /// Every service by its ID, which is its address inside the tier; the key names the tenant.
    inside: Shards<ServiceId, ServiceKey>,
    sets: Sets,
}

impl Snapshot {
    /// A tenant by name.
    pub(crate) fn tenant(&self, name: &str) -> Option<&Arc<TenantView>> {
        self.tenants.get(name)
    }

    /// The tenant whose trust domain this is.
    pub(crate) fn tenant_of(&self, domain: &TrustDomain) -> Option<&Arc<TenantView>> {
        self.trust_domains.get(domain).and_then(|name| self.tenants.get(name))
    }

    /// Takes over a tenant as it is now.
    fn put(&mut self, view: TenantView) {
        let (name, domain) = (view.name.clone(), view.trust_domain.clone());
        let before = self.tenants.insert(name.clone(), Arc::new(view)).and_then(|view| view.trust_domain.clone());
        // It may be another tenant's by now.
        if let Some(before) = before.filter(|before| self.trust_domains.get(before) == Some(&name)) {
            self.trust_domains.remove(&before);
        }
        if let Some(domain) = domain {
            self.trust_domains.insert(domain, name);
        }
    }

    /// The tenant whose gateway address this is.
    pub(crate) fn tenant_at(&self, local: IpAddr) -> Option<&Arc<TenantView>> {
        self.gateways.get(&local).and_then(|name| self.tenants.get(name))
    }

    /// The tenant and the service that an address inside the tier is of. Whether the service has ports is not said: the tier's own has
    /// none that a tenant made.
    pub(crate) fn service_inside(&self, id: ServiceId) -> Option<(&Arc<TenantView>, &ServiceKey)> {
        let key = self.inside.get(&id)?;
        Some((self.tenants.get(&key.tenant)?, key))
    }

    /// The endpoints behind a slot.
    #[inline]
    pub(crate) fn set(&self, slot: Slot) -> Option<&Arc<EndpointSet>> {
        self.sets.get(slot)
    }

    pub(crate) fn tenants(&self) -> impl Iterator<Item = &Arc<TenantView>> {
        self.tenants.values()
    }

    pub(crate) fn gateways(&self) -> impl Iterator<Item = (&IpAddr, &TenantName)> {
        self.gateways.iter()
    }
}

/// One tenant. Nothing in here refers to another.
#[derive(Debug, Clone)]
pub(crate) struct TenantView {
    pub(crate) name: TenantName,
    /// Dense, for per-worker accounts; never reused while the process lives.
    pub(crate) number: u32,
    pub(crate) trust_domain: Option<TrustDomain>,
    /// Where the tenant's private keys are. Set exactly when the trust domain is.
    pub(crate) keys: Option<KeyPolicy>,
    /// Set exactly when the trust domain is.
    pub(crate) vni: Option<Vni>,
    /// What the provider wrote of its shares.
    pub(crate) shares: Arc<Shares>,
    /// Limits all of its requests.
    pub(crate) throttle: Option<Arc<RequestThrottle>>,
    /// The gateway's own identity in the tenant's trust domain; `None` where no certificates are issued.
    pub(crate) tls: Option<TenantTls>,
    services: Shards<ServiceKey, Arc<ServiceView>>,
    vips: Shards<IpAddr, Arc<ServiceView>>,
    hosts: Shards<String, Arc<ServiceView>>,
    /// The tenant's gateway addresses, of every AZ.
    gateways: Shards<IpAddr, ServiceKey>,
    workloads: Shards<IpAddr, Arc<WorkloadView>>,
    /// Trust domains of other tenants whose members may connect.
    pub(crate) federated: Arc<BTreeSet<TrustDomain>>,
    pub(crate) policies: Arc<Policies>,
    /// Another one whenever what is open must be judged anew.
    pub(crate) policy_version: u64,
    /// Nothing of the tenant is served: a security resource of it is refused or missing.
    pub(crate) closed: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct TenantTls {
    pub(crate) server: ServerIdentity,
    pub(crate) client: ClientIdentity,
}

impl TenantView {
    /// There is no such tenant any more, or none yet.
    pub(crate) fn is_gone(&self) -> bool {
        self.trust_domain.is_none()
    }

    pub(crate) fn service_at(&self, vip: IpAddr) -> Option<&Arc<ServiceView>> {
        self.vips.get(&vip)
    }
    /// The service that a gateway address of this tenant is of.
    pub(crate) fn gateway_of(&self, address: IpAddr) -> Option<&ServiceKey> {
        self.gateways.get(&address)
    }
    pub(crate) fn service_named(&self, host: &str) -> Option<&Arc<ServiceView>> {
        self.hosts.get(host)
    }
    pub(crate) fn service(&self, key: &ServiceKey) -> Option<&Arc<ServiceView>> {
        self.services.get(key)
    }
    pub(crate) fn workload_at(&self, address: IpAddr) -> Option<&Arc<WorkloadView>> {
        self.workloads.get(&address)
    }
    pub(crate) fn services(&self) -> impl Iterator<Item = &Arc<ServiceView>> {
        self.services.values()
    }
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.services.len(), self.workloads.len())
    }
}

/// The names of a service as metrics and logs show them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServiceNames {
    pub(crate) key: ServiceKey,
    pub(crate) hostname: String,
}

/// A service with its ports and routes.
#[derive(Debug)]
pub(crate) struct ServiceView {
    pub(crate) names: Arc<ServiceNames>,
    pub(crate) vips: Vec<IpAddr>,
    pub(crate) ports: Box<[PortView]>,
    pub(crate) routes: Option<Arc<Routes>>,
    /// What is said of the service itself, for requests that routes lead elsewhere.
    pub(crate) guard: Option<Arc<Guard>>,
    /// Limits requests to it, wherever routes lead them.
    pub(crate) throttle: Option<Arc<RequestThrottle>>,
}

impl ServiceView {
    pub(crate) fn port(&self, port: u16) -> Option<&PortView> {
        self.ports.iter().find(|p| p.port == port)
    }
}

/// One port of a service.
#[derive(Debug)]
pub(crate) struct PortView {
    pub(crate) port: u16,
    pub(crate) protocol: AppProtocol,
    /// Its own endpoints: where requests go when there are no routes.
    pub(crate) slot: Slot,
    /// There are routes for it; a request that none matches is answered 404.
    pub(crate) routed: bool,
    /// They ask for more of the path than `/`: it is normalised before it is routed.
    pub(crate) routed_by_path: bool,
    /// TLS of clients without a node proxy ends at it.
    pub(crate) termination: Option<Arc<TerminationView>>,
}

/// A running program.
#[derive(Debug)]
pub(crate) struct WorkloadView {
    pub(crate) uid: String,
    pub(crate) namespace: Namespace,
    pub(crate) party: Arc<Party>,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) labels: Labels,
    pub(crate) az: String,
    pub(crate) ready: bool,
    pub(crate) tunnel: Tunnel,
    /// The tenant's, which connections to it are marked with inside the tier.
    pub(crate) vni: Option<Vni>,
    /// Whom its node must prove to be.
    pub(crate) identity: Arc<[Identity]>,
    /// (service, port, target port).
    pub(crate) serves: Vec<(ServiceKey, u16, u16)>,
    /// As it was told, to be made anew when its tenant changes.
    source: Arc<Resource>,
}

/// The ready endpoints of one service port, narrowed to a subset.
#[derive(Debug)]
pub(crate) struct EndpointSet {
    /// Unique; a changed set is another set.
    pub(crate) id: u64,
    /// `None` for a pod that was dialled by its own address.
    pub(crate) service: Option<Arc<ServiceNames>>,
    pub(crate) port: u16,
    pub(crate) protocol: AppProtocol,
    /// The service and its port exist.
    pub(crate) known: bool,
    pub(crate) endpoints: Box<[Endpoint]>,
}

/// One address that serves a service.
#[derive(Debug, Clone)]
pub(crate) struct Endpoint {
    /// The same for the same workload at the same address and port in the same network, for as long as the process lives.
    pub(crate) id: u64,
    pub(crate) workload: Arc<WorkloadView>,
    pub(crate) address: SocketAddr,
    /// `None`: nobody said anything of it.
    pub(crate) guard: Option<Arc<Guard>>,
}

/// Names an endpoint set; stays the same while the set behind it changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Slot(u32);

/// Endpoint sets by slot; an edit copies one chunk.
#[derive(Debug, Default, Clone)]
struct Sets {
    chunks: Vec<Arc<Vec<Arc<EndpointSet>>>>,
}

/// Sets per chunk.
const CHUNK: usize = 128;

impl Sets {
    fn get(&self, slot: Slot) -> Option<&Arc<EndpointSet>> {
        let at = slot.0 as usize;
        self.chunks.get(at / CHUNK)?.get(at % CHUNK)
    }

    fn push(&mut self, set: EndpointSet) -> Slot {
        if self.chunks.last().is_none_or(|c| c.len() == CHUNK) {
            self.chunks.push(Arc::new(Vec::with_capacity(CHUNK)));
        }
        let chunk = self.chunks.len() - 1;
        let sets = Arc::make_mut(&mut self.chunks[chunk]);
        sets.push(Arc::new(set));
        // 2^32 slots would need terabytes before.
        Slot((chunk * CHUNK + sets.len() - 1) as u32)
    }

    fn replace(&mut self, slot: Slot, set: EndpointSet) {
        let at = slot.0 as usize;
        if let Some(place) = self.chunks.get_mut(at / CHUNK).and_then(|c| Arc::make_mut(c).get_mut(at % CHUNK)) {
            *place = Arc::new(set);
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.chunks.iter().map(|c| c.len()).sum()
    }
}

/// Where the newest snapshot is found. Workers keep a copy of the pointer and compare one number per request.
#[derive(Debug, Default)]
pub(crate) struct Publisher {
    sequence: AtomicU64,
    newest: ArcSwap<Snapshot>,
}

impl Publisher {
    pub(crate) fn publish(&self, snapshot: Arc<Snapshot>) {
        let sequence = snapshot.sequence;
        self.newest.store(snapshot);
        self.sequence.store(sequence, Ordering::Release);
    }
    /// The newest snapshot's number.
    #[inline]
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Acquire)
    }
    pub(crate) fn newest(&self) -> Arc<Snapshot> {
        self.newest.load_full()
    }
}
