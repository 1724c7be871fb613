//! A handle on a living world: bring it up, ask it, run commands in it, disturb it, take it down.
//! The world itself is its supervisor process and the kernel objects; this only talks to them.

use std::ffi::OsStr;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, kill_process};

use crate::cgroup::CpuTime;
use crate::control::{Answer, Host, Request, ask, read_line};
use crate::error::{Error, Result, Tried};
use crate::life::Phase;
use crate::net::{Refused, Traffic};
use crate::plan::Plan;
use crate::problem::Problem;
use crate::seat::{Seats, find_program};
use crate::state::{Lock, Paths, Record, make_dir, write_whole};
use crate::supervisor::Report;
use crate::sweep::{self, Listed};
use crate::topology::{Pod, Topology};
use crate::tree::nearest;
use crate::{cgroup, launch, net, state, sys};

/// The largest world is built in this time on a busy machine.
const UP_WITHIN: Duration = Duration::from_secs(120);
/// A supervisor that does not take its world down within this time is killed.
const DOWN_WITHIN: Duration = Duration::from_secs(30);
/// How often things that are awaited are looked at.
const GLANCE: Duration = Duration::from_millis(25);

/// How a world is brought up.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The world dies with the calling process, however that dies, or when its handle is dropped.
    pub ephemeral: bool,
    /// A world of this name with another topology is taken down first.
    pub replace: bool,
    /// Where commands are looked up before PATH; empty: beside the running executable.
    pub bin_dirs: Vec<PathBuf>,
    /// Program and arguments that call [`crate::supervise`] with the name appended; empty:
    /// `canal world supervise` from `bin_dirs`.
    pub supervisor: Vec<String>,
}

/// A signal for a host's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM.
    Term,
    /// SIGKILL.
    Kill,
    /// SIGSTOP: a host that hangs.
    Stop,
    /// SIGCONT: it goes on.
    Cont,
    /// SIGINT.
    Int,
    /// SIGHUP.
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

/// A living world.
#[derive(Debug)]
pub struct World {
    pub(crate) paths: Paths,
    /// For an ephemeral world: the supervisor, and the pipe whose closing tells it that we died.
    owned: Option<(Child, ChildStdout)>,
}

impl World {
    /// Brings a world up and returns when its network is there and its processes are started
    /// (not yet ready: see [`World::wait_ready`]). A persistent world that is already up with the
    /// same topology is simply opened. Leftovers of killed runs are removed on the way.
    ///
    /// Errors: not root, a program is missing, the name is taken, or the kernel refused.
    pub fn up(topology: &Topology, options: &Options) -> Result<Self> {
        check_root()?;
        net::check_tools()?;
        let bin_dirs = bin_dirs(options);
        let paths = Paths::of(&topology.name);
        check_programs(topology, &paths, &bin_dirs)?;
        let supervisor = supervisor_command(options, &bin_dirs)?;
        sweep::gc()?;
        let Some(lock) = claim(&paths)? else {
            return Self::up_again(topology, options, &paths);
        };
        let owner = options.ephemeral.then(std::process::id);
        lay_out(&paths, topology, &Record { owner, fingerprint: topology.fingerprint(), bin_dirs })?;
        let world = start(&paths, lock, &supervisor, options.ephemeral);
        if world.is_err() {
            // A supervisor that was killed could not clean up after itself.
            sweep::gc()?;
        }
        world
    }

