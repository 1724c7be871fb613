//! Controllers with another store: the state is replaced as a whole, and only by a complete state.

use canal_model::ids::StoreId;
use canal_model::program::ResourceKind;
use canal_testing::{FakeController, FakeStream};
use canal_wire::discovery::DeltaDiscoveryResponse;
use canal_wire::southbound::control_plane;

use super::fixture::{SubscriptionFixture, policy, response, seal, service, tenant, until};
use crate::{Subscriber, UpdateSource};

const OLD: u128 = 7;
const NEW: u128 = 8;

fn of(store: u128, response: DeltaDiscoveryResponse) -> DeltaDiscoveryResponse {
    DeltaDiscoveryResponse {
        control_plane: Some(control_plane(StoreId::from_bits(store))),
        ..response
    }
}

fn text(store: u128) -> String {
    StoreId::from_bits(store).to_string()
}

/// Receives the first requests and returns how many resources they name as present.
async fn count_initial_resources(stream: &mut FakeStream, kinds: usize) -> usize {
    let mut count = 0;
    for _ in 0..kinds {
        count += stream
            .receive()
            .await
            .unwrap()
            .initial_resource_versions
            .len();
    }
    count
}

/// Serves a complete state of the old store: alpha and beta, and alpha's service `a` with ID 1.
async fn started(fixture: &SubscriptionFixture) -> (FakeController, FakeStream, Subscriber) {
    let mut controller = FakeController::start().await;
    let subscriber = fixture.start(&controller);
    let mut stream = controller.stream().await;
    count_initial_resources(&mut stream, 2).await;
    stream
        .exchange(of(
            OLD,
            response(
                500,
                ResourceKind::Tenant,
                &[tenant("alpha", 1), tenant("beta", 2)],
                &[],
            ),
        ))
        .await;
    stream
        .exchange(response(
            500,
            ResourceKind::Service,
            &[service("a", 1)],
            &[],
        ))
        .await;
    subscriber.until_ready().await;
    (controller, stream, subscriber)
}

/// Checks that later changes work as usual, and that a restart boots from the new store's state.
async fn restart_from_the_new_store(
    fixture: &SubscriptionFixture,
    controller: FakeController,
    mut stream: FakeStream,
    subscriber: Subscriber,
) {
    stream
        .exchange(response(3, ResourceKind::Tenant, &[], &["gamma"]))
        .await;
    subscriber.stop().await;
    drop(stream);
    let mut controller = controller.restart().await;
    let subscriber = fixture.start(&controller);
    assert_eq!(subscriber.state().store(), Some(StoreId::from_bits(NEW)));
    let mut stream = controller.stream().await;
    assert_eq!(count_initial_resources(&mut stream, 2).await, 2);
    stream
        .exchange(of(NEW, response(3, ResourceKind::Tenant, &[], &[])))
        .await;
    assert_eq!(subscriber.status().store, text(NEW));
}

#[tokio::test]
async fn another_stores_state_replaces_all_at_once_and_only_when_it_is_whole() {
    let fixture = SubscriptionFixture::new();
    let (controller, stream, subscriber) = started(&fixture).await;
    assert_eq!(
        (subscriber.status().store, subscriber.status().other_store),
        (text(OLD), String::new())
    );
    drop(stream);
    fixture.updates();
    let mut controller = controller.restart().await;
    // The first stream announces another store, so the subscriber restarts it without resources.
    let mut stream = controller.stream().await;
    // All three resources of the old store are claimed until the controller announces another
    // one.
    assert_eq!(count_initial_resources(&mut stream, 2).await, 3);
    stream
        .send(of(
            NEW,
            response(2, ResourceKind::Tenant, &[tenant("alpha", 1)], &[]),
        ))
        .await;
    let mut stream = controller.stream().await;
    assert_eq!(
        count_initial_resources(&mut stream, 2).await,
        0,
        "nothing of the old store is claimed"
    );
    until("the other store is reported", || {
        subscriber.status().other_store == text(NEW)
    })
    .await;
    assert_eq!(fixture.metric("canal_southbound_other_store"), 1);
    assert_eq!(
        fixture.metric("canal_southbound_reconnects_total{reason=\"other_store\"}"),
        1
    );

    let ack = stream
        .exchange(of(
            NEW,
            response(
                2,
                ResourceKind::Tenant,
                &[tenant("alpha", 1), tenant("gamma", 3)],
                &[],
            ),
        ))
        .await;
    assert_eq!(
        ack.error_detail, None,
        "an older generation of another store is not stale"
    );
    assert_eq!(
        // The old store's state, of generation 500, stays in force until the new one is whole.
        (fixture.updates(), subscriber.status().generation),
        (vec![], 500),
        "half a state changes nothing"
    );
    assert_eq!(subscriber.state().store(), Some(StoreId::from_bits(OLD)));
    // ID 1 of the old store belongs to another service now.
    stream
        .exchange(response(2, ResourceKind::Service, &[service("b", 1)], &[]))
        .await;
    let (origin, generation, mut put, mut removed, counts) = fixture.updates().remove(0);
    // A whole state arrives in no particular order.
    put.sort();
    removed.sort();
    assert_eq!(
        (origin, generation, counts),
        (UpdateSource::Controller, 2, (2, 1))
    );
    assert_eq!(put, ["alpha", "alpha/shop/b", "gamma"]);
    assert_eq!(
        removed,
        ["alpha/shop/a", "beta"],
        "all of the old store in the same update"
    );
    let status = subscriber.status();
    assert_eq!(
        (status.store, status.other_store, status.generation),
        (text(NEW), String::new(), 2)
    );
    assert_eq!(fixture.metric("canal_southbound_other_store"), 0);
    assert_eq!(fixture.metric("canal_southbound_stores_replaced_total"), 1);

    restart_from_the_new_store(&fixture, controller, stream, subscriber).await;
}

