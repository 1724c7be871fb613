//! Details of HTTP that applications depend on, in every pairing of versions: responses without
//! content, expectations, requests without a body, upgrades with one, and requests that an endpoint
//! refused unprocessed.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use canal_gateway_engine::GatewayTimeouts;
use canal_model::program::AppProtocol;
use h2::client::ResponseFuture;
use h2::{Reason, RecvStream, SendStream};
use http::{Request, Response, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture};
use crate::http2;
use crate::origin::{OriginServer, Peer, frame};

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: web\r\n\r\n";

fn fixture(protocol: AppProtocol, origin: &OriginServer) -> GatewayFixture {
    GatewayFixture::new(
        EngineSetup {
            protocol,
            ..EngineSetup::default()
        },
        &[origin.address],
    )
}

/// Begins a request on a new HTTP/2 connection.
async fn begin_2(
    fixture: &GatewayFixture,
    request: http::request::Builder,
    ended: bool,
) -> (ResponseFuture, SendStream<Bytes>) {
    let client = http2::connect(fixture).await;
    client
        .ready()
        .await
        .unwrap()
        .send_request(request.body(()).unwrap(), ended)
        .unwrap()
}

/// Asserts that two requests of one HTTP/1.1 client and one of an HTTP/2 client get `status`
/// without a field that announces a body.
async fn assert_without_content(fixture: &GatewayFixture, status: u16, case: &str) {
    let mut client = HttpClient::connect(fixture.web).await;
    // The second request shows that the connection is at a message boundary after the first.
    for n in 0..2 {
        client.send(GET).await;
        let mut answer = client.answer().await.unwrap();
        // One of the callers' endpoints sends an interim response first.
        if answer.status == 103 {
            assert_eq!(
                (
                    answer.field("content-length"),
                    answer.field("transfer-encoding")
                ),
                (None, None),
                "{case}"
            );
            answer = client.answer().await.unwrap();
        }
        assert_eq!(answer.status, status, "{case}, request {n}");
        assert_eq!(
            (
                answer.field("content-length"),
                answer.field("transfer-encoding")
            ),
            (None, None),
            "{case}"
        );
    }
    let (response, _) = begin_2(fixture, Request::get("http://web/"), true).await;
    let response = response.await.unwrap_or_else(|e| panic!("{case}: {e}"));
    assert_eq!(
        (
            response.status().as_u16(),
            response.headers().get("content-length")
        ),
        (status, None),
        "{case}"
    );
    assert_eq!(
        http2::read_all(response.into_body()).await.unwrap().0,
        b"",
        "{case}"
    );
}

#[tokio::test]
async fn responses_without_content_end_with_their_head_and_their_connection_is_not_reused() {
    // Three requests follow: they share a connection to the endpoint, or each has one of its own.
    // Behind a head that announces content may be bytes that look like the next response.
    for (answer, status, connections) in [
        ("HTTP/1.1 204 No Content\r\n\r\n", 204, 1),
        (
            "HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n",
            204,
            1,
        ),
        (
            "HTTP/1.1 204 No Content\r\ntransfer-encoding: chunked\r\n\r\n",
            204,
            3,
        ),
        (
            "HTTP/1.1 204 No Content\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            204,
            3,
        ),
        (
            "HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\nhello",
            204,
            3,
        ),
        (
            "HTTP/1.1 204 No Content\r\ncontent-length: 0\r\ntransfer-encoding: chunked\r\n\r\n",
            204,
            3,
        ),
        (
            "HTTP/1.1 304 Not Modified\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            304,
            3,
        ),
        (
            "HTTP/1.1 103 Early Hints\r\ncontent-length: 5\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
            204,
            3,
        ),
    ] {
        let origin = OriginServer::fixed(answer).await;
        assert_without_content(&fixture(AppProtocol::Http1, &origin), status, answer).await;
        assert_eq!(origin.connections(), connections, "{answer:?}");
    }
}

