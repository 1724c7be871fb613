//! Timeouts that rules ask for, at each stage of a request and in both HTTP versions. Endpoints hold
//! what they have until the test ends, so that only the rule's time can end a request.

use std::net::SocketAddr;
use std::time::Duration;

use canal_gateway_engine::GatewayTimeouts;
use canal_model::program::{AppProtocol, Resource, RouteAction};
use canal_model::route_attempts::{AttemptPolicy, RetryPolicy, RouteTimeouts, TimeoutSpan};
use http::Request;
use tokio::net::{TcpSocket, TcpStream};

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, LOCALHOST, prefix, route, to};
use crate::http2;
use crate::origin::OriginServer;

/// Every request that waits at all exceeds it.
const SHORT: Duration = Duration::from_millis(1);

/// Starts a gateway whose only rule has these timeouts and retries.
pub(crate) fn fixture(
    setup: EngineSetup,
    endpoints: &[SocketAddr],
    timeouts: RouteTimeouts,
    retries: Option<RetryPolicy>,
) -> GatewayFixture {
    let fixture = GatewayFixture::new(setup, endpoints);
    let split = RouteAction::Split(vec![to("web", &[], 1)]);
    let mut rule = route("web", "all", 0, prefix("/"), split);
    if let Resource::Route(rule) = &mut rule {
        rule.attempts = Some(Box::new(AttemptPolicy { timeouts, retries }));
    }
    fixture.apply(vec![rule]);
    fixture
}

pub(crate) fn speaking(protocol: AppProtocol) -> EngineSetup {
    EngineSetup {
        protocol,
        ..EngineSetup::default()
    }
}

fn request_timeout(time: Duration) -> RouteTimeouts {
    RouteTimeouts {
        request: Some(time),
        ..RouteTimeouts::default()
    }
}

/// Sends a GET over HTTP/2; returns the status and the headers.
async fn get_http2(fixture: &GatewayFixture, grpc: bool) -> http::response::Parts {
    let mut request = Request::builder().method("POST").uri("http://web/");
    if grpc {
        request = request.header("content-type", "application/grpc");
    }
    let mut sender = http2::connect(fixture).await.ready().await.unwrap();
    let (response, _) = sender
        .send_request(request.body(()).unwrap(), true)
        .unwrap();
    response.await.unwrap().into_parts().0
}

/// Checks that every request over each version gets 504, by the route's time.
async fn check_504(fixture: &GatewayFixture) {
    let response = HttpClient::get(fixture.web, "/").await;
    assert_eq!(response.status, 504);
    assert_eq!(response.text(), "the service did not answer in time\n");
    assert_eq!(get_http2(fixture, false).await.status, 504);
    let grpc = get_http2(fixture, true).await;
    assert_eq!(
        (grpc.status.as_u16(), &grpc.headers["grpc-status"]),
        (200, &http::HeaderValue::from_static("4")),
        "a gRPC client gets DEADLINE_EXCEEDED"
    );
    let count = |name: &str, label: &str| fixture.metric(name, &[label]);
    let refused = "canal_gateway_refused_requests_total";
    assert_eq!(count(refused, "reason=\"route_timeout\""), 3.0);
    let timeouts = "canal_gateway_timeouts_total";
    assert_eq!(count(timeouts, "what=\"route_request\""), 3.0);
}

/// Returns an address at which no connection is accepted or refused: the queue of its listener is
/// full. The sockets keep it so.
async fn silent_address() -> (SocketAddr, tokio::net::TcpListener, Vec<TcpStream>) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(LOCALHOST).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut queued = Vec::new();
    // Linux queues one more than asked for.
    for _ in 0..2 {
        queued.push(TcpStream::connect(address).await.unwrap());
    }
    (address, listener, queued)
}

#[tokio::test]
async fn a_connection_that_never_completes_is_not_waited_for() {
    for protocol in [AppProtocol::Http1, AppProtocol::Http2] {
        for span in [TimeoutSpan::Whole, TimeoutSpan::AfterRequest] {
            let (address, _listener, _queued) = silent_address().await;
            let timeouts = RouteTimeouts {
                span,
                ..request_timeout(SHORT)
            };
            check_504(&fixture(speaking(protocol), &[address], timeouts, None)).await;
        }
    }
}

#[tokio::test]
async fn a_response_that_never_begins_is_not_waited_for() {
    let (one, _release) = OriginServer::gated().await;
    let two = http2::origin(|_, respond| async move {
        std::future::pending::<()>().await;
        drop(respond);
    })
    .await;
    for (origin, protocol) in [(one, AppProtocol::Http1), (two, AppProtocol::Http2)] {
        for span in [TimeoutSpan::Whole, TimeoutSpan::AfterRequest] {
            let timeouts = RouteTimeouts {
                span,
                ..request_timeout(SHORT)
            };
            let endpoints = [origin.address];
            check_504(&fixture(speaking(protocol), &endpoints, timeouts, None)).await;
        }
    }
}

#[tokio::test]
async fn a_time_of_an_attempt_ends_the_request_if_nothing_is_retried() {
    let (origin, _release) = OriginServer::gated().await;
    let timeouts = RouteTimeouts {
        attempt: Some(SHORT),
        ..RouteTimeouts::default()
    };
    let fixture = fixture(EngineSetup::default(), &[origin.address], timeouts, None);
    assert_eq!(HttpClient::get(fixture.web, "/").await.status, 504);
    let reason = ["reason=\"attempt_timeout\""];
    assert_eq!(
        fixture.metric("canal_gateway_refused_requests_total", &reason),
        1.0
    );
}

