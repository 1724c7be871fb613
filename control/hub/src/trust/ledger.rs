//! What was issued to whom: on disk before the certificate leaves, so that it can be revoked; in memory to be asked. Many requests at once
//! cost one disk write. Nothing leaves the record before its end, since what is not on record cannot be revoked: so each entry is on the
//! account of a tenant or the provider, and what is asked for again and again lives short.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_model::identity::components;
use canal_model::ids::TenantName;
use canal_runtime::{ShareHolder, ShareRefusal, TenantLimit, TenantPermit};
use canal_store::{DomainName, Store, StoreError, StoredCertificate};
use tokio::sync::{mpsc, oneshot};

/// Certificates on record, of all trust domains together: those that have not ended.
pub const ISSUED_MAX: usize = 500_000;
/// Certificates of one identity that one holder may have on record with their whole life: two for a renewal, and some restarts.
pub const CERTIFICATES_PER_HOLDER_MAX: usize = 8;
/// Longest life of those beyond [`CERTIFICATES_PER_HOLDER_MAX`], seconds: a holder that starts again and again is served all the same, and
/// what it has on record stays little.
pub const REPEATED_LIFETIME_SECONDS: u64 = 600;
/// Entries in one transaction.
const BATCH_MAX: usize = 256;
/// Entries that may wait for the disk.
const QUEUE_MAX: usize = 1024;

/// Why a certificate could not be put on record.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LedgerError {
    #[error(
        "{holder} has {used} certificates on record that have not ended, and its share is {max} ({}); fix: let them live shorter, or have \
         the provider set spec.shares.certificates of the Tenant", .refusal.reason()
    )]
    Full { holder: ShareHolder, used: u64, max: u64, refusal: ShareRefusal },
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

/// The record in memory.
struct Live {
    rows: HashMap<DomainName, BTreeMap<String, Arc<StoredCertificate>>>,
    /// How many each holder has of each identity, by a hash of both: a collision costs a shorter life.
    held: HashMap<u64, usize>,
    seed: RandomState,
    limit: TenantLimit,
    accounts: HashMap<ShareHolder, Account>,
}

/// What one account has.
struct Account {
    /// Certificates on record.
    used: u64,
    /// How many of them the permit is for: fewer, where more than its share were on record at the start.
    permitted: u64,
    permit: TenantPermit,
}

/// On whose account a certificate is: one of a tenant's identity on the tenant's, one of a component's own on its owner's.
fn account(name: &DomainName, holder: &str) -> ShareHolder {
    if *name != components() {
        return ShareHolder::Tenant(name.0.clone());
    }
    // As a principal is written: "node alpha/n1", "keyserver alpha/ks1", "gateway gw-1".
    let tenant = holder.split_once(' ').and_then(|(_, rest)| rest.split_once('/')).and_then(|(tenant, _)| TenantName::new(tenant).ok());
    tenant.map_or(ShareHolder::Provider, ShareHolder::Tenant)
}

impl Live {
    fn new(limit: TenantLimit) -> Self {
        Self { rows: HashMap::new(), held: HashMap::new(), seed: RandomState::new(), limit, accounts: HashMap::new() }
    }

    fn seat(&self, name: &DomainName, holder: &str, identity: &str, names: &[String]) -> u64 {
        self.seed.hash_one((name, holder, identity, names))
    }

    /// Takes a place on an account, before the entry is written.
    fn take(&mut self, holder: &ShareHolder) -> Result<(), ShareRefusal> {
        if let Some(account) = self.accounts.get_mut(holder) {
            account.permit.grow(1)?;
            (account.used, account.permitted) = (account.used + 1, account.permitted + 1);
            return Ok(());
        }
        let permit = self.limit.take(holder, 1)?;
        self.accounts.insert(holder.clone(), Account { used: 1, permitted: 1, permit });
        Ok(())
    }

    fn give_back(&mut self, holder: &ShareHolder) {
        let Some(account) = self.accounts.get_mut(holder) else { return };
        account.used = account.used.saturating_sub(1);
        if account.used < account.permitted {
            account.permit.shrink(1);
            account.permitted -= 1;
        }
        if account.used == 0 {
            self.accounts.remove(holder);
        }
    }

    fn insert(&mut self, name: DomainName, row: StoredCertificate) {
        let seat = self.seat(&name, &row.holder, &row.identity, &row.names);
        let before = self.rows.entry(name).or_default().insert(row.serial.clone(), Arc::new(row));
        *self.held.entry(seat).or_default() += usize::from(before.is_none());
    }

    fn prune(&mut self, now: u64) {
        let mut rows = std::mem::take(&mut self.rows);
        for (name, of_domain) in &mut rows {
            of_domain.retain(|_, row| {
                let stays = row.until >= now;
                if !stays {
                    let seat = self.seat(name, &row.holder, &row.identity, &row.names);
                    if let Some(held) = self.held.get_mut(&seat) {
                        *held -= 1;
                        if *held == 0 {
                            self.held.remove(&seat);
                        }
                    }
                    self.give_back(&account(name, &row.holder));
                }
                stays
            });
        }
        rows.retain(|_, of_domain| !of_domain.is_empty());
        self.rows = rows;
    }
}

/// The record of a controller.
pub(crate) struct Ledger {
    live: Arc<Mutex<Live>>,
    queue: mpsc::Sender<Entry>,
}

