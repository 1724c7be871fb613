//! S7, N1, N4: limits on what one stream can make the controller store, and that no limit ends a
//! stream for what a data plane holds.

use super::*;

const MIB: usize = 1 << 20;

fn subscribe(names: impl Iterator<Item = String>) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        resource_names_subscribe: names.collect(),
        ..request(ResourceKind::Service)
    }
}

#[test]
fn names_are_bounded_in_bytes_each_and_together() {
    let catalog = Catalog::default();
    let mut s = SubscriberStream::new(gateway("g1"), SessionLimits::default());
    // One byte more than NAME_BYTES_MAX.
    let long = "a".repeat(NAME_BYTES_MAX + 1);
    let refused = s
        .handle_request(subscribe([long.clone()].into_iter()), &catalog)
        .unwrap_err();
    assert_eq!(
        (refused.reason(), refused),
        (
            "name_too_long",
            StreamLimitError::NameTooLong {
                bytes: 1025,
                limit: 1024
            }
        )
    );
    let listed = list(ResourceKind::Service, [long.clone()].into_iter());
    s.handle_request(listed, &catalog).unwrap();
    assert_eq!(
        (s.progress().resources, s.take_names_out_of_scope()),
        (0, 1),
        "no resource has such a long name, so it is dropped"
    );
    // Each request has 1,000 names of 1 KiB, charged 1,280 bytes each: far fewer than may be named,
    // and the stream ends at 64 MiB.
    let batch = |n: usize| subscribe((0..1000).map(move |at| format!("{n:03}-{at:0>1020}")));
    let mut taken = 0;
    // 100 requests are 122 MiB, far more than the limit of 64 MiB.
    let refused = (0..100).find_map(|n| match s.handle_request(batch(n), &catalog) {
        Ok(_) => {
            taken += 1000 * 1280;
            None
        }
        Err(refused) => Some(refused),
    });
    assert_eq!(refused.unwrap().reason(), "name_bytes");
    assert!(
        // The last request that fits ends within one request, 1.2 MiB, of the limit.
        taken <= 64 * MIB && taken > 62 * MIB && s.name_bytes() == taken,
        "{taken}"
    );
}

/// Returns the first request of a data plane that holds these resources.
fn list(kind: ResourceKind, names: impl Iterator<Item = String>) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        initial_resource_versions: names.map(|name| (name, "v".to_string())).collect(),
        ..request(kind)
    }
}

/// Acknowledges every response, and returns the names that they removed.
fn removed(s: &mut SubscriberStream, w: &StreamWorld) -> BTreeSet<String> {
    let mut removed = BTreeSet::new();
    while let Some(r) = s.next_response(&w.catalog) {
        removed.extend(r.removed_resources);
        let ack = DeltaDiscoveryRequest {
            response_nonce: r.nonce,
            type_url: r.type_url,
            ..DeltaDiscoveryRequest::default()
        };
        assert_eq!(
            s.handle_request(ack, &w.catalog).unwrap(),
            SubscriberMessage::Ack
        );
    }
    removed
}

/// Subscribes to every kind and lists these services as held, spread over `requests` requests.
fn subscribe_holding(
    s: &mut SubscriberStream,
    w: &StreamWorld,
    names: &[String],
    requests: usize,
) -> Result<(), StreamLimitError> {
    for kind in ResourceKind::ALL {
        let names = if kind == ResourceKind::Service {
            names
        } else {
            &[]
        };
        let mut parts = names.chunks(names.len().div_ceil(requests).max(1));
        s.handle_request(
            list(kind, parts.next().unwrap_or_default().iter().cloned()),
            &w.catalog,
        )?;
        for part in parts {
            let listed = list(kind, part.iter().cloned());
            assert_eq!(
                s.handle_request(listed, &w.catalog)?,
                SubscriberMessage::Subscription
            );
        }
    }
    Ok(())
}

/// N1 and N1b: many more resources than one stream may name, and than one request can list, are
/// removed, and the stream goes on.
#[test]
fn a_providers_data_plane_is_never_refused_for_its_held_names() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a"]));
    let limits = SessionLimits {
        names: 10,
        stream_name_bytes: 1_000,
        ..SessionLimits::default()
    };
    let mut s = SubscriberStream::new(gateway("g1"), limits);
    let gone: Vec<String> = (0..20_000)
        .map(|n| format!("{}/shop/{n}", ["alpha", "deleted"][n % 2]))
        .collect();
    subscribe_holding(&mut s, &w, &gone, 7).unwrap();
    assert_eq!(s.name_bytes(), 0, "only what it subscribes to is charged");
    assert_eq!(removed(&mut s, &w), gone.into_iter().collect());
    let left = w.catalog.tenants[&tenant("alpha")].entries.len();
    assert!(
        s.progress().resources <= left + 1,
        "{} of {left} and a manifest",
        s.progress().resources
    );
    assert!(
        s.held_resources
            .owners()
            .all(|owner| *owner == Some(tenant("alpha"))),
        "nothing is left of a removed tenant"
    );
    // A part that comes after the first batch counts too.
    s.handle_request(
        list(
            ResourceKind::Service,
            ["alpha/shop/late".to_string()].into_iter(),
        ),
        &w.catalog,
    )
    .unwrap();
    assert_eq!(removed(&mut s, &w), ["alpha/shop/late".to_string()].into());
}

