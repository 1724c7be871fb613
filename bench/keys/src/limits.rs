//! CPU limits of processes: cores by affinity, and shares of a core by the kernel's CFS quota
//! (cgroup v1 `cpu`, or v2 with that controller). It can also keep idle cores from halting. It
//! restores nothing: its cgroup is removed on drop, the processes end with their world.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

/// Quota period. It is short, so that a capped process waits often and briefly. The kernel accepts
/// quotas from 1 ms: 5 %.
const PERIOD_US: u64 = 20_000;

/// File in which a process states how late the machine's cores may wake, in µs.
const PM_QOS: &str = "/dev/cpu_dma_latency";

/// Prefix of the cgroups of this program, before the process id.
const NAME: &str = "canal-bench-keys-";

/// Limit on the CPU time of a process.
pub(crate) struct CpuCap {
    folder: PathBuf,
    /// True if the controller is in cgroup v2, where the process's own cgroup is used; otherwise
    /// this value creates a cgroup.
    v2: bool,
}

/// Pins all threads of a process to one core.
pub(crate) fn pin(pid: u32, core: usize) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
        let id: i32 = thread.file_name().to_string_lossy().parse()?;
        // A thread may have ended since it was listed.
        let _ = sched_setaffinity(Pid::from_raw(id), &set);
    }
    Ok(())
}

/// Keeps idle cores from halting while the value exists, however the process ends (PM QoS). In a
/// virtual machine each halt, and each interrupt between cores, is work of the hypervisor, and is
/// charged to both sides.
pub(crate) fn awake() -> anyhow::Result<File> {
    let mut file = File::options().write(true).open(PM_QOS).context(PM_QOS)?;
    file.write_all(&0i32.to_ne_bytes()).context(PM_QOS)?;
    Ok(file)
}

/// Returns the processor's name from `/proc/cpuinfo`.
pub(crate) fn processor() -> String {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .unwrap_or("of no name");
    name.trim_start_matches([' ', '\t', ':']).to_string()
}

/// Returns whether the processor has the feature with this name in Linux.
pub(crate) fn has_feature(name: &str) -> bool {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpus.lines()
        .find(|line| line.starts_with("flags"))
        .is_some_and(|line| line.split_whitespace().any(|flag| flag == name))
}

/// Makes one core process the packets that arrive in a network namespace (RPS). Otherwise the
/// kernel does this on the sender's time between namespaces, as if the sender's machine were the
/// router too.
pub(crate) fn receive_on(netns: &Path, core: usize) -> anyhow::Result<()> {
    let name = netns.file_name().context("a namespace has a name")?;
    let mask = format!("{:x}", 1u64 << core);
    let script = format!(
        "for queue in /sys/class/net/*/queues/rx-*/rps_cpus; do echo {mask} > $queue || exit 1; done"
    );
    let done = Command::new("ip")
        .args(["netns", "exec"])
        .arg(name)
        .args(["sh", "-c", &script])
        .status()
        .context("ip")?;
    anyhow::ensure!(done.success(), "{}: RPS cannot be set", netns.display());
    Ok(())
}

impl CpuCap {
    /// Creates a limit for one process, whose own v2 cgroup is `own`, and for its present and
    /// future threads.
    pub(crate) fn of(pid: u32, own: &Path) -> anyhow::Result<Self> {
        let (mount, v2) = mount()?;
        if v2 {
            return Ok(Self {
                folder: own.to_path_buf(),
                v2,
            });
        }
        sweep(&mount);
        let folder = mount.join(format!("{NAME}{}", std::process::id()));
        std::fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
        let cap = Self { folder, v2 };
        std::fs::write(cap.folder.join("cgroup.procs"), pid.to_string()).context("cgroup.procs")?;
        Ok(cap)
    }

    /// Limits the process to this share of one core; `None`: no limit.
    pub(crate) fn set(&self, share: Option<f64>) -> anyhow::Result<()> {
        let quota = share.map(|share| (share * PERIOD_US as f64) as u64);
        if self.v2 {
            let quota = quota.map_or("max".to_string(), |q| q.to_string());
            return write(
                &self.folder.join("cpu.max"),
                &format!("{quota} {PERIOD_US}"),
            );
        }
        write(
            &self.folder.join("cpu.cfs_period_us"),
            &PERIOD_US.to_string(),
        )?;
        write(
            &self.folder.join("cpu.cfs_quota_us"),
            &quota.map_or("-1".to_string(), |q| q.to_string()),
        )
    }
}

impl Drop for CpuCap {
    fn drop(&mut self) {
        if self.v2 {
            return;
        }
        // The process moves back to the root first: a cgroup with members cannot be removed.
        let procs = std::fs::read_to_string(self.folder.join("cgroup.procs")).unwrap_or_default();
        if let Some(parent) = self.folder.parent() {
            for pid in procs.lines() {
                let _ = std::fs::write(parent.join("cgroup.procs"), pid);
            }
        }
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// Removes the cgroups that killed runs left behind.
fn sweep(mount: &Path) {
    for entry in std::fs::read_dir(mount).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name
            .strip_prefix(NAME)
            .is_some_and(|pid| !Path::new("/proc").join(pid).exists())
        {
            // A cgroup with members does not belong to a dead run.
            let _ = std::fs::remove_dir(entry.path());
        }
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

/// Returns the mount of the `cpu` controller, found by mount type, and whether it is v2.
fn mount() -> anyhow::Result<(PathBuf, bool)> {
    let mounts = std::fs::read_to_string("/proc/mounts").context("/proc/mounts")?;
    let mut found = None;
    for line in mounts.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [_, path, kind, options, ..] = words.as_slice() else {
            continue;
        };
        match *kind {
            "cgroup" if options.split(',').any(|option| option == "cpu") => {
                found = Some((PathBuf::from(path), false))
            }
            "cgroup2" => {
                let controllers =
                    std::fs::read_to_string(Path::new(path).join("cgroup.controllers"))
                        .unwrap_or_default();
                if controllers
                    .split_whitespace()
                    .any(|controller| controller == "cpu")
                {
                    return Ok((PathBuf::from(path), true));
                }
            }
            _ => {}
        }
    }
    match found {
        Some(found) => Ok(found),
        None => bail!(
            "no cgroup mount has the cpu controller; the bench needs it to give the node proxy a share of a core"
        ),
    }
}
