//! The response's head: waits for it, passes on interim responses, and translates the final head
//! for the client. Bodies are passed on by `exchange`.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use canal_gateway_config::edit_response;
use canal_gateway_http::head::ClientProtocol;
use canal_gateway_http::heads;
use canal_gateway_http::proxy_error::ProxyError;
use canal_h1::{BodyReader, ForwardOptions, Framing, MessageRefusal, RequestKind, ResponseView};
use h2::Reason;
use http::header::CONTENT_LENGTH;
use http::{Response, StatusCode};

use super::{DownstreamSide, Exchange, Http1UpstreamSide, UpstreamSide};

impl Exchange<'_> {
    /// Ready once the final head was written to the client's side.
    pub(super) fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ProxyError>> {
        match &self.upstream {
            UpstreamSide::Http1(_) => {
                // As with bodies, the gateway reads from the endpoint only when the client has
                // accepted the bytes written so far.
                ready!(self.poll_client_flush(cx))?;
                self.poll_http1_head(cx)
            }
            // The h2 crate queues interim responses without a bound. They are taken from it and
            // counted, and refused beyond the limits.
            UpstreamSide::Http2(_) => {
                let polled = self.poll_http2_head(cx);
                if polled.is_pending()
                    && let Poll::Ready(Err(fault)) = self.poll_client_flush(cx)
                {
                    return Poll::Ready(Err(fault));
                }
                polled
            }
        }
    }

    /// Ready once an HTTP/1.1 client has accepted all bytes written for it.
    pub(super) fn poll_client_flush(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), ProxyError>> {
        match &mut self.downstream {
            DownstreamSide::Http1(client) if !client.wire.outbox.is_empty() => client
                .wire
                .io
                .poll_flush(cx, &mut client.wire.outbox)
                .map_err(|_| ProxyError::ClientGone),
            _ => Poll::Ready(Ok(())),
        }
    }

    /// Counts an interim response of `bytes`, and returns whether it is passed on. A request has
    /// limits for their number and bytes; `100` is passed on once, whether the endpoint or the
    /// gateway sent it.
    fn admit_interim(&mut self, status: u16, bytes: usize) -> Result<bool, ProxyError> {
        let repeated = self.record.interim.count(bytes, status == 100)?;
        // HTTP/1.0 has no interim responses.
        Ok(!repeated && self.request.client_protocol != ClientProtocol::Http10)
    }

    fn poll_http1_head(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ProxyError>> {
        loop {
            // `poll_head` calls this for HTTP/1.1 endpoints only.
            let UpstreamSide::Http1(upstream) = &mut self.upstream else {
                return Poll::Ready(Ok(()));
            };
            if !upstream.wire.inbox.is_empty() {
                match upstream.head.parse(
                    upstream.wire.inbox.bytes(),
                    self.worker.h1_limits(),
                    self.request.kind,
                ) {
                    Err(refusal) => {
                        return Poll::Ready(Err(ProxyError::UpstreamProtocol(refusal.name())));
                    }
                    Ok(None) => {}
                    Ok(Some(len)) => {
                        // After an interim response the loop continues, because the final head is
                        // still to come.
                        let view = upstream.head.view(upstream.wire.inbox.bytes());
                        let interim = view.is_interim();
                        // The client's bytes of the new protocol begin after the body, so the
                        // switch waits for the end of the body. `poll` has polled the body before
                        // the head, so its progress wakes this task.
                        if view.status() == 101
                            && !self.request_body.is_complete
                            && !self.upload_cut
                        {
                            return Poll::Pending;
                        }
                        if interim {
                            self.write_interim_http1(len)?
                        } else {
                            self.write_final_http1()?
                        }
                        if let UpstreamSide::Http1(upstream) = &mut self.upstream {
                            upstream.wire.inbox.advance(len);
                        }
                        if interim {
                            ready!(self.poll_client_flush(cx))?;
                            continue;
                        }
                        return Poll::Ready(Ok(()));
                    }
                }
            }
            let UpstreamSide::Http1(upstream) = &mut self.upstream else {
                return Poll::Ready(Ok(()));
            };
            match ready!(upstream.wire.io.poll_fill(cx, &mut upstream.wire.inbox)) {
                Ok(1..) => upstream.has_responded = true,
                // The endpoint has processed the request, so it is not sent again.
                Ok(0) if upstream.has_responded => {
                    return Poll::Ready(Err(ProxyError::UpstreamProtocol("truncated_head")));
                }
                // The endpoint's node reported that the application received nothing of it.
                Ok(0) | Err(_)
                    if !upstream.has_responded
                        && upstream.wire.io.is_undelivered_beyond(upstream.sent_before) =>
                {
                    return Poll::Ready(Err(ProxyError::UpstreamUndelivered));
                }
                Ok(0) | Err(_) => {
                    return Poll::Ready(Err(ProxyError::UpstreamClosed {
                        reused: upstream.reused && !upstream.has_responded,
                    }));
                }
            }
        }
    }

    /// Writes an interim response of `len` bytes to the client's side.
    fn write_interim_http1(&mut self, len: usize) -> Result<(), ProxyError> {
        let UpstreamSide::Http1(upstream) = &mut self.upstream else {
            return Ok(());
        };
        let view = upstream.head.view(upstream.wire.inbox.bytes());
        let status = view.status();
        upstream.has_stray_body |= view.announces_forbidden_body();
        if !self.admit_interim(status, len)? {
            return Ok(());
        }
        let UpstreamSide::Http1(upstream) = &self.upstream else {
            return Ok(());
        };
        let Http1UpstreamSide { head, wire, .. } = &**upstream;
        let view = head.view(wire.inbox.bytes());
        match &mut self.downstream {
            DownstreamSide::Http1(client) => {
                let into = client.wire.outbox.head();
                heads::response_1_to_1(
                    &mut client.out,
                    wire.inbox.bytes(),
                    &view,
                    &ForwardOptions::default(),
                    into,
                )
                .map_err(|refusal: MessageRefusal| ProxyError::UpstreamProtocol(refusal.name()))
            }
            DownstreamSide::Http2(stream) => {
                let response = heads::response_1_to_2(&view)
                    .ok_or(ProxyError::UpstreamProtocol("untranslatable_head"))?;
                stream
                    .respond
                    .send_informational(response)
                    .map_err(|_| ProxyError::ClientGone)
            }
        }
    }

    fn write_final_http1(&mut self) -> Result<(), ProxyError> {
        let keep = self.keeps_client();
        let UpstreamSide::Http1(upstream) = &self.upstream else {
            return Ok(());
        };
        let view = upstream.head.view(upstream.wire.inbox.bytes());
        let (status, grpc_status) = (view.status(), http1_grpc_status(&view));
        if self.retries_response(status, grpc_status) {
            return Err(ProxyError::RetriedResponse(status));
        }
        // Borrowed anew, because `retries_response` needs the whole exchange.
        let UpstreamSide::Http1(upstream) = &mut self.upstream else {
            return Ok(());
        };
        let Http1UpstreamSide {
            head,
            wire,
            keeps_open,
            has_stray_body,
            ..
        } = &mut **upstream;
        let view = head.view(wire.inbox.bytes());
        let framing = view.framing();
        *keeps_open = view.keep_alive() && !*has_stray_body;
        self.upgrade = view.is_tunnel();
        let to = heads::framing_to_1(framing, self.request.client_protocol);
        let edits = heads::response_edits(self.response_headers);
        match &mut self.downstream {
            DownstreamSide::Http1(client) => {
                // The connection stays open only if the request is complete or its upload continues
                // after this response.
                // An error (400 and above) ends the upload.
                let goes_on = status < 400 && *keeps_open && !self.upload_cut;
                let keep =
                    keep && to != Framing::UntilClose && (self.request_body.is_complete || goes_on);
                self.keep_alive = keep;
                let outgoing = ForwardOptions {
                    edits: &edits,
                    framing: to,
                    // The `upgrade` option writes the Connection field of an upgrade itself.
                    persistence: if self.upgrade {
                        Default::default()
                    } else {
                        self.request.client_protocol.persistence(keep)
                    },
                    upgrade: view.upgrade(),
                    ..ForwardOptions::default()
                };
                let into = client.wire.outbox.head();
                heads::response_1_to_1(&mut client.out, wire.inbox.bytes(), &view, &outgoing, into)
                    .map_err(|refusal| ProxyError::UpstreamProtocol(refusal.name()))?;
            }
            DownstreamSide::Http2(stream) => {
                // An HTTP/2 client cannot have requested an upgrade (RFC 9113 §8.6).
                if self.upgrade {
                    return Err(ProxyError::UpstreamProtocol("unexpected_upgrade"));
                }
                let mut response = heads::response_1_to_2(&view)
                    .ok_or(ProxyError::UpstreamProtocol("untranslatable_head"))?;
                edit_response(self.response_headers, response.headers_mut());
                let ended = matches!(framing, Framing::None | Framing::Length(0));
                let send = stream
                    .respond
                    .send_response(response, ended)
                    .map_err(|_| ProxyError::ClientGone)?;
                stream.answer = (!ended).then_some(send);
            }
        }
        self.response_reader = BodyReader::new(framing);
        self.response_framing = (framing, to);
        self.status = status;
        self.record.answered(status);
        self.record.grpc_status = grpc_status;
        Ok(())
    }

    /// Returns whether the client's connection stays open, as far as that is known when the
    /// response begins.
    fn keeps_client(&self) -> bool {
        self.request.keep_alive && !self.record.keeps_no_client()
    }

    fn poll_http2_head(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ProxyError>> {
        loop {
            let UpstreamSide::Http2(upstream) = &mut self.upstream else {
                return Poll::Ready(Ok(()));
            };
            match upstream.response.poll_informational(cx) {
                Poll::Ready(Some(Ok(interim))) => self.write_interim_http2(interim)?,
                _ => break,
            }
        }
        let UpstreamSide::Http2(upstream) = &mut self.upstream else {
            return Poll::Ready(Ok(()));
        };
        match ready!(Pin::new(&mut upstream.response).poll(cx)) {
            Ok(response) => Poll::Ready(self.write_final_http2(response)),
            Err(e) => Poll::Ready(Err(match http2_fault(&e) {
                ProxyError::UpstreamClosed { .. } => ProxyError::UpstreamClosed {
                    reused: upstream.permit.reused,
                },
                fault => fault,
            })),
        }
    }

    fn write_interim_http2(&mut self, mut interim: Response<()>) -> Result<(), ProxyError> {
        // HTTP/2 has no upgrade (RFC 9113 §8.6), and an HTTP/1.1 client would mistake the following
        // bytes for another protocol.
        if interim.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Err(ProxyError::UpstreamProtocol("h2_switching_protocols"));
        }
        // RFC 9110 §8.6: it has no body, and no field may announce one.
        interim.headers_mut().remove(CONTENT_LENGTH);
        if !self.admit_interim(
            interim.status().as_u16(),
            heads::byte_len(interim.headers()),
        )? {
            return Ok(());
        }
        match &mut self.downstream {
            // An HTTP/1.1 client expects only `100`, and the gateway has already sent it.
            DownstreamSide::Http1(_) if interim.status() == StatusCode::CONTINUE => Ok(()),
            DownstreamSide::Http1(client) => {
                let (parts, ()) = interim.into_parts();
                let into = client.wire.outbox.head();
                let written = heads::response_2_to_1(
                    &mut client.out,
                    &parts,
                    &ForwardOptions::default(),
                    false,
                    into,
                );
                written.map_err(|refusal| ProxyError::UpstreamProtocol(refusal.name()))
            }
            DownstreamSide::Http2(stream) => stream
                .respond
                .send_informational(interim)
                .map_err(|_| ProxyError::ClientGone),
        }
    }

    fn write_final_http2(&mut self, response: Response<h2::RecvStream>) -> Result<(), ProxyError> {
        let keep = self.keeps_client();
        let (mut parts, body) = response.into_parts();
        let status = parts.status.as_u16();
        let grpc_status = parts
            .headers
            .get("grpc-status")
            .and_then(|v| v.to_str().ok()?.parse().ok());
        if self.retries_response(status, grpc_status) {
            return Err(ProxyError::RetriedResponse(status));
        }
        // A body that the status or HEAD forbids is dropped, and its stream is reset. An HTTP/1.1
        // client would take it for the next response.
        let has_no_body = matches!(status, 204 | 304) || self.request.kind == RequestKind::Head;
        let ended = body.is_end_stream() || has_no_body;
        // RFC 9110 §8.6 forbids the field in a 204.
        if status == 204 {
            parts.headers.remove(CONTENT_LENGTH);
        }
        self.status = status;
        self.record.answered(status);
        self.record.grpc_status = grpc_status;
        match &mut self.downstream {
            DownstreamSide::Http1(client) => {
                let framing = heads::framing_of_answer(self.request, &parts, ended);
                // The connection stays open only if the request is complete or its upload continues
                // after this response; an error (400 and above) ends the upload.
                // An endpoint that has ended its stream may reset the upload (RFC 9113 §8.1), and
                // the drop of a forbidden body resets it here.
                let goes_on = status < 400 && !ended && !self.upload_cut;
                let keep = keep
                    && framing != Framing::UntilClose
                    && (self.request_body.is_complete || goes_on);
                self.keep_alive = keep;
                let edits = heads::response_edits(self.response_headers);
                let outgoing = ForwardOptions {
                    edits: &edits,
                    framing,
                    persistence: self.request.client_protocol.persistence(keep),
                    ..ForwardOptions::default()
                };
                let into = client.wire.outbox.head();
                heads::response_2_to_1(
                    &mut client.out,
                    &parts,
                    &outgoing,
                    framing == Framing::None,
                    into,
                )
                .map_err(|refusal| ProxyError::UpstreamProtocol(refusal.name()))?;
                // A body of HTTP/2 has no framing of HTTP/1.1 that could pass verbatim.
                self.response_framing = (Framing::None, framing);
            }
            DownstreamSide::Http2(stream) => {
                let mut head = Response::new(());
                *head.status_mut() = parts.status;
                *head.headers_mut() = parts.headers;
                edit_response(self.response_headers, head.headers_mut());
                let send = stream
                    .respond
                    .send_response(head, ended)
                    .map_err(|_| ProxyError::ClientGone)?;
                stream.answer = (!ended).then_some(send);
            }
        }
        if let UpstreamSide::Http2(upstream) = &mut self.upstream {
            upstream.body = (!has_no_body).then_some(body);
        }
        Ok(())
    }
}

/// Maps an HTTP/2 error of the endpoint to the reason why there is no response.
pub(in crate::forward) fn http2_fault(e: &h2::Error) -> ProxyError {
    match e.reason() {
        // The endpoint did not process the request (RFC 9113 §8.7).
        Some(Reason::REFUSED_STREAM) => ProxyError::UpstreamRefused,
        // A stream above the last ID of an orderly GOAWAY was not processed; lower ones still get
        // their responses.
        Some(Reason::NO_ERROR) if e.is_go_away() => ProxyError::UpstreamRefused,
        Some(_) if e.is_reset() => ProxyError::UpstreamReset,
        Some(_) => ProxyError::UpstreamProtocol("http2"),
        None => ProxyError::UpstreamClosed { reused: false },
    }
}

fn http1_grpc_status(view: &ResponseView<'_>) -> Option<u8> {
    view.get(canal_h1::FieldName::GrpcStatus)
        .and_then(|v| std::str::from_utf8(v).ok()?.parse().ok())
}
