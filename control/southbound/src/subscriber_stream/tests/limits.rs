//! S7: limits on what one stream can make the controller store.

use super::*;

const MIB: usize = 1 << 20;

fn subscribe(names: impl Iterator<Item = String>) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest { resource_names_subscribe: names.collect(), ..request(ResourceKind::Service) }
}

#[test]
fn names_are_bounded_in_bytes_each_and_together() {
    let catalog = Catalog::default();
    let mut s = SubscriberStream::new(gateway("g1"), SessionLimits::default());
    let long = "a".repeat(NAME_BYTES_MAX + 1);
    let refused = s.handle_request(subscribe([long.clone()].into_iter()), &catalog).unwrap_err();
    assert_eq!((refused.reason(), refused), ("name_too_long", StreamLimitError::NameTooLong { bytes: 1025, limit: 1024 }));
    let held = DeltaDiscoveryRequest { initial_resource_versions: [(long, "v".into())].into(), ..request(ResourceKind::Service) };
    assert_eq!(s.handle_request(held, &catalog).unwrap_err().reason(), "name_too_long");
    assert_eq!(s.progress().resources, 0, "nothing of a refused request is kept");
    // Each request has 1,000 names of 1 KiB: far fewer than may be named, and the stream ends at 16 MiB.
    let batch = |n: usize| subscribe((0..1000).map(move |at| format!("{n:03}-{at:0>1020}")));
    let mut taken = 0;
    let refused = (0..30).find_map(|n| match s.handle_request(batch(n), &catalog) {
        Ok(_) => {
            taken += 1000 * 1024;
            None
        }
        Err(refused) => Some(refused),
    });
    assert_eq!(refused.unwrap().reason(), "name_bytes");
    assert!(taken <= 16 * MIB && taken > 15 * MIB, "{taken}");
}

/// Names that the controller has itself are shared, however many of them a large data plane lists.
#[test]
fn names_of_the_catalog_cost_a_stream_nothing() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a", "b"]));
    let limits = SessionLimits { stream_name_bytes: 20, ..SessionLimits::default() };
    let mut s = SubscriberStream::new(gateway("g1"), limits);
    s.handle_request(subscribe(["alpha/shop/a", "alpha/shop/b"].map(String::from).into_iter()), &w.catalog).unwrap();
    s.handle_request(subscribe(["alpha/shop/foreign"].map(String::from).into_iter()), &w.catalog).unwrap();
    s.handle_request(subscribe(["alpha/shop/foreign"].map(String::from).into_iter()), &w.catalog).unwrap();
    assert_eq!(
        s.handle_request(subscribe(["alpha/shop/more"].map(String::from).into_iter()), &w.catalog).unwrap_err().reason(),
        "name_bytes"
    );
}

#[test]
fn requests_for_unknown_types_are_not_queued_without_end() {
    let w = StreamWorld::default();
    let mut s = SubscriberStream::new(gateway("g1"), SessionLimits::default());
    let unknown = || DeltaDiscoveryRequest { type_url: "type.googleapis.com/x.Y".into(), ..DeltaDiscoveryRequest::default() };
    for _ in 0..PENDING_MAX {
        assert_eq!(s.handle_request(unknown(), &w.catalog).unwrap(), SubscriberMessage::UnknownType);
    }
    assert_eq!(s.handle_request(unknown(), &w.catalog).unwrap_err().reason(), "unknown_types_pending");
    // A subscriber that reads responses and acknowledges none is sent at most as many.
    let mut s = SubscriberStream::new(gateway("g1"), SessionLimits::default());
    let mut sent = 0;
    for _ in 0..PENDING_MAX {
        s.handle_request(unknown(), &w.catalog).unwrap();
        sent += usize::from(s.next_response(&w.catalog).is_some());
    }
    s.handle_request(unknown(), &w.catalog).unwrap();
    assert!(sent == PENDING_MAX && s.next_response(&w.catalog).is_none(), "{sent}");
}
