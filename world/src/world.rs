//! [`World`]: a handle on a running world, to bring it up, query it, run commands in it, inject faults and take it down. The world itself
//! is its supervisor process and the kernel objects; this module only communicates with them. Start
//! at [`World::up`].

use std::ffi::OsStr;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, kill_process};

use crate::cgroup::CpuTime;
use crate::control::{HostStatus, WorldRequest, WorldResponse, read_line, send_request};
use crate::error::{Error, IoContext, Result};
use crate::garbage_collect::{self, SupervisorLock, WorldListing};
use crate::host_environment::{EnvironmentBuilder, find_program};
use crate::net::{RefusedPackets, Traffic};
use crate::plan::WorldPlan;
use crate::problem::TopologyProblem;
use crate::process_supervisor::ProcessPhase;
use crate::recovery::{self, Recovery, StoreRecovery};
use crate::state::{LeftoverLock, WorldLock, WorldPaths, WorldRecord, make_dir, write_whole};
use crate::supervisor::StartupReport;
use crate::topology::{PodTemplate, Topology};
use crate::tree::nearest;
use crate::{cgroup, launch, net, state, sys};

/// Timeout for building a world: the largest one on a busy machine needs less.
const UP_WITHIN: Duration = Duration::from_secs(120);
/// Timeout for a supervisor that takes its world down; after it the supervisor is killed. Nobody
/// measured the value. Processes that do not end are killed, so a supervisor that needs longer
/// hangs.
const DOWN_WITHIN: Duration = Duration::from_secs(30);
/// Interval between two checks of an awaited condition. Nobody measured the value; a test waits
/// half of it too long on average.
const POLL_INTERVAL: Duration = Duration::from_millis(25);

/// Options for bringing a world up.
#[derive(Clone, Debug, Default)]
pub struct WorldOptions {
    /// The world ends with the calling process, however that process ends, or when its handle is
    /// dropped.
    pub ephemeral: bool,
    /// A running world of this name with another topology is taken down first.
    pub replace: bool,
    /// Directories that are searched for programs before PATH. If empty, the directory of the
    /// running executable is searched.
    pub bin_dirs: Vec<PathBuf>,
    /// Program and arguments that call [`crate::supervise`] with the name appended. If empty,
    /// `canal world supervise` from `bin_dirs`.
    pub supervisor: Vec<String>,
    /// The lock on leftovers, if the caller has it already. Otherwise [`World::up`] takes it while
    /// it removes leftovers of other worlds, and leaves them to the next world if another process
    /// has it.
    pub leftovers: Option<Arc<LeftoverLock>>,
}

/// A signal that can be sent to a host's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    Term,
    Kill,
    /// SIGSTOP: makes the host hang.
    Stop,
    /// SIGCONT: continues a stopped host.
    Cont,
    Int,
    Hup,
}

impl Signal {
    fn number(self) -> rustix::process::Signal {
        use rustix::process::Signal as Number;
        match self {
            Signal::Term => Number::TERM,
            Signal::Kill => Number::KILL,
            Signal::Stop => Number::STOP,
            Signal::Cont => Number::CONT,
            Signal::Int => Number::INT,
            Signal::Hup => Number::HUP,
        }
    }
}

/// A handle on a running world.
#[derive(Debug)]
pub struct World {
    pub(crate) paths: WorldPaths,
    /// The supervisor of an ephemeral world, and the read end of its standard output. When this end
    /// is closed, the supervisor takes the world down.
    owned: Option<(Child, ChildStdout)>,
    recovery: Recovery,
}

