//! Tests of trust bundles and their changes: every handshake failure, revocation, federation,
//! rotation, and the cache of verified chains.

use canal_runtime::metrics::Registry;
use canal_tls::{CHAIN_CERTIFICATES_MAX, HandshakeFailure, TrustLoss, TrustStore};
use rustls::client::ResolvesClientCert;
use rustls::sign::CertifiedKey;
use rustls_pki_types::PrivateKeyDer;
use rustls_pki_types::pem::PemObject;

use super::*;

struct TestListener {
    registry: Registry,
    store: TrustStore,
    ca: TestCa,
}

impl TestListener {
    fn new() -> Self {
        let registry = Registry::new();
        let listener = Self {
            store: TrustStore::new(&registry),
            registry,
            ca: TestCa::new("alpha"),
        };
        listener.publish_bundle(vec![]);
        listener
    }

    fn publish_bundle(&self, revoked: Vec<String>) {
        self.store
            .replace([self.ca.bundle("alpha", "alpha.example", false, revoked)])
            .unwrap();
    }

    fn view(&self) -> TrustView {
        self.store.view(&"alpha".parse().unwrap())
    }

    fn server(&self) -> ServerIdentity {
        server(self.ca.credential(&identity(BOB))).trusting(self.view())
    }

    /// Returns the failure of the handshake, which must have been counted.
    async fn refusal(&self, config: Arc<ClientConfig>, srv: ServerIdentity) -> HandshakeFailure {
        let (near, far) = tokio::io::duplex(256 << 10);
        let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
        let client = async {
            TlsConnector::from(config)
                .connect(name, near)
                .await
                .map(drop)
        };
        let (_, s) = tokio::join!(client, srv.accept(far));
        let refusal = s.map(|(_, peer)| peer).expect_err("refused").refusal();
        assert!(
            self.count(&format!(
                "canal_tls_refused_total{{side=\"server\",reason=\"{}\"}}",
                refusal.name()
            )) > 0,
            "{refusal:?}"
        );
        refusal
    }

    fn count(&self, start: &str) -> u64 {
        let text = self.registry.render();
        let line = text.lines().find(|l| l.starts_with(start));
        line.and_then(|l| l.rsplit(' ').next())
            .map_or(0, |v| v.parse().unwrap())
    }
}

#[derive(Debug)]
struct Shows(Arc<CertifiedKey>);
impl ResolvesClientCert for Shows {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
    fn has_certs(&self) -> bool {
        true
    }
}

/// Returns the configuration of a client that presents any `chain` and signs with any `key`.
fn showing(ca: &TestCa, key: &str, chain: Vec<CertificateDer<'static>>) -> Arc<ClientConfig> {
    let mut config =
        (*raw_client(None, &ca.root_pem(), &provider(), &rustls::version::TLS13)).clone();
    let key = provider()
        .key_provider
        .load_private_key(PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap())
        .unwrap();
    config.client_auth_cert_resolver = Arc::new(Shows(Arc::new(CertifiedKey::new(chain, key))));
    Arc::new(config)
}

fn certificates(pem: &str) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .unwrap()
}

#[tokio::test]
async fn client_trust_follows_bundles_without_a_rebuild() {
    let (listener, next) = (TestListener::new(), TestCa::new("next"));
    let client =
        ClientIdentity::new(listener.ca.credential(&identity(ALICE))).trusting(listener.view());
    let (bob, config) = (expect(&[BOB]), client.config(&expect(&[BOB])));
    let old = listener.ca.issue_with(&identity(BOB), |_| {});
    let meets = async |srv: ServerIdentity| {
        let (near, far) = tokio::io::duplex(256 << 10);
        let (c, _) = tokio::join!(client.connect(near, &bob), srv.accept(far));
        c.map(|(_, id)| id).map_err(|e| e.refusal().name())
    };
    assert_eq!(
        meets(server(fixed_credential(&old, &listener.ca))).await,
        Ok(identity(BOB))
    );
    assert_eq!(
        meets(server(next.credential(&identity(BOB)))).await,
        Err("unknown_issuer")
    );

    listener
        .store
        .replace([next.bundle("alpha", "alpha.example", false, vec![])])
        .unwrap();
    assert_eq!(
        meets(server(fixed_credential(&old, &listener.ca))).await,
        Err("unknown_issuer"),
        "the old root is not trusted any more"
    );
    assert_eq!(
        meets(server(next.credential(&identity(BOB)))).await,
        Ok(identity(BOB))
    );
    assert!(Arc::ptr_eq(&config, &client.config(&bob)));
    let told_anew = client.clone().trusting(TrustView::without_bundles());
    assert!(
        !Arc::ptr_eq(&config, &told_anew.config(&bob)),
        "another trust, another configuration"
    );
}

