//! The tenants' certificate authorities: which CA signs for a trust domain, which trust bundle is
//! published, what was issued, and what is revoked. `certificate_service` decides who may have
//! which identity, and `canal-ca` what a certificate contains. Start at
//! [`TrustAuthorities::issue`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use canal_access::now_seconds;
use canal_ca::{
    CertificateRequest, CsrError, ExternalCertificateError, ImportedCrl, IssuedLeaf, RotationPhase,
    RotationTimeouts, TenantAuthority, check_answer, check_request,
};
use canal_controller_metrics::{self as metrics, ControllerMetrics};
use canal_model::identity::{COMPONENTS, Identity, components};
use canal_model::ids::{TenantName, TrustDomain};
use canal_model::program::Resource;
use canal_model::trust::TrustBundle;
use canal_runtime::TenantLimit;
use canal_store::{DomainName, Store, StoreError, StoredCertificate};
use tokio::sync::Notify;

use crate::fetch::FetchClient;

mod authority_folder;
mod external;
mod issuance_log;
mod maintenance;
mod overview;
mod rate;
mod trust_domain;

pub use authority_folder::{CA_DOMAINS_MAX, CA_FILE_BYTES_MAX};
pub use external::{EXTERNAL_REQUESTS_MAX, ExternalCa};
pub use issuance_log::{CERTIFICATES_PER_HOLDER_MAX, ISSUED_MAX, REPEATED_LIFETIME_SECONDS};
pub use rate::{CertificateRate, PROVIDER_RATE, TENANT_RATE};
pub use trust_domain::{BLOCKED_MAX, REVOKED_MAX};

pub use maintenance::{MaintenanceContext, run_maintenance};
pub use trust_domain::DomainError;

use authority_folder::{AuthorityFolder, AuthorityFolders, FolderChange};
use external::{ExternalCaClient, ExternalCaError};
use issuance_log::{IssuanceLog, IssuanceLogError};
use rate::CertificateRates;
use trust_domain::{DomainState, ManagedRoots};

/// Options of the controller's certificate authorities.
#[derive(Debug, Clone, Default)]
pub struct TrustOptions {
    /// Folder with one folder per trust domain whose CA is provided as files.
    pub ca_dir: Option<PathBuf>,
    /// Trust domains for which an external CA signs.
    pub external: Vec<ExternalCa>,
    /// File with the key that seals private keys in the store.
    pub key_file: Option<PathBuf>,
    /// File with PEM roots for https to external CAs and for key sets.
    pub tls_roots: Option<PathBuf>,
    /// Timeouts of the rotation of roots.
    pub rotation_timeouts: RotationTimeouts,
}

/// Reason why no certificate was issued.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IssueError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Refused(#[from] CsrError),
    #[error(
        "{0} was revoked by an operator and gets no certificates; fix: restore it with `canal ca restore`"
    )]
    Blocked(Identity),
    #[error("the CA files of {0} were never usable; fix: correct what `canal ca status` reports")]
    Files(TrustDomain),
    #[error(transparent)]
    External(#[from] ExternalCaError),
    #[error("the external CA: {0}")]
    Answer(#[from] ExternalCertificateError),
    #[error(transparent)]
    IssuanceLog(IssuanceLogError),
    #[error(
        "{0} requested more certificates than {1} at once and {2} per second; fix: keep certificates until half of their lifetime"
    )]
    Rate(String, u32, u32),
    #[error("the certificate could not be created; fix: try again")]
    Task,
}

impl IssueError {
    /// Returns the name of the reason for a counter.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Store(_) => "store",
            Self::Refused(r) => r.name(),
            Self::Blocked(_) => "blocked",
            Self::Files(_) => "files",
            Self::External(e) => e.name(),
            Self::Answer(e) => e.name(),
            Self::IssuanceLog(IssuanceLogError::Full { .. }) => "issuance_log_full",
            Self::IssuanceLog(_) => "store",
            Self::Rate(..) => "rate",
            Self::Task => "task",
        }
    }
}

