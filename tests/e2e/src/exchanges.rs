//! Exchanges with an application that closes an idle connection, or responds before it has read the
//! request: through the mesh, without a mesh and through other proxies, in one world. It counts the
//! clients' outcomes and asserts nothing.

use std::io::{BufRead, BufReader};
use std::process::Child;
use std::time::Duration;

use canal_timing::deadline;
use serde_json::Value;

use crate::{Mesh, root};

/// POSTs per call of the program; a client in a pod has three minutes.
pub const BATCH: u64 = 300;
/// Address of the application, for clients inside and outside the mesh.
const SERVICE: &str = "10.101.0.10";
const SERVER: &str = "10.1.2.2";
const PORT: &str = "8080";
/// Port of another proxy in the unmeshed client's pod.
const PROXY_PORT: &str = "8090";
/// Other proxies that are measured if this machine has them.
const PROXIES: [&str; 3] = ["nginx", "haproxy", "envoy"];
/// Maximum time that a client of the program waits for a response. It only has to exceed what a
/// quiet machine needs: in the gate, `deadline` waits a minute or more.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Parts into which the uploads of one client are divided. Each is one call of the program, for
/// which a client in a pod has three minutes.
const UPLOAD_BATCHES: u64 = 10;

/// The world of these exchanges: a meshed and an unmeshed tenant with the same pods.
pub struct ExchangeWorld {
    pub mesh: Mesh,
}

/// Connections on which the client of a race sends its POSTs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RaceClient {
    /// Each on a connection of its own.
    NewConnections,
    /// All on one connection, as long as it is open.
    KeptConnection,
}

impl RaceClient {
    fn word(self) -> &'static str {
        match self {
            Self::NewConnections => "new",
            Self::KeptConnection => "kept",
        }
    }
}

/// Outcomes of POSTs that were sent at about the time when the application closes the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RaceCounts {
    pub failed: u64,
    /// Failed POSTs whose first byte arrived after the close.
    pub failed_after_close: u64,
    /// POSTs that the application read twice.
    pub twice: u64,
    /// POSTs that got a response although the application did not read them.
    pub lost: u64,
    /// POSTs that met a close.
    pub closes: u64,
}

/// Uploads that got no response from an application that refuses them without reading them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UploadFailures {
    pub meshed: u64,
    pub unmeshed: u64,
}

/// A serving process of the program in a pod. Dropping it ends the process.
struct PodServer(Child);

fn pod(is_meshed: bool, name: &str) -> String {
    format!(
        "{}/default/{name}-0",
        if is_meshed { "mesh" } else { "plain" }
    )
}

/// Runs `work` with the command line of the program.
fn with_command<T>(words: &[&str], work: impl FnOnce(&[&str]) -> T) -> T {
    let program = root()
        .join("tests/e2e/programs/exchanges.py")
        .display()
        .to_string();
    let timeout = deadline(EXCHANGE_TIMEOUT).as_secs().to_string();
    work(&[&["python3", "-B", &program, &timeout][..], words].concat())
}

/// Returns the sum of a figure over all batches.
fn sum(batches: &[Value], figure: &str) -> u64 {
    batches
        .iter()
        .map(|batch| {
            batch[figure]
                .as_u64()
                .unwrap_or_else(|| panic!("{figure}: {batch}"))
        })
        .sum()
}

impl PodServer {
    /// Waits until it serves. Returns `None` if it ended.
    fn start(mesh: &Mesh, pod: &str, words: &[&str]) -> Option<Self> {
        let mut server = Self(with_command(words, |argv| mesh.spawn(pod, argv)));
        let out = server.0.stdout.as_mut().expect("it was started with pipes");
        let mut line = String::new();
        BufReader::new(out)
            .read_line(&mut line)
            .expect("it reports whether it serves");
        (line.trim() == "serving").then_some(server)
    }
}

