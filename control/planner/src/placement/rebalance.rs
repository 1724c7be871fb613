//! Rule 5 of the placement: exchanges single backends of a few services at a time until backends
//! and AZs have similar loads.
//!
//! It adds and removes no backends of a service, and does not move a service again before its
//! earlier exchange is complete.
//!
//! * A backend is *off* if its load differs from its AZ's mean by more than 1/[`BOUND`] of the
//!   mean. The difference must also be larger than the weight of the service that would move. A
//!   service moves from a backend above the mean to one below it, of which one is off. Each move
//!   therefore brings loads closer together, no move is ever reversed, and a balanced fleet stays
//!   as it is.
//! * AZs follow the same rule: the load of all backends of an AZ is compared with its share of the
//!   whole tier's load. Between AZs, a service may also move its *home*: to an AZ that already has
//!   all but one of the backends a home needs. One exchange is then enough, and the service leaves
//!   no AZ. A backend away from home moves to another AZ only if no other service can, because
//!   clients then lose a gateway address.
//! * Only backends with a replica that takes sessions lose or gain services, because an outage is
//!   not an imbalance.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use canal_model::fleet::Placement;
use canal_model::ids::{BackendName, ServiceId};

use super::index::ShardSet;
use super::{AzIndex, BackendIndex, ShardAssignment};
use crate::mix::mix;

/// Divisor of the mean: a load may differ from the mean by one part in this many.
/// The tenth was chosen (docs/design/0003-cloud-tier.md): a smaller bound moves more services for
/// less.
const BOUND: i128 = 10;
/// Number of services of one weight that are compared; the service that shares the fewest pairs
/// moves.
/// It bounds the cost of a pass where many services have one weight. Nobody measured this value.
const COMPARED: usize = 16;

/// Progress of a service's migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MigrationState {
    /// The service has no published table yet, so it may move anywhere.
    New,
    /// In none of the service's tables, a replica other than the head may own sessions.
    Still,
    /// The service is migrating, or leaving an AZ.
    Moving,
}

/// Limits on the services that may move.
pub(crate) struct MoveLimits<'s> {
    /// Backends with a replica that takes sessions.
    pub(crate) live: &'s BTreeSet<&'s BackendName>,
    pub(crate) migration_state: &'s dyn Fn(ServiceId) -> MigrationState,
    /// Returns how many services in state `Still` may begin to move. It is called only if there is
    /// an imbalance.
    pub(crate) most: &'s dyn Fn() -> usize,
}

/// A load and the number of backends that carry it.
#[derive(Debug, Clone, Copy)]
struct BackendLoad {
    load: u64,
    size: usize,
}

/// The reference for comparing loads: the total load and the number of backends. Differences are in
/// units of 1/`count`.
#[derive(Debug, Clone, Copy)]
struct LoadScale {
    total: i128,
    count: i128,
}

impl LoadScale {
    fn of(sides: impl Iterator<Item = BackendLoad>) -> LoadScale {
        let (total, count) = sides.fold((0, 0), |(total, count), side| {
            (total + i128::from(side.load), count + side.size as i128)
        });
        LoadScale { total, count }
    }
    /// Returns how far the load is above its share.
    fn excess(&self, side: BackendLoad) -> i128 {
        i128::from(side.load) * self.count - self.total * side.size as i128
    }
    fn is_off(&self, excess: i128, size: usize, weight: u64) -> bool {
        excess > (self.total * size as i128 / BOUND).max(i128::from(weight) * self.count)
    }
    /// Returns true if moving `weight` helps. `reach` determines whether both sides must be on
    /// opposite sides of the mean.
    fn helps(&self, from: BackendLoad, to: BackendLoad, weight: u64, reach: MoveKind) -> bool {
        let (over, under) = (self.excess(from), -self.excess(to));
        let (is_full, is_empty) = (
            self.is_off(over, from.size, weight),
            self.is_off(under, to.size, weight),
        );
        let moved = i128::from(weight) * self.count;
        let is_apart = match reach {
            MoveKind::Direct => over > 0 && under > 0 && (is_full || is_empty),
            MoveKind::Chain => {
                is_full && !self.is_off(moved - under, to.size, weight)
                    || is_empty && !self.is_off(moved - over, from.size, weight)
            }
        };
        // The sum of load² / size becomes smaller with each move, so the rebalancing terminates.
        let (wide, narrow) = (to.size as i128, from.size as i128);
        let difference = i128::from(from.load) * wide - i128::from(to.load) * narrow;
        is_apart && 2 * difference > i128::from(weight) * (wide + narrow)
    }
    /// Returns the largest weight that moves neither side across the mean.
    fn headroom(&self, from: BackendLoad, to: BackendLoad) -> u64 {
        let headroom = self.excess(from).min(-self.excess(to)).max(0);
        headroom
            .checked_div(self.count)
            .and_then(|headroom| u64::try_from(headroom).ok())
            .unwrap_or(u64::MAX)
    }
}

