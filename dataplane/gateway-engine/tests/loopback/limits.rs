//! Tests that reach each limit of the engine.

use std::time::{Duration, Instant};

use canal_gateway_engine::GatewayLimits;
use canal_model::ids::{ReplicaNumber, ServiceId, Vni};
use canal_model::program::*;
use canal_timing::timed;
use http::Request;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, TENANT, key, until};
use crate::http2::connect;
use crate::origin::{OriginServer, Peer};

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: web\r\n\r\n";

/// Starts an endpoint that responds after a delay, so that requests accumulate.
async fn slow() -> OriginServer {
    OriginServer::each(|mut peer: Peer| async move {
        while peer.request().await.is_some() {
            tokio::time::sleep(Duration::from_millis(400)).await;
            peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                .await;
        }
    })
    .await
}

fn with(limits: GatewayLimits) -> EngineSetup {
    EngineSetup {
        limits,
        ..EngineSetup::default()
    }
}

#[tokio::test]
async fn connections_of_the_process() {
    let origin = OriginServer::named("x").await;
    let fixture = GatewayFixture::new(
        with(GatewayLimits {
            connections: 2,
            ..GatewayLimits::default()
        }),
        &[origin.address],
    );
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(GET).await;
        assert_eq!(client.answer().await.unwrap().status, 200);
        held.push(client);
    }
    let mut third = HttpClient::connect(fixture.web).await;
    assert!(!third.more().await);
    assert_eq!(
        fixture.metric("canal_limit_refused_total", &["limit=\"connections\""]),
        1.0
    );
    drop(held);
    // The gateway learns of their ends a moment later.
    let served = async {
        loop {
            let mut client = HttpClient::connect(fixture.web).await;
            client.send(GET).await;
            if let Some(answer) = client.answer().await {
                return answer.status;
            }
        }
    };
    assert_eq!(
        tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), served).await,
        Ok(200)
    );
}

#[tokio::test]
async fn connections_of_a_tenant() {
    let origin = OriginServer::named("x").await;
    let fixture = GatewayFixture::new(
        with(GatewayLimits {
            tenant_connections: 1,
            ..GatewayLimits::default()
        }),
        &[origin.address],
    );
    let mut first = HttpClient::connect(fixture.web).await;
    first.send(GET).await;
    assert_eq!(first.answer().await.unwrap().status, 200);
    let mut second = HttpClient::connect(fixture.web).await;
    assert!(!second.more().await);
    assert_eq!(
        fixture.metric(
            "canal_gateway_refused_connections_total",
            &["tenant_connections"]
        ),
        1.0
    );
}

