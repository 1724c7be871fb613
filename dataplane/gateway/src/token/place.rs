//! Where tokens are in a request: headers, query parameters, cookies; and how one is taken out of it. What a token says is not looked at.

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
