//! Defines what the IR means: a slow and simple interpreter of routing, against which every
//! lowering is compared. It knows no target.
//!
//! The rules, which every faster implementation must follow:
//! - A client of a namespace that has rules of its own for the port is routed by these rules alone.
//!   The namespace is that of the client's verified identity in the tenant.
//! - The host is compared without port, in lower case, and without a trailing dot. `*.x` matches
//!   one or more labels before `.x`.
//! - The path is compared without the query. If a match of the port requires more than `/`, the
//!   path is compared in its normalized form ([`canal_oracle::authorization::routing_path`]);
//!   otherwise the path may be anything.
//! - `PathPrefix /a/` is `PathPrefix /a`: it matches `/a` and everything that starts with `/a/`.
//! - Header names are compared in lower case. A header that is sent several times has one value,
//!   joined by `,` (RFC 9110 §5.2), cookies by `; `.
//! - If a query parameter is sent several times, its first value is used. Names and values are
//!   compared as sent.
//! - The method is compared as sent: methods are case-sensitive (RFC 9110 §9.1).
//! - A condition on an attribute of the client holds for no request whose client's is not known. The
//!   scheme is that of the client's connection to the gateway, whatever the request says of it; the
//!   namespace and the labels are those of the workload that the client proved to be.
//! - Regular expressions are RE2 over bytes without Unicode classes, and the whole text must match.

use canal_model::client_attributes::{ClientAttribute, is_client_attribute};
use canal_model::ids::{Namespace, ServiceKey};
use canal_model::program::{
    AUTHORITY, AppProtocol, Backend, BackendTarget, HostMatch, HttpMatch, Labels, METHOD,
    PathMatch, RouteAction, RouteKey, RouteMirror, RouteRule, TextMatch, ValueMatch, Workload,
};
use canal_model::route_attempts::AttemptPolicy;
use canal_model::route_cors::CorsPolicy;
use canal_model::route_faults::FaultPolicy;
use canal_model::route_filters::UrlScheme;

use crate::ir::Ir;
use crate::pattern;
use canal_oracle::answers::{self, OracleAnswer};
use canal_oracle::authorization::routing_path;
use canal_oracle::cors::{self, OracleCors};
use canal_oracle::filters::{self, ForwardedRequest};

/// What a gateway knows of a client without any header of its requests.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OracleClient {
    /// Whether the gateway terminates the client's own TLS.
    pub is_tls: bool,
    /// Namespace of the identity that the client proved, if it is one of the tenant.
    pub namespace: Option<Namespace>,
    /// Labels of the workload with that identity and the client's address; empty if there is none.
    pub labels: Labels,
}

impl OracleClient {
    pub fn scheme(&self) -> UrlScheme {
        match self.is_tls {
            true => UrlScheme::Https,
            false => UrlScheme::Http,
        }
    }

    /// Returns the value of an attribute (`canal_model::client_attributes`), if it is known.
    pub fn attribute(&self, name: &str) -> Option<&str> {
        match ClientAttribute::of_name(name)? {
            ClientAttribute::Scheme => Some(self.scheme().text()),
            ClientAttribute::SourceNamespace => self.namespace.as_ref().map(Namespace::as_str),
            ClientAttribute::SourceLabel(key) => self.labels.get(key).map(String::as_str),
        }
    }
}

/// The parts of a request that routing uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OracleRequest {
    pub service: ServiceKey,
    /// The service's port that the client dialled.
    pub port: u16,
    /// Value of `Host` or `:authority`, as sent.
    pub host: String,
    pub method: String,
    /// Path and query, as sent.
    pub target: String,
    /// Headers in the order sent.
    pub headers: Vec<(String, String)>,
    pub client: OracleClient,
}

