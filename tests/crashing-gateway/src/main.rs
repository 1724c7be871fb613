//! A gateway for tests of queries of death: the shipped gateway's process, and `--crash-on-path`, which ends it at a request with that path. It is
//! not delivered, and the shipped program has no such flag.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::OnceLock;

use canal_gateway::GatewayFlags;
use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The path that ends the process.
static FATAL_PATH: OnceLock<String> = OnceLock::new();

#[derive(Debug, Parser)]
struct Flags {
    #[command(flatten)]
    gateway: GatewayFlags,
    /// A request with exactly this path ends the process.
    #[arg(long)]
    crash_on_path: String,
}

/// Ends the process as a query of death would.
fn crash(path: &[u8]) {
    if FATAL_PATH.get().is_some_and(|fatal| path == fatal.as_bytes()) {
        eprintln!("a request with the path of --crash-on-path: the process ends");
        std::process::abort();
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let flags = Flags::parse();
    FATAL_PATH.get_or_init(|| flags.crash_on_path);
    canal_gateway::run(flags.gateway, Some(crash))
}
