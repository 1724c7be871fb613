//! What every root of Canal has in common: an ECDSA P-256 key, one self-signed certificate, and how leaves get their dates and serials.

use std::time::Duration;

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
    SerialNumber, date_time_ymd,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::{ROOT_LIFETIME_SECONDS, SKEW_SECONDS};

/// A root that can sign.
pub(crate) struct Root {
    pub(crate) issuer: Issuer<'static, KeyPair>,
    /// The self-signed certificate.
    pub(crate) pem: String,
    /// Seconds since 1970.
    pub(crate) not_after: u64,
}

impl Root {
    /// A new key and its certificate, named `name`.
    pub(crate) fn generate(name: &str, now: u64) -> Result<Self, String> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|e| e.to_string())?;
        let mut p = dated(now, now.saturating_add(ROOT_LIFETIME_SECONDS))?;
        p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        p.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        p.distinguished_name = DistinguishedName::new();
        p.distinguished_name.push(DnType::OrganizationName, "Canal");
        // X.520 bounds a common name to 64 characters; the key identifier, not the name, tells roots apart.
        p.distinguished_name.push(DnType::CommonName, name.chars().take(64).collect::<String>());
        let pem = p.self_signed(&key).map_err(|e| e.to_string())?.pem();
        Self::assemble(key, pem)
    }

    /// A root as it was kept. The certificate must be the key's.
    pub(crate) fn load(key_der: &[u8], pem: &str) -> Result<Self, String> {
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(key_der.to_vec()), &PKCS_ECDSA_P256_SHA256)
            .map_err(|e| format!("the key cannot be read: {e}"))?;
        Self::assemble(key, pem.to_string())
    }

    fn assemble(key: KeyPair, pem: String) -> Result<Self, String> {
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| format!("the certificate cannot be read: {e}"))?;
        let (_, certificate) = X509Certificate::from_der(&der).map_err(|e| format!("the certificate cannot be read: {e}"))?;
        if certificate.public_key().subject_public_key.data != key.public_key_raw() {
            return Err("the certificate is another key's".into());
        }
        let not_after = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0);
        let issuer = Issuer::from_ca_cert_pem(&pem, key).map_err(|e| e.to_string())?;
        Ok(Self { issuer, pem, not_after })
    }

    /// PKCS#8 DER. Secret.
    pub(crate) fn key_der(&self) -> Vec<u8> {
        self.issuer.key().serialize_der()
    }
}

/// Parameters of a certificate valid from [`SKEW_SECONDS`] before `now` until `until`, with a random serial and no subject.
pub(crate) fn dated(now: u64, until: u64) -> Result<CertificateParams, String> {
    let at = |seconds: u64| date_time_ymd(1970, 1, 1).checked_add(Duration::from_secs(seconds).try_into().ok()?);
    let mut p = CertificateParams::default();
    p.distinguished_name = DistinguishedName::new();
    p.not_before = at(now.saturating_sub(SKEW_SECONDS)).ok_or("the clock is outside what a certificate can say")?;
    p.not_after = at(until).ok_or("the clock is outside what a certificate can say")?;
    p.serial_number = Some(SerialNumber::from_slice(&serial()?));
    Ok(p)
}

/// 127 random bits (RFC 5280 §4.1.2.2: positive, at most 20 octets); the second bit set keeps the length constant.
fn serial() -> Result<[u8; 16], String> {
    let mut s = [0; 16];
    SystemRandom::new().fill(&mut s).map_err(|_| "no randomness from the operating system")?;
    s[0] = (s[0] & 0x7f) | 0x40;
    Ok(s)
}

/// A serial as logs show it.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut out, b| {
        // Writing to a String cannot fail.
        let _ = write!(out, "{b:02x}");
        out
    })
}
