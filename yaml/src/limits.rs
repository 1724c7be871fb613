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
/// Bytes of texts and of names of fields that aliases may repeat in one document.
/// Each of [`ALIASED_NODES_MAX`] aliases may name a text of megabytes. Nobody measured this value.
pub const ALIASED_BYTES_MAX: usize = 1 << 20;
/// YAML nodes that anchors (`&name`) may mark in one document; a node counts for each anchor that it
/// is inside.
/// A marked node is copied for the aliases that may follow, and anchors can be inside each other.
/// Nobody measured this value.
pub const ANCHORED_NODES_MAX: usize = 100_000;
/// Bytes of texts and of names of fields that anchors may mark in one document.
/// Nobody measured this value; it is eight times what aliases may repeat.
pub const ANCHORED_BYTES_MAX: usize = 8 << 20;
/// Errors reported one by one for one document. Beyond this, a whole field is dropped, or the whole
/// object counts as faulty.
/// A document with more is mostly of another kind than it states, and a person reads the first few.
pub const FINDINGS_PER_DOCUMENT_MAX: usize = 64;
