//! Owns the content of the maps: it combines the controller's input with probe results and writes
//! the difference to the kernel.
//!
//! [`crate::desired_maps`] decides the desired content, [`crate::map_writes`] the order of the
//! writes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use canal_model::ids::{AzName, ReplicaName};
use canal_model::program::ResourceKind;
use canal_offload::reconcile::{ReconcilerPass, reconcile};

use crate::counts::EdgeCounters;
use crate::desired_maps::{
    ControllerInput, DesiredMaps, EdgeMapContent, MapCapacity, OmittedEntry, Tunnels, decide_maps,
};
use crate::map_writes::{MapWrite, count_differences, write_differences};

/// Omitted entries that one update logs by name; a tenant may have thousands. The last line of the
/// update has the number of the others. Sixteen lines show whose entries they are, and do not flood
/// the log.
const LOGGED_MAX: usize = 16;

/// The kernel's maps, or a fake in tests.
pub trait MapStore: Send {
    /// Puts or removes one element.
    ///
    /// # Errors
    /// Returns the reason if the kernel refuses the write.
    fn write(&mut self, step: &MapWrite) -> Result<(), String>;
    /// Returns the present content of the maps.
    ///
    /// # Errors
    /// Returns the reason if a map cannot be read.
    fn read(&mut self) -> Result<EdgeMapContent, String>;
}

/// A replica that the edge probes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProbeTarget {
    pub name: ReplicaName,
    pub address: Ipv4Addr,
}

/// State of the maps, for operators.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MapStatus {
    /// Elements that the kernel lacks or should not have, after the last write.
    pub pending_entries: usize,
    /// A complete state has arrived.
    pub has_state: bool,
}

/// Reconciles the maps with their desired content.
pub struct MapReconciler<T> {
    tables: T,
    az: AzName,
    address: Ipv4Addr,
    capacity: MapCapacity,
    input: ControllerInput,
    maps: DesiredMaps,
    /// The content of the kernel's maps.
    actual: EdgeMapContent,
    /// Probe results of the replicas in this edge's AZ. Other replicas, and those not probed yet,
    /// have the state that the controller reports.
    probe_results: BTreeMap<ProbeTarget, bool>,
    counts: EdgeCounters,
    status: MapStatus,
}

impl<T: MapStore> MapReconciler<T> {
    /// Adopts the present content of the maps. It stays there until the first state arrives.
    ///
    /// # Errors
    /// Returns the reason if a map cannot be read.
    pub fn adopt(
        mut tables: T,
        az: AzName,
        address: Ipv4Addr,
        capacity: MapCapacity,
        counts: EdgeCounters,
    ) -> Result<Self, String> {
        let have = tables.read()?;
        counts.map_capacity(&capacity);
        counts.entries(&have);
        let (input, maps) = (ControllerInput::default(), DesiredMaps::default());
        Ok(Self {
            tables,
            az,
            address,
            capacity,
            input,
            maps,
            actual: have,
            probe_results: BTreeMap::new(),
            counts,
            status: MapStatus::default(),
        })
    }

    /// Applies a complete state as far as it fits. Entries beyond a tenant's share are omitted by
    /// name, and other tenants' entries are not affected. Returns the refused resources: kind, name
    /// and reason.
    pub fn set_input(
        &mut self,
        resources: Vec<std::sync::Arc<canal_model::program::Resource>>,
    ) -> Vec<(ResourceKind, String, String)> {
        self.counts.set_shares(&resources);
        let input = ControllerInput {
            resources,
            hosts: self.input.hosts.clone(),
            tunnels: self.input.tunnels.clone(),
        };
        let maps = decide_maps(
            &input,
            &self.az,
            self.address,
            &self.capacity,
            &self.maps,
            &self.actual,
        );
        self.status.has_state = true;
        self.input = input;
        self.change_to(maps);
        self.maps.refused().collect()
    }

    /// Applies the controller's list of the tier's hosts.
    pub fn set_hosts(&mut self, hosts: BTreeSet<Ipv4Addr>) {
        if self.input.hosts == hosts || !self.status.has_state {
            // Before the first state there is nothing to decide by; the next report brings the
            // hosts again.
            return;
        }
        self.input.hosts = hosts;
        let maps = decide_maps(
            &self.input,
            &self.az,
            self.address,
            &self.capacity,
            &self.maps,
            &self.actual,
        );
        self.change_to(maps);
    }

    /// Applies the source ports of tunnels to this AZ's replicas.
    pub fn set_tunnels(&mut self, tunnels: Tunnels) {
        if self.input.tunnels.as_ref() == Some(&tunnels) {
            return;
        }
        self.input.tunnels = Some(tunnels);
        if self.status.has_state {
            let maps = decide_maps(
                &self.input,
                &self.az,
                self.address,
                &self.capacity,
                &self.maps,
                &self.actual,
            );
            self.change_to(maps);
        }
    }

