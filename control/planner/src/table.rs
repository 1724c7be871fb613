//! Computes one service's bucket table in one AZ (Canal appendix C, fig. 26) from the last table
//! and the ownership reports. It does not choose backends and publishes nothing. Start at [`next`].
//!
//! * *Heads* are divided evenly among the live replicas (active, up, of the service's backends): by
//!   backend, then by replica. A head moves only if it is not live or its replica has more than its
//!   share.
//! * *Owners*: a replica that was a head stays behind the new one until it proves that it owns
//!   nothing. Its report must be based on the table in which it is no longer the head. The report
//!   must arrive after every live replica and the edge have confirmed that table. (Without the
//!   second condition, a replica that is late could still forward a SYN to it.) A replica that
//!   reports sessions is an owner too.
//! * *Order*: members never swap positions; a new head goes to the front. A member with owners
//!   behind it becomes the head only if no other replica is left. So two versions of a table that
//!   handle the same packet agree on the order of the members.
//! * *Dead replicas* lose their heads at once and stay as owners, so that a replica that comes back
//!   finds its sessions. They are removed when the fleet forgets them, and when a chain is full and
//!   has no standby to remove.
//! * *Full chains* change their head only if a member can be removed: a standby, or an owner that
//!   is dead. Otherwise the bucket is *blocked*.
//! * *Standbys* are live replicas behind the owners. Backends other than the head's come first, and
//!   the choice is spread for each head.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::fleet::{FleetReplica, Ownership, ReplicaState};
use canal_model::ids::{AzName, BackendName, ReplicaNumber, ServiceId, ServiceKey};
use canal_model::plan::{ChainMember, PlannedTable, UnmetConstraint};
use canal_model::program::{BUCKETS, CHAIN_LENGTH_MAX};

use crate::mix::mix;

mod owners;
mod shares;
mod standby_members;

/// The inputs for one table.
#[derive(Clone, Copy)]
pub struct TableRequest<'a> {
    pub service: ServiceId,
    pub az: &'a AzName,
    /// All replicas of the AZ, sorted by number.
    pub replicas: &'a [&'a FleetReplica],
    /// The service's backends in the AZ; `None` if it does not live here (any more).
    pub backends: Option<&'a BTreeSet<BackendName>>,
    pub ownership: &'a Ownership,
    /// Number of live replicas wanted behind each head.
    pub standby: usize,
    /// The version of the table if its chains change: the number of the plan that is being made.
    pub number: u32,
}

/// The result for one table.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TableResult {
    /// The table; `None` if the service does not live here and no session of it is left.
    pub table: Option<Arc<PlannedTable>>,
    /// Buckets whose head should change but cannot, because their chains are full of owners.
    pub blocked_buckets: Vec<u8>,
}

impl TableRequest<'_> {
    fn replica(&self, number: ReplicaNumber) -> Option<&FleetReplica> {
        self.replicas
            .binary_search_by_key(&number, |replica| replica.number)
            .ok()
            .map(|at| self.replicas[at])
    }
    fn is_up(&self, number: ReplicaNumber) -> bool {
        self.replica(number).is_some_and(|replica| replica.up)
    }
    fn is_of_service(&self, replica: &FleetReplica) -> bool {
        self.backends
            .is_some_and(|backends| backends.contains(&replica.backend))
    }
    /// Returns true if the replica may be a head.
    fn is_live(&self, number: ReplicaNumber) -> bool {
        self.replica(number).is_some_and(|replica| {
            replica.up && replica.state == ReplicaState::Active && self.is_of_service(replica)
        })
    }
    /// Returns the replicas that share the heads: the live ones. If there are none, draining
    /// replicas that are up, because a session there is better than none.
    fn heads(&self) -> Vec<&FleetReplica> {
        let of_service = || {
            self.replicas
                .iter()
                .copied()
                .filter(|replica| replica.up && self.is_of_service(replica))
        };
        let mut heads: Vec<&FleetReplica> = of_service()
            .filter(|replica| replica.state == ReplicaState::Active)
            .collect();
        if heads.is_empty() {
            heads = of_service()
                .filter(|replica| replica.state == ReplicaState::Draining)
                .collect();
        }
        heads
    }
}