/// The routing decision for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RoutingVerdict {
    /// The service or port does not exist.
    NoService,
    /// The port is opaque TCP, or has no rules: all traffic goes to the service itself.
    Service { service: ServiceKey, port: u16 },
    /// The rule splits requests by weight; a backend may refuse its part. `attempts` are its
    /// timeouts and retries.
    Split {
        rule: RouteKey,
        backends: Vec<Backend>,
        attempts: Option<Box<AttemptPolicy>>,
        faults: Option<Box<FaultPolicy>>,
        cors: Option<Box<CorsPolicy>>,
        mirrors: Vec<RouteMirror>,
    },
    /// The gateway answers the request itself. It is authorized by
    /// [`canal_oracle::authorization::is_for_answers`]. `None`: the redirect's path gets a dot
    /// segment, so the answer is 400.
    Answer {
        rule: RouteKey,
        answer: Option<Box<OracleAnswer>>,
    },
    /// The rule refuses the request.
    Refuse {
        rule: RouteKey,
        status: u16,
        reason: String,
    },
    /// The port has rules, and none matches: 404.
    NoRule,
}

/// Returns the routing decision that the IR defines for one request.
pub fn decide(ir: &Ir, request: &OracleRequest) -> RoutingVerdict {
    match find(ir, request) {
        Err(verdict) => *verdict,
        Ok((rule, http)) => verdict_of(rule, http, request),
    }
}

/// Returns the decision of a rule that matches a request by the match `http`.
pub fn verdict_of(rule: &RouteRule, http: &HttpMatch, request: &OracleRequest) -> RoutingVerdict {
    match &rule.action {
        RouteAction::Split(backends) => RoutingVerdict::Split {
            rule: rule.key.clone(),
            backends: backends.clone(),
            attempts: rule.attempts.clone(),
            faults: rule.faults.clone(),
            cors: rule.cors.clone(),
            mirrors: rule.mirrors.clone(),
        },
        RouteAction::Answer(answer) => RoutingVerdict::Answer {
            rule: rule.key.clone(),
            answer: answers::answer(
                answer,
                rule.filters.as_deref(),
                &http.path,
                &sent(request),
                (request.client.scheme(), request.port),
            )
            .map(Box::new),
        },
        RouteAction::Refuse { status, reason } => RoutingVerdict::Refuse {
            rule: rule.key.clone(),
            status: *status,
            reason: reason.clone(),
        },
    }
}

/// Returns the rule that decides about the request, if there is one.
pub fn deciding_rule<'a>(ir: &'a Ir, request: &OracleRequest) -> Option<&'a RouteRule> {
    find(ir, request).ok().map(|(rule, _)| rule)
}

/// Returns the request that an endpoint of the backend with this index receives; `None` if no rule
/// sends it to such a backend.
pub fn forwarded(ir: &Ir, request: &OracleRequest, backend: usize) -> Option<ForwardedRequest> {
    let (rule, http) = find(ir, request).ok()?;
    let RouteAction::Split(backends) = &rule.action else {
        return None;
    };
    forwarded_by(rule, http, backends.get(backend)?, request)
}

/// Returns the request that an endpoint of a rule's backend receives after the match `http`; `None`
/// if the gateway answers 400, because the path cannot be rewritten or gets a dot segment.
pub fn forwarded_by(
    rule: &RouteRule,
    http: &HttpMatch,
    backend: &Backend,
    request: &OracleRequest,
) -> Option<ForwardedRequest> {
    let filters = [rule.filters.as_deref(), backend.filters.as_deref()];
    filters::forwarded(filters, &http.path, sent(request), pattern::substitute)
}

/// Returns the headers that the client receives of those that an endpoint of the backend with this
/// index sends, without a cross-origin policy; `None` if no rule sends the request to it.
pub fn returned(
    ir: &Ir,
    request: &OracleRequest,
    backend: usize,
    sent: &[(String, String)],
) -> Option<Vec<(String, String)>> {
    let (rule, _) = find(ir, request).ok()?;
    let RouteAction::Split(backends) = &rule.action else {
        return None;
    };
    let of_backend = backends.get(backend)?.filters.as_deref();
    Some(filters::returned(
        [rule.filters.as_deref(), of_backend],
        sent,
    ))
}

/// Returns what the cross-origin policy of the deciding rule does with a request; `None` without a
/// policy.
pub fn cors(ir: &Ir, request: &OracleRequest) -> Option<OracleCors> {
    let (rule, _) = find(ir, request).ok()?;
    cors_of(rule, request)
}

