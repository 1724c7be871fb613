//! The endpoint sets of a snapshot by their IDs. Slots of sets that were freed are used again, IDs are
//! not: a worker may have the ID of an earlier snapshot and must not reach another set by it. Start
//! with [`EndpointSets::push`].

use std::sync::Arc;

use super::EndpointSet;

/// Identifies an endpoint set; stays the same while the set behind it changes, and is never
/// another set's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointSetId {
    slot: u32,
    /// How many sets had the slot before.
    version: u32,
}

/// Endpoint sets by ID; an edit copies one chunk.
#[derive(Debug, Default, Clone)]
pub(crate) struct EndpointSets {
    chunks: Vec<Arc<Vec<SetSlot>>>,
}

/// Place of one set after the other.
#[derive(Debug, Clone)]
struct SetSlot {
    version: u32,
    /// `None` if the slot is free.
    set: Option<Arc<EndpointSet>>,
}

/// Number of sets per chunk. An edit copies one chunk and the list of chunks. With 16,384 sets each
/// has 128 entries, which is the least of both together.
const CHUNK: usize = 128;

impl EndpointSets {
    pub(crate) fn get(&self, id: EndpointSetId) -> Option<&Arc<EndpointSet>> {
        let at = id.slot as usize;
        let slot = self.chunks.get(at / CHUNK)?.get(at % CHUNK)?;
        slot.set.as_ref().filter(|_| slot.version == id.version)
    }

    /// Adds a slot with a set.
    pub(crate) fn push(&mut self, set: EndpointSet) -> EndpointSetId {
        if self.chunks.last().is_none_or(|c| c.len() == CHUNK) {
            self.chunks.push(Arc::new(Vec::with_capacity(CHUNK)));
        }
        let chunk = self.chunks.len() - 1;
        let slots = Arc::make_mut(&mut self.chunks[chunk]);
        slots.push(SetSlot {
            version: 0,
            set: Some(Arc::new(set)),
        });
        EndpointSetId {
            // 2^32 slots would need terabytes of memory.
            slot: (chunk * CHUNK + slots.len() - 1) as u32,
            version: 0,
        }
    }

    /// Puts a set in the place of the one with this ID, or into the free slot with it.
    pub(crate) fn replace(&mut self, id: EndpointSetId, set: Arc<EndpointSet>) {
        if let Some(slot) = self.slot(id) {
            slot.set = Some(set);
        }
    }

    /// Frees the slot of a set. Returns the ID of the next set in the slot; `None` if no ID is left.
    pub(crate) fn free(&mut self, id: EndpointSetId) -> Option<EndpointSetId> {
        let slot = self.slot(id)?;
        slot.set = None;
        slot.version = slot.version.checked_add(1)?;
        Some(EndpointSetId {
            version: slot.version,
            ..id
        })
    }

    /// Returns the slot of this ID for modification, unless it is another's by now.
    fn slot(&mut self, id: EndpointSetId) -> Option<&mut SetSlot> {
        let at = id.slot as usize;
        let chunk = Arc::make_mut(self.chunks.get_mut(at / CHUNK)?);
        let slot = chunk.get_mut(at % CHUNK)?;
        (slot.version == id.version).then_some(slot)
    }

    /// Returns the number of slots, with the free ones.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.chunks.iter().map(|c| c.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::set_of;

    #[test]
    fn a_slot_is_used_again_and_an_id_is_not() {
        let mut sets = EndpointSets::default();
        let ids: Vec<_> = (0..CHUNK + 1).map(|_| sets.push(set_of(1))).collect();
        let old = *ids.last().unwrap();
        let before = sets.clone();
        let new = sets.free(old).unwrap();
        assert!(sets.get(old).is_none() && sets.get(new).is_none());
        sets.replace(old, Arc::new(set_of(2)));
        assert!(sets.get(old).is_none() && sets.get(new).is_none());
        sets.replace(new, Arc::new(set_of(3)));
        let endpoints = |sets: &EndpointSets, id| sets.get(id).map(|set| set.endpoints.len());
        assert_eq!(
            (endpoints(&sets, old), endpoints(&sets, new)),
            (None, Some(3))
        );
        assert_eq!(sets.free(old), None, "it is another set's slot");
        assert_eq!(sets.len(), CHUNK + 1);
        // An earlier snapshot keeps its own.
        assert_eq!(
            (endpoints(&before, old), endpoints(&before, new)),
            (Some(1), None)
        );
    }

    #[test]
    fn a_slot_without_versions_left_is_used_no_more() {
        let mut sets = EndpointSets::default();
        let id = sets.push(set_of(1));
        Arc::make_mut(&mut sets.chunks[0])[0].version = u32::MAX;
        let last = EndpointSetId {
            version: u32::MAX,
            ..id
        };
        assert!(sets.get(last).is_some());
        assert_eq!(sets.free(last), None);
        assert!(sets.get(last).is_none());
    }
}
