//! Calls a tenant's external authorizer: `envoy.service.auth.v3.Authorization/Check` over gRPC.
//!
//! The policies decide which authorizer is called, and when. The authorizer is a service of the
//! tenant and is reached like all its services. Start with [`check`].

use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, SystemTime};

use bytes::{Buf, Bytes, BytesMut};
use canal_gateway_config::RequestMutations;
use canal_gateway_config::TenantTls;
use canal_gateway_http::head::FullRequest;
use canal_gateway_http::proxy_error::{ExtAuthzDenial, ProxyError};
use canal_gateway_http::route_authorizer::{
    ANSWER_HEADERS_MAX, each_forwarded_header, forwarded_target,
};
use canal_model::authorization::Authorizer;
use canal_model::ids::ServiceKey;
use canal_router::line_separator;
use h2::RecvStream;
use h2::client::ResponseFuture;
use http::header::{CONTENT_TYPE, TE};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use prost::Message;

use super::buffered_body::BufferedBody;
use super::{AuthorizationState, ExtAuthzCheck};
use crate::balance::{self, TriedEndpoints};
use crate::endpoints::SelectedEndpoint;
use crate::session::ClientSession;
use crate::upstream::{self, TunnelMetadata};
use crate::worker::Worker;

/// Generated message types, with Envoy's field numbers.
#[expect(unreachable_pub, reason = "generated")]
pub(crate) mod proto {
    include!(concat!(env!("OUT_DIR"), "/canal.ext_authz.v3.rs"));
}

/// Largest response of an authorizer, bytes. Four times a request's head, which a response may
/// replace field by field; nobody measured what authorizers send.
pub(crate) const ANSWER_BYTES_MAX: usize = 256 << 10;
/// Most header lines that an authorizer may add, and most that it may remove. As many as one filter
/// of a rule may change.
pub(crate) const HEADERS_MAX: usize = ANSWER_HEADERS_MAX;
/// Envoy's header for whether the body in the check is incomplete.
const PARTIAL_BODY: &str = "x-envoy-auth-partial-body";
/// Result of a check whose authorizer sent more interim responses than it may.
pub(super) const INTERIM_RESPONSES: &str = "authorizer_interim_responses";
const CHECK: &str = "/envoy.service.auth.v3.Authorization/Check";

/// Header mutations that an authorizer requests when it allows the request.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ExtAuthzMutations {
    set: Vec<(String, Vec<u8>)>,
    append: Vec<(String, Vec<u8>)>,
    remove: Vec<String>,
}

impl ExtAuthzMutations {
    /// Returns mutations that set these headers, each to all its lines.
    pub(super) fn of_lines(lines: Vec<(String, Vec<u8>)>) -> Self {
        let mut mutations = Self::default();
        for (name, value) in lines {
            let is_set = mutations.set.iter().any(|(known, _)| *known == name);
            let list = if is_set {
                &mut mutations.append
            } else {
                &mut mutations.set
            };
            list.push((name, value));
        }
        mutations
    }

    /// Leaves out mutations of headers that `changes` determine.
    pub(crate) fn without_determined(mut self, changes: &RequestMutations) -> Self {
        let is_free = |name: &str| !changes.determines(&name.to_ascii_lowercase());
        self.remove.retain(|name| is_free(name));
        self.set.retain(|(name, _)| is_free(name));
        self.append.retain(|(name, _)| is_free(name));
        self
    }

    pub(crate) fn apply<R: FullRequest>(&self, request: &R, changes: &mut RequestMutations) {
        self.remove.iter().for_each(|name| changes.remove(name));
        self.set
            .iter()
            .for_each(|(name, value)| changes.set(name, value));
        // Appended values join the client's own lines, unless an earlier mutation replaced those.
        for (name, value) in &self.append {
            let name = name.to_ascii_lowercase();
            let mut line = changes.value(&name).map(<[u8]>::to_vec);
            if !changes.sets_or_removes(&name) {
                request.header(&name, &mut |sent| join(&name, &mut line, sent));
            }
            join(&name, &mut line, value);
            changes.set(&name, &line.unwrap_or_default());
        }
    }
}