#[tokio::test]
async fn requests_in_flight_of_a_tenant_and_of_the_process() {
    for (limits, status, reason) in [
        (
            GatewayLimits {
                tenant_requests: 2,
                ..GatewayLimits::default()
            },
            429,
            "tenant_busy",
        ),
        (
            GatewayLimits {
                requests: 2,
                ..GatewayLimits::default()
            },
            503,
            "overload",
        ),
    ] {
        let (origin, release) = OriginServer::gated().await;
        let fixture = GatewayFixture::new(with(limits), &[origin.address]);
        let mut busy = Vec::new();
        for _ in 0..2 {
            let mut client = HttpClient::connect(fixture.web).await;
            client.send(GET).await;
            busy.push(client);
        }
        until("both requests", || origin.requests() == 2).await;
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(GET).await;
        let refused = client.answer().await.unwrap();
        assert_eq!(
            (refused.status, refused.field("retry-after")),
            (status, Some("1"))
        );
        assert_eq!(
            fixture.metric("canal_gateway_refused_requests_total", &[reason]),
            1.0
        );
        release.send_replace(true);
        for client in &mut busy {
            assert_eq!(client.answer().await.unwrap().status, 200);
        }
        // The refused client's connection stayed open, and the limit is free again.
        client.send(GET).await;
        assert_eq!(client.answer().await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn bytes_of_a_head_in_both_versions() {
    let origin = OriginServer::named("x").await;
    let fixture = GatewayFixture::new(
        with(GatewayLimits {
            head_bytes: 4096,
            ..GatewayLimits::default()
        }),
        &[origin.address],
    );
    let long = "x".repeat(5000);
    let answer = HttpClient::once(
        fixture.web,
        &format!("GET / HTTP/1.1\r\nHost: web\r\nX: {long}\r\n\r\n"),
    )
    .await;
    assert_eq!(answer.status, 431);
    assert_eq!(
        fixture.metric("canal_gateway_refused_requests_total", &["head_too_large"]),
        1.0
    );
    let client = connect(&fixture).await;
    let request = Request::builder()
        .uri("http://web/")
        .header("x", &long)
        .body(())
        .unwrap();
    let (response, _) = client
        .ready()
        .await
        .unwrap()
        .send_request(request, true)
        .unwrap();
    assert_eq!(response.await.unwrap().status(), 431);
    assert_eq!(origin.requests(), 0);
}

#[tokio::test]
async fn streams_of_a_connection() {
    let origin = slow().await;
    let fixture = GatewayFixture::new(
        with(GatewayLimits {
            streams: 3,
            ..GatewayLimits::default()
        }),
        &[origin.address],
    );
    let client = connect(&fixture).await;
    let get = || Request::builder().uri("http://web/").body(()).unwrap();
    // After one response the client knows the limit; further streams wait then.
    let (response, _) = client
        .clone()
        .ready()
        .await
        .unwrap()
        .send_request(get(), true)
        .unwrap();
    assert_eq!(response.await.unwrap().status(), 200);
    let mut answers = Vec::new();
    for _ in 0..9 {
        let request = get();
        let (response, _) = client
            .clone()
            .ready()
            .await
            .unwrap()
            .send_request(request, true)
            .unwrap();
        answers.push(tokio::spawn(
            async move { response.await.unwrap().status() },
        ));
    }
    for answer in answers {
        assert_eq!(answer.await.unwrap(), 200);
    }
    assert!(origin.connections() <= 3, "{}", origin.connections());
}

#[tokio::test]
async fn idle_connections_of_an_endpoint() {
    let (origin, release) = OriginServer::gated().await;
    let fixture = GatewayFixture::new(
        with(GatewayLimits {
            idle_per_endpoint: 2,
            ..GatewayLimits::default()
        }),
        &[origin.address],
    );
    let all: Vec<_> = (0..5)
        .map(|_| tokio::spawn(HttpClient::get(fixture.web, "/")))
        .collect();
    until("all requests", || origin.requests() == 5).await;
    release.send_replace(true);
    for answer in all {
        assert_eq!(answer.await.unwrap().status, 200);
    }
    assert_eq!(origin.connections(), 5);
    fixture
        .until("canal_gateway_upstream_not_pooled_total", &[], 3.0)
        .await;
}

#[tokio::test]
async fn connections_of_an_http2_endpoint() {
    // With one stream per connection the other requests wait, and no more connections than the
    // limit are opened.
    let origin = OriginServer::each(|peer: Peer| async move {
        let mut connection = h2::server::Builder::new()
            .max_concurrent_streams(1)
            .handshake::<_, bytes::Bytes>(peer.stream)
            .await
            .unwrap();
        while let Some(Ok((_, mut respond))) = connection.accept().await {
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(100)).await;
                let _ = respond.send_response(http::Response::new(()), true);
            });
        }
    })
    .await;
    let limits = GatewayLimits {
        http2_per_endpoint: 2,
        ..GatewayLimits::default()
    };
    let fixture = GatewayFixture::new(
        EngineSetup {
            protocol: AppProtocol::Http2,
            ..with(limits)
        },
        &[origin.address],
    );
    // The gateway learns the endpoint's limit from the first response.
    assert_eq!(HttpClient::get(fixture.web, "/").await.status, 200);
    let all: Vec<_> = (0..8)
        .map(|_| tokio::spawn(HttpClient::get(fixture.web, "/")))
        .collect();
    for answer in all {
        assert_eq!(answer.await.unwrap().status, 200);
    }
    assert_eq!(origin.connections(), 2);
}

/// Builds a throttle of requests for all replicas together.
fn throttle(service: Option<&str>, per_second: u32, burst: u32) -> Resource {
    Resource::Throttle(Throttle {
        tenant: TENANT.parse().unwrap(),
        vni: Vni::new(1).unwrap(),
        service: service.map(|name| key(TENANT, name)),
        id: service.map(|_| ServiceId::new(1).unwrap()),
        sessions: RateLimit::default(),
        packets: RateLimit::default(),
        requests: RateLimit { per_second, burst },
    })
}

#[tokio::test]
async fn requests_above_a_throttle_are_answered_429_and_counted() {
    for service in [Some("web"), None] {
        let started = Instant::now();
        // The slowest throttle lets one request per second through, which must not happen during
        // the test.
        while !is_throttled(service).await {
            let waited = started.elapsed();
            assert!(
                waited < canal_timing::deadline(Duration::from_secs(20)),
                "the interval is never less than a second"
            );
        }
    }
}

