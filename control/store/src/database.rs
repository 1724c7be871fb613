//! The redb file: opening, transactions, and recovery after disk errors. It decides only limits;
//! `ids` decides service ids.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use canal_model::ids::{Generation, ReplicaNumber, ServiceId, ServiceKey, StoreId, TenantName};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction};

use crate::error::StoreError;
use crate::ids::{
    Allocation, Binding, IdShortage, SERVICE_ID_QUARANTINE_SECONDS, SERVICE_ID_SPACE,
    ServiceIdTable, TENANT_SERVICE_IDS_MAX, decide_allocation,
};
use crate::objects::{ObjectEdit, ObjectRow, StoredObject, StoredObjectKey};
use crate::seal::StoreKey;
use crate::undo::{RowsBefore, UnconfirmedCommit};
use crate::{EDITS_MAX, GENERATIONS_RESERVED, OBJECT_BYTES_MAX, OBJECTS_PER_TENANT_MAX};

mod opening;

use opening::{create_database, load, open_database, unusable};

/// Maps `(tenant, kind, namespace, name)` to a JSON [`ObjectRow`].
pub(crate) const OBJECTS: TableDefinition<(&str, &str, &str, &str), &[u8]> =
    TableDefinition::new("objects");
/// Maps a service key to `(id, time of its release in seconds since 1970, or 0)`.
const SERVICE_IDS: TableDefinition<&str, (u32, u64)> = TableDefinition::new("service-ids");
/// Maps a tenant to its rank in the order of admission, and whether it has files.
const TENANTS: TableDefinition<&str, (u64, bool)> = TableDefinition::new("tenants");
/// Maps the name of a counter to its value.
const COUNTERS: TableDefinition<&str, u64> = TableDefinition::new("counters");

/// Highest generation that may have been given out.
const COUNTER_GENERATION: &str = "generation";
const COUNTER_NEXT_SERVICE_ID: &str = "next-service-id";
const COUNTER_NEXT_TENANT: &str = "next-tenant";
/// Counts transactions. After a failed commit, it shows whether the commit reached the disk.
const COUNTER_SEQUENCE: &str = "sequence";

const FILE: &str = "controller.redb";

/// Limits of the store. The defaults are the constants of this crate.
#[derive(Debug, Clone, Copy)]
pub struct StoreLimits {
    /// Objects of one tenant; see [`OBJECTS_PER_TENANT_MAX`].
    pub objects_per_tenant: usize,
    /// Bytes of one object; see [`OBJECT_BYTES_MAX`].
    pub object_bytes: usize,
    /// Edits in one transaction; see [`EDITS_MAX`].
    pub edits: usize,
    /// Number of service ids that can be given out; by default all values of 24 bits except 0.
    pub service_ids: u32,
    /// Service ids of one tenant; see [`TENANT_SERVICE_IDS_MAX`].
    pub tenant_service_ids: u32,
    /// The largest replica number given out.
    pub replica_numbers: u16,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self {
            objects_per_tenant: OBJECTS_PER_TENANT_MAX,
            object_bytes: OBJECT_BYTES_MAX,
            edits: EDITS_MAX,
            service_ids: SERVICE_ID_SPACE,
            tenant_service_ids: TENANT_SERVICE_IDS_MAX,
            replica_numbers: ReplicaNumber::MAX,
        }
    }
}

/// The store. Only one process can open it. Every method blocks for at most a few disk flushes.
pub struct Store {
    path: PathBuf,
    id: StoreId,
    pub(crate) limits: StoreLimits,
    /// The key that seals private keys.
    pub(crate) key: Option<StoreKey>,
    inner: Mutex<Inner>,
}

pub(crate) struct Inner {
    /// The open database; `None` after a disk error. The next call opens it again.
    database: Option<Database>,
    counts: BTreeMap<TenantName, usize>,
    ids: ServiceIdTable,
    sequence: u64,
    /// Highest generation reserved on disk.
    reserved: u64,
    issued_generation: u64,
    doubt: Option<UnconfirmedCommit>,
}

impl Inner {
    /// Counts one object of the tenant less.
    pub(crate) fn forget_object(&mut self, tenant: &TenantName) {
        if let Some(count) = self.counts.get_mut(tenant) {
            *count = count.saturating_sub(1);
        }
    }
}

