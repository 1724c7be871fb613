//! A tenant's CA: it issues X.509-SVIDs (SPIFFE) in exactly one trust domain.
//!
//! It signs with its own root or with an intermediate from files (`files`). The caller decides
//! which identity a requester may have.

use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use zeroize::Zeroizing;

use crate::SKEW_SECONDS;
use crate::csr::{self, CsrError};
use crate::issuer::{SigningCa, leaf};

/// The CA of one trust domain, able to sign.
pub struct TenantAuthority {
    pub(crate) domain: TrustDomain,
    pub(crate) signer: SigningCa,
    /// The chain from the signing certificate up to the last one below a root; empty if a root
    /// signs.
    pub(crate) intermediates: Vec<String>,
    /// The trust bundle of the domain, one root per element, as PEM.
    pub(crate) roots: Vec<String>,
    /// The earliest expiry in the chain, in seconds since 1970.
    pub(crate) not_after: u64,
}

/// The parameters of a certificate to issue.
#[derive(Debug, Clone, Copy)]
pub struct CertificateRequest<'a> {
    /// The PKCS#10 request, as PEM.
    pub csr: &'a str,
    /// The identity for the URI name.
    pub identity: &'a Identity,
    /// DNS names in addition to the identity.
    pub names: &'a [String],
    /// If true, a request with an RSA key is accepted too.
    pub rsa: bool,
    /// Lifetime of the certificate, in seconds.
    pub lifetime_seconds: u64,
}

/// A certificate that was issued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuedLeaf {
    /// The chain as PEM: the leaf first, then the intermediates, without roots.
    pub chain: Vec<String>,
    /// The serial number, in hexadecimal.
    pub serial: String,
    /// Fingerprint of the certificate that signed the leaf; for an external CA, of the first
    /// configured root.
    pub root: String,
    /// Begin of the validity, in seconds since 1970.
    pub not_before: u64,
    /// End of the validity, in seconds since 1970.
    pub not_after: u64,
}

impl TenantAuthority {
    /// Creates a new root for `domain`. Store it on disk before it signs anything.
    ///
    /// # Errors
    /// Returns [`CsrError::Signing`] if no key or certificate can be created.
    pub fn generate(domain: &TrustDomain, now: u64) -> Result<Self, CsrError> {
        Ok(Self::of_root(
            domain,
            SigningCa::generate(domain.as_str(), now).map_err(CsrError::Signing)?,
        ))
    }

    /// Loads a stored root from its key in PKCS#8 DER and its certificate in PEM.
    ///
    /// # Errors
    /// Returns [`CsrError::Signing`] if key and certificate do not match or cannot be read.
    pub fn load(domain: &TrustDomain, key: &[u8], certificate: &str) -> Result<Self, CsrError> {
        Ok(Self::of_root(
            domain,
            SigningCa::load(key, certificate).map_err(CsrError::Signing)?,
        ))
    }

    fn of_root(domain: &TrustDomain, root: SigningCa) -> Self {
        let (roots, not_after) = (vec![root.pem.clone()], root.not_after);
        Self {
            domain: domain.clone(),
            signer: root,
            intermediates: Vec::new(),
            roots,
            not_after,
        }
    }

    /// Returns the private key as PKCS#8 DER. Its memory is wiped on drop.
    pub fn key(&self) -> Zeroizing<Vec<u8>> {
        self.signer.key_der()
    }

    /// Returns the signing certificate as PEM; for a root, its own.
    pub fn certificate(&self) -> &str {
        &self.signer.pem
    }

    /// Returns the trust bundle of the domain, one root per element, as PEM.
    pub fn roots(&self) -> &[String] {
        &self.roots
    }

    /// Returns the fingerprint of the signing certificate, as in [`IssuedLeaf::root`].
    pub fn fingerprint(&self) -> &str {
        &self.signer.fingerprint
    }

    /// Returns the earliest expiry in the chain, in seconds since 1970.
    pub fn not_after(&self) -> u64 {
        self.not_after
    }

    /// Issues a certificate for the key in the request. The caller must have checked that the
    /// requester may have the identity and the names.
    ///
    /// # Errors
    /// Returns a [`CsrError`]; an identity of another trust domain is refused as
    /// [`CsrError::Name`].
    pub fn issue(
        &self,
        request: &CertificateRequest<'_>,
        now: u64,
    ) -> Result<IssuedLeaf, CsrError> {
        let identity = request.identity;
        if identity.trust_domain != self.domain {
            return Err(CsrError::Name {
                named: identity.to_string(),
                requested: format!("one of trust domain {}", self.domain),
            });
        }
        if now >= self.not_after {
            return Err(CsrError::RootEnded(self.not_after));
        }
        let public_key = csr::check(request.csr, identity, request.rsa)?;
        // A leaf must not outlive any certificate above it.
        let not_after = now
            .saturating_add(request.lifetime_seconds)
            .min(self.not_after);
        let (pem, serial) = leaf(
            &self.signer,
            &public_key,
            identity,
            request.names,
            (now, not_after),
        )?;
        Ok(IssuedLeaf {
            chain: std::iter::once(pem)
                .chain(self.intermediates.iter().cloned())
                .collect(),
            serial,
            root: self.signer.fingerprint.clone(),
            not_before: now.saturating_sub(SKEW_SECONDS),
            not_after,
        })
    }
}