/// Returns the next table. An unchanged table is the same `Arc`.
pub fn next(before: Option<&Arc<PlannedTable>>, request: &TableRequest) -> TableResult {
    let heads = request.heads();
    let mut table = match before {
        Some(before) if is_steady(before, request, &heads) => {
            return TableResult {
                table: Some(before.clone()),
                blocked_buckets: Vec::new(),
            };
        }
        Some(before) => before.as_ref().clone(),
        None => PlannedTable {
            version: 0,
            confirmed: 0,
            reports_received: 0,
            closing: 0,
            chains: vec![Vec::new(); BUCKETS],
        },
    };
    let mut vacant = forget(&mut table, request);
    if request.backends.is_none() {
        inherit(&mut table);
        return close(table, before, request);
    }
    table.closing = 0;
    owners::confirm(&mut table, request, &heads);
    owners::update_owners(&mut table, request, &vacant);
    let blocked_buckets = move_heads(&mut table, request, &heads, &mut vacant);
    inherit(&mut table);
    standby_members::set(&mut table, request, &heads);
    TableResult {
        table: Some(finish(table, before, request)),
        blocked_buckets,
    }
}

/// Returns the constraints of a table that could not be met, for the operator.
pub fn notes(
    next: &TableResult,
    request: &TableRequest,
    service: &ServiceKey,
) -> Vec<UnmetConstraint> {
    let mut notes = Vec::new();
    let Some(table) = &next.table else {
        return notes;
    };
    if request.backends.is_some()
        && !request
            .replicas
            .iter()
            .any(|replica| request.is_live(replica.number))
    {
        notes.push(UnmetConstraint::NoReplica {
            service: service.clone(),
            az: request.az.clone(),
        });
    }
    if !next.blocked_buckets.is_empty() {
        let chains = next
            .blocked_buckets
            .iter()
            .map(|bucket| &table.chains[usize::from(*bucket)]);
        let owners: BTreeSet<ReplicaNumber> = chains
            .flatten()
            .filter(|member| member.is_owner())
            .map(|member| member.replica)
            .collect();
        let (service, az) = (service.clone(), request.az.clone());
        notes.push(UnmetConstraint::Held {
            service,
            az,
            buckets: next.blocked_buckets.clone(),
            owners: owners.into_iter().collect(),
        });
    }
    notes
}

/// Returns true if there is nothing to do. It is called for every table in every plan, so it
/// allocates nothing for chains.
fn is_steady(table: &PlannedTable, request: &TableRequest, heads: &[&FleetReplica]) -> bool {
    if request.backends.is_none() || table.closing != 0 {
        return false;
    }
    let wanted = request
        .standby
        .min(CHAIN_LENGTH_MAX - 2)
        .min(heads.len().saturating_sub(1));
    let settled = table.chains.iter().all(|chain| {
        chain.len() == wanted + 1
            && chain.iter().all(|member| {
                !member.is_owner() && heads.iter().any(|head| head.number == member.replica)
            })
    });
    let owns_behind = |head: &&FleetReplica| {
        let owned = request
            .ownership
            .report(head.number)
            .and_then(|report| report.owned.get(&request.service));
        owned.is_some_and(|owned| {
            let behind = |bucket: usize| {
                table.chains[bucket]
                    .iter()
                    .skip(1)
                    .any(|member| member.replica == head.number)
            };
            (0..BUCKETS).any(|bucket| owned.buckets.has(bucket) && behind(bucket))
        })
    };
    settled && !heads.is_empty() && shares::is_even(table, heads) && !heads.iter().any(owns_behind)
}

/// Removes members that the fleet forgot or that moved to another AZ. Returns the buckets that lost
/// their head or have none yet.
fn forget(table: &mut PlannedTable, request: &TableRequest) -> Vacant {
    let is_known = |member: &ChainMember| request.replica(member.replica).is_some();
    let vacant = (0..BUCKETS)
        .filter(|bucket| !table.chains[*bucket].first().is_some_and(is_known))
        .collect();
    for chain in &mut table.chains {
        chain.retain(is_known);
    }
    vacant
}

/// Makes the first member of each chain its head. After a forgotten head with no candidate, that is
/// the next member; the sessions it owns are then the head's.
fn inherit(table: &mut PlannedTable) {
    for head in table
        .chains
        .iter_mut()
        .filter_map(|chain| chain.first_mut())
    {
        head.owner_until_version = 0;
    }
}

