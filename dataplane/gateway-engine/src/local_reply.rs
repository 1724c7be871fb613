//! Local replies: responses that the gateway itself makes. They are short, plain, and reveal
//! nothing about the mesh. The reason, a [`ProxyError`], is decided elsewhere.

use bytes::Bytes;
use canal_gateway_http::head::ClientProtocol;
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_io::clock::TimeoutKind;
use canal_h1::{ForwardOptions, Framing};
use h2::server::SendResponse;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Response, StatusCode};

use crate::downstream_state::Http1Downstream;
use crate::worker::Worker;

/// Form of a local reply to an HTTP/1.1 client.
pub(crate) struct LocalReplyOptions {
    /// True if the connection stays open.
    pub(crate) keep: bool,
    pub(crate) client_protocol: ClientProtocol,
    /// True if the request was HEAD, so that the reply has no body.
    pub(crate) head: bool,
}

impl LocalReplyOptions {
    /// Returns the options for a client whose request could not be parsed: the connection ends.
    pub(crate) fn last() -> Self {
        Self {
            keep: false,
            client_protocol: ClientProtocol::Http11,
            head: false,
        }
    }
}

/// Content type of the gateway's own texts.
const TEXT: &str = "text/plain; charset=utf-8";
/// Content type of an aborted request's response, as Envoy writes it.
const ABORT_TEXT_TYPE: &str = "text/plain";
/// Methods that the gateway serves, for 405 (RFC 9110 §15.5.6).
const ALLOWED: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE";
/// Challenge that asks a client for a valid token (RFC 6750 §3).
const CHALLENGE: &str = "Bearer error=\"invalid_token\"";

/// Returns the fields of the reply, without those for its framing.
fn fields(fault: &ProxyError) -> impl Iterator<Item = (&[u8], &[u8])> + Clone {
    let status = fault.status();
    let (extra, own) = match fault {
        // The authorizer determines its own response; the gateway adds none of its fields.
        ProxyError::Rejected(rejection) => (rejection.headers.as_slice(), false),
        ProxyError::Answered(reply) => (reply.headers.as_slice(), false),
        // As Envoy's, the reply has no further fields.
        ProxyError::Aborted { .. } => (&[][..], false),
        _ => (&[][..], true),
    };
    // The rule determines all headers of its answer.
    let has_content_type = matches!(fault, ProxyError::Answered(_))
        || extra.iter().any(|(name, _)| name == "content-type");
    let text = match fault {
        ProxyError::Aborted { .. } => ABORT_TEXT_TYPE,
        _ => TEXT,
    };
    let text = (!has_content_type).then_some((&b"content-type"[..], text.as_bytes()));
    let allow = (own && status == 405).then_some((&b"allow"[..], ALLOWED.as_bytes()));
    let retry = (own && matches!(status, 429 | 503)).then_some((&b"retry-after"[..], &b"1"[..]));
    let challenge =
        (own && status == 401).then_some((&b"www-authenticate"[..], CHALLENGE.as_bytes()));
    let extra = extra
        .iter()
        .map(|(name, value)| (name.as_bytes(), value.as_slice()));
    [text, allow, retry, challenge]
        .into_iter()
        .flatten()
        .chain(extra)
}

fn body_of(fault: &ProxyError) -> Vec<u8> {
    match fault {
        ProxyError::Rejected(rejection) => rejection.body.clone().into_bytes(),
        ProxyError::Answered(reply) => reply.body.clone(),
        ProxyError::Aborted { .. } => fault.text().as_bytes().to_vec(),
        _ => format!("{}\n", fault.text()).into_bytes(),
    }
}

/// True for a reply with a status that has neither a body nor a length (RFC 9110 §8.6, §15.4.5).
fn has_no_length(fault: &ProxyError) -> bool {
    matches!(fault.status(), 204 | 304)
}

/// Sends a local reply to an HTTP/1.1 client. Returns the payload's bytes; `None` if the client is
/// gone or accepts nothing.
pub(crate) async fn http1(
    worker: &Worker,
    client: &mut Http1Downstream,
    fault: &ProxyError,
    manner: LocalReplyOptions,
) -> Option<u64> {
    if *fault == ProxyError::ClientGone {
        return None;
    }
    let body = body_of(fault);
    let length = body.len().to_string();
    let framing = if manner.head || has_no_length(fault) {
        Framing::None
    } else {
        Framing::Length(body.len() as u64)
    };
    let outgoing = ForwardOptions {
        framing,
        persistence: manner.client_protocol.persistence(manner.keep),
        ..ForwardOptions::default()
    };
    // Needed for HEAD only; otherwise the framing writes the length.
    let described = (manner.head && !has_no_length(fault))
        .then_some((&b"content-length"[..], length.as_bytes()));
    client
        .out
        .encode_response(
            fault.status(),
            manner.head,
            fields(fault).chain(described),
            &outgoing,
        )
        // Fields of authorizers and rules were checked when they were read. An error nevertheless
        // ends the connection without a response.
        .ok()?;
    let into = client.wire.outbox.head();
    client.out.write_to(&[], into);
    // With 204 and 304 the body is empty: the decoder refuses a rule that gives them one, and the
    // statuses of authorizers were checked when they were read.
    if !manner.head {
        into.extend_from_slice(&body);
    }
    client
        .timer
        .arm(TimeoutKind::Client, worker.shared.config.times.client);
    let wire = &mut client.wire;
    let flushed = client
        .timer
        .within(std::future::poll_fn(|cx| {
            wire.io.poll_flush(cx, &mut wire.outbox)
        }))
        .await;
    client.timer.disarm();
    match flushed {
        Ok(Ok(())) => Some(if manner.head { 0 } else { body.len() as u64 }),
        Ok(Err(_)) => None,
        Err(late) => {
            worker.counts.late(late);
            None
        }
    }
}

/// Sends a local reply to an HTTP/2 client; gRPC clients get a trailers-only response. Returns the
/// payload's bytes.
pub(crate) fn http2(
    respond: &mut SendResponse<Bytes>,
    fault: &ProxyError,
    grpc: bool,
    head: bool,
) -> u64 {
    let mut response = Response::new(());
    let headers = response.headers_mut();
    if grpc {
        // A gRPC client reads its status from fields of a response with HTTP status 200.
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(
            "grpc-status",
            HeaderValue::from(u16::from(fault.grpc_status())),
        );
        // The status alone suffices, so a text that no header can carry is left out.
        if let Ok(message) = HeaderValue::from_str(fault.text()) {
            headers.insert("grpc-message", message);
        }
        // Sending fails only if the client is gone.
        let _ = respond.send_response(response, true);
        return 0;
    }
    let body = body_of(fault);
    for (name, value) in fields(fault) {
        // Fields were checked when they were read; one that is no valid header is left out.
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name), HeaderValue::from_bytes(value))
        {
            headers.append(name, value);
        }
    }
    if !has_no_length(fault) {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    }
    // Statuses of rules and authorizers were checked when they were read.
    *response.status_mut() =
        StatusCode::from_u16(fault.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    // The client is gone, so no payload is counted.
    let Ok(mut send) = respond.send_response(response, head) else {
        return 0;
    };
    let bytes = body.len() as u64;
    if head || send.send_data(Bytes::from(body), true).is_err() {
        0
    } else {
        bytes
    }
}
