//! Who stands behind the owners, so that a SYN finds somebody when the head is dead and nobody was told yet. It touches no head or owner.

use std::collections::BTreeMap;

use canal_model::fleet::FleetReplica;
use canal_model::ids::ReplicaNumber;
use canal_model::plan::{PlannedTable, Seat};
use canal_model::program::CHAIN;

use super::Asked;
use crate::mix::mix;

/// Drops standbys that are not live, or too many; adds what is missing. One place of a chain stays free for the next head.
pub(super) fn set(table: &mut PlannedTable, asked: &Asked, heads: &[&FleetReplica]) {
    let backend = |number: ReplicaNumber| asked.replica(number).map(|replica| &replica.backend);
    // How often a replica is the first to take over from a head.
    let mut after: BTreeMap<(ReplicaNumber, ReplicaNumber), usize> = BTreeMap::new();
    for (bucket, chain) in table.chains.iter_mut().enumerate() {
        let Some(head) = chain.first().map(|seat| seat.replica) else { continue };
        let is_head = |number: ReplicaNumber| heads.iter().any(|head| head.number == number);
        let mut place = 0;
        chain.retain(|seat| {
            place += 1;
            place == 1 || seat.is_owner() || is_head(seat.replica)
        });
        let wanted = asked.standby.min(CHAIN - 2).min(heads.len().saturating_sub(usize::from(is_head(head))));
        let mut live = chain.iter().skip(1).filter(|seat| is_head(seat.replica)).count();
        while live > wanted
            && let Some(last) = chain.iter().skip(1).rposition(|seat| !seat.is_owner())
        {
            chain.remove(last + 1);
            live -= 1;
        }
        while live < wanted && chain.len() < CHAIN - 1 {
            let others = heads.iter().filter(|other| chain.iter().all(|seat| seat.replica != other.number));
            let next = others.min_by_key(|other| {
                let same = chain.iter().filter(|seat| backend(seat.replica) == Some(&other.backend)).count();
                let often = after.get(&(head, other.number)).copied().unwrap_or(0);
                (same, often, mix([asked.service.get().into(), other.number.get().into(), bucket as u64]))
            });
            let Some(next) = next else { break };
            chain.push(Seat { replica: next.number, left: 0 });
            live += 1;
        }
        if let Some(first) = chain.iter().skip(1).find(|seat| is_head(seat.replica)) {
            *after.entry((head, first.replica)).or_default() += 1;
        }
    }
}
