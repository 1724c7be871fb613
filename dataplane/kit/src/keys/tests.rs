//! Handshakes by key servers against the kit's own and against rustls, and everything that key servers may do wrong.

pub(crate) mod kernel;
mod limits;
mod signed;

use std::sync::Arc;
use std::time::Duration;

use canal_model::identity::Identity;
use canal_model::trust::{KeyAlgorithm, KeyPlace, KeyPolicy};
use canal_wire::keyrpc;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::time::Instant;

use super::*;
use crate::metrics::Registry;
use crate::testing::{FakeKeyServer, Mood, TestCa, identity};
use crate::tls::{ClientIdentity, Fallen, ServerIdentity, Stream, TlsError, Transport, TrustStore};

const ALICE: &str = "spiffe://alpha.example/ns/shop/sa/alice";
const BOB: &str = "spiffe://alpha.example/ns/shop/sa/bob";

/// Two key servers, of this AZ and of another, and who asks them.
struct Rig {
    registry: Registry,
    components: TestCa,
    ca: Arc<TestCa>,
    near: FakeKeyServer,
    far: FakeKeyServer,
    requester: Requester,
    store: TrustStore,
}

impl Rig {
    async fn new() -> Self {
        let (registry, components, ca) = (Registry::new(), TestCa::new("components"), Arc::new(TestCa::new("alpha")));
        // The near one's certificate can be revoked by the intermediate's number.
        let (near, far) =
            (FakeKeyServer::start(&components.intermediate("of ks1", 5), "ks1").await, FakeKeyServer::start(&components, "ks2").await);
        for server in [&near, &far] {
            for id in [ALICE, BOB] {
                server.hold(id, ca.issue(&identity(id)));
            }
        }
        let servers = vec![
            parse_key_server(&format!("az2=ks2@{}", far.address)).unwrap(),
            parse_key_server(&format!("az1=ks1@{}", near.address)).unwrap(),
        ];
        let me = identity("spiffe://components.canal/ns/canal-system/sa/gateway.r1");
        let config = RequesterConfig { az: "az1".parse().unwrap(), servers, me: me.clone(), trip: Duration::from_millis(500) };
        let store = TrustStore::new(&registry);
        let requester = Requester::with_credential(config, components.credential(&me), &store, &registry);
        store.replace([ca.bundle("alpha", "alpha.example", false, vec![])]).unwrap();
        Self { registry, components, ca, near, far, requester, store }
    }

    fn keyring(&self) -> Keyring {
        let ca = self.ca.clone();
        Keyring::of(Arc::new(move |id| ca.credential(id)), Some(self.requester.clone()), self.store.clone())
    }

    fn pair(&self, id: &str, place: KeyPlace, local_fallback: bool) -> (ServerIdentity, ClientIdentity) {
        let policy = KeyPolicy { place, algorithm: KeyAlgorithm::EcdsaP256, local_fallback };
        self.keyring().pair(&"alpha".parse().unwrap(), &policy, &identity(id))
    }

    fn metric(&self, start: &str) -> u64 {
        let text = self.registry.render();
        let line = text.lines().find(|l| l.starts_with(start));
        line.and_then(|l| l.rsplit(' ').next()).map_or(0, |v| v.parse().unwrap())
    }
}

fn bob() -> Arc<[Identity]> {
    Arc::from([identity(BOB)])
}

type Both = (Result<(Stream<DuplexStream>, Identity), TlsError>, Result<(Stream<DuplexStream>, canal_model::identity::Peer), TlsError>);

async fn shake(client: &ClientIdentity, server: &ServerIdentity) -> Both {
    let (near, far) = duplex(64 << 10);
    let expected = bob();
    tokio::time::timeout(Duration::from_secs(20), async { tokio::join!(client.connect(near, &expected), server.accept(far)) })
        .await
        .expect("a handshake hangs")
}

/// Both say something, hear it, and part in order.
async fn converse<IO: Transport>(mut a: Stream<IO>, mut b: Stream<IO>) {
    let large: Vec<u8> = (0..200_000u32).map(|n| n as u8).collect();
    let (there, sent) = (large.clone(), large.clone());
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
    assert!(x == there && y == there);
}

