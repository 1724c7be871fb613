//! How much may be read, so that no tenant's files can exhaust the controller. Each limit is reached by a test.

/// Largest file, in bytes.
pub const FILE_BYTES_MAX: usize = 8 << 20;
/// YAML files in one tenant's directory.
pub const FILES_PER_TENANT_MAX: usize = 4096;
/// All YAML files of one tenant together, in bytes.
pub const TENANT_BYTES_MAX: usize = 64 << 20;
/// Tenants' directories in the configuration directory.
pub const TENANTS_MAX: usize = 4096;
/// Documents in one file.
pub const DOCUMENTS_PER_FILE_MAX: usize = 20_000;
/// Levels of nesting in one document.
pub const DEPTH_MAX: usize = 64;
/// YAML nodes that aliases (`*name`) may repeat in one document.
pub const ALIASED_NODES_MAX: usize = 10_000;
/// Values and fields of one document that are refused one by one; then a whole field is left out, or all of the object is in doubt.
pub const FINDINGS_PER_DOCUMENT_MAX: usize = 64;

// One file must fit into its tenant, and the tree of one document must not dwarf its text.
const _: () = assert!(FILE_BYTES_MAX <= TENANT_BYTES_MAX && ALIASED_NODES_MAX < FILE_BYTES_MAX);