/// Closes a table, because the service left this AZ. This plan removes its gateway address from
/// nodes and DNS. The table stays until all data planes have confirmed this plan or a later one.
/// After that, every member must report that it owns nothing.
fn close(
    mut table: PlannedTable,
    before: Option<&Arc<PlannedTable>>,
    request: &TableRequest,
) -> TableResult {
    // A later plan that finds the table closing must not begin the wait again.
    if table.closing == 0 {
        table.closing = request.number;
    }
    let closing = table.closing;
    let members: BTreeSet<ReplicaNumber> = table
        .chains
        .iter()
        .flatten()
        .map(|member| member.replica)
        .collect();
    let report = |member: ReplicaNumber| request.ownership.report(member);
    if table.confirmed < closing {
        // A replica that is down forwards no packets, so it needs to confirm nothing.
        let has = |member: &ReplicaNumber| {
            !request.is_up(*member) || report(*member).is_some_and(|report| report.plan >= closing)
        };
        if members.iter().all(has)
            && request
                .ownership
                .edge(request.az)
                // An AZ without edges sends no sessions here, so nothing has to be confirmed.
                .is_none_or(|plan| plan >= closing)
        {
            (table.confirmed, table.reports_received) =
                (closing, request.ownership.last_report_number());
        }
    }
    // Only a scan after the confirmation proves that no later SYN reached the member.
    let owns_none = |member: &ReplicaNumber| match report(*member) {
        Some(report) => {
            report.scanned_after >= table.reports_received
                && report
                    .owned
                    .get(&request.service)
                    .is_none_or(|owned| owned.buckets.0 == 0)
        }
        // A replica that has sent no report to this controller may still have sessions.
        None => false,
    };
    if table.confirmed >= closing && members.iter().all(owns_none) {
        return TableResult::default();
    }
    TableResult {
        table: Some(finish(table, before, request)),
        blocked_buckets: Vec::new(),
    }
}

/// Completes the table. Its version increases only if a chain has different members.
fn finish(
    mut table: PlannedTable,
    before: Option<&Arc<PlannedTable>>,
    request: &TableRequest,
) -> Arc<PlannedTable> {
    let Some(before) = before else {
        table.version = request.number;
        return Arc::new(table);
    };
    if table == **before {
        return before.clone();
    }
    let names = |chain: &[ChainMember]| {
        chain
            .iter()
            .map(|member| member.replica)
            .collect::<Vec<_>>()
    };
    if table
        .chains
        .iter()
        .zip(&before.chains)
        .any(|(new, old)| names(new) != names(old))
    {
        table.version = request.number;
    }
    Arc::new(table)
}

/// Gives every bucket its head. Returns the buckets that are blocked.
fn move_heads(
    table: &mut PlannedTable,
    request: &TableRequest,
    heads: &[&FleetReplica],
    vacant: &mut Vacant,
) -> Vec<u8> {
    if heads.is_empty() {
        return Vec::new();
    }
    let mut missing = shares::missing(table, request, heads, vacant);
    let movers = shares::movers(table, heads, vacant, &mut missing);
    let mut blocked_buckets = Vec::new();
    for bucket in movers {
        let chain = &mut table.chains[bucket];
        let best = missing
            .iter()
            .filter(|(_, missing)| **missing > 0)
            .map(|(number, missing)| (*number, *missing))
            .min_by_key(|(number, missing)| {
                (
                    cost(chain, *number),
                    std::cmp::Reverse(*missing),
                    mix([request.service.get().into(), number.get().into(), 2]),
                )
            });
        let Some((head, _)) = best else { continue };
        if promote(chain, head, request, vacant.contains(&bucket)) {
            vacant.remove(&bucket);
            *missing.entry(head).or_default() -= 1;
        } else {
            // `bucket` is below 128, so the conversion is lossless.
            blocked_buckets.push(bucket as u8);
        }
    }
    blocked_buckets.sort_unstable();
    blocked_buckets
}

/// Returns the cost of making the replica this chain's head; smaller is better.
fn cost(chain: &[ChainMember], number: ReplicaNumber) -> u8 {
    match chain.iter().position(|member| member.replica == number) {
        Some(place) if chain[place + 1..].iter().any(ChainMember::is_owner) => 2,
        Some(_) => 0,
        None => 1,
    }
}

