//! `canal world`: worlds without a view: up, down, list, exec, check, gc. The crate `canal_world`
//! implements them.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use canal_world::{HostStatus, World, WorldOptions, WorldPlan};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::bundled_topology;
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::output::{self, OutputArgs, ProgressLine, TextTable};
use crate::running_world::{self, RunningWorld, failure};

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
    /// Brings a world up and returns; repeating it changes nothing
    #[command(
        after_help = "Examples:\n  canal world up demo\n  canal world up my-mesh.yaml --name second --wait 60"
    )]
    Up(WorldUpArgs),
    /// Takes a world down; repeating it is no error
    #[command(after_help = "Examples:\n  canal world down demo\n  canal world down my-mesh.yaml")]
    Down {
        /// Name of the world, or its topology file
        world: String,
    },
    /// Lists worlds, or the hosts of one
    #[command(after_help = "Examples:\n  canal world list\n  canal world list demo -o json")]
    List {
        /// Name of the world to list the hosts of
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
struct WorldUpArgs {
    /// Topology file, or demo
    file: String,
    /// Use this name for the world
    #[arg(long)]
    name: Option<String>,
    /// Take a world of that name with another topology down first
    #[arg(long)]
    replace: bool,
    /// Wait until every process is ready, at most this many seconds; 0: do not wait
    // A start takes a few seconds; the rest is for a busy machine.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    wait: u64,
}

pub(crate) async fn run(args: WorldArgs) -> VerbResult {
    match args.verb {
        WorldVerb::Up(args) => up(args).await,
        WorldVerb::Down { world } => down(&world).await,
        WorldVerb::List {
            world: None,
            output,
        } => list(&output),
        WorldVerb::List {
            world: Some(world),
            output,
        } => hosts(&world, &output),
        WorldVerb::Exec {
            host,
            world,
            command,
        } => exec(world.as_deref(), &host, &command).await,
        WorldVerb::Check { file } => check(&file),
        WorldVerb::Gc => gc().await,
        WorldVerb::Supervise { name } => {
            running_world::blocking(move || canal_world::supervise(&name)).await
        }
    }
}

async fn up(args: WorldUpArgs) -> VerbResult {
    let progress = ProgressLine::new();
    let scenery = bundled_topology::load_lasting(&args.file)?;
    let topology = match &args.name {
        Some(name) => scenery
            .renamed(name)
            .map_err(|problem| bundled_topology::refused(&[problem]))?,
        None => scenery,
    };
    let name = topology.name.clone();
    progress.print_line(&format!("building world {name}"));
    let replace = args.replace;
    let world = running_world::blocking(move || {
        World::up(
            &topology,
            &WorldOptions {
                replace,
                ..WorldOptions::default()
            },
        )
    })
    .await?;
    running_world::report_recovery(&name, world.recovery());
    if args.wait > 0 {
        progress.print_line("waiting for its processes");
        let running = RunningWorld::open(Some(&name))?;
        running
            .wait_ready(Duration::from_secs(args.wait))
            .await
            .map_err(|f| VerbError {
                exit: ExitStatus::Partial,
                ..f
            })?;
        if args.file == "demo" {
            bundled_topology::install_demo_keys(&running).await?;
        }
    }
    output::line(&format!("world {name} is up"))
}

/// Returns the name in a topology file, or the given name itself.
fn decide_name(world: &str) -> VerbResult<String> {
    match Path::new(world).is_file() {
        true => Ok(bundled_topology::load(world)?.topology.name),
        false => Ok(world.to_owned()),
    }
}

async fn down(world: &str) -> VerbResult {
    let name = decide_name(world)?;
    let removed = name.clone();
    running_world::blocking(move || World::down_by_name(&removed)).await?;
    if World::list().is_ok_and(|worlds| worlds.is_empty()) {
        bundled_topology::forget_lasting();
    }
    output::line(&format!("world {name} was removed"))
}

fn list(output: &OutputArgs) -> VerbResult {
    let worlds = World::list().map_err(|error| failure(&error))?;
    let value: Value = worlds
        .iter()
        .map(|w| json!({ "name": w.name, "alive": w.alive, "hidden": w.hidden, "owner": w.owner, "topology": w.topology }))
        .collect();
    output::print(output.format, &value, || {
        let mut table = TextTable::new(&["NAME", "STATE", "OWNER", "TOPOLOGY"]);
        for w in &worlds {
            let state = match (w.alive, w.hidden) {
                (true, _) => "up",
                (false, true) => "needs root",
                (false, false) => "leftover",
            };
            let owner = w
                .owner
                .map_or_else(|| "-".to_owned(), |pid| format!("process {pid}"));
            let topology = w
                .topology
                .as_ref()
                .map_or_else(|| "-".to_owned(), |path| path.display().to_string());
            table.row([w.name.clone(), state.to_owned(), owner, topology]);
        }
        table.lines()
    })
}

fn hosts(world: &str, output: &OutputArgs) -> VerbResult {
    let hosts = RunningWorld::open(Some(world))?.hosts()?;
    let value: Value = hosts.iter().map(host_value).collect();
    output::print(output.format, &value, || {
        let mut table = TextTable::new(&[
            "NAME", "KIND", "AZ", "IPV4", "IPV6", "STATE", "PID", "RESTARTS",
        ]);
        for host in &hosts {
            let text = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
            table.row([
                host.environment.name.clone(),
                host.environment.kind.clone(),
                host.environment.az.clone(),
                text(host.environment.ip4.map(|ip| ip.to_string())),
                text(host.environment.ip6.map(|ip| ip.to_string())),
                running_world::phase(&host.process),
                text(host.process.pid.map(|pid| pid.to_string())),
                host.process.restarts.to_string(),
            ]);
        }
        table.lines()
    })
}

fn host_value(host: &HostStatus) -> Value {
    let (environment, process) = (&host.environment, &host.process);
    json!({
        "name": environment.name, "kind": environment.kind, "az": environment.az, "tenant": environment.tenant, "node": environment.node,
        "ip4": environment.ip4, "ip6": environment.ip6, "overlay": environment.overlay, "netns": environment.netns, "cgroup": environment.cgroup, "log": environment.log,
        "state": running_world::phase(process), "ready": process.ready, "pid": process.pid, "restarts": process.restarts,
    })
}

async fn exec(world: Option<&str>, host: &str, argv: &[String]) -> VerbResult {
    let mut command = RunningWorld::open(world)?.command(host, argv)?;
    command
        .stdin(Stdio::inherit())
        .stdout(Stdio::inherit())
        .stderr(Stdio::inherit());
    let status = command.status().await.map_err(|problem| {
        VerbError::failed(
            host,
            format!("{}: {problem}", argv.join(" ")),
            "name a program that exists on this machine",
        )
    })?;
    match status.code() {
        Some(0) => Ok(()),
        // The caller expects the exit code of the command itself.
        Some(code) => std::process::exit(code),
        None => Err(VerbError::failed(
            host,
            format!("{}: {status}", argv.join(" ")),
            "",
        )),
    }
}

fn check(file: &str) -> VerbResult {
    let scenery = bundled_topology::load(file)?;
    output::line(WorldPlan::of(&scenery.topology).to_string().trim_end())
}

async fn gc() -> VerbResult {
    let removed = running_world::blocking(World::gc).await?;
    bundled_topology::remove_stale();
    if World::list().is_ok_and(|worlds| worlds.is_empty()) {
        bundled_topology::forget_lasting();
    }
    match removed.is_empty() {
        true => output::line("nothing was left behind"),
        false => output::line(&format!("removed {}", removed.join(", "))),
    }
}
