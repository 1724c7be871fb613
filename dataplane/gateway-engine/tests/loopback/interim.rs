//! Interim (1xx) responses: passed on in every pairing of versions, limited per request, and unable
//! to fill the gateway's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use canal_gateway_engine::GatewayTimeouts;
use canal_model::program::AppProtocol;
use canal_model::route_authorizer::{RouteAuthorizer, RouteAuthorizerProtocol};
use http::{Request, Response, StatusCode};
use tokio::io::AsyncWriteExt;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture};
use crate::http2;
use crate::origin::{OriginServer, Peer, frame};
use crate::route_authorizers;

const HINTS: &str = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n";

/// Starts an HTTP/1.1 endpoint that sends `hint` forever, with `pause` in between, and counts the
/// bytes.
async fn flood_1(hint: String, pause: Duration) -> (OriginServer, Arc<AtomicU64>) {
    let sent = Arc::<AtomicU64>::default();
    let count = sent.clone();
    let origin = OriginServer::each(move |mut peer: Peer| {
        let (hint, count) = (hint.clone(), count.clone());
        async move {
            if peer.head().await.is_none() {
                return;
            }
            while peer.stream.write_all(hint.as_bytes()).await.is_ok() {
                count.fetch_add(hint.len() as u64, SeqCst);
                tokio::time::sleep(pause).await;
            }
        }
    })
    .await;
    (origin, sent)
}

/// Starts an HTTP/2 endpoint that sends interim responses forever, each with a value of `bytes`
/// bytes.
async fn flood_2(bytes: usize, pause: Duration) -> OriginServer {
    http2::origin(move |_, mut respond| async move {
        loop {
            let hint = Response::builder()
                .status(StatusCode::EARLY_HINTS)
                .header("link", "x".repeat(bytes))
                .body(())
                .unwrap();
            if respond.send_informational(hint).is_err() {
                return;
            }
            tokio::time::sleep(pause).await;
        }
    })
    .await
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        << 10
}

fn fixture(protocol: AppProtocol, origin: &OriginServer, times: GatewayTimeouts) -> GatewayFixture {
    GatewayFixture::new(
        EngineSetup {
            protocol,
            times,
            ..EngineSetup::default()
        },
        &[origin.address],
    )
}

/// Returns the final status that a client of either version gets.
async fn final_status(fixture: &GatewayFixture, over_http2: bool) -> u16 {
    if over_http2 {
        let client = http2::connect(fixture).await;
        let request = Request::get("http://web/").body(()).unwrap();
        let (response, _) = client
            .ready()
            .await
            .unwrap()
            .send_request(request, true)
            .unwrap();
        return tokio::time::timeout(canal_timing::deadline(Duration::from_secs(20)), response)
            .await
            .unwrap()
            .unwrap()
            .status()
            .as_u16();
    }
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
    loop {
        let answer = client.answer().await.unwrap();
        if answer.status >= 200 {
            return answer.status;
        }
    }
}

#[tokio::test]
async fn interim_flood_ends_by_name_in_every_pairing() {
    let (one, _) = flood_1(HINTS.into(), Duration::ZERO).await;
    let two = flood_2(4, Duration::ZERO).await;
    for (protocol, origin) in [(AppProtocol::Http1, &one), (AppProtocol::Http2, &two)] {
        let fixture = fixture(protocol, origin, GatewayTimeouts::default());
        for over_http2 in [false, true] {
            assert_eq!(
                final_status(&fixture, over_http2).await,
                502,
                "{protocol:?}, HTTP/2 client: {over_http2}"
            );
        }
        let refused = fixture.metric(
            "canal_gateway_refused_requests_total",
            &["reason=\"interim_responses\"", "side=\"upstream\""],
        );
        assert_eq!(refused, 2.0, "{protocol:?}");
    }
}

