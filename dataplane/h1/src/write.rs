//! Writing heads for the next hop: spans of the read buffer where nothing changed, a small arena for what did; and chunk framing.
//! Every byte that comes from the caller is checked, so nothing written can be read in two ways. No IO.

use std::io::IoSlice;

use bytes::BufMut;

use crate::bytes::{is_ows, is_token, is_value};
use crate::framing::{Framing, Version};
use crate::hop::is_nominated;
use crate::name::{Name, RESERVED};
use crate::refusal::Refusal;
use crate::request::RequestView;
use crate::response::{Asked, ResponseView};
use crate::status::reason_of;
use crate::table::Fields;
use crate::target::{TargetForm, decide_parts, split_authority};

/// One change to the fields of a forwarded head. Names may have any case. Fields that frame the message or manage the connection
/// (Content-Length, Transfer-Encoding, Connection, Upgrade, TE …) are the codec's: an edit of them is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edit<'a> {
    /// Replaces all values by one.
    Set(&'a [u8], &'a [u8]),
    /// Adds a line; existing ones stay. For list fields such as X-Forwarded-For this appends.
    Add(&'a [u8], &'a [u8]),
    /// Adds a line unless the field is there.
    Default(&'a [u8], &'a [u8]),
    /// Removes all values.
    Remove(&'a [u8]),
}

/// What the next hop shall do with the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Persistence {
    /// Nothing is said: HTTP/1.1 keeps the connection.
    #[default]
    Implied,
    /// `connection: close`.
    Close,
    /// `connection: keep-alive`, for HTTP/1.0 clients.
    KeepAlive,
}

/// How a head goes out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outgoing<'a> {
    pub edits: &'a [Edit<'a>],
    /// How the body will be framed on the wire; the matching field is kept or written.
    pub framing: Framing,
    pub persistence: Persistence,
    /// Protocols to offer (request) or the one switched to (101).
    pub upgrade: Option<&'a [u8]>,
    /// Requests: write `te: trailers`.
    pub accepts_trailers: bool,
    /// Requests: replaces the target; origin form (or `*`).
    pub target: Option<&'a [u8]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece {
    Source(u32, u32),
    Arena(u32, u32),
}

/// A head ready to be sent: pieces of the read buffer and of its own arena. Reuse one per connection.
#[derive(Debug, Clone, Default)]
pub struct OutHead {
    pieces: Vec<Piece>,
    arena: Vec<u8>,
}

impl OutHead {
    /// Empty.
    pub fn new() -> OutHead {
        OutHead::default()
    }

    /// The head of `view` as it goes to the upstream. `Err` leaves the head unusable.
    ///
    /// The target goes out in origin form and the version as HTTP/1.1. An HTTP/1.0 request without Host needs an edit that sets one.
    pub fn request(&mut self, view: &RequestView<'_>, out: &Outgoing<'_>) -> Result<(), Refusal> {
        self.clear();
        let fields = view.fields();
        let first_line = fields.table.lines.first().map_or(fields.table.end, |line| line.start);
        let unchanged = out.target.is_none() && view.form() == TargetForm::Origin && view.version() == Version::Http11;
        if unchanged {
            self.source(view.head.line.method.start, first_line);
        } else if view.form() == TargetForm::Authority {
            self.request_line(view.method(), view.target(), None)?;
        } else {
            match out.target {
                Some(target) => self.request_line(view.method(), target, None)?,
                None => self.request_line(view.method(), view.path(), view.query())?,
            }
        }
        let kept_length = if out.framing == view.framing() { Name::ContentLength.bit() } else { 0 };
        // An expectation that must be ignored (HTTP/1.0, no body) must not reach an upstream that would honour it.
        let expect = if view.expects_continue() { 0 } else { Name::Expect.bit() };
        let drop = RESERVED & !kept_length | expect;
        // HTTP/1.0 in absolute form may leave Host out; the target then says it.
        let implied_host = Some(view.authority()).filter(|authority| !fields.has(Name::Host) && !authority.is_empty());
        self.lines(fields, drop, view.head.facts.nominates, out.edits, implied_host.is_some())?;
        let is_replaced = out.edits.iter().any(|edit| matches!(edit, Edit::Set(name, _) if is_host(name)));
        match implied_host {
            Some(authority) if !is_replaced => self.line(b"host", authority),
            _ if removes_host(out.edits) || !(fields.has(Name::Host) || sets_host(out.edits)) => return Err(Refusal::MissingHost),
            _ => {}
        }
        self.finish(out, kept_length != 0 && fields.has(Name::ContentLength))
    }

