//! Client of the key servers, which own the private keys and perform handshakes or signatures for
//! this side. The crate neither decides where a key is nor encrypts records. Start with
//! [`KeyClient`].
//!
//! Phases of a handshake: `key_client` selects a key server, and `channel` sends it the request.
//! `remote_handshake` relays bytes between the key server and the peer. The result becomes a
//! [`canal_tls::MtlsStream`].

#![forbid(unsafe_code)]

mod channel;
mod circuit_breaker;
mod counts;
mod key_client;
mod remote_handshake;
mod remote_signing;
mod server_address;
mod signing_threads;
mod write_pacing;

pub use channel::{IN_FLIGHT_MAX, QUEUE_MAX};
pub use circuit_breaker::{FAILURES_MAX, OPEN_TIME};
pub use key_client::{ANSWER_TIMEOUT, KeyClient, KeyClientConfig, LAST_SERVER_TIMEOUT_FACTOR};
pub use remote_handshake::{RemoteHandshakeParams, as_client, as_server, turn_away};
pub use remote_signing::{FixedCertResolver, RemoteKey};
pub use server_address::{ServerAddress, parse_key_server};
pub use signing_threads::{THREADS, WAITING_MAX};

#[cfg(test)]
mod tests;
