//! Packets that replicas redirect to each other, once and twice, compared with those that reach
//! their owner at once (Canal 4.4, the redirector). It measures the run time of the programs in the
//! kernel per packet and per request, the CPU of the machine, and latency. The replicas' links have
//! no delay in one part, and a delay in the other. Bucket tables that differ cause the
//! redirections: the edge's tables, and for a second redirection the replicas' tables, name other
//! replicas first. The edge's agent compares its tables with what it wrote and fixes them, so the
//! bench writes its own again within milliseconds.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use canal_abi::tier::{CHAIN, Table};
use canal_abi::{from_bytes, to_bytes};
use canal_world::Impairment;
use libbpf_rs::{MapCore, MapFlags, MapHandle};
use serde_json::{Value, json};

use crate::programs::{self, RunCounter};
use crate::record::FigureFile;
use crate::scene::{TierBenchWorld, machine_us, number};

const CLIENT: &str = "hop/default/client-0";
const EDGE: &str = "edge-1";
const REPLICAS: [&str; 3] = ["gw-1", "gw-2", "gw-3"];
/// Number of redirections of each packet to the tier.
/// A world has three replicas, so that a packet passes at most two others.
const REDIRECTIONS: [usize; 3] = [0, 1, 2];
/// One-way delays of each replica's link. `None`: the links have no relays.
/// It makes round trips of 0.5 ms, as between hosts of one AZ.
const LINKS: [Option<Duration>; 2] = [None, Some(Duration::from_micros(250))];
/// Time during which connections are opened with tables that agree; then the tables change.
/// All 16 connections of the load exist long before.
const OPENING: Duration = Duration::from_secs(1);

/// Rate and length of the load, and how often it runs.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct RedirectedSize {
    /// Requests per second
    #[arg(long, default_value_t = 500)]
    rate: u32,
    /// Seconds of each load, of which the first is not measured
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    /// Rounds; the three take turns
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// Result of one load.
#[derive(Clone, Copy)]
struct RedirectedFigures {
    p50: f64,
    p99: f64,
    redirector_runs: f64,
    redirector_us: f64,
    edge_us: f64,
    machine_us: f64,
    failed: f64,
}

