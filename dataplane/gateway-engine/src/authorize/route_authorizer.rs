//! Calls the authorizer that a rule or a listener names: over gRPC as an external authorizer
//! of policies, or by an HTTP request of the same method and path (GEP-1494).
//!
//! The policies of the destination come before that of a rule. What the server gives no decision about is refused.
//! Start with [`check`].

use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use canal_gateway_config::TenantTls;
use canal_gateway_http::head::FullRequest;
use canal_gateway_http::interim::InterimResponses;
use canal_gateway_http::proxy_error::{ExtAuthzDenial, ProxyError};
use canal_gateway_http::route_authorizer::{HttpAuthzCheck, HttpAuthzResponse};
use canal_gateway_io::body::Http1Io;
use canal_h1::{
    BodyPart, BodyReader, Framing, MessageLimits, RequestKind, ResponseHead, ResponseView,
};
use canal_model::program::AppProtocol;
use canal_model::route_authorizer::{RouteAuthorizer, RouteAuthorizerProtocol};
use http::HeaderMap;

use super::ext_authz::{self, ANSWER_BYTES_MAX, CheckContext, ExtAuthzMutations};
use crate::endpoints::SelectedEndpoint;
use crate::session::ClientSession;
use crate::upstream::{self, TunnelMetadata};
use crate::worker::Worker;

/// Longest time of one check; a rule cannot set its own. Nobody measured this value.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The server ended the connection, or the stream, before its answer was complete.
const BROKEN: &str = "authorizer_broken";
/// As [`BROKEN`], and the server had sent nothing of an answer.
const CLOSED: &str = "authorizer_closed";

/// Calls the authorizer of a rule or a listener for a request, in the form in which it will be
/// forwarded, and counts the result. `name` is that of the object which names the authorizer.
///
/// # Errors
/// The server denied the request, or gave no usable answer.
pub(crate) async fn check<R: FullRequest>(
    worker: &Rc<Worker>,
    session: &ClientSession,
    (name, authorizer): (&str, &RouteAuthorizer),
    request: (&R, &[u8]),
    about: &CheckContext<'_>,
    to: Option<SocketAddr>,
) -> Result<ExtAuthzMutations, ProxyError> {
    let body_bytes = authorizer.body_bytes as usize;
    let answered = match about.body {
        Some(body) if body_bytes > 0 && body.bytes.len() > body_bytes => {
            Err("authorizer_body_too_large")
        }
        _ => call_server(worker, session, authorizer, request, about, to).await,
    };
    let (result, outcome) = match answered {
        Ok(Ok(agreed)) => ("ok", Ok(agreed)),
        Ok(Err(denial)) => ("denied", Err(ProxyError::Rejected(Box::new(denial)))),
        Err(why) => {
            tracing::debug!(
                authorizer = name,
                why,
                "gateway: the authorizer of a route or a listener gave no decision, so the request is refused"
            );
            (why, Err(ProxyError::ExtAuthzFailed(why)))
        }
    };
    worker
        .counts
        .count_ext_authz(&session.account.tenant, name, result);
    outcome
}

