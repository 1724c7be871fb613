//! Retries that rules ask for: after which outcomes, at which endpoint, with which body, and within
//! which limits.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use canal_gateway_engine::GatewayLimits;
use canal_model::program::AppProtocol;
use canal_model::route_attempts::{
    BackoffJitter, RetryBackoff, RetryCondition, RetryPolicy, RouteTimeouts,
};
use http::{Request, Response};

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, until};
use crate::http2;
use crate::origin::{OriginServer, pattern};
use crate::timeouts::{fixture, speaking};

pub(crate) fn policy(max: u32, on: &[RetryCondition], statuses: &[u16]) -> RetryPolicy {
    RetryPolicy {
        max,
        on: on.iter().copied().collect(),
        statuses: statuses.to_vec(),
        backoff: RetryBackoff::from_base(Duration::from_millis(1), BackoffJitter::Full),
    }
}

fn gateway(setup: EngineSetup, endpoints: &[SocketAddr], policy: RetryPolicy) -> GatewayFixture {
    fixture(setup, endpoints, RouteTimeouts::default(), Some(policy))
}

fn retries(fixture: &GatewayFixture, reason: &str) -> f64 {
    let label = format!("reason=\"{reason}\"");
    fixture.metric("canal_gateway_retries_total", &[&label])
}

fn refused(fixture: &GatewayFixture, reason: &str) -> f64 {
    let label = format!("reason=\"{reason}\"");
    fixture.metric("canal_gateway_retries_refused_total", &[&label])
}

/// An HTTP/1.1 endpoint that answers each odd request with 503, and echoes the body of each even one.
pub(crate) async fn every_second() -> OriginServer {
    let count = Arc::new(AtomicUsize::new(0));
    OriginServer::each(move |mut peer| {
        let count = count.clone();
        async move {
            while let Some((_, body)) = peer.request().await {
                let is_odd = count.fetch_add(1, Ordering::SeqCst).is_multiple_of(2);
                let status = if is_odd { 503 } else { 200 };
                let head = format!(
                    "HTTP/1.1 {status} S\r\ncontent-length: {}\r\n\r\n",
                    body.len()
                );
                peer.write(&[head.as_bytes(), &body].concat()).await;
            }
        }
    })
    .await
}

/// The same over HTTP/2. The echo has the trailers of the request.
pub(crate) async fn every_second_http2() -> OriginServer {
    let count = Arc::new(AtomicUsize::new(0));
    http2::origin(move |request: Request<h2::RecvStream>, mut respond| {
        let count = count.clone();
        async move {
            let Ok((body, trailers)) = http2::read_all(request.into_body()).await else {
                return;
            };
            let is_odd = count.fetch_add(1, Ordering::SeqCst).is_multiple_of(2);
            let status = if is_odd { 503 } else { 200 };
            let response = Response::builder().status(status).body(()).unwrap();
            let mut send = respond.send_response(response, false).unwrap();
            let _ = send.send_data(Bytes::from(body), trailers.is_none());
            if let Some(trailers) = trailers {
                let _ = send.send_trailers(trailers);
            }
        }
    })
    .await
}

/// Sends a request with a body over HTTP/2; returns the status and the body.
async fn post_http2(fixture: &GatewayFixture, body: &[u8], trailers: bool) -> (u16, Vec<u8>) {
    let request = Request::post("http://web/").body(()).unwrap();
    let mut sender = http2::connect(fixture).await.ready().await.unwrap();
    let (response, mut stream) = sender.send_request(request, body.is_empty()).unwrap();
    if !body.is_empty() {
        let _ = http2::send_all(&mut stream, Bytes::copy_from_slice(body), !trailers).await;
        if trailers {
            let map = [("x-sum".parse().unwrap(), "7".parse().unwrap())];
            stream.send_trailers(map.into_iter().collect()).unwrap();
        }
    }
    let (parts, body) = response.await.unwrap().into_parts();
    let (body, got) = http2::read_all(body).await.unwrap();
    if trailers && parts.status == 200 {
        assert_eq!(got.unwrap()["x-sum"], "7");
    }
    (parts.status.as_u16(), body)
}

