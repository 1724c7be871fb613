//! The fields of a body: read without copying, written into the channel's buffer. What they mean is the parent's.

use std::fmt::Display;

use canal_model::identity::{IDENTITY_BYTES_MAX, Identity};

use super::{BODY_MAX, FILE, HEADER, KeyName, Malformed, SPKI_HASH, SpkiHash, Unsendable};

/// What is left of a body.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize, what: &'static str) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(n).ok_or(Malformed::Truncated(what))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed::Truncated(what))?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(super) fn u8(&mut self, what: &'static str) -> Result<u8, Malformed> {
        self.array::<1>(what).map(|[b]| b)
    }

    pub(super) fn u16(&mut self, what: &'static str) -> Result<u16, Malformed> {
        self.array(what).map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, Malformed> {
        self.array(what).map(u32::from_be_bytes)
    }

    /// Everything to the end: the last field needs no length.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// Bytes with a u16 length.
    pub(super) fn short(&mut self, what: &'static str, max: usize) -> Result<&'a [u8], Malformed> {
        let length = usize::from(self.u16(what)?);
        if length > max {
            return Err(Malformed::Oversized(what, length, max));
        }
        self.take(length, what)
    }

    /// Bytes with a u32 length.
    pub(super) fn long(&mut self, what: &'static str) -> Result<&'a [u8], Malformed> {
        let length = self.u32(what)? as usize;
        self.take(length, what)
    }

    pub(super) fn text(&mut self, what: &'static str, max: usize) -> Result<&'a str, Malformed> {
        std::str::from_utf8(self.short(what, max)?).map_err(|_| Malformed::Text(what))
    }

    pub(super) fn identity(&mut self, what: &'static str) -> Result<Identity, Malformed> {
        self.text(what, IDENTITY_BYTES_MAX)?.parse().map_err(|_| Malformed::Name(what))
    }

    pub(super) fn key(&mut self) -> Result<KeyName, Malformed> {
        let text = self.text("key", IDENTITY_BYTES_MAX)?;
        // No service holds a colon and no identity begins with `file:`, so the three spellings never meet.
        let read = match text.strip_prefix(FILE) {
            Some(service) => service.parse().map(KeyName::File),
            None if text.contains(':') => text.parse().map(KeyName::Identity),
            None => text.parse().map(KeyName::Service),
        };
        read.map_err(|_| Malformed::Name("key"))
    }

    /// One, or nothing.
    pub(super) fn spki_hash(&mut self) -> Result<Option<SpkiHash>, Malformed> {
        match self.short(SPKI_HASH, size_of::<SpkiHash>())? {
            [] => Ok(None),
            hash => hash.try_into().map(Some).map_err(|_| Malformed::Truncated(SPKI_HASH)),
        }
    }

    /// A u16 count, then the entries.
    pub(super) fn list<T>(
        &mut self,
        what: &'static str,
        max: usize,
        one: impl Fn(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let count = usize::from(self.u16(what)?);
        if count > max {
            return Err(Malformed::Oversized(what, count, max));
        }
        (0..count).map(|_| one(self)).collect()
    }

    pub(super) fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed::Trailing(self.0.len())) }
    }
}

/// Appends to a buffer.
pub(super) struct Writer<'a>(pub(super) &'a mut Vec<u8>);

impl Writer<'_> {
    /// One frame around what `body` writes; all or nothing.
    pub(super) fn frame(
        out: &mut Vec<u8>,
        id: u64,
        kind: u8,
        body: impl FnOnce(&mut Writer<'_>) -> Result<(), Unsendable>,
    ) -> Result<(), Unsendable> {
        let start = out.len();
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&id.to_be_bytes());
        out.push(kind);
        let written = body(&mut Writer(out)).and_then(|()| fits("body", out.len() - start - HEADER, BODY_MAX));
        match written {
            // Fits: a body has at most BODY_MAX bytes.
            Ok(()) => {
                let length = u32::try_from(out.len() - start - 4).unwrap_or(u32::MAX);
                out[start..start + 4].copy_from_slice(&length.to_be_bytes());
                Ok(())
            }
            Err(e) => {
                out.truncate(start);
                Err(e)
            }
        }
    }

    /// Bytes with a u16 length.
    pub(super) fn short(&mut self, what: &'static str, bytes: &[u8], max: usize) -> Result<(), Unsendable> {
        fits(what, bytes.len(), max)?;
        let length = u16::try_from(bytes.len()).map_err(|_| Unsendable { what, given: bytes.len(), max })?;
        self.0.extend_from_slice(&length.to_be_bytes());
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    /// Bytes with a u32 length.
    pub(super) fn long(&mut self, what: &'static str, bytes: &[u8]) -> Result<(), Unsendable> {
        fits(what, bytes.len(), BODY_MAX)?;
        let length = u32::try_from(bytes.len()).map_err(|_| Unsendable { what, given: bytes.len(), max: BODY_MAX })?;
        self.0.extend_from_slice(&length.to_be_bytes());
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    /// The last field: its length is the frame's.
    pub(super) fn rest(&mut self, bytes: &[u8]) -> Result<(), Unsendable> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    pub(super) fn name(&mut self, what: &'static str, name: &impl Display) -> Result<(), Unsendable> {
        self.short(what, name.to_string().as_bytes(), IDENTITY_BYTES_MAX)
    }

    /// A u16 count, then the entries.
    pub(super) fn list<T>(
        &mut self,
        what: &'static str,
        max: usize,
        all: &[T],
        one: impl Fn(&mut Self, &T) -> Result<(), Unsendable>,
    ) -> Result<(), Unsendable> {
        fits(what, all.len(), max)?;
        let count = u16::try_from(all.len()).map_err(|_| Unsendable { what, given: all.len(), max })?;
        self.0.extend_from_slice(&count.to_be_bytes());
        all.iter().try_for_each(|t| one(self, t))
    }
}

fn fits(what: &'static str, given: usize, max: usize) -> Result<(), Unsendable> {
    if given <= max { Ok(()) } else { Err(Unsendable { what, given, max }) }
}
