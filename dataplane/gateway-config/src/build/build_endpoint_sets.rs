//! Endpoint sets in the builder: which exist, which views use them, and what is in them. A set that
//! no view uses any more is freed, because tenants choose how many they name one after the other.
//! Start with [`SnapshotBuilder::endpoint_set`].

use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;

use canal_authorization::PolicyDestination;
use canal_model::ids::ServiceKey;
use canal_model::program::{AppProtocol, Labels};
use hashbrown::HashMap;

use super::{SnapshotBuilder, hostname_of, is_in_subset};
use crate::endpoint_ids::other_family;
use crate::load_balancing::LoadBalancing;
use crate::{Endpoint, EndpointSet, EndpointSetId, FilterChain, ServiceNames, ServiceView};

/// IDs of a service's endpoint sets.
#[derive(Debug, Default)]
pub(super) struct ServiceSets {
    /// By port and subset.
    used: BTreeMap<u16, BTreeMap<Labels, EndpointSetId>>,
}

impl ServiceSets {
    pub(super) fn get(&self, port: u16, subset: &Labels) -> Option<EndpointSetId> {
        self.used.get(&port)?.get(subset).copied()
    }

    fn all(&self) -> Vec<(u16, Labels, EndpointSetId)> {
        let of_port = |(port, subsets): (&u16, &BTreeMap<Labels, EndpointSetId>)| {
            let port = *port;
            let all = subsets.iter();
            let all = all.map(move |(subset, id)| (port, subset.clone(), *id));
            all.collect::<Vec<_>>()
        };
        self.used.iter().flat_map(of_port).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.used.is_empty()
    }

    fn forget(&mut self, unused: &HashSet<EndpointSetId>) {
        for subsets in self.used.values_mut() {
            subsets.retain(|_, id| !unused.contains(id));
        }
        self.used.retain(|_, subsets| !subsets.is_empty());
    }
}

/// How many places of views name each endpoint set.
#[derive(Debug, Default)]
pub(super) struct EndpointSetUses {
    /// By set, with its service.
    uses: HashMap<EndpointSetId, (ServiceKey, usize)>,
    /// Sets that may be unused. Those of a view that is being built are, until it is complete.
    unused: HashSet<EndpointSetId>,
    /// IDs of free slots, for the next sets of any service.
    free: Vec<EndpointSetId>,
}

#[cfg(test)]
impl EndpointSetUses {
    /// Returns the number of sets that are not free.
    pub(super) fn len(&self) -> usize {
        self.uses.len()
    }
}

impl SnapshotBuilder {
    /// Returns the ID of the endpoint set of a service port and subset; creates the set if needed.
    pub(super) fn endpoint_set(
        &mut self,
        key: &ServiceKey,
        port: u16,
        subset: &Labels,
    ) -> EndpointSetId {
        if let Some(known) = self.state(key).sets.get(port, subset) {
            return known;
        }
        let (set, is_pending) = self.make_set(key, port, subset, None);
        let id = match self.set_uses.free.pop() {
            Some(id) => {
                self.snapshot.sets.replace(id, Arc::new(set));
                id
            }
            None => self.snapshot.sets.push(set),
        };
        if is_pending {
            self.hash_tables.add(id, key, port, subset);
        }
        let subsets = self.state(key).sets.used.entry(port).or_default();
        subsets.insert(subset.clone(), id);
        self.set_uses.uses.insert(id, (key.clone(), 0));
        self.set_uses.unused.insert(id);
        id
    }

    /// Makes all sets of a service anew. They keep their IDs, so the views that refer to them need
    /// no rebuild.
    pub(super) fn rebuild_sets(&mut self, key: &ServiceKey) {
        let state = self.services.get(key);
        let all = state.map(|state| state.sets.all()).unwrap_or_default();
        for (port, subset, id) in all {
            let before = self.snapshot.sets.get(id).cloned();
            let (set, is_pending) = self.make_set(key, port, &subset, before.as_deref());
            self.snapshot.sets.replace(id, Arc::new(set));
            if is_pending {
                self.hash_tables.add(id, key, port, &subset);
            }
        }
    }

    /// Counts the sets that a new view uses.
    pub(super) fn use_sets(&mut self, view: &ServiceView) {
        for id in sets_of(view) {
            if let Some((_, uses)) = self.set_uses.uses.get_mut(&id) {
                *uses += 1;
            }
        }
    }

    /// Counts the sets that a view uses no longer.
    pub(super) fn release_sets(&mut self, view: Option<&ServiceView>) {
        let EndpointSetUses { uses, unused, .. } = &mut self.set_uses;
        for id in view.into_iter().flat_map(sets_of) {
            if let Some((_, uses)) = uses.get_mut(&id) {
                *uses = uses.saturating_sub(1);
                if *uses == 0 {
                    unused.insert(id);
                }
            }
        }
    }

