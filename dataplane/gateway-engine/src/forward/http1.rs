//! The client's side of a request in HTTP/1.1, and what happens to the client's connection after
//! it.
//!
//! The phases are in `pipeline`. Start with [`serve`].

use std::rc::Rc;
use std::task::{Context, Poll};

use canal_gateway_config::RequestMutations;
use canal_gateway_http::head::{ClientProtocol, Http1RoutingView, RequestInfo};
use canal_gateway_http::heads::{self, Additions};
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_io::buffer::BLOCK;
use canal_h1::{RequestHead, RequestKind};
use canal_model::route_filters::HeaderModifier;

use super::exchange::{DownstreamSide, UpstreamSide, http2_fault};
use super::mirrors::CopiedHead;
use super::{
    ExchangeEnd, HttpDownstream, HttpRequest, OpenHead, RequestState, UpgradedUpstream,
    UpstreamTransport, own_proto,
};
use crate::authorize::AuthorizationInterrupt;
use crate::authorize::buffered_body::{self, BufferedBody};
use crate::authorize::reauthorize::OngoingAuthorization;
use crate::downstream_state::Http1Downstream;
use crate::endpoints::SelectedEndpoint;
use crate::finish::RequestRecord;
use crate::local_reply::{self, LocalReplyOptions};
use crate::pipeline;
use crate::route::RoutedRequest;
use crate::session::ClientSession;
use crate::worker::Worker;

/// Decision on the client's connection after a request.
pub(crate) enum ConnectionDisposition {
    /// The connection stays open for the next request.
    Keep,
    /// The connection is closed gracefully.
    Close,
    /// The connection is reset, so that the client does not mistake a partial response for a
    /// complete one.
    Cut,
    /// The connection is no longer HTTP.
    Relay(Box<UpgradedConnection>),
}

/// A connection that was upgraded, with what its relay needs.
pub(crate) struct UpgradedConnection {
    pub(crate) upstream: Box<UpgradedUpstream>,
    pub(crate) record: RequestRecord,
    /// Head of the request for the upgrade.
    pub(crate) head: Option<Box<[u8]>>,
}

/// Authorizes an open request again. Its head is in `open.head_copy` if the client's inbox no
/// longer contains it.
pub(crate) fn reauthorize_request(
    worker: &Worker,
    open: &OngoingAuthorization<'_>,
    request: &RequestInfo,
    client: &Http1Downstream,
) -> Result<(), AuthorizationInterrupt> {
    let head = match open.head_copy {
        Some(head) => head,
        None if !request.has_body() => client.wire.inbox.bytes(),
        // The tenant got its first policies while the body was in transit, so the head was not
        // retained.
        None => return open.reauthorize_connection(worker),
    };
    let view = client.head.view(head);
    open.reauthorize(
        worker,
        (
            &Http1RoutingView::of(view, own_proto(worker, open.session())),
            view.authority(),
        ),
    )
}

/// Ready if the client has left while it waits for the response. With `reads`, a close is found by
/// reading; nothing else reads the connection then.
pub(crate) fn poll_client_gone(
    client: &mut Http1Downstream,
    cx: &mut Context<'_>,
    reads: bool,
) -> Poll<()> {
    let Http1Downstream {
        wire,
        half_closed: ended,
        ..
    } = client;
    // A pipelined request may arrive early, so at most one block of it is read.
    while reads && !*ended && wire.inbox.len() < BLOCK {
        match wire.io.poll_fill(cx, &mut wire.inbox) {
            Poll::Pending => break,
            // A client that half-closes may still wait for the response.
            Poll::Ready(Ok(0)) => *ended = true,
            Poll::Ready(Ok(_)) => {}
            Poll::Ready(Err(_)) => return Poll::Ready(()),
        }
    }
    wire.io.poll_broken(cx).map(drop)
}

/// Authorizes an upgraded connection again.
pub(crate) fn reauthorize_upgraded(
    worker: &Worker,
    session: &Rc<ClientSession>,
    parsed: &RequestHead,
    relay: (Option<&[u8]>, &SelectedEndpoint),
) -> Result<(), AuthorizationInterrupt> {
    let open = OngoingAuthorization::without_request(session, relay.1);
    let Some(head) = relay.0 else {
        return open.reauthorize_connection(worker);
    };
    let view = parsed.view(head);
    open.reauthorize(
        worker,
        (
            &Http1RoutingView::of(view, own_proto(worker, session)),
            view.authority(),
        ),
    )
}