/// Adds a value to the one line of a header; `None` is the header without a value. An empty value
/// before it gets a separator too, so that the joined line has as many values as the request.
fn join(name: &str, line: &mut Option<Vec<u8>>, value: &[u8]) {
    match line {
        None => *line = Some(value.to_vec()),
        Some(line) => {
            line.extend_from_slice(line_separator(name));
            line.extend_from_slice(value);
        }
    }
}

/// Calls the authorizer with the attributes that `context` returns, and counts the result.
///
/// # Errors
/// The authorizer denied the request, or it gave no usable response and does not fail open.
pub(crate) async fn check(
    worker: &Rc<Worker>,
    session: &ClientSession,
    check: &ExtAuthzCheck,
    context: impl FnOnce(&Authorizer) -> proto::AttributeContext,
) -> Result<ExtAuthzMutations, ProxyError> {
    let name = super::policy_name(&check.authorizer);
    let snapshot = worker.snapshot();
    let tenant = snapshot.tenant(session.account.tenant.as_str());
    let Some(authorizer) = tenant
        .and_then(|tenant| tenant.policies.authorizer(&check.authorizer))
        .cloned()
    else {
        worker
            .counts
            // Without the authorizer its `failOpen` is unknown too, so the request is refused.
            .count_ext_authz(&session.account.tenant, &name, "unknown");
        return Err(ProxyError::ExtAuthzFailed("authorizer_unknown"));
    };
    // The call may take long; a snapshot that is in use keeps replaced tables in memory.
    drop(snapshot);
    let attributes = context(&authorizer);
    let server = (&authorizer.service, authorizer.port);
    let outcome = check_over_grpc(worker, session, server, authorizer.timeout, attributes).await;
    let (result, outcome) = match outcome {
        Ok(Ok(agreed)) => ("ok", Ok(agreed)),
        Ok(Err(rejection)) => {
            worker.counts.authorized(
                &session.account.tenant,
                "custom_deny",
                &super::policy_name(&check.policy),
            );
            ("denied", Err(ProxyError::Rejected(Box::new(rejection))))
        }
        Err(why) => {
            tracing::debug!(
                authorizer = name,
                why,
                "gateway: an external authorizer did not answer; its failOpen setting decides"
            );
            // Failing open applies only if there was no decision; a denial always stands.
            match authorizer.fail_open {
                true => ("failed_open", Ok(ExtAuthzMutations::default())),
                false => (why, Err(ProxyError::ExtAuthzFailed(why))),
            }
        }
    };
    worker
        .counts
        .count_ext_authz(&session.account.tenant, &name, result);
    outcome
}

/// Waits for a call of an authorizer within the limits of the tenant and of time.
///
/// # Errors
/// The error of the call, or the limit that is reached.
pub(super) async fn within_limits<T>(
    session: &ClientSession,
    timeout: Duration,
    call: impl Future<Output = Result<T, &'static str>>,
) -> Result<T, &'static str> {
    // One tenant's slow authorizer must not gather requests without limit.
    let Some(_permit) = session.account.begin_ext_authz() else {
        return Err("authorizer_busy");
    };
    match tokio::time::timeout(timeout, call).await {
        Ok(answered) => answered,
        Err(_) => Err("authorizer_timeout"),
    }
}

/// Calls an authorizer over gRPC, at this port of a service.
///
/// # Errors
/// There is no usable answer.
pub(super) async fn check_over_grpc(
    worker: &Rc<Worker>,
    session: &ClientSession,
    server: (&ServiceKey, u16),
    timeout: Duration,
    attributes: proto::AttributeContext,
) -> Result<Result<ExtAuthzMutations, ExtAuthzDenial>, &'static str> {
    // Encoded before the wait, so that one copy of the body waits and not two.
    let message = framed(&proto::CheckRequest {
        attributes: Some(attributes),
    });
    let call = call(worker, session, server, message);
    within_limits(session, timeout, call).await.and_then(read)
}

