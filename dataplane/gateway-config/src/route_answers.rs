//! The answers that the gateway gives itself, as the rule that a request matched says: redirects and
//! direct responses. It sends nothing. Start with [`MatchedFilters::answer`].

use canal_model::program::RouteAction;
use canal_model::route_filters::{RedirectPort, RouteAnswer, UrlRedirect, UrlScheme};
use http::{HeaderMap, HeaderValue, header};

use crate::route_filters::{MatchedFilters, edit_response};
use crate::route_reply::RouteReply;

/// The parts of a request that its answer depends on.
#[derive(Debug, Clone, Copy)]
pub struct AnsweredRequest<'a> {
    /// Scheme that the client itself uses.
    pub scheme: UrlScheme,
    /// Host with its port, as the client sent it.
    pub authority: &'a [u8],
    /// The service's port that the client dialled.
    pub port: u16,
    /// Path and query, as the client sent them.
    pub path: &'a [u8],
    pub query: Option<&'a [u8]>,
    /// The path in the form that routes compare.
    pub normal_path: &'a str,
}

impl MatchedFilters {
    /// Returns the answer to the request. Returns `None` if the rule has no answer, or if the path of
    /// its redirect has a dot segment.
    pub fn answer(&self, request: &AnsweredRequest<'_>) -> Option<RouteReply> {
        let RouteAction::Answer(answer) = self.action() else {
            return None;
        };
        let mut headers = HeaderMap::new();
        let body = match &**answer {
            RouteAnswer::Redirect(redirect) => {
                let location = self.location(redirect, request)?;
                headers.insert(header::LOCATION, HeaderValue::from_bytes(&location).ok()?);
                Vec::new()
            }
            RouteAnswer::Direct(direct) => {
                if !direct.body.is_empty() {
                    let text = HeaderValue::from_static("text/plain");
                    headers.insert(header::CONTENT_TYPE, text);
                }
                direct.body.clone()
            }
        };
        edit_response(self.response_headers(), &mut headers);
        let headers = headers
            .iter()
            .map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec()));
        Some(RouteReply {
            status: answer.status(),
            headers: headers.collect(),
            body,
            detail: "direct_response",
        })
    }

    /// Returns the URL that a redirect names.
    fn location(&self, redirect: &UrlRedirect, request: &AnsweredRequest<'_>) -> Option<Vec<u8>> {
        let scheme = redirect.scheme.unwrap_or(request.scheme);
        let (name, sent_port) = split_port(request.authority);
        let port = match redirect.port {
            RedirectPort::Number(port) => Some(port),
            RedirectPort::Dialled => Some(request.port),
            RedirectPort::OfHost if redirect.host.is_none() => sent_port
                .filter(|port| scheme == request.scheme || *port != request.scheme.default_port()),
            RedirectPort::OfHost | RedirectPort::OfScheme => None,
        };
        let mut url = format!("{}://", scheme.text()).into_bytes();
        url.extend_from_slice(redirect.host.as_deref().map_or(name, str::as_bytes));
        if let Some(port) = port.filter(|port| *port != scheme.default_port()) {
            url.extend_from_slice(format!(":{port}").as_bytes());
        }
        // `OPTIONS *` is about the server, and has no path.
        if !request.path.starts_with(b"/") {
            return Some(url);
        }
        match &redirect.path {
            None => url.extend_from_slice(request.path),
            Some(path) => {
                let path = self.rewritten(path, request.normal_path)?;
                url.extend_from_slice(path.as_bytes());
            }
        }
        let own = redirect.query.as_deref().map(str::as_bytes);
        if let Some(query) = own.or(request.query) {
            url.push(b'?');
            url.extend_from_slice(query);
        }
        Some(url)
    }
}

/// Splits a host from the port behind it.
fn split_port(authority: &[u8]) -> (&[u8], Option<u16>) {
    let Some(at) = authority.iter().rposition(|byte| *byte == b':') else {
        return (authority, None);
    };
    let (name, port) = (&authority[..at], &authority[at + 1..]);
    let is_name = !name.contains(&b':') || name.ends_with(b"]");
    let port = std::str::from_utf8(port)
        .ok()
        .filter(|port| is_name && port.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|port| port.parse().ok());
    match port {
        Some(port) => (name, Some(port)),
        None => (authority, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_split_from_its_port() {
        for (authority, name, port) in [
            ("web", "web", None),
            ("web:8080", "web", Some(8080)),
            ("[fd00::1]:80", "[fd00::1]", Some(80)),
            ("[fd00::1]", "[fd00::1]", None),
            ("fd00::1", "fd00::1", None),
            ("web:", "web:", None),
            ("web:x", "web:x", None),
            ("web:70000", "web:70000", None),
        ] {
            let (split, found) = split_port(authority.as_bytes());
            assert_eq!((split, found), (name.as_bytes(), port), "{authority}");
        }
    }
}
