//! A request's head as the phases need it, whatever HTTP version it came in: to be routed, judged, shown and passed on. It is not read and
//! not translated here.

use canal_h1::{Asked, Framing, Name, Persistence, RequestView, Version, split_authority};
use canal_router::Request;
use canal_wire::hbone::SOURCE;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderName};
use http::uri::PathAndQuery;
use http::{HeaderMap, Method};
use smallvec::SmallVec;

use crate::changes::Changes;
use crate::fault::Fault;

/// What the client speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Spoken {
    Http10,
    Http11,
    Http2,
}

impl Spoken {
    /// The protocol's name.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Spoken::Http10 => "HTTP/1.0",
            Spoken::Http11 => "HTTP/1.1",
            Spoken::Http2 => "HTTP/2",
        }
    }

    /// What an HTTP/1.1 client is told about its connection.
    pub(crate) fn persistence(self, keep: bool) -> Persistence {
        match (keep, self) {
            (false, _) => Persistence::Close,
            (true, Spoken::Http10) => Persistence::KeepAlive,
            (true, _) => Persistence::Implied,
        }
    }
}

/// What later phases need of a request's head.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) asked: Asked,
    pub(crate) framing: Framing,
    pub(crate) spoken: Spoken,
    /// The client keeps its connection.
    pub(crate) keep_alive: bool,
    /// RFC 9110 §9.2.2.
    pub(crate) idempotent: bool,
    pub(crate) grpc: bool,
}

impl Ask {
    /// Of an HTTP/1.1 request.
    pub(crate) fn of_http1(view: &RequestView<'_>) -> Self {
        let asked = match view.method() {
            b"HEAD" => Asked::Head,
            _ if view.upgrade().is_some() => Asked::Upgrade,
            _ => Asked::Ordinary,
        };
        Self {
            asked,
            framing: view.framing(),
            spoken: if view.version() == Version::Http10 { Spoken::Http10 } else { Spoken::Http11 },
            keep_alive: view.keep_alive(),
            idempotent: is_idempotent(view.method()),
            grpc: view.get(Name::ContentType).is_some_and(is_grpc),
        }
    }

    /// Of an HTTP/2 request; `ended`: it has no body.
    pub(crate) fn of_http2(checked: &Checked, ended: bool) -> Self {
        Self {
            asked: if checked.method == Method::HEAD { Asked::Head } else { Asked::Ordinary },
            framing: framing_of_2(&checked.headers, ended),
            spoken: Spoken::Http2,
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

/// How an HTTP/2 request's body is framed in HTTP/1.1.
fn framing_of_2(headers: &HeaderMap, ended: bool) -> Framing {
    let length = headers.get(CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
    match (length, ended) {
        (Some(n), _) => Framing::Length(n),
        (None, true) => Framing::None,
        (None, false) => Framing::Chunked,
    }
}

/// A request that can be shown whole.
pub(crate) trait Whole: Request {
    /// Gives each header line, name and value, as sent.
    fn each_header(&self, visit: &mut dyn FnMut(&[u8], &[u8]));
}

/// What only hops say, and a client's own words never reach an application: Envoy's internal headers, the client certificate as a proxy saw
/// it, and who stands behind a tunnel.
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

/// The header in which Envoy tells applications of the client's certificate.
pub(crate) const CLIENT_CERT: &str = "x-forwarded-client-cert";

/// Takes out of a map what [`is_hop_word`].
pub(crate) fn strip_hop_words(headers: &mut HeaderMap) {
    let words: SmallVec<[HeaderName; 2]> = headers.keys().filter(|name| is_hop_word(name.as_str().as_bytes())).cloned().collect();
    for word in &words {
        headers.remove(word);
    }
}

/// An HTTP/1.1 head as it will be forwarded, as the router and policies ask it.
pub(crate) struct Head<'a> {
    view: RequestView<'a>,
    host: &'a [u8],
    /// What `x-forwarded-proto` will say; `None`: what the client said.
    proto: Option<&'static str>,
}

impl Request for Head<'_> {
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
            Some(proto) if name == Name::XForwardedProto.text() => visit(proto.as_bytes()),
            _ if is_hop_word(name.as_bytes()) => {}
            _ => self.view.fields().named(name.as_bytes()).for_each(visit),
        }
    }
}

impl Whole for Head<'_> {
    fn each_header(&self, visit: &mut dyn FnMut(&[u8], &[u8])) {
        let proto = self.proto.map(|proto| (Name::XForwardedProto.text().as_bytes(), proto.as_bytes()));
        let fields = self.view.fields().iter().filter(|field| !is_hop_word(field.name));
        let kept = fields.filter(|field| proto.is_none() || field.id != Name::XForwardedProto);
        kept.for_each(|field| visit(field.name, field.value));
        proto.into_iter().for_each(|(name, value)| visit(name, value));
    }
}

impl<'a> Head<'a> {
    pub(crate) fn of(view: RequestView<'a>, proto: Option<&'static str>) -> Self {
        Self { host: host_of(view.authority()), view, proto }
    }
}

/// An HTTP/2 request as it may be passed on, whatever the upstream speaks.
#[derive(Debug, Clone)]
pub(crate) struct Checked {
    pub(crate) method: Method,
    pub(crate) authority: String,
    pub(crate) path: PathAndQuery,
    pub(crate) headers: HeaderMap,
}

impl Checked {
    /// As judging left it.
    pub(crate) fn changed(&self, changes: &Changes) -> Result<Self, Fault> {
        let mut changed = self.clone();
        changes.apply(&mut changed.headers);
        if let Some(target) = changes.target(self.path.path().as_bytes(), self.path.query().map(str::as_bytes)) {
            changed.path = PathAndQuery::from_maybe_shared(bytes::Bytes::from(target)).map_err(|_| Fault::BadHttp2("h2_bad_path"))?;
        }
        Ok(changed)
    }
}

impl Request for Checked {
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

impl Whole for Checked {
    fn each_header(&self, visit: &mut dyn FnMut(&[u8], &[u8])) {
        self.headers.iter().for_each(|(name, value)| visit(name.as_str().as_bytes(), value.as_bytes()));
    }
}

/// The host in an authority, without port and brackets.
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
    fn grpc_is_told_by_its_content_type() {
        for (text, want) in
            [("application/grpc", true), ("application/grpc+proto", true), ("application/grpc-web", false), ("text/plain", false)]
        {
            assert_eq!(is_grpc(text.as_bytes()), want, "{text}");
        }
    }
}
