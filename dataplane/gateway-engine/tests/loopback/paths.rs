//! Ambiguous paths: one normalized form is routed, authorized and forwarded, for both HTTP versions. If neither a route nor a policy reads
//! the path, its bytes pass unchanged.

use canal_model::authorization::{Attribute, AttributeMatch, AuthorizationAction, Clause, PolicyRule};
use canal_model::program::*;
use http::Request;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, prefix, route, to};
use crate::http2;
use crate::origin::OriginServer;
use crate::policies::{policy, rule};

/// Sends a GET; returns the status and the request that the endpoint saw.
async fn request_path(fixture: &GatewayFixture, path: &str, over_http2: bool) -> (u16, String) {
    if over_http2 {
        let client = http2::connect(fixture).await;
        let request = Request::get(format!("http://web{path}")).body(()).unwrap();
        let (response, _) = client.ready().await.unwrap().send_request(request, true).unwrap();
        let response = response.await.unwrap();
        let status = response.status().as_u16();
        let (body, _) = http2::read_all(response.into_body()).await.unwrap();
        return (status, String::from_utf8(body).unwrap());
    }
    let answer = HttpClient::get(fixture.web, path).await;
    (answer.status, answer.text())
}

fn element(path: &str) -> HttpMatch {
    HttpMatch { path: PathMatch::ElementPrefix(path.into()), ..prefix("/") }
}

/// Checks each path over both versions: the status, and the path that the endpoint sees.
async fn check(fixture: &GatewayFixture, cases: &[(&str, u16, &str)]) {
    for (sent, status, forwarded) in cases {
        for over_http2 in [false, true] {
            let (got, text) = request_path(fixture, sent, over_http2).await;
            assert_eq!(got, *status, "{sent}, HTTP/2 {over_http2}: {text}");
            let line = format!("GET {forwarded} HTTP/1.1\r\n");
            assert!(*status != 200 || text.starts_with(&line), "{sent}, HTTP/2 {over_http2}: {text}");
        }
    }
}

#[tokio::test]
async fn route_for_a_path_admits_nothing_beside_it() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let to_web = || RouteAction::Split(vec![to("web", &[], 1)]);
    fixture.apply(vec![route("web", "public", 0, element("/public"), to_web())]);
    check(
        &fixture,
        &[
            ("/public", 200, "/public"),
            ("/public/x?y=/../z", 200, "/public/x?y=/../z"),
            ("/admin", 404, ""),
            ("/public/../admin", 404, ""),
            ("/public/%2e%2e/admin", 404, ""),
            ("/public/..;/admin", 400, ""),
            ("/public/..;a=b/admin", 400, ""),
            ("/public/%2e%2e;/admin", 400, ""),
            ("/public/%2f../admin", 400, ""),
            ("/public%5c..%5cadmin", 400, ""),
            ("/public/..%2fadmin", 400, ""),
            ("/../public", 400, ""),
            ("/x/../public/./a//b", 200, "/public/a/b"),
            ("/%70ublic", 200, "/public"),
            ("//public", 200, "/public"),
        ],
    )
    .await;
    assert_eq!(fixture.metric("canal_gateway_refused_requests_total", &["reason=\"unsafe_path\"", "side=\"client\""]), 14.0);
    // A route for all paths does not read the path, so the endpoint interprets the bytes, as RabbitMQ does with `%2F`.
    fixture.apply(vec![route("web", "public", 0, prefix("/"), to_web())]);
    let header = ValueMatch { name: "x-canary".into(), value: TextMatch::Present };
    fixture.apply(vec![route("web", "canary", 1, HttpMatch { headers: vec![header], ..element("/") }, to_web())]);
    check(
        &fixture,
        &[
            ("/api/queues/%2F/q", 200, "/api/queues/%2F/q"),
            ("/public/..;/admin", 200, "/public/..;/admin"),
            ("/a//b/%2e%2e/../x", 200, "/a//b/%2e%2e/../x"),
        ],
    )
    .await;
}

#[tokio::test]
async fn endpoint_gets_the_path_that_was_routed_and_authorized() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let to_web = RouteAction::Split(vec![to("web", &[], 1)]);
    let get_admin = vec![
        Clause { attribute: Attribute::Path, any: vec![AttributeMatch::Prefix("/public/admin".into())], none: vec![] },
        Clause { attribute: Attribute::Method, any: vec![AttributeMatch::Exact("GET".into())], none: vec![] },
    ];
    fixture.apply(vec![
        route("web", "public", 0, element("/public"), to_web),
        policy("no-admin", AuthorizationAction::Deny, vec![rule(get_admin)]),
    ]);
    check(
        &fixture,
        &[
            ("/public/%61dmin", 403, ""),
            ("/public/x/../admin", 403, ""),
            ("/public/admin/../x", 200, "/public/x"),
            ("/admin/../public/x", 200, "/public/x"),
        ],
    )
    .await;
    // A policy that reads only headers leaves the path as the route normalized it.
    let header = Clause { attribute: Attribute::Header("x-role".into()), any: vec![AttributeMatch::Exact("none".into())], none: vec![] };
    fixture.apply(vec![policy("no-admin", AuthorizationAction::Deny, vec![PolicyRule { when: vec![header], ..PolicyRule::default() }])]);
    check(&fixture, &[("/public/x/../%61dmin", 200, "/public/admin")]).await;
}
