//! Cost of the direct path: CPU of both nodes' proxies per request on persistent connections,
//! compared with a pair of HAProxy that uses mTLS; and bulk throughput compared with no mesh. All
//! run in one world and in turns. HAProxy runs in the namespaces of the pods, as the node proxy
//! does, and in the cgroups of their nodes.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};
use canal_bench_tier::record::FigureFile;
use canal_bench_tier::scene::{TierBenchWorld, number};
use canal_bench_tier::spread::RoundSpread;
use serde_json::{Value, json};

use crate::bars::{Bar, Bound};

/// Duration and size of the loads.
#[derive(clap::Args)]
pub(crate) struct DirectSize {
    /// Connections of the client, each with one request at a time
    // Nobody measured other numbers.
    #[arg(long, default_value_t = 64)]
    connections: u32,
    /// Requests per second of the load at a stated rate
    // Below the maximum of each path, so that no queue grows.
    #[arg(long, default_value_t = 5_000)]
    rate: u32,
    /// Rounds, in each of which every path has each load once
    // The median of five is little moved by one round in which the machine was busy.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Seconds of each load
    #[arg(long, default_value_t = 4)]
    seconds: u32,
    /// Bytes of each answer of the bulk load
    // Large enough that the head and the start of the connection do not matter.
    #[arg(long, default_value_t = 16 << 20)]
    bulk_bytes: u64,
}

/// Maximum CPU relative to a pair of HAProxy, and minimum bulk rate relative to no mesh.
/// Both are the targets of docs/performance.md.
const CPU_MAX: f64 = 0.85;
/// A third of the rate without a mesh, which encrypts nothing.
const BULK_MIN: f64 = 1.0 / 3.0;

/// Ports on which HAProxy listens in the client's pod: for the pair that parses HTTP (with HTTP/2
/// between its proxies), and for the pair that forwards bytes.
const HTTP_PORT: u16 = 8091;
const TCP_PORT: u16 = 8092;
/// Ports on which it listens in the server's pod, for each pair.
const HTTP_TLS_PORT: u16 = 8443;
const TCP_TLS_PORT: u16 = 8444;

/// One path from a client to a server.
struct BenchPath {
    name: &'static str,
    client: &'static str,
    url: String,
    /// Nodes whose processes forward it.
    nodes: [&'static str; 2],
}

const MESH: [&str; 2] = ["mesh-n1", "mesh-n2"];
const PLAIN: [&str; 2] = ["plain-n1", "plain-n2"];

pub(crate) fn run(size: &DirectSize, record: &FigureFile) -> anyhow::Result<Vec<Bar>> {
    let dir = tempfile::tempdir()?;
    certificates(dir.path())?;
    let scene = TierBenchWorld::up("direct.yaml", |_, _| {})?;
    let server = scene
        .world
        .host("plain/default/web-0")?
        .ip4()
        .context("the server has no address")?
        .to_string();
    let mut pair = ProxyPair::start(&scene, dir.path(), &server)?;
    let outcome = compare(&scene, &paths(&server), size, record);
    pair.stop();
    outcome
}

/// Returns the paths. The requests of the first four are compared; bulk is compared with the last.
fn paths(server: &str) -> [BenchPath; 5] {
    let plain = |name, port: u16, host: &str| BenchPath {
        name,
        client: "plain/default/client-0",
        url: format!("http://{host}:{port}"),
        nodes: PLAIN,
    };
    let mesh = |name, address| BenchPath {
        name,
        client: "mesh/default/client-0",
        url: format!("http://{address}:80"),
        nodes: MESH,
    };
    [
        mesh("direct", "10.101.0.10"),
        plain("HAProxy pair, mTLS, HTTP/2 between", HTTP_PORT, "127.0.0.1"),
        plain("HAProxy pair, mTLS, TCP mode", TCP_PORT, "127.0.0.1"),
        mesh("gateway between", "10.101.0.11"),
        plain("no mesh", 8080, server),
    ]
}

/// The two processes of HAProxy.
struct ProxyPair(Vec<Child>);

impl ProxyPair {
    fn start(scene: &TierBenchWorld, dir: &Path, server: &str) -> anyhow::Result<Self> {
        let head = "global\n  ssl-default-bind-options ssl-min-ver TLSv1.3\n  ssl-default-server-options ssl-min-ver TLSv1.3\ndefaults\n  \
                    timeout connect 2s\n  timeout client 60s\n  timeout server 60s\n";
        let files = dir.display();
        let near = format!(
            "{head}listen http\n  mode http\n  http-reuse always\n  bind 127.0.0.1:{HTTP_PORT}\n  server far {server}:{HTTP_TLS_PORT} ssl crt \
             {files}/peer.pem ca-file {files}/ca.pem verify required alpn h2\nlisten tcp\n  mode tcp\n  bind 127.0.0.1:{TCP_PORT}\n  server far \
             {server}:{TCP_TLS_PORT} ssl crt {files}/peer.pem ca-file {files}/ca.pem verify required\n"
        );
        let accept = format!("ssl crt {files}/peer.pem ca-file {files}/ca.pem verify required");
        let far = format!(
            "{head}listen http\n  mode http\n  http-reuse always\n  bind :{HTTP_TLS_PORT} {accept} alpn h2\n  server app 127.0.0.1:8080\nlisten tcp\n  \
             mode tcp\n  bind :{TCP_TLS_PORT} {accept}\n  server app 127.0.0.1:8080\n"
        );
        let mut pair = Self(Vec::new());
        for (name, node, pod, config) in [
            ("near", PLAIN[0], "plain/default/client-0", near),
            ("far", PLAIN[1], "plain/default/web-0", far),
        ] {
            let file = dir.join(format!("{name}.cfg"));
            std::fs::write(&file, config)?;
            let enter = format!(
                "--net={}",
                scene.world.host(pod)?.environment.netns.display()
            );
            let file = file.display().to_string();
            let child = scene
                .world
                .exec(
                    node,
                    &["nsenter", &enter, "haproxy", "-db", "-q", "-f", &file],
                )?
                .stdin(Stdio::null())
                .spawn();
            pair.0
                .push(child.context("haproxy; setup/install bench installs it")?);
        }
        Ok(pair)
    }

