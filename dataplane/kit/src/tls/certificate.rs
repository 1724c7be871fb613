//! A certificate with its key, chain and bundle, and the slot it is replaced in. It is not obtained here.

use std::sync::Arc;
use std::time::SystemTime;

use canal_model::identity::Identity;
use rustls_pki_types::CertificateDer;
use tokio::sync::watch;

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
}

impl std::fmt::Debug for Certificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Certificate({}, until {:?})", self.identity, self.not_after)
    }
}

impl Certificate {
    /// Reads PEM: a PKCS#8 key, the chain (leaf first, roots left out) and the bundle. The identity is the leaf's only URI SAN.
    pub fn from_pem(key: &str, chain: &str, bundle: &str) -> Result<Self, CertificateError> {
        let _ = (key, chain, bundle);
        unreachable!("body lands in the next commit")
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
    current: watch::Sender<Option<Arc<Certificate>>>,
}

impl Credential {
    /// An empty place and its writer.
    pub fn empty(identity: Identity) -> (CredentialWriter, Self) {
        let (tx, current) = watch::channel(None);
        (CredentialWriter { current: tx }, Self { identity, current })
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
    /// Waits for the first certificate; `None` if there will never be one.
    pub async fn first(&self) -> Option<Arc<Certificate>> {
        self.current.clone().wait_for(Option::is_some).await.ok().and_then(|c| c.clone())
    }
}

impl CredentialWriter {
    /// Replaces the certificate: new handshakes use it.
    pub fn replace(&self, certificate: Certificate) {
        self.current.send_replace(Some(Arc::new(certificate)));
    }
    /// Whether anyone still holds the [`Credential`].
    pub fn wanted(&self) -> bool {
        !self.current.is_closed()
    }
}
