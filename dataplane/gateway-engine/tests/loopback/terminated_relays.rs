//! Listeners of Gateways that terminate TLS and relay the plaintext, with real handshakes: alone on
//! their port, and beside one that passes TLS through.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use canal_gateway_engine::{GatewayLimits, PlainListener};
use canal_identity::ClientIdentityFactory;
use canal_model::client_validation::{ClientValidation, ClientValidationMode};
use canal_model::ids::ServiceId;
use canal_model::program::*;
use canal_runtime::metrics::Registry;
use canal_testing::TestCa;
use canal_tls::TrustStore;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::fixture::{
    EngineSetup, GatewayFixture, LOCALHOST, TENANT, key, pod, prefix, route, service_with_id, to,
};
use crate::https_listeners::{
    ClientAuthority, OwnCertificate, connect_as, connect_to, exact, presented, secret, suffix,
};
use crate::origin::OriginServer;
use crate::relay_listeners::{echo, hello, relayed};
use crate::shares::flood;

const GATEWAY: &str = "public.gateway";
/// Port with listeners that terminate TLS and one that passes it through.
const MIXED_PORT: u16 = 6443;
/// Port with listeners that terminate TLS.
const PORT: u16 = 9443;
const REFUSED: &str = "canal_gateway_refused_connections_total";

/// Returns a listener; one without a certificate passes TLS through, and one without a route has
/// none.
fn listener(
    name: &str,
    port: u16,
    host: Option<HostMatch>,
    certificate: Option<&str>,
    route: &str,
) -> IngressListener {
    let routes = (!route.is_empty()).then(|| RouteObject {
        namespace: "default".parse().unwrap(),
        name: route.parse().unwrap(),
        kind: "VirtualService".into(),
    });
    IngressListener {
        filters: Vec::new(),
        name: name.to_owned(),
        port,
        host,
        is_open: true,
        certificates: certificate.map(|name| vec![secret(name)]),
        relay: Some(match certificate {
            Some(_) => RelayProtocol::TerminatedTls,
            None => RelayProtocol::TlsPassthrough,
        }),
        virtual_hosts: vec![VirtualHost {
            host: None,
            routes: routes.into_iter().collect(),
        }],
    }
}

/// An engine with a Gateway. On the mixed port, TLS of `www.example.com` is terminated for `web`, and
/// that of other names of the domain is passed through to `api`.
struct TerminatedFixture {
    fixture: GatewayFixture,
    mixed: SocketAddr,
    only: SocketAddr,
    www: OwnCertificate,
}

impl TerminatedFixture {
    async fn new(limits: GatewayLimits, validations: Vec<ClientValidation>) -> Self {
        let (web, api) = (echo(b"w").await, echo(b"a").await);
        Self::with_origins(limits, validations, (&web, &api))
    }

    fn with_origins(
        limits: GatewayLimits,
        client_validations: Vec<ClientValidation>,
        (web, api): (&OriginServer, &OriginServer),
    ) -> Self {
        let ca = TestCa::new("alpha");
        let trust = TrustStore::new(&Registry::new());
        let keyring = ClientIdentityFactory::of(Arc::new(move |id| ca.credential(id)), None, trust);
        let plain = [MIXED_PORT, PORT].map(|port| PlainListener {
            address: LOCALHOST,
            service: key(TENANT, GATEWAY),
            port,
        });
        let setup = EngineSetup {
            keyring: Some(keyring),
            plain: plain.into(),
            limits,
            ..EngineSetup::default()
        };
        let fixture = GatewayFixture::new(setup, &[web.address]);
        let www = OwnCertificate::new("www", "www.example.com");
        let split = |service: &str| RouteAction::Split(vec![to(service, &[], 1)]);
        let host = exact("www.example.com");
        fixture.apply(vec![
            service_with_id(TENANT, "api", 2, "10.96.0.2", &[(80, AppProtocol::Detect)]),
            Resource::Workload(pod(TENANT, "api-0", api.address, "api")),
            Resource::Ingress(IngressGateway {
                key: key(TENANT, GATEWAY),
                id: ServiceId::new(40).unwrap(),
                listeners: vec![
                    listener("www", MIXED_PORT, host.clone(), Some("www"), "web"),
                    listener("wild", MIXED_PORT, suffix(".example.com"), None, "api"),
                    listener(
                        "pending",
                        MIXED_PORT,
                        exact("pending.example.com"),
                        Some("pending"),
                        "web",
                    ),
                    listener("only", PORT, host, Some("www"), "web"),
                    listener("empty", PORT, exact("empty.test"), Some("www"), ""),
                ],
                client_validations,
                trusted_proxies: 0,
                proxied_ports: BTreeSet::new(),
            }),
            www.resource.clone(),
            route(GATEWAY, "web", 0, prefix("/"), split("web")),
            route(GATEWAY, "api", 0, prefix("/"), split("api")),
        ]);
        let addresses = fixture.engine.plain_addresses();
        let (mixed, only) = (addresses[1], addresses[2]);
        Self {
            fixture,
            mixed,
            only,
            www,
        }
    }

