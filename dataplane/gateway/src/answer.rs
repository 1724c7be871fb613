//! The gateway's own answers to clients: short, plain, telling nothing about the mesh's inside. Which fault it is was decided elsewhere.

use bytes::Bytes;
use canal_h1::{Framing, Outgoing};
use h2::server::SendResponse;
use http::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};

use crate::clock::Late;
use crate::fault::Fault;
use crate::finish::Spoken;
use crate::forward::persistence;
use crate::read::http1::Client;
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

const TEXT: &str = "text/plain; charset=utf-8";
/// Methods that are served, for 405 (RFC 9110 §15.5.6).
const ALLOWED: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE";

/// Fields of the answer beside its framing.
fn fields<'a>(fault: &Fault) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + Clone + use<'a> {
    let status = fault.status();
    let allow = (status == 405).then_some((&b"allow"[..], ALLOWED.as_bytes()));
    let retry = matches!(status, 429 | 503).then_some((&b"retry-after"[..], &b"1"[..]));
    [Some((&b"content-type"[..], TEXT.as_bytes())), allow, retry].into_iter().flatten()
}

fn body_of(fault: &Fault) -> String {
    format!("{}\n", fault.text())
}

/// Answers an HTTP/1.1 client. Gives the payload's bytes; `None` if the client is gone or takes nothing.
pub(crate) async fn http1(worker: &Worker, client: &mut Client, fault: &Fault, manner: Manner) -> Option<u64> {
    if *fault == Fault::ClientGone {
        return None;
    }
    let body = body_of(fault);
    let length = body.len().to_string();
    let framing = if manner.head { Framing::None } else { Framing::Length(body.len() as u64) };
    let outgoing = Outgoing { framing, persistence: persistence(manner.spoken, manner.keep), ..Outgoing::default() };
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
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(TEXT));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    match fault.status() {
        405 => drop(headers.insert(ALLOW, HeaderValue::from_static(ALLOWED))),
        429 | 503 => drop(headers.insert(RETRY_AFTER, HeaderValue::from_static("1"))),
        _ => {}
    }
    *response.status_mut() = StatusCode::from_u16(fault.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let Ok(mut send) = respond.send_response(response, head) else { return 0 };
    if head || send.send_data(Bytes::from(body.clone()), true).is_err() {
        return 0;
    }
    body.len() as u64
}
