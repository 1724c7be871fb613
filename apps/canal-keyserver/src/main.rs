//! `canal-keyserver`: parses flags, confines the process, and runs the key server in a runtime. The
//! key server itself is `canal-keyserver-engine`. Start at [`process::run`].

#![forbid(unsafe_code)]

mod flags;
mod process;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use canal_keyserver_engine::memory_protection;
use canal_net::sys;
use canal_runtime::logging;
use canal_runtime::metrics::show_legacy_names;
use clap::Parser;

fn main() -> anyhow::Result<ExitCode> {
    let flags = flags::Flags::parse();
    let level = logging::start(&flags.log).context("--log")?;
    if flags.legacy_metric_names {
        show_legacy_names();
    }
    match memory_protection::confine() {
        Ok(()) => {}
        Err(error) if flags.allow_unlocked => {
            tracing::error!(%error, "key server: memory protection failed, so keys may be swapped to disk (--allow-unlocked)")
        }
        Err(error) => return Err(error).context("protecting the memory that contains keys"),
    }
    canal_runtime::raise_file_limit(0);
    // The runtime serves channels and control work; cryptography has its own threads.
    // Nobody measured more than four threads; they only read and write frames.
    let threads = sys::cores().len().clamp(1, 4);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .context("starting the runtime; fix: raise the limits of threads and open files (ulimit -u, ulimit -n)")?;
    let clean = runtime.block_on(process::run(flags.config(), level))?;
    // Only tasks that block a thread are left, such as a DNS lookup. They must not delay the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(if clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(3)
    })
}
