//! Ambiguous paths, for both HTTP versions: one normalized form is authorized and forwarded. A
//! route is chosen by the normalized form too, and without a policy that reads the path its bytes
//! pass unchanged.

use canal_model::authorization::{
    Attribute, AttributeMatch, AuthorizationAction, Clause, PolicyRule,
};
use canal_model::program::*;
use http::Request;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, TENANT, prefix, route, service, to};
use crate::http2;
use crate::origin::OriginServer;
use crate::policies::{policy, rule};

/// Sends a GET; returns the status and the request that the endpoint saw.
async fn request_path(fixture: &GatewayFixture, path: &str, over_http2: bool) -> (u16, String) {
    if over_http2 {
        let client = http2::connect(fixture).await;
        let request = Request::get(format!("http://web{path}")).body(()).unwrap();
        let (response, _) = client
            .ready()
            .await
            .unwrap()
            .send_request(request, true)
            .unwrap();
        let response = response.await.unwrap();
        let status = response.status().as_u16();
        let (body, _) = http2::read_all(response.into_body()).await.unwrap();
        return (status, String::from_utf8(body).unwrap());
    }
    let answer = HttpClient::get(fixture.web, path).await;
    (answer.status, answer.text())
}

fn element(path: &str) -> HttpMatch {
    HttpMatch {
        path: PathMatch::ElementPrefix(path.into()),
        ..prefix("/")
    }
}

/// Checks each path over both versions: the status, and the path that the endpoint sees.
async fn check(fixture: &GatewayFixture, cases: &[(&str, u16, &str)]) {
    for (sent, status, forwarded) in cases {
        for over_http2 in [false, true] {
            let (got, text) = request_path(fixture, sent, over_http2).await;
            assert_eq!(got, *status, "{sent}, HTTP/2 {over_http2}: {text}");
            let line = format!("GET {forwarded} HTTP/1.1\r\n");
            assert!(
                *status != 200 || text.starts_with(&line),
                "{sent}, HTTP/2 {over_http2}: {text}"
            );
        }
    }
}

#[tokio::test]
async fn route_for_a_path_admits_nothing_beside_it() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let to_web = || RouteAction::Split(vec![to("web", &[], 1)]);
    fixture.apply(vec![route(
        "web",
        "public",
        0,
        element("/public"),
        to_web(),
    )]);
    check(
        &fixture,
        &[
            ("/public", 200, "/public"),
            ("/public/x?y=/../z", 200, "/public/x?y=/../z"),
            ("/admin", 404, ""),
            ("/public/../admin", 404, ""),
            ("/public/%2e%2e/admin", 404, ""),
            ("/public%5c..%5cadmin", 404, ""),
            // The service behind the route gets the path as it was sent.
            ("/public/..;/admin", 200, "/public/..;/admin"),
            ("/public/group%2Fproject", 200, "/public/group%2Fproject"),
            (
                "/public/http://x.example/a",
                200,
                "/public/http://x.example/a",
            ),
            ("/../public", 200, "/../public"),
            ("/x/../public/./a//b", 200, "/x/../public/./a//b"),
            ("/%70ublic", 200, "/%70ublic"),
            ("//public", 200, "//public"),
        ],
    )
    .await;
    // A routed path is only compared: its odd forms are routed or not, but none is refused.
    assert_eq!(
        fixture.metric(
            "canal_gateway_refused_requests_total",
            &["reason=\"unsafe_path\""]
        ),
        0.0
    );
    // A route for all paths does not read the path, so the endpoint interprets the bytes, as
    // RabbitMQ does with `%2F`.
    fixture.apply(vec![route("web", "public", 0, prefix("/"), to_web())]);
    let header = ValueMatch {
        name: "x-canary".into(),
        value: TextMatch::Present,
    };
    fixture.apply(vec![route(
        "web",
        "canary",
        1,
        HttpMatch {
            headers: vec![header],
            ..element("/")
        },
        to_web(),
    )]);
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
        Clause {
            attribute: Attribute::Path,
            any: vec![AttributeMatch::Prefix("/public/admin".into())],
            none: vec![],
        },
        Clause {
            attribute: Attribute::Method,
            any: vec![AttributeMatch::Exact("GET".into())],
            none: vec![],
        },
    ];
    fixture.apply(vec![
        route("web", "public", 0, element("/public"), to_web),
        policy("no-admin", AuthorizationAction::Deny, vec![rule(get_admin)]),
    ]);
    check(
        &fixture,
        &[
            ("/public/%61dmin", 403, ""),
            // The escape above and this `..` lead to `/public/admin`, which the policy denies.
            ("/public/x/../admin", 403, ""),
            ("/public/admin/../x", 200, "/public/x"),
            ("/admin/../public/x", 200, "/public/x"),
        ],
    )
    .await;
    // A policy that reads only headers leaves the path as it was sent.
    let header = Clause {
        attribute: Attribute::Header("x-role".into()),
        any: vec![AttributeMatch::Exact("none".into())],
        none: vec![],
    };
    fixture.apply(vec![policy(
        "no-admin",
        AuthorizationAction::Deny,
        vec![PolicyRule {
            when: vec![header],
            ..PolicyRule::default()
        }],
    )]);
    check(
        &fixture,
        &[("/public/x/../%61dmin", 200, "/public/x/../%61dmin")],
    )
    .await;
}

#[tokio::test]
async fn policies_refuse_parameters_and_other_encodings_unless_the_service_allows_them() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let admin = Clause {
        attribute: Attribute::Path,
        any: vec![AttributeMatch::Exact("/admin".into())],
        none: vec![],
    };
    fixture.apply(vec![policy(
        "no-admin",
        AuthorizationAction::Deny,
        vec![rule(vec![admin])],
    )]);
    // Parameters, an escaped parameter, overlong UTF-8 of `..` and `/`, and a byte that is not
    // UTF-8.
    let odd = [
        "/admin;x",
        "/admin;/",
        "/admin%3bx",
        "/%c0%ae%c0%ae/admin",
        "/public/..%c0%afadmin",
        "/caf%e9",
    ];
    check(&fixture, &odd.map(|path| (path, 400, ""))).await;
    check(
        &fixture,
        &[("/caf%c3%a9", 200, "/caf%C3%A9"), ("/admin", 403, "")],
    )
    .await;
    // Six odd paths, each over HTTP/1.1 and over HTTP/2.
    let refused = ["reason=\"unsafe_path\"", "side=\"client\""];
    assert_eq!(
        fixture.metric("canal_gateway_refused_requests_total", &refused),
        12.0
    );
    let Resource::Service(mut web) =
        service(TENANT, "web", "10.96.0.1", &[(80, AppProtocol::Http1)])
    else {
        unreachable!("a service")
    };
    web.policy_paths = PolicyPaths::Legacy;
    fixture.apply(vec![Resource::Service(web)]);
    check(
        &fixture,
        &[
            ("/admin;x", 200, "/admin;x"),
            ("/caf%e9", 200, "/caf%E9"),
            ("/admin", 403, ""),
            // Servers that drop parameters leave the directory here, so even a legacy service
            // refuses it.
            ("/..;/admin", 400, ""),
        ],
    )
    .await;
}
