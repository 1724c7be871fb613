//! Routes, weights, endpoints: where requests go, what happens when an endpoint fails, and changes under load.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use canal_gateway_engine::Times;
use canal_model::program::*;
use tokio::net::TcpListener;

use crate::client::Client;
use crate::origin::{Origin, Peer};
use crate::rig::{LOCALHOST, Plot, Rig, TENANT, key, pod, prefix, route, service, tenant, to};

#[tokio::test]
async fn rules_send_requests_where_they_say() {
    let (v1, v2, other) = (Origin::named("v1").await, Origin::named("v2").await, Origin::named("other").await);
    let rig = Rig::new(Plot::default(), &[v1.address, v2.address]);
    rig.apply(vec![
        service(TENANT, "other", "10.96.0.2", &[(80, AppProtocol::Http1)]),
        Resource::Workload(pod(TENANT, "o-0", other.address, "other")),
    ]);
    let header =
        HttpMatch { headers: vec![ValueMatch { name: "end-user".into(), value: TextMatch::Exact("jason".into()) }], ..prefix("/") };
    let split = |backends: Vec<Backend>| RouteAction::Split(backends);
    rig.apply(vec![
        route("web", "a", 0, header, split(vec![to("web", &[("version", "web-1")], 1)])),
        route("web", "b", 1, prefix("/other"), split(vec![to("other", &[], 1)])),
        route("web", "c", 2, prefix("/broken"), RouteAction::Refuse { status: 500, reason: "was broken".into() }),
        route("web", "d", 3, prefix("/none"), split(vec![to("absent", &[], 1)])),
        route("web", "e", 4, prefix("/empty"), split(vec![to("web", &[("version", "v9")], 1)])),
        route("web", "f", 5, prefix("/v"), split(vec![to("web", &[("version", "web-0")], 1)])),
    ]);
    let get = async |path: &str, more: &str| {
        let answer = Client::once(rig.web, &format!("GET {path} HTTP/1.1\r\nHost: web\r\n{more}\r\n")).await;
        (answer.status, answer.text())
    };
    for _ in 0..4 {
        assert_eq!(get("/v", "End-User: jason\r\n").await, (200, "v2".into()));
        assert_eq!(get("/v", "End-User: other\r\n").await, (200, "v1".into()));
        assert_eq!(get("/other/x", "").await, (200, "other".into()));
    }
    for (path, status, flag) in [("/broken", 500, "RR"), ("/none", 503, "NC"), ("/empty", 503, "UH"), ("/x", 404, "NR")] {
        assert_eq!(get(path, "").await.0, status, "{path}");
        let labels = [format!("response_flags=\"{flag}\""), format!("response_code=\"{status}\""), "tenant=\"alpha\"".into()];
        rig.until("istio_requests_total", &[&labels[0], &labels[1], &labels[2]], 1.0).await;
    }
    // No rule left: the service's own endpoints.
    let names = ["a", "b", "c", "d", "e", "f"].map(|n| format!("{TENANT}/VirtualService/default/{n}/0"));
    rig.change(vec![], &names.each_ref().map(|n| (Kind::Route, n.as_str())));
    assert_eq!(get("/x", "").await.0, 200);
}

#[tokio::test]
async fn weights_hold_over_many_requests() {
    let (v1, v2) = (Origin::named("v1").await, Origin::named("v2").await);
    let rig = Rig::new(Plot::default(), &[v1.address, v2.address]);
    let split = vec![to("web", &[("version", "web-0")], 90), to("web", &[("version", "web-1")], 10)];
    rig.apply(vec![route("web", "canary", 0, prefix("/"), RouteAction::Split(split))]);
    let mut client = Client::connect(rig.web).await;
    for _ in 0..3000 {
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        assert_eq!(client.answer().await.unwrap().status, 200);
    }
    let share = v2.requests() as f64 / 3000.0;
    assert!((0.075..0.125).contains(&share), "{share}");
}

