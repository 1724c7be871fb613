//! Request heads: parsing and strict checks (RFC 9112 §3, §6), and a view of the parts over the caller's buffer. No IO, no copies.

use crate::framing::{Facts, Framing, Version, decide_facts, decide_keep_alive, is_http_upgrade};
use crate::limits::Limits;
use crate::name::Name;
use crate::refusal::Refusal;
use crate::scan::{Progress, RequestLine, look_at_request};
use crate::table::{Fields, Span, Table};
use crate::target::{Parts, TargetForm, decide_parts, same_authority, split_authority};

/// The offsets of one request head in the caller's read buffer. Keep one per connection and reuse it: it then never allocates.
#[derive(Debug, Clone, Default)]
pub struct RequestHead {
    pub(crate) table: Table,
    progress: Progress,
    pub(crate) line: RequestLine,
    pub(crate) parts: Parts,
    pub(crate) facts: Facts,
    framing: Framing,
    upgrade: Option<Span>,
    len: usize,
}

impl RequestHead {
    /// An empty table.
    pub fn new() -> RequestHead {
        RequestHead::default()
    }

    /// Parses the head at the start of `buf`. `Ok(Some(len))`: whole, the body begins at `len`. `Ok(None)`: read more, then call
    /// again with the longer buffer. A refusal is final; it may come late (when the head ends) but never differs for it.
    ///
    /// After a whole head the next call starts afresh, so one value serves all requests of a connection.
    pub fn parse(&mut self, buf: &[u8], limits: &Limits) -> Result<Option<usize>, Refusal> {
        let looked = look_at_request(buf, limits, &mut self.progress, &mut self.table);
        if !matches!(looked, Ok(None)) {
            self.progress = Progress::default();
        }
        let Some((len, line)) = looked? else { return Ok(None) };
        self.len = len;
        self.line = line;
        self.settle(buf)?;
        Ok(Some(len))
    }

    /// The rules that need the whole head.
    fn settle(&mut self, buf: &[u8]) -> Result<(), Refusal> {
        let (method, target) = (self.line.method.of(buf), self.line.target.of(buf));
        let version = Version::of_minor(self.line.minor);
        self.parts = decide_parts(method, target)?;
        self.facts = decide_facts(Fields { table: &self.table, buf })?;
        decide_host(&self.parts, self.facts.host.map(|span| span.of(buf)), version, target)?;
        self.framing = decide_framing(method, version, &self.facts)?;
        self.upgrade = self.facts.upgrade.filter(|span| {
            version == Version::Http11
                && self.facts.upgrade_option
                && matches!(self.framing, Framing::None | Framing::Length(0))
                && !is_http_upgrade(span.of(buf))
        });
        Ok(())
    }

    /// The parsed head over the same bytes that were given to [`RequestHead::parse`].
    #[inline]
    pub fn view<'a>(&'a self, buf: &'a [u8]) -> RequestView<'a> {
        RequestView { head: self, buf }
    }
}

fn decide_host(parts: &Parts, host: Option<&[u8]>, version: Version, target: &[u8]) -> Result<(), Refusal> {
    match host {
        None if version == Version::Http11 => return Err(Refusal::MissingHost),
        None => return Ok(()),
        Some(host) if split_authority(host).is_none() => return Err(Refusal::BadHost),
        Some(host) => match parts.authority {
            Some(authority) if !same_authority(host, authority.of(target), parts.default_port) => {
                return Err(Refusal::HostMismatch);
            }
            _ => {}
        },
    }
    Ok(())
}

fn decide_framing(method: &[u8], version: Version, facts: &Facts) -> Result<Framing, Refusal> {
    let framing = match (facts.chunked, facts.length) {
        (true, _) if version == Version::Http10 => return Err(Refusal::TransferEncodingInHttp10),
        (true, _) => Framing::Chunked,
        (false, Some(n)) => Framing::Length(n),
        (false, None) => Framing::None,
    };
    let has_body = !matches!(framing, Framing::None | Framing::Length(0));
    if has_body && matches!(method, b"CONNECT" | b"TRACE") { Err(Refusal::BodyForbidden) } else { Ok(framing) }
}

/// A request head with its bytes. Cheap to copy.
#[derive(Debug, Clone, Copy)]
pub struct RequestView<'a> {
    pub(crate) head: &'a RequestHead,
    pub(crate) buf: &'a [u8],
}

impl<'a> RequestView<'a> {
    /// The method, case kept.
    pub fn method(&self) -> &'a [u8] {
        self.head.line.method.of(self.buf)
    }

    /// HTTP/1.0 or 1.1.
    pub fn version(&self) -> Version {
        Version::of_minor(self.head.line.minor)
    }

    /// The target as sent.
    pub fn target(&self) -> &'a [u8] {
        self.head.line.target.of(self.buf)
    }

    /// The target's form.
    pub fn form(&self) -> TargetForm {
        self.head.parts.form
    }

    /// The path without query, as sent: `/` if the target had none, `*` for `OPTIONS *`, empty for CONNECT.
    pub fn path(&self) -> &'a [u8] {
        match (self.head.parts.form, self.head.parts.path.of(self.target())) {
            (TargetForm::Absolute, b"") if self.method() == b"OPTIONS" && self.head.parts.query.is_none() => b"*",
            (TargetForm::Absolute, b"") => b"/",
            (_, path) => path,
        }
    }

    /// The query without its `?`.
    pub fn query(&self) -> Option<&'a [u8]> {
        self.head.parts.query.map(|span| span.of(self.target()))
    }

    /// The authority asked for: the target's, else the Host field; empty only for HTTP/1.0 without either. Valid `host[:port]`.
    pub fn authority(&self) -> &'a [u8] {
        match self.head.parts.authority {
            Some(span) => span.of(self.target()),
            None => self.head.facts.host.map_or(b"", |span| span.of(self.buf)),
        }
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

    /// True if the client will keep the connection after the response.
    pub fn keep_alive(&self) -> bool {
        decide_keep_alive(self.version(), &self.head.facts)
    }

    /// True if the client waits for `100 Continue` before it sends the body. Never for HTTP/1.0 or without a body.
    pub fn expects_continue(&self) -> bool {
        let has_body = !matches!(self.head.framing, Framing::None | Framing::Length(0));
        self.head.facts.expects_continue && self.version() == Version::Http11 && has_body
    }

    /// The protocols the client offers to switch to, if the offer may be passed on: HTTP/1.1, `Connection: upgrade`, no body, and
    /// not to another HTTP version. Any other Upgrade field counts as absent (RFC 9110 §7.8 lets a server ignore it).
    pub fn upgrade(&self) -> Option<&'a [u8]> {
        self.head.upgrade.map(|span| span.of(self.buf))
    }

    /// True if TE lists `trailers`.
    pub fn accepts_trailers(&self) -> bool {
        self.head.facts.te_trailers
    }

    /// Bytes of the head, its empty line included.
    pub fn head_len(&self) -> usize {
        self.head.len
    }

    /// The fields that concern the next hop too: those a proxy passes on, in order (RFC 9110 §7.6.1), Host and Content-Length included.
    pub fn end_to_end(&self) -> impl Iterator<Item = crate::Field<'a>> + use<'a> {
        crate::hop::end_to_end(self.fields(), self.head.facts.nominates)
    }
}
