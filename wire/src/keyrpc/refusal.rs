//! The closed list of reasons for which a key server refuses a request. The names are label values
//! of counters on both sides, and values in the access log.

use std::fmt;

macro_rules! refusals {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $name:literal, $class:ident;)*) => {
        /// The reason why a key server refuses a request.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum KeyRefusal {
            $($(#[$doc])* $variant,)*
        }

        impl KeyRefusal {
            /// All reasons, in the order of the table.
            pub const ALL: &'static [KeyRefusal] = &[$(KeyRefusal::$variant,)*];

            /// Returns the name for metric labels and logs.
            pub fn name(self) -> &'static str {
                match self { $(KeyRefusal::$variant => $name,)* }
            }

            pub(super) fn code(self) -> u16 {
                match self { $(KeyRefusal::$variant => $code,)* }
            }

            pub(super) fn of(code: u16) -> Option<Self> {
                match code { $($code => Some(KeyRefusal::$variant),)* _ => None }
            }

            /// Returns the party that caused the refusal. The requester decides its next step from
            /// it.
            pub fn attribution(self) -> RefusalAttribution {
                match self { $(KeyRefusal::$variant => RefusalAttribution::$class,)* }
            }
        }
    };
}

/// The party that caused a refusal; it determines what the requester may try next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalAttribution {
    /// This key server cannot serve the request now. Another one may, or a local key if the policy
    /// has one.
    Server,
    /// The requester is not entitled, or its request is wrong. It may not try another key server,
    /// nor use a local key instead.
    Requester,
    /// The peer of the handshake is not acceptable. The connection has failed; another key server
    /// would refuse it too.
    Peer,
}

refusals! {
    /// No entitlement names the identity for this requester.
    NotEntitled = 1, "not_entitled", Requester;
    /// The tenant's allowlist does not name this requester for this key.
    NotAllowed = 2, "not_allowed", Requester;
    /// There is no key of this name.
    UnknownKey = 3, "unknown_key", Requester;
    /// The key has no valid certificate (yet): the controller has issued none.
    NoCertificate = 4, "no_certificate", Server;
    /// A `More` names no handshake in progress.
    UnknownRequest = 5, "unknown_request", Requester;
    /// The request's id is already in use by a request in progress.
    DuplicateRequest = 6, "duplicate_request", Requester;
    /// The requester has reached its maximum of requests in progress.
    RequesterBusy = 7, "requester_busy", Server;
    /// The tenant has reached its maximum of requests in progress.
    TenantBusy = 8, "tenant_busy", Server;
    /// The deadline passed before the operation started.
    Deadline = 9, "deadline", Server;
    /// The peer sent more bytes than a handshake may have.
    HandshakeBytes = 10, "handshake_bytes", Peer;
    /// The handshake exceeded its maximum duration.
    HandshakeTime = 11, "handshake_time", Peer;
    /// The key server is draining and takes no new requests.
    Draining = 12, "draining", Server;
    /// The body of the request is malformed.
    Malformed = 13, "malformed", Requester;
    /// The key cannot sign with this scheme.
    Scheme = 14, "scheme", Requester;
    /// The input is not one that a TLS handshake signs.
    Input = 15, "input", Requester;
    /// The key server failed internally: it has no lockable memory left, or its crypto library
    /// failed.
    Failed = 16, "failed", Server;
    /// The tenant's keys are not in key servers, or the tenant is not known (yet).
    UnknownTenant = 17, "unknown_tenant", Server;
    /// The name has a different key at this key server than in the certificate that the peer
    /// receives.
    OtherKey = 18, "other_key", Server;
    /// The peer's certificate, or one above it, has expired.
    PeerExpired = 32, "peer_expired", Peer;
    /// The peer's certificate, or one above it, is not valid yet.
    PeerNotYetValid = 33, "peer_not_yet_valid", Peer;
    /// The peer's certificate is not valid for its side of TLS (extended key usage).
    PeerPurpose = 34, "peer_purpose", Peer;
    /// No root of the trust domain has signed the peer's chain.
    PeerUnknownIssuer = 35, "peer_unknown_issuer", Peer;
    /// The peer's trust domain is neither the tenant's own nor a federated one.
    PeerTrustDomain = 36, "peer_trust_domain", Peer;
    /// The server has none of the expected identities.
    PeerIdentity = 37, "peer_identity", Peer;
    /// The peer's certificate contains no identity, or several.
    PeerAmbiguous = 38, "peer_ambiguous", Peer;
    /// A certificate revocation list contains the peer's certificate, or one above it.
    PeerRevoked = 39, "peer_revoked", Peer;
    /// The peer's chain exceeds the maximum number of certificates or bytes.
    PeerChain = 40, "peer_chain", Peer;
    /// The peer presented no certificate.
    PeerAnonymous = 41, "peer_anonymous", Peer;
    /// The peer's certificate is malformed, or its signature is wrong.
    PeerCertificate = 42, "peer_certificate", Peer;
    /// The peer ended the handshake with an alert.
    PeerAlert = 43, "peer_alert", Peer;
    /// The peer does not use the mesh's TLS 1.3 parameters: version, suites, groups, ALPN, or no
    /// TLS at all.
    PeerProtocol = 44, "peer_protocol", Peer;
}

impl fmt::Display for KeyRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