#[tokio::test]
async fn responses_without_content_end_with_their_head_over_http2_too() {
    for (status, length) in [(204, Some("5")), (204, None), (304, None)] {
        let origin = http2::origin(move |_, mut respond| async move {
            let head = length
                .into_iter()
                .fold(Response::builder().status(status), |head, n| {
                    head.header("content-length", n)
                });
            let mut send = respond
                .send_response(head.body(()).unwrap(), false)
                .unwrap();
            let _ = send.send_data(Bytes::from_static(b"hello"), true);
        })
        .await;
        assert_without_content(
            &fixture(AppProtocol::Http2, &origin),
            status,
            &format!("{status} {length:?}"),
        )
        .await;
    }
}

/// Starts an HTTP/1.1 endpoint that waits for the body only after `100`, and answers `/no` with
/// 417.
async fn expecting_1() -> OriginServer {
    OriginServer::each(|mut peer: Peer| async move {
        while let Some(head) = peer.head().await {
            assert!(
                head.contains("expect: 100-continue\r\n") && peer.buffer.is_empty(),
                "{head}"
            );
            if head.starts_with("POST /no ") {
                return peer
                    .write(b"HTTP/1.1 417 Expectation Failed\r\ncontent-length: 0\r\n\r\n")
                    .await;
            }
            peer.write(b"HTTP/1.1 100 Continue\r\n\r\n").await;
            let Some(body) = peer.exactly(5).await else {
                return;
            };
            peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
                .await;
            peer.write(&body).await;
        }
    })
    .await
}

/// Starts an HTTP/2 endpoint that does the same.
async fn expecting_2() -> OriginServer {
    http2::origin(|request: Request<RecvStream>, mut respond| async move {
        assert_eq!(request.headers()["expect"], "100-continue");
        let head = |status| Response::builder().status(status).body(()).unwrap();
        if request.uri().path() == "/no" {
            respond.send_response(head(417), true).unwrap();
            return;
        }
        respond.send_informational(head(100)).unwrap();
        let Ok((body, _)) = http2::read_all(request.into_body()).await else {
            return;
        };
        let mut send = respond.send_response(head(200), false).unwrap();
        send.send_data(Bytes::from(body), true).unwrap();
    })
    .await
}

/// Java's HttpClient and the AWS SDKs hold their bodies back until the `100` arrives.
#[tokio::test]
async fn expectations_of_http2_clients_reach_the_endpoint_which_answers_them() {
    for (protocol, origin) in [
        (AppProtocol::Http1, expecting_1().await),
        (AppProtocol::Http2, expecting_2().await),
    ] {
        let fixture = fixture(protocol, &origin);
        let post = |path: &str| {
            Request::post(format!("http://web{path}"))
                .header("expect", "100-continue")
                .header("content-length", "5")
        };
        let (mut response, mut send) = begin_2(&fixture, post("/go"), false).await;
        let waited = tokio::time::timeout(
            canal_timing::deadline(std::time::Duration::from_secs(5)),
            async { poll_fn(|cx| response.poll_informational(cx)).await },
        );
        let interim = waited
            .await
            .unwrap_or_else(|_| panic!("{protocol:?}: no 100"))
            .unwrap()
            .unwrap();
        assert_eq!(interim.status(), StatusCode::CONTINUE, "{protocol:?}");
        send.send_data(Bytes::from_static(b"hello"), true).unwrap();
        let response = response.await.unwrap();
        assert_eq!(response.status(), 200, "{protocol:?}");
        assert_eq!(
            http2::read_all(response.into_body()).await.unwrap().0,
            b"hello",
            "{protocol:?}"
        );
        let (response, _send) = begin_2(&fixture, post("/no"), false).await;
        assert_eq!(
            response.await.unwrap().status(),
            417,
            "{protocol:?}: the endpoint's own refusal"
        );
        let requests = origin.requests();
        // RFC 9110 knows only `100-continue`, so the gateway refuses other expectations itself.
        let other = Request::post("http://web/").header("expect", "200-ok");
        let (response, _send) = begin_2(&fixture, other, false).await;
        assert_eq!(
            (response.await.unwrap().status().as_u16(), origin.requests()),
            (417, requests),
            "as for HTTP/1.1 clients"
        );
    }
}

