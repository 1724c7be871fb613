//! The line that starts a chunk (RFC 9112 §7.1), one byte at a time: size, extensions, CR LF. It sees no payload.
//! Byte by byte, because then a line split over reads needs no buffering and no second look.

use crate::bytes::{is_ows, is_token_byte, is_value_byte};
use crate::limits::{CHUNK_DIGITS_MAX, Limits};
use crate::refusal::Refusal;

/// Where in the line the reader is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Size,
    /// White space after the size: only an extension may follow.
    BeforeSemicolon,
    BeforeName,
    Name,
    AfterName,
    BeforeValue,
    Value,
    Quoted,
    QuotedPair,
    AfterQuoted,
    /// White space after a value: only another extension may follow.
    AfterValue,
    Lf,
}

/// One chunk line in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkLine {
    place: Place,
    digits: u8,
    size: u64,
    extension_bytes: usize,
}

impl ChunkLine {
    pub(crate) const START: ChunkLine = ChunkLine { place: Place::Size, digits: 0, size: 0, extension_bytes: 0 };

    /// Takes one byte. `Some(size)` when the line is whole. `all_extension_bytes` counts over the whole body.
    pub(crate) fn take(&mut self, b: u8, limits: &Limits, all_extension_bytes: &mut usize) -> Result<Option<u64>, Refusal> {
        match (self.place, b) {
            (Place::Lf, b'\n') => return Ok(Some(self.size)),
            (Place::Lf, _) => return Err(Refusal::BareCr),
            (_, b'\n') => return Err(Refusal::BareLf),
            (Place::Size, _) => self.take_size_byte(b)?,
            (_, b'\r') => self.place = self.decide_end()?,
            _ => self.place = self.decide_extension_place(b)?,
        }
        if !matches!(self.place, Place::Size | Place::Lf) {
            self.extension_bytes += 1;
            *all_extension_bytes += 1;
            if self.extension_bytes > limits.chunk_extension_bytes_max {
                return Err(Refusal::ChunkExtensionTooLong);
            }
            if *all_extension_bytes > limits.chunk_extensions_bytes_max {
                return Err(Refusal::ChunkExtensionsTooLarge);
            }
        }
        Ok(None)
    }

    fn take_size_byte(&mut self, b: u8) -> Result<(), Refusal> {
        if let Some(digit) = (b as char).to_digit(16) {
            if self.digits == CHUNK_DIGITS_MAX {
                return Err(Refusal::ChunkSizeOverflow);
            }
            self.digits += 1;
            self.size = self.size << 4 | u64::from(digit);
            return Ok(());
        }
        self.place = match b {
            _ if self.digits == 0 => return Err(Refusal::BadChunkSize),
            b'\r' => Place::Lf,
            b';' => Place::BeforeName,
            b' ' | b'\t' => Place::BeforeSemicolon,
            _ => return Err(Refusal::BadChunkSize),
        };
        Ok(())
    }

    /// A CR: may the line end here?
    fn decide_end(&self) -> Result<Place, Refusal> {
        match self.place {
            Place::Name | Place::Value | Place::AfterQuoted => Ok(Place::Lf),
            Place::BeforeSemicolon => Err(Refusal::BadChunkSize),
            _ => Err(Refusal::BadChunkExtension),
        }
    }

    fn decide_extension_place(&self, b: u8) -> Result<Place, Refusal> {
        Ok(match (self.place, b) {
            (Place::BeforeSemicolon | Place::Name | Place::AfterName | Place::Value | Place::AfterQuoted | Place::AfterValue, b';') => {
                Place::BeforeName
            }
            (Place::Name | Place::AfterName, b'=') => Place::BeforeValue,
            (Place::Name | Place::AfterName, _) if is_ows(b) => Place::AfterName,
            (Place::Value | Place::AfterQuoted | Place::AfterValue, _) if is_ows(b) => Place::AfterValue,
            (Place::BeforeSemicolon | Place::BeforeName | Place::BeforeValue, _) if is_ows(b) => self.place,
            (Place::BeforeSemicolon, _) => return Err(Refusal::BadChunkSize),
            (Place::BeforeName | Place::Name, _) if is_token_byte(b) => Place::Name,
            (Place::BeforeValue, b'"') => Place::Quoted,
            (Place::BeforeValue | Place::Value, _) if is_token_byte(b) => Place::Value,
            (Place::Quoted, b'"') => Place::AfterQuoted,
            (Place::Quoted, b'\\') => Place::QuotedPair,
            (Place::Quoted | Place::QuotedPair, _) if is_value_byte(b) => Place::Quoted,
            _ => return Err(Refusal::BadChunkExtension),
        })
    }
}
