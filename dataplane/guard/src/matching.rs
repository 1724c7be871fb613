//! Clauses made ready: what can be computed once per policy is not computed per request. No allocation when they are asked.

use std::net::IpAddr;

use canal_model::authorization::{All, Attribute, Clause, Match, Rule};
use ipnet::IpNet;

use crate::facts::{Facts, Sight, Value};
use crate::truth::Truth;

/// From so many exact texts on they are searched, not scanned.
const SCAN_MAX: usize = 8;

/// A [`Rule`] made ready.
#[derive(Debug)]
pub(crate) struct ReadyRule {
    from: Box<[ReadyAll]>,
    to: Box<[ReadyAll]>,
    when: ReadyAll,
}

/// Clauses that must all hold.
#[derive(Debug)]
struct ReadyAll {
    clauses: Box<[ReadyClause]>,
    /// One of them says by name who the peer must be.
    names: bool,
}

#[derive(Debug)]
struct ReadyClause {
    attribute: Attribute,
    any: Option<Ready>,
    none: Option<Ready>,
}

/// A list of matches, one of which must hold.
#[derive(Debug, Default)]
struct Ready {
    /// Hosts: lower case, compared without case, and without the port unless `with_port`.
    is_host: bool,
    exact: Vec<Exact>,
    /// Sorted; used instead of `exact` when there are many.
    many: Vec<Box<[u8]>>,
    patterns: Vec<Pattern>,
    networks: Vec<IpNet>,
    ports: Vec<u16>,
    present: bool,
}

#[derive(Debug)]
struct Exact {
    text: Box<[u8]>,
    with_port: bool,
}

#[derive(Debug)]
enum Pattern {
    Prefix(Box<[u8]>, bool),
    Suffix(Box<[u8]>, bool),
    Template(Box<[Piece]>),
}

/// A piece of a path template.
#[derive(Debug, PartialEq, Eq)]
enum Piece {
    Text(Box<[u8]>),
    /// `{*}`: one byte or more, no slash.
    Segment,
    /// `{**}`: anything.
    Rest,
}

impl ReadyRule {
    pub(crate) fn new(rule: &Rule) -> Self {
        let list = |alls: &[All]| alls.iter().map(ReadyAll::new).collect();
        Self { from: list(&rule.from), to: list(&rule.to), when: ReadyAll::new(&rule.when) }
    }

    /// Whether it matches. `named`: only by a way that says by name who the peer must be.
    pub(crate) fn test<F: Facts + ?Sized>(&self, facts: &F, named: bool) -> Truth<'_> {
        let unnamed = named && !self.when.names;
        let from = || {
            if self.from.is_empty() {
                return if unnamed { Truth::No } else { Truth::Yes };
            }
            Truth::any(self.from.iter().filter(|all| !unnamed || all.names).map(|all| all.test(facts)))
        };
        let to = || if self.to.is_empty() { Truth::Yes } else { Truth::any(self.to.iter().map(|all| all.test(facts))) };
        from().and(|| to().and(|| self.when.test(facts)))
    }

    pub(crate) fn attributes(&self) -> impl Iterator<Item = &Attribute> {
        let all = self.from.iter().chain(&self.to).chain([&self.when]);
        all.flat_map(|all| all.clauses.iter().map(|clause| &clause.attribute))
    }
}

impl ReadyAll {
    fn new(all: &All) -> Self {
        Self { clauses: all.iter().map(ReadyClause::new).collect(), names: all.iter().any(names) }
    }

    fn test<F: Facts + ?Sized>(&self, facts: &F) -> Truth<'_> {
        Truth::all(self.clauses.iter().map(|clause| clause.test(facts)))
    }
}

/// Whether a clause says by name who the peer must be: each of its principals with the whole trust domain, as no wildcard in front does.
fn names(clause: &Clause) -> bool {
    let whole = |m: &Match| match m {
        Match::Exact(_) => true,
        Match::Prefix(text) => text.contains('/'),
        _ => false,
    };
    clause.attribute == Attribute::SourcePrincipal && !clause.any.is_empty() && clause.any.iter().all(whole)
}

impl ReadyClause {
    fn new(clause: &Clause) -> Self {
        let ready = |matches: &[Match]| (!matches.is_empty()).then(|| Ready::new(&clause.attribute, matches));
        Self { attribute: clause.attribute.clone(), any: ready(&clause.any), none: ready(&clause.none) }
    }

