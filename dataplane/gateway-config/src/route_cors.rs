//! Cross-origin resource sharing, as the rule that a request matched says: the answers to
//! preflights, and the headers of other responses. It sends nothing. Start with [`decide`].

use canal_model::route_cors::{CorsDialect, CorsList, CorsPolicy, OriginHost, OriginMatch};
use canal_model::route_filters::HeaderModifier;
use canal_router::{RoutableRequest, TextPatterns};

use crate::route_reply::RouteReply;

const ALLOW_ORIGIN: &str = "access-control-allow-origin";
const ALLOW_CREDENTIALS: &str = "access-control-allow-credentials";
const ALLOW_METHODS: &str = "access-control-allow-methods";
const ALLOW_HEADERS: &str = "access-control-allow-headers";
const EXPOSE_HEADERS: &str = "access-control-expose-headers";
const MAX_AGE: &str = "access-control-max-age";
const REQUEST_METHOD: &str = "access-control-request-method";
const REQUEST_HEADERS: &str = "access-control-request-headers";

/// What a policy does with one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CorsOutcome {
    /// The gateway answers the preflight itself.
    Preflight(RouteReply),
    /// The response's headers change so, in place of the changes of the rule's filters.
    Response(HeaderModifier),
}

/// Returns the regular expressions of a policy, in the order of its origins.
pub(crate) fn patterns(policy: &CorsPolicy) -> impl Iterator<Item = &str> {
    policy.origins.iter().filter_map(|origin| match origin {
        OriginMatch::Regex(pattern) => Some(pattern.as_str()),
        _ => None,
    })
}

/// Returns what the policy does with a request. `patterns` are its regular expressions, and
/// `filtered` the changes of the rule's filters.
pub(crate) fn decide<R: RoutableRequest>(
    policy: &CorsPolicy,
    patterns: Option<&TextPatterns>,
    filtered: Option<&HeaderModifier>,
    request: &R,
) -> CorsOutcome {
    let origin = first_value(request, "origin").filter(|origin| !origin.is_empty());
    let allowed = origin
        .as_ref()
        .filter(|origin| is_allowed(policy, patterns, origin));
    let requested = first_value(request, REQUEST_METHOD).filter(|method| !method.is_empty());
    let is_forwarded = allowed.is_none() && policy.dialect == CorsDialect::IstioForward;
    match requested {
        Some(method) if request.method() == b"OPTIONS" && origin.is_some() && !is_forwarded => {
            let names = first_value(request, REQUEST_HEADERS).unwrap_or_default();
            let (method, names) = (text(&method), text(&names));
            CorsOutcome::Preflight(preflight(policy, allowed, &method, &names))
        }
        _ => CorsOutcome::Response(response(policy, allowed, filtered)),
    }
}

/// Returns the first line of a header, which may be empty.
fn first_value<R: RoutableRequest>(request: &R, name: &str) -> Option<Vec<u8>> {
    let mut first = None;
    request.header(name, &mut |value| {
        if first.is_none() {
            first = Some(value.to_vec());
        }
    });
    first
}

/// Returns a value that arrived in a header, so that nothing in it ends a line.
fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).into_owned()
}

fn is_allowed(policy: &CorsPolicy, patterns: Option<&TextPatterns>, origin: &[u8]) -> bool {
    let mut regexes = 0..;
    policy.origins.iter().any(|written| match written {
        OriginMatch::Any => true,
        OriginMatch::Exact(exact) => exact.as_bytes() == origin,
        OriginMatch::Prefix(prefix) => origin.starts_with(prefix.as_bytes()),
        OriginMatch::Regex(_) => regexes
            .next()
            .is_some_and(|index| patterns.is_some_and(|patterns| patterns.is_match(index, origin))),
        OriginMatch::Host { scheme, host, port } => {
            let origin = origin.to_ascii_lowercase();
            let prefix = scheme.text().as_bytes();
            let authority = origin
                .strip_prefix(prefix)
                .and_then(|rest| rest.strip_prefix(b"://"));
            authority.is_some_and(|authority| {
                let (name, sent) = split_port(authority);
                sent.unwrap_or(scheme.default_port().into()) == u32::from(*port)
                    && is_host(host, name)
            })
        }
    })
}