/// An authorizer that never answered used to fill the memory with interim responses.
#[tokio::test]
async fn interim_responses_of_authorizers_are_limited() {
    let origin = OriginServer::echo().await;
    let over_http = route_authorizers::over_http(0);
    let over_grpc = RouteAuthorizer {
        protocol: RouteAuthorizerProtocol::Grpc,
        ..over_http.clone()
    };
    // Both limits, that of the number and that of the bytes.
    for bytes in [4, 9 << 10] {
        let hint = format!(
            "HTTP/1.1 103 Early Hints\r\nlink: {}\r\n\r\n",
            "x".repeat(bytes)
        );
        let (server_1, _) = flood_1(hint, Duration::ZERO).await;
        let server_2 = flood_2(bytes, Duration::ZERO).await;
        for (server, protocol, authorizer) in [
            (&server_1, AppProtocol::Http1, &over_http),
            (&server_2, AppProtocol::Http2, &over_http),
            (&server_2, AppProtocol::Grpc, &over_grpc),
        ] {
            let server = (server, protocol);
            let fixture = route_authorizers::fixture(&origin, server, authorizer.clone());
            assert_eq!(HttpClient::get(fixture.web, "/x").await.status, 403);
            let labels = ["result=\"authorizer_interim_responses\""];
            let checks = fixture.metric("canal_authorizer_requests_total", &labels);
            assert_eq!(checks, 1.0, "{protocol:?} {bytes}");
        }
    }
    assert_eq!(origin.requests(), 0);
}

#[tokio::test]
async fn interim_bytes_are_bounded_beside_their_number() {
    // Nine responses of 8 KiB exceed 64 KiB, but not the limit of sixteen.
    let (one, _) = flood_1(
        format!(
            "HTTP/1.1 103 Early Hints\r\nlink: {}\r\n\r\n",
            "x".repeat(8 << 10)
        ),
        Duration::ZERO,
    )
    .await;
    let two = flood_2(8 << 10, Duration::ZERO).await;
    for (protocol, origin) in [(AppProtocol::Http1, &one), (AppProtocol::Http2, &two)] {
        let fixture = fixture(protocol, origin, GatewayTimeouts::default());
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        let mut interim = 0;
        while client.answer().await.unwrap().status == 103 {
            interim += 1;
        }
        assert!((7..=8).contains(&interim), "{protocol:?}: {interim}");
        assert_eq!(
            fixture.metric(
                "canal_gateway_refused_requests_total",
                &["reason=\"interim_responses\""]
            ),
            1.0
        );
    }
}

/// This test measures the memory of its process, so it runs in one without the other tests.
#[test]
fn interim_flood_to_a_client_that_does_not_read_stays_bounded() {
    const ALONE: &str = "CANAL_LOOPBACK_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(flood_clients_that_do_not_read());
    }
    let test = "interim::interim_flood_to_a_client_that_does_not_read_stays_bounded";
    let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
    let ended = alone
        .args(["--exact", test, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&ended.stdout);
    assert!(
        ended.status.success() && printed.contains("1 passed"),
        "{printed}{}",
        String::from_utf8_lossy(&ended.stderr)
    );
}

/// Such a flood filled a gateway with 240 MiB per second: the client reads nothing, and the
/// endpoint writes as fast as it can.
async fn flood_clients_that_do_not_read() {
    let (one, sent) = flood_1(HINTS.repeat(1000), Duration::ZERO).await;
    let two = flood_2(1 << 10, Duration::ZERO).await;
    let before = resident_bytes();
    for (protocol, origin) in [(AppProtocol::Http1, &one), (AppProtocol::Http2, &two)] {
        let fixture = fixture(
            protocol,
            origin,
            GatewayTimeouts {
                client: Duration::from_secs(1),
                ..GatewayTimeouts::default()
            },
        );
        let mut clients = Vec::new();
        for _ in 0..20 {
            let mut client = HttpClient::connect(fixture.web).await;
            client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
            clients.push(client);
        }
        fixture
            .until(
                "canal_gateway_refused_requests_total",
                &["reason=\"interim_responses\""],
                20.0,
            )
            .await;
    }
    // The limit is what the sockets of twenty connections buffer on both sides. Without the
    // gateway's limits, that much was read in each second.
    assert!(
        sent.load(SeqCst) < 20 * (16 << 20),
        "{} bytes were taken from the endpoint",
        sent.load(SeqCst)
    );
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "the process has grown by {grown} bytes");
}

