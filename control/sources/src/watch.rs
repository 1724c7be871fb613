//! Watches a directory of YAML files per tenant by inotify and decides when to scan. `directory`
//! reads and interprets the files.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use canal_model::ids::TenantName;
use futures::StreamExt;
use inotify::{Event, EventMask, EventStream, Inotify, WatchDescriptor, WatchMask, Watches};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use crate::directory::{Directory, Hints, ScanResult};

/// The files are scanned only after this time without events.
/// An editor or a copy writes several files within it, and a scan of half of them would be one more
/// change. Nobody measured this value.
pub const DEBOUNCE: Duration = Duration::from_millis(50);
/// Upper bound on the delay from the first event to the scan, even if events continue.
/// Ten times [`DEBOUNCE`]: files that always change are still read twice a second.
pub const DELAY_MAX: Duration = Duration::from_millis(500);
/// A file that stays open for writing is read anyway after this time.
/// A program may forget to close a file, whose changes would never be read. Nobody measured this
/// value; a write of the largest file (8 MiB) takes far less.
pub const BUSY_MAX: Duration = Duration::from_secs(5);
/// All files are scanned at this interval even without an event, because networked file systems
/// report none.
/// It is how late a change on such a file system may be. Nobody measured it; a scan reads only
/// files whose metadata changed.
pub const RESCAN_INTERVAL: Duration = Duration::from_secs(30);
/// Scan results that wait for the receiver. If there are more, the watcher waits too.
/// The writer is behind then, and files that change meanwhile are in the next scan. Nobody measured
/// this value.
const SCANS_WAITING_MAX: usize = 4;
/// Bytes of inotify events that one read takes. An event has at most 272 bytes (inotify(7): 16 and
/// a name of at most 256), so this holds at least 240.
const EVENT_BYTES_MAX: usize = 64 << 10;

/// The reason that a directory cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The kernel provides no inotify instance, or refuses to watch this directory.
    #[error(
        "cannot watch {path}: {source}; fix: create the directory, or raise fs.inotify.max_user_instances and max_user_watches if they are used up"
    )]
    Inotify {
        path: PathBuf,
        source: std::io::Error,
    },
}

/// A watched directory. Dropping it stops the watch.
#[derive(Debug)]
pub struct DirectoryWatch {
    scans: mpsc::Receiver<ScanResult>,
    task: JoinHandle<()>,
}

impl DirectoryWatch {
    /// Starts the watch; must be called inside a tokio runtime. To replace a file safely, rename a
    /// complete one over it.
    ///
    /// # Errors
    /// Returns [`WatchError`] if inotify is not available or `root` cannot be watched.
    pub fn open(root: &Path) -> Result<Self, WatchError> {
        let explain = |source| WatchError::Inotify {
            path: root.to_owned(),
            source,
        };
        let inotify = Inotify::init().map_err(explain)?;
        let watches = inotify.watches();
        let events = inotify
            .into_event_stream(vec![0; EVENT_BYTES_MAX])
            .map_err(explain)?;
        let mut watcher = InotifyReader {
            root: root.to_owned(),
            events,
            watches,
            tenants: HashMap::new(),
            pending: Pending::default(),
        };
        watcher.follow(None).map_err(explain)?;
        let (sender, scans) = mpsc::channel(SCANS_WAITING_MAX);
        Ok(Self {
            scans,
            task: tokio::spawn(watcher.run(Directory::new(root), sender)),
        })
    }

    /// Waits for the next change; the first result contains every tenant. It is cancel-safe. It
    /// returns `None` only while the runtime shuts down.
    pub async fn next(&mut self) -> Option<ScanResult> {
        self.scans.recv().await
    }
}

impl Drop for DirectoryWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Events since the last scan.
#[derive(Default)]
struct Pending {
    touched: BTreeSet<(String, String)>,
    /// Files that are open for writing, with the time of their first write event.
    busy: BTreeMap<(String, String), Instant>,
    /// A full scan is due because a tenant was added or removed, or events were lost.
    full_scan_due: bool,
}

impl Pending {
    fn is_empty(&self) -> bool {
        self.touched.is_empty() && !self.full_scan_due
    }

    /// Returns the hints for the next scan and resets what that scan covers.
    fn take(&mut self, now: Instant) -> Hints {
        self.full_scan_due = false;
        self.busy
            .retain(|_, since| now.duration_since(*since) < BUSY_MAX);
        let touched = std::mem::take(&mut self.touched);
        let (waiting, touched) = touched
            .into_iter()
            .partition(|file| self.busy.contains_key(file));
        // A file that is still being written stays touched, so that it is read when it is closed or
        // `BUSY_MAX` is over.
        self.touched = waiting;
        Hints {
            touched,
            busy: self.busy.keys().cloned().collect(),
        }
    }

