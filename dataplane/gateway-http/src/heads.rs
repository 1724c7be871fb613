//! Translates heads between HTTP versions and adds the gateway's own request headers.
//!
//! Translation is strict: what one version cannot express safely is refused, never repaired (RFC
//! 9113 §8.2–8.3, §10.3). No IO is done here. Functions are named `request_X_to_Y` and
//! `response_X_to_Y` by HTTP version.

use canal_gateway_config::RequestMutations;
use canal_h1::{
    FieldName, ForwardOptions, Framing, HeaderEdit, HeaderField, MessageRefusal, OutHead,
    RequestKind, RequestView, ResponseView, split_authority,
};
use canal_model::route_filters::HeaderModifier;
use http::header::{CONTENT_LENGTH, EXPECT, HOST, HeaderName, HeaderValue, TE};
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use smallvec::SmallVec;

use crate::head::{
    CLIENT_CERT, ClientProtocol, RequestInfo, ValidatedHttp2Request, is_hop_word, join_cookies,
    several_cookies, strip_hop_words,
};
use crate::proxy_error::ProxyError;

pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
pub const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
pub const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Formats two random numbers as a request ID: a random UUID (RFC 9562 §5.4), as text.
#[inline]
pub fn request_id(high: u64, low: u64) -> [u8; 36] {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let n = (u128::from(high) << 64 | u128::from(low)) & !(0xf << 76) & !(0b11 << 62)
        | 4 << 76
        | 0b10 << 62;
    // Dashes separate the groups of digits.
    const PLACES: [usize; 16] = [0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 24, 26, 28, 30, 32, 34];
    let mut text = [b'-'; 36];
    for (byte, place) in n.to_be_bytes().into_iter().zip(PLACES) {
        text[place] = HEX[usize::from(byte >> 4)];
        text[place + 1] = HEX[usize::from(byte & 15)];
    }
    text
}

/// Header fields in the form that the codec accepts.
type Pairs<'a> = SmallVec<[(&'a [u8], &'a [u8]); 16]>;

/// Fields that the gateway adds to a forwarded request.
pub struct Additions<'a> {
    pub client_ip: &'a str,
    /// ID for a request without `x-request-id`.
    pub request_id: [u8; 36],
    /// Host for an HTTP/1.0 request without Host.
    pub hostname: &'a str,
    /// The gateway's value for `x-forwarded-proto`.
    pub scheme: &'static str,
    /// True if a client's own `x-forwarded-proto` stays.
    pub keeps_proto: bool,
    /// Value of `x-forwarded-client-cert`, if that header is configured and the client proved an
    /// identity.
    pub client_cert: Option<&'a str>,
    /// Mutations by routing and authorization.
    pub changes: Option<&'a RequestMutations>,
}

