//! The client's side of a request in HTTP/2.
//!
//! The phases are in `pipeline`. Start with [`serve`].

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use canal_gateway_config::RequestMutations;
use canal_gateway_http::head::{ClientProtocol, RequestInfo, ValidatedHttp2Request, is_grpc};
use canal_gateway_http::heads;
use canal_gateway_http::proxy_error::ProxyError;
use canal_h1::RequestKind;
use canal_hbone::FlowAccount;
use canal_model::route_filters::HeaderModifier;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::header::{CONTENT_TYPE, EXPECT};
use http::{Request, Response, StatusCode};

use super::exchange::{DownstreamSide, UpstreamSide, http2_fault};
use super::mirrors::CopiedHead;
use super::{ExchangeEnd, HttpDownstream, HttpRequest, OpenHead, RequestState, UpstreamTransport};
use crate::authorize::buffered_body::{self, BufferedBody};
use crate::downstream_state::Http2Downstream;
use crate::finish::RequestRecord;
use crate::local_reply;
use crate::pipeline;
use crate::route::RoutedRequest;
use crate::session::ClientSession;
use crate::worker::Worker;

/// Validates a stream's head and returns the future that serves the request, unless it was refused.
/// Validation comes before the task so that the task's state stays small.
pub(crate) fn serve(
    worker: &Rc<Worker>,
    session: &Rc<ClientSession>,
    account: &Rc<FlowAccount>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) -> Option<Pin<Box<impl Future<Output = ()> + use<>>>> {
    let mut record = RequestRecord::begin(worker, session, ClientProtocol::Http2);
    let (parts, body) = request.into_parts();
    let grpc = parts
        .headers
        .get(CONTENT_TYPE)
        .is_some_and(|v| is_grpc(v.as_bytes()));
    record.grpc = grpc;
    match heads::check_2(parts) {
        Ok(head) => {
            let ended = body.is_end_stream();
            let (timer, account) = (worker.clock.timer(), account.clone());
            let stream = Http2Downstream {
                body,
                account,
                respond,
                answer: None,
                timer,
                first: Bytes::new(),
            };
            let info = RequestInfo::of_http2(&head, ended);
            let client = Http2Client {
                stream,
                head,
                is_bodyless: ended,
            };
            // Tokio copies a task of this size ten times between its creation and its end, and a
            // box never.
            let mut request =
                HttpRequest::new(client, RequestState::new(worker, session, info, record));
            Some(Box::pin(async move { pipeline::serve(&mut request).await }))
        }
        Err(error) => {
            refuse(&mut respond, &mut record, (&error, None), grpc, false);
            None
        }
    }
}

/// The client's side of a request in HTTP/2.
struct Http2Client {
    stream: Http2Downstream,
    head: ValidatedHttp2Request,
    /// True if the stream ended with the head.
    is_bodyless: bool,
}

impl HttpDownstream for Http2Client {
    type Head<'h> = &'h ValidatedHttp2Request;
    type End = ();

    fn head(&self) -> (&ValidatedHttp2Request, &[u8]) {
        (&self.head, self.head.authority.as_bytes())
    }

    fn is_connect(&self) -> bool {
        // Validation refused it.
        false
    }

    fn prepare(&mut self, state: &mut RequestState) {
        let request_id = heads::request_id(state.worker.random(), state.worker.random());
        heads::additions(&mut self.head.headers, &state.additions(request_id, ""));
        if let (Some(texts), Some(id)) = (
            &mut state.record.texts,
            self.head.headers.get(heads::X_REQUEST_ID),
        ) {
            texts.request_id = String::from_utf8_lossy(id.as_bytes()).into_owned();
        }
    }

    async fn buffer_body(
        &mut self,
        state: &mut RequestState,
        wanted: usize,
    ) -> Result<BufferedBody, ProxyError> {
        let permit = buffered_body::permit(&state.worker, &state.session, &state.info, wanted)?;
        if self.head.headers.contains_key(EXPECT) {
            // The client waits for `100 Continue` before it sends the body, and the authorizer
            // waits for the body.
            let go_on = Response::builder()
                .status(StatusCode::CONTINUE)
                .body(())
                .map_err(|_| ProxyError::ClientGone)?;
            self.stream
                .respond
                .send_informational(go_on)
                .map_err(|_| ProxyError::ClientGone)?;
            state.record.interim.continued = true;
        }
        buffered_body::of_http2(&state.worker, &mut self.stream, wanted, permit).await
    }

