//! Where a world keeps its files, and the lock that says its supervisor is alive.
//! Paths only: what the files hold is known by those who write them.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::error::{Result, Tried};

/// Home of all worlds.
pub(crate) const WORLDS_DIR: &str = "/run/canal/worlds";

/// The files of one world.
#[derive(Clone, Debug)]
pub(crate) struct Paths {
    world: String,
    dir: PathBuf,
}

impl Paths {
    pub(crate) fn of(world: &str) -> Self {
        Self { world: world.to_owned(), dir: Path::new(WORLDS_DIR).join(world) }
    }

    pub(crate) fn world(&self) -> &str {
        &self.world
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Beside the directory, not inside: it outlives the directory while that is removed.
    pub(crate) fn lock(&self) -> PathBuf {
        Path::new(WORLDS_DIR).join(format!("{}.lock", self.world))
    }

    pub(crate) fn topology(&self) -> PathBuf {
        self.dir.join("topology.json")
    }

    /// The file as the user wrote it, for reading.
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

    /// The controller's public infra certificate lives here.
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

    /// Where a node proxy pins its capture programs.
    pub(crate) fn bpffs(&self, node: &str) -> PathBuf {
        self.data(node).join("bpffs")
    }

    /// The tenant's own certificates and keys at its key server.
    pub(crate) fn tls(&self, key_server: &str) -> PathBuf {
        self.data(key_server).join("tls")
    }

    /// Directory with the `hosts` and `resolv.conf` a host sees as /etc's.
    pub(crate) fn etc(&self, host: &str) -> PathBuf {
        self.dir.join("etc").join(file_name(host))
    }
}

impl Record {
    pub(crate) fn read(paths: &Paths) -> Result<Self> {
        read_json(&paths.record())
    }
}

/// Reads a JSON file that this crate wrote.
pub(crate) fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T> {
    let text = std::fs::read(path).tried("cannot read", path)?;
    serde_json::from_slice(&text).map_err(std::io::Error::from).tried("cannot understand", path)
}

pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(std::io::Error::from).tried("cannot write", path)?;
    write_whole(path, &text, 0o644)
}

/// A host's name as one file name.
pub(crate) fn file_name(host: &str) -> String {
    host.replace('/', ".")
}

/// How a world was asked for; kept beside its topology.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Process that a world lives and dies with; none for a persistent world.
    pub(crate) owner: Option<u32>,
    /// [`crate::Topology`]'s fingerprint, to know it again.
    pub(crate) fingerprint: String,
    /// Where commands are looked up, before PATH.
    pub(crate) bin_dirs: Vec<PathBuf>,
}

/// The lock on a world's name. Held by its supervisor as long as that lives; a lock that can be
/// taken means that nobody looks after the world.
#[derive(Debug)]
pub(crate) struct Lock {
    pub(crate) file: File,
    path: PathBuf,
}

impl Lock {
    /// Takes the lock if it is free.
    pub(crate) fn try_take(paths: &Paths) -> Result<Option<Self>> {
        let path = paths.lock();
        loop {
            make_dir(Path::new(WORLDS_DIR))?;
            let opened = File::options().create(true).truncate(false).write(true).mode(0o600).open(&path);
            let file = match opened {
                // The last world may take its directory away between the two calls.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                other => other.tried("cannot open lock", &path)?,
            };
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error).tried("cannot lock", &path),
            }
            // Whoever held it before may have removed the file that was just locked.
            let current = std::fs::metadata(&path).map(|found| found.ino());
            let mine = file.metadata().map(|found| found.ino()).tried("cannot read", &path)?;
            if current.is_ok_and(|current| current == mine) {
                return Ok(Some(Self { file, path }));
            }
        }
    }

    /// A lock that was taken before this process began, and handed to it.
    pub(crate) fn inherited(file: File, paths: &Paths) -> Self {
        Self { file, path: paths.lock() }
    }

    /// Takes the name out of the world list. Only the holder may.
    pub(crate) fn remove(self) {
        // Errors leave a free lock file, which counts as nothing.
        let _ = std::fs::remove_file(&self.path);
        remove_empty_parents();
    }
}

/// Removes the directories above worlds when the last world is gone.
pub(crate) fn remove_empty_parents() {
    let _ = std::fs::remove_dir(WORLDS_DIR);
    if let Some(parent) = Path::new(WORLDS_DIR).parent() {
        let _ = std::fs::remove_dir(parent);
    }
}

/// Makes a directory and its parents.
pub(crate) fn make_dir(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).tried("cannot make directory", path)
}

/// Replaces a file as a whole: readers see the old text or the new one.
pub(crate) fn write_whole(path: &Path, text: &str, mode: u32) -> Result<()> {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    // A leading dot: directory watchers pass over it.
    let draft = path.with_file_name(format!(".{name}.draft"));
    let opened = File::options().create(true).truncate(true).write(true).mode(mode).open(&draft);
    let written = opened.and_then(|mut file| file.write_all(text.as_bytes()));
    written.and_then(|()| std::fs::rename(&draft, path)).tried("cannot write", path)
}
