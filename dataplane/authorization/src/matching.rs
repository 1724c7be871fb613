//! Compiled policy rules: work that is possible once per policy is not repeated per request.
//! Testing a rule allocates only for a host with a trailing dot. Start with [`CompiledRule::test`].

use std::net::IpAddr;

use canal_model::authorization::{
    AllOf, Attribute, AttributeMatch, AuthorizationAction, Clause, PolicyRule,
};
use ipnet::IpNet;

use crate::attributes::{AttributeValue, AttributeVisibility, Attributes};
use crate::ternary::Truth;

/// Number of exact texts up to which they are scanned; longer lists are sorted and searched. Nobody
/// measured where the two cost the same; a scan of a few short texts needs no sorting and ends at
/// the first byte that differs.
const SCAN_MAX: usize = 8;

/// A [`PolicyRule`] in compiled form.
#[derive(Debug)]
pub(crate) struct CompiledRule {
    from: Box<[CompiledAllOf]>,
    to: Box<[CompiledAllOf]>,
    when: CompiledAllOf,
}

/// Clauses that must all hold.
#[derive(Debug)]
struct CompiledAllOf {
    clauses: Box<[CompiledClause]>,
    /// True if one of the clauses requires a principal by name.
    names: bool,
}

#[derive(Debug)]
struct CompiledClause {
    attribute: Attribute,
    any: Option<CompiledMatches>,
    none: Option<CompiledMatches>,
    /// True if the request is allowed if the clause holds, and not restricted.
    allows: bool,
}

/// List of matches of which one must hold.
#[derive(Debug, Default)]
struct CompiledMatches {
    /// True for hosts: they are in lower case, compared without case, and compared without the port
    /// unless `with_port`.
    is_host: bool,
    exact: Vec<Exact>,
    /// Exact texts in sorted order. Used instead of `exact` if there are many.
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
    Template(Box<[TemplatePiece]>),
}

/// Part of a path template.
#[derive(Debug, PartialEq, Eq)]
enum TemplatePiece {
    Text(Box<[u8]>),
    /// `{*}`, which matches one byte or more without a slash.
    Segment,
    /// `{**}`, which matches anything.
    Rest,
}

impl CompiledRule {
    pub(crate) fn new(rule: &PolicyRule, action: &AuthorizationAction) -> Self {
        let allows = *action == AuthorizationAction::Allow;
        let list = |alls: &[AllOf]| {
            alls.iter()
                .map(|all| CompiledAllOf::new(all, allows))
                .collect()
        };
        Self {
            from: list(&rule.from),
            to: list(&rule.to),
            when: CompiledAllOf::new(&rule.when, allows),
        }
    }

    /// Tests the rule. With `named`, only an alternative counts that requires a principal by name.
    pub(crate) fn test<F: Attributes + ?Sized>(&self, facts: &F, named: bool) -> Truth<'_> {
        let unnamed = named && !self.when.names;
        let from = || {
            if self.from.is_empty() {
                return if unnamed { Truth::No } else { Truth::Yes };
            }
            // With `named`, an alternative that requires no principal by name does not count.
            Truth::any(
                self.from
                    .iter()
                    .filter(|all| !unnamed || all.names)
                    .map(|all| all.test(facts)),
            )
        };
        let to = || {
            if self.to.is_empty() {
                Truth::Yes
            } else {
                Truth::any(self.to.iter().map(|all| all.test(facts)))
            }
        };
        from().and(|| to().and(|| self.when.test(facts)))
    }

    pub(crate) fn attributes(&self) -> impl Iterator<Item = &Attribute> {
        let all = self.from.iter().chain(&self.to).chain([&self.when]);
        all.flat_map(|all| all.clauses.iter().map(|clause| &clause.attribute))
    }
}

impl CompiledAllOf {
    fn new(all: &AllOf, allows: bool) -> Self {
        let compiled = |clause| CompiledClause::new(clause, allows);
        Self {
            clauses: all.iter().map(compiled).collect(),
            names: all.iter().any(names),
        }
    }

    fn test<F: Attributes + ?Sized>(&self, facts: &F) -> Truth<'_> {
        Truth::all(self.clauses.iter().map(|clause| clause.test(facts)))
    }
}