/// The state on disk, read once at opening.
struct LoadedState {
    id: StoreId,
    counts: BTreeMap<TenantName, usize>,
    ids: ServiceIdTable,
    sequence: u64,
    generation: u64,
}

impl Store {
    /// Opens or creates `controller.redb` in `dir`. Only the owner can read them.
    ///
    /// # Errors
    /// Returns [`StoreError::Open`], [`StoreError::Layout`], [`StoreError::Damaged`],
    /// [`StoreError::Disk`], or [`StoreError::Key`] for a store with sealed keys.
    pub fn open(dir: &Path, limits: StoreLimits) -> Result<Self, StoreError> {
        Self::open_with(dir, limits, None)
    }

    /// Opens the store without checking that its private keys can be unsealed.
    pub(crate) fn open_unsealed(dir: &Path, limits: StoreLimits) -> Result<Self, StoreError> {
        DirBuilder::new()
            .recursive(true)
            // Only this user may read the folder, because the store has private keys.
            .mode(0o700)
            .create(dir)
            .map_err(|e| StoreError::Open {
                path: dir.into(),
                why: e.to_string(),
                fix: "give --data-dir a folder that this user may write",
            })?;
        let path = dir.join(FILE);
        create_database(dir, &path)?;
        let (database, mut loaded) = open_database(&path)?;
        let id = loaded.id;
        // An earlier process may have reported a commit as failed and ended before it could read
        // the file again.
        let unconfirmed = UnconfirmedCommit::load(dir).map_err(|e| StoreError::Disk {
            path: dir.into(),
            why: e.to_string(),
        })?;
        if let Some(unconfirmed) = unconfirmed {
            undo(&database, &unconfirmed, &mut loaded)
                .map_err(|e| StoreError::from_redb(&path, e))?;
            UnconfirmedCommit::forget(dir).map_err(unusable(dir))?;
        }
        // Without this sync, a power failure could remove the new file's directory entry and all
        // data in it.
        fs::File::open(dir)
            .and_then(|d| d.sync_all())
            .map_err(|e| StoreError::Disk {
                path: dir.into(),
                why: e.to_string(),
            })?;
        let inner = Inner {
            database: Some(database),
            counts: loaded.counts,
            ids: loaded.ids,
            sequence: loaded.sequence,
            reserved: loaded.generation,
            issued_generation: loaded.generation,
            doubt: None,
        };
        Ok(Self {
            path,
            id,
            limits,
            key: None,
            inner: Mutex::new(inner),
        })
    }

    /// Returns the store's own random id, created with the file. Numbers of this store, service ids
    /// above all, are not valid in another store.
    pub fn id(&self) -> StoreId {
        self.id
    }

    /// Returns the path of the database file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns all applied objects.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`] or [`StoreError::Damaged`].
    pub fn objects(&self) -> Result<Vec<StoredObject>, StoreError> {
        let mut out = Vec::new();
        self.for_each_object(|object| out.push(object))?;
        Ok(out)
    }

    /// Calls `visit` with every applied object in turn, so that only one has to be in memory.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`] or [`StoreError::Damaged`].
    pub fn for_each_object(&self, mut visit: impl FnMut(StoredObject)) -> Result<(), StoreError> {
        let mut inner = self.lock();
        let database = self.ensure_open(&mut inner)?;
        let mut read = || -> Result<(), redb::Error> {
            let table = database.begin_read()?.open_table(OBJECTS)?;
            for entry in table.iter()? {
                let (k, v) = entry?;
                visit(stored(k.value(), v.value()).map_err(redb::Error::Corrupted)?);
            }
            Ok(())
        };
        read().map_err(|e| StoreError::from_redb(&self.path, e))
    }

    /// Returns the keys of all applied objects of a tenant.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`] or [`StoreError::Damaged`].
    pub fn object_keys(&self, tenant: &TenantName) -> Result<Vec<StoredObjectKey>, StoreError> {
        let mut inner = self.lock();
        let database = self.ensure_open(&mut inner)?;
        let read = || -> Result<Vec<StoredObjectKey>, redb::Error> {
            let table = database.begin_read()?.open_table(OBJECTS)?;
            let mut out = Vec::new();
            for entry in table.range((tenant.as_str(), "", "", "")..)? {
                let (key, _) = entry?;
                let (owner, kind, namespace, name) = key.value();
                // The range has no upper bound; the next tenant's first key ends it.
                if owner != tenant.as_str() {
                    break;
                }
                out.push(StoredObjectKey {
                    tenant: tenant.clone(),
                    kind: kind.into(),
                    namespace: namespace.into(),
                    name: name.into(),
                });
            }
            Ok(out)
        };
        read().map_err(|e| StoreError::from_redb(&self.path, e))
    }

