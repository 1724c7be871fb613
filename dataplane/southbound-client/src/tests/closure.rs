//! Closed tenants: a tenant with a refused or missing security resource is closed, and no other
//! tenant is.

use canal_model::program::{Resource, ResourceKind};
use canal_testing::{FakeController, FakeStream};
use canal_wire::discovery::DeltaDiscoveryResponse;

use super::fixture::{
    SEALED, SubscriptionFixture, policy, refused, response, seal, service, tenant,
};
use crate::{ClosureCause, Subscriber, UpdateSource};

/// Replaces the body of one resource of a response by bytes that are not of its kind. Versions are
/// `v<generation>`.
fn broken(mut response: DeltaDiscoveryResponse, name: &str) -> DeltaDiscoveryResponse {
    let bad = response
        .resources
        .iter_mut()
        .find(|r| r.name == name)
        .unwrap();
    bad.resource.as_mut().unwrap().value = vec![0xff; 9];
    response
}

fn tenants() -> [Resource; 2] {
    [tenant("alpha", 1), tenant("beta", 2)]
}

/// Answers all first requests with both tenants, one service of alpha, and one policy of each
/// tenant. A subscriber that closes tenants has a fourth kind, the manifests.
async fn first_batch(stream: &mut FakeStream, bad: Option<&str>) {
    for kind in SEALED {
        let heard = stream.receive().await.unwrap();
        assert!(
            heard.type_url.ends_with(kind.type_url()),
            "manifests are subscribed to last"
        );
    }
    let [alpha, beta] = tenants();
    let [of_alpha, of_beta] = [policy("alpha", "deny"), policy("beta", "deny")];
    stream
        .exchange(response(
            5,
            ResourceKind::Tenant,
            &[alpha.clone(), beta.clone()],
            &[],
        ))
        .await;
    stream
        .exchange(response(5, ResourceKind::Service, &[service("a", 1)], &[]))
        .await;
    let policies = response(
        5,
        ResourceKind::Authorization,
        &[of_alpha.clone(), of_beta.clone()],
        &[],
    );
    match bad {
        Some(name) => assert_eq!(
            refused(&stream.exchange(broken(policies, name)).await),
            [name]
        ),
        None => assert_eq!(stream.exchange(policies).await.error_detail, None),
    }
    let manifests = [
        seal("alpha", &[(&alpha, 5), (&of_alpha, 5)]),
        seal("beta", &[(&beta, 5), (&of_beta, 5)]),
    ];
    stream
        .send(response(5, ResourceKind::Manifest, &manifests, &[]))
        .await;
    // `None` means that the stream was restarted, because a resource was refused that had been
    // acknowledged.
    assert!(
        stream
            .receive()
            .await
            .is_none_or(|answer| answer.error_detail.is_none())
    );
}

async fn started(
    fixture: &SubscriptionFixture,
    bad: Option<&str>,
) -> (FakeController, FakeStream, Subscriber) {
    let mut controller = FakeController::start().await;
    let subscriber = fixture.start_sealed(&controller);
    let mut stream = controller.stream().await;
    first_batch(&mut stream, bad).await;
    subscriber.until_ready().await;
    (controller, stream, subscriber)
}

fn closed(subscriber: &Subscriber) -> Vec<(String, ClosureCause)> {
    subscriber
        .status()
        .closed
        .iter()
        .map(|(tenant, closure)| (tenant.to_string(), closure.cause))
        .collect()
}