    /// The name is taken by a living world.
    fn up_again(topology: &Topology, options: &Options, paths: &Paths) -> Result<Self> {
        let world = Self::open(&topology.name)?;
        let record = Record::read(paths)?;
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
            (None, true) => "for good, and cannot be had for a while only".to_owned(),
            (None, false) => "with another topology".to_owned(),
        };
        Err(Error::AlreadyUp { name: topology.name.clone(), how })
    }

    /// Opens a world that is up.
    ///
    /// Errors: there is none of this name, or what there is, is a leftover.
    pub fn open(name: &str) -> Result<Self> {
        let paths = Paths::of(name);
        if !sweep::is_held(&paths) {
            return Err(Error::NoWorld { name: name.to_owned() });
        }
        Ok(Self { paths, owned: None })
    }

    /// All worlds of this machine, leftovers included.
    pub fn list() -> Result<Vec<Listed>> {
        sweep::list()
    }

    /// Removes what killed runs left behind; returns the names of those worlds.
    pub fn gc() -> Result<Vec<String>> {
        check_root()?;
        sweep::gc()
    }

    /// Takes down the world of this name, leftovers too. A name of which nothing exists is a success.
    pub fn down_by_name(name: &str) -> Result<()> {
        check_root()?;
        let paths = Paths::of(name);
        // Errors mean that nobody answers; then it is taken down from here.
        let asked = ask(&paths.socket(), &Request::Down).is_ok();
        let patience = if asked { DOWN_WITHIN } else { Duration::from_secs(1) };
        let asked_at = Instant::now();
        let lock = loop {
            if let Some(lock) = Lock::try_take(&paths)? {
                break lock;
            }
            if asked_at.elapsed() > patience + DOWN_WITHIN {
                let what = "the end of its supervisor".into();
                return Err(Error::Timeout { world: name.into(), what, seconds: asked_at.elapsed().as_secs(), detail: String::new() });
            }
            if asked_at.elapsed() > patience {
                kill_supervisor(&paths);
            }
            std::thread::sleep(GLANCE);
        };
        sweep::clear(&paths)?;
        lock.remove();
        Ok(())
    }

    /// Takes the world down. Nothing of it is left afterwards.
    pub fn down(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let owned = self.owned.take();
        let result = Self::down_by_name(self.paths.world());
        if let Some((mut supervisor, _tie)) = owned {
            // It has ended: its lock is free.
            let _ = supervisor.wait();
        }
        result
    }

    /// Name of the world.
    pub fn name(&self) -> &str {
        self.paths.world()
    }

    /// Directory with all of the world's files.
    pub fn dir(&self) -> &Path {
        self.paths.dir()
    }

    /// The controller's YAML directory of a tenant.
    pub fn config_dir(&self, tenant: &str) -> PathBuf {
        self.paths.tenant_config(tenant)
    }

    /// The token by which an operator speaks to the controller.
    pub fn operator_token(&self) -> Result<String> {
        let path = self.paths.operator_token();
        std::fs::read_to_string(&path).tried("cannot read", &path)
    }

    /// PEM file with the root of the controller's own certificate; it appears when the controller has started.
    pub fn root_ca(&self) -> PathBuf {
        self.paths.root_ca()
    }

    pub(crate) fn ask(&self, request: &Request) -> Result<Answer> {
        let world = self.paths.world();
        match ask(&self.paths.socket(), request) {
            Ok(Answer::Refused(message)) => Err(Error::Supervisor { world: world.into(), message }),
            Ok(answer) => Ok(answer),
            Err(_) if !sweep::is_held(&self.paths) => Err(Error::NoWorld { name: world.into() }),
            Err(error) => Err(Error::Supervisor { world: world.into(), message: format!("its supervisor does not answer: {error}") }),
        }
    }

    fn until(&self, what: &str, timeout: Duration, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
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
            std::thread::sleep(GLANCE);
        }
        Ok(())
    }

    /// All hosts and pods, as they are now.
    pub fn hosts(&self) -> Result<Vec<Host>> {
        match self.ask(&Request::Status)? {
            Answer::Hosts(hosts) => Ok(hosts),
            _ => Err(Error::Supervisor { world: self.name().into(), message: "it answers nonsense".into() }),
        }
    }

    /// One host or pod, by its full name or by the last parts of it if that is unambiguous:
    /// `alpha/bookinfo/reviews-v1-0`, `alpha/reviews-v1-0`, `reviews-v1-0`.
    pub fn host(&self, name: &str) -> Result<Host> {
        let mut hosts = self.hosts()?;
        if let Some(at) = hosts.iter().position(|host| host.seat.name == name) {
            return Ok(hosts.swap_remove(at));
        }
        let short: Vec<usize> = (0..hosts.len()).filter(|at| is_short_for(name, &hosts[*at].seat.name)).collect();
        match short.as_slice() {
            [at] => Ok(hosts.swap_remove(*at)),
            found => {
                let names: Vec<&str> = hosts.iter().map(|host| host.seat.name.as_str()).collect();
                let hint = if found.is_empty() {
                    nearest(name, &names)
                        .map(|near| format!("; did you mean {near:?}?"))
                        .unwrap_or_else(|| "; `canal world list` shows them".into())
                } else {
                    let full: Vec<&str> = found.iter().map(|at| names[*at]).collect();
                    format!("; it could be {}", full.join(" or "))
                };
                Err(Error::NoHost { world: self.name().into(), host: name.into(), hint })
            }
        }
    }

    /// A command that will run inside a host: in its namespaces, with its /etc files, environment
    /// and working directory, in its cgroup, and so captured as the host's own process is.
    /// Streams are the caller's to set.
    pub fn exec<S: AsRef<OsStr>>(&self, host: &str, argv: &[S]) -> Result<Command> {
        launch::command(&self.host(host)?.seat, argv)
    }

    /// Runs `work` on a thread inside a host's network namespace, and only that: sockets it opens
    /// belong to the host but are not captured, because the thread is in no cgroup of the world.
    pub fn inside<T: Send>(&self, host: &str, work: impl FnOnce() -> T + Send) -> Result<T> {
        let netns = self.host(host)?.seat.netns;
        sys::in_netns(&netns, work).tried("cannot enter namespace", &netns)
    }

    /// Starts a host's process, if it does not run.
    pub fn start(&self, host: &str) -> Result<()> {
        let host = self.host(host)?.seat.name;
        self.ask(&Request::Start { host }).map(drop)
    }

    /// Ends a host's process (SIGTERM, after 35 s SIGKILL) and keeps it ended.
    pub fn stop(&self, host: &str) -> Result<()> {
        let host = self.host(host)?.seat.name;
        self.ask(&Request::Stop { host }).map(drop)
    }

    /// Ends a host's process like [`World::stop`] and starts it again at once.
    pub fn restart(&self, host: &str) -> Result<()> {
        let host = self.host(host)?.seat.name;
        self.ask(&Request::Restart { host }).map(drop)
    }

    /// Sends a signal to every process of a host. What then happens is its restart policy's affair.
    pub fn kill(&self, host: &str, signal: Signal) -> Result<()> {
        let seat = self.host(host)?.seat;
        for pid in cgroup::pids(&seat.cgroup) {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                // A process that ended meanwhile needs no signal.
                let _ = kill_process(pid, signal.number());
            }
        }
        Ok(())
    }

    /// Adds a pod's replicas to the running world; returns their names.
    pub fn add_pod(&self, tenant: &str, pod: &Pod) -> Result<Vec<String>> {
        match self.ask(&Request::AddPod { tenant: tenant.into(), pod: Box::new(pod.clone()) })? {
            Answer::Names(names) => Ok(names),
            _ => Ok(Vec::new()),
        }
    }

    /// Removes one pod from the running world.
    pub fn remove_pod(&self, name: &str) -> Result<()> {
        let uid = self.host(name)?.seat.name;
        self.ask(&Request::RemovePod { uid }).map(drop)
    }

    /// Adds a gateway replica to a running tier world: host, links, token and process, all as the other gateways of its backend
    /// have them (or the world's first gateway, or the defaults). Returns when its process has been started.
    ///
    /// Errors: no tier world, a name that is taken or none, no such AZ, or one without an edge.
    pub fn add_gateway(&self, name: &str, az: &str, backend: &str) -> Result<()> {
        self.ask(&Request::AddGateway { name: name.into(), az: az.into(), backend: backend.into() }).map(drop)
    }

    /// Ends a gateway's process like [`World::stop`], so that it can drain, then removes its host and its token. One that shall not
    /// drain is killed first ([`World::kill`]). Errors: no tier world, or no such gateway.
    pub fn remove_gateway(&self, name: &str) -> Result<()> {
        let name = self.host(name)?.seat.name;
        self.ask(&Request::RemoveGateway { name }).map(drop)
    }

    /// Whether a host's process is ready.
    pub fn is_ready(&self, host: &str) -> Result<bool> {
        Ok(self.host(host)?.pulse.ready)
    }

    /// Waits until every host is ready.
    ///
    /// Errors: the time is over; the message names what is not ready and quotes its log.
    pub fn wait_ready(&self, timeout: Duration) -> Result<()> {
        self.wait_for(timeout, |_| true)
    }

    /// Waits until one host is ready. Errors: as [`World::wait_ready`].
    pub fn wait_host_ready(&self, host: &str, timeout: Duration) -> Result<()> {
        let name = self.host(host)?.seat.name;
        self.wait_for(timeout, |host| host.seat.name == name)
    }

    fn wait_for(&self, timeout: Duration, wanted: impl Fn(&Host) -> bool) -> Result<()> {
        let mut late = Vec::new();
        let waited = self.until("", timeout, || {
            let hosts = self.hosts()?;
            let unready = hosts.iter().filter(|host| wanted(host) && !host.pulse.ready);
            late = unready.map(|host| format!("\n  {}: {}", host.seat.name, complaint(host))).collect();
            Ok(late.is_empty())
        });
        waited.map_err(|error| match error {
            Error::Timeout { world, seconds, .. } => {
                Error::Timeout { world, what: format!("readiness of {} hosts", late.len()), seconds, detail: late.concat() }
            }
            other => other,
        })
    }

    /// CPU time of a host's processes since the world came up, from its cgroup.
    pub fn cpu(&self, host: &str) -> Result<CpuTime> {
        cgroup::cpu(&self.host(host)?.seat.cgroup)
    }

    /// Counters of a host's interfaces, by name: `eth0` is its only way out.
    pub fn traffic(&self, host: &str) -> Result<Vec<(String, Traffic)>> {
        net::traffic(&self.host(host)?.seat.netns)
    }

    /// What a node refused of its pods' packets, a gateway replica of tenants' (not in tier worlds, where its own programs count), or
    /// a tier world's router of nodes'.
    pub fn refused(&self, host: &str) -> Result<Refused> {
        net::refused(&self.host(host)?.seat.netns)
    }

    /// The file with a host's standard output and error.
    pub fn log(&self, host: &str) -> Result<PathBuf> {
        Ok(self.host(host)?.seat.log)
    }

    /// The data directory of the process of Canal on a host; its admin socket is in there.
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

