//! Tables of consistent hashing, as Envoy has them: a ring (ketama) and a Maglev table, with
//! xxHash64. A table depends on the keys of the endpoints, not on their order, so all workers and
//! replicas with the same endpoints select the same endpoint for a hash. Start with
//! [`HashTable::build`].

use canal_model::load_balancing::HashTableKind;
use twox_hash::XxHash64;

/// Most endpoints in a table. A position has 16 bits, and `u16::MAX` marks a free entry while a
/// Maglev table is filled.
pub(crate) const HASHED_ENDPOINTS_MAX: usize = 65_535;

/// Returns the hash of a part of a request.
pub fn hash_of(bytes: &[u8]) -> u64 {
    XxHash64::oneshot(0, bytes)
}

/// Returns the hash of several parts of a request, each hashed with that of the one before.
pub(crate) fn hash_of_all<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let parts = parts.into_iter();
    parts.fold(0, XxHash64::oneshot)
}

/// Maps hashes to positions of endpoints.
#[derive(Debug)]
pub(crate) enum HashTable {
    /// Hashes in ascending order, each with the position of an endpoint. A hash maps to the first
    /// entry that is not smaller.
    Ring {
        hashes: Box<[u64]>,
        endpoints: Box<[u16]>,
    },
    /// Positions of endpoints. A hash maps to the entry of its remainder.
    Maglev(Box<[u16]>),
}

impl HashTable {
    /// Builds the table of the endpoints with these keys, which are distinct. Returns `None` without
    /// endpoints, or with more than fit.
    pub(crate) fn build(kind: HashTableKind, keys: &[String]) -> Option<Self> {
        if keys.is_empty() || keys.len() > HASHED_ENDPOINTS_MAX {
            return None;
        }
        let mut sorted: Vec<(&str, u16)> = keys.iter().map(String::as_str).zip(0..).collect();
        sorted.sort_unstable();
        Some(match kind {
            HashTableKind::Ring { size_min } => ring(&sorted, size_min as usize),
            HashTableKind::Maglev { size } => maglev(&sorted, size as usize),
        })
    }

    fn endpoints(&self) -> &[u16] {
        match self {
            HashTable::Ring { endpoints, .. } | HashTable::Maglev(endpoints) => endpoints,
        }
    }

    /// Returns the positions of endpoints in the order in which they take a hash. The first one has
    /// it; on a ring, the next one has it if the first is absent. A position may be there several
    /// times.
    pub(crate) fn positions(&self, hash: u64) -> impl Iterator<Item = usize> {
        let endpoints = self.endpoints();
        let first = match self {
            HashTable::Ring { hashes, .. } => hashes.partition_point(|entry| *entry < hash),
            HashTable::Maglev(_) => (hash % endpoints.len() as u64) as usize,
        };
        let (before, from) = endpoints.split_at(first);
        from.iter().chain(before).map(|at| usize::from(*at))
    }
}

/// Each endpoint has the same number of entries, so the ring may be larger than the minimum.
fn ring(endpoints: &[(&str, u16)], size_min: usize) -> HashTable {
    let of_each = size_min.div_ceil(endpoints.len()).max(1);
    let mut entries = Vec::with_capacity(of_each * endpoints.len());
    let mut key = String::new();
    for (order, (name, position)) in endpoints.iter().enumerate() {
        for number in 0..of_each {
            key.clear();
            key.push_str(name);
            key.push('_');
            key.push_str(&number.to_string());
            entries.push((hash_of(key.as_bytes()), order, *position));
        }
    }
    entries.sort_unstable();
    HashTable::Ring {
        hashes: entries.iter().map(|(hash, ..)| *hash).collect(),
        endpoints: entries.iter().map(|(.., position)| *position).collect(),
    }
}

