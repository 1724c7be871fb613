//! What was issued to whom: on disk before the certificate leaves, so that it can be revoked; in memory to be asked. Many requests at once
//! cost one disk write.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_store::{DomainName, Store, StoreError, StoredCertificate};
use tokio::sync::{mpsc, oneshot};

/// Certificates of one trust domain on record: those that have not ended.
pub const ISSUED_MAX: usize = 200_000;
/// Entries in one transaction.
const BATCH_MAX: usize = 256;
/// Entries that may wait for the disk.
const QUEUE_MAX: usize = 1024;

/// Why a certificate could not be put on record.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LedgerError {
    #[error("{limit} certificates of the trust domain are on record and have not ended, which is the limit; let them live shorter")]
    Full { limit: usize },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the controller is stopping; try again")]
    Stopping,
}

type Answer = oneshot::Sender<Result<(), Arc<StoreError>>>;

struct Entry {
    row: (DomainName, StoredCertificate),
    answer: Answer,
}

type Live = HashMap<DomainName, BTreeMap<String, Arc<StoredCertificate>>>;

/// The record of a controller.
pub(crate) struct Ledger {
    live: Arc<Mutex<Live>>,
    queue: mpsc::Sender<Entry>,
    limit: usize,
}

fn locked(live: &Mutex<Live>) -> MutexGuard<'_, Live> {
    // An insertion leaves the map whole.
    live.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ledger {
    /// Takes up what the store knows and has not ended.
    pub(crate) fn open(store: Arc<Store>, limit: usize, now: u64) -> Result<Self, StoreError> {
        store.prune_issued(now)?;
        let mut live = Live::new();
        for (name, row) in store.issued()? {
            live.entry(name).or_default().insert(row.serial.clone(), Arc::new(row));
        }
        let live = Arc::new(Mutex::new(live));
        let (queue, entries) = mpsc::channel(QUEUE_MAX);
        let held = live.clone();
        let clerk = std::thread::Builder::new().name("canal-ledger".into());
        clerk
            .spawn(move || write(&store, &held, entries))
            .map_err(|e| StoreError::Disk { path: "the ledger's thread".into(), why: e.to_string() })?;
        Ok(Self { live, queue, limit })
    }

    /// Puts a certificate on record; when it returns `Ok` it is on disk.
    pub(crate) async fn add(&self, name: DomainName, row: StoredCertificate) -> Result<(), LedgerError> {
        if locked(&self.live).get(&name).is_some_and(|rows| rows.len() >= self.limit) {
            return Err(LedgerError::Full { limit: self.limit });
        }
        let (answer, done) = oneshot::channel();
        self.queue.send(Entry { row: (name, row), answer }).await.map_err(|_| LedgerError::Stopping)?;
        match done.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(StoreError::Disk { path: "the record of certificates".into(), why: e.to_string() }.into()),
            Err(_) => Err(LedgerError::Stopping),
        }
    }

    /// All of a trust domain, by serial.
    pub(crate) fn of(&self, name: &DomainName) -> Vec<Arc<StoredCertificate>> {
        locked(&self.live).get(name).map(|rows| rows.values().cloned().collect()).unwrap_or_default()
    }

    /// Forgets what has ended.
    pub(crate) fn prune(&self, store: &Store, now: u64) -> Result<usize, StoreError> {
        let gone = store.prune_issued(now)?;
        let mut live = locked(&self.live);
        live.values_mut().for_each(|rows| rows.retain(|_, row| row.until >= now));
        live.retain(|_, rows| !rows.is_empty());
        Ok(gone)
    }
}

/// Writes until the ledger is dropped.
fn write(store: &Store, live: &Mutex<Live>, mut entries: mpsc::Receiver<Entry>) {
    while let Some(first) = entries.blocking_recv() {
        let mut batch = vec![first];
        while batch.len() < BATCH_MAX
            && let Ok(next) = entries.try_recv()
        {
            batch.push(next);
        }
        let (rows, answers): (Vec<_>, Vec<Answer>) = batch.into_iter().map(|e| (e.row, e.answer)).unzip();
        let done = store.add_issued(&rows).map_err(Arc::new);
        if done.is_ok() {
            let mut live = locked(live);
            for (name, row) in rows {
                live.entry(name).or_default().insert(row.serial.clone(), Arc::new(row));
            }
        }
        for answer in answers {
            // Who asked may have gone; the certificate is on record all the same.
            let _ = answer.send(done.clone());
        }
    }
}

