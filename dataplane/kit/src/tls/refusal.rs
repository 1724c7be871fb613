//! Why a handshake failed, as a closed list of names: the label of counters and the word of logs. Nothing is decided here.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use rustls::{CertificateError, Error, OtherError, PeerIncompatible};

use super::{CHAIN_BYTES_MAX, CHAIN_CERTIFICATES_MAX};
use crate::keys::KeyError;

macro_rules! refusals {
    ($($(#[$doc:meta])* $variant:ident = $name:literal;)*) => {
        /// Why a handshake failed. The first group concerns the peer's certificate.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Refusal {
            $($(#[$doc])* $variant,)*
        }

        impl Refusal {
            /// All of them.
            pub const ALL: &'static [Refusal] = &[$(Refusal::$variant,)*];

            /// The label `reason` of `canal_tls_refused_total`.
            pub fn name(self) -> &'static str {
                match self { $(Refusal::$variant => $name,)* }
            }
        }
    };
}

refusals! {
    /// The peer showed no certificate.
    NoCertificate = "no_certificate";
    /// A certificate of the chain has expired.
    Expired = "expired";
    /// A certificate of the chain is not valid yet.
    NotYetValid = "not_yet_valid";
    /// A revocation list names a certificate of the chain.
    Revoked = "revoked";
    /// No root of the trust domain vouches for the chain.
    UnknownIssuer = "unknown_issuer";
    /// The trust domain is neither the own nor a federated one.
    WrongTrustDomain = "wrong_trust_domain";
    /// A server is none of those expected.
    WrongIdentity = "wrong_identity";
    /// A client's certificate names no or several identities.
    Ambiguous = "ambiguous";
    /// The certificate is not for this side of TLS (extended key usage).
    WrongUsage = "wrong_usage";
    /// More than [`CHAIN_CERTIFICATES_MAX`] certificates.
    ChainTooLong = "chain_too_long";
    /// More than [`CHAIN_BYTES_MAX`] bytes of certificates.
    ChainTooLarge = "chain_too_large";
    /// A certificate cannot be read.
    BadEncoding = "bad_encoding";
    /// A signature in the chain, or the peer's proof that it has the key, is wrong.
    BadSignature = "bad_signature";
    /// A certificate, or the proof, uses an algorithm that is not taken.
    BadAlgorithm = "bad_algorithm";
    /// Whether the chain is revoked cannot be told: the revocation list is not by who signs the certificates.
    BadRevocationList = "bad_revocation_list";
    /// Any other fault of the chain: name constraints, path length, a CA as a leaf.
    BadChain = "bad_chain";
    /// There is no valid certificate of the own identity.
    NoOwnCertificate = "no_own_certificate";
    /// The peer does not speak TLS 1.3.
    Version = "version";
    /// No cipher suite, group or signature scheme that both have.
    NothingShared = "nothing_shared";
    /// No application protocol (ALPN) that both have.
    Alpn = "alpn";
    /// The peer broke off with an alert: in most cases it did not take the own certificate.
    Alert = "alert";
    /// The peer sent what is no TLS 1.3 handshake.
    Protocol = "protocol";
    /// The peer sent more than a handshake may hold.
    HandshakeBytes = "handshake_bytes";
    /// The connection broke.
    Io = "io";
    /// No end within [`super::HANDSHAKE_TIMEOUT`].
    Timeout = "timeout";
    /// No key server answered, and the tenant's policy allows no local key.
    NoKeyServer = "no_key_server";
    /// A key server refused this side.
    KeyServer = "key_server";
    /// No handshake thread was free (keyless).
    Busy = "handshakes_busy";
}

/// Why a TLS connection did not come up. The texts name what was expected and what was seen.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// There is no certificate for the own identity (yet, or any more).
    #[error("no valid certificate for {0}; is the controller reachable, and does this identity run here?")]
    NoCertificate(Identity),
    /// The peer's certificate is not the one this connection is for.
    #[error("{0}")]
    Peer(PeerRefused),
    /// The protocol failed, here or (as an alert) there.
    #[error("TLS handshake: {0}")]
    Protocol(Error),
    /// The transport failed.
    #[error("TLS handshake: {0}")]
    Io(io::Error),
    /// No end within [`super::HANDSHAKE_TIMEOUT`].
    #[error("TLS handshake: no end in {0:?}")]
    Timeout(Duration),
    /// The key server that shakes hands for this side did not.
    #[error("TLS handshake by key server: {0}")]
    KeyServer(KeyError),
}

impl TlsError {
    /// Its name.
    pub fn refusal(&self) -> Refusal {
        match self {
            TlsError::NoCertificate(_) => Refusal::NoOwnCertificate,
            TlsError::Peer(p) => p.refusal(),
            TlsError::Protocol(e) => of_rustls(e),
            TlsError::Io(_) => Refusal::Io,
            TlsError::Timeout(_) => Refusal::Timeout,
            TlsError::KeyServer(e) => e.refusal(),
        }
    }

    /// The name's word.
    pub fn reason(&self) -> &'static str {
        self.refusal().name()
    }
}