/// Translates an HTTP/1.1 request to HTTP/1.1: rewrites the head from the client's buffer into
/// `into`.
pub fn request_1_to_1(
    out: &mut OutHead,
    buf: &[u8],
    view: &RequestView<'_>,
    add: &Additions<'_>,
    into: &mut Vec<u8>,
) -> Result<(), MessageRefusal> {
    let forwarded = forwarded_for(view.fields().all(FieldName::XForwardedFor), add.client_ip);
    // A mutation of the cookies was computed from all lines, so it already replaces them by one
    // line.
    let cookies = several_cookies(view).filter(|_| {
        !add.changes
            .is_some_and(|changes| changes.sets_or_removes(FieldName::Cookie.text()))
    });
    // A request without mutations rarely needs more than four edits, which then allocate nothing.
    let mut edits: SmallVec<[HeaderEdit<'_>; 4]> = SmallVec::new();
    edits.push(HeaderEdit::Set(b"x-forwarded-for", &forwarded));
    edits.push(match add.keeps_proto {
        true => HeaderEdit::Default(b"x-forwarded-proto", add.scheme.as_bytes()),
        false => HeaderEdit::Set(b"x-forwarded-proto", add.scheme.as_bytes()),
    });
    if !view.fields().has(FieldName::XRequestId) {
        edits.push(HeaderEdit::Add(b"x-request-id", &add.request_id));
    }
    if let Some(host) = add.changes.and_then(|changes| changes.host.as_ref()) {
        edits.push(HeaderEdit::Set(b"host", host.as_bytes()));
    } else if view.authority().is_empty() {
        // An HTTP/1.0 request may have no Host.
        edits.push(HeaderEdit::Default(b"host", add.hostname.as_bytes()));
    }
    if let Some(line) = &cookies {
        edits.push(HeaderEdit::Set(FieldName::Cookie.text().as_bytes(), line));
    }
    // Headers that only proxies set must not come from the client, nor another spelling of a header
    // that a mutation determines.
    if view.fields().has(FieldName::Other) {
        let is_other = |name: &[u8]| {
            is_hop_word(name) || add.changes.is_some_and(|changes| changes.respells(name))
        };
        let words = view
            .fields()
            .iter()
            .filter(|field| field.id == FieldName::Other && is_other(field.name));
        edits.extend(words.map(|field| HeaderEdit::Remove(field.name)));
    }
    if let Some(client_cert) = add.client_cert {
        edits.push(HeaderEdit::Set(
            CLIENT_CERT.as_bytes(),
            client_cert.as_bytes(),
        ));
    }
    let headers = add.changes.into_iter().flat_map(RequestMutations::headers);
    edits.extend(headers.map(|(name, value)| {
        value.map_or(HeaderEdit::Remove(name.as_bytes()), |value| {
            HeaderEdit::Set(name.as_bytes(), value)
        })
    }));
    let added = add.changes.into_iter().flat_map(RequestMutations::added);
    edits.extend(added.map(|(name, value)| HeaderEdit::Add(name.as_bytes(), value)));
    let target = add
        .changes
        .and_then(|changes| changes.target(view.path(), view.query()));
    let outgoing = ForwardOptions {
        target: target.as_deref(),
        edits: &edits,
        framing: view.framing(),
        upgrade: view.upgrade(),
        accepts_trailers: view.accepts_trailers(),
        ..ForwardOptions::default()
    };
    out.request(view, &outgoing)?;
    out.write_to(buf, into);
    Ok(())
}

/// Joins the addresses so far and the client's into one line, because some applications read only
/// the first line.
#[inline]
pub(crate) fn forwarded_for<'v>(
    values: impl Iterator<Item = &'v [u8]>,
    client: &str,
) -> SmallVec<[u8; 64]> {
    let mut line = SmallVec::new();
    for value in values {
        line.extend_from_slice(value);
        line.extend_from_slice(b", ");
    }
    line.extend_from_slice(client.as_bytes());
    line
}

/// Returns the bytes of names and values, with the four more that HTTP/1.1 needs for each line.
#[inline]
pub fn byte_len(headers: &HeaderMap) -> usize {
    headers
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + 4)
        .sum()
}

fn name_of(field: &HeaderField<'_>) -> Option<HeaderName> {
    HeaderName::from_bytes(field.name).ok()
}

fn map_of<'v>(
    fields: impl Iterator<Item = HeaderField<'v>>,
    skip: &[FieldName],
) -> Option<HeaderMap> {
    let mut map = HeaderMap::new();
    for field in fields.filter(|f| !skip.contains(&f.id)) {
        map.try_append(name_of(&field)?, HeaderValue::from_bytes(field.value).ok()?)
            .ok()?;
    }
    Some(map)
}

/// Returns the target of an HTTP/2 request. Bytes that RFC 3986 does not permit, but HTTP/1.1
/// servers take as they are, are %-escaped where the `http` crate refuses them.
fn http2_target(path: &[u8], query: Option<&[u8]>) -> Option<PathAndQuery> {
    let mut text = Vec::with_capacity(path.len() + 1 + query.map_or(0, <[u8]>::len));
    push_escaped(&mut text, path, b"<>`");
    if let Some(query) = query {
        text.push(b'?');
        push_escaped(&mut text, query, b"<>\"");
    }
    PathAndQuery::from_maybe_shared(bytes::Bytes::from(text)).ok()
}

