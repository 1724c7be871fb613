//! Response cases: heads that an upstream may send, with their expected results.

use crate::Framing::{self, Chunked, Length, None, UntilClose};
use crate::MessageRefusal::{self, *};
use crate::RequestKind::{self, Connect, Head, Upgrade};

use super::ORDINARY;

/// One response head as an upstream would send it.
#[derive(Debug, Clone, Copy)]
pub struct ResponseCase {
    pub name: &'static str,
    pub request_kind: RequestKind,
    pub bytes: &'static [u8],
    pub want: ResponseWant,
}

/// Expected result of parsing a response head.
#[derive(Debug, Clone, Copy)]
pub enum ResponseWant {
    Refuse(MessageRefusal),
    /// The codec accepts the head; `forwarded` is the head as it goes to the client.
    Accept {
        framing: Framing,
        keep_alive: bool,
        forwarded: &'static str,
    },
}

/// Returns all cases of responses, valid and malformed.
pub fn responses() -> impl Iterator<Item = &'static ResponseCase> {
    REFUSED.iter().chain(ACCEPTED)
}

const fn refuse(
    name: &'static str,
    request_kind: RequestKind,
    bytes: &'static [u8],
    refusal: MessageRefusal,
) -> ResponseCase {
    ResponseCase {
        name,
        request_kind,
        bytes,
        want: ResponseWant::Refuse(refusal),
    }
}

const fn accept(
    name: &'static str,
    request_kind: RequestKind,
    bytes: &'static [u8],
    (framing, keep_alive): (Framing, bool),
    forwarded: &'static str,
) -> ResponseCase {
    ResponseCase {
        name,
        request_kind,
        bytes,
        want: ResponseWant::Accept {
            framing,
            keep_alive,
            forwarded,
        },
    }
}

static REFUSED: &[ResponseCase] = &[
    refuse(
        "bare_lf_and_bare_cr",
        ORDINARY,
        b"HTTP/1.1 200 OK\nX: a\rb\n\n",
        BareCr,
    ),
    refuse(
        "bare_lf_and_obs_fold",
        ORDINARY,
        b"HTTP/1.1 200 OK\nX: y\n z\n\n",
        ObsFold,
    ),
    refuse(
        "bare_lf_and_two_empty_lines_first",
        ORDINARY,
        b"\n\nHTTP/1.1 200 OK\n\n",
        TooManyEmptyLines,
    ),
    refuse(
        "bare_lf_and_a_conflict",
        ORDINARY,
        b"HTTP/1.1 200 OK\nContent-Length: 5\nContent-Length: 6\n\n",
        ConflictingContentLength,
    ),
    refuse(
        "bare_cr_in_reason",
        ORDINARY,
        b"HTTP/1.1 200 O\rK\r\nContent-Length: 0\r\n\r\n",
        BareCr,
    ),
    refuse(
        "control_in_reason",
        ORDINARY,
        b"HTTP/1.1 200 O\x1bK\r\nContent-Length: 0\r\n\r\n",
        ControlByte,
    ),
    refuse(
        "nul_in_reason",
        ORDINARY,
        b"HTTP/1.1 200 O\0K\r\nContent-Length: 0\r\n\r\n",
        NulByte,
    ),
    refuse(
        "obs_fold",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nX: y\r\n z\r\nContent-Length: 0\r\n\r\n",
        ObsFold,
    ),
    refuse(
        "space_before_colon",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nContent-Length : 0\r\n\r\n",
        SpaceBeforeColon,
    ),
    refuse(
        "space_before_status_line",
        ORDINARY,
        b" HTTP/1.1 200 OK\r\n\r\n",
        LeadingWhitespace,
    ),
    refuse(
        "two_empty_lines_first",
        ORDINARY,
        b"\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        TooManyEmptyLines,
    ),
    refuse(
        "version_2",
        ORDINARY,
        b"HTTP/2.0 200 OK\r\n\r\n",
        UnsupportedVersion,
    ),
    refuse(
        "version_1_3",
        ORDINARY,
        b"HTTP/1.3 200 OK\r\n\r\n",
        UnsupportedVersion,
    ),
    refuse(
        "version_lower_case",
        ORDINARY,
        b"http/1.1 200 OK\r\n\r\n",
        BadVersion,
    ),
    refuse("not_http", ORDINARY, b"SSH-2.0-OpenSSH\r\n\r\n", BadVersion),
    refuse(
        "status_two_digits",
        ORDINARY,
        b"HTTP/1.1 20 OK\r\n\r\n",
        BadStatus,
    ),
    refuse(
        "status_four_digits",
        ORDINARY,
        b"HTTP/1.1 2000 OK\r\n\r\n",
        BadStatus,
    ),
    refuse(
        "status_099",
        ORDINARY,
        b"HTTP/1.1 099 OK\r\n\r\n",
        BadStatus,
    ),
    refuse("status_word", ORDINARY, b"HTTP/1.1 OK\r\n\r\n", BadStatus),
    refuse(
        "status_glued",
        ORDINARY,
        b"HTTP/1.1 200OK\r\n\r\n",
        BadStatusLine,
    ),
    refuse(
        "version_glued",
        ORDINARY,
        b"HTTP/1.1200 OK\r\n\r\n",
        BadStatusLine,
    ),
    refuse(
        "length_list_conflict",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\n",
        ConflictingContentLength,
    ),
    refuse(
        "length_list_bad",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5,\r\n\r\n",
        BadContentLength,
    ),
    refuse(
        "length_conflict",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        ConflictingContentLength,
    ),
    refuse(
        "length_bad",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\n",
        BadContentLength,
    ),
    refuse(
        "length_and_chunked",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        ContentLengthWithTransferEncoding,
    ),
    refuse(
        "coding_unknown",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        UnknownTransferCoding,
    ),
    refuse(
        "coding_not_final",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip\r\n\r\n",
        ChunkedNotFinal,
    ),
    refuse(
        "coding_twice",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, chunked\r\n\r\n",
        ChunkedTwice,
    ),
    refuse(
        "coding_in_http10",
        ORDINARY,
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        TransferEncodingInHttp10,
    ),
    refuse(
        "upgrade_not_asked",
        ORDINARY,
        b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        UnexpectedUpgrade,
    ),
    refuse(
        "upgrade_without_protocol",
        Upgrade,
        b"HTTP/1.1 101 X\r\nConnection: upgrade\r\n\r\n",
        BadUpgrade,
    ),
    refuse(
        "upgrade_to_no_token",
        Upgrade,
        b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: web socket\r\n\r\n",
        BadUpgrade,
    ),
    refuse(
        "connection_names_length",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nConnection: content-length\r\n\r\n",
        ConnectionNamesFraming,
    ),
];

