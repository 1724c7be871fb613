//! Faults that rules inject, in every pairing of HTTP versions: delays, aborts, and the tenant's share
//! of delayed requests.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use canal_model::authorization::{Attribute, AuthorizationAction};
use canal_model::program::{AppProtocol, Resource, RouteAction};
use canal_model::request_fraction::RequestFraction;
use canal_model::route_attempts::{AttemptPolicy, RouteTimeouts, TimeoutSpan};
use canal_model::route_faults::{AbortStatus, FaultAbort, FaultDelay, FaultPolicy};
use canal_model::share::{Share, ShareKind};
use http::Request;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, TENANT, prefix, route, tenant, to, until};
use crate::http2;
use crate::origin::OriginServer;
use crate::policies::{clause, policy, rule};

const DELAYS: &str = "canal_gateway_fault_delays_total";
const DELAYED: [&str; 1] = ["result=\"delayed\""];
const OVERFLOW: [&str; 1] = ["result=\"overflow\""];
/// Longer than any test waits.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

fn delay(time: Duration) -> Option<FaultDelay> {
    let fraction = RequestFraction::ALL;
    Some(FaultDelay { time, fraction })
}

fn abort(status: AbortStatus) -> Option<FaultAbort> {
    let fraction = RequestFraction::ALL;
    Some(FaultAbort { status, fraction })
}

/// Starts a gateway whose only rule injects these faults.
fn fixture(setup: EngineSetup, endpoints: &[SocketAddr], faults: FaultPolicy) -> GatewayFixture {
    let fixture = GatewayFixture::new(setup, endpoints);
    fixture.apply(vec![faulty_route(faults)]);
    fixture
}

fn faulty_route(faults: FaultPolicy) -> Resource {
    let split = RouteAction::Split(vec![to("web", &[], 1)]);
    let mut rule = route("web", "all", 0, prefix("/"), split);
    if let Resource::Route(rule) = &mut rule {
        rule.faults = Some(Box::new(faults));
    }
    rule
}

fn speaking(protocol: AppProtocol) -> EngineSetup {
    EngineSetup {
        protocol,
        ..EngineSetup::default()
    }
}

/// Sends a POST over HTTP/2; returns the status, the header lines and the body.
async fn post_http2(fixture: &GatewayFixture, grpc: bool) -> (u16, String, String) {
    let mut request = Request::builder().method("POST").uri("http://web/");
    if grpc {
        request = request.header("content-type", "application/grpc");
    }
    http2::exchange(fixture, request.body(()).unwrap()).await
}

#[tokio::test]
async fn aborts_answer_in_place_of_endpoints_as_envoy_does() {
    let (one, two) = (OriginServer::echo().await, http2::origin(http2::echo).await);
    for (origin, protocol) in [(&one, AppProtocol::Http1), (&two, AppProtocol::Http2)] {
        for (status, http, grpc) in [
            (AbortStatus::Http(503), 503, "14"),
            (AbortStatus::Http(418), 418, "2"),
            (AbortStatus::Grpc(5), 200, "5"),
        ] {
            let faults = FaultPolicy {
                delay: None,
                abort: abort(status),
            };
            let fixture = fixture(speaking(protocol), &[origin.address], faults);
            let mut client = HttpClient::connect(fixture.web).await;
            for _ in 0..2 {
                client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
                let response = client.answer().await.unwrap();
                assert_eq!(response.status, http);
                assert_eq!(response.text(), "fault filter abort");
                assert_eq!(response.field("content-type"), Some("text/plain"));
                assert_eq!(response.field("retry-after"), None);
            }
            let (got, _, body) = post_http2(&fixture, false).await;
            assert_eq!((got, body.as_str()), (http, "fault filter abort"));
            let (got, head, body) = post_http2(&fixture, true).await;
            assert_eq!((got, body.as_str()), (200, ""));
            for line in [
                format!("grpc-status: {grpc}\r\n"),
                "grpc-message: fault filter abort\r\n".to_owned(),
            ] {
                assert!(head.contains(&line), "no {line:?} in {head}");
            }
            let reason = ["reason=\"fault_filter_abort\"", "side=\"gateway\""];
            let refused = "canal_gateway_refused_requests_total";
            assert_eq!(fixture.metric(refused, &reason), 4.0);
        }
        assert_eq!(origin.requests(), 0);
    }
}

#[tokio::test]
async fn an_abort_needs_no_endpoint_and_is_authorized() {
    let faults = FaultPolicy {
        delay: None,
        abort: abort(AbortStatus::Http(503)),
    };
    let fixture = fixture(EngineSetup::default(), &[], faults);
    let response = HttpClient::get(fixture.web, "/x").await;
    assert_eq!(response.text(), "fault filter abort");
    let denied = vec![rule(vec![clause(Attribute::Path, &["/x"])])];
    fixture.apply(vec![policy("no", AuthorizationAction::Deny, denied)]);
    assert_eq!(HttpClient::get(fixture.web, "/x").await.status, 403);
    assert_eq!(HttpClient::get(fixture.web, "/y").await.status, 503);
}