/// A case's name, the client, and why the server refuses it.
type CertificateCase = (&'static str, Arc<ClientConfig>, HandshakeFailure);

/// Returns clients with a certificate of the right CA whose content is wrong.
fn wrong_certificates(ca: &TestCa) -> Vec<CertificateCase> {
    let alice = identity(ALICE);
    let made = |change: &dyn Fn(&mut CertificateParams)| {
        let i = ca.issue_with(&alice, change);
        showing(ca, &i.key, certificates(&i.chain))
    };
    let names = |n: usize| {
        (0..n)
            .map(|k| {
                SanType::DnsName(
                    format!("{}.{k}.example", "x".repeat(50))
                        .try_into()
                        .unwrap(),
                )
            })
            .collect::<Vec<_>>()
    };
    vec![
        (
            "expired",
            made(&|p| p.not_after = date_time_ymd(2021, 1, 1)),
            HandshakeFailure::Expired,
        ),
        (
            "from the future",
            made(&|p| p.not_before = date_time_ymd(2119, 1, 1)),
            HandshakeFailure::NotYetValid,
        ),
        (
            "for servers only",
            made(&|p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]),
            HandshakeFailure::WrongUsage,
        ),
        (
            "two identities",
            made(&|p| {
                p.subject_alt_names
                    .push(SanType::URI(BOB.try_into().unwrap()))
            }),
            HandshakeFailure::Ambiguous,
        ),
        (
            "no identity",
            made(&|p| p.subject_alt_names.clear()),
            HandshakeFailure::Ambiguous,
        ),
        (
            "a CA",
            made(&|p| p.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained)),
            HandshakeFailure::BadChain,
        ),
        (
            // The chain may have 32 KiB (`CHAIN_BYTES_MAX`).
            "more than 32 KiB",
            // 600 names of about 60 bytes exceed it.
            made(&|p| p.subject_alt_names.extend(names(600))),
            HandshakeFailure::ChainTooLarge,
        ),
    ]
}

/// Returns clients whose chain, key or encoding is wrong.
fn wrong_chains(ca: &TestCa) -> Vec<CertificateCase> {
    let other = TestCa::new("other");
    let alice = identity(ALICE);
    let good = ca.issue_with(&alice, |_| {});
    let mut long = certificates(&good.chain);
    long.extend(std::iter::repeat_n(
        certificates(&ca.root_pem()).remove(0),
        CHAIN_CERTIFICATES_MAX,
    ));
    // Without its last bytes, the outer length of the certificate is wrong.
    let mut cut = certificates(&good.chain).remove(0).to_vec();
    cut.truncate(cut.len() - 9);
    // The signature is at the end of a certificate.
    let mut forged = certificates(&good.chain).remove(0).to_vec();
    *forged.last_mut().unwrap() ^= 1;
    let unknown = other.issue_with(&alice, |_| {});
    let foreign = ca.issue_with(&identity(MALLORY), |_| {});
    vec![
        (
            "another root",
            showing(ca, &unknown.key, certificates(&unknown.chain)),
            HandshakeFailure::UnknownIssuer,
        ),
        (
            "another trust domain",
            showing(ca, &foreign.key, certificates(&foreign.chain)),
            HandshakeFailure::WrongTrustDomain,
        ),
        (
            "nine certificates",
            showing(ca, &good.key, long),
            HandshakeFailure::ChainTooLong,
        ),
        (
            "garbage",
            // Bytes of any number that are no DER.
            showing(ca, &good.key, vec![CertificateDer::from(vec![0x5a; 300])]),
            HandshakeFailure::BadEncoding,
        ),
        (
            "an empty one",
            showing(ca, &good.key, vec![CertificateDer::from(vec![])]),
            HandshakeFailure::BadEncoding,
        ),
        (
            "cut off",
            showing(ca, &good.key, vec![CertificateDer::from(cut)]),
            HandshakeFailure::BadEncoding,
        ),
        (
            "forged",
            showing(ca, &good.key, vec![CertificateDer::from(forged)]),
            HandshakeFailure::BadSignature,
        ),
        (
            "without its key",
            showing(ca, &unknown.key, certificates(&good.chain)),
            HandshakeFailure::BadSignature,
        ),
        (
            "none",
            raw_client(None, &ca.root_pem(), &provider(), &rustls::version::TLS13),
            HandshakeFailure::NoCertificate,
        ),
    ]
}

