//! Resolves the answers that a rule asks the gateway for: redirects of HTTPRoutes and
//! VirtualServices, and direct responses. An answer that cannot be given as written breaks its
//! rule.

use std::num::NonZeroU16;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::gateway_api::{HttpRequestRedirectFilter, HttpRule};
use canal_model::policy::istio::{HttpBody, HttpDirectResponse, HttpRedirect, VirtualServiceRoute};
use canal_model::route_filters::{
    DirectResponse, PathRewrite, REDIRECT_STATUSES, RedirectPort, RouteAnswer, UrlRedirect,
    UrlScheme,
};

use super::route_fields::{FieldIssue, RuleContext};
use super::route_filters::{of_path_modifier, rewritten_host, sent_path};
use crate::limits::DIRECT_RESPONSE_BODY_BYTES_MAX;

/// Resolves the redirect of an HTTPRoute's rule, if it has one.
pub(super) fn of_http_route(written: &HttpRule, rule: &mut RuleContext<'_>) -> Option<RouteAnswer> {
    let filters = &written.filters;
    let (at, redirect) = filters
        .iter()
        .enumerate()
        .find_map(|(at, filter)| Some((at, filter.request_redirect.as_ref()?)))?;
    if filters.iter().any(|filter| filter.url_rewrite.is_some()) {
        refuse_together(rule, &format!("filters[{at}]"), "a URLRewrite");
    }
    if !written.backend_refs.is_empty() {
        refuse_together(rule, "backendRefs", "backends");
    }
    let field = format!("filters[{at}].requestRedirect");
    let HttpRequestRedirectFilter {
        scheme,
        hostname,
        path,
        port,
        status_code,
    } = redirect;
    let path = path.as_ref().and_then(|path| {
        let path = of_path_modifier(path, &written.matches);
        take_valid(rule, &format!("{field}.path"), path)
    });
    let host = hostname
        .as_ref()
        .and_then(|host| host_and_port(host, &format!("{field}.hostname"), rule));
    if let Some((_, Some(_))) = &host {
        let issue = FieldIssue::new("", "a host name has no port", "write it as port")
            .with_code(Code::InvalidHostname);
        rule.broken(&format!("{field}.hostname"), issue);
    }
    // Gateway API: without a port and a scheme, the port is the one at which the request arrived.
    let port = match port {
        Some(port) => RedirectPort::Number(port.get()),
        None if scheme.is_some() => RedirectPort::OfScheme,
        None => RedirectPort::Dialled,
    };
    Some(RouteAnswer::Redirect(UrlRedirect {
        // Gateway API's default is 302.
        status: status_of(status_code.unwrap_or(302), &field, "statusCode", rule),
        scheme: scheme_of(scheme.as_deref(), &field, rule),
        host: host.map(|(host, _)| host),
        port,
        path,
        query: None,
    }))
}

/// Resolves `redirect` or `directResponse` of a VirtualService's rule, if it has one.
pub(super) fn of_virtual_service(
    written: &VirtualServiceRoute,
    rule: &mut RuleContext<'_>,
) -> Option<RouteAnswer> {
    let (field, answer) = match (&written.redirect, &written.direct_response) {
        (None, None) => return None,
        (Some(redirect), other) => {
            if other.is_some() {
                refuse_together(rule, "directResponse", "a redirect");
            }
            ("redirect", of_redirect(redirect, rule))
        }
        (None, Some(direct)) => ("directResponse", of_direct_response(direct, rule)),
    };
    if !written.route.is_empty() {
        refuse_together(rule, field, "a route");
    }
    if written.rewrite.is_some() {
        refuse_together(rule, field, "a rewrite");
    }
    Some(answer)
}

fn refuse_together(rule: &mut RuleContext<'_>, field: &str, other: &str) {
    let problem = format!("the rule answers requests itself, so it cannot have {other} too");
    let issue =
        FieldIssue::new("", problem, "remove one of them").with_code(Code::ConflictingActions);
    rule.broken(field, issue);
}

fn of_redirect(written: &HttpRedirect, rule: &mut RuleContext<'_>) -> RouteAnswer {
    let HttpRedirect {
        uri,
        authority,
        port,
        derive_port,
        scheme,
        redirect_code,
    } = written;
    // Istio's API is protobuf, where an empty text or a zero is a field that is not set.
    let uri = uri.as_deref().filter(|uri| !uri.is_empty());
    let (path, query) = match uri.map(|uri| uri.split_once('?').ok_or(uri)) {
        None => (None, None),
        Some(Ok((path, query))) => (Some(path), Some(query)),
        Some(Err(path)) => (Some(path), None),
    };
    let path = path.and_then(|path| take_valid(rule, "redirect.uri", sent_path(path)));
    let query = query.and_then(|query| take_valid(rule, "redirect.uri", sent_query(query)));
    let authority = authority.as_deref().filter(|host| !host.is_empty());
    let host = authority.and_then(|host| host_and_port(host, "redirect.authority", rule));
    let of_authority = host.as_ref().and_then(|(_, port)| *port);
    let port = match (port, derive_port.as_deref(), of_authority) {
        (None, None, None) => RedirectPort::OfHost,
        (Some(port), None, None) => RedirectPort::Number(port.get()),
        (None, None, Some(port)) => RedirectPort::Number(port.get()),
        (None, Some("FROM_PROTOCOL_DEFAULT"), None) => RedirectPort::OfScheme,
        (None, Some("FROM_REQUEST_PORT"), None) => RedirectPort::Dialled,
        _ => {
            let problem = "the port is not exactly one of port, derivePort and that of authority";
            let fix = "write one of them; derivePort is FROM_PROTOCOL_DEFAULT or FROM_REQUEST_PORT";
            rule.broken(
                "redirect.port",
                FieldIssue::new("", problem, fix).with_code(Code::ConflictingFields),
            );
            // Any port will do, since a broken rule redirects nothing.
            RedirectPort::OfHost
        }
    };
    // Istio's default is 301.
    let status = redirect_code.filter(|code| *code != 0).unwrap_or(301);
    RouteAnswer::Redirect(UrlRedirect {
        status: status_of(status, "redirect", "redirectCode", rule),
        scheme: scheme_of(
            scheme.as_deref().filter(|scheme| !scheme.is_empty()),
            "redirect",
            rule,
        ),
        host: host.map(|(host, _)| host),
        port,
        path: path.map(PathRewrite::Full),
        query,
    })
}

