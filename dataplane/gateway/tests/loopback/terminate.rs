//! TLS of clients without a node proxy, with real handshakes: which names, which clients, which protocols, and what policies see of them.

use std::sync::Arc;

use canal_kit::keys::{Keyring, Requester, RequesterConfig, TRIP, parse_key_server};
use canal_kit::metrics::Registry;
use canal_kit::testing::{FakeKeyServer, Issued, Mood, TestCa, identity};
use canal_kit::tls::{Certificate, Credential, TrustStore};
use canal_model::authorization::{Action, Attribute, Clause, Match};
use canal_model::identity::Identity;
use canal_model::program::*;
use canal_model::trust::{ClientCertificates, KeyPlace, KeyPolicy, Termination, TerminationCertificate};
use canal_wire::keyrpc::Refusal;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, HandshakeKind, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::client::Client;
use crate::http2;
use crate::origin::{Origin, Peer};
use crate::policies::{policy, rule};
use crate::rig::{Plot, Rig, TENANT, key, tenant};

const NAME: &str = "web.default.svc.cluster.local";
/// In the certificate, but not the service's.
const OTHER: &str = "other.example";
const MEMBER: &str = "spiffe://alpha.example/ns/default/sa/bare";

struct Door {
    rig: Rig,
    ca: Arc<TestCa>,
    trust: TrustStore,
}

impl Door {
    fn new(protocol: AppProtocol, origin: &Origin) -> Self {
        Self::with(protocol, origin, None)
    }

    fn with(protocol: AppProtocol, origin: &Origin, requester: Option<Requester>) -> Self {
        let ca = Arc::new(TestCa::new("alpha"));
        let (own, services, trust) = (ca.clone(), ca.clone(), TrustStore::new(&Registry::new()));
        let keyring = Keyring::of(Arc::new(move |id| own.credential(id)), requester, trust.clone());
        let certificates = Arc::new(move |gateway: &_, _: &_, _| Credential::fixed(named(&services, gateway)));
        let plot = Plot { protocol, keyring: Some(keyring), certificates: Some(certificates), ..Plot::default() };
        Self { rig: Rig::new(plot, &[origin.address]), ca, trust }
    }

    fn ends(&self, clients: ClientCertificates, required: bool) {
        self.rig.apply(vec![termination(clients, required, None)]);
    }

    /// A client's configuration, with a certificate of this CA if it is to show one.
    fn config(&self, shown: Option<(&TestCa, u64)>, alpn: &[&str]) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.ca.root_pem().as_bytes()).unwrap()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
        let mut config = match shown {
            None => builder.with_no_client_auth(),
            Some((ca, serial)) => {
                let Issued { key, chain } = ca.issue_with(&identity(MEMBER), |p| p.serial_number = Some(serial.into()));
                let chain = CertificateDer::pem_slice_iter(chain.as_bytes()).collect::<Result<_, _>>().unwrap();
                builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap()).unwrap()
            }
        };
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        Arc::new(config)
    }

    async fn connect(&self, config: &Arc<ClientConfig>, name: &'static str) -> std::io::Result<Client<TlsStream<TcpStream>>> {
        let stream = TcpStream::connect(self.rig.web).await?;
        let stream = TlsConnector::from(config.clone()).connect(name.try_into().unwrap(), stream).await?;
        Ok(Client { stream, buffer: Vec::new() })
    }

    /// The status of a request; 0 where the connection gave none.
    async fn status(&self, config: &Arc<ClientConfig>, name: &'static str) -> u16 {
        let Ok(mut client) = self.connect(config, name).await else { return 0 };
        client.send(b"GET /x HTTP/1.1\r\nHost: web\r\n\r\n").await;
        client.answer().await.map_or(0, |answer| answer.status)
    }
}

/// A certificate of the gateway that has the service's names.
fn named(ca: &TestCa, gateway: &Identity) -> Certificate {
    let Issued { key, chain } = ca.issue_with(gateway, |p| {
        let names = [NAME, "web.default", OTHER].map(|name| rcgen::SanType::DnsName(name.try_into().unwrap()));
        p.subject_alt_names.extend(names);
    });
    Certificate::from_pem(&key, &chain, &ca.root_pem()).unwrap()
}

fn termination(clients: ClientCertificates, required: bool, broken: Option<String>) -> Resource {
    let certificate = TerminationCertificate::Mesh;
    Resource::Termination(Termination { service: key(TENANT, "web"), port: 80, certificate, clients, required, broken })
}