/// A data plane that starts with no state and refuses a policy of alpha gets ready, closes alpha,
/// and serves beta with its policy (S1).
#[tokio::test]
async fn cold_start_with_a_refused_policy_closes_its_tenant_alone() {
    let fixture = SubscriptionFixture::new();
    let (_controller, mut stream, subscriber) = started(&fixture, Some("alpha/shop/deny")).await;
    assert_eq!(
        closed(&subscriber),
        [("alpha".to_string(), ClosureCause::RefusedResource)]
    );
    assert!(
        subscriber.status().closed[&"alpha".parse::<canal_model::ids::TenantName>().unwrap()]
            .detail
            .contains("alpha/shop/deny")
    );
    assert_eq!(
        *fixture.closed.lock().unwrap(),
        ["alpha"],
        "the caller receives it with the first whole state"
    );
    assert!(
        subscriber
            .state()
            .get(ResourceKind::Authorization, "beta/shop/deny")
            .is_some()
    );
    assert_eq!(fixture.metric("canal_southbound_closed_tenants"), 1);
    // After the fix, the policy arrives again, and then its manifest.
    let ([alpha, _], fixed) = (tenants(), policy("alpha", "deny"));
    stream
        .exchange(response(
            6,
            ResourceKind::Authorization,
            std::slice::from_ref(&fixed),
            &[],
        ))
        .await;
    assert_eq!(
        closed(&subscriber).len(),
        1,
        // The manifest that arrived first names another version of the policy.
        "closed until the manifest agrees"
    );
    stream
        .exchange(response(
            6,
            ResourceKind::Manifest,
            &[seal("alpha", &[(&alpha, 5), (&fixed, 6)])],
            &[],
        ))
        .await;
    assert_eq!(
        (
            closed(&subscriber),
            fixture.metric("canal_southbound_closed_tenants")
        ),
        (vec![], 0)
    );
    assert!(fixture.closed.lock().unwrap().is_empty());
}

/// A kind counts as answered even if all its resources were refused.
#[tokio::test]
async fn cold_start_gets_ready_when_every_policy_is_refused() {
    let fixture = SubscriptionFixture::new();
    let mut controller = FakeController::start().await;
    let subscriber = fixture.start_sealed(&controller);
    let mut stream = controller.stream().await;
    for _ in SEALED {
        stream.receive().await.unwrap();
    }
    let [alpha, beta] = tenants();
    let of_alpha = policy("alpha", "deny");
    stream
        .exchange(response(
            5,
            ResourceKind::Tenant,
            &[alpha.clone(), beta.clone()],
            &[],
        ))
        .await;
    stream
        .exchange(response(5, ResourceKind::Service, &[], &[]))
        .await;
    stream
        .exchange(broken(
            response(
                5,
                ResourceKind::Authorization,
                std::slice::from_ref(&of_alpha),
                &[],
            ),
            "alpha/shop/deny",
        ))
        .await;
    let manifests = [
        seal("alpha", &[(&alpha, 5), (&of_alpha, 5)]),
        seal("beta", &[(&beta, 5)]),
    ];
    stream
        .exchange(response(5, ResourceKind::Manifest, &manifests, &[]))
        .await;
    subscriber.until_ready().await;
    assert_eq!(
        closed(&subscriber),
        [("alpha".to_string(), ClosureCause::RefusedResource)]
    );
}

/// An ordinary change closes no tenant between its responses: the comparison happens when the
/// manifest of the batch arrives.
#[tokio::test]
async fn change_of_several_responses_closes_no_tenant() {
    let fixture = SubscriptionFixture::new();
    let (_controller, mut stream, subscriber) = started(&fixture, None).await;
    assert!(closed(&subscriber).is_empty());
    let ([alpha, _], added, changed) =
        (tenants(), policy("alpha", "more"), policy("alpha", "deny"));
    stream
        .exchange(response(
            6,
            ResourceKind::Authorization,
            &[added.clone(), changed.clone()],
            &[],
        ))
        .await;
    assert!(closed(&subscriber).is_empty());
    stream
        .exchange(response(
            6,
            ResourceKind::Manifest,
            &[seal("alpha", &[(&alpha, 5), (&added, 6), (&changed, 6)])],
            &[],
        ))
        .await;
    assert!(closed(&subscriber).is_empty());
    // This controller seals a version that it did not send.
    stream
        .exchange(response(
            7,
            ResourceKind::Manifest,
            &[seal("alpha", &[(&alpha, 5), (&added, 6), (&changed, 7)])],
            &[],
        ))
        .await;
    assert_eq!(
        closed(&subscriber),
        [("alpha".to_string(), ClosureCause::ManifestMismatch)]
    );
}

/// A new tenant opens with its manifest, and a removed tenant is not closed but unknown.
#[tokio::test]
async fn a_new_tenant_is_closed_until_its_manifest_arrives() {
    let fixture = SubscriptionFixture::new();
    let (_controller, mut stream, subscriber) = started(&fixture, None).await;
    let gamma = tenant("gamma", 3);
    stream
        .exchange(response(
            6,
            ResourceKind::Tenant,
            std::slice::from_ref(&gamma),
            &[],
        ))
        .await;
    assert_eq!(
        closed(&subscriber),
        [("gamma".to_string(), ClosureCause::NoManifest)]
    );
    stream
        .exchange(response(
            6,
            ResourceKind::Manifest,
            &[seal("gamma", &[(&gamma, 6)])],
            &[],
        ))
        .await;
    assert!(closed(&subscriber).is_empty());
    stream
        .exchange(response(7, ResourceKind::Tenant, &[], &["gamma"]))
        .await;
    stream
        .exchange(response(7, ResourceKind::Manifest, &[], &["gamma"]))
        .await;
    assert!(closed(&subscriber).is_empty());
}

