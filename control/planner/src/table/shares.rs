//! Decides how many buckets each replica should head, and which buckets change their head for that.
//! It changes no chain.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::fleet::FleetReplica;
use canal_model::ids::{BackendName, ReplicaNumber};
use canal_model::plan::{ChainMember, PlannedTable};
use canal_model::program::{BUCKETS, CHAIN_LENGTH_MAX};

use super::{Counts, TableRequest, Vacant};
use crate::mix::mix;

/// Returns the number of buckets that each of these replicas heads.
fn counts(table: &PlannedTable, heads: &[&FleetReplica], vacant: &Vacant) -> Counts {
    let mut counts: Counts = heads.iter().map(|head| (head.number, 0)).collect();
    for head in (0..BUCKETS)
        .filter(|bucket| !vacant.contains(bucket))
        .filter_map(|bucket| table.chains[bucket].first())
    {
        if let Some(count) = counts.get_mut(&head.replica) {
            *count += 1;
        }
    }
    counts
}

/// Divides `total` evenly. The keys that have most already get the remainder, so that the least
/// moves. The values are `(have, tie)`.
fn split<K: Ord + Copy>(total: usize, have: &BTreeMap<K, (usize, u64)>) -> BTreeMap<K, usize> {
    let Some((each, rest)) = total
        .checked_div(have.len())
        .map(|each| (each, total % have.len()))
    else {
        return BTreeMap::new();
    };
    let mut order: Vec<(std::cmp::Reverse<usize>, u64, K)> = have
        .iter()
        .map(|(key, (have, tie))| (std::cmp::Reverse(*have), *tie, *key))
        .collect();
    order.sort_unstable();
    order
        .into_iter()
        .enumerate()
        .map(|(at, (_, _, key))| (key, each + usize::from(at < rest)))
        .collect()
}

/// Returns the number of buckets that each replica should head: even by backend, then by replica.
fn shares(counts: &Counts, heads: &[&FleetReplica], tie: impl Fn(u64) -> u64) -> Counts {
    let mut backends: BTreeMap<&BackendName, Vec<ReplicaNumber>> = BTreeMap::new();
    for head in heads {
        backends.entry(&head.backend).or_default().push(head.number);
    }
    let sum =
        |members: &[ReplicaNumber]| members.iter().map(|number| counts[number]).sum::<usize>();
    // The tie of a backend is that of its first replica; the lists are never empty.
    let have = backends
        .iter()
        .map(|(name, members)| (*name, (sum(members), tie(members[0].get().into()))))
        .collect();
    let by_backend = split(BUCKETS, &have);
    let mut shares = Counts::new();
    for (name, members) in &backends {
        let have = members
            .iter()
            .map(|number| (*number, (counts[number], tie(number.get().into()))))
            .collect();
        shares.extend(split(by_backend[name], &have));
    }
    shares
}

/// Returns true if every replica has its share. It does not matter which replica has one bucket
/// more.
pub(super) fn is_even(table: &PlannedTable, heads: &[&FleetReplica]) -> bool {
    let counts = counts(table, heads, &Vacant::new());
    counts.values().sum::<usize>() == BUCKETS && shares(&counts, heads, |number| number) == counts
}

/// Returns, for each replica, the number of buckets that it should head minus the number that it
/// heads.
pub(super) fn missing(
    table: &PlannedTable,
    request: &TableRequest,
    heads: &[&FleetReplica],
    vacant: &Vacant,
) -> BTreeMap<ReplicaNumber, i64> {
    let counts = counts(table, heads, vacant);
    let shares = shares(&counts, heads, |number| {
        mix([request.service.get().into(), number, 3])
    });
    // Both numbers are at most 128.
    shares
        .into_iter()
        .map(|(number, share)| (number, share as i64 - counts[&number] as i64))
        .collect()
}

/// Returns the buckets that get another head, in the order in which they should choose. Buckets
/// whose head may not be one come first. Of replicas with too many buckets, those with the shortest
/// chains move. Full chains do not move, because there is no hurry.
pub(super) fn movers(
    table: &PlannedTable,
    heads: &[&FleetReplica],
    vacant: &Vacant,
    missing: &mut BTreeMap<ReplicaNumber, i64>,
) -> Vec<usize> {
    let may: BTreeSet<ReplicaNumber> = heads.iter().map(|head| head.number).collect();
    let has_head = |bucket: &usize| {
        !vacant.contains(bucket)
            && table.chains[*bucket]
                .first()
                .is_some_and(|head| may.contains(&head.replica))
    };
    let mut movers: Vec<usize> = (0..BUCKETS).filter(|bucket| !has_head(bucket)).collect();
    let mut rich: Vec<usize> = (0..BUCKETS).filter(has_head).collect();
    let owners = |bucket: usize| {
        table.chains[bucket]
            .iter()
            .filter(|member| member.is_owner())
            .count()
    };
    // The 1 is the present head: it stays in the chain as an owner, behind the next head.
    rich.retain(|bucket| owners(*bucket) + 1 < CHAIN_LENGTH_MAX);
    // The multiplication spreads the choice over the buckets, so that one replica's buckets are not
    // all adjacent. The factor is 2^64 divided by the golden ratio (Fibonacci hashing).
    rich.sort_by_key(|bucket| {
        (
            owners(*bucket),
            (*bucket as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        )
    });
    for bucket in rich {
        // Always matches: `has_head` selected these buckets.
        let Some(ChainMember { replica, .. }) = table.chains[bucket].first() else {
            continue;
        };
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
    fn indivisible_remainders_stay() {
        let have = BTreeMap::from([('a', (40, 0)), ('b', (44, 0)), ('c', (44, 0))]);
        assert_eq!(
            split(128, &have),
            BTreeMap::from([('a', 42), ('b', 43), ('c', 43)])
        );
        let have = BTreeMap::from([('a', (0, 2)), ('b', (0, 1)), ('c', (0, 3))]);
        assert_eq!(
            split(128, &have),
            BTreeMap::from([('a', 43), ('b', 43), ('c', 42)])
        );
        assert_eq!(split(128, &BTreeMap::<char, _>::new()), BTreeMap::new());
    }
}
