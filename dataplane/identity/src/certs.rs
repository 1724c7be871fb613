//! Obtains and renews certificates from `IstioCertificateService`. Each identity has its own key. A
//! certificate is renewed at half its lifetime, or when another root signs; the old one stays in
//! use while it is valid. Keys survive a restart in `<data-dir>/certs/<sha256 of the
//! identity>.json`, mode 0600, because a data plane must start without the controller. Keys of
//! components are never written to disk. Keys in key servers are outside this module. Start with
//! [`CertificateSource`].

mod certificate_client;
mod persisted;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use canal_model::identity::Identity;
use canal_model::ids::{ServiceKey, TrustDomain};
use canal_model::trust::KeyAlgorithm;
use canal_runtime::backoff::Backoff;
use canal_runtime::drain::{DrainObserver, DrainWatcher};
use canal_runtime::metrics::{CounterFamily, MetricFamily, Registry, SharedCounter};
use canal_southbound_client::controller_client::ControllerEndpoint;
use canal_tls::{Certificate, Credential, CredentialWriter, TrustStore};
use rand::Rng;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

pub use certificate_client::{CertificateClient, CertificateRequestError, SignedChain};

/// Requested lifetime (Istio's `SECRET_TTL`). The controller may grant less.
pub const VALIDITY: Duration = Duration::from_secs(24 * 3600);
/// First and longest wait after a failed attempt. A controller that restarts serves within seconds,
/// so the first is short; the longest is far below the 12 h that remain at a renewal.
pub const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Concurrent requests. A node that starts with hundreds of pods must not overload the controller.
/// The key server makes as many. Nobody measured the value.
pub const REQUESTS_MAX: usize = 8;
/// Interval at which the clock is checked, so that a host that slept or whose clock was set renews
/// within this time. The shortest certificate lives 60 s and is renewed after 30 s, so it can be
/// late by no more than half of what remains.
pub const RENEWAL_CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// Share of the lifetime around its half over which renewals are spread. Of 24 hours that are 2.4
/// hours, so pods that started together do not renew together.
const JITTER: f64 = 0.05;
/// Time within which certificates are renewed, at random, once another root signs. Short, because a
/// root rotation waits for them; long enough that a node's pods do not all request at once.
pub const SUPERSEDED_SPREAD: Duration = Duration::from_secs(10);

/// Configuration of a certificate source.
#[derive(Debug, Clone)]
pub struct CertificateConfig {
    /// Controller that issues the certificates.
    pub controller: ControllerEndpoint,
    /// Folder `<data-dir>/certs`, which is created with mode 0700.
    pub folder: PathBuf,
    /// Requested lifetime of the certificates.
    pub validity: Duration,
}

/// Maintains a valid certificate for every identity whose [`Credential`] exists. Clones share the
/// same state.
#[derive(Clone)]
pub struct CertificateSource {
    inner: Arc<Inner>,
}

/// State of one identity's certificate, for `/config_dump`.
#[derive(Debug, Clone, serde::Serialize)]
pub struct CertificateStatus {
    pub identity: String,
    /// Start of validity in seconds since 1970.
    pub not_before: Option<u64>,
    pub not_after: Option<u64>,
    /// Error of the last attempt; empty after a success.
    pub error: String,
}

struct Inner {
    config: CertificateConfig,
    renewals: Mutex<HashMap<CertificateKey, RenewalState>>,
    /// Locked, before `renewals`, while the disk changes: nothing is written for an identity after
    /// it was forgotten.
    disk: Mutex<()>,
    /// Signals when another root signs.
    trust: OnceLock<TrustStore>,
    wake: Notify,
    request_permits: Semaphore,
    /// Number of the next renewal state.
    next_number: AtomicU64,
    issuer: CertificateClient,
    issued: SharedCounter,
    failures: CounterFamily,
    unwritten: SharedCounter,
}

/// Identifies a certificate by its purpose and kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct CertificateKey {
    identity: Identity,
    /// If set, the certificate also has the host names of this service.
    service: Option<ServiceKey>,
    algorithm: KeyAlgorithm,
    /// The certificate is stored on disk for a restart.
    persistent: bool,
}

