//! External authorization that one rule asks for: the filter `ExternalAuth` of Gateway API
//! (GEP-1494). Types only; the gateway calls the server.

use crate::ids::ServiceKey;

/// Maximum number of headers in each list of the filter (as in Gateway API).
pub const ROUTE_AUTHORIZER_HEADERS_MAX: usize = 64;
/// Maximum length of the prefix of paths, in bytes (as in Gateway API).
pub const ROUTE_AUTHORIZER_PATH_BYTES_MAX: usize = 1024;

/// A server that decides about each request of a rule, after the policies of the destination. A
/// request about which it gives no decision is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteAuthorizer {
    pub service: ServiceKey,
    pub port: u16,
    pub protocol: RouteAuthorizerProtocol,
    /// Lower-case names of the request headers that the server receives. An empty list means all
    /// with gRPC, and none but those that it always receives with HTTP.
    pub headers: Vec<String>,
    /// Size of the largest request body that the server receives; 0 sends none. A request with a
    /// larger body is refused.
    pub body_bytes: u32,
}

/// The protocol in which the gateway calls the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteAuthorizerProtocol {
    /// Envoy's `envoy.service.auth.v3.Authorization/Check`.
    Grpc,
    /// A request of the same method and path, which the server allows by status 200.
    Http {
        /// Text before the path; empty if there is none.
        path_prefix: String,
        /// Lower-case names of the headers of the server's response that the endpoint receives; an
        /// empty list means all.
        response_headers: Vec<String>,
    },
}
