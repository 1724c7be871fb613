//! CPU per request of `canal-gateway` beside HAProxy, nginx and Envoy, one worker each, in one run on one machine.
//! Starts the real programs on loopback, drives them with wrk and h2load, prints one table. It judges nothing.

#![forbid(unsafe_code)]

mod load;
mod peers;
mod process;
mod table;

use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;

/// Compares gateways by CPU time per request (user + system, from /proc), the figure that survives a noisy machine.
#[derive(Parser)]
#[command(after_help = "Example: canal-bench-peers --seconds 5 --runs 3 --markdown docs/performance.md")]
struct Flags {
    /// Seconds of load per run.
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    /// Runs per proxy and case; the median is printed. The proxies take turns, so that drift hits all alike.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Only these proxies (canal, canal-100k, haproxy, nginx, envoy).
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Replace the table between the `bench-peers` marks of this file.
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

/// Set in the child that runs inside the private network namespace.
const INSIDE: &str = "CANAL_BENCH_INSIDE";

/// Runs this program again in a network namespace of its own, which goes when it goes: nothing can reach it, and it can reach nothing.
fn enter_namespace() -> anyhow::Result<i32> {
    let script = format!("ip link set lo up && ip address add {}/32 dev lo && exec \"$0\" \"$@\"", peers::ORIGIN);
    let status = std::process::Command::new("unshare")
        .args(["--net", "--kill-child", "--fork", "--", "sh", "-c", &script])
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, "1")
        .status()
        .context("unshare: network namespaces need root; run this as root")?;
    Ok(status.code().unwrap_or(1))
}

fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    if std::env::var_os(INSIDE).is_none() {
        std::process::exit(enter_namespace()?);
    }
    let root = std::env::current_dir()?;
    let dir = tempfile::tempdir().context("a temporary directory")?;
    let _origin = peers::start_origin(dir.path())?;
    let mut rows: Vec<table::Row> = Vec::new();
    for peer in peers::all() {
        if flags.only.is_empty() || flags.only.iter().any(|o| o == peer.name) {
            rows.extend(load::Case::ALL.into_iter().filter(|c| peer.speaks(*c)).map(|c| table::Row::new(peer, c)));
        }
    }
    for n in 0..flags.runs {
        for row in &mut rows {
            eprintln!("run {}/{}: {} {}", n + 1, flags.runs, row.peer.name, row.case.name());
            let mut proxy = (row.peer.start)(&root, dir.path()).with_context(|| format!("starting {}", row.peer.name))?;
            let run = load::measure(&proxy, row.case, flags.seconds);
            proxy.stop();
            row.runs.push(run?);
        }
    }
    let text = table::render(&rows, &flags.runs, flags.seconds);
    print!("{text}");
    if let Some(path) = &flags.markdown {
        table::replace_in(path, &text)?;
    }
    Ok(())
}
