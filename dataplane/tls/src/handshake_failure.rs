//! Handshake failures as a closed list of names, which are the counters' labels and the words in
//! logs. This module makes no decision.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use canal_wire::keyrpc;
use rustls::{CertificateError, Error, OtherError, PeerIncompatible};
use rustls_pki_types::CertificateDer;

use super::{CHAIN_BYTES_MAX, CHAIN_CERTIFICATES_MAX};

macro_rules! refusals {
    ($($(#[$doc:meta])* $variant:ident = $name:literal;)*) => {
        /// Reasons why a handshake failed. The first group concerns the peer's certificate.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum HandshakeFailure {
            $($(#[$doc])* $variant,)*
        }

        impl HandshakeFailure {
            /// All failures, in the order of their declaration.
            pub const ALL: &'static [HandshakeFailure] = &[$(HandshakeFailure::$variant,)*];

            /// Returns the label value of `reason` of `canal_tls_refused_total`.
            pub fn name(self) -> &'static str {
                match self { $(HandshakeFailure::$variant => $name,)* }
            }
        }
    };
}

refusals! {
    /// The peer presented no certificate.
    NoCertificate = "no_certificate";
    /// A certificate of the chain has expired.
    Expired = "expired";
    /// A certificate of the chain is not valid yet.
    NotYetValid = "not_yet_valid";
    /// A revocation list names a certificate of the chain.
    Revoked = "revoked";
    /// The chain does not lead to a root of the trust domain.
    UnknownIssuer = "unknown_issuer";
    /// The trust domain is neither this side's nor a federated one.
    WrongTrustDomain = "wrong_trust_domain";
    /// The server is none of those expected.
    WrongIdentity = "wrong_identity";
    /// A client's certificate names no or several identities.
    Ambiguous = "ambiguous";
    /// The certificate is not valid for this side of TLS (extended key usage).
    WrongUsage = "wrong_usage";
    /// The chain has more than [`CHAIN_CERTIFICATES_MAX`] certificates.
    ChainTooLong = "chain_too_long";
    /// The chain has more than [`CHAIN_BYTES_MAX`] bytes.
    ChainTooLarge = "chain_too_large";
    /// A certificate cannot be parsed.
    BadEncoding = "bad_encoding";
    /// A signature in the chain, or the peer's proof of possession of the key, is wrong.
    BadSignature = "bad_signature";
    /// A certificate, or the proof of possession, uses an algorithm that is not accepted.
    BadAlgorithm = "bad_algorithm";
    /// The revocation of the chain cannot be checked: the issuer of the certificates did not sign
    /// the revocation list.
    BadRevocationList = "bad_revocation_list";
    /// The chain has another fault: name constraints, path length, or a CA as a leaf.
    BadChain = "bad_chain";
    /// This side's identity has no valid certificate.
    NoOwnCertificate = "no_own_certificate";
    /// The peer does not speak TLS 1.3.
    Version = "version";
    /// The two sides share no cipher suite, group or signature scheme.
    NothingShared = "nothing_shared";
    /// The two sides share no application protocol (ALPN).
    Alpn = "alpn";
    /// The client named a server that this side is not (unrecognized_name).
    UnrecognizedName = "unrecognized_name";
    /// The peer aborted with an alert, in most cases because it refused this side's certificate.
    Alert = "alert";
    /// The peer sent bytes that are not a TLS 1.3 handshake.
    Protocol = "protocol";
    /// The peer sent more bytes than a handshake may have.
    HandshakeBytes = "handshake_bytes";
    /// The connection broke during the handshake.
    Io = "io";
    /// The handshake did not end within [`super::HANDSHAKE_TIMEOUT`].
    Timeout = "timeout";
    /// No key server answered, and the tenant's policy permits no local key.
    NoKeyServer = "no_key_server";
    /// A key server refused this side.
    KeyServer = "key_server";
    /// No handshake thread was free (keyless).
    Busy = "handshakes_busy";
}

/// Reasons why a key server did not complete a request.
#[derive(Debug, Clone, thiserror::Error)]
pub enum KeyServerError {
    /// No key server answered, and no local key may be used instead.
    #[error(
        "no key server answered: {0}; fix: check that one is up in this AZ or another and that --key-server names it"
    )]
    NoKeyServer(String),
    /// The key server refused the request.
    #[error("{server} refused: {name}: {text}")]
    Refused {
        server: String,
        name: keyrpc::KeyRefusal,
        text: String,
    },
    /// The key server stopped answering in the middle of a handshake, which no other server can
    /// continue.
    #[error("the connection to {0} was lost during the handshake")]
    Lost(String),
    /// The answer of the key server does not fit the request.
    #[error("{server} sent an answer without a request: {what}")]
    Answer { server: String, what: &'static str },
    /// The peer does not speak TLS.
    #[error("the peer sent {0}")]
    Peer(&'static str),
    /// The peer sent more bytes than a handshake may have.
    #[error("the peer sent {0}")]
    TooMuch(&'static str),
    /// No handshake thread was free.
    #[error("all handshake threads are busy")]
    Busy,
}

impl KeyServerError {
    /// Returns the handshake failure that reports this error.
    pub fn refusal(&self) -> HandshakeFailure {
        match self {
            KeyServerError::NoKeyServer(_) => HandshakeFailure::NoKeyServer,
            KeyServerError::Refused { name, .. } => of_peer(*name),
            KeyServerError::Lost(_) | KeyServerError::Answer { .. } => HandshakeFailure::KeyServer,
            KeyServerError::Peer(_) => HandshakeFailure::Protocol,
            KeyServerError::TooMuch(_) => HandshakeFailure::HandshakeBytes,
            KeyServerError::Busy => HandshakeFailure::Busy,
        }
    }
}

/// Maps a refusal of the key server to a handshake failure. A fault of the peer gets the name that
/// it would get if it were detected locally.
fn of_peer(name: keyrpc::KeyRefusal) -> HandshakeFailure {
    use keyrpc::KeyRefusal as R;
    match name {
        R::PeerExpired => HandshakeFailure::Expired,
        R::PeerNotYetValid => HandshakeFailure::NotYetValid,
        R::PeerPurpose => HandshakeFailure::WrongUsage,
        R::PeerUnknownIssuer => HandshakeFailure::UnknownIssuer,
        R::PeerTrustDomain => HandshakeFailure::WrongTrustDomain,
        R::PeerIdentity => HandshakeFailure::WrongIdentity,
        R::PeerAmbiguous => HandshakeFailure::Ambiguous,
        R::PeerRevoked => HandshakeFailure::Revoked,
        R::PeerChain => HandshakeFailure::ChainTooLong,
        R::PeerAnonymous => HandshakeFailure::NoCertificate,
        R::PeerCertificate => HandshakeFailure::BadEncoding,
        R::PeerAlert => HandshakeFailure::Alert,
        R::PeerProtocol => HandshakeFailure::Protocol,
        R::HandshakeBytes => HandshakeFailure::HandshakeBytes,
        R::HandshakeTime => HandshakeFailure::Timeout,
        _ => HandshakeFailure::KeyServer,
    }
}

/// Errors of a TLS handshake. The texts name what was expected and what was seen.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// This side's identity has no certificate, not yet or no longer.
    #[error(
        "no valid certificate for {0}; fix: check that the controller is reachable and that this identity runs here"
    )]
    NoCertificate(Identity),
    /// The peer's certificate is not the one that this connection expects.
    #[error("{0}")]
    Peer(PeerIdentityError),
    /// The protocol failed on this side, or on the peer's side with an alert.
    #[error("TLS handshake: {0}")]
    Protocol(Error),
    /// The transport failed during the handshake.
    #[error("TLS handshake: {0}")]
    Io(io::Error),
    /// The handshake did not end within [`super::HANDSHAKE_TIMEOUT`].
    #[error("TLS handshake: not finished within {0:?}")]
    Timeout(Duration),
    /// The key server did not complete the handshake for this side.
    #[error("TLS handshake by key server: {0}")]
    KeyServer(KeyServerError),
    /// No listener is for the server name (SNI) that the client sent, if it sent one.
    #[error("TLS handshake: no listener is for the server name {0:?}")]
    UnrecognizedName(Option<String>),
    /// The listener for the client's server name has no certificate.
    #[error("TLS handshake: the listener has no certificate; fix: see what is reported of it")]
    NoListenerCertificate,
}

