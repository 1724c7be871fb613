//! Resolves the filters of a rule: header modifiers and URL rewrites of HTTPRoutes and
//! VirtualServices. A filter that cannot be honoured breaks its rule, because it may restrict what
//! the application receives.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::ObjectKind;
use canal_model::policy::gateway_api::{
    GrpcRouteFilter, HttpHeader, HttpHeaderFilter, HttpPathModifier, HttpRouteFilter,
    HttpRouteMatch, HttpUrlRewriteFilter, PathConditionType,
};
use canal_model::policy::istio::{
    HeaderOperations, Headers, HttpMatchRequest, HttpRewrite, UriRegexRewrite, VirtualServiceRoute,
};
use canal_model::program::{BackendTarget, RouteAction};
use canal_model::route_filters::{
    HeaderModifier, PROTECTED_REQUEST_HEADERS, PROTECTED_RESPONSE_HEADERS, PathRewrite,
    RegexSubstitution, RouteFilters, UrlRewrite,
};

use super::route_fields::{FieldIssue, RuleContext, header_name, path, text};
use crate::limits::HEADER_CHANGES_PER_RULE_MAX;
use crate::names;
use canal_ir::pattern;

/// The headers that a modifier changes, and the ones that it must not.
#[derive(Clone, Copy)]
enum ModifiedMessage {
    Request,
    Response,
}

impl ModifiedMessage {
    fn protected(self) -> &'static [&'static str] {
        match self {
            ModifiedMessage::Request => &PROTECTED_REQUEST_HEADERS,
            ModifiedMessage::Response => &PROTECTED_RESPONSE_HEADERS,
        }
    }
}

/// Resolves the filters of an HTTPRoute's rule. `None` if they change nothing.
pub(super) fn of_http_route(
    written: &[HttpRouteFilter],
    matches: &[HttpRouteMatch],
    rule: &mut RuleContext<'_>,
) -> Option<Box<RouteFilters>> {
    let filters = written.iter().enumerate();
    let filters: Vec<_> = filters
        .map(|(at, filter)| (format!("filters[{at}]"), filter))
        .collect();
    of_filters(&filters, matches, rule)
}

/// Resolves filters, each with its field. `None` if they change nothing.
pub(super) fn of_filters(
    written: &[(String, &HttpRouteFilter)],
    matches: &[HttpRouteMatch],
    rule: &mut RuleContext<'_>,
) -> Option<Box<RouteFilters>> {
    let mut filters = RouteFilters::default();
    let mut seen = BTreeSet::new();
    for (field, filter) in written {
        // Gateway API: a rule has several mirrors, and one filter of each other type.
        if filter.kind != "RequestMirror" && !seen.insert(filter.kind.as_str()) {
            let problem = format!("the rule has a second filter of type {}", filter.kind);
            rule.broken(
                field,
                FieldIssue::new("type", problem, "write all changes in one filter")
                    .with_code(Code::UnsupportedFilter),
            );
            continue;
        }
        let HttpRouteFilter {
            kind,
            request_header_modifier,
            response_header_modifier,
            url_rewrite,
            request_redirect,
            cors,
            request_mirror,
            external_auth,
        } = filter;
        match (
            kind.as_str(),
            request_header_modifier,
            response_header_modifier,
            url_rewrite,
            request_redirect,
            cors,
            request_mirror,
            external_auth,
        ) {
            ("RequestHeaderModifier", Some(headers), None, None, None, None, None, None) => {
                let field = format!("{field}.requestHeaderModifier");
                filters.request_headers =
                    of_header_filter(headers, ModifiedMessage::Request, &field, rule);
            }
            ("ResponseHeaderModifier", None, Some(headers), None, None, None, None, None) => {
                let field = format!("{field}.responseHeaderModifier");
                filters.response_headers =
                    of_header_filter(headers, ModifiedMessage::Response, &field, rule);
            }
            ("URLRewrite", None, None, Some(rewrite), None, None, None, None) => {
                let field = format!("{field}.urlRewrite");
                filters.rewrite = of_url_rewrite(rewrite, matches, &field, rule);
            }
            // A copy of the request; `route_mirrors` resolves it.
            ("RequestMirror", None, None, None, None, None, Some(_), None) => {}
            // An answer of the gateway; `route_answers` resolves it.
            ("RequestRedirect", None, None, None, Some(_), None, None, None) => {}
            // The answer to preflights; `route_cors` resolves it.
            ("CORS", None, None, None, None, Some(_), None, None) => {}
            // An authorizer; `route_authorizers` resolves it.
            ("ExternalAuth", None, None, None, None, None, None, Some(_)) => {}
            // The source reports the field of these filters too.
            ("ExtensionRef", ..) => {
                let problem = format!("filters of type {kind} are not supported in this version");
                rule.broken(
                    field,
                    FieldIssue::new("type", problem, "remove the filter")
                        .with_code(Code::UnsupportedFilter),
                );
            }
            _ => {
                let problem = format!(
                    "the type is {kind:?}, and the field that the type names is not the one that is set"
                );
                rule.broken(
                    field,
                    FieldIssue::new(
                        "type",
                        problem,
                        "set the one field of the type, as in type: URLRewrite with urlRewrite",
                    )
                    .with_code(Code::UnsupportedFilter),
                );
            }
        }
    }
    boxed(filters)
}

