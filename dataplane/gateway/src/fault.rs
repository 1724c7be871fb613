//! Every reason for which the gateway itself ends a request: status, response flag, name, and whether another endpoint may be tried.
//! One exhaustive table; nothing here acts.

use canal_guard::Verdict;
use canal_h1::Refusal;

use crate::token::BadToken;

/// Where the fault lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Gateway,
    Upstream,
}

impl Side {
    /// The label `side` of `canal_gateway_refused_requests_total`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Side::Client => "client",
            Side::Gateway => "gateway",
            Side::Upstream => "upstream",
        }
    }
}

/// Whether the same request may be sent to another endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retry {
    No,
    /// Not a byte of it was sent, or the peer said it was not processed.
    Unsent,
    /// A kept connection died before the first byte of the answer: safe for idempotent requests without a body.
    Reused,
}

/// Which policy said no.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Denial {
    /// `namespace/name`; empty where no ALLOW policy matched.
    pub(crate) policy: String,
    /// In Envoy's words.
    detail: String,
    undecided: bool,
}

impl Denial {
    /// Of a verdict that is not to allow.
    pub(crate) fn of(verdict: &Verdict<'_>) -> Self {
        let name = |key: &canal_model::authorization::PolicyKey| format!("{}/{}", key.namespace, key.name);
        let (policy, detail, undecided) = match verdict {
            Verdict::Deny { policy: Some(key), rule } => {
                let rule = rule.map_or_else(|| "broken".to_string(), |n| format!("rule[{n}]"));
                (name(key), format!("rbac_access_denied_matched_policy[ns[{}]-policy[{}]-{rule}]", key.namespace, key.name), false)
            }
            Verdict::Undecided { policy, attribute } => {
                let (namespace, attribute) = (&policy.namespace, canal_guard::name(attribute));
                (name(policy), format!("rbac_access_denied_undecided[ns[{namespace}]-policy[{}]-{attribute}]", policy.name), true)
            }
            _ => (String::new(), "rbac_access_denied_matched_policy[none]".into(), false),
        };
        Self { policy, detail, undecided }
    }

    /// The counter's label.
    pub(crate) fn action(&self) -> &'static str {
        if self.undecided { "undecided" } else { "deny" }
    }
}

/// An external authorizer's no: what the client is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rejection {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) body: String,
}

