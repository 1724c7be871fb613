//! TLS of clients without a node proxy, with real handshakes: server names, client certificates,
//! protocols, and the identity that policies see.

use std::sync::Arc;

use canal_identity::ClientIdentityFactory;
use canal_keyserver_client::{ANSWER_TIMEOUT, KeyClient, KeyClientConfig, parse_key_server};
use canal_model::authorization::{Attribute, AttributeMatch, AuthorizationAction, Clause};
use canal_model::identity::Identity;
use canal_model::program::*;
use canal_model::trust::{
    ClientCertificates, KeyLocation, KeyPolicy, Termination, TerminationCertificate,
};
use canal_runtime::metrics::Registry;
use canal_testing::{FakeBehavior, FakeKeyServer, TestCa, TestCertificate, identity};
use canal_tls::{Certificate, Credential, TrustStore};
use canal_wire::keyrpc::KeyRefusal;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, HandshakeKind, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, TENANT, key, tenant};
use crate::hbone::{LoopbackMesh, local};
use crate::http2;
use crate::origin::{OriginServer, Peer};
use crate::policies::{policy, rule};

const NAME: &str = "web.default.svc.cluster.local";
/// A name in the certificate that is not the service's.
const OTHER: &str = "other.example";
const MEMBER: &str = "spiffe://alpha.example/ns/default/sa/bare";

struct TlsClientHandshake {
    fixture: GatewayFixture,
    ca: Arc<TestCa>,
    trust: TrustStore,
}

impl TlsClientHandshake {
    fn new(protocol: AppProtocol, origin: &OriginServer) -> Self {
        Self::with(protocol, origin, None)
    }

    fn with(protocol: AppProtocol, origin: &OriginServer, requester: Option<KeyClient>) -> Self {
        let ca = Arc::new(TestCa::new("alpha"));
        let (own, services, trust) = (ca.clone(), ca.clone(), TrustStore::new(&Registry::new()));
        let keyring = ClientIdentityFactory::of(
            Arc::new(move |id| own.credential(id)),
            requester,
            trust.clone(),
        );
        let certificates =
            Arc::new(move |gateway: &_, _: &_, _| Credential::fixed(named(&services, gateway)));
        let setup = EngineSetup {
            protocol,
            keyring: Some(keyring),
            certificates: Some(certificates),
            ..EngineSetup::default()
        };
        Self {
            fixture: GatewayFixture::new(setup, &[origin.address]),
            ca,
            trust,
        }
    }

    fn ends(&self, clients: ClientCertificates, required: bool) {
        self.fixture
            .apply(vec![termination(clients, required, None)]);
    }

    /// Returns a client's configuration, with a client certificate if `shown` names a CA and a
    /// serial number.
    fn config(&self, shown: Option<(&TestCa, u64)>, alpn: &[&str]) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(self.ca.root_pem().as_bytes()).unwrap())
            .unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(
            rustls::crypto::aws_lc_rs::default_provider(),
        ));
        let builder = builder
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match shown {
            None => builder.with_no_client_auth(),
            Some((ca, serial)) => {
                let TestCertificate { key, chain } =
                    ca.issue_with(&identity(MEMBER), |p| p.serial_number = Some(serial.into()));
                let chain = CertificateDer::pem_slice_iter(chain.as_bytes())
                    .collect::<Result<_, _>>()
                    .unwrap();
                builder
                    .with_client_auth_cert(
                        chain,
                        PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
                    )
                    .unwrap()
            }
        };
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        Arc::new(config)
    }

    async fn connect(
        &self,
        config: &Arc<ClientConfig>,
        name: &'static str,
    ) -> std::io::Result<HttpClient<TlsStream<TcpStream>>> {
        let stream = TcpStream::connect(self.fixture.web).await?;
        let stream = TlsConnector::from(config.clone())
            .connect(name.try_into().unwrap(), stream)
            .await?;
        Ok(HttpClient {
            stream,
            buffer: Vec::new(),
        })
    }

    /// Returns the status of a request; 0 if the connection gave none.
    async fn status(&self, config: &Arc<ClientConfig>, name: &'static str) -> u16 {
        let Ok(mut client) = self.connect(config, name).await else {
            return 0;
        };
        client.send(b"GET /x HTTP/1.1\r\nHost: web\r\n\r\n").await;
        client.answer().await.map_or(0, |answer| answer.status)
    }
}

