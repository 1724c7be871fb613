//! Authorization policies on real connections: the response over every protocol, and the effect of
//! policy changes on open connections.

use std::time::Duration;

use bytes::Bytes;
use canal_model::authorization::*;
use canal_model::program::*;
use http::Request;

use crate::client::HttpClient;
use crate::fixture::{
    EngineSetup, GatewayFixture, LOCALHOST, TENANT, key, pod, prefix, route, service_with_id, to,
};
use crate::hbone::{LoopbackMesh, local};
use crate::http2;
use crate::origin::{OriginServer, Peer};

mod tokens;

pub(crate) fn named(name: &str) -> PolicyKey {
    PolicyKey {
        tenant: TENANT.parse().unwrap(),
        namespace: "default".parse().unwrap(),
        name: name.parse().unwrap(),
    }
}

pub(crate) fn clause(attribute: Attribute, any: &[&str]) -> Clause {
    let matching = |text: &&str| match text.split_once('*') {
        Some(("", "")) => AttributeMatch::Present,
        Some((start, "")) => AttributeMatch::Prefix(start.into()),
        _ => AttributeMatch::Exact(text.to_string()),
    };
    Clause {
        attribute,
        any: any.iter().map(matching).collect(),
        none: vec![],
    }
}

pub(crate) fn rule(when: Vec<Clause>) -> PolicyRule {
    PolicyRule {
        when,
        ..PolicyRule::default()
    }
}

pub(crate) fn of(
    name: &str,
    action: AuthorizationAction,
    target: PolicyTarget,
    rules: Vec<PolicyRule>,
) -> Authorization {
    Authorization {
        key: named(name),
        target,
        action,
        rules,
        dry_run: false,
        broken: None,
    }
}

pub(crate) fn policy(name: &str, action: AuthorizationAction, rules: Vec<PolicyRule>) -> Resource {
    Resource::Authorization(of(name, action, PolicyTarget::Tenant, rules))
}

fn path(any: &[&str]) -> PolicyRule {
    rule(vec![clause(Attribute::Path, any)])
}

#[tokio::test]
async fn requests_are_authorized_in_their_forwarded_form() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let odd = HttpClient::get(fixture.web, "/a//b/%2e%2e/%2F/../x").await;
    assert!(
        odd.text()
            .starts_with("GET /a//b/%2e%2e/%2F/../x HTTP/1.1\r\n"),
        "no policy reads the path: it is forwarded as it was sent"
    );
    assert_eq!(fixture.metric("canal_authorization_total", &[]), 0.0);
    fixture.apply(vec![policy(
        "no-admin",
        AuthorizationAction::Deny,
        vec![path(&["/admin*"])],
    )]);
    for (sent, status, forwarded) in [
        ("/x", 200, "/x"),
        ("/admin", 403, ""),
        ("/%61dmin/x", 403, ""),
        ("//admin", 403, ""),
        ("/x/../admin", 403, ""),
        ("/x/%2e%2e/admin?q", 403, ""),
        ("/a//b?y=//", 200, "/a/b?y=//"),
        ("/admin/../x", 200, "/x"),
        // Two servers would read these differently.
        ("/a%2Fadmin", 400, ""),
        ("/..", 400, ""),
        ("/a%00", 400, ""),
    ] {
        let answer = HttpClient::get(fixture.web, sent).await;
        assert_eq!(answer.status, status, "{sent}");
        if status == 200 {
            assert!(
                answer
                    .text()
                    .starts_with(&format!("GET {forwarded} HTTP/1.1\r\n")),
                "{sent}: {}",
                answer.text()
            );
        } else if status == 403 {
            assert_eq!(answer.text(), "RBAC: access denied\n");
        }
    }
    assert_eq!(
        fixture.metric(
            "canal_authorization_total",
            &[
                "tenant=\"alpha\"",
                "action=\"deny\"",
                "policy=\"default/no-admin\""
            ]
        ),
        // The five paths above with 403, and below, the three with 200 and the three with 400.
        5.0
    );
    assert_eq!(
        fixture.metric(
            "canal_authorization_total",
            &["action=\"allow\"", "policy=\"\""]
        ),
        3.0
    );
    assert_eq!(
        fixture.metric(
            "canal_gateway_refused_requests_total",
            &["reason=\"denied\"", "side=\"client\""]
        ),
        5.0
    );
    assert_eq!(
        fixture.metric(
            "canal_gateway_refused_requests_total",
            &["reason=\"unsafe_path\""]
        ),
        3.0
    );
    fixture
        .until(
            "istio_requests_total",
            &["response_code=\"403\"", "destination_service_name=\"web\""],
            5.0,
        )
        .await;
    fixture.change(
        vec![],
        &[(ResourceKind::Authorization, "alpha/default/no-admin")],
    );
    assert_eq!(HttpClient::get(fixture.web, "/admin/%2F").await.status, 200);
}

