//! Ports of Gateways at which connections begin with a header of the PROXY protocol: whose address
//! requests, policies and logs have, and which connections are refused.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use canal_gateway_engine::{GatewayTimeouts, PlainListener};
use canal_identity::ClientIdentityFactory;
use canal_model::authorization::{
    Attribute, AttributeMatch, AuthorizationAction, Clause, PolicyTarget,
};
use canal_model::ids::ServiceId;
use canal_model::program::*;
use canal_runtime::metrics::Registry;
use canal_testing::TestCa;
use canal_tls::TrustStore;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::HttpClient;
use crate::fixture::{
    EngineSetup, GatewayFixture, LOCALHOST, TENANT, key, pod, prefix, route, service_with_id, to,
    until,
};
use crate::https_listeners::{OwnCertificate, secret, secure};
use crate::origin::OriginServer;
use crate::policies::{policy, rule};
use crate::relay_listeners::echo;

const GATEWAY: &str = "public.gateway";
const HTTP: u16 = 80;
const HTTPS: u16 = 443;
const TCP: u16 = 5432;
const REFUSED: &str = "canal_gateway_refused_connections_total";
const HEADER: &[u8] = b"PROXY TCP4 203.0.113.7 198.51.100.1 40000 443\r\n";
const REQUEST: &[u8] = b"GET /x HTTP/1.1\r\nHost: www.example.com\r\n\r\n";

/// Returns a header of version 2 for a client with an IPv6 address, and a value behind the addresses.
fn binary_header() -> Vec<u8> {
    let client: std::net::Ipv6Addr = "2001:db8::7".parse().unwrap();
    let addresses = [&client.octets()[..], &[0; 16], &[0x9c, 0x40, 1, 187]].concat();
    let value = [0xea, 0, 3, 1, 2, 3];
    let length = u16::try_from(addresses.len() + value.len()).unwrap();
    [
        b"\r\n\r\n\0\r\nQUIT\n\x21\x21",
        &length.to_be_bytes()[..],
        &addresses,
        &value,
    ]
    .concat()
}

/// Returns the Gateway with a listener for HTTP, HTTPS and TCP each.
fn gateway(proxied: &[u16]) -> Resource {
    let listener = |name: &str, port, relay, certificates, route: &str| IngressListener {
        filters: Vec::new(),
        name: name.to_owned(),
        port,
        host: None,
        is_open: true,
        relay,
        certificates,
        virtual_hosts: vec![VirtualHost {
            host: None,
            routes: [RouteObject {
                namespace: "default".parse().unwrap(),
                name: route.parse().unwrap(),
                kind: "VirtualService".into(),
            }]
            .into(),
        }],
    };
    let relay = Some(RelayProtocol::Tcp);
    Resource::Ingress(IngressGateway {
        key: key(TENANT, GATEWAY),
        id: ServiceId::new(40).unwrap(),
        listeners: vec![
            listener("http", HTTP, None, None, "web"),
            listener("https", HTTPS, None, Some(vec![secret("www")]), "web"),
            listener("tcp", TCP, relay, None, "api"),
        ],
        client_validations: Vec::new(),
        trusted_proxies: 0,
        proxied_ports: proxied.iter().copied().collect(),
    })
}

struct ProxiedFixture {
    fixture: GatewayFixture,
    http: SocketAddr,
    https: SocketAddr,
    tcp: SocketAddr,
    www: OwnCertificate,
}

impl ProxiedFixture {
    async fn new(setup: EngineSetup) -> Self {
        let (web, api) = (OriginServer::echo().await, echo(b"a").await);
        let ca = TestCa::new("alpha");
        let trust = TrustStore::new(&Registry::new());
        let keyring = ClientIdentityFactory::of(Arc::new(move |id| ca.credential(id)), None, trust);
        let plain = [HTTP, HTTPS, TCP].map(|port| PlainListener {
            address: LOCALHOST,
            service: key(TENANT, GATEWAY),
            port,
        });
        let setup = EngineSetup {
            keyring: Some(keyring),
            plain: plain.into(),
            ..setup
        };
        let fixture = GatewayFixture::new(setup, &[web.address]);
        let www = OwnCertificate::new("www", "www.example.com");
        let split = |service: &str| RouteAction::Split(vec![to(service, &[], 1)]);
        fixture.apply(vec![
            service_with_id(TENANT, "api", 2, "10.96.0.2", &[(80, AppProtocol::Detect)]),
            Resource::Workload(pod(TENANT, "api-0", api.address, "api")),
            gateway(&[HTTP, HTTPS, TCP]),
            www.resource.clone(),
            route(GATEWAY, "web", 0, prefix("/"), split("web")),
            route(GATEWAY, "api", 0, prefix("/"), split("api")),
        ]);
        let addresses = fixture.engine.plain_addresses();
        let (http, https, tcp) = (addresses[1], addresses[2], addresses[3]);
        Self {
            fixture,
            http,
            https,
            tcp,
            www,
        }
    }

