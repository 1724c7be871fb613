//! HTTP/1.1 clients and HTTP/1.1 endpoints.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use canal_gateway_engine::GatewayTimeouts;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, until};
use crate::origin::{OriginServer, Peer, pattern};

const GET: &[u8] = b"GET /a HTTP/1.1\r\nHost: web\r\n\r\n";

#[tokio::test]
async fn connections_are_reused_on_both_sides() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    for _ in 0..20 {
        client.send(GET).await;
        let answer = client.answer().await.unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(answer.field("connection"), None);
    }
    assert_eq!((origin.connections(), origin.requests()), (1, 20));
    assert_eq!(
        fixture.metric("canal_gateway_upstream_reused_total", &[]),
        19.0
    );
}

/// A client's first request that could not be repeated gets a connection that the application
/// cannot be about to close, as without a mesh.
#[tokio::test]
async fn a_clients_first_post_takes_no_idle_connection() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let reused = || fixture.metric("canal_gateway_upstream_reused_total", &[]);
    let (post, put) = (
        "POST /a HTTP/1.1\r\nHost: web\r\n\r\n",
        "PUT /a HTTP/1.1\r\nHost: web\r\nContent-Length: 2\r\n\r\nhi",
    );
    assert_eq!(HttpClient::get(fixture.web, "/").await.status, 200);
    for (n, first) in [(2, post), (3, put)] {
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(first.as_bytes()).await;
        assert_eq!(client.answer().await.unwrap().status, 200);
        assert_eq!(
            (origin.connections(), reused()),
            (n, 2.0 * (n - 2) as f64),
            "{first:?} comes first"
        );
        client.send(first.as_bytes()).await;
        assert_eq!(client.answer().await.unwrap().status, 200);
        assert_eq!(origin.connections(), n, "{first:?} comes second");
        assert_eq!(HttpClient::get(fixture.web, "/").await.status, 200);
        assert_eq!(
            (origin.connections(), reused()),
            (n, 2.0 * (n - 1) as f64),
            "a GET is first"
        );
    }
}

#[tokio::test]
async fn forwarded_heads_lose_hop_fields_and_gain_the_meshs_fields() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let request = "POST http://web/a?b=c HTTP/1.1\r\nHost: web\r\nConnection: x-hop, keep-alive\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\n\
                   X-Forwarded-For: 1.2.3.4\r\nX-Request-Id: mine\r\nX-Keep: yes\r\nContent-Length: 2\r\n\r\nhi";
    let seen = HttpClient::once(fixture.web, request).await.text();
    let lower = seen.to_ascii_lowercase();
    assert!(
        seen.starts_with("POST /a?b=c HTTP/1.1\r\nHost: web\r\n"),
        "{seen}"
    );
    for gone in ["x-hop", "keep-alive"] {
        assert!(!lower.contains(gone), "{gone} in {seen}");
    }
    for there in [
        "x-forwarded-for: 1.2.3.4, 127.0.0.1\r\n",
        "x-request-id: mine\r\n",
        "x-forwarded-proto: http\r\n",
        "x-keep: yes\r\n",
        "\r\n\r\nhi",
    ] {
        assert!(lower.contains(there), "{there:?} not in {seen}");
    }
    let made = HttpClient::get(fixture.web, "/").await.text();
    let id = made
        .split("x-request-id: ")
        .nth(1)
        .unwrap()
        .split("\r\n")
        .next()
        .unwrap();
    assert_eq!(id.len(), 36, "{made}");
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    let all: String = (0..30)
        .map(|n| format!("PUT /{n} HTTP/1.1\r\nHost: web\r\nContent-Length: 3\r\n\r\n{n:03}"))
        .collect();
    client.send(all.as_bytes()).await;
    for n in 0..30 {
        let text = client.answer().await.unwrap().text();
        assert!(
            text.starts_with(&format!("PUT /{n} ")) && text.ends_with(&format!("\r\n\r\n{n:03}")),
            "{text}"
        );
    }
}

#[tokio::test]
async fn heads_may_come_byte_by_byte() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    for byte in b"POST /slow HTTP/1.1\r\nHost: web\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx-t: 1\r\n\r\n" {
        client.send(&[*byte]).await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let text = client.answer().await.unwrap().text();
    assert!(
        text.starts_with("POST /slow ") && text.ends_with("\r\n\r\nabc"),
        "{text}"
    );
}

