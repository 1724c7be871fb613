//! The log of issued certificates. An entry is on disk before its certificate is returned, so that
//! the certificate can be revoked; a copy in memory is for queries. Many requests at once cost one
//! disk write. No entry leaves the log before its certificate expires, because what is not in the
//! log cannot be revoked. Each entry therefore counts against a tenant or the provider.
//! Certificates that are requested again and again live only briefly. Start at
//! [`IssuanceLog::add`].

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_model::identity::components;
use canal_model::ids::TenantName;
use canal_runtime::{ShareHolder, ShareRefusal, TenantLimit, TenantPermit};
use canal_store::{DomainName, Store, StoreError, StoredCertificate};
use tokio::sync::{mpsc, oneshot};

/// Maximum number of certificates in the log that have not expired, of all trust domains together.
/// A certificate is renewed at half its life, so that two of an identity are unexpired: 250,000
/// identities fit.
pub const ISSUED_MAX: usize = 500_000;
/// Maximum number of certificates with full lifetime that one holder may have of one identity: two
/// for a renewal, and some restarts.
/// Six restarts in a day keep the full lifetime. Nobody measured this value.
pub const CERTIFICATES_PER_HOLDER_MAX: usize = 8;
/// Maximum lifetime in seconds of certificates beyond [`CERTIFICATES_PER_HOLDER_MAX`]. A holder
/// that starts again and again is still served, and its entries stay few.
/// Ten minutes are 1/144 of the default lifetime. Nobody measured this value.
pub const REPEATED_LIFETIME_SECONDS: u64 = 600;
/// Maximum number of entries in one transaction.
/// All of them wait for one write to the disk. Nobody measured this value.
const BATCH_MAX: usize = 256;
/// Maximum number of entries that wait for the disk.
/// These are four transactions of [`BATCH_MAX`]. Requests beyond them wait.
const QUEUE_MAX: usize = 1024;

/// Reason why a certificate could not be added to the log.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IssuanceLogError {
    #[error(
        "{holder} has {used} unexpired certificates on record, and its share is {max} ({}); fix: shorten their lifetime, or have the provider set spec.shares.certificates of the Tenant", .refusal.reason()
    )]
    Full {
        holder: ShareHolder,
        used: u64,
        max: u64,
        refusal: ShareRefusal,
    },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the controller is stopping; fix: try again")]
    Stopping,
}

type RecordAck = oneshot::Sender<Result<(), Arc<StoreError>>>;

/// An entry that waits for the disk.
struct IssuanceEntry {
    row: (DomainName, StoredCertificate),
    answer: RecordAck,
}

/// The copy of the log in memory, and its accounts.
struct ActiveCertificates {
    rows: HashMap<DomainName, BTreeMap<String, Arc<StoredCertificate>>>,
    /// Number of certificates that each holder has of each identity, by a hash of both: a collision
    /// costs a shorter lifetime.
    counts: HashMap<u64, usize>,
    seed: RandomState,
    limit: TenantLimit,
    accounts: HashMap<ShareHolder, AccountUsage>,
}

/// The entries that count against one holder.
struct AccountUsage {
    /// Number of certificates in the log.
    used: u64,
    /// Number of these that the permit covers. It is smaller if more than the share were in the log
    /// at the start.
    permitted: u64,
    permit: TenantPermit,
}

/// Returns the holder that a certificate counts against. A tenant's identity counts against the
/// tenant, and a component's own identity against its owner.
fn account(name: &DomainName, holder: &str) -> ShareHolder {
    if *name != components() {
        return ShareHolder::Tenant(name.0.clone());
    }
    // The holder is the text form of a principal: "node alpha/n1", "keyserver alpha/ks1", "gateway
    // gw-1".
    let tenant = holder
        .split_once(' ')
        .and_then(|(_, rest)| rest.split_once('/'))
        .and_then(|(tenant, _)| TenantName::new(tenant).ok());
    tenant.map_or(ShareHolder::Provider, ShareHolder::Tenant)
}

