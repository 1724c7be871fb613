//! Server side: HTTP/2 on an accepted mTLS connection, which passes CONNECT requests to the caller
//! one by one. It opens no connection itself. Start with [`serve`].

use std::cell::Cell;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use canal_model::identity::VerifiedPeer;
use canal_runtime::drain::DrainWatcher;
use canal_tls::{MtlsStream, PeerTrustWatch, RotateHint, Transport, TrustLoss};
use canal_wire::hbone::{
    FRAME_SIZE, SERVER_HEADER_LIST, SERVER_SEND_BUFFER, STATUS_BAD, STREAM_WINDOW_MAX,
};
use futures::future::LocalBoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use h2::RecvStream;
use h2::server::{Connection, SendResponse};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use tokio::sync::Notify;

use super::counts::{HboneCloseReason, HboneCounters};
use super::first_write::{Counted, DelayedFirstWrite};
use super::{
    BufferBudget, CONNECTION_WINDOW, ConnectAuthority, DATA_FRAME_BUDGET, FlowAccount, HboneError,
    HboneStream, WindowGrowth, keep_alive,
};

/// Timeout of the client's preface and settings. The TLS handshake before it may take as long.
pub const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that a connection which is ended abruptly has to flush its GOAWAY. A peer that reads gets
/// it within a round trip; one that does not read loses it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Configuration of the server. `Default` has ztunnel's values.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Maximum of concurrent streams per connection.
    pub streams_max: u32,
    /// PING interval and PING timeout.
    pub ping: (Duration, Duration),
    /// Budget of the bytes that are buffered for readers; with `None` only windows limit them.
    pub buffer_budget: Option<BufferBudget>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            streams_max: canal_wire::hbone::SERVER_STREAMS_MAX,
            ping: super::KEEPALIVE_INTERVAL,
            buffer_budget: None,
        }
    }
}

/// One CONNECT request, to be accepted or refused. Dropping it resets the stream.
#[derive(Debug)]
pub struct IncomingConnect {
    /// Destination that the client requests.
    pub authority: ConnectAuthority,
    pub headers: HeaderMap,
    /// Verified peer that sent the request.
    pub peer: Rc<VerifiedPeer>,
    account: Rc<FlowAccount>,
    recv: RecvStream,
    respond: SendResponse<Bytes>,
}

impl IncomingConnect {
    /// Answers 200 with `headers` (e.g. this side's `baggage`). It must be called only after the
    /// destination is connected.
    ///
    /// # Errors
    /// The stream or the connection has ended.
    pub fn accept(mut self, headers: HeaderMap) -> Result<HboneStream, HboneError> {
        let mut response = Response::new(());
        *response.headers_mut() = headers;
        let send = self
            .respond
            .send_response(response, false)
            .map_err(|e| HboneError::Server(e.to_string()))?;
        Ok(HboneStream::new(send, self.recv, self.account, None))
    }

    /// Answers `status` and ends the stream.
    pub fn refuse(mut self, status: u16) {
        refuse(&mut self.respond, status);
    }

    /// Resolves when the client gives the request up before it is answered.
    pub fn poll_abandoned(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.respond.poll_reset(cx).map(|_| ())
    }
}

fn refuse(respond: &mut SendResponse<Bytes>, status: u16) {
    let mut response = Response::new(());
    *response.status_mut() =
        StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    // This fails only if the client is gone.
    let _ = respond.send_response(response, true);
}

/// A request as it arrived: a CONNECT, or the reason why it was answered 400 here. The reason is
/// the label of `canal_hbone_refused_total`.
pub type ConnectResult = Result<IncomingConnect, &'static str>;

/// Classifies a request before the caller sees it. The error is the `reason` of the refusal's
/// counter.
fn decide_request(
    method: &Method,
    extended: bool,
    authority: Option<&str>,
) -> Result<ConnectAuthority, &'static str> {
    if *method != Method::CONNECT {
        return Err("not_connect");
    }
    if extended {
        return Err("extended_connect");
    }
    authority
        .and_then(|a| a.parse().ok())
        .ok_or("bad_authority")
}

