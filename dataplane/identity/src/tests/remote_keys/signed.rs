//! Tests of TLS termination with local and remote keys.

use canal_keyserver_client::{RemoteKey, THREADS, WAITING_MAX};
use canal_model::trust::{ClientCertificates, KeyServer};
use canal_tls::{Certificate, Credential};
use canal_wire::keyrpc::{KeyName, KeyRefusal};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;
use crate::{TerminatedConnection, TerminationTerms, Terminator};

const HOST: &str = "shop.example";

fn shop(ca: &TestCa, rsa: bool) -> Certificate {
    let change = |p: &mut rcgen::CertificateParams| {
        p.subject_alt_names
            .push(rcgen::SanType::DnsName(HOST.try_into().unwrap()));
    };
    let i = if rsa {
        ca.issue_rsa(&identity(BOB), change)
    } else {
        ca.issue_with(&identity(BOB), change)
    };
    Certificate::from_pem(&i.key, &i.chain, &ca.root_pem()).unwrap()
}

fn terms(clients: ClientCertificates) -> TerminationTerms {
    TerminationTerms {
        tenant: "alpha".parse().unwrap(),
        trust_domain: "alpha.example".parse().unwrap(),
        clients,
        alpn: vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        tls12: true,
    }
}

/// Returns the configuration of a client that is not part of the mesh.
fn browser(
    ca: &TestCa,
    shows: Option<&str>,
    change: impl FnOnce(&mut ClientConfig),
    groups: Option<Vec<&'static dyn rustls::crypto::SupportedKxGroup>>,
) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(ca.root_pem().as_bytes()).unwrap())
        .unwrap();
    let mut provider = rustls::crypto::aws_lc_rs::default_provider();
    if let Some(groups) = groups {
        provider.kx_groups = groups;
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match shows {
        Some(id) => {
            let i = ca.issue_with(&identity(id), |_| {});
            let chain = CertificateDer::pem_slice_iter(i.chain.as_bytes())
                .collect::<Result<_, _>>()
                .unwrap();
            builder
                .with_client_auth_cert(
                    chain,
                    PrivateKeyDer::from_pem_slice(i.key.as_bytes()).unwrap(),
                )
                .unwrap()
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    change(&mut config);
    Arc::new(config)
}

async fn meet(
    terminator: &Terminator,
    config: Arc<ClientConfig>,
) -> (
    Result<TlsStream<DuplexStream>, String>,
    Result<TerminatedConnection<DuplexStream>, TlsError>,
) {
    let (near, far) = duplex(64 << 10);
    let client = async {
        TlsConnector::from(config)
            .connect(ServerName::try_from(HOST).unwrap(), near)
            .await
            .map_err(|e| e.to_string())
    };
    tokio::time::timeout(canal_timing::deadline(Duration::from_secs(20)), async {
        tokio::join!(client, terminator.accept(far, || {}))
    })
    .await
    .expect("a handshake hangs")
}

fn own_server(fixture: &KeyClientFixture) -> KeyServer {
    KeyServer {
        tenant: "alpha".parse().unwrap(),
        name: "own".parse().unwrap(),
        addresses: vec![fixture.near.address],
    }
}

#[tokio::test]
async fn remote_keys_serve_clients_of_every_kind() {
    let fixture = KeyClientFixture::new().await;
    fixture
        .near
        .hold("file:alpha/shop/web", shop(&fixture.ca, false));
    // `slow` has an RSA key.
    fixture
        .near
        .hold("file:alpha/shop/slow", shop(&fixture.ca, true));
    let view = fixture.store.view(&"alpha".parse().unwrap());
    let only = |v: &'static rustls::SupportedProtocolVersion| {
        let mut c = (*browser(&fixture.ca, None, |_| {}, None)).clone();
        let roots = {
            let mut r = RootCertStore::empty();
            r.add(CertificateDer::from_pem_slice(fixture.ca.root_pem().as_bytes()).unwrap())
                .unwrap();
            r
        };
        c = ClientConfig::builder_with_provider(c.crypto_provider().clone())
            .with_protocol_versions(&[v])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Arc::new(c)
    };
    for key in ["alpha/shop/web", "alpha/shop/slow"] {
        let signed =
            RemoteKey::by_provider(&fixture.requester, KeyName::File(key.parse().unwrap()));
        let terminator = Terminator::signed(terms(ClientCertificates::None), signed, view.clone());
        for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
            let (c, s) = meet(&terminator, only(version)).await;
            let (mut c, mut s) = (c.unwrap(), s.unwrap());
            assert_eq!(
                (s.server_name.as_deref(), s.peer.is_none()),
                (Some(HOST), true),
                "{key}"
            );
            s.stream.write_all(b"welcome").await.unwrap();
            s.stream.flush().await.unwrap();
            let mut got = [0; 7];
            c.read_exact(&mut got).await.unwrap();
            assert_eq!(&got, b"welcome");
        }
        // A client whose first key share is of an unsupported group gets a HelloRetryRequest.
        let groups = vec![
            rustls::crypto::aws_lc_rs::kx_group::SECP384R1,
            rustls::crypto::aws_lc_rs::kx_group::X25519,
        ];
        // HelloRetryRequest exists only in TLS 1.3.
        let mesh = TerminationTerms {
            tls12: false,
            ..terms(ClientCertificates::None)
        };
        let again = Terminator::signed(
            mesh,
            RemoteKey::by_provider(&fixture.requester, KeyName::File(key.parse().unwrap())),
            view.clone(),
        );
        let (c, s) = meet(&again, browser(&fixture.ca, None, |_| {}, Some(groups))).await;
        assert_eq!(s.unwrap().alpn.as_deref(), Some(&b"http/1.1"[..]));
        assert_eq!(
            c.unwrap().get_ref().1.handshake_kind(),
            Some(rustls::HandshakeKind::FullWithHelloRetryRequest)
        );
    }
}

