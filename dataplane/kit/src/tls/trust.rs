//! Whom a tenant's data planes believe: roots, revocation lists and federated trust domains, as the newest Bundle resources say, and whether
//! a peer that was believed once still is. Chains are verified in `verify`.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use canal_model::ids::{TenantName, TrustDomain};
use canal_model::program::{Kind, Resource};
use canal_model::trust::Bundle;
use canal_wire::keyrpc::{Above, Link};
use rustls::RootCertStore;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, TrustAnchor};
use tokio::sync::watch;
use webpki::{CertRevocationList, EndEntityCert, OwnedCertRevocationList};

use super::cache::ChainCache;
use super::refusal::Refusal;
use crate::metrics::{Counters, Family, Registry, SharedCounter};
use crate::southbound::{RefusedResource, State};
use crate::sys::kernel_tls;

/// What vouches for one trust domain.
pub(super) struct Anchors {
    /// Unique in the process: what was verified with others says nothing.
    pub(super) number: u64,
    pub(super) roots: Vec<TrustAnchor<'static>>,
    /// By the roots' order in the bundle; the first is the one that signs now.
    subjects: Vec<Vec<u8>>,
    pub(super) revoked: Vec<CertRevocationList<'static>>,
}

impl Anchors {
    pub(super) fn of(roots: &[CertificateDer<'_>], revoked: &[CertificateRevocationListDer<'_>]) -> Result<Self, String> {
        let mut store = RootCertStore::empty();
        for root in roots {
            store.add(root.clone().into_owned()).map_err(|e| format!("a root cannot be used: {e}"))?;
        }
        let subject = |root: &CertificateDer<'_>| EndEntityCert::try_from(root).map(|c| c.subject().to_vec());
        let subjects = roots.iter().map(subject).collect::<Result<_, _>>().map_err(|e| format!("a root cannot be read: {e}"))?;
        let list = |der: &CertificateRevocationListDer<'_>| OwnedCertRevocationList::from_der(der).map(CertRevocationList::Owned);
        let revoked = revoked.iter().map(list).collect::<Result<_, _>>().map_err(|e| format!("a revocation list cannot be read: {e}"))?;
        static LAST: AtomicU64 = AtomicU64::new(0);
        Ok(Self { number: LAST.fetch_add(1, Relaxed), roots: store.roots, subjects, revoked })
    }

    fn read(bundle: &Bundle) -> Result<Self, String> {
        let mut roots = Vec::new();
        for pem in &bundle.roots {
            for root in CertificateDer::pem_slice_iter(pem.as_bytes()) {
                roots.push(root.map_err(|e| format!("a root is not PEM: {e}"))?);
            }
        }
        if roots.is_empty() {
            return Err("it holds no root".into());
        }
        let mut revoked = Vec::new();
        for pem in &bundle.revoked {
            for list in CertificateRevocationListDer::pem_slice_iter(pem.as_bytes()) {
                revoked.push(list.map_err(|e| format!("a revocation list is not PEM: {e}"))?);
            }
        }
        Self::of(&roots, &revoked)
    }

    fn revokes(&self, issuer: &[u8], serial: &[u8]) -> bool {
        let names = |l: &CertRevocationList<'_>| l.issuer() == issuer && matches!(l.find_serial(serial), Ok(Some(_)));
        self.revoked.iter().any(names)
    }
}

/// What of a peer's verified chain is kept with the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerLeaf {
    trust_domain: TrustDomain,
    not_after: SystemTime,
    issuer: Box<[u8]>,
    serial: Box<[u8]>,
    /// As [`Above`] is written.
    above: Box<[u8]>,
}

impl PeerLeaf {
    /// Reads a leaf, and what was shown above it, that were verified as of `trust_domain`.
    pub fn read(
        trust_domain: TrustDomain,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        not_after: SystemTime,
    ) -> Result<Self, rustls::Error> {
        let mut bytes = Vec::new();
        for der in above {
            let c = EndEntityCert::try_from(der).map_err(unreadable)?;
            Link { issuer: c.issuer(), serial: c.serial() }.append(&mut bytes).map_err(unreadable)?;
        }
        let above = Above::read(&bytes).map_err(unreadable)?;
        Self::shown(trust_domain, leaf, above, not_after)
    }

    /// [`PeerLeaf::read`] where a key server verified the chain, and says what was above the leaf.
    pub(super) fn shown(
        trust_domain: TrustDomain,
        leaf: &CertificateDer<'_>,
        above: Above<'_>,
        not_after: SystemTime,
    ) -> Result<Self, rustls::Error> {
        let c = EndEntityCert::try_from(leaf).map_err(unreadable)?;
        Ok(Self { trust_domain, not_after, issuer: c.issuer().into(), serial: c.serial().into(), above: above.bytes().into() })
    }

