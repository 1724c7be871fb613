//! CRLs (RFC 5280 §5): those that a CA signs itself, and those imported from its files. The caller
//! decides what is revoked.

use rcgen::{
    CertificateRevocationListParams, KeyIdMethod, KeyUsagePurpose, RevokedCertParams, SerialNumber,
};
use rustls_pki_types::CertificateRevocationListDer;
use rustls_pki_types::pem::PemObject;
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::revocation_list::CertificateRevocationList;

use crate::csr::CsrError;
use crate::files::armored;
use crate::issuer::moment;
use crate::tenant::TenantAuthority;

/// Validity of a CRL, in seconds: seven days. It is renewed after half of this time.
/// Data planes of Canal use a list also after its end (`ExpirationPolicy::Ignore`), so that a
/// controller that is down does not stop them; the value serves other readers of the list.
pub const CRL_LIFETIME_SECONDS: u64 = 7 * 24 * 3600;
/// CRLs in one file, at most.
/// A bundle may have as many (`REVOKED_MAX` in `canal_model::trust`).
const LISTS_MAX: usize = 16;

/// A revoked serial and the time of its revocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RevokedSerial {
    /// The serial number, big-endian, without leading zeros.
    pub serial: Vec<u8>,
    /// Time of the revocation, in seconds since 1970.
    pub at: u64,
}

/// A CRL that was imported from files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportedCrl {
    /// The whole list, as PEM.
    pub pem: String,
    issuer: Vec<u8>,
    number: u64,
    revoked: Vec<RevokedSerial>,
}

impl ImportedCrl {
    /// Parses all CRLs of a PEM file. Fails unless each is signed by one of `issuers` (PEM).
    pub(crate) fn read_all(pem: &str, issuers: &[&str]) -> Result<Vec<Self>, String> {
        let lists: Result<Vec<_>, _> =
            CertificateRevocationListDer::pem_slice_iter(pem.as_bytes()).collect();
        let lists = lists.map_err(|e| e.to_string())?;
        if lists.is_empty() || lists.len() > LISTS_MAX {
            return Err(format!(
                "it contains {} lists; 1 to {LISTS_MAX} are accepted",
                lists.len()
            ));
        }
        lists.iter().map(|der| Self::read(der, issuers)).collect()
    }

    fn read(der: &[u8], issuers: &[&str]) -> Result<Self, String> {
        let (_, list) = CertificateRevocationList::from_der(der)
            .map_err(|e| format!("a list cannot be read: {e}"))?;
        let signed = issuers.iter().any(|pem| {
            let Ok(issuer) = rustls_pki_types::CertificateDer::from_pem_slice(pem.as_bytes())
            else {
                return false;
            };
            let Ok((_, issuer)) = X509Certificate::from_der(&issuer) else {
                return false;
            };
            issuer.subject() == list.issuer() && list.verify_signature(issuer.public_key()).is_ok()
        });
        if !signed {
            return Err(format!(
                "none of these certificates signed the list of {}",
                list.issuer()
            ));
        }
        let seconds = |t: x509_parser::time::ASN1Time| u64::try_from(t.timestamp()).unwrap_or(0);
        let revoked = list
            .iter_revoked_certificates()
            .map(|r| RevokedSerial {
                serial: trimmed(r.raw_serial()),
                at: seconds(r.revocation_date),
            })
            .collect();
        let number = list
            .crl_number()
            .and_then(|n| u64::try_from(n).ok())
            .unwrap_or(0);
        Ok(Self {
            pem: armored("X509 CRL", der),
            issuer: list.issuer().as_raw().to_vec(),
            number,
            revoked,
        })
    }
}

/// Returns a serial without the leading zeros that DER requires.
pub(crate) fn trimmed(serial: &[u8]) -> Vec<u8> {
    serial.iter().copied().skip_while(|b| *b == 0).collect()
}

