//! A tier that grows under the load of clients behind node proxies: new replicas get their share of
//! the requests, and no request is lost.

use canal_e2e::scaleout::{REACHED_MIN, grow, up};
use canal_timing::{is_timed, timed};

#[test]
fn new_replicas_take_their_part_of_meshed_clients() {
    let mesh = up("e2e-scaleout");
    let figures = grow(&mesh, is_timed());
    assert_eq!(figures.failed, 0, "{figures:?}\n{}", mesh.logs());
    for lone in &figures.alone {
        assert!(lone.replicas >= REACHED_MIN && lone.failed == 0, "{lone:?}");
    }
    timed!(
        figures.requests > 1000,
        "more than 1000 requests are counted"
    );
    for share in &figures.shares {
        println!(
            "{}: {:.3} of the requests, {:.3} of the heads",
            share.replica, share.of_requests, share.of_heads
        );
        let is_fair = (0.75..=1.25).contains(&(share.of_requests / share.of_heads));
        let name = &share.replica;
        timed!(
            is_fair,
            "{name} gets the share of requests that it has of the buckets, within 25 %"
        );
    }
}
