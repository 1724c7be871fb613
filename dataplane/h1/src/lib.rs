//! canal-h1: the HTTP/1.1 codec of the gateway. Heads and bodies over the caller's buffers, strict about RFC 9112; no IO, no clock.
//!
//! # The API, as a proxy uses it
//!
//! Per connection keep one [`RequestHead`] (or [`ResponseHead`]) and one [`OutHead`]; they reuse their memory.
//!
//! ```
//! use canal_h1::{BodyPart, BodyReader, Edit, Limits, Name, OutHead, Outgoing, RequestHead};
//! let limits = Limits::DEFAULT;
//! let buf = b"POST /a?b=c HTTP/1.1\r\nHost: x\r\nConnection: x-hop\r\nX-Hop: 1\r\nContent-Length: 2\r\n\r\nhi";
//!
//! // 1. Parse what was read so far. Ok(None): read more and call again. Err(refusal): answer refusal.status(), close.
//! let mut head = RequestHead::new();
//! let head_len = head.parse(buf, &limits)?.expect("whole");
//! let view = head.view(buf); // Copy; borrows head and buf
//! assert_eq!((view.method(), view.path(), view.query()), (&b"POST"[..], &b"/a"[..], Some(&b"b=c"[..])));
//! assert_eq!(view.authority(), b"x");
//! assert_eq!(view.get(Name::Host), Some(&b"x"[..]));
//!
//! // 2. Write the head for the next hop: hop-by-hop fields go, edits are applied, the rest stays where it is.
//! let mut out = OutHead::new();
//! let edits = [Edit::Default(b"x-request-id", b"42"), Edit::Add(b"x-forwarded-for", b"10.0.0.1")];
//! out.request(&view, &Outgoing { edits: &edits, framing: view.framing(), ..Outgoing::default() })?;
//! let mut sent = Vec::new();
//! out.write_to(buf, &mut sent); // or out.io_slices(buf, &mut slices) for a vectored write
//! assert!(sent.starts_with(b"POST /a?b=c HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nx-request-id: 42\r\n"));
//!
//! // 3. Read the body: spans of payload, never copied. skim() gives whole spans for verbatim forwarding instead.
//! let mut body = BodyReader::new(view.framing());
//! let step = body.read(&buf[head_len..], &limits)?;
//! assert_eq!(step.part, BodyPart::Data(0..2));
//! assert!(body.is_done());
//! # Ok::<(), canal_h1::Refusal>(())
//! ```
//!
//! * [`RequestHead`] → [`RequestView`], [`ResponseHead`] + [`Asked`] → [`ResponseView`]; [`Fields`], [`Field`], [`Name`] (interned).
//! * [`Framing`] → [`BodyReader`]: [`BodyReader::read`] (payload spans, for re-chunking with [`ChunkStart`], [`CHUNK_END`],
//!   [`LAST_CHUNK`], [`write_last_chunk`]) or [`BodyReader::skim`] (verbatim spans); [`BodyReader::end_of_input`] at EOF.
//! * [`OutHead`] with [`Outgoing`], [`Edit`], [`Persistence`]: `request`/`response` forward a view; `encode_request`/`encode_response`
//!   write from pairs (from HTTP/2, or the gateway's own answers). [`RequestView::end_to_end`] gives the pairs for the other direction.
//! * [`Refusal`]: `name()` is the counter label, `index()` its place, `status()` for clients; a refused response is
//!   [`RESPONSE_STATUS`]. After any refusal the connection closes.
//! * [`detect`] tells HTTP/1.1, HTTP/2 and opaque bytes apart; [`split_authority`] splits `host[:port]`; [`reason_of`] phrases.
//! * `cases` (feature `cases`): the table of malformed and ambiguous messages, for tests of whatever embeds this codec.
//!
//! # What it promises
//!
//! A head or body is accepted only if every reader of RFC 9112 must see the same messages in it. What is forwarded by
//! [`OutHead`] is accepted by this parser again and means the same.

#![forbid(unsafe_code)]

mod body;
mod bytes;
#[cfg(any(test, feature = "cases"))]
pub mod cases;
mod chunk;
mod detect;
mod fault;
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
mod table;
mod target;
mod write;

pub use body::{BodyPart, BodyReader, BodyStep, Skim};
pub use detect::{Detected, HTTP2_PREFACE, detect};
pub use framing::{Framing, Version};
pub use limits::{EMPTY_LINES_MAX, HEAD_BYTES_CAP, HEADERS_CAP, Limits};
pub use name::Name;
pub use rechunk::{CHUNK_END, ChunkStart, LAST_CHUNK, write_last_chunk};
pub use refusal::{RESPONSE_STATUS, Refusal};
pub use request::{RequestHead, RequestView};
pub use response::{Asked, ResponseHead, ResponseView};
pub use status::reason_of;
pub use table::{Field, Fields};
pub use target::{TargetForm, split_authority};
pub use write::{Edit, OutHead, Outgoing, Persistence};
