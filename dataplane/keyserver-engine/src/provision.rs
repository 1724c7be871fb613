//! [`Provisioner`]: keys and certificates for the identities to which requesters are entitled.
//!
//! It generates a key, requests its certificate from the controller, replaces it at half life, and
//! drops keys to which no requester is entitled. `entitlements` decides on entitlement; the
//! controller decides whether it issues.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, SystemTime};

use canal_identity::certs::{BACKOFF, CertificateClient, half_life};
use canal_model::identity::{Identity, gateway_identity};
use canal_model::ids::ServiceKey;
use canal_model::trust::KeyAlgorithm;
use canal_runtime::backoff::Backoff;
use canal_runtime::drain::DrainObserver;
use canal_runtime::metrics::{CounterFamily, MetricFamily, Registry, SharedCounter};
use canal_tls::{PeerRole, PeerVerifier, TrustStore};
use canal_wire::keyrpc::{KeyName, SpkiHash};
use rand::Rng;
use rcgen::{CertificateParams, DistinguishedName, SanType};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Instant;

use crate::certified_key::CertifiedPrivateKey;
use crate::entitlements::{EntitlementIndex, KeyClaim};
use crate::key::{PrivateKey, RequestKey};
use crate::key_slot::KeySlot;
use crate::limits::{CERTIFICATE_REQUESTS_MAX, GENERATIONS_MAX, SERVICES_MAX};
use crate::vault::Vault;

/// Longest interval between checks of the clock, so that a machine that slept renews within it. The
/// same as a node's (`RENEWAL_CHECK_INTERVAL` of canal-identity).
const PROVISION_INTERVAL: Duration = Duration::from_secs(15);
/// Minimum time between two replacements of a certificate whose root no longer signs: the
/// controller may not have finished the change. As long as nodes spread such renewals
/// (`SUPERSEDED_SPREAD` of canal-identity).
const SUPERSEDED_PAUSE: Duration = Duration::from_secs(10);

/// Certificate that the controller issued, with its roots.
#[derive(Debug, Clone)]
pub struct ProvisionedCertificate {
    /// Certificates in PEM, leaf first.
    pub chain: Vec<String>,
    /// Roots of the trust domain in PEM.
    pub bundle: String,
}

/// Reason why no certificate was issued; `reason` is a label.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{text}")]
pub struct IssuanceError {
    pub reason: &'static str,
    pub text: String,
}

/// Future of a certificate request's result.
pub type IssueFuture<'a> =
    Pin<Box<dyn Future<Output = Result<ProvisionedCertificate, IssuanceError>> + Send + 'a>>;

/// Signs certificate requests, as the controller does.
pub trait CertificateIssuer: Send + Sync + 'static {
    /// Requests a certificate for `identity`, or, with `service`, for the gateway identity with the
    /// service's DNS names. `csr` is PEM.
    fn issue<'a>(
        &'a self,
        identity: &'a Identity,
        service: Option<&'a ServiceKey>,
        csr: String,
    ) -> IssueFuture<'a>;
}

impl CertificateIssuer for CertificateClient {
    fn issue<'a>(
        &'a self,
        identity: &'a Identity,
        service: Option<&'a ServiceKey>,
        csr: String,
    ) -> IssueFuture<'a> {
        Box::pin(async move {
            match self.sign(identity, service, csr).await {
                Ok(signed) => Ok(ProvisionedCertificate {
                    chain: signed.chain,
                    bundle: signed.bundle,
                }),
                Err(e) => Err(IssuanceError {
                    reason: e.reason(),
                    text: e.to_string(),
                }),
            }
        })
    }
}

struct ProvisionEntry {
    claim: KeyClaim,
    renew_at: Option<SystemTime>,
    retry_at: Option<Instant>,
    /// Time of the last renewal because the root no longer signs.
    superseded_at: Option<Instant>,
    backoff: Backoff,
    is_in_progress: bool,
    queued: bool,
    error: String,
}