    fn test<F: Facts + ?Sized>(&self, facts: &F) -> Truth<'_> {
        let (mut wanted, mut unwanted) = (false, false);
        let sight = facts.look(&self.attribute, &mut |value| {
            wanted = wanted || self.any.as_ref().is_some_and(|any| any.holds(value));
            unwanted = unwanted || self.none.as_ref().is_some_and(|none| none.holds(value));
            // Nothing more can be learnt.
            unwanted || (wanted && self.none.is_none())
        });
        match sight {
            Sight::Unknown => Truth::Maybe(&self.attribute),
            Sight::Known if (wanted || self.any.is_none()) && !unwanted => Truth::Yes,
            Sight::Known => Truth::No,
        }
    }
}

impl Ready {
    fn new(attribute: &Attribute, matches: &[Match]) -> Self {
        let mut ready = Self { is_host: *attribute == Attribute::Host, ..Self::default() };
        for m in matches {
            match m {
                Match::Exact(text) => ready.exact.push(Exact { with_port: has_port(text), text: ready.bytes(text) }),
                Match::Prefix(text) => ready.patterns.push(Pattern::Prefix(ready.bytes(text), has_port(text))),
                Match::Suffix(text) => ready.patterns.push(Pattern::Suffix(ready.bytes(text), has_port(text))),
                Match::Template(text) => ready.patterns.push(Pattern::Template(pieces(text))),
                Match::Network(network) => ready.networks.push(*network),
                Match::Port(port) => ready.ports.push(*port),
                Match::Present => ready.present = true,
            }
        }
        if !ready.is_host && ready.exact.len() > SCAN_MAX {
            ready.many = ready.exact.drain(..).map(|exact| exact.text).collect();
            ready.many.sort_unstable();
        }
        ready
    }

    fn bytes(&self, text: &str) -> Box<[u8]> {
        let bytes = text.as_bytes();
        if self.is_host { bytes.to_ascii_lowercase().into() } else { bytes.into() }
    }

    fn holds(&self, value: Value<'_>) -> bool {
        match value {
            Value::Text(text) => self.holds_text(text),
            Value::Address(address) => self.holds_address(address),
            Value::Port(port) => self.present || self.ports.contains(&port),
        }
    }

    fn holds_address(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.present || self.networks.iter().any(|network| network.contains(&address))
    }

    fn holds_text(&self, text: &[u8]) -> bool {
        if self.present && !text.is_empty() {
            return true;
        }
        if !self.many.is_empty() && self.many.binary_search_by(|known| (**known).cmp(text)).is_ok() {
            return true;
        }
        if !self.is_host {
            return self.holds_bytes(text, text);
        }
        // Without its port for those matches that have none, and always without a dot at its end.
        let name = host_of(text);
        let bare = name.strip_suffix(b".").unwrap_or(name);
        if bare.len() == name.len() {
            return self.holds_bytes(text, bare);
        }
        self.holds_bytes(&[bare, &text[name.len()..]].concat(), bare)
    }

    fn holds_bytes(&self, text: &[u8], bare: &[u8]) -> bool {
        let of = |with_port: bool| if with_port { text } else { bare };
        let same = |a: &[u8], b: &[u8]| if self.is_host { a.eq_ignore_ascii_case(b) } else { a == b };
        self.exact.iter().any(|exact| same(&exact.text, of(exact.with_port)))
            || self.patterns.iter().any(|pattern| match pattern {
                Pattern::Prefix(start, port) => of(*port).get(..start.len()).is_some_and(|given| same(start, given)),
                Pattern::Suffix(end, port) => {
                    let text = of(*port);
                    text.len().checked_sub(end.len()).is_some_and(|at| same(end, &text[at..]))
                }
                Pattern::Template(pieces) => fits(pieces, text),
            })
    }
}

/// Whether a host in a policy has a port: a colon that is not inside brackets.
fn has_port(text: &str) -> bool {
    text.rsplit(']').next().is_some_and(|rest| rest.contains(':'))
}

/// A host without its port.
fn host_of(authority: &[u8]) -> &[u8] {
    let after_bracket = authority.iter().rposition(|b| *b == b']').map_or(0, |at| at + 1);
    match authority[after_bracket..].iter().position(|b| *b == b':') {
        Some(colon) => &authority[..after_bracket + colon],
        None => authority,
    }
}