/// A node's names that are in no catalog are charged until their removal was acknowledged; a node
/// that lists too many is refused.
#[test]
fn a_tenants_listed_names_are_charged_until_they_are_forgotten() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a"]));
    let names: Vec<String> = (0..100)
        .map(|n| format!("alpha/shop/gone-{n:02}"))
        .collect();
    let bytes = 100 * (NAME_OVERHEAD_BYTES + "alpha/shop/gone-00".len());
    let limits = |stream_name_bytes| SessionLimits {
        stream_name_bytes,
        ..SessionLimits::default()
    };
    let mut s = SubscriberStream::new(node("alpha", "n1"), limits(bytes));
    let known = ["alpha/shop/a".to_string()];
    subscribe_holding(&mut s, &w, &[&names[..], &known].concat(), 2).unwrap();
    assert_eq!(s.name_bytes(), bytes, "the catalog's own name is free");
    assert_eq!(removed(&mut s, &w), names.iter().cloned().collect());
    assert_eq!(s.name_bytes(), 0);
    let mut s = SubscriberStream::new(node("alpha", "n1"), limits(bytes - 1));
    let refused = subscribe_holding(&mut s, &w, &names, 1).unwrap_err();
    assert_eq!(
        (refused.reason(), s.held_resources.count(), s.name_bytes()),
        ("name_bytes", 0, 0),
        "no name of a refused request is stored"
    );
}

/// N4: a node of alpha can hold nothing of other tenants. Such names are not stored; the next
/// response removes some of them.
#[test]
fn names_outside_the_scope_are_dropped_at_once_and_cost_nothing() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a"]));
    w.set("beta", &shop(&["b"]));
    let mut s = SubscriberStream::new(node("alpha", "n1"), SessionLimits::default());
    // The three requests list 100,000 names of another tenant.
    let foreign: Vec<String> = (0..100_000).map(|n| format!("beta/shop/{n}")).collect();
    subscribe_holding(&mut s, &w, &foreign, 3).unwrap();
    assert_eq!(
        (
            s.name_bytes(),
            s.held_resources.count(),
            s.take_names_out_of_scope()
        ),
        (0, 0, 100_000)
    );
    // OUT_OF_SCOPE_BYTES_MAX, 256 KiB, divided by the price of a name leaves fewer than 1,000.
    assert!(s.out_of_scope.len() < 1_000, "{}", s.out_of_scope.len());
    let answer = removed(&mut s, &w);
    // At about 270 bytes for each name, some 970 of the names were kept for their removal.
    assert!(
        answer.len() > 900 && answer.is_subset(&foreign.iter().cloned().collect()),
        "{}",
        answer.len()
    );
    assert!(s.out_of_scope.is_empty());
    // A refused removal is not stored either.
    subscribe_holding(&mut s, &w, &foreign[..3], 1).unwrap();
    let mut nacked = BTreeSet::new();
    while let Some(r) = s.next_response(&w.catalog) {
        let is_removal = !r.removed_resources.is_empty();
        nacked.extend(r.removed_resources);
        let error_detail = is_removal.then(|| WireStatus {
            // Only the removals are refused.
            message: "no".into(),
            ..WireStatus::default()
        });
        let answer = DeltaDiscoveryRequest {
            response_nonce: r.nonce,
            type_url: r.type_url,
            error_detail,
            ..DeltaDiscoveryRequest::default()
        };
        s.handle_request(answer, &w.catalog).unwrap();
    }
    assert_eq!((nacked.len(), s.refused.len()), (3, 0));
}

/// Names that the controller has itself are shared, however many of them a large data plane lists.
#[test]
fn names_of_the_catalog_cost_a_stream_nothing() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a", "b"]));
    let limits = SessionLimits {
        stream_name_bytes: NAME_OVERHEAD_BYTES + 20,
        ..SessionLimits::default()
    };
    let mut s = SubscriberStream::new(gateway("g1"), limits);
    s.handle_request(
        subscribe(
            ["alpha/shop/a", "alpha/shop/b"]
                .map(String::from)
                .into_iter(),
        ),
        &w.catalog,
    )
    .unwrap();
    s.handle_request(
        subscribe(["alpha/shop/foreign"].map(String::from).into_iter()),
        &w.catalog,
    )
    .unwrap();
    s.handle_request(
        subscribe(["alpha/shop/foreign"].map(String::from).into_iter()),
        &w.catalog,
    )
    .unwrap();
    assert_eq!(
        s.handle_request(
            subscribe(["alpha/shop/more"].map(String::from).into_iter()),
            &w.catalog
        )
        .unwrap_err()
        .reason(),
        "name_bytes"
    );
}

#[test]
fn requests_for_unknown_types_are_not_queued_without_end() {
    let w = StreamWorld::default();
    let mut s = SubscriberStream::new(gateway("g1"), SessionLimits::default());
    let unknown = || DeltaDiscoveryRequest {
        type_url: "type.googleapis.com/x.Y".into(),
        ..DeltaDiscoveryRequest::default()
    };
    for _ in 0..PENDING_MAX {
        assert_eq!(
            s.handle_request(unknown(), &w.catalog).unwrap(),
            SubscriberMessage::UnknownType
        );
    }
    assert_eq!(
        s.handle_request(unknown(), &w.catalog)
            .unwrap_err()
            .reason(),
        "unknown_types_pending"
    );
    // A subscriber that reads responses and acknowledges none is sent at most as many.
    let mut s = SubscriberStream::new(gateway("g1"), SessionLimits::default());
    let mut sent = 0;
    for _ in 0..PENDING_MAX {
        s.handle_request(unknown(), &w.catalog).unwrap();
        sent += usize::from(s.next_response(&w.catalog).is_some());
    }
    s.handle_request(unknown(), &w.catalog).unwrap();
    assert!(
        sent == PENDING_MAX && s.next_response(&w.catalog).is_none(),
        "{sent}"
    );
}
