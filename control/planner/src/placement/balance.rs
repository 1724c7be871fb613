//! Rule 5: exchanges single backends of few services at a time until backends, and AZs, carry about the same. It adds and takes away
//! nothing, and leaves alone whoever is still on the way from an earlier exchange.
//!
//! * A backend is *off* if its load is more than [`BOUND`] of its AZ's mean away from it, and more than the weight of the service that
//!   would move. A service moves from one above the mean to one below it, of which one is off. So each move brings loads nearer to each
//!   other, none is ever taken back, and a fleet that rests stays as it is.
//! * AZs go by the same rule, each with the load of all its backends, beside its part of the whole tier's. There a service may move its
//!   *home* as well: to an AZ in which all but one of a home's backends are already, so that one exchange does it and no AZ is left.
//!   A backend away from home goes to another AZ only if nobody else can, because that takes a gateway address from clients.
//! * Only backends with a replica that takes sessions lose or get services: an outage is no imbalance.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use canal_model::fleet::Placement;
use canal_model::ids::{BackendName, ServiceId};

use super::index::Set;
use super::{Shards, Slot, Zone};
use crate::mix::mix;

/// The part of a mean that a load may be away from it: one of so many.
const BOUND: i128 = 10;
/// How many services of one weight are compared: the one that shares the fewest pairs moves.
const COMPARED: usize = 16;

/// How a service stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Nobody was told of it yet: it may go anywhere.
    New,
    /// No table of it keeps sessions for anybody but its heads.
    Still,
    /// It is on the way, or leaves an AZ.
    Moving,
}

/// What may move.
pub(crate) struct Leave<'s> {
    /// Backends with a replica that takes sessions.
    pub(crate) live: &'s BTreeSet<&'s BackendName>,
    pub(crate) standing: &'s dyn Fn(ServiceId) -> Standing,
    /// How many services that are still may begin to move. Asked only if there is reason to.
    pub(crate) most: &'s dyn Fn() -> usize,
}

/// A load on so many backends.
#[derive(Debug, Clone, Copy)]
struct Side {
    load: u64,
    size: usize,
}

/// What loads are compared with: the load of all, and on how many backends it is. Differences are in units of one `count`th.
#[derive(Debug, Clone, Copy)]
struct Scale {
    total: i128,
    count: i128,
}

impl Scale {
    fn of(sides: impl Iterator<Item = Side>) -> Scale {
        let (total, count) = sides.fold((0, 0), |(total, count), side| (total + i128::from(side.load), count + side.size as i128));
        Scale { total, count }
    }
    /// How far it is above its fair part.
    fn excess(&self, side: Side) -> i128 {
        i128::from(side.load) * self.count - self.total * side.size as i128
    }
    fn is_off(&self, excess: i128, size: usize, weight: u64) -> bool {
        excess > (self.total * size as i128 / BOUND).max(i128::from(weight) * self.count)
    }
    /// Should so much move? `Reach` says whether both must be on their sides of the mean.
    fn helps(&self, from: Side, to: Side, weight: u64, reach: Reach) -> bool {
        let (over, under) = (self.excess(from), -self.excess(to));
        let (is_full, is_empty) = (self.is_off(over, from.size, weight), self.is_off(under, to.size, weight));
        let moved = i128::from(weight) * self.count;
        let is_apart = match reach {
            Reach::Direct => over > 0 && under > 0 && (is_full || is_empty),
            Reach::Chain => {
                is_full && !self.is_off(moved - under, to.size, weight) || is_empty && !self.is_off(moved - over, from.size, weight)
            }
        };
        // The sum of load² / size becomes smaller, which is why this ends.
        let (wide, narrow) = (to.size as i128, from.size as i128);
        let difference = i128::from(from.load) * wide - i128::from(to.load) * narrow;
        is_apart && 2 * difference > i128::from(weight) * (wide + narrow)
    }
    /// The most that crosses no mean.
    fn room(&self, from: Side, to: Side) -> u64 {
        let room = self.excess(from).min(-self.excess(to)).max(0);
        room.checked_div(self.count).and_then(|room| u64::try_from(room).ok()).unwrap_or(u64::MAX)
    }
}