/// A certificate to be issued. Whether its holder may have it has been decided before.
#[derive(Debug, Clone)]
pub(crate) struct IssuanceRequest {
    pub(crate) tenant: TenantName,
    pub(crate) identity: Identity,
    pub(crate) names: Vec<String>,
    pub(crate) rsa: bool,
    pub(crate) csr: String,
    pub(crate) lifetime_seconds: u64,
    /// Principal that gets the certificate.
    pub(crate) holder: String,
    /// Rate at which the holder may request certificates.
    pub(crate) rate: CertificateRate,
}

impl IssuanceRequest {
    fn certificate_request(&self) -> CertificateRequest<'_> {
        let Self {
            csr,
            identity,
            names,
            rsa,
            lifetime_seconds,
            ..
        } = self;
        CertificateRequest {
            csr,
            identity,
            names,
            rsa: *rsa,
            lifetime_seconds: *lifetime_seconds,
        }
    }

    fn domain(&self) -> DomainName {
        (self.tenant.clone(), self.identity.trust_domain.clone())
    }
}

/// The certificate that was issued for an [`IssuanceRequest`].
#[derive(Debug)]
pub(crate) struct IssuedChain {
    /// Chain as `CreateCertificate` returns it: leaf, intermediates, and all roots in the last
    /// element.
    pub(crate) chain: Vec<String>,
    pub(crate) serial: String,
    pub(crate) not_after: u64,
}

/// The source of a trust domain's CA.
enum AuthoritySource {
    Own,
    Files(AuthorityFolder),
    External(Arc<ExternalCaClient>, AuthorityFolder),
    /// The controller's own root, for Canal's own components.
    Infra(Arc<TenantAuthority>),
}

impl AuthoritySource {
    fn name(&self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Files(_) => "files",
            Self::External(..) => "external",
            Self::Infra(_) => "controller",
        }
    }
}