/// Resolves the filters of a GRPCRoute's rule, which are some of an HTTPRoute's.
pub(super) fn of_grpc_route(
    written: &[GrpcRouteFilter],
    rule: &mut RuleContext<'_>,
) -> Option<Box<RouteFilters>> {
    let filters: Vec<_> = written.iter().map(as_http_filter).collect();
    of_http_route(&filters, &[], rule)
}

/// Returns the filter of an HTTPRoute that a GRPCRoute's filter is.
pub(super) fn as_http_filter(written: &GrpcRouteFilter) -> HttpRouteFilter {
    let GrpcRouteFilter {
        kind,
        request_header_modifier,
        response_header_modifier,
        request_mirror,
    } = written;
    HttpRouteFilter {
        kind: kind.clone(),
        request_header_modifier: request_header_modifier.clone(),
        response_header_modifier: response_header_modifier.clone(),
        request_mirror: request_mirror.clone(),
        ..HttpRouteFilter::default()
    }
}

/// Resolves `headers` and `rewrite` of a VirtualService's rule. `None` if they change nothing.
pub(super) fn of_virtual_service(
    written: &VirtualServiceRoute,
    rule: &mut RuleContext<'_>,
) -> Option<Box<RouteFilters>> {
    let mut filters = RouteFilters::default();
    if let Some(headers) = &written.headers {
        add_headers(&mut filters, headers, "headers", rule);
    }
    if let Some(HttpRewrite {
        uri,
        authority,
        uri_regex_rewrite,
    }) = &written.rewrite
    {
        if let Some(regex) = uri_regex_rewrite {
            match of_regex_rewrite(regex, uri.is_some(), rule) {
                Ok(regex) => filters.rewrite.path_regex = Some(regex),
                Err(issue) => rule.broken("rewrite.uriRegexRewrite", issue),
            }
        }
        if let Some(authority) = authority {
            filters.rewrite.host = rewritten_host(authority, "rewrite.authority", rule);
        }
        // In Istio's API, which is protobuf, an empty text is a field that is not set.
        if let Some(uri) = uri.as_ref().filter(|uri| !uri.is_empty()) {
            let ignores_case = |of: &HttpMatchRequest| {
                of.ignore_uri_case && of.uri.as_ref().is_some_and(|uri| uri.prefix.is_some())
            };
            if written.matches.iter().any(ignores_case) {
                let problem = "rewriting a prefix that is matched without case is not supported in this version";
                let fix = "remove ignoreUriCase, or write the prefixes one by one";
                rule.broken(
                    "rewrite.uri",
                    FieldIssue::new("", problem, fix).with_code(Code::UnsupportedFilter),
                );
            }
            match sent_path(uri) {
                Ok(uri) => filters.rewrite.path = Some(PathRewrite::Prefix(uri)),
                Err(issue) => rule.broken("rewrite.uri", issue),
            }
        }
    }
    boxed(filters)
}

/// Resolves a rewrite by a regular expression. `has_uri`: `rewrite.uri` is set too.
fn of_regex_rewrite(
    written: &UriRegexRewrite,
    has_uri: bool,
    rule: &mut RuleContext<'_>,
) -> Result<RegexSubstitution, FieldIssue> {
    let UriRegexRewrite { pattern, rewrite } = written;
    if has_uri || pattern.is_empty() || rewrite.is_empty() {
        let problem = "it needs match and rewrite, and no rewrite.uri beside it";
        return Err(FieldIssue::new("", problem, "write both, and remove uri"));
    }
    let substitution = RegexSubstitution {
        pattern: pattern::without_quotes(pattern).into_owned(),
        substitution: rewrite.clone(),
    };
    let fix = r"use RE2 syntax for match, and \1 in rewrite for its first group";
    // A pattern alone costs less than one with its substitution, so the two have different texts.
    let text = format!("{}\0{}", substitution.pattern, substitution.substitution);
    rule.charge_regex(&text, || pattern::substitution_cost(&substitution), fix)?;
    Ok(substitution)
}

