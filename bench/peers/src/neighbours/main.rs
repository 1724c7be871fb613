//! Effect of a noisy tenant on the latency of others that share one worker with it: Canal's
//! gateway, and HAProxy and Envoy for comparison. Each runs on a core of its own in one network,
//! the load and the origin on the other core. The tenants' load is plaintext HTTP/1.1.

#![forbid(unsafe_code)]

mod flood;
mod generator;
mod proxies;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context;
use canal_bench_peers::canal::Build;
use canal_bench_peers::process::{LOAD_CORE, PinnedProcess};
use canal_bench_peers::spread::{Spread, quantile};
use canal_bench_peers::{document, namespace, origin};
use clap::Parser;
use flood::FloodThread;
use generator::{LoadOutcome, LoadSpec};
use proxies::Proxy;

/// Measures the p99 of quiet tenants' requests while one other tenant is quiet, sends ten times its
/// share, and sends as fast as it gets responses. Fails if Canal's p99 beside a tenant at ten times
/// its share is above --bar times the quiet one, as the median of the rounds.
#[derive(Parser)]
#[command(after_help = "Examples:
  canal-bench-neighbours --rounds 7 --markdown docs/performance.md
  canal-bench-neighbours --only canal --rounds 3 --seconds 2")]
struct Flags {
    /// Rounds; in each every proxy has every phase, the proxies and phases in turns.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Seconds of load in a phase.
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// Tenants.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u8).range(2..=250))]
    tenants: u8,
    /// A tenant's share: requests a second of each quiet tenant.
    #[arg(long, default_value_t = 10.0)]
    share: f64,
    /// Load of the noisy tenant, in shares.
    #[arg(long, default_value_t = 10.0)]
    noise: f64,
    /// Only these proxies (canal, haproxy, envoy).
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Maximum p99 of the noisy phase, as a multiple of the quiet phase's p99.
    #[arg(long, default_value_t = 1.2)]
    bar: f64,
    /// The random numbers' seed.
    #[arg(long, default_value_t = 13)]
    seed: u64,
    /// The folder with `canal` and `canal-gateway`.
    #[arg(long, default_value = "target/release")]
    build: PathBuf,
    /// Replace the table between the `bench-neighbours` marks of this file.
    #[arg(long)]
    markdown: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BenchPhase {
    Quiet,
    Noisy,
    /// A second quiet phase: the difference between two phases without a change.
    QuietAgain,
    Flood,
}

impl BenchPhase {
    const ALL: [BenchPhase; 4] = [
        BenchPhase::Quiet,
        BenchPhase::Noisy,
        BenchPhase::QuietAgain,
        BenchPhase::Flood,
    ];

