//! Makes snapshots: keeps what was said so far, takes a change, rebuilds only the services it touches. It opens nothing and has no clock.

mod guarding;
mod terminating;
mod throttling;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;

use canal_guard::Place;
use canal_kit::keys::Keyring;
use canal_kit::tls::Credential;
use canal_model::authorization::PolicyTarget;
use canal_model::identity::{Identity, gateway_identity};
use canal_model::ids::{Generation, ReplicaNumber, ServiceId, ServiceKey, TenantName, Vni};
use canal_model::program::{AppProtocol, Gateway, GatewayAddress, Kind, Labels, Resource, RouteRule, Service, Tenant, Throttle, Workload};
use canal_model::trust::{KeyAlgorithm, KeyServer, Termination};
use hashbrown::HashMap;

use super::policies::Policies;
use super::routes::Targets;
use super::throttle::RequestThrottle;
use super::{
    Endpoint, EndpointSet, Party, PortView, Routes, ServiceNames, ServiceView, Shards, Slot, Snapshot, TenantTls, TenantView, WorkloadView,
};

/// Gives the place of a certificate of a tenant's gateway identity that has a service's names too, as
/// `canal_kit::certs::CertificateSource::want_service` does.
pub type WantService = Arc<dyn Fn(&Identity, &ServiceKey, KeyAlgorithm) -> Credential + Send + Sync>;

/// What is known of a service, complete or not: parts arrive in any order.
#[derive(Default)]
struct ServiceState {
    service: Option<Service>,
    /// By route name, so that the order does not depend on arrival.
    routes: BTreeMap<String, Arc<RouteRule>>,
    /// Workloads that serve it, by uid.
    members: BTreeSet<String>,
    slots: Vec<(u16, Labels, Slot)>,
    view: Option<Arc<ServiceView>>,
}

/// What a change has touched.
#[derive(Default)]
struct Touched {
    /// Ports, addresses or routes of these services changed.
    views: HashSet<ServiceKey>,
    /// Endpoints of these services changed.
    members: HashSet<ServiceKey>,
    tenants: HashSet<TenantName>,
    /// Policies for these targets changed; none of them: something else did that judgements depend on.
    policies: BTreeMap<TenantName, Vec<PolicyTarget>>,
    gateways: bool,
    /// Throttles changed, or what their parts depend on.
    throttles: bool,
}

/// See the module.
pub(crate) struct Builder {
    replica: String,
    keyring: Option<Keyring>,
    certificates: Option<WantService>,
    snapshot: Snapshot,
    tenants: HashMap<TenantName, TenantView>,
    services: HashMap<ServiceKey, ServiceState>,
    workloads: HashMap<String, Arc<WorkloadView>>,
    policies: HashMap<TenantName, Policies>,
    terminations: HashMap<(ServiceKey, u16), Termination>,
    key_servers: HashMap<String, KeyServer>,
    terminated: HashMap<(ServiceKey, u16), terminating::Made>,
    route_parents: HashMap<String, ServiceKey>,
    gateways: HashMap<String, Gateway>,
    addresses: BTreeMap<String, GatewayAddress>,
    /// Throttles, and what enforces each for as long as it exists.
    throttles: HashMap<String, (Throttle, Arc<RequestThrottle>)>,
    tables: BTreeMap<String, Arc<Resource>>,
    /// This replica's number in tables.
    number: Option<ReplicaNumber>,
    /// By all that a kept connection depends on: one to an address that the workload has left may lead to another by now.
    endpoint_ids: HashMap<(String, SocketAddr, Option<Vni>), u64>,
    last_id: u64,
    /// Tenants of which nothing is served, known yet or not.
    closed: BTreeSet<TenantName>,
    /// Faults in the routes of a service.
    faults: HashMap<ServiceKey, usize>,
    touched: Touched,
}

impl Builder {
    pub(crate) fn new(replica: &str, keyring: Option<Keyring>, certificates: Option<WantService>) -> Self {
        Self {
            replica: replica.into(),
            keyring,
            certificates,
            snapshot: Snapshot::default(),
            tenants: HashMap::default(),
            services: HashMap::default(),
            workloads: HashMap::default(),
            policies: HashMap::default(),
            terminations: HashMap::default(),
            key_servers: HashMap::default(),
            terminated: HashMap::default(),
            route_parents: HashMap::default(),
            gateways: HashMap::default(),
            addresses: BTreeMap::default(),
            throttles: HashMap::default(),
            tables: BTreeMap::default(),
            number: None,
            endpoint_ids: HashMap::default(),
            last_id: 0,
            closed: BTreeSet::new(),
            faults: HashMap::default(),
            touched: Touched::default(),
        }
    }