    /// The head of `view` as it goes to the client.
    ///
    /// Content-Length is kept where it describes a body that is not sent (HEAD, 304), else it follows `out.framing`.
    pub fn response(&mut self, view: &ResponseView<'_>, out: &Outgoing<'_>) -> Result<(), Refusal> {
        self.clear();
        let fields = view.fields();
        let first_line = fields.table.lines.first().map_or(fields.table.end, |line| line.start);
        if view.version() == Version::Http11 {
            self.source(view.head.line.start, first_line);
        } else {
            self.status_line(view.status(), view.reason())?;
        }
        let describes = out.framing == Framing::None && (view.status() == 304 || view.head.asked == Asked::Head);
        let kept_length = describes || matches!(out.framing, Framing::Length(n) if view.content_length() == Some(n));
        let drop = if kept_length { RESERVED & !Name::ContentLength.bit() } else { RESERVED };
        self.lines(fields, drop, view.head.facts.nominates, out.edits, false)?;
        self.finish(out, kept_length)
    }

    /// A request head from parts, e.g. from an HTTP/2 request. Pairs that end at this hop, `host` and `content-length` are skipped
    /// (authority and framing say them); several `cookie` pairs become one (RFC 9113 §8.2.3).
    pub fn encode_request<'p>(
        &mut self,
        method: &[u8],
        authority: &[u8],
        pairs: impl IntoIterator<Item = (&'p [u8], &'p [u8]), IntoIter: Clone>,
        out: &Outgoing<'_>,
    ) -> Result<(), Refusal> {
        self.clear();
        let pairs = pairs.into_iter();
        let plan = Plan::of(out.edits)?;
        self.request_line(method, out.target.unwrap_or(b"/"), None)?;
        if split_authority(authority).is_none() {
            return Err(Refusal::BadHost);
        }
        if !sets_host(out.edits) {
            self.line(b"host", authority);
        }
        self.pairs(pairs.clone(), RESERVED | plan.drop | Name::Host.bit() | Name::Cookie.bit(), &plan, out.edits)?;
        if plan.drop & Name::Cookie.bit() == 0 {
            self.cookies(pairs.filter(|(name, _)| Name::of(name) == Name::Cookie).map(|(_, value)| value))?;
        }
        self.finish(out, false)
    }

    /// A response head from parts: an HTTP/2 response, or the gateway's own answer. Pairs that end at this hop and
    /// `content-length` are skipped; with [`Framing::None`] a `content-length` pair stays if `describes_length` (HEAD, 304).
    pub fn encode_response<'p>(
        &mut self,
        status: u16,
        describes_length: bool,
        pairs: impl IntoIterator<Item = (&'p [u8], &'p [u8]), IntoIter: Clone>,
        out: &Outgoing<'_>,
    ) -> Result<(), Refusal> {
        self.clear();
        self.status_line(status, reason_of(status).as_bytes())?;
        let kept = if describes_length && out.framing == Framing::None { Name::ContentLength.bit() } else { 0 };
        let plan = Plan::of(out.edits)?;
        self.pairs(pairs.into_iter(), RESERVED & !kept | plan.drop, &plan, out.edits)?;
        self.finish(out, kept != 0)
    }

    /// The bytes in order. `source` is the buffer of the view that was written; ignored after an encode.
    pub fn slices<'a>(&'a self, source: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        self.pieces.iter().map(move |piece| match *piece {
            Piece::Source(start, end) => &source[start as usize..end as usize],
            Piece::Arena(start, end) => &self.arena[start as usize..end as usize],
        })
    }

    /// Appends the pieces to a vectored write.
    pub fn io_slices<'a>(&'a self, source: &'a [u8], into: &mut Vec<IoSlice<'a>>) {
        into.extend(self.slices(source).map(IoSlice::new));
    }

    /// Copies the head: for a small head one copy is cheaper than many vectors.
    pub fn write_to(&self, source: &[u8], into: &mut impl BufMut) {
        for slice in self.slices(source) {
            into.put_slice(slice);
        }
    }

    /// Bytes in all.
    pub fn byte_len(&self) -> usize {
        self.pieces
            .iter()
            .map(|piece| match *piece {
                Piece::Source(s, e) | Piece::Arena(s, e) => (e - s) as usize,
            })
            .sum()
    }

    /// How many pieces.
    pub fn piece_count(&self) -> usize {
        self.pieces.len()
    }

    fn clear(&mut self) {
        self.pieces.clear();
        self.arena.clear();
    }

    fn source(&mut self, start: u32, end: u32) {
        match self.pieces.last_mut() {
            Some(Piece::Source(_, last)) if *last == start => *last = end,
            _ => self.pieces.push(Piece::Source(start, end)),
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        let start = self.arena.len() as u32;
        self.arena.extend_from_slice(bytes);
        let end = self.arena.len() as u32;
        match self.pieces.last_mut() {
            Some(Piece::Arena(_, last)) if *last == start => *last = end,
            _ => self.pieces.push(Piece::Arena(start, end)),
        }
    }

    fn line(&mut self, name: &[u8], value: &[u8]) {
        self.put(name);
        self.put(b": ");
        self.put(value);
        self.put(b"\r\n");
    }

    fn request_line(&mut self, method: &[u8], target: &[u8], query: Option<&[u8]>) -> Result<(), Refusal> {
        let is_sound = is_token(method) && decide_parts(method, target).is_ok_and(|parts| parts.form != TargetForm::Absolute);
        if !is_sound {
            return Err(Refusal::UnwritableLine);
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

    fn status_line(&mut self, status: u16, reason: &[u8]) -> Result<(), Refusal> {
        if !(100..=999).contains(&status) || !is_value(reason) {
            return Err(Refusal::UnwritableLine);
        }
        self.put(b"HTTP/1.1 ");
        self.put(itoa::Buffer::new().format(status).as_bytes());
        self.put(b" ");
        self.put(reason);
        self.put(b"\r\n");
        Ok(())
    }

    /// The lines of `fields` that stay, as spans, then the edits' own lines.
    fn lines(&mut self, fields: Fields<'_>, drop: u64, nominates: bool, edits: &[Edit<'_>], implies_host: bool) -> Result<(), Refusal> {
        let plan = Plan::of(edits)?;
        let drop = drop | plan.drop;
        for (i, line) in fields.table.lines.iter().enumerate() {
            let dropped = drop & line.name.bit() != 0
                || (plan.drops_unknown && line.name == Name::Other && plan.drops(fields.name(line), edits))
                || (nominates && is_nominated(fields, fields.name(line)));
            if !dropped {
                self.source(line.start, fields.table.line_end(i));
            }
        }
        self.edit_lines(edits, |name| fields.named(name).next().is_some() || (implies_host && is_host(name)));
        Ok(())
    }

    fn edit_lines(&mut self, edits: &[Edit<'_>], is_present: impl Fn(&[u8]) -> bool) {
        for edit in edits {
            match *edit {
                Edit::Set(name, value) | Edit::Add(name, value) => self.line(name, value),
                Edit::Default(name, value) if !is_present(name) => self.line(name, value),
                Edit::Default(..) | Edit::Remove(_) => {}
            }
        }
    }

    fn pairs<'p>(
        &mut self,
        pairs: impl Iterator<Item = (&'p [u8], &'p [u8])> + Clone,
        skip: u64,
        plan: &Plan,
        edits: &[Edit<'_>],
    ) -> Result<(), Refusal> {
        for (name, value) in pairs.clone() {
            let id = Name::of(name);
            if skip & id.bit() != 0 || (plan.drops_unknown && id == Name::Other && plan.drops(name, edits)) {
                continue;
            }
            check_field(name, value)?;
            self.line(name, value);
        }
        self.edit_lines(edits, |wanted| pairs.clone().any(|(name, _)| name.eq_ignore_ascii_case(wanted)));
        Ok(())
    }

    fn cookies<'p>(&mut self, crumbs: impl Iterator<Item = &'p [u8]>) -> Result<(), Refusal> {
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

    /// The fields that the codec writes by itself, and the empty line.
    fn finish(&mut self, out: &Outgoing<'_>, has_length: bool) -> Result<(), Refusal> {
        match out.framing {
            Framing::Length(n) if !has_length => self.line(b"content-length", itoa::Buffer::new().format(n).as_bytes()),
            Framing::Chunked => self.put(b"transfer-encoding: chunked\r\n"),
            _ => {}
        }
        if let Some(protocols) = out.upgrade {
            if protocols.is_empty() || !is_value(protocols) {
                return Err(Refusal::UnwritableField);
            }
            self.line(b"upgrade", protocols);
        }
        if out.accepts_trailers {
            self.put(b"te: trailers\r\n");
        }
        let options = [
            (out.upgrade.is_some(), &b"upgrade"[..]),
            (out.accepts_trailers, b"te"),
            (out.persistence == Persistence::Close || out.framing == Framing::UntilClose, b"close"),
            (out.persistence == Persistence::KeepAlive, b"keep-alive"),
        ];
        let mut separator = &b"connection: "[..];
        for (_, option) in options.iter().filter(|(wanted, _)| *wanted) {
            self.put(separator);
            self.put(option);
            separator = b", ";
        }
        self.put(if separator == b", " { b"\r\n\r\n" } else { b"\r\n" });
        Ok(())
    }
}

/// The edits, checked, with what they drop as a mask.
struct Plan {
    drop: u64,
    drops_unknown: bool,
}

impl Plan {
    fn of(edits: &[Edit<'_>]) -> Result<Plan, Refusal> {
        let mut plan = Plan { drop: 0, drops_unknown: false };
        let mut hosts = 0;
        for edit in edits {
            let (name, value, drops) = match *edit {
                Edit::Set(name, value) => (name, value, true),
                Edit::Add(name, value) | Edit::Default(name, value) => (name, value, false),
                Edit::Remove(name) => (name, &b""[..], true),
            };
            check_field(name, value)?;
            match Name::of(name) {
                Name::Host => {
                    // Never two Host lines, never one that the next hop would refuse.
                    hosts += 1;
                    let is_sound = match edit {
                        Edit::Add(..) => false,
                        Edit::Remove(_) => true,
                        Edit::Set(..) | Edit::Default(..) => split_authority(value).is_some(),
                    };
                    if !is_sound || hosts > 1 {
                        return Err(Refusal::UnwritableField);
                    }
                    plan.drop |= if drops { Name::Host.bit() } else { 0 };
                }
                Name::Other => plan.drops_unknown |= drops,
                id if id.bit() & RESERVED != 0 => return Err(Refusal::UnwritableField),
                id => plan.drop |= if drops { id.bit() } else { 0 },
            }
        }
        Ok(plan)
    }

    fn drops(&self, name: &[u8], edits: &[Edit<'_>]) -> bool {
        edits.iter().any(|edit| matches!(edit, Edit::Set(n, _) | Edit::Remove(n) if n.eq_ignore_ascii_case(name)))
    }
}

fn check_field(name: &[u8], value: &[u8]) -> Result<(), Refusal> {
    let padded = value.first().is_some_and(|&b| is_ows(b)) || value.last().is_some_and(|&b| is_ows(b));
    if is_token(name) && is_value(value) && !padded { Ok(()) } else { Err(Refusal::UnwritableField) }
}

fn is_host(name: &[u8]) -> bool {
    Name::of(name) == Name::Host
}

fn sets_host(edits: &[Edit<'_>]) -> bool {
    edits.iter().any(|edit| matches!(edit, Edit::Set(n, _) | Edit::Add(n, _) | Edit::Default(n, _) if is_host(n)))
}

fn removes_host(edits: &[Edit<'_>]) -> bool {
    edits.iter().any(|edit| matches!(edit, Edit::Remove(n) if is_host(n)))
}
