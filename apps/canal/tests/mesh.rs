//! Tests of the verbs that inspect data planes, in the demo's whole world: status, config dump,
//! logs, tap, exec; and `up` as a script runs it.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use canal_timing::deadline;

/// Maximum time of a step on a quiet machine.
/// `canal up` waits as long by default.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
const PARTS: [&str; 5] = [
    "canal-controller",
    "canal-node",
    "canal-edge",
    "canal-gateway",
    "canal-samples",
];

/// A process `canal up demo` in the background.
struct Up {
    child: Child,
    name: String,
}

impl Up {
    /// Returns `None`, with a message, if worlds cannot be built here.
    fn start() -> Option<Self> {
        let beside = Path::new(env!("CARGO_BIN_EXE_canal")).parent().unwrap();
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: worlds need root (network namespaces); run the tests as root");
            return None;
        }
        if let Some(part) = PARTS.iter().find(|part| !beside.join(part).is_file()) {
            eprintln!(
                "SKIPPED: {} has no {part}; build the whole workspace first",
                beside.display()
            );
            return None;
        }
        let run = std::env::var("CANAL_RUN_ID").unwrap_or_default();
        let name = format!("mesh{run}-{}", std::process::id() % 1_000_000);
        let child = Command::new(env!("CARGO_BIN_EXE_canal"))
            .args(["up", "demo", "--quiet", "--name", &name])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Some(Self { child, name })
    }

    fn command(&self, words: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_canal"));
        command
            .env_remove("CANAL_TENANT")
            .env_remove("CANAL_SERVER")
            .env("CANAL_WORLD", &self.name);
        command.args(words.split_whitespace()).stdin(Stdio::null());
        command
    }

    fn canal(&self, words: &str) -> Output {
        self.command(words).output().unwrap()
    }

    /// Runs a verb that must succeed and print `want`, and returns its standard output.
    fn check(&self, words: &str, want: &str) -> String {
        let output = self.canal(words);
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success(),
            "{words}: {out}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(out.contains(want), "{words}: no {want:?} in {out}");
        out
    }

    fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let (started, within) = (Instant::now(), deadline(STEP_TIMEOUT));
        while !holds() {
            let waited = started.elapsed();
            assert!(waited < within, "{what} did not happen within {within:?}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn terminate(&mut self) -> Option<i32> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // The process has ended, or an assertion failed. In both cases the world ends with its
        // owner.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The page may take as long as a step.
const CURL: &str = "world exec alpha/bookinfo/client-0 -- curl -sS --max-time 60";

#[test]
fn a_running_mesh_can_be_observed() {
    // `start` has printed why the test is skipped.
    let Some(mut up) = Up::start() else { return };
    up.until(
        "all data planes are current and alpha's route is applied",
        // A mesh that is current may still lack the route, which is applied after the start.
        || {
            up.canal("status --check").status.success()
                && up
                    .canal("get --tenant alpha httproute reviews -n bookinfo")
                    .status
                    .success()
        },
    );

    let status: serde_json::Value = serde_json::from_str(&up.check("status -o json", "")).unwrap();
    assert_eq!(
        status["subscribers"].as_array().map(Vec::len),
        Some(12),
        "two edges, four replicas, four nodes, two key servers: {status:#}"
    );
    let fleet: serde_json::Value =
        serde_json::from_str(&up.check("gateway list -o json", "")).unwrap();
    assert_eq!(
        fleet["replicas"].as_array().map(Vec::len),
        Some(4),
        "{fleet:#}"
    );
    up.check("world list", &up.name);
    up.check("config dump gw-1", "southbound");
    up.check(
        "config dump alpha-n1 --part pods.0.identity",
        "spiffe://alpha.example/ns/bookinfo/sa/",
    );
    up.check("logs alpha-n1 --level debug", "debug");

    // The tap must be open before the pages are requested, so requests go on until it has two.
    let tap = up
        .command("tap -n 2 --tenant alpha --path /productpage -o json")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The end of the test consumes the process, so it is an Option. Inside `until` it is there.
    let mut tap = Some(tap);
    up.until("the tap sees two pages", || {
        up.check(
            &format!("{CURL} http://productpage:9080/productpage"),
            "\"service\":\"productpage\"",
        );
        tap.as_mut()
            .is_none_or(|tap| tap.try_wait().unwrap().is_some())
    });
    let lines = String::from_utf8(tap.take().unwrap().wait_with_output().unwrap().stdout).unwrap();
    let seen: Vec<serde_json::Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(seen.len(), 2);
    assert!(
        seen.iter()
            .all(|request| request["tenant"] == "alpha" && request["status"] == 200),
        "{lines}"
    );
    // The page was requested just before. Nobody measured how many lines of other requests follow
    // it.
    let logged = |n| {
        String::from_utf8_lossy(&up.canal(&format!("logs gw-{n} --tail 20")).stdout)
            .contains("/productpage")
    };
    up.until(
        "the page is in the access log of the replica that served it",
        || (1..=4).any(logged),
    );

    assert_eq!(
        // SIGTERM interrupts `canal up` like ctrl-c.
        up.terminate(),
        Some(130),
        "exit code 130 for an interrupted command, as the help states"
    );
    assert_eq!(
        up.canal(&format!("world list {}", up.name)).status.code(),
        Some(5),
        "the world was removed"
    );
}
