//! Sessions that the servers under the replicas must track, counted by session tables: with
//! aggregation (edge → replica and back in tunnels with few source ports), and without, where each
//! flow has a source port as RFC 7348 recommends. All client sessions are open at once.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use canal_offload::sessions::SessionTable;
use serde_json::{Value, json};

use crate::record::FigureFile;
use crate::scene::{TierBenchWorld, machine_us, number, programs};

/// Time for which all sessions stay after the last was opened. It is longer than the pause between
/// two messages of a session, so that each sends one.
const SESSIONS_HELD: Duration = Duration::from_secs(40);
/// Pause between two messages of a session.
/// Less than [`SESSIONS_HELD`], so that each session sends one message while all are open. The number
/// was chosen.
const PAUSE_MS: &str = "30000";
/// A session without a response for this long is broken. Both ends of all sessions run on this one
/// machine, which may be late for seconds.
const RESPONSE_TIMEOUT_MS: &str = "30000";

/// Number and rate of the sessions.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SessionLoad {
    /// Sessions that clients hold
    #[arg(long, default_value_t = 100_000)]
    count: u32,
    /// Sessions opened per second
    #[arg(long, default_value_t = 800)]
    open_rate: u32,
}

/// Measurements while all sessions were open, and after.
#[derive(Default)]
struct SessionCounts {
    at_once: u64,
    replicas: usize,
    outer: u64,
    inner: u64,
    /// Outer and inner sessions of the replica with the most.
    most: (u64, u64),
    scans: SocketSampler,
    resident: u64,
    opened_sessions: f64,
    open_at_end: f64,
    broken: f64,
    unopened: f64,
    spent_us: f64,
    took: Duration,
}

/// Session scans of all replicas.
#[derive(Default)]
struct SocketSampler {
    ok: f64,
    not: f64,
    us: f64,
}

pub(crate) fn run(size: &SessionLoad, record: &FigureFile) -> anyhow::Result<()> {
    println!(
        "| tunnels | client sessions open at once | broken, not opened | sessions at the underlay, all replicas | the replica with most | inside them | machine's CPU per session, opened and held |"
    );
    println!("|---|---|---|---|---|---|---|");
    let (mut notes, mut figures) = (Vec::new(), json!({ "count": size.count }));
    for (name, edge, gateway) in [
        ("aggregated", None, &[][..]),
        ("one_per_flow", Some("--no-aggregate"), &["--tunnels", "0"]),
    ] {
        let seen = measure(size, edge, gateway)?;
        println!(
            "| {} | {} (held to the end {}) | {}, {} | {} | {} | {} ({}) | {:.0} µs |",
            name.replace('_', " "),
            seen.at_once,
            seen.open_at_end,
            seen.broken,
            seen.unopened,
            seen.outer,
            seen.most.0,
            seen.inner,
            seen.most.1,
            seen.spent_us / seen.opened_sessions
        );
        figures[name] = json!({
            "at_once": seen.at_once, "broken": seen.broken, "unopened": seen.unopened, "replicas": seen.replicas,
            "underlay": seen.outer, "underlay_most": seen.most.0, "inside": seen.inner,
        });
        let SocketSampler { ok, not, us } = seen.scans;
        notes.push(format!(
            "{name}: {:.0} s; looks of all replicas: {ok} whole, {not} not, {:.2} ms each; gateways' memory {} KiB per session",
            seen.took.as_secs_f64(),
            us / (ok + not).max(1.0) / 1e3,
            seen.resident / 1024 / u64::from(size.count)
        ));
    }
    notes.iter().for_each(|note| println!("{note}"));
    record.put("sessions", figures)
}

