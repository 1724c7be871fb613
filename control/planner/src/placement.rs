//! Shuffle sharding (Canal §4.2): the backends on which each service lives. The module does not
//! know replicas or tables.
//!
//! The rules, by precedence:
//! 1. A service has [`ShardingRules::home`] backends in its home AZ and [`ShardingRules::away`]
//!    elsewhere, or as many as exist.
//! 2. No service's backends are a subset of another's: a failure of all backends of one service
//!    leaves every other service a backend.
//! 3. A service keeps its backends unless one is gone or a rule is broken. Then one backend is
//!    exchanged, and all only if no single one helps.
//! 4. New backends are among the least loaded, within the weight of the service. Among those, pairs
//!    that few services share are preferred.
//! 5. If backends or AZs differ from the mean by more than a bound, a few services at a time
//!    exchange one backend (`rebalance`).
//!
//! The load of a backend is the sum of its services' weights: each backend must be able to carry
//! all its services alone.

use std::collections::BTreeMap;

use canal_model::fleet::{Demand, Demands, Fleet, Placement, ShardingRules};
use canal_model::ids::{AzName, BackendName, ServiceId};
use canal_model::plan::UnmetConstraint;

use crate::mix::mix;
use crate::{Backends, LivePlacements};

mod combine;
mod index;
pub(crate) mod rebalance;

use combine::{CandidatePool, CombinationSearch};
use index::{ShardSet, ShardSetIndex};

/// Returns placements for all services, if there is any backend. `live` are the placements of the
/// last plan. No service moves for balance.
pub fn decide_placements(
    fleet: &Fleet,
    demands: &Demands,
    live: &LivePlacements,
    notes: &mut Vec<UnmetConstraint>,
) -> BTreeMap<ServiceId, Placement> {
    ShardAssignment::settled(fleet, demands, live, notes).placements(notes)
}

/// Index of a backend in [`ShardAssignment::backends`].
type BackendIndex = u16;

/// Index of an AZ in [`ShardAssignment::azs`].
type AzIndex = usize;

/// The assignment of services to backends while it is computed.
pub(crate) struct ShardAssignment<'a> {
    demands: &'a Demands,
    azs: Vec<&'a AzName>,
    backends: Vec<(&'a BackendName, AzIndex)>,
    slots: BTreeMap<&'a BackendName, BackendIndex>,
    /// The backends of each AZ.
    zones: Vec<Vec<BackendIndex>>,
    load: Vec<u64>,
    /// The load of each AZ: the sum of its backends' loads.
    zone_load: Vec<u64>,
    index: ShardSetIndex,
    settled: BTreeMap<ServiceId, (AzIndex, ShardSet)>,
    /// Home AZs in which a search among all backends found no free combination. They are not
    /// searched again, since free combinations only decrease.
    exhausted: Vec<bool>,
    /// Number of backends that each service needs in its home AZ.
    home_required: usize,
    /// Number of backends that each service needs in other AZs.
    away_required: usize,
}

impl<'a> ShardAssignment<'a> {
    fn new(fleet: &'a Fleet, demands: &'a Demands) -> Self {
        let mut azs: Vec<&AzName> = fleet.backends.values().collect();
        azs.sort_unstable();
        azs.dedup();
        // Backends beyond 65,535 get no index and no services; replica numbers run out long before.
        let known = fleet.backends.iter().take(usize::from(BackendIndex::MAX));
        let backends: Vec<(&BackendName, AzIndex)> = known
            .map(|(name, az)| (name, azs.partition_point(|other| *other < az)))
            .collect();
        let mut zones = vec![Vec::new(); azs.len()];
        let mut slots = BTreeMap::new();
        for (slot, (name, zone)) in (0..).zip(&backends) {
            zones[*zone].push(slot);
            slots.insert(*name, slot);
        }
        // A service without a backend could not be reached, whatever the rules say.
        let home_required = demands
            .rules
            .home
            .clamp(1, ShardingRules::BACKENDS_PER_SERVICE_MAX);
        // Backends at home come first; those away have the room that is left.
        let away_required = demands
            .rules
            .away
            .min(ShardingRules::BACKENDS_PER_SERVICE_MAX - home_required);
        let load = vec![0; backends.len()];
        let zone_load = vec![0; azs.len()];
        let exhausted = vec![false; azs.len()];
        ShardAssignment {
            demands,
            azs,
            backends,
            slots,
            zones,
            load,
            zone_load,
            index: ShardSetIndex::default(),
            settled: BTreeMap::new(),
            exhausted,
            home_required,
            away_required,
        }
    }

