//! Applied objects as rows: their keys, what is kept beside the YAML, and how both are spelled on disk.

use std::fmt;

use canal_model::ids::{Generation, TenantName};
use serde::{Deserialize, Serialize};

/// Names one object of one tenant.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    /// The owner.
    pub tenant: TenantName,
    /// The kind as in the object, e.g. `HTTPRoute`.
    pub kind: String,
    /// Empty for kinds that have none.
    pub namespace: String,
    /// The object's name.
    pub name: String,
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            write!(f, "{} {}", self.kind, self.name)
        } else {
            write!(f, "{} {}/{}", self.kind, self.namespace, self.name)
        }
    }
}

/// One object as applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredObject {
    /// Its name.
    pub key: ObjectKey,
    /// The text as it was sent: one YAML document.
    pub yaml: String,
    /// Seconds since 1970 when it was first applied; kept across changes.
    pub created: u64,
    /// The generation that last changed it.
    pub generation: Generation,
}

/// One change of an Apply or Delete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit {
    /// Create or replace.
    Put {
        /// Its name.
        key: ObjectKey,
        /// One YAML document.
        yaml: String,
    },
    /// Remove; what is already gone is not an error.
    Delete {
        /// Its name.
        key: ObjectKey,
    },
}

impl Edit {
    /// The object concerned.
    pub fn key(&self) -> &ObjectKey {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key,
        }
    }
}

/// A row's value. Named fields, so that a later build can add one.
#[derive(Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) yaml: String,
    pub(crate) created: u64,
    pub(crate) generation: u64,
}
