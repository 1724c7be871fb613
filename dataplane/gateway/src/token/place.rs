//! Where tokens are in a request: headers, query parameters, cookies; and how one is taken out of it. What a token says is not looked at.

use std::borrow::Cow;
use std::collections::BTreeSet;

use canal_model::authorization::JwtRule;
use canal_router::Request;
use smallvec::SmallVec;

use super::TOKENS_MAX;
use crate::changes::Changes;

/// One place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// A header (lower case), and what is before the token.
    Header(String, String),
    Parameter(String),
    Cookie(String),
}

/// The places of one rule.
#[derive(Debug)]
pub(super) struct Places(Vec<Place>);

/// Where tokens of a tenant may be, whichever destination they are for: what logs and taps leave out.
#[derive(Debug)]
pub(crate) struct TokenNames {
    parameters: BTreeSet<String>,
    headers: BTreeSet<String>,
}

impl Default for TokenNames {
    /// The places of a rule that names none (RFC 6750 §2): left out whatever policies say.
    fn default() -> Self {
        let mut names = Self { parameters: BTreeSet::new(), headers: BTreeSet::new() };
        names.add(&Places(vec![Place::Parameter("access_token".into()), Place::Header("authorization".into(), String::new())]));
        names
    }
}

/// What is written in place of a token.
const REDACTED: &str = "[redacted]";

impl TokenNames {
    pub(super) fn add(&mut self, places: &Places) {
        for place in &places.0 {
            match place {
                Place::Header(name, _) => drop(self.headers.insert(name.clone())),
                Place::Parameter(name) => drop(self.parameters.insert(name.clone())),
                Place::Cookie(_) => drop(self.headers.insert("cookie".into())),
            }
        }
    }

    /// A query without the values of the parameters that hold tokens, however their names are escaped.
    pub(crate) fn redact_query(&self, query: &[u8]) -> String {
        let parts = parameters(query).map(|(part, name, value)| {
            let is_token = self.parameters.contains(&*percent_decoded(name));
            let shown = if is_token && !value.is_empty() { &part[..part.len() - value.len()] } else { part };
            let text = String::from_utf8_lossy(shown).into_owned();
            if shown.len() < part.len() { text + REDACTED } else { text }
        });
        parts.collect::<Vec<String>>().join("&")
    }

    /// A header's value, unless it may hold a token.
    pub(crate) fn redact_header(&self, name: &str, value: String) -> String {
        if self.headers.contains(name) && !value.is_empty() { REDACTED.into() } else { value }
    }
}

