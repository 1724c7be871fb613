//! CPU per request of `canal-gateway` beside HAProxy, nginx and Envoy, one worker each, in one run on one machine.
//! Starts the real programs on loopback, drives them with wrk and h2load, prints one table. It judges nothing.

#![forbid(unsafe_code)]

mod load;
mod peers;
mod table;

use std::path::PathBuf;

use anyhow::Context;
use canal_bench_peers::canal::Build;
use canal_bench_peers::{document, namespace, origin};
use clap::Parser;

/// Compares gateways by CPU time per request (user + system, from /proc), the figure that survives a noisy machine.
#[derive(Parser)]
#[command(after_help = "Examples:
  canal-bench-peers --seconds 5 --runs 3 --markdown docs/performance.md
  canal-bench-peers --before ../before/target/release --only canal-before,canal --runs 12 --markdown docs/performance.md")]
struct Flags {
    /// Seconds of load per run.
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    /// Runs per proxy and case; the median is printed. The proxies take turns, so that drift hits all alike.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Only these proxies (canal, canal-before, canal-100k, haproxy, nginx, envoy).
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// A folder with `canal` and `canal-gateway` of another commit: measures them as canal-before, in turns with canal, and compares the two.
    #[arg(long)]
    before: Option<PathBuf>,
    /// Replace the table between the `bench-peers` marks of this file, and with --before the one between the `bench-before` marks.
    #[arg(long)]
    markdown: Option<PathBuf>,
}

/// One measured run.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    pub(crate) user_us: f64,
    pub(crate) sys_us: f64,
    pub(crate) rss_mib: f64,
}

fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    namespace::enter()?;
    let dir = tempfile::tempdir().context("a temporary directory")?;
    let place = peers::Place {
        tools: std::env::current_dir()?.join(".tools"),
        dir: dir.path().to_owned(),
        now: Build::at("target/release".as_ref())?,
        before: flags.before.as_deref().map(Build::at).transpose()?,
    };
    // What else runs on the machine gives way to this program and to what it starts.
    rustix::process::setpriority_process(None, -20)?;
    let _origin = origin::start(dir.path())?;
    let mut rows: Vec<table::Row> = Vec::new();
    // The proxies of one case follow each other, so that a pair of builds is measured within seconds.
    for case in load::Case::ALL {
        let wanted = |peer: &&peers::Peer| flags.only.is_empty() || flags.only.iter().any(|o| o == peer.name);
        let there = |peer: &&peers::Peer| peer.speaks(case) && (place.before.is_some() || !peer.is_before());
        rows.extend(peers::all().filter(wanted).filter(there).map(|peer| table::Row::new(peer, case)));
    }
    for n in 0..flags.runs {
        for row in &mut rows {
            eprintln!("run {}/{}: {} {}", n + 1, flags.runs, row.peer.name, row.case.name());
            let mut proxy = (row.peer.start)(&place).with_context(|| format!("starting {}", row.peer.name))?;
            let run = load::measure(&proxy, row.case, flags.seconds);
            proxy.stop();
            row.runs.push(run?);
        }
        // Who comes first in a round comes last in the next, so that being first is nobody's advantage.
        rows.reverse();
    }
    if flags.runs % 2 == 1 {
        rows.reverse();
    }
    report(&flags, &rows)
}

fn report(flags: &Flags, rows: &[table::Row]) -> anyhow::Result<()> {
    let tables = [("bench-peers", table::render(rows, flags.runs, flags.seconds)), ("bench-before", table::compare(rows, flags.seconds))];
    // Of two builds alone only the comparison says anything, and without another build there is none.
    let is_wanted = |mark: &str| if mark == "bench-before" { flags.before.is_some() } else { rows.iter().any(|row| !row.peer.is_canal()) };
    for (mark, text) in tables.iter().filter(|(mark, _)| is_wanted(mark)) {
        print!("{text}");
        if let Some(path) = &flags.markdown {
            document::replace(path, mark, text)?;
        }
    }
    Ok(())
}
