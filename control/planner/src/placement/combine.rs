//! Searches the best combination of backends for one service: among the least loaded, the unique
//! one that shares the fewest pairs. It changes nothing.

use canal_model::ids::ServiceId;

use super::BackendIndex;
use super::index::{ShardSet, ShardSetIndex};
use crate::mix::mix;

/// Number of backends beyond the needed ones that are compared.
/// With the default of two backends at home and one away, this compares at most C(6,2) × C(5,1) =
/// 75 combinations; with four and four, 70 × 70 = 4,900.
const MARGIN: usize = 4;
/// Combinations that are tried at most if none of the least loaded is free. A fleet that needs more
/// is practically full.
const TRIES: usize = 20_000;

/// Backends from which `take` are chosen, with their loads; the least loaded first.
pub(super) struct CandidatePool {
    pub(super) slots: Vec<(u64, BackendIndex)>,
    pub(super) take: usize,
}

pub(super) struct CombinationSearch<'a> {
    pub(super) index: &'a ShardSetIndex,
    pub(super) fixed: &'a ShardSet,
    /// Candidates in the home AZ, and candidates elsewhere.
    pub(super) pools: [CandidatePool; 2],
    pub(super) weight: u64,
    pub(super) service: ServiceId,
}

impl CombinationSearch<'_> {
    /// Returns the best combination that clashes with no other service, or `None`.
    pub(super) fn best(&self) -> Option<ShardSet> {
        let near = [0, 1].map(|at| self.near(&self.pools[at]));
        let mut best: Option<((u32, u64, u64), ShardSet)> = None;
        self.each(near, &mut |set, load| {
            if self.index.clash(&set).is_none() {
                let tie = set
                    .slots()
                    .fold(u64::from(self.service.get()), |tie, slot| {
                        mix([tie, slot.into(), 1])
                    });
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
        // None of the least loaded combinations is free, so the first free one among all backends
        // is used.
        let mut found = None;
        self.each(
            [&self.pools[0].slots, &self.pools[1].slots],
            &mut |set, _| {
                if self.index.clash(&set).is_none() {
                    found = Some(set);
                }
                found.is_none()
            },
        );
        found
    }

    /// Returns the least loaded candidates: those within one weight of the most loaded one that
    /// load alone would select.
    fn near<'a>(&self, pool: &'a CandidatePool) -> &'a [(u64, BackendIndex)] {
        let Some(last) = pool
            .take
            .checked_sub(1)
            .and_then(|last| pool.slots.get(last))
        else {
            return &pool.slots;
        };
        let most = last.0 + self.weight;
        let within = pool
            .slots
            .iter()
            .take(pool.take + MARGIN)
            .take_while(|(load, _)| *load <= most)
            .count();
        &pool.slots[..within]
    }

    /// Calls `see` with every combination and its load, until `see` returns `false` or after
    /// [`TRIES`] combinations.
    fn each(&self, from: [&[(u64, BackendIndex)]; 2], see: &mut dyn FnMut(ShardSet, u64) -> bool) {
        let mut tries = 0;
        each_of(
            from[0],
            self.pools[0].take,
            *self.fixed,
            0,
            &mut |set, load| {
                each_of(from[1], self.pools[1].take, set, load, &mut |set, load| {
                    tries += 1;
                    see(set, load) && tries < TRIES
                })
            },
        );
    }
}

/// Calls `see` with every extension of the set by `take` elements of `from`. Returns `false` if
/// `see` did.
fn each_of(
    from: &[(u64, BackendIndex)],
    take: usize,
    set: ShardSet,
    load: u64,
    see: &mut dyn FnMut(ShardSet, u64) -> bool,
) -> bool {
    if take == 0 {
        return see(set, load);
    }
    (0..from.len().saturating_sub(take - 1)).all(|at| {
        let (more, slot) = from[at];
        each_of(&from[at + 1..], take - 1, set.with(slot), load + more, see)
    })
}
