//! Cross-origin requests in every pairing of HTTP versions: the answers to preflights, which no
//! endpoint receives, and the headers of other responses.

use std::net::SocketAddr;

use canal_model::authorization::{Attribute, AuthorizationAction};
use canal_model::program::{AppProtocol, Resource, RouteAction};
use canal_model::route_cors::{CorsDialect, CorsList, CorsPolicy, OriginHost, OriginMatch};
use canal_model::route_filters::{HeaderModifier, RouteFilters, UrlScheme};
use http::Request;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, prefix, route, to};
use crate::http2;
use crate::origin::OriginServer;
use crate::policies::{clause, policy, rule};

pub(crate) fn policy_of(dialect: CorsDialect) -> CorsPolicy {
    CorsPolicy {
        origins: vec![
            OriginMatch::Host {
                scheme: UrlScheme::Https,
                host: OriginHost::Suffix(".a.example".to_owned()),
                port: 443,
            },
            OriginMatch::Regex("https://b[0-9]".to_owned()),
        ],
        methods: CorsList::Listed("GET,PUT".to_owned()),
        headers: CorsList::Requested,
        exposed: Some("x-c".to_owned()),
        max_age: Some(5),
        credentials: true,
        dialect,
    }
}

fn fixture(
    protocol: AppProtocol,
    endpoints: &[SocketAddr],
    dialect: CorsDialect,
) -> GatewayFixture {
    let setup = EngineSetup {
        protocol,
        ..EngineSetup::default()
    };
    let fixture = GatewayFixture::new(setup, endpoints);
    let split = RouteAction::Split(vec![to("web", &[], 1)]);
    let mut all = route("web", "all", 0, prefix("/"), split);
    if let Resource::Route(rule) = &mut all {
        rule.cors = Some(Box::new(policy_of(dialect)));
        rule.filters = Some(Box::new(RouteFilters {
            response_headers: HeaderModifier {
                set: vec![("x-of-rule".to_owned(), "1".to_owned())],
                ..HeaderModifier::default()
            },
            ..RouteFilters::default()
        }));
    }
    fixture.apply(vec![all]);
    fixture
}

/// Sends a request; returns the status and the head in lower case.
async fn exchange(
    fixture: &GatewayFixture,
    over_http2: bool,
    method: &str,
    headers: &[(&str, &str)],
) -> (u16, String) {
    if over_http2 {
        let mut request = Request::builder().method(method).uri("http://web/x");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (status, head, _) = http2::exchange(fixture, request.body(()).unwrap()).await;
        return (status, head.to_ascii_lowercase());
    }
    let lines: String = headers
        .iter()
        .map(|(name, value)| format!("{name}: {value}\r\n"))
        .collect();
    let request = format!("{method} /x HTTP/1.1\r\nHost: web\r\n{lines}\r\n");
    let response = HttpClient::once(fixture.web, &request).await;
    (response.status, response.head.to_ascii_lowercase())
}

const METHOD: (&str, &str) = ("Access-Control-Request-Method", "PUT");
const NAMES: (&str, &str) = ("Access-Control-Request-Headers", "x-a, x-b");
const ALLOWED: (&str, &str) = ("Origin", "https://w.a.example");
const OTHER: (&str, &str) = ("Origin", "https://evil.example");

fn check_has(case: &str, head: &str, lines: &[&str]) {
    for line in lines {
        assert!(
            head.contains(&format!("{line}\r\n")),
            "{case}: no {line:?} in {head}"
        );
    }
}

