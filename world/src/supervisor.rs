//! The supervisor process of a running world: builds the world, runs its processes, answers its
//! socket, and takes it down on request or when its owner ends. `canal world up` starts it and
//! returns. The work on hosts and pods is in `supervisor_state`.
//!
//! Its standard input is the world's lock. Its standard output is the pipe to the process that
//! started it: the first line is the [`StartupReport`], and a closed far end means that the owner
//! has ended.

use std::io::{BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

use crate::control::{WorldRequest, WorldResponse, read_line, write_line};
use crate::error::{Error, IoContext, Result};
use crate::process_supervisor::ProcessCommand;
use crate::state::{WorldLock, WorldPaths, WorldRecord, read_json, write_whole};
use crate::supervisor_state::SupervisorState;
use crate::{garbage_collect, launch};

/// Size above which a host's log is truncated. One previous part is preserved. A world with 100
/// hosts needs 1.6 GiB at most.
const LOG_BYTES_MAX: u64 = 8 << 20;
/// Attempts to take the world down; each gives processes 10 s to end. A minute together; what is
/// left after it, `canal world gc` removes.
const CLEAR_ATTEMPTS: u32 = 6;
/// Interval between two checks of the log sizes. A log grows beyond its limit by what is written in
/// a second.
const HOUSEKEEPING: Duration = Duration::from_secs(1);
/// Readiness changes within this time are written together. Nobody notices it; without it a world
/// of 100 pods would write the file 100 times at its start.
const REGISTRY_PAUSE: Duration = Duration::from_millis(10);

/// First line on the supervisor's standard output.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum StartupReport {
    /// The network exists, and every process has been started or waits for its start conditions.
    Up,
    /// The world could not be built; nothing of it remains.
    Failed(String),
}

/// Builds and runs the world `name`, whose files [`crate::World::up`] has written. Returns when the
/// world is gone.
///
/// # Errors
///
/// The process was not started by `World::up`, or the world could not be built or removed.
pub fn supervise(name: &str) -> Result<()> {
    let paths = WorldPaths::of(name);
    let lock = inherited_lock(&paths)?;
    // A session of its own shields this process from the owner's terminal signals. The call fails
    // only in a session leader.
    let _ = rustix::process::setsid();
    raise_open_files();
    let (end, ended) = channel::<&'static str>();
    let result = build(&paths, &end, &ended);
    match result {
        Ok(stage) => {
            report(&StartupReport::Up);
            keep(&stage, &ended);
        }
        Err(error) => {
            eprintln!("world {name}: {error}");
            let cleared = clear(&paths);
            lock.remove();
            report(&StartupReport::Failed(error.to_string()));
            return cleared.and(Err(error));
        }
    }
    clear(&paths)?;
    lock.remove();
    Ok(())
}

/// Takes the world down, and repeats that if something remained: no other process will. On a busy
/// machine processes take long to end.
fn clear(paths: &WorldPaths) -> Result<()> {
    for _ in 1..CLEAR_ATTEMPTS {
        match garbage_collect::clear(paths) {
            Ok(()) => return Ok(()),
            Err(error) => eprintln!("world {}: {error}; retrying", paths.world()),
        }
    }
    garbage_collect::clear(paths)
}

/// Raises the limit of open files to the machine's maximum for every process, because hosts under
/// load have many connections.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // The old limit is acceptable if it cannot be raised.
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    );
}

/// Checks that standard input is the lock file. The lock lasts as long as this process.
fn inherited_lock(paths: &WorldPaths) -> Result<WorldLock> {
    let refusal = || Error::Supervisor {
        world: paths.world().to_owned(),
        message: "a supervisor is started by `canal world up`, not by hand; fix: run that command"
            .into(),
    };
    let stdin = rustix::stdio::stdin();
    let mine = rustix::fs::fstat(stdin)
        .tried("cannot read", paths.lock())?
        .st_ino;
    let lock = std::fs::metadata(paths.lock())
        .map_err(|_| refusal())?
        .ino();
    if mine != lock {
        return Err(refusal());
    }
    let file = stdin
        .try_clone_to_owned()
        .tried("cannot keep lock", paths.lock())?;
    Ok(WorldLock::inherited(file.into(), paths))
}

fn report(report: &StartupReport) {
    let mut out = std::io::stdout();
    // The report is not needed if the starting process no longer reads.
    let _ = write_line(&mut out, report).and_then(|()| out.flush());
}

fn build(
    paths: &WorldPaths,
    end: &Sender<&'static str>,
    ended: &std::sync::mpsc::Receiver<&'static str>,
) -> Result<Arc<SupervisorState>> {
    write_whole(
        &paths.supervisor_pid(),
        &format!("{}\n", std::process::id()),
        0o644,
    )?;
    let record = WorldRecord::read(paths)?;
    watch_owner(record.owner.is_some(), end.clone())?;
    let stage = Arc::new(SupervisorState::of(
        paths.clone(),
        read_json(&paths.topology())?,
        record,
    )?);
    let go_on = || match ended.try_recv() {
        Ok(why) => Err(Error::Supervisor {
            world: paths.world().to_owned(),
            message: format!("stopped while it was built: {why}"),
        }),
        Err(_) => Ok(()),
    };
    go_on()?;
    stage.build_network(go_on)?;
    stage.prepare_files()?;
    go_on()?;
    let socket = UnixListener::bind(paths.socket()).tried("cannot listen on", paths.socket())?;
    stage.open()?;
    go_on()?;
    let registry = Arc::clone(&stage);
    spawn("registry", move || keep_registry(&registry))?;
    let (served, end) = (Arc::clone(&stage), end.clone());
    spawn("socket", move || serve(&served, &socket, &end))?;
    Ok(stage)
}

