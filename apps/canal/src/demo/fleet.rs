//! Step: an operator drains a gateway replica, revokes the drain, and replaces another replica,
//! under load of clients that reuse their connections. No request may fail.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::demo::demo_world::{DemoWorld, client, parse};
use crate::demo::proxyless;
use crate::demo::screen::{DemoOutput, Expectation};
use crate::demo::traffic::{DETAILS, at};
use crate::exit::{ExitStatus, VerbError, VerbResult};

/// Requests per second of a tenant with node proxies, and of one without.
/// They are low, because both loads and the whole mesh share one machine.
const RATES: [(&str, &str); 2] = [("alpha", "150"), ("gamma", "50")];
/// Duration of the load, which is longer than the changes take.
const SECONDS: &str = "30";
/// Time before the first change.
/// The clients have connections by then, so that there are sessions to move.
const LEAD: Duration = Duration::from_secs(2);
/// Time limit for a drained replica to have no session left.
/// A draining replica waits 5 s for buckets of other replicas' sessions
/// (docs/design/0003-cloud-tier.md); this is twice as long.
const EMPTY_WITHIN: Duration = Duration::from_secs(10);
/// Time limit for a new replica to serve in the place of an old one. Nobody measured this value;
/// the old one is drained before, so it is above [`EMPTY_WITHIN`].
const REPLACED_WITHIN: Duration = Duration::from_secs(30);

/// A row of `canal gateway list -o json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReplicaRow {
    pub(crate) name: String,
    pub(crate) backend: String,
    pub(crate) state: String,
    pub(crate) sessions: u64,
}

/// Returns the replicas as the controller reports them.
pub(crate) async fn replicas(world: &DemoWorld) -> VerbResult<Vec<ReplicaRow>> {
    let text = world
        .canal(&["gateway", "list", "-o", "json"])
        .await?
        .join("\n");
    let value: Value = serde_json::from_str(&text)
        .map_err(|problem| VerbError::failed("canal gateway list", problem, ""))?;
    let word = |r: &Value, field: &str| r[field].as_str().unwrap_or_default().to_owned();
    let row = |r: &Value| ReplicaRow {
        name: word(r, "name"),
        backend: word(r, "backend"),
        state: word(r, "state"),
        sessions: r["sessions"].as_u64().unwrap_or(0),
    };
    Ok(value["replicas"]
        .as_array()
        .into_iter()
        .flatten()
        .map(row)
        .filter(|r| r.state != "gone")
        .collect())
}

/// Returns the replica with the most sessions among those for which `wanted` is true.
pub(crate) fn busiest(
    replicas: &[ReplicaRow],
    wanted: impl Fn(&ReplicaRow) -> bool,
) -> VerbResult<ReplicaRow> {
    let most = replicas
        .iter()
        .filter(|r| wanted(r))
        .max_by_key(|r| r.sessions);
    most.cloned().ok_or_else(|| {
        VerbError::new(
            ExitStatus::Missing,
            "canal gateway list",
            "no such replica is registered",
            "read the gateways' logs with `canal logs`",
        )
    })
}

pub(crate) async fn run(
    world: &DemoWorld,
    screen: &mut DemoOutput,
) -> VerbResult<Vec<Expectation>> {
    let urls = [
        format!("http://{}/details/0", at(false, DETAILS, 9080)),
        format!("http://{}:9080/details/0", proxyless::NAME),
    ];
    let mut loads = Vec::new();
    for ((tenant, rate), url) in RATES.iter().zip(&urls) {
        let argv = [
            "canal-samples",
            "load",
            url,
            "-r",
            rate,
            "-c",
            // Some connections for each of the replicas, so that a drain has sessions to move.
            "8",
            "-d",
            SECONDS,
        ];
        loads.push((tenant, world.spawn(&client(tenant), &argv)?, argv));
    }
    tokio::time::sleep(LEAD).await;
    screen.note(titled(
        "canal gateway list",
        world.canal(&["gateway", "list"]).await?,
    ));
    let drained = drain(world).await?;
    let (replaced, lines) = replace(world).await?;
    screen.note(titled("canal gateway list, after the replacement", lines));
    let mut expectations = vec![drained, replaced];
    for (tenant, load, argv) in loads {
        let report = parse(&world.listen(load, &argv).await?, &argv)?;
        expectations.push(evaluate(tenant, &report));
    }
    Ok(expectations)
}