#[tokio::test]
async fn the_less_busy_endpoint_is_preferred() {
    let slow = Origin::each(|mut peer: Peer| async move {
        while peer.request().await.is_some() {
            tokio::time::sleep(Duration::from_millis(300)).await;
            peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nslow").await;
        }
    })
    .await;
    let fast = Origin::named("fast").await;
    let rig = Rig::new(Plot::default(), &[slow.address, fast.address]);
    let web = rig.web;
    let clients = (0..8).map(|_| {
        tokio::spawn(async move {
            let mut client = Client::connect(web).await;
            for _ in 0..25 {
                client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
                assert_eq!(client.answer().await.unwrap().status, 200);
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    assert_eq!(slow.requests() + fast.requests(), 200);
    assert!(slow.requests() <= 30, "{} of 200 went to the slow endpoint", slow.requests());
}

/// An address where nobody listens.
async fn closed_port() -> std::net::SocketAddr {
    TcpListener::bind(LOCALHOST).await.unwrap().local_addr().unwrap()
}

#[tokio::test]
async fn an_endpoint_that_cannot_be_connected_is_passed_over() {
    let good = Origin::named("good").await;
    let rig = Rig::new(Plot::default(), &[closed_port().await, good.address]);
    for _ in 0..40 {
        // A body does not matter: nothing was sent before the connection failed.
        let answer = Client::once(rig.web, "POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 3\r\n\r\nabc").await;
        assert_eq!((answer.status, answer.text().as_str()), (200, "good"));
    }
    let retries = rig.metric("canal_gateway_retries_total", &["connect_failed"]);
    assert!((1.0..=3.0).contains(&retries), "{retries} retries: the endpoint is left out after the first");
    assert!(rig.metric("canal_gateway_endpoint_ejections_total", &[]) >= 1.0);
    let only = Rig::new(Plot::default(), &[closed_port().await]);
    assert_eq!(Client::get(only.web, "/").await.status, 503);
    only.until("istio_requests_total", &["response_flags=\"UF\""], 1.0).await;
}

#[tokio::test]
async fn a_failed_endpoint_is_used_again_after_its_time() {
    let address = closed_port().await;
    let other = Origin::named("other").await;
    let times = Times { ejection: Duration::from_millis(200), ..Times::default() };
    let rig = Rig::new(Plot { times, ..Plot::default() }, &[address, other.address]);
    while rig.metric("canal_gateway_endpoint_ejections_total", &[]) < 1.0 {
        assert_eq!(Client::get(rig.web, "/").await.status, 200);
    }
    let back = Origin::at(address, |mut peer: Peer| async move {
        while peer.request().await.is_some() {
            peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
        }
    })
    .await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    for _ in 0..40 {
        assert_eq!(Client::get(rig.web, "/").await.status, 200);
    }
    assert!(back.requests() > 5);
}

#[tokio::test]
async fn a_kept_connection_that_dies_costs_no_idempotent_request() {
    // Answers once, then closes as soon as the next request's first byte is there.
    let origin = Origin::each(|mut peer: Peer| async move {
        peer.request().await;
        peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
        peer.head().await;
    })
    .await;
    let rig = Rig::new(Plot::default(), &[origin.address]);
    let mut client = Client::connect(rig.web).await;
    for n in 0..10 {
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        assert_eq!(client.answer().await.unwrap().text(), "ok", "request {n}");
    }
    assert!(rig.metric("canal_gateway_retries_total", &["upstream_closed"]) >= 5.0);
    // A request that may not be repeated is not.
    let before = origin.requests();
    for _ in 0..2 {
        client.send(b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 0\r\n\r\n").await;
        let status = client.answer().await.unwrap().status;
        assert!(status == 200 || status == 502, "{status}");
    }
    assert_eq!(origin.requests() - before, 2, "each POST was sent once");
    rig.until("istio_requests_total", &["response_flags=\"UC\""], 1.0).await;
}

#[tokio::test]
async fn a_connection_that_the_upstream_closed_while_idle_is_not_used() {
    let origin = Origin::each(|mut peer: Peer| async move {
        peer.request().await;
        peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    })
    .await;
    let rig = Rig::new(Plot::default(), &[origin.address]);
    let mut client = Client::connect(rig.web).await;
    for _ in 0..5 {
        client.send(b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 2\r\n\r\nab").await;
        assert_eq!(client.answer().await.unwrap().status, 200);
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    assert_eq!(rig.metric("canal_gateway_retries_total", &[]), 0.0);
}

#[tokio::test]
async fn readiness_decides_who_gets_requests() {
    let (a, b) = (Origin::named("a").await, Origin::named("b").await);
    let rig = Rig::new(Plot::default(), &[a.address, b.address]);
    let not_ready = Workload { ready: false, ..pod(TENANT, "web-0", a.address, "web") };
    rig.apply(vec![Resource::Workload(not_ready.clone())]);
    for _ in 0..20 {
        assert_eq!(Client::get(rig.web, "/").await.text(), "b");
    }
    rig.change(vec![], &[(Kind::Workload, "alpha/default/web-1")]);
    assert_eq!(Client::get(rig.web, "/").await.status, 503);
    rig.apply(vec![Resource::Workload(Workload { ready: true, ..not_ready })]);
    assert_eq!(Client::get(rig.web, "/").await.text(), "a");
}

#[tokio::test]
async fn nothing_of_one_tenant_leads_to_another() {
    let (mine, theirs) = (Origin::named("mine").await, Origin::named("theirs").await);
    let rig = Rig::new(Plot::default(), &[mine.address]);
    rig.apply(vec![
        tenant("beta", 2),
        service("beta", "web", "10.96.0.1", &[(80, AppProtocol::Http1)]),
        Resource::Workload(pod("beta", "web-0", theirs.address, "web")),
    ]);
    // A backend, a parent and an endpoint that name the other tenant's service.
    let foreign =
        Backend { weight: 1, target: BackendTarget::Service { service: key("beta", "web"), port: 80, subset: Default::default() } };
    rig.apply(vec![route("web", "leak", 0, prefix("/leak"), RouteAction::Split(vec![foreign]))]);
    rig.apply(vec![route("web", "own", 1, prefix("/"), RouteAction::Split(vec![to("web", &[], 1)]))]);
    let Resource::Route(mut rule) = route("web", "steal", 0, prefix("/"), RouteAction::Split(vec![to("web", &[], 1)])) else {
        unreachable!()
    };
    rule.parent = key("beta", "web");
    rig.apply(vec![Resource::Route(rule)]);
    let mut spy = pod("beta", "spy", theirs.address, "web");
    spy.endpoints[0].service = key(TENANT, "web");
    rig.apply(vec![Resource::Workload(spy)]);
    assert_eq!(Client::get(rig.web, "/leak").await.status, 500);
    for _ in 0..20 {
        assert_eq!(Client::get(rig.web, "/").await.text(), "mine");
    }
    assert_eq!(theirs.requests(), 0);
}

#[tokio::test]
async fn a_thousand_changes_under_load_fail_no_request() {
    let (a, b) = (Origin::named("a").await, Origin::named("b").await);
    let rig = Arc::new(Rig::new(Plot::default(), &[a.address, b.address]));
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (web, stop, done) = (rig.web, stop.clone(), done.clone());
            tokio::spawn(async move {
                let mut client = Client::connect(web).await;
                while !stop.load(Ordering::SeqCst) {
                    client.send(b"GET /x HTTP/1.1\r\nHost: web\r\n\r\n").await;
                    assert_eq!(client.answer().await.unwrap().status, 200);
                    done.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    for n in 0..1000u32 {
        match n % 4 {
            0 => rig.apply(vec![route("web", "r", n, prefix("/x"), RouteAction::Split(vec![to("web", &[("version", "web-0")], 1)]))]),
            1 => rig.apply(vec![route("web", "r", n, prefix("/"), RouteAction::Split(vec![to("web", &[], n)]))]),
            2 => rig.apply(vec![Resource::Workload(Workload { ready: n % 8 == 2, ..pod(TENANT, "web-1", b.address, "web") })]),
            _ => rig.change(vec![], &[(Kind::Route, "alpha/VirtualService/default/r/0")]),
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        client.await.unwrap();
    }
    let done = done.load(Ordering::SeqCst) as f64;
    assert!(done > 200.0);
    rig.until("istio_requests_total", &[], done).await;
    assert_eq!(rig.metric("istio_requests_total", &[]), rig.metric("istio_requests_total", &["response_code=\"200\""]));
}
