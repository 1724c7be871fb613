//! A client of the key server's protocol in a host's network namespace: any certificate on the
//! channel, any request, any bytes. It does not check the results.

use std::net::SocketAddr;
use std::time::Duration;

use canal_model::identity::Identity;
use canal_timing::deadline;
use canal_wire::keyrpc::{
    ALPN, HandshakeRequest, HandshakeRole, KeyName, KeyRequest, KeyResponse, PORT, split,
};
use canal_world::World;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::credential::{self, PemCredential};

/// Timeout of a response. It only has to exceed what a quiet machine needs: in the gate, `deadline`
/// waits a minute or more.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Time that a requester gives the key server for its work. It only has to exceed what a quiet
/// machine needs: in the gate, `deadline` waits a minute or more.
const WORK_WITHIN: Duration = Duration::from_secs(3);

/// Returns [`WORK_WITHIN`] as a request carries it.
fn deadline_ms() -> u32 {
    u32::try_from(deadline(WORK_WITHIN).as_millis()).unwrap_or(u32::MAX)
}

/// Reply of a key server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyServerReply {
    /// The TCP connection failed.
    Unreachable(String),
    /// The channel ended: TLS, or the protocol.
    Closed(String),
    /// The key server refused, with this reason.
    Refused(String),
    /// The key server signed.
    Signature(usize),
    /// The key server started or continued a handshake.
    Handshake,
    /// A chain in DER, leaf first.
    Certificates(Vec<Vec<u8>>),
    /// The key server responded to a ping.
    Pong,
}

/// A host with a channel to a key server, with or without the right to use it.
#[derive(Clone, Copy)]
pub struct Requester<'r> {
    /// The world that the hosts are in.
    pub world: &'r World,
    /// Host whose network namespace is used.
    pub host: &'r str,
    /// Host of the key server.
    pub server: &'r str,
    /// Client certificate of the channel.
    pub credential: Option<&'r PemCredential>,
}

impl Requester<'_> {
    /// Requests a signature over data that looks like the CertificateVerify of a TLS 1.3 client
    /// (RFC 8446 §4.4.3).
    pub fn sign(&self, key: KeyName) -> KeyServerReply {
        let input = [
            &[0x20; 64][..],
            b"TLS 1.3, client CertificateVerify\0",
            &[7; 32],
        ]
        .concat();
        self.call(&KeyRequest::Sign {
            key,
            presented: None,
            scheme: 0x0403,
            deadline_ms: deadline_ms(),
            input: &input,
        })
    }

    /// Requests the certificate chain of a key.
    pub fn chain(&self, key: KeyName) -> KeyServerReply {
        self.call(&KeyRequest::Chain { key })
    }

    /// Requests a handshake as a client.
    pub fn begin(&self, identity: Identity) -> KeyServerReply {
        let begin = HandshakeRequest {
            expected: vec![identity.clone()],
            identity,
            role: HandshakeRole::Client,
            alpn: vec![b"h2"],
            deadline_ms: deadline_ms(),
            bytes: &[],
        };
        self.call(&KeyRequest::Begin(begin))
    }

    /// Sends a ping and returns the reply.
    pub fn ping(&self) -> KeyServerReply {
        self.call(&KeyRequest::Ping)
    }

    fn call(&self, request: &KeyRequest<'_>) -> KeyServerReply {
        let mut bytes = Vec::new();
        request
            .encode(1, &mut bytes)
            .expect("a request that can be sent");
        self.send(&bytes)
    }

    /// Sends bytes on a new channel and returns the first reply.
    pub fn send(&self, bytes: &[u8]) -> KeyServerReply {
        let address = self
            .world
            .host(self.server)
            .ok()
            .and_then(|host| host.ip4())
            .expect("the key server's address");
        let attempt = || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                tokio::time::timeout(
                    deadline(TIMEOUT),
                    self.exchange((address, PORT).into(), bytes),
                )
                .await
            })
        };
        match self
            .world
            .inside(self.host, attempt)
            .unwrap_or_else(|e| panic!("{}: {e}", self.host))
        {
            Ok(answer) => answer,
            Err(_) => KeyServerReply::Unreachable("no answer in time".into()),
        }
    }

    async fn exchange(&self, to: SocketAddr, bytes: &[u8]) -> KeyServerReply {
        let tcp = match TcpStream::connect(to).await {
            Ok(tcp) => tcp,
            Err(e) => return KeyServerReply::Unreachable(e.to_string()),
        };
        let connector = TlsConnector::from(credential::client(self.credential, ALPN));
        let name = ServerName::try_from("keyserver").expect("a name");
        let mut tls = match connector.connect(name, tcp).await {
            Ok(tls) => tls,
            Err(e) => return KeyServerReply::Closed(format!("TLS: {e}")),
        };
        if let Err(e) = tls.write_all(bytes).await {
            return KeyServerReply::Closed(e.to_string());
        }
        let mut received = Vec::new();
        loop {
            match split(&received) {
                Ok(Some((frame, _))) => return read(frame.response()),
                Ok(None) => {}
                Err(e) => return KeyServerReply::Closed(e.to_string()),
            }
            match tls.read_buf(&mut received).await {
                Ok(0) => return KeyServerReply::Closed("the end".into()),
                Ok(_) => {}
                Err(e) => return KeyServerReply::Closed(e.to_string()),
            }
        }
    }
}

fn read(response: Result<KeyResponse<'_>, canal_wire::keyrpc::FrameError>) -> KeyServerReply {
    match response {
        Ok(KeyResponse::Refused { name, .. }) => KeyServerReply::Refused(name.name().to_owned()),
        Ok(KeyResponse::Signature { bytes }) => KeyServerReply::Signature(bytes.len()),
        Ok(KeyResponse::Certificates { chain }) => {
            KeyServerReply::Certificates(chain.into_iter().map(<[u8]>::to_vec).collect())
        }
        Ok(KeyResponse::Send { .. } | KeyResponse::Done(_)) => KeyServerReply::Handshake,
        Ok(KeyResponse::Pong) => KeyServerReply::Pong,
        Err(e) => KeyServerReply::Closed(e.to_string()),
    }
}
