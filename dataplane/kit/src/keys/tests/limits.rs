//! Every limit of the requester reached, and key servers that lie.

use canal_wire::keyrpc::{KeyName, Refusal as Said, Request, Response};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::super::channel::{Channel, Done};
use super::super::counts::{Counts, Failure};
use super::super::remote::{Terms, finished};
use super::super::server::Place;
use super::*;
use crate::tls::{Judge, TrustView, server_config};

fn place(address: std::net::SocketAddr) -> Place {
    Place { name: "ks1".into(), address, identity: identity("spiffe://components.canal/ns/canal-system/sa/keyserver.ks1") }
}

/// A channel to where nobody answers: what is asked waits.
async fn waiting(components: &TestCa) -> (Channel, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let me = identity("spiffe://components.canal/ns/canal-system/sa/gateway.r1");
    let counts = Arc::new(Counts::new(&Registry::new()));
    (Channel::start(place(listener.local_addr().unwrap()), components.credential(&me), TrustView::untold(), counts), listener)
}

#[tokio::test]
async fn a_channel_takes_so_many_requests_and_bytes_and_no_more() {
    let components = TestCa::new("components");
    let (channel, _listener) = waiting(&components).await;
    let held: Vec<_> =
        (0..IN_FLIGHT_MAX).map(|_| channel.ask(&Request::Chain { key: KeyName::File("alpha/shop/a".parse().unwrap()) }).unwrap()).collect();
    assert_eq!(channel.ask(&Request::Ping).err(), Some(Failure::Busy));
    drop(held);
    assert!(channel.ask(&Request::Ping).is_ok());
    let (channel, _listener) = waiting(&components).await;
    let input = vec![0; 60_000];
    let sign = || {
        channel.ask(&Request::Sign {
            key: KeyName::File("alpha/shop/a".parse().unwrap()),
            shown: None,
            scheme: 0x0403,
            deadline_ms: 0,
            input: &input,
        })
    };
    let mut held = Vec::new();
    while let Ok(exchange) = sign() {
        held.push(exchange);
        assert!(held.len() < 100, "no end");
    }
    assert_eq!(held.len(), QUEUE_MAX.div_ceil(60_000));
    assert_eq!(sign().err(), Some(Failure::Busy));
}

#[tokio::test]
async fn a_peer_may_say_so_much_before_its_handshake_ends() {
    let rig = Rig::new().await;
    let (near, mut far) = duplex(256 << 10);
    let client = rig.pair(ALICE, KeyPlace::KeyServer, true).1;
    let too_much = tokio::spawn(async move { client.connect(near, &bob()).await.map(|(_, id)| id) });
    far.read_u8().await.unwrap();
    rig.near.mood(Mood::Slow);
    let record = [&[23, 3, 3, 0x40, 0][..], &[7; 0x4000]].concat();
    for _ in 0..5 {
        far.write_all(&record).await.unwrap();
    }
    assert_eq!(too_much.await.unwrap().unwrap_err().reason(), "handshake_bytes");
}

#[tokio::test(start_paused = true)]
async fn a_connection_by_a_key_server_proves_the_identity_for_a_while() {
    let client = ClientIdentity::remote(identity(ALICE), None, None);
    let early = client.proof().unwrap();
    tokio::time::advance(crate::tls::REMOTE_PROOF_LIFE - Duration::from_secs(1)).await;
    assert!(early.same(&client.proof().unwrap()));
    tokio::time::advance(Duration::from_secs(2)).await;
    let late = client.proof().unwrap();
    assert!(!early.same(&late) && !late.same(&early) && late.same(&late.clone()));
}

#[test]
fn a_key_server_is_not_believed_what_its_own_words_contradict() {
    let ca = TestCa::new("alpha");
    let leaf = ca.issue(&identity(BOB)).chain()[0].to_vec();
    let done = |consumed, leaf: &[u8], peer| Done {
        bytes: vec![],
        consumed,
        suite: 0x1301,
        alpn: vec![],
        client_traffic: vec![1; 32].into(),
        server_traffic: vec![2; 32].into(),
        peer: identity(peer),
        leaf: leaf.to_vec(),
        above: vec![],
    };
    let terms = |expected| Terms { identity: identity(ALICE), alpn: b"h2", expected: Arc::from([identity(expected)]) };
    for (name, done, expected, role, what) in [
        ("more consumed than given", done(9, &leaf, BOB), BOB, keyrpc::Role::Client, "more bytes consumed"),
        ("no certificate", done(0, b"?", BOB), BOB, keyrpc::Role::Client, "cannot be read"),
        ("another's certificate", done(0, &leaf, ALICE), ALICE, keyrpc::Role::Client, "does not name"),
        ("not who was expected", done(0, &leaf, BOB), ALICE, keyrpc::Role::Client, "not expected"),
    ] {
        let e = finished(done, b"12345678", "ks1", &terms(expected), role).err().unwrap().to_string();
        assert!(e.contains(what), "{name}: {e}");
    }
    let good = finished(done(5, &leaf, BOB), b"12345678", "ks1", &terms(ALICE), keyrpc::Role::Server).ok().unwrap();
    assert_eq!((good.early.as_slice(), good.leaf.trust_domain()), (&b"678"[..], &identity(BOB).trust_domain));
}

#[tokio::test]
async fn a_key_server_that_talks_nonsense_is_left() {
    let components = TestCa::new("components");
    let own = components.issue(&identity("spiffe://components.canal/ns/canal-system/sa/keyserver.ks1"));
    let judge = Judge::new(own.identity().trust_domain.clone(), own.bundle(), TrustView::untold()).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(server_config(own.signing().clone(), judge, &[keyrpc::ALPN.to_vec()]).unwrap()));
    let stray = {
        // Answers to nobody, then the right one: strays do no harm.
        let mut out = Vec::new();
        Response::Send { bytes: b"x" }.encode(77, &mut out).unwrap();
        Response::Refused { name: Said::Failed, text: "" }.encode(u64::MAX, &mut out).unwrap();
        Response::Signature { bytes: b"signed" }.encode(1, &mut out).unwrap();
        out
    };
    for (name, says, want) in [
        ("a frame without end", vec![0xff; 64], Err(Failure::Malformed)),
        ("a frame too short", vec![0, 0, 0, 1, 0], Err(Failure::Malformed)),
        ("a request", b"\0\0\0\x09\0\0\0\0\0\0\0\0\x06".to_vec(), Err(Failure::Malformed)),
        ("strays", stray, Ok(())),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let me = identity("spiffe://components.canal/ns/canal-system/sa/gateway.r1");
        let counts = Arc::new(Counts::new(&Registry::new()));
        let channel = Channel::start(place(listener.local_addr().unwrap()), components.credential(&me), TrustView::untold(), counts);
        let mut exchange = channel.ask(&Request::Chain { key: KeyName::File("alpha/shop/a".parse().unwrap()) }).unwrap();
        let mut tls = acceptor.accept(listener.accept().await.unwrap().0).await.unwrap();
        tls.read_u8().await.unwrap();
        tls.write_all(&says).await.unwrap();
        tls.flush().await.unwrap();
        let answer = tokio::time::timeout(Duration::from_secs(5), exchange.answer()).await.expect(name);
        assert_eq!(answer.map(drop).ok_or_else(|| exchange.why()), want, "{name}");
    }
}