    /// Returns the maximum number of edits in one [`Store::apply`].
    pub fn edits_max(&self) -> usize {
        self.limits.edits
    }

    /// Writes all edits in one transaction and marks them with `generation`. `now` is in seconds
    /// since 1970.
    ///
    /// # Errors
    /// Returns the limit that the edits exceed, or [`StoreError::Disk`]; nothing was changed.
    pub fn apply(
        &self,
        edits: &[ObjectEdit],
        generation: Generation,
        now: u64,
    ) -> Result<(), StoreError> {
        self.within_limits(edits)?;
        let mut inner = self.lock();
        let mut before = Vec::with_capacity(edits.len());
        let mut grown: BTreeMap<TenantName, isize> = BTreeMap::new();
        let counts = inner.counts.clone();
        self.transact(&mut inner, |tx| {
            (before, grown) = write_edits(tx, edits, generation, now)?;
            // The limit is checked after the edits, because only they show which keys are new.
            let over = decide_counts(&counts, &grown, self.limits.objects_per_tenant).err();
            let mut counters = tx.open_table(COUNTERS)?;
            let reserved = counters.get(COUNTER_GENERATION)?.map_or(0, |v| v.value());
            counters.insert(COUNTER_GENERATION, reserved.max(generation.0))?;
            Ok(match over {
                Some(e) => TransactionOutcome::Abort(e),
                None => TransactionOutcome::Commit {
                    before: std::mem::take(&mut before),
                },
            })
        })?;
        for (tenant, by) in grown {
            let n = inner.counts.entry(tenant).or_insert(0);
            *n = n.saturating_add_signed(by);
        }
        inner.reserved = inner.reserved.max(generation.0);
        inner.issued_generation = inner.issued_generation.max(generation.0);
        Ok(())
    }

    fn within_limits(&self, edits: &[ObjectEdit]) -> Result<(), StoreError> {
        if edits.len() > self.limits.edits {
            return Err(StoreError::Edits {
                edits: edits.len(),
                limit: self.limits.edits,
            });
        }
        for e in edits {
            if let ObjectEdit::Put { key, yaml } = e
                && yaml.len() > self.limits.object_bytes
            {
                return Err(StoreError::ObjectBytes {
                    object: key.to_string(),
                    bytes: yaml.len(),
                    limit: self.limits.object_bytes,
                });
            }
        }
        Ok(())
    }

    /// Returns the next generation. It is larger than every generation given out before, by this
    /// process or an earlier one.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`] if the reserve is used up and no further generations can be
    /// reserved on disk.
    pub fn next_generation(&self) -> Result<Generation, StoreError> {
        let mut inner = self.lock();
        let left = inner.reserved.saturating_sub(inner.issued_generation);
        if left <= GENERATIONS_RESERVED / 2 {
            let target = inner.issued_generation + GENERATIONS_RESERVED;
            match self.transact(&mut inner, |tx| {
                tx.open_table(COUNTERS)?
                    .insert(COUNTER_GENERATION, target)?;
                Ok(TransactionOutcome::Commit { before: Vec::new() })
            }) {
                Ok(()) => inner.reserved = target,
                // With some reserve left, a full disk does not stop the controller yet.
                Err(e) if left == 0 => return Err(e),
                Err(e) => {
                    tracing::warn!(error = %e, left, "store: could not reserve more generations; using the remaining reserve")
                }
            }
        }
        inner.issued_generation += 1;
        Ok(Generation(inner.issued_generation))
    }

    /// Returns the newest generation given out.
    pub fn generation(&self) -> Generation {
        Generation(self.lock().issued_generation)
    }