/// The certificate authorities of all trust domains.
pub struct TrustAuthorities {
    store: Arc<Store>,
    metrics: Arc<ControllerMetrics>,
    domains: Mutex<BTreeMap<DomainName, DomainState>>,
    folders: Mutex<Option<AuthorityFolders>>,
    externals: BTreeMap<TrustDomain, Arc<ExternalCaClient>>,
    /// CA of Canal's own components.
    infra: Arc<TenantAuthority>,
    issuance_log: IssuanceLog,
    rates: Mutex<CertificateRates>,
    /// Start of the clock of the rates.
    begun: Instant,
    rotation_timeouts: RotationTimeouts,
    /// Time since which nothing has blocked a rotation, in seconds since 1970.
    clear: Mutex<BTreeMap<DomainName, u64>>,
    /// Obstacles to each rotation, as texts for operators.
    waiting: Mutex<BTreeMap<DomainName, Vec<String>>>,
    /// Notified when the published trust may have changed.
    changed: Notify,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Values are replaced as a whole, so a panic elsewhere does not spoil them.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TrustAuthorities {
    /// Loads the state from the store and from the CA folders.
    ///
    /// # Errors
    /// The store cannot be read, or contains an authority that is damaged.
    pub fn open(
        store: Arc<Store>,
        metrics: Arc<ControllerMetrics>,
        infra: TenantAuthority,
        options: &TrustOptions,
        client: &FetchClient,
        issued: TenantLimit,
    ) -> Result<Self, StoreError> {
        let now = now_seconds();
        let mut domains = BTreeMap::new();
        for (name, stored) in store.trusts()? {
            let damaged = |why: String| StoreError::Damaged {
                path: store.path().into(),
                why: format!("CA of {}: {why}", name.1),
            };
            domains.insert(
                name.clone(),
                DomainState::read(&name.1, &stored).map_err(damaged)?,
            );
        }
        // Revocations of Canal's own components need an entry too.
        domains.entry(components()).or_default();
        let external = options.external.iter().map(|e| {
            (
                e.domain.clone(),
                Arc::new(ExternalCaClient::new(&e.url, client.clone())),
            )
        });
        let trust = Self {
            issuance_log: IssuanceLog::open(store.clone(), issued, now)?,
            rates: Mutex::default(),
            begun: Instant::now(),
            store,
            metrics,
            domains: Mutex::new(domains),
            folders: Mutex::new(options.ca_dir.clone().map(AuthorityFolders::new)),
            externals: external.collect(),
            infra: Arc::new(infra),
            rotation_timeouts: options.rotation_timeouts,
            clear: Mutex::default(),
            waiting: Mutex::default(),
            changed: Notify::new(),
        };
        // `ensure` creates no root for a domain with a folder, so folders are read before it is
        // called.
        trust.look_at_folders(now);
        Ok(trust)
    }

    /// Resolves when the published trust may have changed.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Returns the source of a trust domain's CA.
    fn source(&self, domain: &TrustDomain) -> AuthoritySource {
        if domain.as_str() == COMPONENTS {
            return AuthoritySource::Infra(self.infra.clone());
        }
        let folder = locked(&self.folders)
            .as_ref()
            .and_then(|f| f.folders.get(domain).cloned());
        match (self.externals.get(domain), folder) {
            (Some(external), folder) => {
                AuthoritySource::External(external.clone(), folder.unwrap_or_default())
            }
            (None, Some(folder)) => AuthoritySource::Files(folder),
            (None, None) => AuthoritySource::Own,
        }
    }

    /// Creates roots for those trust domains that need one and have none, in one write.
    ///
    /// # Errors
    /// The store refused the write, and no root was added; or a root could not be created, and only
    /// the others were added.
    pub fn ensure<'a>(
        &self,
        names: impl Iterator<Item = &'a DomainName>,
    ) -> Result<(), NewRootError> {
        let mut domains = locked(&self.domains);
        let (mut made, mut failed) = (Vec::new(), None);
        for name in names {
            if !matches!(self.source(&name.1), AuthoritySource::Own) {
                // Such a domain gets no root here, but needs an entry for what its files revoke.
                domains.entry(name.clone()).or_default();
                continue;
            }
            // An existing root must stay: its certificates are in use.
            if domains.get(name).is_some_and(|d| d.own.is_some()) {
                continue;
            }
            match TenantAuthority::generate(&name.1, now_seconds()) {
                Ok(first) => {
                    // A new domain has no entry.
                    let mut domain = domains.get(name).cloned().unwrap_or_default();
                    domain.own = Some(ManagedRoots {
                        signing: Arc::new(first),
                        other: None,
                    });
                    made.push((name.clone(), domain));
                }
                Err(e) => {
                    tracing::error!(tenant = %name.0, domain = %name.1, error = %e, "trust: could not create a root; retrying");
                    failed = Some(e);
                }
            }
        }
        let rows: Vec<_> = made
            .iter()
            .map(|(name, domain)| (name.clone(), domain.stored()))
            .collect();
        if !rows.is_empty() {
            self.store.put_trusts(&rows)?;
        }
        for (name, domain) in made {
            tracing::info!(target: "audit", tenant = %name.0, domain = %name.1, "trust: created a new root for the trust domain");
            domains.insert(name, domain);
        }
        failed.map_or(Ok(()), |e| Err(e.into()))
    }

    /// Returns the trust bundle of a trust domain; `None` if it has no root.
    pub fn bundle(&self, name: &DomainName) -> Option<TrustBundle> {
        let roots = self.roots(name)?;
        let (revoked, blocked) = locked(&self.domains)
            .get(name)
            .map(|domain| (domain.lists(), domain.blocked()))
            .unwrap_or_default();
        let (tenant, trust_domain) = name.clone();
        Some(TrustBundle {
            tenant,
            trust_domain,
            roots,
            revoked,
            blocked,
            federated: false,
        })
    }