/// Resolves `headers` at `field` of a VirtualService's rule or destination.
pub(super) fn add_headers(
    filters: &mut RouteFilters,
    written: &Headers,
    field: &str,
    rule: &mut RuleContext<'_>,
) {
    let of_request = format!("{field}.request");
    let (request, host) = split_host(&written.request);
    filters.request_headers = of_operations(&request, ModifiedMessage::Request, &of_request, rule);
    filters.rewrite.host = host.and_then(|host| rewritten_host(&host, &of_request, rule));
    let of_response = format!("{field}.response");
    filters.response_headers = of_operations(
        &written.response,
        ModifiedMessage::Response,
        &of_response,
        rule,
    );
}

/// Returns the filters of a rule with this action. A rule that refuses its requests changes nothing
/// in them, and an answer of the gateway has only response headers and an authorizer.
pub(super) fn of_action(
    filters: Option<&RouteFilters>,
    action: &RouteAction,
) -> Option<Box<RouteFilters>> {
    let filters = filters?;
    match action {
        RouteAction::Split(_) => boxed(filters.clone()),
        RouteAction::Answer(_) => boxed(RouteFilters {
            response_headers: filters.response_headers.clone(),
            authorizer: filters.authorizer.clone(),
            ..RouteFilters::default()
        }),
        RouteAction::Refuse { .. } => None,
    }
}

/// Drops the hosts of destinations where a VirtualService's rule rewrites the host, as Istio does; a
/// backend's filters in Gateway API come after those of its rule, and replace its host. Refuses the requests
/// for backends in other namespaces if the filters change requests. The
/// policies of a backend authorize the request as the client sent it, so another namespace's route
/// could send the backend what its policies deny.
pub(super) fn guard(
    filters: Option<&RouteFilters>,
    action: RouteAction,
    rule: &mut RuleContext<'_>,
) -> RouteAction {
    let changes_requests = changes_requests(filters);
    let RouteAction::Split(mut backends) = action else {
        return action;
    };
    let is_of_istio = rule.document.object.kind() == ObjectKind::VirtualService;
    let sets_host = is_of_istio && filters.is_some_and(|filters| filters.rewrite.host.is_some());
    for backend in &mut backends {
        if let Some(of_backend) = backend.filters.as_mut().filter(|_| sets_host) {
            of_backend.rewrite.host = None;
        }
        if !changes_requests && !self::changes_requests(backend.filters.as_deref()) {
            continue;
        }
        let BackendTarget::Service { service, .. } = &backend.target else {
            continue;
        };
        if rule.may_change_requests_to(&service.namespace) {
            continue;
        }
        let problem = format!(
            "the rule changes requests, so it cannot send them to namespace {}, whose policies authorize them unchanged",
            service.namespace
        );
        let issue = FieldIssue::new("", problem, "change them in a route of that namespace")
            .with_code(Code::ChangedAcrossNamespaces);
        backend.target = rule.refused_backend("", issue);
        backend.filters = None;
    }
    for backend in &mut backends {
        let is_served = matches!(backend.target, BackendTarget::Service { .. });
        let filters = backend.filters.take();
        backend.filters = filters.filter(|filters| is_served && !filters.is_empty());
    }
    RouteAction::Split(backends)
}

/// Returns whether the filters change requests: an authorizer adds headers too.
pub(super) fn changes_requests(filters: Option<&RouteFilters>) -> bool {
    filters.is_some_and(|filters| {
        !filters.request_headers.is_empty()
            || filters.rewrite != UrlRewrite::default()
            || filters.authorizer.is_some()
    })
}

fn boxed(filters: RouteFilters) -> Option<Box<RouteFilters>> {
    (!filters.is_empty()).then(|| Box::new(filters))
}