/// The name of what rustls says.
pub fn of_rustls(e: &Error) -> Refusal {
    match e {
        Error::InvalidCertificate(c) => of_certificate(c),
        Error::InvalidCertRevocationList(_) => Refusal::BadRevocationList,
        Error::NoCertificatesPresented => Refusal::NoCertificate,
        Error::PeerIncompatible(PeerIncompatible::NoCertificateRequestSignatureSchemesInCommon) => Refusal::NothingShared,
        Error::PeerIncompatible(
            PeerIncompatible::NoCipherSuitesInCommon
            | PeerIncompatible::NoKxGroupsInCommon
            | PeerIncompatible::NoSignatureSchemesInCommon
            | PeerIncompatible::NamedGroupsExtensionRequired
            | PeerIncompatible::KeyShareExtensionRequired
            | PeerIncompatible::SignatureAlgorithmsExtensionRequired
            | PeerIncompatible::NoEcPointFormatsInCommon,
        ) => Refusal::NothingShared,
        Error::PeerIncompatible(
            PeerIncompatible::Tls12NotOffered
            | PeerIncompatible::Tls12NotOfferedOrEnabled
            | PeerIncompatible::Tls13RequiredForQuic
            | PeerIncompatible::ServerDoesNotSupportTls12Or13
            | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig
            | PeerIncompatible::SupportedVersionsExtensionRequired,
        ) => Refusal::Version,
        Error::NoApplicationProtocol => Refusal::Alpn,
        Error::AlertReceived(_) => Refusal::Alert,
        _ => Refusal::Protocol,
    }
}

fn of_certificate(e: &CertificateError) -> Refusal {
    match e {
        CertificateError::BadEncoding => Refusal::BadEncoding,
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => Refusal::Expired,
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => Refusal::NotYetValid,
        CertificateError::Revoked => Refusal::Revoked,
        CertificateError::UnknownIssuer => Refusal::UnknownIssuer,
        CertificateError::BadSignature => Refusal::BadSignature,
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => Refusal::WrongUsage,
        CertificateError::UnsupportedSignatureAlgorithmContext { .. }
        | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => Refusal::BadAlgorithm,
        CertificateError::UnknownRevocationStatus => Refusal::BadRevocationList,
        CertificateError::Other(o) => o.0.downcast_ref::<PeerRefused>().map_or(Refusal::BadChain, PeerRefused::refusal),
        _ => Refusal::BadChain,
    }
}

/// Why a peer's certificate is refused for what it says, whoever vouches for it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerRefused {
    /// The server is someone else.
    #[error("the peer is {seen:?}, expected one of {expected:?}; is the address taken by another workload?")]
    Identity { expected: Vec<Identity>, seen: Vec<String> },
    /// The peer belongs to another tenant, with which there is no federation.
    #[error("the peer is {seen:?}, expected an identity of trust domain {expected}")]
    TrustDomain { expected: TrustDomain, seen: Vec<String> },
    /// The client's certificate names no or several identities, so who it is would be a guess (X509-SVID §2).
    #[error("the peer's certificate names {seen:?}, expected exactly one identity of trust domain {expected}")]
    Ambiguous { expected: TrustDomain, seen: Vec<String> },
    /// Too many certificates.
    #[error("the peer shows {0} certificates; at most {CHAIN_CERTIFICATES_MAX} are looked at")]
    ChainTooLong(usize),
    /// Too many bytes.
    #[error("the peer's certificates have {0} bytes; at most {CHAIN_BYTES_MAX} are looked at")]
    ChainTooLarge(usize),
    /// A revocation list is not by who signs the certificates.
    #[error("the revocation list of the peer's trust domain cannot be used: {0}")]
    RevocationList(String),
    /// A fault of the chain that TLS has no word for.
    #[error("the peer's certificates do not hold together: {0}")]
    Chain(String),
}

impl PeerRefused {
    /// Its name.
    pub fn refusal(&self) -> Refusal {
        match self {
            PeerRefused::Identity { .. } => Refusal::WrongIdentity,
            PeerRefused::TrustDomain { .. } => Refusal::WrongTrustDomain,
            PeerRefused::Ambiguous { .. } => Refusal::Ambiguous,
            PeerRefused::ChainTooLong(_) => Refusal::ChainTooLong,
            PeerRefused::ChainTooLarge(_) => Refusal::ChainTooLarge,
            PeerRefused::RevocationList(_) => Refusal::BadRevocationList,
            PeerRefused::Chain(_) => Refusal::BadChain,
        }
    }

    pub(super) fn error(self) -> Error {
        Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(self))))
    }
}

impl From<Error> for TlsError {
    fn from(e: Error) -> Self {
        if let Error::InvalidCertificate(CertificateError::Other(o)) = &e
            && let Some(refused) = o.0.downcast_ref::<PeerRefused>()
        {
            return TlsError::Peer(refused.clone());
        }
        TlsError::Protocol(e)
    }
}

impl From<io::Error> for TlsError {
    fn from(e: io::Error) -> Self {
        match e.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(e) => e.clone().into(),
            None => TlsError::Io(e),
        }
    }
}
