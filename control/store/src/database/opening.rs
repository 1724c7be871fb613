//! Creates and opens the redb file, and reads its counters and service ids. Recovery after an
//! unconfirmed commit is the parent module's. Start with [`open_database`].

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use canal_model::ids::{ServiceId, StoreId, TenantName};
use redb::{Database, ReadableDatabase, ReadableTable};

use super::{
    COUNTER_GENERATION, COUNTER_NEXT_SERVICE_ID, COUNTER_SEQUENCE, COUNTERS, LoadedState, OBJECTS,
    SERVICE_IDS, TENANTS,
};
use crate::error::StoreError;
use crate::fleet::{AZS, EDGES, PLAN, PLANNED, REPLICAS};
use crate::ids::{Binding, SERVICE_ID_SPACE, ServiceIdTable};
use crate::trust::{AUTHORITIES, AUTHORITIES_SECOND, ISSUED, JWKS, TRUST};

/// Number of tables in a file: all that [`prepare`] opens, [`COUNTERS`] included.
const TABLES: usize = 14;
/// Version of the layout of the tables. Another one is refused, because rows would be misread.
const SCHEMA: u64 = 1;
/// Name of the file while it is created. A controller that was killed meanwhile leaves such a file;
/// it contains no data.
const FILE_NEW: &str = "controller.redb.new";
/// Size of redb's cache. Its default is a gigabyte, but the controller has the data it needs in
/// memory anyway.
/// It was chosen, and nobody measured a larger or smaller one.
const CACHE_BYTES: usize = 16 << 20;
const COUNTER_LAYOUT: &str = "layout";
/// High and low 64 bits of the store's id.
const COUNTER_STORE_HIGH: &str = "store-id-high";
const COUNTER_STORE_LOW: &str = "store-id-low";
/// Offset of the first fresh service id. Stores of earlier builds have none; theirs begin at id 1.
const COUNTER_SERVICE_ID_OFFSET: &str = "service-id-offset";

/// Creates the file with its tables and its id, unless it exists. It is renamed to its final name
/// only when complete: redb reports a file that a kill left half created as damaged forever.
pub(super) fn create_database(dir: &Path, path: &Path) -> Result<(), StoreError> {
    let is_there = || fs::metadata(path).is_ok_and(|file| file.len() > 0);
    if is_there() {
        return Ok(());
    }
    // Another controller may be creating the file at the same moment.
    let folder = fs::File::open(dir)
        .and_then(|folder| folder.lock().map(|()| folder))
        .map_err(unusable(dir))?;
    if is_there() {
        return Ok(());
    }
    let new = dir.join(FILE_NEW);
    match fs::remove_file(&new) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(unusable(&new)(e)),
        _ => {}
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)
        .map_err(unusable(&new))?;
    prepare(&database_of(&new, file)?).map_err(|e| StoreError::from_redb(&new, e))?;
    fs::rename(&new, path).map_err(unusable(path))?;
    // The lock on the directory ends here, after the rename.
    drop(folder);
    Ok(())
}

pub(super) fn open_database(path: &Path) -> Result<(Database, LoadedState), StoreError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(unusable(path))?;
    let mode = file
        .metadata()
        .map_err(unusable(path))?
        .permissions()
        .mode();
    if mode & 0o077 != 0 {
        // The file contains private keys; a copy or an old umask may have made it readable for
        // other users.
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(unusable(path))?;
    }
    let database = database_of(path, file)?;
    prepare(&database).map_err(|e| StoreError::from_redb(path, e))?;
    let found = layout(&database).map_err(|e| StoreError::from_redb(path, e))?;
    if found != SCHEMA {
        return Err(StoreError::Layout {
            path: path.into(),
            layout: found,
            newest_known: SCHEMA,
        });
    }
    let loaded = load(&database).map_err(|e| StoreError::from_redb(path, e))?;
    Ok((database, loaded))
}

pub(super) fn unusable(path: &Path) -> impl Fn(std::io::Error) -> StoreError {
    |e| StoreError::Open {
        path: path.into(),
        why: e.to_string(),
        fix: "check the folder's owner and mode, and that the disk is mounted and has space",
    }
}

fn database_of(path: &Path, file: fs::File) -> Result<Database, StoreError> {
    Database::builder()
        .set_cache_size(CACHE_BYTES)
        .create_file(file)
        .map_err(|e| match StoreError::from_redb(path, e.into()) {
            StoreError::Disk { path, why } => StoreError::Open {
                path,
                why,
                fix: "check the disk's space and that the file is a canal-controller store",
            },
            other => other,
        })
}