    /// Returns the tenants that were admitted and not forgotten, oldest first. If two tenants claim
    /// the same resource, the older one has it.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`] or [`StoreError::Damaged`].
    pub fn tenants(&self) -> Result<Vec<TenantName>, StoreError> {
        let mut inner = self.lock();
        let database = self.ensure_open(&mut inner)?;
        let read = || -> Result<Vec<(u64, TenantName)>, redb::Error> {
            let table = database.begin_read()?.open_table(TENANTS)?;
            let mut out = Vec::new();
            for entry in table.iter()? {
                let (name, place) = entry?;
                let name = TenantName::new(name.value())
                    .map_err(|e| redb::Error::Corrupted(e.to_string()))?;
                out.push((place.value().0, name));
            }
            Ok(out)
        };
        let mut found = read().map_err(|e| StoreError::from_redb(&self.path, e))?;
        found.sort();
        Ok(found.into_iter().map(|(_, name)| name).collect())
    }

    /// Returns true if `tenant` had files when it was last admitted. If they are missing now, that
    /// is an accident, not a deletion.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`] or [`StoreError::Damaged`].
    pub fn has_files(&self, tenant: &TenantName) -> Result<bool, StoreError> {
        let mut inner = self.lock();
        let database = self.ensure_open(&mut inner)?;
        let read = || -> Result<bool, redb::Error> {
            let row = database
                .begin_read()?
                .open_table(TENANTS)?
                .get(tenant.as_str())?;
            Ok(row.is_some_and(|r| r.value().1))
        };
        read().map_err(|e| StoreError::from_redb(&self.path, e))
    }

    /// Appends `tenant` to the order of tenants, unless it is already in it, and records whether it
    /// has files.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`].
    pub fn admit_tenant(&self, tenant: &TenantName, has_files: bool) -> Result<(), StoreError> {
        let mut inner = self.lock();
        self.transact(&mut inner, |tx| {
            let mut tenants = tx.open_table(TENANTS)?;
            let place = tenants.get(tenant.as_str())?.map(|v| v.value().0);
            let place = match place {
                Some(place) => place,
                None => {
                    let mut counters = tx.open_table(COUNTERS)?;
                    let place = counters.get(COUNTER_NEXT_TENANT)?.map_or(0, |v| v.value());
                    counters.insert(COUNTER_NEXT_TENANT, place + 1)?;
                    place
                }
            };
            tenants.insert(tenant.as_str(), (place, has_files))?;
            Ok(TransactionOutcome::Commit { before: Vec::new() })
        })
    }

    /// Removes `tenant` from the order of tenants. Call it when none of the tenant's data is left.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`].
    pub fn forget_tenant(&self, tenant: &TenantName) -> Result<(), StoreError> {
        let mut inner = self.lock();
        self.transact(&mut inner, |tx| {
            tx.open_table(TENANTS)?.remove(tenant.as_str())?;
            Ok(TransactionOutcome::Commit { before: Vec::new() })
        })
    }

    /// Returns the ids of all `services`. A service without an id gets one permanently; a released
    /// id becomes live again.
    ///
    /// # Errors
    /// Returns [`StoreError::ServiceIds`] if all ids are used up, [`StoreError::TenantServiceIds`]
    /// if the tenant's limit is reached, or [`StoreError::Disk`].
    pub fn service_ids(
        &self,
        services: &[ServiceKey],
        now: u64,
    ) -> Result<BTreeMap<ServiceKey, ServiceId>, StoreError> {
        let mut inner = self.lock();
        self.ensure_open(&mut inner)?;
        let allocation = self.allocation(&inner.ids, services, now)?;
        if !allocation.is_empty() {
            self.transact(&mut inner, |tx| {
                let mut table = tx.open_table(SERVICE_IDS)?;
                for key in &allocation.displaced {
                    table.remove(key.to_string().as_str())?;
                }
                for (key, id) in &allocation.bound {
                    table.insert(key.to_string().as_str(), (id.get(), 0))?;
                }
                tx.open_table(COUNTERS)?
                    .insert(COUNTER_NEXT_SERVICE_ID, u64::from(allocation.next))?;
                Ok(TransactionOutcome::Commit { before: Vec::new() })
            })?;
            // The table in memory changes only after the commit.
            for key in &allocation.displaced {
                inner.ids.bindings.remove(key);
            }
            inner.ids.next = allocation.next;
            inner.ids.bindings.extend(
                allocation
                    .bound
                    .into_iter()
                    .map(|(k, id)| (k, Binding { id, released: None })),
            );
        }
        Ok(services
            .iter()
            .filter_map(|k| inner.ids.bindings.get(k).map(|b| (k.clone(), b.id)))
            .collect())
    }

