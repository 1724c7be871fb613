//! Filters of a Gateway's listener: which requests they let pass, in which order they run, and what
//! rules, policies and endpoints see of the headers that they set.

use std::net::SocketAddr;

use canal_gateway_engine::PlainListener;
use canal_model::authorization::{Attribute, AuthorizationAction};
use canal_model::ids::ServiceId;
use canal_model::listener_filters::ListenerFilter;
use canal_model::program::*;
use canal_model::request_fraction::RequestFraction;
use canal_model::route_authorizer::{RouteAuthorizer, RouteAuthorizerProtocol};
use canal_model::route_cors::CorsDialect;
use http::Request;

use crate::authorizers::authorizer;
use crate::client::HttpClient;
use crate::cors::policy_of;
use crate::fixture::{
    EngineSetup, GatewayFixture, LOCALHOST, TENANT, key, pod, prefix, route, service_with_id, to,
};
use crate::http2;
use crate::origin::OriginServer;
use crate::policies::{clause, policy, rule};
use crate::route_authorizers::{CHECKS, http1_server, http2_server, over_http};

const GATEWAY: &str = "public.gateway";
const PORT: u16 = 80;

/// Starts a server that allows, and sets `x-user` and a host, which no filter may set. It returns what
/// it was shown of `x-user`.
async fn second_server() -> OriginServer {
    OriginServer::each(|mut peer| async move {
        while let Some((head, _)) = peer.request().await {
            let head = head.to_ascii_lowercase();
            let shown = head.split("\r\nx-user: ").nth(1).unwrap_or_default();
            let shown = shown.split("\r\n").next().unwrap_or_default();
            let answer = format!(
                "HTTP/1.1 200 OK\r\nx-user: bob\r\nx-seen: {shown}\r\nhost: plain.example.com\r\ncontent-length: 0\r\n\r\n"
            );
            peer.write(answer.as_bytes()).await;
        }
    })
    .await
}

/// Returns a filter that asks the second server, which is shown `x-user`.
fn second() -> ListenerFilter {
    ListenerFilter::Authorize(RouteAuthorizer {
        service: key(TENANT, "second"),
        protocol: RouteAuthorizerProtocol::Http {
            path_prefix: String::new(),
            response_headers: Vec::new(),
        },
        headers: vec!["x-user".to_owned()],
        ..over_http(0)
    })
}

fn first() -> ListenerFilter {
    ListenerFilter::Authorize(over_http(0))
}

fn of_user(user: &str) -> ValueMatch {
    ValueMatch {
        name: "x-user".to_owned(),
        value: TextMatch::Exact(user.to_owned()),
    }
}

/// Returns a Gateway with these filters on its listener for any host, and none on that for
/// `plain.example.com`.
fn gateway(filters: Vec<ListenerFilter>) -> Resource {
    let listener = |name: &str, host: Option<&str>, filters| IngressListener {
        name: name.to_owned(),
        port: PORT,
        host: host.map(|host| HostMatch::Exact(host.to_owned())),
        is_open: true,
        relay: None,
        certificates: None,
        filters,
        virtual_hosts: vec![VirtualHost {
            host: None,
            routes: ["anns", "bobs", "rest"]
                .map(|name| RouteObject {
                    namespace: "default".parse().unwrap(),
                    name: name.parse().unwrap(),
                    kind: "VirtualService".into(),
                })
                .into(),
        }],
    };
    Resource::Ingress(IngressGateway {
        key: key(TENANT, GATEWAY),
        id: ServiceId::new(40).unwrap(),
        listeners: vec![
            listener("filtered", None, filters),
            listener("plain", Some("plain.example.com"), Vec::new()),
        ],
        client_validations: Vec::new(),
        trusted_proxies: 0,
        proxied_ports: Default::default(),
    })
}

/// An engine whose Gateway has one rule for each user, and one for all other requests.
struct FilteredFixture {
    fixture: GatewayFixture,
    address: SocketAddr,
    endpoints: [OriginServer; 3],
    server: OriginServer,
    second: OriginServer,
}

impl FilteredFixture {
    async fn new(filters: Vec<ListenerFilter>) -> Self {
        Self::asking(http1_server().await, AppProtocol::Http1, filters).await
    }

