//! Copies of requests to mirrors, in every pairing of HTTP versions. The request is the same with a
//! mirror that is dead, slow or closed by policies, and what is not copied is counted by its reason.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use canal_model::authorization::{
    Attribute, Authentication, AuthorizationAction, JwtRule, PolicyRule, PolicyTarget,
};
use canal_model::program::{AppProtocol, Resource, RouteAction, RouteMirror};
use canal_model::request_fraction::RequestFraction;
use canal_model::route_attempts::{AttemptPolicy, RouteTimeouts};
use canal_model::route_filters::{HeaderModifier, RouteFilters};
use canal_model::share::{Share, ShareKind};
use http::Request;
use tokio::io::AsyncWriteExt;

use crate::authorizers::{asking, authorizer};
use crate::client::HttpClient;
use crate::fixture::{
    EngineSetup, GatewayFixture, LOCALHOST, TENANT, pod, prefix, route, service_with_id, tenant,
    to, until,
};
use crate::http2;
use crate::origin::OriginServer;
use crate::policies::{clause, named, of, policy as authorization, rule};
use crate::retries::{every_second, every_second_http2, policy};
use crate::tokens::TokenSigner;

const MIRRORED: &str = "canal_gateway_mirrored_requests_total";

/// Heads of copies in lower case, with the bodies.
type ReceivedCopies = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

/// A mirror and what it received.
struct Mirror {
    origin: OriginServer,
    protocol: AppProtocol,
    received: ReceivedCopies,
}

impl Mirror {
    async fn start(protocol: AppProtocol) -> Self {
        let received = ReceivedCopies::default();
        let seen = received.clone();
        let origin = if protocol != AppProtocol::Http1 {
            http2::origin(move |request, mut respond| {
                let seen = seen.clone();
                async move {
                    let (parts, body) = request.into_parts();
                    let body = http2::read_all(body).await.unwrap().0;
                    let mut head = format!("{} {}\r\n", parts.method, parts.uri);
                    for (name, value) in &parts.headers {
                        head += &format!("{name}: {}\r\n", value.to_str().unwrap());
                    }
                    seen.lock().unwrap().push((head.to_ascii_lowercase(), body));
                    let response = http::Response::builder().status(500).body(()).unwrap();
                    let _ = respond.send_response(response, true);
                }
            })
            .await
        } else {
            OriginServer::each(move |mut peer| {
                let seen = seen.clone();
                async move {
                    while let Some((head, body)) = peer.request().await {
                        seen.lock().unwrap().push((head.to_ascii_lowercase(), body));
                        let text = b"HTTP/1.1 500 Oops\r\ncontent-length: 2\r\n\r\nno";
                        peer.write(text).await;
                    }
                }
            })
            .await
        };
        Self {
            origin,
            protocol,
            received,
        }
    }

    fn count(&self) -> usize {
        self.received.lock().unwrap().len()
    }
}

fn mirror_to(service: &str) -> RouteMirror {
    RouteMirror {
        target: to(service, &[], 1).target,
        fraction: RequestFraction::ALL,
        backend: None,
    }
}

/// Returns a service for a mirror at this address, and its pod.
fn mirror_service(
    name: &str,
    id: u32,
    address: SocketAddr,
    protocol: AppProtocol,
) -> [Resource; 2] {
    let vip = format!("10.96.0.{id}");
    [
        service_with_id(TENANT, name, id, &vip, &[(80, protocol)]),
        Resource::Workload(pod(TENANT, &format!("{name}-0"), address, name)),
    ]
}

fn mirrored_route(mirrors: Vec<RouteMirror>) -> Resource {
    let header = |name: &str| HeaderModifier {
        set: vec![(name.to_owned(), "1".to_owned())],
        ..HeaderModifier::default()
    };
    let mut backend = to("web", &[], 1);
    backend.filters = Some(Box::new(RouteFilters {
        request_headers: header("x-of-backend"),
        ..RouteFilters::default()
    }));
    let split = RouteAction::Split(vec![backend]);
    let mut rule = route("web", "all", 0, prefix("/"), split);
    if let Resource::Route(rule) = &mut rule {
        rule.mirrors = mirrors;
        rule.filters = Some(Box::new(RouteFilters {
            request_headers: header("x-of-rule"),
            ..RouteFilters::default()
        }));
    }
    rule
}

