//! The bench's world: brings it up, runs clients in its pods. It measures nothing.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use canal_world::{Options, Plan, Topology, World};

/// All of it must serve within this time.
const UP_WITHIN: Duration = Duration::from_secs(60);

pub(crate) struct Scene {
    pub(crate) world: World,
    pub(crate) plan: Plan,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf()
}

/// Where this program and the others are.
pub(crate) fn programs() -> anyhow::Result<PathBuf> {
    Ok(std::env::current_exe()?.parent().context("a program has a folder")?.to_path_buf())
}

impl Scene {
    /// Brings the world of a file of this folder up, with the topology changed by `change`; it goes when this value goes, however the process ends.
    pub(crate) fn up(file: &str, change: impl FnOnce(&mut Topology, &Plan)) -> anyhow::Result<Self> {
        let mut topology = Topology::load(folder().join(file)).map_err(|problems| anyhow::anyhow!("{file}: {problems:?}"))?;
        let plan = Plan::of(&topology);
        change(&mut topology, &plan);
        let bin = programs()?;
        let options = Options { ephemeral: true, replace: true, bin_dirs: vec![bin], ..Options::default() };
        let world = World::up(&topology, &options)?;
        world.wait_ready(UP_WITHIN)?;
        Ok(Self { world, plan })
    }

    /// Runs a client to its end; its standard output, whatever its exit code.
    pub(crate) fn run(&self, host: &str, argv: &[&str]) -> anyhow::Result<String> {
        let out = self.world.exec(host, argv)?.stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        if said.is_empty() && !out.status.success() {
            bail!("{host}: {}: {}", argv.join(" "), String::from_utf8_lossy(&out.stderr));
        }
        Ok(said)
    }

    /// Runs `canal-samples`; its report.
    pub(crate) fn sample(&self, host: &str, argv: &[&str]) -> anyhow::Result<serde_json::Value> {
        let all: Vec<&str> = ["canal-samples"].into_iter().chain(argv.iter().copied()).collect();
        let said = self.run(host, &all)?;
        serde_json::from_str(&said).with_context(|| format!("{host}: {} said {said}", all.join(" ")))
    }

    /// Waits until the URL answers from that pod.
    pub(crate) fn until_served(&self, host: &str, url: &str) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            let said = self.run(host, &["curl", "-sS", "--max-time", "2", "-o", "/dev/null", "-w", "%{http_code}", url]);
            match said {
                Ok(code) if code.trim() == "200" => return Ok(()),
                said if started.elapsed() > UP_WITHIN => bail!("{url} does not answer in {host}: {said:?}"),
                _ => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    /// Memory that a host's own process has in RAM, bytes.
    pub(crate) fn resident(&self, host: &str) -> anyhow::Result<u64> {
        let pid = self.world.host(host)?.pulse.pid.with_context(|| format!("{host} runs nothing"))?;
        let file = format!("/proc/{pid}/status");
        let status = std::fs::read_to_string(&file).context(file)?;
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kib << 10)
    }

    /// CPU that a host's processes used, µs.
    pub(crate) fn cpu_us(&self, host: &str) -> anyhow::Result<f64> {
        let cpu = self.world.cpu(host)?;
        Ok((cpu.user + cpu.system).as_secs_f64() * 1e6)
    }
}

/// CPU that the whole machine used, µs: everything but idle and waiting.
pub(crate) fn machine_us() -> anyhow::Result<f64> {
    let text = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
    let line = text.lines().next().context("/proc/stat is empty")?;
    let ticks: Vec<u64> = line.split_whitespace().skip(1).filter_map(|n| n.parse().ok()).collect();
    let busy: u64 = ticks.iter().enumerate().filter(|(at, _)| !matches!(at, 3 | 4)).take(6).map(|(_, n)| n).sum();
    // USER_HZ is 100 wherever Linux runs.
    Ok(busy as f64 * 1e4)
}

/// A number of a report.
pub(crate) fn number(report: &serde_json::Value, field: &str) -> anyhow::Result<f64> {
    report[field].as_f64().with_context(|| format!("{field} is missing: {report}"))
}