/// Calls the server within the limits of the tenant and of time.
async fn call_server<R: FullRequest>(
    worker: &Rc<Worker>,
    session: &ClientSession,
    authorizer: &RouteAuthorizer,
    request: (&R, &[u8]),
    about: &CheckContext<'_>,
    to: Option<SocketAddr>,
) -> Result<Result<ExtAuthzMutations, ExtAuthzDenial>, &'static str> {
    let RouteAuthorizer {
        service,
        port,
        protocol,
        headers,
        body_bytes,
    } = authorizer;
    let server = (service, *port);
    match protocol {
        RouteAuthorizerProtocol::Grpc => {
            let shown = (headers.as_slice(), *body_bytes);
            let attributes = ext_authz::request(session, to, request, about, shown);
            ext_authz::check_over_grpc(worker, session, server, TIMEOUT, attributes).await
        }
        RouteAuthorizerProtocol::Http {
            path_prefix,
            response_headers,
        } => {
            // An authorizer of policies may read a body too.
            let body = about.body.filter(|_| *body_bytes > 0);
            let body = body.map_or_else(Bytes::new, |body| body.bytes.clone());
            let shown = (path_prefix.as_str(), headers.as_slice());
            let changes = &about.trial.changes;
            let (head, authority) = request;
            let of_client = (head, authority, session.client_ip.as_str());
            let check = HttpAuthzCheck::new(of_client, changes, shown, body);
            let call = async {
                let (chosen, tls, _) = ext_authz::find(worker, session, server)?;
                let call = HttpCall { worker, check };
                match chosen.view.set.protocol {
                    AppProtocol::Http2 | AppProtocol::Grpc => {
                        call.call_http2(&chosen, tls.as_ref()).await
                    }
                    // A server of undeclared protocol gets HTTP/1.1, which nearly every HTTP server
                    // accepts.
                    _ => call.call_http1(&chosen, tls.as_ref()).await,
                }
            };
            let answer = ext_authz::within_limits(session, TIMEOUT, call).await?;
            let decision = answer.read(response_headers)?;
            Ok(decision.map(ExtAuthzMutations::of_lines))
        }
    }
}

/// A check on its way to the authorizer.
struct HttpCall<'a> {
    worker: &'a Rc<Worker>,
    check: HttpAuthzCheck,
}

impl HttpCall<'_> {
    /// Calls the authorizer over HTTP/1.1, on an idle connection if there is one.
    async fn call_http1(
        &self,
        chosen: &SelectedEndpoint,
        tls: Option<&TenantTls>,
    ) -> Result<HttpAuthzResponse, &'static str> {
        let (worker, check) = (self.worker, &self.check);
        let head = check.http1().ok_or("authorizer_malformed")?;
        if let Some(mut lease) = upstream::take_idle(worker, chosen) {
            match self.exchange(&mut lease.wire, &head).await {
                // The server may have closed the idle connection, so a new one follows. A server
                // that began to answer has read the check, which is not sent to it a second time.
                Err(CLOSED) => {}
                Err(why) => return Err(why),
                Ok((answer, is_kept)) => {
                    if is_kept {
                        upstream::return_idle(worker, chosen, lease.wire);
                    }
                    return Ok(answer);
                }
            }
        }
        let metadata = TunnelMetadata {
            tls,
            headers: HeaderMap::new(),
        };
        let lease = upstream::open_connection(worker, chosen, metadata).await;
        let mut wire = lease.map_err(|_| "authorizer_unreachable")?.wire;
        let exchanged = self.exchange(&mut wire, &head).await;
        let (answer, is_kept) = exchanged.map_err(|why| match why {
            CLOSED => BROKEN,
            why => why,
        })?;
        if is_kept {
            upstream::return_idle(worker, chosen, wire);
        }
        Ok(answer)
    }

    /// Sends the check on a connection and reads the answer. Returns whether the connection can
    /// carry another request. The error is [`CLOSED`] if the connection closed before any byte of
    /// an answer.
    async fn exchange(
        &self,
        wire: &mut Http1Io,
        head: &[u8],
    ) -> Result<(HttpAuthzResponse, bool), &'static str> {
        wire.outbox.head().extend_from_slice(head);
        wire.outbox.push(self.check.body.clone());
        poll_fn(|cx| wire.io.poll_flush(cx, &mut wire.outbox))
            .await
            .map_err(|_| CLOSED)?;
        let kind = if self.check.method == b"HEAD" {
            RequestKind::Head
        } else {
            RequestKind::Ordinary
        };
        let (mut answer, mut reader, keep_alive) = receive_head(wire, kind).await?;
        let mut body = BytesMut::new();
        loop {
            let step = reader
                .read(wire.inbox.bytes(), &MessageLimits::DEFAULT)
                .map_err(|_| "authorizer_malformed")?;
            match step.part {
                BodyPart::Data(range) => body.extend_from_slice(&wire.inbox.bytes()[range]),
                BodyPart::End => {
                    wire.inbox.advance(step.consumed);
                    break;
                }
                BodyPart::NeedInput => {
                    wire.inbox.advance(step.consumed);
                    if fill(wire).await? == 0 {
                        // Only a body that ends with its connection may end here; the reader
                        // refuses any other.
                        reader.end_of_input().map_err(|_| BROKEN)?;
                        answer.body = body.freeze();
                        return Ok((answer, false));
                    }
                    continue;
                }
            }
            wire.inbox.advance(step.consumed);
            if body.len() > ANSWER_BYTES_MAX {
                return Err("authorizer_too_long");
            }
        }
        answer.body = body.freeze();
        Ok((answer, keep_alive))
    }

    async fn call_http2(
        &self,
        chosen: &SelectedEndpoint,
        tls: Option<&TenantTls>,
    ) -> Result<HttpAuthzResponse, &'static str> {
        let (worker, check) = (self.worker, &self.check);
        let request = check.http2().ok_or("authorizer_malformed")?;
        let metadata = TunnelMetadata {
            tls,
            headers: HeaderMap::new(),
        };
        // `_place` holds the stream's place among the connection's streams until the answer is
        // read.
        let (_place, mut send) = upstream::acquire_stream(worker, chosen, metadata)
            .await
            .map_err(|_| "authorizer_unreachable")?;
        let (response, mut stream) = send
            .send_request(request, check.body.is_empty())
            .map_err(|_| "authorizer_unreachable")?;
        if !check.body.is_empty() {
            stream
                .send_data(check.body.clone(), true)
                .map_err(|_| BROKEN)?;
        }
        let (parts, mut stream) = ext_authz::response_of(response).await?.into_parts();
        let mut body = BytesMut::new();
        while let Some(piece) = stream.data().await {
            let piece = piece.map_err(|_| BROKEN)?;
            // The release fails only if more is released than was received.
            let _ = stream.flow_control().release_capacity(piece.len());
            if body.len() + piece.len() > ANSWER_BYTES_MAX {
                return Err("authorizer_too_long");
            }
            body.extend_from_slice(&piece);
        }
        let headers = parts.headers.iter();
        Ok(HttpAuthzResponse {
            status: parts.status.as_u16(),
            headers: headers
                .map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()))
                .collect(),
            body: body.freeze(),
        })
    }
}

