//! A data plane's complete state as bytes: `canal.program.v1.StateFile` with its digest last. It is
//! used as a whole or not at all. Reading and writing files is the caller's task.

use canal_model::ids::{Generation, StoreId};
use canal_model::program::{Resource, ResourceKind};
use prost::Message;
use sha2::{Digest, Sha256};

use super::ResourceDecodeError;
use crate::program::{StateFile, state_file};

/// Format version that this build writes, and the only one that it reads.
///
/// It is incremented with every kind of security resource. A state file from before that kind has
/// no such resources, and a data plane that boots from it would admit what it should refuse.
/// Version 2 added trust and policies, which 1 had not. Version 3 added manifests, without which
/// every tenant is closed.
pub const FORMAT: u32 = 3;
/// Encoded head of `digest`: field 4, wire type 2, 32 bytes. The field is the last one, so it
/// covers all bytes before it.
const DIGEST_HEAD: [u8; 2] = [4 << 3 | 2, 32];
const DIGEST_BYTES: usize = 32;

/// The reason why bytes are not used as a state file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateFileFormatError {
    /// The digest at the end does not match the content.
    #[error(
        "the state file is truncated or was modified: its digest does not match; fix: restore a good copy, or let the controller replace it"
    )]
    Digest,
    /// The content is not a state file.
    #[error(
        "the file is not a state file: {0}; fix: restore a good copy, or let the controller replace it"
    )]
    Form(String),
    /// The format version is another build's.
    #[error(
        "the state file has format {0}, and this build reads only {FORMAT}, because another build may have omitted policies that it did not know; fix: restore a good copy, or let the controller replace it"
    )]
    Format(u32),
    /// A resource in the file is not valid.
    #[error(
        "the state file contains a resource that this build refuses: {0}; fix: restore a good copy, or let the controller replace it"
    )]
    Resource(ResourceDecodeError),
}

/// One resource of a state file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateFileEntry {
    /// Version as on the wire; see [`version`].
    pub version: String,
    /// The resource itself, already validated.
    pub resource: Resource,
}

/// Origin of a state file's entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Newest generation among the entries.
    pub generation: Generation,
    /// Store of the controller; `None` if the controller names none.
    pub store: Option<StoreId>,
}

/// Returns the version of a resource that has none from a controller: the first 16 bytes of the
/// SHA-256 of its encoding, in hexadecimal.
pub fn version(resource: &Resource) -> String {
    Sha256::digest(super::encode(resource))
        .iter()
        .take(16)
        .map(|b| format!("{b:02x}"))
        .collect()
}

/// Encodes a state file; entries are written in the given order.
pub fn encode<'a>(
    head: Head,
    entries: impl IntoIterator<Item = (&'a str, &'a Resource)>,
) -> Vec<u8> {
    let entries = entries
        .into_iter()
        .map(|(version, resource)| state_file::Entry {
            type_url: resource.kind().type_url().into(),
            name: resource.name(),
            version: version.into(),
            resource: super::encode(resource),
        })
        .collect();
    let store = head
        .store
        .map(|store| store.to_string())
        .unwrap_or_default();
    let mut bytes = StateFile {
        format: FORMAT,
        generation: head.generation.0,
        entries,
        digest: Vec::new(),
        store,
    }
    .encode_to_vec();
    // The digest is appended by hand, because it covers the encoding of all other fields.
    let digest = Sha256::digest(&bytes);
    bytes.extend_from_slice(&DIGEST_HEAD);
    bytes.extend_from_slice(&digest);
    bytes
}

/// Decodes the entries of the given kinds and skips the others. Every entry is validated like one
/// from the wire.
///
/// # Errors
/// Fails with a [`StateFileFormatError`] if the file is damaged, has another format, or contains an
/// invalid resource.
pub fn decode(
    bytes: &[u8],
    kinds: &[ResourceKind],
) -> Result<(Head, Vec<StateFileEntry>), StateFileFormatError> {
    let covered = bytes
        .len()
        .checked_sub(DIGEST_HEAD.len() + DIGEST_BYTES)
        .ok_or(StateFileFormatError::Digest)?;
    let (content, tail) = bytes.split_at(covered);
    if tail[..DIGEST_HEAD.len()] != DIGEST_HEAD
        || tail[DIGEST_HEAD.len()..] != Sha256::digest(content)[..]
    {
        return Err(StateFileFormatError::Digest);
    }
    let snapshot =
        StateFile::decode(content).map_err(|e| StateFileFormatError::Form(e.to_string()))?;
    // Another format may lack kinds without which this build admits too much.
    if snapshot.format != FORMAT {
        return Err(StateFileFormatError::Format(snapshot.format));
    }
    let mut entries = Vec::with_capacity(snapshot.entries.len());
    for e in snapshot.entries {
        let kind = super::kind_of(&e.type_url).map_err(StateFileFormatError::Resource)?;
        // The file may be from a build that subscribed to more kinds.
        if kinds.contains(&kind) {
            let resource = super::decode(kind, &e.name, &e.resource)
                .map_err(StateFileFormatError::Resource)?;
            entries.push(StateFileEntry {
                version: e.version,
                resource,
            });
        }
    }
    let store =
        match snapshot.store.as_str() {
            // The controller named no store.
            "" => None,
            text => Some(text.parse().map_err(|e: canal_model::ids::IdError| {
                StateFileFormatError::Form(e.to_string())
            })?),
        };
    Ok((
        Head {
            generation: Generation(snapshot.generation),
            store,
        },
        entries,
    ))
}
