//! Follows a directory of YAML per tenant. What a file means is `directory`; this only knows when to look.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use canal_model::ids::TenantName;
use futures::StreamExt;
use inotify::{Event, EventMask, EventStream, Inotify, WatchDescriptor, WatchMask, Watches};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use crate::directory::{Directory, Hints, Scan};

/// Nothing must have happened for so long before the files are read …
pub const QUIET: Duration = Duration::from_millis(50);
/// … but they are read at the latest so long after the first change.
pub const DELAY_MAX: Duration = Duration::from_millis(500);
/// A file that is held open for writing is read anyhow after so long.
pub const BUSY_MAX: Duration = Duration::from_secs(5);
/// All files are looked at so often even if no change was told: networked file systems tell none.
pub const LOOK_EVERY: Duration = Duration::from_secs(30);
/// Scans that wait for the receiver; the watcher then waits too.
const SCANS_WAITING_MAX: usize = 4;
const EVENT_BYTES_MAX: usize = 64 << 10;

/// Why a directory cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The kernel gives no inotify instance, or does not let this directory be watched.
    #[error(
        "cannot watch {path}: {source}; create the directory, and raise fs.inotify.max_user_instances and max_user_watches if they are used up"
    )]
    Inotify { path: PathBuf, source: std::io::Error },
}

/// A watched directory. Dropping it ends the watching.
#[derive(Debug)]
pub struct Watch {
    scans: mpsc::Receiver<Scan>,
    task: JoinHandle<()>,
}

impl Watch {
    /// Starts to watch; call it inside a tokio runtime. A file is best replaced by renaming a complete one over it.
    pub fn open(root: &Path) -> Result<Self, WatchError> {
        let explain = |source| WatchError::Inotify { path: root.to_owned(), source };
        let inotify = Inotify::init().map_err(explain)?;
        let watches = inotify.watches();
        let events = inotify.into_event_stream(vec![0; EVENT_BYTES_MAX]).map_err(explain)?;
        let mut watcher = Watcher { root: root.to_owned(), events, watches, tenants: HashMap::new(), pending: Pending::default() };
        watcher.follow(None).map_err(explain)?;
        let (sender, scans) = mpsc::channel(SCANS_WAITING_MAX);
        Ok(Self { scans, task: tokio::spawn(watcher.run(Directory::new(root), sender)) })
    }

