//! One service's bucket table in one AZ (Canal appendix C, fig. 26): the next one from the last and from what replicas own. It does not
//! choose backends, and tells nobody.
//!
//! * *Heads* are shared out evenly over the live replicas (active, up, of the service's backends): by backend, then by replica. A head
//!   moves only if it is not live or its replica has more than its part.
//! * *Owners*: a replica that was a head stays behind the new one until it proves that it owns nothing: it must say so, having had the
//!   table in which it was no longer the head, after every live replica and the edge were heard to have that table too. (Without the
//!   second half, a replica that is late could still forward a SYN to it.) Whoever says that it owns sessions is an owner as well.
//! * *Order*: members never change places; a new head goes to the front. A head is taken from behind owners only if nobody else is left,
//!   so that two versions of a table, met by one packet, agree on who comes after whom.
//! * *Dead replicas* give up their heads at once and stay as owners: one that comes back finds its sessions. They are dropped when the
//!   fleet forgets them, and before anybody else when a chain is full.
//! * *Full chains* move only if someone can be dropped: a standby, or an owner that is dead. Else the bucket is *held*.
//! * *Standbys* are live replicas behind the owners, of other backends than the head's first, spread over them for each head.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::fleet::{FleetReplica, Ownership, ReplicaState};
use canal_model::ids::{AzName, BackendName, ReplicaNumber, ServiceId, ServiceKey};
use canal_model::plan::{Note, PlannedTable, Seat};
use canal_model::program::{BUCKETS, CHAIN};

use crate::mix::mix;

mod owners;
mod shares;
mod standbys;

/// What a table is made from.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    pub service: ServiceId,
    pub az: &'a AzName,
    /// All replicas of the AZ, sorted by number.
    pub replicas: &'a [&'a FleetReplica],
    /// The service's backends in the AZ; `None`: it does not live here (any more).
    pub backends: Option<&'a BTreeSet<BackendName>>,
    pub ownership: &'a Ownership,
    /// Live replicas wanted behind each head.
    pub standby: usize,
    /// The version that the table gets if its chains change: the number of the plan in the making.
    pub number: u32,
}

/// What became of a table.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Next {
    /// `None`: the service does not live here, and no session of it is left.
    pub table: Option<Arc<PlannedTable>>,
    /// Buckets whose head should move, and cannot: their chains are full of owners.
    pub held: Vec<u8>,
}

impl Asked<'_> {
    fn replica(&self, number: ReplicaNumber) -> Option<&FleetReplica> {
        self.replicas.binary_search_by_key(&number, |replica| replica.number).ok().map(|at| self.replicas[at])
    }
    fn is_up(&self, number: ReplicaNumber) -> bool {
        self.replica(number).is_some_and(|replica| replica.up)
    }
    fn is_of_service(&self, replica: &FleetReplica) -> bool {
        self.backends.is_some_and(|backends| backends.contains(&replica.backend))
    }
    /// May it be a head?
    fn is_live(&self, number: ReplicaNumber) -> bool {
        self.replica(number).is_some_and(|replica| replica.up && replica.state == ReplicaState::Active && self.is_of_service(replica))
    }
    /// Who shares the heads: live replicas; if there are none, draining ones that are up, because a session is better there than nowhere.
    fn heads(&self) -> Vec<&FleetReplica> {
        let of_service = || self.replicas.iter().copied().filter(|replica| replica.up && self.is_of_service(replica));
        let mut heads: Vec<&FleetReplica> = of_service().filter(|replica| replica.state == ReplicaState::Active).collect();
        if heads.is_empty() {
            heads = of_service().filter(|replica| replica.state == ReplicaState::Draining).collect();
        }
        heads
    }
}

