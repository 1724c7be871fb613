//! Step: SIGKILL for the busiest gateway replica under load; counts what was lost and how long.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::dataplane::{self, Page};
use crate::demo::screen::Promise;
use crate::demo::stage::{Stage, client, parse};
use crate::demo::traffic::{REVIEWS, at};
use crate::exit::{Exit, Failure, Outcome};
use crate::metrics;
use crate::realm::Kind;

/// Requests per second over [`CONNECTIONS`].
const RATE: &str = "300";
/// At most this many requests are in flight, so at most this many may be lost.
const CONNECTIONS: u64 = 16;
const SECONDS: &str = "8";
/// The replica dies this long after the load began.
const KILLED_AFTER: Duration = Duration::from_secs(3);

pub(crate) async fn run(stage: &Stage) -> Outcome<Vec<Promise>> {
    let url = format!("http://{}/reviews/0", at(false, REVIEWS, 9080));
    let connections = CONNECTIONS.to_string();
    let argv = ["canal-samples", "load", &url, "-r", RATE, "-c", &connections, "-d", SECONDS, "--timeline"];
    let load = stage.spawn(&client("alpha"), &argv)?;
    let started = Instant::now();
    tokio::time::sleep(KILLED_AFTER / 2).await;
    let before = served(stage).await?;
    tokio::time::sleep(KILLED_AFTER / 2).await;
    let victim = decide_victim(&before, &served(stage).await?)?;
    let killed_ms = started.elapsed().as_millis() as u64;
    stage.realm.kill(&victim)?;
    let report = parse(&stage.listen(load, &argv).await?, &argv)?;
    Ok(judge(&victim, killed_ms, &report))
}

/// Requests that each replica has served.
async fn served(stage: &Stage) -> Outcome<BTreeMap<String, f64>> {
    let mut served = BTreeMap::new();
    for gateway in stage.realm.names_of(Kind::Gateway)? {
        let text = dataplane::get(&stage.realm, &gateway, Page::Metrics, "/metrics").await?;
        let samples = metrics::parse(&String::from_utf8_lossy(&text));
        served.insert(gateway, metrics::sum(&samples, "istio_requests_total", &[]));
    }
    Ok(served)
}

/// The replica that carries the most of the load.
fn decide_victim(before: &BTreeMap<String, f64>, now: &BTreeMap<String, f64>) -> Outcome<String> {
    let since = |name: &String| now[name] - before.get(name).copied().unwrap_or(0.0);
    let most = now.keys().max_by(|a, b| since(a).total_cmp(&since(b)));
    most.cloned().ok_or_else(|| Failure::new(Exit::Missing, "gateway", "there is no replica", ""))
}

/// `killed_ms`: when, after the load began.
fn judge(victim: &str, killed_ms: u64, report: &Value) -> Vec<Promise> {
    let failed = report["failed"].as_u64().unwrap_or(u64::MAX);
    let gap = report["gap_ms_max"].as_u64().unwrap_or(u64::MAX);
    let last = report["failed_last_ms"].as_u64();
    let healed_ms = last.map_or(0, |last| last.saturating_sub(killed_ms));
    vec![
        Promise::new(
            failed <= CONNECTIONS && report["succeeded"].as_u64() > Some(0),
            format!("{victim} killed at {RATE} requests per second: at most the {CONNECTIONS} in flight are lost"),
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
    fn the_replica_that_carries_the_load_dies() {
        let served = |a, b| BTreeMap::from([("gw-1".to_owned(), a), ("gw-2".to_owned(), b)]);
        assert_eq!(decide_victim(&served(900.0, 10.0), &served(910.0, 300.0)).unwrap(), "gw-2");
        assert_eq!(decide_victim(&BTreeMap::new(), &served(2.0, 1.0)).unwrap(), "gw-1");
        assert!(decide_victim(&BTreeMap::new(), &BTreeMap::new()).is_err());
    }

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
            let held: Vec<bool> = judge("gw-1", 3000, &report).iter().map(|p| p.held).collect();
            assert_eq!(held, want, "{name}");
        }
    }
}