/// Certificates of `root` that may still be shown: not ended, not revoked, and their holder has none by another root in their place.
pub(crate) fn in_use<'a>(
    rows: &'a [Arc<StoredCertificate>],
    root: &str,
    is_revoked: impl Fn(&str) -> bool,
    now: u64,
) -> impl Iterator<Item = &'a Arc<StoredCertificate>> {
    type Seat<'a> = (&'a str, &'a str, &'a [String]);
    let seat = |row: &'a StoredCertificate| -> Seat<'a> { (&row.holder, &row.identity, &row.names) };
    let mut newer: HashMap<Seat<'a>, u64> = HashMap::new();
    let mut kept = Vec::new();
    for row in rows.iter().filter(|row| row.until > now) {
        if row.root != root {
            let at = newer.entry(seat(row)).or_default();
            *at = row.issued.max(*at);
        } else if !is_revoked(&row.serial) {
            kept.push(row);
        }
    }
    kept.into_iter().filter(move |row| newer.get(&seat(row)).is_none_or(|at| *at < row.issued))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(serial: &str, holder: &str, root: &str, issued: u64, until: u64) -> StoredCertificate {
        let identity = "spiffe://alpha.example/ns/a/sa/b".into();
        StoredCertificate { serial: serial.into(), identity, names: vec![], holder: holder.into(), root: root.into(), issued, until }
    }

    #[test]
    fn what_is_in_use_of_a_root() {
        let mut named = row("g", "n3", "old", 1, 100);
        named.names = vec!["a.shop".into()];
        let rows: Vec<Arc<StoredCertificate>> = [
            row("a", "n1", "old", 1, 100),
            row("b", "n2", "old", 1, 100),
            row("c", "n2", "new", 2, 100),
            row("d", "n3", "old", 1, 50),
            row("e", "n3", "old", 3, 100),
            row("f", "n4", "old", 1, 100),
            named,
            row("h", "n3", "new", 4, 100),
        ]
        .into_iter()
        .map(Arc::new)
        .collect();
        let got: Vec<&str> = in_use(&rows, "old", |serial| serial == "f", 60).map(|r| r.serial.as_str()).collect();
        assert_eq!(got, ["a", "g"], "b and e were replaced, d has ended, f is revoked, g is another certificate of n3's");
    }

    #[tokio::test]
    async fn a_record_is_on_disk_when_it_is_answered_and_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(Store::open(dir.path(), canal_store::Limits::default()).unwrap());
        let name: DomainName = ("alpha".parse().unwrap(), "alpha.example".parse().unwrap());
        let ledger = Arc::new(Ledger::open(store.clone(), 20, 0).unwrap());
        let adds: Vec<_> = (0..20)
            .map(|i| {
                let (ledger, name) = (ledger.clone(), name.clone());
                tokio::spawn(async move { ledger.add(name, row(&format!("{i:02}"), "n1", "r", 0, 10 + i)).await })
            })
            .collect();
        for add in adds {
            add.await.unwrap().unwrap();
        }
        assert_eq!((store.issued().unwrap().len(), ledger.of(&name).len()), (20, 20));
        assert!(matches!(ledger.add(name.clone(), row("x", "n1", "r", 0, 9)).await, Err(LedgerError::Full { limit: 20 })));
        assert_eq!(ledger.prune(&store, 25).unwrap(), 15);
        assert_eq!((store.issued().unwrap().len(), ledger.of(&name).len()), (5, 5));
        ledger.add(name.clone(), row("x", "n1", "r", 0, 99)).await.unwrap();
        drop(ledger);
        let again = Ledger::open(store, 20, 28).unwrap();
        assert_eq!(again.of(&name).len(), 3, "what had ended meanwhile is gone");
    }
}
