//! The filters of a route rule: changes of the requests that it matches, and of their responses. It
//! validates and applies nothing.
//!
//! Gateway API: `RequestHeaderModifier`, `ResponseHeaderModifier`, `URLRewrite`, `RequestRedirect`.
//! Istio: `headers`, `rewrite`, `redirect`, `directResponse`.

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
    /// Changes the path in place of `path`, which is then absent.
    pub path_regex: Option<RegexSubstitution>,
}

/// Replaces each text in the path that a regular expression matches (Envoy's `regex_rewrite`). The
/// query stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegexSubstitution {
    /// RE2 syntax. It may match any part of the path.
    pub pattern: String,
    /// Text that takes the place of each match. `\1` to `\9` stand for the groups of the match, `\0`
    /// for all of it, and `\\` for a backslash.
    pub substitution: String,
}

/// The response that the gateway sends itself to the requests of a rule. The response headers of
/// the rule's filters change it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteAnswer {
    Redirect(UrlRedirect),
    Direct(DirectResponse),
}

impl RouteAnswer {
    /// Returns the status of the response.
    pub fn status(&self) -> u16 {
        match self {
            RouteAnswer::Redirect(redirect) => redirect.status,
            RouteAnswer::Direct(direct) => direct.status,
        }
    }
}

/// A response that sends the client to another URL. What is not set stays as the client sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UrlRedirect {
    /// Status of the response, one of [`REDIRECT_STATUSES`].
    pub status: u16,
    pub scheme: Option<UrlScheme>,
    /// Host of the URL, without a port.
    pub host: Option<String>,
    pub port: RedirectPort,
    pub path: Option<PathRewrite>,
    /// Query that replaces the request's.
    pub query: Option<String>,
}

/// Statuses that a redirect may have.
pub const REDIRECT_STATUSES: [u16; 5] = [301, 302, 303, 307, 308];

/// The scheme of a URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UrlScheme {
    Http,
    Https,
}

impl UrlScheme {
    /// Returns the scheme as a URL writes it.
    pub fn text(self) -> &'static str {
        match self {
            UrlScheme::Http => "http",
            UrlScheme::Https => "https",
        }
    }

    /// Returns the port of a URL that names none.
    pub fn default_port(self) -> u16 {
        match self {
            UrlScheme::Http => 80,
            UrlScheme::Https => 443,
        }
    }

    /// Returns the scheme that this text names, in any case.
    pub fn of(text: &str) -> Option<Self> {
        [UrlScheme::Http, UrlScheme::Https]
            .into_iter()
            .find(|scheme| scheme.text().eq_ignore_ascii_case(text))
    }
}

/// The port in the URL of a redirect. The default port of the URL's scheme is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RedirectPort {
    /// The port that the request's `Host` names, if the redirect names no other host.
    OfHost,
    /// The port of the service that the client dialled.
    Dialled,
    /// The default port of the scheme.
    OfScheme,
    Number(u16),
}

/// A response with a fixed body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectResponse {
    /// Status of the response, from 200 to 599.
    pub status: u16,
    /// Empty for a status that has no body.
    pub body: Vec<u8>,
}

impl DirectResponse {
    /// Returns whether responses with this status have no body (RFC 9110 §6.4.1, §15.3.6).
    pub fn has_no_body(status: u16) -> bool {
        matches!(status, 204 | 205 | 304)
    }
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
