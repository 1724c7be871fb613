//! Filters of a rule, in every pairing of HTTP versions: what the endpoint receives, and what the
//! client receives. A rule without filters changes nothing.

use canal_model::limits::SUBSTITUTED_PATH_BYTES_MAX;
use canal_model::program::{AppProtocol, Backend, Resource, RouteAction};
use canal_model::route_filters::{
    HeaderModifier, PathRewrite, RegexSubstitution, RouteFilters, UrlRewrite,
};
use http::Request;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, prefix, route, to};
use crate::http2;
use crate::origin::OriginServer;

fn pair(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

fn filters() -> RouteFilters {
    RouteFilters {
        request_headers: HeaderModifier {
            set: vec![pair("x-env", "canary")],
            add: vec![pair("x-list", "added")],
            remove: vec!["x-internal".to_owned()],
        },
        response_headers: HeaderModifier {
            set: vec![pair("cache-control", "no-store")],
            add: vec![pair("x-served", "by-canal")],
            remove: vec!["x-from".to_owned()],
        },
        rewrite: UrlRewrite {
            host: Some("other.example:8080".to_owned()),
            path: Some(PathRewrite::Prefix("/new/".to_owned())),
            path_regex: None,
        },
        authorizer: None,
    }
}

/// Starts a gateway whose rule for `/old/` has filters, and whose rule for the rest has none.
fn fixture(protocol: AppProtocol, origin: &OriginServer) -> GatewayFixture {
    let setup = EngineSetup {
        protocol,
        ..EngineSetup::default()
    };
    let fixture = GatewayFixture::new(setup, &[origin.address]);
    let split = || RouteAction::Split(vec![to("web", &[], 1)]);
    let mut filtered = route("web", "filtered", 0, prefix("/old/"), split());
    if let Resource::Route(rule) = &mut filtered {
        rule.filters = Some(Box::new(filters()));
    }
    fixture.apply(vec![
        filtered,
        route("web", "plain", 1, prefix("/"), split()),
    ]);
    fixture
}

/// Starts an HTTP/1.1 endpoint that echoes the request's head, and says which one it is.
async fn origin_1() -> OriginServer {
    OriginServer::each(|mut peer| async move {
        while let Some((head, _)) = peer.request().await {
            let answer = format!(
                "HTTP/1.1 200 OK\r\nx-from: h1\r\ncache-control: private\r\ncontent-length: {}\r\n\r\n{head}",
                head.len()
            );
            peer.write(answer.as_bytes()).await;
        }
    })
    .await
}

/// Sends a request with headers that the filters change, and returns the header lines and the
/// body of the response, in lower case.
async fn exchange(fixture: &GatewayFixture, over_http2: bool, path: &str) -> (String, String) {
    if !over_http2 {
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: web\r\nX-Env: prod\r\nX_Env: other\r\nX-Internal: 1\r\nX-List: own\r\nConnection: close\r\n\r\n"
        );
        let response = HttpClient::once(fixture.web, &request).await;
        return (
            response.head.to_ascii_lowercase(),
            response.text().to_ascii_lowercase(),
        );
    }
    let request = Request::get(format!("http://web{path}"))
        .header("x-env", "prod")
        .header("x_env", "other")
        .header("x-internal", "1")
        .header("x-list", "own")
        .body(())
        .unwrap();
    let (_, lines, body) = http2::exchange(fixture, request).await;
    (lines, body.to_ascii_lowercase())
}

async fn check(origin: &OriginServer, protocol: AppProtocol, over_http2: bool) {
    let case = format!("{protocol:?}, client with HTTP/2: {over_http2}");
    let fixture = fixture(protocol, origin);
    let (head, body) = exchange(&fixture, over_http2, "/old/x?q=/old/").await;
    for there in [
        "/new/x?q=/old/",
        "other.example:8080",
        "x-env: canary",
        "x-list: own",
        "x-list: added",
    ] {
        assert!(body.contains(there), "{case}: no {there:?} in {body}");
    }
    for gone in ["x-env: prod", "x_env", "x-internal", "host: web", "//web/"] {
        assert!(!body.contains(gone), "{case}: {gone:?} in {body}");
    }
    for there in ["cache-control: no-store", "x-served: by-canal"] {
        assert!(head.contains(there), "{case}: no {there:?} in {head}");
    }
    for gone in ["x-from", "private"] {
        assert!(!head.contains(gone), "{case}: {gone:?} in {head}");
    }
    let (head, body) = exchange(&fixture, over_http2, "/plain").await;
    assert!(
        body.contains("x-env: prod") && body.contains("x_env: other") && body.contains("/plain"),
        "{case}: {body}"
    );
    assert!(
        head.contains("x-from") && !head.contains("x-served"),
        "{case}: {head}"
    );
}