async fn post_http1(fixture: &GatewayFixture, body: &[u8], is_chunked: bool) -> (u16, Vec<u8>) {
    let mut client = HttpClient::connect(fixture.web).await;
    if is_chunked {
        let head = b"POST / HTTP/1.1\r\nHost: web\r\nTransfer-Encoding: chunked\r\n\r\n";
        client.send(head).await;
        for chunk in body.chunks(1000) {
            let size = format!("{:x}\r\n", chunk.len());
            client
                .send(&[size.as_bytes(), chunk, b"\r\n"].concat())
                .await;
        }
        client.send(b"0\r\n\r\n").await;
    } else {
        let length = body.len();
        let head = format!("POST / HTTP/1.1\r\nHost: web\r\nContent-Length: {length}\r\n\r\n");
        client.send(&[head.as_bytes(), body].concat()).await;
    }
    let response = client.answer().await.unwrap();
    (response.status, response.body)
}

#[tokio::test]
async fn a_request_is_sent_again_with_its_body_in_every_pairing_of_versions() {
    let one = every_second().await;
    let two = every_second_http2().await;
    for (origin, protocol) in [(one, AppProtocol::Http1), (two, AppProtocol::Http2)] {
        // There is room for one body, so this would fail if one kept its room.
        let limits = GatewayLimits {
            body_bytes: 4 * 2 * 41_000,
            ..GatewayLimits::default()
        };
        let setup = EngineSetup {
            limits,
            ..speaking(protocol)
        };
        let fixture = gateway(setup, &[origin.address], policy(1, &[], &[503]));
        let mut sent = 0.0;
        for _ in 0..4 {
            for body in [pattern(0, 0), pattern(3, 5), pattern(7, 40_000)] {
                let case = format!("{protocol:?}, {} bytes", body.len());
                for is_chunked in [false, true] {
                    let (status, echo) = post_http1(&fixture, &body, is_chunked).await;
                    assert!(status == 200 && echo == body, "{case}, HTTP/1.1: {status}");
                }
                for trailers in [false, true] {
                    let trailers = trailers && !body.is_empty() && protocol == AppProtocol::Http2;
                    let (status, echo) = post_http2(&fixture, &body, trailers).await;
                    assert!(status == 200 && echo == body, "{case}, HTTP/2: {status}");
                }
                sent += 4.0;
            }
        }
        assert_eq!(retries(&fixture, "retriable_response"), sent);
        assert_eq!(
            fixture.metric("canal_gateway_retries_refused_total", &[]),
            0.0
        );
        let requests = fixture.metric("istio_requests_total", &[]);
        assert_eq!(requests, sent, "each is reported once");
    }
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_not_sent_again() {
    let origin = every_second().await;
    let setup = EngineSetup::default();
    let fixture = gateway(setup, &[origin.address], policy(5, &[], &[503]));
    let body = pattern(0, (64 << 10) + 1);
    for (is_chunked, refusals) in [(false, 1.0), (true, 2.0)] {
        let (status, echo) = post_http1(&fixture, &body, is_chunked).await;
        assert_eq!(status, 503);
        assert_eq!(echo.len(), body.len(), "the endpoint's own response");
        assert_eq!(refused(&fixture, "retry_body_bytes"), refusals);
        // The next one is the even one.
        assert_eq!(HttpClient::get(fixture.web, "/").await.status, 200);
    }
    assert_eq!(retries(&fixture, "retriable_response"), 0.0);
}

#[tokio::test]
async fn a_body_beyond_the_tenants_share_is_not_sent_again() {
    let origin = every_second().await;
    let limits = GatewayLimits {
        body_bytes: 4000,
        ..GatewayLimits::default()
    };
    let setup = EngineSetup {
        limits,
        ..EngineSetup::default()
    };
    let fixture = gateway(setup, &[origin.address], policy(5, &[], &[503]));
    let (status, _) = post_http1(&fixture, &pattern(0, 2000), false).await;
    assert_eq!(status, 503);
    assert_eq!(refused(&fixture, "tenant_body_bytes"), 1.0);
    assert_eq!(refused(&fixture, "retry_body_bytes"), 1.0);
}

/// A response in progress needs no retry, so it holds nothing of the limits.
#[tokio::test]
async fn what_a_retry_needs_is_released_when_the_response_begins() {
    let count = Arc::new(AtomicUsize::new(0));
    let origin = OriginServer::each(move |mut peer| {
        let count = count.clone();
        async move {
            while peer.request().await.is_some() {
                if count.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
                    peer.write(b"HTTP/1.1 503 S\r\ncontent-length: 0\r\n\r\n")
                        .await;
                } else {
                    peer.write(b"HTTP/1.1 200 S\r\ncontent-length: 10\r\n\r\nhalf")
                        .await;
                }
            }
        }
    })
    .await;
    // A tenant's share has room for one body, and the budget for three retries.
    let limits = GatewayLimits {
        body_bytes: 4 * 2 * 2100,
        ..GatewayLimits::default()
    };
    let setup = EngineSetup {
        limits,
        ..EngineSetup::default()
    };
    let fixture = gateway(setup, &[origin.address], policy(1, &[], &[503]));
    let body = pattern(0, 2000);
    let mut open = Vec::new();
    for _ in 0..5 {
        let mut client = HttpClient::connect(fixture.web).await;
        let head = b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 2000\r\n\r\n";
        client.send(&[&head[..], &body].concat()).await;
        assert_eq!(client.line().await, "HTTP/1.1 200 S");
        open.push(client);
    }
    assert_eq!(retries(&fixture, "retriable_response"), 5.0);
}