/// Serves the request whose head is the first `len` bytes of the client's inbox.
pub(crate) async fn serve(
    worker: &Rc<Worker>,
    session: &Rc<ClientSession>,
    client: &mut Http1Downstream,
    len: usize,
) -> ConnectionDisposition {
    let info = RequestInfo::of_http1(&client.head.view(client.wire.inbox.bytes()));
    let mut record = RequestRecord::begin(worker, session, info.client_protocol);
    record.grpc = info.grpc;
    let proto = own_proto(worker, session);
    let client = Http1Client {
        connection: client,
        len,
        head_copy: None,
        proto,
        request_id: [0; 36],
    };
    let mut request = HttpRequest::new(client, RequestState::new(worker, session, info, record));
    match pipeline::serve(&mut request).await {
        Http1End::Decided(disposition) => disposition,
        Http1End::Upgraded { upstream, head } => {
            ConnectionDisposition::Relay(Box::new(UpgradedConnection {
                upstream,
                record: request.state.record,
                head,
            }))
        }
    }
}

/// End of a request in HTTP/1.1.
enum Http1End {
    Decided(ConnectionDisposition),
    /// A 101 response was passed on. `head` is that of the request.
    Upgraded {
        upstream: Box<UpgradedUpstream>,
        head: Option<Box<[u8]>>,
    },
}

/// The client's side of a request in HTTP/1.1.
struct Http1Client<'a> {
    connection: &'a mut Http1Downstream,
    /// Length of the head, with which the connection's inbox begins until the request's body is
    /// read.
    len: usize,
    /// Copy of the head, if the body overwrites it in the inbox and reauthorization may need it.
    head_copy: Option<Box<[u8]>>,
    /// The gateway's value of `x-forwarded-proto`; `None` if the client's own value is used.
    proto: Option<&'static str>,
    /// ID with which the request is forwarded if the client sent none.
    request_id: [u8; 36],
}

