//! Step: SIGKILL for one of two gateway replicas under load; counts what was lost and how long.

use std::time::Duration;

use serde_json::Value;

use crate::demo::screen::Promise;
use crate::demo::stage::{Stage, client, parse};
use crate::demo::traffic::{REVIEWS, addresses};
use crate::exit::Outcome;

/// Requests per second over [`CONNECTIONS`].
const RATE: &str = "300";
/// At most this many requests are in flight, so at most this many may be lost.
const CONNECTIONS: u64 = 16;
const SECONDS: &str = "8";
/// The replica dies this long after the load began.
const KILLED_AFTER: Duration = Duration::from_secs(3);
/// The replica in the client's own AZ, which carries its traffic.
const VICTIM: &str = "gw-1";

pub(crate) async fn run(stage: &Stage) -> Outcome<Vec<Promise>> {
    let url = format!("http://{}/reviews/0", addresses("alpha").at(false, REVIEWS, 9080));
    let connections = CONNECTIONS.to_string();
    let argv = ["canal-samples", "load", &url, "-r", RATE, "-c", &connections, "-d", SECONDS, "--timeline"];
    let load = stage.spawn(&client("alpha"), &argv)?;
    tokio::time::sleep(KILLED_AFTER).await;
    stage.realm.kill(VICTIM)?;
    let report = parse(&stage.listen(load, &argv).await?, &argv)?;
    Ok(judge(&report))
}

fn judge(report: &Value) -> Vec<Promise> {
    let failed = report["failed"].as_u64().unwrap_or(u64::MAX);
    let gap = report["gap_ms_max"].as_u64().unwrap_or(u64::MAX);
    let killed_ms = KILLED_AFTER.as_millis() as u64;
    let last = report["failed_last_ms"].as_u64();
    let healed_ms = last.map_or(0, |last| last.saturating_sub(killed_ms));
    vec![
        Promise::new(
            failed <= CONNECTIONS && report["succeeded"].as_u64() > Some(0),
            format!("{VICTIM} killed at {RATE} requests per second: at most the {CONNECTIONS} in flight are lost"),
            format!("{failed} of {} lost {}", report["requests"], report["failed_by_kind"]),
        ),
        Promise::new(
            healed_ms < 1_000 && gap < 1_000,
            "traffic is whole again within 1 s",
            match last {
                Some(_) => format!("the last failure came {healed_ms} ms after the kill; the longest silence was {gap} ms"),
                None => format!("nothing failed; the longest silence was {gap} ms"),
            },
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn loss_is_bounded_by_what_was_in_flight_and_by_time() {
        for (name, failed, last, gap, want) in [
            ("nothing lost", 0, Value::Null, 10, [true, true]),
            ("those in flight", 16, json!(3100), 200, [true, true]),
            ("too many", 17, json!(3100), 200, [false, true]),
            ("too long", 5, json!(4500), 200, [true, false]),
            ("silence", 5, json!(3100), 1500, [true, false]),
        ] {
            let report = json!({ "failed": failed, "succeeded": 100, "requests": 2400, "failed_last_ms": last, "gap_ms_max": gap });
            let held: Vec<bool> = judge(&report).iter().map(|p| p.held).collect();
            assert_eq!(held, want, "{name}");
        }
    }
}