async fn check(origin: &OriginServer, protocol: AppProtocol, over_http2: bool) {
    let case = format!("{protocol:?}, client with HTTP/2: {over_http2}");
    let fixture = fixture(protocol, &[origin.address], CorsDialect::GatewayApi);
    let send = |method: &'static str, headers: Vec<(&'static str, &'static str)>| {
        let fixture = &fixture;
        async move { exchange(fixture, over_http2, method, &headers).await }
    };
    let before = origin.requests();
    let (status, head) = send("OPTIONS", vec![ALLOWED, METHOD, NAMES]).await;
    assert_eq!(status, 200, "{case}");
    check_has(
        &case,
        &head,
        &[
            "access-control-allow-origin: https://w.a.example",
            "access-control-allow-credentials: true",
            "access-control-allow-methods: get,put",
            "access-control-allow-headers: x-a, x-b",
            "access-control-expose-headers: x-c",
            "access-control-max-age: 5",
            "vary: origin",
            "content-length: 0",
        ],
    );
    assert!(!head.contains("content-type"), "{case}: {head}");
    // The origin is not allowed: the preflight is answered, but grants nothing.
    let (status, head) = send("OPTIONS", vec![OTHER, METHOD]).await;
    assert!(
        status == 200 && !head.contains("access-control-") && head.contains("vary: origin\r\n"),
        "{case}: {head}"
    );
    assert_eq!(origin.requests(), before, "{case}: no endpoint gets it");
    // The first origin matches the suffix of the policy, the second its regex.
    for allowed in ["https://w.a.example", "https://b7"] {
        let (status, head) = send("GET", vec![("Origin", allowed)]).await;
        assert_eq!(status, 200, "{case}");
        let allowed = format!("access-control-allow-origin: {allowed}");
        check_has(
            &case,
            &head,
            &[
                &allowed,
                "access-control-allow-credentials: true",
                "access-control-expose-headers: x-c",
                "vary: origin",
                "x-of-rule: 1",
            ],
        );
        assert!(!head.contains("allow-methods"), "{case}: {head}");
    }
    // An OPTIONS request without these headers is the application's, as are other origins' requests.
    for headers in [vec![], vec![OTHER], vec![ALLOWED]] {
        let (status, head) = send("OPTIONS", headers.clone()).await;
        assert!(
            status == 200 && head.contains("x-of-rule: 1\r\n") && head.contains("vary: origin\r\n"),
            "{case}: {head}"
        );
        assert_eq!(
            head.contains("access-control-allow-origin"),
            headers == [ALLOWED],
            "{case}: {head}"
        );
    }
}

#[tokio::test]
async fn preflights_are_answered_and_responses_shared_in_all_pairings_of_versions() {
    let (one, two) = (
        OriginServer::fixed("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await,
        http2::origin(http2::echo).await,
    );
    for over_http2 in [false, true] {
        check(&one, AppProtocol::Http1, over_http2).await;
        check(&two, AppProtocol::Http2, over_http2).await;
    }
}

#[tokio::test]
async fn preflights_of_other_origins_are_forwarded_or_answered_as_istio_says() {
    let origin = OriginServer::fixed("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    let forward = fixture(
        AppProtocol::Http1,
        &[origin.address],
        CorsDialect::IstioForward,
    );
    let ignore = fixture(
        AppProtocol::Http1,
        &[origin.address],
        CorsDialect::IstioIgnore,
    );
    let (status, head) = exchange(&forward, false, "OPTIONS", &[OTHER, METHOD]).await;
    assert!(
        status == 200 && head.contains("x-of-rule: 1\r\n") && !head.contains("access-control-"),
        "{head}"
    );
    assert_eq!(origin.requests(), 1);
    let (status, head) = exchange(&ignore, false, "OPTIONS", &[OTHER, METHOD]).await;
    assert!(
        status == 200 && !head.contains("allow-origin") && head.contains("max-age: 5\r\n"),
        "{head}"
    );
    let (_, head) = exchange(&ignore, false, "OPTIONS", &[ALLOWED, METHOD]).await;
    assert!(head.contains("allow-origin: https://w.a.example\r\n"));
    assert_eq!(origin.requests(), 1);
}

#[tokio::test]
async fn a_preflight_needs_no_endpoint_and_is_authorized() {
    let fixture = fixture(AppProtocol::Http1, &[], CorsDialect::GatewayApi);
    for over_http2 in [false, true] {
        let (status, _) = exchange(&fixture, over_http2, "OPTIONS", &[ALLOWED, METHOD]).await;
        assert_eq!(status, 200);
    }
    let denied = vec![rule(vec![clause(Attribute::Method, &["OPTIONS"])])];
    fixture.apply(vec![policy("no", AuthorizationAction::Deny, denied)]);
    for over_http2 in [false, true] {
        let (status, head) = exchange(&fixture, over_http2, "OPTIONS", &[ALLOWED, METHOD]).await;
        assert!(status == 403 && !head.contains("access-control-"), "{head}");
    }
}
