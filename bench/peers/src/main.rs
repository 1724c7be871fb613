//! CPU per request of `canal-gateway` beside HAProxy, nginx and Envoy, one worker each, in one run
//! on one machine. It starts the real programs in a private network, drives them with wrk, h2load
//! and its own load, and prints one table. It does not assess the results.

#![forbid(unsafe_code)]

mod asker;
mod case;
mod certificates;
mod load;
mod peers;
mod table;
mod tls_origin;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use canal_bench_peers::canal::Build;
use canal_bench_peers::process::PinnedProcess;
use canal_bench_peers::{document, namespace, origin};
use clap::Parser;
use rustls::ClientConfig;

use crate::case::ProxyCase;
use crate::load::{LoadPace, ProxyLoad};
use crate::peers::{PeerFolders, PeerProxy};
use crate::table::ResultRow;

/// Compares gateways by CPU time per request (user + system, from /proc), which depends least on a
/// noisy machine. Each case has two loads: at the maximum rate, and at half of the maximum of its
/// slowest proxy, which is measured first.
#[derive(Parser)]
#[command(after_help = "Examples:
  canal-bench-peers --seconds 2 --markdown docs/performance.md
  canal-bench-peers --cases http1,close --only canal,nginx --runs 7
  canal-bench-peers --before ../before/target/release --only canal-before,canal --runs 12 --markdown docs/performance.md")]
struct Flags {
    /// Seconds of each load in a run.
    #[arg(long, default_value_t = 1)]
    seconds: u32,
    /// Number of rounds. In each, every proxy gets each load of each case once, so that drift
    /// affects all proxies equally. The median is printed.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Only these proxies (canal, canal-before, canal-100k, canal-100k-controller, haproxy, nginx,
    /// envoy).
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only these cases (http1, close, h2c, one, spread, mtls, policies).
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// A folder with `canal` and `canal-gateway` of another commit: measures them as canal-before,
    /// in turns with canal, and compares the two.
    #[arg(long)]
    before: Option<PathBuf>,
    /// Replace the table between the `bench-peers` marks of this file, and with --before the one
    /// between the `bench-before` marks.
    #[arg(long)]
    markdown: Option<PathBuf>,
}

/// Seconds of the load that determines a proxy's maximum.
/// The result only scales the stated rates, so that a short load is enough.
const CALIBRATION: u32 = 1;

fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    for word in &flags.cases {
        anyhow::ensure!(
            ProxyCase::ALL.iter().any(|case| case.word() == word),
            "there is no case {word:?}; --help lists them"
        );
    }
    for name in &flags.only {
        anyhow::ensure!(
            peers::all().any(|peer| peer.name == name),
            "there is no proxy {name:?}; --help lists them"
        );
    }
    // A network namespace of its own keeps ports and loopback traffic of the machine apart.
    namespace::enter()?;
    let dir = tempfile::tempdir().context("a temporary directory")?;
    let before = flags.before.as_deref().map(Build::at).transpose()?;
    let folders = PeerFolders::new(dir.path(), Build::at("target/release".as_ref())?, before)?;
    // Other processes on the machine get less priority than this program and its children.
    rustix::process::setpriority_process(None, -20)?;
    let _origin = origin::start(dir.path())?;
    tls_origin::start(folders.certificates.server()?)?;
    let tls = folders.certificates.client()?;
    let mut rows = rows(&flags);
    anyhow::ensure!(
        // Flags may combine a proxy with cases that it does not have.
        !rows.is_empty(),
        "none of these proxies has one of these cases"
    );
    // A peer that is not installed is reported before the rounds, not after them.
    let versions = if rows.iter().any(|row| !row.peer.is_canal()) {
        folders.versions()?
    } else {
        String::new()
    };
    calibrate(&folders, &tls, &mut rows)?;
    let mut reused = ReusedProxy::default();
    for n in 0..flags.runs {
        for row in &mut rows {
            eprintln!(
                "round {}/{}: {} {}",
                n + 1,
                flags.runs,
                row.peer.name,
                row.case.name()
            );
            let what = format!("{}, {}", row.peer.name, row.case.name());
            measure(&folders, &tls, (row, &mut reused), flags.seconds).with_context(|| what)?;
        }
        // The order is reversed in every other round, so that being first is not an advantage.
        rows.reverse();
    }
    // An odd number of rounds leaves the rows reversed, and the report has them in their order.
    if flags.runs % 2 == 1 {
        rows.reverse();
    }
    report(&flags, &versions, &rows)
}

