//! The process behind a living world: builds it, keeps its processes, answers its socket, and
//! takes it down when asked or when its owner dies. `canal world up` starts it and returns.
//!
//! Its standard input is the world's lock, its standard output the pipe to whoever started it:
//! the first line on it is the report, and its far end closing is the owner's death.

use std::io::{BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

use crate::control::{Answer, Request, read_line, write_line};
use crate::error::{Error, Result, Tried};
use crate::life::Order;
use crate::stage::Stage;
use crate::state::{Lock, Paths, Record, read_json, write_whole};
use crate::{launch, sweep};

/// A host's log is cut when it grows over this; the previous part is kept once.
const LOG_BYTES_MAX: u64 = 8 << 20;
/// How often the supervisor looks at logs.
const HOUSEKEEPING: Duration = Duration::from_secs(1);
/// Readiness changes within this time are written together.
const REGISTRY_PAUSE: Duration = Duration::from_millis(10);

/// The first line on the supervisor's standard output.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// The network is there and every process has been started or waits for its conditions.
    Up,
    /// It could not be built; nothing is left of it.
    Failed(String),
}

/// Builds and keeps the world `name`, whose files [`crate::World::up`] has laid out. Returns when
/// the world is gone.
///
/// Errors: it was not started by `World::up`, or the world could not be built or removed.
pub fn supervise(name: &str) -> Result<()> {
    let paths = Paths::of(name);
    let lock = inherited_lock(&paths)?;
    // Own session: the owner's terminal signals are not ours. Fails only if we lead one already.
    let _ = rustix::process::setsid();
    raise_open_files();
    let (end, ended) = channel::<&'static str>();
    let result = build(&paths, &end, &ended);
    match result {
        Ok(stage) => {
            report(&Report::Up);
            keep(&stage, &ended);
        }
        Err(error) => {
            eprintln!("world {name}: {error}");
            let cleared = sweep::clear(&paths);
            lock.remove();
            report(&Report::Failed(error.to_string()));
            return cleared.and(Err(error));
        }
    }
    sweep::clear(&paths)?;
    lock.remove();
    Ok(())
}

/// Hosts under load hold many connections: every process gets what the machine allows at most.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // A limit that cannot be raised is one to live with.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// Standard input must be the locked file: the lock lives as long as this process.
fn inherited_lock(paths: &Paths) -> Result<Lock> {
    let refusal = || Error::Supervisor {
        world: paths.world().to_owned(),
        message: "a supervisor is started by `canal world up`, not by hand".into(),
    };
    let stdin = rustix::stdio::stdin();
    let mine = rustix::fs::fstat(stdin).tried("cannot read", paths.lock())?.st_ino;
    let lock = std::fs::metadata(paths.lock()).map_err(|_| refusal())?.ino();
    if mine != lock {
        return Err(refusal());
    }
    let file = stdin.try_clone_to_owned().tried("cannot keep lock", paths.lock())?;
    Ok(Lock::inherited(file.into(), paths))
}

fn report(report: &Report) {
    let mut out = std::io::stdout();
    // A starter that no longer listens needs no report.
    let _ = write_line(&mut out, report).and_then(|()| out.flush());
}

fn build(paths: &Paths, end: &Sender<&'static str>, ended: &std::sync::mpsc::Receiver<&'static str>) -> Result<Arc<Stage>> {
    write_whole(&paths.supervisor_pid(), &format!("{}\n", std::process::id()), 0o644)?;
    let record = Record::read(paths)?;
    watch_owner(record.owner.is_some(), end.clone())?;
    let stage = Arc::new(Stage::of(paths.clone(), read_json(&paths.topology())?, record)?);
    let go_on = || match ended.try_recv() {
        Ok(why) => Err(Error::Supervisor { world: paths.world().to_owned(), message: format!("stopped while it was built: {why}") }),
        Err(_) => Ok(()),
    };
    go_on()?;
    stage.build_network(go_on)?;
    stage.furnish()?;
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
    std::thread::Builder::new().name(name.into()).spawn(work).map(drop).tried("cannot start the thread", name)
}

