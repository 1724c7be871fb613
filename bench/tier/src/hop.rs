//! One request's way into the gateway twice in one world: through edge and redirector, and through a HAProxy in TCP mode on a host of its own,
//! which is what the redirector replaces. Same client pod, same gateway process, same endpoint; the two take turns.

use std::fmt::Write;

use anyhow::Context;
use serde_json::json;

use crate::record::Record;
use crate::scene::{Scene, machine_us, number};

const CLIENT: &str = "hop/default/client-0";
const TIER: &str = "http://web.default:80/blob?size=100";
/// Where the gateways listen for the load balancer, without a tunnel.
const PLAIN_PORT: u16 = 8099;
const LB_PORT: u16 = 8098;
const TURNS: usize = 3;

pub(crate) fn run(rate: u32, seconds: u32, record: &Record) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let config = dir.path().join("haproxy.cfg");
    let mut lb = None;
    let scene = Scene::up("world.yaml", |topology, plan| {
        let address = |host: &str| plan.host(host).map(|h| h.ip4);
        let mut text =
            String::from("global\n  nbthread 1\ndefaults\n  mode tcp\n  timeout connect 2s\n  timeout client 60s\n  timeout server 60s\n");
        let _ = writeln!(text, "listen gateways\n  bind :{LB_PORT}\n  balance roundrobin");
        for gateway in &mut topology.gateways {
            if let (Some(ip), Some(process)) = (address(&gateway.name), gateway.process.as_mut()) {
                let _ = writeln!(text, "  server {} {ip}:{PLAIN_PORT}", gateway.name);
                process.args.extend(["--plain".to_string(), format!("{ip}:{PLAIN_PORT}=hop/default/web:80")]);
            }
        }
        lb = address("lb").map(|ip| (ip, text));
    })?;
    let (ip, text) = lb.context("the world has a load balancer host")?;
    std::fs::write(&config, text)?;
    let config = config.to_string_lossy().into_owned();
    let mut balancer =
        scene.world.exec("lb", &["haproxy", "-db", "-f", &config])?.spawn().context("haproxy; setup/install bench installs it")?;
    let paths = [("edge and redirector", TIER.to_string()), ("HAProxy hop", format!("http://{ip}:{LB_PORT}/blob?size=100"))];
    let outcome = compare(&scene, &paths, rate, seconds, record);
    // It dies with its world anyway.
    let _ = balancer.kill();
    let _ = balancer.wait();
    outcome
}

fn compare(scene: &Scene, paths: &[(&str, String)], rate: u32, seconds: u32, record: &Record) -> anyhow::Result<()> {
    let (rate, seconds) = (rate.to_string(), seconds.to_string());
    let mut rows: Vec<Vec<[f64; 6]>> = vec![Vec::new(); paths.len()];
    for turn in 0..TURNS {
        for (at, (name, url)) in paths.iter().enumerate() {
            scene.until_served(CLIENT, url).with_context(|| (*name).to_string())?;
            eprintln!("turn {}/{TURNS}: {name}", turn + 1);
            let before = (machine_us()?, scene.cpu_us("lb")?, gateways_us(scene)?);
            let report = scene.sample(CLIENT, &["load", url, "-c", "16", "-r", &rate, "-d", &seconds])?;
            let (spent, balancer, gateway) = (machine_us()? - before.0, scene.cpu_us("lb")? - before.1, gateways_us(scene)? - before.2);
            let requests = number(&report, "succeeded")?;
            let latency = |field: &str| report["latency_ms"][field].as_f64().with_context(|| format!("latency_ms.{field}: {report}"));
            rows[at].push([latency("p50")?, latency("p90")?, latency("p99")?, spent / requests, balancer / requests, gateway / requests]);
        }
    }
    println!("| path | p50 ms | p90 ms | p99 ms | whole machine's CPU per request, µs | HAProxy's process | gateway process |");
    println!("|---|---|---|---|---|---|---|");
    let medians: Vec<[f64; 6]> = rows.iter().map(|row| std::array::from_fn(|field| median(row.iter().map(|run| run[field])))).collect();
    for ((name, _), m) in paths.iter().zip(&medians) {
        println!("| {name} | {:.3} | {:.3} | {:.3} | {:.0} | {:.1} | {:.1} |", m[0], m[1], m[2], m[3], m[4], m[5]);
    }
    if let [tier, lb] = medians.as_slice() {
        println!(
            "| HAProxy hop / tier | {:.2} | {:.2} | {:.2} | {:.2} | | |",
            lb[0] / tier[0],
            lb[1] / tier[1],
            lb[2] / tier[2],
            lb[3] / tier[3]
        );
        let ms = |m: &[f64; 6]| json!({ "p50_ms": m[0], "p90_ms": m[1], "p99_ms": m[2], "machine_us": m[3] });
        record.put("hop", json!({ "tier": ms(tier), "balancer": ms(lb), "lb_us": lb[4], "gateway_us": lb[5] }))?;
    }
    Ok(())
}

fn gateways_us(scene: &Scene) -> anyhow::Result<f64> {
    Ok(scene.cpu_us("gw-1")? + scene.cpu_us("gw-2")?)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}