/// Takes the host out of the changes of a request: Istio rewrites it if `set` names it.
fn split_host(written: &HeaderOperations) -> (HeaderOperations, Option<String>) {
    let mut others = written.clone();
    let mut host = None;
    others.set.retain(|name, value| {
        let is_host = name.eq_ignore_ascii_case("host") || name == ":authority";
        if is_host {
            host = Some(std::mem::take(value));
        }
        !is_host
    });
    (others, host)
}

fn of_header_filter(
    written: &HttpHeaderFilter,
    message: ModifiedMessage,
    field: &str,
    rule: &mut RuleContext<'_>,
) -> HeaderModifier {
    let mut changes = HeaderChanges::new(message, field, rule);
    HeaderModifier {
        set: changes.pairs(list_entries("set", &written.set)),
        add: changes.pairs(list_entries("add", &written.add)),
        remove: changes.names(&written.remove),
    }
}

/// Returns the place, name and value of each header of a list.
fn list_entries<'w>(
    list: &'static str,
    headers: &'w [HttpHeader],
) -> impl Iterator<Item = (String, &'w str, &'w str)> {
    let headers = headers.iter().enumerate();
    headers.map(move |(at, header)| {
        let place = format!("{list}[{at}]");
        (place, header.name.as_str(), header.value.as_str())
    })
}

fn of_operations(
    written: &HeaderOperations,
    message: ModifiedMessage,
    field: &str,
    rule: &mut RuleContext<'_>,
) -> HeaderModifier {
    let mut changes = HeaderChanges::new(message, field, rule);
    changes.has_variables = true;
    HeaderModifier {
        set: changes.pairs(map_entries("set", &written.set)),
        add: changes.pairs(map_entries("add", &written.add)),
        remove: changes.names(&written.remove),
    }
}

/// Returns the place, name and value of each header of a map.
fn map_entries<'w>(
    list: &'static str,
    headers: &'w BTreeMap<String, String>,
) -> impl Iterator<Item = (String, &'w str, &'w str)> {
    let headers = headers.iter();
    headers.map(move |(name, value)| (format!("{list}.{name}"), name.as_str(), value.as_str()))
}

/// Validates the changes of one modifier, and counts them.
struct HeaderChanges<'r, 'c> {
    message: ModifiedMessage,
    field: &'r str,
    /// True if `%NAME%` in a value is a variable of Envoy, and `%%` one `%`.
    has_variables: bool,
    rule: &'r mut RuleContext<'c>,
    count: usize,
}

impl<'r, 'c> HeaderChanges<'r, 'c> {
    fn new(message: ModifiedMessage, field: &'r str, rule: &'r mut RuleContext<'c>) -> Self {
        Self {
            message,
            field,
            has_variables: false,
            rule,
            count: 0,
        }
    }

    /// Returns the name in lower case. A name that must not be changed breaks the rule.
    fn name(&mut self, place: &str, name: &str) -> Option<String> {
        self.count += 1;
        let checked = if self.count > HEADER_CHANGES_PER_RULE_MAX {
            let problem =
                format!("the filter changes more than {HEADER_CHANGES_PER_RULE_MAX} headers");
            Err(FieldIssue::new("", problem, "change fewer headers").with_code(Code::LimitExceeded))
        } else {
            header_name(name).and_then(|name| {
                // Applications that cannot tell `_` from `-` read the one as the other.
                if self
                    .message
                    .protected()
                    .contains(&name.replace('_', "-").as_str())
                {
                    let problem =
                        format!("the gateway sets {name} itself, so a route cannot change it");
                    Err(FieldIssue::new("", problem, "remove the entry")
                        .with_code(Code::ProtectedHeader))
                } else {
                    Ok(name)
                }
            })
        };
        self.take(place, checked)
    }

    fn pair(&mut self, place: &str, name: &str, value: &str) -> Option<(String, String)> {
        let name = self.name(place, name)?;
        let checked = text(value.trim()).and_then(|value| {
            if self.has_variables && value.contains('%') {
                Err(FieldIssue::new(
                    "",
                    "variables such as %DOWNSTREAM_REMOTE_ADDRESS% are not supported in this version",
                    "write a fixed value without %",
                ).with_code(Code::UnsupportedFilter))
            } else {
                Ok(value)
            }
        });
        self.take(place, checked).map(|value| (name, value))
    }