#[tokio::test]
async fn clients_present_certificates_as_the_terms_require() {
    let fixture = KeyClientFixture::new().await;
    let view = fixture.store.view(&"alpha".parse().unwrap());
    let foreign = "spiffe://gamma.example/ns/x/sa/y";
    let cases = [
        (ClientCertificates::None, Some(ALICE), Ok(None)),
        (ClientCertificates::Optional, None, Ok(None)),
        (ClientCertificates::Optional, Some(ALICE), Ok(Some(ALICE))),
        (
            ClientCertificates::Optional,
            Some(foreign),
            Err("wrong_trust_domain"),
        ),
        (ClientCertificates::Required, Some(ALICE), Ok(Some(ALICE))),
        (ClientCertificates::Required, None, Err("no_certificate")),
    ];
    fixture
        .near
        .hold("file:alpha/shop/web", shop(&fixture.ca, false));
    let signed = RemoteKey::by_provider(
        &fixture.requester,
        KeyName::File("alpha/shop/web".parse().unwrap()),
    );
    for (clients, shows, want) in cases {
        let local = Terminator::new(
            terms(clients),
            Credential::fixed(shop(&fixture.ca, false)),
            view.clone(),
        );
        let remote = Terminator::signed(terms(clients), signed.clone(), view.clone());
        for terminator in [local, remote] {
            let (_c, s) = meet(&terminator, browser(&fixture.ca, shows, |_| {}, None)).await;
            let got = s
                .map(|s| s.peer.map(|(p, _)| p.identity.to_string()))
                .map_err(|e| e.reason());
            assert_eq!(
                got,
                want.map(|id| id.map(str::to_string)),
                "{clients:?} {shows:?}"
            );
        }
    }
    // Once with a local and once with a remote key.
    assert!(
        fixture.metric("canal_tls_refused_total{side=\"termination\",reason=\"no_certificate\"}")
            >= 2
    );
}

#[tokio::test]
async fn tickets_are_for_clients_without_identity_and_keys_that_are_here() {
    let fixture = KeyClientFixture::new().await;
    fixture
        .near
        .hold("file:alpha/shop/web", shop(&fixture.ca, false));
    let view = fixture.store.view(&"alpha".parse().unwrap());
    let signed = || {
        RemoteKey::by_provider(
            &fixture.requester,
            KeyName::File("alpha/shop/web".parse().unwrap()),
        )
    };
    let local = || Credential::fixed(shop(&fixture.ca, false));
    for (name, terminator, shows, resumes) in [
        (
            "here",
            Terminator::new(terms(ClientCertificates::None), local(), view.clone()),
            None,
            true,
        ),
        (
            "here, with identities",
            Terminator::new(terms(ClientCertificates::Optional), local(), view.clone()),
            Some(ALICE),
            false,
        ),
        (
            "elsewhere",
            Terminator::signed(terms(ClientCertificates::None), signed(), view.clone()),
            None,
            false,
        ),
    ] {
        let config = browser(&fixture.ca, shows, |_| {}, None);
        let mut kinds = Vec::new();
        // The second handshake could resume the session of the first.
        for _ in 0..2 {
            let (c, s) = meet(&terminator, config.clone()).await;
            let (mut c, mut s) = (c.unwrap(), s.unwrap());
            kinds.push(c.get_ref().1.handshake_kind());
            // Tickets arrive with the first bytes.
            s.stream.write_all(b"x").await.unwrap();
            s.stream.flush().await.unwrap();
            c.read_u8().await.unwrap();
        }
        assert_eq!(
            kinds[1] == Some(rustls::HandshakeKind::Resumed),
            resumes,
            "{name}: {kinds:?}"
        );
    }
}

