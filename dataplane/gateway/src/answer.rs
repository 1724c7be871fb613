//! The gateway's own answers to clients: short, plain, telling nothing about the mesh's inside. Which fault it is was decided elsewhere.

use bytes::Bytes;
use canal_h1::{Framing, Outgoing};
use h2::server::SendResponse;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Response, StatusCode};

use crate::client::Client;
use crate::clock::Late;
use crate::fault::Fault;
use crate::head::Spoken;
use crate::worker::Worker;

/// How an HTTP/1.1 client is answered.
pub(crate) struct Manner {
    /// The connection stays.
    pub(crate) keep: bool,
    pub(crate) spoken: Spoken,
    /// The request was HEAD: no body.
    pub(crate) head: bool,
}

impl Manner {
    /// For a client whose request could not be read: the connection ends.
    pub(crate) fn last() -> Self {
        Self { keep: false, spoken: Spoken::Http11, head: false }
    }
}

/// What the gateway's own words are.
const TEXT: &str = "text/plain; charset=utf-8";
/// Methods that are served, for 405 (RFC 9110 §15.5.6).
const ALLOWED: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE";
/// How a client is asked for a valid token (RFC 6750 §3).
const CHALLENGE: &str = "Bearer error=\"invalid_token\"";

/// Fields of the answer beside its framing.
fn fields(fault: &Fault) -> impl Iterator<Item = (&[u8], &[u8])> + Clone {
    let status = fault.status();
    let (extra, own) = match fault {
        // An authorizer says what its answer is; nothing of ours.
        Fault::Rejected(rejection) => (rejection.headers.as_slice(), false),
        _ => (&[][..], true),
    };
    let said = extra.iter().any(|(name, _)| name == "content-type");
    let text = (!said).then_some((&b"content-type"[..], TEXT.as_bytes()));
    let allow = (own && status == 405).then_some((&b"allow"[..], ALLOWED.as_bytes()));
    let retry = (own && matches!(status, 429 | 503)).then_some((&b"retry-after"[..], &b"1"[..]));
    let challenge = (own && status == 401).then_some((&b"www-authenticate"[..], CHALLENGE.as_bytes()));
    let extra = extra.iter().map(|(name, value)| (name.as_bytes(), value.as_slice()));
    [text, allow, retry, challenge].into_iter().flatten().chain(extra)
}

fn body_of(fault: &Fault) -> String {
    match fault {
        Fault::Rejected(rejection) => rejection.body.clone(),
        _ => format!("{}\n", fault.text()),
    }
}

/// Answers an HTTP/1.1 client. Gives the payload's bytes; `None` if the client is gone or takes nothing.
pub(crate) async fn http1(worker: &Worker, client: &mut Client, fault: &Fault, manner: Manner) -> Option<u64> {
    if *fault == Fault::ClientGone {
        return None;
    }
    let body = body_of(fault);
    let length = body.len().to_string();
    let framing = if manner.head { Framing::None } else { Framing::Length(body.len() as u64) };
    let outgoing = Outgoing { framing, persistence: manner.spoken.persistence(manner.keep), ..Outgoing::default() };
    // Only used for HEAD; otherwise the framing writes it.
    let described = manner.head.then_some((&b"content-length"[..], length.as_bytes()));
    client.out.encode_response(fault.status(), manner.head, fields(fault).chain(described), &outgoing).ok()?;
    let into = client.wire.outbox.head();
    client.out.write_to(&[], into);
    if !manner.head {
        into.extend_from_slice(body.as_bytes());
    }
    client.timer.arm(Late::Client, worker.shared.config.times.client);
    let wire = &mut client.wire;
    let flushed = client.timer.within(std::future::poll_fn(|cx| wire.io.poll_flush(cx, &mut wire.outbox))).await;
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

/// Answers an HTTP/2 client; gRPC clients in their own way (trailers only). Gives the payload's bytes.
pub(crate) fn http2(respond: &mut SendResponse<Bytes>, fault: &Fault, grpc: bool, head: bool) -> u64 {
    let mut response = Response::new(());
    let headers = response.headers_mut();
    if grpc {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert("grpc-status", HeaderValue::from(u16::from(fault.grpc_status())));
        if let Ok(message) = HeaderValue::from_str(fault.text()) {
            headers.insert("grpc-message", message);
        }
        // Fails only if the client is gone.
        let _ = respond.send_response(response, true);
        return 0;
    }
    let body = body_of(fault);
    for (name, value) in fields(fault) {
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
            headers.append(name, value);
        }
    }
    headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    *response.status_mut() = StatusCode::from_u16(fault.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let Ok(mut send) = respond.send_response(response, head) else { return 0 };
    let bytes = body.len() as u64;
    if head || send.send_data(Bytes::from(body), true).is_err() { 0 } else { bytes }
}
