//! Checks a PKCS#10 request (RFC 2986). Only the public key is used from it, after the sender has
//! proved possession of the private key.

use canal_model::identity::Identity;
use rcgen::SubjectPublicKeyInfo;
use rustls_pki_types::CertificateSigningRequestDer;
use rustls_pki_types::pem::PemObject;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::oid_registry as oid;
use x509_parser::prelude::FromDer;
use x509_parser::public_key::PublicKey;
use x509_parser::x509;

/// Maximum size of a request, in bytes of PEM. An RSA-4096 request with many extensions has about 3
/// KiB.
pub const CSR_BYTES_MAX: usize = 16 << 10;
/// Accepted sizes of RSA moduli, in bits.
/// NIST SP 800-131A disallows fewer. Signatures of larger keys take too long (see
/// `SERVING_RSA_BITS_MAX`).
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=4096;

/// The reason that no certificate was issued. Each text states what to send instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CsrError {
    /// The request has more than [`CSR_BYTES_MAX`] bytes.
    #[error(
        "the certificate request has {0} bytes; at most {CSR_BYTES_MAX} are allowed; fix: send fewer extensions"
    )]
    TooLarge(usize),
    /// The request is not PEM or not a PKCS#10 structure.
    #[error(
        "the certificate request cannot be read: {0}; fix: send a PKCS#10 request in PEM (CERTIFICATE REQUEST)"
    )]
    Form(String),
    /// The request is not signed by the key in it.
    #[error(
        "the request's signature does not match its key; fix: sign the request with the private key that belongs to its public key"
    )]
    Signature,
    /// The key's algorithm is not accepted, or the key is weak.
    #[error(
        "{0} is not accepted; fix: use ECDSA P-256 (preferred) or P-384 with SHA-2, or RSA of 2048 to 4096 bits with SHA-2"
    )]
    Key(String),
    /// The key's algorithm is not the one that the tenant has configured.
    #[error(
        "the tenant's keys are ECDSA P-256; fix: send such a key, or set spec.keys.algorithm to Rsa2048"
    )]
    Algorithm,
    /// The request contains an identity other than the requested one.
    #[error(
        "the request names {named}, the requested identity is {requested}; fix: omit the URI name, or make them equal"
    )]
    Name { named: String, requested: String },
    /// The crypto library failed to sign.
    #[error(
        "the certificate could not be signed: {0}; this is a bug in the controller; fix: try again, and report it"
    )]
    Signing(String),
    /// The root or an intermediate above the leaf has expired.
    #[error(
        "the CA's root expired at {0} s since 1970; fix: replace it with `canal ca rotate`, or the files that hold it"
    )]
    RootEnded(u64),
    /// The CA's certificate does not allow it to sign CRLs.
    #[error(
        "the intermediate may not sign revocation lists; fix: give it the key usage cRLSign, or put crl.pem beside it"
    )]
    CrlSigner,
}

impl CsrError {
    /// Returns the name of the error as the label value of a counter.
    pub fn name(&self) -> &'static str {
        match self {
            Self::TooLarge(_) => "too_large",
            Self::Form(_) => "form",
            Self::Signature => "signature",
            Self::Key(_) => "key",
            Self::Algorithm => "key_algorithm",
            Self::Name { .. } => "name",
            Self::Signing(_) => "signing",
            Self::RootEnded(_) => "root_ended",
            Self::CrlSigner => "crl_signer",
        }
    }
}

/// The public key of a request that is signed with the matching private key.
pub(crate) struct VerifiedPublicKey {
    pub(crate) spki: SubjectPublicKeyInfo,
    /// The key's SubjectPublicKeyInfo, as DER.
    pub(crate) raw: Vec<u8>,
    pub(crate) is_rsa: bool,
}

