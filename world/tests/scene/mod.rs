//! The fixture of this crate's tests: worlds from YAML texts with names of their own, and a listing
//! of everything that a machine contains of a world.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use canal_timing::deadline;
use canal_world::{LeftoverLock, Topology, World, WorldOptions};

pub(crate) const SMOKE: &str = include_str!("../../topologies/smoke.yaml");

/// Path of the crate's own small program, which supervises the tests' worlds.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_canal-world");

/// Directory of this crate's programs.
pub(crate) fn bin_dir() -> PathBuf {
    Path::new(PROGRAM)
        .parent()
        .map(Path::to_owned)
        .unwrap_or_default()
}

pub(crate) fn options(ephemeral: bool) -> WorldOptions {
    WorldOptions {
        ephemeral,
        supervisor: vec![PROGRAM.into(), "supervise".into()],
        bin_dirs: vec![bin_dir()],
        leftovers: LEFTOVERS.get().cloned(),
        ..WorldOptions::default()
    }
}

/// The lock on leftovers, if this process has it.
static LEFTOVERS: OnceLock<Arc<LeftoverLock>> = OnceLock::new();

/// Takes the lock on leftovers until this process ends: no other process removes what a killed
/// world of this process left. Waits while another process has it.
pub(crate) fn keep_leftovers() {
    LEFTOVERS.get_or_init(|| {
        let take = || LeftoverLock::try_take().unwrap_or_else(|error| panic!("{error}"));
        if let Some(lock) = take() {
            return Arc::new(lock);
        }
        // The runner of the tests stops the clock of this job between these two lines.
        print_line("WAITS FOR LOCK");
        let mut lock = None;
        becomes("the lock on leftovers", 20 * STEP_TIMEOUT, || {
            lock = take();
            lock.is_some()
        });
        print_line("HAS LOCK");
        Arc::new(lock.expect("just taken"))
    });
}

/// Writes a line to the standard output of this process, which `println!` would not reach in a
/// test.
fn print_line(line: &str) {
    let mut out = std::io::stdout().lock();
    // The line begins anew, because libtest prints `test name ... ` without an end.
    writeln!(out, "\n{line}")
        .and_then(|()| out.flush())
        .expect("standard output");
}

/// Maximum time of an event on a quiet machine. In the gate, `deadline` waits a minute or more.
pub(crate) const STEP_TIMEOUT: Duration = Duration::from_secs(20);

/// Returns a name that no other test process uses, also of another run on this machine. It is short
/// enough for a topology file.
pub(crate) fn name(tag: &str) -> String {
    let run = std::env::var("CANAL_RUN_ID").unwrap_or_default();
    format!("{tag}{run}{:x}", std::process::id() & 0xf_ffff)
}

pub(crate) fn topology(name: &str, yaml: &str) -> Topology {
    let file = std::env::temp_dir().join("topology.yaml");
    let parsed = Topology::parse(&file, yaml);
    let topology = parsed.unwrap_or_else(|problems| {
        panic!(
            "{}",
            problems
                .iter()
                .map(|problem| format!("{problem}\n"))
                .collect::<String>()
        )
    });
    topology.renamed(name).expect("a name")
}

/// Brings up an ephemeral world and waits until it is ready.
pub(crate) fn world(tag: &str, yaml: &str) -> World {
    let world = World::up(&topology(&name(tag), yaml), &options(true))
        .unwrap_or_else(|error| panic!("{error}"));
    world
        .wait_ready(deadline(STEP_TIMEOUT))
        .unwrap_or_else(|error| panic!("{error}"));
    world
}

/// Runs a command in a host to its end.
pub(crate) fn run(world: &World, host: &str, argv: &[&str]) -> Output {
    let mut command = world
        .exec(host, argv)
        .unwrap_or_else(|error| panic!("{error}"));
    command
        .output()
        .unwrap_or_else(|error| panic!("{argv:?} in {host}: {error}"))
}

/// Returns the standard output of a command that succeeded, or the standard error of one that
/// failed.
pub(crate) fn client_output(world: &World, host: &str, argv: &[&str]) -> Result<String, String> {
    let output = run(world, host, argv);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(text(&output.stderr))
    }
}

/// Maximum time until a peer in a host answers on a quiet machine. It only has to exceed what a
/// quiet machine needs: in the gate, `deadline` waits a minute or more.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// Connects from a host to an address that answers, or that refuses it with an error. Returns the
/// answer or the error.
pub(crate) fn dial(world: &World, from: &str, to: &str) -> Result<String, String> {
    let seconds = deadline(ANSWERS_WITHIN).as_secs().to_string();
    client_output(world, from, &["canal-world-peer", "dial", to, &seconds])
}