fn measure(
    size: &SessionLoad,
    edge: Option<&str>,
    gateway: &[&str],
) -> anyhow::Result<SessionCounts> {
    let scene = sessions_world(edge, gateway)?;
    let names: Vec<String> = scene
        .world
        .hosts()?
        .into_iter()
        .map(|host| host.environment.name)
        .collect();
    let of = |part: &str| {
        names
            .iter()
            .filter(|n| n.starts_with(part))
            .cloned()
            .collect::<Vec<_>>()
    };
    let (clients, gateways) = (of("many/default/client-"), of("gw-"));
    let targets = addresses(&scene, &clients[0])?;
    // These sessions end before the measurement begins: neither their table entries nor their CPU
    // time are counted.
    scene.sample(
        &clients[0],
        &[
            &["sessions"],
            &*targets.iter().map(String::as_str).collect::<Vec<_>>(),
            // A second of 40 sessions opens the tunnels and resolves the neighbours.
            &["-n", "40", "-d", "1"],
        ]
        .concat(),
    )?;
    let tables: Vec<SessionTable> = gateways
        .iter()
        .map(|gateway| attach(&scene, gateway))
        .collect::<anyhow::Result<_>>()?;
    let (before, started) = (machine_us()?, Instant::now());
    // Sessions open at a steady rate, so this is how long opening takes.
    let opening = Duration::from_secs_f64(f64::from(size.count) / f64::from(size.open_rate));
    let running = clients.iter().enumerate().map(|(n, client)| {
        hold(
            &scene,
            client,
            &targets,
            share(size, clients.len(), n),
            opening,
        )
    });
    let running = running.collect::<anyhow::Result<Vec<_>>>()?;
    // All sessions are open, and most of their time is still to come.
    std::thread::sleep((opening + SESSIONS_HELD / 4).saturating_sub(started.elapsed()));
    let mut seen = SessionCounts {
        at_once: open_now(&scene, &clients)?,
        replicas: gateways.len(),
        ..SessionCounts::default()
    };
    for child in running {
        seen.add_client(child)?;
    }
    (seen.spent_us, seen.took) = (machine_us()? - before, started.elapsed());
    for (table, gateway) in tables.iter().zip(&gateways) {
        seen.add_gateway(&scene, gateway, table)?;
    }
    Ok(seen)
}

/// Brings up the world of the measurement, with these arguments of the edges and of the gateways.
fn sessions_world(edge: Option<&str>, gateway: &[&str]) -> anyhow::Result<TierBenchWorld> {
    TierBenchWorld::up("sessions.yaml", |topology, _| {
        topology
            .edges
            .iter_mut()
            .filter_map(|e| e.process.as_mut())
            .for_each(|p| p.args.extend(edge.map(String::from)));
        let limits = [
            "--max-tenant-connections",
            "1000000",
            "--max-requests",
            "1000000",
            "--max-tenant-requests",
            "1000000",
        ];
        let args = || limits.iter().chain(gateway).map(ToString::to_string);
        topology
            .gateways
            .iter_mut()
            .filter_map(|g| g.process.as_mut())
            .for_each(|p| p.args.extend(args()));
    })
}

impl SessionCounts {
    /// Waits for a client's end, and adds what it reports.
    fn add_client(&mut self, child: Child) -> anyhow::Result<()> {
        let out = child.wait_with_output()?;
        let report: Value = serde_json::from_slice(&out.stdout)
            .with_context(|| String::from_utf8_lossy(&out.stdout).into_owned())?;
        self.opened_sessions += number(&report, "opened")?;
        self.open_at_end += number(&report, "held")?;
        self.broken += number(&report, "broken")?;
        self.unopened += number(&report, "unopened")?;
        if report["ok"] != true {
            eprintln!("{report}");
        }
        Ok(())
    }

    /// Adds what a gateway's table and its metrics say.
    fn add_gateway(
        &mut self,
        scene: &TierBenchWorld,
        gateway: &str,
        table: &SessionTable,
    ) -> anyhow::Result<()> {
        let (outer, inner) = table.sessions()?;
        (self.outer, self.inner, self.most) = (
            self.outer + outer,
            self.inner + inner,
            self.most.max((outer, inner)),
        );
        let metrics = scene.run(gateway, &["curl", "-sS", "http://127.0.0.1:15020/metrics"])?;
        self.scans.ok += sum(
            &metrics,
            "canal_redirector_session_scans_total{result=\"ok\"}",
        );
        let results = ["late", "failed"]
            .map(|result| format!("canal_redirector_session_scans_total{{result=\"{result}\"}}"));
        self.scans.not += results
            .iter()
            .map(|series| sum(&metrics, series))
            .sum::<f64>();
        self.scans.us += sum(&metrics, "canal_redirector_session_scan_seconds_total") * 1e6;
        self.resident += scene.resident(gateway)?;
        Ok(())
    }
}

