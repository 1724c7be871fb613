//! A sorted table of resources of which consecutive states share what did not change. Copying it costs
//! a few hundred steps for 100,000 resources, and a change copies a few hundred entries. Start at
//! [`ResourceTable`].

use std::sync::Arc;

use canal_model::program::ResourceKind;

use crate::{EncodedResource, ResourceId};

/// Maximum number of entries in one part of a table. A change copies one part, and a copy of the
/// table copies the list of parts. Nobody measured this value.
const PART_ENTRIES_MAX: usize = 512;

type Entry = (ResourceId, Arc<EncodedResource>);

/// The resources of one state, sorted by kind and name.
#[derive(Debug, Clone, Default)]
pub struct ResourceTable {
    /// Consecutive parts of the sorted entries. None of them is empty.
    parts: Vec<Arc<Vec<Entry>>>,
}

impl ResourceTable {
    /// Returns the number of resources in all parts.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }

    /// Returns true without any resource.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns a resource by its kind and name.
    pub fn get(&self, key: &ResourceId) -> Option<&Arc<EncodedResource>> {
        self.get_key_value(key).map(|(_, entry)| entry)
    }

    /// Returns a resource by its kind and name, with the key that the table has.
    pub fn get_key_value(&self, key: &ResourceId) -> Option<(&ResourceId, &Arc<EncodedResource>)> {
        let part = self.parts.get(self.part_of(key))?;
        let at = part.binary_search_by(|(own, _)| own.cmp(key)).ok()?;
        let (key, entry) = &part[at];
        Some((key, entry))
    }

    /// Iterates over the keys in order.
    pub fn keys(&self) -> impl Iterator<Item = &ResourceId> {
        self.entries().map(|(key, _)| key)
    }

    /// Iterates over the resources in order of their keys.
    pub fn values(&self) -> impl Iterator<Item = &Arc<EncodedResource>> {
        self.entries().map(|(_, entry)| entry)
    }

    /// Iterates over the resources of a kind in order of their names.
    pub fn of(&self, kind: ResourceKind) -> impl Iterator<Item = &Arc<EncodedResource>> {
        let first: ResourceId = (kind, "".into());
        let part = self.part_of(&first);
        let skipped = self.parts.get(part);
        let skipped = skipped.map_or(0, |part| part.partition_point(|(key, _)| *key < first));
        let rest = self.parts[part..].iter().flat_map(|part| part.iter());
        rest.skip(skipped)
            .take_while(move |((own, _), _)| *own == kind)
            .map(|(_, entry)| entry)
    }

    /// Adds a resource, or replaces the one with the same key.
    pub(crate) fn insert(&mut self, key: ResourceId, entry: Arc<EncodedResource>) {
        let at = self.part_of(&key).min(self.parts.len().saturating_sub(1));
        let Some(part) = self.parts.get_mut(at) else {
            self.parts.push(Arc::new(vec![(key, entry)]));
            return;
        };
        let part = Arc::make_mut(part);
        match part.binary_search_by(|(own, _)| own.cmp(&key)) {
            Ok(place) => part[place].1 = entry,
            Err(place) => part.insert(place, (key, entry)),
        }
        if part.len() > PART_ENTRIES_MAX {
            let rest = part.split_off(part.len() / 2);
            self.parts.insert(at + 1, Arc::new(rest));
        }
    }

    /// Removes a resource and returns it, if it exists.
    pub(crate) fn remove(&mut self, key: &ResourceId) -> Option<Arc<EncodedResource>> {
        let at = self.part_of(key);
        let part = self.parts.get(at)?;
        let place = part.binary_search_by(|(own, _)| own.cmp(key)).ok()?;
        let part = Arc::make_mut(&mut self.parts[at]);
        let (_, entry) = part.remove(place);
        if part.is_empty() {
            self.parts.remove(at);
        }
        Some(entry)
    }

    /// Returns the index of the only part that can have the key; that behind the last part if the key
    /// comes after all others.
    fn part_of(&self, key: &ResourceId) -> usize {
        let is_before = |part: &Arc<Vec<Entry>>| part.last().is_some_and(|(last, _)| last < key);
        self.parts.partition_point(is_before)
    }

    fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.parts.iter().flat_map(|part| part.iter())
    }
}

impl FromIterator<Entry> for ResourceTable {
    /// Creates a table of entries. Of several with one key the last one stays.
    fn from_iter<I: IntoIterator<Item = Entry>>(entries: I) -> Self {
        let sorted: std::collections::BTreeMap<_, _> = entries.into_iter().collect();
        let mut parts = vec![Vec::new()];
        for entry in sorted {
            // Half full parts leave room for additions.
            match parts.last_mut() {
                Some(part) if part.len() < PART_ENTRIES_MAX / 2 => part.push(entry),
                _ => parts.push(vec![entry]),
            }
        }
        parts.retain(|part: &Vec<Entry>| !part.is_empty());
        Self {
            parts: parts.into_iter().map(Arc::new).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use canal_model::ids::Generation;

    use super::*;

    /// A table has what an ordinary map has after the same changes, and earlier states stay as they
    /// were.
    #[test]
    fn a_table_has_what_a_map_has() {
        let kinds = [
            ResourceKind::Service,
            ResourceKind::Route,
            ResourceKind::Node,
        ];
        // A table compares keys only, so one resource stands for those of all kinds.
        let resource = crate::tests::service(1, 80);
        // A linear congruential generator (Numerical Recipes) has the same values in each run. Its
        // low bits repeat soonest, so they are left out.
        let mut random = 11_u32;
        let mut next = |below: usize| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) as usize % below
        };
        let mut map: BTreeMap<ResourceId, Arc<EncodedResource>> = BTreeMap::new();
        let mut table = ResourceTable::default();
        let mut earlier = Vec::new();
        for step in 0..20_000 {
            // Up to 4,500 keys fill several parts of the table.
            let key: ResourceId = (kinds[next(3)], format!("{}", next(1_500)).into());
            // The table grows first, and shrinks at the end.
            if next(20_000) > step {
                let entry = EncodedResource::new(resource.clone(), Generation(step as u64));
                let entry = Arc::new(entry);
                map.insert(key.clone(), entry.clone());
                table.insert(key, entry);
            } else {
                let (a, b) = (map.remove(&key), table.remove(&key));
                assert_eq!(a.map(|it| it.changed), b.map(|it| it.changed));
            }
            if step % 1_000 == 0 {
                earlier.push((map.clone(), table.clone()));
            }
        }
        earlier.push((map, table));
        for (map, table) in earlier {
            let rebuilt: ResourceTable = map.clone().into_iter().collect();
            for table in [&table, &rebuilt] {
                assert_eq!((table.len(), table.is_empty()), (map.len(), map.is_empty()));
                assert!(table.keys().eq(map.keys()));
                let are_same =
                    |(a, b): (&Arc<EncodedResource>, &Arc<EncodedResource>)| Arc::ptr_eq(a, b);
                assert!(table.values().zip(map.values()).all(are_same));
                for kind in kinds {
                    let own = map.iter().filter(|((it, _), _)| *it == kind);
                    let names: Vec<_> = own.map(|(_, it)| it.changed).collect();
                    assert!(table.of(kind).map(|it| it.changed).eq(names));
                }
                for (key, entry) in &map {
                    assert!(table.get(key).is_some_and(|it| Arc::ptr_eq(it, entry)));
                }
                assert!(table.get(&(ResourceKind::Service, "none".into())).is_none());
            }
        }
    }
}
