//! Handshakes over real channels: both roles, flights in pieces, and the refusal of peers by name.

use crate::fixture::*;
use canal_testing::{TestCa, identity};
use canal_wire::keyrpc::{HandshakeRole, KeyRefusal, KeyRequest};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, date_time_ymd};

#[tokio::test(flavor = "multi_thread")]
async fn handshakes_of_both_roles_and_both_algorithms() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    for (component, own, tenant, domain) in [
        (NODE, WEB, "alpha", "alpha.example"),
        (RSA_NODE, SLOW, "rsa", "rsa.example"),
    ] {
        let channel = fixture.channel(component).await;
        let (ca, id) = (fixture.ca(tenant), PEER.replace("alpha.example", domain));
        let peers = Peers::new(ca, &ca.issue_with(&identity(&id), |_| {}), domain, &[own]);
        // A second and third handshake may use what the first one left in caches.
        for _ in 0..3 {
            let mut client = peers.client();
            let ServerReply::Done {
                alpn,
                suite,
                peer,
                secrets,
                ..
            } = channel.run_handshake(own, &mut client).await
            else {
                panic!("not done")
            };
            assert!(!client.is_handshaking());
            assert_eq!(
                (alpn.as_slice(), suite, peer.as_str(), secrets.0.len()),
                // TLS_AES_256_GCM_SHA384: 48 bytes of secret, a key of 32 and an IV of 12.
                (&b"h2"[..], 0x1302, id.as_str(), 92)
            );
        }
        // The other role once: the engine's own tests have it with RSA too.
        if tenant == "alpha" {
            let mut server = peers.server();
            assert!(matches!(
                channel.run_handshake(own, &mut server).await,
                ServerReply::Done { .. }
            ));
            assert!(!server.is_handshaking());
        }
    }
    let line =
        "canal_key_operations_total{kind=\"handshake_server\",algorithm=\"rsa\",tenant=\"rsa\"}";
    assert_eq!(fixture.value(line), 3.0);
    assert_eq!(fixture.value("canal_key_operations_total{kind=\"handshake_client\",algorithm=\"ecdsa\",tenant=\"alpha\"}"), 1.0);
    until("nothing is in progress", || {
        fixture.value("canal_key_handshakes_in_flight") == 0.0
            && fixture.value("canal_key_requests_in_flight") == 0.0
    })
    .await;
    // Requests came one at a time, so none waited for a batch.
    for algorithm in ["ecdsa", "rsa"] {
        assert_eq!(
            fixture.value(&format!(
                "canal_key_operations_queued_total{{algorithm=\"{algorithm}\"}}"
            )),
            0.0
        );
        assert_eq!(
            fixture.value(&format!(
                "canal_key_batch_wait_seconds_sum{{algorithm=\"{algorithm}\"}}"
            )),
            0.0
        );
    }
}

/// A peer may send data as soon as it has sent Finished, so its bytes arrive while the key server
/// ends the handshake, and right after it.
#[tokio::test(flavor = "multi_thread")]
async fn data_right_behind_a_handshake_does_not_break_it() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let channel = fixture.channel(NODE).await;
    let ca = fixture.ca("alpha");
    let peers = Peers::new(
        ca,
        &ca.issue_with(&identity(PEER), |_| {}),
        "alpha.example",
        &[WEB],
    );
    // The race is over in microseconds, so it is run many times.
    for _ in 0..1000 {
        let mut client = peers.client();
        let mut call = channel.begin(WEB, HandshakeRole::Server, &[], 0);
        channel.send_request(
            call.id,
            &KeyRequest::More {
                bytes: &flight(&mut client),
            },
        );
        let bytes = match call.next().await {
            ServerReply::Send(bytes) => bytes,
            other => panic!("{other:?}, no flight"),
        };
        feed_peer(&mut client, &bytes);
        channel.send_request(
            call.id,
            &KeyRequest::More {
                bytes: &flight(&mut client),
            },
        );
        let end = std::time::Instant::now() + canal_timing::deadline(SOON);
        let said = loop {
            assert!(std::time::Instant::now() < end, "no answer");
            // The head of a record of application data.
            channel.send_request(call.id, &KeyRequest::More { bytes: &[23, 3, 3] });
            match call.ready() {
                Some(said) => break said,
                // Often, but without flooding the channel.
                None => std::thread::sleep(std::time::Duration::from_micros(30)),
            }
        };
        assert!(
            matches!(said, ServerReply::Done { .. }),
            "{said:?}, before its end"
        );
        channel.forget(&call);
    }
    // Without some refusals, no bytes would have met the end of a handshake. A few per cent of the
    // rounds suffice to show that the race was met.
    let late = || fixture.value("canal_key_refusals_total{name=\"unknown_request\"");
    until("bytes after the end of a handshake are refused", || {
        late() >= 30.0
    })
    .await;
}

