//! Cost and precision of the relay of a world's link: the time that it adds to a round trip beyond
//! the configured delay, the highest rate at which it drops nothing, and its CPU per frame. It
//! compares with a link without a relay, in the same world.

use std::time::{Duration, Instant};

use anyhow::Context;
use canal_world::{Impairment, LinkReport};
use serde_json::json;

use crate::record::FigureFile;
use crate::scene::TierBenchWorld;

/// Round trips of one measurement.
/// The median of so many is stable. With the longest delay they take 40 s.
const ROUND_TRIPS: &str = "1000";
/// Delays of the link, in microseconds, whose precision is measured.
/// None, those of a region, and that of a distant one.
const DELAYS: [u64; 4] = [0, 500, 2_000, 20_000];
/// Bytes of a bulk transfer.
/// Large enough that the start of the transfer does not matter.
const BULK: &str = "400000000";
/// Offered rates of small frames, in frames per second.
/// They go on both sides of what one core relays.
const RATES: [u64; 7] = [20_000, 50_000, 100_000, 150_000, 200_000, 300_000, 400_000];

pub(crate) fn run(seconds: u64, record: &FigureFile) -> anyhow::Result<()> {
    let scene = TierBenchWorld::up("relay.yaml", |_, _| {})?;
    let address = |host: &str| {
        scene
            .world
            .host(host)?
            .ip4()
            .with_context(|| format!("{host} has no address"))
    };
    let (plain, late) = (address("plain")?, address("late")?);
    let exact = exactness(&scene, &format!("{plain}:7"), &format!("{late}:7"))?;
    println!();
    println!(
        "| TCP bulk | Gbit/s | frames a second by the relay | relay's CPU per frame | dropped |"
    );
    println!("|---|---|---|---|---|");
    let without = bulk(&scene, "plain", &format!("{plain}:7"))?;
    let with = bulk(&scene, "late", &format!("{late}:7"))?;
    println!();
    let highest = small_frames(&scene, &format!("{late}:9"), seconds)?;
    record.put("relay", json!({ "exact": exact, "bulk_gbit": with, "bulk_gbit_without": without, "frames_per_second": highest }))
}

fn exactness(
    scene: &TierBenchWorld,
    plain: &str,
    late: &str,
) -> anyhow::Result<Vec<serde_json::Value>> {
    println!(
        "| one way shall take | round trip, least | median | largest | one way more than it shall, median |"
    );
    println!("|---|---|---|---|---|");
    let round_trips = |to: &str| -> anyhow::Result<Vec<f64>> {
        let output = scene.run(
            "client",
            &["canal-world-peer", "rtt-udp", to, ROUND_TRIPS, "100"],
        )?;
        output
            .split_whitespace()
            .map(|word| word.parse().with_context(|| output.clone()))
            .collect()
    };
    let bare = round_trips(plain)?;
    println!(
        "| no relay | {:.0} µs | {:.0} µs | {:.0} µs | |",
        bare[0], bare[1], bare[2]
    );
    let mut figures = Vec::new();
    for delay in DELAYS {
        let _impaired = scene.world.delay("late", Duration::from_micros(delay))?;
        let times = round_trips(late)?;
        let excess = (times[1] - bare[1]) / 2.0 - delay as f64;
        println!(
            "| {delay} µs | {:.0} µs | {:.0} µs | {:.0} µs | {excess:.0} µs |",
            times[0], times[1], times[2]
        );
        figures.push(json!({ "delay_us": delay, "excess_us": excess }));
    }
    Ok(figures)
}

/// Returns the Gbit/s of one TCP connection whose content is checked.
fn bulk(scene: &TierBenchWorld, host: &str, to: &str) -> anyhow::Result<f64> {
    let before = if host == "late" {
        scene.world.link_report(host)?
    } else {
        LinkReport::default()
    };
    let (begun, cpu) = (Instant::now(), relay_us(scene)?);
    let output = scene.run("client", &["canal-world-peer", "digest", to, BULK])?;
    let gbit = output
        .trim()
        .parse::<f64>()
        .with_context(|| output.clone())?
        / 1e9;
    if host != "late" {
        println!("| without a relay | {gbit:.2} | | | |");
        return Ok(gbit);
    }
    let after = scene.world.link_report(host)?;
    let frames = (frames(&after) - frames(&before)) as f64;
    let per_second = frames / begun.elapsed().as_secs_f64();
    let each = (relay_us(scene)? - cpu) / frames;
    println!(
        "| through a relay | {gbit:.2} | {per_second:.0} | {each:.2} µs | {} |",
        dropped(&after) - dropped(&before)
    );
    Ok(gbit)
}

/// Returns the highest of the rates at which nothing was dropped.
fn small_frames(scene: &TierBenchWorld, to: &str, seconds: u64) -> anyhow::Result<f64> {
    println!(
        "| frames of 142 bytes offered a second | carried a second | dropped | relay's CPU per frame |"
    );
    println!("|---|---|---|---|");
    let _impaired = scene
        .world
        // Any delay has the link carried by the relay; this is that of a region (`DELAYS`).
        .impair("late", Impairment::delay(Duration::from_micros(500)))?;
    let mut highest = 0.0_f64;
    // All rates are offered, also those beyond the first with drops: the table shows how the relay
    // fails.
    for rate in RATES {
        let (before, cpu, begun) = (
            scene.world.link_report("late")?,
            relay_us(scene)?,
            Instant::now(),
        );
        // 100 bytes of payload are 142 on the wire: UDP adds 8, IPv4 20 and Ethernet 14.
        let count = (rate * seconds).to_string();
        scene.run(
            "client",
            &[
                "canal-world-peer",
                "datagrams",
                to,
                &count,
                "100",
                &rate.to_string(),
            ],
        )?;
        let took = begun.elapsed().as_secs_f64();
        // Frames in transit arrive, and the idle relay counts the kernel's drops.
        std::thread::sleep(Duration::from_secs(1));
        let after = scene.world.link_report("late")?;
        let carried = (after.a_to_b.frames - before.a_to_b.frames) as f64;
        let all = (frames(&after) - frames(&before)) as f64;
        let lost = dropped(&after) - dropped(&before);
        let each = (relay_us(scene)? - cpu) / all;
        println!("| {rate} | {:.0} | {lost} | {each:.2} µs |", carried / took);
        // At a rate with drops the relay is overloaded.
        if lost == 0 {
            highest = highest.max(carried / took);
        }
    }
    println!("The highest rate without a drop: {highest:.0} frames a second in one direction.");
    Ok(highest)
}

fn frames(report: &LinkReport) -> u64 {
    report.a_to_b.frames + report.b_to_a.frames
}

fn dropped(report: &LinkReport) -> u64 {
    [report.a_to_b, report.b_to_a]
        .iter()
        .map(|way| {
            way.dropped_queue + way.dropped_socket + way.dropped_device + way.dropped_oversize
        })
        .sum()
}

fn relay_us(scene: &TierBenchWorld) -> anyhow::Result<f64> {
    scene.cpu_us("relay-late")
}
