//! A child process pinned to one core, its CPU time and memory from /proc. Dropping it kills the
//! process.

use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

/// Maximum time until a program listens: under valgrind it takes fifty times as long, and Envoy
/// with 10,000 clusters needs 10 s of CPU.
const START_MAX: Duration = Duration::from_secs(180);

/// A program that used at most one clock tick in this time is idle.
/// A tick is 10 ms, so that work beyond 3 % of a core counts as start-up work.
const SETTLE: Duration = Duration::from_millis(300);

/// Core of the proxy under test; load and origin share the other.
pub const PROXY_CORE: &str = "0";
pub const LOAD_CORE: &str = "1";

/// Pins the calling thread to the load's core.
pub fn pin_to_load() -> anyhow::Result<()> {
    let mut cores = rustix::thread::CpuSet::new();
    cores.set(LOAD_CORE.parse().context("the load's core")?);
    rustix::thread::sched_setaffinity(None, &cores).context("the load's core")
}

pub struct PinnedProcess {
    child: Child,
    /// Address on which the process listens.
    pub address: SocketAddr,
}

impl PinnedProcess {
    /// Starts `argv` on `core` and waits until `address` accepts.
    pub fn start(
        argv: &[&str],
        core: &str,
        address: SocketAddr,
        log: &Path,
    ) -> anyhow::Result<Self> {
        let out = std::fs::File::create(log)?;
        let child = Command::new("taskset")
            .args(["-c", core])
            .args(argv)
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .spawn()
            .with_context(|| format!("{}: is it installed?", argv[0]))?;
        let mut p = Self { child, address };
        let started = Instant::now();
        while TcpStream::connect(address).is_err() {
            if let Some(status) = p.child.try_wait()? {
                anyhow::bail!(
                    "{} ended with {status}; its output: {}",
                    argv[0],
                    std::fs::read_to_string(log).unwrap_or_default()
                );
            }
            anyhow::ensure!(
                started.elapsed() < START_MAX,
                "{} does not listen on {address} after {START_MAX:?}",
                argv[0]
            );
            // Short beside `START_MAX`.
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(p)
    }

    /// Returns user and system CPU time of the process so far in microseconds. `taskset` execs, so
    /// the pid is the proxy's.
    pub fn cpu_us(&self) -> anyhow::Result<(f64, f64)> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let rest = stat.rsplit(')').next().unwrap_or_default();
        let f: Vec<&str> = rest.split_whitespace().collect();
        let ticks = |n: usize| {
            f.get(n)
                .and_then(|v| v.parse::<f64>().ok())
                .context("/proc/PID/stat")
        };
        // Fields 14 and 15, in clock ticks of 10 ms: too coarse for the sum, good enough for its
        // parts.
        let (user, system) = (ticks(11)?, ticks(12)?);
        let (total, part) = (self.run_us()?, user / (user + system).max(1.0));
        Ok((total * part, total * (1.0 - part)))
    }

    /// Returns the CPU time that the scheduler has counted for its threads, in nanosecond
    /// resolution.
    fn run_us(&self) -> anyhow::Result<f64> {
        let mut sum = 0.0;
        for task in std::fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
            sum += text
                .split(' ')
                .next()
                .and_then(|v| v.parse::<f64>().ok())
                .context("/proc/PID/task/TID/schedstat")?;
        }
        Ok(sum / 1000.0)
    }

    /// Waits until the process has finished its start-up work.
    pub fn settle(&self) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            let before = self.cpu_us()?;
            std::thread::sleep(SETTLE);
            let after = self.cpu_us()?;
            if after.0 + after.1 - before.0 - before.1 <= 10_000.0 || started.elapsed() > START_MAX
            {
                return Ok(());
            }
        }
    }

    pub fn rss_mib(&self) -> anyhow::Result<f64> {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.child.id()))?;
        let pages: f64 = statm
            .split_whitespace()
            .nth(1)
            .and_then(|v| v.parse().ok())
            .context("/proc/PID/statm")?;
        Ok(pages * 4096.0 / 1048576.0)
    }

    /// Sends SIGTERM, and waits for the end of the process.
    pub fn end(mut self) -> anyhow::Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let status = self.child.wait()?;
        anyhow::ensure!(
            status.success(),
            "a program that got SIGTERM ended with {status}"
        );
        Ok(())
    }

    pub fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for PinnedProcess {
    fn drop(&mut self) {
        self.stop();
    }
}
