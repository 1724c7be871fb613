//! Reads the line that starts a chunk (RFC 9112 §7.1): size, extensions, CR LF. It never sees
//! payload. It takes one byte at a time, so that a line split over several reads is neither
//! buffered nor scanned again.

use crate::bytes::{is_ows, is_token_byte, is_value_byte};
use crate::limits::{CHUNK_DIGITS_MAX, MessageLimits};
use crate::refusal::MessageRefusal;

/// Position of the reader within the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChunkLineState {
    Size,
    /// White space has followed the size; only an extension may follow.
    BeforeSemicolon,
    BeforeName,
    Name,
    AfterName,
    BeforeValue,
    Value,
    Quoted,
    QuotedPair,
    AfterQuoted,
    /// White space has followed a value; only another extension may follow.
    AfterValue,
    Lf,
}

/// Chunk line that has been read in part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkLine {
    state: ChunkLineState,
    digits: u8,
    size: u64,
    extension_bytes: usize,
}

impl ChunkLine {
    pub(crate) const START: ChunkLine = ChunkLine {
        state: ChunkLineState::Size,
        digits: 0,
        size: 0,
        extension_bytes: 0,
    };

    /// Consumes one byte and returns the chunk size once the line is complete.
    /// `all_extension_bytes` counts over the whole body.
    pub(crate) fn take(
        &mut self,
        b: u8,
        limits: &MessageLimits,
        all_extension_bytes: &mut usize,
    ) -> Result<Option<u64>, MessageRefusal> {
        match (self.state, b) {
            (ChunkLineState::Lf, b'\n') => return Ok(Some(self.size)),
            (ChunkLineState::Lf, _) => return Err(MessageRefusal::BareCr),
            (_, b'\n') => return Err(MessageRefusal::BareLf),
            (ChunkLineState::Size, _) => self.take_size_byte(b)?,
            (_, b'\r') => self.state = self.decide_end()?,
            _ => self.state = self.decide_extension_place(b)?,
        }
        // Extensions cost work and carry no payload, so they are limited per chunk and per body.
        if !matches!(self.state, ChunkLineState::Size | ChunkLineState::Lf) {
            self.extension_bytes += 1;
            *all_extension_bytes += 1;
            if self.extension_bytes > limits.chunk_extension_bytes_max {
                return Err(MessageRefusal::ChunkExtensionTooLong);
            }
            if *all_extension_bytes > limits.chunk_extensions_bytes_max {
                return Err(MessageRefusal::ChunkExtensionsTooLarge);
            }
        }
        Ok(None)
    }

    fn take_size_byte(&mut self, b: u8) -> Result<(), MessageRefusal> {
        if let Some(digit) = (b as char).to_digit(16) {
            if self.digits == CHUNK_DIGITS_MAX {
                return Err(MessageRefusal::ChunkSizeOverflow);
            }
            self.digits += 1;
            self.size = self.size << 4 | u64::from(digit);
            return Ok(());
        }
        self.state = match b {
            _ if self.digits == 0 => return Err(MessageRefusal::BadChunkSize),
            b'\r' => ChunkLineState::Lf,
            b';' => ChunkLineState::BeforeName,
            b' ' | b'\t' => ChunkLineState::BeforeSemicolon,
            _ => return Err(MessageRefusal::BadChunkSize),
        };
        Ok(())
    }

    /// Decides whether a CR may end the line here.
    fn decide_end(&self) -> Result<ChunkLineState, MessageRefusal> {
        match self.state {
            ChunkLineState::Name | ChunkLineState::Value | ChunkLineState::AfterQuoted => {
                Ok(ChunkLineState::Lf)
            }
            ChunkLineState::BeforeSemicolon => Err(MessageRefusal::BadChunkSize),
            _ => Err(MessageRefusal::BadChunkExtension),
        }
    }

    /// Returns the place after `b` in the extensions, by the grammar of RFC 9112 §7.1.1.
    fn decide_extension_place(&self, b: u8) -> Result<ChunkLineState, MessageRefusal> {
        Ok(match (self.state, b) {
            (
                ChunkLineState::BeforeSemicolon
                | ChunkLineState::Name
                | ChunkLineState::AfterName
                | ChunkLineState::Value
                | ChunkLineState::AfterQuoted
                | ChunkLineState::AfterValue,
                b';',
            ) => ChunkLineState::BeforeName,
            (ChunkLineState::Name | ChunkLineState::AfterName, b'=') => ChunkLineState::BeforeValue,
            (ChunkLineState::Name | ChunkLineState::AfterName, _) if is_ows(b) => {
                ChunkLineState::AfterName
            }
            (
                ChunkLineState::Value | ChunkLineState::AfterQuoted | ChunkLineState::AfterValue,
                _,
            ) if is_ows(b) => ChunkLineState::AfterValue,
            (
                ChunkLineState::BeforeSemicolon
                | ChunkLineState::BeforeName
                | ChunkLineState::BeforeValue,
                _,
            ) if is_ows(b) => self.state,
            // Only `;` may follow the size, so another byte is a fault of the size.
            (ChunkLineState::BeforeSemicolon, _) => return Err(MessageRefusal::BadChunkSize),
            (ChunkLineState::BeforeName | ChunkLineState::Name, _) if is_token_byte(b) => {
                ChunkLineState::Name
            }
            (ChunkLineState::BeforeValue, b'"') => ChunkLineState::Quoted,
            (ChunkLineState::BeforeValue | ChunkLineState::Value, _) if is_token_byte(b) => {
                ChunkLineState::Value
            }
            (ChunkLineState::Quoted, b'"') => ChunkLineState::AfterQuoted,
            (ChunkLineState::Quoted, b'\\') => ChunkLineState::QuotedPair,
            (ChunkLineState::Quoted | ChunkLineState::QuotedPair, _) if is_value_byte(b) => {
                ChunkLineState::Quoted
            }
            _ => return Err(MessageRefusal::BadChunkExtension),
        })
    }
}
