//! A child process pinned to one core, its CPU time and memory from /proc. Killed when dropped.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

/// The core of the proxy under test; load and origin share the other.
pub(crate) const PROXY_CORE: &str = "0";
pub(crate) const LOAD_CORE: &str = "1";

pub(crate) struct Process {
    child: Child,
    pub(crate) port: u16,
}

impl Process {
    /// Starts `argv` on `core` and waits until `port` accepts on loopback.
    pub(crate) fn start(argv: &[&str], core: &str, port: u16, log: &Path) -> anyhow::Result<Self> {
        let out = std::fs::File::create(log)?;
        let child = Command::new("taskset")
            .args(["-c", core])
            .args(argv)
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .spawn()
            .with_context(|| format!("{}: is it installed?", argv[0]))?;
        let mut p = Self { child, port };
        let started = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            if let Some(status) = p.child.try_wait()? {
                anyhow::bail!("{} ended with {status}; it said: {}", argv[0], std::fs::read_to_string(log).unwrap_or_default());
            }
            anyhow::ensure!(started.elapsed() < Duration::from_secs(20), "{} does not listen on {port} after 20 s", argv[0]);
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(p)
    }

    /// User and system CPU time of the process so far, microseconds. `taskset` execs, so the pid is the proxy's.
    pub(crate) fn cpu_us(&self) -> anyhow::Result<(f64, f64)> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let rest = stat.rsplit(')').next().unwrap_or_default();
        let f: Vec<&str> = rest.split_whitespace().collect();
        let ticks = |n: usize| f.get(n).and_then(|v| v.parse::<f64>().ok()).context("/proc/PID/stat");
        // Fields 14 and 15, in clock ticks of 10 ms (USER_HZ is 100 on every Linux ABI).
        Ok((ticks(11)? * 10_000.0, ticks(12)? * 10_000.0))
    }

    pub(crate) fn rss_mib(&self) -> anyhow::Result<f64> {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.child.id()))?;
        let pages: f64 = statm.split_whitespace().nth(1).and_then(|v| v.parse().ok()).context("/proc/PID/statm")?;
        Ok(pages * 4096.0 / 1048576.0)
    }

    pub(crate) fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
    }
}
