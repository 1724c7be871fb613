//! The only seam to `canal_world`: finds the world a verb is about, dials and runs things inside its hosts, and turns its errors into
//! failures. Decides nothing about worlds.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use canal_world::{CpuTime, Error, Host, Options, Phase, Pulse, Signal, Topology, Traffic, World};
use tokio::net::TcpStream;

use crate::exit::{Exit, Failure, Outcome};

/// The controller's name in every world.
pub(crate) const CONTROLLER: &str = "controller";
/// A TCP connection inside a host must be up in this time.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Kinds of hosts that verbs ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Gateway,
    Edge,
    KeyServer,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Gateway => "gateway",
            Kind::Edge => "edge",
            Kind::KeyServer => "keyServer",
        }
    }
}

/// Which world a verb looks into.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct RealmArgs {
    /// World [default: the only one that is up]
    #[arg(long, env = "CANAL_WORLD", value_name = "NAME")]
    pub(crate) world: Option<String>,
}

/// A world that is up.
#[derive(Debug)]
pub(crate) struct Realm {
    world: World,
}

/// What the world's error means for a verb. Its texts already hold the mend.
pub(crate) fn failure(error: &Error) -> Failure {
    let exit = match error {
        Error::NoWorld { .. } | Error::NoHost { .. } => Exit::Missing,
        Error::Supervisor { .. } => Exit::Unreachable,
        Error::NotRoot
        | Error::Machine { .. }
        | Error::Topology(_)
        | Error::AlreadyUp { .. }
        | Error::Tool { .. }
        | Error::Io { .. }
        | Error::Timeout { .. } => Exit::Failed,
    };
    Failure::new(exit, "", error.to_string(), "")
}

/// Runs blocking work of the world's without holding up the runtime.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> canal_world::Result<T> + Send + 'static) -> Outcome<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| failure(&error)),
        Err(problem) => Err(Failure::failed("world", problem, "")),
    }
}

/// Names of the worlds that are up.
pub(crate) fn names() -> Outcome<Vec<String>> {
    let listed = World::list().map_err(|error| failure(&error))?;
    Ok(listed.into_iter().filter(|world| world.alive).map(|world| world.name).collect())
}

/// Brings up a world that dies with this process, however that ends.
pub(crate) async fn up_ephemeral(topology: Topology, name: String) -> Outcome<Arc<Realm>> {
    let world = blocking(move || {
        let topology = topology.renamed(&name).map_err(|problem| Error::Topology(vec![problem]))?;
        World::up(&topology, &Options { ephemeral: true, ..Options::default() })
    });
    Ok(Arc::new(Realm { world: world.await? }))
}