/// Fills the table as the paper's listing 1: the endpoints take turns, and each takes the first free
/// entry of its own permutation.
fn maglev(endpoints: &[(&str, u16)], size: usize) -> HashTable {
    struct Permutation {
        next: usize,
        skip: usize,
        position: u16,
    }
    // No endpoint has this position (`HASHED_ENDPOINTS_MAX`).
    const FREE: u16 = u16::MAX;
    let mut permutations: Vec<Permutation> = endpoints
        .iter()
        .map(|(name, position)| {
            let offset = hash_of(name.as_bytes()) % size as u64;
            let skip = XxHash64::oneshot(1, name.as_bytes()) % (size as u64 - 1).max(1) + 1;
            Permutation {
                next: offset as usize,
                skip: skip as usize,
                position: *position,
            }
        })
        .collect();
    let mut table = vec![FREE; size].into_boxed_slice();
    let mut taken = 0;
    'filling: loop {
        for turn in &mut permutations {
            if taken == size {
                break 'filling;
            }
            // The size is a prime, so the permutation reaches every entry.
            while table[turn.next] != FREE {
                turn.next = (turn.next + turn.skip) % size;
            }
            table[turn.next] = turn.position;
            taken += 1;
        }
    }
    HashTable::Maglev(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const RING: HashTableKind = HashTableKind::Ring { size_min: 1024 };
    const MAGLEV: HashTableKind = HashTableKind::Maglev { size: 65_537 };
    /// Number of hashes that the tests look up. Enough that the part of each endpoint is near its
    /// expected one.
    const HASHES: u64 = 20_000;

    fn keys(count: usize) -> Vec<String> {
        (0..count).map(|n| format!("10.1.0.{n}:8080")).collect()
    }

    /// Returns the key of the endpoint of each hash.
    fn owners(kind: HashTableKind, keys: &[String]) -> Vec<String> {
        let table = HashTable::build(kind, keys).unwrap();
        let owner = |n: u64| {
            let hash = hash_of(&n.to_le_bytes());
            keys[table.positions(hash).next().unwrap()].clone()
        };
        (0..HASHES).map(owner).collect()
    }

    fn moved(before: &[String], after: &[String]) -> usize {
        let pairs = before.iter().zip(after);
        pairs.filter(|(before, after)| before != after).count()
    }

    #[test]
    fn hashes_are_those_of_xxhash64() {
        assert_eq!(hash_of(b""), 0xef46_db37_51d8_e999);
        // Test vector of Envoy's hash_test.cc.
        assert_eq!(hash_of(b"foo"), 0x33bf_00a8_59c4_ba3f);
        assert_eq!(hash_of_all([&b"foo"[..]]), hash_of(b"foo"));
        let one_way = hash_of_all([&b"a"[..], b"b"]);
        assert_ne!(one_way, hash_of_all([&b"b"[..], b"a"]));
    }

    #[test]
    fn tables_do_not_depend_on_the_order_of_endpoints() {
        for kind in [RING, MAGLEV] {
            let (sorted, mut reversed) = (keys(10), keys(10));
            reversed.reverse();
            assert_eq!(owners(kind, &sorted), owners(kind, &reversed), "{kind:?}");
        }
    }

    #[test]
    fn one_more_endpoint_of_ten_moves_few_hashes() {
        // A tenth must move. The endpoints of a ring also have fewer entries each then, as in Envoy.
        for (kind, percent) in [(RING, 17), (MAGLEV, 13)] {
            let (before, after) = (owners(kind, &keys(9)), owners(kind, &keys(10)));
            let moved = moved(&before, &after);
            let to_new = after
                .iter()
                .filter(|owner| **owner == "10.1.0.9:8080")
                .count();
            assert!(
                moved <= HASHES as usize * percent / 100,
                "{kind:?}: {moved}"
            );
            assert!(moved >= to_new && to_new > 0, "{kind:?}: {to_new}");
        }
        // With the same number of entries each, only the new endpoint gets hashes.
        let kind = |endpoints: u32| HashTableKind::Ring {
            size_min: endpoints * 100,
        };
        let (before, after) = (owners(kind(9), &keys(9)), owners(kind(10), &keys(10)));
        let gained = after.iter().filter(|owner| **owner == "10.1.0.9:8080");
        assert_eq!(moved(&before, &after), gained.count());
    }

    #[test]
    fn an_absent_endpoint_of_a_ring_leaves_its_hashes_to_the_next_ones() {
        let all = keys(10);
        let table = HashTable::build(RING, &all).unwrap();
        // The keys of endpoints are in order, so positions are the same without the last one.
        let without = HashTable::build(HashTableKind::Ring { size_min: 927 }, &all[..9]).unwrap();
        for n in 0..HASHES {
            let hash = hash_of(&n.to_le_bytes());
            let next = table.positions(hash).find(|at| *at != 9);
            assert_eq!(next, without.positions(hash).next());
        }
    }

    #[test]
    fn endpoints_get_about_the_same_number_of_hashes() {
        for (kind, tenths) in [(RING, 5), (MAGLEV, 1)] {
            let mut counts = BTreeMap::new();
            for owner in owners(kind, &keys(10)) {
                *counts.entry(owner).or_insert(0) += 1;
            }
            let even = HASHES as usize / 10;
            let margin = even * tenths / 10;
            assert_eq!(counts.len(), 10);
            for count in counts.values() {
                let range = even - margin..=even + margin;
                assert!(range.contains(count), "{kind:?}: {counts:?}");
            }
        }
    }

    #[test]
    fn rings_have_the_size_of_envoys_and_every_endpoint() {
        for (endpoints, size_min, expected) in [(3, 1024, 1026), (10, 1024, 1030), (7, 2, 7)] {
            let kind = HashTableKind::Ring { size_min };
            let table = HashTable::build(kind, &keys(endpoints)).unwrap();
            assert_eq!(table.endpoints().len(), expected);
            let reached: std::collections::BTreeSet<usize> = table.positions(0).collect();
            assert_eq!(reached.len(), endpoints);
        }
    }

    #[test]
    fn tables_without_endpoints_and_with_too_many_are_not_built() {
        assert!(HashTable::build(RING, &[]).is_none());
        let many: Vec<String> = (0..=HASHED_ENDPOINTS_MAX).map(|n| n.to_string()).collect();
        assert!(HashTable::build(RING, &many).is_none());
        assert!(HashTable::build(RING, &many[1..]).is_some());
        for size in [2, 3, 5] {
            let table = HashTable::build(HashTableKind::Maglev { size }, &keys(10)).unwrap();
            assert_eq!(table.endpoints().len(), size as usize);
            assert!(table.endpoints().iter().all(|at| *at < 10));
        }
    }
}
