//! [`WorldPaths`]: the paths of a world's files; [`WorldLock`], the lock that shows that a world's supervisor is running; and
//! [`LeftoverLock`], the lock on what killed worlds left. The content of the files is defined by
//! the modules that write them.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::error::{IoContext, Result};

/// Parent directory of all worlds' directories and locks.
pub(crate) const WORLDS_DIR: &str = "/run/canal/worlds";

/// Paths of the files of one world.
#[derive(Clone, Debug)]
pub(crate) struct WorldPaths {
    world: String,
    dir: PathBuf,
}

impl WorldPaths {
    pub(crate) fn of(world: &str) -> Self {
        Self {
            world: world.to_owned(),
            dir: Path::new(WORLDS_DIR).join(world),
        }
    }

    pub(crate) fn world(&self) -> &str {
        &self.world
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Path of the lock. It is beside the world's directory, because it must outlive the directory
    /// while that is removed.
    pub(crate) fn lock(&self) -> PathBuf {
        Path::new(WORLDS_DIR).join(format!("{}.lock", self.world))
    }

    pub(crate) fn topology(&self) -> PathBuf {
        self.dir.join("topology.json")
    }

    /// Copy of the topology file as the user wrote it, for reading.
    pub(crate) fn topology_text(&self) -> PathBuf {
        self.dir.join("topology.yaml")
    }

    pub(crate) fn record(&self) -> PathBuf {
        self.dir.join("world.json")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("supervisor.sock")
    }

    pub(crate) fn supervisor_log(&self) -> PathBuf {
        self.dir.join("supervisor.log")
    }

    pub(crate) fn supervisor_pid(&self) -> PathBuf {
        self.dir.join("supervisor.pid")
    }

    pub(crate) fn operator_token(&self) -> PathBuf {
        self.dir.join("operator.token")
    }

    pub(crate) fn principals(&self) -> PathBuf {
        self.dir.join("principals.yaml")
    }

    /// Directory of the controller's public infra certificate.
    pub(crate) fn infra(&self) -> PathBuf {
        self.dir.join("infra")
    }

    pub(crate) fn root_ca(&self) -> PathBuf {
        self.infra().join("root.pem")
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.dir.join("config")
    }

    pub(crate) fn tenant_config(&self, tenant: &str) -> PathBuf {
        self.config().join(tenant)
    }

    pub(crate) fn token(&self, host: &str) -> PathBuf {
        self.dir.join("tokens").join(format!("{host}.token"))
    }

    pub(crate) fn node_pods(&self, node: &str) -> PathBuf {
        self.dir.join("nodes").join(node).join("pods")
    }

    pub(crate) fn logs(&self) -> PathBuf {
        self.dir.join("logs")
    }

    pub(crate) fn log(&self, host: &str) -> PathBuf {
        self.logs().join(format!("{}.log", file_name(host)))
    }

    pub(crate) fn data(&self, host: &str) -> PathBuf {
        self.dir.join("data").join(file_name(host))
    }

    /// Mount point of a sysfs that shows the devices of a gateway's network namespace.
    pub(crate) fn sysfs(&self, gateway: &str) -> PathBuf {
        self.data(gateway).join("sysfs")
    }

    /// Mount point of the bpffs in which a node proxy pins its capture programs.
    pub(crate) fn bpffs(&self, node: &str) -> PathBuf {
        self.data(node).join("bpffs")
    }

    /// Directory of the tenant's own certificates and keys on its key server.
    pub(crate) fn tls(&self, key_server: &str) -> PathBuf {
        self.data(key_server).join("tls")
    }

    /// Directory of the files that a host sees as `/etc/hosts` and `/etc/resolv.conf`.
    pub(crate) fn etc(&self, host: &str) -> PathBuf {
        self.dir.join("etc").join(file_name(host))
    }
}

impl WorldRecord {
    pub(crate) fn read(paths: &WorldPaths) -> Result<Self> {
        read_json(&paths.record())
    }
}

/// Reads a JSON file that this crate wrote.
pub(crate) fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T> {
    let text = std::fs::read(path).tried("cannot read", path)?;
    serde_json::from_slice(&text)
        .map_err(std::io::Error::from)
        .tried("cannot understand", path)
}

pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(std::io::Error::from)
        .tried("cannot write", path)?;
    write_whole(path, &text, 0o644)
}

/// Returns a host's name in the form of one file name.
pub(crate) fn file_name(host: &str) -> String {
    host.replace('/', ".")
}

/// Options with which a world was brought up. The record is stored beside the topology.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WorldRecord {
    /// Process whose end ends the world; `None` for a persistent world.
    pub(crate) owner: Option<u32>,
    /// Fingerprint of the [`crate::Topology`], to detect whether a world has the same topology.
    pub(crate) fingerprint: String,
    /// Directories that are searched for programs before PATH.
    pub(crate) bin_dirs: Vec<PathBuf>,
}

