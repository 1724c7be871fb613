//! Tests of remote handshakes against local ones and against rustls, and of everything that key
//! servers may do wrong.

mod limits;
mod signed;

use std::sync::Arc;
use std::time::Duration;

use canal_keyserver_client::{FAILURES_MAX, KeyClient, KeyClientConfig, parse_key_server};
use canal_model::identity::Identity;
use canal_model::trust::{KeyAlgorithm, KeyLocation, KeyPolicy};
use canal_runtime::metrics::Registry;
use canal_testing::{FakeBehavior, FakeKeyServer, TestCa, identity};
use canal_tls::{KeyServerError, MtlsStream, TlsError, Transport, TrustLoss, TrustStore};
use canal_wire::keyrpc;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::time::Instant;

use crate::{ClientIdentity, ClientIdentityFactory, ServerIdentity};

const ALICE: &str = "spiffe://alpha.example/ns/shop/sa/alice";
const BOB: &str = "spiffe://alpha.example/ns/shop/sa/bob";

/// Returns the time that a key server has for an answer. In the gate it cannot be ten times as
/// long: two mute servers must fail within the time limit of a handshake, and a client waits four
/// times as long for the last one.
fn answer_timeout() -> Duration {
    Duration::from_millis(if canal_timing::is_timed() { 500 } else { 1500 })
}