    /// The next snapshot.
    pub(crate) fn apply(&mut self, upserts: &[Arc<Resource>], removals: &[(Kind, String)], generation: Generation) -> Arc<Snapshot> {
        for (kind, name) in removals {
            self.remove(*kind, name);
        }
        for resource in upserts {
            self.upsert(resource);
        }
        self.settle();
        self.snapshot.generation = generation;
        self.snapshot.sequence += 1;
        Arc::new(self.snapshot.clone())
    }

    /// From the next snapshot on nothing of these tenants is served, and everything of the others is.
    pub(crate) fn close_tenants(&mut self, closed: BTreeSet<TenantName>) {
        let before = std::mem::replace(&mut self.closed, closed);
        let changed: Vec<TenantName> = before.symmetric_difference(&self.closed).cloned().collect();
        for name in changed {
            let closed = self.closed.contains(&name);
            if let Some(view) = self.tenants.get_mut(&name) {
                view.closed = closed;
                // What is open is judged anew, and ends.
                view.policy_version += 1;
                self.touched.tenants.insert(name);
            }
        }
    }

    fn upsert(&mut self, resource: &Arc<Resource>) {
        match &**resource {
            Resource::Tenant(tenant) => self.upsert_tenant(tenant),
            Resource::Gateway(gateway) => {
                self.gateways.insert(resource.name(), gateway.clone());
                self.touched.gateways = true;
            }
            Resource::Service(service) => {
                self.touched.views.insert(service.key.clone());
                self.touched.members.insert(service.key.clone());
                let before = self.state(&service.key).service.replace(service.clone());
                if let Some(before) = before.filter(|s| s.id != service.id) {
                    self.forget_inside(&service.key, before.id);
                }
                self.snapshot.inside.insert(service.id, service.key.clone());
            }
            Resource::Workload(workload) => {
                self.remove_workload(&workload.uid());
                self.insert_workload(resource, workload);
            }
            Resource::Route(rule) => self.upsert_route(resource.name(), rule),
            Resource::Address(address) => self.upsert_address(resource.name(), address),
            Resource::Authorization(_) | Resource::Authentication(_) | Resource::Authorizer(_) => self.upsert_policy(resource),
            Resource::Bundle(bundle) => self.upsert_bundle(bundle),
            Resource::Termination(termination) => self.upsert_termination(termination),
            Resource::KeyServer(server) => self.upsert_key_server(server),
            Resource::Throttle(throttle) => self.upsert_throttle(resource.name(), throttle),
            Resource::Table(_) | Resource::Replica(_) => self.upsert_tier(resource),
            // The redirector's, the edges', the nodes' and the kit's.
            _ => {}
        }
    }

