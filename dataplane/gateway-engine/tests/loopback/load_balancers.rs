//! Load balancers over real connections, judged by counts: turns, load, and hashes that keep their
//! endpoint on every connection and worker.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use canal_model::load_balancing::{
    ConsistentHash, HashCookie, HashKey, HashTableKind, LoadBalancer, PortLoadBalancer,
};
use canal_model::program::*;
use canal_model::route_filters::{HeaderModifier, RouteFilters};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};

use crate::client::{ClientResponse, HttpClient};
use crate::fixture::{EngineSetup, GatewayFixture, TENANT, pod, prefix, route, service, to, until};
use crate::origin::OriginServer;

/// Returns the service `web` with a load balancer for requests to all its endpoints.
fn balanced(protocol: AppProtocol, load_balancer: LoadBalancer) -> Resource {
    let Resource::Service(plain) = service(TENANT, "web", "10.96.0.1", &[(80, protocol)]) else {
        unreachable!("it is a service")
    };
    let load_balancer = PortLoadBalancer {
        port: 80,
        subset: Labels::new(),
        load_balancer,
    };
    Resource::Service(Service {
        load_balancers: vec![load_balancer],
        ..plain
    })
}

fn hashing(key: HashKey, table: HashTableKind) -> LoadBalancer {
    LoadBalancer::ConsistentHash(Box::new(ConsistentHash { key, table }))
}

const RING: HashTableKind = HashTableKind::Ring { size_min: 1024 };

async fn origins() -> Vec<OriginServer> {
    vec![
        OriginServer::named("v0").await,
        OriginServer::named("v1").await,
        OriginServer::named("v2").await,
        OriginServer::named("v3").await,
    ]
}

fn addresses(origins: &[OriginServer]) -> Vec<SocketAddr> {
    origins.iter().map(|origin| origin.address).collect()
}

/// Sends a request with these header lines on a connection of its own.
async fn get(gateway: SocketAddr, path: &str, lines: &str) -> ClientResponse {
    let request = format!("GET {path} HTTP/1.1\r\nHost: web\r\n{lines}\r\n");
    HttpClient::once(gateway, &request).await
}

#[tokio::test]
async fn endpoints_in_turn_get_exactly_the_same_number_of_requests() {
    let origins = origins().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &addresses(&origins));
    fixture.apply(vec![balanced(AppProtocol::Http1, LoadBalancer::RoundRobin)]);
    let mut kept = HttpClient::connect(fixture.web).await;
    for _ in 0..20 {
        assert_eq!(get(fixture.web, "/", "").await.status, 200);
        kept.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        assert_eq!(kept.answer().await.unwrap().status, 200);
    }
    for origin in &origins {
        assert_eq!(origin.requests(), 10);
    }
}

