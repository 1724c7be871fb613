//! A certificate with its key, chain and bundle, and the credential in which it is replaced. It is
//! obtained in [`canal_identity::certs`], not here.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use canal_wire::keyrpc::SpkiHash;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use sha2::{Digest, Sha256};
use tokio::sync::watch;
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate};

use super::provider;
use super::trust::{TrustAnchors, TrustView};
use super::verify::{self, PeerVerifier};

/// Reasons why PEM material is not a usable certificate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// A part is missing, or is not valid PEM or DER.
    #[error("certificate of {what}: {why}")]
    Form { what: String, why: String },
    /// The URI SANs of the leaf are not exactly one SPIFFE identity.
    #[error("the certificate must have exactly one identity as URI SAN; it has {0:?}")]
    Identity(Vec<String>),
    /// The key does not belong to the leaf.
    #[error("the private key does not belong to the certificate of {0}")]
    Key(Identity),
}

/// A workload's X.509-SVID: private key, chain (leaf first) and the trust bundle of its trust
/// domain. It is immutable.
pub struct Certificate {
    identity: Identity,
    chain: Vec<CertificateDer<'static>>,
    bundle: Vec<CertificateDer<'static>>,
    not_before: SystemTime,
    not_after: SystemTime,
    signing: Arc<SingleCertAndKey>,
    #[cfg(any(test, feature = "testing"))]
    certified: Arc<CertifiedKey>,
    anchors: Arc<TrustAnchors>,
}

impl std::fmt::Debug for Certificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Certificate({}, until {:?})",
            self.identity, self.not_after
        )
    }
}

impl Certificate {
    /// Parses PEM: a PKCS#8 key, the chain (leaf first, without roots) and the bundle. The identity
    /// is the leaf's only URI SAN.
    ///
    /// # Errors
    /// A part is malformed, the leaf does not have exactly one identity, or the key does not match.
    pub fn from_pem(key: &str, chain: &str, bundle: &str) -> Result<Self, CertificateError> {
        let read =
            |what: &str, pem: &str| -> Result<Vec<CertificateDer<'static>>, CertificateError> {
                let list = CertificateDer::pem_slice_iter(pem.as_bytes())
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(|e| form(what, e))?;
                if list.is_empty() {
                    Err(form(what, "contains no certificate"))
                } else {
                    Ok(list)
                }
            };
        let (chain, bundle) = (read("chain", chain)?, read("bundle", bundle)?);
        let key =
            PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|e| form("private key", e))?;
        let leaf = leaf(&chain[0])?;

        let provider = provider();
        // rustls checks here that the key belongs to the leaf.
        let signing =
            CertifiedKey::from_der(chain.clone(), key, &provider).map_err(|e| match e {
                rustls::Error::InconsistentKeys(_) => CertificateError::Key(leaf.identity.clone()),
                e => form("private key", e),
            })?;
        #[cfg(any(test, feature = "testing"))]
        let certified = Arc::new(signing.clone());
        let signing = Arc::new(SingleCertAndKey::from(signing));
        let anchors = Arc::new(TrustAnchors::of(&bundle, &[]).map_err(|e| form("bundle", e))?);
        let LeafInfo {
            identity,
            not_before,
            not_after,
        } = leaf;
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
    /// Verifies that the chain leads to a root of the bundle at `now`.
    ///
    /// # Errors
    /// The chain is not valid.
    pub fn is_signed_by(&self, now: SystemTime) -> Result<(), CertificateError> {
        let since = now
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        verify::chain(
            &self.chain,
            &self.anchors,
            UnixTime::since_unix_epoch(since),
        )
        .map_err(|e| form("chain", e))
    }
    /// Returns key and chain, for either side of TLS.
    pub fn signing(&self) -> &Arc<SingleCertAndKey> {
        &self.signing
    }
    /// Returns key and chain, for key servers in tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn certified(&self) -> &Arc<CertifiedKey> {
        &self.certified
    }
    /// Returns a verifier of this side's trust domain `own` that uses the certificate's bundle
    /// while `trust` has none for it.
    pub fn verifier(&self, own: TrustDomain, trust: TrustView) -> PeerVerifier {
        PeerVerifier {
            own,
            fallback: self.anchors.clone(),
            trust,
        }
    }
    /// Returns the identity in the leaf.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }
    /// Returns the chain, leaf first.
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }
    /// Returns the roots of the identity's trust domain.
    pub fn bundle(&self) -> &[CertificateDer<'static>] {
        &self.bundle
    }
    /// Returns the start of validity.
    pub fn not_before(&self) -> SystemTime {
        self.not_before
    }
    /// Returns the end of validity.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }
    /// Returns whether the certificate may be presented to a peer at `now`.
    pub fn valid_at(&self, now: SystemTime) -> bool {
        self.not_before <= now && now < self.not_after
    }
}