impl ActiveCertificates {
    fn new(limit: TenantLimit) -> Self {
        Self {
            rows: HashMap::new(),
            counts: HashMap::new(),
            seed: RandomState::new(),
            limit,
            accounts: HashMap::new(),
        }
    }

    /// Returns the hash of a holder and of what its certificate is for.
    fn holder_hash(
        &self,
        name: &DomainName,
        holder: &str,
        identity: &str,
        names: &[String],
    ) -> u64 {
        self.seed.hash_one((name, holder, identity, names))
    }

    /// Takes a permit for one certificate, before its entry is written.
    fn take(&mut self, holder: &ShareHolder) -> Result<(), ShareRefusal> {
        if let Some(account) = self.accounts.get_mut(holder) {
            account.permit.grow(1)?;
            (account.used, account.permitted) = (account.used + 1, account.permitted + 1);
            return Ok(());
        }
        let permit = self.limit.take(holder, 1)?;
        self.accounts.insert(
            holder.clone(),
            AccountUsage {
                used: 1,
                permitted: 1,
                permit,
            },
        );
        Ok(())
    }

    /// Gives back the permit of one certificate.
    fn give_back(&mut self, holder: &ShareHolder) {
        let Some(account) = self.accounts.get_mut(holder) else {
            return;
        };
        account.used = account.used.saturating_sub(1);
        // Entries over the share have no permit.
        if account.used < account.permitted {
            account.permit.shrink(1);
            account.permitted -= 1;
        }
        if account.used == 0 {
            self.accounts.remove(holder);
        }
    }

    /// Adds an entry that is on disk. An external CA may return a serial twice; the new entry then
    /// takes the place of the old one, whose permit is given back.
    fn insert(&mut self, name: DomainName, row: StoredCertificate) {
        let slot = self.holder_hash(&name, &row.holder, &row.identity, &row.names);
        *self.counts.entry(slot).or_default() += 1;
        let of_domain = self.rows.entry(name.clone()).or_default();
        if let Some(before) = of_domain.insert(row.serial.clone(), Arc::new(row)) {
            self.discount(&name, &before);
        }
    }

    /// Gives back what an entry that leaves the log has counted against its holder.
    fn discount(&mut self, name: &DomainName, row: &StoredCertificate) {
        let slot = self.holder_hash(name, &row.holder, &row.identity, &row.names);
        if let Some(count) = self.counts.get_mut(&slot) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&slot);
            }
        }
        self.give_back(&account(name, &row.holder));
    }

    /// Removes the entries that have expired.
    fn prune(&mut self, now: u64) {
        let mut rows = std::mem::take(&mut self.rows);
        for (name, of_domain) in &mut rows {
            of_domain.retain(|_, row| {
                let stays = row.until >= now;
                if !stays {
                    self.discount(name, row);
                }
                stays
            });
        }
        rows.retain(|_, of_domain| !of_domain.is_empty());
        self.rows = rows;
    }
}

/// The issuance log of a controller.
pub(crate) struct IssuanceLog {
    live: Arc<Mutex<ActiveCertificates>>,
    queue: mpsc::Sender<IssuanceEntry>,
}

fn locked(live: &Mutex<ActiveCertificates>) -> MutexGuard<'_, ActiveCertificates> {
    // An insertion leaves the map consistent.
    live.lock().unwrap_or_else(PoisonError::into_inner)
}

