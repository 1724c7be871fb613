//! Fast reading of heads: `httparse` finds the parts, then the strict line layout is checked and names are interned.
//! What RFC 9112 lets a recipient tolerate but a proxy must not (bare LF, more empty lines) is refused here; `fault` says why.

use std::mem::MaybeUninit;

use httparse::Status;

use crate::bytes::{is_ows, is_value};
use crate::fault;
use crate::limits::{EMPTY_LINES_MAX, HEAD_BYTES_CAP, HEADERS_CAP, Limits};
use crate::name::Name;
use crate::refusal::Refusal;
use crate::table::{Line, Span, Table};

/// An unfinished head is parsed again when a line has ended or this many bytes have come.
const REPARSE_BYTES: usize = 4096;

/// How far earlier calls looked into an unfinished head. Only a LF can finish a head or a line, so most bytes without one are not
/// parsed again at once: a head dribbled in byte by byte costs at most one parse per line and per [`REPARSE_BYTES`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    seen: usize,
    parsed: usize,
}

impl Progress {
    fn is_worth_parsing(&mut self, window: &[u8], bytes_max: usize) -> bool {
        let first = self.seen == 0;
        let fresh = window.get(self.seen..).unwrap_or(window);
        let grown = window.len().saturating_sub(self.parsed) >= REPARSE_BYTES;
        let worth = first || grown || window.len() >= bytes_max || memchr::memchr(b'\n', fresh).is_some();
        self.seen = window.len();
        if worth {
            self.parsed = window.len();
        }
        worth
    }
}

/// The start line of a request as spans of the buffer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RequestLine {
    pub(crate) method: Span,
    pub(crate) target: Span,
    /// 0 or 1.
    pub(crate) minor: u8,
}

/// The start line of a response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct StatusLine {
    pub(crate) start: u32,
    pub(crate) status: u16,
    pub(crate) reason: Span,
    /// 0 or 1.
    pub(crate) minor: u8,
}

/// What one look at the buffer gave; `None` is "more bytes are needed".
type Look<T> = Result<Option<(usize, T)>, Refusal>;

fn window<'b>(buf: &'b [u8], limits: &Limits) -> (&'b [u8], usize) {
    let bytes_max = limits.head_bytes_max.min(HEAD_BYTES_CAP);
    (&buf[..buf.len().min(bytes_max)], bytes_max)
}

/// Names the fault of a head that is not acceptable, or asks for more bytes while none shows.
fn refuse<T>(fault: Option<Refusal>, window: &[u8], bytes_max: usize) -> Look<T> {
    match fault {
        Some(refusal) => Err(refusal),
        None if window.len() >= bytes_max => Err(Refusal::HeadTooLarge),
        None => Ok(None),
    }
}

