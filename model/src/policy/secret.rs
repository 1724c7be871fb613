//! Secret (`v1`), as far as Canal reads it: certificates with their keys for listeners, and
//! certificates of authorities. Istio also reads them from Secrets without a type of their own, and
//! from entries with other names. The reader turns the text into a [`ServingCertificate`] and
//! [`CaCertificates`], and keeps nothing else of it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::Deserialize;

use super::Metadata;
use crate::certificate::{CaCertificates, ServingCertificate};

/// Type of the Secrets that contain a certificate and its key.
pub const TLS_SECRET: &str = "kubernetes.io/tls";
/// Entry with the certificate chain in PEM.
pub const TLS_CERTIFICATE: &str = "tls.crt";
/// Entry with the private key in PEM.
pub const TLS_KEY: &str = "tls.key";

/// Entries with the same two in a Secret of no particular type, as Istio names them.
pub const GENERIC_CERTIFICATE: &str = "cert";
pub const GENERIC_KEY: &str = "key";
/// Entry with CA certificates in PEM, as Istio names it.
pub const GENERIC_CA_BUNDLE: &str = "cacert";
/// Entries with certificates that authorities revoked. Canal only notices them.
pub const REVOCATION_LISTS: [&str; 2] = ["ca.crl", "crl"];

/// An object of kind Secret (`v1`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Secret {
    pub metadata: Metadata,
    #[serde(rename = "type", default)]
    pub kind: Option<String>,
    /// Entries in base64. They are empty once the certificate has been read.
    #[serde(default)]
    pub data: BTreeMap<String, SecretText>,
    /// Entries as plain text, which replace those of `data`.
    #[serde(default)]
    pub string_data: BTreeMap<String, SecretText>,
    /// The certificate of a Secret of type [`TLS_SECRET`], or of one of no particular type with the
    /// entries for it; or what is wrong with it.
    #[serde(skip)]
    pub certificate: Option<Result<Arc<ServingCertificate>, SecretProblem>>,
    /// The certificates in the entry [`CA_BUNDLE`](super::config_map::CA_BUNDLE), or why clients
    /// cannot be validated with them; `None` without the entry.
    #[serde(skip)]
    pub ca: Option<Result<Arc<CaCertificates>, SecretProblem>>,
    /// The same of the entry [`GENERIC_CA_BUNDLE`].
    #[serde(skip)]
    pub generic_ca: Option<Result<Arc<CaCertificates>, SecretProblem>>,
    /// Whether one of the entries [`REVOCATION_LISTS`] has a text.
    #[serde(skip)]
    pub has_revocation_list: bool,
}

impl Secret {
    /// Returns whether the Secret is of the type that contains a certificate and its key.
    pub fn is_tls(&self) -> bool {
        self.kind.as_deref() == Some(TLS_SECRET)
    }
}

/// The reason why a Secret or a ConfigMap has no usable certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretProblem {
    /// Sentence without a full stop that names the entry, and quotes nothing of it.
    pub problem: String,
    pub fix: &'static str,
}

/// Text of an entry of a Secret. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct SecretText(pub String);

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretText(hidden)")
    }
}
