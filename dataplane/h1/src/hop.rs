//! Which fields end at this hop (RFC 9110 §7.6.1). Used by both the writer and the iterators for other protocols.

use crate::bytes::elements;
use crate::name::{HOP_BY_HOP, Name};
use crate::table::{Field, Fields};

/// True if a Connection option names this field. Only asked when Connection holds more than the well-known options.
pub(crate) fn is_nominated(fields: Fields<'_>, name: &[u8]) -> bool {
    fields.all(Name::Connection).any(|value| elements(value).any(|option| option.eq_ignore_ascii_case(name)))
}

pub(crate) fn end_to_end<'a>(fields: Fields<'a>, nominates: bool) -> impl Iterator<Item = Field<'a>> + use<'a> {
    fields.iter().filter(|field| field.id.bit() & HOP_BY_HOP == 0).filter(move |field| !nominates || !is_nominated(fields, field.name))
}
