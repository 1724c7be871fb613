//! Handshakes in memory with rustls at the other end: both roles and algorithms, peers that are
//! refused by name, and arbitrary bytes.

use std::time::SystemTime;

use canal_model::ids::ServiceKey;
use canal_model::trust::KeyAlgorithm;
use canal_runtime::metrics::Registry;
use canal_testing::{TestCa, TestCertificate, identity};
use canal_tls::{PeerVerifier, TrustView, client_config, server_config};
use canal_wire::keyrpc::KeyName;
use proptest::prelude::*;
use rcgen::{
    CertificateParams, DistinguishedName, ExtendedKeyUsagePurpose, SanType, date_time_ymd,
};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls_pki_types::PrivateKeyDer;
use rustls_pki_types::pem::PemObject;

use super::*;
use crate::key::{PrivateKey, RequestKey};
use crate::vault::Vault;

const WEB: &str = "spiffe://alpha.example/ns/shop/sa/web";
const PEER: &str = "spiffe://alpha.example/ns/shop/sa/peer";

fn ders(pem: &str) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .unwrap()
}

fn verifier(ca: &TestCa) -> PeerVerifier {
    PeerVerifier::new(
        "alpha.example".parse().unwrap(),
        &ders(&ca.root_pem()),
        TrustView::without_bundles(),
    )
    .unwrap()
}

fn certified(ca: &TestCa, algorithm: KeyAlgorithm) -> Arc<CertifiedPrivateKey> {
    let vault = Arc::new(Vault::new().unwrap());
    let key = Arc::new(PrivateKey::generate(&vault, algorithm).unwrap());
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = vec![SanType::URI(WEB.try_into().unwrap())];
    let csr = params
        .serialize_request(&RequestKey(&key))
        .unwrap()
        .pem()
        .unwrap();
    let chain = ders(&ca.sign_request(&csr, |_| {}));
    let name = KeyName::Identity(identity(WEB));
    let certified = CertifiedPrivateKey::new(
        name,
        "alpha".parse().unwrap(),
        key,
        chain,
        Some(verifier(ca)),
    )
    .unwrap();
    assert!(certified.valid_at(SystemTime::now()));
    Arc::new(certified)
}

fn terms(certified: &Arc<CertifiedPrivateKey>, role: HandshakeRole) -> HandshakeParams {
    HandshakeParams {
        certified: certified.clone(),
        role,
        alpn: vec![b"h2".to_vec()],
        expected: [identity(PEER)].into(),
    }
}

/// Returns rustls as the peer, with a certificate of a test CA.
fn peer(ca: &TestCa, issued: &TestCertificate, role: HandshakeRole, alpn: &[u8]) -> Connection {
    let key = PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).unwrap();
    let key = CertifiedKey::from_der(ders(&issued.chain), key, &canal_tls::provider());
    let key = Arc::new(SingleCertAndKey::from(key.unwrap()));
    let alpn = [alpn.to_vec()];
    match role {
        HandshakeRole::Client => {
            let config = client_config(key, verifier(ca), [identity(WEB)].into(), &alpn).unwrap();
            let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
            ClientConnection::new(Arc::new(config), name)
                .unwrap()
                .into()
        }
        HandshakeRole::Server => {
            ServerConnection::new(Arc::new(server_config(key, verifier(ca), &alpn).unwrap()))
                .unwrap()
                .into()
        }
    }
}

fn output(peer: &mut Connection) -> Vec<u8> {
    let mut out = Vec::new();
    while peer.wants_write() {
        peer.write_tls(&mut out).unwrap();
    }
    out
}

fn feed_peer(peer: &mut Connection, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        peer.read_tls(&mut bytes).unwrap();
        // The peer's bytes show whether it accepted these.
        let _ = peer.process_new_packets();
    }
}

/// Runs the handshake to its end. Each flight of the peer is cut into pieces of `piece` bytes.
fn run_handshake(
    handshake: &mut RelayedHandshake,
    peer: &mut Connection,
    piece: usize,
    extra: &[u8],
) -> HandshakeStep {
    let mut step = handshake.step(b"");
    for _ in 0..8 {
        match step {
            HandshakeStep::Wait { send } => feed_peer(peer, &send),
            end => return end,
        }
        let mut flight = output(peer);
        if !peer.is_handshaking() {
            flight.extend_from_slice(extra);
        }
        step = HandshakeStep::Wait { send: Vec::new() };
        for bytes in flight.chunks(piece) {
            match handshake.step(bytes) {
                HandshakeStep::Wait { send } => feed_peer(peer, &send),
                end => {
                    step = end;
                    break;
                }
            }
        }
    }
    step
}

