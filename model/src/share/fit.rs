//! Decides which entries a bounded map contains when tenants want more than its capacity, or more
//! than their shares. The decision is pure and stable over repetition. It does not write any map.
//! Start at [`decide_omitted`].

use std::collections::BTreeMap;

/// An entry that a tenant wants in the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapDemand<T, K> {
    /// Tenant that owns the entry and whose share the entry uses.
    pub tenant: T,
    /// Key that distinguishes the entry from the others. Among entries that are not in the map yet,
    /// a smaller key is older.
    pub key: K,
    /// The map already contains the entry; present entries take precedence.
    pub is_held: bool,
}

/// The reason why an entry is not in a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Omission {
    /// The entry's tenant has used up its share of this many entries.
    Share(usize),
    /// The map is at its capacity of this many entries, and the entry's tenant is among the largest
    /// holders.
    Full(usize),
}

/// Decides which entries of `demands` a map of `capacity` omits, and why.
///
/// No tenant gets more than its share. If tenants within their shares together want more than the
/// capacity, the largest holders give way. A tenant that wants less than an equal part loses
/// nothing. Within a tenant the newest entries are omitted: first those that are not yet in the
/// map, the largest key first. So one tenant's demand beyond its share changes nothing for another.
pub fn decide_omitted<T: Ord + Copy, K: Ord + Copy>(
    capacity: usize,
    demands: &[MapDemand<T, K>],
    share: impl Fn(T) -> usize,
) -> BTreeMap<K, Omission> {
    let mut wanted: BTreeMap<T, usize> = BTreeMap::new();
    for demand in demands {
        *wanted.entry(demand.tenant).or_default() += 1;
    }
    let allowed: BTreeMap<T, usize> = wanted
        .iter()
        .map(|(tenant, count)| (*tenant, (*count).min(share(*tenant))))
        .collect();
    let total: usize = allowed.values().sum();
    if total <= capacity && allowed == wanted {
        return BTreeMap::new();
    }
    let mut by_tenant: BTreeMap<T, Vec<&MapDemand<T, K>>> = BTreeMap::new();
    for demand in demands {
        by_tenant.entry(demand.tenant).or_default().push(demand);
    }
    // Entries already in the map come first, then by key: what lies beyond the tenant's grant is
    // omitted.
    by_tenant
        .values_mut()
        .for_each(|own| own.sort_unstable_by_key(|demand| (!demand.is_held, demand.key)));
    let granted = if total <= capacity {
        allowed.clone()
    } else {
        decide_level(capacity, &allowed, &by_tenant)
    };
    let mut omitted = BTreeMap::new();
    for (tenant, own) in by_tenant {
        for (place, demand) in own.iter().enumerate().skip(granted[&tenant]) {
            // Position beyond the allowed number: the tenant's own share is the reason; else the
            // map is full.
            let why = if place >= allowed[&tenant] {
                Omission::Share(share(tenant))
            } else {
                Omission::Full(capacity)
            };
            omitted.insert(demand.key, why);
        }
    }
    omitted
}

