//! HTTP/2 on either side, in its three pairings: bodies, trailers, streaming, resets and flow
//! control. Also the strictness of the translation.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use canal_gateway_engine::{GatewayLimits, GatewayTimeouts};
use canal_model::program::AppProtocol;
use h2::client::SendRequest;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, Request, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture};
use crate::http1::settled;
use crate::origin::{OriginServer, Peer, pattern};

/// Opens a client connection to the gateway; a task drives it.
pub(crate) async fn connect(fixture: &GatewayFixture) -> SendRequest<Bytes> {
    connect_to(fixture.web).await
}

/// Opens a client connection to an address of the gateway.
pub(crate) async fn connect_to(address: SocketAddr) -> SendRequest<Bytes> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (send, connection) = h2::client::Builder::new()
        .initial_window_size(1 << 20)
        .initial_connection_window_size(16 << 20)
        .handshake(stream)
        .await
        .unwrap();
    tokio::spawn(async move {
        let _ = connection.await;
    });
    send
}

fn request(method: &str, path: &str, fields: &[(&str, &str)]) -> Request<()> {
    let mut builder = Request::builder()
        .method(method)
        .uri(format!("http://web{path}"));
    for (name, value) in fields {
        builder = builder.header(*name, *value);
    }
    builder.body(()).unwrap()
}

/// Sends a request without a body on a new connection. Returns the status, the header lines and the
/// body of the response.
pub(crate) async fn exchange(
    fixture: &GatewayFixture,
    request: Request<()>,
) -> (u16, String, String) {
    let sender = connect(fixture).await.ready().await;
    let (response, _) = sender.unwrap().send_request(request, true).unwrap();
    let (parts, body) = response.await.unwrap().into_parts();
    let lines = parts
        .headers
        .iter()
        .map(|(name, value)| format!("{name}: {}\r\n", value.to_str().unwrap()))
        .collect();
    let body = read_all(body).await.unwrap().0;
    let body = String::from_utf8_lossy(&body).into_owned();
    (parts.status.as_u16(), lines, body)
}

/// Sends the data as the window permits.
pub(crate) async fn send_all(
    stream: &mut SendStream<Bytes>,
    mut data: Bytes,
    end: bool,
) -> Result<(), h2::Error> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let n = std::future::poll_fn(|cx| stream.poll_capacity(cx))
            .await
            .unwrap_or_else(|| Err(Reason::CANCEL.into()))?;
        stream.send_data(data.split_to(n.min(data.len())), end && data.is_empty())?;
    }
    Ok(())
}

/// Reads a body to its end.
pub(crate) async fn read_all(
    mut body: RecvStream,
) -> Result<(Vec<u8>, Option<HeaderMap>), h2::Error> {
    let mut all = Vec::new();
    while let Some(data) = body.data().await {
        let data = data?;
        all.extend_from_slice(&data);
        let _ = body.flow_control().release_capacity(data.len());
    }
    Ok((all, body.trailers().await?))
}

/// Starts an HTTP/2 endpoint that calls `serve` for each stream.
pub(crate) async fn origin<F, R>(serve: F) -> OriginServer
where
    F: Fn(Request<RecvStream>, h2::server::SendResponse<Bytes>) -> R
        + Clone
        + Send
        + Sync
        + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    OriginServer::each(move |peer: Peer| {
        let serve = serve.clone();
        async move {
            let mut connection = h2::server::handshake(peer.stream).await.unwrap();
            while let Some(Ok((request, respond))) = connection.accept().await {
                tokio::spawn(serve(request, respond));
            }
        }
    })
    .await
}

/// Responds with the request's fields as lines, then its body, then its trailers as trailers.
pub(crate) async fn echo(
    request: Request<RecvStream>,
    mut respond: h2::server::SendResponse<Bytes>,
) {
    let (parts, body) = request.into_parts();
    let Ok((data, trailers)) = read_all(body).await else {
        return;
    };
    let mut text = format!("{} {}\n", parts.method, parts.uri);
    for (name, value) in &parts.headers {
        text += &format!("{name}: {}\n", value.to_str().unwrap());
    }
    let response = Response::builder()
        .status(200)
        .header("x-from", "h2")
        .body(())
        .unwrap();
    let mut send = respond.send_response(response, false).unwrap();
    let all = [text.as_bytes(), b"\n", &data].concat();
    if send_all(&mut send, all.into(), trailers.is_none())
        .await
        .is_ok()
        && let Some(trailers) = trailers
    {
        let _ = send.send_trailers(trailers);
    }
}

