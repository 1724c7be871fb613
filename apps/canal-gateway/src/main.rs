//! `canal-gateway`: flags to settings, a runtime, and the gateway's process in it. What the gateway does is `canal-gateway-engine`'s.

#![forbid(unsafe_code)]

mod flags;
mod process;
mod tier;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use canal_kit::diagnostics;
use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> anyhow::Result<ExitCode> {
    let flags = flags::Flags::parse();
    let level = diagnostics::start(&flags.log).context("--log")?;
    // For control work only; traffic runs on the workers' own threads.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().context("starting the runtime")?;
    let clean = runtime.block_on(process::run(flags.config(), level))?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::from(3) })
}
