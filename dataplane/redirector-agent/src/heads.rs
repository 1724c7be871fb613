//! Buckets whose head moved from this replica to another, or back, and when the gateway is notified
//! of them. Pure.
//!
//! The gateway decides which connections it rebalances. Start at [`decide_head_change`] and
//! [`HeadMoves`].

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_model::ids::ServiceId;
use canal_model::program::{BucketTable, Resource};

use crate::desired_maps::{RedirectorReplica, table};

/// Difference between two tables of one service in the heads of one replica, with one bit per
/// bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeadChange {
    /// Buckets whose head was this replica, and is another now.
    pub left: u128,
    /// Buckets whose head is this replica again, or for the first time.
    pub returned: u128,
}

/// Compares a table with the previous one of the service; `number` is this replica's.
pub(crate) fn decide_head_change(
    before: &BucketTable,
    after: &BucketTable,
    number: u16,
) -> HeadChange {
    let mut change = HeadChange::default();
    for (bucket, (old, new)) in before.chains.iter().zip(&after.chains).enumerate() {
        let (old, new) = (
            old.first().map(|head| head.get()),
            new.first().map(|head| head.get()),
        );
        let bit = 1u128
            .checked_shl(u32::try_from(bucket).unwrap_or(u32::MAX))
            .unwrap_or(0);
        match (old == Some(number), new == Some(number)) {
            (true, false) if new.is_some() => change.left |= bit,
            (false, true) => change.returned |= bit,
            _ => {}
        }
    }
    change
}

/// Returns the buckets whose head is up. A client that leaves a bucket with an unreachable head
/// would be back at once.
fn reachable(table: &BucketTable, replicas: &BTreeMap<u16, RedirectorReplica>) -> u128 {
    let is_up = |bucket: &usize| {
        let head = table.chains[*bucket].first().map(|head| head.get());
        head.is_some_and(|head| replicas.get(&head).is_some_and(|slot| slot.up))
    };
    (0..table.chains.len().min(128))
        .filter(is_up)
        .map(|bucket| 1u128 << bucket)
        .fold(0, |a, b| a | b)
}

/// Moves of which the gateway was not notified yet, by service ID.
#[derive(Debug, Default)]
pub(crate) struct HeadMoves {
    waiting: BTreeMap<u32, u128>,
}

/// Changes by service ID, each with the table that causes it.
type TableChanges = Vec<(u32, Arc<Resource>, HeadChange)>;

/// Returns the changes of heads if `wanted` is written over `have`. An unchanged table costs a
/// comparison of pointers.
pub(crate) fn decide_changes(
    have: &BTreeMap<u32, Arc<Resource>>,
    wanted: &BTreeMap<u32, Arc<Resource>>,
    number: u16,
) -> TableChanges {
    let mut changes = Vec::new();
    for (id, new) in wanted {
        let Some(old) = have
            .get(id)
            .filter(|old| number != 0 && !Arc::ptr_eq(old, new))
        else {
            continue;
        };
        if let (Some(before), Some(after)) = (table(old), table(new)) {
            let change = decide_head_change(before, after, number);
            if change != HeadChange::default() {
                changes.push((*id, new.clone(), change));
            }
        }
    }
    changes
}