    /// Returns the roots of a trust domain, the one that signs first.
    fn roots(&self, name: &DomainName) -> Option<Vec<String>> {
        let roots: Vec<String> = match self.source(&name.1) {
            AuthoritySource::Files(folder) | AuthoritySource::External(_, folder) => folder.roots,
            AuthoritySource::Infra(infra) => infra.roots().to_vec(),
            AuthoritySource::Own => {
                let domains = locked(&self.domains);
                let own = domains.get(name)?.own.as_ref()?;
                std::iter::once(&own.signing)
                    .chain(&own.other)
                    .flat_map(|a| a.roots().iter().cloned())
                    .collect()
            }
        };
        (!roots.is_empty()).then_some(roots)
    }

    /// True if an operator has blocked the identity.
    fn is_blocked(&self, order: &IssuanceRequest) -> bool {
        locked(&self.domains)
            .get(&order.domain())
            .is_some_and(|d| d.record.blocked_identities.contains(&order.identity))
    }

    /// Issues a certificate. It is in the issuance log before it is returned.
    ///
    /// # Errors
    /// The request was refused, the identity is blocked, a limit is reached, or the CA or the store
    /// failed.
    pub(crate) async fn issue(
        self: &Arc<Self>,
        mut order: IssuanceRequest,
    ) -> Result<IssuedChain, IssueError> {
        let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        // The rate is checked first, so that refused requests cost nothing else.
        if !locked(&self.rates).take(&order.holder, order.rate, now) {
            return Err(IssueError::Rate(
                order.holder,
                order.rate.burst,
                order.rate.per_second,
            ));
        }
        // A holder that requests the same certificate again and again gets short-lived ones.
        if self.issuance_log.count_active(
            &order.domain(),
            &order.holder,
            &order.identity.to_string(),
            &order.names,
        ) >= CERTIFICATES_PER_HOLDER_MAX
        {
            order.lifetime_seconds = order.lifetime_seconds.min(REPEATED_LIFETIME_SECONDS);
        }
        if self.is_blocked(&order) {
            return Err(IssueError::Blocked(order.identity));
        }
        let issued = match self.source(&order.identity.trust_domain) {
            AuthoritySource::External(external, folder) => {
                self.by_external(&external, &folder, &order).await?
            }
            AuthoritySource::Files(folder) => {
                let authority = folder
                    .authority
                    .ok_or_else(|| IssueError::Files(order.identity.trust_domain.clone()))?;
                self.by_authority(Some(authority), &order).await?
            }
            AuthoritySource::Infra(infra) => self.by_authority(Some(infra), &order).await?,
            AuthoritySource::Own => self.by_authority(None, &order).await?,
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
        self.issuance_log
            .add(order.domain(), row)
            .await
            .map_err(IssueError::IssuanceLog)?;
        // If the identity was blocked meanwhile, the certificate is revoked as well or not
        // returned: it was in the log first.
        if self.is_blocked(&order) {
            return Err(IssueError::Blocked(order.identity));
        }
        let bundle = self
            .roots(&order.domain())
            // A CA that has signed has a root.
            .ok_or(IssueError::Task)?
            .concat();
        let IssuedLeaf {
            mut chain,
            serial,
            not_after,
            ..
        } = issued;
        chain.push(bundle);
        Ok(IssuedChain {
            chain,
            serial,
            not_after,
        })
    }

    /// Issues a certificate by `authority`, or by the trust domain's own root, which is created if
    /// there is none yet.
    async fn by_authority(
        self: &Arc<Self>,
        authority: Option<Arc<TenantAuthority>>,
        order: &IssuanceRequest,
    ) -> Result<IssuedLeaf, IssueError> {
        let (trust, order) = (self.clone(), order.clone());
        let work = tokio::task::spawn_blocking(move || -> Result<IssuedLeaf, IssueError> {
            let authority = match authority {
                Some(authority) => authority,
                None => {
                    let name = order.domain();
                    trust.ensure(std::iter::once(&name))?;
                    let own = locked(&trust.domains)
                        .get(&name)
                        .and_then(|d| d.own.clone());
                    own.ok_or(IssueError::Task)?.signing
                }
            };
            Ok(authority.issue(&order.certificate_request(), now_seconds())?)
        });
        work.await.map_err(|_| IssueError::Task)?
    }

    /// Has the external CA sign, and checks what it returned.
    async fn by_external(
        &self,
        external: &ExternalCaClient,
        folder: &AuthorityFolder,
        order: &IssuanceRequest,
    ) -> Result<IssuedLeaf, IssueError> {
        let domain = &order.identity.trust_domain;
        let path = locked(&self.folders).as_ref().map(|f| f.of(domain));
        let Some(path) = path.filter(|_| !folder.roots.is_empty()) else {
            return Err(IssueError::Files(domain.clone()));
        };
        let request = order.certificate_request();
        check_request(&request)?;
        let done = async {
            let pem = external.sign(&request, Path::new(&path)).await?;
            Ok(check_answer(&pem, &request, &folder.roots, now_seconds())?)
        };
        let done: Result<IssuedLeaf, IssueError> = done.await;
        let outcome = done.as_ref().map_or_else(IssueError::name, |_| "signed");
        self.metrics
            .count(metrics::EXTERNAL_CA, &[("outcome", outcome)]);
        done
    }

    /// Changes the state of a trust domain, on disk first and then in memory. Blocks for the write.
    fn change<T, E: From<StoreError>>(
        &self,
        name: &DomainName,
        act: impl FnOnce(&mut DomainState) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut domains = locked(&self.domains);
        let mut next = domains.get(name).cloned().unwrap_or_default();
        let done = act(&mut next)?;
        self.store.put_trusts(&[(name.clone(), next.stored())])?;
        domains.insert(name.clone(), next);
        drop(domains);
        self.changed.notify_one();
        Ok(done)
    }

    /// Returns the CAs that can sign revocation lists now, and the revocation lists from files.
    fn signers(
        &self,
        domain: &TrustDomain,
        own: Option<&ManagedRoots>,
    ) -> (Vec<Arc<TenantAuthority>>, Vec<ImportedCrl>) {
        match self.source(domain) {
            AuthoritySource::Files(folder) => {
                (folder.authority.into_iter().collect(), folder.foreign)
            }
            AuthoritySource::External(_, folder) => (Vec::new(), folder.foreign),
            AuthoritySource::Infra(infra) => (vec![infra], Vec::new()),
            AuthoritySource::Own => (
                own.map(|o| {
                    std::iter::once(o.signing.clone())
                        .chain(o.other.clone())
                        .collect()
                })
                .unwrap_or_default(),
                Vec::new(),
            ),
        }
    }

    /// Begins the rotation of a root; with `force`, takes the next step of one in progress. Returns
    /// what it did.
    ///
    /// # Errors
    /// The CA is not Canal's own, no root could be created, or the store refused.
    pub fn rotate(
        &self,
        name: &DomainName,
        force: bool,
    ) -> Result<&'static str, TrustOperationError> {
        let now = now_seconds();
        if !matches!(self.source(&name.1), AuthoritySource::Own) {
            return Err(DomainError::NotOwn(name.1.clone()).into());
        }
        self.ensure(std::iter::once(name))?;
        let step = self.change(name, |domain| -> Result<_, TrustOperationError> {
            Ok(match (domain.phase(), force) {
                (RotationPhase::Steady, _) => {
                    domain.announce(
                        TenantAuthority::generate(&name.1, now).map_err(DomainError::from)?,
                        now,
                    );
                    "a new root is announced; it signs once all data planes have acknowledged it"
                }
                (RotationPhase::Announced, true) => {
                    domain.switch(now);
                    "the new root signs from now on, although not all data planes acknowledged it"
                }
                (RotationPhase::Switched, true) => {
                    domain.retire(now);
                    "the old root was removed, although its certificates may still be in use"
                }
                (_, false) => "a rotation is in progress; --force takes its next step at once",
            })
        })?;
        tracing::info!(target: "audit", tenant = %name.0, domain = %name.1, force, step, "trust: an operator rotates a root");
        Ok(step)
    }

