//! `canal world`: worlds without a view: up, down, list, exec, check, gc. What a world is, `canal_world` knows.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use canal_world::{Host, Options, Plan, World};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::exit::{Exit, Failure, Outcome};
use crate::output::{self, OutputArgs, Progress, Table};
use crate::realm::{self, Realm, failure};
use crate::scenery;

/// Handles worlds: meshes of network namespaces on this machine
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal world up demo                                 # stays up when this command ends
  canal world exec alpha/bookinfo/client-0 -- curl -s http://productpage:9080/productpage
  canal world down demo")]
pub(crate) struct WorldArgs {
    #[command(subcommand)]
    verb: WorldVerb,
}

#[derive(Debug, Subcommand)]
enum WorldVerb {
    /// Brings a world up and returns; doing it again changes nothing
    #[command(after_help = "Examples:\n  canal world up demo\n  canal world up my-mesh.yaml --name second --wait 60")]
    Up(UpArgs),
    /// Takes a world down; doing it again is no error
    #[command(after_help = "Examples:\n  canal world down demo\n  canal world down my-mesh.yaml")]
    Down {
        /// Name of the world, or its topology file
        world: String,
    },
    /// Lists worlds, or the hosts of one
    #[command(after_help = "Examples:\n  canal world list\n  canal world list demo -o json")]
    List {
        /// Name of the world whose hosts to list
        world: Option<String>,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Runs a command inside a host; ends with its exit code
    #[command(
        after_help = "Examples:\n  canal world exec alpha/bookinfo/client-0 -- curl -s http://reviews:9080/reviews/0\n  canal world exec --world demo gw-1 -- ss -tn"
    )]
    Exec {
        /// Host or pod; the last part of a pod's name is enough where it is unambiguous
        host: String,
        /// World [default: the only one that is up]
        #[arg(long, env = "CANAL_WORLD")]
        world: Option<String>,
        /// Command and arguments
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Checks a topology file; shows the addresses it would get. Builds nothing, needs no root
    #[command(after_help = "Examples:\n  canal world check my-mesh.yaml\n  canal world check demo")]
    Check {
        /// Topology file, or demo
        file: String,
    },
    /// Removes what killed runs left behind
    #[command(after_help = "Examples:\n  canal world gc")]
    Gc,
    /// The process behind a world; `up` starts it
    #[command(hide = true)]
    Supervise { name: String },
}

#[derive(Debug, Args)]
struct UpArgs {
    /// Topology file, or demo
    file: String,
    /// Name it so instead
    #[arg(long)]
    name: Option<String>,
    /// Take a world of that name with another topology down first
    #[arg(long)]
    replace: bool,
    /// Wait until every process is ready, at most this many seconds; 0: do not wait
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    wait: u64,
}

pub(crate) async fn run(args: WorldArgs) -> Outcome {
    match args.verb {
        WorldVerb::Up(args) => up(args).await,
        WorldVerb::Down { world } => down(&world).await,
        WorldVerb::List { world: None, output } => list(&output),
        WorldVerb::List { world: Some(world), output } => hosts(&world, &output),
        WorldVerb::Exec { host, world, command } => exec(world.as_deref(), &host, &command).await,
        WorldVerb::Check { file } => check(&file),
        WorldVerb::Gc => gc().await,
        WorldVerb::Supervise { name } => realm::blocking(move || canal_world::supervise(&name)).await,
    }
}

async fn up(args: UpArgs) -> Outcome {
    let progress = Progress::new();
    let scenery = scenery::load_lasting(&args.file)?;
    let topology = match &args.name {
        Some(name) => scenery.renamed(name).map_err(|problem| scenery::refused(&[problem]))?,
        None => scenery,
    };
    let name = topology.name.clone();
    progress.say(&format!("building world {name}"));
    let replace = args.replace;
    realm::blocking(move || World::up(&topology, &Options { replace, ..Options::default() })).await?;
    if args.wait > 0 {
        progress.say("waiting for its processes");
        let realm = Realm::open(Some(&name))?;
        realm.wait_ready(Duration::from_secs(args.wait)).await.map_err(|f| Failure { exit: Exit::Partial, ..f })?;
        if args.file == "demo" {
            scenery::dress_demo(&realm).await?;
        }
    }
    output::line(&format!("world {name} is up"))
}

