//! [`RedirectorReconciler`] owns the entries of the redirector's maps: it adopts those of an
//! earlier process, and writes the differences to the desired content.
//!
//! [`crate::desired_maps`] decides the desired content.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::Ipv4Addr;
use std::sync::Arc;

use canal_model::program::{BucketTable, Resource};
use canal_offload::reconcile::{ReconcilerPass, reconcile};

use crate::counts::RedirectorCounters;
use crate::desired_maps::{
    HeldEntries, RedirectorMapContent, RedirectorReplica, ThrottleRates, ThrottleScope, table,
};
use crate::receive::Receive;

/// The kernel's maps, or a fake of them in tests. `None` removes an entry; removing an absent entry
/// succeeds. Each write is atomic: a packet meets the old element or the new one.
///
/// # Errors
/// Each method returns the kernel's refusal as text.
pub trait RedirectorMaps: Send + 'static {
    fn put_table(&mut self, service: u32, table: Option<&BucketTable>) -> Result<(), String>;
    fn put_replica(&mut self, number: u16, slot: Option<RedirectorReplica>) -> Result<(), String>;
    fn put_host(&mut self, host: Ipv4Addr, number: Option<u16>) -> Result<(), String>;
    fn put_throttle(
        &mut self,
        scope: ThrottleScope,
        rates: Option<ThrottleRates>,
    ) -> Result<(), String>;
    /// Sets this replica's number and its AZ's edge.
    fn set_self(&mut self, number: u16, edge: Option<Ipv4Addr>) -> Result<(), String>;
    /// Returns the entries that an earlier process left.
    fn leftover_entries(&mut self) -> Result<LeftoverEntries, String>;
    /// Returns the programs' counters by program and name, since the maps were created.
    fn counts(&mut self) -> Result<Vec<(&'static str, &'static str, u64)>, String>;
    /// Checks that the programs are attached, and attaches them again if not. Returns whether it
    /// had to.
    fn repair(&mut self) -> Result<bool, String>;
    /// Delivers sessions to service addresses to the gateway's sockets from now on.
    fn start_steering(&mut self) -> Result<(), String>;
    /// Returns the cores on which packets are received, and the tunnels from `edge` that spread
    /// evenly over them.
    fn receive(&mut self, edge: Ipv4Addr) -> Result<Receive, String>;
    /// Returns the packets that each core received, by its number, since the maps were created.
    fn received_by_core(&mut self) -> Result<Vec<u64>, String>;
    /// Releases the gateway's sockets, so that they can close.
    fn stop_steering(&mut self);
}

/// Keys of the entries in the maps.
#[derive(Debug, Clone, Default)]
pub struct LeftoverEntries {
    pub tables: HashSet<u32>,
    /// Versions of the tables by service ID.
    pub versions: HashMap<u32, u32>,
    pub replicas: HashSet<u16>,
    pub hosts: HashSet<Ipv4Addr>,
    pub throttles: HashSet<ThrottleScope>,
}

/// Owner of the maps' entries, which writes the differences.
pub struct RedirectorReconciler {
    kernel: Box<dyn RedirectorMaps>,
    actual: RedirectorMapContent,
    /// Entries of an earlier process that this one has neither written nor removed.
    leftovers: LeftoverEntries,
    counts: RedirectorCounters,
}

impl RedirectorReconciler {
    /// Adopts the entries in the maps. They stay until the first state is applied.
    ///
    /// # Errors
    /// The entries cannot be read.
    pub fn adopt(
        mut kernel: Box<dyn RedirectorMaps>,
        counts: RedirectorCounters,
    ) -> Result<Self, String> {
        let found = kernel.leftover_entries()?;
        Ok(Self {
            kernel,
            actual: RedirectorMapContent::default(),
            leftovers: found,
            counts,
        })
    }

    /// Returns the content that this process has written.
    pub fn have(&self) -> &RedirectorMapContent {
        &self.actual
    }

    pub(crate) fn kernel(&mut self) -> &mut dyn RedirectorMaps {
        &mut *self.kernel
    }

    /// Writes the differences: new elements before old ones are removed, and elements to which
    /// tables refer before the tables. Returns the number of elements that could not be written;
    /// the next call tries them again.
    ///
    /// A state that is not `live` comes from disk, and may be older than what an earlier process
    /// left in the maps: newer tables there stay, and nothing is removed.
    pub fn reconcile(&mut self, wanted: &RedirectorMapContent, live: bool) -> usize {
        for entry in wanted.omitted.difference(&self.actual.omitted) {
            self.counts.omitted(entry.map, entry.tenant.as_str());
            tracing::warn!(map = entry.map, tenant = %entry.tenant, name = entry.name, why = entry.why, "redirector: left out an entry of a map");
        }
        self.actual.omitted.clone_from(&wanted.omitted);
        let pass = reconcile(|pass| {
            self.put_missing(pass, wanted, live);
            // Only a state from the controller may remove entries.
            if live {
                self.remove_stale(pass, wanted);
            }
        });
        for failure in pass.failures() {
            self.counts.write_failed(failure.map);
            tracing::error!(
                map = failure.map,
                key = failure.key,
                error = failure.error,
                "redirector: map write failed; retrying within a second"
            );
        }
        self.counts.map_writes(pass.writes());
        self.counts.entries(&self.actual);
        self.counts.pending_entries(pass.failures().len());
        pass.failures().len()
    }

