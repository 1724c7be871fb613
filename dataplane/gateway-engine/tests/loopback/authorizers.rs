//! External authorizers: real gRPC servers that allow, deny, respond late, or respond with invalid
//! messages, and the gateway's reaction.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use canal_gateway_engine::{GatewayLimits, GatewayTimeouts};
use canal_model::authorization::{AuthorizationAction, Authorizer, PolicyRule};
use canal_model::program::*;
use canal_model::share::{Share, ShareKind};
use http::{HeaderMap, Response};
use prost::Message;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, TENANT, key, pod, service_with_id, tenant};
use crate::http2;
use crate::origin::OriginServer;
use crate::policies::{named, policy};

/// Message types generated a second time, so that the engine's own are not tested against
/// themselves.
mod proto {
    #![allow(unreachable_pub, reason = "generated")]
    include!(concat!(env!("OUT_DIR"), "/canal.ext_authz.v3.rs"));
}

use proto::check_response::HttpResponse;

fn header(key: &str, value: &str) -> proto::HeaderValueOption {
    let header = proto::HeaderValue {
        key: key.into(),
        value: value.into(),
        raw_value: vec![],
    };
    proto::HeaderValueOption {
        header: Some(header),
        append: None,
    }
}

fn answer(path: &str) -> proto::CheckResponse {
    let status = |code| {
        Some(proto::Status {
            code,
            message: String::new(),
        })
    };
    match path {
        "/no" => {
            let denied = proto::DeniedHttpResponse {
                status: Some(proto::HttpStatus { code: 302 }),
                headers: vec![header("location", "/login"), header("set-cookie", "a=1")],
                body: "go away".into(),
            };
            proto::CheckResponse {
                status: status(7),
                http_response: Some(HttpResponse::DeniedResponse(denied)),
            }
        }
        _ => {
            let ok = proto::OkHttpResponse {
                headers: vec![header("x-user", "ann")],
                headers_to_remove: vec!["x-secret".into()],
            };
            proto::CheckResponse {
                status: status(0),
                http_response: Some(HttpResponse::OkResponse(ok)),
            }
        }
    }
}

pub(crate) struct AuthorizerCalls {
    last: Mutex<Option<proto::CheckRequest>>,
    checks: AtomicUsize,
}

impl AuthorizerCalls {
    /// Returns the headers that the last check showed.
    pub(crate) fn last_headers(&self) -> HashMap<String, String> {
        let last = self.last.lock().unwrap().clone().unwrap();
        let request = last.attributes.unwrap().request.unwrap();
        request.http.unwrap().headers
    }
}

pub(crate) async fn authorizer() -> (OriginServer, Arc<AuthorizerCalls>) {
    let seen = Arc::new(AuthorizerCalls {
        last: Mutex::default(),
        checks: AtomicUsize::new(0),
    });
    let recorded = seen.clone();
    let origin = http2::origin(move |request, mut respond| {
        let recorded = recorded.clone();
        async move {
            assert_eq!(
                request.uri().path(),
                "/envoy.service.auth.v3.Authorization/Check"
            );
            let (body, _) = http2::read_all(request.into_body()).await.unwrap();
            // The first five bytes frame the message, as gRPC demands.
            let checks = proto::CheckRequest::decode(&body[5..]).unwrap();
            let path = checks
                .attributes
                .clone()
                .unwrap()
                .request
                .unwrap()
                .http
                .map_or_else(String::new, |http| http.path);
            *recorded.last.lock().unwrap() = Some(checks);
            recorded.checks.fetch_add(1, SeqCst);
            // `/late` exceeds the authorizer's timeout, and `/reset` ends the stream without a
            // response.
            match path.as_str() {
                "/late" => std::future::pending().await,
                "/reset" => return respond.send_reset(h2::Reason::INTERNAL_ERROR),
                _ => {}
            }
            let mut send = respond
                .send_response(
                    Response::builder()
                        .header("content-type", "application/grpc")
                        .body(())
                        .unwrap(),
                    false,
                )
                .unwrap();
            let message = answer(&path).encode_to_vec();
            let prefix = [&[0][..], &(message.len() as u32).to_be_bytes()].concat();
            // The frame's length and compression flag are valid, but its three bytes are no
            // protobuf message.
            let data = if path == "/junk" {
                b"\x00\x00\x00\x00\x03\xff\xff\xff".to_vec()
            } else {
                [prefix, message].concat()
            };
            send.send_data(Bytes::from(data), false).unwrap();
            // gRPC status 13 (INTERNAL) after a message that allows: the status decides.
            let status = if path == "/status" { "13" } else { "0" };
            let trailers: HeaderMap = [("grpc-status".parse().unwrap(), status.parse().unwrap())]
                .into_iter()
                .collect();
            // The gateway may have reset the stream meanwhile.
            let _ = send.send_trailers(trailers);
        }
    })
    .await;
    (origin, seen)
}