/// Returns true if a clause requires a principal by name: each of its matches contains the whole
/// trust domain, so none begins with a wildcard.
fn names(clause: &Clause) -> bool {
    let whole = |m: &AttributeMatch| match m {
        AttributeMatch::Exact(_) => true,
        AttributeMatch::Prefix(text) => text.contains('/'),
        _ => false,
    };
    clause.attribute == Attribute::SourcePrincipal
        && !clause.any.is_empty()
        && clause.any.iter().all(whole)
}

impl CompiledClause {
    fn new(clause: &Clause, allows: bool) -> Self {
        let ready = |matches: &[AttributeMatch]| {
            (!matches.is_empty()).then(|| CompiledMatches::new(&clause.attribute, matches))
        };
        Self {
            attribute: clause.attribute.clone(),
            any: ready(&clause.any),
            none: ready(&clause.none),
            allows,
        }
    }

    fn test<F: Attributes + ?Sized>(&self, facts: &F) -> Truth<'_> {
        let (mut wanted, mut unwanted) = (false, false);
        let sight = facts.visit_attribute(&self.attribute, &mut |value| {
            let is_line = matches!(value, AttributeValue::Line(_));
            let counts = |against: bool| !is_line || against;
            wanted = wanted
                || (counts(!self.allows) && self.any.as_ref().is_some_and(|any| any.holds(value)));
            unwanted = unwanted
                || (counts(self.allows)
                    && self.none.as_ref().is_some_and(|none| none.holds(value)));
            // No further value can change the result.
            unwanted || (wanted && self.none.is_none())
        });
        match sight {
            AttributeVisibility::Unknown => Truth::Maybe(&self.attribute),
            AttributeVisibility::Known if (wanted || self.any.is_none()) && !unwanted => Truth::Yes,
            AttributeVisibility::Known => Truth::No,
        }
    }
}