    fn change_to(&mut self, mut maps: DesiredMaps) {
        self.show_left_out(&maps);
        let mut found = BTreeMap::new();
        for (number, member) in maps.members.iter().filter(|(_, m)| m.own) {
            let target = ProbeTarget {
                name: member.name.clone(),
                address: member.address,
            };
            // What an earlier agent found is more recent than the controller's information.
            let in_kernel = self
                .actual
                .replicas
                .get(number)
                .filter(|s| s.address == member.address)
                .map(|s| s.up);
            let up = self
                .probe_results
                .get(&target)
                .copied()
                .or(in_kernel)
                .unwrap_or(member.up);
            found.insert(target, up);
            if let Some(slot) = maps.content.replicas.get_mut(number) {
                slot.up = up;
            }
        }
        self.probe_results = found;
        self.counts.left_out(&maps.left_out);
        self.maps = maps;
        self.reconcile();
    }

    /// Counts all newly omitted entries and logs some of them.
    fn show_left_out(&self, maps: &DesiredMaps) {
        let fresh: Vec<&OmittedEntry> = maps.left_out.difference(&self.maps.left_out).collect();
        for left_out in fresh.iter().filter(|left_out| left_out.is_refused()) {
            self.counts.refused(left_out.map, left_out.tenant.as_ref());
        }
        for left_out in fresh.iter().take(LOGGED_MAX) {
            tracing::warn!(
                map = left_out.map,
                reason = left_out.reason.name(),
                "edge: left out an entry of a map, {left_out}"
            );
        }
        if fresh.len() > LOGGED_MAX {
            tracing::warn!(
                entries = fresh.len() - LOGGED_MAX,
                "edge: left out more entries of maps; /config_dump names them"
            );
        }
    }

    /// Writes the differences. Failed writes are tried once more at the end, when removals have
    /// freed space, and again at each [`MapReconciler::audit`].
    fn reconcile(&mut self) {
        let Self {
            tables,
            actual,
            maps,
            ..
        } = self;
        let pass = reconcile(|pass| {
            write_differences(pass, &maps.content, actual, &mut |write| {
                tables.write(&write)
            })
        });
        self.show_pass(&pass);
        self.status.pending_entries = pass.failures().len();
        self.counts.pending_entries(pass.failures().len());
        self.counts.entries(&self.actual);
    }

    /// Counts the writes of a pass, and logs its failures.
    fn show_pass(&self, pass: &ReconcilerPass<String>) {
        self.counts.map_writes(pass.writes());
        for failure in pass.failures() {
            self.counts.write_failed(failure.map);
            tracing::error!(
                map = failure.map,
                key = failure.key,
                error = failure.error,
                "edge: map write failed; retrying within seconds"
            );
        }
    }

    /// Records a probe result. Returns true if the replica's state changed; the kernel's map is
    /// then already updated.
    pub fn record_probe_result(&mut self, target: &ProbeTarget, up: bool) -> bool {
        match self.probe_results.get_mut(target) {
            Some(known) if *known != up => *known = up,
            // The state did not change, or the replica has left meanwhile.
            _ => return false,
        }
        let of_it = self
            .maps
            .members
            .iter()
            .find(|(_, m)| m.own && m.name == target.name && m.address == target.address);
        if let Some((number, _)) = of_it
            && let Some(slot) = self.maps.content.replicas.get_mut(number)
        {
            slot.up = up;
            let (number, slot) = (*number, *slot);
            let mut pass = ReconcilerPass::stopping_at_failure();
            let tables = &mut self.tables;
            // Only this replica: the whole content is written where the controller's input changes,
            // and by the audit.
            pass.put_missing(
                "canal_replicas",
                &BTreeMap::from([(number, slot)]),
                &mut self.actual.replicas,
                |n, slot| tables.write(&MapWrite::Replica(*n, Some(*slot))),
            );
            self.show_pass(&pass);
        }
        true
    }

    /// Compares the kernel's maps with what was written and repairs them. Returns the number of
    /// elements that were changed externally.
    ///
    /// # Errors
    /// Returns the reason if a map cannot be read.
    pub fn audit(&mut self) -> Result<usize, String> {
        let real = self.tables.read()?;
        let strange = count_differences(&real, &self.actual);
        self.actual = real;
        if self.status.has_state {
            self.reconcile();
        }
        Ok(strange)
    }

    /// Returns the replicas to probe, with their present state.
    pub fn targets(&self) -> &BTreeMap<ProbeTarget, bool> {
        &self.probe_results
    }

    /// Returns the state of the maps.
    pub fn status(&self) -> MapStatus {
        self.status
    }

    /// Returns the actual content of the kernel's maps.
    pub fn content(&self) -> &EdgeMapContent {
        &self.actual
    }

    /// Returns the desired content of the maps.
    pub fn maps(&self) -> &DesiredMaps {
        &self.maps
    }

    /// Returns the access to the kernel's maps.
    pub fn tables(&mut self) -> &mut T {
        &mut self.tables
    }
}

#[cfg(test)]
mod tests;
