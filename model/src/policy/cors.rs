//! Cross-origin resource sharing as HTTPRoutes (`gateway.networking.k8s.io`) and VirtualServices
//! (`networking.istio.io`) write it. The structs mirror the YAML; the compiler validates and
//! interprets them.

use serde::Deserialize;

use super::attempts::IstioDuration;
use super::istio::StringMatch;

/// A filter of an HTTPRoute's rule for cross-origin requests (GEP-1767).
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpCorsFilter {
    /// Origins as `https://host:port`, with `*` for a host or for labels at its beginning; or only
    /// `*`.
    pub allow_origins: Vec<String>,
    pub allow_credentials: Option<bool>,
    pub allow_methods: Vec<String>,
    pub allow_headers: Vec<String>,
    pub expose_headers: Vec<String>,
    /// Seconds for which clients may keep the response to a preflight; `None` means 5.
    pub max_age: Option<i64>,
}

/// Cross-origin requests of a VirtualService's rule.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CorsPolicy {
    /// The deprecated form of `allow_origins`: exact origins, or `*`.
    pub allow_origin: Vec<String>,
    pub allow_origins: Vec<StringMatch>,
    pub allow_methods: Vec<String>,
    pub allow_headers: Vec<String>,
    pub expose_headers: Vec<String>,
    pub max_age: Option<IstioDuration>,
    pub allow_credentials: Option<bool>,
    /// What happens to preflights of other origins: `UNSPECIFIED`, `FORWARD` or `IGNORE`.
    pub unmatched_preflights: Option<String>,
}
