//! A CA from files in the layout of Istio's `cacerts`. It checks everything that could make a data
//! plane reject a leaf before the files are used.
//!
//! The controller reads and watches the files; this module only receives their content.

use std::sync::Arc;
use std::time::Duration;

use canal_model::identity::Identity;
use canal_model::ids::{Namespace, ServiceAccount, TrustDomain};
use rcgen::{CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256};
use rustls::RootCertStore;
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use x509_parser::prelude::{FromDer, X509Certificate};
use zeroize::Zeroize;

use crate::issuer::SigningCa;
use crate::revocation::ImportedCrl;
use crate::tenant::{CertificateRequest, TenantAuthority};

/// Certificates in `cert-chain.pem` or `root-cert.pem`, at most.
/// Data planes accept as many in a peer's chain (`CHAIN_CERTIFICATES_MAX`).
pub const FILE_CERTIFICATES_MAX: usize = 8;

/// The content of a trust domain's directory.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct AuthorityFiles {
    /// Content of `cert-chain.pem`: the signing certificate first.
    pub chain: String,
    /// Content of `key.pem`. It is secret; its memory is wiped on drop.
    pub key: String,
    /// Content of `root-cert.pem`: the roots.
    pub root: String,
    /// Content of `crl.pem`, if the file exists.
    pub crl: Option<String>,
}

impl Drop for AuthorityFiles {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

impl std::fmt::Debug for AuthorityFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthorityFiles")
            .field("chain", &self.chain)
            .field("root", &self.root)
            .finish_non_exhaustive()
    }
}

/// The problem with the files. Each text names the file and the fix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthorityFilesError {
    /// The file is not PEM, or contains something else than certificates, none, or too many.
    #[error("{file}: {why}; fix: write 1 to {FILE_CERTIFICATES_MAX} certificates in PEM")]
    Certificates { file: &'static str, why: String },
    /// `key.pem` is not a usable key.
    #[error(
        "key.pem: {0}; fix: write an ECDSA P-256, P-384 or an RSA key in PEM (PKCS#8, PKCS#1 or SEC1)"
    )]
    Key(String),
    /// The key does not match the first certificate.
    #[error(
        "key.pem is not the key of the first certificate in cert-chain.pem; fix: put the signing certificate first"
    )]
    KeyMatch,
    /// A certificate does not allow signing certificates.
    #[error(
        "cert-chain.pem: certificate {0} is not a CA certificate; fix: issue it with CA:TRUE and, if it has a key usage, keyCertSign"
    )]
    NotAuthority(usize),
    /// A path length constraint forbids the certificates below.
    #[error(
        "cert-chain.pem: certificate {at} allows {allowed} CA certificates below it, but there are {below}; fix: issue it with a larger pathlen"
    )]
    PathLength {
        at: usize,
        allowed: u32,
        below: usize,
    },
    /// A certificate is outside its validity.
    #[error(
        "{file}: certificate {at} is valid from {from} to {until} (s since 1970), and the current time is {now}; fix: replace it, or correct the host's clock"
    )]
    Validity {
        file: &'static str,
        at: usize,
        from: i64,
        until: i64,
        now: u64,
    },
    /// A certificate is signed neither by the next one nor by a root.
    #[error(
        "certificate {0} of cert-chain.pem is signed neither by the next one nor by one in root-cert.pem; fix: put the chain in order, signing certificate first"
    )]
    Chain(usize),
    /// Verifiers would reject a leaf of this CA, for example because of name constraints or usages.
    #[error(
        "a certificate of {domain} issued with these files would be refused: {why}; fix: check name constraints and extended key usages"
    )]
    Trial { domain: TrustDomain, why: String },
    /// `crl.pem` cannot be used.
    #[error(
        "crl.pem: {0}; fix: write revocation lists (X509 CRL) of the roots or the intermediates"
    )]
    Crl(String),
}

impl AuthorityFilesError {
    /// Returns the name of the error as the label value of a counter.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Certificates { .. } => "certificates",
            Self::Key(_) => "key",
            Self::KeyMatch => "key_match",
            Self::NotAuthority(_) => "not_authority",
            Self::PathLength { .. } => "path_length",
            Self::Validity { .. } => "validity",
            Self::Chain(_) => "chain",
            Self::Trial { .. } => "trial",
            Self::Crl(_) => "crl",
        }
    }
}

/// Parses the certificates of a PEM file, in order.
pub(crate) fn certificates(
    file: &'static str,
    pem: &str,
) -> Result<Vec<CertificateDer<'static>>, AuthorityFilesError> {
    let fault = |why: String| AuthorityFilesError::Certificates { file, why };
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let read = read.map_err(|e| fault(e.to_string()))?;
    if read.is_empty() || read.len() > FILE_CERTIFICATES_MAX {
        return Err(fault(format!("it contains {} certificates", read.len())));
    }
    for der in &read {
        parsed(der).map_err(|why| fault(why.clone()))?;
    }
    Ok(read)
}

