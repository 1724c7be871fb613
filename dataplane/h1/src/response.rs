//! Response heads: parsing, checks (RFC 9112 §4, §6.3), and a view of the parts over the caller's
//! buffer. Unlike requests, responses may end lines in LF alone and repeat equal lengths. It does
//! no IO and copies nothing. Start with [`ResponseHead::parse`].

use crate::field_table::{FieldTable, HeaderFields};
use crate::framing::{
    Framing, FramingFields, HarmlessFaults, HttpVersion, decide_facts, decide_keep_alive,
};
use crate::limits::MessageLimits;
use crate::name::FieldName;
use crate::refusal::MessageRefusal;
use crate::scan::{ScanProgress, StatusLine, scan_response};

/// Kind of the request, as far as the framing of its response depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RequestKind {
    #[default]
    Ordinary,
    Head,
    Connect,
    /// The request offered an upgrade, so 101 is allowed.
    Upgrade,
}

/// Offsets of one response head in the caller's read buffer. Reuse one value for all responses of a
/// connection.
#[derive(Debug, Clone, Default)]
pub struct ResponseHead {
    pub(crate) table: FieldTable,
    progress: ScanProgress,
    pub(crate) line: StatusLine,
    pub(crate) facts: FramingFields,
    framing: Framing,
    pub(crate) request_kind: RequestKind,
    len: usize,
}

impl ResponseHead {
    /// Creates a head that has parsed nothing yet.
    pub fn new() -> ResponseHead {
        ResponseHead::default()
    }

    /// Parses the head at the start of `buf`, with the results of [`crate::RequestHead::parse`].
    /// Interim responses (100, 103 …) are heads of their own with [`Framing::None`]: parse again
    /// after them with the same `request_kind`.
    ///
    /// # Errors
    /// Returns the first fault of the head, as [`crate::RequestHead::parse`] does.
    pub fn parse(
        &mut self,
        buf: &[u8],
        limits: &MessageLimits,
        request_kind: RequestKind,
    ) -> Result<Option<usize>, MessageRefusal> {
        let scanned = scan_response(buf, limits, &mut self.progress, &mut self.table);
        if !matches!(scanned, Ok(None)) {
            self.progress = ScanProgress::default();
        }
        let Some((len, line)) = scanned? else {
            return Ok(None);
        };
        self.len = len;
        self.line = line;
        self.request_kind = request_kind;
        self.facts = decide_facts(
            HeaderFields {
                table: &self.table,
                buf,
            },
            HarmlessFaults::Tolerated,
        )?;
        self.framing = decide_framing(
            line.status,
            HttpVersion::of_minor(line.minor),
            request_kind,
            &self.facts,
        )?;
        Ok(Some(len))
    }

    /// Returns a view of the parsed head. `buf` must begin with the bytes that were given to
    /// [`ResponseHead::parse`].
    #[inline]
    pub fn view<'a>(&'a self, buf: &'a [u8]) -> ResponseView<'a> {
        ResponseView { head: self, buf }
    }
}

/// Applies RFC 9112 §6.3 to responses. It refuses a message that two readers could frame
/// differently.
fn decide_framing(
    status: u16,
    version: HttpVersion,
    request_kind: RequestKind,
    facts: &FramingFields,
) -> Result<Framing, MessageRefusal> {
    match status {
        101 if request_kind != RequestKind::Upgrade => {
            return Err(MessageRefusal::UnexpectedUpgrade);
        }
        101 if facts.upgrade.is_none() => return Err(MessageRefusal::BadUpgrade),
        // RFC 9112 §6.3 rule 1: such a response ends with its head, whatever its fields say.
        100..=199 | 204 | 304 => return Ok(Framing::None),
        _ => {}
    }
    if facts.chunked && version == HttpVersion::Http10 {
        return Err(MessageRefusal::TransferEncodingInHttp10);
    }
    facts.check_single_framing()?;
    match status {
        // RFC 9110 §9.3.6: the framing fields of a 2xx response to CONNECT have no meaning.
        200..=299 if request_kind == RequestKind::Connect => return Ok(Framing::None),
        _ if request_kind == RequestKind::Head => return Ok(Framing::None),
        _ => {}
    }
    Ok(match (facts.chunked, facts.length) {
        (true, _) => Framing::Chunked,
        (false, Some(n)) => Framing::Length(n),
        (false, None) => Framing::UntilClose,
    })
}

