//! Routes, weights and endpoints: where requests go, what happens when an endpoint fails, and
//! changes under load.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use canal_gateway_engine::GatewayTimeouts;
use canal_model::program::*;
use tokio::net::TcpListener;

use crate::client::HttpClient;
use crate::fixture::{
    EngineSetup, GatewayFixture, LOCALHOST, TENANT, key, pod, prefix, route, service, tenant, to,
    until,
};
use crate::origin::{OriginServer, Peer};

/// Returns rules of `web`: by a header, to another service, to a refusal, to no service, to none of
/// its endpoints, and by a path.
fn rules_of_web() -> Vec<Resource> {
    let header = HttpMatch {
        headers: vec![ValueMatch {
            name: "end-user".into(),
            value: TextMatch::Exact("jason".into()),
        }],
        ..prefix("/")
    };
    let split = |backends: Vec<Backend>| RouteAction::Split(backends);
    vec![
        route(
            "web",
            "a",
            0,
            header,
            split(vec![to("web", &[("version", "web-1")], 1)]),
        ),
        route(
            "web",
            "b",
            1,
            prefix("/other"),
            split(vec![to("other", &[], 1)]),
        ),
        route(
            "web",
            "c",
            2,
            prefix("/broken"),
            RouteAction::Refuse {
                status: 500,
                reason: "was broken".into(),
            },
        ),
        route(
            "web",
            "d",
            3,
            prefix("/none"),
            split(vec![to("absent", &[], 1)]),
        ),
        route(
            "web",
            "e",
            4,
            prefix("/empty"),
            split(vec![to("web", &[("version", "v9")], 1)]),
        ),
        route(
            "web",
            "f",
            5,
            prefix("/v"),
            split(vec![to("web", &[("version", "web-0")], 1)]),
        ),
    ]
}

#[tokio::test]
async fn rules_route_to_their_backends() {
    let (v1, v2, other) = (
        OriginServer::named("v1").await,
        OriginServer::named("v2").await,
        OriginServer::named("other").await,
    );
    let fixture = GatewayFixture::new(EngineSetup::default(), &[v1.address, v2.address]);
    fixture.apply(vec![
        service(TENANT, "other", "10.96.0.2", &[(80, AppProtocol::Http1)]),
        Resource::Workload(pod(TENANT, "o-0", other.address, "other")),
    ]);
    fixture.apply(rules_of_web());
    let get = async |path: &str, more: &str| {
        let answer = HttpClient::once(
            fixture.web,
            &format!("GET {path} HTTP/1.1\r\nHost: web\r\n{more}\r\n"),
        )
        .await;
        (answer.status, answer.text())
    };
    // Repeated, because round robin over both endpoints would hit the right one half of the time.
    for _ in 0..4 {
        assert_eq!(get("/v", "End-User: jason\r\n").await, (200, "v2".into()));
        assert_eq!(get("/v", "End-User: other\r\n").await, (200, "v1".into()));
        assert_eq!(get("/other/x", "").await, (200, "other".into()));
    }
    // The flags are Envoy's; RR is Canal's own, for a rule that refuses.
    for (path, status, flag) in [
        ("/broken", 500, "RR"),
        ("/none", 503, "NC"),
        ("/empty", 503, "UH"),
        ("/x", 404, "NR"),
    ] {
        assert_eq!(get(path, "").await.0, status, "{path}");
        let labels = [
            format!("response_flags=\"{flag}\""),
            format!("response_code=\"{status}\""),
            "tenant=\"alpha\"".into(),
        ];
        fixture
            .until(
                "istio_requests_total",
                &[&labels[0], &labels[1], &labels[2]],
                1.0,
            )
            .await;
    }
    // Without any rule, requests go to the service's own endpoints.
    let names =
        ["a", "b", "c", "d", "e", "f"].map(|n| format!("{TENANT}/VirtualService/default/{n}/0"));
    fixture.change(
        vec![],
        &names.each_ref().map(|n| (ResourceKind::Route, n.as_str())),
    );
    assert_eq!(get("/x", "").await.0, 200);
}

