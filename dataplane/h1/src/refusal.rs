//! Reasons why the codec refuses a message, each with its name, its status and a sentence. The
//! parsers and the writer decide which one applies.

/// Status for a refused *response*. The upstream broke the protocol, so the client gets 502 for any
/// reason.
pub const RESPONSE_STATUS: u16 = 502;

macro_rules! refusals {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $status:literal, $text:literal;)*) => {
        /// Reason why a message was refused. The connection must be closed afterwards, because it
        /// is unknown where the next message starts.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
        #[repr(u8)]
        pub enum MessageRefusal {
            $($(#[$doc])* #[error($text)] $variant,)*
        }

        impl MessageRefusal {
            /// All refusals, in the order of their numbers.
            pub const ALL: &'static [MessageRefusal] = &[$(MessageRefusal::$variant,)*];

            /// Returns the counter label: lower case with `_`, unique and stable.
            pub const fn name(self) -> &'static str {
                match self { $(MessageRefusal::$variant => $name,)* }
            }

            /// Returns the status with which a refused *request* is answered. A refused response
            /// gets [`RESPONSE_STATUS`].
            pub const fn status(self) -> u16 {
                match self { $(MessageRefusal::$variant => $status,)* }
            }

            /// Returns one sentence for operators and for the local reply's body: what is wrong and
            /// what is allowed.
            pub const fn text(self) -> &'static str {
                match self { $(MessageRefusal::$variant => $text,)* }
            }

            /// Returns a dense number to index counters with, from 0 to `MessageRefusal::ALL.len()
            /// - 1`.
            pub const fn index(self) -> usize {
                self as usize
            }
        }
    };
}

