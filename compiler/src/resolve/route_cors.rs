//! Resolves cross-origin resource sharing of a rule: the filter `CORS` of HTTPRoutes and
//! `corsPolicy` of VirtualServices. A value that the API refuses breaks the rule: without it, the
//! endpoint would receive preflights that its author wanted the gateway to answer.

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::limits::CORS_LIST_BYTES_MAX;
use canal_model::policy::cors::{CorsPolicy as IstioCorsPolicy, HttpCorsFilter};
use canal_model::policy::gateway_api::HttpRule;
use canal_model::policy::istio::{StringMatch, VirtualServiceRoute};
use canal_model::program::{HostMatch, RouteAction};
use canal_model::route_cors::{CorsDialect, CorsList, CorsPolicy, OriginHost, OriginMatch};
use canal_model::route_filters::UrlScheme;

use super::route_fields::{FieldIssue, RuleContext, header_name, text};
use crate::names;
use canal_ir::pattern;

/// Most origins, and most names in each list, of a policy (the CRD of HTTPRoute has this limit).
const CORS_NAMES_MAX: usize = 64;
/// Seconds for which a client keeps the response to a preflight, if an HTTPRoute names none.
/// It is the default of Gateway API and of the Fetch standard.
const MAX_AGE_DEFAULT: u64 = 5;
/// Methods that both APIs accept in `allowMethods`.
const METHODS: [&str; 9] = [
    "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "CONNECT", "OPTIONS", "TRACE",
];
const WILDCARD: &str = "*";

/// Resolves the filter `CORS` of an HTTPRoute's rule, if it has one.
pub(super) fn of_http_route(
    written: &HttpRule,
    rule: &mut RuleContext<'_>,
) -> Option<Box<CorsPolicy>> {
    let mut filters = written.filters.iter().enumerate();
    let (at, filter) = filters.find_map(|(at, filter)| Some((at, filter.cors.as_ref()?)))?;
    let field = format!("filters[{at}].cors");
    let HttpCorsFilter {
        allow_origins,
        allow_credentials,
        allow_methods,
        allow_headers,
        expose_headers,
        max_age,
    } = filter;
    let credentials = allow_credentials.unwrap_or_default();
    let lists = [
        ("allowOrigins", allow_origins),
        ("allowMethods", allow_methods),
        ("allowHeaders", allow_headers),
    ];
    for (name, list) in lists {
        if list.len() > 1 && list.iter().any(|value| value == WILDCARD) {
            let problem = "a wildcard excludes other values";
            let issue = FieldIssue::new(name, problem, "write only the wildcard, or remove it")
                .with_code(Code::ConflictingFields);
            rule.broken(&field, issue);
        }
    }
    let mut exposed = names_of(expose_headers, "exposeHeaders", &field, rule).into_header_value();
    if credentials && expose_headers.iter().any(|name| name == WILDCARD) {
        // Gateway API: the wildcard cannot be used with credentials.
        exposed = None;
        let problem = "with allowCredentials the wildcard exposes no header";
        let issue = FieldIssue::new("exposeHeaders", problem, "name the headers")
            .with_code(Code::IneffectiveField);
        rule.warning(&field, issue);
    }
    let max_age = match max_age {
        None => MAX_AGE_DEFAULT,
        // A negative time becomes zero, which is reported below.
        Some(seconds) => u64::try_from(*seconds).unwrap_or_default(),
    };
    if max_age == 0 {
        let issue = FieldIssue::new("maxAge", "the time is less than 1", "write seconds");
        rule.broken(&field, issue);
    }
    let origins = allow_origins.iter().enumerate();
    let origins = origins.filter_map(|(at, origin)| {
        let origin = origin_of_uri(origin);
        let field = format!("{field}.allowOrigins[{at}]");
        origin.map_err(|issue| rule.broken(&field, issue)).ok()
    });
    let origins = origins.collect();
    check_length(allow_origins.len(), "allowOrigins", &field, rule);
    Some(Box::new(CorsPolicy {
        origins,
        methods: methods_of(allow_methods, &field, rule),
        headers: names_of(allow_headers, "allowHeaders", &field, rule),
        exposed,
        max_age: Some(max_age),
        credentials,
        dialect: CorsDialect::GatewayApi,
    }))
}

