//! Handshake matrix: which peers accept each other, with which protocol, and the text of the
//! errors.

use std::sync::Arc;

use canal_model::identity::{Identity, VerifiedPeer};
use canal_model::ids::TenantName;
use canal_testing::{TestCa, TestCertificate, identity};
use canal_tls::{
    Certificate, Credential, FIRST_CERTIFICATE_TIMEOUT, Inner, PeerIdentityError, PeerVerifier,
    ServerVerifier, TlsError, TrustView, provider,
};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, SanType, date_time_ymd};
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::{cipher_suite, kx_group};
use rustls::{ClientConfig, SupportedCipherSuite};
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;

use crate::{ClientIdentity, ServerIdentity};

const ALICE: &str = "spiffe://alpha.example/ns/shop/sa/alice";
const BOB: &str = "spiffe://alpha.example/ns/shop/sa/bob";
const CAROL: &str = "spiffe://alpha.example/ns/shop/sa/carol";
const MALLORY: &str = "spiffe://beta.example/ns/shop/sa/alice";

fn server(credential: Credential) -> ServerIdentity {
    ServerIdentity::new(TenantName::new("alpha").unwrap(), credential)
}

fn expect(ids: &[&str]) -> Arc<[Identity]> {
    ids.iter().map(|i| identity(i)).collect()
}

/// Performs a handshake and returns the results of both sides. The client's side includes a first
/// read, where a server's refusal shows in TLS 1.3.
async fn handshake(
    client: ClientIdentity,
    server: ServerIdentity,
    expected: &[&str],
) -> (Result<Identity, String>, Result<VerifiedPeer, String>) {
    let (near, far) = tokio::io::duplex(64 << 10);
    let expected = expect(expected);
    let client = async {
        let (mut s, id) = client
            .connect(near, &expected)
            .await
            .map_err(|e| e.to_string())?;
        let mut hello = [0; 5];
        s.read_exact(&mut hello)
            .await
            .map_err(|e| TlsError::from(e).to_string())?;
        Ok(id)
    };
    let server = async {
        let (mut s, peer) = server.accept(far).await.map_err(|e| e.to_string())?;
        s.write_all(b"hello").await.unwrap();
        s.flush().await.unwrap();
        Ok(peer)
    };
    tokio::join!(client, server)
}

fn fixed_credential(i: &TestCertificate, ca: &TestCa) -> Credential {
    Credential::fixed(Certificate::from_pem(&i.key, &i.chain, &ca.root_pem()).unwrap())
}

#[tokio::test]
async fn valid_peers_connect_and_learn_their_identities() {
    let ca = TestCa::new("alpha");
    let (client, srv) = (
        ClientIdentity::new(ca.credential(&identity(ALICE))),
        server(ca.credential(&identity(BOB))),
    );
    let (c, s) = handshake(client, srv, &[MALLORY, BOB]).await;
    assert_eq!(c.unwrap(), identity(BOB));
    assert_eq!(
        s.unwrap(),
        VerifiedPeer {
            tenant: TenantName::new("alpha").unwrap(),
            identity: identity(ALICE)
        }
    );
}

/// A client whose certificate a function modifies, and the text that the server's error must
/// contain.
type ClientCase = (
    &'static str,
    &'static str,
    fn(&mut CertificateParams),
    &'static str,
);

#[tokio::test]
async fn wrong_clients_are_refused_by_name() {
    let ca = TestCa::new("alpha");
    let cases: [ClientCase; 5] = [
        (
            "another trust domain, same root",
            MALLORY,
            |_| {},
            "expected an identity of trust domain alpha.example",
        ),
        (
            "expired",
            ALICE,
            |p| p.not_after = date_time_ymd(2021, 1, 1),
            "expired",
        ),
        (
            "not valid yet",
            ALICE,
            |p| p.not_before = date_time_ymd(2119, 1, 1),
            "not valid yet",
        ),
        (
            "server only",
            ALICE,
            |p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth],
            "extended key usage",
        ),
        (
            "no SPIFFE ID",
            ALICE,
            |p| p.subject_alt_names = vec![SanType::URI("https://x/y".try_into().unwrap())],
            "https://x/y",
        ),
    ];
    for (name, id, change, text) in cases {
        let issued = ca.issue_with(&identity(id), change);
        let config = raw_client(
            Some(&issued),
            &ca.root_pem(),
            &provider(),
            &rustls::version::TLS13,
        );
        let error = refused_by_server(config, server(ca.credential(&identity(BOB)))).await;
        assert!(error.contains(text), "{name}: {error}");
    }
}