impl World {
    /// Brings a world up and returns when its network exists and its processes are started. They
    /// may not be ready yet: see [`World::wait_ready`]. A persistent world that is already up with
    /// the same topology is only opened. Leftovers of killed runs are removed, unless another
    /// process has the [`LeftoverLock`].
    ///
    /// # Errors
    ///
    /// The caller is not root, a program is missing, the name is taken, or the kernel refused an
    /// operation.
    pub fn up(topology: &Topology, options: &WorldOptions) -> Result<Self> {
        check_root()?;
        net::check_tools()?;
        let bin_dirs = bin_dirs(options);
        let paths = WorldPaths::of(&topology.name);
        check_programs(topology, &paths, &bin_dirs)?;
        let supervisor = supervisor_command(options, &bin_dirs)?;
        let removed = remove_others(&topology.name, options)?;
        // Without the lock a running world has the name.
        let Some(lock) = claim(&paths)? else {
            return Self::up_again(topology, options, &paths);
        };
        let owner = options.ephemeral.then(std::process::id);
        let record = WorldRecord {
            owner,
            fingerprint: topology.fingerprint(),
            bin_dirs,
        };
        // The old record must be read before `lay_out` replaces it.
        let store = recovery::decide(
            WorldRecord::read(&paths).ok().as_ref(),
            &record,
            recovery::has_store(&paths),
        );
        lay_out(&paths, topology, &record, store)?;
        let world = start(&paths, lock, &supervisor, options.ephemeral);
        let world = world.map(|mut world| {
            world.recovery = Recovery { store, removed };
            world
        });
        // A supervisor that was killed could not clean up after itself.
        if world.is_err()
            && let Some(lock) = WorldLock::try_take(&paths)?
        {
            garbage_collect::clear(&paths)?;
            lock.remove();
        }
        world
    }

    /// Handles a name that a running world already has: opens that world, replaces it, or refuses.
    fn up_again(topology: &Topology, options: &WorldOptions, paths: &WorldPaths) -> Result<Self> {
        let (world, record) = match Self::open(&topology.name)
            .and_then(|world| Ok((world, WorldRecord::read(paths)?)))
        {
            Ok(opened) => opened,
            // It has ended in the meantime, so the name is free.
            Err(_) if !garbage_collect::is_held(paths) => return Self::up(topology, options),
            // A supervisor that takes its world down removes the record first and releases the name
            // last.
            Err(_) if options.replace => {
                Self::down_by_name(&topology.name)?;
                return Self::up(topology, options);
            }
            Err(error) => return Err(error),
        };
        let (same, owner) = (record.fingerprint == topology.fingerprint(), record.owner);
        if same && owner.is_none() && !options.ephemeral {
            return Ok(world);
        }
        if options.replace {
            world.down()?;
            return Self::up(topology, options);
        }
        let how = match (owner, same) {
            (Some(pid), _) => format!("and belongs to process {pid}"),
            (None, true) => "permanently, so this command cannot own it".to_owned(),
            (None, false) => "with another topology".to_owned(),
        };
        Err(Error::AlreadyUp {
            name: topology.name.clone(),
            how,
        })
    }

    /// Opens a world that is up.
    ///
    /// # Errors
    ///
    /// No world of this name exists, or it is a leftover without a supervisor.
    pub fn open(name: &str) -> Result<Self> {
        let paths = WorldPaths::of(name);
        match garbage_collect::watch(&paths) {
            SupervisorLock::Held => Ok(Self {
                paths,
                owned: None,
                recovery: Recovery::default(),
            }),
            SupervisorLock::Free => Err(Error::NoWorld {
                name: name.to_owned(),
            }),
            SupervisorLock::Hidden => Err(Error::NotRoot),
        }
    }

    /// Lists all worlds of this machine, including leftovers.
    ///
    /// # Errors
    ///
    /// The machine has no cgroup v2 mount.
    pub fn list() -> Result<Vec<WorldListing>> {
        garbage_collect::list()
    }

    /// Removes the leftovers of killed runs, whichever process has the [`LeftoverLock`], and
    /// returns the names of those worlds.
    ///
    /// # Errors
    ///
    /// The caller is not root, or something could not be removed.
    pub fn gc() -> Result<Vec<String>> {
        check_root()?;
        garbage_collect::gc()
    }