/// A case's name, the request line, the origin's response, and what the client gets: status, body,
/// and whether the connection stays open.
type FramingCase = (
    &'static str,
    &'static str,
    &'static str,
    u16,
    &'static str,
    bool,
);

const FRAMING_CASES: &[FramingCase] = &[
    (
        "content-length",
        "GET / HTTP/1.1",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        200,
        "hi",
        true,
    ),
    (
        "empty",
        "GET / HTTP/1.1",
        "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        200,
        "",
        true,
    ),
    (
        "chunked",
        "GET / HTTP/1.1",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        200,
        "hi",
        true,
    ),
    (
        "no content",
        "DELETE / HTTP/1.1",
        "HTTP/1.1 204 No Content\r\n\r\n",
        204,
        "",
        true,
    ),
    (
        "not modified",
        "GET / HTTP/1.1",
        "HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\netag: \"x\"\r\n\r\n",
        304,
        "",
        true,
    ),
    (
        "head",
        "HEAD / HTTP/1.1",
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",
        200,
        "",
        true,
    ),
    (
        "odd reason",
        "GET / HTTP/1.1",
        "HTTP/1.1 299 Half \"way\"\r\ncontent-length: 0\r\n\r\n",
        299,
        "",
        true,
    ),
    (
        "1.0 answer with length",
        "GET / HTTP/1.1",
        "HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        200,
        "hi",
        true,
    ),
];

#[tokio::test]
async fn framing_of_responses_is_preserved_or_translated() {
    for (name, line, answer, status, body, kept) in FRAMING_CASES {
        let origin = OriginServer::fixed(answer).await;
        let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
        let mut client = HttpClient::connect(fixture.web).await;
        for _ in 0..2 {
            client
                .send(format!("{line}\r\nHost: web\r\n\r\n").as_bytes())
                .await;
            let got = client
                .answer_to(line.starts_with("HEAD"))
                .await
                .unwrap_or_else(|| panic!("{name}: no answer"));
            assert_eq!(
                (got.status, got.text().as_str()),
                (*status, *body),
                "{name}"
            );
            assert_eq!(
                got.field("connection").is_none(),
                *kept,
                "{name}: {}",
                got.head
            );
        }
    }
}

#[tokio::test]
async fn an_answer_that_ends_with_its_connection_becomes_chunked() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        peer.request().await;
        peer.write(b"HTTP/1.1 200 OK\r\n\r\nsome bytes").await;
    })
    .await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    for _ in 0..2 {
        client.send(GET).await;
        let answer = client.answer().await.unwrap();
        assert_eq!(
            (answer.text().as_str(), answer.field("transfer-encoding")),
            ("some bytes", Some("chunked"))
        );
    }
    // HTTP/1.0 clients get the response until the connection closes.
    let answer = HttpClient::once(fixture.web, "GET / HTTP/1.0\r\n\r\n").await;
    assert_eq!(
        (answer.text().as_str(), answer.field("connection")),
        ("some bytes", Some("close"))
    );
}

#[tokio::test]
async fn http_10_clients_get_readable_framing() {
    let origin = OriginServer::fixed(
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    )
    .await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let answer = HttpClient::once(
        fixture.web,
        "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    )
    .await;
    assert_eq!(
        (
            answer.text().as_str(),
            answer.field("transfer-encoding"),
            answer.field("connection")
        ),
        ("hi", None, Some("close"))
    );
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    for _ in 0..2 {
        client
            .send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            .await;
        let answer = client.answer().await.unwrap();
        assert_eq!(answer.field("connection"), Some("keep-alive"));
        assert!(
            answer
                .text()
                .contains("host: web.default.svc.cluster.local\r\n"),
            "{}",
            answer.text()
        );
    }
}

#[tokio::test]
async fn chunked_bodies_and_trailers_pass_both_ways() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        let (head, body) = peer.request().await.unwrap();
        assert!(
            head.to_ascii_lowercase()
                .contains("transfer-encoding: chunked"),
            "{head}"
        );
        peer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n")
            .await;
        for part in body.chunks(1234) {
            peer.write(format!("{:x};ext=1\r\n", part.len()).as_bytes())
                .await;
            peer.write(part).await;
            peer.write(b"\r\n").await;
        }
        peer.write(b"0\r\nx-sum: 42\r\n\r\n").await;
    })
    .await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client
        .send(b"POST / HTTP/1.1\r\nHost: web\r\nTransfer-Encoding: chunked\r\nTrailer: x-t\r\n\r\n")
        .await;
    let data = pattern(0, 100_000);
    for part in data.chunks(1000) {
        client
            .send(format!("{:x}\r\n", part.len()).as_bytes())
            .await;
        client.send(part).await;
        client.send(b"\r\n").await;
    }
    client.send(b"0\r\nx-t: 1\r\n\r\n").await;
    let answer = client.answer().await.unwrap();
    assert_eq!(answer.trailers, ["x-sum: 42"]);
    assert!(answer.body == data);
}