impl CompiledMatches {
    fn new(attribute: &Attribute, matches: &[AttributeMatch]) -> Self {
        let mut ready = Self {
            is_host: *attribute == Attribute::Host,
            ..Self::default()
        };
        for m in matches {
            match m {
                AttributeMatch::Exact(text) => ready.exact.push(Exact {
                    with_port: has_port(text),
                    text: ready.bytes(text),
                }),
                AttributeMatch::Prefix(text) => ready
                    .patterns
                    .push(Pattern::Prefix(ready.bytes(text), has_port(text))),
                AttributeMatch::Suffix(text) => ready
                    .patterns
                    .push(Pattern::Suffix(ready.bytes(text), has_port(text))),
                AttributeMatch::Template(text) => {
                    ready.patterns.push(Pattern::Template(pieces(text)))
                }
                AttributeMatch::Network(network) => ready.networks.push(*network),
                AttributeMatch::Port(port) => ready.ports.push(*port),
                AttributeMatch::Present => ready.present = true,
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
        if self.is_host {
            bytes.to_ascii_lowercase().into()
        } else {
            bytes.into()
        }
    }

    fn holds(&self, value: AttributeValue<'_>) -> bool {
        match value {
            AttributeValue::Text(text) | AttributeValue::Line(text) => self.holds_text(text),
            AttributeValue::Address(address) => self.holds_address(address),
            AttributeValue::Port(port) => self.present || self.ports.contains(&port),
        }
    }

    fn holds_address(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.present
            || self
                .networks
                .iter()
                .any(|network| network.contains(&address))
    }

    fn holds_text(&self, text: &[u8]) -> bool {
        if self.present && !text.is_empty() {
            return true;
        }
        if !self.many.is_empty()
            && self
                .many
                .binary_search_by(|known| (**known).cmp(text))
                .is_ok()
        {
            return true;
        }
        if !self.is_host {
            return self.holds_bytes(text, text);
        }
        // Matches without a port see the host without its port. No match sees a trailing dot.
        let name = host_of(text);
        let bare = name.strip_suffix(b".").unwrap_or(name);
        if bare.len() == name.len() {
            return self.holds_bytes(text, bare);
        }
        self.holds_bytes(&[bare, &text[name.len()..]].concat(), bare)
    }

    fn holds_bytes(&self, text: &[u8], bare: &[u8]) -> bool {
        let of = |with_port: bool| if with_port { text } else { bare };
        let same = |a: &[u8], b: &[u8]| {
            if self.is_host {
                a.eq_ignore_ascii_case(b)
            } else {
                a == b
            }
        };
        self.exact
            .iter()
            .any(|exact| same(&exact.text, of(exact.with_port)))
            || self.patterns.iter().any(|pattern| match pattern {
                Pattern::Prefix(start, port) => of(*port)
                    .get(..start.len())
                    .is_some_and(|given| same(start, given)),
                Pattern::Suffix(end, port) => {
                    let text = of(*port);
                    text.len()
                        .checked_sub(end.len())
                        .is_some_and(|at| same(end, &text[at..]))
                }
                Pattern::Template(pieces) => fits(pieces, text),
            })
    }
}

/// Returns true if a host in a policy has a port: a colon outside brackets.
fn has_port(text: &str) -> bool {
    text.rsplit(']')
        .next()
        .is_some_and(|rest| rest.contains(':'))
}

/// Returns the host without its port.
fn host_of(authority: &[u8]) -> &[u8] {
    let after_bracket = authority
        .iter()
        .rposition(|b| *b == b']')
        .map_or(0, |at| at + 1);
    match authority[after_bracket..].iter().position(|b| *b == b':') {
        Some(colon) => &authority[..after_bracket + colon],
        None => authority,
    }
}

fn pieces(template: &str) -> Box<[TemplatePiece]> {
    let mut pieces = Vec::new();
    let mut rest = template;
    while let Some(at) = rest.find('{') {
        let (text, operator) = rest.split_at(at);
        let (piece, length) = match operator {
            o if o.starts_with("{**}") => (TemplatePiece::Rest, 4),
            o if o.starts_with("{*}") => (TemplatePiece::Segment, 3),
            // A brace that begins no operator is plain text.
            _ => (TemplatePiece::Text((*b"{").into()), 1),
        };
        if !text.is_empty() {
            pieces.push(TemplatePiece::Text(text.as_bytes().into()));
        }
        pieces.push(piece);
        rest = &operator[length..];
    }
    if !rest.is_empty() {
        pieces.push(TemplatePiece::Text(rest.as_bytes().into()));
    }
    pieces.into()
}

/// Point to which the matcher can return: the piece after a wildcard, and the offset up to which
/// the wildcard reaches.
type Choice = Option<(usize, usize)>;

/// Returns true if the template matches the whole path. On a mismatch the last `{*}` takes one more
/// byte; if it cannot, the last `{**}` does. Returning to an earlier wildcard is not necessary: if
/// it took more, it would leave less to the later ones, which may take all of that themselves.
fn fits(pieces: &[TemplatePiece], path: &[u8]) -> bool {
    let (mut piece, mut at) = (0, 0);
    let (mut segment, mut rest): (Choice, Choice) = (None, None);
    loop {
        let stepped = match pieces.get(piece) {
            None if at == path.len() => return true,
            None => None,
            Some(TemplatePiece::Text(text)) => {
                path[at..].starts_with(text).then_some(at + text.len())
            }
            Some(TemplatePiece::Segment) => {
                let next = path.get(at).filter(|b| **b != b'/').map(|_| at + 1);
                segment = next.map(|next| (piece + 1, next)).or(segment);
                next
            }
            Some(TemplatePiece::Rest) => {
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
            assert_eq!(
                fits(&pieces(template), path.as_bytes()),
                want,
                "{template} {path}"
            );
        }
    }

    #[test]
    fn hosts_lose_their_ports() {
        for (given, want) in [
            ("a.b", "a.b"),
            ("a.b:80", "a.b"),
            ("[::1]", "[::1]"),
            ("[::1]:80", "[::1]"),
            ("", ""),
        ] {
            assert_eq!(host_of(given.as_bytes()), want.as_bytes());
            assert_eq!(has_port(given), given != want, "{given}");
        }
    }
}
