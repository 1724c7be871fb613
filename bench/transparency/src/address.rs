//! New connections per second to one port of one pod, from many client pods: a steady rate with its
//! CPU per connection over time, then the highest rate. Each is measured with the mesh and without
//! it in the same world. A connection carries 64 bytes in each direction, and its client closes it.

use std::process::Stdio;

use anyhow::{Context, ensure};
use canal_bench_tier::record::FigureFile;
use canal_bench_tier::scene::{TierBenchWorld, machine_us, number};
use serde_json::{Value, json};

use crate::bars::{Bar, Bound};

/// Duration and rates of the loads.
#[derive(clap::Args)]
pub(crate) struct ConnectionsSize {
    /// Connections per second of the steady load, over all clients
    // 2.5 % above `RATE_MIN`, so that the target can be met although some starts are late.
    #[arg(long, default_value_t = 2_050)]
    rate: u32,
    /// Parts of the steady load
    // With the 10 s below 60 s, as the target says.
    #[arg(long, default_value_t = 6)]
    parts: u32,
    /// Seconds of each part, and of each load at the highest rate
    #[arg(long, default_value_t = 10)]
    seconds: u32,
    /// Connections that each client has open at once at most
    // 64 for 16 clients together.
    #[arg(long, default_value_t = 4)]
    at_once: u32,
}

/// Result of one load.
struct LoadPart {
    succeeded: f64,
    failed: f64,
    per_second: f64,
    machine_us: f64,
    node_us: f64,
}

/// Minimum rate of new connections per second: the target of docs/performance.md, for all parts of
/// the run together 60 s.
const RATE_MIN: f64 = 2_000.0;
/// Maximum cost of a connection at the end relative to the begin. Parts of one run differ by a tenth
/// without a cause, so twice that is growth.
const GROWTH_MAX: f64 = 1.2;

pub(crate) fn run(size: &ConnectionsSize, record: &FigureFile) -> anyhow::Result<Vec<Bar>> {
    let scene = TierBenchWorld::up("connections.yaml", |_, _| {})?;
    let address = |tenant: &str| -> anyhow::Result<String> {
        let server = scene
            .world
            .host(&format!("{tenant}/default/web-0"))?
            .ip4()
            .context("the server has no address")?;
        Ok(format!("{server}:8080"))
    };
    let (mesh, plain) = (address("mesh")?, address("plain")?);
    warm_up(&scene, [("mesh", &mesh), ("plain", &plain)])?;
    let (seconds, at_once) = (size.seconds.to_string(), size.at_once.to_string());
    // The rate is divided among the 16 clients of `clients`.
    let rate = (f64::from(size.rate) / 16.0).to_string();
    println!(
        "| load | connections per second | failed | CPU of the destination's node proxy per connection | of the machine |"
    );
    println!("|---|---|---|---|---|");
    let steady = [
        "connections",
        &mesh,
        "-c",
        &at_once,
        "-d",
        &seconds,
        "--rate",
        &rate,
    ];
    // Equal parts, one after the other: a cost that grows with time shows in the last.
    let mut parts = Vec::new();
    for n in 1..=size.parts {
        let part = load(&scene, &clients("mesh"), &steady)?;
        part.print(&format!("steady, part {n}"));
        parts.push(part);
    }
    let (first, last) = (
        parts.first().context("no part")?,
        parts.last().context("no part")?,
    );
    println!(
        "| steady, last / first | | | {:.2} | {:.2} |",
        last.node_per() / first.node_per(),
        last.machine_per() / first.machine_per()
    );
    let highest = highest_rates(&scene, (&mesh, &plain), &at_once, &seconds)?;
    let failed: f64 = parts.iter().map(|part| part.failed).sum();
    let rates: Vec<Value> = parts
        .iter()
        .map(|part| json!({ "per_second": part.per_second, "node_us": part.node_per() }))
        .collect();
    let slowest = parts
        .iter()
        .map(|part| part.per_second)
        .fold(f64::INFINITY, f64::min);
    // The machine's CPU includes what the kernel does for a connection, whoever is charged for it.
    let growth = last.machine_per() / first.machine_per();
    record.put(
        "connections",
        json!({ "steady": rates, "steady_failed": failed, "highest": highest }),
    )?;
    Ok(vec![
        Bar::new(
            "new connections per second, in the slowest part",
            slowest,
            Bound::AtLeast(RATE_MIN),
        ),
        Bar::new("connections failed", failed, Bound::AtMost(0.0)),
        Bar::new(
            "CPU of the machine per connection, last part / first part",
            growth,
            Bound::AtMost(GROWTH_MAX),
        ),
    ])
}

