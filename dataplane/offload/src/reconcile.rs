//! Reconciliation of BPF maps: one pass writes the differences between the actual and the desired
//! entries, counts the writes by map, and collects what failed. It decides neither the desired
//! entries nor the order of the maps. Start at [`reconcile`].

use std::collections::{BTreeMap, HashSet};
use std::fmt::Debug;
use std::hash::Hash;

/// Numbers of elements that one pass wrote to a map and removed from it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MapWrites {
    pub put: usize,
    pub removed: usize,
}

impl std::ops::AddAssign for MapWrites {
    fn add_assign(&mut self, other: Self) {
        self.put += other.put;
        self.removed += other.removed;
    }
}

/// A write that the kernel refused.
#[derive(Debug)]
pub struct WriteFailure<E> {
    pub map: &'static str,
    /// The element's key, for the log.
    pub key: String,
    pub error: E,
}

/// Writes and failures of one pass over maps.
#[derive(Debug)]
pub struct ReconcilerPass<E> {
    writes: BTreeMap<&'static str, MapWrites>,
    failures: Vec<WriteFailure<E>>,
    stops_at_failure: bool,
}

/// Runs `write_differences`, and once more if a write failed: removals of the first run may have
/// freed the capacity that its puts lacked. The failures of the result are those of the last run;
/// they are tried again by the next call.
pub fn reconcile<E>(
    mut write_differences: impl FnMut(&mut ReconcilerPass<E>),
) -> ReconcilerPass<E> {
    let mut pass = ReconcilerPass::new();
    write_differences(&mut pass);
    if !pass.failures.is_empty() {
        pass.failures.clear();
        write_differences(&mut pass);
    }
    pass
}

/// Returns the entries of `desired` that are absent from `actual` or differ there. Both maps are
/// sorted and walked side by side, because every change compares all entries.
fn missing<'a, K: Ord, V: PartialEq>(
    desired: &'a BTreeMap<K, V>,
    actual: &BTreeMap<K, V>,
) -> Vec<(&'a K, &'a V)> {
    let mut there = actual.iter().peekable();
    let mut missing = Vec::new();
    for (key, value) in desired {
        while there.next_if(|(other, _)| *other < key).is_some() {}
        if there
            .peek()
            .is_none_or(|(other, old)| *other != key || *old != value)
        {
            missing.push((key, value));
        }
    }
    missing
}

/// Returns the keys of `actual` that are absent from `desired`.
fn stale<K: Ord + Clone, V>(desired: &BTreeMap<K, V>, actual: &BTreeMap<K, V>) -> Vec<K> {
    let mut there = desired.keys().peekable();
    let mut gone = Vec::new();
    for key in actual.keys() {
        while there.next_if(|other| *other < key).is_some() {}
        if there.peek().is_none_or(|other| *other != key) {
            gone.push(key.clone());
        }
    }
    gone
}

impl<E> ReconcilerPass<E> {
    fn new() -> Self {
        Self {
            writes: BTreeMap::new(),
            failures: Vec::new(),
            stops_at_failure: false,
        }
    }

    /// Creates a pass that writes nothing more after the first failure, for maps of which a part is
    /// of no use.
    pub fn stopping_at_failure() -> Self {
        Self {
            stops_at_failure: true,
            ..Self::new()
        }
    }

    fn is_stopped(&self) -> bool {
        self.stops_at_failure && !self.failures.is_empty()
    }

    /// Records the result of a write that is not an element of a map of entries. Returns whether it
    /// succeeded.
    pub fn record(&mut self, map: &'static str, key: &dyn Debug, result: Result<(), E>) -> bool {
        match result {
            Ok(()) => true,
            Err(error) => {
                self.failures.push(WriteFailure {
                    map,
                    key: format!("{key:?}"),
                    error,
                });
                false
            }
        }
    }

    /// Puts the desired entries that are absent or different. Each successful write is applied to
    /// `actual`.
    pub fn put_missing<K, V>(
        &mut self,
        map: &'static str,
        desired: &BTreeMap<K, V>,
        actual: &mut BTreeMap<K, V>,
        mut put: impl FnMut(&K, &V) -> Result<(), E>,
    ) where
        K: Ord + Clone + Debug,
        V: Clone + PartialEq,
    {
        for (key, value) in missing(desired, actual) {
            if self.is_stopped() {
                return;
            }
            if self.record(map, key, put(key, value)) {
                self.writes.entry(map).or_default().put += 1;
                actual.insert(key.clone(), value.clone());
            }
        }
    }

    /// Removes the entries that are not desired any more. Each successful removal is applied to
    /// `actual`.
    pub fn remove_stale<K, V>(
        &mut self,
        map: &'static str,
        desired: &BTreeMap<K, V>,
        actual: &mut BTreeMap<K, V>,
        mut remove: impl FnMut(&K) -> Result<(), E>,
    ) where
        K: Ord + Clone + Debug,
    {
        for key in stale(desired, actual) {
            if self.is_stopped() {
                return;
            }
            if self.record(map, &key, remove(&key)) {
                self.writes.entry(map).or_default().removed += 1;
                actual.remove(&key);
            }
        }
    }

