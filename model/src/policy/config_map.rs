//! ConfigMap (`v1`), as far as Canal reads it: certificates of authorities. The reader turns the
//! text into a [`CaCertificates`], and keeps nothing else of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;

use super::Metadata;
use super::secret::SecretProblem;
use crate::certificate::CaCertificates;

/// Entry with the certificates of authorities in PEM.
pub const CA_CERTIFICATE: &str = "ca.crt";

/// An object of kind ConfigMap (`v1`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigMap {
    pub metadata: Metadata,
    /// Entries as text. They are empty once the certificates have been read.
    #[serde(default)]
    pub data: BTreeMap<String, String>,
    /// The certificates in the entry [`CA_CERTIFICATE`], or what is wrong with them; `None` without
    /// such an entry.
    #[serde(skip)]
    pub ca: Option<Result<Arc<CaCertificates>, SecretProblem>>,
}