pub(crate) fn look_at_request(buf: &[u8], limits: &Limits, progress: &mut Progress, table: &mut Table) -> Look<RequestLine> {
    let (window, bytes_max) = window(buf, limits);
    if !progress.is_worth_parsing(window, bytes_max) {
        return Ok(None);
    }
    let mut slots = [const { MaybeUninit::<httparse::Header<'_>>::uninit() }; HEADERS_CAP];
    let mut parsed = httparse::Request::new(&mut []);
    let outcome = parsed.parse_with_uninit_headers(window, &mut slots[..limits.headers_max.min(HEADERS_CAP)]);
    let Ok(Status::Complete(len)) = outcome else {
        return refuse(fault::of_request(window, limits), window, bytes_max);
    };
    let line = match (parsed.method, parsed.path, parsed.version) {
        (Some(method), Some(target), Some(minor)) => {
            let line = RequestLine { method: span_in(window, method.as_bytes()), target: span_in(window, target.as_bytes()), minor };
            layout_of_request_line(window, line, limits).map(|at| (line, at))
        }
        _ => None,
    };
    let fields = |(line, at)| layout_of_fields(window, at, parsed.headers, len, limits, table).then_some((len, line));
    match line.and_then(fields) {
        Some(found) => Ok(Some(found)),
        None => Err(fault::of_request(&window[..len], limits).unwrap_or(Refusal::BadHead)),
    }
}

pub(crate) fn look_at_response(buf: &[u8], limits: &Limits, progress: &mut Progress, table: &mut Table) -> Look<StatusLine> {
    let (window, bytes_max) = window(buf, limits);
    if !progress.is_worth_parsing(window, bytes_max) {
        return Ok(None);
    }
    let mut slots = [const { MaybeUninit::<httparse::Header<'_>>::uninit() }; HEADERS_CAP];
    let mut parsed = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    let slots = &mut slots[..limits.headers_max.min(HEADERS_CAP)];
    let outcome = config.parse_response_with_uninit_headers(&mut parsed, window, slots);
    let Ok(Status::Complete(len)) = outcome else {
        return refuse(fault::of_response(window, limits), window, bytes_max);
    };
    let line = match (parsed.code, parsed.version) {
        (Some(status), Some(minor)) => layout_of_status_line(window, status, minor, limits),
        _ => None,
    };
    let fields = |(line, at)| layout_of_fields(window, at, parsed.headers, len, limits, table).then_some((len, line));
    match line.and_then(fields) {
        Some(found) => Ok(Some(found)),
        None => Err(fault::of_response(&window[..len], limits).unwrap_or(Refusal::BadHead)),
    }
}

/// A whole trailer section, its empty line included, into `table`; `None` if unfinished.
pub(crate) fn look_at_trailers(buf: &[u8], limits: &Limits, progress: &mut Progress, table: &mut Table) -> Result<Option<usize>, Refusal> {
    let bytes_max = limits.trailer_bytes_max.min(HEAD_BYTES_CAP);
    let limits = Limits { headers_max: limits.trailers_max.min(HEADERS_CAP), ..*limits };
    let window = &buf[..buf.len().min(bytes_max)];
    if !progress.is_worth_parsing(window, bytes_max) {
        return Ok(None);
    }
    let mut slots = [httparse::EMPTY_HEADER; HEADERS_CAP];
    let as_trailer = |refusal| match refusal {
        Refusal::TooManyHeaders => Refusal::TooManyTrailers,
        Refusal::HeadTooLarge => Refusal::TrailersTooLarge,
        other => other,
    };
    let Ok(Status::Complete((len, fields))) = httparse::parse_headers(window, &mut slots[..limits.headers_max]) else {
        return refuse::<()>(fault::of_fields(window, &limits), window, bytes_max).map(|_| None).map_err(as_trailer);
    };
    if layout_of_fields(window, 0, fields, len, &limits, table) {
        Ok(Some(len))
    } else {
        Err(as_trailer(fault::of_fields(&window[..len], &limits).unwrap_or(Refusal::BadHead)))
    }
}

/// Where `part`, a slice of `whole`, lies in it.
fn span_in(whole: &[u8], part: &[u8]) -> Span {
    Span::new(part.as_ptr().addr() - whole.as_ptr().addr(), part.len())
}

/// True if exactly the allowed empty lines come before `start`.
fn is_led_by_empty_lines(window: &[u8], start: usize) -> bool {
    start == 0 || (start <= 2 * EMPTY_LINES_MAX && window[..start].chunks(2).all(|pair| pair == b"\r\n"))
}

/// Where the field section begins if the request line is laid out strictly.
fn layout_of_request_line(window: &[u8], line: RequestLine, limits: &Limits) -> Option<usize> {
    let version = line.target.end() + 1;
    let end = version + "HTTP/1.1".len();
    let strict = is_led_by_empty_lines(window, line.method.start as usize)
        && line.method.len as usize <= limits.method_bytes_max
        && line.target.len as usize <= limits.target_bytes_max
        && line.target.start as usize == line.method.end() + 1
        && crate::bytes::is_target(line.target.of(window))
        && window.get(end..end + 2) == Some(b"\r\n");
    strict.then_some(end + 2)
}

/// The status line as spans, and where the field section begins, if laid out strictly. httparse has checked the bytes of the
/// version, the status and the reason, but not how the line ends, and it hides a reason with obs-text.
fn layout_of_status_line(window: &[u8], status: u16, minor: u8, limits: &Limits) -> Option<(StatusLine, usize)> {
    let start = window.iter().position(|&b| b != b'\r' && b != b'\n')?;
    let lf = start + memchr::memchr(b'\n', &window[start..])?;
    let line = window[start..lf].strip_suffix(b"\r")?;
    let rest = line.get("HTTP/1.1 200".len()..)?;
    let reason = rest.strip_prefix(b" ").unwrap_or(rest);
    let strict = is_led_by_empty_lines(window, start)
        && status >= 100
        && line.len() <= limits.field_bytes_max
        && (rest.is_empty() || rest.len() > reason.len())
        && is_value(reason);
    let reason = Span::new(start + line.len() - reason.len(), reason.len());
    strict.then_some((StatusLine { start: start as u32, status, reason, minor }, lf + 1))
}

/// Fills `table` if every line begins where the last one ended and ends in CR LF.
fn layout_of_fields(window: &[u8], start: usize, fields: &[httparse::Header<'_>], len: usize, limits: &Limits, table: &mut Table) -> bool {
    table.clear();
    let base = window.as_ptr().addr();
    let mut at = start;
    for field in fields {
        let name = field.name.as_bytes();
        let value = Span::new(field.value.as_ptr().addr() - base, field.value.len());
        let mut end = value.end();
        while window.get(end).is_some_and(|&b| is_ows(b)) {
            end += 1;
        }
        let strict = name.as_ptr().addr() - base == at && window.get(end..end + 2) == Some(b"\r\n") && end - at <= limits.field_bytes_max;
        if !strict {
            return false;
        }
        table.push(Line { start: at as u32, value, name_len: name.len() as u16, name: Name::of(name) });
        at = end + 2;
    }
    table.end = at as u32;
    window.get(at..at + 2) == Some(b"\r\n") && at + 2 == len
}
