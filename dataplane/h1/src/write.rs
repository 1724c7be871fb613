//! Writes heads for the next hop. Unchanged parts are spans of the read buffer; changed parts go to
//! a small arena. Every byte that comes from the caller is checked, so no reader can understand the
//! result in two ways. It does no IO; `rechunk` writes bodies. Start with [`OutHead`].

use std::io::IoSlice;

use bytes::BufMut;

use crate::bytes::{is_ows, is_token, is_value};
use crate::field_table::HeaderFields;
use crate::framing::{Framing, HttpVersion};
use crate::hop::is_nominated;
use crate::name::{FieldName, RESERVED};
use crate::refusal::MessageRefusal;
use crate::request::RequestView;
use crate::response::{RequestKind, ResponseView};
use crate::status::reason_of;
use crate::target::{TargetForm, decide_parts, split_authority};

/// One change to the fields of a forwarded head. Names may have any case. The codec itself writes
/// the fields that frame the message or manage the connection (Content-Length, Transfer-Encoding,
/// Connection, Upgrade, TE …) and refuses an edit of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderEdit<'a> {
    /// Replaces all values of the field by one.
    Set(&'a [u8], &'a [u8]),
    /// Adds a line and leaves existing ones. For list fields such as X-Forwarded-For this appends
    /// an element.
    Add(&'a [u8], &'a [u8]),
    /// Adds a line unless the field exists.
    Default(&'a [u8], &'a [u8]),
    /// Removes all values of the field.
    Remove(&'a [u8]),
}

/// Request to the next hop about keeping the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Persistence {
    /// No option is written; an HTTP/1.1 peer keeps the connection.
    #[default]
    Implied,
    /// Writes `connection: close`.
    Close,
    /// Writes `connection: keep-alive`, for HTTP/1.0 clients.
    KeepAlive,
}

/// Options for writing one head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ForwardOptions<'a> {
    pub edits: &'a [HeaderEdit<'a>],
    /// Framing of the body on the wire. The field that describes it is kept or written.
    pub framing: Framing,
    pub persistence: Persistence,
    /// Protocols to offer (request), or the protocol switched to (101 response).
    pub upgrade: Option<&'a [u8]>,
    /// Requests: whether to write `te: trailers`.
    pub accepts_trailers: bool,
    /// Requests: replaces the target. It must be in origin form or `*`.
    pub target: Option<&'a [u8]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WritePiece {
    Source(u32, u32),
    Arena(u32, u32),
}

/// Head that is ready to be sent: pieces of the read buffer and of its own arena. Reuse one value
/// per connection.
#[derive(Debug, Clone, Default)]
pub struct OutHead {
    pieces: Vec<WritePiece>,
    arena: Vec<u8>,
}

impl OutHead {
    /// Creates a head without a start line and fields.
    pub fn new() -> OutHead {
        OutHead::default()
    }

    /// Writes the head of `view` for the upstream, with the target in origin form and the version
    /// HTTP/1.1. An HTTP/1.0 request without Host needs an edit that sets one.
    ///
    /// # Errors
    /// Refuses an edit, target or upgrade that must not be written, and a request that would have
    /// no Host. The head is then unusable.
    pub fn request(
        &mut self,
        view: &RequestView<'_>,
        out: &ForwardOptions<'_>,
    ) -> Result<(), MessageRefusal> {
        self.clear();
        let fields = view.fields();
        let first_line = fields
            .table
            .lines
            .first()
            .map_or(fields.table.end, |line| line.start);
        // An unchanged request line is forwarded as a span, without a copy.
        let unchanged = out.target.is_none()
            && view.form() == TargetForm::Origin
            && view.version() == HttpVersion::Http11;
        if unchanged {
            self.source(view.head.line.method.start, first_line);
        } else if view.form() == TargetForm::Authority {
            // Only CONNECT has a target in authority form, and it has no path to rewrite.
            self.request_line(view.method(), view.target(), None)?;
        } else {
            match out.target {
                Some(target) => self.request_line(view.method(), target, None)?,
                None => self.request_line(view.method(), view.path(), view.query())?,
            }
        }
        // A message whose framing does not change keeps its Content-Length line.
        let retained_length = if out.framing == view.framing() {
            FieldName::ContentLength.bit()
        } else {
            0
        };
        // An expectation that must be ignored (HTTP/1.0, no body) must not reach an upstream that
        // would honor it.
        let expect = if view.expects_continue() {
            0
        } else {
            FieldName::Expect.bit()
        };
        let drop = RESERVED & !retained_length | expect;
        // HTTP/1.0 in absolute form may omit Host; the target then contains the host.
        let implied_host = Some(view.authority())
            .filter(|authority| !fields.has(FieldName::Host) && !authority.is_empty());
        self.lines(
            fields,
            drop,
            view.head.facts.nominates,
            out.edits,
            implied_host.is_some(),
        )?;
        // An edit that sets Host writes the line itself.
        let is_replaced = out
            .edits
            .iter()
            .any(|edit| matches!(edit, HeaderEdit::Set(name, _) if is_host(name)));
        match implied_host {
            Some(authority) if !is_replaced => self.line(b"host", authority),
            _ if removes_host(out.edits)
                || !(fields.has(FieldName::Host) || sets_host(out.edits)) =>
            {
                return Err(MessageRefusal::MissingHost);
            }
            _ => {}
        }
        self.finish(
            out,
            retained_length != 0 && fields.has(FieldName::ContentLength),
        )
    }

