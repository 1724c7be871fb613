//! How a data plane reaches the controller: address, TLS root and bearer token. What is said there is `southbound`'s and `certs`' business.

mod heard;

use std::path::{Path, PathBuf};
use std::time::Duration;

use canal_wire::CONTROLLER_NAME;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

use heard::{Connector, Heard};

/// HTTP/2 PING interval and answer limit towards the controller: a mute one is found within 20 s.
pub const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(10));
/// TCP and TLS together.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// HTTP/2 windows: a first full state is tens of MB.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;

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
    #[error("controller {address}: {why}; is it up, and is its root the one in the file?")]
    Connect { address: String, why: String },
}

/// A connection to one controller with the token to send along.
#[derive(Clone)]
pub struct Connection {
    /// HTTP/2 over TLS.
    pub channel: Channel,
    /// `authorization` for every call.
    pub authorization: MetadataValue<Ascii>,
    /// Which of the addresses it is.
    pub address: String,
    heard: Heard,
    mute_after: Duration,
}

impl Connection {
    /// Whether the controller has said nothing for so long, PINGs included, that a call which failed did so because of it.
    pub fn is_mute(&self) -> bool {
        self.heard.silence() >= self.mute_after
    }

    /// A request that carries the token.
    pub fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        request.metadata_mut().insert("authorization", self.authorization.clone());
        request
    }
}

fn read(what: &'static str, path: &Path) -> Result<String, ControllerError> {
    std::fs::read_to_string(path).map_err(|source| ControllerError::File { what, path: path.into(), source })
}

impl Controller {
    /// Connects to the `attempt`-th address (modulo their number).
    pub async fn connect(&self, attempt: usize) -> Result<Connection, ControllerError> {
        self.connect_with(attempt, KEEPALIVE).await
    }

    /// [`Controller::connect`] with another PING interval and answer limit.
    pub async fn connect_with(&self, attempt: usize, keepalive: (Duration, Duration)) -> Result<Connection, ControllerError> {
        let address = match self.addresses.len() {
            0 => return Err(ControllerError::Address(String::new())),
            n => self.addresses[attempt % n].clone(),
        };
        let root = read("controller root", &self.root)?;
        let authorization = self.authorization()?;
        let bad = |_| ControllerError::Address(address.clone());
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(root)).domain_name(CONTROLLER_NAME);
        let failed = |e: tonic::transport::Error| ControllerError::Connect { address: address.clone(), why: chain(&e) };
        let endpoint = Endpoint::from_shared(format!("https://{address}"))
            .map_err(bad)?
            .tls_config(tls)
            .map_err(failed)?
            .connect_timeout(CONNECT_TIMEOUT)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .http2_keep_alive_interval(keepalive.0)
            .keep_alive_timeout(keepalive.1)
            .keep_alive_while_idle(true);
        let heard = Heard::new();
        let channel = endpoint.connect_with_connector(Connector(heard.clone())).await.map_err(failed)?;
        Ok(Connection { channel, authorization, address, heard, mute_after: keepalive.0 + keepalive.1 / 2 })
    }

    fn authorization(&self) -> Result<MetadataValue<Ascii>, ControllerError> {
        let token = read("token", &self.token)?;
        let token = token.trim();
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(ControllerError::Token(self.token.clone()));
        }
        let mut value: MetadataValue<Ascii> = format!("Bearer {token}").parse().map_err(|_| ControllerError::Token(self.token.clone()))?;
        value.set_sensitive(true);
        Ok(value)
    }
}

/// An error with its sources: tonic's own text is only "transport error".
fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut source = e.source();
    while let Some(s) = source {
        let part = s.to_string();
        if !text.ends_with(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        source = s.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_missing_is_named_with_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let root = file("root.pem", &crate::testing::TestCa::new("infra").root_pem());
        let (good, empty, binary) = (file("token", " secret\n"), file("empty", "\n"), file("binary", "a\u{e9}"));
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let none = dir.path().join("none");
        let bad_pem = file("bad.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
        for (addresses, root, token, text) in [
            (vec![], &root, &good, "write host:port"),
            (vec!["no port here".to_string()], &root, &good, "write host:port"),
            (vec![free.clone()], &none, &good, "controller root"),
            (vec![free.clone()], &root, &none, "none: No such file"),
            (vec![free.clone()], &root, &empty, "one line of ASCII"),
            (vec![free.clone()], &root, &binary, "one line of ASCII"),
            (vec![free.clone()], &bad_pem, &good, "controller 127.0.0.1"),
            (vec![free.clone()], &root, &good, "refused"),
        ] {
            let c = Controller { addresses, root: root.clone(), token: token.clone() };
            let e = c.connect(0).await.err().unwrap().to_string();
            assert!(e.contains(text), "{text}: {e}");
        }
    }
}
