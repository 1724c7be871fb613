//! Owns what the redirector's maps hold: adopts what an earlier process left, and writes what differs from what they should hold. What
//! that is, [`crate::content`] decides.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Debug;
use std::hash::Hash;
use std::net::Ipv4Addr;
use std::sync::Arc;

use canal_model::program::{BucketTable, Resource};

use crate::content::{Content, HeldEntries, Rates, Scope, Slot, table};
use crate::counts::Counts;

/// The kernel's maps, or in tests something that behaves like them. `None` removes; what is not there is removed already. Each write is
/// atomic: packets see the old element or the new one.
pub trait Kernel: Send + 'static {
    fn put_table(&mut self, service: u32, table: Option<&BucketTable>) -> Result<(), String>;
    fn put_replica(&mut self, number: u16, slot: Option<Slot>) -> Result<(), String>;
    fn put_host(&mut self, host: Ipv4Addr, number: Option<u16>) -> Result<(), String>;
    fn put_throttle(&mut self, scope: Scope, rates: Option<Rates>) -> Result<(), String>;
    /// This replica's number and its AZ's edge.
    fn put_own(&mut self, number: u16, edge: Option<Ipv4Addr>) -> Result<(), String>;
    /// What an earlier process left.
    fn found(&mut self) -> Result<Found, String>;
    /// The programs' counters, by program and name, since the maps were made.
    fn counts(&mut self) -> Result<Vec<(&'static str, &'static str, u64)>, String>;
    /// Looks whether the programs are still where they were put, and puts them there again; true if it had to.
    fn repair(&mut self) -> Result<bool, String>;
    /// From now on sessions to service addresses come to the gateway's sockets.
    fn open_doors(&mut self) -> Result<(), String>;
    /// Lets the gateway's sockets go, so that they can close.
    fn forget_doors(&mut self);
}

/// Keys of what is in the maps.
#[derive(Debug, Clone, Default)]
pub struct Found {
    pub tables: HashSet<u32>,
    /// Of these tables.
    pub versions: HashMap<u32, u32>,
    pub replicas: HashSet<u16>,
    pub hosts: HashSet<Ipv4Addr>,
    pub throttles: HashSet<Scope>,
}

/// The owner.
pub struct Keeper {
    kernel: Box<dyn Kernel>,
    have: Content,
    /// Of an earlier process, and not yet written or removed by this one.
    found: Found,
    counts: Counts,
}

impl Keeper {
    /// Adopts what is in the maps. It stays there until the first state is told.
    pub fn adopt(mut kernel: Box<dyn Kernel>, counts: Counts) -> Result<Self, String> {
        let found = kernel.found()?;
        Ok(Self { kernel, have: Content::default(), found, counts })
    }

    /// What this process has written.
    pub fn have(&self) -> &Content {
        &self.have
    }

    pub(crate) fn kernel(&mut self) -> &mut dyn Kernel {
        &mut *self.kernel
    }

