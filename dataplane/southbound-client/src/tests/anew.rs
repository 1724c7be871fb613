//! Lists of held resources: they take as many requests as they need, and after refusals for a full
//! limit a stream lists nothing.

use canal_model::ids::StoreId;
use canal_model::program::{Resource, ResourceKind};
use canal_testing::{FakeController, FakeStream};
use canal_wire::southbound::control_plane;
use tonic::Status;

use super::fixture::{SubscriptionFixture, response, service, tenant, until};
use crate::session::LISTED_BYTES_MAX;
use crate::{Subscriber, UpdateSource};

/// Serves alpha and beta, and alpha's service `a`.
async fn started(fixture: &SubscriptionFixture) -> (FakeController, FakeStream, Subscriber) {
    let mut controller = FakeController::start().await;
    let subscriber = fixture.start(&controller);
    let mut stream = controller.stream().await;
    count_initial_resources(&mut stream).await;
    let mut tenants = response(
        5,
        ResourceKind::Tenant,
        &[tenant("alpha", 1), tenant("beta", 2)],
        &[],
    );
    tenants.control_plane = Some(control_plane(StoreId::from_bits(7)));
    stream.exchange(tenants).await;
    stream
        .exchange(response(5, ResourceKind::Service, &[service("a", 1)], &[]))
        .await;
    subscriber.until_ready().await;
    fixture.updates();
    (controller, stream, subscriber)
}

/// Receives the first requests of both kinds and returns how many resources they list.
async fn count_initial_resources(stream: &mut FakeStream) -> usize {
    stream
        .receive()
        .await
        .unwrap()
        .initial_resource_versions
        .len()
        + stream
            .receive()
            .await
            .unwrap()
            .initial_resource_versions
            .len()
}

#[tokio::test]
async fn after_two_refusals_for_a_full_limit_a_stream_lists_nothing_and_receives_everything() {
    let fixture = SubscriptionFixture::new();
    let (mut controller, stream, subscriber) = started(&fixture).await;
    let full = || Status::resource_exhausted("the names are too many");
    // This stream had brought a good response, so its end does not count.
    stream.fail(full()).await;
    // The limit of refusals before a stream lists nothing (`EXHAUSTED_STREAMS_MAX`).
    for _ in 0..2 {
        let mut stream = controller.stream().await;
        assert_eq!(count_initial_resources(&mut stream).await, 3);
        stream.fail(full()).await;
    }
    let mut stream = controller.stream().await;
    assert_eq!(
        count_initial_resources(&mut stream).await,
        0,
        "the third begins anew"
    );
    assert_eq!(
        subscriber.state().count(ResourceKind::Tenant),
        2,
        "the present state is served meanwhile"
    );
    until("the refusals are counted", || {
        fixture.metric("canal_southbound_reconnects_total{reason=\"exhausted\"}") == 3
    })
    .await;
    let mut tenants = response(
        6,
        ResourceKind::Tenant,
        &[tenant("alpha", 1), tenant("gamma", 3)],
        &[],
    );
    tenants.control_plane = Some(control_plane(StoreId::from_bits(7)));
    let ack = stream.exchange(tenants).await;
    assert_eq!(
        (ack.error_detail, fixture.updates()),
        (None, vec![]),
        "half a state changes nothing"
    );
    stream
        .exchange(response(6, ResourceKind::Service, &[service("b", 2)], &[]))
        .await;
    let (origin, generation, mut put, mut removed, counts) = fixture.updates().remove(0);
    // A whole state arrives in no particular order.
    put.sort();
    removed.sort();
    assert_eq!(
        (origin, generation, counts),
        (UpdateSource::Controller, 6, (2, 1))
    );
    assert_eq!(
        (put, removed),
        (
            ["alpha", "alpha/shop/b", "gamma"]
                .map(String::from)
                .to_vec(),
            vec!["alpha/shop/a".into(), "beta".into()]
        )
    );
    assert_eq!(
        fixture.metric("canal_southbound_stores_replaced_total"),
        0,
        "it is the same store"
    );
    // From here on it lists its resources again.
    drop(stream);
    let mut stream = controller.stream().await;
    assert_eq!(count_initial_resources(&mut stream).await, 3);
}

#[tokio::test]
async fn a_controller_at_its_stream_limit_does_not_reset_the_state() {
    let fixture = SubscriptionFixture::new();
    let (mut controller, stream, _subscriber) = started(&fixture).await;
    controller.refuse_streams(3);
    drop(stream);
    let mut stream = controller.stream().await;
    assert_eq!(count_initial_resources(&mut stream).await, 3);
    assert_eq!(
        fixture.metric("canal_southbound_reconnects_total{reason=\"full\"}"),
        3
    );
}

#[tokio::test]
async fn a_restart_accepts_no_older_generation() {
    let fixture = SubscriptionFixture::new();
    let (mut controller, stream, _subscriber) = started(&fixture).await;
    drop(stream);
    for _ in 0..2 {
        let stream = controller.stream().await;
        stream.fail(Status::resource_exhausted("full")).await;
    }
    let mut stream = controller.stream().await;
    assert_eq!(count_initial_resources(&mut stream).await, 0);
    let nack = stream
        .exchange(response(
            4,
            ResourceKind::Tenant,
            &[tenant("alpha", 1)],
            &[],
        ))
        .await;
    assert!(nack.error_detail.unwrap().message.contains("older than 5"));
}

#[tokio::test]
async fn a_long_list_takes_several_requests() {
    let fixture = SubscriptionFixture::new();
    let (controller, mut stream, _subscriber) = started(&fixture).await;
    // Names of about 120 bytes, so that the list has about twice the bytes of one request.
    let count = 2 * LISTED_BYTES_MAX / 130;
    let services: Vec<Resource> = (0..count)
        .map(|n| service(&format!("s{n:0>50}"), 10 + u32::try_from(n).unwrap()))
        .collect();
    stream
        .exchange(response(6, ResourceKind::Service, &services, &[]))
        .await;
    drop(stream);
    let mut controller = controller.restart().await;
    let mut stream = controller.stream().await;
    let mut listed = std::collections::BTreeSet::new();
    let mut requests = 0;
    while listed.len() < count + 3 {
        let request = stream.receive().await.unwrap();
        let bytes: usize = request
            .initial_resource_versions
            .iter()
            .map(|(name, version)| name.len() + version.len())
            .sum();
        assert!(
            bytes <= LISTED_BYTES_MAX && request.response_nonce.is_empty(),
            "{bytes}"
        );
        requests += 1;
        listed.extend(request.initial_resource_versions.into_keys());
    }
    assert!(
        requests >= 3 && listed.len() == count + 3,
        "{requests} requests, {} names",
        listed.len()
    );
}
