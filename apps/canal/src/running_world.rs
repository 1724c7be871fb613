//! The only interface to `canal_world`. It finds the world of a verb, connects to hosts and runs
//! commands inside them, and turns the world's errors into [`VerbError`]. It decides nothing about
//! worlds.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use canal_world::{
    CpuTime, Error, HostStatus, ProcessPhase, ProcessStatus, Recovery, Signal, StoreRecovery,
    Topology, Traffic, World, WorldOptions,
};
use tokio::net::TcpStream;

use crate::exit::{ExitStatus, VerbError, VerbResult};

/// Name of the controller in every world.
pub(crate) const CONTROLLER: &str = "controller";
/// Timeout for a TCP connection inside a host.
/// The hosts are on this machine, so that only one that is short of CPU needs more than
/// milliseconds.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Kinds of hosts that verbs select.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostKindFilter {
    Gateway,
    Edge,
    KeyServer,
}

impl HostKindFilter {
    fn name(self) -> &'static str {
        match self {
            HostKindFilter::Gateway => "gateway",
            HostKindFilter::Edge => "edge",
            HostKindFilter::KeyServer => "keyServer",
        }
    }
}

/// A world that is up.
#[derive(Debug)]
pub(crate) struct RunningWorld {
    world: World,
}

/// Converts an error of the world. Its text already contains the fix.
pub(crate) fn failure(error: &Error) -> VerbError {
    let exit = match error {
        Error::NoWorld { .. } | Error::NoHost { .. } => ExitStatus::Missing,
        Error::Supervisor { .. } => ExitStatus::Unreachable,
        Error::NotRoot
        | Error::Machine { .. }
        | Error::Topology(_)
        | Error::AlreadyUp { .. }
        | Error::Tool { .. }
        | Error::Io { .. }
        | Error::Timeout { .. } => ExitStatus::Failed,
    };
    VerbError::new(exit, "", error.to_string(), "")
}

/// Runs blocking work of the world without blocking the runtime.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> canal_world::Result<T> + Send + 'static,
) -> VerbResult<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| failure(&error)),
        Err(problem) => Err(VerbError::failed("world", problem, "")),
    }
}

/// Returns the names of the worlds that are up. It fails if only root may see whether some are up.
pub(crate) fn names() -> VerbResult<Vec<String>> {
    let listed = World::list().map_err(|error| failure(&error))?;
    let hidden: Vec<&str> = listed
        .iter()
        .filter(|world| world.hidden)
        .map(|world| world.name.as_str())
        .collect();
    if !hidden.is_empty() {
        let what = format!(
            "only root can see whether these worlds are up: {}",
            hidden.join(", ")
        );
        return Err(VerbError::failed(
            "worlds",
            what,
            "run the same command with sudo",
        ));
    }
    Ok(listed
        .into_iter()
        .filter(|world| world.alive)
        .map(|world| world.name)
        .collect())
}

/// Brings up a world that ends with this process, however that ends.
pub(crate) async fn up_ephemeral(
    topology: Topology,
    name: String,
) -> VerbResult<Arc<RunningWorld>> {
    let world = blocking(move || {
        let topology = topology
            .renamed(&name)
            .map_err(|problem| Error::Topology(vec![problem]))?;
        World::up(
            &topology,
            &WorldOptions {
                ephemeral: true,
                ..WorldOptions::default()
            },
        )
    });
    let world = world.await?;
    report_recovery(world.name(), world.recovery());
    Ok(Arc::new(RunningWorld { world }))
}

/// Reports on stderr what happened to the objects that had been applied to crashed worlds.
pub(crate) fn report_recovery(name: &str, recovery: &Recovery) {
    recovery_lines(name, recovery)
        .iter()
        .for_each(|line| eprintln!("canal: {line}"));
}