fn speaking(protocol: AppProtocol) -> EngineSetup {
    EngineSetup {
        protocol,
        ..EngineSetup::default()
    }
}

/// Sends a POST with a body of no declared length; returns the status and the text.
async fn post(fixture: &GatewayFixture, over_http2: bool, body: &[u8]) -> (u16, String) {
    if over_http2 {
        let request = Request::builder().method("POST").uri("http://web/x?q");
        let mut sender = http2::connect(fixture).await.ready().await.unwrap();
        let (response, mut stream) = sender
            .send_request(request.body(()).unwrap(), false)
            .unwrap();
        let body = Bytes::copy_from_slice(body);
        http2::send_all(&mut stream, body, true).await.unwrap();
        let (parts, body) = response.await.unwrap().into_parts();
        let body = http2::read_all(body).await.unwrap().0;
        return (parts.status.as_u16(), String::from_utf8_lossy(&body).into());
    }
    let mut client = HttpClient::connect(fixture.web).await;
    client
        .send(b"POST /x?q HTTP/1.1\r\nHost: web:80\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    for part in body.chunks(1000) {
        let size = format!("{:x};a=b\r\n", part.len());
        client
            .send(&[size.as_bytes(), part, b"\r\n"].concat())
            .await;
    }
    client.send(b"0\r\n\r\n").await;
    let response = client.answer().await.unwrap();
    (response.status, response.text())
}

async fn check(origin: &OriginServer, protocol: AppProtocol, mirror: &Mirror, over_http2: bool) {
    let case = format!(
        "{protocol:?}, mirror {:?}, client with HTTP/2: {over_http2}",
        mirror.protocol
    );
    let fixture = GatewayFixture::new(speaking(protocol), &[origin.address]);
    let address = mirror.origin.address;
    fixture.apply(mirror_service("copy", 7, address, mirror.protocol).into());
    fixture.apply(vec![mirrored_route(vec![
        mirror_to("copy"),
        mirror_to("copy"),
    ])]);
    let before = mirror.count();
    let body: Vec<u8> = (0..5000u32).map(|n| b'a' + (n % 26) as u8).collect();
    let (status, text) = post(&fixture, over_http2, &body).await;
    assert_eq!(status, 200, "{case}");
    assert!(text.ends_with(&*String::from_utf8_lossy(&body)), "{case}");
    until(&case, || mirror.count() == before + 2).await;
    for (head, copied) in &mirror.received.lock().unwrap()[before..] {
        assert!(*copied == body, "{case}: {} bytes", copied.len());
        for there in ["x-of-rule: 1\r\n", "x-of-backend: 1\r\n", "/x?q"] {
            assert!(head.contains(there), "{case}: no {there:?} in {head}");
        }
        assert!(!head.contains("shadow"), "{case}: another host in {head}");
    }
    // A request without a body.
    let response = HttpClient::get(fixture.web, "/y").await;
    assert_eq!(response.status, 200, "{case}");
    fixture.until(MIRRORED, &["result=\"sent\""], 4.0).await;
    assert_eq!(mirror.count(), before + 4, "{case}");
}

#[tokio::test]
async fn mirrors_get_copies_in_every_pairing_of_versions() {
    let (one, two) = (OriginServer::echo().await, http2::origin(http2::echo).await);
    for mirror in [AppProtocol::Http1, AppProtocol::Http2, AppProtocol::Grpc] {
        let mirror = Mirror::start(mirror).await;
        for over_http2 in [false, true] {
            check(&one, AppProtocol::Http1, &mirror, over_http2).await;
            check(&two, AppProtocol::Http2, &mirror, over_http2).await;
        }
    }
}