    /// Waits until a number of connections have been refused for a reason.
    async fn refused(&self, reason: &str, count: f64) {
        let label = format!("reason=\"{reason}\"");
        self.fixture.until(REFUSED, &[&label], count).await;
    }

    /// Returns the status of a request behind a header.
    async fn status(&self, header: &[u8]) -> u16 {
        let mut client = HttpClient::connect(self.http).await;
        client.send(&[header, REQUEST].concat()).await;
        client.answer().await.unwrap().status
    }
}

#[tokio::test]
async fn the_client_of_a_connection_is_the_one_in_its_header() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let setup = EngineSetup {
        log: Some(path.clone()),
        ..EngineSetup::default()
    };
    let proxied = ProxiedFixture::new(setup).await;
    let binary = binary_header();
    // Version 2 of the PROXY protocol: the command LOCAL, without addresses.
    let local = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";
    for (header, forwarded) in [
        (HEADER, "203.0.113.7"),
        (&binary, "2001:db8::7"),
        // The load balancer speaks for itself, or knows no client.
        (local, "127.0.0.1"),
        (b"PROXY UNKNOWN\r\n", "127.0.0.1"),
    ] {
        let mut client = HttpClient::connect(proxied.http).await;
        client.send(&[header, REQUEST].concat()).await;
        // The header comes once, and further requests follow on the connection.
        for _ in 0..2 {
            let answer = client.answer().await.unwrap();
            assert_eq!(answer.status, 200);
            let expected = format!("x-forwarded-for: {forwarded}\r\n");
            assert!(answer.text().contains(&expected), "{}", answer.text());
            client.send(REQUEST).await;
        }
    }
    // The bytes of a header may arrive one by one.
    for header in [HEADER, &binary] {
        let mut client = HttpClient::connect(proxied.http).await;
        for byte in header {
            client.send(&[*byte]).await;
        }
        client.send(REQUEST).await;
        assert_eq!(client.answer().await.unwrap().status, 200);
    }
    let logged = || std::fs::read_to_string(&path).unwrap_or_default();
    until("the line of the first request", || {
        logged().contains("203.0.113.7:40000")
    })
    .await;
}

#[tokio::test]
async fn a_header_precedes_the_handshake_of_tls_and_relayed_bytes() {
    let proxied = ProxiedFixture::new(EngineSetup::default()).await;
    let mut stream = TcpStream::connect(proxied.https).await.unwrap();
    stream.write_all(HEADER).await.unwrap();
    let stream = secure(stream, &[&proxied.www], None, "www.example.com", &[]).await;
    let mut client = HttpClient {
        stream: stream.unwrap(),
        buffer: Vec::new(),
    };
    client.send(REQUEST).await;
    let answer = client.answer().await.unwrap();
    assert!(
        answer.text().contains("x-forwarded-for: 203.0.113.7\r\n"),
        "{}",
        answer.text()
    );
    // A backend gets what is behind the header.
    let mut stream = TcpStream::connect(proxied.tcp).await.unwrap();
    stream.write_all(&binary_header()).await.unwrap();
    stream.write_all(b"PROXY ").await.unwrap();
    let mut echoed = [0; 7];
    stream.read_exact(&mut echoed).await.unwrap();
    assert_eq!(&echoed, b"aPROXY ");
}