fn locked(live: &Mutex<Live>) -> MutexGuard<'_, Live> {
    // An insertion leaves the map whole.
    live.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ledger {
    /// Takes up what the store knows and has not ended.
    pub(crate) fn open(store: Arc<Store>, limit: TenantLimit, now: u64) -> Result<Self, StoreError> {
        store.prune_issued(now)?;
        let mut live = Live::new(limit);
        for (name, row) in store.issued()? {
            let account = account(&name, &row.holder);
            if live.take(&account).is_err()
                && let Some(account) = live.accounts.get_mut(&account)
            {
                // More than its share from before: it stays on record, and the account gets no more until so many have ended.
                account.used += 1;
            }
            live.insert(name, row);
        }
        let live = Arc::new(Mutex::new(live));
        let (queue, entries) = mpsc::channel(QUEUE_MAX);
        let held = live.clone();
        let clerk = std::thread::Builder::new().name("canal-ledger".into());
        clerk
            .spawn(move || write(&store, &held, entries))
            .map_err(|e| StoreError::Disk { path: "the ledger's thread".into(), why: e.to_string() })?;
        Ok(Self { live, queue })
    }

    /// Puts a certificate on record; when it returns `Ok` it is on disk.
    pub(crate) async fn add(&self, name: DomainName, row: StoredCertificate) -> Result<(), LedgerError> {
        let holder = account(&name, &row.holder);
        {
            let mut live = locked(&self.live);
            if let Err(refusal) = live.take(&holder) {
                let (used, max) = (live.accounts.get(&holder).map_or(0, |account| account.used), live.limit.max(&holder));
                return Err(LedgerError::Full { holder, used, max, refusal });
            }
        }
        let (answer, done) = oneshot::channel();
        self.queue.send(Entry { row: (name, row), answer }).await.map_err(|_| LedgerError::Stopping)?;
        match done.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(StoreError::Disk { path: "the record of certificates".into(), why: e.to_string() }.into()),
            Err(_) => Err(LedgerError::Stopping),
        }
    }

    /// How many certificates of an identity, with these names, a holder has on record.
    pub(crate) fn held(&self, name: &DomainName, holder: &str, identity: &str, names: &[String]) -> usize {
        let live = locked(&self.live);
        live.held.get(&live.seat(name, holder, identity, names)).copied().unwrap_or(0)
    }

    /// All of a trust domain, by serial.
    pub(crate) fn of(&self, name: &DomainName) -> Vec<Arc<StoredCertificate>> {
        locked(&self.live).rows.get(name).map(|rows| rows.values().cloned().collect()).unwrap_or_default()
    }

    /// Forgets what has ended.
    pub(crate) fn prune(&self, store: &Store, now: u64) -> Result<usize, StoreError> {
        let gone = store.prune_issued(now)?;
        locked(&self.live).prune(now);
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
        {
            let mut live = locked(live);
            for (name, row) in rows {
                if done.is_ok() {
                    live.insert(name, row);
                } else {
                    live.give_back(&account(&name, &row.holder));
                }
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

    fn limit(capacity: u64, percent: u8) -> TenantLimit {
        let kind = canal_model::share::ShareKind::Certificates;
        let give_way = canal_runtime::GiveWay::Oldest;
        let limit = TenantLimit::new(canal_runtime::TenantLimitConfig { kind, capacity, reserve: 0, give_way });
        limit.set_default_share(canal_model::share::Share::Percent(percent));
        limit
    }

    #[test]
    fn a_certificate_is_on_the_account_of_whoever_can_make_more_of_them() {
        let alpha: DomainName = ("alpha".parse().unwrap(), "alpha.example".parse().unwrap());
        for (name, holder, want) in [
            (&alpha, "gateway gw-1", "alpha"),
            (&alpha, "node alpha/n1", "alpha"),
            (&components(), "node alpha/n1", "alpha"),
            (&components(), "keyserver beta/ks1", "beta"),
            (&components(), "keyserver ks1", "provider"),
            (&components(), "gateway gw-1", "provider"),
        ] {
            assert_eq!(account(name, holder).to_string(), want, "{holder} of {}", name.1);
        }
    }

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
        let limit = limit(40, 50);
        let ledger = Arc::new(Ledger::open(store.clone(), limit.clone(), 0).unwrap());
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
        let full = ledger.add(name.clone(), row("x", "n1", "r", 0, 9)).await.unwrap_err().to_string();
        assert!(full.contains("alpha has 20 certificates") && full.contains("share is 20") && full.contains("fix: "), "{full}");
        let other: DomainName = ("beta".parse().unwrap(), "beta.example".parse().unwrap());
        ledger.add(other, row("y", "m1", "r", 0, 9)).await.unwrap();
        assert_eq!(ledger.prune(&store, 25).unwrap(), 16);
        assert_eq!((store.issued().unwrap().len(), ledger.of(&name).len()), (5, 5));
        ledger.add(name.clone(), row("x", "n1", "r", 0, 99)).await.unwrap();
        assert_eq!(limit.usage().used, 6, "what has ended is no longer on the account");
        drop(ledger);
        let again = Ledger::open(store, super::tests::limit(40, 50), 28).unwrap();
        assert_eq!(again.of(&name).len(), 3, "what had ended meanwhile is gone");
    }
}
