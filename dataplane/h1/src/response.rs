//! Response heads: parsing and strict checks (RFC 9112 §4, §6.3), and a view of the parts over the caller's buffer. No IO, no copies.

use crate::framing::{Facts, Framing, Version, decide_facts, decide_keep_alive};
use crate::limits::Limits;
use crate::name::Name;
use crate::refusal::Refusal;
use crate::scan::{Progress, StatusLine, look_at_response};
use crate::table::{Fields, Table};

/// What the request was, as far as the response's framing depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Asked {
    #[default]
    Ordinary,
    Head,
    Connect,
    /// An upgrade was offered: 101 is allowed.
    Upgrade,
}

/// The offsets of one response head in the caller's read buffer. Keep one per connection and reuse it.
#[derive(Debug, Clone, Default)]
pub struct ResponseHead {
    pub(crate) table: Table,
    progress: Progress,
    pub(crate) line: StatusLine,
    pub(crate) facts: Facts,
    framing: Framing,
    pub(crate) asked: Asked,
    len: usize,
}

impl ResponseHead {
    /// An empty table.
    pub fn new() -> ResponseHead {
        ResponseHead::default()
    }

    /// Parses the head at the start of `buf`; see [`crate::RequestHead::parse`]. Interim responses (100, 103 …) come as heads of
    /// their own with [`Framing::None`]; parse again after them with the same `asked`.
    pub fn parse(&mut self, buf: &[u8], limits: &Limits, asked: Asked) -> Result<Option<usize>, Refusal> {
        let looked = look_at_response(buf, limits, &mut self.progress, &mut self.table);
        if !matches!(looked, Ok(None)) {
            self.progress = Progress::default();
        }
        let Some((len, line)) = looked? else { return Ok(None) };
        self.len = len;
        self.line = line;
        self.asked = asked;
        self.facts = decide_facts(Fields { table: &self.table, buf })?;
        self.framing = decide_framing(line.status, Version::of_minor(line.minor), asked, &self.facts)?;
        Ok(Some(len))
    }

    /// The parsed head over the same bytes that were given to [`ResponseHead::parse`].
    #[inline]
    pub fn view<'a>(&'a self, buf: &'a [u8]) -> ResponseView<'a> {
        ResponseView { head: self, buf }
    }
}

/// RFC 9112 §6.3, the response part, with refusals where two readers could differ.
fn decide_framing(status: u16, version: Version, asked: Asked, facts: &Facts) -> Result<Framing, Refusal> {
    if facts.chunked && version == Version::Http10 {
        return Err(Refusal::TransferEncodingInHttp10);
    }
    match status {
        101 if asked != Asked::Upgrade => return Err(Refusal::UnexpectedUpgrade),
        101 if facts.upgrade.is_none() => return Err(Refusal::BadUpgrade),
        100..=199 | 204 if facts.chunked || facts.length.is_some_and(|n| n > 0) => return Err(Refusal::BodyForbidden),
        100..=199 | 204 | 304 => return Ok(Framing::None),
        // RFC 9110 §9.3.6: the fields of a 2xx answer to CONNECT mean nothing.
        200..=299 if asked == Asked::Connect => return Ok(Framing::None),
        _ if asked == Asked::Head => return Ok(Framing::None),
        _ => {}
    }
    Ok(match (facts.chunked, facts.length) {
        (true, _) => Framing::Chunked,
        (false, Some(n)) => Framing::Length(n),
        (false, None) => Framing::UntilClose,
    })
}

/// A response head with its bytes. Cheap to copy.
#[derive(Debug, Clone, Copy)]
pub struct ResponseView<'a> {
    pub(crate) head: &'a ResponseHead,
    pub(crate) buf: &'a [u8],
}

impl<'a> ResponseView<'a> {
    /// 100 to 999.
    pub fn status(&self) -> u16 {
        self.head.line.status
    }

    /// The reason phrase as sent, often empty.
    pub fn reason(&self) -> &'a [u8] {
        self.head.line.reason.of(self.buf)
    }

    /// HTTP/1.0 or 1.1.
    pub fn version(&self) -> Version {
        Version::of_minor(self.head.line.minor)
    }

    /// True for 1xx but 101: a final response follows.
    pub fn is_interim(&self) -> bool {
        matches!(self.status(), 100 | 102..=199)
    }

    /// True for 101 and for a 2xx answer to CONNECT: the bytes after the head are no longer HTTP.
    pub fn is_tunnel(&self) -> bool {
        self.status() == 101 || (self.head.asked == Asked::Connect && matches!(self.status(), 200..=299))
    }

    /// The fields.
    #[inline]
    pub fn fields(&self) -> Fields<'a> {
        Fields { table: &self.head.table, buf: self.buf }
    }

    /// The first value of a known field.
    #[inline]
    pub fn get(&self, name: Name) -> Option<&'a [u8]> {
        self.fields().get(name)
    }

    /// How the body is framed; give it to [`crate::BodyReader::new`].
    pub fn framing(&self) -> Framing {
        self.head.framing
    }

    /// The Content-Length, which for HEAD and 304 describes a body that is not sent.
    pub fn content_length(&self) -> Option<u64> {
        self.head.facts.length
    }

    /// True if the upstream will keep the connection after this response's body.
    pub fn keep_alive(&self) -> bool {
        decide_keep_alive(self.version(), &self.head.facts) && self.head.framing != Framing::UntilClose && !self.is_tunnel()
    }

    /// The protocol switched to; `Some` only in a 101.
    pub fn upgrade(&self) -> Option<&'a [u8]> {
        self.head.facts.upgrade.filter(|_| self.status() == 101).map(|span| span.of(self.buf))
    }

    /// Bytes of the head, its empty line included.
    pub fn head_len(&self) -> usize {
        self.head.len
    }

    /// The fields that concern the next hop too; see [`crate::RequestView::end_to_end`].
    pub fn end_to_end(&self) -> impl Iterator<Item = crate::Field<'a>> + use<'a> {
        crate::hop::end_to_end(self.fields(), self.head.facts.nominates)
    }
}
