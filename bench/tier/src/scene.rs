//! The bench's world: brings it up, and runs clients in its pods. It measures nothing.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use canal_world::{Topology, World, WorldOptions, WorldPlan};

/// The whole world must serve within this time.
/// `canal up` waits as long by default.
const UP_WITHIN: Duration = Duration::from_secs(60);

pub struct TierBenchWorld {
    pub world: World,
    pub plan: WorldPlan,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf()
}

/// Returns the folder of this program and the others.
pub fn programs() -> anyhow::Result<PathBuf> {
    Ok(std::env::current_exe()?
        .parent()
        .context("a program has a folder")?
        .to_path_buf())
}

impl TierBenchWorld {
    /// Brings up the world of a file of this folder, with the topology changed by `change`. It is
    /// removed on drop, and however the process ends.
    pub fn up(file: &str, change: impl FnOnce(&mut Topology, &WorldPlan)) -> anyhow::Result<Self> {
        let mut topology = Topology::load(folder().join(file))
            .map_err(|problems| anyhow::anyhow!("{file}: {problems:?}"))?;
        let plan = WorldPlan::of(&topology);
        change(&mut topology, &plan);
        let bin = programs()?;
        let options = WorldOptions {
            ephemeral: true,
            replace: true,
            bin_dirs: vec![bin],
            ..WorldOptions::default()
        };
        let world = World::up(&topology, &options)?;
        world.wait_ready(UP_WITHIN)?;
        Ok(Self { world, plan })
    }

    /// Runs a client to its end. Returns its standard output, whatever its exit code.
    pub fn run(&self, host: &str, argv: &[&str]) -> anyhow::Result<String> {
        let out = self.world.exec(host, argv)?.stdin(Stdio::null()).output()?;
        let client_output = String::from_utf8_lossy(&out.stdout).into_owned();
        if client_output.is_empty() && !out.status.success() {
            bail!(
                "{host}: {}: {}",
                argv.join(" "),
                String::from_utf8_lossy(&out.stderr)
            );
        }
        Ok(client_output)
    }

    /// Runs `canal-samples` and returns its report.
    pub fn sample(&self, host: &str, argv: &[&str]) -> anyhow::Result<serde_json::Value> {
        let all: Vec<&str> = ["canal-samples"]
            .into_iter()
            .chain(argv.iter().copied())
            .collect();
        let client_output = self.run(host, &all)?;
        serde_json::from_str(&client_output)
            .with_context(|| format!("{host}: {} said {client_output}", all.join(" ")))
    }

    /// Waits until the URL responds from that pod.
    pub fn until_served(&self, host: &str, url: &str) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            let client_output = self.run(
                host,
                &[
                    "curl",
                    "-sS",
                    "--max-time",
                    "2",
                    "-o",
                    "/dev/null",
                    "-w",
                    "%{http_code}",
                    url,
                ],
            );
            match client_output {
                Ok(code) if code.trim() == "200" => return Ok(()),
                client_output if started.elapsed() > UP_WITHIN => {
                    bail!("{url} does not answer in {host}: {client_output:?}")
                }
                // Short beside `UP_WITHIN`.
                _ => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    /// Returns the URL of a small page of the service `web` with its gateway address, as DNS
    /// returns it in that pod: a client with a name would query DNS for each connection, which is
    /// not part of the measured path.
    pub fn web_url(&self, host: &str) -> anyhow::Result<String> {
        let started = Instant::now();
        loop {
            let client_output = self.run(host, &["getent", "ahostsv4", "web.default"]);
            match client_output
                .as_ref()
                .ok()
                .and_then(|client_output| client_output.split_whitespace().next())
            {
                Some(address) => return Ok(format!("http://{address}:80/blob?size=100")),
                None if started.elapsed() > UP_WITHIN => {
                    bail!("web.default has no address in {host}: {client_output:?}")
                }
                // Short beside `UP_WITHIN`.
                None => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    /// Returns the resident memory of a host's own process in bytes.
    pub fn resident(&self, host: &str) -> anyhow::Result<u64> {
        let pid = self
            .world
            .host(host)?
            .process
            .pid
            .with_context(|| format!("{host} runs nothing"))?;
        let file = format!("/proc/{pid}/status");
        let status = std::fs::read_to_string(&file).context(file)?;
        let line = status
            .lines()
            .find_map(|l| l.strip_prefix("VmRSS:"))
            .context("no VmRSS")?;
        let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kib << 10)
    }

    /// Returns the CPU time of both gateways of `world.yaml`.
    pub fn gateways_us(&self) -> anyhow::Result<f64> {
        Ok(self.cpu_us("gw-1")? + self.cpu_us("gw-2")?)
    }

    /// Returns the CPU time of a host's processes in µs.
    pub fn cpu_us(&self, host: &str) -> anyhow::Result<f64> {
        let cpu = self.world.cpu(host)?;
        Ok((cpu.user + cpu.system).as_secs_f64() * 1e6)
    }
}

/// Returns the CPU time of the whole machine in µs: everything but idle and waiting.
pub fn machine_us() -> anyhow::Result<f64> {
    let text = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
    let line = text.lines().next().context("/proc/stat is empty")?;
    let ticks: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .filter_map(|n| n.parse().ok())
        .collect();
    let busy: u64 = ticks
        .iter()
        .enumerate()
        .filter(|(at, _)| !matches!(at, 3 | 4))
        .take(6)
        .map(|(_, n)| n)
        .sum();
    // USER_HZ is 100 on every Linux.
    Ok(busy as f64 * 1e4)
}

/// Returns a number of a report.
pub fn number(report: &serde_json::Value, field: &str) -> anyhow::Result<f64> {
    report[field]
        .as_f64()
        .with_context(|| format!("{field} is missing: {report}"))
}
