//! Tests of the limits of remote handshakes.

use super::*;

#[tokio::test]
async fn bytes_before_the_end_of_a_handshake_are_limited() {
    let fixture = KeyClientFixture::new().await;
    let (near, mut far) = duplex(256 << 10);
    let client = fixture.pair(ALICE, KeyLocation::KeyServer, true).1;
    let too_much =
        tokio::spawn(async move { client.connect(near, &bob()).await.map(|(_, id)| id) });
    far.read_u8().await.unwrap();
    fixture.near.set_behavior(FakeBehavior::Slow);
    let record = [&[23, 3, 3, 0x40, 0][..], &[7; 0x4000]].concat();
    for _ in 0..5 {
        far.write_all(&record).await.unwrap();
    }
    assert_eq!(
        too_much.await.unwrap().unwrap_err().reason(),
        "handshake_bytes"
    );
}

#[tokio::test(start_paused = true)]
async fn a_connection_by_a_key_server_proves_the_identity_for_a_while() {
    let client = ClientIdentity::remote(identity(ALICE), None, None);
    let early = client.proof().unwrap();
    tokio::time::advance(crate::REMOTE_PROOF_LIFE - Duration::from_secs(1)).await;
    assert!(early.same(&client.proof().unwrap()));
    tokio::time::advance(Duration::from_secs(2)).await;
    let late = client.proof().unwrap();
    assert!(!early.same(&late) && !late.same(&early) && late.same(&late.clone()));
}
