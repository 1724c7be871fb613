//! Listeners of Gateways for HTTPS, with real handshakes: the server name selects the listener, and
//! certificates change while requests run.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use canal_gateway_engine::{ForwardedHeaders, GatewayLimits, PlainListener};
use canal_identity::ClientIdentityFactory;
use canal_model::certificate::{CaCertificates, PrivateKeyPem, ServingCertificate};
use canal_model::client_validation::{ClientValidation, ClientValidationMode};
use canal_model::ids::{SecretKey, ServiceId};
use canal_model::program::*;
use canal_runtime::metrics::Registry;
use canal_testing::TestCa;
use canal_tls::TrustStore;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::client::{ClientResponse, HttpClient};
use crate::fixture::{
    EngineSetup, GatewayFixture, LOCALHOST, TENANT, key, prefix, route, to, until,
};
use crate::origin::OriginServer;
use crate::shares::flood;

const GATEWAY: &str = "public.gateway";
const PORT: u16 = 443;
const REFUSED: &str = "canal_gateway_refused_connections_total";

pub(crate) fn secret(name: &str) -> SecretKey {
    ("default".parse().unwrap(), name.parse().unwrap())
}

/// A certificate that signs itself, and its resource.
pub(crate) struct OwnCertificate {
    pub(crate) der: CertificateDer<'static>,
    pub(crate) resource: Resource,
}

impl OwnCertificate {
    pub(crate) fn new(name: &str, host: &str) -> Self {
        let key_pair = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        let certificate = params.self_signed(&key_pair).unwrap();
        Self {
            der: certificate.der().clone(),
            resource: Resource::ListenerCertificate(ListenerCertificate {
                gateway: key(TENANT, GATEWAY),
                id: ServiceId::new(40).unwrap(),
                secret: secret(name),
                certificate: Arc::new(ServingCertificate {
                    chain: certificate.pem(),
                    key: PrivateKeyPem::new(key_pair.serialize_pem()),
                    names: vec![host.to_owned()],
                }),
            }),
        }
    }
}

/// Returns a Gateway with one listener for each name, host and certificate; one without a
/// certificate is closed.
fn gateway(listeners: &[(&str, Option<HostMatch>, Option<&str>)]) -> Vec<Resource> {
    let listener =
        |(name, host, certificate): &(&str, Option<HostMatch>, Option<&str>)| IngressListener {
            filters: Vec::new(),
            name: (*name).to_owned(),
            port: PORT,
            host: host.clone(),
            is_open: certificate.is_some(),
            relay: None,
            certificates: Some(certificate.iter().map(|name| secret(name)).collect()),
            virtual_hosts: vec![VirtualHost {
                host: None,
                routes: [RouteObject {
                    namespace: "default".parse().unwrap(),
                    name: "shop".parse().unwrap(),
                    kind: "VirtualService".into(),
                }]
                .into(),
            }],
        };
    let split = RouteAction::Split(vec![to("web", &[], 1)]);
    vec![
        Resource::Ingress(IngressGateway {
            trusted_proxies: 0,
            proxied_ports: BTreeSet::new(),
            key: key(TENANT, GATEWAY),
            id: ServiceId::new(40).unwrap(),
            client_validations: Vec::new(),
            listeners: listeners.iter().map(listener).collect(),
        }),
        route(GATEWAY, "shop", 0, prefix("/"), split),
    ]
}

pub(crate) fn exact(host: &str) -> Option<HostMatch> {
    Some(HostMatch::Exact(host.to_owned()))
}

pub(crate) fn suffix(domain: &str) -> Option<HostMatch> {
    Some(HostMatch::Suffix(domain.to_owned()))
}

/// An engine whose second plain listener is the Gateway's port.
struct HttpsFixture {
    fixture: GatewayFixture,
    address: SocketAddr,
}

impl HttpsFixture {
    fn new(origin: &OriginServer) -> Self {
        Self::with_setup(origin, EngineSetup::default())
    }

    fn with_limits(origin: &OriginServer, limits: GatewayLimits) -> Self {
        let setup = EngineSetup::default();
        Self::with_setup(origin, EngineSetup { limits, ..setup })
    }

