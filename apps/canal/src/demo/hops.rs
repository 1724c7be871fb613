//! Step: the cost of each hop of one path, measured under load: time, CPU and bytes per request. It
//! is the demo's last step.

use std::time::Duration;

use serde_json::Value;

use crate::dataplane::{self, AdminPage};
use crate::demo::demo_world::{DemoWorld, client};
use crate::demo::screen::{DemoOutput, Expectation};
use crate::demo::traffic::{DETAILS, at};
use crate::exit::VerbResult;
use crate::metrics;
use crate::output::TextTable;
use crate::running_world::HostKindFilter;

const DETAILS_POD: &str = "alpha/bookinfo/details-0";
/// Number of requests that are measured.
/// Background work of the hosts, such as probes and reports, then adds little to the cost of one.
const REQUESTS: u64 = 4_000;
/// Connections of the load. Nobody measured other numbers.
const CONNECTIONS: &str = "8";

/// One hop of the path: its name, its hosts, and the owner of its CPU time.
struct CostHop {
    what: &'static str,
    hosts: Vec<String>,
    counted: CpuOwner,
}

/// Owner of the CPU time of a hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CpuOwner {
    Mesh,
    Application,
    /// eBPF programs, whose time belongs to no process.
    Kernel,
}

/// Returns the hops of the path, in order.
fn hops(edges: Vec<String>, gateways: Vec<String>) -> [CostHop; 6] {
    let hop = |what, hosts, counted| CostHop {
        what,
        hosts,
        counted,
    };
    let one = |host: &str| vec![host.to_owned()];
    [
        hop(
            "client (load generator)",
            one("alpha/bookinfo/client-0"),
            CpuOwner::Application,
        ),
        hop("node proxy, source", one("alpha-n1"), CpuOwner::Mesh),
        hop("edges", edges, CpuOwner::Kernel),
        hop("gateways", gateways, CpuOwner::Mesh),
        hop("node proxy, destination", one("alpha-n2"), CpuOwner::Mesh),
        hop(
            "application (details)",
            one(DETAILS_POD),
            CpuOwner::Application,
        ),
    ]
}

/// Counters of the hosts of one hop.
#[derive(Debug, Clone, Copy, Default)]
struct HopCounters {
    cpu: Duration,
    rx_bytes: u64,
    tx_bytes: u64,
}

/// Returns the sum over a hop's hosts.
fn counters(world: &DemoWorld, hop: &CostHop) -> VerbResult<HopCounters> {
    let mut sum = HopCounters::default();
    for host in &hop.hosts {
        let uplink = world.running.uplink(host)?;
        sum.cpu += world.running.cpu(host)?.total();
        sum.rx_bytes += uplink.rx_bytes;
        sum.tx_bytes += uplink.tx_bytes;
    }
    Ok(sum)
}

fn all(world: &DemoWorld, hops: &[CostHop]) -> VerbResult<Vec<HopCounters>> {
    hops.iter().map(|hop| counters(world, hop)).collect()
}

/// Returns the milliseconds and requests that the gateways have measured so far.
async fn gateways_own(world: &DemoWorld) -> VerbResult<(f64, f64)> {
    let (mut ms, mut requests) = (0.0, 0.0);
    for gateway in world.running.names_of(HostKindFilter::Gateway)? {
        let text = dataplane::get(&world.running, &gateway, AdminPage::Metrics, "/metrics").await?;
        let samples = metrics::parse(&String::from_utf8_lossy(&text));
        ms += metrics::sum(&samples, "istio_request_duration_milliseconds_sum", &[]);
        requests += metrics::sum(&samples, "istio_request_duration_milliseconds_count", &[]);
    }
    Ok((ms, requests))
}

