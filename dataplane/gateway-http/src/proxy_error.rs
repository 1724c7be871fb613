//! All reasons for which the gateway itself ends a request: status, response flag, name, and
//! whether a retry is safe.
//!
//! The table is exhaustive. Nothing here acts on an error. Start with [`ProxyError`].

use canal_authorization::AuthorizationDecision;
use canal_gateway_config::RouteReply;
use canal_gateway_config::jwt::TokenError;
use canal_h1::MessageRefusal;
use canal_model::route_faults::{ABORT_TEXT, AbortStatus};

/// Side that caused the error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorSide {
    Client,
    Gateway,
    Upstream,
}

impl ErrorSide {
    /// Returns the label `side` of `canal_gateway_refused_requests_total`.
    pub fn name(self) -> &'static str {
        match self {
            ErrorSide::Client => "client",
            ErrorSide::Gateway => "gateway",
            ErrorSide::Upstream => "upstream",
        }
    }
}

/// Conditions under which the same request may be sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetrySafety {
    /// The request must not be sent again.
    No,
    /// No byte of the request was sent, or the peer reported that it did not process the request.
    Unsent,
    /// No byte of the request reached the application, which had closed an idle connection. The
    /// endpoint counts as healthy.
    Undelivered,
    /// An idle connection failed before the first byte of the response. A retry is safe for
    /// idempotent requests without a body.
    Reused,
}

/// Policy that denied a request or connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyDenial {
    /// `namespace/name` of the policy; empty if no ALLOW policy matched.
    pub policy: String,
    /// Detail for logs, in Envoy's format.
    detail: String,
    undecided: bool,
}

impl PolicyDenial {
    /// Describes a decision other than allow.
    pub fn of(verdict: &AuthorizationDecision<'_>) -> Self {
        let name =
            |key: &canal_model::authorization::PolicyKey| format!("{}/{}", key.namespace, key.name);
        // The detail has the form of Envoy's RBAC filter in Istio, which log parsers know.
        let (policy, detail, undecided) = match verdict {
            AuthorizationDecision::Deny {
                policy: Some(key),
                rule,
            } => {
                let rule = rule.map_or_else(|| "broken".to_string(), |n| format!("rule[{n}]"));
                (
                    name(key),
                    format!(
                        "rbac_access_denied_matched_policy[ns[{}]-policy[{}]-{rule}]",
                        key.namespace, key.name
                    ),
                    false,
                )
            }
            AuthorizationDecision::Undecided { policy, attribute } => {
                let (namespace, attribute) =
                    (&policy.namespace, canal_authorization::name(attribute));
                (
                    name(policy),
                    format!(
                        "rbac_access_denied_undecided[ns[{namespace}]-policy[{}]-{attribute}]",
                        policy.name
                    ),
                    true,
                )
            }
            // No ALLOW policy matched. The other decisions do not get here: they deny nothing.
            _ => (
                String::new(),
                "rbac_access_denied_matched_policy[none]".into(),
                false,
            ),
        };
        Self {
            policy,
            detail,
            undecided,
        }
    }

    /// Returns the value of the counter's label `action`.
    pub fn action(&self) -> &'static str {
        if self.undecided { "undecided" } else { "deny" }
    }
}

/// Denial by an external authorizer: the response that the client gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtAuthzDenial {
    pub status: u16,
    pub headers: Vec<(String, Vec<u8>)>,
    pub body: String,
}

