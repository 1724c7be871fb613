//! What the planner decided: where services live, their gateway numbers, their bucket tables with what must be remembered of owners.
//! A plan is immutable and names its parent. No deciding here, and nothing of how data planes are told.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::fleet::Placement;
use crate::ids::{AzName, ReplicaNumber, ServiceId, ServiceKey, TenantName, Vni};
use crate::program::{BUCKETS, BucketTable, CHAIN};

/// A whole plan. It can be kept on disk (serde) and is the next plan's parent.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Plan {
    /// Raised with each change. Also the version of the tables that this plan changed. The first plan has 1.
    pub number: u32,
    /// The plan that this one was made from; 0 for none.
    pub parent: u32,
    pub services: BTreeMap<ServiceId, PlannedService>,
    /// What could not be satisfied, and why.
    pub notes: Vec<Note>,
}

/// What was planned for one service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedService {
    pub key: ServiceKey,
    pub vni: Vni,
    /// Its gateway number: which address of each AZ's part of the tenant's ranges it has. From 1; it never changes.
    pub number: u32,
    /// `None`: there is no backend at all.
    pub placement: Option<Placement>,
    /// By AZ. An AZ that the service left keeps its table while sessions are there.
    #[serde(serialize_with = "tables_out", deserialize_with = "tables_in")]
    pub tables: BTreeMap<AzName, Arc<PlannedTable>>,
}

/// A bucket table and what the planner remembers of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedTable {
    /// Number of the plan that last changed the chains.
    pub version: u32,
    /// All live replicas of the table, and its edge, were heard to have at least this version …
    pub confirmed: u32,
    /// … when so many reports had been heard. Only what a replica says later proves that it owns nothing.
    pub heard: u64,
    /// The plan in which the service left this AZ; 0 while it lives here.
    pub closing: u32,
    /// [`BUCKETS`] of them; the first seat is the head.
    #[serde(serialize_with = "chains_out", deserialize_with = "chains_in")]
    pub chains: Vec<Vec<Seat>>,
}

/// A replica's place in a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Seat {
    pub replica: ReplicaNumber,
    /// 0: it is the head, or a standby that owns nothing. Else it may own sessions: it is an *owner* until it says that it owns none,
    /// at this version of the table or a later one.
    pub left: u32,
}

impl Seat {
    /// May it own sessions although it is not the head?
    pub fn is_owner(&self) -> bool {
        self.left != 0
    }
}

impl Plan {
    /// The service's table in the AZ as data planes are told.
    pub fn table(&self, service: ServiceId, az: &AzName) -> Option<BucketTable> {
        let planned = self.services.get(&service)?;
        let table = planned.tables.get(az)?;
        Some(BucketTable {
            service: planned.key.clone(),
            id: service,
            az: az.clone(),
            vni: planned.vni,
            version: table.version,
            chains: table.chains.iter().map(|chain| chain.iter().map(|seat| seat.replica).collect()).collect(),
        })
    }
    /// In how many chains the replica is. A draining replica with 0 may leave.
    pub fn seats(&self, replica: ReplicaNumber) -> usize {
        let tables = self.services.values().flat_map(|service| service.tables.values());
        tables.flat_map(|table| &table.chains).flatten().filter(|seat| seat.replica == replica).count()
    }
    /// The seed of [`crate::fleet::Ownership::after`] when a controller starts with this plan.
    pub fn heard(&self) -> u64 {
        self.services.values().flat_map(|service| service.tables.values()).map(|table| table.heard).max().unwrap_or(0)
    }
}