fn setup(protocol: AppProtocol) -> EngineSetup {
    EngineSetup {
        protocol,
        ..EngineSetup::default()
    }
}

#[tokio::test]
async fn all_pairings_carry_heads_bodies_and_trailers() {
    let (one, two) = (OriginServer::echo().await, origin(echo).await);
    for (protocol, upstream) in [
        (AppProtocol::Http1, one.address),
        (AppProtocol::Http2, two.address),
    ] {
        let fixture = GatewayFixture::new(setup(protocol), &[upstream]);
        // More than HTTP/2's first window of 65,535 bytes, so that the gateway must also pass
        // window updates.
        let data = pattern(0, 300_000);
        // These requests come from an HTTP/2 client.
        let client = connect(&fixture).await;
        let fields = [
            ("te", "trailers"),
            ("cookie", "a=1"),
            ("cookie", "b=2"),
            ("x-keep", "yes"),
        ];
        let (response, mut send) = client
            .ready()
            .await
            .unwrap()
            .send_request(request("POST", "/p?q=1", &fields), false)
            .unwrap();
        send_all(&mut send, Bytes::from(data.clone()), false)
            .await
            .unwrap();
        send.send_trailers(
            [("x-sum".parse().unwrap(), "7".parse().unwrap())]
                .into_iter()
                .collect(),
        )
        .unwrap();
        let response = response.await.unwrap();
        assert_eq!(response.status(), 200);
        let (body, _) = read_all(response.into_body()).await.unwrap();
        let head = String::from_utf8_lossy(&body[..body.len() - data.len()]).into_owned();
        assert!(body.ends_with(&data), "{protocol:?}");
        for field in [
            "x-keep: yes",
            "x-forwarded-for: 127.0.0.1",
            "x-request-id: ",
            "te: trailers",
        ] {
            assert!(
                head.contains(field),
                "{protocol:?}: {field:?} not in {head}"
            );
        }
        // An HTTP/1.1 endpoint gets one `Cookie` line; HTTP/2 may keep them apart (RFC 9113
        // section 8.2.3).
        if protocol == AppProtocol::Http1 {
            assert!(
                head.starts_with("POST /p?q=1 HTTP/1.1\r\nhost: web\r\n")
                    && head.contains("cookie: a=1; b=2\r\n"),
                "{head}"
            );
            assert!(head.contains("transfer-encoding: chunked"), "{head}");
        } else {
            assert!(head.starts_with("POST http://web/p?q=1\n"), "{head}");
        }
        // These requests come from an HTTP/1.1 client.
        let mut client = HttpClient::connect(fixture.web).await;
        // The second request shows that the first left the client's connection at a message
        // boundary.
        for _ in 0..2 {
            client
                .send(
                    format!(
                        "POST /p HTTP/1.1\r\nHost: web\r\nContent-Length: {}\r\n\r\n",
                        data.len()
                    )
                    .as_bytes(),
                )
                .await;
            client.send(&data).await;
            let answer = client.answer().await.unwrap();
            assert!(
                answer.status == 200 && answer.body.ends_with(&data),
                "{protocol:?}: {}",
                answer.head
            );
        }
    }
    // Three requests of two clients reached it.
    assert_eq!(two.connections(), 1, "streams share a connection");
}