    fn remove(&mut self, kind: Kind, name: &str) {
        match kind {
            Kind::Tenant => {
                if let Ok(tenant) = TenantName::new(name)
                    && let Some(view) = self.tenants.get_mut(&tenant)
                {
                    (view.trust_domain, view.keys, view.vni, view.tls) = (None, None, None, None);
                    self.touched.tenants.insert(tenant);
                }
            }
            Kind::Gateway => {
                self.gateways.remove(name);
                self.touched.gateways = true;
            }
            Kind::Service => {
                if let Ok(key) = name.parse::<ServiceKey>() {
                    if let Some(gone) = self.state(&key).service.take() {
                        self.forget_inside(&key, gone.id);
                    }
                    self.touched.views.insert(key.clone());
                    self.touched.members.insert(key);
                }
            }
            Kind::Workload => {
                self.remove_workload(name);
                self.endpoint_ids.retain(|(uid, ..), _| uid != name);
            }
            Kind::Route => {
                if let Some(parent) = self.route_parents.remove(name) {
                    self.state(&parent).routes.remove(name);
                    self.touched.views.insert(parent);
                }
            }
            Kind::Address => self.remove_address(name),
            Kind::Bundle => self.remove_bundle(name),
            Kind::Termination => self.remove_termination(name),
            Kind::KeyServer => self.remove_key_server(name),
            Kind::Throttle => self.remove_throttle(name),
            Kind::Table => self.remove_table(name),
            Kind::Authorization | Kind::Authentication | Kind::Authorizer => self.remove_policy(kind, name),
            _ => {}
        }
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
                let (server, client) = keyring.pair(&tenant.name, &tenant.keys, &gateway_identity(tenant.trust_domain.clone()));
                TenantTls { server, client }
            });
            self.touch_terminations(&tenant.name);
        }
        let view = self.tenant(&tenant.name);
        if view.vni.replace(tenant.vni) != Some(tenant.vni) || renamed {
            // Their identities hold the trust domain, and they the VNI.
            let members: Vec<_> = self.workloads.values().map(|w| w.source.clone()).filter(|r| r.tenant() == Some(&tenant.name)).collect();
            members.iter().for_each(|r| self.upsert(r));
        }
        self.touched.gateways = true;
    }

    fn upsert_address(&mut self, name: String, address: &GatewayAddress) {
        self.remove_address(&name);
        let known = &mut self.tenant(&address.service.tenant).gateways;
        for ip in &address.addresses {
            known.insert(*ip, address.service.clone());
        }
        self.snapshot.inside.insert(address.id, address.service.clone());
        self.addresses.insert(name, address.clone());
        self.touched.throttles = true;
    }

    fn remove_address(&mut self, name: &str) {
        let Some(gone) = self.addresses.remove(name) else { return };
        self.touched.throttles = true;
        let known = &mut self.tenant(&gone.service.tenant).gateways;
        for ip in &gone.addresses {
            if known.get(ip) == Some(&gone.service) {
                known.remove(ip);
            }
        }
        self.forget_inside(&gone.service, gone.id);
    }

    /// The service's ID is no longer said; by something else it may be.
    fn forget_inside(&mut self, key: &ServiceKey, id: ServiceId) {
        let of_service = self.services.get(key).and_then(|s| s.service.as_ref()).is_some_and(|s| s.id == id);
        let prefix = format!("{key}@");
        let mut addresses = self.addresses.range(prefix.clone()..).take_while(|(name, _)| name.starts_with(&prefix));
        if !of_service && !addresses.any(|(_, a)| a.id == id) && self.snapshot.inside.get(&id) == Some(key) {
            self.snapshot.inside.remove(&id);
        }
    }

    fn upsert_route(&mut self, name: String, rule: &RouteRule) {
        self.remove(Kind::Route, &name);
        // A rule may only steer services of its own tenant.
        if rule.key.tenant != rule.parent.tenant {
            tracing::error!(route = %rule.key, parent = %rule.parent, "a route names another tenant's service: left out");
            return;
        }
        self.route_parents.insert(name.clone(), rule.parent.clone());
        self.state(&rule.parent).routes.insert(name, Arc::new(rule.clone()));
        self.touched.views.insert(rule.parent.clone());
    }

    fn remove_workload(&mut self, uid: &str) {
        let Some(view) = self.workloads.remove(uid) else { return };
        let tenant = view.uid.split('/').next().and_then(|t| TenantName::new(t).ok());
        if let Some(tenant) = tenant {
            let known = &mut self.tenant(&tenant).workloads;
            for address in &view.addresses {
                if known.get(address).is_some_and(|w| w.uid == uid) {
                    known.remove(address);
                }
            }
        }
        for (service, _, _) in &view.serves {
            self.state(service).members.remove(uid);
            self.touched.members.insert(service.clone());
        }
    }

    fn insert_workload(&mut self, resource: &Arc<Resource>, workload: &Workload) {
        let tenant = self.tenant(&workload.tenant);
        let (trust_domain, vni) = (tenant.trust_domain.clone(), tenant.vni);
        let identity = trust_domain.map(|trust_domain| Identity {
            trust_domain,
            namespace: workload.namespace.clone(),
            service_account: workload.service_account.clone(),
        });
        let party = match &identity {
            Some(identity) => Party::of_workload(workload, identity),
            None => Party { workload: workload.name.to_string(), namespace: workload.namespace.to_string(), ..Party::unknown() },
        };
        let serves = workload.endpoints.iter().filter(|e| e.service.tenant == workload.tenant);
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
            serves: serves.map(|e| (e.service.clone(), e.port, e.target_port)).collect(),
            source: resource.clone(),
        });
        let known = &mut self.tenant(&workload.tenant).workloads;
        for address in &view.addresses {
            known.insert(*address, view.clone());
        }
        if self.policies.get(&workload.tenant).is_some_and(|policies| !policies.is_empty()) {
            // Its labels may be others now: what is open is judged anew.
            self.touch_policies(&workload.tenant, []);
        }
        for (service, _, _) in &view.serves {
            self.state(service).members.insert(view.uid.clone());
            self.touched.members.insert(service.clone());
        }
        self.workloads.insert(view.uid.clone(), view);
    }

    fn state(&mut self, key: &ServiceKey) -> &mut ServiceState {
        self.services.entry_ref(key).or_default()
    }

    /// The tenant's working copy, to be changed: marks it touched.
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
            services: Shards::default(),
            vips: Shards::default(),
            hosts: Shards::default(),
            gateways: Shards::default(),
            workloads: Shards::default(),
            federated: Arc::default(),
            policies: Arc::default(),
            policy_version: 0,
            closed,
        })
    }

    /// Rebuilds what was touched.
    fn settle(&mut self) {
        if self.touched.throttles || self.touched.gateways {
            self.settle_throttles();
        }
        let mut touched = std::mem::take(&mut self.touched);
        self.spread_policies(&mut touched);
        self.publish_policies(&touched);
        for key in &touched.members {
            let slots: Vec<_> = self.state(key).slots.clone();
            for (port, subset, slot) in slots {
                let set = self.make_set(key, port, &subset);
                self.snapshot.sets.replace(slot, set);
            }
        }
        for key in &touched.views {
            self.rebuild_view(key);
        }
        if touched.gateways {
            self.rebuild_gateways();
        }
        // Rebuilding views touches tenants too.
        let again = std::mem::take(&mut self.touched);
        for name in touched.tenants.iter().chain(&again.tenants) {
            if let Some(view) = self.tenants.get(name) {
                self.snapshot.put(view.clone());
            }
        }
    }

    fn rebuild_gateways(&mut self) {
        let own = self.gateways.values().filter(|g| g.replica.as_str() == self.replica);
        self.snapshot.gateways = own.flat_map(|g| g.addresses.iter().map(|a| (*a, g.tenant.clone()))).collect();
    }

    fn rebuild_view(&mut self, key: &ServiceKey) {
        if let Some(old) = self.state(key).view.take() {
            let tenant = self.tenant(&key.tenant);
            tenant.services.remove(key);
            for vip in &old.vips {
                if tenant.vips.get(vip).is_some_and(|s| s.names.key == *key) {
                    tenant.vips.remove(vip);
                }
            }
            if tenant.hosts.get(&old.names.hostname).is_some_and(|s| s.names.key == *key) {
                tenant.hosts.remove(&old.names.hostname);
            }
        }
        let Some(service) = self.state(key).service.clone() else { return };
        let routes = self.routes_of(key);
        let names = Arc::new(ServiceNames { key: key.clone(), hostname: service.hostname.to_ascii_lowercase() });
        let ports = service.ports.iter().map(|p| PortView {
            port: p.port,
            protocol: p.protocol,
            slot: self.slot(key, p.port, &Labels::new()),
            routed: routes.as_ref().is_some_and(|r| r.concern(p.port)),
            routed_by_path: routes.as_ref().is_some_and(|r| r.reads_path(p.port)),
            termination: self.termination(key, p, &names.hostname),
        });
        let ports = ports.collect();
        let guard = self.policies.get(&key.tenant).and_then(|policies| policies.guard(&Place::service(key)));
        let throttle = self.throttle_of(key);
        let view = Arc::new(ServiceView { names, vips: service.vips, ports, routes, guard, throttle });
        let tenant = self.tenant(&key.tenant);
        tenant.services.insert(key.clone(), view.clone());
        for vip in &view.vips {
            tenant.vips.insert(*vip, view.clone());
        }
        tenant.hosts.insert(view.names.hostname.clone(), view.clone());
        self.state(key).view = Some(view);
    }

    fn routes_of(&mut self, key: &ServiceKey) -> Option<Arc<Routes>> {
        let rules: Vec<Arc<RouteRule>> = self.state(key).routes.values().cloned().collect();
        if rules.is_empty() {
            self.faults.remove(key);
            return None;
        }
        let (routes, faults) = Routes::build(key, &rules, &mut SlotsOf(self));
        self.faults.insert(key.clone(), faults);
        Some(Arc::new(routes))
    }

    /// The slot of a service port and subset; made if it is new.
    fn slot(&mut self, key: &ServiceKey, port: u16, subset: &Labels) -> Slot {
        if let Some((.., slot)) = self.state(key).slots.iter().find(|(p, s, _)| *p == port && s == subset) {
            return *slot;
        }
        let set = self.make_set(key, port, subset);
        let slot = self.snapshot.sets.push(set);
        self.state(key).slots.push((port, subset.clone(), slot));
        slot
    }

    fn make_set(&mut self, key: &ServiceKey, port: u16, subset: &Labels) -> EndpointSet {
        self.last_id += 1;
        let id = self.last_id;
        let state = self.services.entry_ref(key).or_default();
        let service = state.service.as_ref();
        let hostname =
            service.map_or_else(|| format!("{}.{}.svc.cluster.local", key.name, key.namespace), |s| s.hostname.to_ascii_lowercase());
        let known_port = service.and_then(|s| s.ports.iter().find(|p| p.port == port));
        let policies = self.policies.get(&key.tenant);
        let mut endpoints = Vec::new();
        for workload in state.members.iter().filter_map(|uid| self.workloads.get(uid)) {
            let chosen = workload.ready && subset.iter().all(|(k, v)| workload.labels.get(k) == Some(v));
            let serves = workload.serves.iter().find(|(s, p, _)| s == key && *p == port);
            if let (true, Some((_, _, target)), Some(address)) = (chosen, serves, workload.addresses.first()) {
                let address = SocketAddr::new(*address, *target);
                let known = self.endpoint_ids.entry((workload.uid.clone(), address, workload.vni));
                let id = *known.or_insert_with(|| {
                    self.last_id += 1;
                    self.last_id
                });
                let place = Place::workload(&workload.namespace, &workload.labels).serving(Some(key));
                let guard = policies.and_then(|policies| policies.guard(&place));
                endpoints.push(Endpoint { id, workload: workload.clone(), address, guard });
            }
        }
        EndpointSet {
            id,
            service: Some(Arc::new(ServiceNames { key: key.clone(), hostname })),
            port,
            protocol: known_port.map_or(AppProtocol::Detect, |p| p.protocol),
            known: known_port.is_some(),
            endpoints: endpoints.into(),
        }
    }

    /// What is known and not in `state`.
    pub(crate) fn names_beside(&self, state: &[Arc<Resource>]) -> Vec<(Kind, String)> {
        let kept: HashSet<(Kind, String)> = state.iter().map(|r| (r.kind(), r.name())).collect();
        let tenants = self.tenants.values().filter(|t| t.trust_domain.is_some()).map(|t| (Kind::Tenant, t.name.to_string()));
        let services = self.services.iter().filter(|(_, s)| s.service.is_some()).map(|(key, _)| (Kind::Service, key.to_string()));
        let known = tenants
            .chain(self.gateways.keys().map(|name| (Kind::Gateway, name.clone())))
            .chain(services)
            .chain(self.workloads.keys().map(|uid| (Kind::Workload, uid.clone())))
            .chain(self.route_parents.keys().map(|name| (Kind::Route, name.clone())))
            .chain(self.addresses.keys().map(|name| (Kind::Address, name.clone())))
            .chain(self.throttles.keys().map(|name| (Kind::Throttle, name.clone())))
            .chain(self.tables.keys().map(|name| (Kind::Table, name.clone())))
            .chain(self.policy_names())
            .chain(self.bundle_names())
            .chain(self.termination_names());
        known.filter(|named| !kept.contains(named)).collect()
    }

    /// Faults in routes, of all services.
    pub(crate) fn route_faults(&self) -> usize {
        self.faults.values().sum()
    }
}

/// Lets routes name slots while the builder is being changed.
struct SlotsOf<'a>(&'a mut Builder);

impl Targets for SlotsOf<'_> {
    fn slot(&mut self, service: &ServiceKey, port: u16, subset: &Labels) -> Slot {
        self.0.slot(service, port, subset)
    }
}

#[cfg(test)]
pub(crate) mod tests;
