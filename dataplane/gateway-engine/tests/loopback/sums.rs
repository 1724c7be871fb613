//! Ten tenants use all that they can get of one limit at the same time, and an eleventh is served.
//! Nothing here depends on time.

use std::net::SocketAddr;
use std::sync::Arc;

use canal_gateway_engine::{GatewayLimits, PlainListener};
use canal_model::program::*;
use tokio::net::TcpStream;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, LOCALHOST, key, pod, service_with_id, tenant};
use crate::hbone::{LoopbackMesh, local};
use crate::origin::OriginServer;
use crate::shares::{connects, flood};

/// Number of tenants that use all they can get. As in `tests/e2e/tests/exhaustion/sums.rs`.
const GREEDY: usize = 10;

/// An engine with a plain listener for each of eleven tenants, all with the same endpoint.
struct ElevenTenants {
    fixture: GatewayFixture,
    greedy: Vec<SocketAddr>,
    eleventh: SocketAddr,
}

impl ElevenTenants {
    fn new(limits: GatewayLimits, origin: &OriginServer) -> Self {
        let name = |n: usize| format!("t{n}");
        let plain = (0..GREEDY)
            .map(|n| PlainListener {
                address: LOCALHOST,
                service: key(&name(n), "web"),
                port: 80,
            })
            .collect();
        let fixture = GatewayFixture::new(
            EngineSetup {
                limits,
                plain,
                ..EngineSetup::default()
            },
            &[origin.address],
        );
        let resources = (0..GREEDY).flat_map(|n| {
            let (name, id) = (name(n), u32::try_from(n).unwrap() + 2);
            [
                tenant(&name, id),
                service_with_id(&name, "web", id, "10.97.0.1", &[(80, AppProtocol::Http1)]),
                Resource::Workload(pod(&name, "b-0", origin.address, "web")),
            ]
        });
        fixture.apply(resources.collect());
        let greedy = fixture.engine.plain_addresses()[1..].to_vec();
        Self {
            eleventh: fixture.web,
            greedy,
            fixture,
        }
    }

    /// Asserts that the eleventh tenant's requests on new connections are answered.
    async fn assert_served(&self, requests: usize) {
        for n in 0..requests {
            assert_eq!(
                HttpClient::get(self.eleventh, "/").await.status,
                200,
                "request {n}"
            );
        }
    }
}

#[tokio::test]
async fn connections_at_work_of_ten_tenants_leave_some_to_an_eleventh() {
    // The proportions of the default limits: a tenant has a half, and a fifth may be
    // unauthenticated.
    let limits = GatewayLimits {
        connections: 320,
        tenant_connections: 160,
        unauthenticated: 64,
        ..GatewayLimits::default()
    };
    let tenants = ElevenTenants::new(limits, &OriginServer::named("web").await);
    let mut at_work = Vec::new();
    let mut counts = Vec::new();
    for address in &tenants.greedy {
        let before = at_work.len();
        // The connection after the last is refused.
        for _ in 0..=160 {
            let mut client = HttpClient::connect(*address).await;
            client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
            let Some(answer) = client.answer().await else {
                break;
            };
            assert_eq!(answer.status, 200);
            at_work.push(client);
        }
        counts.push(at_work.len() - before);
    }
    // The first tenant fills its share; each later one gets a part of what is left.
    assert!(
        counts[0] == 160 && counts.iter().all(|count| *count > 0),
        "{counts:?}"
    );
    // One request of the eleventh tenant suffices, since a refusal would be a closed connection.
    tenants.assert_served(1).await;
    assert_eq!(
        tenants.fixture.metric(
            "canal_gateway_refused_connections_total",
            &["tenant_connections"]
        ),
        // Each greedy tenant has met its limit once.
        10.0,
        "{counts:?}"
    );
    // A tenant is refused while others may need what is free (`decide_free_needed`), so the whole
    // limit is never met.
    assert_eq!(
        tenants
            .fixture
            .metric("canal_limit_refused_total", &["limit=\"connections\""]),
        0.0
    );
    for client in &mut at_work {
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        assert_eq!(
            client.answer().await.unwrap().status,
            200,
            "a connection at work stays"
        );
    }
}

