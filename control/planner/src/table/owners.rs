//! Determines, from reports and their order, which replicas may own sessions of a bucket. It moves
//! no member.

use canal_model::fleet::FleetReplica;
use canal_model::plan::PlannedTable;

use super::{TableRequest, Vacant};

/// Records the version that all possible senders of a packet have confirmed: live members, replicas
/// that may be heads, and the edge.
pub(super) fn confirm(table: &mut PlannedTable, request: &TableRequest, heads: &[&FleetReplica]) {
    let version = |number| {
        request
            .ownership
            .report(number)
            .map_or(0, |report| report.version(request.service))
    };
    let members = table
        .chains
        .iter()
        .flatten()
        .map(|member| member.replica)
        .filter(|number| request.is_up(*number));
    let replicas = members
        .chain(heads.iter().map(|head| head.number))
        .map(version)
        .min()
        .unwrap_or(0);
    let had = replicas
        .min(request.ownership.edge(request.az).unwrap_or(u32::MAX))
        .min(table.version);
    if had > table.confirmed {
        table.confirmed = had;
        table.reports_received = request.ownership.last_report_number();
    }
}

/// Marks members that may own sessions as owners, and owners that have proved to own none as
/// standbys.
pub(super) fn update_owners(table: &mut PlannedTable, request: &TableRequest, vacant: &Vacant) {
    // In a member, version 0 means that it owns nothing.
    let version = table.version.max(1);
    let confirmed = table.confirmed;
    let reports_received = table.reports_received;
    let mut has_stood_in = false;
    for (bucket, chain) in table.chains.iter_mut().enumerate() {
        // A SYN goes to the first member that is up, so a standby gets it while all members before
        // it are down.
        let is_vacant = vacant.contains(&bucket);
        let mut dead_before = is_vacant
            || chain
                .first()
                .is_some_and(|head| !request.is_up(head.replica));
        // The head owns its sessions by its position. In a vacant bucket, the first member is not
        // the head yet.
        for member in chain.iter_mut().skip(usize::from(!is_vacant)) {
            let report = request.ownership.report(member.replica);
            let owns = report.is_some_and(|report| report.owns(request.service, bucket));
            let is_up = request.is_up(member.replica);
            if owns || dead_before && is_up {
                // An owner must report on the version that made it one, not only on the present
                // one.
                member.owner_until_version = if member.is_owner() {
                    member.owner_until_version
                } else {
                    version
                };
                has_stood_in |= dead_before && is_up;
            // The report must be about the present table. Its scans must have begun after all
            // possible senders confirmed that table: a late sender may have forwarded a SYN after
            // an earlier scan.
            } else if let Some(report) = report
                && report.version(request.service) >= member.owner_until_version
                && confirmed >= member.owner_until_version
                && report.scanned_after >= reports_received
            {
                member.owner_until_version = 0;
            }
            dead_before &= !is_up;
        }
    }
    if has_stood_in {
        // Scans from before a replica replaced a dead head do not prove that it owns nothing now.
        table.reports_received = request.ownership.last_report_number();
    }
}