impl TlsError {
    /// Returns the failure that names this error.
    pub fn refusal(&self) -> HandshakeFailure {
        match self {
            TlsError::NoCertificate(_) => HandshakeFailure::NoOwnCertificate,
            TlsError::Peer(p) => p.refusal(),
            TlsError::Protocol(e) => of_rustls(e),
            TlsError::Io(_) => HandshakeFailure::Io,
            TlsError::Timeout(_) => HandshakeFailure::Timeout,
            TlsError::KeyServer(e) => e.refusal(),
            TlsError::UnrecognizedName(_) => HandshakeFailure::UnrecognizedName,
            TlsError::NoListenerCertificate => HandshakeFailure::NoOwnCertificate,
        }
    }

    /// Returns whether the peer presented no certificate, or one that is not accepted.
    pub fn is_of_peer_certificate(&self) -> bool {
        matches!(
            self,
            TlsError::Peer(_)
                | TlsError::Protocol(Error::NoCertificatesPresented | Error::InvalidCertificate(_))
        )
    }

    /// Returns the name of the failure as a label value.
    pub fn reason(&self) -> &'static str {
        self.refusal().name()
    }
}

/// Maps a rustls error to the failure that names it.
pub fn of_rustls(e: &Error) -> HandshakeFailure {
    match e {
        Error::InvalidCertificate(c) => of_certificate(c),
        Error::InvalidCertRevocationList(_) => HandshakeFailure::BadRevocationList,
        Error::NoCertificatesPresented => HandshakeFailure::NoCertificate,
        Error::PeerIncompatible(PeerIncompatible::NoCertificateRequestSignatureSchemesInCommon) => {
            HandshakeFailure::NothingShared
        }
        Error::PeerIncompatible(
            PeerIncompatible::NoCipherSuitesInCommon
            | PeerIncompatible::NoKxGroupsInCommon
            | PeerIncompatible::NoSignatureSchemesInCommon
            | PeerIncompatible::NamedGroupsExtensionRequired
            | PeerIncompatible::KeyShareExtensionRequired
            | PeerIncompatible::SignatureAlgorithmsExtensionRequired
            | PeerIncompatible::NoEcPointFormatsInCommon,
        ) => HandshakeFailure::NothingShared,
        Error::PeerIncompatible(
            PeerIncompatible::Tls12NotOffered
            | PeerIncompatible::Tls12NotOfferedOrEnabled
            | PeerIncompatible::Tls13RequiredForQuic
            | PeerIncompatible::ServerDoesNotSupportTls12Or13
            | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig
            | PeerIncompatible::SupportedVersionsExtensionRequired,
        ) => HandshakeFailure::Version,
        Error::NoApplicationProtocol => HandshakeFailure::Alpn,
        Error::AlertReceived(_) => HandshakeFailure::Alert,
        _ => HandshakeFailure::Protocol,
    }
}