#[tokio::test]
async fn a_retry_goes_to_another_endpoint() {
    let failing = OriginServer::fixed("HTTP/1.1 503 S\r\ncontent-length: 4\r\n\r\nfail").await;
    let working = OriginServer::named("works").await;
    let endpoints = [failing.address, working.address];
    let setup = EngineSetup::default();
    let fixture = gateway(setup, &endpoints, policy(1, &[], &[503]));
    for _ in 0..40 {
        let response = HttpClient::get(fixture.web, "/").await;
        assert_eq!((response.status, response.text().as_str()), (200, "works"));
    }
    assert_eq!(
        retries(&fixture, "retriable_response"),
        failing.requests() as f64
    );
    assert!(
        failing.requests() > 0,
        "one of 40 requests goes there first"
    );
}

#[tokio::test]
async fn the_last_response_is_passed_on_when_the_retries_are_used_up() {
    let origin = OriginServer::fixed("HTTP/1.1 503 S\r\ncontent-length: 4\r\n\r\nfail").await;
    for max in [0, 1, 4] {
        let before = origin.requests();
        let setup = EngineSetup::default();
        let fixture = gateway(setup, &[origin.address], policy(max, &[], &[503]));
        let response = HttpClient::get(fixture.web, "/").await;
        assert_eq!((response.status, response.text().as_str()), (503, "fail"));
        assert_eq!(origin.requests() - before, max as usize + 1);
        let refusals = if max == 0 { 0.0 } else { 1.0 };
        assert_eq!(refused(&fixture, "attempts"), refusals);
    }
}

