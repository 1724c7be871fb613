//! Views of trust domains: their CA, roots and certificates; bodies of the requests that change
//! them.

use canal_wire::api;
use serde::{Deserialize, Serialize};

use super::objects::views;

/// Trust domains that the operator may see, or the one that a request changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TrustDomainListView {
    /// Effects of the request, for the operator; empty if it changed nothing.
    pub note: String,
    pub domains: Vec<TrustDomainView>,
}

impl From<&api::TrustResponse> for TrustDomainListView {
    fn from(response: &api::TrustResponse) -> Self {
        Self {
            note: response.note.clone(),
            domains: views(&response.domains),
        }
    }
}

/// A trust domain and the state of its certificate authority.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TrustDomainView {
    pub tenant: String,
    pub trust_domain: String,
    /// `own`, `files`, `external` or `controller` (for Canal's own components).
    pub source: String,
    /// Phase of the root rotation: `steady`, `announced` or `switched`.
    pub phase: String,
    /// Start of the phase in seconds since 1970.
    pub since: u64,
    pub roots: Vec<RootView>,
    /// Root certificates in PEM, the signing one first.
    pub bundle: Vec<String>,
    /// Subscribers that block the next step of the rotation.
    pub waiting: Vec<String>,
    /// True if the phase takes unusually long.
    pub overdue: bool,
    /// Number of certificates in the issuance log that have not expired.
    pub issued: u64,
    /// Number of those that are revoked.
    pub revoked: u64,
    /// Identities that get no certificates.
    pub blocked_identities: Vec<String>,
    pub crl_number: u64,
    /// Problem with the CA's files or the external CA; empty if there is none.
    pub error: String,
    /// Certificates in the issuance log, if the request asks for them.
    pub certificates: Vec<CertificateView>,
}

impl From<&api::TrustDomainStatus> for TrustDomainView {
    fn from(domain: &api::TrustDomainStatus) -> Self {
        Self {
            tenant: domain.tenant.clone(),
            trust_domain: domain.trust_domain.clone(),
            source: domain.source.clone(),
            phase: domain.phase.clone(),
            since: domain.since,
            roots: views(&domain.roots),
            bundle: domain.bundle.clone(),
            waiting: domain.waiting.clone(),
            overdue: domain.overdue,
            issued: domain.issued,
            revoked: domain.revoked,
            blocked_identities: domain.blocked_identities.clone(),
            crl_number: domain.crl_number,
            error: domain.error.clone(),
            certificates: views(&domain.certificates),
        }
    }
}

/// A root of a trust domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RootView {
    /// First half of the SHA-256 of the signing certificate.
    pub fingerprint: String,
    pub signs: bool,
    /// Expiry in seconds since 1970.
    pub not_after: u64,
    /// Number of certificates in use that chain to the root.
    pub leaves: u64,
}

impl From<&api::RootStatus> for RootView {
    fn from(root: &api::RootStatus) -> Self {
        Self {
            fingerprint: root.fingerprint.clone(),
            signs: root.signs,
            not_after: root.not_after,
            leaves: root.leaves,
        }
    }
}

/// A certificate of the issuance log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CertificateView {
    pub serial: String,
    pub identity: String,
    /// Principal to which the certificate was issued.
    pub holder: String,
    /// Time of issue in seconds since 1970.
    pub issued: u64,
    /// Expiry in seconds since 1970.
    pub not_after: u64,
    pub revoked: bool,
    /// Fingerprint of the root to which the certificate chains.
    pub root: String,
}

impl From<&api::IssuedCertificate> for CertificateView {
    fn from(certificate: &api::IssuedCertificate) -> Self {
        Self {
            serial: certificate.serial.clone(),
            identity: certificate.identity.clone(),
            holder: certificate.holder.clone(),
            issued: certificate.issued,
            not_after: certificate.not_after,
            revoked: certificate.revoked,
            root: certificate.root.clone(),
        }
    }
}

/// Body of a request to rotate a root.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RotateRootBody {
    /// Tenant; the operator's own if it is empty.
    #[serde(default)]
    pub tenant: String,
    /// Takes the next step of a rotation in progress.
    #[serde(default)]
    pub force: bool,
}

impl From<RotateRootBody> for api::RotateRequest {
    fn from(body: RotateRootBody) -> Self {
        Self {
            tenant: body.tenant,
            force: body.force,
        }
    }
}

/// Body of a request to revoke certificates, or to restore an identity.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RevokeBody {
    /// Tenant; the operator's own if it is empty.
    #[serde(default)]
    pub tenant: String,
    #[serde(default)]
    pub identity: String,
    /// Serial number of the certificate, in hexadecimal.
    #[serde(default)]
    pub serial: String,
}

impl From<RevokeBody> for api::RevokeRequest {
    fn from(body: RevokeBody) -> Self {
        Self {
            tenant: body.tenant,
            identity: body.identity,
            serial: body.serial,
        }
    }
}