impl IssuanceLog {
    /// Loads the entries that have not expired from the store, and starts the thread that writes
    /// new ones.
    pub(crate) fn open(
        store: Arc<Store>,
        limit: TenantLimit,
        now: u64,
    ) -> Result<Self, StoreError> {
        store.prune_issued(now)?;
        let mut live = ActiveCertificates::new(limit);
        for (name, row) in store.issued()? {
            let account = account(&name, &row.holder);
            if live.take(&account).is_err()
                && let Some(account) = live.accounts.get_mut(&account)
            {
                // Entries over the share stay in the log; the holder gets no more until enough have
                // expired.
                account.used += 1;
            }
            live.insert(name, row);
        }
        let live = Arc::new(Mutex::new(live));
        let (queue, entries) = mpsc::channel(QUEUE_MAX);
        let held = live.clone();
        let clerk = std::thread::Builder::new().name("canal-issuance-log".into());
        clerk
            .spawn(move || write(&store, &held, entries))
            .map_err(|e| StoreError::Disk {
                path: "the issuance log's thread".into(),
                why: e.to_string(),
            })?;
        Ok(Self { live, queue })
    }

    /// Adds a certificate to the log; it is on disk when this returns `Ok`.
    ///
    /// # Errors
    /// The holder has its whole share, the store failed, or the controller is stopping.
    pub(crate) async fn add(
        &self,
        name: DomainName,
        row: StoredCertificate,
    ) -> Result<(), IssuanceLogError> {
        let holder = account(&name, &row.holder);
        // The place in the queue comes first: a requester that leaves while it waits, or a queue
        // that ends, has taken nothing of the share.
        let slot = self
            .queue
            .reserve()
            .await
            .map_err(|_| IssuanceLogError::Stopping)?;
        {
            let mut live = locked(&self.live);
            if let Err(refusal) = live.take(&holder) {
                // A holder whose first certificate is refused has no account.
                let used = live.accounts.get(&holder).map_or(0, |account| account.used);
                let max = live.limit.max(&holder);
                return Err(IssuanceLogError::Full {
                    holder,
                    used,
                    max,
                    refusal,
                });
            }
        }
        let (answer, done) = oneshot::channel();
        // From here on the writing thread gives the permit back, if the entry does not get to the
        // disk.
        slot.send(IssuanceEntry {
            row: (name, row),
            answer,
        });
        match done.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(StoreError::Disk {
                path: "the record of certificates".into(),
                why: e.to_string(),
            }
            .into()),
            // The writing thread ended without an answer.
            Err(_) => Err(IssuanceLogError::Stopping),
        }
    }

    /// Returns the number of certificates of an identity, with these names, that a holder has in
    /// the log.
    pub(crate) fn count_active(
        &self,
        name: &DomainName,
        holder: &str,
        identity: &str,
        names: &[String],
    ) -> usize {
        let live = locked(&self.live);
        live.counts
            .get(&live.holder_hash(name, holder, identity, names))
            .copied()
            .unwrap_or(0)
    }

    /// Returns all certificates of a trust domain, sorted by serial.
    pub(crate) fn of(&self, name: &DomainName) -> Vec<Arc<StoredCertificate>> {
        locked(&self.live)
            .rows
            .get(name)
            .map(|rows| rows.values().cloned().collect())
            .unwrap_or_default()
    }

    /// Removes the certificates that have expired, and returns how many they were.
    pub(crate) fn prune(&self, store: &Store, now: u64) -> Result<usize, StoreError> {
        let gone = store.prune_issued(now)?;
        locked(&self.live).prune(now);
        Ok(gone)
    }
}

/// Writes entries until the log is dropped. Entries that wait share one transaction.
fn write(
    store: &Store,
    live: &Mutex<ActiveCertificates>,
    mut entries: mpsc::Receiver<IssuanceEntry>,
) {
    while let Some(first) = entries.blocking_recv() {
        let mut batch = vec![first];
        while batch.len() < BATCH_MAX
            && let Ok(next) = entries.try_recv()
        {
            batch.push(next);
        }
        let (rows, answers): (Vec<_>, Vec<RecordAck>) =
            batch.into_iter().map(|e| (e.row, e.answer)).unzip();
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
            // The requester may have disconnected. The certificate is in the log anyway.
            let _ = answer.send(done.clone());
        }
    }
}

