//! Listeners of Gateways that relay connections: TLS is passed through to the backend that its
//! server name selects, and TCP to that of its port. No byte is changed.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use canal_gateway_engine::{GatewayLimits, PlainListener};
use canal_model::authorization::{AuthorizationAction, PolicyRule};
use canal_model::ids::ServiceId;
use canal_model::program::*;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::fixture::{
    EngineSetup, GatewayFixture, LOCALHOST, TENANT, key, pod, prefix, route, service_with_id, to,
};
use crate::origin::OriginServer;
use crate::policies::policy;
use crate::shares::flood;

const GATEWAY: &str = "public.gateway";
const TLS_PORT: u16 = 6443;
const TCP_PORT: u16 = 5432;
const REFUSED: &str = "canal_gateway_refused_connections_total";

/// A server that sends its name, and then back what it receives.
pub(crate) async fn echo(name: &'static [u8; 1]) -> OriginServer {
    OriginServer::each(move |mut peer| async move {
        peer.write(name).await;
        while let Some(byte) = peer.exactly(1).await {
            peer.write(&byte).await;
        }
    })
    .await
}

/// Returns the ClientHello of a client with this server name, or without one if it is empty.
pub(crate) fn hello(name: &str) -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let roots = RootCertStore::empty();
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.enable_sni = !name.is_empty();
    let name = if name.is_empty() { "any.test" } else { name };
    let server = name.to_owned().try_into().unwrap();
    let mut client = ClientConnection::new(Arc::new(config), server).unwrap();
    let mut sent = Vec::new();
    client.write_tls(&mut sent).unwrap();
    sent
}

/// Returns a listener whose only route is `route`; one with an empty route is closed.
fn listener(name: &str, port: u16, host: Option<HostMatch>, route: &str) -> IngressListener {
    IngressListener {
        filters: Vec::new(),
        name: name.to_owned(),
        port,
        host,
        is_open: !route.is_empty(),
        certificates: None,
        relay: Some(match port {
            TLS_PORT => RelayProtocol::TlsPassthrough,
            _ => RelayProtocol::Tcp,
        }),
        virtual_hosts: vec![VirtualHost {
            host: None,
            routes: [RouteObject {
                namespace: "default".parse().unwrap(),
                name: route.parse().unwrap_or_else(|_| "none".parse().unwrap()),
                kind: "VirtualService".into(),
            }]
            .into(),
        }],
    }
}

/// An engine with a Gateway: of TLS, `www.example.com` goes to `web` and other names of the domain
/// to `api`; TCP goes to `api`.
struct RelayFixture {
    fixture: GatewayFixture,
    tls: SocketAddr,
    tcp: SocketAddr,
}

impl RelayFixture {
    async fn new(limits: GatewayLimits) -> Self {
        let (web, api) = (echo(b"w").await, echo(b"a").await);
        let plain = [TLS_PORT, TCP_PORT].map(|port| PlainListener {
            address: LOCALHOST,
            service: key(TENANT, GATEWAY),
            port,
        });
        let setup = EngineSetup {
            plain: plain.into(),
            limits,
            ..EngineSetup::default()
        };
        let fixture = GatewayFixture::new(setup, &[web.address]);
        let exact = |host: &str| Some(HostMatch::Exact(host.to_owned()));
        let split = |service: &str| RouteAction::Split(vec![to(service, &[], 1)]);
        fixture.apply(vec![
            service_with_id(TENANT, "api", 2, "10.96.0.2", &[(80, AppProtocol::Detect)]),
            Resource::Workload(pod(TENANT, "api-0", api.address, "api")),
            Resource::Ingress(IngressGateway {
                key: key(TENANT, GATEWAY),
                id: ServiceId::new(40).unwrap(),
                listeners: vec![
                    listener("www", TLS_PORT, exact("www.example.com"), "web"),
                    listener("closed", TLS_PORT, exact("closed.example.com"), ""),
                    listener(
                        "wild",
                        TLS_PORT,
                        Some(HostMatch::Suffix(".example.com".to_owned())),
                        "api",
                    ),
                    listener("tcp", TCP_PORT, None, "api"),
                ],
                client_validations: Vec::new(),
                trusted_proxies: 0,
                proxied_ports: BTreeSet::new(),
            }),
            route(GATEWAY, "web", 0, prefix("/"), split("web")),
            route(GATEWAY, "api", 0, prefix("/"), split("api")),
        ]);
        let addresses = fixture.engine.plain_addresses();
        let (tls, tcp) = (addresses[1], addresses[2]);
        Self { fixture, tls, tcp }
    }

    async fn refused(&self, reason: &str, count: f64) {
        let label = format!("reason=\"{reason}\"");
        self.fixture.until(REFUSED, &[&label], count).await;
    }
}

/// Sends bytes in two parts, and returns the name of the server that sends them back.
pub(crate) async fn relayed(address: SocketAddr, bytes: &[u8]) -> std::io::Result<u8> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (first, rest) = bytes.split_at(bytes.len() / 2);
    stream.write_all(first).await?;
    tokio::task::yield_now().await;
    stream.write_all(rest).await?;
    let mut answer = vec![0; 1 + bytes.len()];
    stream.read_exact(&mut answer).await?;
    assert_eq!(&answer[1..], bytes, "the bytes pass unchanged");
    Ok(answer[0])
}