    /// Returns the same ids as [`Store::service_ids`] without assigning them, so that a request
    /// that is refused later uses up none.
    ///
    /// # Errors
    /// Returns [`StoreError::ServiceIds`] if all ids are used up, [`StoreError::TenantServiceIds`]
    /// if the tenant's limit is reached, or [`StoreError::Disk`].
    pub fn preview_service_ids(
        &self,
        services: &[ServiceKey],
        now: u64,
    ) -> Result<BTreeMap<ServiceKey, ServiceId>, StoreError> {
        let mut inner = self.lock();
        self.ensure_open(&mut inner)?;
        let fresh = self.allocation(&inner.ids, services, now)?.bound;
        let stored = services
            .iter()
            .filter_map(|k| inner.ids.bindings.get(k).map(|b| (k.clone(), b.id)));
        Ok(stored.chain(fresh).collect())
    }

    fn allocation(
        &self,
        book: &ServiceIdTable,
        services: &[ServiceKey],
        now: u64,
    ) -> Result<Allocation, StoreError> {
        let StoreLimits {
            service_ids,
            tenant_service_ids,
            ..
        } = self.limits;
        let hours = SERVICE_ID_QUARANTINE_SECONDS / 3600;
        decide_allocation(book, services, now, service_ids, tenant_service_ids).map_err(
            |shortage| match shortage {
                IdShortage::Mesh => StoreError::ServiceIds {
                    limit: service_ids,
                    hours,
                },
                IdShortage::Tenant(tenant) => StoreError::TenantServiceIds {
                    tenant,
                    limit: tenant_service_ids,
                    hours,
                },
            },
        )
    }

    /// Marks every binding as released for which `lives` returns false. The ids stay reserved for
    /// the same names. Returns their number.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`].
    pub fn release_service_ids(
        &self,
        lives: impl Fn(&ServiceKey) -> bool,
        now: u64,
    ) -> Result<usize, StoreError> {
        let mut inner = self.lock();
        self.ensure_open(&mut inner)?;
        let gone: Vec<(ServiceKey, ServiceId)> = inner
            .ids
            .bindings
            .iter()
            .filter(|(k, b)| b.released.is_none() && !lives(k))
            .map(|(k, b)| (k.clone(), b.id))
            .collect();
        if gone.is_empty() {
            return Ok(0);
        }
        self.transact(&mut inner, |tx| {
            let mut table = tx.open_table(SERVICE_IDS)?;
            for (key, id) in &gone {
                table.insert(key.to_string().as_str(), (id.get(), now.max(1)))?;
            }
            Ok(TransactionOutcome::Commit { before: Vec::new() })
        })?;
        for (key, id) in &gone {
            inner.ids.bindings.insert(
                key.clone(),
                Binding {
                    id: *id,
                    released: Some(now.max(1)),
                },
            );
        }
        Ok(gone.len())
    }

    /// Returns the reserved but unused generations, so that the generations have no gap after an
    /// orderly restart. If the process dies without this call, a gap in the generations is the only
    /// effect.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`].
    pub fn settle(&self) -> Result<(), StoreError> {
        let mut inner = self.lock();
        let given = inner.issued_generation;
        self.transact(&mut inner, |tx| {
            tx.open_table(COUNTERS)?.insert(COUNTER_GENERATION, given)?;
            Ok(TransactionOutcome::Commit { before: Vec::new() })
        })?;
        inner.reserved = given;
        Ok(())
    }

    /// Compacts the file, which removes its unused pages.
    pub(crate) fn compact(&self) -> Result<(), StoreError> {
        let mut inner = self.lock();
        self.ensure_open(&mut inner)?;
        match inner.database.as_mut().map(Database::compact) {
            Some(Err(e)) => Err(StoreError::from_redb(&self.path, e.into())),
            _ => Ok(()),
        }
    }