/// Waits until `holds` returns true, for an effect of another task.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        let waited = started.elapsed();
        assert!(
            waited < canal_timing::deadline(Duration::from_secs(5)),
            "never: {what}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Fixture of two key servers, one in this AZ and one in another, and a client of them.
struct KeyClientFixture {
    registry: Registry,
    components: TestCa,
    ca: Arc<TestCa>,
    near: FakeKeyServer,
    far: FakeKeyServer,
    requester: KeyClient,
    store: TrustStore,
}

impl KeyClientFixture {
    async fn new() -> Self {
        let (registry, components, ca) = (
            Registry::new(),
            TestCa::new("components"),
            Arc::new(TestCa::new("alpha")),
        );
        // The near server's certificate can be revoked by the number of the intermediate.
        let (near, far) = (
            FakeKeyServer::start(&components.intermediate("of ks1", 5), "ks1").await,
            FakeKeyServer::start(&components, "ks2").await,
        );
        for server in [&near, &far] {
            for id in [ALICE, BOB] {
                server.hold(id, ca.issue(&identity(id)));
            }
        }
        // The far server comes first in the list, so that the AZ decides and not the order.
        let servers = vec![
            parse_key_server(&format!("az2=ks2@{}", far.address)).unwrap(),
            parse_key_server(&format!("az1=ks1@{}", near.address)).unwrap(),
        ];
        let me = identity("spiffe://components.canal/ns/canal-system/sa/gateway.r1");
        let config = KeyClientConfig {
            az: "az1".parse().unwrap(),
            servers,
            me: me.clone(),
            trip: answer_timeout(),
        };
        let store = TrustStore::new(&registry);
        let requester = KeyClient::start(config, components.credential(&me), &store, &registry);
        store
            .replace([ca.bundle("alpha", "alpha.example", false, vec![])])
            .unwrap();
        Self {
            registry,
            components,
            ca,
            near,
            far,
            requester,
            store,
        }
    }

    fn keyring(&self) -> ClientIdentityFactory {
        let ca = self.ca.clone();
        ClientIdentityFactory::of(
            Arc::new(move |id| ca.credential(id)),
            Some(self.requester.clone()),
            self.store.clone(),
        )
    }

    fn pair(
        &self,
        id: &str,
        place: KeyLocation,
        local_fallback: bool,
    ) -> (ServerIdentity, ClientIdentity) {
        let policy = KeyPolicy {
            location: place,
            algorithm: KeyAlgorithm::EcdsaP256,
            local_fallback,
        };
        self.keyring()
            .pair(&"alpha".parse().unwrap(), &policy, &identity(id))
    }

    fn metric(&self, start: &str) -> u64 {
        let text = self.registry.render();
        let line = text.lines().find(|l| l.starts_with(start));
        line.and_then(|l| l.rsplit(' ').next())
            .map_or(0, |v| v.parse().unwrap())
    }
}

fn bob() -> Arc<[Identity]> {
    Arc::from([identity(BOB)])
}

type HandshakeEnds = (
    Result<(MtlsStream<DuplexStream>, Identity), TlsError>,
    Result<
        (
            MtlsStream<DuplexStream>,
            canal_model::identity::VerifiedPeer,
        ),
        TlsError,
    >,
);

async fn handshake(client: &ClientIdentity, server: &ServerIdentity) -> HandshakeEnds {
    let (near, far) = duplex(64 << 10);
    let expected = bob();
    tokio::time::timeout(canal_timing::deadline(Duration::from_secs(20)), async {
        tokio::join!(client.connect(near, &expected), server.accept(far))
    })
    .await
    .expect("a handshake hangs")
}

/// Sends and receives data on both sides, and then closes both in order.
async fn converse<IO: Transport>(mut a: MtlsStream<IO>, mut b: MtlsStream<IO>) {
    let large: Vec<u8> = (0..200_000u32).map(|n| n as u8).collect();
    let (wanted, sent) = (large.clone(), large.clone());
    let left = async move {
        a.write_all(&sent).await.unwrap();
        a.shutdown().await.unwrap();
        let mut got = Vec::new();
        a.read_to_end(&mut got).await.unwrap();
        got
    };
    let right = async move {
        let mut got = Vec::new();
        b.read_to_end(&mut got).await.unwrap();
        b.write_all(&got).await.unwrap();
        b.shutdown().await.unwrap();
        got
    };
    let (x, y) = tokio::join!(left, right);
    assert!(x == wanted && y == wanted);
}

#[tokio::test]
async fn whoever_has_the_keys_both_ends_meet() {
    let fixture = KeyClientFixture::new().await;
    for (c, s) in [
        (KeyLocation::KeyServer, KeyLocation::KeyServer),
        (KeyLocation::KeyServer, KeyLocation::Local),
        (KeyLocation::Local, KeyLocation::KeyServer),
        (KeyLocation::Local, KeyLocation::Local),
    ] {
        let (client, server) = (
            fixture.pair(ALICE, c, false).1,
            fixture.pair(BOB, s, false).0,
        );
        assert_eq!(
            (client.identity(), server.identity()),
            (&identity(ALICE), &identity(BOB))
        );
        let (client, server) = handshake(&client, &server).await;
        let ((client, seen), (server, peer)) = (client.unwrap(), server.unwrap());
        assert_eq!(
            (seen, peer.identity, peer.tenant.as_str()),
            (identity(BOB), identity(ALICE), "alpha")
        );
        assert_eq!(
            (client.is_remote(), server.is_remote()),
            (c == KeyLocation::KeyServer, s == KeyLocation::KeyServer)
        );
        assert_eq!(
            (client.alpn(), server.alpn()),
            (Some(&b"h2"[..]), Some(&b"h2"[..]))
        );
        converse(client, server).await;
    }
    // Four remote sides: both of the first pair, and one of each mixed pair.
    assert_eq!(
        (fixture.near.request_count(), fixture.far.request_count()),
        (4, 0),
        "the key server of the own AZ is tried"
    );
    assert_eq!(
        fixture.metric("canal_keys_answers_total{server=\"ks1\",what=\"handshake\"}"),
        4
    );
    assert_eq!(fixture.metric("canal_keys_channels{server=\"ks1\"}"), 1);
}

#[tokio::test]
async fn a_silent_key_server_costs_one_timeout_and_opens_its_breaker() {
    let fixture = KeyClientFixture::new().await;
    let (client, server) = (
        fixture.pair(ALICE, KeyLocation::KeyServer, false).1,
        fixture.pair(BOB, KeyLocation::Local, false).0,
    );
    fixture.near.set_behavior(FakeBehavior::Mute);
    for n in 1..=FAILURES_MAX {
        let (c, _) = handshake(&client, &server).await;
        assert!(c.is_ok(), "{n}");
        assert_eq!(
            fixture.metric("canal_keys_failures_total{server=\"ks1\",reason=\"deadline\"}"),
            u64::from(n)
        );
    }
    let (c, _) = handshake(&client, &server).await;
    assert!(c.is_ok());
    assert_eq!(
        fixture.metric("canal_keys_failures_total{server=\"ks1\",reason=\"circuit_open\"}"),
        1
    );
    // When the key server answers again, the circuit breaker detects that within its open time.
    fixture.near.set_behavior(FakeBehavior::Well);
    let before = fixture.near.request_count();
    let start = Instant::now();
    while fixture.near.request_count() == before {
        let waited = start.elapsed();
        assert!(
            waited < canal_timing::deadline(Duration::from_secs(10)),
            "{waited:?}"
        );
        assert!(handshake(&client, &server).await.0.is_ok());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn without_any_key_server_policy_decides() {
    let fixture = KeyClientFixture::new().await;
    // Two ways of not serving: one server does not answer, the other refuses.
    fixture.near.set_behavior(FakeBehavior::Mute);
    fixture
        .far
        .set_behavior(FakeBehavior::Refusing(keyrpc::KeyRefusal::Draining));
    let local = fixture.pair(BOB, KeyLocation::Local, false).0;
    let (c, s) = handshake(
        &fixture.pair(ALICE, KeyLocation::KeyServer, false).1,
        &local,
    )
    .await;
    let e = c.unwrap_err();
    assert_eq!(e.reason(), "no_key_server");
    assert!(
        e.to_string().contains("ks1: deadline") && e.to_string().contains("ks2: draining"),
        "{e}"
    );
    assert!(s.is_err());
    let (c, s) = handshake(
        &fixture.pair(ALICE, KeyLocation::Local, false).1,
        &fixture.pair(BOB, KeyLocation::KeyServer, false).0,
    )
    .await;
    assert!(c.is_err());
    assert_eq!(s.unwrap_err().reason(), "no_key_server");
    assert_eq!(
        fixture.metric("canal_tls_refused_total{side=\"server\",reason=\"no_key_server\"}"),
        1
    );
    // One for the client, one for the server.
    assert_eq!(fixture.metric("canal_keys_unavailable_total"), 2);
    // A local key is used where the policy permits it, on both sides, and the client's first bytes
    // are not lost.
    let (client, server) = (
        fixture.pair(ALICE, KeyLocation::KeyServer, true).1,
        fixture.pair(BOB, KeyLocation::KeyServer, true).0,
    );
    let (c, s) = handshake(&client, &server).await;
    let (c, s) = (c.unwrap().0, s.unwrap().0);
    assert!(!c.is_remote() && !s.is_remote());
    converse(c, s).await;
    assert_eq!(fixture.metric("canal_keys_fallbacks_total"), 2);
}

#[tokio::test]
async fn a_refused_request_is_not_sent_to_another_server() {
    let fixture = KeyClientFixture::new().await;
    let local = fixture.pair(BOB, KeyLocation::Local, false).0;
    let carol = "spiffe://alpha.example/ns/shop/sa/carol";
    for fallback in [false, true] {
        let (c, _) = handshake(
            &fixture.pair(carol, KeyLocation::KeyServer, fallback).1,
            &local,
        )
        .await;
        let e = c.unwrap_err();
        assert!(
            matches!(
                &e,
                TlsError::KeyServer(KeyServerError::Refused {
                    name: keyrpc::KeyRefusal::NotEntitled,
                    ..
                })
            ),
            "{e}"
        );
    }
    assert_eq!(fixture.far.request_count(), 0);
    assert_eq!(
        fixture.metric("canal_keys_refused_total{server=\"ks1\",reason=\"not_entitled\"}"),
        2
    );
    // A key server without a certificate is no reason to fail, because another one may have it.
    fixture
        .near
        .set_behavior(FakeBehavior::Refusing(keyrpc::KeyRefusal::NoCertificate));
    let (c, _) = handshake(
        &fixture.pair(ALICE, KeyLocation::KeyServer, false).1,
        &local,
    )
    .await;
    assert!(c.is_ok());
    assert_eq!(fixture.far.request_count(), 1);
}

#[tokio::test]
async fn a_process_without_key_servers_reports_it() {
    let fixture = KeyClientFixture::new().await;
    let ca = fixture.ca.clone();
    let keyring = ClientIdentityFactory::of(
        Arc::new(move |id| ca.credential(id)),
        None,
        fixture.store.clone(),
    );
    let policy = KeyPolicy {
        location: KeyLocation::KeyServer,
        ..KeyPolicy::default()
    };
    let (server, client) = keyring.pair(&"alpha".parse().unwrap(), &policy, &identity(BOB));
    let (near, far) = duplex(1024);
    let e = client.connect(near, &bob()).await.unwrap_err();
    assert!(
        e.reason() == "no_key_server" && e.to_string().contains("--key-server"),
        "{e}"
    );
    assert_eq!(
        server.accept(far).await.unwrap_err().reason(),
        "no_key_server"
    );
}

#[tokio::test]
async fn a_key_server_lost_in_the_middle_ends_the_handshake_soon() {
    let fixture = KeyClientFixture::new().await;
    let (near, mut far) = duplex(64 << 10);
    let client = fixture.pair(ALICE, KeyLocation::KeyServer, true).1;
    let lost = tokio::spawn(async move { client.connect(near, &bob()).await.map(|(_, id)| id) });
    // The ClientHello has been sent, so no other key server can continue the handshake.
    let mut hello = [0; 64];
    far.read_exact(&mut hello).await.unwrap();
    fixture.near.set_behavior(FakeBehavior::Mute);
    let start = Instant::now();
    far.write_all(&[22, 3, 3, 0, 4, 2, 0, 0, 0]).await.unwrap();
    let e = lost.await.unwrap().unwrap_err();
    assert_eq!(e.reason(), "key_server");
    canal_timing::assert_time(
        "time until a handshake ends whose key server was lost",
        start.elapsed(),
        Duration::from_secs(3),
    );
    assert_eq!(fixture.far.request_count(), 0, "no other can go on with it");
}

#[tokio::test]
async fn a_slow_peer_is_not_the_key_servers_fault() {
    let fixture = KeyClientFixture::new().await;
    // Every byte arrives separately, with pauses longer than the answer timeout in the middle of a
    // flight.
    let (near, far) = duplex(64 << 10);
    let (mut their_end, ours) = duplex(64 << 10);
    let server = fixture.pair(BOB, KeyLocation::KeyServer, false).0;
    let client = fixture.pair(ALICE, KeyLocation::Local, false).1;
    tokio::spawn(async move {
        let (mut near_read, mut near_write) = tokio::io::split(far);
        let (mut read, mut write) = tokio::io::split(&mut their_end);
        let slow = async {
            let (mut byte, mut n) = ([0; 1], 0);
            while near_read.read_exact(&mut byte).await.is_ok() {
                n += 1;
                if n == 700 || n == 2500 {
                    tokio::time::sleep(answer_timeout() * 3 / 2).await;
                }
                if write.write_all(&byte).await.is_err() {
                    return;
                }
            }
        };
        tokio::join!(slow, async {
            tokio::io::copy(&mut read, &mut near_write).await.ok()
        });
    });
    let expected = bob();
    let (c, s) = tokio::join!(client.connect(near, &expected), server.accept(ours));
    let (c, s) = (c.unwrap().0, s.unwrap().0);
    assert!(s.is_remote());
    assert_eq!(fixture.metric("canal_keys_failures_total"), 0);
    converse(c, s).await;
}

#[tokio::test]
async fn data_right_behind_the_clients_finished_is_delivered() {
    let fixture = KeyClientFixture::new().await;
    let (server, client) = (
        fixture.pair(BOB, KeyLocation::KeyServer, false).0,
        fixture.pair(ALICE, KeyLocation::Local, false).1,
    );
    let (near, far) = duplex(64 << 10);
    let expected = bob();
    let says = async {
        let (mut c, _) = client.connect(near, &expected).await.unwrap();
        c.write_all(b"early bird").await.unwrap();
        c.flush().await.unwrap();
        c
    };
    let (_c, s) = tokio::join!(says, server.accept(far));
    let mut got = [0; 10];
    s.unwrap().0.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"early bird");
}

/// Bytes that are sent to the key server while its last answer is on the way belong to the
/// connection.
#[tokio::test]
async fn data_that_crosses_the_handshakes_end_is_not_lost() {
    let fixture = KeyClientFixture::new().await;
    let (server, client) = (
        fixture.pair(BOB, KeyLocation::KeyServer, false).0,
        fixture.pair(ALICE, KeyLocation::Local, false).1,
    );
    for n in 0..60u64 {
        let (near, far) = duplex(64 << 10);
        let expected = bob();
        let says = async {
            let (mut c, _) = client.connect(near, &expected).await.unwrap();
            for part in 0..20u8 {
                c.write_all(&[part; 100]).await.unwrap();
                c.flush().await.unwrap();
                if u64::from(part) % (1 + n % 7) == 0 {
                    tokio::time::sleep(Duration::from_micros(100 * (n % 5))).await;
                }
            }
            c
        };
        let hears = async {
            let (mut s, _) = server.accept(far).await.unwrap();
            let mut got = vec![0; 2000];
            s.read_exact(&mut got).await.map(|_| got)
        };
        let (_c, got) = tokio::join!(says, hears);
        let want: Vec<u8> = (0..20u8).flat_map(|part| [part; 100]).collect();
        assert!(got.unwrap_or_else(|e| panic!("{n}: {e}")) == want, "{n}");
    }
}

#[tokio::test]
async fn non_tls_clients_are_refused_without_a_key_request() {
    let fixture = KeyClientFixture::new().await;
    let server = fixture.pair(BOB, KeyLocation::KeyServer, true).0;
    let (mut near, far) = duplex(64 << 10);
    near.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert_eq!(server.accept(far).await.unwrap_err().reason(), "protocol");
    let mut alert = Vec::new();
    near.read_to_end(&mut alert).await.unwrap();
    assert_eq!(alert, [21, 3, 3, 0, 2, 2, 10]);
    assert_eq!(fixture.near.request_count(), 0);
}

#[tokio::test]
async fn a_peer_that_leaves_is_abandoned_at_the_key_server() {
    let fixture = KeyClientFixture::new().await;
    let (near, mut far) = duplex(64 << 10);
    let client = fixture.pair(ALICE, KeyLocation::KeyServer, false).1;
    let gone = tokio::spawn(async move { client.connect(near, &bob()).await.map(|(_, id)| id) });
    far.read_u8().await.unwrap();
    drop(far);
    assert_eq!(gone.await.unwrap().unwrap_err().reason(), "io");
    until("the handshake is abandoned", || {
        fixture.near.abandoned() > 0
    })
    .await;
}

#[tokio::test]
async fn a_refused_peer_gets_an_alert_and_a_revoked_one_is_detected() {
    let fixture = KeyClientFixture::new().await;
    // The certificate is of another CA, so the key server refuses it.
    let foreign = TestCa::new("foreign");
    let client = ClientIdentity::new(foreign.credential(&identity(ALICE)))
        .trusting(fixture.store.view(&"alpha".parse().unwrap()));
    let server = fixture.pair(BOB, KeyLocation::KeyServer, true).0;
    let (c, s) = handshake(&client, &server).await;
    let verdict = s.unwrap_err();
    assert!(matches!(
        verdict,
        TlsError::KeyServer(KeyServerError::Refused {
            name: keyrpc::KeyRefusal::PeerCertificate,
            ..
        })
    ));
    // A TLS 1.3 client finishes before the server has verified it, so the alert comes with its
    // first read.
    let said = c.unwrap().0.read_u8().await.unwrap_err().to_string();
    assert!(said.contains("alert"), "{said}");
    // A peer that does not wait for the refusal is counted under the same name.
    // The buffer takes whole flights, so that neither side waits for the other to read.
    let (near, far) = duplex(64 << 10);
    let (left, refused) = tokio::join!(
        // Dropping the connection closes it before the refusal arrives.
        async { client.connect(near, &bob()).await.map(drop) },
        server.accept(far)
    );
    left.unwrap();
    assert_eq!(
        refused.map(drop).unwrap_err().to_string(),
        verdict.to_string()
    );
    // The server's trust applies to the remote handshake too: the certificate is revoked later.
    let issued = fixture
        .ca
        .issue_with(&identity(ALICE), |p| p.serial_number = Some(42.into()));
    let made = canal_tls::Certificate::from_pem(&issued.key, &issued.chain, &fixture.ca.root_pem())
        .unwrap();
    let client = ClientIdentity::new(canal_tls::Credential::fixed(made));
    let (c, s) = handshake(&client, &server).await;
    let (_c, s) = (c.unwrap(), s.unwrap().0);
    let mut trust_watch = s.peer_trust().clone();
    assert!(futures::poll!(std::pin::pin!(trust_watch.wait_for_loss())).is_pending());
    fixture
        .store
        .replace([fixture.ca.bundle(
            "alpha",
            "alpha.example",
            false,
            vec![fixture.ca.revocations(&[42])],
        )])
        .unwrap();
    assert_eq!(trust_watch.wait_for_loss().await, TrustLoss::Revoked);
}

/// A revoked intermediate is reported to both ends of a remote handshake, as for a local one
/// (`a_revoked_intermediate_revokes_its_certificates`).
#[tokio::test]
async fn revoking_an_intermediate_ends_remote_handshakes() {
    let fixture = KeyClientFixture::new().await;
    let below = fixture.ca.intermediate("alpha intermediate", 5);
    let held = |id| {
        let issued = below.issue_with(&identity(id), |p| p.serial_number = Some(9.into()));
        canal_tls::Certificate::from_pem(&issued.key, &issued.chain, &fixture.ca.root_pem())
            .unwrap()
    };
    fixture.near.hold(ALICE, held(ALICE));
    fixture.near.hold(BOB, held(BOB));
    let (client, server) = (
        fixture.pair(ALICE, KeyLocation::KeyServer, false).1,
        fixture.pair(BOB, KeyLocation::KeyServer, false).0,
    );
    let (c, s) = handshake(&client, &server).await;
    let (c, s) = (c.unwrap().0, s.unwrap().0);
    assert!(
        c.is_remote() && s.is_remote() && c.peer_leaf().above().links().map(|l| l.serial).eq([[5]])
    );
    let mut ends = [c.peer_trust().clone(), s.peer_trust().clone()];
    // First the root revokes the leaves' number (9), then another root the intermediate's (5). Only
    // the third list revokes the intermediate.
    for other in [
        fixture.ca.revocations(&[9]),
        TestCa::new("other").revocations(&[5]),
    ] {
        fixture
            .store
            .replace([fixture
                .ca
                .bundle("alpha", "alpha.example", false, vec![other])])
            .unwrap();
        for end in &mut ends {
            assert!(futures::poll!(std::pin::pin!(end.wait_for_loss())).is_pending());
        }
    }
    fixture
        .store
        .replace([fixture.ca.bundle(
            "alpha",
            "alpha.example",
            false,
            vec![fixture.ca.revocations(&[5])],
        )])
        .unwrap();
    for end in &mut ends {
        assert_eq!(end.wait_for_loss().await, TrustLoss::Revoked);
    }
    // The key server has not received the revocation yet, but its requester has, on either side.
    assert_eq!(
        handshake(&client, &server).await.0.unwrap_err().reason(),
        "revoked"
    );
    // With a local key and no trust store of its own, only the server can refuse this client.
    let unaware = ClientIdentity::new(canal_tls::Credential::fixed(held(ALICE)));
    assert_eq!(
        handshake(&unaware, &server).await.1.unwrap_err().reason(),
        "revoked"
    );
}

#[tokio::test]
async fn a_crowd_shares_one_channel_and_its_writes() {
    let fixture = KeyClientFixture::new().await;
    let (client, server) = (
        fixture.pair(ALICE, KeyLocation::KeyServer, false).1,
        fixture.pair(BOB, KeyLocation::KeyServer, false).0,
    );
    let crowd = futures::future::join_all((0..40).map(|_| handshake(&client, &server))).await;
    for (c, s) in crowd {
        assert!(c.is_ok() && s.is_ok(), "{:?} {:?}", c.err(), s.err());
    }
    assert_eq!(fixture.metric("canal_keys_channels{server=\"ks1\"}"), 1);
    let (frames, writes) = (
        fixture.metric("canal_keys_frames_total"),
        fixture.metric("canal_keys_writes_total"),
    );
    // All forty handshakes begin before the channel is up, so their first frames go in one write.
    assert!(frames >= 160 && frames - writes >= 39, "{frames} {writes}");
}

#[tokio::test]
async fn a_key_server_with_a_revoked_certificate_is_not_used() {
    let fixture = KeyClientFixture::new().await;
    let (client, server) = (
        fixture.pair(ALICE, KeyLocation::KeyServer, false).1,
        fixture.pair(BOB, KeyLocation::Local, false).0,
    );
    assert!(handshake(&client, &server).await.0.is_ok());
    let list = fixture.components.revocations(&[5]);
    let parts = fixture
        .components
        .bundle("canal-system", "components.canal", false, vec![list]);
    fixture
        .store
        .replace([
            fixture.ca.bundle("alpha", "alpha.example", false, vec![]),
            parts,
        ])
        .unwrap();
    // The open channel is closed even without requests.
    until("the channel is closed", || {
        fixture.metric("canal_keys_channels{server=\"ks1\"}") == 0
    })
    .await;
    assert!(handshake(&client, &server).await.0.is_ok());
    assert_eq!(
        (fixture.near.request_count(), fixture.far.request_count()),
        (1, 1),
        "the key server of the other AZ is tried"
    );
    assert_eq!(
        fixture.metric("canal_keys_failures_total{server=\"ks1\",reason=\"connect\"}"),
        1
    );
}

#[tokio::test]
async fn a_key_server_with_another_identity_is_refused() {
    let fixture = KeyClientFixture::new().await;
    // One address is that of ks2 instead of ks1, and the other server has a certificate of another
    // CA.
    let components = TestCa::new("other components");
    let other = FakeKeyServer::start(&components, "ks1").await;
    for address in [fixture.far.address, other.address] {
        let me = identity("spiffe://components.canal/ns/canal-system/sa/gateway.r1");
        let servers = vec![parse_key_server(&format!("az1=ks9@{address}")).unwrap()];
        let config = KeyClientConfig {
            az: "az1".parse().unwrap(),
            servers,
            me: me.clone(),
            trip: answer_timeout(),
        };
        let requester = KeyClient::start(
            config,
            components.credential(&me),
            &fixture.store,
            &fixture.registry,
        );
        let client = ClientIdentity::remote(identity(ALICE), Some(requester), None);
        let (near, _far) = duplex(1024);
        let e = client.connect(near, &bob()).await.unwrap_err();
        assert!(
            e.reason() == "no_key_server" && e.to_string().contains("ks9: connect"),
            "{e}"
        );
    }
}
