//! The last good state on disk, in `canal_wire`'s snapshot form. A file is used whole or not at all.

use std::path::Path;
use std::sync::Arc;

use canal_model::program::Kind;
use canal_wire::southbound::snapshot as wire;

use super::state::{Held, State};
use crate::durable;

/// Why a snapshot is not used. The name is the label `reason` of `canal_southbound_snapshot_refused_total`.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// There is no file.
    #[error("no snapshot yet")]
    Missing,
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(std::io::Error),
    /// The file's content is refused.
    #[error("{0}")]
    Content(wire::SnapshotError),
    /// A resource is in it more than once.
    #[error("is not a snapshot: {0} is in it twice")]
    Twice(String),
    /// The data plane did not take it.
    #[error("was refused by this data plane: {0}")]
    Refused(String),
}

impl SnapshotError {
    pub(super) fn reason(&self) -> &'static str {
        match self {
            SnapshotError::Missing => "missing",
            SnapshotError::Unreadable(_) => "unreadable",
            SnapshotError::Content(wire::SnapshotError::Digest) => "digest",
            SnapshotError::Content(wire::SnapshotError::Form(_)) | SnapshotError::Twice(_) => "form",
            SnapshotError::Content(wire::SnapshotError::Format(_)) => "format",
            SnapshotError::Content(wire::SnapshotError::Resource(_)) => "resource",
            SnapshotError::Refused(_) => "refused",
        }
    }
}

/// Writes the state, atomically and durably.
pub(super) fn write(path: &Path, state: &State) -> std::io::Result<()> {
    let mut entries = Vec::new();
    for held in state.kinds.values() {
        let mut names: Vec<_> = held.iter().collect();
        names.sort_by_key(|(name, _)| *name);
        entries.extend(names.into_iter().map(|(_, h)| (&*h.version, &*h.resource)));
    }
    durable::replace(path, &wire::encode(wire::Head { generation: state.generation, store: state.store }, entries))
}

/// Reads the state of the kinds named; entries of other kinds are left out.
pub fn read(path: &Path, kinds: &[Kind]) -> Result<State, SnapshotError> {
    let bytes = std::fs::read(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => SnapshotError::Missing,
        _ => SnapshotError::Unreadable(e),
    })?;
    let (head, entries) = wire::decode(&bytes, kinds).map_err(SnapshotError::Content)?;
    let mut state = State { generation: head.generation, store: head.store, ..State::default() };
    for e in entries {
        let (kind, name) = (e.resource.kind(), e.resource.name());
        let held = Held { version: e.version.into(), resource: Arc::new(e.resource) };
        if state.kinds.entry(kind).or_default().insert(name.as_str().into(), held).is_some() {
            return Err(SnapshotError::Twice(name));
        }
    }
    Ok(state)
}
