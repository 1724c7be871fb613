//! The cloud tier as it is kept: who registered under which number, the numbers of AZs, and the plan. Rows only: nothing is decided
//! here but the lowest free number.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use canal_model::fleet::ReplicaState;
use canal_model::ids::{AzName, BackendName, EdgeName, ReplicaName, ReplicaNumber, ServiceId};
use canal_model::plan::{Note, Plan, PlannedService};
use redb::{ReadableDatabase, ReadableTable, TableDefinition};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::database::{Step, Store};
use crate::error::StoreError;

/// Replica name to a JSON [`StoredReplica`].
pub(crate) const REPLICAS: TableDefinition<&str, &[u8]> = TableDefinition::new("replicas");
/// AZ to a JSON [`StoredEdge`].
pub(crate) const EDGES: TableDefinition<&str, &[u8]> = TableDefinition::new("edges");
/// AZ to its number.
pub(crate) const AZS: TableDefinition<&str, u8> = TableDefinition::new("azs");
/// Service id to a JSON `PlannedService`.
pub(crate) const PLANNED: TableDefinition<u32, &[u8]> = TableDefinition::new("planned");
/// One row, `plan`: a JSON [`Head`].
pub(crate) const PLAN: TableDefinition<&str, &[u8]> = TableDefinition::new("plan");

/// A registered replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredReplica {
    /// Its name, which is its token's.
    pub name: ReplicaName,
    /// Its number in bucket tables.
    pub number: ReplicaNumber,
    /// Its backend.
    pub backend: BackendName,
    /// Where it is.
    pub az: AzName,
    /// Its address on the underlay.
    pub underlay: Ipv4Addr,
    /// Where it was in its life.
    pub state: ReplicaState,
    /// An operator wants it drained.
    pub drain: bool,
}

/// The edge that last spoke for an AZ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredEdge {
    /// Its name, which is its token's.
    pub name: EdgeName,
    /// Its AZ.
    pub az: AzName,
    /// Its address on the underlay.
    pub underlay: Ipv4Addr,
}

/// The whole tier.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StoredFleet {
    /// Registered replicas, by name.
    pub replicas: Vec<StoredReplica>,
    /// The edges, by AZ.
    pub edges: Vec<StoredEdge>,
    /// The number of each AZ.
    pub azs: BTreeMap<AzName, u8>,
}

/// What a plan is beside its services.
#[derive(Serialize, Deserialize)]
struct Head {
    number: u32,
    parent: u32,
    notes: Vec<Note>,
}

impl Store {
    /// The tier as it was last kept.
    ///
    /// # Errors
    /// [`StoreError::Disk`] or [`StoreError::Damaged`].
    pub fn fleet(&self) -> Result<StoredFleet, StoreError> {
        self.read(|tx| {
            let mut fleet = StoredFleet::default();
            for entry in tx.open_table(REPLICAS)?.iter()? {
                fleet.replicas.push(row("replica", entry?.1.value())?);
            }
            for entry in tx.open_table(EDGES)?.iter()? {
                fleet.edges.push(row("edge", entry?.1.value())?);
            }
            for entry in tx.open_table(AZS)?.iter()? {
                let (az, number) = entry?;
                let az = AzName::new(az.value()).map_err(|e| redb::Error::Corrupted(e.to_string()))?;
                fleet.azs.insert(az, number.value());
            }
            Ok(fleet)
        })
    }

    /// Gives a replica the lowest free number, for as long as it is not forgotten. One that has a number already keeps it; the rest of its
    /// row becomes what is given. Its AZ's number is kept with it.
    ///
    /// # Errors
    /// [`StoreError::ReplicaNumbers`] when all are taken, [`StoreError::Disk`].
    pub fn register(
        &self,
        name: &ReplicaName,
        backend: &BackendName,
        az: (&AzName, u8),
        underlay: Ipv4Addr,
    ) -> Result<StoredReplica, StoreError> {
        let mut registered = None;
        self.write(|tx| {
            let mut table = tx.open_table(REPLICAS)?;
            let mut taken = BTreeSet::new();
            let mut own = None;
            for entry in table.iter()? {
                let held: StoredReplica = row("replica", entry?.1.value())?;
                taken.insert(held.number.get());
                if held.name == *name {
                    own = Some((held.number, held.drain));
                }
            }
            let limit = self.limits.replica_numbers;
            let free = (1..=limit).find(|n| !taken.contains(n)).and_then(|n| ReplicaNumber::new(n.into()).ok());
            let Some((number, drain)) = own.or(free.map(|n| (n, false))) else {
                return Ok(Step::Abort(StoreError::ReplicaNumbers { limit }));
            };
            let state = ReplicaState::Joining;
            let replica = StoredReplica { name: name.clone(), number, backend: backend.clone(), az: az.0.clone(), underlay, state, drain };
            table.insert(name.as_str(), json(&replica)?.as_slice())?;
            tx.open_table(AZS)?.insert(az.0.as_str(), az.1)?;
            registered = Some(replica);
            Ok(Step::Commit { before: Vec::new() })
        })?;
        registered.ok_or_else(|| StoreError::Disk { path: self.path().into(), why: "the transaction did not run".into() })
    }