/// Selects an endpoint of the authorizer's service. Returns it with the gateway's identity for the
/// tunnel and the authority of the call.
pub(super) fn find(
    worker: &Worker,
    session: &ClientSession,
    (service, number): (&ServiceKey, u16),
) -> Result<(SelectedEndpoint, Option<TenantTls>, String), &'static str> {
    let snapshot = worker.snapshot();
    let tenant = snapshot
        .tenant(session.account.tenant.as_str())
        .ok_or("authorizer_unknown")?;
    // Only the tenant's own names are searched, so another tenant's authorizer cannot be found.
    let service = tenant.service(service).ok_or("authorizer_no_service")?;
    let port = service.port(number).ok_or("authorizer_no_service")?;
    let view = worker
        .upstreams
        .view(&snapshot, port.slot)
        .ok_or("authorizer_no_service")?;
    let chosen = balance::endpoint(
        &view,
        &TriedEndpoints::new(),
        None,
        worker.clock.now(),
        || worker.random(),
        // Hashes keep a client at an endpoint; a check has no client.
        |_| None,
    )
    .map_err(|_| "authorizer_no_endpoint")?;
    Ok((
        chosen,
        tenant.tls.clone(),
        format!("{}:{number}", service.names.hostname),
    ))
}

/// Makes one gRPC call with a framed message, and returns the response message.
async fn call(
    worker: &Rc<Worker>,
    session: &ClientSession,
    server: (&ServiceKey, u16),
    message: Bytes,
) -> Result<Bytes, &'static str> {
    let (chosen, tls, authority) = find(worker, session, server)?;
    let introduction = TunnelMetadata {
        tls: tls.as_ref(),
        headers: HeaderMap::new(),
    };
    let (_place, mut send) = upstream::acquire_stream(worker, &chosen, introduction)
        .await
        .map_err(|_| "authorizer_unreachable")?;
    let uri = Uri::builder()
        .scheme("http")
        .authority(authority)
        .path_and_query(CHECK)
        .build()
        .map_err(|_| "authorizer_unreachable")?;
    let mut head = http::Request::new(());
    (*head.method_mut(), *head.uri_mut(), *head.version_mut()) =
        (Method::POST, uri, http::Version::HTTP_2);
    head.headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    head.headers_mut()
        .insert(TE, HeaderValue::from_static("trailers"));
    let (response, mut body) = send
        .send_request(head, false)
        .map_err(|_| "authorizer_unreachable")?;
    body.send_data(message, true)
        .map_err(|_| "authorizer_broken")?;
    receive(response_of(response).await?).await
}

/// Waits for the response of an authorizer over HTTP/2.
pub(super) async fn response_of(
    mut response: ResponseFuture,
) -> Result<http::Response<RecvStream>, &'static str> {
    let response = upstream::final_response(&mut response).await;
    response.map_err(|error| match error {
        ProxyError::InterimResponses(_) => INTERIM_RESPONSES,
        _ => "authorizer_broken",
    })
}

/// Reads the message of a response whose gRPC status is OK.
async fn receive(response: http::Response<RecvStream>) -> Result<Bytes, &'static str> {
    if response.status() != StatusCode::OK {
        return Err("authorizer_status");
    }
    let (parts, mut body) = response.into_parts();
    let mut answer = BytesMut::new();
    while let Some(piece) = body.data().await {
        let piece = piece.map_err(|_| "authorizer_broken")?;
        // The release fails only if more is released than was received.
        let _ = body.flow_control().release_capacity(piece.len());
        if answer.len() + piece.len() > ANSWER_BYTES_MAX {
            return Err("authorizer_too_long");
        }
        answer.extend_from_slice(&piece);
    }
    let trailers = body
        .trailers()
        .await
        .map_err(|_| "authorizer_broken")?
        .unwrap_or(parts.headers);
    if trailers
        .get("grpc-status")
        .is_none_or(|status| status != "0")
    {
        return Err("authorizer_grpc_status");
    }
    unframed(answer.freeze()).ok_or("authorizer_malformed")
}

/// Encodes a gRPC message with its length prefix.
fn framed(message: &impl Message) -> Bytes {
    let encoded = message.encode_to_vec();
    let mut framed = Vec::with_capacity(5 + encoded.len());
    framed.push(0);
    framed.extend_from_slice(
        &u32::try_from(encoded.len())
            .unwrap_or(u32::MAX)
            .to_be_bytes(),
    );
    framed.extend_from_slice(&encoded);
    framed.into()
}

