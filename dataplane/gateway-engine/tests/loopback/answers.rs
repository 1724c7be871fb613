//! Answers that the gateway gives itself, in every pairing of HTTP versions: redirects and direct
//! responses. No endpoint receives the request, and the policies of the service authorize it.

use std::net::SocketAddr;

use canal_model::authorization::{Attribute, AttributeMatch, AuthorizationAction, Clause};
use canal_model::program::{AppProtocol, Resource, RouteAction};
use canal_model::route_filters::{
    DirectResponse, HeaderModifier, PathRewrite, RedirectPort, RouteAnswer, RouteFilters,
    UrlRedirect, UrlScheme,
};
use http::Request;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, prefix, route, to};
use crate::http2;
use crate::origin::OriginServer;
use crate::policies::{clause, policy, rule};

fn answer(name: &str, place: u32, path: &str, answer: RouteAnswer) -> Resource {
    let action = RouteAction::Answer(Box::new(answer));
    route("web", name, place, prefix(path), action)
}

/// Starts a gateway that answers requests below `/old/` and some other paths, and forwards the rest.
fn fixture(protocol: AppProtocol, endpoints: &[SocketAddr]) -> GatewayFixture {
    let setup = EngineSetup {
        protocol,
        ..EngineSetup::default()
    };
    let fixture = GatewayFixture::new(setup, endpoints);
    let redirect = RouteAnswer::Redirect(UrlRedirect {
        status: 307,
        scheme: Some(UrlScheme::Https),
        host: Some("other.example".to_owned()),
        port: RedirectPort::Number(8443),
        path: Some(PathRewrite::Prefix("/new/".to_owned())),
        query: None,
    });
    let moved = RouteAnswer::Redirect(UrlRedirect {
        status: 301,
        scheme: None,
        host: None,
        port: RedirectPort::OfHost,
        path: Some(PathRewrite::Full("/there".to_owned())),
        query: Some("own=1".to_owned()),
    });
    let direct = |status: u16, body: &[u8]| {
        RouteAnswer::Direct(DirectResponse {
            status,
            body: body.to_vec(),
        })
    };
    let mut closed = answer("closed", 1, "/closed", direct(503, b"we are closed"));
    if let Resource::Route(rule) = &mut closed {
        rule.filters = Some(Box::new(RouteFilters {
            response_headers: HeaderModifier {
                set: vec![("retry-after".to_owned(), "7".to_owned())],
                ..HeaderModifier::default()
            },
            ..RouteFilters::default()
        }));
    }
    let split = RouteAction::Split(vec![to("web", &[], 1)]);
    fixture.apply(vec![
        answer("old", 0, "/old/", redirect),
        closed,
        answer("empty", 2, "/empty", direct(204, b"")),
        answer("moved", 3, "/moved", moved),
        // Bytes that are no text.
        answer("bytes", 4, "/bytes", direct(200, b"\xff\x00")),
        route("web", "plain", 5, prefix("/"), split),
    ]);
    fixture
}

/// Sends a request; returns the status, the head in lower case, and the body.
async fn exchange(
    fixture: &GatewayFixture,
    over_http2: bool,
    method: &str,
    path: &str,
) -> (u16, String, String) {
    if !over_http2 {
        let request = format!("{method} {path} HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n");
        let response = HttpClient::once(fixture.web, &request).await;
        let head = response.head.to_ascii_lowercase();
        let status = head[9..12].parse().unwrap();
        return (status, head, response.text());
    }
    let request = Request::builder()
        .method(method)
        .uri(format!("http://web{path}"))
        .body(())
        .unwrap();
    http2::exchange(fixture, request).await
}