    /// Takes a step that was decided, if the phase is still the one for which it was decided.
    /// Returns whether it was taken.
    fn step(
        &self,
        name: &DomainName,
        seen: RotationPhase,
        act: impl FnOnce(&mut DomainState),
    ) -> Result<bool, StoreError> {
        self.change(name, |domain| -> Result<bool, StoreError> {
            // An operator may have forced the step meanwhile; a second one would reverse it.
            let is_due = domain.phase() == seen;
            if is_due {
                act(domain);
            }
            Ok(is_due)
        })
    }

    /// Revokes one certificate, or blocks an identity and revokes all its certificates. Returns a
    /// text for the operator.
    ///
    /// # Errors
    /// The serial is unknown, a limit is reached, or the list or the store failed.
    pub fn revoke(
        &self,
        name: &DomainName,
        target: &RevocationTarget,
    ) -> Result<String, TrustOperationError> {
        let now = now_seconds();
        if let RevocationTarget::Identity(identity) = target {
            // The identity is blocked first, so that nothing is issued between reading the issuance
            // log and signing the list.
            self.change(name, |domain| -> Result<(), TrustOperationError> {
                Ok(domain.bar(identity)?)
            })?;
        }
        let rows: Vec<Arc<StoredCertificate>> = self.issuance_log.of(name);
        let is_meant = |row: &&Arc<StoredCertificate>| match target {
            RevocationTarget::Identity(identity) => row.identity == identity.to_string(),
            RevocationTarget::Serial(serial) => row.serial == *serial,
        };
        let meant: Vec<&StoredCertificate> = rows
            .iter()
            .filter(is_meant)
            // An expired certificate is refused without a revocation.
            .filter(|r| r.until > now)
            .map(Arc::as_ref)
            .collect();
        // An identity without certificates is blocked all the same.
        if let (RevocationTarget::Serial(serial), true) = (target, meant.is_empty()) {
            return Err(DomainError::UnknownSerial(serial.clone()).into());
        }
        let count = self.change(name, |domain| -> Result<usize, TrustOperationError> {
            let count = domain.revoke(meant.iter().copied(), now)?;
            let (signers, foreign) = self.signers(&name.1, domain.own.as_ref());
            domain
                .make_lists(&signers, &foreign, now)
                .map_err(DomainError::from)?;
            Ok(count)
        })?;
        let list = match self.source(&name.1) {
            AuthoritySource::External(..) => {
                "; revoke them at the external CA too and put its list at crl.pem: the controller cannot sign it"
            }
            // The controller has the key of all other CAs, and signs their lists itself.
            _ => "",
        };
        tracing::info!(target: "audit", tenant = %name.0, domain = %name.1, %target, certificates = count, "trust: revoked certificates");
        Ok(format!("{count} certificates revoked{list}"))
    }