impl Drop for PodServer {
    fn drop(&mut self) {
        // `timeout`, under which every client of a mesh runs, forwards the signal.
        let _ = rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.0),
            rustix::process::Signal::TERM,
        );
        let _ = self.0.wait();
    }
}

impl ExchangeWorld {
    pub fn up(name: &str) -> Self {
        Self {
            mesh: Mesh::up("cases.yaml", name),
        }
    }

    /// Runs the program's client against its own application.
    fn run(&self, is_meshed: bool, words: &[&str]) -> Value {
        let _application = PodServer::start(&self.mesh, &pod(is_meshed, "server"), &["serve"])
            .expect("the application serves");
        let output = with_command(words, |argv| self.mesh.run(&pod(is_meshed, "client"), argv));
        // It describes each POST that failed.
        eprint!("{}", output.stderr);
        output.json()
    }

    fn race_at(
        &self,
        is_meshed: bool,
        client: RaceClient,
        (host, port): (&str, &str),
        tries: u64,
    ) -> RaceCounts {
        let batch = BATCH.to_string();
        let words = ["race", client.word(), host, port, &batch];
        let batches: Vec<Value> = (0..tries / BATCH)
            .map(|_| self.run(is_meshed, &words))
            .collect();
        RaceCounts {
            failed: sum(&batches, "failed"),
            failed_after_close: sum(&batches, "failed_after_close"),
            twice: sum(&batches, "twice"),
            lost: sum(&batches, "lost"),
            closes: sum(&batches, "closes"),
        }
    }

    /// Sends POSTs through the mesh at about the time when the application closes.
    pub fn race(&self, client: RaceClient, tries: u64) -> RaceCounts {
        self.race_at(true, client, (SERVICE, PORT), tries)
    }

    /// Returns how many requests the gateways have sent again because the application had not got
    /// them.
    pub fn sent_again(&self) -> u64 {
        self.mesh.counted_at(
            "gateway",
            "canal_gateway_retries_total",
            &["reason=\"upstream_undelivered\""],
        )
    }

    /// Sends as many POSTs through each other proxy of this machine.
    pub fn race_beside(&self, client: RaceClient, tries: u64) -> Vec<(&'static str, RaceCounts)> {
        let mut counts = Vec::new();
        for name in PROXIES {
            let Some(_proxy) = PodServer::start(
                &self.mesh,
                &pod(false, "client"),
                &["proxy", name, PROXY_PORT, SERVER],
            ) else {
                println!("SKIPPED: exchanges, {name}: this machine has none");
                continue;
            };
            let beside = self.race_at(false, client, ("127.0.0.1", PROXY_PORT), tries);
            println!(
                "{name}: {} of {tries} POSTs failed, {} read twice",
                beside.failed, beside.twice
            );
            counts.push((name, beside));
        }
        counts
    }

    /// Uploads bodies with `client`, `curl` or `python`, that the application refuses before it has
    /// read them.
    pub fn uploads(&self, client: &str, tries: u64) -> UploadFailures {
        let batch = (tries / UPLOAD_BATCHES).to_string();
        let failed = |is_meshed, host| {
            let batches: Vec<Value> = (0..UPLOAD_BATCHES)
                .map(|_| self.run(is_meshed, &["upload", client, host, PORT, &batch]))
                .collect();
            sum(&batches, "failed")
        };
        UploadFailures {
            meshed: failed(true, SERVICE),
            unmeshed: failed(false, SERVER),
        }
    }

    /// Uploads a body through the mesh that the application answers before its end, and returns the
    /// program's report.
    pub fn early_answer(&self) -> Value {
        self.run(true, &["early", SERVICE, PORT])
    }
}

/// Returns the smallest number of POSTs that failed through another proxy that sent none twice;
/// `None` if there is no such proxy.
pub fn least_failed(beside: &[(&'static str, RaceCounts)]) -> Option<u64> {
    beside
        .iter()
        .filter(|(_, counts)| counts.twice == 0)
        .map(|(_, counts)| counts.failed)
        .min()
}