fn percent_decoded(name: &[u8]) -> Cow<'_, str> {
    if !name.contains(&b'%') {
        return String::from_utf8_lossy(name);
    }
    let mut decoded = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((byte, after)) = rest.split_first() {
        let hex = |at: usize| after.get(at).and_then(|b| (*b as char).to_digit(16));
        match (byte, hex(0), hex(1)) {
            (b'%', Some(high), Some(low)) => {
                decoded.push((high * 16 + low) as u8);
                rest = &after[2..];
            }
            _ => {
                decoded.push(*byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned().into()
}

/// A token and where it was.
#[derive(Debug)]
pub(super) struct Found<'p> {
    pub(super) place: &'p Place,
    pub(super) text: Vec<u8>,
}

impl Places {
    pub(super) fn of(rule: &JwtRule) -> Self {
        let headers = rule.headers.iter().map(|(name, prefix)| Place::Header(name.clone(), prefix.clone()));
        let parameters = rule.parameters.iter().cloned().map(Place::Parameter);
        let places: Vec<Place> = headers.chain(parameters).chain(rule.cookies.iter().cloned().map(Place::Cookie)).collect();
        if places.is_empty() {
            return Self(vec![Place::Header("authorization".into(), "Bearer ".into()), Place::Parameter("access_token".into())]);
        }
        Self(places)
    }

    pub(super) fn hold(&self, place: &Place) -> bool {
        self.0.contains(place)
    }
}

/// All tokens at all places, each place once; `None` if they are too many.
pub(super) fn find<'p, R: Request>(all: impl Iterator<Item = &'p Places>, request: &R) -> Option<SmallVec<[Found<'p>; 1]>> {
    let mut seen: SmallVec<[&Place; 4]> = SmallVec::new();
    let mut found: SmallVec<[Found<'p>; 1]> = SmallVec::new();
    for place in all.flat_map(|places| &places.0) {
        if !seen.contains(&place) {
            seen.push(place);
            place.look(request, &mut |text| found.push(Found { place, text: text.to_vec() }));
        }
    }
    (found.len() <= TOKENS_MAX).then_some(found)
}

/// The parts of a query: `name=value` as written.
fn parameters(query: &[u8]) -> impl Iterator<Item = (&[u8], &[u8], &[u8])> {
    query.split(|b| *b == b'&').map(|part| {
        let at = part.iter().position(|b| *b == b'=').unwrap_or(part.len());
        (part, &part[..at], part.get(at + 1..).unwrap_or_default())
    })
}

/// The pairs of a cookie header.
fn cookies(line: &[u8]) -> impl Iterator<Item = (&[u8], &[u8], &[u8])> {
    line.split(|b| *b == b';').map(|pair| {
        let pair = pair.trim_ascii();
        let at = pair.iter().position(|b| *b == b'=').unwrap_or(pair.len());
        (pair, &pair[..at], pair.get(at + 1..).unwrap_or_default())
    })
}

impl Place {
    fn look<R: Request>(&self, request: &R, each: &mut dyn FnMut(&[u8])) {
        let mut token = |text: &[u8]| {
            let text = text.trim_ascii();
            if !text.is_empty() {
                each(text);
            }
        };
        match self {
            Place::Header(name, prefix) => request.header(name, &mut |value| {
                let start = value.get(..prefix.len()).filter(|start| start.eq_ignore_ascii_case(prefix.as_bytes()));
                if start.is_some() {
                    token(&value[prefix.len()..]);
                }
            }),
            Place::Parameter(wanted) => {
                let given = parameters(request.query().unwrap_or_default());
                given.filter(|(_, name, _)| *name == wanted.as_bytes()).for_each(|(.., value)| token(value));
            }
            Place::Cookie(wanted) => request.header("cookie", &mut |line| {
                cookies(line).filter(|(_, name, _)| *name == wanted.as_bytes()).for_each(|(.., value)| token(value));
            }),
        }
    }

    /// Takes the token out of the request.
    pub(super) fn strip<R: Request>(&self, request: &R, changes: &mut Changes) {
        match self {
            Place::Header(name, _) => changes.remove(name),
            Place::Parameter(wanted) => {
                let query = match changes.query.take() {
                    Some(changed) => changed.unwrap_or_default(),
                    None => request.query().unwrap_or_default().to_vec(),
                };
                let left: Vec<&[u8]> =
                    parameters(&query).filter(|(_, name, _)| *name != wanted.as_bytes()).map(|(part, ..)| part).collect();
                let left = left.join(&b'&');
                changes.query = Some((!left.is_empty()).then_some(left));
            }
            Place::Cookie(wanted) => {
                let mut left: Vec<Vec<u8>> = Vec::new();
                let before = changes.value("cookie").map(<[u8]>::to_vec);
                let mut keep = |line: &[u8]| {
                    let pairs = cookies(line).filter(|(pair, name, _)| !pair.is_empty() && *name != wanted.as_bytes());
                    left.extend(pairs.map(|(pair, ..)| pair.to_vec()));
                };
                match before {
                    Some(line) => keep(&line),
                    None => request.header("cookie", &mut keep),
                }
                changes.remove("cookie");
                if !left.is_empty() {
                    changes.set("cookie", &left.join(&b"; "[..]));
                }
            }
        }
    }
}
