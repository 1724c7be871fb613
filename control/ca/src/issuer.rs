//! The parts common to all CAs of Canal: a key with its certificate, and the dates, serials and
//! usages of leaves.

use std::time::Duration;

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use canal_model::identity::Identity;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType, SerialNumber, date_time_ymd,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use time::OffsetDateTime;
use x509_parser::prelude::{FromDer, X509Certificate};
use zeroize::{Zeroize, Zeroizing};

use crate::csr::{CsrError, VerifiedPublicKey};
use crate::{ROOT_LIFETIME_SECONDS, SKEW_SECONDS};

/// A root or intermediate with its private key.
pub(crate) struct SigningCa {
    pub(crate) issuer: Issuer<'static, KeyPair>,
    /// The CA's certificate as PEM; that of a root is self-signed.
    pub(crate) pem: String,
    /// Expiry of the certificate, in seconds since 1970.
    pub(crate) not_after: u64,
    /// The first half of the certificate's SHA-256, in hexadecimal.
    pub(crate) fingerprint: String,
}

impl SigningCa {
    /// Creates a new key and a self-signed certificate with the name `name`.
    pub(crate) fn generate(name: &str, now: u64) -> Result<Self, String> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|e| e.to_string())?;
        let mut p = dated(now, now.saturating_add(ROOT_LIFETIME_SECONDS))?;
        p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        p.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        p.distinguished_name = DistinguishedName::new();
        p.distinguished_name.push(DnType::OrganizationName, "Canal");
        // X.520 limits a common name to 64 characters. Two roots of one domain must have different
        // names: verifiers find a CRL by its issuer's name alone, so with a second root of the same
        // name every chain would wrongly appear revoked.
        let own = hex(
            &aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, key.public_key_raw()).as_ref()
                [..4],
        );
        p.distinguished_name.push(
            DnType::CommonName,
            // A common name has at most 64 characters (RFC 5280 appendix A.1): 55, a space, and
            // eight of the key's hash.
            format!("{} {own}", name.chars().take(55).collect::<String>()),
        );
        let pem = p.self_signed(&key).map_err(|e| e.to_string())?.pem();
        Self::assemble(key, pem)
    }

    /// Loads a stored root. Fails if the certificate does not match the key.
    pub(crate) fn load(key_der: &[u8], pem: &str) -> Result<Self, String> {
        let key = KeyPair::from_pkcs8_der_and_sign_algo(
            &PrivatePkcs8KeyDer::from(key_der),
            &PKCS_ECDSA_P256_SHA256,
        )
        .map_err(|e| format!("the key cannot be read: {e}"))?;
        Self::assemble(key, pem.to_string())
    }

    /// Creates a CA from an operator's key in PKCS#8, PKCS#1 or SEC1, ECDSA or RSA. Fails if the
    /// certificate does not match the key.
    pub(crate) fn adopt(mut key: PrivateKeyDer<'static>, pem: &str) -> Result<Self, String> {
        let pair = KeyPair::try_from(&key).map_err(|e| format!("the key cannot be used: {e}"));
        // The type of the decoded key does not wipe its memory on drop.
        key.zeroize();
        Self::assemble(pair?, pem.to_string())
    }

    fn assemble(key: KeyPair, pem: String) -> Result<Self, String> {
        let der = CertificateDer::from_pem_slice(pem.as_bytes())
            .map_err(|e| format!("the certificate cannot be read: {e}"))?;
        let (_, certificate) = X509Certificate::from_der(&der)
            .map_err(|e| format!("the certificate cannot be read: {e}"))?;
        if certificate.public_key().subject_public_key.data != key.public_key_raw() {
            return Err("the certificate belongs to another key".into());
        }
        let not_after = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0);
        let issuer = Issuer::from_ca_cert_pem(&pem, key).map_err(|e| e.to_string())?;
        Ok(Self {
            issuer,
            fingerprint: fingerprint(&der),
            pem,
            not_after,
        })
    }

    /// Returns the private key as PKCS#8 DER. Its memory is wiped on drop.
    pub(crate) fn key_der(&self) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(self.issuer.key().serialize_der())
    }
}

/// Returns the fingerprint of a certificate: the first half of its SHA-256, in hexadecimal.
pub(crate) fn fingerprint(der: &[u8]) -> String {
    hex(&aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, der).as_ref()[..16])
}

/// Signs the leaf of `identity` for a verified public key. Returns its PEM and its serial.
pub(crate) fn leaf(
    root: &SigningCa,
    public_key: &VerifiedPublicKey,
    identity: &Identity,
    names: &[String],
    (now, not_after): (u64, u64),
) -> Result<(String, String), CsrError> {
    let bad = |e: rcgen::Error| CsrError::Signing(e.to_string());
    let mut p = dated(now, not_after).map_err(CsrError::Signing)?;
    p.subject_alt_names = vec![SanType::URI(identity.to_string().try_into().map_err(bad)?)];
    for name in names {
        p.subject_alt_names
            .push(SanType::DnsName(name.clone().try_into().map_err(bad)?));
    }
    p.is_ca = IsCa::ExplicitNoCa;
    p.use_authority_key_identifier_extension = true;
    p.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // Only RSA key exchange encrypts with the key (RFC 5280 §4.2.1.3); ECDSA keys sign.
    if public_key.is_rsa {
        p.key_usages.push(KeyUsagePurpose::KeyEncipherment);
    }
    p.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let serial = p
        .serial_number
        .as_ref()
        .map(|s| hex(&s.to_bytes()))
        .unwrap_or_default();
    let leaf = p.signed_by(&public_key.spki, &root.issuer).map_err(bad)?;
    Ok((leaf.pem(), serial))
}

/// Converts seconds since 1970 into the time format of certificates.
pub(crate) fn moment(seconds: u64) -> Result<OffsetDateTime, String> {
    let at = date_time_ymd(1970, 1, 1);
    let after = Duration::from_secs(seconds)
        .try_into()
        .ok()
        .and_then(|d| at.checked_add(d));
    after.ok_or_else(|| "the clock is outside the range of times in certificates".into())
}

/// Returns certificate parameters with a validity from [`SKEW_SECONDS`] before `now` to `until`, a
/// random serial and no subject.
pub(crate) fn dated(now: u64, until: u64) -> Result<CertificateParams, String> {
    let mut p = CertificateParams::default();
    p.distinguished_name = DistinguishedName::new();
    p.not_before = moment(now.saturating_sub(SKEW_SECONDS))?;
    p.not_after = moment(until)?;
    p.serial_number = Some(SerialNumber::from_slice(&serial()?));
    Ok(p)
}

/// Returns a serial of 127 random bits (RFC 5280 §4.1.2.2: positive, at most 20 octets). The second
/// bit is set, so the length is constant.
fn serial() -> Result<[u8; 16], String> {
    let mut s = [0; 16];
    SystemRandom::new()
        .fill(&mut s)
        .map_err(|_| "the operating system returned no random bytes")?;
    s[0] = (s[0] & 0x7f) | 0x40;
    Ok(s)
}

/// Formats bytes, such as a serial, in lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut out, b| {
        // Writing to a String cannot fail.
        let _ = write!(out, "{b:02x}");
        out
    })
}
