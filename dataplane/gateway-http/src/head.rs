//! A request's head in the form that the phases need, for every HTTP version: to route, authorize,
//! inspect and forward it.
//!
//! Heads are neither parsed nor translated here. Start with [`RequestInfo`].

use canal_gateway_config::{RequestMutations, is_spelling_of};
use canal_h1::{
    FieldName, Framing, HttpVersion, Persistence, RequestKind, RequestView, split_authority,
};
use canal_router::RoutableRequest;
use canal_wire::hbone::SOURCE;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, COOKIE, HeaderName, HeaderValue};
use http::uri::PathAndQuery;
use http::{HeaderMap, Method};
use smallvec::SmallVec;

use crate::proxy_error::ProxyError;

/// HTTP version of the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ClientProtocol {
    Http10,
    Http11,
    Http2,
}

impl ClientProtocol {
    /// Returns the protocol's name for logs and external authorizers.
    pub fn text(self) -> &'static str {
        match self {
            ClientProtocol::Http10 => "HTTP/1.0",
            ClientProtocol::Http11 => "HTTP/1.1",
            ClientProtocol::Http2 => "HTTP/2",
        }
    }

    /// Returns how an HTTP/1.1 response announces whether the connection stays open.
    #[inline]
    pub fn persistence(self, keep: bool) -> Persistence {
        match (keep, self) {
            (false, _) => Persistence::Close,
            (true, ClientProtocol::Http10) => Persistence::KeepAlive,
            (true, _) => Persistence::Implied,
        }
    }
}

/// Properties of a request's head that later phases need.
#[derive(Debug, Clone)]
pub struct RequestInfo {
    pub kind: RequestKind,
    pub framing: Framing,
    pub client_protocol: ClientProtocol,
    /// True if the client keeps its connection open.
    pub keep_alive: bool,
    /// True if the method is idempotent (RFC 9110 §9.2.2).
    pub idempotent: bool,
    pub grpc: bool,
}

impl RequestInfo {
    /// Reads the properties of an HTTP/1.1 request.
    #[inline]
    pub fn of_http1(view: &RequestView<'_>) -> Self {
        let kind = match view.method() {
            b"HEAD" => RequestKind::Head,
            _ if view.upgrade().is_some() => RequestKind::Upgrade,
            _ => RequestKind::Ordinary,
        };
        Self {
            kind,
            framing: view.framing(),
            client_protocol: if view.version() == HttpVersion::Http10 {
                ClientProtocol::Http10
            } else {
                ClientProtocol::Http11
            },
            keep_alive: view.keep_alive(),
            idempotent: is_idempotent(view.method()),
            grpc: view.get(FieldName::ContentType).is_some_and(is_grpc),
        }
    }

    /// Reads the properties of an HTTP/2 request. `ended` means that it has no body.
    #[inline]
    pub fn of_http2(checked: &ValidatedHttp2Request, ended: bool) -> Self {
        Self {
            kind: if checked.method == Method::HEAD {
                RequestKind::Head
            } else {
                RequestKind::Ordinary
            },
            framing: framing_of_2(&checked.method, &checked.headers, ended),
            client_protocol: ClientProtocol::Http2,
            keep_alive: true,
            idempotent: is_idempotent(checked.method.as_str().as_bytes()),
            grpc: checked
                .headers
                .get(CONTENT_TYPE)
                .is_some_and(|v| is_grpc(v.as_bytes())),
        }
    }

    #[inline]
    pub fn has_body(&self) -> bool {
        !matches!(self.framing, Framing::None | Framing::Length(0))
    }

    /// True if the request may be sent again even though an endpoint may have processed it: its
    /// method is idempotent, and no body was used up.
    #[inline]
    pub fn is_repeatable(&self) -> bool {
        self.idempotent && !self.has_body()
    }
}

#[inline]
fn is_idempotent(method: &[u8]) -> bool {
    matches!(
        method,
        b"GET" | b"HEAD" | b"OPTIONS" | b"TRACE" | b"PUT" | b"DELETE"
    )
}

#[inline]
pub fn is_grpc(content_type: &[u8]) -> bool {
    content_type.starts_with(b"application/grpc")
        && matches!(content_type.get(16), None | Some(b'+' | b';' | b' '))
}

/// Returns the framing of an HTTP/2 request's body in HTTP/1.1.
#[inline]
fn framing_of_2(method: &Method, headers: &HeaderMap, ended: bool) -> Framing {
    let length = headers
        .get(CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok()?.parse().ok());
    match (length, ended) {
        (Some(n), _) => Framing::Length(n),
        // RFC 9110 §8.6: methods that have a body state its absence. Some servers answer 411
        // otherwise. HTTP/2 clients need not state it.
        (None, true) if matches!(*method, Method::POST | Method::PUT | Method::PATCH) => {
            Framing::Length(0)
        }
        (None, true) => Framing::None,
        (None, false) => Framing::Chunked,
    }
}