impl TenantAuthority {
    /// Returns the CRLs to publish: the CA's own list, and the imported lists of other issuers.
    ///
    /// The own list includes the entries of an imported list of the same issuer, because two lists
    /// of one issuer would contradict each other. Without revocations in `revoked`, there is no own
    /// list and the imported lists are returned unchanged.
    ///
    /// # Errors
    /// Returns [`CsrError::CrlSigner`] if the CA may not sign CRLs, or [`CsrError::Signing`].
    pub fn crls(
        &self,
        revoked: &[RevokedSerial],
        foreign: &[ImportedCrl],
        number: u64,
        now: u64,
    ) -> Result<Vec<String>, CsrError> {
        let own_name = self.subject();
        let (same, others): (Vec<&ImportedCrl>, Vec<&ImportedCrl>) =
            foreign.iter().partition(|f| f.issuer == own_name);
        let others = others.into_iter().map(|f| f.pem.clone());
        if revoked.is_empty() {
            return Ok(same
                .into_iter()
                .map(|f| f.pem.clone())
                .chain(others)
                .collect());
        }
        // A CA without the extension may sign everything (RFC 5280 §4.2.1.3).
        let usages = self.signer.issuer.key_usages();
        if !usages.is_empty() && !usages.contains(&KeyUsagePurpose::CrlSign) {
            return Err(CsrError::CrlSigner);
        }
        let mut all: Vec<&RevokedSerial> = revoked
            .iter()
            .chain(same.iter().flat_map(|f| &f.revoked))
            .collect();
        all.sort_by(|a, b| a.serial.cmp(&b.serial));
        all.dedup_by(|a, b| a.serial == b.serial);
        // The merged list replaces the imported one, so its number continues from that list's
        // number (RFC 5280 §5.2.3).
        let number = same
            .iter()
            .map(|f| f.number.saturating_add(number))
            .max()
            .unwrap_or(number);
        let row = |r: &RevokedSerial| -> Result<RevokedCertParams, CsrError> {
            let revocation_time = moment(r.at).map_err(CsrError::Signing)?;
            Ok(RevokedCertParams {
                serial_number: SerialNumber::from_slice(&r.serial),
                revocation_time,
                reason_code: None,
                invalidity_date: None,
            })
        };
        let params = CertificateRevocationListParams {
            // Verifiers whose clocks are behind must not take the list for one of the future.
            this_update: moment(now.saturating_sub(crate::SKEW_SECONDS))
                .map_err(CsrError::Signing)?,
            next_update: moment(now.saturating_add(CRL_LIFETIME_SECONDS))
                .map_err(CsrError::Signing)?,
            crl_number: SerialNumber::from_slice(&trimmed(&number.to_be_bytes())),
            issuing_distribution_point: None,
            revoked_certs: all.into_iter().map(row).collect::<Result<_, _>>()?,
            key_identifier_method: self.key_identifier(),
        };
        let list = params
            .signed_by(&self.signer.issuer)
            .and_then(|l| l.pem())
            .map_err(|e| CsrError::Signing(e.to_string()))?;
        Ok(std::iter::once(list).chain(others).collect())
    }

    /// Returns true if the issuer of a CRL (PEM) has the same name as the signing certificate,
    /// whatever its key.
    pub fn is_issuer_of(&self, list: &str) -> bool {
        let der = CertificateRevocationListDer::from_pem_slice(list.as_bytes());
        der.is_ok_and(|der| {
            CertificateRevocationList::from_der(&der)
                .is_ok_and(|(_, l)| l.issuer().as_raw() == self.subject())
        })
    }

    /// Returns the subject of the signing certificate, as DER.
    fn subject(&self) -> Vec<u8> {
        let der = rustls_pki_types::CertificateDer::from_pem_slice(self.certificate().as_bytes());
        let parsed = der.ok().and_then(|der| {
            X509Certificate::from_der(&der)
                .ok()
                .map(|(_, c)| c.subject().as_raw().to_vec())
        });
        parsed.unwrap_or_default()
    }

    /// Returns the key identifier in the signing certificate, so that CRLs reference the same
    /// identifier as leaves.
    fn key_identifier(&self) -> KeyIdMethod {
        let der = rustls_pki_types::CertificateDer::from_pem_slice(self.certificate().as_bytes());
        let id = der.ok().and_then(|der| {
            let (_, c) = X509Certificate::from_der(&der).ok()?;
            c.extensions()
                .iter()
                .find_map(|e| match e.parsed_extension() {
                    x509_parser::extensions::ParsedExtension::SubjectKeyIdentifier(id) => {
                        Some(id.0.to_vec())
                    }
                    _ => None,
                })
        });
        id.map_or(KeyIdMethod::Sha256, KeyIdMethod::PreSpecified)
    }
}
