//! External authorization as HTTPRoutes write it (GEP-1494). The structs mirror the YAML; the
//! compiler validates and interprets them.

use serde::Deserialize;

use super::gateway_api::BackendRef;

/// A filter of an HTTPRoute's rule that lets a server decide about requests.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HttpExternalAuthFilter {
    /// The protocol of the server: `HTTP` or `GRPC`.
    #[serde(default)]
    pub protocol: String,
    pub backend_ref: BackendRef,
    #[serde(default)]
    pub grpc: Option<GrpcAuthConfig>,
    #[serde(default)]
    pub http: Option<HttpAuthConfig>,
    #[serde(default)]
    pub forward_body: Option<ForwardBodyConfig>,
}

/// What a server receives over gRPC.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GrpcAuthConfig {
    /// Headers of the request that the server receives; an empty list means all.
    pub allowed_headers: Vec<String>,
}

/// What a server receives over HTTP, and which headers of its answer the backend receives.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpAuthConfig {
    /// Prefix of the paths that the server receives.
    pub path: String,
    /// Headers of the request that the server receives beside `authorization`.
    pub allowed_headers: Vec<String>,
    /// Headers of the answer that the backend receives; an empty list means all.
    pub allowed_response_headers: Vec<String>,
}

/// How much of a request's body the server receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ForwardBodyConfig {
    /// Size of the largest body, in bytes; 0 sends none.
    pub max_size: i64,
}
