//! Lifecycle of the engine: configuration changes, drain without loss, soft drain, forced end,
//! stuck workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use canal_gateway_engine::GatewayTimeouts;
use canal_model::program::{AppProtocol, ResourceKind};
use http::Request;
use tokio::net::TcpStream;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, until};
use crate::http1::settled;
use crate::http2::connect;
use crate::origin::{OriginServer, Peer};

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: web\r\n\r\n";

async fn slow(delay: Duration) -> OriginServer {
    OriginServer::each(move |mut peer: Peer| async move {
        while peer.request().await.is_some() {
            tokio::time::sleep(delay).await;
            peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                .await;
        }
    })
    .await
}

#[tokio::test]
async fn a_service_that_goes_away_is_a_503_on_open_connections() {
    let origin = OriginServer::named("x").await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(GET).await;
    assert_eq!(client.answer().await.unwrap().status, 200);
    fixture.change(vec![], &[(ResourceKind::Service, "alpha/default/web")]);
    client.send(GET).await;
    assert_eq!(client.answer().await.unwrap().status, 503);
    fixture
        .until("istio_requests_total", &["response_flags=\"NC\""], 1.0)
        .await;
}

#[tokio::test]
async fn draining_finishes_requests_and_closes_idle_connections() {
    let (origin, release) = OriginServer::gated().await;
    release.send_replace(true);
    let times = GatewayTimeouts {
        drain_idle: Duration::from_millis(500),
        ..GatewayTimeouts::default()
    };
    let mut fixture = GatewayFixture::new(
        EngineSetup {
            times,
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    let mut busy = HttpClient::connect(fixture.web).await;
    let mut idle = HttpClient::connect(fixture.web).await;
    idle.send(GET).await;
    assert_eq!(idle.answer().await.unwrap().field("connection"), None);
    release.send_replace(false);
    busy.send(GET).await;
    until("the busy one's request", || origin.requests() == 2).await;
    fixture.drain(canal_timing::deadline(Duration::from_secs(10)));
    assert!(idle.closed().await);
    release.send_replace(true);
    let answer = busy.answer().await.unwrap();
    assert_eq!(
        (answer.status, answer.field("connection")),
        (200, Some("close"))
    );
    assert!(busy.closed().await);
    fixture
        .until("canal_gateway_timeouts_total", &["what=\"drain\""], 1.0)
        .await;
    assert!(fixture.join_workers(Duration::from_secs(5)).await);
    assert!(
        TcpStream::connect(fixture.web).await.is_err(),
        "nobody listens"
    );
}

#[tokio::test]
async fn no_request_is_lost_when_draining_under_load() {
    // Slow enough that requests are in flight at each moment of the drain.
    let origin = slow(Duration::from_millis(2)).await;
    let mut fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let (stop, answered) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    // Several, so that each worker has requests in progress when the drain begins.
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let (web, stop, answered) = (fixture.web, stop.clone(), answered.clone());
            tokio::spawn(async move {
                // The client acts like a connection pool: it replaces a closed connection, and a
                // refused connect ends it.
                while !stop.load(Ordering::SeqCst) {
                    let Ok(stream) = TcpStream::connect(web).await else {
                        return;
                    };
                    let mut client = HttpClient {
                        stream,
                        buffer: Vec::new(),
                    };
                    loop {
                        client.send(GET).await;
                        let answer = client
                            .answer()
                            .await
                            .expect("every request that was sent is answered");
                        assert_eq!(answer.status, 200);
                        answered.fetch_add(1, Ordering::SeqCst);
                        if answer.field("connection") == Some("close") {
                            break;
                        }
                    }
                }
            })
        })
        .collect();
    // With so many responses, almost surely each of the eight clients sends.
    until("load", || answered.load(Ordering::SeqCst) > 100).await;
    // Requests take 2 ms, so the drain ends long before it is forced.
    fixture.drain(canal_timing::deadline(Duration::from_secs(10)));
    // Below the drain's limit, so that a forced drain fails the test.
    assert!(fixture.join_workers(Duration::from_secs(8)).await);
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        client.await.unwrap();
    }
}

