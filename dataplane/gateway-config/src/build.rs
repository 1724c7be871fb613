//! Builds snapshots: stores the current resources, applies a change, and rebuilds only what the
//! change affects.
//!
//! It opens nothing and reads no clock. Start with [`SnapshotBuilder::apply`].

mod build_endpoint_sets;
mod build_hash_tables;
mod build_listener_termination;
mod build_policies;
mod build_routes;
mod build_termination;
mod throttling;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use canal_identity::ClientIdentityFactory;
use canal_model::authorization::PolicyTarget;
use canal_model::identity::{Identity, gateway_identity};
use canal_model::ids::{Generation, ReplicaNumber, ServiceId, ServiceKey, TenantName};
use canal_model::load_balancing::LoadBalancer;
use canal_model::program::{
    AppProtocol, GatewayAddress, GatewayReplica, IngressGateway, Labels, RelayProtocol, Resource,
    ResourceKind, RouteRule, Service, ServicePort, Tenant, Throttle, Workload,
};
use canal_model::trust::{KeyAlgorithm, KeyServer, Termination};
use canal_tls::Credential;
use hashbrown::HashMap;

use build_endpoint_sets::{EndpointSetUses, ServiceSets};
use build_hash_tables::PendingHashTables;
pub(crate) use build_hash_tables::{FinishedHashTable, HashTableJob};
use build_listener_termination::ListenerCertificates;
pub(crate) use build_routes::CompileJob;
#[cfg(test)]
pub(crate) use build_routes::PANICKING;

use super::endpoint_ids::WorkloadPlace;
use super::policies::TenantPolicies;
use super::routes::CompiledRoutes;
use super::tenant_workloads::TenantWorkloads;
use super::throttle::RequestThrottle;
use super::{
    EndpointIds, FilterChain, PortView, ServiceNames, ServiceView, ShardedMap, Snapshot, TenantTls,
    TenantView, WorkloadLabels, WorkloadView,
};

/// Returns the credential for a tenant's gateway identity whose certificate also has a service's
/// names, like `canal_identity::certs::CertificateSource::service_credential`.
pub type ServiceCertificateFn =
    Arc<dyn Fn(&Identity, &ServiceKey, KeyAlgorithm) -> Credential + Send + Sync>;

/// Stored parts of a service, which may be incomplete: parts arrive in any order.
#[derive(Default)]
struct ServiceState {
    service: Option<Service>,
    /// The Gateway for which the service stands, if it does.
    gateway: Option<Arc<IngressGateway>>,
    /// Generation with which the service came.
    since: Generation,
    /// Routes by name, so that their order does not depend on arrival.
    routes: BTreeMap<String, Arc<RouteRule>>,
    /// UIDs of the workloads that serve the service.
    members: BTreeSet<String>,
    sets: ServiceSets,
    /// Load balancers of the service, by port and subset.
    load_balancers: BTreeMap<u16, BTreeMap<Labels, LoadBalancer>>,
    view: Option<Arc<ServiceView>>,
}

impl ServiceState {
    /// True if nothing of the service is stored and nothing uses its endpoint sets.
    fn is_empty(&self) -> bool {
        let is_declared = self.service.is_some() || self.gateway.is_some() || self.view.is_some();
        let is_named = !self.routes.is_empty() || !self.members.is_empty();
        !is_declared && !is_named && self.sets.is_empty()
    }

    /// Returns the load balancer of a port and subset. A service may have very many subsets.
    fn load_balancer(&self, port: u16, subset: &Labels) -> LoadBalancer {
        let of_port = self.service.as_ref().and(self.load_balancers.get(&port));
        let found = of_port.and_then(|subsets| subsets.get(subset));
        found.cloned().unwrap_or_default()
    }
}

/// Parts of the configuration that a change affects.
#[derive(Default)]
struct DirtySet {
    /// Services whose ports, addresses or routes changed.
    views: HashSet<ServiceKey>,
    /// Services whose set of endpoints changed.
    members: HashSet<ServiceKey>,
    tenants: HashSet<TenantName>,
    /// Targets whose policies changed. An empty list means that something else changed on which
    /// authorization depends.
    policies: BTreeMap<TenantName, Vec<PolicyTarget>>,
    gateways: bool,
    /// True if throttles changed, or something on which this replica's parts of them depend.
    throttles: bool,
}