/// Returns the measurements in order. The proxies of one case follow each other, so that a pair is
/// measured within seconds. Of the two cases with 10,000 services each proxy runs both in turn,
/// because it takes long to start.
fn rows(flags: &Flags) -> Vec<ResultRow> {
    let is_wanted = |case: ProxyCase| {
        flags.cases.is_empty() || flags.cases.iter().any(|word| word == case.word())
    };
    let peers = || {
        let wanted =
            |peer: &&PeerProxy| flags.only.is_empty() || flags.only.iter().any(|o| o == peer.name);
        peers::all()
            .filter(wanted)
            .filter(|peer| flags.before.is_some() || !peer.is_before())
    };
    let (large, small): (Vec<ProxyCase>, Vec<ProxyCase>) = ProxyCase::ALL
        .into_iter()
        .filter(|case| is_wanted(*case))
        .partition(|case| case.is_large());
    let each = small
        .iter()
        .flat_map(|case| peers().map(|peer| (peer, *case)));
    let both = peers().flat_map(|peer| large.iter().map(move |case| (peer, *case)));
    each.chain(both)
        .filter(|(peer, case)| peer.supports(*case))
        .map(|(peer, case)| ResultRow::new(peer, case))
        .collect()
}

/// The proxy that was measured last.
#[derive(Default)]
struct ReusedProxy(Option<(&'static str, ProxyCase, PinnedProcess)>);

impl ReusedProxy {
    /// Returns the warm proxy for this row: the last one if it is the same with the same 10,000
    /// services.
    fn proxy(
        &mut self,
        folders: &PeerFolders,
        row: &ResultRow,
        load: &ProxyLoad,
    ) -> anyhow::Result<&PinnedProcess> {
        let last = self.0.take().filter(|(name, case, _)| {
            *name == row.peer.name && case.is_large() && row.case.is_large()
        });
        let proxy = match last {
            Some((_, _, proxy)) => proxy,
            None => (row.peer.start)(folders, row.case)?,
        };
        load.warm(&proxy)?;
        Ok(&self.0.insert((row.peer.name, row.case, proxy)).2)
    }
}

fn load(row: &ResultRow, tls: &Arc<ClientConfig>) -> ProxyLoad {
    ProxyLoad {
        case: row.case,
        is_canal: row.peer.is_canal(),
        tls: tls.clone(),
    }
}

/// Sets each case's rate: half of the maximum of its slowest proxy, with two digits.
fn calibrate(
    folders: &PeerFolders,
    tls: &Arc<ClientConfig>,
    rows: &mut [ResultRow],
) -> anyhow::Result<()> {
    let mut reused = ReusedProxy::default();
    let mut slowest = [f64::INFINITY; ProxyCase::ALL.len()];
    let at = |case: ProxyCase| ProxyCase::ALL.iter().position(|c| *c == case).unwrap_or(0);
    for row in rows.iter() {
        eprintln!("what {} can do: {}", row.peer.name, row.case.name());
        let load = load(row, tls);
        let mut once = || {
            load.measure(
                reused.proxy(folders, row, &load)?,
                LoadPace::Saturated,
                CALIBRATION,
            )
        };
        let sample = once().with_context(|| format!("{}, {}", row.peer.name, row.case.name()))?;
        slowest[at(row.case)] = slowest[at(row.case)].min(sample.per_second);
    }
    rows.iter_mut()
        // At half of the slowest proxy's maximum, no proxy of the case has a queue.
        .for_each(|row| row.rate = rounded(slowest[at(row.case)] / 2.0));
    Ok(())
}

/// Rounds a rate to two digits.
fn rounded(rate: f64) -> f64 {
    let unit = 10_f64.powf(rate.max(1.0).log10().floor() - 1.0);
    (rate / unit).floor() * unit
}

fn measure(
    folders: &PeerFolders,
    tls: &Arc<ClientConfig>,
    (row, reused): (&mut ResultRow, &mut ReusedProxy),
    seconds: u32,
) -> anyhow::Result<()> {
    let load = load(row, tls);
    let proxy = reused.proxy(folders, row, &load)?;
    row.saturated
        .push(load.measure(proxy, LoadPace::Saturated, seconds)?);
    row.stated
        .push(load.measure(proxy, LoadPace::Rate(row.rate), seconds)?);
    Ok(())
}

fn report(flags: &Flags, versions: &str, rows: &[ResultRow]) -> anyhow::Result<()> {
    let peers = table::render(rows, versions, flags.runs, flags.seconds);
    let tables = [
        ("bench-peers", peers),
        ("bench-before", table::compare(rows, flags.seconds)),
    ];
    // The comparison of two builds needs an earlier build. The other tables need a proxy other than
    // Canal.
    let is_wanted = |mark: &str| {
        if mark == "bench-before" {
            flags.before.is_some()
        } else {
            rows.iter().any(|row| !row.peer.is_canal())
        }
    };
    for (mark, text) in tables.iter().filter(|(mark, _)| is_wanted(mark)) {
        print!("{text}");
        if let Some(path) = &flags.markdown {
            document::replace(path, mark, text)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn rates_have_two_digits() {
        assert_eq!(super::rounded(23_987.0), 23_000.0);
        assert_eq!(super::rounded(987.0), 980.0);
    }
}
