//! Where policy comes from, and how a change of it becomes a compiled state that the catalog writer
//! can commit. Two sources exist: files that the controller reads, and objects that operators
//! apply. Both implement one interface, [`source::PolicySource`]; start there to add another.
//! `tenant_sources` merges the sources of a tenant by precedence and compiles them, `plan_apply`
//! decides a write request, and `changes` is the path of every change. Nothing is published here,
//! and no file is watched: `canal-sources` does that.

#![forbid(unsafe_code)]

mod answer;
pub mod applied;
mod changes;
pub mod files;
mod plan_apply;
mod prepare;
pub mod source;
mod tenant_compiler;
mod tenant_sources;
mod turns;

pub use answer::CHANGES_BYTES_MAX;
pub use changes::{ApplyOutcome, PendingChanges, QueuedWrite, WriteError};
pub use plan_apply::WriteRequest;
pub use prepare::{
    Basis, Commit, Committed, Objection, Prepared, Preparer, ValidatedTenant, WithheldReason,
    WriteEdits, clashes, compile_allowance, excesses,
};
pub use source::{PolicySource, ReadContent, SourceHealth, SourceState, SourceUpdate};
pub use tenant_compiler::{TenantCompiler, TenantCompilers};
pub use tenant_sources::TenantSources;