/// Why a host is not ready, in one line and the end of its log.
fn complaint(host: &Host) -> String {
    let state = match &host.pulse.phase {
        Phase::Idle => "has not begun".to_owned(),
        Phase::Waiting { until } => format!("waits for {until}"),
        Phase::Running => "runs, but its readiness probe fails".to_owned(),
        Phase::Pausing { how } => format!("ended ({how}) and starts again"),
        Phase::Ended { how, .. } => format!("ended ({how})"),
        Phase::Stopped => "was stopped".to_owned(),
    };
    let log = std::fs::read_to_string(&host.seat.log).unwrap_or_default();
    let mut tail: Vec<&str> = log.lines().rev().take(3).collect();
    tail.reverse();
    if tail.is_empty() { state } else { format!("{state}; its log ends with: {}", tail.join(" | ")) }
}

/// `b/c` and `a/c` and `c` are short for `a/b/c`.
fn is_short_for(short: &str, full: &str) -> bool {
    let mut parts = full.split('/');
    let (Some(tenant), Some(namespace), Some(name)) = (parts.next(), parts.next(), parts.next()) else { return false };
    short == name || short == format!("{tenant}/{name}") || short == format!("{namespace}/{name}")
}

fn check_root() -> Result<()> {
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err(Error::NotRoot) }
}

