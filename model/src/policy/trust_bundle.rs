//! ClusterTrustBundle (`certificates.k8s.io`): certificates of authorities without a namespace. The
//! reader turns the text into a [`CaCertificates`].

use std::sync::Arc;

use serde::Deserialize;

use super::Metadata;
use super::secret::SecretProblem;
use crate::certificate::CaCertificates;

/// An object of kind ClusterTrustBundle (`certificates.k8s.io/v1beta1`). It has no namespace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ClusterTrustBundle {
    pub metadata: Metadata,
    pub spec: ClusterTrustBundleSpec,
    /// The certificates in `spec.trustBundle`, or what is wrong with them.
    #[serde(skip)]
    pub ca: Option<Result<Arc<CaCertificates>, SecretProblem>>,
}

/// The content of `spec:` in a ClusterTrustBundle.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterTrustBundleSpec {
    /// The signer whose certificates the bundle verifies; Canal compares it with nothing.
    #[serde(default)]
    pub signer_name: Option<String>,
    /// Certificates in PEM. The text is empty once they have been read.
    pub trust_bundle: String,
}
