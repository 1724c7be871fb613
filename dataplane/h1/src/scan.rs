//! Fast reading of heads: `httparse` finds the parts; then this module checks the strict line
//! layout and interns names. It refuses what RFC 9112 lets a recipient tolerate but a proxy must
//! not: bare LF of clients, more empty lines. `diagnose` names the reason.

use std::mem::MaybeUninit;

use httparse::Status;

use crate::bytes::{is_ows, is_value};
use crate::diagnose;
use crate::field_table::{FieldLine, FieldTable, Span};
use crate::limits::{EMPTY_LINES_MAX, HEAD_BYTES_CAP, HEADERS_CAP, MessageLimits};
use crate::name::FieldName;
use crate::refusal::MessageRefusal;

/// Number of new bytes after which an unfinished head is parsed again even if no line has ended.
/// Then a line that is too long is refused before the buffer is full. The longest head is parsed 16
/// times for this reason.
const REPARSE_BYTES: usize = 4096;

/// Progress of earlier calls in an unfinished head. Only LF can finish a head or a line, so most
/// bytes without one are not parsed at once. A head that arrives byte by byte costs at most one
/// parse per line and per [`REPARSE_BYTES`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ScanProgress {
    scanned: usize,
    parsed: usize,
}

impl ScanProgress {
    fn is_worth_parsing(&mut self, window: &[u8], bytes_max: usize) -> bool {
        let first = self.scanned == 0;
        let fresh = window.get(self.scanned..).unwrap_or(window);
        let grown = window.len().saturating_sub(self.parsed) >= REPARSE_BYTES;
        let worth =
            first || grown || window.len() >= bytes_max || memchr::memchr(b'\n', fresh).is_some();
        self.scanned = window.len();
        if worth {
            self.parsed = window.len();
        }
        worth
    }
}

/// Start line of a request, as spans of the buffer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RequestLine {
    pub(crate) method: Span,
    pub(crate) target: Span,
    /// Minor version, which is 0 or 1.
    pub(crate) minor: u8,
}

/// Start line of a response, as spans of the buffer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct StatusLine {
    pub(crate) start: u32,
    pub(crate) status: u16,
    pub(crate) reason: Span,
    /// Minor version, which is 0 or 1.
    pub(crate) minor: u8,
}

/// Result of one scan of the buffer; `None` means that more bytes are needed.
type ScanStep<T> = Result<Option<(usize, T)>, MessageRefusal>;

fn window<'b>(buf: &'b [u8], limits: &MessageLimits) -> (&'b [u8], usize) {
    let bytes_max = limits.head_bytes_max.min(HEAD_BYTES_CAP);
    (&buf[..buf.len().min(bytes_max)], bytes_max)
}

/// Returns the fault of a head that is not acceptable. Without a fault, more bytes are needed
/// unless the head already has its maximum size.
fn refuse<T>(fault: Option<MessageRefusal>, window: &[u8], bytes_max: usize) -> ScanStep<T> {
    match fault {
        Some(refusal) => Err(refusal),
        None if window.len() >= bytes_max => Err(MessageRefusal::HeadTooLarge),
        None => Ok(None),
    }
}