/// Given directories, or the running executable's; cargo puts tests and examples one level below.
fn bin_dirs(options: &Options) -> Vec<PathBuf> {
    if !options.bin_dirs.is_empty() {
        return options.bin_dirs.clone();
    }
    let exe = std::env::current_exe().unwrap_or_default();
    let Some(dir) = exe.parent() else { return Vec::new() };
    let mut dirs = vec![dir.to_owned()];
    if dir.ends_with("deps") || dir.ends_with("examples") {
        dirs.extend(dir.parent().map(Path::to_owned));
    }
    dirs
}

/// Every program that the world will start must be there before anything is built.
fn check_programs(topology: &Topology, paths: &Paths, bin_dirs: &[PathBuf]) -> Result<()> {
    let plan = Plan::of(topology);
    let cgroup = cgroup::of_world(paths.world())?;
    let seats = Seats { topology, plan: &plan, paths, cgroup: &cgroup, bin_dirs };
    let fixed = seats.fixed().into_iter().filter_map(|seat| seat.job);
    let jobs = fixed.map(|job| (job.argv, job.process.spot));
    let pods = topology.tenants.iter().flat_map(|tenant| &tenant.pods).map(|pod| (pod.process.command.clone(), pod.process.spot));
    let mut problems: Vec<Problem> = Vec::new();
    for (argv, spot) in jobs.chain(pods) {
        let Some(program) = argv.first() else { continue };
        if find_program(program, bin_dirs).is_none() {
            let dirs: Vec<String> = bin_dirs.iter().map(|dir| dir.display().to_string()).collect();
            problems.push(Problem {
                file: topology.file.clone(),
                spot,
                what: format!("there is no program {program:?} in {} or PATH", dirs.join(", ")),
                mend: "build it, install it, or write another command".into(),
            });
        }
    }
    problems.dedup();
    if problems.is_empty() { Ok(()) } else { Err(Error::Topology(problems)) }
}