/// Serves one connection until it ends, on the caller's thread. `on_request` must not block; it
/// spawns its work. When `drain` starts, GOAWAY is sent and open streams may finish. When it is
/// forced, or the peer loses trust (for example by revocation), the connection is closed. When the
/// peer's certificate expires, GOAWAY is sent too, and the connection is closed
/// [`canal_tls::EXPIRED_PEER_TIMEOUT`] later.
///
/// # Errors
/// The preface is missing, HTTP/2 or the transport fails, a PING is not answered, or the peer loses
/// trust.
pub async fn serve<IO: Transport>(
    io: MtlsStream<IO>,
    peer: VerifiedPeer,
    config: &ServerConfig,
    counters: &HboneCounters,
    drain: DrainWatcher,
    on_request: impl FnMut(ConnectResult),
) -> Result<(), HboneError> {
    let _open = counters.server_open.hold();
    let read = Rc::<Cell<u64>>::default();
    let account = counters.account(config.buffer_budget.clone());
    let growth = WindowGrowth::begin(STREAM_WINDOW_MAX, account.clone(), read.clone());
    let builder = h2::server::Builder::new()
        .initial_window_size(growth.stream_window())
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(SERVER_HEADER_LIST)
        .max_concurrent_streams(config.streams_max)
        .max_send_buffer_size(SERVER_SEND_BUFFER)
        .data_frame_budget(DATA_FRAME_BUDGET)
        .to_owned();
    // The handshake consumes `io`, so the trust watch and the rotate hint are taken before.
    let life = (io.peer_trust().clone(), io.rotate_hint());
    // A peer that sends no preface must not hold the connection.
    let h2 = match tokio::time::timeout(
        PREFACE_TIMEOUT,
        builder.handshake(Counted {
            io: DelayedFirstWrite::new(io),
            read,
        }),
    )
    .await
    {
        Ok(Ok(h2)) => h2,
        Ok(Err(e)) => {
            counters.closed("server", HboneCloseReason::Error);
            return Err(HboneError::Server(e.to_string()));
        }
        Err(_) => {
            counters.closed("server", HboneCloseReason::Error);
            return Err(HboneError::Server(format!(
                "no HTTP/2 preface in {PREFACE_TIMEOUT:?}"
            )));
        }
    };
    let mut service = ConnectService {
        peer: Rc::new(peer),
        account,
        counters,
        on_request,
    };
    let (ended, result) = service.run((h2, growth), life, config, drain).await;
    counters.closed("server", ended);
    result
}

enum ServerEvent {
    Draining,
    Forced,
    /// A PING was not answered.
    PingTimeout,
    TrustLost(TrustLoss),
    /// The connection's keys are near their limit.
    RotateKeys,
    /// The peer's certificate has expired.
    Expired,
}

/// Server side of HTTP/2 on one peer's connection.
type ServerConnection<IO> = Connection<Counted<DelayedFirstWrite<MtlsStream<IO>>>, Bytes>;

struct ConnectService<'a, F> {
    peer: Rc<VerifiedPeer>,
    account: Rc<FlowAccount>,
    counters: &'a HboneCounters,
    on_request: F,
}

