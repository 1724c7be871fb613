//! Owns what the maps hold: takes what the controller said and what probes found, and writes the difference to the kernel. What
//! should be there is decided in [`crate::maps`], in which order in [`crate::steps`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use canal_model::ids::{AzName, ReplicaName};
use canal_model::program::Kind;

use crate::counts::Counts;
use crate::maps::{Content, LeftOut, Maps, Room, Told, decide_maps};
use crate::steps::{Step, decide_steps, take};

/// Entries left out that one update logs by name; a tenant may have thousands.
const LOGGED_MAX: usize = 16;

/// The kernel's maps, or in tests something that behaves like them.
pub trait Tables: Send {
    /// Puts or removes one element.
    fn write(&mut self, step: &Step) -> Result<(), String>;
    /// Everything that is in the maps now.
    fn read(&mut self) -> Result<Content, String>;
}

/// A replica to probe.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    pub name: ReplicaName,
    pub address: Ipv4Addr,
}

/// How the maps stand, for operators.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Standing {
    /// Elements that the kernel lacks or has too many, after the last write.
    pub behind: usize,
    /// A whole state was taken.
    pub told: bool,
}

/// The owner.
pub struct Keeper<T> {
    tables: T,
    az: AzName,
    address: Ipv4Addr,
    room: Room,
    told: Told,
    maps: Maps,
    /// What is in the kernel.
    have: Content,
    /// What this edge found of the replicas of its AZ; others, and those not looked at yet, are as the controller says.
    found: BTreeMap<Target, bool>,
    counts: Counts,
    standing: Standing,
}

impl<T: Tables> Keeper<T> {
    /// Adopts what is in the maps. It stays there until the first state is told.
    pub fn adopt(mut tables: T, az: AzName, address: Ipv4Addr, room: Room, counts: Counts) -> Result<Self, String> {
        let have = tables.read()?;
        counts.room(&room);
        counts.entries(&have);
        let (told, maps) = (Told::default(), Maps::default());
        Ok(Self { tables, az, address, room, told, maps, have, found: BTreeMap::new(), counts, standing: Standing::default() })
    }

    /// Takes a whole state, as far as it fits: what is beyond a tenant's share is left out by name, and nothing of another's. Gives the
    /// resources that are refused so: kind, name and why.
    pub fn tell(&mut self, resources: Vec<std::sync::Arc<canal_model::program::Resource>>) -> Vec<(Kind, String, String)> {
        self.counts.set_shares(&resources);
        let told = Told { resources, hosts: self.told.hosts.clone() };
        let maps = decide_maps(&told, &self.az, self.address, &self.room, &self.maps, &self.have);
        self.standing.told = true;
        self.told = told;
        self.change_to(maps);
        self.maps.refused().collect()
    }

    /// Takes the controller's list of the tier's hosts.
    pub fn tell_hosts(&mut self, hosts: BTreeSet<Ipv4Addr>) {
        if self.told.hosts == hosts || !self.standing.told {
            // Before a first state there is nothing to decide by; the next report brings them again.
            return;
        }
        self.told.hosts = hosts;
        let maps = decide_maps(&self.told, &self.az, self.address, &self.room, &self.maps, &self.have);
        self.change_to(maps);
    }

    fn change_to(&mut self, mut maps: Maps) {
        self.show_left_out(&maps);
        let mut found = BTreeMap::new();
        for (number, member) in maps.members.iter().filter(|(_, m)| m.own) {
            let target = Target { name: member.name.clone(), address: member.address };
            // An earlier run's finding is newer than the controller's.
            let in_kernel = self.have.replicas.get(number).filter(|s| s.address == member.address).map(|s| s.up);
            let up = self.found.get(&target).copied().or(in_kernel).unwrap_or(member.up);
            found.insert(target, up);
            if let Some(slot) = maps.content.replicas.get_mut(number) {
                slot.up = up;
            }
        }
        self.found = found;
        self.counts.left_out(&maps.left_out);
        self.maps = maps;
        self.reconcile();
    }

    /// Counts what is newly left out, all of it, and logs it, some of it.
    fn show_left_out(&self, maps: &Maps) {
        let fresh: Vec<&LeftOut> = maps.left_out.difference(&self.maps.left_out).collect();
        for left_out in fresh.iter().filter(|left_out| left_out.is_refused()) {
            self.counts.refused(left_out.map, left_out.tenant.as_ref());
        }
        for left_out in fresh.iter().take(LOGGED_MAX) {
            tracing::warn!(map = left_out.map, reason = left_out.reason.name(), "edge: entry left out of a map, {left_out}");
        }
        if fresh.len() > LOGGED_MAX {
            tracing::warn!(entries = fresh.len() - LOGGED_MAX, "edge: more entries left out of maps; /config_dump names them");
        }
    }

    /// Writes what differs. What fails is tried once more at the end, when removals have made room, and again at each [`Keeper::audit`].
    fn reconcile(&mut self) {
        let mut failed = Vec::new();
        for _ in 0..2 {
            failed.clear();
            for step in decide_steps(&self.have, &self.maps.content) {
                match self.tables.write(&step) {
                    Ok(()) => take(&mut self.have, &step),
                    Err(error) => failed.push((step.map(), error)),
                }
            }
            if failed.is_empty() {
                break;
            }
        }
        for (map, error) in &failed {
            self.counts.write_failed(map);
            tracing::error!(map, error, "a map could not be written; tried again within seconds");
        }
        self.standing.behind = failed.len();
        self.counts.behind(failed.len());
        self.counts.entries(&self.have);
    }

    /// Takes a probe's finding; true if it is news, which then is in the kernel already.
    pub fn found(&mut self, target: &Target, up: bool) -> bool {
        match self.found.get_mut(target) {
            Some(known) if *known != up => *known = up,
            // No change, or a replica that has left meanwhile.
            _ => return false,
        }
        let of_it = self.maps.members.iter().find(|(_, m)| m.own && m.name == target.name && m.address == target.address);
        if let Some((number, _)) = of_it
            && let Some(slot) = self.maps.content.replicas.get_mut(number)
        {
            slot.up = up;
            let (number, slot) = (*number, *slot);
            let step = Step::Replica(number, Some(slot));
            match self.tables.write(&step) {
                Ok(()) => take(&mut self.have, &step),
                Err(error) => {
                    self.counts.write_failed(step.map());
                    tracing::error!(replica = %target.name, error, "a replica's state could not be written; tried again within seconds");
                }
            }
        }
        true
    }

    /// Compares the kernel's maps with what was written, and mends them: how many elements somebody else had changed.
    pub fn audit(&mut self) -> Result<usize, String> {
        let real = self.tables.read()?;
        let strange = decide_steps(&real, &self.have).len();
        self.have = real;
        if self.standing.told {
            self.reconcile();
        }
        Ok(strange)
    }

    /// The replicas to probe, with what they are held for.
    pub fn targets(&self) -> &BTreeMap<Target, bool> {
        &self.found
    }

    /// How it stands.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// What is in the kernel.
    pub fn content(&self) -> &Content {
        &self.have
    }

    /// What was decided.
    pub fn maps(&self) -> &Maps {
        &self.maps
    }

    /// The kernel's side.
    pub fn tables(&mut self) -> &mut T {
        &mut self.tables
    }
}

#[cfg(test)]
mod tests;
