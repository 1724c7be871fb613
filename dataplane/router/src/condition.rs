//! Conditions of a match besides its path: method, headers, query. A header is read and the query
//! is split only when a condition needs it. Start with [`Conditions::hold`].

use canal_model::client_attributes::is_client_attribute;
use canal_model::program::{AUTHORITY, HttpMatch, METHOD, TextMatch, ValueMatch};
use smallvec::SmallVec;

use crate::broken_match::BrokenMatchKind;
use crate::regexes::{Automaton, AutomatonBudget, RegexWork};
use crate::request::{RoutableRequest, line_separator};

/// Conditions that must hold besides the path.
#[derive(Debug)]
pub(crate) struct Conditions {
    method: Option<Box<str>>,
    headers: Box<[Condition]>,
    query: Box<[Condition]>,
}

#[derive(Debug)]
struct Condition {
    name: Box<str>,
    text: Text,
}

#[derive(Debug)]
enum Text {
    Exact(Box<str>),
    Prefix(Box<str>),
    Regex(Box<Automaton>),
    Present,
    Not(Box<Text>),
}

impl Conditions {
    /// Compiles the conditions of a match. Returns `None` if the match has nothing but a path.
    pub(crate) fn of(
        rule: &HttpMatch,
        budget: &mut AutomatonBudget<'_>,
    ) -> Result<Option<Conditions>, BrokenMatchKind> {
        if rule.method.is_none() && rule.headers.is_empty() && rule.query.is_empty() {
            return Ok(None);
        }
        Ok(Some(Conditions {
            method: rule.method.as_deref().map(Box::from),
            headers: compile("header", &rule.headers, header_name, budget)?,
            query: compile("query parameter", &rule.query, str::to_owned, budget)?,
        }))
    }

    /// Returns true if all conditions hold. `query` caches the split query, so that it is split
    /// once per search. Where the regexes exceed `work`, the result means nothing.
    pub(crate) fn hold<'r, R: RoutableRequest>(
        &self,
        request: &'r R,
        query: &mut Option<QueryPairs<'r>>,
        work: &RegexWork,
    ) -> bool {
        self.method
            .as_ref()
            .is_none_or(|method| method.as_bytes() == request.method())
            && self
                .headers
                .iter()
                .all(|condition| condition.holds_for_header(request, work))
            && (self.query.is_empty() || {
                let pairs =
                    query.get_or_insert_with(|| split_query(request.query().unwrap_or_default()));
                self.query
                    .iter()
                    .all(|condition| condition.holds_for_query(pairs, work))
            })
    }

    /// Returns the bytes on the heap, automata included.
    pub(crate) fn memory_bytes(&self) -> usize {
        let of = |condition: &Condition| {
            size_of::<Condition>() + condition.name.len() + condition.text.memory_bytes()
        };
        self.method.as_ref().map_or(0, |method| method.len())
            + self
                .headers
                .iter()
                .chain(&self.query)
                .map(of)
                .sum::<usize>()
    }
}

/// Returns the name of a header in lower case, or the name of an attribute, in which the key of a label
/// has upper case too.
fn header_name(name: &str) -> String {
    match is_client_attribute(name) {
        true => name.to_owned(),
        false => name.to_ascii_lowercase(),
    }
}

/// Compiles a list of conditions. Gateway API: of several conditions on the same name only the
/// first one counts. What is excluded counts beside it.
fn compile(
    what: &str,
    conditions: &[ValueMatch],
    canonical_name: fn(&str) -> String,
    budget: &mut AutomatonBudget<'_>,
) -> Result<Box<[Condition]>, BrokenMatchKind> {
    let names: Vec<String> = conditions
        .iter()
        .map(|condition| canonical_name(&condition.name))
        .collect();
    let mut one = |(i, condition): (usize, &ValueMatch)| {
        Ok(Condition {
            name: names[i].as_str().into(),
            text: compile_text(what, &condition.name, &condition.value, budget)?,
        })
    };
    let counts = |(i, condition): &(usize, &ValueMatch)| {
        let mut earlier = names[..*i].iter().zip(conditions);
        let excludes = |it: &ValueMatch| matches!(it.value, TextMatch::Not(_));
        excludes(condition) || !earlier.any(|(name, it)| *name == names[*i] && !excludes(it))
    };
    let conditions = conditions.iter().enumerate();
    conditions.filter(counts).map(&mut one).collect()
}

