//! Decides which fields end at this hop (RFC 9110 §7.6.1). The writer and the iterators for other
//! protocols use it.

use crate::bytes::elements;
use crate::field_table::{HeaderField, HeaderFields};
use crate::name::{FieldName, HOP_BY_HOP};

/// Returns true if a Connection option names this field. Callers skip it unless Connection has more
/// than the well-known options.
pub(crate) fn is_nominated(fields: HeaderFields<'_>, name: &[u8]) -> bool {
    fields
        .all(FieldName::Connection)
        .any(|value| elements(value).any(|option| option.eq_ignore_ascii_case(name)))
}

pub(crate) fn end_to_end<'a>(
    fields: HeaderFields<'a>,
    nominates: bool,
) -> impl Iterator<Item = HeaderField<'a>> + use<'a> {
    fields
        .iter()
        .filter(|field| field.id.bit() & HOP_BY_HOP == 0)
        .filter(move |field| !nominates || !is_nominated(fields, field.name))
}
