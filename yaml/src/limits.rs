//! Limits on one document, so that no text can exhaust the process that reads it. A test reaches
//! each limit.

/// Levels of nesting in one document.
/// Types are read from the tree recursively, and Kubernetes objects have about a dozen levels.
/// Nobody measured this value.
pub const DEPTH_MAX: usize = 64;
/// YAML nodes that aliases (`*name`) may repeat in one document.
/// Without a limit, a few lines of nested aliases stand for billions of nodes. Nobody measured this
/// value.
pub const ALIASED_NODES_MAX: usize = 10_000;
/// Errors reported one by one for one document. Beyond this, a whole field is dropped, or the whole
/// object counts as faulty.
/// A document with more is mostly of another kind than it states, and a person reads the first few.
pub const FINDINGS_PER_DOCUMENT_MAX: usize = 64;
