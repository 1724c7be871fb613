//! A request's head in the form that the phases need, for every HTTP version: to route, authorize, inspect and forward it.
//!
//! Heads are neither parsed nor translated here. Start with [`RequestInfo`].

use canal_gateway_config::RequestMutations;
use canal_h1::{FieldName, Framing, HttpVersion, Persistence, RequestKind, RequestView, split_authority};
use canal_router::RoutableRequest;
use canal_wire::hbone::SOURCE;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderName};
use http::uri::PathAndQuery;
use http::{HeaderMap, Method};
use smallvec::SmallVec;

use crate::proxy_error::ProxyError;

/// HTTP version of the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ClientProtocol {
    Http10,
    Http11,
    Http2,
}

impl ClientProtocol {
    /// Returns the protocol's name for logs and external authorizers.
    pub(crate) fn text(self) -> &'static str {
        match self {
            ClientProtocol::Http10 => "HTTP/1.0",
            ClientProtocol::Http11 => "HTTP/1.1",
            ClientProtocol::Http2 => "HTTP/2",
        }
    }

    /// Returns how an HTTP/1.1 response announces whether the connection stays open.
    pub(crate) fn persistence(self, keep: bool) -> Persistence {
        match (keep, self) {
            (false, _) => Persistence::Close,
            (true, ClientProtocol::Http10) => Persistence::KeepAlive,
            (true, _) => Persistence::Implied,
        }
    }
}

/// Properties of a request's head that later phases need.
#[derive(Debug, Clone)]
pub(crate) struct RequestInfo {
    pub(crate) asked: RequestKind,
    pub(crate) framing: Framing,
    pub(crate) spoken: ClientProtocol,
    /// True if the client keeps its connection open.
    pub(crate) keep_alive: bool,
    /// True if the method is idempotent (RFC 9110 §9.2.2).
    pub(crate) idempotent: bool,
    pub(crate) grpc: bool,
}

impl RequestInfo {
    /// Reads the properties of an HTTP/1.1 request.
    pub(crate) fn of_http1(view: &RequestView<'_>) -> Self {
        let asked = match view.method() {
            b"HEAD" => RequestKind::Head,
            _ if view.upgrade().is_some() => RequestKind::Upgrade,
            _ => RequestKind::Ordinary,
        };
        Self {
            asked,
            framing: view.framing(),
            spoken: if view.version() == HttpVersion::Http10 { ClientProtocol::Http10 } else { ClientProtocol::Http11 },
            keep_alive: view.keep_alive(),
            idempotent: is_idempotent(view.method()),
            grpc: view.get(FieldName::ContentType).is_some_and(is_grpc),
        }
    }

    /// Reads the properties of an HTTP/2 request. `ended` means that it has no body.
    pub(crate) fn of_http2(checked: &ValidatedHttp2Request, ended: bool) -> Self {
        Self {
            asked: if checked.method == Method::HEAD { RequestKind::Head } else { RequestKind::Ordinary },
            framing: framing_of_2(&checked.headers, ended),
            spoken: ClientProtocol::Http2,
            keep_alive: true,
            idempotent: is_idempotent(checked.method.as_str().as_bytes()),
            grpc: checked.headers.get(CONTENT_TYPE).is_some_and(|v| is_grpc(v.as_bytes())),
        }
    }

    pub(crate) fn has_body(&self) -> bool {
        !matches!(self.framing, Framing::None | Framing::Length(0))
    }
}

fn is_idempotent(method: &[u8]) -> bool {
    matches!(method, b"GET" | b"HEAD" | b"OPTIONS" | b"TRACE" | b"PUT" | b"DELETE")
}

pub(crate) fn is_grpc(content_type: &[u8]) -> bool {
    content_type.starts_with(b"application/grpc") && matches!(content_type.get(16), None | Some(b'+' | b';' | b' '))
}

/// Returns the framing of an HTTP/2 request's body in HTTP/1.1.
fn framing_of_2(headers: &HeaderMap, ended: bool) -> Framing {
    let length = headers.get(CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
    match (length, ended) {
        (Some(n), _) => Framing::Length(n),
        (None, true) => Framing::None,
        (None, false) => Framing::Chunked,
    }
}

/// A request of which all headers can be read.
pub(crate) trait FullRequest: RoutableRequest {
    /// Passes the name and value of each header line to `visit`, as sent.
    fn each_header(&self, visit: &mut dyn FnMut(&[u8], &[u8]));
}

/// True for headers that only proxies set: Envoy's internal headers, the client certificate that a proxy verified, and the source behind a
/// tunnel. A client's own values of them never reach an application.
pub(crate) fn is_hop_word(name: &[u8]) -> bool {
    const PREFIX: &[u8] = b"x-envoy-";
    match name.first() {
        Some(b'x' | b'X') => {
            name.get(..PREFIX.len()).is_some_and(|start| start.eq_ignore_ascii_case(PREFIX))
                || name.eq_ignore_ascii_case(CLIENT_CERT.as_bytes())
        }
        Some(b'c' | b'C') => name.eq_ignore_ascii_case(SOURCE.as_bytes()),
        _ => false,
    }
}

/// Header in which Envoy describes the client's certificate to applications.
pub(crate) const CLIENT_CERT: &str = "x-forwarded-client-cert";

/// Removes the headers for which [`is_hop_word`] is true.
pub(crate) fn strip_hop_words(headers: &mut HeaderMap) {
    let words: SmallVec<[HeaderName; 2]> = headers.keys().filter(|name| is_hop_word(name.as_str().as_bytes())).cloned().collect();
    for word in &words {
        headers.remove(word);
    }
}

/// An HTTP/1.1 head as it will be forwarded, for the router and the policies.
pub(crate) struct Http1RoutingView<'a> {
    view: RequestView<'a>,
    host: &'a [u8],
    /// Value that `x-forwarded-proto` will have; `None` if the client's own value stays.
    proto: Option<&'static str>,
}

