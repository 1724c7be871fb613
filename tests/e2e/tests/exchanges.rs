//! Exchanges with an application that closes an idle connection, or responds before it has read the request. The test compares what a
//! client gets through the mesh, without a mesh and through other proxies, in one run. `make soak PART=exchanges` runs the full numbers,
//! `make test` counts through the mesh alone.

use std::io::{BufRead, BufReader};
use std::process::Child;
use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{Mesh, root};
use canal_timing::{deadline, is_timed, judge_losses, timed};
use serde_json::{Value, json};

/// POSTs per call of the program; a client in a pod has three minutes.
const BATCH: u64 = 300;
/// Address of the application, for clients inside and outside the mesh.
const SERVICE: &str = "10.101.0.10";
const SERVER: &str = "10.1.2.2";
const PORT: &str = "8080";
/// Port of another proxy in the unmeshed client's pod.
const PROXY_PORT: &str = "8090";

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| Mesh::up("cases.yaml", "e2e-exchanges"))
}

/// Returns the number to run: the full one, or the one for `make test` and `make test-timing`.
fn part(whole: u64, short: u64) -> u64 {
    if std::env::var_os("CANAL_SOAK").is_some() { whole } else { short }
}

fn pod(is_meshed: bool, name: &str) -> String {
    format!("{}/default/{name}-0", if is_meshed { "mesh" } else { "plain" })
}

/// How long a client of the program waits for a response.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs `work` with the command line of the program.
fn with_command<T>(words: &[&str], work: impl FnOnce(&[&str]) -> T) -> T {
    let (program, patience) = (program(), deadline(PATIENCE).as_secs().to_string());
    work(&[&["python3", "-B", &program, &patience][..], words].concat())
}

fn program() -> String {
    root().join("tests/e2e/programs/exchanges.py").display().to_string()
}

/// A serving process of the program in a pod. Dropping it ends the process.
struct PodServer(Child);

impl PodServer {
    /// Waits until it serves. Returns `None` if it ended.
    fn start(pod: &str, words: &[&str]) -> Option<Self> {
        let mut server = Self(with_command(words, |argv| mesh().spawn(pod, argv)));
        let out = server.0.stdout.as_mut().expect("it was started with pipes");
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line).expect("it says whether it serves");
        (line.trim() == "serving").then_some(server)
    }

    fn application(is_meshed: bool) -> Self {
        Self::start(&pod(is_meshed, "server"), &["serve"]).expect("the application serves")
    }
}

impl Drop for PodServer {
    fn drop(&mut self) {
        // `timeout`, under which every client of a mesh runs, forwards the signal.
        let _ = rustix::process::kill_process(rustix::process::Pid::from_child(&self.0), rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

/// Runs the program's client against its own application.
fn run(is_meshed: bool, words: &[&str]) -> Value {
    let _application = PodServer::application(is_meshed);
    with_command(words, |argv| mesh().run(&pod(is_meshed, "client"), argv)).json()
}

/// Returns the sum of a figure over all batches.
fn sum(batches: &[Value], figure: &str) -> u64 {
    batches.iter().map(|batch| batch[figure].as_u64().unwrap_or_else(|| panic!("{figure}: {batch}"))).sum()
}

/// Sends POSTs at about the time when the application closes.
fn race(is_meshed: bool, host: &str, port: &str, tries: u64) -> Vec<Value> {
    (0..tries / BATCH).map(|_| run(is_meshed, &["race", host, port, &BATCH.to_string()])).collect()
}

/// Returns the smallest number of POSTs that failed through another proxy that sent none twice; `tries` if there is none.
fn race_beside(tries: u64) -> u64 {
    let mut least = tries;
    for name in ["nginx", "haproxy", "envoy"] {
        let Some(_proxy) = PodServer::start(&pod(false, "client"), &["proxy", name, PROXY_PORT, SERVER]) else {
            println!("SKIPPED: exchanges, {name}: this machine has none");
            continue;
        };
        let beside = race(false, "127.0.0.1", PROXY_PORT, tries);
        println!("{name}: {} of {tries} POSTs failed, {} read twice", sum(&beside, "failed"), sum(&beside, "twice"));
        if sum(&beside, "twice") == 0 {
            least = least.min(sum(&beside, "failed"));
        }
    }
    least
}

/// A POST that arrives after the close is never lost, and one that was read is never read again. Of those that arrive at the same moment,
/// no more fail than through the best other proxy.
#[test]
fn posts_that_meet_a_close_are_answered_once() {
    let tries = part(3_000, BATCH);
    let canal = race(true, SERVICE, PORT, tries);
    let (failed, after) = (sum(&canal, "failed"), sum(&canal, "failed_after_close"));
    let (twice, lost, closes) = (sum(&canal, "twice"), sum(&canal, "lost"), sum(&canal, "closes"));
    let again = mesh().counted_at("gateway", "canal_gateway_retries_total", &["reason=\"upstream_undelivered\""]);
    println!(
        "canal: {failed} of {tries} POSTs failed, {after} of them after the close, {twice} read twice, {again} sent again, {closes} closes"
    );
    assert_eq!((after, twice, lost), (0, 0, 0), "{canal:?}\n{}", mesh().logs());
    timed!(closes > tries / 3 && again > 0, "a third of the POSTs meet a close, and some are sent again");
    if is_timed() {
        // With such a small number, one in a hundred more may be chance.
        judge_losses("POSTs that fail at a close, against the best other proxy", failed, race_beside(tries) + tries / 100);
    }
}

#[test]
fn answers_to_uploads_that_are_refused_unread_arrive() {
    let tries = part(1_000, 40);
    for client in ["curl", "python"] {
        let batch = (tries / 10).to_string();
        let of = |is_meshed, host| (0..10).map(|_| run(is_meshed, &["upload", client, host, PORT, &batch])).collect::<Vec<_>>();
        let (meshed, direct) = (sum(&of(true, SERVICE), "failed"), sum(&of(false, SERVER), "failed"));
        println!("{client}: of {tries} uploads refused unread, {meshed} failed by the mesh, {direct} without");
        judge_losses(
            &format!("uploads refused unread that get no answer, against those without a mesh, {client}"),
            meshed,
            direct + (tries / 50).max(1),
        );
    }
}

#[test]
fn an_answer_before_the_end_of_an_upload_does_not_cut_it() {
    for _ in 0..part(20, 2) {
        let early = run(true, &["early", SERVICE, PORT]);
        assert_eq!(early, json!({"cut": 0, "status": "200", "stored": 400_000}), "{}", mesh().logs());
    }
}
