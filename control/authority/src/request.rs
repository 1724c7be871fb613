//! Reads a PKCS#10 request (RFC 2986) and takes nothing from it but a public key that its sender has proved to hold.

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

/// Largest request read, bytes of PEM: an RSA-4096 request with many extensions has about 3 KiB.
pub const CSR_BYTES_MAX: usize = 16 << 10;
/// RSA moduli accepted, bits.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=4096;

/// Why no certificate was made. Each text says what to send instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// More than [`CSR_BYTES_MAX`].
    #[error("the request has {0} bytes and may have {CSR_BYTES_MAX}")]
    TooLarge(usize),
    /// Not PEM, or not a PKCS#10 structure.
    #[error("this is not a PKCS#10 request in PEM (CERTIFICATE REQUEST): {0}")]
    Form(String),
    /// The request is not signed by the key it names.
    #[error("the request's signature does not fit its key: sign it with the private key of the public key in it")]
    Signature,
    /// Another algorithm or a weak key.
    #[error("{0} is not accepted: use ECDSA P-256 (preferred) or P-384 with SHA-2, or RSA of 2048 to 4096 bits with SHA-2")]
    Key(String),
    /// A key of an algorithm that the tenant does not ask for.
    #[error("the tenant's keys are ECDSA P-256: send such a key, or set spec.keys.algorithm to Rsa2048")]
    Algorithm,
    /// The request names another identity than the one asked for.
    #[error("the request names {named}, the identity asked for is {asked}: leave the URI name out, or make them equal")]
    Name { named: String, asked: String },
    /// Signing failed inside the crypto library.
    #[error("the certificate could not be signed: {0}; this is a fault of the controller, try again")]
    Signing(String),
    /// The root has ended.
    #[error("the authority's root ended at {0} s since 1970; replace it with `canal ca rotate`, or the files that hold it")]
    RootEnded(u64),
    /// The authority may not sign revocation lists.
    #[error("the intermediate may not sign revocation lists; give it the key usage cRLSign, or put crl.pem beside it")]
    CrlSigner,
}

impl Refusal {
    /// The name of the refusal, for a counter.
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

/// The public key of a request whose sender holds the private one.
pub(crate) struct ProvedKey {
    pub(crate) spki: SubjectPublicKeyInfo,
    /// The same, DER.
    pub(crate) raw: Vec<u8>,
    pub(crate) is_rsa: bool,
}

/// Checks size, form, key, proof of possession and the URI name, in this order. Every extension but the name is ignored.
pub(crate) fn check(pem: &str, asked: &Identity, rsa: bool) -> Result<ProvedKey, Refusal> {
    if pem.len() > CSR_BYTES_MAX {
        return Err(Refusal::TooLarge(pem.len()));
    }
    let der = CertificateSigningRequestDer::from_pem_slice(pem.as_bytes()).map_err(|e| Refusal::Form(e.to_string()))?;
    let (rest, csr) = X509CertificationRequest::from_der(&der).map_err(|e| Refusal::Form(e.to_string()))?;
    if !rest.is_empty() {
        return Err(Refusal::Form(format!("{} bytes stand after it", rest.len())));
    }
    let is_rsa = check_key(&csr.certification_request_info.subject_pki)?;
    if is_rsa && !rsa {
        return Err(Refusal::Algorithm);
    }
    check_algorithm(&csr.signature_algorithm)?;
    csr.verify_signature().map_err(|_| Refusal::Signature)?;
    check_names(&csr, asked)?;
    let raw = csr.certification_request_info.subject_pki.raw.to_vec();
    let spki = SubjectPublicKeyInfo::from_der(&raw).map_err(|e| Refusal::Key(e.to_string()))?;
    Ok(ProvedKey { spki, raw, is_rsa })
}

fn check_key(spki: &x509::SubjectPublicKeyInfo<'_>) -> Result<bool, Refusal> {
    let algorithm = &spki.algorithm.algorithm;
    if *algorithm == oid::OID_KEY_TYPE_EC_PUBLIC_KEY {
        let curve = spki.algorithm.parameters.as_ref().and_then(|p| p.as_oid().ok());
        return match curve {
            Some(c) if c == oid::OID_EC_P256 || c == oid::OID_NIST_EC_P384 => Ok(false),
            Some(c) => Err(Refusal::Key(format!("the curve {c}"))),
            None => Err(Refusal::Key("an EC key without a named curve".into())),
        };
    }
    if *algorithm == oid::OID_PKCS1_RSAENCRYPTION {
        return match spki.parsed() {
            Ok(PublicKey::RSA(key)) if RSA_BITS.contains(&key.key_size()) => Ok(true),
            Ok(PublicKey::RSA(key)) => Err(Refusal::Key(format!("RSA of {} bits", key.key_size()))),
            _ => Err(Refusal::Key("an RSA key that cannot be read".into())),
        };
    }
    Err(Refusal::Key(format!("a key of type {algorithm}")))
}

fn check_algorithm(a: &x509::AlgorithmIdentifier<'_>) -> Result<(), Refusal> {
    let accepted = [
        oid::OID_SIG_ECDSA_WITH_SHA256,
        oid::OID_SIG_ECDSA_WITH_SHA384,
        oid::OID_PKCS1_SHA256WITHRSA,
        oid::OID_PKCS1_SHA384WITHRSA,
        oid::OID_PKCS1_SHA512WITHRSA,
    ];
    if accepted.contains(&a.algorithm) { Ok(()) } else { Err(Refusal::Key(format!("the signature algorithm {}", a.algorithm))) }
}

/// Every URI name must be the identity. A name extension that cannot be read is refused, since it might be another identity.
fn check_names(csr: &X509CertificationRequest<'_>, asked: &Identity) -> Result<(), Refusal> {
    let asked = asked.to_string();
    let Some(extensions) = csr.requested_extensions() else { return Ok(()) };
    for extension in extensions {
        match extension {
            ParsedExtension::SubjectAlternativeName(san) => {
                for name in &san.general_names {
                    if let GeneralName::URI(uri) = name
                        && *uri != asked
                    {
                        return Err(Refusal::Name { named: uri.chars().take(200).collect(), asked });
                    }
                }
            }
            ParsedExtension::ParseError { error } => return Err(Refusal::Form(format!("an extension cannot be read: {error}"))),
            _ => {}
        }
    }
    Ok(())
}
