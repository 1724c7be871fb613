//! The search for one service's combination: from the least loaded backends, the unique one that shares the fewest pairs.
//! It changes nothing.

use canal_model::ids::ServiceId;

use super::Slot;
use super::index::{Index, Set};
use crate::mix::mix;

/// How many backends more than needed are compared.
const MARGIN: usize = 4;
/// How many combinations are tried at most when none of the least loaded is free. A fleet that needs more is as good as full.
const TRIES: usize = 20_000;

/// Backends to choose `take` from, with their load; the least loaded first.
pub(super) struct Pool {
    pub(super) slots: Vec<(u64, Slot)>,
    pub(super) take: usize,
}

pub(super) struct Search<'a> {
    pub(super) index: &'a Index,
    pub(super) fixed: &'a Set,
    /// At home, and away.
    pub(super) pools: [Pool; 2],
    pub(super) weight: u64,
    pub(super) service: ServiceId,
}

impl Search<'_> {
    /// The best combination that is nobody's, or `None`.
    pub(super) fn best(&self) -> Option<Set> {
        let near = [0, 1].map(|at| self.near(&self.pools[at]));
        let mut best: Option<((u32, u64, u64), Set)> = None;
        self.each(near, &mut |set, load| {
            if self.index.clash(&set).is_none() {
                let tie = set.slots().fold(u64::from(self.service.get()), |tie, slot| mix([tie, slot.into(), 1]));
                let score = (self.index.pairs(&set), load, tie);
                if best.is_none_or(|(least, _)| score < least) {
                    best = Some((score, set));
                }
            }
            true
        });
        if let Some((_, set)) = best {
            return Some(set);
        }
        let mut found = None;
        self.each([&self.pools[0].slots, &self.pools[1].slots], &mut |set, _| {
            if self.index.clash(&set).is_none() {
                found = Some(set);
            }
            found.is_none()
        });
        found
    }

    /// The least loaded of a pool: what is within one weight of the ones that would be taken by load alone.
    fn near<'a>(&self, pool: &'a Pool) -> &'a [(u64, Slot)] {
        let Some(last) = pool.take.checked_sub(1).and_then(|last| pool.slots.get(last)) else { return &pool.slots };
        let most = last.0 + self.weight;
        let within = pool.slots.iter().take(pool.take + MARGIN).take_while(|(load, _)| *load <= most).count();
        &pool.slots[..within]
    }

    /// Calls `see` with every combination and its load until it says `false`, or [`TRIES`] are over.
    fn each(&self, from: [&[(u64, Slot)]; 2], see: &mut dyn FnMut(Set, u64) -> bool) {
        let mut tries = 0;
        each_of(from[0], self.pools[0].take, *self.fixed, 0, &mut |set, load| {
            each_of(from[1], self.pools[1].take, set, load, &mut |set, load| {
                tries += 1;
                see(set, load) && tries < TRIES
            })
        });
    }
}

/// Every way to add `take` of `from` to the set. `false` if `see` said so.
fn each_of(from: &[(u64, Slot)], take: usize, set: Set, load: u64, see: &mut dyn FnMut(Set, u64) -> bool) -> bool {
    if take == 0 {
        return see(set, load);
    }
    (0..from.len().saturating_sub(take - 1)).all(|at| {
        let (more, slot) = from[at];
        each_of(&from[at + 1..], take - 1, set.with(slot), load + more, see)
    })
}