/// Checks a throttle of one request per second with a burst of three. Returns false if a second has
/// passed before all requests were sent.
async fn is_throttled(service: Option<&str>) -> bool {
    let origin = OriginServer::named("x").await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    let h2 = connect(&fixture).await;
    fixture.apply(vec![throttle(service, 1, 3)]);
    let begun = Instant::now();
    let mut statuses = Vec::new();
    // The burst of three passes, and within a second the throttle grants no fourth.
    for _ in 0..5 {
        client.send(GET).await;
        let answer = client.answer().await.unwrap();
        // A tenth of a second is left for the request to be decided before the next token.
        if begun.elapsed() > Duration::from_millis(900) {
            return false;
        }
        if answer.status == 429 {
            assert_eq!(
                (answer.field("retry-after"), answer.text().as_str()),
                (Some("1"), "too many requests\n")
            );
        }
        statuses.push(answer.status);
    }
    assert_eq!(statuses, [200, 200, 200, 429, 429], "{service:?}");
    assert_eq!(
        fixture.metric(
            "canal_gateway_refused_requests_total",
            &["reason=\"throttled\""]
        ),
        2.0
    );
    assert_eq!(origin.requests(), 3);
    // A gRPC client gets a gRPC status.
    let request = Request::post("http://web/s/M")
        .header("content-type", "application/grpc")
        .body(())
        .unwrap();
    let (response, _) = h2
        .ready()
        .await
        .unwrap()
        .send_request(request, true)
        .unwrap();
    let response = response.await.unwrap();
    // The throttle may have admitted one more after a second, so a slow attempt proves nothing.
    if begun.elapsed() > Duration::from_millis(900) {
        return false;
    }
    assert_eq!(
        (
            response.status().as_u16(),
            response.headers()["grpc-status"].to_str().unwrap()
        ),
        // gRPC status 8 is RESOURCE_EXHAUSTED.
        (200, "8")
    );
    // Once the throttle is removed, nothing is refused.
    let name = service.map_or_else(|| TENANT.to_string(), |name| key(TENANT, name).to_string());
    fixture.change(vec![], &[(ResourceKind::Throttle, &name)]);
    client.send(GET).await;
    assert_eq!(client.answer().await.unwrap().status, 200);
    true
}

/// The clients run on two threads, beside those of the gateway.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn throttle_lets_its_limit_through_whatever_the_number_of_workers() {
    for workers in [1, 2, 4] {
        let origin = OriginServer::named("x").await;
        let fixture = GatewayFixture::new(
            EngineSetup {
                workers,
                ..EngineSetup::default()
            },
            &[origin.address],
        );
        // 200 a second: far below what a worker serves, so that the throttle limits and not the
        // CPU.
        fixture.apply(vec![throttle(Some("web"), 200, 20)]);
        let begun = Instant::now();
        // Several, so that each worker has some of them.
        let clients: Vec<_> = (0..8)
            .map(|_| {
                let web = fixture.web;
                tokio::spawn(async move {
                    let (mut client, mut passed) = (HttpClient::connect(web).await, 0);
                    // Two seconds admit 400 requests, beside which the burst of 20 is small.
                    while begun.elapsed() < Duration::from_secs(2) {
                        client.send(GET).await;
                        passed += usize::from(client.answer().await.unwrap().status == 200);
                    }
                    passed
                })
            })
            .collect();
        let mut passed = 0;
        for client in clients {
            passed += client.await.unwrap();
        }
        let limit = begun.elapsed().as_secs_f64() * 200.0;
        let passed = f64::from(u32::try_from(passed).unwrap());
        assert!(
            // The throttle has a burst of 20.
            // 1.1 is the bound that the tier promises for a throttle as a whole.
            passed <= 1.1 * limit + 20.0,
            "{workers} workers: {passed} of {limit}"
        );
        timed!(
            // A tenth is for what the clients do not send while they wait for their answers.
            passed >= 0.9 * limit,
            "nine tenths of a throttle pass with {workers} workers"
        );
    }
}

/// Two replicas share a service's buckets; each admits its part.
#[tokio::test]
async fn replica_lets_through_its_part_of_a_throttle() {
    let origin = OriginServer::named("x").await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let number = |n| ReplicaNumber::new(n).unwrap();
    let replica = Replica {
        name: "gw-1".parse().unwrap(),
        number: number(1),
        backend: "b1".parse().unwrap(),
        az: "az1".parse().unwrap(),
        underlay: "250.0.0.1".parse().unwrap(),
        up: true,
    };
    let (service, id) = (key(TENANT, "web"), ServiceId::new(1).unwrap());
    let address = GatewayAddress {
        service: service.clone(),
        id,
        az: replica.az.clone(),
        addresses: vec!["10.102.0.1".parse().unwrap()],
        network: None,
        open: true,
    };
    // This replica is the head of a quarter of the buckets.
    let chains = (0..BUCKETS)
        .map(|bucket| vec![number(if bucket % 4 == 0 { 1 } else { 2 })])
        .collect();
    let table = BucketTable {
        service,
        id,
        az: replica.az.clone(),
        vni: Vni::new(1).unwrap(),
        version: 1,
        chains,
    };
    fixture.apply(vec![
        Resource::Replica(replica),
        Resource::Address(address),
        Resource::Table(table),
        // A quarter of it is 1 request per second and a burst of 10.
        throttle(Some("web"), 4, 40),
    ]);
    let mut client = HttpClient::connect(fixture.web).await;
    let (begun, mut passed) = (Instant::now(), 0);
    // As many requests as the burst of the whole throttle.
    for _ in 0..40 {
        client.send(GET).await;
        passed += usize::from(client.answer().await.unwrap().status == 200);
    }
    // The replica's part of the rate is one per second.
    let refilled = usize::try_from(begun.elapsed().as_secs()).unwrap();
    assert!(
        // The replica's burst is 10, with one request of slack on either side.
        // Elapsed seconds are rounded down, so that one more request may have been refilled.
        (9..=12 + refilled).contains(&passed),
        "a quarter of the burst of 40, not {passed}"
    );
}