/// Current resources and the working copy of the next snapshot.
pub struct SnapshotBuilder {
    replica: String,
    keyring: Option<ClientIdentityFactory>,
    certificates: Option<ServiceCertificateFn>,
    snapshot: Snapshot,
    tenants: HashMap<TenantName, TenantView>,
    services: HashMap<ServiceKey, ServiceState>,
    workloads: TenantWorkloads,
    policies: HashMap<TenantName, TenantPolicies>,
    terminations: HashMap<(ServiceKey, u16), Termination>,
    key_servers: HashMap<String, KeyServer>,
    terminated: HashMap<(ServiceKey, u16), build_termination::BuiltTermination>,
    listener_certificates: ListenerCertificates,
    route_parents: BTreeMap<String, ServiceKey>,
    gateway_replicas: HashMap<String, GatewayReplica>,
    addresses: BTreeMap<String, GatewayAddress>,
    /// Throttles, each with its enforcement state, which lives as long as the throttle.
    throttles: HashMap<String, (Throttle, Arc<RequestThrottle>)>,
    tables: BTreeMap<String, Arc<Resource>>,
    /// Number of this replica in bucket tables.
    number: Option<ReplicaNumber>,
    /// The last ID of endpoints, endpoint sets and versions of policies.
    last_id: u64,
    /// Tenants of which nothing is served, including tenants that do not exist yet.
    closed: BTreeSet<TenantName>,
    /// Number of broken matches in the routes of each service.
    faults: HashMap<ServiceKey, usize>,
    /// Routes that were compiled in advance for the change that is being applied.
    compiled: HashMap<ServiceKey, CompiledRoutes>,
    /// Services that are not served before their routes are compiled.
    withheld: HashSet<ServiceKey>,
    set_uses: EndpointSetUses,
    hash_tables: PendingHashTables,
    touched: DirtySet,
}

impl SnapshotBuilder {
    pub fn new(
        replica: &str,
        keyring: Option<ClientIdentityFactory>,
        certificates: Option<ServiceCertificateFn>,
    ) -> Self {
        Self {
            replica: replica.into(),
            keyring,
            certificates,
            snapshot: Snapshot::default(),
            tenants: HashMap::default(),
            services: HashMap::default(),
            workloads: TenantWorkloads::default(),
            policies: HashMap::default(),
            terminations: HashMap::default(),
            key_servers: HashMap::default(),
            terminated: HashMap::default(),
            listener_certificates: ListenerCertificates::default(),
            route_parents: BTreeMap::default(),
            gateway_replicas: HashMap::default(),
            addresses: BTreeMap::default(),
            throttles: HashMap::default(),
            tables: BTreeMap::default(),
            number: None,
            last_id: 0,
            closed: BTreeSet::new(),
            faults: HashMap::default(),
            compiled: HashMap::default(),
            withheld: HashSet::new(),
            set_uses: EndpointSetUses::default(),
            hash_tables: PendingHashTables::default(),
            touched: DirtySet::default(),
        }
    }

    /// Applies a change and returns the next snapshot. It compiles the routes that the change
    /// affects, however long that takes; [`crate::TenantBuilds`] compiles them in steps.
    pub fn apply(
        &mut self,
        upserts: &[Arc<Resource>],
        removals: &[(ResourceKind, String)],
        generation: Generation,
    ) -> Arc<Snapshot> {
        self.apply_compiled(upserts, removals, Vec::new(), generation)
    }

    /// Applies a change of which these routes were compiled in advance.
    pub(crate) fn apply_compiled(
        &mut self,
        upserts: &[Arc<Resource>],
        removals: &[(ResourceKind, String)],
        compiled: Vec<CompiledRoutes>,
        generation: Generation,
    ) -> Arc<Snapshot> {
        self.snapshot.generation = generation;
        self.compiled = compiled
            .into_iter()
            .map(|routes| (routes.service.clone(), routes))
            .collect();
        for (kind, name) in removals {
            self.remove(*kind, name);
        }
        for resource in upserts {
            self.upsert(resource);
        }
        self.settle();
        self.compiled.clear();
        self.snapshot.sequence += 1;
        Arc::new(self.snapshot.clone())
    }

