//! S7: what one stream may make the controller remember.

use super::*;

const MIB: usize = 1 << 20;

fn subscribe(names: impl Iterator<Item = String>) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest { resource_names_subscribe: names.collect(), ..request(Kind::Service) }
}

#[test]
fn names_are_bounded_in_bytes_each_and_together() {
    let catalog = Catalog::default();
    let mut s = Session::new(gateway("g1"), SessionLimits::default());
    let long = "a".repeat(NAME_BYTES_MAX + 1);
    let refused = s.hear(subscribe([long.clone()].into_iter()), &catalog).unwrap_err();
    assert_eq!((refused.reason(), refused), ("name_too_long", SessionError::NameTooLong { bytes: 1025, limit: 1024 }));
    let held = DeltaDiscoveryRequest { initial_resource_versions: [(long, "v".into())].into(), ..request(Kind::Service) };
    assert_eq!(s.hear(held, &catalog).unwrap_err().reason(), "name_too_long");
    assert_eq!(s.progress().resources, 0, "nothing of a refused request is kept");
    // 1,000 names of 1 KiB per request: far fewer than may be named, and ended at 16 MiB.
    let batch = |n: usize| subscribe((0..1000).map(move |at| format!("{n:03}-{at:0>1020}")));
    let mut taken = 0;
    let refused = (0..30).find_map(|n| match s.hear(batch(n), &catalog) {
        Ok(_) => {
            taken += 1000 * 1024;
            None
        }
        Err(refused) => Some(refused),
    });
    assert_eq!(refused.unwrap().reason(), "name_bytes");
    assert!(taken <= 16 * MIB && taken > 15 * MIB, "{taken}");
}

/// Names that the controller has itself are shared, however many a large data plane brings back.
#[test]
fn names_of_the_catalog_cost_a_stream_nothing() {
    let mut w = World::default();
    w.set("alpha", &shop(&["a", "b"]));
    let limits = SessionLimits { stream_name_bytes: 20, ..SessionLimits::default() };
    let mut s = Session::new(gateway("g1"), limits);
    s.hear(subscribe(["alpha/shop/a", "alpha/shop/b"].map(String::from).into_iter()), &w.catalog).unwrap();
    s.hear(subscribe(["alpha/shop/foreign"].map(String::from).into_iter()), &w.catalog).unwrap();
    s.hear(subscribe(["alpha/shop/foreign"].map(String::from).into_iter()), &w.catalog).unwrap();
    assert_eq!(s.hear(subscribe(["alpha/shop/more"].map(String::from).into_iter()), &w.catalog).unwrap_err().reason(), "name_bytes");
}

#[test]
fn requests_for_unknown_types_are_not_queued_without_end() {
    let w = World::default();
    let mut s = Session::new(gateway("g1"), SessionLimits::default());
    let unknown = || DeltaDiscoveryRequest { type_url: "type.googleapis.com/x.Y".into(), ..DeltaDiscoveryRequest::default() };
    for _ in 0..PENDING_MAX {
        assert_eq!(s.hear(unknown(), &w.catalog).unwrap(), Heard::UnknownType);
    }
    assert_eq!(s.hear(unknown(), &w.catalog).unwrap_err().reason(), "unknown_types_pending");
    // One that reads its answers and acknowledges none is not sent more than as many.
    let mut s = Session::new(gateway("g1"), SessionLimits::default());
    let mut sent = 0;
    for _ in 0..PENDING_MAX {
        s.hear(unknown(), &w.catalog).unwrap();
        sent += usize::from(s.next_response(&w.catalog).is_some());
    }
    s.hear(unknown(), &w.catalog).unwrap();
    assert!(sent == PENDING_MAX && s.next_response(&w.catalog).is_none(), "{sent}");
}
