//! Request cases that fit on a line or two. `oversized` builds those that reach limits.

use super::{RequestCase, accept, accept_with_rest, refuse, refuse_body};
use crate::Framing::{Chunked, Length, None};
use crate::MessageRefusal::*;

/// All groups of request cases.
pub(super) static GROUPS: &[&[RequestCase]] = &[
    LINES,
    START_LINE,
    TARGETS,
    HOSTS,
    LENGTHS,
    CODINGS,
    CONNECTION,
    CHUNK_LINES,
    CHUNK_EXTENSIONS,
    TRAILERS,
    NORMALISED,
    BODIES,
];

static LINES: &[RequestCase] = &[
    refuse(
        "bare_lf_after_request_line",
        b"GET / HTTP/1.1\nHost: a\r\n\r\n",
        BareLf,
    ),
    refuse(
        "bare_lf_after_field",
        b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n",
        BareLf,
    ),
    refuse(
        "bare_lf_ends_head",
        b"GET / HTTP/1.1\r\nHost: a\r\n\n",
        BareLf,
    ),
    refuse("bare_lf_everywhere", b"GET / HTTP/1.1\nHost: a\n\n", BareLf),
    refuse(
        "bare_lf_before_start_line",
        b"\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
        BareLf,
    ),
    refuse(
        "bare_lf_in_field_name",
        b"GET / HTTP/1.1\r\nHost: a\r\nTransfer\n-Encoding: chunked\r\n\r\n",
        BareLf,
    ),
    refuse(
        "bare_cr_in_value",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: y\rTransfer-Encoding: chunked\r\n\r\n",
        BareCr,
    ),
    refuse(
        "bare_cr_ends_field",
        b"GET / HTTP/1.1\r\nHost: a\rX: y\r\n\r\n",
        BareCr,
    ),
    refuse(
        "bare_cr_in_request_line",
        b"GET /\rx HTTP/1.1\r\nHost: a\r\n\r\n",
        BareCr,
    ),
    refuse(
        "bare_cr_after_version",
        b"GET / HTTP/1.1\rHost: a\r\n\r\n",
        BareCr,
    ),
    refuse("cr_cr_lf", b"GET / HTTP/1.1\r\nHost: a\r\r\n\r\n", BareCr),
    refuse(
        "bare_cr_ends_head",
        b"GET / HTTP/1.1\r\nHost: a\r\n\rGET / HTTP/1.1\r\n\r\n",
        BareCr,
    ),
    refuse(
        "nul_in_value",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n",
        NulByte,
    ),
    refuse(
        "nul_in_name",
        b"GET / HTTP/1.1\r\nHost: a\r\nX\0: b\r\n\r\n",
        NulByte,
    ),
    refuse(
        "nul_in_target",
        b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n",
        NulByte,
    ),
    refuse(
        "nul_in_method",
        b"GE\0T / HTTP/1.1\r\nHost: a\r\n\r\n",
        NulByte,
    ),
    refuse(
        "vertical_tab_in_value",
        b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n",
        ControlByte,
    ),
    refuse(
        "escape_in_value",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: \x1b[31m\r\n\r\n",
        ControlByte,
    ),
    refuse(
        "delete_in_value",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: \x7f\r\n\r\n",
        ControlByte,
    ),
    refuse(
        "two_empty_lines_first",
        b"\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
        TooManyEmptyLines,
    ),
    refuse(
        "space_before_method",
        b" GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        LeadingWhitespace,
    ),
    refuse(
        "space_before_first_field",
        b"GET / HTTP/1.1\r\n Host: a\r\n\r\n",
        LeadingWhitespace,
    ),
    refuse(
        "tab_before_first_field",
        b"GET / HTTP/1.1\r\n\tX: y\r\nHost: a\r\n\r\n",
        LeadingWhitespace,
    ),
    refuse(
        "obs_fold_space",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n z\r\n\r\n",
        ObsFold,
    ),
    refuse(
        "obs_fold_tab_hides_coding",
        b"POST / HTTP/1.1\r\nHost: a\r\nX: y\r\n\tTransfer-Encoding: chunked\r\n\r\n",
        ObsFold,
    ),
    refuse(
        "obs_fold_of_coding",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\r\n chunked\r\n\r\n",
        ObsFold,
    ),
    refuse(
        "space_before_colon",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n",
        SpaceBeforeColon,
    ),
    refuse(
        "tab_before_colon",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length\t: 5\r\n\r\nhello",
        SpaceBeforeColon,
    ),
    refuse(
        "space_in_name",
        b"GET / HTTP/1.1\r\nHost: a\r\nX Y: z\r\n\r\n",
        BadFieldName,
    ),
    refuse(
        "empty_name",
        b"GET / HTTP/1.1\r\nHost: a\r\n: z\r\n\r\n",
        EmptyFieldName,
    ),
    refuse(
        "no_colon",
        b"GET / HTTP/1.1\r\nHost: a\r\nnonsense\r\n\r\n",
        MissingColon,
    ),
    refuse(
        "control_in_name",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding\x0b: chunked\r\n\r\n",
        BadFieldName,
    ),
    refuse(
        "obs_text_in_name",
        b"GET / HTTP/1.1\r\nHost: a\r\nX\xff: z\r\n\r\n",
        BadFieldName,
    ),
    refuse(
        "brackets_in_name",
        b"GET / HTTP/1.1\r\nHost: a\r\n[X]: z\r\n\r\n",
        BadFieldName,
    ),
    refuse(
        "quoted_name",
        b"GET / HTTP/1.1\r\nHost: a\r\n\"Host\": b\r\n\r\n",
        BadFieldName,
    ),
];

static START_LINE: &[RequestCase] = &[
    refuse("http_09", b"GET /\r\n", Http09),
    refuse("http_09_with_fields", b"GET /\r\nHost: a\r\n\r\n", Http09),
    refuse(
        "version_0_9",
        b"GET / HTTP/0.9\r\nHost: a\r\n\r\n",
        UnsupportedVersion,
    ),
    refuse(
        "version_1_2",
        b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
        UnsupportedVersion,
    ),
    refuse(
        "version_2_0",
        b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
        UnsupportedVersion,
    ),
    refuse(
        "version_9_9",
        b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
        UnsupportedVersion,
    ),
    refuse(
        "version_1_10",
        b"GET / HTTP/1.10\r\nHost: a\r\n\r\n",
        BadVersion,
    ),
    refuse(
        "version_01_1",
        b"GET / HTTP/01.1\r\nHost: a\r\n\r\n",
        BadVersion,
    ),
    refuse(
        "version_1_1_1",
        b"GET / HTTP/1.1.1\r\nHost: a\r\n\r\n",
        BadVersion,
    ),
    refuse(
        "version_without_minor",
        b"GET / HTTP/1\r\nHost: a\r\n\r\n",
        BadVersion,
    ),
    refuse(
        "version_lower_case",
        b"GET / http/1.1\r\nHost: a\r\n\r\n",
        BadVersion,
    ),
    refuse(
        "version_of_other_protocol",
        b"GET / ICAP/1.1\r\nHost: a\r\n\r\n",
        BadVersion,
    ),
    refuse(
        "version_signed",
        b"GET / HTTP/+1.1\r\nHost: a\r\n\r\n",
        BadVersion,
    ),
    refuse(
        "http2_preface",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        Http2Preface,
    ),
    refuse(
        "space_after_version",
        b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n",
        BadRequestLine,
    ),
    refuse(
        "two_spaces_before_target",
        b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
        BadRequestLine,
    ),
    refuse(
        "two_spaces_before_version",
        b"GET /  HTTP/1.1\r\nHost: a\r\n\r\n",
        BadVersion,
    ),
    refuse(
        "tab_after_method",
        b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n",
        BadMethod,
    ),
    refuse(
        "tab_after_target",
        b"GET /\tHTTP/1.1\r\nHost: a\r\n\r\n",
        BadRequestLine,
    ),
    refuse(
        "space_in_target",
        b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
        BadVersion,
    ),
    refuse("method_alone", b"GET\r\nHost: a\r\n\r\n", BadRequestLine),
    refuse(
        "method_with_colon",
        b"GET: / HTTP/1.1\r\nHost: a\r\n\r\n",
        BadMethod,
    ),
    refuse(
        "method_with_obs_text",
        b"G\xc3\x8bT / HTTP/1.1\r\nHost: a\r\n\r\n",
        BadMethod,
    ),
    refuse(
        "tls_client_hello",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        BadMethod,
    ),
    refuse("field_line_as_start", b"Host: a\r\n\r\n", BadMethod),
    refuse(
        "response_as_request",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        BadMethod,
    ),
];

static TARGETS: &[RequestCase] = &[
    refuse(
        "target_without_slash",
        b"GET a/b HTTP/1.1\r\nHost: a\r\n\r\n",
        BadTarget,
    ),
    refuse(
        "target_with_fragment",
        b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n",
        BadTarget,
    ),
    refuse(
        "target_with_obs_text",
        b"GET /\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n",
        BadTarget,
    ),
    refuse(
        "target_with_control",
        b"GET /\x01 HTTP/1.1\r\nHost: a\r\n\r\n",
        BadTarget,
    ),
    refuse(
        "target_with_delete",
        b"GET /\x7f HTTP/1.1\r\nHost: a\r\n\r\n",
        BadTarget,
    ),
    refuse(
        "target_query_only",
        b"GET ?a=b HTTP/1.1\r\nHost: a\r\n\r\n",
        BadTarget,
    ),
    refuse(
        "authority_form_without_connect",
        b"GET a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
        AuthorityFormTarget,
    ),
    refuse(
        "asterisk_without_options",
        b"GET * HTTP/1.1\r\nHost: a\r\n\r\n",
        AsteriskFormTarget,
    ),
    refuse(
        "asterisk_with_more",
        b"OPTIONS *a HTTP/1.1\r\nHost: a\r\n\r\n",
        BadTarget,
    ),
    refuse(
        "scheme_ftp",
        b"GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n",
        UnsupportedScheme,
    ),
    refuse(
        "scheme_file",
        b"GET file:///etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
        UnsupportedScheme,
    ),
    refuse(
        "scheme_without_slashes",
        b"GET http:a HTTP/1.1\r\nHost: a\r\n\r\n",
        BadTarget,
    ),
    refuse(
        "absolute_without_host",
        b"GET http:///x HTTP/1.1\r\nHost: a\r\n\r\n",
        BadHost,
    ),
    refuse(
        "absolute_with_user",
        b"GET http://u@a/ HTTP/1.1\r\nHost: a\r\n\r\n",
        BadHost,
    ),
    refuse(
        "connect_without_port",
        b"CONNECT a HTTP/1.1\r\nHost: a\r\n\r\n",
        BadConnectTarget,
    ),
    refuse(
        "connect_to_path",
        b"CONNECT / HTTP/1.1\r\nHost: a\r\n\r\n",
        BadConnectTarget,
    ),
    refuse(
        "connect_to_url",
        b"CONNECT http://a:80/ HTTP/1.1\r\nHost: a\r\n\r\n",
        BadConnectTarget,
    ),
    refuse(
        "connect_with_bad_port",
        b"CONNECT a:99999 HTTP/1.1\r\nHost: a\r\n\r\n",
        BadConnectTarget,
    ),
];

static HOSTS: &[RequestCase] = &[
    refuse("host_missing", b"GET / HTTP/1.1\r\n\r\n", MissingHost),
    refuse(
        "host_missing_in_absolute_form",
        b"GET http://a/ HTTP/1.1\r\n\r\n",
        MissingHost,
    ),
    refuse(
        "host_twice",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        DuplicateHost,
    ),
    refuse(
        "host_twice_same",
        b"GET / HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n",
        DuplicateHost,
    ),
    refuse("host_empty", b"GET / HTTP/1.1\r\nHost:\r\n\r\n", BadHost),
    refuse(
        "host_list",
        b"GET / HTTP/1.1\r\nHost: a, b\r\n\r\n",
        BadHost,
    ),
    refuse(
        "host_with_path",
        b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n",
        BadHost,
    ),
    refuse(
        "host_with_user",
        b"GET / HTTP/1.1\r\nHost: u@a\r\n\r\n",
        BadHost,
    ),
    refuse(
        "host_with_bad_port",
        b"GET / HTTP/1.1\r\nHost: a:http\r\n\r\n",
        BadHost,
    ),
    refuse(
        "host_with_large_port",
        b"GET / HTTP/1.1\r\nHost: a:65536\r\n\r\n",
        BadHost,
    ),
    refuse(
        "host_with_two_ports",
        b"GET / HTTP/1.1\r\nHost: a:80:80\r\n\r\n",
        BadHost,
    ),
    refuse(
        "host_bad_ipv6",
        b"GET / HTTP/1.1\r\nHost: [::g]\r\n\r\n",
        BadHost,
    ),
    refuse(
        "host_open_bracket",
        b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n",
        BadHost,
    ),
    refuse(
        "host_with_obs_text",
        b"GET / HTTP/1.1\r\nHost: \xe9\r\n\r\n",
        BadHost,
    ),
    refuse(
        "host_differs_from_target",
        b"GET http://a/ HTTP/1.1\r\nHost: b\r\n\r\n",
        HostMismatch,
    ),
    refuse(
        "host_port_differs_from_target",
        b"GET http://a:80/ HTTP/1.1\r\nHost: a:81\r\n\r\n",
        HostMismatch,
    ),
    refuse(
        "host_differs_from_connect",
        b"CONNECT a:80 HTTP/1.1\r\nHost: b:80\r\n\r\n",
        HostMismatch,
    ),
];

static LENGTHS: &[RequestCase] = &[
    refuse("length_twice", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello", DuplicateContentLength),
    refuse(
        "length_conflict",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        ConflictingContentLength,
    ),
    refuse("length_list_same", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 5\r\n\r\nhello", DuplicateContentLength),
    refuse("length_list_conflict", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5,6\r\n\r\nhello", ConflictingContentLength),
    refuse("length_list_open", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5,\r\n\r\nhello", BadContentLength),
    refuse("length_empty", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\nhello", BadContentLength),
    refuse("length_plus", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\nhello", BadContentLength),
    refuse("length_minus", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\nhello", BadContentLength),
    refuse("length_hex", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x5\r\n\r\nhello", BadContentLength),
    refuse("length_with_space", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5 5\r\n\r\nhello", BadContentLength),
    refuse("length_fraction", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5.0\r\n\r\nhello", BadContentLength),
    refuse("length_exponent", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5e0\r\n\r\nhello", BadContentLength),
    refuse("length_word", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: five\r\n\r\nhello", BadContentLength),
    refuse("length_overflows_u64", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 18446744073709551621\r\n\r\nhello", BadContentLength),
    refuse("length_19_digits", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0000000000000000005\r\n\r\nhello", BadContentLength),
    refuse("length_obs_text", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\xa0\r\n\r\nhello", BadContentLength),
    refuse(
        "length_and_chunked",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        ContentLengthWithTransferEncoding,
    ),
    refuse(
        "chunked_and_length",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        ContentLengthWithTransferEncoding,
    ),
    refuse(
        "chunked_and_length_zero",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        ContentLengthWithTransferEncoding,
    ),
    refuse("connect_with_length", b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\nContent-Length: 5\r\n\r\nhello", BodyForbidden),
    refuse("trace_with_length", b"TRACE / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello", BodyForbidden),
    refuse("trace_with_chunks", b"TRACE / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", BodyForbidden),
];

static CODINGS: &[RequestCase] = &[
    refuse("coding_unknown", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: cow\r\n\r\n", UnknownTransferCoding),
    refuse("coding_identity", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n", UnknownTransferCoding),
    refuse("coding_gzip_chunked", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", UnknownTransferCoding),
    refuse("coding_xchunked", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", UnknownTransferCoding),
    refuse("coding_not_final", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, gzip\r\n\r\n", ChunkedNotFinal),
    refuse(
        "coding_not_final_over_two_fields",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n",
        ChunkedNotFinal,
    ),
    refuse("coding_twice", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", ChunkedTwice),
    refuse(
        "coding_twice_over_two_fields",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-encoding: chunked\r\n\r\n",
        ChunkedTwice,
    ),
    refuse("coding_empty", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\r\n\r\n", BadTransferEncoding),
    refuse("coding_empty_element", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: ,chunked\r\n\r\n", BadTransferEncoding),
    refuse("coding_quoted", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \"chunked\"\r\n\r\n", BadTransferEncoding),
    refuse("coding_with_parameter", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked;q=1\r\n\r\n", BadTransferEncoding),
    refuse("coding_obs_text", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\xa0\r\n\r\n", BadTransferEncoding),
    refuse("coding_in_http10", b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", TransferEncodingInHttp10),
];

static CONNECTION: &[RequestCase] = &[
    refuse(
        "connection_names_length",
        b"POST / HTTP/1.1\r\nHost: a\r\nConnection: content-length\r\n\r\n",
        ConnectionNamesFraming,
    ),
    refuse(
        "connection_names_host",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close, Host\r\n\r\n",
        ConnectionNamesFraming,
    ),
    refuse(
        "connection_names_coding",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Transfer-Encoding\r\n\r\n",
        ConnectionNamesFraming,
    ),
    refuse(
        "connection_not_a_token",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: keep alive\r\n\r\n",
        BadConnection,
    ),
    refuse(
        "upgrade_not_a_token",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: web socket\r\n\r\n",
        BadUpgrade,
    ),
    refuse(
        "upgrade_empty",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade:\r\n\r\n",
        BadUpgrade,
    ),
    refuse(
        "expect_unknown",
        b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 200-ok\r\nContent-Length: 0\r\n\r\n",
        UnknownExpectation,
    ),
    refuse(
        "expect_obfuscated",
        b"POST / HTTP/1.1\r\nHost: a\r\nExpect: y 100-continue\r\nContent-Length: 0\r\n\r\n",
        UnknownExpectation,
    ),
];

const CHUNKED_HEAD: &str = "POST / HTTP/1.1\r\nHost: a\r\ntransfer-encoding: chunked\r\n\r\n";

macro_rules! chunked {
    ($body:literal) => {
        concat!(
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
            $body
        )
        .as_bytes()
    };
}

static CHUNK_LINES: &[RequestCase] = &[
    refuse_body(
        "chunk_size_missing",
        chunked!("\r\nhello\r\n0\r\n\r\n"),
        BadChunkSize,
    ),
    refuse_body(
        "chunk_size_garbage",
        chunked!("x\r\nhello\r\n0\r\n\r\n"),
        BadChunkSize,
    ),
    refuse_body(
        "chunk_size_0x",
        chunked!("0x5\r\nhello\r\n0\r\n\r\n"),
        BadChunkSize,
    ),
    refuse_body(
        "chunk_size_plus",
        chunked!("+5\r\nhello\r\n0\r\n\r\n"),
        BadChunkSize,
    ),
    refuse_body(
        "chunk_size_minus",
        chunked!("-5\r\nhello\r\n0\r\n\r\n"),
        BadChunkSize,
    ),
    refuse_body(
        "chunk_size_underscore",
        chunked!("1_0\r\nhello\r\n0\r\n\r\n"),
        BadChunkSize,
    ),
    refuse_body(
        "chunk_size_leading_space",
        chunked!(" 5\r\nhello\r\n0\r\n\r\n"),
        BadChunkSize,
    ),
    refuse_body(
        "chunk_size_trailing_space",
        chunked!("5 \r\nhello\r\n0\r\n\r\n"),
        BadChunkSize,
    ),
    refuse_body(
        "chunk_size_inner_space",
        chunked!("5 5\r\nhello\r\n0\r\n\r\n"),
        BadChunkSize,
    ),
    refuse_body(
        "chunk_size_comma",
        chunked!("5,5\r\nhello\r\n0\r\n\r\n"),
        BadChunkSize,
    ),
    refuse_body(
        "chunk_size_nul",
        chunked!("5\0\r\nhello\r\n0\r\n\r\n"),
        BadChunkSize,
    ),
    refuse_body(
        "chunk_size_overflow",
        chunked!("10000000000000005\r\nhello\r\n0\r\n\r\n"),
        ChunkSizeOverflow,
    ),
    refuse_body(
        "chunk_size_many_zeros",
        chunked!("0000000000000005\r\nhello\r\n0\r\n\r\n"),
        ChunkSizeOverflow,
    ),
    refuse_body(
        "chunk_line_bare_lf",
        chunked!("5\nhello\r\n0\r\n\r\n"),
        BareLf,
    ),
    refuse_body(
        "chunk_line_bare_cr",
        chunked!("5\rhello\r\n0\r\n\r\n"),
        BareCr,
    ),
    refuse_body(
        "chunk_data_bare_lf",
        chunked!("5\r\nhello\n0\r\n\r\n"),
        BadChunkEnd,
    ),
    refuse_body(
        "chunk_data_too_long",
        chunked!("5\r\nhello!\r\n0\r\n\r\n"),
        BadChunkEnd,
    ),
    refuse_body(
        "chunk_data_cr_only",
        chunked!("5\r\nhello\r0\r\n\r\n"),
        BadChunkEnd,
    ),
    refuse_body(
        "chunk_data_without_end",
        chunked!("5\r\nhello0\r\n\r\n"),
        BadChunkEnd,
    ),
    refuse_body("last_chunk_bare_lf", chunked!("0\n\r\n"), BareLf),
    refuse_body("last_chunk_end_bare_lf", chunked!("0\r\n\n"), BareLf),
    refuse_body("last_chunk_end_cr_only", chunked!("0\r\n\rGET\r\n"), BareCr),
];

static CHUNK_EXTENSIONS: &[RequestCase] = &[
    refuse_body(
        "extension_without_name",
        chunked!("5;\r\nhello\r\n0\r\n\r\n"),
        BadChunkExtension,
    ),
    refuse_body(
        "extension_bare_lf",
        chunked!("5;a\nhello\r\n0\r\n\r\n"),
        BareLf,
    ),
    refuse_body(
        "extension_bare_lf_hides_chunk",
        chunked!("5;\n0\r\n\r\n"),
        BareLf,
    ),
    refuse_body(
        "extension_bare_cr",
        chunked!("5;a\rhello\r\n0\r\n\r\n"),
        BareCr,
    ),
    refuse_body(
        "extension_control",
        chunked!("5;a\u{1}\r\nhello\r\n0\r\n\r\n"),
        BadChunkExtension,
    ),
    refuse_body(
        "extension_value_missing",
        chunked!("5;a=\r\nhello\r\n0\r\n\r\n"),
        BadChunkExtension,
    ),
    refuse_body(
        "extension_quote_open",
        chunked!("5;a=\"b\r\nhello\r\n0\r\n\r\n"),
        BadChunkExtension,
    ),
    refuse_body(
        "extension_quote_hides_line",
        chunked!("5;a=\"\r\nhello\r\n0\r\n\r\n\"\r\n"),
        BadChunkExtension,
    ),
    refuse_body(
        "extension_two_values",
        chunked!("5;a=b=c\r\nhello\r\n0\r\n\r\n"),
        BadChunkExtension,
    ),
    refuse_body(
        "extension_words",
        chunked!("5;a b\r\nhello\r\n0\r\n\r\n"),
        BadChunkExtension,
    ),
    refuse_body(
        "extension_trailing_space",
        chunked!("5;a \r\nhello\r\n0\r\n\r\n"),
        BadChunkExtension,
    ),
    refuse_body(
        "extension_without_semicolon",
        chunked!("5 a=b\r\nhello\r\n0\r\n\r\n"),
        BadChunkSize,
    ),
];

static TRAILERS: &[RequestCase] = &[
    refuse_body(
        "trailer_length",
        chunked!("0\r\nContent-Length: 5\r\n\r\n"),
        ForbiddenTrailer,
    ),
    refuse_body(
        "trailer_coding",
        chunked!("0\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ForbiddenTrailer,
    ),
    refuse_body(
        "trailer_host",
        chunked!("0\r\nHost: b\r\n\r\n"),
        ForbiddenTrailer,
    ),
    refuse_body(
        "trailer_connection",
        chunked!("0\r\nConnection: close\r\n\r\n"),
        ForbiddenTrailer,
    ),
    refuse_body(
        "trailer_authorization",
        chunked!("0\r\nAuthorization: x\r\n\r\n"),
        ForbiddenTrailer,
    ),
    refuse_body(
        "trailer_cookie",
        chunked!("0\r\nA: b\r\nCookie: x\r\n\r\n"),
        ForbiddenTrailer,
    ),
    refuse_body(
        "trailer_forwarded_for",
        chunked!("0\r\nX-Forwarded-For: 1.1.1.1\r\n\r\n"),
        ForbiddenTrailer,
    ),
    refuse_body(
        "trailer_obs_fold",
        chunked!("0\r\nA: b\r\n c\r\n\r\n"),
        ObsFold,
    ),
    refuse_body(
        "trailer_leading_space",
        chunked!("0\r\n A: b\r\n\r\n"),
        LeadingWhitespace,
    ),
    refuse_body(
        "trailer_space_before_colon",
        chunked!("0\r\nA : b\r\n\r\n"),
        SpaceBeforeColon,
    ),
    refuse_body("trailer_bare_lf", chunked!("0\r\nA: b\n\r\n"), BareLf),
    refuse_body(
        "trailer_bare_cr",
        chunked!("0\r\nA: b\rC: d\r\n\r\n"),
        BareCr,
    ),
    refuse_body("trailer_nul", chunked!("0\r\nA: \0\r\n\r\n"), NulByte),
    refuse_body(
        "trailer_is_next_request",
        chunked!("0\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"),
        BadFieldName,
    ),
];

static NORMALISED: &[RequestCase] = &[
    accept("plain", b"GET /a?b=c HTTP/1.1\r\nHost: a\r\n\r\n", None, "GET /a?b=c HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept("one_empty_line_first", b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", None, "GET / HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept("no_space_after_colon", b"GET / HTTP/1.1\r\nHost:a\r\n\r\n", None, "GET / HTTP/1.1\r\nHost:a\r\n\r\n", ""),
    accept("space_around_value", b"GET / HTTP/1.1\r\nHost:\t a \t\r\n\r\n", None, "GET / HTTP/1.1\r\nHost:\t a \t\r\n\r\n", ""),
    accept("empty_value", b"GET / HTTP/1.1\r\nHost: a\r\nX:\r\n\r\n", None, "GET / HTTP/1.1\r\nHost: a\r\nX:\r\n\r\n", ""),
    accept("obs_text_in_value", b"GET / HTTP/1.1\r\nHost: a\r\nX: \xc3\xa9\r\n\r\n", None, "GET / HTTP/1.1\r\nHost: a\r\nX: \u{e9}\r\n\r\n", ""),
    accept("method_lower_case", b"get / HTTP/1.1\r\nHost: a\r\n\r\n", None, "get / HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept("method_unknown", b"M-SEARCH / HTTP/1.1\r\nHost: a\r\n\r\n", None, "M-SEARCH / HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept("double_slash", b"GET //a//b HTTP/1.1\r\nHost: a\r\n\r\n", None, "GET //a//b HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept("url_in_path", b"GET /http://b/ HTTP/1.1\r\nHost: a\r\n\r\n", None, "GET /http://b/ HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept("absolute_form", b"GET http://a/x?y HTTP/1.1\r\nHost: a\r\n\r\n", None, "GET /x?y HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept("absolute_form_scheme_case", b"GET HTTP://A/x HTTP/1.1\r\nHost: a:80\r\n\r\n", None, "GET /x HTTP/1.1\r\nHost: a:80\r\n\r\n", ""),
    accept("absolute_form_no_path", b"GET http://a HTTP/1.1\r\nHost: a\r\n\r\n", None, "GET / HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept("absolute_form_query_only", b"GET http://a?b HTTP/1.1\r\nHost: a\r\n\r\n", None, "GET /?b HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept("absolute_form_options", b"OPTIONS http://a HTTP/1.1\r\nHost: a\r\n\r\n", None, "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept("asterisk", b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", None, "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept("connect", b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", None, "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", ""),
    accept("http10_absolute_without_host", b"GET http://a:8/ HTTP/1.0\r\n\r\n", None, "GET / HTTP/1.1\r\nhost: a:8\r\n\r\n", ""),
    accept("http10_raised", b"GET / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n", None, "GET / HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept("http10_upgrade_dropped", b"GET / HTTP/1.0\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", None, "GET / HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept(
        "nominated_fields_dropped",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close, X-Hop,, x-two\r\nX-Hop: 1\r\nKeep: 2\r\nX-Two: 3\r\nKeep-Alive: 5\r\n\r\n",
        None,
        "GET / HTTP/1.1\r\nHost: a\r\nKeep: 2\r\n\r\n",
        "",
    ),
    accept(
        "proxy_fields_dropped",
        b"GET / HTTP/1.1\r\nProxy-Connection: keep-alive\r\nHost: a\r\nProxy-Authorization: x\r\nTE: gzip\r\n\r\n",
        None,
        "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        "",
    ),
    accept(
        "te_trailers_kept",
        b"GET / HTTP/1.1\r\nHost: a\r\nTE: gzip, trailers\r\nConnection: TE\r\n\r\n",
        None,
        "GET / HTTP/1.1\r\nHost: a\r\nte: trailers\r\nconnection: te\r\n\r\n",
        "",
    ),
    accept(
        "websocket",
        b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n",
        None,
        "GET /ws HTTP/1.1\r\nHost: a\r\nSec-WebSocket-Key: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        "",
    ),
    accept("upgrade_without_option", b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n\r\n", None, "GET / HTTP/1.1\r\nHost: a\r\n\r\n", ""),
    accept(
        "h2c_upgrade_dropped",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\n",
        None,
        "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        "",
    ),
];

static BODIES: &[RequestCase] = &[
    accept_with_rest(
        "length_and_next",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhelloGET",
        Length(5),
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n",
        ["hello", "GET"],
    ),
    accept_with_rest(
        "get_with_length",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabcGET",
        Length(3),
        "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n",
        ["abc", "GET"],
    ),
    accept_with_rest(
        "no_length_means_no_body",
        b"POST / HTTP/1.1\r\nHost: a\r\n\r\nGET",
        None,
        "POST / HTTP/1.1\r\nHost: a\r\n\r\n",
        ["", "GET"],
    ),
    accept(
        "upgrade_with_body",
        b"POST / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: tcp\r\nContent-Length: 1\r\n\r\nx",
        Length(1),
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nupgrade: tcp\r\nconnection: upgrade\r\n\r\n",
        "x",
    ),
    accept(
        "upgrade_with_chunks",
        b"POST / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: tcp\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        Chunked,
        "POST / HTTP/1.1\r\nHost: a\r\ntransfer-encoding: chunked\r\nupgrade: tcp\r\nconnection: upgrade\r\n\r\n",
        "x",
    ),
    accept(
        "h2c_upgrade_with_body_dropped",
        b"POST / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 1\r\n\r\nx",
        Length(1),
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n",
        "x",
    ),
    accept(
        "expect_continue_kept",
        b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 1\r\n\r\nx",
        Length(1),
        "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 1\r\n\r\n",
        "x",
    ),
    accept(
        "expect_continue_http10_dropped",
        b"POST / HTTP/1.0\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx",
        Length(1),
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n",
        "x",
    ),
    accept("chunks", chunked!("5\r\nhello\r\n0006\r\n world\r\n0\r\n\r\n"), Chunked, CHUNKED_HEAD, "hello world"),
    accept_with_rest("chunks_and_next", chunked!("A\r\n0123456789\r\n000\r\n\r\nGET"), Chunked, CHUNKED_HEAD, ["0123456789", "GET"]),
    accept("chunk_data_looks_like_end", chunked!("7\r\n\r\n0\r\n\r\n\r\n0\r\n\r\n"), Chunked, CHUNKED_HEAD, "\r\n0\r\n\r\n"),
    accept("extensions", chunked!("5;a;b=c;d=\"e;\\\"\"\r\nhello\r\n0\r\n\r\n"), Chunked, CHUNKED_HEAD, "hello"),
    accept("extensions_spaced", chunked!("5 ; a = b ;c= \"d\"\r\nhello\r\n0;e\r\n\r\n"), Chunked, CHUNKED_HEAD, "hello"),
    accept_with_rest("trailers", chunked!("0\r\nX-Sum: 1\r\ngrpc-status: 0\r\n\r\nGET"), Chunked, CHUNKED_HEAD, ["", "GET"]),
    accept(
        "coding_case",
        b"POST / HTTP/1.1\r\nHost: a\r\ntransfer-encoding: \tCHUNKED \r\n\r\n1\r\nx\r\n0\r\n\r\n",
        Chunked,
        CHUNKED_HEAD,
        "x",
    ),
];