fn finished(step: HandshakeStep) -> Box<HandshakeOutcome> {
    match step {
        HandshakeStep::Done(finished) => finished,
        other => panic!("{other:?}"),
    }
}

#[test]
fn both_roles_and_both_algorithms_end_well_in_any_pieces() {
    let ca = TestCa::new("alpha");
    let issued = ca.issue_with(&identity(PEER), |_| {});
    for algorithm in [KeyAlgorithm::EcdsaP256, KeyAlgorithm::Rsa2048] {
        let certified = certified(&ca, algorithm);
        for (role, other) in [
            (HandshakeRole::Server, HandshakeRole::Client),
            (HandshakeRole::Client, HandshakeRole::Server),
        ] {
            // From single bytes, which split every message, to more than a flight.
            for piece in [1, 7, 100, 1 << 16] {
                let mut handshake = RelayedHandshake::begin(terms(&certified, role)).unwrap();
                let mut peer = peer(&ca, &issued, other, b"h2");
                let done = finished(run_handshake(&mut handshake, &mut peer, piece, b""));
                feed_peer(&mut peer, &done.send);
                let what = format!("{algorithm:?} {role:?} {piece}");
                assert!(!peer.is_handshaking(), "{what}");
                assert_eq!(
                    (
                        done.peer.to_string().as_str(),
                        done.suite,
                        handshake.received - done.consumed
                    ),
                    // TLS_AES_256_GCM_SHA384, whose traffic secrets are 48 bytes, a key of 32 and
                    // an IV of 12.
                    (PEER, 0x1302, 0),
                    "{what}"
                );
                assert_eq!(
                    (
                        done.alpn.as_slice(),
                        done.client_traffic.len(),
                        done.server_traffic.len()
                    ),
                    (&b"h2"[..], 92, 92),
                    "{what}"
                );
                assert_eq!(done.leaf, ders(&issued.chain)[0]);
                let suite = peer.negotiated_cipher_suite().unwrap().suite();
                let group = peer.negotiated_key_exchange_group().unwrap().name();
                assert_eq!(
                    (u16::from(suite), group),
                    (done.suite, rustls::NamedGroup::X25519MLKEM768),
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn no_byte_beyond_the_handshake_is_consumed() {
    let ca = TestCa::new("alpha");
    let issued = ca.issue_with(&identity(PEER), |_| {});
    let certified = certified(&ca, KeyAlgorithm::EcdsaP256);
    let record = [&[23, 3, 3, 0, 9][..], b"encrypted"].concat();
    let extra = [&record[..], &record[..3]].concat();
    let mut handshake = RelayedHandshake::begin(terms(&certified, HandshakeRole::Server)).unwrap();
    let done = finished(run_handshake(
        &mut handshake,
        &mut peer(&ca, &issued, HandshakeRole::Client, b"h2"),
        1 << 16,
        &extra,
    ));
    assert_eq!(handshake.received - done.consumed, extra.len());
    let mut handshake = RelayedHandshake::begin(terms(&certified, HandshakeRole::Client)).unwrap();
    // A server may send data as soon as it has sent Finished.
    let mut server = peer(&ca, &issued, HandshakeRole::Server, b"h2");
    let HandshakeStep::Wait { send } = handshake.step(b"") else {
        panic!("a ClientHello")
    };
    feed_peer(&mut server, &send);
    let flight = [output(&mut server), extra.clone()].concat();
    let done = finished(handshake.step(&flight));
    assert_eq!(handshake.received - done.consumed, extra.len());
}

#[test]
fn the_secrets_are_those_of_the_connection() {
    let ca = TestCa::new("alpha");
    let issued = ca.issue_with(&identity(PEER), |_| {});
    let certified = certified(&ca, KeyAlgorithm::EcdsaP256);
    let mut handshake = RelayedHandshake::begin(terms(&certified, HandshakeRole::Server)).unwrap();
    let mut client = peer(&ca, &issued, HandshakeRole::Client, b"h2");
    // In one piece, which is larger than a flight.
    let done = finished(run_handshake(&mut handshake, &mut client, 1 << 16, b""));
    // The client's first record opens with the client's secret (RFC 8446 §5.2, §7.3).
    std::io::Write::write_all(&mut client.writer(), b"hello").unwrap();
    let record = output(&mut client);
    let label = |secret: &[u8], label: &[u8], length: usize| -> Vec<u8> {
        use aws_lc_rs::hkdf::{HKDF_SHA384, KeyType, Prk};
        struct SecretLength(usize);
        impl KeyType for SecretLength {
            fn len(&self) -> usize {
                self.0
            }
        }
        let full = [b"tls13 ", label].concat();
        // HkdfLabel is a length, a label with its length, and an empty context (RFC 8446 §7.1).
        let (wide, size) = ((length as u16).to_be_bytes(), [full.len() as u8]);
        let mut out = vec![0; length];
        let info: [&[u8]; 4] = [&wide, &size, &full, &[0]];
        Prk::new_less_safe(HKDF_SHA384, secret)
            .expand(&info, SecretLength(length))
            .unwrap()
            .fill(&mut out)
            .unwrap();
        out
    };
    use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
    // The server expands the traffic secret of 48 bytes, and puts the key of 32 and the IV of 12
    // behind it.
    let key = LessSafeKey::new(
        UnboundKey::new(&AES_256_GCM, &label(&done.client_traffic[..48], b"key", 32)).unwrap(),
    );
    let iv: [u8; 12] = label(&done.client_traffic[..48], b"iv", 12)
        .try_into()
        .unwrap();
    assert_eq!(
        done.client_traffic[48..80],
        label(&done.client_traffic[..48], b"key", 32),
        "the key is behind the secret"
    );
    assert_eq!(done.client_traffic[80..], iv);
    let mut body = record[5..].to_vec();
    let plain = key
        .open_in_place(
            Nonce::assume_unique_for_key(iv),
            Aad::from(&record[..5]),
            &mut body,
        )
        .unwrap();
    // The content type application_data (23) follows the content (RFC 8446 §5.2).
    assert_eq!(plain, b"hello\x17");
}

type LeafEditFn = fn(&mut CertificateParams);

/// A case's name, the role of the peer, its certificate, and why it is refused.
type PeerCase = (&'static str, HandshakeRole, TestCertificate, KeyRefusal);

/// Returns peers whose own certificate is wrong.
fn peers_with_wrong_leaves(ca: &TestCa) -> Vec<PeerCase> {
    let foreign = "spiffe://beta.example/ns/shop/sa/peer";
    let mallory = "spiffe://alpha.example/ns/shop/sa/mallory";
    let issued = |id: &str, change: LeafEditFn| ca.issue_with(&identity(id), change);
    let client_only: LeafEditFn =
        |p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let server_only: LeafEditFn =
        |p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let two: LeafEditFn = |p| {
        p.subject_alt_names
            .push(SanType::URI(WEB.try_into().unwrap()))
    };
    let (client, server) = (HandshakeRole::Client, HandshakeRole::Server);
    let fine: LeafEditFn = |_| {};
    vec![
        (
            "expired client",
            client,
            issued(PEER, |p| p.not_after = date_time_ymd(2021, 1, 1)),
            KeyRefusal::PeerExpired,
        ),
        (
            "expired server",
            server,
            issued(PEER, |p| p.not_after = date_time_ymd(2021, 1, 1)),
            KeyRefusal::PeerExpired,
        ),
        (
            "client not valid yet",
            client,
            issued(PEER, |p| p.not_before = date_time_ymd(2119, 1, 1)),
            KeyRefusal::PeerNotYetValid,
        ),
        (
            "server not valid yet",
            server,
            issued(PEER, |p| p.not_before = date_time_ymd(2119, 1, 1)),
            KeyRefusal::PeerNotYetValid,
        ),
        (
            "client with a server's certificate",
            client,
            issued(PEER, server_only),
            KeyRefusal::PeerPurpose,
        ),
        (
            "server with a client's certificate",
            server,
            issued(PEER, client_only),
            KeyRefusal::PeerPurpose,
        ),
        (
            "client of another tenant",
            client,
            issued(foreign, fine),
            KeyRefusal::PeerTrustDomain,
        ),
        // A server must have one of the expected identities, so its trust domain is not compared.
        (
            "server of another tenant",
            server,
            issued(foreign, fine),
            KeyRefusal::PeerIdentity,
        ),
        (
            "another server",
            server,
            issued(mallory, fine),
            KeyRefusal::PeerIdentity,
        ),
        (
            "client with two names",
            client,
            issued(PEER, two),
            KeyRefusal::PeerAmbiguous,
        ),
    ]
}

/// Returns peers whose certificate has another root, or whose chain is too long or too large.
fn peers_with_wrong_chains(ca: &TestCa) -> Vec<PeerCase> {
    let other = TestCa::new("other");
    let issued = |change: LeafEditFn| ca.issue_with(&identity(PEER), change);
    // 500 names of about 70 bytes exceed the 32 KiB of `CHAIN_BYTES_MAX`.
    let large: LeafEditFn = |p| {
        let name = |n: usize| {
            SanType::DnsName(
                format!("{n}.{}.example", "x".repeat(60))
                    .try_into()
                    .unwrap(),
            )
        };
        p.subject_alt_names.extend((0..500).map(name));
    };
    // Nine roots and the leaf exceed the eight certificates of `CHAIN_CERTIFICATES_MAX`.
    let long = |mut i: TestCertificate| {
        i.chain = format!("{}{}", i.chain, ca.root_pem().repeat(9));
        i
    };
    let (client, server) = (HandshakeRole::Client, HandshakeRole::Server);
    let fine: LeafEditFn = |_| {};
    vec![
        (
            "client of another root",
            client,
            other.issue_with(&identity(PEER), |_| {}),
            KeyRefusal::PeerUnknownIssuer,
        ),
        (
            "server of another root",
            server,
            other.issue_with(&identity(PEER), |_| {}),
            KeyRefusal::PeerUnknownIssuer,
        ),
        (
            "client with a long chain",
            client,
            long(issued(fine)),
            KeyRefusal::PeerChain,
        ),
        (
            "server with a large chain",
            server,
            issued(large),
            KeyRefusal::PeerChain,
        ),
    ]
}

#[test]
fn peers_are_refused_by_name_and_get_an_alert() {
    let ca = TestCa::new("alpha");
    let certified = certified(&ca, KeyAlgorithm::EcdsaP256);
    let cases = peers_with_wrong_leaves(&ca)
        .into_iter()
        .chain(peers_with_wrong_chains(&ca));
    for (what, role, issued, want) in cases {
        let own = if role == HandshakeRole::Client {
            HandshakeRole::Server
        } else {
            HandshakeRole::Client
        };
        let mut handshake = RelayedHandshake::begin(terms(&certified, own)).unwrap();
        let mut other_end = peer(&ca, &issued, role, b"h2");
        match run_handshake(&mut handshake, &mut other_end, 1 << 16, b"") {
            HandshakeStep::Failed {
                alert,
                refusal,
                text,
            } => {
                assert_eq!(refusal, want, "{what}: {text}");
                assert!(!alert.is_empty() && !text.is_empty(), "{what}");
            }
            step => panic!("{what}: {step:?}"),
        }
    }
}

#[test]
fn a_revoked_peer_is_refused() {
    let ca = TestCa::new("alpha");
    let issued = ca.issue_with(&identity(PEER), |p| p.serial_number = Some(77.into()));
    let own = certified(&ca, KeyAlgorithm::EcdsaP256);
    let store = canal_tls::TrustStore::new(&Registry::new());
    let publish = |revoked| {
        store
            .replace([ca.bundle("alpha", "alpha.example", false, revoked)])
            .unwrap()
    };
    publish(vec![]);
    let verifier = PeerVerifier::new(
        "alpha.example".parse().unwrap(),
        &ders(&ca.root_pem()),
        store.view(&"alpha".parse().unwrap()),
    )
    .unwrap();
    let own = CertifiedPrivateKey::new(
        own.name.clone(),
        own.tenant.clone(),
        own.key.clone(),
        own.chain.clone(),
        Some(verifier),
    )
    .unwrap();
    let own = Arc::new(own);
    let run = || {
        let mut handshake = RelayedHandshake::begin(terms(&own, HandshakeRole::Server)).unwrap();
        run_handshake(
            &mut handshake,
            &mut peer(&ca, &issued, HandshakeRole::Client, b"h2"),
            // In one piece, which is larger than a flight.
            1 << 16,
            b"",
        )
    };
    finished(run());
    publish(vec![ca.revocations(&[77])]);
    // The revocation applies at once, although the chain was verified a moment ago.
    assert!(matches!(
        run(),
        HandshakeStep::Failed {
            refusal: KeyRefusal::PeerRevoked,
            ..
        }
    ));
}

#[test]
fn unknown_peers_are_refused_by_name() {
    let ca = TestCa::new("alpha");
    let issued = ca.issue_with(&identity(PEER), |_| {});
    let certified = certified(&ca, KeyAlgorithm::EcdsaP256);
    let server = || RelayedHandshake::begin(terms(&certified, HandshakeRole::Server)).unwrap();
    let mut wrong = peer(&ca, &issued, HandshakeRole::Client, b"http/1.1");
    assert!(matches!(
        // In one piece, which is larger than a flight.
        run_handshake(&mut server(), &mut wrong, 1 << 16, b""),
        HandshakeStep::Failed {
            refusal: KeyRefusal::PeerProtocol,
            ..
        }
    ));
    // A record of 16 KiB with the beginning of a ClientHello of 65,535 bytes.
    let endless = [
        &[22, 3, 1, 0x40, 0][..],
        &[1, 0, 0xff, 0xff],
        &[0; (16 << 10) - 4],
    ]
    .concat();
    let mut handshake = server();
    let mut refused = None;
    // Six records of 16 KiB are more than HANDSHAKE_BYTES_MAX.
    for _ in 0..6 {
        match handshake.step(&endless) {
            HandshakeStep::Wait { .. } => {}
            HandshakeStep::Failed { refusal, .. } => refused = refused.or(Some(refusal)),
            HandshakeStep::Done(_) => panic!("that was no handshake"),
        }
    }
    // Either rustls or the limit of bytes refuses it first; both are right.
    assert!(
        matches!(
            refused,
            Some(KeyRefusal::PeerProtocol | KeyRefusal::HandshakeBytes)
        ),
        "{refused:?}"
    );
    // Records of one byte, with other records between them, which RFC 8446 §5.1 forbids within a
    // message. Their 72 kB exceed HANDSHAKE_BYTES_MAX too.
    let mut handshake = server();
    let trickle = [&[22, 3, 1, 0, 1, 0][..], &[20, 3, 3, 0, 1, 1]]
        .concat()
        .repeat(6000);
    assert!(matches!(
        handshake.step(&trickle),
        HandshakeStep::Failed { .. }
    ));
    // HTTP, zeros, a record beyond the maximum size, a fatal alert, and data before a handshake.
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0; 50],
        &[22, 3, 1, 0xff, 0xff, 1],
        &[21, 3, 3, 0, 2, 2, 40],
        &[23, 3, 3, 0, 0],
    ] {
        match server().step(garbage) {
            HandshakeStep::Failed { refusal, .. } => {
                // A fatal alert of the peer has its own name; everything else breaks the protocol.
                assert!(
                    matches!(refusal, KeyRefusal::PeerProtocol | KeyRefusal::PeerAlert),
                    "{refusal}"
                )
            }
            step => panic!("{garbage:?}: {step:?}"),
        }
    }
}

#[test]
fn only_handshake_inputs_are_signed() {
    let verify = |side: &str, hash: usize| {
        [
            &[0x20; 64][..],
            format!("TLS 1.3, {side} CertificateVerify\0").as_bytes(),
            &vec![7; hash],
        ]
        .concat()
    };
    let ecdhe = |point: usize| [&[1; 64][..], &[3, 0, 29, point as u8], &vec![9; point]].concat();
    let of = || ServiceKey {
        tenant: "alpha".parse().unwrap(),
        namespace: "shop".parse().unwrap(),
        name: "web".parse().unwrap(),
    };
    let (service, file) = (KeyName::Service(of()), KeyName::File(of()));
    let workload = KeyName::Identity(identity("spiffe://alpha.example/ns/shop/sa/web"));
    let cases = [
        (verify("server", 32), true, true, true),
        (verify("server", 48), true, true, true),
        // Keys of services sign as servers only.
        (verify("client", 32), true, false, false),
        (verify("client", 48), true, false, false),
        (verify("server", 31), false, false, false),
        (verify("server", 33), false, false, false),
        (verify("nobody", 32), false, false, false),
        (verify("server", 32)[1..].to_vec(), false, false, false),
        (ecdhe(32), false, false, true),
        (ecdhe(65), false, false, true),
        (ecdhe(0), false, false, false),
        (ecdhe(32)[..99].to_vec(), false, false, false),
        (b"a certificate request".to_vec(), false, false, false),
        (vec![], false, false, false),
    ];
    for (n, (input, of_workload, of_service, of_file)) in cases.into_iter().enumerate() {
        let signs = [&workload, &service, &file].map(|name| signable(&input, name));
        assert_eq!(signs, [of_workload, of_service, of_file], "case {n}");
    }
}

proptest! {
    #[test]
    fn bytes_of_any_kind_neither_panic_nor_end_well(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..6), client in any::<bool>()) {
        thread_local! {
            static OWN: Arc<CertifiedPrivateKey> = certified(&TestCa::new("alpha"), KeyAlgorithm::EcdsaP256);
        }
        let role = if client { HandshakeRole::Client } else { HandshakeRole::Server };
        let mut handshake = RelayedHandshake::begin(OWN.with(|own| terms(own, role))).unwrap();
        for piece in pieces {
            match handshake.step(&piece) {
                HandshakeStep::Wait { .. } => {}
                HandshakeStep::Failed { .. } => break,
                HandshakeStep::Done(_) => prop_assert!(false, "random bytes are no handshake"),
            }
        }
    }
}
