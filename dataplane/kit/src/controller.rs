//! How a data plane reaches the controller: address, TLS root and bearer token. What is said there is `southbound`'s and `certs`' business.

use std::path::PathBuf;
use std::time::Duration;

use tonic::transport::Channel;

/// HTTP/2 PING interval and answer limit towards the controller: a mute one is found within 20 s.
pub const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(10));

/// Where the controller is and how to prove oneself to it. Files are read anew at each connect, so rotation needs no restart.
#[derive(Debug, Clone)]
pub struct Controller {
    /// `host:port`, tried in turn.
    pub addresses: Vec<String>,
    /// PEM of the CA that signed the controller's certificate for [`canal_wire::CONTROLLER_NAME`].
    pub root: PathBuf,
    /// Holds the bearer token; surrounding white space is ignored.
    pub token: PathBuf,
}

/// Why the controller could not be called.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// A file is missing or unreadable.
    #[error("{what} {path}: {source}; give the file that the controller's operator made for this data plane")]
    File { what: &'static str, path: PathBuf, source: std::io::Error },
    /// The token is empty or not ASCII.
    #[error("token {0}: must be one line of ASCII")]
    Token(PathBuf),
    /// No address was given, or it is not `host:port`.
    #[error("controller address {0:?}: write host:port")]
    Address(String),
    /// TCP, TLS or HTTP/2 failed.
    #[error("controller {address}: {why}")]
    Connect { address: String, why: String },
}

/// A connection to one controller with the token to send along.
#[derive(Clone)]
pub struct Connection {
    /// HTTP/2 over TLS.
    pub channel: Channel,
    /// `authorization` for every call.
    pub authorization: tonic::metadata::MetadataValue<tonic::metadata::Ascii>,
    /// Which of the addresses it is.
    pub address: String,
}

impl Controller {
    /// Connects to the `attempt`-th address (modulo their number).
    pub async fn connect(&self, attempt: usize) -> Result<Connection, ControllerError> {
        let _ = attempt;
        unreachable!("body lands in the next commit")
    }
}