fn is_host(written: &OriginHost, name: &[u8]) -> bool {
    match written {
        OriginHost::Any => !name.is_empty(),
        OriginHost::Exact(exact) => exact.as_bytes() == name,
        OriginHost::Suffix(end) => name.len() > end.len() && name.ends_with(end.as_bytes()),
    }
}

/// Splits a host from the digits behind it. A port that is too large is none that a rule names.
fn split_port(authority: &[u8]) -> (&[u8], Option<u32>) {
    let at = authority.iter().rposition(|byte| *byte == b':');
    let Some(at) = at.filter(|at| authority[at + 1..].iter().all(u8::is_ascii_digit)) else {
        return (authority, None);
    };
    let digits = std::str::from_utf8(&authority[at + 1..]).unwrap_or_default();
    (&authority[..at], Some(digits.parse().unwrap_or(u32::MAX)))
}

/// Returns the headers that preflights and other responses have.
fn shared(policy: &CorsPolicy, allowed: Option<&Vec<u8>>) -> Vec<(String, String)> {
    let mut headers = Vec::new();
    if let Some(origin) = allowed {
        headers.push((ALLOW_ORIGIN.to_owned(), text(origin)));
    }
    if policy.credentials {
        headers.push((ALLOW_CREDENTIALS.to_owned(), "true".to_owned()));
    }
    headers
}

fn exposed(policy: &CorsPolicy) -> Option<(String, String)> {
    Some((EXPOSE_HEADERS.to_owned(), policy.exposed.clone()?))
}

/// Responses depend on the origin, which caches must know.
fn vary() -> (String, String) {
    ("vary".to_owned(), "Origin".to_owned())
}

fn preflight(
    policy: &CorsPolicy,
    allowed: Option<&Vec<u8>>,
    method: &str,
    names: &str,
) -> RouteReply {
    let is_of_gateway_api = policy.dialect == CorsDialect::GatewayApi;
    let mut headers = vec![vary()];
    // Envoy leaves out only the origin where it is not allowed.
    if allowed.is_some() || !is_of_gateway_api {
        headers.extend(shared(policy, allowed));
        let mut list = |name: &str, list: &CorsList, requested: &str| {
            let value = match list {
                CorsList::Unnamed => "",
                CorsList::Requested => requested,
                CorsList::Listed(listed) => listed,
            };
            if !value.is_empty() {
                headers.push((name.to_owned(), value.to_owned()));
            }
        };
        list(ALLOW_METHODS, &policy.methods, method);
        list(ALLOW_HEADERS, &policy.headers, names);
        if let Some(seconds) = policy.max_age {
            headers.push((MAX_AGE.to_owned(), seconds.to_string()));
        }
        headers.extend(exposed(policy).filter(|_| is_of_gateway_api));
    }
    let headers = headers.into_iter();
    RouteReply {
        status: 200,
        headers: headers
            .map(|(name, value)| (name, value.into_bytes()))
            .collect(),
        body: Vec::new(),
        detail: "cors_response",
    }
}

/// Returns the changes of the rule's filters, and after them those of the policy.
fn response(
    policy: &CorsPolicy,
    allowed: Option<&Vec<u8>>,
    filtered: Option<&HeaderModifier>,
) -> HeaderModifier {
    let mut changes = filtered.cloned().unwrap_or_default();
    let HeaderModifier { set, add, remove } = &mut changes;
    if allowed.is_some() {
        // Gateway API: without credentials, no response has the header. The endpoint's own was meant
        // for other origins.
        if policy.dialect == CorsDialect::GatewayApi && !policy.credentials {
            remove.push(ALLOW_CREDENTIALS.to_owned());
        }
        for (name, value) in shared(policy, allowed).into_iter().chain(exposed(policy)) {
            set.retain(|(other, _)| *other != name);
            add.retain(|(other, _)| *other != name);
            set.push((name, value));
        }
    }
    add.push(vary());
    changes
}