    /// Puts new and changed entries, those to which tables refer before the tables.
    fn put_missing(
        &mut self,
        pass: &mut ReconcilerPass<String>,
        wanted: &RedirectorMapContent,
        live: bool,
    ) {
        let Self {
            kernel,
            actual: have,
            leftovers,
            ..
        } = self;
        let RedirectorMapContent {
            tables,
            replicas,
            hosts,
            throttles,
            own,
            ..
        } = wanted;
        pass.put_missing("canal_replicas", replicas, &mut have.replicas, |k, v| {
            kernel.put_replica(*k, Some(*v))
        });
        // A write that fails is tried again, because `have` still differs then.
        if let Some((number, edge)) = *own
            && have.own != *own
            && pass.record("canal_self", &number, kernel.set_self(number, edge))
        {
            have.own = *own;
        }
        pass.put_missing("canal_hosts", hosts, &mut have.hosts, |k, v| {
            kernel.put_host(*k, Some(*v))
        });
        pass.put_missing("canal_throttles", throttles, &mut have.throttles, |k, v| {
            kernel.put_throttle(*k, Some(*v))
        });
        // Before it is live, a table of an earlier process may be newer than the state file that
        // this process started with.
        let newer = |id: &u32, r: &Arc<Resource>| {
            // An entry without a leftover compares as `None`, which is less than every version.
            !live && leftovers.versions.get(id).copied() > table(r).map(|t| t.version)
        };
        let fitting: BTreeMap<u32, Arc<Resource>> = tables
            .iter()
            .filter(|(k, v)| !newer(k, v))
            .map(|(k, v)| (*k, v.clone()))
            .collect();
        pass.put_missing("canal_tables", &fitting, &mut have.tables, |k, v| {
            kernel.put_table(*k, table(v))
        });
        // An entry that this process has written is no leftover of the earlier process any more.
        leftovers
            .replicas
            .retain(|k| !have.replicas.contains_key(k));
        leftovers.hosts.retain(|k| !have.hosts.contains_key(k));
        leftovers
            .throttles
            .retain(|k| !have.throttles.contains_key(k));
        leftovers.tables.retain(|k| !have.tables.contains_key(k));
    }

    /// Removes entries that are no longer desired, including those of an earlier process; tables
    /// before the replicas that they refer to.
    fn remove_stale(&mut self, pass: &mut ReconcilerPass<String>, wanted: &RedirectorMapContent) {
        let Self {
            kernel,
            actual: have,
            leftovers,
            ..
        } = self;
        let RedirectorMapContent {
            tables,
            replicas,
            hosts,
            throttles,
            own,
            ..
        } = wanted;
        pass.remove_stale("canal_tables", tables, &mut have.tables, |k| {
            kernel.put_table(*k, None)
        });
        pass.remove_leftovers("canal_tables", tables, &mut leftovers.tables, |k| {
            kernel.put_table(*k, None)
        });
        pass.remove_stale("canal_throttles", throttles, &mut have.throttles, |k| {
            kernel.put_throttle(*k, None)
        });
        pass.remove_leftovers(
            "canal_throttles",
            throttles,
            &mut leftovers.throttles,
            |k| kernel.put_throttle(*k, None),
        );
        // Without orders it is unknown which hosts are stale.
        if own.is_some() {
            pass.remove_stale("canal_hosts", hosts, &mut have.hosts, |k| {
                kernel.put_host(*k, None)
            });
            pass.remove_leftovers("canal_hosts", hosts, &mut leftovers.hosts, |k| {
                kernel.put_host(*k, None)
            });
        }
        pass.remove_stale("canal_replicas", replicas, &mut have.replicas, |k| {
            kernel.put_replica(*k, None)
        });
        pass.remove_leftovers("canal_replicas", replicas, &mut leftovers.replicas, |k| {
            kernel.put_replica(*k, None)
        });
    }
}

impl HeldEntries for RedirectorReconciler {
    fn has_table(&self, service: u32) -> bool {
        self.actual.tables.contains_key(&service) || self.leftovers.tables.contains(&service)
    }

    fn has_throttle(&self, scope: ThrottleScope) -> bool {
        self.actual.throttles.contains_key(&scope) || self.leftovers.throttles.contains(&scope)
    }
}

#[cfg(test)]
pub(crate) mod tests;