    /// Takes down the world of this name, or removes its leftovers. It succeeds if nothing of that
    /// name exists.
    ///
    /// # Errors
    ///
    /// The caller is not root, something could not be removed, or the supervisor did not end in
    /// time.
    pub fn down_by_name(name: &str) -> Result<()> {
        check_root()?;
        let paths = WorldPaths::of(name);
        // An error means that no supervisor answers; then this process removes the world itself.
        let answered = send_request(&paths.socket(), &WorldRequest::Down).is_ok();
        let limit = if answered {
            DOWN_WITHIN
        } else {
            // No supervisor answers, so only a moment is given to one that ends by itself.
            Duration::from_secs(1)
        };
        let requested_at = Instant::now();
        let lock = loop {
            if let Some(lock) = WorldLock::try_take(&paths)? {
                break lock;
            }
            // The lock is still taken after the kill: another process is building or removing this
            // world.
            if requested_at.elapsed() > limit + DOWN_WITHIN {
                let what = "the end of its supervisor".into();
                return Err(Error::Timeout {
                    world: name.into(),
                    what,
                    seconds: requested_at.elapsed().as_secs(),
                    detail: String::new(),
                });
            }
            if requested_at.elapsed() > limit {
                kill_supervisor(&paths);
            }
            std::thread::sleep(POLL_INTERVAL);
        };
        garbage_collect::clear(&paths)?;
        lock.remove();
        Ok(())
    }

    /// Takes the world down. Nothing of it remains afterwards.
    ///
    /// # Errors
    ///
    /// See [`World::down_by_name`].
    pub fn down(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let owned = self.owned.take();
        let result = Self::down_by_name(self.paths.world());
        if let Some((mut supervisor, _tie)) = owned {
            // The supervisor has ended, because its lock is free.
            let _ = supervisor.wait();
        }
        result
    }

    pub fn name(&self) -> &str {
        self.paths.world()
    }

    /// Leftovers of killed runs that were found when this handle brought the world up.
    pub fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// Directory with all files of the world.
    pub fn dir(&self) -> &Path {
        self.paths.dir()
    }

    /// Directory of a tenant's YAML files, which the controller reads.
    pub fn config_dir(&self, tenant: &str) -> PathBuf {
        self.paths.tenant_config(tenant)
    }

    /// Returns the token with which an operator authenticates to the controller.
    ///
    /// # Errors
    ///
    /// The token file cannot be read.
    pub fn operator_token(&self) -> Result<String> {
        let path = self.paths.operator_token();
        std::fs::read_to_string(&path).tried("cannot read", &path)
    }

    /// Path of the PEM file with the root of the controller's own certificate. The controller
    /// writes it when it starts.
    pub fn root_ca(&self) -> PathBuf {
        self.paths.root_ca()
    }

    pub(crate) fn send_request(&self, request: &WorldRequest) -> Result<WorldResponse> {
        let world = self.paths.world();
        match send_request(&self.paths.socket(), request) {
            Ok(WorldResponse::Refused(message)) => Err(Error::Supervisor {
                world: world.into(),
                message,
            }),
            Ok(answer) => Ok(answer),
            Err(_) if !garbage_collect::is_held(&self.paths) => {
                Err(Error::NoWorld { name: world.into() })
            }
            Err(error) => Err(Error::Supervisor {
                world: world.into(),
                message: format!(
                    "its supervisor does not answer: {error}; fix: take it down with `canal world down`"
                ),
            }),
        }
    }