    /// Removes the leftovers that are not desired. A leftover is an entry of an earlier process of
    /// which only the key is known.
    pub fn remove_leftovers<K, V>(
        &mut self,
        map: &'static str,
        desired: &BTreeMap<K, V>,
        leftovers: &mut HashSet<K>,
        mut remove: impl FnMut(&K) -> Result<(), E>,
    ) where
        K: Ord + Hash + Clone + Debug,
    {
        let undesired: Vec<K> = leftovers
            .iter()
            .filter(|key| !desired.contains_key(key))
            .cloned()
            .collect();
        for key in undesired {
            if self.record(map, &key, remove(&key)) {
                self.writes.entry(map).or_default().removed += 1;
                leftovers.remove(&key);
            }
        }
    }

    /// Returns the writes by map.
    pub fn writes(&self) -> &BTreeMap<&'static str, MapWrites> {
        &self.writes
    }

    /// Returns the writes to all maps together.
    pub fn total(&self) -> MapWrites {
        let mut total = MapWrites::default();
        self.writes.values().for_each(|of_map| total += *of_map);
        total
    }

    /// Returns the writes that the kernel refused.
    pub fn failures(&self) -> &[WriteFailure<E>] {
        &self.failures
    }

    /// Returns the writes to all maps together.
    ///
    /// # Errors
    /// Returns the error of the first write that the kernel refused.
    pub fn finish(mut self) -> Result<MapWrites, E> {
        let total = self.total();
        if self.failures.is_empty() {
            Ok(total)
        } else {
            Err(self.failures.swap_remove(0).error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map in memory with a capacity.
    struct SmallMap {
        content: BTreeMap<u8, u8>,
        capacity: usize,
    }

    impl SmallMap {
        fn put(&mut self, key: u8, value: u8) -> Result<(), &'static str> {
            if self.content.len() == self.capacity && !self.content.contains_key(&key) {
                return Err("full");
            }
            self.content.insert(key, value);
            Ok(())
        }
    }

    fn become_desired(
        map: &mut SmallMap,
        actual: &mut BTreeMap<u8, u8>,
        desired: &BTreeMap<u8, u8>,
    ) -> ReconcilerPass<&'static str> {
        reconcile(|pass| {
            pass.put_missing("m", desired, actual, |k, v| map.put(*k, *v));
            pass.remove_stale("m", desired, actual, |k| {
                map.content.remove(k);
                Ok(())
            });
        })
    }

    #[test]
    fn full_map_gets_the_new_entries_once_the_stale_ones_are_removed() {
        let entries = |keys: &[u8]| {
            keys.iter()
                .map(|k| (*k, k * 2))
                .collect::<BTreeMap<u8, u8>>()
        };
        // The map has space for three entries.
        for (case, before, desired, writes, failed) in [
            (
                "from nothing",
                &[][..],
                &[1, 2][..],
                MapWrites { put: 2, removed: 0 },
                0,
            ),
            ("nothing new", &[1, 2], &[1, 2], MapWrites::default(), 0),
            (
                "all others",
                &[1, 2, 3],
                &[4, 5, 6],
                MapWrites { put: 3, removed: 3 },
                0,
            ),
            (
                "too many",
                &[1, 2],
                &[1, 2, 3, 4],
                MapWrites { put: 1, removed: 0 },
                1,
            ),
        ] {
            let mut map = SmallMap {
                content: entries(before),
                capacity: 3,
            };
            let mut actual = map.content.clone();
            let pass = become_desired(&mut map, &mut actual, &entries(desired));
            assert_eq!(
                (pass.total(), pass.failures().len()),
                (writes, failed),
                "{case}"
            );
            assert_eq!(actual, map.content, "{case}");
            assert_eq!(actual == entries(desired), failed == 0, "{case}");
        }
    }

    #[test]
    fn stopping_pass_writes_nothing_after_a_failure_and_returns_it() {
        let desired: BTreeMap<u8, u8> = [(1, 1), (2, 2), (3, 3)].into();
        let mut tried = Vec::new();
        let mut pass = ReconcilerPass::stopping_at_failure();
        let mut actual = BTreeMap::from([(9, 9)]);
        pass.put_missing("m", &desired, &mut actual, |k, _| {
            tried.push(*k);
            if *k == 2 { Err("refused") } else { Ok(()) }
        });
        pass.remove_stale("m", &desired, &mut actual, |_| Ok(()));
        assert_eq!((tried, actual.len()), (vec![1, 2], 2));
        assert_eq!(pass.finish(), Err("refused"));
    }

    #[test]
    fn leftovers_are_removed_unless_they_are_desired() {
        let mut pass = ReconcilerPass::<&str>::new();
        let mut leftovers = HashSet::from([1, 2, 3]);
        let removed = |k: &u8| if *k == 3 { Err("refused") } else { Ok(()) };
        pass.remove_leftovers("m", &BTreeMap::from([(1, ())]), &mut leftovers, removed);
        assert_eq!(leftovers, HashSet::from([1, 3]));
        assert_eq!(
            (pass.total().removed, pass.failures()[0].key.as_str()),
            (1, "3")
        );
    }
}
