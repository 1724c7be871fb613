//! Step: the canary's weights change twenty times under load. No request may fail, and the last
//! change must be in force at the end.

use std::time::Duration;

use crate::demo::canary::{counts, share};
use crate::demo::demo_world::{DemoWorld, client, parse};
use crate::demo::screen::Expectation;
use crate::demo::traffic::{PAGE, REVIEWS, at};
use crate::exit::VerbResult;

/// Number of weight changes under load.
/// Each moves 5 %, so that the weights go from 0 to 100 %.
const CHANGES: u32 = 20;
/// Load during the changes, in pages per second. Each page causes three or four requests through
/// the mesh.
/// With 30 pages in each pause between changes, each change meets requests.
const PAGES_PER_SECOND: &str = "100";
/// Duration of the load, which is longer than all changes take.
/// The start and the pauses take 7 s, which leaves 350 ms on average for each apply.
const LOAD_SECONDS: &str = "14";
/// Pause between two weight changes.
/// Shorter than the second in which a change must be in force, so that the load ends soon.
const PAUSE: Duration = Duration::from_millis(300);

/// Returns the demo's own route with other weights.
pub(crate) fn route(v1: u32, v2: u32) -> String {
    let weighted = |version: &str, weight: u32| {
        format!("name: reviews-{version}, port: 9080, weight: {weight}}}")
    };
    let text =
        crate::bundled_topology::ALPHA_ROUTES.replace(&weighted("v1", 90), &weighted("v1", v1));
    text.replace(&weighted("v2", 10), &weighted("v2", v2))
}

pub(crate) async fn run(world: &DemoWorld) -> VerbResult<Vec<Expectation>> {
    let (page4, page6) = (page(at(false, PAGE, 9080)), page(at(true, PAGE, 9080)));
    let argv = [
        "canal-samples",
        "load",
        &page4,
        &page6,
        "-r",
        PAGES_PER_SECOND,
        "-c",
        // A page takes some milliseconds, so that 16 connections carry 100 a second with ease.
        "16",
        "-d",
        LOAD_SECONDS,
        "--served-by",
        "x-reviews-served-by",
    ];
    let load = world.spawn(&client("alpha"), &argv)?;
    // The load must be running before the first change.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut slowest = Duration::ZERO;
    // Each change moves 5 %, so that the last one sends everything to v2.
    for change in 1..=CHANGES {
        let v2 = 100 * change / CHANGES;
        slowest = slowest.max(
            world
                .apply("alpha", "demo/alpha/routes.yaml", route(100 - v2, v2))
                .await?,
        );
        tokio::time::sleep(PAUSE).await;
    }
    let report = parse(&world.listen(load, &argv).await?, &argv)?;
    // A report without the number fails the check below.
    let requests = report["requests"].as_u64().unwrap_or(0);
    // A load that never ran has no failed requests either.
    let none_failed = Expectation::new(
        // The full load is 1,400 pages; a slow machine may load fewer.
        report["failed"] == 0 && requests >= 1_000,
        format!("{CHANGES} changes while {PAGES_PER_SECOND} pages per second are loaded: 0 fail"),
        format!(
            "{} of {requests} pages failed; p99 {} ms; {}",
            report["failed"],
            report["latency_ms"]["p99"],
            counts(&report)
        ),
    );
    let in_time = Expectation::new(
        // The bound was chosen: an operator does not wait longer after `canal apply` returned.
        slowest < Duration::from_secs(1),
        "each change runs on every data plane within 1 s of `canal apply`",
        format!("the slowest took {} ms", slowest.as_millis()),
    );
    Ok(vec![
        none_failed,
        in_time,
        check_final_weights(world).await?,
    ])
}

fn page(address: String) -> String {
    format!("http://{address}/productpage")
}

/// Checks that after the last change all requests go to v2, and then restores the demo's own
/// weights.
async fn check_final_weights(world: &DemoWorld) -> VerbResult<Expectation> {
    let url = format!("http://{}/reviews/0", at(false, REVIEWS, 9080));
    // A share of 1 % that still goes to v1 shows among 500 (0.7 % of such tries show none).
    let argv = ["canal-samples", "load", &url, "-n", "500", "-c", "4"];
    let report = world.report(&client("alpha"), &argv).await?;
    world
        .apply("alpha", "demo/alpha/routes.yaml", route(90, 10))
        .await?;
    // 100 % shows that no data plane has an earlier weight.
    let is_met = report["failed"] == 0 && share(&report, "reviews-v2") >= 100.0;
    Ok(Expectation::new(
        is_met,
        "after the last change all 500 requests are served by v2",
        counts(&report),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_route_takes_any_weights() {
        for change in 0..=CHANGES {
            let v2 = 100 * change / CHANGES;
            let text = route(100 - v2, v2);
            let want = [
                format!("reviews-v1, port: 9080, weight: {}}}", 100 - v2),
                format!("reviews-v2, port: 9080, weight: {v2}}}"),
            ];
            assert!(want.iter().all(|w| text.contains(w)), "{text}");
        }
        assert_eq!(route(90, 10), crate::bundled_topology::ALPHA_ROUTES);
    }
}
