//! Authorizers of rules, over HTTP and gRPC: what they receive, what the
//! endpoint and the client receive, and that nothing passes without a decision.

use canal_model::authorization::AuthorizationAction;
use canal_model::program::{AppProtocol, Resource, RouteAction};
use canal_model::route_authorizer::{RouteAuthorizer, RouteAuthorizerProtocol};
use canal_model::route_filters::{DirectResponse, HeaderModifier, RouteAnswer, RouteFilters};
use http::Request;

use crate::authorizers::authorizer;
use crate::client::HttpClient;
use crate::fixture::{
    EngineSetup, GatewayFixture, TENANT, key, pod, prefix, route, service_with_id, to,
};
use crate::http2;
use crate::origin::OriginServer;
use crate::policies::{policy, rule};

pub(crate) const CHECKS: &str = "canal_authorizer_requests_total";

/// Starts a server that decides by the path, and echoes the check in a header.
pub(crate) async fn http1_server() -> OriginServer {
    OriginServer::each(|mut peer| async move {
        while let Some((head, body)) = peer.request().await {
            let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
            let check = head.replace("\r\n", "|") + &String::from_utf8_lossy(&body);
            let answer = match path.split('?').next().unwrap_or_default() {
                "/auth/no" => {
                    "HTTP/1.1 401 No\r\nwww-authenticate: Basic\r\nset-cookie: a=1\r\nset-cookie: b=2\r\ncontent-length: 7\r\n\r\nsign in".to_owned()
                }
                "/auth/broken" => "HTTP/1.1 503 Oops\r\ncontent-length: 0\r\n\r\n".to_owned(),
                "/auth/junk" => "no HTTP\r\n\r\n".to_owned(),
                "/auth/late" => return std::future::pending().await,
                _ => format!(
                    "HTTP/1.1 200 OK\r\nx-user: ann\r\nx-other: 1\r\nx-check: {check}\r\ncontent-length: 2\r\n\r\nok"
                ),
            };
            peer.write(answer.as_bytes()).await;
        }
    })
    .await
}

/// Starts a server for HTTP/2 that denies `/auth/no`.
pub(crate) async fn http2_server() -> OriginServer {
    http2::origin(|request, mut respond| async move {
        let status = if request.uri().path() == "/auth/no" {
            401
        } else {
            200
        };
        let response = http::Response::builder().status(status);
        let response = response.header("x-user", "ann").body(()).unwrap();
        let _ = respond.send_response(response, true);
    })
    .await
}

pub(crate) fn over_http(body_bytes: u32) -> RouteAuthorizer {
    RouteAuthorizer {
        service: key(TENANT, "auth"),
        port: 80,
        protocol: RouteAuthorizerProtocol::Http {
            path_prefix: "/auth".to_owned(),
            response_headers: vec!["x-user".to_owned(), "x-check".to_owned()],
        },
        headers: vec!["x-shown".to_owned()],
        body_bytes,
    }
}

fn checked_by(authorizer: RouteAuthorizer) -> Option<Box<RouteFilters>> {
    Some(Box::new(RouteFilters {
        authorizer: Some(Box::new(authorizer)),
        // A header of the server stays as it is.
        request_headers: HeaderModifier {
            set: vec![("x-user".to_owned(), "forged".to_owned())],
            ..HeaderModifier::default()
        },
        ..RouteFilters::default()
    }))
}

/// Starts a gateway with the server, whose rule for all paths asks it.
pub(crate) fn fixture(
    origin: &OriginServer,
    (server, protocol): (&OriginServer, AppProtocol),
    authorizer: RouteAuthorizer,
) -> GatewayFixture {
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let mut checked = route(
        "web",
        "checked",
        0,
        prefix("/"),
        RouteAction::Split(vec![to("web", &[], 1)]),
    );
    if let Resource::Route(rule) = &mut checked {
        rule.filters = checked_by(authorizer);
    }
    fixture.apply(vec![
        service_with_id(TENANT, "auth", 7, "10.96.0.7", &[(80, protocol)]),
        Resource::Workload(pod(TENANT, "auth-0", server.address, "auth")),
        checked,
    ]);
    fixture
}

