//! `canal up`: brings a world up and stays, with a live view. Ctrl-c takes the world down again.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;

use crate::bundled_topology;
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::output::ProgressLine;
use crate::running_world::{self, RunningWorld};
use crate::signals;
use crate::view::{Canvas, WorldSampler};

/// Interval between two updates of the view.
/// A person reads no faster, and a sample reads files of each process.
const PERIOD: Duration = Duration::from_secs(1);

/// Brings up a world and stays, with a live view; ctrl-c takes it down
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal up demo
  canal up my-mesh.yaml --name second
  canal up demo --quiet &            # no view; SIGTERM takes it down")]
pub(crate) struct UpArgs {
    /// Topology file, or demo
    file: String,
    /// Use this name for the world
    #[arg(long)]
    name: Option<String>,
    /// Show nothing
    #[arg(short, long)]
    quiet: bool,
    /// Seconds to wait for all processes to be ready
    // A start takes a few seconds; the rest is for a busy machine.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    wait: u64,
}

pub(crate) async fn run(args: UpArgs) -> VerbResult {
    let mut stop = signals::watch()?;
    let progress = ProgressLine::new();
    let scenery = bundled_topology::load(&args.file)?;
    let name = args
        .name
        .clone()
        .unwrap_or_else(|| scenery.topology.name.clone());
    progress.print_line(&format!("building world {name}"));
    let running = running_world::up_ephemeral(scenery.topology.clone(), name.clone()).await?;
    let stayed = tokio::select! {
        () = stop.wait() => Err(VerbError::already_printed(ExitStatus::Interrupted)),
        stayed = stay(&args, &running) => stayed,
    };
    progress.print_line(&format!("taking world {name} down"));
    running.down().await?;
    stayed
}

/// Shows the world until it is gone. A world that is not completely ready stays up too, so that the
/// user can find out why.
async fn stay(args: &UpArgs, running: &Arc<RunningWorld>) -> VerbResult {
    let progress = ProgressLine::new();
    progress.print_line("waiting for its processes");
    if let Err(failure) = running.wait_ready(Duration::from_secs(args.wait)).await {
        eprintln!("canal: {failure}");
    } else if args.file == "demo" {
        bundled_topology::install_demo_keys(running).await?;
    }
    if args.quiet {
        return wait_for_removal(running).await;
    }
    let mut observer = WorldSampler::new(running.clone());
    if !std::io::stdout().is_terminal() {
        return print_changes(&mut observer).await;
    }
    let mut canvas =
        Canvas::open().map_err(|problem| VerbError::failed("terminal", problem, "use --quiet"))?;
    loop {
        let lines = observer.refresh().await?;
        canvas
            .draw(&lines)
            .map_err(|problem| VerbError::failed("terminal", problem, "use --quiet"))?;
        tokio::time::sleep(PERIOD).await;
    }
}

/// Prints the states without a terminal: first all, then those that changed. Values that change
/// permanently are left out.
async fn print_changes(observer: &mut WorldSampler) -> VerbResult {
    let mut before: Vec<String> = Vec::new();
    loop {
        let states = observer.states().await?;
        if states != before {
            for line in states.iter().filter(|line| !before.contains(line)) {
                crate::output::line(line)?;
            }
            before = states;
        }
        tokio::time::sleep(PERIOD).await;
    }
}

async fn wait_for_removal(running: &Arc<RunningWorld>) -> VerbResult {
    while running.hosts().is_ok() {
        tokio::time::sleep(PERIOD).await;
    }
    Err(VerbError::new(
        ExitStatus::Missing,
        format!("world {}", running.name()),
        "was removed by another process",
        "bring it up again with `canal up`",
    ))
}