pub(crate) async fn run(
    world: &DemoWorld,
    screen: &mut DemoOutput,
) -> VerbResult<Vec<Expectation>> {
    let url = format!("http://{}/details/0", at(false, DETAILS, 9080));
    let count = REQUESTS.to_string();
    let argv = [
        "canal-samples",
        "load",
        &url,
        "-n",
        &count,
        "-c",
        CONNECTIONS,
    ];
    let hops = hops(
        world.running.names_of(HostKindFilter::Edge)?,
        world.running.names_of(HostKindFilter::Gateway)?,
    );
    // Counters are read immediately before and after the load, so that little else is counted.
    let (before, before_ms) = (all(world, &hops)?, gateways_own(world).await?);
    let meshed = world.report(&client("alpha"), &argv).await?;
    let (after, after_ms) = (all(world, &hops)?, gateways_own(world).await?);
    // The application alone gets the same load. The difference is the mesh's share.
    let argv = [
        "canal-samples",
        "load",
        "http://127.0.0.1:9080/details/0",
        "-n",
        &count,
        "-c",
        CONNECTIONS,
    ];
    let alone = world.report(DETAILS_POD, &argv).await?;
    screen.note(lines(&hops, &before, &after, &meshed, &alone));
    // The gateway's own clock measures from the request's head to the end of its response.
    // At least one request counts, so that a run without requests does not divide by zero.
    let mean_ms = (after_ms.0 - before_ms.0) / (after_ms.1 - before_ms.1).max(1.0);
    screen.note(vec![format!(
        "from the gateway on:    mean {mean_ms:.2} ms, by its own clock"
    )]);
    // The run without the mesh is not judged: its failures would be the application's.
    let failed = &meshed["failed"];
    Ok(vec![Expectation::new(
        *failed == 0 && meshed["succeeded"] == REQUESTS,
        format!("{REQUESTS} requests are measured, none fails"),
        format!("{failed} failed"),
    )])
}

fn lines(
    hops: &[CostHop],
    before: &[HopCounters],
    after: &[HopCounters],
    meshed: &Value,
    alone: &Value,
) -> Vec<String> {
    // A run without requests must not divide by zero.
    let requests = meshed["requests"].as_f64().unwrap_or(0.0).max(1.0);
    let mut table = TextTable::new(&[
        "HOP",
        "HOST",
        "CPU PER REQUEST",
        "RECEIVED PER REQUEST",
        "SENT PER REQUEST",
    ]);
    let mut mesh_us = 0.0;
    for ((hop, before), after) in hops.iter().zip(before).zip(after) {
        // A counter that began anew must show as 0 and not as a huge number.
        let us = after.cpu.saturating_sub(before.cpu).as_secs_f64() * 1e6 / requests;
        let bytes = |after: u64, before: u64| {
            format!("{:.0} B", after.saturating_sub(before) as f64 / requests)
        };
        // Only the mesh's own processes count as its cost.
        if hop.counted == CpuOwner::Mesh {
            mesh_us += us;
        }
        table.row([
            hop.what.to_owned(),
            match hop.hosts.as_slice() {
                [one] => one.clone(),
                several => format!("{} hosts", several.len()),
            },
            if hop.counted == CpuOwner::Kernel {
                "in the kernel".to_owned()
            } else {
                format!("{us:.0} us")
            },
            bytes(after.rx_bytes, before.rx_bytes),
            bytes(after.tx_bytes, before.tx_bytes),
        ]);
    }
    let latency = |report: &Value| {
        // A report without this field is shown as NaN, since 0 would look like a measured latency.
        let ms = |name: &str| report["latency_ms"][name].as_f64().unwrap_or(f64::NAN);
        format!(
            "p50 {:.2} ms, p99 {:.2} ms, p99.9 {:.2} ms, {:.0} requests per second",
            ms("p50"),
            ms("p99"),
            ms("p999"),
            // Every report has the rate; without a success it is 0.
            report["rps"].as_f64().unwrap_or(0.0)
        )
    };
    let mut lines = vec![String::new()];
    lines.extend(table.lines());
    lines.extend([
        String::new(),
        format!("through the mesh:       {}", latency(meshed)),
        format!("without the mesh:       {}", latency(alone)),
        format!("the mesh's own CPU:     {mesh_us:.0} us per request over three processes, {CONNECTIONS} connections; what eBPF costs: docs/performance.md"),
    ]);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn costs_are_per_request_and_the_meshs_share_is_summed() {
        let before = [HopCounters::default(); 6];
        let after = [HopCounters {
            cpu: Duration::from_millis(10),
            rx_bytes: 5_000,
            tx_bytes: 7_000,
        }; 6];
        let report = json!({ "requests": 100, "latency_ms": { "p50": 1.0, "p99": 2.0, "p999": 3.0 }, "rps": 50.0 });
        let hops = hops(vec!["edge-1".into(), "edge-2".into()], vec!["gw-1".into()]);
        let lines = lines(&hops, &before, &after, &report, &report).join("\n");
        assert!(
            lines.contains("100 us") && lines.contains("50 B") && lines.contains("70 B"),
            "{lines}"
        );
        assert!(
            lines.contains("300 us per request"),
            "two node proxies and a gateway at 100 us each: {lines}"
        );
        assert!(
            lines.contains("2 hosts") && lines.contains("in the kernel"),
            "{lines}"
        );
    }
}