    /// The next change; at first everything. Nothing is lost if the future is dropped. `None` only while the runtime goes down.
    pub async fn next(&mut self) -> Option<Scan> {
        self.scans.recv().await
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What happened since the last look.
#[derive(Default)]
struct Pending {
    touched: BTreeSet<(String, String)>,
    /// Open for writing, since when.
    busy: BTreeMap<(String, String), Instant>,
    /// A tenant came, went, or events were lost.
    look: bool,
}

impl Pending {
    fn is_empty(&self) -> bool {
        self.touched.is_empty() && !self.look
    }

    /// What the next look must know.
    fn take(&mut self, now: Instant) -> Hints {
        self.look = false;
        self.busy.retain(|_, since| now.duration_since(*since) < BUSY_MAX);
        let touched = std::mem::take(&mut self.touched);
        let (waiting, touched) = touched.into_iter().partition(|file| self.busy.contains_key(file));
        // A file that is still written to stays touched, for when it is closed or given up on.
        self.touched = waiting;
        Hints { touched, busy: self.busy.keys().cloned().collect() }
    }

    fn note(&mut self, tenant: &str, event: &Event<std::ffi::OsString>, now: Instant) {
        let Some(name) = event.name.as_ref().and_then(|name| name.to_str()) else {
            self.look = true;
            return;
        };
        let file = (tenant.to_owned(), name.to_owned());
        if event.mask.contains(EventMask::MODIFY) {
            self.busy.entry(file.clone()).or_insert(now);
        } else {
            self.busy.remove(&file);
        }
        self.touched.insert(file);
    }
}

struct Watcher {
    root: PathBuf,
    events: EventStream<Vec<u8>>,
    watches: Watches,
    /// Which directory a descriptor watches; `None` is the root.
    tenants: HashMap<WatchDescriptor, Option<String>>,
    pending: Pending,
}

impl Watcher {
    async fn run(mut self, mut directory: Directory, scans: mpsc::Sender<Scan>) {
        let mut told: Option<Scan> = None;
        loop {
            self.follow_tenants();
            let hints = self.pending.take(Instant::now());
            let looked = tokio::task::spawn_blocking(move || {
                let scan = directory.scan_with(&hints);
                (directory, scan)
            });
            // The task only fails with the runtime.
            let Ok((same, scan)) = looked.await else { return };
            directory = same;
            let wait = if scan.is_moving { QUIET } else { LOOK_EVERY };
            let is_news = told.as_ref().is_none_or(|told| !scan.changed.is_empty() || scan.diagnostics != told.diagnostics);
            if is_news {
                tracing::debug!(tenants = scan.changed.len(), "configuration files changed");
                told = Some(Scan { changed: Vec::new(), ..scan.clone() });
                if scans.send(scan).await.is_err() {
                    return;
                }
            }
            if !self.settle(wait).await {
                return;
            }
        }
    }

    /// Waits for a change and then for quiet, or until it is time to look anyhow. False if no more events can come.
    async fn settle(&mut self, wait: Duration) -> bool {
        let mut until = Instant::now() + wait;
        let mut latest: Option<Instant> = None;
        loop {
            match timeout_at(until, self.events.next()).await {
                Err(_) => return true,
                Ok(None) => return false,
                Ok(Some(Err(error))) => {
                    tracing::warn!(%error, "inotify failed; looking at all files");
                    self.pending.look = true;
                }
                Ok(Some(Ok(event))) => self.note(&event),
            }
            if !self.pending.is_empty() {
                let now = Instant::now();
                until = (now + QUIET).min(*latest.get_or_insert(now + DELAY_MAX));
            }
        }
    }

    fn note(&mut self, event: &Event<std::ffi::OsString>) {
        match self.tenants.get(&event.wd) {
            Some(Some(tenant)) => {
                let tenant = tenant.clone();
                self.pending.note(&tenant, event, Instant::now());
            }
            Some(None) | None => self.pending.look = true,
        }
        if event.mask.contains(EventMask::IGNORED) {
            self.tenants.remove(&event.wd);
        }
    }

    /// Watches the root or a tenant's directory; watching the same again changes nothing.
    fn follow(&mut self, tenant: Option<&str>) -> std::io::Result<()> {
        let whole =
            WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVE | WatchMask::DELETE_SELF | WatchMask::MOVE_SELF | WatchMask::ONLYDIR;
        let (path, mask) = match tenant {
            None => (self.root.clone(), whole),
            Some(tenant) => (self.root.join(tenant), whole | WatchMask::MODIFY | WatchMask::CLOSE_WRITE | WatchMask::ATTRIB),
        };
        let descriptor = self.watches.add(path, mask)?;
        self.tenants.insert(descriptor, tenant.map(str::to_owned));
        Ok(())
    }

    /// Watches every directory there is now. It is done before the look, so that nothing can come between.
    fn follow_tenants(&mut self) {
        let mut failed = self.follow(None).err();
        let entries = std::fs::read_dir(&self.root).into_iter().flatten().flatten();
        let directories = entries.filter(|entry| entry.path().is_dir()).filter_map(|entry| entry.file_name().into_string().ok());
        for name in directories.filter(|name| TenantName::new(name).is_ok()).collect::<Vec<_>>() {
            failed = self.follow(Some(&name)).err().or(failed);
        }
        if let Some(error) = failed {
            tracing::warn!(%error, seconds = LOOK_EVERY.as_secs(), "cannot watch all configuration directories; looking at intervals");
        }
    }
}