#[derive(Default)]
struct ProvisionState {
    entries: HashMap<KeyName, ProvisionEntry>,
    /// Names that are due, the next one first.
    queue: VecDeque<KeyName>,
}

struct Inner {
    issue: Arc<dyn CertificateIssuer>,
    vault: Arc<Vault>,
    trust: TrustStore,
    /// Identity of the key server itself, with its claim.
    own: (Identity, KeyClaim),
    keys: RwLock<HashMap<KeyName, KeySlot>>,
    state: Mutex<ProvisionState>,
    wake: Notify,
    /// True if all names must be checked, and not only those queued.
    scan: AtomicBool,
    permits: Arc<Semaphore>,
    making: Semaphore,
    changed: watch::Sender<u64>,
    issued: SharedCounter,
    failures: CounterFamily,
}

/// Keys that this key server generated. Clones share them.
#[derive(Clone)]
pub struct Provisioner {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Provisioner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Provisioner({} held)", self.count())
    }
}

/// Status of one name for `/config_dump`.
#[derive(Debug, Clone, serde::Serialize)]
pub struct KeyStatus {
    pub name: String,
    /// Algorithm of the key: `ecdsa` or `rsa`.
    pub algorithm: Option<&'static str>,
    /// End of the validity in seconds since 1970.
    pub not_after: Option<u64>,
    /// Error of the last attempt; empty after success.
    pub error: String,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProvisionEntry {
    fn new(claim: KeyClaim) -> Self {
        Self {
            claim,
            renew_at: None,
            retry_at: None,
            superseded_at: None,
            backoff: Backoff::new(BACKOFF.0, BACKOFF.1),
            is_in_progress: false,
            queued: false,
            error: String::new(),
        }
    }

    fn due(&self, now: SystemTime) -> bool {
        !self.is_in_progress
            && self.retry_at.is_none_or(|at| at <= Instant::now())
            && self.renew_at.is_none_or(|at| at <= now)
    }
}

impl Provisioner {
    /// Starts the provisioner on the calling runtime. It ends with its last clone, or when `drain`
    /// is forced. The certificate for `own` is obtained at once and never dropped.
    ///
    /// Metrics: `canal_key_certificates_issued_total`,
    /// `canal_key_certificate_failures_total{reason}`, `canal_key_certificates_missing`,
    /// `canal_key_generated_keys`.
    pub fn start(
        issue: Arc<dyn CertificateIssuer>,
        vault: Arc<Vault>,
        trust: TrustStore,
        own: (Identity, KeyClaim),
        registry: &Registry,
        drain: DrainObserver,
    ) -> Self {
        let failures = "canal_key_certificate_failures_total";
        let inner = Arc::new(Inner {
            issue,
            vault,
            trust,
            own,
            keys: RwLock::default(),
            state: Mutex::default(),
            wake: Notify::new(),
            // The first turn looks at all entries, so that the key server's own certificate is
            // requested at once.
            scan: AtomicBool::new(true),
            permits: Arc::new(Semaphore::new(CERTIFICATE_REQUESTS_MAX)),
            making: Semaphore::new(GENERATIONS_MAX),
            changed: watch::Sender::new(0),
            issued: registry
                .counters(MetricFamily::new(
                    "canal_key_certificates_issued_total",
                    "Certificates issued for keys created by this key server.",
                    &[],
                ))
                .shared(&[]),
            failures: registry.counters(MetricFamily::new(
                failures,
                "Failed attempts to obtain a certificate for a key created by this key server.",
                &["reason"],
            )),
        });
        inner.show(registry);
        let name = KeyName::Identity(inner.own.0.clone());
        lock(&inner.state)
            .entries
            .insert(name, ProvisionEntry::new(inner.own.1.clone()));
        tokio::spawn(run(Arc::downgrade(&inner), drain));
        Self { inner }
    }

    /// Returns the key server's own certificate.
    pub fn own_certificate(&self) -> Option<Arc<CertifiedPrivateKey>> {
        self.find(&KeyName::Identity(self.inner.own.0.clone()))
    }

