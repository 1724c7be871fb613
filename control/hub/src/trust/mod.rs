//! Who vouches for tenants' identities: which authority signs for a trust domain, what data planes are told of it, what was issued and what
//! is revoked. Who may have which identity is `certificates`; what a certificate holds is `canal-authority`'s.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use canal_authority::{AnswerFault, Asked, ForeignCrl, Issued, Patience, Phase, Refusal, TenantAuthority, check_answer, check_request};
use canal_model::identity::{COMPONENTS, Identity, components};
use canal_model::ids::{TenantName, TrustDomain};
use canal_model::program::Resource;
use canal_model::trust::Bundle;
use canal_runtime::TenantLimit;
use canal_store::{DomainName, Store, StoreError, StoredCertificate};
use tokio::sync::Notify;

use crate::fetch::Client;
use crate::metrics::{self, Metrics};
use crate::shared::now_seconds;

mod domain;
mod external;
mod folder;
mod ledger;
mod overview;
mod rate;
mod turner;

pub use domain::{BARRED_MAX, REVOKED_MAX};
pub use external::{EXTERNAL_REQUESTS_MAX, ExternalCa};
pub use folder::{CA_DOMAINS_MAX, CA_FILE_BYTES_MAX};
pub use ledger::{CERTIFICATES_PER_HOLDER_MAX, ISSUED_MAX, REPEATED_LIFETIME_SECONDS};
pub use rate::{CertificateRate, PROVIDER_RATE, TENANT_RATE};

pub(crate) use domain::OrderFault;
pub(crate) use turner::turn;

use domain::{Domain, Own};
use external::{External, ExternalFault};
use folder::{Folder, Folders, Found};
use ledger::{Ledger, LedgerError};
use rate::CertificateRates;

/// How the controller's authorities are to work.
#[derive(Debug, Clone, Default)]
pub struct TrustOptions {
    /// Folder with a folder per trust domain whose authority somebody else gives.
    pub ca_dir: Option<PathBuf>,
    /// Trust domains whose certificates another process signs.
    pub external: Vec<ExternalCa>,
    /// Seals private keys in the store.
    pub key_file: Option<PathBuf>,
    /// PEM roots for https to external authorities and for key sets.
    pub tls_roots: Option<PathBuf>,
    /// Of the replacement of roots.
    pub patience: Patience,
}

/// Why no certificate was made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IssueError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("{0} was revoked by an operator and gets no certificates until `canal ca restore`")]
    Barred(Identity),
    #[error("the authority's files of {0} were never usable; `canal ca status` says what is wrong with them")]
    Files(TrustDomain),
    #[error(transparent)]
    External(#[from] ExternalFault),
    #[error("the external authority: {0}")]
    Answer(#[from] AnswerFault),
    #[error(transparent)]
    Ledger(LedgerError),
    #[error("{0} asked for more certificates than {1} at once and {2} a second; fix: keep certificates until half of their life")]
    Rate(String, u32, u32),
    #[error("the certificate could not be made; try again")]
    Task,
}

impl IssueError {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Store(_) => "store",
            Self::Refused(r) => r.name(),
            Self::Barred(_) => "barred",
            Self::Files(_) => "files",
            Self::External(e) => e.name(),
            Self::Answer(e) => e.name(),
            Self::Ledger(LedgerError::Full { .. }) => "ledger_full",
            Self::Ledger(_) => "store",
            Self::Rate(..) => "rate",
            Self::Task => "task",
        }
    }
}

/// A certificate to be made; that its holder may have it was decided.
#[derive(Debug, Clone)]
pub(crate) struct Order {
    pub(crate) tenant: TenantName,
    pub(crate) identity: Identity,
    pub(crate) names: Vec<String>,
    pub(crate) rsa: bool,
    pub(crate) csr: String,
    pub(crate) lifetime_seconds: u64,
    /// Whom it is for.
    pub(crate) holder: String,
    /// How fast it may ask.
    pub(crate) rate: CertificateRate,
}

impl Order {
    fn asked(&self) -> Asked<'_> {
        let Self { csr, identity, names, rsa, lifetime_seconds, .. } = self;
        Asked { csr, identity, names, rsa: *rsa, lifetime_seconds: *lifetime_seconds }
    }

    fn domain(&self) -> DomainName {
        (self.tenant.clone(), self.identity.trust_domain.clone())
    }
}

