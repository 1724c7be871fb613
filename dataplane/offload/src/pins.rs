//! Pinned links and maps, which outlive the process: a pod stays captured, and its connections
//! refused, while its proxy is down.
//!
//! Maps are at `<dir>/v<ABI>/<map>`, links at `<dir>/links/<pod>/<program>`. The links are outside
//! the version: an upgrade replaces their programs, and no pod is released in between. bpffs does
//! not allow dots in names, so the names of pods are encoded.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use canal_abi::capture::ABI;
use libbpf_rs::Link;
use rustix::fs::FlockOperation;

use crate::OffloadError;
use crate::sys;

/// File system type of a bpffs in statfs (linux/magic.h).
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;
/// Directory of the pods' links, under the root.
const LINKS: &str = "links";
/// Length of the longest file name that is created, in bytes; bpffs allows 255. A longer name is
/// cut and ends with `#` and 16 digits of its hash, so that two of them differ.
const NAME_MAX: usize = 200;

/// Returns the default pin directory of a node: on the machine's bpffs if it is mounted, else a
/// private one in the data directory.
pub fn default_pin_dir(node: &str, data_dir: &Path) -> PathBuf {
    let machine = Path::new("/sys/fs/bpf");
    if is_bpffs(machine) {
        machine.join(format!("canal-node-{}", file_name(node)))
    } else {
        data_dir.join("bpffs")
    }
}

/// Returns the default pin directory of a host of the cloud tier, by the rule of
/// [`default_pin_dir`]. `what` is `canal-edge` or `canal-gateway`.
pub fn default_tier_pin_dir(what: &str, name: &str, data_dir: &Path) -> PathBuf {
    let machine = Path::new("/sys/fs/bpf");
    if is_bpffs(machine) {
        machine.join(format!("{what}-{}", file_name(name)))
    } else {
        data_dir.join("bpffs")
    }
}

/// Mounts a bpffs on `dir` unless `dir` is on one already. Returns true if pins there outlive this
/// process.
pub(crate) fn make_usable(dir: &Path) -> Result<bool, OffloadError> {
    let err = |step| {
        move |source| OffloadError::Pins {
            dir: dir.to_path_buf(),
            step,
            source,
        }
    };
    let found = is_bpffs(dir) || dir.parent().is_some_and(is_bpffs);
    if !found {
        fs::create_dir_all(dir).map_err(err("creating the directory"))?;
        // Guards and capture start at the same time. A second mount on top of the first would hide
        // its pins from the next process.
        let lock = fs::File::open(dir).map_err(err("opening it"))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)
            .map_err(io::Error::from)
            .map_err(err("locking it"))?;
        if !is_bpffs(dir) {
            sys::mount_bpffs(dir).map_err(err("mounting a bpffs on it"))?;
        }
    }
    Ok(found || in_the_machines_mounts())
}

fn is_bpffs(p: &Path) -> bool {
    rustix::fs::statfs(p).is_ok_and(|s| s.f_type == BPF_FS_MAGIC)
}

/// Encodes a pod's or node's name as a file name. Dots and slashes, which bpffs does not allow,
/// become characters that no name contains. A name that is too long is cut and gets a hash (FNV-1a)
/// of the whole.
fn file_name(name: &str) -> String {
    let spelled: String = name
        .chars()
        .map(|c| if c == '/' { '@' } else { c })
        .map(|c| if c == '.' { '_' } else { c })
        .collect();
    if spelled.len() <= NAME_MAX {
        return spelled;
    }
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    });
    let head: String = spelled.chars().take(NAME_MAX - 17).collect();
    format!("{head}#{hash:016x}")
}

fn pod_name(file: &str) -> String {
    file.replace('@', "/").replace('_', ".")
}

/// Pin directory that is ready for use.
#[derive(Debug, Clone)]
pub(crate) struct PinDirectory {
    root: PathBuf,
    durable: bool,
}

impl PinDirectory {
    /// Mounts a bpffs on `dir` unless `dir` is on one already, and creates the directories in it.
    pub(crate) fn open(dir: &Path) -> Result<Self, OffloadError> {
        let err = |step| {
            move |source| OffloadError::Pins {
                dir: dir.to_path_buf(),
                step,
                source,
            }
        };
        let pins = Self {
            root: dir.to_path_buf(),
            durable: make_usable(dir)?,
        };
        for d in [pins.maps(), pins.links()] {
            fs::create_dir_all(&d).map_err(err("creating a directory in it"))?;
        }
        Ok(pins)
    }

    /// Returns true if the pins outlive this process.
    pub(crate) fn is_durable(&self) -> bool {
        self.durable
    }

    /// Returns the directory of the maps of this ABI.
    pub(crate) fn maps(&self) -> PathBuf {
        self.root.join(format!("v{ABI}"))
    }

    fn links(&self) -> PathBuf {
        self.root.join(LINKS)
    }

    /// Returns the directory of a pod's links.
    pub(crate) fn pod(&self, pod: &str) -> PathBuf {
        self.links().join(file_name(pod))
    }

    /// Returns the pods that have pins.
    pub(crate) fn pods(&self) -> Vec<String> {
        let names = fs::read_dir(self.links()).into_iter().flatten().flatten();
        names
            .filter_map(|e| e.file_name().to_str().map(pod_name))
            .collect()
    }