#[tokio::test]
async fn tls_ends_under_the_services_names_beside_plaintext() {
    let door = Door::new(AppProtocol::Http1, &Origin::echo().await);
    let config = door.config(None, &[]);
    assert_eq!(door.status(&config, NAME).await, 0, "TLS is no HTTP");
    door.ends(ClientCertificates::None, false);
    let mut client = door.connect(&config, NAME).await.unwrap();
    assert_eq!(client.stream.get_ref().1.handshake_kind(), Some(HandshakeKind::Full));
    for _ in 0..3 {
        client.send(b"POST /x HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\nhello").await;
        let answer = client.answer().await.unwrap();
        assert!(answer.status == 200 && answer.text().contains("x-forwarded-proto: https\r\n"), "{}", answer.text());
    }
    let again = door.connect(&config, NAME).await.unwrap();
    assert_eq!(again.stream.get_ref().1.handshake_kind(), Some(HandshakeKind::Resumed), "who proves nothing may resume");
    assert_eq!(door.status(&config, "web.default").await, 200);
    assert_eq!(door.status(&config, OTHER).await, 0);
    door.rig.until("canal_gateway_refused_connections_total", &["reason=\"wrong_server_name\""], 1.0).await;
    let plain = Client::get(door.rig.web, "/x").await;
    assert!(plain.status == 200 && plain.text().contains("x-forwarded-proto: http\r\n"));
    door.ends(ClientCertificates::None, true);
    assert_eq!(door.status(&config, NAME).await, 200);
    assert!(!Client::connect(door.rig.web).await.stream_closed(b"GET /x HTTP/1.1\r\nHost: web\r\n\r\n").await);
    door.rig.until("canal_gateway_refused_connections_total", &["reason=\"plaintext_refused\""], 1.0).await;
    door.rig.apply(vec![termination(ClientCertificates::None, false, Some("it is broken".into()))]);
    assert_eq!(door.status(&config, NAME).await, 0);
    door.rig.until("canal_gateway_refused_connections_total", &["reason=\"termination_broken\""], 1.0).await;
    door.rig.change(vec![], &[(Kind::Termination, "alpha/default/web:80")]);
    assert_eq!(Client::get(door.rig.web, "/x").await.status, 200);
}

impl Client {
    /// Sends, and waits for the end; true if it was an orderly one.
    async fn stream_closed(&mut self, bytes: &[u8]) -> bool {
        self.send(bytes).await;
        self.closed().await
    }
}

#[tokio::test]
async fn clients_prove_who_they_are_where_they_must_or_may() {
    let door = Door::new(AppProtocol::Http1, &Origin::echo().await);
    let stranger = TestCa::new("nobody");
    let (none, own, other) = (door.config(None, &[]), door.config(Some((&door.ca, 7)), &[]), door.config(Some((&stranger, 8)), &[]));
    let named = Clause { attribute: Attribute::SourcePrincipal, any: vec![Match::Exact(MEMBER.replace("spiffe://", ""))], none: vec![] };
    door.rig.apply(vec![policy("members", Action::Allow, vec![rule(vec![named])])]);
    for (clients, want) in [
        (ClientCertificates::None, [403, 403, 403]),
        (ClientCertificates::Optional, [403, 200, 0]),
        (ClientCertificates::Required, [0, 200, 0]),
    ] {
        door.ends(clients, true);
        let got = [door.status(&none, NAME).await, door.status(&own, NAME).await, door.status(&other, NAME).await];
        assert_eq!(got, want, "{clients:?}");
    }
    let again = door.connect(&own, NAME).await.unwrap();
    assert_eq!(again.stream.get_ref().1.handshake_kind(), Some(HandshakeKind::Full), "who proves something proves it each time");
    assert_eq!(door.rig.metric("istio_requests_total", &[&format!("source_principal=\"{MEMBER}\""), "response_code=\"200\""]), 2.0);
    // It is revoked while it is connected.
    let mut open = door.connect(&own, NAME).await.unwrap();
    open.send(b"GET /x HTTP/1.1\r\nHost: web\r\n\r\n").await;
    assert_eq!(open.answer().await.unwrap().status, 200);
    door.trust.replace([door.ca.bundle(TENANT, "alpha.example", false, vec![door.ca.revocations(&[7])])]).unwrap();
    open.closed().await;
    door.rig.until("canal_gateway_refused_connections_total", &["reason=\"revoked\""], 1.0).await;
    assert_eq!(door.status(&own, NAME).await, 0);
}

