//! Rows of applied objects: their keys, the metadata stored with the YAML, and the format of both
//! on disk.

use std::fmt;

use canal_model::ids::{Generation, TenantName};
use serde::{Deserialize, Serialize};

/// The key of one object of one tenant.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoredObjectKey {
    /// The tenant that owns the object.
    pub tenant: TenantName,
    /// The kind as written in the object, for example `HTTPRoute`.
    pub kind: String,
    /// The namespace; empty for kinds that have none.
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for StoredObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            write!(f, "{} {}", self.kind, self.name)
        } else {
            write!(f, "{} {}/{}", self.kind, self.namespace, self.name)
        }
    }
}

/// One object as it was applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredObject {
    pub key: StoredObjectKey,
    /// The text as it was sent: one YAML document.
    pub yaml: String,
    /// Time of the first apply, in seconds since 1970. Later changes do not alter it.
    pub created: u64,
    /// The generation that last changed the object.
    pub generation: Generation,
}

/// One change in an apply or delete request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectEdit {
    /// Creates or replaces the object.
    Put { key: StoredObjectKey, yaml: String },
    /// Deletes the object. Deleting an object that does not exist is not an error.
    Delete { key: StoredObjectKey },
}

impl ObjectEdit {
    /// Returns the key of the object that the edit changes.
    pub fn key(&self) -> &StoredObjectKey {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key,
        }
    }
}

/// The value of a row. Its fields are named in JSON, so that a later build can add one.
#[derive(Serialize, Deserialize)]
pub(crate) struct ObjectRow {
    pub(crate) yaml: String,
    pub(crate) created: u64,
    pub(crate) generation: u64,
}