    /// Returns the valid headers of one list. Gateway API: of several entries for one name, the first
    /// counts.
    fn pairs<'w>(
        &mut self,
        written: impl Iterator<Item = (String, &'w str, &'w str)>,
    ) -> Vec<(String, String)> {
        let mut seen = BTreeSet::new();
        written
            .filter_map(|(place, name, value)| self.pair(&place, name, value))
            .filter(|(name, _)| seen.insert(name.clone()))
            .collect()
    }

    /// Returns the valid names of headers that are removed.
    fn names(&mut self, written: &[String]) -> Vec<String> {
        let written = written.iter().enumerate();
        written
            .filter_map(|(at, name)| self.name(&format!("remove[{at}]"), name))
            .collect()
    }

    fn take<T>(&mut self, place: &str, checked: Result<T, FieldIssue>) -> Option<T> {
        match checked {
            Ok(value) => Some(value),
            Err(issue) => {
                self.rule.broken(&format!("{}.{place}", self.field), issue);
                None
            }
        }
    }
}

fn of_url_rewrite(
    written: &HttpUrlRewriteFilter,
    matches: &[HttpRouteMatch],
    field: &str,
    rule: &mut RuleContext<'_>,
) -> UrlRewrite {
    let host = written
        .hostname
        .as_ref()
        .and_then(|host| rewritten_host(host, &format!("{field}.hostname"), rule));
    let path = written
        .path
        .as_ref()
        .and_then(|written| match of_path_modifier(written, matches) {
            Ok(path) => Some(path),
            Err(issue) => {
                rule.broken(&format!("{field}.path"), issue);
                None
            }
        });
    UrlRewrite {
        host,
        path,
        path_regex: None,
    }
}

pub(super) fn of_path_modifier(
    written: &HttpPathModifier,
    matches: &[HttpRouteMatch],
) -> Result<PathRewrite, FieldIssue> {
    let HttpPathModifier {
        kind,
        replace_full_path,
        replace_prefix_match,
    } = written;
    match (kind.as_str(), replace_full_path, replace_prefix_match) {
        ("ReplaceFullPath", Some(full), None) => sent_path(full).map(PathRewrite::Full),
        ("ReplacePrefixMatch", None, Some(prefix)) => {
            // Gateway API: the prefix that is replaced must be the only one of the rule.
            let is_prefix = |of: &HttpRouteMatch| {
                of.path
                    .as_ref()
                    .is_none_or(|path| path.kind == PathConditionType::PathPrefix)
            };
            if matches.len() > 1 || !matches.iter().all(is_prefix) {
                return Err(FieldIssue::new(
                    "type",
                    "ReplacePrefixMatch needs a rule with exactly one match, of type PathPrefix",
                    "split the rule, or use ReplaceFullPath",
                ).with_code(Code::UnsupportedFilter));
            }
            // An empty text removes the prefix.
            let absolute = if prefix.starts_with('/') {
                prefix.clone()
            } else {
                format!("/{prefix}")
            };
            sent_path(&absolute).map(PathRewrite::Prefix)
        }
        _ => Err(FieldIssue::new(
            "type",
            format!("the type is {kind:?}, and the field of that type is not the one that is set"),
            "write ReplaceFullPath with replaceFullPath, or ReplacePrefixMatch with replacePrefixMatch",
        ).with_code(Code::UnsupportedFilter)),
    }
}

/// Validates a path that the gateway sends.
pub(super) fn sent_path(written: &str) -> Result<String, FieldIssue> {
    path(written).and_then(|path| {
        if path.bytes().all(|byte| byte > b' ' && byte < 0x7f) {
            Ok(path)
        } else {
            Err(FieldIssue::new(
                "",
                "a path has no spaces, and no characters beyond ASCII",
                "write them as %-escapes, with digits in capitals",
            )
            .with_code(Code::InvalidPath))
        }
    })
}

pub(super) fn rewritten_host(
    written: &str,
    field: &str,
    rule: &mut RuleContext<'_>,
) -> Option<String> {
    let lower = written.to_ascii_lowercase();
    let (name, port) = match lower.rsplit_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (lower.as_str(), None),
    };
    let is_port = port.is_none_or(|port| port.parse::<std::num::NonZeroU16>().is_ok());
    match names::host_match(name) {
        Ok(canal_model::program::HostMatch::Exact(_)) if is_port => Some(lower),
        _ => {
            rule.broken(
                field,
                FieldIssue::new(
                    "",
                    format!("{written:?} is not a host name"),
                    "write a name such as reviews.example.com",
                )
                .with_code(Code::InvalidHostname),
            );
            None
        }
    }
}
