//! Keys and certificates for what requesters are entitled to: makes a key, asks the controller for its certificate, asks again at half life, and
//! forgets what nobody is entitled to. Who is entitled is `rights`' business; the controller decides whether it issues.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, SystemTime};

use canal_kit::backoff::Backoff;
use canal_kit::certs::{BACKOFF, Issuer, half_life};
use canal_kit::drain::Watcher;
use canal_kit::metrics::{Counters, Family, Registry, SharedCounter};
use canal_kit::tls::{Judge, Role, TrustStore};
use canal_model::identity::{Identity, gateway_identity};
use canal_model::ids::ServiceKey;
use canal_model::trust::KeyAlgorithm;
use canal_wire::keyrpc::{KeyName, SpkiHash};
use rand::Rng;
use rcgen::{CertificateParams, DistinguishedName, SanType};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Instant;

use crate::certified::Certified;
use crate::held::Held;
use crate::key::{PrivateKey, RequestKey};
use crate::limits::{GENERATIONS_MAX, ISSUES_MAX, SERVICES_MAX};
use crate::rights::{Claim, Rights};
use crate::vault::Vault;

/// The clock is looked at this often, so that a machine that slept renews within it.
const LOOK: Duration = Duration::from_secs(15);
/// A certificate whose root signs no more is not replaced more often: the controller may still be at it.
const SUPERSEDED_PAUSE: Duration = Duration::from_secs(10);

/// What came of a certificate request.
#[derive(Debug, Clone)]
pub struct Issued {
    /// PEM, leaf first.
    pub chain: Vec<String>,
    /// PEM of the trust domain's roots.
    pub bundle: String,
}

/// Why there is none; `reason` is a label.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{text}")]
pub struct NotIssued {
    pub reason: &'static str,
    pub text: String,
}

/// An answer to come.
pub type Issuing<'a> = Pin<Box<dyn Future<Output = Result<Issued, NotIssued>> + Send + 'a>>;

/// Who signs certificate requests.
pub trait Issue: Send + Sync + 'static {
    /// For `identity`, or, with `service`, for the gateway identity with the service's DNS names. `csr` is PEM.
    fn issue<'a>(&'a self, identity: &'a Identity, service: Option<&'a ServiceKey>, csr: String) -> Issuing<'a>;
}

impl Issue for Issuer {
    fn issue<'a>(&'a self, identity: &'a Identity, service: Option<&'a ServiceKey>, csr: String) -> Issuing<'a> {
        Box::pin(async move {
            match self.sign(identity, service, csr).await {
                Ok(signed) => Ok(Issued { chain: signed.chain, bundle: signed.bundle }),
                Err(e) => Err(NotIssued { reason: e.reason(), text: e.to_string() }),
            }
        })
    }
}

struct Want {
    claim: Claim,
    renew_at: Option<SystemTime>,
    retry_at: Option<Instant>,
    /// Renewed because its root signs no more.
    superseded_at: Option<Instant>,
    backoff: Backoff,
    under_way: bool,
    queued: bool,
    error: String,
}

#[derive(Default)]
struct State {
    wanted: HashMap<KeyName, Want>,
    /// Due, the next one first.
    queue: VecDeque<KeyName>,
}

struct Inner {
    issue: Arc<dyn Issue>,
    vault: Arc<Vault>,
    trust: TrustStore,
    /// The key server's own name and what it may have for it.
    own: (Identity, Claim),
    held: RwLock<HashMap<KeyName, Held>>,
    state: Mutex<State>,
    wake: Notify,
    /// All names are to be looked at, not only those queued.
    scan: AtomicBool,
    room: Arc<Semaphore>,
    making: Semaphore,
    changed: watch::Sender<u64>,
    issued: SharedCounter,
    failures: Counters,
}

/// The keys made here. Clones share them.
#[derive(Clone)]
pub struct Provisioner {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Provisioner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Provisioner({} held)", self.count())
    }
}

