//! Locations of tokens in a request: headers, query parameters, cookies. Tokens are found and
//! removed here, but not interpreted.

use std::borrow::Cow;
use std::collections::BTreeSet;

use canal_model::authorization::JwtRule;
use canal_router::RoutableRequest;
use smallvec::SmallVec;

use super::TOKENS_MAX;
use crate::mutations::RequestMutations;

/// One location of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TokenLocation {
    /// A header name in lower case, and the text before the token.
    Header(String, String),
    Parameter(String),
    Cookie(String),
}

/// Locations of one rule's tokens.
#[derive(Debug)]
pub(super) struct TokenLocations(Vec<TokenLocation>);

/// Locations of a tenant's tokens for all destinations, which logs and taps redact.
#[derive(Debug)]
pub struct TokenNames {
    parameters: BTreeSet<String>,
    headers: BTreeSet<String>,
}

impl Default for TokenNames {
    /// Starts with the locations of a rule that names none (RFC 6750 §2). They are redacted
    /// whatever the policies are.
    fn default() -> Self {
        let mut names = Self {
            parameters: BTreeSet::new(),
            headers: BTreeSet::new(),
        };
        names.add(&TokenLocations(vec![
            TokenLocation::Parameter("access_token".into()),
            TokenLocation::Header("authorization".into(), String::new()),
        ]));
        names
    }
}

/// Text that replaces a token in logs.
const REDACTED: &str = "[redacted]";

impl TokenNames {
    pub(super) fn add(&mut self, places: &TokenLocations) {
        for place in &places.0 {
            match place {
                TokenLocation::Header(name, _) => drop(self.headers.insert(name.clone())),
                TokenLocation::Parameter(name) => drop(self.parameters.insert(name.clone())),
                TokenLocation::Cookie(_) => drop(self.headers.insert("cookie".into())),
            }
        }
    }

    /// Returns the query with the values of token parameters redacted, however their names are
    /// escaped.
    pub fn redact_query(&self, query: &[u8]) -> String {
        let parts = parameters(query).map(|(part, name, value)| {
            let is_token = self.parameters.contains(&*percent_decoded(name));
            let shown = if is_token && !value.is_empty() {
                &part[..part.len() - value.len()]
            } else {
                part
            };
            let text = String::from_utf8_lossy(shown).into_owned();
            if shown.len() < part.len() {
                text + REDACTED
            } else {
                text
            }
        });
        parts.collect::<Vec<String>>().join("&")
    }

    /// Returns a header's value, redacted if it may contain a token.
    pub fn redact_header(&self, name: &str, value: String) -> String {
        if self.headers.contains(name) && !value.is_empty() {
            REDACTED.into()
        } else {
            value
        }
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

/// A token and its location.
#[derive(Debug)]
pub(super) struct ExtractedToken<'p> {
    pub(super) location: &'p TokenLocation,
    pub(super) text: Vec<u8>,
}

impl TokenLocations {
    pub(super) fn of(rule: &JwtRule) -> Self {
        let headers = rule
            .headers
            .iter()
            .map(|(name, prefix)| TokenLocation::Header(name.clone(), prefix.clone()));
        let parameters = rule
            .parameters
            .iter()
            .cloned()
            .map(TokenLocation::Parameter);
        let places: Vec<TokenLocation> = headers
            .chain(parameters)
            .chain(rule.cookies.iter().cloned().map(TokenLocation::Cookie))
            .collect();
        if places.is_empty() {
            return Self(vec![
                TokenLocation::Header("authorization".into(), "Bearer ".into()),
                TokenLocation::Parameter("access_token".into()),
            ]);
        }
        Self(places)
    }