/// Sends a GET with these headers over HTTP/1.1 and over HTTP/2; returns the statuses and the
/// requests that the endpoint saw.
async fn over_both(fixture: &GatewayFixture, headers: &[(&str, &str)]) -> [(u16, String); 2] {
    let lines: String = headers
        .iter()
        .map(|(name, value)| format!("{name}: {value}\r\n"))
        .collect();
    let answer = HttpClient::once(
        fixture.web,
        &format!("GET /x HTTP/1.1\r\nHost: web\r\n{lines}\r\n"),
    )
    .await;
    let mut request = Request::get("http://web/x");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let client = http2::connect(fixture).await.ready().await;
    let (response, _) = client
        .unwrap()
        .send_request(request.body(()).unwrap(), true)
        .unwrap();
    let response = response.await.unwrap();
    let status = response.status().as_u16();
    let body = http2::read_all(response.into_body()).await.unwrap().0;
    [
        (answer.status, answer.text()),
        (status, String::from_utf8(body).unwrap()),
    ]
}

#[tokio::test]
async fn cookies_of_several_lines_are_routed_authorized_and_sent_as_one_line() {
    let (web, canary) = (OriginServer::echo().await, OriginServer::echo().await);
    let fixture = GatewayFixture::new(EngineSetup::default(), &[web.address]);
    let has_canary = ValueMatch {
        name: "cookie".into(),
        // The usual regex for one cookie in Envoy's configuration, which needs all cookies in one
        // value.
        value: TextMatch::Regex("^(.*?;\\s*)?(canary=yes)(;.*)?$".into()),
    };
    fixture.apply(vec![
        service_with_id(
            TENANT,
            "canary",
            2,
            "10.96.0.2",
            &[(80, AppProtocol::Http1)],
        ),
        Resource::Workload(pod(TENANT, "canary-0", canary.address, "canary")),
        route(
            "web",
            "a",
            0,
            HttpMatch {
                headers: vec![has_canary],
                ..prefix("/")
            },
            RouteAction::Split(vec![to("canary", &[], 1)]),
        ),
        route(
            "web",
            "b",
            1,
            prefix("/"),
            RouteAction::Split(vec![to("web", &[], 1)]),
        ),
        policy(
            "banned",
            AuthorizationAction::Deny,
            // The value exists only if both lines are joined.
            vec![rule(vec![clause(
                Attribute::Header("cookie".into()),
                &["a=1; banned=1"],
            )])],
        ),
    ]);
    for (status, text) in over_both(&fixture, &[("cookie", "a=1"), ("cookie", "banned=1")]).await {
        assert_eq!(status, 403, "{text}");
    }
    assert_eq!((web.requests(), canary.requests()), (0, 0));
    for (status, text) in over_both(
        &fixture,
        &[
            ("cookie", "a=1"),
            ("cookie", "canary=yes"),
            ("cookie", "b=2"),
        ],
    )
    .await
    {
        assert_eq!(status, 200);
        assert!(
            text.to_ascii_lowercase()
                .contains("\r\ncookie: a=1; canary=yes; b=2\r\n"),
            "{text}"
        );
        assert_eq!(
            text.to_ascii_lowercase().matches("cookie:").count(),
            1,
            "{text}"
        );
    }
    assert_eq!((web.requests(), canary.requests()), (0, 2)); // One for each HTTP version.
}

