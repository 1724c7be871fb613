//! Tests that reach every limit of the channels, and of key servers that lie.

use std::sync::Arc;
use std::time::Duration;

use canal_runtime::metrics::Registry;
use canal_testing::{TestCa, identity};
use canal_tls::{PeerVerifier, TrustStore, TrustView, server_config};
use canal_wire::keyrpc::{self, KeyName, KeyRefusal as Said, KeyRequest, KeyResponse};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use super::channel::{IN_FLIGHT_MAX, KeyServerChannel, OwnedHandshakeResult, QUEUE_MAX};
use super::circuit_breaker::FAILURES_MAX;
use super::counts::{KeyClientCounters, KeyServerFailure};
use super::key_client::{KeyClient, KeyClientConfig, LAST_SERVER_TIMEOUT_FACTOR};
use super::remote_handshake::{RemoteHandshakeParams, finished};
use super::server_address::{KeyServerTarget, ServerAddress};

const ALICE: &str = "spiffe://alpha.example/ns/shop/sa/alice";
const BOB: &str = "spiffe://alpha.example/ns/shop/sa/bob";

fn key_server_target(address: std::net::SocketAddr) -> KeyServerTarget {
    KeyServerTarget {
        name: "ks1".into(),
        address,
        identity: identity("spiffe://components.canal/ns/canal-system/sa/keyserver.ks1"),
    }
}

/// Returns a channel to a listener that never answers, so that requests wait.
async fn waiting(components: &TestCa) -> (KeyServerChannel, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let me = identity("spiffe://components.canal/ns/canal-system/sa/gateway.r1");
    let counts = Arc::new(KeyClientCounters::new(&Registry::new()));
    (
        KeyServerChannel::start(
            key_server_target(listener.local_addr().unwrap()),
            components.credential(&me),
            TrustView::without_bundles(),
            counts,
        ),
        listener,
    )
}

#[tokio::test]
async fn a_channel_limits_requests_and_bytes() {
    let components = TestCa::new("components");
    let (channel, _listener) = waiting(&components).await;
    let calls: Vec<_> = (0..IN_FLIGHT_MAX)
        .map(|_| {
            channel
                .send_request(&KeyRequest::Chain {
                    key: KeyName::File("alpha/shop/a".parse().unwrap()),
                })
                .unwrap()
        })
        .collect();
    assert_eq!(
        channel.send_request(&KeyRequest::Ping).err(),
        Some(KeyServerFailure::Busy)
    );
    drop(calls);
    assert!(channel.send_request(&KeyRequest::Ping).is_ok());
    let (channel, _listener) = waiting(&components).await;
    let input = vec![0; 60_000];
    let sign = || {
        channel.send_request(&KeyRequest::Sign {
            key: KeyName::File("alpha/shop/a".parse().unwrap()),
            presented: None,
            scheme: 0x0403,
            deadline_ms: 0,
            input: &input,
        })
    };
    let mut calls = Vec::new();
    while let Ok(exchange) = sign() {
        calls.push(exchange);
        assert!(calls.len() < 100, "no end");
    }
    assert_eq!(calls.len(), QUEUE_MAX.div_ceil(60_000));
    assert_eq!(sign().err(), Some(KeyServerFailure::Busy));
}

#[tokio::test]
async fn the_last_server_with_a_closed_circuit_has_the_longer_timeout() {
    let components = TestCa::new("components");
    let me = identity("spiffe://components.canal/ns/canal-system/sa/gateway.r1");
    // They accept connections in the kernel and answer nothing.
    let silent = [
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
    ];
    let server = |at: usize| ServerAddress {
        az: "az1".parse().unwrap(),
        name: format!("ks{at}").parse().unwrap(),
        address: silent[at].local_addr().unwrap(),
    };
    let trip = Duration::from_millis(50);
    let config = KeyClientConfig {
        az: "az1".parse().unwrap(),
        servers: vec![server(0), server(1)],
        me: me.clone(),
        trip,
    };
    let client = KeyClient::start(
        config,
        components.credential(&me),
        &TrustStore::new(&Registry::new()),
        &Registry::new(),
    );
    let servers = client.provider();
    for _ in 0..FAILURES_MAX {
        servers[1].circuit.record_failure(Instant::now());
    }
    let started = Instant::now();
    let error = client.first(&servers, &KeyRequest::Ping).await.err();
    // A slow machine only makes it later.
    let waited = started.elapsed();
    assert!(waited >= trip * LAST_SERVER_TIMEOUT_FACTOR, "{waited:?}");
    let error = error.expect("no server answers").to_string();
    assert!(error.contains("circuit"), "{error}");
}