/// Reads an origin of an HTTPRoute.
fn origin_of_uri(written: &str) -> Result<OriginMatch, FieldIssue> {
    if written == WILDCARD {
        return Ok(OriginMatch::Any);
    }
    let issue = || {
        let problem = format!("{written:?} is not an origin");
        FieldIssue::new("", problem, "write it as https://*.example.com:8443, or *")
    };
    let (scheme, authority) = written.split_once("://").ok_or_else(issue)?;
    let scheme = UrlScheme::of(scheme).ok_or_else(issue)?;
    let (host, port) = match authority.rsplit_once(':') {
        None => (authority, scheme.default_port()),
        Some((host, port)) => (
            host,
            port.parse::<std::num::NonZeroU16>()
                .map_err(|_| issue())?
                .get(),
        ),
    };
    let host = match host {
        WILDCARD => OriginHost::Any,
        _ => match names::host_match(&host.to_ascii_lowercase()).map_err(|_| issue())? {
            HostMatch::Exact(name) => OriginHost::Exact(name),
            HostMatch::Suffix(end) => OriginHost::Suffix(end),
        },
    };
    Ok(OriginMatch::Host { scheme, host, port })
}

/// Resolves `corsPolicy` of a VirtualService's rule, if it has one.
pub(super) fn of_virtual_service(
    written: &VirtualServiceRoute,
    rule: &mut RuleContext<'_>,
) -> Option<Box<CorsPolicy>> {
    let written_policy = written.cors_policy.as_ref()?;
    let IstioCorsPolicy {
        allow_origin,
        allow_origins,
        allow_methods,
        allow_headers,
        expose_headers,
        max_age,
        allow_credentials,
        unmatched_preflights,
    } = written_policy;
    let field = "corsPolicy";
    if written.redirect.is_some() || written.direct_response.is_some() {
        let problem = "the policy has no effect on answers of the gateway, as in Istio";
        rule.warning(
            field,
            FieldIssue::new("", problem, "remove it").with_code(Code::IneffectiveField),
        );
    }
    // Istio forwards unmatched preflights by default.
    let dialect = match unmatched_preflights.as_deref() {
        None | Some("UNSPECIFIED" | "FORWARD") => CorsDialect::IstioForward,
        Some("IGNORE") => CorsDialect::IstioIgnore,
        Some(other) => {
            let problem = format!("{other:?} is not what happens to preflights");
            let issue = FieldIssue::new("unmatchedPreflights", problem, "write FORWARD or IGNORE");
            rule.broken(field, issue);
            // A broken rule refuses its requests, so any dialect will do.
            CorsDialect::IstioForward
        }
    };
    let max_age = max_age.map(|time| time.0);
    // The header Access-Control-Max-Age can only have whole seconds.
    if max_age.is_some_and(|time| time.subsec_nanos() > 0) {
        let issue = FieldIssue::new("maxAge", "the time has no whole seconds", "write seconds");
        rule.broken(field, issue);
    }
    check_length(allow_origins.len(), "allowOrigins", field, rule);
    check_length(allow_origin.len(), "allowOrigin", field, rule);
    let mut origins = Vec::new();
    for (at, origin) in allow_origins.iter().enumerate() {
        match origin_of_match(origin, rule) {
            Ok(origin) => origins.push(origin),
            Err(issue) => rule.broken(&format!("{field}.allowOrigins[{at}]"), issue),
        }
    }
    if !allow_origin.is_empty() {
        let problem = "the field is deprecated; it holds where allowOrigins is not written";
        let issue = FieldIssue::new("allowOrigin", problem, "write allowOrigins with exact")
            .with_code(Code::DeprecatedField);
        rule.warning(field, issue);
        if allow_origins.is_empty() {
            // As in Istio, the old field has whole origins, and `*` for any.
            let exact = allow_origin.iter().map(|origin| match origin.as_str() {
                WILDCARD => OriginMatch::Any,
                _ => OriginMatch::Exact(origin.clone()),
            });
            origins.extend(exact);
        }
    }
    Some(Box::new(CorsPolicy {
        origins,
        methods: methods_of(allow_methods, field, rule),
        headers: names_of(allow_headers, "allowHeaders", field, rule),
        exposed: names_of(expose_headers, "exposeHeaders", field, rule).into_header_value(),
        max_age: max_age.map(|time| time.as_secs()),
        credentials: allow_credentials.unwrap_or_default(),
        dialect,
    }))
}

