//! Closed tenants: a tenant of which a security resource is refused or missing is closed, and no other.

use canal_model::program::{Kind, Resource};
use canal_wire::discovery::DeltaDiscoveryResponse;

use super::rig::{Rig, SEALED, policy, refused, response, seal, service, tenant};
use crate::southbound::{ClosureCause, Origin, Subscriber};
use crate::testing::{FakeController, FakeStream};

/// Versions are `v<generation>`; this resource's body is not one of its kind.
fn broken(mut response: DeltaDiscoveryResponse, name: &str) -> DeltaDiscoveryResponse {
    let bad = response.resources.iter_mut().find(|r| r.name == name).unwrap();
    bad.resource.as_mut().unwrap().value = vec![0xff; 9];
    response
}

fn tenants() -> [Resource; 2] {
    [tenant("alpha", 1), tenant("beta", 2)]
}

/// Answers all first requests: both tenants, one service of alpha's, and one policy of each.
async fn first_batch(stream: &mut FakeStream, bad: Option<&str>) {
    for kind in SEALED {
        let heard = stream.hear().await.unwrap();
        assert!(heard.type_url.ends_with(canal_wire::southbound::type_url(kind)), "manifests are subscribed to last");
    }
    let [alpha, beta] = tenants();
    let [of_alpha, of_beta] = [policy("alpha", "deny"), policy("beta", "deny")];
    stream.ask(response(5, Kind::Tenant, &[alpha.clone(), beta.clone()], &[])).await;
    stream.ask(response(5, Kind::Service, &[service("a", 1)], &[])).await;
    let policies = response(5, Kind::Authorization, &[of_alpha.clone(), of_beta.clone()], &[]);
    match bad {
        Some(name) => assert_eq!(refused(&stream.ask(broken(policies, name)).await), [name]),
        None => assert_eq!(stream.ask(policies).await.error_detail, None),
    }
    let manifests = [seal("alpha", &[(&alpha, 5), (&of_alpha, 5)]), seal("beta", &[(&beta, 5), (&of_beta, 5)])];
    stream.say(response(5, Kind::Manifest, &manifests, &[])).await;
    // None: the stream was begun anew, because something is refused that was acknowledged before.
    assert!(stream.hear().await.is_none_or(|answer| answer.error_detail.is_none()));
}

async fn started(rig: &Rig, bad: Option<&str>) -> (FakeController, FakeStream, Subscriber) {
    let mut controller = FakeController::start().await;
    let subscriber = rig.start_sealed(&controller);
    let mut stream = controller.stream().await;
    first_batch(&mut stream, bad).await;
    subscriber.until_ready().await;
    (controller, stream, subscriber)
}

fn closed(subscriber: &Subscriber) -> Vec<(String, ClosureCause)> {
    subscriber.status().closed.iter().map(|(tenant, closure)| (tenant.to_string(), closure.cause)).collect()
}

/// S1: a data plane that starts with nothing and refuses a policy of alpha's gets ready, closes alpha, and serves beta with its policy.
#[tokio::test]
async fn cold_start_with_a_refused_policy_closes_its_tenant_alone() {
    let rig = Rig::new();
    let (_controller, mut stream, subscriber) = started(&rig, Some("alpha/shop/deny")).await;
    assert_eq!(closed(&subscriber), [("alpha".to_string(), ClosureCause::RefusedResource)]);
    assert!(subscriber.status().closed[&"alpha".parse::<canal_model::ids::TenantName>().unwrap()].detail.contains("alpha/shop/deny"));
    assert_eq!(*rig.closed.lock().unwrap(), ["alpha"], "the caller is told with the first whole state");
    assert!(subscriber.state().get(Kind::Authorization, "beta/shop/deny").is_some());
    assert_eq!(rig.metric("canal_southbound_closed_tenants"), 1);
    // Mended: the policy comes again, and then its manifest.
    let ([alpha, _], mended) = (tenants(), policy("alpha", "deny"));
    stream.ask(response(6, Kind::Authorization, std::slice::from_ref(&mended), &[])).await;
    assert_eq!(closed(&subscriber).len(), 1, "closed until the manifest agrees");
    stream.ask(response(6, Kind::Manifest, &[seal("alpha", &[(&alpha, 5), (&mended, 6)])], &[])).await;
    assert_eq!((closed(&subscriber), rig.metric("canal_southbound_closed_tenants")), (vec![], 0));
    assert!(rig.closed.lock().unwrap().is_empty());
}

/// A kind whose every resource was refused is answered all the same.
#[tokio::test]
async fn cold_start_gets_ready_when_every_policy_is_refused() {
    let rig = Rig::new();
    let mut controller = FakeController::start().await;
    let subscriber = rig.start_sealed(&controller);
    let mut stream = controller.stream().await;
    for _ in SEALED {
        stream.hear().await.unwrap();
    }
    let [alpha, beta] = tenants();
    let of_alpha = policy("alpha", "deny");
    stream.ask(response(5, Kind::Tenant, &[alpha.clone(), beta.clone()], &[])).await;
    stream.ask(response(5, Kind::Service, &[], &[])).await;
    stream.ask(broken(response(5, Kind::Authorization, std::slice::from_ref(&of_alpha), &[]), "alpha/shop/deny")).await;
    let manifests = [seal("alpha", &[(&alpha, 5), (&of_alpha, 5)]), seal("beta", &[(&beta, 5)])];
    stream.ask(response(5, Kind::Manifest, &manifests, &[])).await;
    subscriber.until_ready().await;
    assert_eq!(closed(&subscriber), [("alpha".to_string(), ClosureCause::RefusedResource)]);
}