#[tokio::test]
async fn every_fault_of_a_certificate_has_its_name() {
    let listener = TestListener::new();
    let ca = &listener.ca;
    let alice = identity(ALICE);
    let good = ca.issue_with(&alice, |_| {});
    for (name, config, want) in [wrong_certificates(ca), wrong_chains(ca)].concat() {
        assert_eq!(
            listener.refusal(config, listener.server()).await,
            want,
            "{name}"
        );
    }
    // A valid certificate is accepted, which shows that the server was not the cause.
    let (near, far) = tokio::io::duplex(64 << 10);
    let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
    let (config, srv) = (
        showing(ca, &good.key, certificates(&good.chain)),
        listener.server(),
    );
    let (_c, s) = tokio::join!(
        TlsConnector::from(config).connect(name, near),
        srv.accept(far)
    );
    let (s, peer) = s.unwrap();
    assert_eq!(
        (
            peer.identity,
            s.alpn(),
            s.peer_leaf().trust_domain().as_str()
        ),
        (alice, Some(&b"h2"[..]), "alpha.example")
    );
}

#[tokio::test]
async fn every_fault_of_the_protocol_has_its_name() {
    let listener = TestListener::new();
    let all = rustls::crypto::aws_lc_rs::default_provider();
    let right = listener.ca.issue_with(&identity(ALICE), |_| {});
    let tls13 = &rustls::version::TLS13;
    let chacha = CryptoProvider {
        cipher_suites: vec![cipher_suite::TLS13_CHACHA20_POLY1305_SHA256],
        ..all.clone()
    };
    let p384 = CryptoProvider {
        kx_groups: vec![kx_group::SECP384R1],
        ..all.clone()
    };
    let root = listener.ca.root_pem();
    let cases = [
        (
            "TLS 1.2",
            raw_client(
                Some(&right),
                &root,
                &Arc::new(all.clone()),
                &rustls::version::TLS12,
            ),
            HandshakeFailure::Version,
        ),
        (
            "ChaCha20 only",
            raw_client(Some(&right), &root, &Arc::new(chacha), tls13),
            HandshakeFailure::NothingShared,
        ),
        (
            "P-384 only",
            raw_client(Some(&right), &root, &Arc::new(p384), tls13),
            HandshakeFailure::NothingShared,
        ),
        (
            "HTTP/1.1",
            alpn(
                raw_client(Some(&right), &root, &provider(), tls13),
                b"http/1.1",
            ),
            HandshakeFailure::Alpn,
        ),
    ];
    for (name, config, want) in cases {
        assert_eq!(
            listener.refusal(config, listener.server()).await,
            want,
            "{name}"
        );
    }
    // The client does not trust the server, so the server receives an alert.
    let config = raw_client(
        Some(&right),
        &TestCa::new("x").root_pem(),
        &provider(),
        tls13,
    );
    assert_eq!(
        listener.refusal(config, listener.server()).await,
        HandshakeFailure::Alert
    );
    let (writer, empty) = Credential::empty(identity(BOB));
    drop(writer);
    let config = raw_client(Some(&right), &root, &provider(), tls13);
    assert_eq!(
        listener
            .refusal(config, server(empty).trusting(listener.view()))
            .await,
        HandshakeFailure::NoOwnCertificate
    );
}

#[tokio::test(start_paused = true)]
async fn silent_and_vanishing_clients_have_a_reason_too() {
    let listener = TestListener::new();
    let (near, far) = tokio::io::duplex(1024);
    assert_eq!(
        listener.server().accept(far).await.unwrap_err().refusal(),
        HandshakeFailure::Timeout
    );
    drop(near);
    let (near, far) = tokio::io::duplex(1024);
    drop(near);
    assert_eq!(
        listener.server().accept(far).await.unwrap_err().refusal(),
        HandshakeFailure::Io
    );
}

