//! A failed commit that may nevertheless have reached the disk: its rows as they were before. It is
//! undone when the file can be read again, by this process or the next one. It does not decide
//! whether the commit landed; `database` does.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use canal_model::ids::TenantName;
use serde::{Deserialize, Serialize};

use crate::objects::StoredObjectKey;

/// Name of the file beside the store that keeps an unconfirmed commit across a restart.
const FILE: &str = "controller.redb.undo";

/// Rows of objects by their keys, as they were before a commit; `None` if there was no row.
pub(crate) type RowsBefore = Vec<(StoredObjectKey, Option<Vec<u8>>)>;

/// A failed commit. Only reopening the file shows whether it reached the disk; if it did, it is
/// rolled back.
pub(crate) struct UnconfirmedCommit {
    /// Sequence number that the commit would have given the store.
    pub(crate) sequence: u64,
    pub(crate) before: RowsBefore,
}

/// The format of the file.
#[derive(Serialize, Deserialize)]
struct UndoRecord {
    sequence: u64,
    rows: Vec<UndoRow>,
}

#[derive(Serialize, Deserialize)]
struct UndoRow {
    tenant: String,
    kind: String,
    namespace: String,
    name: String,
    before: Option<Vec<u8>>,
}

impl UnconfirmedCommit {
    /// Writes the commit to the file, durably. The disk may work again by now, or refuse only large
    /// writes.
    pub(crate) fn save(&self, dir: &Path) -> io::Result<()> {
        let row = |(key, before): &(StoredObjectKey, Option<Vec<u8>>)| UndoRow {
            tenant: key.tenant.to_string(),
            kind: key.kind.clone(),
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            before: before.clone(),
        };
        let record = UndoRecord {
            sequence: self.sequence,
            rows: self.before.iter().map(row).collect(),
        };
        let path = path_in(dir);
        let new = path.with_extension("undo.new");
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(&serde_json::to_vec(&record)?)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        File::open(dir)?.sync_all()
    }

    /// Reads the commit that an earlier process left; `None` if there is none.
    pub(crate) fn load(dir: &Path) -> io::Result<Option<Self>> {
        let bytes = match fs::read(path_in(dir)) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let record: UndoRecord = serde_json::from_slice(&bytes)?;
        let row = |row: UndoRow| {
            let tenant = TenantName::new(&row.tenant).map_err(io::Error::other)?;
            Ok((
                StoredObjectKey {
                    tenant,
                    kind: row.kind,
                    namespace: row.namespace,
                    name: row.name,
                },
                row.before,
            ))
        };
        let before = record
            .rows
            .into_iter()
            .map(row)
            .collect::<io::Result<_>>()?;
        Ok(Some(Self {
            sequence: record.sequence,
            before,
        }))
    }

    /// Removes the file: it is known what became of the commit.
    pub(crate) fn forget(dir: &Path) -> io::Result<()> {
        match fs::remove_file(path_in(dir)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

fn path_in(dir: &Path) -> PathBuf {
    dir.join(FILE)
}
