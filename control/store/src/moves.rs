//! Moves rows of applied objects to other keys, after a release renamed the kind of an object. It
//! reads no YAML: the controller knows the new keys. Start at [`Store::move_objects`].

use canal_model::ids::TenantName;
use redb::{ReadableTable, WriteTransaction};

use crate::Store;
use crate::database::{OBJECTS, TransactionOutcome};
use crate::error::StoreError;
use crate::objects::{ObjectRow, StoredObjectKey};
use crate::undo::RowsBefore;

/// A row that moves to another key, because the kind of its object was renamed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectMove {
    pub from: StoredObjectKey,
    pub to: StoredObjectKey,
    /// The text of the object under its new kind.
    pub yaml: String,
}

impl Store {
    /// Moves rows to other keys in one transaction. Times of creation and generations stay as they
    /// are. If there is a row at the new key already, the one with the later generation remains: an
    /// operator who went back to the earlier release may have written the old key last. A row that
    /// is gone needs no move. Without moves, nothing is written.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`]; nothing was changed then.
    pub fn move_objects(&self, moves: &[ObjectMove]) -> Result<(), StoreError> {
        if moves.is_empty() {
            return Ok(());
        }
        let mut inner = self.lock();
        let mut lost = Vec::new();
        self.transact(&mut inner, |tx| {
            let before = move_rows(tx, moves, &mut lost)?;
            Ok(TransactionOutcome::Commit { before })
        })?;
        for tenant in lost {
            inner.forget_object(&tenant);
        }
        Ok(())
    }
}

/// Moves the rows, and returns what they were before. Adds the tenant of each row that another one replaced
/// to `lost`.
fn move_rows(
    tx: &WriteTransaction,
    moves: &[ObjectMove],
    lost: &mut Vec<TenantName>,
) -> Result<RowsBefore, redb::Error> {
    let mut table = tx.open_table(OBJECTS)?;
    let mut before = RowsBefore::new();
    for ObjectMove { from, to, yaml } in moves {
        let Some(old) = table.remove(row_key(from))?.map(|row| row.value().to_vec()) else {
            continue;
        };
        let read = |key: &StoredObjectKey, bytes: &[u8]| {
            let damaged = |e| redb::Error::Corrupted(format!("{key}: {e}"));
            serde_json::from_slice::<ObjectRow>(bytes).map_err(damaged)
        };
        let row = read(from, &old)?;
        let occupant: Option<Vec<u8>> = table.get(row_key(to))?.map(|row| row.value().to_vec());
        let is_older = match &occupant {
            Some(bytes) => {
                lost.push(from.tenant.clone());
                read(to, bytes)?.generation >= row.generation
            }
            None => false,
        };
        if !is_older {
            let row = ObjectRow {
                yaml: yaml.clone(),
                ..row
            };
            let unwritable = |e| redb::Error::Corrupted(format!("{to}: {e}"));
            let bytes = serde_json::to_vec(&row).map_err(unwritable)?;
            table.insert(row_key(to), bytes.as_slice())?;
        }
        before.push((from.clone(), Some(old)));
        before.push((to.clone(), occupant));
    }
    Ok(before)
}

fn row_key(key: &StoredObjectKey) -> (&str, &str, &str, &str) {
    (
        key.tenant.as_str(),
        key.kind.as_str(),
        key.namespace.as_str(),
        key.name.as_str(),
    )
}