impl HttpDownstream for Http1Client<'_> {
    type Head<'h>
        = Http1RoutingView<'h>
    where
        Self: 'h;
    type End = Http1End;

    fn head(&self) -> (Http1RoutingView<'_>, &[u8]) {
        let inbox = &self.connection.wire.inbox;
        // A request that is sent again has overwritten its head in the inbox.
        let buf = self.head_copy.as_deref().unwrap_or(inbox.bytes());
        let view = self.connection.head.view(buf);
        (Http1RoutingView::of(view, self.proto), view.authority())
    }

    fn is_connect(&self) -> bool {
        self.connection
            .head
            .view(self.connection.wire.inbox.bytes())
            .method()
            == b"CONNECT"
    }

    fn prepare(&mut self, state: &mut RequestState) {
        self.request_id = heads::request_id(state.worker.random(), state.worker.random());
        if let Some(texts) = &mut state.record.texts
            && texts.request_id.is_empty()
        {
            texts.request_id = String::from_utf8_lossy(&self.request_id).into_owned();
        }
    }

    async fn buffer_body(
        &mut self,
        state: &mut RequestState,
        wanted: usize,
    ) -> Result<BufferedBody, ProxyError> {
        let permit = buffered_body::permit(&state.worker, &state.session, &state.info, wanted)?;
        // Reading the body sends the `100 Continue` that the client waits for.
        state.record.interim.continued = self
            .connection
            .head
            .view(self.connection.wire.inbox.bytes())
            .expects_continue();
        buffered_body::of_http1(
            &state.worker,
            self.connection,
            &state.info,
            (self.len, wanted),
            permit,
        )
        .await
    }

    fn send(
        &mut self,
        state: &mut RequestState,
        routed: &RoutedRequest,
        upstream: UpstreamTransport,
        changes: Option<&RequestMutations>,
    ) -> Result<UpstreamSide, ProxyError> {
        let Http1Downstream {
            wire, head, out, ..
        } = &mut *self.connection;
        // Once the body overwrites the inbox, a further attempt reads the copy of the head.
        let buf = self.head_copy.as_deref().unwrap_or(wire.inbox.bytes());
        let view = head.view(buf);
        let hostname = routed
            .view
            .set
            .service
            .as_ref()
            .map_or("", |names| names.hostname.as_str());
        let add = Additions {
            changes,
            ..state.additions(self.request_id, hostname)
        };
        match upstream {
            UpstreamTransport::Http1(mut upstream) => {
                heads::request_1_to_1(out, buf, &view, &add, upstream.wire.outbox.head())
                    .map_err(ProxyError::BadRequest)?;
                Ok(UpstreamSide::Http1(upstream))
            }
            UpstreamTransport::Http2(place, mut send) => {
                let request = heads::request_1_to_2(&view, &add)?;
                if view.expects_continue()
                    // A retry comes here again, and the client gets `100` once.
                    && !std::mem::replace(&mut state.record.interim.continued, true)
                {
                    // HTTP/2 endpoints seldom send `100`; the client would wait for its own
                    // timeout.
                    wire.outbox.push_static(b"HTTP/1.1 100 Continue\r\n\r\n");
                }
                let (response, stream) = send
                    .send_request(request, !state.info.has_body())
                    .map_err(|e| http2_fault(&e))?;
                Ok(UpstreamSide::http2(place, response, stream))
            }
        }
    }

    fn copy_head(
        &mut self,
        state: &RequestState,
        routed: &RoutedRequest,
        version: ClientProtocol,
        changes: &RequestMutations,
    ) -> Result<CopiedHead, ProxyError> {
        let Http1Downstream {
            wire, head, out, ..
        } = &mut *self.connection;
        let buf = self.head_copy.as_deref().unwrap_or(wire.inbox.bytes());
        let view = head.view(buf);
        let hostname = routed.resolved.hostname().unwrap_or_default();
        let add = Additions {
            changes: Some(changes),
            ..state.additions(self.request_id, hostname)
        };
        if version == ClientProtocol::Http2 {
            return heads::request_1_to_2(&view, &add).map(CopiedHead::Http2);
        }
        let mut copied = Vec::new();
        heads::request_1_to_1(out, buf, &view, &add, &mut copied)
            .map_err(ProxyError::BadRequest)?;
        Ok(CopiedHead::Http1(copied))
    }

    fn is_complete(&self, info: &RequestInfo) -> bool {
        !info.has_body()
    }

    fn begin_body(&mut self, session: &ClientSession, keeps_head: bool) {
        let inbox = &mut self.connection.wire.inbox;
        if keeps_head || session.is_policed() {
            self.head_copy = Some(inbox.bytes()[..self.len].into());
        }
        inbox.advance(self.len);
    }

    fn poll_client_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        poll_client_gone(self.connection, cx, true)
    }

    fn exchange(&mut self) -> (DownstreamSide<'_>, OpenHead<'_>) {
        (
            DownstreamSide::Http1(self.connection),
            OpenHead {
                copy: self.head_copy.as_deref(),
                http2: None,
            },
        )
    }

    async fn finish(
        &mut self,
        state: &mut RequestState,
        changes: Option<&HeaderModifier>,
        ended: Result<ExchangeEnd, ProxyError>,
    ) -> Http1End {
        Http1End::Decided(match ended {
            Ok(ExchangeEnd::Complete {
                request_done,
                keep_alive,
            }) => {
                self.consume_head(&state.info);
                if request_done && keep_alive {
                    ConnectionDisposition::Keep
                } else {
                    ConnectionDisposition::Close
                }
            }
            Ok(ExchangeEnd::Upgraded(None)) => ConnectionDisposition::Cut,
            Ok(ExchangeEnd::Upgraded(Some(upstream))) => {
                let inbox = &self.connection.wire.inbox;
                let remaining =
                    || (!state.info.has_body()).then(|| inbox.bytes()[..self.len].into());
                let head = self.head_copy.take().or_else(remaining);
                self.consume_head(&state.info);
                return Http1End::Upgraded { upstream, head };
            }
            Ok(ExchangeEnd::Broken(error)) | Err(error @ ProxyError::ClientGone) => {
                state.record.fault(&error);
                ConnectionDisposition::Cut
            }
            Err(error) => self.refuse(state, changes, error).await,
        })
    }
}

impl Http1Client<'_> {
    /// Removes the head of a request without a body from the inbox; until now it stayed there.
    fn consume_head(&mut self, info: &RequestInfo) {
        if !info.has_body() {
            self.connection.wire.inbox.advance(self.len);
        }
    }

    /// Sends a local reply for an error.
    async fn refuse(
        &mut self,
        state: &mut RequestState,
        changes: Option<&HeaderModifier>,
        error: ProxyError,
    ) -> ConnectionDisposition {
        let RequestState {
            worker,
            info,
            record,
            ..
        } = state;
        record.fault(&error);
        // While a body is in transit, the start of the next request is known only after reading the
        // entire body.
        let keep = info.keep_alive
            && !info.has_body()
            && !record.keeps_no_client()
            && !matches!(error, ProxyError::BadRequest(_));
        if !info.has_body() {
            self.connection.wire.inbox.advance(self.len);
        }
        let options = LocalReplyOptions {
            keep,
            client_protocol: info.client_protocol,
            head: info.kind == RequestKind::Head,
            changes,
        };
        match local_reply::http1(worker, self.connection, &error, options).await {
            Some(bytes) => {
                record.bytes_out = bytes;
                if keep {
                    ConnectionDisposition::Keep
                } else {
                    ConnectionDisposition::Close
                }
            }
            None => ConnectionDisposition::Cut,
        }
    }
}
