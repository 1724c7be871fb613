//! Figure 24: the fraction of a request's time that the key server and the path through the gateway
//! take, for an application with a realistic response time. It measures a client's request through
//! the whole mesh, with existing sessions and with the first session of an identity, and the
//! application alone. It prints figures and does not assess them.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, ensure};
use canal_world::{Topology, World, WorldOptions};

use crate::figure_spread::FigureSpread;
use crate::limits;
use crate::scene::{AsymmetricMode, CertificateAlgorithm};

#[derive(clap::Args)]
pub(crate) struct ShareFlags {
    /// Number of worlds of each mode, in turn; each figure is their median
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// New clients, each with an identity of its own, for each world and time that the application
    /// takes
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u16).range(1..=64))]
    clients: u16,
    #[arg(long, value_enum, default_value_t = CertificateAlgorithm::Ecdsa)]
    algorithm: CertificateAlgorithm,
}

/// Response times of the application: zero, and the two modes of the paper's distribution (40 to 50
/// and 100 to 200 ms).
const RESPONSE_TIMES_MS: [u32; 3] = [0, 45, 150];
/// Requests of one client on one connection; the first is not counted.
/// More would only lengthen the run, which takes 150 ms for each at the slowest.
const REQUESTS: usize = 20;
/// Time within which the world serves; `canal up` waits as long by default.
const UP_WITHIN: Duration = Duration::from_secs(60);
/// Time after which every identity has a key; keys are generated one after the other.
/// Nobody measured this value.
const KEYS_WITHIN: Duration = Duration::from_secs(3);
const APP: &str = "keys/default/web-0";
const CLIENT: &str = "keys/default/client-0";
const SERVICE: &str = "http://10.101.0.10";

/// Durations of requests in milliseconds.
#[derive(Default)]
struct Times {
    alone: Vec<f64>,
    reused: Vec<f64>,
    /// First request of each identity.
    first: Vec<f64>,
}

pub(crate) fn run(flags: &ShareFlags) -> anyhow::Result<()> {
    println!("Processor: {}.", limits::processor());
    let mut all: [[Times; RESPONSE_TIMES_MS.len()]; 2] = Default::default();
    for round in 0..flags.rounds as usize {
        for at in [round % 2, (round + 1) % 2] {
            let mode = [AsymmetricMode::Local, AsymmetricMode::Remote][at];
            eprintln!("{}, round {} of {}", mode.name(), round + 1, flags.rounds);
            measure(flags, mode, &mut all[at]).with_context(|| mode.name())?;
        }
    }
    print(flags.algorithm, &all);
    Ok(())
}

fn measure(
    flags: &ShareFlags,
    mode: AsymmetricMode,
    times: &mut [Times; RESPONSE_TIMES_MS.len()],
) -> anyhow::Result<()> {
    let (world, _folder) = up(flags, mode)?;
    request(&world, CLIENT, SERVICE, 0, 1).context("the service is not reached")?;
    std::thread::sleep(KEYS_WITHIN);
    let mut newcomers = 1..;
    for (takes, times) in RESPONSE_TIMES_MS.into_iter().zip(times) {
        times
            .alone
            .extend(&request(&world, APP, "http://127.0.0.1:8080", takes, REQUESTS + 1)?[1..]);
        times
            .reused
            .extend(&request(&world, CLIENT, SERVICE, takes, REQUESTS + 1)?[1..]);
        for n in newcomers.by_ref().take(flags.clients.into()) {
            times.first.extend(request(
                &world,
                &format!("keys/default/client-{n}-0"),
                SERVICE,
                takes,
                1,
            )?);
        }
    }
    Ok(())
}

/// Brings up the world. Returns it with the folder of its files.
fn up(flags: &ShareFlags, mode: AsymmetricMode) -> anyhow::Result<(World, tempfile::TempDir)> {
    let folder = tempfile::tempdir()?;
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut text = std::fs::read_to_string(here.join("share.yaml"))?
        .replace(
            "PLACE",
            if mode == AsymmetricMode::Remote {
                "KeyServer"
            } else {
                "Local"
            },
        )
        .replace(
            "ALGORITHM",
            if flags.algorithm == CertificateAlgorithm::Rsa {
                "Rsa2048"
            } else {
                "EcdsaP256"
            },
        );
    // Each response time has its own clients, so that connections are not shared.
    for n in 1..=usize::from(flags.clients) * RESPONSE_TIMES_MS.len() {
        writeln!(
            text,
            "      - {{name: client-{n}, node: keys-n1, serviceAccount: client-{n}, command: [sleep, infinity]}}"
        )?;
    }
    let file = folder.path().join("share.yaml");
    std::fs::write(&file, text)?;
    std::fs::copy(
        here.join("services.yaml"),
        folder.path().join("services.yaml"),
    )?;
    let topology =
        Topology::load(&file).map_err(|problems| anyhow::anyhow!("share.yaml: {problems:?}"))?;
    let bin = std::env::current_exe()?
        .parent()
        .context("a program has a folder")?
        .to_path_buf();
    // `replace` removes the world of a run that was killed.
    let world = World::up(
        &topology,
        &WorldOptions {
            ephemeral: true,
            replace: true,
            bin_dirs: vec![bin],
            ..WorldOptions::default()
        },
    )?;
    world.wait_ready(UP_WITHIN)?;
    Ok((world, folder))
}

/// Sends `times` requests on one connection. Returns the milliseconds of each.
fn request(
    world: &World,
    host: &str,
    service: &str,
    takes: u32,
    times: usize,
) -> anyhow::Result<Vec<f64>> {
    let url = format!("{service}/delay?ms={takes}&n=[1-{times}]");
    let argv = [
        "curl",
        "-sS",
        "--fail",
        "--max-time",
        "10",
        "-o",
        "/dev/null",
        "-w",
        "%{time_total}\\n",
        &url,
    ];
    let out = world.exec(host, &argv)?.stdin(Stdio::null()).output()?;
    let client_output = String::from_utf8_lossy(&out.stdout);
    ensure!(
        out.status.success(),
        "{host}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    client_output
        .lines()
        .map(|line| Ok(line.parse::<f64>().with_context(|| line.to_string())? * 1e3))
        .collect()
}

fn print(algorithm: CertificateAlgorithm, [local, remote]: &[[Times; RESPONSE_TIMES_MS.len()]; 2]) {
    println!(
        "\nFig. 24, {}: ms of a request, medians (least–most). In the first request of an identity there is a new session in it from its node to the gateway.\n",
        algorithm.name()
    );
    println!(
        "| the application takes | alone | through the mesh | of it the path | first, local key | first, key server | of it the key server |\n|---|---|---|---|---|---|---|"
    );
    for (at, takes) in RESPONSE_TIMES_MS.into_iter().enumerate() {
        let both = |get: fn(&Times) -> &Vec<f64>| {
            FigureSpread::of(
                [get(&local[at]), get(&remote[at])]
                    .into_iter()
                    .flatten()
                    .copied()
                    .collect(),
            )
        };
        let (alone, reused) = (both(|t| &t.alone), both(|t| &t.reused));
        let (here, there) = (
            FigureSpread::of(local[at].first.clone()),
            FigureSpread::of(remote[at].first.clone()),
        );
        let part = |all: FigureSpread, less: FigureSpread| {
            let more = all.median - less.median;
            format!("{more:+.2} ms, {:+.1} %", 100.0 * more / all.median)
        };
        println!(
            "| {takes} ms | {alone:#.2} | {reused:#.2} | {} | {here:#.2} | {there:#.2} | {} |",
            part(reused, alone),
            part(there, here)
        );
    }
}
