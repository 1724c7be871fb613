//! A data plane's whole state as bytes: `canal.program.v1.Snapshot`, its digest last. Used whole or not at all. Files are others' affair.

use canal_model::ids::{Generation, StoreId};
use canal_model::program::{Kind, Resource};
use prost::Message;
use sha2::{Digest, Sha256};

use super::WireError;
use crate::program::{Snapshot, snapshot};

/// What this build writes, and all that it reads. It is raised with every kind of resource that decides who may do what: a snapshot from before
/// that kind has none, and a data plane that booted from it would let through what it should refuse. 2: trust and policies (1 had neither).
/// 3: manifests, without which every tenant is closed.
pub const FORMAT: u32 = 3;
/// `digest` as encoded: field 4, wire type 2, 32 bytes. It is the last field, so what it covers is the bytes before it.
const DIGEST_HEAD: [u8; 2] = [4 << 3 | 2, 32];
const DIGEST_BYTES: usize = 32;

/// Why bytes are not used as a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// The digest at the end does not fit the content.
    #[error("is torn or was changed: its digest does not fit")]
    Digest,
    /// The content is not a snapshot.
    #[error("is not a snapshot: {0}")]
    Form(String),
    /// Another build wrote it.
    #[error("has format {0}, and this build reads {FORMAT} alone: what another build did not know, policies say, is not in it")]
    Format(u32),
    /// A resource in it is not valid.
    #[error("holds a resource that this build refuses: {0}")]
    Resource(WireError),
}

/// One resource of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// As on the wire; see [`version`].
    pub version: String,
    /// What it is.
    pub resource: Resource,
}

/// What a snapshot's entries are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// The newest generation in it.
    pub generation: Generation,
    /// The controller's store; `None`: the controller names none.
    pub store: Option<StoreId>,
}

/// The version of a resource that has none from a controller: the start of its bytes' SHA-256.
pub fn version(resource: &Resource) -> String {
    Sha256::digest(super::encode(resource)).iter().take(16).map(|b| format!("{b:02x}")).collect()
}

/// The bytes of a snapshot; entries are written in the order given.
pub fn encode<'a>(head: Head, entries: impl IntoIterator<Item = (&'a str, &'a Resource)>) -> Vec<u8> {
    let entries = entries
        .into_iter()
        .map(|(version, resource)| snapshot::Entry {
            type_url: super::type_url(resource.kind()).into(),
            name: resource.name(),
            version: version.into(),
            resource: super::encode(resource),
        })
        .collect();
    let store = head.store.map(|store| store.to_string()).unwrap_or_default();
    let mut bytes = Snapshot { format: FORMAT, generation: head.generation.0, entries, digest: Vec::new(), store }.encode_to_vec();
    let digest = Sha256::digest(&bytes);
    bytes.extend_from_slice(&DIGEST_HEAD);
    bytes.extend_from_slice(&digest);
    bytes
}

/// Reads the entries of the kinds named; others are left out. Every one is checked, as those from the wire are.
pub fn decode(bytes: &[u8], kinds: &[Kind]) -> Result<(Head, Vec<Entry>), SnapshotError> {
    let covered = bytes.len().checked_sub(DIGEST_HEAD.len() + DIGEST_BYTES).ok_or(SnapshotError::Digest)?;
    let (content, tail) = bytes.split_at(covered);
    if tail[..DIGEST_HEAD.len()] != DIGEST_HEAD || tail[DIGEST_HEAD.len()..] != Sha256::digest(content)[..] {
        return Err(SnapshotError::Digest);
    }
    let snapshot = Snapshot::decode(content).map_err(|e| SnapshotError::Form(e.to_string()))?;
    if snapshot.format != FORMAT {
        return Err(SnapshotError::Format(snapshot.format));
    }
    let mut entries = Vec::with_capacity(snapshot.entries.len());
    for e in snapshot.entries {
        let kind = super::kind_of(&e.type_url).map_err(SnapshotError::Resource)?;
        if kinds.contains(&kind) {
            let resource = super::decode(kind, &e.name, &e.resource).map_err(SnapshotError::Resource)?;
            entries.push(Entry { version: e.version, resource });
        }
    }
    let store = match snapshot.store.as_str() {
        "" => None,
        text => Some(text.parse().map_err(|e: canal_model::ids::IdError| SnapshotError::Form(e.to_string()))?),
    };
    Ok((Head { generation: Generation(snapshot.generation), store }, entries))
}
