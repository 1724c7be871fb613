//! `canal demo`: brings up the demo's world, drives real clients in it, prints for each promise what was expected and what was
//! seen, and removes everything again whatever happens. Ends with 0 only if every promise held.

use std::time::{Duration, Instant};

use clap::Args;

use crate::demo::screen::Screen;
use crate::demo::{self, stage::Stage};
use crate::exit::{Exit, Failure, Outcome};
use crate::signals;

/// The whole demo must end in this time, teardown included.
const LIMIT: Duration = Duration::from_secs(225);

/// Shows the mesh at work, in under four minutes, and cleans up
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal demo
  canal demo -o json > demo.json     # every promise with what was expected and seen
  canal up demo                      # the same world, kept for exploring")]
pub(crate) struct DemoArgs {
    /// Print a JSON report at the end; the steps go to stderr
    #[arg(short = 'o', long = "output", value_enum, default_value = "table", value_name = "FORMAT")]
    format: demo::screen::Form,
}

pub(crate) async fn run(args: DemoArgs) -> Outcome {
    let started = Instant::now();
    let mut screen = Screen::new(args.format);
    let mut stop = signals::watch()?;
    let stage = Stage::up(&mut screen, &mut stop).await?;
    let played = tokio::select! {
        () = stop.wait() => Err(Failure::new(Exit::Interrupted, "demo", "interrupted; the world is being removed", "")),
        played = tokio::time::timeout(LIMIT.saturating_sub(started.elapsed()), demo::play(&stage, &mut screen)) => match played {
            Ok(()) => Ok(()),
            Err(_) => Err(Failure::failed("demo", format!("not done in {} s", LIMIT.as_secs()), "is the machine busy?")),
        },
    };
    // From here on nothing may stop the teardown: a second ctrl-c is ignored by `signals`.
    stage.down(&mut screen).await?;
    played?;
    screen.finish(started.elapsed())?;
    if screen.all_held() { Ok(()) } else { Err(Failure::told(Exit::Failed)) }
}
