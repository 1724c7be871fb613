//! The fixture of this crate's tests: worlds from YAML texts with names of their own, and a listing of everything that a machine contains
//! of a world.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use canal_world::{Topology, World, WorldOptions};

pub(crate) const SMOKE: &str = include_str!("../../topologies/smoke.yaml");

/// Path of the crate's own small program, which supervises the tests' worlds.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_canal-world");

/// Directory of this crate's programs.
pub(crate) fn bin_dir() -> PathBuf {
    Path::new(PROGRAM).parent().map(Path::to_owned).unwrap_or_default()
}

pub(crate) fn options(ephemeral: bool) -> WorldOptions {
    WorldOptions { ephemeral, supervisor: vec![PROGRAM.into(), "supervise".into()], bin_dirs: vec![bin_dir()], ..WorldOptions::default() }
}

/// Timeout for an awaited event.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// Returns a name that no other test process uses.
pub(crate) fn name(tag: &str) -> String {
    format!("{tag}{:x}", std::process::id() & 0xf_ffff)
}

pub(crate) fn topology(name: &str, yaml: &str) -> Topology {
    let file = std::env::temp_dir().join("topology.yaml");
    let parsed = Topology::parse(&file, yaml);
    let topology =
        parsed.unwrap_or_else(|problems| panic!("{}", problems.iter().map(|problem| format!("{problem}\n")).collect::<String>()));
    topology.renamed(name).expect("a name")
}

/// Brings up an ephemeral world and waits until it is ready.
pub(crate) fn world(tag: &str, yaml: &str) -> World {
    let world = World::up(&topology(&name(tag), yaml), &options(true)).unwrap_or_else(|error| panic!("{error}"));
    world.wait_ready(Duration::from_secs(30)).unwrap_or_else(|error| panic!("{error}"));
    world
}

/// Runs a command in a host to its end.
pub(crate) fn run(world: &World, host: &str, argv: &[&str]) -> Output {
    let mut command = world.exec(host, argv).unwrap_or_else(|error| panic!("{error}"));
    command.output().unwrap_or_else(|error| panic!("{argv:?} in {host}: {error}"))
}

/// Returns what a command printed to stdout if it succeeded, else what it printed to stderr.
pub(crate) fn client_output(world: &World, host: &str, argv: &[&str]) -> Result<String, String> {
    let output = run(world, host, argv);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// Lists everything that the machine contains of a world.
pub(crate) fn remains(world: &str) -> Vec<String> {
    let mut found = Vec::new();
    let list = |dir: &str| -> Vec<String> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    found.extend(list("/run/netns").into_iter().filter(|name| name.starts_with(&format!("cnl-{world}."))));
    found.extend(list("/run/canal/worlds").into_iter().filter(|name| name == world || *name == format!("{world}.lock")));
    for root in ["/sys/fs/cgroup/unified/canal", "/sys/fs/cgroup/canal"] {
        found.extend(list(root).into_iter().filter(|name| name == world).map(|name| format!("{root}/{name}")));
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    found.extend(
        mounts.lines().filter(|line| line.contains(&format!("/{world}/")) || line.contains(&format!("cnl-{world}."))).map(str::to_owned),
    );
    for pid in list("/proc").into_iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let mark = format!("CANAL_WORLD={world}");
        if environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes()) {
            found.push(format!("process {pid}"));
        }
    }
    found
}

/// Waits until nothing remains of a world.
pub(crate) fn vanishes(world: &str, within: Duration) {
    let deadline = Instant::now() + within;
    loop {
        let left = remains(world);
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "{world} left behind: {left:#?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for a condition that must become true.
pub(crate) fn becomes(what: &str, within: Duration, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + within;
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not happen within {within:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the number of packets that a node has sent into the underlay and its overlays.
pub(crate) fn sent(world: &World, node: &str) -> u64 {
    let devices = world.traffic(node).expect("counters");
    devices.iter().filter(|(name, _)| name == "eth0" || name.starts_with("vx")).map(|(_, traffic)| traffic.tx_packets).sum()
}

/// Waits until a node sends nothing. For at most two seconds after its creation it announces its multicast groups (RFC 3810 §9.11).
pub(crate) fn silence(world: &World, node: &str) -> u64 {
    let mut before = sent(world, node);
    loop {
        std::thread::sleep(Duration::from_millis(1_200));
        let now = sent(world, node);
        if now == before {
            return now;
        }
        before = now;
    }
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
    std::fs::write(&path, SMOKE.replace("world: smoke", &format!("world: {name}"))).expect("written");
    path
}

/// Returns the pid of a world's supervisor as soon as it is known.
pub(crate) fn supervisor_of(name: &str) -> u32 {
    let path = format!("/run/canal/worlds/{name}/supervisor.pid");
    let mut pid = None;
    becomes("a supervisor", SOON, || {
        pid = std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
        pid.is_some()
    });
    pid.expect("just found")
}

pub(crate) fn kill_9(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid as i32).expect("a pid");
    // The process may have ended by itself.
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}
