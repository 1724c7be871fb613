//! The unsafe room: what a child process does between fork and exec to be inside a host.
//! Everything is prepared before the fork; afterwards only system calls happen, because the
//! parent may have other threads and so no lock and no allocation is allowed.

pub(crate) mod threads;

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::mount::MountPropagationFlags;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

/// The kernel's limit on host names, bytes.
const HOSTNAME_MAX: usize = 64;

/// Where a process shall be when it begins.
#[derive(Debug)]
pub(crate) struct Entry {
    cgroup: Option<OwnedFd>,
    netns: Option<OwnedFd>,
    furniture: Option<Furniture>,
}

/// What a process inside a host sees instead of the machine's own.
#[derive(Debug)]
struct Furniture {
    hostname: Vec<u8>,
    /// (what, where): files bound over the machine's.
    binds: Vec<(CString, CString)>,
}

impl Entry {
    /// Opens what is needed; errors name nothing, callers add the host.
    pub(crate) fn open(netns: Option<&Path>, cgroup: Option<&Path>) -> io::Result<Self> {
        let procs = |group: &Path| File::options().write(true).open(group.join("cgroup.procs"));
        Ok(Self {
            cgroup: cgroup.map(procs).transpose()?.map(OwnedFd::from),
            netns: netns.map(File::open).transpose()?.map(OwnedFd::from),
            furniture: None,
        })
    }

    /// Adds a host name and files over the machine's.
    pub(crate) fn furnish(mut self, hostname: &str, binds: &[(&Path, &Path)]) -> io::Result<Self> {
        let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).map_err(io::Error::from);
        let mut pairs = Vec::new();
        for (what, target) in binds {
            // A machine without the file has nothing to hide.
            if target.exists() {
                pairs.push((text(what)?, text(target)?));
            }
        }
        let hostname = hostname.bytes().take(HOSTNAME_MAX).collect();
        self.furniture = Some(Furniture { hostname, binds: pairs });
        Ok(self)
    }

    /// The steps in the child. Only system calls.
    fn step_in(&self) -> io::Result<()> {
        // First of all: whoever clears the world kills its cgroups, and must not miss anybody.
        if let Some(cgroup) = &self.cgroup {
            rustix::io::write(cgroup, b"0")?;
        }
        if let Some(netns) = &self.netns {
            move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))?;
        }
        if let Some(furniture) = &self.furniture {
            furniture.put_up()?;
        }
        Ok(())
    }
}

impl Furniture {
    fn put_up(&self) -> io::Result<()> {
        // SAFETY: after fork the child has one thread and shares no file table, which is all
        // that unsharing mounts and host name could disturb.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::NEWUTS)? };
        // Downstream, not private: a namespace deleted outside must vanish here too.
        rustix::mount::mount_change(c"/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
        for (what, target) in &self.binds {
            rustix::mount::mount_bind(what, target)?;
        }
        rustix::system::sethostname(&self.hostname)?;
        Ok(())
    }
}

/// Makes `command` begin where `entry` says.
pub(crate) fn enter_on_exec(command: &mut Command, entry: Entry) {
    // SAFETY: `step_in` makes only async-signal-safe system calls on memory prepared before the
    // fork; it neither allocates (io::Error from an errno does not) nor takes a lock.
    unsafe { command.pre_exec(move || entry.step_in()) };
}

/// Moves the calling thread, for good, into a network namespace.
pub(crate) fn move_thread_into(netns: &Path) -> io::Result<()> {
    let netns = File::open(netns)?;
    move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))?;
    Ok(())
}

/// Runs `work` on a thread of its own inside a network namespace and waits for it.
pub(crate) fn in_netns<T: Send>(netns: &Path, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| move_thread_into(netns).map(|()| work()));
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
