//! Certificate authorities: one per tenant trust domain for workloads, one for the controller's own server certificate and the parts of
//! Canal among each other.
//! Who may have which identity is not decided here (`canal-hub` does); here is only what a certificate holds and how it is signed.
//! Time is an argument everywhere.

#![forbid(unsafe_code)]

mod external;
mod files;
mod infra;
mod issuer;
mod request;
mod revocation;
mod rotation;
mod tenant;

pub use external::{AnswerFault, check_answer, check_request, root_fingerprint};
pub use files::{AuthorityFiles, FILE_CERTIFICATES_MAX, FilesFault, read_crls, read_roots};
pub use infra::{Infra, InfraError, KeySealer, ServerCertificate};
pub use request::{CSR_BYTES_MAX, Refusal};
pub use revocation::{CRL_LIFETIME_SECONDS, ForeignCrl, RevokedSerial};
pub use rotation::{Patience, Phase, Sight, Step, decide_step, is_overdue};
pub use tenant::{Asked, Issued, TenantAuthority};

/// Longest life of a workload certificate, seconds; also the default.
pub const LIFETIME_SECONDS_MAX: u64 = 24 * 3600;
/// Shortest life of a workload certificate, seconds: below it, rotation at half life would not settle.
pub const LIFETIME_SECONDS_MIN: u64 = 60;
/// Certificates are valid from this long before they were issued, so that a receiver's clock may be behind, seconds.
pub const SKEW_SECONDS: u64 = 60;
/// Life of a root, seconds: ten years.
pub const ROOT_LIFETIME_SECONDS: u64 = 10 * 365 * 24 * 3600;
/// Life of the controller's server certificate, seconds: thirty days, renewed at half life.
pub const SERVER_LIFETIME_SECONDS: u64 = 30 * 24 * 3600;

/// How long a certificate lives: what was asked for, within [`LIFETIME_SECONDS_MIN`] and the configured `longest`.
/// 0 and negative numbers ask for the configured life.
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
            assert_eq!(decide_lifetime(asked, longest), want, "asked {asked}, longest {longest}");
        }
    }
}