#[tokio::test]
async fn whoever_has_the_keys_both_ends_meet() {
    let rig = Rig::new().await;
    for (c, s) in [
        (KeyPlace::KeyServer, KeyPlace::KeyServer),
        (KeyPlace::KeyServer, KeyPlace::Local),
        (KeyPlace::Local, KeyPlace::KeyServer),
        (KeyPlace::Local, KeyPlace::Local),
    ] {
        let (client, server) = (rig.pair(ALICE, c, false).1, rig.pair(BOB, s, false).0);
        assert_eq!((client.identity(), server.identity()), (&identity(ALICE), &identity(BOB)));
        let (client, server) = shake(&client, &server).await;
        let ((client, seen), (server, peer)) = (client.unwrap(), server.unwrap());
        assert_eq!((seen, peer.identity, peer.tenant.as_str()), (identity(BOB), identity(ALICE), "alpha"));
        assert_eq!((client.is_remote(), server.is_remote()), (c == KeyPlace::KeyServer, s == KeyPlace::KeyServer));
        assert_eq!((client.alpn(), server.alpn()), (Some(&b"h2"[..]), Some(&b"h2"[..])));
        converse(client, server).await;
    }
    assert_eq!((rig.near.asked(), rig.far.asked()), (4, 0), "the own AZ's is asked");
    assert_eq!(rig.metric("canal_keys_answers_total{server=\"ks1\",what=\"handshake\"}"), 4);
    assert_eq!(rig.metric("canal_keys_channels{server=\"ks1\"}"), 1);
}