fn of_certificate(e: &CertificateError) -> HandshakeFailure {
    match e {
        CertificateError::BadEncoding => HandshakeFailure::BadEncoding,
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            HandshakeFailure::Expired
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            HandshakeFailure::NotYetValid
        }
        CertificateError::Revoked => HandshakeFailure::Revoked,
        CertificateError::UnknownIssuer => HandshakeFailure::UnknownIssuer,
        CertificateError::BadSignature => HandshakeFailure::BadSignature,
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            HandshakeFailure::WrongUsage
        }
        CertificateError::UnsupportedSignatureAlgorithmContext { .. }
        | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            HandshakeFailure::BadAlgorithm
        }
        CertificateError::UnknownRevocationStatus => HandshakeFailure::BadRevocationList,
        CertificateError::Other(o) => {
            o.0.downcast_ref::<PeerIdentityError>()
                .map_or(HandshakeFailure::BadChain, PeerIdentityError::refusal)
        }
        _ => HandshakeFailure::BadChain,
    }
}

/// Reasons to refuse a peer's certificate by its content, whatever its issuer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerIdentityError {
    /// The server has another identity.
    #[error(
        "the peer is {names:?}, expected one of {expected:?}; fix: check whether another workload has the address"
    )]
    Identity {
        expected: Vec<Identity>,
        names: Vec<String>,
    },
    /// The peer belongs to another tenant, with which there is no federation.
    #[error("the peer is {names:?}, expected an identity of trust domain {expected}")]
    TrustDomain {
        expected: TrustDomain,
        names: Vec<String>,
    },
    /// The client's certificate names no or several identities, so that its identity would be a
    /// guess (X509-SVID §2).
    #[error(
        "the peer's certificate names {names:?}, expected exactly one identity of trust domain {expected}"
    )]
    Ambiguous {
        expected: TrustDomain,
        names: Vec<String>,
    },
    /// The chain has too many certificates.
    #[error("the peer sent {0} certificates; at most {CHAIN_CERTIFICATES_MAX} are accepted")]
    ChainTooLong(usize),
    /// The chain has too many bytes.
    #[error("the peer's certificates have {0} bytes; at most {CHAIN_BYTES_MAX} are accepted")]
    ChainTooLarge(usize),
    /// The issuer of the certificates did not sign the revocation list.
    #[error("the revocation list of the peer's trust domain cannot be used: {0}")]
    RevocationList(String),
    /// The chain has a fault for which TLS has no alert.
    #[error("the peer's certificate chain is not valid: {0}")]
    Chain(String),
}

