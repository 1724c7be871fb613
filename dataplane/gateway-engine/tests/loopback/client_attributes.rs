//! Rules that depend on what the gateway knows of a client without any header: its scheme, its
//! namespace and the labels of its workload.

use std::net::SocketAddr;

use canal_model::client_attributes::{SCHEME, SOURCE_LABEL, SOURCE_NAMESPACE};
use canal_model::program::{Resource, RouteAction, TextMatch, ValueMatch};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, TENANT, pod, prefix, route, to};
use crate::hbone::{CLIENT, LoopbackMesh, local};
use crate::origin::OriginServer;

/// Status of requests for which a rule with a condition is chosen.
const CHOSEN: u16 = 418;

/// Builds a rule for requests of clients with this attribute, below a path.
fn rule_for(place: u32, path: &str, attribute: &str, value: &str) -> Resource {
    let mut http = prefix(path);
    http.headers = vec![ValueMatch {
        name: attribute.to_owned(),
        value: TextMatch::Exact(value.to_owned()),
    }];
    let reason = "the attribute".to_owned();
    let refuse = RouteAction::Refuse {
        status: CHOSEN,
        reason,
    };
    route("web", &format!("r{place}"), place, http, refuse)
}

fn rules() -> Vec<Resource> {
    let label = format!("{SOURCE_LABEL}example/App");
    vec![
        rule_for(0, "/plain", SCHEME, "http"),
        rule_for(1, "/https", SCHEME, "https"),
        rule_for(2, "/namespace", SOURCE_NAMESPACE, "default"),
        rule_for(3, "/elsewhere", SOURCE_NAMESPACE, "other"),
        rule_for(4, "/label", &label, "client"),
        route(
            "web",
            "rest",
            5,
            prefix("/"),
            RouteAction::Split(vec![to("web", &[], 1)]),
        ),
    ]
}

/// Returns the paths for which a rule with a condition is chosen. The client claims to have each
/// attribute.
async fn chosen<S: AsyncRead + AsyncWrite + Unpin>(
    client: &mut HttpClient<S>,
) -> Vec<&'static str> {
    let mut chosen = Vec::new();
    for path in ["/plain", "/https", "/namespace", "/elsewhere", "/label"] {
        let request = format!(
            "GET /x/..{path} HTTP/1.1\r\nHost: web\r\nx-forwarded-proto: https\r\nsource-namespace: other\r\n\r\n"
        );
        client.send(request.as_bytes()).await;
        let status = client.answer().await.unwrap().status;
        match status {
            CHOSEN => chosen.push(path),
            200 => {}
            other => panic!("{path}: {other}"),
        }
    }
    chosen
}

#[test]
fn the_clients_namespace_and_labels_select_the_rule() {
    local(|| async {
        let origin = OriginServer::echo().await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        mesh.fixture.apply(rules());
        let workload = |account: &str, address: SocketAddr, app: &str| {
            let mut workload = pod(TENANT, "client-0", address, account);
            workload.labels = [("example/App".to_owned(), app.to_owned())].into();
            workload.endpoints.clear();
            mesh.fixture.apply(vec![Resource::Workload(workload)]);
        };
        let at = |host| SocketAddr::new(mesh.address(host), 0);
        let mut client = mesh.client("10.96.0.1:80").await;
        let unlabelled = ["/plain", "/namespace"];
        let labelled = ["/plain", "/namespace", "/label"];
        assert_eq!(chosen(&mut client).await, unlabelled, "no workload");
        // Changes of workloads concern open connections too.
        workload("client", at(CLIENT), "client");
        assert_eq!(chosen(&mut client).await, labelled);
        workload("client", at(CLIENT), "other");
        assert_eq!(chosen(&mut client).await, unlabelled, "another label");
        workload("other", at(CLIENT), "client");
        assert_eq!(chosen(&mut client).await, unlabelled, "another identity");
        workload("client", at(CLIENT - 1), "client");
        assert_eq!(chosen(&mut client).await, unlabelled, "another address");
        // A client that proved nothing has no workload, whatever its address is.
        let mut plain = HttpClient::connect(mesh.fixture.web).await;
        let local = plain.stream.local_addr().unwrap();
        workload("client", local, "client");
        assert_eq!(chosen(&mut plain).await, ["/plain"]);
    });
}