/// A request of which all headers can be read.
pub trait FullRequest: RoutableRequest {
    /// Passes the name and value of each header line to `visit`, as sent.
    fn each_header(&self, visit: &mut dyn FnMut(&[u8], &[u8]));
}

/// True for headers that only proxies set: Envoy's internal headers, the client certificate that a
/// proxy verified, and the source behind a tunnel. A client's own values of them never reach an
/// application. CGI and its descendants (WSGI, PHP) treat `_` and `-` in a name as the same. So the
/// same names with `_` are such headers too, and so are the names with `_` of headers that the
/// gateway sets itself.
#[inline]
pub fn is_hop_word(name: &[u8]) -> bool {
    const PREFIX: &[u8] = b"x-envoy-";
    match name.first() {
        Some(b'x' | b'X') => {
            name.get(..PREFIX.len())
                .is_some_and(|start| is_spelling_of(start, PREFIX))
                || is_spelling_of(name, CLIENT_CERT.as_bytes())
                || (name.contains(&b'_')
                    && GATEWAY_HEADERS
                        .iter()
                        .any(|own| is_spelling_of(name, own.text().as_bytes())))
        }
        Some(b'c' | b'C') => is_spelling_of(name, SOURCE.as_bytes()),
        _ => false,
    }
}

/// Headers that the gateway sets and whose values by clients it uses.
const GATEWAY_HEADERS: [FieldName; 3] = [
    FieldName::XForwardedFor,
    FieldName::XForwardedProto,
    FieldName::XRequestId,
];

/// Joins the cookies of several lines to the one line that RFC 6265 §5.4 has, and into which RFC
/// 9113 §8.2.3 lets HTTP/2 split it. The routes, the policies, the authorizers and the endpoint see
/// this line, whatever the HTTP version.
fn joined_cookies<'v>(lines: impl Iterator<Item = &'v [u8]>) -> Vec<u8> {
    let mut joined = Vec::new();
    for (n, line) in lines.enumerate() {
        if n > 0 {
            joined.extend_from_slice(b"; ");
        }
        joined.extend_from_slice(line);
    }
    joined
}

/// Joins the `cookie` lines of a map.
#[inline]
pub fn join_cookies(headers: &mut HeaderMap) {
    let lines = headers.get_all(COOKIE);
    if lines.iter().nth(1).is_some()
        && let Ok(joined) =
            HeaderValue::from_bytes(&joined_cookies(lines.iter().map(HeaderValue::as_bytes)))
    {
        headers.insert(COOKIE, joined);
    }
}

/// Returns the one line for the `cookie` lines of an HTTP/1.1 head; `None` if there is only one, or
/// none.
#[inline]
pub fn several_cookies(view: &RequestView<'_>) -> Option<Vec<u8>> {
    let lines = || view.fields().all(FieldName::Cookie);
    (view.fields().has(FieldName::Cookie) && lines().nth(1).is_some())
        .then(|| joined_cookies(lines()))
}

/// Header in which Envoy describes the client's certificate to applications.
pub const CLIENT_CERT: &str = "x-forwarded-client-cert";

/// Removes the headers for which [`is_hop_word`] is true.
#[inline]
pub fn strip_hop_words(headers: &mut HeaderMap) {
    let words: SmallVec<[HeaderName; 2]> = headers
        .keys()
        .filter(|name| is_hop_word(name.as_str().as_bytes()))
        .cloned()
        .collect();
    for word in &words {
        headers.remove(word);
    }
}

/// An HTTP/1.1 head as it will be forwarded, for the router and the policies.
pub struct Http1RoutingView<'a> {
    view: RequestView<'a>,
    host: &'a [u8],
    /// Value that `x-forwarded-proto` will have; `None` if the client's own value stays.
    proto: Option<&'static str>,
}

impl RoutableRequest for Http1RoutingView<'_> {
    #[inline]
    fn host(&self) -> &[u8] {
        self.host
    }
    #[inline]
    fn method(&self) -> &[u8] {
        self.view.method()
    }
    #[inline]
    fn path(&self) -> &[u8] {
        self.view.path()
    }
    #[inline]
    fn query(&self) -> Option<&[u8]> {
        self.view.query()
    }
    #[inline]
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        match self.proto {
            Some(proto) if name == FieldName::XForwardedProto.text() => visit(proto.as_bytes()),
            _ if is_hop_word(name.as_bytes()) => {}
            _ if name == FieldName::Cookie.text()
                && let Some(joined) = several_cookies(&self.view) =>
            {
                visit(&joined);
            }
            _ => self.view.fields().named(name.as_bytes()).for_each(visit),
        }
    }
}

impl FullRequest for Http1RoutingView<'_> {
    #[inline]
    fn each_header(&self, visit: &mut dyn FnMut(&[u8], &[u8])) {
        let proto = self.proto.map(|proto| {
            (
                FieldName::XForwardedProto.text().as_bytes(),
                proto.as_bytes(),
            )
        });
        let fields = self
            .view
            .fields()
            .iter()
            .filter(|field| !is_hop_word(field.name));
        let fields =
            fields.filter(|field| proto.is_none() || field.id != FieldName::XForwardedProto);
        let cookies = several_cookies(&self.view);
        let fields = fields.filter(|field| cookies.is_none() || field.id != FieldName::Cookie);
        fields.for_each(|field| visit(field.name, field.value));
        cookies
            .iter()
            .for_each(|line| visit(FieldName::Cookie.text().as_bytes(), line));
        proto
            .into_iter()
            .for_each(|(name, value)| visit(name, value));
    }
}