impl HeadMoves {
    /// Adds the changes that are in the maps now. Returns those of which the gateway must be
    /// notified.
    pub(crate) fn take(
        &mut self,
        changes: TableChanges,
        have: &BTreeMap<u32, Arc<Resource>>,
        replicas: &BTreeMap<u16, RedirectorReplica>,
    ) -> Vec<(ServiceId, HeadChange)> {
        let mut returned: BTreeMap<u32, u128> = BTreeMap::new();
        for (id, new, change) in changes {
            // A table that could not be written is compared again at the next attempt.
            if have
                .get(&id)
                .is_some_and(|current| Arc::ptr_eq(current, &new))
            {
                let waiting = self.waiting.entry(id).or_default();
                *waiting = *waiting & !change.returned | change.left;
                returned.insert(id, change.returned);
            }
        }
        let mut due = Vec::new();
        self.waiting.retain(|id, waiting| {
            let Some(table) = have.get(id).and_then(|resource| table(resource)) else {
                return false;
            };
            let left = *waiting & reachable(table, replicas);
            let returned = returned.get(id).copied().unwrap_or(0);
            *waiting &= !left;
            if left | returned != 0 {
                due.push((table.id, HeadChange { left, returned }));
            }
            *waiting != 0
        });
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired_maps::tests::table_of;
    use canal_model::ids::ReplicaNumber;

    /// Returns a table whose first buckets have these heads; the head of all others is replica 9.
    fn heads(version: u32, first: &[u32]) -> Arc<Resource> {
        let Resource::Table(mut table) =
            (*table_of("alpha/default/web", 7, "az1", version, &[9, 1])).clone()
        else {
            unreachable!()
        };
        for (bucket, head) in first.iter().enumerate() {
            table.chains[bucket] = vec![
                ReplicaNumber::new(*head).unwrap(),
                ReplicaNumber::new(9).unwrap(),
            ];
        }
        Arc::new(Resource::Table(table))
    }

    fn only_table(table: &Arc<Resource>) -> BTreeMap<u32, Arc<Resource>> {
        [(7, table.clone())].into()
    }

    fn replicas(up: &[u16]) -> BTreeMap<u16, RedirectorReplica> {
        (1..10)
            .map(|n| {
                (
                    n,
                    RedirectorReplica {
                        address: [250, 1, 0, n as u8].into(),
                        up: up.contains(&n),
                    },
                )
            })
            .collect()
    }

    #[test]
    fn moved_heads_are_reported_once_the_new_head_is_up() {
        // Bit n stands for bucket n. This replica has number 1.
        let (one, two, three) = (
            heads(1, &[1, 1, 1, 2]),
            heads(2, &[1, 2, 3, 2]),
            heads(3, &[2, 1, 3, 2]),
        );
        let mut moves = HeadMoves::default();
        let service = ServiceId::new(7).unwrap();
        let change = |left, returned| vec![(service, HeadChange { left, returned })];
        assert!(
            decide_changes(&BTreeMap::new(), &only_table(&one), 1).is_empty(),
            "what an earlier process had is not known"
        );
        assert!(
            decide_changes(&only_table(&one), &only_table(&two), 0).is_empty(),
            "a replica without a number"
        );
        let changes = || decide_changes(&only_table(&one), &only_table(&two), 1);
        assert!(
            moves
                .take(changes(), &only_table(&one), &replicas(&[2, 3]))
                .is_empty(),
            "it could not be written"
        );
        assert_eq!(
            moves.take(changes(), &only_table(&two), &replicas(&[1, 2])),
            change(0b10, 0),
            "replica 3 is not up"
        );
        assert!(
            moves
                .take(Vec::new(), &only_table(&two), &replicas(&[1, 2]))
                .is_empty(),
            "no change is reported twice"
        );
        assert_eq!(
            moves.take(Vec::new(), &only_table(&two), &replicas(&[1, 2, 3])),
            change(0b100, 0)
        );
        let changes = decide_changes(&only_table(&two), &only_table(&three), 1);
        assert_eq!(
            moves.take(changes, &only_table(&three), &replicas(&[1, 2, 3])),
            change(1, 0b10)
        );
        // A bucket that returned before the gateway was notified of its move.
        let changes = decide_changes(&only_table(&one), &only_table(&two), 1);
        assert!(
            moves
                .take(changes, &only_table(&two), &replicas(&[1]))
                .is_empty()
        );
        let changes = decide_changes(&only_table(&two), &only_table(&one), 1);
        assert_eq!(
            moves.take(changes, &only_table(&one), &replicas(&[1, 2, 3])),
            change(0, 0b110)
        );
        let changes = decide_changes(&only_table(&one), &only_table(&two), 1);
        assert!(
            moves
                .take(changes, &BTreeMap::new(), &replicas(&[1, 2, 3]))
                .is_empty()
                && moves.waiting.is_empty(),
            "the service was removed"
        );
    }
}