/// The distance that a single move must cover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MoveKind {
    /// The move goes from above the mean to below it.
    Direct,
    /// The move is one step of a chain: one of its sides is off, and the other does not become off.
    /// If no service can go the whole distance, another service continues from there.
    Chain,
}

/// A search for a move from one backend to the first suitable one of several.
struct MoveSearch {
    scale: LoadScale,
    reach: MoveKind,
    from: (BackendIndex, BackendLoad),
    to: Vec<(BackendIndex, BackendLoad)>,
    /// For a move between AZs: the source, the destination, and whether the service must also keep
    /// a backend in the source.
    azs: Option<(AzIndex, AzIndex, bool)>,
}

struct ShardMove {
    service: ServiceId,
    weight: u64,
    from: BackendIndex,
    to: BackendIndex,
}

struct Balance<'s, 'a> {
    shards: &'s mut ShardAssignment<'a>,
    leave: &'s MoveLimits<'s>,
    is_live: Vec<bool>,
    /// The services of each backend, the heaviest first.
    holders: Vec<Vec<(Reverse<u64>, ServiceId)>>,
    migration_state: BTreeMap<ServiceId, MigrationState>,
    moved: BTreeSet<ServiceId>,
    left: usize,
}

impl ShardAssignment<'_> {
    /// Makes all exchanges that are useful and allowed. Returns the new placements of the services
    /// that moved.
    pub(crate) fn balance(&mut self, leave: &MoveLimits) -> BTreeMap<ServiceId, Placement> {
        let is_live = self
            .backends
            .iter()
            .map(|(name, _)| leave.live.contains(name))
            .collect();
        let (holders, migration_state) = (Vec::new(), BTreeMap::new());
        let mut balance = Balance {
            shards: self,
            leave,
            is_live,
            holders,
            migration_state,
            moved: BTreeSet::new(),
            left: 0,
        };
        if balance.searches().next().is_none() {
            return BTreeMap::new();
        }
        balance.prepare();
        while let Some(exchange) = balance.next() {
            balance.carry_out(&exchange);
        }
        let moved = balance.moved;
        moved
            .into_iter()
            .filter_map(|id| self.placement(id).map(|placement| (id, placement)))
            .collect()
    }
}

impl Balance<'_, '_> {
    fn prepare(&mut self) {
        self.left = (self.leave.most)();
        self.holders = vec![Vec::new(); self.shards.backends.len()];
        for (id, (_, set)) in &self.shards.settled {
            let weight = u64::from(self.shards.demands.services[id].weight.max(1));
            for slot in set.slots() {
                self.holders[usize::from(slot)].push((Reverse(weight), *id));
            }
        }
        self.holders
            .iter_mut()
            .for_each(|holders| holders.sort_unstable());
    }

    /// Returns an AZ's live backends, the least loaded first.
    fn live(&self, zone: AzIndex) -> Vec<(BackendIndex, BackendLoad)> {
        let slots = self.shards.zones[zone]
            .iter()
            .filter(|slot| self.is_live[usize::from(**slot)]);
        let mut live: Vec<_> = slots
            .map(|slot| {
                (
                    *slot,
                    BackendLoad {
                        load: self.shards.load[usize::from(*slot)],
                        size: 1,
                    },
                )
            })
            .collect();
        live.sort_unstable_by_key(|(slot, side)| (side.load, *slot));
        live
    }

    /// Returns all searches for useful moves: first between AZs, and from the most loaded backend
    /// first.
    fn searches(&self) -> impl Iterator<Item = MoveSearch> + use<> {
        let zones: Vec<Vec<(BackendIndex, BackendLoad)>> = (0..self.shards.zones.len())
            .map(|zone| self.live(zone))
            .collect();
        let side = |live: &[(BackendIndex, BackendLoad)]| BackendLoad {
            load: live.iter().map(|(_, side)| side.load).sum(),
            size: live.len(),
        };
        let sides: Vec<BackendLoad> = zones.iter().map(|live| side(live)).collect();
        let scale = LoadScale::of(sides.iter().copied());
        let mut searches = Vec::new();
        // Of two kinds with the same reach, the one in which no client loses a gateway address
        // comes first.
        for (reach, stays) in [
            (MoveKind::Direct, true),
            (MoveKind::Direct, false),
            (MoveKind::Chain, true),
            (MoveKind::Chain, false),
        ] {
            for (from, to) in pairs(&scale, &sides, reach) {
                let targets: Vec<(BackendIndex, BackendLoad)> = zones[to]
                    .iter()
                    .map(|(slot, _)| (*slot, sides[to]))
                    .collect();
                // `live` returned the least loaded backends first.
                for (slot, _) in zones[from].iter().rev() {
                    searches.push(MoveSearch {
                        scale,
                        reach,
                        from: (*slot, sides[from]),
                        to: targets.clone(),
                        azs: Some((from, to, stays)),
                    });
                }
            }
        }
        // Moves inside one AZ come last; each AZ has its own scale.
        for live in &zones {
            let scale = LoadScale::of(live.iter().map(|(_, side)| *side));
            for from in live.iter().rev() {
                let to: Vec<_> = live
                    .iter()
                    .filter(|to| scale.helps(from.1, to.1, 1, MoveKind::Direct))
                    .copied()
                    .collect();
                // Between AZs, `pairs` has left out what does not help.
                if !to.is_empty() {
                    searches.push(MoveSearch {
                        scale,
                        reach: MoveKind::Direct,
                        from: *from,
                        to,
                        azs: None,
                    });
                }
            }
        }
        searches.into_iter()
    }