/// A requester that has sent whole records waits for a response before it sends more; one that has
/// sent a part does not.
#[tokio::test(flavor = "multi_thread")]
async fn a_fragmented_flight_is_read_record_by_record() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let channel = fixture.channel(NODE).await;
    let ca = fixture.ca("alpha");
    let peers = Peers::new(
        ca,
        &ca.issue_with(&identity(PEER), |_| {}),
        "alpha.example",
        &[WEB],
    );
    let mut client = peers.client();
    let mut call = channel.begin(WEB, HandshakeRole::Server, &[], 0);
    channel.send_request(
        call.id,
        &KeyRequest::More {
            bytes: &flight(&mut client),
        },
    );
    let ServerReply::Send(bytes) = call.next().await else {
        panic!("no flight")
    };
    feed_peer(&mut client, &bytes);
    let flight = flight(&mut client);
    // The flight starts with a change of cipher spec: a head of five bytes and one of content.
    let spec = 6;
    assert_eq!(&flight[..5], &[20, 3, 3, 0, 1]);
    channel.send_request(
        call.id,
        &KeyRequest::More {
            bytes: &flight[..spec],
        },
    );
    assert_eq!(
        call.next().await,
        ServerReply::Send(Vec::new()),
        "more bytes are needed"
    );
    // Any number of bytes that ends within a record.
    let (part, rest) = flight[spec..].split_at(100);
    channel.send_request(call.id, &KeyRequest::More { bytes: part });
    // Nothing announces that no answer comes, so the test can only wait a moment.
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    assert_eq!(call.ready(), None, "a part of a record is not answered");
    channel.send_request(call.id, &KeyRequest::More { bytes: rest });
    assert!(matches!(call.next().await, ServerReply::Done { .. }));
}

type CsrEditFn = fn(&mut CertificateParams);

/// A case's name, the CA, identity and change of the peer's certificate, whether the peer is the
/// client, and why it is refused.
type PeerCase<'a> = (
    &'static str,
    &'a TestCa,
    &'static str,
    CsrEditFn,
    bool,
    KeyRefusal,
);

const BETA_PEER: &str = "spiffe://beta.example/ns/shop/sa/peer";

/// Returns peers that a node of alpha must refuse. `ca` is alpha's, and `foreign` is no tenant's.
fn refused_peers<'a>(
    ca: &'a TestCa,
    beta_ca: &'a TestCa,
    foreign: &'a TestCa,
) -> Vec<PeerCase<'a>> {
    vec![
        (
            "expired",
            ca,
            PEER,
            |p| p.not_after = date_time_ymd(2021, 1, 1),
            true,
            KeyRefusal::PeerExpired,
        ),
        (
            "not valid yet",
            ca,
            PEER,
            |p| p.not_before = date_time_ymd(2119, 1, 1),
            true,
            KeyRefusal::PeerNotYetValid,
        ),
        (
            "wrong usage",
            ca,
            PEER,
            |p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth],
            true,
            KeyRefusal::PeerPurpose,
        ),
        (
            "another tenant",
            beta_ca,
            BETA_PEER,
            |_| {},
            true,
            KeyRefusal::PeerTrustDomain,
        ),
        (
            "another root",
            foreign,
            PEER,
            |_| {},
            true,
            KeyRefusal::PeerUnknownIssuer,
        ),
        (
            "not expected",
            ca,
            API,
            |_| {},
            false,
            KeyRefusal::PeerIdentity,
        ),
        (
            "revoked",
            ca,
            PEER,
            |p| p.serial_number = Some(77.into()),
            true,
            KeyRefusal::PeerRevoked,
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_are_refused_by_name_with_an_alert() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    let channel = fixture.channel(NODE).await;
    let (ca, foreign) = (fixture.ca("alpha"), TestCa::new("foreign"));
    let cases = refused_peers(ca, fixture.ca("beta"), &foreign);
    let mut resources = fixture.usual();
    // Another bundle takes the place of alpha's: it has a revocation.
    resources.retain(|r| !r.name().starts_with("alpha/alpha.example"));
    resources.push(ca.bundle("alpha", "alpha.example", false, vec![ca.revocations(&[77])]));
    fixture.publish(&resources);
    for (what, issuer, id, change, is_client, want) in cases {
        let issued = issuer.issue_with(&identity(id), change);
        let peers = Peers::new(ca, &issued, "alpha.example", &[WEB]);
        let mut peer = if is_client {
            peers.client()
        } else {
            peers.server()
        };
        let said = channel.run_handshake(WEB, &mut peer).await;
        assert!(
            matches!(&said, ServerReply::Refused(name, text) if *name == want && !text.is_empty()),
            "{what}: {said:?}"
        );
        assert!(
            peer.process_new_packets().is_err(),
            "{what}: the peer heard an alert"
        );
        let line = format!("canal_key_refusals_total{{name=\"{want}\",tenant=\"alpha\"}}");
        assert_eq!(fixture.value(&line), 1.0, "{line}");
    }
    // Members of a federated tenant are accepted; what they may do is not decided here.
    resources.push(
        fixture
            .ca("beta")
            .bundle("alpha", "beta.example", true, vec![]),
    );
    fixture.publish(&resources);
    let peers = Peers::new(
        ca,
        &fixture.ca("beta").issue_with(&identity(BETA_PEER), |_| {}),
        "alpha.example",
        &[WEB],
    );
    let said = channel.run_handshake(WEB, &mut peers.client()).await;
    assert!(
        matches!(&said, ServerReply::Done { peer, .. } if peer == BETA_PEER),
        "{said:?}"
    );
}