/// What a plan could not satisfy, and why. Sorted by service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Note {
    /// Fewer backends in the home AZ than asked for: the AZ has no more.
    FewAtHome { service: ServiceKey, az: AzName, wanted: usize, given: usize },
    /// Fewer backends in other AZs than asked for: they have no more.
    FewAway { service: ServiceKey, wanted: usize, given: usize },
    /// All its backends are also another service's: no other combination is free.
    Shared { service: ServiceKey, with: ServiceKey },
    /// Its tenant asked for an AZ without backends.
    HomeUnknown { service: ServiceKey, az: AzName },
    /// There is no backend at all.
    NoBackend { service: ServiceKey },
    /// No replica that may be a head is alive here.
    NoReplica { service: ServiceKey, az: AzName },
    /// Buckets that keep their head because their chains are full of owners.
    Held { service: ServiceKey, az: AzName, buckets: Vec<u8>, owners: Vec<ReplicaNumber> },
    /// No gateway address: the text says why.
    NoAddress { service: ServiceKey, tenant: TenantName, az: AzName, why: String },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::FewAtHome { service, az, wanted, given } => {
                write!(f, "{service}: {given} of {wanted} backends in its home AZ {az}; add backends there")
            }
            Note::FewAway { service, wanted, given } => {
                write!(f, "{service}: {given} of {wanted} backends outside its home AZ; add backends in another AZ")
            }
            Note::Shared { service, with } => {
                write!(f, "{service}: all its backends are those of {with}, so one failure may take both; add backends")
            }
            Note::HomeUnknown { service, az } => {
                write!(f, "{service}: its tenant asks for home AZ {az}, which has no backend; add one there, or change the tenant")
            }
            Note::NoBackend { service } => write!(f, "{service}: there is no gateway backend; start a replica"),
            Note::NoReplica { service, az } => {
                write!(f, "{service}: no active replica of its backends is up in {az}; start or undrain one")
            }
            Note::Held { service, az, buckets, owners } => write!(
                f,
                "{service}: {} buckets in {az} keep their head, their chains are full of sessions of replicas {}; let drains end first",
                buckets.len(),
                owners.iter().map(|n| n.get().to_string()).collect::<Vec<_>>().join(", "),
            ),
            Note::NoAddress { service, az, why, .. } => write!(f, "{service}: no gateway address in {az}: {why}"),
        }
    }
}

fn tables_out<S: Serializer>(tables: &BTreeMap<AzName, Arc<PlannedTable>>, s: S) -> Result<S::Ok, S::Error> {
    s.collect_map(tables.iter().map(|(az, table)| (az, table.as_ref())))
}

fn tables_in<'de, D: Deserializer<'de>>(d: D) -> Result<BTreeMap<AzName, Arc<PlannedTable>>, D::Error> {
    let plain = BTreeMap::<AzName, PlannedTable>::deserialize(d)?;
    Ok(plain.into_iter().map(|(az, table)| (az, Arc::new(table))).collect())
}

/// One text for a table: a plan of thousands of services stays small and can still be read. `7 3@12 9,…`: replica 7 is the head,
/// 3 left at version 12, 9 is a standby.
fn chains_out<S: Serializer>(chains: &[Vec<Seat>], s: S) -> Result<S::Ok, S::Error> {
    let mut text = String::with_capacity(chains.len() * 12);
    for (bucket, chain) in chains.iter().enumerate() {
        if bucket > 0 {
            text.push(',');
        }
        for (place, seat) in chain.iter().enumerate() {
            if place > 0 {
                text.push(' ');
            }
            text += &seat.replica.get().to_string();
            if seat.left > 0 {
                text.push('@');
                text += &seat.left.to_string();
            }
        }
    }
    s.serialize_str(&text)
}

fn chains_in<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Vec<Seat>>, D::Error> {
    use serde::de::Error;
    let text = String::deserialize(d)?;
    let number = |part: &str| part.parse::<u32>().map_err(|_| D::Error::custom(format!("{part:?} in a chain is no number")));
    let seat = |part: &str| {
        let (replica, left) = match part.split_once('@') {
            Some((replica, left)) => (number(replica)?, number(left)?),
            None => (number(part)?, 0),
        };
        Ok(Seat { replica: ReplicaNumber::new(replica).map_err(D::Error::custom)?, left })
    };
    let chains: Vec<Vec<Seat>> = text
        .split(',')
        .map(|chain| chain.split(' ').filter(|part| !part.is_empty()).map(seat).collect())
        .collect::<Result<_, D::Error>>()?;
    if chains.len() != BUCKETS || chains.iter().any(|chain| chain.len() > CHAIN) {
        return Err(D::Error::custom(format!("a table has {BUCKETS} chains of at most {CHAIN} replicas")));
    }
    Ok(chains)
}
