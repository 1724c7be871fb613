//! Shuffle sharding (Canal §4.2): which backends each service lives on. It knows no replicas and no tables.
//!
//! The rules, in this order:
//! 1. A service has [`Rules::home`] backends in its home AZ and [`Rules::away`] elsewhere, or as many as there are.
//! 2. No service's backends are all among another's: whatever kills one service leaves every other one a backend.
//! 3. What was chosen stays, unless its backend is gone or a rule is broken; then one backend is exchanged, and all
//!    only where no single one helps.
//! 4. New choices are among the least loaded backends, within one service's weight; among those, pairs that few services share.
//! 5. Where backends or AZs are off the mean by more than a bound, few services at a time exchange one backend ([`balance`]).
//!
//! Load is the sum of the weights of a backend's services: each must be able to carry its services alone.

use std::collections::BTreeMap;

use canal_model::fleet::{Demand, Demands, Fleet, Placement, Rules};
use canal_model::ids::{AzName, BackendName, ServiceId};
use canal_model::plan::Note;

use crate::mix::mix;
use crate::{Backends, Kept};

pub(crate) mod balance;
mod combine;
mod index;

use combine::{Pool, Search};
use index::{Index, Set};

/// Placements for all services that any backend can hold. `kept` are the last plan's. Nobody moves for balance's sake.
pub fn place(fleet: &Fleet, demands: &Demands, kept: &Kept, notes: &mut Vec<Note>) -> BTreeMap<ServiceId, Placement> {
    Shards::settled(fleet, demands, kept, notes).placements(notes)
}

/// A backend by its place in [`Shards::backends`].
type Slot = u16;

/// An AZ by its place in [`Shards::azs`].
type Zone = usize;

/// Services on backends, in the making.
pub(crate) struct Shards<'a> {
    demands: &'a Demands,
    azs: Vec<&'a AzName>,
    backends: Vec<(&'a BackendName, Zone)>,
    slots: BTreeMap<&'a BackendName, Slot>,
    /// Backends of each AZ.
    zones: Vec<Vec<Slot>>,
    load: Vec<u64>,
    /// The sum of its backends' loads.
    zone_load: Vec<u64>,
    index: Index,
    settled: BTreeMap<ServiceId, (Zone, Set)>,
    /// Home AZs in which a search among all backends found nothing; sets only ever become fewer.
    exhausted: Vec<bool>,
    want: (usize, usize),
}

impl<'a> Shards<'a> {
    fn new(fleet: &'a Fleet, demands: &'a Demands) -> Self {
        let mut azs: Vec<&AzName> = fleet.backends.values().collect();
        azs.sort_unstable();
        azs.dedup();
        // More than 2^16 backends have no slot: they hold nothing. Replica numbers end long before.
        let known = fleet.backends.iter().take(usize::from(Slot::MAX));
        let backends: Vec<(&BackendName, Zone)> = known.map(|(name, az)| (name, azs.partition_point(|other| *other < az))).collect();
        let mut zones = vec![Vec::new(); azs.len()];
        let mut slots = BTreeMap::new();
        for (slot, (name, zone)) in (0..).zip(&backends) {
            zones[*zone].push(slot);
            slots.insert(*name, slot);
        }
        let home = demands.rules.home.clamp(1, Rules::MOST);
        let want = (home, demands.rules.away.min(Rules::MOST - home));
        let (load, zone_load, exhausted) = (vec![0; backends.len()], vec![0; azs.len()], vec![false; azs.len()]);
        Shards { demands, azs, backends, slots, zones, load, zone_load, index: Index::default(), settled: BTreeMap::new(), exhausted, want }
    }