    /// Returns the folder of the database file.
    fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic under the lock leaves at worst an uncommitted transaction, which redb has rolled
        // back.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the open database. After a disk error it opens the file again and rolls back a
    /// commit that was reported as failed.
    pub(crate) fn ensure_open<'a>(&self, inner: &'a mut Inner) -> Result<&'a Database, StoreError> {
        if inner.database.is_none() {
            let (database, mut loaded) = open_database(&self.path)?;
            // The file may have been replaced while it was closed. Numbers of another store do not
            // match this process's state.
            if loaded.id != self.id {
                return Err(StoreError::Open {
                    path: self.path.clone(),
                    why: format!(
                        "it is store {} now and was {} when this controller started",
                        loaded.id, self.id
                    ),
                    fix: "restart the controller, or put the file back",
                });
            }
            if let Some(doubt) = &inner.doubt {
                undo(&database, doubt, &mut loaded)
                    .map_err(|e| StoreError::from_redb(&self.path, e))?;
                if let Err(e) = UnconfirmedCommit::forget(self.folder()) {
                    // It names a sequence that is no longer the newest, so the next start ignores
                    // it.
                    tracing::warn!(error = %e, "store: could not remove the record of a failed commit; the next start ignores it");
                }
            }
            inner.counts = loaded.counts;
            inner.ids = loaded.ids;
            inner.sequence = loaded.sequence;
            inner.reserved = inner.reserved.max(loaded.generation);
            inner.doubt = None;
            inner.database = Some(database);
            tracing::info!(path = %self.path.display(), "store: reopened after a failure");
        }
        inner.database.as_ref().ok_or_else(|| StoreError::Disk {
            path: self.path.clone(),
            why: "the store is closed".into(),
        })
    }

    /// Runs one durable transaction. After an I/O error, redb accepts no more writes on the same
    /// handle, so the handle is dropped here.
    pub(crate) fn transact(
        &self,
        inner: &mut Inner,
        f: impl FnOnce(&WriteTransaction) -> Result<TransactionOutcome, redb::Error>,
    ) -> Result<(), StoreError> {
        // Opening the file after a failure reads the sequence from it again.
        let sequence = {
            self.ensure_open(inner)?;
            inner.sequence + 1
        };
        let database = self.ensure_open(inner)?;
        let mut attempted = Vec::new();
        let run = || -> Result<Option<StoreError>, redb::Error> {
            let mut tx = database.begin_write()?;
            // Quick repair makes the file usable after a kill without a full scan, so the
            // controller serves within a second of its start.
            tx.set_quick_repair(true);
            match f(&tx)? {
                TransactionOutcome::Abort(e) => {
                    tx.abort()?;
                    return Ok(Some(e));
                }
                TransactionOutcome::Commit { before } => attempted = before,
            }
            tx.open_table(COUNTERS)?
                .insert(COUNTER_SEQUENCE, sequence)?;
            tx.commit()?;
            Ok(None)
        };
        match run() {
            Ok(None) => {
                inner.sequence = sequence;
                Ok(())
            }
            Ok(Some(refused)) => Err(refused),
            Err(e) => {
                inner.doubt = Some(UnconfirmedCommit {
                    sequence,
                    before: attempted,
                });
                inner.database = None;
                let refused = StoreError::from_redb(&self.path, e);
                tracing::error!(error = %refused, "store: a write failed and is undone; reopening the file");
                // The file is reopened at once: whether the commit landed must be known, and
                // undone, before the next read.
                let reopened = self.ensure_open(inner).map(|_| ());
                if let Err(e) = reopened {
                    tracing::error!(error = %e, "store: cannot reopen the file yet; the next access retries");
                    // A restart must be able to undo the commit too.
                    if let Some(Err(e)) = inner
                        .doubt
                        .as_ref()
                        // Only edits of objects have rows to restore; other commits are not undone.
                        .filter(|doubt| !doubt.before.is_empty())
                        .map(|doubt| doubt.save(self.folder()))
                    {
                        tracing::error!(error = %e, "store: could not record the failed write, so a restart may bring it into force; fix: repair the disk before a restart");
                    }
                }
                Err(refused)
            }
        }
    }
}

/// The result of a transaction's body.
pub(crate) enum TransactionOutcome {
    Commit { before: RowsBefore },
    Abort(StoreError),
}

type WriteResult = (RowsBefore, BTreeMap<TenantName, isize>);

