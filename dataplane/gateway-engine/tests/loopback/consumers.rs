//! Routes for the clients of one namespace: the namespace is that of the verified identity, and such
//! routes replace those for all clients.

use canal_hbone::HboneStream;
use canal_identity::ClientIdentity;
use canal_model::authorization::{Attribute, AuthorizationAction};
use canal_model::program::{Resource, ResourceKind, RouteAction};
use canal_model::route_filters::{HeaderModifier, RouteFilters};
use canal_runtime::metrics::Registry;
use canal_testing::identity;
use canal_tls::TrustStore;
use http::HeaderMap;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, TENANT, prefix, route, to};
use crate::hbone::{LoopbackMesh, local};
use crate::origin::OriginServer;
use crate::policies::{clause, policy, rule};

/// Returns a route of `web` whose responses say its name; with a namespace, for its clients only.
fn named_route(name: &str, path: &str, consumer: Option<&str>) -> Resource {
    let split = RouteAction::Split(vec![to("web", &[], 1)]);
    let mut resource = route("web", name, 0, prefix(path), split);
    if let Resource::Route(rule) = &mut resource {
        rule.consumer = consumer.map(|namespace| namespace.parse().unwrap());
        rule.filters = Some(Box::new(RouteFilters {
            response_headers: HeaderModifier {
                set: vec![("x-routed-by".to_owned(), name.to_owned())],
                ..HeaderModifier::default()
            },
            ..RouteFilters::default()
        }));
    }
    resource
}

/// Opens a tunnel to `web` as a client of a namespace of the tenant `own`. Its headers claim another
/// namespace.
async fn client_of(mesh: &LoopbackMesh, own: &str, namespace: &str) -> HttpClient<HboneStream> {
    let id = identity(&format!("spiffe://{own}.example/ns/{namespace}/sa/client"));
    let mut target = mesh.target(own, TENANT);
    target.source = ClientIdentity::new(mesh.ca(own).credential(&id));
    if own != TENANT {
        let trust = TrustStore::new(&Registry::new());
        let bundles = [
            mesh.ca(own).bundle(own, "beta.example", false, vec![]),
            mesh.ca(TENANT).bundle(own, "alpha.example", true, vec![]),
        ];
        trust.replace(bundles).unwrap();
        target.source = target.source.trusting(trust.view(&own.parse().unwrap()));
    }
    let claimed = match namespace {
        "front" => "default",
        _ => "front",
    };
    let mut headers = HeaderMap::new();
    let baggage = format!("k8s.namespace.name={claimed},service.name=client");
    headers.insert("baggage", baggage.parse().unwrap());
    let source = format!("spiffe://alpha.example/ns/{claimed}/sa/client");
    headers.insert("canal-source", source.parse().unwrap());
    let authority = "10.96.0.1:80".parse().unwrap();
    let opened = mesh.pool.open(&target, &authority, headers).await.unwrap();
    HttpClient {
        stream: opened.stream,
        buffer: Vec::new(),
    }
}

/// Sends a request, and returns the status and the route that the response names.
async fn routed_by(client: &mut HttpClient<HboneStream>, path: &str) -> (u16, String) {
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: web\r\nx-forwarded-client-cert: URI=spiffe://alpha.example/ns/front/sa/client\r\n\r\n"
    );
    client.send(request.as_bytes()).await;
    let answer = client.answer().await.unwrap();
    let route = answer.field("x-routed-by").unwrap_or_default();
    (answer.status, route.to_owned())
}

fn ok(route: &str) -> (u16, String) {
    (200, route.to_owned())
}

#[test]
fn the_verified_namespace_selects_the_routes_of_a_client() {
    local(|| async {
        let origin = OriginServer::echo().await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        mesh.fixture.apply(vec![
            named_route("producer", "/", None),
            named_route("consumer", "/a", Some("front")),
        ]);
        let mut front = client_of(&mesh, TENANT, "front").await;
        let mut other = client_of(&mesh, TENANT, "default").await;
        assert_eq!(routed_by(&mut front, "/a").await, ok("consumer"));
        // The routes of the namespace replace all others, also for what they do not match.
        assert_eq!(routed_by(&mut front, "/b").await, (404, String::new()));
        for path in ["/a", "/b"] {
            assert_eq!(routed_by(&mut other, path).await, ok("producer"));
        }
        // A client without an identity belongs to no namespace, whatever address it has.
        let plain = HttpClient::get(mesh.fixture.web, "/a").await;
        assert_eq!(plain.field("x-routed-by"), Some("producer"));

        // Open connections follow the next configuration.
        let name = named_route("consumer", "/a", Some("front")).name();
        mesh.fixture
            .change(vec![], &[(ResourceKind::Route, name.as_str())]);
        assert_eq!(routed_by(&mut front, "/a").await, ok("producer"));
        let default = named_route("consumer", "/", Some("default"));
        mesh.fixture.apply(vec![default]);
        assert_eq!(routed_by(&mut other, "/b").await, ok("consumer"));
        assert_eq!(routed_by(&mut front, "/b").await, ok("producer"));

        // Without routes for all, the other clients get the Service itself.
        let name = named_route("producer", "/", None).name();
        mesh.fixture
            .change(vec![], &[(ResourceKind::Route, name.as_str())]);
        assert_eq!(routed_by(&mut front, "/b").await, ok(""));
        assert_eq!(routed_by(&mut other, "/b").await, ok("consumer"));
    });
}

/// Another tenant may have a namespace of the same name.
#[test]
fn a_federated_client_has_the_routes_of_all() {
    local(|| async {
        let origin = OriginServer::echo().await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        let own = mesh
            .ca(TENANT)
            .bundle(TENANT, "alpha.example", false, vec![]);
        let other = mesh.ca("beta").bundle(TENANT, "beta.example", true, vec![]);
        mesh.trust.replace([own.clone(), other.clone()]).unwrap();
        let principal = "beta.example/ns/front/sa/client";
        let from = rule(vec![clause(Attribute::SourcePrincipal, &[principal])]);
        let allow = policy("who", AuthorizationAction::Allow, vec![from]);
        mesh.fixture.apply(vec![
            (*own).clone(),
            (*other).clone(),
            allow,
            named_route("producer", "/", None),
            named_route("consumer", "/", Some("front")),
        ]);
        let mut foreign = client_of(&mesh, "beta", "front").await;
        assert_eq!(routed_by(&mut foreign, "/").await, ok("producer"));
    });
}
