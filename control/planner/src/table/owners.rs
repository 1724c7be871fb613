//! Who may own sessions of a bucket, by what was reported and when. It moves nobody.

use canal_model::fleet::FleetReplica;
use canal_model::plan::PlannedTable;

use super::{Asked, Vacant};

/// Notes the version that everybody who could send a packet was heard to have: live members, replicas that may be heads, the edge.
pub(super) fn confirm(table: &mut PlannedTable, asked: &Asked, heads: &[&FleetReplica]) {
    let version = |number| asked.ownership.report(number).map_or(0, |(_, report)| report.version(asked.service));
    let members = table.chains.iter().flatten().map(|seat| seat.replica).filter(|number| asked.is_up(*number));
    let replicas = members.chain(heads.iter().map(|head| head.number)).map(version).min().unwrap_or(0);
    let had = replicas.min(asked.ownership.edge(asked.az).unwrap_or(u32::MAX)).min(table.version);
    if had > table.confirmed {
        table.confirmed = had;
        table.heard = asked.ownership.heard();
    }
}

/// Makes owners of members that may own sessions, and standbys of owners that proved to own none.
pub(super) fn judge(table: &mut PlannedTable, asked: &Asked, vacant: &Vacant) {
    let (version, confirmed, heard) = (table.version.max(1), table.confirmed, table.heard);
    let mut stood_in = false;
    for (bucket, chain) in table.chains.iter_mut().enumerate() {
        // SYNs go to the first that is up: while all before it are dead, a standby gets them.
        let is_vacant = vacant.contains(&bucket);
        let mut dead_before = is_vacant || chain.first().is_some_and(|head| !asked.is_up(head.replica));
        for seat in chain.iter_mut().skip(usize::from(!is_vacant)) {
            let report = asked.ownership.report(seat.replica);
            let owns = report.is_some_and(|(_, report)| report.owns(asked.service, bucket));
            let is_up = asked.is_up(seat.replica);
            if owns || dead_before && is_up {
                seat.left = if seat.is_owner() { seat.left } else { version };
                stood_in |= dead_before && is_up;
            } else if let Some((at, report)) = report
                && report.version(asked.service) >= seat.left
                && confirmed >= seat.left
                && at > heard
            {
                seat.left = 0;
            }
            dead_before &= !is_up;
        }
    }
    if stood_in {
        // What it said before it stood in for a dead head proves nothing.
        table.heard = asked.ownership.heard();
    }
}
