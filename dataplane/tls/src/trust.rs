//! Trust of a tenant's data planes: roots, revocation lists and federated trust domains from the
//! newest Bundle resources, and whether a verified peer has lost trust since. `verify` verifies
//! chains. Start with [`TrustStore`] and [`TrustView`].

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use canal_model::identity::Identity;
use canal_model::ids::{TenantName, TrustDomain};
use canal_model::program::Resource;
use canal_model::trust::TrustBundle;
use canal_net::sys::kernel_tls;
use canal_runtime::metrics::{CounterFamily, MetricFamily, Registry, SharedCounter};
use rustls::RootCertStore;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, TrustAnchor};
use tokio::sync::watch;
use webpki::{CertRevocationList, EndEntityCert, OwnedCertRevocationList};

use super::chain_cache::ChainCache;
use super::handshake_failure::HandshakeFailure;
use super::verified_chain::PeerLeaf;

/// Roots, revocation lists and blocked identities of one trust domain.
pub(super) struct TrustAnchors {
    /// Unique number in the process, because results of a verification with other anchors are not
    /// valid for these.
    pub(super) number: u64,
    pub(super) roots: Vec<TrustAnchor<'static>>,
    /// Subjects of the roots, in the bundle's order. The first root signs at present.
    subjects: Vec<Vec<u8>>,
    pub(super) revoked: Vec<CertRevocationList<'static>>,
    blocked: HashSet<Identity>,
}

impl TrustAnchors {
    pub(super) fn of(
        roots: &[CertificateDer<'_>],
        revoked: &[CertificateRevocationListDer<'_>],
    ) -> Result<Self, String> {
        let mut store = RootCertStore::empty();
        for root in roots {
            store
                .add(root.clone().into_owned())
                .map_err(|e| format!("a root cannot be used: {e}"))?;
        }
        let subject =
            |root: &CertificateDer<'_>| EndEntityCert::try_from(root).map(|c| c.subject().to_vec());
        let subjects = roots
            .iter()
            .map(subject)
            .collect::<Result<_, _>>()
            .map_err(|e| format!("a root cannot be read: {e}"))?;
        let list = |der: &CertificateRevocationListDer<'_>| {
            OwnedCertRevocationList::from_der(der).map(CertRevocationList::Owned)
        };
        let revoked = revoked
            .iter()
            .map(list)
            .collect::<Result<_, _>>()
            .map_err(|e| format!("a revocation list cannot be read: {e}"))?;
        static LAST: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            number: LAST.fetch_add(1, Relaxed),
            roots: store.roots,
            subjects,
            revoked,
            blocked: HashSet::new(),
        })
    }

    fn read(bundle: &TrustBundle) -> Result<Self, String> {
        let mut roots = Vec::new();
        for pem in &bundle.roots {
            for root in CertificateDer::pem_slice_iter(pem.as_bytes()) {
                roots.push(root.map_err(|e| format!("a root is not PEM: {e}"))?);
            }
        }
        if roots.is_empty() {
            return Err("it contains no root".into());
        }
        let mut revoked = Vec::new();
        for pem in &bundle.revoked {
            for list in CertificateRevocationListDer::pem_slice_iter(pem.as_bytes()) {
                revoked.push(list.map_err(|e| format!("a revocation list is not PEM: {e}"))?);
            }
        }
        Ok(Self {
            blocked: bundle.blocked.iter().cloned().collect(),
            ..Self::of(&roots, &revoked)?
        })
    }

    /// Returns whether all certificates of an identity count as revoked.
    pub(super) fn blocks(&self, identity: &Identity) -> bool {
        self.blocked.contains(identity)
    }

    fn revokes(&self, issuer: &[u8], serial: &[u8]) -> bool {
        let names = |l: &CertRevocationList<'_>| {
            l.issuer() == issuer && matches!(l.find_serial(serial), Ok(Some(_)))
        };
        self.revoked.iter().any(names)
    }
}

