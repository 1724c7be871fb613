//! A tenant's authority: issues SPIFFE X.509 certificates (X509-SVID) in one trust domain, and in no other. It signs with a root of its
//! own, or with an intermediate that somebody gave it (`files`).

use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use zeroize::Zeroizing;

use crate::SKEW_SECONDS;
use crate::issuer::{Root, leaf};
use crate::request::{self, Refusal};

/// One trust domain's authority, able to sign.
pub struct TenantAuthority {
    pub(crate) domain: TrustDomain,
    pub(crate) signer: Root,
    /// From the signing certificate up to the last below a root; empty where a root signs.
    pub(crate) intermediates: Vec<String>,
    /// What vouches for the domain, PEM, one each.
    pub(crate) roots: Vec<String>,
    /// The earliest end in the chain, seconds since 1970.
    pub(crate) not_after: u64,
}

/// What a certificate is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// PKCS#10, PEM.
    pub csr: &'a str,
    /// The URI name.
    pub identity: &'a Identity,
    /// DNS names, beside the identity.
    pub names: &'a [String],
    /// Whether a request with an RSA key is taken.
    pub rsa: bool,
    /// How long it is to live.
    pub lifetime_seconds: u64,
}

/// A certificate as it was issued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issued {
    /// PEM: the leaf first, then the intermediates. Roots are not in it.
    pub chain: Vec<String>,
    /// Hexadecimal.
    pub serial: String,
    /// Fingerprint of the certificate that signed it.
    pub root: String,
    /// Seconds since 1970.
    pub not_before: u64,
    /// Seconds since 1970.
    pub not_after: u64,
}

impl TenantAuthority {
    /// A new root for `domain`. Keep it on disk before it signs anything.
    ///
    /// # Errors
    /// [`Refusal::Signing`].
    pub fn generate(domain: &TrustDomain, now: u64) -> Result<Self, Refusal> {
        Ok(Self::of_root(domain, Root::generate(domain.as_str(), now).map_err(Refusal::Signing)?))
    }

    /// A root as it was kept: PKCS#8 DER and PEM.
    ///
    /// # Errors
    /// [`Refusal::Signing`] when the two do not belong together or cannot be read.
    pub fn load(domain: &TrustDomain, key: &[u8], certificate: &str) -> Result<Self, Refusal> {
        Ok(Self::of_root(domain, Root::load(key, certificate).map_err(Refusal::Signing)?))
    }

    fn of_root(domain: &TrustDomain, root: Root) -> Self {
        let (roots, not_after) = (vec![root.pem.clone()], root.not_after);
        Self { domain: domain.clone(), signer: root, intermediates: Vec::new(), roots, not_after }
    }

    /// PKCS#8 DER. Secret; wiped when it is dropped.
    pub fn key(&self) -> Zeroizing<Vec<u8>> {
        self.signer.key_der()
    }

    /// The signing certificate, PEM; a root's own.
    pub fn certificate(&self) -> &str {
        &self.signer.pem
    }

    /// What vouches for the domain, PEM, one each.
    pub fn roots(&self) -> &[String] {
        &self.roots
    }

    /// Of the signing certificate: what [`Issued::root`] says.
    pub fn fingerprint(&self) -> &str {
        &self.signer.fingerprint
    }

    /// The earliest end in the chain, seconds since 1970.
    pub fn not_after(&self) -> u64 {
        self.not_after
    }

    /// Issues a certificate to the key in the request. The caller has checked that the requester may have the identity and the names.
    ///
    /// # Errors
    /// A [`Refusal`]; an identity of another trust domain is refused as [`Refusal::Name`].
    pub fn issue(&self, asked: &Asked<'_>, now: u64) -> Result<Issued, Refusal> {
        let identity = asked.identity;
        if identity.trust_domain != self.domain {
            return Err(Refusal::Name { named: identity.to_string(), asked: format!("one of trust domain {}", self.domain) });
        }
        if now >= self.not_after {
            return Err(Refusal::RootEnded(self.not_after));
        }
        let proved = request::check(asked.csr, identity, asked.rsa)?;
        let not_after = now.saturating_add(asked.lifetime_seconds).min(self.not_after);
        let (pem, serial) = leaf(&self.signer, &proved, identity, asked.names, (now, not_after))?;
        Ok(Issued {
            chain: std::iter::once(pem).chain(self.intermediates.iter().cloned()).collect(),
            serial,
            root: self.signer.fingerprint.clone(),
            not_before: now.saturating_sub(SKEW_SECONDS),
            not_after,
        })
    }
}