/// A resource that decodes but that the data plane cannot use closes its tenant, like one that does
/// not decode.
#[tokio::test]
async fn resource_that_the_data_plane_cannot_use_closes_its_tenant_alone() {
    let fixture = SubscriptionFixture::new();
    fixture
        .unusable
        .lock()
        .unwrap()
        .insert("alpha/shop/deny".into());
    let mut controller = FakeController::start().await;
    let subscriber = fixture.start_sealed(&controller);
    let mut stream = controller.stream().await;
    // The error shows only when the whole state is there. The policy was acknowledged long before,
    // so it is requested again.
    first_batch(&mut stream, None).await;
    subscriber.until_ready().await;
    assert_eq!(
        closed(&subscriber),
        [("alpha".to_string(), ClosureCause::RefusedResource)]
    );
    let mut stream = controller.stream().await;
    for kind in SEALED {
        let initial = stream.receive().await.unwrap().initial_resource_versions;
        assert!(!initial.contains_key("alpha/shop/deny"), "{kind:?}");
        assert!(kind != ResourceKind::Authorization || initial.contains_key("beta/shop/deny"));
    }
    let nack = stream
        .exchange(response(
            5,
            ResourceKind::Authorization,
            &[policy("alpha", "deny")],
            &[],
        ))
        .await;
    assert_eq!(refused(&nack), ["alpha/shop/deny"]);
    assert!(fixture.metric("canal_southbound_reconnects_total{reason=\"resync\"}") == 1);
}

/// A boot from disk compares the state with the manifest on disk.
#[tokio::test]
async fn snapshot_boots_with_the_same_tenants_closed() {
    for (bad, wanted) in [
        (None, vec![]),
        (
            Some("alpha/shop/deny"),
            vec![("alpha".to_string(), ClosureCause::ManifestMismatch)],
        ),
    ] {
        let fixture = SubscriptionFixture::new();
        let (controller, stream, subscriber) = started(&fixture, bad).await;
        subscriber.stop().await;
        drop((controller, stream));
        fixture.updates();
        let elsewhere = FakeController::start().await;
        let nowhere = "127.0.0.1:9".parse().unwrap();
        let subscriber = fixture.start_with(&elsewhere, nowhere, &SEALED);
        assert!(subscriber.ready() && !subscriber.status().live);
        assert_eq!(closed(&subscriber), wanted);
        assert_eq!(fixture.updates()[0].0, UpdateSource::Snapshot);
        assert_eq!(
            fixture.closed.lock().unwrap().len(),
            wanted.len(),
            "the caller receives it with the state"
        );
    }
}

/// A resource of one tenant that makes the data plane panic does not keep the others from booting.
#[tokio::test]
async fn state_that_one_tenant_breaks_is_applied_without_it() {
    let fixture = SubscriptionFixture::new();
    let mut controller = FakeController::start().await;
    let subscriber = fixture.start_sealed(&controller);
    let mut stream = controller.stream().await;
    for _ in SEALED {
        stream.receive().await.unwrap();
    }
    let (beta, trips) = (tenant("beta", 2), tenant("panic", 3));
    stream
        .exchange(response(
            5,
            ResourceKind::Tenant,
            &[beta.clone(), trips.clone()],
            &[],
        ))
        .await;
    stream
        .exchange(response(5, ResourceKind::Service, &[], &[]))
        .await;
    stream
        .exchange(response(5, ResourceKind::Authorization, &[], &[]))
        .await;
    stream
        .send(response(
            5,
            ResourceKind::Manifest,
            &[seal("beta", &[(&beta, 5)]), seal("panic", &[(&trips, 5)])],
            &[],
        ))
        .await;
    subscriber.until_ready().await;
    assert_eq!(
        closed(&subscriber),
        [("panic".to_string(), ClosureCause::RefusedResource)]
    );
    assert_eq!(subscriber.state().count(ResourceKind::Tenant), 1);
}