    /// Sets the tenants of which nothing is served from the next snapshot on; all others are
    /// served.
    pub fn close_tenants(&mut self, closed: BTreeSet<TenantName>) {
        let before = std::mem::replace(&mut self.closed, closed);
        let changed: Vec<TenantName> = before.symmetric_difference(&self.closed).cloned().collect();
        for name in changed {
            let closed = self.closed.contains(&name);
            if let Some(view) = self.tenants.get_mut(&name) {
                view.closed = closed;
                // Open work is authorized again because of the new version, and ends.
                view.policy_version += 1;
                self.touched.tenants.insert(name);
            }
        }
    }

    fn upsert(&mut self, resource: &Arc<Resource>) {
        match &**resource {
            Resource::Tenant(tenant) => self.upsert_tenant(tenant),
            Resource::GatewayReplica(replica) => {
                self.gateway_replicas
                    .insert(resource.name(), replica.clone());
                self.touched.gateways = true;
            }
            Resource::Service(service) => self.upsert_service(service),
            Resource::Ingress(gateway) => self.upsert_gateway(gateway),
            Resource::ListenerCertificate(it) => {
                self.upsert_listener_certificate(resource.name(), it)
            }
            Resource::Workload(workload) => {
                let before = self.remove_workload(&workload.uid());
                self.insert_workload(resource, workload, before.as_deref());
            }
            Resource::Route(rule) => self.upsert_route(resource.name(), rule),
            Resource::Address(address) => self.upsert_address(resource.name(), address),
            Resource::Authorization(_) | Resource::Authentication(_) | Resource::Authorizer(_) => {
                self.upsert_policy(resource)
            }
            Resource::Bundle(bundle) => self.upsert_bundle(bundle),
            Resource::Termination(termination) => self.upsert_termination(termination),
            Resource::KeyServer(server) => self.upsert_key_server(server),
            Resource::Throttle(throttle) => self.upsert_throttle(resource.name(), throttle),
            Resource::Table(_) | Resource::Replica(_) => self.upsert_tier(resource),
            // Other kinds concern the redirector, the edges, the nodes or the trust store.
            _ => {}
        }
    }

    fn remove(&mut self, kind: ResourceKind, name: &str) {
        match kind {
            ResourceKind::Tenant => {
                // Only valid names were stored, so a name that cannot be parsed removes nothing.
                if let Ok(tenant) = TenantName::new(name)
                    && let Some(view) = self.tenants.get_mut(&tenant)
                {
                    // The view is retained, so that its number is not reused.
                    (view.trust_domain, view.keys, view.vni, view.tls) = (None, None, None, None);
                    self.touched.tenants.insert(tenant);
                }
            }
            ResourceKind::GatewayReplica => {
                self.gateway_replicas.remove(name);
                self.touched.gateways = true;
            }
            ResourceKind::Service | ResourceKind::Ingress => {
                if let Ok(key) = name.parse::<ServiceKey>() {
                    if self.state(&key).gateway.take().is_some() {
                        // Open connections have lost their listeners, so they are authorized again.
                        self.forget_listeners(&key);
                        self.touch_policies(&key.tenant, []);
                    }
                    self.state(&key).load_balancers.clear();
                    if let Some(gone) = self.state(&key).service.take() {
                        self.forget_inside(&key, gone.id);
                    }
                    self.touched.views.insert(key.clone());
                    self.touched.members.insert(key);
                }
            }
            ResourceKind::ListenerCertificate => self.remove_listener_certificate(name),
            ResourceKind::Workload => {
                self.remove_workload(name);
            }
            ResourceKind::Route => self.remove_route(name),
            ResourceKind::Address => self.remove_address(name),
            ResourceKind::Bundle => self.remove_bundle(name),
            ResourceKind::Termination => self.remove_termination(name),
            ResourceKind::KeyServer => self.remove_key_server(name),
            ResourceKind::Throttle => self.remove_throttle(name),
            ResourceKind::Table => self.remove_table(name),
            ResourceKind::Authorization
            | ResourceKind::Authentication
            | ResourceKind::Authorizer => self.remove_policy(kind, name),
            // The gateway stores nothing of the other kinds.
            _ => {}
        }
    }

