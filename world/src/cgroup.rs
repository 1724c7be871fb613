//! cgroup v2 subtrees: finds the mount by its type, and creates, kills, removes and reads subtrees.
//! It uses no controller, only membership (for capture), `cgroup.kill` and CPU accounting.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Error, IoContext, Result};
use crate::state::create_with_parents;

/// Timeout for killed processes to leave their cgroup. The kernel frees a killed process's memory
/// first, which takes longest on a busy machine. Nobody measured the value.
const EMPTY_WITHIN: Duration = Duration::from_secs(10);

/// Returns the mount point of cgroup v2.
fn mount_point() -> Result<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/mounts").tried("cannot read", "/proc/mounts")?;
    let found = mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (path, kind) = (words.next()?, words.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(path))
    });
    found.ok_or_else(|| Error::Machine {
        what: "a cgroup v2 mount".into(),
        fix: "mount one: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified".into(),
    })
}

/// Returns the parent of all worlds' subtrees.
pub(crate) fn root() -> Result<PathBuf> {
    Ok(mount_point()?.join("canal"))
}

/// Returns the subtree of a world.
pub(crate) fn of_world(world: &str) -> Result<PathBuf> {
    Ok(root()?.join(world))
}

/// Creates a cgroup and its parents.
pub(crate) fn make(path: &Path) -> Result<()> {
    create_with_parents(path).tried("cannot create cgroup", path)
}

/// Returns the process ids in a cgroup and its descendants.
pub(crate) fn pids(path: &Path) -> Vec<u32> {
    let mut pids: Vec<u32> = std::fs::read_to_string(path.join("cgroup.procs"))
        .unwrap_or_default()
        .lines()
        .filter_map(|line| line.parse().ok())
        .collect();
    for child in children(path) {
        pids.extend(self::pids(&child));
    }
    pids
}

fn children(path: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(path) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

const NODEV: i32 = rustix::io::Errno::NODEV.raw_os_error();

/// Kills all processes of a subtree with SIGKILL, including those that fork at the same time.
pub(crate) fn kill(path: &Path) -> Result<()> {
    match std::fs::write(path.join("cgroup.kill"), "1") {
        // If the cgroup is removed between the opening and the writing, the error is ENODEV.
        Err(error)
            if error.kind() != std::io::ErrorKind::NotFound
                && error.raw_os_error() != Some(NODEV) =>
        {
            Err(error).tried("cannot kill cgroup", path)
        }
        _ => Ok(()),
    }
}

/// Kills and removes a subtree. It succeeds if the subtree does not exist.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let deadline = Instant::now() + EMPTY_WITHIN;
    loop {
        if !path.exists() {
            return Ok(());
        }
        kill(path)?;
        match remove_dirs(path) {
            Ok(()) => return Ok(()),
            // Ending processes and zombies keep the cgroup busy for a moment.
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(error).tried("cannot remove cgroup", path),
        }
    }
}

fn remove_dirs(path: &Path) -> std::io::Result<()> {
    for child in children(path) {
        remove_dirs(&child)?;
    }
    match std::fs::remove_dir(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// CPU time that the processes of a subtree have used since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// CPU time in user space.
    pub user: Duration,
    /// CPU time in the kernel on behalf of the processes.
    pub system: Duration,
}

impl CpuTime {
    /// Sum of user and system time.
    pub fn total(&self) -> Duration {
        self.user + self.system
    }

    /// Returns the CPU time used since an earlier reading.
    pub fn since(&self, earlier: CpuTime) -> CpuTime {
        CpuTime {
            user: self.user.saturating_sub(earlier.user),
            system: self.system.saturating_sub(earlier.system),
        }
    }
}

/// Reads `cpu.stat`, which needs no controller.
pub(crate) fn cpu(path: &Path) -> Result<CpuTime> {
    let file = path.join("cpu.stat");
    let text = std::fs::read_to_string(&file).tried("cannot read", &file)?;
    let field = |name: &str| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        Duration::from_micros(line.unwrap_or(0))
    };
    Ok(CpuTime {
        user: field("user_usec "),
        system: field("system_usec "),
    })
}
