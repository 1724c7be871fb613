//! `canal up`: brings a world up and stays, with a live view; ctrl-c takes it down again.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;

use crate::exit::{Exit, Failure, Outcome};
use crate::output::Progress;
use crate::realm::{self, Realm};
use crate::scenery;
use crate::signals;
use crate::view::{Canvas, Observer};

/// How often the view is drawn.
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
    /// Name the world so instead
    #[arg(long)]
    name: Option<String>,
    /// Show nothing
    #[arg(short, long)]
    quiet: bool,
    /// Seconds to wait for all processes to be ready
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    wait: u64,
}

pub(crate) async fn run(args: UpArgs) -> Outcome {
    let mut stop = signals::watch()?;
    let progress = Progress::new();
    let scenery = scenery::load(&args.file)?;
    let name = args.name.clone().unwrap_or_else(|| scenery.topology.name.clone());
    progress.say(&format!("building world {name}"));
    let realm = realm::up_ephemeral(scenery.topology.clone(), name.clone()).await?;
    let stayed = tokio::select! {
        () = stop.wait() => Ok(()),
        stayed = stay(&args, &realm) => stayed,
    };
    progress.say(&format!("taking world {name} down"));
    realm.down().await?;
    match stayed {
        // Ctrl-c is how one leaves: that is success.
        Ok(()) => Ok(()),
        Err(failure) => Err(failure),
    }
}

/// Until the world is gone. A world that is not wholly ready stays up too: one looks into it to find out why.
async fn stay(args: &UpArgs, realm: &Arc<Realm>) -> Outcome {
    let progress = Progress::new();
    progress.say("waiting for its processes");
    if let Err(failure) = realm.wait_ready(Duration::from_secs(args.wait)).await {
        eprintln!("canal: {failure}");
    } else if args.file == "demo" {
        scenery::dress_demo(realm).await?;
    }
    if args.quiet {
        return gone(realm).await;
    }
    let mut observer = Observer::new(realm.clone());
    if !std::io::stdout().is_terminal() {
        return print_changes(&mut observer).await;
    }
    let mut canvas = Canvas::open().map_err(|problem| Failure::failed("terminal", problem, "use --quiet"))?;
    loop {
        let lines = observer.look().await?;
        canvas.draw(&lines).map_err(|problem| Failure::failed("terminal", problem, "use --quiet"))?;
        tokio::time::sleep(PERIOD).await;
    }
}

/// Without a terminal: what it looks like, once it does not change any more than counters do.
async fn print_changes(observer: &mut Observer) -> Outcome {
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

async fn gone(realm: &Arc<Realm>) -> Outcome {
    while realm.hosts().is_ok() {
        tokio::time::sleep(PERIOD).await;
    }
    Err(Failure::new(Exit::Missing, format!("world {}", realm.name()), "was taken down by somebody else", ""))
}
