//! Asks a tenant's external authorizer (`envoy.service.auth.v3.Authorization/Check`, gRPC) whether a request may pass. Which one is asked, and
//! when, is the policies' business; the authorizer is a service of the tenant and is reached as all its services are.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::SystemTime;

use bytes::{Buf, Bytes, BytesMut};
use canal_model::authorization::Authorizer;
use h2::RecvStream;
use http::header::{CONTENT_TYPE, TE};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use prost::Message;

use super::body::Beginning;
use super::{Question, Trial};
use crate::changes::Changes;
use crate::endpoints::Chosen;
use crate::fault::{Fault, Rejection};
use crate::head::Whole;
use crate::pick::{self, Tried};
use crate::session::Session;
use crate::snapshot::TenantTls;
use crate::upstream::{self, Introduction};
use crate::worker::Worker;

/// The messages, as Envoy has them.
#[expect(unreachable_pub, reason = "generated")]
pub(crate) mod proto {
    include!(concat!(env!("OUT_DIR"), "/canal.ext_authz.v3.rs"));
}

/// Bytes of an authorizer's answer at most.
pub(crate) const ANSWER_BYTES_MAX: usize = 256 << 10;
/// Header lines that an authorizer may add, and remove.
pub(crate) const HEADERS_MAX: usize = 64;
/// Says whether the body that is shown is all of it, as Envoy says it.
const PARTIAL_BODY: &str = "x-envoy-auth-partial-body";
const CHECK: &str = "/envoy.service.auth.v3.Authorization/Check";

/// What an authorizer that agreed wants of the request.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Agreed {
    set: Vec<(String, Vec<u8>)>,
    append: Vec<(String, Vec<u8>)>,
    remove: Vec<String>,
}

impl Agreed {
    pub(crate) fn apply<R: Whole>(&self, request: &R, changes: &mut Changes) {
        self.remove.iter().for_each(|name| changes.remove(name));
        self.set.iter().for_each(|(name, value)| changes.set(name, value));
        for (name, value) in &self.append {
            let name = name.to_ascii_lowercase();
            let mut line = changes.value(&name).map(<[u8]>::to_vec).unwrap_or_default();
            if !changes.says(&name) {
                request.header(&name, &mut |sent| join(&mut line, sent));
            }
            join(&mut line, value);
            changes.set(&name, &line);
        }
    }
}

fn join(line: &mut Vec<u8>, value: &[u8]) {
    if !line.is_empty() {
        line.push(b',');
    }
    line.extend_from_slice(value);
}

/// Asks. `context` says what the authorizer is shown.
pub(crate) async fn ask(
    worker: &Rc<Worker>,
    session: &Session,
    question: &Question,
    context: impl FnOnce(&Authorizer) -> proto::AttributeContext,
) -> Result<Agreed, Fault> {
    let name = super::policy_name(&question.authorizer);
    let snapshot = worker.snapshot();
    let tenant = snapshot.tenant(session.account.tenant.as_str());
    let Some(authorizer) = tenant.and_then(|tenant| tenant.policies.authorizer(&question.authorizer)).cloned() else {
        worker.counts.asked(&session.account.tenant, &name, "unknown");
        return Err(Fault::Unasked("authorizer_unknown"));
    };
    drop(snapshot);
    let request = proto::CheckRequest { attributes: Some(context(&authorizer)) };
    let answered = match session.account.question() {
        None => Err("authorizer_busy"),
        Some(_held) => match tokio::time::timeout(authorizer.timeout, call(worker, session, &authorizer, &request)).await {
            Ok(answered) => answered,
            Err(_) => Err("authorizer_timeout"),
        },
    };
    let judged = answered.and_then(read);
    let (result, judged) = match judged {
        Ok(Ok(agreed)) => ("ok", Ok(agreed)),
        Ok(Err(rejection)) => {
            worker.counts.authorized(&session.account.tenant, "custom_deny", &super::policy_name(&question.policy));
            ("denied", Err(Fault::Rejected(Box::new(rejection))))
        }
        Err(why) => {
            tracing::debug!(authorizer = name, why, "an external authorizer gave no answer");
            match authorizer.fail_open {
                true => ("failed_open", Ok(Agreed::default())),
                false => (why, Err(Fault::Unasked(why))),
            }
        }
    };
    worker.counts.asked(&session.account.tenant, &name, result);
    judged
}

