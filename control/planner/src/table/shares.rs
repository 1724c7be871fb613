//! How many buckets each replica should be the head of, and which buckets move for that. It changes no chain.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::fleet::FleetReplica;
use canal_model::ids::{BackendName, ReplicaNumber};
use canal_model::plan::{PlannedTable, Seat};
use canal_model::program::{BUCKETS, CHAIN};

use super::{Asked, Counts, Vacant};
use crate::mix::mix;

/// How many buckets each of these is the head of.
fn counts(table: &PlannedTable, heads: &[&FleetReplica], vacant: &Vacant) -> Counts {
    let mut counts: Counts = heads.iter().map(|head| (head.number, 0)).collect();
    for head in (0..BUCKETS).filter(|bucket| !vacant.contains(bucket)).filter_map(|bucket| table.chains[bucket].first()) {
        if let Some(count) = counts.get_mut(&head.replica) {
            *count += 1;
        }
    }
    counts
}

/// Shares `total` out evenly; who has most already gets what cannot be divided, so that least moves. `(have, tie)` by key.
fn split<K: Ord + Copy>(total: usize, have: &BTreeMap<K, (usize, u64)>) -> BTreeMap<K, usize> {
    let Some((each, rest)) = total.checked_div(have.len()).map(|each| (each, total % have.len())) else { return BTreeMap::new() };
    let mut order: Vec<(std::cmp::Reverse<usize>, u64, K)> =
        have.iter().map(|(key, (have, tie))| (std::cmp::Reverse(*have), *tie, *key)).collect();
    order.sort_unstable();
    order.into_iter().enumerate().map(|(at, (_, _, key))| (key, each + usize::from(at < rest))).collect()
}

/// How many buckets each should be the head of: even by backend, then by replica.
fn shares(counts: &Counts, heads: &[&FleetReplica], tie: impl Fn(u64) -> u64) -> Counts {
    let mut backends: BTreeMap<&BackendName, Vec<ReplicaNumber>> = BTreeMap::new();
    for head in heads {
        backends.entry(&head.backend).or_default().push(head.number);
    }
    let sum = |members: &[ReplicaNumber]| members.iter().map(|number| counts[number]).sum::<usize>();
    // A backend's tie is its first replica's; lists are never empty.
    let have = backends.iter().map(|(name, members)| (*name, (sum(members), tie(members[0].get().into())))).collect();
    let by_backend = split(BUCKETS, &have);
    let mut shares = Counts::new();
    for (name, members) in &backends {
        let have = members.iter().map(|number| (*number, (counts[number], tie(number.get().into())))).collect();
        shares.extend(split(by_backend[name], &have));
    }
    shares
}

/// Does everybody have its part? Which of them has one more makes no difference.
pub(super) fn is_even(table: &PlannedTable, heads: &[&FleetReplica]) -> bool {
    let counts = counts(table, heads, &Vacant::new());
    counts.values().sum::<usize>() == BUCKETS && shares(&counts, heads, |number| number) == counts
}

/// How many buckets each should be the head of, less those that it is.
pub(super) fn missing(table: &PlannedTable, asked: &Asked, heads: &[&FleetReplica], vacant: &Vacant) -> BTreeMap<ReplicaNumber, i64> {
    let counts = counts(table, heads, vacant);
    let shares = shares(&counts, heads, |number| mix([asked.service.get().into(), number, 3]));
    // Both are at most 128.
    shares.into_iter().map(|(number, share)| (number, share as i64 - counts[&number] as i64)).collect()
}

/// The buckets that get another head, in the order in which they should choose: first those whose head may not be one. Of replicas with
/// too many, the shortest chains move; full ones do not, as there is no hurry.
pub(super) fn movers(
    table: &PlannedTable,
    heads: &[&FleetReplica],
    vacant: &Vacant,
    missing: &mut BTreeMap<ReplicaNumber, i64>,
) -> Vec<usize> {
    let may: BTreeSet<ReplicaNumber> = heads.iter().map(|head| head.number).collect();
    let has_head =
        |bucket: &usize| !vacant.contains(bucket) && table.chains[*bucket].first().is_some_and(|head| may.contains(&head.replica));
    let mut movers: Vec<usize> = (0..BUCKETS).filter(|bucket| !has_head(bucket)).collect();
    let mut rich: Vec<usize> = (0..BUCKETS).filter(has_head).collect();
    let owners = |bucket: usize| table.chains[bucket].iter().filter(|seat| seat.is_owner()).count();
    rich.retain(|bucket| owners(*bucket) + 1 < CHAIN);
    // Spread over the buckets, so that one replica's are not all neighbours.
    rich.sort_by_key(|bucket| (owners(*bucket), (*bucket as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    for bucket in rich {
        let Some(Seat { replica, .. }) = table.chains[bucket].first() else { continue };
        if let Some(too_many) = missing.get_mut(replica).filter(|missing| **missing < 0) {
            *too_many += 1;
            movers.push(bucket);
        }
    }
    movers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_divided_stays_where_it_is() {
        let have = BTreeMap::from([('a', (40, 0)), ('b', (44, 0)), ('c', (44, 0))]);
        assert_eq!(split(128, &have), BTreeMap::from([('a', 42), ('b', 43), ('c', 43)]));
        let have = BTreeMap::from([('a', (0, 2)), ('b', (0, 1)), ('c', (0, 3))]);
        assert_eq!(split(128, &have), BTreeMap::from([('a', 43), ('b', 43), ('c', 42)]));
        assert_eq!(split(128, &BTreeMap::<char, _>::new()), BTreeMap::new());
    }
}
