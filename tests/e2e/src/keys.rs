//! The key server's protocol by hand, from a host's network namespace: any certificate on the channel, any request, any bytes. Judges nothing.

use std::net::SocketAddr;
use std::time::Duration;

use canal_model::identity::Identity;
use canal_wire::keyrpc::{ALPN, Begin, KeyName, PORT, Request, Response, Role, split};
use canal_world::World;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::credential::{self, Credential};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a key server did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// TCP did not get there.
    Unreachable(String),
    /// The channel ended: TLS, or the protocol.
    Closed(String),
    /// It refused, by this name.
    Refused(String),
    /// It signed.
    Signature(usize),
    /// It began or went on with a handshake.
    Handshake,
    /// A chain, DER, leaf first.
    Certificates(Vec<Vec<u8>>),
    /// It lives.
    Pong,
}

/// A host with a channel to a key server that it may or may not have a right to.
#[derive(Clone, Copy)]
pub struct Requester<'r> {
    /// The world.
    pub world: &'r World,
    /// From whose network namespace.
    pub host: &'r str,
    /// The key server's host.
    pub server: &'r str,
    /// What is shown.
    pub credential: Option<&'r Credential>,
}

impl Requester<'_> {
    /// Asks for a signature over what looks like TLS 1.3's CertificateVerify of a client (RFC 8446 §4.4.3).
    pub fn sign(&self, key: KeyName) -> Answer {
        let input = [&[0x20; 64][..], b"TLS 1.3, client CertificateVerify\0", &[7; 32]].concat();
        self.ask(&Request::Sign { key, shown: None, scheme: 0x0403, deadline_ms: 3000, input: &input })
    }

    /// Asks for a key's certificates.
    pub fn chain(&self, key: KeyName) -> Answer {
        self.ask(&Request::Chain { key })
    }

    /// Asks for a handshake as a client.
    pub fn begin(&self, identity: Identity) -> Answer {
        let begin =
            Begin { expected: vec![identity.clone()], identity, role: Role::Client, alpn: vec![b"h2"], deadline_ms: 3000, bytes: &[] };
        self.ask(&Request::Begin(begin))
    }

    /// Asks whether it lives.
    pub fn ping(&self) -> Answer {
        self.ask(&Request::Ping)
    }

    fn ask(&self, request: &Request<'_>) -> Answer {
        let mut bytes = Vec::new();
        request.encode(1, &mut bytes).expect("a request that can be sent");
        self.send(&bytes)
    }

    /// Sends bytes on a new channel and gives the first answer.
    pub fn send(&self, bytes: &[u8]) -> Answer {
        let address = self.world.host(self.server).ok().and_then(|host| host.ip4()).expect("the key server's address");
        let attempt = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async { tokio::time::timeout(PATIENCE, self.exchange((address, PORT).into(), bytes)).await })
        };
        match self.world.inside(self.host, attempt).unwrap_or_else(|e| panic!("{}: {e}", self.host)) {
            Ok(answer) => answer,
            Err(_) => Answer::Unreachable("no answer in time".into()),
        }
    }

    async fn exchange(&self, to: SocketAddr, bytes: &[u8]) -> Answer {
        let tcp = match TcpStream::connect(to).await {
            Ok(tcp) => tcp,
            Err(e) => return Answer::Unreachable(e.to_string()),
        };
        let connector = TlsConnector::from(credential::client(self.credential, ALPN));
        let name = ServerName::try_from("keyserver").expect("a name");
        let mut tls = match connector.connect(name, tcp).await {
            Ok(tls) => tls,
            Err(e) => return Answer::Closed(format!("TLS: {e}")),
        };
        if let Err(e) = tls.write_all(bytes).await {
            return Answer::Closed(e.to_string());
        }
        let mut heard = Vec::new();
        loop {
            match split(&heard) {
                Ok(Some((frame, _))) => return read(frame.response()),
                Ok(None) => {}
                Err(e) => return Answer::Closed(e.to_string()),
            }
            match tls.read_buf(&mut heard).await {
                Ok(0) => return Answer::Closed("the end".into()),
                Ok(_) => {}
                Err(e) => return Answer::Closed(e.to_string()),
            }
        }
    }
}

fn read(response: Result<Response<'_>, canal_wire::keyrpc::Malformed>) -> Answer {
    match response {
        Ok(Response::Refused { name, .. }) => Answer::Refused(name.name().to_owned()),
        Ok(Response::Signature { bytes }) => Answer::Signature(bytes.len()),
        Ok(Response::Certificates { chain }) => Answer::Certificates(chain.into_iter().map(<[u8]>::to_vec).collect()),
        Ok(Response::Send { .. } | Response::Done(_)) => Answer::Handshake,
        Ok(Response::Pong) => Answer::Pong,
        Err(e) => Answer::Closed(e.to_string()),
    }
}