    /// Unblocks an identity, which gets certificates again. Revoked certificates stay revoked.
    ///
    /// # Errors
    /// The identity is not blocked, or the store refused.
    pub fn restore(
        &self,
        name: &DomainName,
        identity: &Identity,
    ) -> Result<String, TrustOperationError> {
        self.change(name, |domain| -> Result<(), TrustOperationError> {
            if domain.record.blocked_identities.remove(identity) {
                Ok(())
            } else {
                Err(DomainError::NotBlocked(identity.to_string()).into())
            }
        })?;
        tracing::info!(target: "audit", tenant = %name.0, domain = %name.1, %identity, "trust: restored an identity");
        Ok("the identity gets certificates again; revoked certificates stay revoked".into())
    }

    /// Scans the CA folders once, and updates the lists of the trust domains whose folder changed.
    fn look_at_folders(&self, now: u64) {
        let found = match locked(&self.folders).as_mut() {
            Some(folders) => folders.scan(|domain| self.externals.contains_key(domain), now),
            None => return,
        };
        let mut changed = BTreeSet::new();
        for found in found {
            match found {
                FolderChange::Changed(domain) => _ = changed.insert(domain),
                FolderChange::Broken(domain, name) => {
                    self.metrics.count(
                        metrics::CA_FILES_REFUSED,
                        &[("domain", domain.as_str()), ("reason", name)],
                    );
                }
            }
        }
        let names: Vec<DomainName> = locked(&self.domains)
            .keys()
            .filter(|(_, d)| changed.contains(d))
            .cloned()
            .collect();
        for name in names {
            self.renew_lists(&name, now);
        }
        if !changed.is_empty() {
            self.changed.notify_one();
        }
    }

