//! Fields of a body: decoded without copying, and encoded into the channel's buffer. The parent
//! module defines their meaning.

use std::fmt::Display;

use canal_model::identity::{IDENTITY_BYTES_MAX, Identity};

use super::{BODY_MAX, EncodeError, FILE, FrameError, HEADER, KeyName, SPKI_HASH, SpkiHash};

/// Decodes fields from the remaining bytes of a body.
pub(super) struct FieldReader<'a>(pub(super) &'a [u8]);

impl<'a> FieldReader<'a> {
    fn take(&mut self, n: usize, what: &'static str) -> Result<&'a [u8], FrameError> {
        let (taken, rest) = self
            .0
            .split_at_checked(n)
            .ok_or(FrameError::Truncated(what))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], FrameError> {
        let (taken, rest) = self
            .0
            .split_first_chunk::<N>()
            .ok_or(FrameError::Truncated(what))?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(super) fn u8(&mut self, what: &'static str) -> Result<u8, FrameError> {
        self.array::<1>(what).map(|[b]| b)
    }

    pub(super) fn u16(&mut self, what: &'static str) -> Result<u16, FrameError> {
        self.array(what).map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, FrameError> {
        self.array(what).map(u32::from_be_bytes)
    }

    /// Returns all remaining bytes: the last field has no length.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// Decodes bytes with a u16 length.
    pub(super) fn short(&mut self, what: &'static str, max: usize) -> Result<&'a [u8], FrameError> {
        let length = usize::from(self.u16(what)?);
        if length > max {
            return Err(FrameError::Oversized(what, length, max));
        }
        self.take(length, what)
    }

    /// Decodes bytes with a u32 length.
    pub(super) fn long(&mut self, what: &'static str) -> Result<&'a [u8], FrameError> {
        let length = self.u32(what)? as usize;
        self.take(length, what)
    }

    pub(super) fn text(&mut self, what: &'static str, max: usize) -> Result<&'a str, FrameError> {
        std::str::from_utf8(self.short(what, max)?).map_err(|_| FrameError::Text(what))
    }

    pub(super) fn identity(&mut self, what: &'static str) -> Result<Identity, FrameError> {
        self.text(what, IDENTITY_BYTES_MAX)?
            .parse()
            .map_err(|_| FrameError::Name(what))
    }

    pub(super) fn key(&mut self) -> Result<KeyName, FrameError> {
        let text = self.text("key", IDENTITY_BYTES_MAX)?;
        // A service contains no colon and no identity begins with `file:`, so the three forms
        // cannot be confused.
        let read = match text.strip_prefix(FILE) {
            Some(service) => service.parse().map(KeyName::File),
            None if text.contains(':') => text.parse().map(KeyName::Identity),
            None => text.parse().map(KeyName::Service),
        };
        read.map_err(|_| FrameError::Name("key"))
    }

    /// Decodes a hash, or `None` if the field is empty.
    pub(super) fn spki_hash(&mut self) -> Result<Option<SpkiHash>, FrameError> {
        match self.short(SPKI_HASH, size_of::<SpkiHash>())? {
            [] => Ok(None),
            hash => hash
                .try_into()
                .map(Some)
                .map_err(|_| FrameError::Truncated(SPKI_HASH)),
        }
    }

    /// Decodes a u16 count and that many entries.
    pub(super) fn list<T>(
        &mut self,
        what: &'static str,
        max: usize,
        one: impl Fn(&mut Self) -> Result<T, FrameError>,
    ) -> Result<Vec<T>, FrameError> {
        let count = usize::from(self.u16(what)?);
        if count > max {
            return Err(FrameError::Oversized(what, count, max));
        }
        (0..count).map(|_| one(self)).collect()
    }

    pub(super) fn end(self) -> Result<(), FrameError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(FrameError::Trailing(self.0.len()))
        }
    }
}

/// Encodes fields at the end of a buffer.
pub(super) struct FieldWriter<'a>(pub(super) &'a mut Vec<u8>);

impl FieldWriter<'_> {
    /// Encodes one frame around what `body` writes; after an error the buffer is unchanged.
    pub(super) fn frame(
        out: &mut Vec<u8>,
        id: u64,
        kind: u8,
        body: impl FnOnce(&mut FieldWriter<'_>) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        let start = out.len();
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&id.to_be_bytes());
        out.push(kind);
        let written = body(&mut FieldWriter(out))
            .and_then(|()| fits("body", out.len() - start - HEADER, BODY_MAX));
        match written {
            // The conversion cannot fail: a body has at most BODY_MAX bytes.
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

    /// Encodes bytes with a u16 length.
    pub(super) fn short(
        &mut self,
        what: &'static str,
        bytes: &[u8],
        max: usize,
    ) -> Result<(), EncodeError> {
        fits(what, bytes.len(), max)?;
        let length = u16::try_from(bytes.len()).map_err(|_| EncodeError {
            what,
            count: bytes.len(),
            max,
        })?;
        self.0.extend_from_slice(&length.to_be_bytes());
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    /// Encodes bytes with a u32 length.
    pub(super) fn long(&mut self, what: &'static str, bytes: &[u8]) -> Result<(), EncodeError> {
        fits(what, bytes.len(), BODY_MAX)?;
        let length = u32::try_from(bytes.len()).map_err(|_| EncodeError {
            what,
            count: bytes.len(),
            max: BODY_MAX,
        })?;
        self.0.extend_from_slice(&length.to_be_bytes());
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    /// Encodes the last field: its length follows from the frame's.
    pub(super) fn rest(&mut self, bytes: &[u8]) -> Result<(), EncodeError> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    pub(super) fn name(
        &mut self,
        what: &'static str,
        name: &impl Display,
    ) -> Result<(), EncodeError> {
        self.short(what, name.to_string().as_bytes(), IDENTITY_BYTES_MAX)
    }

    /// Encodes a u16 count and the entries.
    pub(super) fn list<T>(
        &mut self,
        what: &'static str,
        max: usize,
        all: &[T],
        one: impl Fn(&mut Self, &T) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        fits(what, all.len(), max)?;
        let count = u16::try_from(all.len()).map_err(|_| EncodeError {
            what,
            count: all.len(),
            max,
        })?;
        self.0.extend_from_slice(&count.to_be_bytes());
        all.iter().try_for_each(|t| one(self, t))
    }
}

fn fits(what: &'static str, given: usize, max: usize) -> Result<(), EncodeError> {
    if given <= max {
        Ok(())
    } else {
        Err(EncodeError {
            what,
            count: given,
            max,
        })
    }
}
