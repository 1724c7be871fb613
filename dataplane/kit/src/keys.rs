//! Key servers, as a requester sees them: they hold the private keys and shake hands or sign for this side. Records are `tls::record`'s,
//! whose key is where is the tenant's policy.
//!
//! Phases of a handshake: a key server is chosen (`requester`), asked over a channel (`channel`), bytes are relayed between it and the peer
//! (`remote`), and what came of it becomes a [`crate::tls::Stream`].

mod channel;
mod circuit;
mod counts;
mod keyring;
mod pace;
mod remote;
mod requester;
mod secret_buffer;
mod server;
mod signed;

use canal_wire::keyrpc;

pub use channel::{IN_FLIGHT_MAX, QUEUE_MAX};
pub use circuit::{CIRCUIT_WAIT, FAILURES_MAX};
pub use keyring::Keyring;
pub use requester::{LAST_TRIPS, Requester, RequesterConfig, TRIP};
pub use secret_buffer::SecretBuffer;
pub use server::{ServerAddress, parse_key_server};
pub use signed::{CHAIN_LIFE, Signed, THREADS, WAITING_MAX, spki_hash};

pub(crate) use remote::{Shaken, Terms, as_client, as_server, turn_away};
pub(crate) use signed::Always;

use crate::tls::Refusal;

/// Why a key server did not do what it was asked.
#[derive(Debug, Clone, thiserror::Error)]
pub enum KeyError {
    /// None of them answered, and no local key may take their place.
    #[error("no key server answered: {0}; is one up in this AZ or another, and does --key-server name it?")]
    NoKeyServer(String),
    /// One said no.
    #[error("{server} refused: {name}: {text}")]
    Refused { server: String, name: keyrpc::Refusal, text: String },
    /// It fell silent in the middle of a handshake, which no other can go on with.
    #[error("{0} was lost in the middle of the handshake")]
    Lost(String),
    /// It answered something that makes no sense here.
    #[error("{server} answered what was not asked: {what}")]
    Answer { server: String, what: &'static str },
    /// The peer speaks no TLS.
    #[error("the peer sent {0}")]
    Peer(&'static str),
    /// The peer sent more than a handshake may hold.
    #[error("the peer sent {0}")]
    TooMuch(&'static str),
    /// No handshake thread was free.
    #[error("all handshake threads are taken")]
    Busy,
}

impl KeyError {
    /// Its name.
    pub fn refusal(&self) -> Refusal {
        match self {
            KeyError::NoKeyServer(_) => Refusal::NoKeyServer,
            KeyError::Refused { name, .. } => of_peer(*name),
            KeyError::Lost(_) | KeyError::Answer { .. } => Refusal::KeyServer,
            KeyError::Peer(_) => Refusal::Protocol,
            KeyError::TooMuch(_) => Refusal::HandshakeBytes,
            KeyError::Busy => Refusal::Busy,
        }
    }
}

/// What a key server found wrong with the peer has the same name as if it had been found here.
fn of_peer(name: keyrpc::Refusal) -> Refusal {
    use keyrpc::Refusal as R;
    match name {
        R::PeerExpired => Refusal::Expired,
        R::PeerNotYetValid => Refusal::NotYetValid,
        R::PeerPurpose => Refusal::WrongUsage,
        R::PeerUnknownIssuer => Refusal::UnknownIssuer,
        R::PeerTrustDomain => Refusal::WrongTrustDomain,
        R::PeerIdentity => Refusal::WrongIdentity,
        R::PeerAmbiguous => Refusal::Ambiguous,
        R::PeerRevoked => Refusal::Revoked,
        R::PeerChain => Refusal::ChainTooLong,
        R::PeerAnonymous => Refusal::NoCertificate,
        R::PeerCertificate => Refusal::BadEncoding,
        R::PeerAlert => Refusal::Alert,
        R::PeerProtocol => Refusal::Protocol,
        R::HandshakeBytes => Refusal::HandshakeBytes,
        R::HandshakeTime => Refusal::Timeout,
        _ => Refusal::KeyServer,
    }
}

#[cfg(test)]
pub(crate) mod tests;