#[tokio::test]
async fn the_owner_of_a_key_may_refuse_at_any_time() {
    let fixture = KeyClientFixture::new().await;
    fixture
        .near
        .hold("file:alpha/shop/web", shop(&fixture.ca, false));
    let signed = RemoteKey::by_provider(
        &fixture.requester,
        KeyName::File("alpha/shop/web".parse().unwrap()),
    );
    let terminator = Terminator::signed(
        terms(ClientCertificates::None),
        signed,
        fixture.store.view(&"alpha".parse().unwrap()),
    );
    assert!(
        meet(&terminator, browser(&fixture.ca, None, |_| {}, None))
            .await
            .1
            .is_ok()
    );
    // A server that refuses is passed over, so both have to refuse.
    for server in [&fixture.near, &fixture.far] {
        server.set_behavior(FakeBehavior::Refusing(KeyRefusal::NotAllowed));
    }
    let (c, s) = meet(&terminator, browser(&fixture.ca, None, |_| {}, None)).await;
    assert!(c.is_err());
    let e = s.unwrap_err();
    assert!(
        matches!(
            &e,
            TlsError::KeyServer(KeyServerError::Refused {
                name: KeyRefusal::NotAllowed,
                ..
            })
        ),
        "{e}"
    );
    // No key server has this key.
    fixture.near.set_behavior(FakeBehavior::Well);
    let none = RemoteKey::by_provider(
        &fixture.requester,
        KeyName::File("alpha/shop/nobody".parse().unwrap()),
    );
    let terminator = Terminator::signed(
        terms(ClientCertificates::None),
        none,
        fixture.store.view(&"alpha".parse().unwrap()),
    );
    assert_eq!(
        meet(&terminator, browser(&fixture.ca, None, |_| {}, None))
            .await
            .1
            .unwrap_err()
            .reason(),
        "key_server"
    );
}

/// Each key server creates its own keys, so one cannot sign for a certificate of another.
#[tokio::test]
async fn certificates_and_signatures_are_of_one_key() {
    let fixture = KeyClientFixture::new().await;
    for server in [&fixture.near, &fixture.far] {
        server.hold("alpha/shop/web", shop(&fixture.ca, false));
    }
    let signed = RemoteKey::by_provider(
        &fixture.requester,
        KeyName::Service("alpha/shop/web".parse().unwrap()),
    );
    let terminator = Terminator::signed(
        terms(ClientCertificates::None),
        signed,
        fixture.store.view(&"alpha".parse().unwrap()),
    );
    let config = browser(&fixture.ca, None, |_| {}, None);
    let handshake = async || meet(&terminator, config.clone()).await.1;
    // The near server does not answer the first request for certificates, and answers from then on.
    fixture.near.set_behavior(FakeBehavior::Mute);
    handshake().await.unwrap();
    fixture.near.set_behavior(FakeBehavior::Well);
    let asked = fixture.near.request_count();
    handshake().await.unwrap();
    assert_eq!(
        fixture.near.request_count(),
        asked,
        "the server that returned the certificates is tried first"
    );
    let other_key =
        || fixture.metric("canal_keys_refused_total{server=\"ks1\",reason=\"other_key\"}");
    let refused = |e: TlsError| {
        assert!(
            matches!(&e, TlsError::KeyServer(KeyServerError::NoKeyServer(_))),
            "{e}"
        )
    };
    // The far server, whose certificates are in use, is silent from now on. One handshake fails,
    // because the near server has another key.
    fixture.far.set_behavior(FakeBehavior::Mute);
    refused(handshake().await.unwrap_err());
    assert_eq!(other_key(), 1);
    handshake().await.unwrap();
    fixture.far.set_behavior(FakeBehavior::Well);
    handshake().await.unwrap();
    // The near server has another key under the same name from now on.
    fixture.near.hold("alpha/shop/web", shop(&fixture.ca, true));
    refused(handshake().await.unwrap_err());
    assert_eq!(other_key(), 2);
    handshake().await.unwrap();
}