/// Returns the client's part of all sessions.
fn share(size: &SessionLoad, clients: usize, n: usize) -> (u32, f64) {
    let (clients, n) = (clients as u32, n as u32);
    (
        size.count / clients + u32::from(n < size.count % clients),
        f64::from(size.open_rate) / f64::from(clients),
    )
}

/// Starts a client that opens its sessions and holds them.
fn hold(
    scene: &TierBenchWorld,
    client: &str,
    targets: &[String],
    (count, rate): (u32, f64),
    opening: Duration,
) -> anyhow::Result<Child> {
    let samples = programs()?
        .join("canal-samples")
        .to_string_lossy()
        .into_owned();
    let (count, rate, seconds) = (
        count.to_string(),
        rate.to_string(),
        (opening + SESSIONS_HELD).as_secs().to_string(),
    );
    let mut argv = vec![samples.as_str(), "sessions"];
    argv.extend(targets.iter().map(String::as_str));
    argv.extend([
        "-n",
        &count,
        "--open-rate",
        &rate,
        "--interval-ms",
        PAUSE_MS,
        "--patience-ms",
        RESPONSE_TIMEOUT_MS,
        "-d",
        &seconds,
    ]);
    Ok(scene
        .world
        .exec(client, &argv)?
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?)
}

/// Returns the number of TCP sockets in use in the clients' network namespaces, which contain
/// nothing else.
fn open_now(scene: &TierBenchWorld, clients: &[String]) -> anyhow::Result<u64> {
    let mut open = 0;
    for client in clients {
        let output = scene.run(
            client,
            &["cat", "/proc/net/sockstat", "/proc/net/sockstat6"],
        )?;
        open += output
            .lines()
            .filter_map(|l| {
                l.strip_prefix("TCP: inuse ")
                    .or(l.strip_prefix("TCP6: inuse "))
            })
            .filter_map(first)
            .sum::<u64>();
    }
    Ok(open)
}

fn first(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

/// Sums all series whose name and labels have this prefix.
fn sum(metrics: &str, series: &str) -> f64 {
    metrics
        .lines()
        .filter(|l| l.starts_with(series))
        .filter_map(|l| l.rsplit_once(' ')?.1.parse::<f64>().ok())
        .sum()
}

/// Counts at the router's end of the replica's link, where the server's NIC would count.
fn attach(scene: &TierBenchWorld, gateway: &str) -> anyhow::Result<SessionTable> {
    let host = scene
        .plan
        .host(gateway)
        .with_context(|| format!("{gateway} is in the plan"))?;
    let router = &scene.plan.routers[host.az];
    let device = host.router_device();
    Ok(SessionTable::attach(
        Some(&std::path::Path::new("/run/netns").join(&router.netns)),
        &device,
    )?)
}

/// Returns the service's gateway addresses of both families from DNS.
fn addresses(scene: &TierBenchWorld, client: &str) -> anyhow::Result<Vec<String>> {
    let output = scene.run(client, &["getent", "ahosts", "tcp.default"])?;
    let mut found: Vec<&str> = output
        .lines()
        .filter(|l| l.contains("STREAM"))
        .filter_map(|l| l.split_whitespace().next())
        .collect();
    found.sort_unstable();
    found.dedup();
    anyhow::ensure!(
        !found.is_empty(),
        "tcp.default has no address in {client}: {output}"
    );
    Ok(found
        .iter()
        .map(|a| {
            if a.contains(':') {
                format!("[{a}]:7000")
            } else {
                format!("{a}:7000")
            }
        })
        .collect())
}