#[tokio::test]
async fn a_silent_key_server_costs_one_trip_and_is_then_left_alone() {
    let rig = Rig::new().await;
    let (client, server) = (rig.pair(ALICE, KeyPlace::KeyServer, false).1, rig.pair(BOB, KeyPlace::Local, false).0);
    rig.near.mood(Mood::Mute);
    for n in 1..=FAILURES_MAX {
        let (c, _) = shake(&client, &server).await;
        assert!(c.is_ok(), "{n}");
        assert_eq!(rig.metric("canal_keys_failures_total{server=\"ks1\",reason=\"deadline\"}"), u64::from(n));
    }
    let (c, _) = shake(&client, &server).await;
    assert!(c.is_ok());
    assert_eq!(rig.metric("canal_keys_failures_total{server=\"ks1\",reason=\"circuit_open\"}"), 1);
    // Well again, it is found so within the circuit's time.
    rig.near.mood(Mood::Well);
    let before = rig.near.asked();
    let start = Instant::now();
    while rig.near.asked() == before {
        assert!(start.elapsed() < Duration::from_secs(10));
        assert!(shake(&client, &server).await.0.is_ok());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn without_any_key_server_policy_decides() {
    let rig = Rig::new().await;
    rig.near.mood(Mood::Mute);
    rig.far.mood(Mood::Refusing(keyrpc::Refusal::Draining));
    let local = rig.pair(BOB, KeyPlace::Local, false).0;
    let (c, s) = shake(&rig.pair(ALICE, KeyPlace::KeyServer, false).1, &local).await;
    let e = c.unwrap_err();
    assert_eq!(e.reason(), "no_key_server");
    assert!(e.to_string().contains("ks1: deadline") && e.to_string().contains("ks2: draining"), "{e}");
    assert!(s.is_err());
    let (c, s) = shake(&rig.pair(ALICE, KeyPlace::Local, false).1, &rig.pair(BOB, KeyPlace::KeyServer, false).0).await;
    assert!(c.is_err());
    assert_eq!(s.unwrap_err().reason(), "no_key_server");
    assert_eq!(rig.metric("canal_tls_refused_total{side=\"server\",reason=\"no_key_server\"}"), 1);
    assert_eq!(rig.metric("canal_keys_none_total"), 2);
    // A local key takes over where it may, on both sides; the client's first words are not lost.
    let (client, server) = (rig.pair(ALICE, KeyPlace::KeyServer, true).1, rig.pair(BOB, KeyPlace::KeyServer, true).0);
    let (c, s) = shake(&client, &server).await;
    let (c, s) = (c.unwrap().0, s.unwrap().0);
    assert!(!c.is_remote() && !s.is_remote());
    converse(c, s).await;
    assert_eq!(rig.metric("canal_keys_fallbacks_total"), 2);
}

#[tokio::test]
async fn who_may_not_is_refused_by_name_and_asks_nobody_else() {
    let rig = Rig::new().await;
    let local = rig.pair(BOB, KeyPlace::Local, false).0;
    let carol = "spiffe://alpha.example/ns/shop/sa/carol";
    for fallback in [false, true] {
        let (c, _) = shake(&rig.pair(carol, KeyPlace::KeyServer, fallback).1, &local).await;
        let e = c.unwrap_err();
        assert!(matches!(&e, TlsError::KeyServer(KeyError::Refused { name: keyrpc::Refusal::NotEntitled, .. })), "{e}");
    }
    assert_eq!(rig.far.asked(), 0);
    assert_eq!(rig.metric("canal_keys_refused_total{server=\"ks1\",reason=\"not_entitled\"}"), 2);
    // One that has no certificate yet is no reason to fail: another may.
    rig.near.mood(Mood::Refusing(keyrpc::Refusal::NoCertificate));
    let (c, _) = shake(&rig.pair(ALICE, KeyPlace::KeyServer, false).1, &local).await;
    assert!(c.is_ok());
    assert_eq!(rig.far.asked(), 1);
}

#[tokio::test]
async fn a_process_without_key_servers_says_so() {
    let rig = Rig::new().await;
    let ca = rig.ca.clone();
    let keyring = Keyring::of(Arc::new(move |id| ca.credential(id)), None, rig.store.clone());
    let policy = KeyPolicy { place: KeyPlace::KeyServer, ..KeyPolicy::default() };
    let (server, client) = keyring.pair(&"alpha".parse().unwrap(), &policy, &identity(BOB));
    let (near, far) = duplex(1024);
    let e = client.connect(near, &bob()).await.unwrap_err();
    assert!(e.reason() == "no_key_server" && e.to_string().contains("--key-server"), "{e}");
    assert_eq!(server.accept(far).await.unwrap_err().reason(), "no_key_server");
}

#[tokio::test]
async fn a_key_server_lost_in_the_middle_ends_the_handshake_soon() {
    let rig = Rig::new().await;
    let (near, mut far) = duplex(64 << 10);
    let client = rig.pair(ALICE, KeyPlace::KeyServer, true).1;
    let lost = tokio::spawn(async move { client.connect(near, &bob()).await.map(|(_, id)| id) });
    // Its ClientHello is out; then nobody goes on with it.
    let mut hello = [0; 64];
    far.read_exact(&mut hello).await.unwrap();
    rig.near.mood(Mood::Mute);
    let start = Instant::now();
    far.write_all(&[22, 3, 3, 0, 4, 2, 0, 0, 0]).await.unwrap();
    let e = lost.await.unwrap().unwrap_err();
    assert_eq!(e.reason(), "key_server");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert_eq!(rig.far.asked(), 0, "no other can go on with it");
}

#[tokio::test]
async fn a_slow_peer_is_not_the_key_servers_fault() {
    let rig = Rig::new().await;
    // Every byte on its own, with pauses longer than a trip in the middle of a flight.
    let (near, far) = duplex(64 << 10);
    let (mut their_end, ours) = duplex(64 << 10);
    let server = rig.pair(BOB, KeyPlace::KeyServer, false).0;
    let client = rig.pair(ALICE, KeyPlace::Local, false).1;
    tokio::spawn(async move {
        let (mut near_read, mut near_write) = tokio::io::split(far);
        let (mut read, mut write) = tokio::io::split(&mut their_end);
        let slow = async {
            let (mut byte, mut n) = ([0; 1], 0);
            while near_read.read_exact(&mut byte).await.is_ok() {
                n += 1;
                if n == 700 || n == 2500 {
                    tokio::time::sleep(Duration::from_millis(1200)).await;
                }
                if write.write_all(&byte).await.is_err() {
                    return;
                }
            }
        };
        tokio::join!(slow, async { tokio::io::copy(&mut read, &mut near_write).await.ok() });
    });
    let expected = bob();
    let (c, s) = tokio::join!(client.connect(near, &expected), server.accept(ours));
    let (c, s) = (c.unwrap().0, s.unwrap().0);
    assert!(s.is_remote());
    assert_eq!(rig.metric("canal_keys_failures_total"), 0);
    converse(c, s).await;
}

#[tokio::test]
async fn what_the_client_says_right_behind_its_finished_is_heard() {
    let rig = Rig::new().await;
    let (server, client) = (rig.pair(BOB, KeyPlace::KeyServer, false).0, rig.pair(ALICE, KeyPlace::Local, false).1);
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

/// What is given to the key server while its last word is on the way back belongs to the connection.
#[tokio::test]
async fn what_crosses_the_key_servers_last_word_is_not_lost() {
    let rig = Rig::new().await;
    let (server, client) = (rig.pair(BOB, KeyPlace::KeyServer, false).0, rig.pair(ALICE, KeyPlace::Local, false).1);
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
async fn who_speaks_no_tls_is_turned_away_without_asking() {
    let rig = Rig::new().await;
    let server = rig.pair(BOB, KeyPlace::KeyServer, true).0;
    let (mut near, far) = duplex(64 << 10);
    near.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert_eq!(server.accept(far).await.unwrap_err().reason(), "protocol");
    let mut alert = Vec::new();
    near.read_to_end(&mut alert).await.unwrap();
    assert_eq!(alert, [21, 3, 3, 0, 2, 2, 10]);
    assert_eq!(rig.near.asked(), 0);
}

#[tokio::test]
async fn a_peer_that_leaves_is_abandoned_at_the_key_server() {
    let rig = Rig::new().await;
    let (near, mut far) = duplex(64 << 10);
    let client = rig.pair(ALICE, KeyPlace::KeyServer, false).1;
    let gone = tokio::spawn(async move { client.connect(near, &bob()).await.map(|(_, id)| id) });
    far.read_u8().await.unwrap();
    drop(far);
    assert_eq!(gone.await.unwrap().unwrap_err().reason(), "io");
    let start = Instant::now();
    while rig.near.abandoned() == 0 {
        assert!(start.elapsed() < Duration::from_secs(5));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_refused_peer_hears_an_alert_and_a_revoked_one_is_noticed() {
    let rig = Rig::new().await;
    // Someone else's certificate: the key server's verdict.
    let stranger = TestCa::new("stranger");
    let client = ClientIdentity::new(stranger.credential(&identity(ALICE))).trusting(rig.store.view(&"alpha".parse().unwrap()));
    let server = rig.pair(BOB, KeyPlace::KeyServer, true).0;
    let (c, s) = shake(&client, &server).await;
    let verdict = s.unwrap_err();
    assert!(matches!(verdict, TlsError::KeyServer(KeyError::Refused { name: keyrpc::Refusal::PeerCertificate, .. })));
    let said = c.unwrap().0.read_u8().await.unwrap_err().to_string();
    assert!(said.contains("alert"), "{said}");
    // One that does not wait for the verdict: it is counted by its name all the same.
    let (near, far) = duplex(64 << 10);
    let (left, refused) = tokio::join!(async { client.connect(near, &bob()).await.map(drop) }, server.accept(far));
    left.unwrap();
    assert_eq!(refused.map(drop).unwrap_err().to_string(), verdict.to_string());
    // The server's record layer and the trust of this process: revoked later.
    let issued = rig.ca.issue_with(&identity(ALICE), |p| p.serial_number = Some(42.into()));
    let made = crate::tls::Certificate::from_pem(&issued.key, &issued.chain, &rig.ca.root_pem()).unwrap();
    let client = ClientIdentity::new(crate::tls::Credential::fixed(made));
    let (c, s) = shake(&client, &server).await;
    let (_c, s) = (c.unwrap(), s.unwrap().0);
    let mut standing = s.standing().clone();
    assert!(futures::poll!(std::pin::pin!(standing.fallen())).is_pending());
    rig.store.replace([rig.ca.bundle("alpha", "alpha.example", false, vec![rig.ca.revocations(&[42])])]).unwrap();
    assert_eq!(standing.fallen().await, Fallen::Revoked);
}

/// As for handshakes made here (`a_revoked_intermediate_revokes_what_it_signed`): both ends learn of it.
#[tokio::test]
async fn an_intermediate_that_is_revoked_later_ends_what_key_servers_made() {
    let rig = Rig::new().await;
    let below = rig.ca.intermediate("alpha intermediate", 5);
    let held = |id| {
        let issued = below.issue_with(&identity(id), |p| p.serial_number = Some(9.into()));
        crate::tls::Certificate::from_pem(&issued.key, &issued.chain, &rig.ca.root_pem()).unwrap()
    };
    rig.near.hold(ALICE, held(ALICE));
    rig.near.hold(BOB, held(BOB));
    let (client, server) = (rig.pair(ALICE, KeyPlace::KeyServer, false).1, rig.pair(BOB, KeyPlace::KeyServer, false).0);
    let (c, s) = shake(&client, &server).await;
    let (c, s) = (c.unwrap().0, s.unwrap().0);
    assert!(c.is_remote() && s.is_remote() && c.peer_leaf().above().links().map(|l| l.serial).eq([[5]]));
    let mut ends = [c.standing().clone(), s.standing().clone()];
    // The leaves' number, but of the root; the intermediate's, but of another root; then the intermediate's.
    for other in [rig.ca.revocations(&[9]), TestCa::new("other").revocations(&[5])] {
        rig.store.replace([rig.ca.bundle("alpha", "alpha.example", false, vec![other])]).unwrap();
        for end in &mut ends {
            assert!(futures::poll!(std::pin::pin!(end.fallen())).is_pending());
        }
    }
    rig.store.replace([rig.ca.bundle("alpha", "alpha.example", false, vec![rig.ca.revocations(&[5])])]).unwrap();
    for end in &mut ends {
        assert_eq!(end.fallen().await, Fallen::Revoked);
    }
    // The key server has not heard of it yet; who asked it has, on either side.
    assert_eq!(shake(&client, &server).await.0.unwrap_err().reason(), "revoked");
    let unaware = ClientIdentity::new(crate::tls::Credential::fixed(held(ALICE)));
    assert_eq!(shake(&unaware, &server).await.1.unwrap_err().reason(), "revoked");
}

#[tokio::test]
async fn a_crowd_shares_one_channel_and_its_writes() {
    let rig = Rig::new().await;
    let (client, server) = (rig.pair(ALICE, KeyPlace::KeyServer, false).1, rig.pair(BOB, KeyPlace::KeyServer, false).0);
    let crowd = futures::future::join_all((0..40).map(|_| shake(&client, &server))).await;
    for (c, s) in crowd {
        assert!(c.is_ok() && s.is_ok(), "{:?} {:?}", c.err(), s.err());
    }
    assert_eq!(rig.metric("canal_keys_channels{server=\"ks1\"}"), 1);
    let (frames, writes) = (rig.metric("canal_keys_frames_total"), rig.metric("canal_keys_writes_total"));
    // All forty ask before the channel is up, so that these go in one.
    assert!(frames >= 160 && frames - writes >= 39, "{frames} {writes}");
}

#[tokio::test]
async fn a_key_server_whose_certificate_is_revoked_is_asked_no_more() {
    let rig = Rig::new().await;
    let (client, server) = (rig.pair(ALICE, KeyPlace::KeyServer, false).1, rig.pair(BOB, KeyPlace::Local, false).0);
    assert!(shake(&client, &server).await.0.is_ok());
    let list = rig.components.revocations(&[5]);
    let parts = rig.components.bundle("canal-system", "components.canal", false, vec![list]);
    rig.store.replace([rig.ca.bundle("alpha", "alpha.example", false, vec![]), parts]).unwrap();
    // What is open is closed, though nobody asks.
    let start = Instant::now();
    while rig.metric("canal_keys_channels{server=\"ks1\"}") > 0 {
        assert!(start.elapsed() < Duration::from_secs(5));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(shake(&client, &server).await.0.is_ok());
    assert_eq!((rig.near.asked(), rig.far.asked()), (1, 1), "the other AZ's is asked");
    assert_eq!(rig.metric("canal_keys_failures_total{server=\"ks1\",reason=\"connect\"}"), 1);
}

#[tokio::test]
async fn a_key_server_that_is_someone_else_is_not_believed() {
    let rig = Rig::new().await;
    // ks2 at ks1's place, and one of another authority.
    let components = TestCa::new("other components");
    let other = FakeKeyServer::start(&components, "ks1").await;
    for address in [rig.far.address, other.address] {
        let me = identity("spiffe://components.canal/ns/canal-system/sa/gateway.r1");
        let servers = vec![parse_key_server(&format!("az1=ks9@{address}")).unwrap()];
        let config = RequesterConfig { az: "az1".parse().unwrap(), servers, me: me.clone(), trip: Duration::from_secs(1) };
        let requester = Requester::with_credential(config, components.credential(&me), &rig.store, &rig.registry);
        let client = ClientIdentity::remote(identity(ALICE), Some(requester), None);
        let (near, _far) = duplex(1024);
        let e = client.connect(near, &bob()).await.unwrap_err();
        assert!(e.reason() == "no_key_server" && e.to_string().contains("ks9: connect"), "{e}");
    }
}
