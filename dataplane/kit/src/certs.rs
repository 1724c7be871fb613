//! Obtains and renews certificates from `IstioCertificateService`: own key per identity, renewal at half life or when another root signs, the
//! old one kept while valid. Keys survive a restart in `<data-dir>/certs/<sha256 of the identity>.json`, mode 0600, because a data plane
//! must start without the controller; those of components never touch a disk, and those in key servers are none of this module's.

mod issue;
mod kept;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use canal_model::identity::Identity;
use canal_model::ids::{ServiceKey, TrustDomain};
use canal_model::trust::KeyAlgorithm;
use rand::Rng;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::controller::Controller;
use crate::drain::{Drain, Watcher};
use crate::metrics::{Counters, Family, Registry, SharedCounter};
use crate::tls::{Certificate, Credential, CredentialWriter, TrustStore};

pub use issue::{IssueError, Issuer, Signed};

/// Lifetime asked for (Istio's `SECRET_TTL`); the controller may give less.
pub const VALIDITY: Duration = Duration::from_secs(24 * 3600);
/// First and longest wait after a failed attempt.
pub const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Requests under way at once; a node that starts with hundreds of pods must not storm the controller.
pub const REQUESTS_MAX: usize = 8;
/// The clock is looked at this often, so that a machine that slept or whose clock was set renews within it.
pub const LOOK: Duration = Duration::from_secs(15);
/// Renewal is spread over this share of the lifetime around its half.
const JITTER: f64 = 0.05;
/// Once another root signs, certificates are renewed at random within this time.
pub const SUPERSEDED_SPREAD: Duration = Duration::from_secs(10);

/// What the source needs.
#[derive(Debug, Clone)]
pub struct CertificateConfig {
    /// Who issues.
    pub controller: Controller,
    /// `<data-dir>/certs`; made 0700.
    pub folder: PathBuf,
    /// Lifetime asked for.
    pub validity: Duration,
}

/// Keeps a valid certificate for every identity that someone holds the [`Credential`] of. Clones share the work.
#[derive(Clone)]
pub struct CertificateSource {
    inner: Arc<Inner>,
}

/// What is known of one identity, for `/config_dump`.
#[derive(Debug, Clone, serde::Serialize)]
pub struct CertificateStatus {
    pub identity: String,
    /// Seconds since 1970.
    pub not_before: Option<u64>,
    pub not_after: Option<u64>,
    /// Of the last attempt, empty after success.
    pub error: String,
}

struct Inner {
    config: CertificateConfig,
    wanted: Mutex<HashMap<What, Wanted>>,
    /// Locked, before `wanted`, while what is on disk changes: nothing comes there once it is forgotten.
    disk: Mutex<()>,
    /// Tells when another root signs.
    trust: OnceLock<TrustStore>,
    wake: Notify,
    room: Semaphore,
    issuer: Issuer,
    issued: SharedCounter,
    failures: Counters,
    unwritten: SharedCounter,
}

/// What a certificate is for, and of which kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct What {
    identity: Identity,
    /// With its host names.
    service: Option<ServiceKey>,
    algorithm: KeyAlgorithm,
    /// Kept for a restart.
    kept: bool,
}