#[tokio::test]
async fn the_upstream_sends_100_continue_to_a_waiting_client() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        let head = peer.head().await.unwrap();
        assert!(
            head.to_ascii_lowercase().contains("expect: 100-continue"),
            "{head}"
        );
        assert!(peer.buffer.is_empty());
        peer.write(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
            .await;
        let body = peer.exactly(5).await.unwrap();
        assert_eq!(body, b"hello");
        peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            .await;
    })
    .await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client
        .send(b"POST / HTTP/1.1\r\nHost: web\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        .await;
    let early = client.answer().await.unwrap();
    assert_eq!((early.status, early.field("link")), (103, Some("</a>")));
    assert_eq!(client.answer().await.unwrap().status, 100);
    client.send(b"hello").await;
    assert_eq!(client.answer().await.unwrap().status, 200);
}

#[tokio::test]
async fn an_answer_may_come_before_the_request_is_whole() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        peer.head().await;
        peer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbig")
            .await;
    })
    .await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client
        .send(b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 1000000\r\n\r\npart")
        .await;
    let answer = client.answer().await.unwrap();
    assert_eq!(
        (
            answer.status,
            answer.text().as_str(),
            answer.field("connection")
        ),
        (413, "big", Some("close"))
    );
    // The client continues to send and still sees an orderly end.
    client.send(&pattern(0, 100_000)).await;
    assert!(client.closed().await);
}

#[tokio::test]
async fn bodies_of_10_mb_pass_byte_exact_both_ways() {
    // Far more than all buffers, so that they are refilled many times.
    const TOTAL: u64 = 10 << 20;
    // Larger than a socket buffer and than a window, so that all have to be refilled several
    // times.
    const STEP: usize = 256 << 10;
    let origin = OriginServer::each(|mut peer: Peer| async move {
        peer.head().await.unwrap();
        let mut at = 0u64;
        let mut rest = std::mem::take(&mut peer.buffer);
        while at < TOTAL {
            if rest.is_empty() {
                assert!(
                    peer.stream.read_buf(&mut rest).await.unwrap() > 0,
                    "ended at {at}"
                );
            }
            assert!(rest == pattern(at, rest.len()), "differs after {at}");
            at += rest.len() as u64;
            rest.clear();
        }
        peer.write(format!("HTTP/1.1 200 OK\r\ncontent-length: {TOTAL}\r\n\r\n").as_bytes())
            .await;
        for n in 0..TOTAL / STEP as u64 {
            peer.write(&pattern(n * STEP as u64, STEP)).await;
        }
    })
    .await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client
        .send(format!("POST / HTTP/1.1\r\nHost: web\r\nContent-Length: {TOTAL}\r\n\r\n").as_bytes())
        .await;
    for n in 0..TOTAL / STEP as u64 {
        client.send(&pattern(n * STEP as u64, STEP)).await;
    }
    assert_eq!(client.line().await, "HTTP/1.1 200 OK");
    while !client.line().await.is_empty() {}
    // The body is read in pieces, because it is too large to buffer in a test.
    let (mut at, mut rest) = (0u64, std::mem::take(&mut client.buffer));
    while at < TOTAL {
        if rest.is_empty() {
            assert!(
                client.stream.read_buf(&mut rest).await.unwrap() > 0,
                "ended at {at}"
            );
        }
        assert!(rest == pattern(at, rest.len()), "differs after {at}");
        at += rest.len() as u64;
        rest.clear();
    }
    fixture
        .until("istio_request_bytes_sum", &[], TOTAL as f64)
        .await;
    assert_eq!(
        fixture.metric("istio_response_bytes_sum", &[]),
        TOTAL as f64
    );
}

