//! The controller's memory on disk: applied objects, service ids, CA keys, the fleet and its plan, and the generation counter, in one
//! redb file.
//! A write that returned `Ok` survives a kill at any instant; one that returned an error changed nothing. It never interprets YAML.
//! Start reading at [`Store::open`] and [`Store::apply`].

#![forbid(unsafe_code)]

mod database;
mod error;
mod fleet;
mod ids;
mod objects;
mod seal;
mod trust;

pub use database::{Limits, Store};
pub use error::StoreError;
pub use fleet::{StoredEdge, StoredFleet, StoredReplica};
pub use ids::{SERVICE_ID_QUARANTINE_SECONDS, TENANT_SERVICE_IDS_MAX};
pub use objects::{Edit, ObjectKey, StoredObject};
pub use seal::{StoreKey, is_sealed};
pub use trust::{DomainName, StoredCertificate, StoredTrust};

/// A certificate authority as it is kept: the key is secret. The file's mode is 0600, and with a [`StoreKey`] it is sealed in it.
#[derive(Clone, PartialEq, Eq)]
pub struct StoredAuthority {
    /// PKCS#8 DER; wiped when it is dropped.
    pub key: zeroize::Zeroizing<Vec<u8>>,
    /// The self-signed certificate, PEM.
    pub certificate: String,
}

impl std::fmt::Debug for StoredAuthority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoredAuthority").field("key", &"(secret)").field("certificate", &self.certificate).finish()
    }
}

/// Objects one tenant may hold in the store: ten thousand services with ten routes each, and room for as much again.
pub const OBJECTS_PER_TENANT_MAX: usize = 200_000;
/// Bytes of one object's YAML: what a Kubernetes API server takes (etcd's request limit is 1.5 MiB).
pub const OBJECT_BYTES_MAX: usize = 1 << 20;
/// Edits in one transaction.
pub const EDITS_MAX: usize = 20_000;
/// Generations reserved on disk ahead of use, so that counting does not cost a disk write each time.
pub const GENERATIONS_RESERVED: u64 = 10_000;
