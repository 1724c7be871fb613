//! Computes the precedence of matches, which decides between several that hold. All other code only
//! compares [`Precedence`] values.

use canal_model::ids::{Namespace, ObjectName};
use canal_model::policy::{Document, Metadata, ObjectKind};
use canal_model::program::{PathMatch, Precedence};

/// Class of rules of a mesh route; there are no fallbacks yet.
const CLASS_ROUTE: u8 = 0;

/// Returns the precedence of a match of an HTTPRoute.
///
/// Gateway API (v1.6.1, HTTPRouteRule.matches) orders by exact path, longest path, method, most
/// headers, and most query parameters. Ties are broken by the oldest object, then its name, then
/// the indexes of the rule and of the match.
///
/// Gateway API leaves regular expressions to the implementation. Here they come after exact paths
/// and before prefixes, because after a prefix `/` they would never be reached.
pub fn gateway_api(
    document: &Document,
    place: [usize; 2],
    conditions: &MatchSpecificity<'_>,
) -> Precedence {
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
        indexes: place.map(narrow),
    }
}

/// The parts of a match that Gateway API compares.
pub struct MatchSpecificity<'a> {
    pub path: &'a PathMatch,
    pub has_method: bool,
    pub headers: usize,
    pub query: usize,
}

/// Returns the precedence of a match of a GRPCRoute.
///
/// Gateway API (v1.7.0, GRPCRouteRule.matches) orders by the characters of the service, those of the
/// method, and the number of headers; ties are broken as those of HTTPRoutes are.
///
/// Gateway API leaves regular expressions to the implementation. Here they come after exact names,
/// as those of HTTPRoutes do, and before a match of any name.
pub fn grpc(
    document: &Document,
    place: [usize; 2],
    conditions: &GrpcMatchSpecificity<'_>,
) -> Precedence {
    let headers = u32::MAX - narrow(conditions.headers);
    Precedence {
        class: CLASS_ROUTE,
        specificity: [
            conditions.service.rank(),
            conditions.method.rank(),
            headers,
            0,
            0,
        ],
        created: created(document.object.metadata()),
        object: object(document),
        indexes: place.map(narrow),
    }
}

/// The parts of a match that Gateway API compares for gRPC requests.
pub struct GrpcMatchSpecificity<'a> {
    pub service: GrpcNameMatch<'a>,
    pub method: GrpcNameMatch<'a>,
    pub headers: usize,
}

/// A condition on the name of a gRPC service or method.
#[derive(Debug, Clone, Copy)]
pub enum GrpcNameMatch<'a> {
    Any,
    Exact(&'a str),
    Regex(&'a str),
}

impl GrpcNameMatch<'_> {
    /// Returns the inverted specificity.
    fn rank(self) -> u32 {
        // Names are shorter than this, so every exact one comes before every expression.
        const EXACT: usize = 1 << 24;
        u32::MAX
            - narrow(match self {
                Self::Any => 0,
                Self::Regex(pattern) => pattern.len(),
                Self::Exact(name) => EXACT + name.len(),
            })
    }
}

/// Returns the precedence of a match in a VirtualService. Istio tries rules in the order written,
/// and only one VirtualService routes a service.
pub fn istio(document: &Document, place: [usize; 2]) -> Precedence {
    Precedence {
        class: CLASS_ROUTE,
        specificity: [0; 5],
        created: 0,
        object: object(document),
        indexes: place.map(narrow),
    }
}

/// Where a match of a VirtualService stands to the first one of its object that holds for all
/// requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CatchAllOrder {
    Before,
    CatchAll,
    After,
}

/// Returns the precedence of a match of a VirtualService on a Gateway. Istio appends the rules of
/// the objects of a host, the oldest first, and sorts those that hold for all requests to the end.
/// Behind such a rule, no rule of the same object is ever reached.
pub fn istio_on_gateway(
    document: &Document,
    indexes: [u32; 2],
    order: CatchAllOrder,
) -> Precedence {
    Precedence {
        class: CLASS_ROUTE,
        specificity: [order as u32, 0, 0, 0, 0],
        created: created(document.object.metadata()),
        object: object(document),
        indexes,
    }
}

/// Returns the sort key of two objects in conflict, the winner first: by age, then by name. Objects
/// without a creation time are the oldest.
pub fn seniority(document: &Document) -> (u64, ObjectKind, &Namespace, &ObjectName) {
    let metadata = document.object.metadata();
    (
        created(metadata),
        document.object.kind(),
        &metadata.namespace,
        &metadata.name,
    )
}

/// Returns the sort key of two routes of different kinds in conflict, the winner first: by age, then
/// by `namespace/name` (Gateway API v1.7.0 GRPCRouteSpec.hostnames).
pub fn route_seniority(document: &Document) -> (u64, String, ObjectKind) {
    let metadata = document.object.metadata();
    let name = format!("{}/{}", metadata.namespace, metadata.name);
    (created(metadata), name, document.object.kind())
}

fn created(metadata: &Metadata) -> u64 {
    metadata.creation_timestamp.map_or(0, |at| at.0)
}

fn object(document: &Document) -> String {
    let metadata = document.object.metadata();
    format!(
        "{}/{}/{}",
        document.object.kind(),
        metadata.namespace,
        metadata.name
    )
}

fn narrow(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