/// IIS, lighttpd and others answer 411 otherwise.
#[tokio::test]
async fn http2_requests_that_lack_a_body_state_a_length_of_zero_where_a_body_is_usual() {
    let origin = OriginServer::echo().await;
    let fixture = fixture(AppProtocol::Http1, &origin);
    for (method, states_length) in [
        ("POST", true),
        ("PUT", true),
        ("PATCH", true),
        ("GET", false),
        ("HEAD", false),
        ("DELETE", false),
        ("OPTIONS", false),
    ] {
        let request = Request::builder()
            .method(method)
            .uri("http://web/")
            .header("x-case", method);
        let (response, _) = begin_2(&fixture, request, true).await;
        let response = response.await.unwrap();
        assert_eq!(response.status(), 200, "{method}");
        if method == "HEAD" {
            continue;
        }
        let head =
            String::from_utf8(http2::read_all(response.into_body()).await.unwrap().0).unwrap();
        assert_eq!(
            head.contains("content-length: 0\r\n"),
            states_length,
            "{method}: {head}"
        );
        assert!(!head.contains("transfer-encoding"), "{method}: {head}");
    }
}

/// `docker exec` and `kubectl exec` upgrade by POST with a body.
#[tokio::test]
async fn an_upgrade_may_have_a_body_which_precedes_the_relay() {
    for (framing, body) in [
        ("Content-Length: 2", "{}"),
        ("Transfer-Encoding: chunked", "2\r\n{}\r\n0\r\n\r\n"),
    ] {
        // An endpoint may switch before it has read the body; the body still comes first.
        for switches_early in [false, true] {
            let origin = OriginServer::each(move |mut peer: Peer| async move {
                let head = peer.head().await.unwrap().to_ascii_lowercase();
                assert!(head.contains("connection: upgrade") && head.contains("upgrade: tcp"), "{head}");
                let switch = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: tcp\r\nconnection: upgrade\r\n\r\nfirst";
                // Both the switch before the body and the switch after it are legal for an
                // endpoint.
                if switches_early {
                    peer.write(switch).await;
                }
                assert_eq!(peer.exactly(body.len()).await.unwrap(), body.as_bytes());
                if !switches_early {
                    peer.write(switch).await;
                }
                let mut got = std::mem::take(&mut peer.buffer);
                while peer.stream.read_buf(&mut got).await.unwrap() > 0 {}
                peer.write(&got).await;
            })
            .await;
            let fixture = fixture(AppProtocol::Http1, &origin);
            let mut client = HttpClient::connect(fixture.web).await;
            let head = format!(
                "POST /x HTTP/1.1\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n{framing}\r\n\r\n"
            );
            let (start, rest) = body.split_at(1);
            client.send(format!("{head}{start}").as_bytes()).await;
            // Nothing announces that no byte comes, so the test can only wait a moment.
            let early =
                tokio::time::timeout(std::time::Duration::from_millis(100), client.more()).await;
            assert!(
                early.is_err(),
                "{framing}: the client sees the switch before its body is complete"
            );
            client.send(format!("{rest}early").as_bytes()).await;
            let answer = client.answer().await.unwrap();
            assert_eq!(
                (answer.status, answer.field("upgrade")),
                (101, Some("tcp")),
                "{framing} {switches_early}"
            );
            assert_eq!(client.exactly(5).await, b"first");
            client.send(b" and late").await;
            client.stream.shutdown().await.unwrap();
            assert!(client.closed().await);
            assert_eq!(
                client.buffer, b"early and late",
                "{framing} {switches_early}"
            );
        }
    }
}

/// An endpoint that does not switch gets and answers an ordinary request.
#[tokio::test]
async fn an_upgrade_with_a_body_may_be_declined() {
    for (protocol, origin) in [
        (AppProtocol::Http1, OriginServer::echo().await),
        (AppProtocol::Http2, http2::origin(http2::echo).await),
    ] {
        let fixture = fixture(protocol, &origin);
        let mut client = HttpClient::connect(fixture.web).await;
        for _ in 0..2 {
            client.send(b"POST /x HTTP/1.1\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 2\r\n\r\n{}").await;
            let answer = client.answer().await.unwrap();
            assert!(
                answer.status == 200 && answer.text().ends_with("{}"),
                "{protocol:?}: {answer:?}"
            );
        }
    }
}