#[tokio::test]
async fn weights_hold_over_many_requests() {
    let (v1, v2) = (
        OriginServer::named("v1").await,
        OriginServer::named("v2").await,
    );
    let fixture = GatewayFixture::new(EngineSetup::default(), &[v1.address, v2.address]);
    let split = vec![
        to("web", &[("version", "web-0")], 90),
        to("web", &[("version", "web-1")], 10),
    ];
    fixture.apply(vec![route(
        "web",
        "canary",
        0,
        prefix("/"),
        RouteAction::Split(split),
    )]);
    let mut client = HttpClient::connect(fixture.web).await;
    for _ in 0..3000 {
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        assert_eq!(client.answer().await.unwrap().status, 200);
    }
    let share = v2.requests() as f64 / 3000.0;
    assert!((0.075..0.125).contains(&share), "{share}");
}

#[tokio::test]
async fn the_less_busy_endpoint_is_preferred() {
    let (slow, release) = OriginServer::gated().await;
    let fast = OriginServer::named("fast").await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[slow.address, fast.address]);
    let web = fixture.web;
    let left = Arc::new(AtomicU64::new(200));
    let clients = (0..8).map(|_| {
        let left = left.clone();
        tokio::spawn(async move {
            let mut client = HttpClient::connect(web).await;
            while left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
                .is_ok()
            {
                client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
                assert_eq!(client.answer().await.unwrap().status, 200);
            }
        })
    });
    let clients = clients.collect::<Vec<_>>();
    // The slow endpoint answers after all others have been answered, so each client has at most one
    // request there.
    until("all requests have arrived", || {
        slow.requests() + fast.requests() == 200
    })
    .await;
    assert!(
        slow.requests() < 8,
        "{} of 200 went to the slow endpoint",
        slow.requests()
    );
    release.send_replace(true);
    for client in clients {
        client.await.unwrap();
    }
    assert_eq!(slow.requests() + fast.requests(), 200);
}

/// Returns an address without a listener.
async fn closed_port() -> std::net::SocketAddr {
    TcpListener::bind(LOCALHOST)
        .await
        .unwrap()
        .local_addr()
        .unwrap()
}

#[tokio::test]
async fn an_endpoint_that_cannot_be_connected_is_passed_over() {
    let good = OriginServer::named("good").await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[closed_port().await, good.address]);
    for _ in 0..40 {
        // The body makes no difference, because nothing was sent before the connect failed.
        let answer = HttpClient::once(
            fixture.web,
            "POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 3\r\n\r\nabc",
        )
        .await;
        assert_eq!((answer.status, answer.text().as_str()), (200, "good"));
    }
    let retries = fixture.metric("canal_gateway_retries_total", &["connect_failed"]);
    assert!(
        (1.0..=3.0).contains(&retries),
        "{retries} retries: the endpoint is left out after the first"
    );
    assert!(fixture.metric("canal_gateway_endpoint_ejections_total", &[]) >= 1.0);
    let only = GatewayFixture::new(EngineSetup::default(), &[closed_port().await]);
    assert_eq!(HttpClient::get(only.web, "/").await.status, 503);
    only.until("istio_requests_total", &["response_flags=\"UF\""], 1.0)
        .await;
}

#[tokio::test]
async fn a_failed_endpoint_is_used_again_after_its_time() {
    let address = closed_port().await;
    let other = OriginServer::named("other").await;
    let times = GatewayTimeouts {
        ejection: Duration::from_millis(200),
        ..GatewayTimeouts::default()
    };
    let fixture = GatewayFixture::new(
        EngineSetup {
            times,
            ..EngineSetup::default()
        },
        &[address, other.address],
    );
    let is_ejected = || fixture.metric("canal_gateway_endpoint_ejections_total", &[]) >= 1.0;
    for _ in 0..1000 {
        if is_ejected() {
            break;
        }
        assert_eq!(HttpClient::get(fixture.web, "/").await.status, 200);
    }
    assert!(is_ejected());
    let back = OriginServer::at(address, |mut peer: Peer| async move {
        while peer.request().await.is_some() {
            peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                .await;
        }
    })
    .await;
    let started = Instant::now();
    while back.requests() <= 5 {
        assert_eq!(HttpClient::get(fixture.web, "/").await.status, 200);
        let waited = started.elapsed();
        assert!(
            waited < canal_timing::deadline(Duration::from_secs(5)),
            "{} requests",
            back.requests()
        );
    }
}