/// Returns what a rule's cross-origin policy does with a request; `None` without a policy.
pub fn cors_of(rule: &RouteRule, request: &OracleRequest) -> Option<OracleCors> {
    let policy = rule.cors.as_deref()?;
    let headers: Vec<_> = request
        .headers
        .iter()
        .map(|(name, value)| (name.to_ascii_lowercase(), value.clone()))
        .collect();
    Some(cors::decide(policy, &request.method, &headers, regex_holds))
}

/// Returns the parts of a request that filters and answers depend on.
pub fn sent(request: &OracleRequest) -> ForwardedRequest {
    ForwardedRequest {
        host: request.host.clone(),
        target: request.target.clone(),
        headers: request.headers.clone(),
    }
}

/// Returns the rule that decides about the request, and the match of it that holds.
///
/// # Errors
/// No rule decides; the verdict says what happens instead.
fn find<'a>(
    ir: &'a Ir,
    request: &OracleRequest,
) -> Result<(&'a RouteRule, &'a HttpMatch), Box<RoutingVerdict>> {
    let Some(service) = ir.services.get(&request.service) else {
        return Err(Box::new(RoutingVerdict::NoService));
    };
    let Some(port) = service
        .service
        .ports
        .iter()
        .find(|port| port.port == request.port)
    else {
        return Err(Box::new(RoutingVerdict::NoService));
    };
    let routes = service.routes_for(request.client.namespace.as_ref(), port.port);
    let matches = routes.on_port(port.port);
    // Without rules, requests go to the service's own endpoints.
    if port.protocol == AppProtocol::Tcp || matches.clone().next().is_none() {
        return Err(Box::new(RoutingVerdict::Service {
            service: request.service.clone(),
            port: request.port,
        }));
    }
    let matches = matches.map(|(rule, http)| (&**rule, http));
    first_match(matches.clone(), matches, request).ok_or_else(|| Box::new(RoutingVerdict::NoRule))
}

/// Returns the first of the `candidates` that holds. If one of `all` matches depends on the path,
/// all of them compare the normal form.
pub fn first_match<'a>(
    all: impl Iterator<Item = (&'a RouteRule, &'a HttpMatch)>,
    mut candidates: impl Iterator<Item = (&'a RouteRule, &'a HttpMatch)>,
    request: &OracleRequest,
) -> Option<(&'a RouteRule, &'a HttpMatch)> {
    let request = compared(all, request);
    candidates.find(|(rule, http)| holds(&rule.hosts, http, &request))
}

/// Returns a request in the form in which `all` matches of its port or listener are compared with
/// it.
pub fn compared<'a>(
    mut all: impl Iterator<Item = (&'a RouteRule, &'a HttpMatch)>,
    request: &OracleRequest,
) -> OracleRequest {
    let mut request = request.clone();
    if all.any(|(_, http)| reads_path(&http.path)) {
        let (path, query) = match request.target.split_once('?') {
            Some((path, query)) => (path, format!("?{query}")),
            None => (request.target.as_str(), String::new()),
        };
        request.target = routing_path(path) + &query;
    }
    request
}

/// Returns whether a match requires more of the path than that there is one.
pub fn reads_path(path: &PathMatch) -> bool {
    match path {
        PathMatch::ElementPrefix(text) | PathMatch::StringPrefix(text) => {
            !matches!(text.as_str(), "" | "/")
        }
        PathMatch::Exact(_) | PathMatch::Regex(_) => true,
    }
}

/// Returns the workloads that may serve a backend now, each with its target port. They are ready,
/// in the subset, and serve the port.
pub fn endpoints<'a>(ir: &'a Ir, target: &'a BackendTarget) -> Vec<(&'a Workload, u16)> {
    let BackendTarget::Service {
        service,
        port,
        subset,
    } = target
    else {
        return Vec::new();
    };
    let carries = |labels: &Labels| subset.iter().all(|(k, v)| labels.get(k) == Some(v));
    let able = ir
        .workloads
        .iter()
        .filter(|workload| workload.ready && carries(&workload.labels));
    able.flat_map(|workload| {
        let served = workload
            .endpoints
            .iter()
            .filter(|e| e.service == *service && e.port == *port);
        served.map(move |endpoint| (workload, endpoint.target_port))
    })
    .collect()
}