/// The file of the certificate contains this text as its name.
impl fmt::Display for CertificateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.identity.fmt(f)?;
        if let Some(service) = &self.service {
            write!(f, " for {service}")?;
        }
        match self.algorithm {
            KeyAlgorithm::EcdsaP256 => Ok(()),
            KeyAlgorithm::Rsa2048 => f.write_str(" (RSA)"),
        }
    }
}

/// Renewal state of one identity.
struct RenewalState {
    /// Differs from that of every earlier state. A request that began before its identity was
    /// forgotten must not answer for the state of the same identity that was wanted again later.
    number: u64,
    writer: CredentialWriter,
    /// The renewal was moved forward, because another root signs.
    renewal_advanced: bool,
    /// Wall-clock time at which to request the next certificate; `None` without a certificate.
    renew_at: Option<SystemTime>,
    backoff: Backoff,
    /// Earliest time of the next attempt after a failure.
    retry_at: Option<Instant>,
    is_requested: bool,
    error: String,
}

/// Next action for one identity.
#[derive(Debug, PartialEq, Eq)]
enum RenewalDue {
    Now,
    /// Check again within this time.
    In(Duration),
}

/// Decides with both clocks. The wall clock, which may jump, shows whether a certificate is due.
/// The monotonic clock measures the wait after a failure.
fn decide(
    now: SystemTime,
    not_before: Option<SystemTime>,
    renew_at: Option<SystemTime>,
    retry_in: Option<Duration>,
) -> RenewalDue {
    if let Some(wait) = retry_in
        && !wait.is_zero()
    {
        return RenewalDue::In(wait.min(RENEWAL_CHECK_INTERVAL));
    }
    match (not_before, renew_at) {
        (Some(from), Some(until)) if from <= now => match until.duration_since(now) {
            Ok(left) if !left.is_zero() => RenewalDue::In(left.min(RENEWAL_CHECK_INTERVAL)),
            _ => RenewalDue::Now,
        },
        _ => RenewalDue::Now,
    }
}