    fn note(&mut self, tenant: &str, event: &Event<std::ffi::OsString>, now: Instant) {
        // An event without a file name is about the directory itself, or reports a queue overflow.
        let Some(name) = event.name.as_ref().and_then(|name| name.to_str()) else {
            self.full_scan_due = true;
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

struct InotifyReader {
    root: PathBuf,
    events: EventStream<Vec<u8>>,
    watches: Watches,
    /// The tenant whose directory a descriptor watches; `None` is the root.
    tenants: HashMap<WatchDescriptor, Option<String>>,
    pending: Pending,
}

impl InotifyReader {
    async fn run(mut self, mut directory: Directory, scans: mpsc::Sender<ScanResult>) {
        let mut reported: Option<ScanResult> = None;
        loop {
            // Watches are added before the scan, so that a change during the scan causes an event.
            self.follow_tenants();
            let hints = self.pending.take(Instant::now());
            let scanned = tokio::task::spawn_blocking(move || {
                let scan = directory.scan_with(&hints);
                (directory, scan)
            });
            // The blocking task fails only when the runtime shuts down.
            let Ok((same, scan)) = scanned.await else {
                return;
            };
            directory = same;
            // A file that is being written is read soon after it has settled.
            let wait = if scan.is_moving {
                DEBOUNCE
            } else {
                RESCAN_INTERVAL
            };
            // The first scan is always sent, even if there are no tenants; later ones only if they
            // contain news.
            let is_news = reported.as_ref().is_none_or(|reported| {
                !scan.changed.is_empty() || scan.diagnostics != reported.diagnostics
            });
            if is_news {
                tracing::debug!(
                    tenants = scan.changed.len(),
                    "sources: configuration files changed"
                );
                // Only the diagnostics are compared with the next scan.
                reported = Some(ScanResult {
                    changed: Vec::new(),
                    ..scan.clone()
                });
                // The receiver ends with the controller only.
                if scans.send(scan).await.is_err() {
                    return;
                }
            }
            if !self.settle(wait).await {
                // The source of events has ended, so that no change would be noticed.
                return;
            }
        }
    }

    /// Waits for an event and then for a quiet period, at most until the next scan is due. Returns
    /// false if no more events can arrive.
    async fn settle(&mut self, wait: Duration) -> bool {
        let mut until = Instant::now() + wait;
        let mut latest: Option<Instant> = None;
        loop {
            match timeout_at(until, self.events.next()).await {
                Err(_) => return true,
                Ok(None) => return false,
                Ok(Some(Err(error))) => {
                    tracing::warn!(%error, "sources: inotify failed; reading all files");
                    self.pending.full_scan_due = true;
                }
                Ok(Some(Ok(event))) => self.note(&event),
            }
            if !self.pending.is_empty() {
                let now = Instant::now();
                until = (now + DEBOUNCE).min(*latest.get_or_insert(now + DELAY_MAX));
            }
        }
    }

    fn note(&mut self, event: &Event<std::ffi::OsString>) {
        match self.tenants.get(&event.wd) {
            Some(Some(tenant)) => {
                let tenant = tenant.clone();
                self.pending.note(&tenant, event, Instant::now());
            }
            Some(None) | None => self.pending.full_scan_due = true,
        }
        if event.mask.contains(EventMask::IGNORED) {
            self.tenants.remove(&event.wd);
        }
    }

    /// Adds a watch on the root or on a tenant's directory. Adding the same watch again has no
    /// effect.
    fn follow(&mut self, tenant: Option<&str>) -> std::io::Result<()> {
        let whole = WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::MOVE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        let (path, mask) = match tenant {
            None => (self.root.clone(), whole),
            Some(tenant) => (
                self.root.join(tenant),
                whole | WatchMask::MODIFY | WatchMask::CLOSE_WRITE | WatchMask::ATTRIB,
            ),
        };
        let descriptor = self.watches.add(path, mask)?;
        self.tenants.insert(descriptor, tenant.map(str::to_owned));
        Ok(())
    }

    /// Watches every directory that exists now. Call it before the scan, so that no change in
    /// between is missed.
    fn follow_tenants(&mut self) {
        let mut failed = self.follow(None).err();
        let entries = std::fs::read_dir(&self.root)
            .into_iter()
            .flatten()
            .flatten();
        let directories = entries
            .filter(|entry| entry.path().is_dir())
            .filter_map(|entry| entry.file_name().into_string().ok());
        for name in directories
            .filter(|name| TenantName::new(name).is_ok())
            .collect::<Vec<_>>()
        {
            failed = self.follow(Some(&name)).err().or(failed);
        }
        if let Some(error) = failed {
            tracing::warn!(%error, seconds = RESCAN_INTERVAL.as_secs(), "sources: cannot watch all configuration directories; scanning them at intervals");
        }
    }
}