/// Reasons why a verified peer loses trust.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrustLoss {
    /// A revocation list names the peer's certificate or one above it, or the peer's identity is
    /// blocked.
    Revoked,
    /// The peer's trust domain is no longer federated.
    Unfederated,
    /// The peer's certificate has expired, and so has the time that its open streams had after
    /// that.
    Expired,
}

impl TrustLoss {
    /// Returns the label value of `reason`.
    pub fn name(self) -> &'static str {
        match self {
            TrustLoss::Revoked => "revoked",
            TrustLoss::Unfederated => "unfederated",
            TrustLoss::Expired => "expired",
        }
    }
}

/// Trust of one tenant's data planes at one time. It is immutable.
pub struct TrustSnapshot {
    /// Unique number in the process, larger for newer snapshots.
    generation: u64,
    own: Option<TrustDomain>,
    domains: BTreeMap<TrustDomain, Arc<TrustAnchors>>,
}

impl std::fmt::Debug for TrustSnapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Trust({}, {:?})", self.generation, self.domains.keys())
    }
}

impl TrustSnapshot {
    fn new(own: Option<TrustDomain>, domains: BTreeMap<TrustDomain, Arc<TrustAnchors>>) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self {
            generation: LAST.fetch_add(1, Relaxed) + 1,
            own,
            domains,
        }
    }

    /// Builds a snapshot of these bundles, of which at most one is not federated.
    ///
    /// # Errors
    /// A bundle is unusable; the error names it and the reason.
    pub fn of_bundles<'a>(
        bundles: impl IntoIterator<Item = &'a TrustBundle>,
    ) -> Result<Self, String> {
        let (mut own, mut domains) = (None, BTreeMap::new());
        for b in bundles {
            let anchors = TrustAnchors::read(b)
                .map_err(|why| format!("bundle {}/{}: {why}", b.tenant, b.trust_domain))?;
            domains.insert(b.trust_domain.clone(), Arc::new(anchors));
            if !b.federated {
                own = Some(b.trust_domain.clone());
            }
        }
        Ok(Self::new(own, domains))
    }

    /// Returns the generation, which is unique in the process and larger for newer snapshots.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns whether `trust_domain` is trusted.
    pub fn knows(&self, trust_domain: &TrustDomain) -> bool {
        self.domains.contains_key(trust_domain)
    }

    pub(super) fn anchors(&self, trust_domain: &TrustDomain) -> Option<&Arc<TrustAnchors>> {
        self.domains.get(trust_domain)
    }

    /// Returns whether a revocation list names the leaf or a certificate above it, or the leaf's
    /// identity is blocked.
    pub fn revokes(&self, leaf: &PeerLeaf) -> bool {
        self.check(leaf) == Some(TrustLoss::Revoked)
    }

    /// Returns whether a verified peer has lost trust; `None` if it has not. A removed root does
    /// not end the trust in certificates that it signed, because renewals replace them.
    pub fn check(&self, leaf: &PeerLeaf) -> Option<TrustLoss> {
        match self.domains.get(leaf.trust_domain()) {
            Some(anchors) => {
                let is_listed = || leaf.links().any(|l| anchors.revokes(l.issuer, l.serial));
                (anchors.blocks(leaf.identity()) || is_listed()).then_some(TrustLoss::Revoked)
            }
            // The tenant's own domain may be unknown here; then the certificate's own bundle was
            // used.
            None => self
                .own
                .as_ref()
                .is_some_and(|own| own != leaf.trust_domain())
                .then_some(TrustLoss::Unfederated),
        }
    }

    /// Returns whether a chain of this side in `trust_domain` should be renewed at once. True if
    /// its root is not the one that signs now, or if a revocation list names one of its
    /// certificates.
    pub fn is_superseded(&self, trust_domain: &TrustDomain, chain: &[CertificateDer<'_>]) -> bool {
        let Some(anchors) = self.domains.get(trust_domain) else {
            return false;
        };
        let links: Vec<EndEntityCert<'_>> = chain
            .iter()
            .filter_map(|der| EndEntityCert::try_from(der).ok())
            .collect();
        let elsewhere = || {
            links
                .last()
                .zip(anchors.subjects.first())
                .is_some_and(|(top, first)| top.issuer() != first.as_slice())
        };
        links
            .iter()
            .any(|link| anchors.revokes(link.issuer(), link.serial()))
            || elsewhere()
    }
}

