//! A closed tenant on real connections: nothing of it is served, its open connections end, and
//! other tenants are not affected.

use canal_model::ids::TenantName;
use canal_model::program::AppProtocol;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, TENANT};
use crate::hbone::{LoopbackMesh, local};
use crate::origin::{OriginServer, Peer};

/// Closes these tenants and reopens all others.
fn close(fixture: &GatewayFixture, tenants: &[&str]) {
    fixture.engine.close_tenants(
        tenants
            .iter()
            .map(|t| TenantName::new(t).unwrap())
            .collect(),
    );
    fixture.apply(vec![]);
}

#[tokio::test]
async fn closed_tenant_is_answered_503_until_it_opens() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    for (closed, status) in [
        (&["beta"][..], 200),
        (&[TENANT, "beta"], 503),
        (&[TENANT], 503),
        (&[], 200),
    ] {
        close(&fixture, closed);
        assert_eq!(
            HttpClient::get(fixture.web, "/x").await.status,
            status,
            "{closed:?} closed"
        );
    }
    assert_eq!(
        fixture.metric(
            "canal_gateway_refused_requests_total",
            &["reason=\"tenant_closed\""]
        ),
        2.0
    );
    // The change also applies between two requests on one open connection.
    let mut client = HttpClient::connect(fixture.web).await;
    for (closed, status) in [(&[][..], 200), (&[TENANT], 503)] {
        close(&fixture, closed);
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        assert_eq!(
            client.answer().await.unwrap().status,
            status,
            "{closed:?} closed"
        );
    }
}

#[test]
fn connect_to_a_closed_tenant_is_refused_by_name() {
    local(|| async {
        let origin = OriginServer::echo().await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        assert!(mesh.open("10.96.0.1:80").await.is_ok());
        close(&mesh.fixture, &[TENANT]);
        assert!(mesh.open("10.96.0.1:80").await.is_err());
        assert_eq!(
            mesh.fixture.metric(
                "canal_gateway_refused_connects_total",
                &["reason=\"tenant_closed\""]
            ),
            1.0
        );
        close(&mesh.fixture, &[]);
        assert!(mesh.open("10.96.0.1:80").await.is_ok());
    });
}

#[tokio::test]
async fn open_relay_ends_when_its_tenant_closes() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        peer.write(b"x").await;
        let _held = peer;
        std::future::pending::<()>().await;
    })
    .await;
    let fixture = GatewayFixture::new(
        EngineSetup {
            protocol: AppProtocol::Tcp,
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(b"x").await;
    assert_eq!(client.exactly(1).await, b"x");
    close(&fixture, &["beta"]);
    // A wrong end would come within this time: a relay ends soon after its tenant closes.
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert_eq!(
        fixture.metric("istio_tcp_connections_closed_total", &[]),
        0.0,
        "another tenant's closing is not its end"
    );
    close(&fixture, &[TENANT]);
    fixture
        .until("istio_tcp_connections_closed_total", &[], 1.0)
        .await;
    client.closed().await;
    assert!(
        !HttpClient::connect(fixture.web).await.more().await,
        "a new one is not served"
    );
}
