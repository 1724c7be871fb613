//! Chooses the standbys behind the owners, so that a SYN finds a replica when the head is dead and
//! no data plane knows it yet. It changes no head or owner.

use std::collections::BTreeMap;

use canal_model::fleet::FleetReplica;
use canal_model::ids::ReplicaNumber;
use canal_model::plan::{ChainMember, PlannedTable};
use canal_model::program::CHAIN_LENGTH_MAX;

use super::TableRequest;
use crate::mix::mix;

/// Removes standbys that are not live or too many, and adds missing ones. One slot of a chain stays
/// free for the next head.
pub(super) fn set(table: &mut PlannedTable, request: &TableRequest, heads: &[&FleetReplica]) {
    let backend = |number: ReplicaNumber| request.replica(number).map(|replica| &replica.backend);
    // Counts how often a replica is the first to take over from a head.
    let mut after: BTreeMap<(ReplicaNumber, ReplicaNumber), usize> = BTreeMap::new();
    for (bucket, chain) in table.chains.iter_mut().enumerate() {
        // `move_heads` found no replica that could be the head.
        let Some(head) = chain.first().map(|member| member.replica) else {
            continue;
        };
        let is_head = |number: ReplicaNumber| heads.iter().any(|head| head.number == number);
        // `move_heads` decides about the head. An owner stays until it has proved that it owns
        // nothing.
        let mut position = 0;
        chain.retain(|member| {
            position += 1;
            position == 1 || member.is_owner() || is_head(member.replica)
        });
        // Of a chain's slots, one is the head's and one stays free for the next head. Standbys are
        // the replicas that may be heads, the head itself excepted.
        let wanted = request
            .standby
            .min(CHAIN_LENGTH_MAX - 2)
            .min(heads.len().saturating_sub(usize::from(is_head(head))));
        let mut live = chain
            .iter()
            .skip(1)
            .filter(|member| is_head(member.replica))
            .count();
        while live > wanted
            && let Some(last) = chain.iter().skip(1).rposition(|member| !member.is_owner())
        {
            chain.remove(last + 1);
            live -= 1;
        }
        while live < wanted && chain.len() < CHAIN_LENGTH_MAX - 1 {
            // A standby on another backend than the members before it survives a failure of their
            // backend.
            let others = heads
                .iter()
                .filter(|other| chain.iter().all(|member| member.replica != other.number));
            let next = others.min_by_key(|other| {
                let same = chain
                    .iter()
                    .filter(|member| backend(member.replica) == Some(&other.backend))
                    .count();
                // No chain of this head so far has this replica as its first standby.
                let often = after.get(&(head, other.number)).copied().unwrap_or(0);
                (
                    same,
                    often,
                    // Equal candidates are spread over services and buckets.
                    mix([
                        request.service.get().into(),
                        other.number.get().into(),
                        bucket as u64,
                    ]),
                )
            });
            // All replicas that may be heads are in the chain.
            let Some(next) = next else { break };
            chain.push(ChainMember {
                replica: next.number,
                owner_until_version: 0,
            });
            live += 1;
        }
        if let Some(first) = chain.iter().skip(1).find(|member| is_head(member.replica)) {
            *after.entry((head, first.replica)).or_default() += 1;
        }
    }
}