fn compile_text(
    what: &str,
    name: &str,
    written: &TextMatch,
    budget: &mut AutomatonBudget<'_>,
) -> Result<Text, BrokenMatchKind> {
    Ok(match written {
        TextMatch::Exact(text) => Text::Exact(text.as_str().into()),
        TextMatch::Prefix(text) => Text::Prefix(text.as_str().into()),
        TextMatch::Present => Text::Present,
        TextMatch::Regex(pattern) => {
            Text::Regex(Box::new(compile_one(what, name, pattern, budget)?))
        }
        TextMatch::Not(unwanted) => {
            Text::Not(Box::new(compile_text(what, name, unwanted, budget)?))
        }
    })
}

fn compile_one(
    what: &str,
    name: &str,
    pattern: &str,
    budget: &mut AutomatonBudget<'_>,
) -> Result<Automaton, BrokenMatchKind> {
    let field = format!("{what} {name:?}");
    let checked = budget.check(&field, pattern)?;
    budget
        .compile(std::iter::once(&checked))
        .ok_or_else(|| budget.overflow(&field, pattern))
}

impl Text {
    fn holds(&self, text: &[u8], work: &RegexWork) -> bool {
        match self {
            Text::Exact(want) => want.as_bytes() == text,
            Text::Prefix(want) => text.starts_with(want.as_bytes()),
            Text::Regex(regex) => regex.is_match(text, work),
            Text::Present => true,
            Text::Not(unwanted) => !unwanted.holds(text, work),
        }
    }

    /// Returns the bytes on the heap, automata included.
    fn memory_bytes(&self) -> usize {
        match self {
            Text::Exact(text) | Text::Prefix(text) => text.len(),
            Text::Regex(regex) => regex.memory_usage(),
            Text::Present => 0,
            Text::Not(unwanted) => size_of::<Text>() + unwanted.memory_bytes(),
        }
    }
}

impl Condition {
    /// Tests a header. Several lines of one header are one list (RFC 9110 §5.3); those of `cookie`
    /// are one line (RFC 9113 §8.2.3).
    fn holds_for_header<R: RoutableRequest>(&self, request: &R, work: &RegexWork) -> bool {
        if self.name.starts_with(':') {
            return self.holds_for_pseudo_header(request, work);
        }
        let separator = line_separator(&self.name);
        let unwanted = match &self.text {
            Text::Not(unwanted) => Some(unwanted),
            _ => None,
        };
        let mut joined: SmallVec<[u8; 128]> = SmallVec::new();
        let (mut seen, mut is_excluded) = (false, false);
        request.header(&self.name, &mut |value| {
            if seen {
                joined.extend_from_slice(separator);
            }
            seen = true;
            joined.extend_from_slice(value);
            is_excluded = is_excluded || unwanted.is_some_and(|text| text.holds(value, work));
        });
        match unwanted.map(|text| &**text) {
            None => seen && self.text.holds(&joined, work),
            Some(Text::Present) => !seen,
            Some(unwanted) => !is_excluded && !unwanted.holds(&joined, work),
        }
    }

    /// Tests the method or the host, which are headers in Envoy's matches, or what is known of the
    /// client.
    fn holds_for_pseudo_header<R: RoutableRequest>(&self, request: &R, work: &RegexWork) -> bool {
        match &*self.name {
            METHOD => self.text.holds(request.method(), work),
            AUTHORITY => {
                let host = request.host().to_ascii_lowercase();
                self.text
                    .holds(host.strip_suffix(b".").unwrap_or(&host), work)
            }
            attribute => {
                let value = request.client_attribute(attribute);
                value.is_some_and(|value| self.text.holds(value, work))
            }
        }
    }

    /// Tests a query parameter. The first value of a repeated parameter counts.
    fn holds_for_query(&self, pairs: &QueryPairs<'_>, work: &RegexWork) -> bool {
        pairs
            .iter()
            .find(|(name, _)| *name == self.name.as_bytes())
            .is_some_and(|(_, value)| self.text.holds(value, work))
    }
}

/// Parameters of a query as sent: name and value.
pub(crate) type QueryPairs<'r> = SmallVec<[(&'r [u8], &'r [u8]); 8]>;

fn split_query(query: &[u8]) -> QueryPairs<'_> {
    let pair = |part: &'_ [u8]| match part.iter().position(|&b| b == b'=') {
        Some(at) => (0..at, at + 1..part.len()),
        None => (0..part.len(), part.len()..part.len()),
    };
    query
        .split(|&b| b == b'&')
        .filter(|part| !part.is_empty())
        .map(|part| {
            let (name, value) = pair(part);
            (&part[name], &part[value])
        })
        .collect()
}
