//! ConfigMap (`v1`), as far as Canal reads it: bundles of CA certificates to which other objects
//! refer. One that nothing refers to has no effect.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;

use super::Metadata;
use super::secret::SecretProblem;
use crate::certificate::CaCertificates;

/// Entry with CA certificates in PEM. Canal reads no other one.
pub const CA_BUNDLE: &str = "ca.crt";

/// An object of kind ConfigMap (`v1`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ConfigMap {
    pub metadata: Metadata,
    /// At most the entry [`CA_BUNDLE`].
    #[serde(default)]
    pub data: BTreeMap<String, String>,
    /// The certificates in that entry, or why clients cannot be validated with them; `None` without
    /// the entry.
    #[serde(skip)]
    pub ca: Option<Result<Arc<CaCertificates>, SecretProblem>>,
}