    fn next(&mut self) -> Option<ShardMove> {
        self.searches().find_map(|search| self.exchange(&search))
    }

    /// Returns the move of a service from this backend: the heaviest one that keeps both sides on
    /// their side of the mean, else the lightest.
    fn exchange(&mut self, search: &MoveSearch) -> Option<ShardMove> {
        let from = usize::from(search.from.0);
        let holders = std::mem::take(&mut self.holders[from]);
        let headroom = search
            .to
            .first()
            .map_or(0, |to| search.scale.headroom(search.from.1, to.1));
        let heavy = holders.partition_point(|(Reverse(weight), _)| *weight > headroom);
        let found = self
            .best(search, holders[heavy..].iter())
            .or_else(|| self.best(search, holders[..heavy].iter().rev()));
        self.holders[from] = holders;
        found
    }

    /// Returns the best move of the first weight at which any service may move: the one whose
    /// result shares the fewest pairs.
    fn best<'h>(
        &mut self,
        search: &MoveSearch,
        order: impl Iterator<Item = &'h (Reverse<u64>, ServiceId)>,
    ) -> Option<ShardMove> {
        let mut found: Option<((u32, u64), ShardMove)> = None;
        let mut compared = 0;
        for (Reverse(weight), service) in order {
            if compared == COMPARED
                || found
                    .as_ref()
                    .is_some_and(|(_, found)| found.weight != *weight)
            {
                break;
            }
            let Some((to, pairs)) = self.target(search, *weight, *service) else {
                continue;
            };
            compared += 1;
            let score = (pairs, mix([service.get().into(), to.into(), 4]));
            if found.as_ref().is_none_or(|(least, _)| score < *least) {
                found = Some((
                    score,
                    ShardMove {
                        service: *service,
                        weight: *weight,
                        from: search.from.0,
                        to,
                    },
                ));
            }
        }
        found.map(|(_, exchange)| exchange)
    }

    /// Returns the destination of the service in this search, and the number of pairs that it would
    /// share there.
    fn target(
        &mut self,
        search: &MoveSearch,
        weight: u64,
        id: ServiceId,
    ) -> Option<(BackendIndex, u32)> {
        let (home, set) = *self.shards.settled.get(&id)?;
        if !self.may_cross(search, id, home, set) || !self.may_move(id) {
            return None;
        }
        // No combination is free for a service that already shares all its backends, so it may
        // share those of another service instead.
        let is_crowded = !self.shards.index.is_alone(&set);
        let rest = set.without(search.from.0);
        let to = search
            .to
            .iter()
            .filter(|(to, side)| {
                !set.has(*to)
                    && search
                        .scale
                        .helps(search.from.1, *side, weight, search.reach)
            })
            .map(|(to, _)| *to);
        to.map(|to| (to, rest.with(to)))
            .find(|(_, next)| is_crowded || self.shards.index.clash(next).is_none())
            .map(|(to, next)| (to, self.shards.index.pairs(&next)))
    }

    fn may_move(&mut self, id: ServiceId) -> bool {
        let migration_state = *self
            .migration_state
            .entry(id)
            .or_insert_with(|| (self.leave.migration_state)(id));
        match migration_state {
            MigrationState::New => true,
            MigrationState::Still => self.left > 0 && !self.moved.contains(&id),
            MigrationState::Moving => false,
        }
    }

    /// Returns true if the service would still have the backends that it needs at home and
    /// elsewhere.
    fn may_cross(&self, search: &MoveSearch, id: ServiceId, home: AzIndex, set: ShardSet) -> bool {
        let Some((from, to, stays)) = search.azs else {
            return true;
        };
        let count = |zone: AzIndex| {
            set.slots()
                .filter(|slot| self.shards.zone_of(*slot) == zone)
                .count()
        };
        if stays && count(from) < 2 {
            return false;
        }
        if from != home {
            return to != home;
        }
        let demand = &self.shards.demands.services[&id];
        let request = demand.home.as_ref().and_then(|az| self.shards.zone(az));
        request.is_none()
            && count(from) == self.shards.home_required
            && count(to) + 1 == self.shards.home_required
    }

    fn carry_out(&mut self, exchange: &ShardMove) {
        let ShardMove {
            service,
            weight,
            from,
            to,
        } = *exchange;
        let Some((home, set)) = self.shards.settled.get(&service).copied() else {
            return;
        };
        let (left, reached) = (self.shards.zone_of(from), self.shards.zone_of(to));
        let next = set.without(from).with(to);
        self.shards.index.remove(&set);
        self.shards.index.add(&next, service);
        self.shards.load[usize::from(from)] -= weight;
        self.shards.load[usize::from(to)] += weight;
        self.shards.zone_load[left] -= weight;
        self.shards.zone_load[reached] += weight;
        self.shards
            .settled
            .insert(service, (if left == home { reached } else { home }, next));
        let entry = (Reverse(weight), service);
        self.holders[usize::from(from)].retain(|other| *other != entry);
        let holders = &mut self.holders[usize::from(to)];
        let place = holders.partition_point(|other| *other < entry);
        holders.insert(place, entry);
        self.moved.insert(service);
        // A new service has no published table, so only services in state `Still` count against the
        // wave.
        if self.migration_state.get(&service) == Some(&MigrationState::Still) {
            self.left -= 1;
        }
    }
}

