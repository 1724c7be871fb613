//! Sessions that the server under a replica must track, as its session table sees them: with aggregation (edge → replica tunnels with few source
//! ports), with a source port per flow as RFC 7348 recommends, and bare, which is what the inner sessions come to.

use std::time::Duration;

use anyhow::Context;
use canal_offload::sessions::Sessions;

use crate::scene::{Scene, machine_us, number};

const CLIENT: &str = "many/default/client-0";
const ECHO: &str = "tcp.default:7000";
/// How fast sessions are opened, per second.
const OPEN_RATE: u32 = 3000;
/// How long all of them stay after the last was opened.
const STAY: u32 = 20;

pub(crate) fn run(count: u32) -> anyhow::Result<()> {
    println!(
        "| source ports | client sessions | held, broken | sessions at the underlay: tunnels | inside them | machine's CPU per session opened, µs |"
    );
    println!("|---|---|---|---|---|---|");
    for (name, flag) in [("aggregated", None), ("one per flow", Some("--no-aggregate"))] {
        measure(count, name, flag)?;
    }
    Ok(())
}

fn measure(count: u32, name: &str, flag: Option<&str>) -> anyhow::Result<()> {
    let scene = Scene::up(|topology, _| {
        for edge in &mut topology.edges {
            edge.process.as_mut().into_iter().for_each(|p| p.args.extend(flag.map(String::from)));
        }
        for gateway in &mut topology.gateways {
            let limits = ["--max-connections", "1000000", "--max-tenant-connections", "1000000", "--max-requests", "1000000"];
            gateway.process.as_mut().into_iter().for_each(|p| p.args.extend(limits.map(String::from)));
        }
    })?;
    // A host has as many ports as there are; the default range is for hosts that serve too.
    for host in [CLIENT, "gw-1", "gw-2"] {
        scene.run(host, &["sysctl", "-qw", "net.ipv4.ip_local_port_range=1024 65535"])?;
    }
    scene.sample(CLIENT, &["sessions", ECHO, "-n", "10", "-d", "1"])?;
    let tables: Vec<Sessions> = ["gw-1", "gw-2"].into_iter().map(|gateway| attach(&scene, gateway)).collect::<anyhow::Result<_>>()?;
    let before = machine_us()?;
    let seconds = count / OPEN_RATE + STAY;
    let (targets, duration, all) = (addresses(&scene)?, seconds.to_string(), count.to_string());
    let command = format!(
        "ulimit -n 500000; exec canal-samples sessions {targets} -n {all} --open-rate {OPEN_RATE} --interval-ms 30000 -d {duration}"
    );
    let program = std::env::current_exe()?.parent().context("a program has a folder")?.join("canal-samples");
    let command = command.replace("canal-samples", &program.to_string_lossy());
    let said = scene.run(CLIENT, &["sh", "-c", &command])?;
    let report: serde_json::Value = serde_json::from_str(&said).with_context(|| said.clone())?;
    let spent = machine_us()? - before;
    let (mut outer, mut inner) = (0, 0);
    for table in &tables {
        let (tunnels, sessions) = table.sessions()?;
        outer += tunnels;
        inner += sessions;
    }
    println!(
        "| {name} | {count} | {}, {} | {outer} | {inner} | {:.0} |",
        report["opened"],
        report["broken"],
        spent / number(&report, "opened")?
    );
    drop(tables);
    drop(scene);
    std::thread::sleep(Duration::from_secs(1));
    Ok(())
}

/// Counts on the router's end of the replica's link: where the server's NIC would count.
fn attach(scene: &Scene, gateway: &str) -> anyhow::Result<Sessions> {
    let host = scene.plan.host(gateway).with_context(|| format!("{gateway} is in the plan"))?;
    let router = &scene.plan.routers[host.az];
    let device = host.router_device();
    Ok(Sessions::attach(Some(&std::path::Path::new("/run/netns").join(&router.netns)), &device)?)
}

/// The service's gateway addresses, both families, as DNS says: two families are two ranges of ports.
fn addresses(scene: &Scene) -> anyhow::Result<String> {
    let said = scene.run(CLIENT, &["getent", "ahosts", "tcp.default"])?;
    let mut found: Vec<String> =
        said.lines().filter(|l| l.contains("STREAM")).filter_map(|l| l.split_whitespace().next()).map(String::from).collect();
    found.sort();
    found.dedup();
    anyhow::ensure!(!found.is_empty(), "tcp.default has no address in {CLIENT}: {said}");
    Ok(found.iter().map(|a| if a.contains(':') { format!("[{a}]:7000") } else { format!("{a}:7000") }).collect::<Vec<_>>().join(" "))
}
