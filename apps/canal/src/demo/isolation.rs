//! Step: one tenant's client dials the other tenant's service, its pod and its gateway address; all are refused.

use crate::demo::screen::Promise;
use crate::demo::stage::{Stage, client};
use crate::demo::traffic::{PAGE, addresses};
use crate::exit::{Exit, Failure, Outcome};

pub(crate) async fn run(stage: &Stage) -> Outcome<Vec<Promise>> {
    let beta = addresses("beta");
    let pod = pod_address(stage, "beta/bookinfo/productpage-0")?;
    let mut promises = Vec::new();
    for (what, address) in [
        ("beta's service over IPv4", beta.at(false, PAGE, 9080)),
        ("beta's service over IPv6", beta.at(true, PAGE, 9080)),
        ("a pod of beta", format!("{pod}:9080")),
        ("the mesh port of a pod of beta", format!("{pod}:15008")),
    ] {
        promises.push(refused(stage, what, &address).await?);
    }
    let url = format!("http://{}/productpage", beta.at(false, PAGE, 9080));
    let own = stage.run(&client("beta"), &curl(&url)).await?;
    promises.push(Promise::new(own.code == Some(0), "beta's own client still gets the page", format!("exit {:?}", own.code)));
    Ok(promises)
}

fn curl(url: &str) -> [&str; 7] {
    ["curl", "-sS", "--fail-with-body", "--max-time", "3", "-g", url]
}

/// A refusal is an error of the connection, not an answer: nothing of beta may be heard.
async fn refused(stage: &Stage, what: &str, address: &str) -> Outcome<Promise> {
    let url = format!("http://{address}/productpage");
    let said = stage.run(&client("alpha"), &curl(&url)).await?;
    let held = said.code != Some(0) && said.stdout.is_empty();
    Ok(Promise::new(held, format!("alpha's client is refused at {what}, {address}"), said.brief()))
}

fn pod_address(stage: &Stage, pod: &str) -> Outcome<String> {
    let hosts = stage.realm.hosts()?;
    let host = hosts.iter().find(|host| host.seat.name == pod);
    let address = host.and_then(|host| host.seat.ip4);
    let missing = || Failure::new(Exit::Missing, pod, "has no IPv4 address", "");
    Ok(address.ok_or_else(missing)?.to_string())
}
