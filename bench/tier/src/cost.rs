//! CPU per packet and per request of each part of the tier and of the gateway's Layer 7 work:
//! saturated, at stated rates, and with a connection per request. The loads take turns.

use std::collections::BTreeMap;

use anyhow::bail;
use serde_json::{Value, json};

use crate::load_rounds::LoadRounds;
use crate::programs::{self, ProgramCost, RunCounter};
use crate::record::FigureFile;
use crate::scene::{TierBenchWorld, machine_us, number};
use crate::spread::RoundSpread;

const CLIENT: &str = "hop/default/client-0";

/// One load and its result in each round.
struct TierLoad {
    name: String,
    extra: Vec<String>,
    rounds: Vec<TierRound>,
}

struct TierRound {
    per_second: f64,
    gateway_us: f64,
    machine_us: f64,
    /// Cost of each BPF program per request.
    programs: BTreeMap<String, ProgramCost>,
}

pub(crate) fn run(size: &LoadRounds, record: &FigureFile) -> anyhow::Result<()> {
    let scene = TierBenchWorld::up("world.yaml", |_, _| {})?;
    let url = scene.web_url(CLIENT)?;
    scene.until_served(CLIENT, &url)?;
    let mut loads = loads(size);
    for round in 1..=size.rounds {
        for load in &mut loads {
            eprintln!("round {round}/{}: {}", size.rounds, load.name);
            load.rounds.push(measure(&scene, &url, load, size)?);
        }
    }
    println!("| load | part | CPU per packet, ns | packets per request | CPU per request, µs |");
    println!("|---|---|---|---|---|");
    loads.iter().for_each(show);
    let of = |name: &str| loads.iter().find(|load| load.name == name).map(figures);
    record.put(
        "cost",
        json!({ "keep_alive": of(SATURATED), "connection_per_request": of(PER_REQUEST) }),
    )
}

/// The loads that `canal-bench-figures cost` computes with.
const SATURATED: &str = "kept connections, as fast as answered";
const PER_REQUEST: &str = "a connection per request";

fn loads(size: &LoadRounds) -> Vec<TierLoad> {
    let load = |name: &str, extra: &[&str]| TierLoad {
        name: name.to_string(),
        extra: extra.iter().map(ToString::to_string).collect(),
        rounds: Vec::new(),
    };
    let mut all = vec![load(SATURATED, &[])];
    all.extend(size.rates.iter().map(|rate| {
        load(
            &format!("kept connections, {rate} requests/s"),
            &["-r", &rate.to_string()],
        )
    }));
    all.push(load(PER_REQUEST, &["--no-keepalive"]));
    all
}

/// Returns the number of requests of a report that were served.
///
/// # Errors
/// Requests failed, or none was sent. A failed request costs less than a served one, so such a round
/// is no measurement.
fn served(load: &str, report: &Value) -> anyhow::Result<f64> {
    let requests = number(report, "succeeded")?;
    if number(report, "failed")? > 0.0 || requests == 0.0 {
        bail!(
            "{load}: requests failed or none was sent; fix: run the bench again on a quiet machine: {report}"
        );
    }
    Ok(requests)
}

/// Runs one round of a load: first it measures the processes' CPU, then the programs', because
/// counting programs costs CPU itself.
fn measure(
    scene: &TierBenchWorld,
    url: &str,
    load: &TierLoad,
    size: &LoadRounds,
) -> anyhow::Result<TierRound> {
    let (connections, seconds) = (size.connections.to_string(), size.seconds.to_string());
    let argv: Vec<&str> = ["load", url, "-c", &connections, "-d", &seconds]
        .into_iter()
        .chain(load.extra.iter().map(String::as_str))
        .collect();
    let (gateway_before, machine_before) = (scene.gateways_us()?, machine_us()?);
    let report = scene.sample(CLIENT, &argv)?;
    let (gateway, machine) = (
        scene.gateways_us()? - gateway_before,
        machine_us()? - machine_before,
    );
    let requests = served(&load.name, &report)?;
    // The same load runs again, and its own requests are the divisor.
    let _counting = RunCounter::begin()?;
    let before = programs::all();
    let counted = served(&load.name, &scene.sample(CLIENT, &argv)?)?;
    let ran = programs::between(&before, &programs::all());
    let programs = ran
        .into_iter()
        .map(|(name, ran)| {
            (
                name,
                ProgramCost {
                    runs: ran.runs / counted,
                    ns: ran.ns / counted,
                },
            )
        })
        .collect();
    Ok(TierRound {
        per_second: number(&report, "rps")?,
        gateway_us: gateway / requests,
        machine_us: machine / requests,
        programs,
    })
}

