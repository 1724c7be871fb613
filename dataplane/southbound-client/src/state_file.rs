//! State file: the last good state on disk, in the format of `canal_wire`. A file is used
//! completely or not at all.

use std::path::Path;
use std::sync::Arc;

use canal_model::program::ResourceKind;
use canal_runtime::atomic_file;
use canal_wire::southbound::state_file as wire;

use super::state::{ResourceState, VersionedResource};

/// Reasons why a state file is not used. Each has a value of the label `reason` of
/// `canal_southbound_state_file_rejected_total`.
#[derive(Debug, thiserror::Error)]
pub enum StateFileError {
    /// The file does not exist.
    #[error("there is no state file yet")]
    Missing,
    /// The file cannot be read.
    #[error("the state file cannot be read: {0}; fix: make it readable for this process")]
    Unreadable(std::io::Error),
    /// The content of the file is invalid.
    #[error("{0}")]
    Content(wire::StateFileFormatError),
    /// A resource occurs in the file more than once.
    #[error(
        "the state file contains {0} twice; fix: restore a good copy, or let the controller replace it"
    )]
    Twice(String),
    /// The data plane refused the state.
    #[error(
        "this data plane refused the content of the state file: {0}; fix: restore a good copy, or let the controller replace it"
    )]
    Refused(String),
}

impl StateFileError {
    pub(super) fn reason(&self) -> &'static str {
        match self {
            StateFileError::Missing => "missing",
            StateFileError::Unreadable(_) => "unreadable",
            StateFileError::Content(wire::StateFileFormatError::Digest) => "digest",
            StateFileError::Content(wire::StateFileFormatError::Form(_))
            | StateFileError::Twice(_) => "form",
            StateFileError::Content(wire::StateFileFormatError::Format(_)) => "format",
            StateFileError::Content(wire::StateFileFormatError::Resource(_)) => "resource",
            StateFileError::Refused(_) => "refused",
        }
    }
}

/// Writes the state atomically and durably.
pub(super) fn write(path: &Path, state: &ResourceState) -> std::io::Result<()> {
    let resources = state
        .kinds
        .values()
        .flat_map(|resources| resources.values());
    let entries = resources.map(|h| (&*h.version, &*h.resource));
    atomic_file::replace(
        path,
        &wire::encode(
            wire::Head {
                generation: state.generation,
                store: state.store,
            },
            entries,
        ),
    )
}

/// Reads the resources of the given kinds; entries of other kinds are left out.
///
/// # Errors
/// The file is missing, unreadable or invalid, or names a resource twice.
pub fn read(path: &Path, kinds: &[ResourceKind]) -> Result<ResourceState, StateFileError> {
    let bytes = std::fs::read(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => StateFileError::Missing,
        _ => StateFileError::Unreadable(e),
    })?;
    let (head, entries) = wire::decode(&bytes, kinds).map_err(StateFileError::Content)?;
    let mut state = ResourceState {
        generation: head.generation,
        store: head.store,
        ..ResourceState::default()
    };
    for e in entries {
        let (kind, name) = (e.resource.kind(), e.resource.name());
        let resource = VersionedResource {
            version: e.version.into(),
            resource: Arc::new(e.resource),
        };
        if state
            .kinds
            .entry(kind)
            .or_default()
            .insert(name.as_str().into(), resource)
            .is_some()
        {
            return Err(StateFileError::Twice(name));
        }
    }
    Ok(state)
}