    async fn refused(&self, reason: &str, count: f64) {
        let label = format!("reason=\"{reason}\"");
        self.fixture.until(REFUSED, &[&label], count).await;
    }
}

#[tokio::test]
async fn backends_get_the_plaintext_of_tls_that_the_gateway_terminates() {
    let relay = TerminatedFixture::new(GatewayLimits::default(), Vec::new()).await;
    for (address, name) in [
        (relay.mixed, "www.example.com"),
        (relay.mixed, "WWW.Example.com"),
        (relay.only, "www.example.com"),
    ] {
        // A client that would speak HTTP/2 learns nothing of what is inside.
        let stream = connect_to(address, &[&relay.www], name, &["h2", "http/1.1"]).await;
        let mut stream = stream.unwrap();
        assert_eq!(presented(&stream), relay.www.der, "{name}");
        assert_eq!(stream.get_ref().1.alpn_protocol(), None);
        stream.write_all(b"SELECT 1").await.unwrap();
        let mut answer = [0; 9];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"wSELECT 1");
    }
    // Another name of the same port: its bytes pass unchanged.
    let found = relayed(relay.mixed, &hello("a.example.com")).await.unwrap();
    assert_eq!(found, b'a');
    let opened = relay
        .fixture
        .metric("istio_tcp_connections_opened_total", &[]);
    assert_eq!(opened, 4.0);
}

#[tokio::test]
async fn the_ends_of_both_sides_pass_a_terminated_relay() {
    // A server that reads to the end, and answers with the number of bytes.
    let counting = || {
        OriginServer::each(|mut peer| async move {
            let mut count = 0;
            let mut bytes = vec![0; 64 << 10];
            while let Ok(read @ 1..) = peer.stream.read(&mut bytes).await {
                count += read;
            }
            peer.write(format!("{count} bytes").as_bytes()).await;
        })
    };
    let (web, api) = (counting().await, counting().await);
    let relay = TerminatedFixture::with_origins(GatewayLimits::default(), Vec::new(), (&web, &api));
    let stream = connect_to(relay.mixed, &[&relay.www], "www.example.com", &[]).await;
    let mut stream = stream.unwrap();
    stream.write_all(&vec![7; 3 << 20]).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert_eq!(answer, format!("{} bytes", 3 << 20));
}