    fn upsert_service(&mut self, service: &Service) {
        self.touched.views.insert(service.key.clone());
        self.touched.members.insert(service.key.clone());
        let generation = self.snapshot.generation;
        let state = self.state(&service.key);
        state.load_balancers.clear();
        // Of several for a port and subset the first counts.
        for it in service.load_balancers.iter().rev() {
            let of_port = state.load_balancers.entry(it.port).or_default();
            of_port.insert(it.subset.clone(), it.load_balancer.clone());
        }
        let before = state.service.replace(service.clone());
        state.since = if before.is_some() {
            state.since
        } else {
            generation
        };
        if let Some(before) = before.filter(|s| s.id != service.id) {
            // The old ID must not lead to this service any more, unless an address still declares
            // it.
            self.forget_inside(&service.key, before.id);
        }
        self.snapshot.inside.insert(service.id, service.key.clone());
    }

    /// A Gateway is served as a service without endpoints of its own.
    fn upsert_gateway(&mut self, gateway: &IngressGateway) {
        let protocol = |relay: Option<RelayProtocol>| match relay {
            Some(_) => AppProtocol::Tcp,
            None => AppProtocol::Http1,
        };
        let listeners = gateway.listeners.iter();
        let ports: BTreeMap<u16, AppProtocol> =
            listeners.map(|it| (it.port, protocol(it.relay))).collect();
        let port = |(port, protocol)| ServicePort {
            port,
            name: String::new(),
            protocol,
        };
        let (namespace, name) = (&gateway.key.namespace, &gateway.key.name);
        let service = Service {
            key: gateway.key.clone(),
            id: gateway.id,
            hostname: format!("{name}.{namespace}.svc.cluster.local"),
            vips: Vec::new(),
            ports: ports.into_iter().map(port).collect(),
            upstream_pool: Default::default(),
            policy_paths: Default::default(),
            load_balancers: Vec::new(),
        };
        let state = self.state(&gateway.key);
        // Listeners that did not change are not compiled again.
        if state.gateway.as_deref() != Some(gateway) {
            state.gateway = Some(Arc::new(gateway.clone()));
            self.forget_listeners(&gateway.key);
            // Open connections may have lost their listener.
            self.touch_policies(&gateway.key.tenant, []);
        }
        self.upsert_service(&service);
    }

    fn upsert_tenant(&mut self, tenant: &Tenant) {
        let keyring = self.keyring.clone();
        let view = self.tenant(&tenant.name);
        if *view.shares != tenant.shares {
            view.shares = Arc::new(tenant.shares.clone());
        }
        let renamed = view.trust_domain.as_ref() != Some(&tenant.trust_domain);
        let keys_moved = view.keys.replace(tenant.keys) != Some(tenant.keys);
        if renamed || keys_moved {
            view.trust_domain = Some(tenant.trust_domain.clone());
            view.tls = keyring.map(|keyring| {
                let (server, client) = keyring.pair(
                    &tenant.name,
                    &tenant.keys,
                    &gateway_identity(tenant.trust_domain.clone()),
                );
                TenantTls { server, client }
            });
            self.touch_terminations(&tenant.name);
        }
        let view = self.tenant(&tenant.name);
        if view.vni.replace(tenant.vni) != Some(tenant.vni) || renamed {
            // Identities of workloads contain the trust domain, and the workloads' views contain
            // the VNI.
            let members: Vec<_> = self
                .workloads
                .of(&tenant.name)
                .map(|w| w.source.clone())
                .collect();
            members.iter().for_each(|r| self.upsert(r));
        }
        self.touched.gateways = true;
    }

    fn upsert_address(&mut self, name: String, address: &GatewayAddress) {
        self.remove_address(&name);
        let known = &mut self.tenant(&address.service.tenant).gateways;
        // No client dials an address on another network through the mesh.
        for ip in address
            .addresses
            .iter()
            .filter(|_| address.network.is_none())
        {
            known.insert(*ip, address.service.clone());
        }
        self.snapshot
            .inside
            .insert(address.id, address.service.clone());
        self.addresses.insert(name, address.clone());
        self.touched.throttles = true;
    }

    fn remove_address(&mut self, name: &str) {
        let Some(gone) = self.addresses.remove(name) else {
            return;
        };
        self.touched.throttles = true;
        let known = &mut self.tenant(&gone.service.tenant).gateways;
        for ip in &gone.addresses {
            if known.get(ip) == Some(&gone.service) {
                known.remove(ip);
            }
        }
        self.forget_inside(&gone.service, gone.id);
    }