/// Creates the tables and the id of a new file, or those missing in an earlier build's file. If all
/// exist, it writes nothing, so opening works on a full disk.
fn prepare(database: &Database) -> Result<(), redb::Error> {
    let is_named = |tx: &redb::ReadTransaction| {
        Ok::<_, redb::Error>(tx.open_table(COUNTERS)?.get(COUNTER_STORE_LOW)?.is_some())
    };
    let read = database.begin_read()?;
    if read.list_tables()?.count() == TABLES && is_named(&read)? {
        return Ok(());
    }
    // An open read transaction would keep the pages that the write replaces from being reused.
    drop(read);
    let mut tx = database.begin_write()?;
    tx.set_quick_repair(true);
    {
        tx.open_table(OBJECTS)?;
        tx.open_table(SERVICE_IDS)?;
        tx.open_table(AUTHORITIES)?;
        tx.open_table(AUTHORITIES_SECOND)?;
        tx.open_table(TRUST)?;
        tx.open_table(ISSUED)?;
        tx.open_table(JWKS)?;
        tx.open_table(TENANTS)?;
        tx.open_table(REPLICAS)?;
        tx.open_table(EDGES)?;
        tx.open_table(AZS)?;
        tx.open_table(PLANNED)?;
        tx.open_table(PLAN)?;
        let mut counters = tx.open_table(COUNTERS)?;
        if counters.get(COUNTER_LAYOUT)?.is_none() {
            counters.insert(COUNTER_LAYOUT, SCHEMA)?;
            // Ids of a store that replaces a lost one must differ from those that data planes still
            // use.
            counters.insert(
                COUNTER_SERVICE_ID_OFFSET,
                random()? % u64::from(SERVICE_ID_SPACE),
            )?;
        }
        if counters.get(COUNTER_STORE_LOW)?.is_none() {
            counters.insert(COUNTER_STORE_HIGH, random()?)?;
            counters.insert(COUNTER_STORE_LOW, random()?)?;
        }
    }
    tx.commit()?;
    Ok(())
}

fn random() -> Result<u64, redb::Error> {
    let mut bytes = [0; 8];
    let filled = aws_lc_rs::rand::fill(&mut bytes);
    filled.map_err(|_| {
        redb::Error::Io(std::io::Error::other(
            "the operating system returned no random bytes",
        ))
    })?;
    Ok(u64::from_ne_bytes(bytes))
}

fn layout(database: &Database) -> Result<u64, redb::Error> {
    Ok(database
        .begin_read()?
        .open_table(COUNTERS)?
        .get(COUNTER_LAYOUT)?
        .map_or(SCHEMA, |v| v.value()))
}

pub(super) fn load(database: &Database) -> Result<LoadedState, redb::Error> {
    let tx = database.begin_read()?;
    let damaged = |e: canal_model::ids::IdError| redb::Error::Corrupted(e.to_string());
    let counters = tx.open_table(COUNTERS)?;
    let counter = |name: &str| -> Result<u64, redb::Error> {
        Ok(counters.get(name)?.map_or(0, |v| v.value()))
    };
    let mut counts: BTreeMap<TenantName, usize> = BTreeMap::new();
    for entry in tx.open_table(OBJECTS)?.iter()? {
        let tenant = TenantName::new(entry?.0.value().0).map_err(damaged)?;
        *counts.entry(tenant).or_insert(0) += 1;
    }
    // These counters stay below 2^32; a damaged one that does not allows no new id.
    let number = |name: &str| -> Result<u32, redb::Error> {
        Ok(u32::try_from(counter(name)?).unwrap_or(u32::MAX))
    };
    let mut ids = ServiceIdTable {
        next: number(COUNTER_NEXT_SERVICE_ID)?,
        // Stores begin at different ids, so that ids of a lost store are not given to other
        // services.
        offset: number(COUNTER_SERVICE_ID_OFFSET)? % SERVICE_ID_SPACE,
        ..ServiceIdTable::default()
    };
    for entry in tx.open_table(SERVICE_IDS)?.iter()? {
        let (key, value) = entry?;
        let (id, released) = value.value();
        let binding = Binding {
            id: ServiceId::new(id).map_err(damaged)?,
            released: (released > 0).then_some(released),
        };
        ids.bindings
            .insert(key.value().parse().map_err(damaged)?, binding);
    }
    let id = StoreId::from_bits(
        u128::from(counter(COUNTER_STORE_HIGH)?) << 64 | u128::from(counter(COUNTER_STORE_LOW)?),
    );
    Ok(LoadedState {
        id,
        counts,
        ids,
        sequence: counter(COUNTER_SEQUENCE)?,
        generation: counter(COUNTER_GENERATION)?,
    })
}
