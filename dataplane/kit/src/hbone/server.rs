//! The server: HTTP/2 on an accepted mTLS connection, CONNECT requests handed out one by one. It connects to nothing itself.

use std::cell::Cell;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use canal_model::identity::Peer;
use canal_wire::hbone::{FRAME_SIZE, SERVER_HEADER_LIST, SERVER_SEND_BUFFER, STATUS_BAD};
use futures::future::LocalBoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use h2::RecvStream;
use h2::server::{Connection, SendResponse};
use http::{HeaderMap, Method, Request, Response, StatusCode};

use super::counts::{Ended, HboneCounters};
use super::opening::{Counted, Opening};
use super::{Authority, DATA_FRAME_BUDGET, HboneError, HboneStream, WindowBudget, WindowGrowth, WindowSizes, keep_alive};
use crate::drain::Drain;
use crate::tls::{Fallen, Standing, Stream, Transport, Worn};

/// A client that has not sent its preface and settings by then is dropped.
pub const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an abruptly ended connection may take to flush its GOAWAY.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// How the server behaves. `Default` is ztunnel's.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Concurrent streams per connection.
    pub streams_max: u32,
    /// PING interval and answer limit.
    pub ping: (Duration, Duration),
    /// What the windows are paid from; `None`: they grow to the largest.
    pub window_budget: Option<WindowBudget>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self { streams_max: canal_wire::hbone::SERVER_STREAMS_MAX, ping: super::PING, window_budget: None }
    }
}

/// One CONNECT, to be accepted or refused. Dropping it resets the stream.
#[derive(Debug)]
pub struct Incoming {
    /// Where to.
    pub authority: Authority,
    pub headers: HeaderMap,
    /// Who asks.
    pub peer: Rc<Peer>,
    recv: RecvStream,
    respond: SendResponse<Bytes>,
}

impl Incoming {
    /// Answers 200 with `headers` (e.g. the own `baggage`); only after the destination is connected.
    pub fn accept(mut self, headers: HeaderMap) -> Result<HboneStream, HboneError> {
        let mut response = Response::new(());
        *response.headers_mut() = headers;
        let send = self.respond.send_response(response, false).map_err(|e| HboneError::Server(e.to_string()))?;
        Ok(HboneStream::new(send, self.recv, None))
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
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    // Fails only if the client has gone.
    let _ = respond.send_response(response, true);
}

/// A request as it came: a CONNECT, or why it was answered 400 here already, the `reason` of `canal_hbone_refused_total`.
pub type Asked = Result<Incoming, &'static str>;

/// What a request is, before anyone is asked: the name of the refusal is its counter's `reason`.
fn decide_request(method: &Method, extended: bool, authority: Option<&str>) -> Result<Authority, &'static str> {
    if *method != Method::CONNECT {
        return Err("not_connect");
    }
    if extended {
        return Err("extended_connect");
    }
    authority.and_then(|a| a.parse().ok()).ok_or("bad_authority")
}

/// Serves one connection until it ends. `on_request` must not block; it spawns what it does. When `drain` starts, GOAWAY is sent and open
/// streams may finish; when it is forced, or the peer is believed no more (revoked), the connection is dropped. When the peer's certificate
/// ends, GOAWAY is sent too, and [`crate::tls::EXPIRED_PEER_TIMEOUT`] later it is dropped. Every connection runs on the caller's thread.
pub async fn serve<IO: Transport>(
    io: Stream<IO>,
    peer: Peer,
    config: &ServerConfig,
    counters: &HboneCounters,
    drain: Drain,
    on_request: impl FnMut(Asked),
) -> Result<(), HboneError> {
    let _open = counters.server_open.hold();
    let read = Rc::<Cell<u64>>::default();
    let growth = WindowGrowth::begin(WindowSizes::HBONE_MAX, config.window_budget.as_ref(), read.clone());
    let builder = h2::server::Builder::new()
        .initial_window_size(growth.sizes().stream)
        .initial_connection_window_size(growth.sizes().connection)
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(SERVER_HEADER_LIST)
        .max_concurrent_streams(config.streams_max)
        .max_send_buffer_size(SERVER_SEND_BUFFER)
        .data_frame_budget(DATA_FRAME_BUDGET)
        .to_owned();
    let life = (io.standing().clone(), io.worn());
    let h2 = match tokio::time::timeout(PREFACE_TIMEOUT, builder.handshake(Counted { io: Opening::new(io), read })).await {
        Ok(Ok(h2)) => h2,
        Ok(Err(e)) => {
            counters.closed("server", Ended::Error);
            return Err(HboneError::Server(e.to_string()));
        }
        Err(_) => {
            counters.closed("server", Ended::Error);
            return Err(HboneError::Server(format!("no HTTP/2 preface in {PREFACE_TIMEOUT:?}")));
        }
    };
    let mut service = Service { peer: Rc::new(peer), counters, on_request };
    let (ended, result) = service.run((h2, growth), life, config, drain).await;
    counters.closed("server", ended);
    result
}

enum Event {
    Draining,
    Forced,
    /// A PING was not answered.
    Mute,
    Fallen(Fallen),
    /// Its keys' time is nearly over.
    Worn,
    /// The peer's certificate has ended.
    Expired,
}

