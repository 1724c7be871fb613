//! Rows of the cloud tier: registered replicas with their numbers, edges, AZ numbers, and the plan.
//!
//! The only decision here is the lowest free replica number; the planner and the fleet membership
//! decide everything else.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use canal_model::fleet::ReplicaState;
use canal_model::ids::{AzName, BackendName, EdgeName, ReplicaName, ReplicaNumber, ServiceId};
use canal_model::plan::{Plan, PlannedService, UnmetConstraint};
use redb::{ReadableDatabase, ReadableTable, TableDefinition};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::database::{Store, TransactionOutcome};
use crate::error::StoreError;

/// Maps a replica name to a JSON [`StoredReplica`].
pub(crate) const REPLICAS: TableDefinition<&str, &[u8]> = TableDefinition::new("replicas");
/// Maps `edge:NAME` to a JSON [`StoredEdge`]. Older files contain one edge per AZ, with the AZ's
/// name as the key.
pub(crate) const EDGES: TableDefinition<&str, &[u8]> = TableDefinition::new("edges");
/// Maps an AZ to its number.
pub(crate) const AZS: TableDefinition<&str, u8> = TableDefinition::new("azs");
/// Maps a service id to a JSON `PlannedService`.
pub(crate) const PLANNED: TableDefinition<u32, &[u8]> = TableDefinition::new("planned");
/// Contains one row, `plan`: a JSON [`PlanHeader`].
pub(crate) const PLAN: TableDefinition<&str, &[u8]> = TableDefinition::new("plan");

/// A registered replica of the cloud tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredReplica {
    /// The replica's name, which is also the name in its token.
    pub name: ReplicaName,
    /// The replica's number in bucket tables.
    pub number: ReplicaNumber,
    /// The backend that the replica belongs to.
    pub backend: BackendName,
    /// The AZ in which the replica runs.
    pub az: AzName,
    /// The replica's address on the underlay.
    pub underlay: Ipv4Addr,
    /// The state in the replica's life cycle at the last write.
    pub state: ReplicaState,
    /// An operator has requested that the replica drains.
    pub drain: bool,
}

/// A registered edge of an AZ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredEdge {
    /// The edge's name, which is also the name in its token.
    pub name: EdgeName,
    /// The AZ that the edge serves.
    pub az: AzName,
    /// The edge's address on the underlay.
    pub underlay: Ipv4Addr,
    /// The address of the tunnel end, if it differs from `underlay`. All edges of an AZ share it.
    #[serde(default)]
    pub anycast: Option<Ipv4Addr>,
}

impl StoredEdge {
    /// Returns the address at which the AZ's tunnels end.
    pub fn tunnel_end(&self) -> Ipv4Addr {
        self.anycast.unwrap_or(self.underlay)
    }
}

/// All stored rows of the cloud tier except the plan.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StoredFleet {
    /// Registered replicas, sorted by name.
    pub replicas: Vec<StoredReplica>,
    /// Registered edges, in no guaranteed order.
    pub edges: Vec<StoredEdge>,
    /// The number of each AZ that a replica or edge has registered in.
    pub azs: BTreeMap<AzName, u8>,
}

/// The fields of a plan other than its services.
#[derive(Serialize, Deserialize)]
struct PlanHeader {
    number: u32,
    parent: u32,
    notes: Vec<UnmetConstraint>,
}