#[tokio::test]
async fn a_wrong_server_has_its_name() {
    let listener = TestListener::new();
    let client =
        ClientIdentity::new(listener.ca.credential(&identity(ALICE))).trusting(listener.view());
    let (near, far) = tokio::io::duplex(64 << 10);
    let (expected, srv) = (expect(&[ALICE]), listener.server());
    let (c, _) = tokio::join!(client.connect(near, &expected), srv.accept(far));
    assert_eq!(c.unwrap_err().refusal(), HandshakeFailure::WrongIdentity);
    assert_eq!(
        listener.count("canal_tls_refused_total{side=\"client\",reason=\"wrong_identity\"}"),
        1
    );
}

#[test]
fn names_are_distinguished() {
    let names: std::collections::BTreeSet<_> =
        HandshakeFailure::ALL.iter().map(|r| r.name()).collect();
    assert_eq!(names.len(), HandshakeFailure::ALL.len());
}

/// Issues a credential for `id` with this serial number.
fn numbered(ca: &TestCa, id: &str, serial: u64) -> Credential {
    fixed_credential(
        &ca.issue_with(&identity(id), |p| p.serial_number = Some(serial.into())),
        ca,
    )
}

#[tokio::test]
async fn a_revoked_peer_is_refused_and_its_open_connections_learn_of_it() {
    let listener = TestListener::new();
    let (alice, bob) = (
        numbered(&listener.ca, ALICE, 77),
        numbered(&listener.ca, BOB, 78),
    );
    let client = ClientIdentity::new(alice.clone()).trusting(listener.view());
    let srv = server(bob).trusting(listener.view());
    // The buffer takes whole flights, so that neither side waits for the other to read.
    let (near, far) = tokio::io::duplex(64 << 10);
    let expected = expect(&[BOB]);
    let (c, s) = tokio::join!(client.connect(near, &expected), srv.accept(far));
    let (c, s) = (c.unwrap().0, s.unwrap().0);
    assert_eq!(s.peer_leaf().serial(), [77]);
    let (mut at_server, mut at_client) = (s.peer_trust().clone(), c.peer_trust().clone());
    // Another serial number, or the same one of another issuer, revokes nothing.
    listener.publish_bundle(vec![
        listener.ca.revocations(&[76]),
        TestCa::new("other").revocations(&[77]),
    ]);
    assert!(futures::poll!(std::pin::pin!(at_server.wait_for_loss())).is_pending());
    listener.publish_bundle(vec![listener.ca.revocations(&[76, 77])]);
    assert_eq!(at_server.wait_for_loss().await, TrustLoss::Revoked);
    assert!(
        listener.view().current().revokes(s.peer_leaf())
            && !listener.view().current().revokes(c.peer_leaf())
    );
    assert!(futures::poll!(std::pin::pin!(at_client.wait_for_loss())).is_pending());
    // The chain is in the cache and is refused anyway.
    let (_, s) = handshake(client.clone(), srv.clone(), &[BOB]).await;
    assert!(s.unwrap_err().contains("Revoked"));
    assert_eq!(
        listener.count("canal_tls_refused_total{side=\"server\",reason=\"revoked\"}"),
        1
    );
    // An empty list restores the trust.
    listener.publish_bundle(vec![listener.ca.revocations(&[])]);
    let (_, s) = handshake(client.clone(), srv.clone(), &[BOB]).await;
    assert!(s.is_ok());
    // The next list revokes the server's certificate.
    listener.publish_bundle(vec![listener.ca.revocations(&[78])]);
    assert_eq!(at_client.wait_for_loss().await, TrustLoss::Revoked);
    let (c, _) = handshake(client, srv, &[BOB]).await;
    assert!(c.unwrap_err().contains("Revoked"));
}

