//! Limits of the codec, with their defaults. A test reaches each of them. They bound memory and
//! work per message, not per connection.

/// Hard cap of [`MessageLimits::head_bytes_max`]. The header table stores name lengths in 16 bits.
pub const HEAD_BYTES_CAP: usize = 64 * 1024;
/// Hard cap of [`MessageLimits::headers_max`]. The parser's table is on the stack.
pub const HEADERS_CAP: usize = 128;
/// Number of CR LF pairs that are skipped before the start line. RFC 9112 §2.2 recommends at least
/// one. Some old clients send one behind a body.
pub const EMPTY_LINES_MAX: usize = 1;
/// Digits of a Content-Length at most, so that the value fits into 63 bits with room for additions.
pub(crate) const LENGTH_DIGITS_MAX: usize = 18;
/// Hexadecimal digits of a chunk size at most, leading zeros included, so that the value fits into
/// 60 bits.
pub(crate) const CHUNK_DIGITS_MAX: u8 = 15;

/// Limits for one message. The units are in the names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageLimits {
    /// Limit of start line and fields together, all line ends included; capped by
    /// [`HEAD_BYTES_CAP`].
    pub head_bytes_max: usize,
    /// Limit of field lines in a head; capped by [`HEADERS_CAP`].
    pub headers_max: usize,
    /// Limit of the request method.
    pub method_bytes_max: usize,
    /// Limit of the request target as sent.
    pub target_bytes_max: usize,
    /// Limit of one field line without its CR LF, and of the status line.
    pub field_bytes_max: usize,
    /// Limit of the extensions of one chunk.
    pub chunk_extension_bytes_max: usize,
    /// Limit of the extensions of all chunks of one body.
    pub chunk_extensions_bytes_max: usize,
    /// Limit of a trailer section, all line ends included; capped by [`HEAD_BYTES_CAP`].
    pub trailer_bytes_max: usize,
    /// Limit of field lines in a trailer section; capped by [`HEADERS_CAP`].
    pub trailers_max: usize,
}

impl MessageLimits {
    /// Limits that the gateway uses unless it is configured otherwise.
    pub const DEFAULT: MessageLimits = MessageLimits {
        head_bytes_max: HEAD_BYTES_CAP,
        headers_max: HEADERS_CAP,
        // The longest registered method, UPDATEREDIRECTREF, has 17 bytes.
        method_bytes_max: 32,
        // RFC 9112 §3 recommends at least 8,000.
        target_bytes_max: 16 * 1024,
        // Half of a head, for a long cookie or token beside other fields.
        field_bytes_max: 32 * 1024,
        // RFC 9112 §7.1.1 advises a limit; hardly any client sends extensions.
        chunk_extension_bytes_max: 256,
        // So that many small chunks cannot carry more bytes of extensions than a head's quarter.
        chunk_extensions_bytes_max: 16 * 1024,
        // Trailers come after what routing reads, and are buffered until they end.
        trailer_bytes_max: 8 * 1024,
        // Half of a head's field lines.
        trailers_max: 64,
    };
}

// A request line alone can never fill the head, so a full head that is unfinished is always "head
// too large".
const _: () = assert!(
    MessageLimits::DEFAULT.target_bytes_max + MessageLimits::DEFAULT.method_bytes_max + 64
        < HEAD_BYTES_CAP
);
const _: () = assert!(MessageLimits::DEFAULT.field_bytes_max < HEAD_BYTES_CAP);
const _: () = assert!(
    MessageLimits::DEFAULT.trailer_bytes_max <= HEAD_BYTES_CAP
        && MessageLimits::DEFAULT.trailers_max <= HEADERS_CAP
);

impl Default for MessageLimits {
    fn default() -> Self {
        Self::DEFAULT
    }
}
