//! Request heads: parsing, strict checks (RFC 9112 §3, §6), and a view of the parts over the
//! caller's buffer. It does no IO and copies nothing. Start with [`RequestHead::parse`].

use crate::field_table::{FieldTable, HeaderFields, Span};
use crate::framing::{
    Framing, FramingFields, HarmlessFaults, HttpVersion, decide_facts, decide_keep_alive,
    is_http_upgrade,
};
use crate::limits::MessageLimits;
use crate::name::FieldName;
use crate::refusal::MessageRefusal;
use crate::scan::{RequestLine, ScanProgress, scan_request};
use crate::target::{TargetForm, TargetParts, decide_parts, same_authority, split_authority};

/// Offsets of one request head in the caller's read buffer. Reuse one value for all requests of a
/// connection; it then stops allocating.
#[derive(Debug, Clone, Default)]
pub struct RequestHead {
    pub(crate) table: FieldTable,
    progress: ScanProgress,
    pub(crate) line: RequestLine,
    pub(crate) parts: TargetParts,
    pub(crate) facts: FramingFields,
    framing: Framing,
    upgrade: Option<Span>,
    len: usize,
}

impl RequestHead {
    /// Creates a head that has parsed nothing yet.
    pub fn new() -> RequestHead {
        RequestHead::default()
    }

    /// Parses the head at the start of `buf`. `Ok(Some(len))` means that the head is complete and
    /// the body begins at `len`. `Ok(None)` means that more bytes are needed: call again with the
    /// longer buffer. After a complete head the next call starts with a new head, so one value
    /// serves all requests of a connection.
    ///
    /// # Errors
    /// Returns the first fault of the head. A refusal is final. It may be returned only when the
    /// head ends, but its reason does not depend on how the bytes arrived.
    pub fn parse(
        &mut self,
        buf: &[u8],
        limits: &MessageLimits,
    ) -> Result<Option<usize>, MessageRefusal> {
        let scanned = scan_request(buf, limits, &mut self.progress, &mut self.table);
        if !matches!(scanned, Ok(None)) {
            self.progress = ScanProgress::default();
        }
        let Some((len, line)) = scanned? else {
            return Ok(None);
        };
        self.len = len;
        self.line = line;
        self.settle(buf)?;
        Ok(Some(len))
    }

    /// Applies the rules that need the complete head.
    fn settle(&mut self, buf: &[u8]) -> Result<(), MessageRefusal> {
        let (method, target) = (self.line.method.of(buf), self.line.target.of(buf));
        let version = HttpVersion::of_minor(self.line.minor);
        self.parts = decide_parts(method, target)?;
        self.facts = decide_facts(
            HeaderFields {
                table: &self.table,
                buf,
            },
            HarmlessFaults::Refused,
        )?;
        self.facts.check_single_framing()?;
        decide_host(
            &self.parts,
            self.facts.host.map(|span| span.of(buf)),
            version,
            target,
        )?;
        self.framing = decide_framing(method, version, &self.facts)?;
        // Any other Upgrade field is ignored, which RFC 9110 §7.8 allows.
        let may_upgrade = version == HttpVersion::Http11 && self.facts.upgrade_option;
        self.upgrade = self
            .facts
            .upgrade
            .filter(|span| may_upgrade && !is_http_upgrade(span.of(buf)));
        Ok(())
    }

    /// Returns a view of the parsed head. `buf` must begin with the bytes that were given to
    /// [`RequestHead::parse`].
    #[inline]
    pub fn view<'a>(&'a self, buf: &'a [u8]) -> RequestView<'a> {
        RequestView { head: self, buf }
    }
}

fn decide_host(
    parts: &TargetParts,
    host: Option<&[u8]>,
    version: HttpVersion,
    target: &[u8],
) -> Result<(), MessageRefusal> {
    match host {
        None if version == HttpVersion::Http11 => return Err(MessageRefusal::MissingHost),
        None => return Ok(()),
        Some(host) if split_authority(host).is_none() => return Err(MessageRefusal::BadHost),
        Some(host) => match parts.authority {
            Some(authority) if !same_authority(host, authority.of(target), parts.default_port) => {
                return Err(MessageRefusal::HostMismatch);
            }
            _ => {}
        },
    }
    Ok(())
}