    /// Frees the sets that no view uses. Returns their services.
    pub(super) fn free_unused_sets(&mut self) -> Vec<ServiceKey> {
        let mut by_service: BTreeMap<ServiceKey, HashSet<EndpointSetId>> = BTreeMap::new();
        for id in std::mem::take(&mut self.set_uses.unused) {
            if let Some((_, 0)) = self.set_uses.uses.get(&id)
                && let Some((service, _)) = self.set_uses.uses.remove(&id)
            {
                self.set_uses.free.extend(self.snapshot.sets.free(id));
                self.hash_tables.forget(id, &service.tenant);
                by_service.entry(service).or_default().insert(id);
            }
        }
        for (service, unused) in &by_service {
            self.state(service).sets.forget(unused);
        }
        by_service.into_keys().collect()
    }

    /// Makes an endpoint set that takes the place of `before`. Returns also whether its hash table
    /// must still be built.
    fn make_set(
        &mut self,
        key: &ServiceKey,
        port: u16,
        subset: &Labels,
        before: Option<&EndpointSet>,
    ) -> (EndpointSet, bool) {
        self.last_id += 1;
        // Workers recognize a changed set by its new ID.
        let id = self.last_id;
        let endpoints = self.endpoints_of(key, port, subset);
        // A rule may name a service or a port that is not stored. Its set has default values and
        // `exists` is false.
        let state = self.services.get(key);
        let policy = state.map(|state| state.load_balancer(port, subset));
        let service = state.and_then(|state| state.service.as_ref());
        let known_port = service.and_then(|s| s.ports.iter().find(|p| p.port == port));
        let (load_balancing, is_pending) = LoadBalancing::build(
            policy.unwrap_or_default(),
            &endpoints,
            before,
            &mut self.hash_tables.entries_left,
        );
        let set = EndpointSet {
            id,
            service: Some(Arc::new(ServiceNames {
                key: key.clone(),
                hostname: hostname_of(key, service),
            })),
            port,
            // Only a declared port fixes a protocol; without one the first bytes decide.
            protocol: known_port.map_or(AppProtocol::Detect, |p| p.protocol),
            pool: service.map(|s| s.upstream_pool).unwrap_or_default(),
            policy_paths: service.map(|s| s.policy_paths).unwrap_or_default(),
            exists: known_port.is_some(),
            filters: FilterChain::of_policies(
                endpoints
                    .iter()
                    .filter_map(|endpoint| endpoint.guard.as_deref()),
            ),
            load_balancing,
            endpoints: endpoints.into(),
        };
        (set, is_pending)
    }

    /// Returns the endpoints of a service port and subset.
    fn endpoints_of(&self, key: &ServiceKey, port: u16, subset: &Labels) -> Vec<Endpoint> {
        let Some(state) = self.services.get(key) else {
            return Vec::new();
        };
        let policies = self.policies.get(&key.tenant);
        let mut endpoints = Vec::new();
        for workload in state
            .members
            .iter()
            .filter_map(|uid| self.workloads.get(&key.tenant, uid))
        {
            // Only ready workloads of the subset that serve this port are endpoints.
            let chosen = workload.ready && is_in_subset(workload, subset);
            let serves = workload
                .serves
                .iter()
                .find(|(s, p, _)| s == key && *p == port);
            // An endpoint keeps its ID across snapshots, and with it its idle connections and its
            // ejection.
            let id = serves.and_then(|(.., target)| workload.ids.get(*target));
            if let (true, Some((_, _, target)), Some(address), Some(id)) =
                (chosen, serves, workload.addresses.first(), id)
            {
                // A client's address can be preserved only over its own family.
                let other = other_family(&workload.addresses);
                let place = PolicyDestination::workload(&workload.namespace, &workload.labels)
                    .serving(Some(key));
                let guard = policies.and_then(|policies| policies.guard(&place));
                endpoints.push(Endpoint {
                    id,
                    workload: workload.clone(),
                    address: SocketAddr::new(*address, *target),
                    other_family: other.map(|ip| SocketAddr::new(ip, *target)),
                    guard,
                });
            }
        }
        endpoints
    }
}

/// Iterates over the sets that a view uses, once for each place that names one.
fn sets_of(view: &ServiceView) -> impl Iterator<Item = EndpointSetId> {
    let of_ports = view.ports.iter().map(|port| port.slot);
    let routes = view.routes.iter();
    of_ports.chain(routes.flat_map(|routes| routes.endpoint_sets()))
}
