//! Which entries a bounded map holds when tenants want more than it can, or more than their shares: pure, and stable over repetition. It
//! writes no map. Start at [`decide_omitted`].

use std::collections::BTreeMap;

/// An entry that a map should hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapDemand<T, K> {
    /// The owner, whose share it counts against.
    pub tenant: T,
    /// What tells it from the others; among the entries that are not in the map yet, a lesser key is older.
    pub key: K,
    /// The map holds it already: what was there stays.
    pub is_held: bool,
}

/// Why an entry is not in a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Omission {
    /// Its tenant has used up its share of so many entries.
    Share(usize),
    /// The map holds so many entries, tenants together want more, and this one's is among the largest holders.
    Full(usize),
}

/// The entries of `demands` that a map of `capacity` leaves out, and why.
///
/// No tenant has more than its share. Where tenants within their shares want more than the map holds together, the largest holders give way,
/// and nobody who wants less than an equal part loses anything. Within a tenant the newest entries are left out: first those that the map
/// does not hold yet, the largest key first. So one tenant's demand beyond its share changes nothing for another.
pub fn decide_omitted<T: Ord + Copy, K: Ord + Copy>(
    capacity: usize,
    demands: &[MapDemand<T, K>],
    share: impl Fn(T) -> usize,
) -> BTreeMap<K, Omission> {
    let mut wanted: BTreeMap<T, usize> = BTreeMap::new();
    for demand in demands {
        *wanted.entry(demand.tenant).or_default() += 1;
    }
    let allowed: BTreeMap<T, usize> = wanted.iter().map(|(tenant, count)| (*tenant, (*count).min(share(*tenant)))).collect();
    let total: usize = allowed.values().sum();
    if total <= capacity && allowed == wanted {
        return BTreeMap::new();
    }
    let mut by_tenant: BTreeMap<T, Vec<&MapDemand<T, K>>> = BTreeMap::new();
    for demand in demands {
        by_tenant.entry(demand.tenant).or_default().push(demand);
    }
    by_tenant.values_mut().for_each(|own| own.sort_unstable_by_key(|demand| (!demand.is_held, demand.key)));
    let granted = if total <= capacity { allowed.clone() } else { decide_level(capacity, &allowed, &by_tenant) };
    let mut omitted = BTreeMap::new();
    for (tenant, own) in by_tenant {
        for (place, demand) in own.iter().enumerate().skip(granted[&tenant]) {
            let why = if place >= allowed[&tenant] { Omission::Share(share(tenant)) } else { Omission::Full(capacity) };
            omitted.insert(demand.key, why);
        }
    }
    omitted
}