    pub(super) fn hold(&self, place: &TokenLocation) -> bool {
        self.0.contains(place)
    }
}

/// Returns all tokens at all locations, searching each location once. `None` if there are too many.
pub(super) fn find<'p, R: RoutableRequest>(
    all: impl Iterator<Item = &'p TokenLocations>,
    request: &R,
) -> Option<SmallVec<[ExtractedToken<'p>; 1]>> {
    let mut seen: SmallVec<[&TokenLocation; 4]> = SmallVec::new();
    let mut found: SmallVec<[ExtractedToken<'p>; 1]> = SmallVec::new();
    for place in all.flat_map(|places| &places.0) {
        if !seen.contains(&place) {
            seen.push(place);
            place.visit_tokens(request, &mut |text| {
                found.push(ExtractedToken {
                    location: place,
                    text: text.to_vec(),
                })
            });
        }
    }
    (found.len() <= TOKENS_MAX).then_some(found)
}

/// Splits a query into its parts as written: the part, its name, its value.
fn parameters(query: &[u8]) -> impl Iterator<Item = (&[u8], &[u8], &[u8])> {
    query.split(|b| *b == b'&').map(|part| {
        let at = part.iter().position(|b| *b == b'=').unwrap_or(part.len());
        (part, &part[..at], part.get(at + 1..).unwrap_or_default())
    })
}

/// Splits a cookie header into its pairs: the pair, its name, its value.
fn cookies(line: &[u8]) -> impl Iterator<Item = (&[u8], &[u8], &[u8])> {
    line.split(|b| *b == b';').map(|pair| {
        let pair = pair.trim_ascii();
        let at = pair.iter().position(|b| *b == b'=').unwrap_or(pair.len());
        (pair, &pair[..at], pair.get(at + 1..).unwrap_or_default())
    })
}

impl TokenLocation {
    fn visit_tokens<R: RoutableRequest>(&self, request: &R, each: &mut dyn FnMut(&[u8])) {
        let mut token = |text: &[u8]| {
            let text = text.trim_ascii();
            if !text.is_empty() {
                each(text);
            }
        };
        match self {
            TokenLocation::Header(name, prefix) => request.header(name, &mut |value| {
                let start = value
                    .get(..prefix.len())
                    .filter(|start| start.eq_ignore_ascii_case(prefix.as_bytes()));
                if start.is_some() {
                    token(&value[prefix.len()..]);
                }
            }),
            TokenLocation::Parameter(wanted) => {
                let given = parameters(request.query().unwrap_or_default());
                given
                    .filter(|(_, name, _)| *name == wanted.as_bytes())
                    .for_each(|(.., value)| token(value));
            }
            TokenLocation::Cookie(wanted) => request.header("cookie", &mut |line| {
                cookies(line)
                    .filter(|(_, name, _)| *name == wanted.as_bytes())
                    .for_each(|(.., value)| token(value));
            }),
        }
    }

    /// Removes the token from the request.
    pub(super) fn strip<R: RoutableRequest>(&self, request: &R, changes: &mut RequestMutations) {
        match self {
            TokenLocation::Header(name, _) => changes.remove(name),
            TokenLocation::Parameter(wanted) => {
                // The removal of an earlier token may have changed the query already.
                let query = match changes.query.take() {
                    Some(changed) => changed.unwrap_or_default(),
                    None => request.query().unwrap_or_default().to_vec(),
                };
                let left: Vec<&[u8]> = parameters(&query)
                    .filter(|(_, name, _)| *name != wanted.as_bytes())
                    .map(|(part, ..)| part)
                    .collect();
                let left = left.join(&b'&');
                changes.query = Some((!left.is_empty()).then_some(left));
            }
            TokenLocation::Cookie(wanted) => {
                let mut left: Vec<Vec<u8>> = Vec::new();
                // The removal of an earlier token may have changed the cookies already.
                let before = changes.value("cookie").map(<[u8]>::to_vec);
                let mut keep = |line: &[u8]| {
                    let pairs = cookies(line)
                        .filter(|(pair, name, _)| !pair.is_empty() && *name != wanted.as_bytes());
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
