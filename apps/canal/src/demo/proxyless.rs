//! Step: a tenant whose nodes run nothing of ours finds its services by the mesh's DNS, and is served by the same gateways.

use crate::demo::canary::counts;
use crate::demo::isolation::is_own;
use crate::demo::screen::Promise;
use crate::demo::stage::{Stage, client};
use crate::exit::Outcome;

/// The tenant's one service.
pub(crate) const NAME: &str = "details.bookinfo.svc.cluster.local";
/// A name that another tenant has.
const FOREIGN: &str = "vault.bookinfo.svc.cluster.local";
/// What curl says when a name has no address.
const NO_SUCH_NAME: i32 = 6;

pub(crate) async fn run(stage: &Stage) -> Outcome<Vec<Promise>> {
    let hosts = stage.realm.hosts()?;
    let nodes: Vec<_> = hosts.iter().filter(|host| host.seat.name.starts_with("gamma-n")).collect();
    let running = nodes.iter().filter(|node| node.seat.job.is_some()).count();
    let mut promises = vec![Promise::new(
        running == 0 && !nodes.is_empty(),
        "gamma's nodes run nothing of ours",
        format!("{} nodes, {running} of the mesh's processes on them", nodes.len()),
    )];
    for family in ["-4", "-6"] {
        let url = format!("http://{NAME}:9080/details/0");
        let argv =
            ["curl", "-sS", "--fail-with-body", "--max-time", "5", family, "-o", "/dev/null", "-w", "%{http_code} at %{remote_ip}", &url];
        let said = stage.run(&client("gamma"), &argv).await?;
        let held = said.code == Some(0) && said.stdout.starts_with("200 ");
        promises.push(Promise::new(held, format!("gamma: curl {family} finds {NAME} at a gateway address, and is answered"), said.brief()));
    }
    let url = format!("http://{NAME}:9080/details/0");
    let report = stage.report(&client("gamma"), &["canal-samples", "load", &url, "-n", "500", "-c", "4"]).await?;
    promises.push(Promise::new(is_own(&report, "gamma"), "gamma: 500 requests are answered by its own pod", counts(&report)));
    let url = format!("http://{FOREIGN}:9080/");
    let said = stage.run(&client("gamma"), &["curl", "-sS", "--max-time", "5", &url]).await?;
    promises.push(Promise::new(said.code == Some(NO_SUCH_NAME), "gamma: the name of beta's vault does not exist", said.brief()));
    Ok(promises)
}
