//! A tier that grows from two replicas to six under the load of meshed clients.

use canal_e2e::scaleout::{REACHED_MIN, grow, up};

use crate::bars::{Bar, Bound};

pub(crate) fn run() -> Vec<Bar> {
    let figures = grow(&up("bench-scaleout"), true);
    let mut bars = vec![Bar::new(
        format!(
            "requests failed while the tier grew, {} counted after it",
            figures.requests
        ),
        figures.failed as f64,
        Bound::AtMost(0.0),
    )];
    bars.extend(figures.shares.iter().map(|share| {
        let name = format!(
            "{}: share of the requests / share of the buckets",
            share.replica
        );
        Bar::new(
            name,
            share.of_requests / share.of_heads,
            Bound::Within(0.75, 1.25),
        )
    }));
    for lone in &figures.alone {
        bars.push(Bar::new(
            format!("one client, {}: replicas reached of six", lone.load),
            lone.replicas as f64,
            Bound::AtLeast(REACHED_MIN as f64),
        ));
        bars.push(Bar::new(
            format!("one client, {}: requests failed", lone.load),
            lone.failed as f64,
            Bound::AtMost(0.0),
        ));
    }
    bars
}
