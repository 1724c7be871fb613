//! Step: tenants with the same addresses and names use them at the same time, and each is served by
//! its own pods. A service of only one tenant does not exist for the other.

use serde_json::Value;

use crate::demo::canary::counts;
use crate::demo::demo_world::{DemoWorld, client, parse};
use crate::demo::screen::Expectation;
use crate::demo::traffic::{DETAILS, at, family};
use crate::exit::{ExitStatus, VerbError, VerbResult};

/// Requests of each tenant to one address, sent at the same time.
/// One that reaches the other tenant fails the step. The number was chosen.
const REQUESTS: &str = "500";
/// A service that only beta has.
/// Any number that no other tenant's service has.
const VAULT: u8 = 40;
/// A pod that every tenant has, at the same address.
const POD: &str = "bookinfo/details-0";

pub(crate) async fn run(world: &DemoWorld) -> VerbResult<Vec<Expectation>> {
    let mut expectations = Vec::new();
    for v6 in [false, true] {
        expectations.push(
            apart(
                world,
                &format!("the service at {}", at(v6, DETAILS, 9080)),
                &at(v6, DETAILS, 9080),
            )
            .await?,
        );
    }
    let (own, same) = (pod_address(world, "alpha")?, pod_address(world, "beta")?);
    let pods = apart(
        world,
        &format!("the pod at {own}:9080"),
        &format!("{own}:9080"),
    )
    .await?;
    expectations.push(Expectation {
        is_met: pods.is_met && own == same,
        ..pods
    });
    for v6 in [false, true] {
        expectations.push(hidden(world, v6).await?);
    }
    expectations.push(
        refused(
            world,
            "the mesh port of that pod",
            &format!("http://{own}:15008/"),
        )
        .await?,
    );
    Ok(expectations)
}

/// Checks that both tenants can dial one address at the same time, and reach their own pods.
async fn apart(world: &DemoWorld, what: &str, address: &str) -> VerbResult<Expectation> {
    let url = format!("http://{address}/details/0");
    let argv = ["canal-samples", "load", &url, "-n", REQUESTS, "-c", "4"];
    let (alpha, beta) = (
        world.spawn(&client("alpha"), &argv)?,
        world.spawn(&client("beta"), &argv)?,
    );
    let (alpha, beta) = (
        parse(&world.listen(alpha, &argv).await?, &argv)?,
        parse(&world.listen(beta, &argv).await?, &argv)?,
    );
    let is_met = is_own(&alpha, "alpha") && is_own(&beta, "beta");
    let expected = format!(
        "alpha and beta send {REQUESTS} requests each to {what} at the same time; each gets answers from its own pods"
    );
    Ok(Expectation::new(
        is_met,
        expected,
        format!("alpha: {}; beta: {}", counts(&alpha), counts(&beta)),
    ))
}

/// Returns whether all requests were answered, and only by `tenant`'s own pods.
pub(crate) fn is_own(report: &Value, tenant: &str) -> bool {
    let own = format!("details-{tenant}");
    let answered = report["served_by"]
        .as_object()
        .is_some_and(|by| by.len() == 1 && by.contains_key(&own));
    answered && report["failed"] == 0 && report["succeeded"].as_u64() > Some(0)
}

/// Checks that a service of one tenant does not exist for the other.
async fn hidden(world: &DemoWorld, v6: bool) -> VerbResult<Expectation> {
    let url = format!("http://{}/details/0", at(v6, VAULT, 9080));
    let own = world.run(&client("beta"), &curl(&url)).await?;
    let other = world.run(&client("alpha"), &curl(&url)).await?;
    let is_met = own.code == Some(0) && other.code != Some(0) && other.stdout.is_empty();
    let expected = format!(
        "beta's vault over {} answers beta, and does not exist for alpha",
        family(v6)
    );
    Ok(Expectation::new(
        is_met,
        expected,
        format!(
            "beta: exit {}; alpha: {}",
            own.code.unwrap_or(-1),
            other.brief()
        ),
    ))
}

fn curl(url: &str) -> [&str; 7] {
    [
        "curl",
        "-sS",
        "--fail-with-body",
        "--max-time",
        "3",
        "-g",
        url,
    ]
}

/// Checks that a connection is refused. A refusal is an error of the connection, not an answer.
async fn refused(world: &DemoWorld, what: &str, url: &str) -> VerbResult<Expectation> {
    let output = world.run(&client("alpha"), &curl(url)).await?;
    let is_met = output.code != Some(0) && output.stdout.is_empty();
    Ok(Expectation::new(
        is_met,
        format!("alpha's client is refused at {what}, {url}"),
        output.brief(),
    ))
}

fn pod_address(world: &DemoWorld, tenant: &str) -> VerbResult<String> {
    let pod = format!("{tenant}/{POD}");
    let hosts = world.running.hosts()?;
    let host = hosts.iter().find(|host| host.environment.name == pod);
    let address = host.and_then(|host| host.environment.ip4);
    let missing = || {
        VerbError::new(
            ExitStatus::Missing,
            pod.clone(),
            "has no IPv4 address",
            "write an IPv4 range into the tenant's `podCidrs`",
        )
    };
    Ok(address.ok_or_else(missing)?.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn one_answer_of_another_tenant_is_too_many() {
        for (name, served_by, failed, want) in [
            ("own only", json!({ "details-alpha": 500 }), 0, true),
            (
                "one of beta's",
                json!({ "details-alpha": 499, "details-beta": 1 }),
                0,
                false,
            ),
            ("one failed", json!({ "details-alpha": 499 }), 1, false),
            ("nobody", json!({}), 0, false),
        ] {
            let report =
                json!({ "served_by": served_by, "failed": failed, "succeeded": 500 - failed });
            assert_eq!(is_own(&report, "alpha"), want, "{name}");
        }
    }
}