/// Starts an HTTP/2 endpoint that answers each request with an orderly GOAWAY by which it processed
/// none.
async fn leaving() -> OriginServer {
    OriginServer::each(|mut peer: Peer| async move {
        peer.exactly(24).await;
        peer.write(&frame(4, 0, 0, &[])).await;
        while let Some(head) = peer.exactly(9).await {
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            if peer.exactly(length).await.is_none() {
                return;
            }
            match (head[3], head[4]) {
                (4, 0) => peer.write(&frame(4, 1, 0, &[])).await,
                // DATA: the gateway has passed a part of the body on.
                (0, _) => peer.write(&frame(7, 0, 0, &[0; 8])).await,
                _ => {}
            }
        }
    })
    .await
}

/// Starts an HTTP/2 endpoint that refuses each stream after the first bytes of its body.
async fn refusing() -> OriginServer {
    http2::origin(|request: Request<RecvStream>, mut respond| async move {
        let _ = request.into_body().data().await;
        respond.send_reset(Reason::REFUSED_STREAM);
    })
    .await
}

/// gRPC clients send a request again by themselves after REFUSED_STREAM, and not after UNAVAILABLE.
#[tokio::test]
async fn requests_that_an_endpoint_refused_unprocessed_are_refused_as_such() {
    for origin in [leaving().await, refusing().await] {
        let fixture = fixture(AppProtocol::Grpc, &origin);
        for content_type in ["application/grpc", "text/plain"] {
            let request = Request::post("http://web/s/M").header("content-type", content_type);
            let (response, mut send) = begin_2(&fixture, request, false).await;
            send.send_data(Bytes::from_static(b"part"), false).unwrap();
            let error = response.await.expect_err("not processed");
            assert_eq!(
                (error.reason(), error.is_remote()),
                (Some(Reason::REFUSED_STREAM), true),
                "{content_type}: {error}"
            );
        }
        let mut client = HttpClient::connect(fixture.web).await;
        client
            .send(b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 8\r\n\r\npart")
            .await;
        assert_eq!(
            client.answer().await.unwrap().status,
            503,
            "HTTP/1.1 has no such signal"
        );
        assert_eq!(
            fixture.metric(
                "canal_gateway_refused_requests_total",
                &["reason=\"upstream_refused\""]
            ),
            3.0
        );
    }
}

/// The bytes of a body that a 204 forbids, or of a second response, belong to no request of another
/// client.
#[tokio::test]
async fn bytes_after_a_response_without_content_reach_no_later_request() {
    let stray: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nstray";
    for head in [
        "HTTP/1.1 204 No Content\r\n\r\n",
        // 43 is the length of `stray`: a gateway that read a body here would swallow exactly the
        // stray bytes.
        "HTTP/1.1 304 Not Modified\r\ncontent-length: 43\r\n\r\n",
    ] {
        let (answered, written) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (answered_too, written_too) = (answered.clone(), written.clone());
        let origin = OriginServer::each(move |mut peer: Peer| {
            let (answered, written) = (answered_too.clone(), written_too.clone());
            async move {
                let Some(first) = peer.head().await else {
                    return;
                };
                if !first.starts_with("GET / ") {
                    return peer
                        .write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nright")
                        .await;
                }
                peer.write(head.as_bytes()).await;
                answered.notified().await;
                peer.write(stray).await;
                written.notify_one();
                // The connection stays open, so only its bytes show that it cannot be reused.
                let _ = peer.head().await;
            }
        })
        .await;
        let fixture = fixture(AppProtocol::Http1, &origin);
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(GET).await;
        assert!(matches!(client.answer().await.unwrap().status, 204 | 304));
        answered.notify_one();
        written.notified().await;
        assert_eq!(
            HttpClient::get(fixture.web, "/next").await.text(),
            "right",
            "{head}"
        );
        let (response, _) = begin_2(&fixture, Request::get("http://web/next"), true).await;
        assert_eq!(
            http2::read_all(response.await.unwrap().into_body())
                .await
                .unwrap()
                .0,
            b"right",
            "{head}"
        );
    }
}

/// The bytes after an interim response are the endpoint's response to the same request. None of
/// them reaches the next request.
#[tokio::test]
async fn a_body_after_an_interim_response_is_not_taken_for_the_response_to_the_next_request() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        while let Some(head) = peer.head().await {
            let path = head.split(' ').nth(1).unwrap().to_owned();
            let last = format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{path}",
                path.len()
            );
            let stray = format!(
                "HTTP/1.1 103 Early Hints\r\ncontent-length: {}\r\n\r\n{last}",
                last.len()
            );
            peer.write(format!("{stray}{last}").as_bytes()).await;
        }
    })
    .await;
    let fixture = fixture(AppProtocol::Http1, &origin);
    let mut client = HttpClient::connect(fixture.web).await;
    for path in ["/a", "/b"] {
        client
            .send(format!("GET {path} HTTP/1.1\r\nHost: web\r\n\r\n").as_bytes())
            .await;
        assert_eq!(client.answer().await.unwrap().status, 103);
        assert_eq!(client.answer().await.unwrap().text(), path);
    }
    assert_eq!((origin.connections(), client.buffer.len()), (2, 0));
}