#[tokio::test]
async fn a_revoked_intermediate_revokes_its_certificates() {
    let listener = TestListener::new();
    let below = listener.ca.intermediate("alpha intermediate", 5);
    let client = ClientIdentity::new(numbered(&below, ALICE, 9)).trusting(listener.view());
    let (near, far) = tokio::io::duplex(64 << 10);
    let (expected, srv) = (expect(&[BOB]), listener.server());
    let (_c, s) = tokio::join!(client.connect(near, &expected), srv.accept(far));
    let mut trust_watch = s.unwrap().0.peer_trust().clone();
    // First the root revokes the leaf's number, which has no effect, and then the intermediate's.
    listener.publish_bundle(vec![listener.ca.revocations(&[9])]);
    assert!(futures::poll!(std::pin::pin!(trust_watch.wait_for_loss())).is_pending());
    listener.publish_bundle(vec![listener.ca.revocations(&[5])]);
    assert_eq!(trust_watch.wait_for_loss().await, TrustLoss::Revoked);
    let (_, s) = handshake(client.clone(), listener.server(), &[BOB]).await;
    assert!(s.unwrap_err().contains("Revoked"));
    // An intermediate's list revokes certificates that the intermediate signed.
    listener.publish_bundle(vec![below.revocations(&[9])]);
    let (_, s) = handshake(client, listener.server(), &[BOB]).await;
    assert!(s.unwrap_err().contains("Revoked"));
}

#[tokio::test]
async fn a_revocation_list_by_another_key_is_no_word_about_anyone() {
    let listener = TestListener::new();
    // The list has the same issuer name but another key. An attacker who could issue such a list
    // could also omit revocations.
    listener.publish_bundle(vec![TestCa::new("alpha").revocations(&[1])]);
    let alice = listener.ca.issue_with(&identity(ALICE), |_| {});
    let config = showing(&listener.ca, &alice.key, certificates(&alice.chain));
    assert_eq!(
        listener.refusal(config, listener.server()).await,
        HandshakeFailure::BadRevocationList
    );
}

#[tokio::test]
async fn federated_peers_come_in_with_their_own_name_and_no_other_s() {
    let listener = TestListener::new();
    let beta = TestCa::new("beta");
    let own = listener.ca.bundle("alpha", "alpha.example", false, vec![]);
    let mallory = || {
        ClientIdentity::new(beta.credential(&identity(MALLORY)))
            .trusting(trust_view(&beta, &listener.ca))
    };
    /// Returns the trust view of beta's data planes.
    fn trust_view(beta: &TestCa, alpha: &TestCa) -> TrustView {
        let store = TrustStore::new(&Registry::new());
        let both = [
            beta.bundle("beta", "beta.example", false, vec![]),
            alpha.bundle("beta", "alpha.example", true, vec![]),
        ];
        store.replace(both).unwrap();
        store.view(&"beta".parse().unwrap())
    }
    let (_, s) = handshake(mallory(), listener.server(), &[BOB]).await;
    assert!(
        s.unwrap_err()
            .contains("expected an identity of trust domain alpha.example")
    );
    listener
        .store
        .replace([
            own.clone(),
            beta.bundle("alpha", "beta.example", true, vec![]),
        ])
        .unwrap();
    // The buffer takes whole flights, so that neither side waits for the other to read.
    let (near, far) = tokio::io::duplex(64 << 10);
    let (expected, client, srv) = (expect(&[BOB]), mallory(), listener.server());
    let (c, s) = tokio::join!(client.connect(near, &expected), srv.accept(far));
    let ((s, peer), _c) = (s.unwrap(), c.unwrap());
    assert_eq!(
        peer,
        VerifiedPeer {
            tenant: "alpha".parse().unwrap(),
            identity: identity(MALLORY)
        }
    );
    // Beta's CA may sign identities of beta only, and alpha's CA identities of alpha only.
    let forged = beta.issue_with(&identity(ALICE), |_| {});
    let config = showing(&listener.ca, &forged.key, certificates(&forged.chain));
    assert_eq!(
        listener.refusal(config, listener.server()).await,
        HandshakeFailure::UnknownIssuer
    );
    let forged = listener.ca.issue_with(&identity(MALLORY), |_| {});
    let config = showing(&listener.ca, &forged.key, certificates(&forged.chain));
    assert_eq!(
        listener.refusal(config, listener.server()).await,
        HandshakeFailure::UnknownIssuer
    );
    // The federation ends here.
    let mut trust_watch = s.peer_trust().clone();
    listener.store.replace([own]).unwrap();
    assert_eq!(trust_watch.wait_for_loss().await, TrustLoss::Unfederated);
    let (_, s) = handshake(mallory(), listener.server(), &[BOB]).await;
    assert!(s.is_err());
}

