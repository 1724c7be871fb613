//! The filters of a route rule: changes of the requests that it matches, and of their responses. It
//! validates and applies nothing.
//!
//! Gateway API: `RequestHeaderModifier`, `ResponseHeaderModifier`, `URLRewrite`. Istio: `headers`,
//! `rewrite`.

/// Headers that the gateway sets itself, or that frame a message or manage a connection. No route,
/// policy or authorizer changes them in a request.
pub const PROTECTED_REQUEST_HEADERS: [&str; 18] = [
    "host",
    "connection",
    "content-length",
    "expect",
    "http2-settings",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authentication-info",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-forwarded-client-cert",
    "x-forwarded-for",
    "x-forwarded-proto",
    "x-request-id",
];

/// Headers that frame a response or manage its connection. No route changes them.
pub const PROTECTED_RESPONSE_HEADERS: [&str; 13] = [
    "connection",
    "content-length",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authentication-info",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Changes that a rule makes to requests on their way to an endpoint, after authorization, and to
/// the endpoint's responses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RouteFilters {
    pub request_headers: HeaderModifier,
    pub response_headers: HeaderModifier,
    pub rewrite: UrlRewrite,
}

impl RouteFilters {
    /// Returns whether the filters change nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Changes of headers. Removals come first, then `set`, then `add`. Names are in lower case, and
/// each list has a name at most once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HeaderModifier {
    /// Headers that get this as their only value.
    pub set: Vec<(String, String)>,
    /// Headers that get one more value.
    pub add: Vec<(String, String)>,
    pub remove: Vec<String>,
}

impl HeaderModifier {
    /// Returns whether no header is changed.
    pub fn is_empty(&self) -> bool {
        self.set.is_empty() && self.add.is_empty() && self.remove.is_empty()
    }
}

/// Changes of the URL that the endpoint receives.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UrlRewrite {
    /// New host, with a port if one is written.
    pub host: Option<String>,
    pub path: Option<PathRewrite>,
}

/// Change of the path. The query stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathRewrite {
    /// The whole path becomes this one.
    Full(String),
    /// The prefix that the match names becomes this text. If the match names no prefix, the whole
    /// path does.
    Prefix(String),
}