pub(crate) fn run(size: &RedirectedSize, record: &FigureFile) -> anyhow::Result<()> {
    println!(
        "| replicas' links, one way | redirected | redirector, runs per request | redirector, ns per run | redirector, µs per request | edge, µs per request | CPU of the machine per request, µs | p50 ms | p99 ms | failed |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let mut figures = Vec::new();
    for link in LINKS {
        let scene = TierBenchWorld::up("world.yaml", |topology, _| {
            topology.links.impaired.gateway = link.map(Impairment::delay);
            // Three replicas of one backend replace two backends with one replica each.
            if let Some(mut third) = topology.gateways.last().cloned() {
                third.name = REPLICAS[2].into();
                topology.gateways.push(third);
            }
            for gateway in &mut topology.gateways {
                gateway.backend = Some("b1".into());
            }
        })?;
        let url = scene.web_url(CLIENT)?;
        scene.until_served(CLIENT, &url)?;
        let tables = PinnedTables::settled(&scene)?;
        let name = link.map_or("no relay".to_owned(), |delay| format!("{delay:?}"));
        let mut rounds: [Vec<RedirectedFigures>; 3] = Default::default();
        for _ in 0..size.rounds {
            for (at, times) in REDIRECTIONS.into_iter().enumerate() {
                rounds[at].push(measure(&scene, &url, &tables, times, size)?);
            }
        }
        for (times, rounds) in REDIRECTIONS.iter().zip(&rounds) {
            figures.push(print(&name, *times, rounds));
        }
    }
    record.put("redirected", json!({ "rows": figures }))
}

/// Tables that have not changed for this time are final.
/// The agent checks its maps every 2 s, so that three checks found nothing to fix.
const SETTLED_AFTER: Duration = Duration::from_secs(6);
/// Two minutes of polls, which end a measurement whose tables never settle.
const SETTLED_POLLS_MAX: usize = 20;
/// Maximum time that a table fixed by the edge's agent is in force.
/// Compared with the 2 s between the agent's checks, it is 0.5 %.
const REWRITE_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum fraction of a load's time in which fixed tables may have been in force.
/// The agent checks its maps every 2 s, so that they are fixed for about 0.5 % of the time.
const FIXED_MAX: f64 = 0.05;

fn measure(
    scene: &TierBenchWorld,
    url: &str,
    tables: &PinnedTables,
    times: usize,
    size: &RedirectedSize,
) -> anyhow::Result<RedirectedFigures> {
    let (rate, seconds) = (size.rate.to_string(), size.seconds.to_string());
    let argv = [
        "canal-samples",
        "load",
        url,
        "-c",
        // Nobody measured other numbers of connections.
        "16",
        "-r",
        &rate,
        "-d",
        &seconds,
    ];
    let client = scene
        .world
        .exec(CLIENT, &argv)?
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("canal-samples")?;
    // Connections are opened with tables that agree, so that later packets must be redirected.
    std::thread::sleep(OPENING);
    tables.write(times)?;
    let counting = RunCounter::begin()?;
    let (begun, before, machine) = (Instant::now(), programs::all(), machine_us()?);
    tables.hold(
        times,
        // The load must outlast the measured time.
        Duration::from_secs(size.seconds.into())
            // The half second is for the writing of the tables.
            .saturating_sub(OPENING + Duration::from_millis(500)),
    )?;
    let (ran, spent, took) = (
        programs::between(&before, &programs::all()),
        machine_us()? - machine,
        begun.elapsed(),
    );
    // Counting costs CPU itself, so it ends with the measured time.
    drop(counting);
    let out = client.wait_with_output()?;
    // The next measurement begins with tables that agree.
    tables.write(0)?;
    let report: Value = serde_json::from_slice(&out.stdout).context("the client sent nothing")?;
    // The client counts its whole run, of which only a part was measured.
    let requests = number(&report, "succeeded")? * took.as_secs_f64() / f64::from(size.seconds);
    let of = |prefix: &str| {
        ran.iter()
            .filter(|(name, _)| name.starts_with(prefix))
            .fold((0.0, 0.0), |(runs, ns), (_, ran)| {
                (runs + ran.runs, ns + ran.ns)
            })
    };
    let (redirector, edge) = (of("canal_redirect"), of("canal_edge"));
    let latency = |field: &str| {
        report["latency_ms"][field]
            .as_f64()
            .with_context(|| format!("latency_ms.{field}: {report}"))
    };
    Ok(RedirectedFigures {
        p50: latency("p50")?,
        p99: latency("p99")?,
        redirector_runs: redirector.0 / requests,
        redirector_us: redirector.1 / requests / 1e3,
        edge_us: edge.1 / requests / 1e3,
        machine_us: spent / requests,
        failed: number(&report, "failed")?,
    })
}

fn print(link: &str, times: usize, rounds: &[RedirectedFigures]) -> Value {
    let median = |field: fn(&RedirectedFigures) -> f64| {
        let mut all: Vec<f64> = rounds.iter().map(field).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let (runs, us, edge) = (
        median(|of| of.redirector_runs),
        median(|of| of.redirector_us),
        median(|of| of.edge_us),
    );
    let (machine, p50, p99) = (
        median(|of| of.machine_us),
        median(|of| of.p50),
        median(|of| of.p99),
    );
    let failed: f64 = rounds.iter().map(|of| of.failed).sum();
    let each = us * 1e3 / runs;
    println!(
        "| {link} | {times} × | {runs:.1} | {each:.0} | {us:.2} | {edge:.2} | {machine:.0} | {p50:.2} | {p99:.2} | {failed} |"
    );
    json!({ "link": link, "redirections": times, "runs": runs, "run_ns": each, "redirector_us": us, "machine_us": machine, "p50_ms": p50, "p99_ms": p99 })
}

/// Bucket tables of the edge and of the replicas, as pinned maps, with their original elements.
struct PinnedTables {
    edge: Map,
    replicas: Vec<Map>,
}

struct Map {
    map: MapHandle,
    before: Vec<(Vec<u8>, Table)>,
}

impl PinnedTables {
    fn open(scene: &TierBenchWorld) -> anyhow::Result<Self> {
        let open = |host: &str| Map::open(&scene.world.data(host)?.join("bpffs"));
        let replicas = REPLICAS
            .iter()
            .map(|replica| open(replica))
            .collect::<anyhow::Result<_>>()?;
        Ok(Self {
            edge: open(EDGE)?,
            replicas,
        })
    }

    /// Waits until no agent has changed the tables for a while, because a plan is carried out in
    /// steps, and returns them.
    fn settled(scene: &TierBenchWorld) -> anyhow::Result<Self> {
        let mut tables = Self::open(scene)?;
        for _ in 0..SETTLED_POLLS_MAX {
            std::thread::sleep(SETTLED_AFTER);
            let now = Self::open(scene)?;
            if now.chains().eq(tables.chains()) {
                return Ok(now);
            }
            tables = now;
        }
        bail!("the tables change every {} s", SETTLED_AFTER.as_secs())
    }

    fn chains(&self) -> impl Iterator<Item = (&Vec<u8>, &[[u16; CHAIN]])> {
        let maps = std::iter::once(&self.edge).chain(&self.replicas);
        maps.flat_map(|map| {
            map.before
                .iter()
                .map(|(key, table)| (key, table.chain.as_slice()))
        })
    }

    /// Makes each packet of an open session be redirected this many times. With the chain `[H, B,
    /// C]` of a bucket whose head H owns its sessions, an edge that has `[B, C, H]` sends to B, and
    /// B to H; with `[C, H, B]` at the replicas, B sends to C, and C to H.
    fn write(&self, times: usize) -> anyhow::Result<()> {
        self.edge.write(usize::from(times > 0))?;
        self.replicas
            .iter()
            .try_for_each(|map| map.write(if times > 1 { 2 } else { 0 }))
    }

    /// Keeps the tables in this state for a time, although the edge's agent fixes its own. Fails if
    /// a replica's agent wrote too, or the edge's all the time.
    fn hold(&self, times: usize, time: Duration) -> anyhow::Result<()> {
        let (until, mut rewrites) = (Instant::now() + time, 0);
        while Instant::now() < until {
            std::thread::sleep(REWRITE_INTERVAL);
            if !self.edge.is(usize::from(times > 0))? {
                self.edge.write(usize::from(times > 0))?;
                rewrites += 1;
            }
        }
        let fixed = REWRITE_INTERVAL.as_secs_f64() * f64::from(rewrites) / time.as_secs_f64();
        ensure!(
            fixed <= FIXED_MAX,
            "the edge's agent wrote its tables {rewrites} times while others were used"
        );
        for map in &self.replicas {
            ensure!(
                map.is(if times > 1 { 2 } else { 0 })?,
                "a replica's agent wrote its tables again while others were used"
            );
        }
        Ok(())
    }
}

impl Map {
    fn open(pins: &Path) -> anyhow::Result<Self> {
        let path = find(pins, "canal_tables")
            .with_context(|| format!("no bucket tables in {}", pins.display()))?;
        let map = MapHandle::from_pinned_path(&path).with_context(|| path.display().to_string())?;
        let mut before = Vec::new();
        for key in map.keys() {
            if let Some(table) = map
                .lookup(&key, MapFlags::ANY)?
                .as_deref()
                .and_then(from_bytes::<Table>)
            {
                before.push((key, table));
            }
        }
        ensure!(!before.is_empty(), "{}: no table yet", path.display());
        Ok(Self { map, before })
    }

    /// Writes all tables with their chains rotated to the left by this many positions; 0: the
    /// original tables.
    fn write(&self, by: usize) -> anyhow::Result<()> {
        for (key, table) in &self.before {
            self.map
                .update(key, to_bytes(&decide_table(*table, by)), MapFlags::ANY)?;
        }
        Ok(())
    }

    fn is(&self, by: usize) -> anyhow::Result<bool> {
        for (key, table) in &self.before {
            let now = self
                .map
                .lookup(key, MapFlags::ANY)?
                .as_deref()
                .and_then(from_bytes::<Table>);
            if now.is_none_or(|now| now.chain != decide_table(*table, by).chain) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Returns the table that replaces an agent's: all replicas in each chain, rotated to the left by
/// this many positions; 0: the table itself.
fn decide_table(table: Table, by: usize) -> Table {
    if by == 0 {
        table
    } else {
        turned(fill_chains(table), by)
    }
}

/// Returns a table with all three replicas in each chain, behind its head.
fn fill_chains(mut table: Table) -> Table {
    for chain in &mut table.chain {
        let head = chain[0];
        let others = (1..=REPLICAS.len() as u16).filter(|number| *number != head);
        if head != 0 {
            *chain = Default::default();
            for (place, number) in chain.iter_mut().zip(std::iter::once(head).chain(others)) {
                *place = number;
            }
        }
    }
    table
}

fn turned(mut table: Table, by: usize) -> Table {
    for chain in &mut table.chain {
        let length = chain.iter().take_while(|number| **number != 0).count();
        if length > 0 {
            chain[..length].rotate_left(by % length);
        }
    }
    table
}

fn find(dir: &Path, name: &str) -> Option<PathBuf> {
    for entry in std::fs::read_dir(dir).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            if let Some(found) = find(&path, name) {
                return Some(found);
            }
        } else if entry.file_name().to_string_lossy().starts_with(name) {
            return Some(path);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotated_table_names_others_first_and_keeps_all_replicas() {
        let mut table = Table::default();
        table.chain[5][..2].copy_from_slice(&[2, 3]);
        let table = fill_chains(table);
        assert_eq!(table.chain[5][..4], [2, 1, 3, 0]);
        assert_eq!(turned(table, 1).chain[5][..4], [1, 3, 2, 0]);
        assert_eq!(turned(table, 2).chain[5][..4], [3, 2, 1, 0]);
        assert_eq!(
            turned(table, 0).chain[6][..2],
            [0, 0],
            "an empty chain stays empty"
        );
    }
}
