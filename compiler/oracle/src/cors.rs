//! Defines cross-origin resource sharing: which requests a gateway answers as preflights, and which
//! headers it adds to responses. It is slow and simple, and shares no code with data planes.
//!
//! The rules, which every faster implementation must follow:
//! - A preflight is an OPTIONS request with a value of `origin` and one of
//!   `access-control-request-method`.
//! - Origins are compared as sent; for Gateway API in lower case, and a port that is left out is the
//!   default one of the scheme. `https://*.a.example` needs a label in place of the `*`.
//! - All responses of the rule vary by `origin`, also those to requests without one.

use canal_model::route_cors::{CorsDialect, CorsList, CorsPolicy, OriginHost, OriginMatch};

use crate::answers::OracleAnswer;

/// What the policy does with one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OracleCors {
    /// The gateway answers the preflight itself.
    Preflight(OracleAnswer),
    Response {
        /// The response gets these headers, sorted by name, in place of its own of these names;
        /// `vary` is one more value.
        headers: Vec<(String, String)>,
        /// Headers of its own that the response loses.
        removed: Vec<String>,
    },
}

/// Returns what the policy does with a request. `is_match` compares a text with a regular
/// expression as a whole. Names of headers are in lower case.
pub fn decide(
    policy: &CorsPolicy,
    method: &str,
    headers: &[(String, String)],
    is_match: impl Fn(&str, &str) -> bool,
) -> OracleCors {
    let first = |wanted: &str| {
        let mut values = headers.iter().filter(|(name, _)| name == wanted);
        values
            .next()
            .map(|(_, value)| value.as_str())
            // An absent header counts as an empty one, which names no origin and no method.
            .unwrap_or_default()
    };
    let origin = first("origin");
    let is_allowed = !origin.is_empty()
        && policy
            .origins
            .iter()
            .any(|written| holds(written, origin, &is_match));
    let requested = first("access-control-request-method");
    let is_preflight = method == "OPTIONS" && !origin.is_empty() && !requested.is_empty();
    // By Istio's default, preflights of other origins are the backend's to answer.
    let is_forwarded = !is_allowed && policy.dialect == CorsDialect::IstioForward;
    if is_preflight && !is_forwarded {
        return OracleCors::Preflight(preflight(
            policy,
            is_allowed.then_some(origin),
            requested,
            first("access-control-request-headers"),
        ));
    }
    // Caches must not give the response of one origin to another.
    let mut added = vec![("vary".to_owned(), "Origin".to_owned())];
    if is_allowed {
        added.extend(shared(policy, Some(origin)));
        added.extend(exposed(policy));
    }
    added.sort();
    // Gateway API, `allowCredentials`: without it, responses to allowed origins lack the header.
    let hides_credentials =
        is_allowed && !policy.credentials && policy.dialect == CorsDialect::GatewayApi;
    let removed = hides_credentials.then(|| "access-control-allow-credentials".to_owned());
    OracleCors::Response {
        headers: added,
        removed: removed.into_iter().collect(),
    }
}

fn preflight(
    policy: &CorsPolicy,
    allowed: Option<&str>,
    method: &str,
    names: &str,
) -> OracleAnswer {
    let mut headers = vec![("vary".to_owned(), "Origin".to_owned())];
    let is_plain = allowed.is_none() && policy.dialect == CorsDialect::GatewayApi;
    if !is_plain {
        headers.extend(shared(policy, allowed));
        let lists = [
            ("access-control-allow-methods", &policy.methods, method),
            ("access-control-allow-headers", &policy.headers, names),
        ];
        for (name, list, requested) in lists {
            let value = match list {
                CorsList::Unnamed => continue,
                CorsList::Requested if requested.is_empty() => continue,
                CorsList::Requested => requested.to_owned(),
                CorsList::Listed(listed) => listed.clone(),
            };
            headers.push((name.to_owned(), value));
        }
        if let Some(seconds) = policy.max_age {
            headers.push(("access-control-max-age".to_owned(), seconds.to_string()));
        }
        if policy.dialect == CorsDialect::GatewayApi {
            headers.extend(exposed(policy));
        }
    }
    headers.sort();
    OracleAnswer {
        status: 200,
        headers,
        body: Vec::new(),
    }
}

/// Returns the headers that preflights and other responses have.
fn shared(policy: &CorsPolicy, origin: Option<&str>) -> Vec<(String, String)> {
    let origin = origin.map(|origin| ("access-control-allow-origin", origin));
    let credentials = policy
        .credentials
        .then_some(("access-control-allow-credentials", "true"));
    [origin, credentials]
        .into_iter()
        .flatten()
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn exposed(policy: &CorsPolicy) -> Option<(String, String)> {
    let names = policy.exposed.clone()?;
    Some(("access-control-expose-headers".to_owned(), names))
}

fn holds(written: &OriginMatch, origin: &str, is_match: &impl Fn(&str, &str) -> bool) -> bool {
    match written {
        OriginMatch::Any => true,
        OriginMatch::Exact(exact) => origin == exact,
        OriginMatch::Prefix(prefix) => origin.starts_with(prefix.as_str()),
        OriginMatch::Regex(pattern) => is_match(pattern, origin),
        OriginMatch::Host { scheme, host, port } => {
            let origin = origin.to_ascii_lowercase();
            let Some((sent_scheme, authority)) = origin.split_once("://") else {
                return false;
            };
            let (sent_host, sent_port) = match authority.rsplit_once(':') {
                Some((name, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => {
                    (name, number.parse().ok())
                }
                _ => (authority, Some(scheme.default_port())),
            };
            let is_host = match host {
                OriginHost::Any => !sent_host.is_empty(),
                OriginHost::Exact(name) => sent_host == name,
                OriginHost::Suffix(end) => sent_host.len() > end.len() && sent_host.ends_with(end),
            };
            sent_scheme == scheme.text() && is_host && sent_port == Some(*port)
        }
    }
}
