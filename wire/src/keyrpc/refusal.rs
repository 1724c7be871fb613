//! Why a key server says no: a closed list of names. The name is the counters' label on both sides, and the access log's word.

use std::fmt;

macro_rules! refusals {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $name:literal, $class:ident;)*) => {
        /// Why a key server refuses.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Refusal {
            $($(#[$doc])* $variant,)*
        }

        impl Refusal {
            /// All of them.
            pub const ALL: &'static [Refusal] = &[$(Refusal::$variant,)*];

            /// The label and log word.
            pub fn name(self) -> &'static str {
                match self { $(Refusal::$variant => $name,)* }
            }

            pub(super) fn code(self) -> u16 {
                match self { $(Refusal::$variant => $code,)* }
            }

            pub(super) fn of(code: u16) -> Option<Self> {
                match code { $($code => Some(Refusal::$variant),)* _ => None }
            }

            /// What the requester may conclude.
            pub fn blame(self) -> Blame {
                match self { $(Refusal::$variant => Blame::$class,)* }
            }
        }
    };
}

/// Whose doing a refusal is, and so what helps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// This key server cannot now; another one, or a local key where policy has one, may.
    Server,
    /// The requester may not, or asked wrongly: no key server may be asked again, and no local key takes its place.
    Requester,
    /// The peer of the handshake is not acceptable: the connection has failed, wherever it is tried.
    Peer,
}

refusals! {
    /// No entitlement names the identity for this requester.
    NotEntitled = 1, "not_entitled", Requester;
    /// The tenant's allow list does not name this requester for this key.
    NotAllowed = 2, "not_allowed", Requester;
    /// There is no key of this name.
    UnknownKey = 3, "unknown_key", Requester;
    /// The key has no valid certificate (yet): the controller has issued none.
    NoCertificate = 4, "no_certificate", Server;
    /// `More` for no handshake under way.
    UnknownRequest = 5, "unknown_request", Requester;
    /// The id is of a request under way.
    DuplicateRequest = 6, "duplicate_request", Requester;
    /// The requester has as many requests under way as it may.
    RequesterBusy = 7, "requester_busy", Server;
    /// The tenant has as many requests under way as it may.
    TenantBusy = 8, "tenant_busy", Server;
    /// The deadline passed before the work began.
    Deadline = 9, "deadline", Server;
    /// The peer sent more than a handshake may hold.
    HandshakeBytes = 10, "handshake_bytes", Peer;
    /// The handshake took longer than one may.
    HandshakeTime = 11, "handshake_time", Peer;
    /// The key server is about to end and takes nothing new.
    Draining = 12, "draining", Server;
    /// The body cannot be read.
    Malformed = 13, "malformed", Requester;
    /// The key cannot sign with this scheme.
    Scheme = 14, "scheme", Requester;
    /// The input is nothing that a TLS handshake signs.
    Input = 15, "input", Requester;
    /// The key server failed: it has no memory that it may lock, or its crypto library refused.
    Failed = 16, "failed", Server;
    /// The tenant's keys are not kept in key servers, or the tenant is not known (yet).
    UnknownTenant = 17, "unknown_tenant", Server;
    /// The name has another key here than the one that the peer is shown.
    OtherKey = 18, "other_key", Server;
    /// The peer's certificate has expired, or one above it.
    PeerExpired = 32, "peer_expired", Peer;
    /// The peer's certificate is not valid yet, or one above it.
    PeerNotYetValid = 33, "peer_not_yet_valid", Peer;
    /// The peer's certificate is not for this side of TLS (extended key usage).
    PeerPurpose = 34, "peer_purpose", Peer;
    /// No root of the trust domain vouches for the peer.
    PeerUnknownIssuer = 35, "peer_unknown_issuer", Peer;
    /// The peer's trust domain is neither the own nor a federated one.
    PeerTrustDomain = 36, "peer_trust_domain", Peer;
    /// The server is none of those expected.
    PeerIdentity = 37, "peer_identity", Peer;
    /// The peer's certificate names no or several identities.
    PeerAmbiguous = 38, "peer_ambiguous", Peer;
    /// A certificate revocation list names the peer's certificate, or one above it.
    PeerRevoked = 39, "peer_revoked", Peer;
    /// The peer's chain has more certificates, or bytes, than one may.
    PeerChain = 40, "peer_chain", Peer;
    /// The peer showed no certificate.
    PeerAnonymous = 41, "peer_anonymous", Peer;
    /// The peer's certificate cannot be read, or its signature is wrong.
    PeerCertificate = 42, "peer_certificate", Peer;
    /// The peer broke off with an alert.
    PeerAlert = 43, "peer_alert", Peer;
    /// The peer does not speak TLS 1.3 as the mesh does: version, suites, groups, ALPN, or no TLS at all.
    PeerProtocol = 44, "peer_protocol", Peer;
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
