//! Connections of a data plane to the controller: address, TLS root and bearer token. The RPCs on a
//! connection are in `southbound` and `certs`.

mod liveness;
pub mod report_loop;

use std::path::{Path, PathBuf};
use std::time::Duration;

use canal_wire::CONTROLLER_NAME;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

use liveness::{Connector, LastActivity};

/// HTTP/2 PING interval and PING timeout of controller connections: a controller that sends nothing
/// is detected within 20 s.
pub const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(10));
/// Time to establish TCP and TLS together.
/// TCP repeats a lost SYN three times or more within it, so a lost packet is no failure.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// HTTP/2 flow-control windows. They are large because the first full state is tens of MB. One
/// window per round trip: at 10 ms, 400 MB/s. The connection's has room for two streams.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;

/// Addresses of the controller and the credentials for it. Each connect reads the files again, so
/// rotation needs no restart.
#[derive(Debug, Clone)]
pub struct ControllerEndpoint {
    /// Addresses as `host:port`, tried in turn.
    pub addresses: Vec<String>,
    /// Path of the CA certificate (PEM) that signed the controller's certificate for
    /// [`canal_wire::CONTROLLER_NAME`].
    pub root: PathBuf,
    /// Path of the bearer token; surrounding white space is ignored.
    pub token: PathBuf,
}

/// Reasons why a data plane cannot connect to the controller.
#[derive(Debug, thiserror::Error)]
pub enum ControllerConnectError {
    /// A file is missing or unreadable.
    #[error(
        "{what} {path}: {source}; fix: give the file that the controller's operator created for this data plane"
    )]
    File {
        what: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// The token is empty or not ASCII.
    #[error(
        "token {0}: it is not one line of ASCII; fix: give the file that the controller's operator created for this data plane"
    )]
    Token(PathBuf),
    /// No address was given, or the address is not `host:port`.
    #[error("controller address {0:?} is not valid; fix: write host:port")]
    Address(String),
    /// TCP, TLS or HTTP/2 failed.
    #[error(
        "controller {address}: {why}; fix: check that it is up and that its root is the one in the file"
    )]
    Connect { address: String, why: String },
}

/// A connection to one controller and the token for its calls.
#[derive(Clone)]
pub struct ControllerConnection {
    /// HTTP/2 channel over TLS to the controller.
    pub channel: Channel,
    /// Value of the `authorization` header of every call.
    pub authorization: MetadataValue<Ascii>,
    /// The address, of those configured, that this connection uses.
    pub address: String,
    last_activity: LastActivity,
    mute_after: Duration,
}

impl ControllerConnection {
    /// Returns whether the controller has sent nothing, PING answers included, for so long that a
    /// failed call failed because of that.
    pub fn is_mute(&self) -> bool {
        self.last_activity.idle_time() >= self.mute_after
    }

    /// Builds a request that carries the token.
    pub fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        request
            .metadata_mut()
            .insert("authorization", self.authorization.clone());
        request
    }
}

fn read(what: &'static str, path: &Path) -> Result<String, ControllerConnectError> {
    std::fs::read_to_string(path).map_err(|source| ControllerConnectError::File {
        what,
        path: path.into(),
        source,
    })
}