/// The next table. What is the same as before is the same `Arc`.
pub fn next(before: Option<&Arc<PlannedTable>>, asked: &Asked) -> Next {
    let heads = asked.heads();
    let mut table = match before {
        Some(before) if is_steady(before, asked, &heads) => return Next { table: Some(before.clone()), held: Vec::new() },
        Some(before) => before.as_ref().clone(),
        None => PlannedTable { version: 0, confirmed: 0, heard: 0, closing: 0, chains: vec![Vec::new(); BUCKETS] },
    };
    let mut vacant = forget(&mut table, asked);
    if asked.backends.is_none() {
        inherit(&mut table);
        return close(table, before, asked);
    }
    table.closing = 0;
    owners::confirm(&mut table, asked, &heads);
    owners::judge(&mut table, asked, &vacant);
    let held = move_heads(&mut table, asked, &heads, &mut vacant);
    inherit(&mut table);
    standbys::set(&mut table, asked, &heads);
    Next { table: Some(finish(table, before, asked)), held }
}

/// What an operator must know of a table.
pub fn notes(next: &Next, asked: &Asked, service: &ServiceKey) -> Vec<Note> {
    let mut notes = Vec::new();
    let Some(table) = &next.table else { return notes };
    if asked.backends.is_some() && !asked.replicas.iter().any(|replica| asked.is_live(replica.number)) {
        notes.push(Note::NoReplica { service: service.clone(), az: asked.az.clone() });
    }
    if !next.held.is_empty() {
        let chains = next.held.iter().map(|bucket| &table.chains[usize::from(*bucket)]);
        let owners: BTreeSet<ReplicaNumber> = chains.flatten().filter(|seat| seat.is_owner()).map(|seat| seat.replica).collect();
        let (service, az) = (service.clone(), asked.az.clone());
        notes.push(Note::Held { service, az, buckets: next.held.clone(), owners: owners.into_iter().collect() });
    }
    notes
}

/// Is there nothing to do? Looked at for every table with every plan, so it allocates nothing for chains.
fn is_steady(table: &PlannedTable, asked: &Asked, heads: &[&FleetReplica]) -> bool {
    if asked.backends.is_none() || table.closing != 0 {
        return false;
    }
    let wanted = asked.standby.min(CHAIN - 2).min(heads.len().saturating_sub(1));
    let settled = table.chains.iter().all(|chain| {
        chain.len() == wanted + 1 && chain.iter().all(|seat| !seat.is_owner() && heads.iter().any(|head| head.number == seat.replica))
    });
    let owns_behind = |head: &&FleetReplica| {
        let owned = asked.ownership.report(head.number).and_then(|(_, report)| report.owned.get(&asked.service));
        owned.is_some_and(|owned| {
            let behind = |bucket: usize| table.chains[bucket].iter().skip(1).any(|seat| seat.replica == head.number);
            (0..BUCKETS).any(|bucket| owned.buckets.has(bucket) && behind(bucket))
        })
    };
    settled && !heads.is_empty() && shares::is_even(table, heads) && !heads.iter().any(owns_behind)
}

/// Members that the fleet forgot, or that are in another AZ now, are gone. Says which buckets lost their head, or have none yet.
fn forget(table: &mut PlannedTable, asked: &Asked) -> Vacant {
    let is_known = |seat: &Seat| asked.replica(seat.replica).is_some();
    let vacant = (0..BUCKETS).filter(|bucket| !table.chains[*bucket].first().is_some_and(is_known)).collect();
    for chain in &mut table.chains {
        chain.retain(is_known);
    }
    vacant
}

/// Who follows a forgotten head if nobody may be one: the next. Whatever it owns, it owns as the head now.
fn inherit(table: &mut PlannedTable) {
    for head in table.chains.iter_mut().filter_map(|chain| chain.first_mut()) {
        head.left = 0;
    }
}