fn supervisor_command(options: &Options, bin_dirs: &[PathBuf]) -> Result<Vec<String>> {
    if !options.supervisor.is_empty() {
        return Ok(options.supervisor.clone());
    }
    let canal = find_program("canal", bin_dirs).ok_or_else(|| Error::Machine {
        what: "the program \"canal\", which supervises worlds".into(),
        mend: "build it: cargo build -p canal".into(),
    })?;
    Ok(vec![canal.display().to_string(), "world".into(), "supervise".into()])
}

/// Takes the name, or finds that a living world has it. Somebody who builds or removes that world
/// right now is waited for.
fn claim(paths: &Paths) -> Result<Option<Lock>> {
    let deadline = Instant::now() + UP_WITHIN;
    loop {
        if let Some(lock) = Lock::try_take(paths)? {
            return Ok(Some(lock));
        }
        if ask(&paths.socket(), &Request::Status).is_ok() {
            return Ok(None);
        }
        if Instant::now() >= deadline {
            let what = "either an answer or the end of the supervisor that has this name".into();
            return Err(Error::Timeout { world: paths.world().into(), what, seconds: UP_WITHIN.as_secs(), detail: String::new() });
        }
        std::thread::sleep(GLANCE);
    }
}

/// Clears leftovers and writes what the supervisor reads.
fn lay_out(paths: &Paths, topology: &Topology, record: &Record) -> Result<()> {
    sweep::clear(paths)?;
    make_dir(paths.dir())?;
    state::write_json(&paths.topology(), topology)?;
    if let Ok(text) = std::fs::read_to_string(&topology.file) {
        write_whole(&paths.topology_text(), &text, 0o644)?;
    }
    state::write_json(&paths.record(), record)
}

/// Starts the supervisor with the lock in its hands, and waits for its report.
fn start(paths: &Paths, lock: Lock, command: &[String], ephemeral: bool) -> Result<World> {
    let world = || paths.world().to_owned();
    // Append mode: it is cut when it grows too long.
    let log = File::options().create(true).append(true).open(paths.supervisor_log()).tried("cannot make", paths.supervisor_log())?;
    let mut supervisor = Command::new(&command[0]);
    supervisor.args(&command[1..]).arg(paths.world()).current_dir("/").stdin(lock.file).stdout(Stdio::piped()).stderr(log);
    let mut child = supervisor.spawn().tried("cannot start", &command[0])?;
    // Holds the last copy of the lock that is not the supervisor's.
    drop(supervisor);
    let Some(tie) = child.stdout.take() else {
        return Err(Error::Supervisor { world: world(), message: "its supervisor has no output".into() });
    };
    let mut reader = BufReader::new(tie);
    match read_line::<Report>(&mut reader) {
        Ok(Some(Report::Up)) => {
            let owned = ephemeral.then(|| (child, reader.into_inner()));
            Ok(World { paths: paths.clone(), owned })
        }
        Ok(Some(Report::Failed(message))) => {
            // It has cleaned up and is about to end.
            let _ = child.wait();
            Err(Error::Supervisor { world: world(), message })
        }
        Ok(None) | Err(_) => {
            let log = std::fs::read_to_string(paths.supervisor_log()).unwrap_or_default();
            let status = child.wait().map(|status| status.to_string()).unwrap_or_default();
            let message = format!("its supervisor ended before the world was up ({status}): {}", log.trim());
            Err(Error::Supervisor { world: world(), message })
        }
    }
}

/// Kills a supervisor that does not answer. Its lock is held, so the number in its file is its own.
fn kill_supervisor(paths: &Paths) {
    let pid = std::fs::read_to_string(paths.supervisor_pid()).ok().and_then(|text| text.trim().parse().ok());
    if let Some(pid) = pid.and_then(Pid::from_raw) {
        // Gone already is as good.
        let _ = kill_process(pid, rustix::process::Signal::KILL);
    }
}