/// Where an authorizer is now: an endpoint of its service, the gateway's identity for the way there, and its name.
fn find(worker: &Worker, session: &Session, authorizer: &Authorizer) -> Result<(Chosen, Option<TenantTls>, String), &'static str> {
    let snapshot = worker.snapshot();
    let tenant = snapshot.tenant(session.account.tenant.as_str()).ok_or("authorizer_unknown")?;
    // By the tenant's own names alone: an authorizer of another tenant does not exist.
    let service = tenant.service(&authorizer.service).ok_or("authorizer_no_service")?;
    let port = service.port(authorizer.port).ok_or("authorizer_no_service")?;
    let view = worker.upstreams.view(&snapshot, port.slot).ok_or("authorizer_no_service")?;
    let chosen = pick::endpoint(&view, &Tried::new(), worker.clock.now(), || worker.random()).map_err(|_| "authorizer_no_endpoint")?;
    Ok((chosen, tenant.tls.clone(), format!("{}:{}", service.names.hostname, authorizer.port)))
}

/// One call; gives the answer's message.
async fn call(worker: &Rc<Worker>, session: &Session, authorizer: &Authorizer, asked: &proto::CheckRequest) -> Result<Bytes, &'static str> {
    let (chosen, tls, authority) = find(worker, session, authorizer)?;
    let introduction = Introduction { tls: tls.as_ref(), headers: HeaderMap::new() };
    let (_place, mut send) = upstream::place(worker, &chosen, introduction).await.map_err(|_| "authorizer_unreachable")?;
    let uri = Uri::builder().scheme("http").authority(authority).path_and_query(CHECK).build().map_err(|_| "authorizer_unreachable")?;
    let mut head = http::Request::new(());
    (*head.method_mut(), *head.uri_mut(), *head.version_mut()) = (Method::POST, uri, http::Version::HTTP_2);
    head.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    head.headers_mut().insert(TE, HeaderValue::from_static("trailers"));
    let (response, mut body) = send.send_request(head, false).map_err(|_| "authorizer_unreachable")?;
    body.send_data(framed(asked), true).map_err(|_| "authorizer_broken")?;
    receive(response.await.map_err(|_| "authorizer_broken")?).await
}

/// The message of an answer that gRPC calls a success.
async fn receive(response: http::Response<RecvStream>) -> Result<Bytes, &'static str> {
    if response.status() != StatusCode::OK {
        return Err("authorizer_status");
    }
    let (parts, mut body) = response.into_parts();
    let mut answer = BytesMut::new();
    while let Some(piece) = body.data().await {
        let piece = piece.map_err(|_| "authorizer_broken")?;
        // Fails only if more is released than was received.
        let _ = body.flow_control().release_capacity(piece.len());
        if answer.len() + piece.len() > ANSWER_BYTES_MAX {
            return Err("authorizer_too_long");
        }
        answer.extend_from_slice(&piece);
    }
    let trailers = body.trailers().await.map_err(|_| "authorizer_broken")?.unwrap_or(parts.headers);
    if trailers.get("grpc-status").is_none_or(|status| status != "0") {
        return Err("authorizer_grpc_status");
    }
    unframed(answer.freeze()).ok_or("authorizer_malformed")
}

/// A gRPC message with its prefix.
fn framed(message: &impl Message) -> Bytes {
    let encoded = message.encode_to_vec();
    let mut framed = Vec::with_capacity(5 + encoded.len());
    framed.push(0);
    framed.extend_from_slice(&u32::try_from(encoded.len()).unwrap_or(u32::MAX).to_be_bytes());
    framed.extend_from_slice(&encoded);
    framed.into()
}

/// The one message of an answer, not compressed.
fn unframed(mut answer: Bytes) -> Option<Bytes> {
    (answer.len() >= 5 && answer.get_u8() == 0).then_some(())?;
    let length = answer.get_u32() as usize;
    (answer.len() == length).then_some(answer)
}

/// What the answer says.
fn read(answer: Bytes) -> Result<Result<Agreed, Rejection>, &'static str> {
    use proto::check_response::HttpResponse;
    let answer = proto::CheckResponse::decode(answer).map_err(|_| "authorizer_malformed")?;
    // No status is the status OK (google.rpc.Status): proto3 does not send zeros, but an empty message says nothing at all.
    let code = answer.status.as_ref().map(|status| status.code);
    match (code, answer.http_response) {
        (None, None) => Err("authorizer_malformed"),
        (None | Some(0), Some(HttpResponse::OkResponse(ok))) => agreed(ok).map(Ok),
        (Some(0), None) => Ok(Ok(Agreed::default())),
        (None | Some(0), Some(HttpResponse::DeniedResponse(denied))) => rejected(denied).map(Err),
        (Some(_), Some(HttpResponse::DeniedResponse(denied))) => rejected(denied).map(Err),
        (Some(_), _) => Ok(Err(Rejection { status: 403, headers: Vec::new(), body: String::new() })),
    }
}

