//! Errors of the store, written for the operator: which file or object, what is wrong, and the fix.

use std::path::{Path, PathBuf};

use canal_model::ids::TenantName;

/// The reason that the store refused a call. Nothing was changed unless the text states otherwise.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file or its directory cannot be used.
    #[error("the store {path} cannot be opened: {why}; fix: {fix}")]
    Open {
        path: PathBuf,
        why: String,
        fix: &'static str,
    },
    /// The file was written by a newer build.
    #[error(
        "the store {path} has layout {layout}, this build knows {newest_known}; fix: run the build that wrote it, or one that is newer"
    )]
    Layout {
        path: PathBuf,
        layout: u64,
        newest_known: u64,
    },
    /// The operating system refused a read or a write.
    #[error(
        "the disk refused {path}: {why}; nothing was changed; fix: free some space or repair the disk, then repeat the change"
    )]
    Disk { path: PathBuf, why: String },
    /// The file contains data that no build has written.
    #[error("the store {path} is damaged: {why}; fix: restore it from a backup")]
    Damaged { path: PathBuf, why: String },
    /// A tenant has reached its limit of objects.
    #[error(
        "tenant {tenant} would have {count} objects; at most {limit} are allowed; fix: delete some, or give the controller a larger limit"
    )]
    ObjectsPerTenant {
        tenant: TenantName,
        count: usize,
        limit: usize,
    },
    /// One object is too large.
    #[error("{object} has {bytes} bytes; at most {limit} are allowed; fix: split it")]
    ObjectBytes {
        object: String,
        bytes: usize,
        limit: usize,
    },
    /// One transaction contains too many edits.
    #[error(
        "{edits} changes in one request; at most {limit} are accepted; fix: send them in several requests"
    )]
    Edits { edits: usize, limit: usize },
    /// Every service id is in use, or was released so recently that it is in quarantine.
    #[error(
        "no service id is left: {limit} are in use or were released within {hours} h; fix: delete services that are no longer used"
    )]
    ServiceIds { limit: u32, hours: u64 },
    /// The services of a tenant, including recently deleted ones, use all ids that one tenant may
    /// have.
    #[error(
        "tenant {tenant} has {limit} service ids, including those of services deleted within {hours} h, and may have no more; fix: reuse the names of deleted services, or wait"
    )]
    TenantServiceIds {
        tenant: TenantName,
        limit: u32,
        hours: u64,
    },
    /// Every replica number is in use.
    #[error(
        "no replica number is left: all {limit} are in use; fix: forget replicas that no longer exist"
    )]
    ReplicaNumbers { limit: u16 },
    /// The private keys are sealed and the key does not open them, or the key file cannot be used.
    #[error(
        "the store's key: {why}; fix: give --store-key-file the file of 32 bytes under which the store was sealed"
    )]
    Key { why: String },
}

impl StoreError {
    /// Returns the name of the error as the label value of a counter.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Open { .. } => "open",
            Self::Layout { .. } => "layout",
            Self::Disk { .. } => "disk",
            Self::Damaged { .. } => "damaged",
            Self::ObjectsPerTenant { .. } => "objects_per_tenant",
            Self::ObjectBytes { .. } => "object_bytes",
            Self::Edits { .. } => "edits",
            Self::ServiceIds { .. } => "service_ids",
            Self::TenantServiceIds { .. } => "tenant_service_ids",
            Self::ReplicaNumbers { .. } => "replica_numbers",
            Self::Key { .. } => "key",
        }
    }

    /// Returns true if a limit, not the disk, caused the error, so that repeating the same request
    /// cannot help.
    pub fn is_limit(&self) -> bool {
        matches!(
            self,
            Self::ObjectsPerTenant { .. }
                | Self::ObjectBytes { .. }
                | Self::Edits { .. }
                | Self::ServiceIds { .. }
                | Self::TenantServiceIds { .. }
                | Self::ReplicaNumbers { .. }
        )
    }

    pub(crate) fn from_redb(path: &Path, e: redb::Error) -> Self {
        let path = path.to_path_buf();
        match e {
            redb::Error::Corrupted(why) => Self::Damaged { path, why },
            redb::Error::DatabaseAlreadyOpen => Self::Open {
                path,
                why: "another process has it open".into(),
                fix: "stop the other controller, or give this one its own --data-dir",
            },
            redb::Error::UpgradeRequired(v) => Self::Layout {
                path,
                layout: v.into(),
                newest_known: 0,
            },
            redb::Error::TableTypeMismatch { table, .. } => Self::Damaged {
                path,
                why: format!("table {table} contains types that this build does not write"),
            },
            other => Self::Disk {
                path,
                why: other.to_string(),
            },
        }
    }
}