/// How far one move must get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// From above the mean to below it.
    Direct,
    /// From, or to, one that is off, and nobody is off for it: where nobody may go all the way, somebody else goes on from there.
    Chain,
}

/// From one backend to the first of some that will do.
struct Way {
    scale: Scale,
    reach: Reach,
    from: (Slot, Side),
    to: Vec<(Slot, Side)>,
    /// From this AZ to that one, and whether the service must stay in the first as well.
    azs: Option<(Zone, Zone, bool)>,
}

struct Exchange {
    service: ServiceId,
    weight: u64,
    from: Slot,
    to: Slot,
}

struct Balance<'s, 'a> {
    shards: &'s mut Shards<'a>,
    leave: &'s Leave<'s>,
    is_live: Vec<bool>,
    /// Services of each backend, the heaviest first.
    holders: Vec<Vec<(Reverse<u64>, ServiceId)>>,
    standing: BTreeMap<ServiceId, Standing>,
    moved: BTreeSet<ServiceId>,
    left: usize,
}

impl Shards<'_> {
    /// Exchanges what may be exchanged. The new placements of those that moved.
    pub(crate) fn balance(&mut self, leave: &Leave) -> BTreeMap<ServiceId, Placement> {
        let is_live = self.backends.iter().map(|(name, _)| leave.live.contains(name)).collect();
        let (holders, standing) = (Vec::new(), BTreeMap::new());
        let mut balance = Balance { shards: self, leave, is_live, holders, standing, moved: BTreeSet::new(), left: 0 };
        if balance.ways().next().is_none() {
            return BTreeMap::new();
        }
        balance.prepare();
        while let Some(exchange) = balance.next() {
            balance.carry_out(&exchange);
        }
        let moved = balance.moved;
        moved.into_iter().filter_map(|id| self.placement(id).map(|placement| (id, placement))).collect()
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
        self.holders.iter_mut().for_each(|holders| holders.sort_unstable());
    }

    /// An AZ's live backends, the least loaded first.
    fn live(&self, zone: Zone) -> Vec<(Slot, Side)> {
        let slots = self.shards.zones[zone].iter().filter(|slot| self.is_live[usize::from(**slot)]);
        let mut live: Vec<_> = slots.map(|slot| (*slot, Side { load: self.shards.load[usize::from(*slot)], size: 1 })).collect();
        live.sort_unstable_by_key(|(slot, side)| (side.load, *slot));
        live
    }

    /// All ways on which something should move, if anything may: between AZs first, and the fullest first.
    fn ways(&self) -> impl Iterator<Item = Way> + use<> {
        let zones: Vec<Vec<(Slot, Side)>> = (0..self.shards.zones.len()).map(|zone| self.live(zone)).collect();
        let side = |live: &[(Slot, Side)]| Side { load: live.iter().map(|(_, side)| side.load).sum(), size: live.len() };
        let sides: Vec<Side> = zones.iter().map(|live| side(live)).collect();
        let scale = Scale::of(sides.iter().copied());
        let mut ways = Vec::new();
        // Of two that reach as far, the one that takes no address away goes first.
        for (reach, stays) in [(Reach::Direct, true), (Reach::Direct, false), (Reach::Chain, true), (Reach::Chain, false)] {
            for (from, to) in pairs(&scale, &sides, reach) {
                let targets: Vec<(Slot, Side)> = zones[to].iter().map(|(slot, _)| (*slot, sides[to])).collect();
                for (slot, _) in zones[from].iter().rev() {
                    ways.push(Way { scale, reach, from: (*slot, sides[from]), to: targets.clone(), azs: Some((from, to, stays)) });
                }
            }
        }
        for live in &zones {
            let scale = Scale::of(live.iter().map(|(_, side)| *side));
            for from in live.iter().rev() {
                let to: Vec<_> = live.iter().filter(|to| scale.helps(from.1, to.1, 1, Reach::Direct)).copied().collect();
                if !to.is_empty() {
                    ways.push(Way { scale, reach: Reach::Direct, from: *from, to, azs: None });
                }
            }
        }
        ways.into_iter()
    }

    fn next(&mut self) -> Option<Exchange> {
        self.ways().find_map(|way| self.exchange(&way))
    }

    /// The service that leaves this backend: the heaviest that makes neither side cross the mean, else the lightest.
    fn exchange(&mut self, way: &Way) -> Option<Exchange> {
        let from = usize::from(way.from.0);
        let holders = std::mem::take(&mut self.holders[from]);
        let room = way.to.first().map_or(0, |to| way.scale.room(way.from.1, to.1));
        let heavy = holders.partition_point(|(Reverse(weight), _)| *weight > room);
        let found = self.best(way, holders[heavy..].iter()).or_else(|| self.best(way, holders[..heavy].iter().rev()));
        self.holders[from] = holders;
        found
    }

    /// Of the first weight that anybody has who may move: who shares the fewest pairs then.
    fn best<'h>(&mut self, way: &Way, order: impl Iterator<Item = &'h (Reverse<u64>, ServiceId)>) -> Option<Exchange> {
        let mut found: Option<((u32, u64), Exchange)> = None;
        let mut compared = 0;
        for (Reverse(weight), service) in order {
            if compared == COMPARED || found.as_ref().is_some_and(|(_, found)| found.weight != *weight) {
                break;
            }
            let Some((to, pairs)) = self.target(way, *weight, *service) else { continue };
            compared += 1;
            let score = (pairs, mix([service.get().into(), to.into(), 4]));
            if found.as_ref().is_none_or(|(least, _)| score < *least) {
                found = Some((score, Exchange { service: *service, weight: *weight, from: way.from.0, to }));
            }
        }
        found.map(|(_, exchange)| exchange)
    }

    /// Where the service may go on this way, and how many pairs it shares there.
    fn target(&mut self, way: &Way, weight: u64, id: ServiceId) -> Option<(Slot, u32)> {
        let (home, set) = *self.shards.settled.get(&id)?;
        if !self.may_cross(way, id, home, set) || !self.may_move(id) {
            return None;
        }
        // Who shares all with another where no combination is free any more may share with somebody else.
        let is_crowded = !self.shards.index.is_alone(&set);
        let rest = set.without(way.from.0);
        let to =
            way.to.iter().filter(|(to, side)| !set.has(*to) && way.scale.helps(way.from.1, *side, weight, way.reach)).map(|(to, _)| *to);
        to.map(|to| (to, rest.with(to)))
            .find(|(_, next)| is_crowded || self.shards.index.clash(next).is_none())
            .map(|(to, next)| (to, self.shards.index.pairs(&next)))
    }

    fn may_move(&mut self, id: ServiceId) -> bool {
        let standing = *self.standing.entry(id).or_insert_with(|| (self.leave.standing)(id));
        match standing {
            Standing::New => true,
            Standing::Still => self.left > 0 && !self.moved.contains(&id),
            Standing::Moving => false,
        }
    }

    /// By what a service needs at home and elsewhere.
    fn may_cross(&self, way: &Way, id: ServiceId, home: Zone, set: Set) -> bool {
        let Some((from, to, stays)) = way.azs else { return true };
        let count = |zone: Zone| set.slots().filter(|slot| self.shards.zone_of(*slot) == zone).count();
        if stays && count(from) < 2 {
            return false;
        }
        if from != home {
            return to != home;
        }
        let demand = &self.shards.demands.services[&id];
        let asked = demand.home.as_ref().and_then(|az| self.shards.zone(az));
        asked.is_none() && count(from) == self.shards.want.0 && count(to) + 1 == self.shards.want.0
    }

    fn carry_out(&mut self, exchange: &Exchange) {
        let Exchange { service, weight, from, to } = *exchange;
        let Some((home, set)) = self.shards.settled.get(&service).copied() else { return };
        let (left, reached) = (self.shards.zone_of(from), self.shards.zone_of(to));
        let next = set.without(from).with(to);
        self.shards.index.remove(&set);
        self.shards.index.add(&next, service);
        self.shards.load[usize::from(from)] -= weight;
        self.shards.load[usize::from(to)] += weight;
        self.shards.zone_load[left] -= weight;
        self.shards.zone_load[reached] += weight;
        self.shards.settled.insert(service, (if left == home { reached } else { home }, next));
        let entry = (Reverse(weight), service);
        self.holders[usize::from(from)].retain(|other| *other != entry);
        let holders = &mut self.holders[usize::from(to)];
        let place = holders.partition_point(|other| *other < entry);
        holders.insert(place, entry);
        self.moved.insert(service);
        if self.standing.get(&service) == Some(&Standing::Still) {
            self.left -= 1;
        }
    }
}

