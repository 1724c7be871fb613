//! CPU per packet and per request of each part of the tier, under one load of keep-alive requests and one of new connections.

use std::collections::BTreeMap;

use crate::programs::{self, Counting, Ran};
use crate::scene::{Scene, machine_us, number};

const CLIENT: &str = "hop/default/client-0";
const URL: &str = "http://web.default:80/blob?size=100";

pub(crate) fn run(seconds: u32) -> anyhow::Result<()> {
    let scene = Scene::up(|_, _| {})?;
    scene.until_served(CLIENT, URL)?;
    println!("| load | part | CPU per packet | packets per request | CPU per request |");
    println!("|---|---|---|---|---|");
    for (name, extra) in [("keep-alive", [].as_slice()), ("a connection per request", &["--no-keepalive"])] {
        measure(&scene, name, extra, seconds)?;
    }
    Ok(())
}

fn measure(scene: &Scene, name: &str, extra: &[&str], seconds: u32) -> anyhow::Result<()> {
    let seconds = seconds.to_string();
    let load: Vec<&str> = ["load", URL, "-c", "16", "-d", &seconds].into_iter().chain(extra.iter().copied()).collect();
    scene.sample(CLIENT, &["load", URL, "-c", "16", "-d", "1"])?;
    // Twice: counting itself costs, so CPU of processes is taken while it is off.
    let (gateway_before, machine_before) = (gateways_us(scene)?, machine_us()?);
    let report = scene.sample(CLIENT, &load)?;
    let requests = number(&report, "succeeded")?;
    let (gateway, machine) = ((gateways_us(scene)? - gateway_before) / requests, (machine_us()? - machine_before) / requests);
    let ran = {
        let _counting = Counting::begin()?;
        let before = programs::all();
        let counted = number(&scene.sample(CLIENT, &load)?, "succeeded")?;
        per_request(&programs::between(&before, &programs::all()), counted)
    };
    for (program, each) in &ran {
        if each.runs > 0.001 {
            let packet = each.ns / each.runs;
            println!("| {name} | {program} | {packet:.0} ns | {:.1} | {:.2} µs |", each.runs, each.ns / 1e3);
        }
    }
    println!("| {name} | gateway process, Layer 7 | | | {gateway:.1} µs |");
    println!("| {name} | the whole machine, client and server included | | | {machine:.1} µs |");
    let redirector = ran.iter().find(|(program, _)| program.starts_with("canal_redirect")).map_or(0.0, |(_, each)| each.ns / 1e3);
    println!("| {name} | gateway / redirector | | | {:.0} x (paper: 12-15 x) |", gateway / redirector);
    println!("| {name} | requests {requests}, failed {} | | | |", report["failed"]);
    Ok(())
}

fn gateways_us(scene: &Scene) -> anyhow::Result<f64> {
    Ok(scene.cpu_us("gw-1")? + scene.cpu_us("gw-2")?)
}

fn per_request(ran: &BTreeMap<String, Ran>, requests: f64) -> Vec<(String, Ran)> {
    ran.iter().map(|(name, r)| (name.clone(), Ran { runs: r.runs / requests, ns: r.ns / requests })).collect()
}
