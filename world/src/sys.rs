//! The module with `unsafe` code: what a child process does between fork and exec to enter a host.
//! Everything is prepared before the fork. After it the child makes only system calls: the parent
//! may have other threads, so taking a lock or allocating memory is not allowed. Start at
//! [`ProcessEntry`].

pub(crate) mod packets;
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

/// Maximum length of a host name in the kernel, in bytes.
const HOSTNAME_MAX: usize = 64;

/// The cgroup, namespaces and files that a process enters before it executes its program.
#[derive(Debug)]
pub(crate) struct ProcessEntry {
    cgroup: Option<OwnedFd>,
    netns: Option<OwnedFd>,
    furniture: Option<PrivateFiles>,
}

/// Host name and files that a process inside a host sees instead of the machine's.
#[derive(Debug)]
struct PrivateFiles {
    hostname: Vec<u8>,
    /// Pairs of a file and the machine's file that it is bound over.
    binds: Vec<(CString, CString)>,
}

impl ProcessEntry {
    /// Opens the cgroup and the namespace. The errors contain no names; callers add the host.
    pub(crate) fn open(netns: Option<&Path>, cgroup: Option<&Path>) -> io::Result<Self> {
        let procs = |group: &Path| File::options().write(true).open(group.join("cgroup.procs"));
        Ok(Self {
            cgroup: cgroup.map(procs).transpose()?.map(OwnedFd::from),
            netns: netns.map(File::open).transpose()?.map(OwnedFd::from),
            furniture: None,
        })
    }

    /// Adds a host name, and files that are bound over the machine's.
    pub(crate) fn bind_private_files(
        mut self,
        hostname: &str,
        binds: &[(&Path, &Path)],
    ) -> io::Result<Self> {
        let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).map_err(io::Error::from);
        let mut pairs = Vec::new();
        for (what, target) in binds {
            // A machine without the target file has nothing to hide.
            if target.exists() {
                pairs.push((text(what)?, text(target)?));
            }
        }
        let hostname = hostname.bytes().take(HOSTNAME_MAX).collect();
        self.furniture = Some(PrivateFiles {
            hostname,
            binds: pairs,
        });
        Ok(self)
    }

    /// Enters cgroup, namespaces and mounts in the child. It makes only system calls.
    fn step_in(&self) -> io::Result<()> {
        // The cgroup must be first, because taking down a world kills the processes of its cgroups
        // and must not miss any.
        if let Some(cgroup) = &self.cgroup {
            rustix::io::write(cgroup, b"0")?;
        }
        if let Some(netns) = &self.netns {
            move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))?;
        }
        if let Some(furniture) = &self.furniture {
            furniture.unshare_and_mount()?;
        }
        Ok(())
    }
}

impl PrivateFiles {
    fn unshare_and_mount(&self) -> io::Result<()> {
        // SAFETY: after fork the child has one thread and shares no file table. Unsharing mounts
        // and host name could disturb nothing else.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::NEWUTS)? };
        // Downstream, not private: a namespace that is deleted outside must disappear here too.
        rustix::mount::mount_change(
            c"/",
            MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
        )?;
        for (what, target) in &self.binds {
            rustix::mount::mount_bind(what, target)?;
        }
        rustix::system::sethostname(&self.hostname)?;
        Ok(())
    }
}

/// Makes `command` enter the host described by `entry` before it executes.
pub(crate) fn enter_on_exec(command: &mut Command, entry: ProcessEntry) {
    // SAFETY: `step_in` makes only async-signal-safe system calls on memory that was prepared
    // before the fork. It neither allocates (io::Error from an errno does not) nor takes a lock.
    unsafe { command.pre_exec(move || entry.step_in()) };
}

/// Moves the calling thread into a network namespace. The thread stays there.
pub(crate) fn move_thread_into(netns: &Path) -> io::Result<()> {
    let netns = File::open(netns)?;
    move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))?;
    Ok(())
}

/// Runs `work` on a new thread inside a network namespace, and waits for it.
pub(crate) fn in_netns<T: Send>(netns: &Path, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| move_thread_into(netns).map(|()| work()));
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
