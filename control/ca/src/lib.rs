//! Certificate authorities: one per tenant trust domain for workloads, and one for the controller's
//! server certificate and Canal's own components.
//!
//! This crate defines the content of certificates and signs them. It does not decide which
//! requester may have which identity; `canal-trust` does. It reads no clock: the time is always an
//! argument. Start at [`TenantAuthority::issue`].

#![forbid(unsafe_code)]

mod controller_ca;
mod csr;
mod external;
mod files;
mod issuer;
mod revocation;
mod rotation;
mod tenant;

pub use controller_ca::{ControllerCa, ControllerCaError, KeySealer, ServerCertificate};
pub use csr::{CSR_BYTES_MAX, CsrError};
pub use external::{ExternalCertificateError, check_answer, check_request, root_fingerprint};
pub use files::{
    AuthorityFiles, AuthorityFilesError, FILE_CERTIFICATES_MAX, read_crls, read_roots,
};
pub use revocation::{CRL_LIFETIME_SECONDS, ImportedCrl, RevokedSerial};
pub use rotation::{
    RotationPhase, RotationState, RotationStep, RotationTimeouts, decide_step, is_overdue,
};
pub use tenant::{CertificateRequest, IssuedLeaf, TenantAuthority};

/// Maximum and default lifetime of a workload certificate, in seconds.
/// istiod's default lifetime is also 24 hours.
pub const LIFETIME_SECONDS_MAX: u64 = 24 * 3600;
/// Minimum lifetime of a workload certificate, in seconds. With less, rotation at half the lifetime
/// would not settle.
pub const LIFETIME_SECONDS_MIN: u64 = 60;
/// Certificates are valid from this many seconds before their issue, so that a receiver's clock may
/// be behind.
/// istiod allows two minutes. Clocks that NTP keeps differ by far less than either.
pub const SKEW_SECONDS: u64 = 60;
/// Lifetime of a root, in seconds: ten years.
/// istiod's self-signed root has the same.
pub const ROOT_LIFETIME_SECONDS: u64 = 10 * 365 * 24 * 3600;
/// Lifetime of the controller's server certificate, in seconds: thirty days. It is renewed at half
/// its lifetime.
/// The controller issues it itself, so that no operator has to renew it; it was chosen, and nothing
/// depends on it.
pub const SERVER_LIFETIME_SECONDS: u64 = 30 * 24 * 3600;

/// Returns the lifetime of a certificate: the requested one, limited to [`LIFETIME_SECONDS_MIN`]
/// and the configured `longest_seconds`. 0 and negative numbers request the configured lifetime.
pub fn decide_lifetime(asked_seconds: i64, longest_seconds: u64) -> u64 {
    let longest = longest_seconds.clamp(LIFETIME_SECONDS_MIN, LIFETIME_SECONDS_MAX);
    match u64::try_from(asked_seconds) {
        Ok(asked) if asked > 0 => asked.clamp(LIFETIME_SECONDS_MIN, longest),
        _ => longest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lifetimes_are_bounded() {
        const DAY: u64 = 24 * 3600;
        for (asked, longest, want) in [
            (0, DAY, DAY),
            (-5, DAY, DAY),
            (1, DAY, 60),
            (60, DAY, 60),
            (3600, DAY, 3600),
            (i64::MAX, DAY, DAY),
            (3600, 120, 120),
            (0, 120, 120),
            (0, 10 * DAY, DAY),
            (7200, 1, 60),
        ] {
            assert_eq!(
                decide_lifetime(asked, longest),
                want,
                "requested {asked}, maximum {longest}"
            );
        }
    }
}
