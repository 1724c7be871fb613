//! One script of third-party software. Its server runs in the server pods of both tenants, its
//! client on each path. It does not check the results.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use canal_e2e::{ClientOutcome, Mesh, root, until};
use canal_timing::deadline;
use tempfile::TempDir;

use crate::cases::differences::CaseObservation;

/// Folder of the scripts.
const SCRIPTS: &str = "tests/e2e/programs/software";
/// A server listens, and its `prepare` succeeds, within this time; RabbitMQ needs most of it.
const START_TIMEOUT: Duration = Duration::from_secs(90);
const PATHS: [&str; 4] = [
    "declared-pod4",
    "declared-pod6",
    "declared-service4",
    "declared-service6",
];
/// Addresses of the server pod, the client pod and the Service, IPv4 and IPv6; the same in both
/// tenants.
const SERVER: [&str; 2] = ["10.1.2.2", "fd00:1::2:2"];
const CLIENT: [&str; 2] = ["10.1.1.2", "fd00:1::1:2"];
const SERVICE: [&str; 2] = ["10.101.0.40", "fd00:101::40"];
/// Placeholder for an observation that a meshed client lacks.
const UNOBSERVED: &str = "(nothing observed)";

pub(crate) struct SoftwareProgram {
    pub(crate) name: String,
    script: PathBuf,
    port: String,
    needs: Vec<String>,
    paths: Vec<String>,
    has_prepare: bool,
    pub(crate) has_crowd: bool,
}

/// Kind of client load on a running server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClientPart {
    /// One client after the other, on every path.
    Check,
    /// Thousands of connections at once, on one path of each kind.
    Crowd,
}

/// A server in a pod. Dropping it ends the server and removes its files.
struct SoftwareServer {
    child: Child,
    files: TempDir,
}

impl Drop for SoftwareServer {
    fn drop(&mut self) {
        // `timeout`, under which every client of a mesh runs, forwards the signal; killing
        // `timeout` would leave the server.
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.child.wait();
    }
}

impl SoftwareProgram {
    /// Returns every script, by name.
    pub(crate) fn all() -> Vec<Self> {
        let folder = std::fs::read_dir(root().join(SCRIPTS)).expect("the folder of scripts");
        let mut paths: Vec<PathBuf> = folder
            .map(|entry| entry.expect("a script").path())
            .collect();
        paths.retain(|path| path.extension().is_some_and(|end| end == "sh"));
        paths.sort();
        paths.iter().map(|path| Self::read(path)).collect()
    }