#[tokio::test]
async fn least_request_avoids_a_busy_endpoint() {
    let (busy, open) = OriginServer::gated().await;
    let free = OriginServer::named("free").await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[busy.address, free.address]);
    fixture.apply(vec![balanced(AppProtocol::Http1, LoadBalancer::RoundRobin)]);
    // In turn, one of two requests reaches the endpoint that holds it.
    let mut clients = [
        HttpClient::connect(fixture.web).await,
        HttpClient::connect(fixture.web).await,
    ];
    for client in &mut clients {
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
    }
    until("both endpoints have a request", || {
        (busy.requests(), free.requests()) == (1, 1)
    })
    .await;
    fixture.apply(vec![balanced(
        AppProtocol::Http1,
        LoadBalancer::LeastRequest,
    )]);
    for _ in 0..30 {
        assert_eq!(get(fixture.web, "/", "").await.text(), "free");
    }
    assert_eq!((busy.requests(), free.requests()), (1, 31));
    open.send(true).unwrap();
    for client in &mut clients {
        assert_eq!(client.answer().await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn a_hash_keeps_its_endpoint_on_every_connection_and_worker() {
    let origins = origins().await;
    for table in [RING, HashTableKind::Maglev { size: 251 }] {
        let setup = EngineSetup {
            workers: 3,
            ..EngineSetup::default()
        };
        // A second engine is another replica.
        let fixtures = [setup, EngineSetup::default()]
            .map(|setup| GatewayFixture::new(setup, &addresses(&origins)));
        let key = HashKey::Header("x-user".into());
        let mut used = BTreeSet::new();
        for fixture in &fixtures {
            fixture.apply(vec![balanced(
                AppProtocol::Http1,
                hashing(key.clone(), table),
            )]);
        }
        for user in 0..24 {
            let mut endpoints = BTreeSet::new();
            for n in 0..8 {
                let line = format!("X-User: user-{user}\r\n");
                let answer = get(fixtures[n % 2].web, "/", &line).await;
                endpoints.insert(answer.text());
            }
            assert_eq!(endpoints.len(), 1, "{table:?} user-{user}: {endpoints:?}");
            used.append(&mut endpoints);
        }
        assert!(used.len() >= 3, "{table:?}: {used:?}");
    }
}

#[tokio::test]
async fn a_new_endpoint_takes_hashes_and_others_keep_theirs() {
    let origins = origins().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &addresses(&origins[..3]));
    let key = HashKey::QueryParameter("user".into());
    fixture.apply(vec![balanced(AppProtocol::Http1, hashing(key, RING))]);
    let owners = async || {
        let mut owners = Vec::new();
        for user in 0..60 {
            let path = format!("/x?a=1&user={user}");
            owners.push(get(fixture.web, &path, "").await.text());
        }
        owners
    };
    let before = owners().await;
    assert_eq!(before.iter().collect::<BTreeSet<_>>().len(), 3);
    let added = pod(TENANT, "web-3", origins[3].address, "web");
    fixture.apply(vec![Resource::Workload(added)]);
    let after = owners().await;
    assert!(after.contains(&"v3".to_owned()));
    let pairs = before.iter().zip(&after);
    let kept = pairs.filter(|(before, after)| before == after).count();
    assert!(kept >= 15, "{kept} of 60");
}

#[tokio::test]
async fn a_generated_cookie_keeps_its_endpoint() {
    let origins = origins().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &addresses(&origins));
    let cookie = |ttl_seconds| {
        let cookie = HashCookie {
            name: "user".into(),
            path: "/shop".into(),
            ttl_seconds,
        };
        balanced(AppProtocol::Http1, hashing(HashKey::Cookie(cookie), RING))
    };
    let filters = RouteFilters {
        response_headers: HeaderModifier {
            add: vec![("x-rule".into(), "yes".into())],
            ..HeaderModifier::default()
        },
        ..RouteFilters::default()
    };
    let action = RouteAction::Split(vec![to("web", &[], 1)]);
    let Resource::Route(mut rule) = route("web", "a", 0, prefix("/filtered"), action.clone())
    else {
        unreachable!("it is a route")
    };
    rule.filters = Some(Box::new(filters));
    fixture.apply(vec![
        cookie(Some(60)),
        Resource::Route(rule),
        route("web", "b", 1, prefix("/"), action),
    ]);
    let mut used = BTreeSet::new();
    // Twelve random cookies lead to more than one endpoint, and half of them pass a rule with
    // filters.
    for n in 0..12 {
        let path = if n % 2 == 0 { "/" } else { "/filtered" };
        let first = get(fixture.web, path, "").await;
        let set = first.field("set-cookie").unwrap().to_owned();
        let (pair, attributes) = set.split_once("; ").unwrap();
        assert_eq!(attributes, "Max-Age=60; Path=/shop; HttpOnly");
        assert_eq!(first.field("x-rule").is_some(), n % 2 == 1);
        used.insert(first.text());
        // By chance an endpoint would be selected four times in a row rarely.
        for _ in 0..4 {
            let again = get(fixture.web, path, &format!("Cookie: a=b; {pair}\r\n")).await;
            assert_eq!(again.text(), first.text());
            assert_eq!(again.field("set-cookie"), None);
        }
    }
    assert!(used.len() > 1, "{used:?}");
    // All requests on one connection that bring no cookie get the same one.
    let mut kept = HttpClient::connect(fixture.web).await;
    let mut cookies = BTreeSet::new();
    for _ in 0..3 {
        kept.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        let answer = kept.answer().await.unwrap();
        cookies.insert(answer.field("set-cookie").unwrap().to_owned());
    }
    assert_eq!(cookies.len(), 1);
    fixture.apply(vec![cookie(None)]);
    assert_eq!(get(fixture.web, "/", "").await.field("set-cookie"), None);
}

#[tokio::test]
async fn a_hash_moves_while_its_endpoint_refuses_connections() {
    let origins = origins().await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refusing = closed.local_addr().unwrap();
    drop(closed);
    let mut all = addresses(&origins);
    all.push(refusing);
    let fixture = GatewayFixture::new(EngineSetup::default(), &all);
    let key = HashKey::Header("x-user".into());
    fixture.apply(vec![balanced(AppProtocol::Http1, hashing(key, RING))]);
    for user in 0..120 {
        let line = format!("X-User: {user}\r\n");
        let first = get(fixture.web, "/", &line).await;
        let again = get(fixture.web, "/", &line).await;
        assert_eq!((first.status, first.text()), (200, again.text()), "{user}");
    }
    let retried = fixture.metric("canal_gateway_retries_total", &[]);
    assert!(retried >= 1.0, "no hash led to the endpoint that refuses");
}

#[tokio::test]
async fn connections_of_one_address_go_to_one_endpoint() {
    let listeners = [
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
    ];
    let all: Vec<SocketAddr> = listeners
        .iter()
        .map(|it| it.local_addr().unwrap())
        .collect();
    let setup = EngineSetup {
        protocol: AppProtocol::Tcp,
        ..EngineSetup::default()
    };
    let fixture = GatewayFixture::new(setup, &all);
    fixture.apply(vec![balanced(
        AppProtocol::Tcp,
        hashing(HashKey::SourceIp, RING),
    )]);
    for (n, listener) in listeners.into_iter().enumerate() {
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let name = [n as u8];
                let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, &name).await;
            }
        });
    }
    let mut endpoints = BTreeSet::new();
    for _ in 0..12 {
        let mut stream = TcpStream::connect(fixture.web).await.unwrap();
        endpoints.insert(stream.read_u8().await.unwrap());
    }
    assert_eq!(endpoints.len(), 1, "{endpoints:?}");
}
