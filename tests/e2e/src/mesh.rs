//! A world with a complete mesh, made from `tests/e2e/worlds/*.yaml`. It disappears when the test
//! process ends, however it ends.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use canal_timing::deadline;
use canal_world::{Topology, World, WorldOptions};
use serde_json::Value;

use crate::ClientOutcome;

/// The mesh must be ready and configured within this time. It only has to exceed what a quiet
/// machine needs: in the gate, `deadline` waits a minute or more.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// Maximum run time of a test's client. It only has to exceed what a quiet machine needs: in the
/// gate, `deadline` waits a minute or more.
const CLIENT_TIME_MAX: Duration = Duration::from_secs(170);
/// Address where every program of the mesh serves its metrics.
const METRICS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 15020);
/// It only has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or
/// more.
const METRICS_WITHIN: Duration = Duration::from_secs(5);
/// A request of curl's is answered within this time. It only has to exceed what a quiet machine
/// needs: in the gate, `deadline` waits a minute or more.
const RESPONSE_WITHIN: Duration = Duration::from_secs(5);
/// A change of configuration is in force in every data plane within this time. It only has to
/// exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const APPLIED_WITHIN: Duration = Duration::from_secs(10);

/// Returns the folder of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .expect("the crate is in the repository")
}

/// Returns the folder of the programs that cargo built; test programs are in its `deps`, and
/// benches beside them.
fn built() -> PathBuf {
    let own = std::env::current_exe().expect("a program has a path");
    let folder = own.parent().expect("a program is in a folder");
    if folder.ends_with("deps") {
        folder
            .parent()
            .expect("`deps` is in the profile's folder")
            .to_owned()
    } else {
        folder.to_owned()
    }
}

/// Returns the path of a program of this repository, built in the profile of the tests.
pub fn bin(name: &str) -> PathBuf {
    let path = built().join(name);
    assert!(
        path.exists(),
        "{} is missing; fix: run `cargo build --workspace --bins --tests` in the profile of the tests first",
        path.display()
    );
    path
}

/// Returns whether a host of this kind subscribes to the controller, if it runs a program at all.
fn is_subscriber(kind: &str) -> bool {
    ["gateway", "edge", "node", "keyServer"].contains(&kind)
}

/// Returns a world's name for this run of the tests: two runs on one machine do not replace each
/// other's worlds.
fn world_name(name: &str) -> String {
    match std::env::var("CANAL_RUN_ID") {
        Ok(run) if !run.is_empty() => format!("{name}-{run}"),
        _ => name.to_owned(),
    }
}

/// A running mesh: its world, programs and folders.
pub struct Mesh {
    /// The world that the mesh runs in.
    pub world: World,
}

impl Mesh {
    /// Brings up `worlds/<file>` under the name `name`, and waits until every process is ready and
    /// every data plane has its complete configuration.
    pub fn up(file: &str, name: &str) -> Self {
        Self::up_with(file, name, |_| {})
    }

    /// Brings up a mesh like [`Mesh::up`], after a change to the topology.
    pub fn up_with(file: &str, name: &str, change: impl FnOnce(&mut Topology)) -> Self {
        Self::up_from(file, name, vec![built(), root().join(".tools/bin")], change)
    }

    /// Brings up a mesh like [`Mesh::up_with`]. Wherever the world starts `program.0`, it starts
    /// this repository's test program `program.1`.
    pub fn up_in_place_of(
        file: &str,
        name: &str,
        program: (&str, &str),
        change: impl FnOnce(&mut Topology),
    ) -> Self {
        // A link in a folder that is searched first; it stays among the build's files and is the
        // same for every run.
        let folder = built().join(program.1).with_extension("instead");
        std::fs::create_dir_all(&folder).expect("a folder for the link");
        let link = folder.join(program.0);
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(bin(program.1), &link)
            .unwrap_or_else(|e| panic!("{}: {e}", link.display()));
        Self::up_from(
            file,
            name,
            vec![folder, built(), root().join(".tools/bin")],
            change,
        )
    }