/// The controller has no record of a certificate that another program signed with the tenant's CA,
/// so no list names it.
#[tokio::test]
async fn a_blocked_identity_is_out_whatever_certificate_it_has() {
    let listener = TestListener::new();
    let client = |name: &str| {
        ClientIdentity::new(listener.ca.credential(&identity(name))).trusting(listener.view())
    };
    // Any buffer would do that takes whole flights.
    let open = async |name: &str| {
        let (near, far) = tokio::io::duplex(256 << 10);
        let (expected, client, srv) = (expect(&[BOB]), client(name), listener.server());
        let (c, s) = tokio::join!(client.connect(near, &expected), srv.accept(far));
        (c.unwrap(), s.unwrap().0)
    };
    let (_alice, at_bob) = open(ALICE).await;
    let (_bob, other) = open(BOB).await;
    let mut trust_watch = at_bob.peer_trust().clone();
    let bundle = canal_model::trust::TrustBundle {
        blocked: vec![identity(ALICE)],
        ..bundle_of(&listener.ca)
    };
    listener
        .store
        .replace([Arc::new(canal_model::program::Resource::Bundle(bundle))])
        .unwrap();
    assert_eq!(trust_watch.wait_for_loss().await, TrustLoss::Revoked);
    assert!(
        !listener.view().current().revokes(other.peer_leaf()),
        "another identity stays"
    );
    let alice = listener.ca.issue_with(&identity(ALICE), |_| {});
    let config = showing(&listener.ca, &alice.key, certificates(&alice.chain));
    assert_eq!(
        listener.refusal(config, listener.server()).await,
        HandshakeFailure::Revoked
    );
    assert!(
        handshake(client(BOB), listener.server(), &[BOB])
            .await
            .1
            .is_ok()
    );
    // As a server it is refused, too.
    let (refused, _) = handshake(
        client(BOB),
        server(listener.ca.credential(&identity(ALICE))).trusting(listener.view()),
        &[ALICE],
    )
    .await;
    assert!(refused.is_err());
    listener.publish_bundle(vec![]);
    assert!(
        handshake(client(ALICE), listener.server(), &[BOB])
            .await
            .1
            .is_ok(),
        "restored"
    );
}

#[tokio::test]
async fn both_roots_are_trusted_during_a_rotation_and_the_old_one_is_marked() {
    let (old, new) = (TestCa::new("old"), TestCa::new("new"));
    let store = TrustStore::new(&Registry::new());
    let view = store.view(&"alpha".parse().unwrap());
    let tell = |roots: &[&TestCa]| {
        let roots = roots.iter().map(|ca| ca.root_pem()).collect();
        let (tenant, trust_domain) = ("alpha".parse().unwrap(), "alpha.example".parse().unwrap());
        let bundle = canal_model::trust::TrustBundle {
            tenant,
            trust_domain,
            roots,
            revoked: vec![],
            blocked: vec![],
            federated: false,
        };
        store
            .replace([Arc::new(canal_model::program::Resource::Bundle(bundle))])
            .unwrap();
    };
    let side = |ca: &TestCa| {
        (
            ClientIdentity::new(ca.credential(&identity(ALICE))).trusting(view.clone()),
            server(ca.credential(&identity(BOB))).trusting(view.clone()),
        )
    };
    let leaf = |ca: &TestCa| ca.issue(&identity(ALICE)).chain().to_vec();
    let td = &identity(ALICE).trust_domain;
    tell(&[&old]);
    assert!(
        handshake(side(&new).0, side(&old).1, &[BOB])
            .await
            .1
            .is_err()
    );
    assert!(!view.current().is_superseded(td, &leaf(&old)));
    tell(&[&new, &old]);
    for (c, s) in [(&old, &new), (&new, &old), (&old, &old), (&new, &new)] {
        let (c, s) = handshake(side(c).0, side(s).1, &[BOB]).await;
        assert!(c.is_ok() && s.is_ok(), "{c:?} {s:?}");
    }
    assert!(
        view.current().is_superseded(td, &leaf(&old))
            && !view.current().is_superseded(td, &leaf(&new))
    );
    // Any number that no other certificate has.
    let revoked = new.issue_with(&identity(ALICE), |p| p.serial_number = Some(4711u64.into()));
    let revoked = Certificate::from_pem(&revoked.key, &revoked.chain, &new.root_pem()).unwrap();
    assert!(!view.current().is_superseded(td, revoked.chain()));
    store
        .replace([new.bundle(
            "alpha",
            "alpha.example",
            false,
            vec![new.revocations(&[4711])],
        )])
        .unwrap();
    assert!(
        view.current().is_superseded(td, revoked.chain()),
        "a revoked peer requests another certificate"
    );
    // Another trust domain has no roots here, so nothing of it is superseded.
    assert!(
        !view
            .current()
            .is_superseded(&identity(MALLORY).trust_domain, &leaf(&old))
    );
    tell(&[&new]);
    assert!(
        handshake(side(&old).0, side(&new).1, &[BOB])
            .await
            .1
            .is_err()
    );
}