impl ControllerEndpoint {
    /// Parses the value of a `--controller` flag and returns it as `host:port`.
    ///
    /// # Errors
    /// The text names no host, or no port from 1 to 65535.
    pub fn parse_address(text: &str) -> Result<String, String> {
        let address = text
            .strip_prefix("https://")
            .unwrap_or(text)
            .trim_end_matches('/');
        match address.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p > 0) => {
                Ok(address.to_string())
            }
            _ => Err(
                "the address lacks a host or a port from 1 to 65535; fix: write https://HOST:PORT"
                    .into(),
            ),
        }
    }

    /// Connects to the `attempt`-th address (modulo their number).
    ///
    /// # Errors
    /// A file cannot be read, the token or the address is malformed, or TCP, TLS or HTTP/2 fails.
    pub async fn connect(
        &self,
        attempt: usize,
    ) -> Result<ControllerConnection, ControllerConnectError> {
        self.connect_with(attempt, KEEPALIVE).await
    }

    /// Does what [`ControllerEndpoint::connect`] does, with another PING interval and PING timeout.
    ///
    /// # Errors
    /// The errors are those of [`ControllerEndpoint::connect`].
    pub async fn connect_with(
        &self,
        attempt: usize,
        keepalive: (Duration, Duration),
    ) -> Result<ControllerConnection, ControllerConnectError> {
        let address = match self.addresses.len() {
            0 => return Err(ControllerConnectError::Address(String::new())),
            n => self.addresses[attempt % n].clone(),
        };
        let root = read("controller root", &self.root)?;
        let authorization = self.authorization()?;
        let bad = |_| ControllerConnectError::Address(address.clone());
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(root))
            .domain_name(CONTROLLER_NAME);
        let failed = |e: tonic::transport::Error| ControllerConnectError::Connect {
            address: address.clone(),
            why: chain(&e),
        };
        let endpoint = Endpoint::from_shared(format!("https://{address}"))
            .map_err(bad)?
            .tls_config(tls)
            .map_err(failed)?
            .connect_timeout(CONNECT_TIMEOUT)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .http2_keep_alive_interval(keepalive.0)
            .keep_alive_timeout(keepalive.1)
            // The controller may have nothing to send for hours; only PINGs show that it is there.
            .keep_alive_while_idle(true);
        let heard = LastActivity::new();
        let channel = endpoint
            .connect_with_connector(Connector(heard.clone()))
            .await
            .map_err(failed)?;
        // An answered PING ends the silence well before this time; an unanswered PING fails the
        // connection after it.
        Ok(ControllerConnection {
            channel,
            authorization,
            address,
            last_activity: heard,
            mute_after: keepalive.0 + keepalive.1 / 2,
        })
    }

    fn authorization(&self) -> Result<MetadataValue<Ascii>, ControllerConnectError> {
        let token = read("token", &self.token)?;
        let token = token.trim();
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(ControllerConnectError::Token(self.token.clone()));
        }
        let mut value: MetadataValue<Ascii> = format!("Bearer {token}")
            .parse()
            .map_err(|_| ControllerConnectError::Token(self.token.clone()))?;
        value.set_sensitive(true);
        Ok(value)
    }
}

/// Formats an error with its sources, because tonic's own text is only "transport error".
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
    async fn missing_settings_are_named_with_their_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let root = file("root.pem", &canal_testing::TestCa::new("infra").root_pem());
        let (good, empty, binary) = (
            file("token", " secret\n"),
            file("empty", "\n"),
            file("binary", "a\u{e9}"),
        );
        // The listener is dropped, so nothing listens at its port.
        let free = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .to_string();
        let none = dir.path().join("none");
        let bad_pem = file(
            "bad.pem",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        );
        for (addresses, root, token, text) in [
            (vec![], &root, &good, "write host:port"),
            (
                vec!["no port here".to_string()],
                &root,
                &good,
                "write host:port",
            ),
            (vec![free.clone()], &none, &good, "controller root"),
            (vec![free.clone()], &root, &none, "none: No such file"),
            (vec![free.clone()], &root, &empty, "one line of ASCII"),
            (vec![free.clone()], &root, &binary, "one line of ASCII"),
            (vec![free.clone()], &bad_pem, &good, "controller 127.0.0.1"),
            (vec![free.clone()], &root, &good, "refused"),
        ] {
            let c = ControllerEndpoint {
                addresses,
                root: root.clone(),
                token: token.clone(),
            };
            let e = c.connect(0).await.err().unwrap().to_string();
            assert!(e.contains(text), "{text}: {e}");
        }
    }
}
