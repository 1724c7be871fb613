//! Steps: a weighted split that is measured over thousands of requests, and a header route.

use serde_json::Value;

use crate::demo::demo_world::{DemoWorld, client};
use crate::demo::screen::Expectation;
use crate::demo::traffic::{PAGE, REVIEWS, at};
use crate::exit::VerbResult;

/// Number of measured requests. With a share of 10 %, four standard deviations of 3,000 draws are
/// 2.2 points.
const REQUESTS: u64 = 3_000;
/// Maximum difference from the configured share, in percentage points: four standard deviations.
const POINTS_OFF_MAX: f64 = 2.2;

/// Returns the share of `version` among all answers, in percent; 0 if there are none.
pub(crate) fn share(report: &Value, version: &str) -> f64 {
    let counts = report["served_by"].as_object();
    let count = |name: &str| {
        counts
            .and_then(|c| c.get(name))
            .and_then(Value::as_u64)
            .unwrap_or(0) as f64
    };
    let all: f64 = counts
        .into_iter()
        .flatten()
        .filter_map(|(_, n)| n.as_u64())
        .map(|n| n as f64)
        .sum();
    if all == 0.0 {
        0.0
    } else {
        100.0 * count(version) / all
    }
}

/// Returns the counts as text: `2701 reviews-v1, 299 reviews-v2, 0 failed`.
pub(crate) fn counts(report: &Value) -> String {
    let each = report["served_by"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, n)| format!("{n} {name}"));
    each.chain([format!("{} failed", report["failed"])])
        .collect::<Vec<_>>()
        .join(", ")
}

pub(crate) async fn run(world: &DemoWorld) -> VerbResult<Vec<Expectation>> {
    let direct = measure(
        world,
        "alpha",
        &format!("http://{}/reviews/0", at(false, REVIEWS, 9080)),
        "x-served-by",
    )
    .await?;
    let paged = measure(
        world,
        "beta",
        &format!("http://{}/productpage", at(true, PAGE, 9080)),
        "x-reviews-served-by",
    )
    .await?;
    Ok(vec![direct, paged])
}

async fn measure(
    world: &DemoWorld,
    tenant: &str,
    url: &str,
    header: &str,
) -> VerbResult<Expectation> {
    let count = REQUESTS.to_string();
    let argv = [
        "canal-samples",
        "load",
        url,
        "-n",
        &count,
        "-c",
        // Nobody measured other numbers of connections.
        "8",
        "--served-by",
        header,
    ];
    let report = world.report(&client(tenant), &argv).await?;
    let share = share(&report, "reviews-v2");
    let is_met = report["failed"] == 0
        && report["succeeded"] == REQUESTS
        && (share - 10.0).abs() <= POINTS_OFF_MAX;
    let expected = format!(
        "{tenant}: of {REQUESTS} requests to {url}, 10 % ± {POINTS_OFF_MAX} by v2, none failed"
    );
    Ok(Expectation::new(
        is_met,
        expected,
        format!("{share:.1} % by v2 ({})", counts(&report)),
    ))
}

/// Checks that the tester always gets v3, and that others never do.
pub(crate) async fn header_route(world: &DemoWorld) -> VerbResult<Vec<Expectation>> {
    let mut expectations = Vec::new();
    for (tenant, v6) in [("alpha", true), ("beta", false)] {
        let url = format!("http://{}/productpage", at(v6, PAGE, 9080));
        for (user, version, want) in [
            ("tester", "reviews-v3", 100.0),
            ("reader", "reviews-v3", 0.0),
        ] {
            let header = format!("end-user: {user}");
            let argv = [
                "canal-samples",
                "load",
                &url,
                "-n",
                // A wrong 1 % of the requests shows among 200 in 87 of 100 runs.
                "200",
                "-c",
                "4",
                "-H",
                &header,
                "--served-by",
                "x-reviews-served-by",
            ];
            let report = world.report(&client(tenant), &argv).await?;
            let share = share(&report, version);
            let is_met = report["failed"] == 0 && (share - want).abs() < f64::EPSILON;
            expectations.push(Expectation::new(
                is_met,
                format!("{tenant}: with `{header}`, {want:.0} % of 200 pages show {version}"),
                counts(&report),
            ));
        }
    }
    Ok(expectations)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn shares_are_of_all_answers() {
        let report = json!({ "served_by": { "reviews-v1": 90, "reviews-v2": 10 }, "failed": 0 });
        assert_eq!(share(&report, "reviews-v2"), 10.0);
        assert_eq!(share(&json!({}), "reviews-v2"), 0.0);
        assert_eq!(counts(&report), "90 reviews-v1, 10 reviews-v2, 0 failed");
    }
}