/// Why the gateway ended a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The client's message breaks HTTP.
    BadRequest(Refusal),
    /// The client's HTTP/2 message is well formed but cannot be served safely.
    BadHttp2(&'static str),
    /// CONNECT is not served as a request to a service.
    Method,
    /// The client did not send its request in time.
    RequestTimeout,
    /// The client went away.
    ClientGone,
    /// Routes exist and none matches.
    NoRoute,
    /// A route's own answer: its source was broken.
    Route { status: u16, reason: String },
    /// The service or its port is not known (any more).
    NoService,
    /// A security resource of the tenant is refused or missing: nothing of the tenant is served.
    TenantClosed,
    /// The service has no ready endpoint.
    NoEndpoint,
    /// A policy forbids it.
    Denied(Box<Denial>),
    /// A token is not valid.
    Unauthenticated(BadToken),
    /// A policy looks at the path, and this one can be read in two ways.
    UnsafePath(&'static str),
    /// An external authorizer said no.
    Rejected(Box<Rejection>),
    /// An external authorizer did not say anything that can be understood.
    Unasked(&'static str),
    /// The tenant has as many requests in flight as it may.
    TenantBusy,
    /// A Throttle lets no more requests through now.
    Throttled,
    /// The worker has as many requests in flight as it may.
    Overload,
    /// The worker holds as many bytes of the tenant's bodies for authorizers as it may.
    TenantBodies,
    /// The worker holds as many bytes of bodies for authorizers as it may.
    Bodies,
    /// No connection to the endpoint came up.
    Connect { why: String },
    /// The connection ended before the answer did; `reused`: one that was kept, before the answer's first byte.
    UpstreamClosed { reused: bool },
    /// The endpoint said that it did not process the request.
    UpstreamRefused,
    /// The upstream reset the stream.
    UpstreamReset,
    /// The upstream's message breaks HTTP.
    UpstreamProtocol(&'static str),
    /// The upstream sent more interim (1xx) responses than a request may have.
    InterimResponses(&'static str),
    /// The upstream did not answer or went silent.
    UpstreamTimeout,
    /// The gateway ends and the request had its time.
    Draining,
}

impl Fault {
    /// The status of the gateway's own answer.
    pub(crate) fn status(&self) -> u16 {
        match self {
            Fault::BadRequest(refusal) => refusal.status(),
            Fault::BadHttp2(_) | Fault::UnsafePath(_) => 400,
            Fault::Unauthenticated(_) => 401,
            Fault::Denied(_) | Fault::Unasked(_) => 403,
            Fault::Rejected(rejection) => rejection.status,
            Fault::Method => 405,
            Fault::RequestTimeout => 408,
            // Never sent; nginx's number for logs.
            Fault::ClientGone => 499,
            Fault::NoRoute => 404,
            Fault::Route { status, .. } => *status,
            Fault::TenantBusy | Fault::TenantBodies | Fault::Throttled => 429,
            Fault::NoService | Fault::TenantClosed | Fault::NoEndpoint | Fault::Overload | Fault::Bodies => 503,
            Fault::Connect { .. } | Fault::UpstreamRefused | Fault::Draining => 503,
            Fault::UpstreamClosed { .. } | Fault::UpstreamReset | Fault::UpstreamProtocol(_) | Fault::InterimResponses(_) => 502,
            Fault::UpstreamTimeout => 504,
        }
    }

    /// Envoy's response flag, as dashboards know it.
    pub(crate) fn flag(&self) -> Flag {
        match self {
            Fault::BadRequest(_) | Fault::BadHttp2(_) | Fault::Method | Fault::UnsafePath(_) => Flag::DownstreamProtocol,
            // Envoy has no flag for these; its details tell them.
            Fault::Denied(_) | Fault::Unauthenticated(_) => Flag::None,
            Fault::Rejected(_) | Fault::Unasked(_) => Flag::Unauthorized,
            Fault::RequestTimeout => Flag::StreamIdle,
            Fault::ClientGone => Flag::DownstreamGone,
            Fault::NoRoute => Flag::NoRoute,
            Fault::Route { .. } => Flag::RouteRefused,
            Fault::NoService | Fault::TenantClosed => Flag::NoCluster,
            Fault::NoEndpoint => Flag::NoHealthy,
            Fault::TenantBusy | Fault::TenantBodies | Fault::Throttled => Flag::RateLimited,
            Fault::Overload | Fault::Bodies | Fault::Draining => Flag::Overload,
            Fault::Connect { .. } => Flag::ConnectFailure,
            Fault::UpstreamClosed { .. } => Flag::UpstreamClosed,
            Fault::UpstreamRefused | Fault::UpstreamReset => Flag::UpstreamReset,
            Fault::UpstreamProtocol(_) | Fault::InterimResponses(_) => Flag::UpstreamProtocol,
            Fault::UpstreamTimeout => Flag::UpstreamTimeout,
        }
    }

    /// The label `reason` of `canal_gateway_refused_requests_total`.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Fault::BadRequest(refusal) => refusal.name(),
            Fault::BadHttp2(name) => name,
            Fault::Method => "method_not_served",
            Fault::RequestTimeout => "request_timeout",
            Fault::ClientGone => "client_gone",
            Fault::NoRoute => "no_route",
            Fault::Route { .. } => "route_refused",
            Fault::NoService => "no_service",
            Fault::TenantClosed => "tenant_closed",
            Fault::NoEndpoint => "no_endpoint",
            Fault::Denied(_) => "denied",
            Fault::Unauthenticated(_) => "unauthenticated",
            Fault::UnsafePath(_) => "unsafe_path",
            Fault::Rejected(_) => "authorizer_denied",
            Fault::Unasked(_) => "authorizer_failed",
            Fault::TenantBusy => "tenant_busy",
            Fault::Throttled => "throttled",
            Fault::Overload => "overload",
            Fault::TenantBodies => "tenant_body_bytes",
            Fault::Bodies => "body_bytes",
            Fault::Connect { .. } => "connect_failed",
            Fault::UpstreamClosed { .. } => "upstream_closed",
            Fault::UpstreamRefused => "upstream_refused",
            Fault::UpstreamReset => "upstream_reset",
            Fault::UpstreamProtocol(_) => "upstream_protocol",
            Fault::InterimResponses(_) => "interim_responses",
            Fault::UpstreamTimeout => "upstream_timeout",
            Fault::Draining => "draining",
        }
    }

    /// What the log says beside the flag.
    pub(crate) fn detail(&self) -> &str {
        match self {
            Fault::BadRequest(refusal) => refusal.name(),
            Fault::Route { reason, .. } => reason,
            Fault::Connect { why } => why,
            Fault::UpstreamProtocol(name) | Fault::InterimResponses(name) | Fault::BadHttp2(name) => name,
            Fault::UnsafePath(name) | Fault::Unasked(name) => name,
            Fault::Denied(denial) => &denial.detail,
            Fault::Unauthenticated(bad) => bad.name(),
            Fault::Rejected(_) => "ext_authz_denied",
            _ => self.name(),
        }
    }

    /// The body of the answer: a sentence that tells a client nothing about the mesh's inside.
    pub(crate) fn text(&self) -> &str {
        match self {
            Fault::BadRequest(refusal) => refusal.text(),
            Fault::BadHttp2(_) => "the request is malformed",
            Fault::Method => "this method is not served here",
            Fault::RequestTimeout => "the request did not arrive in time",
            Fault::ClientGone => "",
            Fault::NoRoute => "no route matches this request",
            Fault::Route { .. } => "the route for this request is not usable",
            Fault::NoService => "no such service",
            Fault::TenantClosed => "the configuration of this service is not complete",
            Fault::NoEndpoint => "no endpoint of this service is ready",
            Fault::Denied(_) | Fault::Unasked(_) => "RBAC: access denied",
            Fault::Unauthenticated(bad) => bad.text(),
            Fault::UnsafePath(_) => "the path is ambiguous",
            Fault::Rejected(rejection) => &rejection.body,
            Fault::TenantBusy => "too many requests in flight",
            Fault::TenantBodies => "too many bodies wait for authorization",
            Fault::Overload | Fault::Bodies => "the gateway is overloaded",
            Fault::Throttled => "too many requests",
            Fault::Draining => "the gateway is shutting down",
            Fault::Connect { .. } | Fault::UpstreamRefused => "the service could not be reached",
            Fault::UpstreamClosed { .. } | Fault::UpstreamReset => "the service ended the connection without an answer",
            Fault::UpstreamProtocol(_) | Fault::InterimResponses(_) => "the service's answer was malformed",
            Fault::UpstreamTimeout => "the service did not answer in time",
        }
    }

    /// Whose fault it is.
    pub(crate) fn side(&self) -> Side {
        match self {
            Fault::BadRequest(_)
            | Fault::BadHttp2(_)
            | Fault::Method
            | Fault::RequestTimeout
            | Fault::ClientGone
            | Fault::Denied(_)
            | Fault::Unauthenticated(_)
            | Fault::UnsafePath(_)
            | Fault::Rejected(_) => Side::Client,
            Fault::NoRoute
            | Fault::Route { .. }
            | Fault::NoService
            | Fault::TenantClosed
            | Fault::NoEndpoint
            | Fault::Unasked(_)
            | Fault::TenantBusy
            | Fault::Throttled
            | Fault::Overload
            | Fault::TenantBodies
            | Fault::Bodies
            | Fault::Draining => Side::Gateway,
            Fault::Connect { .. }
            | Fault::UpstreamClosed { .. }
            | Fault::UpstreamRefused
            | Fault::UpstreamReset
            | Fault::UpstreamProtocol(_)
            | Fault::InterimResponses(_)
            | Fault::UpstreamTimeout => Side::Upstream,
        }
    }

    /// See [`Retry`].
    pub(crate) fn retry(&self) -> Retry {
        match self {
            Fault::Connect { .. } | Fault::UpstreamRefused => Retry::Unsent,
            Fault::UpstreamClosed { reused: true } => Retry::Reused,
            _ => Retry::No,
        }
    }

    /// The gRPC status for clients that speak it (grpc/doc/http-grpc-status-mapping.md, but for limits, which have a status of their own).
    pub(crate) fn grpc_status(&self) -> u8 {
        if matches!(self, Fault::TenantBusy | Fault::Throttled) {
            return 8;
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

/// Envoy's response flags, the ones that occur here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub(crate) enum Flag {
    /// `-`
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
    /// An external authorizer.
    Unauthorized,
    Overload,
    ConnectFailure,
    UpstreamClosed,
    UpstreamReset,
    UpstreamProtocol,
    UpstreamTimeout,
}

impl Flag {
    pub(crate) fn text(self) -> &'static str {
        match self {
            Flag::None => "-",
            Flag::DownstreamProtocol => "DPE",
            Flag::DownstreamGone => "DC",
            Flag::StreamIdle => "SI",
            Flag::NoRoute => "NR",
            // A name of ours: Envoy has none for a route that can answer nothing but an error.
            Flag::RouteRefused => "RR",
            Flag::NoCluster => "NC",
            Flag::NoHealthy => "UH",
            Flag::RateLimited => "RL",
            Flag::Unauthorized => "UAEX",
            Flag::Overload => "OM",
            Flag::ConnectFailure => "UF",
            Flag::UpstreamClosed => "UC",
            Flag::UpstreamReset => "UR",
            Flag::UpstreamProtocol => "UPE",
            Flag::UpstreamTimeout => "UT",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_surely_not_processed_is_tried_again() {
        let cases = [
            (Fault::Connect { why: String::new() }, Retry::Unsent, 503, "UF", Side::Upstream),
            (Fault::UpstreamRefused, Retry::Unsent, 503, "UR", Side::Upstream),
            (Fault::UpstreamClosed { reused: true }, Retry::Reused, 502, "UC", Side::Upstream),
            (Fault::UpstreamClosed { reused: false }, Retry::No, 502, "UC", Side::Upstream),
            (Fault::UpstreamTimeout, Retry::No, 504, "UT", Side::Upstream),
            (Fault::UpstreamReset, Retry::No, 502, "UR", Side::Upstream),
            (Fault::InterimResponses("too_many_interim_responses"), Retry::No, 502, "UPE", Side::Upstream),
            (Fault::NoRoute, Retry::No, 404, "NR", Side::Gateway),
            (Fault::TenantBusy, Retry::No, 429, "RL", Side::Gateway),
            (Fault::Throttled, Retry::No, 429, "RL", Side::Gateway),
            (Fault::Denied(Box::new(Denial::of(&Verdict::Deny { policy: None, rule: None }))), Retry::No, 403, "-", Side::Client),
            (Fault::Unauthenticated(BadToken::Expired), Retry::No, 401, "-", Side::Client),
            (Fault::UnsafePath("path_above_root"), Retry::No, 400, "DPE", Side::Client),
            (Fault::Unasked("authorizer_timeout"), Retry::No, 403, "UAEX", Side::Gateway),
            (Fault::BadRequest(Refusal::HeadTooLarge), Retry::No, 431, "DPE", Side::Client),
            (Fault::ClientGone, Retry::No, 499, "DC", Side::Client),
        ];
        for (fault, retry, status, flag, side) in cases {
            assert_eq!((fault.retry(), fault.status(), fault.flag().text(), fault.side()), (retry, status, flag, side), "{fault:?}");
        }
    }
}