    async fn asking(
        server: OriginServer,
        protocol: AppProtocol,
        filters: Vec<ListenerFilter>,
    ) -> Self {
        let endpoints = [
            OriginServer::echo().await,
            OriginServer::echo().await,
            OriginServer::echo().await,
        ];
        let second = second_server().await;
        let public = PlainListener {
            address: LOCALHOST,
            service: key(TENANT, GATEWAY),
            port: PORT,
        };
        let setup = EngineSetup {
            plain: vec![public],
            ..EngineSetup::default()
        };
        let fixture = GatewayFixture::new(setup, &[endpoints[0].address]);
        let split = |service: &str| RouteAction::Split(vec![to(service, &[], 1)]);
        let of_user = |user: &str| HttpMatch {
            headers: vec![of_user(user)],
            ..prefix("/")
        };
        let http = &[(80, AppProtocol::Http1)];
        fixture.apply(vec![
            service_with_id(TENANT, "ann", 2, "10.96.0.2", http),
            Resource::Workload(pod(TENANT, "ann-0", endpoints[1].address, "ann")),
            service_with_id(TENANT, "bob", 3, "10.96.0.3", http),
            Resource::Workload(pod(TENANT, "bob-0", endpoints[2].address, "bob")),
            service_with_id(TENANT, "auth", 7, "10.96.0.7", &[(80, protocol)]),
            Resource::Workload(pod(TENANT, "auth-0", server.address, "auth")),
            service_with_id(TENANT, "second", 8, "10.96.0.8", http),
            Resource::Workload(pod(TENANT, "second-0", second.address, "second")),
            gateway(filters),
            route(GATEWAY, "anns", 0, of_user("ann"), split("ann")),
            route(GATEWAY, "bobs", 1, of_user("bob"), split("bob")),
            route(GATEWAY, "rest", 2, prefix("/"), split("web")),
        ]);
        let address = fixture.engine.plain_addresses()[1];
        Self {
            fixture,
            address,
            endpoints,
            server,
            second,
        }
    }

    /// Sends a request of a client that claims to be another user. Returns the status and the body.
    async fn get(&self, over_http2: bool, host: &str, path: &str) -> (u16, String) {
        if over_http2 {
            let request = Request::get(format!("http://{host}{path}"))
                .header("x-user", "mallory")
                .body(())
                .unwrap();
            let sender = http2::connect_to(self.address).await.ready().await;
            let (response, _) = sender.unwrap().send_request(request, true).unwrap();
            let (parts, body) = response.await.unwrap().into_parts();
            let body = http2::read_all(body).await.unwrap().0;
            return (parts.status.as_u16(), String::from_utf8_lossy(&body).into());
        }
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: {host}\r\nX-User: mallory\r\nConnection: close\r\n\r\n"
        );
        let response = HttpClient::once(self.address, &request).await;
        (response.status, response.text())
    }

    /// Returns the number of requests of each endpoint: of the rest, of ann, and of bob.
    fn requests(&self) -> [usize; 3] {
        [0, 1, 2].map(|at| self.endpoints[at].requests())
    }

    /// Returns the number of checks with this result.
    fn checks(&self, result: &str) -> f64 {
        let result = format!("result=\"{result}\"");
        let name = "authorizer=\"Gateway/default/public\"";
        self.fixture.metric(CHECKS, &[&result, name])
    }
}

