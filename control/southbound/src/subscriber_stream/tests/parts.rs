//! Parts of a response: a subscriber that joins them receives what another one receives whole, in
//! messages of limited size, and its answer counts only after the last part.

use canal_wire::southbound::parts::ResponseJoiner;
use prost::Message;

use super::*;

/// Limit that a part of two Services exceeds and one Service does not.
const PART_BYTES: usize = 400;

fn subscriber(part_bytes: usize) -> TestSubscriber {
    let mut c = TestSubscriber::with_limits(
        gateway("g1"),
        SessionLimits {
            part_bytes,
            ..SessionLimits::default()
        },
    );
    c.session
        .handle_request_alone(DeltaDiscoveryRequest {
            node: Some(canal_wire::discovery::Node {
                client_features: vec![RESPONSE_PARTS_FEATURE.into()],
                ..Default::default()
            }),
            ..request(ResourceKind::Tenant)
        })
        .unwrap();
    c
}

/// Takes all messages, joins and answers them. Returns the number of messages and the largest size.
fn settle_in_parts(c: &mut TestSubscriber, world: &StreamWorld) -> (usize, usize) {
    let mut joiner = ResponseJoiner::default();
    let (mut messages, mut largest) = (0, 0);
    while let Some(part) = c.session.next_response(&world.catalog) {
        messages += 1;
        largest = largest.max(part.encoded_len());
        assert!(
            messages < 1000,
            "the stream sends the same part again and again"
        );
        if let Some(response) = joiner.add(part).unwrap() {
            c.answer(response);
        }
    }
    (messages, largest)
}

#[test]
fn joined_parts_are_the_response_that_others_receive_whole() {
    let mut w = StreamWorld::default();
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    w.set("alpha", &shop(&names));
    let mut whole = TestSubscriber::new(gateway("g1"));
    let mut in_parts = subscriber(PART_BYTES);
    // The second step replaces half of the Services, the third removes the tenant.
    for step in ["first", "change", "removal"] {
        match step {
            "change" => w.set("alpha", &shop(&["a", "c", "e", "v", "w", "x", "y", "z"])),
            "removal" => w.remove("alpha"),
            _ => {}
        }
        let log = whole.settle(&w);
        let before = in_parts.log.len();
        let (messages, largest) = settle_in_parts(&mut in_parts, &w);
        assert_eq!(in_parts.log[before..], log, "{step}");
        assert_eq!(in_parts.resources, whole.resources, "{step}");
        assert!(messages > log.len(), "{step}: nothing was split");
        assert!(
            largest < 2 * PART_BYTES,
            "{step}: a part has {largest} bytes"
        );
    }
    assert!(in_parts.is_converged());
}

#[test]
fn a_resource_larger_than_a_part_is_a_part_of_its_own() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a", "b", "c"]));
    let mut c = subscriber(1);
    let (messages, _) = settle_in_parts(&mut c, &w);
    assert!(messages > 10 && c.is_converged(), "{messages}");
}

#[test]
fn an_answer_before_the_last_part_is_stale() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a", "b", "c"]));
    let mut c = subscriber(PART_BYTES);
    let mut joiner = ResponseJoiner::default();
    let mut early_answers = 0;
    while let Some(part) = c.session.next_response(&w.catalog) {
        let (url, nonce, has_more) = (part.type_url.clone(), part.nonce.clone(), part.more_parts);
        let answer = |error_detail| DeltaDiscoveryRequest {
            type_url: url.clone(),
            response_nonce: nonce.clone(),
            error_detail,
            ..DeltaDiscoveryRequest::default()
        };
        if has_more {
            let before = c.session.progress();
            for error in [None, Some(WireStatus::default())] {
                assert_eq!(
                    c.session.handle_request_alone(answer(error)).unwrap(),
                    SubscriberMessage::Stale
                );
            }
            assert_eq!(c.session.progress(), before);
            early_answers += 1;
        }
        if let Some(response) = joiner.add(part).unwrap() {
            c.answer(response);
        }
    }
    assert!(early_answers > 0 && c.is_converged());
}