/// State that the handshakes of a process share besides trust: counters, and the cache of verified
/// chains.
pub(super) struct TlsContext {
    refused: CounterFamily,
    pub(super) cache: ChainCache,
    changes: SharedCounter,
    /// True if the kernel offers TLS.
    pub(super) kernel_tls: bool,
    handed_over: CounterFamily,
}

impl TlsContext {
    fn new(registry: &Registry) -> Self {
        let (offered, handed) = (
            "Whether the kernel offers TLS.",
            "Connections with a handshake by a key server, where the kernel has TLS.",
        );
        let kernel_tls = kernel_tls().unwrap_or(false);
        registry
            .gauges(MetricFamily::new(
                "canal_tls_kernel_available",
                offered,
                &[],
            ))
            .shared(&[])
            .set(kernel_tls.into());
        Self {
            kernel_tls,
            handed_over: registry.counters(MetricFamily::new(
                "canal_tls_kernel_connections_total",
                handed,
                &["result"],
            )),
            refused: registry.counters(MetricFamily::new(
                "canal_tls_refused_total",
                "Mesh handshakes that failed on this side.",
                &["side", "reason"],
            )),
            cache: ChainCache::new(registry),
            changes: registry
                .counters(MetricFamily::new(
                    "canal_trust_changes_total",
                    "Changes of a tenant's trust.",
                    &[],
                ))
                .shared(&[]),
        }
    }

    fn refused(&self, side: &'static str, why: HandshakeFailure) {
        self.refused.shared(&[side, why.name()]).inc();
    }

    /// Counts a connection by the result of its hand-over to the kernel: the success, or the reason
    /// of the failure.
    pub(super) fn handed_over(&self, result: &'static str) {
        self.handed_over.shared(&[result]).inc();
    }
}

/// View of the newest [`TrustSnapshot`] of one tenant. Clones see every change.
#[derive(Clone)]
pub struct TrustView {
    current: watch::Receiver<Arc<TrustSnapshot>>,
    pub(super) shared: Option<Arc<TlsContext>>,
}

impl std::fmt::Debug for TrustView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TrustView({:?})", self.current())
    }
}

impl TrustView {
    /// Creates a view without any bundle: peers are verified with the bundle of this side's own
    /// certificate.
    pub fn without_bundles() -> Self {
        Self {
            current: watch::channel(Arc::new(TrustSnapshot::new(None, BTreeMap::new()))).1,
            shared: None,
        }
    }

    /// Returns the newest snapshot of the trust.
    pub fn current(&self) -> Arc<TrustSnapshot> {
        self.current.borrow().clone()
    }

    /// Counts a handshake of this `side` that failed.
    pub fn record_failure(&self, side: &'static str, why: HandshakeFailure) {
        if let Some(shared) = &self.shared {
            shared.refused(side, why);
        }
    }

    /// Resolves at the first change after the last call of [`TrustView::current_and_seen`]. It
    /// stays pending once nothing can change.
    pub async fn changed(&mut self) {
        if self.current.changed().await.is_err() {
            std::future::pending().await
        }
    }

    /// Returns the newest snapshot and marks it as seen; [`TrustView::changed`] then waits for a
    /// newer one.
    pub fn current_and_seen(&mut self) -> Arc<TrustSnapshot> {
        self.current.borrow_and_update().clone()
    }
}

/// Time that open streams of a connection have after the peer's certificate has expired. Then the
/// connection is closed. A peer whose renewal is late by less than that loses no request. Nobody
/// measured the value.
pub const EXPIRED_PEER_TIMEOUT: Duration = Duration::from_secs(60);
/// Returns the time that connections of expired peers have, which tests shorten.
fn expired_peer_timeout() -> Duration {
    #[cfg(any(test, feature = "testing"))]
    if let Some(timeout) = super::testing::expired_peer_timeout() {
        return timeout;
    }
    EXPIRED_PEER_TIMEOUT
}