fn recovery_lines(name: &str, recovery: &Recovery) -> Vec<String> {
    let own = match recovery.store {
        StoreRecovery::Nothing => None,
        StoreRecovery::Kept => Some(format!(
            "world {name}: rebuilt after a crash; objects applied before are still in force"
        )),
        StoreRecovery::Dropped => {
            let fix = "fix: apply them again; only `canal world up` with the same topology reuses the store of a crashed world";
            Some(format!(
                "world {name}: the crashed world of this name had another topology; objects applied to it are lost\n  {fix}"
            ))
        }
    };
    let gone = |world: &String| {
        let fix = format!(
            "fix: bring it up again and apply them; after a crash bring {world} up before other worlds to keep them"
        );
        format!(
            "world {world}: its supervisor had been killed; it was removed with the objects applied to it\n  {fix}"
        )
    };
    own.into_iter()
        .chain(recovery.removed.iter().map(gone))
        .collect()
}

impl RunningWorld {
    /// Opens the world of this name, or the only one that is up.
    pub(crate) fn open(name: Option<&str>) -> VerbResult<Arc<Self>> {
        let name = match name {
            Some(name) => name.to_owned(),
            None => decide_only(names()?)?,
        };
        let world = World::open(&name).map_err(|error| failure(&error))?;
        Ok(Arc::new(Self { world }))
    }

    pub(crate) fn name(&self) -> &str {
        self.world.name()
    }

    pub(crate) fn root_ca(&self) -> PathBuf {
        self.world.root_ca()
    }

    /// Returns the token with which an operator authenticates to the controller.
    pub(crate) fn operator_token(&self) -> VerbResult<String> {
        self.world.operator_token().map_err(|error| failure(&error))
    }

    pub(crate) fn hosts(&self) -> VerbResult<Vec<HostStatus>> {
        self.world.hosts().map_err(|error| failure(&error))
    }

    /// Returns the names of all hosts of a kind.
    pub(crate) fn names_of(&self, kind: HostKindFilter) -> VerbResult<Vec<String>> {
        let hosts = self
            .hosts()?
            .into_iter()
            .filter(|host| host.environment.kind == kind.name());
        Ok(hosts.map(|host| host.environment.name).collect())
    }

    pub(crate) fn log_path(&self, host: &str) -> VerbResult<PathBuf> {
        self.world.log(host).map_err(|error| failure(&error))
    }

    /// Returns the socket on which a host's process serves its operators.
    pub(crate) fn admin_socket(&self, host: &str) -> VerbResult<PathBuf> {
        Ok(self
            .world
            .data(host)
            .map_err(|error| failure(&error))?
            .join("admin.sock"))
    }

    /// Returns a command that runs inside a host.
    pub(crate) fn command(
        &self,
        host: &str,
        argv: &[impl AsRef<std::ffi::OsStr>],
    ) -> VerbResult<tokio::process::Command> {
        let command = self
            .world
            .exec(host, argv)
            .map_err(|error| failure(&error))?;
        Ok(command.into())
    }

    /// Sends SIGKILL to a host's processes.
    pub(crate) fn kill(&self, host: &str) -> VerbResult {
        self.world
            .kill(host, Signal::Kill)
            .map_err(|error| failure(&error))
    }

    /// Returns the CPU time of a host's own processes.
    pub(crate) fn cpu(&self, host: &str) -> VerbResult<CpuTime> {
        self.world.cpu(host).map_err(|error| failure(&error))
    }

    /// Returns the counters of a host's uplink.
    pub(crate) fn uplink(&self, host: &str) -> VerbResult<Traffic> {
        let devices = self.world.traffic(host).map_err(|error| failure(&error))?;
        Ok(devices
            .into_iter()
            .find(|(name, _)| name == "eth0")
            .map(|(_, traffic)| traffic)
            .unwrap_or_default())
    }