fn spawn(name: &'static str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(work)
        .map(drop)
        .tried("cannot start the thread", name)
}

/// Watches the owner's end of the pipe, because an ephemeral world ends with its owner. A
/// persistent world does not watch it.
fn watch_owner(ephemeral: bool, end: Sender<&'static str>) -> Result<()> {
    if !ephemeral {
        return Ok(());
    }
    let tie = rustix::stdio::stdout()
        .try_clone_to_owned()
        .tried("cannot watch", "standard output")?;
    spawn("owner", move || {
        loop {
            // The write end of a pipe reports an error when its last reader is gone.
            let mut fds = [PollFd::new(&tie, PollFlags::empty())];
            if poll(&mut fds, None).is_ok()
                && fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
            {
                // The receiver exists as long as the world.
                let _ = end.send("its owner has ended");
                return;
            }
        }
    })
}

/// Bounds the logs until a request or the owner's end stops the world.
fn keep(stage: &SupervisorState, ended: &std::sync::mpsc::Receiver<&'static str>) {
    loop {
        match ended.recv_timeout(HOUSEKEEPING) {
            Err(RecvTimeoutError::Timeout) => {
                for log in stage.logs() {
                    if let Err(error) = launch::bound_log(&log, LOG_BYTES_MAX) {
                        eprintln!("world: cannot bound a log: {error}; retrying");
                    }
                }
            }
            Ok(_) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Writes the pods' registry again whenever a pod appears, disappears or changes its readiness.
fn keep_registry(stage: &SupervisorState) {
    let mut written = Vec::new();
    loop {
        let mut statuses = stage.statuses.lock();
        while SupervisorState::registry_state(&statuses) == written {
            // A change wakes it at once, so any long time will do.
            statuses = stage.statuses.wait(statuses, Duration::from_secs(3600));
        }
        drop(statuses);
        // Readiness changes come in bursts; one write covers the changes of this interval.
        std::thread::sleep(REGISTRY_PAUSE);
        let state = SupervisorState::registry_state(&stage.statuses.lock());
        match stage.write_registry() {
            Ok(()) => written = state,
            Err(error) => {
                eprintln!("world: cannot write the pods' registry: {error}; retrying");
                std::thread::sleep(HOUSEKEEPING);
            }
        }
    }
}

fn serve(stage: &Arc<SupervisorState>, socket: &UnixListener, end: &Sender<&'static str>) {
    for stream in socket.incoming() {
        let Ok(stream) = stream else { continue };
        let (stage, end) = (Arc::clone(stage), end.clone());
        if let Err(error) = spawn("request", move || converse(&stage, stream, &end)) {
            eprintln!("world: cannot serve a request: {error}");
        }
    }
}

/// Answers the requests of one connection until it closes.
fn converse(stage: &SupervisorState, stream: UnixStream, end: &Sender<&'static str>) {
    let Ok(mut out) = stream.try_clone() else {
        return;
    };
    let mut input = BufReader::new(stream);
    while let Ok(Some(request)) = read_line::<WorldRequest>(&mut input) {
        let down = matches!(request, WorldRequest::Down);
        let answer = answer(stage, request)
            .unwrap_or_else(|error| WorldResponse::Refused(error.to_string()));
        if write_line(&mut out, &answer).is_err() && !down {
            return;
        }
        if down {
            // The receiver exists as long as the world.
            let _ = end.send("asked to");
            return;
        }
    }
}

fn answer(stage: &SupervisorState, request: WorldRequest) -> Result<WorldResponse> {
    match request {
        WorldRequest::Status => Ok(WorldResponse::Hosts(stage.hosts())),
        WorldRequest::Start { host } => stage
            .order(&host, ProcessCommand::Start)
            .map(|()| WorldResponse::Done),
        WorldRequest::Stop { host } => stage
            .order(&host, ProcessCommand::Stop)
            .map(|()| WorldResponse::Done),
        WorldRequest::Restart { host } => stage
            .order(&host, ProcessCommand::Restart)
            .map(|()| WorldResponse::Done),
        WorldRequest::AddPod { tenant, pod } => {
            stage.add_pod(&tenant, &pod).map(WorldResponse::Names)
        }
        WorldRequest::RemovePod { uid } => stage.remove_pod(&uid).map(|()| WorldResponse::Done),
        WorldRequest::AddGateway { name, az, backend } => stage
            .add_gateway(&name, &az, &backend)
            .map(|()| WorldResponse::Done),
        WorldRequest::RemoveGateway { name } => {
            stage.remove_gateway(&name).map(|()| WorldResponse::Done)
        }
        WorldRequest::CutAz { az, hosts_die } => {
            stage.cut_az(&az, hosts_die).map(|()| WorldResponse::Done)
        }
        WorldRequest::HealAz { az } => stage.heal_az(&az).map(|()| WorldResponse::Done),
        WorldRequest::Link { host, up } => stage.link(&host, up).map(|()| WorldResponse::Done),
        WorldRequest::Down => Ok(WorldResponse::Done),
    }
}
