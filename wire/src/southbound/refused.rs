//! The resources that a nack refuses, as they travel in `error_detail.details`. What follows from a refusal is not decided here.

use prost::Message;
use prost_types::Any;

use crate::discovery::Status;
use crate::program::RefusedResources;
use crate::program::refused_resources::RefusedResource;

/// Type URL of the detail that names refused resources.
pub const TYPE_URL: &str = "type.googleapis.com/canal.program.v1.RefusedResources";
/// Longest reason of one refused resource, in bytes.
pub const REASON_BYTES_MAX: usize = 256;
/// Refused resources of one nack that carry a reason. The names are always complete: what a nack does not name was taken.
pub const REASONS_MAX: usize = 256;

/// Packs the refused resources; reasons beyond [`REASONS_MAX`] are left out and each is cut to [`REASON_BYTES_MAX`].
pub fn pack(resources: impl IntoIterator<Item = (String, String)>) -> Any {
    let one = |(at, (name, mut reason)): (usize, (String, String))| {
        reason.truncate(if at < REASONS_MAX { reason.floor_char_boundary(REASON_BYTES_MAX) } else { 0 });
        RefusedResource { name, reason }
    };
    let resources = resources.into_iter().enumerate().map(one).collect();
    Any { type_url: TYPE_URL.into(), value: RefusedResources { resources }.encode_to_vec() }
}

/// Reads the names of refused resources, each with its reason; none if the nack names none, as one of a foreign client does.
pub fn unpack(status: &Status) -> Vec<(String, String)> {
    let details = status.details.iter().filter(|any| any.type_url == TYPE_URL);
    details
        .filter_map(|any| RefusedResources::decode(&any.value[..]).ok())
        .flat_map(|list| list.resources)
        .map(|r| (r.name, r.reason))
        .collect()
}