#[tokio::test]
async fn delays_precede_the_times_of_the_rule_and_are_logged() {
    // Short, since the test asserts only that the delays were not skipped.
    const TIME: Duration = Duration::from_millis(20);
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("access.log");
    let origin = OriginServer::echo().await;
    let setup = EngineSetup {
        log: Some(log.clone()),
        ..EngineSetup::default()
    };
    let only_delay = FaultPolicy {
        delay: delay(TIME),
        abort: None,
    };
    let fixture = fixture(setup, &[origin.address], only_delay);
    let mut timed = faulty_route(only_delay);
    if let Resource::Route(rule) = &mut timed {
        // Envoy's route timeout starts in the router filter, which runs after the fault filter. No
        // timeout may end a request on a slow machine.
        rule.attempts = Some(Box::new(AttemptPolicy {
            timeouts: RouteTimeouts {
                request: Some(FOREVER),
                attempt: Some(FOREVER),
                span: TimeoutSpan::AfterRequest,
            },
            retries: None,
        }));
    }
    fixture.apply(vec![timed]);
    let started = Instant::now();
    let body = "POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\nhello";
    let response = HttpClient::once(fixture.web, body).await;
    assert!(response.status == 200 && response.text().contains("hello"));
    assert_eq!(post_http2(&fixture, false).await.0, 200);
    let took = started.elapsed();
    // The two requests ran one after the other, each with its own delay.
    assert!(took >= 2 * TIME, "{took:?}");
    let both = FaultPolicy {
        delay: delay(TIME),
        abort: abort(AbortStatus::Http(503)),
    };
    fixture.apply(vec![faulty_route(both)]);
    assert_eq!(HttpClient::get(fixture.web, "/").await.status, 503);
    let only_abort = FaultPolicy {
        delay: None,
        ..both
    };
    fixture.apply(vec![faulty_route(only_abort)]);
    assert_eq!(HttpClient::get(fixture.web, "/").await.status, 503);
    // The third delay is that of `both`, whose abort follows it; `only_abort` has none.
    assert_eq!(fixture.metric(DELAYS, &DELAYED), 3.0);
    let lines = || std::fs::read_to_string(&log).unwrap_or_default();
    until("four lines", || lines().lines().count() >= 4).await;
    let flags = lines();
    let flags: Vec<serde_json::Value> = flags
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|line| line["response_flags"].clone())
        .collect();
    // Envoy's flags: DI for an injected delay, FI for an injected abort.
    assert_eq!(flags, ["DI", "DI", "DI,FI", "FI"]);
}

fn tenant_with_share(share: u64) -> Resource {
    let Resource::Tenant(mut alpha) = tenant(TENANT, 1) else {
        panic!("a tenant")
    };
    let kind = ShareKind::GatewayDelayedRequests;
    alpha.shares.set(kind, Share::Amount(share));
    Resource::Tenant(alpha)
}

#[tokio::test]
async fn requests_beyond_the_share_of_delays_are_served_at_once() {
    let origin = OriginServer::echo().await;
    let faults = FaultPolicy {
        delay: delay(FOREVER),
        abort: None,
    };
    let fixture = fixture(EngineSetup::default(), &[origin.address], faults);
    fixture.apply(vec![tenant_with_share(2)]);
    let mut waiting = Vec::new();
    for _ in 0..2 {
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        waiting.push(client);
    }
    fixture.until(DELAYS, &DELAYED, 2.0).await;
    assert_eq!(HttpClient::get(fixture.web, "/").await.status, 200);
    assert_eq!(post_http2(&fixture, false).await.0, 200);
    assert_eq!(fixture.metric(DELAYS, &OVERFLOW), 2.0);
    assert_eq!(origin.requests(), 2, "the delayed ones wait");
    // A client that resets its connection is not waited for.
    for client in waiting {
        let _ = client.stream.set_zero_linger();
    }
    let gone = ["reason=\"client_gone\""];
    let refused = "canal_gateway_refused_requests_total";
    fixture.until(refused, &gone, 2.0).await;
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
    fixture.until(DELAYS, &DELAYED, 3.0).await;
    // An HTTP/2 client ends the wait by a reset.
    let request = Request::builder().uri("http://web/").body(()).unwrap();
    let mut sender = http2::connect(&fixture).await.ready().await.unwrap();
    let (response, mut stream) = sender.send_request(request, true).unwrap();
    fixture.until(DELAYS, &DELAYED, 4.0).await;
    stream.send_reset(h2::Reason::CANCEL);
    drop(response);
    fixture.until(refused, &gone, 3.0).await;
    assert_eq!(origin.requests(), 2);
}
