//! Compares two paths of a request into the gateway in one world: through edge and redirector, and
//! through a HAProxy in TCP mode on its own host, which the redirector replaces. The client pod,
//! the gateway process and the endpoint are the same; the two paths take turns.

use std::fmt::Write;

use anyhow::{Context, bail};
use serde_json::json;

use crate::load_rounds::LoadRounds;
use crate::record::FigureFile;
use crate::scene::{TierBenchWorld, machine_us, number};
use crate::spread::RoundSpread;

const CLIENT: &str = "hop/default/client-0";
/// Port on which the gateways listen for the load balancer, without a tunnel.
const PLAIN_PORT: u16 = 8099;
/// Port on which the load balancer listens.
const LB_PORT: u16 = 8098;
pub(crate) fn run(size: &LoadRounds, record: &FigureFile) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let config = dir.path().join("haproxy.cfg");
    let mut lb = None;
    let scene = TierBenchWorld::up("world.yaml", |topology, plan| {
        let address = |host: &str| plan.host(host).map(|h| h.ip4);
        // HAProxy warns without timeouts. No connection of the load is idle for as long.
        let mut text = String::from(
            "global\n  nbthread 1\ndefaults\n  mode tcp\n  timeout connect 2s\n  timeout client 60s\n  timeout server 60s\n",
        );
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(
            text,
            "listen gateways\n  bind :{LB_PORT}\n  balance roundrobin"
        );
        for gateway in &mut topology.gateways {
            // Gateways also listen without tunnels, as they would behind a load balancer.
            if let (Some(ip), Some(process)) = (address(&gateway.name), gateway.process.as_mut()) {
                let _ = writeln!(text, "  server {} {ip}:{PLAIN_PORT}", gateway.name);
                process.args.extend([
                    "--plain".to_string(),
                    format!("{ip}:{PLAIN_PORT}=hop/default/web:80"),
                ]);
            }
        }
        lb = address("lb").map(|ip| (ip, text));
    })?;
    let (ip, text) = lb.context("the world has a load balancer host")?;
    std::fs::write(&config, text)?;
    let config = config.to_string_lossy().into_owned();
    let mut balancer = scene
        .world
        .exec("lb", &["haproxy", "-db", "-f", &config])?
        .spawn()
        .context("haproxy; setup/install bench installs it")?;
    let paths = [
        ("edge and redirector", scene.web_url(CLIENT)?),
        (
            "HAProxy hop",
            // HAProxy forwards TCP, so the path and size are those of the other URL.
            format!("http://{ip}:{LB_PORT}/blob?size=100"),
        ),
    ];
    let outcome = compare(&scene, &paths, size, record);
    // The world's end kills it in any case.
    let _ = balancer.kill();
    let _ = balancer.wait();
    outcome
}

/// Result of one load on one path in one round.
#[derive(Clone, Copy)]
struct HopRound {
    per_second: f64,
    p50_ms: f64,
    p90_ms: f64,
    p99_ms: f64,
    machine_us: f64,
    balancer_us: f64,
    gateway_us: f64,
}