async fn get(fixture: &GatewayFixture, over_http2: bool, path: &str) -> (u16, String, String) {
    if over_http2 {
        let request = Request::get(format!("http://web{path}"))
            .header("x-shown", "1")
            .header("x-hidden", "1")
            .header("authorization", "Bearer t")
            .header("x-user", "mallory")
            .body(())
            .unwrap();
        let (status, head, body) = http2::exchange(fixture, request).await;
        return (status, head.to_ascii_lowercase(), body);
    }
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: web\r\nX-Shown: 1\r\nX-Hidden: 1\r\nAuthorization: Bearer t\r\nX-User: mallory\r\nConnection: close\r\n\r\n"
    );
    let response = HttpClient::once(fixture.web, &request).await;
    (
        response.status,
        response.head.to_ascii_lowercase(),
        response.text(),
    )
}

#[tokio::test]
async fn a_server_over_http_decides_in_every_version() {
    let (origin, server) = (OriginServer::echo().await, http1_server().await);
    let fixture = fixture(&origin, (&server, AppProtocol::Http1), over_http(0));
    for over_http2 in [false, true] {
        let (status, _, body) = get(&fixture, over_http2, "/x?q").await;
        let body = body.to_ascii_lowercase();
        assert_eq!(status, 200, "{body}");
        assert!(body.starts_with("get /x?q http/1.1"), "{body}");
        for there in [
            "x-user: ann",
            "x-hidden: 1",
            "x-check: get /auth/x?q http/1.1|host: web|",
            "|content-length: 0|",
            "|x-shown: 1|",
            "|authorization: bearer t|",
        ] {
            assert!(body.contains(there), "no {there:?} in {body}");
        }
        for gone in ["x-other", "mallory", "forged", "|x-hidden"] {
            assert!(!body.contains(gone), "{gone:?} in {body}");
        }
        let before = origin.requests();
        let (status, head, body) = get(&fixture, over_http2, "/no").await;
        assert_eq!((status, body.as_str()), (401, "sign in"));
        for there in [
            "www-authenticate: basic",
            "set-cookie: a=1",
            "set-cookie: b=2",
        ] {
            assert!(head.contains(there), "no {there:?} in {head}");
        }
        for path in ["/broken", "/junk"] {
            assert_eq!(get(&fixture, over_http2, path).await.0, 403, "{path}");
        }
        assert_eq!(origin.requests(), before, "nothing passed");
    }
    // Each once for either version of the client.
    for (result, count) in [
        ("ok", 2.0),
        ("denied", 2.0),
        ("authorizer_status", 2.0),
        ("authorizer_malformed", 2.0),
    ] {
        let labels = [format!("result=\"{result}\"")];
        let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
        assert_eq!(fixture.metric(CHECKS, &labels), count, "{result}");
    }
}

#[tokio::test]
async fn the_server_and_the_endpoint_receive_the_only_form_of_a_path() {
    let (origin, server) = (OriginServer::echo().await, http1_server().await);
    let fixture = fixture(&origin, (&server, AppProtocol::Http1), over_http(0));
    for over_http2 in [false, true] {
        let (status, _, body) = get(&fixture, over_http2, "/a/../x//y?q").await;
        let body = body.to_ascii_lowercase();
        assert_eq!(status, 200, "{body}");
        assert!(body.starts_with("get /x/y?q http/1.1"), "{body}");
        assert!(
            body.contains("x-check: get /auth/x/y?q http/1.1|"),
            "{body}"
        );
        let (passed, checked) = (origin.requests(), server.requests());
        for path in ["/a/../no", "//no", "/%6eo", "/no/."] {
            assert!(
                matches!(get(&fixture, over_http2, path).await.0, 200 | 401),
                "{path}"
            );
        }
        assert_eq!(server.requests(), checked + 4);
        // A server could take what is behind its prefix for another path of its own.
        for path in ["/../no", "/..%2fno", "/%2e%2e/auth/x"] {
            assert_eq!(get(&fixture, over_http2, path).await.0, 400, "{path}");
        }
        assert_eq!(server.requests(), checked + 4);
        assert!(origin.requests() <= passed + 1);
    }
}

