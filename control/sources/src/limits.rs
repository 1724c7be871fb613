//! Limits on the input, so that no tenant's files can exhaust the controller. A test reaches each
//! limit.

/// Size of one file, in bytes, at most.
pub const FILE_BYTES_MAX: usize = 8 << 20;
/// YAML files in one tenant's directory.
pub const FILES_PER_TENANT_MAX: usize = 4096;
/// All YAML files of one tenant together, in bytes.
pub const TENANT_BYTES_MAX: usize = 64 << 20;
/// Tenants' directories in the configuration directory.
pub const TENANTS_MAX: usize = 4096;
/// Bytes of the CA certificates in one ConfigMap or Secret that are kept.
pub const CA_BUNDLE_BYTES_MAX: usize = 256 << 10;
/// Documents in one file, at most.
/// As many as the store changes in one transaction (`EDITS_MAX`), so that one file can be applied
/// whole.
pub const DOCUMENTS_PER_FILE_MAX: usize = 20_000;

pub use canal_yaml::limits::{ALIASED_NODES_MAX, DEPTH_MAX, FINDINGS_PER_DOCUMENT_MAX};

// One file must fit into its tenant's limit, and the tree of one document must not be much larger
// than its text.
const _: () = assert!(FILE_BYTES_MAX <= TENANT_BYTES_MAX && ALIASED_NODES_MAX < FILE_BYTES_MAX);