#[tokio::test]
async fn a_tenants_own_key_server_must_be_the_tenants() {
    let fixture = KeyClientFixture::new().await;
    // The provider's key server runs at the address of the tenant's.
    let signed = RemoteKey::by_tenant(
        &fixture.requester,
        &own_server(&fixture),
        KeyName::File("alpha/shop/web".parse().unwrap()),
    );
    let terminator = Terminator::signed(
        terms(ClientCertificates::None),
        signed,
        fixture.store.view(&"alpha".parse().unwrap()),
    );
    let e = meet(&terminator, browser(&fixture.ca, None, |_| {}, None))
        .await
        .1
        .unwrap_err();
    assert!(
        e.reason() == "no_key_server" && e.to_string().contains("alpha/own: connect"),
        "{e}"
    );
}

#[tokio::test]
async fn when_all_threads_sign_the_next_is_refused_at_once() {
    let fixture = KeyClientFixture::new().await;
    fixture
        .near
        .hold("file:alpha/shop/web", shop(&fixture.ca, false));
    let signed = RemoteKey::by_provider(
        &fixture.requester,
        KeyName::File("alpha/shop/web".parse().unwrap()),
    );
    let terminator = Arc::new(Terminator::signed(
        terms(ClientCertificates::None),
        signed,
        fixture.store.view(&"alpha".parse().unwrap()),
    ));
    assert!(
        meet(&terminator, browser(&fixture.ca, None, |_| {}, None))
            .await
            .1
            .is_ok()
    );
    fixture.near.set_behavior(FakeBehavior::Slow);
    fixture.far.set_behavior(FakeBehavior::Slow);
    let config = browser(&fixture.ca, None, |_| {}, None);
    let crowd = futures::future::join_all(
        // All threads and all places in their queue are taken, and twenty handshakes are too
        // many.
        (0..THREADS + WAITING_MAX + 20).map(|_| meet(&terminator, config.clone())),
    )
    .await;
    let busy = crowd
        .iter()
        .filter(|(_, s)| s.as_ref().is_err_and(|e| e.reason() == "handshakes_busy"))
        .count();
    // Handshakes that time out early free places, and threads that take their jobs late keep some
    // occupied.
    // The lower bound leaves room for ten places that become free early; nobody measured it.
    assert!((10..=20 + THREADS).contains(&busy), "{busy}");
    assert_eq!(
        fixture.metric("canal_keys_handshakes_busy_total"),
        busy as u64
    );
    // Afterwards all threads are free again. The circuit breaker of a key server that was slow for
    // too long stays open for a while.
    fixture.near.set_behavior(FakeBehavior::Well);
    let started = Instant::now();
    while let Err(error) = meet(&terminator, config.clone()).await.1 {
        let waited = started.elapsed();
        assert!(
            waited < canal_timing::deadline(Duration::from_secs(5)),
            "{error}"
        );
        // An interval of polling.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_silent_retry_occupies_no_thread() {
    let fixture = KeyClientFixture::new().await;
    fixture
        .near
        .hold("file:alpha/shop/web", shop(&fixture.ca, false));
    let signed = RemoteKey::by_provider(
        &fixture.requester,
        KeyName::File("alpha/shop/web".parse().unwrap()),
    );
    let mesh = TerminationTerms {
        tls12: false,
        ..terms(ClientCertificates::None)
    };
    let terminator =
        Terminator::signed(mesh, signed, fixture.store.view(&"alpha".parse().unwrap()));
    let groups = vec![
        rustls::crypto::aws_lc_rs::kx_group::SECP384R1,
        rustls::crypto::aws_lc_rs::kx_group::X25519,
    ];
    let config = browser(&fixture.ca, None, |_| {}, Some(groups));
    let mut client =
        rustls::ClientConnection::new(config, ServerName::try_from(HOST).unwrap()).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    let (mut near, far) = duplex(64 << 10);
    near.write_all(&hello).await.unwrap();
    let start = Instant::now();
    assert_eq!(
        terminator.accept(far, || {}).await.unwrap_err().reason(),
        "io"
    );
    canal_timing::assert_time(
        "time until a client that does not retry is left",
        start.elapsed(),
        Duration::from_secs(5),
    );
}
