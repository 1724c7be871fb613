//! `canal-keyserver`: flags to settings, a confined process, a runtime, and the key server in it. What the key server does is `canal-keys`'.

#![forbid(unsafe_code)]

mod flags;
mod process;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use canal_keys::confine;
use canal_kit::{diagnostics, sys};
use clap::Parser;

fn main() -> anyhow::Result<ExitCode> {
    let flags = flags::Flags::parse();
    let level = diagnostics::start(&flags.log).context("--log")?;
    match confine::confine() {
        Ok(()) => {}
        Err(error) if flags.allow_unlocked => tracing::error!(%error, "keys may be swapped to disk (--allow-unlocked)"),
        Err(error) => return Err(error).context("protecting the memory that keys are in"),
    }
    sys::raise_file_limit();
    // Channels and control work; crypto has threads of its own.
    let threads = sys::cores().len().clamp(1, 4);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build().context("starting the runtime")?;
    let clean = runtime.block_on(process::run(flags.config(), level))?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::from(3) })
}