#[tokio::test]
async fn rules_match_the_headers_that_a_filter_sets() {
    for (server, protocol) in [
        (http1_server().await, AppProtocol::Http1),
        (http2_server().await, AppProtocol::Http2),
    ] {
        let filtered = FilteredFixture::asking(server, protocol, vec![first()]).await;
        for over_http2 in [false, true] {
            let before = filtered.requests();
            let (status, body) = filtered.get(over_http2, "www.example.com", "/x?q").await;
            let body = body.to_ascii_lowercase();
            assert_eq!(status, 200, "{protocol:?}: {body}");
            assert!(body.contains("x-user: ann"), "{body}");
            assert!(!body.contains("mallory"), "{body}");
            let selected = filtered.requests();
            assert_eq!(
                selected,
                [before[0], before[1] + 1, before[2]],
                "{protocol:?}"
            );
            assert_eq!(
                filtered.get(over_http2, "www.example.com", "/no").await.0,
                401
            );
            assert_eq!(filtered.requests(), selected, "nothing passed");
            // Another listener of the port has no filters.
            let checks = filtered.server.requests();
            let (status, body) = filtered.get(over_http2, "plain.example.com", "/no").await;
            assert_eq!(status, 200);
            assert!(
                body.to_ascii_lowercase().contains("x-user: mallory"),
                "{body}"
            );
            assert_eq!(filtered.server.requests(), checks);
        }
        assert_eq!(
            (filtered.checks("ok"), filtered.checks("denied")),
            (2.0, 2.0)
        );
    }
}

#[tokio::test]
async fn a_server_over_grpc_decides_about_a_listener_too() {
    let (server, _) = authorizer().await;
    let over_grpc = ListenerFilter::Authorize(RouteAuthorizer {
        protocol: RouteAuthorizerProtocol::Grpc,
        ..over_http(0)
    });
    let filtered = FilteredFixture::asking(server, AppProtocol::Grpc, vec![over_grpc]).await;
    assert_eq!(filtered.get(false, "www.example.com", "/x").await.0, 200);
    assert_eq!(filtered.requests(), [0, 1, 0]);
    assert_eq!(filtered.get(false, "www.example.com", "/no").await.0, 302);
    assert_eq!(filtered.requests(), [0, 1, 0]);
}

#[tokio::test]
async fn filters_run_in_their_order_and_the_last_header_counts() {
    let filtered = FilteredFixture::new(Vec::new()).await;
    for (filters, seen, selected) in [
        (vec![first(), second()], "ann", [0, 0, 1]),
        (vec![second(), first()], "mallory", [0, 1, 1]),
    ] {
        filtered.fixture.apply(vec![gateway(filters)]);
        let (status, body) = filtered.get(false, "www.example.com", "/x").await;
        assert_eq!(status, 200, "{body}");
        let body = body.to_ascii_lowercase();
        assert!(body.contains(&format!("x-seen: {seen}")), "{body}");
        // No filter changes the host, so the listener stays the same.
        assert!(body.contains("host: www.example.com"), "{body}");
        assert_eq!(filtered.requests(), selected);
    }
    // The first filter that denies ends the request.
    filtered
        .fixture
        .apply(vec![gateway(vec![first(), second()])]);
    let before = filtered.second.requests();
    assert_eq!(filtered.get(false, "www.example.com", "/no").await.0, 401);
    assert_eq!(filtered.second.requests(), before);
}

#[tokio::test]
async fn each_request_of_a_connection_is_checked() {
    let filtered = FilteredFixture::new(vec![first()]).await;
    let mut client = HttpClient::connect(filtered.address).await;
    for (path, status) in [("/x", 200), ("/no", 401), ("/x", 200)] {
        let request = format!("GET {path} HTTP/1.1\r\nHost: www.example.com\r\n\r\n");
        client.send(request.as_bytes()).await;
        assert_eq!(client.answer().await.unwrap().status, status, "{path}");
    }
    assert_eq!(filtered.server.requests(), 3);
    assert_eq!(filtered.requests(), [0, 2, 0]);
}

#[tokio::test]
async fn a_listener_without_a_decision_is_closed() {
    let gone = ListenerFilter::Authorize(RouteAuthorizer {
        service: key(TENANT, "gone"),
        ..over_http(0)
    });
    let filtered = FilteredFixture::new(Vec::new()).await;
    for (filter, path, status) in [
        (ListenerFilter::Refuse, "/x", 500),
        (gone, "/x", 403),
        (first(), "/broken", 403),
        (first(), "/junk", 403),
    ] {
        filtered.fixture.apply(vec![gateway(vec![filter])]);
        for over_http2 in [false, true] {
            let answer = filtered.get(over_http2, "www.example.com", path).await;
            assert_eq!(answer.0, status, "{path}");
            // The other listener is open.
            assert_eq!(
                filtered.get(over_http2, "plain.example.com", "/x").await.0,
                200
            );
        }
    }
    // A filter that refuses everything precedes the servers, whatever its place.
    filtered
        .fixture
        .apply(vec![gateway(vec![first(), ListenerFilter::Refuse])]);
    assert_eq!(filtered.get(false, "www.example.com", "/no").await.0, 500);
    assert_eq!(filtered.requests(), [8, 0, 0]);
    let failed = [
        "authorizer_no_service",
        "authorizer_status",
        "authorizer_malformed",
    ];
    for result in failed {
        assert_eq!(filtered.checks(result), 2.0, "{result}");
    }
}