/// Returns when to renew: after half of the lifetime, give or take `jitter` (-1 to 1) of
/// [`JITTER`]. ztunnel renews at half of the lifetime too.
pub fn half_life(not_before: SystemTime, not_after: SystemTime, jitter: f64) -> SystemTime {
    let life = not_after.duration_since(not_before).unwrap_or_default();
    not_before + life.mul_f64(0.5 + JITTER * jitter)
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CertificateSource {
    /// Starts the source on the calling runtime, which must be the control runtime and not a
    /// worker's. It ends when `drain` is forced, and the drain does not wait for it.
    ///
    /// Metrics: `canal_certificates_issued_total`, `canal_certificate_failures_total{reason}`,
    /// `canal_certificate_write_failures_total`, `canal_certificates_expiring` (past three quarters
    /// of the lifetime), `canal_certificates_missing`.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub fn start(
        config: CertificateConfig,
        registry: &Registry,
        drain: DrainWatcher,
    ) -> std::io::Result<Self> {
        canal_runtime::atomic_file::folder_for_owner(&config.folder)?;
        persisted::remove_expired(&config.folder, SystemTime::now());
        let plain = |name, help| {
            registry
                .counters(MetricFamily::new(name, help, &[]))
                .shared(&[])
        };
        let inner = Arc::new(Inner {
            issuer: CertificateClient::new(config.controller.clone(), config.validity),
            config,
            renewals: Mutex::default(),
            disk: Mutex::default(),
            trust: OnceLock::new(),
            wake: Notify::new(),
            request_permits: Semaphore::new(REQUESTS_MAX),
            next_number: AtomicU64::new(0),
            issued: plain("canal_certificates_issued_total", "Certificates obtained."),
            failures: registry.counters(MetricFamily::new(
                "canal_certificate_failures_total",
                "Failed attempts to obtain a certificate; the old one stays in use while it is valid.",
                &["reason"],
            )),
            unwritten: plain(
                "canal_certificate_write_failures_total",
                "Certificates that could not be stored for a restart.",
            ),
        });
        inner.show(registry);
        tokio::spawn(run(Arc::downgrade(&inner), drain.watcher()));
        Ok(Self { inner })
    }

    /// Returns the credential of `identity`. It has a certificate at once if a valid one is on
    /// disk, otherwise when the controller answers. Renewal continues until the last clone of the
    /// credential is dropped. Further calls are cheap.
    pub fn credential(&self, identity: &Identity) -> Credential {
        self.credential_with_algorithm(identity, KeyAlgorithm::default())
    }

    /// Does what [`CertificateSource::credential`] does, with a key of this algorithm.
    pub fn credential_with_algorithm(
        &self,
        identity: &Identity,
        algorithm: KeyAlgorithm,
    ) -> Credential {
        self.register(CertificateKey {
            identity: identity.clone(),
            service: None,
            algorithm,
            persistent: true,
        })
    }

    /// Returns a credential that is never written to disk: a component's own, for the channel to
    /// key servers.
    pub fn credential_in_memory(&self, identity: &Identity) -> Credential {
        self.register(CertificateKey {
            identity: identity.clone(),
            service: None,
            algorithm: KeyAlgorithm::default(),
            persistent: false,
        })
    }

    /// Returns a credential of `gateway` (the tenant's gateway identity) that also has the host
    /// names of `service`, for TLS that terminates there.
    pub fn service_credential(
        &self,
        gateway: &Identity,
        service: &ServiceKey,
        algorithm: KeyAlgorithm,
    ) -> Credential {
        self.register(CertificateKey {
            identity: gateway.clone(),
            service: Some(service.clone()),
            algorithm,
            persistent: true,
        })
    }

    /// Deletes the files of `identity`, because its key is in key servers from now on. Owners of
    /// its credential should drop it.
    pub fn forget(&self, identity: &Identity) {
        let _alone = lock(&self.inner.disk);
        for algorithm in [KeyAlgorithm::EcdsaP256, KeyAlgorithm::Rsa2048] {
            let what = CertificateKey {
                identity: identity.clone(),
                service: None,
                algorithm,
                persistent: true,
            };
            lock(&self.inner.renewals).remove(&what);
            if let Err(error) = persisted::remove(&self.inner.config.folder, &what) {
                tracing::error!(%identity, %error, "identity: could not remove a key that moved to key servers; it is still on disk");
            }
        }
    }

    /// Does what [`CertificateSource::forget`] does for all identities of `domain`, including those
    /// without a credential.
    pub fn forget_domain(&self, domain: &TrustDomain) {
        let _alone = lock(&self.inner.disk);
        lock(&self.inner.renewals)
            .retain(|what, _| !what.persistent || what.identity.trust_domain != *domain);
        persisted::remove_domain(&self.inner.config.folder, domain);
    }

    /// Renews certificates early if another root signs now, or if they were revoked, according to
    /// the bundles in `store`. Only the first store is used.
    pub fn follow(&self, store: TrustStore) {
        if self.inner.trust.set(store.clone()).is_err() {
            return;
        }
        let (inner, mut changes) = (Arc::downgrade(&self.inner), store.changes());
        tokio::spawn(async move {
            while changes.changed().await.is_ok() {
                let Some(inner) = inner.upgrade() else { return };
                inner.wake.notify_one();
            }
        });
    }

    fn register(&self, what: CertificateKey) -> Credential {
        let mut wanted = lock(&self.inner.renewals);
        if let Some(w) = wanted.get(&what) {
            return w.writer.credential();
        }
        let (writer, credential) = Credential::empty(what.identity.clone());
        let mut new = RenewalState {
            number: self.inner.next_number.fetch_add(1, Ordering::Relaxed),
            writer,
            renewal_advanced: false,
            renew_at: None,
            backoff: Backoff::new(BACKOFF.0, BACKOFF.1),
            retry_at: None,
            is_requested: false,
            error: String::new(),
        };
        // A certificate from disk lets the data plane start without the controller.
        if what.persistent
            && let Some(certificate) =
                persisted::read(&self.inner.config.folder, &what, SystemTime::now())
        {
            let since = certificate.not_before();
            new.fill(certificate, since);
        }
        wanted.insert(what, new);
        self.inner.wake.notify_one();
        credential
    }

    /// Returns the status of all identities with a credential, sorted.
    pub fn status(&self) -> Vec<CertificateStatus> {
        let seconds = |t: SystemTime| {
            t.duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs()
        };
        let one = |(what, w): (&CertificateKey, &RenewalState)| {
            let current = w.writer.credential().current();
            CertificateStatus {
                identity: what.to_string(),
                not_before: current.as_ref().map(|c| seconds(c.not_before())),
                not_after: current.as_ref().map(|c| seconds(c.not_after())),
                error: w.error.clone(),
            }
        };
        let mut all: Vec<_> = lock(&self.inner.renewals).iter().map(one).collect();
        all.sort_by(|a, b| a.identity.cmp(&b.identity));
        all
    }
}