/// h2 itself refuses DATA after the head of a response to HEAD. The head is complete, and no byte
/// after it may reach the client.
#[tokio::test]
async fn a_body_that_an_http2_endpoint_sends_for_head_is_dropped() {
    let origin = http2::origin(|request: Request<RecvStream>, mut respond| async move {
        let path = request.uri().path().to_owned();
        let head = Response::builder()
            .header("content-length", path.len())
            .body(())
            .unwrap();
        // The gateway may reset the stream before its DATA.
        let _ = respond
            .send_response(head, false)
            .unwrap()
            .send_data(path.into(), true);
    })
    .await;
    let fixture = fixture(AppProtocol::Http2, &origin);
    let mut client = HttpClient::connect(fixture.web).await;
    // The second round shows that the stray DATA broke neither the client's nor the endpoint's
    // connection.
    for _ in 0..2 {
        client
            .send(b"HEAD /stray HTTP/1.1\r\nHost: web\r\n\r\n")
            .await;
        let answer = client
            .answer_to(true)
            .await
            .expect("the head of the response");
        assert_eq!(
            (answer.status, answer.field("content-length")),
            (200, Some("6"))
        );
        client
            .send(b"GET /next HTTP/1.1\r\nHost: web\r\n\r\n")
            .await;
        assert_eq!(client.answer().await.unwrap().text(), "/next");
        let (response, _) = begin_2(&fixture, Request::head("http://web/stray"), true).await;
        let response = response.await.unwrap();
        assert_eq!(
            (
                response.status().as_u16(),
                &response.headers()["content-length"]
            ),
            (200, &"6".parse().unwrap())
        );
        assert_eq!(http2::read_all(response.into_body()).await.unwrap().0, b"");
    }
}

/// A refusal before the body leaves a connection on which the endpoint still expects that body.
#[tokio::test]
async fn a_connection_whose_endpoint_refused_an_expectation_is_not_reused() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        while let Some(head) = peer.head().await {
            let status = if head.contains("expect: 100-continue") {
                "417 Expectation Failed"
            } else {
                "200 OK"
            };
            peer.write(format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n").as_bytes())
                .await;
        }
    })
    .await;
    let fixture = fixture(AppProtocol::Http1, &origin);
    for n in 1..=2 {
        let request = Request::post("http://web/")
            .header("expect", "100-continue")
            .header("content-length", "5");
        let (response, _send) = begin_2(&fixture, request, false).await;
        assert_eq!(response.await.unwrap().status(), 417);
        assert_eq!(HttpClient::get(fixture.web, "/").await.status, 200);
        assert_eq!(
            origin.connections(),
            n + 1,
            "only the GET's connection is reused"
        );
    }
}