    /// Creates the directory of a pod.
    pub(crate) fn make_pod(&self, pod: &str) -> Result<PathBuf, OffloadError> {
        let dir = self.pod(pod);
        fs::create_dir_all(&dir).map_err(|source| OffloadError::Pins {
            dir: dir.clone(),
            step: "creating the pod's directory",
            source,
        })?;
        Ok(dir)
    }

    /// Detaches a pod's links and removes their pins.
    pub(crate) fn forget_pod(&self, pod: &str) -> Result<(), OffloadError> {
        detach_all(&self.pod(pod));
        remove_tree(&self.pod(pod)).map_err(|source| OffloadError::Pins {
            dir: self.pod(pod),
            step: "removing the pod's links",
            source,
        })
    }

    /// Removes the maps of this ABI, because they do not fit the object.
    pub(crate) fn forget_maps(&self) -> io::Result<()> {
        remove_tree(&self.maps())?;
        fs::create_dir_all(self.maps())
    }

    /// Removes the maps of other ABIs. Call it when no link uses them any more.
    pub(crate) fn forget_other_abis(&self) {
        let keep = self.maps();
        for e in fs::read_dir(&self.root).into_iter().flatten().flatten() {
            if e.path() != keep
                && e.file_name().to_str().is_some_and(|n| n.starts_with('v'))
                && remove_tree(&e.path()).is_err()
            {
                tracing::warn!(pins = %e.path().display(), "pins: cannot remove the pins of an older version; fix: remove the folder by hand");
            }
        }
    }
}

/// Detaches the links that are pinned in `dir`. When a link's last pin is removed, the kernel
/// detaches it too, but some time later: after a release the pod would still be captured. A link
/// that cannot be detached is left to the kernel.
fn detach_all(dir: &Path) {
    for pin in fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
    {
        if let Err(e) = Link::open(&pin).and_then(|link| link.detach()) {
            tracing::debug!(pin = %pin.display(), %e, "pins: cannot detach a link; it stays until its pin is removed");
        }
    }
}

/// Removes all pins under `dir` and unmounts the private bpffs if one was mounted there. It is no
/// error if there is nothing.
pub(crate) fn release(dir: &Path) -> Result<(), OffloadError> {
    let err = |step| {
        move |source| OffloadError::Pins {
            dir: dir.to_path_buf(),
            step,
            source,
        }
    };
    if !is_bpffs(dir) {
        return Ok(());
    }
    for pod in fs::read_dir(dir.join(LINKS))
        .into_iter()
        .flatten()
        .flatten()
    {
        detach_all(&pod.path());
    }
    // The root of a bpffs also contains the kernel's own maps.debug and progs.debug, which cannot
    // be removed.
    for d in fs::read_dir(dir)
        .map_err(err("listing"))?
        .flatten()
        .filter(|d| d.file_type().is_ok_and(|t| t.is_dir()))
    {
        remove_tree(&d.path()).map_err(err("removing pins"))?;
    }
    let is_mount = fs::metadata(dir)
        .and_then(|d| Ok(d.dev() != fs::metadata(dir.join(".."))?.dev()))
        .map_err(err("finding its mount"))?;
    if is_mount && dir != Path::new("/sys/fs/bpf") {
        sys::unmount(dir).map_err(err("unmounting"))?;
    }
    fs::remove_dir(dir).map_err(err("removing the directory"))
}

/// Returns true if this process is in the machine's mount namespace. A mount in a private mount
/// namespace ends with its last process, and the pins with it.
fn in_the_machines_mounts() -> bool {
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    namespace("self").is_some_and(|own| namespace("1").is_none_or(|init| init == own))
}

/// Removes one pin. It is no error if there is none.
pub(crate) fn remove_file(p: &Path) -> io::Result<()> {
    match fs::remove_file(p) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

pub(crate) fn remove_tree(p: &Path) -> io::Result<()> {
    match fs::remove_dir_all(p) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_that_start_side_by_side_share_one_mount() {
        // More than the machine has cores, so that some meet in the middle of a mount.
        const USERS: usize = 8;
        let folder = tempfile::tempdir().unwrap();
        for round in 0..20 {
            let dir = folder.path().join(round.to_string());
            let at_once = std::sync::Barrier::new(USERS);
            std::thread::scope(|s| {
                (0..USERS).for_each(|_| {
                    s.spawn(|| {
                        at_once.wait();
                        make_usable(&dir).expect("these tests need root");
                    });
                });
            });
            release(&dir).expect("nothing lies under the mount");
            assert!(!dir.exists());
        }
    }

    #[test]
    fn pod_names_are_valid_in_bpffs_and_can_be_decoded() {
        for pod in ["alpha/bookinfo/reviews-v1-0", "a/b/c.d.e"] {
            let f = file_name(pod);
            assert!(!f.contains(['.', '/']), "{f}");
            assert_eq!(pod_name(&f), pod);
        }
        let (a, b) = (
            file_name(&format!("a/b/{}", "c".repeat(250))),
            file_name(&format!("a/b/{}d", "c".repeat(249))),
        );
        assert!(
            a.len() <= NAME_MAX && b.len() <= NAME_MAX && a != b,
            "long names are cut and stay apart"
        );
    }
}