/// Reads the head of the answer. Returns the answer without its body, the reader of the body, and
/// whether the connection stays open.
async fn receive_head(
    wire: &mut Http1Io,
    kind: RequestKind,
) -> Result<(HttpAuthzResponse, BodyReader, bool), &'static str> {
    let mut head = ResponseHead::new();
    let mut interim = InterimResponses::default();
    let mut has_answered = false;
    loop {
        let bytes = wire.inbox.bytes();
        let parsed = head.parse(bytes, &MessageLimits::DEFAULT, kind);
        let Some(length) = parsed.map_err(|_| "authorizer_malformed")? else {
            match fill(wire).await {
                Ok(1..) => has_answered = true,
                Ok(0) | Err(_) if !has_answered => return Err(CLOSED),
                Ok(0) | Err(_) => return Err(BROKEN),
            }
            continue;
        };
        let view = head.view(bytes);
        if view.is_interim() {
            let counted = interim.count(length, false);
            counted.map_err(|_| ext_authz::INTERIM_RESPONSES)?;
            wire.inbox.advance(length);
            continue;
        }
        let answer = HttpAuthzResponse {
            status: view.status(),
            headers: headers(&view),
            body: Bytes::new(),
        };
        let framing = view.framing();
        let keep_alive = view.keep_alive() && framing != Framing::UntilClose;
        wire.inbox.advance(length);
        return Ok((answer, BodyReader::new(framing), keep_alive));
    }
}

fn headers(view: &ResponseView<'_>) -> Vec<(String, Vec<u8>)> {
    let fields = view.end_to_end();
    fields
        .map(|field| {
            let name = String::from_utf8_lossy(field.name).to_ascii_lowercase();
            (name, field.value.to_vec())
        })
        .collect()
}

/// Reads more bytes, and returns how many.
async fn fill(wire: &mut Http1Io) -> Result<usize, &'static str> {
    poll_fn(|cx| wire.io.poll_fill(cx, &mut wire.inbox))
        .await
        .map_err(|_| BROKEN)
}