/// A condition of a match that a request does not meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmetCondition<'a> {
    Host,
    Path,
    Method(&'a str),
    Header(&'a ValueMatch),
    Query(&'a ValueMatch),
}

/// Returns whether all conditions of one match hold, for a rule with these hosts.
pub fn holds(hosts: &[HostMatch], http: &HttpMatch, request: &OracleRequest) -> bool {
    unmet(hosts, http, request).is_none()
}

/// Returns the first condition of one match that does not hold, for a rule with these hosts; `None`
/// if all hold.
pub fn unmet<'a>(
    hosts: &[HostMatch],
    http: &'a HttpMatch,
    request: &OracleRequest,
) -> Option<UnmetCondition<'a>> {
    let (path, query) = request
        .target
        .split_once('?')
        .unwrap_or((&request.target, ""));
    let host = normal_host(&request.host);
    if !hosts.is_empty() && !hosts.iter().any(|written| host_holds(written, &host)) {
        return Some(UnmetCondition::Host);
    }
    if !path_holds(&http.path, path) {
        return Some(UnmetCondition::Path);
    }
    let method = http.method.as_deref();
    if let Some(method) = method.filter(|method| *method != request.method) {
        return Some(UnmetCondition::Method(method));
    }
    let header = http
        .headers
        .iter()
        .find(|header| !header_holds(header, request));
    let parameter = || {
        let mut parameters = http.query.iter();
        parameters.find(|it| {
            let value = query_value(query, &it.name);
            !value.is_some_and(|value| text_holds(&it.value, value))
        })
    };
    header
        .map(UnmetCondition::Header)
        .or_else(|| parameter().map(UnmetCondition::Query))
}

/// Returns the value of a request that a condition on a header or a query parameter is compared
/// with; `None` if the request has none.
pub fn compared_value(condition: UnmetCondition<'_>, request: &OracleRequest) -> Option<String> {
    match condition {
        UnmetCondition::Host => Some(normal_host(&request.host)),
        UnmetCondition::Path => request.target.split('?').next().map(str::to_owned),
        UnmetCondition::Method(_) => Some(request.method.clone()),
        UnmetCondition::Header(header) => {
            joined(&header.name, &header_lines(request, &header.name))
        }
        UnmetCondition::Query(parameter) => {
            let (_, query) = request.target.split_once('?').unwrap_or_default();
            query_value(query, &parameter.name).map(str::to_owned)
        }
    }
}

pub fn normal_host(host: &str) -> String {
    let bare = match host.rsplit_once(':') {
        Some((name, port))
            if port.bytes().all(|c| c.is_ascii_digit())
                && (!name.contains(':') || name.ends_with(']')) =>
        {
            name
        }
        _ => host,
    };
    bare.strip_suffix('.').unwrap_or(bare).to_ascii_lowercase()
}

pub fn host_holds(written: &HostMatch, host: &str) -> bool {
    match written {
        HostMatch::Exact(name) => host == name,
        HostMatch::Suffix(domain) => host.len() > domain.len() && host.ends_with(domain.as_str()),
    }
}

fn path_holds(written: &PathMatch, path: &str) -> bool {
    match written {
        PathMatch::Exact(exact) => path == exact,
        PathMatch::StringPrefix(prefix) => path.starts_with(prefix.as_str()),
        PathMatch::ElementPrefix(prefix) => {
            let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
            path.strip_prefix(prefix)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        }
        PathMatch::Regex(pattern) => regex_holds(pattern, path),
    }
}

fn header_holds(condition: &ValueMatch, request: &OracleRequest) -> bool {
    let name = condition.name.as_str();
    let lines = header_lines(request, name);
    let joined = joined(name, &lines);
    match &condition.value {
        TextMatch::Not(unwanted) => {
            let is_compared = lines.is_empty() && **unwanted != TextMatch::Present;
            let missing = is_compared.then(String::new);
            let mut texts = lines.iter().chain(&joined).chain(&missing);
            !texts.any(|text| text_holds(unwanted, text))
        }
        wanted => joined.is_some_and(|text| text_holds(wanted, &text)),
    }
}