/// Returns the pairs of AZs between which a move is useful, those furthest apart first.
fn pairs(scale: &LoadScale, sides: &[BackendLoad], reach: MoveKind) -> Vec<(AzIndex, AzIndex)> {
    let all = (0..sides.len()).flat_map(|from| (0..sides.len()).map(move |to| (from, to)));
    let mut pairs: Vec<(AzIndex, AzIndex)> = all
        .filter(|(from, to)| scale.helps(sides[*from], sides[*to], 1, reach))
        .collect();
    pairs.sort_by_key(|(from, to)| {
        (
            scale.excess(sides[*to]) - scale.excess(sides[*from]),
            *from,
            *to,
        )
    });
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn helpful_moves_are_never_reverted() {
        let side = |load, size| BackendLoad { load, size };
        // Each backend is a load and a size. The mean load is 100 in most rows, so the bound is 90
        // to 110.
        for (name, all, from, to, weight, expected) in [
            ("even", &[(10, 1), (10, 1)][..], 0, 1, 1, false),
            ("within the bound", &[(109, 1), (91, 1)], 0, 1, 1, false),
            ("above the bound", &[(112, 1), (88, 1)], 0, 1, 1, true),
            (
                "above the bound, and the service is too heavy",
                &[(112, 1), (88, 1)],
                0,
                1,
                // An excess that is not larger than the service's weight is not off balance.
                12,
                false,
            ),
            (
                "in the other direction",
                &[(112, 1), (88, 1)],
                1,
                0,
                1,
                false,
            ),
            (
                "one is empty, which puts the others above the bound",
                &[(105, 1), (105, 1), (105, 1), (0, 1)],
                0,
                3,
                1,
                true,
            ),
            (
                "two that are not off",
                &[(105, 1), (95, 1), (0, 1), (200, 1)],
                0,
                1,
                1,
                false,
            ),
            (
                "AZs of one load for each backend",
                &[(400, 4), (100, 1)],
                0,
                1,
                1,
                false,
            ),
            ("AZs of one load", &[(200, 4), (200, 1)], 1, 0, 1, true),
            (
                "to one at the mean: a chain",
                &[(150, 1), (100, 1), (50, 1)],
                0,
                1,
                1,
                false,
            ),
        ] {
            let sides: Vec<BackendLoad> =
                all.iter().map(|(load, size)| side(*load, *size)).collect();
            let scale = LoadScale::of(sides.iter().copied());
            assert_eq!(
                scale.helps(sides[from], sides[to], weight, MoveKind::Direct),
                expected,
                "{name}"
            );
            // A move that helps leaves no move back that helps, not even of a weight of 1.
            for reach in [MoveKind::Direct, MoveKind::Chain] {
                if !scale.helps(sides[from], sides[to], weight, reach) {
                    continue;
                }
                let moved = |by: i64, of: BackendLoad| {
                    side(of.load.checked_add_signed(by).unwrap(), of.size)
                };
                let weight = i64::try_from(weight).unwrap();
                let (less, more) = (moved(-weight, sides[from]), moved(weight, sides[to]));
                assert!(
                    [MoveKind::Direct, MoveKind::Chain]
                        .iter()
                        .all(|back| !scale.helps(more, less, 1, *back)),
                    "{name}: the move back must not help"
                );
            }
        }
    }
}
