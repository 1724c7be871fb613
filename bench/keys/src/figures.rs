//! The paper's figures on the key server (12, 23, 25, 27, 28), each from runs of the same load in the same worlds. It prints; it judges nothing.

use std::collections::BTreeMap;

use anyhow::Context;

use crate::limits;
use crate::scene::{Algorithm, Measured, Mode, Pace, Run, Scene};

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Seconds of load for each cell and round
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Each cell is the best of so many, each in a world of its own: what else a machine does only adds, and comes and goes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Share of a core that the node proxy has in figures 25, 27 and 28, so that it, not the load, is what runs out
    #[arg(long, default_value_t = 0.15)]
    share: f64,
}

const CONCURRENCY: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Shares of a core in figure 27 (the paper: whole cores).
const SHARES: [f64; 4] = [0.05, 0.10, 0.15, 0.20];
/// Flows per second in figure 23, where nothing is capped.
const RATES: [f64; 3] = [50.0, 150.0, 300.0];
/// Load in figure 28, in parts of what `none` can do.
const LOADS: [f64; 4] = [0.3, 0.6, 0.8, 0.9];

/// All cells of one algorithm and mode.
#[derive(Default)]
struct Cells {
    by_concurrency: Vec<Measured>,
    /// Sessions without a request, by concurrency.
    handshakes: Vec<Measured>,
    by_rate: Vec<Measured>,
    by_share: Vec<Measured>,
    by_load: Vec<Measured>,
    /// Of the key server: requests that waited in a batch while one flow at a time was asked for.
    waited: Option<f64>,
    /// The sizes of all batches, and how many there were.
    batches: (f64, f64),
    /// Of the first flow that failed.
    why: Option<String>,
}

impl Cells {
    /// The best of these and another round's.
    fn take(&mut self, other: Cells) {
        let rows = |cells: Cells| [cells.by_concurrency, cells.handshakes, cells.by_rate, cells.by_share, cells.by_load];
        let own = [&mut self.by_concurrency, &mut self.handshakes, &mut self.by_rate, &mut self.by_share, &mut self.by_load];
        self.waited = self.waited.zip(other.waited).map(|(a, b)| a + b);
        self.batches = (self.batches.0 + other.batches.0, self.batches.1 + other.batches.1);
        self.why = self.why.take().or_else(|| other.why.clone());
        for (own, other) in own.into_iter().zip(rows(other)) {
            own.iter_mut().zip(other).for_each(|(own, other)| own.take(&other));
        }
    }
}

pub(crate) fn run(flags: &Flags) -> anyhow::Result<()> {
    println!("Processor: {}.", limits::processor());
    for algorithm in Algorithm::ALL {
        let mut cells: BTreeMap<&str, Cells> = BTreeMap::new();
        // What `none` can do under its cap sets the rates of figure 28.
        let mut capacity = None;
        for round in 1..=flags.rounds {
            for mode in Mode::ALL {
                eprintln!("{} {}, round {round} of {}", algorithm.name(), mode.name(), flags.rounds);
                let scene = Scene::up(algorithm, mode)?;
                let measured = measure(&scene, flags, &mut capacity).with_context(|| format!("{} {}", algorithm.name(), mode.name()))?;
                match cells.get_mut(mode.name()) {
                    Some(cells) => cells.take(measured),
                    None => drop(cells.insert(mode.name(), measured)),
                }
            }
        }
        print(algorithm, flags, &cells);
    }
    Ok(())
}

fn measure(scene: &Scene, flags: &Flags, capacity: &mut Option<f64>) -> anyhow::Result<Cells> {
    let run = |pace, share, handshakes| scene.run(&Run { pace, seconds: flags.seconds, share, handshakes });
    let capped = Some(flags.share);
    let mut cells = Cells::default();
    for concurrency in CONCURRENCY {
        let waited = scene.mode() == Mode::Remote && concurrency == 1;
        let before = if waited { Some(waits(scene)?) } else { None };
        cells.by_concurrency.push(run(Pace::Concurrency(concurrency), capped, false)?);
        if let Some(before) = before {
            cells.waited = Some(waits(scene)? - before);
        }
    }
    for concurrency in CONCURRENCY {
        cells.handshakes.push(run(Pace::Concurrency(concurrency), capped, true)?);
    }
    for rate in RATES {
        cells.by_rate.push(run(Pace::Rate(rate), None, false)?);
    }
    for share in SHARES {
        cells.by_share.push(run(Pace::Concurrency(32), Some(share), false)?);
    }
    let capacity = *capacity.get_or_insert_with(|| cells.by_concurrency.iter().map(|m| m.per_second).fold(0.0, f64::max));
    for load in LOADS {
        cells.by_load.push(run(Pace::Rate(capacity * load), capped, false)?);
    }
    if scene.mode() == Mode::Remote {
        let own = scene.counted(false, "canal_keys_fallbacks_total", "")?;
        anyhow::ensure!(own == 0.0, "the node proxy used its own key {own} times; this is not the key server's figure");
        cells.batches = batches(scene)?;
    }
    cells.why = scene.why();
    Ok(cells)
}