    /// Writes the head of `view` for the client. Content-Length is kept where it describes a body
    /// that is not sent (HEAD, 304); otherwise it follows `out.framing`.
    ///
    /// # Errors
    /// Refuses an edit or upgrade that must not be written. The head is then unusable.
    pub fn response(
        &mut self,
        view: &ResponseView<'_>,
        out: &ForwardOptions<'_>,
    ) -> Result<(), MessageRefusal> {
        self.clear();
        let fields = view.fields();
        let first_line = fields
            .table
            .lines
            .first()
            .map_or(fields.table.end, |line| line.start);
        if view.version() == HttpVersion::Http11 && !fields.table.has_bare_lf {
            self.source(view.head.line.start, first_line);
        } else {
            self.status_line(view.status(), view.reason())?;
        }
        let describes = out.framing == Framing::None
            && (view.status() == 304 || view.head.request_kind == RequestKind::Head)
            // RFC 9110 §8.6: these have no length, not even as responses to HEAD.
            && !matches!(view.status(), 100..=199 | 204);
        let states = describes
            || matches!(out.framing, Framing::Length(n) if view.content_length() == Some(n));
        // Equal lengths that were repeated are written once instead of being kept.
        let retained_length = states && !view.head.facts.folds_length;
        let drop = if retained_length {
            RESERVED & !FieldName::ContentLength.bit()
        } else {
            RESERVED
        };
        self.lines(fields, drop, view.head.facts.nominates, out.edits, false)?;
        if let Some(n) = view.content_length()
            && describes
            && !retained_length
        {
            self.line(b"content-length", itoa::Buffer::new().format(n).as_bytes());
        }
        self.finish(out, retained_length)
    }