    /// By the rules 1 to 4.
    pub(crate) fn settled(fleet: &'a Fleet, demands: &'a Demands, kept: &Kept, notes: &mut Vec<Note>) -> Self {
        let mut shards = Shards::new(fleet, demands);
        let mut open = Vec::new();
        for (id, demand) in &demands.services {
            let Some(home) = kept.get(id).and_then(|kept| shards.kept_home(kept, demand)) else {
                open.push((*id, None));
                continue;
            };
            let set = shards.retained(kept[id], home);
            // Who lost a backend waits, lest its remainder drives somebody away who lost nothing.
            let is_whole = set.slots().count() == kept[id].all().count() && shards.lacks(&set, home) == (0, 0);
            if is_whole && shards.index.clash(&set).is_none() {
                shards.settle(*id, demand, home, set);
            } else {
                open.push((*id, Some((home, set))));
            }
        }
        for (id, before) in open {
            let demand = &demands.services[&id];
            let Some((home, set)) = before.or_else(|| shards.home(demand).map(|home| (home, Set::default()))) else {
                notes.push(Note::NoBackend { service: demand.key.clone() });
                continue;
            };
            let set = shards.choose(id, demand, home, set);
            shards.settle(id, demand, home, set);
        }
        shards
    }

    fn zone(&self, az: &AzName) -> Option<Zone> {
        self.azs.binary_search(&az).ok()
    }

    /// The home that a service keeps: what its tenant asks for, else the one it has, if any backend is there.
    fn kept_home(&self, kept: &Placement, demand: &Demand) -> Option<Zone> {
        let asked = demand.home.as_ref().and_then(|az| self.zone(az));
        asked.or_else(|| self.zone(&kept.home))
    }

    /// A first home: what the tenant asks for, else the AZ with the least load for each backend, among those with enough backends.
    fn home(&self, demand: &Demand) -> Option<Zone> {
        let asked = demand.home.as_ref().and_then(|az| self.zone(az));
        asked.or_else(|| {
            (0..self.azs.len()).min_by(|a, b| {
                let few = |zone: Zone| self.zones[zone].len() < self.want.0;
                let share = |zone: Zone, other: Zone| u128::from(self.zone_load[zone]) * self.zones[other].len() as u128;
                few(*a).cmp(&few(*b)).then(share(*a, *b).cmp(&share(*b, *a))).then(a.cmp(b))
            })
        })
    }

    /// What stays of a placement: backends that are still where they were, as many as the rules ask for, the least loaded first.
    fn retained(&self, kept: &Placement, home: Zone) -> Set {
        let mut there: Vec<Slot> = kept
            .backends
            .iter()
            .flat_map(|(az, names)| names.iter().map(move |name| (az, name)))
            .filter_map(|(az, name)| self.slots.get(name).copied().filter(|slot| self.azs[self.zone_of(*slot)] == az))
            .collect();
        there.sort_by_key(|slot| (self.load[usize::from(*slot)], *slot));
        let (mut home_left, mut away_left) = self.want;
        there.retain(|slot| {
            let left = if self.zone_of(*slot) == home { &mut home_left } else { &mut away_left };
            let stays = *left > 0;
            *left = left.saturating_sub(1);
            stays
        });
        Set::of(&there)
    }

    fn zone_of(&self, slot: Slot) -> Zone {
        self.backends[usize::from(slot)].1
    }

    /// How many backends are missing at home and away that the fleet has.
    fn lacks(&self, set: &Set, home: Zone) -> (usize, usize) {
        let at_home = set.slots().filter(|slot| self.zone_of(*slot) == home).count();
        let away = set.slots().count() - at_home;
        let there = self.zones[home].len();
        (self.want.0.min(there).saturating_sub(at_home), self.want.1.min(self.backends.len() - there).saturating_sub(away))
    }

    /// Fills up a set; exchanges one of its backends if it is not unique otherwise, or all.
    fn choose(&mut self, id: ServiceId, demand: &Demand, home: Zone, set: Set) -> Set {
        let search = |shards: &Self, fixed: &Set| shards.search(id, demand, home, fixed);
        if self.exhausted[home] {
            return self.fill(id, home, set);
        }
        if let Some(found) = search(self, &set) {
            return found;
        }
        // Backends elsewhere go first: sessions are at home.
        let mut exchanged: Vec<Slot> = set.slots().collect();
        exchanged.sort_by_key(|slot| (self.zone_of(*slot) == home, std::cmp::Reverse(self.load[usize::from(*slot)]), *slot));
        if let Some(found) = exchanged.iter().find_map(|slot| search(self, &set.without(*slot))) {
            return found;
        }
        // Moving all of it is dear, but a service that dies with another is what sharding is there to prevent.
        if let Some(found) = search(self, &Set::default()) {
            return found;
        }
        self.exhausted[home] = true;
        self.fill(id, home, set)
    }