    /// Assigns all services by the rules 1 to 4.
    pub(crate) fn settled(
        fleet: &'a Fleet,
        demands: &'a Demands,
        live: &LivePlacements,
        notes: &mut Vec<UnmetConstraint>,
    ) -> Self {
        let mut shards = ShardAssignment::new(fleet, demands);
        let mut open = Vec::new();
        for (id, demand) in &demands.services {
            let Some(home) = live.get(id).and_then(|live| shards.kept_home(live, demand)) else {
                open.push((*id, None));
                continue;
            };
            let set = shards.retained(live[id], home);
            // A service that lost a backend is settled later, so that its remaining backends do not
            // displace a service that lost nothing.
            let has_all =
                set.slots().count() == live[id].all().count() && shards.lacks(&set, home) == (0, 0);
            if has_all && shards.index.clash(&set).is_none() {
                shards.settle(*id, demand, home, set);
            } else {
                open.push((*id, Some((home, set))));
            }
        }
        for (id, before) in open {
            let demand = &demands.services[&id];
            let Some((home, set)) =
                before.or_else(|| shards.home(demand).map(|home| (home, ShardSet::default())))
            else {
                notes.push(UnmetConstraint::NoBackend {
                    service: demand.key.clone(),
                });
                continue;
            };
            let set = shards.choose(id, demand, home, set);
            shards.settle(id, demand, home, set);
        }
        shards
    }

    fn zone(&self, az: &AzName) -> Option<AzIndex> {
        self.azs.binary_search(&az).ok()
    }

    /// Returns the home of a service that has a placement: the one its tenant requests, otherwise
    /// the present one, if it has any backend.
    fn kept_home(&self, live: &Placement, demand: &Demand) -> Option<AzIndex> {
        let request = demand.home.as_ref().and_then(|az| self.zone(az));
        request.or_else(|| self.zone(&live.home))
    }

    /// Returns the home of a new service: the one its tenant requests, otherwise the AZ with the
    /// least load per backend among those with enough backends.
    fn home(&self, demand: &Demand) -> Option<AzIndex> {
        let request = demand.home.as_ref().and_then(|az| self.zone(az));
        request.or_else(|| {
            (0..self.azs.len()).min_by(|a, b| {
                let few = |zone: AzIndex| self.zones[zone].len() < self.home_required;
                let share = |zone: AzIndex, other: AzIndex| {
                    u128::from(self.zone_load[zone]) * self.zones[other].len() as u128
                };
                few(*a)
                    .cmp(&few(*b))
                    .then(share(*a, *b).cmp(&share(*b, *a)))
                    .then(a.cmp(b))
            })
        })
    }

    /// Returns the part of a placement that stays: backends that are still in their AZ, as many as
    /// the rules require, the least loaded first.
    fn retained(&self, live: &Placement, home: AzIndex) -> ShardSet {
        let mut there: Vec<BackendIndex> = live
            .backends
            .iter()
            .flat_map(|(az, names)| names.iter().map(move |name| (az, name)))
            .filter_map(|(az, name)| {
                self.slots
                    .get(name)
                    .copied()
                    .filter(|slot| self.azs[self.zone_of(*slot)] == az)
            })
            .collect();
        there.sort_by_key(|slot| (self.load[usize::from(*slot)], *slot));
        let mut home_left = self.home_required;
        let mut away_left = self.away_required;
        there.retain(|slot| {
            let left = if self.zone_of(*slot) == home {
                &mut home_left
            } else {
                &mut away_left
            };
            let stays = *left > 0;
            *left = left.saturating_sub(1);
            stays
        });
        ShardSet::of(&there)
    }

    fn zone_of(&self, slot: BackendIndex) -> AzIndex {
        self.backends[usize::from(slot)].1
    }

    /// Returns how many backends the set lacks at home and elsewhere, counting only backends that
    /// the fleet has.
    fn lacks(&self, set: &ShardSet, home: AzIndex) -> (usize, usize) {
        let at_home = set
            .slots()
            .filter(|slot| self.zone_of(*slot) == home)
            .count();
        let away = set.slots().count() - at_home;
        let there = self.zones[home].len();
        (
            self.home_required.min(there).saturating_sub(at_home),
            self.away_required
                .min(self.backends.len() - there)
                .saturating_sub(away),
        )
    }

    /// Completes a set. If it is not unique, one of its backends is exchanged, or all of them.
    fn choose(&mut self, id: ServiceId, demand: &Demand, home: AzIndex, set: ShardSet) -> ShardSet {
        let search = |shards: &Self, fixed: &ShardSet| shards.search(id, demand, home, fixed);
        if self.exhausted[home] {
            return self.fill(id, home, set);
        }
        if let Some(found) = search(self, &set) {
            return found;
        }
        // Backends outside the home AZ are exchanged first, because sessions are in the home AZ.
        let mut exchanged: Vec<BackendIndex> = set.slots().collect();
        exchanged.sort_by_key(|slot| {
            (
                self.zone_of(*slot) == home,
                std::cmp::Reverse(self.load[usize::from(*slot)]),
                *slot,
            )
        });
        if let Some(found) = exchanged
            .iter()
            .find_map(|slot| search(self, &set.without(*slot)))
        {
            return found;
        }
        // Moving the whole service is expensive, but sharding exists to prevent that one failure
        // takes down two services.
        if let Some(found) = search(self, &ShardSet::default()) {
            return found;
        }
        self.exhausted[home] = true;
        self.fill(id, home, set)
    }