    /// DER of the issuer's name, without its outer tag and length.
    pub fn issuer(&self) -> &[u8] {
        &self.issuer
    }

    /// Big-endian, as the certificate writes it.
    pub fn serial(&self) -> &[u8] {
        &self.serial
    }

    /// What was shown above it.
    pub fn above(&self) -> Above<'_> {
        // Read once already, when this was made.
        Above::read(&self.above).unwrap_or_default()
    }

    /// The leaf, then what is above it.
    fn links(&self) -> impl Iterator<Item = Link<'_>> {
        std::iter::once(Link { issuer: &self.issuer, serial: &self.serial }).chain(self.above().links())
    }

    /// The leaf is valid until.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Whose roots vouched for it.
    pub fn trust_domain(&self) -> &TrustDomain {
        &self.trust_domain
    }
}

fn unreadable<E>(_: E) -> rustls::Error {
    rustls::Error::InvalidCertificate(rustls::CertificateError::BadEncoding)
}

/// Why a peer that was believed is believed no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallen {
    /// A revocation list names its certificate or one above it.
    Revoked,
    /// Its trust domain is federated no more.
    Unfederated,
    /// Its certificate ended, and so did the time that open streams had after that.
    Expired,
}

impl Fallen {
    /// The label `reason`.
    pub fn name(self) -> &'static str {
        match self {
            Fallen::Revoked => "revoked",
            Fallen::Unfederated => "unfederated",
            Fallen::Expired => "expired",
        }
    }
}

/// Whom one tenant's data planes believe, at one time. Immutable.
pub struct Trust {
    /// Unique in the process, larger for newer ones.
    generation: u64,
    own: Option<TrustDomain>,
    domains: BTreeMap<TrustDomain, Arc<Anchors>>,
}

impl std::fmt::Debug for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Trust({}, {:?})", self.generation, self.domains.keys())
    }
}

impl Trust {
    fn new(own: Option<TrustDomain>, domains: BTreeMap<TrustDomain, Arc<Anchors>>) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self { generation: LAST.fetch_add(1, Relaxed) + 1, own, domains }
    }

    /// Whose bundles these are, at most one of them not federated. The error says which is unusable and why.
    pub fn of_bundles<'a>(bundles: impl IntoIterator<Item = &'a Bundle>) -> Result<Self, String> {
        let (mut own, mut domains) = (None, BTreeMap::new());
        for b in bundles {
            let anchors = Anchors::read(b).map_err(|why| format!("bundle {}/{}: {why}", b.tenant, b.trust_domain))?;
            domains.insert(b.trust_domain.clone(), Arc::new(anchors));
            if !b.federated {
                own = Some(b.trust_domain.clone());
            }
        }
        Ok(Self::new(own, domains))
    }

    /// Unique in the process, larger for newer ones.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether `trust_domain` is believed.
    pub fn knows(&self, trust_domain: &TrustDomain) -> bool {
        self.domains.contains_key(trust_domain)
    }

    pub(super) fn anchors(&self, trust_domain: &TrustDomain) -> Option<&Arc<Anchors>> {
        self.domains.get(trust_domain)
    }

    /// Whether a revocation list names the leaf or a certificate above it.
    pub fn revokes(&self, leaf: &PeerLeaf) -> bool {
        self.judge(leaf) == Some(Fallen::Revoked)
    }

    /// Whether a peer that was believed still is; `None`: it is. A root that is gone does not end what it once vouched for: renewals do.
    pub fn judge(&self, leaf: &PeerLeaf) -> Option<Fallen> {
        match self.domains.get(&leaf.trust_domain) {
            Some(anchors) => leaf.links().any(|l| anchors.revokes(l.issuer, l.serial)).then_some(Fallen::Revoked),
            // The own domain may be unknown here: then the certificate's own bundle vouched.
            None => self.own.as_ref().is_some_and(|own| *own != leaf.trust_domain).then_some(Fallen::Unfederated),
        }
    }

    /// Whether an own chain of `trust_domain` should be renewed at once: it ends at another root than the one that signs now, or a
    /// revocation list names a certificate of it.
    pub fn superseded(&self, trust_domain: &TrustDomain, chain: &[CertificateDer<'_>]) -> bool {
        let Some(anchors) = self.domains.get(trust_domain) else { return false };
        let links: Vec<EndEntityCert<'_>> = chain.iter().filter_map(|der| EndEntityCert::try_from(der).ok()).collect();
        let elsewhere = || links.last().zip(anchors.subjects.first()).is_some_and(|(top, first)| top.issuer() != first.as_slice());
        links.iter().any(|link| anchors.revokes(link.issuer(), link.serial())) || elsewhere()
    }
}

