//! Runs the case programs in the pods of both tenants over every path: pod and Service
//! address, IPv4 and IPv6, port with a declared protocol and without. It compares nothing.

use std::io::{BufRead, BufReader};
use std::process::Child;

use canal_e2e::{Mesh, root};
use canal_timing::{is_timed, slack};
use serde_json::{Value, json};

use super::differences::CaseObservation;

/// Addresses of the server pod, of the client pod, and of the Services by kind and declaration;
/// they are the same in both tenants.
const SERVER: [&str; 2] = ["10.1.2.2", "fd00:1::2:2"];
const CLIENT: [&str; 2] = ["10.1.1.2", "fd00:1::1:2"];
const HTTP_SERVICE: [&str; 2] = ["10.101.0.10", "fd00:101::10"];
const DECLARED_SERVICE: [&str; 2] = ["10.101.0.20", "fd00:101::20"];
const SNIFFED_SERVICE: [&str; 2] = ["10.101.0.30", "fd00:101::30"];
/// First ports of the ranges of the TCP cases, and the ports of the HTTP cases: declared,
/// undeclared.
const TCP_BASES: [u16; 2] = [7100, 7200];
const HTTP_PORTS: [u16; 2] = [8080, 8082];
/// Maximum time of a single wait of a case in the timing tier, in seconds. A lost SYN is repeated
/// within it, after 1 s and 3 s.
const WAIT_MAX_S: u32 = 4;
/// First source port that cases bind; each path has ten. Below the kernel's ephemeral ports, so
/// that no other socket has one.
const FIXED_PORTS: u16 = 20_000;

/// A path from the client to the server.
#[derive(Debug)]
struct ClientPath {
    /// `tcp` or `http`.
    kind: &'static str,
    is_meshed: bool,
    is_declared: bool,
    is_service: bool,
    family: usize,
}

impl ClientPath {
    /// Returns the path's name in the list of differences.
    fn name(&self) -> String {
        let declared = if self.is_declared {
            "declared"
        } else {
            "undeclared"
        };
        format!(
            "{declared}-{}{}",
            if self.is_service { "service" } else { "pod" },
            ["4", "6"][self.family]
        )
    }

    fn target(&self) -> &'static str {
        let all = match (self.is_service, self.kind, self.is_declared) {
            (false, ..) => SERVER,
            (true, "http", _) => HTTP_SERVICE,
            (true, _, true) => DECLARED_SERVICE,
            (true, _, false) => SNIFFED_SERVICE,
        };
        all[self.family]
    }

    /// Returns the client program's arguments; `n` distinguishes the paths of one pod.
    fn arguments(&self, n: u16) -> Value {
        let declared = usize::from(!self.is_declared);
        if self.kind == "http" {
            return json!({"target": self.target(), "port": HTTP_PORTS[declared], "run": self.name(), "control": SERVER[0],
                          "patience": wait_max_s()});
        }
        json!({"target": self.target(), "base": TCP_BASES[declared], "own": CLIENT[self.family], "fixed": FIXED_PORTS + 10 * n,
               "control": SERVER[0], "names": names(self.target()), "patience": wait_max_s(), "timed": is_timed()})
    }
}

/// Returns the maximum time of a single wait of a case, in seconds. Some cases end only when it
/// expires, so it is short in the gate.
fn wait_max_s() -> u32 {
    WAIT_MAX_S * slack()
}

/// Returns the names of addresses in observations. A client's Service address counts as the
/// server's.
fn names(target: &str) -> Value {
    let known = CLIENT
        .map(|ip| (ip, "client"))
        .into_iter()
        .chain(SERVER.map(|ip| (ip, "server")))
        .chain([(target, "server")]);
    Value::Object(
        known
            .map(|(ip, name)| (ip.to_owned(), name.into()))
            .collect(),
    )
}

fn program(kind: &str) -> String {
    root()
        .join(format!("tests/e2e/programs/{kind}_cases.py"))
        .display()
        .to_string()
}

fn tenant(is_meshed: bool) -> &'static str {
    if is_meshed { "mesh" } else { "plain" }
}

/// Starts both servers in both tenants, and waits until they listen.
pub(crate) fn start_servers(mesh: &Mesh) -> Vec<Child> {
    let mut servers = Vec::new();
    for (is_meshed, kind) in [
        (true, "tcp"),
        (true, "http"),
        (false, "tcp"),
        (false, "http"),
    ] {
        let host = format!("{}/default/server-0", tenant(is_meshed));
        let mut child = mesh.spawn(
            &host,
            &[
                "python3",
                "-B",
                &program(kind),
                "server",
                &names(SERVER[0]).to_string(),
                &wait_max_s().to_string(),
            ],
        );
        let mut line = String::new();
        let out = child
            .stdout
            .as_mut()
            .expect("the server was started with pipes");
        BufReader::new(out)
            .read_line(&mut line)
            .expect("the server reports that it serves");
        assert_eq!(
            line.trim(),
            "serving",
            "{host}: the {kind} cases' server did not start: {:?}",
            child.wait()
        );
        servers.push(child);
    }
    servers
}

/// Ends a server that was started with [`start_servers`].
pub(crate) fn stop(mut server: Child) {
    let _ = server.kill();
    let _ = server.wait();
}

/// Returns the paths of each client, which it runs one after another while other clients run
/// theirs.
fn tours() -> Vec<Vec<ClientPath>> {
    let mut tours = Vec::new();
    for kind in ["tcp", "http"] {
        let path = |is_meshed, is_declared, is_service, family| ClientPath {
            kind,
            is_meshed,
            is_declared,
            is_service,
            family,
        };
        for declared in [true, false] {
            tours.push(
                [(false, 0), (false, 1), (true, 0), (true, 1)]
                    .map(|(service, family)| path(true, declared, service, family))
                    .into(),
            );
        }
        tours.push([0, 1].map(|family| path(false, true, false, family)).into());
    }
    tours
}

/// Runs every case over every path.
pub(crate) fn observe_all(mesh: &Mesh) -> Vec<CaseObservation> {
    let walk = |tour: Vec<ClientPath>, first: u16| -> Vec<CaseObservation> {
        tour.iter()
            .zip(first..)
            .flat_map(|(path, n)| observe(mesh, path, n))
            .collect()
    };
    std::thread::scope(|scope| {
        let tours = tours().into_iter().zip((0..).step_by(10));
        let walking: Vec<_> = tours
            .map(|(tour, first)| scope.spawn(move || walk(tour, first)))
            .collect();
        walking
            .into_iter()
            .flat_map(|walker| walker.join().expect("a client's thread does not panic"))
            .collect()
    })
}

fn observe(mesh: &Mesh, path: &ClientPath, n: u16) -> Vec<CaseObservation> {
    let host = format!("{}/default/client-0", tenant(path.is_meshed));
    let output = mesh.run(
        &host,
        &[
            "python3",
            "-B",
            &program(path.kind),
            "client",
            &path.arguments(n).to_string(),
        ],
    );
    let json = output.json();
    let cases = json.as_object().unwrap_or_else(|| panic!("{output:?}"));
    let observation = |(case, text): (&String, &Value)| CaseObservation {
        case: format!("{}:{case}", path.kind),
        path: path.name(),
        is_meshed: path.is_meshed,
        text: text.as_str().unwrap_or_default().to_owned(),
    };
    cases.iter().map(observation).collect()
}