/// Starts an endpoint that switches at once, and notifies when its connection ends.
async fn switching_early() -> (OriginServer, Arc<Notify>) {
    let ended = Arc::new(Notify::new());
    let notified = ended.clone();
    let origin = OriginServer::each(move |mut peer: Peer| {
        let ended = notified.clone();
        async move {
            let head = peer.head().await.unwrap().to_ascii_lowercase();
            assert!(head.contains("upgrade: tcp"), "{head}");
            peer.write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: tcp\r\nconnection: upgrade\r\n\r\nfirst").await;
            let mut got = Vec::new();
            while matches!(peer.stream.read_buf(&mut got).await, Ok(1..)) {}
            ended.notify_one();
        }
    })
    .await;
    (origin, ended)
}

#[tokio::test]
async fn a_switch_is_not_held_back_for_a_client_that_never_completes_its_body() {
    const UNFINISHED: &[u8] = b"POST /x HTTP/1.1\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 9\r\n\r\n{}";
    for leaves in [false, true] {
        let (origin, ended) = switching_early().await;
        let client_time = if leaves {
            Duration::from_secs(3_600)
        } else {
            Duration::from_millis(300)
        };
        let times = GatewayTimeouts {
            client: client_time,
            ..GatewayTimeouts::default()
        };
        let fixture = GatewayFixture::new(
            EngineSetup {
                times,
                ..EngineSetup::default()
            },
            &[origin.address],
        );
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(UNFINISHED).await;
        if leaves {
            drop(client);
        } else {
            assert_eq!(client.answer().await.unwrap().status, 408);
            assert!(client.closed().await);
        }
        let ended = tokio::time::timeout(
            canal_timing::deadline(Duration::from_secs(20)),
            ended.notified(),
        )
        .await;
        assert!(
            ended.is_ok(),
            "the endpoint's connection stays open (the client leaves: {leaves})"
        );
    }
}

#[tokio::test]
async fn requests_that_follow_a_declined_upgrade_with_a_body_are_requests_of_their_own() {
    for (protocol, origin) in [
        (AppProtocol::Http1, OriginServer::echo().await),
        (AppProtocol::Http2, http2::origin(http2::echo).await),
    ] {
        let fixture = fixture(protocol, &origin);
        for (framing, body) in [
            ("Content-Length: 2", "{}"),
            ("Transfer-Encoding: chunked", "2\r\n{}\r\n0\r\n\r\n"),
        ] {
            let mut client = HttpClient::connect(fixture.web).await;
            let head = format!(
                "POST /x HTTP/1.1\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n{framing}\r\n\r\n"
            );
            client
                .send(format!("{head}{body}GET /next HTTP/1.1\r\nHost: web\r\n\r\n").as_bytes())
                .await;
            let (first, next) = (
                client.answer().await.unwrap().text(),
                client.answer().await.unwrap().text(),
            );
            assert!(
                first.contains("/x") && first.ends_with("{}") && !first.contains("/next"),
                "{protocol:?} {framing}: {first}"
            );
            assert!(
                next.contains("/next") && !next.contains("{}"),
                "{protocol:?} {framing}: {next}"
            );
        }
    }
}

#[tokio::test]
async fn ambiguous_or_http10_upgrades_do_not_reach_endpoints() {
    let origin = OriginServer::echo().await;
    let fixture = fixture(AppProtocol::Http1, &origin);
    let both = "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
    let answer = HttpClient::once(
        fixture.web,
        &format!("POST / HTTP/1.1\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n{both}"),
    )
    .await;
    assert_eq!((answer.status, origin.requests()), (400, 0));
    let old = "POST / HTTP/1.0\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 2\r\n\r\n{}";
    let text = HttpClient::once(fixture.web, old)
        .await
        .text()
        .to_ascii_lowercase();
    assert!(text.ends_with("{}") && !text.contains("upgrade"), "{text}");
}