/// Issues a gateway certificate that has the service's names.
fn named(ca: &TestCa, gateway: &Identity) -> Certificate {
    let TestCertificate { key, chain } = ca.issue_with(gateway, |p| {
        let names = [NAME, "web.default", OTHER]
            .map(|name| rcgen::SanType::DnsName(name.try_into().unwrap()));
        p.subject_alt_names.extend(names);
    });
    Certificate::from_pem(&key, &chain, &ca.root_pem()).unwrap()
}

fn termination(clients: ClientCertificates, required: bool, broken: Option<String>) -> Resource {
    let certificate = TerminationCertificate::Mesh;
    Resource::Termination(Termination {
        service: key(TENANT, "web"),
        port: 80,
        certificate,
        clients,
        required,
        broken,
    })
}

#[tokio::test]
async fn tls_ends_under_the_services_names_beside_plaintext() {
    let tls_client = TlsClientHandshake::new(AppProtocol::Http1, &OriginServer::echo().await);
    let config = tls_client.config(None, &[]);
    // A client with TLS fails (status 0) while the port has no termination.
    assert_eq!(tls_client.status(&config, NAME).await, 0, "TLS is no HTTP");
    // The last argument is whether plaintext is refused; here it is accepted beside TLS.
    tls_client.ends(ClientCertificates::None, false);
    let mut client = tls_client.connect(&config, NAME).await.unwrap();
    assert_eq!(
        client.stream.get_ref().1.handshake_kind(),
        Some(HandshakeKind::Full)
    );
    // Several requests show that the connection stays usable after the first response.
    for _ in 0..3 {
        client
            .send(b"POST /x HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\nhello")
            .await;
        let answer = client.answer().await.unwrap();
        assert!(
            answer.status == 200 && answer.text().contains("x-forwarded-proto: https\r\n"),
            "{}",
            answer.text()
        );
    }
    let again = tls_client.connect(&config, NAME).await.unwrap();
    assert_eq!(
        again.stream.get_ref().1.handshake_kind(),
        Some(HandshakeKind::Resumed),
        "a client without a certificate may resume"
    );
    // A short name of the service is one of its names as well.
    assert_eq!(tls_client.status(&config, "web.default").await, 200);
    assert_eq!(tls_client.status(&config, OTHER).await, 0);
    tls_client
        .fixture
        .until(
            "canal_gateway_refused_connections_total",
            &["reason=\"wrong_server_name\""],
            1.0,
        )
        .await;
    let plain = HttpClient::get(tls_client.fixture.web, "/x").await;
    assert!(plain.status == 200 && plain.text().contains("x-forwarded-proto: http\r\n"));
    // From here on, plaintext is refused.
    tls_client.ends(ClientCertificates::None, true);
    assert_eq!(tls_client.status(&config, NAME).await, 200);
    assert!(
        !HttpClient::connect(tls_client.fixture.web)
            .await
            .stream_closed(b"GET /x HTTP/1.1\r\nHost: web\r\n\r\n")
            .await
    );
    tls_client
        .fixture
        .until(
            "canal_gateway_refused_connections_total",
            &["reason=\"plaintext_refused\""],
            1.0,
        )
        .await;
    tls_client.fixture.apply(vec![termination(
        ClientCertificates::None,
        false,
        Some("it is broken".into()),
    )]);
    assert_eq!(tls_client.status(&config, NAME).await, 0);
    tls_client
        .fixture
        .until(
            "canal_gateway_refused_connections_total",
            &["reason=\"termination_broken\""],
            1.0,
        )
        .await;
    tls_client.fixture.change(
        vec![],
        &[(ResourceKind::Termination, "alpha/default/web:80")],
    );
    assert_eq!(
        HttpClient::get(tls_client.fixture.web, "/x").await.status,
        200
    );
}

