//! Limits on one document, so that no text can exhaust the process that reads it. A test reaches
//! each limit.

/// Levels of nesting in one document.
pub const DEPTH_MAX: usize = 64;
/// YAML nodes that aliases (`*name`) may repeat in one document.
pub const ALIASED_NODES_MAX: usize = 10_000;
/// Errors reported one by one for one document. Beyond this, a whole field is dropped, or the whole
/// object counts as faulty.
pub const FINDINGS_PER_DOCUMENT_MAX: usize = 64;