#[tokio::test]
async fn an_upgrade_turns_the_connection_into_bytes() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        let head = peer.head().await.unwrap().to_ascii_lowercase();
        assert!(head.contains("connection: upgrade") && head.contains("upgrade: websocket"), "{head}");
        // The first frame arrives in the same packet as the head.
        peer.write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nfirst").await;
        let mut got = std::mem::take(&mut peer.buffer);
        while peer.stream.read_buf(&mut got).await.unwrap() > 0 {}
        peer.write(&got).await;
    })
    .await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(b"GET /ws HTTP/1.1\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\nearly").await;
    let answer = client.answer().await.unwrap();
    assert_eq!(
        (
            answer.status,
            answer.field("upgrade"),
            answer.field("connection")
        ),
        (101, Some("websocket"), Some("upgrade"))
    );
    assert_eq!(client.exactly(5).await, b"first");
    client.send(b" and late").await;
    client.stream.shutdown().await.unwrap();
    assert!(client.closed().await);
    assert_eq!(client.buffer, b"early and late");
    fixture
        .until("istio_requests_total", &["response_code=\"101\""], 1.0)
        .await;
}

#[tokio::test]
async fn connect_is_refused() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let answer = HttpClient::once(
        fixture.web,
        "CONNECT web:80 HTTP/1.1\r\nHost: web:80\r\n\r\n",
    )
    .await;
    assert_eq!(answer.status, 405);
    assert!(answer.field("allow").is_some() && origin.requests() == 0);
    assert_eq!(
        fixture.metric(
            "canal_gateway_refused_requests_total",
            &["reason=\"method_not_served\""]
        ),
        1.0
    );
}

fn quick() -> GatewayTimeouts {
    let quick = Duration::from_millis(300) * canal_timing::slack();
    GatewayTimeouts {
        head: quick,
        idle: quick,
        client: quick,
        upstream: quick,
        linger: quick,
        ..GatewayTimeouts::default()
    }
}

#[tokio::test]
async fn slow_heads_idle_clients_and_stalled_bodies_end_by_name() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(
        EngineSetup {
            times: quick(),
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    let cases: &[(&str, &[u8], Option<u16>)] = &[
        ("idle", b"", None),
        ("request_head", b"GET / HTTP/1.1\r\nHost:", Some(408)),
        (
            "client_stalled",
            b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\nab",
            Some(408),
        ),
    ];
    for (what, bytes, status) in cases {
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(bytes).await;
        let answer = client.answer().await;
        assert_eq!(answer.as_ref().map(|a| a.status), *status, "{what}");
        assert!(
            answer.is_none_or(|a| a.field("connection") == Some("close")),
            "{what}"
        );
        assert!(client.closed().await, "{what}");
        fixture
            .until(
                "canal_gateway_timeouts_total",
                &[&format!("what=\"{what}\"")],
                1.0,
            )
            .await;
    }
}

#[tokio::test]
async fn a_refused_client_that_stays_is_left_after_its_time() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(
        EngineSetup {
            times: quick(),
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(b"GET / HTTP/9.9\r\n\r\n").await;
    assert_eq!(client.answer().await.unwrap().status, 505);
    assert!(client.closed().await);
    fixture
        .until("canal_gateway_timeouts_total", &["what=\"linger\""], 1.0)
        .await;
}

#[tokio::test]
async fn a_mute_upstream_is_a_gateway_timeout() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        peer.request().await;
        // The origin keeps the connection open and sends nothing.
        peer.request().await;
    })
    .await;
    let fixture = GatewayFixture::new(
        EngineSetup {
            times: quick(),
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    assert_eq!(HttpClient::get(fixture.web, "/").await.status, 504);
    fixture
        .until("canal_gateway_timeouts_total", &["upstream_stalled"], 1.0)
        .await;
    fixture
        .until(
            "istio_requests_total",
            &["response_code=\"504\"", "response_flags=\"UT\""],
            1.0,
        )
        .await;
}

#[tokio::test]
async fn malformed_responses_become_502_and_truncated_ones_are_cut() {
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        "HTTP/2.0 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        // A switch that the client did not ask for.
        "HTTP/1.1 101 Go\r\nupgrade: x\r\n\r\n",
        "garbage\r\n\r\n",
    ] {
        let origin = OriginServer::fixed(answer).await;
        let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
        assert_eq!(
            HttpClient::get(fixture.web, "/").await.status,
            502,
            "{answer:?}"
        );
        assert_eq!(
            fixture.metric(
                "canal_gateway_refused_requests_total",
                &["upstream_protocol", "side=\"upstream\""]
            ),
            1.0
        );
    }
    for torn in [
        "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\nXX\r\n",
    ] {
        let origin = OriginServer::each(move |mut peer: Peer| async move {
            peer.request().await;
            peer.write(torn.as_bytes()).await;
        })
        .await;
        let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(GET).await;
        // The end is never orderly, because the client must not mistake a partial response for a
        // complete one.
        assert!(!client.closed().await, "{torn:?}");
        assert!(!client.buffer.ends_with(b"0\r\n\r\n"));
    }
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_upstream_request() {
    let (tx, mut rx) = tokio::sync::mpsc::channel(1);
    let origin = OriginServer::each(move |mut peer: Peer| {
        let tx = tx.clone();
        async move {
            peer.request().await;
            let mut rest = Vec::new();
            let ended = peer.stream.read_to_end(&mut rest).await;
            let _ = tx.send(ended.is_ok()).await;
        }
    })
    .await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(GET).await;
    until("the request", || origin.requests() == 1).await;
    client.stream.set_zero_linger().unwrap();
    drop(client);
    tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), rx.recv())
        .await
        .expect("the upstream connection ends");
    fixture
        .until("istio_requests_total", &["response_flags=\"DC\""], 1.0)
        .await;
}

