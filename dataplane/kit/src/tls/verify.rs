//! Who the peer must be. Chains are checked by webpki; this adds the SPIFFE rules and says what was expected and seen.

use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;

/// Why a peer whose certificate may well be valid is not the peer of this connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerRefused {
    /// The server is someone else.
    #[error("the peer is {seen:?}, expected one of {expected:?}")]
    Identity { expected: Vec<Identity>, seen: Vec<String> },
    /// The client belongs to another tenant.
    #[error("the peer is {seen:?}, expected an identity of trust domain {expected}")]
    TrustDomain { expected: TrustDomain, seen: Vec<String> },
}
