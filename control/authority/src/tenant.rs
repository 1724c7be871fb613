//! A tenant's authority: issues SPIFFE X.509 certificates (X509-SVID) in one trust domain, and in no other.

use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use rcgen::{ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose, SanType};

use crate::issuer::{Root, dated, hex};
use crate::request::{self, Refusal};

/// One trust domain's root, able to sign.
pub struct TenantAuthority {
    domain: TrustDomain,
    root: Root,
}

/// A certificate as `CreateCertificate` answers it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issued {
    /// PEM: the leaf first; the last element is the trust bundle.
    pub chain: Vec<String>,
    /// Hexadecimal.
    pub serial: String,
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
        let root = Root::generate(domain.as_str(), now).map_err(Refusal::Signing)?;
        Ok(Self { domain: domain.clone(), root })
    }

    /// A root as it was kept: PKCS#8 DER and PEM.
    ///
    /// # Errors
    /// [`Refusal::Signing`] when the two do not belong together or cannot be read.
    pub fn load(domain: &TrustDomain, key: &[u8], certificate: &str) -> Result<Self, Refusal> {
        let root = Root::load(key, certificate).map_err(Refusal::Signing)?;
        Ok(Self { domain: domain.clone(), root })
    }

    /// PKCS#8 DER. Secret.
    pub fn key(&self) -> Vec<u8> {
        self.root.key_der()
    }

    /// The root certificate, PEM.
    pub fn certificate(&self) -> &str {
        &self.root.pem
    }

    /// Issues a certificate for `identity` to the key in `csr`. The caller has checked that the requester may have that identity.
    ///
    /// # Errors
    /// A [`Refusal`]; an identity of another trust domain is refused as [`Refusal::Name`].
    pub fn issue(&self, csr: &str, identity: &Identity, lifetime_seconds: u64, now: u64) -> Result<Issued, Refusal> {
        if identity.trust_domain != self.domain {
            return Err(Refusal::Name { named: identity.to_string(), asked: format!("one of trust domain {}", self.domain) });
        }
        if now >= self.root.not_after {
            return Err(Refusal::RootEnded(self.root.not_after));
        }
        let proved = request::check(csr, identity)?;
        let not_after = now.saturating_add(lifetime_seconds).min(self.root.not_after);
        let mut p = dated(now, not_after).map_err(Refusal::Signing)?;
        let name = identity.to_string().try_into().map_err(|e: rcgen::Error| Refusal::Signing(e.to_string()))?;
        p.subject_alt_names = vec![SanType::URI(name)];
        p.is_ca = IsCa::ExplicitNoCa;
        p.use_authority_key_identifier_extension = true;
        p.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        if proved.is_rsa {
            p.key_usages.push(KeyUsagePurpose::KeyEncipherment);
        }
        p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let serial = p.serial_number.as_ref().map(|s| hex(&s.to_bytes())).unwrap_or_default();
        let leaf = p.signed_by(&proved.spki, &self.root.issuer).map_err(|e| Refusal::Signing(e.to_string()))?;
        Ok(Issued {
            chain: vec![leaf.pem(), self.root.pem.clone()],
            serial,
            not_before: now.saturating_sub(crate::SKEW_SECONDS),
            not_after,
        })
    }
}