/// Appends `part`, with the refused bytes %-escaped. Nearly every part has none and is copied at
/// once.
fn push_escaped(text: &mut Vec<u8>, mut part: &[u8], refused: &[u8]) {
    while let Some(at) = part.iter().position(|byte| refused.contains(byte)) {
        text.extend_from_slice(&part[..at]);
        text.extend_from_slice(format!("%{:02X}", part[at]).as_bytes());
        part = &part[at + 1..];
    }
    text.extend_from_slice(part);
}

/// Translates an HTTP/1.1 request to HTTP/2. `Expect` is not passed on, because the caller has
/// handled it.
pub fn request_1_to_2(
    view: &RequestView<'_>,
    add: &Additions<'_>,
) -> Result<Request<()>, ProxyError> {
    let bad = || ProxyError::BadRequest(MessageRefusal::BadTarget);
    // HTTP/2 has `:authority` instead of Host. Content-Length is set from the framing below,
    // because a request may carry it twice.
    let skip = [FieldName::Host, FieldName::Expect, FieldName::ContentLength];
    let mut headers = map_of(view.end_to_end(), &skip)
        .ok_or(ProxyError::BadRequest(MessageRefusal::BadFieldName))?;
    if let Framing::Length(n) = view.framing() {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(n));
    }
    if view.accepts_trailers() {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    let changed = add
        .changes
        .and_then(|changes| changes.target(view.path(), view.query()));
    // An OPTIONS request for the whole server has no path that a mutation could change.
    let path = if view.path() == b"*" {
        PathAndQuery::from_static("*")
    } else if let Some(changed) = changed {
        let mut parts = changed.splitn(2, |byte| *byte == b'?');
        http2_target(parts.next().unwrap_or_default(), parts.next()).ok_or_else(bad)?
    } else {
        http2_target(view.path(), view.query()).ok_or_else(bad)?
    };
    let rewritten = add.changes.and_then(|changes| changes.host.as_ref());
    let authority = match rewritten {
        Some(host) => host.as_bytes(),
        // An HTTP/1.0 request may have no Host.
        None if view.authority().is_empty() => add.hostname.as_bytes(),
        None => view.authority(),
    };
    let uri = Uri::builder()
        // The endpoint's application gets plaintext; `x-forwarded-proto` names the client's scheme.
        .scheme(Scheme::HTTP)
        .authority(authority)
        .path_and_query(path)
        .build()
        .map_err(|_| bad())?;
    let method = Method::from_bytes(view.method())
        .map_err(|_| ProxyError::BadRequest(MessageRefusal::BadMethod))?;
    strip_hop_words(&mut headers);
    join_cookies(&mut headers);
    add.changes.inspect(|changes| changes.apply(&mut headers));
    additions(&mut headers, add);
    Ok(build_request(method, uri, headers))
}

#[inline]
pub fn build_request(method: Method, uri: Uri, headers: HeaderMap) -> Request<()> {
    let mut request = Request::new(());
    *request.method_mut() = method;
    *request.uri_mut() = uri;
    *request.version_mut() = Version::HTTP_2;
    *request.headers_mut() = headers;
    request
}

/// Returns `x-forwarded-for` as it is sent: the addresses so far and the client's.
#[inline]
fn forwarded_line(headers: &HeaderMap, client_ip: &str) -> SmallVec<[u8; 64]> {
    let so_far = headers.get_all(X_FORWARDED_FOR).iter();
    forwarded_for(so_far.map(HeaderValue::as_bytes), client_ip)
}

/// Adds the gateway's own fields to a map, except `x-forwarded-for`: policies read that field as it
/// was received, so it is added when the request is sent.
#[inline]
pub fn additions(headers: &mut HeaderMap, add: &Additions<'_>) {
    if !add.keeps_proto || !headers.contains_key(X_FORWARDED_PROTO) {
        headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static(add.scheme));
    }
    if let Some(Ok(client_cert)) = add.client_cert.map(HeaderValue::from_str) {
        headers.insert(CLIENT_CERT, client_cert);
    }
    if !headers.contains_key(X_REQUEST_ID)
        && let Ok(id) = HeaderValue::from_bytes(&add.request_id)
    {
        headers.insert(X_REQUEST_ID, id);
    }
}