#[tokio::test]
async fn a_second_line_of_a_header_avoids_no_policy() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let of = |action, any: &[&str], none: &[&str]| {
        let none = clause(Attribute::Header("x-role".into()), none).any;
        let clause = Clause {
            none,
            ..clause(Attribute::Header("x-role".into()), any)
        };
        policy("roles", action, vec![rule(vec![clause])])
    };
    use AuthorizationAction::{Allow, Deny};
    for (policy, want) in [
        (of(Deny, &["admin"], &[]), 403),
        (of(Deny, &["user"], &[]), 403),
        // What the lines are together counts too, because a server may read them so.
        (of(Deny, &["user,admin"], &[]), 403),
        (of(Deny, &["other"], &[]), 200),
        (of(Deny, &[], &["user"]), 403),
        (of(Allow, &["user"], &[]), 403),
        (of(Allow, &["user,admin"], &[]), 200),
        (of(Allow, &[], &["admin"]), 403),
        (of(Allow, &[], &["other"]), 200),
    ] {
        fixture.apply(vec![policy]);
        for (status, text) in over_both(&fixture, &[("x-role", "user"), ("x-role", "admin")]).await
        {
            assert_eq!(status, want, "{text}");
        }
    }
}

#[tokio::test]
async fn other_spellings_of_the_meshs_headers_reach_no_endpoint() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let own = [
        "x_forwarded_client_cert",
        "X-Forwarded_Client-Cert",
        "x_envoy_peer_metadata",
        "canal_source",
        "x_forwarded_for",
        "x_forwarded_proto",
        "x_request_id",
    ];
    let mut headers: Vec<(&str, &str)> = own.iter().map(|name| (*name, "forged")).collect();
    headers.push(("x_own", "kept"));
    for (status, text) in over_both(&fixture, &headers).await {
        assert_eq!(status, 200);
        let text = text.to_ascii_lowercase();
        assert!(
            !text.contains("forged") && text.contains("x_own: kept\r\n"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn both_http_versions_and_grpc_are_denied_in_their_own_ways() {
    let origin = http2::origin(http2::echo).await;
    let fixture = GatewayFixture::new(
        EngineSetup {
            protocol: AppProtocol::Http2,
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    let headers = vec![
        clause(Attribute::Header("x-role".into()), &["admin"]),
        // Hosts are compared without regard to case.
        clause(Attribute::Host, &["WEB"]),
    ];
    fixture.apply(vec![policy(
        "admins",
        AuthorizationAction::Allow,
        vec![rule(headers)],
    )]);
    let mut client = http2::connect(&fixture).await;
    let mut request_with = async |fields: &[(&str, &str)]| {
        let mut request = Request::builder().method("POST").uri("http://web:80/x");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        client = client.clone().ready().await.unwrap();
        let (response, _) = client
            .send_request(request.body(()).unwrap(), true)
            .unwrap();
        response.await.unwrap()
    };
    let denied = request_with(&[]).await;
    assert_eq!(denied.status(), 403);
    assert_eq!(
        http2::read_all(denied.into_body()).await.unwrap().0,
        b"RBAC: access denied\n"
    );
    let grpc = request_with(&[("content-type", "application/grpc")]).await;
    assert_eq!(
        (
            grpc.status().as_u16(),
            grpc.headers()["grpc-status"].to_str().unwrap()
        ),
        // gRPC status 7 is PERMISSION_DENIED.
        (200, "7")
    );
    let allowed = request_with(&[
        ("x-role", "admin"),
        // Only gateways may set `canal-source`; from a client it must neither count nor pass.
        ("canal-source", "spiffe://alpha.example/ns/default/sa/root"),
    ])
    .await;
    assert_eq!(allowed.status(), 200);
    let (body, _) = http2::read_all(allowed.into_body()).await.unwrap();
    assert!(!String::from_utf8_lossy(&body).contains("canal-source"));
    assert_eq!(
        request_with(&[("x-role", "admin"), ("x-role", "x")])
            .await
            .status(),
        403,
        "two lines are one value"
    );
    assert_eq!(HttpClient::get(fixture.web, "/").await.status, 403);
    let get = "GET / HTTP/1.1\r\nHost: Web\r\nX-Role: admin\r\nCanal-Source: spiffe://x/ns/y/sa/z\r\n\r\n";
    let answer = HttpClient::once(fixture.web, get).await;
    assert!(answer.status == 200 && !answer.text().contains("canal-source"));
}

#[tokio::test]
async fn endpoints_and_services_have_policies_of_their_own() {
    let (one, two) = (OriginServer::echo().await, OriginServer::echo().await);
    let fixture = GatewayFixture::new(EngineSetup::default(), &[one.address]);
    let mut other = pod(TENANT, "web-9", two.address, "web");
    other.labels.insert("version".into(), "v2".into());
    let labels = [("version".to_string(), "v2".to_string())].into();
    let second = PolicyTarget::Workloads {
        namespace: Some("default".parse().unwrap()),
        labels,
    };
    fixture.apply(vec![
        Resource::Workload(other),
        Resource::Authorization(of(
            "none",
            AuthorizationAction::Deny,
            second.clone(),
            vec![PolicyRule::default()],
        )),
    ]);
    let mut counts = [0, 0];
    // Enough that each of two endpoints is almost surely selected more than ten times.
    for _ in 0..60 {
        match HttpClient::get(fixture.web, "/").await.status {
            200 => counts[0] += 1,
            403 => counts[1] += 1,
            other => panic!("{other}"),
        }
    }
    assert!(counts[0] > 10 && counts[1] > 10, "{counts:?}");
    assert_eq!(two.requests(), 0);
    // A dead endpoint is skipped; the next one is authorized by its own policies.
    let listener = tokio::net::TcpListener::bind(LOCALHOST).await.unwrap();
    let dead = listener.local_addr().unwrap();
    drop(listener);
    fixture.apply(vec![Resource::Workload(pod(TENANT, "web-0", dead, "web"))]);
    // Of ten requests, at least one almost surely chooses the dead endpoint first.
    for _ in 0..10 {
        assert_eq!(HttpClient::get(fixture.web, "/").await.status, 403);
    }
    fixture.change(
        vec![Resource::Workload(pod(TENANT, "web-0", one.address, "web"))],
        &[(ResourceKind::Workload, "alpha/default/web-9")],
    );
    // If a route leads to another service, the policies of the dialled service apply too.
    let db = pod(TENANT, "db-0", two.address, "db");
    let split = RouteAction::Split(vec![to("db", &[], 1)]);
    fixture.apply(vec![
        service_with_id(TENANT, "db", 2, "10.96.0.2", &[(80, AppProtocol::Http1)]),
        Resource::Workload(db),
        route("web", "r", 0, prefix("/db"), split),
        route(
            "web",
            "s",
            1,
            prefix("/"),
            RouteAction::Split(vec![to("web", &[], 1)]),
        ),
    ]);
    assert_eq!(HttpClient::get(fixture.web, "/db").await.status, 200);
    // A policy of the dialled service applies on both routes; one of db only on the route to db.
    for (target, on_web, on_db) in [("web", 403, 403), ("db", 200, 403)] {
        fixture.apply(vec![Resource::Authorization(of(
            "none",
            AuthorizationAction::Deny,
            PolicyTarget::Service(key(TENANT, target)),
            vec![PolicyRule::default()],
        ))]);
        assert_eq!(
            (
                HttpClient::get(fixture.web, "/x").await.status,
                HttpClient::get(fixture.web, "/db").await.status
            ),
            (on_web, on_db),
            "{target}"
        );
    }
    // A broken policy denies, even if its action is only AUDIT.
    let broken = Authorization {
        broken: Some("no such field".into()),
        ..of(
            "none",
            AuthorizationAction::Audit,
            PolicyTarget::Tenant,
            vec![],
        )
    };
    fixture.apply(vec![Resource::Authorization(broken)]);
    assert_eq!(HttpClient::get(fixture.web, "/x").await.status, 403);
}

/// Returns policies of a TCP service, and whether each admits the client.
fn identity_cases() -> Vec<(Resource, bool)> {
    let from = |principal: &str| {
        policy(
            "who",
            AuthorizationAction::Allow,
            vec![rule(vec![clause(Attribute::SourcePrincipal, &[principal])])],
        )
    };
    vec![
        (from("alpha.example/ns/default/sa/client"), true),
        (from("alpha.example/ns/default/sa/other"), false),
        (
            policy(
                "who",
                AuthorizationAction::Allow,
                vec![rule(vec![clause(Attribute::SourceNamespace, &["default"])])],
            ),
            true,
        ),
        (
            policy(
                "who",
                AuthorizationAction::Deny,
                vec![rule(vec![clause(
                    Attribute::SourceServiceAccount,
                    &["default/client"],
                )])],
            ),
            false,
        ),
        (
            policy("who", AuthorizationAction::Deny, vec![path(&["/admin"])]),
            false,
        ),
        (
            policy("who", AuthorizationAction::Audit, vec![path(&["/admin"])]),
            true,
        ),
    ]
}

#[test]
fn identities_decide_and_http_attributes_are_undecided_on_tcp() {
    local(|| async {
        let origin = OriginServer::each(|mut peer: Peer| async move {
            while let Some(line) = peer.line().await {
                peer.write(format!("{line}\r\n").as_bytes()).await;
            }
        })
        .await;
        let mesh = LoopbackMesh::new(EngineSetup {
            protocol: AppProtocol::Tcp,
            ..EngineSetup::default()
        });
        let node = mesh.pod(10, "web-0", &origin).await;
        // A tunnel works if the endpoint echoes a line.
        let works = async || {
            let Ok(opened) = mesh.open("10.96.0.1:80").await else {
                return false;
            };
            let mut client = HttpClient {
                stream: opened.stream,
                buffer: Vec::new(),
            };
            client.send(b"hi\r\n").await;
            client.line().await == "hi"
        };
        for (rules, want) in identity_cases() {
            mesh.fixture.apply(vec![rules.clone()]);
            assert_eq!(works().await, want, "{rules:?}");
        }
        let seen = node.connects.take();
        assert!(seen.iter().all(|(_, headers, _)| headers["canal-source"]
            == "spiffe://alpha.example/ns/default/sa/client"));
        assert_eq!(
            mesh.fixture.metric(
                "canal_gateway_refused_connects_total",
                &["reason=\"denied\""]
            ),
            // Three cases of `identity_cases` deny.
            3.0
        );
        assert_eq!(
            mesh.fixture.metric(
                "canal_authorization_total",
                &["action=\"undecided\"", "policy=\"default/who\""]
            ),
            // The DENY policy for a path, which is unknown on TCP.
            1.0
        );
        assert_eq!(
            mesh.fixture
                .metric("canal_authorization_total", &["action=\"audit\""]),
            0.0,
            "it only may have matched"
        );
    });
}

#[test]
fn a_federated_peer_needs_a_policy_that_names_it() {
    local(|| async {
        let origin = OriginServer::echo().await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        assert!(mesh.open("10.96.0.1:80").await.is_ok());
        assert!(
            mesh.open_as("beta", "10.96.0.1:80").await.is_err(),
            "another tenant's member does not come in"
        );
        let own = mesh
            .ca(TENANT)
            .bundle(TENANT, "alpha.example", false, vec![]);
        let other = mesh.ca("beta").bundle(TENANT, "beta.example", true, vec![]);
        mesh.trust.replace([own.clone(), other.clone()]).unwrap();
        assert!(
            mesh.open_as("beta", "10.96.0.1:80").await.is_err(),
            "the engine has no federation of the two"
        );
        mesh.fixture.apply(vec![(*own).clone(), (*other).clone()]);
        let mut client = HttpClient {
            stream: mesh.open_as("beta", "10.96.0.1:80").await.unwrap().stream,
            buffer: Vec::new(),
        };
        let mut request_with = async || {
            client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
            client.answer().await.unwrap().status
        };
        let allow = |principal: &str| {
            policy(
                "who",
                AuthorizationAction::Allow,
                vec![rule(vec![clause(Attribute::SourcePrincipal, &[principal])])],
            )
        };
        assert_eq!(request_with().await, 403, "no policy names it");
        for (rules, want) in [
            (
                // Only a rule that names the foreign trust domain counts for a federated client.
                policy(
                    "who",
                    AuthorizationAction::Allow,
                    vec![PolicyRule::default()],
                ),
                403,
            ),
            (
                policy(
                    "who",
                    AuthorizationAction::Allow,
                    vec![rule(vec![clause(Attribute::SourceNamespace, &["default"])])],
                ),
                403,
            ),
            (allow("*"), 403),
            (allow("beta.example/*"), 200),
            (allow("beta.example/ns/default/sa/client"), 200),
        ] {
            mesh.fixture.apply(vec![rules.clone()]);
            assert_eq!(request_with().await, want, "{rules:?}");
        }
        assert_eq!(
            client_of(&mesh).await,
            403,
            "the tenant's own member is not named"
        );
        mesh.fixture
            .change(vec![], &[(ResourceKind::Bundle, "alpha/beta.example")]);
        mesh.trust.replace([own]).unwrap();
        // The open connection is cut as well, since its peer's trust has ended.
        assert!(!client.closed().await, "they federate no more");
    });
}

async fn client_of(mesh: &LoopbackMesh) -> u16 {
    let mut client = mesh.client("10.96.0.1:80").await;
    client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
    client.answer().await.unwrap().status
}

/// Starts an origin that sends only the beginning of a response and leaves every connection open.
pub(crate) async fn patient() -> OriginServer {
    OriginServer::each(|mut peer: Peer| async move {
        let Some(head) = peer.head().await else { return };
        if head.contains("upgrade") {
            peer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n").await;
        } else {
            peer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n").await;
        }
        let _held = peer;
        std::future::pending::<()>().await;
    })
    .await
}

/// Requests whose responses do not end.
const STREAMS: [&str; 3] = [
    "GET /watch HTTP/1.1\r\nHost: web\r\n\r\n",
    "POST /watch HTTP/1.1\r\nHost: web\r\nContent-Length: 100\r\n\r\nx",
    "GET /watch HTTP/1.1\r\nHost: web\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
];

/// Sends a request and returns its client once the first bytes of the response have come.
async fn open_stream(fixture: &GatewayFixture, request: &str) -> HttpClient {
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(request.as_bytes()).await;
    let whole = |seen: &[u8]| {
        seen.ends_with(b"hi\r\n")
            || (seen.starts_with(b"HTTP/1.1 101") && seen.ends_with(b"\r\n\r\n"))
    };
    while !whole(&client.buffer) {
        let more = tokio::time::timeout(
            canal_timing::deadline(Duration::from_secs(10)),
            client.more(),
        )
        .await;
        assert_eq!(
            more,
            Ok(true),
            "{request} {:?}",
            String::from_utf8_lossy(&client.buffer)
        );
    }
    client
}

#[tokio::test]
async fn open_requests_are_reauthorized_when_policies_change() {
    let origin = patient().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let open = async |request: &str| open_stream(&fixture, request).await;
    // At first there are no policies; then one policy denies a path.
    let mut first = Vec::new();
    for request in STREAMS {
        first.push(open(request).await);
    }
    let mut stays = open("GET /stay HTTP/1.1\r\nHost: web\r\n\r\n").await;
    let mut h2 = http2::connect(&fixture).await;
    let mut stream = async |path: &str| {
        h2 = h2.clone().ready().await.unwrap();
        let request = Request::builder()
            .uri(format!("http://web{path}"))
            .body(())
            .unwrap();
        let mut body = h2
            .send_request(request, true)
            .unwrap()
            .0
            .await
            .unwrap()
            .into_body();
        assert_eq!(
            body.data().await.unwrap().unwrap(),
            Bytes::from_static(b"hi")
        );
        body
    };
    let (mut cut, mut kept) = (stream("/watch").await, stream("/stay").await);
    fixture.apply(vec![policy(
        "other",
        AuthorizationAction::Deny,
        vec![path(&["/other"])],
    )]);
    // These policies must decide before the next replace them. They deny the POST, one of six.
    let allowed = async |count: f64| {
        let labels = &["result=\"allowed\""];
        fixture
            .until("canal_gateway_reauthorized_total", labels, count)
            .await;
    };
    allowed(5.0).await;
    // The POST's head was not retained, because there were no policies when its body came. Its path
    // is unknown, so it is closed.
    assert!(!first.remove(1).closed().await);
    fixture.apply(vec![policy(
        "watch",
        AuthorizationAction::Deny,
        vec![path(&["/watch"])],
    )]);
    for client in &mut first {
        client.closed().await;
    }
    let cut = tokio::time::timeout(canal_timing::deadline(Duration::from_secs(10)), cut.data())
        .await
        .expect("an end within 10 s");
    assert!(cut.unwrap().is_err());
    // 100 bytes are announced and one is sent, so the request stays open with its head retained.
    let mut posted = open("POST /stay HTTP/1.1\r\nHost: web\r\nContent-Length: 100\r\n\r\nx").await;
    fixture.apply(vec![policy(
        "third",
        AuthorizationAction::Deny,
        vec![path(&["/nobody"])],
    )]);
    // Two streams stayed open with the second policies, and three are with these.
    allowed(5.0 + 2.0 + 3.0).await;
    for client in [&mut stays, &mut posted] {
        // Nothing announces that no end comes, so the test waits for a few intervals of 100 ms.
        let more = tokio::time::timeout(Duration::from_millis(300), client.more()).await;
        assert!(more.is_err(), "it lives on");
    }
    // One interval more; those above have passed already.
    let more = tokio::time::timeout(Duration::from_millis(100), kept.data()).await;
    assert!(more.is_err());
    assert_eq!(
        fixture.metric("canal_gateway_reauthorized_total", &["result=\"denied\""]),
        // Two of `first` by the second policy, the POST by the first, and the HTTP/2 stream.
        4.0
    );
    fixture
        .until(
            "canal_gateway_refused_requests_total",
            &["reason=\"denied\""],
            4.0,
        )
        .await;
}

#[test]
fn relays_are_reauthorized_when_policies_change() {
    local(|| async {
        let origin = OriginServer::each(|mut peer: Peer| async move {
            while let Some(line) = peer.line().await {
                peer.write(format!("{line}\r\n").as_bytes()).await;
            }
        })
        .await;
        let mesh = LoopbackMesh::new(EngineSetup {
            protocol: AppProtocol::Tcp,
            ..EngineSetup::default()
        });
        let _node = mesh.pod(10, "web-0", &origin).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        client.send(b"one\r\n").await;
        assert_eq!(client.line().await, "one");
        let account =
            |account: &str| rule(vec![clause(Attribute::SourceServiceAccount, &[account])]);
        mesh.fixture.apply(vec![policy(
            "who",
            AuthorizationAction::Deny,
            vec![account("default/other")],
        )]);
        mesh.fixture
            .until(
                "canal_gateway_reauthorized_total",
                &["result=\"allowed\""],
                1.0,
            )
            .await;
        client.send(b"two\r\n").await;
        assert_eq!(client.line().await, "two");
        mesh.fixture.apply(vec![policy(
            "who",
            AuthorizationAction::Deny,
            vec![account("default/client")],
        )]);
        // A reset, since an orderly end would make the client believe that it has everything.
        assert!(!client.closed().await, "cut, not ended");
        mesh.fixture
            .until(
                "canal_gateway_reauthorized_total",
                &["result=\"denied\""],
                1.0,
            )
            .await;
        mesh.fixture
            .until(
                "canal_gateway_refused_connections_total",
                &["reason=\"denied\""],
                1.0,
            )
            .await;
    });
}

#[tokio::test]
async fn audits_and_dry_runs_are_counted_and_logged() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("access.log");
    let origin = OriginServer::echo().await;
    let mut fixture = GatewayFixture::new(
        EngineSetup {
            log: Some(file.clone()),
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    let dry = Authorization {
        dry_run: true,
        ..of(
            "dry",
            AuthorizationAction::Deny,
            PolicyTarget::Tenant,
            vec![path(&["/x"])],
        )
    };
    fixture.apply(vec![
        policy("seen", AuthorizationAction::Audit, vec![path(&["/x"])]),
        Resource::Authorization(dry),
        policy("no", AuthorizationAction::Deny, vec![path(&["/no"])]),
    ]);
    assert_eq!(HttpClient::get(fixture.web, "/x").await.status, 200);
    assert_eq!(HttpClient::get(fixture.web, "/y").await.status, 200);
    assert_eq!(HttpClient::get(fixture.web, "/no").await.status, 403);
    for (action, policy) in [
        ("audit", "default/seen"),
        ("dry_run_deny", "default/dry"),
        ("deny", "default/no"),
    ] {
        let labels = [
            format!("action=\"{action}\""),
            format!("policy=\"{policy}\""),
        ];
        assert_eq!(
            fixture.metric("canal_authorization_total", &[&labels[0], &labels[1]]),
            1.0,
            "{action}"
        );
    }
    // Workers write their buffered log lines when they end.
    fixture.drain(Duration::from_secs(2));
    // Longer than the drain, so that a forced one ends too.
    assert!(fixture.join_workers(Duration::from_secs(5)).await);
    fixture.engine.finish();
    let log = std::fs::read_to_string(file).unwrap();
    let lines: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        lines[0]["authorization_hits"],
        "dry_run_deny default/dry, audit default/seen"
    );
    assert_eq!(lines[1].get("authorization_hits"), None);
    assert_eq!(lines[2]["authorization_policy"], "default/no");
    assert_eq!(
        lines[2]["response_code_details"],
        "rbac_access_denied_matched_policy[ns[default]-policy[no]-rule[0]]"
    );
}
