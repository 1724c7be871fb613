//! Sets of backends in one word each, and an index of the subsets that services share. It chooses
//! nothing.

use canal_model::fleet::ShardingRules;
use canal_model::ids::ServiceId;
use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::BackendIndex;

const _: () = assert!(ShardingRules::BACKENDS_PER_SERVICE_MAX * 16 == u128::BITS as usize);

/// A sorted set of at most [`ShardingRules::BACKENDS_PER_SERVICE_MAX`] backends in one word: index
/// + 1 in 16 bits each; 0 means none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(super) struct ShardSet(u128);

impl ShardSet {
    pub(super) fn of(slots: &[BackendIndex]) -> ShardSet {
        slots
            .iter()
            .fold(ShardSet::default(), |set, slot| set.with(*slot))
    }
    pub(super) fn slots(self) -> impl Iterator<Item = BackendIndex> {
        // A slot takes 16 of the 128 bits, so eight fit (asserted above).
        std::iter::successors(Some(self.0), |word| Some(word >> 16))
            .map(|word| word as u16)
            .take_while(|slot| *slot != 0)
            .map(|slot| slot - 1)
    }
    pub(super) fn has(self, slot: BackendIndex) -> bool {
        self.slots().any(|other| other == slot)
    }
    /// Returns the set with one more backend, or the same set if it is full.
    pub(super) fn with(self, slot: BackendIndex) -> ShardSet {
        // The highest of the eight slots is taken.
        if self.has(slot) || self.0 >> 112 != 0 {
            return self;
        }
        let below = self.slots().take_while(|other| *other < slot).count() as u32 * 16;
        let low = (1_u128 << below) - 1;
        ShardSet(self.0 & low | u128::from(slot + 1) << below | (self.0 & !low) << 16)
    }
    pub(super) fn without(self, slot: BackendIndex) -> ShardSet {
        self.slots()
            .filter(|other| *other != slot)
            .fold(ShardSet::default(), ShardSet::with)
    }
    /// Returns all nonempty subsets, including the set itself.
    fn parts(self) -> impl Iterator<Item = ShardSet> {
        let mut members = [0; ShardingRules::BACKENDS_PER_SERVICE_MAX];
        let mut count = 0;
        for slot in self.slots() {
            members[count] = slot;
            count += 1;
        }
        (1_u32..1 << count).map(move |mask| {
            let chosen = (0..count)
                .filter(|place| mask >> place & 1 == 1)
                .enumerate();
            // Members are sorted, so each is placed after the previous one.
            ShardSet(chosen.fold(0, |word, (at, place)| {
                word | u128::from(members[place] + 1) << (16 * at)
            }))
        })
    }
}

/// Counts of the sets that services use.
#[derive(Default)]
pub(super) struct ShardSetIndex {
    /// For every subset of every set: how many services share it, and the first of them.
    parts: HashMap<ShardSet, (u32, ServiceId), FixedState>,
    /// For every set: how many services have exactly this set, and the first of them.
    sets: HashMap<ShardSet, (u32, ServiceId), FixedState>,
}

impl ShardSetIndex {
    pub(super) fn add(&mut self, set: &ShardSet, service: ServiceId) {
        for part in set.parts() {
            self.parts.entry(part).or_insert((0, service)).0 += 1;
        }
        self.sets.entry(*set).or_insert((0, service)).0 += 1;
    }
    /// Reverts [`ShardSetIndex::add`]. The service recorded for the remaining uses may be the one
    /// that was removed.
    pub(super) fn remove(&mut self, set: &ShardSet) {
        fn less(map: &mut HashMap<ShardSet, (u32, ServiceId), FixedState>, set: ShardSet) {
            if let Some((count, _)) = map.get_mut(&set) {
                *count -= 1;
                if *count == 0 {
                    map.remove(&set);
                }
            }
        }
        set.parts().for_each(|part| less(&mut self.parts, part));
        less(&mut self.sets, *set);
    }
    /// Returns true if no other service's set contains this service's set or is contained in it.
    pub(super) fn is_alone(&self, set: &ShardSet) -> bool {
        self.parts.get(set).is_some_and(|(count, _)| *count == 1)
            && !set
                .parts()
                .any(|part| part != *set && self.sets.contains_key(&part))
    }
    /// Returns a service whose backends are all in the set, or whose backends contain the set.
    pub(super) fn clash(&self, set: &ShardSet) -> Option<ServiceId> {
        if let Some((_, service)) = self.parts.get(set) {
            return Some(*service);
        }
        set.parts()
            .find_map(|part| self.sets.get(&part).map(|(_, service)| *service))
    }
    /// Returns, summed over all pairs in the set, the number of services that share the pair.
    pub(super) fn pairs(&self, set: &ShardSet) -> u32 {
        let pairs = set.parts().filter(|part| part.slots().count() == 2);
        pairs
            .filter_map(|pair| self.parts.get(&pair))
            .map(|(count, _)| count)
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_sorted_and_bounded() {
        let set = ShardSet::of(&[9, 3, 7, 3]);
        assert_eq!(set.slots().collect::<Vec<_>>(), [3, 7, 9]);
        assert_eq!(set.without(7), ShardSet::of(&[9, 3]));
        assert_eq!(set.parts().count(), 7);
        let full = ShardSet::of(&[0, 1, 2, 3, 4, 5, 6, u16::MAX - 1]);
        assert_eq!(full.slots().count(), 8);
        assert_eq!(full.with(9), full);
    }

    #[test]
    fn both_directions_clash() {
        let id = |n| ServiceId::new(n).unwrap();
        let mut index = ShardSetIndex::default();
        index.add(&ShardSet::of(&[1, 2, 3]), id(1));
        for (slots, expected) in [
            (&[1, 2, 3][..], Some(1)),
            (&[1, 2], Some(1)),
            (&[1, 2, 3, 4], Some(1)),
            (&[1, 2, 4], None),
            (&[4], None),
        ] {
            assert_eq!(
                index.clash(&ShardSet::of(slots)),
                expected.map(id),
                "{slots:?}"
            );
        }
        index.add(&ShardSet::of(&[1, 2, 4]), id(2));
        assert_eq!(index.pairs(&ShardSet::of(&[1, 2, 5])), 2);
        assert!(
            index.is_alone(&ShardSet::of(&[1, 2, 3])) && index.is_alone(&ShardSet::of(&[1, 2, 4]))
        );
        index.add(&ShardSet::of(&[4]), id(3));
        assert!(
            !index.is_alone(&ShardSet::of(&[1, 2, 4]))
                && !index.is_alone(&ShardSet::of(&[4]))
                && index.is_alone(&ShardSet::of(&[1, 2, 3]))
        );
        index.add(&ShardSet::of(&[1, 2, 3]), id(4));
        assert!(!index.is_alone(&ShardSet::of(&[1, 2, 3])));
        index.remove(&ShardSet::of(&[1, 2, 3]));
        assert!(index.is_alone(&ShardSet::of(&[1, 2, 3])));
        index.remove(&ShardSet::of(&[1, 2, 3]));
        assert_eq!(index.pairs(&ShardSet::of(&[1, 2, 5])), 1);
        assert_eq!(index.clash(&ShardSet::of(&[1, 2, 3])), None);
    }
}