#[tokio::test]
async fn silent_connections_of_ten_tenants_leave_some_to_an_eleventh() {
    let limits = GatewayLimits {
        unauthenticated: 24,
        ..GatewayLimits::default()
    };
    let tenants = ElevenTenants::new(limits, &OriginServer::named("web").await);
    let mut flooded = Vec::new();
    for address in &tenants.greedy {
        flooded.extend(flood(*address, 20, b"").await);
    }
    tenants.assert_served(20).await;
    tenants
        .fixture
        .until(
            "canal_share_revoked_total",
            &["limit=\"gateway_unauthenticated_connections\""],
            176.0,
        )
        .await;
    assert_eq!(
        tenants
            .fixture
            .metric("canal_share_revoked_total", &["tenant=\"alpha\""]),
        0.0
    );
}

#[tokio::test]
async fn requests_in_flight_of_ten_tenants_leave_some_to_an_eleventh() {
    // More than the 24 requests that one tenant may have in flight.
    const EACH: usize = 30;
    // The proportions of the default limits: a tenant may have two fifths.
    let limits = GatewayLimits {
        requests: 60,
        tenant_requests: 24,
        ..GatewayLimits::default()
    };
    let tenants = ElevenTenants::new(limits, &OriginServer::echo().await);
    let mut in_flight = Vec::new();
    for address in &tenants.greedy {
        // The bodies do not end.
        in_flight.extend(
            flood(
                *address,
                EACH,
                b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 1000\r\n\r\nx",
            )
            .await,
        );
    }
    tenants
        .fixture
        .until(
            "canal_gateway_refused_requests_total",
            &[],
            // Sixty requests at most are in flight, so all others were refused.
            (GREEDY * EACH - 60) as f64,
        )
        .await;
    // Several, because each request is admitted by itself.
    tenants.assert_served(20).await;
    assert!(
        tenants.fixture.metric(
            "canal_gateway_refused_requests_total",
            &["reason=\"tenant_busy\""]
        ) > 0.0
    );
    // A tenant's threshold (`decide_free_needed`) refuses while some requests are free, so that the
    // limit of all is never reached.
    assert_eq!(
        tenants.fixture.metric(
            "canal_gateway_refused_requests_total",
            &["reason=\"overload\""]
        ),
        0.0
    );
}

/// Returns the bytes of a ClientHello.
fn client_hello() -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap();
    let config = config
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let mut client =
        rustls::ClientConnection::new(Arc::new(config), "web".try_into().unwrap()).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    hello
}

/// Small limits, of which that of handshakes is the smallest.
fn few_handshakes() -> EngineSetup {
    let limits = GatewayLimits {
        connections: 1280,
        tenant_connections: 640,
        unauthenticated: 640,
        handshakes: 64,
        ..GatewayLimits::default()
    };
    EngineSetup {
        limits,
        ..EngineSetup::default()
    }
}

/// Opens connections at the gateway addresses of ten tenants that send only `first`.
async fn flood_all(mesh: &LoopbackMesh, first: &[u8]) -> Vec<TcpStream> {
    let mut flooded = Vec::new();
    for address in &mesh.others {
        flooded.extend(flood(*address, 40, first).await);
    }
    flooded
}

#[test]
fn half_hellos_of_ten_tenants_leave_handshakes_to_an_eleventh() {
    local(|| async {
        let mesh = LoopbackMesh::new(few_handshakes());
        let hello = client_hello();
        let flooded = flood_all(&mesh, &hello[..hello.len() / 2]).await;
        for n in 0..20 {
            assert!(connects(&mesh, "beta").await, "handshake {n}");
        }
        // All but those within the limit have given way.
        mesh.fixture
            .until(
                "canal_gateway_refused_connections_total",
                &["reason=\"handshake_displaced\""],
                336.0,
            )
            .await;
        assert_eq!(
            mesh.fixture.metric(
                "canal_gateway_refused_connections_total",
                &["reason=\"handshakes\""]
            ),
            0.0
        );
        assert_eq!(
            mesh.fixture
                .metric("canal_share_revoked_total", &["tenant=\"beta\""]),
            0.0
        );
        drop(flooded);
    });
}

#[test]
fn handshakes_of_ten_tenants_that_stop_after_the_hello_leave_some_to_an_eleventh() {
    local(|| async {
        let mesh = LoopbackMesh::new(few_handshakes());
        let flooded = flood_all(&mesh, &client_hello()).await;
        for n in 0..5 {
            assert!(connects(&mesh, "beta").await, "handshake {n}");
        }
        assert_eq!(
            mesh.fixture.metric(
                "canal_share_refused_total",
                &["limit=\"gateway_handshakes\"", "tenant=\"beta\""]
            ),
            0.0
        );
        mesh.fixture
            .until(
                "canal_share_refused_total",
                &["limit=\"gateway_handshakes\""],
                336.0,
            )
            .await;
        drop(flooded);
    });
}