impl HttpClient {
    /// Sends bytes and waits for the end; true if it was orderly.
    async fn stream_closed(&mut self, bytes: &[u8]) -> bool {
        self.send(bytes).await;
        self.closed().await
    }
}

#[tokio::test]
async fn clients_present_certificates_where_required_or_optional() {
    let tls_client = TlsClientHandshake::new(AppProtocol::Http1, &OriginServer::echo().await);
    let foreign = TestCa::new("nobody");
    // The numbers are the serials of the certificates; 7 is revoked below.
    let (none, own, other) = (
        tls_client.config(None, &[]),
        tls_client.config(Some((&tls_client.ca, 7)), &[]),
        tls_client.config(Some((&foreign, 8)), &[]),
    );
    let named = Clause {
        attribute: Attribute::SourcePrincipal,
        any: vec![AttributeMatch::Exact(MEMBER.replace("spiffe://", ""))],
        none: vec![],
    };
    tls_client.fixture.apply(vec![policy(
        "members",
        AuthorizationAction::Allow,
        vec![rule(vec![named])],
    )]);
    // The statuses of a client without a certificate, of a member, and of a client with a
    // certificate of a foreign CA; 0 if the handshake fails. A service that requests no certificate
    // knows no principal, so the policy allows nobody.
    for (clients, want) in [
        (ClientCertificates::None, [403, 403, 403]),
        (ClientCertificates::Optional, [403, 200, 0]),
        (ClientCertificates::Required, [0, 200, 0]),
    ] {
        tls_client.ends(clients, true);
        let got = [
            tls_client.status(&none, NAME).await,
            tls_client.status(&own, NAME).await,
            tls_client.status(&other, NAME).await,
        ];
        assert_eq!(got, want, "{clients:?}");
    }
    let again = tls_client.connect(&own, NAME).await.unwrap();
    assert_eq!(
        again.stream.get_ref().1.handshake_kind(),
        Some(HandshakeKind::Full),
        "a client with a certificate presents it in each handshake"
    );
    assert_eq!(
        tls_client.fixture.metric(
            "istio_requests_total",
            &[
                &format!("source_principal=\"{MEMBER}\""),
                "response_code=\"200\""
            ]
        ),
        // One for each mode that requests a certificate.
        2.0
    );
    // The certificate is revoked while the client is connected.
    let mut open = tls_client.connect(&own, NAME).await.unwrap();
    open.send(b"GET /x HTTP/1.1\r\nHost: web\r\n\r\n").await;
    assert_eq!(open.answer().await.unwrap().status, 200);
    tls_client
        .trust
        .replace([tls_client.ca.bundle(
            TENANT,
            "alpha.example",
            false,
            vec![tls_client.ca.revocations(&[7])],
        )])
        .unwrap();
    open.closed().await;
    tls_client
        .fixture
        .until(
            "canal_gateway_refused_connections_total",
            &["reason=\"revoked\""],
            1.0,
        )
        .await;
    assert_eq!(tls_client.status(&own, NAME).await, 0);
}