    /// Starts an engine that names clients in `x-forwarded-client-cert`.
    fn with_client_cert(origin: &OriginServer) -> Self {
        let forwarded = ForwardedHeaders {
            client_cert: true,
            keeps_proto: false,
        };
        let setup = EngineSetup::default();
        Self::with_setup(origin, EngineSetup { forwarded, ..setup })
    }

    fn with_setup(origin: &OriginServer, setup: EngineSetup) -> Self {
        let ca = TestCa::new("alpha");
        let trust = TrustStore::new(&Registry::new());
        let keyring = ClientIdentityFactory::of(Arc::new(move |id| ca.credential(id)), None, trust);
        let public = PlainListener {
            address: LOCALHOST,
            service: key(TENANT, GATEWAY),
            port: PORT,
        };
        let setup = EngineSetup {
            keyring: Some(keyring),
            plain: vec![public],
            ..setup
        };
        let fixture = GatewayFixture::new(setup, &[origin.address]);
        let address = fixture.engine.plain_addresses()[1];
        Self { fixture, address }
    }

    async fn connect(
        &self,
        trusted: &[&OwnCertificate],
        name: &'static str,
        alpn: &[&str],
    ) -> std::io::Result<TlsStream<TcpStream>> {
        connect_to(self.address, trusted, name, alpn).await
    }

    /// Returns the answer to a request of a client, which presents its certificate if it has one.
    async fn answer_to(
        &self,
        trusted: &OwnCertificate,
        client: Option<&ClientCredential>,
        request: &str,
    ) -> Option<ClientResponse> {
        let stream = connect_as(self.address, &[trusted], client, "www.example.com", &[]).await;
        let mut client = HttpClient {
            stream: stream.ok()?,
            buffer: Vec::new(),
        };
        client.send(request.as_bytes()).await;
        client.answer().await
    }

    /// Returns the status of a request with this host, on a connection with this server name.
    async fn status(&self, trusted: &[&OwnCertificate], name: &'static str, host: &str) -> u16 {
        let stream = self.connect(trusted, name, &[]).await.unwrap();
        let mut client = HttpClient {
            stream,
            buffer: Vec::new(),
        };
        let request = format!("GET /x HTTP/1.1\r\nHost: {host}\r\n\r\n");
        client.send(request.as_bytes()).await;
        client.answer().await.unwrap().status
    }
}

pub(crate) async fn connect_to(
    address: SocketAddr,
    trusted: &[&OwnCertificate],
    name: &'static str,
    alpn: &[&str],
) -> std::io::Result<TlsStream<TcpStream>> {
    connect_as(address, trusted, None, name, alpn).await
}

pub(crate) async fn connect_as(
    address: SocketAddr,
    trusted: &[&OwnCertificate],
    client: Option<&ClientCredential>,
    name: &'static str,
    alpn: &[&str],
) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    secure(stream, trusted, client, name, alpn).await
}