/// An endpoint that closes, or resets the stream of, each odd request.
#[tokio::test]
async fn a_missing_response_is_a_reset() {
    let count = Arc::new(AtomicUsize::new(0));
    let closing = OriginServer::each(move |mut peer| {
        let count = count.clone();
        async move {
            while let Some((_, body)) = peer.request().await {
                // Odd requests get no response, so each POST needs its one retry.
                if count.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
                    return;
                }
                let head = format!("HTTP/1.1 200 S\r\ncontent-length: {}\r\n\r\n", body.len());
                peer.write(&[head.as_bytes(), &body].concat()).await;
            }
        }
    })
    .await;
    let setup = EngineSetup::default();
    let reset = [RetryCondition::Reset];
    let fixture = gateway(setup, &[closing.address], policy(1, &reset, &[]));
    for is_chunked in [false, true] {
        let (status, echo) = post_http1(&fixture, b"hello", is_chunked).await;
        assert_eq!((status, &echo[..]), (200, &b"hello"[..]));
    }
    // One for each framing.
    assert_eq!(retries(&fixture, "upstream_closed"), 2.0);

    let count = Arc::new(AtomicUsize::new(0));
    let resetting = http2::origin(move |request, mut respond| {
        let count = count.clone();
        async move {
            if count.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
                respond.send_reset(h2::Reason::INTERNAL_ERROR);
                return;
            }
            http2::echo(request, respond).await;
        }
    })
    .await;
    let setup = speaking(AppProtocol::Http2);
    let fixture = gateway(setup, &[resetting.address], policy(1, &reset, &[]));
    assert_eq!(post_http2(&fixture, b"hello", false).await.0, 200);
    assert_eq!(retries(&fixture, "upstream_reset"), 1.0);
}

#[tokio::test]
async fn a_grpc_status_in_the_head_is_a_condition() {
    let count = Arc::new(AtomicUsize::new(0));
    let origin = http2::origin(move |request, mut respond| {
        let count = count.clone();
        async move {
            if count.fetch_add(1, Ordering::SeqCst) > 0 {
                return http2::echo(request, respond).await;
            }
            let response = Response::builder()
                .header("content-type", "application/grpc")
                .header("grpc-status", "14")
                .body(());
            let _ = respond.send_response(response.unwrap(), true);
        }
    })
    .await;
    let setup = speaking(AppProtocol::Grpc);
    let on = [RetryCondition::Unavailable];
    let fixture = gateway(setup, &[origin.address], policy(2, &on, &[]));
    let (status, body) = post_http2(&fixture, b"call", false).await;
    assert!(status == 200 && body.ends_with(b"call"));
    assert_eq!(retries(&fixture, "retriable_response"), 1.0);
}

/// Returns an address at which connections are refused.
async fn refusing() -> SocketAddr {
    let listener = tokio::net::TcpListener::bind(crate::fixture::LOCALHOST).await;
    listener.unwrap().local_addr().unwrap()
}

#[tokio::test]
async fn the_policy_decides_about_connections_that_fail() {
    for (policy, connects) in [
        (policy(0, &[], &[]), 1.0),
        (policy(4, &[RetryCondition::Retriable4xx], &[]), 1.0),
        (policy(1, &[RetryCondition::ConnectFailure], &[]), 2.0),
        (policy(2, &[RetryCondition::ResetBeforeRequest], &[]), 3.0),
        (policy(3, &[RetryCondition::ServerError], &[]), 4.0),
    ] {
        let case = format!("{policy:?}");
        let fixture = gateway(EngineSetup::default(), &[refusing().await], policy);
        assert_eq!(HttpClient::get(fixture.web, "/").await.status, 503);
        let made = fixture.metric("canal_gateway_upstream_connects_total", &[]);
        assert_eq!(made, connects, "{case}");
    }
}

#[tokio::test]
async fn an_attempt_that_takes_too_long_is_made_elsewhere() {
    let (holding, _release) = OriginServer::gated().await;
    let working = OriginServer::named("works").await;
    let timeouts = RouteTimeouts {
        attempt: Some(Duration::from_millis(300)),
        ..RouteTimeouts::default()
    };
    let endpoints = [holding.address, working.address];
    // A slow machine may need more than one retry.
    let policy = policy(30, &[RetryCondition::Reset], &[]);
    let fixture = fixture(EngineSetup::default(), &endpoints, timeouts, Some(policy));
    while retries(&fixture, "attempt_timeout") == 0.0 {
        let response = HttpClient::get(fixture.web, "/").await;
        assert_eq!((response.status, response.text().as_str()), (200, "works"));
    }
}