/// Validates what h2 leaves to the application. Nothing in the result may have another meaning for
/// an HTTP/1.1 reader.
///
/// # Errors
/// The request is a CONNECT, or it is ambiguous; [`ProxyError::BadHttp2`] names the reason.
pub fn check_2(request: http::request::Parts) -> Result<ValidatedHttp2Request, ProxyError> {
    let http::request::Parts {
        method,
        uri,
        mut headers,
        ..
    } = request;
    if method == Method::CONNECT {
        // Tunnels are opened on HBONE connections only.
        return Err(ProxyError::Method);
    }
    let bad = |name| Err(ProxyError::BadHttp2(name));
    // The limit of HTTP/1.1, so that both versions serve the same methods.
    if method.as_str().len() > canal_h1::MessageLimits::DEFAULT.method_bytes_max {
        return bad("h2_method_too_long");
    }
    let parts = uri.into_parts();
    let path = parts
        .path_and_query
        .unwrap_or_else(|| PathAndQuery::from_static("/"));
    // Only OPTIONS may ask for the whole server instead of a path (RFC 9113 §8.3.1).
    let origin =
        path.as_str().starts_with('/') || (path.as_str() == "*" && method == Method::OPTIONS);
    // An HTTP/1.1 reader could end the request line at such a byte, or take the rest for a
    // fragment.
    if !origin
        || !path
            .as_str()
            .bytes()
            .all(|b| b > b' ' && b < 0x7f && b != b'#')
    {
        return bad("h2_bad_path");
    }
    let mut hosts = headers.get_all(HOST).iter();
    let (host, second) = (hosts.next(), hosts.next());
    if second.is_some() {
        return bad("h2_duplicate_host");
    }
    // Two different authorities could be read differently by two receivers.
    let authority = match (
        parts.authority.as_ref().map(|a| a.as_str()),
        host.map(HeaderValue::as_bytes),
    ) {
        (Some(authority), Some(host)) if !authority.as_bytes().eq_ignore_ascii_case(host) => {
            return bad("h2_host_mismatch");
        }
        (Some(authority), _) => authority.as_bytes(),
        (None, Some(host)) => host,
        (None, None) => return bad("h2_no_authority"),
    };
    if split_authority(authority).is_none() {
        return bad("h2_bad_authority");
    }
    // `split_authority` accepts ASCII only, so nothing is lost here.
    let authority = String::from_utf8_lossy(authority).into_owned();
    // Receivers of HTTP/1.1 may choose different ones, which would smuggle a request.
    if headers.get_all(CONTENT_LENGTH).iter().nth(1).is_some() {
        return bad("h2_duplicate_content_length");
    }
    if headers
        .get_all(EXPECT)
        .iter()
        // RFC 9110 §10.1.1 defines no other expectation.
        .any(|value| !value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
    {
        return Err(ProxyError::BadRequest(MessageRefusal::UnknownExpectation));
    }
    headers.remove(HOST);
    strip_hop_words(&mut headers);
    join_cookies(&mut headers);
    Ok(ValidatedHttp2Request {
        method,
        authority,
        path,
        headers,
    })
}

/// Translates a validated HTTP/2 request of the client at `client_ip` to HTTP/2.
#[inline]
pub fn request_2_to_2(
    checked: &ValidatedHttp2Request,
    client_ip: &str,
) -> Result<Request<()>, ProxyError> {
    let uri = Uri::builder()
        .scheme(Scheme::HTTP)
        .authority(checked.authority.as_str())
        .path_and_query(checked.path.clone());
    let uri = uri
        .build()
        .map_err(|_| ProxyError::BadHttp2("h2_bad_authority"))?;
    let mut headers = checked.headers.clone();
    if let Ok(line) = HeaderValue::from_bytes(&forwarded_line(&headers, client_ip)) {
        headers.insert(X_FORWARDED_FOR, line);
    }
    Ok(build_request(checked.method.clone(), uri, headers))
}

/// Translates a validated HTTP/2 request of the client at `client_ip` to HTTP/1.1. `Expect` is
/// passed on if there is a body to wait for.
pub fn request_2_to_1(
    out: &mut OutHead,
    (checked, client_ip): (&ValidatedHttp2Request, &str),
    framing: Framing,
    into: &mut Vec<u8>,
) -> Result<(), MessageRefusal> {
    let has_body = !matches!(framing, Framing::None | Framing::Length(0));
    let forwarded = forwarded_line(&checked.headers, client_ip);
    let fields = checked
        .headers
        .iter()
        .filter(|(name, _)| **name != X_FORWARDED_FOR && (has_body || **name != EXPECT));
    let mut pairs: Pairs<'_> = fields
        .map(|(n, v)| (n.as_str().as_bytes(), v.as_bytes()))
        .collect();
    pairs.push((b"x-forwarded-for", &forwarded));
    let accepts_trailers = checked
        .headers
        .get(TE)
        .is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"trailers"));
    let outgoing = ForwardOptions {
        framing,
        accepts_trailers,
        target: Some(checked.path.as_str().as_bytes()),
        ..ForwardOptions::default()
    };
    out.encode_request(
        checked.method.as_str().as_bytes(),
        checked.authority.as_bytes(),
        pairs.iter().copied(),
        &outgoing,
    )?;
    out.write_to(&[], into);
    Ok(())
}