/// The name in a topology file, or the name itself.
fn decide_name(world: &str) -> Outcome<String> {
    match Path::new(world).is_file() {
        true => Ok(scenery::load(world)?.topology.name),
        false => Ok(world.to_owned()),
    }
}

async fn down(world: &str) -> Outcome {
    let name = decide_name(world)?;
    let gone = name.clone();
    realm::blocking(move || World::down_by_name(&gone)).await?;
    if World::list().is_ok_and(|worlds| worlds.is_empty()) {
        scenery::forget_lasting();
    }
    output::line(&format!("world {name} is gone"))
}

fn list(output: &OutputArgs) -> Outcome {
    let worlds = World::list().map_err(|error| failure(&error))?;
    let value: Value =
        worlds.iter().map(|w| json!({ "name": w.name, "alive": w.alive, "owner": w.owner, "topology": w.topology })).collect();
    output::print(output.format, &value, || {
        let mut table = Table::new(&["NAME", "STATE", "OWNER", "TOPOLOGY"]);
        for w in &worlds {
            let state = if w.alive { "up" } else { "leftover" };
            let owner = w.owner.map_or_else(|| "-".to_owned(), |pid| format!("process {pid}"));
            let topology = w.topology.as_ref().map_or_else(|| "-".to_owned(), |path| path.display().to_string());
            table.row([w.name.clone(), state.to_owned(), owner, topology]);
        }
        table.lines()
    })
}

fn hosts(world: &str, output: &OutputArgs) -> Outcome {
    let hosts = Realm::open(Some(world))?.hosts()?;
    let value: Value = hosts.iter().map(host_value).collect();
    output::print(output.format, &value, || {
        let mut table = Table::new(&["NAME", "KIND", "AZ", "IPV4", "IPV6", "STATE", "PID", "RESTARTS"]);
        for host in &hosts {
            let text = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
            table.row([
                host.seat.name.clone(),
                host.seat.kind.clone(),
                host.seat.az.clone(),
                text(host.seat.ip4.map(|ip| ip.to_string())),
                text(host.seat.ip6.map(|ip| ip.to_string())),
                realm::phase(&host.pulse),
                text(host.pulse.pid.map(|pid| pid.to_string())),
                host.pulse.restarts.to_string(),
            ]);
        }
        table.lines()
    })
}

fn host_value(host: &Host) -> Value {
    let (seat, pulse) = (&host.seat, &host.pulse);
    json!({
        "name": seat.name, "kind": seat.kind, "az": seat.az, "tenant": seat.tenant, "node": seat.node,
        "ip4": seat.ip4, "ip6": seat.ip6, "overlay": seat.overlay, "netns": seat.netns, "cgroup": seat.cgroup, "log": seat.log,
        "state": realm::phase(pulse), "ready": pulse.ready, "pid": pulse.pid, "restarts": pulse.restarts,
    })
}

async fn exec(world: Option<&str>, host: &str, argv: &[String]) -> Outcome {
    let mut command = Realm::open(world)?.command(host, argv)?;
    command.stdin(Stdio::inherit()).stdout(Stdio::inherit()).stderr(Stdio::inherit());
    let status = command.status().await.map_err(|problem| Failure::failed(host, format!("{}: {problem}", argv.join(" ")), ""))?;
    match status.code() {
        Some(0) => Ok(()),
        // The command's own code is what its caller asked for.
        Some(code) => std::process::exit(code),
        None => Err(Failure::failed(host, format!("{}: {status}", argv.join(" ")), "")),
    }
}

fn check(file: &str) -> Outcome {
    let scenery = scenery::load(file)?;
    output::line(Plan::of(&scenery.topology).to_string().trim_end())
}

async fn gc() -> Outcome {
    let removed = realm::blocking(World::gc).await?;
    scenery::remove_stale();
    if World::list().is_ok_and(|worlds| worlds.is_empty()) {
        scenery::forget_lasting();
    }
    match removed.is_empty() {
        true => output::line("nothing was left behind"),
        false => output::line(&format!("removed {}", removed.join(", "))),
    }
}
