//! Which match wins when several hold. The only place that knows it; everyone else compares [`Precedence`].

use canal_model::ids::{Namespace, ObjectName};
use canal_model::policy::{Document, Metadata, ObjectKind};
use canal_model::program::{PathMatch, Precedence};

/// Rules of a mesh route; there are no fallbacks yet.
const CLASS_ROUTE: u8 = 0;

/// Gateway API (v1.6.1 HTTPRouteRule.matches): exact path, longest path, method, most headers, most query parameters; then the
/// oldest object, then its name, then the place of the rule and of the match.
///
/// Gateway API leaves regular expressions to the implementation: here they come after exact paths and before prefixes, since
/// behind a prefix `/` they would never be reached.
pub(crate) fn gateway_api(document: &Document, place: [usize; 2], conditions: &Conditions<'_>) -> Precedence {
    let (kind, length) = match conditions.path {
        PathMatch::Exact(path) => (0, path.len()),
        PathMatch::Regex(path) => (1, path.len()),
        PathMatch::ElementPrefix(path) | PathMatch::StringPrefix(path) => (2, path.len()),
    };
    let more_first = |count: usize| u32::MAX - narrow(count);
    Precedence {
        class: CLASS_ROUTE,
        specificity: [
            kind,
            more_first(length),
            u32::from(!conditions.has_method),
            more_first(conditions.headers),
            more_first(conditions.query),
        ],
        created: created(document.object.metadata()),
        object: object(document),
        place: place.map(narrow),
    }
}

/// What Gateway API compares of a match.
pub(crate) struct Conditions<'a> {
    pub(crate) path: &'a PathMatch,
    pub(crate) has_method: bool,
    pub(crate) headers: usize,
    pub(crate) query: usize,
}

/// Istio: a VirtualService's rules in the order written, and only one VirtualService speaks for a service.
pub(crate) fn istio(document: &Document, place: [usize; 2]) -> Precedence {
    Precedence { class: CLASS_ROUTE, specificity: [0; 5], created: 0, object: object(document), place: place.map(narrow) }
}

/// Who is the elder of two objects in conflict, smaller first: age, then name. Objects that do not tell their age are the oldest.
pub(crate) fn seniority(document: &Document) -> (u64, ObjectKind, &Namespace, &ObjectName) {
    let metadata = document.object.metadata();
    (created(metadata), document.object.kind(), &metadata.namespace, &metadata.name)
}

fn created(metadata: &Metadata) -> u64 {
    metadata.creation_timestamp.map_or(0, |at| at.0)
}

fn object(document: &Document) -> String {
    let metadata = document.object.metadata();
    format!("{}/{}/{}", document.object.kind(), metadata.namespace, metadata.name)
}

fn narrow(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