impl RoutableRequest for Http1RoutingView<'_> {
    fn host(&self) -> &[u8] {
        self.host
    }
    fn method(&self) -> &[u8] {
        self.view.method()
    }
    fn path(&self) -> &[u8] {
        self.view.path()
    }
    fn query(&self) -> Option<&[u8]> {
        self.view.query()
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        match self.proto {
            Some(proto) if name == FieldName::XForwardedProto.text() => visit(proto.as_bytes()),
            _ if is_hop_word(name.as_bytes()) => {}
            _ => self.view.fields().named(name.as_bytes()).for_each(visit),
        }
    }
}

impl FullRequest for Http1RoutingView<'_> {
    fn each_header(&self, visit: &mut dyn FnMut(&[u8], &[u8])) {
        let proto = self.proto.map(|proto| (FieldName::XForwardedProto.text().as_bytes(), proto.as_bytes()));
        let fields = self.view.fields().iter().filter(|field| !is_hop_word(field.name));
        let kept = fields.filter(|field| proto.is_none() || field.id != FieldName::XForwardedProto);
        kept.for_each(|field| visit(field.name, field.value));
        proto.into_iter().for_each(|(name, value)| visit(name, value));
    }
}

impl<'a> Http1RoutingView<'a> {
    pub(crate) fn of(view: RequestView<'a>, proto: Option<&'static str>) -> Self {
        Self { host: host_of(view.authority()), view, proto }
    }
}

/// An HTTP/2 request that may be forwarded in either HTTP version.
#[derive(Debug, Clone)]
pub(crate) struct ValidatedHttp2Request {
    pub(crate) method: Method,
    pub(crate) authority: String,
    pub(crate) path: PathAndQuery,
    pub(crate) headers: HeaderMap,
}

impl ValidatedHttp2Request {
    /// Returns the request with the mutations applied.
    pub(crate) fn changed(&self, changes: &RequestMutations) -> Result<Self, ProxyError> {
        let mut changed = self.clone();
        changes.apply(&mut changed.headers);
        if let Some(target) = changes.target(self.path.path().as_bytes(), self.path.query().map(str::as_bytes)) {
            changed.path = PathAndQuery::from_maybe_shared(bytes::Bytes::from(target)).map_err(|_| ProxyError::BadHttp2("h2_bad_path"))?;
        }
        Ok(changed)
    }
}

impl RoutableRequest for &ValidatedHttp2Request {
    fn host(&self) -> &[u8] {
        host_of(self.authority.as_bytes())
    }
    fn method(&self) -> &[u8] {
        self.method.as_str().as_bytes()
    }
    fn path(&self) -> &[u8] {
        self.path.path().as_bytes()
    }
    fn query(&self) -> Option<&[u8]> {
        self.path.query().map(str::as_bytes)
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        self.headers.get_all(name).iter().for_each(|value| visit(value.as_bytes()));
    }
}

impl FullRequest for &ValidatedHttp2Request {
    fn each_header(&self, visit: &mut dyn FnMut(&[u8], &[u8])) {
        self.headers.iter().for_each(|(name, value)| visit(name.as_str().as_bytes(), value.as_bytes()));
    }
}

/// Returns the host of an authority, without port and brackets.
fn host_of(authority: &[u8]) -> &[u8] {
    match split_authority(authority) {
        Some((host, _)) => host.strip_prefix(b"[").and_then(|h| h.strip_suffix(b"]")).unwrap_or(host),
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
            ("x-envoy", false),
            ("x-forwarded-for", false),
            ("cookie", false),
            ("", false),
        ] {
            assert_eq!(is_hop_word(name.as_bytes()), want, "{name}");
        }
        let mut map = HeaderMap::new();
        for name in ["x-envoy-a", "x-envoy-b", "x-envoy-c", "accept", "canal-source"] {
            map.append(name, "1".parse().unwrap());
            map.append(name, "2".parse().unwrap());
        }
        strip_hop_words(&mut map);
        assert_eq!(map.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["accept"]);
    }

    #[test]
    fn grpc_is_recognized_by_its_content_type() {
        for (text, want) in
            [("application/grpc", true), ("application/grpc+proto", true), ("application/grpc-web", false), ("text/plain", false)]
        {
            assert_eq!(is_grpc(text.as_bytes()), want, "{text}");
        }
    }
}