fn write_edits(
    tx: &WriteTransaction,
    edits: &[ObjectEdit],
    generation: Generation,
    now: u64,
) -> Result<WriteResult, redb::Error> {
    let mut table = tx.open_table(OBJECTS)?;
    let mut before = Vec::with_capacity(edits.len());
    let mut grown: BTreeMap<TenantName, isize> = BTreeMap::new();
    for edit in edits {
        let key = edit.key();
        let row_key = (
            key.tenant.as_str(),
            key.kind.as_str(),
            key.namespace.as_str(),
            key.name.as_str(),
        );
        let old: Option<Vec<u8>> = table.get(row_key)?.map(|v| v.value().to_vec());
        let had = old.is_some();
        match edit {
            ObjectEdit::Put { yaml, .. } => {
                // The time of the first apply survives later changes, unless the row is damaged.
                let created = old
                    .as_deref()
                    .and_then(|v| serde_json::from_slice::<ObjectRow>(v).ok())
                    .map_or(now, |r| r.created);
                let row = ObjectRow {
                    yaml: yaml.clone(),
                    created,
                    generation: generation.0,
                };
                let bytes =
                    serde_json::to_vec(&row).map_err(|e| redb::Error::Corrupted(e.to_string()))?;
                table.insert(row_key, bytes.as_slice())?;
                *grown.entry(key.tenant.clone()).or_insert(0) += isize::from(!had);
            }
            ObjectEdit::Delete { .. } => {
                table.remove(row_key)?;
                *grown.entry(key.tenant.clone()).or_insert(0) -= isize::from(had);
            }
        }
        // An unconfirmed commit is undone with these rows.
        before.push((key.clone(), old));
    }
    Ok((before, grown))
}

/// Checks the limit of objects per tenant. A tenant over its limit may shrink or stay the same
/// size, but not grow.
fn decide_counts(
    counts: &BTreeMap<TenantName, usize>,
    grown: &BTreeMap<TenantName, isize>,
    limit: usize,
) -> Result<(), StoreError> {
    for (tenant, by) in grown {
        let wanted = counts
            .get(tenant)
            .copied()
            .unwrap_or(0)
            .saturating_add_signed(*by);
        if *by > 0 && wanted > limit {
            return Err(StoreError::ObjectsPerTenant {
                tenant: tenant.clone(),
                count: wanted,
                limit,
            });
        }
    }
    Ok(())
}

/// Undoes a commit that was reported as failed, if it is the newest one on disk: its caller has
/// received an error, so it must not stay.
fn undo(
    database: &Database,
    unconfirmed: &UnconfirmedCommit,
    loaded: &mut LoadedState,
) -> Result<(), redb::Error> {
    // The sequence on disk shows whether the commit did land.
    if unconfirmed.sequence == loaded.sequence && !unconfirmed.before.is_empty() {
        take_back(database, unconfirmed)?;
        *loaded = load(database)?;
    }
    Ok(())
}

/// Restores the rows that a commit changed although it was reported as failed. The last edit of a
/// key is undone first.
fn take_back(database: &Database, doubt: &UnconfirmedCommit) -> Result<(), redb::Error> {
    let tx = database.begin_write()?;
    {
        let mut table = tx.open_table(OBJECTS)?;
        for (key, old) in doubt.before.iter().rev() {
            let row_key = (
                key.tenant.as_str(),
                key.kind.as_str(),
                key.namespace.as_str(),
                key.name.as_str(),
            );
            match old {
                Some(bytes) => table.insert(row_key, bytes.as_slice())?,
                None => table.remove(row_key)?,
            };
        }
        tx.open_table(COUNTERS)?
            .insert(COUNTER_SEQUENCE, doubt.sequence + 1)?;
    }
    tx.commit()?;
    Ok(())
}

fn stored(
    (tenant, kind, namespace, name): (&str, &str, &str, &str),
    value: &[u8],
) -> Result<StoredObject, String> {
    let tenant = TenantName::new(tenant).map_err(|e| e.to_string())?;
    let row: ObjectRow = serde_json::from_slice(value)
        .map_err(|e| format!("object {kind} {namespace}/{name} of {tenant}: {e}"))?;
    let key = StoredObjectKey {
        tenant,
        kind: kind.into(),
        namespace: namespace.into(),
        name: name.into(),
    };
    Ok(StoredObject {
        key,
        yaml: row.yaml,
        created: row.created,
        generation: Generation(row.generation),
    })
}

#[cfg(test)]
mod tests;
