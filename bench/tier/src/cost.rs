//! CPU per packet and per request of each part of the tier, under one load of keep-alive requests and one of new connections.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::programs::{self, Counting, Ran};
use crate::record::Record;
use crate::scene::{Scene, machine_us, number};

const CLIENT: &str = "hop/default/client-0";
const URL: &str = "http://web.default:80/blob?size=100";

pub(crate) fn run(seconds: u32, record: &Record) -> anyhow::Result<()> {
    let scene = Scene::up("world.yaml", |_, _| {})?;
    scene.until_served(CLIENT, URL)?;
    println!("| load | part | CPU per packet | packets per request | CPU per request |");
    println!("|---|---|---|---|---|");
    let keep_alive = measure(&scene, "keep-alive", &[], seconds)?;
    let per_request = measure(&scene, "a connection per request", &["--no-keepalive"], seconds)?;
    record.put("cost", json!({ "keep_alive": keep_alive, "connection_per_request": per_request }))
}

/// Prints a load's rows; what of them others compute with.
fn measure(scene: &Scene, name: &str, extra: &[&str], seconds: u32) -> anyhow::Result<Value> {
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
    let redirector = ran.iter().find(|(program, _)| program.starts_with("canal_redirect")).map(|(_, each)| *each).unwrap_or_default();
    let redirector_us = redirector.ns / 1e3;
    println!("| {name} | gateway / redirector | | | {:.0} x (paper: 12-15 x) |", gateway / redirector_us);
    println!("| {name} | requests {requests}, failed {} | | | |", report["failed"]);
    Ok(json!({ "l7_us": gateway, "redirector_us": redirector_us, "packets": redirector.runs }))
}

fn gateways_us(scene: &Scene) -> anyhow::Result<f64> {
    Ok(scene.cpu_us("gw-1")? + scene.cpu_us("gw-2")?)
}

fn per_request(ran: &BTreeMap<String, Ran>, requests: f64) -> Vec<(String, Ran)> {
    ran.iter().map(|(name, r)| (name.clone(), Ran { runs: r.runs / requests, ns: r.ns / requests })).collect()
}