type Paths = [(&'static str, String); 2];

fn compare(
    scene: &TierBenchWorld,
    paths: &Paths,
    size: &LoadRounds,
    record: &FigureFile,
) -> anyhow::Result<()> {
    // The first request waits for connections and certificates, which must not count.
    for (name, url) in paths {
        scene
            .until_served(CLIENT, url)
            .with_context(|| (*name).to_string())?;
    }
    let stated = size
        .rates
        .iter()
        .map(|rate| HopLoad::Persistent(Some(*rate)));
    let loads: Vec<HopLoad> = stated
        .chain([HopLoad::Persistent(None), HopLoad::New])
        .collect();
    let mut rounds: Vec<[Vec<HopRound>; 2]> = vec![[Vec::new(), Vec::new()]; loads.len()];
    // Loads and paths take turns, so that a change of the machine affects all.
    for round in 1..=size.rounds {
        for (load, of_load) in loads.iter().zip(&mut rounds) {
            for ((name, url), of_path) in paths.iter().zip(of_load) {
                eprintln!("round {round}/{}: {name}, {}", size.rounds, load.name());
                of_path.push(measure(scene, name, url, *load, size)?);
            }
        }
    }
    println!(
        "| load | path | requests/s | p50 ms | p90 ms | p99 ms | whole machine's CPU per request, µs | HAProxy's process | gateway process |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for (load, both) in loads.iter().zip(&rounds) {
        show(&load.name(), paths, both);
    }
    // The cost model uses the first of `--rates`, by default the lowest: a load balancer with spare
    // capacity.
    let [tier, balancer] = &rounds[0];
    let of = |runs: &[HopRound], field: fn(&HopRound) -> f64| {
        RoundSpread::of(runs.iter().map(field)).median
    };
    let ms = |runs: &[HopRound]| json!({ "p50_ms": of(runs, |r| r.p50_ms), "p90_ms": of(runs, |r| r.p90_ms), "p99_ms": of(runs, |r| r.p99_ms), "machine_us": of(runs, |r| r.machine_us) });
    let (lb_us, gateway_us) = (
        of(balancer, |r| r.balancer_us),
        of(balancer, |r| r.gateway_us),
    );
    record.put("hop", json!({ "tier": ms(tier), "balancer": ms(balancer), "lb_us": lb_us, "gateway_us": gateway_us }))
}

/// Use of the client's connections.
#[derive(Clone, Copy)]
enum HopLoad {
    /// Persistent connections with this many requests per second; `None`: at the maximum rate.
    Persistent(Option<u32>),
    /// A new connection for each request, at the maximum rate.
    New,
}

impl HopLoad {
    fn name(self) -> String {
        match self {
            HopLoad::Persistent(Some(rate)) => format!("{rate} requests/s"),
            HopLoad::Persistent(None) => "as fast as answered".to_string(),
            HopLoad::New => "a connection per request".to_string(),
        }
    }
}

fn measure(
    scene: &TierBenchWorld,
    name: &str,
    url: &str,
    load: HopLoad,
    size: &LoadRounds,
) -> anyhow::Result<HopRound> {
    let (connections, seconds) = (size.connections.to_string(), size.seconds.to_string());
    // Without a rate, the load sends as fast as it is answered.
    let rate = if let HopLoad::Persistent(Some(rate)) = load {
        Some(rate.to_string())
    } else {
        None
    };
    let mut argv = vec!["load", url, "-c", &connections, "-d", &seconds];
    argv.extend(rate.iter().flat_map(|rate| ["-r", rate.as_str()]));
    if let HopLoad::New = load {
        argv.push("--no-keepalive");
    }
    let before = (machine_us()?, scene.cpu_us("lb")?, scene.gateways_us()?);
    let report = scene.sample(CLIENT, &argv)?;
    let (machine, balancer, gateway) = (
        machine_us()? - before.0,
        scene.cpu_us("lb")? - before.1,
        scene.gateways_us()? - before.2,
    );
    let requests = number(&report, "succeeded")?;
    // A failed request costs less than a served one, so a round with failures is no measurement.
    if number(&report, "failed")? > 0.0 || requests == 0.0 {
        bail!("{name}: requests failed: {report}");
    }
    let latency = |field: &str| {
        report["latency_ms"][field]
            .as_f64()
            .with_context(|| format!("latency_ms.{field}: {report}"))
    };
    Ok(HopRound {
        per_second: number(&report, "rps")?,
        p50_ms: latency("p50")?,
        p90_ms: latency("p90")?,
        p99_ms: latency("p99")?,
        machine_us: machine / requests,
        balancer_us: balancer / requests,
        gateway_us: gateway / requests,
    })
}

/// Prints one load's rows, and the comparison of the two paths.
fn show(load: &str, paths: &Paths, both: &[Vec<HopRound>; 2]) {
    let spread =
        |runs: &[HopRound], field: fn(&HopRound) -> f64| RoundSpread::of(runs.iter().map(field));
    for ((name, _), runs) in paths.iter().zip(both) {
        let of = |field| spread(runs, field);
        println!(
            "| {load} | {name} | {:.0} | {:.3} | {:.3} | {:.3} | {:.0} | {:.1} | {:.1} |",
            of(|r| r.per_second).median,
            of(|r| r.p50_ms),
            of(|r| r.p90_ms),
            of(|r| r.p99_ms),
            of(|r| r.machine_us),
            of(|r| r.balancer_us),
            of(|r| r.gateway_us)
        );
    }
    let [tier, balancer] = both;
    let ratio = |field| spread(balancer, field).beside(&spread(tier, field));
    println!(
        "| {load} | HAProxy hop / tier | {} | {} | {} | {} | {} | | |",
        ratio(|r| r.per_second),
        ratio(|r| r.p50_ms),
        ratio(|r| r.p90_ms),
        ratio(|r| r.p99_ms),
        ratio(|r| r.machine_us)
    );
}