    /// Writes a request head from parts, such as those of an HTTP/2 request. Pairs that end at this
    /// hop, `host` and `content-length` are skipped, because `authority` and the framing provide
    /// them. Several `cookie` pairs become one (RFC 9113 §8.2.3).
    ///
    /// # Errors
    /// Refuses a method, target, authority, pair, edit or upgrade that must not be written. The
    /// head is then unusable.
    pub fn encode_request<'p>(
        &mut self,
        method: &[u8],
        authority: &[u8],
        pairs: impl IntoIterator<Item = (&'p [u8], &'p [u8]), IntoIter: Clone>,
        out: &ForwardOptions<'_>,
    ) -> Result<(), MessageRefusal> {
        self.clear();
        let pairs = pairs.into_iter();
        let plan = EditPlan::of(out.edits)?;
        self.request_line(method, out.target.unwrap_or(b"/"), None)?;
        if split_authority(authority).is_none() {
            return Err(MessageRefusal::BadHost);
        }
        if !sets_host(out.edits) {
            self.line(b"host", authority);
        }
        self.pairs(
            pairs.clone(),
            RESERVED | plan.drop | FieldName::Host.bit() | FieldName::Cookie.bit(),
            &plan,
            out.edits,
        )?;
        if plan.drop & FieldName::Cookie.bit() == 0 {
            self.cookies(
                pairs
                    .filter(|(name, _)| FieldName::of(name) == FieldName::Cookie)
                    .map(|(_, value)| value),
            )?;
        }
        self.finish(out, false)
    }

    /// Writes a response head from parts: an HTTP/2 response, or a local reply. Pairs that end at
    /// this hop and `content-length` are skipped. With [`Framing::None`] a `content-length` pair
    /// stays if `describes_length` (HEAD, 304).
    ///
    /// # Errors
    /// Refuses a status outside 100 to 999, and a pair, edit or upgrade that must not be written.
    /// The head is then unusable.
    pub fn encode_response<'p>(
        &mut self,
        status: u16,
        describes_length: bool,
        pairs: impl IntoIterator<Item = (&'p [u8], &'p [u8]), IntoIter: Clone>,
        out: &ForwardOptions<'_>,
    ) -> Result<(), MessageRefusal> {
        self.clear();
        self.status_line(status, reason_of(status).as_bytes())?;
        let retained = if describes_length && out.framing == Framing::None {
            FieldName::ContentLength.bit()
        } else {
            0
        };
        let plan = EditPlan::of(out.edits)?;
        self.pairs(
            pairs.into_iter(),
            RESERVED & !retained | plan.drop,
            &plan,
            out.edits,
        )?;
        self.finish(out, retained != 0)
    }

    /// Iterates over the bytes in order. `source` is the buffer of the view that was written; after
    /// an encode it is ignored.
    pub fn slices<'a>(&'a self, source: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        self.pieces.iter().map(move |piece| match *piece {
            WritePiece::Source(start, end) => &source[start as usize..end as usize],
            WritePiece::Arena(start, end) => &self.arena[start as usize..end as usize],
        })
    }

    /// Appends the pieces to a vectored write.
    pub fn io_slices<'a>(&'a self, source: &'a [u8], into: &mut Vec<IoSlice<'a>>) {
        into.extend(self.slices(source).map(IoSlice::new));
    }

    /// Copies the head. For a small head one copy is cheaper than many vectors.
    pub fn write_to(&self, source: &[u8], into: &mut impl BufMut) {
        for slice in self.slices(source) {
            into.put_slice(slice);
        }
    }

    /// Returns the length of the head in bytes.
    pub fn byte_len(&self) -> usize {
        self.pieces
            .iter()
            .map(|piece| match *piece {
                WritePiece::Source(s, e) | WritePiece::Arena(s, e) => (e - s) as usize,
            })
            .sum()
    }

    /// Returns the number of pieces.
    pub fn piece_count(&self) -> usize {
        self.pieces.len()
    }

    fn clear(&mut self) {
        self.pieces.clear();
        self.arena.clear();
    }

    fn source(&mut self, start: u32, end: u32) {
        match self.pieces.last_mut() {
            Some(WritePiece::Source(_, last)) if *last == start => *last = end,
            _ => self.pieces.push(WritePiece::Source(start, end)),
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        let start = self.arena.len() as u32;
        self.arena.extend_from_slice(bytes);
        self.note_arena(start);
    }

    /// Notes that the arena's bytes from `start` on are the next ones of the head.
    fn note_arena(&mut self, start: u32) {
        let end = self.arena.len() as u32;
        match self.pieces.last_mut() {
            Some(WritePiece::Arena(_, last)) if *last == start => *last = end,
            _ => self.pieces.push(WritePiece::Arena(start, end)),
        }
    }

    fn line(&mut self, name: &[u8], value: &[u8]) {
        let start = self.arena.len() as u32;
        // One reservation for the four parts: this runs for each field that the gateway adds.
        self.arena.reserve(name.len() + value.len() + 4);
        self.arena.extend_from_slice(name);
        self.arena.extend_from_slice(b": ");
        self.arena.extend_from_slice(value);
        self.arena.extend_from_slice(b"\r\n");
        self.note_arena(start);
    }

    fn request_line(
        &mut self,
        method: &[u8],
        target: &[u8],
        query: Option<&[u8]>,
    ) -> Result<(), MessageRefusal> {
        let is_sound = is_token(method)
            && decide_parts(method, target).is_ok_and(|parts| parts.form != TargetForm::Absolute);
        if !is_sound {
            return Err(MessageRefusal::UnwritableLine);
        }
        self.put(method);
        self.put(b" ");
        self.put(target);
        if let Some(query) = query {
            self.put(b"?");
            self.put(query);
        }
        self.put(b" HTTP/1.1\r\n");
        Ok(())
    }

    fn status_line(&mut self, status: u16, reason: &[u8]) -> Result<(), MessageRefusal> {
        if !(100..=999).contains(&status) || !is_value(reason) {
            return Err(MessageRefusal::UnwritableLine);
        }
        self.put(b"HTTP/1.1 ");
        self.put(itoa::Buffer::new().format(status).as_bytes());
        self.put(b" ");
        self.put(reason);
        self.put(b"\r\n");
        Ok(())
    }

    /// Writes the lines of `fields` that stay, as spans where possible, then the lines of the
    /// edits.
    fn lines(
        &mut self,
        fields: HeaderFields<'_>,
        drop: u64,
        nominates: bool,
        edits: &[HeaderEdit<'_>],
        implies_host: bool,
    ) -> Result<(), MessageRefusal> {
        let plan = EditPlan::of(edits)?;
        let drop = drop | plan.drop;
        for (i, line) in fields.table.lines.iter().enumerate() {
            let dropped = drop & line.name.bit() != 0
                || (plan.drops_unknown
                    && line.name == FieldName::Other
                    && plan.drops(fields.name(line), edits))
                || (nominates && is_nominated(fields, fields.name(line)));
            if !dropped && !fields.table.has_bare_lf {
                self.source(line.start, fields.table.line_end(i));
            } else if !dropped {
                self.line(fields.name(line), line.value.of(fields.buf));
            }
        }
        self.edit_lines(edits, |name| {
            fields.named(name).next().is_some() || (implies_host && is_host(name))
        });
        Ok(())
    }

    fn edit_lines(&mut self, edits: &[HeaderEdit<'_>], is_present: impl Fn(&[u8]) -> bool) {
        for edit in edits {
            match *edit {
                HeaderEdit::Set(name, value) | HeaderEdit::Add(name, value) => {
                    self.line(name, value)
                }
                HeaderEdit::Default(name, value) if !is_present(name) => self.line(name, value),
                HeaderEdit::Default(..) | HeaderEdit::Remove(_) => {}
            }
        }
    }

    fn pairs<'p>(
        &mut self,
        pairs: impl Iterator<Item = (&'p [u8], &'p [u8])> + Clone,
        skip: u64,
        plan: &EditPlan,
        edits: &[HeaderEdit<'_>],
    ) -> Result<(), MessageRefusal> {
        for (name, value) in pairs.clone() {
            let id = FieldName::of(name);
            if skip & id.bit() != 0
                || (plan.drops_unknown && id == FieldName::Other && plan.drops(name, edits))
            {
                continue;
            }
            check_field(name, value)?;
            self.line(name, value);
        }
        self.edit_lines(edits, |wanted| {
            pairs
                .clone()
                .any(|(name, _)| name.eq_ignore_ascii_case(wanted))
        });
        Ok(())
    }

    fn cookies<'p>(
        &mut self,
        crumbs: impl Iterator<Item = &'p [u8]>,
    ) -> Result<(), MessageRefusal> {
        let mut separator = &b"cookie: "[..];
        for crumb in crumbs {
            check_field(b"cookie", crumb)?;
            self.put(separator);
            self.put(crumb);
            separator = b"; ";
        }
        if separator == b"; " {
            self.put(b"\r\n");
        }
        Ok(())
    }

    /// Writes the fields that belong to the codec, then the empty line.
    fn finish(&mut self, out: &ForwardOptions<'_>, has_length: bool) -> Result<(), MessageRefusal> {
        match out.framing {
            Framing::Length(n) if !has_length => {
                self.line(b"content-length", itoa::Buffer::new().format(n).as_bytes())
            }
            Framing::Chunked => self.put(b"transfer-encoding: chunked\r\n"),
            _ => {}
        }
        if let Some(protocols) = out.upgrade {
            if protocols.is_empty() || !is_value(protocols) {
                return Err(MessageRefusal::UnwritableField);
            }
            self.line(b"upgrade", protocols);
        }
        if out.accepts_trailers {
            self.put(b"te: trailers\r\n");
        }
        let options = [
            (out.upgrade.is_some(), &b"upgrade"[..]),
            (out.accepts_trailers, b"te"),
            (
                out.persistence == Persistence::Close || out.framing == Framing::UntilClose,
                b"close",
            ),
            (out.persistence == Persistence::KeepAlive, b"keep-alive"),
        ];
        let mut separator = &b"connection: "[..];
        for (_, option) in options.iter().filter(|(wanted, _)| *wanted) {
            self.put(separator);
            self.put(option);
            separator = b", ";
        }
        self.put(if separator == b", " {
            b"\r\n\r\n"
        } else {
            b"\r\n"
        });
        Ok(())
    }
}

/// Checked edits, with a mask of the known names that they drop.
struct EditPlan {
    drop: u64,
    drops_unknown: bool,
}

impl EditPlan {
    fn of(edits: &[HeaderEdit<'_>]) -> Result<EditPlan, MessageRefusal> {
        let mut plan = EditPlan {
            drop: 0,
            drops_unknown: false,
        };
        let mut hosts = 0;
        for edit in edits {
            let (name, value, drops) = match *edit {
                HeaderEdit::Set(name, value) => (name, value, true),
                HeaderEdit::Add(name, value) | HeaderEdit::Default(name, value) => {
                    (name, value, false)
                }
                HeaderEdit::Remove(name) => (name, &b""[..], true),
            };
            check_value(value)?;
            match FieldName::of(name) {
                FieldName::Host => {
                    // There must never be two Host lines, nor one that the next hop would refuse.
                    hosts += 1;
                    let is_sound = match edit {
                        HeaderEdit::Add(..) => false,
                        HeaderEdit::Remove(_) => true,
                        HeaderEdit::Set(..) | HeaderEdit::Default(..) => {
                            split_authority(value).is_some()
                        }
                    };
                    if !is_sound || hosts > 1 {
                        return Err(MessageRefusal::UnwritableField);
                    }
                    plan.drop |= if drops { FieldName::Host.bit() } else { 0 };
                }
                // The known names are tokens, so only other names need the check.
                FieldName::Other if !is_token(name) => {
                    return Err(MessageRefusal::UnwritableField);
                }
                FieldName::Other => plan.drops_unknown |= drops,
                // The codec writes the framing itself, and an edit could contradict it.
                id if id.bit() & RESERVED != 0 => return Err(MessageRefusal::UnwritableField),
                id => plan.drop |= if drops { id.bit() } else { 0 },
            }
        }
        Ok(plan)
    }

    fn drops(&self, name: &[u8], edits: &[HeaderEdit<'_>]) -> bool {
        edits.iter().any(|edit| matches!(edit, HeaderEdit::Set(n, _) | HeaderEdit::Remove(n) if n.eq_ignore_ascii_case(name)))
    }
}

fn check_field(name: &[u8], value: &[u8]) -> Result<(), MessageRefusal> {
    if !is_token(name) {
        return Err(MessageRefusal::UnwritableField);
    }
    check_value(value)
}

fn check_value(value: &[u8]) -> Result<(), MessageRefusal> {
    let padded =
        value.first().is_some_and(|&b| is_ows(b)) || value.last().is_some_and(|&b| is_ows(b));
    if is_value(value) && !padded {
        Ok(())
    } else {
        Err(MessageRefusal::UnwritableField)
    }
}

fn is_host(name: &[u8]) -> bool {
    FieldName::of(name) == FieldName::Host
}

fn sets_host(edits: &[HeaderEdit<'_>]) -> bool {
    edits.iter().any(|edit| matches!(edit, HeaderEdit::Set(n, _) | HeaderEdit::Add(n, _) | HeaderEdit::Default(n, _) if is_host(n)))
}

fn removes_host(edits: &[HeaderEdit<'_>]) -> bool {
    edits
        .iter()
        .any(|edit| matches!(edit, HeaderEdit::Remove(n) if is_host(n)))
}