/// Checks size, form, key, proof of possession and the URI name, in this order. All extensions
/// except the name are ignored.
pub(crate) fn check(
    pem: &str,
    requested: &Identity,
    rsa: bool,
) -> Result<VerifiedPublicKey, CsrError> {
    if pem.len() > CSR_BYTES_MAX {
        return Err(CsrError::TooLarge(pem.len()));
    }
    let der = CertificateSigningRequestDer::from_pem_slice(pem.as_bytes())
        .map_err(|e| CsrError::Form(e.to_string()))?;
    let (rest, csr) =
        X509CertificationRequest::from_der(&der).map_err(|e| CsrError::Form(e.to_string()))?;
    if !rest.is_empty() {
        return Err(CsrError::Form(format!("{} bytes follow it", rest.len())));
    }
    let is_rsa = check_key(&csr.certification_request_info.subject_pki)?;
    if is_rsa && !rsa {
        return Err(CsrError::Algorithm);
    }
    check_algorithm(&csr.signature_algorithm)?;
    csr.verify_signature().map_err(|_| CsrError::Signature)?;
    check_names(&csr, requested)?;
    let raw = csr.certification_request_info.subject_pki.raw.to_vec();
    let spki = SubjectPublicKeyInfo::from_der(&raw).map_err(|e| CsrError::Key(e.to_string()))?;
    Ok(VerifiedPublicKey { spki, raw, is_rsa })
}

fn check_key(spki: &x509::SubjectPublicKeyInfo<'_>) -> Result<bool, CsrError> {
    let algorithm = &spki.algorithm.algorithm;
    if *algorithm == oid::OID_KEY_TYPE_EC_PUBLIC_KEY {
        let curve = spki
            .algorithm
            .parameters
            .as_ref()
            .and_then(|p| p.as_oid().ok());
        return match curve {
            Some(c) if c == oid::OID_EC_P256 || c == oid::OID_NIST_EC_P384 => Ok(false),
            Some(c) => Err(CsrError::Key(format!("the curve {c}"))),
            None => Err(CsrError::Key("an EC key without a named curve".into())),
        };
    }
    if *algorithm == oid::OID_PKCS1_RSAENCRYPTION {
        return match spki.parsed() {
            Ok(PublicKey::RSA(key)) if RSA_BITS.contains(&key.key_size()) => Ok(true),
            Ok(PublicKey::RSA(key)) => {
                Err(CsrError::Key(format!("RSA of {} bits", key.key_size())))
            }
            _ => Err(CsrError::Key("an RSA key that cannot be read".into())),
        };
    }
    Err(CsrError::Key(format!("a key of type {algorithm}")))
}

fn check_algorithm(a: &x509::AlgorithmIdentifier<'_>) -> Result<(), CsrError> {
    let accepted = [
        oid::OID_SIG_ECDSA_WITH_SHA256,
        oid::OID_SIG_ECDSA_WITH_SHA384,
        oid::OID_PKCS1_SHA256WITHRSA,
        oid::OID_PKCS1_SHA384WITHRSA,
        oid::OID_PKCS1_SHA512WITHRSA,
    ];
    if accepted.contains(&a.algorithm) {
        Ok(())
    } else {
        Err(CsrError::Key(format!(
            "the signature algorithm {}",
            a.algorithm
        )))
    }
}

/// Checks that every URI name is the identity. A name extension that cannot be parsed is refused,
/// because it might contain another identity.
fn check_names(csr: &X509CertificationRequest<'_>, requested: &Identity) -> Result<(), CsrError> {
    let requested = requested.to_string();
    let Some(extensions) = csr.requested_extensions() else {
        return Ok(());
    };
    for extension in extensions {
        match extension {
            ParsedExtension::SubjectAlternativeName(san) => {
                for name in &san.general_names {
                    if let GeneralName::URI(uri) = name
                        && *uri != requested
                    {
                        return Err(CsrError::Name {
                            // The client chose this text; the error stays a few lines long.
                            named: uri.chars().take(200).collect(),
                            requested,
                        });
                    }
                }
            }
            ParsedExtension::ParseError { error } => {
                return Err(CsrError::Form(format!(
                    "an extension cannot be read: {error}"
                )));
            }
            _ => {}
        }
    }
    Ok(())
}