/// As its file's content names it.
impl fmt::Display for What {
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

/// One identity's work.
struct Wanted {
    writer: CredentialWriter,
    /// Renewal was moved forward, because another root signs.
    hurried: bool,
    /// When to ask for the next certificate, by the wall clock; `None` without one.
    renew_at: Option<SystemTime>,
    backoff: Backoff,
    /// Not before, after a failure.
    retry_at: Option<Instant>,
    under_way: bool,
    error: String,
}

/// What to do for one identity now.
#[derive(Debug, PartialEq, Eq)]
enum Due {
    Now,
    /// Look again within.
    In(Duration),
}

/// Decides by both clocks: the wall clock says whether a certificate is due (it may jump), the monotonic one how long a failure waits.
fn decide(now: SystemTime, not_before: Option<SystemTime>, renew_at: Option<SystemTime>, retry_in: Option<Duration>) -> Due {
    if let Some(wait) = retry_in
        && !wait.is_zero()
    {
        return Due::In(wait.min(LOOK));
    }
    match (not_before, renew_at) {
        (Some(from), Some(until)) if from <= now => match until.duration_since(now) {
            Ok(left) if !left.is_zero() => Due::In(left.min(LOOK)),
            _ => Due::Now,
        },
        _ => Due::Now,
    }
}

/// When to renew: half of the lifetime has passed, give or take `jitter` (-1 to 1) of [`JITTER`] (features.md A.2).
pub fn half_life(not_before: SystemTime, not_after: SystemTime, jitter: f64) -> SystemTime {
    let life = not_after.duration_since(not_before).unwrap_or_default();
    not_before + life.mul_f64(0.5 + JITTER * jitter)
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CertificateSource {
    /// Starts the source on the calling runtime (the control runtime, not a worker's). It ends when `drain` is forced; the drain does not
    /// wait for it.
    ///
    /// Metrics: `canal_certificates_issued_total`, `canal_certificate_failures_total{reason}`, `canal_certificates_unwritten_total`,
    /// `canal_certificates_expiring` (past three quarters of life), `canal_certificates_missing`.
    pub fn start(config: CertificateConfig, registry: &Registry, drain: Drain) -> std::io::Result<Self> {
        crate::durable::folder_for_owner(&config.folder)?;
        kept::remove_expired(&config.folder, SystemTime::now());
        let plain = |name, help| registry.counters(Family::new(name, help, &[])).shared(&[]);
        let inner = Arc::new(Inner {
            issuer: Issuer::new(config.controller.clone(), config.validity),
            config,
            wanted: Mutex::default(),
            disk: Mutex::default(),
            trust: OnceLock::new(),
            wake: Notify::new(),
            room: Semaphore::new(REQUESTS_MAX),
            issued: plain("canal_certificates_issued_total", "Certificates obtained."),
            failures: registry.counters(Family::new(
                "canal_certificate_failures_total",
                "Failed attempts to obtain a certificate; the old one stays while it is valid.",
                &["reason"],
            )),
            unwritten: plain("canal_certificates_unwritten_total", "Certificates that could not be kept for a restart."),
        });
        inner.show(registry);
        tokio::spawn(run(Arc::downgrade(&inner), drain.watcher()));
        Ok(Self { inner })
    }

    /// The place of `identity`'s certificate: filled at once from disk if a valid one is there, else when the controller answers.
    /// Renewal goes on until the last clone of the credential is dropped. Cheap to call again.
    pub fn want(&self, identity: &Identity) -> Credential {
        self.want_with(identity, KeyAlgorithm::default())
    }

    /// [`CertificateSource::want`] with a key of this algorithm.
    pub fn want_with(&self, identity: &Identity, algorithm: KeyAlgorithm) -> Credential {
        self.place(What { identity: identity.clone(), service: None, algorithm, kept: true })
    }

    /// A certificate that is never on a disk: a component's own, for the channel to key servers.
    pub fn want_in_memory(&self, identity: &Identity) -> Credential {
        self.place(What { identity: identity.clone(), service: None, algorithm: KeyAlgorithm::default(), kept: false })
    }

    /// A certificate of `gateway` (the tenant's gateway identity) that has the host names of `service` too, for TLS that ends there.
    pub fn want_service(&self, gateway: &Identity, service: &ServiceKey, algorithm: KeyAlgorithm) -> Credential {
        self.place(What { identity: gateway.clone(), service: Some(service.clone()), algorithm, kept: true })
    }

    /// Removes what is kept on disk of `identity`: its key is in key servers from now on. Whoever holds its credential should drop it.
    pub fn forget(&self, identity: &Identity) {
        let _alone = lock(&self.inner.disk);
        for algorithm in [KeyAlgorithm::EcdsaP256, KeyAlgorithm::Rsa2048] {
            let what = What { identity: identity.clone(), service: None, algorithm, kept: true };
            lock(&self.inner.wanted).remove(&what);
            if let Err(error) = kept::remove(&self.inner.config.folder, &what) {
                tracing::error!(%identity, %error, "a key that is in key servers now is still on disk");
            }
        }
    }

    /// [`CertificateSource::forget`] for all members of `domain`, those that nobody wants now among them.
    pub fn forget_domain(&self, domain: &TrustDomain) {
        let _alone = lock(&self.inner.disk);
        lock(&self.inner.wanted).retain(|what, _| !what.kept || what.identity.trust_domain != *domain);
        kept::remove_domain(&self.inner.config.folder, domain);
    }

    /// Renews early what another root signs by now, and what was revoked, as the bundles in `store` say. Only the first store counts.
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

    fn place(&self, what: What) -> Credential {
        let mut wanted = lock(&self.inner.wanted);
        if let Some(w) = wanted.get(&what) {
            return w.writer.credential();
        }
        let (writer, credential) = Credential::empty(what.identity.clone());
        let mut new = Wanted {
            writer,
            hurried: false,
            renew_at: None,
            backoff: Backoff::new(BACKOFF.0, BACKOFF.1),
            retry_at: None,
            under_way: false,
            error: String::new(),
        };
        if what.kept
            && let Some(certificate) = kept::read(&self.inner.config.folder, &what, SystemTime::now())
        {
            let since = certificate.not_before();
            new.fill(certificate, since);
        }
        wanted.insert(what, new);
        self.inner.wake.notify_one();
        credential
    }

    /// All wanted identities, sorted.
    pub fn status(&self) -> Vec<CertificateStatus> {
        let seconds = |t: SystemTime| t.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let one = |(what, w): (&What, &Wanted)| {
            let current = w.writer.credential().current();
            CertificateStatus {
                identity: what.to_string(),
                not_before: current.as_ref().map(|c| seconds(c.not_before())),
                not_after: current.as_ref().map(|c| seconds(c.not_after())),
                error: w.error.clone(),
            }
        };
        let mut all: Vec<_> = lock(&self.inner.wanted).iter().map(one).collect();
        all.sort_by(|a, b| a.identity.cmp(&b.identity));
        all
    }
}

impl Wanted {
    /// Its life counts from `since`.
    fn fill(&mut self, certificate: Certificate, since: SystemTime) {
        let jitter = rand::rng().random_range(-1.0..=1.0);
        self.renew_at = Some(half_life(since, certificate.not_after(), jitter));
        self.hurried = false;
        self.writer.replace(certificate);
    }

    /// Moves the renewal forward if another root signs by now.
    fn hurry(&mut self, trust: &TrustStore, now: SystemTime) {
        let Some(current) = self.writer.credential().current().filter(|_| !self.hurried) else { return };
        if trust.superseded(&current.identity().trust_domain, current.chain()) {
            self.hurried = true;
            let soon = now + SUPERSEDED_SPREAD.mul_f64(rand::rng().random_range(0.0..=1.0));
            self.renew_at = self.renew_at.map(|at| at.min(soon));
        }
    }

    fn due(&self, now: SystemTime) -> Due {
        let not_before = self.writer.credential().current().map(|c| c.not_before());
        let retry_in = self.retry_at.map(|at| at.saturating_duration_since(Instant::now()));
        decide(now, not_before, self.renew_at, retry_in)
    }
}

impl Inner {
    /// What to ask for now, and when to look again. Identities that nobody wants any more are forgotten.
    fn round(&self) -> (Vec<What>, Duration) {
        let (now, mut due, mut wait) = (SystemTime::now(), Vec::new(), LOOK);
        let mut wanted = lock(&self.wanted);
        wanted.retain(|_, w| w.under_way || w.writer.wanted());
        for (what, w) in wanted.iter_mut().filter(|(_, w)| !w.under_way) {
            if let Some(trust) = self.trust.get() {
                w.hurry(trust, now);
            }
            match w.due(now) {
                Due::Now => {
                    w.under_way = true;
                    due.push(what.clone());
                }
                Due::In(left) => wait = wait.min(left),
            }
        }
        (due, wait)
    }

    async fn obtain(&self, what: What) {
        // Closed never; an error would only mean one request more at once.
        let _room = self.room.acquire().await;
        let outcome = self.issuer.issue(&what).await;
        if let Ok(issued) = &outcome {
            self.keep(&what, issued);
        }
        self.settle(&what, outcome.map(|i| i.certificate));
    }

    /// For a restart, unless it was forgotten meanwhile.
    fn keep(&self, what: &What, issued: &issue::Issued) {
        let _alone = lock(&self.disk);
        if !what.kept || !lock(&self.wanted).contains_key(what) {
            return;
        }
        if let Err(error) = kept::write(&self.config.folder, what, issued) {
            self.unwritten.inc();
            tracing::error!(identity = %what, %error, "the certificate works but will not survive a restart");
        }
    }

    fn settle(&self, what: &What, outcome: Result<Certificate, IssueError>) {
        if let Some(w) = lock(&self.wanted).get_mut(what) {
            w.under_way = false;
            match outcome {
                Ok(certificate) => {
                    self.issued.inc();
                    w.error.clear();
                    let superseded = |t: &TrustStore| t.superseded(&certificate.identity().trust_domain, certificate.chain());
                    if self.trust.get().is_some_and(superseded) {
                        // Told of the new root before it signs: as often as after a failure.
                        w.retry_at = Some(Instant::now() + w.backoff.next_wait());
                    } else {
                        w.backoff.reset();
                        w.retry_at = None;
                    }
                    tracing::info!(identity = %what, not_after = ?certificate.not_after(), "certificate obtained");
                    // Authorities date certificates back; a short one would be past its half at birth.
                    let since = certificate.not_before().max(SystemTime::now());
                    w.fill(certificate, since);
                }
                Err(error) => {
                    self.failures.shared(&[error.reason()]).inc();
                    w.error = error.to_string();
                    let wait = w.backoff.next_wait();
                    w.retry_at = Some(Instant::now() + wait);
                    tracing::warn!(identity = %what, %error, ?wait, "no certificate");
                }
            }
        }
        self.wake.notify_one();
    }

    /// Gauges that are worked out when asked for.
    fn show(self: &Arc<Self>, registry: &Registry) {
        let count = |inner: &Weak<Inner>, is: fn(&Certificate, SystemTime) -> bool, missing: bool| {
            let now = SystemTime::now();
            let wrong = |w: &&Wanted| w.writer.credential().current().map_or(missing, |c| is(&c, now));
            inner.upgrade().map_or(0.0, |i| lock(&i.wanted).values().filter(wrong).count() as f64)
        };
        let (a, b) = (Arc::downgrade(self), Arc::downgrade(self));
        registry.probe("canal_certificates_missing", "Wanted identities without a valid certificate.", move || {
            count(&a, |c, now| !c.valid_at(now), true)
        });
        registry.probe("canal_certificates_expiring", "Certificates past three quarters of their life: renewal fails.", move || {
            count(&b, |c, now| now > c.not_before() + c.not_after().duration_since(c.not_before()).unwrap_or_default().mul_f64(0.75), false)
        });
    }
}

/// Looks at every identity, starts what is due, sleeps; ends with the source or when forced.
async fn run(inner: Weak<Inner>, watcher: Watcher) {
    loop {
        let Some(source) = inner.upgrade() else { return };
        let (due, wait) = source.round();
        for what in due {
            let source = source.clone();
            tokio::spawn(async move { source.obtain(what).await });
        }
        source.issuer.rest().await;
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