#[tokio::test]
async fn a_dead_idle_connection_fails_no_idempotent_request() {
    // The origin responds once, then closes as soon as the next request's first byte arrives.
    let origin = OriginServer::each(|mut peer: Peer| async move {
        peer.request().await;
        peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            .await;
        peer.head().await;
    })
    .await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    for n in 0..10 {
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        assert_eq!(client.answer().await.unwrap().text(), "ok", "request {n}");
    }
    assert!(fixture.metric("canal_gateway_retries_total", &["upstream_closed"]) >= 5.0);
    // A request that is not idempotent is not repeated.
    let before = origin.requests();
    for _ in 0..2 {
        client
            .send(b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 0\r\n\r\n")
            .await;
        let status = client.answer().await.unwrap().status;
        assert!(status == 200 || status == 502, "{status}");
    }
    assert_eq!(origin.requests() - before, 2, "each POST was sent once");
    fixture
        .until("istio_requests_total", &["response_flags=\"UC\""], 1.0)
        .await;
}

/// Returns true if all connections of a server that closed first have been closed by their clients
/// as well (net/tcp_states.h).
fn is_all_closed(port: u16) -> bool {
    const TIME_WAIT: &str = "06";
    const LISTEN: &str = "0A";
    let port = format!(":{port:04X}");
    let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let states = sockets.lines().filter_map(|line| {
        let mut columns = line.split_whitespace().skip(1);
        let (local, state) = (columns.next()?, columns.nth(1)?);
        local.ends_with(&port).then_some(state)
    });
    states
        .into_iter()
        .all(|state| [TIME_WAIT, LISTEN].contains(&state))
}

#[tokio::test]
async fn a_connection_that_the_upstream_closed_while_idle_is_not_used() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        peer.request().await;
        peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            .await;
    })
    .await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    for _ in 0..5 {
        client
            .send(b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 2\r\n\r\nab")
            .await;
        assert_eq!(client.answer().await.unwrap().status, 200);
        until("the gateway has closed its end too", || {
            is_all_closed(origin.address.port())
        })
        .await;
    }
    assert_eq!(fixture.metric("canal_gateway_retries_total", &[]), 0.0);
}

#[tokio::test]
async fn only_ready_endpoints_get_requests() {
    let (a, b) = (
        OriginServer::named("a").await,
        OriginServer::named("b").await,
    );
    let fixture = GatewayFixture::new(EngineSetup::default(), &[a.address, b.address]);
    let not_ready = Workload {
        ready: false,
        ..pod(TENANT, "web-0", a.address, "web")
    };
    fixture.apply(vec![Resource::Workload(not_ready.clone())]);
    for _ in 0..20 {
        assert_eq!(HttpClient::get(fixture.web, "/").await.text(), "b");
    }
    fixture.change(vec![], &[(ResourceKind::Workload, "alpha/default/web-1")]);
    assert_eq!(HttpClient::get(fixture.web, "/").await.status, 503);
    fixture.apply(vec![Resource::Workload(Workload {
        ready: true,
        ..not_ready
    })]);
    assert_eq!(HttpClient::get(fixture.web, "/").await.text(), "a");
}