impl Store {
    /// Reads the replicas, edges and AZ numbers.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`] or [`StoreError::Damaged`].
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
                let az =
                    AzName::new(az.value()).map_err(|e| redb::Error::Corrupted(e.to_string()))?;
                fleet.azs.insert(az, number.value());
            }
            Ok(fleet)
        })
    }

    /// Registers a replica under the lowest free number. It has this number until
    /// [`Store::forget_replica`].
    ///
    /// A replica that is already registered retains its number and its drain request; the rest of
    /// its row is replaced. The AZ's number is stored too.
    ///
    /// # Errors
    /// Returns [`StoreError::ReplicaNumbers`] if all numbers are in use, or [`StoreError::Disk`].
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
                let stored: StoredReplica = row("replica", entry?.1.value())?;
                taken.insert(stored.number.get());
                if stored.name == *name {
                    own = Some((stored.number, stored.drain));
                }
            }
            // A replica that registers again keeps its number, because bucket tables name replicas
            // by number.
            let limit = self.limits.replica_numbers;
            let free = (1..=limit)
                .find(|n| !taken.contains(n))
                .and_then(|n| ReplicaNumber::new(n.into()).ok());
            let Some((number, drain)) = own.or(free.map(|n| (n, false))) else {
                return Ok(TransactionOutcome::Abort(StoreError::ReplicaNumbers {
                    limit,
                }));
            };
            // The process may be new, so it must acknowledge its tenants before it gets sessions.
            let state = ReplicaState::Joining;
            let replica = StoredReplica {
                name: name.clone(),
                number,
                backend: backend.clone(),
                az: az.0.clone(),
                underlay,
                state,
                drain,
            };
            table.insert(name.as_str(), json(&replica)?.as_slice())?;
            tx.open_table(AZS)?.insert(az.0.as_str(), az.1)?;
            registered = Some(replica);
            Ok(TransactionOutcome::Commit { before: Vec::new() })
        })?;
        // A transaction that committed has set it.
        registered.ok_or_else(|| StoreError::Disk {
            path: self.path().into(),
            why: "the transaction did not run".into(),
        })
    }

    /// Replaces the row of a registered replica.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`].
    pub fn put_replica(&self, replica: &StoredReplica) -> Result<(), StoreError> {
        self.write(|tx| {
            tx.open_table(REPLICAS)?
                .insert(replica.name.as_str(), json(replica)?.as_slice())?;
            Ok(TransactionOutcome::Commit { before: Vec::new() })
        })
    }

    /// Deletes a replica's row, which frees its number.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`].
    pub fn forget_replica(&self, name: &ReplicaName) -> Result<(), StoreError> {
        self.write(|tx| {
            tx.open_table(REPLICAS)?.remove(name.as_str())?;
            Ok(TransactionOutcome::Commit { before: Vec::new() })
        })
    }

    /// Stores an edge and its AZ's number, and removes the edges in `replaces`.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`].
    pub fn put_edge(
        &self,
        edge: &StoredEdge,
        replaces: &[EdgeName],
        az_number: u8,
    ) -> Result<(), StoreError> {
        self.write(|tx| {
            let mut table = tx.open_table(EDGES)?;
            remove_edges(&mut table, replaces)?;
            remove_edges(&mut table, std::slice::from_ref(&edge.name))?;
            table.insert(edge_key(&edge.name).as_str(), json(edge)?.as_slice())?;
            tx.open_table(AZS)?.insert(edge.az.as_str(), az_number)?;
            Ok(TransactionOutcome::Commit { before: Vec::new() })
        })
    }

    /// Removes the row of an edge.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`].
    pub fn forget_edge(&self, name: &EdgeName) -> Result<(), StoreError> {
        self.write(|tx| {
            remove_edges(&mut tx.open_table(EDGES)?, std::slice::from_ref(name))?;
            Ok(TransactionOutcome::Commit { before: Vec::new() })
        })
    }

    /// Returns the plan in force. Without a stored plan, it is the empty default plan.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`] or [`StoreError::Damaged`].
    pub fn plan(&self) -> Result<Plan, StoreError> {
        self.read(|tx| {
            let Some(head) = tx.open_table(PLAN)?.get("plan")? else {
                return Ok(Plan::default());
            };
            let PlanHeader {
                number,
                parent,
                notes,
            } = row("plan", head.value())?;
            let mut services = BTreeMap::new();
            for entry in tx.open_table(PLANNED)?.iter()? {
                let (id, service) = entry?;
                let id = ServiceId::new(id.value())
                    .map_err(|e| redb::Error::Corrupted(e.to_string()))?;
                services.insert(
                    id,
                    row::<PlannedService>("planned service", service.value())?,
                );
            }
            Ok(Plan {
                number,
                parent,
                services,
                notes,
            })
        })
    }

    /// Stores `plan` in one transaction. `before` is the plan that is certainly on disk: services
    /// that are equal in both are not written again. With `None`, all services are written.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`]; the plan on disk is then one of the two.
    pub fn put_plan(&self, before: Option<&Plan>, plan: &Plan) -> Result<(), StoreError> {
        self.write(|tx| {
            let mut table = tx.open_table(PLANNED)?;
            match before {
                None => table.retain(|_, _| false)?,
                Some(before) => {
                    for id in before
                        .services
                        .keys()
                        .filter(|id| !plan.services.contains_key(id))
                    {
                        table.remove(id.get())?;
                    }
                }
            }
            for (id, service) in &plan.services {
                if before.and_then(|b| b.services.get(id)) != Some(service) {
                    table.insert(id.get(), json(service)?.as_slice())?;
                }
            }
            let head = PlanHeader {
                number: plan.number,
                parent: plan.parent,
                notes: plan.notes.clone(),
            };
            tx.open_table(PLAN)?
                .insert("plan", json(&head)?.as_slice())?;
            Ok(TransactionOutcome::Commit { before: Vec::new() })
        })
    }

    pub(crate) fn read<T>(
        &self,
        f: impl FnOnce(&redb::ReadTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, StoreError> {
        let mut inner = self.lock();
        let database = self.ensure_open(&mut inner)?;
        let run = || f(&database.begin_read()?);
        run().map_err(|e| StoreError::from_redb(self.path(), e))
    }

    pub(crate) fn write(
        &self,
        f: impl FnOnce(&redb::WriteTransaction) -> Result<TransactionOutcome, redb::Error>,
    ) -> Result<(), StoreError> {
        let mut inner = self.lock();
        self.transact(&mut inner, f)
    }
}

fn edge_key(name: &EdgeName) -> String {
    format!("edge:{name}")
}

/// Removes the rows of these edges by the name in the value, because an older controller used the
/// AZ as the key.
fn remove_edges(
    table: &mut redb::Table<'_, &str, &[u8]>,
    names: &[EdgeName],
) -> Result<(), redb::Error> {
    let mut keys = Vec::new();
    for entry in table.iter()? {
        let (key, value) = entry?;
        if names.contains(&row::<StoredEdge>("edge", value.value())?.name) {
            keys.push(key.value().to_owned());
        }
    }
    for key in keys {
        table.remove(key.as_str())?;
    }
    Ok(())
}

pub(crate) fn json(value: &impl Serialize) -> Result<Vec<u8>, redb::Error> {
    serde_json::to_vec(value).map_err(|e| redb::Error::Corrupted(e.to_string()))
}

pub(crate) fn row<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, redb::Error> {
    serde_json::from_slice(bytes).map_err(|e| redb::Error::Corrupted(format!("a {what}: {e}")))
}
