//! A response in several messages: it is applied and answered once, after its last part; parts that
//! do not fit together end the stream.

use canal_model::program::ResourceKind;
use canal_testing::{FakeController, FakeStream};
use canal_wire::discovery::DeltaDiscoveryResponse;
use canal_wire::southbound::RESPONSE_PARTS_FEATURE;

use super::fixture::{SubscriptionFixture, response, tenant, until};
use crate::Subscriber;

fn part(generation: u64, name: &str, vni: u32, more_parts: bool) -> DeltaDiscoveryResponse {
    DeltaDiscoveryResponse {
        more_parts,
        ..response(generation, ResourceKind::Tenant, &[tenant(name, vni)], &[])
    }
}

/// Starts a subscriber and answers its first requests with nothing.
async fn started(fixture: &SubscriptionFixture) -> (FakeController, FakeStream, Subscriber) {
    let mut controller = FakeController::start().await;
    let subscriber = fixture.start(&controller);
    let mut stream = controller.stream().await;
    let first = stream.receive().await.unwrap();
    stream.receive().await.unwrap();
    assert_eq!(
        first.node.unwrap().client_features,
        [RESPONSE_PARTS_FEATURE]
    );
    for kind in [ResourceKind::Tenant, ResourceKind::Service] {
        stream.exchange(response(4, kind, &[], &[])).await;
    }
    fixture.updates();
    (controller, stream, subscriber)
}

#[tokio::test]
async fn a_response_in_parts_is_applied_once_and_answered_once() {
    let fixture = SubscriptionFixture::new();
    let (_controller, mut stream, _subscriber) = started(&fixture).await;
    stream.send(part(5, "alpha", 1, true)).await;
    stream.send(part(5, "beta", 2, true)).await;
    // The next message of the subscriber is the answer to the last part.
    let ack = stream.exchange(part(5, "gamma", 3, false)).await;
    assert_eq!(
        (ack.response_nonce.as_str(), ack.error_detail),
        ("n5", None)
    );
    let updates = fixture.updates();
    assert_eq!(updates.len(), 1, "{updates:?}");
    assert_eq!(updates[0].2, ["alpha", "beta", "gamma"]);
}

#[tokio::test]
async fn a_stream_that_mixes_parts_ends_and_nothing_of_it_is_applied() {
    let fixture = SubscriptionFixture::new();
    let (mut controller, stream, _subscriber) = started(&fixture).await;
    stream.send(part(5, "alpha", 1, true)).await;
    stream.send(part(6, "beta", 2, false)).await;
    until("the stream ended with an error", || {
        fixture.metric("canal_southbound_reconnects_total{reason=\"error\"}") == 1
    })
    .await;
    assert!(fixture.updates().is_empty());
    // The next stream begins without the part that came.
    let mut stream = controller.stream().await;
    for _ in 0..2 {
        stream.receive().await.unwrap();
    }
    let ack = stream.exchange(part(6, "beta", 2, false)).await;
    assert_eq!(ack.error_detail, None);
    let updates = fixture.updates();
    assert_eq!(updates[0].2, ["beta"], "{updates:?}");
}