struct LeafInfo {
    identity: Identity,
    not_before: SystemTime,
    not_after: SystemTime,
}

fn form(what: &str, why: impl ToString) -> CertificateError {
    CertificateError::Form {
        what: what.into(),
        why: why.to_string(),
    }
}

fn leaf(der: &CertificateDer<'_>) -> Result<LeafInfo, CertificateError> {
    let (_, x) = X509Certificate::from_der(der).map_err(|e| form("leaf", e))?;
    let time = |t: ASN1Time| {
        SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(t.timestamp()).unwrap_or(0))
    };
    let (not_before, not_after) = (time(x.validity().not_before), time(x.validity().not_after));
    let uris = verify::uris(der).map_err(|e| form("leaf", e))?;
    match uris.as_slice() {
        [one] => match one.parse() {
            Ok(identity) => Ok(LeafInfo {
                identity,
                not_before,
                not_after,
            }),
            Err(_) => Err(CertificateError::Identity(uris)),
        },
        _ => Err(CertificateError::Identity(uris)),
    }
}

/// Returns the SHA-256 of a SubjectPublicKeyInfo (DER).
pub fn spki_hash(spki: &[u8]) -> SpkiHash {
    Sha256::digest(spki).into()
}

/// The current certificate of one identity. Clones see every replacement. Open connections retain
/// the certificate that they were made with.
#[derive(Debug, Clone)]
pub struct Credential {
    identity: Identity,
    current: watch::Receiver<Option<Arc<Certificate>>>,
}

/// Writer that replaces the certificate of a [`Credential`].
#[derive(Debug)]
pub struct CredentialWriter {
    identity: Identity,
    current: watch::Sender<Option<Arc<Certificate>>>,
}

impl Credential {
    /// Creates an empty credential and its writer.
    pub fn empty(identity: Identity) -> (CredentialWriter, Self) {
        let (tx, current) = watch::channel(None);
        (
            CredentialWriter {
                identity: identity.clone(),
                current: tx,
            },
            Self { identity, current },
        )
    }
    /// Creates a credential with a certificate that is never replaced.
    pub fn fixed(certificate: Certificate) -> Self {
        let identity = certificate.identity.clone();
        let (_, current) = watch::channel(Some(Arc::new(certificate)));
        Self { identity, current }
    }
    /// Returns the identity of the credential.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }
    /// Returns the present certificate, if there is one. It may have expired, see
    /// [`Certificate::valid_at`].
    pub fn current(&self) -> Option<Arc<Certificate>> {
        self.current.borrow().clone()
    }
    /// Returns whether there ever was a certificate.
    pub fn has_begun(&self) -> bool {
        self.current.borrow().is_some()
    }
    /// Waits for the first certificate; `None` if there will never be one.
    pub async fn first(&self) -> Option<Arc<Certificate>> {
        self.current
            .clone()
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|c| c.clone())
    }
}

impl CredentialWriter {
    /// Returns another reader of the credential.
    pub fn credential(&self) -> Credential {
        Credential {
            identity: self.identity.clone(),
            current: self.current.subscribe(),
        }
    }
    /// Replaces the certificate, which new handshakes use.
    pub fn replace(&self, certificate: Certificate) {
        self.current.send_replace(Some(Arc::new(certificate)));
    }
    /// Returns whether any [`Credential`] of this writer still exists.
    pub fn is_in_use(&self) -> bool {
        !self.current.is_closed()
    }
}