/// The tenant's keys are in key servers: the service's key signs there, and the gateway has none.
#[tokio::test]
async fn a_key_server_signs_for_a_service_and_may_refuse() {
    let components = TestCa::new("components");
    let server = FakeKeyServer::start(&components, "ks1").await;
    let me = identity("spiffe://components.canal/ns/canal-system/sa/gateway.gw-1");
    let servers = vec![parse_key_server(&format!("az1=ks1@{}", server.address)).unwrap()];
    let config = KeyClientConfig {
        az: "az1".parse().unwrap(),
        servers,
        me: me.clone(),
        trip: ANSWER_TIMEOUT,
    };
    let requester = KeyClient::start(
        config,
        components.credential(&me),
        &TrustStore::new(&Registry::new()),
        &Registry::new(),
    );
    let tls_client = TlsClientHandshake::with(
        AppProtocol::Http1,
        &OriginServer::echo().await,
        Some(requester),
    );
    let gateway = identity("spiffe://alpha.example/ns/canal-system/sa/gateway");
    let Resource::Tenant(tenant) = tenant(TENANT, 1) else {
        panic!("a tenant")
    };
    let keys = KeyPolicy {
        location: KeyLocation::KeyServer,
        ..KeyPolicy::default()
    };
    tls_client.ends(ClientCertificates::None, true);
    tls_client
        .fixture
        .apply(vec![Resource::Tenant(Tenant { keys, ..tenant })]);
    let config = tls_client.config(None, &[]);
    assert_eq!(
        tls_client.status(&config, NAME).await,
        0,
        "the key server does not have this key yet"
    );
    tls_client
        .fixture
        .until(
            "canal_gateway_refused_connections_total",
            &["reason=\"tls_key_server\""],
            1.0,
        )
        .await;
    server.hold("alpha/default/web", named(&tls_client.ca, &gateway));
    assert_eq!(
        (
            tls_client.status(&config, NAME).await,
            server.request_count() > 0
        ),
        (200, true)
    );
    server.set_behavior(FakeBehavior::Refusing(KeyRefusal::NotAllowed));
    assert_eq!(
        tls_client.status(&config, NAME).await,
        0,
        "no signature is cached"
    );
    server.set_behavior(FakeBehavior::Well);
    assert_eq!(tls_client.status(&config, NAME).await, 200);
    // The tenant's own key server is unknown to the gateway, so there is no certificate.
    let certificate = TerminationCertificate::KeyServer("own".parse().unwrap());
    let Resource::Termination(mesh) = termination(ClientCertificates::None, true, None) else {
        panic!("a termination")
    };
    tls_client
        .fixture
        .apply(vec![Resource::Termination(Termination {
            certificate,
            ..mesh
        })]);
    assert_eq!(tls_client.status(&config, NAME).await, 0);
    tls_client
        .fixture
        .until(
            "canal_gateway_refused_connections_total",
            &["reason=\"no_certificate\""],
            1.0,
        )
        .await;
}

/// Returns the status of the next request on a connection.
async fn next_status<S: AsyncRead + AsyncWrite + Unpin>(client: &mut HttpClient<S>) -> u16 {
    client.send(b"GET /x HTTP/1.1\r\nHost: web\r\n\r\n").await;
    client.answer().await.unwrap().status
}

#[tokio::test]
async fn a_tightened_termination_refuses_the_requests_of_open_connections() {
    let tls_client = TlsClientHandshake::new(AppProtocol::Http1, &OriginServer::echo().await);
    let optional = ClientCertificates::Optional;
    tls_client.ends(optional, false);
    let mut plain = HttpClient::connect(tls_client.fixture.web).await;
    let own = tls_client.config(Some((&tls_client.ca, 7)), &[]);
    let mut uncertified = connected(&tls_client, &tls_client.config(None, &[])).await;
    let mut certified = connected(&tls_client, &own).await;
    let why = |it: &str| Some(it.to_owned());
    for (clients, required, broken, want) in [
        (optional, false, None, [200, 200, 200]),
        (optional, true, None, [421, 200, 200]),
        (ClientCertificates::Required, false, None, [200, 421, 200]),
        (ClientCertificates::Required, true, None, [421, 421, 200]),
        (optional, false, why("it is broken"), [421, 421, 421]),
        (optional, false, None, [200, 200, 200]),
    ] {
        let all = vec![termination(clients, required, broken)];
        tls_client.fixture.apply(all);
        let got = [
            next_status(&mut plain).await,
            next_status(&mut uncertified).await,
            next_status(&mut certified).await,
        ];
        assert_eq!(got, want, "{clients:?} {required}");
    }
}