refusals! {
    // The line structure (RFC 9112 §2.2, §5).
    /// A line ends in LF without CR.
    BareLf = "bare_lf", 400, "a line ends in LF alone; end lines with CR LF";
    /// A CR is not followed by LF.
    BareCr = "bare_cr", 400, "a CR is not followed by LF; CR may only end a line";
    NulByte = "nul_byte", 400, "the head contains a NUL byte";
    ControlByte = "control_byte", 400, "a field value or reason contains a control byte other than tab";
    TooManyEmptyLines = "too_many_empty_lines", 400, "more than one empty line comes before the start line";
    LeadingWhitespace = "leading_whitespace", 400, "white space begins the start line or the first field line";
    ObsFold = "obs_fold", 400, "a field is folded over several lines, which RFC 9112 §5.2 made obsolete";
    SpaceBeforeColon = "space_before_colon", 400, "a field name and its colon are separated by white space";
    EmptyFieldName = "empty_field_name", 400, "a field line begins with a colon";
    MissingColon = "missing_colon", 400, "a field line has no colon";
    BadFieldName = "bad_field_name", 400, "a field name contains a byte that is not a token character";
    /// The fast parser refused the head, and the exact one found no finer reason.
    BadHead = "bad_head", 400, "the message head is malformed";

    // The request line (RFC 9112 §3).
    BadMethod = "bad_method", 400, "the method is not a token";
    BadRequestLine = "bad_request_line", 400, "the request line is not `method SP target SP HTTP-version`";
    BadVersion = "bad_version", 400, "the protocol version is malformed; write HTTP/1.1 in upper case";
    Http09 = "http_09", 505, "HTTP/0.9 is not supported";
    Http2Preface = "http2_preface", 505, "an HTTP/2 preface arrived on an HTTP/1.1 connection";
    UnsupportedVersion = "unsupported_version", 505, "only HTTP/1.0 and HTTP/1.1 are supported";
    BadTarget = "bad_target", 400, "the request target has no valid form or contains a byte outside visible ASCII, or '#'";
    UnsupportedScheme = "unsupported_scheme", 400, "the absolute request target's scheme is neither http nor https";
    AuthorityFormTarget = "authority_form_target", 400, "host:port is a request target for CONNECT only";
    AsteriskFormTarget = "asterisk_form_target", 400, "`*` is a request target for OPTIONS only";
    BadConnectTarget = "bad_connect_target", 400, "CONNECT needs a target of the form host:port";

    // Host (RFC 9112 §3.2).
    MissingHost = "missing_host", 400, "HTTP/1.1 requires a Host field";
    DuplicateHost = "duplicate_host", 400, "more than one Host field";
    BadHost = "bad_host", 400, "the Host field or the target's authority is not host[:port]";
    HostMismatch = "host_mismatch", 400, "the Host field differs from the authority in the request target";

    // Framing (RFC 9112 §6).
    BadContentLength = "bad_content_length", 400, "Content-Length is not a decimal number of at most 18 digits";
    DuplicateContentLength = "duplicate_content_length", 400, "Content-Length is given more than once";
    ConflictingContentLength = "conflicting_content_length", 400, "Content-Length is given more than once with different values";
    ContentLengthWithTransferEncoding = "content_length_with_transfer_encoding", 400, "both Content-Length and Transfer-Encoding are given";
    BadTransferEncoding = "bad_transfer_encoding", 400, "Transfer-Encoding is malformed or empty";
    UnknownTransferCoding = "unknown_transfer_coding", 501, "the only supported transfer coding is chunked";
    ChunkedNotFinal = "chunked_not_final", 400, "chunked is not the last transfer coding";
    ChunkedTwice = "chunked_twice", 400, "chunked is applied more than once";
    TransferEncodingInHttp10 = "transfer_encoding_in_http10", 400, "Transfer-Encoding in an HTTP/1.0 message";
    BodyForbidden = "body_forbidden", 400, "a CONNECT or TRACE request has a body";

    // Other fields that determine the use of the connection.
    BadConnection = "bad_connection", 400, "the Connection field is not a list of tokens";
    ConnectionNamesFraming = "connection_names_framing", 400, "the Connection field names Host, Content-Length or Transfer-Encoding";
    BadUpgrade = "bad_upgrade", 400, "the Upgrade field is not a list of protocols, or is missing in a 101 response";
    UnknownExpectation = "unknown_expectation", 417, "the only supported expectation is 100-continue";

    // Responses (RFC 9112 §4).
    BadStatusLine = "bad_status_line", 502, "the status line is not `HTTP-version SP status SP reason`";
    BadStatus = "bad_status", 502, "the status is not three digits from 100 to 999";
    UnexpectedUpgrade = "unexpected_upgrade", 502, "a 101 response to a request without an upgrade";

    // Limits.
    MethodTooLong = "method_too_long", 501, "the method is longer than allowed";
    TargetTooLong = "target_too_long", 414, "the request target is longer than allowed";
    FieldTooLong = "field_too_long", 431, "a field line is longer than allowed";
    TooManyHeaders = "too_many_headers", 431, "more field lines than allowed";
    HeadTooLarge = "head_too_large", 431, "the message head is larger than allowed";

    // Chunked bodies (RFC 9112 §7.1).
    BadChunkSize = "bad_chunk_size", 400, "a chunk size is not a hexadecimal number followed by CR LF or an extension";
    ChunkSizeOverflow = "chunk_size_overflow", 400, "a chunk size has more than 15 hexadecimal digits";
    BadChunkExtension = "bad_chunk_extension", 400, "a chunk extension is malformed";
    ChunkExtensionTooLong = "chunk_extension_too_long", 400, "a chunk's extensions are longer than allowed";
    ChunkExtensionsTooLarge = "chunk_extensions_too_large", 400, "all chunk extensions of the body together are larger than allowed";
    BadChunkEnd = "bad_chunk_end", 400, "a chunk's data is not followed by CR LF";
    TrailersTooLarge = "trailers_too_large", 431, "the trailer section is larger than allowed";
    TooManyTrailers = "too_many_trailers", 431, "more trailer fields than allowed";
    ForbiddenTrailer = "forbidden_trailer", 400, "a trailer field that frames, routes or authenticates the message";
    /// The connection ended inside the body.
    TruncatedBody = "truncated_body", 400, "the connection ended before the body did";

    // Writing.
    /// The caller passed a name or value that would change the structure of the message.
    UnwritableField = "unwritable_field", 400, "a field to be written has an invalid name or value, or is reserved for framing";
    UnwritableLine = "unwritable_line", 400, "a method, target or reason to be written contains an invalid byte";
}
