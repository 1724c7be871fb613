//! `canal demo`: brings up the demo's world, runs real clients in it, and prints the expected and
//! the observed result of each expectation. It removes everything again in all cases. The exit code
//! is 0 only if every expectation passed.

use std::time::{Duration, Instant};

use clap::Args;

use crate::demo::screen::DemoOutput;
use crate::demo::{self, demo_world::DemoWorld};
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::signals;

/// Time limit of the whole demo, including the teardown.
/// Nobody measured this value; it only has to exceed all parts together, and to end a demo that
/// hangs.
const LIMIT: Duration = Duration::from_secs(225);

/// Shows the mesh at work, in under four minutes, and cleans up
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal demo
  canal demo -o json > demo.json     # every expectation with its result
  canal up demo                      # the same world, left running for exploring")]
pub(crate) struct DemoArgs {
    /// Print a JSON report at the end; the steps go to stderr
    #[arg(
        short = 'o',
        long = "output",
        value_enum,
        default_value = "table",
        value_name = "FORMAT"
    )]
    format: demo::screen::OutputForm,
}

pub(crate) async fn run(args: DemoArgs) -> VerbResult {
    let started = Instant::now();
    let mut screen = DemoOutput::new(args.format);
    let mut stop = signals::watch()?;
    let world = DemoWorld::up(&mut screen, &mut stop).await?;
    let played = tokio::select! {
        () = stop.wait() => Err(VerbError::new(ExitStatus::Interrupted, "demo", "interrupted; the world is being removed", "")),
        played = tokio::time::timeout(LIMIT.saturating_sub(started.elapsed()), demo::play(&world, &mut screen)) => match played {
            Ok(()) => Ok(()),
            Err(_) => Err(VerbError::failed("demo", format!("not done within {} s", LIMIT.as_secs()), "run it again when the machine is less busy")),
        },
    };
    // From here on nothing may stop the teardown: `signals` ignores a second ctrl-c.
    world.down(&mut screen).await?;
    played?;
    screen.finish(started.elapsed())?;
    if screen.all_held() {
        Ok(())
    } else {
        Err(VerbError::already_printed(ExitStatus::Failed))
    }
}
