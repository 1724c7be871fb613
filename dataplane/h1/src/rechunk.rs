//! Writes chunk framing around payload that is not copied (RFC 9112 §7.1). It receives lengths and
//! trailers, never payload.

use bytes::BufMut;

use crate::bytes::{is_token, is_value};
use crate::name::{FieldName, NOT_IN_TRAILERS};
use crate::refusal::MessageRefusal;

/// Bytes that end the data of a chunk.
pub const CHUNK_END: &[u8] = b"\r\n";
/// Bytes that end a chunked body without trailers.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// Line in front of the data of a chunk: `size CR LF`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkStart {
    text: [u8; 18],
    from: usize,
}

impl ChunkStart {
    /// Creates the line for `len` bytes of data. Returns `None` for 0, because a chunk of size 0
    /// would end the body.
    pub fn new(len: usize) -> Option<ChunkStart> {
        let mut start = ChunkStart {
            text: [0; 18],
            from: 16,
        };
        start.text[16..].copy_from_slice(b"\r\n");
        let mut left = len;
        while left > 0 {
            start.from -= 1;
            start.text[start.from] = b"0123456789abcdef"[left & 15];
            left >>= 4;
        }
        (len > 0).then_some(start)
    }

    /// Returns the bytes of the line.
    pub fn as_bytes(&self) -> &[u8] {
        &self.text[self.from..]
    }
}

/// Writes the last chunk with a trailer section. Fields that a trailer section must not carry are
/// left out, because they come from another protocol.
///
/// # Errors
/// Returns [`MessageRefusal::UnwritableField`] if a name is not a token or a value contains a byte
/// that no value may contain.
pub fn write_last_chunk<'p>(
    trailers: impl IntoIterator<Item = (&'p [u8], &'p [u8])>,
    into: &mut impl BufMut,
) -> Result<(), MessageRefusal> {
    into.put_slice(b"0\r\n");
    for (name, value) in trailers {
        if !is_token(name) || !is_value(value) {
            return Err(MessageRefusal::UnwritableField);
        }
        if NOT_IN_TRAILERS & FieldName::of(name).bit() == 0 {
            for part in [name, b": ", value, b"\r\n"] {
                into.put_slice(part);
            }
        }
    }
    into.put_slice(b"\r\n");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_starts() {
        for (len, want) in [
            (1, "1\r\n"),
            (15, "f\r\n"),
            (16, "10\r\n"),
            (65536, "10000\r\n"),
            (usize::MAX, "ffffffffffffffff\r\n"),
        ] {
            assert_eq!(
                ChunkStart::new(len).as_ref().map(ChunkStart::as_bytes),
                Some(want.as_bytes())
            );
        }
        assert_eq!(ChunkStart::new(0), None);
    }
}