/// Performs the handshake as the client on a connection.
pub(crate) async fn secure(
    stream: TcpStream,
    trusted: &[&OwnCertificate],
    client: Option<&ClientCredential>,
    name: &'static str,
    alpn: &[&str],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    for certificate in trusted {
        roots.add(certificate.der.clone()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_root_certificates(roots);
    let mut config = match client {
        None => builder.with_no_client_auth(),
        Some(client) => {
            let key = PrivateKeyDer::from_pem_slice(client.key.as_bytes()).unwrap();
            let chain = vec![client.certificate.clone()];
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    // A client without a name sends none.
    config.enable_sni = !name.is_empty();
    let name = if name.is_empty() { "any.test" } else { name };
    let connector = TlsConnector::from(Arc::new(config));
    connector.connect(name.try_into().unwrap(), stream).await
}

pub(crate) fn presented(stream: &TlsStream<TcpStream>) -> CertificateDer<'static> {
    stream.get_ref().1.peer_certificates().unwrap()[0].clone()
}

#[tokio::test]
async fn the_server_name_selects_the_listener_and_its_certificate() {
    let https = HttpsFixture::new(&OriginServer::echo().await);
    let (www, wild) = (
        OwnCertificate::new("www", "www.example.com"),
        OwnCertificate::new("wild", "*.example.com"),
    );
    let mut all = gateway(&[
        ("www", exact("www.example.com"), Some("www")),
        ("wild", suffix(".example.com"), Some("wild")),
        ("closed", exact("closed.example.com"), None),
        ("pending", exact("pending.test"), Some("pending")),
    ]);
    all.extend([www.resource.clone(), wild.resource.clone()]);
    https.fixture.apply(all);
    // The listener `closed` names no certificate, and `pending` one that does not exist yet.
    let trusted = [&www, &wild];
    for (name, expected) in [
        ("www.example.com", &www),
        ("WWW.Example.com", &www),
        ("a.example.com", &wild),
    ] {
        let stream = https.connect(&trusted, name, &[]).await.unwrap();
        assert_eq!(presented(&stream), expected.der, "{name}");
    }
    for (name, alert, reason) in [
        // The suffix `.example.com` does not include `example.com` itself; an empty name sends no
        // SNI.
        ("other.test", "UnrecognisedName", "unrecognized_name"),
        ("example.com", "UnrecognisedName", "unrecognized_name"),
        ("", "UnrecognisedName", "unrecognized_name"),
        ("closed.example.com", "InternalError", "no_certificate"),
        ("pending.test", "InternalError", "no_certificate"),
    ] {
        let label = format!("reason=\"{reason}\"");
        let labels = [label.as_str()];
        let before = https.fixture.metric(REFUSED, &labels);
        let error = https.connect(&trusted, name, &[]).await.unwrap_err();
        assert!(error.to_string().contains(alert), "{name:?}: {error}");
        https.fixture.until(REFUSED, &labels, before + 1.0).await;
    }
    let mut plain = TcpStream::connect(https.address).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert!(plain.read(&mut [0]).await.is_err(), "plaintext is reset");
    let labels = ["reason=\"plaintext_refused\""];
    https.fixture.until(REFUSED, &labels, 1.0).await;
    // A certificate that arrives later opens its listener.
    let late = OwnCertificate::new("pending", "pending.test");
    https.fixture.apply(vec![late.resource.clone()]);
    assert_eq!(
        https.status(&[&late], "pending.test", "pending.test").await,
        200
    );
}

#[tokio::test]
async fn a_request_for_another_listener_than_that_of_its_connection_is_misdirected() {
    let https = HttpsFixture::new(&OriginServer::echo().await);
    let (www, wild) = (
        OwnCertificate::new("www", "www.example.com"),
        OwnCertificate::new("wild", "*.example.com"),
    );
    let mut all = gateway(&[
        ("www", exact("www.example.com"), Some("www")),
        ("wild", suffix(".example.com"), Some("wild")),
    ]);
    all.extend([www.resource.clone(), wild.resource.clone()]);
    https.fixture.apply(all);
    let trusted = [&www, &wild];
    // HTTP/1.1: 421 if another listener serves the host, 404 if none does.
    for (name, host, expected) in [
        ("www.example.com", "www.example.com", 200),
        ("www.example.com", "WWW.example.com:443", 200),
        ("www.example.com", "a.example.com", 421),
        ("a.example.com", "a.example.com", 200),
        ("a.example.com", "b.example.com", 200),
        ("a.example.com", "www.example.com", 421),
        ("a.example.com", "other.test", 404),
    ] {
        let status = https.status(&trusted, name, host).await;
        assert_eq!(status, expected, "{name} {host}");
    }
    let stream = https.connect(&trusted, "www.example.com", &["h2", "http/1.1"]);
    let stream = stream.await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (send, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(async move {
        // An error of the connection also fails the requests below.
        let _ = connection.await;
    });
    for (host, expected) in [("www.example.com", 200), ("a.example.com", 421)] {
        let request = http::Request::get(format!("https://{host}/x"))
            .body(())
            .unwrap();
        let mut ready = send.clone().ready().await.unwrap();
        let (response, _) = ready.send_request(request, true).unwrap();
        assert_eq!(response.await.unwrap().status(), expected, "{host}");
    }
    let labels = ["reason=\"misdirected\""];
    let counted = "canal_gateway_refused_requests_total";
    // Two over HTTP/1.1 and one over HTTP/2.
    https.fixture.until(counted, &labels, 3.0).await;
}

/// A Gateway whose listener `www` relays, terminates TLS with a certificate, or reads plaintext.
fn gateway_of(relay: Option<RelayProtocol>, certificate: Option<&str>) -> Vec<Resource> {
    let mut resources = gateway(&[("www", exact("www.example.com"), Some("www"))]);
    let Resource::Ingress(gateway) = &mut resources[0] else {
        unreachable!("it is the Gateway")
    };
    gateway.listeners[0].relay = relay;
    gateway.listeners[0].certificates = certificate.map(|name| vec![secret(name)]);
    resources
}

#[tokio::test]
async fn connections_older_than_a_listener_of_another_protocol_are_misdirected() {
    let https = HttpsFixture::new(&OriginServer::echo().await);
    let www = OwnCertificate::new("www", "www.example.com");
    let request = b"GET /x HTTP/1.1\r\nHost: www.example.com\r\n\r\n";
    https.fixture.apply(vec![www.resource.clone()]);
    for (relay, certificate) in [
        (None, Some("www")),
        (Some(RelayProtocol::TlsPassthrough), None),
        (Some(RelayProtocol::Tcp), None),
    ] {
        let changed = gateway_of(relay, certificate);
        https.fixture.apply(gateway_of(None, None));
        let mut client = HttpClient::connect(https.address).await;
        client.send(request).await;
        assert_eq!(client.answer().await.unwrap().status, 200);
        https.fixture.apply(changed.clone());
        client.send(request).await;
        assert_eq!(client.answer().await.unwrap().status, 421, "{relay:?}");
        if relay.is_none() {
            continue;
        }
        // The same with a client for whom TLS was terminated.
        https.fixture.apply(gateway_of(None, Some("www")));
        let stream = https.connect(&[&www], "www.example.com", &[]).await;
        let mut client = HttpClient {
            stream: stream.unwrap(),
            buffer: Vec::new(),
        };
        client.send(request).await;
        assert_eq!(client.answer().await.unwrap().status, 200);
        https.fixture.apply(changed);
        client.send(request).await;
        assert_eq!(client.answer().await.unwrap().status, 421, "{relay:?}");
    }
}

/// The clients run on two threads, beside those of the gateway.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_certificate_serves_new_handshakes_and_fails_no_request() {
    let https = HttpsFixture::new(&OriginServer::echo().await);
    let first = Arc::new(OwnCertificate::new("www", "www.example.com"));
    let second = Arc::new(OwnCertificate::new("www", "www.example.com"));
    let mut all = gateway(&[("www", exact("www.example.com"), Some("www"))]);
    all.push(first.resource.clone());
    https.fixture.apply(all);
    let (is_over, sent) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    // Half of the clients keep their connection, the others open one for each request.
    let clients = (0..4).map(|n| {
        let (is_over, sent) = (is_over.clone(), sent.clone());
        let (first, second, address) = (first.clone(), second.clone(), https.address);
        tokio::spawn(async move {
            let (mut kept, mut failed) = (None, 0);
            while !is_over.load(Ordering::Relaxed) {
                let stream = match kept.take() {
                    Some(stream) => Ok(stream),
                    None => connect_to(address, &[&first, &second], "www.example.com", &[]).await,
                };
                sent.fetch_add(1, Ordering::Relaxed);
                let Ok(stream) = stream else {
                    failed += 1;
                    continue;
                };
                let buffer = Vec::new();
                let mut client = HttpClient { stream, buffer };
                let request = b"GET /x HTTP/1.1\r\nHost: www.example.com\r\n\r\n";
                client.send(request).await;
                let answer = client.answer().await;
                failed += u64::from(answer.is_none_or(|answer| answer.status != 200));
                kept = (n % 2 == 0).then_some(client.stream);
            }
            failed
        })
    });
    let clients: Vec<_> = clients.collect();
    let beyond = |count: u64| {
        let sent = sent.clone();
        async move { until("requests run", || sent.load(Ordering::Relaxed) >= count).await }
    };
    // Connections with the first certificate are open and idle when it is replaced.
    beyond(100).await;
    https.fixture.apply(vec![second.resource.clone()]);
    let stream = https
        .connect(&[&second], "www.example.com", &[])
        .await
        .unwrap();
    assert_eq!(presented(&stream), second.der);
    // From here on, new handshakes get the second certificate, and idle connections are used on.
    let after = sent.load(Ordering::Relaxed);
    beyond(after + 100).await;
    is_over.store(true, Ordering::Relaxed);
    for client in clients {
        assert_eq!(client.await.unwrap(), 0, "failed requests");
    }
    let refused = https.connect(&[&first], "www.example.com", &[]).await;
    assert!(
        refused.is_err(),
        "the old certificate is not presented any more"
    );
}

#[tokio::test]
async fn handshakes_of_a_listener_count_on_its_tenant() {
    let limits = GatewayLimits {
        handshakes: 12,
        ..GatewayLimits::default()
    };
    let https = HttpsFixture::with_limits(&OriginServer::echo().await, limits);
    let www = OwnCertificate::new("www", "www.example.com");
    let mut all = gateway(&[("www", exact("www.example.com"), Some("www"))]);
    all.push(www.resource.clone());
    https.fixture.apply(all);
    // The tenant's share is a quarter of 12 handshakes: those beyond it displace the oldest ones.
    let silent = flood(https.address, 20, &[0x16, 3, 1, 0, 200, 1]).await;
    let limit = ["limit=\"gateway_handshakes\"", "tenant=\"alpha\""];
    let fixture = &https.fixture;
    fixture
        .until("canal_share_revoked_total", &limit, 1.0)
        .await;
    let displaced = ["reason=\"handshake_displaced\""];
    fixture.until(REFUSED, &displaced, 1.0).await;
    let status = https
        .status(&[&www], "www.example.com", "www.example.com")
        .await;
    assert_eq!(
        status, 200,
        "a client that completes its handshake is served"
    );
    drop(silent);
}

/// An authority of the listener's clients.
pub(crate) struct ClientAuthority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate of a client with its key.
pub(crate) struct ClientCredential {
    certificate: CertificateDer<'static>,
    key: String,
}

impl ClientAuthority {
    pub(crate) fn new(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        Self { pem, issuer }
    }

    /// Returns the validation of clients at a port that accepts those of the authority.
    pub(crate) fn validation(&self, port: u16, mode: ClientValidationMode) -> ClientValidation {
        ClientValidation {
            ports: [port].into(),
            listeners: BTreeSet::new(),
            mode,
            authorities: Arc::new(CaCertificates {
                pem: self.pem.clone(),
                count: 1,
            }),
        }
    }

    /// Issues a certificate that also has a SPIFFE ID of the tenant.
    pub(crate) fn issue(&self, name: &str) -> ClientCredential {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        let id = "spiffe://alpha.example/ns/default/sa/client";
        params.subject_alt_names = vec![SanType::URI(id.try_into().unwrap())];
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        ClientCredential {
            certificate: certificate.der().clone(),
            key: key.serialize_pem(),
        }
    }
}

/// Returns the Gateway of one listener that validates clients.
fn validating_gateway(mode: ClientValidationMode, authority: &ClientAuthority) -> Vec<Resource> {
    let mut all = gateway(&[("www", exact("www.example.com"), Some("www"))]);
    for resource in &mut all {
        if let Resource::Ingress(gateway) = resource {
            gateway.client_validations = vec![authority.validation(PORT, mode)];
        }
    }
    all
}

#[tokio::test]
async fn clients_stay_only_if_the_next_validation_accepts_them_too() {
    let https = HttpsFixture::with_client_cert(&OriginServer::echo().await);
    let www = OwnCertificate::new("www", "www.example.com");
    let (own, mut both) = (ClientAuthority::new("own"), ClientAuthority::new("other"));
    let other = both.pem.clone();
    both.pem += &own.pem;
    let strict = ClientValidationMode::AllowValidOnly;
    https.fixture.apply(vec![www.resource.clone()]);
    https.fixture.apply(gateway_of(None, Some("www")));
    let connect = async |client: Option<&ClientCredential>| {
        let stream = connect_as(https.address, &[&www], client, "www.example.com", &[]).await;
        HttpClient {
            stream: stream.unwrap(),
            buffer: Vec::new(),
        }
    };
    let status = async |client: &mut HttpClient<TlsStream<TcpStream>>| {
        client.send(REQUEST.as_bytes()).await;
        client.answer().await.unwrap().status
    };
    let mut anyone = connect(None).await;
    assert_eq!(status(&mut anyone).await, 200);
    // The port did not ask for certificates, and does now.
    https.fixture.apply(validating_gateway(strict, &own));
    assert_eq!(status(&mut anyone).await, 421);
    let mut valid = connect(Some(&own.issue("shop"))).await;
    assert_eq!(status(&mut valid).await, 200);
    // A further authority ends no connection.
    https.fixture.apply(validating_gateway(strict, &both));
    assert_eq!(status(&mut valid).await, 200);
    both.pem = other;
    https.fixture.apply(validating_gateway(strict, &both));
    assert_eq!(status(&mut valid).await, 421);
}

const REQUEST: &str = "GET /x HTTP/1.1\r\nHost: www.example.com\r\nX-Forwarded-Client-Cert: URI=spiffe://alpha.example/ns/default/sa/admin\r\n\r\n";

#[tokio::test]
async fn a_listener_that_validates_clients_serves_only_those_of_its_authorities() {
    let https = HttpsFixture::with_client_cert(&OriginServer::echo().await);
    let www = OwnCertificate::new("www", "www.example.com");
    let (own, other) = (ClientAuthority::new("own"), ClientAuthority::new("other"));
    let mut all = validating_gateway(ClientValidationMode::AllowValidOnly, &own);
    all.push(www.resource.clone());
    https.fixture.apply(all);
    let valid = own.issue("shop");
    let answer = https.answer_to(&www, Some(&valid), REQUEST).await.unwrap();
    assert_eq!(answer.status, 200);
    // Its certificate proves no identity, whatever it names, and a header of its own is not sent on.
    let text = answer.text();
    assert!(text.contains("x-forwarded-client-cert: Hash="), "{text}");
    assert!(
        text.contains(";Subject=\"") && text.contains("CN=shop\"\r\n"),
        "{text}"
    );
    assert!(!text.contains("spiffe"), "{text}");
    let foreign = other.issue("shop");
    let labels = ["reason=\"client_certificate\""];
    for (number, client) in [(1.0, None), (2.0, Some(&foreign))] {
        assert!(https.answer_to(&www, client, REQUEST).await.is_none());
        https.fixture.until(REFUSED, &labels, number).await;
    }
    // The authority changes while a connection is open: its client needs another one.
    let trusted = [&www];
    let stream = connect_as(
        https.address,
        &trusted,
        Some(&valid),
        "www.example.com",
        &[],
    );
    let mut kept = HttpClient {
        stream: stream.await.unwrap(),
        buffer: Vec::new(),
    };
    https.fixture.apply(validating_gateway(
        ClientValidationMode::AllowValidOnly,
        &other,
    ));
    assert!(https.answer_to(&www, Some(&valid), REQUEST).await.is_none());
    let answer = https.answer_to(&www, Some(&foreign), REQUEST).await;
    assert_eq!(answer.unwrap().status, 200);
    kept.send(REQUEST.as_bytes()).await;
    assert_eq!(kept.answer().await.unwrap().status, 421);
}

#[tokio::test]
async fn two_listeners_of_a_port_validate_clients_each_in_its_way() {
    let https = HttpsFixture::with_client_cert(&OriginServer::echo().await);
    let (www, own) = (
        OwnCertificate::new("www", "*.example.com"),
        ClientAuthority::new("own"),
    );
    let names = ["simple", "mutual", "optional"];
    let hosts = [
        "simple.example.com",
        "mutual.example.com",
        "optional.example.com",
    ];
    let of_name = |at: usize| (names[at], exact(hosts[at]), Some("www"));
    let mut all = gateway(&[of_name(0), of_name(1), of_name(2)]);
    for resource in &mut all {
        if let Resource::Ingress(gateway) = resource {
            let validation = |mode, name: &str| ClientValidation {
                listeners: [name.to_owned()].into(),
                ..own.validation(PORT, mode)
            };
            gateway.client_validations = vec![
                validation(ClientValidationMode::AllowValidOnly, "mutual"),
                validation(ClientValidationMode::AllowValidOrNone, "optional"),
            ];
        }
    }
    all.push(www.resource.clone());
    https.fixture.apply(all);
    let (valid, foreign) = (
        own.issue("shop"),
        ClientAuthority::new("other").issue("shop"),
    );
    let mut refused = 0.0;
    // A listener that validates no clients asks for no certificate, so the client sends none.
    for (at, client, expected) in [
        // The last field: `None` if the client is refused, else whether the endpoint learns of the
        // certificate.
        (0, None, Some(false)),
        (0, Some(&foreign), Some(false)),
        (1, None, None),
        (1, Some(&foreign), None),
        (1, Some(&valid), Some(true)),
        (2, None, Some(false)),
        (2, Some(&foreign), None),
        (2, Some(&valid), Some(true)),
    ] {
        let request = format!("GET /x HTTP/1.1\r\nHost: {}\r\n\r\n", hosts[at]);
        let stream = connect_as(https.address, &[&www], client, hosts[at], &[]).await;
        let answer = match stream {
            Ok(stream) => {
                let mut client = HttpClient {
                    stream,
                    buffer: Vec::new(),
                };
                client.send(request.as_bytes()).await;
                client.answer().await
            }
            Err(_) => None,
        };
        let case = format!("{} {}", names[at], client.is_some());
        let Some(is_forwarded) = expected else {
            assert!(answer.is_none(), "{case}");
            refused += 1.0;
            let labels = ["reason=\"client_certificate\""];
            https.fixture.until(REFUSED, &labels, refused).await;
            continue;
        };
        let answer = answer.unwrap();
        assert_eq!(answer.status, 200, "{case}");
        let text = answer.text();
        assert_eq!(text.contains("client-cert: Hash="), is_forwarded, "{case}");
    }
    // A connection that was accepted without a certificate reaches no listener that needs one.
    let stream = connect_as(https.address, &[&www], None, hosts[0], &[]).await;
    let mut client = HttpClient {
        stream: stream.unwrap(),
        buffer: Vec::new(),
    };
    client
        .send(b"GET /x HTTP/1.1\r\nHost: mutual.example.com\r\n\r\n")
        .await;
    assert_eq!(client.answer().await.unwrap().status, 421);
    // Clients that may be without a certificate are not counted as insecure ones.
    let insecure = "canal_gateway_insecure_clients_total";
    assert_eq!(https.fixture.metric(insecure, &[]), 0.0);
}

#[tokio::test]
async fn the_insecure_fallback_serves_and_counts_clients_without_a_valid_certificate() {
    let https = HttpsFixture::with_client_cert(&OriginServer::echo().await);
    let www = OwnCertificate::new("www", "www.example.com");
    let (own, other) = (ClientAuthority::new("own"), ClientAuthority::new("other"));
    let mut all = validating_gateway(ClientValidationMode::AllowInsecureFallback, &own);
    all.push(www.resource.clone());
    https.fixture.apply(all);
    let (valid, foreign) = (own.issue("shop"), other.issue("shop"));
    let counted = "canal_gateway_insecure_clients_total";
    for (client, count) in [(Some(&valid), 0.0), (None, 1.0), (Some(&foreign), 2.0)] {
        let answer = https.answer_to(&www, client, REQUEST).await.unwrap();
        assert_eq!(answer.status, 200);
        let text = answer.text();
        assert!(!text.contains("spiffe"), "{text}");
        assert_eq!(text.contains("client-cert: Hash="), count == 0.0, "{text}");
        https.fixture.until(counted, &[], count).await;
    }
}