#[tokio::test]
async fn policies_judge_the_headers_that_a_filter_sets() {
    let filtered = FilteredFixture::new(vec![first()]).await;
    let user = Attribute::Header("x-user".to_owned());
    for (named, status) in [("ann", 403), ("mallory", 200)] {
        let condition = clause(user.clone(), &[named]);
        filtered.fixture.apply(vec![policy(
            "no",
            AuthorizationAction::Deny,
            vec![rule(vec![condition])],
        )]);
        let (is, _) = filtered.get(false, "www.example.com", "/x").await;
        assert_eq!(is, status, "{named}");
    }
}

#[tokio::test]
async fn bodies_reach_the_servers_of_listeners_and_the_endpoints() {
    let reading = ListenerFilter::Authorize(over_http(5));
    let filtered = FilteredFixture::new(vec![reading, first()]).await;
    for (body, status) in [("", 200), ("12345", 200), ("123456", 403)] {
        let request = format!(
            "POST /x HTTP/1.1\r\nHost: www.example.com\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        let response = HttpClient::once(filtered.address, &request).await;
        assert_eq!(response.status, status, "{body:?}");
        if status == 200 {
            assert!(response.text().ends_with(body), "{}", response.text());
        }
    }
    assert_eq!(filtered.checks("authorizer_body_too_large"), 1.0);
}

#[tokio::test]
async fn preflights_and_copies_are_not_checked() {
    let filtered = FilteredFixture::new(vec![first()]).await;
    let copy = OriginServer::echo().await;
    let split = || RouteAction::Split(vec![to("ann", &[], 1)]);
    let mut shared = route(GATEWAY, "rest", 2, prefix("/"), split());
    if let Resource::Route(rule) = &mut shared {
        rule.cors = Some(Box::new(policy_of(CorsDialect::GatewayApi)));
    }
    let of_ann = HttpMatch {
        headers: vec![of_user("ann")],
        ..prefix("/")
    };
    let mut copied = route(GATEWAY, "anns", 0, of_ann, split());
    if let Resource::Route(rule) = &mut copied {
        rule.mirrors = vec![RouteMirror {
            target: to("copy", &[], 1).target,
            fraction: RequestFraction::ALL,
            backend: None,
        }];
    }
    filtered.fixture.apply(vec![
        service_with_id(TENANT, "copy", 9, "10.96.0.9", &[(80, AppProtocol::Http1)]),
        Resource::Workload(pod(TENANT, "copy-0", copy.address, "copy")),
        shared,
        copied,
    ]);
    let preflight = "OPTIONS /no HTTP/1.1\r\nHost: www.example.com\r\nOrigin: https://x.a.example\r\nAccess-Control-Request-Method: PUT\r\nConnection: close\r\n\r\n";
    let response = HttpClient::once(filtered.address, preflight).await;
    assert_eq!((response.status, filtered.server.requests()), (200, 0));
    // Without an origin it is a request as any other.
    let options = "OPTIONS /no HTTP/1.1\r\nHost: www.example.com\r\nConnection: close\r\n\r\n";
    let response = HttpClient::once(filtered.address, options).await;
    assert_eq!((response.status, filtered.server.requests()), (401, 1));
    // The copy has the headers of the filter, and no check of its own.
    assert_eq!(filtered.get(false, "www.example.com", "/x").await.0, 200);
    let sent = ["result=\"sent\""];
    let copies = "canal_gateway_mirrored_requests_total";
    filtered.fixture.until(copies, &sent, 1.0).await;
    assert_eq!((copy.requests(), filtered.server.requests()), (1, 2));
}
