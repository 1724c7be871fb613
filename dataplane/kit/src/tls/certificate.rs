//! A certificate with its key, chain and bundle, and the slot it is replaced in. It is not obtained here.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use canal_model::identity::Identity;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use tokio::sync::watch;
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate};

use super::provider;
use super::trust::Anchors;
use super::verify;

/// Why PEM material is not a usable certificate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// A part is missing or not PEM/DER.
    #[error("certificate of {what}: {why}")]
    Form { what: String, why: String },
    /// The leaf holds other URI SANs than one SPIFFE identity.
    #[error("the certificate must hold exactly one identity as URI SAN, it holds {0:?}")]
    Identity(Vec<String>),
    /// The key does not belong to the leaf.
    #[error("the private key does not belong to the certificate of {0}")]
    Key(Identity),
}

/// A workload's X.509-SVID: private key, chain (leaf first) and the bundle that vouches for its trust domain. Immutable.
pub struct Certificate {
    identity: Identity,
    chain: Vec<CertificateDer<'static>>,
    bundle: Vec<CertificateDer<'static>>,
    not_before: SystemTime,
    not_after: SystemTime,
    signing: Arc<SingleCertAndKey>,
    #[cfg(any(test, feature = "testing"))]
    certified: Arc<CertifiedKey>,
    anchors: Arc<Anchors>,
}

impl std::fmt::Debug for Certificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Certificate({}, until {:?})", self.identity, self.not_after)
    }
}

impl Certificate {
    /// Reads PEM: a PKCS#8 key, the chain (leaf first, roots left out) and the bundle. The identity is the leaf's only URI SAN.
    pub fn from_pem(key: &str, chain: &str, bundle: &str) -> Result<Self, CertificateError> {
        let read = |what: &str, pem: &str| -> Result<Vec<CertificateDer<'static>>, CertificateError> {
            let list = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>().map_err(|e| form(what, e))?;
            if list.is_empty() { Err(form(what, "holds no certificate")) } else { Ok(list) }
        };
        let (chain, bundle) = (read("chain", chain)?, read("bundle", bundle)?);
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|e| form("private key", e))?;
        let leaf = leaf(&chain[0])?;

        let provider = provider();
        let signing = CertifiedKey::from_der(chain.clone(), key, &provider).map_err(|e| match e {
            rustls::Error::InconsistentKeys(_) => CertificateError::Key(leaf.identity.clone()),
            e => form("private key", e),
        })?;
        #[cfg(any(test, feature = "testing"))]
        let certified = Arc::new(signing.clone());
        let signing = Arc::new(SingleCertAndKey::from(signing));
        let anchors = Arc::new(Anchors::of(&bundle, &[]).map_err(|e| form("bundle", e))?);
        let Leaf { identity, not_before, not_after } = leaf;
        Ok(Self {
            identity,
            chain,
            bundle,
            not_before,
            not_after,
            signing,
            #[cfg(any(test, feature = "testing"))]
            certified,
            anchors,
        })
    }
    /// Whether the bundle vouches for the chain at `now`.
    pub fn vouched_for(&self, now: SystemTime) -> Result<(), CertificateError> {
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        verify::chain(&self.chain, &self.anchors, UnixTime::since_unix_epoch(since)).map_err(|e| form("chain", e))
    }
    /// Key and chain, for either side of TLS.
    pub(crate) fn signing(&self) -> &Arc<SingleCertAndKey> {
        &self.signing
    }
    /// Key and chain, for tests' key servers.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn certified(&self) -> &Arc<CertifiedKey> {
        &self.certified
    }
    /// What its own bundle vouches for.
    pub(super) fn anchors(&self) -> &Arc<Anchors> {
        &self.anchors
    }
    /// Who it is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }
    /// Leaf first.
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }
    /// The trust anchors of its trust domain.
    pub fn bundle(&self) -> &[CertificateDer<'static>] {
        &self.bundle
    }
    /// Valid from.
    pub fn not_before(&self) -> SystemTime {
        self.not_before
    }
    /// Valid until.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }
    /// Whether it may be shown to a peer at `now`.
    pub fn valid_at(&self, now: SystemTime) -> bool {
        self.not_before <= now && now < self.not_after
    }
}

struct Leaf {
    identity: Identity,
    not_before: SystemTime,
    not_after: SystemTime,
}

fn form(what: &str, why: impl ToString) -> CertificateError {
    CertificateError::Form { what: what.into(), why: why.to_string() }
}

fn leaf(der: &CertificateDer<'_>) -> Result<Leaf, CertificateError> {
    let (_, x) = X509Certificate::from_der(der).map_err(|e| form("leaf", e))?;
    let time = |t: ASN1Time| SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(t.timestamp()).unwrap_or(0));
    let (not_before, not_after) = (time(x.validity().not_before), time(x.validity().not_after));
    let uris = verify::uris(der).map_err(|e| form("leaf", e))?;
    match uris.as_slice() {
        [one] => match one.parse() {
            Ok(identity) => Ok(Leaf { identity, not_before, not_after }),
            Err(_) => Err(CertificateError::Identity(uris)),
        },
        _ => Err(CertificateError::Identity(uris)),
    }
}

/// The place where the current certificate of one identity is found; clones see every replacement. Live connections keep
/// what they were made with.
#[derive(Debug, Clone)]
pub struct Credential {
    identity: Identity,
    current: watch::Receiver<Option<Arc<Certificate>>>,
}

/// The writing end of a [`Credential`].
#[derive(Debug)]
pub struct CredentialWriter {
    identity: Identity,
    current: watch::Sender<Option<Arc<Certificate>>>,
}

impl Credential {
    /// An empty place and its writer.
    pub fn empty(identity: Identity) -> (CredentialWriter, Self) {
        let (tx, current) = watch::channel(None);
        (CredentialWriter { identity: identity.clone(), current: tx }, Self { identity, current })
    }
    /// A place that holds `certificate` for good.
    pub fn fixed(certificate: Certificate) -> Self {
        let identity = certificate.identity.clone();
        let (_, current) = watch::channel(Some(Arc::new(certificate)));
        Self { identity, current }
    }
    /// Who it is for.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }
    /// The certificate now, if there is one (it may have expired: [`Certificate::valid_at`]).
    pub fn current(&self) -> Option<Arc<Certificate>> {
        self.current.borrow().clone()
    }
    /// Whether there ever was a certificate.
    pub fn has_begun(&self) -> bool {
        self.current.borrow().is_some()
    }
    /// Waits for the first certificate; `None` if there will never be one.
    pub async fn first(&self) -> Option<Arc<Certificate>> {
        self.current.clone().wait_for(Option::is_some).await.ok().and_then(|c| c.clone())
    }
}

impl CredentialWriter {
    /// Another view of the place.
    pub fn credential(&self) -> Credential {
        Credential { identity: self.identity.clone(), current: self.current.subscribe() }
    }
    /// Replaces the certificate: new handshakes use it.
    pub fn replace(&self, certificate: Certificate) {
        self.current.send_replace(Some(Arc::new(certificate)));
    }
    /// Whether anyone still holds the [`Credential`].
    pub fn wanted(&self) -> bool {
        !self.current.is_closed()
    }
}