/// Reads an origin of a VirtualService. One that the text `*` matches allows any (Envoy).
fn origin_of_match(
    written: &StringMatch,
    rule: &mut RuleContext<'_>,
) -> Result<OriginMatch, FieldIssue> {
    let StringMatch {
        exact,
        prefix,
        regex,
    } = written;
    match (exact.as_deref(), prefix.as_deref(), regex.as_deref()) {
        (Some(WILDCARD), None, None) | (None, Some(WILDCARD), None) => Ok(OriginMatch::Any),
        (Some(exact), None, None) if !exact.is_empty() => text(exact).map(OriginMatch::Exact),
        (None, Some(prefix), None) if !prefix.is_empty() => text(prefix).map(OriginMatch::Prefix),
        (None, None, Some(written)) if !written.is_empty() => {
            let regex = rule.regex(written)?;
            let matches = pattern::compile(&regex);
            if matches.is_some_and(|compiled| compiled.is_match(WILDCARD.as_bytes())) {
                return Ok(OriginMatch::Any);
            }
            Ok(OriginMatch::Regex(regex))
        }
        _ => Err(FieldIssue::new(
            "",
            "exactly one of exact, prefix and regex is required, and not empty",
            "write one of them, as in exact: https://example.com",
        )),
    }
}

/// Reads `allowMethods`.
fn methods_of(written: &[String], field: &str, rule: &mut RuleContext<'_>) -> CorsList {
    check_list(written, "allowMethods", field, rule);
    for (at, method) in written.iter().enumerate() {
        if method != WILDCARD && !METHODS.contains(&method.as_str()) {
            let problem = format!("{method:?} is not a method");
            let issue = FieldIssue::new("", problem, "write a method such as GET, or *");
            rule.broken(&format!("{field}.allowMethods[{at}]"), issue);
        }
    }
    list_of(written.to_vec())
}

/// Reads a list of headers.
fn names_of(written: &[String], name: &str, field: &str, rule: &mut RuleContext<'_>) -> CorsList {
    check_list(written, name, field, rule);
    for (at, header) in written.iter().enumerate() {
        if header != WILDCARD
            && let Err(issue) = header_name(header)
        {
            rule.broken(&format!("{field}.{name}[{at}]"), issue);
        }
    }
    list_of(written.to_vec())
}

fn check_length(length: usize, name: &str, field: &str, rule: &mut RuleContext<'_>) {
    if length > CORS_NAMES_MAX {
        let problem = format!("the list has {length} values, more than {CORS_NAMES_MAX}");
        let issue = FieldIssue::new(name, problem, "use fewer");
        rule.broken(field, issue.with_code(Code::LimitExceeded));
    }
}

/// Refuses a list that is too long for a header, because each preflight gets a copy of it.
fn check_list(written: &[String], name: &str, field: &str, rule: &mut RuleContext<'_>) {
    check_length(written.len(), name, field, rule);
    let bytes: usize = written.iter().map(|value| value.len() + 1).sum();
    if bytes > CORS_LIST_BYTES_MAX {
        let problem = format!("the list has {bytes} bytes, more than {CORS_LIST_BYTES_MAX}");
        let issue = FieldIssue::new(name, problem, "use shorter names, or *");
        rule.broken(field, issue.with_code(Code::LimitExceeded));
    }
}

fn list_of(names: Vec<String>) -> CorsList {
    match names.as_slice() {
        [] => CorsList::Unnamed,
        [one] if one == WILDCARD => CorsList::Requested,
        _ => CorsList::Listed(names.join(",")),
    }
}

/// Returns the policy of a rule with this action. A rule that refuses its requests shares nothing.
/// Envoy's filter, which Istio configures, leaves answers of the gateway as they are.
pub(super) fn of_action(
    policy: Option<&CorsPolicy>,
    action: &RouteAction,
) -> Option<Box<CorsPolicy>> {
    let policy = policy?;
    let is_shared = match action {
        RouteAction::Split(_) => true,
        RouteAction::Answer(_) => policy.dialect == CorsDialect::GatewayApi,
        RouteAction::Refuse { .. } => false,
    };
    is_shared.then(|| Box::new(policy.clone()))
}