    /// Signs the revocation lists of a trust domain again, if they are old or the lists from its
    /// files changed.
    fn renew_lists(&self, name: &DomainName, now: u64) {
        let Some(domain) = locked(&self.domains).get(name).cloned() else {
            return;
        };
        let (signers, foreign) = self.signers(&name.1, domain.own.as_ref());
        if !domain.lists_are_old(now) && !domain.lists_differ(&foreign) {
            return;
        }
        let done = self.change(name, |domain| -> Result<(), TrustOperationError> {
            Ok(domain
                .make_lists(&signers, &foreign, now)
                .map_err(DomainError::from)?)
        });
        if let Err(e) = done {
            self.metrics
                .count(metrics::CRL_FAILURES, &[("reason", e.name())]);
            tracing::error!(tenant = %name.0, domain = %name.1, error = %e, "trust: could not renew the revocation list; the previous one stays in use");
        }
    }

    /// Returns the trust resources of a tenant: its own bundle, and those of `federated` trust
    /// domains.
    pub fn bundle_resources<'a>(
        &self,
        own: &DomainName,
        federated: impl Iterator<Item = &'a DomainName>,
    ) -> Vec<Resource> {
        let theirs = federated.filter_map(|name| self.bundle(name));
        let theirs = theirs.map(|bundle| TrustBundle {
            tenant: own.0.clone(),
            federated: true,
            ..bundle
        });
        self.bundle(own)
            .into_iter()
            .chain(theirs)
            .map(Resource::Bundle)
            .collect()
    }
}

/// An identity or one certificate that an operator revokes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RevocationTarget {
    Identity(Identity),
    Serial(String),
}

impl std::fmt::Display for RevocationTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Identity(identity) => identity.fmt(f),
            Self::Serial(serial) => write!(f, "serial {serial}"),
        }
    }
}

/// Reason why an operator's order was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum TrustOperationError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Fault(#[from] DomainError),
}

/// Reason why a trust domain that needs a root has none.
#[derive(Debug, thiserror::Error)]
pub enum NewRootError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Create(#[from] CsrError),
}

impl From<NewRootError> for TrustOperationError {
    fn from(error: NewRootError) -> Self {
        match error {
            NewRootError::Store(e) => e.into(),
            NewRootError::Create(e) => DomainError::from(e).into(),
        }
    }
}

impl From<NewRootError> for IssueError {
    fn from(error: NewRootError) -> Self {
        match error {
            NewRootError::Store(e) => e.into(),
            NewRootError::Create(e) => e.into(),
        }
    }
}

impl TrustOperationError {
    /// Returns the name of the reason, as the outcome of an operator's request.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Store(_) => "store",
            Self::Fault(fault) => fault.name(),
        }
    }
}