pub(crate) fn asking(fail_open: bool) -> Resource {
    Resource::Authorizer(Authorizer {
        key: named("ext-authz"),
        service: key(TENANT, "authz"),
        port: 80,
        timeout: Duration::from_millis(500) * canal_timing::slack(),
        fail_open,
        headers: vec![],
        body_bytes: 0,
    })
}

/// Checks what the authorizer was shown of the last request.
fn check_shown_request(seen: &AuthorizerCalls) {
    let http = seen
        .last
        .lock()
        .unwrap()
        .clone()
        .unwrap()
        .attributes
        .unwrap()
        .request
        .unwrap()
        .http
        .unwrap();
    assert_eq!(
        (
            http.method.as_str(),
            http.path.as_str(),
            http.host.as_str(),
            http.protocol.as_str()
        ),
        ("GET", "/x?q=1", "web:80", "HTTP/1.1")
    );
    assert_eq!(
        (
            http.headers["x-secret"].as_str(),
            http.id.as_str(),
            http.size
        ),
        ("s", "id-1", -1)
    );
}

#[tokio::test]
async fn authorizers_allow_deny_or_do_not_respond() {
    let (origin, (authz, seen)) = (OriginServer::echo().await, authorizer().await);
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    fixture.apply(vec![
        service_with_id(TENANT, "authz", 2, "10.96.0.2", &[(80, AppProtocol::Grpc)]),
        Resource::Workload(pod(TENANT, "authz-0", authz.address, "authz")),
        policy(
            "ask",
            AuthorizationAction::Custom(named("ext-authz")),
            vec![PolicyRule::default()],
        ),
    ]);
    let get = async |path: &str| {
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: web:80\r\nX-Secret: s\r\nX-User: root\r\nX-Request-Id: id-1\r\n\r\n"
        );
        HttpClient::once(fixture.web, &request).await
    };
    assert_eq!(
        get("/x").await.status,
        403,
        "the authorizer is not known: nothing passes"
    );
    fixture.apply(vec![asking(false)]);
    let yes = get("/x?q=1").await;
    let text = yes.text().to_ascii_lowercase();
    assert!(
        yes.status == 200
            && text.contains("x-user: ann\r\n")
            && !text.contains("root")
            && !text.contains("x-secret"),
        "{text}"
    );
    check_shown_request(&seen);
    let no = get("/no").await;
    assert_eq!(
        (no.status, no.field("location"), no.text().as_str()),
        (302, Some("/login"), "go away")
    );
    fixture
        .until(
            "istio_requests_total",
            &["response_flags=\"UAEX\"", "response_code=\"302\""], // Envoy's flag of ext_authz
            1.0,
        )
        .await;
    for (path, why) in [
        ("/late", "authorizer_timeout"),
        ("/reset", "authorizer_broken"),
        ("/junk", "authorizer_malformed"),
        ("/status", "authorizer_grpc_status"),
    ] {
        assert_eq!(get(path).await.status, 403, "{path}");
        let labels = [
            format!("result=\"{why}\""),
            "authorizer=\"default/ext-authz\"".into(),
        ];
        assert_eq!(
            fixture.metric("canal_authorizer_requests_total", &[&labels[0], &labels[1]]),
            1.0,
            "{path}"
        );
    }
    fixture.apply(vec![asking(true)]);
    assert_eq!(
        (get("/junk").await.status, get("/no").await.status),
        (200, 302),
        "fails open only if there was no decision"
    );
    assert_eq!(
        fixture.metric(
            "canal_authorizer_requests_total",
            &["result=\"failed_open\""]
        ),
        1.0
    );
    // DENY policies are evaluated after CUSTOM policies.
    let checks = seen.checks.load(SeqCst);
    fixture.apply(vec![policy(
        "none",
        AuthorizationAction::Deny,
        vec![PolicyRule::default()],
    )]);
    assert_eq!(
        (get("/x").await.status, get("/no").await.status),
        (403, 302)
    );
    assert_eq!(seen.checks.load(SeqCst), checks + 2); // Both requests were checked.
}

