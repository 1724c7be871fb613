//! Takes down what exists of a world, in whatever state it was left, and finds the worlds there
//! are. Everything is found by name in the kernel, not in notes: a killed run leaves none.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::cgroup;
use crate::error::{Result, Tried};
use crate::net::{NETNS_DIR, Tools, netns_path};
use crate::plan::netns_prefix;
use crate::script;
use crate::state::{Lock, Paths, Record, WORLDS_DIR, read_json};

/// Removes processes, cgroups, namespaces and files of a world. The caller holds its lock.
/// What is not there is a success, so this can be repeated at any time.
pub(crate) fn clear(paths: &Paths) -> Result<()> {
    cgroup::remove(&cgroup::of_world(paths.world())?)?;
    let names = spaces_of(paths.world());
    // Lines that fail are no reason to keep the rest; what stays is counted below.
    let _ = Tools::default().run(&script::remove_spaces(names.iter().map(String::as_str)));
    for name in spaces_of(paths.world()) {
        // A name without a namespace (the machine was restarted), or one the batch did not reach.
        let path = netns_path(&name);
        let _ = rustix::mount::unmount(&path, rustix::mount::UnmountFlags::DETACH);
        std::fs::remove_file(&path).tried("cannot remove namespace", &path)?;
    }
    for mount in mounts_below(paths.dir()) {
        rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::DETACH).tried("cannot unmount", &mount)?;
    }
    match std::fs::remove_dir_all(paths.dir()) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error).tried("cannot remove", paths.dir()),
        _ => {}
    }
    // The parent of all worlds' cgroups goes with the last of them.
    let _ = std::fs::remove_dir(cgroup::root()?);
    Ok(())
}

/// Mount points below a directory, the innermost first. World names need no octal escapes.
fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    let mut below: Vec<PathBuf> = points.filter(|point| point.starts_with(dir)).collect();
    below.sort();
    below.reverse();
    below
}

fn names_in(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn spaces_of(world: &str) -> Vec<String> {
    let prefix = netns_prefix(world);
    names_in(Path::new(NETNS_DIR)).into_iter().filter(|name| name.starts_with(&prefix)).collect()
}

/// Every name of which anything exists.
fn known() -> Result<BTreeSet<String>> {
    let files = names_in(Path::new(WORLDS_DIR)).into_iter().map(|name| name.trim_end_matches(".lock").to_owned());
    let spaces = names_in(Path::new(NETNS_DIR)).into_iter().filter_map(|name| {
        let (world, _) = name.strip_prefix("cnl-")?.split_once('.')?;
        Some(world.to_owned())
    });
    let root = cgroup::root()?;
    let groups = names_in(&root).into_iter().filter(|name| root.join(name).is_dir());
    let names = files.chain(spaces).chain(groups);
    Ok(names.filter(|name| crate::check::world_name(name).is_ok()).collect())
}

/// One line of the world list.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Listed {
    /// Name of the world.
    pub name: String,
    /// Its supervisor lives. What is not alive is a leftover, which `gc` or the next `up` removes.
    pub alive: bool,
    /// The process it lives and dies with, if it is ephemeral.
    pub owner: Option<u32>,
    /// The file it was made from, if that is still known.
    pub topology: Option<std::path::PathBuf>,
}

/// All worlds of this machine, leftovers included.
pub(crate) fn list() -> Result<Vec<Listed>> {
    let listed = known()?.into_iter().map(|name| {
        let paths = Paths::of(&name);
        let topology: Option<serde_json::Value> = read_json(&paths.topology()).ok();
        Listed {
            alive: is_held(&paths),
            owner: Record::read(&paths).ok().and_then(|record| record.owner),
            topology: topology.and_then(|topology| topology["file"].as_str().map(Into::into)),
            name,
        }
    });
    Ok(listed.collect())
}

/// Whether somebody looks after the world.
pub(crate) fn is_held(paths: &Paths) -> bool {
    let Ok(file) = std::fs::File::open(paths.lock()) else { return false };
    // The shared lock is gone with `file` at the end; `Lock::try_take` waits such moments out.
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err()
}

/// Removes every world that nobody looks after; returns their names.
pub(crate) fn gc() -> Result<Vec<String>> {
    let mut removed = Vec::new();
    for name in known()? {
        let paths = Paths::of(&name);
        if is_held(&paths) {
            continue;
        }
        if let Some(lock) = Lock::try_take(&paths)? {
            clear(&paths)?;
            lock.remove();
            removed.push(name);
        }
    }
    Ok(removed)
}