#[test]
fn contradictory_answers_of_a_key_server_are_refused() {
    let ca = TestCa::new("alpha");
    let leaf = ca.issue(&identity(BOB)).chain()[0].to_vec();
    let done = |consumed, leaf: &[u8], peer| OwnedHandshakeResult {
        bytes: vec![],
        consumed,
        // TLS_AES_128_GCM_SHA256.
        suite: 0x1301,
        alpn: vec![],
        // Secrets of that suite's hash have 32 bytes; their content does not matter.
        client_traffic: vec![1; 32].into(),
        server_traffic: vec![2; 32].into(),
        peer: identity(peer),
        leaf: leaf.to_vec(),
        above: vec![],
    };
    let terms = |expected| RemoteHandshakeParams {
        identity: identity(ALICE),
        alpn: b"h2",
        expected: Arc::from([identity(expected)]),
    };
    // The peer sent eight bytes, `12345678`.
    for (name, done, expected, role, what) in [
        (
            "more consumed than given",
            done(9, &leaf, BOB),
            BOB,
            keyrpc::HandshakeRole::Client,
            "more bytes consumed",
        ),
        (
            "no certificate",
            done(0, b"?", BOB),
            BOB,
            keyrpc::HandshakeRole::Client,
            "cannot be read",
        ),
        (
            "another's certificate",
            done(0, &leaf, ALICE),
            ALICE,
            keyrpc::HandshakeRole::Client,
            "does not name",
        ),
        (
            "not the expected peer",
            done(0, &leaf, BOB),
            ALICE,
            keyrpc::HandshakeRole::Client,
            "unexpected identity",
        ),
    ] {
        let e = finished(done, b"12345678", "ks1", &terms(expected), role)
            .err()
            .unwrap()
            .to_string();
        assert!(e.contains(what), "{name}: {e}");
    }
    // A server expects no particular client, so it is no fault that ALICE is not BOB.
    let good = finished(
        done(5, &leaf, BOB),
        b"12345678",
        "ks1",
        &terms(ALICE),
        keyrpc::HandshakeRole::Server,
    )
    .ok()
    .unwrap();
    assert_eq!(
        (good.early.as_slice(), good.leaf.trust_domain()),
        (&b"678"[..], &identity(BOB).trust_domain)
    );
}

#[tokio::test]
async fn a_key_server_that_talks_nonsense_is_left() {
    let components = TestCa::new("components");
    let own = components.issue(&identity(
        "spiffe://components.canal/ns/canal-system/sa/keyserver.ks1",
    ));
    let verifier = PeerVerifier::new(
        own.identity().trust_domain.clone(),
        own.bundle(),
        TrustView::without_bundles(),
    )
    .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(
        server_config(own.signing().clone(), verifier, &[keyrpc::ALPN.to_vec()]).unwrap(),
    ));
    let stray = {
        // The server sends answers to unknown requests before the right one; they are ignored.
        let mut out = Vec::new();
        KeyResponse::Send { bytes: b"x" }
            .encode(77, &mut out)
            .unwrap();
        KeyResponse::Refused {
            name: Said::Failed,
            text: "",
        }
        .encode(u64::MAX, &mut out)
        .unwrap();
        KeyResponse::Signature { bytes: b"signed" }
            // The channel's first request has the ID 1.
            .encode(1, &mut out)
            .unwrap();
        out
    };
    for (name, says, want) in [
        (
            "a frame without end",
            // A length of 2^32 - 1, beyond the limit of a frame.
            vec![0xff; 64],
            Err(KeyServerFailure::Malformed),
        ),
        (
            // A length of 1, where the request's ID and the kind alone have 9 bytes.
            "a frame too short",
            vec![0, 0, 0, 1, 0],
            Err(KeyServerFailure::Malformed),
        ),
        (
            // A PING: nine bytes of body, which are the request's ID and the kind 6.
            "a request",
            b"\0\0\0\x09\0\0\0\0\0\0\0\0\x06".to_vec(),
            Err(KeyServerFailure::Malformed),
        ),
        ("strays", stray, Ok(())),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let me = identity("spiffe://components.canal/ns/canal-system/sa/gateway.r1");
        let counts = Arc::new(KeyClientCounters::new(&Registry::new()));
        let channel = KeyServerChannel::start(
            key_server_target(listener.local_addr().unwrap()),
            components.credential(&me),
            TrustView::without_bundles(),
            counts,
        );
        let mut exchange = channel
            .send_request(&KeyRequest::Chain {
                key: KeyName::File("alpha/shop/a".parse().unwrap()),
            })
            .unwrap();
        let mut tls = acceptor
            .accept(listener.accept().await.unwrap().0)
            .await
            .unwrap();
        // Once the request has arrived, the answer cannot precede it.
        tls.read_u8().await.unwrap();
        tls.write_all(&says).await.unwrap();
        tls.flush().await.unwrap();
        let answer = tokio::time::timeout(
            canal_timing::deadline(Duration::from_secs(5)),
            exchange.answer(),
        )
        .await
        .expect(name);
        assert_eq!(
            answer.map(drop).ok_or_else(|| exchange.why()),
            want,
            "{name}"
        );
    }
}
