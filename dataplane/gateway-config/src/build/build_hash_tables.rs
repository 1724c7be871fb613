//! Hash tables of load balancers that are not built with their endpoint sets, but in steps of their
//! own: a tenant chooses their sizes, and how often its endpoints change. Until a table is built, the
//! set has the one before, without the endpoints that are gone, or the default load balancer. Start
//! with [`SnapshotBuilder::next_hash_table`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use canal_model::ids::{ServiceKey, TenantName};
use canal_model::load_balancing::{ConsistentHash, LoadBalancer};
use canal_model::program::Labels;

use super::SnapshotBuilder;
use crate::load_balancing::{AddressTable, LoadBalancing, has_table};
use crate::{EndpointSet, EndpointSetId};

/// The endpoint sets whose hash tables must be built.
#[derive(Debug)]
pub(super) struct PendingHashTables {
    /// Entries of tables that may still be built with their sets, in the present change.
    pub(super) entries_left: usize,
    /// Sets by tenant, so that each tenant has its turn.
    pending: BTreeMap<TenantName, BTreeMap<EndpointSetId, HashedSet>>,
    /// The tenant that had the last turn.
    last: Option<TenantName>,
}

/// A set of endpoints that has a hash table.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HashedSet {
    service: ServiceKey,
    port: u16,
    subset: Labels,
}

impl Default for PendingHashTables {
    fn default() -> Self {
        Self {
            entries_left: usize::MAX,
            pending: BTreeMap::new(),
            last: None,
        }
    }
}

impl PendingHashTables {
    pub(super) fn add(
        &mut self,
        id: EndpointSetId,
        service: &ServiceKey,
        port: u16,
        subset: &Labels,
    ) {
        let set = HashedSet {
            service: service.clone(),
            port,
            subset: subset.clone(),
        };
        let of_tenant = self.pending.entry(service.tenant.clone()).or_default();
        of_tenant.insert(id, set);
    }

    /// Forgets a set that was freed.
    pub(super) fn forget(&mut self, id: EndpointSetId, tenant: &TenantName) {
        if let Some(of_tenant) = self.pending.get_mut(tenant) {
            of_tenant.remove(&id);
            if of_tenant.is_empty() {
                self.pending.remove(tenant);
            }
        }
    }

    /// Takes a set of the tenant whose turn is next.
    fn take(&mut self) -> Option<(EndpointSetId, HashedSet)> {
        let after = |last: &TenantName| self.pending.keys().find(|tenant| *tenant > last);
        let next = self.last.as_ref().and_then(after);
        let tenant = next.or_else(|| self.pending.keys().next())?.clone();
        let of_tenant = self.pending.get_mut(&tenant)?;
        let taken = of_tenant.pop_first();
        if of_tenant.is_empty() {
            self.pending.remove(&tenant);
        }
        self.last = Some(tenant);
        taken
    }
}

/// A hash table that is to be built. It needs no access to the builder.
#[derive(Debug)]
pub(crate) struct HashTableJob {
    id: EndpointSetId,
    set: HashedSet,
    hash: ConsistentHash,
    addresses: Box<[SocketAddr]>,
}

/// A hash table that was built for an endpoint set.
#[derive(Debug)]
pub(crate) struct FinishedHashTable {
    id: EndpointSetId,
    set: HashedSet,
    hash: ConsistentHash,
    table: Option<AddressTable>,
}

impl HashTableJob {
    pub(crate) fn tenant(&self) -> &TenantName {
        &self.set.service.tenant
    }

    pub(crate) fn run(self) -> FinishedHashTable {
        FinishedHashTable {
            table: AddressTable::build(self.hash.table, self.addresses),
            id: self.id,
            set: self.set,
            hash: self.hash,
        }
    }
}

impl SnapshotBuilder {
    /// Sets how many entries of hash tables the next change may build with its endpoint sets.
    pub(crate) fn limit_hash_entries(&mut self, entries_max: usize) {
        self.hash_tables.entries_left = entries_max;
    }

    /// Returns the next hash table that must be built. Each tenant has its turn.
    pub(crate) fn next_hash_table(&mut self) -> Option<HashTableJob> {
        while let Some((id, set)) = self.hash_tables.take() {
            if let Some((current, hash)) = self.hashed_set(id, &set)
                && has_table(&current.endpoints)
                && !current
                    .load_balancing
                    .is_built_of(&hash, &current.endpoints)
            {
                let addresses = current.endpoints.iter().map(|it| it.address).collect();
                return Some(HashTableJob {
                    id,
                    set,
                    hash,
                    addresses,
                });
            }
        }
        None
    }

    /// Gives an endpoint set the hash table that was built for it.
    pub(crate) fn put_hash_table(&mut self, built: FinishedHashTable) {
        let FinishedHashTable {
            id,
            set,
            hash,
            table,
        } = built;
        // The set may be gone by now, or have another load balancer. No table is built of more
        // endpoints than fit into one.
        let current = self.hashed_set(id, &set);
        let current =
            current.filter(|(current, now)| *now == hash && has_table(&current.endpoints));
        let (Some((current, _)), Some(table)) = (current, table) else {
            return;
        };
        // A change may have built the table of the present endpoints within its limit meanwhile.
        if current
            .load_balancing
            .is_built_of(&hash, &current.endpoints)
        {
            return;
        }
        let load_balancing = LoadBalancing::of_table(hash.clone(), table, &current.endpoints);
        // Endpoints may have changed while the table was built. It is nearer to them than the one
        // before; otherwise endpoints that always change would never have another.
        if !load_balancing.is_built_of(&hash, &current.endpoints) {
            self.hash_tables
                .add(id, &set.service, set.port, &set.subset);
        }
        self.last_id += 1;
        let next = EndpointSet {
            // Workers recognize the set with the new table by this ID.
            id: self.last_id,
            service: current.service.clone(),
            port: current.port,
            protocol: current.protocol,
            pool: current.pool,
            policy_paths: current.policy_paths,
            exists: current.exists,
            filters: current.filters,
            load_balancing,
            endpoints: current.endpoints.clone(),
        };
        self.snapshot.sets.replace(id, Arc::new(next));
    }

    /// Returns a set with what it hashes, if it still exists and hashes.
    fn hashed_set(
        &self,
        id: EndpointSetId,
        set: &HashedSet,
    ) -> Option<(Arc<EndpointSet>, ConsistentHash)> {
        let state = self.services.get(&set.service)?;
        let known = state.sets.get(set.port, &set.subset)?;
        match state.load_balancer(set.port, &set.subset) {
            LoadBalancer::ConsistentHash(hash) if known == id => {
                Some((self.snapshot.sets.get(id)?.clone(), *hash))
            }
            _ => None,
        }
    }
}
