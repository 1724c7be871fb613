//! Local replies: responses that the gateway itself makes. They are short, plain, and reveal
//! nothing about the mesh. The reason, a [`ProxyError`], is decided elsewhere. The response headers of
//! the request's rule apply to them, as in Envoy.

use bytes::Bytes;
use canal_gateway_config::edit_response;
use canal_gateway_http::head::ClientProtocol;
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_http::reply_fields::{body_of, changed_fields, has_no_length};
use canal_gateway_io::clock::TimeoutKind;
use canal_h1::{ForwardOptions, Framing};
use canal_model::route_filters::HeaderModifier;
use h2::server::SendResponse;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Response, StatusCode};

use crate::downstream_state::Http1Downstream;
use crate::worker::Worker;

/// Form of a local reply to an HTTP/1.1 client.
pub(crate) struct LocalReplyOptions<'a> {
    /// True if the connection stays open.
    pub(crate) keep: bool,
    pub(crate) client_protocol: ClientProtocol,
    /// True if the request was HEAD, so that the reply has no body.
    pub(crate) head: bool,
    /// Changes of response headers by the request's rule.
    pub(crate) changes: Option<&'a HeaderModifier>,
}

impl LocalReplyOptions<'_> {
    /// Returns the options for a client whose request could not be parsed: the connection ends.
    pub(crate) fn last() -> Self {
        Self {
            keep: false,
            client_protocol: ClientProtocol::Http11,
            head: false,
            changes: None,
        }
    }
}

/// Sends a local reply to an HTTP/1.1 client. Returns the payload's bytes; `None` if the client is
/// gone or accepts nothing.
pub(crate) async fn http1(
    worker: &Worker,
    client: &mut Http1Downstream,
    fault: &ProxyError,
    manner: LocalReplyOptions<'_>,
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
            changed_fields(fault, manner.changes).chain(described),
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
    (fault, changes): (&ProxyError, Option<&HeaderModifier>),
    grpc: bool,
    head: bool,
) -> u64 {
    let mut response = Response::new(());
    let headers = response.headers_mut();
    if grpc {
        edit_response(changes, headers);
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
    for (name, value) in changed_fields(fault, changes) {
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
