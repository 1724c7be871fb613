//! The process of a gateway replica: parses flags, and runs the gateway in a runtime. The gateway
//! itself is `canal-gateway-engine`. Start at [`run`].

#![forbid(unsafe_code)]

mod apply;
mod flags;
mod process;
mod tier;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use canal_runtime::logging;
use canal_runtime::metrics::show_legacy_names;

pub use flags::GatewayFlags;

/// Runs a gateway to its end.
///
/// # Errors
///
/// The log filter is invalid, or a part of the process could not be started.
pub fn run(flags: GatewayFlags) -> anyhow::Result<ExitCode> {
    let level = logging::start(&flags.log).context("--log")?;
    if flags.legacy_metric_names {
        show_legacy_names();
    }
    let config = flags.config();
    // For control work only; traffic runs on the workers' own threads.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // Traffic has threads of its own. Two, so that one that is busy does not stop the others'
        // timers.
        .worker_threads(2)
        .enable_all()
        // These threads read the configuration that the gateway's workers free.
        .on_thread_park(canal_allocator::collect_before_park)
        .build()
        .context("starting the runtime; fix: raise the limits of threads and open files (ulimit -u, ulimit -n)")?;
    let clean = runtime.block_on(process::run(config, level))?;
    // Only tasks that block a thread are left, such as a DNS lookup. They must not delay the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(if clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(3)
    })
}