/// Returns the certificates of `root` that may still be presented: not expired, not revoked, and
/// not replaced by one of another root that their holder has.
pub(crate) fn in_use<'a>(
    rows: &'a [Arc<StoredCertificate>],
    root: &str,
    is_revoked: impl Fn(&str) -> bool,
    now: u64,
) -> impl Iterator<Item = &'a Arc<StoredCertificate>> {
    type IssuanceSlot<'a> = (&'a str, &'a str, &'a [String]);
    let slot = |row: &'a StoredCertificate| -> IssuanceSlot<'a> {
        (&row.holder, &row.identity, &row.names)
    };
    let mut newer: HashMap<IssuanceSlot<'a>, u64> = HashMap::new();
    let mut candidates = Vec::new();
    for row in rows.iter().filter(|row| row.until > now) {
        if row.root != root {
            let at = newer.entry(slot(row)).or_default();
            *at = row.issued.max(*at);
        } else if !is_revoked(&row.serial) {
            candidates.push(row);
        }
    }
    candidates
        .into_iter()
        .filter(move |row| newer.get(&slot(row)).is_none_or(|at| *at < row.issued))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(capacity: u64, percent: u8) -> TenantLimit {
        let kind = canal_model::share::ShareKind::Certificates;
        let revocation_order = canal_runtime::RevocationOrder::OldestFirst;
        let limit = TenantLimit::new(canal_runtime::TenantLimitConfig {
            kind,
            capacity,
            reserve: 0,
            revocation_order,
        });
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
            assert_eq!(
                account(name, holder).to_string(),
                want,
                "{holder} of {}",
                name.1
            );
        }
    }

    fn row(serial: &str, holder: &str, root: &str, issued: u64, until: u64) -> StoredCertificate {
        let identity = "spiffe://alpha.example/ns/a/sa/b".into();
        StoredCertificate {
            serial: serial.into(),
            identity,
            names: vec![],
            holder: holder.into(),
            root: root.into(),
            issued,
            until,
        }
    }

    #[test]
    fn unexpired_certificates_of_a_root_are_counted() {
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
        let got: Vec<&str> = in_use(&rows, "old", |serial| serial == "f", 60)
            .map(|r| r.serial.as_str())
            .collect();
        assert_eq!(
            got,
            ["a", "g"],
            "b and e were replaced, d has ended, f is revoked, g is another certificate of n3's"
        );
    }

    #[test]
    fn certificates_of_ten_tenants_leave_some_to_an_eleventh() {
        let mut live = ActiveCertificates::new(limit(500, 10));
        let holder = |n: usize| ShareHolder::Tenant(format!("t{n}").parse().unwrap());
        let counts: Vec<_> = (0..10)
            .map(|n| (0..).take_while(|_| live.take(&holder(n)).is_ok()).count())
            .collect();
        assert!(counts[0] == 50 && counts[9] > 0, "{counts:?}");
        live.take(&holder(10)).unwrap();
        assert_eq!(live.take(&holder(8)).unwrap_err(), ShareRefusal::Threshold);
    }

    #[test]
    fn a_serial_that_is_returned_twice_counts_once() {
        let name: DomainName = ("alpha".parse().unwrap(), "alpha.example".parse().unwrap());
        let alpha = account(&name, "n1");
        let mut live = ActiveCertificates::new(limit(40, 50));
        for holder in ["n1", "n2"] {
            live.take(&alpha).unwrap();
            live.insert(name.clone(), row("a", holder, "r", 0, 10));
        }
        assert_eq!((live.accounts[&alpha].used, live.counts.len()), (1, 1));
        live.prune(11);
        assert!(live.accounts.is_empty() && live.counts.is_empty());
    }

    #[tokio::test]
    async fn a_request_that_never_reaches_the_disk_is_not_charged_to_the_share() {
        let name: DomainName = ("alpha".parse().unwrap(), "alpha.example".parse().unwrap());
        // One tenant may have half of the 40 certificates.
        let live = Arc::new(Mutex::new(ActiveCertificates::new(limit(40, 50))));
        // No thread takes entries from this queue.
        // One place: the second request finds the queue full and waits.
        let (queue, entries) = mpsc::channel(1);
        let log = Arc::new(IssuanceLog {
            live: live.clone(),
            queue,
        });
        let used = || {
            locked(&live)
                .accounts
                .values()
                .map(|account| account.used)
                .sum::<u64>()
        };
        let add = |serial: &'static str| {
            let (log, name) = (log.clone(), name.clone());
            tokio::spawn(async move { log.add(name, row(serial, "n1", "r", 0, 10)).await })
        };
        let first = add("a");
        // The first request takes its permit only after it has a place in the queue.
        while used() == 0 {
            tokio::task::yield_now().await;
        }
        let second = add("b");
        // Ten turns of the scheduler are enough for the second request to reach the queue.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        second.abort();
        assert!(second.await.unwrap_err().is_cancelled());
        assert_eq!(used(), 1, "the requester left while the queue was full");
        // The queue ends, and with it the entry of the first request.
        drop(entries);
        assert!(matches!(
            first.await.unwrap(),
            Err(IssuanceLogError::Stopping)
        ));
        assert!(matches!(
            add("c").await.unwrap(),
            Err(IssuanceLogError::Stopping)
        ));
        // No thread gives back what the first request took; the third one took nothing.
        assert_eq!(used(), 1, "the queue has ended");
    }

    #[tokio::test]
    async fn a_record_is_durable_before_the_answer_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(Store::open(dir.path(), canal_store::StoreLimits::default()).unwrap());
        let name: DomainName = ("alpha".parse().unwrap(), "alpha.example".parse().unwrap());
        // One tenant may have half of the 40 certificates.
        let limit = limit(40, 50);
        let log = Arc::new(IssuanceLog::open(store.clone(), limit.clone(), 0).unwrap());
        // The certificates end one second after the other, from 10 to 29.
        let adds: Vec<_> = (0..20)
            .map(|i| {
                let (log, name) = (log.clone(), name.clone());
                tokio::spawn(async move {
                    log.add(name, row(&format!("{i:02}"), "n1", "r", 0, 10 + i))
                        .await
                })
            })
            .collect();
        for add in adds {
            add.await.unwrap().unwrap();
        }
        assert_eq!(
            (store.issued().unwrap().len(), log.of(&name).len()),
            (20, 20)
        );
        let full = log
            .add(name.clone(), row("x", "n1", "r", 0, 9))
            .await
            .unwrap_err()
            .to_string();
        assert!(
            full.contains("alpha has 20 unexpired certificates")
                && full.contains("share is 20")
                && full.contains("fix: "),
            "{full}"
        );
        let other: DomainName = ("beta".parse().unwrap(), "beta.example".parse().unwrap());
        log.add(other, row("y", "m1", "r", 0, 9)).await.unwrap();
        // Of alpha 15 have expired by then, and the one of beta.
        assert_eq!(log.prune(&store, 25).unwrap(), 16);
        assert_eq!((store.issued().unwrap().len(), log.of(&name).len()), (5, 5));
        log.add(name.clone(), row("x", "n1", "r", 0, 99))
            .await
            .unwrap();
        assert_eq!(
            limit.usage().used,
            6,
            "expired certificates no longer count against the limit"
        );
        // As at a restart, the next log knows only what is on disk.
        drop(log);
        // At 28 the certificates that end at 28, 29 and 99 stay.
        let again = IssuanceLog::open(store, super::tests::limit(40, 50), 28).unwrap();
        assert_eq!(
            again.of(&name).len(),
            3,
            "certificates that expired meanwhile are removed"
        );
    }
}
