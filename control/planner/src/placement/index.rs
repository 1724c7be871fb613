//! Sets of backends, and who shares which parts of them. It chooses nothing.

use canal_model::fleet::Rules;
use canal_model::ids::ServiceId;
use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::Slot;

const _: () = assert!(Rules::MOST * 16 == u128::BITS as usize);

/// At most [`Rules::MOST`] backends, sorted, in one word: slot + 1 in 16 bits each, so that 0 is nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(super) struct Set(u128);

impl Set {
    pub(super) fn of(slots: &[Slot]) -> Set {
        slots.iter().fold(Set::default(), |set, slot| set.with(*slot))
    }
    pub(super) fn slots(self) -> impl Iterator<Item = Slot> {
        std::iter::successors(Some(self.0), |word| Some(word >> 16))
            .map(|word| word as u16)
            .take_while(|slot| *slot != 0)
            .map(|slot| slot - 1)
    }
    pub(super) fn has(self, slot: Slot) -> bool {
        self.slots().any(|other| other == slot)
    }
    /// The set with one more, if there is room for it.
    pub(super) fn with(self, slot: Slot) -> Set {
        if self.has(slot) || self.0 >> 112 != 0 {
            return self;
        }
        let below = self.slots().take_while(|other| *other < slot).count() as u32 * 16;
        let low = (1_u128 << below) - 1;
        Set(self.0 & low | u128::from(slot + 1) << below | (self.0 & !low) << 16)
    }
    pub(super) fn without(self, slot: Slot) -> Set {
        self.slots().filter(|other| *other != slot).fold(Set::default(), Set::with)
    }
    /// All parts with one member or more, the whole one included.
    fn parts(self) -> impl Iterator<Item = Set> {
        let mut members = [0; Rules::MOST];
        let mut count = 0;
        for slot in self.slots() {
            members[count] = slot;
            count += 1;
        }
        (1_u32..1 << count).map(move |mask| {
            let chosen = (0..count).filter(|place| mask >> place & 1 == 1).enumerate();
            // Members are sorted, so that each goes behind the last.
            Set(chosen.fold(0, |word, (at, place)| word | u128::from(members[place] + 1) << (16 * at)))
        })
    }
}

/// Which sets are taken.
#[derive(Default)]
pub(super) struct Index {
    /// Every part of every set: how many services share it, and the first of them.
    parts: HashMap<Set, (u32, ServiceId), FixedState>,
    /// The same of whole sets.
    whole: HashMap<Set, (u32, ServiceId), FixedState>,
}

impl Index {
    pub(super) fn add(&mut self, set: &Set, service: ServiceId) {
        for part in set.parts() {
            self.parts.entry(part).or_insert((0, service)).0 += 1;
        }
        self.whole.entry(*set).or_insert((0, service)).0 += 1;
    }
    /// Takes back what [`Index::add`] did. Who is named as sharing the rest may be the one that left.
    pub(super) fn remove(&mut self, set: &Set) {
        fn less(map: &mut HashMap<Set, (u32, ServiceId), FixedState>, set: Set) {
            if let Some((count, _)) = map.get_mut(&set) {
                *count -= 1;
                if *count == 0 {
                    map.remove(&set);
                }
            }
        }
        set.parts().for_each(|part| less(&mut self.parts, part));
        less(&mut self.whole, *set);
    }
    /// True of a service's own set that nobody else's contains, and that contains nobody else's.
    pub(super) fn is_alone(&self, set: &Set) -> bool {
        self.parts.get(set).is_some_and(|(count, _)| *count == 1) && !set.parts().any(|part| part != *set && self.whole.contains_key(&part))
    }
    /// A service all of whose backends are in the set, or whose backends contain the set.
    pub(super) fn clash(&self, set: &Set) -> Option<ServiceId> {
        if let Some((_, service)) = self.parts.get(set) {
            return Some(*service);
        }
        set.parts().find_map(|part| self.whole.get(&part).map(|(_, service)| *service))
    }
    /// How many services share this very pair, for all pairs of the set.
    pub(super) fn pairs(&self, set: &Set) -> u32 {
        let pairs = set.parts().filter(|part| part.slots().count() == 2);
        pairs.filter_map(|pair| self.parts.get(&pair)).map(|(count, _)| count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_sorted_and_bounded() {
        let set = Set::of(&[9, 3, 7, 3]);
        assert_eq!(set.slots().collect::<Vec<_>>(), [3, 7, 9]);
        assert_eq!(set.without(7), Set::of(&[9, 3]));
        assert_eq!(set.parts().count(), 7);
        let full = Set::of(&[0, 1, 2, 3, 4, 5, 6, u16::MAX - 1]);
        assert_eq!(full.slots().count(), 8);
        assert_eq!(full.with(9), full);
    }

    #[test]
    fn both_directions_clash() {
        let id = |n| ServiceId::new(n).unwrap();
        let mut index = Index::default();
        index.add(&Set::of(&[1, 2, 3]), id(1));
        for (slots, expected) in [(&[1, 2, 3][..], Some(1)), (&[1, 2], Some(1)), (&[1, 2, 3, 4], Some(1)), (&[1, 2, 4], None), (&[4], None)]
        {
            assert_eq!(index.clash(&Set::of(slots)), expected.map(id), "{slots:?}");
        }
        index.add(&Set::of(&[1, 2, 4]), id(2));
        assert_eq!(index.pairs(&Set::of(&[1, 2, 5])), 2);
        assert!(index.is_alone(&Set::of(&[1, 2, 3])) && index.is_alone(&Set::of(&[1, 2, 4])));
        index.add(&Set::of(&[4]), id(3));
        assert!(!index.is_alone(&Set::of(&[1, 2, 4])) && !index.is_alone(&Set::of(&[4])) && index.is_alone(&Set::of(&[1, 2, 3])));
        index.add(&Set::of(&[1, 2, 3]), id(4));
        assert!(!index.is_alone(&Set::of(&[1, 2, 3])));
        index.remove(&Set::of(&[1, 2, 3]));
        assert!(index.is_alone(&Set::of(&[1, 2, 3])));
        index.remove(&Set::of(&[1, 2, 3]));
        assert_eq!(index.pairs(&Set::of(&[1, 2, 5])), 1);
        assert_eq!(index.clash(&Set::of(&[1, 2, 3])), None);
    }
}
