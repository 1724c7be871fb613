//! Reports of a data plane about its limits, next to the subscription.

use canal_model::program::ResourceKind;
use canal_model::share::ShareKind;
use canal_runtime::limits::show_shares;
use canal_runtime::{RevocationOrder, ShareHolder, TenantLimit, TenantLimitConfig};
use canal_testing::FakeController;

use super::fixture::{SubscriptionFixture, response, service, tenant, until};

#[tokio::test]
async fn shares_and_omitted_resources_are_reported_and_stored() {
    let fixture = SubscriptionFixture::new();
    let kind = ShareKind::GatewayConnections;
    // A capacity of which alpha's share admits the 7 and later 8 units in use.
    let limit = TenantLimit::new(TenantLimitConfig {
        kind,
        capacity: 100,
        reserve: 0,
        revocation_order: RevocationOrder::OldestFirst,
    });
    show_shares(&fixture.registry, &limit);
    let alpha = ShareHolder::Tenant("alpha".parse().unwrap());
    let _held = limit.take(&alpha, 7).unwrap();
    fixture
        .no_room
        .lock()
        .unwrap()
        .insert("alpha/shop/a".into());
    let mut controller = FakeController::start().await;
    let subscriber = fixture.start(&controller);
    let mut stream = controller.stream().await;
    // One subscription for each of the two kinds.
    for _ in 0..2 {
        stream.receive().await.unwrap();
    }
    assert_eq!(
        stream
            .exchange(response(
                1,
                ResourceKind::Tenant,
                &[tenant("alpha", 1)],
                &[]
            ))
            .await
            .error_detail,
        None
    );
    let ack = stream
        .exchange(response(1, ResourceKind::Service, &[service("a", 1)], &[]))
        .await;
    assert_eq!(ack.error_detail, None, "a lack of space is no refusal");
    assert_eq!(
        subscriber.state().count(ResourceKind::Service),
        1,
        "it comes into force when there is space"
    );
    let is_reported = |omitted: &[&str], used: u64| {
        controller
            .reports
            .report_log()
            .shares
            .last()
            .is_some_and(|state| {
                let names: Vec<&str> = state.omitted.iter().map(|o| o.name.as_str()).collect();
                let row = state
                    .rows
                    .iter()
                    .find(|row| row.limit == kind.label() && row.tenant == "alpha");
                names == omitted && row.is_some_and(|row| row.used == used)
            })
    };
    until("both are reported", || is_reported(&["alpha/shop/a"], 7)).await;
    let _more = limit.take(&alpha, 1).unwrap();
    fixture.no_room.lock().unwrap().clear();
    stream
        .exchange(response(
            2,
            ResourceKind::Tenant,
            &[tenant("alpha", 2)],
            &[],
        ))
        .await;
    until("the change is reported", || is_reported(&[], 8)).await;
    let reports = controller.reports.report_log().shares.len();
    // The last report may be counted only after it was recorded here.
    assert!(
        fixture.metric("canal_southbound_share_reports_total{result=\"ok\"}") >= reports as u64 - 1
            && reports >= 2
    );
}