/// The tenant's keys are in key servers: the service's signs there, and the gateway has none.
#[tokio::test]
async fn a_key_server_signs_for_a_service_and_may_say_no() {
    let components = TestCa::new("components");
    let server = FakeKeyServer::start(&components, "ks1").await;
    let me = identity("spiffe://components.canal/ns/canal-system/sa/gateway.gw-1");
    let servers = vec![parse_key_server(&format!("az1=ks1@{}", server.address)).unwrap()];
    let config = RequesterConfig { az: "az1".parse().unwrap(), servers, me: me.clone(), trip: TRIP };
    let requester = Requester::with_credential(config, components.credential(&me), &TrustStore::new(&Registry::new()), &Registry::new());
    let door = Door::with(AppProtocol::Http1, &Origin::echo().await, Some(requester));
    let gateway = identity("spiffe://alpha.example/ns/canal-system/sa/gateway");
    let Resource::Tenant(tenant) = tenant(TENANT, 1) else { panic!("a tenant") };
    let keys = KeyPolicy { place: KeyPlace::KeyServer, ..KeyPolicy::default() };
    door.ends(ClientCertificates::None, true);
    door.rig.apply(vec![Resource::Tenant(Tenant { keys, ..tenant })]);
    let config = door.config(None, &[]);
    assert_eq!(door.status(&config, NAME).await, 0, "the key server has no such key yet");
    door.rig.until("canal_gateway_refused_connections_total", &["reason=\"tls_key_server\""], 1.0).await;
    server.hold("alpha/default/web", named(&door.ca, &gateway));
    assert_eq!((door.status(&config, NAME).await, server.asked() > 0), (200, true));
    server.mood(Mood::Refusing(Refusal::NotAllowed));
    assert_eq!(door.status(&config, NAME).await, 0, "no signature is kept");
    server.mood(Mood::Well);
    assert_eq!(door.status(&config, NAME).await, 200);
    // A tenant's own key server that nobody knows: no certificate at all.
    let certificate = TerminationCertificate::KeyServer("own".parse().unwrap());
    let Resource::Termination(mesh) = termination(ClientCertificates::None, true, None) else { panic!("a termination") };
    door.rig.apply(vec![Resource::Termination(Termination { certificate, ..mesh })]);
    assert_eq!(door.status(&config, NAME).await, 0);
    door.rig.until("canal_gateway_refused_connections_total", &["reason=\"no_certificate\""], 1.0).await;
}

#[tokio::test]
async fn http2_and_bytes_pass_through_tls() {
    let door = Door::new(AppProtocol::Http2, &http2::origin(http2::echo).await);
    door.ends(ClientCertificates::None, true);
    let client = door.connect(&door.config(None, &["h2", "http/1.1"]), NAME).await.unwrap();
    assert_eq!(client.stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut send, connection) = h2::client::handshake(client.stream).await.unwrap();
    tokio::spawn(connection);
    let data = crate::origin::pattern(0, 3 << 20);
    let (response, mut body) = send.send_request(http::Request::post("https://web/x").body(()).unwrap(), false).unwrap();
    let sent = data.clone();
    tokio::spawn(async move { http2::send_all(&mut body, sent.into(), true).await });
    let (got, _) = http2::read_all(response.await.unwrap().into_body()).await.unwrap();
    assert!(got.ends_with(&data));
    let echo = Origin::each(|mut peer: Peer| async move {
        peer.write(b"first\r\n").await;
        while let Some(line) = peer.line().await {
            peer.write(format!("{line}\r\n").as_bytes()).await;
        }
    })
    .await;
    let door = Door::new(AppProtocol::Tcp, &echo);
    door.ends(ClientCertificates::None, false);
    let mut client = door.connect(&door.config(None, &[]), NAME).await.unwrap();
    assert_eq!(client.line().await, "first", "the server may speak first");
    let long = "x".repeat(1 << 20);
    client.send(format!("{long}\r\n").as_bytes()).await;
    assert_eq!(client.line().await, long);
    assert_eq!(Client::connect(door.rig.web).await.line().await, "first", "in plaintext as well");
}
