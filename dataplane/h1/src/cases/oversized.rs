//! Requests at the default limits: one just within each limit, one just over it. Their bytes are
//! built at run time, because they are long.

use std::borrow::Cow;

use super::{AcceptedRequest, RequestCase, RequestWant};
use crate::MessageRefusal;
use crate::{Framing, MessageLimits};

const HEAD: &str = "POST / HTTP/1.1\r\nHost: a\r\n";
const CHUNKED: &str = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";

fn case(name: &'static str, bytes: String, want: RequestWant) -> RequestCase {
    RequestCase {
        name,
        bytes: Cow::Owned(bytes.into_bytes()),
        want,
    }
}

/// Expects that the request is accepted. `forwarded` is empty, so the long head is not compared.
fn fine(framing: Framing, payload: &'static str) -> RequestWant {
    RequestWant::Accept(AcceptedRequest {
        framing,
        forwarded: "",
        payload,
        rest: "",
    })
}

/// Returns the cases for [`MessageLimits::DEFAULT`].
pub fn oversized_requests() -> Vec<RequestCase> {
    let mut all = heads(&MessageLimits::DEFAULT);
    all.extend(bodies(&MessageLimits::DEFAULT));
    all
}

fn heads(limits: &MessageLimits) -> Vec<RequestCase> {
    use RequestWant::Refuse;
    let with_method = |n: usize| format!("{} / HTTP/1.1\r\nHost: a\r\n\r\n", "M".repeat(n));
    let with_target = |n: usize| format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "t".repeat(n - 1));
    let with_field = |n: usize| format!("{HEAD}X: {}\r\n\r\n", "v".repeat(n - "X: ".len()));
    let with_fields = |n: usize| format!("{HEAD}{}\r\n", "A: b\r\n".repeat(n - 1));
    // Two long lines, and a third one that fills the head up to the size. Two lines at their limit
    // would leave no space for it.
    let with_size = |n: usize| {
        // 200 bytes leave room for the field's name and the third line.
        let line = format!("X: {}\r\n", "v".repeat(limits.field_bytes_max - 200));
        let rest = n - HEAD.len() - 2 * line.len() - "Y: \r\n\r\n".len();
        format!("{HEAD}{line}{line}Y: {}\r\n\r\n", "v".repeat(rest))
    };
    // Far beyond the limit and without a line end: the reader must not wait for one.
    let endless_line = format!("GET /{}", "t".repeat(limits.target_bytes_max + 8192));
    let endless_value = format!("{HEAD}X: {}", "v".repeat(limits.field_bytes_max + 8192));
    vec![
        case(
            "method_at_limit",
            with_method(limits.method_bytes_max),
            fine(Framing::None, ""),
        ),
        case(
            "method_over_limit",
            with_method(limits.method_bytes_max + 1),
            Refuse(MessageRefusal::MethodTooLong),
        ),
        case(
            "target_at_limit",
            with_target(limits.target_bytes_max),
            fine(Framing::None, ""),
        ),
        case(
            "target_over_limit",
            with_target(limits.target_bytes_max + 1),
            Refuse(MessageRefusal::TargetTooLong),
        ),
        case(
            "target_endless",
            endless_line,
            Refuse(MessageRefusal::TargetTooLong),
        ),
        case(
            "field_at_limit",
            with_field(limits.field_bytes_max),
            fine(Framing::None, ""),
        ),
        case(
            "field_over_limit",
            with_field(limits.field_bytes_max + 1),
            Refuse(MessageRefusal::FieldTooLong),
        ),
        case(
            "field_endless",
            endless_value,
            Refuse(MessageRefusal::FieldTooLong),
        ),
        case(
            "fields_at_limit",
            with_fields(limits.headers_max),
            fine(Framing::None, ""),
        ),
        case(
            "fields_over_limit",
            with_fields(limits.headers_max + 1),
            Refuse(MessageRefusal::TooManyHeaders),
        ),
        case(
            "head_at_limit",
            with_size(limits.head_bytes_max),
            fine(Framing::None, ""),
        ),
        case(
            "head_over_limit",
            with_size(limits.head_bytes_max + 1),
            Refuse(MessageRefusal::HeadTooLarge),
        ),
    ]
}

fn bodies(limits: &MessageLimits) -> Vec<RequestCase> {
    use RequestWant::RefuseBody;
    let with_extension = |n: usize| format!("{CHUNKED}1;{}\r\nx\r\n0\r\n\r\n", "e".repeat(n - 1));
    let with_extensions = |n: usize| {
        // 200 is below the limit of one chunk, so only the sum over the body is too large.
        let (whole, left) = (n / 200, n % 200);
        let chunk = |len: usize| {
            if len == 0 {
                String::new()
            } else {
                format!("1;{}\r\nx\r\n", "e".repeat(len - 1))
            }
        };
        format!(
            "{CHUNKED}{}{}0\r\n\r\n",
            chunk(200).repeat(whole),
            chunk(left)
        )
    };
    let with_trailers = |n: usize| format!("{CHUNKED}1\r\nx\r\n0\r\n{}\r\n", "A: b\r\n".repeat(n));
    let with_trailer_bytes = |n: usize| {
        format!(
            "{CHUNKED}1\r\nx\r\n0\r\nA: {}\r\n\r\n",
            "v".repeat(n - "A: \r\n\r\n".len())
        )
    };
    let (one, all) = (
        limits.chunk_extension_bytes_max,
        limits.chunk_extensions_bytes_max,
    );
    vec![
        case(
            "extension_at_limit",
            with_extension(one),
            fine(Framing::Chunked, "x"),
        ),
        case(
            "extension_over_limit",
            with_extension(one + 1),
            RefuseBody(MessageRefusal::ChunkExtensionTooLong),
        ),
        case(
            "extensions_over_limit",
            // One byte more would be a `;` without a name, which is malformed instead of too large.
            with_extensions(all + 2),
            RefuseBody(MessageRefusal::ChunkExtensionsTooLarge),
        ),
        case(
            "trailers_at_limit",
            with_trailers(limits.trailers_max),
            fine(Framing::Chunked, "x"),
        ),
        case(
            "trailers_over_limit",
            with_trailers(limits.trailers_max + 1),
            RefuseBody(MessageRefusal::TooManyTrailers),
        ),
        case(
            "trailer_bytes_at_limit",
            with_trailer_bytes(limits.trailer_bytes_max),
            fine(Framing::Chunked, "x"),
        ),
        case(
            "trailer_bytes_over_limit",
            with_trailer_bytes(limits.trailer_bytes_max + 1),
            RefuseBody(MessageRefusal::TrailersTooLarge),
        ),
    ]
}