#[tokio::test]
async fn nothing_of_one_tenant_leads_to_another() {
    let (mine, theirs) = (
        OriginServer::named("mine").await,
        OriginServer::named("theirs").await,
    );
    let fixture = GatewayFixture::new(EngineSetup::default(), &[mine.address]);
    fixture.apply(vec![
        tenant("beta", 2),
        service("beta", "web", "10.96.0.1", &[(80, AppProtocol::Http1)]),
        Resource::Workload(pod("beta", "web-0", theirs.address, "web")),
    ]);
    // A backend, a parent and an endpoint each name the other tenant's service.
    let foreign = Backend {
        weight: 1,
        filters: None,
        target: BackendTarget::Service {
            service: key("beta", "web"),
            port: 80,
            subset: Default::default(),
        },
    };
    fixture.apply(vec![route(
        "web",
        "leak",
        0,
        prefix("/leak"),
        RouteAction::Split(vec![foreign]),
    )]);
    fixture.apply(vec![route(
        "web",
        "own",
        1,
        prefix("/"),
        RouteAction::Split(vec![to("web", &[], 1)]),
    )]);
    let Resource::Route(mut rule) = route(
        "web",
        "steal",
        0,
        prefix("/"),
        RouteAction::Split(vec![to("web", &[], 1)]),
    ) else {
        unreachable!()
    };
    rule.parent = key("beta", "web");
    fixture.apply(vec![Resource::Route(rule)]);
    // The other tenant's pod claims to be an endpoint of this tenant's service.
    let mut spy = pod("beta", "spy", theirs.address, "web");
    spy.endpoints[0].service = key(TENANT, "web");
    fixture.apply(vec![Resource::Workload(spy)]);
    // A route to a backend of another tenant refuses its requests.
    assert_eq!(HttpClient::get(fixture.web, "/leak").await.status, 500);
    // Twenty requests would reach the foreign endpoint at least once if it were in the set.
    for _ in 0..20 {
        assert_eq!(HttpClient::get(fixture.web, "/").await.text(), "mine");
    }
    assert_eq!(theirs.requests(), 0);
}

#[tokio::test]
async fn a_thousand_changes_under_load_fail_no_request() {
    let (a, b) = (
        OriginServer::named("a").await,
        OriginServer::named("b").await,
    );
    let fixture = Arc::new(GatewayFixture::new(
        EngineSetup::default(),
        &[a.address, b.address],
    ));
    let (stop, done) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    // Several, so that requests are in progress at every change.
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (web, stop, done) = (fixture.web, stop.clone(), done.clone());
            tokio::spawn(async move {
                let mut client = HttpClient::connect(web).await;
                while !stop.load(Ordering::SeqCst) {
                    client.send(b"GET /x HTTP/1.1\r\nHost: web\r\n\r\n").await;
                    assert_eq!(client.answer().await.unwrap().status, 200);
                    done.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    // Each kind of change comes 250 times: a subset, another weight, an endpoint that becomes
    // unready or ready again, and no route.
    for n in 0..1000u32 {
        match n % 4 {
            0 => fixture.apply(vec![route(
                "web",
                "r",
                n,
                prefix("/x"),
                RouteAction::Split(vec![to("web", &[("version", "web-0")], 1)]),
            )]),
            1 => fixture.apply(vec![route(
                "web",
                "r",
                n,
                prefix("/"),
                RouteAction::Split(vec![to("web", &[], n)]),
            )]),
            2 => fixture.apply(vec![Resource::Workload(Workload {
                ready: n % 8 == 2,
                ..pod(TENANT, "web-1", b.address, "web")
            })]),
            _ => fixture.change(
                vec![],
                &[(ResourceKind::Route, "alpha/VirtualService/default/r/0")],
            ),
        }
        // Requests run between two changes instead of only after the last.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Few requests would show little. Two hundred are many more than the four clients have open at
    // once.
    until("200 requests", || done.load(Ordering::SeqCst) > 200).await;
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        client.await.unwrap();
    }
    let done = done.load(Ordering::SeqCst) as f64;
    fixture.until("istio_requests_total", &[], done).await;
    assert_eq!(
        fixture.metric("istio_requests_total", &[]),
        fixture.metric("istio_requests_total", &["response_code=\"200\""])
    );
}