#[tokio::test]
async fn chunked_requests_and_trailers_reach_http2_and_come_back() {
    let two = origin(echo).await;
    let fixture = GatewayFixture::new(setup(AppProtocol::Grpc), &[two.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client
        .send(b"POST / HTTP/1.1\r\nHost: web\r\nTE: trailers\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx-sum: 9\r\n\r\n")
        .await;
    let answer = client.answer().await.unwrap();
    assert!(answer.text().ends_with("\n\nabc"), "{}", answer.text());
    assert_eq!(answer.trailers, ["x-sum: 9"]);
}

#[tokio::test]
async fn expectations_are_met_before_http2() {
    let two = origin(echo).await;
    let fixture = GatewayFixture::new(setup(AppProtocol::Http2), &[two.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client
        .send(b"POST / HTTP/1.1\r\nHost: web\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        .await;
    assert_eq!(client.answer().await.unwrap().status, 100);
    client.send(b"abc").await;
    let text = client.answer().await.unwrap().text();
    assert!(text.ends_with("abc") && !text.contains("expect"), "{text}");
}

#[tokio::test]
async fn grpc_streams_both_ways_at_once_and_ends_with_its_status() {
    // The origin responds to each message as it arrives, then sends trailers.
    let two = origin(
        |request: Request<RecvStream>, mut respond: h2::server::SendResponse<Bytes>| async move {
            assert_eq!(request.headers()["grpc-timeout"], "5S");
            let response = Response::builder()
                .header("content-type", "application/grpc")
                .body(())
                .unwrap();
            let mut send = respond.send_response(response, false).unwrap();
            let mut body = request.into_body();
            while let Some(Ok(data)) = body.data().await {
                body.flow_control().release_capacity(data.len()).unwrap();
                send_all(&mut send, data, false).await.unwrap();
            }
            send.send_trailers(
                [("grpc-status".parse().unwrap(), "5".parse().unwrap())]
                    .into_iter()
                    .collect(),
            )
            .unwrap();
        },
    )
    .await;
    let fixture = GatewayFixture::new(setup(AppProtocol::Grpc), &[two.address]);
    let client = connect(&fixture).await;
    let fields = [
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("grpc-timeout", "5S"),
    ];
    let (response, mut send) = client
        .ready()
        .await
        .unwrap()
        .send_request(request("POST", "/s/M", &fields), false)
        .unwrap();
    let mut body = response.await.unwrap().into_body();
    // Each message waits for its echo, so a gateway that buffered a direction would block the
    // first round.
    for n in 0..50u8 {
        send.send_data(Bytes::from(vec![n; 100]), false).unwrap();
        let mut got = Vec::new();
        while got.len() < 100 {
            let data = body.data().await.unwrap().unwrap();
            body.flow_control().release_capacity(data.len()).unwrap();
            got.extend_from_slice(&data);
        }
        assert_eq!(got, vec![n; 100]);
    }
    send.send_data(Bytes::new(), true).unwrap();
    let (rest, trailers) = read_all(body).await.unwrap();
    assert!(rest.is_empty());
    assert_eq!(trailers.unwrap()["grpc-status"], "5");
    fixture
        .until(
            "istio_requests_total",
            &["grpc_response_status=\"5\"", "request_protocol=\"grpc\""],
            1.0,
        )
        .await;
}

#[tokio::test]
async fn resets_are_carried_both_ways() {
    let (tx, mut rx) = tokio::sync::mpsc::channel(4); // One message is sent.
    let (has_head, has_request) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (reset_now, arrived) = (has_head.clone(), has_request.clone());
    let two = origin(
        move |request: Request<RecvStream>, mut respond: h2::server::SendResponse<Bytes>| {
            let (tx, reset_now, arrived) = (tx.clone(), reset_now.clone(), arrived.clone());
            async move {
                // For this path the endpoint resets once the client has the head; for others the
                // client does.
                if request.uri().path() == "/mine" {
                    let response = Response::builder().body(()).unwrap();
                    let mut send = respond.send_response(response, false).unwrap();
                    send.send_data(Bytes::from_static(b"some"), false).unwrap();
                    reset_now.notified().await;
                    send.send_reset(Reason::ENHANCE_YOUR_CALM);
                } else {
                    arrived.notify_one();
                    let reason = std::future::poll_fn(|cx| respond.poll_reset(cx)).await;
                    tx.send(reason.unwrap()).await.unwrap();
                }
            }
        },
    )
    .await;
    let fixture = GatewayFixture::new(setup(AppProtocol::Http2), &[two.address]);
    let client = connect(&fixture).await;
    let (response, _send) = client
        .clone()
        .ready()
        .await
        .unwrap()
        .send_request(request("GET", "/mine", &[]), true)
        .unwrap();
    let body = response.await.unwrap().into_body();
    has_head.notify_one();
    assert_eq!(
        read_all(body).await.unwrap_err().reason(),
        Some(Reason::ENHANCE_YOUR_CALM)
    );
    let (response, mut send) = client
        .ready()
        .await
        .unwrap()
        .send_request(request("GET", "/theirs", &[]), true)
        .unwrap();
    has_request.notified().await;
    send.send_reset(Reason::CANCEL);
    drop(response);
    let reason = tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), rx.recv())
        .await
        .unwrap()
        .unwrap();
    // The endpoint sees the reason of the client, not one of the gateway.
    assert_eq!(reason, Reason::CANCEL);
    // DC is Envoy's flag for a client that ended the request.
    fixture
        .until("istio_requests_total", &["response_flags=\"DC\""], 1.0)
        .await;
}

#[tokio::test]
async fn a_stream_that_is_not_read_stops_its_upstream_and_no_other_stream() {
    let sent = Arc::new(AtomicU64::new(0));
    let counted = sent.clone();
    let two = origin(
        move |request: Request<RecvStream>, mut respond: h2::server::SendResponse<Bytes>| {
            let sent = counted.clone();
            async move {
                let mut send = respond.send_response(Response::new(()), false).unwrap();
                if request.uri().path() == "/small" {
                    return send.send_data(Bytes::from_static(b"ok"), true).unwrap();
                }
                // One byte more than a stream's first window, so that each send uses it up.
                let part = Bytes::from(pattern(0, 64 << 10));
                while send_all(&mut send, part.clone(), false).await.is_ok() {
                    sent.fetch_add(part.len() as u64, Ordering::SeqCst);
                }
            }
        },
    )
    .await;
    let fixture = GatewayFixture::new(setup(AppProtocol::Http2), &[two.address]);
    let client = connect(&fixture).await;
    let (response, _held) = client
        .clone()
        .ready()
        .await
        .unwrap()
        .send_request(request("GET", "/big", &[]), true)
        .unwrap();
    let _unread = response.await.unwrap();
    let held = settled(&sent).await;
    // 8 MiB exceed what the windows and socket buffers of both connections take.
    assert!(held < 8 << 20, "{held}");
    // More than one, because the first might still find room in the connection's window.
    for _ in 0..10 {
        let (response, _) = client
            .clone()
            .ready()
            .await
            .unwrap()
            .send_request(request("GET", "/small", &[]), true)
            .unwrap();
        assert_eq!(
            read_all(response.await.unwrap().into_body())
                .await
                .unwrap()
                .0,
            b"ok"
        );
    }
}

#[tokio::test]
async fn refused_streams_are_sent_again_and_goaway_moves_to_a_new_connection() {
    // Each connection serves two streams: it refuses the first, responds to the second, then sends
    // GOAWAY.
    let two = OriginServer::each(|peer: Peer| async move {
        let mut connection = h2::server::handshake(peer.stream).await.unwrap();
        let mut count = 0;
        while let Some(Ok((_, mut respond))) = connection.accept().await {
            count += 1;
            if count == 1 {
                respond.send_reset(Reason::REFUSED_STREAM);
                continue;
            }
            respond.send_response(Response::new(()), true).unwrap();
            connection.graceful_shutdown();
        }
    })
    .await;
    let fixture = GatewayFixture::new(setup(AppProtocol::Http2), &[two.address]);
    let client = connect(&fixture).await;
    for n in 0..6 {
        let (response, _) = client
            .clone()
            .ready()
            .await
            .unwrap()
            .send_request(request("POST", "/", &[]), true)
            .unwrap();
        assert_eq!(response.await.unwrap().status(), 200, "request {n}");
    }
    assert!(two.connections() >= 6);
    assert!(fixture.metric("canal_gateway_retries_total", &["upstream_refused"]) >= 6.0);
}

#[tokio::test]
async fn requests_that_http1_could_misread_are_refused() {
    let one = OriginServer::echo().await;
    let fixture = GatewayFixture::new(setup(AppProtocol::Http1), &[one.address]);
    let client = connect(&fixture).await;
    /// One case: method, fields, status, and reason, which is empty if the request is forwarded.
    type Case = (
        &'static str,
        &'static [(&'static str, &'static str)],
        u16,
        &'static str,
    );
    let cases: &[Case] = &[
        ("CONNECT", &[], 405, "method_not_served"),
        ("GET", &[("host", "other")], 400, "h2_host_mismatch"),
        (
            "GET",
            &[("host", "web"), ("host", "web")],
            400,
            "h2_duplicate_host",
        ),
        // A field value may have bytes beyond ASCII (RFC 9110 §5.5).
        ("GET", &[("x-a", "b\u{e9}")], 200, ""),
    ];
    for (method, fields, status, reason) in cases {
        let request = request(method, "/x", fields);
        let (response, _) = client
            .clone()
            .ready()
            .await
            .unwrap()
            .send_request(request, true)
            .unwrap();
        assert_eq!(
            response.await.unwrap().status(),
            *status,
            "{method} {fields:?}"
        );
        if !reason.is_empty() {
            assert_eq!(
                fixture.metric("canal_gateway_refused_requests_total", &[reason]),
                1.0,
                "{reason}"
            );
        }
    }
    // Connection-specific fields are a stream error (RFC 9113 §8.2.2), whatever the client's
    // library permits.
    for (name, value) in [
        ("connection", "close"),
        ("transfer-encoding", "chunked"),
        ("te", "gzip"),
        ("upgrade", "x"),
        ("proxy-connection", "x"),
    ] {
        let error = raw_request(&fixture, name, value).await;
        assert_eq!(error, Some(Reason::PROTOCOL_ERROR), "{name}");
    }
    // Only the request with status 200 reached the endpoint.
    assert_eq!(one.requests(), 1);
}

/// Sends a hand-made HEADERS frame with one more field. Returns the error code of the RST_STREAM in
/// response.
async fn raw_request(fixture: &GatewayFixture, name: &str, value: &str) -> Option<Reason> {
    let mut stream = TcpStream::connect(fixture.web).await.unwrap();
    let mut block = vec![0x82, 0x84, 0x86, 0x01, 3];
    block.extend_from_slice(b"web");
    block.push(0);
    for text in [name, value] {
        block.push(text.len() as u8);
        block.extend_from_slice(text.as_bytes());
    }
    let mut bytes = PREFACE.to_vec();
    bytes.extend_from_slice(&[0, 0, block.len() as u8, 1, 0x5, 0, 0, 0, 1]);
    bytes.extend_from_slice(&block);
    stream.write_all(&bytes).await.unwrap();
    loop {
        let mut head = [0u8; 9];
        stream.read_exact(&mut head).await.ok()?;
        let mut payload = vec![0u8; usize::from(head[1]) << 8 | usize::from(head[2])];
        stream.read_exact(&mut payload).await.ok()?;
        if head[3] == 3 {
            return Some(u32::from_be_bytes(payload[..4].try_into().unwrap()).into());
        }
    }
}

#[tokio::test]
async fn errors_are_reported_in_the_clients_protocol() {
    let fixture = GatewayFixture::new(setup(AppProtocol::Grpc), &[]);
    let client = connect(&fixture).await;
    let (response, _) = client
        .clone()
        .ready()
        .await
        .unwrap()
        .send_request(
            request("POST", "/", &[("content-type", "application/grpc")]),
            true,
        )
        .unwrap();
    let response = response.await.unwrap();
    assert_eq!(
        (
            response.status().as_u16(),
            &response.headers()["grpc-status"]
        ),
        (200, &http::HeaderValue::from_static("14"))
    );
    let (response, _) = client
        .ready()
        .await
        .unwrap()
        .send_request(request("GET", "/", &[]), true)
        .unwrap();
    let response = response.await.unwrap();
    assert_eq!(
        (
            response.status().as_u16(),
            &response.headers()["retry-after"]
        ),
        (503, &http::HeaderValue::from_static("1"))
    );
}

#[tokio::test]
async fn floods_end_the_connection_and_are_counted() {
    let one = OriginServer::echo().await;
    let limits = GatewayLimits {
        // Few, so that a client that ignores the limit exceeds it at once.
        streams: 10,
        ..GatewayLimits::default()
    };
    let fixture = GatewayFixture::new(
        EngineSetup {
            limits,
            ..setup(AppProtocol::Http1)
        },
        &[one.address],
    );
    // Rapid reset: pairs of HEADERS and RST_STREAM, faster than a server can process them.
    let mut stream = TcpStream::connect(fixture.web).await.unwrap();
    let mut bytes = PREFACE.to_vec();
    // Far more than the 20 resets that may wait to be accepted (`RAPID_RESETS_MAX`).
    for n in 0..2000u32 {
        let id = (2 * n + 1).to_be_bytes();
        // A frame begins with length, type, flags and stream ID. HEADERS has GET, `/` and `http` of
        // HPACK's static table, and the authority `web`. RST_STREAM has the code CANCEL.
        bytes.extend_from_slice(&[0, 0, 8, 1, 0x5]);
        bytes.extend_from_slice(&id);
        bytes.extend_from_slice(&[0x82, 0x84, 0x86, 0x01, 3, b'w', b'e', b'b']);
        bytes.extend_from_slice(&[0, 0, 4, 3, 0]);
        bytes.extend_from_slice(&id);
        bytes.extend_from_slice(&8u32.to_be_bytes());
    }
    // The gateway may close the connection before it has read all.
    let _ = stream.write_all(&bytes).await;
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all).await;
    fixture
        .until(
            "canal_gateway_http2_errors_total",
            &["enhance_your_calm", "side=\"client\""],
            1.0,
        )
        .await;
    // Until the limit is met, some requests pass before their RST_STREAM is read. Nobody measured
    // how many; 200 are a tenth of the flood.
    assert!(
        one.requests() < 200,
        "{} requests of a flood reached the endpoint",
        one.requests()
    );
    // CONTINUATION flood: a header block that never ends.
    let mut stream = TcpStream::connect(fixture.web).await.unwrap();
    let mut bytes = PREFACE.to_vec();
    bytes.extend_from_slice(&[
        0, 0, 8, 1, 0x1, 0, 0, 0, 1, 0x82, 0x84, 0x86, 0x01, 3, b'w', b'e', b'b',
    ]);
    stream.write_all(&bytes).await.unwrap();
    // A CONTINUATION of 16 KiB: fields `a` with a value of 120 bytes each, and no END_HEADERS.
    let mut frame = vec![0, 0x40, 0, 9, 0, 0, 0, 0, 1];
    while frame.len() < 9 + 0x4000 {
        frame.extend_from_slice(&[0, 1, b'a', 120]);
        frame.extend_from_slice(&[b'x'; 120]);
    }
    frame.truncate(9 + 0x4000);
    let flood = async {
        // 16 MB are far more than a request head may have.
        for _ in 0..1000 {
            if stream.write_all(&frame).await.is_err() {
                return;
            }
        }
        panic!("16 MB of CONTINUATION were taken");
    };
    tokio::time::timeout(canal_timing::deadline(Duration::from_secs(20)), flood)
        .await
        .unwrap();
}

/// The client's connection preface, with an empty SETTINGS frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

#[tokio::test]
async fn control_frames_are_not_read_while_replies_are_not_read() {
    let one = OriginServer::echo().await;
    let fixture = GatewayFixture::new(setup(AppProtocol::Http1), &[one.address]);
    let ping = [&[0, 0, 8, 6, 0, 0, 0, 0, 0][..], &[7; 8]].concat();
    let settings = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
    for frame in [ping, settings] {
        let mut stream = TcpStream::connect(fixture.web).await.unwrap();
        stream.write_all(PREFACE).await.unwrap();
        let (sent, flood) = (Arc::new(AtomicU64::new(0)), frame.repeat(4000));
        let counted = sent.clone();
        let task = tokio::spawn(async move {
            while stream.write_all(&flood).await.is_ok() {
                counted.fetch_add(flood.len() as u64, Ordering::SeqCst);
            }
        });
        // The gateway stops reading or ends the connection; it never buffers more than socket
        // buffers do.
        let held = settled(&sent).await;
        assert!(held < 32 << 20, "{held}");
        task.abort();
    }
    assert_eq!(HttpClient::get(fixture.web, "/").await.status, 200);
}

#[tokio::test]
async fn streams_that_force_resets_end_the_connection() {
    // "MadeYouReset": each stream is reset because of the client's own error, here a window
    // overflow.
    // No response ends a stream, so that only the window overflow resets it.
    let one = OriginServer::each(|mut peer: Peer| async move {
        peer.request().await;
        std::future::pending::<()>().await;
    })
    .await;
    let fixture = GatewayFixture::new(setup(AppProtocol::Http1), &[one.address]);
    let mut stream = TcpStream::connect(fixture.web).await.unwrap();
    stream.write_all(PREFACE).await.unwrap();
    let (mut read, mut write) = stream.into_split();
    let reading = tokio::spawn(async move {
        let mut all = Vec::new();
        // The connection may end with a reset, too.
        let _ = read.read_to_end(&mut all).await;
    });
    // Far more than the 256 resets that a client may cause (`ERROR_RESETS_MAX`).
    for n in 0..2000u32 {
        let id = (2 * n + 1).to_be_bytes();
        let mut bytes = vec![0, 0, 8, 1, 0x5];
        bytes.extend_from_slice(&id);
        // HEADERS as in the flood above, then a WINDOW_UPDATE by the maximum, which overflows the
        // window.
        bytes.extend_from_slice(&[0x82, 0x84, 0x86, 0x01, 3, b'w', b'e', b'b', 0, 0, 4, 8, 0]);
        bytes.extend_from_slice(&id);
        bytes.extend_from_slice(&0x7fff_ffffu32.to_be_bytes());
        if write.write_all(&bytes).await.is_err() {
            break;
        }
        // The gateway resets streams as it reads them; the pauses let it keep up with the writes.
        if n % 20 == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    tokio::time::timeout(canal_timing::deadline(Duration::from_secs(10)), reading)
        .await
        .expect("the connection ends")
        .unwrap();
    fixture
        .until(
            "canal_gateway_http2_errors_total",
            &["enhance_your_calm", "side=\"client\""],
            1.0,
        )
        .await;
}

#[tokio::test]
async fn both_versions_share_a_port_and_others_are_refused() {
    let one = OriginServer::echo().await;
    let fixture = GatewayFixture::new(setup(AppProtocol::Http2), &[one.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(b"INVALID CONNECTION PREFACE\r\n\r\n").await;
    assert!(client.closed().await, "an orderly close");
    fixture
        .until(
            "canal_gateway_refused_connections_total",
            &["not_http"],
            1.0,
        )
        .await;
    let fixture = GatewayFixture::new(setup(AppProtocol::Http1), &[one.address]);
    assert_eq!(HttpClient::get(fixture.web, "/").await.status, 200);
    let (response, _) = connect(&fixture)
        .await
        .ready()
        .await
        .unwrap()
        .send_request(request("HEAD", "/", &[]), true)
        .unwrap();
    assert_eq!(response.await.unwrap().status(), 200);
}

/// The content type alone used to extend a client's timeouts to an hour.
#[tokio::test]
async fn grpc_content_type_lifts_timeouts_only_where_grpc_is_declared() {
    let silent = origin(|request: Request<RecvStream>, _respond| async move {
        // The gateway resets the request after its timeout.
        let _ = read_all(request.into_body()).await;
        std::future::pending::<()>().await;
    })
    .await;
    // gRPC status 4 is DEADLINE_EXCEEDED; `None` stands for no response.
    for (protocol, want) in [(AppProtocol::Http2, Some("4")), (AppProtocol::Grpc, None)] {
        let stall = Duration::from_millis(300) * canal_timing::slack();
        let times = GatewayTimeouts {
            client: stall,
            ..GatewayTimeouts::default()
        };
        let fixture = GatewayFixture::new(
            EngineSetup {
                times,
                ..setup(protocol)
            },
            &[silent.address],
        );
        let ask = request("POST", "/s/M", &[("content-type", "application/grpc")]);
        let (response, _send) = connect(&fixture)
            .await
            .ready()
            .await
            .unwrap()
            .send_request(ask, false)
            .unwrap();
        // The absence of a response is only shown by a wait that is longer than the timeout.
        let quiet = Duration::from_secs(2);
        let wait = if want.is_some() {
            canal_timing::deadline(quiet)
        } else {
            quiet.max(stall * 2)
        };
        let answered = tokio::time::timeout(wait, response)
            .await
            .ok()
            .map(Result::unwrap);
        assert_eq!(
            answered
                .as_ref()
                .map(|answer| answer.headers()["grpc-status"].to_str().unwrap()),
            want,
            "{protocol:?}"
        );
        assert_eq!(
            fixture.metric("canal_gateway_timeouts_total", &["what=\"client_stalled\""]),
            f64::from(u8::from(want.is_some()))
        );
    }
}
