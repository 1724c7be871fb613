//! Step: a tenant with nodes without any process of Canal finds its services through the mesh's
//! DNS, and is served by the same gateways.

use crate::demo::canary::counts;
use crate::demo::demo_world::{DemoWorld, client};
use crate::demo::isolation::is_own;
use crate::demo::screen::Expectation;
use crate::exit::VerbResult;

/// Name of the tenant's only service.
pub(crate) const NAME: &str = "details.bookinfo.svc.cluster.local";
/// Name of a service of another tenant.
const FOREIGN: &str = "vault.bookinfo.svc.cluster.local";
/// Exit code of curl for a name without an address.
const NO_SUCH_NAME: i32 = 6;

pub(crate) async fn run(world: &DemoWorld) -> VerbResult<Vec<Expectation>> {
    let hosts = world.running.hosts()?;
    let nodes: Vec<_> = hosts
        .iter()
        .filter(|host| host.environment.name.starts_with("gamma-n"))
        .collect();
    let running = nodes
        .iter()
        .filter(|node| node.environment.job.is_some())
        .count();
    let mut expectations = vec![Expectation::new(
        running == 0 && !nodes.is_empty(),
        "gamma's nodes run no process of the mesh",
        format!(
            "{} nodes, which run {running} of the mesh's processes",
            nodes.len()
        ),
    )];
    // Clients without a proxy reach the gateway by its own address, which each family has.
    for family in ["-4", "-6"] {
        let url = format!("http://{NAME}:9080/details/0");
        let argv = [
            "curl",
            "-sS",
            "--fail-with-body",
            // It only ends a request that hangs.
            "--max-time",
            "5",
            family,
            "-o",
            "/dev/null",
            "-w",
            "%{http_code} at %{remote_ip}",
            &url,
        ];
        let output = world.run(&client("gamma"), &argv).await?;
        let is_met = output.code == Some(0) && output.stdout.starts_with("200 ");
        expectations.push(Expectation::new(
            is_met,
            format!("gamma: curl {family} finds {NAME} at a gateway address, and is answered"),
            output.brief(),
        ));
    }
    let url = format!("http://{NAME}:9080/details/0");
    let report = world
        .report(
            &client("gamma"),
            // One answer of another tenant's pod among 500 fails the step; the number was chosen.
            &["canal-samples", "load", &url, "-n", "500", "-c", "4"],
        )
        .await?;
    expectations.push(Expectation::new(
        is_own(&report, "gamma"),
        "gamma: 500 requests are answered by its own pod",
        counts(&report),
    ));
    let url = format!("http://{FOREIGN}:9080/");
    let output = world
        .run(&client("gamma"), &["curl", "-sS", "--max-time", "5", &url])
        .await?;
    expectations.push(Expectation::new(
        output.code == Some(NO_SUCH_NAME),
        "gamma: the name of beta's vault does not exist",
        output.brief(),
    ));
    Ok(expectations)
}