#[tokio::test]
async fn two_identities_in_one_certificate_are_ambiguous() {
    let ca = TestCa::new("alpha");
    let issued = ca.issue_with(&identity(ALICE), |p| {
        p.subject_alt_names
            .push(SanType::URI(BOB.try_into().unwrap()))
    });
    let config = raw_client(
        Some(&issued),
        &ca.root_pem(),
        &provider(),
        &rustls::version::TLS13,
    );
    let error = refused_by_server(config, server(ca.credential(&identity(BOB)))).await;
    assert!(error.contains("expected exactly one identity"), "{error}");
}

#[tokio::test]
async fn foreign_peers_and_old_protocols_are_refused() {
    let (ca, other) = (TestCa::new("alpha"), TestCa::new("other"));
    let all = rustls::crypto::aws_lc_rs::default_provider();
    let only = |suites: Vec<SupportedCipherSuite>| CryptoProvider {
        cipher_suites: suites,
        ..all.clone()
    };
    let chacha = Arc::new(only(vec![cipher_suite::TLS13_CHACHA20_POLY1305_SHA256]));
    let p384 = Arc::new(CryptoProvider {
        kx_groups: vec![kx_group::SECP384R1],
        ..all.clone()
    });
    let (right, wrong) = (
        ca.issue_with(&identity(ALICE), |_| {}),
        other.issue_with(&identity(ALICE), |_| {}),
    );
    let tls13 = &rustls::version::TLS13;
    let cases = [
        (
            "no certificate",
            raw_client(None, &ca.root_pem(), &provider(), tls13),
            "no certificates",
        ),
        (
            "another root",
            raw_client(Some(&wrong), &ca.root_pem(), &provider(), tls13),
            "UnknownIssuer",
        ),
        (
            "TLS 1.2",
            raw_client(
                Some(&right),
                &ca.root_pem(),
                &Arc::new(all.clone()),
                &rustls::version::TLS12,
            ),
            "Tls12NotOffered",
        ),
        (
            "ChaCha20 only",
            raw_client(Some(&right), &ca.root_pem(), &chacha, tls13),
            "NoCipherSuitesInCommon",
        ),
        (
            "P-384 only",
            raw_client(Some(&right), &ca.root_pem(), &p384, tls13),
            "NoKxGroupsInCommon",
        ),
        (
            "ALPN http/1.1",
            alpn(
                raw_client(Some(&right), &ca.root_pem(), &provider(), tls13),
                b"http/1.1",
            ),
            "NoApplicationProtocol",
        ),
    ];
    for (name, config, text) in cases {
        let error = refused_by_server(config, server(ca.credential(&identity(BOB)))).await;
        assert!(error.contains(text), "{name}: {error}");
    }
}

#[tokio::test]
async fn wrong_servers_are_refused_by_name() {
    let (ca, other) = (TestCa::new("alpha"), TestCa::new("other"));
    let alice = || ClientIdentity::new(ca.credential(&identity(ALICE)));
    let client_only = ca.issue_with(&identity(BOB), |p| {
        p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth]
    });
    let cases = [
        (
            "someone else",
            server(ca.credential(&identity(BOB))),
            &[ALICE][..],
            "expected one of",
        ),
        (
            "nobody expected",
            server(ca.credential(&identity(BOB))),
            &[][..],
            "expected one of []",
        ),
        (
            "another root",
            server(other.credential(&identity(BOB))),
            &[BOB][..],
            "UnknownIssuer",
        ),
        (
            "client only",
            server(fixed_credential(&client_only, &ca)),
            &[BOB][..],
            "extended key usage",
        ),
    ];
    for (name, srv, expected, text) in cases {
        let (c, s) = handshake(alice(), srv, expected).await;
        let error = c.unwrap_err();
        assert!(error.contains(text), "{name}: {error}");
        assert!(s.is_err(), "{name}");
    }
}