#[tokio::test]
async fn a_storm_of_retries_stays_within_its_budget() {
    // A fifth of it, the part that may be retries, is eight; the budget's minimum is three.
    const CLIENTS: usize = 40;
    let origin = OriginServer::fixed("HTTP/1.1 503 S\r\ncontent-length: 4\r\n\r\nfail").await;
    // A request that is granted a retry keeps its part of the budget until its client leaves.
    let hour = Duration::from_secs(3600);
    let waiting = RetryPolicy {
        backoff: RetryBackoff::from_base(hour, BackoffJitter::AboveBase),
        ..policy(9, &[], &[503])
    };
    let fixture = gateway(EngineSetup::default(), &[origin.address], waiting);
    // The second round shows that the budget of the first was returned.
    for round in 1..=2 {
        let granted_before = retries(&fixture, "retriable_response");
        let refused_before = refused(&fixture, "retry_budget");
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            let mut client = HttpClient::connect(fixture.web).await;
            client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
            clients.push(client);
        }
        let granted = || retries(&fixture, "retriable_response") - granted_before;
        let refusals = || refused(&fixture, "retry_budget") - refused_before;
        until("all requests are decided", || {
            granted() + refusals() == CLIENTS as f64
        })
        .await;
        // A fifth of the requests in flight, and three at least.
        assert!(
            (3.0..=8.0).contains(&granted()),
            "round {round}: {}",
            granted()
        );
        // The clients leave with a reset, which ends the waits and returns the budget.
        for client in clients {
            client.stream.set_zero_linger().unwrap();
        }
        let all = granted_before + granted();
        until("the waiting requests end", || {
            fixture.metric("istio_requests_total", &["response_flags=\"DC\""]) >= all
        })
        .await;
    }
}

/// All first attempts fail at the same time, and the server counts what arrives after that.
#[tokio::test]
async fn retries_that_reach_the_server_stay_within_the_budget() {
    const CLIENTS: usize = 100;
    // A fifth of the requests in flight may be retries, and three at least.
    const RETRIES_MAX: usize = CLIENTS / 5;
    let (release, released) = tokio::sync::watch::channel(0);
    let arrived = Arc::new(AtomicUsize::new(0));
    let origin = OriginServer::each(move |mut peer| {
        let (mut released, arrived) = (released.clone(), arrived.clone());
        async move {
            while peer.request().await.is_some() {
                // The first attempts are answered in the first phase, retries in the second.
                let is_retry = arrived.fetch_add(1, Ordering::SeqCst) >= CLIENTS;
                let phase = if is_retry { 2 } else { 1 };
                if released.wait_for(|now| *now >= phase).await.is_err() {
                    return;
                }
                peer.write(b"HTTP/1.1 503 S\r\ncontent-length: 4\r\n\r\nfail")
                    .await;
            }
        }
    })
    .await;
    let setup = EngineSetup::default();
    let fixture = gateway(setup, &[origin.address], policy(1, &[], &[503]));
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        clients.push(client);
    }
    until("all first attempts arrive", || origin.requests() == CLIENTS).await;
    release.send_replace(1);
    let granted = || retries(&fixture, "retriable_response") as usize;
    let refusals = || refused(&fixture, "retry_budget") as usize;
    until("all requests are decided", || {
        granted() + refusals() == CLIENTS
    })
    .await;
    let all = CLIENTS + granted();
    until("the retries arrive", || origin.requests() == all).await;
    assert!(
        (3..=RETRIES_MAX).contains(&granted()),
        "{} of {CLIENTS} requests are sent again",
        granted()
    );
    release.send_replace(2);
    for client in &mut clients {
        let response = client.answer().await.unwrap();
        assert_eq!((response.status, response.text().as_str()), (503, "fail"));
    }
    assert_eq!(origin.requests(), all, "nothing is sent after that");
}