    /// Removes the mapping of an ID to the service, unless something else of the service still
    /// declares the ID.
    fn forget_inside(&mut self, key: &ServiceKey, id: ServiceId) {
        let of_service = self
            .services
            .get(key)
            .and_then(|s| s.service.as_ref())
            .is_some_and(|s| s.id == id);
        let prefix = format!("{key}@");
        let mut addresses = self
            .addresses
            .range(prefix.clone()..)
            .take_while(|(name, _)| name.starts_with(&prefix));
        if !of_service
            && !addresses.any(|(_, a)| a.id == id)
            && self.snapshot.inside.get(&id) == Some(key)
        {
            self.snapshot.inside.remove(&id);
        }
    }

    /// Removes a workload and returns it. Its cost does not depend on the number of workloads.
    fn remove_workload(&mut self, uid: &str) -> Option<Arc<WorkloadView>> {
        let tenant = TenantName::new(uid.split('/').next()?).ok()?;
        let view = self.workloads.remove(&tenant, uid)?;
        let known = &mut self.tenant(&tenant).workloads;
        for address in &view.addresses {
            if known.get(address).is_some_and(|w| w.uid == uid) {
                known.remove(address);
            }
        }
        for (service, _, _) in &view.serves {
            self.state(service).members.remove(uid);
            self.touched.members.insert(service.clone());
        }
        Some(view)
    }

    fn insert_workload(
        &mut self,
        resource: &Arc<Resource>,
        workload: &Workload,
        before: Option<&WorkloadView>,
    ) {
        let tenant = self.tenant(&workload.tenant);
        let (trust_domain, vni) = (tenant.trust_domain.clone(), tenant.vni);
        let identity = trust_domain.map(|trust_domain| Identity {
            trust_domain,
            namespace: workload.namespace.clone(),
            service_account: workload.service_account.clone(),
        });
        let party = match &identity {
            Some(identity) => WorkloadLabels::of_workload(workload, identity),
            // The workload may arrive before its tenant, whose trust domain completes the identity.
            None => WorkloadLabels {
                workload: workload.name.to_string(),
                namespace: workload.namespace.to_string(),
                ..WorkloadLabels::unknown()
            },
        };
        let serves = workload
            .endpoints
            .iter()
            // A workload must not receive another tenant's requests.
            .filter(|e| e.service.tenant == workload.tenant);
        let serves: Vec<_> = serves
            .map(|e| (e.service.clone(), e.port, e.target_port))
            .collect();
        let last_id = &mut self.last_id;
        let place = WorkloadPlace {
            addresses: &workload.addresses,
            vni,
            tunnel: workload.tunnel,
            identity: identity.as_ref(),
        };
        let ids = EndpointIds::assign(before, place, &serves, || {
            *last_id += 1;
            *last_id
        });
        let view = Arc::new(WorkloadView {
            uid: workload.uid(),
            namespace: workload.namespace.clone(),
            party: Arc::new(party),
            addresses: workload.addresses.clone(),
            labels: workload.labels.clone(),
            az: workload.az.to_string(),
            ready: workload.ready,
            tunnel: workload.tunnel,
            vni,
            identity: identity.into_iter().collect(),
            serves,
            ids,
            source: resource.clone(),
        });
        let known = &mut self.tenant(&workload.tenant).workloads;
        for address in &view.addresses {
            known.insert(*address, view.clone());
        }
        if self
            .policies
            .get(&workload.tenant)
            .is_some_and(|policies| !policies.is_empty())
        {
            // The workload's labels may have changed, so open work is authorized again.
            self.touch_policies(&workload.tenant, []);
        }
        for (service, _, _) in &view.serves {
            self.state(service).members.insert(view.uid.clone());
            self.touched.members.insert(service.clone());
        }
        self.workloads.insert(&workload.tenant, view);
    }

    fn state(&mut self, key: &ServiceKey) -> &mut ServiceState {
        self.services.entry_ref(key).or_default()
    }

