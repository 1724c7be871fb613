//! Step: tenants with the same addresses and names dial them at the same time, and each is answered by its own; what only one of them has
//! does not exist for the other.

use serde_json::Value;

use crate::demo::canary::counts;
use crate::demo::screen::Promise;
use crate::demo::stage::{Stage, client, parse};
use crate::demo::traffic::{DETAILS, at, family};
use crate::exit::{Exit, Failure, Outcome};

/// Requests of each tenant, to one address, at the same time.
const REQUESTS: &str = "500";
/// A service that beta alone has.
const VAULT: u8 = 40;
/// A pod that every tenant has, at the same address.
const POD: &str = "bookinfo/details-0";

pub(crate) async fn run(stage: &Stage) -> Outcome<Vec<Promise>> {
    let mut promises = Vec::new();
    for v6 in [false, true] {
        promises.push(apart(stage, &format!("the service at {}", at(v6, DETAILS, 9080)), &at(v6, DETAILS, 9080)).await?);
    }
    let (own, same) = (pod_address(stage, "alpha")?, pod_address(stage, "beta")?);
    let pods = apart(stage, &format!("the pod at {own}:9080"), &format!("{own}:9080")).await?;
    promises.push(Promise { held: pods.held && own == same, ..pods });
    for v6 in [false, true] {
        promises.push(hidden(stage, v6).await?);
    }
    promises.push(refused(stage, "the mesh port of that pod", &format!("http://{own}:15008/")).await?);
    Ok(promises)
}

/// Both tenants dial one address at the same time.
async fn apart(stage: &Stage, what: &str, address: &str) -> Outcome<Promise> {
    let url = format!("http://{address}/details/0");
    let argv = ["canal-samples", "load", &url, "-n", REQUESTS, "-c", "4"];
    let (alpha, beta) = (stage.spawn(&client("alpha"), &argv)?, stage.spawn(&client("beta"), &argv)?);
    let (alpha, beta) = (parse(&stage.listen(alpha, &argv).await?, &argv)?, parse(&stage.listen(beta, &argv).await?, &argv)?);
    let held = is_own(&alpha, "alpha") && is_own(&beta, "beta");
    let expected = format!("alpha and beta ask {what} {REQUESTS} times each, at the same time; each is answered by its own pods");
    Ok(Promise::new(held, expected, format!("alpha: {}; beta: {}", counts(&alpha), counts(&beta))))
}

/// All answers came, and all from `tenant`'s own pods.
pub(crate) fn is_own(report: &Value, tenant: &str) -> bool {
    let own = format!("details-{tenant}");
    let answered = report["served_by"].as_object().is_some_and(|by| by.len() == 1 && by.contains_key(&own));
    answered && report["failed"] == 0 && report["succeeded"].as_u64() > Some(0)
}

/// What one tenant has is nothing for the other.
async fn hidden(stage: &Stage, v6: bool) -> Outcome<Promise> {
    let url = format!("http://{}/details/0", at(v6, VAULT, 9080));
    let own = stage.run(&client("beta"), &curl(&url)).await?;
    let other = stage.run(&client("alpha"), &curl(&url)).await?;
    let held = own.code == Some(0) && other.code != Some(0) && other.stdout.is_empty();
    let expected = format!("beta's vault over {} answers beta, and does not exist for alpha", family(v6));
    Ok(Promise::new(held, expected, format!("beta: exit {}; alpha: {}", own.code.unwrap_or(-1), other.brief())))
}

fn curl(url: &str) -> [&str; 7] {
    ["curl", "-sS", "--fail-with-body", "--max-time", "3", "-g", url]
}

/// A refusal is an error of the connection, not an answer.
async fn refused(stage: &Stage, what: &str, url: &str) -> Outcome<Promise> {
    let said = stage.run(&client("alpha"), &curl(url)).await?;
    let held = said.code != Some(0) && said.stdout.is_empty();
    Ok(Promise::new(held, format!("alpha's client is refused at {what}, {url}"), said.brief()))
}

fn pod_address(stage: &Stage, tenant: &str) -> Outcome<String> {
    let pod = format!("{tenant}/{POD}");
    let hosts = stage.realm.hosts()?;
    let host = hosts.iter().find(|host| host.seat.name == pod);
    let address = host.and_then(|host| host.seat.ip4);
    let missing = || Failure::new(Exit::Missing, pod.clone(), "has no IPv4 address", "");
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
            ("one of beta's", json!({ "details-alpha": 499, "details-beta": 1 }), 0, false),
            ("one failed", json!({ "details-alpha": 499 }), 1, false),
            ("nobody", json!({}), 0, false),
        ] {
            let report = json!({ "served_by": served_by, "failed": failed, "succeeded": 500 - failed });
            assert_eq!(is_own(&report, "alpha"), want, "{name}");
        }
    }
}