/// Returns the response's framing towards an HTTP/1.1 client.
#[inline]
pub fn framing_to_1(framing: Framing, client_protocol: ClientProtocol) -> Framing {
    match (framing, client_protocol) {
        // Chunked framing lets the client distinguish the end from a broken connection, and lets
        // the connection stay open.
        (Framing::UntilClose, ClientProtocol::Http11) => Framing::Chunked,
        (Framing::Chunked, ClientProtocol::Http10) => Framing::UntilClose,
        (framing, _) => framing,
    }
}

/// Returns the edits that a rule's filters make of a response's head.
#[inline]
pub fn response_edits(headers: Option<&HeaderModifier>) -> ResponseEdits<'_> {
    let Some(HeaderModifier { set, add, remove }) = headers else {
        return ResponseEdits::new();
    };
    let removed = remove
        .iter()
        .map(|name| HeaderEdit::Remove(name.as_bytes()));
    let set = set
        .iter()
        .map(|(name, value)| HeaderEdit::Set(name.as_bytes(), value.as_bytes()));
    let added = add
        .iter()
        .map(|(name, value)| HeaderEdit::Add(name.as_bytes(), value.as_bytes()));
    removed.chain(set).chain(added).collect()
}

/// The edits of a response's head; nearly no response has any.
pub type ResponseEdits<'a> = SmallVec<[HeaderEdit<'a>; 0]>;

/// Translates an HTTP/1.1 response to HTTP/1.1.
#[inline]
pub fn response_1_to_1(
    out: &mut OutHead,
    buf: &[u8],
    view: &ResponseView<'_>,
    outgoing: &ForwardOptions<'_>,
    into: &mut Vec<u8>,
) -> Result<(), MessageRefusal> {
    out.response(view, outgoing)?;
    out.write_to(buf, into);
    Ok(())
}