fn decide_framing(
    method: &[u8],
    version: HttpVersion,
    facts: &FramingFields,
) -> Result<Framing, MessageRefusal> {
    let framing = match (facts.chunked, facts.length) {
        (true, _) if version == HttpVersion::Http10 => {
            return Err(MessageRefusal::TransferEncodingInHttp10);
        }
        (true, _) => Framing::Chunked,
        (false, Some(n)) => Framing::Length(n),
        (false, None) => Framing::None,
    };
    let has_body = !matches!(framing, Framing::None | Framing::Length(0));
    if has_body && matches!(method, b"CONNECT" | b"TRACE") {
        Err(MessageRefusal::BodyForbidden)
    } else {
        Ok(framing)
    }
}

/// Request head together with its bytes. A copy is cheap.
#[derive(Debug, Clone, Copy)]
pub struct RequestView<'a> {
    pub(crate) head: &'a RequestHead,
    pub(crate) buf: &'a [u8],
}

impl<'a> RequestView<'a> {
    /// Returns the method in the case in which it was sent.
    pub fn method(&self) -> &'a [u8] {
        self.head.line.method.of(self.buf)
    }

    /// Returns the version: HTTP/1.0 or HTTP/1.1.
    pub fn version(&self) -> HttpVersion {
        HttpVersion::of_minor(self.head.line.minor)
    }

    /// Returns the request target as sent.
    pub fn target(&self) -> &'a [u8] {
        self.head.line.target.of(self.buf)
    }

    /// Returns the form of the request target.
    pub fn form(&self) -> TargetForm {
        self.head.parts.form
    }

    /// Returns the path as sent, without the query: `/` if the target has none, `*` for `OPTIONS
    /// *`, empty for CONNECT.
    pub fn path(&self) -> &'a [u8] {
        match (self.head.parts.form, self.head.parts.path.of(self.target())) {
            (TargetForm::Absolute, b"")
                if self.method() == b"OPTIONS" && self.head.parts.query.is_none() =>
            {
                b"*"
            }
            (TargetForm::Absolute, b"") => b"/",
            (_, path) => path,
        }
    }

    /// Returns the query without its `?`.
    pub fn query(&self) -> Option<&'a [u8]> {
        self.head.parts.query.map(|span| span.of(self.target()))
    }

    /// Returns the authority that the client requests: the target's, else the Host field's. It is a
    /// valid `host[:port]`, and empty only for HTTP/1.0 without either.
    pub fn authority(&self) -> &'a [u8] {
        match self.head.parts.authority {
            Some(span) => span.of(self.target()),
            None => self.head.facts.host.map_or(b"", |span| span.of(self.buf)),
        }
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

    /// Returns true if the client keeps the connection after the response.
    pub fn keep_alive(&self) -> bool {
        decide_keep_alive(self.version(), &self.head.facts)
    }

    /// Returns true if the client waits for `100 Continue` before it sends the body. It is false
    /// for HTTP/1.0 and without a body.
    pub fn expects_continue(&self) -> bool {
        let has_body = !matches!(self.head.framing, Framing::None | Framing::Length(0));
        self.head.facts.expects_continue && self.version() == HttpVersion::Http11 && has_body
    }

    /// Returns the protocols to which the client offers to switch, if the offer may be passed on:
    /// HTTP/1.1, `Connection: upgrade`, and no other HTTP version. Any other Upgrade field counts
    /// as absent (RFC 9110 §7.8 lets a server ignore it). The request may have a body, which
    /// precedes the bytes of the new protocol.
    pub fn upgrade(&self) -> Option<&'a [u8]> {
        self.head.upgrade.map(|span| span.of(self.buf))
    }

    /// Returns true if TE lists `trailers`.
    pub fn accepts_trailers(&self) -> bool {
        self.head.facts.te_trailers
    }

    /// Returns the length of the head in bytes, its empty line included.
    pub fn head_len(&self) -> usize {
        self.head.len
    }

    /// Iterates in order over the fields that a proxy passes to the next hop (RFC 9110 §7.6.1),
    /// Host and Content-Length included.
    pub fn end_to_end(&self) -> impl Iterator<Item = crate::HeaderField<'a>> + use<'a> {
        crate::hop::end_to_end(self.fields(), self.head.facts.nominates)
    }
}