async fn check(endpoint: SocketAddr, protocol: AppProtocol, over_http2: bool) {
    let case = format!("{protocol:?}, client with HTTP/2: {over_http2}");
    let fixture = fixture(protocol, &[endpoint]);
    let (status, head, body) = exchange(&fixture, over_http2, "GET", "/old/x?q=/old/").await;
    let location = "location: https://other.example:8443/new/x?q=/old/\r\n";
    assert!(status == 307 && head.contains(location), "{case}: {head}");
    assert!(
        body.is_empty() && head.contains("content-length: 0") && !head.contains("content-type"),
        "{case}: {head}{body}"
    );
    let (status, _, _) = exchange(&fixture, over_http2, "GET", "/old/../x").await;
    assert_eq!(status, 200, "{case}: the normal path is not below /old/");
    let (status, head, body) = exchange(&fixture, over_http2, "GET", "/closed").await;
    assert_eq!((status, body.as_str()), (503, "we are closed"), "{case}");
    for there in [
        "retry-after: 7\r\n",
        "content-type: text/plain\r\n",
        "content-length: 13\r\n",
    ] {
        assert!(head.contains(there), "{case}: no {there:?} in {head}");
    }
    let (status, head, body) = exchange(&fixture, over_http2, "HEAD", "/closed").await;
    assert!(
        status == 503 && body.is_empty() && head.contains("content-length: 13\r\n"),
        "{case}: {head}{body}"
    );
    let (status, head, body) = exchange(&fixture, over_http2, "GET", "/empty").await;
    assert!(
        status == 204 && body.is_empty() && !head.contains("content-length"),
        "{case}: {head}{body}"
    );
    let (status, head, _) = exchange(&fixture, over_http2, "GET", "/moved/x?a=2").await;
    let location = "location: http://web/there?own=1\r\n";
    assert!(status == 301 && head.contains(location), "{case}: {head}");
    let (status, head, _) = exchange(&fixture, over_http2, "HEAD", "/bytes").await;
    let is_whole = head.contains("content-length: 2\r\n");
    assert!(status == 200 && is_whole, "{case}: {head}");
    let (status, _, _) = exchange(&fixture, over_http2, "GET", "/plain").await;
    assert_eq!(status, 200, "{case}");
}

#[tokio::test]
async fn the_gateway_answers_in_every_pairing_of_versions() {
    let (one, two) = (
        OriginServer::fixed("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await,
        http2::origin(http2::echo).await,
    );
    for over_http2 in [false, true] {
        check(one.address, AppProtocol::Http1, over_http2).await;
        check(two.address, AppProtocol::Http2, over_http2).await;
    }
}

#[tokio::test]
async fn a_service_without_endpoints_is_answered_for() {
    let fixture = fixture(AppProtocol::Http1, &[]);
    let (status, _, _) = exchange(&fixture, false, "GET", "/closed").await;
    assert_eq!(status, 503);
    let (status, head, _) = exchange(&fixture, false, "GET", "/old/").await;
    assert!(status == 307 && head.contains("/new/\r\n"), "{head}");
}

#[tokio::test]
async fn a_connection_serves_requests_after_an_answer() {
    let fixture = fixture(AppProtocol::Http1, &[]);
    let mut client = HttpClient::connect(fixture.web).await;
    for _ in 0..3 {
        client
            .send(b"GET /closed HTTP/1.1\r\nHost: web\r\n\r\n")
            .await;
        let response = client.answer().await.unwrap();
        assert_eq!(response.text(), "we are closed");
    }
}

#[tokio::test]
async fn policies_of_the_service_judge_what_the_gateway_answers() {
    let origin = OriginServer::fixed("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    for endpoints in [&[][..], &[origin.address]] {
        let fixture = fixture(AppProtocol::Http1, endpoints);
        let denied = vec![rule(vec![clause(Attribute::Path, &["/closed"])])];
        fixture.apply(vec![policy("no", AuthorizationAction::Deny, denied)]);
        for over_http2 in [false, true] {
            let (status, _, body) = exchange(&fixture, over_http2, "GET", "/closed").await;
            assert_eq!((status, body.as_str()), (403, "RBAC: access denied\n"));
            let (status, _, _) = exchange(&fixture, over_http2, "GET", "/old/").await;
            assert_eq!(status, 307);
        }
        // No endpoint receives the request, so a policy that needs its port denies.
        let port = rule(vec![Clause {
            attribute: Attribute::DestinationPort,
            any: vec![AttributeMatch::Port(1)],
            none: vec![],
        }]);
        fixture.apply(vec![policy("no", AuthorizationAction::Deny, vec![port])]);
        let (status, _, _) = exchange(&fixture, false, "GET", "/closed").await;
        assert_eq!(status, 403);
    }
    assert_eq!(origin.requests(), 0);
}
