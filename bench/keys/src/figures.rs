//! The paper's figures on the key server (12, 23, 25, 27, 28), each from runs of the same load in
//! the same worlds. It measures them; `tables` prints.

use std::collections::BTreeMap;

use anyhow::Context;

use crate::figure_spread::{LoadFigures, Rounds};
use crate::limits;
use crate::load::{ConnectPace, LoadRun};
use crate::scene::{AsymmetricMode, CertificateAlgorithm, KeyBenchWorld, Network};
use crate::tables;

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Seconds of load for each cell and round
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Number of runs of which each cell is the median, each in a world of its own; the modes take
    /// turns
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Share of a core of the node proxy in figures 12, 25, 27 and 28, which makes the node proxy
    /// the bottleneck, and not the load
    #[arg(long, default_value_t = 0.15)]
    pub(crate) share: f64,
    /// Only this algorithm; both by default
    #[arg(long, value_enum)]
    algorithm: Option<CertificateAlgorithm>,
    /// Only this figure (12, 23, 25, 27 or 28); all by default
    #[arg(long, value_parser = clap::value_parser!(u32).range(12..=28))]
    pub(crate) figure: Option<u32>,
    #[arg(long, value_enum, default_value_t = Network::Apart)]
    network: Network,
}

impl Flags {
    /// Returns whether a figure is requested.
    pub(crate) fn wants(&self, figure: u32) -> bool {
        self.figure.is_none_or(|one| one == figure)
    }
}

/// Numbers of concurrent flows in figures 12 and 25: powers of two, on both sides of the eight of a
/// batch.
pub(crate) const CONCURRENCY: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Shares of a core in figure 27 (the paper: whole cores).
/// On two cores only a small share makes the capped process the bottleneck.
pub(crate) const SHARES: [f64; 4] = [0.05, 0.10, 0.15, 0.20];
/// Flows per second in figure 23, where nothing is capped.
/// They only have to be below the maximum of the slowest mode, so that no queue grows. Nobody
/// measured other rates.
pub(crate) const RATES: [f64; 3] = [50.0, 150.0, 300.0];
/// Load in figure 28, as a fraction of the maximum of `none`.
/// Latency rises most near the maximum, so more points are there.
pub(crate) const LOADS: [f64; 4] = [0.3, 0.6, 0.8, 0.9];

/// A row of a figure: the cells that differ only in algorithm and mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FigureRow {
    /// Short flows; index into [`CONCURRENCY`].
    Flows(usize),
    /// Sessions without a request; index into [`CONCURRENCY`].
    Sessions(usize),
    /// Index into [`RATES`].
    Rate(usize),
    /// Index into [`SHARES`].
    Share(usize),
    /// Index into [`LOADS`].
    Load(usize),
}

/// All cells of one algorithm and mode.
#[derive(Default)]
pub(crate) struct Cells {
    pub(crate) rows: BTreeMap<FigureRow, Rounds>,
    /// Requests of the key server that waited in a batch while there was one flow at a time.
    pub(crate) waited: f64,
    /// Sum of the sizes of all batches, and their number.
    pub(crate) batches: (f64, f64),
    /// Error of the first flow that failed.
    pub(crate) why: Option<String>,
}

impl Cells {
    fn add(&mut self, row: FigureRow, measured: LoadFigures) {
        self.rows.entry(row).or_default().add(measured);
    }
}

/// The cells of one algorithm.
pub(crate) type ByMode = BTreeMap<&'static str, Cells>;

pub(crate) fn run(flags: &Flags) -> anyhow::Result<()> {
    println!("Processor: {}.", limits::processor());
    for algorithm in CertificateAlgorithm::ALL
        .into_iter()
        .filter(|one| flags.algorithm.is_none_or(|wanted| wanted == *one))
    {
        let mut cells: ByMode = AsymmetricMode::ALL
            .map(|mode| (mode.name(), Cells::default()))
            .into();
        // The maximum of `none` under its cap determines the rates of figure 28.
        let mut capacity = None;
        for round in 0..flags.rounds {
            // Modes take turns, so that other load on the machine affects each alike; `none` is
            // first in the first round.
            for at in 0..AsymmetricMode::ALL.len() {
                let mode = AsymmetricMode::ALL[(at + round as usize) % AsymmetricMode::ALL.len()];
                eprintln!(
                    "{} {}, round {} of {}",
                    algorithm.name(),
                    mode.name(),
                    round + 1,
                    flags.rounds
                );
                let scene = KeyBenchWorld::up(algorithm, mode, flags.network)?;
                let cells = cells.get_mut(mode.name()).context("every mode has cells")?;
                measure(&scene, flags, cells, &mut capacity)
                    .with_context(|| format!("{} {}", algorithm.name(), mode.name()))?;
            }
        }
        tables::print(algorithm, flags, &cells);
    }
    Ok(())
}