impl<'a> Http1RoutingView<'a> {
    #[inline]
    pub fn of(view: RequestView<'a>, proto: Option<&'static str>) -> Self {
        Self {
            host: host_of(view.authority()),
            view,
            proto,
        }
    }
}

/// An HTTP/2 request that may be forwarded in either HTTP version.
#[derive(Debug, Clone)]
pub struct ValidatedHttp2Request {
    pub method: Method,
    pub authority: String,
    pub path: PathAndQuery,
    pub headers: HeaderMap,
}

impl ValidatedHttp2Request {
    /// Returns the request with the mutations applied.
    pub fn changed(&self, changes: &RequestMutations) -> Result<Self, ProxyError> {
        let mut changed = self.clone();
        changes.apply(&mut changed.headers);
        if let Some(target) = changes.target(
            self.path.path().as_bytes(),
            self.path.query().map(str::as_bytes),
        ) {
            changed.path = PathAndQuery::from_maybe_shared(bytes::Bytes::from(target))
                .map_err(|_| ProxyError::BadHttp2("h2_bad_path"))?;
        }
        if let Some(host) = &changes.host {
            changed.authority.clone_from(host);
        }
        Ok(changed)
    }
}

impl RoutableRequest for &ValidatedHttp2Request {
    #[inline]
    fn host(&self) -> &[u8] {
        host_of(self.authority.as_bytes())
    }
    #[inline]
    fn method(&self) -> &[u8] {
        self.method.as_str().as_bytes()
    }
    #[inline]
    fn path(&self) -> &[u8] {
        self.path.path().as_bytes()
    }
    #[inline]
    fn query(&self) -> Option<&[u8]> {
        self.path.query().map(str::as_bytes)
    }
    #[inline]
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        self.headers
            .get_all(name)
            .iter()
            .for_each(|value| visit(value.as_bytes()));
    }
}

impl FullRequest for &ValidatedHttp2Request {
    #[inline]
    fn each_header(&self, visit: &mut dyn FnMut(&[u8], &[u8])) {
        self.headers
            .iter()
            .for_each(|(name, value)| visit(name.as_str().as_bytes(), value.as_bytes()));
    }
}

/// Returns the host of an authority, without port and brackets.
#[inline]
fn host_of(authority: &[u8]) -> &[u8] {
    match split_authority(authority) {
        Some((host, _)) => host
            .strip_prefix(b"[")
            .and_then(|h| h.strip_suffix(b"]"))
            .unwrap_or(host),
        None => authority,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hop_words_are_known_in_any_case() {
        for (name, want) in [
            ("x-forwarded-client-cert", true),
            ("X-Forwarded-Client-Cert", true),
            ("x-envoy-internal", true),
            ("X-ENVOY-peer-metadata-id", true),
            ("Canal-Source", true),
            ("x_forwarded_client_cert", true),
            ("X-Forwarded_Client-Cert", true),
            ("x_envoy_internal", true),
            ("canal_source", true),
            ("x_forwarded_for", true),
            ("x-forwarded_proto", true),
            ("X_Request_Id", true),
            ("x_forwarded_host", false),
            ("x-envoy", false),
            ("x-forwarded-for", false),
            ("cookie", false),
            ("", false),
        ] {
            assert_eq!(is_hop_word(name.as_bytes()), want, "{name}");
        }
        let mut map = HeaderMap::new();
        for name in [
            "x-envoy-a",
            "x-envoy-b",
            "x-envoy-c",
            "accept",
            "canal-source",
        ] {
            map.append(name, "1".parse().unwrap());
            map.append(name, "2".parse().unwrap());
        }
        strip_hop_words(&mut map);
        assert_eq!(
            map.keys().map(HeaderName::as_str).collect::<Vec<_>>(),
            ["accept"]
        );
    }

    #[test]
    fn cookies_become_one_line() {
        let mut map = HeaderMap::new();
        for (more, want) in [
            ("a=1", "a=1"),
            ("b=2; c=3", "a=1; b=2; c=3"),
            ("", "a=1; b=2; c=3; "),
        ] {
            map.append("cookie", more.parse().unwrap());
            join_cookies(&mut map);
            assert_eq!(map.get_all("cookie").iter().collect::<Vec<_>>(), [want]);
        }
    }

    #[test]
    fn grpc_is_recognized_by_its_content_type() {
        for (text, want) in [
            ("application/grpc", true),
            ("application/grpc+proto", true),
            ("application/grpc-web", false),
            ("text/plain", false),
        ] {
            assert_eq!(is_grpc(text.as_bytes()), want, "{text}");
        }
    }
}