fn value_of(header: &proto::HeaderValue) -> Vec<u8> {
    if header.raw_value.is_empty() { header.value.clone().into_bytes() } else { header.raw_value.clone() }
}

fn agreed(ok: proto::OkHttpResponse) -> Result<Agreed, &'static str> {
    if ok.headers.len() > HEADERS_MAX || ok.headers_to_remove.len() > HEADERS_MAX {
        return Err("authorizer_too_many_headers");
    }
    let mut agreed = Agreed { remove: ok.headers_to_remove, ..Agreed::default() };
    for option in ok.headers {
        let Some(header) = option.header else { continue };
        let pair = (header.key.clone(), value_of(&header));
        if option.append.is_some_and(|append| append.value) { agreed.append.push(pair) } else { agreed.set.push(pair) }
    }
    Ok(agreed)
}

/// A status for an answer, with whatever body.
fn may_have_body(status: &u16) -> bool {
    (200..=599).contains(status) && !matches!(status, 204 | 205 | 304)
}

fn rejected(denied: proto::DeniedHttpResponse) -> Result<Rejection, &'static str> {
    if denied.headers.len() > HEADERS_MAX {
        return Err("authorizer_too_many_headers");
    }
    let code = denied.status.map_or(403, |status| status.code);
    let status = u16::try_from(code).ok().filter(may_have_body).unwrap_or(403);
    // What frames the answer, or could not be written, is left out.
    let mut sound = Changes::default();
    for header in denied.headers.into_iter().filter_map(|option| option.header) {
        sound.set(&header.key, &value_of(&header));
    }
    let headers = sound.headers().filter_map(|(name, value)| Some((name.to_string(), value?.to_vec()))).collect();
    Ok(Rejection { status, headers, body: denied.body })
}

fn address(of: SocketAddr) -> Option<proto::Address> {
    let socket = proto::SocketAddress { address: of.ip().to_canonical().to_string(), port_value: of.port().into() };
    Some(proto::Address { socket_address: Some(socket) })
}

/// What is shown of a connection.
pub(crate) fn connection(session: &Session, to: SocketAddr) -> proto::AttributeContext {
    let principal = session.who.spiffe_id();
    let service = session.source.party.service.clone();
    let sni = session.who.server_name.clone();
    proto::AttributeContext {
        source: Some(proto::Peer { address: address(session.client), service, principal }),
        destination: Some(proto::Peer { address: address(to), ..proto::Peer::default() }),
        request: Some(proto::Request { time: Some(SystemTime::now().into()), http: None }),
        tls_session: sni.map(|sni| proto::TlsSession { sni }),
    }
}

/// What is known of a request beside its head.
pub(crate) struct Shown<'a> {
    pub(crate) trial: &'a Trial,
    pub(crate) protocol: &'static str,
    pub(crate) body: Option<&'a Beginning>,
}