/// Divides `capacity` among tenants that together want more: each gets the same number, or what it
/// wants if that is less.
///
/// Entries left over by the division go to tenants that already have one more entry in the map,
/// then to the first by name.
fn decide_level<T: Ord + Copy, K>(
    capacity: usize,
    allowed: &BTreeMap<T, usize>,
    by_tenant: &BTreeMap<T, Vec<&MapDemand<T, K>>>,
) -> BTreeMap<T, usize> {
    let mut counts: Vec<usize> = allowed.values().copied().collect();
    counts.sort_unstable();
    let (mut left, mut level) = (capacity, 0);
    for (before, count) in counts.iter().enumerate() {
        // Equal part of what is left, among the tenants that want at least `count`.
        level = left / (counts.len() - before);
        if *count > level {
            break;
        }
        left -= count;
    }
    let mut granted: BTreeMap<T, usize> = allowed
        .iter()
        .map(|(tenant, count)| (*tenant, (*count).min(level)))
        .collect();
    let mut over: Vec<T> = allowed
        .iter()
        .filter(|(_, count)| **count > level)
        .map(|(tenant, _)| *tenant)
        .collect();
    over.sort_by_key(|tenant| !by_tenant[tenant][level].is_held);
    let used: usize = granted.values().sum();
    for tenant in over.into_iter().take(capacity.saturating_sub(used)) {
        granted.insert(tenant, level + 1);
    }
    granted
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Builds demands from pairs of tenant and key; `held` returns whether the map contains the
    /// key.
    fn demands(of: &[(u8, u16)], held: impl Fn(u16) -> bool) -> Vec<MapDemand<u8, u16>> {
        of.iter()
            .map(|(tenant, key)| MapDemand {
                tenant: *tenant,
                key: *key,
                is_held: held(*key),
            })
            .collect()
    }

    fn omitted(capacity: usize, share: usize, all: &[MapDemand<u8, u16>]) -> Vec<u16> {
        decide_omitted(capacity, all, |_| share)
            .into_keys()
            .collect()
    }

    #[test]
    fn the_largest_key_pays_only_for_its_own_tenant() {
        // Tenant 1 fills the map with small keys; tenant 2 has the largest key of all.
        let all: Vec<(u8, u16)> = (0..20).map(|key| (1, key)).chain([(2, 900)]).collect();
        assert_eq!(
            omitted(10, 9, &demands(&all, |_| false)),
            (9..20).collect::<Vec<_>>()
        );
        let why = decide_omitted(10, &demands(&all, |_| false), |_| 9);
        assert!(why.values().all(|why| *why == Omission::Share(9)));
    }

    #[test]
    fn stored_entries_stay_and_the_newest_is_omitted() {
        let all: Vec<(u8, u16)> = (0..4).map(|key| (1, key)).collect();
        // Key 3 is already in the map; keys 0 to 2 are new.
        assert_eq!(omitted(10, 2, &demands(&all, |key| key == 3)), [1, 2]);
    }

    #[test]
    fn a_full_map_omits_entries_of_the_largest_holders() {
        let all: Vec<(u8, u16)> = (0..8)
            .map(|key| (1, key))
            .chain((100..106).map(|key| (2, key)))
            .chain([(3, 900), (3, 901)])
            .collect();
        let why = decide_omitted(10, &demands(&all, |key| key < 200), |_| 8);
        assert_eq!(
            why.keys().copied().collect::<Vec<_>>(),
            [4, 5, 6, 7, 104, 105]
        );
        assert!(why.values().all(|why| *why == Omission::Full(10)));
    }

    fn history() -> impl Strategy<Value = (usize, usize, Vec<(u8, u16)>, Vec<u16>)> {
        let entries = prop::collection::btree_map(0..200u16, 0..6u8, 0..80).prop_map(|all| {
            all.into_iter()
                .map(|(key, tenant)| (tenant, key))
                .collect::<Vec<_>>()
        });
        (
            0..60usize,
            1..30usize,
            entries,
            prop::collection::vec(0..200u16, 0..60),
        )
    }

    proptest! {
        /// The bounds hold, no entry is omitted without need, and a second decision with the
        /// resulting map changes nothing.
        #[test]
        fn omission_is_bounded_needed_and_stable((capacity, share, all, held) in history()) {
            let first = demands(&all, |key| held.contains(&key));
            let gone = decide_omitted(capacity, &first, |_| share);
            let remaining = |tenant: u8| all.iter().filter(|(of, key)| *of == tenant && !gone.contains_key(key)).count();
            let total: usize = (0..6).map(remaining).sum();
            prop_assert!(total <= capacity);
            for tenant in 0..6 {
                let wanted = all.iter().filter(|(of, _)| *of == tenant).count();
                prop_assert!(remaining(tenant) <= share);
                // A tenant that wants no more than an equal part and no more than its share gets
                // everything.
                let tenants = all.iter().map(|(of, _)| *of).collect::<std::collections::BTreeSet<_>>().len().max(1);
                if wanted <= share && wanted <= capacity / tenants {
                    prop_assert_eq!(remaining(tenant), wanted);
                }
            }
            if gone.values().any(|why| matches!(why, Omission::Full(_))) {
                prop_assert_eq!(total, capacity);
            }
            let again = decide_omitted(capacity, &demands(&all, |key| !gone.contains_key(&key)), |_| share);
            prop_assert_eq!(again.into_keys().collect::<Vec<_>>(), gone.into_keys().collect::<Vec<_>>());
        }

        /// A tenant's demand beyond its share changes nothing for the others.
        #[test]
        fn an_excess_changes_nothing_for_others((capacity, share, all, held) in history(), excess in 1..50u16) {
            let before = decide_omitted(capacity, &demands(&all, |key| held.contains(&key)), |_| share);
            let own = all.iter().filter(|(tenant, _)| *tenant == 0).count();
            let fill = u16::try_from(share.saturating_sub(own)).unwrap();
            // Tenant 0 uses its whole share in both cases; in the second it wants more.
            let more = |n: u16| all.iter().copied().chain((0..n).map(|n| (0, 1000 + n))).collect::<Vec<_>>();
            let full = decide_omitted(capacity, &demands(&more(fill), |key| held.contains(&key)), |_| share);
            let over = decide_omitted(capacity, &demands(&more(fill + excess), |key| held.contains(&key)), |_| share);
            let others = |gone: &BTreeMap<u16, Omission>| {
                all.iter().filter(|(tenant, key)| *tenant != 0 && gone.contains_key(key)).map(|(_, key)| *key).collect::<Vec<_>>()
            };
            prop_assert_eq!(others(&full), others(&over));
            prop_assert!(own >= share || others(&before).len() <= others(&over).len());
        }
    }
}
