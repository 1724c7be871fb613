//! The last good state on disk: `canal.program.v1.Snapshot`, its digest last. A file is used whole or not at all.

use std::path::Path;
use std::sync::Arc;

use canal_model::ids::Generation;
use canal_model::program::Kind;
use canal_wire::program::Snapshot;
use canal_wire::program::snapshot::Entry;
use canal_wire::southbound as wire;
use prost::Message;
use sha2::{Digest, Sha256};

use super::state::{Held, State};
use crate::durable;

/// The layout this build writes and reads.
const FORMAT: u32 = 1;
/// `digest` as encoded: field 4, wire type 2, 32 bytes. It is the last field, so what it covers is the bytes before it.
const DIGEST_HEAD: [u8; 2] = [4 << 3 | 2, 32];
const DIGEST_BYTES: usize = 32;

/// Why a snapshot is not used. The name is the label `reason` of `canal_southbound_snapshot_refused_total`.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// There is no file.
    #[error("no snapshot yet")]
    Missing,
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(std::io::Error),
    /// The digest at the end does not fit the content.
    #[error("is torn or was changed: its digest does not fit")]
    Digest,
    /// The content is not a snapshot.
    #[error("is not a snapshot: {0}")]
    Form(String),
    /// Another build wrote it.
    #[error("has format {0}; this build reads {FORMAT}")]
    Format(u32),
    /// A resource in it is not valid.
    #[error("holds a resource that this build refuses: {0}")]
    Resource(wire::WireError),
    /// The data plane did not take it.
    #[error("was refused by this data plane: {0}")]
    Refused(String),
}

impl SnapshotError {
    pub(super) fn reason(&self) -> &'static str {
        match self {
            SnapshotError::Missing => "missing",
            SnapshotError::Unreadable(_) => "unreadable",
            SnapshotError::Digest => "digest",
            SnapshotError::Form(_) => "form",
            SnapshotError::Format(_) => "format",
            SnapshotError::Resource(_) => "resource",
            SnapshotError::Refused(_) => "refused",
        }
    }
}

/// Writes the state, atomically and durably.
pub(super) fn write(path: &Path, state: &State) -> std::io::Result<()> {
    let mut snapshot = Snapshot { format: FORMAT, generation: state.generation.0, entries: Vec::new(), digest: Vec::new() };
    for (kind, held) in &state.kinds {
        let mut names: Vec<_> = held.iter().collect();
        names.sort_by_key(|(name, _)| *name);
        snapshot.entries.extend(names.into_iter().map(|(name, h)| Entry {
            type_url: wire::type_url(*kind).into(),
            name: name.to_string(),
            version: h.version.to_string(),
            resource: wire::encode(&h.resource),
        }));
    }
    let mut bytes = snapshot.encode_to_vec();
    let digest = Sha256::digest(&bytes);
    bytes.extend_from_slice(&DIGEST_HEAD);
    bytes.extend_from_slice(&digest);
    durable::replace(path, &bytes)
}

/// Reads the state of the kinds named; entries of other kinds are left out.
pub fn read(path: &Path, kinds: &[Kind]) -> Result<State, SnapshotError> {
    let bytes = std::fs::read(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => SnapshotError::Missing,
        _ => SnapshotError::Unreadable(e),
    })?;
    let covered = bytes.len().checked_sub(DIGEST_HEAD.len() + DIGEST_BYTES).ok_or(SnapshotError::Digest)?;
    let (content, tail) = bytes.split_at(covered);
    if tail[..DIGEST_HEAD.len()] != DIGEST_HEAD || tail[DIGEST_HEAD.len()..] != Sha256::digest(content)[..] {
        return Err(SnapshotError::Digest);
    }
    let snapshot = Snapshot::decode(content).map_err(|e| SnapshotError::Form(e.to_string()))?;
    if snapshot.format != FORMAT {
        return Err(SnapshotError::Format(snapshot.format));
    }
    let mut state = State { generation: Generation(snapshot.generation), ..State::default() };
    for e in snapshot.entries {
        let kind = wire::kind_of(&e.type_url).map_err(SnapshotError::Resource)?;
        if !kinds.contains(&kind) {
            continue;
        }
        let resource = Arc::new(wire::decode(kind, &e.name, &e.resource).map_err(SnapshotError::Resource)?);
        let held = Held { version: e.version.into(), resource };
        if state.kinds.entry(kind).or_default().insert(e.name.as_str().into(), held).is_some() {
            return Err(SnapshotError::Form(format!("{} is in it twice", e.name)));
        }
    }
    Ok(state)
}
