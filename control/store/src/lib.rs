//! The controller's persistent state in one redb file: applied objects, service ids, CA keys, the
//! fleet and its plan, and the generation counter.
//!
//! A write that returned `Ok` survives a kill at any instant. A failed [`Store::apply`] changed
//! nothing. The store never interprets YAML. Start reading at [`Store::open`] and [`Store::apply`].

#![forbid(unsafe_code)]

mod database;
mod error;
mod fleet;
mod ids;
mod moves;
mod objects;
mod seal;
mod trust;
mod undo;

pub use database::{Store, StoreLimits};
pub use error::StoreError;
pub use fleet::{StoredEdge, StoredFleet, StoredReplica};
pub use ids::{SERVICE_ID_QUARANTINE_SECONDS, TENANT_SERVICE_IDS_MAX};
pub use moves::ObjectMove;
pub use objects::{ObjectEdit, StoredObject, StoredObjectKey};
pub use seal::{StoreKey, is_sealed};
pub use trust::{DomainName, StoredCertificate, StoredTrust};

/// A stored certificate authority. The key is secret: the file's mode is 0600, and with a
/// [`StoreKey`] the key is sealed in the file.
#[derive(Clone, PartialEq, Eq)]
pub struct StoredAuthority {
    /// The private key, PKCS#8 DER; its memory is wiped on drop.
    pub key: zeroize::Zeroizing<Vec<u8>>,
    /// The self-signed certificate, as PEM.
    pub certificate: String,
}

impl std::fmt::Debug for StoredAuthority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoredAuthority")
            .field("key", &"(secret)")
            .field("certificate", &self.certificate)
            .finish()
    }
}

/// Objects of one tenant, at most: ten thousand services with ten routes each, and capacity for as
/// many objects again.
pub const OBJECTS_PER_TENANT_MAX: usize = 200_000;
/// Bytes of one object's YAML, at most. A Kubernetes API server accepts about the same size (etcd's
/// request limit is 1.5 MiB).
pub const OBJECT_BYTES_MAX: usize = 1 << 20;
/// Edits in one transaction, at most.
/// The store serves nobody else during a transaction, so it has to end. Nobody measured this value.
pub const EDITS_MAX: usize = 20_000;
/// Generations reserved on disk ahead of use, so that not every new generation costs a disk write.
/// The next are reserved when half of them are used, so one write serves 5,000. After a kill at
/// most 10,000 numbers are skipped, of 2^64.
pub const GENERATIONS_RESERVED: u64 = 10_000;