#[tokio::test]
async fn filters_change_requests_and_responses_in_every_pairing_of_versions() {
    let (one, two) = (origin_1().await, http2::origin(http2::echo).await);
    for over_http2 in [false, true] {
        check(&one, AppProtocol::Http1, over_http2).await;
        check(&two, AppProtocol::Http2, over_http2).await;
    }
}

/// Starts a gateway whose rule has filters, and two backends of the same service: the first has
/// filters of its own.
fn fixture_with_backend_filters(protocol: AppProtocol, origin: &OriginServer) -> GatewayFixture {
    let mut own = to("web", &[], 1);
    own.filters = Some(Box::new(RouteFilters {
        request_headers: HeaderModifier {
            set: vec![pair("x-env", "backend")],
            add: vec![pair("x-list", "last"), pair("x-internal", "new")],
            remove: vec![],
        },
        response_headers: HeaderModifier {
            set: vec![pair("x-served", "by-backend")],
            ..HeaderModifier::default()
        },
        ..RouteFilters::default()
    }));
    fixture_with_backend(protocol, origin, own)
}

/// Starts a gateway whose rule has filters, and two backends of the same service: this one, and one
/// without filters of its own.
fn fixture_with_backend(
    protocol: AppProtocol,
    origin: &OriginServer,
    own: Backend,
) -> GatewayFixture {
    let fixture = fixture(protocol, origin);
    let split = RouteAction::Split(vec![own, to("web", &[], 1)]);
    let mut filtered = route("web", "filtered", 0, prefix("/old/"), split);
    if let Resource::Route(rule) = &mut filtered {
        rule.filters = Some(Box::new(filters()));
    }
    fixture.apply(vec![filtered]);
    fixture
}

async fn check_backend(origin: &OriginServer, protocol: AppProtocol, over_http2: bool) {
    let case = format!("{protocol:?}, client with HTTP/2: {over_http2}");
    let fixture = fixture_with_backend_filters(protocol, origin);
    let mut counts = [0, 0];
    while counts.contains(&0) {
        let (head, body) = exchange(&fixture, over_http2, "/old/x").await;
        let is_own = body.contains("x-env: backend");
        counts[usize::from(is_own)] += 1;
        let common = [
            "/new/x",
            "other.example:8080",
            "x-list: own",
            "x-list: added",
        ];
        let (there, gone, served) = if is_own {
            (
                ["x-list: last", "x-internal: new"],
                "x-env: canary",
                "x-served: by-backend",
            )
        } else {
            (
                ["x-env: canary", "x-list: added"],
                "x-internal",
                "x-served: by-canal",
            )
        };
        for there in common.into_iter().chain(there) {
            assert!(body.contains(there), "{case}: no {there:?} in {body}");
        }
        for gone in [gone, "x-env: prod", "x_env", "x-internal: 1"] {
            assert!(!body.contains(gone), "{case}: {gone:?} in {body}");
        }
        assert!(head.contains(served), "{case}: no {served:?} in {head}");
        assert_eq!(head.matches("x-served").count(), 1, "{case}: {head}");
    }
}

#[tokio::test]
async fn filters_of_a_backend_follow_those_of_the_rule() {
    let (one, two) = (origin_1().await, http2::origin(http2::echo).await);
    for over_http2 in [false, true] {
        check_backend(&one, AppProtocol::Http1, over_http2).await;
        check_backend(&two, AppProtocol::Http2, over_http2).await;
    }
}

#[tokio::test]
async fn a_backend_has_a_url_of_its_own() {
    let (one, two) = (origin_1().await, http2::origin(http2::echo).await);
    for (path, received) in [
        (PathRewrite::Prefix("/own/".to_owned()), "/own/x"),
        (PathRewrite::Full("/whole".to_owned()), "/whole"),
    ] {
        let mut own = to("web", &[], 1);
        own.filters = Some(Box::new(RouteFilters {
            rewrite: UrlRewrite {
                host: Some("own.example".to_owned()),
                path: Some(path),
                path_regex: None,
            },
            ..RouteFilters::default()
        }));
        for (protocol, origin) in [(AppProtocol::Http1, &one), (AppProtocol::Http2, &two)] {
            let fixture = fixture_with_backend(protocol, origin, own.clone());
            let mut counts = [0, 0];
            while counts.contains(&0) {
                // The prefix is that of the match, which the rule's own rewrite does not replace first.
                let (_, body) = exchange(&fixture, false, "/old/x?q").await;
                let is_own = body.contains("own.example");
                counts[usize::from(is_own)] += 1;
                let (path, host) = match is_own {
                    true => (received, "own.example"),
                    false => ("/new/x", "other.example:8080"),
                };
                assert!(body.contains(&format!("{path}?q")), "{protocol:?}: {body}");
                assert!(body.contains(host), "{protocol:?}: {body}");
            }
        }
    }
}