fn measure(
    scene: &KeyBenchWorld,
    flags: &Flags,
    cells: &mut Cells,
    capacity: &mut Option<f64>,
) -> anyhow::Result<()> {
    let run = |pace, share, handshakes| {
        scene.run(&LoadRun {
            pace,
            seconds: flags.seconds,
            share,
            handshakes,
        })
    };
    let capped = Some(flags.share);
    let mut best = 0.0f64;
    // Fig. 28's loads are parts of the first mode's highest rate, so it needs flows too.
    let needs_flows = flags.wants(25) || flags.wants(12) || flags.wants(28) && capacity.is_none();
    for (at, concurrency) in CONCURRENCY.into_iter().enumerate().filter(|_| needs_flows) {
        // One flow at a time has no others to be batched with, so none of its requests should wait.
        let waited = scene.mode() == AsymmetricMode::Remote && concurrency == 1;
        let before = if waited { waits(scene)? } else { 0.0 };
        let measured = run(ConnectPace::Concurrency(concurrency), capped, false)?;
        best = best.max(measured.per_second);
        cells.add(FigureRow::Flows(at), measured);
        if waited {
            cells.waited += waits(scene)? - before;
        }
    }
    for (at, concurrency) in CONCURRENCY
        .into_iter()
        .enumerate()
        // Figure 12 compares CPU per session, and 25 prints sessions beside flows.
        .filter(|_| flags.wants(12) || flags.wants(25))
    {
        cells.add(
            FigureRow::Sessions(at),
            run(ConnectPace::Concurrency(concurrency), capped, true)?,
        );
    }
    for (at, rate) in RATES.into_iter().enumerate().filter(|_| flags.wants(23)) {
        // Figure 23 is about latency at a given rate, so nothing is capped.
        cells.add(
            FigureRow::Rate(at),
            run(ConnectPace::Rate(rate), None, false)?,
        );
    }
    for (at, share) in SHARES.into_iter().enumerate().filter(|_| flags.wants(27)) {
        // One concurrency for all shares, so that only the share differs.
        cells.add(
            FigureRow::Share(at),
            // 32 flows at once keep a whole core busy, so that any share is used up.
            run(ConnectPace::Concurrency(32), Some(share), false)?,
        );
    }
    if flags.wants(28) {
        // The first mode is `none`, whose best rate is 100 % for all modes.
        let capacity = *capacity.get_or_insert(best);
        for (at, load) in LOADS.into_iter().enumerate() {
            cells.add(
                FigureRow::Load(at),
                run(ConnectPace::Rate(capacity * load), capped, false)?,
            );
        }
    }
    // A local fallback would measure the node's own key instead of the key server.
    if scene.mode() == AsymmetricMode::Remote {
        let own = scene.counted(false, "canal_keys_fallbacks_total", "")?;
        anyhow::ensure!(
            own == 0.0,
            "the node proxy used its own key {own} times; this is not the key server's figure"
        );
        let (sum, count) = batches(scene)?;
        cells.batches = (cells.batches.0 + sum, cells.batches.1 + count);
    }
    // The first error is enough to explain failed flows.
    cells.why = cells.why.take().or_else(|| scene.why());
    Ok(())
}

/// Returns the number of requests that the key server queued behind others.
fn waits(scene: &KeyBenchWorld) -> anyhow::Result<f64> {
    scene.counted(true, "canal_key_operations_queued_total", "")
}

fn batches(scene: &KeyBenchWorld) -> anyhow::Result<(f64, f64)> {
    Ok((
        scene.counted(true, "canal_key_batch_size_sum", "")?,
        scene.counted(true, "canal_key_batch_size_count", "")?,
    ))
}