/// How many entries each tenant has when all together want more than `capacity`: the same number for each, or what it wants if that is less.
/// What the division leaves over goes to those who have it already, else to the first by name.
fn decide_level<T: Ord + Copy, K>(
    capacity: usize,
    allowed: &BTreeMap<T, usize>,
    by_tenant: &BTreeMap<T, Vec<&MapDemand<T, K>>>,
) -> BTreeMap<T, usize> {
    let mut counts: Vec<usize> = allowed.values().copied().collect();
    counts.sort_unstable();
    let (mut left, mut level) = (capacity, 0);
    for (before, count) in counts.iter().enumerate() {
        // The equal part among those who want at least so many.
        level = left / (counts.len() - before);
        if *count > level {
            break;
        }
        left -= count;
    }
    let mut granted: BTreeMap<T, usize> = allowed.iter().map(|(tenant, count)| (*tenant, (*count).min(level))).collect();
    let mut over: Vec<T> = allowed.iter().filter(|(_, count)| **count > level).map(|(tenant, _)| *tenant).collect();
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

    /// `(tenant, key)`, then whether the map holds it.
    fn demands(of: &[(u8, u16)], held: impl Fn(u16) -> bool) -> Vec<MapDemand<u8, u16>> {
        of.iter().map(|(tenant, key)| MapDemand { tenant: *tenant, key: *key, is_held: held(*key) }).collect()
    }

    fn omitted(capacity: usize, share: usize, all: &[MapDemand<u8, u16>]) -> Vec<u16> {
        decide_omitted(capacity, all, |_| share).into_keys().collect()
    }

    #[test]
    fn the_largest_key_pays_only_for_its_own_tenant() {
        // Tenant 1 fills the map with small keys; tenant 2 has the largest key of all.
        let all: Vec<(u8, u16)> = (0..20).map(|key| (1, key)).chain([(2, 900)]).collect();
        assert_eq!(omitted(10, 9, &demands(&all, |_| false)), (9..20).collect::<Vec<_>>());
        let why = decide_omitted(10, &demands(&all, |_| false), |_| 9);
        assert!(why.values().all(|why| *why == Omission::Share(9)));
    }

    #[test]
    fn what_is_held_stays_and_the_newest_is_left_out() {
        let all: Vec<(u8, u16)> = (0..4).map(|key| (1, key)).collect();
        // 3 came first; 0 to 2 want in now.
        assert_eq!(omitted(10, 2, &demands(&all, |key| key == 3)), [1, 2]);
    }

    #[test]
    fn a_full_map_takes_from_the_largest_holders() {
        let all: Vec<(u8, u16)> = (0..8).map(|key| (1, key)).chain((100..106).map(|key| (2, key))).chain([(3, 900), (3, 901)]).collect();
        let why = decide_omitted(10, &demands(&all, |key| key < 200), |_| 8);
        assert_eq!(why.keys().copied().collect::<Vec<_>>(), [4, 5, 6, 7, 104, 105]);
        assert!(why.values().all(|why| *why == Omission::Full(10)));
    }

    fn history() -> impl Strategy<Value = (usize, usize, Vec<(u8, u16)>, Vec<u16>)> {
        let entries = prop::collection::btree_map(0..200u16, 0..6u8, 0..80)
            .prop_map(|all| all.into_iter().map(|(key, tenant)| (tenant, key)).collect::<Vec<_>>());
        (0..60usize, 1..30usize, entries, prop::collection::vec(0..200u16, 0..60))
    }

    proptest! {
        /// The bounds hold, nothing is left out without need, and deciding again about what is held then changes nothing.
        #[test]
        fn omission_is_bounded_needed_and_stable((capacity, share, all, held) in history()) {
            let first = demands(&all, |key| held.contains(&key));
            let gone = decide_omitted(capacity, &first, |_| share);
            let kept = |tenant: u8| all.iter().filter(|(of, key)| *of == tenant && !gone.contains_key(key)).count();
            let total: usize = (0..6).map(kept).sum();
            prop_assert!(total <= capacity);
            for tenant in 0..6 {
                let wanted = all.iter().filter(|(of, _)| *of == tenant).count();
                prop_assert!(kept(tenant) <= share);
                // Whoever wants no more than an equal part and its share has all of it.
                let tenants = all.iter().map(|(of, _)| *of).collect::<std::collections::BTreeSet<_>>().len().max(1);
                if wanted <= share && wanted <= capacity / tenants {
                    prop_assert_eq!(kept(tenant), wanted);
                }
            }
            if gone.values().any(|why| matches!(why, Omission::Full(_))) {
                prop_assert_eq!(total, capacity);
            }
            let again = decide_omitted(capacity, &demands(&all, |key| !gone.contains_key(&key)), |_| share);
            prop_assert_eq!(again.into_keys().collect::<Vec<_>>(), gone.into_keys().collect::<Vec<_>>());
        }

        /// What one tenant wants beyond its share changes nothing for the others.
        #[test]
        fn an_excess_changes_nothing_for_others((capacity, share, all, held) in history(), excess in 1..50u16) {
            let before = decide_omitted(capacity, &demands(&all, |key| held.contains(&key)), |_| share);
            let own = all.iter().filter(|(tenant, _)| *tenant == 0).count();
            let fill = u16::try_from(share.saturating_sub(own)).unwrap();
            // Tenant 0 has its share in both cases; the second asks for more.
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