    /// Returns a key with a certificate that is valid now.
    pub fn find(&self, name: &KeyName) -> Option<Arc<CertifiedPrivateKey>> {
        self.inner.valid(name).inspect(|c| c.mark_used())
    }

    /// Returns the key of certificates that a peer is presented: the current one, or its
    /// predecessor.
    pub(crate) fn presented_key(
        &self,
        name: &KeyName,
        spki: &SpkiHash,
    ) -> Option<Arc<CertifiedPrivateKey>> {
        let keys = self
            .inner
            .keys
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        keys.get(name)?
            .by_spki(spki, std::time::Instant::now())
            .cloned()
    }

    /// Returns a key like [`Provisioner::find`], or obtains it before all names for which no
    /// request waits.
    ///
    /// # Errors
    /// Returns the last attempt's error, or that the controller has not answered by `until`.
    pub async fn obtain(
        &self,
        name: &KeyName,
        claim: &KeyClaim,
        until: Instant,
    ) -> Result<Arc<CertifiedPrivateKey>, String> {
        let mut changed = self.inner.changed.subscribe();
        let since = Instant::now();
        loop {
            changed.borrow_and_update();
            if let Some(certified) = self.find(name) {
                return Ok(certified);
            }
            self.inner.renew_superseded(name, claim, since)?;
            self.inner.wake.notify_one();
            // Only the timeout ends the wait with an error, because `self` has the sender.
            if tokio::time::timeout_at(until, changed.changed())
                .await
                .is_err()
            {
                return Err("the controller has not answered yet".into());
            }
        }
    }

    /// Applies the present entitlements: adds new names, and drops those that are gone.
    pub fn follow(&self, rights: &EntitlementIndex) {
        let claims = rights.identities();
        let mut state = lock(&self.inner.state);
        let own = KeyName::Identity(self.inner.own.0.clone());
        let mut gone = Vec::new();
        state.entries.retain(|name, want| {
            let claim = match name {
                KeyName::Identity(_) if *name == own => return true,
                KeyName::Identity(identity) => claims.get(identity).cloned(),
                KeyName::Service(service) => rights.terminates(&service.tenant),
                KeyName::File(_) => None,
            };
            match claim {
                Some(claim) => {
                    if want.claim != claim {
                        // The algorithm or the trust domain changed: a new key is generated, and
                        // the old one serves until then.
                        (want.renew_at, want.retry_at, want.claim) = (None, None, claim);
                    }
                    true
                }
                None => {
                    gone.push(name.clone());
                    false
                }
            }
        });
        for (identity, claim) in claims {
            state
                .entries
                .entry(KeyName::Identity(identity))
                .or_insert_with(|| ProvisionEntry::new(claim));
        }
        drop(state);
        self.inner.forget(&gone);
        self.inner.scan.store(true, Relaxed);
        self.inner.wake.notify_one();
    }

    /// Returns the number of stored keys, whether their certificates are valid or not.
    pub fn count(&self) -> usize {
        self.inner
            .keys
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }

    /// Returns the status of all names, sorted.
    pub fn status(&self) -> Vec<KeyStatus> {
        let seconds = |t: SystemTime| {
            t.duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs()
        };
        let state = lock(&self.inner.state);
        let keys = self
            .inner
            .keys
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let one = |(name, want): (&KeyName, &ProvisionEntry)| {
            let certified = keys.get(name).map(KeySlot::current);
            KeyStatus {
                name: name.to_string(),
                algorithm: certified.map(|c| c.key.queue().name()),
                not_after: certified.map(|c| seconds(c.not_after)),
                error: want.error.clone(),
            }
        };
        let mut all: Vec<_> = state.entries.iter().map(one).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

impl Inner {
    fn valid(&self, name: &KeyName) -> Option<Arc<CertifiedPrivateKey>> {
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        keys.get(name)
            .map(KeySlot::current)
            .filter(|c| c.valid_at(SystemTime::now()))
            .cloned()
    }

    /// Queues a name before all others, unless its last attempt failed since the caller began to
    /// wait, or a moment ago.
    fn renew_superseded(
        &self,
        name: &KeyName,
        claim: &KeyClaim,
        since: Instant,
    ) -> Result<(), String> {
        let mut state = lock(&self.state);
        if self.valid(name).is_some() {
            // The certificate came after the caller's check: it is found now, and must not be
            // requested once more.
            return Ok(());
        }
        let ProvisionState {
            entries: wanted,
            queue,
        } = &mut *state;
        if !wanted.contains_key(name) {
            // Tenants choose how many services they have, so the number of their keys is bounded.
            let services = wanted
                .keys()
                .filter(|k| matches!(k, KeyName::Service(s) if s.tenant == claim.tenant))
                .count();
            if matches!(name, KeyName::Service(_)) && services >= SERVICES_MAX {
                return Err(format!(
                    "tenant {} has certificates for {SERVICES_MAX} services already; fix: remove Terminations that are no longer used",
                    claim.tenant
                ));
            }
        }
        let want = wanted
            .entry(name.clone())
            .or_insert_with(|| ProvisionEntry::new(claim.clone()));
        // The request in progress serves this caller too.
        if want.is_in_progress {
            return Ok(());
        }
        // A CA that fails is not called again for every requester that waits.
        if want
            .retry_at
            .is_some_and(|at| at > Instant::now() || at > since)
            && !want.error.is_empty()
        {
            return Err(want.error.clone());
        }
        // The certificate is missing or no longer valid, whatever its planned renewal.
        want.renew_at = None;
        want.queued = true;
        // A requester waits for this name, while the names behind it are only renewed early.
        queue.push_front(name.clone());
        Ok(())
    }

    fn hold(&self, name: &KeyName, next: Arc<CertifiedPrivateKey>) {
        let mut keys = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        let before = keys.remove(name);
        keys.insert(
            name.clone(),
            KeySlot::after(before, next, std::time::Instant::now()),
        );
    }

    fn forget(&self, names: &[KeyName]) {
        let mut keys = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        for name in names {
            if keys.remove(name).is_some() {
                tracing::info!(%name, "key server: removed a key that no requester is entitled to or uses");
            }
        }
    }

    /// Drops old predecessors. It is separate from [`Inner::poll`], which takes longer, because
    /// requests wait for a writer.
    fn tidy(&self) {
        let now = std::time::Instant::now();
        self.keys
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .values_mut()
            .for_each(|slot| slot.tidy(now));
    }

    /// Queues all names that are due.
    fn poll(&self) {
        let now = SystemTime::now();
        // Lock order, everywhere: the state before the keys.
        let mut state = lock(&self.state);
        self.tidy();
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        let ProvisionState {
            entries: wanted,
            queue,
        } = &mut *state;
        let mut unused = Vec::new();
        for (name, want) in wanted.iter_mut().filter(|(_, w)| !w.queued) {
            let certified = keys.get(name).map(KeySlot::current);
            let rested = want
                .superseded_at
                .is_none_or(|at| at.elapsed() >= SUPERSEDED_PAUSE);
            if rested
                && certified
                    .is_some_and(|c| self.trust.superseded(&want.claim.trust_domain, &c.chain))
            {
                (want.renew_at, want.superseded_at) = (None, Some(Instant::now()));
            }
            if !want.due(now) {
                continue;
            }
            // Gateways request a service's certificate repeatedly; after half a life without a
            // request the service is gone.
            if matches!(name, KeyName::Service(_)) && certified.is_some_and(|c| !c.is_used()) {
                unused.push(name.clone());
                continue;
            }
            want.queued = true;
            queue.push_back(name.clone());
        }
        drop(keys);
        wanted.retain(|name, _| !unused.contains(name));
        drop(state);
        self.forget(&unused);
    }

    /// Returns for how long no name will be due.
    fn rest(&self) -> Duration {
        let (now, at) = (SystemTime::now(), Instant::now());
        let left = |w: &ProvisionEntry| match (w.retry_at, w.renew_at) {
            (Some(retry), _) => Some(retry.saturating_duration_since(at)),
            (None, renew) => renew.map(|t| t.duration_since(now).unwrap_or_default()),
        };
        let state = lock(&self.state);
        let resting = state
            .entries
            .values()
            .filter(|w| !w.is_in_progress && !w.queued);
        // Not shorter than 10 ms, so that a name that is always due costs little.
        resting
            .filter_map(left)
            .min()
            .unwrap_or(PROVISION_INTERVAL)
            .clamp(Duration::from_millis(10), PROVISION_INTERVAL)
    }

    /// Returns the next queued name that is still due.
    fn next(&self) -> Option<(KeyName, KeyClaim)> {
        let now = SystemTime::now();
        let mut state = lock(&self.state);
        let ProvisionState {
            entries: wanted,
            queue,
        } = &mut *state;
        while let Some(name) = queue.pop_front() {
            let Some(want) = wanted.get_mut(&name) else {
                continue;
            };
            want.queued = false;
            if want.due(now) {
                (want.is_in_progress, want.retry_at) = (true, None);
                return Some((name, want.claim.clone()));
            }
        }
        None
    }

    async fn obtain(
        &self,
        name: &KeyName,
        claim: &KeyClaim,
    ) -> Result<CertifiedPrivateKey, IssuanceError> {
        let failed = |reason, text: String| IssuanceError { reason, text };
        let (identity, service) = match name {
            KeyName::Identity(identity) => (identity.clone(), None),
            KeyName::Service(service) => {
                // A service's key is certified for the gateway, with the service's DNS names.
                (gateway_identity(claim.trust_domain.clone()), Some(service))
            }
            KeyName::File(service) => {
                return Err(failed(
                    "file",
                    format!("the key of {service} comes from a file"),
                ));
            }
        };
        let key = Arc::new(self.make(claim.algorithm).await?);
        let csr = request(&key, &identity).map_err(|e| failed("key", e.to_string()))?;
        let issued = self.issue.issue(&identity, service, csr).await?;
        let read = |pem: &str| {
            CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>()
        };
        let unusable = |e: &dyn std::fmt::Display| {
            failed(
                "bad_answer",
                format!("the controller's answer is unusable: {e}"),
            )
        };
        let chain = read(&issued.chain.join("\n")).map_err(|e| unusable(&e))?;
        let bundle = read(&issued.bundle).map_err(|e| unusable(&e))?;
        let verifier = PeerVerifier::new(
            claim.trust_domain.clone(),
            &bundle,
            self.trust.view(&claim.tenant),
        )
        .map_err(|e| unusable(&e))?;
        let expected: Arc<[Identity]> = [identity].into();
        // Only the identity is checked here, as after a finished handshake: `peer` checks neither
        // signatures nor times.
        verifier
            .peer(PeerRole::Server, Some(&expected), Some(&chain))
            .map_err(|e| failed("wrong_identity", e.to_string()))?;
        let certified = CertifiedPrivateKey::new(
            name.clone(),
            claim.tenant.clone(),
            key,
            chain,
            Some(verifier),
        )
        .map_err(|e| unusable(&e))?;
        // Peers would refuse the certificate; a wrong clock is the likely cause.
        if !certified.valid_at(SystemTime::now()) {
            return Err(failed("clock", "the certificate is not valid at this machine's time; fix: correct the clock of this machine or of the controller".into()));
        }
        Ok(certified)
    }

    async fn make(&self, algorithm: KeyAlgorithm) -> Result<PrivateKey, IssuanceError> {
        // The semaphore is never closed; an error would only mean one key more at once.
        let _one = self.making.acquire().await;
        let vault = self.vault.clone();
        let made =
            tokio::task::spawn_blocking(move || PrivateKey::generate(&vault, algorithm)).await;
        let failed = |text: String| IssuanceError {
            reason: "key",
            text,
        };
        made.map_err(|e| failed(e.to_string()))?
            .map_err(|e| failed(e.to_string()))
    }

    fn settle(
        &self,
        name: &KeyName,
        claim: &KeyClaim,
        outcome: Result<CertifiedPrivateKey, IssuanceError>,
    ) {
        let mut state = lock(&self.state);
        // If the name was dropped meanwhile, its certificate is dropped too.
        if let Some(want) = state.entries.get_mut(name) {
            want.is_in_progress = false;
            match outcome {
                Ok(certified) if want.claim == *claim => {
                    self.issued.inc();
                    want.error.clear();
                    want.backoff.reset();
                    want.retry_at = None;
                    // Keys that were made together must not all be renewed together.
                    let jitter = rand::rng().random_range(-1.0..=1.0);
                    // Half of the remaining life: CAs date certificates back for clocks that are
                    // late.
                    want.renew_at = Some(half_life(
                        certified.not_before.max(SystemTime::now()),
                        certified.not_after,
                        jitter,
                    ));
                    self.hold(name, Arc::new(certified));
                }
                // The claim changed meanwhile: the name stays due, and is obtained again under the
                // new one.
                Ok(_) => {}
                Err(error) => {
                    self.failures.shared(&[error.reason]).inc();
                    let wait = want.backoff.next_wait();
                    want.retry_at = Some(Instant::now() + wait);
                    want.error = error.text;
                    tracing::warn!(%name, error = want.error, ?wait, "key server: could not obtain a certificate; retrying");
                }
            }
        }
        drop(state);
        // Requesters that wait for the certificate get either outcome.
        self.changed.send_modify(|n| *n += 1);
        self.wake.notify_one();
    }

    fn show(self: &Arc<Self>, registry: &Registry) {
        let (a, b) = (Arc::downgrade(self), Arc::downgrade(self));
        registry.probe(
            "canal_key_generated_keys",
            "Keys created by this key server and in use.",
            move || {
                a.upgrade().map_or(0.0, |i| {
                    i.keys.read().unwrap_or_else(PoisonError::into_inner).len() as f64
                })
            },
        );
        registry.probe(
            "canal_key_certificates_missing",
            "Names with an entitled requester and without a valid certificate.",
            move || {
                let Some(inner) = b.upgrade() else { return 0.0 };
                let now = SystemTime::now();
                let state = lock(&inner.state);
                let keys = inner.keys.read().unwrap_or_else(PoisonError::into_inner);
                state
                    .entries
                    .keys()
                    .filter(|k| keys.get(k).is_none_or(|h| !h.current().valid_at(now)))
                    .count() as f64
            },
        );
    }
}

/// Builds a certificate request for `identity`: URI SAN only, empty DN.
fn request(key: &PrivateKey, identity: &Identity) -> Result<String, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into()?)];
    params.serialize_request(&RequestKey(key))?.pem()
}

/// Starts due requests while there is capacity, then sleeps. It ends with the provisioner, or when
/// forced.
async fn run(inner: Weak<Inner>, drain: DrainObserver) {
    loop {
        let Some(own) = inner.upgrade() else { return };
        if own.scan.swap(false, Relaxed) {
            own.poll();
        }
        while let Ok(permits) = own.permits.clone().try_acquire_owned() {
            let Some((name, claim)) = own.next() else {
                break;
            };
            let inner = own.clone();
            tokio::spawn(async move {
                let outcome = inner.obtain(&name, &claim).await;
                drop(permits);
                inner.settle(&name, &claim, outcome);
            });
        }
        let wait = own.rest();
        let wake = async {
            tokio::select! {
                () = own.wake.notified() => {}
                () = tokio::time::sleep(wait) => own.scan.store(true, Relaxed),
            }
        };
        tokio::select! {
            () = wake => {}
            () = drain.forced() => return,
        }
    }
}