/// Connects from a host to an address that must not answer, also if no error comes. Returns the
/// error.
pub(crate) fn dial_in_vain(world: &World, from: &str, to: &str, why: &str) -> String {
    client_output(world, from, &["canal-world-peer", "dial", to]).expect_err(why)
}

/// Lists everything that the machine contains of a world.
pub(crate) fn remains(world: &str) -> Vec<String> {
    let mut found = Vec::new();
    let list = |dir: &str| -> Vec<String> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries
            // The names of a world's things are UTF-8, so others are not of interest.
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect()
    };
    found.extend(
        list("/run/netns")
            .into_iter()
            .filter(|name| name.starts_with(&format!("cnl-{world}."))),
    );
    found.extend(
        list("/run/canal/worlds")
            .into_iter()
            .filter(|name| name == world || *name == format!("{world}.lock")),
    );
    // The hierarchy's place depends on the machine: version 2 alone, or beside version 1.
    for root in ["/sys/fs/cgroup/unified/canal", "/sys/fs/cgroup/canal"] {
        found.extend(
            list(root)
                .into_iter()
                .filter(|name| name == world)
                .map(|name| format!("{root}/{name}")),
        );
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    found.extend(
        mounts
            .lines()
            .filter(|line| {
                line.contains(&format!("/{world}/")) || line.contains(&format!("cnl-{world}."))
            })
            .map(str::to_owned),
    );
    // Processes of a world have its name in their environment, which outlives every file.
    for pid in list("/proc")
        .into_iter()
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
    {
        // A process that has ended since it was listed does not remain.
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let mark = format!("CANAL_WORLD={world}");
        if environment
            .split(|byte| *byte == 0)
            .any(|entry| entry == mark.as_bytes())
        {
            found.push(format!("process {pid}"));
        }
    }
    found
}

/// Waits until nothing remains of a world.
pub(crate) fn vanishes(world: &str) {
    let mut left = Vec::new();
    let gone = holds_in_time(STEP_TIMEOUT, || {
        left = remains(world);
        left.is_empty()
    });
    assert!(gone, "{world} left behind: {left:#?}");
}

/// Waits for a condition that becomes true within this time on a quiet machine.
pub(crate) fn becomes(what: &str, quiet: Duration, condition: impl FnMut() -> bool) {
    assert!(
        holds_in_time(quiet, condition),
        "{what} did not happen within {:?}",
        deadline(quiet)
    );
}

/// Returns whether a condition becomes true before the deadline.
fn holds_in_time(quiet: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + deadline(quiet);
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the number of packets that a node has sent into the underlay and its overlays.
pub(crate) fn sent(world: &World, node: &str) -> u64 {
    let devices = world.traffic(node).expect("counters");
    devices
        .iter()
        .filter(|(name, _)| name == "eth0" || name.starts_with("vx"))
        .map(|(_, traffic)| traffic.tx_packets)
        .sum()
}

/// Waits until a node sends nothing. For at most two seconds after its creation it announces its
/// multicast groups (RFC 3810 §9.11).
pub(crate) fn silence(world: &World, node: &str) -> u64 {
    let mut before = sent(world, node);
    becomes("the silence of a node", STEP_TIMEOUT, || {
        std::thread::sleep(Duration::from_millis(1_200));
        let last = std::mem::replace(&mut before, sent(world, node));
        last == before
    });
    before
}

/// Returns a command that runs this crate's own small program with these arguments.
pub(crate) fn program(words: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(words);
    command
}

/// Writes the smoke topology to a file, under the given name.
pub(crate) fn file(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("canal-{name}.yaml"));
    std::fs::write(
        &path,
        SMOKE.replace("world: smoke", &format!("world: {name}")),
    )
    .expect("written");
    path
}

/// Returns the pid of a world's supervisor as soon as it is known.
pub(crate) fn supervisor_of(name: &str) -> u32 {
    let path = format!("/run/canal/worlds/{name}/supervisor.pid");
    let mut pid = None;
    becomes("a supervisor", STEP_TIMEOUT, || {
        pid = std::fs::read_to_string(&path)
            .ok()
            .and_then(|text| text.trim().parse().ok());
        pid.is_some()
    });
    pid.expect("just found")
}

pub(crate) fn kill_9(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid as i32).expect("a pid");
    // The process may have ended by itself.
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}