    fn read(script: &Path) -> Self {
        let text =
            std::fs::read_to_string(script).unwrap_or_else(|e| panic!("{}: {e}", script.display()));
        let words = |field: &str| -> Vec<String> {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(&format!("# {field}: ")));
            line.unwrap_or_default()
                .split_whitespace()
                .map(str::to_owned)
                .collect()
        };
        let name = script
            .file_stem()
            .expect("a script has a name")
            .to_string_lossy()
            .into_owned();
        let port = words("port")
            .pop()
            .unwrap_or_else(|| panic!("{name}: its `# port:` line is missing"));
        let paths = Some(words("paths")).filter(|paths| !paths.is_empty());
        let paths = paths.unwrap_or_else(|| PATHS.map(str::to_owned).into());
        Self {
            name,
            script: script.to_owned(),
            port,
            needs: words("needs"),
            paths,
            has_prepare: text.contains("\nprepare)"),
            has_crowd: text.contains("\ncrowd)"),
        }
    }

    /// Returns the first requirement that is missing in pods.
    pub(crate) fn missing(&self, mesh: &Mesh) -> Option<String> {
        let has = |need: &&String| {
            !mesh
                .run(
                    "plain/default/client-0",
                    &["sh", "-c", "command -v \"$0\" || test -e \"$0\"", need],
                )
                .stdout
                .is_empty()
        };
        let exists = |need: &&String| Path::new(need.as_str()).exists() || has(need);
        self.needs.iter().find(|need| !exists(need)).cloned()
    }

    /// Runs server and clients in both tenants at once.
    pub(crate) fn observe(&self, mesh: &Mesh, part: ClientPart) -> Vec<CaseObservation> {
        let mut observed: Vec<CaseObservation> = std::thread::scope(|scope| {
            let both = [true, false]
                .map(|is_meshed| scope.spawn(move || self.observe_in(mesh, is_meshed, part)));
            both.into_iter()
                .flat_map(|tenant| tenant.join().expect("a tenant's thread does not panic"))
                .collect()
        });
        observed.extend(self.unobserved(&observed, part));
        observed
    }

    /// Returns the observations that only the unmeshed client made, as those of an interrupted
    /// client: silence is a difference too.
    fn unobserved(&self, observed: &[CaseObservation], part: ClientPart) -> Vec<CaseObservation> {
        let is_observed = |case: &str, path: &str| {
            observed
                .iter()
                .any(|one| one.is_meshed && one.case == case && one.path == path)
        };
        let mut unobserved = Vec::new();
        for one in observed.iter().filter(|one| !one.is_meshed) {
            let paths = self
                .paths_of(part, true)
                .filter(|path| path.chars().last() == one.path.chars().last());
            for path in paths.filter(|path| !is_observed(&one.case, path)) {
                unobserved.push(CaseObservation {
                    path: path.clone(),
                    is_meshed: true,
                    text: UNOBSERVED.to_owned(),
                    ..one.clone()
                });
            }
        }
        unobserved
    }

    /// Returns the paths of a tenant's clients. Without the mesh nothing translates a Service's
    /// address.
    fn paths_of(&self, part: ClientPart, is_meshed: bool) -> impl Iterator<Item = &String> {
        let paths = self
            .paths
            .iter()
            .filter(move |path| is_meshed || !path.contains("service"));
        paths.filter(move |path| part == ClientPart::Check || path.ends_with('4'))
    }

    fn observe_in(&self, mesh: &Mesh, is_meshed: bool, part: ClientPart) -> Vec<CaseObservation> {
        let server = self.start(mesh, is_meshed);
        let word = if part == ClientPart::Check {
            "check"
        } else {
            "crowd"
        };
        let mut observed = Vec::new();
        for path in self.paths_of(part, is_meshed) {
            let words = self.words(word, server.files.path(), path);
            let output = mesh.run(
                &pod(is_meshed, "client"),
                &words.iter().map(String::as_str).collect::<Vec<_>>(),
            );
            // A line that is not `name: text` is other output of the program.
            for (fact, text) in output.stdout.lines().filter_map(|line| {
                line.split_once(": ")
                    .or_else(|| Some((line.strip_suffix(':')?, "")))
            }) {
                observed.push(CaseObservation {
                    case: format!("{}:{fact}", self.name),
                    path: path.clone(),
                    is_meshed,
                    text: text.trim().to_owned(),
                });
            }
            // A crowd's one line is its result, so its end is no observation.
            if part == ClientPart::Crowd {
                continue;
            }
            // How the client ends is an observation like others.
            let ended = output
                .code
                .map_or("by a signal".to_owned(), |code| code.to_string());
            observed.push(CaseObservation {
                case: format!("{}:end", self.name),
                path: path.clone(),
                is_meshed,
                text: ended,
            });
        }
        observed
    }

    /// Returns the command line of a part of the script, with its parameters in the environment.
    fn words(&self, part: &str, files: &Path, path: &str) -> Vec<String> {
        let family = usize::from(path.ends_with('6'));
        let host = if path.contains("service") {
            SERVICE[family]
        } else {
            SERVER[family]
        };
        let in_url = if family == 1 {
            format!("[{host}]")
        } else {
            host.to_owned()
        };
        let own = root().join(SCRIPTS);
        let names = [
            CLIENT.map(|ip| format!("s/{ip}$/client/")),
            SERVER.map(|ip| format!("s/{ip}$/server/")),
        ]
        .concat();
        let names = format!("s/::ffff://g;{}", names.join(";"));
        let known = [
            format!("PATH_MORE={}", own.display()),
            format!("DIR={}", files.display()),
            format!("HOST={host}"),
            format!("URLHOST={in_url}"),
            format!("CLIENT={}", CLIENT[family]),
            format!("SERVER={}", SERVER[family]),
            format!("CLIENT_PATH={path}"),
            format!("NAMES={names}"),
        ];
        let run = "PATH=\"$PATH:$PATH_MORE\" exec \"$0\" \"$1\"";
        let script = self.script.display().to_string();
        ["env".to_owned()]
            .into_iter()
            .chain(known)
            .chain(["sh", "-c", run, &script, part].map(str::to_owned))
            .collect()
    }

    fn start(&self, mesh: &Mesh, is_meshed: bool) -> SoftwareServer {
        let host = pod(is_meshed, "server");
        let files = tempfile::tempdir().expect("a temporary directory");
        // Servers switch to other users.
        std::fs::set_permissions(files.path(), std::fs::Permissions::from_mode(0o755))
            .expect("its mode can be set");
        let log = files.path().join("server.log");
        let words = self.words("serve", files.path(), PATHS[0]);
        let redirected = [
            "sh",
            "-c",
            "log=$0; exec \"$@\" >\"$log\" 2>&1",
            &log.display().to_string(),
        ]
        .map(str::to_owned);
        let words: Vec<String> = redirected.into_iter().chain(words).collect();
        let child = mesh.spawn(&host, &words.iter().map(String::as_str).collect::<Vec<_>>());
        let mut server = SoftwareServer { child, files };
        let is_listening = || listens(mesh, &host, &self.port);
        let is_prepared =
            || !self.has_prepare || self.prepare(mesh, &host, server.files.path()).code == Some(0);
        until(
            deadline(START_TIMEOUT),
            &format!("{host}: {} serves; its log is {}", self.name, log.display()),
            || {
                let ended = server.child.try_wait().expect("the child is ours");
                let text = || std::fs::read_to_string(&log).unwrap_or_default();
                assert!(
                    ended.is_none(),
                    "{host}: {} does not serve ({ended:?}):\n{}",
                    self.name,
                    text()
                );
                is_listening() && is_prepared()
            },
        );
        server
    }

    fn prepare(&self, mesh: &Mesh, host: &str, files: &Path) -> ClientOutcome {
        let words = self.words("prepare", files, PATHS[0]);
        mesh.run(host, &words.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

fn pod(is_meshed: bool, name: &str) -> String {
    format!(
        "{}/default/{name}-0",
        if is_meshed { "mesh" } else { "plain" }
    )
}

fn listens(mesh: &Mesh, host: &str, port: &str) -> bool {
    let output = mesh.run(host, &["ss", "-Hltn", &format!("sport = :{port}")]);
    !output.stdout.trim().is_empty()
}
