//! Obtains and renews certificates from `IstioCertificateService`: own P-256 key per identity, renewal at half life, the old one kept
//! while valid. Keys survive a restart in `<data-dir>/certs/<sha256 of the identity>.json`, mode 0600, because a data plane must
//! start without the controller; the key server replaces these files later.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use canal_model::identity::Identity;

use crate::controller::Controller;
use crate::drain::Drain;
use crate::metrics::Registry;
use crate::tls::Credential;

/// Lifetime asked for (Istio's `SECRET_TTL`); the controller may give less.
pub const VALIDITY: Duration = Duration::from_secs(24 * 3600);

/// What the source needs.
#[derive(Debug, Clone)]
pub struct CertificateConfig {
    /// Who issues.
    pub controller: Controller,
    /// `<data-dir>/certs`; made 0700.
    pub folder: PathBuf,
    /// Lifetime asked for.
    pub validity: Duration,
}

/// Keeps a valid certificate for every identity that someone holds the [`Credential`] of. Clones share the work.
#[derive(Clone)]
pub struct CertificateSource {}

/// What is known of one identity, for `/config_dump`.
#[derive(Debug, Clone, serde::Serialize)]
pub struct CertificateStatus {
    pub identity: String,
    /// Seconds since 1970.
    pub not_before: Option<u64>,
    pub not_after: Option<u64>,
    /// Of the last attempt, empty after success.
    pub error: String,
}

impl CertificateSource {
    /// Starts the source on the calling runtime (the control runtime, not a worker's). It ends with `drain`.
    ///
    /// Metrics: `canal_certificates_issued_total`, `canal_certificate_failures_total{reason}`, `canal_certificates_expiring` (past
    /// three quarters of life), `canal_certificates_missing`.
    pub fn start(config: CertificateConfig, registry: &Registry, drain: Drain) -> std::io::Result<Self> {
        let _ = (config, registry, drain);
        unreachable!("body lands in the next commit")
    }

    /// The place of `identity`'s certificate: filled at once from disk if a valid one is there, else when the controller answers.
    /// Renewal goes on until the last clone of the credential is dropped. Cheap to call again.
    pub fn want(&self, identity: &Identity) -> Credential {
        let _ = identity;
        unreachable!("body lands in the next commit")
    }

    /// All wanted identities, sorted.
    pub fn status(&self) -> Vec<CertificateStatus> {
        unreachable!("body lands in the next commit")
    }
}

/// When to renew: half of the lifetime has passed (features.md A.2).
pub fn half_life(not_before: SystemTime, not_after: SystemTime) -> SystemTime {
    not_before + not_after.duration_since(not_before).unwrap_or_default() / 2
}