    /// Keeps what changed of a registered replica.
    ///
    /// # Errors
    /// [`StoreError::Disk`].
    pub fn put_replica(&self, replica: &StoredReplica) -> Result<(), StoreError> {
        self.write(|tx| {
            tx.open_table(REPLICAS)?.insert(replica.name.as_str(), json(replica)?.as_slice())?;
            Ok(Step::Commit { before: Vec::new() })
        })
    }

    /// Frees a replica's number.
    ///
    /// # Errors
    /// [`StoreError::Disk`].
    pub fn forget_replica(&self, name: &ReplicaName) -> Result<(), StoreError> {
        self.write(|tx| {
            tx.open_table(REPLICAS)?.remove(name.as_str())?;
            Ok(Step::Commit { before: Vec::new() })
        })
    }

    /// Keeps the edge of an AZ, in place of the one before, and the AZ's number.
    ///
    /// # Errors
    /// [`StoreError::Disk`].
    pub fn put_edge(&self, edge: &StoredEdge, az_number: u8) -> Result<(), StoreError> {
        self.write(|tx| {
            tx.open_table(EDGES)?.insert(edge.az.as_str(), json(edge)?.as_slice())?;
            tx.open_table(AZS)?.insert(edge.az.as_str(), az_number)?;
            Ok(Step::Commit { before: Vec::new() })
        })
    }

    /// The plan in force; the first one has nothing in it.
    ///
    /// # Errors
    /// [`StoreError::Disk`] or [`StoreError::Damaged`].
    pub fn plan(&self) -> Result<Plan, StoreError> {
        self.read(|tx| {
            let Some(head) = tx.open_table(PLAN)?.get("plan")? else { return Ok(Plan::default()) };
            let Head { number, parent, notes } = row("plan", head.value())?;
            let mut services = BTreeMap::new();
            for entry in tx.open_table(PLANNED)?.iter()? {
                let (id, service) = entry?;
                let id = ServiceId::new(id.value()).map_err(|e| redb::Error::Corrupted(e.to_string()))?;
                services.insert(id, row::<PlannedService>("planned service", service.value())?);
            }
            Ok(Plan { number, parent, services, notes })
        })
    }

    /// Keeps `plan` whole, in one transaction. `before` is the plan that is on disk for certain: what is the same in it is not written
    /// again; `None` writes all.
    ///
    /// # Errors
    /// [`StoreError::Disk`]; the plan on disk is then one of the two.
    pub fn put_plan(&self, before: Option<&Plan>, plan: &Plan) -> Result<(), StoreError> {
        self.write(|tx| {
            let mut table = tx.open_table(PLANNED)?;
            match before {
                None => table.retain(|_, _| false)?,
                Some(before) => {
                    for id in before.services.keys().filter(|id| !plan.services.contains_key(id)) {
                        table.remove(id.get())?;
                    }
                }
            }
            for (id, service) in &plan.services {
                if before.and_then(|b| b.services.get(id)) != Some(service) {
                    table.insert(id.get(), json(service)?.as_slice())?;
                }
            }
            let head = Head { number: plan.number, parent: plan.parent, notes: plan.notes.clone() };
            tx.open_table(PLAN)?.insert("plan", json(&head)?.as_slice())?;
            Ok(Step::Commit { before: Vec::new() })
        })
    }

    pub(crate) fn read<T>(&self, f: impl FnOnce(&redb::ReadTransaction) -> Result<T, redb::Error>) -> Result<T, StoreError> {
        let mut inner = self.lock();
        let database = self.opened(&mut inner)?;
        let run = || f(&database.begin_read()?);
        run().map_err(|e| StoreError::from_redb(self.path(), e))
    }

    pub(crate) fn write(&self, f: impl FnOnce(&redb::WriteTransaction) -> Result<Step, redb::Error>) -> Result<(), StoreError> {
        let mut inner = self.lock();
        self.transact(&mut inner, f)
    }
}

pub(crate) fn json(value: &impl Serialize) -> Result<Vec<u8>, redb::Error> {
    serde_json::to_vec(value).map_err(|e| redb::Error::Corrupted(e.to_string()))
}

pub(crate) fn row<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, redb::Error> {
    serde_json::from_slice(bytes).map_err(|e| redb::Error::Corrupted(format!("a {what}: {e}")))
}