/// The service left this AZ. Its gateway address is gone from nodes and DNS with this plan; the table stays as it is until everybody was
/// heard to have this plan or a later one, and every replica of it said after that that it owns nothing.
fn close(mut table: PlannedTable, before: Option<&Arc<PlannedTable>>, asked: &Asked) -> Next {
    if table.closing == 0 {
        table.closing = asked.number;
    }
    let closing = table.closing;
    let members: BTreeSet<ReplicaNumber> = table.chains.iter().flatten().map(|seat| seat.replica).collect();
    let report = |member: ReplicaNumber| asked.ownership.report(member);
    if table.confirmed < closing {
        let has = |member: &ReplicaNumber| !asked.is_up(*member) || report(*member).is_some_and(|(_, report)| report.plan >= closing);
        if members.iter().all(has) && asked.ownership.edge(asked.az).is_none_or(|plan| plan >= closing) {
            (table.confirmed, table.heard) = (closing, asked.ownership.heard());
        }
    }
    let owns_none = |member: &ReplicaNumber| match report(*member) {
        Some((at, report)) => at > table.heard && report.owned.get(&asked.service).is_none_or(|owned| owned.buckets.0 == 0),
        None => false,
    };
    if table.confirmed >= closing && members.iter().all(owns_none) {
        return Next::default();
    }
    Next { table: Some(finish(table, before, asked)), held: Vec::new() }
}

/// The version rises only if a chain is different.
fn finish(mut table: PlannedTable, before: Option<&Arc<PlannedTable>>, asked: &Asked) -> Arc<PlannedTable> {
    let Some(before) = before else {
        table.version = asked.number;
        return Arc::new(table);
    };
    if table == **before {
        return before.clone();
    }
    let names = |chain: &[Seat]| chain.iter().map(|seat| seat.replica).collect::<Vec<_>>();
    if table.chains.iter().zip(&before.chains).any(|(new, old)| names(new) != names(old)) {
        table.version = asked.number;
    }
    Arc::new(table)
}

/// Gives every bucket its head. Returns the buckets that are held.
fn move_heads(table: &mut PlannedTable, asked: &Asked, heads: &[&FleetReplica], vacant: &mut Vacant) -> Vec<u8> {
    if heads.is_empty() {
        return Vec::new();
    }
    let mut missing = shares::missing(table, asked, heads, vacant);
    let movers = shares::movers(table, heads, vacant, &mut missing);
    let mut held = Vec::new();
    for bucket in movers {
        let chain = &mut table.chains[bucket];
        let best = missing.iter().filter(|(_, missing)| **missing > 0).map(|(number, missing)| (*number, *missing)).min_by_key(
            |(number, missing)| {
                (cost(chain, *number), std::cmp::Reverse(*missing), mix([asked.service.get().into(), number.get().into(), 2]))
            },
        );
        let Some((head, _)) = best else { continue };
        if promote(chain, head, asked, vacant.contains(&bucket)) {
            vacant.remove(&bucket);
            *missing.entry(head).or_default() -= 1;
        } else {
            // `bucket` is below 128.
            held.push(bucket as u8);
        }
    }
    held.sort_unstable();
    held
}

/// What it costs to make the replica this chain's head; smaller is better.
fn cost(chain: &[Seat], number: ReplicaNumber) -> u8 {
    match chain.iter().position(|seat| seat.replica == number) {
        Some(place) if chain[place + 1..].iter().any(Seat::is_owner) => 2,
        Some(_) => 0,
        None => 1,
    }
}

/// Makes the replica the chain's head, and the head an owner, if there is one. False: no room, nothing was changed.
fn promote(chain: &mut Vec<Seat>, head: ReplicaNumber, asked: &Asked, is_vacant: bool) -> bool {
    let kept = usize::from(!is_vacant);
    let place = chain.iter().position(|seat| seat.replica == head);
    let droppable = || {
        let behind = || chain.iter().skip(kept);
        let standby = behind().rposition(|seat| !seat.is_owner());
        standby.or_else(|| behind().rposition(|seat| !asked.is_up(seat.replica))).map(|place| place + kept)
    };
    let leaves = match place {
        Some(place) => Some(place),
        None if chain.len() < CHAIN => None,
        None => match droppable() {
            Some(place) => Some(place),
            None => return false,
        },
    };
    if let Some(place) = leaves {
        chain.remove(place);
    }
    if let Some(old) = chain.first_mut().filter(|_| !is_vacant) {
        old.left = asked.number;
    }
    chain.insert(0, Seat { replica: head, left: 0 });
    true
}

/// Buckets without a head.
type Vacant = BTreeSet<usize>;

/// Numbers by replica.
type Counts = BTreeMap<ReplicaNumber, usize>;
