//! Removes everything that exists of a world, in any state, and lists the existing worlds. It finds
//! everything by name in the kernel and not in records, because a killed run writes none. Start at
//! [`clear`].

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::cgroup;
use crate::error::{IoContext, Result};
use crate::net::{NETNS_DIR, Tools, netns_path};
use crate::plan::netns_prefix;
use crate::recovery;
use crate::state::{WORLDS_DIR, WorldLock, WorldPaths, WorldRecord, read_json};
use crate::tool_batch;

/// Removes processes, cgroups, namespaces and files of a world. The caller owns the world's lock.
/// Parts that do not exist are a success, so this can be repeated at any time.
pub(crate) fn clear(paths: &WorldPaths) -> Result<()> {
    clear_beside(paths, &[])
}

/// Works like [`clear`], but preserves these files and directories of the world.
pub(crate) fn clear_beside(paths: &WorldPaths, retained: &[PathBuf]) -> Result<()> {
    cgroup::remove(&cgroup::of_world(paths.world())?)?;
    let names = spaces_of(paths.world());
    // Failed lines must not stop the removal of the rest; what remains is removed below.
    let _ = Tools::default().run(&tool_batch::remove_spaces(names.iter().map(String::as_str)));
    for name in spaces_of(paths.world()) {
        // Either the name has no namespace because the machine was restarted, or the batch did not
        // reach it.
        let path = netns_path(&name);
        let _ = rustix::mount::unmount(&path, rustix::mount::UnmountFlags::DETACH);
        std::fs::remove_file(&path).tried("cannot remove namespace", &path)?;
    }
    for mount in mounts_below(paths.dir()) {
        rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::DETACH)
            .tried("cannot unmount", &mount)?;
    }
    let removed = match retained {
        [] => std::fs::remove_dir_all(paths.dir()),
        retained => recovery::remove_beside(paths.dir(), retained),
    };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).tried("cannot remove", paths.dir());
        }
        _ => {}
    }
    // The parent of all worlds' cgroups is removed with the last of them.
    let _ = std::fs::remove_dir(cgroup::root()?);
    Ok(())
}

/// Returns the mount points below a directory, the innermost first. World names need no octal
/// escapes.
fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(PathBuf::from);
    let mut below: Vec<PathBuf> = points.filter(|point| point.starts_with(dir)).collect();
    below.sort();
    below.reverse();
    below
}

fn names_in(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

fn spaces_of(world: &str) -> Vec<String> {
    let prefix = netns_prefix(world);
    names_in(Path::new(NETNS_DIR))
        .into_iter()
        .filter(|name| name.starts_with(&prefix))
        .collect()
}

/// Returns every world name of which anything exists.
fn world_names() -> Result<BTreeSet<String>> {
    let files = names_in(Path::new(WORLDS_DIR))
        .into_iter()
        .map(|name| name.trim_end_matches(".lock").to_owned());
    let spaces = names_in(Path::new(NETNS_DIR))
        .into_iter()
        .filter_map(|name| {
            let (world, _) = name.strip_prefix("cnl-")?.split_once('.')?;
            Some(world.to_owned())
        });
    let root = cgroup::root()?;
    let groups = names_in(&root)
        .into_iter()
        .filter(|name| root.join(name).is_dir());
    let names = files.chain(spaces).chain(groups);
    Ok(names
        .filter(|name| crate::check::may_be_world_name(name))
        .collect())
}

/// A line of the world list.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorldListing {
    pub name: String,
    /// The supervisor is running. A world that is not alive is hidden, or it is a leftover, which
    /// `gc` or the next `up` removes.
    pub alive: bool,
    /// The caller is not root and cannot check whether the supervisor is running.
    #[serde(default)]
    pub hidden: bool,
    /// Process whose end ends the world, if the world is ephemeral.
    pub owner: Option<u32>,
    /// Path of the topology file, if it is still known.
    pub topology: Option<std::path::PathBuf>,
}

/// Lists all worlds of this machine, including leftovers.
pub(crate) fn list() -> Result<Vec<WorldListing>> {
    let listed = world_names()?.into_iter().map(|name| {
        let paths = WorldPaths::of(&name);
        let topology: Option<serde_json::Value> = read_json(&paths.topology()).ok();
        WorldListing {
            alive: watch(&paths) == SupervisorLock::Held,
            hidden: watch(&paths) == SupervisorLock::Hidden,
            owner: WorldRecord::read(&paths)
                .ok()
                .and_then(|record| record.owner),
            topology: topology.and_then(|topology| topology["file"].as_str().map(Into::into)),
            name,
        }
    });
    Ok(listed.collect())
}

/// State of the lock of a world's supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SupervisorLock {
    Held,
    Free,
    /// The lock belongs to root, and the caller may not read it.
    Hidden,
}

/// Returns whether a supervisor runs the world, as far as the caller may check.
pub(crate) fn watch(paths: &WorldPaths) -> SupervisorLock {
    let file = match std::fs::File::open(paths.lock()) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            return SupervisorLock::Hidden;
        }
        Err(_) => return SupervisorLock::Free,
    };
    // The shared lock is released with `file` at the end. `WorldLock::try_take` tolerates such
    // short locks.
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => SupervisorLock::Free,
        Err(_) => SupervisorLock::Held,
    }
}

/// Returns whether a supervisor runs the world.
pub(crate) fn is_held(paths: &WorldPaths) -> bool {
    watch(paths) == SupervisorLock::Held
}

/// Removes every world without a supervisor, and returns their names.
pub(crate) fn gc() -> Result<Vec<String>> {
    gc_beside(None)
}

/// Works like [`gc`], but spares the world of one name.
pub(crate) fn gc_beside(spared: Option<&str>) -> Result<Vec<String>> {
    let mut removed = Vec::new();
    for name in world_names()?
        .into_iter()
        .filter(|name| spared != Some(name))
    {
        let paths = WorldPaths::of(&name);
        if is_held(&paths) {
            continue;
        }
        if let Some(lock) = WorldLock::try_take(&paths)? {
            clear(&paths)?;
            lock.remove();
            removed.push(name);
        }
    }
    Ok(removed)
}