/// Response head together with its bytes. A copy is cheap.
#[derive(Debug, Clone, Copy)]
pub struct ResponseView<'a> {
    pub(crate) head: &'a ResponseHead,
    pub(crate) buf: &'a [u8],
}

impl<'a> ResponseView<'a> {
    /// Returns the status, from 100 to 999.
    pub fn status(&self) -> u16 {
        self.head.line.status
    }

    /// Returns the reason phrase as sent; it is often empty.
    pub fn reason(&self) -> &'a [u8] {
        self.head.line.reason.of(self.buf)
    }

    /// Returns the version: HTTP/1.0 or HTTP/1.1.
    pub fn version(&self) -> HttpVersion {
        HttpVersion::of_minor(self.head.line.minor)
    }

    /// Returns true for a 1xx status other than 101: a final response follows.
    pub fn is_interim(&self) -> bool {
        matches!(self.status(), 100 | 102..=199)
    }

    /// Returns true for 101 and for a 2xx response to CONNECT: the bytes after the head are no
    /// longer HTTP.
    pub fn is_tunnel(&self) -> bool {
        self.status() == 101
            || (self.head.request_kind == RequestKind::Connect
                && matches!(self.status(), 200..=299))
    }

    /// Returns the fields of the head.
    #[inline]
    pub fn fields(&self) -> HeaderFields<'a> {
        HeaderFields {
            table: &self.head.table,
            buf: self.buf,
        }
    }

    /// Returns the first value of a known field.
    #[inline]
    pub fn get(&self, name: FieldName) -> Option<&'a [u8]> {
        self.fields().get(name)
    }

    /// Returns the framing of the body, for [`crate::BodyReader::new`].
    pub fn framing(&self) -> Framing {
        self.head.framing
    }

    /// Returns the Content-Length. For HEAD and 304 it describes a body that is not sent.
    pub fn content_length(&self) -> Option<u64> {
        self.head.facts.length
    }

    /// Returns true if the connection can carry another response after the body of this one.
    pub fn keep_alive(&self) -> bool {
        decide_keep_alive(self.version(), &self.head.facts)
            && self.head.framing != Framing::UntilClose
            && !self.is_tunnel()
            && !self.announces_forbidden_body()
    }

    /// Returns true if fields announce a body that the status forbids. The response ends with its
    /// head, but its sender may send that body anyway. So the connection must not carry the
    /// response to another request.
    pub fn announces_forbidden_body(&self) -> bool {
        let facts = &self.head.facts;
        match self.status() {
            100..=199 | 204 => facts.chunked || facts.length.is_some_and(|length| length > 0),
            304 => facts.chunked,
            _ => false,
        }
    }

    /// Returns the protocol to which a 101 response switches; `None` for any other status.
    pub fn upgrade(&self) -> Option<&'a [u8]> {
        self.head
            .facts
            .upgrade
            .filter(|_| self.status() == 101)
            .map(|span| span.of(self.buf))
    }

    /// Returns the length of the head in bytes, its empty line included.
    pub fn head_len(&self) -> usize {
        self.head.len
    }

    /// Iterates over the fields that a proxy passes to the next hop; see
    /// [`crate::RequestView::end_to_end`].
    pub fn end_to_end(&self) -> impl Iterator<Item = crate::HeaderField<'a>> + use<'a> {
        crate::hop::end_to_end(self.fields(), self.head.facts.nominates)
    }
}