/// Extracts the only message of a response. Compressed messages are refused.
fn unframed(mut answer: Bytes) -> Option<Bytes> {
    (answer.len() >= 5 && answer.get_u8() == 0).then_some(())?;
    let length = answer.get_u32() as usize;
    (answer.len() == length).then_some(answer)
}

/// Interprets a `CheckResponse`: allowed with mutations, or denied.
fn read(answer: Bytes) -> Result<Result<ExtAuthzMutations, ExtAuthzDenial>, &'static str> {
    use proto::check_response::HttpResponse;
    let answer = proto::CheckResponse::decode(answer).map_err(|_| "authorizer_malformed")?;
    // Proto3 omits zero values, so a missing status means OK (google.rpc.Status). An entirely empty
    // message carries no decision.
    let code = answer.status.as_ref().map(|status| status.code);
    match (code, answer.http_response) {
        (None, None) => Err("authorizer_malformed"),
        (None | Some(0), Some(HttpResponse::OkResponse(ok))) => agreed(ok).map(Ok),
        (Some(0), None) => Ok(Ok(ExtAuthzMutations::default())),
        (None | Some(0), Some(HttpResponse::DeniedResponse(denied))) => rejected(denied).map(Err),
        (Some(_), Some(HttpResponse::DeniedResponse(denied))) => rejected(denied).map(Err),
        (Some(_), _) => Ok(Err(ExtAuthzDenial {
            status: 403,
            headers: Vec::new(),
            body: String::new(),
        })),
    }
}

fn value_of(header: &proto::HeaderValue) -> Vec<u8> {
    if header.raw_value.is_empty() {
        header.value.clone().into_bytes()
    } else {
        header.raw_value.clone()
    }
}

fn agreed(ok: proto::OkHttpResponse) -> Result<ExtAuthzMutations, &'static str> {
    if ok.headers.len() > HEADERS_MAX || ok.headers_to_remove.len() > HEADERS_MAX {
        return Err("authorizer_too_many_headers");
    }
    let mut agreed = ExtAuthzMutations {
        remove: ok.headers_to_remove,
        ..ExtAuthzMutations::default()
    };
    for option in ok.headers {
        let Some(header) = option.header else {
            continue;
        };
        let pair = (header.key.clone(), value_of(&header));
        if option.append.is_some_and(|append| append.value) {
            agreed.append.push(pair)
        } else {
            agreed.set.push(pair)
        }
    }
    Ok(agreed)
}

/// True if a response with this status may carry a body.
fn may_have_body(status: &u16) -> bool {
    (200..=599).contains(status) && !matches!(status, 204 | 205 | 304)
}

fn rejected(denied: proto::DeniedHttpResponse) -> Result<ExtAuthzDenial, &'static str> {
    if denied.headers.len() > HEADERS_MAX {
        return Err("authorizer_too_many_headers");
    }
    let code = denied.status.map_or(403, |status| status.code);
    let status = u16::try_from(code)
        .ok()
        .filter(may_have_body)
        .unwrap_or(403);
    // `RequestMutations` drops headers that control framing or cannot be written.
    let mut sound = RequestMutations::default();
    for header in denied
        .headers
        .into_iter()
        .filter_map(|option| option.header)
    {
        sound.set(&header.key, &value_of(&header));
    }
    let headers = sound
        .headers()
        .filter_map(|(name, value)| Some((name.to_string(), value?.to_vec())))
        .collect();
    Ok(ExtAuthzDenial {
        status,
        headers,
        body: denied.body,
    })
}

fn address(of: SocketAddr) -> Option<proto::Address> {
    let socket = proto::SocketAddress {
        address: of.ip().to_canonical().to_string(),
        port_value: of.port().into(),
    };
    Some(proto::Address {
        socket_address: Some(socket),
    })
}

/// Builds the attributes of a connection for a check. `to` is the address of the endpoint, if there
/// is one.
pub(crate) fn connection(
    session: &ClientSession,
    to: Option<SocketAddr>,
) -> proto::AttributeContext {
    let principal = session.principal.spiffe_id();
    let service = session.source.party.service.clone();
    let sni = session.principal.server_name.clone();
    proto::AttributeContext {
        source: Some(proto::Peer {
            address: address(session.client),
            service,
            principal,
        }),
        destination: Some(proto::Peer {
            address: to.and_then(address),
            ..proto::Peer::default()
        }),
        request: Some(proto::Request {
            time: Some(SystemTime::now().into()),
            http: None,
        }),
        tls_session: sni.map(|sni| proto::TlsSession { sni }),
    }
}