    fn send(
        &mut self,
        state: &mut RequestState,
        _routed: &RoutedRequest,
        upstream: UpstreamTransport,
        changes: Option<&RequestMutations>,
    ) -> Result<UpstreamSide, ProxyError> {
        let changed = changes
            .map(|changes| self.head.changed(changes))
            .transpose()?;
        let head = changed.as_ref().unwrap_or(&self.head);
        match upstream {
            UpstreamTransport::Http1(mut upstream) => {
                let mut out = state.worker.scratch.borrow_mut();
                heads::request_2_to_1(
                    &mut out,
                    (head, &state.session.client_ip),
                    state.info.framing,
                    upstream.wire.outbox.head(),
                )
                .map_err(ProxyError::BadRequest)?;
                Ok(UpstreamSide::Http1(upstream))
            }
            UpstreamTransport::Http2(place, mut send) => {
                let request = heads::request_2_to_2(head, &state.session.client_ip)?;
                let (response, stream) = send
                    .send_request(request, self.is_bodyless)
                    .map_err(|e| http2_fault(&e))?;
                Ok(UpstreamSide::http2(place, response, stream))
            }
        }
    }

    fn copy_head(
        &mut self,
        state: &RequestState,
        _routed: &RoutedRequest,
        version: ClientProtocol,
        changes: &RequestMutations,
    ) -> Result<CopiedHead, ProxyError> {
        let head = self.head.changed(changes)?;
        let client_ip = &state.session.client_ip;
        if version == ClientProtocol::Http2 {
            return heads::request_2_to_2(&head, client_ip).map(CopiedHead::Http2);
        }
        let mut out = state.worker.scratch.borrow_mut();
        let mut copied = Vec::new();
        heads::request_2_to_1(
            &mut out,
            (&head, client_ip),
            state.info.framing,
            &mut copied,
        )
        .map_err(ProxyError::BadRequest)?;
        Ok(CopiedHead::Http1(copied))
    }

    fn is_complete(&self, _info: &RequestInfo) -> bool {
        self.is_bodyless
    }

    fn begin_body(&mut self, _session: &ClientSession, _keeps_head: bool) {}

    fn poll_client_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.stream.respond.poll_reset(cx).map(drop)
    }

    fn exchange(&mut self) -> (DownstreamSide<'_>, OpenHead<'_>) {
        (
            DownstreamSide::Http2(&mut self.stream),
            OpenHead {
                copy: None,
                http2: Some(&self.head),
            },
        )
    }

    async fn finish(
        &mut self,
        state: &mut RequestState,
        changes: Option<&HeaderModifier>,
        ended: Result<ExchangeEnd, ProxyError>,
    ) {
        match ended {
            // A stream that is dropped before its end is reset.
            Ok(ExchangeEnd::Broken(error)) => state.record.fault(&error),
            Ok(ExchangeEnd::Complete { .. } | ExchangeEnd::Upgraded(_)) => {}
            // The gateway has passed a part of the body on and cannot send the request again, but
            // the client can: no application has processed it (RFC 9113 §8.7). A response would
            // mean that the request failed.
            Err(error @ ProxyError::UpstreamRefused) if !self.is_bodyless => {
                state.record.fault(&error);
                if state.info.grpc {
                    state.record.grpc_status = Some(error.grpc_status());
                }
                self.stream.respond.send_reset(Reason::REFUSED_STREAM);
            }
            Err(error) => {
                let is_head = state.info.kind == RequestKind::Head;
                refuse(
                    &mut self.stream.respond,
                    &mut state.record,
                    (&error, changes),
                    state.info.grpc,
                    is_head,
                );
            }
        }
    }
}

/// Sends a local reply for `fault`, with the rule's changes of response headers.
fn refuse(
    respond: &mut SendResponse<Bytes>,
    record: &mut RequestRecord,
    (fault, changes): (&ProxyError, Option<&HeaderModifier>),
    grpc: bool,
    head: bool,
) {
    record.fault(fault);
    if *fault == ProxyError::ClientGone {
        return;
    }
    if grpc {
        record.grpc_status = Some(fault.grpc_status());
    }
    record.bytes_out = local_reply::http2(respond, (fault, changes), grpc, head);
}