#[tokio::test]
async fn the_old_store_returns_before_the_other_is_whole() {
    let fixture = SubscriptionFixture::new();
    let (controller, stream, subscriber) = started(&fixture).await;
    drop(stream);
    fixture.updates();
    let mut controller = controller.restart().await;
    let mut stream = controller.stream().await;
    count_initial_resources(&mut stream, 2).await;
    // The announcement alone makes the subscriber begin a stream for the new store.
    stream
        .send(of(NEW, response(2, ResourceKind::Tenant, &[], &[])))
        .await;
    let mut stream = controller.stream().await;
    count_initial_resources(&mut stream, 2).await;
    stream
        .exchange(of(
            NEW,
            response(2, ResourceKind::Tenant, &[tenant("gamma", 3)], &[]),
        ))
        .await;
    drop(stream);

    let mut stream = controller.stream().await;
    assert_eq!(
        count_initial_resources(&mut stream, 2).await,
        1,
        "it continues at its position"
    );
    stream
        .send(of(OLD, response(501, ResourceKind::Tenant, &[], &[])))
        .await;
    let mut stream = controller.stream().await;
    assert_eq!(
        count_initial_resources(&mut stream, 2).await,
        3,
        "the state that was in force all the time"
    );
    stream
        .exchange(of(
            OLD,
            response(501, ResourceKind::Tenant, &[tenant("beta", 9)], &[]),
        ))
        .await;
    assert_eq!(
        fixture.updates(),
        [(
            UpdateSource::Controller,
            501,
            vec!["beta".into()],
            vec![],
            (2, 1)
        )]
    );
    let status = subscriber.status();
    assert_eq!(
        (status.store, status.other_store),
        (text(OLD), String::new())
    );
    assert_eq!(fixture.metric("canal_southbound_stores_replaced_total"), 0);
}

#[tokio::test]
async fn another_store_is_whole_only_once_its_tenants_are_sealed() {
    let fixture = SubscriptionFixture::new();
    let mut controller = FakeController::start().await;
    let subscriber = fixture.start_sealed(&controller);
    let mut stream = controller.stream().await;
    // All four kinds are requested.
    count_initial_resources(&mut stream, 4).await;
    let deny = policy("alpha", "deny");
    let (alpha, beta) = (tenant("alpha", 1), tenant("beta", 2));
    let all = [
        response(500, ResourceKind::Tenant, std::slice::from_ref(&alpha), &[]),
        response(500, ResourceKind::Service, &[service("a", 1)], &[]),
        response(
            500,
            ResourceKind::Authorization,
            std::slice::from_ref(&deny),
            &[],
        ),
        response(
            500,
            ResourceKind::Manifest,
            &[seal("alpha", &[(&alpha, 500), (&deny, 500)])],
            &[],
        ),
    ];
    for response in all {
        stream.exchange(of(OLD, response)).await;
    }
    subscriber.until_ready().await;
    fixture.updates();
    drop(stream);
    let mut stream = controller.stream().await;
    count_initial_resources(&mut stream, 4).await;
    stream
        .send(of(NEW, response(2, ResourceKind::Tenant, &[], &[])))
        .await;
    let mut stream = controller.stream().await;
    count_initial_resources(&mut stream, 4).await;
    stream
        .exchange(of(
            NEW,
            response(2, ResourceKind::Tenant, &[alpha.clone(), beta.clone()], &[]),
        ))
        .await;
    stream
        // The stream's first response has named the store, so later ones need not.
        .exchange(response(2, ResourceKind::Service, &[service("b", 1)], &[]))
        .await;
    let deny = [policy("alpha", "deny"), policy("beta", "deny")];
    stream
        .exchange(response(2, ResourceKind::Authorization, &deny, &[]))
        .await;
    stream
        .exchange(response(
            2,
            ResourceKind::Manifest,
            &[seal("alpha", &[(&alpha, 2), (&deny[0], 2)])],
            &[],
        ))
        .await;
    assert_eq!(fixture.updates(), [], "beta's manifest is still to come");
    stream
        .exchange(response(
            2,
            ResourceKind::Manifest,
            &[seal("beta", &[(&beta, 2), (&deny[1], 2)])],
            &[],
        ))
        .await;
    assert_eq!(fixture.updates().len(), 1);
    assert_eq!(
        (subscriber.status().closed.len(), subscriber.status().store),
        (0, text(NEW)),
        "all tenants are open"
    );
}