impl LoadPart {
    fn node_per(&self) -> f64 {
        self.node_us / self.succeeded
    }

    fn machine_per(&self) -> f64 {
        self.machine_us / self.succeeded
    }

    fn print(&self, name: &str) {
        println!(
            "| {name} | {:.0} | {} | {:.0} µs | {:.0} µs |",
            self.per_second,
            self.failed,
            self.node_per(),
            self.machine_per()
        );
    }
}

fn clients(tenant: &str) -> Vec<String> {
    (0..16)
        .map(|n| format!("{tenant}/default/client-{n}"))
        .collect()
}

/// Opens a few connections to the server of each tenant, so that all that the first ones need is
/// there.
fn warm_up(scene: &TierBenchWorld, tenants: [(&str, &String); 2]) -> anyhow::Result<()> {
    // This excludes the effects of first connections: a table that does not exist yet, a tunnel's
    // handshake.
    for (tenant, address) in tenants {
        load(
            scene,
            &clients(tenant),
            &["connections", address, "-c", "1", "-d", "1", "--rate", "20"],
        )?;
    }
    Ok(())
}

/// Measures and prints the rates of new connections that clients reach, with the mesh and without
/// it.
fn highest_rates(
    scene: &TierBenchWorld,
    (mesh, plain): (&str, &str),
    at_once: &str,
    seconds: &str,
) -> anyhow::Result<Vec<Value>> {
    let mut highest = Vec::new();
    for (name, tenant, address, pods) in [
        ("16 clients, mesh", "mesh", mesh, 16),
        ("16 clients, no mesh", "plain", plain, 16),
        ("one client, mesh", "mesh", mesh, 1),
        ("one client, no mesh", "plain", plain, 1),
    ] {
        let fastest = ["connections", address, "-c", at_once, "-d", seconds];
        let part = load(scene, &clients(tenant)[..pods], &fastest)?;
        part.print(name);
        highest.push(json!({ "load": name, "per_second": part.per_second, "failed": part.failed }));
    }
    Ok(highest)
}

/// Runs the same load in all clients at once.
fn load(scene: &TierBenchWorld, clients: &[String], argv: &[&str]) -> anyhow::Result<LoadPart> {
    let all: Vec<&str> = ["canal-samples"]
        .into_iter()
        .chain(argv.iter().copied())
        .collect();
    let node = "mesh-n2";
    let (machine, node_before) = (machine_us()?, scene.cpu_us(node)?);
    let mut children = Vec::new();
    for client in clients {
        children.push(
            scene
                .world
                .exec(client, &all)?
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()?,
        );
    }
    let (mut succeeded, mut failed, mut per_second) = (0.0, 0.0, 0.0);
    for child in children {
        let out = child.wait_with_output()?;
        let report: Value = serde_json::from_slice(&out.stdout).context("a client sent nothing")?;
        succeeded += number(&report, "succeeded")?;
        failed += number(&report, "failed")?;
        // The client's own clock counts: starting and ending sixteen processes is not part of the
        // load.
        per_second += number(&report, "rps")?;
    }
    ensure!(succeeded > 0.0, "no connection succeeded");
    Ok(LoadPart {
        succeeded,
        failed,
        per_second,
        machine_us: machine_us()? - machine,
        node_us: scene.cpu_us(node)? - node_before,
    })
}