    fn search(&self, id: ServiceId, demand: &Demand, home: Zone, fixed: &Set) -> Option<Set> {
        let lacks = self.lacks(fixed, home);
        let weight = u64::from(demand.weight.max(1));
        let pools = [self.pool(id, fixed, lacks.0, |zone| zone == home), self.pool(id, fixed, lacks.1, |zone| zone != home)];
        Search { index: &self.index, fixed, pools, weight, service: id }.best()
    }

    /// Backends to choose from, the least loaded first; ties are broken for each service in its own way.
    fn pool(&self, id: ServiceId, fixed: &Set, take: usize, zones: impl Fn(Zone) -> bool) -> Pool {
        let mut slots = Vec::new();
        if take > 0 {
            let others = (0..self.zones.len()).filter(|zone| zones(*zone)).flat_map(|zone| &self.zones[zone]);
            slots.extend(others.filter(|slot| !fixed.has(**slot)).map(|slot| {
                let tie = mix([id.get().into(), (*slot).into(), 0]);
                (self.load[usize::from(*slot)], tie, *slot)
            }));
            slots.sort_unstable();
        }
        Pool { slots: slots.into_iter().map(|(load, _, slot)| (load, slot)).collect(), take }
    }

    /// The least loaded backends, unique or not.
    fn fill(&self, id: ServiceId, home: Zone, set: Set) -> Set {
        let lacks = self.lacks(&set, home);
        let pools = [self.pool(id, &set, lacks.0, |zone| zone == home), self.pool(id, &set, lacks.1, |zone| zone != home)];
        pools.iter().flat_map(|pool| pool.slots.iter().take(pool.take)).fold(set, |set, (_, slot)| set.with(*slot))
    }

    fn settle(&mut self, id: ServiceId, demand: &Demand, home: Zone, set: Set) {
        let weight = u64::from(demand.weight.max(1));
        for slot in set.slots() {
            self.load[usize::from(slot)] += weight;
            let zone = self.zone_of(slot);
            self.zone_load[zone] += weight;
        }
        self.index.add(&set, id);
        self.settled.insert(id, (home, set));
    }

    /// Where a service lives now.
    fn placement(&self, id: ServiceId) -> Option<Placement> {
        let (home, set) = self.settled.get(&id)?;
        let mut backends: BTreeMap<AzName, Backends> = BTreeMap::new();
        for slot in set.slots() {
            let (name, zone) = self.backends[usize::from(slot)];
            backends.entry(self.azs[zone].clone()).or_default().insert(name.clone());
        }
        Some(Placement { home: self.azs[*home].clone(), backends })
    }

    /// All placements, and what they lack.
    pub(crate) fn placements(&self, notes: &mut Vec<Note>) -> BTreeMap<ServiceId, Placement> {
        let mut result = BTreeMap::new();
        // In order of IDs, so that of two that share the same one is named each time.
        let mut index = Index::default();
        for (id, (_, set)) in &self.settled {
            if let Some(other) = index.clash(set) {
                let key = |id: &ServiceId| self.demands.services[id].key.clone();
                notes.push(Note::Shared { service: key(id), with: key(&other) });
            }
            index.add(set, *id);
            let Some(placement) = self.placement(*id) else { continue };
            let demand = &self.demands.services[id];
            let service = || demand.key.clone();
            if let Some(az) = demand.home.as_ref().filter(|az| **az != placement.home) {
                notes.push(Note::HomeUnknown { service: service(), az: az.clone() });
            }
            let (at_home, away) = (placement.at_home(), placement.away());
            if at_home < self.want.0 {
                notes.push(Note::FewAtHome { service: service(), az: placement.home.clone(), wanted: self.want.0, given: at_home });
            }
            if away < self.want.1 {
                notes.push(Note::FewAway { service: service(), wanted: self.want.1, given: away });
            }
            result.insert(*id, placement);
        }
        result
    }
}