#[tokio::test]
async fn the_server_name_selects_the_backend_of_tls_that_passes_through() {
    let relay = RelayFixture::new(GatewayLimits::default()).await;
    for (name, server) in [
        ("www.example.com", b'w'),
        ("WWW.Example.com", b'w'),
        ("a.example.com", b'a'),
        ("b.a.example.com", b'a'),
    ] {
        let found = relayed(relay.tls, &hello(name)).await.unwrap();
        assert_eq!(found, server, "{name}");
    }
    for (number, name) in (1..).zip(["closed.example.com", "example.com", "other.test", ""]) {
        assert!(relayed(relay.tls, &hello(name)).await.is_err(), "{name}");
        relay.refused("no_route", f64::from(number)).await;
    }
    let opened = relay
        .fixture
        .metric("istio_tcp_connections_opened_total", &[]);
    assert_eq!(opened, 4.0);
}

#[tokio::test]
async fn bytes_that_begin_no_tls_are_refused_by_name() {
    let relay = RelayFixture::new(GatewayLimits::default()).await;
    // A record with the beginning of a ClientHello of 60,000 bytes, and 16 KiB of it.
    let mut long = vec![0x16, 3, 1, 0x40, 0, 1, 0, 0xea, 0x60, 3, 3];
    long.resize(5 + (16 << 10), 0);
    let mut broken = hello("www.example.com");
    broken[5] = 2;
    for (bytes, reason) in [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "plaintext_refused"),
        (broken, "tls_protocol"),
        (long, "client_hello_bytes"),
    ] {
        assert!(relayed(relay.tls, &bytes).await.is_err(), "{reason}");
        relay.refused(reason, 1.0).await;
    }
}

#[tokio::test]
async fn a_client_hello_that_does_not_end_counts_on_the_tenants_handshakes() {
    let limits = GatewayLimits {
        handshakes: 12,
        ..GatewayLimits::default()
    };
    let relay = RelayFixture::new(limits).await;
    // The tenant's share is a quarter of 12 handshakes: those beyond it displace the oldest ones.
    let silent = flood(relay.tls, 20, &[0x16, 3, 1, 0, 200, 1]).await;
    relay.refused("handshake_displaced", 1.0).await;
    let found = relayed(relay.tls, &hello("www.example.com")).await;
    assert_eq!(found.unwrap(), b'w');
    drop(silent);
}

#[tokio::test]
async fn relays_end_with_their_listener_or_route() {
    let relay = RelayFixture::new(GatewayLimits::default()).await;
    let open = async |address: SocketAddr, bytes: Vec<u8>| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        // The endpoint answers with its letter and then echoes.
        let mut answer = vec![0; 1 + bytes.len()];
        stream.read_exact(&mut answer).await.unwrap();
        stream
    };
    let ends = async |stream: &mut TcpStream| {
        let mut byte = [0];
        let end = stream.read(&mut byte);
        let waited = canal_timing::deadline(Duration::from_secs(10));
        let end = tokio::time::timeout(waited, end).await.expect("an end");
        assert!(matches!(end, Err(_) | Ok(0)), "{end:?}");
    };
    let mut www = open(relay.tls, hello("www.example.com")).await;
    let mut wild = open(relay.tls, hello("a.example.com")).await;
    let mut tcp = open(relay.tcp, b"SELECT 1".to_vec()).await;
    let gateway = |listeners| {
        Resource::Ingress(IngressGateway {
            key: key(TENANT, GATEWAY),
            id: ServiceId::new(40).unwrap(),
            listeners,
            client_validations: Vec::new(),
            trusted_proxies: 0,
            proxied_ports: BTreeSet::new(),
        })
    };
    let exact = Some(HostMatch::Exact("www.example.com".to_owned()));
    let suffix = Some(HostMatch::Suffix(".example.com".to_owned()));
    // `www` is closed, and nothing listens for TCP.
    relay.fixture.apply(vec![gateway(vec![
        listener("www", TLS_PORT, exact, ""),
        listener("wild", TLS_PORT, suffix, "api"),
    ])]);
    ends(&mut www).await;
    ends(&mut tcp).await;
    wild.write_all(b"x").await.unwrap();
    assert_eq!(wild.read_u8().await.unwrap(), b'x');
    let gone = (ResourceKind::Ingress, "alpha/default/public.gateway");
    relay.fixture.change(Vec::new(), &[gone]);
    ends(&mut wild).await;
}

#[tokio::test]
async fn tcp_is_relayed_and_policies_of_the_destination_hold() {
    let relay = RelayFixture::new(GatewayLimits::default()).await;
    let found = relayed(relay.tcp, b"SELECT 1").await.unwrap();
    assert_eq!(found, b'a');
    let received = relay.fixture.metric("istio_tcp_received_bytes_total", &[]);
    assert!(received >= 8.0, "{received}");
    let deny = policy(
        "none",
        AuthorizationAction::Deny,
        vec![PolicyRule::default()],
    );
    relay.fixture.apply(vec![deny]);
    assert!(relayed(relay.tcp, b"SELECT 1").await.is_err());
    assert!(relayed(relay.tls, &hello("www.example.com")).await.is_err());
}