/// Interval at which the wall clock is read during a wait, because it may be set. A clock that is
/// set while a stream is open is noticed as late. Certificates live hours, so more often is not
/// needed.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(600);

/// Resolves at `time` by the wall clock.
async fn reached(time: SystemTime) {
    while let Ok(left) = time.duration_since(SystemTime::now()) {
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(CLOCK_CHECK_INTERVAL)).await;
    }
}

/// Watch of a peer's trust: its leaf, and the trust that decides about it.
#[derive(Debug, Clone)]
pub struct PeerTrustWatch {
    trust: TrustView,
    leaf: Arc<PeerLeaf>,
}

impl PeerTrustWatch {
    /// Creates the watch of a peer that was verified with `trust`.
    pub fn new(trust: TrustView, leaf: Arc<PeerLeaf>) -> Self {
        Self { trust, leaf }
    }

    /// Returns the data of the peer's certificate.
    pub fn leaf(&self) -> &Arc<PeerLeaf> {
        &self.leaf
    }

    /// Resolves when the peer loses trust, so that its connection must be closed. An expired
    /// certificate is reported as [`TrustLoss::Expired`] only after [`EXPIRED_PEER_TIMEOUT`];
    /// [`PeerTrustWatch::expired`] reports it at once.
    pub async fn wait_for_loss(&mut self) -> TrustLoss {
        let end = self.leaf.not_after() + expired_peer_timeout();
        let mut cut = std::pin::pin!(reached(end));
        loop {
            if let Some(why) = self.trust.current_and_seen().check(&self.leaf) {
                return why;
            }
            tokio::select! {
                () = self.trust.changed() => {}
                () = &mut cut => return TrustLoss::Expired,
            }
        }
    }

    /// Resolves when the peer's certificate expires, so that nothing new may start on its
    /// connection. A peer that renewed its certificate has another connection by then.
    pub fn expired(&self) -> impl Future<Output = ()> + use<> {
        reached(self.leaf.not_after())
    }
}

/// A Bundle that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnusableBundle {
    /// Name of the Bundle that cannot be used.
    pub name: String,
    /// Reason, which names the resource too.
    pub why: String,
}

struct TenantTrustSlot {
    bundles: Vec<Arc<Resource>>,
    writer: watch::Sender<Arc<TrustSnapshot>>,
}

/// Trust of all tenants in one process. Clones share it. Data planes update it from their
/// southbound state.
#[derive(Clone)]
pub struct TrustStore {
    places: Arc<Mutex<HashMap<TenantName, TenantTrustSlot>>>,
    shared: Arc<TlsContext>,
    /// Number of changes so far.
    changes: watch::Sender<u64>,
}

impl std::fmt::Debug for TrustStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TrustStore")
    }
}

impl TrustStore {
    /// Creates an empty store. Metrics: `canal_tls_refused_total{side,reason}`,
    /// `canal_tls_chains_total{result}`, `canal_trust_changes_total`, `canal_tls_kernel_available`,
    /// `canal_tls_kernel_connections_total{result}`.
    pub fn new(registry: &Registry) -> Self {
        Self {
            places: Arc::default(),
            shared: Arc::new(TlsContext::new(registry)),
            changes: watch::Sender::new(0),
        }
    }

    /// Returns the view of the trust of `tenant`, with or without bundles so far.
    pub fn view(&self, tenant: &TenantName) -> TrustView {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let place = places
            .entry(tenant.clone())
            .or_insert_with(TenantTrustSlot::empty);
        TrustView {
            current: place.writer.subscribe(),
            shared: Some(self.shared.clone()),
        }
    }