/// What handshakes of one process share besides trust: counters, and chains that were verified already.
pub(super) struct Shared {
    refused: Counters,
    pub(super) cache: ChainCache,
    changes: SharedCounter,
    /// The kernel offers TLS.
    pub(super) kernel_tls: bool,
    handed_over: Counters,
}

impl Shared {
    fn new(registry: &Registry) -> Self {
        let (offered, handed) =
            ("Whether the kernel offers TLS.", "Connections that key servers shook hands for, where the kernel has TLS.");
        let kernel_tls = kernel_tls().unwrap_or(false);
        registry.gauges(Family::new("canal_tls_kernel_available", offered, &[])).shared(&[]).set(kernel_tls.into());
        Self {
            kernel_tls,
            handed_over: registry.counters(Family::new("canal_tls_kernel_connections_total", handed, &["result"])),
            refused: registry.counters(Family::new("canal_tls_refused_total", "Mesh handshakes that failed here.", &["side", "reason"])),
            cache: ChainCache::new(registry),
            changes: registry.counters(Family::new("canal_trust_changes_total", "Changes of a tenant's trust.", &[])).shared(&[]),
        }
    }

    pub(super) fn refused(&self, side: &'static str, why: Refusal) {
        self.refused.shared(&[side, why.name()]).inc();
    }

    /// To the kernel, or why not.
    pub(super) fn handed_over(&self, result: &'static str) {
        self.handed_over.shared(&[result]).inc();
    }
}

/// Where the newest [`Trust`] of one tenant is found; clones see every change.
#[derive(Clone)]
pub struct TrustView {
    current: watch::Receiver<Arc<Trust>>,
    pub(super) shared: Option<Arc<Shared>>,
}

impl std::fmt::Debug for TrustView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TrustView({:?})", self.current())
    }
}

impl TrustView {
    /// A place where nothing is ever told: certificates are verified with the bundle that came with one's own.
    pub fn untold() -> Self {
        Self { current: watch::channel(Arc::new(Trust::new(None, BTreeMap::new()))).1, shared: None }
    }

    /// The newest.
    pub fn current(&self) -> Arc<Trust> {
        self.current.borrow().clone()
    }

    /// Resolves at the first change after the last look through [`TrustView::current_and_seen`]; pending once nothing can change.
    pub async fn changed(&mut self) {
        if self.current.changed().await.is_err() {
            std::future::pending().await
        }
    }

    /// The newest; [`TrustView::changed`] waits for a newer one.
    pub fn current_and_seen(&mut self) -> Arc<Trust> {
        self.current.borrow_and_update().clone()
    }
}

/// Open streams of a connection may finish for this long after the peer's certificate has ended; then the connection is cut. It is shortened in
/// this crate's own tests, which wait for it.
pub const EXPIRED_PEER_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 6 } else { 60 });
/// The wall clock may be set while somebody waits for a time, so it is read this often.
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

/// A peer's leaf with the trust that it stands by.
#[derive(Debug, Clone)]
pub struct Standing {
    trust: TrustView,
    leaf: Arc<PeerLeaf>,
}

impl Standing {
    pub(super) fn new(trust: TrustView, leaf: Arc<PeerLeaf>) -> Self {
        Self { trust, leaf }
    }

    /// Of the peer's certificate.
    pub fn leaf(&self) -> &Arc<PeerLeaf> {
        &self.leaf
    }

    /// Resolves when the peer is believed no more: its connection must be closed. A certificate that ended is [`Fallen::Expired`] only
    /// [`EXPIRED_PEER_TIMEOUT`] later; [`Standing::expired`] says it at once.
    pub async fn fallen(&mut self) -> Fallen {
        let end = self.leaf.not_after + EXPIRED_PEER_TIMEOUT;
        let mut cut = std::pin::pin!(reached(end));
        loop {
            if let Some(why) = self.trust.current_and_seen().judge(&self.leaf) {
                return why;
            }
            tokio::select! {
                () = self.trust.changed() => {}
                () = &mut cut => return Fallen::Expired,
            }
        }
    }

    /// Resolves when the peer's certificate ends: nothing new may start on its connection. A peer that renewed has another by then.
    pub fn expired(&self) -> impl Future<Output = ()> + use<> {
        reached(self.leaf.not_after)
    }
}

struct Place {
    bundles: Vec<Arc<Resource>>,
    writer: watch::Sender<Arc<Trust>>,
}