#[tokio::test]
async fn a_dead_or_slow_mirror_has_no_effect_on_requests() {
    let origin = OriginServer::echo().await;
    let (slow, _release) = OriginServer::gated().await;
    let dead = std::net::TcpListener::bind(LOCALHOST).unwrap();
    let dead_address = dead.local_addr().unwrap();
    drop(dead);
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let protocol = AppProtocol::Http1;
    fixture.apply(mirror_service("dead", 7, dead_address, protocol).into());
    fixture.apply(mirror_service("slow", 8, slow.address, protocol).into());
    fixture.apply(vec![mirrored_route(vec![
        mirror_to("dead"),
        mirror_to("slow"),
        mirror_to("missing"),
    ])]);
    let mut client = HttpClient::connect(fixture.web).await;
    for _ in 0..50 {
        client
            .send(b"POST /x HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\nhello")
            .await;
        let response = client.answer().await.unwrap();
        assert_eq!(response.status, 200);
        assert!(response.text().ends_with("hello"));
    }
    assert_eq!(origin.requests(), 50, "each request is sent once");
    assert_eq!(origin.connections(), 1, "its connection is used again");
    let failed = ["result=\"connect_failed\""];
    fixture.until(MIRRORED, &failed, 50.0).await;
    let missing = ["result=\"no_service\""];
    fixture.until(MIRRORED, &missing, 50.0).await;
    until("the slow mirror is asked", || slow.requests() == 50).await;
    assert_eq!(fixture.metric(MIRRORED, &["result=\"sent\""]), 0.0);
}

#[tokio::test]
async fn a_request_that_is_sent_again_is_copied_once() {
    let mirror = Mirror::start(AppProtocol::Http1).await;
    let (one, two) = (every_second().await, every_second_http2().await);
    for (origin, protocol) in [(&one, AppProtocol::Http1), (&two, AppProtocol::Http2)] {
        let fixture = GatewayFixture::new(speaking(protocol), &[origin.address]);
        fixture.apply(mirror_service("copy", 7, mirror.origin.address, AppProtocol::Http1).into());
        let mut rule = mirrored_route(vec![mirror_to("copy")]);
        if let Resource::Route(rule) = &mut rule {
            rule.attempts = Some(Box::new(AttemptPolicy {
                timeouts: RouteTimeouts::default(),
                retries: Some(policy(1, &[], &[503])),
            }));
        }
        fixture.apply(vec![rule]);
        for over_http2 in [false, true] {
            let before = mirror.count();
            let (status, text) = post(&fixture, over_http2, b"hello").await;
            assert_eq!((status, text.as_str()), (200, "hello"), "{protocol:?}");
            until("the copy arrives", || mirror.count() > before).await;
            let received = mirror.received.lock().unwrap();
            assert_eq!(received[before..].len(), 1);
            assert_eq!(received[before].1, b"hello");
        }
        let retries = ["reason=\"retriable_response\""];
        let retried = fixture.metric("canal_gateway_retries_total", &retries);
        assert_eq!(retried, 2.0, "{protocol:?}");
        fixture.until(MIRRORED, &["result=\"sent\""], 2.0).await;
        assert_eq!(fixture.metric(MIRRORED, &[]), 2.0, "one copy of each");
    }
}

fn tenant_with_share(kind: ShareKind, share: u64) -> Resource {
    let Resource::Tenant(mut alpha) = tenant(TENANT, 1) else {
        panic!("a tenant")
    };
    alpha.shares.set(kind, Share::Amount(share));
    Resource::Tenant(alpha)
}

#[tokio::test]
async fn copies_beyond_the_limits_are_counted_and_requests_served() {
    let origin = OriginServer::echo().await;
    let (slow, _release) = OriginServer::gated().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    fixture.apply(mirror_service("slow", 7, slow.address, AppProtocol::Http1).into());
    fixture.apply(vec![
        tenant_with_share(ShareKind::GatewayMirroredRequests, 2),
        mirrored_route(vec![mirror_to("slow")]),
    ]);
    for _ in 0..5 {
        assert_eq!(HttpClient::get(fixture.web, "/").await.status, 200);
    }
    let refused = ["result=\"tenant_mirrored_requests\""];
    assert_eq!(fixture.metric(MIRRORED, &refused), 3.0);
    until("two copies arrive", || slow.requests() == 2).await;
    fixture.apply(vec![tenant_with_share(
        ShareKind::GatewayMirroredRequests,
        100,
    )]);
    let long = ["result=\"mirrored_body_bytes\""];
    let body = vec![b'x'; (64 << 10) + 1];
    post_until(&fixture, false, &body, &long).await;
    let before = fixture.metric(MIRRORED, &long);
    let (status, _) = post(&fixture, true, &body).await;
    assert_eq!(status, 200);
    fixture.until(MIRRORED, &long, before + 1.0).await;
    assert_eq!(slow.requests(), 2);
    fixture.apply(vec![tenant_with_share(ShareKind::GatewayBodyBytes, 1000)]);
    let full = ["result=\"tenant_mirrored_body_bytes\""];
    post_until(&fixture, false, &[b'x'; 2000], &full).await;
}