/// Properties of a request, other than its head, that a check needs.
pub(crate) struct CheckContext<'a> {
    pub(crate) trial: &'a AuthorizationState,
    pub(crate) protocol: &'static str,
    pub(crate) body: Option<&'a BufferedBody>,
}

/// Builds the attributes of a request for a check, in the form in which it will be forwarded.
/// `listed` are the headers that the authorizer receives, or none for all; and the most bytes of
/// the body.
pub(crate) fn request<R: FullRequest>(
    session: &ClientSession,
    to: Option<SocketAddr>,
    (request, authority): (&R, &[u8]),
    about: &CheckContext<'_>,
    (listed, body_bytes): (&[String], u32),
) -> proto::AttributeContext {
    let trial = about.trial;
    let mut headers = headers(request, &trial.changes, &session.client_ip, listed);
    let mut body = Vec::new();
    // The body may be buffered for another authorizer only.
    if let Some(beginning) = about.body.filter(|_| body_bytes > 0) {
        body = beginning.bytes[..beginning.bytes.len().min(body_bytes as usize)].to_vec();
        let partial = !beginning.is_complete || body.len() < beginning.bytes.len();
        headers.insert(PARTIAL_BODY.into(), partial.to_string());
    }
    // Bytes that are not UTF-8 go into `raw_body`.
    let (body, raw_body) = String::from_utf8(body).map_or_else(
        |e| (String::new(), e.into_bytes()),
        |text| (text, Vec::new()),
    );
    let path = forwarded_target(request, &trial.changes);
    let mut id = String::new();
    request.header("x-request-id", &mut |value| id = text(value));
    // As in Envoy, -1 stands for a size that is not declared.
    let mut size = -1;
    request.header("content-length", &mut |value| {
        size = text(value).parse().unwrap_or(-1)
    });
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
    context.request = Some(proto::Request {
        http: Some(http),
        ..context.request.unwrap_or_default()
    });
    context
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Selects the headers that the authorizer is configured to see, as they will be forwarded. Lines
/// of one name are joined into one value.
fn headers<R: FullRequest>(
    request: &R,
    changes: &RequestMutations,
    client_ip: &str,
    listed: &[String],
) -> HashMap<String, String> {
    let mut headers = HashMap::<String, String>::new();
    each_forwarded_header(request, changes, client_ip, |name, value| {
        if listed.is_empty() || listed.iter().any(|listed| listed == name) {
            let line = headers.entry(name.to_owned()).or_default();
            if !line.is_empty() {
                line.push(',');
            }
            line.push_str(&text(value));
        }
    });
    headers
}

#[cfg(test)]
mod tests {
    use super::proto::check_response::HttpResponse;
    use super::*;

    fn answer(code: Option<i32>, http_response: Option<HttpResponse>) -> Bytes {
        let status = code.map(|code| proto::Status {
            code,
            message: String::new(),
        });
        proto::CheckResponse {
            status,
            http_response,
        }
        .encode_to_vec()
        .into()
    }

    fn header(key: &str, value: &str, append: bool) -> proto::HeaderValueOption {
        let header = proto::HeaderValue {
            key: key.into(),
            value: value.into(),
            raw_value: vec![],
        };
        proto::HeaderValueOption {
            header: Some(header),
            append: append.then_some(proto::BoolValue { value: true }),
        }
    }

    fn ok(headers: Vec<proto::HeaderValueOption>) -> Option<HttpResponse> {
        Some(HttpResponse::OkResponse(proto::OkHttpResponse {
            headers,
            headers_to_remove: vec!["x-b".into()],
        }))
    }

    fn denied(code: i32, headers: Vec<proto::HeaderValueOption>) -> Option<HttpResponse> {
        let status = Some(proto::HttpStatus { code });
        Some(HttpResponse::DeniedResponse(proto::DeniedHttpResponse {
            status,
            headers,
            body: "no".into(),
        }))
    }

    fn too_many_headers() -> Vec<proto::HeaderValueOption> {
        (0..=HEADERS_MAX)
            .map(|n| header(&format!("x-{n}"), "", false))
            .collect()
    }

    /// A case's name, the authorizer's answer, and how it is read.
    type AnswerCase = (
        &'static str,
        Bytes,
        Result<Result<ExtAuthzMutations, ExtAuthzDenial>, &'static str>,
    );

    fn grants_and_broken_answers() -> Vec<AnswerCase> {
        let said = ExtAuthzMutations {
            set: vec![("X-A".into(), b"1".to_vec())],
            append: vec![("x-c".into(), b"2".to_vec())],
            remove: vec!["x-b".into()],
        };
        vec![
            ("nothing at all", Bytes::new(), Err("authorizer_malformed")),
            (
                "no protobuf",
                Bytes::from_static(b"\xff\xff"),
                Err("authorizer_malformed"),
            ),
            (
                "plain yes",
                answer(Some(0), None),
                Ok(Ok(ExtAuthzMutations::default())),
            ),
            (
                "yes with headers",
                answer(
                    Some(0),
                    ok(vec![header("X-A", "1", false), header("x-c", "2", true)]),
                ),
                Ok(Ok(said)),
            ),
            (
                "too many headers",
                answer(Some(0), ok(too_many_headers())),
                Err("authorizer_too_many_headers"),
            ),
        ]
    }

    fn denials() -> Vec<AnswerCase> {
        // gRPC status 7 is PERMISSION_DENIED, 16 is UNAUTHENTICATED, and 0 is OK. A denial without
        // an HTTP status that a response with a body may have becomes a 403, as in Envoy.
        let rejection = |status: u16| {
            Ok(Err(ExtAuthzDenial {
                status,
                headers: vec![],
                body: "no".into(),
            }))
        };
        vec![
            (
                "too many headers in a no",
                answer(Some(7), denied(401, too_many_headers())),
                Err("authorizer_too_many_headers"),
            ),
            (
                "plain no",
                answer(Some(7), None),
                Ok(Err(ExtAuthzDenial {
                    status: 403,
                    headers: vec![],
                    body: String::new(),
                })),
            ),
            (
                "no with a yes in it",
                answer(Some(7), ok(vec![])),
                Ok(Err(ExtAuthzDenial {
                    status: 403,
                    headers: vec![],
                    body: String::new(),
                })),
            ),
            (
                "no with a status",
                answer(Some(16), denied(401, vec![])),
                rejection(401),
            ),
            (
                "a denial with an invalid status",
                answer(Some(7), denied(0, vec![])),
                rejection(403),
            ),
            (
                "a denial with a status that has no body",
                answer(Some(7), denied(204, vec![])),
                rejection(403),
            ),
            (
                "a yes that denies",
                answer(Some(0), denied(401, vec![])),
                rejection(401),
            ),
        ]
    }

    #[test]
    fn answers_are_yes_no_or_nothing() {
        for (what, bytes, want) in grants_and_broken_answers().into_iter().chain(denials()) {
            assert_eq!(read(bytes), want, "{what}");
        }
        // A redirect is a denial too, and the authorizer's framing header is dropped.
        let Ok(Err(no)) = read(answer(
            Some(7),
            denied(
                302,
                vec![
                    header("Location", "/login", false),
                    header("content-length", "9", false),
                ],
            ),
        )) else {
            panic!("a redirection is a no")
        };
        assert_eq!(
            (no.status, no.headers),
            (302, vec![("location".to_string(), b"/login".to_vec())])
        );
    }

    #[test]
    fn messages_have_a_prefix() {
        let request = proto::CheckRequest {
            attributes: Some(proto::AttributeContext::default()),
        };
        let bytes = framed(&request);
        assert_eq!(
            unframed(bytes.clone()),
            Some(request.encode_to_vec().into())
        );
        for bad in [
            &b""[..],
            b"\x00\x00\x00\x00",
            b"\x01\x00\x00\x00\x00",
            b"\x00\x00\x00\x00\x05ab",
        ] {
            assert_eq!(unframed(Bytes::copy_from_slice(bad)), None, "{bad:?}");
        }
    }
}