/// AZs between which something should move, those furthest apart first.
fn pairs(scale: &Scale, sides: &[Side], reach: Reach) -> Vec<(Zone, Zone)> {
    let all = (0..sides.len()).flat_map(|from| (0..sides.len()).map(move |to| (from, to)));
    let mut pairs: Vec<(Zone, Zone)> = all.filter(|(from, to)| scale.helps(sides[*from], sides[*to], 1, reach)).collect();
    pairs.sort_by_key(|(from, to)| (scale.excess(sides[*to]) - scale.excess(sides[*from]), *from, *to));
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_helps_is_never_taken_back() {
        let side = |load, size| Side { load, size };
        for (name, all, from, to, weight, expected) in [
            ("even", &[(10, 1), (10, 1)][..], 0, 1, 1, false),
            ("within the bound", &[(109, 1), (91, 1)], 0, 1, 1, false),
            ("above the bound", &[(112, 1), (88, 1)], 0, 1, 1, true),
            ("above the bound, and the service is too heavy", &[(112, 1), (88, 1)], 0, 1, 12, false),
            ("the other way round", &[(112, 1), (88, 1)], 1, 0, 1, false),
            ("one is empty, and nobody else is off", &[(105, 1), (105, 1), (105, 1), (0, 1)], 0, 3, 1, true),
            ("two that are not off", &[(105, 1), (95, 1), (0, 1), (200, 1)], 0, 1, 1, false),
            ("AZs of one load for each backend", &[(400, 4), (100, 1)], 0, 1, 1, false),
            ("AZs of one load", &[(200, 4), (200, 1)], 1, 0, 1, true),
            ("to one at the mean: a chain", &[(150, 1), (100, 1), (50, 1)], 0, 1, 1, false),
        ] {
            let sides: Vec<Side> = all.iter().map(|(load, size)| side(*load, *size)).collect();
            let scale = Scale::of(sides.iter().copied());
            assert_eq!(scale.helps(sides[from], sides[to], weight, Reach::Direct), expected, "{name}");
            for reach in [Reach::Direct, Reach::Chain] {
                if !scale.helps(sides[from], sides[to], weight, reach) {
                    continue;
                }
                let moved = |by: i64, of: Side| side(of.load.checked_add_signed(by).unwrap(), of.size);
                let weight = i64::try_from(weight).unwrap();
                let (less, more) = (moved(-weight, sides[from]), moved(weight, sides[to]));
                assert!([Reach::Direct, Reach::Chain].iter().all(|back| !scale.helps(more, less, 1, *back)), "{name}: and back");
            }
        }
    }
}