/// Copies used to wait for the end of a stream, and to hold the room of other requests' bodies.
#[tokio::test]
async fn copies_of_endless_bodies_give_up_and_hold_only_what_arrived() {
    // With whole bodies of 64 KiB, each counted twice, they would need five times the room.
    const STREAMS: usize = 20;
    let origin = OriginServer::echo().await;
    let mirror = Mirror::start(AppProtocol::Http1).await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    fixture.apply(mirror_service("copy", 7, mirror.origin.address, AppProtocol::Http1).into());
    // Room for one whole body, and for the first bytes of many.
    let room = tenant_with_share(ShareKind::GatewayBodyBytes, 512 << 10);
    fixture.apply(vec![room, mirrored_route(vec![mirror_to("copy")])]);
    let mut clients = Vec::new();
    for _ in 0..STREAMS {
        let mut client = HttpClient::connect(fixture.web).await;
        client
            .send(b"POST /x HTTP/1.1\r\nHost: web\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
            .await;
        clients.push(client);
    }
    until("the endpoint has the streams", || {
        origin.connections() == STREAMS
    })
    .await;
    assert_eq!(fixture.metric(MIRRORED, &[]), 0.0);
    assert_eq!(post(&fixture, false, b"whole").await.0, 200);
    fixture.until(MIRRORED, &["result=\"sent\""], 1.0).await;
    let late = ["result=\"body_timeout\""];
    fixture.until(MIRRORED, &late, STREAMS as f64).await;
    for client in &mut clients {
        client.send(b"5\r\nhello\r\n0\r\n\r\n").await;
        assert!(
            client
                .answer()
                .await
                .unwrap()
                .text()
                .ends_with("hellohello")
        );
    }
    assert_eq!(mirror.count(), 1);
}

/// Posts until the metric counts a request. The workers apply a share some time after its snapshot.
async fn post_until(fixture: &GatewayFixture, over_http2: bool, body: &[u8], counted: &[&str]) {
    let posts = async {
        while fixture.metric(MIRRORED, counted) < 1.0 {
            let (status, text) = post(fixture, over_http2, body).await;
            assert!(status == 200 && text.ends_with(&*String::from_utf8_lossy(body)));
        }
    };
    let deadline = canal_timing::deadline(Duration::from_secs(10));
    let ended = tokio::time::timeout(deadline, posts).await;
    ended.unwrap_or_else(|_| panic!("never {counted:?}: {}", fixture.registry.render()));
}

#[tokio::test]
async fn a_copy_is_authorized_and_drawn() {
    let origin = OriginServer::echo().await;
    let mirror = Mirror::start(AppProtocol::Http1).await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    fixture.apply(mirror_service("copy", 7, mirror.origin.address, AppProtocol::Http1).into());
    fixture.apply(vec![mirrored_route(vec![mirror_to("copy")])]);
    let denied = vec![rule(vec![clause(Attribute::Path, &["/no"])])];
    fixture.apply(vec![authorization("no", AuthorizationAction::Deny, denied)]);
    assert_eq!(HttpClient::get(fixture.web, "/no").await.status, 403);
    assert_eq!(HttpClient::get(fixture.web, "/yes").await.status, 200);
    until("one copy arrives", || mirror.count() == 1).await;
    let none = RouteMirror {
        fraction: RequestFraction::NONE,
        ..mirror_to("copy")
    };
    fixture.apply(vec![mirrored_route(vec![none, mirror_to("copy")])]);
    assert_eq!(HttpClient::get(fixture.web, "/yes").await.status, 200);
    fixture.until(MIRRORED, &["result=\"sent\""], 2.0).await;
    assert_eq!(mirror.count(), 2);
    assert_eq!(fixture.metric(MIRRORED, &[]), 2.0);
    let allowed = ["action=\"allow\""];
    let allowed = fixture.metric("canal_authorization_total", &allowed);
    assert_eq!(allowed, 2.0, "copies are not counted as requests");
}

#[tokio::test]
async fn a_mirror_of_one_backend_gets_copies_of_its_requests_only() {
    let origin = OriginServer::echo().await;
    let mirror = Mirror::start(AppProtocol::Http1).await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    fixture.apply(mirror_service("copy", 7, mirror.origin.address, AppProtocol::Http1).into());
    let mut rule = mirrored_route(vec![
        RouteMirror {
            backend: Some(0),
            ..mirror_to("copy")
        },
        RouteMirror {
            backend: Some(1),
            ..mirror_to("copy")
        },
    ]);
    if let Resource::Route(rule) = &mut rule {
        rule.action = RouteAction::Split(vec![to("web", &[], 0), to("web", &[], 1)]);
    }
    fixture.apply(vec![rule]);
    assert_eq!(HttpClient::get(fixture.web, "/").await.status, 200);
    fixture.until(MIRRORED, &["result=\"sent\""], 1.0).await;
    assert_eq!(
        fixture.metric(MIRRORED, &[]),
        1.0,
        "one mirror is of the backend"
    );
    let received = mirror.received.lock().unwrap();
    assert!(received[0].0.contains("host: web\r\n"), "{}", received[0].0);
}

/// Starts a mirror that grants no window for bodies and answers with interim responses forever.
async fn flooding_mirror(protocol: AppProtocol) -> OriginServer {
    const HINT: &[u8] = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n";
    if protocol == AppProtocol::Http1 {
        return OriginServer::each(|mut peer| async move {
            if peer.head().await.is_some() {
                while peer.stream.write_all(HINT).await.is_ok() {}
            }
        })
        .await;
    }
    OriginServer::each(|peer| async move {
        let mut settings = h2::server::Builder::new();
        settings.initial_window_size(0);
        let accepted = settings.handshake::<_, Bytes>(peer.stream).await;
        let Ok(mut connection) = accepted else { return };
        while let Some(Ok((_request, mut respond))) = connection.accept().await {
            tokio::spawn(async move {
                let hint = || http::Response::builder().status(103).body(()).unwrap();
                while respond.send_informational(hint()).is_ok() {
                    tokio::task::yield_now().await;
                }
            });
        }
    })
    .await
}

/// An HTTP/2 mirror without window used to fill the memory with interim responses, because nobody
/// took them while the body waited.
#[tokio::test]
async fn interim_responses_of_mirrors_are_limited() {
    let origin = OriginServer::echo().await;
    for protocol in [AppProtocol::Http1, AppProtocol::Http2] {
        let mirror = flooding_mirror(protocol).await;
        let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
        fixture.apply(mirror_service("copy", 7, mirror.address, protocol).into());
        fixture.apply(vec![mirrored_route(vec![mirror_to("copy")])]);
        for sent in [1.0, 2.0] {
            assert_eq!(post(&fixture, false, b"hello").await.0, 200);
            let flooded = ["result=\"interim_responses\""];
            fixture.until(MIRRORED, &flooded, sent).await;
        }
        assert_eq!(fixture.metric(MIRRORED, &[]), 2.0, "{protocol:?}");
    }
}

/// Copies used to have the token and the forged headers that the endpoint does not get.
#[tokio::test]
async fn mirrors_get_no_header_that_the_policies_of_the_endpoint_remove() {
    let origin = OriginServer::echo().await;
    let signer = TokenSigner::new();
    for protocol in [AppProtocol::Http1, AppProtocol::Http2] {
        let mirror = Mirror::start(protocol).await;
        let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
        fixture.apply(mirror_service("copy", 7, mirror.origin.address, protocol).into());
        let jwt = JwtRule {
            issuer: "iss".into(),
            audiences: vec![],
            keys: Some(serde_json::json!({"keys": [signer.jwk()]}).to_string()),
            headers: vec![],
            parameters: vec![],
            cookies: vec![],
            forward: false,
            payload_header: None,
            claim_headers: vec![
                ("x-subject".to_owned(), vec!["sub".to_owned()]),
                ("x-group".to_owned(), vec!["group".to_owned()]),
            ],
        };
        fixture.apply(vec![
            mirrored_route(vec![mirror_to("copy")]),
            Resource::Authentication(Authentication {
                key: named("jwt"),
                target: PolicyTarget::Workloads {
                    namespace: Some("default".parse().unwrap()),
                    labels: [("app".to_owned(), "web".to_owned())].into(),
                },
                rules: vec![jwt],
                broken: None,
            }),
        ]);
        let token = signer.token(7);
        let request = format!(
            "GET / HTTP/1.1\r\nHost: web\r\nAuthorization: Bearer {token}\r\nX-Group: forged\r\n\r\n"
        );
        let seen = HttpClient::once(fixture.web, &request).await.text();
        until("a copy arrives", || mirror.count() == 1).await;
        let copied = mirror.received.lock().unwrap()[0].0.clone();
        for head in [seen.to_ascii_lowercase(), copied] {
            assert!(head.contains("x-subject: 7"), "{protocol:?}: {head}");
            assert!(!head.contains("bearer"), "{protocol:?}: {head}");
            assert!(!head.contains("forged"), "{protocol:?}: {head}");
        }
    }
}

fn pods_of(app: &str) -> PolicyTarget {
    PolicyTarget::Workloads {
        namespace: Some("default".parse().unwrap()),
        labels: [("app".to_owned(), app.to_owned())].into(),
    }
}

#[tokio::test]
async fn mirrors_get_the_headers_that_an_authorizer_leaves_the_endpoint() {
    let (origin, (authz, _)) = (OriginServer::echo().await, authorizer().await);
    let mirror = Mirror::start(AppProtocol::Http1).await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    fixture.apply(mirror_service("copy", 7, mirror.origin.address, AppProtocol::Http1).into());
    fixture.apply(mirror_service("authz", 8, authz.address, AppProtocol::Grpc).into());
    let ask = AuthorizationAction::Custom(named("ext-authz"));
    fixture.apply(vec![
        mirrored_route(vec![mirror_to("copy")]),
        asking(false),
        Resource::Authorization(of("ask", ask, pods_of("web"), vec![PolicyRule::default()])),
    ]);
    // The authorizer removes `x-secret`, and writes `x-user: ann`.
    let request = "GET / HTTP/1.1\r\nHost: web\r\nX-Secret: s\r\nX-User: root\r\n\r\n";
    let seen = HttpClient::once(fixture.web, request).await.text();
    until("a copy arrives", || mirror.count() == 1).await;
    let copied = mirror.received.lock().unwrap()[0].0.clone();
    for head in [seen.to_ascii_lowercase(), copied] {
        assert!(head.contains("x-user: ann"), "{head}");
        assert!(
            !head.contains("root") && !head.contains("x-secret"),
            "{head}"
        );
    }
}

#[tokio::test]
async fn decisions_about_copies_and_their_tokens_are_not_counted() {
    let origin = OriginServer::echo().await;
    let mirror = Mirror::start(AppProtocol::Http1).await;
    let signer = TokenSigner::new();
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    fixture.apply(mirror_service("copy", 7, mirror.origin.address, AppProtocol::Http1).into());
    fixture.apply(vec![mirrored_route(vec![mirror_to("copy")])]);
    let all = || vec![PolicyRule::default()];
    let at_mirror =
        |name, action| Resource::Authorization(of(name, action, pods_of("copy"), all()));
    let jwt = JwtRule {
        issuer: "iss".into(),
        audiences: vec![],
        keys: Some(serde_json::json!({"keys": [signer.jwk()]}).to_string()),
        headers: vec![],
        parameters: vec![],
        cookies: vec![],
        forward: false,
        payload_header: None,
        claim_headers: vec![],
    };
    let tokens = Resource::Authentication(Authentication {
        key: named("jwt"),
        target: pods_of("copy"),
        rules: vec![jwt],
        broken: None,
    });
    let other = TokenSigner::new();
    let mut copies = 0.0;
    for (policies, token) in [
        (vec![at_mirror("no", AuthorizationAction::Deny)], None),
        (vec![at_mirror("no", AuthorizationAction::Audit)], None),
        // The mirror accepts the first token, and not the one of the other signer.
        (vec![tokens.clone()], Some(signer.token(7))),
        (vec![tokens], Some(other.token(8))),
    ] {
        fixture.apply(policies);
        let token = token.map(|token| format!("Authorization: Bearer {token}\r\n"));
        let request = format!(
            "GET / HTTP/1.1\r\nHost: web\r\n{}\r\n",
            token.unwrap_or_default()
        );
        assert_eq!(HttpClient::once(fixture.web, &request).await.status, 200);
        copies += 1.0;
        fixture.until(MIRRORED, &[], copies).await;
    }
    // AUDIT denies nothing. Both copies with tokens are dropped as `unverified_token`, since a copy
    // waits for no verification.
    assert_eq!(fixture.metric(MIRRORED, &["result=\"denied\""]), 1.0);
    for action in ["deny", "audit"] {
        let labels = [format!("action=\"{action}\"")];
        let labels = labels.each_ref().map(String::as_str);
        assert_eq!(
            fixture.metric("canal_authorization_total", &labels),
            0.0,
            "{action}"
        );
    }
    assert_eq!(fixture.metric("canal_gateway_tokens_total", &[]), 0.0);
}

/// Copies used to be sent to the endpoint, and by the policies, of the request's beginning.
#[tokio::test]
async fn copies_are_dropped_if_policies_or_endpoints_changed_before_the_body_ended() {
    let arrived = Arc::new(AtomicUsize::new(0));
    let seen = arrived.clone();
    let origin = OriginServer::each(move |mut peer| {
        let seen = seen.clone();
        async move {
            while peer.head().await.is_some() {
                // Two chunks and the last one, each a size and a line.
                for line in 0..6 {
                    peer.line().await;
                    seen.fetch_add(usize::from(line == 0), SeqCst);
                }
                peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    .await;
            }
        }
    })
    .await;
    let mirror = Mirror::start(AppProtocol::Http1).await;
    let other = Mirror::start(AppProtocol::Http1).await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let serve = |mirror: &Mirror| {
        fixture.apply(mirror_service("copy", 7, mirror.origin.address, mirror.protocol).into());
    };
    serve(&mirror);
    fixture.apply(vec![mirrored_route(vec![mirror_to("copy")])]);
    let mut client = HttpClient::connect(fixture.web).await;
    // While a body is sent: nothing changes, the mirror's endpoint changes, and the policies
    // change.
    let mut change: Vec<Box<dyn Fn()>> = vec![Box::new(|| ()), Box::new(|| serve(&other))];
    change.push(Box::new(|| {
        let denied = vec![rule(vec![clause(Attribute::Path, &["/no"])])];
        fixture.apply(vec![authorization("no", AuthorizationAction::Deny, denied)]);
    }));
    for (n, change) in change.iter().enumerate() {
        client
            .send(b"POST /x HTTP/1.1\r\nHost: web\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
            .await;
        until("the body begins", || arrived.load(SeqCst) == n + 1).await;
        change();
        client.send(b"5\r\nhello\r\n0\r\n\r\n").await;
        assert_eq!(client.answer().await.unwrap().status, 200);
        until("the copy ends", || {
            fixture.metric(MIRRORED, &[]) == (n + 1) as f64
        })
        .await;
    }
    assert_eq!(fixture.metric(MIRRORED, &["result=\"sent\""]), 1.0);
    assert_eq!(fixture.metric(MIRRORED, &["result=\"outdated\""]), 2.0);
    assert_eq!((mirror.count(), other.count()), (1, 0));
}
