//! Step: the busiest gateway replica gets SIGKILL under load. The step counts the lost requests and
//! measures how long requests are lost.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::dataplane::{self, AdminPage};
use crate::demo::demo_world::{DemoWorld, client, parse};
use crate::demo::screen::Expectation;
use crate::demo::traffic::{REVIEWS, at};
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::metrics;
use crate::running_world::HostKindFilter;

/// Requests per second over [`CONNECTIONS`].
/// At most [`CONNECTIONS`] of the 2,400 requests may be lost, so that a small loss shows.
const RATE: &str = "300";
/// Number of connections. At most this many requests are in flight, so at most this many may be
/// lost.
/// Enough that the killed replica has some of them.
const CONNECTIONS: u64 = 16;
/// It leaves 5 s after the kill ([`KILLED_AFTER`]): an edge skips a dead replica after 0.4 s, and
/// others reset its sessions after 3 s.
const SECONDS: &str = "8";
/// Time from the start of the load to the kill.
/// The connections exist by then.
const KILLED_AFTER: Duration = Duration::from_secs(3);

pub(crate) async fn run(world: &DemoWorld) -> VerbResult<Vec<Expectation>> {
    let url = format!("http://{}/reviews/0", at(false, REVIEWS, 9080));
    let connections = CONNECTIONS.to_string();
    let argv = [
        "canal-samples",
        "load",
        &url,
        "-r",
        RATE,
        "-c",
        &connections,
        "-d",
        SECONDS,
        "--timeline",
    ];
    let load = world.spawn(&client("alpha"), &argv)?;
    let started = Instant::now();
    tokio::time::sleep(KILLED_AFTER / 2).await;
    let before = served(world).await?;
    tokio::time::sleep(KILLED_AFTER / 2).await;
    let victim = decide_victim(&before, &served(world).await?)?;
    let killed_ms = started.elapsed().as_millis() as u64;
    world.running.kill(&victim)?;
    let report = parse(&world.listen(load, &argv).await?, &argv)?;
    Ok(evaluate(&victim, killed_ms, &report))
}

/// Returns the number of requests that each replica has served.
async fn served(world: &DemoWorld) -> VerbResult<BTreeMap<String, f64>> {
    let mut served = BTreeMap::new();
    for gateway in world.running.names_of(HostKindFilter::Gateway)? {
        let text = dataplane::get(&world.running, &gateway, AdminPage::Metrics, "/metrics").await?;
        let samples = metrics::parse(&String::from_utf8_lossy(&text));
        served.insert(gateway, metrics::sum(&samples, "istio_requests_total", &[]));
    }
    Ok(served)
}

/// Returns the replica that serves most of the load.
fn decide_victim(
    before: &BTreeMap<String, f64>,
    now: &BTreeMap<String, f64>,
) -> VerbResult<String> {
    let since = |name: &String| now[name] - before.get(name).copied().unwrap_or(0.0);
    let most = now.keys().max_by(|a, b| since(a).total_cmp(&since(b)));
    most.cloned().ok_or_else(|| {
        VerbError::new(
            ExitStatus::Missing,
            "gateway",
            "there is no replica",
            "add gateways to the topology",
        )
    })
}

/// Evaluates the report. `killed_ms` is the time of the kill after the start of the load.
fn evaluate(victim: &str, killed_ms: u64, report: &Value) -> Vec<Expectation> {
    let failed = report["failed"].as_u64().unwrap_or(u64::MAX);
    let gap = report["gap_ms_max"].as_u64().unwrap_or(u64::MAX);
    let last = report["failed_last_ms"].as_u64();
    let healed_ms = last.map_or(0, |last| last.saturating_sub(killed_ms));
    vec![
        Expectation::new(
            failed <= CONNECTIONS && report["succeeded"].as_u64() > Some(0),
            format!(
                "{victim} killed at {RATE} requests per second: at most the {CONNECTIONS} in flight are lost"
            ),
            format!(
                "{failed} of {} lost {}",
                report["requests"], report["failed_by_kind"]
            ),
        ),
        Expectation::new(
            healed_ms < 1_000 && gap < 1_000,
            "no request fails later than 1 s after the kill",
            match last {
                Some(_) => format!(
                    "the last failure came {healed_ms} ms after the kill; the longest silence was {gap} ms"
                ),
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
        assert_eq!(
            decide_victim(&served(900.0, 10.0), &served(910.0, 300.0)).unwrap(),
            "gw-2"
        );
        assert_eq!(
            decide_victim(&BTreeMap::new(), &served(2.0, 1.0)).unwrap(),
            "gw-1"
        );
        assert!(decide_victim(&BTreeMap::new(), &BTreeMap::new()).is_err());
    }

    #[test]
    fn loss_is_bounded_by_requests_in_flight_and_by_time() {
        for (name, failed, last, gap, want) in [
            ("nothing lost", 0, Value::Null, 10, [true, true]),
            ("those in flight", 16, json!(3100), 200, [true, true]),
            ("too many", 17, json!(3100), 200, [false, true]),
            ("too long", 5, json!(4500), 200, [true, false]),
            ("silence", 5, json!(3100), 1500, [true, false]),
        ] {
            let report = json!({ "failed": failed, "succeeded": 100, "requests": 2400, "failed_last_ms": last, "gap_ms_max": gap });
            let met: Vec<bool> = evaluate("gw-1", 3000, &report)
                .iter()
                .map(|p| p.is_met)
                .collect();
            assert_eq!(met, want, "{name}");
        }
    }
}