fn titled(title: &str, lines: Vec<String>) -> Vec<String> {
    [String::new(), format!("$ {title}")]
        .into_iter()
        .chain(lines)
        .collect()
}

/// Drains the busiest replica until no session is left, and revokes the drain.
async fn drain(world: &DemoWorld) -> VerbResult<Expectation> {
    let busiest = busiest(&replicas(world).await?, |_| true)?;
    let started = Instant::now();
    let output = world
        // Longer than `EMPTY_WITHIN`, so that a slow drain is reported with its time.
        .canal(&["gateway", "drain", &busiest.name, "--timeout", "30"])
        .await?;
    let took = started.elapsed();
    world.canal(&["gateway", "undrain", &busiest.name]).await?;
    let expected = format!(
        "`canal gateway drain {}`: its {} sessions move to other replicas within {} s",
        busiest.name,
        busiest.sessions,
        EMPTY_WITHIN.as_secs()
    );
    Ok(Expectation::new(
        busiest.sessions > 0 && took < EMPTY_WITHIN,
        expected,
        format!("after {:.1} s: {}", took.as_secs_f64(), output.join(" ")),
    ))
}

/// Replaces the busiest replica by a new one of its backend.
async fn replace(world: &DemoWorld) -> VerbResult<(Expectation, Vec<String>)> {
    let old = busiest(&replicas(world).await?, |r| r.state == "active")?;
    let started = Instant::now();
    let output = world
        // The verb waits for as long as the expectation allows (`REPLACED_WITHIN`).
        .canal(&["gateway", "replace", &old.name, "--timeout", "30"])
        .await?;
    let took = started.elapsed();
    let now = replicas(world).await?;
    let new = now
        .iter()
        .find(|r| r.backend == old.backend && r.name != old.name && r.state == "active");
    let is_met = new.is_some() && now.iter().all(|r| r.name != old.name) && took < REPLACED_WITHIN;
    let expected = format!(
        "`canal gateway replace {}`: a new replica of {} takes over within {} s",
        old.name,
        old.backend,
        REPLACED_WITHIN.as_secs()
    );
    let lines = world.canal(&["gateway", "list"]).await?;
    Ok((
        Expectation::new(
            is_met,
            expected,
            format!("after {:.1} s: {}", took.as_secs_f64(), output.join(" ")),
        ),
        lines,
    ))
}

fn evaluate(tenant: &str, report: &Value) -> Expectation {
    let how = if tenant == "gamma" {
        "without a node proxy"
    } else {
        "through node proxies"
    };
    let is_met = report["failed"] == 0 && report["succeeded"].as_u64() > Some(0);
    let expected =
        format!("{tenant}, {how}: meanwhile 0 requests fail, over persistent connections");
    Expectation::new(
        is_met,
        expected,
        format!(
            "{} of {} failed; the longest silence was {} ms",
            report["failed"], report["requests"], report["gap_ms_max"]
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_busiest_matching_replica_is_selected() {
        let row = |name: &str, state: &str, sessions| ReplicaRow {
            name: name.into(),
            backend: "b1".into(),
            state: state.into(),
            sessions,
        };
        let all = [
            row("a", "active", 3),
            row("b", "draining", 9),
            row("c", "active", 5),
        ];
        assert_eq!(busiest(&all, |_| true).unwrap().name, "b");
        assert_eq!(busiest(&all, |r| r.state == "active").unwrap().name, "c");
        assert!(busiest(&all, |_| false).is_err());
    }

    #[test]
    fn one_failure_or_a_long_silence_fails_the_expectation() {
        for (failed, succeeded, want) in [(0, 10, true), (1, 9, false), (0, 0, false)] {
            assert_eq!(
                evaluate(
                    "alpha",
                    &json!({ "failed": failed, "succeeded": succeeded, "requests": 10 })
                )
                .is_met,
                want
            );
        }
    }
}