/// Reason why the gateway ended a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProxyError {
    /// The client's message violates HTTP.
    BadRequest(MessageRefusal),
    /// The client's HTTP/2 message is well formed, but cannot be served safely.
    BadHttp2(&'static str),
    /// CONNECT is not served as a request to a service.
    Method,
    /// The client did not send its request in time.
    RequestTimeout,
    /// The client left before the response was complete.
    ClientGone,
    /// Routes exist, but none matches.
    NoRoute,
    /// The request's host belongs to another listener of the port than the server name of its
    /// connection.
    Misdirected,
    /// The route itself is an error, because its source is broken.
    Route { status: u16, reason: String },
    /// No error: the rule answers the request itself.
    Answered(Box<RouteReply>),
    /// The rule injects an abort as a fault. `is_delayed`: it injected a delay before.
    Aborted {
        status: AbortStatus,
        is_delayed: bool,
    },
    /// The service or its port does not exist, or no longer exists.
    NoService,
    /// A security resource of the tenant is rejected or missing, so nothing of the tenant is
    /// served.
    TenantClosed,
    /// The service has no ready endpoint.
    NoEndpoint,
    /// A policy denies the request.
    Denied(Box<PolicyDenial>),
    /// A token in the request is invalid.
    Unauthenticated(TokenError),
    /// A policy or route reads the path, and this path is ambiguous.
    UnsafePath(&'static str),
    /// An external authorizer denied the request.
    Rejected(Box<ExtAuthzDenial>),
    /// An external authorizer gave no usable response.
    ExtAuthzFailed(&'static str),
    /// The tenant has reached its limit of requests in flight.
    TenantBusy,
    /// A Throttle admits no more requests now.
    Throttled,
    /// The worker has reached its limit of requests in flight.
    Overload,
    /// The worker has reached the tenant's limit of body bytes buffered for authorizers.
    TenantBodies,
    /// The worker has reached its limit of body bytes buffered for authorizers.
    Bodies,
    /// The body was not read on its other side, and the tenant holds more bytes for readers than it
    /// may.
    TenantBuffers,
    /// No connection to the endpoint could be established.
    Connect { why: String },
    /// The connection ended before the response did. `reused`: it was an idle connection, and no
    /// byte of the response had arrived.
    UpstreamClosed { reused: bool },
    /// The application had closed the idle connection before a byte of the request reached it, as
    /// its node reported.
    UpstreamUndelivered,
    /// The endpoint reported that it did not process the request.
    UpstreamRefused,
    /// The upstream reset the stream.
    UpstreamReset,
    /// The upstream's message violates HTTP.
    UpstreamProtocol(&'static str),
    /// The upstream sent more interim (1xx) responses than a request may have.
    InterimResponses(&'static str),
    /// The upstream did not respond, or stopped sending.
    UpstreamTimeout,
    /// The rule's time for the whole request has passed.
    RouteTimeout,
    /// The rule's time for one attempt has passed.
    AttemptTimeout,
    /// A response with this status, after which the rule sends the request again. It ends no
    /// request.
    RetriedResponse(u16),
    /// The gateway shuts down, and the request's time has run out.
    Draining,
}

impl ProxyError {
    /// Returns the status of the local reply.
    pub fn status(&self) -> u16 {
        match self {
            ProxyError::BadRequest(refusal) => refusal.status(),
            ProxyError::BadHttp2(_) | ProxyError::UnsafePath(_) => 400,
            ProxyError::Unauthenticated(_) => 401,
            ProxyError::Denied(_) | ProxyError::ExtAuthzFailed(_) => 403,
            ProxyError::Rejected(rejection) => rejection.status,
            ProxyError::Method => 405,
            ProxyError::RequestTimeout => 408,
            // This status is never sent; logs show it as nginx does.
            ProxyError::ClientGone => 499,
            ProxyError::NoRoute => 404,
            ProxyError::Misdirected => 421,
            ProxyError::Route { status, .. } => *status,
            ProxyError::Answered(reply) => reply.status,
            ProxyError::Aborted { status, .. } => status.http(),
            ProxyError::TenantBusy
            | ProxyError::TenantBodies
            | ProxyError::TenantBuffers
            | ProxyError::Throttled => 429,
            ProxyError::NoService
            | ProxyError::TenantClosed
            | ProxyError::NoEndpoint
            | ProxyError::Overload
            | ProxyError::Bodies => 503,
            ProxyError::Connect { .. } | ProxyError::UpstreamRefused | ProxyError::Draining => 503,
            ProxyError::UpstreamClosed { .. }
            | ProxyError::UpstreamUndelivered
            | ProxyError::UpstreamReset => 502,
            ProxyError::UpstreamProtocol(_) | ProxyError::InterimResponses(_) => 502,
            ProxyError::UpstreamTimeout | ProxyError::RouteTimeout | ProxyError::AttemptTimeout => {
                504
            }
            ProxyError::RetriedResponse(status) => *status,
        }
    }

    /// Returns Envoy's response flag, which dashboards use.
    pub fn flag(&self) -> ResponseFlag {
        match self {
            ProxyError::BadRequest(_)
            | ProxyError::BadHttp2(_)
            | ProxyError::Method
            | ProxyError::UnsafePath(_) => ResponseFlag::DownstreamProtocol,
            // Envoy has no flag for these errors; its response code details describe them.
            ProxyError::Answered(_) | ProxyError::Denied(_) | ProxyError::Unauthenticated(_) => {
                ResponseFlag::None
            }
            ProxyError::Aborted {
                is_delayed: true, ..
            } => ResponseFlag::DelayAndAbortInjected,
            ProxyError::Aborted { .. } => ResponseFlag::AbortInjected,
            ProxyError::Rejected(_) | ProxyError::ExtAuthzFailed(_) => ResponseFlag::Unauthorized,
            ProxyError::RequestTimeout => ResponseFlag::StreamIdle,
            ProxyError::ClientGone => ResponseFlag::DownstreamGone,
            ProxyError::NoRoute | ProxyError::Misdirected => ResponseFlag::NoRoute,
            ProxyError::Route { .. } => ResponseFlag::RouteRefused,
            ProxyError::NoService | ProxyError::TenantClosed => ResponseFlag::NoCluster,
            ProxyError::NoEndpoint => ResponseFlag::NoHealthy,
            ProxyError::TenantBusy
            | ProxyError::TenantBodies
            | ProxyError::TenantBuffers
            | ProxyError::Throttled => ResponseFlag::RateLimited,
            ProxyError::Overload | ProxyError::Bodies | ProxyError::Draining => {
                ResponseFlag::Overload
            }
            ProxyError::Connect { .. } => ResponseFlag::ConnectFailure,
            ProxyError::UpstreamClosed { .. } | ProxyError::UpstreamUndelivered => {
                ResponseFlag::UpstreamClosed
            }
            ProxyError::UpstreamRefused | ProxyError::UpstreamReset => ResponseFlag::UpstreamReset,
            ProxyError::UpstreamProtocol(_) | ProxyError::InterimResponses(_) => {
                ResponseFlag::UpstreamProtocol
            }
            ProxyError::UpstreamTimeout | ProxyError::RouteTimeout | ProxyError::AttemptTimeout => {
                ResponseFlag::UpstreamTimeout
            }
            // A retry follows, so this error ends no request.
            ProxyError::RetriedResponse(_) => ResponseFlag::None,
        }
    }

    /// Returns the label `reason` of `canal_gateway_refused_requests_total`.
    pub fn name(&self) -> &'static str {
        match self {
            ProxyError::BadRequest(refusal) => refusal.name(),
            ProxyError::BadHttp2(name) => name,
            ProxyError::Method => "method_not_served",
            ProxyError::RequestTimeout => "request_timeout",
            ProxyError::ClientGone => "client_gone",
            ProxyError::NoRoute => "no_route",
            ProxyError::Misdirected => "misdirected",
            ProxyError::Route { .. } => "route_refused",
            ProxyError::Answered(_) => "direct_response",
            ProxyError::Aborted { .. } => "fault_filter_abort",
            ProxyError::NoService => "no_service",
            ProxyError::TenantClosed => "tenant_closed",
            ProxyError::NoEndpoint => "no_endpoint",
            ProxyError::Denied(_) => "denied",
            ProxyError::Unauthenticated(_) => "unauthenticated",
            ProxyError::UnsafePath(_) => "unsafe_path",
            ProxyError::Rejected(_) => "authorizer_denied",
            ProxyError::ExtAuthzFailed(_) => "authorizer_failed",
            ProxyError::TenantBusy => "tenant_busy",
            ProxyError::Throttled => "throttled",
            ProxyError::Overload => "overload",
            ProxyError::TenantBodies => "tenant_body_bytes",
            ProxyError::TenantBuffers => "tenant_buffer_bytes",
            ProxyError::Bodies => "body_bytes",
            ProxyError::Connect { .. } => "connect_failed",
            ProxyError::UpstreamClosed { .. } => "upstream_closed",
            ProxyError::UpstreamUndelivered => "upstream_undelivered",
            ProxyError::UpstreamRefused => "upstream_refused",
            ProxyError::UpstreamReset => "upstream_reset",
            ProxyError::UpstreamProtocol(_) => "upstream_protocol",
            ProxyError::InterimResponses(_) => "interim_responses",
            ProxyError::UpstreamTimeout => "upstream_timeout",
            ProxyError::RouteTimeout => "route_timeout",
            ProxyError::AttemptTimeout => "attempt_timeout",
            ProxyError::RetriedResponse(_) => "retriable_response",
            ProxyError::Draining => "draining",
        }
    }

    /// Returns the detail for the log, in addition to the flag.
    pub fn detail(&self) -> &str {
        match self {
            ProxyError::BadRequest(refusal) => refusal.name(),
            ProxyError::Route { reason, .. } => reason,
            ProxyError::Connect { why } => why,
            ProxyError::UpstreamProtocol(name)
            | ProxyError::InterimResponses(name)
            | ProxyError::BadHttp2(name) => name,
            ProxyError::UnsafePath(name) | ProxyError::ExtAuthzFailed(name) => name,
            ProxyError::Denied(denial) => &denial.detail,
            ProxyError::Unauthenticated(bad) => bad.name(),
            ProxyError::Rejected(_) => "ext_authz_denied",
            ProxyError::Answered(reply) => reply.detail,
            _ => self.name(),
        }
    }

    /// Returns the body of the local reply: a sentence that reveals nothing about the mesh.
    pub fn text(&self) -> &str {
        match self {
            ProxyError::BadRequest(refusal) => refusal.text(),
            ProxyError::BadHttp2(_) => "the request is malformed",
            ProxyError::Method => "this method is not served here",
            ProxyError::RequestTimeout => "the request did not arrive in time",
            ProxyError::ClientGone => "",
            ProxyError::NoRoute => "no route matches this request",
            ProxyError::Misdirected => "this host needs a connection of its own",
            ProxyError::Route { .. } => "the route for this request is not usable",
            // Bytes that are no text make no message for gRPC clients.
            ProxyError::Answered(reply) => std::str::from_utf8(&reply.body).unwrap_or_default(),
            ProxyError::Aborted { .. } => ABORT_TEXT,
            ProxyError::NoService => "no such service",
            ProxyError::TenantClosed => "the configuration of this service is incomplete",
            ProxyError::NoEndpoint => "no endpoint of this service is ready",
            ProxyError::Denied(_) | ProxyError::ExtAuthzFailed(_) => "RBAC: access denied",
            ProxyError::Unauthenticated(bad) => bad.text(),
            ProxyError::UnsafePath(_) => "the path is ambiguous",
            ProxyError::Rejected(rejection) => &rejection.body,
            ProxyError::TenantBusy => "too many requests in flight",
            ProxyError::TenantBodies => "too many bodies wait for authorization",
            ProxyError::TenantBuffers => "too many bodies wait for their readers",
            ProxyError::Overload | ProxyError::Bodies => "the gateway is overloaded",
            ProxyError::Throttled => "too many requests",
            ProxyError::Draining => "the gateway is shutting down",
            ProxyError::Connect { .. } | ProxyError::UpstreamRefused => {
                "the service could not be reached"
            }
            ProxyError::UpstreamClosed { .. }
            | ProxyError::UpstreamUndelivered
            | ProxyError::UpstreamReset => "the service ended the connection without an answer",
            ProxyError::UpstreamProtocol(_) | ProxyError::InterimResponses(_) => {
                "the service's answer was malformed"
            }
            ProxyError::UpstreamTimeout
            | ProxyError::RouteTimeout
            | ProxyError::AttemptTimeout
            | ProxyError::RetriedResponse(_) => "the service did not answer in time",
        }
    }

    /// Returns the side that caused the error.
    pub fn side(&self) -> ErrorSide {
        match self {
            ProxyError::BadRequest(_)
            | ProxyError::BadHttp2(_)
            | ProxyError::Method
            | ProxyError::RequestTimeout
            | ProxyError::ClientGone
            | ProxyError::Denied(_)
            | ProxyError::Unauthenticated(_)
            | ProxyError::UnsafePath(_)
            | ProxyError::Misdirected
            | ProxyError::Rejected(_) => ErrorSide::Client,
            ProxyError::NoRoute
            | ProxyError::Route { .. }
            | ProxyError::Answered(_)
            | ProxyError::Aborted { .. }
            | ProxyError::NoService
            | ProxyError::TenantClosed
            | ProxyError::NoEndpoint
            | ProxyError::ExtAuthzFailed(_)
            | ProxyError::TenantBusy
            | ProxyError::Throttled
            | ProxyError::Overload
            | ProxyError::TenantBodies
            | ProxyError::TenantBuffers
            | ProxyError::Bodies
            | ProxyError::Draining => ErrorSide::Gateway,
            ProxyError::Connect { .. }
            | ProxyError::UpstreamClosed { .. }
            | ProxyError::UpstreamUndelivered
            | ProxyError::UpstreamRefused
            | ProxyError::UpstreamReset
            | ProxyError::UpstreamProtocol(_)
            | ProxyError::InterimResponses(_)
            | ProxyError::UpstreamTimeout
            | ProxyError::RouteTimeout
            | ProxyError::AttemptTimeout
            | ProxyError::RetriedResponse(_) => ErrorSide::Upstream,
        }
    }

    /// Returns whether, and when, a retry is safe; see [`RetrySafety`].
    #[inline]
    pub fn retry(&self) -> RetrySafety {
        match self {
            ProxyError::Connect { .. } | ProxyError::UpstreamRefused => RetrySafety::Unsent,
            ProxyError::UpstreamUndelivered => RetrySafety::Undelivered,
            ProxyError::UpstreamClosed { reused: true } => RetrySafety::Reused,
            _ => RetrySafety::No,
        }
    }

    /// Returns the gRPC status for gRPC clients (grpc/doc/http-grpc-status-mapping.md). Limits
    /// differ from that mapping: they have a status of their own.
    pub fn grpc_status(&self) -> u8 {
        if matches!(self, ProxyError::TenantBusy | ProxyError::Throttled) {
            return 8;
        }
        if let ProxyError::Aborted { status, .. } = self {
            return status.grpc();
        }
        match self.status() {
            400 | 431 => 13,
            401 => 16,
            403 => 7,
            404 | 405 => 12,
            408 | 504 => 4,
            429 | 502 | 503 => 14,
            _ => 2,
        }
    }
}

/// Response flags of Envoy that the gateway uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum ResponseFlag {
    /// No flag, written as `-`.
    #[default]
    None,
    DownstreamProtocol,
    DownstreamGone,
    StreamIdle,
    NoRoute,
    RouteRefused,
    NoCluster,
    NoHealthy,
    RateLimited,
    /// An external authorizer denied the request or failed.
    Unauthorized,
    Overload,
    ConnectFailure,
    UpstreamClosed,
    UpstreamReset,
    UpstreamProtocol,
    UpstreamTimeout,
    /// A fault of the rule delayed the request, and nothing went wrong after that.
    DelayInjected,
    AbortInjected,
    DelayAndAbortInjected,
}

impl ResponseFlag {
    pub fn text(self) -> &'static str {
        match self {
            ResponseFlag::None => "-",
            ResponseFlag::DownstreamProtocol => "DPE",
            ResponseFlag::DownstreamGone => "DC",
            ResponseFlag::StreamIdle => "SI",
            ResponseFlag::NoRoute => "NR",
            // Not an Envoy flag: Envoy has none for a route that can only respond with an error.
            ResponseFlag::RouteRefused => "RR",
            ResponseFlag::NoCluster => "NC",
            ResponseFlag::NoHealthy => "UH",
            ResponseFlag::RateLimited => "RL",
            ResponseFlag::Unauthorized => "UAEX",
            ResponseFlag::Overload => "OM",
            ResponseFlag::ConnectFailure => "UF",
            ResponseFlag::UpstreamClosed => "UC",
            ResponseFlag::UpstreamReset => "UR",
            ResponseFlag::UpstreamProtocol => "UPE",
            ResponseFlag::UpstreamTimeout => "UT",
            ResponseFlag::DelayInjected => "DI",
            ResponseFlag::AbortInjected => "FI",
            ResponseFlag::DelayAndAbortInjected => "DI,FI",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An error, whether the request may be retried, the status, the response flag, and the
    /// responsible side.
    type ErrorCase = (ProxyError, RetrySafety, u16, &'static str, ErrorSide);

    /// 503 says that the request was not sent, 502 that the exchange failed after it was, and 504
    /// that the endpoint was late.
    fn upstream_errors() -> Vec<ErrorCase> {
        vec![
            (
                ProxyError::Connect { why: String::new() },
                RetrySafety::Unsent,
                503,
                "UF",
                ErrorSide::Upstream,
            ),
            (
                ProxyError::UpstreamRefused,
                RetrySafety::Unsent,
                503,
                "UR",
                ErrorSide::Upstream,
            ),
            (
                ProxyError::UpstreamClosed { reused: true },
                RetrySafety::Reused,
                502,
                "UC",
                ErrorSide::Upstream,
            ),
            (
                ProxyError::UpstreamUndelivered,
                RetrySafety::Undelivered,
                502,
                "UC",
                ErrorSide::Upstream,
            ),
            (
                ProxyError::UpstreamClosed { reused: false },
                RetrySafety::No,
                502,
                "UC",
                ErrorSide::Upstream,
            ),
            (
                ProxyError::UpstreamTimeout,
                RetrySafety::No,
                504,
                "UT",
                ErrorSide::Upstream,
            ),
            (
                ProxyError::RouteTimeout,
                RetrySafety::No,
                504,
                "UT",
                ErrorSide::Upstream,
            ),
            (
                ProxyError::AttemptTimeout,
                RetrySafety::No,
                504,
                "UT",
                ErrorSide::Upstream,
            ),
            (
                ProxyError::UpstreamReset,
                RetrySafety::No,
                502,
                "UR",
                ErrorSide::Upstream,
            ),
            (
                ProxyError::InterimResponses("too_many_interim_responses"),
                RetrySafety::No,
                502,
                "UPE",
                ErrorSide::Upstream,
            ),
        ]
    }

    fn client_and_gateway_errors() -> Vec<ErrorCase> {
        vec![
            (
                ProxyError::NoRoute,
                RetrySafety::No,
                404,
                "NR",
                ErrorSide::Gateway,
            ),
            (
                ProxyError::TenantBusy,
                RetrySafety::No,
                429,
                "RL",
                ErrorSide::Gateway,
            ),
            (
                ProxyError::Throttled,
                RetrySafety::No,
                429,
                "RL",
                ErrorSide::Gateway,
            ),
            (
                ProxyError::Denied(Box::new(PolicyDenial::of(&AuthorizationDecision::Deny {
                    policy: None,
                    rule: None,
                }))),
                RetrySafety::No,
                403,
                "-",
                ErrorSide::Client,
            ),
            (
                ProxyError::Unauthenticated(TokenError::Expired),
                RetrySafety::No,
                401,
                "-",
                ErrorSide::Client,
            ),
            (
                ProxyError::UnsafePath("path_above_root"),
                RetrySafety::No,
                400,
                "DPE",
                ErrorSide::Client,
            ),
            (
                ProxyError::ExtAuthzFailed("authorizer_timeout"),
                RetrySafety::No,
                403,
                "UAEX",
                ErrorSide::Gateway,
            ),
            (
                ProxyError::BadRequest(MessageRefusal::HeadTooLarge),
                RetrySafety::No,
                431,
                "DPE",
                ErrorSide::Client,
            ),
            (
                ProxyError::ClientGone,
                RetrySafety::No,
                499,
                "DC",
                ErrorSide::Client,
            ),
        ]
    }

    #[test]
    fn only_surely_unprocessed_requests_are_retried() {
        let cases = upstream_errors()
            .into_iter()
            .chain(client_and_gateway_errors());
        for (fault, retry, status, flag, side) in cases {
            assert_eq!(
                (
                    fault.retry(),
                    fault.status(),
                    fault.flag().text(),
                    fault.side()
                ),
                (retry, status, flag, side),
                "{fault:?}"
            );
        }
    }
}
