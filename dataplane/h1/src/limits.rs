//! The codec's limits: named, with defaults, each reached by a test. They bound memory and work per message, not per connection.

/// Hard cap of [`Limits::head_bytes_max`]: the header table keeps name lengths in 16 bits.
pub const HEAD_BYTES_CAP: usize = 64 * 1024;
/// Hard cap of [`Limits::headers_max`]: the parser's table lives on the stack.
pub const HEADERS_CAP: usize = 128;
/// CR LF pairs skipped before the start line (RFC 9112 §2.2 asks for at least one).
pub const EMPTY_LINES_MAX: usize = 1;
/// Digits of a Content-Length: fits 63 bits with room to add.
pub(crate) const LENGTH_DIGITS_MAX: usize = 18;
/// Hexadecimal digits of a chunk size, leading zeros included: fits 60 bits.
pub(crate) const CHUNK_DIGITS_MAX: u8 = 15;

/// Limits for one message. Units are in the names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Start line and fields, all line ends included; capped by [`HEAD_BYTES_CAP`].
    pub head_bytes_max: usize,
    /// Field lines in a head; capped by [`HEADERS_CAP`].
    pub headers_max: usize,
    /// The request method.
    pub method_bytes_max: usize,
    /// The request target as sent.
    pub target_bytes_max: usize,
    /// One field line without its CR LF; also the status line.
    pub field_bytes_max: usize,
    /// The extensions of one chunk.
    pub chunk_extension_bytes_max: usize,
    /// The extensions of all chunks of a body.
    pub chunk_extensions_bytes_max: usize,
    /// A trailer section, all line ends included; capped by [`HEAD_BYTES_CAP`].
    pub trailer_bytes_max: usize,
    /// Field lines in a trailer section; capped by [`HEADERS_CAP`].
    pub trailers_max: usize,
}

impl Limits {
    /// The defaults.
    pub const DEFAULT: Limits = Limits {
        head_bytes_max: HEAD_BYTES_CAP,
        headers_max: HEADERS_CAP,
        method_bytes_max: 32,
        target_bytes_max: 16 * 1024,
        field_bytes_max: 32 * 1024,
        chunk_extension_bytes_max: 256,
        chunk_extensions_bytes_max: 16 * 1024,
        trailer_bytes_max: 8 * 1024,
        trailers_max: 64,
    };
}

// A request line alone can never fill the head, so an unfinished full head is always "head too large".
const _: () = assert!(Limits::DEFAULT.target_bytes_max + Limits::DEFAULT.method_bytes_max + 64 < HEAD_BYTES_CAP);
const _: () = assert!(Limits::DEFAULT.field_bytes_max < HEAD_BYTES_CAP);
const _: () = assert!(Limits::DEFAULT.trailer_bytes_max <= HEAD_BYTES_CAP && Limits::DEFAULT.trailers_max <= HEADERS_CAP);

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}