/// Returns the spread of one value of a load.
fn spread(load: &TierLoad, of: impl Fn(&TierRound) -> f64) -> RoundSpread {
    RoundSpread::of(load.rounds.iter().map(of))
}

/// Returns the time per request, in µs, of all programs whose name has this prefix.
fn kernel_us(round: &TierRound, prefix: &str) -> f64 {
    // The sum of no floats is -0.
    round
        .programs
        .iter()
        .filter(|(name, _)| name.starts_with(prefix))
        .map(|(_, ran)| ran.ns)
        .sum::<f64>()
        / 1e3
        + 0.0
}

/// Prefix of the redirector's programs. All programs of Canal belong to the tier, because nothing
/// else of Canal runs in this world's kernel.
const REDIRECTOR: &str = "canal_redirect";
const TIER: &str = "canal_";

/// Prints a load's rows.
fn show(load: &TierLoad) {
    let name = &load.name;
    let mut programs: Vec<&String> = load
        .rounds
        .iter()
        .flat_map(|round| round.programs.keys())
        .collect();
    programs.sort();
    programs.dedup();
    for program in programs {
        // A program that did not run in a round cost nothing.
        let of = |round: &TierRound| round.programs.get(program).copied().unwrap_or_default();
        let runs = spread(load, |round| of(round).runs);
        // A program that does not run for this load gets no row. One run in 1,000 requests is of
        // other traffic.
        if runs.median > 0.001 {
            // A round in which the program did not run must not divide by zero.
            let packet = spread(load, |round| of(round).ns / of(round).runs.max(1e-9));
            let request = spread(load, |round| of(round).ns / 1e3);
            println!(
                "| {name} | `{program}` | {packet:.0} | {:.1} | {request:.2} |",
                runs.median
            );
        }
    }
    let (all, redirector) = (
        spread(load, |r| kernel_us(r, TIER)),
        spread(load, |r| kernel_us(r, REDIRECTOR)),
    );
    let (gateway, machine) = (
        spread(load, |r| r.gateway_us),
        spread(load, |r| r.machine_us),
    );
    println!("| {name} | **all of the tier in the kernel** | | | **{all:.2}** |");
    println!("| {name} | **gateway process, Layer 7** | | | **{gateway:.1}** |");
    println!("| {name} | whole machine, client and server included | | | {machine:.1} |");
    println!(
        "| {name} | Layer 7 / all of the tier in the kernel | | | {:.1} x |",
        gateway.median / all.median
    );
    println!(
        "| {name} | Layer 7 / redirector alone | | | {:.1} x |",
        gateway.median / redirector.median
    );
    println!(
        "| {name} | requests per second | | | {:.0} |",
        spread(load, |r| r.per_second)
    );
}

/// Returns the values that other programs compute with.
fn figures(load: &TierLoad) -> Value {
    let packets = spread(load, |r| {
        r.programs
            .iter()
            .filter(|(name, _)| name.starts_with(REDIRECTOR))
            .map(|(_, ran)| ran.runs)
            .sum()
    });
    json!({
        "l7_us": spread(load, |r| r.gateway_us).median,
        "redirector_us": spread(load, |r| kernel_us(r, REDIRECTOR)).median,
        "tier_us": spread(load, |r| kernel_us(r, TIER)).median,
        "packets": packets.median,
    })
}