#[tokio::test]
async fn a_chain_is_verified_once_per_trust() {
    let listener = TestListener::new();
    let (client, srv) = (
        ClientIdentity::new(listener.ca.credential(&identity(ALICE))).trusting(listener.view()),
        listener.server(),
    );
    let counts = || {
        (
            listener.count("canal_tls_chains_total{result=\"verified\"}"),
            listener.count("canal_tls_chains_total{result=\"known\"}"),
        )
    };
    for n in 0..3 {
        let (c, s) = handshake(client.clone(), srv.clone(), &[BOB]).await;
        assert!(c.is_ok() && s.is_ok());
        assert_eq!(counts(), (2, 2 * n));
    }
    // The same chain in the other role is verified again, because the permitted usage differs.
    let (c, _) = handshake(
        ClientIdentity::new(listener.ca.credential(&identity(BOB))).trusting(listener.view()),
        srv.clone(),
        &[BOB],
    )
    .await;
    assert!(c.is_ok());
    assert_eq!(counts(), (3, 5));
    listener.publish_bundle(vec![listener.ca.revocations(&[4711])]);
    let (c, s) = handshake(client, srv, &[BOB]).await;
    assert!(c.is_ok() && s.is_ok());
    assert_eq!(counts(), (5, 5));
}

fn bundle_of(ca: &TestCa) -> canal_model::trust::TrustBundle {
    match &*ca.bundle("alpha", "alpha.example", false, vec![]) {
        canal_model::program::Resource::Bundle(b) => b.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn unusable_bundle_leaves_its_tenant_as_it_was_and_changes_others() {
    let listener = TestListener::new();
    let before = listener.view().current().generation();
    let broken = |roots: Vec<String>, revoked: Vec<String>| {
        let b = canal_model::trust::TrustBundle {
            roots,
            revoked,
            ..bundle_of(&listener.ca)
        };
        Arc::new(canal_model::program::Resource::Bundle(b))
    };
    // Valid base64, but no certificate and no list.
    let pem = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_string();
    let list = "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n".to_string();
    for (name, resource, text) in [
        ("no root", broken(vec![], vec![]), "contains no root"),
        (
            "no PEM",
            broken(vec!["?".into()], vec![]),
            "contains no root",
        ),
        (
            "no certificate",
            broken(vec![pem], vec![]),
            "a root cannot be used",
        ),
        (
            "no list",
            broken(vec![listener.ca.root_pem()], vec![list]),
            "a revocation list cannot be read",
        ),
    ] {
        let other = listener.ca.bundle("gamma", "gamma.example", false, vec![]);
        let gamma = listener.store.view(&"gamma".parse().unwrap());
        let error = listener.store.replace([other, resource]).unwrap_err();
        assert!(
            error.contains(text) && error.contains("alpha/alpha.example"),
            "{name}: {error}"
        );
        assert!(
            gamma.current().knows(&"gamma.example".parse().unwrap()),
            "{name}: another tenant's bundle is in force"
        );
        assert!(
            listener
                .view()
                .current()
                .knows(&"alpha.example".parse().unwrap()),
            "{name}: the last good one stays"
        );
    }
    assert_eq!(listener.view().current().generation(), before);
    // The same bundle again is not a change.
    listener.publish_bundle(vec![]);
    assert_eq!(listener.view().current().generation(), before);
    // Without any bundle the view knows no trust domain.
    listener.store.replace([]).unwrap();
    assert!(
        !listener
            .view()
            .current()
            .knows(&"alpha.example".parse().unwrap())
    );
}