impl<F: FnMut(ConnectResult)> ConnectService<'_, F> {
    async fn run<IO: Transport>(
        &mut self,
        (mut h2, mut growth): (ServerConnection<IO>, WindowGrowth),
        life: (PeerTrustWatch, Option<RotateHint>),
        config: &ServerConfig,
        drain: DrainWatcher,
    ) -> (HboneCloseReason, Result<(), HboneError>) {
        let mut events = self.events(h2.ping_pong(), life, config, &drain);
        let mut draining = false;
        loop {
            tokio::select! {
                biased;
                // Events come first, so that a peer that opens streams without a pause cannot delay
                // them.
                Some(event) = events.next() => match event {
                    ServerEvent::Forced => return (HboneCloseReason::Drained, Ok(())),
                    ServerEvent::TrustLost(why) => {
                        let text = format!("the peer {} is not trusted any more: {}", self.peer.identity, why.name());
                        return (why.into(), Err(HboneError::Server(text)));
                    }
                    // The peer opens its next streams on another connection.
                    ServerEvent::RotateKeys | ServerEvent::Expired => h2.graceful_shutdown(),
                    ServerEvent::Draining => {
                        draining = true;
                        h2.graceful_shutdown();
                    }
                    ServerEvent::PingTimeout => {
                        // The GOAWAY tells a peer that only was slow why the connection ends.
                        h2.abrupt_shutdown(h2::Reason::NO_ERROR);
                        // The connection ends with or without the flush: a dead peer reads nothing.
                        let _ = tokio::time::timeout(CLOSE_TIMEOUT, std::future::poll_fn(|cx| h2.poll_closed(cx))).await;
                        return (HboneCloseReason::Ping, Err(HboneError::Server("no answer to PING".into())));
                    }
                },
                next = std::future::poll_fn(|cx| {
                    growth.apply_to_server(&mut h2);
                    h2.poll_accept(cx)
                }) => match next {
                    Some(Ok((request, respond))) => self.request(request, respond),
                    Some(Err(e)) => return (HboneCloseReason::Error, Err(HboneError::Server(e.to_string()))),
                    // The peer has closed its streams after GOAWAY, which is the drain's normal
                    // end.
                    None if draining => return (HboneCloseReason::Drained, Ok(())),
                    None => return (HboneCloseReason::Closed, Ok(())),
                },
            }
        }
    }

    /// Collects the events of a connection other than its frames. A poll that brings only frames
    /// polls none of them: polling the drain each time would take a lock that all workers share.
    fn events<'d>(
        &self,
        pings: Option<h2::PingPong>,
        (mut trust_watch, rotate_hint): (PeerTrustWatch, Option<RotateHint>),
        config: &ServerConfig,
        drain: &'d DrainWatcher,
    ) -> FuturesUnordered<LocalBoxFuture<'d, ServerEvent>> {
        let ping = config.ping;
        let expired = trust_watch.expired();
        [
            async move {
                expired.await;
                ServerEvent::Expired
            }
            .boxed_local(),
            async move {
                keep_alive(pings, ping, &Notify::new()).await;
                ServerEvent::PingTimeout
            }
            .boxed_local(),
            async move { ServerEvent::TrustLost(trust_watch.wait_for_loss().await) }.boxed_local(),
            async {
                drain.draining().await;
                ServerEvent::Draining
            }
            .boxed_local(),
            async {
                drain.forced().await;
                ServerEvent::Forced
            }
            .boxed_local(),
        ]
        .into_iter()
        .chain(rotate_hint.map(|rotate_hint| {
            rotate_hint
                .out()
                .map(|()| ServerEvent::RotateKeys)
                .boxed_local()
        }))
        .collect()
    }

    fn request(&mut self, request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
        let (head, recv) = request.into_parts();
        let extended = head.extensions.get::<h2::ext::Protocol>().is_some();
        match decide_request(
            &head.method,
            extended,
            head.uri.authority().map(http::uri::Authority::as_str),
        ) {
            Ok(authority) => {
                let (peer, account) = (self.peer.clone(), self.account.clone());
                let incoming = IncomingConnect {
                    authority,
                    headers: head.headers,
                    peer,
                    account,
                    recv,
                    respond,
                };
                (self.on_request)(Ok(incoming));
            }
            Err(reason) => {
                self.counters.refused(reason);
                refuse(&mut respond, STATUS_BAD);
                (self.on_request)(Err(reason));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_connects_with_a_port_are_handed_out() {
        let connect = Method::CONNECT;
        let name = |n: &str, p| Ok(ConnectAuthority::Name(n.into(), p));
        for (method, extended, authority, want) in [
            (
                &connect,
                false,
                Some("10.1.1.2:80"),
                Ok(ConnectAuthority::Address("10.1.1.2:80".parse().unwrap())),
            ),
            (
                &connect,
                false,
                Some("[fd00::1]:80"),
                Ok(ConnectAuthority::Address("[fd00::1]:80".parse().unwrap())),
            ),
            (
                &connect,
                false,
                Some("Reviews.Bookinfo.svc:9080"),
                name("reviews.bookinfo.svc", 9080),
            ),
            (&Method::GET, false, Some("10.1.1.2:80"), Err("not_connect")),
            (&connect, true, Some("10.1.1.2:80"), Err("extended_connect")),
            // A CONNECT names a host and a port, and nothing else (RFC 9113 §8.5).
            (&connect, false, None, Err("bad_authority")),
            (&connect, false, Some("10.1.1.2"), Err("bad_authority")),
            (&connect, false, Some("10.1.1.2:0"), Err("bad_authority")),
            (&connect, false, Some("reviews:65536"), Err("bad_authority")),
            // Rust parses `+80` as a number, but a port has digits only (RFC 3986 §3.2.3).
            (&connect, false, Some("reviews:+80"), Err("bad_authority")),
            (
                &connect,
                false,
                Some("user@reviews:80"),
                Err("bad_authority"),
            ),
            (
                &connect,
                false,
                Some("reviews..svc:80"),
                Err("bad_authority"),
            ),
            (&connect, false, Some(":80"), Err("bad_authority")),
        ] {
            assert_eq!(
                decide_request(method, extended, authority),
                want,
                "{method} {authority:?}"
            );
        }
    }
}