    fn name(self, noise: f64) -> String {
        match self {
            BenchPhase::Quiet => "quiet".into(),
            BenchPhase::Noisy => format!("one at {noise} x its share"),
            BenchPhase::QuietAgain => "quiet again".into(),
            BenchPhase::Flood => "one as fast as it is answered".into(),
        }
    }
}

/// One phase of one round.
struct NeighbourResult {
    p50: f64,
    p99: f64,
    /// Fraction of the quiet tenants' requests that got a response.
    goodput: f64,
    lateness: f64,
    /// Utilization of the proxy's core.
    busy: f64,
    flooded: f64,
}

struct NeighbourRow {
    proxy: &'static str,
    phase: BenchPhase,
    runs: Vec<NeighbourResult>,
}

fn request(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: s0.default\r\n\r\n").into_bytes()
}

fn measure(
    proxy: &PinnedProcess,
    load: &LoadSpec<'_>,
    phase: BenchPhase,
) -> anyhow::Result<NeighbourResult> {
    let flood =
        (phase == BenchPhase::Flood).then(|| FloodThread::start(load.noisy, request("/nothing")));
    let (begun, before) = (Instant::now(), proxy.cpu_us()?);
    let outcome = generator::run(load, &request(&format!("{}/things", proxies::ROUTE)));
    let (took, after) = (begun.elapsed().as_secs_f64(), proxy.cpu_us()?);
    let flooded = flood.map(FloodThread::stop).transpose()?.unwrap_or(0) as f64 / took;
    let LoadOutcome {
        latencies,
        sent_quiet,
        answered,
        lateness,
    } = outcome?;
    let busy = (after.0 + after.1 - before.0 - before.1) / took / 1e6;
    let of = |part| quantile(&latencies, part);
    Ok(NeighbourResult {
        p50: of(0.5),
        p99: of(0.99),
        goodput: answered as f64 / sent_quiet as f64,
        lateness: quantile(&lateness, 0.99),
        busy,
        flooded,
    })
}

/// Runs all phases of one proxy in one round.
fn round(
    proxy: &Proxy,
    folders: &proxies::ProxyFolders,
    flags: &Flags,
    number: u64,
) -> anyhow::Result<Vec<NeighbourResult>> {
    let addresses = proxy.addresses(flags.tenants);
    let (noisy, quiet) = addresses.split_first().context("there is no tenant")?;
    let running = proxy.start(folders, &addresses)?;
    running.settle()?;
    let measured = BenchPhase::ALL.map(|phase| {
        let noise = if phase == BenchPhase::Noisy {
            flags.noise * flags.share
        } else {
            0.0
        };
        let load = LoadSpec {
            quiet,
            noisy: *noisy,
            share: flags.share,
            noise,
            seconds: flags.seconds,
            seed: flags.seed + number,
        };
        measure(&running, &load, phase).with_context(|| format!("{}, {phase:?}", proxy.name))
    });
    measured.into_iter().collect()
}

/// Returns the ratio of a phase's p99 to that of the quiet phase before it, in each round.
fn ratios(rows: &[NeighbourRow], proxy: &str, phase: BenchPhase) -> Spread {
    let of = |phase| {
        rows.iter()
            .find(|row| row.proxy == proxy && row.phase == phase)
            .map(|row| row.runs.as_slice())
            .unwrap_or_default()
    };
    let beside = if phase == BenchPhase::Flood {
        BenchPhase::QuietAgain
    } else {
        BenchPhase::Quiet
    };
    Spread::of(
        of(phase)
            .iter()
            .zip(of(beside))
            .map(|(run, quiet)| run.p99 / quiet.p99),
    )
}

fn render(rows: &[NeighbourRow], flags: &Flags) -> String {
    let mut out = format!(
        "{} tenants, each with an address of its own; {} requests/s of each quiet one, open loop; {} rounds x {} s a phase, in turns; medians. One worker each on \
         core 0; origin and load on core 1; seed {}.\n\n\
         | proxy | phase | p50 ms | p99 ms | p99 / quiet, median | least to most | goodput | proxy's core | noisy requests/s | generator late, p99 ms |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
        flags.tenants, flags.share, flags.rounds, flags.seconds, flags.seed
    );
    for row in rows {
        let median = |of: fn(&NeighbourResult) -> f64| Spread::of(row.runs.iter().map(of)).median;
        let ratio = ratios(rows, row.proxy, row.phase);
        let (ratio, range) = match row.phase {
            BenchPhase::Quiet => (String::new(), String::new()),
            _ => (
                format!("**{:.2}**", ratio.median),
                format!("{:.2} to {:.2}", ratio.min, ratio.max),
            ),
        };
        let noisy = match row.phase {
            BenchPhase::Noisy => flags.noise * flags.share,
            _ => median(|m| m.flooded),
        };
        out.push_str(&format!(
            "| {} | {} | {:.3} | {:.3} | {ratio} | {range} | {:.2} % | {:.0} % | {noisy:.0} | {:.3} |\n",
            row.proxy,
            row.phase.name(flags.noise),
            median(|m| m.p50),
            median(|m| m.p99),
            median(|m| m.goodput) * 100.0,
            median(|m| m.busy) * 100.0,
            median(|m| m.lateness),
        ));
    }
    out
}

fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    // A network namespace of its own keeps ports and loopback traffic of the machine apart.
    namespace::enter()?;
    // One core for the load and another for the proxy: neither takes time from the other.
    let core: usize = LOAD_CORE.parse()?;
    let mut cores = rustix::thread::CpuSet::new();
    cores.set(core);
    rustix::thread::sched_setaffinity(None, &cores)?;
    // Other processes on the machine get less priority than this program and its children.
    rustix::process::setpriority_process(None, -20)?;
    let dir = tempfile::tempdir().context("a temporary directory")?;
    let folders = proxies::ProxyFolders {
        envoy: std::env::current_dir()?.join(".tools/envoy/bin/envoy"),
        dir: dir.path().to_owned(),
        build: Build::at(&flags.build)?,
    };
    let _origin = origin::start(dir.path())?;
    let wanted: Vec<&Proxy> = proxies::ALL
        .iter()
        .filter(|p| flags.only.is_empty() || flags.only.iter().any(|o| o == p.name))
        .collect();
    let row = |proxy: &&Proxy| {
        BenchPhase::ALL.map(|phase| NeighbourRow {
            proxy: proxy.name,
            phase,
            runs: Vec::new(),
        })
    };
    let mut rows: Vec<NeighbourRow> = wanted.iter().flat_map(row).collect();
    // Proxies take turns in each round, so that a change of the machine affects all.
    for number in 0..flags.rounds {
        for proxy in &wanted {
            let measured = round(proxy, &folders, &flags, number)?;
            let p99: Vec<_> = measured.iter().map(|m| format!("{:.3}", m.p99)).collect();
            eprintln!(
                "round {}/{}: {}, p99 ms {}",
                number + 1,
                flags.rounds,
                proxy.name,
                p99.join(", ")
            );
            for (row, run) in rows
                .iter_mut()
                .filter(|row| row.proxy == proxy.name)
                .zip(measured)
            {
                row.runs.push(run);
            }
        }
    }
    let text = render(&rows, &flags);
    print!("{text}");
    if let Some(path) = &flags.markdown {
        document::replace(path, "bench-neighbours", &text)?;
    }
    // Without Canal among the proxies (`--only`), there is no ratio to check: it is NaN.
    let ratio = ratios(&rows, "canal", BenchPhase::Noisy).median;
    anyhow::ensure!(
        ratio.is_nan() || ratio <= flags.bar,
        "beside one noisy tenant the others' p99 is {ratio:.2} x the quiet one; {} is borne",
        flags.bar
    );
    Ok(())
}