    fn until(
        &self,
        what: &str,
        timeout: Duration,
        mut holds: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let deadline = Instant::now() + timeout;
        while !holds()? {
            if Instant::now() >= deadline {
                return Err(Error::Timeout {
                    world: self.name().into(),
                    what: what.into(),
                    seconds: timeout.as_secs(),
                    detail: String::new(),
                });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns the current state of all hosts and pods.
    ///
    /// # Errors
    ///
    /// The world is gone, or its supervisor does not answer.
    pub fn hosts(&self) -> Result<Vec<HostStatus>> {
        match self.send_request(&WorldRequest::Status)? {
            WorldResponse::Hosts(hosts) => Ok(hosts),
            _ => Err(Error::Supervisor {
                world: self.name().into(),
                message: "its answer cannot be parsed; fix: use the `canal` that brought it up"
                    .into(),
            }),
        }
    }

    /// Finds one host or pod by its full name, or by the last parts of the name if they are
    /// unambiguous: `alpha/bookinfo/reviews-v1-0`, `alpha/reviews-v1-0`, `reviews-v1-0`.
    ///
    /// # Errors
    ///
    /// No host has this name, or several match it; the message suggests names.
    pub fn host(&self, name: &str) -> Result<HostStatus> {
        let mut hosts = self.hosts()?;
        if let Some(at) = hosts.iter().position(|host| host.environment.name == name) {
            return Ok(hosts.swap_remove(at));
        }
        // No full name matches; an abbreviation is accepted only if it is unambiguous.
        let short: Vec<usize> = (0..hosts.len())
            .filter(|at| is_short_for(name, &hosts[*at].environment.name))
            .collect();
        match short.as_slice() {
            [at] => Ok(hosts.swap_remove(*at)),
            found => {
                let names: Vec<&str> = hosts
                    .iter()
                    .map(|host| host.environment.name.as_str())
                    .collect();
                let hint = if found.is_empty() {
                    nearest(name, &names)
                        .map(|near| format!("; did you mean {near:?}? fix: name a host that `canal world list` shows"))
                        .unwrap_or_else(|| "; fix: name a host that `canal world list` shows".into())
                } else {
                    let full: Vec<&str> = found.iter().map(|at| names[*at]).collect();
                    format!("; fix: write {}", full.join(" or "))
                };
                Err(Error::NoHost {
                    world: self.name().into(),
                    host: name.into(),
                    hint,
                })
            }
        }
    }

    /// Prepares a command that will run inside a host: in its namespaces and its cgroup, with its
    /// /etc files, environment and working directory. Its connections are captured like those of
    /// the host's own process. The caller sets the standard streams.
    ///
    /// # Errors
    ///
    /// The host does not exist, or the program is not found in the host's PATH.
    pub fn exec<S: AsRef<OsStr>>(&self, host: &str, argv: &[S]) -> Result<Command> {
        launch::command(&self.host(host)?.environment, argv)
    }

    /// Runs `work` on a thread inside a host's network namespace. Sockets that it opens belong to
    /// the host, but they are not captured, because the thread is in no cgroup of the world.
    ///
    /// # Errors
    ///
    /// The host does not exist, or its namespace cannot be entered.
    pub fn inside<T: Send>(&self, host: &str, work: impl FnOnce() -> T + Send) -> Result<T> {
        let netns = self.host(host)?.environment.netns;
        sys::in_netns(&netns, work).tried("cannot enter namespace", &netns)
    }

    /// Starts a host's process if it is not running.
    ///
    /// # Errors
    ///
    /// The host does not exist, has no process, or the supervisor does not answer.
    pub fn start(&self, host: &str) -> Result<()> {
        let host = self.host(host)?.environment.name;
        self.send_request(&WorldRequest::Start { host }).map(drop)
    }

    /// Ends a host's process with SIGTERM, and after 35 s with SIGKILL. The process stays ended.
    ///
    /// # Errors
    ///
    /// The host does not exist, has no process, or the supervisor does not answer.
    pub fn stop(&self, host: &str) -> Result<()> {
        let host = self.host(host)?.environment.name;
        self.send_request(&WorldRequest::Stop { host }).map(drop)
    }

    /// Ends a host's process like [`World::stop`] and starts it again at once.
    ///
    /// # Errors
    ///
    /// The host does not exist, has no process, or the supervisor does not answer.
    pub fn restart(&self, host: &str) -> Result<()> {
        let host = self.host(host)?.environment.name;
        self.send_request(&WorldRequest::Restart { host }).map(drop)
    }

    /// Sends a signal to every process of a host. The restart policy decides what happens
    /// afterwards.
    ///
    /// # Errors
    ///
    /// The host does not exist, or the supervisor does not answer.
    pub fn kill(&self, host: &str, signal: Signal) -> Result<()> {
        let environment = self.host(host)?.environment;
        for pid in cgroup::pids(&environment.cgroup) {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                // A process that has ended since the listing needs no signal.
                let _ = kill_process(pid, signal.number());
            }
        }
        Ok(())
    }

    /// Adds a pod's replicas to the running world, and returns their names.
    ///
    /// # Errors
    ///
    /// The tenant or a node does not exist, a pod name is taken, a node is full, or the kernel
    /// refused an operation.
    pub fn add_pod(&self, tenant: &str, pod: &PodTemplate) -> Result<Vec<String>> {
        match self.send_request(&WorldRequest::AddPod {
            tenant: tenant.into(),
            pod: Box::new(pod.clone()),
        })? {
            WorldResponse::Names(names) => Ok(names),
            _ => Ok(Vec::new()),
        }
    }

    /// Removes one pod from the running world.
    ///
    /// # Errors
    ///
    /// No pod has this name, or something of it could not be removed.
    pub fn remove_pod(&self, name: &str) -> Result<()> {
        let uid = self.host(name)?.environment.name;
        self.send_request(&WorldRequest::RemovePod { uid })
            .map(drop)
    }

    /// Adds a gateway replica to a running tier world: host, links, token and process. Its settings
    /// are copied from another gateway of its backend, else from the world's first gateway, else
    /// they are the defaults. Returns when its process has been started.
    ///
    /// # Errors
    ///
    /// The world is not a tier world, the name is invalid or taken, or the AZ does not exist or has
    /// no edge.
    pub fn add_gateway(&self, name: &str, az: &str, backend: &str) -> Result<()> {
        self.send_request(&WorldRequest::AddGateway {
            name: name.into(),
            az: az.into(),
            backend: backend.into(),
        })
        .map(drop)
    }

    /// Ends a gateway's process like [`World::stop`], so that it can drain, then removes its host
    /// and its token. To skip the drain, call [`World::kill`] first.
    ///
    /// # Errors
    ///
    /// The world is not a tier world, or it has no such gateway.
    pub fn remove_gateway(&self, name: &str) -> Result<()> {
        let name = self.host(name)?.environment.name;
        self.send_request(&WorldRequest::RemoveGateway { name })
            .map(drop)
    }

    /// Returns whether a host's process is ready.
    ///
    /// # Errors
    ///
    /// The host does not exist, or the supervisor does not answer.
    pub fn is_ready(&self, host: &str) -> Result<bool> {
        Ok(self.host(host)?.process.ready)
    }

    /// Waits until every host is ready.
    ///
    /// # Errors
    ///
    /// The timeout expired; the message names the hosts that are not ready and quotes the ends of
    /// their logs.
    pub fn wait_ready(&self, timeout: Duration) -> Result<()> {
        self.wait_for(timeout, |_| true)
    }

    /// Waits until one host is ready.
    ///
    /// # Errors
    ///
    /// See [`World::wait_ready`].
    pub fn wait_host_ready(&self, host: &str, timeout: Duration) -> Result<()> {
        let name = self.host(host)?.environment.name;
        self.wait_for(timeout, |host| host.environment.name == name)
    }

    fn wait_for(&self, timeout: Duration, wanted: impl Fn(&HostStatus) -> bool) -> Result<()> {
        let mut late = Vec::new();
        let waited = self.until("", timeout, || {
            let hosts = self.hosts()?;
            let unready = hosts
                .iter()
                .filter(|host| wanted(host) && !host.process.ready);
            late = unready
                .map(|host| format!("\n  {}: {}", host.environment.name, complaint(host)))
                .collect();
            Ok(late.is_empty())
        });
        waited.map_err(|error| match error {
            Error::Timeout { world, seconds, .. } => Error::Timeout {
                world,
                what: format!("readiness of {} hosts", late.len()),
                seconds,
                detail: late.concat(),
            },
            other => other,
        })
    }

    /// CPU time of a host's processes since the world came up, from its cgroup.
    ///
    /// # Errors
    ///
    /// The host does not exist, or its cgroup cannot be read.
    pub fn cpu(&self, host: &str) -> Result<CpuTime> {
        cgroup::cpu(&self.host(host)?.environment.cgroup)
    }

    /// Counters of a host's interfaces, by interface name. `eth0` is the host's only uplink.
    ///
    /// # Errors
    ///
    /// The host does not exist, or its namespace cannot be read.
    pub fn traffic(&self, host: &str) -> Result<Vec<(String, Traffic)>> {
        net::traffic(&self.host(host)?.environment.netns)
    }

    /// Packets that a host refused: a node those of its pods, a gateway replica those of tenants, a
    /// tier world's router those of nodes. The gateways of tier worlds are not included, because
    /// their own programs count.
    ///
    /// # Errors
    ///
    /// The host does not exist, or its counters cannot be read.
    pub fn refused(&self, host: &str) -> Result<RefusedPackets> {
        net::refused(&self.host(host)?.environment.netns)
    }

    /// Path of the file with a host's standard output and error.
    ///
    /// # Errors
    ///
    /// The host does not exist, or the supervisor does not answer.
    pub fn log(&self, host: &str) -> Result<PathBuf> {
        Ok(self.host(host)?.environment.log)
    }

    /// Data directory of the Canal process on a host. It contains the process's admin socket.
    ///
    /// # Errors
    ///
    /// The host does not exist, or the supervisor does not answer.
    pub fn data(&self, host: &str) -> Result<PathBuf> {
        self.host(host)?;
        Ok(self.paths.data(host))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if self.owned.is_some()
            && let Err(error) = self.end()
        {
            eprintln!("{error}");
        }
    }
}

/// Describes in one line why a host is not ready, with the end of its log.
fn complaint(host: &HostStatus) -> String {
    let state = match &host.process.phase {
        ProcessPhase::Idle => "has not started".to_owned(),
        ProcessPhase::Waiting { until } => format!("waits for {until}"),
        ProcessPhase::Running => "runs, but its readiness probe fails".to_owned(),
        ProcessPhase::Pausing { how } => format!("ended ({how}) and starts again"),
        ProcessPhase::Ended { how, .. } => format!("ended ({how})"),
        ProcessPhase::Stopped => "was stopped".to_owned(),
    };
    let log = std::fs::read_to_string(&host.environment.log).unwrap_or_default();
    let mut tail: Vec<&str> = log.lines().rev().take(3).collect();
    tail.reverse();
    if tail.is_empty() {
        state
    } else {
        format!("{state}; its log ends with: {}", tail.join(" | "))
    }
}

/// Returns whether a name is an abbreviation of a full one: `b/c`, `a/c` and `c` stand for `a/b/c`.
fn is_short_for(short: &str, full: &str) -> bool {
    let mut parts = full.split('/');
    let (Some(tenant), Some(namespace), Some(name)) = (parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    short == name || short == format!("{tenant}/{name}") || short == format!("{namespace}/{name}")
}

fn check_root() -> Result<()> {
    if rustix::process::geteuid().is_root() {
        Ok(())
    } else {
        Err(Error::NotRoot)
    }
}

/// Returns the given directories, or the directory of the running executable. Cargo puts tests and
/// examples one level below the programs.
fn bin_dirs(options: &WorldOptions) -> Vec<PathBuf> {
    if !options.bin_dirs.is_empty() {
        return options.bin_dirs.clone();
    }
    let exe = std::env::current_exe().unwrap_or_default();
    let Some(dir) = exe.parent() else {
        return Vec::new();
    };
    let mut dirs = vec![dir.to_owned()];
    if dir.ends_with("deps") || dir.ends_with("examples") {
        dirs.extend(dir.parent().map(Path::to_owned));
    }
    dirs
}

/// Checks that every program that the world will start exists, before anything is built.
fn check_programs(topology: &Topology, paths: &WorldPaths, bin_dirs: &[PathBuf]) -> Result<()> {
    let plan = WorldPlan::of(topology);
    let cgroup = cgroup::of_world(paths.world())?;
    let environments = EnvironmentBuilder {
        topology,
        plan: &plan,
        paths,
        cgroup: &cgroup,
        bin_dirs,
    };
    let fixed = environments
        .fixed()
        .into_iter()
        .filter_map(|environment| environment.job);
    let jobs = fixed.map(|job| (job.argv, job.process.spot));
    let pods = topology
        .tenants
        .iter()
        .flat_map(|tenant| &tenant.pods)
        .map(|pod| (pod.process.command.clone(), pod.process.spot));
    let mut problems: Vec<TopologyProblem> = Vec::new();
    for (argv, spot) in jobs.chain(pods) {
        // The topology's reader has reported an empty command already.
        let Some(program) = argv.first() else {
            continue;
        };
        if find_program(program, bin_dirs).is_none() {
            let dirs: Vec<String> = bin_dirs
                .iter()
                .map(|dir| dir.display().to_string())
                .collect();
            problems.push(TopologyProblem {
                file: topology.file.clone(),
                spot,
                what: format!(
                    "there is no program {program:?} in {} or PATH",
                    dirs.join(", ")
                ),
                fix: "build it, install it, or write another command".into(),
            });
        }
    }
    // Hosts that differ only in their name repeat the problem.
    problems.dedup();
    if problems.is_empty() {
        Ok(())
    } else {
        Err(Error::Topology(problems))
    }
}

fn supervisor_command(options: &WorldOptions, bin_dirs: &[PathBuf]) -> Result<Vec<String>> {
    if !options.supervisor.is_empty() {
        return Ok(options.supervisor.clone());
    }
    let canal = find_program("canal", bin_dirs).ok_or_else(|| Error::Machine {
        what: "the program \"canal\", which supervises worlds".into(),
        fix: "build it: cargo build -p canal".into(),
    })?;
    Ok(vec![
        canal.display().to_string(),
        "world".into(),
        "supervise".into(),
    ])
}

/// Takes the lock on the name, or returns `None` if a running world has it. Waits while another
/// process builds or removes that world.
fn claim(paths: &WorldPaths) -> Result<Option<WorldLock>> {
    let deadline = Instant::now() + UP_WITHIN;
    loop {
        if let Some(lock) = WorldLock::try_take(paths)? {
            return Ok(Some(lock));
        }
        if send_request(&paths.socket(), &WorldRequest::Status).is_ok() {
            return Ok(None);
        }
        if Instant::now() >= deadline {
            let what = "either an answer or the end of the supervisor that has this name".into();
            return Err(Error::Timeout {
                world: paths.world().into(),
                what,
                seconds: UP_WITHIN.as_secs(),
                detail: String::new(),
            });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Removes the leftovers of all names but this one, unless another process has the lock on
/// leftovers. Returns the names of the removed persistent worlds to which objects had been applied.
fn remove_others(name: &str, options: &WorldOptions) -> Result<Vec<String>> {
    let _lock = match &options.leftovers {
        Some(lock) => lock.clone(),
        None => match LeftoverLock::try_take()? {
            Some(lock) => Arc::new(lock),
            None => return Ok(Vec::new()),
        },
    };
    let lasting = |world: &str| {
        let paths = WorldPaths::of(world);
        WorldRecord::read(&paths).is_ok_and(|record| record.owner.is_none())
            && recovery::has_store(&paths)
    };
    let lasting: Vec<String> = garbage_collect::list()?
        .into_iter()
        .map(|world| world.name)
        .filter(|world| lasting(world))
        .collect();
    let removed = garbage_collect::gc_beside(Some(name))?;
    Ok(removed
        .into_iter()
        .filter(|name| lasting.contains(name))
        .collect())
}

/// Removes leftovers, except a store that is taken over, and writes the files that the supervisor
/// reads.
fn lay_out(
    paths: &WorldPaths,
    topology: &Topology,
    record: &WorldRecord,
    store: StoreRecovery,
) -> Result<()> {
    match store {
        StoreRecovery::Kept => garbage_collect::clear_beside(paths, &recovery::kept_paths(paths))?,
        StoreRecovery::Nothing | StoreRecovery::Dropped => garbage_collect::clear(paths)?,
    }
    make_dir(paths.dir())?;
    state::write_json(&paths.topology(), topology)?;
    if let Ok(text) = std::fs::read_to_string(&topology.file) {
        write_whole(&paths.topology_text(), &text, 0o644)?;
    }
    state::write_json(&paths.record(), record)
}

/// Starts the supervisor, hands it the lock as standard input, and waits for its report.
fn start(
    paths: &WorldPaths,
    lock: WorldLock,
    command: &[String],
    ephemeral: bool,
) -> Result<World> {
    let world = || paths.world().to_owned();
    // Append mode, because the supervisor truncates the file when it grows too long.
    let log = File::options()
        .create(true)
        .append(true)
        .open(paths.supervisor_log())
        .tried("cannot make", paths.supervisor_log())?;
    let mut supervisor = Command::new(&command[0]);
    supervisor
        .args(&command[1..])
        .arg(paths.world())
        .current_dir("/")
        .stdin(lock.file)
        .stdout(Stdio::piped())
        .stderr(log);
    let mut child = supervisor.spawn().tried("cannot start", &command[0])?;
    // Drops the last copy of the lock outside the supervisor.
    drop(supervisor);
    let Some(tie) = child.stdout.take() else {
        return Err(Error::Supervisor {
            world: world(),
            message: "its supervisor has no output".into(),
        });
    };
    let mut reader = BufReader::new(tie);
    match read_line::<StartupReport>(&mut reader) {
        Ok(Some(StartupReport::Up)) => {
            // The supervisor of a persistent world does not watch the pipe, which closes here.
            let owned = ephemeral.then(|| (child, reader.into_inner()));
            Ok(World {
                paths: paths.clone(),
                owned,
                recovery: Recovery::default(),
            })
        }
        Ok(Some(StartupReport::Failed(message))) => {
            // The supervisor has cleaned up and is about to end.
            let _ = child.wait();
            Err(Error::Supervisor {
                world: world(),
                message,
            })
        }
        Ok(None) | Err(_) => {
            let log = std::fs::read_to_string(paths.supervisor_log()).unwrap_or_default();
            let status = child
                .wait()
                .map(|status| status.to_string())
                .unwrap_or_default();
            let message = format!(
                "its supervisor ended before the world was up ({status}): {}",
                log.trim()
            );
            Err(Error::Supervisor {
                world: world(),
                message,
            })
        }
    }
}

/// Kills a supervisor that does not answer. Its lock is taken, so the pid in its file is really the
/// supervisor's.
fn kill_supervisor(paths: &WorldPaths) {
    let pid = std::fs::read_to_string(paths.supervisor_pid())
        .ok()
        .and_then(|text| text.trim().parse().ok());
    if let Some(pid) = pid.and_then(Pid::from_raw) {
        // A supervisor that has already ended is as good as a killed one.
        let _ = kill_process(pid, rustix::process::Signal::KILL);
    }
}
