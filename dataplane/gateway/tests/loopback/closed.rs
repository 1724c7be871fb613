//! A closed tenant on real connections: nothing of it is served, what is open ends, and other tenants notice nothing.

use canal_model::ids::TenantName;
use canal_model::program::AppProtocol;

use crate::client::Client;
use crate::hbone::{Mesh, local};
use crate::origin::{Origin, Peer};
use crate::rig::{Plot, Rig, TENANT};

/// Closes these tenants and no others.
fn close(rig: &Rig, tenants: &[&str]) {
    rig.engine.close_tenants(tenants.iter().map(|t| TenantName::new(t).unwrap()).collect());
    rig.apply(vec![]);
}

#[tokio::test]
async fn closed_tenant_is_answered_503_until_it_opens() {
    let origin = Origin::echo().await;
    let rig = Rig::new(Plot::default(), &[origin.address]);
    for (closed, status) in [(&["beta"][..], 200), (&[TENANT, "beta"], 503), (&[TENANT], 503), (&[], 200)] {
        close(&rig, closed);
        assert_eq!(Client::get(rig.web, "/x").await.status, status, "{closed:?} closed");
    }
    assert_eq!(rig.metric("canal_gateway_refused_requests_total", &["reason=\"tenant_closed\""]), 2.0);
    // On a connection that stays open, from one request to the next.
    let mut client = Client::connect(rig.web).await;
    for (closed, status) in [(&[][..], 200), (&[TENANT], 503)] {
        close(&rig, closed);
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        assert_eq!(client.answer().await.unwrap().status, status, "{closed:?} closed");
    }
}

#[test]
fn connect_to_a_closed_tenant_is_refused_by_name() {
    local(|| async {
        let origin = Origin::echo().await;
        let mesh = Mesh::new(Plot::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        assert!(mesh.open("10.96.0.1:80").await.is_ok());
        close(&mesh.rig, &[TENANT]);
        assert!(mesh.open("10.96.0.1:80").await.is_err());
        assert_eq!(mesh.rig.metric("canal_gateway_refused_connects_total", &["reason=\"tenant_closed\""]), 1.0);
        close(&mesh.rig, &[]);
        assert!(mesh.open("10.96.0.1:80").await.is_ok());
    });
}

#[tokio::test]
async fn open_relay_ends_when_its_tenant_closes() {
    let origin = Origin::each(|mut peer: Peer| async move {
        peer.write(b"x").await;
        let _held = peer;
        std::future::pending::<()>().await;
    })
    .await;
    let rig = Rig::new(Plot { protocol: AppProtocol::Tcp, ..Plot::default() }, &[origin.address]);
    let mut client = Client::connect(rig.web).await;
    client.send(b"x").await;
    assert_eq!(client.exactly(1).await, b"x");
    close(&rig, &["beta"]);
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert_eq!(rig.metric("istio_tcp_connections_closed_total", &[]), 0.0, "another tenant's closing is not its end");
    close(&rig, &[TENANT]);
    rig.until("istio_tcp_connections_closed_total", &[], 1.0).await;
    client.closed().await;
    assert!(!Client::connect(rig.web).await.more().await, "a new one is not served");
}