impl RenewalState {
    /// Installs a certificate whose lifetime counts from `since`.
    fn fill(&mut self, certificate: Certificate, since: SystemTime) {
        let jitter = rand::rng().random_range(-1.0..=1.0);
        self.renew_at = Some(half_life(since, certificate.not_after(), jitter));
        self.renewal_advanced = false;
        self.writer.replace(certificate);
    }

    /// Moves the renewal forward if another root signs now.
    fn renew_if_superseded(&mut self, trust: &TrustStore, now: SystemTime) {
        let Some(current) = self
            .writer
            .credential()
            .current()
            .filter(|_| !self.renewal_advanced)
        else {
            return;
        };
        if trust.superseded(&current.identity().trust_domain, current.chain()) {
            self.renewal_advanced = true;
            let soon = now + SUPERSEDED_SPREAD.mul_f64(rand::rng().random_range(0.0..=1.0));
            self.renew_at = self.renew_at.map(|at| at.min(soon));
        }
    }

    fn due(&self, now: SystemTime) -> RenewalDue {
        let not_before = self.writer.credential().current().map(|c| c.not_before());
        let retry_in = self
            .retry_at
            .map(|at| at.saturating_duration_since(Instant::now()));
        decide(now, not_before, self.renew_at, retry_in)
    }
}

impl Inner {
    /// Returns the certificates to request now with the numbers of their states, and when to check
    /// again. Identities without a credential are removed.
    fn due_renewals(&self) -> (Vec<(CertificateKey, u64)>, Duration) {
        let (now, mut due, mut wait) = (SystemTime::now(), Vec::new(), RENEWAL_CHECK_INTERVAL);
        let mut wanted = lock(&self.renewals);
        wanted.retain(|_, w| w.is_requested || w.writer.is_in_use());
        for (what, w) in wanted.iter_mut().filter(|(_, w)| !w.is_requested) {
            if let Some(trust) = self.trust.get() {
                w.renew_if_superseded(trust, now);
            }
            match w.due(now) {
                RenewalDue::Now => {
                    w.is_requested = true;
                    due.push((what.clone(), w.number));
                }
                RenewalDue::In(left) => wait = wait.min(left),
            }
        }
        (due, wait)
    }

    async fn obtain(&self, what: CertificateKey, number: u64) {
        // The semaphore is never closed; an error would only mean one more concurrent request.
        let _room = self.request_permits.acquire().await;
        let outcome = self.issuer.issue(&what).await;
        if let Ok(issued) = &outcome {
            self.persist(&what, number, issued);
        }
        self.finish_request(&what, number, outcome.map(|i| i.certificate));
    }