/// The lock on a world's name. The supervisor owns it as long as it runs. If the lock is free, no
/// supervisor runs.
#[derive(Debug)]
pub(crate) struct WorldLock {
    pub(crate) file: File,
    path: PathBuf,
}

impl WorldLock {
    /// Takes the lock if it is free.
    pub(crate) fn try_take(paths: &WorldPaths) -> Result<Option<Self>> {
        let path = paths.lock();
        Ok(try_lock(&path)?.map(|file| Self { file, path }))
    }

    /// Wraps a lock that another process took and passed to this one.
    pub(crate) fn inherited(file: File, paths: &WorldPaths) -> Self {
        Self {
            file,
            path: paths.lock(),
        }
    }

    /// Removes the name from the list of worlds. Only the owner of the lock may do this.
    pub(crate) fn remove(self) {
        // An error leaves a free lock file, which does not count as a world.
        let _ = std::fs::remove_file(&self.path);
        remove_empty_parents();
    }
}

/// The lock on the leftovers of killed worlds, of which a machine has one. [`crate::World::up`]
/// removes the leftovers of other worlds only while no other process has this lock. A process that
/// inspects leftovers takes it, so that they stay. The kernel releases the lock when its owner
/// ends, however that ends.
#[derive(Debug)]
pub struct LeftoverLock {
    _file: File,
}

impl LeftoverLock {
    const PATH: &str = "/run/canal/leftovers.lock";

    /// Takes the lock if it is free.
    ///
    /// # Errors
    ///
    /// The caller may not write the lock's file.
    pub fn try_take() -> Result<Option<Self>> {
        Ok(try_lock(Path::new(Self::PATH))?.map(|file| Self { _file: file }))
    }
}

impl Drop for LeftoverLock {
    fn drop(&mut self) {
        // An error leaves a free lock file, which the next owner removes.
        let _ = std::fs::remove_file(Self::PATH);
        remove_empty_parents();
    }
}

/// Creates and locks a file that its last owner removes. Returns `None` if another process has the
/// lock.
fn try_lock(path: &Path) -> Result<Option<File>> {
    loop {
        if let Some(parent) = path.parent() {
            make_dir(parent)?;
        }
        let opened = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path);
        let file = match opened {
            // Another world that ends as the last one may remove the directory between the two
            // calls.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            other => other.tried("cannot open lock", path)?,
        };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error).tried("cannot lock", path),
        }
        // The previous owner may have removed the file that was just locked.
        let current = std::fs::metadata(path).map(|found| found.ino());
        let mine = file
            .metadata()
            .map(|found| found.ino())
            .tried("cannot read", path)?;
        if current.is_ok_and(|current| current == mine) {
            return Ok(Some(file));
        }
    }
}

/// Removes the parent directories of all worlds when the last world is gone.
pub(crate) fn remove_empty_parents() {
    let _ = std::fs::remove_dir(WORLDS_DIR);
    if let Some(parent) = Path::new(WORLDS_DIR).parent() {
        let _ = std::fs::remove_dir(parent);
    }
}

/// Creates a directory and its parents.
///
/// # Errors
///
/// The system's error for the last attempt.
pub(crate) fn make_dir(path: &Path) -> Result<()> {
    create_with_parents(path).tried("cannot create directory", path)
}

/// Attempts to create a directory whose parent the end of another world removes at the same time.
///
/// An attempt takes some microseconds. A hundred attempts failed beside a test that removes the
/// directory in an endless loop.
const MAKE_ATTEMPTS_MAX: usize = 10_000;

/// Creates a directory and its parents below a root that all worlds share: a state directory or a
/// cgroup.
///
/// # Errors
///
/// The system's error for the last attempt.
pub(crate) fn create_with_parents(path: &Path) -> std::io::Result<()> {
    let mut made = std::fs::create_dir_all(path);
    for _ in 1..MAKE_ATTEMPTS_MAX {
        // The last world that ends removes the shared parent directory. That can happen between two
        // steps of this call: before a directory is created in the parent, or after the parent was
        // found to exist and before it was checked to be a directory.
        let is_race = |error: &std::io::Error| {
            matches!(
                error.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::AlreadyExists
            )
        };
        if !made.as_ref().is_err_and(is_race) {
            break;
        }
        // The remover may run on this very core: it must come to an end first.
        std::thread::yield_now();
        made = std::fs::create_dir_all(path);
    }
    made
}

/// Replaces a file as a whole: readers see either the old text or the new one.
pub(crate) fn write_whole(path: &Path, text: &str, mode: u32) -> Result<()> {
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    // Directory watchers skip names with a leading dot.
    let draft = path.with_file_name(format!(".{name}.draft"));
    let opened = File::options()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(mode)
        .open(&draft);
    let written = opened.and_then(|mut file| file.write_all(text.as_bytes()));
    written
        .and_then(|()| std::fs::rename(&draft, path))
        .tried("cannot write", path)
}