/// What came of an [`Order`].
#[derive(Debug)]
pub(crate) struct Done {
    /// As `CreateCertificate` answers: leaf, intermediates, and all roots in the last element.
    pub(crate) chain: Vec<String>,
    pub(crate) serial: String,
    pub(crate) not_after: u64,
}

/// Whose word counts for a trust domain.
enum Source {
    Own,
    Files(Folder),
    External(Arc<External>, Folder),
    /// The controller's own root, for Canal's own parts.
    Infra(Arc<TenantAuthority>),
}

impl Source {
    fn name(&self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Files(_) => "files",
            Self::External(..) => "external",
            Self::Infra(_) => "controller",
        }
    }
}

/// All authorities of tenants.
pub(crate) struct Trust {
    store: Arc<Store>,
    metrics: Arc<Metrics>,
    domains: Mutex<BTreeMap<DomainName, Domain>>,
    folders: Mutex<Option<Folders>>,
    externals: BTreeMap<TrustDomain, Arc<External>>,
    /// Of Canal's own parts.
    infra: Arc<TenantAuthority>,
    ledger: Ledger,
    rates: Mutex<CertificateRates>,
    /// When the rates began.
    begun: Instant,
    patience: Patience,
    /// Since when nothing has been in the way of a replacement.
    clear: Mutex<BTreeMap<DomainName, u64>>,
    /// Who is in the way of one.
    waiting: Mutex<BTreeMap<DomainName, Vec<String>>>,
    /// What data planes are told may differ.
    changed: Notify,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Values are replaced whole, so a panic elsewhere does not spoil them.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Trust {
    /// Takes up what the store and the folders say.
    pub(crate) fn open(
        store: Arc<Store>,
        metrics: Arc<Metrics>,
        infra: TenantAuthority,
        options: &TrustOptions,
        client: &Client,
        issued: TenantLimit,
    ) -> Result<Self, StoreError> {
        let now = now_seconds();
        let mut domains = BTreeMap::new();
        for (name, stored) in store.trusts()? {
            let damaged = |why: String| StoreError::Damaged { path: store.path().into(), why: format!("authority of {}: {why}", name.1) };
            domains.insert(name.clone(), Domain::read(&name.1, &stored).map_err(damaged)?);
        }
        // A place for what is revoked of Canal's own parts.
        domains.entry(components()).or_default();
        let external = options.external.iter().map(|e| (e.domain.clone(), Arc::new(External::new(&e.url, client.clone()))));
        let trust = Self {
            ledger: Ledger::open(store.clone(), issued, now)?,
            rates: Mutex::default(),
            begun: Instant::now(),
            store,
            metrics,
            domains: Mutex::new(domains),
            folders: Mutex::new(options.ca_dir.clone().map(Folders::new)),
            externals: external.collect(),
            infra: Arc::new(infra),
            patience: options.patience,
            clear: Mutex::default(),
            waiting: Mutex::default(),
            changed: Notify::new(),
        };
        trust.look_at_folders(now);
        Ok(trust)
    }

    /// Ends when data planes may have to be told something else.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    fn source(&self, domain: &TrustDomain) -> Source {
        if domain.as_str() == COMPONENTS {
            return Source::Infra(self.infra.clone());
        }
        let folder = locked(&self.folders).as_ref().and_then(|f| f.held.get(domain).cloned());
        match (self.externals.get(domain), folder) {
            (Some(external), folder) => Source::External(external.clone(), folder.unwrap_or_default()),
            (None, Some(folder)) => Source::Files(folder),
            (None, None) => Source::Own,
        }
    }

