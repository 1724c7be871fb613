//! Where processes may run and how much: cores by affinity, shares of a core by the kernel's CFS quota (cgroup v1 `cpu`, or v2 where it has
//! the controller), and whether idle cores halt. It restores nothing: its cgroup goes with its value, the processes with their world.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

/// Short, so that a capped process waits often and briefly rather than seldom and long. The kernel takes quotas from 1 ms on: 5 %.
const PERIOD_US: u64 = 20_000;

/// Where a process says how late the machine's cores may wake, in µs.
const PM_QOS: &str = "/dev/cpu_dma_latency";

/// Of cgroups of this program, before the process id.
const NAME: &str = "canal-bench-keys-";

/// What a process may use of the machine's time.
pub(crate) struct Cap {
    folder: PathBuf,
    /// The controller is in cgroup v2, where the process's own cgroup is used; else a cgroup of this value's making.
    v2: bool,
}

/// Puts all threads of a process on one core.
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

/// Keeps idle cores from halting for as long as it lives, however the process ends (PM QoS). In a virtual machine each halt, and each interrupt
/// between cores, is the hypervisor's work, and on the bill of whoever is woken or wakes.
pub(crate) fn awake() -> anyhow::Result<File> {
    let mut file = File::options().write(true).open(PM_QOS).context(PM_QOS)?;
    file.write_all(&0i32.to_ne_bytes()).context(PM_QOS)?;
    Ok(file)
}

/// The processor's name.
pub(crate) fn processor() -> String {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("of no name");
    name.trim_start_matches([' ', '\t', ':']).to_string()
}

/// Has packets that come into a network namespace worked on by one core (RPS). Between namespaces the kernel else does this on the sender's
/// time, as if the sender's machine were the router too.
pub(crate) fn receive_on(netns: &Path, core: usize) -> anyhow::Result<()> {
    let name = netns.file_name().context("a namespace has a name")?;
    let mask = format!("{:x}", 1u64 << core);
    let script = format!("for queue in /sys/class/net/*/queues/rx-*/rps_cpus; do echo {mask} > $queue || exit 1; done");
    let done = Command::new("ip").args(["netns", "exec"]).arg(name).args(["sh", "-c", &script]).status().context("ip")?;
    anyhow::ensure!(done.success(), "{}: RPS cannot be set", netns.display());
    Ok(())
}

impl Cap {
    /// Of one process, whose own v2 cgroup is `own`, and the threads it has and will have.
    pub(crate) fn of(pid: u32, own: &Path) -> anyhow::Result<Self> {
        let (mount, v2) = mount()?;
        if v2 {
            return Ok(Self { folder: own.to_path_buf(), v2 });
        }
        sweep(&mount);
        let folder = mount.join(format!("{NAME}{}", std::process::id()));
        std::fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
        let cap = Self { folder, v2 };
        std::fs::write(cap.folder.join("cgroup.procs"), pid.to_string()).context("cgroup.procs")?;
        Ok(cap)
    }

    /// At most this share of one core; `None`: no limit.
    pub(crate) fn set(&self, share: Option<f64>) -> anyhow::Result<()> {
        let quota = share.map(|share| (share * PERIOD_US as f64) as u64);
        if self.v2 {
            let quota = quota.map_or("max".to_string(), |q| q.to_string());
            return write(&self.folder.join("cpu.max"), &format!("{quota} {PERIOD_US}"));
        }
        write(&self.folder.join("cpu.cfs_period_us"), &PERIOD_US.to_string())?;
        write(&self.folder.join("cpu.cfs_quota_us"), &quota.map_or("-1".to_string(), |q| q.to_string()))
    }
}

impl Drop for Cap {
    fn drop(&mut self) {
        if self.v2 {
            return;
        }
        // Its process goes back to the root first: a cgroup with members cannot be removed.
        let procs = std::fs::read_to_string(self.folder.join("cgroup.procs")).unwrap_or_default();
        if let Some(parent) = self.folder.parent() {
            for pid in procs.lines() {
                let _ = std::fs::write(parent.join("cgroup.procs"), pid);
            }
        }
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// Removes what killed runs left.
fn sweep(mount: &Path) {
    for entry in std::fs::read_dir(mount).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.strip_prefix(NAME).is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            // One that still has members is not a dead run's.
            let _ = std::fs::remove_dir(entry.path());
        }
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

/// Where the `cpu` controller is, found by mount type.
fn mount() -> anyhow::Result<(PathBuf, bool)> {
    let mounts = std::fs::read_to_string("/proc/mounts").context("/proc/mounts")?;
    let mut found = None;
    for line in mounts.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [_, path, kind, options, ..] = words.as_slice() else { continue };
        match *kind {
            "cgroup" if options.split(',').any(|option| option == "cpu") => found = Some((PathBuf::from(path), false)),
            "cgroup2" => {
                let controllers = std::fs::read_to_string(Path::new(path).join("cgroup.controllers")).unwrap_or_default();
                if controllers.split_whitespace().any(|controller| controller == "cpu") {
                    return Ok((PathBuf::from(path), true));
                }
            }
            _ => {}
        }
    }
    match found {
        Some(found) => Ok(found),
        None => bail!("no cgroup mount has the cpu controller; the bench needs it to give the node proxy a share of a core"),
    }
}