/// Translates an HTTP/1.1 response to HTTP/2. `None` if HTTP/2 cannot carry it.
pub fn response_1_to_2(view: &ResponseView<'_>) -> Option<Response<()>> {
    let mut headers = map_of(view.end_to_end(), &[FieldName::ContentLength])?;
    if let Some(length) = view.content_length()
        && !matches!(view.status(), 100..=199 | 204)
    {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::from_u16(view.status()).ok()?;
    *response.headers_mut() = headers;
    Some(response)
}

/// Returns the framing of an HTTP/2 response's body in HTTP/1.1.
#[inline]
pub fn framing_of_answer(
    request: &RequestInfo,
    response: &http::response::Parts,
    ended: bool,
) -> Framing {
    let length = response
        .headers
        .get(CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok()?.parse().ok());
    match (length, ended) {
        _ if request.kind == RequestKind::Head
            || matches!(response.status.as_u16(), 100..=199 | 204 | 304) =>
        {
            Framing::None
        }
        (Some(n), _) => Framing::Length(n),
        (None, true) => Framing::Length(0),
        (None, false) => framing_to_1(Framing::Chunked, request.client_protocol),
    }
}

/// Translates an HTTP/2 response to HTTP/1.1.
pub fn response_2_to_1(
    out: &mut OutHead,
    response: &http::response::Parts,
    outgoing: &ForwardOptions<'_>,
    describes_length: bool,
    into: &mut Vec<u8>,
) -> Result<(), MessageRefusal> {
    let pairs: Pairs<'_> = response
        .headers
        .iter()
        .map(|(n, v)| (n.as_str().as_bytes(), v.as_bytes()))
        .collect();
    out.encode_response(
        response.status.as_u16(),
        describes_length,
        pairs.iter().copied(),
        outgoing,
    )?;
    out.write_to(&[], into);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_are_random_uuids() {
        let text = String::from_utf8(request_id(u64::MAX, u64::MAX).to_vec()).unwrap();
        assert_eq!(text, "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_eq!(
            request_id(0, 0).as_slice(),
            b"00000000-0000-4000-8000-000000000000"
        );
        assert_eq!(
            &request_id(0x0123_4567_89ab_cdef, 0)[..18],
            b"01234567-89ab-4def"
        );
    }

    #[test]
    fn every_visible_byte_of_a_target_has_a_form_in_http2() {
        // `#` ends a target and `?` its path, so neither is inside one.
        let visible: Vec<u8> = (0x21..=0x7e).filter(|byte| !b"#?".contains(byte)).collect();
        for (path, query, want) in [
            ("/a<b>`c", None, "/a%3Cb%3E%60c"),
            ("/a", Some("b=\"<`>\""), "/a?b=%22%3C`%3E%22"),
            ("/a", Some(""), "/a?"),
        ] {
            assert_eq!(
                http2_target(path.as_bytes(), query.map(str::as_bytes))
                    .unwrap()
                    .as_str(),
                want
            );
        }
        for byte in visible {
            let path = [b'/', byte];
            assert!(
                http2_target(&path, None).is_some() && http2_target(b"/", Some(&path)).is_some(),
                "{byte:#x}"
            );
        }
    }

    #[test]
    fn http2_requests_that_could_mean_two_things_are_refused() {
        /// One case: the target, the fields, and the authority or the reason of the refusal.
        type Case = (
            &'static str,
            &'static [(&'static str, &'static str)],
            Result<&'static str, &'static str>,
        );
        let cases: &[Case] = &[
            ("http://a/x?y=1", &[], Ok("a")),
            ("http://a:8080/x", &[("host", "A:8080")], Ok("a:8080")),
            ("/x", &[("host", "b")], Ok("b")),
            ("http://a/x", &[("host", "b")], Err("h2_host_mismatch")),
            (
                "http://a/x",
                &[("host", "a"), ("host", "a")],
                Err("h2_duplicate_host"),
            ),
            ("/x", &[], Err("h2_no_authority")),
            ("http://u@a/x", &[], Err("h2_bad_authority")),
            ("/x", &[("host", "a b")], Err("h2_bad_authority")),
            (
                "http://a/x",
                &[("content-length", "1"), ("content-length", "1")],
                Err("h2_duplicate_content_length"),
            ),
            ("http://a/\u{e9}", &[], Err("h2_bad_path")),
        ];
        for (uri, fields, want) in cases {
            let mut request = Request::builder().uri(*uri);
            for (name, value) in *fields {
                request = request.header(*name, *value);
            }
            let checked = check_2(request.body(()).unwrap().into_parts().0);
            match (&checked, want) {
                (Ok(c), Ok(authority)) => assert_eq!(c.authority, *authority, "{uri}"),
                (Err(ProxyError::BadHttp2(name)), Err(want)) => assert_eq!(name, want, "{uri}"),
                other => panic!("{uri}: {other:?}"),
            }
        }
    }

    #[test]
    fn forwarded_addresses_become_one_line() {
        let values: [&[u8]; 2] = [b"1.1.1.1, 2.2.2.2", b"3.3.3.3"];
        assert_eq!(
            &forwarded_for(values.into_iter(), "4.4.4.4")[..],
            b"1.1.1.1, 2.2.2.2, 3.3.3.3, 4.4.4.4"
        );
        assert_eq!(&forwarded_for([].into_iter(), "::1")[..], b"::1");
    }
}