    /// Writes what differs: new elements before old ones go, and what tables name before the tables. Gives the number of elements that
    /// could not be written; they are tried again at the next call.
    ///
    /// What is not `live` comes from disk, and may be older than what an earlier process left in the maps: newer tables there stay, and
    /// nothing is removed.
    pub fn reconcile(&mut self, wanted: &Content, live: bool) -> usize {
        let Self { kernel, have, found, counts } = self;
        let mut pass = Pass { counts, failed: 0 };
        let Content { tables, replicas, hosts, throttles, own, omitted } = wanted;
        pass.add("canal_replicas", replicas, &mut have.replicas, &mut found.replicas, PartialEq::eq, |k, v| {
            kernel.put_replica(*k, Some(*v))
        });
        if let Some((number, edge)) = *own
            && have.own != *own
            && pass.check("canal_self", &number, kernel.put_own(number, edge))
        {
            have.own = *own;
        }
        pass.add("canal_hosts", hosts, &mut have.hosts, &mut found.hosts, PartialEq::eq, |k, v| kernel.put_host(*k, Some(*v)));
        let put = |k: &Scope, v: &Rates| kernel.put_throttle(*k, Some(*v));
        pass.add("canal_throttles", throttles, &mut have.throttles, &mut found.throttles, PartialEq::eq, put);
        let newer = |id: &u32, r: &Arc<Resource>| !live && found.versions.get(id).copied() > table(r).map(|t| t.version);
        let fitting: BTreeMap<u32, Arc<Resource>> = tables.iter().filter(|(k, v)| !newer(k, v)).map(|(k, v)| (*k, v.clone())).collect();
        pass.add("canal_tables", &fitting, &mut have.tables, &mut found.tables, same, |k, v| kernel.put_table(*k, table(v)));
        for entry in omitted.difference(&have.omitted) {
            counts.omitted(entry.map, entry.tenant.as_str());
            tracing::warn!(map = entry.map, tenant = %entry.tenant, name = entry.name, why = entry.why, "redirector: entry left out of a map");
        }
        have.omitted.clone_from(omitted);
        if !live {
            return pass.done(have);
        }
        pass.remove("canal_tables", tables, &mut have.tables, &mut found.tables, |k| kernel.put_table(*k, None));
        pass.remove("canal_throttles", throttles, &mut have.throttles, &mut found.throttles, |k| kernel.put_throttle(*k, None));
        // Without orders nobody has said which hosts are stale.
        if own.is_some() {
            pass.remove("canal_hosts", hosts, &mut have.hosts, &mut found.hosts, |k| kernel.put_host(*k, None));
        }
        pass.remove("canal_replicas", replicas, &mut have.replicas, &mut found.replicas, |k| kernel.put_replica(*k, None));
        pass.done(have)
    }
}

impl HeldEntries for Keeper {
    fn has_table(&self, service: u32) -> bool {
        self.have.tables.contains_key(&service) || self.found.tables.contains(&service)
    }

    fn has_throttle(&self, scope: Scope) -> bool {
        self.have.throttles.contains_key(&scope) || self.found.throttles.contains(&scope)
    }
}

/// One pass over all maps.
struct Pass<'a> {
    counts: &'a Counts,
    failed: usize,
}

impl Pass<'_> {
    fn done(self, have: &Content) -> usize {
        self.counts.entries(have);
        self.counts.behind(self.failed);
        self.failed
    }

    fn check(&mut self, map: &'static str, key: &dyn Debug, done: Result<(), String>) -> bool {
        let Err(error) = done else { return true };
        self.failed += 1;
        self.counts.write_failed(map);
        tracing::error!(map, ?key, error, "the redirector's map could not be written; tried again within a second");
        false
    }

    /// Puts what is new or different.
    fn add<K: Ord + Hash + Copy + Debug, V: Clone>(
        &mut self,
        map: &'static str,
        wanted: &BTreeMap<K, V>,
        have: &mut BTreeMap<K, V>,
        found: &mut HashSet<K>,
        same: impl Fn(&V, &V) -> bool,
        mut put: impl FnMut(&K, &V) -> Result<(), String>,
    ) {
        for (key, value) in wanted {
            if !have.get(key).is_some_and(|held| same(held, value)) && self.check(map, key, put(key, value)) {
                have.insert(*key, value.clone());
                found.remove(key);
            }
        }
    }

    /// Removes what is no longer wanted, an earlier process's too.
    fn remove<K: Ord + Hash + Copy + Debug, V>(
        &mut self,
        map: &'static str,
        wanted: &BTreeMap<K, V>,
        have: &mut BTreeMap<K, V>,
        found: &mut HashSet<K>,
        mut put: impl FnMut(&K) -> Result<(), String>,
    ) {
        let stale: BTreeSet<K> = have.keys().chain(&*found).filter(|k| !wanted.contains_key(k)).copied().collect();
        for key in stale {
            if self.check(map, &key, put(&key)) {
                have.remove(&key);
                found.remove(&key);
            }
        }
    }
}

/// The pointer first: most are what they were.
fn same(a: &Arc<Resource>, b: &Arc<Resource>) -> bool {
    Arc::ptr_eq(a, b) || a == b
}

#[cfg(test)]
pub(crate) mod tests;