    /// Opens a TCP connection inside a host's network namespace.
    pub(crate) async fn dial(&self, host: &str, to: SocketAddr) -> std::io::Result<TcpStream> {
        let (world, host) = (self.name().to_owned(), host.to_owned());
        let dialled = tokio::task::spawn_blocking(move || {
            let connect = || std::net::TcpStream::connect_timeout(&to, DIAL_TIMEOUT);
            World::open(&world)
                .and_then(|world| world.inside(&host, connect))
                .map_err(std::io::Error::other)?
        });
        let stream = dialled.await.map_err(std::io::Error::other)??;
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        TcpStream::from_std(stream)
    }

    /// Waits until all processes are ready.
    pub(crate) async fn wait_ready(self: &Arc<Self>, limit: Duration) -> VerbResult {
        let running = self.clone();
        blocking(move || running.world.wait_ready(limit)).await
    }

    /// Adds a gateway replica to a tier world, and returns when its process has been started.
    pub(crate) async fn add_gateway(
        self: &Arc<Self>,
        name: &str,
        az: &str,
        backend: &str,
    ) -> VerbResult {
        let (running, name, az, backend) = (
            self.clone(),
            name.to_owned(),
            az.to_owned(),
            backend.to_owned(),
        );
        blocking(move || running.world.add_gateway(&name, &az, &backend)).await
    }

    /// Ends a gateway replica's process, which may drain, and removes its host.
    pub(crate) async fn remove_gateway(self: &Arc<Self>, name: &str) -> VerbResult {
        let (running, name) = (self.clone(), name.to_owned());
        blocking(move || running.world.remove_gateway(&name)).await
    }

    /// Takes the world down. Nothing of it remains.
    pub(crate) async fn down(&self) -> VerbResult {
        let name = self.name().to_owned();
        blocking(move || World::down_by_name(&name)).await
    }
}

fn decide_only(mut names: Vec<String>) -> VerbResult<String> {
    match (names.pop(), names.is_empty()) {
        (Some(name), true) => Ok(name),
        (Some(name), false) => {
            names.push(name);
            let what = format!("several worlds are up: {}", names.join(", "));
            Err(VerbError::new(
                ExitStatus::Usage,
                "--world",
                what,
                "name one with --world or $CANAL_WORLD",
            ))
        }
        (None, _) => Err(VerbError::new(
            ExitStatus::Missing,
            "--world",
            "no world is up",
            "bring one up with `canal up demo`, or name a controller with --server",
        )),
    }
}

/// Describes a process in one word, with the reason if there is one.
pub(crate) fn phase(process: &ProcessStatus) -> String {
    match &process.phase {
        ProcessPhase::Idle => "idle".to_owned(),
        ProcessPhase::Waiting { until } => format!("waits for {until}"),
        ProcessPhase::Running if process.ready => "ready".to_owned(),
        ProcessPhase::Running => "not ready".to_owned(),
        ProcessPhase::Pausing { how } => format!("restarts: {how}"),
        ProcessPhase::Ended { how, well: false } => format!("ended: {how}"),
        ProcessPhase::Ended { well: true, .. } => "done".to_owned(),
        ProcessPhase::Stopped => "stopped".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recovery_of_a_crashed_world_is_reported() {
        assert!(recovery_lines("a", &Recovery::default()).is_empty());
        let lines = |store, removed: &[&str]| {
            recovery_lines(
                "a",
                &Recovery {
                    store,
                    removed: removed.iter().map(ToString::to_string).collect(),
                },
            )
            .join("\n")
        };
        assert!(lines(StoreRecovery::Kept, &[]).contains("are still in force"));
        let lost = lines(StoreRecovery::Dropped, &["b"]);
        assert!(
            lost.contains("world a: ")
                && lost.contains("world b: ")
                && lost.matches("fix: ").count() == 2,
            "{lost}"
        );
    }

    #[test]
    fn the_only_world_needs_no_name() {
        assert_eq!(decide_only(vec!["demo".into()]).unwrap(), "demo");
        assert_eq!(
            decide_only(vec!["a".into(), "b".into()]).unwrap_err().exit,
            ExitStatus::Usage
        );
        assert_eq!(decide_only(vec![]).unwrap_err().exit, ExitStatus::Missing);
    }
}
