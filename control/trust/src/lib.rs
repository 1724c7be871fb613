//! Certificates and trust of the controller: the tenants' certificate authorities, the issuance
//! log, revocation, root rotation, external CAs, the certificate service, and the key sets of JWT
//! issuers. `canal-ca` decides what a certificate contains. It does not publish anything: the
//! catalog writer asks for the bundles and puts them into the catalog. Start at
//! [`TrustAuthorities`] and [`CertificateService`].

#![forbid(unsafe_code)]

mod authorities;
mod certificate_service;
mod fetch;
pub mod jwks;

pub use authorities::{
    BLOCKED_MAX, CA_DOMAINS_MAX, CA_FILE_BYTES_MAX, CERTIFICATES_PER_HOLDER_MAX, CertificateRate,
    DomainError, EXTERNAL_REQUESTS_MAX, ExternalCa, ISSUED_MAX, MaintenanceContext, NewRootError,
    PROVIDER_RATE, REPEATED_LIFETIME_SECONDS, REVOKED_MAX, RevocationTarget, TENANT_RATE,
    TrustAuthorities, TrustOperationError, TrustOptions, run_maintenance,
};
pub use certificate_service::{CertificateService, key_policy};
pub use fetch::FetchClient;
