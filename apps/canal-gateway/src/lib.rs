//! The process of a gateway replica: flags to settings, a runtime, and the gateway in it. What the gateway does is `canal-gateway-engine`'s. A test
//! program may give code of its own that is called at each request; the shipped program gives none. Start at [`run`].

#![forbid(unsafe_code)]

mod flags;
mod process;
mod tier;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use canal_gateway_engine::RequestHook;
use canal_kit::diagnostics;

pub use flags::GatewayFlags;

/// Runs a gateway to its end. `hook` is called at each request.
pub fn run(flags: GatewayFlags, hook: Option<RequestHook>) -> anyhow::Result<ExitCode> {
    let level = diagnostics::start(&flags.log).context("--log")?;
    let mut config = flags.config();
    config.engine.request_hook = hook;
    // For control work only; traffic runs on the workers' own threads.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().context("starting the runtime")?;
    let clean = runtime.block_on(process::run(config, level))?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::from(3) })
}