    /// Returns a receiver that changes with every change of any tenant's trust.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Returns whether a chain of `trust_domain` should be renewed at once according to its
    /// tenant's bundles, see [`TrustSnapshot::is_superseded`].
    pub fn superseded(&self, trust_domain: &TrustDomain, chain: &[CertificateDer<'_>]) -> bool {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = |p: &TenantTrustSlot| p.writer.borrow().clone();
        places
            .values()
            .map(newest)
            .any(|t| t.own.as_ref() == Some(trust_domain) && t.is_superseded(trust_domain, chain))
    }

    /// Applies the Bundles among the resources, which are all that exist, and returns those that
    /// cannot be used. The trust of their tenants stays unchanged, and that of all others is
    /// updated. Other resources are ignored.
    pub fn apply(&self, all: impl IntoIterator<Item = Arc<Resource>>) -> Vec<UnusableBundle> {
        let mut received: HashMap<TenantName, Vec<Arc<Resource>>> = HashMap::new();
        for r in all {
            if let Resource::Bundle(b) = &*r {
                received.entry(b.tenant.clone()).or_default().push(r);
            }
        }
        // Sorted, because each list is compared with that of before, whatever the order of arrival.
        received
            .values_mut()
            .for_each(|list| list.sort_by_cached_key(|r| r.name()));
        // A thread that panicked with the lock must not stop all others.
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        // A tenant whose last bundle is gone gets an empty snapshot.
        let gone: Vec<_> = places
            .iter()
            .filter(|(t, p)| !p.bundles.is_empty() && !received.contains_key(*t))
            .map(|(t, _)| t.clone())
            .collect();
        received.extend(gone.into_iter().map(|t| (t, Vec::new())));
        received.retain(|tenant, list| places.get(tenant).is_none_or(|p| !same(&p.bundles, list)));
        let mut made = Vec::with_capacity(received.len());
        let mut refused = Vec::new();
        for (tenant, bundles) in received {
            let before = refused.len();
            let list = || {
                bundles.iter().filter_map(|r| {
                    if let Resource::Bundle(b) = &**r {
                        Some((r, b))
                    } else {
                        None
                    }
                })
            };
            // All bundles of a tenant must be usable, because a part of its trust would be wrong
            // trust.
            for (resource, bundle) in list() {
                if let Err(why) = TrustAnchors::read(bundle) {
                    refused.push(UnusableBundle {
                        name: resource.name(),
                        why: format!("bundle {}: {why}", resource.name()),
                    });
                }
            }
            // `of_bundles` fails only where `read` above has failed, so no error is lost here.
            if refused.len() == before
                && let Ok(trust) = TrustSnapshot::of_bundles(list().map(|(_, bundle)| bundle))
            {
                made.push((tenant, bundles, trust));
            }
        }
        let changed = !made.is_empty();
        for (tenant, bundles, trust) in made {
            let place = places.entry(tenant).or_insert_with(TenantTrustSlot::empty);
            place.bundles = bundles;
            place.writer.send_replace(Arc::new(trust));
            self.shared.changes.inc();
        }
        if changed {
            self.changes.send_modify(|n| *n += 1);
        }
        // An empty entry stays while a view of it exists, so that the view sees later bundles.
        places.retain(|_, p| !p.bundles.is_empty() || p.writer.receiver_count() > 0);
        refused
    }

    /// Does what [`TrustStore::apply`] does, for callers that cannot refuse single resources.
    ///
    /// # Errors
    /// Bundles cannot be used; the error names them, and those of all other tenants are in force.
    pub fn replace(&self, all: impl IntoIterator<Item = Arc<Resource>>) -> Result<(), String> {
        let refused: Vec<String> = self.apply(all).into_iter().map(|r| r.why).collect();
        if refused.is_empty() {
            Ok(())
        } else {
            Err(refused.join("; "))
        }
    }
}

impl TenantTrustSlot {
    fn empty() -> Self {
        Self {
            bundles: Vec::new(),
            writer: watch::Sender::new(Arc::new(TrustSnapshot::new(None, BTreeMap::new()))),
        }
    }
}

fn same(a: &[Arc<Resource>], b: &[Arc<Resource>]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b) || a == b)
}