async fn get_over_http2(fixture: &GatewayFixture, path: &str) -> String {
    let client = http2::connect(fixture).await;
    let request = http::Request::get(format!("http://web{path}"))
        .body(())
        .unwrap();
    let (response, _) = client
        .ready()
        .await
        .unwrap()
        .send_request(request, true)
        .unwrap();
    let (body, _) = http2::read_all(response.await.unwrap().into_body())
        .await
        .unwrap();
    String::from_utf8(body).unwrap()
}

/// An authorizer gets the path that the endpoint gets, in its only normalized form.
#[tokio::test]
async fn authorizers_are_shown_the_path_that_is_forwarded() {
    let (authz, seen) = authorizer().await;
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    fixture.apply(vec![
        service_with_id(TENANT, "authz", 2, "10.96.0.2", &[(80, AppProtocol::Grpc)]),
        Resource::Workload(pod(TENANT, "authz-0", authz.address, "authz")),
        policy(
            "ask",
            AuthorizationAction::Custom(named("ext-authz")),
            vec![PolicyRule::default()],
        ),
        asking(false),
    ]);
    let shown = || {
        seen.last
            .lock()
            .unwrap()
            .take()
            .map(|checks| checks.attributes.unwrap().request.unwrap().http.unwrap())
    };
    for sent in [
        "/%61dmin?q=%2F",
        "//admin?q=%2F",
        "/x/../admin?q=%2F",
        "/x/%2e%2e/admin?q=%2F",
    ] {
        for over_http2 in [false, true] {
            let text = if over_http2 {
                get_over_http2(&fixture, sent).await
            } else {
                HttpClient::get(fixture.web, sent).await.text()
            };
            assert_eq!(
                shown().unwrap().path,
                "/admin?q=%2F",
                "{sent}, HTTP/2 {over_http2}"
            );
            assert!(
                text.starts_with("GET /admin?q=%2F HTTP/1.1\r\n"),
                "{sent}, HTTP/2 {over_http2}: {text}"
            );
        }
    }
    for sent in ["/a%2f..%2fadmin", "/x/..;/admin", "/x\\admin"] {
        assert_eq!(
            HttpClient::get(fixture.web, sent).await.status,
            400,
            "{sent}"
        );
        assert!(
            shown().is_none(),
            "{sent}: a path that can be read in two ways is not sent on"
        );
    }
    // Headers that only proxies set are neither sent to the authorizer nor forwarded.
    let words = "X-Forwarded-Client-Cert: URI=spiffe://alpha/x\r\nX-Envoy-Internal: true\r\nX-Forwarded-Proto: https\r\n";
    let text = HttpClient::once(
        fixture.web,
        &format!("GET /x HTTP/1.1\r\nHost: web\r\n{words}\r\n"),
    )
    .await
    .text()
    .to_ascii_lowercase();
    let headers = shown().unwrap().headers;
    assert!(
        !headers.contains_key("x-forwarded-client-cert")
            && !headers.contains_key("x-envoy-internal"),
        "{headers:?}"
    );
    assert_eq!(headers["x-forwarded-proto"], "http");
    assert!(
        !text.contains("client-cert")
            && !text.contains("envoy")
            && text.contains("x-forwarded-proto: http\r\n"),
        "{text}"
    );
}

