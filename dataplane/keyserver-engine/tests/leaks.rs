//! Thousands of handshakes and signatures, successful or not, leave nothing behind: memory, files,
//! requests.

mod fixture;

use std::fs;

use canal_testing::identity;
use canal_wire::keyrpc::{HandshakeRole, KeyName, KeyRequest};
use fixture::*;

fn resident() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<f64>()
        .unwrap()
        / 1024.0
}

fn files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Runs handshakes of both roles, signatures, handshakes that are abandoned, and a channel that
/// opens and closes.
async fn round(fixture: &KeyServerFixture, channel: &Channel, peers: &Peers, handshakes: usize) {
    let input = verify_input();
    for n in 0..handshakes {
        let mut peer = if n % 2 == 0 {
            peers.client()
        } else {
            peers.server()
        };
        assert!(matches!(
            channel.run_handshake(WEB, &mut peer).await,
            ServerReply::Done { .. }
        ));
        let key = KeyName::Identity(identity(WEB));
        let mut call = channel.start_call(&KeyRequest::Sign {
            key,
            presented: None,
            // ecdsa_secp256r1_sha256.
            scheme: 0x0403,
            deadline_ms: 0,
            input: &input,
        });
        assert!(matches!(call.next().await, ServerReply::Signature(_)));
        channel.forget(&call);
        let mut call = channel.begin(WEB, HandshakeRole::Client, &[PEER], 0);
        assert!(matches!(call.next().await, ServerReply::Send(_)));
        if n % 2 == 0 {
            channel.send_request(call.id, &KeyRequest::Abandon);
        } else {
            channel.send_request(
                call.id,
                &KeyRequest::More {
                    bytes: b"garbage, not TLS",
                },
            );
            call.refusal().await;
        }
        channel.forget(&call);
        // New channels cost a TLS handshake, so only a few are opened.
        if n % 100 == 0 {
            assert!(fixture.channel(NODE).await.lives().await);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_behind() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let channel = fixture.channel(NODE).await;
    let peers = Peers::new(
        fixture.ca("alpha"),
        &fixture.ca("alpha").issue_with(&identity(PEER), |_| {}),
        "alpha.example",
        &[WEB],
    );
    round(&fixture, &channel, &peers, 500).await;
    let (memory, open) = (resident(), files());
    let begun = std::time::Instant::now();
    let handshakes = if canal_timing::is_timed() { 5000 } else { 1000 };
    round(&fixture, &channel, &peers, handshakes).await;
    println!(
        "{handshakes} rounds of handshakes: {:?}, {memory:.1} MiB before, {:.1} after",
        begun.elapsed(),
        resident()
    );
    assert!(
        resident() < memory + 8.0,
        "{memory} MiB before, {} after",
        resident()
    );
    until("files are closed", || files() <= open + 2).await;
    until("nothing is in progress", || {
        fixture.value("canal_key_requests_in_flight") == 0.0
    })
    .await;
    assert_eq!(fixture.value("canal_key_handshakes_in_flight"), 0.0);
}