#[tokio::test]
async fn the_address_of_the_client_is_the_last_that_a_server_receives() {
    let origin = OriginServer::echo().await;
    let (server, (grpc, calls)) = (http1_server().await, authorizer().await);
    let shows = |authorizer| RouteAuthorizer {
        headers: vec!["x-forwarded-for".to_owned()],
        ..authorizer
    };
    let over_grpc = RouteAuthorizer {
        protocol: RouteAuthorizerProtocol::Grpc,
        ..over_http(0)
    };
    let fixture_http = fixture(&origin, (&server, AppProtocol::Http1), shows(over_http(0)));
    let fixture_grpc = fixture(&origin, (&grpc, AppProtocol::Grpc), shows(over_grpc));
    // The client writes two lines of its own.
    let all = "192.0.2.9, 192.0.2.8, 127.0.0.1";
    for over_http2 in [false, true] {
        for fixture in [&fixture_http, &fixture_grpc] {
            let body = if over_http2 {
                let request = Request::get("http://web/x")
                    .header("x-forwarded-for", "192.0.2.9")
                    .header("x-forwarded-for", "192.0.2.8");
                http2::exchange(fixture, request.body(()).unwrap()).await.2
            } else {
                let lines = "X-Forwarded-For: 192.0.2.9\r\nX-Forwarded-For: 192.0.2.8\r\n";
                let request = format!("GET /x HTTP/1.1\r\nHost: web\r\n{lines}\r\n");
                HttpClient::once(fixture.web, &request).await.text()
            };
            let body = body.to_ascii_lowercase();
            assert!(
                body.contains(&format!("\nx-forwarded-for: {all}\r\n")),
                "{body}"
            );
            if std::ptr::eq(fixture, &fixture_http) {
                assert!(
                    body.contains(&format!("|x-forwarded-for: {all}|")),
                    "{body}"
                );
            } else {
                assert_eq!(calls.last_headers()["x-forwarded-for"], all);
            }
        }
    }
}

#[tokio::test]
async fn a_connection_to_an_authorizer_carries_several_checks() {
    let (origin, server) = (OriginServer::echo().await, http1_server().await);
    let fixture = fixture(&origin, (&server, AppProtocol::Http1), over_http(0));
    let mut client = HttpClient::connect(fixture.web).await;
    for _ in 0..3 {
        client.send(b"GET /x HTTP/1.1\r\nHost: web\r\n\r\n").await;
        assert_eq!(client.answer().await.unwrap().status, 200);
    }
    assert_eq!((server.connections(), server.requests()), (1, 3));
}

/// A check was sent a second time on a new connection after any bad answer on an idle one.
#[tokio::test]
async fn only_a_closed_connection_repeats_a_check() {
    let origin = OriginServer::echo().await;
    // The second answer on a connection, and the status and the checks that follow.
    for (second, status, checks) in [
        ("", 200, 3),
        ("no HTTP\r\n\r\n", 403, 2),
        ("HTTP/1.1 200 OK\r\ncontent-le", 403, 2),
    ] {
        let server = OriginServer::each(move |mut peer| async move {
            let first = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
            for answer in [first, second] {
                if peer.request().await.is_none() {
                    return;
                }
                peer.write(answer.as_bytes()).await;
            }
        })
        .await;
        let fixture = fixture(&origin, (&server, AppProtocol::Http1), over_http(0));
        let mut statuses = Vec::new();
        for _ in 0..2 {
            statuses.push(HttpClient::get(fixture.web, "/x").await.status);
        }
        assert_eq!(statuses, [200, status], "{second:?}");
        assert_eq!(server.requests(), checks, "{second:?}");
    }
}