/// What is known of one name, for `/config_dump`.
#[derive(Debug, Clone, serde::Serialize)]
pub struct KeyStatus {
    pub name: String,
    /// `ecdsa` or `rsa`.
    pub algorithm: Option<&'static str>,
    /// Seconds since 1970.
    pub not_after: Option<u64>,
    /// Of the last attempt, empty after success.
    pub error: String,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Want {
    fn new(claim: Claim) -> Self {
        Self {
            claim,
            renew_at: None,
            retry_at: None,
            superseded_at: None,
            backoff: Backoff::new(BACKOFF.0, BACKOFF.1),
            under_way: false,
            queued: false,
            error: String::new(),
        }
    }

    fn due(&self, now: SystemTime) -> bool {
        !self.under_way && self.retry_at.is_none_or(|at| at <= Instant::now()) && self.renew_at.is_none_or(|at| at <= now)
    }
}

impl Provisioner {
    /// Starts it on the calling runtime; it ends with its last clone, or when `drain` is forced. `own` is obtained at once and always kept.
    ///
    /// Metrics: `canal_key_certificates_issued_total`, `canal_key_certificate_failures_total{reason}`, `canal_key_certificates_missing`,
    /// `canal_key_made_held`.
    pub fn start(
        issue: Arc<dyn Issue>,
        vault: Arc<Vault>,
        trust: TrustStore,
        own: (Identity, Claim),
        registry: &Registry,
        drain: Watcher,
    ) -> Self {
        let failures = "canal_key_certificate_failures_total";
        let inner = Arc::new(Inner {
            issue,
            vault,
            trust,
            own,
            held: RwLock::default(),
            state: Mutex::default(),
            wake: Notify::new(),
            scan: AtomicBool::new(true),
            room: Arc::new(Semaphore::new(ISSUES_MAX)),
            making: Semaphore::new(GENERATIONS_MAX),
            changed: watch::Sender::new(0),
            issued: registry
                .counters(Family::new("canal_key_certificates_issued_total", "Certificates for keys made here.", &[]))
                .shared(&[]),
            failures: registry.counters(Family::new(failures, "Failed attempts to obtain a certificate for a key made here.", &["reason"])),
        });
        inner.show(registry);
        let name = KeyName::Identity(inner.own.0.clone());
        lock(&inner.state).wanted.insert(name, Want::new(inner.own.1.clone()));
        tokio::spawn(run(Arc::downgrade(&inner), drain));
        Self { inner }
    }

    /// The key server's own certificate.
    pub fn own(&self) -> Option<Arc<Certified>> {
        self.find(&KeyName::Identity(self.inner.own.0.clone()))
    }

    /// A key with a certificate that is valid now.
    pub fn find(&self, name: &KeyName) -> Option<Arc<Certified>> {
        self.inner.valid(name).inspect(|c| c.ask())
    }

    /// The key of certificates that a peer is shown, in use or just replaced.
    pub(crate) fn shown(&self, name: &KeyName, spki: &SpkiHash) -> Option<Arc<Certified>> {
        let held = self.inner.held.read().unwrap_or_else(PoisonError::into_inner);
        held.get(name)?.shown(spki, std::time::Instant::now()).cloned()
    }

    /// [`Provisioner::find`], or obtains it before all that nobody waits for. The error is the last attempt's.
    pub async fn obtain(&self, name: &KeyName, claim: &Claim, until: Instant) -> Result<Arc<Certified>, String> {
        let mut changed = self.inner.changed.subscribe();
        let since = Instant::now();
        loop {
            changed.borrow_and_update();
            if let Some(certified) = self.find(name) {
                return Ok(certified);
            }
            self.inner.hurry(name, claim, since)?;
            self.inner.wake.notify_one();
            // An error: the provisioner ends, and the time is waited out.
            if tokio::time::timeout_at(until, changed.changed()).await.is_err() {
                return Err("the controller has not answered yet".into());
            }
        }
    }