impl Realm {
    /// The world of this name, or the only one that is up.
    pub(crate) fn open(name: Option<&str>) -> Outcome<Arc<Self>> {
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

    /// The token by which an operator speaks to the controller.
    pub(crate) fn operator_token(&self) -> Outcome<String> {
        self.world.operator_token().map_err(|error| failure(&error))
    }

    pub(crate) fn hosts(&self) -> Outcome<Vec<Host>> {
        self.world.hosts().map_err(|error| failure(&error))
    }

    /// Names of all hosts of a kind.
    pub(crate) fn names_of(&self, kind: Kind) -> Outcome<Vec<String>> {
        let hosts = self.hosts()?.into_iter().filter(|host| host.seat.kind == kind.name());
        Ok(hosts.map(|host| host.seat.name).collect())
    }

    pub(crate) fn log_path(&self, host: &str) -> Outcome<PathBuf> {
        self.world.log(host).map_err(|error| failure(&error))
    }

    /// The socket on which the process of a host serves its operators.
    pub(crate) fn admin_socket(&self, host: &str) -> Outcome<PathBuf> {
        Ok(self.world.data(host).map_err(|error| failure(&error))?.join("admin.sock"))
    }

    /// A command that runs inside a host.
    pub(crate) fn command(&self, host: &str, argv: &[impl AsRef<std::ffi::OsStr>]) -> Outcome<tokio::process::Command> {
        let command = self.world.exec(host, argv).map_err(|error| failure(&error))?;
        Ok(command.into())
    }

    /// SIGKILL for a host's processes.
    pub(crate) fn kill(&self, host: &str) -> Outcome {
        self.world.kill(host, Signal::Kill).map_err(|error| failure(&error))
    }

    /// CPU time of a host's own processes.
    pub(crate) fn cpu(&self, host: &str) -> Outcome<CpuTime> {
        self.world.cpu(host).map_err(|error| failure(&error))
    }

    /// Counters of a host's uplink.
    pub(crate) fn uplink(&self, host: &str) -> Outcome<Traffic> {
        let devices = self.world.traffic(host).map_err(|error| failure(&error))?;
        Ok(devices.into_iter().find(|(name, _)| name == "eth0").map(|(_, traffic)| traffic).unwrap_or_default())
    }

    /// Opens a TCP connection inside a host's network namespace.
    pub(crate) async fn dial(&self, host: &str, to: SocketAddr) -> std::io::Result<TcpStream> {
        let (world, host) = (self.name().to_owned(), host.to_owned());
        let dialled = tokio::task::spawn_blocking(move || {
            let connect = || std::net::TcpStream::connect_timeout(&to, DIAL_TIMEOUT);
            World::open(&world).and_then(|world| world.inside(&host, connect)).map_err(std::io::Error::other)?
        });
        let stream = dialled.await.map_err(std::io::Error::other)??;
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        TcpStream::from_std(stream)
    }

    /// Waits until all processes are ready.
    pub(crate) async fn wait_ready(self: &Arc<Self>, limit: Duration) -> Outcome {
        let realm = self.clone();
        blocking(move || realm.world.wait_ready(limit)).await
    }

    /// Adds a gateway replica to a tier world; its process was started.
    pub(crate) async fn add_gateway(self: &Arc<Self>, name: &str, az: &str, backend: &str) -> Outcome {
        let (realm, name, az, backend) = (self.clone(), name.to_owned(), az.to_owned(), backend.to_owned());
        blocking(move || realm.world.add_gateway(&name, &az, &backend)).await
    }

    /// Ends a gateway replica's process, which may drain, and removes its host.
    pub(crate) async fn remove_gateway(self: &Arc<Self>, name: &str) -> Outcome {
        let (realm, name) = (self.clone(), name.to_owned());
        blocking(move || realm.world.remove_gateway(&name)).await
    }

    /// Takes the world down; nothing of it is left.
    pub(crate) async fn down(&self) -> Outcome {
        let name = self.name().to_owned();
        blocking(move || World::down_by_name(&name)).await
    }
}

fn decide_only(mut names: Vec<String>) -> Outcome<String> {
    match (names.pop(), names.is_empty()) {
        (Some(name), true) => Ok(name),
        (Some(name), false) => {
            names.push(name);
            let what = format!("several worlds are up: {}", names.join(", "));
            Err(Failure::new(Exit::Usage, "--world", what, "name one with --world or $CANAL_WORLD"))
        }
        (None, _) => Err(Failure::new(
            Exit::Missing,
            "--world",
            "no world is up",
            "bring one up with `canal up demo`, or name a controller with --server",
        )),
    }
}

/// One word on a process, with its reason where there is one.
pub(crate) fn phase(pulse: &Pulse) -> String {
    match &pulse.phase {
        Phase::Idle => "idle".to_owned(),
        Phase::Waiting { until } => format!("waits for {until}"),
        Phase::Running if pulse.ready => "ready".to_owned(),
        Phase::Running => "not ready".to_owned(),
        Phase::Pausing { how } => format!("restarts: {how}"),
        Phase::Ended { how, well: false } => format!("ended: {how}"),
        Phase::Ended { well: true, .. } => "done".to_owned(),
        Phase::Stopped => "stopped".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_world_needs_no_name() {
        assert_eq!(decide_only(vec!["demo".into()]).unwrap(), "demo");
        assert_eq!(decide_only(vec!["a".into(), "b".into()]).unwrap_err().exit, Exit::Usage);
        assert_eq!(decide_only(vec![]).unwrap_err().exit, Exit::Missing);
    }
}