async fn connected(
    tls_client: &TlsClientHandshake,
    config: &Arc<ClientConfig>,
) -> HttpClient<TlsStream<TcpStream>> {
    tls_client.connect(config, NAME).await.unwrap()
}

#[tokio::test]
async fn a_tightened_termination_closes_relayed_connections() {
    let greeting = OriginServer::each(|mut peer: Peer| async move {
        peer.write(b"first\r\n").await;
        while peer.line().await.is_some() {}
    })
    .await;
    let tls_client = TlsClientHandshake::new(AppProtocol::Tcp, &greeting);
    let config = tls_client.config(None, &[]);
    tls_client.ends(ClientCertificates::None, false);
    let mut plain = HttpClient::connect(tls_client.fixture.web).await;
    let mut uncertified = connected(&tls_client, &config).await;
    assert_eq!(plain.line().await, "first");
    assert_eq!(uncertified.line().await, "first");
    tls_client.ends(ClientCertificates::None, true);
    plain.closed().await;
    tls_client.ends(ClientCertificates::Required, true);
    uncertified.closed().await;
}

/// A tunnel is no connection that a Termination could have accepted.
#[test]
fn a_termination_does_not_concern_clients_with_a_node_proxy() {
    local(|| async {
        let origin = OriginServer::echo().await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        let mut client = mesh.client("web.default.svc.cluster.local:80").await;
        for broken in [None, Some("it is broken".to_owned())] {
            let required = termination(ClientCertificates::Required, true, broken);
            mesh.fixture.apply(vec![required]);
            assert_eq!(next_status(&mut client).await, 200);
        }
    });
}

#[tokio::test]
async fn http2_and_bytes_pass_through_tls() {
    let tls_client = TlsClientHandshake::new(AppProtocol::Http2, &http2::origin(http2::echo).await);
    tls_client.ends(ClientCertificates::None, true);
    let client = tls_client
        .connect(&tls_client.config(None, &["h2", "http/1.1"]), NAME)
        .await
        .unwrap();
    assert_eq!(client.stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut send, connection) = h2::client::handshake(client.stream).await.unwrap();
    tokio::spawn(connection);
    // More than an HTTP/2 window and many TLS records of 16 KiB.
    let data = crate::origin::pattern(0, 3 << 20);
    let (response, mut body) = send
        .send_request(
            http::Request::post("https://web/x").body(()).unwrap(),
            false,
        )
        .unwrap();
    let sent = data.clone();
    tokio::spawn(async move { http2::send_all(&mut body, sent.into(), true).await });
    let (got, _) = http2::read_all(response.await.unwrap().into_body())
        .await
        .unwrap();
    assert!(got.ends_with(&data));
    let echo = OriginServer::each(|mut peer: Peer| async move {
        peer.write(b"first\r\n").await;
        while let Some(line) = peer.line().await {
            peer.write(format!("{line}\r\n").as_bytes()).await;
        }
    })
    .await;
    let tls_client = TlsClientHandshake::new(AppProtocol::Tcp, &echo);
    tls_client.ends(ClientCertificates::None, false);
    let mut client = tls_client
        .connect(&tls_client.config(None, &[]), NAME)
        .await
        .unwrap();
    assert_eq!(client.line().await, "first", "the server may send first");
    // Many TLS records, so that a line crosses their boundaries.
    let long = "x".repeat(1 << 20);
    client.send(format!("{long}\r\n").as_bytes()).await;
    assert_eq!(client.line().await, long);
    assert_eq!(
        HttpClient::connect(tls_client.fixture.web)
            .await
            .line()
            .await,
        "first",
        "in plaintext as well"
    );
}