#[tokio::test]
async fn a_half_closed_client_still_gets_its_answer() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(GET).await;
    client.stream.shutdown().await.unwrap();
    assert_eq!(client.answer().await.unwrap().status, 200);
    assert!(client.closed().await);
}

/// Most bytes that two pairs of socket buffers and the gateway may buffer of a body that is not
/// read. Linux lets a receive buffer grow to 6 MiB and a send buffer to 4 MiB by default: 20 MiB
/// for both pairs.
const BUFFERED_MAX: u64 = 32 << 20;

#[tokio::test]
async fn a_slow_client_stops_the_upstream() {
    let sent = Arc::new(AtomicU64::new(0));
    let counted = sent.clone();
    let origin = OriginServer::each(move |mut peer: Peer| {
        let sent = counted.clone();
        async move {
            peer.request().await;
            peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n")
                .await;
            let part = pattern(0, 64 << 10);
            while peer.stream.write_all(&part).await.is_ok() {
                sent.fetch_add(part.len() as u64, Ordering::SeqCst);
            }
        }
    })
    .await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(GET).await;
    let taken = settled(&sent).await;
    assert!(
        (1..BUFFERED_MAX).contains(&taken),
        "{taken} bytes were taken for a client that reads nothing"
    );
}

#[tokio::test]
async fn a_slow_upstream_stops_the_client() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        peer.head().await;
        std::future::pending::<()>().await;
    })
    .await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client
        .send(b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 1000000000\r\n\r\n")
        .await;
    let sent = Arc::new(AtomicU64::new(0));
    let counted = sent.clone();
    tokio::spawn(async move {
        let part = pattern(0, 64 << 10);
        while client.stream.write_all(&part).await.is_ok() {
            counted.fetch_add(part.len() as u64, Ordering::SeqCst);
        }
    });
    let taken = settled(&sent).await;
    assert!(
        (1..BUFFERED_MAX).contains(&taken),
        "{taken} bytes were taken for an upstream that reads nothing"
    );
}

/// Waits until a count has not changed for 400 ms, and returns it.
pub(crate) async fn settled(count: &AtomicU64) -> u64 {
    let started = Instant::now();
    loop {
        let before = count.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(400)).await;
        let now = count.load(Ordering::SeqCst);
        if now > 0 && now == before {
            return now;
        }
        let waited = started.elapsed();
        assert!(
            waited < canal_timing::deadline(Duration::from_secs(20)),
            "{now} after {waited:?}, and it still grows"
        );
    }
}