/// Starts a gateway whose authorizer gets 64 KiB of each body, within `time`.
async fn showing_bodies(time: Duration, origin: &OriginServer) -> (GatewayFixture, OriginServer) {
    let (authz, _) = authorizer().await;
    let limits = GatewayLimits {
        body_bytes: 64 << 20,
        ..GatewayLimits::default()
    };
    let fixture = GatewayFixture::new(
        EngineSetup {
            limits,
            times: GatewayTimeouts {
                shown_body: time,
                ..GatewayTimeouts::default()
            },
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    let Resource::Authorizer(authorizer) = asking(false) else {
        panic!("an authorizer")
    };
    fixture.apply(vec![
        service_with_id(TENANT, "authz", 2, "10.96.0.2", &[(80, AppProtocol::Grpc)]),
        Resource::Workload(pod(TENANT, "authz-0", authz.address, "authz")),
        policy(
            "ask",
            AuthorizationAction::Custom(named("ext-authz")),
            vec![PolicyRule::default()],
        ),
        Resource::Authorizer(Authorizer {
            body_bytes: 64 << 10,
            ..authorizer
        }),
    ]);
    (fixture, authz)
}

/// Each byte used to restart the timeout: a client that sent one byte per minute could leave a
/// request open for months without authorization.
#[tokio::test]
async fn client_that_trickles_a_shown_body_is_refused_in_time() {
    let origin = OriginServer::echo().await;
    let (fixture, _authz) = showing_bodies(Duration::from_millis(1500), &origin).await;
    let began = std::time::Instant::now();
    let mut client = HttpClient::connect(fixture.web).await;
    client
        .send(b"POST /x HTTP/1.1\r\nHost: web\r\nContent-Length: 65536\r\n\r\n")
        .await;
    let slow = http2::connect(&fixture).await;
    let request = http::Request::post("http://web/x").body(()).unwrap();
    let (response, mut send) = slow
        .ready()
        .await
        .unwrap()
        .send_request(request, false)
        .unwrap();
    for _ in 0..40 {
        client.send(b"x").await;
        let _ = send.send_data(Bytes::from_static(b"x"), false);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(client.answer().await.unwrap().status, 408);
    assert_eq!(response.await.unwrap().status(), 408);
    canal_timing::assert_time(
        "time until trickled bodies are refused",
        began.elapsed(),
        Duration::from_secs(10),
    );
    assert_eq!(
        fixture.metric("canal_gateway_timeouts_total", &["what=\"shown_body\""]),
        2.0
    );
    assert_eq!(origin.requests(), 0);
}

/// The client sends its body only after `100`. The endpoint, which would send `100`, gets the
/// request only after the authorizer's check.
#[tokio::test]
async fn clients_that_expect_100_get_it_when_an_authorizer_needs_the_body() {
    let origin = OriginServer::echo().await;
    let (fixture, _authz) =
        showing_bodies(canal_timing::deadline(Duration::from_secs(15)), &origin).await;
    let mut client = HttpClient::connect(fixture.web).await;
    client
        .send(b"POST /x HTTP/1.1\r\nHost: web\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        .await;
    assert_eq!(client.answer().await.unwrap().status, 100);
    client.send(b"hello").await;
    assert!(client.answer().await.unwrap().text().ends_with("hello"));

    let client = http2::connect(&fixture).await;
    let request = http::Request::post("http://web/x")
        .header("expect", "100-continue")
        .header("content-length", "5")
        .body(())
        .unwrap();
    let (mut response, mut send) = client
        .ready()
        .await
        .unwrap()
        .send_request(request, false)
        .unwrap();
    let interim = std::future::poll_fn(|cx| response.poll_informational(cx))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(interim.status(), 100);
    send.send_data(Bytes::from_static(b"hello"), true).unwrap();
    let (body, _) = http2::read_all(response.await.unwrap().into_body())
        .await
        .unwrap();
    assert!(
        body.ends_with(b"hello"),
        "{}",
        String::from_utf8_lossy(&body)
    );
}

#[tokio::test]
async fn shown_bodies_have_a_budget_that_is_given_back() {
    let origin = OriginServer::echo().await;
    let (fixture, _authz) =
        showing_bodies(Duration::from_secs(15) * canal_timing::slack(), &origin).await;
    // Each client uses 128 KiB, for the buffered bytes and their copy for the authorizer. A
    // tenant's share is 16 MiB.
    let mut clients = Vec::new();
    for _ in 0..128 {
        let mut client = HttpClient::connect(fixture.web).await;
        client
            .send(b"POST /x HTTP/1.1\r\nHost: web\r\nContent-Length: 65536\r\n\r\nx")
            .await;
        clients.push(client);
    }
    fixture
        .until("canal_gateway_accepted_connections_total", &[], 128.0)
        .await;
    let refused = || {
        fixture.metric(
            "canal_gateway_refused_requests_total",
            &["reason=\"tenant_body_bytes\"", "side=\"gateway\""],
        )
    };
    until_small_body_gets(&fixture, 429).await;
    assert!(refused() >= 1.0);
    assert_eq!(
        HttpClient::get(fixture.web, "/x").await.status,
        200,
        "what has no body needs no budget"
    );
    clients.pop();
    until_small_body_gets(&fixture, 200).await;
    // 127 bodies use more than 8 MiB and less than 32 MiB.
    fixture.apply(vec![tenant_with_body_share(Share::Amount(8 << 20))]);
    until_small_body_gets(&fixture, 429).await;
    fixture.apply(vec![tenant_with_body_share(Share::Amount(32 << 20))]);
    until_small_body_gets(&fixture, 200).await;
}

fn tenant_with_body_share(share: Share) -> Resource {
    let Resource::Tenant(mut alpha) = tenant(TENANT, 1) else {
        panic!("a tenant")
    };
    alpha.shares.set(ShareKind::GatewayBodyBytes, share);
    Resource::Tenant(alpha)
}

/// Sends requests with a small body until the response has status `want`.
async fn until_small_body_gets(fixture: &GatewayFixture, want: u16) {
    let started = std::time::Instant::now();
    loop {
        let status = HttpClient::once(
            fixture.web,
            "POST /x HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\nhello",
        )
        .await
        .status;
        if status == want {
            return;
        }
        let waited = started.elapsed();
        assert!(
            waited < canal_timing::deadline(Duration::from_secs(5)),
            "{status}, and not {want}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns the body that the authorizer was shown last, and whether it was only a part.
fn shown_body(seen: &AuthorizerCalls) -> (String, String) {
    let http = seen
        .last
        .lock()
        .unwrap()
        .take()
        .unwrap()
        .attributes
        .unwrap()
        .request
        .unwrap()
        .http
        .unwrap();
    (http.body, http.headers["x-envoy-auth-partial-body"].clone())
}

#[tokio::test]
async fn authorizers_are_shown_bodies_that_arrive_whole_all_the_same() {
    let (authz, seen) = authorizer().await;
    let (one, two) = (OriginServer::echo().await, http2::origin(http2::echo).await);
    for (protocol, origin) in [
        (AppProtocol::Http1, one.address),
        (AppProtocol::Http2, two.address),
    ] {
        let fixture = GatewayFixture::new(
            EngineSetup {
                protocol,
                ..EngineSetup::default()
            },
            &[origin],
        );
        let Resource::Authorizer(authorizer) = asking(false) else {
            panic!("an authorizer")
        };
        fixture.apply(vec![
            service_with_id(TENANT, "authz", 2, "10.96.0.2", &[(80, AppProtocol::Grpc)]),
            Resource::Workload(pod(TENANT, "authz-0", authz.address, "authz")),
            policy(
                "ask",
                AuthorizationAction::Custom(named("ext-authz")),
                vec![PolicyRule::default()],
            ),
            // Ten bytes are less than `hello world, so`, so that one of the bodies below is cut
            // off.
            Resource::Authorizer(Authorizer {
                body_bytes: 10,
                ..authorizer
            }),
        ]);
        let shown = || shown_body(&seen);
        let length = "POST /x HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\nhello";
        let chunked = "POST /x HTTP/1.1\r\nHost: web\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nhello \r\n9\r\nworld, so\r\n0\r\n\r\n";
        let expects =
            "POST /x HTTP/1.1\r\nHost: web\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n";
        // Body as one length, in two chunks beyond the limit, and after an interim response.
        for (request, more, body, want) in [
            (length, "", "hello", ("hello", "false")),
            (chunked, "", "hello world, so", ("hello worl", "true")),
            (expects, "hello", "hello", ("hello", "false")),
        ] {
            let mut client = HttpClient::connect(fixture.web).await;
            client.send(request.as_bytes()).await;
            if !more.is_empty() {
                assert_eq!(client.answer().await.unwrap().status, 100);
                client.send(more.as_bytes()).await;
            }
            let mut answer = client.answer().await.unwrap();
            // An HTTP/1.1 endpoint may send `100` as well.
            while answer.status == 100 {
                answer = client.answer().await.unwrap();
            }
            assert!(
                answer.status == 200 && answer.text().ends_with(body),
                "{protocol:?} {request}: {}",
                answer.text()
            );
            let (text, partial) = shown();
            assert_eq!((text.as_str(), partial.as_str()), want, "{request}");
        }
        // One MiB cannot have arrived whole when the first ten bytes are sent to the authorizer.
        let data = crate::origin::pattern(0, 1 << 20);
        let client = http2::connect(&fixture).await;
        let request = http::Request::post("http://web/x").body(()).unwrap();
        let (response, mut send) = client
            .ready()
            .await
            .unwrap()
            .send_request(request, false)
            .unwrap();
        http2::send_all(&mut send, data.clone().into(), true)
            .await
            .unwrap();
        let (body, _) = http2::read_all(response.await.unwrap().into_body())
            .await
            .unwrap();
        assert!(body.ends_with(&data), "{protocol:?}");
        assert_eq!(shown().1, "true");
    }
}

#[tokio::test]
async fn ext_authz_checks_are_bounded_and_made_once_per_request() {
    let (origin, (authz, seen)) = (OriginServer::echo().await, authorizer().await);
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    fixture.apply(vec![
        service_with_id(TENANT, "authz", 2, "10.96.0.2", &[(80, AppProtocol::Grpc)]),
        Resource::Workload(pod(TENANT, "authz-0", authz.address, "authz")),
        policy(
            "ask",
            AuthorizationAction::Custom(named("ext-authz")),
            vec![PolicyRule::default()],
        ),
        asking(false),
    ]);
    // Two endpoints are dead. A request that is retried under the same policies is not checked a
    // second time.
    let dead = || async {
        tokio::net::TcpListener::bind(crate::fixture::LOCALHOST)
            .await
            .unwrap()
            .local_addr()
            .unwrap()
    };
    fixture.apply(vec![
        Resource::Workload(pod(TENANT, "web-8", dead().await, "web")),
        Resource::Workload(pod(TENANT, "web-9", dead().await, "web")),
    ]);
    // One endpoint in three lives, so that ten requests almost surely meet a dead one first.
    for _ in 0..10 {
        assert_eq!(HttpClient::get(fixture.web, "/x").await.status, 200);
    }
    assert_eq!(seen.checks.load(SeqCst), 10);
    let web = fixture.web;
    // More than the 256 checks that a tenant may have in flight.
    let late: Vec<_> = (0..300)
        .map(|_| tokio::spawn(async move { HttpClient::get(web, "/late").await.status }))
        .collect();
    // The authorizer never answers `/late`. A check beyond the limit is not even sent, and one that
    // was sent times out; both deny.
    for one in late {
        assert_eq!(one.await.unwrap(), 403);
    }
    let failed = |why: &str| {
        fixture.metric(
            "canal_authorizer_requests_total",
            &[&format!("result=\"{why}\"")],
        )
    };
    // How many checks are beyond the limit depends on how many time out while others are still
    // sent.
    assert!(
        failed("authorizer_busy") > 0.0
            && failed("authorizer_busy") + failed("authorizer_timeout") == 300.0
    );
    assert_eq!(
        HttpClient::get(fixture.web, "/x").await.status,
        200,
        "there is room again"
    );
}