#[tokio::test]
async fn interim_responses_do_not_put_off_the_final_head() {
    let (one, _) = flood_1(HINTS.into(), Duration::from_millis(300)).await;
    let two = flood_2(4, Duration::from_millis(300)).await;
    let times = || GatewayTimeouts {
        upstream: Duration::from_secs(1),
        ..GatewayTimeouts::default()
    };
    for (protocol, origin) in [(AppProtocol::Http1, &one), (AppProtocol::Http2, &two)] {
        let fixture = fixture(protocol, origin, times());
        for over_http2 in [false, true] {
            let began = Instant::now();
            // Sixteen of them would take 4.8 s and end as a flood.
            assert_eq!(
                final_status(&fixture, over_http2).await,
                504,
                "{protocol:?}, HTTP/2 client: {over_http2}"
            );
            let waited = began.elapsed();
            assert!(waited >= Duration::from_millis(900), "{waited:?}");
        }
        assert_eq!(
            fixture.metric(
                "canal_gateway_timeouts_total",
                &["what=\"upstream_stalled\""]
            ),
            2.0,
            "{protocol:?}"
        );
    }
}

#[tokio::test]
async fn continue_is_passed_on_once() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        while peer.head().await.is_some() {
            peer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
                .await;
            peer.exactly(5).await;
            peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                .await;
        }
    })
    .await;
    let fixture = fixture(AppProtocol::Http1, &origin, GatewayTimeouts::default());
    let mut client = HttpClient::connect(fixture.web).await;
    client
        .send(b"POST / HTTP/1.1\r\nHost: web\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        .await;
    assert_eq!(client.answer().await.unwrap().status, 100);
    client.send(b"hello").await;
    assert_eq!(client.answer().await.unwrap().status, 200);
}

/// Starts an HTTP/2 endpoint that sends `101` as an interim response, byte by byte, because the h2
/// crate's server would not.
async fn switching() -> OriginServer {
    OriginServer::each(|mut peer: Peer| async move {
        peer.exactly(24).await;
        peer.write(&frame(4, 0, 0, &[])).await;
        loop {
            let Some(head) = peer.exactly(9).await else {
                return;
            };
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let Some(_) = peer.exactly(length).await else {
                return;
            };
            match (head[3], head[4]) {
                (4, 0) => peer.write(&frame(4, 1, 0, &[])).await,
                (1, _) => {
                    let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
                    // HPACK: a literal value for the indexed name `:status`.
                    peer.write(&frame(1, 4, stream, b"\x08\x03101")).await;
                    peer.write(&frame(1, 5, stream, b"\x88")).await;
                }
                _ => {}
            }
        }
    })
    .await
}

/// RFC 9113 §8.6: a proxy in front that accepted such a `101` would mistake the following bytes for
/// another protocol.
#[tokio::test]
async fn switching_protocols_from_http2_is_a_fault_of_the_endpoint() {
    let origin = switching().await;
    let fixture = fixture(AppProtocol::Http2, &origin, GatewayTimeouts::default());
    for over_http2 in [false, true] {
        assert_eq!(
            final_status(&fixture, over_http2).await,
            502,
            "HTTP/2 client: {over_http2}"
        );
    }
    let upgrade =
        "GET / HTTP/1.1\r\nHost: web\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
    assert_eq!(HttpClient::once(fixture.web, upgrade).await.status, 502);
    assert_eq!(
        fixture.metric(
            "canal_gateway_refused_requests_total",
            &["reason=\"upstream_protocol\"", "side=\"upstream\""]
        ),
        3.0
    );
}