    /// Ends both; errors do not matter, because the world's end kills them in any case.
    fn stop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Writes one CA and one certificate that both ends present.
fn certificates(dir: &Path) -> anyhow::Result<()> {
    let script = "set -e; cd \"$1\"; new='openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'
$new -x509 -days 2 -subj /CN=bench-ca -keyout ca.key -out ca.pem
$new -subj /CN=bench-peer -keyout peer.key -out peer.csr
openssl x509 -req -days 2 -in peer.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out peer.crt
cat peer.crt peer.key > peer.pem";
    let out = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(dir)
        .output()?;
    if !out.status.success() {
        bail!(
            "openssl created no certificates: {}",
            String::from_utf8_lossy(&out.stderr)
        );
    }
    Ok(())
}

/// Result of one load on one path.
#[derive(Clone, Copy)]
struct PathFigures {
    per_second: f64,
    p50_ms: f64,
    /// CPU of both nodes' processes per request, in µs.
    nodes_us: f64,
}

fn measure(
    scene: &TierBenchWorld,
    bench_path: &BenchPath,
    argv: &[&str],
) -> anyhow::Result<PathFigures> {
    let spent = || -> anyhow::Result<f64> {
        Ok(scene.cpu_us(bench_path.nodes[0])? + scene.cpu_us(bench_path.nodes[1])?)
    };
    let before = spent()?;
    let report = scene.sample(bench_path.client, argv)?;
    let nodes = spent()? - before;
    let (succeeded, failed) = (number(&report, "succeeded")?, number(&report, "failed")?);
    if failed > 0.0 || succeeded == 0.0 {
        bail!("{}: {failed} requests failed: {report}", bench_path.name);
    }
    let p50_ms = report["latency_ms"]["p50"]
        .as_f64()
        .context("latency_ms.p50")?;
    Ok(PathFigures {
        per_second: number(&report, "rps")?,
        p50_ms,
        nodes_us: nodes / succeeded,
    })
}

fn compare(
    scene: &TierBenchWorld,
    paths: &[BenchPath; 5],
    size: &DirectSize,
    record: &FigureFile,
) -> anyhow::Result<Vec<Bar>> {
    let (connections, rate) = (size.connections, size.rate);
    // The first request may wait for identities, which must not count.
    for bench_path in paths {
        scene
            .until_served(bench_path.client, &format!("{}/health", bench_path.url))
            .with_context(|| bench_path.name)?;
    }
    let RoundFigures { fast, stated, bulk } = measure_rounds(scene, paths, size)?;
    table(
        &format!("{connections} connections, as fast as answered"),
        paths,
        &fast,
    );
    table(
        &format!("{connections} connections, {rate} requests per second"),
        paths,
        &stated,
    );
    print_bulk(paths, &bulk);
    let shown = |all: &[Vec<PathFigures>]| -> Value {
        let each = paths.iter().zip(all).map(|(bench_path, runs)| {
            let cpu = RoundSpread::of(runs.iter().map(|run| run.nodes_us));
            json!({ "path": bench_path.name, "nodes_us": cpu.median, "low": cpu.low, "high": cpu.high })
        });
        each.collect()
    };
    let rates: Vec<f64> = bulk
        .iter()
        .map(|rates| RoundSpread::of(rates.iter().copied()).median)
        .collect();
    record.put(
        "direct",
        json!({ "fast": shown(&fast), "stated": shown(&stated), "bulk_gbit": rates }),
    )?;
    let cpu = |runs: &[PathFigures]| RoundSpread::of(runs.iter().map(|run| run.nodes_us)).median;
    let beside = |at: usize| {
        Bar::new(
            format!("CPU of both nodes per request, direct / {}", paths[at].name),
            cpu(&fast[0]) / cpu(&fast[at]),
            Bound::AtMost(CPU_MAX),
        )
    };
    // Positions are those of `paths`: 0 is direct, 1 and 2 are the HAProxy pairs, 4 has no mesh.
    Ok(vec![
        beside(1),
        beside(2),
        Bar::new(
            "bulk, direct / no mesh",
            rates[0] / rates[4],
            Bound::AtLeast(BULK_MIN),
        ),
    ])
}

/// The figures of all rounds, by path.
struct RoundFigures {
    fast: Vec<Vec<PathFigures>>,
    stated: Vec<Vec<PathFigures>>,
    /// Gbit/s of large responses.
    bulk: Vec<Vec<f64>>,
}

/// Measures every path once per round, so that a slow moment of the machine meets all of them.
fn measure_rounds(
    scene: &TierBenchWorld,
    paths: &[BenchPath; 5],
    size: &DirectSize,
) -> anyhow::Result<RoundFigures> {
    let (connections, seconds, rate) = (
        size.connections.to_string(),
        size.seconds.to_string(),
        size.rate.to_string(),
    );
    let mut fast: Vec<Vec<PathFigures>> = vec![Vec::new(); paths.len()];
    let mut stated = fast.clone();
    let mut bulk: Vec<Vec<f64>> = vec![Vec::new(); paths.len()];
    for round in 1..=size.rounds {
        for (at, bench_path) in paths.iter().enumerate() {
            eprintln!("round {round}/{}: {}", size.rounds, bench_path.name);
            let small = format!("{}/blob?size=100", bench_path.url);
            let load = ["load", &small, "-c", &connections, "-d", &seconds];
            fast[at].push(measure(scene, bench_path, &load)?);
            stated[at].push(measure(
                scene,
                bench_path,
                &[&load[..], &["-r", &rate]].concat(),
            )?);
            let large = format!("{}/blob?size={}", bench_path.url, size.bulk_bytes);
            let answers = measure(
                scene,
                bench_path,
                &["load", &large, "-c", "4", "-d", &seconds],
            )?
            .per_second;
            bulk[at].push(answers * size.bulk_bytes as f64 * 8.0 / 1e9);
        }
    }
    Ok(RoundFigures { fast, stated, bulk })
}

/// Prints the rates of large responses, and their relation to those without a mesh.
fn print_bulk(paths: &[BenchPath; 5], bulk: &[Vec<f64>]) {
    println!(
        "| bulk, 4 connections | Gbit/s, median (lowest to highest) | of no mesh |\n|---|---|---|"
    );
    let open = RoundSpread::of(bulk[4].iter().copied());
    for (bench_path, rates) in paths.iter().zip(bulk) {
        let rate = RoundSpread::of(rates.iter().copied());
        println!(
            "| {} | {:.2} ({:.2} to {:.2}) | {:.2} |",
            bench_path.name,
            rate.median,
            rate.low,
            rate.high,
            rate.median / open.median
        );
    }
}

/// Prints the results. Ratios are to the first path, of medians; in a round both sides had the same
/// load one after the other.
fn table(load: &str, paths: &[BenchPath; 5], all: &[Vec<PathFigures>]) {
    println!(
        "| {load} | requests per second | p50 ms | CPU of both nodes per request, µs, median (lowest to highest) | direct / this |"
    );
    println!("|---|---|---|---|---|");
    let cpu = |runs: &[PathFigures]| RoundSpread::of(runs.iter().map(|run| run.nodes_us));
    let direct = cpu(&all[0]);
    // The last path has no process on its nodes.
    for (bench_path, runs) in paths.iter().zip(all).take(paths.len() - 1) {
        let (cpu, rate, p50) = (
            cpu(runs),
            RoundSpread::of(runs.iter().map(|r| r.per_second)),
            RoundSpread::of(runs.iter().map(|r| r.p50_ms)),
        );
        let ratio = direct.median / cpu.median;
        println!(
            "| {} | {:.0} | {:.3} | {:.1} ({:.1} to {:.1}) | {ratio:.2} |",
            bench_path.name, rate.median, p50.median, cpu.median, cpu.low, cpu.high
        );
    }
}