#[tokio::test]
async fn a_connection_that_no_listener_terminates_is_refused_by_name() {
    let relay = TerminatedFixture::new(GatewayLimits::default(), Vec::new()).await;
    for (address, name, alert, reason) in [
        (
            relay.mixed,
            "other.test",
            "UnrecognisedName",
            "unrecognized_name",
        ),
        (
            relay.only,
            "other.test",
            "UnrecognisedName",
            "unrecognized_name",
        ),
        (relay.only, "", "UnrecognisedName", "unrecognized_name"),
        (
            relay.mixed,
            "pending.example.com",
            "InternalError",
            "no_certificate",
        ),
    ] {
        let label = format!("reason=\"{reason}\"");
        let before = relay.fixture.metric(REFUSED, &[&label]);
        let error = connect_to(address, &[&relay.www], name, &[]).await;
        let error = error.unwrap_err();
        assert!(error.to_string().contains(alert), "{name:?}: {error}");
        relay.refused(reason, before + 1.0).await;
    }
    // Byte 5 is the type of the handshake message, of which 2 is a ServerHello.
    let mut broken = hello("www.example.com");
    broken[5] = 2;
    // Without early data, nothing follows a ClientHello that the gateway has not answered.
    let mut followed = hello("www.example.com");
    // A record of application data (0x17) of TLS 1.2 (3, 3) with one byte.
    followed.extend([0x17, 3, 3, 0, 1, 0]);
    for (number, bytes) in [(1.0, &broken), (2.0, &followed)] {
        let mut stream = TcpStream::connect(relay.mixed).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        // The end, an alert or a reset.
        let _ = stream.read_to_end(&mut Vec::new()).await;
        relay.refused("tls_protocol", number).await;
    }
    for address in [relay.mixed, relay.only] {
        assert!(relayed(address, b"GET / HTTP/1.1\r\n\r\n").await.is_err());
    }
    relay.refused("plaintext_refused", 2.0).await;
    let opened = relay
        .fixture
        .metric("istio_tcp_connections_opened_total", &[]);
    assert_eq!(opened, 0.0, "no backend is reached");
}

#[tokio::test]
async fn a_terminated_connection_without_a_route_is_closed_without_a_byte() {
    let relay = TerminatedFixture::new(GatewayLimits::default(), Vec::new()).await;
    let other = OwnCertificate::new("www", "empty.test");
    relay.fixture.apply(vec![other.resource.clone()]);
    let stream = connect_to(relay.only, &[&other], "empty.test", &[]).await;
    let mut stream = stream.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(answer.is_empty(), "{answer:?}");
    relay.refused("no_route", 1.0).await;
}

#[tokio::test]
async fn a_client_hello_for_a_terminated_relay_counts_on_the_tenants_handshakes() {
    let limits = GatewayLimits {
        handshakes: 12,
        ..GatewayLimits::default()
    };
    let relay = TerminatedFixture::new(limits, Vec::new()).await;
    // The tenant's share is a quarter of 12 handshakes: those beyond it displace the oldest ones.
    let silent = flood(relay.mixed, 20, &[0x16, 3, 1, 0, 200, 1]).await;
    relay.refused("handshake_displaced", 1.0).await;
    let stream = connect_to(relay.mixed, &[&relay.www], "www.example.com", &[]).await;
    assert!(stream.is_ok());
    drop(silent);
}

#[tokio::test]
async fn a_terminated_relay_validates_clients_where_its_port_is_to() {
    let authority = ClientAuthority::new("own");
    let validation = authority.validation(PORT, ClientValidationMode::AllowValidOnly);
    let relay = TerminatedFixture::new(GatewayLimits::default(), vec![validation]).await;
    let trusted = [&relay.www];
    let (client, stranger) = (
        authority.issue("client"),
        ClientAuthority::new("other").issue("client"),
    );
    for (number, presented) in [(1.0, None), (2.0, Some(&stranger))] {
        let stream = connect_as(relay.only, &trusted, presented, "www.example.com", &[]);
        // TLS 1.3 clients learn of it by their first read.
        if let Ok(mut stream) = stream.await {
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            assert!(answer.is_empty(), "{answer:?}");
        }
        relay.refused("client_certificate", number).await;
    }
    let stream = connect_as(relay.only, &trusted, Some(&client), "www.example.com", &[]);
    let mut stream = stream.await.unwrap();
    let mut name = [0];
    stream.read_exact(&mut name).await.unwrap();
    assert_eq!(&name, b"w");
}