/// Makes the replica the head of the chain and the old head, if there is one, an owner. Returns
/// false, without a change, if the chain is full.
fn promote(
    chain: &mut Vec<ChainMember>,
    head: ReplicaNumber,
    request: &TableRequest,
    is_vacant: bool,
) -> bool {
    let protected = usize::from(!is_vacant);
    let place = chain.iter().position(|member| member.replica == head);
    let droppable = || {
        let behind = || chain.iter().skip(protected);
        // A standby owns nothing, so it is removed first; a dead owner only if there is no standby.
        let standby = behind().rposition(|member| !member.is_owner());
        standby
            .or_else(|| behind().rposition(|member| !request.is_up(member.replica)))
            .map(|place| place + protected)
    };
    let leaves = match place {
        Some(place) => Some(place),
        None if chain.len() < CHAIN_LENGTH_MAX => None,
        None => match droppable() {
            Some(place) => Some(place),
            None => return false,
        },
    };
    if let Some(place) = leaves {
        chain.remove(place);
    }
    if let Some(old) = chain.first_mut().filter(|_| !is_vacant) {
        old.owner_until_version = request.number;
    }
    chain.insert(
        0,
        ChainMember {
            replica: head,
            owner_until_version: 0,
        },
    );
    true
}

/// The buckets that have no head.
type Vacant = BTreeSet<usize>;

/// A number of buckets per replica.
type Counts = BTreeMap<ReplicaNumber, usize>;

#[cfg(test)]
mod tests {
    use super::*;

    fn number(n: usize) -> ReplicaNumber {
        ReplicaNumber::new(n as u32).unwrap()
    }

    fn replica(n: usize, up: bool) -> FleetReplica {
        FleetReplica {
            name: format!("r{n}").parse().unwrap(),
            number: number(n),
            backend: "a1".parse().unwrap(),
            az: "a".parse().unwrap(),
            underlay: [250, 1, 0, n as u8].into(),
            state: ReplicaState::Active,
            up,
        }
    }

    #[test]
    fn a_full_chain_drops_standbys_then_dead_owners_and_never_live_owners() {
        // A dead replica 2 may come back with its sessions. A standby has none, so it leaves
        // first.
        let new = CHAIN_LENGTH_MAX + 1;
        for (dead, standby, want_gone) in [
            (Some(2), Some(CHAIN_LENGTH_MAX), Some(CHAIN_LENGTH_MAX)),
            (Some(2), None, Some(2)),
            (None, None, None),
        ] {
            let fleet: Vec<FleetReplica> = (1..=new).map(|n| replica(n, Some(n) != dead)).collect();
            let replicas: Vec<&FleetReplica> = fleet.iter().collect();
            let az = "a".parse().unwrap();
            let backends = ["a1".parse().unwrap()].into();
            let ownership = Ownership::default();
            let service = ServiceId::new(1).unwrap();
            let request = TableRequest {
                service,
                az: &az,
                replicas: &replicas,
                backends: Some(&backends),
                ownership: &ownership,
                standby: 1,
                // Any plan after version 5, in which the owners below became owners.
                number: 9,
            };
            // 0 marks a replica that owns nothing by the table: the head and the standby.
            let owner_until = |n: usize| if n == 1 || Some(n) == standby { 0 } else { 5 };
            let member = |n| ChainMember {
                replica: number(n),
                owner_until_version: owner_until(n),
            };
            let before: Vec<ChainMember> = (1..=CHAIN_LENGTH_MAX).map(member).collect();
            let mut chain = before.clone();
            assert_eq!(
                promote(&mut chain, number(new), &request, false),
                want_gone.is_some(),
                "{dead:?} {standby:?}"
            );
            let left: Vec<ReplicaNumber> = chain.iter().map(|member| member.replica).collect();
            let protected = (1..=CHAIN_LENGTH_MAX).filter(|n| Some(*n) != want_gone);
            let want: Vec<ReplicaNumber> = want_gone
                .map(|_| new)
                .into_iter()
                .chain(protected)
                .map(number)
                .collect();
            assert_eq!(left, want, "{dead:?} {standby:?}");
        }
    }
}