    /// Returns the tenant's working copy for modification, and marks the tenant as changed.
    fn tenant(&mut self, name: &TenantName) -> &mut TenantView {
        self.touched.tenants.insert(name.clone());
        let number = self.tenants.len() as u32;
        let closed = self.closed.contains(name);
        self.tenants.entry_ref(name).or_insert_with(|| TenantView {
            name: name.clone(),
            number,
            trust_domain: None,
            keys: None,
            vni: None,
            shares: Arc::default(),
            throttle: None,
            tls: None,
            services: ShardedMap::default(),
            vips: ShardedMap::default(),
            hosts: ShardedMap::default(),
            gateways: ShardedMap::default(),
            workloads: ShardedMap::default(),
            federated: Arc::default(),
            policies: Arc::default(),
            policy_version: 0,
            closed,
        })
    }

    /// Rebuilds what the change affects.
    fn settle(&mut self) {
        if self.touched.throttles || self.touched.gateways {
            self.settle_throttles();
        }
        let mut touched = std::mem::take(&mut self.touched);
        self.spread_policies(&mut touched);
        self.publish_policies(&touched);
        // A changed set keeps its `EndpointSetId`, so the views that refer to it need no rebuild.
        for key in &touched.members {
            self.rebuild_sets(key);
        }
        for key in &touched.views {
            self.rebuild_view(key);
        }
        let freed = self.free_unused_sets();
        self.drop_empty_services(touched.members.iter().chain(&touched.views).chain(&freed));
        if touched.gateways {
            self.rebuild_gateways();
        }
        // Rebuilding views marks tenants as changed too.
        let again = std::mem::take(&mut self.touched);
        for name in touched.tenants.iter().chain(&again.tenants) {
            if let Some(view) = self.tenants.get(name) {
                self.snapshot.put(view.clone());
            }
        }
    }