#[tokio::test]
async fn a_server_speaks_http2_or_grpc() {
    let origin = OriginServer::echo().await;
    let server = http2_server().await;
    let fixture_2 = fixture(&origin, (&server, AppProtocol::Http2), over_http(0));
    let (grpc, _) = authorizer().await;
    let over_grpc = RouteAuthorizer {
        protocol: RouteAuthorizerProtocol::Grpc,
        ..over_http(0)
    };
    let fixture_grpc = fixture(&origin, (&grpc, AppProtocol::Grpc), over_grpc);
    for (fixture, denied) in [(fixture_2, 401), (fixture_grpc, 302)] {
        let (status, _, body) = get(&fixture, false, "/x").await;
        assert_eq!(status, 200);
        assert!(body.contains("x-user: ann"), "{body}");
        assert_eq!(get(&fixture, false, "/no").await.0, denied);
    }
}

#[tokio::test]
async fn a_server_receives_bodies_up_to_a_size() {
    let (origin, server) = (OriginServer::echo().await, http1_server().await);
    let fixture = fixture(&origin, (&server, AppProtocol::Http1), over_http(5));
    for (body, status) in [("", 200), ("12345", 200), ("123456", 403)] {
        for framing in ["content-length", "transfer-encoding"] {
            let (fields, text) = match (framing, body.len()) {
                ("content-length", n) => (format!("content-length: {n}"), body.to_owned()),
                (_, 0) => (
                    "transfer-encoding: chunked".to_owned(),
                    "0\r\n\r\n".to_owned(),
                ),
                (_, n) => (
                    "transfer-encoding: chunked".to_owned(),
                    format!("{n:x}\r\n{body}\r\n0\r\n\r\n"),
                ),
            };
            let request = format!(
                "POST /x HTTP/1.1\r\nHost: web\r\n{fields}\r\nConnection: close\r\n\r\n{text}"
            );
            let response = HttpClient::once(fixture.web, &request).await;
            assert_eq!(response.status, status, "{framing} {body:?}");
            if status == 200 {
                let received = response.text();
                let length = format!("|content-length: {}|", body.len());
                assert!(received.contains(&length), "{framing}: {received}");
                assert!(received.ends_with(body), "{framing}: {received}");
            }
        }
    }
    let labels = ["result=\"authorizer_body_too_large\""];
    assert_eq!(fixture.metric(CHECKS, &labels), 2.0);
}

#[tokio::test]
async fn a_server_that_is_not_there_closes_its_rule_alone() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let split = || RouteAction::Split(vec![to("web", &[], 1)]);
    let answer = RouteAction::Answer(Box::new(RouteAnswer::Direct(DirectResponse {
        status: 200,
        body: b"answered".to_vec(),
    })));
    let mut checked = route("web", "checked", 0, prefix("/checked"), split());
    let mut answered = route("web", "answered", 1, prefix("/answered"), answer);
    for rule in [&mut checked, &mut answered] {
        if let Resource::Route(rule) = rule {
            rule.filters = checked_by(over_http(0));
        }
    }
    fixture.apply(vec![
        checked,
        answered,
        route("web", "plain", 2, prefix("/"), split()),
    ]);
    for (path, status) in [("/checked", 403), ("/answered", 403), ("/plain", 200)] {
        assert_eq!(
            HttpClient::get(fixture.web, path).await.status,
            status,
            "{path}"
        );
    }
    let labels = ["result=\"authorizer_no_service\""];
    assert_eq!(fixture.metric(CHECKS, &labels), 2.0);
}

#[tokio::test]
async fn policies_decide_before_the_authorizer_is_called() {
    let (origin, server) = (OriginServer::echo().await, http1_server().await);
    let fixture = fixture(&origin, (&server, AppProtocol::Http1), over_http(0));
    fixture.apply(vec![policy(
        "no",
        AuthorizationAction::Deny,
        vec![rule(vec![])],
    )]);
    assert_eq!(HttpClient::get(fixture.web, "/x").await.status, 403);
    assert_eq!(server.requests(), 0);
}