static ACCEPTED: &[ResponseCase] = &[
    accept(
        "bare_lf",
        ORDINARY,
        b"HTTP/1.1 200 OK\nContent-Length: 0\r\n\r\n",
        (Length(0), true),
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ),
    accept(
        "bare_lf_in_fields",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nX: y \nContent-Length: 0\n\r\n",
        (Length(0), true),
        "HTTP/1.1 200 OK\r\nX: y\r\nContent-Length: 0\r\n\r\n",
    ),
    accept(
        "bare_lf_after_status",
        ORDINARY,
        b"HTTP/1.1 200\nContent-Length: 0\r\n\r\n",
        (Length(0), true),
        "HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n",
    ),
    accept(
        "bare_lf_ends_head",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\n",
        (Length(0), true),
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ),
    accept(
        "bare_lf_everywhere",
        ORDINARY,
        b"HTTP/1.1 200 OK\nX: y\nConnection: x\nTransfer-Encoding: chunked\n\n",
        (Chunked, true),
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    ),
    accept("bare_lf_first", ORDINARY, b"\nHTTP/1.1 200 OK\n\n", (UntilClose, false), "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"),
    accept(
        "length_twice",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
        (Length(5), true),
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n",
    ),
    accept(
        "length_list",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\nX: y\r\n\r\n",
        (Length(5), true),
        "HTTP/1.1 200 OK\r\nX: y\r\ncontent-length: 5\r\n\r\n",
    ),
    accept(
        "length_twice_of_head",
        Head,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
        (None, true),
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n",
    ),
    accept(
        "length",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
        (Length(5), true),
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    ),
    accept(
        "chunks",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: y\r\n\r\n",
        (Chunked, true),
        "HTTP/1.1 200 OK\r\nX: y\r\ntransfer-encoding: chunked\r\n\r\n",
    ),
    accept(
        "no_reason",
        ORDINARY,
        b"HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n",
        (Length(0), true),
        "HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n",
    ),
    accept(
        "no_reason_no_space",
        ORDINARY,
        b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n",
        (Length(0), true),
        "HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n",
    ),
    accept(
        "one_empty_line_first",
        ORDINARY,
        b"\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        (Length(0), true),
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ),
    accept(
        "connection_close",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\nKeep-Alive: timeout=5\r\n\r\n",
        (Length(5), false),
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    ),
    accept(
        "connection_not_a_token",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive, timeout=5\r\nContent-Length: 5\r\n\r\n",
        (Length(5), true),
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    ),
    accept(
        "connection_not_a_token_and_close",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nConnection: max=7, close\r\nContent-Length: 5\r\n\r\n",
        (Length(5), false),
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    ),
    accept(
        "upgrade_empty",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nUpgrade:\r\nContent-Length: 5\r\n\r\n",
        (Length(5), true),
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    ),
    accept(
        "until_close",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nX: y\r\n\r\n",
        (UntilClose, false),
        "HTTP/1.1 200 OK\r\nX: y\r\nconnection: close\r\n\r\n",
    ),
    accept(
        "http10",
        ORDINARY,
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n",
        (Length(5), false),
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    ),
    accept(
        "http10_keep_alive",
        ORDINARY,
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\n",
        (Length(5), true),
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    ),
    accept(
        "head_with_length",
        Head,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
        (None, true),
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    ),
    accept("head_with_chunks", Head, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", (None, true), "HTTP/1.1 200 OK\r\n\r\n"),
    accept(
        "not_modified_with_length",
        ORDINARY,
        b"HTTP/1.1 304 X\r\nContent-Length: 5\r\n\r\n",
        (None, true),
        "HTTP/1.1 304 X\r\nContent-Length: 5\r\n\r\n",
    ),
    accept("no_content", ORDINARY, b"HTTP/1.1 204 X\r\n\r\n", (None, true), "HTTP/1.1 204 X\r\n\r\n"),
    accept("no_content_with_length_zero", ORDINARY, b"HTTP/1.1 204 X\r\nContent-Length: 0\r\n\r\n", (None, true), "HTTP/1.1 204 X\r\n\r\n"),
    accept("no_content_with_length", ORDINARY, b"HTTP/1.1 204 X\r\nContent-Length: 5\r\n\r\n", (None, false), "HTTP/1.1 204 X\r\n\r\n"),
    accept("no_content_of_head", Head, b"HTTP/1.1 204 X\r\nContent-Length: 5\r\n\r\n", (None, false), "HTTP/1.1 204 X\r\n\r\n"),
    accept(
        "no_content_with_chunks",
        ORDINARY,
        b"HTTP/1.1 204 X\r\nTransfer-Encoding: chunked\r\nX: y\r\n\r\n",
        (None, false),
        "HTTP/1.1 204 X\r\nX: y\r\n\r\n",
    ),
    accept(
        "no_content_with_both",
        ORDINARY,
        b"HTTP/1.1 204 X\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n",
        (None, false),
        "HTTP/1.1 204 X\r\n\r\n",
    ),
    accept(
        "no_content_with_chunks_in_http10",
        ORDINARY,
        b"HTTP/1.0 204 X\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n",
        (None, false),
        "HTTP/1.1 204 X\r\n\r\n",
    ),
    accept(
        "not_modified_with_chunks",
        ORDINARY,
        b"HTTP/1.1 304 X\r\nTransfer-Encoding: chunked\r\n\r\n",
        (None, false),
        "HTTP/1.1 304 X\r\n\r\n",
    ),
    accept("interim_with_length", ORDINARY, b"HTTP/1.1 103 X\r\nContent-Length: 5\r\n\r\n", (None, false), "HTTP/1.1 103 X\r\n\r\n"),
    accept(
        "interim_with_chunks",
        ORDINARY,
        b"HTTP/1.1 100 X\r\nTransfer-Encoding: chunked\r\n\r\n",
        (None, false),
        "HTTP/1.1 100 X\r\n\r\n",
    ),
    accept(
        "upgrade_with_length",
        Upgrade,
        b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 5\r\n\r\n",
        (None, false),
        "HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ),
    accept("interim", ORDINARY, b"HTTP/1.1 103 X\r\nLink: y\r\n\r\n", (None, true), "HTTP/1.1 103 X\r\nLink: y\r\n\r\n"),
    accept(
        "upgrade",
        Upgrade,
        b"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: z\r\n\r\n",
        (None, false),
        "HTTP/1.1 101 X\r\nSec-WebSocket-Accept: z\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    ),
    accept(
        "upgrade_declined",
        Upgrade,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
        (Length(5), true),
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    ),
    accept("connect", Connect, b"HTTP/1.1 200 X\r\nContent-Length: 5\r\n\r\n", (None, false), "HTTP/1.1 200 X\r\n\r\n"),
    accept(
        "connect_refused",
        Connect,
        b"HTTP/1.1 403 X\r\nContent-Length: 5\r\n\r\n",
        (Length(5), true),
        "HTTP/1.1 403 X\r\nContent-Length: 5\r\n\r\n",
    ),
    accept(
        "status_999",
        ORDINARY,
        b"HTTP/1.1 999 X\r\nContent-Length: 0\r\n\r\n",
        (Length(0), true),
        "HTTP/1.1 999 X\r\nContent-Length: 0\r\n\r\n",
    ),
    accept(
        "reason_obs_text",
        ORDINARY,
        b"HTTP/1.0 200 \xc3\xa9\r\nConnection: close\r\n\r\n",
        (UntilClose, false),
        "HTTP/1.1 200 \u{e9}\r\nconnection: close\r\n\r\n",
    ),
    accept(
        "nominated_dropped",
        ORDINARY,
        b"HTTP/1.1 200 OK\r\nConnection: x-hop\r\nX-Hop: 1\r\nContent-Length: 0\r\nProxy-Authenticate: x\r\n\r\n",
        (Length(0), true),
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ),
];