    /// Drops what is stored of those of the services of which nothing is left: tenants choose how
    /// many Services they name one after the other.
    fn drop_empty_services<'a>(&mut self, services: impl Iterator<Item = &'a ServiceKey>) {
        for key in services {
            if self.services.get(key).is_some_and(ServiceState::is_empty) {
                self.services.remove(key);
            }
        }
    }

    fn rebuild_gateways(&mut self) {
        let own = self
            .gateway_replicas
            .values()
            .filter(|g| g.replica.as_str() == self.replica);
        self.snapshot.gateways = own
            .flat_map(|g| g.addresses.iter().map(|a| (*a, g.tenant.clone())))
            .collect();
    }

    fn rebuild_view(&mut self, key: &ServiceKey) {
        // The old view goes first, because the new one may have other addresses.
        let old = self.state(key).view.take();
        if let Some(old) = &old {
            let tenant = self.tenant(&key.tenant);
            tenant.services.remove(key);
            // Another service may own the address or the hostname by now.
            for vip in &old.vips {
                if tenant.vips.get(vip).is_some_and(|s| s.names.key == *key) {
                    tenant.vips.remove(vip);
                }
            }
            if tenant
                .hosts
                .get(&old.names.hostname)
                .is_some_and(|s| s.names.key == *key)
            {
                tenant.hosts.remove(&old.names.hostname);
            }
        }
        // A withheld service has no view until its routes are compiled.
        let Some(service) = self
            .state(key)
            .service
            .clone()
            .filter(|_| !self.withheld.contains(key))
        else {
            self.release_sets(old.as_deref());
            self.faults.remove(key);
            return;
        };
        let names = Arc::new(ServiceNames {
            key: key.clone(),
            // DNS names are compared without regard to case.
            hostname: service.hostname.to_ascii_lowercase(),
        });
        let guard = self
            .policies
            .get(&key.tenant)
            .and_then(|policies| policies.guard_of_service(key));
        let dialled = FilterChain::of_policies(guard.as_deref());
        let routes = self.routes_of(key, old.as_deref(), dialled);
        let gateway = self.state(key).gateway.clone();
        let ports = service.ports.iter().map(|p| PortView {
            port: p.port,
            protocol: p.protocol,
            slot: self.endpoint_set(key, p.port, &Labels::new()),
            routed: routes.as_ref().is_some_and(|r| r.concern(p.port)),
            routed_by_path: routes.as_ref().is_some_and(|r| r.reads_path(p.port)),
            routed_by_client: routes.as_ref().is_some_and(|r| r.reads_client(p.port)),
            consumers: routes
                .as_ref()
                .map_or_else(Box::default, |r| r.consumers(p.port)),
            termination: self.port_termination(key, p, &names.hostname),
            is_proxied: gateway
                .as_ref()
                .is_some_and(|it| it.proxied_ports.contains(&p.port)),
        });
        let ports = ports.collect();
        let throttle = self.throttle_of(key);
        let view = Arc::new(ServiceView {
            names,
            vips: service.vips,
            ports,
            routes,
            pool: service.upstream_pool,
            policy_paths: service.policy_paths,
            guard,
            throttle,
            // Clients inside the mesh have no proxies before this gateway, so none of their headers
            // is trusted.
            trusted_proxies: gateway.as_ref().map_or(0, |it| it.trusted_proxies),
        });
        // In this order, so that no set is unused that both views use.
        self.use_sets(&view);
        self.release_sets(old.as_deref());
        let tenant = self.tenant(&key.tenant);
        tenant.services.insert(key.clone(), view.clone());
        for vip in &view.vips {
            tenant.vips.insert(*vip, view.clone());
        }
        // Clients reach a Gateway at addresses of its ingress network. `upsert_gateway` makes up
        // its hostname, so a request by name must not find it.
        if gateway.is_none() {
            let host = view.names.hostname.clone();
            tenant.hosts.insert(host, view.clone());
        }
        self.state(key).view = Some(view);
    }

    /// Returns the kinds and names of all stored resources that `state` does not contain.
    pub fn names_beside(&self, state: &[Arc<Resource>]) -> Vec<(ResourceKind, String)> {
        let declared: HashSet<(ResourceKind, String)> =
            state.iter().map(|r| (r.kind(), r.name())).collect();
        let tenants = self
            .tenants
            .values()
            // An absent tenant keeps its view, without a trust domain.
            .filter(|t| t.trust_domain.is_some())
            .map(|t| (ResourceKind::Tenant, t.name.to_string()));
        let services = self
            .services
            .iter()
            // Rules and workloads may name a service that is not stored.
            .filter(|(_, s)| s.service.is_some())
            .map(|(key, s)| match s.gateway {
                None => (ResourceKind::Service, key.to_string()),
                Some(_) => (ResourceKind::Ingress, key.to_string()),
            });
        let known = tenants
            .chain(
                self.gateway_replicas
                    .keys()
                    .map(|name| (ResourceKind::GatewayReplica, name.clone())),
            )
            .chain(services)
            .chain(
                self.workloads
                    .uids()
                    .map(|uid| (ResourceKind::Workload, uid.clone())),
            )
            .chain(
                self.route_parents
                    .keys()
                    .map(|name| (ResourceKind::Route, name.clone())),
            )
            .chain(
                self.addresses
                    .keys()
                    .map(|name| (ResourceKind::Address, name.clone())),
            )
            .chain(
                self.throttles
                    .keys()
                    .map(|name| (ResourceKind::Throttle, name.clone())),
            )
            .chain(
                self.tables
                    .keys()
                    .map(|name| (ResourceKind::Table, name.clone())),
            )
            .chain(self.policy_names())
            .chain(self.bundle_names())
            .chain(self.termination_names())
            .chain(self.listener_certificates.names());
        known.filter(|named| !declared.contains(named)).collect()
    }

    /// Returns whether the tenant exists in the snapshot.
    pub(crate) fn is_served(&self, tenant: &TenantName) -> bool {
        self.tenants.get(tenant).is_some_and(|view| !view.is_gone())
    }

    /// Returns the number of broken route matches of all services.
    pub fn route_faults(&self) -> usize {
        self.faults.values().sum()
    }
}

fn is_in_subset(workload: &WorkloadView, subset: &Labels) -> bool {
    let mut required = subset.iter();
    required.all(|(key, value)| workload.labels.get(key) == Some(value))
}

/// Returns the host name of a service, also of one that is not stored.
fn hostname_of(key: &ServiceKey, service: Option<&Service>) -> String {
    service.map_or_else(
        || format!("{}.{}.svc.cluster.local", key.name, key.namespace),
        |service| service.hostname.to_ascii_lowercase(),
    )
}

#[cfg(test)]
mod growth_tests;
#[cfg(test)]
mod tests;