/// Returns the lines of a header, or the one value of a pseudo-header or attribute.
fn header_lines(request: &OracleRequest, name: &str) -> Vec<String> {
    match name {
        METHOD => vec![request.method.clone()],
        AUTHORITY => {
            let host = normal_host(&request.host);
            vec![host.trim_matches(['[', ']']).to_owned()]
        }
        name if is_client_attribute(name) => {
            let value = request.client.attribute(name);
            value.into_iter().map(str::to_owned).collect()
        }
        _ => {
            let headers = request.headers.iter();
            let same = headers.filter(|(sent, _)| sent.eq_ignore_ascii_case(name));
            same.map(|(_, value)| value.clone()).collect()
        }
    }
}

/// Returns the lines of a header as one text; `None` if there are none.
fn joined(name: &str, lines: &[String]) -> Option<String> {
    // Cookies are one line, into which HTTP/2 may split it (RFC 9113 §8.2.3).
    let is_cookie = name.eq_ignore_ascii_case("cookie");
    let separator = if is_cookie { "; " } else { "," };
    (!lines.is_empty()).then(|| lines.join(separator))
}

fn query_value<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    let mut parameters = query
        .split('&')
        .filter(|part| !part.is_empty())
        .map(|part| part.split_once('=').unwrap_or((part, "")));
    parameters
        .find(|(sent, _)| *sent == name)
        .map(|(_, value)| value)
}

fn text_holds(condition: &TextMatch, text: &str) -> bool {
    match condition {
        TextMatch::Exact(exact) => text == exact,
        TextMatch::Prefix(prefix) => text.starts_with(prefix.as_str()),
        TextMatch::Regex(pattern) => regex_holds(pattern, text),
        TextMatch::Present => true,
        TextMatch::Not(unwanted) => !text_holds(unwanted, text),
    }
}

fn regex_holds(pattern: &str, text: &str) -> bool {
    pattern::compile(pattern).is_some_and(|regex| regex.is_match(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_compared_without_port_and_case() {
        for (host, expected) in [
            ("Reviews.Example.com:9080", "reviews.example.com"),
            ("reviews.", "reviews"),
            ("[fd00::1]:80", "[fd00::1]"),
            ("fd00::1", "fd00::1"),
            ("reviews:", "reviews"),
            ("reviews:x", "reviews:x"),
            ("", ""),
        ] {
            assert_eq!(normal_host(host), expected, "{host:?}");
        }
        let suffix = HostMatch::Suffix(".example.com".to_owned());
        for (host, expected) in [
            ("a.example.com", true),
            ("a.b.example.com", true),
            ("example.com", false),
            (".example.com", false),
            ("aexample.com", false),
        ] {
            assert_eq!(host_holds(&suffix, host), expected, "{host:?}");
        }
    }

    #[test]
    fn paths_are_compared_as_written() {
        let element = |p: &str| PathMatch::ElementPrefix(p.to_owned());
        let string = |p: &str| PathMatch::StringPrefix(p.to_owned());
        for (written, path, expected) in [
            (element("/a"), "/a", true),
            (element("/a"), "/a/", true),
            (element("/a"), "/a/b", true),
            (element("/a"), "/ab", false),
            (element("/a/"), "/a", true),
            (element("/"), "/x", true),
            (element("/"), "*", false),
            (string("/a"), "/ab", true),
            (string("/a/"), "/a", false),
            (PathMatch::Exact("/a".to_owned()), "/a", true),
            (PathMatch::Exact("/a".to_owned()), "/%61", false),
            (PathMatch::Regex("/a+".to_owned()), "/aa", true),
            (PathMatch::Regex("/a+".to_owned()), "/aab", false),
        ] {
            assert_eq!(path_holds(&written, path), expected, "{written:?} {path:?}");
        }
    }

    #[test]
    fn the_first_query_parameter_and_all_headers_count() {
        for (query, name, expected) in [
            ("a=1&a=2", "a", Some("1")),
            ("b&a=", "a", Some("")),
            ("b&a=", "b", Some("")),
            ("", "", None),
            ("aa=1", "a", None),
            ("a=%31", "a", Some("%31")),
        ] {
            assert_eq!(query_value(query, name), expected, "{query:?} {name:?}");
        }
    }
}
