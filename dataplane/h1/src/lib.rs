//! HTTP/1.1 codec of the gateway: parses and writes heads and bodies over the caller's buffers,
//! strictly after RFC 9112. It does no IO and has no clock. The example shows the whole API.
//!
//! # The API, as a proxy uses it
//!
//! Each connection keeps one [`RequestHead`] (or [`ResponseHead`]) and one [`OutHead`], because
//! they reuse their memory.
//!
//! ```
//! use canal_h1::{BodyPart, BodyReader, FieldName, ForwardOptions, HeaderEdit, MessageLimits, OutHead, RequestHead};
//! let limits = MessageLimits::DEFAULT;
//! let buf = b"POST /a?b=c HTTP/1.1\r\nHost: x\r\nConnection: x-hop\r\nX-Hop: 1\r\nContent-Length: 2\r\n\r\nhi";
//!
//! // 1. Parse the bytes read so far. Ok(None): read more and call again. Err(refusal): respond with refusal.status() and close.
//! let mut head = RequestHead::new();
//! let head_len = head.parse(buf, &limits)?.expect("whole");
//! let view = head.view(buf); // Copy; borrows head and buf
//! assert_eq!((view.method(), view.path(), view.query()), (&b"POST"[..], &b"/a"[..], Some(&b"b=c"[..])));
//! assert_eq!(view.authority(), b"x");
//! assert_eq!(view.get(FieldName::Host), Some(&b"x"[..]));
//!
//! // 2. Write the head for the next hop: hop-by-hop fields are removed, edits are applied, all else is forwarded verbatim.
//! let mut out = OutHead::new();
//! let edits = [HeaderEdit::Default(b"x-request-id", b"42"), HeaderEdit::Add(b"x-forwarded-for", b"10.0.0.1")];
//! out.request(&view, &ForwardOptions { edits: &edits, framing: view.framing(), ..ForwardOptions::default() })?;
//! let mut sent = Vec::new();
//! out.write_to(buf, &mut sent); // or out.io_slices(buf, &mut slices) for a vectored write
//! assert!(sent.starts_with(b"POST /a?b=c HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nx-request-id: 42\r\n"));
//!
//! // 3. Read the body as spans of payload, which is never copied. skim() returns whole spans for verbatim forwarding instead.
//! let mut body = BodyReader::new(view.framing());
//! let step = body.read(&buf[head_len..], &limits)?;
//! assert_eq!(step.part, BodyPart::Data(0..2));
//! assert!(body.is_done());
//! # Ok::<(), canal_h1::MessageRefusal>(())
//! ```
//!
//! * [`RequestHead`] → [`RequestView`]; [`ResponseHead`] + [`RequestKind`] → [`ResponseView`];
//!   [`HeaderFields`], [`HeaderField`], and [`FieldName`] (interned).
//! * [`Framing`] → [`BodyReader`]: [`BodyReader::read`] (payload spans, for re-chunking with
//!   [`ChunkStart`], [`CHUNK_END`], [`LAST_CHUNK`], [`write_last_chunk`]) or [`BodyReader::skim`]
//!   (verbatim spans); [`BodyReader::end_of_input`] at EOF.
//! * [`OutHead`] with [`ForwardOptions`], [`HeaderEdit`], [`Persistence`]: `request` and `response`
//!   forward a view; `encode_request` and `encode_response` write from pairs (from HTTP/2, or local
//!   replies). [`RequestView::end_to_end`] gives pairs for HTTP/2.
//! * [`MessageRefusal`]: `name()` is the counter label, `index()` its number, `status()` the status
//!   for clients. A refused response gets [`RESPONSE_STATUS`]. After any refusal the connection
//!   must be closed.
//! * [`detect()`] distinguishes HTTP/1.1, HTTP/2 and opaque bytes; [`split_authority`] splits
//!   `host[:port]`; [`reason_of`] gives reason phrases.
//! * `cases` (feature `cases`): the table of malformed and ambiguous messages, for tests of
//!   programs that use this codec.
//!
//! # Guarantees
//!
//! The codec accepts a head or body only if every reader of RFC 9112 must see the same messages in
//! it. Its parser accepts what [`OutHead`] writes, with the same meaning.

#![forbid(unsafe_code)]

mod body;
mod bytes;
#[cfg(any(test, feature = "cases"))]
pub mod cases;
mod chunk;
mod detect;
mod diagnose;
mod field_table;
mod framing;
mod hop;
mod limits;
mod name;
mod rechunk;
mod refusal;
mod request;
mod response;
mod scan;
mod status;
mod target;
mod write;

pub use body::{BodyPart, BodyReader, BodyStep, Skim};
pub use detect::{Detected, HTTP2_PREFACE, detect};
pub use field_table::{HeaderField, HeaderFields};
pub use framing::{Framing, HttpVersion};
pub use limits::{EMPTY_LINES_MAX, HEAD_BYTES_CAP, HEADERS_CAP, MessageLimits};
pub use name::FieldName;
pub use rechunk::{CHUNK_END, ChunkStart, LAST_CHUNK, write_last_chunk};
pub use refusal::{MessageRefusal, RESPONSE_STATUS};
pub use request::{RequestHead, RequestView};
pub use response::{RequestKind, ResponseHead, ResponseView};
pub use status::reason_of;
pub use target::{TargetForm, split_authority};
pub use write::{ForwardOptions, HeaderEdit, OutHead, Persistence};
