//! Limits on the input, so that no tenant's files can exhaust the controller. A test reaches each
//! limit.

/// Size of one file, in bytes, at most.
/// The default share of a tenant's configuration has as many bytes, so that one file can hold all
/// of it.
pub const FILE_BYTES_MAX: usize = 8 << 20;
/// YAML files in one tenant's directory.
/// Each scan looks at all of them, every 30 s without an event (`RESCAN_INTERVAL`). Nobody measured
/// this value.
pub const FILES_PER_TENANT_MAX: usize = 4096;
/// All YAML files of one tenant together, in bytes.
/// These are eight files of the largest size. More than the default share of 8 MiB is possible
/// because the provider can increase the share.
pub const TENANT_BYTES_MAX: usize = 64 << 20;
/// Tenants' directories in the configuration directory.
/// Each needs an inotify watch, of which the kernel allows a user at least 8,192 by default
/// (inotify(7)).
pub const TENANTS_MAX: usize = 4096;
/// Bytes of the CA certificates in one ConfigMap or Secret that are kept.
/// It bounds what one object takes of the tenant's share. A validation of clients uses at most half
/// of it (`CLIENT_CA_BYTES_MAX`).
pub const CA_BUNDLE_BYTES_MAX: usize = 256 << 10;
/// Documents in one file, at most.
/// As many as the store changes in one transaction (`EDITS_MAX`), so that one file can be applied
/// whole.
pub const DOCUMENTS_PER_FILE_MAX: usize = 20_000;

pub use canal_yaml::limits::{ALIASED_NODES_MAX, DEPTH_MAX, FINDINGS_PER_DOCUMENT_MAX};

// One file must fit into its tenant's limit, and the tree of one document must not be much larger
// than its text.
const _: () = assert!(FILE_BYTES_MAX <= TENANT_BYTES_MAX && ALIASED_NODES_MAX < FILE_BYTES_MAX);