/// What is shown of a request: as it will be forwarded.
pub(crate) fn request<R: Whole>(
    session: &Session,
    to: SocketAddr,
    (request, authority): (&R, &[u8]),
    about: &Shown<'_>,
    authorizer: &Authorizer,
) -> proto::AttributeContext {
    let trial = about.trial;
    let mut headers = headers(request, &trial.changes, authorizer);
    let mut body = Vec::new();
    if let Some(beginning) = about.body.filter(|_| authorizer.body_bytes > 0) {
        body = beginning.bytes[..beginning.bytes.len().min(authorizer.body_bytes as usize)].to_vec();
        let partial = !beginning.whole || body.len() < beginning.bytes.len();
        headers.insert(PARTIAL_BODY.into(), partial.to_string());
    }
    // Bytes that are no text are shown as bytes.
    let (body, raw_body) = String::from_utf8(body).map_or_else(|e| (String::new(), e.into_bytes()), |text| (text, Vec::new()));
    let path = trial.changes.target(request.path(), request.query()).unwrap_or_else(|| {
        let mut path = request.path().to_vec();
        if let Some(query) = request.query() {
            path.push(b'?');
            path.extend_from_slice(query);
        }
        path
    });
    let mut id = String::new();
    request.header("x-request-id", &mut |value| id = text(value));
    let mut size = -1;
    request.header("content-length", &mut |value| size = text(value).parse().unwrap_or(-1));
    let http = proto::HttpRequest {
        id,
        method: text(request.method()),
        headers,
        path: text(&path),
        host: text(authority),
        scheme: session.scheme().into(),
        size,
        protocol: about.protocol.into(),
        body,
        raw_body,
    };
    let mut context = connection(session, to);
    context.request = Some(proto::Request { http: Some(http), ..context.request.unwrap_or_default() });
    context
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The headers that the authorizer wants to see, as they will be forwarded; several lines of one name are one value.
fn headers<R: Whole>(request: &R, changes: &Changes, authorizer: &Authorizer) -> HashMap<String, String> {
    let mut headers = HashMap::<String, String>::new();
    let mut show = |name: String, value: &[u8]| {
        if authorizer.headers.is_empty() || authorizer.headers.contains(&name) {
            let line = headers.entry(name).or_default();
            if !line.is_empty() {
                line.push(',');
            }
            line.push_str(&text(value));
        }
    };
    request.each_header(&mut |name, value| {
        let name = text(name).to_ascii_lowercase();
        if !changes.says(&name) {
            show(name, value);
        }
    });
    for (name, value) in changes.headers() {
        value.into_iter().for_each(|value| show(name.to_string(), value));
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::proto::check_response::HttpResponse;
    use super::*;

    fn answer(code: Option<i32>, http_response: Option<HttpResponse>) -> Bytes {
        let status = code.map(|code| proto::Status { code, message: String::new() });
        proto::CheckResponse { status, http_response }.encode_to_vec().into()
    }

    fn header(key: &str, value: &str, append: bool) -> proto::HeaderValueOption {
        let header = proto::HeaderValue { key: key.into(), value: value.into(), raw_value: vec![] };
        proto::HeaderValueOption { header: Some(header), append: append.then_some(proto::BoolValue { value: true }) }
    }

    #[test]
    fn answers_are_yes_no_or_nothing() {
        let ok = |headers| Some(HttpResponse::OkResponse(proto::OkHttpResponse { headers, headers_to_remove: vec!["x-b".into()] }));
        let denied = |code, headers| {
            let status = Some(proto::HttpStatus { code });
            Some(HttpResponse::DeniedResponse(proto::DeniedHttpResponse { status, headers, body: "no".into() }))
        };
        let rejection = |status: u16| Ok(Err(Rejection { status, headers: vec![], body: "no".into() }));
        let said =
            Agreed { set: vec![("X-A".into(), b"1".to_vec())], append: vec![("x-c".into(), b"2".to_vec())], remove: vec!["x-b".into()] };
        let many = (0..=HEADERS_MAX).map(|n| header(&format!("x-{n}"), "", false)).collect::<Vec<_>>();
        for (what, bytes, want) in [
            ("nothing at all", Bytes::new(), Err("authorizer_malformed")),
            ("no protobuf", Bytes::from_static(b"\xff\xff"), Err("authorizer_malformed")),
            ("plain yes", answer(Some(0), None), Ok(Ok(Agreed::default()))),
            ("yes with headers", answer(Some(0), ok(vec![header("X-A", "1", false), header("x-c", "2", true)])), Ok(Ok(said))),
            ("too many headers", answer(Some(0), ok(many.clone())), Err("authorizer_too_many_headers")),
            ("too many headers in a no", answer(Some(7), denied(401, many)), Err("authorizer_too_many_headers")),
            ("plain no", answer(Some(7), None), Ok(Err(Rejection { status: 403, headers: vec![], body: String::new() }))),
            ("no with a yes in it", answer(Some(7), ok(vec![])), Ok(Err(Rejection { status: 403, headers: vec![], body: String::new() }))),
            ("no with a status", answer(Some(16), denied(401, vec![])), rejection(401)),
            ("a no whose status is no status", answer(Some(7), denied(0, vec![])), rejection(403)),
            ("a no whose status has no body", answer(Some(7), denied(204, vec![])), rejection(403)),
            ("a yes that denies", answer(Some(0), denied(401, vec![])), rejection(401)),
        ] {
            assert_eq!(read(bytes), want, "{what}");
        }
        let Ok(Err(no)) =
            read(answer(Some(7), denied(302, vec![header("Location", "/login", false), header("content-length", "9", false)])))
        else {
            panic!("a redirection is a no")
        };
        assert_eq!((no.status, no.headers), (302, vec![("location".to_string(), b"/login".to_vec())]));
    }

    #[test]
    fn messages_have_a_prefix() {
        let request = proto::CheckRequest { attributes: Some(proto::AttributeContext::default()) };
        let bytes = framed(&request);
        assert_eq!(unframed(bytes.clone()), Some(request.encode_to_vec().into()));
        for bad in [&b""[..], b"\x00\x00\x00\x00", b"\x01\x00\x00\x00\x00", b"\x00\x00\x00\x00\x05ab"] {
            assert_eq!(unframed(Bytes::copy_from_slice(bad)), None, "{bad:?}");
        }
    }
}