#[tokio::test]
async fn a_regular_expression_rewrites_paths_in_every_pairing_of_versions() {
    let (one, two) = (origin_1().await, http2::origin(http2::echo).await);
    for (protocol, origin) in [(AppProtocol::Http1, &one), (AppProtocol::Http2, &two)] {
        let fixture = fixture(protocol, origin);
        let split = RouteAction::Split(vec![to("web", &[], 1)]);
        let mut filtered = route("web", "filtered", 0, prefix("/old/"), split);
        if let Resource::Route(rule) = &mut filtered {
            rule.filters = Some(Box::new(RouteFilters {
                rewrite: UrlRewrite {
                    path_regex: Some(RegexSubstitution {
                        pattern: "/([^/.]+)/(v[0-9]+)".to_owned(),
                        substitution: r"/\2/\1".to_owned(),
                    }),
                    ..UrlRewrite::default()
                },
                ..RouteFilters::default()
            }));
        }
        fixture.apply(vec![filtered]);
        for over_http2 in [false, true] {
            for (sent, received) in [
                ("/old/v1/a/v2?q=/old/v1", "/v1/old/v2/a?q=/old/v1"),
                ("//old/x/../v7", "/v7/old"),
                ("/old/none", "/old/none"),
            ] {
                let (_, body) = exchange(&fixture, over_http2, sent).await;
                // An endpoint of HTTP/2 echoes the whole URI, so only its end is compared.
                let target = body.split_whitespace().nth(1).unwrap_or_default();
                assert!(
                    target.ends_with(received),
                    "{protocol:?} {over_http2} {sent}: {body}"
                );
            }
            // This path is longer than a regular expression may rewrite, so the request is refused.
            let long = format!("/old/{}", "x".repeat(SUBSTITUTED_PATH_BYTES_MAX));
            let (_, body) = exchange(&fixture, over_http2, &long).await;
            assert!(
                body.contains("ambiguous"),
                "{protocol:?} {over_http2}: {body}"
            );
        }
    }
}

#[tokio::test]
async fn errors_get_the_response_headers_of_their_rule() {
    // Without endpoints, every request fails after its rule is chosen.
    let fixture = GatewayFixture::new(EngineSetup::default(), &[]);
    let mut own = to("web", &[], 1);
    own.filters = Some(Box::new(RouteFilters {
        response_headers: HeaderModifier {
            set: vec![pair("x-served", "by-backend")],
            ..HeaderModifier::default()
        },
        ..RouteFilters::default()
    }));
    let mut filtered = route(
        "web",
        "filtered",
        0,
        prefix("/old/"),
        RouteAction::Split(vec![own]),
    );
    if let Resource::Route(rule) = &mut filtered {
        rule.filters = Some(Box::new(filters()));
    }
    let split = RouteAction::Split(vec![to("web", &[], 1)]);
    let plain = route("web", "plain", 1, prefix("/"), split);
    fixture.apply(vec![filtered, plain]);
    for over_http2 in [false, true] {
        let (head, _) = exchange(&fixture, over_http2, "/old/x").await;
        for line in [
            "cache-control: no-store",
            "x-served: by-backend",
            "retry-after: 1",
            "content-type: text/plain",
        ] {
            assert_eq!(head.matches(line).count(), 1, "{over_http2} {line}: {head}");
        }
        let (head, _) = exchange(&fixture, over_http2, "/x").await;
        assert!(!head.contains("x-served"), "{over_http2}: {head}");
    }
    let request = Request::post("http://web/old/x").header("content-type", "application/grpc");
    let (status, head, _) = http2::exchange(&fixture, request.body(()).unwrap()).await;
    for line in [
        "x-served: by-backend",
        "grpc-status: 14",
        "content-type: application/grpc",
    ] {
        assert_eq!(head.matches(line).count(), 1, "{status} {line}: {head}");
    }
}

#[tokio::test]
async fn a_rewritten_path_is_one_in_normal_form() {
    let origin = origin_1().await;
    let fixture = fixture(AppProtocol::Http1, &origin);
    for (sent, received) in [
        ("/x/../old/%61", "get /new/a http/1.1"),
        ("//old//b/?c", "get /new/b/?c http/1.1"),
        // The rule for the rest forwards a path as it was sent.
        ("/x/../%61", "get /x/../%61 http/1.1"),
    ] {
        let (_, body) = exchange(&fixture, false, sent).await;
        assert!(body.starts_with(received), "{sent}: {body}");
    }
}