impl PeerIdentityError {
    /// Returns the failure that names this error.
    pub fn refusal(&self) -> HandshakeFailure {
        match self {
            PeerIdentityError::Identity { .. } => HandshakeFailure::WrongIdentity,
            PeerIdentityError::TrustDomain { .. } => HandshakeFailure::WrongTrustDomain,
            PeerIdentityError::Ambiguous { .. } => HandshakeFailure::Ambiguous,
            PeerIdentityError::ChainTooLong(_) => HandshakeFailure::ChainTooLong,
            PeerIdentityError::ChainTooLarge(_) => HandshakeFailure::ChainTooLarge,
            PeerIdentityError::RevocationList(_) => HandshakeFailure::BadRevocationList,
            PeerIdentityError::Chain(_) => HandshakeFailure::BadChain,
        }
    }

    /// Checks the limits of a chain, before anything of it is parsed.
    ///
    /// # Errors
    /// The chain has more than [`CHAIN_CERTIFICATES_MAX`] certificates or [`CHAIN_BYTES_MAX`] bytes.
    pub fn check_size(
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
    ) -> Result<(), Error> {
        let size = leaf.len() + above.iter().map(|c| c.len()).sum::<usize>();
        if above.len() >= CHAIN_CERTIFICATES_MAX {
            return Err(Self::ChainTooLong(above.len() + 1).error());
        }
        if size > CHAIN_BYTES_MAX {
            return Err(Self::ChainTooLarge(size).error());
        }
        Ok(())
    }

    pub(super) fn error(self) -> Error {
        Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(self))))
    }
}

impl From<Error> for TlsError {
    fn from(e: Error) -> Self {
        if let Error::InvalidCertificate(CertificateError::Other(o)) = &e
            && let Some(refused) = o.0.downcast_ref::<PeerIdentityError>()
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