fn parsed(der: &[u8]) -> Result<X509Certificate<'_>, String> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok(_) => Err("bytes follow a certificate".into()),
        Err(e) => Err(e.to_string()),
    }
}

/// Parses `root-cert.pem`. Returns its roots, each as PEM, all valid at `now`.
///
/// # Errors
/// Returns an [`AuthorityFilesError`] if the file or a root in it is not valid.
pub fn read_roots(pem: &str, now: u64) -> Result<Vec<String>, AuthorityFilesError> {
    let roots = certificates("root-cert.pem", pem)?;
    check_validity("root-cert.pem", &roots, now)?;
    Ok(roots.iter().map(|der| pem_of(der)).collect())
}

/// Parses `crl.pem` and checks the signature of each list against `issuers`. Without a file, there
/// are no lists.
///
/// # Errors
/// Returns [`AuthorityFilesError::Crl`] if a list cannot be parsed or is not signed by one of
/// `issuers`.
pub fn read_crls(
    crl: Option<&str>,
    issuers: &[&str],
) -> Result<Vec<ImportedCrl>, AuthorityFilesError> {
    crl.map_or(Ok(Vec::new()), |pem| {
        ImportedCrl::read_all(pem, issuers).map_err(AuthorityFilesError::Crl)
    })
}

impl TenantAuthority {
    /// Creates the CA that `files` define. Returns it with the imported CRLs.
    ///
    /// # Errors
    /// Returns an [`AuthorityFilesError`] with the first problem that would make a data plane
    /// reject the CA's leaves.
    pub fn from_files(
        domain: &TrustDomain,
        files: &AuthorityFiles,
        now: u64,
    ) -> Result<(Self, Vec<ImportedCrl>), AuthorityFilesError> {
        let chain = certificates("cert-chain.pem", &files.chain)?;
        let roots = certificates("root-cert.pem", &files.root)?;
        check_authorities(&chain)?;
        check_validity("cert-chain.pem", &chain, now)?;
        check_validity("root-cert.pem", &roots, now)?;
        check_order(&chain, &roots)?;
        let key = PrivateKeyDer::from_pem_slice(files.key.as_bytes())
            .map_err(|e| AuthorityFilesError::Key(e.to_string()))?;
        let first = pem_of(&chain[0]);
        // `adopt` returns texts. All others are about the key itself.
        let signer = SigningCa::adopt(key, &first).map_err(|why| match why.as_str() {
            "the certificate belongs to another key" => AuthorityFilesError::KeyMatch,
            _ => AuthorityFilesError::Key(why),
        })?;
        // A certificate that cannot be read counts as expired.
        let end = |der: &CertificateDer<'_>| {
            parsed(der).map_or(0, |c| {
                u64::try_from(c.validity().not_after.timestamp()).unwrap_or(0)
            })
        };
        // A leaf can be verified only as long as every certificate above it is valid.
        let not_after = chain.iter().map(end).min().unwrap_or(0);
        // A root that signs is listed in root-cert.pem and is not sent with leaves.
        let intermediates = chain
            .iter()
            .filter(|der| !roots.contains(der))
            .map(|der| pem_of(der))
            .collect();
        // The root at which this chain ends comes first, in whatever order the file has them:
        // holders of a certificate under another root renew at once.
        let (signing, others): (Vec<_>, Vec<_>) = roots.iter().partition(|root| {
            chain
                .last()
                .is_some_and(|top| top == *root || is_signed_by(top, root))
        });
        let roots: Vec<String> = signing
            .into_iter()
            .chain(others)
            .map(|der| pem_of(der))
            .collect();
        let authority = Self {
            domain: domain.clone(),
            signer,
            intermediates,
            roots,
            not_after,
        };
        // Data planes verify a leaf with its whole chain, which the checks above do not do.
        authority
            .trial(now)
            .map_err(|why| AuthorityFilesError::Trial {
                domain: domain.clone(),
                why,
            })?;
        let issuers: Vec<&str> = authority
            .intermediates
            .iter()
            .chain(&authority.roots)
            .map(String::as_str)
            .collect();
        let crls = read_crls(files.crl.as_deref(), &issuers)?;
        Ok((authority, crls))
    }

    /// Issues a test leaf and verifies it in the same way as a data plane does.
    fn trial(&self, now: u64) -> Result<(), String> {
        let (Ok(namespace), Ok(service_account)) =
            (Namespace::new("canal-system"), ServiceAccount::new("trial"))
        else {
            return Err("the constants are not valid names".into());
        };
        let identity = Identity {
            trust_domain: self.domain.clone(),
            namespace,
            service_account,
        };
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|e| e.to_string())?;
        let mut request = CertificateParams::default();
        request.distinguished_name = DistinguishedName::new();
        let csr = request
            .serialize_request(&key)
            .and_then(|r| r.pem())
            .map_err(|e| e.to_string())?;
        let probe_request = CertificateRequest {
            csr: &csr,
            identity: &identity,
            names: &[],
            rsa: false,
            // The certificate is verified and dropped, so it has the shortest lifetime.
            lifetime_seconds: 60,
        };
        let issued = self.issue(&probe_request, now).map_err(|e| e.to_string())?;
        verify(&issued.chain, &self.roots, now)
    }
}

