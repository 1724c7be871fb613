//! Step: the canary's weights change twenty times under load; not one request may fail, and the last word counts.

use std::time::Duration;

use crate::demo::canary::{counts, share};
use crate::demo::screen::Promise;
use crate::demo::stage::{Stage, client, parse};
use crate::demo::traffic::{PAGE, REVIEWS, at};
use crate::exit::Outcome;

/// Changes made.
const CHANGES: u32 = 20;
/// Load while they are made: pages per second, each three or four requests through the mesh.
const PAGES_PER_SECOND: &str = "100";
/// Longer than all changes take.
const LOAD_SECONDS: &str = "14";
/// Pause between changes.
const PAUSE: Duration = Duration::from_millis(300);

/// The demo's own route, with other weights.
pub(crate) fn route(v1: u32, v2: u32) -> String {
    let weighted = |version: &str, weight: u32| format!("name: reviews-{version}, port: 9080, weight: {weight}}}");
    let text = crate::scenery::ALPHA_ROUTES.replace(&weighted("v1", 90), &weighted("v1", v1));
    text.replace(&weighted("v2", 10), &weighted("v2", v2))
}

pub(crate) async fn run(stage: &Stage) -> Outcome<Vec<Promise>> {
    let (page4, page6) = (page(at(false, PAGE, 9080)), page(at(true, PAGE, 9080)));
    let argv = [
        "canal-samples",
        "load",
        &page4,
        &page6,
        "-r",
        PAGES_PER_SECOND,
        "-c",
        "16",
        "-d",
        LOAD_SECONDS,
        "--served-by",
        "x-reviews-served-by",
    ];
    let load = stage.spawn(&client("alpha"), &argv)?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut slowest = Duration::ZERO;
    for change in 1..=CHANGES {
        let v2 = 100 * change / CHANGES;
        slowest = slowest.max(stage.apply("alpha", "demo/alpha/routes.yaml", route(100 - v2, v2)).await?);
        tokio::time::sleep(PAUSE).await;
    }
    let report = parse(&stage.listen(load, &argv).await?, &argv)?;
    let requests = report["requests"].as_u64().unwrap_or(0);
    let none_failed = Promise::new(
        report["failed"] == 0 && requests >= 1_000,
        format!("{CHANGES} changes while {PAGES_PER_SECOND} pages per second are loaded: 0 fail"),
        format!("{} of {requests} pages failed; p99 {} ms; {}", report["failed"], report["latency_ms"]["p99"], counts(&report)),
    );
    let in_time = Promise::new(
        slowest < Duration::from_secs(1),
        "each change runs on every data plane within 1 s of `canal apply`",
        format!("the slowest took {} ms", slowest.as_millis()),
    );
    Ok(vec![none_failed, in_time, last_word(stage).await?])
}

fn page(address: String) -> String {
    format!("http://{address}/productpage")
}

/// After the last change everything goes to v2; then the demo's own weights are put back.
async fn last_word(stage: &Stage) -> Outcome<Promise> {
    let url = format!("http://{}/reviews/0", at(false, REVIEWS, 9080));
    let argv = ["canal-samples", "load", &url, "-n", "500", "-c", "4"];
    let report = stage.report(&client("alpha"), &argv).await?;
    stage.apply("alpha", "demo/alpha/routes.yaml", route(90, 10)).await?;
    let held = report["failed"] == 0 && share(&report, "reviews-v2") >= 100.0;
    Ok(Promise::new(held, "after the last change all 500 requests are served by v2", counts(&report)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_route_takes_any_weights() {
        for change in 0..=CHANGES {
            let v2 = 100 * change / CHANGES;
            let text = route(100 - v2, v2);
            let want = [format!("reviews-v1, port: 9080, weight: {}}}", 100 - v2), format!("reviews-v2, port: 9080, weight: {v2}}}")];
            assert!(want.iter().all(|w| text.contains(w)), "{text}");
        }
        assert_eq!(route(90, 10), crate::scenery::ALPHA_ROUTES);
    }
}