/// Validates a query that the gateway sends.
fn sent_query(written: &str) -> Result<String, FieldIssue> {
    let is_sent = |byte: u8| byte > b' ' && byte < 0x7f && byte != b'#';
    if written.bytes().all(is_sent) {
        return Ok(written.to_owned());
    }
    let problem = "a query has no spaces, no '#', and no characters beyond ASCII";
    let fix = "write them as %-escapes";
    Err(FieldIssue::new("", problem, fix).with_code(Code::InvalidPath))
}

/// Returns the body of a direct response, which has one of two forms.
fn body_of(written: Option<&HttpBody>, rule: &mut RuleContext<'_>) -> Vec<u8> {
    let (problem, fix, code) = match written.map(|body| (&body.string, &body.bytes)) {
        None | Some((None, None)) => return Vec::new(),
        Some((Some(text), None)) => return text.clone().into_bytes(),
        Some((None, Some(base64))) => {
            // YAML folds long texts.
            let joined: String = base64.split_ascii_whitespace().collect();
            match STANDARD.decode(joined) {
                Ok(bytes) => return bytes,
                Err(_) => (
                    "the bytes are not base64",
                    "encode them, or write body.string",
                    Code::InvalidValue,
                ),
            }
        }
        Some((Some(_), Some(_))) => (
            "the body has both forms",
            "write string or bytes",
            Code::ConflictingFields,
        ),
    };
    let issue = FieldIssue::new("body", problem, fix).with_code(code);
    rule.broken("directResponse", issue);
    Vec::new()
}

fn of_direct_response(written: &HttpDirectResponse, rule: &mut RuleContext<'_>) -> RouteAnswer {
    let HttpDirectResponse { status, body } = written;
    let body = body_of(body.as_ref(), rule);
    if !(200..600).contains(status) {
        let problem = format!("{status} is not a status from 200 to 599");
        let issue = FieldIssue::new("status", problem, "write a status such as 503");
        rule.broken("directResponse", issue);
    }
    if DirectResponse::has_no_body(*status) && !body.is_empty() {
        let problem = format!("a response with status {status} has no body");
        let issue = FieldIssue::new("body", problem, "remove the body, or change the status")
            .with_code(Code::ConflictingFields);
        rule.broken("directResponse", issue);
    }
    if body.len() > DIRECT_RESPONSE_BODY_BYTES_MAX {
        let bytes = body.len();
        let problem =
            format!("the body has {bytes} bytes, more than {DIRECT_RESPONSE_BODY_BYTES_MAX}");
        let issue = FieldIssue::new("body", problem, "serve it by a workload")
            .with_code(Code::LimitExceeded);
        rule.broken("directResponse", issue);
    }
    RouteAnswer::Direct(DirectResponse {
        status: *status,
        body,
    })
}

/// Returns the valid value; otherwise it breaks the rule.
fn take_valid<T>(
    rule: &mut RuleContext<'_>,
    field: &str,
    checked: Result<T, FieldIssue>,
) -> Option<T> {
    checked.map_err(|issue| rule.broken(field, issue)).ok()
}

fn host_and_port(
    written: &str,
    field: &str,
    rule: &mut RuleContext<'_>,
) -> Option<(String, Option<NonZeroU16>)> {
    let host = rewritten_host(written, field, rule)?;
    Some(match host.split_once(':') {
        Some((name, port)) => (name.to_owned(), port.parse().ok()),
        None => (host, None),
    })
}

fn status_of(status: u16, field: &str, name: &str, rule: &mut RuleContext<'_>) -> u16 {
    if !REDIRECT_STATUSES.contains(&status) {
        let problem = format!("{status} is not the status of a redirect");
        let issue = FieldIssue::new(name, problem, "write 301, 302, 303, 307 or 308");
        rule.broken(field, issue);
    }
    status
}

fn scheme_of(written: Option<&str>, field: &str, rule: &mut RuleContext<'_>) -> Option<UrlScheme> {
    let written = written?;
    let scheme = UrlScheme::of(written);
    if scheme.is_none() {
        let problem = format!("{written:?} is not a scheme that the mesh serves");
        let issue = FieldIssue::new("scheme", problem, "write http or https");
        rule.broken(field, issue);
    }
    scheme
}