/// Requests that the key server put behind others.
fn waits(scene: &Scene) -> anyhow::Result<f64> {
    scene.counted(true, "canal_key_batch_waited_total", "")
}

fn batches(scene: &Scene) -> anyhow::Result<(f64, f64)> {
    Ok((scene.counted(true, "canal_key_batch_size_sum", "")?, scene.counted(true, "canal_key_batch_size_count", "")?))
}

fn print(algorithm: Algorithm, flags: &Flags, cells: &BTreeMap<&'static str, Cells>) {
    let name = algorithm.name();
    let of = |mode: Mode| &cells[mode.name()];
    let percent = |now: f64, was: f64| 100.0 * (now / was - 1.0);
    println!("\n### {name}\n");
    println!("Fig. 12: CPU of the node proxy for each new mTLS session, µs (share of a core: {:.0} %).\n", flags.share * 100.0);
    println!("| concurrency | none | local | remote | remote beside none | beside local | key server |\n|---|---|---|---|---|---|---|");
    let row = |what: String, get: &dyn Fn(Mode) -> Measured| {
        let (none, local, remote) = (get(Mode::None), get(Mode::Local), get(Mode::Remote));
        println!(
            "| {what} | {:.0} | {:.0} | {:.0} | {:+.0} % | {:+.0} % | {:.0} |",
            none.node_us,
            local.node_us,
            remote.node_us,
            percent(remote.node_us, none.node_us),
            percent(remote.node_us, local.node_us),
            remote.keys_us
        );
    };
    for (at, concurrency) in CONCURRENCY.iter().enumerate() {
        row(format!("session alone, {concurrency}"), &|mode| of(mode).handshakes[at]);
    }
    for (at, concurrency) in CONCURRENCY.iter().enumerate() {
        row(format!("short flow, {concurrency}"), &|mode| of(mode).by_concurrency[at]);
    }
    println!("\nFig. 23: completion of a short flow, p50 / p90 ms, nothing capped.\n");
    table("flows per second", &RATES.map(|r| r.to_string()), |at| Mode::ALL.map(|mode| latencies(&of(mode).by_rate[at])));
    println!("\nFig. 25: short flows per second by concurrency, share {:.0} %.\n", flags.share * 100.0);
    table("concurrency", &CONCURRENCY.map(|c| c.to_string()), |at| throughputs(Mode::ALL.map(|mode| of(mode).by_concurrency[at])));
    println!("\nThe same of sessions alone.\n");
    table("concurrency", &CONCURRENCY.map(|c| c.to_string()), |at| throughputs(Mode::ALL.map(|mode| of(mode).handshakes[at])));
    println!("\nFig. 27: short flows per second by the node proxy's share of a core, concurrency 32.\n");
    table("share", &SHARES.map(|s| format!("{:.0} %", s * 100.0)), |at| throughputs(Mode::ALL.map(|mode| of(mode).by_share[at])));
    println!("\nFig. 28: p50 / p90 ms by load, in parts of what none can do, share {:.0} %.\n", flags.share * 100.0);
    table("load", &LOADS.map(|l| l.to_string()), |at| Mode::ALL.map(|mode| latencies(&of(mode).by_load[at])));
    let remote = of(Mode::Remote);
    let all = |c: &Cells| {
        c.by_concurrency
            .iter()
            .chain(&c.handshakes)
            .chain(&c.by_rate)
            .chain(&c.by_share)
            .chain(&c.by_load)
            .map(|m| (m.done, m.failed))
            .fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    };
    println!(
        "\nRequests that waited in a batch at concurrency 1: {:?}; mean batch over all: {:.1}.",
        remote.waited,
        remote.batches.0 / remote.batches.1
    );
    for mode in Mode::ALL {
        let (done, failed) = all(of(mode));
        println!(
            "{}: {done} flows, {failed} failed{}.",
            mode.name(),
            of(mode).why.as_ref().map_or(String::new(), |why| format!(" ({why})"))
        );
    }
}

fn latencies(m: &Measured) -> String {
    format!("{:.2} / {:.2}", m.p50_ms, m.p90_ms)
}

fn throughputs(all: [Measured; 3]) -> [String; 3] {
    let base = all[0].per_second;
    all.map(|m| format!("{:.0} ({:.2} x)", m.per_second, m.per_second / base))
}

fn table(what: &str, rows: &[String], cells: impl Fn(usize) -> [String; 3]) {
    println!("| {what} | none | local | remote |\n|---|---|---|---|");
    for (at, row) in rows.iter().enumerate() {
        println!("| {row} | {} |", cells(at).join(" | "));
    }
}
