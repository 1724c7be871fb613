//! Clients outside the tenants reach services through Gateways: each at an address of its own on
//! the clients' network, over whichever replica is up.

use std::time::Duration;

use canal_e2e::{Mesh, until};
use canal_timing::deadline;
use serde_json::Value;

const CLIENT: &str = "clients/default/client-0";
const SOON: Duration = Duration::from_secs(15);
/// The address that alpha requests, and the lowest of the pool, which beta gets.
const ALPHA: &str = "198.19.0.40";
const BETA: &str = "198.19.0.33";

fn gateway(addresses: &str) -> String {
    format!(
        "---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: public, namespace: default}}\n\
         spec: {{gatewayClassName: canal, {addresses}listeners: [{{name: http, port: 80, protocol: HTTP}}]}}\n\
         ---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: shop, namespace: default}}\n\
         spec: {{parentRefs: [{{name: public}}], hostnames: [shop.example.com], rules: [{{backendRefs: [{{name: web, port: 80}}]}}]}}\n"
    )
}

/// Returns the status of a request of the client's.
fn code(mesh: &Mesh, address: &str, host: &str) -> u16 {
    let resolve = format!("{host}:80:{address}");
    mesh.code(
        CLIENT,
        &format!("http://{host}/headers"),
        &["--resolve", &resolve],
    )
}

/// Returns what an application received of a request of the client's.
fn received(mesh: &Mesh, address: &str) -> Value {
    let url = format!("http://{address}/headers");
    mesh.run(
        CLIENT,
        &["curl", "-sS", "-H", "host: shop.example.com", &url],
    )
    .json()
}

#[test]
fn clients_outside_the_tenants_reach_services_at_gateways() {
    let mesh = Mesh::up("ingress.yaml", "e2e-ingress");
    mesh.apply(
        "alpha",
        &gateway(&format!("addresses: [{{value: {ALPHA}}}], ")),
    );
    mesh.apply("beta", &gateway(""));
    for address in [ALPHA, BETA] {
        until(deadline(SOON), &format!("{address} answers"), || {
            code(&mesh, address, "shop.example.com") == 200
        });
    }
    // The address alone decides the tenant, and the host decides the routes.
    for (address, tenant) in [(ALPHA, "alpha"), (BETA, "beta")] {
        let received = received(&mesh, address);
        assert_eq!(received["version"], tenant, "{received}");
        let client = mesh.address(CLIENT).to_string();
        let forwarded = serde_json::json!(["x-forwarded-for", client]);
        let headers = received["headers"].as_array().expect("headers");
        assert!(headers.contains(&forwarded), "{received}");
        assert_eq!(code(&mesh, address, "unknown.example.com"), 404);
    }
    // A free address of the pool, a port without a listener, and HBONE's.
    assert_eq!(code(&mesh, "198.19.0.35", "shop.example.com"), 0);
    for port in [81, 15008] {
        assert_eq!(
            mesh.code(CLIENT, &format!("http://{ALPHA}:{port}/"), &[]),
            0
        );
    }
    each_replica_serves_alone(&mesh);
    a_gateway_without_an_address_disturbs_no_other(&mesh);
    mesh.canal(&[
        "delete", "--tenant", "beta", "Gateway", "public", "-n", "default",
    ])
    .ok();
    until(deadline(SOON), "beta's address is free again", || {
        code(&mesh, BETA, "shop.example.com") == 0
    });
    assert_eq!(code(&mesh, ALPHA, "shop.example.com"), 200);
}

/// Kills one replica after the other; the other one serves both Gateways meanwhile.
fn each_replica_serves_alone(mesh: &Mesh) {
    for replica in ["gw-1", "gw-2"] {
        mesh.world
            .stop(replica)
            .unwrap_or_else(|e| panic!("{replica}: {e}"));
        for address in [ALPHA, BETA] {
            until(
                deadline(SOON),
                &format!("{address} without {replica}"),
                || (0..20).all(|_| code(mesh, address, "shop.example.com") == 200),
            );
        }
        mesh.world
            .start(replica)
            .unwrap_or_else(|e| panic!("{replica}: {e}"));
        mesh.world
            .wait_ready(deadline(SOON))
            .unwrap_or_else(|e| panic!("{replica}: {e}"));
        let count =
            |mesh: &Mesh| mesh.counted(replica, "istio_requests_total", &["response_code=\"200\""]);
        until(deadline(SOON), &format!("{replica} serves again"), || {
            code(mesh, ALPHA, "shop.example.com") == 200 && count(mesh) > 0
        });
    }
}

/// Beta requests alpha's address for a further Gateway, and gets none.
fn a_gateway_without_an_address_disturbs_no_other(mesh: &Mesh) {
    let second = gateway(&format!("addresses: [{{value: {ALPHA}}}], ")).replace("public", "second");
    mesh.apply("beta", &second.replace("name: shop", "name: second"));
    let service = ["gateway", "status", "beta/default/second.gateway"];
    until(deadline(SOON), "the reason is shown", || {
        let shown = mesh.canal(&service).stdout;
        shown.contains("no gateway address in az1: another Gateway has the address")
    });
    for (address, tenant) in [(ALPHA, "alpha"), (BETA, "beta")] {
        assert_eq!(received(mesh, address)["version"], tenant);
    }
}