    /// Stores the certificate for a restart, unless it was forgotten in the meantime.
    fn persist(
        &self,
        what: &CertificateKey,
        number: u64,
        issued: &certificate_client::PersistedCertificate,
    ) {
        let _alone = lock(&self.disk);
        if !what.persistent
            || lock(&self.renewals)
                .get(what)
                .is_none_or(|w| w.number != number)
        {
            return;
        }
        if let Err(error) = persisted::write(&self.config.folder, what, issued) {
            self.unwritten.inc();
            tracing::error!(identity = %what, %error, "identity: could not store the certificate; a restart requests a new one");
        }
    }

    fn finish_request(
        &self,
        what: &CertificateKey,
        number: u64,
        outcome: Result<Certificate, CertificateRequestError>,
    ) {
        // A state with another number was created after this request had started.
        if let Some(w) = lock(&self.renewals)
            .get_mut(what)
            .filter(|w| w.number == number)
        {
            w.is_requested = false;
            match outcome {
                Ok(certificate) => {
                    self.issued.inc();
                    w.error.clear();
                    let superseded = |t: &TrustStore| {
                        t.superseded(&certificate.identity().trust_domain, certificate.chain())
                    };
                    if self.trust.get().is_some_and(superseded) {
                        // The new root is announced before it signs, so the next attempts are
                        // spaced like those after a failure.
                        w.retry_at = Some(Instant::now() + w.backoff.next_wait());
                    } else {
                        w.backoff.reset();
                        w.retry_at = None;
                    }
                    tracing::info!(identity = %what, not_after = ?certificate.not_after(), "identity: obtained a certificate");
                    // Certificate authorities backdate certificates. A short-lived one would be
                    // past half its lifetime when it is issued.
                    let since = certificate.not_before().max(SystemTime::now());
                    w.fill(certificate, since);
                }
                Err(error) => {
                    self.failures.shared(&[error.reason()]).inc();
                    w.error = error.to_string();
                    let wait = w.backoff.next_wait();
                    w.retry_at = Some(Instant::now() + wait);
                    tracing::warn!(identity = %what, %error, ?wait, "identity: could not obtain a certificate; retrying");
                }
            }
        }
        // The renewal task computes its next wait anew, because this certificate's due time has
        // changed.
        self.wake.notify_one();
    }

    /// Registers gauges that are computed at each scrape.
    fn show(self: &Arc<Self>, registry: &Registry) {
        let count =
            |inner: &Weak<Inner>, is: fn(&Certificate, SystemTime) -> bool, missing: bool| {
                let now = SystemTime::now();
                let wrong = |w: &&RenewalState| {
                    w.writer
                        .credential()
                        .current()
                        .map_or(missing, |c| is(&c, now))
                };
                inner.upgrade().map_or(0.0, |i| {
                    lock(&i.renewals).values().filter(wrong).count() as f64
                })
            };
        let (a, b) = (Arc::downgrade(self), Arc::downgrade(self));
        registry.probe(
            "canal_certificates_missing",
            "Identities in use without a valid certificate.",
            move || count(&a, |c, now| !c.valid_at(now), true),
        );
        registry.probe(
            "canal_certificates_expiring",
            "Certificates past three quarters of their lifetime, whose renewal fails.",
            move || {
                count(
                    &b,
                    |c, now| {
                        now > c.not_before()
                            + c.not_after()
                                .duration_since(c.not_before())
                                .unwrap_or_default()
                                .mul_f64(0.75)
                    },
                    false,
                )
            },
        );
    }
}

/// Checks every identity, starts the due requests, and sleeps. It ends with the source, or when the
/// drain is forced.
async fn run(inner: Weak<Inner>, watcher: DrainObserver) {
    loop {
        let Some(source) = inner.upgrade() else {
            return;
        };
        let (due, wait) = source.due_renewals();
        for (what, number) in due {
            let source = source.clone();
            tokio::spawn(async move { source.obtain(what, number).await });
        }
        source.issuer.close_if_idle().await;
        let wake = async {
            tokio::select! {
                () = source.wake.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
        };
        tokio::select! {
            () = wake => {}
            () = watcher.forced() => return,
        }
    }
}

#[cfg(test)]
mod tests;