#[tokio::test]
async fn the_error_names_expected_and_seen() {
    let ca = TestCa::new("alpha");
    let (near, far) = tokio::io::duplex(64 << 10);
    let srv = server(ca.credential(&identity(BOB)));
    let client = ClientIdentity::new(ca.credential(&identity(ALICE)));
    let expected = expect(&[ALICE]);
    let (c, _) = tokio::join!(client.connect(near, &expected), srv.accept(far));
    match c {
        Err(TlsError::Peer(PeerIdentityError::Identity {
            expected,
            names: seen,
        })) => {
            assert_eq!(
                (expected, seen),
                (vec![identity(ALICE)], vec![BOB.to_string()])
            );
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_missing_or_expired_own_certificate_fails_before_any_byte() {
    let ca = TestCa::new("alpha");
    let old = ca.issue_with(&identity(ALICE), |p| {
        p.not_after = date_time_ymd(2021, 1, 1)
    });
    let (writer, empty) = Credential::empty(identity(ALICE));
    // Without a writer there will never be a certificate, so the handshake does not wait.
    drop(writer);
    for credential in [fixed_credential(&old, &ca), empty] {
        let (near, _far) = tokio::io::duplex(1024);
        let c = ClientIdentity::new(credential.clone())
            .connect(near, &expect(&[BOB]))
            .await;
        assert!(matches!(c, Err(TlsError::NoCertificate(id)) if id == identity(ALICE)));
        let (near, _far) = tokio::io::duplex(1024);
        assert!(matches!(
            server(credential).accept(near).await,
            Err(TlsError::NoCertificate(_))
        ));
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_waits_for_its_first_certificate_and_not_for_ever() {
    let ca = TestCa::new("alpha");
    let (writer, credential) = Credential::empty(identity(BOB));
    let (near, far) = tokio::io::duplex(64 << 10);
    let (expected, client) = (
        expect(&[BOB]),
        ClientIdentity::new(ca.credential(&identity(ALICE))),
    );
    let late = async {
        tokio::time::sleep(FIRST_CERTIFICATE_TIMEOUT / 2).await;
        writer.replace(ca.issue(&identity(BOB)));
    };
    let waits = server(credential);
    let (c, s, ()) = tokio::join!(client.connect(near, &expected), waits.accept(far), late);
    assert_eq!(c.unwrap().1, identity(BOB));
    s.unwrap();

    let (_writer, credential) = Credential::empty(identity(BOB));
    let (_near, far) = tokio::io::duplex(1024);
    assert!(matches!(
        server(credential).accept(far).await,
        Err(TlsError::NoCertificate(_))
    ));
}

#[tokio::test]
async fn new_handshakes_use_the_new_certificate_and_live_connections_go_on() {
    let (old, new) = (TestCa::new("old"), TestCa::new("new"));
    let (writer, credential) = Credential::empty(identity(BOB));
    writer.replace(old.issue(&identity(BOB)));
    let srv = server(credential.clone());
    let (near, far) = tokio::io::duplex(64 << 10);
    let (expected, client) = (
        expect(&[BOB]),
        ClientIdentity::new(old.credential(&identity(ALICE))),
    );
    let (c, s) = tokio::join!(client.connect(near, &expected), srv.accept(far));
    let (mut c, mut s) = (c.unwrap().0, s.unwrap().0);

    writer.replace(new.issue(&identity(BOB)));
    let (fresh, _) = handshake(
        ClientIdentity::new(new.credential(&identity(ALICE))),
        srv.clone(),
        &[BOB],
    )
    .await;
    assert_eq!(fresh.unwrap(), identity(BOB));
    let (stale, _) = handshake(client, srv, &[BOB]).await;
    assert!(stale.unwrap_err().contains("UnknownIssuer"));

    c.write_all(b"still here").await.unwrap();
    c.flush().await.unwrap();
    let mut got = [0; 10];
    s.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"still here");
    assert!(writer.is_in_use());
    drop((credential, s));
}

#[tokio::test]
async fn client_settings_are_rebuilt_for_each_certificate_and_bundle() {
    let (old, new) = (TestCa::new("old"), TestCa::new("new"));
    let (writer, credential) = Credential::empty(identity(ALICE));
    writer.replace(old.issue(&identity(ALICE)));
    let client = ClientIdentity::new(credential);
    let (bob, servers) = (
        expect(&[BOB]),
        [&old, &new].map(|ca| server(ca.credential(&identity(BOB)))),
    );
    let meets = async |of: &ServerIdentity| handshake(client.clone(), of.clone(), &[BOB]).await.0;

    let first = client.config(&bob);
    assert!(
        Arc::ptr_eq(&first, &client.config(&expect(&[BOB]))),
        "the same certificate, the same peers"
    );
    assert!(
        Arc::ptr_eq(&first, &client.clone().config(&bob))
            && Arc::ptr_eq(&first, &client.config(&bob))
    );
    assert!(meets(&servers[0]).await.is_ok());
    assert!(
        meets(&servers[1])
            .await
            .unwrap_err()
            .contains("UnknownIssuer")
    );

    // Key, chain and bundle are different now, and so are the presented certificate and the trusted
    // peers.
    writer.replace(new.issue(&identity(ALICE)));
    assert!(!Arc::ptr_eq(&first, &client.config(&bob)));
    assert!(
        meets(&servers[0])
            .await
            .unwrap_err()
            .contains("UnknownIssuer")
    );
    assert!(meets(&servers[1]).await.is_ok());

    // A new certificate of the same CA gets a new configuration.
    let second = client.config(&bob);
    writer.replace(new.issue(&identity(ALICE)));
    assert!(!Arc::ptr_eq(&second, &client.config(&bob)));
    assert!(meets(&servers[1]).await.is_ok());
}

#[tokio::test]
async fn connections_of_one_client_expect_their_own_peers_alone() {
    let ca = TestCa::new("alpha");
    let client = ClientIdentity::new(ca.credential(&identity(ALICE)));
    let (bob, carol) = (
        server(ca.credential(&identity(BOB))),
        server(ca.credential(&identity(CAROL))),
    );
    assert!(!Arc::ptr_eq(
        &client.config(&expect(&[BOB])),
        &client.config(&expect(&[CAROL]))
    ));
    // The cases vary the peer that is expected first and later, one after the other and
    // concurrently.
    let cases: [(&ServerIdentity, &[&str], bool); 8] = [
        (&bob, &[BOB], true),
        (&carol, &[BOB], false),
        (&carol, &[CAROL], true),
        (&bob, &[CAROL], false),
        // An empty list expects nobody, and not anybody.
        (&bob, &[], false),
        (&carol, &[BOB, CAROL], true),
        (&bob, &[CAROL, BOB], true),
        (&carol, &[BOB], false),
    ];
    for (n, (srv, expected, want)) in cases.into_iter().enumerate() {
        let (c, _) = handshake(client.clone(), srv.clone(), expected).await;
        assert_eq!(c.is_ok(), want, "case {n}: {c:?}");
    }
    let all =
        cases.map(|(srv, expected, want)| (handshake(client.clone(), srv.clone(), expected), want));
    let tasks: Vec<_> = all
        .into_iter()
        .map(|(shake, want)| async move { (shake.await.0.is_ok(), want) })
        .collect();
    for (n, (got, want)) in futures::future::join_all(tasks)
        .await
        .into_iter()
        .enumerate()
    {
        assert_eq!(got, want, "case {n}, at once");
    }
}

#[tokio::test]
async fn the_handshake_is_hybrid_h2_and_without_sni_or_tickets() {
    let ca = TestCa::new("alpha");
    let (near, far) = tokio::io::duplex(64 << 10);
    let (expected, client, srv) = (
        expect(&[BOB]),
        ClientIdentity::new(ca.credential(&identity(ALICE))),
        server(ca.credential(&identity(BOB))),
    );
    let (c, s) = tokio::join!(client.connect(near, &expected), srv.accept(far));
    let (c, s) = (c.unwrap().0, s.unwrap().0);
    let (Inner::Client(c), Inner::Server(s)) = (c.inner(), s.inner()) else {
        panic!("local handshakes")
    };
    let (c, s) = (c.get_ref().1, s.get_ref().1);
    assert_eq!(
        c.negotiated_key_exchange_group().unwrap().name(),
        rustls::NamedGroup::X25519MLKEM768
    );
    assert_eq!(
        c.negotiated_cipher_suite().unwrap().suite(),
        rustls::CipherSuite::TLS13_AES_256_GCM_SHA384
    );
    assert_eq!(
        (c.alpn_protocol(), s.alpn_protocol()),
        (Some(&b"h2"[..]), Some(&b"h2"[..]))
    );
    assert_eq!(s.server_name(), None);
    assert_eq!(c.tls13_tickets_received(), 0);
}

#[tokio::test]
async fn peers_without_the_preferred_algorithms_use_fallbacks() {
    let ca = TestCa::new("alpha");
    let all = rustls::crypto::aws_lc_rs::default_provider();
    let issued = ca.issue_with(&identity(ALICE), |_| {});
    for group in [kx_group::X25519, kx_group::SECP256R1] {
        let p = CryptoProvider {
            kx_groups: vec![group],
            cipher_suites: vec![cipher_suite::TLS13_AES_128_GCM_SHA256],
            ..all.clone()
        };
        let config = raw_client(
            Some(&issued),
            &ca.root_pem(),
            &Arc::new(p),
            &rustls::version::TLS13,
        );
        let (near, far) = tokio::io::duplex(64 << 10);
        let srv = server(ca.credential(&identity(BOB)));
        let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
        let (_c, s) = tokio::join!(
            TlsConnector::from(config).connect(name, near),
            srv.accept(far)
        );
        assert_eq!(s.unwrap().1.identity, identity(ALICE));
    }
}

#[test]
fn unusable_material_is_refused_with_its_reason() {
    let ca = TestCa::new("alpha");
    let (one, two) = (
        ca.issue_with(&identity(ALICE), |_| {}),
        ca.issue_with(&identity(BOB), |_| {}),
    );
    let none = ca.issue_with(&identity(ALICE), |p| p.subject_alt_names.clear());
    let root = ca.root_pem();
    let cases = [
        (
            "key of another",
            Certificate::from_pem(&two.key, &one.chain, &root),
            "does not belong to the certificate",
        ),
        (
            "no key",
            Certificate::from_pem("", &one.chain, &root),
            "private key",
        ),
        (
            "no chain",
            Certificate::from_pem(&one.key, "", &root),
            "chain: contains no certificate",
        ),
        (
            "no bundle",
            Certificate::from_pem(&one.key, &one.chain, ""),
            "bundle: contains no certificate",
        ),
        (
            "no identity",
            Certificate::from_pem(&none.key, &none.chain, &root),
            "it has []",
        ),
    ];
    for (name, got, text) in cases {
        let error = got.unwrap_err().to_string();
        assert!(error.contains(text), "{name}: {error}");
    }
}

fn alpn(config: Arc<ClientConfig>, protocol: &[u8]) -> Arc<ClientConfig> {
    let mut config = (*config).clone();
    config.alpn_protocols = vec![protocol.to_vec()];
    Arc::new(config)
}

/// Returns the configuration of a client that is not part of the mesh: it trusts `root` for any
/// name, and presents the given certificate.
fn raw_client(
    issued: Option<&TestCertificate>,
    root: &str,
    provider: &Arc<CryptoProvider>,
    version: &'static rustls::SupportedProtocolVersion,
) -> Arc<ClientConfig> {
    use rustls_pki_types::pem::PemObject;
    let root = CertificateDer::from_pem_slice(root.as_bytes()).unwrap();
    let verifier = PeerVerifier::new(
        identity(BOB).trust_domain,
        &[root],
        TrustView::without_bundles(),
    )
    .unwrap();
    let verifier = Arc::new(ServerVerifier::new(verifier, expect(&[BOB])));
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[version])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match issued {
        Some(i) => {
            let chain = CertificateDer::pem_slice_iter(i.chain.as_bytes())
                .collect::<Result<_, _>>()
                .unwrap();
            let key = rustls_pki_types::PrivateKeyDer::from_pem_slice(i.key.as_bytes()).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

async fn refused_by_server(config: Arc<ClientConfig>, srv: ServerIdentity) -> String {
    let (near, far) = tokio::io::duplex(64 << 10);
    let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
    let client = async {
        let mut s = TlsConnector::from(config).connect(name, near).await?;
        s.read_u8().await
    };
    let (c, s) = tokio::join!(client, srv.accept(far));
    assert!(c.is_err(), "the client must notice");
    match s {
        Err(e) => format!("{e} {e:?}"),
        Ok((_, peer)) => panic!("accepted {peer:?}"),
    }
}

mod remote_keys;
mod trust_changes;