/// An ephemeral world dies with its owner; a persistent one lets go of the pipe after the report.
fn watch_owner(ephemeral: bool, end: Sender<&'static str>) -> Result<()> {
    if !ephemeral {
        return Ok(());
    }
    let tie = rustix::stdio::stdout().try_clone_to_owned().tried("cannot watch", "standard output")?;
    spawn("owner", move || {
        loop {
            // The write end of a pipe reports an error when its last reader is gone.
            let mut fds = [PollFd::new(&tie, PollFlags::empty())];
            if poll(&mut fds, None).is_ok() && fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP) {
                // The receiver lives as long as the world.
                let _ = end.send("its owner is gone");
                return;
            }
        }
    })
}

/// Until somebody ends the world.
fn keep(stage: &Stage, ended: &std::sync::mpsc::Receiver<&'static str>) {
    loop {
        match ended.recv_timeout(HOUSEKEEPING) {
            Err(RecvTimeoutError::Timeout) => {
                for log in stage.logs() {
                    if let Err(error) = launch::bound_log(&log, LOG_BYTES_MAX) {
                        eprintln!("{error}");
                    }
                }
            }
            Ok(_) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Writes the pods again whenever one of them appears, vanishes or changes its readiness.
fn keep_registry(stage: &Stage) {
    let mut written = Vec::new();
    loop {
        let mut pulses = stage.board.lock();
        while Stage::registry_state(&pulses) == written {
            pulses = stage.board.wait(pulses, Duration::from_secs(3600));
        }
        drop(pulses);
        std::thread::sleep(REGISTRY_PAUSE);
        let state = Stage::registry_state(&stage.board.lock());
        match stage.write_registry() {
            Ok(()) => written = state,
            Err(error) => {
                eprintln!("{error}");
                std::thread::sleep(HOUSEKEEPING);
            }
        }
    }
}

fn serve(stage: &Arc<Stage>, socket: &UnixListener, end: &Sender<&'static str>) {
    for stream in socket.incoming() {
        let Ok(stream) = stream else { continue };
        let (stage, end) = (Arc::clone(stage), end.clone());
        if let Err(error) = spawn("request", move || converse(&stage, stream, &end)) {
            eprintln!("{error}");
        }
    }
}

/// Answers one connection's requests until it closes.
fn converse(stage: &Stage, stream: UnixStream, end: &Sender<&'static str>) {
    let Ok(mut out) = stream.try_clone() else { return };
    let mut input = BufReader::new(stream);
    while let Ok(Some(request)) = read_line::<Request>(&mut input) {
        let down = matches!(request, Request::Down);
        let answer = answer(stage, request).unwrap_or_else(|error| Answer::Refused(error.to_string()));
        if write_line(&mut out, &answer).is_err() && !down {
            return;
        }
        if down {
            // The receiver lives as long as the world.
            let _ = end.send("asked to");
            return;
        }
    }
}

fn answer(stage: &Stage, request: Request) -> Result<Answer> {
    match request {
        Request::Status => Ok(Answer::Hosts(stage.hosts())),
        Request::Start { host } => stage.order(&host, Order::Start).map(|()| Answer::Done),
        Request::Stop { host } => stage.order(&host, Order::Stop).map(|()| Answer::Done),
        Request::Restart { host } => stage.order(&host, Order::Restart).map(|()| Answer::Done),
        Request::AddPod { tenant, pod } => stage.add_pod(&tenant, &pod).map(Answer::Names),
        Request::RemovePod { uid } => stage.remove_pod(&uid).map(|()| Answer::Done),
        Request::AddGateway { name, az, backend } => stage.add_gateway(&name, &az, &backend).map(|()| Answer::Done),
        Request::RemoveGateway { name } => stage.remove_gateway(&name).map(|()| Answer::Done),
        Request::CutAz { az, hosts_die } => stage.cut_az(&az, hosts_die).map(|()| Answer::Done),
        Request::HealAz { az } => stage.heal_az(&az).map(|()| Answer::Done),
        Request::Link { host, up } => stage.link(&host, up).map(|()| Answer::Done),
        Request::Down => Ok(Answer::Done),
    }
}
