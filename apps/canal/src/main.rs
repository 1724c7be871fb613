//! `canal`: parses the command line, runs one verb, and maps its error to text and exit code. The
//! verbs are in `verbs/`, one file each.

#![forbid(unsafe_code)]

mod admin;
mod analysis_report;
mod bundled_topology;
mod cli;
mod dataplane;
mod demo;
mod diagnostics;
mod exit;
mod files;
mod metrics;
mod observe;
mod output;
mod running_world;
mod signals;
mod tenant;
mod verbs;
mod view;

use std::process::ExitCode;

use clap::Parser;
use cli::{Canal, Verb};
use exit::{ExitStatus, VerbResult};

fn main() -> ExitCode {
    // A wrong command line ends here, with code 2.
    let typed = Canal::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        // The program mostly waits. Two, so that one that is busy does not stop the other's timers.
        .worker_threads(2)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(problem) => {
            eprintln!(
                "canal: cannot start the runtime: {problem}; fix: raise the limits of threads and open files (ulimit -u, ulimit -n)"
            );
            return ExitStatus::Failed.into();
        }
    };
    let outcome = runtime.block_on(run(typed.verb));
    // Blocked threads (for example a connect to a host that is down) must not delay the end.
    runtime.shutdown_background();
    match outcome {
        Ok(()) => ExitStatus::Done.into(),
        Err(failure) => {
            if !failure.is_already_printed() {
                eprintln!("canal: {failure}");
            }
            failure.exit.into()
        }
    }
}

async fn run(verb: Verb) -> VerbResult {
    match verb {
        Verb::Up(args) => verbs::up::run(args).await,
        Verb::Demo(args) => verbs::demo::run(args).await,
        Verb::World(args) => verbs::world::run(args).await,
        Verb::Analyze(args) => verbs::analyze::run(args),
        Verb::Apply(args) => verbs::apply::run(args).await,
        Verb::Ca(args) => verbs::ca::run(args).await,
        Verb::Get(args) => verbs::get::run(args).await,
        Verb::Delete(args) => verbs::delete::run(args).await,
        Verb::Diff(args) => verbs::diff::run(args).await,
        Verb::Explain(args) => verbs::explain::run(args).await,
        Verb::Status(args) => verbs::status::run(args).await,
        Verb::Gateway(args) => verbs::gateway::run(args).await,
        Verb::Sessions(args) => verbs::sessions::run(args).await,
        Verb::Config(args) => verbs::config::run(args).await,
        Verb::Logs(args) => verbs::logs::run(args).await,
        Verb::Metrics(args) => verbs::metrics::run(args).await,
        Verb::Tap(args) => verbs::tap::run(args).await,
        Verb::Compile(args) => verbs::compile::run(args),
        Verb::Completion(args) => verbs::completion::run(&args),
    }
}
