//! Two pods of one node through the gateway, compared with pod to pod: the cost of a request's
//! detour through the tier in latency and in CPU (Canal, appendix A), without and with a delay of
//! the link between the node and the tier. Both paths are in the same world and take turns.

use std::time::Duration;

use anyhow::Context;
use canal_world::Impairment;
use serde_json::{Value, json};

use crate::record::FigureFile;
use crate::scene::{TierBenchWorld, machine_us, number};

/// One-way delays of the node's link. `None`: the link has no relay.
/// They make round trips of 0.5 and 1 ms, as between hosts of one AZ and of two.
const LINKS: [Option<Duration>; 3] = [
    None,
    Some(Duration::from_micros(250)),
    Some(Duration::from_micros(500)),
];

/// Rate and length of the load, and how often it runs.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct OneNodeSize {
    /// Requests per second of the load at a stated rate
    #[arg(long, default_value_t = 300)]
    rate: u32,
    /// Seconds of each load
    #[arg(long, default_value_t = 4)]
    seconds: u32,
    /// Rounds; the two paths take turns
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// Result of one load.
#[derive(Clone, Copy)]
struct OneNodeFigures {
    p50: f64,
    p99: f64,
    machine_us: f64,
    per_second: f64,
    failed: f64,
}

pub(crate) fn run(size: &OneNodeSize, record: &FigureFile) -> anyhow::Result<()> {
    println!(
        "| link between node and tier, one way | path | load | p50 ms | p99 ms | spread of p50 | CPU of the machine per request, µs | requests a second | failed |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut figures = Vec::new();
    for link in LINKS {
        let scene = TierBenchWorld::up("one-node.yaml", |topology, _| {
            for node in topology
                .tenants
                .iter_mut()
                // Only the mesh's nodes have the link to the tier; pods of `plain` reach each other
                // directly.
                .filter(|tenant| tenant.name == "mesh")
                .flat_map(|tenant| &mut tenant.nodes)
            {
                node.impairment = link.map(Impairment::delay);
            }
        })?;
        let server = scene
            .world
            .host("plain/default/web-0")?
            .ip4()
            .context("the server has no address")?;
        // The responses are small, so that the figures show the path and not the copying of bytes.
        let paths = [
            (
                "through the gateway",
                "mesh/default/client-0",
                "http://web.default:80/blob?size=100".to_owned(),
            ),
            (
                "pod to pod",
                "plain/default/client-0",
                format!("http://{server}:8080/blob?size=100"),
            ),
        ];
        for (_, client, url) in &paths {
            scene.until_served(client, url)?;
        }
        figures.extend(measure(&scene, link, &paths, size)?);
    }
    record.put("one_node", json!({ "rows": figures }))
}

fn measure(
    scene: &TierBenchWorld,
    link: Option<Duration>,
    paths: &[(&str, &str, String); 2],
    size: &OneNodeSize,
) -> anyhow::Result<Vec<Value>> {
    let (rate, seconds) = (size.rate.to_string(), size.seconds.to_string());
    let name = link.map_or("no relay".to_owned(), |delay| format!("{delay:?}"));
    let loads = [
        // The stated rate, which 4 connections carry, shows latency. 16 connections saturate the
        // path, which shows throughput and CPU.
        ("stated rate", vec!["-c", "4", "-r", &rate]),
        ("saturated", vec!["-c", "16"]),
    ];
    let mut figures = Vec::new();
    for (load, flags) in &loads {
        let mut rounds: [Vec<OneNodeFigures>; 2] = Default::default();
        for _ in 0..size.rounds {
            // The paths take turns, so that a change of the machine affects both.
            for (at, (_, client, url)) in paths.iter().enumerate() {
                let before = machine_us()?;
                let argv: Vec<&str> = ["load", url, "-d", &seconds]
                    .into_iter()
                    .chain(flags.iter().copied())
                    .collect();
                let report = scene.sample(client, &argv)?;
                let (spent, requests) = (machine_us()? - before, number(&report, "succeeded")?);
                let latency = |field: &str| {
                    report["latency_ms"][field]
                        .as_f64()
                        .with_context(|| format!("latency_ms.{field}: {report}"))
                };
                rounds[at].push(OneNodeFigures {
                    p50: latency("p50")?,
                    p99: latency("p99")?,
                    machine_us: spent / requests,
                    per_second: requests / f64::from(size.seconds),
                    failed: number(&report, "failed")?,
                });
            }
        }
        for ((path, ..), rounds) in paths.iter().zip(&rounds) {
            figures.push(print(&name, path, load, rounds));
        }
    }
    Ok(figures)
}

fn print(link: &str, path: &str, load: &str, rounds: &[OneNodeFigures]) -> Value {
    let sorted = |field: fn(&OneNodeFigures) -> f64| {
        let mut all: Vec<f64> = rounds.iter().map(field).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    let median = |field: fn(&OneNodeFigures) -> f64| sorted(field)[rounds.len() / 2];
    let p50s = sorted(|of| of.p50);
    let (p50, p99, machine) = (
        median(|of| of.p50),
        median(|of| of.p99),
        median(|of| of.machine_us),
    );
    let (per_second, failed) = (
        median(|of| of.per_second),
        rounds.iter().map(|of| of.failed).sum::<f64>(),
    );
    let (least, most) = (p50s[0], p50s[p50s.len() - 1]);
    println!(
        "| {link} | {path} | {load} | {p50:.2} | {p99:.2} | {least:.2}–{most:.2} | {machine:.0} | {per_second:.0} | {failed} |"
    );
    json!({ "link": link, "path": path, "load": load, "p50_ms": p50, "p99_ms": p99, "machine_us": machine, "per_second": per_second })
}
