//! Cross-origin resource sharing of a rule: the origins whose scripts may read responses, and what
//! the gateway answers to preflights. It validates and applies nothing.
//!
//! Gateway API: filter `CORS` (GEP-1767). Istio: `corsPolicy`, whose meaning is that of Envoy's CORS
//! filter.

use crate::route_filters::UrlScheme;

/// Cross-origin resource sharing of the requests that a rule matches.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CorsPolicy {
    /// Origins that are allowed; an empty list allows none.
    pub origins: Vec<OriginMatch>,
    pub methods: CorsList,
    pub headers: CorsList,
    /// Value of `access-control-expose-headers`; `None` sends none.
    pub exposed: Option<String>,
    /// Value of `access-control-max-age`, in seconds.
    pub max_age: Option<u64>,
    /// True if scripts may send credentials.
    pub credentials: bool,
    pub dialect: CorsDialect,
}

/// A condition on the header `origin`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum OriginMatch {
    Any,
    Exact(String),
    Prefix(String),
    /// The whole origin must match (RE2 syntax).
    Regex(String),
    /// An origin with this scheme, host and port, compared in lower case. The port of an origin that
    /// names none is the default one of its scheme.
    Host {
        scheme: UrlScheme,
        host: OriginHost,
        port: u16,
    },
}

/// The hosts of an origin, in lower case.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum OriginHost {
    Any,
    Exact(String),
    /// `*.example.com` is stored as `.example.com`: one or more labels precede it.
    Suffix(String),
}

/// The methods or headers that a preflight allows.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub enum CorsList {
    /// The response does not name any.
    #[default]
    Unnamed,
    /// The response repeats what the preflight asks for.
    Requested,
    /// The response names these, separated by commas.
    Listed(String),
}

/// The API that defines what happens to preflights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CorsDialect {
    /// The gateway answers every preflight; without an allowed origin the response has no
    /// cross-origin header. The response names exposed headers too.
    #[default]
    GatewayApi,
    /// Preflights of origins that are not allowed are forwarded (Istio's default).
    IstioForward,
    /// The gateway answers every preflight; without an allowed origin the response does not name
    /// the origin.
    IstioIgnore,
}

impl CorsDialect {
    /// All dialects, in the order of their numbers on the wire.
    pub const ALL: [Self; 3] = [Self::GatewayApi, Self::IstioForward, Self::IstioIgnore];
}

impl CorsList {
    /// Returns the value of a header that repeats nothing of a request; a wildcard is one value.
    pub fn into_header_value(self) -> Option<String> {
        match self {
            CorsList::Unnamed => None,
            CorsList::Requested => Some("*".to_owned()),
            CorsList::Listed(names) => Some(names),
        }
    }
}
