//! Defines the answers that a gateway gives itself: redirects and direct responses. It is slow and
//! simple, and shares no code with data planes.
//!
//! The rules, which every faster implementation must follow:
//! - The parts of the URL that a redirect does not name stay as the client sent them. The path is rewritten as for an endpoint ([`crate::filters`]).
//! - The default port of the URL's scheme is left out. The port of the request's host also is if it
//!   is the default one of the client's scheme, and the redirect changes the scheme.
//! - A path that gets a dot segment by its rewrite is answered with 400.
//! - A response that the gateway makes because of an error, after it has chosen the rule and the
//!   backend, gets their changes of response headers, as an endpoint's response does
//!   ([`crate::filters`]). But headers that an authorizer wrote stay as they are, and
//!   `content-type` is not removed.

use canal_model::program::PathMatch;
use canal_model::route_filters::{RedirectPort, RouteAnswer, RouteFilters, UrlRedirect, UrlScheme};

use crate::filters::{ForwardedRequest, has_dot_segment, returned, rewritten_target};

/// A response of the gateway, without the headers that frame it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OracleAnswer {
    pub status: u16,
    /// Headers sorted by name. The values of one header are in the order sent.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

/// Returns the answer to a request whose path `matched` holds for; `None` means 400. `scheme` and
/// `dialled` are those of the client's connection: https if the gateway terminates its TLS, and the
/// service's port.
pub fn answer(
    answer: &RouteAnswer,
    filters: Option<&RouteFilters>,
    matched: &PathMatch,
    sent: &ForwardedRequest,
    (scheme, dialled): (UrlScheme, u16),
) -> Option<OracleAnswer> {
    let (mut headers, body) = match answer {
        RouteAnswer::Redirect(redirect) => {
            let location = location(redirect, matched, sent, (scheme, dialled))?;
            (vec![("location".to_owned(), location)], Vec::new())
        }
        RouteAnswer::Direct(direct) if direct.body.is_empty() => (Vec::new(), Vec::new()),
        RouteAnswer::Direct(direct) => {
            let text = ("content-type".to_owned(), "text/plain".to_owned());
            (vec![text], direct.body.clone())
        }
    };
    if let Some(filters) = filters {
        let changes = &filters.response_headers;
        headers.retain(|(sent, _)| {
            !changes.remove.contains(sent) && !changes.set.iter().any(|(name, _)| name == sent)
        });
        headers.extend(changes.set.iter().chain(&changes.add).cloned());
    }
    headers.sort_by(|a, b| a.0.cmp(&b.0));
    Some(OracleAnswer {
        status: answer.status(),
        headers,
        body,
    })
}

/// Returns the headers of a response that the gateway makes because of an error, sorted by name.
/// `own` are those without the filters of the rule and then of the backend, and `authorizer` those
/// that an authorizer wrote.
pub fn error_headers(
    filters: [Option<&RouteFilters>; 2],
    own: &[(String, String)],
    authorizer: &[(String, String)],
) -> Vec<(String, String)> {
    let is_free = |name: &String| !authorizer.iter().any(|(written, _)| written == name);
    let allowed = filters.map(|filters| {
        let mut allowed = filters?.clone();
        let changes = &mut allowed.response_headers;
        changes.set.retain(|(name, _)| is_free(name));
        changes.add.retain(|(name, _)| is_free(name));
        let is_removed = |name: &String| is_free(name) && name != "content-type";
        changes.remove.retain(is_removed);
        Some(allowed)
    });
    let sent: Vec<_> = own.iter().chain(authorizer).cloned().collect();
    returned(allowed.each_ref().map(Option::as_ref), &sent)
}

fn location(
    redirect: &UrlRedirect,
    matched: &PathMatch,
    sent: &ForwardedRequest,
    (sent_scheme, dialled): (UrlScheme, u16),
) -> Option<String> {
    let scheme = redirect.scheme.unwrap_or(sent_scheme);
    let (sent_host, sent_port) = split_port(&sent.host);
    let host = redirect.host.as_deref().unwrap_or(sent_host);
    let port = match redirect.port {
        RedirectPort::Number(port) => Some(port),
        RedirectPort::Dialled => Some(dialled),
        RedirectPort::OfScheme => None,
        // The port in the client's host belongs to that host, not to the new one.
        RedirectPort::OfHost if redirect.host.is_some() => None,
        // The default port of the old scheme is wrong in the new one.
        RedirectPort::OfHost => {
            let is_default = sent_port == Some(sent_scheme.default_port());
            sent_port.filter(|_| scheme == sent_scheme || !is_default)
        }
    };
    let port = match port {
        Some(port) if port != scheme.default_port() => format!(":{port}"),
        // Clients add the default port of the scheme themselves.
        _ => String::new(),
    };
    let target = match &redirect.path {
        None => sent.target.clone(),
        Some(rewrite) => {
            let target = rewritten_target(rewrite, matched, &sent.target);
            // A client would resolve the dot segment to another path than the rule names.
            if has_dot_segment(&target) {
                return None;
            }
            target
        }
    };
    // `OPTIONS *` has no path.
    let target = match &redirect.query {
        _ if !target.starts_with('/') => String::new(),
        None => target,
        Some(query) => {
            // `split` yields the whole text if there is no query.
            let path = target.split('?').next().unwrap_or_default();
            format!("{path}?{query}")
        }
    };
    Some(format!("{}://{host}{port}{target}", scheme.text()))
}

/// Splits a host from the port behind it.
fn split_port(host: &str) -> (&str, Option<u16>) {
    match host.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') || name.ends_with(']') => {
            match port.parse::<u16>() {
                Ok(port) => (name, Some(port)),
                Err(_) => (host, None),
            }
        }
        _ => (host, None),
    }
}