    fn up_from(
        file: &str,
        name: &str,
        bin_dirs: Vec<PathBuf>,
        change: impl FnOnce(&mut Topology),
    ) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("worlds")
            .join(file);
        let mut topology =
            Topology::load(&path).unwrap_or_else(|problems| panic!("{file}: {problems:?}"));
        topology.name = world_name(name);
        change(&mut topology);
        let options = WorldOptions {
            ephemeral: true,
            replace: true,
            bin_dirs,
            ..WorldOptions::default()
        };
        bin("canal");
        let world = World::up(&topology, &options).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mesh = Self { world };
        if let Err(e) = mesh.world.wait_ready(deadline(READY_WITHIN)) {
            panic!("{name}: {e}\n{}", mesh.logs());
        }
        mesh.converge(deadline(READY_WITHIN));
        mesh
    }

    /// Returns the last lines of every host's log, for a failing test's output.
    pub fn logs(&self) -> String {
        let mut out = String::new();
        for host in self.world.hosts().unwrap_or_default() {
            let name = &host.environment.name;
            let text = self
                .world
                .log(name)
                .ok()
                .and_then(|p| std::fs::read_to_string(p).ok())
                .unwrap_or_default();
            let last: Vec<&str> = text.lines().rev().take(8).collect();
            out.push_str(&format!(
                "--- {name}\n{}\n",
                last.into_iter().rev().collect::<Vec<_>>().join("\n")
            ));
        }
        out
    }

    /// Returns all lines of a host's log that contain `text`, for a failing test's output.
    pub fn log_lines(&self, host: &str, text: &str) -> String {
        let log = self
            .world
            .log(host)
            .ok()
            .and_then(|path| std::fs::read_to_string(path).ok())
            .unwrap_or_default();
        log.lines()
            .filter(|line| line.contains(text))
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// Returns the command of a client in a pod or host, with a time limit and its output in pipes.
    pub(crate) fn command(&self, host: &str, argv: &[&str]) -> Command {
        let seconds = deadline(CLIENT_TIME_MAX).as_secs().to_string();
        let mut all = vec!["timeout", "--kill-after=5", &seconds];
        all.extend(argv);
        let mut c = self
            .world
            .exec(host, &all)
            .unwrap_or_else(|e| panic!("{host}: {e}"));
        c.stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        c
    }

    /// Runs a client in a pod or host to its end.
    pub fn run(&self, host: &str, argv: &[&str]) -> ClientOutcome {
        let out = self
            .command(host, argv)
            .output()
            .unwrap_or_else(|e| panic!("{host}: {}: {e}", argv.join(" ")));
        ClientOutcome::new(format!("{host}: {}", argv.join(" ")), out)
    }

    /// Starts a client in a pod or host; [`Mesh::end`] waits for it.
    pub fn spawn(&self, host: &str, argv: &[&str]) -> Child {
        self.command(host, argv)
            .spawn()
            .unwrap_or_else(|e| panic!("{host}: {}: {e}", argv.join(" ")))
    }

    /// Waits for a client that was started with [`Mesh::spawn`].
    pub fn end(&self, what: &str, child: Child) -> ClientOutcome {
        ClientOutcome::new(
            what.to_string(),
            child
                .wait_with_output()
                .expect("the client was started with pipes"),
        )
    }

    /// Runs `canal …` against this world.
    pub fn canal(&self, argv: &[&str]) -> ClientOutcome {
        let out = Command::new(bin("canal"))
            .args(argv)
            .env("CANAL_WORLD", self.world.name())
            .stdin(Stdio::null())
            .output()
            .expect("canal starts");
        ClientOutcome::new(format!("canal {}", argv.join(" ")), out)
    }

    /// Returns all counters and gauges of a host's program in the Prometheus format.
    pub fn metrics(&self, host: &str) -> String {
        let ask = || {
            let mut stream = TcpStream::connect_timeout(&METRICS.into(), deadline(METRICS_WITHIN))?;
            stream.set_read_timeout(Some(deadline(METRICS_WITHIN)))?;
            // An HTTP/1.0 response is not chunked, and ends with the connection.
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).map(|_| answer)
        };
        let answer: std::io::Result<String> = self
            .world
            .inside(host, ask)
            .unwrap_or_else(|e| panic!("{host}: {e}"));
        let answer = answer.unwrap_or_else(|e| panic!("{host}: metrics: {e}"));
        let (head, metrics) = answer.split_once("\r\n\r\n").unwrap_or_default();
        assert!(
            head.split(' ').nth(1) == Some("200"),
            "{host}: metrics: {answer}"
        );
        metrics.to_owned()
    }

    /// Returns the sum of a metric family's series with all of these labels (`name="value"`) at one
    /// host. Agents read their programs' counters every two seconds.
    pub fn counted(&self, host: &str, family: &str, labels: &[&str]) -> u64 {
        let metrics = self.metrics(host);
        let of_family = metrics.lines().filter(|l| {
            l.strip_prefix(family)
                .is_some_and(|rest| rest.starts_with(['{', ' ']))
        });
        let series = of_family.filter(|l| labels.iter().all(|label| l.contains(label)));
        series
            .filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok())
            .sum::<f64>() as u64
    }

    /// Returns the sum of [`Mesh::counted`] at all hosts of a kind.
    pub fn counted_at(&self, kind: &str, family: &str, labels: &[&str]) -> u64 {
        let hosts = self.world.hosts().unwrap_or_default();
        let names = hosts
            .iter()
            .filter(|host| host.environment.kind == kind && host.process.pid.is_some())
            .map(|host| &host.environment.name);
        names.map(|name| self.counted(name, family, labels)).sum()
    }

    /// Returns the status of a pod's request with additional arguments of curl; 0: none.
    pub fn code(&self, pod: &str, url: &str, more: &[&str]) -> u16 {
        let seconds = deadline(RESPONSE_WITHIN).as_secs().to_string();
        let argv = [
            "curl",
            "-sS",
            "-g",
            "--path-as-is",
            "--max-time",
            &seconds,
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            url,
        ];
        let finished = self.run(
            pod,
            &argv
                .into_iter()
                .chain(more.iter().copied())
                .collect::<Vec<_>>(),
        );
        finished.stdout.trim().parse().unwrap_or(0)
    }

    /// Returns the IPv4 address of a host or pod.
    pub fn address(&self, host: &str) -> Ipv4Addr {
        self.world
            .host(host)
            .ok()
            .and_then(|host| host.ip4())
            .unwrap_or_else(|| panic!("{host} has no IPv4 address"))
    }

    /// Returns the addresses of a name as a pod resolves it, in both families, each once; empty if
    /// there is none.
    pub fn resolve(&self, pod: &str, name: &str) -> Vec<IpAddr> {
        let finished = self.run(pod, &["getent", "ahosts", name]);
        let mut all: Vec<IpAddr> = finished
            .stdout
            .lines()
            .filter_map(|l| l.split_whitespace().next()?.parse().ok())
            .collect();
        all.sort();
        all.dedup();
        all
    }

    /// Applies these objects for a tenant, and waits until every data plane uses them.
    pub fn apply(&self, tenant: &str, yaml: &str) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = dir.path().join("objects.yaml");
        std::fs::write(&file, yaml).expect("a file in a temporary directory");
        let seconds = deadline(APPLIED_WITHIN).as_secs().to_string();
        self.canal(&[
            "apply",
            "--tenant",
            tenant,
            "--wait",
            &seconds,
            "-f",
            &file.to_string_lossy(),
        ])
        .expect_success();
    }

    /// Returns the replicas of an AZ that receive a service's new sessions, in the current plan.
    pub fn heads(&self, service: &str, az: &str) -> Vec<String> {
        let status = self
            .canal(&["gateway", "status", service, "-o", "json"])
            .json();
        let tables = status["tables"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|table| table["az"] == az);
        let members = tables
            .filter_map(|table| table["members"].as_array())
            .flatten()
            .filter(|member| member["heads"].as_u64() > Some(0));
        members
            .filter_map(|member| member["replica"].as_str().map(str::to_string))
            .collect()
    }

    /// Returns whether the tier's services are spread over it: no backend has three services more
    /// than another of its AZ. When a world starts, the backends that come up first have all
    /// services.
    pub fn is_spread(&self) -> bool {
        let placed = self.canal(&["gateway", "status", "-o", "json"]).json();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let all = |field: &str| placed[field].as_array().cloned().unwrap_or_default();
        let mut counts: BTreeMap<String, BTreeMap<String, usize>> = BTreeMap::new();
        for replica in all("replicas") {
            counts
                .entry(text(&replica["az"]))
                .or_default()
                .entry(format!(
                    "{}/{}",
                    text(&replica["az"]),
                    text(&replica["backend"])
                ))
                .or_default();
        }
        for backend in all("services")
            .iter()
            .flat_map(|service| service["backends"].as_array().cloned().unwrap_or_default())
        {
            counts
                .values_mut()
                .filter_map(|of_az| of_az.get_mut(&text(&backend)))
                .for_each(|n| *n += 1);
        }
        counts
            .values()
            .all(|of_az| of_az.values().max() <= of_az.values().min().map(|n| n + 2).as_ref())
    }

    /// Waits until buckets have stopped moving: for two seconds no head changed, no replica owned
    /// sessions behind another head, and all data planes had the published configuration. An
    /// earlier session counts as owned until it has left TIME_WAIT, 60 s after its end, so this
    /// must come first.
    pub fn rest(&self, within: Duration) {
        let places = || -> Vec<(String, u64, u64)> {
            let fleet = self.canal(&["gateway", "list", "-o", "json"]).json();
            let place = |r: &Value| {
                (
                    r["name"].to_string(),
                    r["heads"].as_u64().unwrap_or(0),
                    r["owners"].as_u64().unwrap_or(1),
                )
            };
            fleet["replicas"]
                .as_array()
                .into_iter()
                .flatten()
                .map(place)
                .collect()
        };
        let (started, mut last, mut since) = (Instant::now(), places(), Instant::now());
        while since.elapsed() < Duration::from_secs(2) {
            let waited = started.elapsed();
            assert!(
                waited < within,
                "buckets still move after {within:?}: {last:?}"
            );
            std::thread::sleep(Duration::from_millis(200));
            let now = places();
            if now != last || now.iter().any(|(_, _, owners)| *owners > 0) || !self.is_converged() {
                (last, since) = (now, Instant::now());
            }
        }
    }

    /// Returns whether every data plane is connected and uses the newest generation of its scope.
    pub fn is_converged(&self) -> bool {
        // A controller that has just started may not respond yet.
        let Ok(status) =
            serde_json::from_str::<Value>(&self.canal(&["status", "-o", "json"]).stdout)
        else {
            return false;
        };
        let planes = self
            .world
            .hosts()
            .unwrap_or_default()
            .iter()
            .filter(|h| h.environment.job.is_some() && is_subscriber(&h.environment.kind))
            .count();
        let Some(subscribers) = status["subscribers"].as_array() else {
            return false;
        };
        let n = |s: &Value, k: &str| {
            s[k].as_u64()
                .or_else(|| s[k].as_str().and_then(|t| t.parse().ok()))
                .unwrap_or(0)
        };
        let good = |s: &&Value| {
            s["connected"] == true
                && n(s, "generation_acked") >= n(s, "generation_wanted")
                && s["nack"].as_str().unwrap_or("").is_empty()
        };
        subscribers.iter().filter(good).count() >= planes.max(1)
    }

    /// Waits until [`Mesh::is_converged`] returns true.
    pub fn converge(&self, within: Duration) {
        let started = Instant::now();
        while !self.is_converged() {
            let waited = started.elapsed();
            assert!(
                waited < within,
                "not converged after {within:?}: {:?}\n{}",
                self.canal(&["status"]),
                self.logs()
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}