fn pieces(template: &str) -> Box<[Piece]> {
    let mut pieces = Vec::new();
    let mut rest = template;
    while let Some(at) = rest.find('{') {
        let (text, operator) = rest.split_at(at);
        let (piece, length) = match operator {
            o if o.starts_with("{**}") => (Piece::Rest, 4),
            o if o.starts_with("{*}") => (Piece::Segment, 3),
            // Not an operator: a brace.
            _ => (Piece::Text((*b"{").into()), 1),
        };
        if !text.is_empty() {
            pieces.push(Piece::Text(text.as_bytes().into()));
        }
        pieces.push(piece);
        rest = &operator[length..];
    }
    if !rest.is_empty() {
        pieces.push(Piece::Text(rest.as_bytes().into()));
    }
    pieces.into()
}

/// The piece after a choice, and how far the choice goes.
type Choice = Option<(usize, usize)>;

/// Whether the whole path fits. Where something does not, the last `{*}` takes one more byte; if it cannot, the last `{**}` does. To go back
/// no further is enough: an earlier one that took more would leave less to the later ones, which may take all that it does.
fn fits(pieces: &[Piece], path: &[u8]) -> bool {
    let (mut piece, mut at) = (0, 0);
    let (mut segment, mut rest): (Choice, Choice) = (None, None);
    loop {
        let stepped = match pieces.get(piece) {
            None if at == path.len() => return true,
            None => None,
            Some(Piece::Text(text)) => path[at..].starts_with(text).then_some(at + text.len()),
            Some(Piece::Segment) => {
                let next = path.get(at).filter(|b| **b != b'/').map(|_| at + 1);
                segment = next.map(|next| (piece + 1, next)).or(segment);
                next
            }
            Some(Piece::Rest) => {
                (segment, rest) = (None, Some((piece + 1, at)));
                Some(at)
            }
        };
        (piece, at) = match (stepped, segment, rest) {
            (Some(next), ..) => (piece + 1, next),
            (None, Some((after, to)), _) if path.get(to).is_some_and(|b| *b != b'/') => {
                segment = Some((after, to + 1));
                (after, to + 1)
            }
            (None, _, Some((after, to))) if to < path.len() => {
                (segment, rest) = (None, Some((after, to + 1)));
                (after, to + 1)
            }
            _ => return false,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_fit_whole_paths() {
        for (template, path, want) in [
            ("/foo/{*}", "/foo/bar", true),
            ("/foo/{*}", "/foo/bar/baz", false),
            ("/foo/{*}", "/foo/", false),
            ("/foo/{**}", "/foo/", true),
            ("/foo/{**}", "/foo/bar/baz", true),
            ("/foo/{**}", "/foo", false),
            ("/foo/{**}/", "/foo/bar/", true),
            ("/foo/{**}/", "/foo/bar", false),
            ("/foo/{**}/end", "/foo/a/end/b/end", true),
            ("/foo/{**}/end", "/foo/a/end/b", false),
            ("/foo/{*}/bar/{**}", "/foo/buzz/bar/", true),
            ("/foo/{*}/bar/{**}", "/foo/buzz/bar/baz", true),
            ("/foo/{*}/bar/{**}", "/foo/bar/baz", false),
            ("/{*}/{*}", "/a/b", true),
            ("/{*}/{*}", "/a", false),
            ("/{*}.php", "/x.php.php", true),
            ("/{*}.php", "/x/y.php", false),
            ("/{*}.php", "/.php", false),
            ("{**}x{*}y", "axb/xcy", true),
            ("/{*}a{*}/b", "/xaya/b", true),
            ("/{*}a/x{*}b", "/aa/xcb", true),
            ("/a{b", "/a{b", true),
            ("/", "/", true),
            ("/x", "/xy", false),
        ] {
            assert_eq!(fits(&pieces(template), path.as_bytes()), want, "{template} {path}");
        }
    }

    #[test]
    fn hosts_lose_their_ports() {
        for (given, want) in [("a.b", "a.b"), ("a.b:80", "a.b"), ("[::1]", "[::1]"), ("[::1]:80", "[::1]"), ("", "")] {
            assert_eq!(host_of(given.as_bytes()), want.as_bytes());
            assert_eq!(has_port(given), given != want, "{given}");
        }
    }
}
