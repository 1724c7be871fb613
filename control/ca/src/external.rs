//! Checks of a certificate that an external CA issued at the controller's request. No part of it is
//! used unchecked.
//!
//! The controller sends the request to that CA; this module does no IO.

use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::csr::{self, CsrError};
use crate::files::{certificates, pem_of, verify};
use crate::issuer::{fingerprint, hex};
use crate::revocation::trimmed;
use crate::tenant::{CertificateRequest, IssuedLeaf};
use crate::{LIFETIME_SECONDS_MAX, SKEW_SECONDS};

/// The reason that a certificate of an external CA is not passed on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExternalCertificateError {
    /// The response does not consist of certificates in PEM.
    #[error(
        "the external CA's answer is not a certificate: {0}; fix: let it answer with certificates in PEM"
    )]
    Form(String),
    /// The certificate contains other names than requested, or additional ones.
    #[error(
        "the external CA's certificate names {names:?}, requested was {requested:?}; fix: let it use exactly the names that it receives as hosts, URIs too (CFSSL 1.4 or newer)"
    )]
    Identity {
        names: Vec<String>,
        requested: Vec<String>,
    },
    /// The certificate is for another key.
    #[error(
        "the external CA's certificate has another key than the request; fix: let it sign the public key of the request"
    )]
    Key,
    /// The certificate may sign others, or lacks a usage that workloads need.
    #[error(
        "the external CA's certificate {0}; fix: give its profile the usages digital signature, server auth and client auth, and no CA flag"
    )]
    Usage(&'static str),
    /// The certificate does not chain to the configured roots.
    #[error(
        "the external CA's certificate does not chain to root-cert.pem: {0}; fix: write the roots of the CA into root-cert.pem"
    )]
    Chain(String),
    /// The certificate's lifetime is too long.
    #[error(
        "the external CA's certificate is valid for {0} s; at most {LIFETIME_SECONDS_MAX} s are accepted; fix: shorten its profile's expiry"
    )]
    Lifetime(u64),
}

impl ExternalCertificateError {
    /// Returns the name of the error as the label value of a counter.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Form(_) => "external_answer",
            Self::Identity { .. } => "external_identity",
            Self::Key => "external_key",
            Self::Usage(_) => "external_usage",
            Self::Chain(_) => "external_chain",
            Self::Lifetime(_) => "external_lifetime",
        }
    }
}

/// Checks a request before it is sent to an external CA, by the same rules as for a CA of Canal.
///
/// # Errors
/// Returns a [`CsrError`] if the request is not acceptable.
pub fn check_request(requested: &CertificateRequest<'_>) -> Result<(), CsrError> {
    csr::check(requested.csr, requested.identity, requested.rsa).map(|_| ())
}

/// Checks the response to `requested`: PEM with the leaf first. `roots` are the configured roots.
///
/// # Errors
/// Returns an [`ExternalCertificateError`]; the certificate must then not be used.
pub fn check_answer(
    pem: &str,
    requested: &CertificateRequest<'_>,
    roots: &[String],
    now: u64,
) -> Result<IssuedLeaf, ExternalCertificateError> {
    let chain = certificates("the answer", pem)
        .map_err(|e| ExternalCertificateError::Form(e.to_string()))?;
    let (_, leaf) = X509Certificate::from_der(&chain[0])
        .map_err(|e| ExternalCertificateError::Form(e.to_string()))?;
    let want: Vec<String> = std::iter::once(requested.identity.to_string())
        .chain(requested.names.iter().cloned())
        .collect();
    let mut seen = names(&leaf);
    let mut sorted = want.clone();
    sorted.sort();
    // The order of SANs has no meaning (RFC 5280 §4.2.1.6), and CAs change it.
    seen.sort();
    if seen != sorted {
        return Err(ExternalCertificateError::Identity {
            names: seen,
            requested: want,
        });
    }
    let request_key = csr::check(requested.csr, requested.identity, requested.rsa)
        .map_err(|_| ExternalCertificateError::Key)?;
    // Otherwise the holder of another key could act as this identity.
    if leaf.public_key().raw != request_key.raw {
        return Err(ExternalCertificateError::Key);
    }
    check_usage(&leaf)?;
    let (from, until) = (
        leaf.validity().not_before.timestamp(),
        leaf.validity().not_after.timestamp(),
    );
    // A time before 1970 counts as 1970: `verify` refuses a certificate that has expired.
    let (from, until) = (
        u64::try_from(from).unwrap_or(0),
        u64::try_from(until).unwrap_or(0),
    );
    let left = until.saturating_sub(now);
    // The clocks of the CA and of the controller may differ by the skew.
    if left > LIFETIME_SECONDS_MAX + SKEW_SECONDS {
        return Err(ExternalCertificateError::Lifetime(left));
    }
    // Only configured roots are trusted, and roots are not sent with leaves.
    let mut chain: Vec<String> = chain
        .iter()
        .map(|der| pem_of(der))
        .filter(|pem| !roots.contains(pem))
        .collect();
    // The folder's cert-chain.pem may repeat the intermediate that the CA sent.
    chain.dedup();
    verify(&chain, roots, now).map_err(ExternalCertificateError::Chain)?;
    // The first configured root counts as the one that signs.
    // Without a root `verify` has failed, so the fingerprint is never empty.
    let root = roots
        .first()
        .map(|r| root_fingerprint(r))
        .unwrap_or_default();
    Ok(IssuedLeaf {
        serial: hex(&trimmed(leaf.raw_serial())),
        root,
        not_before: from,
        not_after: until,
        chain,
    })
}

/// Returns the fingerprint of a root in PEM; empty if it cannot be parsed.
pub fn root_fingerprint(pem: &str) -> String {
    certificates("root", pem)
        .map(|c| fingerprint(&c[0]))
        .unwrap_or_default()
}

/// Returns every name in the certificate. Names that are neither URI nor DNS name appear in debug
/// format, so they match no request.
fn names(leaf: &X509Certificate<'_>) -> Vec<String> {
    let extensions = leaf
        .extensions()
        .iter()
        .filter_map(|e| match e.parsed_extension() {
            ParsedExtension::SubjectAlternativeName(san) => Some(&san.general_names),
            _ => None,
        });
    let text = |name: &GeneralName<'_>| match name {
        GeneralName::URI(uri) => uri.to_string(),
        GeneralName::DNSName(name) => name.to_string(),
        other => format!("{other:?}"),
    };
    extensions.flatten().map(text).collect()
}

fn check_usage(leaf: &X509Certificate<'_>) -> Result<(), ExternalCertificateError> {
    if leaf
        .basic_constraints()
        .ok()
        .flatten()
        .is_some_and(|c| c.value.ca)
    {
        return Err(ExternalCertificateError::Usage("is a CA certificate"));
    }
    match leaf.key_usage().ok().flatten() {
        Some(usage) if usage.value.key_cert_sign() || usage.value.crl_sign() => {
            return Err(ExternalCertificateError::Usage(
                "may sign other certificates",
            ));
        }
        Some(usage) if !usage.value.digital_signature() => {
            return Err(ExternalCertificateError::Usage("may not sign handshakes"));
        }
        _ => {}
    }
    match leaf.extended_key_usage().ok().flatten() {
        Some(usage) if usage.value.server_auth && usage.value.client_auth => Ok(()),
        _ => Err(ExternalCertificateError::Usage(
            "is not valid for both servers and clients",
        )),
    }
}