    /// Takes what requesters are entitled to now: makes what is new, forgets what is gone.
    pub fn follow(&self, rights: &Rights) {
        let claims = rights.identities();
        let mut state = lock(&self.inner.state);
        let own = KeyName::Identity(self.inner.own.0.clone());
        let mut gone = Vec::new();
        state.wanted.retain(|name, want| {
            let claim = match name {
                KeyName::Identity(_) if *name == own => return true,
                KeyName::Identity(identity) => claims.get(identity).cloned(),
                KeyName::Service(service) => rights.terminates(&service.tenant),
                KeyName::File(_) => None,
            };
            match claim {
                Some(claim) => {
                    if want.claim != claim {
                        // A key of another algorithm, or for another trust domain: made anew, the old one serves until then.
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
            state.wanted.entry(KeyName::Identity(identity)).or_insert_with(|| Want::new(claim));
        }
        drop(state);
        self.inner.forget(&gone);
        self.inner.scan.store(true, Relaxed);
        self.inner.wake.notify_one();
    }

    /// Keys held, with certificates valid or not.
    pub fn count(&self) -> usize {
        self.inner.held.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// All names wanted, sorted.
    pub fn status(&self) -> Vec<KeyStatus> {
        let seconds = |t: SystemTime| t.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let state = lock(&self.inner.state);
        let held = self.inner.held.read().unwrap_or_else(PoisonError::into_inner);
        let one = |(name, want): (&KeyName, &Want)| {
            let certified = held.get(name).map(Held::current);
            KeyStatus {
                name: name.to_string(),
                algorithm: certified.map(|c| c.key.lane().name()),
                not_after: certified.map(|c| seconds(c.not_after)),
                error: want.error.clone(),
            }
        };
        let mut all: Vec<_> = state.wanted.iter().map(one).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

impl Inner {
    fn valid(&self, name: &KeyName) -> Option<Arc<Certified>> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        held.get(name).map(Held::current).filter(|c| c.valid_at(SystemTime::now())).cloned()
    }

    /// Puts a name before all others, unless its last attempt failed since the caller began to wait, or a moment ago.
    fn hurry(&self, name: &KeyName, claim: &Claim, since: Instant) -> Result<(), String> {
        let mut state = lock(&self.state);
        if self.valid(name).is_some() {
            // Settled since the caller looked: to be found now, not made once more.
            return Ok(());
        }
        let State { wanted, queue } = &mut *state;
        if !wanted.contains_key(name) {
            let services = wanted.keys().filter(|k| matches!(k, KeyName::Service(s) if s.tenant == claim.tenant)).count();
            if matches!(name, KeyName::Service(_)) && services >= SERVICES_MAX {
                return Err(format!("tenant {} has certificates for {SERVICES_MAX} services already", claim.tenant));
            }
        }
        let want = wanted.entry(name.clone()).or_insert_with(|| Want::new(claim.clone()));
        if want.under_way {
            return Ok(());
        }
        if want.retry_at.is_some_and(|at| at > Instant::now() || at > since) && !want.error.is_empty() {
            return Err(want.error.clone());
        }
        // Not valid (any more), whatever the plan was.
        want.renew_at = None;
        want.queued = true;
        queue.push_front(name.clone());
        Ok(())
    }

    fn hold(&self, name: &KeyName, next: Arc<Certified>) {
        let mut held = self.held.write().unwrap_or_else(PoisonError::into_inner);
        let before = held.remove(name);
        held.insert(name.clone(), Held::after(before, next, std::time::Instant::now()));
    }

    fn forget(&self, names: &[KeyName]) {
        let mut held = self.held.write().unwrap_or_else(PoisonError::into_inner);
        for name in names {
            if held.remove(name).is_some() {
                tracing::info!(%name, "nobody is entitled to this key any more, or asks for it; it is forgotten");
            }
        }
    }

    /// Apart from [`Inner::look`], which takes longer: requests wait for who writes.
    fn tidy(&self) {
        let now = std::time::Instant::now();
        self.held.write().unwrap_or_else(PoisonError::into_inner).values_mut().for_each(|held| held.tidy(now));
    }

    /// Finds what is due.
    fn look(&self) {
        let now = SystemTime::now();
        // Everywhere the state is locked before what is held.
        let mut state = lock(&self.state);
        self.tidy();
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        let State { wanted, queue } = &mut *state;
        let mut unused = Vec::new();
        for (name, want) in wanted.iter_mut().filter(|(_, w)| !w.queued) {
            let certified = held.get(name).map(Held::current);
            let rested = want.superseded_at.is_none_or(|at| at.elapsed() >= SUPERSEDED_PAUSE);
            if rested && certified.is_some_and(|c| self.trust.superseded(&want.claim.trust_domain, &c.chain)) {
                (want.renew_at, want.superseded_at) = (None, Some(Instant::now()));
            }
            if !want.due(now) {
                continue;
            }
            // A service's is for gateways that ask for it again and again; half a life without one: it is gone.
            if matches!(name, KeyName::Service(_)) && certified.is_some_and(|c| !c.asked()) {
                unused.push(name.clone());
                continue;
            }
            want.queued = true;
            queue.push_back(name.clone());
        }
        drop(held);
        wanted.retain(|name, _| !unused.contains(name));
        drop(state);
        self.forget(&unused);
    }

    /// How long nothing will be due.
    fn rest(&self) -> Duration {
        let (now, at) = (SystemTime::now(), Instant::now());
        let left = |w: &Want| match (w.retry_at, w.renew_at) {
            (Some(retry), _) => Some(retry.saturating_duration_since(at)),
            (None, renew) => renew.map(|t| t.duration_since(now).unwrap_or_default()),
        };
        let state = lock(&self.state);
        let resting = state.wanted.values().filter(|w| !w.under_way && !w.queued);
        // Not shorter, so that what is always due costs little.
        resting.filter_map(left).min().unwrap_or(LOOK).clamp(Duration::from_millis(10), LOOK)
    }

    /// The next name that is still due.
    fn next(&self) -> Option<(KeyName, Claim)> {
        let now = SystemTime::now();
        let mut state = lock(&self.state);
        let State { wanted, queue } = &mut *state;
        while let Some(name) = queue.pop_front() {
            let Some(want) = wanted.get_mut(&name) else { continue };
            want.queued = false;
            if want.due(now) {
                (want.under_way, want.retry_at) = (true, None);
                return Some((name, want.claim.clone()));
            }
        }
        None
    }

    async fn obtain(&self, name: &KeyName, claim: &Claim) -> Result<Certified, NotIssued> {
        let failed = |reason, text: String| NotIssued { reason, text };
        let (identity, service) = match name {
            KeyName::Identity(identity) => (identity.clone(), None),
            KeyName::Service(service) => (gateway_identity(claim.trust_domain.clone()), Some(service)),
            KeyName::File(service) => return Err(failed("file", format!("the key of {service} is a file's"))),
        };
        let key = Arc::new(self.make(claim.algorithm).await?);
        let csr = request(&key, &identity).map_err(|e| failed("key", e.to_string()))?;
        let issued = self.issue.issue(&identity, service, csr).await?;
        let read = |pem: &str| CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
        let unusable = |e: &dyn std::fmt::Display| failed("bad_answer", format!("the controller's answer is unusable: {e}"));
        let chain = read(&issued.chain.join("\n")).map_err(|e| unusable(&e))?;
        let bundle = read(&issued.bundle).map_err(|e| unusable(&e))?;
        let judge = Judge::new(claim.trust_domain.clone(), &bundle, self.trust.view(&claim.tenant)).map_err(|e| unusable(&e))?;
        let expected: Arc<[Identity]> = [identity].into();
        judge.peer(Role::Server, Some(&expected), Some(&chain)).map_err(|e| failed("wrong_identity", e.to_string()))?;
        let certified = Certified::new(name.clone(), claim.tenant.clone(), key, chain, Some(judge)).map_err(|e| unusable(&e))?;
        if !certified.valid_at(SystemTime::now()) {
            return Err(failed("clock", "the certificate is not valid at this machine's time; is one of the two clocks wrong?".into()));
        }
        Ok(certified)
    }

    async fn make(&self, algorithm: KeyAlgorithm) -> Result<PrivateKey, NotIssued> {
        // Closed never; an error would only mean one key more at once.
        let _one = self.making.acquire().await;
        let vault = self.vault.clone();
        let made = tokio::task::spawn_blocking(move || PrivateKey::generate(&vault, algorithm)).await;
        let failed = |text: String| NotIssued { reason: "key", text };
        made.map_err(|e| failed(e.to_string()))?.map_err(|e| failed(e.to_string()))
    }

    fn settle(&self, name: &KeyName, claim: &Claim, outcome: Result<Certified, NotIssued>) {
        let mut state = lock(&self.state);
        // Forgotten meanwhile: so is what came.
        if let Some(want) = state.wanted.get_mut(name) {
            want.under_way = false;
            match outcome {
                Ok(certified) if want.claim == *claim => {
                    self.issued.inc();
                    want.error.clear();
                    want.backoff.reset();
                    want.retry_at = None;
                    let jitter = rand::rng().random_range(-1.0..=1.0);
                    // Of the life that it has from now on: authorities date certificates back, for clocks that are late.
                    want.renew_at = Some(half_life(certified.not_before.max(SystemTime::now()), certified.not_after, jitter));
                    self.hold(name, Arc::new(certified));
                }
                // The policy changed meanwhile: once more, by the new one.
                Ok(_) => {}
                Err(error) => {
                    self.failures.shared(&[error.reason]).inc();
                    let wait = want.backoff.next_wait();
                    want.retry_at = Some(Instant::now() + wait);
                    want.error = error.text;
                    tracing::warn!(%name, error = want.error, ?wait, "no certificate");
                }
            }
        }
        drop(state);
        self.changed.send_modify(|n| *n += 1);
        self.wake.notify_one();
    }

    fn show(self: &Arc<Self>, registry: &Registry) {
        let (a, b) = (Arc::downgrade(self), Arc::downgrade(self));
        registry.probe("canal_key_made_held", "Keys made here and held.", move || {
            a.upgrade().map_or(0.0, |i| i.held.read().unwrap_or_else(PoisonError::into_inner).len() as f64)
        });
        registry.probe("canal_key_certificates_missing", "Names that somebody is entitled to, without a valid certificate.", move || {
            let Some(inner) = b.upgrade() else { return 0.0 };
            let now = SystemTime::now();
            let state = lock(&inner.state);
            let held = inner.held.read().unwrap_or_else(PoisonError::into_inner);
            state.wanted.keys().filter(|k| held.get(k).is_none_or(|h| !h.current().valid_at(now))).count() as f64
        });
    }
}

/// A request for `identity`: URI SAN only, empty DN (features.md A.2).
fn request(key: &PrivateKey, identity: &Identity) -> Result<String, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into()?)];
    params.serialize_request(&RequestKey(key))?.pem()
}

/// Starts what is due while there is room, sleeps; ends with the provisioner or when forced.
async fn run(inner: Weak<Inner>, drain: Watcher) {
    loop {
        let Some(own) = inner.upgrade() else { return };
        if own.scan.swap(false, Relaxed) {
            own.look();
        }
        while let Ok(room) = own.room.clone().try_acquire_owned() {
            let Some((name, claim)) = own.next() else { break };
            let inner = own.clone();
            tokio::spawn(async move {
                let outcome = inner.obtain(&name, &claim).await;
                drop(room);
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