#[tokio::test]
async fn http2_clients_get_goaway_and_their_streams_finish() {
    let (origin, release) = OriginServer::gated().await;
    let mut fixture = GatewayFixture::new(
        EngineSetup {
            protocol: AppProtocol::Http1,
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    let client = connect(&fixture).await;
    let get = || Request::builder().uri("http://web/").body(()).unwrap();
    let (response, _) = client
        .clone()
        .ready()
        .await
        .unwrap()
        .send_request(get(), true)
        .unwrap();
    until("the request", || origin.requests() == 1).await;
    fixture.drain(canal_timing::deadline(Duration::from_secs(10)));
    release.send_replace(true);
    let answer = response.await.unwrap();
    assert_eq!(answer.status(), 200);
    let mut body = answer.into_body();
    assert_eq!(body.data().await.unwrap().unwrap(), "ok");
    // GOAWAY is sent first with the highest stream ID, so the client learns of it a little later.
    // After GOAWAY no stream can be opened.
    let gone = async {
        loop {
            let Ok(mut send) = client.clone().ready().await else {
                return;
            };
            if send.send_request(get(), true).is_err() {
                return;
            }
            // An interval of polling; the timeout below bounds the wait.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), gone)
        .await
        .unwrap();
    // From here on, nothing of the client keeps the connection open.
    drop((client, body));
    // Below the drain's limit, so that a forced drain fails the test.
    assert!(fixture.join_workers(Duration::from_secs(5)).await);
}

#[tokio::test]
async fn open_work_is_forced_after_the_timeout() {
    let (origin, _release) = OriginServer::gated().await;
    let mut fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(GET).await;
    until("the request", || origin.requests() == 1).await;
    fixture.drain(Duration::from_millis(300));
    assert!(fixture.join_workers(Duration::from_secs(3)).await);
    assert!(client.answer().await.is_none());
}

#[tokio::test]
async fn a_soft_drain_fails_no_request_and_can_be_revoked() {
    // Slow enough that requests are in flight at each moment.
    let origin = slow(Duration::from_millis(2)).await;
    let times = GatewayTimeouts {
        // The idle client waits for this time; the default of 4 s would prolong the test.
        drain_idle: Duration::from_millis(700),
        ..GatewayTimeouts::default()
    };
    let fixture = GatewayFixture::new(
        EngineSetup {
            times,
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    let mut idle = HttpClient::connect(fixture.web).await;
    idle.send(GET).await;
    assert_eq!(idle.answer().await.unwrap().field("connection"), None);
    let (stop, closed) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    // Several, so that each worker has connections that the drain includes.
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (web, stop, closed) = (fixture.web, stop.clone(), closed.clone());
            tokio::spawn(async move {
                let mut client = HttpClient::connect(web).await;
                while !stop.load(Ordering::SeqCst) {
                    client.send(GET).await;
                    let answer = client
                        .answer()
                        .await
                        .expect("every request that was sent is answered");
                    assert_eq!(answer.status, 200);
                    if answer.field("connection") == Some("close") {
                        closed.fetch_add(1, Ordering::SeqCst);
                        client = HttpClient::connect(web).await;
                    }
                }
                client
            })
        })
        .collect();
    // The clients send for a while, and before the drain no response closes its connection.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(closed.load(Ordering::SeqCst), 0);
    fixture.engine.set_soft_drain(true);
    assert!(idle.closed().await, "an idle connection is closed in order");
    fixture
        .until("canal_gateway_timeouts_total", &["what=\"drain\""], 1.0)
        .await;
    // More than the four clients, so connections that were opened during the drain close as well.
    until("responses that close their connections", || {
        closed.load(Ordering::SeqCst) > 10
    })
    .await;
    fixture.engine.set_soft_drain(false);
    // Once the soft drain has ended, no response closes its connection.
    settled(&closed).await;
    let before = closed.load(Ordering::SeqCst);
    // Nothing announces that no more responses close; four clients send about a thousand requests
    // in it.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(
        closed.load(Ordering::SeqCst),
        before,
        "a response still closes its connection"
    );
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        let mut client = client.await.unwrap();
        client.send(GET).await;
        assert_eq!(client.answer().await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn a_soft_drain_lets_http2_streams_finish_and_clients_return() {
    let (origin, release) = OriginServer::gated().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let client = connect(&fixture).await;
    let get = || Request::builder().uri("http://web/").body(()).unwrap();
    let (response, _) = client
        .clone()
        .ready()
        .await
        .unwrap()
        .send_request(get(), true)
        .unwrap();
    until("the request", || origin.requests() == 1).await;
    fixture.engine.set_soft_drain(true);
    release.send_replace(true);
    let mut body = response.await.unwrap().into_body();
    assert_eq!(body.data().await.unwrap().unwrap(), "ok");
    drop(body);
    let gone = async {
        while fixture.engine.sessions().0 > 0 {
            // An interval of polling; the timeout below bounds the wait.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), gone)
        .await
        .expect("the connection ends though its client keeps it");
    let refused = async {
        while client.clone().ready().await.is_ok() {
            // An interval of polling; the timeout below bounds the wait.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), refused)
        .await
        .expect("no more streams");
    // After the drain is revoked, a new connection is kept open.
    fixture.engine.set_soft_drain(false);
    let client = connect(&fixture).await;
    // About one interval of the soft drain (1 s), after which a drain that still ran would close
    // it.
    for _ in 0..3 {
        let (response, _) = client
            .clone()
            .ready()
            .await
            .unwrap()
            .send_request(get(), true)
            .unwrap();
        assert_eq!(response.await.unwrap().status(), 200);
        // Nothing announces that a connection stays, so the test waits for a moment.
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    // One connection is open, of two that were accepted.
    assert_eq!(fixture.engine.sessions(), (1, 2));
}

/// Waits until exactly these workers are stuck.
async fn until_stuck(fixture: &GatewayFixture, workers: &[usize]) {
    until(&format!("{workers:?} are stuck"), || {
        fixture.engine.stuck_workers() == workers
    })
    .await;
}

#[tokio::test]
async fn worker_that_stands_still_is_reported_until_it_turns_again() {
    let origin = OriginServer::named("x").await;
    let mut fixture = GatewayFixture::new(
        EngineSetup {
            workers: 2,
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    let (release, held) = std::sync::mpsc::channel::<()>();
    // This blocks the worker's thread, and with it all connections in its kernel queues.
    assert!(fixture.engine.workers().spawn(1, move || async move {
        let _ = held.recv();
    }));
    until_stuck(&fixture, &[1]).await;
    fixture.until("canal_gateway_workers_stuck", &[], 1.0).await;
    drop(release);
    until_stuck(&fixture, &[]).await;
    assert!(fixture.metric("canal_gateway_worker_stalls_total", &[]) >= 1.0);
    // Workers that end gracefully are not reported as stuck.
    fixture.drain(Duration::from_secs(1));
    assert!(fixture.join_workers(Duration::from_secs(5)).await);
    // The watchdog reports a silent worker after eight polls of 100 ms, so it would do so by then.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert!(fixture.engine.stuck_workers().is_empty());
}