/// Verifies a chain against `roots` at `now` like a data plane: RFC 5280 by rustls' verifier, with
/// client usage.
pub(crate) fn verify(chain: &[String], roots: &[String], now: u64) -> Result<(), String> {
    let der =
        |pem: &String| CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| e.to_string());
    let mut store = RootCertStore::empty();
    for root in roots {
        store.add(der(root)?).map_err(|e| e.to_string())?;
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(store), provider)
        .build()
        .map_err(|e| e.to_string())?;
    let chain: Vec<CertificateDer<'_>> = chain.iter().map(der).collect::<Result<_, _>>()?;
    let (leaf, above) = chain.split_first().ok_or("the chain is empty")?;
    let time = UnixTime::since_unix_epoch(Duration::from_secs(now));
    verifier
        .verify_client_cert(leaf, above, time)
        .map(|_| ())
        .map_err(|e| e.to_string())
}

fn check_authorities(chain: &[CertificateDer<'_>]) -> Result<(), AuthorityFilesError> {
    for (at, der) in chain.iter().enumerate() {
        let Ok(certificate) = parsed(der) else {
            return Err(AuthorityFilesError::NotAuthority(at + 1));
        };
        let constraints = certificate
            .basic_constraints()
            .ok()
            .flatten()
            .map(|c| (c.value.ca, c.value.path_len_constraint));
        let usage = certificate
            .key_usage()
            .ok()
            .flatten()
            .is_none_or(|u| u.value.key_cert_sign());
        let Some((true, allowed)) = constraints.filter(|_| usage) else {
            return Err(AuthorityFilesError::NotAuthority(at + 1));
        };
        // The path length counts the CAs below; leaves do not count (RFC 5280 §4.2.1.9).
        if let Some(allowed) = allowed.filter(|allowed| (*allowed as usize) < at) {
            return Err(AuthorityFilesError::PathLength {
                at: at + 1,
                allowed,
                below: at,
            });
        }
    }
    Ok(())
}

fn check_validity(
    file: &'static str,
    chain: &[CertificateDer<'_>],
    now: u64,
) -> Result<(), AuthorityFilesError> {
    for (at, der) in chain.iter().enumerate() {
        let Ok(certificate) = parsed(der) else {
            continue;
        };
        let (from, until) = (
            certificate.validity().not_before.timestamp(),
            certificate.validity().not_after.timestamp(),
        );
        let moment = i64::try_from(now).unwrap_or(i64::MAX);
        if moment < from || moment >= until {
            return Err(AuthorityFilesError::Validity {
                file,
                at: at + 1,
                from,
                until,
                now,
            });
        }
    }
    Ok(())
}

fn is_signed_by(der: &CertificateDer<'_>, by: &CertificateDer<'_>) -> bool {
    match (parsed(der), parsed(by)) {
        (Ok(c), Ok(by)) => {
            c.issuer() == by.subject() && c.verify_signature(Some(by.public_key())).is_ok()
        }
        _ => false,
    }
}

/// Checks that each certificate is signed by the next and the last one by a root. The last one may
/// be a root itself.
fn check_order(
    chain: &[CertificateDer<'_>],
    roots: &[CertificateDer<'_>],
) -> Result<(), AuthorityFilesError> {
    for (at, der) in chain.iter().enumerate() {
        let by_root = roots.contains(der) || roots.iter().any(|root| is_signed_by(der, root));
        let by_next = chain
            .get(at + 1)
            .is_some_and(|next| is_signed_by(der, next));
        let is_last = at + 1 == chain.len();
        let holds = by_next || (is_last && by_root);
        if !holds {
            return Err(AuthorityFilesError::Chain(at + 1));
        }
    }
    Ok(())
}

/// Encodes a certificate as PEM (RFC 7468).
pub(crate) fn pem_of(der: &[u8]) -> String {
    armored("CERTIFICATE", der)
}

pub(crate) fn armored(label: &str, der: &[u8]) -> String {
    use base64::Engine;
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    let mut out = format!("-----BEGIN {label}-----\n");
    let mut rest = text.as_str();
    while !rest.is_empty() {
        // A line of PEM has 64 characters (RFC 7468 §2).
        let (line, more) = rest.split_at(rest.len().min(64));
        out.push_str(line);
        out.push('\n');
        rest = more;
    }
    out.push_str(&format!("-----END {label}-----\n"));
    out
}
