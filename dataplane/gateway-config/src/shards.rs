//! A map whose copies share what did not change: an edit copies one of [`SHARDS`] shards instead of
//! the map. Readers see an immutable value.

use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;

use hashbrown::HashMap;

/// Number of shards of a map. At 10,000 entries, an edit copies about 40.
pub(crate) const SHARDS: usize = 256;

/// Seeded at random, because tenants choose the names in these maps.
type ShardHasher = foldhash::quality::RandomState;
type MapShard<K, V> = Arc<HashMap<K, V, ShardHasher>>;

/// A copy-on-write map that is divided into shards.
#[derive(Debug, Clone)]
pub(crate) struct ShardedMap<K, V> {
    shards: Arc<Vec<MapShard<K, V>>>,
    state: ShardHasher,
    len: usize,
}

impl<K, V> Default for ShardedMap<K, V> {
    fn default() -> Self {
        let state = ShardHasher::default();
        let empty: MapShard<K, V> = Arc::new(HashMap::with_hasher(state.clone()));
        Self {
            shards: Arc::new(vec![empty; SHARDS]),
            state,
            len: 0,
        }
    }
}

impl<K: Hash + Eq + Clone, V: Clone> ShardedMap<K, V> {
    fn at<Q: Hash + ?Sized>(&self, key: &Q) -> usize {
        // The high bits select the shard, because the map in the shard uses the low bits.
        (self.state.hash_one(key) >> 56) as usize % SHARDS
    }

    pub(crate) fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.shards[self.at(key)].get(key)
    }

    pub(crate) fn insert(&mut self, key: K, value: V) {
        let at = self.at(&key);
        let shards = Arc::make_mut(&mut self.shards);
        if Arc::make_mut(&mut shards[at]).insert(key, value).is_none() {
            self.len += 1;
        }
    }

    pub(crate) fn remove<Q: Hash + Eq + ?Sized>(&mut self, key: &Q)
    where
        K: Borrow<Q>,
    {
        let at = self.at(key);
        if self.shards[at].contains_key(key) {
            Arc::make_mut(&mut Arc::make_mut(&mut self.shards)[at]).remove(key);
            self.len -= 1;
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &V> {
        self.shards.iter().flat_map(|s| s.values())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_do_not_see_later_edits_and_share_equal_parts() {
        let mut m = ShardedMap::default();
        for n in 0..1000u32 {
            m.insert(n, n);
        }
        let old = m.clone();
        m.insert(7, 70);
        m.remove(&8);
        m.remove(&8);
        assert_eq!(
            (old.get(&7), old.get(&8), old.len()),
            (Some(&7), Some(&8), 1000)
        );
        assert_eq!(
            (m.get(&7), m.get(&8), m.len(), m.values().count()),
            (Some(&70), None, 999, 999)
        );
        let shared = old
            .shards
            .iter()
            .zip(m.shards.iter())
            .filter(|(a, b)| Arc::ptr_eq(a, b))
            .count();
        assert!(shared >= SHARDS - 2, "{shared}");
    }
}