/// An ordinary change closes nobody on its way: what a batch changes is compared when its manifest comes.
#[tokio::test]
async fn change_of_several_responses_closes_nobody() {
    let rig = Rig::new();
    let (_controller, mut stream, subscriber) = started(&rig, None).await;
    assert!(closed(&subscriber).is_empty());
    let ([alpha, _], added, changed) = (tenants(), policy("alpha", "more"), policy("alpha", "deny"));
    stream.ask(response(6, Kind::Authorization, &[added.clone(), changed.clone()], &[])).await;
    assert!(closed(&subscriber).is_empty());
    stream.ask(response(6, Kind::Manifest, &[seal("alpha", &[(&alpha, 5), (&added, 6), (&changed, 6)])], &[])).await;
    assert!(closed(&subscriber).is_empty());
    // A controller that seals what it did not send.
    stream.ask(response(7, Kind::Manifest, &[seal("alpha", &[(&alpha, 5), (&added, 6), (&changed, 7)])], &[])).await;
    assert_eq!(closed(&subscriber), [("alpha".to_string(), ClosureCause::ManifestMismatch)]);
}

/// A tenant that is new opens with its manifest, and one that goes is not closed but unknown.
#[tokio::test]
async fn new_tenant_is_closed_until_its_manifest_comes() {
    let rig = Rig::new();
    let (_controller, mut stream, subscriber) = started(&rig, None).await;
    let gamma = tenant("gamma", 3);
    stream.ask(response(6, Kind::Tenant, std::slice::from_ref(&gamma), &[])).await;
    assert_eq!(closed(&subscriber), [("gamma".to_string(), ClosureCause::NoManifest)]);
    stream.ask(response(6, Kind::Manifest, &[seal("gamma", &[(&gamma, 6)])], &[])).await;
    assert!(closed(&subscriber).is_empty());
    stream.ask(response(7, Kind::Tenant, &[], &["gamma"])).await;
    stream.ask(response(7, Kind::Manifest, &[], &["gamma"])).await;
    assert!(closed(&subscriber).is_empty());
}

/// A resource that decodes and that the data plane cannot use closes its tenant as one that does not decode.
#[tokio::test]
async fn resource_that_the_data_plane_cannot_use_closes_its_tenant_alone() {
    let rig = Rig::new();
    rig.unusable.lock().unwrap().insert("alpha/shop/deny".into());
    let mut controller = FakeController::start().await;
    let subscriber = rig.start_sealed(&controller);
    let mut stream = controller.stream().await;
    // Found only when the whole state is there: the policy was acknowledged long before, so that it is asked for again.
    first_batch(&mut stream, None).await;
    subscriber.until_ready().await;
    assert_eq!(closed(&subscriber), [("alpha".to_string(), ClosureCause::RefusedResource)]);
    let mut stream = controller.stream().await;
    for kind in SEALED {
        let held = stream.hear().await.unwrap().initial_resource_versions;
        assert!(!held.contains_key("alpha/shop/deny"), "{kind:?}");
        assert!(kind != Kind::Authorization || held.contains_key("beta/shop/deny"));
    }
    let nack = stream.ask(response(5, Kind::Authorization, &[policy("alpha", "deny")], &[])).await;
    assert_eq!(refused(&nack), ["alpha/shop/deny"]);
    assert!(rig.metric("canal_southbound_reconnects_total{reason=\"resync\"}") == 1);
}

/// A boot from disk compares with the manifest on disk.
#[tokio::test]
async fn snapshot_boots_with_the_same_tenants_closed() {
    for (bad, wanted) in [(None, vec![]), (Some("alpha/shop/deny"), vec![("alpha".to_string(), ClosureCause::ManifestMismatch)])] {
        let rig = Rig::new();
        let (controller, stream, subscriber) = started(&rig, bad).await;
        subscriber.stop().await;
        drop((controller, stream));
        rig.told();
        let elsewhere = FakeController::start().await;
        let nowhere = "127.0.0.1:9".parse().unwrap();
        let subscriber = rig.start_with(&elsewhere, nowhere, &SEALED);
        assert!(subscriber.ready() && !subscriber.status().live);
        assert_eq!(closed(&subscriber), wanted);
        assert_eq!(rig.told()[0].0, Origin::Snapshot);
        assert_eq!(rig.closed.lock().unwrap().len(), wanted.len(), "the caller is told with the state");
    }
}

/// One tenant's resource that trips the data plane does not keep the others from booting.
#[tokio::test]
async fn whole_state_that_one_tenant_trips_is_told_without_it() {
    let rig = Rig::new();
    let mut controller = FakeController::start().await;
    let subscriber = rig.start_sealed(&controller);
    let mut stream = controller.stream().await;
    for _ in SEALED {
        stream.hear().await.unwrap();
    }
    let (beta, trips) = (tenant("beta", 2), tenant("panic", 3));
    stream.ask(response(5, Kind::Tenant, &[beta.clone(), trips.clone()], &[])).await;
    stream.ask(response(5, Kind::Service, &[], &[])).await;
    stream.ask(response(5, Kind::Authorization, &[], &[])).await;
    stream.say(response(5, Kind::Manifest, &[seal("beta", &[(&beta, 5)]), seal("panic", &[(&trips, 5)])], &[])).await;
    subscriber.until_ready().await;
    assert_eq!(closed(&subscriber), [("panic".to_string(), ClosureCause::RefusedResource)]);
    assert_eq!(subscriber.state().count(Kind::Tenant), 1);
}