#[tokio::test]
async fn connections_without_a_valid_header_are_reset_and_counted() {
    let proxied = ProxiedFixture::new(EngineSetup::default()).await;
    let long = [b"PROXY UNKNOWN ", &[b'x'; 200][..]].concat();
    let mut malformed = 0.0;
    for address in [proxied.http, proxied.https, proxied.tcp] {
        for bytes in [REQUEST, b"\x16\x03\x01\x00", b"PROXY TCP4 1.2.3.4\r\n"] {
            let mut client = HttpClient::connect(address).await;
            client.send(bytes).await;
            malformed += 1.0;
            proxied.refused("proxy_header", malformed).await;
            assert!(client.answer().await.is_none());
        }
    }
    let mut client = HttpClient::connect(proxied.http).await;
    client.send(&long).await;
    proxied.refused("proxy_header_bytes", 1.0).await;
    let mut client = HttpClient::connect(proxied.http).await;
    client.send(&HEADER[..20]).await;
    drop(client);
    proxied.refused("gone", 1.0).await;
}

#[tokio::test]
async fn a_header_is_not_waited_for_without_end() {
    let setup = EngineSetup {
        times: GatewayTimeouts {
            head: Duration::from_millis(300),
            ..GatewayTimeouts::default()
        },
        ..EngineSetup::default()
    };
    let proxied = ProxiedFixture::new(setup).await;
    for (number, bytes) in [(1.0, &HEADER[..20]), (2.0, b"")] {
        let mut client = HttpClient::connect(proxied.http).await;
        client.send(bytes).await;
        proxied.refused("proxy_header_timeout", number).await;
    }
}

#[tokio::test]
async fn policies_compare_the_peer_as_source_and_the_client_as_remote_address() {
    let proxied = ProxiedFixture::new(EngineSetup::default()).await;
    let of = |attribute: Attribute, network: &str| {
        let clause = Clause {
            attribute,
            any: vec![AttributeMatch::Network(network.parse().unwrap())],
            none: vec![],
        };
        let rules = vec![rule(vec![clause])];
        let mut allows = policy("offices", AuthorizationAction::Allow, rules);
        if let Resource::Authorization(policy) = &mut allows {
            policy.target = PolicyTarget::Service(key(TENANT, GATEWAY));
        }
        allows
    };
    for (attribute, network, status) in [
        (Attribute::RemoteAddress, "203.0.113.0/24", 200),
        (Attribute::RemoteAddress, "127.0.0.0/8", 403),
        (Attribute::SourceAddress, "127.0.0.0/8", 200),
        (Attribute::SourceAddress, "203.0.113.0/24", 403),
    ] {
        let case = format!("{attribute:?} {network}");
        proxied.fixture.apply(vec![of(attribute, network)]);
        assert_eq!(proxied.status(HEADER).await, status, "{case}");
    }
}

#[tokio::test]
async fn a_connection_whose_port_changed_before_its_header_is_not_relayed() {
    let proxied = ProxiedFixture::new(EngineSetup::default()).await;
    let mut slow = TcpStream::connect(proxied.tcp).await.unwrap();
    // The one worker accepts it no later than this one.
    assert_eq!(proxied.status(HEADER).await, 200);
    let accepted = "canal_gateway_accepted_connections_total";
    proxied.fixture.until(accepted, &[], 2.0).await;
    proxied.fixture.apply(vec![gateway(&[HTTP])]);
    // Without the load balancer, the client could write any address.
    slow.write_all(HEADER).await.unwrap();
    proxied.refused("no_route", 1.0).await;
    assert!(matches!(slow.read(&mut [0]).await, Ok(0) | Err(_)));
}

#[tokio::test]
async fn connections_older_than_the_setting_of_their_port_are_misdirected() {
    let proxied = ProxiedFixture::new(EngineSetup::default()).await;
    for (before, header, after) in [(&[][..], &b""[..], &[HTTP][..]), (&[HTTP], HEADER, &[])] {
        proxied.fixture.apply(vec![gateway(before)]);
        let mut client = HttpClient::connect(proxied.http).await;
        client.send(&[header, REQUEST].concat()).await;
        assert_eq!(client.answer().await.unwrap().status, 200);
        proxied.fixture.apply(vec![gateway(after)]);
        client.send(REQUEST).await;
        assert_eq!(client.answer().await.unwrap().status, 421, "{before:?}");
    }
}