pub(crate) fn scan_request(
    buf: &[u8],
    limits: &MessageLimits,
    progress: &mut ScanProgress,
    table: &mut FieldTable,
) -> ScanStep<RequestLine> {
    let (window, bytes_max) = window(buf, limits);
    if !progress.is_worth_parsing(window, bytes_max) {
        return Ok(None);
    }
    let mut slots = [const { MaybeUninit::<httparse::Header<'_>>::uninit() }; HEADERS_CAP];
    let mut parsed = httparse::Request::new(&mut []);
    let outcome =
        parsed.parse_with_uninit_headers(window, &mut slots[..limits.headers_max.min(HEADERS_CAP)]);
    // The head is incomplete or malformed: the exact parser decides which.
    let Ok(Status::Complete(len)) = outcome else {
        return refuse(diagnose::of_request(window, limits), window, bytes_max);
    };
    let line = match (parsed.method, parsed.path, parsed.version) {
        (Some(method), Some(target), Some(minor)) => {
            let line = RequestLine {
                method: span_in(window, method.as_bytes()),
                target: span_in(window, target.as_bytes()),
                minor,
            };
            layout_of_request_line(window, line, limits).map(|at| (line, at))
        }
        _ => None,
    };
    let fields = |(line, at)| {
        layout_of_fields(
            window,
            (at, len),
            parsed.headers,
            // A hop before this one may read a bare LF otherwise, which would allow to smuggle
            // requests.
            LineEnds::Strict,
            limits,
            table,
        )
        .then_some((len, line))
    };
    match line.and_then(fields) {
        Some(found) => Ok(Some(found)),
        // httparse accepts more than the strict layout allows, so the exact reading names the
        // fault.
        None => {
            Err(diagnose::of_request(&window[..len], limits).unwrap_or(MessageRefusal::BadHead))
        }
    }
}

pub(crate) fn scan_response(
    buf: &[u8],
    limits: &MessageLimits,
    progress: &mut ScanProgress,
    table: &mut FieldTable,
) -> ScanStep<StatusLine> {
    let (window, bytes_max) = window(buf, limits);
    if !progress.is_worth_parsing(window, bytes_max) {
        return Ok(None);
    }
    let mut slots = [const { MaybeUninit::<httparse::Header<'_>>::uninit() }; HEADERS_CAP];
    let mut parsed = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    let slots = &mut slots[..limits.headers_max.min(HEADERS_CAP)];
    let outcome = config.parse_response_with_uninit_headers(&mut parsed, window, slots);
    // The head is incomplete or malformed: the exact parser decides which.
    let Ok(Status::Complete(len)) = outcome else {
        return refuse(diagnose::of_response(window, limits), window, bytes_max);
    };
    let line = match (parsed.code, parsed.version) {
        (Some(status), Some(minor)) => layout_of_status_line(window, status, minor, limits),
        _ => None,
    };
    let fields = |(line, at, lf): (StatusLine, usize, bool)| {
        let fields = layout_of_fields(
            window,
            (at, len),
            parsed.headers,
            // Some upstreams end lines with a bare LF, which RFC 9112 §2.2 lets a recipient accept.
            LineEnds::Lf,
            limits,
            table,
        );
        table.has_bare_lf |= lf;
        fields.then_some((len, line))
    };
    match line.and_then(fields) {
        Some(found) => Ok(Some(found)),
        None => {
            // As in `scan_request`, the exact reading names the fault.
            Err(diagnose::of_response(&window[..len], limits).unwrap_or(MessageRefusal::BadHead))
        }
    }
}

/// Reads a whole trailer section, its empty line included, into `table`. Returns `None` if it is
/// unfinished.
pub(crate) fn scan_trailers(
    buf: &[u8],
    limits: &MessageLimits,
    progress: &mut ScanProgress,
    table: &mut FieldTable,
) -> Result<Option<usize>, MessageRefusal> {
    let bytes_max = limits.trailer_bytes_max.min(HEAD_BYTES_CAP);
    let limits = MessageLimits {
        headers_max: limits.trailers_max.min(HEADERS_CAP),
        ..*limits
    };
    let window = &buf[..buf.len().min(bytes_max)];
    if !progress.is_worth_parsing(window, bytes_max) {
        return Ok(None);
    }
    let mut slots = [httparse::EMPTY_HEADER; HEADERS_CAP];
    let as_trailer = |refusal| match refusal {
        MessageRefusal::TooManyHeaders => MessageRefusal::TooManyTrailers,
        MessageRefusal::HeadTooLarge => MessageRefusal::TrailersTooLarge,
        other => other,
    };
    let Ok(Status::Complete((len, fields))) =
        httparse::parse_headers(window, &mut slots[..limits.headers_max])
    else {
        return refuse::<()>(diagnose::of_fields(window, &limits), window, bytes_max)
            .map(|_| None)
            .map_err(as_trailer);
    };
    if layout_of_fields(window, (0, len), fields, LineEnds::Strict, &limits, table) {
        Ok(Some(len))
    } else {
        Err(as_trailer(
            diagnose::of_fields(&window[..len], &limits).unwrap_or(MessageRefusal::BadHead),
        ))
    }
}

/// Returns the span of `part` within `whole`, of which it is a slice.
fn span_in(whole: &[u8], part: &[u8]) -> Span {
    Span::new(part.as_ptr().addr() - whole.as_ptr().addr(), part.len())
}

/// Returns true if no more than the allowed empty lines precede `start`, each of them CR LF.
fn is_led_by_empty_lines(window: &[u8], start: usize) -> bool {
    start == 0
        || (start <= 2 * EMPTY_LINES_MAX && window[..start].chunks(2).all(|pair| pair == b"\r\n"))
}

/// Returns the offset of the field section if the layout of the request line is strict.
fn layout_of_request_line(
    window: &[u8],
    line: RequestLine,
    limits: &MessageLimits,
) -> Option<usize> {
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

/// Returns the status line as spans, the offset of the field section, and whether a bare LF ended
/// the line. Apart from that LF the layout must be strict. `httparse` has checked the bytes of the
/// version, the status and the reason. It does not check how the line ends, and it hides a reason
/// with obs-text.
fn layout_of_status_line(
    window: &[u8],
    status: u16,
    minor: u8,
    limits: &MessageLimits,
) -> Option<(StatusLine, usize, bool)> {
    let start = window.iter().position(|&b| b != b'\r' && b != b'\n')?;
    let lf = start + memchr::memchr(b'\n', &window[start..])?;
    let (line, bare) = match window[start..lf].strip_suffix(b"\r") {
        Some(line) => (line, false),
        None => (&window[start..lf], true),
    };
    let rest = line.get("HTTP/1.1 200".len()..)?;
    let reason = rest.strip_prefix(b" ").unwrap_or(rest);
    let strict = (is_led_by_empty_lines(window, start) || &window[..start] == b"\n")
        && status >= 100
        && line.len() <= limits.field_bytes_max
        && (rest.is_empty() || rest.len() > reason.len())
        && is_value(reason);
    let reason = Span::new(start + line.len() - reason.len(), reason.len());
    strict.then_some((
        StatusLine {
            start: start as u32,
            status,
            reason,
            minor,
        },
        lf + 1,
        bare,
    ))
}

/// Line ends that a message may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LineEnds {
    /// Only CR LF ends a line.
    Strict,
    /// LF alone also ends a line. Applications that write it are not refused, and their heads are
    /// forwarded with CR LF.
    Lf,
}

impl LineEnds {
    /// Returns the length of the line end at `at`; `None` if there is none.
    #[inline]
    fn len_at(self, window: &[u8], at: usize) -> Option<usize> {
        match window.get(at..at + 2) {
            Some(b"\r\n") => Some(2),
            _ if self == Self::Lf && window.get(at) == Some(&b'\n') => Some(1),
            _ => None,
        }
    }
}

/// Fills `table`. Returns true if every line begins where the previous one ended, from `start` on,
/// and the empty line ends at `len`.
fn layout_of_fields(
    window: &[u8],
    (start, len): (usize, usize),
    fields: &[httparse::Header<'_>],
    ends: LineEnds,
    limits: &MessageLimits,
    table: &mut FieldTable,
) -> bool {
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
        // A line that does not begin where the previous one ended means that httparse skipped
        // bytes.
        let strict = name.as_ptr().addr() - base == at && end - at <= limits.field_bytes_max;
        let Some(line_end) = ends.len_at(window, end).filter(|_| strict) else {
            return false;
        };
        table.push(FieldLine {
            start: at as u32,
            value,
            name_len: name.len() as u16,
            name: FieldName::of(name),
        });
        table.has_bare_lf |= line_end == 1;
        at = end + line_end;
    }
    table.end = at as u32;
    ends.len_at(window, at)
        .is_some_and(|line_end| at + line_end == len)
}