    fn search(
        &self,
        id: ServiceId,
        demand: &Demand,
        home: AzIndex,
        fixed: &ShardSet,
    ) -> Option<ShardSet> {
        let lacks = self.lacks(fixed, home);
        let weight = u64::from(demand.weight.max(1));
        let pools = [
            self.pool(id, fixed, lacks.0, |zone| zone == home),
            self.pool(id, fixed, lacks.1, |zone| zone != home),
        ];
        CombinationSearch {
            index: &self.index,
            fixed,
            pools,
            weight,
            service: id,
        }
        .best()
    }

    /// Returns the candidate backends, the least loaded first. Ties are broken differently for each
    /// service.
    fn pool(
        &self,
        id: ServiceId,
        fixed: &ShardSet,
        take: usize,
        zones: impl Fn(AzIndex) -> bool,
    ) -> CandidatePool {
        let mut slots = Vec::new();
        if take > 0 {
            let others = (0..self.zones.len())
                .filter(|zone| zones(*zone))
                .flat_map(|zone| &self.zones[zone]);
            slots.extend(others.filter(|slot| !fixed.has(**slot)).map(|slot| {
                let tie = mix([id.get().into(), (*slot).into(), 0]);
                (self.load[usize::from(*slot)], tie, *slot)
            }));
            slots.sort_unstable();
        }
        CandidatePool {
            slots: slots
                .into_iter()
                .map(|(load, _, slot)| (load, slot))
                .collect(),
            take,
        }
    }

    /// Completes a set with the least loaded backends, whether or not the result is unique.
    fn fill(&self, id: ServiceId, home: AzIndex, set: ShardSet) -> ShardSet {
        let lacks = self.lacks(&set, home);
        let pools = [
            self.pool(id, &set, lacks.0, |zone| zone == home),
            self.pool(id, &set, lacks.1, |zone| zone != home),
        ];
        pools
            .iter()
            .flat_map(|pool| pool.slots.iter().take(pool.take))
            .fold(set, |set, (_, slot)| set.with(*slot))
    }

    fn settle(&mut self, id: ServiceId, demand: &Demand, home: AzIndex, set: ShardSet) {
        let weight = u64::from(demand.weight.max(1));
        for slot in set.slots() {
            self.load[usize::from(slot)] += weight;
            let zone = self.zone_of(slot);
            self.zone_load[zone] += weight;
        }
        self.index.add(&set, id);
        self.settled.insert(id, (home, set));
    }

    /// Returns the present placement of a service.
    fn placement(&self, id: ServiceId) -> Option<Placement> {
        let (home, set) = self.settled.get(&id)?;
        let mut backends: BTreeMap<AzName, Backends> = BTreeMap::new();
        for slot in set.slots() {
            let (name, zone) = self.backends[usize::from(slot)];
            backends
                .entry(self.azs[zone].clone())
                .or_default()
                .insert(name.clone());
        }
        Some(Placement {
            home: self.azs[*home].clone(),
            backends,
        })
    }

    /// Returns all placements, and adds a note for each constraint that a placement does not meet.
    pub(crate) fn placements(
        &self,
        notes: &mut Vec<UnmetConstraint>,
    ) -> BTreeMap<ServiceId, Placement> {
        let mut result = BTreeMap::new();
        // A separate index in the order of ids makes the note name the same one of two sharing
        // services each time.
        let mut index = ShardSetIndex::default();
        for (id, (_, set)) in &self.settled {
            if let Some(other) = index.clash(set) {
                let key = |id: &ServiceId| self.demands.services[id].key.clone();
                notes.push(UnmetConstraint::Shared {
                    service: key(id),
                    with: key(&other),
                });
            }
            index.add(set, *id);
            // Without backends there is no placement; the plan has the service without one.
            let Some(placement) = self.placement(*id) else {
                continue;
            };
            let demand = &self.demands.services[id];
            let service = || demand.key.clone();
            if let Some(az) = demand.home.as_ref().filter(|az| **az != placement.home) {
                notes.push(UnmetConstraint::HomeUnknown {
                    service: service(),
                    az: az.clone(),
                });
            }
            let (at_home, away) = (placement.at_home(), placement.away());
            if at_home < self.home_required {
                notes.push(UnmetConstraint::FewAtHome {
                    service: service(),
                    az: placement.home.clone(),
                    required: self.home_required,
                    assigned: at_home,
                });
            }
            if away < self.away_required {
                notes.push(UnmetConstraint::FewAway {
                    service: service(),
                    required: self.away_required,
                    assigned: away,
                });
            }
            result.insert(*id, placement);
        }
        result
    }
}