/// Each stage has a counter of its own. All have the flag of late upstreams, and none is counted as
/// another one.
#[tokio::test]
async fn each_stage_at_the_upstream_has_its_counter_and_flag() {
    let (gated, _release) = OriginServer::gated().await;
    let (silent, _listener, _queued) = silent_address().await;
    let attempt = RouteTimeouts {
        attempt: Some(SHORT),
        ..RouteTimeouts::default()
    };
    let none = RouteTimeouts::default();
    for (stage, address, timeouts, what) in [
        ("connect", silent, request_timeout(SHORT), "route_request"),
        ("connect of an attempt", silent, attempt, "route_attempt"),
        (
            "whole",
            gated.address,
            request_timeout(SHORT),
            "route_request",
        ),
        ("try", gated.address, attempt, "route_attempt"),
        ("first byte", gated.address, none, "upstream_stalled"),
    ] {
        let setup = EngineSetup {
            times: GatewayTimeouts {
                // A rule's own time is shorter than this in the other cases.
                upstream: match what {
                    "upstream_stalled" => SHORT,
                    _ => GatewayTimeouts::default().upstream,
                },
                ..GatewayTimeouts::default()
            },
            ..EngineSetup::default()
        };
        let fixture = fixture(setup, &[address], timeouts, None);
        assert_eq!(
            HttpClient::get(fixture.web, "/").await.status,
            504,
            "{stage}"
        );
        let label = format!("what=\"{what}\"");
        let count = |labels: &[&str]| fixture.metric("canal_gateway_timeouts_total", labels);
        assert_eq!((count(&[&label]), count(&[])), (1.0, 1.0), "{stage}");
        let labels = ["response_code=\"504\"", "response_flags=\"UT\""];
        fixture.until("istio_requests_total", &labels, 1.0).await;
    }
}

/// An endpoint that sends a head and a part of the body, and then nothing.
async fn stalling() -> OriginServer {
    OriginServer::each(|mut peer| async move {
        while peer.request().await.is_some() {
            peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
                .await;
        }
    })
    .await
}

/// The time may pass before the head of the response arrives; such requests are made again.
#[tokio::test]
async fn a_response_that_stalls_is_broken_off() {
    let origin = stalling().await;
    let timeouts = request_timeout(Duration::from_millis(500));
    let fixture = fixture(EngineSetup::default(), &[origin.address], timeouts, None);
    loop {
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        if client.line().await.contains(" 504 ") {
            continue;
        }
        // The connection ends inside the body.
        while client.more().await {}
        assert!(client.buffer.ends_with(b"half"));
        break;
    }
    loop {
        let mut sender = http2::connect(&fixture).await.ready().await.unwrap();
        let request = Request::get("http://web/").body(()).unwrap();
        let (response, _) = sender.send_request(request, true).unwrap();
        let response = response.await.unwrap();
        if response.status() == 504 {
            continue;
        }
        let ended = http2::read_all(response.into_body()).await;
        assert!(ended.is_err_and(|e| e.is_reset()), "the stream is reset");
        break;
    }
}

#[tokio::test]
async fn istios_times_begin_when_the_request_is_complete() {
    let origin = OriginServer::each(|mut peer| async move {
        let head = peer.head().await;
        let body = peer.exactly(3).await;
        assert!(head.is_some() && body.is_some());
        std::future::pending::<()>().await;
    })
    .await;
    let timeouts = RouteTimeouts {
        request: Some(SHORT),
        attempt: None,
        span: TimeoutSpan::AfterRequest,
    };
    let fixture = fixture(EngineSetup::default(), &[origin.address], timeouts, None);
    let mut client = HttpClient::connect(fixture.web).await;
    let head = b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 3\r\n\r\nab";
    client.send(head).await;
    crate::fixture::until("the endpoint reads the head", || origin.requests() == 1).await;
    let what = ["what=\"route_request\""];
    assert_eq!(fixture.metric("canal_gateway_timeouts_total", &what), 0.0);
    client.send(b"c").await;
    assert_eq!(client.answer().await.unwrap().status, 504);
    assert_eq!(fixture.metric("canal_gateway_timeouts_total", &what), 1.0);
}

/// Gateway API's time begins with the head, so a body that never ends does not extend it.
#[tokio::test]
async fn gateway_apis_times_begin_with_the_request() {
    let (origin, _release) = OriginServer::gated().await;
    let endpoints = [origin.address];
    let timeouts = request_timeout(SHORT);
    let fixture = fixture(EngineSetup::default(), &endpoints, timeouts, None);
    let mut client = HttpClient::connect(fixture.web).await;
    let head = b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 3\r\n\r\nab";
    client.send(head).await;
    assert_eq!(client.answer().await.unwrap().status, 504);
}

/// A connection that was upgraded is no request any more.
#[tokio::test]
async fn an_upgraded_connection_outlives_the_rules_times() {
    let origin = OriginServer::each(|mut peer| async move {
        while peer.head().await.is_some() {
            peer.write(
                b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
            )
            .await;
            while let Some(byte) = peer.exactly(1).await {
                peer.write(&byte).await;
            }
        }
    })
    .await;
    let time = Duration::from_millis(300);
    let timeouts = request_timeout(time);
    let fixture = fixture(EngineSetup::default(), &[origin.address], timeouts, None);
    let request = b"GET / HTTP/1.1\r\nHost: web\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n";
    loop {
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(request).await;
        if client.answer().await.unwrap().status != 101 {
            continue;
        }
        // A request that is not upgraded shows that the time has passed since.
        let began = std::time::Instant::now();
        while began.elapsed() < time {
            client.send(b"a").await;
            assert_eq!(client.exactly(1).await, b"a");
        }
        client.send(b"b").await;
        assert_eq!(client.exactly(1).await, b"b");
        break;
    }
}
