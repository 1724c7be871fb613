//! The list of resources that a NACK refuses, as it is carried in `error_detail.details`. The
//! effects of a refusal are not decided here.

use prost::Message;
use prost_types::Any;

use crate::discovery::Status;
use crate::program::RefusedResources;
use crate::program::refused_resources::RefusedResource;

/// Type URL of the detail that lists refused resources.
pub const TYPE_URL: &str = "type.googleapis.com/canal.program.v1.RefusedResources";
/// Maximum length of the reason for one refused resource, in bytes.
/// With [`REASONS_MAX`] of them, the reasons of one NACK have 64 KiB at most.
pub const REASON_BYTES_MAX: usize = 256;
/// Maximum number of refused resources of one NACK that have a reason. The names are always
/// complete: a resource that is not listed was accepted.
/// Operators see at most 16 of a tenant (`REFUSED_SHOWN_MAX`).
pub const REASONS_MAX: usize = 256;

/// Packs the refused resources. Reasons beyond [`REASONS_MAX`] are left out, and each is truncated
/// to [`REASON_BYTES_MAX`].
pub fn pack(resources: impl IntoIterator<Item = (String, String)>) -> Any {
    let one = |(at, (name, mut reason)): (usize, (String, String))| {
        reason.truncate(if at < REASONS_MAX {
            reason.floor_char_boundary(REASON_BYTES_MAX)
        } else {
            0
        });
        RefusedResource { name, reason }
    };
    let resources = resources.into_iter().enumerate().map(one).collect();
    Any {
        type_url: TYPE_URL.into(),
        value: RefusedResources { resources }.encode_to_vec(),
    }
}

/// Returns the names of refused resources, each with its reason. The list is empty if the NACK
/// names none, like that of a foreign client.
pub fn unpack(status: &Status) -> Vec<(String, String)> {
    let details = status.details.iter().filter(|any| any.type_url == TYPE_URL);
    details
        .filter_map(|any| RefusedResources::decode(&any.value[..]).ok())
        .flat_map(|list| list.resources)
        .map(|r| (r.name, r.reason))
        .collect()
}