/// The server's side of HTTP/2 on one peer's connection.
type ServerConnection<IO> = Connection<Counted<Opening<Stream<IO>>>, Bytes>;

struct Service<'a, F> {
    peer: Rc<Peer>,
    counters: &'a HboneCounters,
    on_request: F,
}

impl<F: FnMut(Asked)> Service<'_, F> {
    async fn run<IO: Transport>(
        &mut self,
        (mut h2, mut growth): (ServerConnection<IO>, WindowGrowth),
        life: (Standing, Option<Worn>),
        config: &ServerConfig,
        drain: Drain,
    ) -> (Ended, Result<(), HboneError>) {
        let mut events = self.events(h2.ping_pong(), life, config, &drain);
        let mut draining = false;
        loop {
            tokio::select! {
                biased;
                Some(event) = events.next() => match event {
                    Event::Forced => return (Ended::Drained, Ok(())),
                    Event::Fallen(why) => {
                        let text = format!("the peer {} is believed no more: {}", self.peer.identity, why.name());
                        return (why.into(), Err(HboneError::Server(text)));
                    }
                    // The peer opens its next streams on another.
                    Event::Worn | Event::Expired => h2.graceful_shutdown(),
                    Event::Draining => {
                        draining = true;
                        h2.graceful_shutdown();
                    }
                    Event::Mute => {
                        h2.abrupt_shutdown(h2::Reason::NO_ERROR);
                        let _ = tokio::time::timeout(CLOSE_TIMEOUT, std::future::poll_fn(|cx| h2.poll_closed(cx))).await;
                        return (Ended::Ping, Err(HboneError::Server("no answer to PING".into())));
                    }
                },
                next = std::future::poll_fn(|cx| {
                    growth.apply_to_server(&mut h2);
                    h2.poll_accept(cx)
                }) => match next {
                    Some(Ok((request, respond))) => self.request(request, respond),
                    Some(Err(e)) => return (Ended::Error, Err(HboneError::Server(e.to_string()))),
                    None if draining => return (Ended::Drained, Ok(())),
                    None => return (Ended::Closed, Ok(())),
                },
            }
        }
    }

    /// What may happen to a connection besides its frames. Gathered so that none of it is looked at on a turn that only brings frames:
    /// asking the drain each time would take a lock that all workers share.
    fn events<'d>(
        &self,
        pings: Option<h2::PingPong>,
        (mut standing, worn): (Standing, Option<Worn>),
        config: &ServerConfig,
        drain: &'d Drain,
    ) -> FuturesUnordered<LocalBoxFuture<'d, Event>> {
        let dead = keep_alive(pings, config.ping);
        let expired = standing.expired();
        [
            async move {
                expired.await;
                Event::Expired
            }
            .boxed_local(),
            async move {
                dead.await;
                Event::Mute
            }
            .boxed_local(),
            async move { Event::Fallen(standing.fallen().await) }.boxed_local(),
            async {
                drain.draining().await;
                Event::Draining
            }
            .boxed_local(),
            async {
                drain.forced().await;
                Event::Forced
            }
            .boxed_local(),
        ]
        .into_iter()
        .chain(worn.map(|worn| worn.out().map(|()| Event::Worn).boxed_local()))
        .collect()
    }

    fn request(&mut self, request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
        let (head, recv) = request.into_parts();
        let extended = head.extensions.get::<h2::ext::Protocol>().is_some();
        match decide_request(&head.method, extended, head.uri.authority().map(http::uri::Authority::as_str)) {
            Ok(authority) => {
                let incoming = Incoming { authority, headers: head.headers, peer: self.peer.clone(), recv, respond };
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
        let name = |n: &str, p| Ok(Authority::Name(n.into(), p));
        for (method, extended, authority, want) in [
            (&connect, false, Some("10.1.1.2:80"), Ok(Authority::Address("10.1.1.2:80".parse().unwrap()))),
            (&connect, false, Some("[fd00::1]:80"), Ok(Authority::Address("[fd00::1]:80".parse().unwrap()))),
            (&connect, false, Some("Reviews.Bookinfo.svc:9080"), name("reviews.bookinfo.svc", 9080)),
            (&Method::GET, false, Some("10.1.1.2:80"), Err("not_connect")),
            (&connect, true, Some("10.1.1.2:80"), Err("extended_connect")),
            (&connect, false, None, Err("bad_authority")),
            (&connect, false, Some("10.1.1.2"), Err("bad_authority")),
            (&connect, false, Some("10.1.1.2:0"), Err("bad_authority")),
            (&connect, false, Some("reviews:65536"), Err("bad_authority")),
            (&connect, false, Some("reviews:+80"), Err("bad_authority")),
            (&connect, false, Some("user@reviews:80"), Err("bad_authority")),
            (&connect, false, Some("reviews..svc:80"), Err("bad_authority")),
            (&connect, false, Some(":80"), Err("bad_authority")),
        ] {
            assert_eq!(decide_request(method, extended, authority), want, "{method} {authority:?}");
        }
    }
}