    /// Makes roots for those trust domains that need one and have none, in one write.
    pub(crate) fn ensure<'a>(&self, names: impl Iterator<Item = &'a DomainName>) -> Result<(), StoreError> {
        let mut domains = locked(&self.domains);
        let mut made = Vec::new();
        for name in names {
            if !matches!(self.source(&name.1), Source::Own) {
                // No root of our own, and all the same a place for what its files revoke.
                domains.entry(name.clone()).or_default();
                continue;
            }
            if domains.get(name).is_some_and(|d| d.own.is_some()) {
                continue;
            }
            match TenantAuthority::generate(&name.1, now_seconds()) {
                Ok(first) => {
                    let mut domain = domains.get(name).cloned().unwrap_or_default();
                    domain.own = Some(Own { first: Arc::new(first), second: None });
                    made.push((name.clone(), domain));
                }
                Err(e) => tracing::error!(tenant = %name.0, domain = %name.1, error = %e, "no root could be made; it is tried again"),
            }
        }
        if made.is_empty() {
            return Ok(());
        }
        let rows: Vec<_> = made.iter().map(|(name, domain)| (name.clone(), domain.stored())).collect();
        self.store.put_trusts(&rows)?;
        for (name, domain) in made {
            tracing::info!(target: "audit", tenant = %name.0, domain = %name.1, "made a new root for the trust domain");
            domains.insert(name, domain);
        }
        Ok(())
    }

    /// What is told of a trust domain; `None`: there is nobody who vouches for it.
    pub(crate) fn bundle(&self, name: &DomainName) -> Option<Bundle> {
        let roots = self.roots(name)?;
        let revoked = locked(&self.domains).get(name).map(Domain::lists).unwrap_or_default();
        let (tenant, trust_domain) = name.clone();
        Some(Bundle { tenant, trust_domain, roots, revoked, federated: false })
    }

    /// The roots of a trust domain, the one that signs first.
    fn roots(&self, name: &DomainName) -> Option<Vec<String>> {
        let roots: Vec<String> = match self.source(&name.1) {
            Source::Files(folder) | Source::External(_, folder) => folder.roots,
            Source::Infra(infra) => infra.roots().to_vec(),
            Source::Own => {
                let domains = locked(&self.domains);
                let own = domains.get(name)?.own.as_ref()?;
                std::iter::once(&own.first).chain(&own.second).flat_map(|a| a.roots().iter().cloned()).collect()
            }
        };
        (!roots.is_empty()).then_some(roots)
    }

    fn is_barred(&self, order: &Order) -> bool {
        locked(&self.domains).get(&order.domain()).is_some_and(|d| d.kept.barred.contains(&order.identity.to_string()))
    }

    /// Makes a certificate, and has it on record before it is given away.
    pub(crate) async fn issue(self: &Arc<Self>, mut order: Order) -> Result<Done, IssueError> {
        let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        if !locked(&self.rates).take(&order.holder, order.rate, now) {
            return Err(IssueError::Rate(order.holder, order.rate.burst, order.rate.per_second));
        }
        if self.ledger.held(&order.domain(), &order.holder, &order.identity.to_string(), &order.names) >= CERTIFICATES_PER_HOLDER_MAX {
            order.lifetime_seconds = order.lifetime_seconds.min(REPEATED_LIFETIME_SECONDS);
        }
        if self.is_barred(&order) {
            return Err(IssueError::Barred(order.identity));
        }
        let issued = match self.source(&order.identity.trust_domain) {
            Source::External(external, folder) => self.by_external(&external, &folder, &order).await?,
            Source::Files(folder) => {
                let authority = folder.authority.ok_or_else(|| IssueError::Files(order.identity.trust_domain.clone()))?;
                self.by_authority(Some(authority), &order).await?
            }
            Source::Infra(infra) => self.by_authority(Some(infra), &order).await?,
            Source::Own => self.by_authority(None, &order).await?,
        };
        let row = StoredCertificate {
            serial: issued.serial.clone(),
            identity: order.identity.to_string(),
            names: order.names.clone(),
            holder: order.holder.clone(),
            root: issued.root.clone(),
            issued: now_seconds(),
            until: issued.not_after,
        };
        self.ledger.add(order.domain(), row).await.map_err(IssueError::Ledger)?;
        // Who was barred meanwhile has this one revoked as well, or does not get it: the record came first.
        if self.is_barred(&order) {
            return Err(IssueError::Barred(order.identity));
        }
        let bundle = self.roots(&order.domain()).ok_or(IssueError::Task)?.concat();
        let Issued { mut chain, serial, not_after, .. } = issued;
        chain.push(bundle);
        Ok(Done { chain, serial, not_after })
    }

    /// `authority`, or the trust domain's own root, which is made if there is none yet.
    async fn by_authority(self: &Arc<Self>, authority: Option<Arc<TenantAuthority>>, order: &Order) -> Result<Issued, IssueError> {
        let (trust, order) = (self.clone(), order.clone());
        let work = tokio::task::spawn_blocking(move || -> Result<Issued, IssueError> {
            let authority = match authority {
                Some(authority) => authority,
                None => {
                    let name = order.domain();
                    trust.ensure(std::iter::once(&name))?;
                    let own = locked(&trust.domains).get(&name).and_then(|d| d.own.clone());
                    own.ok_or(IssueError::Task)?.first
                }
            };
            Ok(authority.issue(&order.asked(), now_seconds())?)
        });
        work.await.map_err(|_| IssueError::Task)?
    }

    async fn by_external(&self, external: &External, folder: &Folder, order: &Order) -> Result<Issued, IssueError> {
        let domain = &order.identity.trust_domain;
        let path = locked(&self.folders).as_ref().map(|f| f.of(domain));
        let Some(path) = path.filter(|_| !folder.roots.is_empty()) else { return Err(IssueError::Files(domain.clone())) };
        let asked = order.asked();
        check_request(&asked)?;
        let done = async {
            let pem = external.sign(&asked, Path::new(&path)).await?;
            Ok(check_answer(&pem, &asked, &folder.roots, now_seconds())?)
        };
        let done: Result<Issued, IssueError> = done.await;
        let outcome = done.as_ref().map_or_else(IssueError::name, |_| "signed");
        self.metrics.count(metrics::EXTERNAL_CA, &[("outcome", outcome)]);
        done
    }

    /// Changes a trust domain: disk first, then memory. Blocks for the write.
    fn change<T, E: From<StoreError>>(&self, name: &DomainName, act: impl FnOnce(&mut Domain) -> Result<T, E>) -> Result<T, E> {
        let mut domains = locked(&self.domains);
        let mut next = domains.get(name).cloned().unwrap_or_default();
        let done = act(&mut next)?;
        self.store.put_trusts(&[(name.clone(), next.stored())])?;
        domains.insert(name.clone(), next);
        drop(domains);
        self.changed.notify_one();
        Ok(done)
    }

    /// Those who can sign lists now, and the lists that came with files.
    fn signers(&self, domain: &TrustDomain, own: Option<&Own>) -> (Vec<Arc<TenantAuthority>>, Vec<ForeignCrl>) {
        match self.source(domain) {
            Source::Files(folder) => (folder.authority.into_iter().collect(), folder.foreign),
            Source::External(_, folder) => (Vec::new(), folder.foreign),
            Source::Infra(infra) => (vec![infra], Vec::new()),
            Source::Own => {
                (own.map(|o| std::iter::once(o.first.clone()).chain(o.second.clone()).collect()).unwrap_or_default(), Vec::new())
            }
        }
    }

    /// Begins the replacement of a root; with `force`, takes the next step of one under way. Says what it did.
    pub(crate) fn rotate(&self, name: &DomainName, force: bool) -> Result<&'static str, OrderError> {
        let now = now_seconds();
        if !matches!(self.source(&name.1), Source::Own) {
            return Err(OrderFault::NotOwn(name.1.clone()).into());
        }
        self.ensure(std::iter::once(name))?;
        let said = self.change(name, |domain| -> Result<_, OrderError> {
            Ok(match (domain.phase(), force) {
                (Phase::Steady, _) => {
                    domain.announce(TenantAuthority::generate(&name.1, now).map_err(OrderFault::from)?, now);
                    "a new root is announced; it signs once all data planes know it"
                }
                (Phase::Announced, true) => {
                    domain.switch(now);
                    "the new root signs from now on, though not all data planes said that they know it"
                }
                (Phase::Switched, true) => {
                    domain.retire(now);
                    "the old root is gone, though certificates of it may be in use"
                }
                (_, false) => "a replacement is under way; --force takes its next step at once",
            })
        })?;
        tracing::info!(target: "audit", tenant = %name.0, domain = %name.1, force, said, "a root is being replaced");
        Ok(said)
    }

    /// Takes a step that was decided, if the phase is still the one it was decided for.
    fn step(&self, name: &DomainName, seen: Phase, act: impl FnOnce(&mut Domain)) -> Result<bool, StoreError> {
        self.change(name, |domain| -> Result<bool, StoreError> {
            // An operator may have forced the step meanwhile; taken twice it would go back.
            let is_due = domain.phase() == seen;
            if is_due {
                act(domain);
            }
            Ok(is_due)
        })
    }

    /// Revokes one certificate, or all of an identity and whatever it might get.
    pub(crate) fn revoke(&self, name: &DomainName, target: &Target) -> Result<String, OrderError> {
        let now = now_seconds();
        if let Target::Identity(identity) = target {
            // Barred first, so that nothing is issued between the look at the record and the list.
            self.change(name, |domain| -> Result<(), OrderError> { Ok(domain.bar(&identity.to_string())?) })?;
        }
        let rows: Vec<Arc<StoredCertificate>> = self.ledger.of(name);
        let is_meant = |row: &&Arc<StoredCertificate>| match target {
            Target::Identity(identity) => row.identity == identity.to_string(),
            Target::Serial(serial) => row.serial == *serial,
        };
        let meant: Vec<&StoredCertificate> = rows.iter().filter(is_meant).filter(|r| r.until > now).map(Arc::as_ref).collect();
        if let (Target::Serial(serial), true) = (target, meant.is_empty()) {
            return Err(OrderFault::UnknownSerial(serial.clone()).into());
        }
        let count = self.change(name, |domain| -> Result<usize, OrderError> {
            let count = domain.revoke(meant.iter().copied(), now)?;
            let (signers, foreign) = self.signers(&name.1, domain.own.as_ref());
            domain.make_lists(&signers, &foreign, now).map_err(OrderFault::from)?;
            Ok(count)
        })?;
        let list = match self.source(&name.1) {
            Source::External(..) => {
                "; revoke them at the external authority too and put its list at crl.pem: the controller cannot sign it"
            }
            _ => "",
        };
        tracing::info!(target: "audit", tenant = %name.0, domain = %name.1, %target, certificates = count, "revoked");
        Ok(format!("{count} certificates revoked{list}"))
    }

    /// An identity gets certificates again; those that were revoked stay so.
    pub(crate) fn restore(&self, name: &DomainName, identity: &Identity) -> Result<String, OrderError> {
        let text = identity.to_string();
        self.change(name, |domain| -> Result<(), OrderError> {
            if domain.kept.barred.remove(&text) { Ok(()) } else { Err(OrderFault::NotBarred(text.clone()).into()) }
        })?;
        tracing::info!(target: "audit", tenant = %name.0, domain = %name.1, %identity, "restored");
        Ok("it gets certificates again; those that were revoked stay revoked".into())
    }

    /// Looks at the folders once; what is in force differs afterwards or not.
    fn look_at_folders(&self, now: u64) {
        let found = match locked(&self.folders).as_mut() {
            Some(folders) => folders.look(|domain| self.externals.contains_key(domain), now),
            None => return,
        };
        let mut changed = BTreeSet::new();
        for found in found {
            match found {
                Found::Changed(domain) => _ = changed.insert(domain),
                Found::Broken(domain, name) => {
                    self.metrics.count(metrics::CA_FILES_REFUSED, &[("domain", domain.as_str()), ("reason", name)]);
                }
            }
        }
        let names: Vec<DomainName> = locked(&self.domains).keys().filter(|(_, d)| changed.contains(d)).cloned().collect();
        for name in names {
            self.renew_lists(&name, now);
        }
        if !changed.is_empty() {
            self.changed.notify_one();
        }
    }

    /// Makes the lists of a trust domain anew, where they are old or their files changed.
    fn renew_lists(&self, name: &DomainName, now: u64) {
        let Some(domain) = locked(&self.domains).get(name).cloned() else { return };
        let (signers, foreign) = self.signers(&name.1, domain.own.as_ref());
        if !domain.lists_are_old(now) && !domain.lists_differ(&foreign) {
            return;
        }
        let done = self
            .change(name, |domain| -> Result<(), OrderError> { Ok(domain.make_lists(&signers, &foreign, now).map_err(OrderFault::from)?) });
        if let Err(e) = done {
            self.metrics.count(metrics::CRL_FAILURES, &[("reason", e.name())]);
            tracing::error!(tenant = %name.0, domain = %name.1, error = %e, "the revocation list was not made anew");
        }
    }

    /// The trust resources of `view`'s tenant: its own bundle, and those of `federated` tenants.
    pub(crate) fn told<'a>(&self, own: &DomainName, federated: impl Iterator<Item = &'a DomainName>) -> Vec<Resource> {
        let theirs = federated.filter_map(|name| self.bundle(name));
        let theirs = theirs.map(|bundle| Bundle { tenant: own.0.clone(), federated: true, ..bundle });
        self.bundle(own).into_iter().chain(theirs).map(Resource::Bundle).collect()
    }
}

/// What is revoked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    Identity(Identity),
    Serial(String),
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Identity(identity) => identity.fmt(f),
            Self::Serial(serial) => write!(f, "serial {serial}"),
        }
    }
}

/// Why an order was not carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OrderError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Fault(#[from] OrderFault),
}

impl OrderError {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Store(_) => "store",
            Self::Fault(fault) => fault.name(),
        }
    }
}