/// All tenants' trust in one process; clones share it. Data planes feed it from their southbound state.
#[derive(Clone)]
pub struct TrustStore {
    places: Arc<Mutex<HashMap<TenantName, Place>>>,
    shared: Arc<Shared>,
    /// How often anything changed.
    changes: watch::Sender<u64>,
}

impl std::fmt::Debug for TrustStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TrustStore")
    }
}

impl TrustStore {
    /// Metrics: `canal_tls_refused_total{side,reason}`, `canal_tls_chains_total{result}`, `canal_trust_changes_total`,
    /// `canal_tls_kernel_available`, `canal_tls_kernel_connections_total{result}`.
    pub fn new(registry: &Registry) -> Self {
        Self { places: Arc::default(), shared: Arc::new(Shared::new(registry)), changes: watch::Sender::new(0) }
    }

    /// Where the trust of `tenant` is found, told already or not.
    pub fn view(&self, tenant: &TenantName) -> TrustView {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let place = places.entry(tenant.clone()).or_insert_with(Place::empty);
        TrustView { current: place.writer.subscribe(), shared: Some(self.shared.clone()) }
    }

    /// Changes with every change of any tenant's trust.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Whether a chain of `trust_domain` ends at another root than the one that its tenant is told to sign now.
    pub fn superseded(&self, trust_domain: &TrustDomain, chain: &[CertificateDer<'_>]) -> bool {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = |p: &Place| p.writer.borrow().clone();
        places.values().map(newest).any(|t| t.own.as_ref() == Some(trust_domain) && t.superseded(trust_domain, chain))
    }

    /// Takes the Bundles of a whole state; gives those that cannot be used. Their tenants' trust stays as it was, and everybody else's changes.
    pub fn apply(&self, state: &State) -> Vec<RefusedResource> {
        self.take(state.of(Kind::Bundle).cloned())
    }

    /// [`TrustStore::apply`] with the resources alone; others than Bundles are passed over. The error names the tenants' bundles that cannot
    /// be used; those of all other tenants are in force.
    pub fn replace(&self, all: impl IntoIterator<Item = Arc<Resource>>) -> Result<(), String> {
        let refused: Vec<String> = self.take(all).into_iter().map(|r| r.why).collect();
        if refused.is_empty() { Ok(()) } else { Err(refused.join("; ")) }
    }

    fn take(&self, all: impl IntoIterator<Item = Arc<Resource>>) -> Vec<RefusedResource> {
        let mut told: HashMap<TenantName, Vec<Arc<Resource>>> = HashMap::new();
        for r in all {
            if let Resource::Bundle(b) = &*r {
                told.entry(b.tenant.clone()).or_default().push(r);
            }
        }
        told.values_mut().for_each(|list| list.sort_by_cached_key(|r| r.name()));
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<_> = places.iter().filter(|(t, p)| !p.bundles.is_empty() && !told.contains_key(*t)).map(|(t, _)| t.clone()).collect();
        told.extend(gone.into_iter().map(|t| (t, Vec::new())));
        told.retain(|tenant, list| places.get(tenant).is_none_or(|p| !same(&p.bundles, list)));
        let mut made = Vec::with_capacity(told.len());
        let mut refused = Vec::new();
        for (tenant, bundles) in told {
            let before = refused.len();
            let list = || bundles.iter().filter_map(|r| if let Resource::Bundle(b) = &**r { Some((r, b)) } else { None });
            for (resource, bundle) in list() {
                if let Err(why) = Anchors::read(bundle) {
                    refused.push(RefusedResource::by_caller(Kind::Bundle, resource.name(), &format!("bundle {}: {why}", resource.name())));
                }
            }
            if refused.len() == before
                && let Ok(trust) = Trust::of_bundles(list().map(|(_, bundle)| bundle))
            {
                made.push((tenant, bundles, trust));
            }
        }
        let changed = !made.is_empty();
        for (tenant, bundles, trust) in made {
            let place = places.entry(tenant).or_insert_with(Place::empty);
            place.bundles = bundles;
            place.writer.send_replace(Arc::new(trust));
            self.shared.changes.inc();
        }
        if changed {
            self.changes.send_modify(|n| *n += 1);
        }
        places.retain(|_, p| !p.bundles.is_empty() || p.writer.receiver_count() > 0);
        refused
    }
}

impl Place {
    fn empty() -> Self {
        Self { bundles: Vec::new(), writer: watch::Sender::new(Arc::new(Trust::new(None, BTreeMap::new()))) }
    }
}

fn same(a: &[Arc<Resource>], b: &[Arc<Resource>]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b) || a == b)
}
